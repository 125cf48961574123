"""Which rows of a step's global batch a rank read, and in which micro-batch, by the layout it was computed in."""

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
    """Settings, of which the size of a micro-batch counts."""
    named: str
    """Where the layout is written."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def data_rank(self, rank: int) -> int:
        """Which of the groups of ranks with rows of their own a rank belongs to.

        Ranks count through the axes in the order of AXES, the last one fastest. Raises ConfigError if there is no such
        rank.
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
        """The rows of a global batch that a rank reads; of one of its micro-batches (from 0) only.

        Empty where the rank got padding to keep step with the others. Raises ConfigError if there is no such rank or
        micro-batch.
        """
        here = rows_of(num_rows, data_ranks(self.axes), self.data_rank(rank))
        if micro_batch is None:
            return here
        number = num_micro_batches(num_rows, self.layout, self.axes)
        if not 0 <= micro_batch < number:
            raise ConfigError(
                f"--micro-batch: expected 0 to {number - 1}, those of a rank's rows in {self.named}, got "
                f"{micro_batch}. Choose one of them."
            )
        size = self.layout.rows_at_once
        return here[micro_batch * size : (micro_batch + 1) * size]


def layout_of_step(run: Store, plan: Plan, step: int, ranks: int | None = None) -> StepLayout:
    """The layout of the first checkpoint behind a step, else of the last one before it, else of the plan.

    `ranks`: that of the plan on so many ranks, whatever was trained. Raises ConfigError if the plan does not say how
    many ranks there are, or its layout does not go into `ranks`.
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
