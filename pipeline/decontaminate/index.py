"""The index of the evaluation sets: sorted n-grams with the items that contain them, in one memory-mapped file.

The index grows with the sets and not with the corpus. It is built once, and every worker looks up its documents in it.
A bit filter of 32 to 64 bits per n-gram rejects all but one in 32 of the n-grams that are not in the index, before the
binary search.
"""

import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.decontaminate.config import DEFAULT_FIELDS, DecontaminateConfig
from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.words import DIGIT_SEPARATORS, PUNCTUATION, Codes, Ints, normal_words, powers, word_keys
from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.ids import canonical_json, digest_of, file_sha256
from schemas.storage import Store

# Items of an evaluation set: one JSON object per line, with its texts in the given fields.


def read_items(path: str, where: str, fields: Sequence[str] = ()) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number, from 1, and the texts of every item of a file; blank lines are skipped.

    Raises ConfigError, with file and line, for a line that is not a JSON object or has none of the fields.
    """
    names = fields or DEFAULT_FIELDS
    for number, line in _lines(path, where):
        location = f"{where}: {path}:{number}"
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{location}: expected a JSON object, got {error}. Correct the line.") from error
        if not isinstance(item, dict):
            raise ConfigError(f"{location}: expected a JSON object, got {type(item).__name__}. Correct the line.")
        values = [value for name in names for value in _values(item, name.split("."))]
        if not values:
            raise ConfigError(
                f"{location}: expected a field {' or '.join(names)}, got {', '.join(map(repr, sorted(item))) or 'none'}"
                f"{suggest_name(names[0], item) if len(names) == 1 and item else ''}. "
                "Name the fields to read in decontaminate.fields."
            )
        yield number, [text for value in values for text in _strings(value)]


def _lines(path: str, where: str) -> Iterator[tuple[int, bytes]]:
    try:
        with pa.input_stream(path, compression="detect") as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                if line := line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(
            f"{where}: expected a readable file, got {path}, which cannot be read ({error}). Correct the path, or "
            "restore the file."
        ) from error


def _values(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path of field names in a JSON value. At a list, the path continues in each element."""
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


# Hashes of the n-grams of a text: of words, or of characters in writing that does not separate words.
#
# A unit (word or character) is represented by its key; see `word_keys`. The 64-bit hash of an n-gram is a
# polynomial of its keys, computed for all n-grams at once from prefix sums. An n-gram that is not among N n-grams
# collides with one of them with probability N / 2^64, or up to 8 times that if two words are exchanged. With 10^7
# n-grams and a corpus of 10^12 words, 0.5 false hits are expected in the whole corpus.

_UNSPACED = re.compile(f"[{UNSPACED}]")
_SIGN_RANGES = (range(0x80, 0x2E80), range(0x3001, 0x3100), range(0xA000, 0x20000))
"""Code points among which the signs are. Other symbols are components of ideographs, or ideographs in a square."""


@cache
def _signs() -> tuple[frozenset[str], dict[int, str]]:
    """Return the signs that `normal_words` takes for letters, and their replacements.

    These are punctuation that is not in PUNCTUATION, such as \u2018, U+2011 and \u2022, symbols, and characters
    without a width.
    """
    known = frozenset(PUNCTUATION + DIGIT_SEPARATORS)
    chars = map(chr, chain.from_iterable(_SIGN_RANGES))
    kinds = {char: unicodedata.category(char) for char in chars if char not in known}
    table = {ord(char): "" if kind == "Cf" else " " for char, kind in kinds.items() if kind[0] in "PS" or kind == "Cf"}
    return frozenset(map(chr, table)), table


def has_signs(text: str) -> bool:
    """Return True if the words of a text are not those that `normal_words` returns."""
    return not text.isascii() and not _signs()[0].isdisjoint(text)


def without_signs(text: str) -> str:
    """Return a text with blanks for its signs, and without characters that have no width."""
    return text.translate(_signs()[1]) if has_signs(text) else text


def plain_words(text: str) -> list[str]:
    """Return the `normal_words` of a text without any sign: copies of a text differ in quotes, dashes and bullets."""
    return normal_words(without_signs(text))


