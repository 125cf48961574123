"""The losses of single documents: equal in every layout, and measured without changing the gradient or the curve."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.layout_cases import CASES, SEED, SLOW, Case
from tests.support.rank_pool import RankFailed, shared_pool
from tests.train.parallel.test_layouts import BATCH, RATES, SOURCES, WIDTH, batch_of, losses_of, plan_of
from train.data.rows import IGNORED, Rows
from train.model.transformer import build_model, initial_weight
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist

GROUPS, STEPS, MEASURED_IN = 37, 3, 2
SHOWN = (
    "one rank, micro-batches",
    "zero1",
    "tensor x shard",
    "context by heads",
    "context by keys",
    "1f1b",
    "zero bubble",
)
"""Layouts of every test run: each parallel method once."""
REST = (
    *("hsdp", "interleaved", "masked tokens x pipeline x tensor"),
    *("one rank", "ddp", "zero2", "zero3 x 4", "tensor", "gpipe", "zbv", "shard x tensor x pipeline"),
    *("recompute all", "offload", "no documents x context", "ddp x 4", "zero1 x 4", "hsdp x context"),
    *("tensor x context x shard", "tensor x context by heads", "pipeline x 4", "pipeline x shard", "pipeline x tensor"),
    *("pipeline x context", "pipeline x hsdp", "interleaved x tensor", "zero bubble x shard", "zbv x shard", "compile"),
    *("masked tokens x context by keys", "no documents x pipeline x context", "tensor x context x replicas"),
    "sends everything it compresses x pipeline",
)
ALL = CASES | SLOW


@dataclass(frozen=True)
class RunResult:
    """The figures of a run of a few steps."""

    losses: list[float]
    """Sum of each group's losses in the step that was measured."""
    counts: list[float]
    same_gradient: bool
    """True if the gradient after the measurement was the same bit for bit."""
    of_step: tuple[float, float]
    """Losses and targets of that step, as the step itself measured them."""
    curve: list[tuple[float, float]]
    """Loss and gradient norm of every step."""


def groups_of(rows: Rows) -> Tensor:
    """A group for each position: parts of a few positions, some of them without targets; the last has no position."""
    begins = (torch.arange(BATCH)[:, None] + torch.arange(WIDTH)) % 5 == 0
    return begins.flatten().cumsum(0).view(BATCH, WIDTH) % (GROUPS - 1)


def own_losses(ranks, case: Case, measuring: bool = True) -> RunResult:
    """Run a few steps on the ranks of a layout, with groups measured in one of them before its update."""
    learner = Learner(plan_of(case), ranks, SOURCES)
    learner.init_state()
    here, curve, actual = learner.model.rows_here(BATCH), [], {"losses": [], "counts": [], "same_gradient": True}
    for step in range(1, STEPS + 1):
        whole = batch_of(step, case)
        rows = whole.part(here.start, here.stop)
        measured = learner.compute(step, rows, BATCH, whole.num_targets)
        if measuring and step == MEASURED_IN:
            before = gradients(learner)
            groups = groups_of(whole)[here.start : here.stop]
            tally = learner.measure_groups(rows, groups, GROUPS, BATCH)
            after = gradients(learner)
            same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
            actual = {"losses": tally.losses_S.tolist(), "counts": tally.counts_S.tolist(), "same_gradient": same}
            actual["of_step"] = sum(measured.losses), sum(measured.counts)
        curve.append((measured.loss, measured.grad_norm))
        learner.update(RATES[step - 1], measured)
    return RunResult(curve=curve, **({"of_step": (0.0, 0.0)} | actual))


def gradients(learner: Learner) -> dict[str, Tensor]:
    """Return copies of the gradients that this rank holds."""
    actual = {name: parameter.grad for name, parameter in learner.model.parameters.items()}
    return {
        name: (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()
        for name, gradient in actual.items()
        if gradient is not None
    }


@cache
def plain(task: str) -> tuple[list[float], list[float]]:
    """Return losses and targets of each group from a loop without ranks, over whole logits."""
    case = next(case for name, case in ALL.items() if case.task == task)
    shape = case.of_shape()
    model = build_model(shape, causal=case.train.get("objective") != "mlm").to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, SEED))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight"]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name == "embedding.weight"]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    rule = torch.optim.AdamW(groups, lr=RATES[0], betas=(0.9, 0.95), eps=1e-8, foreach=False)
    rows = batch_of(1, case)
    (losses_of(model, rows)[2].sum() / rows.num_targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    rule.step()
    rows = batch_of(MEASURED_IN, case)
    _, targets, losses = losses_of(model, rows)
    where = groups_of(rows).flatten()
    sums = torch.zeros(2, GROUPS, dtype=torch.float64)
    sums[0].index_add_(0, where, losses.detach().double())
    sums[1].index_add_(0, where, (targets != IGNORED).double())
    return sums[0].tolist(), sums[1].tolist()


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)], ids=lambda name: name
)
def test_every_layout_measures_the_same_and_leaves_the_gradient(name: str) -> None:
    case = ALL[name]
    if case.refused:
        with pytest.raises(RankFailed, match=r"layout\.schedule: expected torch 2\.13 or newer"):
            shared_pool().play(case.ranks, own_losses, case)
        return
    everywhere = shared_pool().play(case.ranks, own_losses, case)
    actual = everywhere[0]
    assert all((item.losses, item.counts) == (actual.losses, actual.counts) for item in everywhere), "ranks disagree"
    losses, counts = plain(case.task)
    assert actual.counts == counts
    assert counts[-1] == actual.losses[-1] == 0
    worst = max(abs(a - b) / max(b, 1e-9) for a, b, count in zip(actual.losses, losses, counts, strict=True) if count)
    print(f"{name}: {worst:.1e}")
    assert worst <= 1e-6
    # Together they are the step.
    assert sum(actual.losses) == pytest.approx(actual.of_step[0], rel=1e-6)
    assert sum(actual.counts) == actual.of_step[1]
    assert all(item.same_gradient for item in everywhere)
    without = shared_pool().play(case.ranks, own_losses, case, False)
    assert [item.curve for item in everywhere] == [item.curve for item in without]
