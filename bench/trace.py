"""Figures of trace and verification: one step, one URL, one document of a synthetic index, and SHA-256 of files.

`python -m bench.trace [DOCUMENTS] [FOLDER]` builds an index of so many documents (10,000,000; 4 GB) and a plan,
unless FOLDER holds them, and looks things up in it as `penstock trace` does: run opened anew, answer as text. Times
are medians, with the interpreter started and everything imported; CPU time beside the clock's, on a shared machine.
"""

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ids import shuffle_key
from schemas.manifest import RunFile, make_manifest, write_manifest, write_run
from schemas.storage import Store
from schemas.tokens import BATCH_DOCUMENTS, BY_URL, RESERVED, SHARD_DOCS, docs_key, open_dataset, shard_key
from train.config.settings import load_settings
from train.data.verify import file_digest
from train.plan.make_plan import make_plan
from train.plan.plan import write_plan
from train.trace.answer import AnswerOptions, RowSelection, TraceAnswers, present_documents, present_step

DOCUMENTS = 10_000_000
SHARD_DOCUMENTS = 100_000
DOMAIN_DOCUMENTS = 50
DOMAINS_PER_BUCKET = 1_000_000
MEAN_TOKENS = 1000
REPEATS = 9
TARGET_SECONDS = 0.05
STREAM = "web/train"
RECIPE: dict[str, Any] = {"train": {"seq_len": 2048, "global_batch": 256}}
CONTRACT: dict[str, Any] = {
    "kind": "huggingface",
    "sha256": "0" * 64,
    "vocab_size": 32000,
    "reserved": {name: number for number, name in enumerate(RESERVED)},
    "before": [],
    "after": ["eos"],
}


# ------------------------------------------------------------------------------------------------------- the index


def build(run: Store, num_documents: int) -> None:
    """Write the indexes of a dataset of so many documents, without its tokens, and a plan."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (num_documents, 16), np.uint8)
    raw = ids.tobytes()
    key = np.fromiter((shuffle_key(0, raw[at : at + 16]) for at in range(0, len(raw), 16)), np.int64, num_documents)
    order = np.argsort(key)
    tokens = rng.integers(MEAN_TOKENS // 5, MEAN_TOKENS * 9 // 5, num_documents)
    folder = run.child("tokens/v-0000000be9c4")
    entries, paths = [], {}
    shards = [order[first : first + SHARD_DOCUMENTS] for first in range(0, num_documents, SHARD_DOCUMENTS)]
    counts = [int(tokens[chosen].sum()) for chosen in shards]
    for number, chosen in enumerate(shards):
        for name, rows in ((shard_key(STREAM, number), len(chosen)), (docs_key(STREAM, number), len(chosen))):
            entries.append({"key": name, "rows": rows, "bytes": 0, "sha256": "0" * 64})
            paths[name] = f"{name}.arrow"
        write(folder, paths[docs_key(STREAM, number)], SHARD_DOCS, shard_columns(chosen, ids, tokens))
    shard_of = np.empty(num_documents, np.int32)
    shard_of[order] = np.arange(num_documents) // SHARD_DOCUMENTS
    buckets = -(-num_documents // DOMAINS_PER_BUCKET)
    domains = -(-num_documents // DOMAIN_DOCUMENTS)
    bucket_of = np.array([shuffle_key(0, domain_name(number).encode()) % buckets for number in range(domains)])
    for number in range(buckets):
        chosen = np.flatnonzero(bucket_of[np.arange(num_documents) // DOMAIN_DOCUMENTS] == number)
        name = f"by_url/{number:05d}"
        entries.append({"key": name, "rows": len(chosen), "bytes": 0, "sha256": "0" * 64})
        paths[name] = f"{name}.arrow"
        write(folder, paths[name], BY_URL, url_columns(chosen, ids, shard_of))
    figures = {"tokenizer": CONTRACT, "streams": {STREAM: counts}, "chunk_tokens": 8192}
    commit(folder, "tokens", entries, paths, figures)
    entry = {"key": "model", "rows": 1, "bytes": 0, "sha256": "0" * 64}
    commit(run.child("tokenizer/v-0000000be9c4"), "tokenizer", [entry], {"model": "none"}, {"contract": CONTRACT})
    write_run(run, RunFile(tables={"tokenizer": "v-0000000be9c4", "tokens": "v-0000000be9c4"}, recipe=RECIPE))
    dataset = open_dataset(run)
    write_plan(run, make_plan(run, dataset, load_settings(RECIPE, [], "bench")))


def domain_name(number: int) -> str:
    """The registrable domain of a number."""
    return f"site{number:07d}.example"


def digits(numbers: np.ndarray[Any, Any], width: int) -> pa.Array:
    """Numbers as text of one width."""
    return pc.utf8_lpad(pa.array(numbers).cast(pa.string()), width, "0")


def joined(*parts: Any) -> pa.Array:
    """Columns and constants put together as text."""
    return pc.binary_join_element_wise(*parts, "")


def urls(chosen: np.ndarray[Any, Any]) -> dict[str, pa.Array]:
    """URL, domain and SURT of documents: fifty neighbours are of one site."""
    site, page = digits(chosen // DOMAIN_DOCUMENTS, 7), digits(chosen, 9)
    return {
        "url": joined("https://www.site", site, ".example/library/reading/", page, ".html"),
        "domain": joined("site", site, ".example"),
        "surt": joined("example,site", site, ",www)/library/reading/", page, ".html"),
    }


def shard_columns(chosen: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], tokens: Any) -> dict[str, pa.Array]:
    """The document index of a shard."""
    length, number = tokens[chosen], len(chosen)
    named = urls(chosen)
    return {
        "doc_id": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), number, [None, pa.py_buffer(ids[chosen])]),
        "source": pa.array(["web"] * number),
        "split": joined("CC-MAIN-20240222-", digits(chosen % 90_000, 6), "-00321.warc.gz"),
        "offset": pa.array(chosen % 900_000_000),
        "length": pa.array(20_000 + chosen % 9_000),
        "url": named["url"],
        "domain": named["domain"],
        "date": pa.array(np.full(number, 1_700_000_000_000)).cast(pa.timestamp("ms", "UTC")),
        "snapshot": pa.array(["CC-MAIN-2024-10"] * number),
        "language": pa.array(["en"] * number),
        "cluster": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), number, [None, pa.py_buffer(ids[chosen])]),
        "token_offset": pa.array(np.cumsum(length) - length),
        "num_tokens": pa.array(length),
        "num_bytes": pa.array(length * 4),
    }


def url_columns(chosen: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], shard_of: Any) -> dict[str, pa.Array]:
    """A bucket of the index by URL."""
    number = len(chosen)
    found = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), number, [None, pa.py_buffer(ids[chosen])])
    return {**urls(chosen), "doc_id": found, "stream": pa.array([STREAM] * number), "shard": pa.array(shard_of[chosen])}


def write(folder: Store, path: str, schema: pa.Schema, columns: dict[str, pa.Array]) -> None:
    """An index file in record batches of the size of the pipeline's."""
    table = pa.Table.from_arrays([columns[name].cast(schema.field(name).type) for name in schema.names], schema=schema)
    with folder.open_output(path) as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table, max_chunksize=BATCH_DOCUMENTS)


