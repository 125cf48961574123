"""Cutting shared n-grams out of a text, with a margin, until none is left; the text itself is never rewritten.

What stays are pieces of whole tokens. Between two of them one line break of the cut text stays, or the space before
it, so that no two words become one. Source: Brown et al. 2020 (GPT-3), arXiv 2005.14165, appendix C, where the pieces
become documents of their own; here they stay one.
"""

import numpy as np
import numpy.typing as npt

from pipeline.decontaminate.config import DecontaminateConfig
from pipeline.decontaminate.index import CHARACTERS, WORDS
from pipeline.decontaminate.match import Index
from pipeline.decontaminate.ngrams import TOKEN, has_unspaced, located_characters, located_words
from pipeline.engine.stage import Row
from pipeline.text.spans import Span, append_span, between, select
from pipeline.text.words import Ints, normal_words, word_keys
from schemas.errors import ContractError

ROUNDS = 20
"""How often a text is looked through for what only the cuts before have brought together. What still shares n-grams
then is cut whole, so that no text made for it takes more than linear time."""


def cut_row(row: Row, index: Index, config: DecontaminateConfig) -> int:
    """Cut what a row shares with the index out of its text after cuts; returns the number of pieces that are left.

    Replaces `cuts`, `_body`, `_words` and `num_bytes`. Raises ContractError if body and cuts do not belong together.
    """
    text, body = row["text"], row["_body"]
    visible = between([tuple(span) for span in row["cuts"]], len(text))
    if sum(end - start for start, end in visible) != len(body):
        raise ContractError(
            f"decontaminate: promised a body of the text without its cuts, found {len(body)} code points in place of "
            f"{sum(end - start for start, end in visible)}; a stage before changed one of them"
        )
    kept, rest = [(0, len(body))], body
    for turn in range(ROUNDS + 1):
        spans = shared_spans(rest, index)
        if not len(spans):
            break
        pieces = pieces_left(rest, spans, config.cut_margin, config.min_piece_chars) if turn < ROUNDS else []
        kept = select(kept, pieces)
        rest = "".join([body[start:end] for start, end in kept])
    row["cuts"] = between(select(visible, kept), len(text))
    row["_body"], row["_words"] = rest, word_keys(normal_words(rest))
    row["num_bytes"] = len(rest.encode("utf-8", "surrogatepass"))
    return sum(not body[start:end].isspace() for start, end in kept)


def shared_spans(text: str, index: Index) -> npt.NDArray[np.int64]:
    """Start and end of every n-gram that a text shares with the index (n, 2) [code points]."""
    found = [(*located_words(text), WORDS)]
    if index.header[CHARACTERS] and has_unspaced(text):
        found.append((*located_characters(text), CHARACTERS))
    spans = []
    for keys, (starts, ends), kind in found:
        runs = index.runs(keys, kind)
        spans.append(np.stack((starts[runs.starts], ends[runs.starts + runs.sizes - 1]), axis=1))
    return np.concatenate(spans)


def pieces_left(text: str, spans: Ints, margin: int, min_chars: int) -> list[Span]:
    """What stays of a text when spans, `margin` on both sides and pieces below `min_chars` are cut [code points]."""
    tokens = np.array([token.span() for token in TOKEN.finditer(text)], np.int64)
    first = np.searchsorted(tokens[:, 1], spans[:, 0] - margin, "right")
    last = np.searchsorted(tokens[:, 0], spans[:, 1] + margin, "left")
    edges = np.bincount(first, minlength=len(tokens) + 1) - np.bincount(last, minlength=len(tokens) + 1)
    stays = np.concatenate(([0], np.cumsum(edges)[: len(tokens)] == 0, [0]))
    begins, stops = np.flatnonzero(np.diff(stays) > 0), np.flatnonzero(np.diff(stays) < 0)
    pieces = zip(tokens[begins, 0].tolist(), tokens[stops - 1, 1].tolist())
    kept: list[Span] = []
    for start, end in pieces:
        if end - start < min_chars:
            continue
        if kept:
            gap = kept[-1][1]
            separator = text.find("\n", gap, start)
            if separator < 0 and text[gap].isspace():
                separator = gap
            if separator >= 0:
                append_span(kept, separator, separator + 1)
        append_span(kept, start, end)
    return kept
