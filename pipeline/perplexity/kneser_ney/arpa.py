"""The ARPA file: sections written part by part by workers, then joined to one file in the order of the parts.

Numbers are the shortest decimals that give back the same 32-bit float, as lmplz prints them.
"""

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.engine.parquet import HashingSink, unique_name
from pipeline.perplexity.kneser_ney.estimate import FIRST_WORD, Floats, Ints, OrderNgrams, Words
from schemas.storage import Store

# Arrays between workers: columns of a scratch file, and letters that Spark's shuffle carries.
#
# A letter is bytes that only its receiver understands, cut into pieces that neither a row nor an Arrow batch finds
# large. Counting 4.2 million 5-grams this way took 1.7 to 2.2 s and leaves them sorted; as packed rows that the JVM
# groups it took 2.7 to 2.9 s (two cores, warm) and leaves them in hash order, for every later step to sort or hash.

PIECE_BYTES = 1 << 20
MESSAGE = pa.schema(
    [
        *(pa.field(name, pa.int32()) for name in ("target", "source", "level", "piece")),
        pa.field("payload", pa.binary()),
    ]
)
MESSAGE_DDL = "target int, source int, level int, piece int, payload binary"
Messages = dict[tuple[int, int], memoryview]


def write_columns(folder: Store, stem: str, columns: dict[str, npt.NDArray[np.generic] | pa.Array]) -> str:
    """The name of a new file with these columns of one length."""
    path = unique_name(stem, "arrow")
    table = pa.table(columns)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with folder.open_output(path) as stream, pa.ipc.new_file(stream, table.schema, options=options) as writer:
        writer.write_table(table)
    return path


def read_columns(folder: Store, path: str) -> pa.Table:
    """The columns of a file, in one chunk each."""
    with folder.open_input(path) as stream:
        return pa.ipc.open_file(stream).read_all().combine_chunks()


def write_grams(folder: Store, stem: str, grams: Words, counts: Ints) -> str:
    """The name of a new file with these n-grams and their counts."""
    return write_columns(folder, stem, {f"word{row}": words for row, words in enumerate(grams)} | {"count": counts})


def read_grams(folder: Store, path: str) -> tuple[Words, Ints]:
    """The n-grams and counts of a file."""
    columns = [column.to_numpy() for column in read_columns(folder, path).columns]
    return np.stack(columns[:-1]), columns[-1]


def message_rows(target: int, source: int, level: int, *arrays: npt.NDArray[np.generic]) -> Iterator[pa.RecordBatch]:
    """The pieces of a letter from a source to a target; none if there is nothing to say."""
    payload = b"".join(np.ascontiguousarray(array).data.cast("B") for array in arrays if array.size)
    for piece, start in enumerate(range(0, len(payload), PIECE_BYTES)):
        view = memoryview(payload)[start : start + PIECE_BYTES]
        ends = pa.array([0, len(view)], pa.int32()).buffers()[1]
        cell = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(view)])
        places = [pa.array([value], pa.int32()) for value in (target, source, level, piece)]
        yield pa.RecordBatch.from_arrays([*places, cell], schema=MESSAGE)


def join_messages(batches: Iterable[pa.RecordBatch]) -> Messages:
    """The letters of one target by (level, source), in that order."""
    pieces: dict[tuple[int, int], list[tuple[int, bytes]]] = defaultdict(list)
    for batch in batches:
        places = zip(*(batch.column(name).to_pylist() for name in ("level", "source", "piece")))
        for (level, source, piece), payload in zip(places, batch.column("payload")):
            pieces[level, source].append((piece, payload.as_py()))
    return {key: memoryview(b"".join(payload for _, payload in sorted(pieces.pop(key)))) for key in sorted(pieces)}


def message_grams(payload: memoryview, order: int) -> tuple[Words, Ints]:
    """The n-grams and counts of a letter that was written from these two arrays."""
    number = len(payload) // (4 * order + 8)
    grams = np.frombuffer(payload, np.uint32, number * order).reshape(order, number)
    return grams, np.frombuffer(payload, np.uint8, offset=4 * number * order).view(np.int64)


SPECIAL_WORDS = [b"<unk>", b"<s>", b"</s>"]
LINES = 1 << 17
COPY_BYTES = 4 << 20


class Lexicon:
    """The spelling of the words that one part needs, looked up in the files of the vocabulary."""

    def __init__(self, folder: Store, files: Sequence[tuple[str, int]], ids: Words):
        # np.unique hashes: 1.2 s for 14 million ids, a sort of 32-bit integers 0.05 s (process time).
        known = np.sort(np.concatenate([np.arange(FIRST_WORD, dtype=np.uint32), ids]))
        self._ids = known[np.concatenate([[True], known[1:] != known[:-1]])]
        found = [pa.array(SPECIAL_WORDS, pa.binary())]
        for path, first in files:
            words = read_columns(folder, path)["word"].combine_chunks()
            low, high = np.searchsorted(self._ids, [first, first + len(words)])
            found.append(words.take(pa.array(self._ids[low:high] - first)))
        self._words = pa.concat_arrays(found)

    def words(self, ids: Words) -> pa.Array:
        """The spelling of each id (binary)."""
        return self._words.take(pa.array(np.searchsorted(self._ids, ids)))


def gram_texts(level: OrderNgrams, below: pa.Array, lexicon: Lexicon) -> pa.Array:
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
