"""Columns that hold a value for each of some names: lists of entries (name, value), sorted by name.

In memory such values are a mapping. Arrow's own map type says the same, but not every reader of Parquet knows it
(Hugging Face `datasets` refuses such a table whole), and its order is left to the writer. DuckDB makes a map of such a
column with `map_from_entries`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

NAME, VALUE = "name", "value"


class Flat(NamedTuple):
    """All entries of a column one behind the other."""

    rows: npt.NDArray[np.int64]
    """(entries,) the row that each stands in."""
    names: pa.Array
    values: pa.Array


def entries_of(kind: pa.DataType) -> pa.ListType:
    """The type of a column with a value of this type for each name."""
    return pa.list_(pa.field("element", pa.struct([(NAME, pa.string()), (VALUE, kind)])))


def value_type(kind: pa.DataType) -> pa.DataType | None:
    """The type of the values if a column of this type holds entries; None if it does not."""
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return None
    fields = list(kind.value_type)
    return fields[1].type if [field.name for field in fields] == [NAME, VALUE] else None


def to_entries(values: Mapping[str, Any] | None) -> list[tuple[str, Any]] | None:
    """A mapping as Arrow takes it for such a column: equal mappings give equal entries."""
    return None if values is None else sorted(values.items(), key=lambda entry: entry[0])


def to_mapping(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Entries as they are read, as a mapping."""
    return None if entries is None else {entry[NAME]: entry[VALUE] for entry in entries}


def flattened(column: pa.ListArray) -> Flat:
    """The entries of a column, which may be a slice; rows that are null or empty have none."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    entries = column.flatten()
    return Flat(np.repeat(np.arange(len(column)), lengths), *(pc.struct_field(entries, name) for name in (NAME, VALUE)))


def lookup(column: pa.ListArray, name: str) -> pa.Array:
    """(rows,) the value of the entry of this name; null where there is none."""
    flat = flattened(column)
    found = pc.fill_null(pc.equal(flat.names, name), False).to_numpy(zero_copy_only=False)
    places = np.full(len(column), -1, np.int64)
    places[flat.rows[found]] = np.flatnonzero(found)
    return flat.values.take(pa.array(places, mask=places < 0))
