"""Units of text for the step `repeats` (lines, paragraphs, sentences, windows) as spans with keys, and their removal.

Lines, paragraphs and sentences are compared by 64-bit keys of their normal forms. Runs of words or bytes are compared
by fingerprints of windows of fixed length. Only windows whose seed (see below) is repeated leave the worker.
"""

import re
import string
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.dedup.config import RepeatsConfig
from pipeline.minhash.permutations import mix_bits
from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.spans import Span, append_span, map_visible_spans, union
from pipeline.text.words import SENTENCE_ENDS, Codes, Ints, word_keys
from schemas.normalization import normalize

# The normal form in which lines, paragraphs and sentences are compared: lower case, digits as 0, no punctuation.
#
# Source: Wenzek et al. 2020 (CCNet), arXiv 1911.00359, section 3.1: lower case, numbers by a placeholder, no Unicode
# punctuation, no accent marks. In addition, whitespace is a single space, because removed punctuation leaves gaps.
# (CCNet's code keeps accents and ASCII punctuation; this follows the paper.)

REMOVED = 0xFFFFFFFF
REPLACEMENT = 0xFFFD
_DELETED = bytes(code for code in range(128) if not chr(code).isspace() and unicodedata.category(chr(code))[0] in "PC")
_PLAIN = bytes.maketrans(string.digits.encode(), b"0" * 10)


@cache
def _table() -> npt.NDArray[np.uint32]:
    """Return the replacement of every code point in lower-case text after NFD; REMOVED for a deleted code point."""
    table = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category == "Cs":  # half a surrogate pair has no UTF-8
            table[code] = REPLACEMENT
        elif category == "Nd":
            table[code] = ord("0")
        elif category == "Mn" or category[0] == "P" or (category == "Cc" and not chr(code).isspace()):
            table[code] = REMOVED
    return table


def normal_forms(units: Sequence[str]) -> list[str]:
    """Return each unit's normal form: normalized words separated by one space; '' if the unit has no word."""
    joined = "\n".join([unit.replace("\n", " ") for unit in units]).lower()
    if joined.isascii():
        normal = joined.encode().translate(_PLAIN, _DELETED).decode()
    else:
        points = np.frombuffer(normalize("NFD", joined).encode("utf-32-le", "surrogatepass"), np.uint32)
        points = _table()[points]
        normal = points[points != REMOVED].tobytes().decode("utf-32-le")
    return [" ".join(form.split()) for form in normal.split("\n")]


