"""The table of listed domains and URLs: built once from the lists, and memory-mapped by every worker.

It holds the sorted 64-bit keys of all entries, the categories of each as bits, and the place of the first key of each
range of keys, so that a look-up reads about 4 keys. The entries themselves are not stored. An address of 8 look-ups in
5 million entries gets a false category with a probability of 8 * 5e6 / 2^64 = 2e-12: less than one in 10^11 addresses.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.urls.config import UrlsConfig
from pipeline.urls.lists import read_list
from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of, file_sha256
from schemas.storage import Store

FORMAT = 1
FILE, LIST, ALLOW = "table", "list_", "allow_"
"""Names of the stage's files: the table, those of a category (followed by `NAME:NUMBER`), those of the allow list."""
ALLOWED = 1
"""Bit of the allow list; category number i, in the order of names, has the bit 2 << i."""
KEYS_PER_RANGE = 4
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class UrlTable:
    """Sorted keys of entries with their categories."""

    keys: Keys
    masks: Keys
    starts: npt.NDArray[np.uint32]
    """The place of the first key of each range of keys with equal leading bits, and the number of keys."""
    shift: int
    """Bits of a key that do not select its range."""
    longest: int
    """Length of the longest entry with a path [bytes]."""

    def __post_init__(self) -> None:
        arrays: tuple[Any, ...] = (self.keys, self.masks, self.starts)
        views = tuple(memoryview(array) for array in arrays)
        object.__setattr__(self, "_views", views)

    def mask_of(self, key: int) -> int:
        """Return the categories of a key as bits; 0 if it is not in the table."""
        keys, masks, starts = self._views  # type: ignore[attr-defined]
        first, end = starts[key >> self.shift], starts[(key >> self.shift) + 1]
        at = bisect_left(keys, key, first, end)
        return int(masks[at]) if at < end and keys[at] == key else 0


def make_table(lists: Sequence[tuple[int, bytes]], longest: int) -> UrlTable:
    """Return the table of lists, each given by its bit and the keys of its entries."""
    keys = np.concatenate([np.zeros(0, np.uint64), *(np.frombuffer(own, np.uint64) for _, own in lists)])
    bits = np.repeat(np.array([bit for bit, _ in lists], np.uint64), [len(own) // 8 for _, own in lists])
    order = np.argsort(keys, kind="stable")
    keys, bits = keys[order], bits[order]
    firsts = np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), bool), keys[1:] != keys[:-1]]))
    masks = np.bitwise_or.reduceat(bits, firsts) if len(firsts) else bits
    keys = keys[firsts]
    range_bits = max(1, (len(keys) // KEYS_PER_RANGE).bit_length())
    shift = 64 - range_bits
    bounds = np.arange(1 << range_bits, dtype=np.uint64) << np.uint64(shift)
    starts = np.append(np.searchsorted(keys, bounds), len(keys)).astype(np.uint32)
    return UrlTable(keys, masks, starts, shift, longest)


def compile_table(config: UrlsConfig, paths: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return {FILE: path of the table of the lists}; build it unless `folder` contains it. Empty without lists.

    Raises ConfigError, with file and line, for lists that cannot be read.
    """
    files = {name: path for name, path in paths.items() if name.startswith((LIST, ALLOW))}
    if not files:
        return {}
    digests = {name: file_sha256(Path(path)) for name, path in files.items()}
    target = Path(folder) / f"urls-{digest_of([FORMAT, sorted(config.block_lists), digests])[:16]}.arrow"
    if not target.exists():
        Store(folder).write_atomic(target.name, _to_bytes(build_table(config, files)))
    return {FILE: str(target)}


def build_table(config: UrlsConfig, paths: Mapping[str, str]) -> UrlTable:
    """Return the table, which depends on the entries of the lists alone. Raises ConfigError like `compile_table`."""
    bits = {name: 2 << number for number, name in enumerate(sorted(config.block_lists))}
    lists, longest = list[tuple[int, bytes]](), 0
    for file, path in sorted(paths.items()):
        category = file.removeprefix(LIST).partition(":")[0] if file.startswith(LIST) else ""
        where = f"urls.block_lists.{category}" if category else "urls.allow_list"
        keys, most = read_list(path, category, where)
        lists.append((bits[category] if category else ALLOWED, keys))
        longest = max(longest, most)
    return make_table(lists, longest)


def _to_bytes(table: UrlTable) -> bytes:
    """Return an Arrow file of one row with each array as a list."""
    arrays: dict[str, npt.NDArray[Any]] = {"keys": table.keys, "masks": table.masks, "starts": table.starts}
    columns = [pa.LargeListArray.from_arrays(pa.array([0, len(a)], pa.int64()), pa.array(a)) for a in arrays.values()]
    header = canonical_json({"format": FORMAT, "longest": table.longest, "shift": table.shift})
    batch = pa.RecordBatch.from_arrays(columns, list(arrays)).replace_schema_metadata({FILE: header})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _array_of(column: Any) -> Any:
    """Return the numbers of a column of one list, without a copy."""
    return column.values.to_numpy()


def open_table(path: str) -> UrlTable:
    """Return the memory-mapped table of a file. Raises ContractError if the file is not one."""
    try:
        file = pa.ipc.open_file(pa.memory_map(path))
        header = json.loads((file.schema.metadata or {})[FILE.encode()])
        batch = file.get_batch(0)
        arrays = {name: _array_of(batch.column(name)) for name in ("keys", "masks", "starts")}
        return UrlTable(**arrays, shift=header["shift"], longest=header["longest"])
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise ContractError(
            f"urls: expected a table of lists, got {path} ({error}). Delete the file, so that it is written again."
        ) from error
