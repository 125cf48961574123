"""The table `tokens`: the dataset. Documents are encoded, shuffled globally by hash, and written as Arrow IPC shards.

The number of shards follows from the tokens and the shard size in the recipe; a document's shard and place follow from
its hash alone, so any partitioning writes the same bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.build import Build, Built
from pipeline.lift import answers_of_partitions, frame_of_tasks, persisted
from pipeline.shards import write_by_url, write_shard
from pipeline.stage import Relation
from pipeline.tokenizer import TokenizerConfig, load_tokenizer
from schemas.config import Section
from schemas.errors import ContractError
from schemas.ids import below_share, shuffle_key
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tables import PROVENANCE
from schemas.tokens import HELDOUT, TRAIN, TokenizerContract
from schemas.urls import surt

CROSSING = {"doc_id": pa.binary(), "date": pa.int64()}
"""Types that Spark refuses or reinterprets on the way from a worker: ids lose their width, dates are milliseconds."""
ENCODED = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("key", pa.int64()),
        pa.field("tokens", pa.binary()),
        pa.field("num_tokens", pa.int64()),
        pa.field("surt", pa.string()),
        pa.field("domain_key", pa.int64()),
        *(pa.field(f.name, CROSSING.get(f.name, f.type)) for f in PROVENANCE),
        pa.field("language", pa.string()),
        pa.field("cluster", pa.binary()),
        pa.field("num_bytes", pa.int64()),
    ]
)
SPARK_TYPES = {pa.string(): "string", pa.int64(): "long", pa.binary(): "binary"}
ENCODED_DDL = ", ".join(f"`{field.name}` {SPARK_TYPES[field.type]}" for field in ENCODED)
FROM_CLEAN = [*(field.name for field in PROVENANCE), "language", "cluster", "num_bytes", "text", "drop_stage"]
DOMAINS_PER_BUCKET = 1_000_000


class TokensConfig(Section):
    """How the dataset is cut."""

    shard_tokens: int = Field(100_000_000, ge=1024)
    """Tokens in a shard, about; the number of shards is the tokens of a stream over this, rounded up."""
    chunk_tokens: int = Field(8192, ge=64)
    """Tokens in a chunk, the unit the trainer shuffles; sequence lengths divide it."""
    heldout_share: float = Field(0.01, ge=0, lt=1)
    """Share of duplicate clusters that is held out, chosen by hash, so that no cluster spans both splits."""
    seed: int = Field(0, ge=0)
    """Seed of the global shuffle."""


TOKENS = Relation(name="tokens", version=1, config=TokensConfig)


@dataclass(frozen=True)
class EncodeTask:
    """One clean part to encode."""

    clean: Store
    path: str
    tokenizer: Store
    model_path: str
    kind: Literal["sentencepiece", "huggingface"]
    tokenizer_config: TokenizerConfig
    config: TokensConfig


def build_tokens(build: Build) -> dict[str, Built]:
    """The token dataset: shards, document indexes and the index by URL."""
    config = build.recipe.section("tokens", TokensConfig)
    tokenizer, clean = build.inputs["tokenizer"], build.inputs["clean"]
    contract = TokenizerContract.model_validate(tokenizer.manifest.content.figures["contract"])
    tasks = [
        EncodeTask(
            clean.folder,
            path,
            tokenizer.folder,
            tokenizer.manifest.run.paths["model"],
            contract.kind,
            build.recipe.section("tokenizer", TokenizerConfig),
            config,
        )
        for path in clean.manifest.paths_of()
    ]
    encoded = persisted(frame_of_tasks(build.spark, encode_part, tasks, ENCODED_DDL))
    totals = {row.stream: (row.documents, row.tokens) for row in stream_totals(encoded).collect()}
    if not totals:
        raise ContractError("tokens: promised clean documents, found none; look at the drops with `penstock report`")
    plan = {name: -(-tokens // config.shard_tokens) for name, (_, tokens) in sorted(totals.items())}
    numbered = number_shards(encoded, plan)
    folder = build.folders["tokens"]
    answers = write_shards(numbered, plan, contract, folder) + write_index(numbered, totals, folder)
    encoded.unpersist()
    return {"tokens": collect(answers, totals, contract, config, clean.manifest.content.counts.rows_kept)}


def stream_totals(encoded: DataFrame) -> DataFrame:
    """Documents and tokens of every stream."""
    return encoded.groupBy("stream").agg(F.count("*").alias("documents"), F.sum("num_tokens").alias("tokens"))


def encode_part(task: EncodeTask) -> Iterator[pa.RecordBatch]:
    """The kept documents of one clean part, encoded with their separators."""
    model = task.tokenizer.read_bytes(task.model_path)
    tokenizer = load_tokenizer(model, task.kind, task.tokenizer_config)
    contract = tokenizer.contract
    before = np.array([contract.reserved[name] for name in contract.before], contract.dtype)
    after = np.array([contract.reserved[name] for name in contract.after], contract.dtype)
    with task.clean.open_input(task.path) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=512, columns=FROM_CLEAN):
            dates = batch.column("date").cast(pa.int64())
            batch = batch.set_column(batch.schema.get_field_index("date"), "date", dates)
            rows = [row for row in batch.to_pylist() if row["drop_stage"] is None]
            tokens = tokenizer.encode_batch([row["text"] for row in rows])
            for row, ids in zip(rows, tokens):
                ids = np.concatenate([before, ids.astype(contract.dtype, copy=False), after])
                held = below_share(shuffle_key(task.config.seed + 1, row["cluster"]), task.config.heldout_share)
                row["stream"] = f"{row['source']}/{HELDOUT if held else TRAIN}"
                row["key"] = shuffle_key(task.config.seed, row["doc_id"])
                row["tokens"], row["num_tokens"] = ids.tobytes(), len(ids)
                row["surt"] = surt(row["url"] or "")
                row["domain_key"] = shuffle_key(0, (row["domain"] or "").encode())
            columns = {field.name: [row[field.name] for row in rows] for field in ENCODED}
            yield pa.RecordBatch.from_pydict(columns, schema=ENCODED)


def number_shards(encoded: DataFrame, plan: Mapping[str, int]) -> DataFrame:
    """Adds `shard`, the number in its stream (equal ranges of the hash), and `place`, the number among all shards."""
    shards = F.create_map(*(F.lit(value) for item in plan.items() for value in item))
    offsets, total = {}, 0
    for name, number in plan.items():
        offsets[name], total = total, total + number
    starts = F.create_map(*(F.lit(value) for item in offsets.items() for value in item))
    # 32 high bits of the 63-bit key times the number of shards stays below 2^63: ANSI mode refuses an overflow.
    shard = F.shiftright(F.shiftright("key", 31) * shards[F.col("stream")].cast("long"), 32).cast("int")
    return encoded.withColumn("shard", shard).withColumn("place", starts[F.col("stream")] + F.col("shard"))


def write_shards(
    numbered: DataFrame, plan: Mapping[str, int], contract: TokenizerContract, folder: Store
) -> list[dict[str, Any]]:
    """Write every shard with its document index; returns their answers."""
    places = [(name, number) for name, shards in plan.items() for number in range(shards)]
    shared = numbered.sparkSession.sparkContext.broadcast(places)
    frame = numbered.drop("surt", "domain_key").repartitionById(len(places), F.col("place"))
    frame = frame.drop("place", "shard").sortWithinPartitions("key", "doc_id")

    def write(number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        return write_shard(folder, *shared.value[number], batches, contract.dtype)

    return answers_of_partitions(frame, write)


def write_index(numbered: DataFrame, totals: Mapping[str, tuple[int, int]], folder: Store) -> list[dict[str, Any]]:
    """Write the index by URL, in buckets by registrable domain; returns their answers."""
    buckets = -(-sum(documents for documents, _ in totals.values()) // DOMAINS_PER_BUCKET)
    frame = numbered.select("surt", "url", "domain", "doc_id", "stream", "shard", "domain_key")
    frame = frame.repartitionById(buckets, (F.col("domain_key") % buckets).cast("int"))
    frame = frame.drop("domain_key").sortWithinPartitions("surt", "url", "doc_id")
    return answers_of_partitions(frame, lambda number, batches: write_by_url(folder, number, batches))


def collect(
    answers: list[dict[str, Any]],
    totals: Mapping[str, tuple[int, int]],
    contract: TokenizerContract,
    config: TokensConfig,
    rows_in: int,
) -> Built:
    """The dataset's files, books and figures. Raises ContractError if a token was lost on the way."""
    built = Built()
    streams: dict[str, list[int]] = {}
    documents = 0
    for answer in answers:
        for entry in answer["files"]:
            built.add_file(entry)
        built.cpu_seconds += answer["cpu_seconds"]
        if "stream" in answer:
            streams.setdefault(answer["stream"], []).append(answer["tokens"])
            documents += answer["rows"]
    for name, (_, tokens) in totals.items():
        if sum(streams[name]) != tokens:
            raise ContractError(f"tokens: promised {tokens} tokens in {name}, found {sum(streams[name])} in its shards")
    built.counts = Counts(rows_in=rows_in, rows_kept=documents)
    built.figures = {
        "tokenizer": contract.model_dump(mode="json"),
        "chunk_tokens": config.chunk_tokens,
        "streams": streams,
        "documents": {name: number for name, (number, _) in sorted(totals.items())},
    }
    return built
