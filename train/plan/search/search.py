"""The layout search: enumerate every layout of a run on a cluster and time it with the cost model.

All layouts are timed; memory is checked in order of time, until enough of them fit. No process starts, and torch is not
imported.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from schemas.errors import ConfigError
from train.config.layout import LayoutConfig
from train.config.settings import Settings
from train.data.stages import StagePlan, row_length
from train.model.shape import ModelShape, flops_per_token
from train.parallel.devices import Cluster, number_format_of
from train.parallel.memory import Memory, RankMemory, memory_of_rank
from train.plan.search.candidates import Batch, LayoutSpace, LayoutSplit, describe_split, layout_overrides
from train.plan.search.compute import Compute
from train.plan.search.cost import STEP_COMPONENTS, ClusterRings, StepCost

# The result of a layout search: the best layouts with times and memory, and the rejected ones by reason.

SHOWN_PARTS = 6
"""Number of components of a step's time that are printed, longest first."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted step time and memory."""

    split: LayoutSplit
    layout: LayoutConfig
    """The whole `[layout]` section, including other settings of the recipe."""
    micro_batches: int
    """Accumulated micro-batches of a step, in the training stage with most rows."""
    step_seconds: float
    """Mean seconds over the optimizer steps of the run."""
    tokens_per_second: float
    """Positions per second over all ranks."""
    mfu: float
    """Share of the devices' dense bf16 peak, or of a CPU's peak in its own precision; FLOPs count all attention pairs
    and no recomputation."""
    memory: Memory
    """Memory of the rank and the training stage with the largest peak."""
    parts: dict[str, float]
    """Seconds of a step by component; they add up to step_seconds."""

    def layout_settings(self) -> dict[str, Any]:
        """Return the settings of `[layout]` for this candidate."""
        layout = self.layout
        section = layout_overrides(self.split, layout.rows_at_once, layout.activation_checkpointing)
        return section | {"compile": layout.compile}

    @property
    def name(self) -> str:
        """The layout in words: split, micro-batches, recomputation and compilation."""
        mode = self.layout.activation_checkpointing
        again = {"none": "", "selective": ", cheap parts again", "full": ", layers again"}.get(mode, f", {mode}")
        turns = f"{self.micro_batches} micro-batch(es) of {self.layout.micro_batch}"
        return f"{describe_split(self.split)}; {turns}{again}{', compiled' if self.layout.compile else ''}"


@dataclass(frozen=True)
class SearchResult:
    """The fastest layouts of a search, and the counts of rejected layouts by reason."""

    cluster: Cluster
    best: tuple[Candidate, ...]
    """The fastest layouts that fit, each with different axes; empty = none fits."""
    refused: dict[str, tuple[int, str]]
    """By reason: the number of rejected layouts, and an example with its numbers."""
    limit: int
    """Memory limit of a rank [bytes]."""
    seconds: float
    """Duration of the search [s]."""

    @property
    def searched(self) -> int:
        """Number of layouts examined."""
        return len(self.best) + sum(count for count, _ in self.refused.values())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the result as text: a block for each of the best layouts, then the reasons for rejection."""
        device = self.cluster.device
        yield (
            f"{self.searched:,} layouts for {self.cluster}, {self.limit / 1e9:.4g} GB usable each, in "
            f"{self.seconds:.2f} s; predicted, not measured"
        )
        for rank, candidate in enumerate(self.best, start=1):
            yield (
                f"{rank}. {candidate.step_seconds:.4g} s a step, {candidate.tokens_per_second:,.0f} tokens/s, MFU "
                f"{100 * candidate.mfu:.1f} %, {candidate.memory.peak / 1e9:.4g} GB at its largest "
                f"({candidate.memory.peak_moment})"
            )
            yield f"   {candidate.name}"
            yield f"   {', '.join(_shares(candidate))}"
        if not self.best:
            yield "none fits"
        yield "rejected:"
        for reason, (count, example) in sorted(self.refused.items(), key=lambda item: -item[1][0]):
            yield f"   {count:>9,} {reason}; such as {example}"
        yield f"device: {device.source}. Uncertain: {device.uncertain or 'nothing, it was measured here'}."

    def meanings(self) -> Iterator[str]:
        """Return one line for each component of a step's time: name and meaning."""
        return (f"{name}: {meaning}" for name, meaning in STEP_COMPONENTS.items())


