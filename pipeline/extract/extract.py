"""The extract stage: decodes and parses a page, extracts its title and main text, repairs and normalizes them.

Pages whose elements are nested too deeply are dropped before a parser reads them. Rows that already have a text (from
WET, JSONL or Parquet) and pages of plain text are only repaired, normalized and compared with the length limits.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from pipeline.engine.stage import CPU, EMPTY_LINES_KEPT, TITLE_FIRST, Drop, PerDocument, Row, RowFunction
from pipeline.extract.assemble import EMPTY_LINE, MARKED_LINES
from pipeline.extract.charset import DECODED, PLAIN_TEXT, decode
from pipeline.extract.extractors import (
    MIN_VISIBLE_WORDS,
    DecodedPage,
    Extraction,
    Extractor,
    ExtractorError,
    Name,
    Options,
    make_extractor,
    num_words,
    visible_text,
)
from pipeline.extract.inline import TextForm
from pipeline.extract.nesting import NESTING_REASONS, nesting_problem
from pipeline.extract.page_limits import TAGS, bearable
from pipeline.extract.unicode import repair_text
from schemas.config import Section, location
from schemas.entries import entries_of
from schemas.normalization import normalize
from schemas.tables import field

MODEL = "main_text"
"""Name by which the stage reads its model."""
MAX_TITLE_CHARS = 1_000
GUARD, EMPTY_PAGE = "_guard", "_empty_page"
"""Fields of a row: `none`, or cause and outcome of the second opinion, such as `unsure/used`; and why a page that shows
at least MIN_VISIBLE_WORDS words has no text. A row has the first if its page was extracted by `penstock`."""
LIMITED, ERRORS = "_limited", "_errors"
"""Fields of a row: the limits for which its page was not read whole, such as `tags`; and the errors of extractors on
it, such as `trafilatura/ValueError`."""
ISOLATED = "_isolated"
"""Field of a row: why an extractor in a process of its own gave no text, such as `stopped`; None for another error."""

_LINE_END = re.compile(r"\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_EMPTY_LINES = re.compile(r"\n{3,}")
MAX_EMPTY_LINES = 10
"""Maximum number of empty lines after each other in a text that keeps them, such as code."""
_MANY_EMPTY_LINES = re.compile(rf"\n{{{MAX_EMPTY_LINES + 2},}}")
_UNCLEAN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")


class ExtractConfig(Section):
    """The section `[extract]` of a recipe: how the main text of a page is extracted, and its least and most length."""

    extractor: Name = "penstock"
    """What extracts the main text. "penstock" scores the blocks of the page by a trained model. "trafilatura" and
    "resiliparse" are libraries. "all" is the whole visible text."""
    model: str = location("main-text")
    """Name in the model store, or path, of the model of the extractor "penstock"."""
    format: Literal["text", "markdown"] = "text"
    """Form of the text by "penstock" and "trafilatura", second opinions included. Both forms have lists, tables and
    code; "markdown" also marks headings, emphasis, quotes and code. The other extractors give plain text, and so is the
    whole visible text of a page on which "penstock" and its second opinion find none."""
    links: bool = False
    """True to write the URL of each link after its text, by "penstock" and "trafilatura"."""
    images: bool = False
    """True to write the alternative texts of images, and their URLs in Markdown, by "penstock" and "trafilatura". In
    plain text too, trafilatura writes links and images as Markdown does."""
    union: tuple[Name, ...] = ()
    """Two or more extractors. The first is the extractor. If its text of a page fails the rules, the text of the next
    that passes is kept. The limits of the rules then choose texts, so that changing them reads the pages again."""
    compare: Name | None = None
    """Another extractor that reads a sample of the pages too. The report shows both texts side by side."""
    compare_share: float = Field(0.01, gt=0, le=1)
    """Share of the pages in that sample, chosen by a hash of doc_id."""
    min_expected_f1: float = Field(0.45, ge=0, le=1)
    """Expected F1 of the text by "penstock" below which trafilatura gives a second opinion on the page, 0..1. About 5 %
    of real pages are below the default. The limit is at least 0.8 for a page that declares a product. With 0, only
    pages with an empty or very short text get one."""
    max_second_opinions: float = Field(1.0, ge=0, le=1)
    """Share of all pages, chosen by a hash of the page, that may get a second opinion for a low expected F1. Pages with
    an empty or very short text, about 1 %, always get one."""
    metadata: bool = True
    """True to read what a page declares about itself, such as its author and date, into columns. Takes about 0.8 ms a
    page."""
    favor_precision: bool = False
    """True to make trafilatura keep less text that is not certain, as FineWeb does."""
    unicode: Literal["keep", "repair"] = "keep"
    """"repair" makes one form of the text: it decodes entities that are left and certain mojibake, replaces no-break
    spaces and C1 characters, and removes soft hyphens and zero-width characters except where a script or an emoji needs
    them. Line ends, control characters and NFC are normalized in both cases. Takes under 2 % of the stage's time."""
    max_depth: int = Field(3_000, ge=1)
    """Maximum nesting of elements of a page [levels]; real pages have less than 100. resiliparse takes 0.2 s for 3,000
    levels and 9 s for 20,000."""
    max_undecodable: float = Field(0.01, ge=0, le=1)
    """Maximum share of U+FFFD, the character that replaces undecodable bytes, among the text's characters."""
    min_text_chars: int = Field(1, ge=1)
    """Minimum length of a text [code points]."""
    max_text_chars: int = Field(5_000_000, ge=1)
    """Maximum length of a text [code points]; the longest novels have about 3 million."""

    @property
    def extractors(self) -> tuple[Name, ...]:
        """Every extractor that reads pages, the first one first."""
        names = (*(self.union or (self.extractor,)), *((self.compare,) if self.compare else ()))
        return tuple(dict.fromkeys(names))

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured and written, as JSON values.

        `union` and `compare` are omitted if they are not used: tables that were built before they existed stay valid.
        """
        unused = {"union"} if not self.union else set()
        unused |= {"compare", "compare_share"} if self.compare is None else set()
        return {name: value for name, value in super().content().items() if name not in unused}

    @model_validator(mode="before")
    @classmethod
    def _first_of_the_union(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("union"), list | tuple) and values["union"]:
            return {"extractor": values["union"][0], **values}
        return values

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "ExtractConfig":
        problems = _union_problems(self.union, self.extractor) if "union" in self.model_fields_set else []
        if self.compare == self.extractor:
            problems.append(
                f"compare: expected another extractor than extractor = {self.extractor!r}, got the same. Name "
                "another one."
            )
        if self.compare is None and "compare_share" in self.model_fields_set:
            problems.append(
                f"compare_share: expected extract.compare, got none, so that {self.compare_share} is ignored. Remove "
                "extract.compare_share."
            )
        needed = dict.fromkeys(sorted(self.model_fields_set & PENSTOCK_SETTINGS), "penstock")
        needed |= {"favor_precision": "trafilatura"} if self.favor_precision else {}
        got = repr(self.extractor) if len(self.extractors) == 1 else ", ".join(map(repr, self.extractors))
        problems += [
            f"{name}: expected extractor = {owner!r}, got {got}, which ignores it. Remove extract.{name}."
            for name, owner in needed.items()
            if owner not in self.extractors
        ]
        problems += self._form_problems()
        if problems:
            raise ValueError("\n  ".join(problems))
        return self

    def _form_problems(self) -> list[str]:
        """Return the problems of the settings of form: every extractor of the recipe must follow them."""
        plain = [name for name in self.extractors if name not in FORMING]
        chosen = [name for name in FORM_SETTINGS if getattr(self, name) != type(self).model_fields[name].default]
        return [
            f"{name}: expected only extractors that follow it, {' and '.join(map(repr, FORMING))}, got "
            f"{', '.join(map(repr, plain))}. Remove extract.{name}."
            for name in chosen
            if plain
        ]


PENSTOCK_SETTINGS = frozenset(("min_expected_f1", "max_second_opinions"))
"""Settings that only the extractor "penstock" uses."""
FORM_SETTINGS = ("format", "links", "images")
"""Settings of the form of a text."""
FORMING = ("penstock", "trafilatura")
"""Extractors that follow the settings of form; the others give plain text only."""
NEEDS_A_RUN = ("union", "compare", "compare_share")
"""Settings that concern several extractors, so that only a run uses them; its fingerprint has them where they are set.
"""


def _union_problems(union: Sequence[str], extractor: str) -> list[str]:
    problems = []
    if len(union) < 2:
        problems.append(f"union: expected at least two extractors, got {[*union]}. Add one, or remove extract.union.")
    problems += [
        f"union: expected each extractor once, got {name!r} more than once. Remove one."
        for name in dict.fromkeys(union)
        if union.count(name) > 1
    ]
    if union and extractor != union[0]:
        problems.append(
            f"union: expected extractor = {extractor!r} as its first, got {union[0]!r}. Remove extract.extractor."
        )
    return problems


def config_of_extractor(config: ExtractConfig, name: Name) -> ExtractConfig:
    """Return the section of a recipe in which this extractor is the only one."""
    return config.model_copy(update={"extractor": name, "union": (), "compare": None})


def models(config: ExtractConfig) -> dict[str, str]:
    """Return the model that the extractors need."""
    return {MODEL: config.model} if "penstock" in config.extractors else {}


def make_extract(config: ExtractConfig, models: Mapping[str, str], isolated: bool = False) -> RowFunction:
    """Return the function that adds charset, title, text, its counts and metadata to a row, or drops the page.

    The text is that of `config.extractor`. With `isolated`, trafilatura runs in the process of second opinions.
    """
    form = TextForm(markdown=config.format == "markdown", links=config.links, images=config.images)
    extractor = make_extractor(
        config.extractor,
        Options(
            form,
            config.favor_precision,
            config.metadata,
            Path(models[MODEL]) if MODEL in models else None,
            config.min_expected_f1,
            config.max_second_opinions,
            isolated,
        ),
    )

    def extract(row: Row) -> Drop | None:
        row.update(dict.fromkeys(NEW_COLUMNS))
        row.setdefault("title", None)
        is_page = row["text"] is None
        if is_page:
            drop = _read_page(row, config.max_depth, extractor)
            if drop is not None:
                return drop
        if config.unicode == "repair":
            _repair(row, has_entities=not is_page or row.get("mime") != PLAIN_TEXT)
        row["title"] = " ".join(normalize_text(row["title"] or "").split())[:MAX_TITLE_CHARS] or None
        text = normalize_text(row["text"], bool(row.get(EMPTY_LINES_KEPT)))
        text = text.replace(EMPTY_LINE, "") if is_page or row.get(MARKED_LINES) else text
        row["text"] = text = with_title(row["title"], text) if row.get(TITLE_FIRST) and row["title"] else text
        row["num_chars"], row["replacement_chars"] = len(text), text.count("\ufffd")
        drop = _out_of_bounds(row, config)
        if drop is not None and drop.rule == "no_text" and is_page:
            _note_empty_page(row)
        return drop

    return extract


def with_title(title: str, text: str) -> str:
    """Return the text with the title as its first line, followed by an empty line, unless it begins with the title."""
    first = text[: 2 * MAX_TITLE_CHARS].partition("\n")[0].lstrip("# ")
    return text if not text or " ".join(first.split()).casefold() == title.casefold() else f"{title}\n\n{text}"


def _repair(row: Row, has_entities: bool) -> None:
    """Repair the text and the title of a row, and add the counts of the text's repairs."""
    repaired = repair_text(row["text"], has_entities)
    row["text"], row["unicode_repairs"], row["mojibake"] = repaired.text, repaired.repairs, repaired.mojibake
    if row["title"]:
        row["title"] = repair_text(row["title"], has_entities).text


