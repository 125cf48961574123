"""Enumerate the layouts of a run on a cluster, and reject invalid ones before they are timed.

A tensor axis stays within a node, where its collectives in every layer have a fast link. GPipe is left out: it takes
as long as 1F1B and more memory. A context axis divides the heads if their number allows it, else the keys. Settings of
`[layout]` in the recipe are kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from train.config.layout import SPLIT_BACKWARD, LayoutConfig
from train.config.settings import AUTO, Settings
from train.model.shape import ModelShape
from train.parallel.devices import Cluster
from train.parallel.layout import layout_problems, recomputation_problem

# A split of a run over ranks: its axes, its description, and its settings.


class LayoutSplit(NamedTuple):
    """A split of model and batch over ranks, without the micro-batch size and the recomputation mode."""

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
        """True if every rank holds the whole model."""
        return self.data in ("ddp", "zero1")

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis of the device mesh, outermost first."""
        return {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }


def layout_overrides(split: LayoutSplit, size: int, mode: str) -> dict[str, Any]:
    """Return the settings of `[layout]` for a split, a micro-batch size and a recomputation mode."""
    settings: dict[str, Any] = {"data": split.data, "micro_batch": size, "activation_checkpointing": mode}
    if not split.whole and split.replicate > 1:
        settings["replicate"] = split.replicate
    for name in ("context", "tensor", "pipeline"):
        if getattr(split, name) > 1:
            settings[name] = getattr(split, name)
    if split.context > 1:
        settings["context_by"] = split.context_by
    if split.pipeline > 1:
        settings |= {"schedule": split.schedule, "stages_per_rank": split.stages}
    return settings


def describe_split(split: LayoutSplit) -> str:
    """Return a split in one line, such as `zero3, shard 8 · tensor 2`."""
    sizes = {"replicate": split.replicate, "shard": split.shard} if not split.whole else {"replicas": split.replicate}
    sizes |= {"context": split.context, "tensor": split.tensor, "pipeline": split.pipeline}
    axes = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    by = f" by {split.context_by}" if split.context > 1 else ""
    stages = f", {split.stages} stages a rank" if split.stages > 1 else ""
    return f"{split.data}, {axes}{by}" + (f", {split.schedule}{stages}" if split.pipeline > 1 else "")


MOST_CONTEXT = 64
"""Largest context axis."""
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 2), ("zbv", 2))
"""Pipeline schedules, each with its stages per rank."""
RECOMPUTE_MODES = ("none", "selective", "full")
CONTRADICTION, DIVISION = "settings contradict", "does not divide"
ROWS, TURNS = "fewer sequences than groups of ranks", "micro-batches do not go into the pipeline"
UNCOMPILED = "torch does not compile the recomputation"


class Batch(NamedTuple):
    """Batch shape and number of optimizer steps of one training stage."""

    seq_len: int
    """Positions of a row."""
    rows: int
    """Rows of an optimizer step over all ranks."""
    steps: int = 1
    """Optimizer steps of the stage, which weight it in the mean over stages."""


class RejectedLayouts:
    """Counts of rejected layouts by reason, each with an example."""

    def __init__(self) -> None:
        self.counted: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, count: int, example: Callable[[], str]) -> None:
        """Add `count` layouts rejected for `reason`. `example` is called only if the reason is new."""
        if count:
            before, first = self.counted.get(reason) or (0, example())
            self.counted[reason] = before + count, first


