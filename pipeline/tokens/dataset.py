"""The table `tokens`: the dataset. Documents are encoded, shuffled globally by hash, and written as Arrow IPC shards.

The number of shards follows from the tokens and the shard size in the recipe; a document's shard and place follow from
its hash alone, so any partitioning writes the same bytes.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.engine.parquet import Part, WrittenFile
from pipeline.engine.spark import dataframe_from_tasks, persist_on_disk, run_partitions
from pipeline.engine.stage import Row
from pipeline.engine.step import StepContext, TableResult
from pipeline.perplexity.stage import HEAD_CUT, MIDDLE_CUT
from pipeline.tokens.shards import write_by_url, write_shard
from pipeline.tokens.streams import (
    MIX_RULE,
    TOKENS,
    Sorting,
    TokensConfig,
    check_mix,
    describe_shortfalls,
    mix_figure,
    streams_of_part,
)
from pipeline.tokens.tokenizer import TokenizerConfig, load_tokenizer
from schemas.errors import ContractError
from schemas.ids import shuffle_key
from schemas.manifest import Counts
from schemas.mix import Mix, read_mix
from schemas.storage import Store
from schemas.tables import PROVENANCE
from schemas.tokens import TRAIN, TokenizerContract
from schemas.urls import surt

SPARK_SAFE_TYPES = {"doc_id": pa.binary(), "date": pa.int64()}
"""Types that Spark refuses or reinterprets on the way from a worker: ids lose their width, dates are milliseconds."""
ENCODED = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("key", pa.int64()),
        pa.field("tokens", pa.binary()),
        pa.field("num_tokens", pa.int64()),
        pa.field("surt", pa.string()),
        pa.field("domain_key", pa.int64()),
        *(pa.field(f.name, SPARK_SAFE_TYPES.get(f.name, f.type)) for f in PROVENANCE),
        pa.field("language", pa.string()),
        pa.field("cluster", pa.binary()),
        pa.field("num_bytes", pa.int64()),
        pa.field("num_chars", pa.int64()),
    ]
)
SPARK_TYPES = {pa.string(): "string", pa.int64(): "long", pa.binary(): "binary"}
ENCODED_DDL = ", ".join(f"`{field.name}` {SPARK_TYPES[field.type]}" for field in ENCODED)
FROM_CLEAN = [
    *(field.name for field in PROVENANCE),
    "language",
    "cluster",
    "num_bytes",
    "num_chars",
    "text",
    "drop_stage",
]
DOMAINS_PER_BUCKET = 1_000_000


@dataclass(frozen=True)
class EncodeTask:
    """One clean part to encode, with the same part of what its buckets are read from."""

    part: Part
    tokenizer: Store
    model_path: str
    kind: Literal["sentencepiece", "huggingface"]
    tokenizer_config: TokenizerConfig
    sorting: Sorting


@dataclass(frozen=True)
class StreamTotal:
    """What was found of one stream."""

    documents: int
    tokens: int
    left_out: int
    """Documents that the mix leaves out."""
    left_out_chars: int


def build_tokens(build: StepContext) -> dict[str, TableResult]:
    """The token dataset: shards, document indexes and the index by URL."""
    config = build.recipe.section("tokens", TokensConfig)
    contract = TokenizerContract.model_validate(build.inputs["tokenizer"].manifest.content.figures["contract"])
    mix = read_mix(build.models[TOKENS.name][MIX_RULE].path) if config.mix else None
    sorting = Sorting(config, {name: part.keep for name, part in mix.sources.items()} if mix else {})
    tasks = encode_tasks(build, contract, sorting)
    encoded = persist_on_disk(dataframe_from_tasks(build.spark, encode_part, tasks, ENCODED_DDL))
    totals = stream_totals(encoded)
    if not totals:
        raise ContractError("tokens: expected clean documents, got none. Look at the drops with `penstock report`.")
    figures = dataset_figures(build, contract, totals, mix)
    for line in describe_shortfalls(figures.get(MIX_RULE, {}), config.mix):
        print(line, file=sys.stderr)
    plan = {name: -(-total.tokens // config.shard_tokens) for name, total in sorted(totals.items())}
    numbered = assign_shards(encoded.where(F.col("tokens").isNotNull()).drop("num_chars"), plan)
    folder = build.folders["tokens"]
    answers = write_shards(numbered, plan, contract, folder) + write_index(numbered, totals, folder)
    encoded.unpersist()
    built = collect_results(answers, totals, build.inputs["clean"].manifest.content.counts.rows_kept)
    built.figures |= figures
    return {"tokens": built}


def encode_tasks(build: StepContext, contract: TokenizerContract, sorting: Sorting) -> list[EncodeTask]:
    """A task for each part of `clean`."""
    tokenizer = build.inputs["tokenizer"]
    tables = {name: table for name, table in build.inputs.items() if name != "tokenizer"}
    folders = {name: table.folder for name, table in tables.items()}
    keys = [entry.key for entry in tables["clean"].manifest.content.files]
    paths = [{name: table.manifest.run.paths[key] for name, table in tables.items()} for key in keys]
    return [
        EncodeTask(
            Part(ordinal, folders, path),
            tokenizer.folder,
            tokenizer.manifest.run.paths["model"],
            contract.kind,
            build.recipe.section("tokenizer", TokenizerConfig),
            sorting,
        )
        for ordinal, path in enumerate(paths)
    ]


def stream_totals(encoded: DataFrame) -> dict[str, StreamTotal]:
    """What was found of every stream."""
    stays = F.col("tokens").isNotNull()
    rows = encoded.groupBy("stream").agg(
        F.count_if(stays).alias("documents"),
        F.coalesce(F.sum("num_tokens"), F.lit(0)).alias("tokens"),
        F.count_if(~stays).alias("left_out"),
        F.coalesce(F.sum(F.when(~stays, F.col("num_chars"))), F.lit(0)).alias("left_out_chars"),
    )
    found = {row.pop("stream"): StreamTotal(**row) for row in (row.asDict() for row in rows.collect())}
    return dict(sorted(found.items()))


def dataset_figures(
    build: StepContext, contract: TokenizerContract, totals: Mapping[str, StreamTotal], mix: Mix | None
) -> dict[str, Any]:
    """The figures that say how the dataset was made. Raises ConfigError if the mix does not fit its sources."""
    config = build.recipe.section("tokens", TokensConfig)
    figures: dict[str, Any] = {"tokenizer": contract.model_dump(mode="json"), "chunk_tokens": config.chunk_tokens}
    if config.buckets_by:
        cuts: Any = list(config.bucket_cuts)
        if config.measure is None:
            cutoffs = build.inputs["verdicts"].manifest.content.figures["cutoffs"]
            cuts = {name: cutoffs.get(name, {}) for name in (HEAD_CUT, MIDDLE_CUT)}
        figures["buckets"] = {"by": config.buckets_by, "cuts": cuts, "names": list(config.bucket_names)}
    if mix is not None:
        suffix = f"/{TRAIN}"
        trained = {name.removesuffix(suffix): one for name, one in totals.items() if name.endswith(suffix)}
        check_mix(mix, config.mix, {name: (one.documents, one.left_out) for name, one in trained.items()})
        figures[MIX_RULE] = mix_figure(mix, {name: one.tokens for name, one in trained.items()})
        chars = sum(one.left_out_chars for one in totals.values())
        figures["dropped_chars"] = {f"{TOKENS.name}/{MIX_RULE}": chars}
    return figures


def encode_part(task: EncodeTask) -> Iterator[pa.RecordBatch]:
    """The kept documents of a clean part, encoded with separators; tokens are null where the mix leaves one out."""
    model = task.tokenizer.read_bytes(task.model_path)
    tokenizer = load_tokenizer(model, task.kind, task.tokenizer_config)
    contract, config = tokenizer.contract, task.sorting.config
    before = np.array([contract.reserved[name] for name in contract.before], contract.dtype)
    after = np.array([contract.reserved[name] for name in contract.after], contract.dtype)
    for rows in clean_rows(task.part, task.sorting):
        stays = [row for row in rows if task.sorting.drop(row["stream"], row["doc_id"]) is None]
        tokens = tokenizer.encode_batch([row["text"] for row in stays])
        for row, ids in zip(stays, tokens):
            ids = np.concatenate([before, ids.astype(contract.dtype, copy=False), after])
            row["key"] = shuffle_key(config.seed, row["doc_id"])
            row["tokens"], row["num_tokens"] = ids.tobytes(), len(ids)
            row["surt"] = surt(row["url"] or "")
            row["domain_key"] = shuffle_key(0, (row["domain"] or "").encode())
        columns = {field.name: [row.get(field.name) for row in rows] for field in ENCODED}
        yield pa.RecordBatch.from_pydict(columns, schema=ENCODED)


def clean_rows(part: Part, sorting: Sorting) -> Iterator[list[Row]]:
    """The kept documents of one clean part with their stream, some hundred at a time."""
    stream_of = streams_of_part(part, sorting)
    with part.folders["clean"].open_input(part.paths["clean"]) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=512, columns=FROM_CLEAN):
            dates = batch.column("date").cast(pa.int64())
            batch = batch.set_column(batch.schema.get_field_index("date"), "date", dates)
            rows = [row for row in batch.to_pylist() if row["drop_stage"] is None]
            for row in rows:
                row["stream"] = stream_of(row)
            yield rows


def assign_shards(encoded: DataFrame, plan: Mapping[str, int]) -> DataFrame:
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

    return run_partitions(frame, write)


def write_index(numbered: DataFrame, totals: Mapping[str, StreamTotal], folder: Store) -> list[dict[str, Any]]:
    """Write the index by URL, in buckets by registrable domain; returns their answers."""
    buckets = -(-sum(total.documents for total in totals.values()) // DOMAINS_PER_BUCKET)
    frame = numbered.select("surt", "url", "domain", "doc_id", "stream", "shard", "domain_key")
    frame = frame.repartitionById(buckets, (F.col("domain_key") % buckets).cast("int"))
    frame = frame.drop("domain_key").sortWithinPartitions("surt", "url", "doc_id")
    return run_partitions(frame, lambda number, batches: write_by_url(folder, number, batches))


def collect_results(answers: list[dict[str, Any]], totals: Mapping[str, StreamTotal], rows_in: int) -> TableResult:
    """The dataset's files, books and counts by stream. Raises ContractError if a token was lost on the way."""
    built = TableResult()
    streams: dict[str, list[int]] = {}
    documents = 0
    for answer in answers:
        for entry in answer["files"]:
            built.add_file(WrittenFile(**entry))
        built.cpu_seconds += answer["cpu_seconds"]
        if "stream" in answer:
            streams.setdefault(answer["stream"], []).append(answer["tokens"])
            documents += answer["rows"]
    for name, total in totals.items():
        if sum(streams[name]) != total.tokens:
            raise ContractError(
                f"tokens: expected {total.tokens} tokens in {name}, got {sum(streams[name])} in its shards"
            )
    left_out = sum(total.left_out for total in totals.values())
    built.counts = Counts(rows_in=rows_in, rows_kept=documents, dropped={f"{TOKENS.name}/{MIX_RULE}": left_out})
    built.figures = {"streams": streams, "documents": {name: total.documents for name, total in totals.items()}}
    return built
