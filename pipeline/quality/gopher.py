"""Gopher's quality signals: number and length of words, symbols, bullets, ellipses, letters, stop words.

Source: Rae et al. 2021, arXiv 2112.11446, appendix A.1.1, as datatrove reads it.
"""

from collections.abc import Collection, Sequence

import numpy as np

from pipeline.text.words import ALPHABETIC, WORD, Codes, Words, token_codes

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


def gopher(text: str, lines: Sequence[str], words: Words, stop_words: Codes) -> dict[str, float]:
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
