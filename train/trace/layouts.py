"""The rows of a step's global batch that each rank and micro-batch read, by the layout of that step.

Training may resume in another layout, and records the layout of each start and resume in its events. Checkpoints record
it too, but most of them are removed, so they are read only where events are missing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from train.checkpoint.folder import CheckpointMetadata, Layout, list_checkpoints
from train.config.layout import AXES, LayoutConfig
from train.monitor.events import EVENTS_NAME, Started, layout_changes, read_events
from train.parallel.layout import axes_of, data_ranks, num_micro_batches, rows_of
from train.plan.plan import Plan


@dataclass(frozen=True)
class StepLayout:
    """The layout in which the rows of a step are divided among ranks and micro-batches."""

    axes: dict[str, int]
    """Size of every axis of the mesh."""
    layout: LayoutConfig
    """Settings of `[layout]`; only the size of a micro-batch is used."""
    named: str
    """Where the layout comes from: a start of training, a checkpoint or the plan."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel group of a rank: ranks of one group read the same rows.

        Ranks are numbered along the axes in the order of AXES, the last axis fastest. Raises ConfigError if there
        is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ConfigError(
                f"--rank: expected 0 to {self.ranks - 1}, the ranks of {self.named}, got {rank}. Set --rank to one of "
                "them."
            )
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.axes[axis])
        return place["replicate"] * self.axes["shard"] + place["shard"]

    def rows(self, num_rows: int, rank: int, micro_batch: int | None = None) -> range:
        """Return the rows of a global batch that a rank reads, or only those of one of its micro-batches (0 = first).

        Empty if the micro-batch has only padding rows. Raises ConfigError if there is no such rank or micro-batch.
        """
        own_rows = rows_of(num_rows, data_ranks(self.axes), self.data_rank(rank))
        if micro_batch is None:
            return own_rows
        number = num_micro_batches(num_rows, self.layout, self.axes)
        if not 0 <= micro_batch < number:
            raise ConfigError(
                f"--micro-batch: expected 0 to {number - 1}, the micro-batches of a rank in {self.named}, got "
                f"{micro_batch}. Set --micro-batch to one of them."
            )
        size = self.layout.rows_at_once
        return own_rows[micro_batch * size : (micro_batch + 1) * size]


def layout_of_step(run: Store, plan: Plan, step: int, ranks: int | None = None) -> StepLayout:
    """Return the layout in which a step was computed, or will be if training continues as it is.

    It is that of the last start or resume of training before the step. Without events, it is that of the first
    checkpoint at or after the step, or else of the last checkpoint; without checkpoints too, that of the plan. `ranks`:
    return the plan's layout on this number of ranks instead. Raises ConfigError if the layout of the step is unknown,
    or if the plan's layout does not work with `ranks` ranks.
    """
    layout = plan.settings.layout.for_device("cpu")  # rows are the same on every type of device
    if ranks is not None:
        return StepLayout(axes_of(layout, ranks), layout, f"the plan on {ranks} rank(s)")
    notes = list_checkpoints(run)
    recorded = _recorded_layouts(run, layout)
    if not all(_agrees(recorded, note, layout) for note in notes):
        recorded = []  # the events are those of another training, or some are lost
    if known := [own for after, own in recorded if after < step]:
        return known[-1]
    kept = [note.step for note in notes if note.step]
    if step < kept[0] if kept else recorded:
        first = f"the first checkpoint kept is that of step {kept[0]}" if kept else "no checkpoint is kept"
        raise ConfigError(
            f"--rank: expected a step whose layout is recorded, got step {step}: {EVENTS_NAME} does not have it, and "
            f"{first}. Give the number of ranks with --ranks."
        )
    if notes:
        note = next((note for note in notes if note.step >= step), notes[-1])
        return _step_layout(note.layout, layout, f"checkpoint {note.name}")
    ranks = math.prod(getattr(layout, axis) or 1 for axis in AXES)
    return StepLayout(axes_of(layout, ranks), layout, f"the plan on {ranks} rank(s)")


def _recorded_layouts(run: Store, planned: LayoutConfig) -> list[tuple[int, StepLayout]]:
    """Return (number of steps before, layout) of each part of the training, from the events.

    Raises ContractError if an event has no layout.
    """
    layouts = []
    for after, start in layout_changes(read_events(run)):
        named = "the start of training" if isinstance(start, Started) else f"the resume from step {start.step}"
        try:
            layout = Layout.model_validate(start.layout)
            step = _step_layout(layout, planned, named)
        except (ValidationError, ValueError, TypeError) as error:
            raise ContractError(
                f"{run.uri}/{EVENTS_NAME}: expected the layout of the ranks in the event `{start.kind}` of step "
                f"{start.step}, got an invalid one. Restore the file from a backup."
            ) from error
        layouts.append((after, step))
    return layouts


def _agrees(recorded: Sequence[tuple[int, StepLayout]], note: CheckpointMetadata, planned: LayoutConfig) -> bool:
    """Return True if the events have the layout that a checkpoint has for its step, or none for that step."""
    own = [layout for after, layout in recorded if after < note.step][-1:]
    expected = _step_layout(note.layout, planned, "")
    return all((layout.axes, layout.layout) == (expected.axes, expected.layout) for layout in own)


def _step_layout(layout: Layout, planned: LayoutConfig, named: str) -> StepLayout:
    size = int(layout.settings.get("micro_batch", planned.rows_at_once))
    axes = {axis: layout.axes.get(axis, 1) for axis in AXES}
    if wrong := [name for name, number in (axes | {"micro_batch": size}).items() if number < 1]:
        raise ValueError(f"{wrong[0]}: expected at least 1, got less. Restore the file from a backup.")
    return StepLayout(axes, planned.model_copy(update={"micro_batch": size}), named)
