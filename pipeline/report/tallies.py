"""Tallies of a run, ready to be shown: bytes, languages, charsets, personal data, streams and costs.

Everything here is a sum over manifests; no row is read.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.decontaminate.stage import CANARIES, DOCUMENTS, ITEMS, NGRAMS, SETS, WHOLE_ITEMS
from pipeline.report.facts import SECONDARY_TABLES, RunFacts
from schemas.manifest import FileEntry
from schemas.tokens import HELDOUT, docs_key, shard_key

MAX_LANGUAGES = 20
WORDLIST = "wordlist_"
"""How the toxicity stage names the word list of a language among its models."""


@dataclass(frozen=True)
class Count:
    """One name of a tally and its share of the sum, 0..1."""

    name: str
    number: int
    share: float


@dataclass(frozen=True)
class Language:
    """Documents of one language: how many had it, how many passed the verdicts and how many were kept in the end.

    None: the table that counts them does not stand yet.
    """

    code: str
    found: int
    passed: int | None
    passed_chars: int | None
    clean: int | None


@dataclass(frozen=True)
class ShardFiles:
    """One shard and the index of its documents."""

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
        """Whether the trainer never sees it."""
        return self.name.endswith(f"/{HELDOUT}")


@dataclass(frozen=True)
class MixShare:
    """What a mix asks for of one source, and what the dataset has of it."""

    source: str
    keep: float
    """Share of the training documents that was kept, 0..1."""
    repeat: float
    """Passes over its tokens that the mix means."""
    found: int
    """Unique training tokens."""
    wanted: int | None
    """None: there are enough."""


@dataclass(frozen=True)
class Cost:
    """What one step took."""

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
    """The names of a tally, most frequent first."""
    total = sum(tally.values())
    ranked = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    return [Count(name, number, number / total if total else 0.0) for name, number in ranked]


def languages(facts: RunFacts) -> tuple[list[Language], int]:
    """The most frequent languages, and how many further ones there are."""
    wanted = (("verdicts", "kept_languages"), ("verdicts", "kept_language_chars"), ("clean", "kept_languages"))
    tallies = [facts.figures(table).get(name, {}) if table in facts.tables else None for table, name in wanted]
    rows = [
        Language(count.name, count.number, *(None if tally is None else tally.get(count.name, 0) for tally in tallies))
        for count in ranked_counts(facts.figures("documents").get("languages", {}))
    ]
    return rows[:MAX_LANGUAGES], max(0, len(rows) - MAX_LANGUAGES)


def wordlists(facts: RunFacts) -> list[str]:
    """The languages whose toxic words were counted."""
    return [name.removeprefix(WORDLIST) for name in facts.models("toxicity") if name.startswith(WORDLIST)]


def without_wordlist(facts: RunFacts) -> int:
    """Documents that passed every rule in languages that have no word list, so that their words were not measured."""
    kept: Mapping[str, int] = facts.figures("verdicts").get("kept_languages", {})
    return sum(number for language, number in kept.items() if language not in wordlists(facts))


def streams(facts: RunFacts) -> list[StreamSummary]:
    """The streams of the dataset with their shards; empty while there is none."""
    if "tokens" not in facts.tables:
        return []
    figures = facts.figures("tokens")
    entries = {entry.key: entry for entry in facts.tables["tokens"].content.files}
    found = []
    for name, numbers in sorted(figures["streams"].items()):
        shards = tuple(
            ShardFiles(number, tokens, entries[shard_key(name, number)], entries[docs_key(name, number)])
            for number, tokens in enumerate(numbers)
        )
        documents, size = sum(shard.index.rows for shard in shards), sum(shard.file.bytes for shard in shards)
        found.append(StreamSummary(name, documents, sum(numbers), size, shards))
    return found


def mix_shares(facts: RunFacts) -> list[MixShare]:
    """What the mix of the dataset asks for, by source; empty where there is none."""
    figure: Mapping[str, Any] = facts.figures("tokens").get("mix", {})
    return [
        MixShare(name, part["keep"], part["repeat"], part["found_tokens"], part["wanted_tokens"])
        for name, part in sorted(figure.items())
    ]


def describe_buckets(facts: RunFacts) -> str:
    """How the sources of the dataset are cut into buckets of quality, in words; empty where they are whole."""
    figure: Mapping[str, Any] = facts.figures("tokens").get("buckets", {})
    if not figure:
        return ""
    by, names, cuts = figure["by"], figure["names"], figure["cuts"]
    if isinstance(cuts, Mapping):
        return "perplexity, head, middle and tail of the language, all where no model measured it"
    ends = [f"below {cuts[0]:g}", *(f"from {low:g} to below {high:g}" for low, high in itertools.pairwise(cuts))]
    told = [f"{name} {end}" for name, end in zip(names, [*ends, f"from {cuts[-1]:g}"])]
    return f"{by}, {', '.join(told)}, {names[-1]} where it was not measured"


def contract(facts: RunFacts) -> Mapping[str, Any]:
    """What the tokenizer promises, and the bytes of text a token stands for; empty while there is none."""
    figures = facts.figures("tokenizer")
    if "contract" not in figures:
        return {}
    tokens = sum(stream.tokens for stream in streams(facts))
    text = sum(facts.figures("clean").get("kept_bytes", {}).values())
    left_out = sum(facts.figures("tokens").get("dropped_chars", {}).values())
    if left_out:  # of what the mix leaves out the characters are known, not the bytes
        text *= 1 - left_out / facts.figures("clean")["kept_chars"]
    found = {**figures["contract"], "sample_documents": figures.get("sample_documents")}
    rate = {"bytes_per_token": text / tokens if tokens else None, "estimated": left_out > 0}
    return found | {"sample_bytes": figures.get("sample_bytes"), **rate}


def costs(facts: RunFacts) -> list[Cost]:
    """What each step of the run took, in order; some steps write two tables."""
    return [
        Cost(
            step=name,
            started=table.run.started,
            rows=table.content.counts.rows_in,
            wall_seconds=table.run.wall_seconds,
            cpu_seconds=table.run.cpu_seconds,
        )
        for name, table in facts.tables.items()
        if name not in SECONDARY_TABLES
    ]


def num_pages(facts: RunFacts) -> int:
    """Records that held a page: everything that the source stage did not drop."""
    if "documents" not in facts.tables:
        return 0
    counts = facts.tables["documents"].content.counts
    return counts.rows_in - sum(number for name, number in counts.dropped.items() if name.startswith("source/"))


# What the documents share with the evaluation sets, set by set; a sum over the manifest of `documents`.


@dataclass(frozen=True)
class EvaluationSet:
    """One set: what it holds, and what of it was found in documents."""

    name: str
    items: int
    looked_for: int
    """Items that are long enough to be found."""
    seen: int
    """Items of which a document holds an n-gram."""
    seen_mostly: int
    documents: int
    ngrams: int
    """Occurrences in documents, each document's distinct ones."""

    @property
    def share(self) -> float:
        """Items seen over items, 0..1."""
        return self.seen / self.items if self.items else 0.0