NON_WHITESPACE = re.compile(r"\S+")
TOKEN = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
"""A token, the smallest unit that is cut: a character of a script that does not separate words, or a run of other
characters."""


def prefix_sums(keys: Codes) -> Codes:
    """Return the polynomial hash, modulo 2^64, of the first 0, 1, 2, … keys of a text (len(keys) + 1,)."""
    sums = np.zeros(len(keys) + 1, np.uint64)
    np.cumsum(keys * powers(len(keys))[0][: len(keys)], out=sums[1:])
    return sums


def ngrams(sums: Codes, size: int) -> Codes:
    """Return the hash of every n-gram of `size` units; empty if the text has fewer units.

    `sums` are the `prefix_sums` of the keys of the text's units.
    """
    count = max(0, len(sums) - size)
    return (sums[size:] - sums[:count]) * powers(len(sums))[1][:count]


def has_unspaced(text: str) -> bool:
    """Return True if the text has a character of a script that does not separate words."""
    return not text.isascii() and _UNSPACED.search(text) is not None


def is_unspaced(text: str) -> bool:
    """Return True if most characters of the text's words belong to scripts that do not separate words."""
    letters = "".join(plain_words(text))
    return has_unspaced(letters) and 2 * len(_UNSPACED.findall(letters)) > len(letters)


def character_keys(text: str) -> Codes:
    """Return a key for each character of the text's normalized words: the key of a word of this one character."""
    letters = "".join(plain_words(text)).encode("utf-32-le", "surrogatepass")
    points, places = np.unique(np.frombuffer(letters, "<u4"), return_inverse=True)
    return word_keys(map(chr, points.tolist()))[places]


def located_words(text: str) -> tuple[Codes, Ints]:
    """Return the key of each normalized word of a text, and the span of the text that the word comes from.

    The spans are (2, words): starts and ends [code points], always at whitespace.
    """
    words: list[str] = []
    spans: list[tuple[int, int]] = []
    for match in NON_WHITESPACE.finditer(text):
        piece_words = plain_words(match.group())
        words += piece_words
        spans += [match.span()] * len(piece_words)
    return word_keys(words), np.array(spans, np.int64).reshape(-1, 2).T


def located_characters(text: str) -> tuple[Codes, Ints]:
    """Return the key of each character of the text's normalized words, and the span that the character comes from.

    The spans are (2, characters): starts and ends [code points]. A span is that of a token. It extends to the
    surrounding whitespace if the normalized token depends on its neighbors, as in a number.
    """
    spans: list[tuple[int, int]] = []
    for match in NON_WHITESPACE.finditer(text):
        whole = "".join(plain_words(match.group()))
        tokens = [(token.span(), "".join(plain_words(token.group()))) for token in TOKEN.finditer(text, *match.span())]
        if "".join(letters for _, letters in tokens) != whole:
            tokens = [(match.span(), whole)]
        for span, letters in tokens:
            spans += [span] * len(letters)
    return character_keys(text), np.array(spans, np.int64).reshape(-1, 2).T


FORMAT = 3
FILE, SET, IGNORED = "index", "set_", "ignored"
"""Names of the stage's files: the compiled index, an evaluation set (followed by the set's name), and the ignored
text."""
WORDS, CHARACTERS = "word_sizes", "character_sizes"
_FILTER_BITS = 32  # least bits of the filter for each n-gram


