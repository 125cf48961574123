"""Compiled n-gram language models: the hash table of n-grams, text normalization, and scores of sentences.

A model file is memory-mapped, so the workers of a machine share its pages. Scores are log10 probabilities of a back-off
model: the probability of the longest n-gram in the model, times the back-off weights of the longer contexts. KenLM
binaries are scored through the same interface.
"""

import mmap
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.normalization import normalize as normal_form

# The hash table of the n-grams of one order: linear probing in one array, with entries sorted by key.
#
# The array alternates keys and values (a probability and a back-off weight, float32 each), so one look-up reads one
# cache line of the mapped file. The home slot of a key, where its search starts, increases with the key, so entries are
# in the order of their keys. A search ends at the first key that is not smaller, and equal n-grams give equal bytes.

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.float32]

EMPTY = np.uint64(2**64 - 1)
"""Key of an empty slot; keys of entries are even."""
EVEN = np.uint64(2**64 - 2)
"""Mask that makes a key even."""
STEP = 0x9E3779B97F4A7C15
"""Base of the factors of words in a key (see `word_factor`); odd, so that no factor loses bits, at any distance."""
HALF = np.uint64(32)
HOME_SLOTS_PER_ENTRY = 1.5
"""Home slots, where searches start, per n-gram of a table. At 1.5 a search takes 2 steps on average, and a model of
lmplz takes 24 bytes per n-gram."""
ENTRY = np.dtype([("key", "<u8"), ("probability", "<f4"), ("backoff", "<f4")])
"""Type of an n-gram before it is written to the hash table: key, log10 probability and log10 back-off weight."""


