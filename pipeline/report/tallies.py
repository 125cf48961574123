"""Counts of a run for the report: bytes, languages, charsets, personal data, streams, processing time, contamination.

Everything here is a sum over manifests; no row is read.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.decontaminate.stage import CANARIES, DOCUMENTS, ITEMS, NGRAMS, SETS, WHOLE_ITEMS
from pipeline.report.facts import RunFacts
from pipeline.toxicity.stage import ALL_MEASURES, MEASURED_BY, MODEL, NOTHING, WORDS
from schemas.manifest import FileEntry
from schemas.tokens import HELDOUT, docs_key, shard_key, split_copies

MAX_LANGUAGES = 20


@dataclass(frozen=True)
class Count:
    """The count of one name, and its share of the sum of all counts (0..1)."""

    name: str
    number: int
    share: float


@dataclass(frozen=True)
class Language:
    """Document counts of one language; None if the table of a count does not exist yet."""

    code: str
    documents: int
    """Number of extracted documents."""
    passed: int | None
    """Number of documents that the verdicts kept."""
    passed_chars: int | None
    """Number of characters of the documents that the verdicts kept."""
    clean: int | None
    """Number of documents kept in `clean`."""


@dataclass(frozen=True)
class ShardFiles:
    """One shard: its number in the stream, its tokens, and its files (token ids and document index)."""

    number: int
    tokens: int
    file: FileEntry
    index: FileEntry


@dataclass(frozen=True)
class StreamSummary:
    """One stream of the dataset."""

    name: str
    documents: int
    tokens: int
    bytes: int
    shards: tuple[ShardFiles, ...]

    @property
    def held_out(self) -> bool:
        """True if the documents of the stream are never trained on."""
        return self.name.endswith(f"/{HELDOUT}")

    @property
    def copies(self) -> int:
        """Number of times that an epoch of training reads the documents of the stream; 0 if they are held out."""
        return 0 if self.held_out else split_copies(self.name.rpartition("/")[0])[1]


@dataclass(frozen=True)
class MixShare:
    """The number of tokens of one source that a mix requires, and the number that the dataset has."""

    source: str
    keep: float
    """Share of the training documents that the mix keeps, 0..1."""
    repeat: float
    """Number of training passes over the tokens of the source."""
    available: int
    """Unique training tokens in the dataset."""
    required: int | None
    """Unique training tokens that the mix requires; None = enough are available."""


@dataclass(frozen=True)
class Cost:
    """The start of one pipeline step, the rows that it processed, and the time that it took."""

    step: str
    started: str
    rows: int
    wall_seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float | None:
        """Rows per CPU second of the Python workers; None if no time was measured."""
        return self.rows / self.cpu_seconds if self.cpu_seconds else None


def ranked_counts(tally: Mapping[str, int]) -> list[Count]:
    """Return the counts with their shares of the sum, largest first."""
    total = sum(tally.values())
    ranked = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    return [Count(name, number, number / total if total else 0.0) for name, number in ranked]


def languages(facts: RunFacts) -> tuple[list[Language], int]:
    """Return the MAX_LANGUAGES most frequent languages, and the number of other languages."""
    figures = (("verdicts", "kept_languages"), ("verdicts", "kept_language_chars"), ("clean", "kept_languages"))
    tallies = [facts.figures(table).get(name, {}) if table in facts.tables else None for table, name in figures]
    rows = [
        Language(count.name, count.number, *(None if tally is None else tally.get(count.name, 0) for tally in tallies))
        for count in ranked_counts(facts.figures("documents").get("languages", {}))
    ]
    return rows[:MAX_LANGUAGES], max(0, len(rows) - MAX_LANGUAGES)


@dataclass(frozen=True)
class ToxicityCoverage:
    """How many documents of a language were measured by word lists and by the classifier, and by neither."""

    language: str
    documents: int
    words: int
    model: int
    neither: int


def toxicity_coverage(facts: RunFacts) -> list[ToxicityCoverage]:
    """Return what measured the toxicity of the documents of each language, the most frequent first, then the rest."""
    counted: dict[str, Counter[str]] = {}
    for key, number in facts.figures("documents").get(MEASURED_BY, {}).items():
        language, _, by = key.partition("/")
        counted.setdefault(language, Counter())[by] += number
    rows = [
        ToxicityCoverage(
            language,
            by.total(),
            sum(number for name, number in by.items() if WORDS in name.split()),
            sum(number for name, number in by.items() if MODEL in name.split()),
            by[NOTHING],
        )
        for language, by in counted.items()
    ]
    rows.sort(key=lambda row: (-row.documents, row.language))
    if len(rows) <= MAX_LANGUAGES:
        return rows
    rest = rows[MAX_LANGUAGES:]
    sums = (sum(getattr(row, name) for row in rest) for name in ("documents", "words", "model", "neither"))
    return [*rows[:MAX_LANGUAGES], ToxicityCoverage(f"{len(rest)} others", *sums)]


@dataclass(frozen=True)
class ToxicityMeasure:
    """The documents with a listed word of a measure, such as threats, and the number of these words."""

    name: str
    documents: int
    words: int
    counts: bool
    """False if its words do not count in the limits."""


def toxicity_measures(facts: RunFacts) -> list[ToxicityMeasure]:
    """Return the figures of each measure of the word lists, in their order."""
    figures, counting = facts.figures("documents"), facts.settings("toxicity").get("measures", ())
    documents, words = figures.get("toxic_documents", {}), figures.get("toxic_words", {})
    return [
        ToxicityMeasure(name, documents[name], words.get(name, 0), name in counting)
        for name in ALL_MEASURES
        if name in documents
    ]


def streams(facts: RunFacts) -> list[StreamSummary]:
    """Return the streams of the dataset with their shards; empty if there is no dataset yet."""
    if "tokens" not in facts.tables:
        return []
    figures = facts.figures("tokens")
    entries = {entry.key: entry for entry in facts.tables["tokens"].content.files}
    rows = []
    for name, numbers in sorted(figures["streams"].items()):
        shards = tuple(
            ShardFiles(number, tokens, entries[shard_key(name, number)], entries[docs_key(name, number)])
            for number, tokens in enumerate(numbers)
        )
        removed = sum(len(facts.removed_spans.get(shard_key(name, shard.number), ())) for shard in shards)
        documents, size = sum(shard.index.rows for shard in shards), sum(shard.file.bytes for shard in shards)
        rows.append(StreamSummary(name, documents - removed, facts.tokens_left[name], size, shards))
    return rows


def mix_shares(facts: RunFacts) -> list[MixShare]:
    """Return the required and available tokens of the mix by source; empty if the dataset has no mix."""
    figure: Mapping[str, Any] = facts.figures("tokens").get("mix", {})
    return [
        MixShare(name, part["keep"], part["repeat"], part["found_tokens"], part["wanted_tokens"])
        for name, part in sorted(figure.items())
    ]


def describe_buckets(facts: RunFacts) -> str:
    """Describe the quality buckets of the dataset by signal and cut-offs; empty if there are no buckets."""
    figure: Mapping[str, Any] = facts.figures("tokens").get("buckets", {})
    if not figure:
        return ""
    by, names, cuts = figure["by"], figure["names"], figure["cuts"]
    if isinstance(cuts, Mapping):
        return "perplexity, head, middle and tail of the language, all where no model measured it"
    ends = [f"below {cuts[0]:g}", *(f"from {low:g} to below {high:g}" for low, high in itertools.pairwise(cuts))]
    ranges = [f"{name} {end}" for name, end in zip(names, [*ends, f"from {cuts[-1]:g}"])]
    return f"{by}, {', '.join(ranges)}, {names[-1]} where it was not measured"


def contract(facts: RunFacts) -> Mapping[str, Any]:
    """Return the tokenizer contract (such as vocabulary size and SHA-256), sample sizes and bytes of text per token.

    Empty if the run has no tokenizer.
    """
    figures = facts.figures("tokenizer")
    if "contract" not in figures:
        return {}
    tokens = sum(facts.tokens_left.values())
    text = sum(facts.figures("clean").get("kept_bytes", {}).values())
    left_out = sum(facts.figures("tokens").get("dropped_chars", {}).values())
    if left_out:  # the manifest has characters of documents left out by the mix, but not bytes
        text *= 1 - left_out / facts.figures("clean")["kept_chars"]
    values = {**figures["contract"], "sample_documents": figures.get("sample_documents")}
    rate = {"bytes_per_token": text / tokens if tokens else None, "estimated": left_out > 0}
    return values | {"sample_bytes": figures.get("sample_bytes"), **rate}


def costs(facts: RunFacts, steps: Collection[str]) -> list[Cost]:
    """Return the rows and times of the run's steps, in order; a step is named by the first table that it writes.

    Versions that a takedown made are left out: their times are those of the takedown.
    """
    return [
        Cost(
            step=name,
            started=table.run.started,
            rows=table.content.counts.rows_in,
            wall_seconds=table.run.wall_seconds,
            cpu_seconds=table.run.cpu_seconds,
        )
        for name, table in facts.tables.items()
        if name in steps and "takedown" not in table.content.figures
    ]


def num_pages(facts: RunFacts) -> int:
    """Return the number of pages: all records that the source stage did not drop."""
    if "documents" not in facts.tables:
        return 0
    counts = facts.tables["documents"].content.counts
    # Takedowns count what they removed by a reason of their own, whatever it was.
    no_pages = sum(number for name, number in counts.dropped.items() if name.startswith(("source/", "takedown/")))
    return counts.rows_in - no_pages


# Contamination with evaluation sets.


@dataclass(frozen=True)
class EvaluationSet:
    """One evaluation set: the number of its items, and the numbers of items found in documents."""

    name: str
    items: int
    searched: int
    """Items that are long enough to be searched for."""
    found: int
    """Items that share an n-gram with a document."""
    mostly_found: int
    """Items of which a document contains most n-grams."""
    documents: int
    ngrams: int
    """Number of shared n-grams, where each document counts its distinct ones."""

    @property
    def share(self) -> float:
        """The share of items that were found, 0..1."""
        return self.found / self.items if self.items else 0.0


def evaluation_sets(facts: RunFacts) -> list[EvaluationSet]:
    """Return every evaluation set with the items found in documents; sets found in the most documents come first.

    Empty if the recipe names no evaluation set.
    """
    figures = facts.figures("documents")
    sizes: Mapping[str, Mapping[str, int]] = figures.get(SETS, {})
    documents, ngrams = figures.get(DOCUMENTS, {}), figures.get(NGRAMS, {})
    found, mostly_found = (_by_set(figures.get(name, {})) for name in (ITEMS, WHOLE_ITEMS))
    rows = [
        EvaluationSet(
            name=name,
            items=sizes.get(name, {}).get("items", 0),
            searched=sizes.get(name, {}).get("indexed", 0),
            found=found[name],
            mostly_found=mostly_found[name],
            documents=documents.get(name, 0),
            ngrams=ngrams.get(name, 0),
        )
        for name in {**sizes, **documents}
    ]
    return sorted(rows, key=lambda row: (-row.documents, row.name))


def canaries(facts: RunFacts) -> Mapping[str, int]:
    """Return the number of documents with canary strings and the number of occurrences of canary strings.

    Empty if no canary string was found.
    """
    counts: Mapping[str, int] = facts.figures("documents").get(CANARIES, {})
    return counts


def _by_set(items: Mapping[str, int]) -> Counter[str]:
    """Return the number of items in each set; the name of an item is `set:line`."""
    return Counter(item.rpartition(":")[0] for item in items)
