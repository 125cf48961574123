"""A real run folder with a tiny token dataset of learnable text, written without Spark; shared by the tests of train/.

Each source is a Markov chain over invented words in which every word has four likely successors (1.11 nats per word),
so a model that learns anything falls well below the loss of the uniform guess.
"""

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.membership.index import TOP, IndexBits, membership_figures, write_index_file
from pipeline.membership.tree import Subtree, prefix_of, value_of
from schemas.blocks import BlockSums, parse_blocks
from schemas.ids import doc_id, shuffle_key
from schemas.manifest import RunFile, make_manifest, write_manifest, write_run
from schemas.storage import Store
from schemas.tokens import (
    BATCH_DOCUMENTS,
    BY_ID,
    BY_URL,
    HELDOUT,
    RESERVED,
    SHARD_DOCS,
    TRAIN,
    TokenizerContract,
    by_id_key,
    docs_key,
    open_dataset,
    shard_key,
    shard_schema,
)
from schemas.urls import surt
from train.data.verify import VERIFIED_NAME

NUM_BUCKETS = 4
TOKENS = ".tokens"
"""End of the key of a token file."""
TINY_INDEX = IndexBits(file=1, batch=3)
"""The index by id of a tiny dataset has two files of four record batches each."""
SUCCESSORS = (0.55, 0.25, 0.15, 0.05)


def tiny_documents(
    source: str, number: int, contract: TokenizerContract, seed: int, suffix: str
) -> Iterator[dict[str, Any]]:
    """Yield documents of 20 to 300 words; two documents share every tenth URL of a source."""
    first, count = len(RESERVED), contract.vocab_size - len(RESERVED)
    chain = random.Random(f"{source} {seed}")
    successors = [chain.choices(range(first, first + count), k=len(SUCCESSORS)) for _ in range(count)]
    for i in range(number):
        chain = random.Random(f"{source} {seed} {i}")
        word, words = chain.randrange(first, first + count), []
        for _ in range(chain.randint(20, 300)):
            words.append(word)
            word = chain.choices(successors[word - first], SUCCESSORS)[0]
        tokens = [contract.reserved["bos"], *words, contract.reserved["eos"]]
        identifier = doc_id(source, f"{source}{suffix}.warc.gz", 1000 * i)
        page = i - 1 if i % 10 == 1 else i
        domain = f"site{page % 7}.co.uk"
        yield {
            "doc_id": identifier,
            "source": source,
            "split": f"{source}{suffix}.warc.gz",
            "offset": 1000 * i,
            "length": 900,
            "url": f"http://www.{domain}/{source}/{page}?q=1",
            "domain": domain,
            "date": datetime(2026, 1, 1, tzinfo=UTC),
            "snapshot": None,
            "language": "en",
            "cluster": identifier,
            "num_tokens": len(tokens),
            "num_bytes": 5 * len(words),
            "tokens": tokens,
        }