def word_codes(words: Iterable[str]) -> Keys:
    """Return the xxh64 hash code of each word, encoded as UTF-8."""
    return np.array([xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass")) for word in words], np.uint64)


def word_factor(distance: int) -> np.uint64:
    """Return the factor that multiplies a word's hash code in the key of an n-gram.

    `distance` is 0 for the last word of the n-gram, and 1 for the word before the last.
    """
    return np.uint64(pow(STEP, distance, 1 << 64))


def keys_of(codes: Keys) -> Keys:
    """Return the key of each n-gram, (n-grams,). `codes` has the hash codes of the words, (n-grams, order)."""
    factors = np.array([word_factor(distance) for distance in range(codes.shape[1])], np.uint64)
    keys: Keys = (codes * factors[::-1]).sum(axis=1, dtype=np.uint64) & EVEN
    return keys


def key_range(keys: Keys, parts: int) -> npt.NDArray[np.int64]:
    """Return the index of the range that contains each key; the 64-bit keys are divided into `parts` equal ranges."""
    return ((keys >> HALF) * np.uint64(parts) >> HALF).astype(np.int64)


@dataclass(frozen=True)
class NgramTable:
    """A hash table from the 64-bit keys of the n-grams of one order to their probabilities and back-off weights."""

    num_home_slots: int
    """Number of slots in which the search for a key can start."""
    slots: Keys
    """Key and value of each slot, one after the other; the last slot is empty."""

    def find(self, keys: Keys) -> tuple[npt.NDArray[np.intp], Values]:
        """Look up keys. Return the indices of the keys that the table contains, and the values of these keys.

        A row of the values, (keys found, 2), has the log10 probability and the log10 back-off weight of one n-gram.
        """
        positions = key_range(keys, self.num_home_slots) * 2
        current = self.slots[positions]
        pending = np.flatnonzero(current < keys)
        while len(pending):
            positions[pending] += 2
            probed = self.slots[positions[pending]]
            current[pending] = probed
            pending = pending[probed < keys[pending]]
        found = np.flatnonzero(current == keys)
        return found, self.slots[positions[found] + 1].view(np.float32).reshape(-1, 2)


def build_slots(sorted_parts: Iterable[npt.NDArray[np.void]], num_home_slots: int) -> Iterator[Keys]:
    """Yield the slots of a hash table in blocks.

    `sorted_parts` has blocks of entries (type ENTRY), in ascending order of keys.
    """
    num_written = 0
    for entries in sorted_parts:
        numbers = np.arange(len(entries))
        first_free = np.maximum(key_range(entries["key"], num_home_slots), num_written)
        positions = np.maximum.accumulate(first_free - numbers) + numbers
        size = int(positions[-1]) + 1 - num_written if len(positions) else 0
        slots = np.zeros((size, 2), np.uint64)
        slots[:, 0] = EMPTY
        slots[positions - num_written, 0] = entries["key"]
        slots.view(np.float32)[positions - num_written, 2] = entries["probability"]
        slots.view(np.float32)[positions - num_written, 3] = entries["backoff"]
        num_written += size
        yield slots.reshape(-1)
    tail = np.zeros((max(0, num_home_slots - num_written) + 1, 2), np.uint64)
    tail[:, 0] = EMPTY
    yield tail.reshape(-1)


# Input text of the language models: normalized as in CCNet, one paragraph per line, split into SentencePiece pieces.
#
# Source: Wenzek et al. 2020 (CCNet), arXiv 1911.00359. Lower case, canonical decomposition without combining marks,
# every digit as 0, typographic punctuation as its plain counterpart, no control characters.

Splitter = Callable[[Sequence[str]], list[list[str]]]
"""Function from lines to the words of each line, or to its SentencePiece pieces."""

PUNCTUATION = {
    '"': "\u00ab\u00bb\u201c\u201d\u201e\u300a\u300b\u300c\u300d",
    "'": "\u00b4\u2019",
    ",": "\u3001\uff0c",
    "-": "\u2013\u2501\u25ba",
    **{".": "\u3002", ":": "\u2236\uff1a", "?": "\uff1f", "!": "\uff01", ";": "\uff1b", "%": "\uff05", "~": "\uff5e"},
    **{"(": "\uff08", ")": "\uff09", "<": "\u3008", ">": "\u3009", "[": "\u3010", "]": "\u3011"},
}
"""ASCII character → the characters that it replaces in normalized text."""
EXPANSIONS = {"\u2014": " - ", "\u2026": "...", "\uff0e": ". "}
"""Characters that normalization replaces by several characters."""
REMOVED = 0xFFFFFFFF
REPLACEMENT = 0xFFFD


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """Return the replacement of each code point of lower-case NFD text; REMOVED if the code point is deleted."""
    table = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    for code in range(sys.maxunicode + 1):
        match unicodedata.category(chr(code)):
            case "Mn" | "Cc":
                table[code] = REMOVED
            case "Nd":
                table[code] = ord("0")
            case "Cs":  # an unpaired surrogate has no UTF-8
                table[code] = REPLACEMENT
    for ascii_char, variants in PUNCTUATION.items():
        table[list(map(ord, variants))] = ord(ascii_char)
    table[ord("\n")] = ord("\n")
    return table


def normalize(text: str) -> str:
    """Return a text in the normal form of CCNet, with the same number of lines."""
    text = normal_form("NFD", text.lower())
    for char, replacement in EXPANSIONS.items():
        text = text.replace(char, replacement)
    points = _table()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    normal: str = points[points != REMOVED].tobytes().decode("utf-32-le")
    return normal


def line_spans(text: str) -> npt.NDArray[np.int64]:
    """Return the start and end of each line of a text, (lines, 2) [code points], without line ends."""
    lengths = np.fromiter(map(len, text.split("\n")), np.int64)
    ends = np.cumsum(lengths + 1) - 1
    return np.stack([ends - lengths, ends], axis=1)


def words(lines: Sequence[str]) -> list[list[str]]:
    """Return the words of each line, split at whitespace; used for a language model without a SentencePiece model."""
    return [line.split() for line in lines]


def load_splitter(model: bytes, where: str, fix: str) -> Splitter:
    """Return a function that splits lines into pieces, from the bytes of a SentencePiece model.

    Raises ConfigError if the bytes are not a SentencePiece model; the message begins with `where` and ends with `fix`.
    """
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ConfigError(
            f"{where}: expected a SentencePiece model, got a file that cannot be loaded ({error}). {fix}"
        ) from error

    def cut(lines: Sequence[str]) -> list[list[str]]:
        # One call per line: for a batch it starts threads, which cost more than they save.
        return [processor.encode(line, out_type=str) for line in lines]

    return cut


def sentences(text: str, cut: Splitter) -> list[str]:
    """Return one training sentence for each non-blank line of a text: its normalized pieces, joined by spaces."""
    return [" ".join(pieces) for pieces in cut(normalize(text).split("\n")) if pieces]


# The compiled language model: its header, its file, and its scores.

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
ALIGNMENT = 64
MAGIC = b"penstock n-gram model 1\n".ljust(ALIGNMENT)
TAIL = 8
"""Number of bytes at the end of a model file, which hold the size of the JSON header before them."""
GROUP_CHARS = 1 << 18
"""Amount of text that is scored at once [characters]. A larger amount only takes more memory."""
MAX_CACHED_WORDS = 1 << 18
"""Maximum number of words in the cache `_WordNumbers`."""


class ModelHeader(BaseModel):
    """The header of a compiled model file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    language: str
    """Language of the training text."""
    normalisation: Literal["ccnet", "none"]
    """Normalization of text before it is split into pieces."""
    counts: tuple[int, ...]
    """Number of n-grams of each order, from 1 on."""
    homes: tuple[int, ...]
    """Number of home slots of the table of each order, from 2 on."""
    closed: tuple[bool, ...]
    """For each order from 2 on: True if the model has the prefix and the suffix of each n-gram of this order."""
    percentiles: dict[str, float]
    """Percentiles of the perplexities of a sample, by name."""
    arrays: dict[str, tuple[str, int, int]]
    """Type, length and offset [bytes] of each array of the file."""

    def to_bytes(self) -> bytes:
        """Return the header as the last bytes of a model file: JSON, then the size of the JSON."""
        text = canonical_json(self.model_dump(mode="json"))
        return text + len(text).to_bytes(TAIL, "little")


@dataclass(frozen=True)
class Scores:
    """Log10 probabilities and token counts of sentences, or of the lines of a text, by a language model."""

    log10: Floats
    """log10 probability of each sentence, its end included, (sentences,)."""
    tokens: Ints
    """Number of tokens of each sentence, its end included, (sentences,); 0 for a line without words, which has no
    score."""


class _WordNumbers(dict[str, int]):
    """A cache of the index of each word in the model. <s> and </s> in a text count as unknown words."""

    def __init__(self, codes: Keys):
        self._codes = codes
        self.begin, self.end, self.unknown = np.searchsorted(codes, word_codes((BEGIN, END, UNKNOWN))).tolist()

    def __missing__(self, word: str) -> int:
        if len(self) > MAX_CACHED_WORDS:
            self.clear()
        code = word_codes((word,))[0]
        number = int(np.searchsorted(self._codes, code))
        is_known = number < len(self._codes) and self._codes[number] == code and number not in (self.begin, self.end)
        self[word] = number if is_known else self.unknown
        return self[word]


class LanguageModel:
    """A compiled language model, memory-mapped from its file."""

    def __init__(self, path: str):
        self.header, arrays = _read(path)
        self._words: Keys = arrays["words"]
        self._unigrams: Keys = arrays["unigrams"]
        self._tables = [
            NgramTable(number, arrays[f"order {order}"]) for order, number in enumerate(self.header.homes, start=2)
        ]
        self._numbers = _WordNumbers(self._words)
        model = arrays["pieces"].tobytes()
        self._cut = load_splitter(model, path, "Restore the file from a backup.") if model else words

    def score_text(self, text: str) -> Scores:
        """Return the scores of each line of a text; a line without words has no score (0 tokens)."""
        if self.header.normalisation == "ccnet":
            text = normalize(text)
        else:
            text = text.encode("utf-8", "replace").decode()  # unpaired surrogates have no UTF-8
        return score_lines(self, text.split("\n"))

    def cut(self, lines: Sequence[str]) -> list[list[str]]:
        """Return the words or pieces of each line."""
        return self._cut(lines)

    def score(self, sentences: Sequence[Sequence[str]]) -> Scores:
        """Return the scores of sentences, each given as a list of words or pieces."""
        tokens = np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1
        if not len(tokens):
            return Scores(np.zeros(0), tokens)
        ends = np.cumsum(tokens + 1) - 1
        starts = ends - tokens
        numbers = np.empty(int(ends[-1]) + 1, np.int64)
        inside = np.ones(len(numbers), bool)
        inside[starts] = inside[ends] = False
        numbers[starts], numbers[ends] = self._numbers.begin, self._numbers.end
        numbers[inside] = np.fromiter(
            map(self._numbers.__getitem__, chain.from_iterable(sentences)), np.int64, int(tokens.sum()) - len(tokens)
        )
        scores = self._positions(numbers, starts)
        scores[starts] = 0
        return Scores(np.add.reduceat(scores, starts), tokens)

    def _positions(self, numbers: Ints, starts: Ints) -> Floats:
        """Return the log10 probability of each word given the words before it; undefined at `starts`.

        `numbers` are the words of all sentences, with a begin and an end marker around each sentence. `starts` are the
        indices of the begin markers.
        """
        values = self._unigrams[numbers].view(np.float32).reshape(-1, 2)
        scores, backoffs = values[:, 0].astype(np.float64), values[:, 1].astype(np.float64)
        codes = self._words[numbers]
        keys = codes.copy()
        depth = np.arange(len(numbers)) - np.repeat(starts, np.diff(starts, append=len(numbers)))
        found = depth > 0
        # A word gets the score of the longer n-gram if the model has it. Otherwise the back-off weight of the context
        # is added to the score of the shorter n-gram.
        for distance, (table, closed) in enumerate(zip(self._tables, self.header.closed), start=1):
            scores[1:] += backoffs[:-1]
            keys[distance:] += codes[:-distance] * word_factor(distance)
            is_candidate = depth >= distance
            if closed and distance > 1:  # an n-gram exists only if its prefix and its suffix exist
                is_candidate &= found
                is_candidate[1:] &= found[:-1]
            positions = np.flatnonzero(is_candidate)
            hits, values = table.find(keys[positions] & EVEN)
            positions = positions[hits]
            scores[positions] = values[:, 0]
            backoffs = np.zeros(len(numbers))
            backoffs[positions] = values[:, 1]
            found = np.zeros(len(numbers), bool)
            found[positions] = True
        return scores


def score_lines(model: Any, lines: Sequence[str]) -> Scores:
    """Return the scores of lines by a model that has the methods `cut` and `score`."""
    parts = []
    # Group by group, to bound the memory.
    for group in _groups(lines):
        sentences = model.cut(group)
        scores = model.score([pieces for pieces in sentences if pieces])
        has_words = np.fromiter(map(len, sentences), np.int64, len(sentences)) > 0
        log10, tokens = np.zeros(len(group)), np.zeros(len(group), np.int64)
        log10[has_words], tokens[has_words] = scores.log10, scores.tokens
        parts.append(Scores(log10, tokens))
    return Scores(np.concatenate([part.log10 for part in parts]), np.concatenate([part.tokens for part in parts]))


def _groups(lines: Sequence[str]) -> list[Sequence[str]]:
    """Divide lines into one or more groups of consecutive lines; each group has about GROUP_CHARS characters."""
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths + 1) // GROUP_CHARS)) + 1
    return [lines[start:end] for start, end in pairwise([0, *cuts.tolist(), len(lines)])]


def _read(path: str) -> tuple[ModelHeader, dict[str, Any]]:
    with Path(path).open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ConfigError(
                f"{path}: expected a compiled language model, got another file. "
                "Set perplexity.models to the .lm file of `penstock train-lm`."
            )
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        size = int.from_bytes(mapped[-TAIL:], "little")
        header = ModelHeader.model_validate_json(mapped[len(mapped) - TAIL - size : -TAIL])
        arrays = {
            name: np.frombuffer(mapped, np.dtype(kind), count, offset)
            for name, (kind, count, offset) in header.arrays.items()
        }
    except (ValidationError, ValueError) as error:
        raise ContractError(
            f"{path}: expected a complete language model, got a corrupt file. Restore the file from a backup, or write "
            "it again with `penstock train-lm`."
        ) from error
    return header, arrays


# Language models of both kinds: a compiled model file of Penstock, or a KenLM binary with its SentencePiece model.

KENLM_MAGIC = b"mmap lm http://kheafield.com/code"
ARPA_START = b"\\data\\"
MARKERS = frozenset(("<s>", "</s>"))


class Scorer(Protocol):
    """Interface that a language model must have for the stage `perplexity`."""

    def score_text(self, text: str) -> Scores:
        """Return the scores of each line of a text; a line without words has no score (0 tokens)."""


class KenlmModel:
    """A model that the package kenlm reads: a KenLM binary or an ARPA file.

    `spm` is the path of the SentencePiece model that splits lines; None = lines are split at whitespace.
    """

    def __init__(self, path: str, spm: str | None):
        require_kenlm(path)
        import kenlm

        config = kenlm.Config()
        config.load_method = kenlm.LoadMethod.LAZY
        config.show_progress = False
        try:
            self._model = kenlm.Model(path, config)
        except OSError as error:
            raise ConfigError(
                f"{path}: expected a model that kenlm reads, got a file that kenlm cannot load ({error}). Set "
                "perplexity.models to a KenLM binary."
            ) from error
        fix = "Set perplexity.pieces to the SentencePiece model of the KenLM binary."
        self._cut = words if spm is None else load_splitter(Path(spm).read_bytes(), spm, fix)

    def score_text(self, text: str) -> Scores:
        """Return the scores of each line of a text; a line without words has no score (0 tokens)."""
        # Normalized as for CCNet's published models.
        return score_lines(self, normalize(text).split("\n"))

    def cut(self, lines: Sequence[str]) -> list[list[str]]:
        """Return the words or pieces of each line."""
        return self._cut(lines)

    def score(self, sentences: Sequence[Sequence[str]]) -> Scores:
        """Return the scores of sentences, each given as a list of words or pieces."""
        lines = (" ".join("<unk>" if word in MARKERS else word for word in sentence) for sentence in sentences)
        # kenlm sums as float32.
        log10 = np.fromiter((self._model.score(line, bos=True, eos=True) for line in lines), np.float64, len(sentences))
        return Scores(log10, np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1)


def require_kenlm(path: str) -> None:
    """Raise ConfigError if the package kenlm, which reads the binary at `path`, is not installed."""
    if find_spec("kenlm") is None:
        raise ConfigError(
            f"{path}: expected the package kenlm for a KenLM binary, got no such package. "
            "Run `pip install kenlm==0.3.0`."
        )


def open_model(path: str, spm: str | None, alone: bool = False) -> Scorer:
    """Return the language model in a file: a KenLM binary or a compiled model of Penstock.

    A KenLM binary requires `spm`, the path of its SentencePiece model. If its words are separated by spaces, `alone`
    must be True instead. A compiled model takes neither argument. Raises ConfigError if the arguments do not match the
    file, or if the file is of neither kind.
    """
    with Path(path).open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start.startswith(ARPA_START):
        raise ConfigError(
            f"{path}: expected a compiled language model, got an ARPA file. Set perplexity.models to the .lm file of "
            "`penstock train-lm`."
        )
    if not start.startswith(KENLM_MAGIC):
        if spm is not None or alone:
            raise ConfigError(
                f"{path}: expected a KenLM binary for a language in perplexity.pieces, got another file. "
                "Remove the model's language from perplexity.pieces."
            )
        return LanguageModel(path)
    if spm is None and not alone:
        raise ConfigError(
            f"{path}: expected the SentencePiece model of a KenLM binary, got none. "
            "Set perplexity.pieces for the binary's language to the path of the SentencePiece model, or to 'words' if "
            "the words of the KenLM binary are separated by spaces."
        )
    return KenlmModel(path, spm)
