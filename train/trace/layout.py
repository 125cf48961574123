"""The rows of a step's global batch that each rank and micro-batch read, by the layout of that step."""

import math
from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.storage import Store
from train.checkpoint.folder import list_checkpoints
from train.config.layout import AXES, LayoutConfig
from train.parallel.layout import axes_of, data_ranks, num_micro_batches, rows_of
from train.plan.plan import Plan


@dataclass(frozen=True)
class StepLayout:
    """The layout of a step."""

    axes: dict[str, int]
    """Size of every axis of the mesh."""
    layout: LayoutConfig
    """Settings; only the size of a micro-batch is used."""
    named: str
    """The origin of the layout: a checkpoint or the plan."""

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
                f"--rank: expected 0 to {self.ranks - 1}, the ranks of {self.named}, got {rank}. Choose one of them."
            )
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.axes[axis])
        return place["replicate"] * self.axes["shard"] + place["shard"]

    def rows(self, num_rows: int, rank: int, micro_batch: int | None = None) -> range:
        """Return the rows of a global batch that a rank reads, or only those of one of its micro-batches (from 0).

        Empty if the rank reads only padding, to match the number of micro-batches of the others. Raises
        ConfigError if there is no such rank or micro-batch.
        """
        own_rows = rows_of(num_rows, data_ranks(self.axes), self.data_rank(rank))
        if micro_batch is None:
            return own_rows
        number = num_micro_batches(num_rows, self.layout, self.axes)
        if not 0 <= micro_batch < number:
            raise ConfigError(
                f"--micro-batch: expected 0 to {number - 1}, the micro-batches of a rank in {self.named}, got "
                f"{micro_batch}. Choose one of them."
            )
        size = self.layout.rows_at_once
        return own_rows[micro_batch * size : (micro_batch + 1) * size]


def layout_of_step(run: Store, plan: Plan, step: int, ranks: int | None = None) -> StepLayout:
    """Return the layout of the first checkpoint from a step on, else of the last before it, else of the plan.

    `ranks`: use the layout of the plan on this number of ranks instead. Raises ConfigError if that layout does not fit
    `ranks`.
    """
    layout = plan.settings.layout.for_device("cpu")  # rows are the same on every type of device
    notes = list_checkpoints(run) if run.is_local and ranks is None else []
    if notes:
        note = next((note for note in notes if note.step >= step), notes[-1])
        size = int(note.layout.settings.get("micro_batch", layout.rows_at_once))
        axes = {axis: note.layout.axes.get(axis, 1) for axis in AXES}
        return StepLayout(axes, layout.model_copy(update={"micro_batch": size}), f"checkpoint {note.name}")
    if ranks is None:
        fixed = [getattr(layout, axis) or 1 for axis in AXES]
        ranks = math.prod(fixed)
    return StepLayout(axes_of(layout, ranks), layout, f"the plan on {ranks} rank(s)")
