"""Looking a document up in the index: the n-grams it shares, the words they cover, the items they are from."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.decontaminate.config import DecontaminateConfig
from pipeline.decontaminate.index import (
    CHARACTERS,
    FILE,
    FORMAT,
    TOKEN,
    WORDS,
    character_keys,
    has_unspaced,
    located_characters,
    located_words,
    ngrams,
    prefix_sums,
)
from pipeline.engine.stage import Row
from pipeline.text.spans import Span, append_span, complement, map_visible_spans
from pipeline.text.words import Codes, Ints, normal_words, word_keys
from schemas.errors import ContractError

MOSTLY = 0.7
"""Share of an item's n-grams from which on it counts as found whole. Source: Chowdhery et al. 2022 (PaLM), arXiv
2204.02311, section 8; there over the whole corpus, here in one document."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of units that are n-grams of the index."""

    starts: Ints
    """First unit of each."""
    sizes: Ints
    """Units of each."""
    entries: Ints
    """Number of its n-gram in the index."""

    def covered(self, count: int) -> npt.NDArray[np.bool_]:
        """Which of `count` units lie in a run."""
        edges = np.bincount(self.starts, minlength=count + 1) - np.bincount(
            self.starts + self.sizes, minlength=count + 1
        )
        return np.cumsum(edges)[:count] > 0


