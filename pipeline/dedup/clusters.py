"""The tables `clusters` and `index`: the groups of documents that are copies, and the snapshot index.

Clusters depend on documents alone, not on verdicts. Other quality thresholds therefore choose other survivors from the
same clusters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.dedup.candidates import CopySearch, CopySearchOutcome, find_copies
from pipeline.dedup.components import components
from pipeline.dedup.config import DedupConfig
from pipeline.dedup.index import (
    LEADERS,
    MERGED,
    NUMBERS,
    Indexes,
    numbers_of,
    part_number,
    snapshots_of,
    write_file,
    write_files,
)
from pipeline.dedup.keep_order import EARLIER, Bytes, binary_array
from pipeline.dedup.keys import KEYS, DedupTask, DedupWindow, layout, num_keys, payloads_of, read_windows
from pipeline.dedup.verify import BEST, FAILED, JOINED
from pipeline.engine.materialize import FrameStore
from pipeline.engine.parquet import parts_of
from pipeline.engine.part import SCRATCH, PartOutput, PartResult, PartResults, PartTarget, TableTarget, write_part
from pipeline.engine.progress import doing
from pipeline.engine.spark import dataframe_from_tasks, run_part_writers
from pipeline.engine.stage import Row
from pipeline.engine.step import StepContext, TableResult, combine_parts
from pipeline.minhash.stage import SignatureConfig
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import Counts, part_key
from schemas.storage import Store
from schemas.tables import CLUSTERS

EDGES = pa.schema([pa.field("a", pa.binary()), pa.field("b", pa.binary())])
EDGES_DDL = "a binary, b binary"
READ = ("documents", "text", "templates", "scores")
PARTITION_ROWS = 4_000_000
"""Most rows of keys in a shuffle partition, on average, so that its memory does not grow with the data."""


@dataclass(frozen=True)
class ClustersTask:
    """Input of `write_clusters`: a part of the documents with settings, and the folders of `clusters` and `index`."""

    task: DedupTask
    clusters: Store
    index: Store


@dataclass
class ClusterLinks:
    """By doc_id: the cluster and the most similar document of each document with a copy, for one part."""

    cluster: dict[bytes, bytes] = field(default_factory=dict)
    """Cluster of each document that is joined with another."""
    similar: dict[bytes, tuple[float, bytes]] = field(default_factory=dict)
    """Highest measured similarity of each document to another, and that other document."""


def build_clusters(build: StepContext) -> dict[str, TableResult]:
    """Build the tables `clusters`, one part for each part of `documents`, and `index`."""
    config = build.recipe.section("dedup", DedupConfig)
    signature = build.recipe.section("signature", SignatureConfig)
    tables = {name: build.inputs[name] for name in READ if name in build.inputs}
    tasks = [
        DedupTask(part, config, own.recipe.section("signature", SignatureConfig))
        for part, own in build.by_part(parts_of(tables))
    ]
    scratch = FrameStore(build.spark, build.folders["clusters"].child(SCRATCH))
    indexes = Indexes(build.spark, {name: table for name, table in build.inputs.items() if name not in READ})
    rows = build.inputs["documents"].manifest.content.counts.rows_kept * num_keys(config, signature)
    partitions = config.partitions or max(build.spark.sparkContext.defaultParallelism, -(-rows // PARTITION_ROWS))
    search = CopySearch(build.spark, tasks, scratch, partitions, indexes)
    outcome = find_copies(search)
    linked = components(collect_edges(search, outcome), scratch, config.finish_edges, partitions)
    links = linked.links
    writers = [ClustersTask(task, build.folders["clusters"], build.folders["index"]) for task in tasks]
    linked_rows = rows_of_parts(links, outcome, len(tasks))
    results = run_part_writers(build, linked_rows, writers, write_clusters, "write clusters")
    built = combine_parts(results, ("clusters",)) | {"index": build_index(results, outcome, links, writers)}
    built["index"].figures["snapshots"] = snapshots_of(build.splits)
    if config.write_index:
        built["index"].figures[NUMBERS] = numbers_of(build.recipe)
    if config.near and signature.family != "simhash":
        built["clusters"].figures["layout"] = dict(zip(("bands", "rows"), layout(config, signature)))
    built["clusters"].notes |= {
        # equal rows of a pair in two batches are compared twice, so these counts depend on the batches
        "pairs": [{kind: kept[kind].rows for kind in (JOINED, FAILED)} for kept in outcome.rounds],
        "rounds": linked.rounds,
        "edges_by_round": list(linked.edges_by_round),
    }
    scratch.clear()
    return built


def collect_edges(search: CopySearch, outcome: CopySearchOutcome) -> DataFrame:
    """Return the edges (a, b) of the graph of copies, whose connected components are the clusters.

    An edge links two copies, or a document and the cluster of an earlier snapshot that contains its copy.
    """
    equal = dataframe_from_tasks(search.spark, equal_edges_of_part, search.tasks, EDGES_DDL)
    similar = reduce(DataFrame.union, outcome.similar(JOINED)).select(
        F.col("node").alias("a"), F.col("other").alias("b")
    )
    if not search.indexes:
        return equal.union(similar)
    nodes = similar.select(F.explode(F.array("a", "b")).alias("node"))
    roots = search.indexes.roots(nodes)
    ends = similar.join(roots.withColumnsRenamed({"node": "b", "root": "b_root"}), "b", "left")
    ends = ends.join(roots.withColumnsRenamed({"node": "a", "root": "a_root"}), "a", "left")
    contracted = ends.select(F.coalesce("a_root", "a").alias("a"), F.coalesce("b_root", "b").alias("b"))
    return equal.union(contracted).union(search.indexes.merged())


def equal_edges_of_part(task: DedupTask) -> Iterator[pa.RecordBatch]:
    """Yield the edges between equal documents of a part, at most one for each group in a `DedupWindow`.

    An edge links the first document of a group in keep order with the one of smallest doc_id, if they differ.
    """
    # The other documents of a group need no edge: `clusters_of` gives them the cluster of the first one.
    for window in read_windows(task):
        chosen = np.flatnonzero(window.first & (window.smallest != window.leads))
        ends = (window.nodes[chosen], window.nodes[window.smallest[chosen]])
        yield pa.RecordBatch.from_arrays([binary_array(end) for end in ends], schema=EDGES)


def rows_of_parts(links: DataFrame, outcome: CopySearchOutcome, parts: int) -> DataFrame:
    """Return rows (node, other, similarity, part) about the documents of this run.

    `part` is the part number of `node`. If `similarity` is null, `other` is the cluster of `node`. Otherwise, `other`
    is a document with this similarity to `node`.
    """
    rows = links.select("node", F.col("cluster").alias("other"), F.lit(None).cast("float").alias("similarity"))
    for frame in outcome.similar(JOINED, BEST):
        rows = rows.union(frame)
    rows = rows.withColumn("part", part_number("node")).where(F.col("part") < parts)
    return rows.withColumn("part", F.col("part").cast("int"))


def links_of(batches: Iterator[pa.RecordBatch]) -> ClusterLinks:
    """Return the clusters of one part's documents, and for each the most similar document found.

    The rows (node, other, similarity) are those of `rows_of_parts` for this part.
    """
    links = ClusterLinks()
    for batch in batches:
        nodes, others, similarities = (batch.column(name).to_pylist() for name in ("node", "other", "similarity"))
        for node, other, similarity in zip(nodes, others, similarities):
            doc, other = node[:DOC_ID_BYTES], other[:DOC_ID_BYTES]
            if similarity is None:
                links.cluster[doc] = other
                continue
            best = links.similar.get(doc)
            if best is None or (-similarity, other) < (-best[0], best[1]):
                links.similar[doc] = (similarity, other)
    return links


def write_clusters(task: ClustersTask, batches: Iterator[pa.RecordBatch], _retried: bool) -> PartResult:
    """Write one part of the table `clusters` from the rows of `rows_of_parts` for it.

    With `write_index`, also write the part's possible bucket leaders to a file of the table `index`.
    """
    own, links = task.task, links_of(batches)
    number = own.part.ordinal

    def fill(output: PartOutput) -> None:
        leaders: list[pa.RecordBatch] = []
        rows = joined = 0
        for window in read_windows(own):
            clusters = clusters_of(window, links)
            for row in part_rows(window, clusters, links):
                output.write(row)
                rows += 1
                joined += row["similarity"] is not None
            if own.dedup.write_index:
                leaders.append(leaders_of(window, clusters, own))
        if own.dedup.write_index:
            output.files["leaders"] = write_file(iter(leaders), task.index, f"leaders/{part_key(number)}", LEADERS)
        output.counts = Counts(rows_in=rows, rows_kept=rows)
        output.figures["joined_documents"] = joined

    return write_part(PartTarget(number, {"clusters": TableTarget(task.clusters, CLUSTERS)}), fill)


def clusters_of(window: DedupWindow, links: ClusterLinks) -> list[bytes]:
    """Return, for every document of a window, the smallest doc_id in its cluster, which names the cluster."""
    ids = [node.tobytes() for node in window.nodes[:, :DOC_ID_BYTES]]
    places = zip(window.leads.tolist(), window.smallest.tolist())
    return [links.cluster.get(ids[lead]) or ids[smallest] for lead, smallest in places]


def part_rows(window: DedupWindow, clusters: Sequence[bytes], links: ClusterLinks) -> Iterator[Row]:
    """Yield the row of the table `clusters` for every document of a window.

    `similarity` is the similarity to the most similar document found. It is 1 if the window contains an equal document,
    and null if no copy was found.
    """
    ids = [node.tobytes() for node in window.nodes[:, :DOC_ID_BYTES]]
    leads = window.leads.tolist()
    equals: dict[int, int] = {}
    for index, lead in enumerate(leads):
        if index != lead:
            equals.setdefault(lead, index)
    for index, (doc, lead, cluster) in enumerate(zip(ids, leads, clusters)):
        similarity, other = links.similar.get(doc, (None, None))
        if index != lead:
            similarity, other = 1.0, ids[lead]
        elif index in equals:
            similarity, other = 1.0, ids[equals[index]]
        yield {"doc_id": doc, "cluster": cluster, "similarity": similarity, "leader": other}


def leaders_of(window: DedupWindow, clusters: Sequence[bytes], task: DedupTask) -> pa.RecordBatch:
    """Return (doc_id, cluster, payload) of the documents of a window that may lead a bucket.

    Of equal documents, only the first in keep order may lead one.
    """
    first = window.first
    chosen = np.flatnonzero(first)
    payload = payloads_of(window.batch.filter(pa.array(first)), task.dedup)
    cluster = pa.array([clusters[index] for index in chosen.tolist()], pa.binary())
    ids: Bytes = window.nodes[first][:, :DOC_ID_BYTES]
    return pa.RecordBatch.from_arrays([binary_array(ids), cluster, binary_array(payload)], schema=LEADERS)


def build_index(
    results: PartResults, outcome: CopySearchOutcome, links: DataFrame, tasks: Sequence[ClustersTask]
) -> TableResult:
    """Write the files of the table `index`.

    With `write_index`, the files hold the bucket leaders of this snapshot. With `indexes`, they also hold clusters of
    earlier snapshots: those that contain a copy of a document of this snapshot, each with its new cluster.
    """
    built = TableResult()
    doing("write the snapshot index")
    if tasks and tasks[0].task.dedup.indexes:
        earlier = links.where(part_number("node") >= EARLIER).select(
            F.substring("node", 1, DOC_ID_BYTES).alias("earlier"),
            F.substring("cluster", 1, DOC_ID_BYTES).alias("cluster"),
        )
        for file in write_files(earlier, earlier.count(), tasks[0].index, "merged", MERGED):
            built.add_file(file)
    for number, leads in enumerate(outcome.leads):
        for file in write_files(leads, leads.count(), tasks[0].index, f"bands/{number}", KEYS):
            built.add_file(file)
    if outcome.leads:
        for part in results.parts:
            built.add_file(part.files["leaders"])
    built.count_rows()
    return built
