"""fp8 by torchao, emulated on a CPU: the same model within the rounding error of the format, in one graph."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from schemas.errors import ConfigError
from tests.support.graph_counts import Graphs
from tests.support.layout_cases import Case
from tests.support.model_oracle import TINY, small_model, some_ids
from tests.support.rank_pool import shared_pool
from tests.train.parallel.test_layouts import batch_of, plan_of
from train.data.batches import HeldoutRows
from train.model.fp8 import enable_fp8, has_torchao
from train.model.shape import matrix_params_of_layer
from train.parallel.ranks import Ranks
from train.pretrain.step import Learner

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
def test_a_model_in_8_bits(scaling: str, autocast: bool) -> None:
    model, plain = (small_model(SHAPE) for _ in range(2))
    enable_fp8(model, scaling, emulated=True)
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    graphs = Graphs()
    for block in model.layers:
        block.compile(dynamic=False, backend=graphs.backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual, expected = model(some_ids()), plain(some_ids())
    error = (actual - expected).norm() / expected.norm()
    # It is quantized, with the error of the format and no more: this project's own products deviate by 0.07 here.
    assert 0.01 < error < 0.12
    actual.square().mean().backward()
    expected.square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
        assert parameter.grad is not None
        assert (parameter.grad - other.grad).norm() < 0.35 * other.grad.norm(), name
    assert (graphs.forward, graphs.backward, graphs.breaks, graphs.recompilations) == (1, 1, 0, 0)


@pytest.mark.skipif(has_torchao(), reason="torchao is installed")
def test_without_torchao() -> None:
    with pytest.raises(
        ConfigError,
        match=r"fp8_scaling: expected torchao to be installed for row, got none\. Install torchao, or set train",
    ):
        enable_fp8(small_model(SHAPE), "row")


BIG = Case(2, shape={"d_model": 64, "head_dim": 16})


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank receives in all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.name():
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def bytes_gathered(ranks: Ranks, scaling: str) -> tuple[int, set[str]]:
    """Return the bytes gathered in a forward pass, and the classes of the tensors that a checkpoint would store."""
    case = replace(BIG, train={"precision": "fp8", "fp8_scaling": scaling})
    learner = Learner(plan_of(case), ranks, 3)
    learner.init_state()
    for step in (1, 2):
        rows = batch_of(step)
        mine = learner.model.rows_here(len(rows))
        learner.update(1e-3, learner.compute(step, rows.part(mine.start, mine.stop), len(rows), rows.num_targets))
    with Gathered() as gathered:
        learner.measure(HeldoutRows(("a", "b", "c"), rows))
    stored = {type(tensor.to_local()).__name__ for tensor in learner.state().values()}
    return gathered.bytes, stored


@needs_torchao
@pytest.mark.dist
def test_weights_are_gathered_in_fp8_and_stored_in_their_dtype() -> None:
    in_16, in_8 = (shared_pool().play(2, bytes_gathered, scaling)[0] for scaling in ("row", "gather"))
    assert in_16[1] == in_8[1] == {"Tensor"}
    # One byte instead of two for each weight of the layers' matrices; the rest is gathered in 16 bits as before.
    shape = BIG.of_shape()
    assert in_16[0] - in_8[0] == shape.num_layers * matrix_params_of_layer(shape)
