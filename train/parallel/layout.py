"""The arithmetic of a layout: sizes of the mesh's axes, rows and layers of each rank, and everything that does not fit.

It knows nothing of torch, so that a plan and a dry run see what a run would see.
"""

import math
from collections.abc import Iterator, Sequence

from schemas.errors import ConfigError
from train.config.layout import AXES, SPLIT_BACKWARD, LayoutConfig
from train.config.settings import Settings
from train.model.shape import ModelShape

ROUND_SCHEDULES = ("interleaved", "zero_bubble")
"""Schedules whose micro-batches go round the ranks in equal rounds."""


def axes_of(layout: LayoutConfig, world_size: int) -> dict[str, int]:
    """Size of every axis of the mesh, in the order of AXES; with ddp and zero1 all ranks are replicas.

    Raises ConfigError if the sizes do not multiply up to `world_size`.
    """
    if problem := axes_problem(layout, world_size):
        raise ConfigError(problem)
    fixed = {axis: getattr(layout, axis) for axis in AXES if axis != "shard"}
    left = world_size // math.prod(fixed.values())
    if layout.data in ("ddp", "zero1"):
        return {axis: left if axis == "replicate" else 1 for axis in AXES}
    return {axis: left if axis == "shard" else fixed[axis] for axis in AXES}


def data_ranks(axes: dict[str, int]) -> int:
    """Number of groups of ranks that take rows of their own: replicas times shards."""
    return axes["replicate"] * axes["shard"]