_BLANK_LINES = re.compile(r"\n\s*\n")
_UNSPACED_ENDS = "\u3002\uff01\uff1f\uff61"
"""End marks of sentences in scripts that put no space after them: 。！？｡"""
_ENDS = re.escape("".join(sorted(SENTENCE_ENDS - set(_UNSPACED_ENDS))))
_CLOSING = r"[\"'”’»)\]}」』）】》]*"
_SENTENCE_END = re.compile(rf"[{_ENDS}]{_CLOSING}(?=\s)|[{_UNSPACED_ENDS}]{_CLOSING}|\n")


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one kind in a text (lines, paragraphs or spans of sentences), in text order."""

    keys: Codes
    """Keys of the normal forms, (units,); different normal forms have equal keys with probability 2^-64."""
    starts: Ints
    """Start of each unit, (units,) [code points]."""
    ends: Ints
    """End of each unit, (units,) [code points]."""


def units_of(text: str, kind: str, config: RepeatsConfig) -> Units:
    """Return the units of one kind (`line`, `paragraph` or `sentences`) that are long enough to be compared."""
    spans = {"line": line_spans, "paragraph": paragraph_spans, "sentences": sentence_spans}[kind](text)
    forms = normal_forms([text[start:end] for start, end in spans.tolist()])
    sizes = np.fromiter(map(len, forms), np.int64, len(forms))
    if kind == "sentences":
        filled = np.flatnonzero(sizes)
        forms, spans = _in_a_row([forms[number] for number in filled.tolist()], spans[filled], config.sentences)
        sizes = np.fromiter(map(len, forms), np.int64, len(forms))
    long = np.flatnonzero(sizes >= config.min_unit_chars)
    return Units(word_keys([forms[number] for number in long.tolist()]), spans[long, 0], spans[long, 1])


def _in_a_row(forms: Sequence[str], spans: Ints, sentences: int) -> tuple[list[str], Ints]:
    """Return the normal form and the span of every run of so many consecutive sentences.

    `forms` and `spans` are those of single sentences. The form of a run is that of its sentences joined by one space.
    """
    count = max(0, len(forms) - sentences + 1)
    joined = [" ".join(forms[number : number + sentences]) for number in range(count)]
    return joined, np.stack([spans[:count, 0], spans[sentences - 1 :][:count, 1]], axis=1)


def line_spans(text: str) -> Ints:
    """Return the start and end of each line (lines, 2) [code points]; a line break belongs to no line."""
    sizes = np.fromiter(map(len, text.split("\n")), np.int64)
    ends = np.cumsum(sizes + 1) - 1
    return np.stack([ends - sizes, ends], axis=1)


def paragraph_spans(text: str) -> Ints:
    """Return the start and end of each paragraph, the text between blank lines (paragraphs, 2) [code points]."""
    return _between([match.span() for match in _BLANK_LINES.finditer(text)], len(text))


def sentence_spans(text: str) -> Ints:
    """Return the start and end of each sentence (sentences, 2) [code points].

    A sentence ends at a line end or after an end mark. Whitespace must follow the mark, unless the mark is in
    _UNSPACED_ENDS. Abbreviations are not recognized, but copies of a passage are always split in the same way.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return _between([(end, end) for end in ends], len(text))


def _between(separators: Sequence[tuple[int, int]], size: int) -> Ints:
    edges = [0, *(edge for span in separators for edge in span), size]
    return np.array(edges, np.int64).reshape(-1, 2)


def scoped(keys: Codes, kind: str, scope: np.uint64) -> Codes:
    """Return the keys mixed with kind and scope, so that equal texts of two kinds or scopes have different keys."""
    return mix_bits(keys ^ np.uint64(xxhash.xxh64_intdigest(kind.encode())) ^ scope)


# Repeated runs of words or bytes: fingerprints of all windows of n tokens, of which few leave the worker.
#
# The seed of a window is the smallest fingerprint of its k-grams (k = n // 2). Equal windows have equal seeds in any
# context. Most adjacent windows share a seed, so about 2 in n - k + 2 k-grams are seeds. Only windows with a repeated
# seed are compared, by 128 bits: the fingerprint of their tokens and, as verification, another hash of their bytes.
# Sources: Schleimer, Wilkerson and Aiken 2003 (winnowing); Lee et al. 2022, arXiv 2107.06499 (runs, by a suffix array).

TOKEN = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
"""A word: one character of a script that does not separate words, or a run of other characters between whitespace."""
CHECK_SEED = 0x1EE2022
_WINDOW_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_BYTE_KEYS = word_keys(map(chr, range(256)))


