"""Decontamination: n-grams that a document shares with evaluation sets, and canary strings; dropped, cut or counted.

The n-grams of all sets are bounded, so the join with the corpus is a look-up in an index that every worker maps into
memory, made once from the sets; documents bring the keys of their words along. Here is measured what is shared, and
from the stored columns is decided what is dropped for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.decontaminate.config import DecontaminateConfig
from pipeline.decontaminate.index import FILE, IGNORED, SET, compile_index
from pipeline.decontaminate.match import MOSTLY, cut_row, open_index
from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Row, RowFunction
from schemas.tables import flatten_entries

# What the documents pass counts of contamination, and the table that shows it for each evaluation set.
#
# Items are counted by name, at most as many as the sets have, so the figures do not grow with the corpus.

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


__all__ = ["DECONTAMINATE", "DecontaminateConfig", "contamination_table", "figures_of", "set_sizes"]


def model_files(config: DecontaminateConfig) -> dict[str, str]:
    """Paths of the evaluation sets and of the ignored text."""
    files = {SET + name: path for name, path in config.evaluation_sets.items()}
    return files | ({IGNORED: config.ignored} if config.ignored else {})


def canary_counter(config: DecontaminateConfig) -> Callable[[str], int]:
    """The number of occurrences of the canaries in a text, as a function of the text."""
    if config.canary_ignore_case:
        folded = [canary.casefold() for canary in config.canaries]
        return lambda text: sum(map(text.casefold().count, folded))
    return lambda text: sum(map(text.count, config.canaries))


def make(config: DecontaminateConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that measures a document and, if the action is to cut, cuts it; it drops nothing."""
    index = open_index(models[FILE]) if config.evaluation_sets else None
    canaries = canary_counter(config)

    def decontaminate(row: Row) -> None:
        row["contamination"] = row["contaminated_share"] = row["contaminated_pieces"] = None
        row["canaries"] = canaries(row["text"]) if config.canaries else None
        if index is None:
            return
        overlap = index.overlap(row["_body"], row["_words"])
        row["contamination"] = overlap.ngrams if overlap else {}
        row["contaminated_share"] = overlap.share if overlap else 0.0
        if overlap:
            row[HITS] = overlap.items
            if config.action == "cut":
                row["contaminated_pieces"] = cut_row(row, index, config)

    return decontaminate


def most_ngrams(batch: pa.RecordBatch) -> npt.NDArray[np.float64]:
    """Distinct n-grams that each document shares with the set it shares most with; NaN where not measured."""
    column = batch.column("contamination")
    shared = flatten_entries(column)
    most = np.where(column.is_valid().to_numpy(zero_copy_only=False), 0.0, np.nan)
    np.maximum.at(most, shared.rows, shared.values.to_numpy())
    return most


def checks(config: DecontaminateConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """What the settings say of the stored measurements."""
    found: list[tuple[str, str, str, float | None, Any]] = []
    if config.canaries:
        found.append(("canary", "canaries", "max_canaries", config.max_canaries, None))
    if config.evaluation_sets and config.action == "drop":
        found.append(("contaminated", "contamination", "max_ngrams", config.ngram_limit, most_ngrams))
        limit = config.max_contaminated_share
        found.append(("contaminated_share", "contaminated_share", "max_contaminated_share", limit, None))
    if config.evaluation_sets and config.action == "cut":
        found.append(("contaminated_whole", "contaminated_pieces", "min_pieces", config.min_pieces, None))
        found.append(("contaminated_pieces", "contaminated_pieces", "max_pieces", config.max_pieces, None))
    return [
        Check(reason, column, setting, {EVERY: limit}, value, (column,) if value else ())
        for reason, column, setting, limit, value in found
        if limit is not None
    ]


DECONTAMINATE = PerDocument(
    name="decontaminate",
    version=2,
    config=DecontaminateConfig,
    reads=("text", "cuts", "_body", "_words"),
    adds=("contamination", "contaminated_share", "contaminated_pieces", "canaries"),
    reasons={},
    verdicts={
        "canary": "it holds a canary string, which marks text not to be trained on",
        "contaminated": "it shares more n-grams with an evaluation set than it may",
        "contaminated_share": "too large a share of it are n-grams of evaluation sets",
        "contaminated_whole": "cutting n-grams of evaluation sets leaves too little of it",
        "contaminated_pieces": "cutting n-grams of evaluation sets leaves it in too many pieces",
    },
    make=make,
    checks=checks,
    models=model_files,
    compile=compile_index,
    ends=False,
)
