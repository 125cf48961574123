"""Compiled layers: a single graph for all of them, in training, evaluation and after a resume."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.layout_cases import SHAPE, Case
from tests.support.rank_pool import shared_pool
from tests.train.parallel.test_layouts import batch_of, plan_of
from train.config.settings import Settings
from train.data.rows import IGNORED, Rows
from train.parallel.parallelize import SplitModel, use_matrix_units
from train.parallel.ranks import Ranks, open_ranks
from train.pretrain.step import Learner

LENGTH = 16
WIDE = SHAPE.model_copy(update={"d_model": 64, "head_dim": 16})
"""Every length of the layers' matrices is a multiple of 16."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Ranks of this process alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with open_ranks() as ranks:
        yield ranks
    torch.set_num_threads(threads)


def some_rows(number: int, seed: int, documents: bool = True) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SHAPE.vocab_size, (number, LENGTH), generator=generator)
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORED
    borders = torch.rand(number, LENGTH, generator=generator) < 0.2
    numbers = borders.cumsum(1).to(torch.int32) if documents else None
    return Rows(ids, targets, numbers, torch.zeros(number, dtype=torch.int64))


def a_model(ranks: Ranks, layout: dict[str, Any], precision: str, rows: int = 8) -> SplitModel:
    settings = Settings.model_validate(
        {"layout": {"micro_batch": 3} | layout, "train": {"seq_len": LENGTH, "precision": precision}}
    )
    model = SplitModel(WIDE, settings, ranks, 1, [(LENGTH, rows)])
    model.set_initial_weights(0)
    return model


def train_and_measure(model: SplitModel) -> list[float]:
    """Return losses and counts of two optimizer steps whose micro-batches differ in size, each with an evaluation."""
    losses = []
    for step, (number, heldout) in enumerate(((8, 2), (7, 5))):
        tally = model.backward(model.micro_batches(some_rows(number, step), number), 1.0)
        measured = model.measure(model.part_of(some_rows(heldout, 10 + step)), 1)
        losses += [(each.losses_S / each.counts_S).item() for each in (tally, measured)]
        losses += [tally.counts_S.item(), measured.counts_S.item()]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("data", ["ddp", "zero2", "zero3"])
def test_one_graph_in_every_precision_and_layout(ranks: Ranks, data: str, recompute: str, precision: str) -> None:
    check_graphs(ranks, {"data": data, "activation_checkpointing": recompute}, precision)


def test_one_graph_for_training_evaluation_and_resume(ranks: Ranks) -> None:
    check_graphs(ranks, {"data": "zero3"}, "bf16")


def check_graphs(ranks: Ranks, layout: dict[str, Any], precision: str) -> None:
    """Check for one graph over steps, evaluations and a second model, and for the losses of uncompiled layers."""
    expected = train_and_measure(a_model(ranks, layout, precision))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        actual = train_and_measure(a_model(ranks, layout | {"compile": True}, precision))
        # A resumed run is another model; here in the same process, so that a second graph would show.
        again = train_and_measure(a_model(ranks, layout | {"compile": True}, precision))
    # One graph of the layers, with its backward, and two of the loss.
    assert (counters["stats"]["unique_graphs"], counters["aot_autograd"]["ok"]) == (3, 3)
    assert not counters["graph_break"]
    assert actual == again
    assert actual == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 2e-2)


def test_float32_is_tf32_on_a_cuda_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.model.flash_attention._capability", lambda device: (8, 0))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        use_matrix_units(torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == "highest"
        use_matrix_units(torch.device("cuda", 0))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


WHOLE = Case(
    2,
    {"data": "ddp", "compile": True, "activation_checkpointing": "full", "micro_batch": 6},
    {"d_model": 1024, "head_dim": 256, "d_ffw": 2048, "num_layers": 2},
)
"""A shape whose layers are larger than the buckets of DDP's gradient all-reduce."""


def graphs_under_ddp(ranks: Ranks) -> tuple[int, float]:
    torch._dynamo.reset()
    counters.clear()
    learner = Learner(plan_of(WHOLE), ranks, 3)
    learner.init_state()
    rows = batch_of(1)
    here = learner.model.rows_here(len(rows))
    measured = learner.compute(1, rows.part(here.start, here.stop), len(rows), rows.num_targets)
    return counters["stats"]["unique_graphs"], measured.loss


@pytest.mark.dist
@pytest.mark.slow
def test_a_layer_larger_than_a_bucket_of_ddp_is_one_graph() -> None:
    actual = shared_pool().play(2, graphs_under_ddp)
    assert [graphs for graphs, _ in actual] == [3, 3]
    assert actual[0][1] == pytest.approx(math.log(SHAPE.vocab_size), rel=0.1)
