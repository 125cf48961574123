"""The table of links between web pages, from the link lists of WAT files, Reddit submissions and dumps of wikis.

A pure function reads one file; files are read by several processes, and their rows are joined in the order of the file
names. So the table is the same for any number of processes.
"""

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Split
from pipeline.links.readers import LinkCounts, is_read, read_links
from pipeline.sources.splits import find_files, open_stream
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tables import field as column
from schemas.urls import KEY_BYTES

LINKS = pa.schema(
    [
        column("url", pa.string(), "target of the link, absolute"),
        column("url_key", pa.binary(KEY_BYTES), "key of the target's canonical URL; URLs of one page have one key"),
        column("domain", pa.string(), "registrable domain of the target"),
        column("from_url", pa.string(), "page that has the link"),
        column("from_domain", pa.string(), "registrable domain of that page"),
        column("text", pa.string(), "text of the link, or title of the submission; null: none"),
        column("rel", pa.string(), "value of the attribute rel, such as nofollow; null: none"),
        column("score", pa.int32(), "score of the submission; null: the link is none", "votes"),
    ]
)
BATCH_ROWS = 50_000


def write_links(paths: Sequence[str], out: str, internal: bool = False, processes: int = 1) -> LinkCounts:
    """Write the links in WAT files, Reddit submissions and dumps of wikis to one Parquet file, and return the counts.

    `internal`: True to write links within a domain too. Raises ConfigError if a file is of another kind.
    """
    splits = find_files(paths)
    if wrong := [split.name for split in splits if not is_read(split.name)]:
        raise ConfigError(
            "files: expected WAT files (.wat.gz), Reddit submissions (.jsonl, RS_…) or dumps of wikis (.xml.bz2), got "
            f"{', '.join(wrong[:5])}. Name other files."
        )
    total = LinkCounts()
    with tempfile.TemporaryDirectory() as folder:
        work = partial(write_part, folder=folder, internal=internal)
        if processes > 1 and len(splits) > 1:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(processes, len(splits)), context) as pool:
                parts = list(pool.map(work, splits))
        else:
            parts = [work(split) for split in splits]
        for counts in parts:
            total.add(counts)
        _join([f"{folder}/{split.ordinal:08}.parquet" for split in splits], out)
    return total


def write_part(split: Split, folder: str, internal: bool) -> LinkCounts:
    """Write the links in one file to a Parquet file in `folder`, and return the counts."""
    counts = LinkCounts()
    with (
        closing(open_stream(split)) as stream,
        pq.ParquetWriter(f"{folder}/{split.ordinal:08}.parquet", LINKS, compression="zstd") as writer,
    ):
        rows: list[dict[str, Any]] = []
        for row in read_links(split.name, stream, internal, counts):
            rows.append(row)
            if len(rows) == BATCH_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, LINKS))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, LINKS))
    return counts


def _join(parts: Sequence[str], out: str) -> None:
    parent, _, name = out.rpartition("/")
    store = Store(parent or ("/" if out.startswith("/") else "."))
    unfinished = f"{name}.partial"
    with store.open_output(unfinished) as stream, pq.ParquetWriter(stream, LINKS, compression="zstd") as writer:
        for part in parts:
            file = pq.ParquetFile(part)
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group))
            file.close()
            Path(part).unlink()
    store.sync(unfinished)
    store.move(unfinished, name)
