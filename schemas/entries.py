"""Columns of entries: values by name, as a list of (name, value) in each row, sorted by name."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# Columns of entries. In memory their values are mappings. They do not use Arrow's map type, because not every reader of
# Parquet supports it (Hugging Face `datasets` rejects the whole table) and its order depends on the writer. DuckDB
# converts such a column to a map with `map_from_entries`.

NAME, VALUE = "name", "value"


class FlatEntries(NamedTuple):
    """The entries (name, value) of all rows of a column, as arrays."""

    rows: npt.NDArray[np.int64]
    """(entries,) the row number of each entry."""
    names: pa.Array
    values: pa.Array


def entries_of(kind: pa.DataType) -> pa.ListType:
    """Return the Arrow type of a column of entries (name, value) whose values have the type `kind`."""
    return pa.list_(pa.field("element", pa.struct([(NAME, pa.string()), (VALUE, kind)])))


def value_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of the values if `kind` is the type of a column of entries; None for any other type."""
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return None
    fields = list(kind.value_type)
    return fields[1].type if [field.name for field in fields] == [NAME, VALUE] else None


def to_entries(values: Mapping[str, Any] | None) -> list[tuple[str, Any]] | None:
    """Return a mapping as entries for Arrow, sorted by name."""
    return None if values is None else sorted(values.items(), key=lambda entry: entry[0])


def to_mapping(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Return the entries of a row as a mapping from name to value; None if the row is null."""
    return None if entries is None else {entry[NAME]: entry[VALUE] for entry in entries}


def flatten_entries(column: pa.ListArray) -> FlatEntries:
    """Return the entries of all rows of a column, which may be a slice of an array."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    entries = column.flatten()
    return FlatEntries(
        np.repeat(np.arange(len(column)), lengths), *(pc.struct_field(entries, name) for name in (NAME, VALUE))
    )


def lookup_entry(column: pa.ListArray, name: str) -> pa.Array:
    """Return the value of the entry `name` in each row; null if a row has no such entry."""
    flat = flatten_entries(column)
    is_named = pc.fill_null(pc.equal(flat.names, name), False).to_numpy(zero_copy_only=False)
    indices = np.full(len(column), -1, np.int64)
    indices[flat.rows[is_named]] = np.flatnonzero(is_named)
    return flat.values.take(pa.array(indices, mask=indices < 0))
