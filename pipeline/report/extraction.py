"""The report on extraction: second opinions, pages without a text, the union of extractors, two extractors compared.

Counts come from the manifest of `documents`, and CPU times from its run block. Pages that are compared are shown by
lines that only one extractor has, after personal data in them has been replaced.
"""

import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from pipeline.extract.blocks import MAX_TAGS
from pipeline.extract.extractors import MIN_VISIBLE_WORDS
from pipeline.extract.page_limits import MAX_OPTIONS
from pipeline.pii.stage import Redactor
from pipeline.report.facts import RunFacts
from pipeline.report.judged import choose_parts
from pipeline.report.samples import LONG_CHARS, READ_CHARS, SHOWN_CHARS, redactor_of
from schemas.errors import ConfigError
from schemas.ids import shuffle_key
from schemas.text import printable_line

SHOWN_PAGES = 4
"""Number of compared pages that are shown of each kind: the most different ones, and random ones."""
SHOWN_LINES = 12
"""Maximum number of lines of each text that are shown of a compared page."""
OUTCOME_TEXTS = {
    "used": "the second text is used",
    "empty": "trafilatura found no text",
    "limit": "not asked: above the share of the pages",
    "stopped": "ended by its limit of CPU time",
    "too_large": "not asked: the page is too large",
    "failed": "trafilatura raised an error",
}
LIMIT_TEXTS = {
    "tags": f"of more than {MAX_TAGS:,} tags, the first are read",
    "options": f"of more than {MAX_OPTIONS:,} options of menus, the texts are read without their tags",
    "attributes": "too many attributes of tags are not read",
}
"""Limits of the parser, by the name under which a page beyond them is counted."""
LENGTH_TEXTS = {
    "second_empty": "no text by the second",
    "below_half": "less than half",
    "below_0.8": "0.5 to 0.8",
    "similar": "0.8 to 1.25",
    "above_1.25": "1.25 to 2",
    "above_double": "more than twice",
    "first_empty": "no text by the first",
    "both_empty": "no text by either",
}
"""Length of the second text over that of the first, by class."""
RULE_TEXTS = {
    "both_pass": "both texts pass the rules",
    "only_first_passes": "only the first passes",
    "only_second_passes": "only the second passes",
    "both_fail": "both fail",
}


@dataclass(frozen=True)
class CountRow:
    """One row of a table of counts."""

    name: str
    number: int
    share: float
    """Share of the sum, 0..1."""


@dataclass(frozen=True)
class GuardRow:
    """Second opinions of one cause and outcome."""

    cause: str
    outcome: str
    pages: int
    share: float
    """Share of the pages that `penstock` extracted, 0..1."""


@dataclass(frozen=True)
class UnionRow:
    """What one further extractor of the union gave."""

    extractor: str
    tried: int
    taken: int
    chars: int
    tokens: float | None
    """Estimate from the characters; None without a dataset."""


@dataclass(frozen=True)
class ComparedPage:
    """One page with the lines that only one of two extractors has; personal data is replaced."""

    doc_id: str
    word_f1: float
    chars: tuple[int, int]
    rules: tuple[str, str]
    """The rule that each text fails; empty: it passes."""
    lines: tuple[tuple[str, ...], tuple[str, ...]]
    """The lines that only the first text has, and those that only the second has."""


@dataclass(frozen=True)
class ComparedExtractors:
    """Two extractors on a sample of the pages."""

    first: str
    second: str
    pages: int
    f1: tuple[CountRow, ...]
    lengths: tuple[CountRow, ...]
    rules: tuple[CountRow, ...]
    chars: tuple[int, int]
    milliseconds: tuple[float | None, float | None]
    """Mean CPU time of each extractor on a page of the sample [ms]."""
    different: tuple[ComparedPage, ...]
    random: tuple[ComparedPage, ...]
    refused: str = ""
    """The reason if no page can be shown, else empty."""


