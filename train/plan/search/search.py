"""The search for a layout: every way of splitting a run over a cluster, timed by a model of its costs.

All are timed; memory is looked at from the fastest on, until enough fit. Nothing is started, and torch is not loaded.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from schemas.errors import ConfigError
from train.config.layout import LayoutConfig
from train.config.settings import Settings
from train.data.stages import StagePlan, row_length
from train.model.shape import ModelShape, flops_per_token
from train.parallel.memory import Memory, RankMemory, memory_of_rank
from train.plan.search.candidates import TURNS, Batch, Split, Ways, shown
from train.plan.search.compute import Compute, computed_in
from train.plan.search.cost import Links, StepCost
from train.plan.search.devices import Cluster
from train.plan.search.result import Candidate, Found

STATES, ACTIVATIONS = "weights and states do not fit", "does not fit into memory"
SLOWER, SAME_AXES = "slower", "slower with the same axes"


class _Leaf(NamedTuple):
    """A layout that could be trained if it fits."""

    seconds: float
    number: int
    split: Split
    size: int
    mode: str


def search(
    shape: ModelShape,
    settings: Settings,
    run: Sequence[StagePlan] | tuple[int, int],
    cluster: Cluster,
    top: int = 5,
) -> Found:
    """The `top` fastest layouts of a run on a cluster, each with other axes, and why the others were not taken.

    `run` is its stages, or positions of a row and rows of a step. What `[layout]` sets is kept; what is automatic goes
    by the device. Raises ConfigError if the device does not compute in the precision asked for.
    """
    return _Search(shape, settings, run, cluster).found(top)


def batches_of(settings: Settings, run: Sequence[StagePlan] | tuple[int, int]) -> list[Batch]:
    """What the steps of a run consist of."""
    if isinstance(run, tuple) and len(run) == 2 and isinstance(run[0], int) and isinstance(run[1], int):
        return [Batch(run[0], run[1])]
    stages = [stage for stage in run if isinstance(stage, StagePlan)]
    return [Batch(row_length(settings.train, stage.seq_len), stage.global_batch, stage.num_steps) for stage in stages]


def axes_given(layout: LayoutConfig) -> dict[str, Any]:
    """The axes of a layout as settings that a search keeps."""
    sharded = layout.data in ("zero2", "zero3")
    names = ("data", *(["replicate"] if sharded else []), "context", "tensor", "pipeline")
    found = {name: getattr(layout, name) for name in names}
    if layout.context > 1:
        found["context_by"] = layout.context_by
    if layout.pipeline > 1:
        found |= {"schedule": layout.schedule, "stages_per_rank": layout.stages}
    return found


def predict(
    shape: ModelShape, settings: Settings, run: Sequence[StagePlan] | tuple[int, int], cluster: Cluster
) -> Candidate:
    """What a step takes in the layout of the settings as it stands, whether it fits or not.

    Raises ConfigError if it does not go into the cluster.
    """
    layout = settings.layout.for_device(cluster.device.kind)
    again = {"activation_checkpointing": layout.activation_checkpointing}
    given = axes_given(layout) | again | layout.model_dump(exclude_unset=True)
    fixed = settings.model_copy(update={"layout": type(layout).model_validate(given)})
    searching = _Search(shape, fixed, run, cluster)
    leaves = searching.leaves(whatever_fits=True)
    if not leaves:
        reasons = "; ".join(f"{reason}: {example}" for reason, (_, example) in searching.ways.refusals.counted.items())
        raise ConfigError(f"layout: expected to go into {cluster}, got {reasons or 'axes that do not divide it'}")
    return searching.candidate(leaves[0])


class _Search:
    """One search; what it remembers ends with it."""

    def __init__(
        self, shape: ModelShape, settings: Settings, run: Sequence[StagePlan] | tuple[int, int], cluster: Cluster
    ):
        device = cluster.device
        settings = settings.with_precisions_for(device.kind, device.capability)
        precision = computed_in(settings)
        if precision not in device.peak_flops:
            raise ConfigError(
                f"train.precision: expected one that {device.name} computes in ({', '.join(device.peak_flops)}), got "
                f"{precision}. Take another."
            )
        self._begun = time.perf_counter()
        self.shape, self.settings, self.cluster = shape, settings, cluster
        self._peak = device.utilisation_peak(precision) * cluster.world_size
        self.batches = batches_of(settings, run)
        self.ways = Ways(shape, settings, self.batches, cluster)
        self._computes = {compiled: self._costs(compiled) for compiled in (False, True)}
        self._links = Links(cluster)
        self._limit = settings.plan.device_memory or device.memory_bytes - device.reserved
        self._steps = sum(batch.steps for batch in self.batches)

    def _costs(self, compiled: bool) -> list[Compute]:
        """What micro-batches of each stage cost, with layers compiled or not."""
        layout = self.settings.layout.model_copy(update={"compile": compiled})
        settings, device = self.settings.model_copy(update={"layout": layout}), self.cluster.device
        return [Compute(self.shape, settings, device, batch.seq_len) for batch in self.batches]

    def found(self, top: int) -> Found:
        """Time all, then look at the memory of the fastest."""
        best: list[Candidate] = []
        taken: set[Split] = set()
        least: dict[Split, tuple[_Leaf, int]] = {}
        refusals = self.ways.refusals
        leaves = sorted(self.leaves())
        for place, leaf in enumerate(leaves):
            if len(best) == top:
                refusals.add(SLOWER, len(leaves) - place, partial(_timed, leaf))
                break
            axes = leaf.split._replace(schedule="", stages=1)
            if axes in taken:
                refusals.add(SAME_AXES, 1, partial(_timed, leaf))
                continue
            if leaf.split not in least:
                least[leaf.split] = self._least(leaf)
            smallest, peak = least[leaf.split]
            if peak <= self._limit:
                smallest, peak = leaf, self._first_place(leaf)
            if peak <= self._limit:
                candidate = self.candidate(leaf)
                peak = candidate.memory.peak
                if peak <= self._limit:
                    best.append(candidate)
                    taken.add(axes)
                    continue
            refusals.add(ACTIVATIONS, 1, partial(self._weighed, smallest, peak))
        seconds = time.perf_counter() - self._begun
        return Found(self.cluster, tuple(best), dict(refusals.counted), self._limit, seconds)

    def leaves(self, whatever_fits: bool = False) -> list[_Leaf]:
        """Every layout with its time; those whose weights and states alone are too large are left out, unless asked."""
        found: list[_Leaf] = []
        for split in self.ways.splits():
            computes = self._computes[self.ways.compiled(split.schedule)]
            costs = [StepCost(compute, self._links, split) for compute in computes]
            groups = split.replicate * split.shard
            sizes = self.ways.sizes(groups)
            states = costs[0].states_bytes()
            if states > self._limit and not (whatever_fits or self.settings.layout.offload):
                self.ways.refusals.add(
                    STATES, len(sizes) * len(self.ways.modes), partial(self._too_large, split, states)
                )
                continue
            for size in sizes:
                for mode in self.ways.modes:
                    if problem := self.ways.problem(split, size, mode):
                        self.ways.refusals.add(TURNS, 1, partial(_unturned, split, size, problem))
                        continue
                    seconds = sum(
                        batch.steps * sum(cost.parts(-(-batch.rows // groups), size, mode).values())
                        for cost, batch in zip(costs, self.batches, strict=True)
                    )
                    found.append(_Leaf(seconds / self._steps, len(found), split, size, mode))
        return found

    def candidate(self, leaf: _Leaf) -> Candidate:
        """A layout with everything that is known of it."""
        split = leaf.split
        groups = split.replicate * split.shard
        parts: dict[str, float] = {}
        for compute, batch in zip(self._computes[self.ways.compiled(split.schedule)], self.batches, strict=True):
            found = StepCost(compute, self._links, split).parts(-(-batch.rows // groups), leaf.size, leaf.mode)
            for name, seconds in found.items():
                parts[name] = parts.get(name, 0.0) + seconds * batch.steps / self._steps
        tokens = sum(batch.steps * batch.rows * batch.seq_len for batch in self.batches) / self._steps
        flops = sum(
            batch.steps * batch.rows * batch.seq_len * flops_per_token(self.shape, batch.seq_len)
            for batch in self.batches
        )
        rows = -(-max(batch.rows for batch in self.batches) // groups)
        return Candidate(
            split=split,
            layout=self.ways.layout(split, leaf.size, leaf.mode),
            micro_batches=-(-rows // leaf.size),
            step_seconds=leaf.seconds,
            tokens_per_second=tokens / leaf.seconds,
            mfu=flops / self._steps / leaf.seconds / self._peak,
            memory=max((self._memory(leaf, batch) for batch in self.batches), key=lambda memory: memory.peak),
            parts=parts,
        )

    def _memory(self, leaf: _Leaf, batch: Batch) -> Memory:
        kind = self.cluster.device.kind
        settings = self._settings(leaf)
        return memory_of_rank(self.shape, settings, self.cluster.world_size, batch.seq_len, batch.rows, kind)

    def _settings(self, leaf: _Leaf) -> Settings:
        return self.settings.model_copy(update={"layout": self.ways.layout(leaf.split, leaf.size, leaf.mode)})

    def _least(self, leaf: _Leaf) -> tuple[_Leaf, int]:
        """What a split needs at least, everything computed again, and how: with single rows or, since no gradients add
        up then, with all rows at once."""
        sizes = self.ways.sizes(leaf.split.replicate * leaf.split.shard)
        single = leaf._replace(size=sizes[0], mode=self.ways.modes[-1])
        need = self._first_place(single)
        if need <= self._limit:
            return single, need
        whole = single._replace(size=sizes[-1])
        return min((single, need), (whole, self._first_place(whole)), key=lambda found: found[1])

    def _too_large(self, split: Split, states: float) -> str:
        return f"{shown(split)}: {states / 1e9:.4g} of {self._limit / 1e9:.4g} GB"

    def _weighed(self, leaf: _Leaf, peak: int) -> str:
        return f"{_name(leaf)}: {peak / 1e9:.4g} of {self._limit / 1e9:.4g} GB"

    def _first_place(self, leaf: _Leaf) -> int:
        """Memory of the first place of a pipeline, which holds the most micro-batches: not more than the peak."""
        settings, cuda = self._settings(leaf), self.cluster.device.kind == "cuda"
        if settings.layout.offload:
            return 0
        needs = (
            RankMemory(self.shape, settings, leaf.split.axes, 0, (batch.seq_len, batch.rows), cuda).moments()
            for batch in self.batches
        )
        return max(sum(moment.values()) for moments in needs for moment in moments.values())


def _unturned(split: Split, size: int, problem: str) -> str:
    return f"{shown(split)}, {size} rows: {problem}"


def _timed(leaf: _Leaf) -> str:
    return f"{_name(leaf)}: {leaf.seconds:.4g} s a step"


def _name(leaf: _Leaf) -> str:
    return f"{shown(leaf.split)}, micro-batches of {leaf.size}, {leaf.mode} recomputed"
