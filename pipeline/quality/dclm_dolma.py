"""Gopher's and C4's signals as DCLM and as dolma define them.

Words are separated by whitespace, but DCLM's n-grams consist of Unicode words. Every occurrence of a repeated line,
paragraph or n-gram counts, the first included. DCLM ignores empty lines and paragraphs. dolma uses the median word
length instead of the mean, and divides repeated n-grams by all n-grams of the text. Source: Li et al. 2024, arXiv
2406.11794, and its code `baselines/mappers`; Soldaini et al. 2024, arXiv 2402.00159, and its code
`python/dolma/taggers`.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from pipeline.quality.gopher import split_lines
from pipeline.quality.text import (
    ALNUM_FIRST,
    LETTER,
    SYMBOL,
    TOP_SIZES,
    TextView,
    count_known,
    ngram_lengths,
    num_covered_chars,
    read_pieces,
    read_unicode_words,
    recurring_ngrams,
)
from pipeline.text.words import NARROW_SPACE, Codes, pieces_of

SYMBOLS = ("#", "...", ". . .", "…")
DCLM_BULLETS = ("●", "•", "*", "-")
ELLIPSES = ("...", ". . .", "…")
OTHER_SPACE = (
    "\x1c\x1d\x1e\x1f\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
_AFTER_OTHER = re.compile(rf"[{OTHER_SPACE}][^\W_]")
ASCII_SPACE = " \n\r\t\v\f"
_FASTTEXT_SPACE = re.compile(rf"[{ASCII_SPACE}\0]+")


def dclm_lines(text: str) -> dict[str, float]:
    """Return DCLM's line and paragraph signals of a text, by name."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    size = max(len(lines), 1)
    signals = {
        "dclm_bullet_lines": sum(line.startswith(DCLM_BULLETS) for line in lines) / size,
        "dclm_ellipsis_lines": sum(line.endswith(ELLIPSES) for line in lines) / size,
    }
    for name, parts in (("line", lines), ("para", [part for part in map(str.strip, text.split("\n\n")) if part])):
        signals[f"dclm_dup_{name}_frac"], signals[f"dclm_dup_{name}_char_frac"] = shares_of_repeated(parts)
    return signals


def shares_of_repeated(parts: Sequence[str]) -> tuple[float, float]:
    """Return the share of strings that occur more than once, and the share of characters in such strings."""
    if len(set(parts)) == len(parts):
        return 0.0, 0.0
    repeated = [(part, count) for part, count in Counter(parts).items() if count > 1]
    number, characters = sum(count for _, count in repeated), sum(len(part) * count for part, count in repeated)
    return number / len(parts), characters / max(sum(map(len, parts)), 1)


def dclm_words(whole: TextView, stop_words: Codes) -> dict[str, float]:
    """Return DCLM's word signals of a text, by name.

    `stop_words` are the language's stop words, as `stop_codes` returns them.
    """
    _, lengths, flags, _, lower_codes = whole.read(read_pieces)
    num_pieces = max(len(lengths), 1)
    signals = {
        "dclm_num_words": num_words(whole),
        "dclm_mean_word_length": int(lengths.sum()) / num_pieces,
        "dclm_symbol_ratio": sum(map(whole.text.count, SYMBOLS)) / num_pieces,
        "dclm_alpha_words": int(np.count_nonzero(flags & LETTER)) / num_pieces,
        "dclm_stop_words": count_known(lower_codes, stop_words),
    }
    if NARROW_SPACE in whole.text:
        words = whole.vocabulary.words(whole.vocabulary.numbers(pieces_of(whole.text)), read_unicode_words)
        word_lengths, codes = words.lengths, words.codes
    else:
        _, word_lengths, _, codes = whole.read(read_unicode_words)
    offsets = np.concatenate(([0], np.cumsum(word_lengths)))
    size = max(int(offsets[-1]), 1)
    for ngrams in recurring_ngrams(codes):
        if ngrams.n in TOP_SIZES:
            longest = int(ngram_lengths(ngrams.firsts, ngrams.n, offsets).max()) if len(ngrams.firsts) else 0
            signals[f"dclm_top_{ngrams.n}gram"] = longest * ngrams.most / size
        else:
            signals[f"dclm_dup_{ngrams.n}gram"] = num_covered_chars(ngrams, offsets) / size
    return signals


def num_words(parts: TextView) -> int:
    """Return the number of words that start with a letter or digit.

    Words are split as fastText splits them: at ASCII whitespace and zero bytes only.
    """
    text = parts.text
    if "\0" in text:
        return sum(word[0].isalnum() for word in _FASTTEXT_SPACE.split(text) if word)
    # `read_pieces` splits at other whitespace too, where fastText's word continues, so these are subtracted.
    inside = sum(1 for _ in _AFTER_OTHER.finditer(text))
    return int(np.count_nonzero(parts.read(read_pieces)[2] & ALNUM_FIRST)) - inside


# dolma's signals: the taggers gopher_v2 and c4_v2 of its toolkit.

DOLMA_BULLETS = ("*", "-")
ELLIPSIS = "…"


def dolma_lines(whole: TextView) -> dict[str, float]:
    """Return dolma's line signals of a text, by name."""
    lines, lowered = split_lines(whole.text), whole.lowered
    repeated, share = shares_of_repeated(lines)
    num_chars = int(whole.read(read_pieces)[1].sum()) if repeated else 1
    return {
        "dolma_bullet_lines": sum(line.startswith(DOLMA_BULLETS) for line in lines) / len(lines),
        "dolma_ellipsis_lines": sum(line.endswith(ELLIPSIS) for line in lines) / len(lines),
        "dolma_dup_line_frac": repeated,
        "dolma_dup_line_char_frac": share * sum(map(len, lines)) / max(num_chars, 1),
        "dolma_curly_brackets": lowered.count("{"),
        "dolma_lorem_ipsum": lowered.count("lorem ipsum"),
        "dolma_javascript": lowered.count("javascript"),
    }


def dolma_words(whole: TextView, stop_words: Codes) -> dict[str, float | None]:
    """Return dolma's word signals of a text, by name. An n-gram signal is None if the text has fewer than n words.

    `stop_words` are the language's stop words, as `stop_codes` returns them.
    """
    _, lengths, flags, codes, _ = whole.read(read_pieces)
    size = max(len(lengths), 1)
    signals: dict[str, float | None] = {
        "dolma_num_words": len(lengths),
        "dolma_median_word_length": float(np.median(lengths)) if len(lengths) else 0.0,
        "dolma_symbol_ratio": int(np.count_nonzero(flags & SYMBOL)) / size,
        "dolma_alpha_words": int(np.count_nonzero(flags & LETTER)) / size,
        "dolma_stop_words": count_known(codes, stop_words),
    }
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    total = max(int(offsets[-1]), 1)
    for ngrams in recurring_ngrams(codes):
        n, measured = ngrams.n, len(lengths) >= ngrams.n
        if n in TOP_SIZES:
            first = int(ngrams.firsts.min()) if len(ngrams.firsts) else 0
            top = int(offsets[first + n] - offsets[first]) * ngrams.most if measured else 0
            signals[f"dolma_top_{n}gram"] = top / total if measured else None
        else:
            all_chars = int((offsets[n:] - offsets[:-n]).sum()) if measured else 0
            repeated = int(ngram_lengths(ngrams.places, n, offsets).sum())
            signals[f"dolma_dup_{n}gram"] = repeated / max(all_chars, 1) if measured else None
    return signals