class LayoutSpace:
    """The splits to search for a run, and for each split the micro-batch sizes and recomputation modes to try."""

    def __init__(self, shape: ModelShape, settings: Settings, batches: Sequence[Batch], cluster: Cluster):
        self.shape, self.settings, self.batches, self.cluster = shape, settings, batches, cluster
        self.refusals = RejectedLayouts()
        layout = settings.layout
        self._given = {name for name in layout.model_fields_set if getattr(layout, name) not in (None, AUTO)}
        self._most_rows = max(batch.rows for batch in batches)
        self._least_rows = min(batch.rows for batch in batches)
        self.number_problem = cache(self._number_problem)
        self._problem = cache(self._find_problem)

    def splits(self) -> Iterator[LayoutSplit]:
        """Yield every valid split of model, sequences and batch. Invalid splits are counted in `self.refusals`."""
        for split in self._all():
            groups = split.replicate * split.shard
            leaves = max(1, len(self.sizes(groups)) * len(self.modes))
            if groups > self._least_rows:
                problem = f"{groups} groups of ranks, {self._least_rows} sequences a step"
                self.refusals.add(ROWS, leaves, partial(_because, split, problem))
            elif refusal := self._refused(split):
                self.refusals.add(refusal[0], leaves, partial(_because, split, refusal[1]))
            else:
                yield split

    def _all(self) -> Iterator[LayoutSplit]:
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

    def _with_data(self, context: int, by: str, tensor: int, pipeline: int) -> Iterator[LayoutSplit]:
        """Yield the splits with these axis sizes, one for each data-parallel method and pipeline schedule."""
        ranks = self.cluster.world_size // (context * tensor * pipeline)
        if context * tensor * pipeline == 1:
            for data in self._fixed("data", ["ddp", "zero1"] if ranks > 1 else ["ddp"]):
                if data in ("ddp", "zero1"):
                    yield LayoutSplit(data, ranks, 1, 1, by, 1, 1, "1f1b", 1)
        for replicate in self._fixed("replicate", divisors(ranks)):
            shard = ranks // replicate
            if ranks % replicate or self.settings.layout.shard not in (None, shard):
                continue
            # A single rank gathers nothing, but zero3 still frees the 16-bit copies of completed layers.
            for data in self._fixed("data", ["zero2", "zero3"]):
                if data in ("zero2", "zero3"):
                    for schedule, stages in self._schedules(pipeline):
                        yield LayoutSplit(data, replicate, shard, context, by, tensor, pipeline, schedule, stages)

    def _schedules(self, pipeline: int) -> Sequence[tuple[str, int]]:
        layout = self.settings.layout
        if pipeline == 1:
            return [("1f1b", 1)]
        if "schedule" in self._given or "stages_per_rank" in self._given:
            return [(layout.schedule, layout.stages_per_rank or (1 if layout.schedule in ("gpipe", "1f1b") else 2))]
        return SCHEDULES

    def _fixed(self, name: str, options: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try for setting `name`: the value in the recipe, else all `options`.

        Empty if the recipe sets an axis size that does not divide the number of ranks.
        """
        if name not in self._given:
            return options
        value = getattr(self.settings.layout, name)
        return [value] if isinstance(value, str) or self.cluster.world_size % value == 0 else []

    def sizes(self, groups: int) -> list[int]:
        """Return the micro-batch sizes to try for `groups` data-parallel groups, ascending."""
        if "micro_batch" in self._given:
            return [self.settings.layout.rows_at_once]
        # Powers of two, and the rows of a group divided by powers of two, which need the least padding.
        rows = -(-self._most_rows // groups)
        powers = {1 << power for power in range(rows.bit_length())}
        return sorted(powers | {-(-rows // number) for number in powers})

    @cached_property
    def modes(self) -> Sequence[str]:
        """Recomputation modes to try."""
        given = "activation_checkpointing" in self._given
        return (self.settings.layout.activation_checkpointing,) if given else RECOMPUTE_MODES

    # Checks that reject a split before it is timed.

    def _refused(self, split: LayoutSplit) -> tuple[str, str] | None:
        """Return (kind of problem, example) if a split is invalid, else None."""
        # The axes are checked separately, which keeps the number of distinct checks small.
        single = split._replace(replicate=1, shard=1)
        return self._problem(single._replace(pipeline=1, schedule="1f1b", stages=1)) or self._problem(
            single._replace(context=1, context_by="heads", tensor=1)
        )

    def _find_problem(self, split: LayoutSplit) -> tuple[str, str] | None:
        try:
            layout = self.layout(split, 1, self.modes[0])
        except ValidationError as error:
            return CONTRADICTION, "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        settings = self.settings.model_copy(update={"layout": layout})
        lengths = [batch.seq_len for batch in self.batches]
        # Enough rows for any schedule: the actual number is checked with the micro-batches.
        rows = 64 * split.pipeline
        problems = list(layout_problems(self.shape, settings, math.prod(split.axes.values()), lengths, rows))
        return (DIVISION, problems[0]) if problems else None

    def problem(self, split: LayoutSplit, size: int, mode: str) -> tuple[str, str] | None:
        """Return (kind of problem, example) if a split cannot use this micro-batch size and recomputation mode."""
        train = self.settings.train
        if train.attention_dropout and (problem := recomputation_problem(self.layout(split, size, mode), train)):
            return UNCOMPILED, problem
        if split.pipeline == 1:
            return None
        groups = split.replicate * split.shard
        for batch in self.batches:
            number = -(-batch.rows // groups // size)  # as train.parallel.layout.num_micro_batches counts
            if problem := self.number_problem(split.data, split.pipeline, split.schedule, split.stages, number, mode):
                return TURNS, problem
        return None

    def _number_problem(
        self, data: str, pipeline: int, schedule: str, stages: int, number: int, mode: str
    ) -> str | None:
        split = LayoutSplit(data, 1, 1, 1, "heads", 1, pipeline, schedule, stages)
        settings = self.settings.model_copy(update={"layout": self.layout(split, 1, mode)})
        lengths = [batch.seq_len for batch in self.batches]
        return next(layout_problems(self.shape, settings, split.pipeline, lengths, number), None)

    def layout(self, split: LayoutSplit, size: int, mode: str) -> LayoutConfig:
        """Return the section `[layout]` for a split, with the other settings of the recipe.

        Raises ValidationError if these settings contradict each other.
        """
        section = LayoutConfig.model_validate(self.kept | layout_overrides(split, size, mode))
        return section.for_device(self.cluster.device.kind)

    def compiled(self, schedule: str) -> bool:
        """Return True if torch.compile compiles the layers when the pipeline uses this schedule.

        `layout.compile` in the recipe decides. If it is not set, layers are compiled on CUDA unless the schedule
        splits the backward pass.
        """
        if "compile" in self._given:
            return self.settings.layout.compile is True
        return self.cluster.device.kind == "cuda" and schedule not in SPLIT_BACKWARD

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Settings of `[layout]` in the recipe that the search does not vary."""
        searched = set(LayoutSplit._fields) | {"stages_per_rank", "micro_batch", "activation_checkpointing"}
        return self.settings.layout.model_dump(include=self._given - searched)


def _because(split: LayoutSplit, problem: str) -> str:
    return f"{describe_split(split)}: {problem}"


def divisors(number: int) -> list[int]:
    """Return all divisors of `number` in increasing order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
