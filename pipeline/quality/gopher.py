"""Gopher's quality and repetition signals.

Quality: number and length of words, symbols, bullets, ellipses, letters, stop words. Repetition: repeated paragraphs,
lines and word n-grams as shares of the text; every occurrence after the first is a repeat.
Source: Rae et al. 2021, arXiv 2112.11446, appendix A.1.1 and table A1, as datatrove implements them.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import numpy as np

from pipeline.text import native
from pipeline.text.words import ALPHABETIC, WORD, Codes, Ints, Words, powers, token_codes

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("•", "-")
ELLIPSES = ("...", "…")


def stop_codes(words: Collection[str]) -> Codes:
    """Return the 64-bit codes of stop words, in ascending order."""
    ordered = sorted(words)
    return np.sort(token_codes(ordered, np.array(list(map(len, ordered)), np.int64)))


def num_stop_words(codes: Codes, stop_words: Codes) -> int:
    """Return how many distinct stop words a text contains.

    `codes` has the codes of the text's words. `stop_words` has the sorted codes of the stop words.
    """
    if not len(stop_words):
        return 0
    indices = np.searchsorted(stop_words, codes)
    indices[indices == len(stop_words)] = 0
    present = np.zeros(len(stop_words), bool)
    present[indices[stop_words[indices] == codes]] = True
    return int(np.count_nonzero(present))


def gopher_signals(text: str, lines: Sequence[str], words: Words, stop_words: Codes) -> dict[str, float]:
    """Return the signals in `schemas.signals.GOPHER_QUALITY` for a text.

    `lines` are the text's lines, as `splitlines` splits them. `words` are the text's tokens. `stop_words` has the
    sorted codes of the stop words.
    """
    flags = words.flags
    proper = (flags & WORD) > 0
    num_words = int(np.count_nonzero(proper))
    num_tokens, num_lines = max(len(flags), 1), max(len(lines), 1)
    ellipses = sum(map(text.count, ELLIPSES))
    bulleted = sum(line.lstrip().startswith(BULLETS) for line in lines)
    trailing = sum(line.rstrip().endswith(ELLIPSES) for line in lines) if ellipses else 0
    return {
        "gopher_num_words": num_words,
        "gopher_mean_word_length": int(words.lengths[proper].sum()) / max(num_words, 1),
        "gopher_hash_ratio": text.count("#") / num_tokens,
        "gopher_ellipsis_ratio": ellipses / num_tokens,
        "gopher_bullet_lines": bulleted / num_lines,
        "gopher_ellipsis_lines": trailing / num_lines,
        "gopher_alpha_words": int(np.count_nonzero(flags & ALPHABETIC)) / num_tokens,
        "gopher_stop_words": num_stop_words(words.codes, stop_words),
    }


# Repetition signals.

TOP_SIZES = (2, 3, 4)
REPEATED_SIZES = (5, 6, 7, 8, 9, 10)
_NGRAM_SIGNALS = (
    *(f"gopher_top_{n}gram" for n in TOP_SIZES),
    *(f"gopher_dup_{n}gram" for n in REPEATED_SIZES),
)
_MIX = np.uint64(0xD6E8FEB86659FD93)  # Odd; makes the code of ("ab", "c") differ from that of ("a", "bc").


def count_repeats(items: Sequence[str]) -> tuple[int, int]:
    """Return the number of strings that equal an earlier string, and the number of characters in these strings."""
    distinct = set(items)
    if len(distinct) == len(items):
        return 0, 0
    return len(items) - len(distinct), sum(map(len, items)) - sum(map(len, distinct))


def split_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a stripped text, which are separated by two or more newlines."""
    paragraphs = (paragraph.lstrip("\n") for paragraph in text.strip().split("\n\n"))
    return [paragraph for paragraph in paragraphs if paragraph] or [""]


def split_lines(text: str) -> list[str]:
    """Return the non-empty lines of a text.

    An empty line is added where the text starts or ends with a newline. An empty text has one empty line.
    """
    lines = [line for line in text.split("\n") if line]
    if text.startswith("\n"):
        lines.insert(0, "")
    if text.endswith("\n") or not text:
        lines.append("")
    return lines


