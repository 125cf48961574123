"""Bench of connected components: `python -m bench.components [--scale 1.0] [--plain]`.

For four graphs whose edges lie in sixteen files in no order: seconds, CPU seconds of the JVM and its workers, what
was shuffled, rounds; by rounds alone in four partitions throughout, by rounds alone in as many as pay, and with the
default finish. With --plain also large-star/small-star in DataFrame expressions. Links are compared; a first run warms
up.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import pipeline.dedup.components as module
from jobs.spark_session import SparkConfig, open_session
from pipeline.dedup.components import components
from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keep_order import NODE_BYTES, binary_array
from pipeline.engine.materialize import FrameStore
from pipeline.engine.tasks import newest_stage, work_since
from schemas.storage import Store

PARTITIONS = 4
FILES = 16
SETTLED_SECONDS = 1.0
"""Tasks report what they shuffled a moment after they end."""


def graphs(scale: float) -> dict[str, tuple[np.ndarray, int]]:
    """Edges between numbered nodes, and the number of nodes."""
    rng = np.random.default_rng(1)
    million, tenth = round(1e6 * scale), round(1e5 * scale)
    giant = rng.integers(0, 4 * tenth, (9 * tenth, 2))
    small = 4 * tenth + np.stack([np.arange(0, 3 * tenth, 3), np.arange(1, 3 * tenth, 3)], axis=1)
    return {
        "random": (rng.integers(0, million // 2, (million, 2)), million // 2),
        "chain": (np.stack([np.arange(tenth - 1), np.arange(1, tenth)], axis=1), tenth),
        "star": (np.stack([np.full(million, million // 2), np.arange(million)], axis=1), million),
        "giant+small": (np.concatenate([giant, small, small + 1]), 7 * tenth),
    }


def write_edges(pairs: np.ndarray, nodes: int, folder: Path) -> None:
    """The edges as Parquet files of (a, b), nodes under random names."""
    rng = np.random.default_rng(2)
    names = rng.integers(0, 256, (nodes, NODE_BYTES), np.uint8)
    folder.mkdir()
    for number, part in enumerate(np.array_split(rng.permutation(pairs), FILES)):
        ends = [binary_array(names[part[:, end]]) for end in (0, 1)]
        pq.write_table(pa.table(dict(zip("ab", ends))), folder / f"{number}.parquet")


def plain(edges: DataFrame) -> tuple[DataFrame, int]:
    """(node, cluster) and rounds of large-star and small-star in DataFrame expressions, a local checkpoint a round."""
    pairs = edges.select(F.greatest("a", "b").alias("u"), F.least("a", "b").alias("v")).where("u != v").distinct()
    pairs = pairs.localCheckpoint()
    state, rounds = None, 0
    while True:
        both = pairs.union(pairs.select("v", "u").toDF("u", "v"))
        smallest = both.groupBy("u").agg(F.least(F.min("v"), F.first("u")).alias("m"))
        large = both.join(smallest, "u").where("v > u").select(F.col("v").alias("u"), F.col("m").alias("v")).distinct()
        smallest = large.groupBy("u").agg(F.min("v").alias("m"))
        members = large.join(smallest, "u").select(F.col("v").alias("u"), F.col("m").alias("v")).where("u != v")
        following = members.union(smallest.toDF("u", "v")).distinct().localCheckpoint()
        pairs.unpersist()
        pairs, rounds = following, rounds + 1
        found = pairs.agg(F.count("*"), F.bit_xor(F.xxhash64("u", "v"))).first()
        if found == state:
            roots = pairs.select("v").distinct().select(F.col("v").alias("u"), "v")
            return pairs.union(roots).toDF("node", "cluster"), rounds
        state = found


def cpu_seconds() -> float:
    """CPU time of this process and everything below it (Linux)."""
    parents, used = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry)], used[int(entry)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = 0
    for process, ticks in used.items():
        while process > 1 and process != os.getpid():
            process = parents.get(process, 0)
        ours += ticks if process == os.getpid() else 0
    return ours / os.sysconf("SC_CLK_TCK")


def line(spark: SparkSession, label: str, work: Callable[[], tuple[DataFrame, object]]) -> tuple[int, int]:
    """Print what one way took; returns how many links it found and their digest."""
    before, started, cpu = newest_stage(spark), time.monotonic(), cpu_seconds()
    links, rounds = work()
    count, digest = links.agg(F.count("*"), F.bit_xor(F.xxhash64("node", "cluster"))).first()
    took, cpu = time.monotonic() - started, cpu_seconds() - cpu
    time.sleep(SETTLED_SECONDS)
    shuffled = work_since(spark, before).shuffled_bytes / 1e6
    print(f"{label:<36} {took:6.1f} s {cpu:6.1f} CPU s {shuffled:7.1f} MB shuffled   {rounds}", flush=True)
    return count, digest


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    master = SparkConfig(master="local[2,4]", driver_memory="2g", shuffle_partitions=PARTITIONS)
    spark = open_session(master, "bench")
    fewest, finish = module.FEWEST_EDGES, DedupConfig().finish_edges
    with tempfile.TemporaryDirectory() as temporary:

        def ours(edges: DataFrame, finish_edges: int, fewest_edges: int) -> tuple[DataFrame, object]:
            module.FEWEST_EDGES = fewest_edges
            folder = tempfile.mkdtemp(dir=temporary)
            found = components(edges, FrameStore(spark, Store(folder)), finish_edges, PARTITIONS)
            return found.links, f"{found.rounds} rounds, edges {' '.join(map(str, found.edges_by_round))}"

        for name, (pairs, nodes) in {"warm-up": graphs(0.1)["random"], **graphs(arguments.scale)}.items():
            write_edges(pairs, nodes, Path(temporary) / name)
            edges = spark.read.parquet(str(Path(temporary) / name))
            ways = {
                "rounds, 4 partitions": lambda edges=edges: ours(edges, 0, 1),
                "rounds": lambda edges=edges: ours(edges, 0, fewest),
                f"finish of {finish:,}": lambda edges=edges: ours(edges, finish, fewest),
            }
            if arguments.plain:
                ways["DataFrame expressions"] = lambda edges=edges: plain(edges)
            found = {line(spark, f"{name}: {label}", work) for label, work in ways.items()}
            print(f"{'':<36} {'equal links' if len(found) == 1 else f'LINKS DIFFER: {found}'}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
