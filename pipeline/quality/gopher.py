"""Gopher's quality signals: number and length of words, symbols, bullets, ellipses, letters, stop words.

Source: Rae et al. 2021, arXiv 2112.11446, appendix A.1.1, as datatrove reads it.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from pipeline.text.words import ALPHABETIC, WORD, Codes, Ints, Words, powers, token_codes

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("•", "-")
ELLIPSES = ("...", "…")


def stop_codes(words: Collection[str]) -> Codes:
    """The codes of the stop words of a language, sorted."""
    ordered = sorted(words)
    return np.sort(token_codes(ordered, np.array(list(map(len, ordered)), np.int64)))


def num_stop_words(codes: Codes, stop_words: Codes) -> int:
    """Distinct stop words among words, both given by their codes, the stop words sorted."""
    if not len(stop_words):
        return 0
    places = np.searchsorted(stop_words, codes)
    places[places == len(stop_words)] = 0
    met = np.zeros(len(stop_words), bool)
    met[places[stop_words[places] == codes]] = True
    return int(np.count_nonzero(met))


def gopher_signals(text: str, lines: Sequence[str], words: Words, stop_words: Codes) -> dict[str, float]:
    """The signals GOPHER_QUALITY of a text, its lines (as `splitlines` gives them), its tokens and stop words."""
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


# Gopher's repetition signals: repeated paragraphs, lines and word n-grams as shares of the text.
#
# A repeat is every occurrence after the first. Source: Rae et al. 2021, arXiv 2112.11446, table A1, as datatrove reads
# it.

TOP_SIZES = (2, 3, 4)
REPEATED_SIZES = (5, 6, 7, 8, 9, 10)
_MIX = np.uint64(0xD6E8FEB86659FD93)  # odd; makes the code of ("ab", "c") differ from that of ("a", "bc")


def count_repeats(items: Sequence[str]) -> tuple[int, int]:
    """Number of repeated items and of characters in them."""
    distinct = set(items)
    if len(distinct) == len(items):
        return 0, 0
    return len(items) - len(distinct), sum(map(len, items)) - sum(map(len, distinct))


def split_paragraphs(text: str) -> list[str]:
    """The parts of the stripped text between runs of at least two newlines."""
    parts = (part.lstrip("\n") for part in text.strip().split("\n\n"))
    return [part for part in parts if part] or [""]


def split_lines(text: str) -> list[str]:
    """The parts of the text between runs of newlines; an empty one where it begins or ends with a newline."""
    lines = [line for line in text.split("\n") if line]
    if text.startswith("\n"):
        lines.insert(0, "")
    if text.endswith("\n") or not text:
        lines.append("")
    return lines


def repetition_signals(text: str, words: Words) -> dict[str, float]:
    """The signals GOPHER_REPETITION of a text."""
    size = max(len(text), 1)
    signals: dict[str, float] = {}
    for name, parts in (("para", split_paragraphs(text)), ("line", split_lines(text))):
        number, characters = count_repeats(parts)
        signals[f"gopher_dup_{name}_frac"] = number / len(parts)
        signals[f"gopher_dup_{name}_char_frac"] = characters / size
    offsets = np.concatenate(([0], np.cumsum(words.lengths)))
    for n, characters in _top_ngrams(words.codes, offsets):
        signals[f"gopher_top_{n}gram"] = characters / size
    for n, characters in _repeated_ngrams(words.codes, offsets):
        signals[f"gopher_dup_{n}gram"] = characters / size
    return signals


def _top_ngrams(codes: Codes, offsets: Ints) -> Iterator[tuple[int, int]]:
    """n and the characters (spaces between words included) in the most frequent n-gram, the first among equals."""
    grams = codes
    places = np.arange(len(codes))  # an n-gram that recurs begins where an (n-1)-gram that recurs begins
    for n in TOP_SIZES:
        grams = grams[:-1] * _MIX + codes[n - 1 :]
        if not len(grams):
            yield n, 0
            continue
        places = places[places < len(grams)]
        order, same = _equal_ranks(grams[places])
        most, at = 1, 0
        if len(same):
            bounds = np.flatnonzero(same[1:] - same[:-1] > 1) + 1
            starts = np.concatenate(([0], bounds))
            counts = np.concatenate((bounds, [len(same)])) - starts + 1
            most = int(counts.max())
            ranks = same[starts[counts == most]]
            at = int(places[order[ranks[:, None] + np.arange(most)].min()])
        places = places[_recurring(order, same)]
        yield n, int(offsets[at + n] - offsets[at] + n - 1) * most


def _repeated_ngrams(codes: Codes, offsets: Ints) -> Iterator[tuple[int, int]]:
    """n and the characters in repeated n-grams, found from left to right and never overlapping one another."""
    forward, backward = powers(int(offsets[-1]) + 1)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(codes * forward[offsets[:-1]])))
    for n in REPEATED_SIZES:
        # the dialect compares n-grams without separators: their code is a slice of the text's polynomial, shifted to 0
        grams = (sums[n:] - sums[:-n]) * backward[offsets[:-n]]
        order, same = _equal_ranks(grams)
        # an n-gram that occurs once is neither a repeat nor the first of one, so only the others need the scan
        places = _recurring(order, same) if len(same) else order[:0]
        spans = offsets[places + n] - offsets[places]
        seen: set[int] = set()
        characters = free = 0
        for at, gram, span in zip(places.tolist(), grams[places].tolist(), spans.tolist()):
            if at < free:
                continue
            if gram in seen:
                characters += span
                free = at + n
            else:
                seen.add(gram)
        yield n, characters


def _equal_ranks(grams: Codes) -> tuple[Ints, Ints]:
    """The order that sorts the n-grams, and the ranks whose n-gram equals that of the next rank."""
    order = np.argsort(grams)
    ranked = grams[order]
    return order, np.flatnonzero(ranked[1:] == ranked[:-1])


def _recurring(order: Ints, same: Ints) -> Ints:
    """Indices, ascending, of the n-grams that occur more than once."""
    recurs = np.zeros(len(order), bool)
    recurs[order[same]] = True
    recurs[order[same + 1]] = True
    return np.flatnonzero(recurs)
