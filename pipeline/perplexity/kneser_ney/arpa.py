"""Files and messages of the n-gram trainer: scratch files, messages that are shuffled by partition, and the ARPA file.

Workers write the sections of the ARPA file part by part; the driver joins them in the order of the parts. Numbers are
the shortest decimals that round to the same 32-bit float, as in files of lmplz.
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

# Arrays between workers: columns of scratch files, and messages that Spark shuffles by their target partition.
#
# A message holds the bytes of arrays, split into rows of at most ROW_BYTES so that rows and Arrow batches stay small.
# Counting 4.2 million 5-grams with messages took 1.7 to 2.2 s (two cores, warm), and the n-grams stay sorted. With
# packed rows that the JVM groups it took 2.7 to 2.9 s, and they are in hash order: every later step must sort or hash.

ROW_BYTES = 1 << 20
"""Maximum size of the row of a message [bytes]."""
MESSAGE = pa.schema(
    [
        *(pa.field(name, pa.int32()) for name in ("target", "source", "signed_order", "row_index")),
        pa.field("payload", pa.binary()),
    ]
)
MESSAGE_DDL = "target int, source int, signed_order int, row_index int, payload binary"
"""Schema of the rows of messages: target and source partition, order of the n-grams, number of the row, and bytes.

The order is negative in messages with back-off weights, to distinguish them from messages with context sums.
"""
Messages = dict[tuple[int, int], memoryview]
"""The bytes of the messages to one partition, by (signed order, source partition)."""


def write_columns(folder: Store, stem: str, columns: dict[str, npt.NDArray[np.generic] | pa.Array]) -> str:
    """Write columns of equal length to a new Arrow file. Return the file name, which begins with `stem`."""
    path = unique_name(stem, "arrow")
    table = pa.table(columns)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with folder.open_output(path) as stream, pa.ipc.new_file(stream, table.schema, options=options) as writer:
        writer.write_table(table)
    return path


def read_columns(folder: Store, path: str) -> pa.Table:
    """Return the columns of a file that `write_columns` wrote, each in one chunk."""
    with folder.open_unchecked(path) as stream:
        return pa.ipc.open_file(stream).read_all().combine_chunks()


def write_grams(folder: Store, stem: str, grams: Words, counts: Ints) -> str:
    """Write n-grams and their counts to a new file. Return the file name, which begins with `stem`."""
    return write_columns(folder, stem, {f"word{row}": words for row, words in enumerate(grams)} | {"count": counts})


def read_grams(folder: Store, path: str) -> tuple[Words, Ints]:
    """Return the n-grams and their counts from a file that `write_grams` wrote."""
    columns = [column.to_numpy() for column in read_columns(folder, path).columns]
    return np.stack(columns[:-1]), columns[-1]


def message_rows(
    target: int, source: int, signed_order: int, *arrays: npt.NDArray[np.generic]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows (schema MESSAGE) of a message from partition `source` to partition `target`.

    The rows contain the bytes of `arrays`. No row is yielded if all arrays are empty.
    """
    payload = b"".join(np.ascontiguousarray(array).data.cast("B") for array in arrays if array.size)
    for number, start in enumerate(range(0, len(payload), ROW_BYTES)):
        view = memoryview(payload)[start : start + ROW_BYTES]
        ends = pa.array([0, len(view)], pa.int32()).buffers()[1]
        cell = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(view)])
        address = [pa.array([value], pa.int32()) for value in (target, source, signed_order, number)]
        yield pa.RecordBatch.from_arrays([*address, cell], schema=MESSAGE)


def join_messages(batches: Iterable[pa.RecordBatch]) -> Messages:
    """Join the rows (schema MESSAGE) that one partition received into messages.

    Return the bytes of each message by (signed order, source partition), sorted by these keys.
    """
    rows: dict[tuple[int, int], list[tuple[int, bytes]]] = defaultdict(list)
    for batch in batches:
        addresses = zip(*(batch.column(name).to_pylist() for name in ("signed_order", "source", "row_index")))
        for (signed_order, source, number), payload in zip(addresses, batch.column("payload")):
            rows[signed_order, source].append((number, payload.as_py()))
    return {key: memoryview(b"".join(payload for _, payload in sorted(rows.pop(key)))) for key in sorted(rows)}


