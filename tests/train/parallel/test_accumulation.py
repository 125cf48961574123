"""Micro-batches: they have every row, and a single rank, which has nothing to exchange, sums their gradients."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.support.layout_cases import CASES, Case
from tests.support.rank_pool import shared_pool
from tests.train.parallel.test_layouts import BATCH, SOURCES, WIDTH, batch_of, plan_of
from train.data.stages import StagePlan
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


def split_rows(ranks, compiled: bool, batches: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return (rows, targets) of each micro-batch of 12 rows of a training step, then of held-out rows."""
    case = Case(ranks.world_size, {"micro_batch": 4, "compile": compiled, "data": "ddp"})
    stages = tuple(
        StagePlan(first_step=number, num_steps=1, seq_len=length, global_batch=rows, counts={"a": 1})
        for number, (length, rows) in enumerate(batches)
    )
    model = Learner(plan_of(case).model_copy(update={"stages": stages}), ranks, SOURCES).model
    rows, here = batch_of(1), model.rows_here(BATCH)
    parts = model.micro_batches(rows.part(here.start, here.stop), BATCH), model.part_of(rows)
    return [[(len(own), own.num_targets) for own in of_rank] for of_rank in parts]


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("batches", "sizes"),
    [
        ([(WIDTH, BATCH), (2 * WIDTH, 2)], [4, 4]),  # the rows of a stage of longer ones do not count for these
        ([(WIDTH, BATCH), (WIDTH, 2)], [4, 4]),
        ([(2 * WIDTH, 2)], [4, 4]),  # held-out rows may have a length that no stage has
        ([(WIDTH, 2)], [2, 1]),  # a step has fewer rows than a micro-batch may have
    ],
)
def test_compiled_layers_compute_every_row(num_ranks: int, batches: list[tuple[int, int]], sizes: list[int]) -> None:
    compiled = shared_pool().play(num_ranks, split_rows, True, batches)
    assert {rows for rank in compiled for parts in rank for rows, _ in parts} == {sizes[num_ranks - 1]}
    targets = batch_of(1).num_targets
    for of_ranks in zip(*compiled, strict=True):
        assert sum(number for parts in of_ranks for _, number in parts) == targets
        assert len({len(parts) for parts in of_ranks}) == 1, "every rank runs the same collectives"
