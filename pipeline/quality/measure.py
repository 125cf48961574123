"""All signals of one text, measured in one walk over its lines and words."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.pieces import UNSPACED_LANGUAGES
from pipeline.quality.c4 import LineRules, apply_line_rules, cuts_between, keep_every_line, num_sentences
from pipeline.quality.fineweb import fineweb
from pipeline.quality.gopher import gopher
from pipeline.quality.repetition import repetition
from pipeline.words import Ints, Vocabulary
from schemas.signals import SIGNALS

_RATIOS = tuple(signal.name for signal in SIGNALS if signal.kind == pa.float32())


def measure(text: str, language: str, rules: LineRules, vocabulary: Vocabulary) -> dict[str, Any]:
    """Every signal of the text, its `cuts`, and of what they leave `num_bytes`, `_body` and `_words` (their xxh64)."""
    vocabulary.trim()
    lines = text.splitlines(keepends=True)
    pieces = [line.split() for line in lines]
    counts = list(map(len, pieces))
    numbers = vocabulary.numbers(list(chain.from_iterable(pieces)))
    words = vocabulary.words(numbers)
    row: dict[str, Any] = {"quality_scope": "all" if language == "en" else "neutral"}
    # characters are no stand-in for words here: as 5-grams of them, 21 of 49 Japanese pages broke limits set for words
    row |= repetition(text, None if language in UNSPACED_LANGUAGES else words)
    row |= gopher(text, lines, words)

    kept = apply_line_rules(text, lines, counts, rules) if language == "en" else keep_every_line(text, counts)
    remains = "".join([text[start:end] for start, end in kept.spans])
    if kept.cited:
        left, counts_left = _read(remains, vocabulary)
    else:
        left, counts_left = _select(numbers, counts, kept.lines)
    words_left = words if len(left) == len(numbers) and not kept.cited else vocabulary.words(left)
    row["c4_lines_cut"] = len(counts) - counts.count(0) - len(kept.lines)
    row["c4_num_sentences"] = num_sentences(words_left, counts_left)
    row["c4_lorem_ipsum"] = kept.lorem_ipsum
    row["c4_curly_brackets"] = kept.curly_brackets

    if rules.cut:
        row["cuts"], row["_body"] = cuts_between(kept.spans, len(text)), remains
    else:
        row["cuts"], row["_body"], left, words_left = [], text, numbers, words
    row |= fineweb(row["_body"], len(words_left.flags))
    row["num_bytes"] = len(row["_body"].encode("utf-8", "surrogatepass"))
    row["_words"] = vocabulary.keys(left)
    # the table stores float32: rounding here makes a decision taken now and one replayed from the table the same
    measured = [name for name in _RATIOS if row[name] is not None]
    row.update(zip(measured, np.array([row[name] for name in measured], np.float32).tolist()))
    return row


def _read(text: str, vocabulary: Vocabulary) -> tuple[Ints, list[int]]:
    """The numbers of a text's pieces and how many each line has, blank lines left out."""
    lines = [pieces for pieces in map(str.split, text.splitlines()) if pieces]
    return vocabulary.numbers(list(chain.from_iterable(lines))), list(map(len, lines))


def _select(numbers: Ints, counts: Sequence[int], lines: Sequence[int]) -> tuple[Ints, list[int]]:
    """The numbers of the pieces on some of the lines and how many each has, blank lines left out."""
    keep = np.zeros(len(counts), bool)
    keep[lines] = True
    return numbers[np.repeat(keep, counts)], [counts[line] for line in lines if counts[line]]
