"""The snapshot index: the data by which later snapshots find copies of its documents without reading its text.

It has three kinds of files: `bands` (key → leader of its bucket, the first document in keep order; cut by ranges of
keys, for each round), `leaders` (document → its payload and cluster, a file for each part of the run), and `merged`
(cluster of an earlier snapshot → the cluster that it joined). The survivor of each cluster is in the table
`representatives`, which is written after verdicts. Later runs read `bands` and `leaders` by file, and shuffle only
what they find.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.dedup.config import DEDUP, DedupConfig
from pipeline.dedup.keep_order import EARLIER, EARLIER_CLUSTER, PART_BYTES
from pipeline.dedup.key_ranges import IndexRange, key_ranges, merge_buckets, range_sql
from pipeline.dedup.keys import KEYS_DDL, check_method
from pipeline.engine.parquet import FileWriter, WrittenFile
from pipeline.engine.part import TaskResult
from pipeline.engine.spark import dataframe_from_tasks, map_parts, run_partitions
from pipeline.engine.stage import Split
from pipeline.minhash.stage import SIGNATURE, SignatureConfig
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import Content, TableVersion, open_table
from schemas.storage import CheckedPath, Store
from schemas.takedown import replaced_digests

LEADERS = pa.schema([pa.field(name, pa.binary()) for name in ("doc_id", "cluster", "payload")])
MERGED = pa.schema([pa.field(name, pa.binary()) for name in ("earlier", "cluster")])
MERGED_DDL = "earlier binary, cluster binary"
ROWS_PER_FILE = 4_000_000
"""Most rows of an index file, on average. The number of files depends on the number of rows alone."""
CLUSTER_PART_BYTES = EARLIER_CLUSTER.to_bytes(PART_BYTES, "big")
"""End of the node that names a cluster of earlier snapshots, in place of a part number."""
EARLIER_NAME = "earlier-"
SAME_METHOD = (
    "exact",
    "near",
    "min_similarity",
    "threshold",
    "bands",
    "rows",
    "max_distance",
    "blocks",
    "verify",
    "rounds",
)
NUMBERS = "numbers"
"""Setting of `[signature]` that sources may make for themselves, and figure of the index: its value by source."""
SAME_DEDUP = (*SAME_METHOD, "scope", "keep", "source_ranks")
"""Settings of `[dedup]` that a snapshot must share with the index that it is compared with."""


def indexes_of(recipe: Recipe, splits: Sequence[Split]) -> dict[str, TableVersion]:
    """Return the snapshot indexes listed in `dedup.indexes`, keyed `earlier-<n>/index`.

    Raises ConfigError if settings of `[dedup]` do not work with the signature family, or if an index cannot be used in
    this run.
    """
    config = recipe.section("dedup", DedupConfig)
    check_method(config, recipe.section("signature", SignatureConfig))
    indexes = _open(config, "index")
    digests: set[str] = set()
    last = ""
    for folder, index in zip(config.indexes, indexes.values()):
        problems = incompatibilities_of(index, recipe, splits, digests)
        if index.manifest.digest in digests:
            problems.append("expected every index once, got it listed before. Remove it from dedup.indexes.")
        snapshots = index.manifest.content.figures["snapshots"]
        if snapshots[0] < last:
            problems.append(
                f"expected indexes in the order of their snapshots, got {snapshots[0]!r} after {last!r}. "
                "Sort dedup.indexes by snapshot."
            )
        if problems:
            raise ConfigError(f"dedup.indexes: {folder} cannot be used in this run\n  " + "\n  ".join(problems))
        # a later index was made with what it was before a takedown
        digests |= {index.manifest.digest, *replaced_digests(index.folder.child("../.."), index.manifest)}
        last = snapshots[-1]
    return indexes


def representatives_of(recipe: Recipe, splits: Sequence[Split]) -> dict[str, TableVersion]:
    """Return the tables of surviving documents of earlier snapshots, keyed `earlier-<n>/representatives`.

    If survivors are compared, the indexes with their signatures are returned too, keyed `earlier-<n>/index`.

    Raises ConfigError if a run folder has no such table. Also raises it if the table was made from a different index
    than the folder's, or with a different value of `dedup.by_url`.
    """
    config = recipe.section("dedup", DedupConfig)
    indexes, representatives = _open(config, "index"), _open(config, "representatives")
    for folder, index, table in zip(config.indexes, indexes.values(), representatives.values()):
        content = table.manifest.content
        if index.manifest.digest not in [entry.sha256 for entry in content.inputs if entry.name == "index"]:
            raise ConfigError(
                f"dedup.indexes: expected a table `representatives` made from the index in {folder}, got a table made "
                "from another index. Run the recipe of this folder to the end with `penstock run`."
            )
        if content.config["dedup"]["by_url"] != config.by_url:
            raise ConfigError(
                f"dedup.by_url: expected {content.config['dedup']['by_url']!r}, as in the run at {folder}, got "
                f"{config.by_url!r}. Set dedup.by_url={content.config['dedup']['by_url']!r}."
            )
    return representatives | (indexes if config.compares_survivors else {})


def _open(config: DedupConfig, table: str) -> dict[str, TableVersion]:
    tables = {}
    for number, folder in enumerate(config.indexes):
        try:
            tables[f"{EARLIER_NAME}{number}/{table}"] = TableVersion(*open_table(Store(folder), table))
        except (ConfigError, ContractError) as error:
            raise ConfigError(f"dedup.indexes: expected a finished run at {folder}, got none: {error}") from error
    return tables


def incompatibilities_of(index: TableVersion, recipe: Recipe, splits: Sequence[Split], digests: Set[str]) -> list[str]:
    """Return the reasons why a snapshot index cannot be used in a run; empty if it can.

    `digests` are those of the indexes listed before this one in `dedup.indexes`, and of what takedowns have replaced by
    these.
    """
    content = index.manifest.content
    config = recipe.section("dedup", DedupConfig)
    if not content.config["dedup"]["write_index"]:
        return ["expected an index, got a run without one. Run it with dedup.write_index=true."]
    problems = []
    if config.keep[:1] != ("snapshot",):
        problems.append(
            "dedup.keep: expected to begin with 'snapshot', so that no earlier choice is undone, got "
            f"{list(config.keep)}. Put 'snapshot' first in dedup.keep."
        )
    settings = {
        "dedup": {name: config.content()[name] for name in SAME_DEDUP},
        "signature": {name: value for name, value in recipe["signature"].content().items() if name != NUMBERS},
    }
    for section, values in settings.items():
        for name, value in values.items():
            indexed = content.config[section].get(name)
            if indexed != value:
                problems.append(
                    f"{section}.{name}: expected {indexed!r}, with which the index was made, got {value!r}. "
                    f"Set {section}.{name} to the value of the index."
                )
    problems += _other_numbers(content, recipe)
    versions = {stage.name: stage.version for stage in (SIGNATURE, DEDUP)}
    if content.stages != versions:
        problems.append(
            f"expected an index made by the stage versions {versions}, got {content.stages}. "
            "Run the recipe of the index again with `penstock run`."
        )
    for entry in content.inputs:
        if entry.name.startswith(EARLIER_NAME) and entry.sha256 not in digests:
            problems.append(
                "dedup.indexes: expected, before this index, every index that this one was compared with, got none of "
                f"digest {entry.sha256[:12]}. Add the run folder of that index to dedup.indexes, before this one."
            )
    last, first = content.figures["snapshots"][-1], snapshots_of(splits)[0]
    if first <= last:
        problems.append(
            f"source.snapshot: expected snapshots that come after {last!r}, the last of the index, got {first!r}. "
            "Remove the index from dedup.indexes."
        )
    return problems


def numbers_of(recipe: Recipe) -> dict[str, str]:
    """Return the value of `signature.numbers` for the documents of each source, by the source's name."""
    return {name: own.section("signature", SignatureConfig).numbers for name, own in recipe.by_source().items()}


