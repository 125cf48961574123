"""The stage `decontaminate`: n-grams shared with evaluation sets, and canary strings, are dropped, cut or counted.

The n-grams of all sets are few, so the join with the corpus is a look-up in an index that is built once and
memory-mapped by every worker; the keys of a document's words are already known. The row function measures the overlap;
checks on the stored columns decide which documents are dropped.
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
from pipeline.minhash.shingles import text_keys
from pipeline.text.words import Codes
from schemas.entries import flatten_entries
from schemas.text import text_table

# Contamination figures that the step `documents` counts, and their text table with a row for each evaluation set.
#
# Items are counted by name, so the figures are bounded by the size of the sets and do not grow with the corpus.

SETS, DOCUMENTS, NGRAMS = "evaluation_sets", "contaminated_documents", "contaminated_ngrams"
ITEMS, WHOLE_ITEMS, CANARIES = "contaminated_items", "contaminated_items_whole", "canaries"
HITS = "_hits"
"""Private key of a row: `set:line` of the items with a shared n-gram, and True if most of the item is shared."""


def figures_of(row: Row) -> Iterator[tuple[str, str, int]]:
    """Yield (name of a group of counts, name of the count, amount) for each count that a document increases."""
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
    """Return the numbers of items, items with an n-gram and distinct n-grams of each set in an index file."""
    numbers = ("items", "indexed", "ngrams")
    return {entry["name"]: {name: entry[name] for name in numbers} for entry in open_index(path).header["sets"]}


def contamination_table(figures: Mapping[str, Any]) -> str:
    """Return a text table with a row for each evaluation set, from the figures of the table `documents`.

    `looked for` counts the set's items that have an n-gram in the index. `seen` counts the items that share an n-gram
    with a document, and `share` is `seen` / `items`. `seen 70%` counts the items of which one document has at least
    MOSTLY of the n-grams. `documents` counts the documents that share an n-gram with the set, and `n-grams` sums the
    n-grams that each of them shares.

    A last line counts the canaries. Without evaluation sets and canaries, the text is empty.
    """
    heads = ("evaluation set", "items", "looked for", "seen", "share", f"seen {MOSTLY:.0%}", "documents", "n-grams")
    rows = [heads]
    seen, whole = (_by_set(figures.get(name, {})) for name in (ITEMS, WHOLE_ITEMS))
    for name, sizes in sorted(figures.get(SETS, {}).items()):
        share = f"{seen.get(name, 0) / sizes['items']:.2%}"
        counts = [figures.get(figure, {}).get(name, 0) for figure in (DOCUMENTS, NGRAMS)]
        numbers = [sizes["items"], sizes["indexed"], seen.get(name, 0), share, whole.get(name, 0), *counts]
        rows.append((name, *(n if isinstance(n, str) else f"{n:,}" for n in numbers)))
    lines = text_table(rows, "<>")
    if figures.get(CANARIES):
        lines.append("canary strings: {occurrences:,} in {documents:,} documents".format(**figures[CANARIES]))
    return "\n".join(lines[len(rows) == 1 :])


def _by_set(items: Mapping[str, int]) -> dict[str, int]:
    """Return the number of items of each evaluation set, from items named `set:line`."""
    counts: dict[str, int] = {}
    for item in items:
        name = item.rpartition(":")[0]
        counts[name] = counts.get(name, 0) + 1
    return counts


__all__ = ["DECONTAMINATE", "DecontaminateConfig", "contamination_table", "figures_of", "set_sizes"]


def model_files(config: DecontaminateConfig) -> dict[str, str]:
    """Return {SET + name: path} of each evaluation set, and {IGNORED: path} of the ignored text if there is one."""
    files = {SET + name: path for name, path in config.evaluation_sets.items()}
    return files | ({IGNORED: config.ignored} if config.ignored else {})


def canary_counter(config: DecontaminateConfig) -> Callable[[str], int]:
    """Return the function that counts the occurrences of the canaries in a text."""
    if config.canary_ignore_case:
        folded = [canary.casefold() for canary in config.canaries]
        return lambda text: sum(map(text.casefold().count, folded))
    return lambda text: sum(map(text.count, config.canaries))


def keys_of_row(row: Row) -> Codes:
    """Return the keys of the normalized words of a row's text after cuts. The first call stores them in the row."""
    keys: Codes | None = row["_words"]
    if keys is None:
        keys = row["_words"] = text_keys(row["_body"])
    return keys


def make(config: DecontaminateConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that measures the row of a document; it drops no document.

    With `action = "cut"`, the function also cuts the text.
    """
    index = open_index(models[FILE]) if config.evaluation_sets else None
    canaries = canary_counter(config)

    def decontaminate(row: Row) -> None:
        row["contamination"] = row["contaminated_share"] = row["contaminated_pieces"] = None
        row["canaries"] = canaries(row["text"]) if config.canaries else None
        if index is None:
            return
        overlap = index.overlap(row["_body"], keys_of_row(row))
        row["contamination"] = overlap.ngrams if overlap else {}
        row["contaminated_share"] = overlap.share if overlap else 0.0
        if overlap:
            row[HITS] = overlap.items
            if config.action == "cut":
                row["contaminated_pieces"] = cut_row(row, index, config)

    return decontaminate


def most_ngrams(batch: pa.RecordBatch) -> npt.NDArray[np.float64]:
    """Return, for each document, the most n-grams that it shares with one evaluation set; NaN if not measured."""
    column = batch.column("contamination")
    shared = flatten_entries(column)
    most = np.where(column.is_valid().to_numpy(zero_copy_only=False), 0.0, np.nan)
    np.maximum.at(most, shared.rows, shared.values.to_numpy())
    return most


def checks(config: DecontaminateConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """Return the checks that compare stored measurements with the limits given in the settings."""
    limits: list[tuple[str, str, str, float | None, Any]] = []
    if config.canaries:
        limits.append(("canary", "canaries", "max_canaries", config.max_canaries, None))
    if config.evaluation_sets and config.action == "drop":
        limits.append(("contaminated", "contamination", "max_ngrams", config.ngram_limit, most_ngrams))
        limit = config.max_contaminated_share
        limits.append(("contaminated_share", "contaminated_share", "max_contaminated_share", limit, None))
    if config.evaluation_sets and config.action == "cut":
        limits.append(("contaminated_whole", "contaminated_pieces", "min_pieces", config.min_pieces, None))
        limits.append(("contaminated_pieces", "contaminated_pieces", "max_pieces", config.max_pieces, None))
    return [
        Check(reason, column, setting, {EVERY: limit}, value, (column,) if value else ())
        for reason, column, setting, limit, value in limits
        if limit is not None
    ]


DECONTAMINATE = PerDocument(
    name="decontaminate",
    version=4,
    config=DecontaminateConfig,
    reads=("text", "cuts", "_body", "_words"),
    adds=("contamination", "contaminated_share", "contaminated_pieces", "canaries"),
    reasons={},
    verdicts={
        "canary": "it contains a canary string, which marks text that must not be trained on",
        "contaminated": "it shares too many n-grams with an evaluation set",
        "contaminated_share": "n-grams of evaluation sets make up too large a share of it",
        "contaminated_whole": "cutting n-grams of evaluation sets leaves too little of it",
        "contaminated_pieces": "cutting n-grams of evaluation sets leaves it in too many pieces",
    },
    make=make,
    checks=checks,
    models=model_files,
    compile=compile_index,
    ends=False,
)
