"""Speed of the reader: tokens for each second of CPU into tensors, for every objective, packing and length of rows.

`python -m bench.data` writes a dataset of 64 M tokens into a temporary folder; the page cache is warm. Each
figure is the best of some rounds, since other load on a machine slows and never quickens.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from schemas.storage import Store
from schemas.tokens import BATCH_DOCUMENTS, RESERVED, Dataset, Shard, shard_schema
from tests.support.checked_paths import checked
from tests.support.tiny_stages import bare_dataset, batches_of
from train.config.train import TrainConfig
from train.data.batches import Batches
from train.data.packing import write_packing

SHARD_TOKENS, NUM_SHARDS, CHUNK_TOKENS, VOCAB_SIZE = 1 << 23, 4, 1 << 16, 50_000
ROUNDS, SECONDS = 4, 0.5
SIZES = (1 << 19, 1 << 15)
"""Tokens of a global batch, or of a rank's part of one."""


def write_dataset(folder: Path) -> Dataset:
    """Two sources of random tokens in documents of 50 to 1,500 tokens, in record batches as the pipeline cuts them."""
    random, schema = np.random.default_rng(0), shard_schema("uint16")
    streams: dict[str, list[Shard]] = {}
    for source in ("books", "web"):
        streams[f"{source}/train"] = []
        for number in range(NUM_SHARDS):
            path, docs, total = f"{source}-{number}.arrow", f"{source}-{number}.docs.arrow", 0
            in_documents: list[np.ndarray] = []
            with pa.ipc.new_file(str(folder / path), schema) as writer:
                while total < SHARD_TOKENS:
                    lengths = random.integers(50, 1500, BATCH_DOCUMENTS)
                    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                    flat = random.integers(len(RESERVED), VOCAB_SIZE, offsets[-1]).astype(np.uint16)
                    tokens = pa.ListArray.from_arrays(
                        pa.array(offsets), pa.array(flat), type=schema.field("tokens").type
                    )
                    ids = pa.array([bytes(16)] * len(lengths), pa.binary(16))
                    writer.write_batch(pa.RecordBatch.from_arrays([ids, tokens], schema=schema))
                    total += int(offsets[-1])
                    in_documents.append(lengths)
            lengths = np.concatenate(in_documents)
            index = pa.table({"token_offset": np.cumsum(lengths) - lengths, "num_tokens": lengths})
            with pa.ipc.new_file(str(folder / docs), index.schema) as writer:
                writer.write_table(index)
            paths = [checked(Store(str(folder)), name) for name in (path, docs)]
            streams[f"{source}/train"].append(Shard(f"{source}/train", number, *paths, total, 0, "", ""))
    return bare_dataset(Store(str(folder)), streams, CHUNK_TOKENS, VOCAB_SIZE)


def tell_packing(dataset: Dataset, config: TrainConfig) -> None:
    """Write an index of packed rows, and print what it took and gave."""
    begin = time.process_time()
    if packing := write_packing(dataset.folder, dataset, config):
        took, rows = time.process_time() - begin, sum(source.num_rows for source in packing.sources)
        empty = 1 - sum(source.num_tokens for source in packing.sources) / (rows * config.seq_len)
        cut, before = (sum(getattr(s, name) for s in packing.sources) for name in ("cut", "cut_in_stream"))
        print(f"  index of {rows} rows: {took:.2f} s, {empty:.2%} padding, {cut} documents cut, {before} in the stream")


def tokens_per_second(batches: Batches, tokens: int) -> float:
    """Tokens of whole global batches for each second of CPU, after one pass over the data."""
    steps, best = max(1, (1 << 26) // tokens), 0.0
    for step in range(steps):
        batches.batch(step)
    for _ in range(ROUNDS):
        begin, step = time.process_time(), 0
        while time.process_time() - begin < SECONDS:
            batches.batch(step % steps)
            step += 1
        best = max(best, step * tokens / (time.process_time() - begin))
    return best


def cases(seq_len: int) -> list[dict[str, Any]]:
    """Every objective, packing and kind of attention that a run may have; spans so long that sentinels suffice."""
    plain: list[dict[str, Any]] = [
        {"objective": objective, "packing": packing, "document_mask": document_mask}
        for objective in ("causal", "mlm")
        for packing in ("stream", "best_fit")
        for document_mask in (True, False)
    ]
    span = {"objective": "span", "packing": "stream", "document_mask": False, "mean_span": max(3.0, seq_len / 512)}
    return [*plain, span]


def main() -> None:
    """Print a line for each case."""
    torch.set_num_threads(1)
    print("M tokens a CPU second, in batches of " + " and ".join(f"{tokens >> 10}k tokens" for tokens in SIZES))
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder))
        for seq_len in (512, 2048, 4096):
            tell_packing(dataset, TrainConfig(seq_len=seq_len, packing="best_fit"))
            for case in cases(seq_len):
                config = TrainConfig.model_validate({"seq_len": seq_len} | case)
                sizes = [batches_of(dataset, config, tokens // seq_len, run=dataset.folder) for tokens in SIZES]
                speeds = [tokens_per_second(batches, tokens) for batches, tokens in zip(sizes, SIZES, strict=True)]
                documents = "documents" if config.document_mask else "-"
                shown = f"{config.objective:6s} {config.packing:8s} {documents:9s} seq_len {seq_len:5d}"
                print(shown, *(f"{speed / 1e6:7.1f}" for speed in speeds), flush=True)


if __name__ == "__main__":
    main()