def rows_of(num_rows: int, parts: int, part: int) -> range:
    """The contiguous rows that one of `parts` takes; counts differ by at most one."""
    return range(num_rows * part // parts, num_rows * (part + 1) // parts)


def num_micro_batches(num_rows: int, layout: LayoutConfig, axes: dict[str, int]) -> int:
    """Micro-batches of a step, the same on every rank: as many as the rank with most of `num_rows` rows needs."""
    most = -(-num_rows // data_ranks(axes))
    return -(-most // layout.rows_at_once)


def layers_of(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage of a pipeline; counts differ by at most one, and the last has few."""
    return range(-(-num_layers * stage // stages), -(-num_layers * (stage + 1) // stages))


def stages_of(layout: LayoutConfig, rank: int) -> list[int]:
    """Stages of a pipeline on its rank `rank`, rising: they go round the ranks, and with zbv there and back."""
    ranks = layout.pipeline
    if layout.schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(layout.stages)]


def chunks_in_flight(layout: LayoutConfig, rank: int, micro_batches: int) -> int:
    """Most micro-batches times stages of a pipeline's rank whose activations exist at once.

    Sources: the schedules as torch builds them (a test compares); Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    ranks, stages = layout.pipeline, layout.stages
    if layout.schedule == "1f1b":
        return min(micro_batches, ranks - rank)
    if layout.schedule == "zbv":
        return min(2 * micro_batches, 2 * ranks, micro_batches + rank + 1)
    if layout.schedule in ROUND_SCHEDULES:
        in_round = micro_batches // max(1, micro_batches // ranks)
        # A zero bubble forwards fewer, and holds what the weights' gradients still want of `rank` others.
        ahead = 2 * (ranks - 1 - rank) if layout.schedule == "interleaved" else ranks - 1
        return min(stages * micro_batches, (stages - 1) * in_round + ahead + 1)
    return stages * micro_batches


def check_layout(
    shape: ModelShape, settings: Settings, world_size: int, seq_lens: Sequence[int], global_batch: int
) -> None:
    """Raise ConfigError that names everything in which model, sequences or batch do not go into the layout."""
    problems = list(layout_problems(shape, settings, world_size, seq_lens, global_batch))
    if problems:
        raise ConfigError(
            f"layout: {len(problems)} thing(s) that do not go into {world_size} rank(s); nothing was started\n  "
            + "\n  ".join(problems)
        )


def layout_problems(
    shape: ModelShape, settings: Settings, world_size: int, seq_lens: Sequence[int], global_batch: int
) -> Iterator[str]:
    """Everything that does not go into the layout, a line each: the same on every type of device."""
    layout = settings.layout.for_device("cpu")
    if problem := axes_problem(layout, world_size):
        yield problem
    yield from _head_problems(shape, layout)
    if settings.train.fp8_scaling == "gather" and layout.data not in ("zero2", "zero3"):
        yield f"train.fp8_scaling: expected layout.data = zero2 or zero3 for gather, got {layout.data}. Set row."
    if settings.train.precision == "fp8" and layout.tensor > 1:
        yield "train.precision: expected another format with tensor > 1, got fp8, whose products are not shared"
    if shape.positions == "relative" and max(layout.context, layout.tensor) > 1:
        yield (
            f"plan.positions: expected rope with context = {layout.context}, tensor = {layout.tensor}, got relative, "
            "whose scores are of whole rows and heads"
        )
    for length in sorted(set(seq_lens)):
        if rest := length % (layout.context * layout.tensor):
            yield (
                f"train.seq_len: expected a multiple of context · tensor = {layout.context * layout.tensor}, got "
                f"{length}, which leaves {rest}"
            )
    if layout.pipeline > 1:
        yield from _pipeline_problems(shape, layout)
        if not axes_problem(layout, world_size):
            batches = {global_batch, *(stage.global_batch or global_batch for stage in settings.train.stages)}
            for batch in sorted(batches):
                yield from _schedule_problems(layout, axes_of(layout, world_size), batch)


def axes_problem(layout: LayoutConfig, world_size: int) -> str | None:
    """Why the axes of a layout do not multiply up to the number of ranks; None if they do."""
    given = {axis: getattr(layout, axis) for axis in AXES if axis != "shard" or layout.shard is not None}
    product = math.prod(given.values())
    shown = " · ".join(f"{axis} {size}" for axis, size in given.items() if size > 1) or "no axis at all"
    if layout.data in ("ddp", "zero1"):
        if layout.shard not in (None, 1):
            return f"layout.shard = {layout.shard}: expected data = zero2 or zero3, got {layout.data}. Leave it out."
    elif world_size % product:
        return f"layout: expected {world_size} rank(s), got {shown} = {product}, which does not go into them"
    elif layout.shard is not None and product != world_size:
        return (
            f"layout: expected {world_size} rank(s), got {shown} = {product}. Leave layout.shard out, and it takes "
            f"{layout.shard * world_size // product}."
        )
    return None


def _head_problems(shape: ModelShape, layout: LayoutConfig) -> Iterator[str]:
    """Heads, widths and vocabulary that the tensor axis, or the context axis by heads, does not divide."""
    sequences = layout.context if layout.context_by == "heads" else 1
    both = f"context · tensor = {layout.tensor * sequences} (context_by heads)"
    alone = f"tensor = {layout.tensor}"
    for name, size, ranks, by in (
        ("num_heads", shape.num_heads, layout.tensor * sequences, both if sequences > 1 else alone),
        ("num_kv_heads", shape.num_kv_heads, layout.tensor, alone),
        ("d_ffw", shape.d_ffw, layout.tensor, alone),
    ):
        if size % ranks:
            yield f"plan.{name}: expected a multiple of {by}, got {size}"
    if shape.positions == "relative" and max(layout.tensor, layout.context) > 1:
        yield "plan.positions: expected rotary positions with tensor or context > 1, got positions = relative"
    # DTensor gives every rank as many ids, and the last ones what is left.
    if -(-shape.vocab_size // layout.tensor) * (layout.tensor - 1) >= shape.vocab_size:
        yield f"plan: expected ids for each of tensor = {layout.tensor} ranks, got vocab_size {shape.vocab_size}"


def _pipeline_problems(shape: ModelShape, layout: LayoutConfig) -> Iterator[str]:
    """Stages that a schedule cannot run, or that have no layers."""
    stages = layout.pipeline * layout.stages
    if shape.num_layers < stages:
        yield (
            f"layout.pipeline: expected a layer for each of pipeline · stages_per_rank = {layout.pipeline} · "
            f"{layout.stages} = {stages} stages, got {shape.num_layers} layers"
        )
    wanted = {"gpipe": (1, 1), "1f1b": (1, 1), "zbv": (2, 2)}.get(layout.schedule, (1, shape.num_layers))
    if not wanted[0] <= layout.stages <= wanted[1]:
        yield (
            f"layout.stages_per_rank: expected {wanted[0]} with schedule = {layout.schedule}, got {layout.stages}. "
            "Leave it out."
        )
    if shape.tie_embeddings and layout.schedule == "zbv":
        yield (
            "plan.tie_embeddings: expected two matrices with schedule = zbv, whose first and last stage are on one "
            "rank, got tie_embeddings = true. Set it to false, or take another schedule."
        )
    if layout.activation_checkpointing == "selective" and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.activation_checkpointing: expected a schedule with a whole backward pass, got selective with "
            f"{layout.schedule}, whose layers torch goes back through twice. Set it to full or none, or take another "
            "schedule."
        )
    if layout.compile is True and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.compile: expected a schedule with a whole backward pass, got {layout.schedule}, which "
            "torch.compile cannot split. Compile = false, or another schedule."
        )


def _schedule_problems(layout: LayoutConfig, axes: dict[str, int], global_batch: int) -> Iterator[str]:
    """Numbers of micro-batches that a schedule cannot run."""
    number = num_micro_batches(global_batch, layout, axes)
    shown = f"{number} micro-batch(es) of {layout.rows_at_once} from {global_batch} rows"
    if layout.schedule == "1f1b" and number < layout.pipeline:
        rows = -(-global_batch // data_ranks(axes))
        small = f"set it to {rows // layout.pipeline} or less"
        large = f"set train.global_batch to {data_ranks(axes) * layout.pipeline} or more"
        yield (
            f"layout.micro_batch: expected a micro-batch for each of {layout.pipeline} stages with schedule = 1f1b, "
            f"found {shown}. {small if rows >= layout.pipeline else large}."
        )
    rounds = max(1, number // layout.pipeline)
    if layout.schedule in ROUND_SCHEDULES and number % rounds:
        yield (
            f"layout.micro_batch: expected micro-batches for {rounds} equal rounds with schedule = {layout.schedule}, "
            f"found {shown}. Take another micro_batch or train.global_batch."
        )
