"""The overlap of a document with the evaluation sets, by their index of n-grams, and the removal of shared text."""

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
    has_signs,
    has_unspaced,
    located_characters,
    located_words,
    ngrams,
    prefix_sums,
    without_signs,
)
from pipeline.engine.stage import Row
from pipeline.minhash.shingles import text_keys
from pipeline.text.spans import Span, append_span, complement, map_visible_spans
from pipeline.text.words import Codes, Ints, normal_words, word_keys
from schemas.errors import ContractError

MOSTLY = 0.7
"""Share of an item's n-grams from which on a document counts as containing the whole item. Source: Chowdhery et al.
2022 (PaLM), arXiv 2204.02311, section 8; there n-grams are counted in the whole corpus, here in one document."""


_REBUILD = "Delete the file, then run `penstock run` again."


@dataclass(frozen=True, slots=True)
class Runs:
    """The n-grams of a text that are in the index, each a run of units: words or characters."""

    starts: Ints
    """Index in the text of the first unit of each run."""
    sizes: Ints
    """Number of units in each run."""
    entries: Ints
    """Index of each run's n-gram in the sorted n-grams of the index."""

    def covered(self, count: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the `count` units of the text: True for a unit that is in at least one run."""
        edges = np.bincount(self.starts, minlength=count + 1) - np.bincount(
            self.starts + self.sizes, minlength=count + 1
        )
        return np.cumsum(edges)[:count] > 0


NO_RUNS = Runs(*(np.zeros(0, np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Overlap:
    """The text that a document shares with the evaluation sets."""

    ngrams: dict[str, int]
    """Number of distinct shared n-grams by evaluation set; sets without any are left out."""
    share: float
    """Share of the document's words that are in shared n-grams, or of its characters if that is more; 0 to 1."""
    items: list[tuple[str, bool]]
    """`set:line` of every item that shares an n-gram, and True if the share of its n-grams in the document is at least
    MOSTLY."""


@dataclass(frozen=True)
class Index:
    """The memory-mapped index of the n-grams of all evaluation sets."""

    arrays: dict[str, Any]
    header: dict[str, Any]

    @cached_property
    def _names(self) -> list[str]:
        return [entry["name"] for entry in self.header["sets"]]

    @cached_property
    def _set_ends(self) -> Ints:
        return np.cumsum([entry["items"] for entry in self.header["sets"]])

    @cached_property
    def _shift(self) -> np.uint64:
        """Return the shift to the right that turns a hash into its bit number in the filter [bits]."""
        return np.uint64(65 - (8 * len(self.arrays["filter"])).bit_length())

    def find(self, hashes: Codes) -> tuple[Ints, Ints]:
        """Return the n-grams that are in both `hashes` and the index: their positions in `hashes`, and in the index."""
        slots = (hashes >> self._shift).view(np.int64)
        bits = self.arrays["filter"][slots >> 3] >> (slots & 7).astype(np.uint8)
        maybe = np.flatnonzero(bits & 1)
        if not len(maybe):
            return maybe, maybe
        known, candidates = self.arrays["hashes"], hashes[maybe]
        numbers = np.searchsorted(known, candidates)
        found = known[np.minimum(numbers, len(known) - 1)] == candidates
        return maybe[found], numbers[found]

    def runs(self, keys: Codes, kind: str) -> Runs:
        """Return every run of a text's units that is an n-gram of the index.

        `kind` is WORDS or CHARACTERS, and `keys` are the keys of the text's words or characters.
        """
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
        """Return the overlap of a text with the evaluation sets; None if they share no n-gram.

        `words` are the keys of the text's normalized words.
        """
        words = text_keys(without_signs(text)) if has_signs(text) else words
        matches = [(self.runs(words, WORDS), len(words))]
        if self.header[CHARACTERS] and has_unspaced(text):
            keys = character_keys(text)
            matches.append((self.runs(keys, CHARACTERS), len(keys)))
        shares = [np.count_nonzero(runs.covered(count)) / count for runs, count in matches if len(runs.starts)]
        if not shares:
            return None
        entries = np.unique(np.concatenate([runs.entries for runs, _ in matches]))
        counts, owners = self._owners(entries)
        sets = np.searchsorted(self._set_ends, owners, "right")
        pairs = np.unique(np.stack((sets, np.repeat(entries, counts))), axis=1)[0]
        ngrams_of = {self._names[number]: int(count) for number, count in zip(*np.unique(pairs, return_counts=True))}
        return Overlap(ngrams_of, float(np.float32(max(shares))), self._items(owners))

    def _owners(self, entries: Ints) -> tuple[Ints, Ints]:
        """Return how many items contain each n-gram, and the indices of these items, n-gram by n-gram."""
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
    """Return the memory-mapped index in a file. Raises ContractError if the file is not an index of evaluation sets."""
    try:
        batch = pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
        header = json.loads((batch.schema.metadata or {})[FILE.encode()])
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        raise ContractError(
            f"{path}: expected an index of evaluation sets, got a file that is not one ({error}). {_REBUILD}"
        ) from error
    if header["format"] != FORMAT:
        raise ContractError(f"{path}: expected format {FORMAT} of the index, got {header['format']}. {_REBUILD}")
    arrays = {name: batch.column(name).values.to_numpy() for name in batch.schema.names}
    return Index(arrays, header)


# Cuts of shared n-grams, with a margin, until none is left; the text itself is never rewritten.
#
# The remaining fragments consist of whole tokens. Between two of them one line break of the cut text is kept, or the
# space before it, so that words stay separate. Source: Brown et al. 2020 (GPT-3), arXiv 2005.14165, appendix C, where
# the fragments become separate documents; here they remain one document.

ROUNDS = 20
"""Most rounds of matching and cutting, which are repeated because a cut can create new matches. Text that still shares
n-grams after the last round is cut entirely, so no adversarial text takes more than linear time."""


def cut_row(row: Row, index: Index, config: DecontaminateConfig) -> int:
    """Cut all n-grams of the index out of the text of a row; return the number of remaining fragments.

    Replaces `cuts`, `_body`, `_words` and `num_bytes`. Raises ContractError if `_body` is not the text without `cuts`.
    """
    text, body = row["text"], row["_body"]
    visible = complement([tuple(span) for span in row["cuts"]], len(text))
    if sum(end - start for start, end in visible) != len(body):
        raise ContractError(
            f"decontaminate: expected `_body` to be the text without `cuts`, got {len(body)} code points in place of "
            f"{sum(end - start for start, end in visible)}. Make each earlier stage that adds cuts also change `_body`."
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
    """Return the start and end of every n-gram that a text shares with the index (n-grams, 2) [code points]."""
    located = [(*located_words(text), WORDS)]
    if index.header[CHARACTERS] and has_unspaced(text):
        located.append((*located_characters(text), CHARACTERS))
    spans = []
    for keys, (starts, ends), kind in located:
        runs = index.runs(keys, kind)
        spans.append(np.stack((starts[runs.starts], ends[runs.starts + runs.sizes - 1]), axis=1))
    return np.concatenate(spans)


def pieces_left(text: str, spans: Ints, margin: int, min_chars: int) -> list[Span]:
    """Return the spans that remain of a text after `spans` and `margin` on each side of them are cut.

    Remaining fragments shorter than `min_chars` are cut too. All lengths are in code points.
    """
    tokens = np.array([token.span() for token in TOKEN.finditer(text)], np.int64)
    first = np.searchsorted(tokens[:, 1], spans[:, 0] - margin, "right")
    last = np.searchsorted(tokens[:, 0], spans[:, 1] + margin, "left")
    edges = np.bincount(first, minlength=len(tokens) + 1) - np.bincount(last, minlength=len(tokens) + 1)
    is_kept = np.concatenate(([0], np.cumsum(edges)[: len(tokens)] == 0, [0]))
    begins, stops = np.flatnonzero(np.diff(is_kept) > 0), np.flatnonzero(np.diff(is_kept) < 0)
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
