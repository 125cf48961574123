"""Dropout in every layout: the same losses and gradient norms as on one rank, whatever is split, and off in evaluation.

One rank is compared with the plain loop by `test_layouts.py`, and the masks with numpy by `test_dropout.py`.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tests.support.layout_cases import SEED, Case
from tests.support.layout_checks import check_layout
from tests.support.rank_pool import shared_pool
from tests.train.parallel.test_layouts import BATCH, SOURCES, WIDTH, batch_of, plan_of
from train.config.settings import load_settings
from train.data.batches import HeldoutRows
from train.data.permutation import key_of, keys_of
from train.data.rows import Rows
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist

RATES = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
STEPS = 4
TIED, GELU = {"tie_embeddings": True}, {"activation": "gelu", "bias": True, "qk_norm": True, "num_kv_heads": 4}
CASES = {
    "micro-batches of 5": Case(1, {"micro_batch": 5}),
    "ddp": Case(2, {"data": "ddp", "micro_batch": 4}),
    "zero3, recompute what is cheap": Case(2, {"micro_batch": 4, "activation_checkpointing": "selective"}),
    "tensor x shard": Case(4, {"tensor": 2}, GELU),
    "tensor x context by heads": Case(4, {"tensor": 2, "context": 2}, {"num_kv_heads": 4}),
    "tensor x context by keys": Case(4, {"tensor": 2, "context": 2, "context_by": "keys"}),
    "pipeline x tensor": Case(4, {"pipeline": 2, "tensor": 2, "micro_batch": 3}, TIED),
    "zero bubble": Case(2, {"pipeline": 2, "schedule": "zero_bubble", "data": "zero2", "micro_batch": 3}),
}
SLOW = {
    "compile": Case(1, {"compile": True}),
    "compile x tensor": Case(2, {"tensor": 2, "compile": True}),
    "masked tokens": Case(2, {"tensor": 2}, TIED, {"objective": "mlm"}),
}


def rows_of(step: int, case: Case) -> Rows:
    """Return the rows of a step with the keys of their samples."""
    index = np.arange(BATCH) + step * BATCH
    keys_B = torch.from_numpy(keys_of(key_of(SEED, "dropout"), index).view(np.int64))
    return replace(batch_of(step, case), keys_B=keys_B)


def learn_with_dropout(ranks, case: Case) -> list[tuple[float, float]]:
    """Return loss and gradient norm of some steps, then the losses of held-out rows with and without their keys."""
    learner = Learner(plan_of(case), ranks, SOURCES)
    learner.init_state()
    actual = []
    for step in range(1, STEPS + 1):
        whole = rows_of(step, case)
        here = learner.model.rows_here(BATCH)
        measured = learner.compute(step, whole.part(here.start, here.stop), BATCH, whole.num_targets)
        actual.append((measured.loss, measured.grad_norm))
        learner.update(1e-3 * step / STEPS, measured)
    heldout = rows_of(STEPS + 1, case)
    tallies = [learner.measure(HeldoutRows(("a", "b", "c"), rows)) for rows in (heldout, replace(heldout, keys_B=None))]
    return [*actual, tuple((tally.losses_S.sum() / tally.counts_S.sum()).item() for tally in tallies)]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_layout_drops_the_same(name: str) -> None:
    case = (CASES | SLOW)[name]
    if case.refused:
        pytest.skip("this torch does not compute the schedule")
    case = replace(case, train=RATES | case.train)
    reference, everywhere = alone_with(case), shared_pool().play(case.ranks, learn_with_dropout, case)
    assert all(actual == everywhere[0] for actual in everywhere), "ranks disagree"
    for (loss, norm), (expected_loss, expected_norm) in zip(everywhere[0], reference, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    with_keys, without = everywhere[0][-1]
    assert with_keys == without, "evaluation drops nothing"


@cache
def _alone(shape: str, objective: str | None) -> list[tuple[float, float]]:
    case = next(
        case
        for case in (CASES | SLOW).values()
        if str(case.shape) == shape and case.train.get("objective") == objective
    )
    return shared_pool().play(1, learn_with_dropout, Case(1, shape=case.shape, train=RATES | case.train))[0]


def alone_with(case: Case) -> list[tuple[float, float]]:
    """Return the figures of one rank without micro-batches."""
    return _alone(str(case.shape), case.train.get("objective"))


def test_dropout_changes_the_steps() -> None:
    """A case of another rate differs, so the equality of the layouts says something."""
    case = Case(1, train=RATES | {"attention_dropout": 0.0})
    changed = shared_pool().play(1, learn_with_dropout, case)[0]
    expected = alone_with(Case(1))
    assert abs(changed[0][0] / expected[0][0] - 1) > 1e-4


def test_relative_positions_have_no_dropout_of_weights() -> None:
    case = Case(1, shape={"positions": "relative"}, train={"attention_dropout": 0.1})
    with pytest.raises(ConfigError, match=r"train\.attention_dropout: expected plan\.positions = rope, got relative"):
        check_layout(case.of_shape(), load_settings(case.settings(), [], "test"), 1, [WIDTH], BATCH)