def evaluation_sets(facts: RunFacts) -> list[EvaluationSet]:
    """Every set with its hits, those with most documents first; empty where none was given."""
    figures = facts.figures("documents")
    sizes: Mapping[str, Mapping[str, int]] = figures.get(SETS, {})
    documents, ngrams = figures.get(DOCUMENTS, {}), figures.get(NGRAMS, {})
    seen, mostly = (_by_set(figures.get(name, {})) for name in (ITEMS, WHOLE_ITEMS))
    rows = [
        EvaluationSet(
            name=name,
            items=sizes.get(name, {}).get("items", 0),
            looked_for=sizes.get(name, {}).get("indexed", 0),
            seen=seen[name],
            seen_mostly=mostly[name],
            documents=documents.get(name, 0),
            ngrams=ngrams.get(name, 0),
        )
        for name in {**sizes, **documents}
    ]
    return sorted(rows, key=lambda row: (-row.documents, row.name))


def canaries(facts: RunFacts) -> Mapping[str, int]:
    """Documents with canary strings and their occurrences; empty where none was found."""
    found: Mapping[str, int] = facts.figures("documents").get(CANARIES, {})
    return found


def _by_set(items: Mapping[str, int]) -> Counter[str]:
    """Number of items by set; an item is named by its set and line."""
    return Counter(item.rpartition(":")[0] for item in items)
