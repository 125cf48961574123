"""Speed of a takedown: over the time to rewrite the touched shards with nothing changed, in one run.

    python -m bench.takedown [--megabytes 200] [--documents 100]

The synthetic dataset has shards of 40 MB, documents of 100 to 1,900 tokens, and the index by URL; the documents are
drawn alike, so every shard is touched. The rewrite uses the same writer, with digests and flushes to the disk, and
deletes as many files of the same sizes, as a takedown deletes the old ones. Each figure is the best of some rounds,
since other load on a machine slows and never quickens.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.takedown.shards import RemovedRows, blank_docs, blank_tokens, exact_copy
from pipeline.tokens.shards import IpcWriter
from schemas.ids import shuffle_key
from schemas.manifest import FileEntry, make_manifest, open_table, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.takedown import REMOVED_ID, descent_of
from schemas.tokens import (
    BATCH_DOCUMENTS,
    BY_URL,
    RESERVED,
    SHARD_DOCS,
    Shard,
    docs_key,
    open_dataset,
    shard_key,
    shard_schema,
)
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import take_down

SHARD_TOKENS, ROUNDS, STREAM = 20_000_000, 3, "web/train"
DOMAINS = 5000
TIMES: dict[str, list[tuple[float, float]]] = {}
"""Seconds of the clock and of the CPU, by what was timed."""


def write_shard(folder: Store, number: int, numbers: np.random.Generator) -> tuple[list[dict[str, Any]], int, pa.Table]:
    """A shard of random documents: entries of its files, its tokens, and its rows of the index by URL."""
    total, index = 0, []
    with (
        IpcWriter(folder, shard_key(STREAM, number), shard_schema("uint16")) as tokens_writer,
        IpcWriter(folder, docs_key(STREAM, number), SHARD_DOCS) as docs_writer,
    ):
        while total < SHARD_TOKENS:
            lengths = numbers.integers(100, 1900, BATCH_DOCUMENTS)
            ends = np.cumsum(lengths)
            flat = numbers.integers(len(RESERVED), 60_000, int(ends[-1])).astype(np.uint16)
            ids = pa.array([numbers.bytes(16) for _ in lengths], pa.binary(16))
            kind = shard_schema("uint16").field("tokens").type
            offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
            tokens_writer.write([ids, pa.ListArray.from_arrays(offsets, pa.array(flat), type=kind)])
            site = numbers.integers(0, DOMAINS, len(lengths)).tolist()
            domains = [f"site{one}.example" for one in site]
            urls = [f"https://www.{one}/path/to/a/page/{total}-{i}.html" for i, one in enumerate(domains)]
            said = {"doc_id": ids, "url": pa.array(urls), "domain": pa.array(domains), "cluster": ids}
            said |= {
                "source": pa.array(["web"] * len(urls)),
                "split": pa.array(["crawl/segment/warc-00042.gz"] * len(urls)),
            }
            said |= {"date": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * len(urls), SHARD_DOCS.field("date").type)}
            said |= {"language": pa.array(["en"] * len(urls)), "token_offset": pa.array(total + ends - lengths)}
            said |= {name: pa.array(lengths) for name in ("offset", "length", "num_tokens", "num_bytes")}
            docs_writer.write([said.get(f.name, pa.nulls(len(urls), f.type)) for f in SHARD_DOCS])
            surts = pa.array([f"example,site{one},www)/path" for one in site])
            columns = [surts, said["url"], said["domain"], ids, pa.array([STREAM] * len(urls))]
            shards = pa.array([number] * len(urls), pa.int32())
            index.append(pa.Table.from_arrays([*columns, shards], schema=BY_URL))
            total += int(ends[-1])
    entries = [tokens_writer.written.to_json(), docs_writer.written.to_json()]
    return entries, total, pa.concat_tables(index)


def write_dataset(folder: Path, megabytes: int) -> Store:
    """A run folder with a tokenizer and a dataset of random tokens."""
    run = make_tiny_dataset(folder, index_bits=None)
    old = open_table(run, "tokens")[1]
    store, numbers = run.child("tokens/v-0000000be9c4"), np.random.default_rng(0)
    made = [write_shard(store, n, numbers) for n in range(max(1, megabytes * 1_000_000 // (2 * SHARD_TOKENS)))]
    rows = pa.concat_tables([table for _, _, table in made]).sort_by([("surt", "ascending"), ("url", "ascending")])
    entries = [entry for files, _, _ in made for entry in files]
    buckets = -(-rows.num_rows // 1_000_000)
    keys = np.array([shuffle_key(0, f"site{n}.example".encode()) % buckets for n in range(DOMAINS)])
    site = np.array([int(one[4:-8]) for one in rows.column("domain").to_pylist()])
    for bucket in range(buckets):
        with IpcWriter(store, f"by_url/{bucket:05d}", BY_URL) as writer:
            for batch in rows.filter(pa.array(keys[site] == bucket)).combine_chunks().to_batches(BATCH_DOCUMENTS):
                writer.write([pa.concat_arrays([column, column.slice(0, 0)]) for column in batch.columns])
        entries.append(writer.written.to_json())
    figures = old.content.figures | {"streams": {STREAM: [tokens for _, tokens, _ in made]}}
    files = [FileEntry(**{name: entry[name] for name in FileEntry.model_fields}) for entry in entries]
    counts = {"rows_in": rows.num_rows, "rows_kept": rows.num_rows, "dropped": {}}
    content = old.content.model_copy(update={"files": files, "figures": figures}).model_dump() | {"counts": counts}
    how = old.run.model_dump() | {"paths": {entry["key"]: entry["path"] for entry in entries}}
    write_manifest(store, make_manifest(content, how, "bench"))
    write_run(
        run, read_run(run).model_copy(update={"tables": {"tokenizer": "v-0000000071a9", "tokens": "v-0000000be9c4"}})
    )
    shutil.rmtree(folder / "tokens/v-0000000071a9")
    return run


def rewrite(run: Store, scratch: Path, threads: int) -> None:
    """Write every shard and its document index once more, as many at once as there are threads."""
    dataset, tombstone = open_dataset(run), 4

    def write(shard: Shard) -> None:
        place = RemovedRows(shard, np.empty(0, np.int64), [], [])
        blank_tokens(dataset.folder, place, Store(str(scratch)), "uint16", tombstone)
        blank_docs(dataset.folder, place, Store(str(scratch)))

    def write_urls(path: str) -> None:
        with (
            IpcWriter(Store(str(scratch)), "by_url/00000", BY_URL) as writer,
            dataset.folder.open_input(path) as file,
        ):
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                writer.write([exact_copy(column) for column in reader.get_batch(number).columns])

    def delete() -> None:
        list(pool.map(Path.unlink, [path for path in scratch.rglob("*") if path.is_file()]))

    with clocked(TIMES.setdefault(f"rewrite of shards, {threads} thread(s)", [])), ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, dataset.streams[STREAM]))
        delete()
    with clocked(TIMES.setdefault(f"and of index, {threads} thread(s)", [])), ThreadPoolExecutor(threads) as pool:
        urls = pool.map(write_urls, dataset.by_url)
        list(pool.map(write, dataset.streams[STREAM]))
        list(urls)
        delete()
    shutil.rmtree(scratch)


@contextlib.contextmanager
def clocked(times: list[tuple[float, float]]) -> Iterator[None]:
    """Appends the seconds of the clock and of the CPU that the body took; what it prints is dropped."""
    began = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    times.append((time.perf_counter() - began[0], time.process_time() - began[1]))


def ids_of(run: Store) -> list[bytes]:
    """Every document that exists."""
    dataset, found = open_dataset(run), set[bytes]()
    for shard in dataset.streams[STREAM]:
        with dataset.folder.open_input(shard.docs_path) as file:
            found.update(pa.ipc.open_file(file).read_all().column("doc_id").to_pylist())
    return sorted(found - {REMOVED_ID})


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, help="size of the tokens")
    parser.add_argument("--documents", type=int, default=100, help="documents to take down")
    arguments = parser.parse_args()
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        run = write_dataset(Path(folder) / "run", arguments.megabytes)
        entries = open_dataset(run).manifest.content.files
        size = sum(entry.bytes for entry in entries) / 1e6
        print(f"{size:,.0f} MB in {len(entries)} files, {arguments.documents} documents to be taken down")
        for number in range(ROUNDS):
            for count in sorted({1, threads}):
                rewrite(run, Path(folder) / "scratch", count)
            chosen = random.Random(number).sample(ids_of(run), arguments.documents)
            with clocked(TIMES.setdefault("takedown", [])):
                take_down(run.uri, doc=[one.hex() for one in chosen])
            standing = descent_of(open_dataset(run).manifest)
            with clocked(TIMES.setdefault("check of the certificate", [])):
                code = take_down(run.uri, check=f"takedowns/{standing.id if standing else ''}.json")
            if code:
                raise SystemExit("the certificate is not valid")
    best = {name: (min(wall for wall, _ in found), min(cpu for _, cpu in found)) for name, found in TIMES.items()}
    for name, (wall, cpu) in best.items():
        shown = " ".join(f"{one:.2f}" for one, _ in TIMES[name])
        print(f"{name:<32} {wall:6.2f} s ({shown}), CPU {cpu:.2f} s, {size / wall:,.0f} MB/s")
    for count in sorted({1, threads}):
        for name in ("rewrite of shards", "and of index"):
            pair = [best["takedown"][i] / best[f"{name}, {count} thread(s)"][i] for i in (0, 1)]
            print(f"takedown / {name}, {count} thread(s): {pair[0]:.2f}, CPU {pair[1]:.2f}")


if __name__ == "__main__":
    main()
