"""Checks evaluated on batches of stored columns, and exact histograms and quantiles of those columns.

The first check that a document breaks drops it. No text is read here. A run, a what-if and the report use this code.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.engine.stage import EVERY, Check, Quantile
from schemas.entries import to_entries
from schemas.errors import ContractError

Floats = npt.NDArray[np.float64]
KEPT = -1


@dataclass(frozen=True, slots=True)
class CheckResults:
    """The results of some checks on a batch of documents."""

    broken: npt.NDArray[np.bool_]
    """Whether each document breaks each check; shape (checks, documents)."""
    values: Floats
    """The compared values; shape (checks, documents), NaN where not measured."""
    limits: Floats
    """The limits; shape (checks, documents), NaN where the check does not apply."""
    marks: npt.NDArray[np.bool_]
    """Whether each check only marks documents; shape (checks,)."""

    @property
    def first(self) -> npt.NDArray[np.int64]:
        """The index of the first check that drops each document, KEPT if none does; shape (documents,)."""
        if not len(self.broken):
            return np.full(self.broken.shape[1], KEPT)
        drops = self.broken & ~self.marks[:, None]
        return np.where(drops.any(axis=0), drops.argmax(axis=0), KEPT)


def columns_of(checks: Sequence[Check | Quantile]) -> list[str]:
    """Return `language` and the stored columns that checks or quantiles read, each column once."""
    names = [name for check in checks for name in (check.needs or (check.column,))]
    facts = ["language", "source"] if any(check.sources is not None for check in checks) else ["language"]
    return list(dict.fromkeys([*facts, *names]))


def values_of(check: Check | Quantile, batch: pa.RecordBatch) -> Floats:
    """Return the values that a check or quantile uses, in float32; shape (documents,), NaN where there is none."""
    applies = of_sources(check.sources, batch)
    if not check.column or (applies is not None and not applies.any()):
        return np.full(batch.num_rows, np.nan)
    if check.value is not None:
        values = check.value(batch)
    else:
        column = pc.fill_null(pc.cast(batch.column(check.column), pa.float64()), np.nan)
        values = column.to_numpy(zero_copy_only=False)
    rounded: Floats = values.astype(np.float32).astype(np.float64)
    return rounded if applies is None else np.where(applies, rounded, np.nan)


def of_sources(sources: Set[str] | None, batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
    """Return True for the documents of these sources (documents,); None if `sources` is None, which means all."""
    if sources is None:
        return None
    found: npt.NDArray[np.bool_] = pc.is_in(batch.column("source"), pa.array(sorted(sources))).to_numpy(False)
    return found


def elements_of(item: Quantile, batch: pa.RecordBatch) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the values over which a quantile is taken, and the number of the document of each; shape (values,).

    A column of lists has a value for each element, any other column or function one for each document.
    """
    if item.value is None and pa.types.is_list(batch.schema.field(item.column).type):
        column = batch.column(item.column)
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        values: Floats = column.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
        documents, applies = np.repeat(np.arange(batch.num_rows), counts), of_sources(item.sources, batch)
        return values if applies is None else np.where(applies[documents], values, np.nan), documents
    return values_of(item, batch), np.arange(batch.num_rows)


