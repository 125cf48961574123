"""The inputs of a report: the manifests of a run and the JSON files of its training, and the formats of numbers.

Only small files are read here, each of them once. Plan, metrics, events and checkpoints are read from the JSON files
that the trainer writes, since this package must not import the training code.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Drop
from pipeline.tokens.streams import STREAM_TABLES, TOKENS, live_tokens, mix_drops, mixed_sorting
from schemas.checkpoints import read_checkpoints
from schemas.errors import REMOVE_CHECKPOINT, ConfigError, ContractError, reading
from schemas.ids import digest_of
from schemas.manifest import RUN_NAME, Manifest, TableVersion, current_tables, read_run
from schemas.older_tables import read_batches
from schemas.paths import METRICS_NAME, PLAN_NAME
from schemas.storage import Store
from schemas.tables import DOCUMENTS, DROPPED_BEFORE, SCORES, TABLES
from schemas.takedown import removed_spans
from schemas.text import format_short

# Files that training writes into a run.

EVENTS_NAME = "train/events.jsonl"
OUTCOME_NAME = "train/manifest.json"
REQUIRED_FIELDS = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
"""Fields of every step that was not skipped."""


@dataclass(frozen=True)
class PlanFigure:
    """One computed value of the training plan, with its formula and source."""

    name: str
    value: float
    unit: str
    formula: str
    source: str


@dataclass(frozen=True)
class PlanSummary:
    """The values of a training plan that the report shows."""

    dataset: str
    digest: str
    steps: int
    figures: tuple[PlanFigure, ...]
    mix: str = ""
    """Digest of the mix that sets the shares of the sources; empty = no mix."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that the plan sets, as `section.key`, and the shape of the model, as `model.key`."""
    deciding_settings: Mapping[str, Any] = field(default_factory=dict)
    """What decides the weights, by the names in checkpoint metadata; settings with default values are left out."""
    num_params: int | None = None
    learning_rate: float | None = None
    """The learning rate after the warm-up."""
    seq_len: int | None = None
    """Tokens of a sample in the last training stage."""
    global_batch: int | None = None
    """Samples of an optimizer step in the last training stage."""


@dataclass(frozen=True)
class ReportedStep:
    """One line of the metrics file; a value that was not measured is None or empty."""

    step: int
    learning_rate: float
    tokens_per_second: float
    loss: float | None = None
    """None = the loss was not finite and the step was skipped."""
    grad_norm: float | None = None
    """None = the gradient norm was not finite and the step was skipped."""
    skipped: bool = False
    heldout_loss: float | None = None
    accuracy: float | None = None
    """Share of the tokens that have the largest logit; counted in some steps only."""
    heldout_accuracy: float | None = None
    tokens: int = 0
    """Number of tokens of the global batch."""
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    checkpoint_stall: float | None = None
    bytes_sent: int | None = None
    bytes_plain: int | None = None
    losses: Mapping[str, float] | None = None
    """Mean loss of each source that had tokens to predict in the step."""
    source_tokens: Mapping[str, int] | None = None
    """Number of predicted tokens of each source."""
    heldout: Mapping[str, Mapping[str, float | None]] | None = None
    """Loss, perplexity, bits_per_byte and accuracy of each source that has held-out documents."""


@dataclass(frozen=True)
class Checkpoint:
    """The metadata of a checkpoint: layout, size [bytes], and digests of dataset, tokenizer, settings and skip list."""

    step: int
    dataset: str
    tokenizer: str
    settings: str
    """Digest of all settings that affect the weights."""
    deciding_settings: Mapping[str, Any]
    """These settings by name, and `order`, the digest of the order of the samples."""
    skip_list: str
    layout: str
    bytes: int


@dataclass(frozen=True)
class Training:
    """The content of the JSON files of training; a file that does not exist yet is None or empty.

    Sequences start with the oldest entry.
    """

    plan: PlanSummary | None
    steps: Sequence[ReportedStep]
    events: Sequence[Mapping[str, Any]]
    """Events of the training run, such as spikes and restarts, as the trainer wrote them."""
    outcome: Mapping[str, Any] | None
    """The manifest that the trainer writes at the end; None = training has not ended."""
    checkpoints: Sequence[Checkpoint]


def read_training(run: Store) -> Training:
    """Read the train folder of a run. Raises ContractError if a file does not have the expected fields."""
    outcome = run.read_json(OUTCOME_NAME) if run.exists(OUTCOME_NAME) else None
    if not isinstance(outcome, dict | None):
        raise ContractError(
            f"{run.uri}/{OUTCOME_NAME}: expected an object, got a {type(outcome).__name__}. Restore it from a backup."
        )
    return Training(read_plan(run), _read_metrics(run), _read_events(run), outcome, _read_checkpoints(run))


