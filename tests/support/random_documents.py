"""A dataset of random tokens in documents with lengths like the web's, and its batches by the trainer's own reader."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.train_contenders import Case
from schemas.storage import Store
from schemas.tokens import BATCH_DOCUMENTS, RESERVED, Dataset, Shard, shard_schema
from tests.support.checked_paths import checked
from tests.support.tiny_stages import bare_dataset

MEDIAN_TOKENS, SPREAD = 570, 1.0
"""Median length of a document of FineWeb [tokens], and the deviation of its logarithm."""


def write_documents(folder: Path, case: Case, steps: int) -> Dataset:
    """Write two sources of random tokens, enough for `steps` optimizer steps, in documents of log-normal length."""
    random, schema = np.random.default_rng(0), shard_schema("uint16")
    median = min(MEDIAN_TOKENS, case.seq_len * MEDIAN_TOKENS // 1024)
    streams: dict[str, list[Shard]] = {}
    for source in ("books", "web"):
        path, docs, all_lengths = f"{source}.arrow", f"{source}.docs.arrow", list[np.ndarray]()
        with pa.ipc.new_file(str(folder / path), schema) as writer:
            while sum(int(lengths.sum()) for lengths in all_lengths) < steps * case.tokens // 2:
                lengths = random.lognormal(np.log(median), SPREAD, BATCH_DOCUMENTS).clip(8, 1 << 16).astype(np.int64)
                offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                flat = random.integers(len(RESERVED), case.shape.vocab_size, offsets[-1]).astype(np.uint16)
                ids = pa.array([bytes(16)] * len(lengths), pa.binary(16))
                lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=schema.field("tokens").type)
                writer.write_batch(pa.RecordBatch.from_arrays([ids, lists], schema=schema))
                all_lengths.append(lengths)
        lengths = np.concatenate(all_lengths)
        index = pa.table({"token_offset": np.cumsum(lengths) - lengths, "num_tokens": lengths})
        with pa.ipc.new_file(str(folder / docs), index.schema) as writer:
            writer.write_table(index)
        paths = [checked(Store(str(folder)), name) for name in (path, docs)]
        streams[f"{source}/train"] = [Shard(f"{source}/train", 0, *paths, int(lengths.sum()), 0, "", "")]
    return bare_dataset(Store(str(folder)), streams, 4 * case.seq_len, case.shape.vocab_size)
