"""What a report is made of: a run's manifests, and what training left in it, read once into plain values.

Only small files are read here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow.parquet as pq

from pipeline.engine.stage import Drop
from pipeline.tokens.streams import STREAM_TABLES, TOKENS, mix_drops, mixed_sorting
from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.manifest import RUN_NAME, Manifest, TableVersion, open_table, read_run
from schemas.storage import Store

# What the training half left in a run, read from the JSON that it writes: plan, steps, events and checkpoints.
#
# That half is known by its files, not by its code.

PLAN_NAME = "train/plan.json"
METRICS_NAME = "train/metrics.jsonl"
EVENTS_NAME = "train/events.jsonl"
OUTCOME_NAME = "train/manifest.json"
CHECKPOINTS = "train/checkpoints"
CHECKPOINT_METADATA_NAME = "checkpoint.json"
REQUIRED_FIELDS = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
"""What every step says that is not skipped."""


@dataclass(frozen=True)
class PlanFigure:
    """One number of the plan and where it comes from."""

    name: str
    value: float
    unit: str
    formula: str
    source: str


@dataclass(frozen=True)
class PlanSummary:
    """The sized run, as far as the report shows it."""

    dataset: str
    digest: str
    steps: int
    figures: tuple[PlanFigure, ...]
    mix: str = ""
    """Digest of the mix that the shares of the sources follow; empty = of none."""


@dataclass(frozen=True)
class ReportedStep:
    """One line of the metrics; what was not measured is None or empty."""

    step: int
    learning_rate: float
    tokens_per_second: float
    loss: float | None = None
    """None = not finite, in a skipped step."""
    grad_norm: float | None = None
    """None = not finite, in a skipped step."""
    skipped: bool = False
    heldout_loss: float | None = None
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    checkpoint_stall: float | None = None
    bytes_sent: int | None = None
    bytes_plain: int | None = None
    losses: Mapping[str, float] | None = None
    """Mean loss of each source that had targets."""
    source_tokens: Mapping[str, int] | None = None
    """Those targets."""
    heldout: Mapping[str, Mapping[str, float | None]] | None = None
    """Loss, perplexity and bits_per_byte of each source that holds documents out."""


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
class Training:
    """Everything that training left, oldest first; parts that are not there yet are empty."""

    plan: PlanSummary | None
    steps: Sequence[ReportedStep]
    events: Sequence[Mapping[str, Any]]
    """What happened beside the steps, as it was written."""
    outcome: Mapping[str, Any] | None
    """The closing manifest of a run that reached its end."""
    checkpoints: Sequence[Checkpoint]


def read_training(run: Store) -> Training:
    """What stands in a run's train folder. Raises ContractError if it is not what it promises to be."""
    outcome = run.read_json(OUTCOME_NAME) if run.exists(OUTCOME_NAME) else None
    return Training(_read_plan(run), _read_metrics(run), _read_events(run), outcome, _read_notes(run))


def _read_plan(run: Store) -> PlanSummary | None:
    if not run.exists(PLAN_NAME):
        return None
    plan = run.read_json(PLAN_NAME)
    try:
        last = plan["stages"][-1]
        figures = tuple(PlanFigure(**figure) for figure in plan["figures"])
        steps = int(last["first_step"]) + int(last["num_steps"])
        mix = plan.get("settings", {}).get("train", {}).get("mix", "")
        return PlanSummary(plan["dataset"], digest_of(plan), steps, figures, mix)
    except (IndexError, KeyError, TypeError) as error:
        raise ContractError(f"{run.uri}/{PLAN_NAME}: expected a plan, got {error}. Plan again.") from error


def _read_metrics(run: Store) -> list[ReportedStep]:
    """Every step in order; a line that a killed process left unfinished ends the list."""
    if not run.exists(METRICS_NAME):
        return []
    lines = run.read_bytes(METRICS_NAME).split(b"\n")[:-1]
    try:
        return [_step(json.loads(line)) for line in lines]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ContractError(f"{run.uri}/{METRICS_NAME}: expected one step a line, got {error}. Restore it.") from error


def _step(line: Mapping[str, Any]) -> ReportedStep:
    needed = ("learning_rate", "tokens_per_second") if line.get("skipped") else REQUIRED_FIELDS
    found = {name: line[name] for name in ("step", *needed)}
    return ReportedStep(
        **found | {field.name: line[field.name] for field in fields(ReportedStep) if field.name in line}
    )


def _read_events(run: Store) -> list[Mapping[str, Any]]:
    """Every event in order; what a killed process left of a line is passed over."""
    found: list[Mapping[str, Any]] = []
    for line in run.read_bytes(EVENTS_NAME).split(b"\n") if run.exists(EVENTS_NAME) else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or not {"kind", "step", "at"} <= event.keys():
            raise ContractError(f"{run.uri}/{EVENTS_NAME}: expected one event a line, got {event}. Restore it.")
        found.append(event)
    return found


