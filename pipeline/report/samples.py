"""Documents on the page of a report, with personal data replaced: kept ones, dropped ones, and those near a limit.

The choice is the same in every report of a run: among the rows that the report reads, the documents whose doc_id has
the smallest hash, or whose value is nearest to a limit. Text is returned only after personal data in it has been
replaced.
"""

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import EVERY, Row
from pipeline.models import ModelsConfig, ensure_model
from pipeline.pii.stage import NER, PiiConfig, Redactor, model_files, name_finder
from pipeline.pii.types import DEFAULT_TYPES, TYPE_NAMES
from pipeline.report.corpus import OTHER_LANGUAGES, WORDS, CorpusCounts, Kept, limited_columns
from pipeline.report.facts import RunFacts
from pipeline.report.judged import Floats, JudgedPart, choose_parts, read_judged
from pipeline.report.rights import rights_counts
from pipeline.rights.protocols import COLUMNS as RIGHTS_COLUMNS
from schemas.errors import ConfigError
from schemas.ids import shuffle_key
from schemas.older_tables import read_columns
from schemas.text import printable_line

PER_RULE = 3
"""Number of random samples of the documents that each rule dropped."""
PER_LANGUAGE = 3
"""Number of random samples of the kept documents of each source and language."""
MAX_GROUPS = 24
"""Maximum number of pairs of source and language with samples; those with the most documents are shown."""
PER_SIDE = 2
"""Number of documents on each side of a limit."""
SHOWN_CHARS = 300
READ_CHARS = 4000
"""Number of characters in which personal data is searched: far more than are shown, so that no value is cut before
redaction where it would be shown."""
LONG_CHARS = 3000
"""Number of characters of a kept sample that can be expanded."""


@dataclass(frozen=True)
class DroppedSample:
    """One dropped document with personal data replaced."""

    url: str
    title: str
    text: str
    """The first characters of the text; empty if there is no text."""
    why_empty: str
    """The reason why `text` is empty; empty if it is not."""
    language: str
    value: float | None
    limit: float | None


@dataclass(frozen=True)
class KeptSample:
    """One kept document as it is in `clean`, with all types of personal data replaced."""

    doc_id: str
    url: str
    title: str
    lines: tuple[str, ...]
    """The lines of the first LONG_CHARS characters."""
    is_cut: bool
    """True if the document is longer."""
    chars: int


@dataclass(frozen=True)
class KeptGroup:
    """Random samples of the kept documents of one source and language."""

    source: str
    language: str
    documents: int
    """Number of kept documents of the group among the rows that were read."""
    samples: tuple[KeptSample, ...]


@dataclass(frozen=True)
class NearLimit:
    """The documents nearest to a limit: dropped by the rule, and kept. The nearest is first."""

    dropped: tuple[DroppedSample, ...]
    kept: tuple[DroppedSample, ...]


@dataclass(frozen=True)
class DrawnSamples:
    """Samples of documents, drawn from the rows that the report reads."""

    by_rule: Mapping[str, list[DroppedSample]]
    """Random samples of dropped documents, by `stage/rule`."""
    rows_read: int
    """Number of rows of `documents` that were searched for samples."""
    refused: str = ""
    """The reason if no sample can be shown, else empty."""
    kept: tuple[KeptGroup, ...] = ()
    near: Mapping[str, NearLimit] = field(default_factory=dict)
    """Documents near the limit of each check that dropped a document, by the name of the check."""


@dataclass(frozen=True)
class ExampleCandidate:
    """A document that may be shown. Candidates are sorted by `distance` and `key`."""

    distance: float
    """Distance from a limit, relative to the limit; 0 for a random sample."""
    key: int
    part: int
    row: Row


@dataclass(frozen=True)
class LimitCheck:
    """A comparison of a column with limits by language, as the manifest of `verdicts` has it."""

    name: str
    column: str
    is_minimum: bool
    limits: Mapping[str, float]
    is_number: bool = True
    """True if the column is a single number, not a list of entries."""
    sources: frozenset[str] | None = None
    """The sources whose documents are checked; None: all."""

    def limits_of(self, languages: Sequence[str | None], sources: Sequence[str | None]) -> Floats:
        """Return the limit for a document in each language and of each source; NaN where the check does not apply."""
        every = self.limits.get(EVERY, np.nan)
        known = {language: self.limits.get(language or EVERY, every) for language in set(languages)}
        found = np.array([known[language] for language in languages], np.float32).astype(np.float64)
        if self.sources is not None:
            found[[source not in self.sources for source in sources]] = np.nan
        return found


