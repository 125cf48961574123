"""The stage `paragraphs`: paragraphs of a text are cut if their perplexity or their length is out of range.

A paragraph is a line of the text that has words, as in CCNet. The step `scores` stores spans and perplexities of
paragraphs. All decisions compare these columns with limits, so other limits need no new scores. Cuts are spans of the
stored text. Source of perplexity by paragraph: Wenzek et al. 2020 (CCNet), arXiv 1911.00359, section 3.4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import model_validator

from pipeline.engine.rules import KEPT, languages_of
from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Quantile, Row, RowFunction
from pipeline.perplexity.model import line_spans
from pipeline.perplexity.stage import NGRAM, PerplexityConfig, largest_below
from schemas.config import Recipe, Section, decision
from schemas.errors import ConfigError, ContractError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SPANS, PERPLEXITIES = "paragraphs", "paragraph_perplexity"
NEEDS = (SPANS, PERPLEXITIES, "language")
"""The stored columns that decide which paragraphs are cut."""
LOW_CUT, HIGH_CUT = "paragraph_low", "paragraph_high"
"""Names of the quantiles of a language's paragraphs that `min_quantile` and `max_quantile` set."""
HIGH, LOW, LONG, SHORT = "perplexity_high", "perplexity_low", "too_long", "too_short"
CAUSES = (HIGH, LOW, LONG, SHORT)
"""Why a paragraph is cut. A paragraph with several causes has the first one."""
LITTLE_LEFT = "little_left"

Limits = Mapping[str, Mapping[str, float]]
"""Cause → limit by language; EVERY is for all languages without a limit of their own. All limits are inclusive."""
Cut = tuple[int, int, str]
"""(start, end, cause) of a span that is cut [code points]."""


