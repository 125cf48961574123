"""The chunked loss against torch in float64: values, gradients, sums by source, memory, and a shared vocabulary."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.rank_pool import shared_pool
from train.data.rows import IGNORED
from train.model.loss import HeadLoss, LossTally, VocabularyPart

ROWS, LENGTH, WIDTH, VOCAB = 3, 11, 8, 29
NUMBER = ROWS * LENGTH


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: it is faster for tensors this small, above all when other processes use the cores."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def a_case(ignored: float = 0.3, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return a stream (B, T, D), a matrix (V, D) and targets, of which about the share `ignored` is IGNORED."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    targets[torch.rand(ROWS, LENGTH, generator=generator) < ignored] = IGNORED
    return x, weight, targets


def expected_of(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, scale: float, cap: float | None = None
) -> tuple[Tensor, ...]:
    """Return the total, the cross-entropy of each token, and both gradients, by torch's functions in float64."""
    x, weight = (value.detach().double().requires_grad_() for value in (x, weight))
    logits = F.linear(x, weight)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    z = (logits.logsumexp(-1).square() * (targets != IGNORED)).sum()
    total = (losses.sum() + z_loss * z) * scale
    return (total.detach(), losses.view_as(targets).detach(), *torch.autograd.grad(total, (x, weight)))


