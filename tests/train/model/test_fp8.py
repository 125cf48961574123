"""fp8 products: every value is within the rounding error of the formats, and a model learns with them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schemas.errors import ConfigError
from tests.support.graph_counts import Graphs
from tests.support.model_oracle import TINY, small_model, some_ids
from train.model.fp8 import check_fp8, enable_fp8, unquantized_matrices
from train.model.transformer import Transformer

SHAPE = TINY.model_copy(update={"head_dim": 16})
"""Every size of the layers' matrices is a multiple of 16: 32, 64 and 48."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: it is faster for tensors this small, above all when other processes use the cores."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def error_of(x: Tensor, mantissa: int, subnormal: float, largest: float) -> Tensor:
    """Return the maximum rounding error of each value of a tensor that is scaled to the format's maximum."""
    scale = x.abs().max() / largest
    return torch.maximum(x.abs() * 2 ** -(mantissa + 1), scale * subnormal / 2)


def e4m3(x: Tensor) -> Tensor:
    return error_of(x, 3, 2**-9, 448.0)


def e5m2(x: Tensor) -> Tensor:
    return error_of(x, 2, 2**-16, 57344.0)


def within(actual: Tensor, left: Tensor, right: Tensor, errors: tuple[Tensor, Tensor]) -> bool:
    """Return True if a product equals left @ right within the errors of its operands, and 1 % for sums in bf16."""
    bound = left.abs() @ errors[1] + errors[0] @ right.abs() + errors[0] @ errors[1]
    return bool(((actual.double() - left @ right).abs() <= 1.01 * bound + 0.01 * (left @ right).abs()).all())


@pytest.mark.parametrize("tokens", [32, 37, 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_product_and_its_gradients(tokens: int, autocast: bool) -> None:
    model = small_model(SHAPE.model_copy(update={"bias": True}))
    module = model.blocks["1"].ffn.up
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, 32, generator=generator).mul(torch.logspace(-3, 1, 32)).requires_grad_()
    slope = torch.randn(1, tokens, 48, generator=generator)
    enable_fp8(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert y.shape == (1, tokens, 48)
    for_x, for_weight, for_bias = torch.autograd.grad(y, (x, module.weight, module.bias), slope.to(y.dtype))
    assert for_x.dtype == for_weight.dtype == torch.float32
    a, w, g = (value.detach().double().flatten(0, -2) for value in (x, module.weight, slope.to(y.dtype)))
    assert within((y - module.bias)[0], a, w.T, (e4m3(a), e4m3(w.T)))
    assert within(for_x[0], g, w, (e5m2(g), e4m3(w)))
    assert within(for_weight, g.T, a, (e5m2(g.T), e4m3(a)))
    torch.testing.assert_close(for_bias, g.sum(0).float(), rtol=1e-2, atol=1e-2)
    # The product really is quantized: in float32 it is much nearer.
    assert ((y - module.bias)[0].double() - a @ w.T).norm() > 0.01 * (a @ w.T).norm()


class Products(TorchDispatchMode):
    """Counts the products that are computed in fp8, and in other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = self.wide = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.narrow += "_scaled_mm" in name
        self.wide += name.startswith(("aten::mm", "aten::addmm"))
        return func(*args, **(kwargs or {}))


def products_of(model: Transformer) -> tuple[int, int]:
    with Products() as seen:
        model(some_ids())
    return seen.narrow, seen.wide


def test_matrices_in_fp8() -> None:
    model = small_model(SHAPE)
    assert products_of(model) == (0, 15)
    enable_fp8(model)
    # Seven in each of two layers, without the head.
    assert products_of(model) == (14, 1)
    assert unquantized_matrices(model) == []
    narrow_heads = small_model(SHAPE.model_copy(update={"num_kv_heads": 1, "head_dim": 8, "d_ffw": 40}))
    wide = ("attention.key", "attention.value", "ffn.gate", "ffn.up", "ffn.down")
    assert unquantized_matrices(narrow_heads) == [f"blocks.{layer}.{name}" for layer in (0, 1) for name in wide]
    enable_fp8(narrow_heads)
    assert products_of(narrow_heads) == (4, 11)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_all_layers_are_one_graph(recompute: str) -> None:
    model = small_model(SHAPE.model_copy(update={"num_layers": 12}), recompute=recompute)
    enable_fp8(model)
    graphs = Graphs()
    for block in model.layers:
        block.compile(dynamic=False, backend=graphs.backend)
    for seed in (1, 2):
        model(some_ids(seed=seed)).sum().backward()
    assert (graphs.forward, graphs.backward, graphs.breaks, graphs.recompilations) == (1, 1, 0, 0)


def test_parameters_keep_their_names_and_values() -> None:
    model = small_model(SHAPE)
    before = {name: value.clone() for name, value in model.named_parameters()}
    enable_fp8(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_zeros_and_non_finite_values() -> None:
    model = small_model(SHAPE)
    enable_fp8(model)
    module = model.blocks["0"].ffn.up
    assert torch.count_nonzero(module(torch.zeros(1, 4, 32))) == 0
    for wrong in (float("nan"), float("inf")):
        # A step that is not finite must remain so, so that the guard detects it.
        x = torch.ones(1, 4, 32)
        x[0, 2, 5] = wrong
        assert not torch.isfinite(module(x)).all()
    tiny = module(torch.full((1, 4, 32), 1e-30))
    torch.testing.assert_close(tiny * 1e30, module(torch.ones(1, 4, 32)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_loss_falls_as_it_does_without_fp8(recompute: str) -> None:
    last = {}
    ids = some_ids(8, 17)
    for narrow in (False, True):
        model = small_model(SHAPE, recompute=recompute)
        if narrow:
            enable_fp8(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.loss.scale = 1 / 128
        losses = []
        for _ in range(25):
            loss = model(ids[:, :-1], None, ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        last[narrow] = losses[-1]
        assert losses[-1] < 0.25 * losses[0]
    assert last[True] == pytest.approx(last[False], rel=0.3, abs=0.05)
    assert last[True] != last[False]


@pytest.mark.parametrize(("capability", "rejected"), [((8, 0), True), ((8, 9), False), ((9, 0), False), ((7, 5), True)])
def test_devices(capability: tuple[int, int], rejected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    if rejected:
        message = (
            rf"capability 8\.9 or more for fp8, got {capability[0]}\.{capability[1]}\. Set train\.precision to bf16\."
        )
        with pytest.raises(ConfigError, match=message):
            check_fp8(cuda)
    else:
        check_fp8(cuda)
    check_fp8(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"got a device of type mps\. Set train\.precision to bf16\."):
        check_fp8(torch.device("mps"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_cuda(compiled: bool) -> None:
    check_fp8(torch.device("cuda"))
    model = small_model(SHAPE)
    expected = model(some_ids()).detach()
    enable_fp8(model.cuda())
    for block in model.blocks.values():
        if compiled:
            block.compile()
    with torch.autocast("cuda", torch.bfloat16):
        actual = model(some_ids().cuda())
    actual.square().sum().backward()
    assert ((actual.cpu() - expected).norm() / expected.norm()).item() < 0.1
    assert all(parameter.grad is not None for parameter in model.parameters())