class ParagraphsConfig(Section):
    """Limits of the perplexity and the length of paragraphs; a paragraph that is out of range is cut from its document.

    A paragraph is a line of the text that has words. Its perplexity is that of the model in `[perplexity]`. Without
    limits, no paragraph is cut. Cuts are made in the documents that deduplication keeps. Signals, other scores and
    copies are those of the text before these cuts.
    """

    every_document: bool = False
    """Whether the step `scores` also stores the paragraphs of documents without a perplexity, so that limits of the
    length apply to them. A run without models then has the step `scores`, too. It changes no perplexity."""
    min_perplexity: dict[str, float] = decision({})
    """Minimum perplexity of a paragraph, by language; the key "*" is for all languages without a limit of their own.
    Empty = no limit."""
    max_perplexity: dict[str, float] = decision({})
    """Maximum perplexity of a paragraph, by language; the key "*" is for all languages without a limit of their own.
    Empty = no limit."""
    min_quantile: float | None = decision(None, gt=0, lt=1)
    """Quantile of the perplexities of a language's paragraphs, 0..1. Paragraphs below it are cut: 0.05 cuts about 5 %.
    The paragraphs are those of all measured documents, also of those that a rule drops. Languages in `min_perplexity`
    have that limit instead. None = no limit."""
    max_quantile: float | None = decision(None, gt=0, lt=1)
    """Quantile of the perplexities of a language's paragraphs, 0..1. Paragraphs above it are cut: 0.95 cuts about 5 %.
    The paragraphs are those of all measured documents, also of those that a rule drops. Languages in `max_perplexity`
    have that limit instead. None = no limit."""
    min_chars: int | None = decision(None, ge=1)
    """Minimum length of a paragraph [code points]; None = no limit. Headings and list items are short paragraphs."""
    max_chars: int | None = decision(None, ge=1)
    """Maximum length of a paragraph [code points]; None = no limit."""
    min_left_chars: int = decision(1, ge=1)
    """Minimum total length of the paragraphs that the cuts leave of a document [code points]. A document with less is
    dropped; a document from which nothing is cut is not."""

    @property
    def by_perplexity(self) -> list[str]:
        """The names of the limits of the perplexity that are set."""
        names = ("min_perplexity", "max_perplexity", "min_quantile", "max_quantile")
        return [name for name in names if getattr(self, name)]

    @property
    def by_length(self) -> list[str]:
        """The names of the limits of the length that are set."""
        return [name for name in ("min_chars", "max_chars") if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _consistent(self) -> "ParagraphsConfig":
        problems = [*self._reversed()]
        for name in ("min_perplexity", "max_perplexity"):
            problems += [
                f"{name}.{language}: expected a perplexity of at least 1, got {limit}. Set it to at least 1"
                for language, limit in sorted(getattr(self, name).items())
                if limit < 1
            ]
            quantile = name.replace("perplexity", "quantile")
            if EVERY in getattr(self, name) and getattr(self, quantile) is not None:
                problems.append(
                    f'{quantile} would be ignored, because {name} has a limit for every language, "{EVERY}". Remove '
                    "one of them"
                )
        if "min_left_chars" in self.model_fields_set and not (self.by_perplexity or self.by_length):
            problems.append("min_left_chars would be ignored without a limit of paragraphs. Remove it or add a limit")
        if problems:
            raise ValueError("; ".join(problems) + ".")
        return self

    def _reversed(self) -> list[str]:
        """Return a problem for each minimum that is above its maximum."""
        low, high = self.min_perplexity, self.max_perplexity
        languages = [*sorted({*low, *high} - {EVERY}), *({EVERY} & {*low} & {*high})]
        pairs = [
            (f"min_perplexity for {language}", "max_perplexity", low.get(language, low.get(EVERY)), limit)
            for language in languages
            if (limit := high.get(language, high.get(EVERY))) is not None
        ]
        pairs += [
            (f"min_{name}", f"max_{name}", getattr(self, f"min_{name}"), getattr(self, f"max_{name}"))
            for name in ("quantile", "chars")
        ]
        return [
            f"{lower}: expected at most {upper} = {most:g}, got {least:g}. Lower it"
            for lower, upper, least, most in pairs
            if least is not None and most is not None and least > most
        ]


def cuts_paragraphs(recipe: Recipe) -> bool:
    """Return True if the recipe has a limit of paragraphs, so that the step `paragraphs` runs."""
    config = recipe.section("paragraphs", ParagraphsConfig)
    return bool(config.by_perplexity or config.by_length)


def stores_paragraphs(recipe: Recipe) -> bool:
    """Return True if the paragraphs of every document are stored, those without a language model included."""
    return recipe.section("paragraphs", ParagraphsConfig).every_document


def check_paragraphs(recipe: Recipe) -> None:
    """Raise ConfigError if a limit of paragraphs is set but the step `scores` does not store what it is compared with.

    All problems are in one message.
    """
    config = recipe.section("paragraphs", ParagraphsConfig)
    perplexity = recipe.section("perplexity", PerplexityConfig)
    problems = []
    if perplexity.scorer is None:
        fix = "Set perplexity.scorer"
        problems += [
            f"paragraphs.{name}: expected perplexities of paragraphs, got no perplexity.scorer. {fix}."
            for name in config.by_perplexity
        ]
        problems += [
            f"paragraphs.{name}: expected stored paragraphs, got no perplexity.scorer and every_document = false. "
            "Set paragraphs.every_document=true."
            for name in config.by_length
            if not config.every_document
        ]
    if perplexity.scorer == NGRAM:
        known = {*perplexity.models, EVERY}
        problems += [
            f"paragraphs.{name}: expected languages that perplexity.models has, got {', '.join(unknown)}. Remove them, "
            "or add their models."
            for name in ("min_perplexity", "max_perplexity")
            if (unknown := sorted(getattr(config, name).keys() - known))
        ]
    if problems:
        raise ConfigError("\n".join(problems))


# The decision: stored columns and limits → the cause for which each paragraph is cut.


def paragraph_limits(config: ParagraphsConfig, cutoffs: Cutoffs) -> dict[str, dict[str, float]]:
    """Return the limits in force, by cause; a cause without a limit is left out.

    `cutoffs` has the quantiles LOW_CUT and HIGH_CUT by language. A limit of the recipe replaces that of a quantile.
    """
    limits: dict[str, dict[str, float]] = {
        HIGH: {**largest_below(cutoffs.get(HIGH_CUT, {})), **config.max_perplexity},
        LOW: {**cutoffs.get(LOW_CUT, {}), **config.min_perplexity},
        LONG: {} if config.max_chars is None else {EVERY: config.max_chars},
        SHORT: {} if config.min_chars is None else {EVERY: config.min_chars},
    }
    return {cause: by_language for cause, by_language in limits.items() if by_language}


@dataclass(frozen=True, eq=False)
class JudgedParagraphs:
    """The paragraphs of a batch of documents and why each is cut; the shape of all arrays is (paragraphs,)."""

    rows: Ints
    """Number of the document in the batch."""
    starts: Ints
    """Start of the paragraph in the text after cuts [code points]."""
    ends: Ints
    """End of the paragraph, without its line end [code points]."""
    causes: Ints
    """Index of the cause in CAUSES; KEPT if the paragraph is kept."""


def judge_paragraphs(limits: Limits, batch: pa.RecordBatch) -> JudgedParagraphs:
    """Return the paragraphs of a batch that has the columns NEEDS, with the cause for which each is cut.

    Perplexities and their limits are compared as float32, as they are stored. A paragraph without a perplexity is cut
    only for its length. Raises ContractError if a document has not one perplexity for each paragraph.
    """
    spans = batch.column(SPANS)
    counts = pc.fill_null(pc.list_value_length(spans), 0).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(batch.num_rows), counts)
    flat = spans.flatten()
    starts, ends = (pc.struct_field(flat, name).to_numpy().astype(np.int64) for name in ("start", "end"))
    lengths = (ends - starts).astype(np.float64)
    perplexities = _perplexities(batch, counts)
    numbers, languages = languages_of(batch)
    causes = np.full(len(rows), KEPT)
    for index in reversed(range(len(CAUSES))):
        by_language = limits.get(CAUSES[index], {})
        limit = np.array([by_language.get(name, by_language.get(EVERY, np.nan)) for name in languages], np.float64)
        if CAUSES[index] in (HIGH, LOW):
            values, limit = perplexities, limit.astype(np.float32).astype(np.float64)
        else:
            values = lengths
        of_paragraph = limit[numbers][rows]
        is_broken = values > of_paragraph if CAUSES[index] in (HIGH, LONG) else values < of_paragraph
        causes[is_broken] = index
    return JudgedParagraphs(rows, starts, ends, causes)