def _other_numbers(content: Content, recipe: Recipe) -> Iterator[str]:
    """Yield a reason for each source whose documents count numbers in another way than in an index.

    A source that the index does not have may make its own choice. An index without the figure is older than the
    setting: numbers of all its sources count as 0.
    """
    indexed = content.figures.get(NUMBERS)
    for source, value in numbers_of(recipe).items():
        expected = "zero" if indexed is None else indexed.get(source, value)
        if value != expected:
            name = f"source.{source}.signature.{NUMBERS}" if recipe.has_several_sources else f"signature.{NUMBERS}"
            yield (
                f"{name}: expected {expected!r}, with which the index was made, got {value!r}. "
                f"Set {name} to the value of the index."
            )


def snapshots_of(splits: Sequence[Split]) -> list[str]:
    """Return the sorted names of the snapshots that contain the input splits; '' for splits without a snapshot name."""
    return sorted({split.snapshot or "" for split in splits})


@dataclass(frozen=True)
class Indexes:
    """The indexes of earlier snapshots that a run uses."""

    spark: SparkSession
    tables: Mapping[str, TableVersion]
    """The tables that `indexes_of` returns. Others are ignored."""

    def __bool__(self) -> bool:
        return bool(self._indexes)

    @property
    def _indexes(self) -> list[TableVersion]:
        return [table for key, table in self.tables.items() if key.endswith("/index")]

    @cached_property
    def leader_files(self) -> list[tuple[Store, CheckedPath]]:
        """The files of leaders of all indexes. A leader's node has EARLIER plus the number of its file as its part."""
        return [(folder, path) for folder, path, _ in numbered_files(self._indexes, "leaders/")]

    def in_buckets(self, rows: DataFrame, number: int, partitions: int, width: int) -> DataFrame:
        """Return the rows (KEYS) of a run in round `number` with those of indexes that they share buckets with.

        They are sorted by key, and in keep order but for what follows the first row of a key: rows of indexes, then
        those of the run. `partitions` is the least number of partitions, `width` the length of an order [bytes].
        """
        indexes, first = [], 0
        for table in self._indexes:
            files = [(table.folder, path) for path in table.manifest.paths_of(f"bands/{number}/")]
            indexes.append(IndexRange(tuple(files), first))
            first += len(table.manifest.paths_of("leaders/"))
        ranges = key_ranges(partitions, indexes)
        cut = rows.withColumn("part", F.expr(range_sql("key", len(ranges))))
        return map_parts(cut, ranges, partial(merge_buckets, width=width), KEYS_DDL, ("key", "order"))

    def find(self, nodes: DataFrame, wanted: str) -> DataFrame:
        """Return rows (node, `wanted`) of the leaders among `nodes`, a frame with the column `node`.

        `wanted` is "payload" or "cluster". Files of leaders that are not asked for are not read.
        """
        earlier = nodes.select("node", part_number("node").alias("part")).where(F.col("part") >= EARLIER).distinct()
        located = earlier.withColumn("part", (F.col("part") - EARLIER).cast("int"))
        found = partial(leaders_of_file, wanted=wanted)
        return map_parts(located, self.leader_files, found, f"node binary, {wanted} binary")

    def roots(self, nodes: DataFrame) -> DataFrame:
        """Return rows (node, root) of the leaders among `nodes`; `root` is the node that names the cluster."""
        root = F.concat("cluster", F.lit(CLUSTER_PART_BYTES)).alias("root")
        return self.find(nodes, "cluster").select("node", root)

    def merged(self) -> DataFrame:
        """Return rows (a, b) of nodes: the names of clusters before and after a later snapshot."""
        frame = read_files(self.spark, self.tables, ("index", "merged/"), MERGED, MERGED_DDL)
        return frame.select(
            *(F.concat(name, F.lit(CLUSTER_PART_BYTES)).alias(to) for name, to in (("earlier", "a"), ("cluster", "b")))
        )