def _read_page(row: Row, max_depth: int, extractor: Extractor) -> Drop | None:
    """Set charset, title and text of the row from its page. Return a Drop if that is not possible."""
    payload: bytes = row["_payload"]
    page = row.pop(DECODED, None) or decode(payload, row["_http_charset"])
    row["charset"], row["charset_from"] = page.charset, page.origin
    if row.get("mime") == PLAIN_TEXT:
        row["text"] = page.text
        return None
    drop = nesting_problem(payload, page.text, max_depth)
    if drop is not None:
        return drop
    date = row.get("date")
    html, limits = bearable(page.text)
    try:
        found = extractor(DecodedPage(html, row.get("url"), date.date() if date is not None else None))
    except ExtractorError as error:
        row[ISOLATED], row[LIMITED], row[ERRORS] = error.isolated, limits, error.errors
        _note_opinion(row, error)
        _note_empty_page(row)
        return Drop("parser_error")
    row[LIMITED], row[ERRORS] = (*limits, *((TAGS,) if found.is_cut else ())), found.errors
    _note_opinion(row, found)
    row["title"], row["text"], row["extracted_by"] = found.title, found.text, found.extracted_by
    row["expected_f1"] = found.expected_f1
    if found.metadata is not None:
        row.update((name, getattr(found.metadata, name)) for name in METADATA)
    return None


