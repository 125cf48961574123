"""RedPajama-V2's signals of documents and of single lines.

Most use the lower-case text without punctuation, split at whitespace. Some use the raw text, split into runs of word
characters and runs of other characters. Signals from models and block lists are not computed here, and the stop words
are Penstock's. RefinedWeb's line rules use line signals too. Lines include their newline and together are the text.
Source: Weber et al. 2024, arXiv 2411.12372, and its code `app/src/core/quality_signals`.
"""

import re
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.quality.text import (
    ASCII_LETTER,
    CAPITALS,
    JAVASCRIPT,
    LOREM,
    TOP_SIZES,
    TextView,
    count_known,
    normal_piece,
    num_covered_chars,
    read_normal_pieces,
    read_raw_words,
    recurring_ngrams,
)
from pipeline.text.words import Codes, Ints

PLACEHOLDER = "lorem ipsum"
SYMBOLS = ("#", "...", "…")
ELLIPSES = ("...", "…")
BULLETS = ("•", "‣", "▶", "◀", "◦", "■", "□", "▪", "▫", "–")
_SENTENCE = re.compile(r"\b[^.!?]+[.!?]*")


def lines_of(text: str) -> list[str]:
    """Split a text at newlines only, and return the lines with their newlines."""
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def redpajama_lines(whole: TextView) -> dict[str, float | None]:
    """Return those RedPajama-V2 signals of a text that do not depend on its words, by name."""
    text, lines = whole.text, lines_of(whole.text)
    size = len(lines)
    return {
        "ccnet_nlines": size,
        "rps_doc_num_sentences": sum(1 for _ in _SENTENCE.finditer(text)),
        "rps_doc_frac_lines_end_with_ellipsis": _share(sum(line.rstrip().endswith(ELLIPSES) for line in lines), size),
        "rps_doc_frac_lines_start_with_bulletpoint": _share(
            sum(line.lstrip().startswith(BULLETS) for line in lines), size
        ),
        "rps_doc_curly_bracket": (text.count("{") + text.count("}")) / max(len(text), 1),
    }


def redpajama_words(whole: TextView, stop_words: Codes) -> dict[str, float | None]:
    """Return RedPajama-V2's word signals of a text, by name. A share of words is None if the text has no words.

    `stop_words` are stop words, as `stop_codes` returns them.
    """
    _, _, raw_flags, raw_codes = whole.read(read_raw_words)
    num_raw, symbols = len(raw_flags), sum(map(whole.text.count, SYMBOLS))
    _, lengths, flags, codes, _ = whole.read(read_normal_pieces)
    num_words, num_chars = len(lengths), int(lengths.sum())
    counts = np.unique(codes, return_counts=True)[1]
    signals: dict[str, float | None] = {
        "rps_doc_word_count": num_words,
        "rps_doc_mean_word_length": _share(num_chars, num_words),
        "rps_doc_symbol_to_word_ratio": _share(symbols, num_raw),
        "rps_doc_frac_no_alph_words": _share(num_raw - int(np.count_nonzero(raw_flags & ASCII_LETTER)), num_raw),
        "rps_doc_frac_all_caps_words": _share(int(np.count_nonzero(raw_flags & CAPITALS)), num_raw),
        "rps_doc_stop_word_fraction": _share(count_known(raw_codes, stop_words), num_raw) if num_words else 0.0,
        "rps_doc_frac_unique_words": _share(len(counts), num_words),
        "rps_doc_unigram_entropy": _entropy(counts, num_words) if num_words else None,
        "rps_doc_lorem_ipsum": _placeholders(whole.text) if (flags & LOREM).any() else 0.0,
    }
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    for ngrams in recurring_ngrams(codes):
        if ngrams.n in TOP_SIZES:
            first = int(ngrams.firsts.min()) if len(ngrams.firsts) else 0
            top = int(offsets[first + ngrams.n] - offsets[first]) * ngrams.most if ngrams.most > 1 else 0
            signals[f"rps_doc_frac_chars_top_{ngrams.n}gram"] = top / max(num_chars, 1)
        else:
            signals[f"rps_doc_frac_chars_dupe_{ngrams.n}grams"] = num_covered_chars(ngrams, offsets) / max(num_chars, 1)
    return signals


def _share(part: int, size: int) -> float | None:
    return part / size if size else None


def _entropy(counts: Ints, total: int) -> float:
    """Return the entropy [nats] of the word frequencies in a text.

    `counts` has the number of occurrences of each distinct word. `total` is the sum of `counts`.
    """
    # Terms are summed by ascending count, so the order of `counts` cannot change the result.
    distinct, multiplicity = np.unique(counts, return_counts=True)
    shares = distinct / total
    return float(-(multiplicity * shares * np.log(shares)).sum())


def _placeholders(text: str) -> float:
    """Return the ratio of `lorem ipsum` occurrences to characters in the normalized text."""
    normal = " ".join(filter(None, map(normal_piece, text.split())))
    return normal.count(PLACEHOLDER) / max(len(normal), 1)