@dataclass
class SampleChoice:
    """The candidates so far: a few for each rule, limit, and pair of source and language; `add` adds one part."""

    checks: Sequence[LimitCheck]
    dropped: dict[str, list[ExampleCandidate]] = field(default_factory=dict)
    kept: dict[tuple[str, str], list[ExampleCandidate]] = field(default_factory=dict)
    near: dict[tuple[str, bool], list[ExampleCandidate]] = field(default_factory=dict)
    """(name of the check, whether kept) → candidates."""

    def add(self, part: JudgedPart) -> None:
        """Add the rows of one part, and keep the best candidates."""
        identifiers = part.strings("doc_id")
        keys = np.array([shuffle_key(0, identifier) for identifier in identifiers], np.int64)
        languages, sources = part.strings("language"), part.strings("source")
        rules: dict[str, list[int]] = {}
        groups: dict[tuple[str, str], list[int]] = {}
        is_kept = part.kept
        for row, (stage, rule, *_) in enumerate(part.verdicts):
            if stage is not None:
                rules.setdefault(f"{stage}/{rule}", []).append(row)
            elif is_kept[row]:
                groups.setdefault((sources[row] or "", languages[row] or OTHER_LANGUAGES), []).append(row)
        for name, rows in rules.items():
            best = _smallest(rows, np.zeros(len(rows)), keys, PER_RULE)
            _merge(self.dropped.setdefault(name, []), _candidates(part, keys, best), PER_RULE)
        for group, rows in groups.items():
            best = _smallest(rows, np.zeros(len(rows)), keys, PER_LANGUAGE)
            _merge(self.kept.setdefault(group, []), _candidates(part, keys, best), PER_LANGUAGE)
        for check in self.checks:
            self._add_near(part, keys, check, rules.get(check.name.partition(" ")[0], []))

    def _add_near(
        self, part: JudgedPart, keys: npt.NDArray[np.int64], check: LimitCheck, dropped: Sequence[int]
    ) -> None:
        if dropped:
            values, limits = (
                np.array([part.verdicts[row][column] for row in dropped], np.float64) for column in (2, 3)
            )
            distances = _distances(values, limits)
            best = _smallest(dropped, distances, keys, PER_SIDE)
            _merge(self.near.setdefault((check.name, False), []), _candidates(part, keys, best), PER_SIDE)
        if not check.is_number:
            return
        values, limits = part.numbers(check.column), check.limits_of(part.strings("language"), part.strings("source"))
        # No distance is relative to a limit of zero, and zero is the value of nearly every document.
        rows = np.flatnonzero(part.kept & ~np.isnan(values) & ~np.isnan(limits) & (limits != 0))
        best = _smallest(rows.tolist(), _distances(values[rows], limits[rows]), keys, PER_SIDE)
        judged = [
            (distance, row, {"drop_value": float(values[row]), "drop_limit": float(limits[row])})
            for distance, row in best
        ]
        candidates = _candidates(part, keys, [(distance, row) for distance, row, _ in judged])
        for candidate, (_, _, measured) in zip(candidates, judged, strict=True):
            candidate.row.update(measured)
        _merge(self.near.setdefault((check.name, True), []), candidates, PER_SIDE)


def _distances(values: Floats, limits: Floats) -> Floats:
    distances: Floats = np.abs(values - limits) / np.where(limits == 0, 1.0, np.abs(limits))
    return distances


def _smallest(
    rows: Sequence[int], distances: Floats, keys: npt.NDArray[np.int64], count: int
) -> list[tuple[float, int]]:
    """Return (distance, row) of the `count` rows with the smallest distance; equal distances are ordered by key."""
    if not rows:
        return []
    numbers = np.asarray(rows, np.int64)
    order = np.lexsort((keys[numbers], distances))[:count]
    return [(float(distances[index]), int(numbers[index])) for index in order if not np.isnan(distances[index])]


