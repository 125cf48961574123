"""The step that builds the training dataset, the table `tokens`: clean documents are encoded, shuffled and written.

The number of shards of a stream is its number of tokens divided by `shard_tokens`, rounded up. A hash of a document's
id decides its shard and its position in the shard. The bytes therefore do not depend on how Spark partitions the
documents. Shards are Arrow IPC files. A resumed step encodes all documents again, because any shard may contain any
document, but writes only the shards that are not complete.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.engine.parquet import Part
from pipeline.engine.part import PartResult, TaskResult, complete_part
from pipeline.engine.progress import doing
from pipeline.engine.spark import dataframe_from_tasks, persist_on_disk, run_partitions
from pipeline.engine.stage import Row
from pipeline.engine.step import StepContext, TableResult
from pipeline.membership.index import TOP, index_bits, membership_figures, write_index_file
from pipeline.membership.tree import Subtree, value_of
from pipeline.perplexity.stage import HEAD_CUT, MIDDLE_CUT
from pipeline.tokens.shards import write_by_url, write_shard
from pipeline.tokens.streams import (
    MIX_RULE,
    TOKENS,
    Sorting,
    TokensConfig,
    check_mix,
    describe_shortfalls,
    is_held_out_by_text,
    mix_figure,
    streams_of_part,
)
from pipeline.tokens.tokenizer import TokenizerConfig, load_tokenizer
from schemas.errors import ContractError
from schemas.ids import shuffle_key
from schemas.logs import LOGGER
from schemas.manifest import Counts
from schemas.mix import Mix, read_mix
from schemas.older_tables import read_batches
from schemas.storage import CheckedPath, Store
from schemas.tables import PROVENANCE
from schemas.tokens import BY_TEXT, HELDOUT_BY, TokenizerContract
from schemas.urls import surt

SPARK_SAFE_TYPES = {"doc_id": pa.binary(), "date": pa.int64()}
"""Types that replace those that Spark rejects or reinterprets: an id is bytes, a date is milliseconds since 1970."""
ENCODED = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("key", pa.int64()),
        pa.field("tokens", pa.binary()),
        pa.field("value", pa.binary()),
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
    "weight",
    "num_bytes",
    "num_chars",
    "text",
    "drop_stage",
]
FILES = ("tokens", "docs", "by_url", "by_id")
"""Names of the files of a part, in the order of the manifest. A shard has the first two, an index one of the others."""
DOMAINS_PER_BUCKET = 1_000_000
"""Approximate number of documents in a file of the URL index."""


@dataclass(frozen=True)
class EncodeTask:
    """One part of the table `clean` to encode, with the tokenizer and the assignment of documents to streams."""

    part: Part
    tokenizer: Store
    model_path: CheckedPath
    kind: Literal["sentencepiece", "huggingface"]
    tokenizer_config: TokenizerConfig
    sorting: Sorting


@dataclass(frozen=True)
class StreamTotal:
    """The number of documents and tokens of one stream."""

    documents: int
    """Number of documents that the mix keeps, or of all if there is no mix."""
    tokens: int
    """Number of tokens of these documents, including the separators before and after each document."""
    left_out: int
    """Number of documents that the mix leaves out."""
    left_out_chars: int
    """Number of characters of the documents that the mix leaves out."""


def build_tokens(build: StepContext) -> dict[str, TableResult]:
    """Write the token dataset: the shards, a document index for each shard, the URL index, and the index by id.

    Raises ContractError if `clean` has no kept documents. Raises ConfigError if the mix and the
    dataset have different sources, or if the mix keeps no training document of a source.
    """
    config = build.recipe.section("tokens", TokensConfig)
    contract = TokenizerContract.model_validate(build.inputs["tokenizer"].manifest.content.figures["contract"])
    mix = read_mix(build.models[TOKENS.name][MIX_RULE].path) if config.mix else None
    by_text = is_held_out_by_text(build.recipe)
    sorting = Sorting(config, {name: part.keep for name, part in mix.sources.items()} if mix else {}, by_text=by_text)
    tasks = encode_tasks(build, contract, sorting)
    encoded = persist_on_disk(dataframe_from_tasks(build.spark, encode_part, tasks, ENCODED_DDL))
    doing("encode texts")
    totals = stream_totals(encoded)
    if not totals:
        raise ContractError(
            "tokens: expected clean documents, got none. Run `penstock report` to see which rules dropped them, then "
            "loosen those rules."
        )
    figures = dataset_figures(build, contract, totals, mix)
    for line in describe_shortfalls(figures.get(MIX_RULE, {}), config.mix):
        LOGGER.warning(line)
    plan = {name: -(-total.tokens // config.shard_tokens) for name, total in sorted(totals.items())}
    numbered = assign_shards(encoded.where(F.col("tokens").isNotNull()).drop("num_chars"), plan)
    folder = build.folders["tokens"]
    shards = write_shards(numbered, plan, contract, folder)
    results = shards + write_index(numbered, totals, folder, first_part=len(shards))
    results += write_by_id(numbered, totals, folder, first_part=len(results))
    encoded.unpersist()
    built = collect_results(results, totals, build.inputs["clean"].manifest.content.counts.rows_kept)
    built.figures |= figures | ({HELDOUT_BY: BY_TEXT} if by_text else {})
    return {"tokens": built}


def encode_tasks(build: StepContext, contract: TokenizerContract, sorting: Sorting) -> list[EncodeTask]:
    """Return a task for each part of `clean`, in the order of the parts."""
    tokenizer = build.inputs["tokenizer"]
    tables = {name: table for name, table in build.inputs.items() if name != "tokenizer"}
    folders = {name: table.folder for name, table in tables.items()}
    keys = [entry.key for entry in tables["clean"].manifest.content.files]
    paths = [{name: table.manifest.paths[key] for name, table in tables.items()} for key in keys]
    return [
        EncodeTask(
            Part(ordinal, folders, path),
            tokenizer.folder,
            tokenizer.manifest.paths["model"],
            contract.kind,
            build.recipe.section("tokenizer", TokenizerConfig),
            sorting,
        )
        for ordinal, path in enumerate(paths)
    ]


def stream_totals(encoded: DataFrame) -> dict[str, StreamTotal]:
    """Return the numbers of documents and tokens by stream; `encoded` has a row for each kept document of `clean`."""
    is_kept = F.col("tokens").isNotNull()
    rows = encoded.groupBy("stream").agg(
        F.count_if(is_kept).alias("documents"),
        F.coalesce(F.sum("num_tokens"), F.lit(0)).alias("tokens"),
        F.count_if(~is_kept).alias("left_out"),
        F.coalesce(F.sum(F.when(~is_kept, F.col("num_chars"))), F.lit(0)).alias("left_out_chars"),
    )
    totals = {row.pop("stream"): StreamTotal(**row) for row in (row.asDict() for row in rows.collect())}
    return dict(sorted(totals.items()))


def dataset_figures(
    build: StepContext, contract: TokenizerContract, totals: Mapping[str, StreamTotal], mix: Mix | None
) -> dict[str, Any]:
    """Return the entries of `figures` in the manifest that describe the tokenizer, the quality buckets and the mix.

    Raises ConfigError if the mix and the dataset have different sources, or if the mix keeps no training document of a
    source.
    """
    config = build.recipe.section("tokens", TokensConfig)
    figures: dict[str, Any] = {"tokenizer": contract.model_dump(mode="json"), "chunk_tokens": config.chunk_tokens}
    if config.buckets_by:
        cuts: Any = list(config.bucket_cuts)
        if config.measure is None:
            cutoffs = build.inputs["verdicts"].manifest.content.figures["cutoffs"]
            cuts = {name: cutoffs.get(name, {}) for name in (HEAD_CUT, MIDDLE_CUT)}
        figures["buckets"] = {"by": config.buckets_by, "cuts": cuts, "names": list(config.bucket_names)}
    if mix is not None:
        check_mix(mix, config.mix, {name: (total.documents, total.left_out) for name, total in totals.items()})
        figures[MIX_RULE] = mix_figure(mix, {name: total.tokens for name, total in totals.items()})
        chars = sum(total.left_out_chars for total in totals.values())
        figures["dropped_chars"] = {f"{TOKENS.name}/{MIX_RULE}": chars}
    return figures


def encode_part(task: EncodeTask) -> Iterator[pa.RecordBatch]:
    """Yield the kept documents of one part of `clean`, each as token ids with the separators before and after it.

    The tokens of a document that the mix leaves out are null.
    """
    model = task.tokenizer.read_bytes(task.model_path)
    tokenizer = load_tokenizer(model, task.kind, task.tokenizer_config)
    contract, config = tokenizer.contract, task.sorting.config
    before = np.array([contract.reserved[name] for name in contract.before], contract.dtype)
    after = np.array([contract.reserved[name] for name in contract.after], contract.dtype)
    for rows in clean_rows(task.part, task.sorting):
        kept = [row for row in rows if task.sorting.drop(row["stream"], row["doc_id"]) is None]
        tokens = tokenizer.encode_batch([row["text"] for row in kept])
        for row, ids in zip(kept, tokens):
            ids = np.concatenate([before, ids.astype(contract.dtype, copy=False), after])
            row["key"] = shuffle_key(config.seed, row["doc_id"])
            row["tokens"], row["num_tokens"] = ids.tobytes(), len(ids)
            row["value"] = value_of(row["stream"], row["tokens"])
            row["surt"] = surt(row["url"] or "")
            row["domain_key"] = shuffle_key(0, (row["domain"] or "").encode())
        columns = {field.name: [row.get(field.name) for row in rows] for field in ENCODED}
        yield pa.RecordBatch.from_pydict(columns, schema=ENCODED)


def clean_rows(part: Part, sorting: Sorting) -> Iterator[list[Row]]:
    """Yield the kept documents of one part of `clean` in lists of up to 512 rows, each with the name of its stream."""
    stream_of = streams_of_part(part, sorting)
    with part.folders["clean"].open_input(part.paths["clean"]) as stream:
        for batch in read_batches(pq.ParquetFile(stream), "clean", FROM_CLEAN, 512):
            dates = batch.column("date").cast(pa.int64())
            batch = batch.set_column(batch.schema.get_field_index("date"), "date", dates)
            rows = [row for row in batch.to_pylist() if row["drop_stage"] is None]
            for row in rows:
                row["stream"] = stream_of(row)
            yield rows


def assign_shards(encoded: DataFrame, plan: Mapping[str, int]) -> DataFrame:
    """Add the columns `shard`, the shard's number in the stream, and `place`, the shard's number across all streams.

    `plan` is the number of shards by stream.
    """
    shards = F.create_map(*(F.lit(value) for item in plan.items() for value in item))
    offsets, total = {}, 0
    for name, number in plan.items():
        offsets[name], total = total, total + number
    starts = F.create_map(*(F.lit(value) for item in offsets.items() for value in item))
    # The shards of a stream divide the range of the hash `key` equally.
    # The 32 high bits of the 63-bit key times the number of shards stay below 2^63: ANSI mode raises on an overflow.
    shard = F.shiftright(F.shiftright("key", 31) * shards[F.col("stream")].cast("long"), 32).cast("int")
    return encoded.withColumn("shard", shard).withColumn("place", starts[F.col("stream")] + F.col("shard"))


def write_shards(
    numbered: DataFrame, plan: Mapping[str, int], contract: TokenizerContract, folder: Store
) -> list[PartResult]:
    """Write every shard and its document index; return one result for each shard, which lists both files."""
    shards = [(name, number) for name, count in plan.items() for number in range(count)]
    shared = numbered.sparkSession.sparkContext.broadcast(shards)
    frame = numbered.drop("surt", "domain_key", "value").repartitionById(len(shards), F.col("place"))
    frame = frame.drop("place", "shard").sortWithinPartitions("key", "doc_id")

    def write(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        shard = partial(write_shard, folder, *shared.value[number], batches, contract.dtype)
        return complete_part(folder, number, shard).to_json()

    return [PartResult.from_json(result) for result in run_partitions(frame, write, "write shards")]


def write_index(
    numbered: DataFrame, totals: Mapping[str, StreamTotal], folder: Store, first_part: int
) -> list[PartResult]:
    """Write the URL index and return a result for each of its parts. Part numbers start at `first_part`.

    All documents of a registrable domain are in the same part.
    """
    buckets = -(-sum(total.documents for total in totals.values()) // DOMAINS_PER_BUCKET)
    frame = numbered.select("surt", "url", "domain", "doc_id", "stream", "shard", "domain_key")
    frame = frame.repartitionById(buckets, (F.col("domain_key") % buckets).cast("int"))
    frame = frame.drop("domain_key").sortWithinPartitions("surt", "url", "doc_id")

    def write(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        return complete_part(folder, first_part + number, partial(write_by_url, folder, number, batches)).to_json()

    return [PartResult.from_json(result) for result in run_partitions(frame, write, "write the URL index")]


def write_by_id(
    numbered: DataFrame, totals: Mapping[str, StreamTotal], folder: Store, first_part: int
) -> list[PartResult]:
    """Write the index by id and return a result for each of its parts. Part numbers start at `first_part`.

    A part has the documents whose ids begin with the same bits.
    """
    bits = index_bits(sum(total.documents for total in totals.values()))
    beginning = F.conv(F.hex(F.substring("doc_id", 1, 4)), 16, 10).cast("long")
    frame = numbered.select("doc_id", "value")
    frame = frame.repartitionById(1 << bits.file, F.shiftright(beginning, 32 - bits.file).cast("int"))
    frame = frame.sortWithinPartitions("doc_id", "value")

    def write(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        part = partial(write_index_file, folder, number, batches, bits)
        return complete_part(folder, first_part + number, part).to_json()

    return [PartResult.from_json(result) for result in run_partitions(frame, write, "write the index by id")]


def collect_results(results: Sequence[PartResult], totals: Mapping[str, StreamTotal], rows_in: int) -> TableResult:
    """Return the dataset's files, row counts and `figures`.

    `figures` has two entries by stream: `streams`, the number of tokens in each shard, and `documents`, the number of
    documents; and those of the Merkle tree. Raises ContractError if the shards of a stream do not contain all tokens of
    the stream, or if the indexes and the shards do not have as many documents as the streams.
    """
    built = TableResult()
    streams: dict[str, list[int]] = {}
    documents = by_url = by_id = 0
    tops: list[Subtree] = []
    for result in results:
        for name in FILES:
            if name in result.files:
                built.add_file(result.files[name])
        built.cpu_seconds += result.cpu_seconds
        for stream, tokens in result.figures.get("tokens", {}).items():
            streams.setdefault(stream, []).append(tokens)
            documents += result.counts.rows_in
        by_url += result.counts.rows_in if "by_url" in result.files else 0
        if "by_id" in result.files:
            by_id += result.counts.rows_in
            tops.append(Subtree.from_json(result.figures[TOP]))
    for name, total in totals.items():
        written = sum(streams.get(name, ()))
        if written != total.tokens:
            raise ContractError(
                f"tokens: expected {total.tokens} tokens in the shards of {name}, got {written}. "
                "Run `penstock run` again."
            )
    expected = sum(total.documents for total in totals.values())
    if {documents, by_url, by_id} != {expected}:
        raise ContractError(
            f"tokens: expected {expected} documents in the shards, in the URL index and in the index by id, got "
            f"{documents}, {by_url} and {by_id}. Run `penstock run` again."
        )
    left_out = sum(total.left_out for total in totals.values())
    built.counts = Counts(rows_in=rows_in, rows_kept=documents, dropped={f"{TOKENS.name}/{MIX_RULE}": left_out})
    # The mix may leave out every document of `web+x3` and keep others of `web`.
    built.figures = {
        "streams": streams,
        "documents": {name: total.documents for name, total in totals.items() if total.documents},
        **membership_figures(tops),
    }
    return built
