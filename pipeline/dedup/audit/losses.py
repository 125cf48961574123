"""Sources and domains of which deduplication removed a large share, with pairs of documents to look at.

A whole source can be lost to a template, a consent page or a wrong setting, and a total over the run does not show it.
Each part counts its own documents by source and domain. Spark sums the counts and chooses the largest losses, so the
list of domains never reaches the driver.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from pipeline.dedup.audit.sample import document_keys
from pipeline.dedup.config import EXACT, NEAR, SAME_URL, AuditConfig
from pipeline.engine.parquet import Part, read_measured
from pipeline.engine.spark import dataframe_from_tasks, persist_on_disk
from schemas.tables import DROPPED_BEFORE

ALARM = "alarm"
SOURCES, DOMAINS = "source", "domain"
MAX_LISTED = 20
"""Most sources, and most domains, that are listed: those with the most removed documents."""
PAIRS = 3
"""Most pairs that are listed for a source or a domain: the removed documents with the lowest hashes."""
COUNTS = pa.schema(
    [
        pa.field("kind", pa.string()),
        pa.field("name", pa.string()),
        pa.field("documents", pa.int64()),
        pa.field("removed", pa.int64()),
        pa.field("key", pa.int64()),
        pa.field("doc", pa.binary()),
        pa.field("survivor", pa.binary()),
    ]
)
"""Rows of counts have no `key`, `doc` and `survivor`. Rows of removed documents have counts of 0."""
COUNTS_DDL = "kind string, name string, documents long, removed long, key long, doc binary, survivor binary"


@dataclass(frozen=True)
class Loss:
    """A source or a domain that lost a large share of its documents as copies."""

    kind: str
    """SOURCES or DOMAINS."""
    name: str
    documents: int
    """Documents that no earlier verdict drops, and of which no other of the same URL is kept."""
    removed: int
    """Documents of these that were dropped as exact or near copies."""
    pairs: Sequence[tuple[bytes, bytes]]
    """Some removed documents, each with the one that is kept in its place."""


def largest_losses(spark: SparkSession, parts: Sequence[Part], audit: AuditConfig) -> list[Loss]:
    """Return the sources and domains that lost more than `audit.alarm_share`, those with most removed documents first.

    Sources and domains with fewer than `audit.alarm_documents` documents are left out.
    """
    tasks = [(part, audit) for part in parts]
    counts = persist_on_disk(dataframe_from_tasks(spark, losses_of_part, tasks, COUNTS_DDL))
    sums = counts.groupBy("kind", "name").agg(F.sum("documents").alias("documents"), F.sum("removed").alias("removed"))
    lost = sums.where(
        (F.col("documents") >= audit.alarm_documents)
        & (F.col("removed") > F.lit(audit.alarm_share) * F.col("documents"))
    )
    listed = _first(lost, ["kind"], [F.desc("removed"), F.asc("name")], MAX_LISTED).collect()
    pairs: dict[tuple[str, str], list[tuple[bytes, bytes]]] = {}
    if listed:
        chosen = spark.createDataFrame([(row["kind"], row["name"]) for row in listed], "kind string, name string")
        removed = counts.where(F.col("key").isNotNull()).join(F.broadcast(chosen), ["kind", "name"])
        for row in _first(removed, ["kind", "name"], [F.asc("key"), F.asc("doc")], PAIRS).orderBy("key").collect():
            pair = bytes(row["doc"]), bytes(row["survivor"])
            pairs.setdefault((row["kind"], row["name"]), []).append(pair)
    counts.unpersist()
    losses = [
        Loss(row["kind"], row["name"], row["documents"], row["removed"], pairs[row["kind"], row["name"]])
        for row in listed
    ]
    return sorted(losses, key=lambda loss: (loss.kind != SOURCES, -loss.removed, loss.name))


def _first(frame: DataFrame, groups: list[str], order: list[Column], most: int) -> DataFrame:
    place = F.row_number().over(Window.partitionBy(*groups).orderBy(*order))
    return frame.withColumn("place", place).where(F.col("place") <= most)


def losses_of_part(task: tuple[Part, AuditConfig]) -> Iterator[pa.RecordBatch]:
    """Yield the counts of a part by source and by domain, and some removed documents of each (COUNTS)."""
    part, audit = task
    columns = {"documents": ["source", "domain"], "dedup": ["survivor", "drop_rule"]}
    counts: dict[tuple[str, str], list[int]] = {}
    lowest: dict[tuple[str, str], list[tuple[int, bytes, bytes]]] = {}
    for batch in read_measured(part, columns):
        batch = batch.filter(
            pc.invert(pc.is_in(batch.column("drop_rule"), value_set=pa.array([DROPPED_BEFORE, SAME_URL])))
        )
        keys = document_keys(batch.column("doc_id"), audit.seed, ALARM)
        is_removed = pc.is_in(batch.column("drop_rule"), value_set=pa.array([EXACT, NEAR])).to_numpy(False)
        for kind in (SOURCES, DOMAINS):
            names, codes = np.unique(
                np.array(batch.column(kind).fill_null("").to_pylist(), object), return_inverse=True
            )
            totals, removed = (np.bincount(codes, weights, len(names)) for weights in (None, is_removed))
            for name, total, lost in zip(names.tolist(), totals.tolist(), removed.tolist()):
                if name:
                    count = counts.setdefault((kind, name), [0, 0])
                    count[0], count[1] = count[0] + total, count[1] + int(lost)
            order = np.flatnonzero(is_removed)
            order = order[np.argsort(keys[order], kind="stable")]
            ids, kept = batch.column("doc_id"), batch.column("survivor")
            seen = np.zeros(len(names), np.int64)
            for row in order.tolist():
                seen[codes[row]] += 1
                if seen[codes[row]] <= PAIRS and (name := names[codes[row]]):
                    found = int(keys[row]), ids[row].as_py(), kept[row].as_py()
                    lowest[kind, name] = sorted([*lowest.get((kind, name), []), found])[:PAIRS]
    rows: list[tuple[object, ...]] = [(*key, *count, None, None, None) for key, count in sorted(counts.items())]
    rows += [(*key, 0, 0, *found) for key, held in sorted(lowest.items()) for found in held]
    yield pa.RecordBatch.from_pylist([dict(zip(COUNTS.names, row)) for row in rows], schema=COUNTS)