def numbered_files(tables: Sequence[TableVersion], prefix: str) -> list[tuple[Store, CheckedPath, int]]:
    """Return (folder, path, number of the first file of the same run) of the files of tables of earlier runs.

    Files with `prefix` are those of the parts of a run, so a run's file of part 3 has its first file's number plus 3.
    """
    files: list[tuple[Store, CheckedPath, int]] = []
    for table in tables:
        first = len(files)
        files += [(table.folder, path, first) for path in table.manifest.paths_of(prefix)]
    return files


def part_number(column: str) -> Column:
    """Return a Spark expression for the part number of each document, whose node or keep order is in `column`."""
    return F.conv(F.hex(F.substring(column, -PART_BYTES, PART_BYTES)), 16, 10).cast("long")


def leaders_of_file(
    task: tuple[Store, CheckedPath], batches: Iterator[pa.RecordBatch], wanted: str
) -> Iterator[pa.RecordBatch]:
    """Yield rows (node, `wanted`) of the documents whose nodes are in `batches`, from a file of leaders."""
    nodes = [node for batch in batches for node in batch.column("node").to_pylist()]
    if not nodes:
        return
    ids, part = pa.array(sorted(node[:DOC_ID_BYTES] for node in nodes), pa.binary()), nodes[0][DOC_ID_BYTES:]
    for batch in rows_of_file(task, pa.schema([LEADERS.field(name) for name in ("doc_id", wanted)])):
        found = batch.filter(pc.is_in(batch.column("doc_id"), ids))
        own = pc.binary_join_element_wise(found.column("doc_id"), pa.scalar(part, pa.binary()), pa.scalar(b""))
        yield pa.RecordBatch.from_arrays([own, found.column(wanted)], names=["node", wanted])


