"""RedPajama-V2's signals of documents.

Most look at the text in lower case without punctuation, cut at whitespace; some at the raw text, cut into runs of word
characters and of others. Source: Weber et al. 2024, arXiv 2411.12372, and its code `app/src/core/quality_signals`.
Not here: those of models and of block lists, and the stop words are ours.
"""

import re

import numpy as np

from pipeline.quality.ngrams import TOP_SIZES, covered, recurring
from pipeline.quality.parts import Parts
from pipeline.quality.text import (
    ASCII_LETTER,
    CAPITALS,
    LOREM,
    normal_piece,
    num_among,
    read_normal_pieces,
    read_raw_words,
)
from pipeline.text.words import Codes, Ints

PLACEHOLDER = "lorem ipsum"
SYMBOLS = ("#", "...", "…")
ELLIPSES = ("...", "…")
BULLETS = ("•", "‣", "▶", "◀", "◦", "■", "□", "▪", "▫", "–")
_SENTENCE = re.compile(r"\b[^.!?]+[.!?]*")


def lines_of(text: str) -> list[str]:
    """The lines with their newlines."""
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def redpajama_lines(whole: Parts) -> dict[str, float | None]:
    """The signals of a text and its lines that look at no words."""
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


def redpajama_words(whole: Parts, stop_words: Codes) -> dict[str, float | None]:
    """The signals that look at words; None where a text has no words."""
    raw = whole.vocabulary.words(whole.numbers, read_raw_words)
    num_raw, symbols = len(raw.flags), sum(map(whole.text.count, SYMBOLS))
    lengths, flags, codes, _ = whole.read(read_normal_pieces)
    num_words, num_chars = len(lengths), int(lengths.sum())
    counts = np.unique(codes, return_counts=True)[1]
    signals: dict[str, float | None] = {
        "rps_doc_word_count": num_words,
        "rps_doc_mean_word_length": _share(num_chars, num_words),
        "rps_doc_symbol_to_word_ratio": _share(symbols, num_raw),
        "rps_doc_frac_no_alph_words": _share(num_raw - int(np.count_nonzero(raw.flags & ASCII_LETTER)), num_raw),
        "rps_doc_frac_all_caps_words": _share(int(np.count_nonzero(raw.flags & CAPITALS)), num_raw),
        "rps_doc_stop_word_fraction": _share(num_among(raw.codes, stop_words), num_raw) if num_words else 0.0,
        "rps_doc_frac_unique_words": _share(len(counts), num_words),
        "rps_doc_unigram_entropy": _entropy(counts, num_words) if num_words else None,
        "rps_doc_lorem_ipsum": _placeholders(whole.text) if (flags & LOREM).any() else 0.0,
    }
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    for found in recurring(codes):
        if found.n in TOP_SIZES:
            first = int(found.firsts.min()) if len(found.firsts) else 0
            top = int(offsets[first + found.n] - offsets[first]) * found.most if found.most > 1 else 0
            signals[f"rps_doc_frac_chars_top_{found.n}gram"] = top / max(num_chars, 1)
        else:
            signals[f"rps_doc_frac_chars_dupe_{found.n}grams"] = covered(found, offsets) / max(num_chars, 1)
    return signals


def _share(part: int, size: int) -> float | None:
    return part / size if size else None


def _entropy(counts: Ints, total: int) -> float:
    """Entropy of words that occur so often [nats]; summed over ascending counts, so that no hash has a say in it."""
    different, times = np.unique(counts, return_counts=True)
    shares = different / total
    return float(-(times * shares * np.log(shares)).sum())


def _placeholders(text: str) -> float:
    """Occurrences of the placeholder text over characters, both after normalisation."""
    normal = " ".join(filter(None, map(normal_piece, text.split())))
    return normal.count(PLACEHOLDER) / max(len(normal), 1)