def make_tiny_dataset(
    folder: Path,
    sources: dict[str, int] | None = None,
    vocab_size: int = 512,
    chunk_tokens: int = 256,
    shard_tokens: int = 2048,
    seed: int = 0,
    suffix: str = "",
    documents: Callable[[str, int, TokenizerContract, int, str], Iterator[dict[str, Any]]] = tiny_documents,
    index_bits: IndexBits | None = TINY_INDEX,
) -> Store:
    """Return a run folder with the tables `tokenizer` and `tokens`.

    `sources`: number of documents by source; `suffix`: end of the names of the input files; `documents`: yields the
    rows of a source, as `tiny_documents` does; `index_bits`: of the index by id, None = without it.
    """
    sources = {"web": 60, "books": 20} if sources is None else sources
    run = Store(str(folder))
    contract = _write_tokenizer(run, vocab_size)
    files = _Files(run.child("tokens/v-0000000071a9"))
    streams: dict[str, list[int]] = {}
    index: list[dict[str, Any]] = []
    for source, num_documents in sources.items():
        rows_of_source = documents(source, num_documents, contract, seed, suffix)
        shuffled = sorted(rows_of_source, key=lambda row: shuffle_key(seed, row["doc_id"]))
        num_heldout = max(1, num_documents // 10)
        for split, rows in ((HELDOUT, shuffled[:num_heldout]), (TRAIN, shuffled[num_heldout:])):
            stream = f"{source}/{split}"
            streams[stream] = [
                _write_shard(files, stream, number, shard, contract)
                for number, shard in enumerate(_cut(rows, shard_tokens))
            ]
            for number, shard in enumerate(_cut(rows, shard_tokens)):
                index.extend({"surt": surt(row["url"]), "stream": stream, "shard": number} | row for row in shard)
    _write_by_url(files, index)
    total = sum(sources.values())
    figures = {"tokenizer": contract.model_dump(mode="json"), "streams": streams, "chunk_tokens": chunk_tokens}
    figures |= _write_by_id(files, index, contract.dtype, index_bits) if index_bits else {}
    config = {"tokens": {"seed": seed}} if seed else {}
    _commit(files, "tokens", {"rows_in": total, "rows_kept": total}, figures, config)
    write_run(run, RunFile(tables={"tokenizer": "v-0000000071a9", "tokens": "v-0000000071a9"}))
    return run


class _Files:
    """The files of a table, in the order in which they were written."""

    def __init__(self, folder: Store):
        self.folder = folder
        self.entries: list[dict[str, Any]] = []
        self.paths: dict[str, str] = {}
        self.blocks: dict[str, str] = {}

    def add(self, key: str, path: str, rows: int) -> None:
        sha256 = self.folder.sha256(path)
        self.entries.append({"key": key, "rows": rows, "bytes": self.folder.size(path), "sha256": sha256})
        self.paths[key] = path

    def write_arrow(self, key: str, path: str, schema: pa.Schema, rows: list[dict[str, Any]]) -> None:
        self.folder.make_parent(path)
        named = [{name: row[name] for name in schema.names} for row in rows]
        batches = [named[start : start + BATCH_DOCUMENTS] for start in range(0, len(rows), BATCH_DOCUMENTS)]
        blocks = write_blocks(self.folder.path(path), schema, batches)
        self.add(key, path, len(rows))
        if key.endswith(TOKENS):
            self.blocks[key] = blocks


def write_blocks(path: str, schema: pa.Schema, batches: list[list[dict[str, Any]]]) -> str:
    """Write an Arrow IPC file of these record batches, and return its blocks."""
    ends, sums = [0], BlockSums()
    with pa.OSFile(path, "wb") as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            for rows in batches:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                ends.append(sink.tell())
        ends.append(sink.tell())
    data = memoryview(Path(path).read_bytes())
    for begin, end in itertools.pairwise(ends):
        sums.add(data[begin:end])
        sums.end_block()
    return sums.text


def _commit(
    files: _Files, table: str, counts: dict[str, Any], figures: dict[str, Any], config: dict[str, Any] | None = None
) -> None:
    content = {
        "table": table,
        "stages": {table: 1},
        "config": config or {},
        "inputs": [],
        "files": files.entries,
        "counts": counts,
        "figures": figures,
    }
    run = {
        "paths": files.paths,
        "blocks": files.blocks,
        "started": "2026-01-01T00:00:00Z",
        "wall_seconds": 0.0,
        "cpu_seconds": 0.0,
        "code_version": "test",
    }
    write_manifest(files.folder, make_manifest(content, run, table))


def _write_tokenizer(run: Store, vocab_size: int) -> TokenizerContract:
    """Write a word-level tokenizer.json whose ids are the reserved tokens followed by invented words."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    numbers = range(vocab_size - len(RESERVED))
    words = [syllables[i % 70] + syllables[i // 70 % 70] + (syllables[i // 4900] if i >= 4900 else "") for i in numbers]
    vocabulary = {f"<{name}>": i for i, name in enumerate(RESERVED)}
    vocabulary |= {word: len(RESERVED) + i for i, word in enumerate(words)}
    model = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<mask>"},
    }
    files = _Files(run.child("tokenizer/v-0000000071a9"))
    files.folder.write_atomic("tokenizer.json", json.dumps(model).encode())
    files.add("model", "tokenizer.json", 1)
    contract = TokenizerContract(
        kind="huggingface",
        sha256=files.entries[0]["sha256"],
        vocab_size=vocab_size,
        reserved={name: i for i, name in enumerate(RESERVED)},
        before=["bos"],
        after=["eos"],
    )
    _commit(files, "tokenizer", {"rows_in": 1, "rows_kept": 1}, {"contract": contract.model_dump(mode="json")})
    return contract


def _cut(rows: list[dict[str, Any]], shard_tokens: int) -> list[list[dict[str, Any]]]:
    """Return shards of rows with at least `shard_tokens` tokens each (the last may have fewer) and token offsets."""
    shards: list[list[dict[str, Any]]] = [[]]
    offset = 0
    for row in rows:
        if offset >= shard_tokens:
            shards.append([])
            offset = 0
        shards[-1].append(row | {"token_offset": offset})
        offset += row["num_tokens"]
    return shards


def _write_shard(
    files: _Files, stream: str, number: int, rows: list[dict[str, Any]], contract: TokenizerContract
) -> int:
    path = f"{stream}/shard-{number:05d}"
    files.write_arrow(shard_key(stream, number), f"{path}.arrow", shard_schema(contract.dtype), rows)
    files.write_arrow(docs_key(stream, number), f"{path}.docs.arrow", SHARD_DOCS, rows)
    return sum(row["num_tokens"] for row in rows)


def _write_by_url(files: _Files, rows: list[dict[str, Any]]) -> None:
    buckets: list[list[dict[str, Any]]] = [[] for _ in range(NUM_BUCKETS)]
    for row in sorted(rows, key=lambda row: (row["surt"], row["url"], row["doc_id"])):
        buckets[shuffle_key(0, row["domain"].encode()) % NUM_BUCKETS].append(row)
    for number, bucket in enumerate(buckets):
        files.write_arrow(f"by_url/{number:05d}", f"by_url/{number:05d}.arrow", BY_URL, bucket)


def _write_by_id(files: _Files, rows: list[dict[str, Any]], dtype: str, bits: IndexBits) -> dict[str, Any]:
    """Write the index by id, and return the figures of the Merkle tree."""
    columns: list[list[tuple[bytes, bytes]]] = [[] for _ in range(1 << bits.file)]
    for row in rows:
        value = value_of(row["stream"], np.array(row["tokens"], dtype).tobytes())
        columns[prefix_of(row["doc_id"], bits.file)].append((row["doc_id"], value))
    tops = []
    for number, own in enumerate(columns):
        batch = pa.RecordBatch.from_pylist([{"doc_id": key, "value": value} for key, value in sorted(own)], BY_ID)
        part = write_index_file(files.folder, number, iter([batch]), bits)
        tops.append(Subtree.from_json(part.figures[TOP]))
        files.add(by_id_key(number), part.files["by_id"].path, len(own))
    return membership_figures(tops)


def replace_token(run: Store, stream: str) -> str:
    """Replace a token in the first shard of a stream, and fit its checksums to it, which no digest covers.

    Return the SHA-256 that the manifest still names.
    """
    shard = open_dataset(run).streams[stream][0]
    path = Path(run.path(f"tokens/v-0000000071a9/{shard.path}"))
    data, before = path.read_bytes(), pa.ipc.open_file(path).get_batch(0).column("tokens").values.to_numpy()
    after = before.copy()
    after[2] = before[1]
    assert before[1] != before[2]
    path.write_bytes(data.replace(before.tobytes(), after.tobytes(), 1))
    fitted, at = BlockSums(), 0
    for size, _ in parse_blocks(shard.blocks, ""):
        fitted.add(memoryview(path.read_bytes())[at : at + size])
        fitted.end_block()
        at += size
    manifest = run.read_json("tokens/v-0000000071a9/manifest.json")
    manifest["run"]["blocks"][shard_key(stream, 0)] = fitted.text
    run.write_atomic("tokens/v-0000000071a9/manifest.json", json.dumps(manifest).encode())
    return shard.sha256


def settle(run: Store) -> None:
    """Set every file's modification time to an hour ago, as if the dataset had been written then."""
    for name in run.walk():
        if name != VERIFIED_NAME:
            when = os.stat(run.path(name)).st_mtime - 3600
            os.utime(run.path(name), (when, when))


def flip_byte(path: str | Path, position: int = -100) -> None:
    """Change a byte of a file, as a bad disk would."""
    data = bytearray(Path(path).read_bytes())
    data[position] ^= 1
    Path(path).write_bytes(bytes(data))