@dataclass(frozen=True)
class ExtractionFigures:
    """All that the section on extraction shows; a part that the recipe does not use is empty or None."""

    milliseconds: float | None
    """Mean CPU time of extraction per page, that of second opinions included [ms]."""
    guard: tuple[GuardRow, ...]
    guard_pages: int
    """Pages that `penstock` extracted."""
    guard_share: float
    """Share of these pages for which trafilatura was asked, 0..1."""
    guard_seconds: float
    """CPU time of second opinions [s]."""
    empty: tuple[tuple[str, str, int], ...]
    """(cause, language, pages) of pages that show many words and have no text."""
    min_words: int
    """The number of words that are many."""
    limited: tuple[tuple[str, int], ...]
    """(limit, pages) of pages that a parser could not bear whole."""
    errors: tuple[tuple[str, str, int], ...]
    """(extractor, type of the error, pages) of errors of extractors."""
    union: tuple[UnionRow, ...]
    union_seconds: float
    """CPU time of the rules and of the further extractors [s]."""
    stopped: int
    """Pages on which a further extractor was ended by its limit of CPU time."""
    comparison: ComparedExtractors | None

    @property
    def is_empty(self) -> bool:
        """True if the run measured nothing that the section shows."""
        return self.milliseconds is None and not (
            self.guard or self.empty or self.limited or self.errors or self.union or self.comparison
        )


def extraction(facts: RunFacts) -> ExtractionFigures:
    """Return what the report says about extraction. Reads the table `comparisons` if the run has one."""
    figures, cpu = facts.figures("documents"), _cpu(facts)
    guard: Mapping[str, int] = figures.get("second_opinions", {})
    pages = sum(guard.values())
    asked = sum(number for name, number in guard.items() if not name.endswith(("none", "/limit", "/too_large")))
    spent = cpu.get("extract", {"seconds": 0.0, "rows": 0})
    seconds = cpu.get("second_opinion", {}).get("seconds", 0.0)
    return ExtractionFigures(
        milliseconds=1000 * (spent["seconds"] + seconds) / spent["rows"] if spent["rows"] else None,
        guard=tuple(_guard_rows(guard, pages)),
        guard_pages=pages,
        guard_share=asked / pages if pages else 0.0,
        guard_seconds=seconds,
        empty=tuple(_empty_rows(figures.get("empty_pages", {}))),
        min_words=MIN_VISIBLE_WORDS,
        limited=tuple((LIMIT_TEXTS.get(name, name), pages) for name, pages in _most(figures.get("limited_pages", {}))),
        errors=tuple(_error_rows(figures.get("extractor_errors", {}))),
        union=tuple(_union_rows(facts)),
        union_seconds=cpu.get("union", {}).get("seconds", 0.0),
        stopped=sum(figures.get("stopped_extractors", {}).values()),
        comparison=_comparison(facts) if "comparisons" in facts.tables else None,
    )


def _cpu(facts: RunFacts) -> Mapping[str, Mapping[str, float]]:
    if "documents" not in facts.tables:
        return {}
    cpu: Mapping[str, Mapping[str, float]] = facts.tables["documents"].run.notes.get("cpu", {})
    return cpu


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the names and numbers of some counts, the largest number first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _guard_rows(guard: Mapping[str, int], pages: int) -> Iterator[GuardRow]:
    for name, number in _most(guard):
        cause, _, outcome = name.partition("/")
        if outcome:
            yield GuardRow(cause, OUTCOME_TEXTS.get(outcome, outcome), number, number / pages)


