"""Gopher's quality signals: number and length of words, symbols, bullets, ellipses, letters, stop words.

Source: Rae et al. 2021, arXiv 2112.11446, appendix A.1.1, as datatrove reads it.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.words import ALPHABETIC, STOP_SHIFT, WORD, Words

BULLETS = ("•", "-")
ELLIPSES = ("...", "…")


def gopher(text: str, lines: Sequence[str], words: Words) -> dict[str, float]:
    """The signals GOPHER_QUALITY of a text, its lines (as `splitlines` gives them) and its tokens."""
    flags = words.flags
    proper = (flags & WORD) > 0
    num_words = int(np.count_nonzero(proper))
    num_tokens, num_lines = max(len(flags), 1), max(len(lines), 1)
    stop_words = np.bincount(flags >> STOP_SHIFT)[1:]
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
        "gopher_stop_words": int(np.count_nonzero(stop_words)),
    }
