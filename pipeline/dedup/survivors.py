"""The tables `dedup` and `representatives`: the survivor of each cluster, and the totals that later snapshots need.

Documents of one URL are decided first, then copies of one text. Each part counts its own documents, and the totals
return to the parts that contain them, so the largest cluster costs one row per part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.bias.audit import BIAS_FIGURE, check_ratio, comparisons_of, stored_comparisons
from pipeline.bias.count import COLUMNS, COUNTS, GroupCounter, rule_filters
from pipeline.bias.stage import BIAS, BiasConfig
from pipeline.dedup.config import DEDUP, EXACT, NEAR, TAKEN_DOWN, TAKEN_DOWN_MEANING, DedupConfig
from pipeline.dedup.decide import (
    CLUSTER,
    NOT_DROPPED,
    URL,
    Decision,
    DedupFacts,
    KnownTotals,
    SurvivorComparison,
    cluster_tallies,
    decide,
    facts_columns,
    facts_of,
    rest_tallies,
    url_tallies,
    weight_of,
)
from pipeline.dedup.index import (
    EARLIER_NAME,
    MERGED,
    MERGED_DDL,
    Indexes,
    numbered_files,
    part_number,
    read_files,
    rows_of_file,
    write_file,
)
from pipeline.dedup.keep_order import EARLIER, NODE_BYTES, binary_array, order_bytes, rows_of_bytes
from pipeline.dedup.key_ranges import number_leaders
from pipeline.dedup.keys import DIGEST_BYTES
from pipeline.engine.parquet import Part, parts_of, read_measured
from pipeline.engine.part import (
    DropCounter,
    PartOutput,
    PartResult,
    PartResults,
    PartTarget,
    TableTarget,
    set_verdict,
    write_part,
)
from pipeline.engine.spark import (
    TALLIES,
    TALLIES_DDL,
    dataframe_from_tasks,
    map_parts,
    persist_on_disk,
    run_part_writers,
    totals,
)
from pipeline.engine.stage import Drop
from pipeline.engine.step import PartSources, StepContext, TableResult, combine_parts
from pipeline.minhash.stage import SignatureConfig
from schemas.logs import LOGGER
from schemas.manifest import TableVersion, part_key
from schemas.removed import RemovedDocuments
from schemas.storage import CheckedPath, Store
from schemas.tables import DEDUP as DEDUP_SCHEMA
from schemas.tables import DROPPED_BEFORE, PARENTS

READ = ("documents", "templates", "scores", "verdicts", "clusters")
RECOGNIZED_BY = ("doc_id", "url", "domain", PARENTS.name)
"""Columns of `documents` by which documents that takedowns removed are recognized."""
LOST_TO = "lost_to"
"""Figure of a run with several sources: documents dropped as copies, by `source/source of the document kept`."""
SIMILARITY, NOT_COMPARED = "survivor_similarity", "not compared"
"""Figure of a run with `dedup.compare_survivor`: near copies that were dropped, by similarity to the document kept."""
EARLIER_SNAPSHOT = "earlier snapshot"
EARLIER_PART = -1
"""Value of the column `part` in counts (TALLIES) that come from an earlier snapshot."""
COUNTED = pa.schema([TALLIES.field("key"), TALLIES.field("count"), TALLIES.field("first")])
COUNTED_DDL = "key binary, count long, first binary"


@dataclass(frozen=True)
class SurvivorsTask:
    """One part, the settings of deduplication, and the folders of the tables `dedup` and `representatives`."""

    part: Part
    config: DedupConfig
    dedup: Store
    representatives: Store
    sources: PartSources | None
    """The source of each part, if there are several sources."""
    signature: SignatureConfig
    removed: tuple[RemovedDocuments, ...] = ()
    """The documents that takedowns removed from the runs of `dedup.indexes`."""

    def comparison(self, kept: Mapping[bytes, bytes], rounds: int) -> SurvivorComparison | None:
        """Return the comparison of near copies with what is kept, after `rounds` rounds; None if it is off."""
        if not self.config.compares_survivors:
            return None
        return SurvivorComparison(self.config, self.signature, kept, rounds)


def build_dedup(build: StepContext) -> dict[str, TableResult]:
    """Build the tables `dedup`, one part for each part of `documents`, and `representatives`."""
    config = build.recipe.section("dedup", DedupConfig)
    parts = parts_of({name: build.inputs[name] for name in READ if name in build.inputs})
    folders = build.folders["dedup"], build.folders["representatives"]
    signature = build.recipe.section("signature", SignatureConfig)
    removed = removed_before(build.inputs)
    tasks = [SurvivorsTask(part, config, *folders, build.part_sources, signature, removed) for part in parts]
    urls = None
    if config.by_url != "off":
        own = dataframe_from_tasks(build.spark, url_tallies_of_part, tasks, TALLIES_DDL)
        urls = persist_on_disk(totals_for_parts(totals(own.union(earlier_urls(build.spark, build.inputs))), URL))
    own = cluster_frame(build, tasks, urls)
    rows = totals_for_parts(totals(own.union(earlier_clusters(build.spark, build.inputs, config))), CLUSTER)
    rows = rows if urls is None else rows.union(urls)
    stored = [] if urls is None else [urls]
    rounds = 0
    if config.compares_survivors:
        rows, rounds = rounds_of_survivors(build, tasks, rows, stored)
    results = write_parts(build, rows, tasks, rounds)
    for frame in stored:
        frame.unpersist()
    built = combine_parts(results, ("dedup",), by_source=True) | {"representatives": TableResult()}
    compare_groups(build, built["dedup"].figures)
    other = built["representatives"]
    for part in results.parts:
        for name in ("clusters", "urls"):
            if name in part.files:
                other.add_file(part.files[name])
    other.count_rows()
    return built


def compare_groups(build: StepContext, figures: dict[str, Any]) -> None:
    """Replace the counts of groups among the figures of the table by the comparisons of the bias audit.

    Raises ContractError if a ratio is above `bias.max_ratio`.
    """
    config = build.recipe.section(BIAS.name, BiasConfig)
    compared = comparisons_of(figures.pop(COUNTS, {}), config.min_documents)
    before = stored_comparisons([build.inputs["verdicts"].manifest.content.figures])
    check_ratio("dedup", [*before, *compared], config)
    figures[BIAS_FIGURE] = [each.row for each in compared]


def count_groups(task: SurvivorsTask, reasons: Sequence[str | None]) -> dict[str, Any]:
    """Return the counts of the bias audit, given why each document of a part is dropped; None = it is kept."""
    counter, names, done = GroupCounter(), [*DEDUP.reasons], 0
    for batch in read_measured(task.part, {"documents": COLUMNS}):
        own = np.array(reasons[done : done + batch.num_rows], object)
        done += batch.num_rows
        counter.add(batch, rule_filters(DEDUP.name, own != DROPPED_BEFORE, {name: own == name for name in names}))
    return counter.figures


def removed_before(inputs: Mapping[str, TableVersion]) -> tuple[RemovedDocuments, ...]:
    """Return what takedowns removed from the runs of `dedup.indexes`; `inputs` are the tables that the step reads.

    Their indexes no longer hold the documents, so copies of them would count as new. A line is printed about takedowns
    whose documents cannot all be recognized: of near-duplicates, of ids, and those that an earlier version of penstock
    made.
    """
    runs = {table.folder.child("../..").uri: table for name, table in inputs.items() if name.startswith(EARLIER_NAME)}
    found = [RemovedDocuments(table.folder.child("../..")) for table in runs.values()]
    for uri, removed in zip(runs, found):
        if not removed.are_all_known or removed.has_ids:
            LOGGER.warning(
                f"dedup: not all documents that takedowns of {uri} removed can be recognized in this snapshot, because "
                "near-duplicates were removed, or documents by id, which a later crawl of the same page does not have, "
                "or an earlier version of penstock made the certificate. Take them down here too."
            )
    return tuple(each for each in found if each.certificates)


def totals_for_parts(counted: DataFrame, kind: bytes) -> DataFrame:
    """Return rows (part, key, total, best) for the keys that several documents have.

    A key has one row for each part that contains it. `total` is the number of documents with the key in all parts.
    `best` is the keep order of the first of these documents. Returned keys begin with `kind`: URL, CLUSTER, or the
    number of a round (see `round_key`).
    """
    chosen = counted.where((F.col("part") != EARLIER_PART) & (F.col("total") > 1))
    return chosen.select("part", F.concat(F.lit(kind), "key").alias("key"), "total", "best")


def cluster_frame(build: StepContext, tasks: Sequence[SurvivorsTask], urls: DataFrame | None) -> DataFrame:
    """Return the counts (TALLIES) of the clusters of all parts.

    `urls` are the rows of `totals_for_parts` for URLs, or None if `dedup.by_url` is off.
    """
    if urls is None:
        return dataframe_from_tasks(build.spark, partial(cluster_tallies_of_part, known={}), tasks, TALLIES_DDL)
    # a document that is dropped for its URL cannot survive in its cluster

    def tally(task: SurvivorsTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from cluster_tallies_of_part(task, known_totals_of(batches))

    return map_parts(urls, tasks, tally, TALLIES_DDL)


def rounds_of_survivors(
    build: StepContext, tasks: Sequence[SurvivorsTask], rows: DataFrame, stored: list[DataFrame]
) -> tuple[DataFrame, int]:
    """Return the rows of `totals_for_parts` of all rounds of choosing survivors, and the number of rounds.

    Further rounds choose among the documents that are no copies of the survivors before. The returned rows have a
    further column: `payload`, the signature of the survivor. Frames on the workers' disks are added to `stored`.
    """
    config = build.recipe.section("dedup", DedupConfig)

    def with_signatures(counted: DataFrame) -> DataFrame:
        def read(task: SurvivorsTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from signatures_of_survivors(task, known_totals_of(batches))

        signatures = map_parts(counted, tasks, read, "key binary, payload binary")
        if config.indexes:
            of_clusters = counted.where(F.substring("key", 1, 1) != F.lit(URL))
            signatures = signatures.union(earlier_signatures(build.spark, build.inputs, of_clusters, config))
        return counted.join(signatures, "key", "left").select("part", "key", "total", "best", "payload")

    def keep(frame: DataFrame) -> DataFrame:
        stored.append(persist_on_disk(frame))
        return stored[-1]

    chosen, rounds = keep(with_signatures(rows)), 1
    while config.requires_survivors and rounds < config.rounds:

        def tally(
            task: SurvivorsTask, batches: Iterator[pa.RecordBatch], rounds: int = rounds
        ) -> Iterator[pa.RecordBatch]:
            yield from rest_tallies_of_part(task, list(batches), rounds)

        counted = totals(map_parts(chosen, tasks, tally, TALLIES_DDL))
        rest = keep(totals_for_parts(counted, bytes([rounds])))
        if rest.isEmpty():
            break
        chosen, rounds = keep(chosen.union(with_signatures(rest))), rounds + 1
    return chosen, rounds


def signatures_of_survivors(task: SurvivorsTask, known: KnownTotals) -> Iterator[pa.RecordBatch]:
    """Yield rows (key, payload): the signature of each survivor in a part, by the key that has it in `known`."""
    wanted = {best: key for key, (_, best) in known.items() if key[:1] != URL}
    schema = pa.schema([pa.field("key", pa.binary()), pa.field("payload", pa.binary())])
    for facts in facts_of_part(task):
        owns = [NOT_DROPPED + order for order in facts.orders]
        found = [(wanted[own], signed) for own, signed in zip(owns, facts.signatures) if own in wanted]
        columns = [pa.array([row[column] for row in found], pa.binary()) for column in range(2)]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def earlier_signatures(
    spark: SparkSession, inputs: Mapping[str, TableVersion], counted: DataFrame, config: DedupConfig
) -> DataFrame:
    """Return rows (key, payload): the signature of each survivor that is a document of an earlier snapshot.

    `counted` has rows (key, best) of clusters, in which `best` is the keep order of the survivor. Only documents that
    lead a bucket of their snapshot's index have a signature there.
    """
    digest = DIGEST_BYTES if config.exact != "off" else 0
    start = F.octet_length("best") - digest - NODE_BYTES + 1
    chosen = counted.select("key", F.substring("best", start, F.lit(NODE_BYTES)).alias("node"))
    earlier = chosen.where(part_number("node") >= EARLIER).distinct()
    signature = F.expr(f"substring(payload, {digest + 1})").alias("payload")
    return earlier.join(Indexes(spark, inputs).find(earlier, "payload"), "node").select("key", signature)


def rest_tallies_of_part(task: SurvivorsTask, rows: Sequence[pa.RecordBatch], rounds: int) -> Iterator[pa.RecordBatch]:
    """Yield the counts (TALLIES), by cluster, of the documents of a part that are no copies after `rounds` rounds."""
    known, comparison = known_totals_of(iter(rows)), task.comparison(known_signatures_of(rows), rounds)
    tally: dict[bytes, tuple[int, bytes]] = {}
    for facts in facts_of_part(task):
        if comparison is not None:
            rest_tallies(facts, known, comparison, tally)
    yield tallies(tally, task.part.ordinal)


def earlier_urls(spark: SparkSession, inputs: Mapping[str, TableVersion]) -> DataFrame:
    """Return the counts (TALLIES) of URLs in earlier snapshots; `first` sorts before all documents of this run."""
    frame = read_files(spark, inputs, ("representatives", "urls/"), COUNTED, COUNTED_DDL)
    return frame.select("key", F.lit(EARLIER_PART).alias("part"), "count", F.lit(b"").alias("first"))


def earlier_clusters(spark: SparkSession, inputs: Mapping[str, TableVersion], config: DedupConfig) -> DataFrame:
    """Return the counts (TALLIES) of those clusters of earlier snapshots to which documents of this snapshot belong."""
    index = inputs["index"]
    files = [(index.folder, path) for path in index.manifest.paths_of("merged/")]
    merged = dataframe_from_tasks(spark, partial(rows_of_file, schema=MERGED), files, MERGED_DDL)
    tables = [
        table for key, table in inputs.items() if key.startswith(EARLIER_NAME) and key.endswith("representatives")
    ]
    counted = partial(earlier_counts, end=1 + order_bytes(config))  # a byte before the keep order marks drops
    frame = dataframe_from_tasks(spark, counted, numbered_files(tables, "clusters/"), COUNTED_DDL)
    joined = frame.join(merged, frame["key"] == merged["earlier"])
    return joined.select(F.col("cluster").alias("key"), F.lit(EARLIER_PART).alias("part"), "count", "first")


def earlier_counts(task: tuple[Store, CheckedPath, int], end: int) -> Iterator[pa.RecordBatch]:
    """Yield the counts (COUNTED) of a file of an earlier run, (folder, path, number of the run's first file).

    The part in a keep order, which ends at byte `end` of `first`, is the number of its file of leaders.
    """
    folder, path, number = task
    for batch in rows_of_file((folder, path), COUNTED):
        if batch.num_rows:
            first = batch.column("first")
            orders = rows_of_bytes(first, len(first[0].as_py()))
            numbered = binary_array(number_leaders(orders, number, end))
            yield pa.RecordBatch.from_arrays([*batch.columns[:2], numbered], schema=COUNTED)


def facts_of_part(task: SurvivorsTask) -> Iterator[DedupFacts]:
    """Yield the `DedupFacts` of the documents of a part, one batch at a time."""
    columns = facts_columns(task.config)
    if task.removed:
        columns["documents"] = list(dict.fromkeys([*columns["documents"], *RECOGNIZED_BY]))
    for batch in read_measured(task.part, columns):
        facts = facts_of(batch, task.part.ordinal, task.config)
        taken = taken_down_of(batch, facts.dropped, task.removed)
        yield replace(facts, taken_down=taken) if taken else facts


def taken_down_of(
    batch: pa.RecordBatch, dropped: Sequence[bool], removed: Sequence[RemovedDocuments]
) -> frozenset[int]:
    """Return the numbers of the documents of a batch that are not dropped and that a takedown has removed.

    The batch has the columns RECOGNIZED_BY if there are any takedowns.
    """
    rows = zip(dropped, *(batch.column(name).to_pylist() for name in RECOGNIZED_BY), strict=True) if removed else ()
    return frozenset(
        number
        for number, (is_dropped, identifier, url, domain, parents) in enumerate(rows)
        if not is_dropped and any(each.find(identifier, url or "", domain, parents) is not None for each in removed)
    )


def url_tallies_of_part(task: SurvivorsTask) -> Iterator[pa.RecordBatch]:
    """Yield the counts (TALLIES) of the URLs in a part. Documents that an earlier verdict drops do not count."""
    tally: dict[bytes, tuple[int, bytes]] = {}
    for facts in facts_of_part(task):
        url_tallies(facts, tally)
    yield tallies(tally, task.part.ordinal)


def cluster_tallies_of_part(task: SurvivorsTask, known: KnownTotals) -> Iterator[pa.RecordBatch]:
    """Yield the counts (TALLIES) of the clusters in a part. Documents without a copy do not count."""
    tally: dict[bytes, tuple[int, bytes]] = {}
    for facts in facts_of_part(task):
        cluster_tallies(facts, known, tally, alone=False)
    yield tallies(tally, task.part.ordinal)


def tallies(tally: Mapping[bytes, tuple[int, bytes]], ordinal: int) -> pa.RecordBatch:
    """Return the counts of part `ordinal` as rows (TALLIES), sorted by key."""
    keys = sorted(tally)
    columns = [
        pa.array(keys, pa.binary()),
        pa.array(np.full(len(keys), ordinal, np.int32)),
        pa.array([tally[key][0] for key in keys], pa.int64()),
        pa.array([tally[key][1] for key in keys], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TALLIES)


def known_totals_of(batches: Iterator[pa.RecordBatch]) -> dict[bytes, tuple[int, bytes]]:
    """Return {kind and key: (number of documents, keep order of the first)} from rows of `totals_for_parts`."""
    known: dict[bytes, tuple[int, bytes]] = {}
    for batch in batches:
        keys, counts, best = (batch.column(name).to_pylist() for name in ("key", "total", "best"))
        known.update(zip(keys, zip(counts, best)))
    return known


def known_signatures_of(batches: Sequence[pa.RecordBatch]) -> dict[bytes, bytes]:
    """Return the signatures of survivors by key, from the rows of `rounds_of_survivors`; empty for other rows."""
    known: dict[bytes, bytes] = {}
    for batch in batches:
        if "payload" in batch.schema.names:
            signed = batch.filter(batch.column("payload").is_valid())
            known.update(zip(signed.column("key").to_pylist(), signed.column("payload").to_pylist()))
    return known


def write_parts(build: StepContext, rows: DataFrame, tasks: Sequence[SurvivorsTask], rounds: int) -> PartResults:
    """Write one part of the table `dedup` for each part of `documents`; return the results.

    `rows` are those of `totals_for_parts`, or of `rounds_of_survivors` after so many rounds.
    """

    def write(task: SurvivorsTask, batches: Iterator[pa.RecordBatch], _retried: bool) -> PartResult:
        held = list(batches)
        return write_survivors(task, known_totals_of(iter(held)), task.comparison(known_signatures_of(held), rounds))

    return run_part_writers(build, rows, tasks, write, "choose survivors")


def write_survivors(
    task: SurvivorsTask, known: KnownTotals, comparison: SurvivorComparison | None = None
) -> PartResult:
    """Write one part of the table `dedup`.

    With `write_index`, also write the counts of the part's clusters and URLs to files of the table `representatives`.
    """

    def fill(output: PartOutput) -> None:
        clusters: dict[bytes, tuple[int, bytes]] = {}
        urls: dict[bytes, tuple[int, bytes]] = {}
        reasons: list[str | None] = []
        for facts in facts_of_part(task):
            for decision in decide(facts, known, comparison):
                write_verdict(decision, task.config, output.books)
                reasons.append(decision.reason)
                if comparison is not None and decision.reason == NEAR:
                    output.books.tally(SIMILARITY, similarity_step(decision.value))
                if task.sources is not None and decision.part is not None:
                    other = EARLIER_SNAPSHOT if decision.part >= EARLIER else task.sources[decision.part]
                    output.books.tally(LOST_TO, f"{task.sources[task.part.ordinal]}/{other}")
                output.write(decision.row)
            if task.config.write_index:
                cluster_tallies(facts, known, clusters, alone=True)
                url_tallies(facts, urls)
        output.figures[COUNTS] = count_groups(task, reasons)
        if task.config.write_index:
            for name, counted in (("clusters", clusters), ("urls", urls)):
                rows = tallies(counted, task.part.ordinal)
                key = f"{name}/{part_key(task.part.ordinal)}"
                output.files[name] = write_file(iter([rows]), task.representatives, key, COUNTED)

    taken = {TAKEN_DOWN: TAKEN_DOWN_MEANING} if task.removed else {}
    reasons = [(DEDUP.name, {**DEDUP.reasons, **taken})]
    tables = {"dedup": TableTarget(task.dedup, DEDUP_SCHEMA)}
    return write_part(PartTarget(task.part.ordinal, tables, reasons, raises=False), fill)


def similarity_step(value: float | None) -> str:
    """Return the lower edge of the similarity's step of 0.05, such as `0.65`; NOT_COMPARED if it is not known."""
    return NOT_COMPARED if value is None else f"{int(value * 20 + 1e-6) / 20:.2f}"


def write_verdict(decision: Decision, config: DedupConfig, books: DropCounter) -> None:
    """Set the drop reason or the weight in a row of the table `dedup`, and count the row in `books`."""
    row, reason = decision.row, decision.reason
    row["drop_stage"] = row["weight"] = None
    if reason is not None:
        set_verdict(row, DEDUP.name, Drop(reason, decision.value if reason in (EXACT, NEAR) else None))
    else:
        row["weight"] = weight_of(decision.total, config)
        if row["cluster_size"] > 1 and decision.round == 0:
            books.tally("cluster_sizes", str(row["cluster_size"]))
    books.enter(row, decision.chars)