# Signals of single lines. Each character gets its classes, which are summed line by line. The properties of words are
# looked up in the vocabulary.

UPPER, DIGIT, CODE, SPACE = 1, 2, 4, 8
"""Bits of a character's classes: upper case; digit; a sign that is more frequent in code than in prose; whitespace."""
CODE_SIGNS = frozenset("{}[]()<>=;_/\\|&$#@*+^~`%")
TERMINAL = (".", "!", "?", "”")
COUNTED = "likes|shares|comments|retweets|reposts|quotes|bookmarks|upvotes|downvotes|downloads|views|followers"
COUNTER = re.compile(rf"^\W*\d[,.\d]*[kmb]?\s+(?:{COUNTED})\W*$")
"""Matches a lower-case line that shows a counter, such as `3 likes`. Source: RefinedWeb's words as DCLM lists them."""
_COUNTED = re.compile(COUNTED)
_CLASSED = 0x32000  # No letters with case, digits or spaces have code points from here on.


@cache
def _table() -> npt.NDArray[np.uint8]:
    classes = np.zeros(0x110000, np.uint8)
    for code in range(_CLASSED):
        char = chr(code)
        classes[code] = UPPER * char.isupper() | DIGIT * char.isdigit() | SPACE * char.isspace()
    classes[[ord(char) for char in CODE_SIGNS]] |= CODE
    return classes


def classes_of(text: str) -> npt.NDArray[np.uint8]:
    """Return the classes of every character of a text, each class as one bit: UPPER, DIGIT, CODE, SPACE."""
    return _table()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]


def _sums(values: npt.NDArray[Any], edges: Ints) -> Ints:
    """Return the sum of each slice of `values`. Slice i is values[edges[i] : edges[i + 1]]."""
    totals = np.concatenate(([0], np.cumsum(values)))[edges]
    return totals[1:] - totals[:-1]


class LineCounts:
    """The lines of a text and the character and word counts of each line."""

    def __init__(self, whole: TextView):
        self.whole = whole
        self.texts = lines_of(whole.text)
        self.edges = np.concatenate(([0], np.cumsum(np.fromiter(map(len, self.texts), np.int64, len(self.texts)))))
        classes = classes_of(whole.text)
        self.upper = _sums((classes & UPPER) > 0, self.edges)
        self.digits = _sums((classes & DIGIT) > 0, self.edges)
        if len(self.texts) == len(whole.lines):  # True only if no separator other than a newline splits a line.
            self.counts = np.array(whole.counts, np.int64)
        else:
            self.counts = np.fromiter((len(line.split()) for line in self.texts), np.int64, len(self.texts))

    @cached_property
    def lengths(self) -> Ints:
        """The length of each line without its newline [code points]."""
        newlines = np.fromiter((line.endswith("\n") for line in self.texts), np.int64, len(self.texts))
        return self.edges[1:] - self.edges[:-1] - newlines

    @cached_property
    def counters(self) -> npt.NDArray[np.bool_]:
        """Whether each line shows a counter such as `3 likes`."""
        is_counter = np.zeros(len(self.texts), bool)
        if _COUNTED.search(self.whole.lowered):
            for number in np.flatnonzero((self.digits > 0) & (self.counts > 1)).tolist():
                is_counter[number] = COUNTER.search(self.texts[number].removesuffix("\n").lower()) is not None
        return is_counter


def line_signals(lines: LineCounts) -> dict[str, Any]:
    """Return the column `lines` (the span [start, end) of each line) and the signals in LINE_SIGNALS of each line."""
    whole, texts, edges = lines.whole, lines.texts, lines.edges
    per_piece, lengths, flags, _, numeric = whole.read(read_normal_pieces)
    words_at = np.concatenate(([0], np.cumsum(per_piece)))[np.concatenate(([0], np.cumsum(lines.counts)))]
    num_words = words_at[1:] - words_at[:-1]
    normal_size = np.maximum(_sums(lengths, words_at) + num_words - 1, 1)
    sizes = np.maximum(lines.lengths, 1)
    signals = {
        "rps_lines_ending_with_terminal_punctution_mark": [line.rstrip().endswith(TERMINAL) for line in texts],
        "rps_lines_javascript_counts": _sums((flags & JAVASCRIPT) > 0, words_at),
        "rps_lines_num_words": num_words,
        "rps_lines_numerical_chars_fraction": _sums(numeric, words_at) / normal_size,
        "rps_lines_start_with_bulletpoint": [line.lstrip().startswith(BULLETS) for line in texts],
        "rps_lines_uppercase_letter_fraction": lines.upper / np.maximum(edges[1:] - edges[:-1], 1),
        "refinedweb_line_uppercase": lines.upper / sizes,
        "refinedweb_line_digits": lines.digits / sizes,
        "refinedweb_line_counter": lines.counters,
        "refinedweb_line_words": lines.counts,
    }
    spans = list(zip(edges[:-1].tolist(), edges[1:].tolist()))
    return {"lines": spans} | {name: np.asarray(values, np.float32).tolist() for name, values in signals.items()}
