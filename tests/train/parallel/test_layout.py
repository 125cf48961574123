import itertools
from typing import Any

import pytest

from schemas.errors import ConfigError
from tests.support.layout_checks import check_layout
from train.config.layout import AXES, LayoutConfig
from train.config.settings import Settings
from train.model.shape import ModelShape
from train.parallel.layout import (
    axes_of,
    chunks_in_flight,
    data_ranks,
    layers_of,
    layout_problems,
    num_micro_batches,
    rows_of,
    stages_of,
)


def shape(**changes: Any) -> ModelShape:
    settings: dict[str, Any] = {
        "vocab_size": 100,
        "num_layers": 8,
        "d_model": 64,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "d_ffw": 192,
        "tie_embeddings": False,
    }
    return ModelShape(**(settings | changes))


def check(world_size: int, seq_len: int = 64, global_batch: int = 64, **layout: Any) -> None:
    settings = Settings(layout=LayoutConfig(**layout))
    check_layout(shape(), settings, world_size, [seq_len], global_batch)


@pytest.mark.parametrize(
    ("layout", "world_size", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1, 1)),
        ({}, 8, (1, 1, 8, 1, 1)),
        ({"data": "zero2", "replicate": 2}, 8, (1, 2, 4, 1, 1)),
        ({"replicate": 2, "shard": 2, "tensor": 2}, 8, (1, 2, 2, 1, 2)),
        ({"pipeline": 2, "context": 2, "tensor": 2}, 16, (2, 1, 2, 2, 2)),
        ({"data": "ddp"}, 6, (1, 6, 1, 1, 1)),
        ({"data": "zero1"}, 6, (1, 6, 1, 1, 1)),
    ],
)
def test_shard_takes_what_the_other_axes_leave(layout: dict[str, Any], world_size: int, sizes: tuple[int, ...]) -> None:
    axes = axes_of(LayoutConfig(**layout), world_size)
    assert list(axes) == list(AXES)
    assert tuple(axes.values()) == sizes
    assert data_ranks(axes) == sizes[1] * sizes[2]


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        ({"tensor": 3}, 8, r"expected 8 rank\(s\), got tensor 3 = 3, which does not divide that"),
        ({"pipeline": 4, "tensor": 4}, 8, r"got pipeline 4 · tensor 4 = 16, which does not"),
        ({"shard": 2, "tensor": 2}, 8, r"got shard 2 · tensor 2 = 4. Remove layout.shard, and it becomes 4"),
        ({"shard": 1}, 4, r"got no axis at all = 1. Remove layout.shard, and it becomes 4"),
        ({"shard": 16}, 4, r"got shard 16 = 16, which does not"),
        ({"data": "ddp", "shard": 4}, 4, r"layout.shard = 4: expected data = zero2 or zero3, got ddp"),
    ],
)
def test_axes_that_do_not_multiply_up_are_refused(layout: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        axes_of(LayoutConfig(**layout), world_size)
    with pytest.raises(ConfigError, match=message):
        check(world_size, **layout)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ({}, 1),
        ({"tensor": 4, "context": 2, "context_by": "keys"}, 8),
        ({"tensor": 2, "context": 2}, 8),
        ({"pipeline": 8, "micro_batch": 8}, 8),
        ({"pipeline": 4, "schedule": "interleaved"}, 8),
        ({"pipeline": 4, "schedule": "zbv", "data": "zero2"}, 4),
        ({"pipeline": 2, "schedule": "zero_bubble", "stages_per_rank": 4, "data": "zero2"}, 4),
        ({"pipeline": 4, "schedule": "gpipe", "micro_batch": 64}, 4),
    ],
)
def test_what_goes_in_is_accepted(layout: dict[str, Any], world_size: int) -> None:
    check(world_size, **layout)


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        ({"tensor": 8}, 8, "plan.num_kv_heads: expected a multiple of tensor = 8, got 4"),
        ({"tensor": 5}, 5, "plan.d_ffw: expected a multiple of tensor = 5, got 192"),
        ({"tensor": 128}, 128, "expected ids for each of tensor = 128 ranks, got vocab_size 100"),
        (
            {"tensor": 4, "context": 4},
            16,
            r"num_heads: expected a multiple of context · tensor = 16 \(context_by heads\), got 8",
        ),
        ({"context": 3, "context_by": "keys"}, 3, "seq_len: expected a multiple of context · tensor = 3, got 64"),
        ({"pipeline": 9}, 9, r"expected a layer for each of pipeline · stages_per_rank = 9 · 1 = 9 stages, got 8"),
        ({"pipeline": 5, "schedule": "interleaved"}, 5, r"= 5 · 2 = 10 stages, got 8 layers"),
        (
            {"pipeline": 2, "schedule": "zbv", "stages_per_rank": 3, "data": "zero2"},
            2,
            "expected 2 with schedule = zbv, got 3",
        ),
        ({"pipeline": 2, "schedule": "1f1b", "stages_per_rank": 2}, 2, "expected 1 with schedule = 1f1b, got 2"),
        (
            {"pipeline": 2, "schedule": "zero_bubble", "compile": True, "data": "zero2"},
            2,
            "expected a schedule with a whole backward pass, got zero_bubble",
        ),
        (
            {"pipeline": 4, "micro_batch": 32},
            4,
            r"4 stages with schedule = 1f1b, got 2 micro-batch\(es\) of 32 .*Set layout.micro_batch to 16 or less",
        ),
        ({"pipeline": 2, "schedule": "interleaved", "micro_batch": 13}, 2, "for 2 equal rounds .* got 5 micro-batch"),
    ],
)
def test_what_does_not_go_in_is_named(layout: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(world_size, **layout)


@pytest.mark.parametrize("mode", ["full", "budget"])
@pytest.mark.parametrize(
    ("layout", "train"),
    [
        ({"tensor": 2, "compile": True}, {"attention_dropout": 0.1}),
        ({"tensor": 2}, {"attention_dropout": 0.1}),
        ({"compile": True}, {"attention_dropout": 0.1}),
        ({"tensor": 2, "compile": True}, {"dropout": 0.1}),
    ],
)
def test_recomputation_that_torch_does_not_compile_is_refused(
    mode: str, layout: dict[str, Any], train: dict[str, Any]
) -> None:
    """Only a recomputed attention with dropout, in compiled layers of a tensor axis; on a GPU they are compiled."""
    budget = {"activation_budget": 9} if mode == "budget" else {}
    settings = Settings.model_validate({"layout": layout | budget | {"activation_checkpointing": mode}, "train": train})
    for kind in ("cpu", "cuda"):
        problems = [*layout_problems(shape(), settings.for_device(kind), 2, [64], 64)]
        refused = "tensor" in layout and "attention_dropout" in train and (kind == "cuda" or "compile" in layout)
        assert len(problems) == refused
        assert all(f"got {mode}, which torch cannot compile" in problem for problem in problems)


def test_relative_positions_stay_whole() -> None:
    settings = Settings(layout=LayoutConfig(tensor=2))
    check_layout(shape(), settings, 2, [64], 64)
    with pytest.raises(ConfigError, match=r"expected rope with context = 1, tensor = 2, got relative"):
        check_layout(shape(positions="relative"), settings, 2, [64], 64)


def test_a_tied_matrix_is_in_one_stage_of_a_rank() -> None:
    settings = Settings(layout=LayoutConfig(pipeline=2, schedule="zbv", data="zero2"))
    check_layout(shape(), settings, 2, [64], 64)
    with pytest.raises(ConfigError, match=r"plan\.tie_embeddings: expected two matrices with schedule = zbv"):
        check_layout(shape(tie_embeddings=True), settings, 2, [64], 64)


@pytest.mark.parametrize("micro_batches", [1, 4, 6, 8, 12])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zbv"])
def test_chunks_in_flight_are_those_of_the_schedules_of_torch(schedule: Any, micro_batches: int) -> None:
    from torch.distributed.pipelining import schedules

    ranks, kinds = 4, {"interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"}
    layout = LayoutConfig(pipeline=ranks, schedule=schedule, data="zero2")
    torch_schedule: Any = object.__new__(getattr(schedules, f"Schedule{kinds[schedule]}"))
    rounds = max(1, micro_batches // ranks)
    torch_schedule.__dict__ |= {
        "pp_group_size": ranks,
        "n_local_stages": 2,
        "num_stages": 2 * ranks,
        "_n_microbatches": micro_batches,
        "number_of_rounds": rounds,
        "microbatches_per_round": micro_batches // rounds,
    }
    for rank in range(ranks):
        held, most = set(), 0
        for action in filter(None, torch_schedule._calculate_single_rank_operations(rank)):
            chunk, what = (action.stage_index, action.microbatch_index), action.computation_type.name
            if what == "FORWARD":
                held.add(chunk)
                most = max(most, len(held))
            elif what in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
                held.remove(chunk)
        assert not held
        assert most <= chunks_in_flight(layout, rank, micro_batches) <= most + 1


def test_chunks_in_flight_of_one_stage() -> None:
    def in_flight(schedule: Any, micro_batches: int) -> list[int]:
        layout = LayoutConfig(pipeline=4, schedule=schedule)
        return [chunks_in_flight(layout, rank, micro_batches) for rank in range(4)]

    assert in_flight("1f1b", 16) == [4, 3, 2, 1]
    assert in_flight("1f1b", 2) == [2, 2, 2, 1]
    assert in_flight("gpipe", 16) == [16, 16, 16, 16]


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(8, seq_len=50, tensor=3, context=2, pipeline=9)
    assert len(str(caught.value).split("\n")) == 5
    for name in ("= 54, which", "num_heads", "num_kv_heads", "context · tensor = 6, got 50", "= 9 stages"):
        assert name in str(caught.value)


def test_too_few_rows_for_a_pipeline_ask_for_a_larger_batch() -> None:
    check(4, global_batch=4, pipeline=4, micro_batch=1)
    with pytest.raises(ConfigError, match=r"Set train\.global_batch to 4 or more"):
        check(4, global_batch=3, pipeline=4, micro_batch=1)


def test_batches_of_later_stages_count_too() -> None:
    raw = {"layout": {"pipeline": 4, "micro_batch": 4}, "train": {"stages": [{"tokens": 9}, {"global_batch": 8}]}}
    with pytest.raises(ConfigError, match=r"4 from 8 rows. Set layout.micro_batch to 2 or less"):
        check_layout(shape(), Settings.model_validate(raw), 4, [64], 64)


@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("number", [0, 1, 7, 8, 61])
def test_rows_and_layers_are_shared_out_whole(number: int, parts: int) -> None:
    for share in (rows_of, layers_of):
        ranges = [share(number, parts, part) for part in range(parts)]
        assert list(itertools.chain(*ranges)) == list(range(number))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert len(layers_of(number, parts, parts - 1)) == number // parts


@pytest.mark.parametrize(
    ("num_rows", "micro_batch", "world_size", "expected"), [(64, 8, 2, 4), (65, 8, 2, 5), (1, 8, 4, 1)]
)
def test_every_rank_has_as_many_micro_batches(num_rows: int, micro_batch: int, world_size: int, expected: int) -> None:
    layout = LayoutConfig(micro_batch=micro_batch)
    assert num_micro_batches(num_rows, layout, axes_of(layout, world_size)) == expected


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "expected"),
    [
        ("1f1b", None, [[0], [1], [2]]),
        ("interleaved", None, [[0, 3], [1, 4], [2, 5]]),
        ("interleaved", 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ("zbv", None, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_stages_go_round_the_ranks(schedule: Any, stages_per_rank: int | None, expected: list[list[int]]) -> None:
    layout = LayoutConfig(pipeline=3, schedule=schedule, stages_per_rank=stages_per_rank, data="zero2")
    assert [stages_of(layout, rank) for rank in range(3)] == expected