def read_plan(run: Store) -> PlanSummary | None:
    """Return the plan of a run; None if there is none yet. Raises ContractError if the file is no plan."""
    if not run.exists(PLAN_NAME):
        return None
    plan = run.read_json(PLAN_NAME)
    try:
        last = plan["stages"][-1]
        figures = tuple(PlanFigure(**figure) for figure in plan["figures"])
        steps = int(last["first_step"]) + int(last["num_steps"])
        settings = _by_name({**plan.get("settings", {}), "model": plan.get("shape", {})})
        return PlanSummary(
            dataset=plan["dataset"],
            digest=digest_of(plan),
            steps=steps,
            figures=figures,
            mix=settings.get("train.mix", ""),
            settings=settings,
            deciding_settings=_deciding_settings(plan),
            num_params=plan.get("num_params"),
            learning_rate=plan.get("learning_rate"),
            seq_len=last.get("seq_len"),
            global_batch=last.get("global_batch"),
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected a training plan, got an invalid one ({error!r}). Run `penstock plan`."
        ) from error


def _read_metrics(run: Store) -> list[ReportedStep]:
    """Return every step of the metrics file in order, without an incomplete last line that a killed process left."""
    if not run.exists(METRICS_NAME):
        return []
    lines = run.read_bytes(METRICS_NAME).split(b"\n")[:-1]
    try:
        return [_step(json.loads(line)) for line in lines]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ContractError(
            f"{run.uri}/{METRICS_NAME}: expected one complete step per line, got an invalid line ({error!r}). "
            f"Restore {METRICS_NAME} from a backup."
        ) from error


def _step(line: Mapping[str, Any]) -> ReportedStep:
    required = ("learning_rate", "tokens_per_second") if line.get("skipped") else REQUIRED_FIELDS
    values = {name: line[name] for name in ("step", *required)}
    return ReportedStep(
        **values | {field.name: line[field.name] for field in fields(ReportedStep) if field.name in line}
    )


def _read_events(run: Store) -> list[Mapping[str, Any]]:
    """Return every event of the events file in order, without the incomplete lines that killed processes left."""
    events: list[Mapping[str, Any]] = []
    lines = run.read_bytes(EVENTS_NAME).split(b"\n") if run.exists(EVENTS_NAME) else []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict) or not {"kind", "step", "at"} <= event.keys():
            raise ContractError(
                f"{run.uri}/{EVENTS_NAME}, line {number}: expected a JSON object with the keys `kind`, `step` and "
                f"`at`, got {event}. Restore {EVENTS_NAME} from a backup."
            )
        events.append(event)
    return events