def _candidates(
    part: JudgedPart, keys: npt.NDArray[np.int64], best: Sequence[tuple[float, int]]
) -> list[ExampleCandidate]:
    shown = part.table.select(["doc_id", "url", "language", "num_chars"])
    candidates: list[ExampleCandidate] = []
    for distance, number in best:
        (row,) = shown.slice(number, 1).to_pylist()
        row |= {"drop_value": part.verdicts[number][2], "drop_limit": part.verdicts[number][3]}
        candidates.append(ExampleCandidate(distance, int(keys[number]), part.number, row))
    return candidates


def _merge(held: list[ExampleCandidate], more: Iterable[ExampleCandidate], count: int) -> None:
    held.extend(more)
    held.sort(key=lambda candidate: (candidate.distance, candidate.key))
    del held[count:]


def survey(facts: RunFacts) -> tuple[Kept | None, DrawnSamples]:
    """Read rows of a run once: return what it kept, and samples. What was kept is None if there is no table `clean`."""
    reading = choose_parts(facts)
    counts = CorpusCounts(limited_columns(facts), facts.columns, rights_counts(facts))
    selection = SampleChoice(_checks(facts))
    for part in read_judged(facts, reading, [*counts.columns, *WORDS, *RIGHTS_COLUMNS]):
        counts.add(part)
        selection.add(part)
    counts.add_tokens(facts)
    kept = counts.result(reading) if "clean" in facts.tables else None
    return kept, _drawn(facts, selection, counts, reading.rows)


def draw_samples(facts: RunFacts) -> DrawnSamples:
    """Return samples of the kept and dropped documents, and of those near each limit."""
    return survey(facts)[1]


def _checks(facts: RunFacts) -> list[LimitCheck]:
    return [
        LimitCheck(
            name,
            check["column"],
            check["side"] == "min",
            check["limits"],
            facts.is_number(check["column"]),
            frozenset(check["sources"]) if "sources" in check else None,
        )
        for name, check in facts.figures("verdicts").get("limits", {}).items()
    ]


def _drawn(facts: RunFacts, selection: SampleChoice, counts: CorpusCounts, rows_read: int) -> DrawnSamples:
    if "documents" not in facts.tables or "text" not in facts.tables:
        return DrawnSamples({}, 0)
    try:
        redactor = redactor_of(facts)
    except (OSError, zipfile.BadZipFile, ConfigError):
        return DrawnSamples({}, 0, "the name recognition model of the run is not at the path in its recipe")
    near = {name: pair for name, pair in _near_pairs(selection).items() if pair[0]}
    shown = [*selection.dropped.values(), *(side for pair in near.values() for side in pair)]
    texts = _texts(facts, "text", [(one.part, one.row["doc_id"]) for group in shown for one in group])

    def sample(candidate: ExampleCandidate) -> DroppedSample:
        return _sample(candidate.row, texts.get(candidate.row["doc_id"], {}), redactor)

    return DrawnSamples(
        {name: [sample(one) for one in group] for name, group in selection.dropped.items()},
        rows_read,
        kept=tuple(_kept_groups(facts, selection, counts, redactor)),
        near={name: NearLimit(*(tuple(map(sample, side)) for side in pair)) for name, pair in near.items()},
    )


def _near_pairs(selection: SampleChoice) -> dict[str, tuple[list[ExampleCandidate], list[ExampleCandidate]]]:
    return {
        check.name: (selection.near.get((check.name, False), []), selection.near.get((check.name, True), []))
        for check in selection.checks
    }


def _kept_groups(
    facts: RunFacts, selection: SampleChoice, counts: CorpusCounts, redactor: Redactor
) -> Iterator[KeptGroup]:
    ranked = sorted(selection.kept, key=lambda group: (-counts.by_group[group], group))[:MAX_GROUPS]
    chosen = [one for group in ranked for one in selection.kept[group]]
    texts = _texts(facts, "clean", [(one.part, one.row["doc_id"]) for one in chosen], ("url", "num_chars"))
    for group in ranked:
        samples = [
            _kept_sample(one.row, texts[one.row["doc_id"]], redactor)
            for one in selection.kept[group]
            if one.row["doc_id"] in texts
        ]
        yield KeptGroup(*group, counts.by_group[group], tuple(samples))


