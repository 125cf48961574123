"""The index of the evaluation sets: their n-grams sorted, each with the items it is from, in one memory-mapped file.

It grows with the sets and not with the corpus, so it is made once and every worker looks its documents up in it. A
filter of 32 to 64 bits an n-gram sorts out all but one in 32 of the others before the binary search.
"""

import io
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.decontaminate.config import DEFAULT_FIELDS, DecontaminateConfig
from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.words import Codes, Ints, normal_words, powers, word_keys
from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.ids import canonical_json, digest_of, file_sha256

# Items of an evaluation set: the texts of one JSON object a line, by the fields that hold them.


def read_items(path: str, where: str, fields: Sequence[str] = ()) -> Iterator[tuple[int, list[str]]]:
    """Line number, from 1, and texts of every item of a file; blank lines are none.

    Raises ConfigError, with file and line, for a line that is no JSON object or has none of the fields.
    """
    wanted = fields or DEFAULT_FIELDS
    for number, line in _lines(path, where):
        place = f"{where}: {path}:{number}"
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: expected a JSON object, got {error}. Correct the line.") from error
        if not isinstance(item, dict):
            raise ConfigError(f"{place}: expected a JSON object, got {type(item).__name__}. Correct the line.")
        found = [(name, list(_values(item, name.split(".")))) for name in wanted]
        if not any(values for _, values in found):
            raise ConfigError(
                f"{place}: expected a field {' or '.join(wanted)}, got {', '.join(map(repr, sorted(item))) or 'none'}"
                f"{suggest_name(wanted[0], item) if len(wanted) == 1 and item else ''}. Name the fields to look at."
            )
        yield number, [text for _, values in found for value in values for text in _strings(value)]


def _lines(path: str, where: str) -> Iterator[tuple[int, bytes]]:
    try:
        with pa.input_stream(path, compression="detect") as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                if line := line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{where}: expected a readable file, got {path}: {error}. Restore it.") from error


def _values(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """What lies at a path of field names; a list on the way stands for each of its members."""
    if not path:
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from _values(member, path)
    elif isinstance(value, dict) and path[0] in value:
        yield from _values(value[path[0]], path[1:])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from _strings(member)


# N-grams of a text as 64-bit numbers: of its words, or of its characters where writing does not separate words.
#
# The number of an n-gram is the polynomial of its units' keys, taken for all runs at once from prefix sums. Keys are
# xxh64, so an n-gram that is in no set of N n-grams is taken for one of them with probability N / 2^64 (up to the
# factor of 8 that exchanged words may cost): for 10^7 n-grams and a corpus of 10^12 words, 0.5 expected false hits in
# all of it.

_UNSPACED = re.compile(f"[{UNSPACED}]")
NON_WHITESPACE = re.compile(r"\S+")
TOKEN = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
"""A character of a script that does not separate words, or a run of others: the least that is cut from a text."""


def prefix_sums(keys: Codes) -> Codes:
    """The polynomials of the first 0, 1, … keys modulo 2^64 (len(keys) + 1,)."""
    sums = np.zeros(len(keys) + 1, np.uint64)
    np.cumsum(keys * powers(len(keys))[0][: len(keys)], out=sums[1:])
    return sums


def ngrams(sums: Codes, size: int) -> Codes:
    """The number of every run of `size` units, given the prefix sums of their keys; empty if there are fewer."""
    count = max(0, len(sums) - size)
    return (sums[size:] - sums[:count]) * powers(len(sums))[1][:count]


def has_unspaced(text: str) -> bool:
    """Whether the text has a character of a script that does not separate words."""
    return not text.isascii() and _UNSPACED.search(text) is not None


def is_unspaced(text: str) -> bool:
    """Whether most characters of the text's words belong to such scripts."""
    letters = "".join(normal_words(text))
    return has_unspaced(letters) and 2 * len(_UNSPACED.findall(letters)) > len(letters)


def character_keys(text: str) -> Codes:
    """The key of each character of the text's words, spaces and punctuation left out: that of a word of one letter."""
    letters = "".join(normal_words(text)).encode("utf-32-le", "surrogatepass")
    points, places = np.unique(np.frombuffer(letters, "<u4"), return_inverse=True)
    return word_keys(map(chr, points.tolist()))[places]


def located_words(text: str) -> tuple[Codes, Ints]:
    """The key of each word, and start and end of the piece of text that it stands in (2, words) [code points]."""
    words: list[str] = []
    spans: list[tuple[int, int]] = []
    for piece in NON_WHITESPACE.finditer(text):
        found = normal_words(piece.group())
        words += found
        spans += [piece.span()] * len(found)
    return word_keys(words), np.array(spans, np.int64).reshape(-1, 2).T


def located_characters(text: str) -> tuple[Codes, Ints]:
    """The key of each character of the text's words, and start and end of its token (2, characters) [code points].

    Where a token's characters depend on its neighbours, as in a number, its span is that of the whole piece.
    """
    spans: list[tuple[int, int]] = []
    for piece in NON_WHITESPACE.finditer(text):
        whole = "".join(normal_words(piece.group()))
        tokens = [(token.span(), "".join(normal_words(token.group()))) for token in TOKEN.finditer(text, *piece.span())]
        if "".join(letters for _, letters in tokens) != whole:
            tokens = [(piece.span(), whole)]
        for span, letters in tokens:
            spans += [span] * len(letters)
    return character_keys(text), np.array(spans, np.int64).reshape(-1, 2).T


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
                f"decontaminate.evaluation_sets.{one['name']}: expected items that can be looked for, got none among "
                f"{one['items']}. Name other fields, or a smaller min_item_words."
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
