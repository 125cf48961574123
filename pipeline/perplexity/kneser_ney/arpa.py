"""The ARPA file: sections written part by part by workers, then joined to one file in the order of the parts.

Numbers are the shortest decimals that give back the same 32-bit float, as lmplz prints them.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.engine.parquet import HashingSink, unique_name
from pipeline.perplexity.kneser_ney.discounts import Floats
from pipeline.perplexity.kneser_ney.estimate import FIRST_WORD, Level, Words
from pipeline.perplexity.kneser_ney.scratch import columns_of
from schemas.storage import Store

SPECIAL = [b"<unk>", b"<s>", b"</s>"]
LINES = 1 << 17
COPY_BYTES = 4 << 20


class Lexicon:
    """The spelling of the words that one part needs, looked up in the files of the vocabulary."""

    def __init__(self, folder: Store, files: Sequence[tuple[str, int]], ids: Words):
        # np.unique hashes: 1.2 s for 14 million ids, a sort of 32-bit integers 0.05 s (process time).
        known = np.sort(np.concatenate([np.arange(FIRST_WORD, dtype=np.uint32), ids]))
        self._ids = known[np.concatenate([[True], known[1:] != known[:-1]])]
        found = [pa.array(SPECIAL, pa.binary())]
        for path, first in files:
            words = columns_of(folder, path)["word"].combine_chunks()
            low, high = np.searchsorted(self._ids, [first, first + len(words)])
            found.append(words.take(pa.array(self._ids[low:high] - first)))
        self._words = pa.concat_arrays(found)

    def words(self, ids: Words) -> pa.Array:
        """The spelling of each id (binary)."""
        return self._words.take(pa.array(np.searchsorted(self._ids, ids)))


def spelled(level: Level, below: pa.Array, lexicon: Lexicon) -> pa.Array:
    """N-grams of order 2 or more as text: the first word before the text of the n-gram without it."""
    return pc.binary_join_element_wise(lexicon.words(level.grams[-1]), below.take(pa.array(level.suffix)), b" ")


def lines(texts: pa.Array, probabilities: Floats, weights: Floats | None) -> Iterator[pa.Buffer]:
    """The lines of a section, some at a time: log10 of the probability, words, log10 of the back-off if given."""
    for start in range(0, len(texts), LINES):
        rows = slice(start, start + LINES)
        columns = [_decimals(probabilities[rows]), texts[rows]]
        if weights is not None:
            columns.append(_decimals(weights[rows]))
        joined = pc.binary_join_element_wise(*columns, b"\t")
        ended = pc.binary_join_element_wise(joined, pa.scalar(b""), b"\n")
        _, offsets, data = ended.buffers()
        yield data[: int(np.frombuffer(offsets, np.int32)[len(ended)])]


def _decimals(values: Floats) -> pa.Array:
    """log10 as text; probabilities are at most 1, whatever rounding says."""
    logs = np.log10(values).astype(np.float32)
    return pa.array(logs).cast(pa.string()).cast(pa.binary())


def write_section(folder: Store, stem: str, texts: pa.Array, probabilities: Floats, weights: Floats | None) -> str:
    """The name of a new file with the lines of one order that one part owns."""
    path = unique_name(stem, "lines")
    with folder.open_output(path) as stream:
        for data in lines(texts, np.minimum(probabilities, 1.0), weights):
            stream.write(data)
    return path


def write_arpa(scratch: Store, sections: Sequence[Sequence[str]], kept: Sequence[int], folder: Store, name: str) -> str:
    """Join the files of each order to one ARPA file; returns its SHA-256. The driver holds one block at a time."""
    partial = name if not folder.is_local else unique_name(name, "partial")
    sink = HashingSink(io.BufferedWriter(folder.open_output(partial), COPY_BYTES))
    try:
        sink.write(b"\\data\\\n" + b"".join(b"ngram %d=%d\n" % entry for entry in enumerate(kept, 1)))
        for order, files in enumerate(sections, 1):
            sink.write(b"\n\\%d-grams:\n" % order)
            for path in files:
                with scratch.open_input(path) as stream:
                    while block := stream.read_buffer(COPY_BYTES):
                        sink.write(block)
        sink.write(b"\n\\end\\\n")
        sink.close()
        if folder.is_local:
            folder.sync(partial)
            folder.fs.move(folder.path(partial), folder.path(name))
    except BaseException:
        with suppress(OSError):
            folder.delete(partial)
        raise
    return sink.sha256
