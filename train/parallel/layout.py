"""The arithmetic of a layout: sizes of the mesh's axes, rows and layers of each rank, and checks of how they split.

It does not import torch, so a plan and a dry run compute the same numbers as a training run.
"""

import math
from collections.abc import Iterator, Sequence

from schemas.errors import ConfigError
from train.config.layout import AXES, SPLIT_BACKWARD, LayoutConfig
from train.config.settings import Settings
from train.config.train import TrainConfig
from train.model.freeze import frozen_names
from train.model.shape import ModelShape, OwnShape, parameter_sizes

ROUND_SCHEDULES = ("interleaved", "zero_bubble")
"""Schedules that process the micro-batches in rounds, with equally many in every round."""


def axes_of(layout: LayoutConfig, world_size: int) -> dict[str, int]:
    """Return the size of every axis of the mesh, in the order of AXES.

    With ddp and zero1, the axis `replicate` has all ranks. Raises ConfigError if the product of the sizes is not
    `world_size`.
    """
    if problem := axes_problem(layout, world_size):
        raise ConfigError(problem)
    fixed = {axis: getattr(layout, axis) for axis in AXES if axis != "shard"}
    left = world_size // math.prod(fixed.values())
    if layout.data in ("ddp", "zero1"):
        return {axis: left if axis == "replicate" else 1 for axis in AXES}
    return {axis: left if axis == "shard" else fixed[axis] for axis in AXES}


def data_ranks(axes: dict[str, int]) -> int:
    """Return the number of data-parallel groups. Each group reads different rows of a global batch."""
    return axes["replicate"] * axes["shard"]