def actual_of(head: HeadLoss, x: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
    """Return the total and both of its gradients times `factor`."""
    x, weight = (value.detach().requires_grad_() for value in (x, weight))
    total = head(x, weight, targets, torch.arange(ROWS))
    return (total.detach(), *torch.autograd.grad(total * factor, (x, weight)))


@settings(max_examples=60, deadline=None)
@given(
    chunk=st.sampled_from([1, 2, 7, NUMBER - 1, NUMBER, NUMBER + 1, 4096]),
    ignored=st.sampled_from([0.0, 0.3, 0.85, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
    scale=st.sampled_from([1.0, 1 / 33, 65536.0]),
    seed=st.integers(0, 1000),
    cap=st.sampled_from([None, 1.0, 15.0]),
)
def test_value_and_gradients(
    chunk: int, ignored: float, z_loss: float, scale: float, seed: int, cap: float | None
) -> None:
    x, weight, targets = a_case(ignored, seed)
    head = HeadLoss(z_loss, chunk, softcap=cap)
    head.scale, head.tally = scale, LossTally.empty(4, x.device)
    total, losses, *gradients = expected_of(x, weight, targets, z_loss, scale, cap)
    actual, *actual_gradients = actual_of(head, x, weight, targets)
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(total.item(), rel=2e-6)
    for gradient, reference in zip(actual_gradients, gradients):
        torch.testing.assert_close(gradient.double() / scale, reference / scale, rtol=1e-5, atol=1e-5)
    # Row r is of source r; source 3 has no row. Sums by source make up the whole.
    # A loss is the difference of two numbers of up to 10, each with the rounding of its own size.
    assert head.tally.losses_S.tolist() == pytest.approx([*losses.sum(1).tolist(), 0], rel=1e-6, abs=2e-6)
    assert head.tally.counts_S.tolist() == [*(targets != IGNORED).sum(1).tolist(), 0]


def test_float64_is_exact() -> None:
    for chunk in (1, 7, 100):
        x, weight, targets = a_case(dtype=torch.float64)
        head = HeadLoss(0.1, chunk)
        total, _, *gradients = expected_of(x, weight, targets, 0.1, 1.0)
        actual, *actual_gradients = actual_of(head, x, weight, targets)
        assert actual.item() == pytest.approx(total.item(), rel=1e-14)
        for gradient, reference in zip(actual_gradients, gradients):
            torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [7, 4096])
def test_bf16(chunk: int) -> None:
    x, weight, targets = a_case()
    head = HeadLoss(1e-4, chunk)
    # The format of a product under autocast; 8 bits of precision, so what the reference sees is rounded as well.
    total, _, *gradients = expected_of(x.bfloat16(), weight.bfloat16(), targets, 1e-4, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        actual, *actual_gradients = actual_of(head, x, weight, targets)
    assert (actual.dtype, *(g.dtype for g in actual_gradients)) == (torch.float32,) * 3
    assert actual.item() == pytest.approx(total.item(), rel=5e-3)
    for gradient, reference in zip(actual_gradients, gradients):
        assert ((gradient - reference).norm() / reference.norm()).item() < 0.01
    actual, *actual_gradients = actual_of(head, x.bfloat16(), weight.bfloat16(), targets)
    assert (actual.dtype, *(g.dtype for g in actual_gradients)) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert actual.item() == pytest.approx(total.item(), rel=5e-3)


def test_all_ignored() -> None:
    x, weight, targets = a_case(ignored=2)
    head = HeadLoss(0.1)
    head.tally = LossTally.empty(3, x.device)
    actual = actual_of(head, x, weight, targets)
    assert [torch.count_nonzero(value).item() for value in actual] == [0, 0, 0]
    assert head.tally.losses_S.tolist() == head.tally.counts_S.tolist() == [0, 0, 0]


def test_by_hand() -> None:
    # Logits are the stream itself: 0 0 0 0, then log 2 0 0 0, and one that is ignored.
    x = torch.tensor([[[0.0, 0, 0, 0], [math.log(2), 0, 0, 0], [9, 0, 0, 0]]], requires_grad=True)
    head = HeadLoss()
    head.scale, head.tally = 0.5, LossTally.empty(1, x.device)
    total = head(x, torch.eye(4), torch.tensor([[2, 0, IGNORED]]), torch.tensor([0]))
    total.backward()
    assert total.item() == pytest.approx((math.log(4) + math.log(5 / 2)) / 2)
    assert head.tally.losses_S.item() == pytest.approx(math.log(4) + math.log(5 / 2))
    expected = [[0.125, 0.125, -0.375, 0.125], [-0.3, 0.1, 0.1, 0.1], [0, 0, 0, 0]]
    torch.testing.assert_close(x.grad[0], torch.tensor(expected))


def test_the_gradient_of_the_total_is_passed_on() -> None:
    x, weight, targets = a_case()
    head = HeadLoss()
    for once, thrice in zip(actual_of(head, x, weight, targets)[1:], actual_of(head, x, weight, targets, 3.0)[1:]):
        torch.testing.assert_close(thrice, 3 * once)


def test_the_total_may_be_differentiated_twice_over() -> None:
    x, weight, targets = a_case()
    x.requires_grad_()
    total = HeadLoss()(x, weight, targets, None)
    first = torch.autograd.grad(total, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(total, x)[0])


def test_scale_may_be_a_tensor() -> None:
    x, weight, targets = a_case()
    head = HeadLoss()
    head.scale = 0.25
    expected = actual_of(head, x, weight, targets)
    head.scale = torch.tensor(0.25)
    assert all(torch.equal(a, b) for a, b in zip(actual_of(head, x, weight, targets), expected))


def test_huge_logits_stay_finite() -> None:
    x, weight, targets = a_case()
    actual = actual_of(HeadLoss(), x * 1e4, weight, targets)
    expected = expected_of(x * 1e4, weight, targets, 0.0, 1.0)
    assert all(torch.isfinite(value).all() for value in actual)
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=1e-5)


def test_a_tally_adds_up_over_calls_and_sources_may_repeat() -> None:
    tally = LossTally.empty(2, torch.device("cpu"))
    targets = torch.tensor([[1, IGNORED], [1, 1], [IGNORED, IGNORED]])
    tally.add(torch.tensor([[2.0, 0.0], [0.5, 0.25], [0.0, 0.0]]), targets, torch.tensor([1, 1, 0]))
    tally.add(torch.tensor([[4.0, 8.0]]), torch.tensor([[1, 1]]), torch.tensor([0]))
    assert tally.losses_S.tolist() == [12.0, 2.75]
    assert tally.counts_S.tolist() == [2.0, 3.0]
    assert tally.losses_S.dtype == torch.float64


def test_a_tally_sums_positions_by_group() -> None:
    tally = LossTally.empty(4, torch.device("cpu"))
    losses = torch.tensor([[2.0, 0.0, 0.5], [0.25, 4.0, 8.0]])
    targets = torch.tensor([[1, IGNORED, 1], [1, 1, 1]])
    tally.add(losses, targets, torch.tensor([[0, 0, 3], [3, 1, 1]]))
    tally.add(losses[:1], targets[:1], torch.tensor([[1, 1, 1]]))
    assert tally.losses_S.tolist() == [2.0, 14.5, 0.0, 0.75]
    assert tally.counts_S.tolist() == [1.0, 4.0, 0.0, 2.0]


class _AsOnCuda(Tensor):
    """A tensor that claims to be on a CUDA device, and is computed on the CPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("number", [1, 63, 64, 65, 300])
def test_a_tally_on_cuda_computes_the_same_by_products(number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    losses, targets = torch.rand(5, 70, generator=draw), torch.randint(0, 9, (5, 70), generator=draw)
    groups = torch.randint(0, number, (5, 70), generator=draw)
    targets[losses < 0.2], losses[losses < 0.2] = IGNORED, 0.0
    alike, there = LossTally.empty(number, torch.device("cpu")), LossTally.empty(number, torch.device("cpu"))
    alike.add(losses, targets, groups)
    there.add(losses.as_subclass(_AsOnCuda), targets, groups)
    assert torch.equal(there.counts_S, alike.counts_S)
    torch.testing.assert_close(Tensor(there.losses_S), alike.losses_S, rtol=1e-14, atol=0)
    assert there.losses_S.sum().item() == pytest.approx(losses.double().sum().item(), rel=1e-13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_tally_on_a_device_is_that_of_the_cpu_and_the_same_each_time() -> None:
    draw = torch.Generator().manual_seed(1)
    losses, groups = torch.rand(8, 4096, generator=draw), torch.randint(0, 500, (8, 4096), generator=draw)
    targets, actual = torch.ones(8, 4096, dtype=torch.int64), []
    for device in ("cpu", "cuda", "cuda"):
        tally = LossTally.empty(501, torch.device(device))
        tally.add(losses.to(device), targets.to(device), groups.to(device))
        actual.append(tally.losses_S.cpu())
    assert torch.equal(actual[1], actual[2])
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-14, atol=0)


# --------------------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is made, and the rows of every product with the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.products = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        if "mm" in func.name() and "addmm" not in func.name():
            self.products.append(args[0].shape[0])
        return out


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_never_all_in_memory(with_gradient: bool, autocast: bool) -> None:
    number, width, vocab = 64, 4, 512
    x, weight = torch.randn(1, number, width), torch.randn(vocab, width)
    targets = torch.randint(0, vocab, (1, number))
    for chunk, most in ((16, 16 * vocab), (1, vocab * width), (64, number * vocab)):
        x.requires_grad_(with_gradient)
        with Largest() as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            total = HeadLoss(0.1, chunk)(x, weight, targets, None)
            if with_gradient:
                total.backward()
        assert recorder.numbers == most


def test_ignored_tokens_are_not_computed_on_a_cpu() -> None:
    x, weight, targets = a_case(0.85)
    counted = int((targets != IGNORED).sum())
    assert 0 < counted < NUMBER / 2
    with Largest() as recorder:
        actual_of(HeadLoss(chunk_tokens=4), x, weight, targets)
    # Two products per chunk, logits and the stream's gradient, each with a row for every target.
    assert sum(recorder.products) == 2 * counted


# --------------------------------------------------------------------------------------------------- shared vocabulary


def loss_of_a_part(ranks: Any, largest: int, z_loss: float, chunk: int, ignored: float) -> list[Tensor]:
    x, weight, targets = a_case(ignored)
    rank = dist.get_rank()
    mine = weight[largest * rank : largest * (rank + 1)]
    head = HeadLoss(z_loss, chunk, VocabularyPart(dist.group.WORLD, largest * rank))
    head.scale, head.tally = 1 / 7, LossTally.empty(ROWS, x.device)
    total, gradient_of_x, gradient = actual_of(head, x, mine, targets)
    dist.all_reduce(gradient_of_x)
    return [total, gradient_of_x, gradient, head.tally.losses_S]


@pytest.mark.dist
@pytest.mark.parametrize(("z_loss", "chunk", "ignored"), [(0.0, 7, 0.3), (0.1, 4096, 0.0), (0.1, 1, 0.85)])
def test_a_vocabulary_shared_unevenly(z_loss: float, chunk: int, ignored: float) -> None:
    # 29 rows: 15 and 14; then 20 and 9.
    for largest in (15, 20):
        answers = shared_pool().play(2, loss_of_a_part, largest, z_loss, chunk, ignored)
        total, losses, *gradients = expected_of(*a_case(ignored), z_loss, 1 / 7)
        for rank, (actual, of_stream, of_part, by_source) in enumerate(answers):
            assert actual.item() == pytest.approx(total.item(), rel=2e-6)
            torch.testing.assert_close(of_stream.double(), gradients[0], rtol=1e-5, atol=1e-6)
            mine = gradients[1][largest * rank : largest * (rank + 1)]
            torch.testing.assert_close(of_part.double(), mine, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(by_source, losses.sum(1), rtol=1e-6, atol=1e-6)