def _perplexities(batch: pa.RecordBatch, counts: Ints) -> Floats:
    """Return the perplexity of each paragraph (paragraphs,); NaN for a document without perplexities."""
    column = batch.column(PERPLEXITIES)
    is_scored = column.is_valid().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    if (lengths[is_scored] != counts[is_scored]).any():
        raise ContractError(
            f"scores: expected a perplexity for each of {counts[is_scored].sum():,} paragraphs, got "
            f"{lengths.sum():,}. Run `penstock run` again: it rebuilds the tables that are out of date."
        )
    values = np.full(int(counts.sum()), np.nan)
    values[np.repeat(is_scored, counts)] = column.flatten().to_numpy(zero_copy_only=False)
    return values


def chars_left(limits: Limits, batch: pa.RecordBatch) -> Floats:
    """Return the total length of the paragraphs that are kept of each document (documents,) [code points].

    NaN for a document from which no paragraph is cut.
    """
    judged = judge_paragraphs(limits, batch)
    is_cut = judged.causes != KEPT
    lengths = np.where(is_cut, 0, judged.ends - judged.starts)
    left = np.bincount(judged.rows, weights=lengths, minlength=batch.num_rows)
    has_cuts = np.bincount(judged.rows[is_cut], minlength=batch.num_rows) > 0
    return np.where(has_cuts, left, np.nan)