@dataclass
class _Collected:
    """The texts of the items read so far: for each text, the hashes of its n-grams and the number of its item."""

    config: DecontaminateConfig
    sizes: dict[str, set[int]] = field(default_factory=lambda: {WORDS: set(), CHARACTERS: set()})
    hashes: list[Codes] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def add(self, text: str, owner: int) -> None:
        """Add the n-grams of a text that belongs to item number `owner`.

        A text shorter than an n-gram counts as one n-gram. A text that is too short to be matched is ignored.
        """
        if is_unspaced(text):
            kind, keys = CHARACTERS, character_keys(text)
            size, least = self.config.ngram_chars, self.config.min_item_chars
        else:
            kind, keys = WORDS, word_keys(plain_words(text))
            size, least = self.config.ngram, self.config.min_item_words
        size = min(size, max(len(keys), least))
        if len(keys) >= size:
            self.sizes[kind].add(size)
            self.hashes.append(ngrams(prefix_sums(keys), size))
            self.owners.append(owner)

    def pairs(self) -> tuple[Codes, npt.NDArray[np.uint32]]:
        """Return the distinct pairs (hash of an n-gram, number of an item that contains it) as two arrays, sorted."""
        hashes = np.concatenate([np.zeros(0, np.uint64), *self.hashes])
        owners = np.repeat(np.array(self.owners, np.uint32), [len(part) for part in self.hashes])
        order = np.lexsort((owners, hashes))
        hashes, owners = hashes[order], owners[order]
        first = np.ones(len(hashes), bool)
        first[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
        return hashes[first], owners[first]


def compile_index(config: DecontaminateConfig, paths: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return {FILE: path of the index of the evaluation sets}; build the index unless `folder` already contains it.

    The result is empty without evaluation sets. Raises ConfigError, with file and line, for items that cannot be read,
    and for a set without any n-gram.
    """
    if not config.evaluation_sets:
        return {}
    digests = {name: file_sha256(Path(path)) for name, path in paths.items()}
    target = Path(folder) / f"decontamination-{digest_of([FORMAT, config.content(), digests])[:16]}.arrow"
    if not target.exists():
        Store(folder).write_atomic(target.name, build_index(config, paths))
    return {FILE: str(target)}


def build_index(config: DecontaminateConfig, paths: Mapping[str, str]) -> bytes:
    """Return the bytes of the index, which depend on files and settings alone. Raises ConfigError like
    `compile_index`."""
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
    sizes = {kind: sorted(lengths) for kind, lengths in collected.sizes.items()}
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
    """Add two counts to each evaluation set: items with at least one n-gram, and distinct n-grams of all its items.

    Raises ConfigError for a set in which no item has an n-gram.
    """
    first = 0
    for entry in sets:
        last = first + entry["items"]
        entry["indexed"] = int(np.count_nonzero(item_ngrams[first:last]))
        entry["ngrams"] = len(np.unique(entries[(owners >= first) & (owners < last)]))
        if not entry["indexed"]:
            raise ConfigError(
                f"decontaminate.evaluation_sets.{entry['name']}: expected items that are long enough to match, got "
                f"none among {entry['items']} items. Name the fields with the items' texts in decontaminate.fields."
            )
        first = last


def _ignored(config: DecontaminateConfig, path: str, sizes: Mapping[str, Iterable[int]]) -> Codes:
    """Return the distinct n-grams of the ignored text, of all lengths that the index contains."""
    hashes = [np.zeros(0, np.uint64)]
    for _, texts in read_items(path, "decontaminate.ignored"):
        for text in texts:
            for kind, keys in ((WORDS, word_keys(plain_words(text))), (CHARACTERS, character_keys(text))):
                hashes += [ngrams(prefix_sums(keys), size) for size in sizes[kind]]
    return np.unique(np.concatenate(hashes))


def _filter_of(hashes: Codes) -> npt.NDArray[np.uint8]:
    """Return a bit filter of sorted hashes: bit i is set if the leading bits of one of the hashes are the number i."""
    bits = max(10, (_FILTER_BITS * len(hashes) - 1).bit_length())
    slots = (hashes >> np.uint64(64 - bits)).view(np.int64)
    octets = np.zeros(1 << (bits - 3), np.uint8)
    starts = np.flatnonzero(np.diff(slots >> 3, prepend=-1))
    if len(starts):
        octets[slots[starts] >> 3] = np.bitwise_or.reduceat(np.uint8(1) << (slots & 7).astype(np.uint8), starts)
    return octets


def _to_bytes(arrays: Mapping[str, Any], header: Mapping[str, Any]) -> bytes:
    """Return an Arrow file of one row with each array as a list; `header` is stored in its metadata."""
    columns = [pa.LargeListArray.from_arrays(pa.array([0, len(a)], pa.int64()), pa.array(a)) for a in arrays.values()]
    batch = pa.RecordBatch.from_arrays(columns, list(arrays)).replace_schema_metadata({FILE: canonical_json(header)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