def _note_opinion(row: Row, found: Extraction | ExtractorError) -> None:
    """Write down for the counts why there was a second opinion, and what became of it."""
    cause, _, outcome = (found.second_opinion or "").partition(": ")
    if found.opinion_cpu is not None:
        row.setdefault(CPU, {})["second_opinion"] = found.opinion_cpu
    if cause:
        row["second_opinion"], row[GUARD] = found.second_opinion, f"{cause}/{outcome or 'used'}"
    elif isinstance(found, Extraction) and found.expected_f1 is not None:
        row[GUARD] = "none"


def _note_empty_page(row: Row) -> None:
    """Write down for the counts why a page without a text has none, if it shows many words."""
    if row.get("mime") != PLAIN_TEXT:
        page = decode(row["_payload"], row["_http_charset"]).text
        if num_words(visible_text(bearable(page).html)) >= MIN_VISIBLE_WORDS:
            row[EMPTY_PAGE] = row["second_opinion"] or ("short_text" if row["text"] else "no_text")


def _out_of_bounds(row: Row, config: ExtractConfig) -> Drop | None:
    size = row["num_chars"]
    if size < config.min_text_chars:
        return Drop("no_text", size, config.min_text_chars)
    if size > config.max_text_chars:
        return Drop("text_too_long", size, config.max_text_chars)
    undecodable = row["replacement_chars"] / size
    if undecodable > config.max_undecodable:
        return Drop("undecodable", undecodable, config.max_undecodable)
    return None