def message_grams(payload: memoryview, order: int) -> tuple[Words, Ints]:
    """Return the two arrays in a message: n-grams of `order` words, and the count of each n-gram."""
    number = len(payload) // (4 * order + 8)
    grams = np.frombuffer(payload, np.uint32, number * order).reshape(order, number)
    return grams, np.frombuffer(payload, np.uint8, offset=4 * number * order).view(np.int64)


# Sections of the ARPA file, one for each order, and the file itself.

SPECIAL_WORDS = [b"<unk>", b"<s>", b"</s>"]
LINES = 1 << 17
"""Lines of the ARPA file that are formatted at once."""
COPY_BYTES = 4 << 20
"""Size of the blocks in which sections are copied to the ARPA file [bytes]."""


class Lexicon:
    """A mapping from word ids to the text of the words; only the words in `ids` are read from the vocabulary files."""

    def __init__(self, folder: Store, files: Sequence[tuple[str, int]], ids: Words):
        # np.unique hashes: 1.2 s for 14 million ids; a sort of 32-bit integers takes 0.05 s (process time).
        repeated = np.sort(np.concatenate([np.arange(FIRST_WORD, dtype=np.uint32), ids]))
        self._ids = repeated[np.concatenate([[True], repeated[1:] != repeated[:-1]])]
        texts = [pa.array(SPECIAL_WORDS, pa.binary())]
        for path, first in files:
            words = read_columns(folder, path)["word"].combine_chunks()
            low, high = np.searchsorted(self._ids, [first, first + len(words)])
            texts.append(words.take(pa.array(self._ids[low:high] - first)))
        self._words = pa.concat_arrays(texts)

    def words(self, ids: Words) -> pa.Array:
        """Return the text of each word id as a binary array."""
        return self._words.take(pa.array(np.searchsorted(self._ids, ids)))


def gram_texts(level: OrderNgrams, below: pa.Array, lexicon: Lexicon) -> pa.Array:
    """Return the words of each n-gram, joined by spaces. The n-grams are of one order, which is at least 2.

    `below` has the joined words of the n-grams of the next lower order.
    """
    return pc.binary_join_element_wise(lexicon.words(level.grams[-1]), below.take(pa.array(level.suffix)), b" ")


def lines(texts: pa.Array, probabilities: Floats, weights: Floats | None) -> Iterator[pa.Buffer]:
    """Yield the lines of an ARPA section in blocks.

    A line has a log10 probability and the words. If `weights` is not None, the log10 back-off weight follows.
    """
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
    """Return the log10 of each value as decimal text."""
    logs = np.log10(values).astype(np.float32)
    return pa.array(logs).cast(pa.string()).cast(pa.binary())


def write_section(folder: Store, stem: str, texts: pa.Array, probabilities: Floats, weights: Floats | None) -> str:
    """Write n-grams of one order as ARPA lines to a new file. Return the file name, which begins with `stem`."""
    path = unique_name(stem, "lines")
    with folder.open_output(path) as stream:
        # rounding may lift a probability above 1
        for data in lines(texts, np.minimum(probabilities, 1.0), weights):
            stream.write(data)
    return path


def write_arpa(scratch: Store, sections: Sequence[Sequence[str]], kept: Sequence[int], folder: Store, name: str) -> str:
    """Join the section files of all orders to one ARPA file, and return the SHA-256 of the ARPA file.

    `sections` has the section files of each order. `kept` has the number of n-grams of each order.
    """
    partial = name if not folder.is_local else unique_name(name, "partial")
    sink = HashingSink(io.BufferedWriter(folder.open_output(partial), COPY_BYTES))
    try:
        sink.write(b"\\data\\\n" + b"".join(b"ngram %d=%d\n" % entry for entry in enumerate(kept, 1)))
        for order, files in enumerate(sections, 1):
            sink.write(b"\n\\%d-grams:\n" % order)
            for path in files:
                with scratch.open_unchecked(path) as stream:
                    while block := stream.read_buffer(COPY_BYTES):
                        sink.write(block)
        sink.write(b"\n\\end\\\n")
        sink.close()
        if folder.is_local:
            folder.sync(partial)
            folder.move(partial, name)
    except BaseException:
        with suppress(OSError):
            folder.delete(partial)
        raise
    return sink.sha256