NO_RUNS = Runs(*(np.zeros(0, np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a document shares with the evaluation sets."""

    ngrams: dict[str, int]
    """Distinct n-grams by set; sets without one are left out."""
    share: float
    """Words in such n-grams over words, or characters over characters if that is more; 0 to 1."""
    items: list[tuple[str, bool]]
    """`set:line` of every item that one of them is from, and whether the document has MOSTLY all of that item's."""


@dataclass(frozen=True)
class Index:
    """The index, mapped into memory."""

    arrays: dict[str, Any]
    header: dict[str, Any]

    @cached_property
    def _names(self) -> list[str]:
        return [one["name"] for one in self.header["sets"]]

    @cached_property
    def _set_ends(self) -> Ints:
        """The number of the item after the last of each set."""
        return np.cumsum([one["items"] for one in self.header["sets"]])

    @cached_property
    def _shift(self) -> np.uint64:
        """What a hash is shifted by to give its bit in the filter."""
        return np.uint64(65 - (8 * len(self.arrays["filter"])).bit_length())

    def find(self, hashes: Codes) -> tuple[Ints, Ints]:
        """Positions of the hashes that are in the index, and their numbers there."""
        slots = (hashes >> self._shift).view(np.int64)
        bits = self.arrays["filter"][slots >> 3] >> (slots & 7).astype(np.uint8)
        maybe = np.flatnonzero(bits & 1)
        if not len(maybe):
            return maybe, maybe
        known, wanted = self.arrays["hashes"], hashes[maybe]
        numbers = np.searchsorted(known, wanted)
        found = known[np.minimum(numbers, len(known) - 1)] == wanted
        return maybe[found], numbers[found]

    def runs(self, keys: Codes, kind: str) -> Runs:
        """Every run of units, given their keys, that is an n-gram of the index; `kind` is WORDS or CHARACTERS."""
        sizes = [size for size in self.header[kind] if size <= len(keys)]
        if not sizes:
            return NO_RUNS
        sums = prefix_sums(keys)
        places, entries = self.find(np.concatenate([ngrams(sums, size) for size in sizes]))
        if not len(places):
            return NO_RUNS
        ends = np.cumsum([len(sums) - size for size in sizes])
        which = np.searchsorted(ends, places, "right")
        return Runs(places - np.concatenate(([0], ends))[which], np.array(sizes)[which], entries)

    def overlap(self, text: str, words: Codes) -> Overlap | None:
        """What a text shares with the sets, given the keys of its words; None if nothing."""
        found = [(self.runs(words, WORDS), len(words))]
        if self.header[CHARACTERS] and has_unspaced(text):
            keys = character_keys(text)
            found.append((self.runs(keys, CHARACTERS), len(keys)))
        shares = [np.count_nonzero(runs.covered(count)) / count for runs, count in found if len(runs.starts)]
        if not shares:
            return None
        entries = np.unique(np.concatenate([runs.entries for runs, _ in found]))
        counts, owners = self._owners(entries)
        sets = np.searchsorted(self._set_ends, owners, "right")
        pairs = np.unique(np.stack((sets, np.repeat(entries, counts))), axis=1)[0]
        ngrams_of = {self._names[number]: int(count) for number, count in zip(*np.unique(pairs, return_counts=True))}
        return Overlap(ngrams_of, float(np.float32(max(shares))), self._items(owners))

    def _owners(self, entries: Ints) -> tuple[Ints, Ints]:
        """How many items each n-gram is from, and those items, n-gram after n-gram."""
        starts, ends = self.arrays["starts"][entries], self.arrays["starts"][entries + 1]
        owners = np.concatenate([self.arrays["owners"][start:end] for start, end in zip(starts, ends)])
        return ends - starts, owners.astype(np.int64)

    def _items(self, owners: Ints) -> list[tuple[str, bool]]:
        items, counts = np.unique(owners, return_counts=True)
        whole = 100 * counts >= round(100 * MOSTLY) * self.arrays["item_ngrams"][items].astype(np.int64)
        names = [self._names[number] for number in np.searchsorted(self._set_ends, items, "right")]
        lines = self.arrays["item_lines"][items].tolist()
        return [(f"{name}:{line}", mostly) for name, line, mostly in zip(names, lines, whole.tolist())]


def open_index(path: str) -> Index:
    """The index in a file. Raises ContractError if the file is none."""
    try:
        batch = pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
        header = json.loads((batch.schema.metadata or {})[FILE.encode()])
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        raise ContractError(f"{path}: expected an index of evaluation sets, got {error}. Make it anew.") from error
    if header["format"] != FORMAT:
        raise ContractError(f"{path}: expected format {FORMAT} of the index, got {header['format']}. Make it anew.")
    arrays = {name: batch.column(name).values.to_numpy() for name in batch.schema.names}
    return Index(arrays, header)


# Cutting shared n-grams out of a text, with a margin, until none is left; the text itself is never rewritten.
#
# What stays are pieces of whole tokens. Between two of them one line break of the cut text stays, or the space before
# it, so that no two words become one. Source: Brown et al. 2020 (GPT-3), arXiv 2005.14165, appendix C, where the pieces
# become documents of their own; here they stay one.

ROUNDS = 20
"""How often a text is looked through for what only the cuts before have brought together. What still shares n-grams
then is cut whole, so that no text made for it takes more than linear time."""


def cut_row(row: Row, index: Index, config: DecontaminateConfig) -> int:
    """Cut what a row shares with the index out of its text after cuts; returns the number of pieces that are left.

    Replaces `cuts`, `_body`, `_words` and `num_bytes`. Raises ContractError if body and cuts do not belong together.
    """
    text, body = row["text"], row["_body"]
    visible = complement([tuple(span) for span in row["cuts"]], len(text))
    if sum(end - start for start, end in visible) != len(body):
        raise ContractError(
            f"decontaminate: expected a body of the text without its cuts, got {len(body)} code points in place of "
            f"{sum(end - start for start, end in visible)}. A stage before changed one of them."
        )
    kept, rest = [(0, len(body))], body
    for turn in range(ROUNDS + 1):
        spans = shared_spans(rest, index)
        if not len(spans):
            break
        pieces = pieces_left(rest, spans, config.cut_margin, config.min_piece_chars) if turn < ROUNDS else []
        kept = map_visible_spans(kept, pieces)
        rest = "".join([body[start:end] for start, end in kept])
    row["cuts"] = complement(map_visible_spans(visible, kept), len(text))
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