def commit(folder: Store, table: str, entries: list[dict[str, Any]], paths: dict[str, str], figures: Any) -> None:
    """The manifest of a table."""
    rows = sum(entry["rows"] for entry in entries if entry["key"].endswith(".docs"))
    content = {"table": table, "stages": {}, "inputs": [], "files": entries, "figures": figures}
    content |= {"config": {"tokens": {"seed": 0}}, "counts": {"rows_in": rows, "rows_kept": rows}}
    run = {"paths": paths, "started": "", "wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": "bench"}
    write_manifest(folder, make_manifest(content, run, table))


# ------------------------------------------------------------------------------------------------------- the figures


def timed(name: str, make: Callable[[int], Any]) -> Iterator[str]:
    """The median time of something that is made from a number, each time another."""
    wall, cpu = [], []
    for number in range(REPEATS):
        started, used = time.perf_counter(), time.process_time()
        make(number)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    verdict = "" if name.startswith("  ") else f"  target {1e3 * TARGET_SECONDS:.0f} ms"
    yield f"{name:<44}{1e3 * median(wall):8.1f} ms   CPU {1e3 * median(cpu):8.1f} ms{verdict}"


def look_ups(run: Store) -> Iterator[str]:
    """One step, one rank's micro-batch, one URL, one document, one domain; each opens the run anew."""
    brief = AnswerOptions(details=False)
    answers = TraceAnswers(run, brief)
    steps, number = answers.trace.num_steps, answers.trace.documents.num_documents
    some = [part for step in range(1, steps, steps // 20) for part in answers.trace.documents_of_step(step)[:1]]
    parts = len(answers.trace.documents_of_step(steps // 2))
    yield f"{number:,} documents, {steps:,} steps of 256 x 2048 tokens; a step holds {parts} parts of documents"

    def step(which: int, place: RowSelection) -> None:
        present_step(TraceAnswers(run, brief).step(1 + which * (steps // REPEATS), place))

    yield from timed("  run, plan and order opened", lambda _: TraceAnswers(run, brief))
    yield from timed("one step, all rows", lambda which: step(which, RowSelection()))
    yield from timed("one step, a micro-batch of rank 5 of 64", lambda which: step(which, RowSelection(5, 0, 64)))
    yield from timed("one URL", lambda which: present_documents(TraceAnswers(run, brief).url(some[which].url), ""))
    yield from timed(
        "one document", lambda which: present_documents(TraceAnswers(run, brief).document(some[which].doc_id), "")
    )
    unknown = "https://www.site0000001.example/none"
    yield from timed("a URL that is not there", lambda _: present_documents(TraceAnswers(run, brief).url(unknown), ""))
    hosts = [part.url.split("/")[2].removeprefix("www.") for part in some]
    yield from timed(
        f"  one domain of {DOMAIN_DOCUMENTS} documents",
        lambda which: present_documents(TraceAnswers(run, brief).domain(hosts[which], 20), ""),
    )


def hashing(folder: Path) -> Iterator[str]:
    """SHA-256 of a file of 512 MB against bytes that lie in memory, in bytes per second of CPU time of one core."""
    data = np.random.default_rng(0).bytes(1 << 26)
    (folder / "bytes.bin").write_bytes(data * 8)
    used = time.process_time()
    hashlib.sha256(data).hexdigest()
    memory = len(data) / (time.process_time() - used)
    used = time.process_time()
    file_digest(Store(str(folder)), "bytes.bin")
    file = 8 * len(data) / (time.process_time() - used)
    (folder / "bytes.bin").unlink()
    yield f"verification: {file / 1e9:.2f} GB/s a core, bytes in memory {memory / 1e9:.2f} GB/s; target 1 GB/s"


def main(arguments: list[str]) -> None:
    """Build what is not there, and print the figures."""
    num_documents = int(arguments[0]) if arguments else DOCUMENTS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments[1]) if len(arguments) > 1 else Path(scratch)
        run = Store(str(folder))
        if not run.exists("train/plan.json"):
            started = time.perf_counter()
            build(run, num_documents)
            print(f"index built in {time.perf_counter() - started:.0f} s", flush=True)
        for line in (*look_ups(run), *hashing(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
