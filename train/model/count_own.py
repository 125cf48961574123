"""The figures of a model of the user that a plan needs, counted in the model without storage for its weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from schemas.errors import ConfigError
from schemas.logs import LOGGER
from train.model.declared import load_builder
from train.model.own import OwnModel, build_own
from train.model.shape import OwnLayers, OwnShape


def count_model(shape: OwnShape, lengths: Sequence[int], causal: bool) -> OwnShape:
    """Return the shape with the figures of its model; `lengths`: the numbers of positions in a row of the run.

    Raises ConfigError if the model does not meet the interface.
    """
    model = build_own(shape, causal)
    blocks = [list(block.parameters()) for block in model.blocks.values()]
    outside = [(name, p) for name, p in model.named_parameters() if not name.startswith("blocks.")]
    embeddings = [p.numel() for _, p in outside if p.ndim == 2 and p.shape[0] == shape.vocab_size]
    in_blocks = [parameter.numel() for parameters in blocks for parameter in parameters]
    experts = [sum(p.numel() for p in parameters if p.ndim == 3) for parameters in blocks]
    saved = _saved_bytes(shape, max(lengths), causal)
    layers = OwnLayers(
        flops={length: model.flops_per_token(length) for length in sorted({*lengths})},
        largest=max(sum(p.numel() for p in parameters) for parameters in blocks),
        widest=max(in_blocks),
        exchanged=max(experts) if model.num_experts else 0,
        saved=_stated_bytes(shape, max(lengths)) if saved is None else saved,
        saved_measured=saved is not None,
    )
    counted = {
        "num_layers": len(blocks),
        "num_params": sum(in_blocks) + sum(p.numel() for _, p in outside),
        "active_params": model.active_parameters(),
        "embedding_params": sum(embeddings),
        "num_experts": model.num_experts,
        "layers": layers,
    }
    return shape.model_copy(update=counted)


def _saved_bytes(shape: OwnShape, seq_len: int, causal: bool) -> float | None:
    """Return the bytes that a layer stores for each position of a row, from a forward pass without numbers.

    The embedding and the last norm are counted with the layers. None = the model computes with numbers of its input,
    which do not exist here.
    """
    build, saved = load_builder(shape), dict[int, int]()
    try:
        with FakeTensorMode():
            model: OwnModel = build(shape, causal)
            weights = {_memory_of(parameter) for parameter in model.parameters()}

            def store(tensor: Tensor) -> Tensor:
                if (memory := _memory_of(tensor)) not in weights:
                    saved[memory] = tensor.untyped_storage().nbytes()
                return tensor

            ids_BT = torch.zeros(1, seq_len, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
                hidden = model.hidden(ids_BT, None, None)
            sizes = tuple(hidden.stream_BTD.shape), tuple(hidden.output_VD.shape)
    except Exception as error:
        LOGGER.warning(
            f"plan.model = {shape.model}: memory of activations is estimated by the rule for a transformer, since "
            f"`hidden` fails on tensors without numbers: {type(error).__name__}: {error}"
        )
        return None
    expected = (1, seq_len, shape.d_model), (shape.vocab_size, shape.d_model)
    if sizes != expected:
        raise ConfigError(
            f"plan.model = {shape.model}: expected a stream and an output matrix of the sizes {expected[0]} and "
            f"{expected[1]} from `hidden`, got {sizes[0]} and {sizes[1]}. Use d_model and vocab_size of the shape."
        )
    return sum(saved.values()) / seq_len / max(1, len(model.blocks))


def _memory_of(tensor: Tensor | nn.Parameter) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


def _stated_bytes(shape: OwnShape, seq_len: int) -> float:
    """Return the bytes that a layer of a transformer stores for each position in fp32, with all attention scores.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1 (for 16 bits).
    """
    return 2.0 * (34 * shape.d_model + 5 * shape.num_heads * seq_len)
