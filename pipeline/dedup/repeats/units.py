"""Lines, paragraphs and spans of sentences of a text: where they stand, and the 64-bit keys of their normal forms."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from pipeline.dedup.repeats.config import RepeatsConfig
from pipeline.dedup.repeats.normal import normal_forms
from pipeline.minhash.fast import mixed
from pipeline.text.words import SENTENCE_ENDS, Codes, Ints, word_keys

_BLANK_LINES = re.compile(r"\n\s*\n")
_UNSPACED_ENDS = "\u3002\uff01\uff1f\uff61"
"""Sentence ends of writing that puts no space behind them: 。！？｡"""
_ENDS = re.escape("".join(sorted(SENTENCE_ENDS - set(_UNSPACED_ENDS))))
_CLOSING = r"[\"'”’»)\]}」』）】》]*"
_SENTENCE_END = re.compile(rf"[{_ENDS}]{_CLOSING}(?=\s)|[{_UNSPACED_ENDS}]{_CLOSING}|\n")
_SENTENCE_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Units:
    """Some units of a text, in order of their places."""

    keys: Codes
    """(units,) equal where the normal forms are, up to 2^-64."""
    starts: Ints
    """(units,) [code points]"""
    ends: Ints
    """(units,) [code points]"""


def units_of(text: str, kind: str, config: RepeatsConfig) -> Units:
    """The units of one kind (`line`, `paragraph` or `sentences`) that are long enough to be compared."""
    spans = {"line": line_spans, "paragraph": paragraph_spans, "sentences": sentence_spans}[kind](text)
    forms = normal_forms([text[start:end] for start, end in spans.tolist()])
    sizes = np.fromiter(map(len, forms), np.int64, len(forms))
    keys = word_keys(forms)
    if kind != "sentences":
        long = sizes >= config.min_unit_chars
        return Units(keys[long], spans[long, 0], spans[long, 1])
    filled = sizes > 0
    return _in_a_row(Units(keys[filled], spans[filled, 0], spans[filled, 1]), sizes[filled], config)


def _in_a_row(single: Units, sizes: Ints, config: RepeatsConfig) -> Units:
    """Every span of so many sentences as the settings say, joined by single spaces."""
    count = max(0, len(sizes) - config.sentences + 1)
    keys = np.zeros(count, np.uint64)
    for place in range(config.sentences):
        keys = keys * _SENTENCE_FACTOR + mixed(single.keys[place : place + count])
    edges = np.concatenate(([0], np.cumsum(sizes + 1)))
    long = edges[config.sentences :][:count] - edges[:count] - 1 >= config.min_unit_chars
    return Units(keys[long], single.starts[:count][long], single.ends[config.sentences - 1 :][:count][long])


def line_spans(text: str) -> Ints:
    """Start and end of each line (lines, 2) [code points]; a line break belongs to no line."""
    sizes = np.fromiter(map(len, text.split("\n")), np.int64)
    ends = np.cumsum(sizes + 1) - 1
    return np.stack([ends - sizes, ends], axis=1)


def paragraph_spans(text: str) -> Ints:
    """Start and end of each paragraph (paragraphs, 2) [code points]: what stands between blank lines."""
    return _between([match.span() for match in _BLANK_LINES.finditer(text)], len(text))


def sentence_spans(text: str) -> Ints:
    """Start and end of each sentence (sentences, 2) [code points].

    A sentence ends with its line, and at an end mark that whitespace follows or that needs none; abbreviations are not
    known: two copies of a passage fall into the same pieces, whatever these are.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return _between([(end, end) for end in ends], len(text))


def _between(separators: Sequence[tuple[int, int]], size: int) -> Ints:
    edges = [0, *(edge for span in separators for edge in span), size]
    return np.array(edges, np.int64).reshape(-1, 2)


def scoped(keys: Codes, kind: str, scope: np.uint64) -> Codes:
    """The keys so that those of another kind or another scope are others."""
    return mixed(keys ^ np.uint64(xxhash.xxh64_intdigest(kind.encode())) ^ scope)
