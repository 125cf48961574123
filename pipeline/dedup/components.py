"""Connected components without a single-node step that grows: large-star/small-star rounds, then a bounded finish.

Source: Kiveris et al. 2014, "Connected Components in MapReduce and Beyond", section 3. Each round keeps the components
and shortens paths; at a fixed point every document points at the smallest id of its component.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from schemas.errors import ContractError

MAX_ROUNDS = 64
LINKS = pa.schema([pa.field("doc", pa.binary()), pa.field("cluster", pa.binary())])


def components(edges: DataFrame, finish_edges: int) -> tuple[DataFrame, int]:
    """(doc, cluster) for every document with an edge, and the number of rounds. `edges` has columns a, b.

    Raises ContractError if the rounds do not converge.
    """
    pairs = edges.select(F.greatest("a", "b").alias("u"), F.least("a", "b").alias("v")).where("u != v").distinct()
    pairs = pairs.localCheckpoint()
    state = _state(pairs)
    for rounds in range(MAX_ROUNDS):
        if state[0] <= finish_edges:
            return _finish(pairs), rounds
        following = small_star(large_star(pairs)).localCheckpoint()
        pairs.unpersist()
        following_state = _state(following)
        if following_state == state:
            roots = following.select(F.col("v").alias("doc")).distinct().withColumn("cluster", F.col("doc"))
            return following.select(F.col("u").alias("doc"), F.col("v").alias("cluster")).union(roots), rounds + 1
        pairs, state = following, following_state
    raise ContractError(f"dedup: promised clusters within {MAX_ROUNDS} rounds, found {state[0]} edges still moving")


def _state(pairs: DataFrame) -> tuple[int, int]:
    row = pairs.agg(F.count("*").alias("n"), F.bit_xor(F.xxhash64("u", "v")).alias("x")).first()
    return (row.n, row.x or 0) if row is not None else (0, 0)


def large_star(pairs: DataFrame) -> DataFrame:
    """Links every larger neighbour of a node to the smallest of its neighbourhood, itself included."""
    both = pairs.union(pairs.select(F.col("v").alias("u"), F.col("u").alias("v")))
    smallest = both.groupBy("u").agg(F.least(F.min("v"), F.first("u")).alias("m"))
    linked = both.join(smallest, "u").where("v > u").select(F.col("v").alias("u"), F.col("m").alias("v"))
    return linked.where("u != v").distinct()


def small_star(pairs: DataFrame) -> DataFrame:
    """Links a node and its smaller neighbours to the smallest of them. `pairs` has u > v."""
    smallest = pairs.groupBy("u").agg(F.min("v").alias("m"))
    members = pairs.join(smallest, "u").select(F.col("v").alias("u"), F.col("m").alias("v")).where("u != v")
    return members.union(smallest.select("u", F.col("m").alias("v"))).distinct()


def _finish(pairs: DataFrame) -> DataFrame:
    return pairs.coalesce(1).mapInArrow(finish, "doc binary, cluster binary")


def finish(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """(doc, cluster) of all edges of the one partition; its size is bounded by the caller."""
    table = pa.Table.from_batches(batches, pa.schema([pa.field("u", pa.binary()), pa.field("v", pa.binary())]))
    if not table.num_rows:
        return
    ends = pa.concat_arrays([*table.column("u").chunks, *table.column("v").chunks])
    width = len(ends[0].as_py())
    flat = np.frombuffer(b"".join(ends.to_pylist()), dtype=f"V{width}")
    order = flat.view(np.uint8).reshape(-1, width)
    nodes, codes = np.unique(order, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    half = table.num_rows
    graph = coo_matrix((np.ones(half, np.int8), (codes[:half], codes[half:])), shape=(len(nodes), len(nodes)))
    _, labels = connected_components(graph, directed=False)
    first = np.full(labels.max() + 1, len(nodes), np.int64)
    np.minimum.at(first, labels, np.arange(len(nodes)))
    docs = [row.tobytes() for row in nodes]
    clusters = [docs[i] for i in first[labels]]
    yield pa.RecordBatch.from_arrays([pa.array(docs, pa.binary()), pa.array(clusters, pa.binary())], schema=LINKS)
