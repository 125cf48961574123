"""What the training half left in a run, read from the JSON that it writes: plan, steps, events and checkpoints.

That half is known by its files, not by its code.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.storage import Store

PLAN_NAME = "train/plan.json"
METRICS_NAME = "train/metrics.jsonl"
EVENTS_NAME = "train/events.jsonl"
OUTCOME_NAME = "train/manifest.json"
CHECKPOINTS = "train/checkpoints"
NOTE_NAME = "checkpoint.json"
NEEDED = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
"""What every step says that is not skipped."""


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
    mix: str = ""
    """Digest of the mix that the shares of the sources follow; empty = of none."""


@dataclass(frozen=True)
class Step:
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

    plan: Plan | None
    steps: Sequence[Step]
    events: Sequence[Mapping[str, Any]]
    """What happened beside the steps, as it was written."""
    outcome: Mapping[str, Any] | None
    """The closing manifest of a run that reached its end."""
    checkpoints: Sequence[Checkpoint]


def read_training(run: Store) -> Training:
    """What stands in a run's train folder. Raises ContractError if it is not what it promises to be."""
    outcome = run.read_json(OUTCOME_NAME) if run.exists(OUTCOME_NAME) else None
    return Training(_read_plan(run), _read_metrics(run), _read_events(run), outcome, _read_notes(run))


def _read_plan(run: Store) -> Plan | None:
    if not run.exists(PLAN_NAME):
        return None
    plan = run.read_json(PLAN_NAME)
    try:
        last = plan["stages"][-1]
        figures = tuple(Figure(**figure) for figure in plan["figures"])
        steps = int(last["first_step"]) + int(last["num_steps"])
        mix = plan.get("settings", {}).get("train", {}).get("mix", "")
        return Plan(plan["dataset"], digest_of(plan), steps, figures, mix)
    except (IndexError, KeyError, TypeError) as error:
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
    needed = ("learning_rate", "tokens_per_second") if line.get("skipped") else NEEDED
    found = {name: line[name] for name in ("step", *needed)}
    return Step(**found | {field.name: line[field.name] for field in fields(Step) if field.name in line})


def _read_events(run: Store) -> list[Mapping[str, Any]]:
    """Every event in order; what a killed process left of a line is passed over."""
    found: list[Mapping[str, Any]] = []
    for line in run.read_bytes(EVENTS_NAME).split(b"\n") if run.exists(EVENTS_NAME) else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or not {"kind", "step", "at"} <= event.keys():
            raise ContractError(f"{run.uri}/{EVENTS_NAME}: promised one event a line, found {event}; restore it")
        found.append(event)
    return found


def _read_notes(run: Store) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first; like the trainer, this looks for the notes that stand in the folder."""
    folder = run.child(CHECKPOINTS)
    notes = [folder.read_json(name) for name in folder.walk() if name.endswith(f"/{NOTE_NAME}")]
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