@dataclass(frozen=True)
class Tokens:
    """A text split into tokens, which are either words or bytes."""

    text: str
    unit: str
    """Kind of a token: `words` or `bytes`."""

    @cached_property
    def pieces(self) -> list[str]:
        """Return the words of the text; see TOKEN."""
        return TOKEN.findall(self.text)

    @cached_property
    def data(self) -> bytes:
        """Return the text in UTF-8. If the tokens are words, return the words joined by single spaces."""
        whole = self.text if self.unit == "bytes" else " ".join(self.pieces)
        return whole.encode("utf-8", "surrogatepass")

    @cached_property
    def codes(self) -> Codes:
        """Return a 64-bit hash of each token (tokens,)."""
        if self.unit == "bytes":
            keys: Codes = _BYTE_KEYS[np.frombuffer(self.data, np.uint8)]
            return keys
        return word_keys(self.pieces)

    def checks(self, places: Ints, n: int) -> Codes:
        """Return the XXH3 of each window of n tokens (windows,).

        `places` are the indices of the first tokens of the windows.
        """
        view = memoryview(self.data)
        starts, ends = self._offsets
        edges = zip(starts[places].tolist(), ends[places + (n - 1)].tolist())
        digests = (xxhash.xxh3_64_intdigest(view[start:end], CHECK_SEED) for start, end in edges)
        return np.fromiter(digests, np.uint64, len(places))

    @cached_property
    def _offsets(self) -> tuple[Ints, Ints]:
        """Return the start and end of each token in `data` [bytes]."""
        if self.unit == "bytes":
            starts = np.arange(len(self.data))
            return starts, starts + 1
        sizes = (len(piece.encode("utf-8", "surrogatepass")) for piece in self.pieces)
        lengths = np.fromiter(sizes, np.int64, len(self.pieces))
        ends = np.cumsum(lengths + 1) - 1
        return ends - lengths, ends

    def chars(self, runs: Ints) -> list[Span]:
        """Return the spans of the text that runs of tokens (runs, 2) cover [code points].

        The runs must be sorted and disjoint. A run of bytes covers the characters of which it contains all bytes. A run
        without such a character has no span.
        """
        if not len(runs):
            return []
        if self.unit == "words":
            tokens = [match.span() for match in TOKEN.finditer(self.text)]
            return [(tokens[start][0], tokens[end - 1][1]) for start, end in runs.tolist()]
        begins = (np.frombuffer(self.data, np.uint8) & 0xC0) != 0x80  # True for the first byte of a character
        before = np.concatenate(([0], np.cumsum(begins)))
        whole = np.append(begins, True)[runs[:, 1]]
        spans = zip(before[runs[:, 0]].tolist(), (before[runs[:, 1]] - ~whole).tolist())
        return [(start, end) for start, end in spans if start < end]


def grams(codes: Codes, n: int) -> Codes:
    """Return the fingerprint of every run of n tokens (len(codes) - n + 1,); empty if the text has fewer tokens."""
    count = max(0, len(codes) - n + 1)
    # a binary tree of halves avoids the arithmetic collisions of a polynomial hash
    level, size, done = codes, 1, 0
    prints = np.zeros(count, np.uint64)
    while True:
        if n & size:
            prints = mix_bits(prints * _WINDOW_FACTOR + level[done : done + count])
            done += size
        if done == n:
            return prints
        level = mix_bits(level[:-size] * _WINDOW_FACTOR + level[size:]) if len(level) > size else level[:0]
        size *= 2


def sliding_extremes(values: Codes, width: int, take: np.ufunc) -> Codes:
    """Return the minimum or maximum of every `width` adjacent values (len(values) - width + 1,).

    `take` is `np.minimum` or `np.maximum`.
    """
    size = 1
    while 2 * size <= width:
        values, size = take(values[:-size], values[size:]), 2 * size
    rest = width - size
    extremes: Codes = take(values[: len(values) - rest], values[rest:])
    return extremes


def window_seeds(codes: Codes, n: int) -> Codes:
    """Return the seed of every window of n tokens (len(codes) - n + 1,); empty if the text has fewer tokens.

    The seed is the lowest fingerprint of the runs of n // 2 tokens in the window.
    """
    if len(codes) < n:
        return np.zeros(0, np.uint64)
    k = n // 2
    return sliding_extremes(grams(codes, k), n - k + 1, np.minimum)


def seeds(codes: Codes, n: int) -> Codes:
    """Return the seeds of all windows of n tokens, in text order; for seeds, see `window_seeds`.

    A seed that several windows have at one position is returned once. If a window occurs t times in the text, its seed
    is returned at least t times.
    """
    if len(codes) < n:
        return np.zeros(0, np.uint64)
    k = n // 2
    width = n - k + 1
    hashes = grams(codes, k)
    least = sliding_extremes(hashes, width, np.minimum)
    # a k-gram is a seed if it is the least of a window that contains it
    best = sliding_extremes(np.pad(least, width - 1), width, np.maximum)
    chosen: Codes = hashes[best == hashes]
    return chosen


