"""A compiled n-gram language model: log10 probabilities of sentences, many look-ups at a time.

The file is mapped, so the workers of a machine share its pages. Probabilities are those of back-off models in ARPA
form: of the longest n-gram that the model has, times the back-off weights of the contexts it does not continue.
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

# A table of n-grams in one array: sorted by key, each as near to its home as its neighbours allow.
#
# The array alternates keys and values (a probability and a back-off weight, float32 each), so that one look-up
# touches one cache line of a file that all workers map. The home of a key grows with the key, so the entries of
# linear probing lie in the order of their keys: a search ends at the first key that is not smaller, and equal n-grams
# give equal bytes.

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.float32]

EMPTY = np.uint64(2**64 - 1)
"""Key of a slot without entry; keys of entries are even."""
EVEN = np.uint64(2**64 - 2)
STEP = 0x9E3779B97F4A7C15
"""Odd, so that no word is lost however far back it stands."""
HALF = np.uint64(32)
HOME_SLOTS_PER_ENTRY = 1.5
"""At 1.5 a search takes 2 steps on average and a model of lmplz 24 bytes an n-gram."""
ENTRY = np.dtype([("key", "<u8"), ("probability", "<f4"), ("backoff", "<f4")])


def word_codes(words: Iterable[str]) -> Keys:
    """The xxh64 of each word's UTF-8."""
    return np.array([xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass")) for word in words], np.uint64)


def word_factor(distance: int) -> np.uint64:
    """What the code of a word is multiplied with that stands so many words before the last of its n-gram."""
    return np.uint64(pow(STEP, distance, 1 << 64))


def keys_of(codes: Keys) -> Keys:
    """(n-grams,) the key of each row of `codes`, (n-grams, order), the last word in the last column."""
    factors = np.array([word_factor(distance) for distance in range(codes.shape[1])], np.uint64)
    keys: Keys = (codes * factors[::-1]).sum(axis=1, dtype=np.uint64) & EVEN
    return keys


def key_range(keys: Keys, parts: int) -> npt.NDArray[np.int64]:
    """The number of the part, of so many equal ones, in which each key lies; it grows with the key."""
    return ((keys >> HALF) * np.uint64(parts) >> HALF).astype(np.int64)


@dataclass(frozen=True)
class NgramTable:
    """The n-grams of one order."""

    homes: int
    """Number of places that a key can have as its home."""
    slots: Keys
    """Key and value of each slot in turn; the last slot is empty."""

    def find(self, keys: Keys) -> tuple[npt.NDArray[np.intp], Values]:
        """Which of the keys the table has, by position, and (found, 2) their probability and back-off weight."""
        places = key_range(keys, self.homes) * 2
        seen = self.slots[places]
        on = np.flatnonzero(seen < keys)
        while len(on):
            places[on] += 2
            there = self.slots[places[on]]
            seen[on] = there
            on = on[there < keys[on]]
        found = np.flatnonzero(seen == keys)
        return found, self.slots[places[found] + 1].view(np.float32).reshape(-1, 2)


def build_slots(sorted_parts: Iterable[npt.NDArray[np.void]], homes: int) -> Iterator[Keys]:
    """The slots of a table, stretch after stretch, of entries that come sorted by key, part after part."""
    laid = 0
    for entries in sorted_parts:
        numbers = np.arange(len(entries))
        places = np.maximum.accumulate(np.maximum(key_range(entries["key"], homes), laid) - numbers) + numbers
        stretch = int(places[-1]) + 1 - laid if len(places) else 0
        slots = np.zeros((stretch, 2), np.uint64)
        slots[:, 0] = EMPTY
        slots[places - laid, 0] = entries["key"]
        slots.view(np.float32)[places - laid, 2] = entries["probability"]
        slots.view(np.float32)[places - laid, 3] = entries["backoff"]
        laid += stretch
        yield slots.reshape(-1)
    tail = np.zeros((max(0, homes - laid) + 1, 2), np.uint64)
    tail[:, 0] = EMPTY
    yield tail.reshape(-1)


# Text as the language models read it: normalised as CCNet does, a paragraph a line, cut into pieces.
#
# Source: Wenzek et al. 2020 (CCNet), arXiv 1911.00359. Lower case, canonical decomposition without combining marks,
# every digit as 0, typographic punctuation as its plain counterpart, no control characters.

Splitter = Callable[[Sequence[str]], list[list[str]]]
"""Lines → the pieces of each."""

PUNCTUATION = {
    '"': "\u00ab\u00bb\u201c\u201d\u201e\u300a\u300b\u300c\u300d",
    "'": "\u00b4\u2019",
    ",": "\u3001\uff0c",
    "-": "\u2013\u2501\u25ba",
    **{".": "\u3002", ":": "\u2236\uff1a", "?": "\uff1f", "!": "\uff01", ";": "\uff1b", "%": "\uff05", "~": "\uff5e"},
    **{"(": "\uff08", ")": "\uff09", "<": "\u3008", ">": "\u3009", "[": "\u3010", "]": "\u3011"},
}
"""Plain character → those that become it."""
EXPANSIONS = {"\u2014": " - ", "\u2026": "...", "\uff0e": ". "}
"""Those that become several characters."""
REMOVED = 0xFFFFFFFF
REPLACEMENT = 0xFFFD


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """What becomes of each code point of decomposed lower-case text; REMOVED: nothing."""
    table = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    for code in range(sys.maxunicode + 1):
        match unicodedata.category(chr(code)):
            case "Mn" | "Cc":
                table[code] = REMOVED
            case "Nd":
                table[code] = ord("0")
            case "Cs":  # half a surrogate pair has no UTF-8
                table[code] = REPLACEMENT
    for plain, others in PUNCTUATION.items():
        table[list(map(ord, others))] = ord(plain)
    table[ord("\n")] = ord("\n")
    return table


def normalize(text: str) -> str:
    """The text in normal form, with the line ends where they were."""
    text = unicodedata.normalize("NFD", text.lower())
    for char, several in EXPANSIONS.items():
        text = text.replace(char, several)
    points = _table()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    normal: str = points[points != REMOVED].tobytes().decode("utf-32-le")
    return normal


def line_spans(text: str) -> npt.NDArray[np.int64]:
    """(lines, 2): start and end of each line of a text [code points]; a line end belongs to no line."""
    lengths = np.fromiter(map(len, text.split("\n")), np.int64)
    ends = np.cumsum(lengths + 1) - 1
    return np.stack([ends - lengths, ends], axis=1)


def words(lines: Sequence[str]) -> list[list[str]]:
    """What stands between spaces in each line: the pieces of a model that has no SentencePiece model."""
    return [line.split() for line in lines]


def load_splitter(model: bytes, where: str) -> Splitter:
    """The pieces of a SentencePiece model as a function of lines. Raises ConfigError if the bytes are not one."""
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ConfigError(f"{where}: expected a SentencePiece model, got {error}. Give the right file.") from error

    def cut(lines: Sequence[str]) -> list[list[str]]:
        # Not as one batch: for that it starts threads, which costs more than they save.
        return [processor.encode(line, out_type=str) for line in lines]

    return cut


def sentences(text: str, cut: Splitter) -> list[str]:
    """The lines of a text as a trainer takes them: normalised, pieces with spaces between, none blank."""
    return [" ".join(pieces) for pieces in cut(normalize(text).split("\n")) if pieces]


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
ALIGNMENT = 64
MAGIC = b"penstock n-gram model 1\n".ljust(ALIGNMENT)
TAIL = 8
"""Bytes at the end of the file: the size of the JSON before them."""
GROUP_CHARS = 1 << 18
"""Text that is looked up at once: a longer one only takes more memory."""
MAX_CACHED_WORDS = 1 << 18
"""Words whose number is remembered."""


class ModelHeader(BaseModel):
    """What a model file says of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    language: str
    """Language of the training text."""
    normalisation: Literal["ccnet", "none"]
    """What is done to text before it is cut into pieces."""
    counts: tuple[int, ...]
    """Number of n-grams of each order, from 1 on."""
    homes: tuple[int, ...]
    """Places of the table of each order, from 2 on."""
    closed: tuple[bool, ...]
    """For each order from 2 on: whether the model has both shorter n-grams of each of its n-grams."""
    percentiles: dict[str, float]
    """Perplexities of a sample, by name."""
    arrays: dict[str, tuple[str, int, int]]
    """Type, length and offset [bytes] of each array of the file."""

    def to_bytes(self) -> bytes:
        """The end of a model file."""
        text = canonical_json(self.model_dump(mode="json"))
        return text + len(text).to_bytes(TAIL, "little")


@dataclass(frozen=True)
class Scores:
    """What a model says of sentences."""

    log10: Floats
    """(sentences,) log10 probability, the sentence end included."""
    tokens: Ints
    """(sentences,) number of tokens, the sentence end included; 0 for a line without words, which is not scored."""


class _Numbers(dict[str, int]):
    """Word → its number in the model; words of a text that look like markers are unknown ones."""

    def __init__(self, codes: Keys):
        self._codes = codes
        self.begin, self.end, self.unknown = np.searchsorted(codes, word_codes((BEGIN, END, UNKNOWN))).tolist()

    def __missing__(self, word: str) -> int:
        if len(self) > MAX_CACHED_WORDS:
            self.clear()
        code = word_codes((word,))[0]
        number = int(np.searchsorted(self._codes, code))
        known = number < len(self._codes) and self._codes[number] == code and number not in (self.begin, self.end)
        self[word] = number if known else self.unknown
        return self[word]


class LanguageModel:
    """An open model file."""

    def __init__(self, path: str):
        self.header, arrays = _read(path)
        self._words: Keys = arrays["words"]
        self._unigrams: Keys = arrays["unigrams"]
        self._tables = [
            NgramTable(homes, arrays[f"order {order}"]) for order, homes in enumerate(self.header.homes, start=2)
        ]
        self._numbers = _Numbers(self._words)
        model = arrays["pieces"].tobytes()
        self._cut = load_splitter(model, path) if model else words

    def score_text(self, text: str) -> Scores:
        """The scores of each line of a text; a line without words is not scored."""
        if self.header.normalisation == "ccnet":
            text = normalize(text)
        else:
            text = text.encode("utf-8", "replace").decode()  # halves of surrogate pairs have no UTF-8
        return score_lines(self, text.split("\n"))

    def cut(self, lines: Sequence[str]) -> list[list[str]]:
        """The words that the model knows lines by."""
        return self._cut(lines)

    def score(self, sentences: Sequence[Sequence[str]]) -> Scores:
        """The scores of sentences given as words."""
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
        """The log10 probability of each word after those before it; what stands at the starts means nothing.

        Order by order, a word's score is that of the longer n-gram if the model has it, else that of the shorter one
        and the back-off weight of the context. A word has a longer n-gram only where both shorter ones were found.
        """
        values = self._unigrams[numbers].view(np.float32).reshape(-1, 2)
        scores, backoffs = values[:, 0].astype(np.float64), values[:, 1].astype(np.float64)
        codes = self._words[numbers]
        keys = codes.copy()
        depth = np.arange(len(numbers)) - np.repeat(starts, np.diff(starts, append=len(numbers)))
        found = depth > 0
        for distance, (table, closed) in enumerate(zip(self._tables, self.header.closed), start=1):
            scores[1:] += backoffs[:-1]
            keys[distance:] += codes[:-distance] * word_factor(distance)
            where = depth >= distance
            if closed and distance > 1:
                where &= found
                where[1:] &= found[:-1]
            at = np.flatnonzero(where)
            hits, values = table.find(keys[at] & EVEN)
            at = at[hits]
            scores[at] = values[:, 0]
            backoffs = np.zeros(len(numbers))
            backoffs[at] = values[:, 1]
            found = np.zeros(len(numbers), bool)
            found[at] = True
        return scores


def score_lines(model: Any, lines: Sequence[str]) -> Scores:
    """The scores of lines by a model that has `cut` and `score`, a bounded piece of the text at a time."""
    parts = []
    for group in _groups(lines):
        sentences = model.cut(group)
        scores = model.score([pieces for pieces in sentences if pieces])
        has = np.fromiter(map(len, sentences), np.int64, len(sentences)) > 0
        log10, tokens = np.zeros(len(group)), np.zeros(len(group), np.int64)
        log10[has], tokens[has] = scores.log10, scores.tokens
        parts.append(Scores(log10, tokens))
    return Scores(np.concatenate([part.log10 for part in parts]), np.concatenate([part.tokens for part in parts]))


def _groups(lines: Sequence[str]) -> list[Sequence[str]]:
    """The lines in groups of about GROUP_CHARS characters, at least one."""
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths + 1) // GROUP_CHARS)) + 1
    return [lines[start:end] for start, end in pairwise([0, *cuts.tolist(), len(lines)])]


def _read(path: str) -> tuple[ModelHeader, dict[str, Any]]:
    with Path(path).open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ConfigError(
                f"{path}: expected a compiled language model, got another file. Compile an ARPA file with "
                "`penstock train-lm`."
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
        raise ContractError(f"{path}: expected a whole language model, got a damaged file. Copy it again.") from error
    return header, arrays


# A language model of either kind: a compiled file of ours, or a KenLM binary beside its SentencePiece model.

KENLM_MAGIC = b"mmap lm http://kheafield.com/code"
ARPA_START = b"\\data\\"
MARKERS = frozenset(("<s>", "</s>"))


class Scorer(Protocol):
    """What the perplexity stage asks of a model."""

    def score_text(self, text: str) -> Scores:
        """The scores of each line of a text; a line without words is not scored."""


class KenlmModel:
    """A model that the kenlm package reads: a binary, mapped so that workers share it, or an ARPA file.

    Lines are normalised and cut as CCNet does for its published models; `spm` None: their words stand between spaces.
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
            raise ConfigError(f"{path}: expected a model that kenlm reads, got {error}. Give another file.") from error
        self._cut = words if spm is None else load_splitter(Path(spm).read_bytes(), spm)

    def score_text(self, text: str) -> Scores:
        """The scores of each line of a text; a line without words is not scored."""
        return score_lines(self, normalize(text).split("\n"))

    def cut(self, lines: Sequence[str]) -> list[list[str]]:
        """The words that the model knows lines by."""
        return self._cut(lines)

    def score(self, sentences: Sequence[Sequence[str]]) -> Scores:
        """The scores of sentences given as words; kenlm adds them up as float32."""
        lines = (" ".join("<unk>" if word in MARKERS else word for word in sentence) for sentence in sentences)
        log10 = np.fromiter((self._model.score(line, bos=True, eos=True) for line in lines), np.float64, len(sentences))
        return Scores(log10, np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1)


def require_kenlm(path: str) -> None:
    """Raises ConfigError if the package that reads KenLM binaries is not installed."""
    if find_spec("kenlm") is None:
        raise ConfigError(
            f"{path}: expected a language model, got a KenLM binary and no package to read it. "
            "Run `pip install kenlm==0.3.0`, or train a model with `penstock train-lm`."
        )


def open_model(path: str, spm: str | None, alone: bool = False) -> Scorer:
    """The model in a file, by what the file holds; a KenLM binary wants `spm`, or `alone`: its words are plain.

    Raises ConfigError if it is another file, and if the pieces lack or are given to a model that has its own.
    """
    with Path(path).open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start.startswith(ARPA_START):
        raise ConfigError(f"{path}: expected a compiled language model, got an ARPA file. Compile it first.")
    if not start.startswith(KENLM_MAGIC):
        if spm is not None or alone:
            raise ConfigError(f"{path}: expected a model that needs pieces, got one with its own. Give no pieces.")
        return LanguageModel(path)
    if spm is None and not alone:
        raise ConfigError(f"{path}: expected the pieces of a KenLM binary, got none. Give its SentencePiece model.")
    return KenlmModel(path, spm)
