"""The bytes that a rank sends in a step, by kind of communication, computed from the layout.

Sizes are those of ring algorithms on n ranks: an all-gather or reduce-scatter of N bytes in all sends (n - 1) / n · N,
an all-reduce twice that. Tests compare the sums with the collectives that torch runs. Not counted: sums of a few
numbers, the exchange of matrices by Muon, and the scales of fp8.
"""

import math
from collections import Counter

from torch.distributed.tensor import DTensor

from train.model.transformer import Transformer
from train.parallel.compression import param_groups
from train.parallel.data_parallel import NUMBER_FORMATS, sharded_modules
from train.parallel.layout import num_micro_batches, stages_of
from train.parallel.parallelize import SplitModel


def bytes_sent(model: SplitModel, num_rows: int, width: int) -> dict[str, int]:
    """Return the bytes that this rank sends in a step of `num_rows` rows of `width` positions, by kind.

    Compressed gradients are those of the last step. Kinds without bytes are left out.
    """
    sent = Counter[str]()
    if model.ranks.world_size > 1:
        sent.update(_of_weights(model, num_rows))
        sent.update(_of_activations(model, num_rows, width))
        sent.update(_of_stages(model, num_rows, width))
    return {kind: math.ceil(size) for kind, size in sent.items() if size}


def _of_weights(model: SplitModel, num_rows: int) -> Counter[str]:
    """Return the bytes of weights and gradients."""
    layout, axes = model.settings.layout, model.mesh.axes
    sent, number = Counter[str](), num_micro_batches(num_rows, layout, axes)
    if model.compressor is not None:
        sent["all_reduce"] += model.compressor.bytes_sent
    sent["all_gather"] += model.bytes_of_shares
    itemsize = 4 if NUMBER_FORMATS[model.settings.train.precision] is None else 2
    shards = axes["shard"] * axes["context"]
    for part in model.parts:
        for module in sharded_modules(part):
            size = sum(p.padded_sharded_param_size.numel() for group in param_groups(module) for p in group.fsdp_params)
            freed = layout.data == "zero3" and not isinstance(module, Transformer)
            gathers, sums = number * (2 if freed else 1), number if model.compressor is None else 1
            if model.num_stages > 1:
                # torch's pipeline keeps gathered weights until the last backward pass, and then sums the gradients.
                gathers, sums = number + 1 if freed else 1, 1
            sent["all_gather"] += gathers * (shards - 1) * size * itemsize
            sent["reduce_scatter"] += sums * (shards - 1) * size * 4
            if model.compressor is None:
                sent["all_reduce"] += _ring(axes["replicate"], size * 4)
    if model.copies and (tied := model.parameters.get("embedding.weight")) is not None:
        local = tied.to_local() if isinstance(tied, DTensor) else tied
        sent["all_reduce"] += _ring(2, local.numel() * 4)
    return sent


def _ring(ranks: int, size: float) -> int:
    """Return the bytes that a rank sends to sum `size` bytes over some ranks."""
    return math.ceil(2 * (ranks - 1) / ranks * size)


def _of_activations(model: SplitModel, num_rows: int, width: int) -> Counter[str]:
    """Return the bytes of activations along the tensor and context axes."""
    layout, axes, shape = model.settings.layout, model.mesh.axes, model.shape
    sent, tensor, context = Counter[str](), axes["tensor"], axes["context"]
    itemsize = 4 if NUMBER_FORMATS[model.settings.train.precision] is None else 2
    positions = model.rows_of_step(num_rows, width) * width // context
    layers = sum(len(part.layers) for part in model.parts)
    again = layout.activation_checkpointing == "full"
    if tensor > 1:
        stream = (tensor - 1) / tensor * positions * shape.d_model * itemsize
        # Forward: an all-gather before attention and feed-forward, a reduce-scatter after each; backward: the reverse.
        ends = sum(part.span.begins + part.span.ends for part in model.parts)
        sent["all_gather"] += math.ceil((layers * (6 if again else 4) + ends) * stream)
        sent["reduce_scatter"] += math.ceil((layers * (5 if again else 4) + ends) * stream)
        if any(part.span.ends for part in model.parts):
            sent["all_reduce"] += _ring(tensor, 12 * positions)  # largest logit, sum and logit of the target
        gains = [weight for name, weight in model.parameters.items() if name.endswith("norm.weight")]
        number = num_micro_batches(num_rows, layout, axes)
        sent["all_reduce"] += _ring(tensor, number * sum(4 * weight.shape.numel() for weight in gains))
    if context > 1:
        query, key = (heads * shape.head_dim // tensor for heads in (shape.num_heads, shape.num_kv_heads))
        passes = layers * (3 if again else 2)
        if layout.context_by == "heads":
            key = key if shape.num_kv_heads // tensor % context == 0 else query
            exchanged = 2 * (query + key) * positions * itemsize
            sent["all_to_all"] += math.ceil(passes * (context - 1) / context * exchanged)
        else:
            own = 2 * key * positions * itemsize * (context - 1)
            sent["all_gather"] += (passes - layers) * own
            sent["reduce_scatter"] += layers * own
    return sent


def _of_stages(model: SplitModel, num_rows: int, width: int) -> Counter[str]:
    """Return the bytes of activations and their gradients between pipeline stages."""
    layout, axes, sent = model.settings.layout, model.mesh.axes, Counter[str]()
    if model.num_stages == 1:
        return sent
    here, owner = (
        model.mesh.place("pipeline"),
        {s: rank for rank in range(axes["pipeline"]) for s in stages_of(layout, rank)},
    )
    itemsize = 4 if NUMBER_FORMATS[model.settings.train.precision] is None else 2
    positions = model.rows_of_step(num_rows, width) * width // (axes["context"] * axes["tensor"])
    # An activation goes to the next stage, and a gradient to the stage before.
    neighbours = [other for stage in model.stages for other in (stage - 1, stage + 1) if other in owner]
    number = sum(owner[stage] != here for stage in neighbours)
    sent["send"] += number * positions * model.shape.d_model * itemsize
    return sent