def rows_of(num_rows: int, parts: int, part: int) -> range:
    """Return the rows of part `part` (0 = first) if `num_rows` rows are divided into `parts` contiguous parts.

    The sizes of the parts differ by at most one row.
    """
    return range(num_rows * part // parts, num_rows * (part + 1) // parts)


def num_micro_batches(num_rows: int, layout: LayoutConfig, axes: dict[str, int]) -> int:
    """Return the number of micro-batches that each rank runs in a step with `num_rows` rows."""
    most = -(-num_rows // data_ranks(axes))
    return -(-most // layout.rows_at_once)


def layers_of(num_layers: int, stages: int, stage: int) -> range:
    """Return the layers of a pipeline stage. Stages differ by at most one layer, and the last stage has the fewest."""
    return range(-(-num_layers * stage // stages), -(-num_layers * (stage + 1) // stages))


def stages_of(layout: LayoutConfig, rank: int) -> list[int]:
    """Return the numbers of the pipeline stages on rank `rank` of the pipeline, ascending."""
    ranks = layout.pipeline
    if layout.schedule == "zbv":
        # Stages run from the first rank to the last and back.
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(layout.stages)]


def chunks_in_flight(layout: LayoutConfig, rank: int, micro_batches: int) -> int:
    """Return the largest number of activation sets that a pipeline rank stores, one per micro-batch and stage.

    Sources: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the pipeline schedules of torch.
    """
    # A test compares the numbers with the schedules that torch builds.
    ranks, stages = layout.pipeline, layout.stages
    if layout.schedule == "1f1b":
        return min(micro_batches, ranks - rank)
    if layout.schedule == "zbv":
        return min(2 * micro_batches, 2 * ranks, micro_batches + rank + 1)
    if layout.schedule in ROUND_SCHEDULES:
        in_round = micro_batches // max(1, micro_batches // ranks)
        # Zero bubble runs fewer forward passes ahead, but keeps inputs for the pending weight gradients of `rank`
        # others.
        ahead = 2 * (ranks - 1 - rank) if layout.schedule == "interleaved" else ranks - 1
        return min(stages * micro_batches, (stages - 1) * in_round + ahead + 1)
    return stages * micro_batches


def layout_problems(
    shape: ModelShape, settings: Settings, world_size: int, seq_lens: Sequence[int], global_batch: int
) -> Iterator[str]:
    """Yield an error text for each reason why model, sequences or batch do not fit the layout."""
    layout = settings.layout.for_device("cpu")
    if problem := axes_problem(layout, world_size):
        yield problem
    if isinstance(shape, OwnShape):
        yield from _own_model_problems(shape, settings, world_size)
    elif layout.expert_parallel:
        yield "layout.expert_parallel: expected plan.model = moe, got the transformer, which has no experts. Remove it."
    yield from _head_problems(shape, layout)
    if problem := recomputation_problem(layout, settings.train):
        yield problem
    yield from _frozen_problems(shape, settings)
    if settings.train.fp8_scaling == "gather" and layout.data not in ("zero2", "zero3"):
        yield (
            f"train.fp8_scaling: expected layout.data = zero2 or zero3 for gather, got {layout.data}. Set "
            "train.fp8_scaling = row."
        )
    if settings.train.precision == "fp8" and layout.tensor > 1:
        yield (
            "train.precision: expected a format other than fp8 with layout.tensor > 1, got fp8, whose products cannot "
            "be sharded. Set train.precision = bf16."
        )
    if shape.residual_mixing and layout.pipeline > 1:
        yield (
            f"plan.residual_mixing: expected false with pipeline = {layout.pipeline}, got true: every layer reads the "
            "token embeddings, which only the first stage has. Set plan.residual_mixing = false or layout.pipeline = 1."
        )
    if settings.train.attention_dropout and shape.positions == "relative":
        yield (
            "train.attention_dropout: expected plan.positions = rope, got relative, whose attention is not split into "
            "weights and values. Remove train.attention_dropout."
        )
    if shape.positions == "relative" and max(layout.context, layout.tensor) > 1:
        yield (
            f"plan.positions: expected rope with context = {layout.context}, tensor = {layout.tensor}, got relative, "
            "whose scores need whole rows and heads. Set plan.positions = rope."
        )
    for length in sorted(set(seq_lens)):
        multiple = layout.context * layout.tensor
        if rest := length % multiple:
            yield (
                f"train.seq_len: expected a multiple of context · tensor = {multiple}, got {length}, which leaves "
                f"{rest}. Set train.seq_len to {max(multiple, length - rest)}."
            )
    if layout.pipeline > 1:
        yield from _pipeline_problems(shape, layout)
        if not axes_problem(layout, world_size):
            batches = {global_batch, *(stage.global_batch or global_batch for stage in settings.train.stages)}
            for batch in sorted(batches):
                yield from _schedule_problems(layout, axes_of(layout, world_size), batch)


def recomputation_problem(layout: LayoutConfig, train: TrainConfig) -> str | None:
    """Return an error text if compiled layers cannot recompute the attention of a tensor axis, else None."""
    whole = layout.activation_checkpointing in ("full", "budget")
    if not (layout.compile is True and layout.tensor > 1 and train.attention_dropout and whole):
        return None
    # torch 2.13 fails as it saves the mesh of the tensor axis for the backward pass.
    return (
        f"layout.activation_checkpointing: expected none or selective for compiled layers with layout.tensor = "
        f"{layout.tensor} and train.attention_dropout, got {layout.activation_checkpointing}, which torch cannot "
        'compile. Set layout.activation_checkpointing = "selective", or layout.compile = false.'
    )


def _frozen_problems(shape: ModelShape, settings: Settings) -> Iterator[str]:
    """Yield an error text if a pipeline cannot train the parameters that are not frozen."""
    layout, names = settings.layout, parameter_sizes(shape)
    stages = layout.pipeline * layout.stages
    if not settings.train.freeze or stages == 1:
        return
    frozen = frozen_names(names, settings.train.freeze)
    if layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.schedule: expected a schedule with a whole backward pass with train.freeze, got {layout.schedule}."
            " Choose another layout.schedule."
        )
    for stage in range(stages):
        layers = layers_of(shape.num_layers, stages, stage)
        begins = tuple(f"blocks.{layer}." for layer in layers)
        first, last = ("embedding.", "extra."), ("norm.", "transform.", "head.")
        begins += first if stage == 0 else last if stage == stages - 1 else ()
        if all(name in frozen for name in names if name.startswith(begins)):
            yield (
                f"train.freeze: expected parameters to train in each of {stages} pipeline stages, got none in stage "
                f"{stage}. Lower layout.pipeline, or freeze fewer parameters."
            )


def axes_problem(layout: LayoutConfig, world_size: int) -> str | None:
    """Return an error text if the axis sizes of a layout do not fit `world_size` ranks, else None."""
    given = {axis: getattr(layout, axis) for axis in AXES if axis != "shard" or layout.shard is not None}
    product = math.prod(given.values())
    shown = " · ".join(f"{axis} {size}" for axis, size in given.items() if size > 1) or "no axis at all"
    if layout.data in ("ddp", "zero1"):
        if layout.shard not in (None, 1):
            return (
                f"layout.shard = {layout.shard}: expected data = zero2 or zero3, got {layout.data}. Remove "
                "layout.shard."
            )
    elif world_size % product:
        return (
            f"layout: expected {world_size} rank(s), got {shown} = {product}, which does not divide that. Start "
            f"a multiple of {product} ranks with --ranks."
        )
    elif layout.shard is not None and product != world_size:
        return (
            f"layout: expected {world_size} rank(s), got {shown} = {product}. Remove layout.shard, and it becomes "
            f"{layout.shard * world_size // product}."
        )
    return None


def _own_model_problems(shape: OwnShape, settings: Settings, world_size: int) -> Iterator[str]:
    """Yield an error text for each setting of ranks or precision that a model of the user does not support."""
    layout, of_model = settings.layout, f"plan.model = {shape.model}"
    for axis, reason in (
        ("tensor", "its matrices and how they could be split are unknown"),
        ("context", "what its positions exchange is unknown"),
        ("pipeline", "where its layers could be cut is unknown"),
    ):
        if (size := getattr(layout, axis)) > 1:
            yield f"layout.{axis}: expected 1 with {of_model}, got {size}: {reason}. Remove layout.{axis}."
    for name, is_set in (
        ("train.dropout, attention_dropout and embedding_dropout", settings.train.drops),
        ("plan.parametrization = mup", shape.width_multiplier != 1),
        ("plan.value_embeddings", bool(shape.value_embeddings)),
        ("plan.residual_mixing", shape.residual_mixing),
        ("plan.window_pattern", bool(shape.window_pattern)),
    ):
        if is_set:
            yield f"{name}: expected the transformer of Penstock, got {of_model}, which has none. Remove the setting."
    if settings.train.precision == "fp8":
        yield (
            f"train.precision: expected a format other than fp8 with {of_model}, got fp8: which of its products may be "
            "rounded is unknown. Set train.precision = bf16."
        )
    if settings.optim.optimizer == "normuon" and shape.num_experts:
        yield f"optim.optimizer: expected muon with {of_model}, got normuon, which takes single matrices. Set muon."
    if layout.activation_checkpointing == "budget":
        yield (
            f"layout.activation_checkpointing: expected none, full or selective with {of_model}, got budget: the "
            "activations of its layers are estimated too roughly. Set full."
        )
    if not layout.expert_parallel or axes_problem(layout, world_size):
        return
    ranks = axes_of(layout, world_size)["shard"]
    if not shape.num_experts:
        yield f"layout.expert_parallel: expected a model with experts, got {of_model}. Remove it."
    elif shape.num_experts % ranks:
        yield (
            f"layout.expert_parallel: expected a number of experts that {ranks} ranks divide, got {shape.num_experts}. "
            "Change experts in plan.model_options, or the number of ranks."
        )
    if layout.compile is True:
        yield (
            "layout.compile: expected false with layout.expert_parallel, got true: the number of tokens that a rank "
            "receives changes with each batch. Set layout.compile = false."
        )


def _head_problems(shape: ModelShape, layout: LayoutConfig) -> Iterator[str]:
    """Yield an error text for each size of the model that the tensor or context axis cannot divide."""
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
    whole = {"positions": shape.positions == "learned", "norm_position": shape.norm_position == "post"}
    whole |= {"head_transform": shape.head_transform, "num_token_types": shape.num_token_types > 0}
    if layout.tensor > 1 and (given := [f"plan.{name}" for name, is_given in whole.items() if is_given]):
        yield (
            f"layout.tensor: expected 1 with {', '.join(given)}, whose weights are not split, got {layout.tensor}. Set "
            "layout.tensor = 1 and use another axis."
        )
    if shape.positions == "relative" and max(layout.tensor, layout.context) > 1:
        yield (
            "plan.positions: expected rotary positions with tensor or context > 1, got positions = relative. Set "
            "plan.positions = rope."
        )
    # DTensor assigns every rank the same number of ids, and the last ranks the remainder.
    if -(-shape.vocab_size // layout.tensor) * (layout.tensor - 1) >= shape.vocab_size:
        yield (
            f"plan: expected ids for each of tensor = {layout.tensor} ranks, got vocab_size {shape.vocab_size}. Lower "
            "layout.tensor."
        )


def _pipeline_problems(shape: ModelShape, layout: LayoutConfig) -> Iterator[str]:
    """Yield an error text for stages without layers, and for settings that the pipeline schedule does not support."""
    stages = layout.pipeline * layout.stages
    if shape.num_layers < stages:
        yield (
            f"layout.pipeline: expected a layer for each of pipeline · stages_per_rank = {layout.pipeline} · "
            f"{layout.stages} = {stages} stages, got {shape.num_layers} layers. Lower layout.pipeline."
        )
    low, high = {"gpipe": (1, 1), "1f1b": (1, 1), "zbv": (2, 2)}.get(layout.schedule, (1, shape.num_layers))
    if not low <= layout.stages <= high:
        yield (
            f"layout.stages_per_rank: expected {low} with schedule = {layout.schedule}, got {layout.stages}. "
            "Remove layout.stages_per_rank."
        )
    if shape.tie_embeddings and layout.schedule == "zbv":
        yield (
            "plan.tie_embeddings: expected two matrices with schedule = zbv, whose first and last stage share a rank, "
            "got tie_embeddings = true. Set plan.tie_embeddings = false, or choose another layout.schedule."
        )
    if layout.activation_checkpointing == "selective" and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.activation_checkpointing: expected a schedule with a whole backward pass, got selective with "
            f"{layout.schedule}, whose layers torch runs backward twice. Set "
            "layout.activation_checkpointing to full or none, or choose another layout.schedule."
        )
    if layout.compile is True and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.compile: expected a schedule with a whole backward pass, got {layout.schedule}, which "
            "torch.compile cannot split. Set layout.compile = false, or choose another layout.schedule."
        )


def _schedule_problems(layout: LayoutConfig, axes: dict[str, int], global_batch: int) -> Iterator[str]:
    """Yield an error text if the pipeline schedule cannot run the number of micro-batches in a step."""
    number = num_micro_batches(global_batch, layout, axes)
    shown = f"{number} micro-batch(es) of {layout.rows_at_once} from {global_batch} rows"
    if layout.schedule == "1f1b" and number < layout.pipeline:
        rows = -(-global_batch // data_ranks(axes))
        small = f"Set layout.micro_batch to {rows // layout.pipeline} or less"
        large = f"Set train.global_batch to {data_ranks(axes) * layout.pipeline} or more"
        yield (
            f"layout.micro_batch: expected a micro-batch for each of {layout.pipeline} stages with schedule = 1f1b, "
            f"got {shown}. {small if rows >= layout.pipeline else large}."
        )
    rounds = max(1, number // layout.pipeline)
    if layout.schedule in ROUND_SCHEDULES and number % rounds:
        yield (
            f"layout.micro_batch: expected micro-batches for {rounds} equal rounds with schedule = {layout.schedule}, "
            f"got {shown}. Change layout.micro_batch or train.global_batch."
        )
