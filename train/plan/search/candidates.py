"""Every way of splitting a model and its batch over a cluster, and what takes a way out before it is timed.

A tensor axis stays within a node, where its exchanges for every layer have a fast link. GPipe is left out, which takes
as long as 1F1B and more memory. Where heads can be shared the sequence is, by heads; else by keys. What `[layout]` of
the recipe sets is kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from train.config.layout import SPLIT_BACKWARD, LayoutConfig
from train.config.settings import AUTO, Settings
from train.model.shape import ModelShape
from train.parallel.layout import layout_problems
from train.plan.search.devices import Cluster

# A way of splitting a run over ranks: its axes, its name, and the settings that make it.


class Split(NamedTuple):
    """How a model and a batch are split over ranks, but for the size of micro-batches and what is recomputed."""

    data: str
    replicate: int
    shard: int
    context: int
    context_by: str
    tensor: int
    pipeline: int
    schedule: str
    stages: int

    @property
    def whole(self) -> bool:
        """Whether every rank has the whole model."""
        return self.data in ("ddp", "zero1")

    @property
    def axes(self) -> dict[str, int]:
        """Size of every axis, the outermost first."""
        return {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }


def overrides(split: Split, size: int, mode: str) -> dict[str, Any]:
    """A layout as the settings of `[layout]` that make it."""
    found: dict[str, Any] = {"data": split.data, "micro_batch": size, "activation_checkpointing": mode}
    if not split.whole and split.replicate > 1:
        found["replicate"] = split.replicate
    for name in ("context", "tensor", "pipeline"):
        if getattr(split, name) > 1:
            found[name] = getattr(split, name)
    if split.context > 1:
        found["context_by"] = split.context_by
    if split.pipeline > 1:
        found |= {"schedule": split.schedule, "stages_per_rank": split.stages}
    return found


def shown(split: Split) -> str:
    """A split in words."""
    sizes = {"replicate": split.replicate, "shard": split.shard} if not split.whole else {"replicas": split.replicate}
    sizes |= {"context": split.context, "tensor": split.tensor, "pipeline": split.pipeline}
    axes = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    by = f" by {split.context_by}" if split.context > 1 else ""
    stages = f", {split.stages} stages a rank" if split.stages > 1 else ""
    return f"{split.data}, {axes}{by}" + (f", {split.schedule}{stages}" if split.pipeline > 1 else "")


MOST_CONTEXT = 64
"""Most ranks that share a sequence."""
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 2), ("zbv", 2))
"""Schedules of a pipeline, each with its stages on a rank."""
MODES = ("none", "selective", "full")
CONTRADICTION, DIVISION = "settings contradict", "does not divide"
ROWS, TURNS = "fewer sequences than groups of ranks", "micro-batches do not go into the pipeline"


class Batch(NamedTuple):
    """What a step of a stage of the run consists of."""

    seq_len: int
    """Positions of a row."""
    rows: int
    """Rows of a step over all ranks."""
    steps: int = 1
    """Steps of the stage: its weight."""


class Refusals:
    """Layouts that were not taken, counted by reason, each with an example."""

    def __init__(self) -> None:
        self.counted: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, count: int, example: Callable[[], str]) -> None:
        """Count some more; the first example stays, and no other is put into words."""
        if count:
            before, first = self.counted.get(reason) or (0, example())
            self.counted[reason] = before + count, first


class Ways:
    """The ways of splitting, and for each the sizes of micro-batches and what may be computed again."""

    def __init__(self, shape: ModelShape, settings: Settings, batches: Sequence[Batch], cluster: Cluster):
        self.shape, self.settings, self.batches, self.cluster = shape, settings, batches, cluster
        self.refusals = Refusals()
        layout = settings.layout
        self._given = {name for name in layout.model_fields_set if getattr(layout, name) not in (None, AUTO)}
        self._most_rows = max(batch.rows for batch in batches)
        self._least_rows = min(batch.rows for batch in batches)
        self.number_problem = cache(self._number_problem)
        self._problem = cache(self._find_problem)

    def splits(self) -> Iterator[Split]:
        """Every way of splitting that the model, the sequences and the batch go into."""
        for split in self._all():
            groups = split.replicate * split.shard
            leaves = max(1, len(self.sizes(groups)) * len(self.modes))
            if groups > self._least_rows:
                told = f"{groups} groups of ranks, {self._least_rows} sequences a step"
                self.refusals.add(ROWS, leaves, partial(_because, split, told))
            elif found := self._refused(split):
                self.refusals.add(found[0], leaves, partial(_because, split, found[1]))
            else:
                yield split

    def _all(self) -> Iterator[Split]:
        world, per_node = self.cluster.world_size, self.cluster.gpus_per_node
        for tensor in self._fixed("tensor", [t for t in divisors(world) if per_node % t == 0]):
            left = world // tensor
            for context in self._fixed("context", [c for c in divisors(left) if c <= MOST_CONTEXT]):
                by = self._by(context, tensor)
                most = self.shape.num_layers
                for pipeline in self._fixed("pipeline", [p for p in divisors(left // context) if p <= most]):
                    if left % (context * pipeline) == 0:
                        yield from self._with_data(context, by, tensor, pipeline)

    def _by(self, context: int, tensor: int) -> str:
        if context == 1 or "context_by" in self._given:
            return self.settings.layout.context_by
        return "keys" if self.shape.num_heads % (context * tensor) else "heads"

    def _with_data(self, context: int, by: str, tensor: int, pipeline: int) -> Iterator[Split]:
        """What data-parallel ranks share out, and the schedule of the pipeline."""
        ranks = self.cluster.world_size // (context * tensor * pipeline)
        if context * tensor * pipeline == 1:
            for data in self._fixed("data", ["ddp", "zero1"] if ranks > 1 else ["ddp"]):
                if data in ("ddp", "zero1"):
                    yield Split(data, ranks, 1, 1, by, 1, 1, "1f1b", 1)
        for replicate in self._fixed("replicate", divisors(ranks)):
            shard = ranks // replicate
            if ranks % replicate or self.settings.layout.shard not in (None, shard):
                continue
            # Alone there is nothing to gather, and yet zero3 frees the copies in 16 bits of the layers that are done.
            for data in self._fixed("data", ["zero2", "zero3"]):
                if data in ("zero2", "zero3"):
                    for schedule, stages in self._schedules(pipeline):
                        yield Split(data, replicate, shard, context, by, tensor, pipeline, schedule, stages)

    def _schedules(self, pipeline: int) -> Sequence[tuple[str, int]]:
        layout = self.settings.layout
        if pipeline == 1:
            return [("1f1b", 1)]
        if "schedule" in self._given or "stages_per_rank" in self._given:
            return [(layout.schedule, layout.stages_per_rank or (1 if layout.schedule in ("gpipe", "1f1b") else 2))]
        return SCHEDULES

    def _fixed(self, name: str, options: Sequence[Any]) -> Sequence[Any]:
        """What the recipe sets, else all options; a size that leaves ranks over is none."""
        if name not in self._given:
            return options
        value = getattr(self.settings.layout, name)
        return [value] if isinstance(value, str) or self.cluster.world_size % value == 0 else []

    def sizes(self, groups: int) -> list[int]:
        """Sizes of micro-batches for so many groups of ranks with rows of their own: powers of two, and equal shares.

        Where micro-batches are filled up, equal shares of the rows waste least.
        """
        if "micro_batch" in self._given:
            return [self.settings.layout.rows_at_once]
        rows = -(-self._most_rows // groups)
        powers = {1 << power for power in range(rows.bit_length())}
        return sorted(powers | {-(-rows // number) for number in powers})

    @cached_property
    def modes(self) -> Sequence[str]:
        """What may be computed again."""
        given = "activation_checkpointing" in self._given
        return (self.settings.layout.activation_checkpointing,) if given else MODES

    # ----------------------------------------------------------------------------------------------- what is refused

    def _refused(self, split: Split) -> tuple[str, str] | None:
        """Why no layout splits like this; of the axes each is looked at on its own, since each has its own reasons."""
        one = split._replace(replicate=1, shard=1)
        return self._problem(one._replace(pipeline=1, schedule="1f1b", stages=1)) or self._problem(
            one._replace(context=1, context_by="heads", tensor=1)
        )

    def _find_problem(self, split: Split) -> tuple[str, str] | None:
        try:
            layout = self.layout(split, 1, self.modes[0])
        except ValidationError as error:
            return CONTRADICTION, "; ".join(str(found["msg"]) for found in error.errors())
        settings = self.settings.model_copy(update={"layout": layout})
        lengths = [batch.seq_len for batch in self.batches]
        # As many rows as any schedule wants: how many there are is looked at with the micro-batches.
        rows = 64 * split.pipeline
        found = list(layout_problems(self.shape, settings, math.prod(split.axes.values()), lengths, rows))
        return (DIVISION, found[0]) if found else None

    def problem(self, split: Split, size: int, mode: str) -> str | None:
        """Why a micro-batch of `size` rows, or this recomputation, does not go into a split; None if they do."""
        if split.pipeline == 1:
            return None
        groups = split.replicate * split.shard
        for batch in self.batches:
            number = -(-batch.rows // groups // size)  # as train.parallel.layout.num_micro_batches counts
            if found := self.number_problem(split.data, split.pipeline, split.schedule, split.stages, number, mode):
                return found
        return None

    def _number_problem(
        self, data: str, pipeline: int, schedule: str, stages: int, number: int, mode: str
    ) -> str | None:
        split = Split(data, 1, 1, 1, "heads", 1, pipeline, schedule, stages)
        settings = self.settings.model_copy(update={"layout": self.layout(split, 1, mode)})
        lengths = [batch.seq_len for batch in self.batches]
        return next(layout_problems(self.shape, settings, split.pipeline, lengths, number), None)

    def layout(self, split: Split, size: int, mode: str) -> LayoutConfig:
        """The section that says so, with everything else as the recipe has it. Raises ValidationError."""
        made = LayoutConfig.model_validate(self.kept | overrides(split, size, mode))
        return made.for_device(self.cluster.device.kind)

    def compiled(self, schedule: str) -> bool:
        """Whether layers are compiled under a schedule: as the recipe says, else wherever the device gains by it."""
        if "compile" in self._given:
            return self.settings.layout.compile is True
        return self.cluster.device.kind == "cuda" and schedule not in SPLIT_BACKWARD

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What the recipe says of a layout that the search leaves alone."""
        searched = set(Split._fields) | {"stages_per_rank", "micro_batch", "activation_checkpointing"}
        return self.settings.layout.model_dump(include=self._given - searched)


def _because(split: Split, problem: str) -> str:
    return f"{shown(split)}: {problem}"


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
