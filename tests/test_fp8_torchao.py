"""Matrices in 8 bits by torchao, emulated on a CPU: the same model, within the rounding of the format, in one graph."""

from collections.abc import Iterator

import pytest
import torch
from graph_counts import Graphs
from model_oracle import TINY, small_model, some_ids

from schemas.errors import ConfigError
from train.model.fp8 import Scaling, has_torchao, with_fp8

SHAPE = TINY.model_copy(update={"head_dim": 16})
needs_torchao = pytest.mark.skipif(not has_torchao(), reason="torchao is not installed")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@needs_torchao
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scaling", ["row", "gather"])
def test_a_model_in_8_bits(scaling: Scaling, autocast: bool) -> None:
    model, plain = (small_model(SHAPE) for _ in range(2))
    with_fp8(model, scaling, emulated=True)
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    graphs = Graphs()
    for block in model.layers:
        block.compile(dynamic=False, backend=graphs.backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = model(some_ids()), plain(some_ids())
    error = (found - expected).norm() / expected.norm()
    # Rounded indeed, and no more than the format does: our own products deviate by 0.07 here.
    assert 0.01 < error < 0.12
    found.square().mean().backward()
    expected.square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
        assert parameter.grad is not None
        assert (parameter.grad - other.grad).norm() < 0.35 * other.grad.norm(), name
    assert (graphs.forward, graphs.backward, graphs.breaks, graphs.recompilations) == (1, 1, 0, 0)


@pytest.mark.skipif(has_torchao(), reason="torchao is installed")
def test_without_torchao() -> None:
    with pytest.raises(ConfigError, match=r"fp8_scaling: expected torchao for row, got none installed"):
        with_fp8(small_model(SHAPE), "row")