# The cuts: spans of the text.


def paragraph_cuts(text: str, causes: Mapping[int, str]) -> list[Cut]:
    """Return the spans to cut from a text, sorted and disjoint, for paragraphs given as start → cause.

    A paragraph is cut with its line end. Of the blank lines around consecutive cut paragraphs one stays, so that at
    most one paragraph break is left; none stays at the ends of the text. All other characters stay.
    """
    lines: list[tuple[int, int]] = [(start, end) for start, end in line_spans(text).tolist()]
    cuts: list[Cut] = []

    def is_open(number: int) -> bool:
        start, end = lines[number]
        return start in causes or not text[start:end].strip()

    for of_run, group in groupby(range(len(lines)), is_open):
        run = list(group)
        if of_run and any(lines[number][0] in causes for number in run):
            cuts += _cuts_of_run(lines, run, len(text), causes)
    return cuts


def _cuts_of_run(
    lines: Sequence[tuple[int, int]], run: Sequence[int], size: int, causes: Mapping[int, str]
) -> list[Cut]:
    """Return the cuts of consecutive lines `run` that are cut or blank, one or two for each line that is cut."""
    is_first, is_last = run[0] == 0, run[-1] == len(lines) - 1
    # at the end of the text, the line end before the run is cut, too
    begin = lines[run[0]][0] - (is_last and not is_first)
    end = size if is_last else lines[run[-1] + 1][0]
    starts = [lines[number][0] for number in run if lines[number][0] in causes]
    edges = [begin, *starts[1:], end]
    blanks = [number for number in run if lines[number][0] not in causes]
    stays = (end, end)  # the line that stays as the paragraph break
    if blanks and not (is_first or is_last):
        stays = (lines[blanks[0]][0], lines[blanks[0] + 1][0])
    return [
        (low, high, causes[start])
        for start, left, right in zip(starts, edges, edges[1:])
        for low, high in ((left, min(right, stays[0])), (max(left, stays[1]), right))
        if low < high
    ]


# The stage.


def _make(config: ParagraphsConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that adds the spans of paragraphs to the rows without a perplexity, with `every_document`."""

    def paragraphs(row: Row) -> None:
        if config.every_document and row.get(PERPLEXITIES) is None and row["_body"] is not None:
            body = row["_body"]
            spans = [(start, end) for start, end in line_spans(body).tolist() if body[start:end].strip()]
            row[SPANS] = [{"start": start, "end": end} for start, end in spans]

    return paragraphs


def _checks(config: ParagraphsConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    limits = paragraph_limits(config, cutoffs)
    if not (config.by_perplexity or config.by_length):
        return ()
    value: Callable[[pa.RecordBatch], Floats] = partial(chars_left, limits)
    return (Check(LITTLE_LEFT, "paragraph_chars_left", "min_left_chars", {EVERY: config.min_left_chars}, value, NEEDS),)


def _quantiles(config: ParagraphsConfig) -> Sequence[Quantile]:
    shares = ((LOW_CUT, config.min_quantile), (HIGH_CUT, config.max_quantile))
    return [
        Quantile(name, PERPLEXITIES, share, keeps_highest=name == LOW_CUT)
        for name, share in shares
        if share is not None
    ]


PARAGRAPHS = PerDocument(
    name="paragraphs",
    version=2,
    config=ParagraphsConfig,
    reads=("_body", PERPLEXITIES),
    adds=(SPANS,),
    reasons={},
    make=_make,
    again="rest",
    ends=False,
    verdicts={LITTLE_LEFT: "the paragraphs that the cuts leave are shorter than min_left_chars in total"},
    checks=_checks,
    quantiles=_quantiles,
)
