"""Documents whose text contains a string: a scan, for which there is no index.

It reads the table of clean texts that the dataset was made of; where that is not there any more, the shards, decoded.
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.errors import ContractError
from schemas.manifest import Manifest
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import Dataset
from train.monitor.long_work import LongWork
from train.trace.documents import table_behind
from train.trace.text import Texts

ROWS_AT_ONCE = 2048


def scan_of(dataset: Dataset) -> str:
    """What a scan would read, in words."""
    table = table_behind(dataset.folder, dataset.manifest, "clean")
    if table is not None:
        return f"scanning the clean text of {table[1].content.counts.rows_in:,} rows"
    return f"no clean text stands: decoding {_num_tokens(dataset):,} tokens of the shards"


def documents_containing(dataset: Dataset, text: str) -> Iterator[bytes]:
    """The ids of all documents whose text contains this string as it stands, in the order of the files.

    Shows how far it is on standard error. Raises ContractError if a file cannot be read.
    """
    table = table_behind(dataset.folder, dataset.manifest, "clean")
    return _in_shards(dataset, text) if table is None else _in_table(*table, text)


def _in_table(folder: Store, manifest: Manifest, text: str) -> Iterator[bytes]:
    total = sum(entry.rows for entry in manifest.content.files)
    with LongWork("scan", total, "rows") as work:
        for path in manifest.paths_of():
            try:
                file = pq.ParquetFile(folder.open_input(path))
            except (OSError, pa.ArrowInvalid) as error:
                raise ContractError(f"{folder.uri}/{path}: promised clean text, found {error}; restore it") from error
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=["doc_id", "text", "drop_stage"]):
                hits = pc.and_(pc.match_substring(batch.column("text"), text), batch.column("drop_stage").is_null())
                yield from batch.filter(hits).column("doc_id").to_pylist()
                work.add(batch.num_rows)


def _in_shards(dataset: Dataset, text: str) -> Iterator[bytes]:
    texts = Texts(dataset)
    with LongWork("scan", _num_tokens(dataset), "tokens") as work:
        for shard in (shard for shards in dataset.streams.values() for shard in shards):
            try:
                reader = pa.ipc.open_file(dataset.folder.open_input(shard.path))
            except (OSError, pa.ArrowInvalid) as error:
                where = f"{dataset.folder.uri}/{shard.path}"
                raise ContractError(f"{where}: promised a token shard, found {error}; restore it") from error
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                for doc_id, tokens in zip(batch.column("doc_id"), batch.column("tokens"), strict=True):
                    ids = tokens.as_py()
                    if doc_id.as_py() != REMOVED_ID and text in texts.decode(ids):
                        yield doc_id.as_py()
                    work.add(len(ids))


def _num_tokens(dataset: Dataset) -> int:
    return sum(shard.num_tokens for shards in dataset.streams.values() for shard in shards)
