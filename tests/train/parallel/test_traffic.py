"""The bytes that a rank sends, computed from the layout, against the collectives that torch runs in a step."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.layout_cases import TIED, Case
from tests.support.rank_pool import shared_pool
from tests.train.parallel.test_layouts import BATCH, SOURCES, WIDTH, batch_of, plan_of
from train.parallel.traffic import bytes_sent
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist

KINDS = {
    **{
        "_allgather_base_": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "all_gather_into_tensor_out": "all_gather",
    },
    **{"_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter"},
    **{"allreduce_": "all_reduce", "all_reduce": "all_reduce", "alltoall_base_": "all_to_all", "send": "send"},
}
"""Operator of torch -> kind."""
IGNORED_NAMES = {"wait_tensor", "_wrap_tensor_autograd", "recv_", "barrier"}


class Sent(TorchDispatchMode):
    """Sums the bytes that collectives send, as a ring algorithm would, and records operators that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.unknown = Counter[str](), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        actual = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and name not in IGNORED_NAMES:
            self._count(name, args, kwargs or {}, actual)
        return actual

    def _count(self, name: str, args: Any, kwargs: Any, actual: Any) -> None:
        kind = KINDS.get(name)
        if kind is None:
            self.unknown.add(name)
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        groups = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.ScriptObject | str)]
        size = max(x.nbytes for x in (*tensors, *(y for y in tree_leaves(actual) if isinstance(y, Tensor))))
        number = next(filter(None, map(_size_of, groups)), 1)
        factor = {"send": 1.0, "all_reduce": 2 * (number - 1) / number}.get(kind, (number - 1) / number)
        self.bytes[kind] += factor * size


def _size_of(group: Any) -> int | None:
    """Return the number of ranks of a process group, given by its name or as an object; None for anything else."""
    try:
        return (_resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)).size()
    except (KeyError, RuntimeError, ValueError, TypeError):
        return None


def compared(ranks: Any, case: Case) -> tuple[dict[str, int], dict[str, float], set[str]]:
    """Return the computed and the recorded bytes of the third step of a rank, and unknown operators."""
    learner = Learner(plan_of(case), ranks, SOURCES)
    learner.init_state()
    for step in (1, 2, 3):  # DDP forms its buckets anew in the second
        whole, here = batch_of(step, case), learner.model.rows_here(BATCH)
        with Sent() as sent:
            measured = learner.compute(step, whole.part(here.start, here.stop), BATCH, whole.num_targets)
            learner.update(1e-3, measured)
    return bytes_sent(learner.model, BATCH, WIDTH), dict(sent.bytes), sent.unknown


CASES = {
    "ddp": Case(2, {"data": "ddp", "micro_batch": 4}),
    "zero1": Case(2, {"data": "zero1"}),
    "zero2, micro-batches": Case(2, {"data": "zero2", "micro_batch": 2}),
    "zero3 in bf16": Case(2, {"micro_batch": 4}, train={"precision": "bf16"}),
    "hsdp": Case(4, {"replicate": 2, "micro_batch": 2}),
    "tensor": Case(2, {"tensor": 2}),
    "tensor, recomputed": Case(2, {"tensor": 2, "activation_checkpointing": "full"}),
    "context by heads": Case(2, {"context": 2}),
    "context by keys": Case(2, {"context": 2, "context_by": "keys"}),
    "1f1b": Case(2, {"pipeline": 2, "micro_batch": 3}, TIED),
    "1f1b x zero3": Case(4, {"pipeline": 2, "micro_batch": 3}),
    "zero bubble": Case(2, {"pipeline": 2, "schedule": "zero_bubble", "data": "zero2", "micro_batch": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_a_step_are_those_of_its_collectives(name: str) -> None:
    case = CASES[name]
    if case.refused:
        pytest.skip("this torch does not compute the schedule")
    for rank, (computed, recorded, unknown) in enumerate(shared_pool().play(case.ranks, compared, case)):
        assert unknown == set()
        if case.layout.get("data") in ("ddp", "zero1"):
            # DDP's sums are an all-to-all and an all-gather of our own: they are one sum.
            recorded["all_reduce"] += (
                recorded.pop("all_to_all") + recorded["all_gather"] - computed.get("all_gather", 0)
            )
            recorded["all_gather"] = computed.get("all_gather", 0)
        for kind in computed.keys() | recorded.keys():
            # 2 % for padding, and 2 kB for sums of a few numbers, such as the norm.
            bar = 2000 + 0.02 * recorded.get(kind, 0)
            actual, expected = computed.get(kind, 0), recorded.get(kind, 0)
            assert abs(actual - expected) <= bar, f"{name}, rank {rank}, {kind}: {actual} computed, {expected:.0f} sent"


def test_one_rank_sends_nothing() -> None:
    (result,) = shared_pool().play(1, compared, Case(1))
    assert result[0] == {}
