"""What a report is made of: a run's manifests, and what training left in it, read once into plain values.

Only small files are read here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from pipeline.engine.stage import Drop
from pipeline.report.training import Training, read_training
from pipeline.tokens.buckets import READS, left_out
from pipeline.tokens.streams import TOKENS, mixed
from schemas.errors import ConfigError
from schemas.manifest import RUN_NAME, Manifest, Table, open_table, read_run
from schemas.storage import Store

TABLES = (
    *("documents", "text", "scores", "verdicts", "clusters", "index", "dedup", "representatives", "audit", "repeats"),
    *("clean", "tokenizer", "tokens"),
)
"""The tables of a run in the order they are written."""
SECOND = ("text", "index", "representatives")
"""Those among them that a step writes besides its first."""
FROM_OUTSIDE = ("documents", "text")
"""Those among them that were made from files, not from tables."""
BEFORE = ("dedup/dropped_before", "repeats/dropped_before")
"""Rows that a step only looks at: their drop is counted where it happened."""
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Facts:
    """Everything a report is computed from, besides the rows it samples."""

    run: Store
    recipe: Mapping[str, Any]
    """Every section with every value, places of files included."""
    tables: Mapping[str, Manifest]
    """Committed tables by name, in the order they are written."""
    stale: Sequence[str]
    """Tables left out because they were made from other versions of those before them."""
    folders: Mapping[str, Store]
    """Where the tables lie."""
    training: Training

    def figures(self, table: str) -> Mapping[str, Any]:
        """The exact figures of a table; empty while it does not stand."""
        return self.tables[table].content.figures if table in self.tables else {}

    def read_part(self, table: str, part: int, columns: list[str]) -> Iterator[dict[str, Any]]:
        """The rows of one part of a table, a few hundred in memory at a time."""
        with self.open_part(table, part) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()

    def open_part(self, table: str, part: int) -> Any:
        """One part of a table as a file."""
        return self.folders[table].open_input(self.tables[table].paths_of()[part])

    def num_parts(self, table: str) -> int:
        """How many parts a part-wise table has."""
        return len(self.tables[table].content.files)

    def left_out(self, part: int) -> dict[bytes, Drop]:
        """Why the mix of the dataset leaves out clean documents of a part, by doc_id; empty while there is no mix."""
        if not {TOKENS.name, "clean"} <= self.tables.keys():
            return {}
        sorting = mixed(self.tables[TOKENS.name], self.tables["clean"].digest)
        if sorting is None:
            return {}
        tables = {name: Table(self.folders[name], self.tables[name]) for name in READS if name in self.tables}
        return {identifier: drop for identifier, drop in left_out(tables, part, sorting) if drop is not None}

    def settings(self, stage: str) -> Mapping[str, Any]:
        """The settings that a stage ran with, those that only decide included; empty while it did not run."""
        found: dict[str, Any] = {}
        for table in self.tables.values():
            found |= table.content.config.get(stage, {})
        return found

    def models(self, stage: str) -> list[str]:
        """The names under which a stage knew its model files; empty while it did not run."""
        names = (name for table in self.tables.values() for name in table.content.models)
        return [name.removeprefix(f"{stage}/") for name in names if name.startswith(f"{stage}/")]


def collect(run: Store) -> Facts:
    """The facts of a run folder; parts that are not there yet are empty. Raises ConfigError if it is no run folder."""
    if not run.exists(RUN_NAME):
        raise ConfigError(f"{run.uri}: promised a run folder, found no {RUN_NAME}; run `penstock run RECIPE --out …`")
    state = read_run(run)
    tables: dict[str, Manifest] = {}
    folders: dict[str, Store] = {}
    stale = []
    for name in TABLES:
        if name in state.tables:
            folder, manifest = open_table(run, name)
            if name in FROM_OUTSIDE or _is_current(manifest, tables):
                tables[name], folders[name] = manifest, folder
            else:
                stale.append(name)
    return Facts(
        run=run,
        recipe=state.recipe,
        tables=tables,
        stale=stale,
        folders=folders,
        training=read_training(run),
    )


def _is_current(manifest: Manifest, tables: Mapping[str, Manifest]) -> bool:
    """Whether every table of this run that it was made from is the one that stands."""
    reads = {entry.name: entry.sha256 for entry in manifest.content.inputs if not of_another_run(entry.name)}
    return all(name in tables and tables[name].digest == digest for name, digest in reads.items())


def of_another_run(name: str) -> bool:
    """Whether an input is a table of an earlier snapshot, such as `earlier-0/index`."""
    return "/" in name