def _empty_rows(counts: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    for name, number in _most(counts):
        language, _, cause = name.partition("/")
        yield cause, language, number


def _error_rows(counts: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    for name, number in _most(counts):
        extractor, _, kind = name.partition("/")
        yield extractor, kind, number


def _union_rows(facts: RunFacts) -> Iterator[UnionRow]:
    figures = facts.figures("documents")
    tokens = sum(facts.tokens_left.values())
    clean = facts.figures("clean").get("kept_chars", 0)
    rate = tokens / clean if clean and tokens else None
    for name in facts.settings("extract").get("union", ())[1:]:
        chars = figures.get("union_chars", {}).get(name, 0)
        yield UnionRow(
            name,
            figures.get("union_tried", {}).get(name, 0),
            figures.get("union_taken", {}).get(name, 0),
            chars,
            None if rate is None else chars * rate,
        )


def _comparison(facts: RunFacts) -> ComparedExtractors | None:
    figures = facts.figures("documents")
    settings = facts.tables["comparisons"].content.config["extract"]
    names = settings["extractor"], settings["compare"]
    cpu = [_cpu(facts).get(f"compare {name}") for name in names]
    chars = figures.get("compared_chars", {})
    pages = sum(figures.get("compared_rules", {}).values())
    different, random, refused = _pages(facts)
    first, second = (1000 * spent["seconds"] / spent["rows"] if spent else None for spent in cpu)
    return ComparedExtractors(
        *names,
        pages=pages,
        f1=tuple(_counts(figures.get("compared_f1", {}), {f"{n / 10:.1f}": _tenth(n) for n in reversed(range(10))})),
        lengths=tuple(_counts(figures.get("compared_lengths", {}), LENGTH_TEXTS)),
        rules=tuple(_counts(figures.get("compared_rules", {}), RULE_TEXTS)),
        chars=(chars.get("first_chars", 0), chars.get("second_chars", 0)),
        milliseconds=(first, second),
        different=different,
        random=random,
        refused=refused,
    )


def _tenth(number: int) -> str:
    return f"{number / 10:.1f} to {(number + 1) / 10:.1f}"


def _counts(counts: Mapping[str, int], texts: Mapping[str, str]) -> Iterator[CountRow]:
    total = sum(counts.values())
    for name, text in texts.items():
        if counts.get(name):
            yield CountRow(text, counts[name], counts[name] / total)


def _pages(facts: RunFacts) -> tuple[tuple[ComparedPage, ...], tuple[ComparedPage, ...], str]:
    """Return the most different pages of the parts that a report reads, random ones, and why there is none."""
    try:
        redactor = redactor_of(facts)
    except (OSError, zipfile.BadZipFile, ConfigError):
        return (), (), "the name recognition model of the run is not at the path in its recipe"
    places: list[tuple[float, int, int, bytes]] = []
    for part in choose_parts(facts).parts:
        for row in facts.read_part("comparisons", part, ["doc_id", "word_f1"]):
            places.append((row["word_f1"], shuffle_key(0, row["doc_id"]), part, row["doc_id"]))
    different = sorted(places)[:SHOWN_PAGES]
    left = [place for place in places if place not in different]
    random = sorted(left, key=lambda place: place[1:])[:SHOWN_PAGES]
    rows = _rows(facts, [*different, *random])
    shown = [tuple(_compared_page(rows[place[3]], redactor) for place in group) for group in (different, random)]
    return shown[0], shown[1], ""


def _rows(facts: RunFacts, places: Sequence[tuple[float, int, int, bytes]]) -> dict[bytes, Row]:
    rows: dict[bytes, Row] = {}
    for part in sorted({place[2] for place in places}):
        wanted = [place[3] for place in places if place[2] == part]
        with facts.open_part("comparisons", part) as stream:
            file = pq.ParquetFile(stream)
            for group in range(file.num_row_groups):
                ids = file.read_row_group(group, columns=["doc_id"]).column("doc_id").to_pylist()
                indices = [index for index, identifier in enumerate(ids) if identifier in wanted]
                if indices:
                    found = file.read_row_group(group).take(indices)
                    rows |= {row["doc_id"]: row for row in found.to_pylist()}
    return rows


def _compared_page(row: Row, redactor: Redactor) -> ComparedPage:
    texts = row["first_text"] or "", row["second_text"] or ""
    first, second = (
        _shown(redactor, lines, row["language"]) for lines in (only_in(*texts), only_in(texts[1], texts[0]))
    )
    return ComparedPage(
        doc_id=row["doc_id"].hex(),
        word_f1=row["word_f1"],
        chars=(row["first_chars"], row["second_chars"]),
        rules=(row["first_rule"] or "", row["second_rule"] or ""),
        lines=(first, second),
    )


def only_in(text: str, other: str) -> list[str]:
    """Return the lines of a text that are not lines of the other text, in order; white space does not count."""
    known = Counter(" ".join(line.split()) for line in other.split("\n"))
    lines = []
    for line in (" ".join(line.split()) for line in text.split("\n")):
        if known[line] > 0:
            known[line] -= 1
        elif line:
            lines.append(line)
    return lines


def _shown(redactor: Redactor, lines: Sequence[str], language: str | None) -> tuple[str, ...]:
    """Return the first lines with personal data replaced, each of limited length."""
    text = redactor.redact("\n".join(lines)[:READ_CHARS], language)[0][:LONG_CHARS]
    shown = [printable_line(line) for line in text.split("\n")][:SHOWN_LINES]
    return tuple(line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…" for line in shown if line)
