"""What an optimiser looks up once: the local tensors stay those of the parameters, step after step and after a read."""

from typing import Any

import pytest

from tests.support.layout_cases import CASES, Case
from tests.support.rank_pool import shared_pool
from tests.train.parallel.test_layouts import BATCH, RATES, SOURCES, batch_of, plan_of
from train.optim.parameter import local
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist


def moved(learner: Learner) -> list[str]:
    """What lies elsewhere in memory than where the optimiser has looked it up."""
    found = []
    for member in learner.optimizer.members:
        pairs = {"values": (member.values, member.parameter)}
        pairs |= {key: (member.held(key), value) for key, value in member.state.items()}
        for key, (kept, tensor) in pairs.items():
            now = local(tensor)
            if (kept.data_ptr(), kept.shape, kept.stride()) != (now.data_ptr(), now.shape, now.stride()):
                found.append(f"{key} of {member.name}")
    return found


def looked_up(ranks: Any, case: Case) -> tuple[int, int, list[str]]:
    """Numbers of look-ups before and after the first update, and what has moved three steps and a new start later."""
    learner = Learner(plan_of(case), ranks, SOURCES)
    learner.begin()
    before = sum(len(member._locals) for member in learner.optimizer.members)
    here, found, after = learner.model.rows_here(BATCH), list[str](), 0
    for step in range(1, 4):
        whole = batch_of(step, case)
        measured = learner.compute(step, whole.part(here.start, here.stop), BATCH, whole.num_targets)
        learner.update(RATES[step - 1], measured)
        after = after or sum(len(member._locals) for member in learner.optimizer.members)
        found += moved(learner)
        if step == 2:
            learner.begin()
    return before, after, found


@pytest.mark.parametrize("name", ["zero2", "zero3 x 4", "hsdp", "zero1", "ddp", "tensor x shard", "muon", "offload"])
def test_what_was_looked_up_stays(name: str) -> None:
    case = CASES[name]
    for before, after, found in shared_pool().play(case.ranks, looked_up, case):
        assert before == 0
        assert after > 0
        assert found == []
