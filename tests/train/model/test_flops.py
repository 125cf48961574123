"""The FLOPs of a plan equal those that torch counts, operator by operator."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from train.model.loss import LossTally
from train.model.shape import ModelShape, flops_per_token
from train.model.transformer import build_model, initial_weight

SHAPES = {
    "grouped heads, gate": {"num_kv_heads": 2},
    "tied, gelu, biases": {"num_kv_heads": 8, "activation": "gelu", "bias": True, "tie_embeddings": True},
    "narrow heads": {"num_kv_heads": 4, "head_dim": 8},
    "relative positions": {"num_kv_heads": 8, "positions": "relative"},
}
LENGTH, ROWS = 128, 1

_ATEN = torch.ops.aten
UNKNOWN_TO_TORCH = {
    _ATEN.addmm_: lambda into, a, b, **unused: 2 * a[0] * a[1] * b[1],
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *unused, **also_unused: sdpa_flop_count(q, q, q),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, q, *unused, **also_unused: (
        sdpa_backward_flop_count(gradient, q, q, q)
    ),
}
"""torch's formulas for operators for which torch 2.13 has none; heads share keys, but not the work."""


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_forward_and_backward_are_what_torch_counts(changes: dict) -> None:
    sizes = {"vocab_size": 500, "num_layers": 3, "d_model": 128, "num_heads": 8, "head_dim": 16, "d_ffw": 336}
    shape = ModelShape.model_validate(sizes | {"tie_embeddings": False} | changes)
    model = build_model(shape).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, 1))
    model.loss.tally = LossTally.empty(1, torch.device("cpu"))
    ids = torch.randint(0, 500, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
        model(ids[:, :-1], None, ids[:, 1:].contiguous(), torch.zeros(ROWS, dtype=torch.int64)).backward()
    expected = flops_per_token(shape, LENGTH) * ROWS * LENGTH
    # torch's flash kernel recomputes the scores in its backward pass: 14 products of T × T, of which 12 count.
    again = 2 * shape.num_layers * shape.query_width * LENGTH * ROWS * LENGTH
    flash = shape.positions == "rope"
    assert counter.get_total_flops() - flash * again == pytest.approx(expected, rel=0.01)