def read_files(
    spark: SparkSession, tables: Mapping[str, TableVersion], which: tuple[str, str], schema: pa.Schema, ddl: str
) -> DataFrame:
    """Return the rows of some files of one table, from all earlier snapshots.

    `which` is (name of the table, prefix of the file names).
    """
    name, prefix = which
    files = [
        (table.folder, path)
        for key, table in tables.items()
        if key.endswith(f"/{name}")
        for path in table.manifest.paths_of(prefix)
    ]
    return dataframe_from_tasks(spark, partial(rows_of_file, schema=schema), files, ddl)


def rows_of_file(task: tuple[Store, CheckedPath], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one Parquet file, given as (folder, path)."""
    folder, path = task
    with folder.open_input(path) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=1 << 14, columns=schema.names):
            yield batch.cast(schema)


def write_files(frame: DataFrame, rows: int, folder: Store, kind: str, schema: pa.Schema) -> list[WrittenFile]:
    """Write the rows of a frame to sorted files `<kind>/00000` …, and return the files.

    They are cut by ranges of the first column if it is a key, which is a hash, else by a hash of it. `rows` is the
    number of rows of the frame. Raises ContractError if the files hold a different number.
    """
    count = -(-rows // ROWS_PER_FILE)
    if not rows:  # for an empty shuffle, Spark may or may not run a task
        return []
    first = schema.names[0]
    part = F.expr(range_sql(first, count)) if is_key(schema) else F.pmod(F.xxhash64(first), F.lit(count)).cast("int")
    cut = frame.select(*schema.names, part.alias("part"))
    cut = cut.repartitionById(count, F.col("part")).drop("part").sortWithinPartitions(*schema.names)

    def write(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        return write_file(batches, folder, f"{kind}/{number:05d}", schema).to_json()

    files = [WrittenFile(**answer) for answer in run_partitions(cut, write)]
    if (written := sum(file.rows for file in files)) != rows:
        raise ContractError(
            f"{folder.uri}/{kind}: expected {rows} rows in all files, got {written}. Run `penstock run` again."
        )
    return files


def is_key(schema: pa.Schema) -> bool:
    """Whether the first column of an index file is a key of buckets."""
    return bool(schema.field(0).type == pa.int64())


def write_file(batches: Iterator[pa.RecordBatch], folder: Store, key: str, schema: pa.Schema) -> WrittenFile:
    """Write sorted rows to one Parquet file, whose row groups do not depend on the division into batches."""
    folder.make_parent(key)
    with IndexWriter(folder, key, schema) as writer:
        for batch in batches:
            writer.add(batch)
    return writer.written


class IndexWriter(FileWriter):
    """A Parquet file of sorted batches, in row groups of a fixed number of rows, with the least and largest key."""

    GROUP_ROWS = 1 << 17

    def __init__(self, folder: Store, key: str, schema: pa.Schema):
        super().__init__(folder, key, "parquet")
        self._schema = schema
        sink = pa.PythonFile(self._sink, mode="w")
        statistics = schema.names[:1] if is_key(schema) else False
        self._writer = pq.ParquetWriter(sink, schema, compression="zstd", write_statistics=statistics)
        self._pending: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch."""
        self._pending.append(batch.select(self._schema.names).cast(self._schema))
        self.num_rows += batch.num_rows
        if sum(pending.num_rows for pending in self._pending) >= self.GROUP_ROWS:
            whole = pa.Table.from_batches(self._pending)
            self._writer.write_table(whole.slice(0, self.GROUP_ROWS), row_group_size=self.GROUP_ROWS)
            self._pending = whole.slice(self.GROUP_ROWS).to_batches()

    def _finish(self) -> None:
        # Some readers fail on a row group without rows.
        if any(batch.num_rows for batch in self._pending):
            self._writer.write_table(pa.Table.from_batches(self._pending, self._schema))
        self._writer.close()

    def _drop(self) -> None:
        self._writer.close()
