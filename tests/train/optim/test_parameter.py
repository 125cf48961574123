"""Local tensors that an optimizer looks up once remain those of the parameters, in every step and after a restore."""

from typing import Any

import pytest

from tests.support.layout_cases import CASES, SLOW, Case
from tests.support.rank_pool import shared_pool
from tests.train.parallel.test_layouts import BATCH, RATES, SOURCES, batch_of, plan_of
from train.optim.parameter import local_tensor
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist


def moved(learner: Learner) -> list[str]:
    """Return the tensors whose memory is no longer the memory that the optimizer looked up."""
    moved_names = []
    for member in learner.optimizer.members:
        pairs = {"values": (member.values, member.parameter)}
        pairs |= {key: (member.held(key), value) for key, value in member.state.items()}
        for key, (kept, tensor) in pairs.items():
            now = local_tensor(tensor)
            if (kept.data_ptr(), kept.shape, kept.stride()) != (now.data_ptr(), now.shape, now.stride()):
                moved_names.append(f"{key} of {member.name}")
    return moved_names


def looked_up(ranks: Any, case: Case) -> tuple[int, int, list[str]]:
    """Return the look-ups before and after the first update, and the tensors moved after three steps and a resume."""
    learner = Learner(plan_of(case), ranks, SOURCES)
    learner.init_state()
    before = sum(len(member._locals) for member in learner.optimizer.members)
    here, moved_names, after = learner.model.rows_here(BATCH), list[str](), 0
    for step in range(1, 4):
        whole = batch_of(step, case)
        measured = learner.compute(step, whole.part(here.start, here.stop), BATCH, whole.num_targets)
        learner.update(RATES[step - 1], measured)
        after = after or sum(len(member._locals) for member in learner.optimizer.members)
        moved_names += moved(learner)
        if step == 2:
            learner.init_state()
    return before, after, moved_names


SHOWN = ("zero2", "zero1", "ddp", "tensor x shard", "offload")
"""Cases of every test run: the tensors of the rest are placed as those of `tensor x shard` are."""
REST = ("zero3 x 4", "hsdp", "muon")


@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_looked_up_tensors_remain_valid(name: str) -> None:
    case = (CASES | SLOW)[name]
    for before, after, moved_names in shared_pool().play(case.ranks, looked_up, case):
        assert before == 0
        assert after > 0
        assert moved_names == []