def languages_of(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return the index of each document's language in a list of languages, and the list.

    EVERY is the language of a document without a language. The indices have the shape (documents,).
    """
    encoded = pc.dictionary_encode(pc.fill_null(batch.column("language"), EVERY))
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def evaluate_checks(checks: Sequence[Check], batch: pa.RecordBatch) -> CheckResults:
    """Return the results of the checks on a batch that has the columns `columns_of(checks)`."""
    shape = (len(checks), batch.num_rows)
    broken, values, limits = np.zeros(shape, bool), np.full(shape, np.nan), np.full(shape, np.nan)
    numbers, names = languages_of(batch)
    for row, check in enumerate(checks):
        applies = of_sources(check.sources, batch)
        if applies is not None and not applies.any():
            continue
        by_language = np.array([limit_of(check, name) for name in names], np.float64)
        limits[row] = by_language.astype(np.float32)[numbers]
        values[row] = values_of(check, batch)
        if applies is not None:
            limits[row, ~applies] = np.nan
        if check.drops is not None:
            broken[row] = check.drops(batch) if applies is None else check.drops(batch) & applies
        else:
            broken[row] = values[row] < limits[row] if is_minimum(check) else values[row] > limits[row]
    return CheckResults(broken, values, limits, np.array([check.marks for check in checks], bool))


class RowChecks:
    """Some checks for one document at a time, with the results of `evaluate_checks`.

    Comparisons of a column with a limit are made without Arrow, which takes milliseconds for a batch of one row.
    """

    def __init__(self, checks: Sequence[Check], kinds: Mapping[str, pa.DataType]):
        """`kinds` are the types of the stored columns that the checks read."""
        self._checks = checks
        self._kinds = kinds
        languages = {EVERY, *(name for check in checks for name in check.limits)}
        self._limits = {name: [float(np.float32(limit_of(check, name))) for check in checks] for name in languages}
        self._is_plain = [check.value is None and check.drops is None for check in checks]
        self._is_minimum = [is_plain and is_minimum(check) for check, is_plain in zip(checks, self._is_plain)]

    def first_broken(self, row: Mapping[str, Any]) -> int:
        """Return the index of the first check that drops a document, KEPT if none does."""
        limits = self._limits.get(row.get("language") or EVERY, self._limits[EVERY])
        for number, check in enumerate(self._checks):
            if check.marks:
                continue
            if not self._is_plain[number]:
                if evaluate_checks([check], self._batch(check, row)).broken[0, 0]:
                    return number
                continue
            measured = row.get(check.column)
            if measured is None or math.isnan(limits[number]):
                continue
            value = float(np.float32(measured))
            if value < limits[number] if self._is_minimum[number] else value > limits[number]:
                return number
        return KEPT

    def _batch(self, check: Check, row: Mapping[str, Any]) -> pa.RecordBatch:
        names = columns_of([check])
        values = [row.get(name) for name in names]
        stored = [to_entries(value) if isinstance(value, dict) else value for value in values]
        arrays = [pa.array([value], self._kinds[name]) for name, value in zip(names, stored)]
        return pa.RecordBatch.from_arrays(arrays, names)


def limit_of(check: Check, language: str) -> float:
    """Return the limit of a check for documents in a language; NaN if the check does not apply to this language."""
    return check.limits.get(language, check.limits.get(EVERY, np.nan))


def has_limit(check: Check) -> bool:
    """Return True if the check compares one value of a document with a minimum or a maximum."""
    return check.drops is None or check.side is not None


def is_minimum(check: Check) -> bool:
    """Return True if the limit of a check is a minimum, False if it is a maximum.

    Without a `side`, the name of the check's setting starts with min_ or max_. Raises ContractError for another name.
    """
    if check.side is not None:
        return check.side == "min"
    side = check.setting.rpartition(".")[2][:4]
    if side not in ("min_", "max_"):
        raise ContractError(
            f"check {check.reason}: expected a setting whose name starts with min_ or max_, got {check.setting!r}. "
            "Rename the setting."
        )
    return side == "min_"


def evaluate_row(checks: Sequence[Check], row: Mapping[str, object]) -> tuple[str, float, float] | None:
    """Return reason, value and limit of the first check that one document breaks, or None if it breaks none."""
    names = columns_of(checks)
    kinds = {"doc_id": pa.binary(16), "language": pa.string(), "source": pa.string()}
    batch = pa.RecordBatch.from_arrays([pa.array([row.get(n)], kinds.get(n)) for n in names], names)
    if pa.null() in batch.schema.types:
        arrays = [c.cast(pa.float64()) if c.type == pa.null() else c for c in batch.columns]
        batch = pa.RecordBatch.from_arrays(arrays, names)
    verdict = evaluate_checks(checks, batch)
    first = int(verdict.first[0])
    if first == KEPT:
        return None
    return checks[first].reason, float(verdict.values[first, 0]), float(verdict.limits[first, 0])


# Histograms. The bin of a value is given by the leading bits of its float32. Read as integers, float32 bits sort as
# their numbers do, so removing the last bits gives bins of constant relative width. Counts can be summed in any order,
# so neither they nor the quantiles computed from them depend on the partitioning.

FINE = 12
"""Number of last bits removed for quantiles: bins are 0.05 % wide, 2,048 for each factor of two."""
COARSE = 21
"""Number of last bits removed for plots: four bins for each factor of two."""
_SIGN = np.uint32(1 << 31)

Counts = dict[int, int]


def bins_of(values: npt.NDArray[np.float64], cut: int) -> npt.NDArray[np.int64]:
    """Return the number of each value's histogram bin. NaN is not allowed.

    A larger value has the same bin number or a larger one. `cut` sets the width of the bins; see FINE and COARSE.
    """
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    keys: npt.NDArray[np.int64] = (ordered >> np.uint32(cut)).astype(np.int64)
    return keys


def lower_edge(key: int, cut: int) -> float:
    """Return the smallest value that `bins_of` assigns to the bin `key`."""
    ordered = np.uint32(min(max(key << cut, 0), 0xFFFFFFFF))
    bits = ordered ^ _SIGN if ordered & _SIGN else ~ordered
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def count_bins(values: npt.NDArray[np.float64], cut: int) -> Counts:
    """Return the number of values in each bin; NaN values are not counted."""
    keys, counts = np.unique(bins_of(values[~np.isnan(values)], cut), return_counts=True)
    return dict(zip(keys.tolist(), counts.tolist()))


def quantile(counts: Mapping[int, int], share: float, cut: int, keeps_highest: bool = False) -> float:
    """Return the smallest upper end of a bin below which at least `share` (0..1) of the counted values lie.

    `counts` is a histogram as `count_bins` returns it. NaN if the histogram is empty. With `keeps_highest`, the values
    of the highest bin are never below it.
    """
    keys = sorted(counts)
    if not keys:
        return math.nan
    reached = np.cumsum([counts[key] for key in keys])
    target = max(1, math.ceil(share * int(reached[-1])))
    end = keys[int(np.searchsorted(reached, target))] + 1
    return lower_edge(min(end, keys[-1]) if keeps_highest else end, cut)
