"""The index of the evaluation sets: their n-grams sorted, each with the items it is from, in one memory-mapped file.

It grows with the sets and not with the corpus, so it is made once and every worker looks its documents up in it. A
filter of 32 to 64 bits an n-gram sorts out all but one in 32 of the others before the binary search.
"""

import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.decontaminate.config import DecontaminateConfig
from pipeline.decontaminate.items import read_items
from pipeline.decontaminate.ngrams import character_keys, is_unspaced, ngrams, prefix_sums
from pipeline.text.words import Codes, Ints, normal_words, word_keys
from schemas.errors import ConfigError
from schemas.ids import canonical_json, digest_of, file_sha256

FORMAT = 1
FILE, SET, IGNORED = "index", "set_", "ignored"
"""Names of the compiled file, of each set's (with its name behind) and of the ignored text among a stage's models."""
WORDS, CHARACTERS = "word_sizes", "character_sizes"
_FILTER_BITS = 32  # an n-gram, at least


@dataclass
class _Collected:
    """The n-grams of items while they are read."""

    config: DecontaminateConfig
    sizes: dict[str, set[int]] = field(default_factory=lambda: {WORDS: set(), CHARACTERS: set()})
    hashes: list[Codes] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def add(self, text: str, owner: int) -> None:
        """Take the n-grams of a text; all of it if it is shorter but long enough, else nothing."""
        if is_unspaced(text):
            kind, keys = CHARACTERS, character_keys(text)
            size, least = self.config.ngram_chars, self.config.min_item_chars
        else:
            kind, keys = WORDS, word_keys(normal_words(text))
            size, least = self.config.ngram, self.config.min_item_words
        size = min(size, max(len(keys), least))
        if len(keys) >= size:
            self.sizes[kind].add(size)
            self.hashes.append(ngrams(prefix_sums(keys), size))
            self.owners.append(owner)

    def pairs(self) -> tuple[Codes, npt.NDArray[np.uint32]]:
        """Every n-gram with its item, each pair once, sorted."""
        hashes = np.concatenate([np.zeros(0, np.uint64), *self.hashes])
        owners = np.repeat(np.array(self.owners, np.uint32), [len(part) for part in self.hashes])
        order = np.lexsort((owners, hashes))
        hashes, owners = hashes[order], owners[order]
        first = np.ones(len(hashes), bool)
        first[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
        return hashes[first], owners[first]


def compile_index(config: DecontaminateConfig, paths: Mapping[str, str], folder: str) -> dict[str, str]:
    """The path of the index of the sets, by the name FILE; a file of the same origin that stands in the folder serves.

    Raises ConfigError, with file and line, for items that cannot be read, and for a set without any n-gram.
    """
    if not config.evaluation_sets:
        return {}
    digests = {name: file_sha256(Path(path)) for name, path in paths.items()}
    target = Path(folder) / f"decontamination-{digest_of([FORMAT, config.content(), digests])[:16]}.arrow"
    if not target.exists():
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            partial.write_bytes(build_index(config, paths))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return {FILE: str(target)}


def build_index(config: DecontaminateConfig, paths: Mapping[str, str]) -> bytes:
    """The bytes of the index of the sets: equal for equal files and settings. Raises ConfigError as above."""
    collected, lines, sets = _Collected(config), list[int](), list[dict[str, Any]]()
    for name in sorted(config.evaluation_sets):
        where = f"decontaminate.evaluation_sets.{name}"
        first = len(lines)
        for line, texts in read_items(paths[SET + name], where, config.fields.get(name, ())):
            for text in texts:
                collected.add(text, len(lines))
            lines.append(line)
        sets.append({"name": name, "items": len(lines) - first})
    hashes, owners = collected.pairs()
    if IGNORED in paths:
        counts = ~np.isin(hashes, _ignored(config, paths[IGNORED], collected.sizes))
        hashes, owners = hashes[counts], owners[counts]
    item_ngrams = np.bincount(owners, minlength=len(lines)).astype(np.uint32)
    starts = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]))
    _describe(sets, item_ngrams, owners, np.repeat(np.arange(len(starts)), np.diff(starts, append=len(hashes))))
    sizes = {kind: sorted(found) for kind, found in collected.sizes.items()}
    arrays = {
        "hashes": hashes[starts],
        "starts": np.append(starts, len(hashes)).astype(np.int64),
        "owners": owners,
        "item_lines": np.array(lines, np.uint32),
        "item_ngrams": item_ngrams,
        "filter": _filter_of(hashes[starts]),
    }
    return _to_bytes(arrays, {"format": FORMAT, "sets": sets, **sizes})


def _describe(sets: list[dict[str, Any]], item_ngrams: Any, owners: Any, entries: Ints) -> None:
    """Add to each set how many of its items are looked for and how many distinct n-grams they have."""
    first = 0
    for one in sets:
        last = first + one["items"]
        one["indexed"] = int(np.count_nonzero(item_ngrams[first:last]))
        one["ngrams"] = len(np.unique(entries[(owners >= first) & (owners < last)]))
        if not one["indexed"]:
            raise ConfigError(
                f"decontaminate.evaluation_sets.{one['name']}: promised items that can be looked for, found none among "
                f"{one['items']}; name other fields, or a smaller min_item_words"
            )
        first = last


def _ignored(config: DecontaminateConfig, path: str, sizes: Mapping[str, Iterable[int]]) -> Codes:
    """The n-grams of the ignored text, of every size that the index has."""
    found = [np.zeros(0, np.uint64)]
    for _, texts in read_items(path, "decontaminate.ignored"):
        for text in texts:
            for kind, keys in ((WORDS, word_keys(normal_words(text))), (CHARACTERS, character_keys(text))):
                found += [ngrams(prefix_sums(keys), size) for size in sizes[kind]]
    return np.unique(np.concatenate(found))


def _filter_of(hashes: Codes) -> npt.NDArray[np.uint8]:
    """A bit for every value of the leading bits of a hash, set where one of the sorted hashes has it."""
    bits = max(10, (_FILTER_BITS * len(hashes) - 1).bit_length())
    slots = (hashes >> np.uint64(64 - bits)).view(np.int64)
    found = np.zeros(1 << (bits - 3), np.uint8)
    starts = np.flatnonzero(np.diff(slots >> 3, prepend=-1))
    if len(starts):
        found[slots[starts] >> 3] = np.bitwise_or.reduceat(np.uint8(1) << (slots & 7).astype(np.uint8), starts)
    return found


def _to_bytes(arrays: Mapping[str, Any], header: Mapping[str, Any]) -> bytes:
    """An Arrow file of one row, a list a column: what its reader maps into memory without a copy."""
    columns = [pa.LargeListArray.from_arrays(pa.array([0, len(a)], pa.int64()), pa.array(a)) for a in arrays.values()]
    batch = pa.RecordBatch.from_arrays(columns, list(arrays)).replace_schema_metadata({FILE: canonical_json(header)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