def covered_runs(places: Ints, n: int) -> Ints:
    """Merge windows of n tokens into disjoint runs; return the start and end of each run (runs, 2) [tokens].

    `places` are the indices of the first tokens of the windows, in ascending order.
    """
    if not len(places):
        return np.zeros((0, 2), np.int64)
    breaks = np.flatnonzero(places[1:] > places[:-1] + n)
    starts = np.concatenate((places[:1], places[breaks + 1]))
    ends = np.concatenate((places[breaks], places[-1:])) + n
    return np.stack([starts, ends], axis=1)


# Cuts from repeated passages: one run of the whitespace in and around a passage is kept, so that words stay separate.
#
# The text itself is never rewritten; every cut names the kind of unit that caused it. Whitespace alone is never cut.

Cut = tuple[int, int, str]
"""(start, end, kind of the unit that is repeated) [code points]."""
_SPACE = re.compile(r"\s+")


def cuts_of(text: str, passages: Sequence[tuple[str, Sequence[Span]]]) -> list[Cut]:
    """Return the cuts that remove repeated passages from a text.

    `passages` are (kind of unit, spans). Where two passages overlap, the cut has the kind that is listed first. In
    place of a passage, one run of whitespace is kept, except at the start and the end of the text.
    """
    spans = [span for _, kind_spans in passages for span in kind_spans]
    if not spans:
        return []
    owner = np.zeros(len(text), np.uint8)
    for number, (_, kind_spans) in reversed(list(enumerate(passages, 1))):
        for start, end in kind_spans:
            owner[start:end] = number
    cuts: list[Cut] = []
    for start, end in regions(text, spans):
        spaces = [match.span() for match in _SPACE.finditer(text, start, end)]
        for low, high in spaces:
            owner[low:high] = 0
        for low, high in _around_separator(text, (start, end), spaces) if owner[start:end].any() else ():
            cuts += [(low + a, low + b, passages[number - 1][0]) for a, b, number in _by_owner(owner[low:high])]
    return cuts


def regions(text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the spans, each extended by the whitespace around it; spans that then touch are merged."""
    wide: list[Span] = []
    for start, end in union(spans, []):
        reached = wide[-1][1] if wide else 0
        while start > reached and text[start - 1].isspace():
            start -= 1
        end = max(end, reached)
        while end < len(text) and text[end].isspace():
            end += 1
        append_span(wide, max(start, reached), end)
    return wide


def _around_separator(text: str, region: Span, spaces: Sequence[Span]) -> list[Span]:
    """Return the spans to cut in a region: all of it except one run of whitespace, which is kept as a separator.

    At the start or end of the text, the whole region is cut.
    """
    start, end = region
    if start == 0 or end == len(text) or not spaces:
        return [region]
    # the first of the runs with the most line breaks
    low, high = max(spaces, key=lambda span: text.count("\n", *span))
    return [span for span in ((start, low), (high, end)) if span[0] < span[1]]


def _by_owner(owner: npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Return the runs (start, end, kind) of consecutive characters of equal kind.

    `owner` has the kind of each character, as a number.

    Whitespace, whose kind is 0, gets the kind of the text before it. If there is none before, it gets the kind of the
    text after it.
    """
    owned = np.flatnonzero(owner)
    last = np.maximum(np.searchsorted(owned, np.arange(len(owner)), "right") - 1, 0)
    kinds = owner[owned[last]]
    edges = [0, *(np.flatnonzero(np.diff(kinds.astype(np.int16))) + 1).tolist(), len(kinds)]
    return [(start, end, int(kinds[start])) for start, end in pairwise(edges)]


def cuts_in_whole_text(cuts: Sequence[Cut], visible: Sequence[Span]) -> list[Cut]:
    """Convert cuts of the visible text to cuts of the whole text, of which `visible` are the visible spans."""
    by_kind: dict[str, list[Span]] = {}
    for start, end, kind in cuts:
        by_kind.setdefault(kind, []).append((start, end))
    return sorted((*span, kind) for kind, spans in by_kind.items() for span in map_visible_spans(visible, spans))
