"""dolma's reading of Gopher's and C4's rules: taggers gopher_v2 and c4_v2 of its toolkit.

Words are pieces between whitespace, and the median of their lengths stands for the mean. Every occurrence of what
occurs more than once is a repetition; repeated n-grams are weighed against all n-grams of the text. Source: Soldaini et
al. 2024, arXiv 2402.00159, and its code `python/dolma/taggers`.
"""

import numpy as np

from pipeline.quality.dclm_dolma import shares_of_repeated
from pipeline.quality.ngrams import TOP_SIZES, recurring, spans
from pipeline.quality.parts import Parts
from pipeline.quality.repetition import split_lines
from pipeline.quality.text import LETTER, SYMBOL, num_among, read_pieces
from pipeline.text.words import Codes

DOLMA_BULLETS = ("*", "-")
ELLIPSIS = "…"


def dolma_lines(whole: Parts) -> dict[str, float]:
    """The signals of dolma that look at lines."""
    lines, lowered = split_lines(whole.text), whole.lowered
    repeated, share = shares_of_repeated(lines)
    num_chars = int(whole.read(read_pieces)[0].sum()) if repeated else 1
    return {
        "dolma_bullet_lines": sum(line.startswith(DOLMA_BULLETS) for line in lines) / len(lines),
        "dolma_ellipsis_lines": sum(line.endswith(ELLIPSIS) for line in lines) / len(lines),
        "dolma_dup_line_frac": repeated,
        "dolma_dup_line_char_frac": share * sum(map(len, lines)) / max(num_chars, 1),
        "dolma_curly_brackets": lowered.count("{"),
        "dolma_lorem_ipsum": lowered.count("lorem ipsum"),
        "dolma_javascript": lowered.count("javascript"),
    }


def dolma_words(whole: Parts, stop_words: Codes) -> dict[str, float | None]:
    """The signals of dolma that look at words; those of n-grams are None in a text of fewer words."""
    lengths, flags, codes, _ = whole.read(read_pieces)
    size = max(len(lengths), 1)
    signals: dict[str, float | None] = {
        "dolma_num_words": len(lengths),
        "dolma_median_word_length": float(np.median(lengths)) if len(lengths) else 0.0,
        "dolma_symbol_ratio": int(np.count_nonzero(flags & SYMBOL)) / size,
        "dolma_alpha_words": int(np.count_nonzero(flags & LETTER)) / size,
        "dolma_stop_words": num_among(codes, stop_words),
    }
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    total = max(int(offsets[-1]), 1)
    for found in recurring(codes):
        n, measured = found.n, len(lengths) >= found.n
        if n in TOP_SIZES:
            first = int(found.firsts.min()) if len(found.firsts) else 0
            top = int(offsets[first + n] - offsets[first]) * found.most if measured else 0
            signals[f"dolma_top_{n}gram"] = top / total if measured else None
        else:
            every = int((offsets[n:] - offsets[:-n]).sum()) if measured else 0
            repeated = int(spans(found.places, n, offsets).sum())
            signals[f"dolma_dup_{n}gram"] = repeated / max(every, 1) if measured else None
    return signals