def _shares(candidate: Candidate) -> Iterator[str]:
    """Return a text such as `products 43 %` for each of the largest components of a step's time."""
    largest = sorted(candidate.parts.items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    return (f"{name} {100 * part / candidate.step_seconds:.0f} %" for name, part in largest if part > 0)


STATES, ACTIVATIONS = "weights and states do not fit", "does not fit into memory"
SLOWER, SAME_AXES = "slower", "slower with the same axes"


class _Leaf(NamedTuple):
    """A valid layout with its predicted step time; its memory is not checked yet."""

    seconds: float
    number: int
    split: LayoutSplit
    size: int
    mode: str


def search(
    shape: ModelShape,
    settings: Settings,
    run: Sequence[StagePlan] | tuple[int, int],
    cluster: Cluster,
    top: int = 5,
) -> SearchResult:
    """Return the `top` fastest layouts of a run on a cluster, and the counts of rejected layouts.

    Each of the fastest layouts has different axes. `run`: training stages, or one batch shape (positions of a row, rows
    of a step). Settings of `[layout]` in the recipe are kept. Raises ConfigError if the device does not support
    `train.precision`.
    """
    return _Search(shape, settings, run, cluster).best_layouts(top)


def batches_of(settings: Settings, run: Sequence[StagePlan] | tuple[int, int]) -> list[Batch]:
    """Return the batch shape (row length, rows per step) and number of steps of each training stage of a run."""
    if isinstance(run, tuple) and len(run) == 2 and isinstance(run[0], int) and isinstance(run[1], int):
        return [Batch(run[0], run[1])]
    stages = [stage for stage in run if isinstance(stage, StagePlan)]
    return [Batch(row_length(settings.train, stage.seq_len), stage.global_batch, stage.num_steps) for stage in stages]


def axes_as_settings(layout: LayoutConfig) -> dict[str, Any]:
    """Return the axes of a layout as settings of `[layout]`, so that a search keeps these axes."""
    sharded = layout.data in ("zero2", "zero3")
    names = ("data", *(["replicate"] if sharded else []), "context", "tensor", "pipeline")
    axes = {name: getattr(layout, name) for name in names}
    if layout.context > 1:
        axes["context_by"] = layout.context_by
    if layout.pipeline > 1:
        axes |= {"schedule": layout.schedule, "stages_per_rank": layout.stages}
    return axes


def predict(
    shape: ModelShape, settings: Settings, run: Sequence[StagePlan] | tuple[int, int], cluster: Cluster
) -> Candidate:
    """Return the layout of the settings with its predicted step time and memory, even if it does not fit into memory.

    Raises ConfigError if the layout does not work on the cluster.
    """
    layout = settings.layout.for_device(cluster.device.kind)
    again = {"activation_checkpointing": layout.activation_checkpointing}
    given = axes_as_settings(layout) | again | layout.model_dump(exclude_unset=True)
    fixed = settings.model_copy(update={"layout": type(layout).model_validate(given)})
    searching = _Search(shape, fixed, run, cluster)
    leaves = searching.leaves(whatever_fits=True)
    if not leaves:
        reasons = "; ".join(f"{reason}: {example}" for reason, (_, example) in searching.space.refusals.counted.items())
        raise ConfigError(
            f"layout: expected axes that work on {cluster}, got {reasons or 'sizes that do not divide its devices'}. "
            "Change layout.replicate, layout.context, layout.tensor or layout.pipeline."
        )
    return searching.candidate(leaves[0])


class _Search:
    """One layout search, with its caches."""

    def __init__(
        self, shape: ModelShape, settings: Settings, run: Sequence[StagePlan] | tuple[int, int], cluster: Cluster
    ):
        device = cluster.device
        settings = settings.with_precisions_for(device.kind, device.capability)
        precision = number_format_of(settings)
        if precision not in device.peak_flops:
            raise ConfigError(
                f"train.precision: expected a precision that {device.name} computes in "
                f"({', '.join(device.peak_flops)}), got {precision}. Set train.precision to one of these."
            )
        self._start = time.perf_counter()
        self.shape, self.settings, self.cluster = shape, settings, cluster
        self._peak = device.utilisation_peak(precision) * cluster.world_size
        self.batches = batches_of(settings, run)
        self.space = LayoutSpace(shape, settings, self.batches, cluster)
        self._computes = {compiled: self._costs(compiled) for compiled in (False, True)}
        self._links = ClusterRings(cluster)
        self._limit = settings.plan.device_memory or device.memory_bytes - device.reserved
        self._steps = sum(batch.steps for batch in self.batches)

    def _costs(self, compiled: bool) -> list[Compute]:
        """Return the `Compute` of each training stage; `compiled`: whether layers are compiled."""
        layout = self.settings.layout.model_copy(update={"compile": compiled})
        settings, device = self.settings.model_copy(update={"layout": layout}), self.cluster.device
        return [Compute(self.shape, settings, device, batch.seq_len) for batch in self.batches]

    def best_layouts(self, top: int) -> SearchResult:
        """Return the `top` fastest layouts that fit into memory."""
        best: list[Candidate] = []
        taken: set[LayoutSplit] = set()
        least: dict[LayoutSplit, tuple[_Leaf, int]] = {}
        refusals = self.space.refusals
        # All step times are predicted; then memory is checked, fastest layout first.
        leaves = sorted(self.leaves())
        for index, leaf in enumerate(leaves):
            if len(best) == top:
                refusals.add(SLOWER, len(leaves) - index, partial(_timed, leaf))
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
        seconds = time.perf_counter() - self._start
        return SearchResult(self.cluster, tuple(best), dict(refusals.counted), self._limit, seconds)

    def leaves(self, whatever_fits: bool = False) -> list[_Leaf]:
        """Return every valid layout with its predicted step time.

        Layouts whose weights and optimizer state alone exceed the memory are left out, unless `whatever_fits` is True.
        """
        leaves: list[_Leaf] = []
        for split in self.space.splits():
            computes = self._computes[self.space.compiled(split.schedule)]
            costs = [StepCost(compute, self._links, split) for compute in computes]
            groups = split.replicate * split.shard
            sizes = self.space.sizes(groups)
            states = costs[0].states_bytes()
            if states > self._limit and not (whatever_fits or self.settings.layout.offload != "none"):
                self.space.refusals.add(
                    STATES, len(sizes) * len(self.space.modes), partial(self._too_large, split, states)
                )
                continue
            for size in sizes:
                for mode in self.space.modes:
                    if problem := self.space.problem(split, size, mode):
                        self.space.refusals.add(problem[0], 1, partial(_unturned, split, size, problem[1]))
                        continue
                    seconds = sum(
                        batch.steps * sum(cost.parts(-(-batch.rows // groups), size, mode).values())
                        for cost, batch in zip(costs, self.batches, strict=True)
                    )
                    leaves.append(_Leaf(seconds / self._steps, len(leaves), split, size, mode))
        return leaves

    def candidate(self, leaf: _Leaf) -> Candidate:
        """Return a valid layout with its step time by component, MFU and memory."""
        split = leaf.split
        groups = split.replicate * split.shard
        parts: dict[str, float] = {}
        for compute, batch in zip(self._computes[self.space.compiled(split.schedule)], self.batches, strict=True):
            of_stage = StepCost(compute, self._links, split).parts(-(-batch.rows // groups), leaf.size, leaf.mode)
            for name, seconds in of_stage.items():
                parts[name] = parts.get(name, 0.0) + seconds * batch.steps / self._steps
        tokens = sum(batch.steps * batch.rows * batch.seq_len for batch in self.batches) / self._steps
        flops = sum(
            batch.steps * batch.rows * batch.seq_len * flops_per_token(self.shape, batch.seq_len)
            for batch in self.batches
        )
        rows = -(-max(batch.rows for batch in self.batches) // groups)
        return Candidate(
            split=split,
            layout=self.space.layout(split, leaf.size, leaf.mode),
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
        return self.settings.model_copy(update={"layout": self.space.layout(leaf.split, leaf.size, leaf.mode)})

    def _least(self, leaf: _Leaf) -> tuple[_Leaf, int]:
        """Return the layout of a split that needs the least memory, and its memory [bytes]."""
        # The mode that recomputes the most, and a micro-batch of one row. If that does not fit, a micro-batch of all
        # rows is tried too: it needs no memory to accumulate gradients.
        sizes = self.space.sizes(leaf.split.replicate * leaf.split.shard)
        single = leaf._replace(size=sizes[0], mode=self.space.modes[-1])
        need = self._first_place(single)
        if need <= self._limit:
            return single, need
        whole = single._replace(size=sizes[-1])
        return min((single, need), (whole, self._first_place(whole)), key=lambda need_of_leaf: need_of_leaf[1])

    def _too_large(self, split: LayoutSplit, states: float) -> str:
        return f"{describe_split(split)}: {states / 1e9:.4g} of {self._limit / 1e9:.4g} GB"

    def _weighed(self, leaf: _Leaf, peak: int) -> str:
        return f"{_name(leaf)}: {peak / 1e9:.4g} of {self._limit / 1e9:.4g} GB"

    def _first_place(self, leaf: _Leaf) -> int:
        """Return the peak memory of the first pipeline rank [bytes], a lower bound on the layout's peak memory."""
        # No other rank holds the activations of more micro-batches.
        settings, cuda = self._settings(leaf), self.cluster.device.kind == "cuda"
        if settings.layout.offload != "none":
            return 0
        needs = (
            RankMemory(self.shape, settings, leaf.split.axes, 0, (batch.seq_len, batch.rows), cuda).moments()
            for batch in self.batches
        )
        return max(sum(moment.values()) for moments in needs for moment in moments.values())


def _unturned(split: LayoutSplit, size: int, problem: str) -> str:
    return f"{describe_split(split)}, {size} rows: {problem}"


def _timed(leaf: _Leaf) -> str:
    return f"{_name(leaf)}: {leaf.seconds:.4g} s a step"


def _name(leaf: _Leaf) -> str:
    return f"{describe_split(leaf.split)}, micro-batches of {leaf.size}, {leaf.mode} recomputed"