def repetition_signals(text: str, words: Words) -> dict[str, float]:
    """Return the signals in `schemas.signals.GOPHER_REPETITION` for a text and its tokens."""
    size = max(len(text), 1)
    signals: dict[str, float] = {}
    for name, items in (("para", split_paragraphs(text)), ("line", split_lines(text))):
        number, characters = count_repeats(items)
        signals[f"gopher_dup_{name}_frac"] = number / len(items)
        signals[f"gopher_dup_{name}_char_frac"] = characters / size
    for name, characters in zip(_NGRAM_SIGNALS, ngram_characters(words)):
        signals[name] = characters / size
    return signals


def ngram_characters(words: Words) -> Sequence[int]:
    """Return the numbers of characters of the signals `gopher_top_{n}gram`, then of `gopher_dup_{n}gram`."""
    if native.module is not None:
        characters: tuple[int, ...] = native.module.gopher_ngrams(words.codes, words.lengths)
        return characters
    offsets = np.concatenate(([0], np.cumsum(words.lengths)))
    counts = chain(_top_ngrams(words.codes, offsets), _repeated_ngrams(words.codes, offsets))
    return [characters for _, characters in counts]


def _top_ngrams(codes: Codes, offsets: Ints) -> Iterator[tuple[int, int]]:
    """Yield (n, number of characters in all occurrences of the most frequent n-gram) for each n.

    Spaces between words are counted. Of equally frequent n-grams, the first in the text is used.
    """
    grams = codes
    starts_at = np.arange(len(codes))  # A recurring n-gram starts where a recurring (n-1)-gram starts.
    for n in TOP_SIZES:
        grams = grams[:-1] * _MIX + codes[n - 1 :]
        if not len(grams):
            yield n, 0
            continue
        starts_at = starts_at[starts_at < len(grams)]
        order, same = _equal_ranks(grams[starts_at])
        most, at = 1, 0
        if len(same):
            bounds = np.flatnonzero(same[1:] - same[:-1] > 1) + 1
            starts = np.concatenate(([0], bounds))
            counts = np.concatenate((bounds, [len(same)])) - starts + 1
            most = int(counts.max())
            ranks = same[starts[counts == most]]
            at = int(starts_at[order[ranks[:, None] + np.arange(most)].min()])
        starts_at = starts_at[_recurring(order, same)]
        yield n, int(offsets[at + n] - offsets[at] + n - 1) * most


def _repeated_ngrams(codes: Codes, offsets: Ints) -> Iterator[tuple[int, int]]:
    """Yield (n, number of characters in repeated n-grams) for each n.

    A repeated n-gram equals an earlier n-gram of the text. A repeated n-gram that overlaps the last counted n-gram is
    not counted.
    """
    forward, backward = powers(int(offsets[-1]) + 1)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(codes * forward[offsets[:-1]])))
    for n in REPEATED_SIZES:
        # datatrove compares n-grams without separators: their code is a slice of the text's polynomial, shifted to 0.
        grams = (sums[n:] - sums[:-n]) * backward[offsets[:-n]]
        order, same = _equal_ranks(grams)
        # An n-gram that occurs once is not a repeat and has none, so only recurring n-grams need the scan.
        starts_at = _recurring(order, same) if len(same) else order[:0]
        spans = offsets[starts_at + n] - offsets[starts_at]
        seen: set[int] = set()
        characters = free = 0
        for at, gram, span in zip(starts_at.tolist(), grams[starts_at].tolist(), spans.tolist()):
            if at < free:
                continue
            if gram in seen:
                characters += span
                free = at + n
            else:
                seen.add(gram)
        yield n, characters


def _equal_ranks(grams: Codes) -> tuple[Ints, Ints]:
    """Return the indices `order` that sort n-grams, and each i where n-grams order[i] and order[i + 1] are equal."""
    order = np.argsort(grams)
    ranked = grams[order]
    return order, np.flatnonzero(ranked[1:] == ranked[:-1])


def _recurring(order: Ints, same: Ints) -> Ints:
    """Return the indices of the n-grams that occur more than once, ascending.

    The arguments are the result of `_equal_ranks`.
    """
    recurs = np.zeros(len(order), bool)
    recurs[order[same]] = True
    recurs[order[same + 1]] = True
    return np.flatnonzero(recurs)
