"""What a run kept: lengths, domains, years, and the distributions of signals in kept and in dropped documents.

All figures are counts over the rows that the report reads, so their memory is bounded by `MAX_ROWS` of `judged.py`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.engine.rules import COARSE, FINE, count_bins, quantile
from pipeline.report.facts import RunFacts
from pipeline.report.judged import Floats, JudgedPart, PartChoice
from pipeline.report.rights import RightsCounts
from pipeline.report.signals import Histogram, PairedSpread, Spread, make_paired_spread, make_spread
from schemas.arrow_files import ArrowFile
from schemas.ids import shuffle_key
from schemas.tokens import HELDOUT, docs_key

TOP_DOMAINS = 15
"""Number of domains with the most documents that are listed, and with the most characters."""
MAX_INDEX_ROWS = 200_000
"""Maximum number of documents whose numbers of tokens are read."""
LARGE_PAGE, LITTLE_TEXT = 30_000, 300
"""A page of more than LARGE_PAGE bytes with fewer than LITTLE_TEXT characters of text may have lost its text."""
WORDS = ("gopher_num_words", "dclm_num_words")
"""Columns that count the words of a document; the first one that was measured is shown."""
OTHER_LANGUAGES = "no language"


@dataclass(frozen=True)
class LengthRow:
    """Quantiles of the lengths of one group of documents."""

    name: str
    documents: int
    low: int
    """5 % of the documents are at most this long."""
    median: int
    high: int
    """95 % of the documents are at most this long."""
    mean: float


@dataclass(frozen=True)
class Lengths:
    """The lengths of the kept documents in one unit: histograms and quantiles, by language or source."""

    unit: str
    of: str
    """What a row is: `language` or `source`."""
    all: LengthRow
    rows: tuple[LengthRow, ...]
    bins: Mapping[int, int]
    """Number of all documents by COARSE bin."""
    spread: Spread


@dataclass(frozen=True)
class Share:
    """Kept documents and characters of one domain or year, with their shares of all kept documents, 0..1."""

    name: str
    documents: int
    chars: int
    document_share: float
    char_share: float


@dataclass(frozen=True)
class PairedChart:
    """The distribution of one signal in kept and in dropped documents."""

    column: str
    kept: int
    dropped: int
    spread: PairedSpread


@dataclass(frozen=True)
class Kept:
    """The kept documents among the rows that the report reads."""

    reading: PartChoice
    documents: int
    chars: int
    lengths: tuple[Lengths, ...]
    domains: tuple[Share, ...]
    """The domains with the most documents and those with the most characters, most documents first."""
    num_domains: int
    years: tuple[Share, ...]
    """In ascending order; the name of the last one is empty if documents have no date."""
    sources: tuple[tuple[str, str, int], ...]
    """(source, language, documents), most documents first."""
    pairs: tuple[PairedChart, ...]
    large_pages: int
    """Pages of more than LARGE_PAGE bytes, whether kept or dropped."""
    without_text: int
    """Those of them with fewer than LITTLE_TEXT characters of text."""
    rights: RightsCounts
    """Which of the documents are reserved."""


@dataclass
class CorpusCounts:
    """The counts of which `Kept` is made; `add` counts one part."""

    columns: Mapping[str, Mapping[str, float]]
    """Numeric columns that rules compare with limits → their limits by rule and language."""
    fields: pa.Schema
    """The columns with their meanings and units."""
    rights: RightsCounts = field(default_factory=lambda: RightsCounts({}))
    """Which documents are reserved."""
    documents: int = 0
    chars: int = 0
    by_group: Counter[tuple[str, str]] = field(default_factory=Counter)
    domains: dict[str, list[int]] = field(default_factory=dict)
    years: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[tuple[str, str], Counter[int]] = field(default_factory=dict)
    """(unit, language) → FINE bins."""
    sums: Counter[tuple[str, str]] = field(default_factory=Counter)
    signals: dict[tuple[str, bool], Counter[int]] = field(default_factory=dict)
    """(column, whether kept) → COARSE bins."""
    large_pages: int = 0
    without_text: int = 0

    def add(self, part: JudgedPart) -> None:
        """Count the rows of one part."""
        kept = part.kept
        self.rights.add(part)
        self._count_documents(part, np.flatnonzero(kept))
        for column in self.columns:
            values = part.numbers(column)
            for is_kept in (True, False):
                bins = self.signals.setdefault((column, is_kept), Counter())
                bins.update(count_bins(values[kept == is_kept], COARSE))
        size, text = part.numbers("page_bytes"), part.numbers("num_chars")
        large = size > LARGE_PAGE
        self.large_pages += int(large.sum())
        self.without_text += int((large & (text < LITTLE_TEXT)).sum())

    def _count_documents(self, part: JudgedPart, rows: Any) -> None:
        sources, languages, domains, dates = (part.strings(name) for name in ("source", "language", "domain", "date"))
        groups: dict[str, list[int]] = {}
        for row in rows.tolist():
            chars = int(part.clean_chars[row])
            self.documents += 1
            self.chars += chars
            language = languages[row] or OTHER_LANGUAGES
            groups.setdefault(language, []).append(row)
            self.by_group[sources[row] or "", language] += 1
            year = f"{dates[row].year:04d}" if dates[row] else ""
            for counts, name in ((self.domains, domains[row] or ""), (self.years, year)):
                entry = counts.setdefault(name, [0, 0])
                entry[0] += 1
                entry[1] += chars
        words = next((name for name in WORDS if name in part.table.column_names), None)
        measures = {"characters": part.clean_chars} | ({"words": part.numbers(words)} if words else {})
        for unit, values in measures.items():
            for language, members in groups.items():
                self._count_lengths(unit, language, values[members])

    def _count_lengths(self, unit: str, group: str, values: Floats) -> None:
        values = values[~np.isnan(values)]
        self.lengths.setdefault((unit, group), Counter()).update(count_bins(values, FINE))
        self.sums[unit, group] += int(values.sum())

    def add_tokens(self, facts: RunFacts) -> None:
        """Count the tokens of each document, from the document indexes of the training shards."""
        for source, values in _token_counts(facts):
            self._count_lengths("tokens", source, values)

    def result(self, reading: PartChoice) -> Kept:
        """Return the figures of the counted parts."""
        return Kept(
            reading=reading,
            documents=self.documents,
            chars=self.chars,
            lengths=tuple(self._lengths()),
            domains=tuple(self._top_domains()),
            num_domains=len(self.domains.keys() - {""}),
            years=tuple(
                self._share(name, self.years) for name in sorted(self.years, key=lambda name: (not name, name))
            ),
            sources=tuple((*group, count) for group, count in _ranked(self.by_group)),
            pairs=tuple(self._pairs()),
            large_pages=self.large_pages,
            without_text=self.without_text,
            rights=self.rights,
        )

    def _lengths(self) -> Iterator[Lengths]:
        for unit, of in (("characters", "language"), ("words", "language"), ("tokens", "source")):
            bins = {group: counts for (name, group), counts in self.lengths.items() if name == unit and counts}
            if not bins:
                continue
            whole: Counter[int] = Counter()
            for counts in bins.values():
                whole.update(counts)
            rows = [_length_row(group, counts, self.sums[unit, group]) for group, counts in bins.items()]
            rows.sort(key=lambda row: (-row.documents, row.name))
            total = sum(self.sums[unit, group] for group in bins)
            histograms = [Histogram(group, coarse_bins(counts)) for group, counts in bins.items()]
            spread = make_spread(histograms, "max", True, ())
            yield Lengths(unit, of, _length_row("all", whole, total), tuple(rows), coarse_bins(whole), spread)

    def _top_domains(self) -> Iterator[Share]:
        named = [name for name in self.domains if name]
        top: set[str] = set()
        for measure in (0, 1):
            top |= set(sorted(named, key=lambda name: (-self.domains[name][measure], name))[:TOP_DOMAINS])
        for name in sorted(top, key=lambda name: (-self.domains[name][0], -self.domains[name][1], name)):
            yield self._share(name, self.domains)

    def _share(self, name: str, counts: Mapping[str, Sequence[int]]) -> Share:
        documents, chars = counts[name]
        return Share(name, documents, chars, documents / (self.documents or 1), chars / (self.chars or 1))

    def _pairs(self) -> Iterator[PairedChart]:
        for column, limits in self.columns.items():
            kept, dropped = (self.signals.get((column, is_kept), Counter()) for is_kept in (True, False))
            if kept and dropped:
                spread = make_paired_spread(self.fields.field(column), kept, dropped, sorted(set(limits.values())))
                yield PairedChart(column, kept.total(), dropped.total(), spread)


def limited_columns(facts: RunFacts) -> dict[str, dict[str, float]]:
    """Return the numeric columns that rules compare with limits, with their limits by rule and language."""
    columns: dict[str, dict[str, float]] = {}
    for name, check in facts.figures("verdicts").get("limits", {}).items():
        if facts.is_number(check["column"]):
            limits = {f"{name} {language}": limit for language, limit in check["limits"].items()}
            columns.setdefault(check["column"], {}).update(limits)
    return columns


def coarse_bins(fine: Mapping[int, int]) -> dict[int, int]:
    """Return a histogram of FINE bins as a histogram of COARSE bins."""
    bins: Counter[int] = Counter()
    for key, count in fine.items():
        bins[key >> (COARSE - FINE)] += count
    return dict(bins)


def _length_row(name: str, bins: Mapping[int, int], total: int) -> LengthRow:
    documents = sum(bins.values())
    low, median, high = (math.ceil(quantile(bins, share, FINE)) - 1 for share in (0.05, 0.5, 0.95))
    return LengthRow(name, documents, low, median, high, total / documents)


def _ranked(counts: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, str], int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _token_counts(facts: RunFacts) -> Iterator[tuple[str, Floats]]:
    """Yield (source, numbers of tokens) of shards in the order of a hash of their names, up to MAX_INDEX_ROWS."""
    if "tokens" not in facts.tables:
        return
    manifest, folder = facts.tables["tokens"], facts.folders["tokens"]
    shards = {
        docs_key(stream, number): stream
        for stream, numbers in facts.figures("tokens")["streams"].items()
        for number in range(len(numbers))
        if not stream.endswith(f"/{HELDOUT}")
    }
    left = MAX_INDEX_ROWS
    for key in sorted(shards, key=lambda name: shuffle_key(0, name.encode())):
        with folder.open_input(manifest.paths[key]) as stream:
            reader = ArrowFile(stream, f"{folder.uri}/{manifest.paths[key]}")
            for number in range(reader.num_record_batches):
                values = reader.get_batch(number).column("num_tokens").to_numpy()[:left]
                left -= len(values)
                yield shards[key].partition("/")[0], values.astype(np.float64)
                if left <= 0:
                    return
