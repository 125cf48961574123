"""What the documents pass counts of contamination, and the table that shows it for each evaluation set.

Items are counted by name, at most as many as the sets have, so the figures do not grow with the corpus.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.decontaminate.match import MOSTLY, open_index
from pipeline.engine.stage import Row

SETS, DOCUMENTS, NGRAMS = "evaluation_sets", "contaminated_documents", "contaminated_ngrams"
ITEMS, WHOLE_ITEMS, CANARIES = "contaminated_items", "contaminated_items_whole", "canaries"
HITS = "_hits"
"""Private key of a row: `set:line` of the items found in it, and whether most of the item was."""


def figures_of(row: Row) -> Iterator[tuple[str, str, int]]:
    """(figure, name, amount) of everything that is counted of a measured row."""
    for name, count in (row.get("contamination") or {}).items():
        yield DOCUMENTS, name, 1
        yield NGRAMS, name, count
    for item, whole in row.get(HITS) or ():
        yield ITEMS, item, 1
        if whole:
            yield WHOLE_ITEMS, item, 1
    if row.get("canaries"):
        yield CANARIES, "documents", 1
        yield CANARIES, "occurrences", row["canaries"]


def set_sizes(path: str) -> dict[str, dict[str, int]]:
    """By evaluation set of an index: items, items that are looked for, distinct n-grams; the figure SETS."""
    numbers = ("items", "indexed", "ngrams")
    return {one["name"]: {name: one[name] for name in numbers} for one in open_index(path).header["sets"]}


def contamination_table(figures: Mapping[str, Any]) -> str:
    """The hits of each evaluation set as text, from the figures of the table `documents`; empty if there are no sets.

    Items of a set, those looked for, those of which a document has an n-gram or MOSTLY all, and documents with hits.
    """
    heads = ("evaluation set", "items", "looked for", "seen", "share", f"seen {MOSTLY:.0%}", "documents", "n-grams")
    rows = [heads]
    seen, whole = (_by_set(figures.get(name, {})) for name in (ITEMS, WHOLE_ITEMS))
    for name, sizes in sorted(figures.get(SETS, {}).items()):
        share = f"{seen.get(name, 0) / sizes['items']:.2%}"
        counts = [figures.get(figure, {}).get(name, 0) for figure in (DOCUMENTS, NGRAMS)]
        numbers = [sizes["items"], sizes["indexed"], seen.get(name, 0), share, whole.get(name, 0), *counts]
        rows.append((name, *(n if isinstance(n, str) else f"{n:,}" for n in numbers)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    if figures.get(CANARIES):
        lines.append("canary strings: {occurrences:,} in {documents:,} documents".format(**figures[CANARIES]))
    return "\n".join(lines[len(rows) == 1 :])


def _by_set(items: Mapping[str, int]) -> dict[str, int]:
    """Number of items by set."""
    counts: dict[str, int] = {}
    for item in items:
        name = item.rpartition(":")[0]
        counts[name] = counts.get(name, 0) + 1
    return counts