def normalize_text(text: str, keep_empty_lines: bool = False) -> str:
    r"""Return the text in NFC, with `\n` and `\t` as its only control characters.

    Line ends of all kinds become `\n`. Spaces at line ends are removed. Several empty lines become one, or with
    `keep_empty_lines`, at most MAX_EMPTY_LINES. Lone surrogates become U+FFFD.
    """
    if _UNCLEAN.search(text):
        # Lone surrogates are valid in JSON but not in UTF-8.
        text = _SURROGATE.sub("\ufffd", _CONTROL.sub("", _LINE_END.sub("\n", text)))
    text = "\n".join(map(str.rstrip, text.split("\n"))).strip()
    if "\n\n\n" in text:
        if keep_empty_lines:
            text = _MANY_EMPTY_LINES.sub("\n" * (MAX_EMPTY_LINES + 1), text)
        else:
            text = _EMPTY_LINES.sub("\n\n", text)
    return normalize("NFC", text)


METADATA_COLUMNS = (
    field("author", pa.string(), "names of the authors, joined by commas; null: none declared or visible"),
    field("date_published", pa.date32(), "day of publication as the page declares it; null: none in range", "days"),
    field("date_modified", pa.date32(), "day of the last change as the page declares it; null as above", "days"),
    field("canonical_url", pa.string(), "canonical URL that the page declares, absolute; null: none"),
    field("site_name", pa.string(), "name of the site that the page declares; null: none"),
    field("description", pa.string(), "summary that the page declares; null: none"),
    field("declared_language", pa.string(), "language that the page declares, such as pt; null: none or several"),
    field("page_type", pa.string(), "kind of page by og:type or schema.org, such as article; null: none declared"),
    field("declared_licence", pa.string(), "licence that the page declares, such as CC-BY-4.0, or its URL; null: none"),
)
METADATA = tuple(column.name for column in METADATA_COLUMNS)
COLUMNS = (
    field(
        "unicode_repairs",
        entries_of(pa.int32()),
        "repairs of the text by kind; null: extract.unicode is not repair",
        "occurrences",
    ),
    field(
        "mojibake",
        pa.int32(),
        "sequences that look like mojibake and were left, because a repair is uncertain; null as above",
        "sequences",
    ),
    field("replacement_chars", pa.int32(), "U+FFFD in the text before cuts", "code points"),
    field("extracted_by", pa.string(), "extractor that the text is from; null: the text was not extracted from HTML"),
    field("expected_f1", pa.float32(), "F1 of the text that penstock expects; null: another extractor", "0..1"),
    field(
        "second_opinion",
        pa.string(),
        "why trafilatura was to be asked too: empty, short, unsure or error, and why it gave no text; null: it was not",
    ),
    *METADATA_COLUMNS,
)
NEW_COLUMNS = ("charset", "charset_from", "num_chars", *(column.name for column in COLUMNS))

EXTRACT = PerDocument(
    name="extract",
    version=5,
    config=ExtractConfig,
    reads=("_payload", "_http_charset", "mime", "text", "url", "date"),
    adds=("title", "text", *NEW_COLUMNS),
    reasons={
        **NESTING_REASONS,
        "parser_error": "the parser or extractor refused the page",
        "no_text": "fewer than min_text_chars characters of main text",
        "text_too_long": "the text has more than max_text_chars characters",
        "undecodable": "more than max_undecodable of the text's characters are U+FFFD",
    },
    make=make_extract,
    models=models,
    ends=True,
    columns=COLUMNS,
)
