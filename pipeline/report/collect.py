"""What a report is made of: a run's manifests, plan, metrics and checkpoints, read once into plain values.

Only small files are read here. The training half is known by the JSON it writes, not by its code.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.manifest import RUN_NAME, Manifest, open_table, read_run
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
PLAN_NAME = "train/plan.json"
METRICS_NAME = "train/metrics.jsonl"
OUTCOME_NAME = "train/manifest.json"
ROWS_AT_ONCE = 512
CHECKPOINTS = "train/checkpoints"
NOTE_NAME = "checkpoint.json"


@dataclass(frozen=True)
class Figure:
    """One number of the plan and where it comes from."""

    name: str
    value: float
    unit: str
    formula: str
    source: str


@dataclass(frozen=True)
class Plan:
    """The sized run, as far as the report shows it."""

    dataset: str
    digest: str
    steps: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Step:
    """One line of the metrics; `heldout_loss` is None where it was not measured."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    heldout_loss: float | None


@dataclass(frozen=True)
class Checkpoint:
    """The note of a checkpoint: what it belongs to and how large it is."""

    step: int
    dataset: str
    tokenizer: str
    settings: str
    """Digest of every setting that decides the weights."""
    skip_list: str
    layout: str
    bytes: int


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
    plan: Plan | None
    steps: Sequence[Step]
    outcome: Mapping[str, Any] | None
    """The closing manifest of a run that reached its last step."""
    checkpoints: Sequence[Checkpoint]

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
        plan=_read_plan(run),
        steps=_read_metrics(run),
        outcome=run.read_json(OUTCOME_NAME) if run.exists(OUTCOME_NAME) else None,
        checkpoints=_read_notes(run),
    )


def _is_current(manifest: Manifest, tables: Mapping[str, Manifest]) -> bool:
    """Whether every table of this run that it was made from is the one that stands."""
    reads = {entry.name: entry.sha256 for entry in manifest.content.inputs if not of_another_run(entry.name)}
    return all(name in tables and tables[name].digest == digest for name, digest in reads.items())


def of_another_run(name: str) -> bool:
    """Whether an input is a table of an earlier snapshot, such as `earlier-0/index`."""
    return "/" in name


def _read_plan(run: Store) -> Plan | None:
    if not run.exists(PLAN_NAME):
        return None
    plan = run.read_json(PLAN_NAME)
    try:
        figures = tuple(Figure(**figure) for figure in plan["figures"])
        return Plan(plan["dataset"], digest_of(plan), int(plan["steps"]), figures)
    except (KeyError, TypeError) as error:
        raise ContractError(f"{run.uri}/{PLAN_NAME}: promised a plan, found {error}; plan again") from error


def _read_metrics(run: Store) -> list[Step]:
    """Every step in order; a line that a killed process left unfinished ends the list."""
    if not run.exists(METRICS_NAME):
        return []
    lines = run.read_bytes(METRICS_NAME).split(b"\n")[:-1]
    try:
        return [_step(json.loads(line)) for line in lines]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ContractError(f"{run.uri}/{METRICS_NAME}: promised one step a line, found {error}; restore it") from error


def _step(line: Mapping[str, Any]) -> Step:
    return Step(
        step=line["step"],
        loss=line["loss"],
        grad_norm=line["grad_norm"],
        learning_rate=line["learning_rate"],
        tokens_per_second=line["tokens_per_second"],
        heldout_loss=line.get("heldout_loss"),
    )


def _read_notes(run: Store) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first; like the trainer, this looks for the notes that stand in the folder."""
    folder = run.child(CHECKPOINTS)
    notes = [folder.read_json(name) for name in folder.walk() if name.endswith(f"/{NOTE_NAME}")]
    return sorted(map(_checkpoint, notes), key=lambda checkpoint: checkpoint.step)


def _checkpoint(note: Mapping[str, Any]) -> Checkpoint:
    identity, layout = note["identity"], note["layout"]
    return Checkpoint(
        step=note["step"],
        dataset=identity["dataset"],
        tokenizer=identity["tokenizer"],
        settings=digest_of(identity["settings"]),
        skip_list=identity["skip_list"],
        layout=f"{layout['ranks']} × {layout['device']}, {layout['threads']} threads each",
        bytes=sum(note["files"].values()),
    )