def _kept_sample(row: Row, text: Row, redactor: Redactor) -> KeptSample:
    body = text["text"] or ""
    shown = redactor.redact(body[:READ_CHARS], row["language"])[0][:LONG_CHARS]
    short = {
        name: shorten(printable_line(redactor.redact((text[name] or "")[:READ_CHARS], row["language"])[0]))
        for name in ("url", "title")
    }
    lines = tuple(filter(None, map(printable_line, shown.splitlines())))
    return KeptSample(row["doc_id"].hex(), **short, lines=lines, is_cut=len(body) > len(shown), chars=text["num_chars"])


def redactor_of(facts: RunFacts) -> Redactor:
    """Return a redactor that replaces the default types of personal data and all that a section of the run names.

    Names are replaced only if the run used a model that recognizes names, whichever source has the model.
    """
    sections = _pii_sections(facts.recipe)
    types = tuple(name for name in TYPE_NAMES if any(name in own.get("types", ()) for own in sections))
    types = tuple(dict.fromkeys((*DEFAULT_TYPES, *types)))
    used = (name for table in facts.tables.values() for name in table.content.models)
    if not any(f"pii/{NER}" in name for name in used):
        return Redactor(types)
    given: dict[str, Any] = {"ner_models": {}, "ner_types": []}
    for own in sections:
        given["ner_models"] |= own.get("ner_models", {})
        given["ner_types"] += own.get("ner_types", ["person"] if own.get("ner_models") else [])
    config = PiiConfig.model_validate(given | {"ner_types": list(dict.fromkeys(given["ner_types"]))})
    cache = {name: value for name, value in facts.recipe.get("models", {}).items() if name == "cache"}
    store = ModelsConfig.model_validate(cache | {"offline": True})
    paths = {name: str(ensure_model(model, store).path) for name, model in model_files(config).items()}
    return Redactor(types, name_finder(config, paths))


def _pii_sections(recipe: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sections `[pii]` of a recipe: that of the run and those that a source has for itself."""
    sources = recipe.get("source", ())
    own = [source for source in (sources if isinstance(sources, list) else [sources]) if isinstance(source, Mapping)]
    return [section for section in (recipe.get("pii"), *(source.get("pii") for source in own)) if section]


def _texts(
    facts: RunFacts, table: str, documents: Sequence[tuple[int, bytes]], more: Sequence[str] = ()
) -> dict[bytes, Row]:
    """Return the row with title, text and the columns `more` of each document in `text` or `clean`, by doc_id.

    `documents` has (part number, doc_id) of each document. Only the row groups that hold one of them are read.
    """
    texts: dict[bytes, Row] = {}
    for part in sorted({part for part, _ in documents}):
        missing = {identifier for number, identifier in documents if number == part}
        with facts.open_part(table, part) as stream:
            file = pq.ParquetFile(stream)
            for group in range(file.num_row_groups):
                ids = read_columns(file, table, ["doc_id"], group).column("doc_id").to_pylist()
                indices = [index for index, identifier in enumerate(ids) if identifier in missing]
                if indices:
                    rows = read_columns(file, table, ["doc_id", "title", "text", *more], group)
                    texts |= {row["doc_id"]: row for row in rows.take(pa.array(indices)).to_pylist()}
                    missing.difference_update(ids)
                if not missing:
                    break
    return texts


def _sample(row: Row, text: Row, redactor: Redactor) -> DroppedSample:
    language = row["language"]
    shown = {
        name: printable_line(redactor.redact((value or "")[:READ_CHARS], language)[0])
        for name, value in (("url", row["url"]), ("title", text.get("title")), ("text", text.get("text")))
    }
    why_empty = "" if shown["text"] else "no text was extracted" if row["num_chars"] is None else "the text is empty"
    if text.get("text") is None and row["num_chars"] is not None:
        why_empty = "the recipe does not store the text of dropped documents"
    return DroppedSample(
        **{name: shorten(value) for name, value in shown.items()},
        why_empty=why_empty,
        language=language or "",
        value=row["drop_value"],
        limit=row["drop_limit"],
    )


def shorten(text: str) -> str:
    """Return at most SHOWN_CHARS characters of a text, cut between words if possible."""
    if len(text) <= SHOWN_CHARS:
        return text
    head = text[: SHOWN_CHARS - 1]
    return (head.rpartition(" ")[0] if " " in head[SHOWN_CHARS // 2 :] else head) + "…"
