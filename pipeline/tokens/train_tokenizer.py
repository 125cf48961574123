"""The table `tokenizer`: a model trained on a deterministic sample of clean text, or a given one, with its contract.

The sample is every document whose hash falls below sample_bytes / total bytes, in hash order: it does not depend on how
the text is partitioned, and only it reaches the driver.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.parquet import HashingSink, WrittenFile, unique_name
from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import Relation
from pipeline.engine.step import StepContext, TableResult
from pipeline.tokens.tokenizer import Kind, TokenizerConfig, load_tokenizer, tokenizer_kind, train_tokenizer
from schemas.errors import ContractError
from schemas.ids import is_in_share, shuffle_key
from schemas.manifest import Counts
from schemas.storage import Store


def given_model(config: TokenizerConfig) -> dict[str, str]:
    """The model file of the recipe, if it names one."""
    return {"tokenizer": config.model} if config.model is not None else {}


TOKENIZER = Relation(name="tokenizer", version=1, config=TokenizerConfig, models=given_model)
SAMPLE_SEED = 7
SAMPLE = pa.schema([pa.field("key", pa.int64()), pa.field("doc_id", pa.binary(16)), pa.field("text", pa.string())])


@dataclass(frozen=True)
class TokenizerSampleTask:
    """One clean part to sample from."""

    clean: Store
    path: str
    share: float
    folder: Store
    stem: str


def build_tokenizer(build: StepContext) -> dict[str, TableResult]:
    """The tokenizer model file and its contract."""
    config = build.recipe.section("tokenizer", TokenizerConfig)
    folder, started = build.folders["tokenizer"], time.process_time()
    built = TableResult()
    if config.model is None:
        data = train_tokenizer(sample_texts(build, config, folder, built), config)
        kind: Kind = "sentencepiece"
    else:
        model = build.models["tokenizer"]["tokenizer"]
        with open(model.path, "rb") as stream:
            data = stream.read()
        kind = tokenizer_kind(model.path)
    tokenizer = load_tokenizer(data, kind, config)
    built.add_file(write_model(folder, data))
    built.figures = {**built.figures, "contract": tokenizer.contract.model_dump(mode="json")}
    built.cpu_seconds = time.process_time() - started
    return {"tokenizer": built}


def write_model(folder: Store, data: bytes) -> WrittenFile:
    """Write the model file durably; returns its manifest entry."""
    path = unique_name("tokenizer", "model")
    sink = HashingSink(folder.open_output(path))
    sink.write(data)
    sink.close()
    folder.sync(path)
    return WrittenFile("model", path, 1, len(data), sink.sha256)


def sample_texts(build: StepContext, config: TokenizerConfig, folder: Store, built: TableResult) -> Iterator[str]:
    """The sample's texts in hash order; its files are removed, its size is kept as a figure."""
    clean = build.inputs["clean"]
    total = sum(clean.manifest.content.figures.get("kept_bytes", {}).values())
    if not total:
        raise ContractError(
            f"tokenizer: expected clean text, got none: all {clean.manifest.content.counts.rows_in} documents were "
            "dropped. Look at the drops by rule with `penstock report`."
        )
    share = min(1.0, config.sample_bytes / total)
    paths = clean.manifest.paths_of()
    tasks = [
        TokenizerSampleTask(clean.folder, path, share, folder, f"sample-{ordinal:05d}")
        for ordinal, path in enumerate(paths)
    ]
    answers = run_tasks(build.spark, sample_part, tasks, "tokenizer", build.partitions)
    rows: list[tuple[int, bytes, str]] = []
    for answer in answers:
        with folder.open_input(answer["path"]) as stream:
            table = pq.read_table(stream)
        rows.extend(zip(*(table.column(name).to_pylist() for name in SAMPLE.names)))
        folder.delete(answer["path"])
    rows.sort(key=lambda row: row[:2])
    built.counts = Counts(rows_in=len(rows), rows_kept=len(rows))
    built.figures = {"sample_documents": len(rows), "sample_bytes": sum(len(row[2].encode()) for row in rows)}
    for row in rows:
        yield row[2]


def sample_part(task: TokenizerSampleTask, retried: bool) -> dict[str, Any]:
    """Write the sampled documents of one clean part to a file of their own."""
    rows: dict[str, list[Any]] = {name: [] for name in SAMPLE.names}
    with task.clean.open_input(task.path) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=1024, columns=["doc_id", "text", "drop_stage"]):
            for row in batch.to_pylist():
                key = shuffle_key(SAMPLE_SEED, row["doc_id"])
                if row["drop_stage"] is None and is_in_share(key, task.share):
                    for name, value in zip(SAMPLE.names, (key, row["doc_id"], row["text"])):
                        rows[name].append(value)
    path = unique_name(os.path.basename(task.stem), "parquet")
    with task.folder.open_output(path) as stream:
        pq.write_table(pa.Table.from_pydict(rows, schema=SAMPLE), stream)
    return {"path": path, "rows": len(rows["key"])}