def _read_notes(run: Store) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first; like the trainer, this looks for the notes that stand in the folder."""
    folder = run.child(CHECKPOINTS)
    notes = [folder.read_json(name) for name in folder.walk() if name.endswith(f"/{CHECKPOINT_METADATA_NAME}")]
    return sorted(map(_checkpoint, notes), key=lambda checkpoint: checkpoint.step)


def _checkpoint(note: Mapping[str, Any]) -> Checkpoint:
    identity, layout = note["identity"], note["layout"]
    axes = [f"{axis} {size}" for axis, size in layout["axes"].items() if size > 1]
    return Checkpoint(
        step=note["step"],
        dataset=identity["dataset"],
        tokenizer=identity["tokenizer"],
        settings=digest_of(identity["settings"]),
        skip_list=identity["skip_list"],
        layout=", ".join([f"{layout['ranks']} × {layout['device']}", *axes, f"{layout['threads']} threads each"]),
        bytes=sum(file["size"] for file in note["files"].values()),
    )


TABLES = (
    *("documents", "text", "scores", "verdicts", "clusters", "index", "dedup", "representatives", "audit", "repeats"),
    *("clean", "tokenizer", "tokens"),
)
"""The tables of a run in the order they are written."""
SECONDARY_TABLES = ("text", "index", "representatives")
"""Those among them that a step writes besides its first."""
TABLES_FROM_INPUTS = ("documents", "text")
"""Those among them that were made from files, not from tables."""
EARLIER_DROPS = ("dedup/dropped_before", "repeats/dropped_before")
"""Rows that a step only looks at: their drop is counted where it happened."""
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class RunFacts:
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

    def mix_drops(self, part: int) -> dict[bytes, Drop]:
        """Why the mix of the dataset leaves out clean documents of a part, by doc_id; empty while there is no mix."""
        if not {TOKENS.name, "clean"} <= self.tables.keys():
            return {}
        sorting = mixed_sorting(self.tables[TOKENS.name], self.tables["clean"].digest)
        if sorting is None:
            return {}
        tables = {
            name: TableVersion(self.folders[name], self.tables[name]) for name in STREAM_TABLES if name in self.tables
        }
        return {identifier: drop for identifier, drop in mix_drops(tables, part, sorting) if drop is not None}

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


def collect_facts(run: Store) -> RunFacts:
    """The facts of a run folder; parts that are not there yet are empty. Raises ConfigError if it is no run folder."""
    if not run.exists(RUN_NAME):
        raise ConfigError(f"{run.uri}: expected a run folder, got no {RUN_NAME}. Run `penstock run RECIPE --out …`.")
    state = read_run(run)
    tables: dict[str, Manifest] = {}
    folders: dict[str, Store] = {}
    stale = []
    for name in TABLES:
        if name in state.tables:
            folder, manifest = open_table(run, name)
            if name in TABLES_FROM_INPUTS or _is_current(manifest, tables):
                tables[name], folders[name] = manifest, folder
            else:
                stale.append(name)
    return RunFacts(
        run=run,
        recipe=state.recipe,
        tables=tables,
        stale=stale,
        folders=folders,
        training=read_training(run),
    )


def _is_current(manifest: Manifest, tables: Mapping[str, Manifest]) -> bool:
    """Whether every table of this run that it was made from is the one that stands."""
    reads = {entry.name: entry.sha256 for entry in manifest.content.inputs if not is_of_another_run(entry.name)}
    return all(name in tables and tables[name].digest == digest for name, digest in reads.items())


def is_of_another_run(name: str) -> bool:
    """Whether an input is a table of an earlier snapshot, such as `earlier-0/index`."""
    return "/" in name


# Numbers as the report writes them: thousands separated, shares in per cent, sizes in powers of ten, short digests.

NO_VALUE = "–"
SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")
LARGE = ("", "k", "M", "G", "T", "P")


def number(value: float | None) -> str:
    """A count with separators; other numbers with four digits; a dash for None."""
    if value is None:
        return NO_VALUE
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def estimate(value: float | None) -> str:
    """A number that was not counted: two to three digits and a unit prefix, such as `≈ 1.2 M`."""
    return NO_VALUE if value is None else f"≈ {short(value)}"


def short(value: float) -> str:
    """A number with three digits and a prefix, such as `12.3 M`; small numbers as they are."""
    step = 0
    while abs(value) >= 999.5 and step < len(LARGE) - 1:
        value, step = value / 1000, step + 1
    if step:
        return f"{value:.3g} {LARGE[step]}"
    return f"{value:.3g}"


def brief(value: int | None) -> str:
    """A count that fits a narrow column: exact up to five digits, such as `99,999`, then as `100 k`."""
    return number(value) if value is None or value < 100_000 else short(value)


def percent(share: float) -> str:
    """A share in 0..1 in per cent; what is not quite nothing or all does not look so."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def size(value: float | None) -> str:
    """A size [bytes] with three digits, such as `1.23 MB`."""
    if value is None:
        return NO_VALUE
    step = 0
    while value >= 999.5 and step < len(SIZES) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g} {SIZES[step]}" if step else f"{value:,.0f} {SIZES[0]}"


def seconds(value: float) -> str:
    """A duration [s], such as `4.2 s` or `1 h 03 min`."""
    if value < 99.95:
        return f"{value:.1f} s"
    minutes, hours = round(value / 60), int(round(value / 60) // 60)
    return f"{hours} h {minutes % 60:02d} min" if hours else f"{minutes} min"


def digest(value: str) -> str:
    """The first twelve digits of a digest."""
    return value[:12]
