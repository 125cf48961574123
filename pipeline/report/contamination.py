"""What the documents share with the evaluation sets, set by set; a sum over the manifest of `documents`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.decontaminate.report import CANARIES, DOCUMENTS, ITEMS, NGRAMS, SETS, WHOLE_ITEMS
from pipeline.report.facts import Facts


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


def evaluation_sets(facts: Facts) -> list[EvaluationSet]:
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


def canaries(facts: Facts) -> Mapping[str, int]:
    """Documents with canary strings and their occurrences; empty where none was found."""
    found: Mapping[str, int] = facts.figures("documents").get(CANARIES, {})
    return found


def _by_set(items: Mapping[str, int]) -> Counter[str]:
    """Number of items by set; an item is named by its set and line."""
    return Counter(item.rpartition(":")[0] for item in items)
