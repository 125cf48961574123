"""The loss of a chunk by compiled functions: values, gradients, bytes moved per logit, and no second compilation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.rank_pool import shared_pool
from train.data.rows import IGNORED
from train.model.loss import FusedChunkLoss, HeadLoss, LossTally, PlainChunkLoss, VocabularyPart
from train.parallel.ranks import Ranks
from train.plan.search.compute import loss_bytes_per_logit

ROWS, LENGTH, WIDTH, VOCAB = 3, 11, 8, 29
CELLS = 32, 2048
"""Tokens and vocabulary of the chunk whose bytes are counted."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def a_case(seed: int, dtype: torch.dtype, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Return a stream (B, T, D), a matrix (V, D) and targets, of which about the share `ignored` is IGNORED."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    targets[torch.rand(ROWS, LENGTH, generator=generator) < ignored] = IGNORED
    return x, weight, targets


def results(head: HeadLoss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the total, the losses by row, and both gradients."""
    x, weight = (value.detach().requires_grad_() for value in (x, weight))
    head.tally = LossTally.empty(ROWS, x.device)
    total = head(x, weight, targets, torch.arange(ROWS))
    return (total.detach(), head.tally.losses_S, *torch.autograd.grad(total, (x, weight)))


@pytest.mark.parametrize(
    ("dtype", "z_loss"),
    [
        (torch.float32, 0.0),
        (torch.bfloat16, 0.1),
        pytest.param(torch.float32, 0.1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0.0, marks=pytest.mark.slow),
    ],
)
def test_values_gradients_and_a_single_compilation(dtype: torch.dtype, z_loss: float) -> None:
    torch._dynamo.reset()
    counters.clear()
    for seed, ignored in ((0, 0.0), (1, 0.3), (2, 0.9), (3, 1.0)):
        case = a_case(seed, dtype, ignored)
        # 12 tokens: the last chunk is not full, and the targets of a batch never fill a whole number of chunks.
        cap = 3.0 if z_loss else None
        fused, plain = HeadLoss(z_loss, 12, fused=True, multiple=16, softcap=cap), HeadLoss(z_loss, 12, softcap=cap)
        fused.scale = plain.scale = 1 / (seed + 1)
        for name, actual, expected in zip(
            ("total", "losses", "stream", "matrix"), results(fused, *case), results(plain, *case)
        ):
            tolerance = 2e-6 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=f"{name}, seed {seed}")
        with torch.no_grad():
            fused(*case, None)
    # Two functions, each compiled once for any number of targets, any factor, and with or without a gradient.
    assert counters["stats"]["unique_graphs"] == 2


def test_the_oracle_in_float64() -> None:
    x, weight, targets = a_case(4, torch.float64)
    total, _, *gradients = results(HeadLoss(0.3, 10, fused=True, multiple=8), x, weight, targets)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = F.linear(x, weight)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    expected = losses + 0.3 * (logits.logsumexp(-1).square() * (targets != IGNORED)).sum()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    for actual, reference in zip(gradients, torch.autograd.grad(expected, (x, weight))):
        torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-11)


class Products(TorchDispatchMode):
    """Records the sizes of every operand of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(("aten::mm", "aten::addmm")):
            self.lengths |= {size for x in tree_leaves(args) if isinstance(x, Tensor) for size in x.shape}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [True, False])
def test_a_vocabulary_is_padded_in_the_loss_alone(fused: bool) -> None:
    x, weight, targets = a_case(5, torch.float32)
    with Products() as recorder:
        filled = results(HeadLoss(0.1, 64, fused=fused, multiple=128), x, weight, targets)
    assert 128 in recorder.lengths
    assert VOCAB not in recorder.lengths
    for actual, expected in zip(filled, results(HeadLoss(0.1, 64), x, weight, targets)):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    assert filled[-1].shape == weight.shape


# ------------------------------------------------------------------------------------------------------- bytes moved


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write of tensors as large as the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        name = func._schema.name
        # A view moves no bytes; `gather` and `scatter_add_` access a single value of a row.
        if func.is_view or name in ("aten::gather", "aten::scatter_add_", "aten::empty_like", "aten::new_empty"):
            return actual
        read = args[1:] if name == "aten::copy_" else args
        touched = [x for x in (*tree_leaves(read), *tree_leaves(actual)) if isinstance(x, Tensor)]
        self.bytes += sum(x.nbytes for x in touched if x.numel() == CELLS[0] * CELLS[1])
        return actual


def step(chunk: FusedChunkLoss | PlainChunkLoss, targets: Tensor) -> None:
    chunk.losses(targets)
    chunk.write_gradient(torch.ones(len(targets)), torch.ones(len(targets)))


@pytest.mark.parametrize(("dtype", "plain", "fused"), [(torch.bfloat16, 44, 6), (torch.float32, 32, 12)])
def test_bytes_moved_for_a_logit(dtype: torch.dtype, plain: int, fused: int) -> None:
    # These are the numbers that the layout search uses.
    assert [loss_bytes_per_logit(dtype.itemsize, compiled) for compiled in (False, True)] == [plain, fused]
    logits, targets = torch.randn(CELLS).to(dtype), torch.arange(CELLS[0])
    copy = logits.clone()
    with Traffic() as traffic:
        step(PlainChunkLoss(copy, None, None), targets)
    assert traffic.bytes / logits.numel() == plain

    torch._dynamo.reset()
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)
    with inductor.patch({"force_disable_caches": True, "cpp.enable_kernel_profile": True}):
        step(FusedChunkLoss(logits.clone(), None, None), targets)
        # The buffers that the compiler's kernels read and write, once per kernel, with the small tensors of each token.
        assert fused <= metrics.num_bytes_accessed / logits.numel() < fused + 0.1
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
            step(FusedChunkLoss(logits.clone(), None, None), targets)
    torch._logging.set_logs()
    events = [event for event in recorder.events() if event.name != "aten::clone"]
    # The profile contains one kernel of each function, and no other operation on the logits.
    assert len([event for event in events if "cpp_fused" in event.name]) == 2
    moving = [event.name for event in events if list(CELLS) in event.input_shapes and event.name != "aten::new_empty"]
    assert set(moving) <= {"aten::copy_"}, moving  # of the clone that the step is given


# ----------------------------------------------------------------------------------------- a vocabulary over ranks


def shared(ranks: Ranks, z_loss: float) -> tuple[Tensor, ...]:
    """Return total, losses, the stream's gradient summed over the ranks, and this rank's rows of the matrix's."""
    x, weight, targets = a_case(6, torch.float32)
    parts = weight.split(15)
    part = VocabularyPart(dist.group.WORLD, 15 * ranks.rank)
    head = HeadLoss(z_loss, 12, part, fused=True, multiple=16)
    total, losses, for_x, for_part = results(head, x, parts[ranks.rank], targets)
    dist.all_reduce(for_x)
    return total, losses, for_x, for_part


@pytest.mark.dist
@pytest.mark.parametrize("z_loss", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_shared_vocabulary(z_loss: float) -> None:
    total, losses, for_x, for_weight = results(HeadLoss(z_loss, 12), *a_case(6, torch.float32))
    actual = shared_pool().play(2, shared, z_loss)
    for rank in (0, 1):
        for value, expected in zip(actual[rank], (total, losses, for_x, for_weight.split(15)[rank])):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
