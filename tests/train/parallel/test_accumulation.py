"""Gradients of several micro-batches on a single rank, which has nothing to exchange."""

from dataclasses import replace
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.support.layout_cases import CASES
from tests.train.parallel.test_layouts import BATCH, SOURCES, batch_of, plan_of
from train.parallel.parallelize import SplitModel, sharded_modules
from train.parallel.ranks import open_ranks
from train.pretrain.step import Learner

CASE = replace(CASES["one rank"], layout={"data": "zero2", "micro_batch": BATCH // 4}, train={"precision": "bf16"})


def gradients(synced: bool) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return the gradients of a step of four micro-batches, how often FSDP2 copied them, and the sharded modules.

    `synced`: as with several ranks, after every micro-batch.
    """
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return reduce(*args, **kwargs)

    reduce = _fsdp_param_group.foreach_reduce
    with open_ranks() as ranks, mock.patch.object(_fsdp_param_group, "foreach_reduce", counted):
        learner = Learner(plan_of(CASE), ranks, SOURCES)
        learner.init_state()
        model: SplitModel = learner.model
        modules = list(sharded_modules(model.parts[0]))
        if synced:
            for module in modules:
                module.set_requires_gradient_sync = lambda wanted, *, recurse=True: None
        rows = batch_of(1, CASE)
        learner.compute(1, rows, BATCH, float(rows.num_targets))
        return {name: taken.clone() for name, taken in learner._gradients.taken.items()}, len(calls), len(modules)


def test_a_single_rank_copies_the_gradients_of_a_step_once() -> None:
    expected, every, modules = gradients(synced=True)
    actual, once, _ = gradients(synced=False)
    assert (every, once) == (4 * modules, modules)
    assert {*actual} == {*expected}
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