def _by_name(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def _deciding_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the weights in `plan.json`, by the names that it has in the metadata of a checkpoint.

    Settings that the devices decide are left out.
    """
    filled = {"train.stages": "stages", "optim.learning_rate": "learning_rate", "optim.warmup_steps": "warmup_steps"}
    given = _by_name({**plan.get("settings", {}), "shape": plan.get("shape", {})})
    given = {name: value for name, value in given.items() if value != "auto"}
    return given | {name: plan[key] for name, key in {**filled, "order": "order"}.items() if key in plan}


def _read_checkpoints(run: Store) -> list[Checkpoint]:
    """Return every complete checkpoint, oldest first. A checkpoint is complete if its metadata file exists."""
    checkpoints = []
    for where, metadata in read_checkpoints(run):
        with reading(where, "checkpoint metadata", REMOVE_CHECKPOINT):
            checkpoints.append(_checkpoint(metadata))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _checkpoint(metadata: Mapping[str, Any]) -> Checkpoint:
    identity, layout = metadata["identity"], metadata["layout"]
    threads = layout["threads"]
    axes = [f"{axis} {size}" for axis, size in layout["axes"].items() if size > 1]
    return Checkpoint(
        step=metadata["step"],
        dataset=identity["dataset"],
        tokenizer=identity["tokenizer"],
        settings=digest_of(identity["settings"]),
        deciding_settings={**identity["settings"], "order": identity["order"]},
        skip_list=identity["skip_list"],
        layout=", ".join(
            [
                f"{layout['ranks']} × {layout['device']}",
                *axes,
                f"{threads} thread{'s' if threads != 1 else ''} per rank",
            ]
        ),
        bytes=sum(file["size"] for file in metadata["files"].values()),
    )


ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class RunFacts:
    """All inputs of a report except the rows of sampled documents."""

    run: Store
    recipe: Mapping[str, Any]
    """Section → setting → value, with defaults and file paths."""
    tables: Mapping[str, Manifest]
    """Manifests of the committed tables by name, in the order in which they are written."""
    stale: Sequence[str]
    """Names of tables that the report omits because they were made from outdated versions of other tables."""
    folders: Mapping[str, Store]
    """Folders of the tables."""
    training: Training

    @property
    def versions(self) -> list[str]:
        """The versions of the tables, as `TABLE/VERSION`."""
        return [f"{name}/{folder.root.rpartition('/')[2]}" for name, folder in self.folders.items()]

    @cached_property
    def columns(self) -> pa.Schema:
        """The columns of `documents`, as they are stored in the run, and those of `scores`."""
        columns = {field.name: field for schema in (SCORES, DOCUMENTS) for field in schema}
        if "documents" in self.tables and self.num_parts("documents"):
            with self.open_part("documents", 0) as stream:
                columns |= {field.name: field for field in pq.read_schema(stream)}
        return pa.schema(list(columns.values()))

    def is_number(self, column: str) -> bool:
        """Return True if a column is a single number of `documents` or `scores`, not a list of entries."""
        if column not in self.columns.names:
            return False
        kind = self.columns.field(column).type
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

    def figures(self, table: str) -> Mapping[str, Any]:
        """Return the entry `figures` of a table's manifest; empty if the table does not exist yet."""
        return self.tables[table].content.figures if table in self.tables else {}

    @cached_property
    def tokens_left(self) -> Mapping[str, int]:
        """The tokens of each stream of the dataset, without those that takedowns removed; empty without a dataset."""
        if TOKENS.name not in self.tables:
            return {}
        return live_tokens(self.folders[TOKENS.name].child("../.."), self.tables[TOKENS.name])

    @cached_property
    def removed_spans(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """The places of removed documents in the shards of the dataset: `schemas.takedown.removed_spans`."""
        if TOKENS.name not in self.tables:
            return {}
        return removed_spans(self.folders[TOKENS.name].child("../.."), self.tables[TOKENS.name])

    def read_part(self, table: str, part: int, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of one part of a table, with at most ROWS_AT_ONCE in memory."""
        with self.open_part(table, part) as stream:
            for batch in read_batches(pq.ParquetFile(stream), table, columns, ROWS_AT_ONCE):
                yield from batch.to_pylist()

    def open_part(self, table: str, part: int) -> Any:
        """Open one part of a table as a file."""
        return self.folders[table].open_input(self.tables[table].paths_of()[part])

    def num_parts(self, table: str) -> int:
        """Return the number of parts of a table."""
        return len(self.tables[table].content.files)

    def left_out(self, part: int) -> dict[bytes, Drop]:
        """Return the documents in one part of `clean` that the mix leaves out of the dataset, as doc_id → verdict.

        Empty if there is no mix, or if no dataset was made from the current `clean`.
        """
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
        """Return the settings with which a stage ran, including thresholds; empty if the stage did not run yet."""
        settings: dict[str, Any] = {}
        for table in self.tables.values():
            settings |= table.content.config.get(stage, {})
        return settings

    def models(self, stage: str) -> list[str]:
        """Return the names of the model files that a stage used; empty if the stage did not run yet."""
        names = (name for table in self.tables.values() for name in table.content.models)
        return [name.removeprefix(f"{stage}/") for name in names if name.startswith(f"{stage}/")]


def collect_facts(run: Store) -> RunFacts:
    """Read the inputs of the report of a run; inputs that do not exist yet are empty.

    Raises ConfigError if the folder is not a run folder.
    """
    if not run.exists(RUN_NAME):
        raise ConfigError(f"{run.uri}: expected a run folder, got no {RUN_NAME}. Run `penstock run RECIPE --out …`.")
    state, tables = read_run(run), current_tables(run)
    return RunFacts(
        run=run,
        recipe=state.recipe,
        tables={name: table.manifest for name, table in tables.items()},
        stale=[name for name in TABLES if name in state.tables and name not in tables],
        folders={name: table.folder for name, table in tables.items()},
        training=read_training(run),
    )


def is_earlier_drop(name: str) -> bool:
    """Return True if a `stage/rule` counts rows that an earlier step had already dropped."""
    return name.endswith(f"/{DROPPED_BEFORE}")


# Formats of numbers: thousands are separated, shares are in per cent, digests are shortened.

NO_VALUE = "–"


def number(value: float | None) -> str:
    """Format a number.

    A whole number gets thousands separators. Another number gets about four significant digits. None becomes a dash.
    """
    if value is None:
        return NO_VALUE
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def estimate(value: float | None) -> str:
    """Format an estimate with two to three digits and a unit prefix, such as `≈ 1.2 M`."""
    return NO_VALUE if value is None else f"≈ {format_short(value)}"


def brief(value: int | None) -> str:
    """Format a count for a narrow column.

    Counts of up to five digits are exact, such as `99,999`. Larger counts are shortened, such as `100 k`.
    """
    return number(value) if value is None or value < 100_000 else format_short(value)


def percent(share: float) -> str:
    """Format a share in 0..1 in per cent; a share close to 0 or 1 is never rounded to 0 or 100 %."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def digest(value: str) -> str:
    """Return the first twelve digits of a digest."""
    return value[:12]
