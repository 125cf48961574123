from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.text import format_bytes
from train.config.settings import Settings, load_settings
from train.data.stages import StagePlan
from train.model.shape import ModelShape, flops_per_token, num_parameters
from train.parallel.memory import memory_of_rank
from train.parallel.metadata import num_tensors
from train.plan.plan import Plan, check_ranks
from train.plan.text import RankDevice, describe_run, groups_along

SHAPE = ModelShape(
    vocab_size=1000,
    num_layers=6,
    d_model=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ffw=176,
    tie_embeddings=True,
)
FIRST = StagePlan(first_step=0, num_steps=100, seq_len=128, global_batch=64, counts={"web": 1})
SECOND = StagePlan(first_step=100, num_steps=20, seq_len=256, global_batch=32, counts={"web": 1})


def plan_of(settings: Settings, *stages: StagePlan) -> Plan:
    return Plan(
        dataset="d",
        tokenizer="t",
        order="o",
        shape=SHAPE,
        num_params=num_parameters(SHAPE),
        stages=stages,
        warmup_steps=1,
        learning_rate=1e-3,
        flops_per_token=flops_per_token(SHAPE, 128),
        settings=settings,
        figures=[],
    )


GPU, CPU = RankDevice("cuda", "cuda"), RankDevice("cpu", "this machine, cpu", 1_000_000_000)


def described(raw: dict[str, Any], world_size: int, *stages: StagePlan, device: RankDevice = GPU) -> list[str]:
    settings = load_settings(raw, [], "test")
    return describe_run(plan_of(settings, *(stages or [FIRST])), settings, world_size, device).splitlines()


def loud(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("!!")]


def test_one_rank() -> None:
    lines = described({"layout": {"micro_batch": 16}}, 1)
    assert lines[0] == "1 rank(s), nothing was started"
    assert lines[1].startswith(f"model: {num_parameters(SHAPE):,} parameters ({num_parameters(SHAPE, False):,} without")
    assert "layout: zero3, one rank" in lines
    assert "rows: 64 a step; 4 micro-batches of 16" in lines
    assert "run: 100 steps, 819,200 tokens" in lines
    flops = flops_per_token(SHAPE, 128) * 64 * 128
    assert f"FLOPs: {flops:.3g} a step, {100 * flops:.3g} in all, {100 * flops:.3g} on each rank" in lines
    assert f"checkpoint: {12 * num_parameters(SHAPE) / 1e6:.3g} MB over all ranks" in lines
    # Each parameter and its two states of AdamW have an entry.
    assert f"  its metadata: {160 * 3 * num_tensors(SHAPE) / 1e3:.3g} kB" in lines
    assert loud(lines) == []


def test_every_axis_names_its_ranks() -> None:
    lines = described({"layout": {"pipeline": 2, "context": 2, "tensor": 2, "micro_batch": 8}}, 16)
    assert "layout: zero3, pipeline 2 · shard 2 · context 2 · tensor 2" in lines
    assert "  tensor: ranks 0,1 | 2,3 | 4,5 | 6,7 | … (8 groups)" in lines
    assert "  context: ranks 0,2 | 1,3 | 4,6 | 5,7 | … (8 groups)" in lines
    assert "  shard: ranks 0,4 | 1,5 | 2,6 | 3,7 | … (8 groups)" in lines
    assert "  pipeline: ranks 0,8 | 1,9 | 2,10 | 3,11 | … (8 groups)" in lines
    assert (
        "rows: 64 a step; 2 data-parallel groups of ranks compute 32 rows each (0-31, 32-63); 4 micro-batches of 8"
        in lines
    )
    assert "pipeline: 1f1b, 2 stages" in lines
    assert "  0: embedding, layers 0-2" in lines
    assert "  1: layers 3-5, head" in lines
    assert loud(lines) == []


def test_groups_part_the_ranks() -> None:
    axes = {"pipeline": 2, "replicate": 3, "tensor": 4}
    for axis, size in axes.items():
        groups = list(groups_along(axes, axis))
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        assert {len(group) for group in groups} == {size}
    assert next(groups_along(axes, "replicate")) == [0, 4, 8]


@pytest.mark.parametrize(
    ("raw", "world_size", "message"),
    [
        ({"layout": {"micro_batch": 4}}, 3, "!! 64 rows do not divide by 3 groups of ranks: some compute 21 and wait"),
        (
            {"layout": {"micro_batch": 24, "compile": False}},
            1,
            "!! 64 rows do not divide by micro-batches of 24: the last, of 16, is smaller",
        ),
        (
            {"layout": {"micro_batch": 24}},
            1,
            "!! 64 rows do not divide by micro-batches of 24: the last, of 16, is padded with rows",
        ),
        ({}, 128, "!! 64 of 128 groups of ranks have no rows: there are 64"),
        ({"layout": {"pipeline": 4}}, 4, "!! 6 layers do not divide by 4 stages: some have one more"),
        (
            {"layout": {"pipeline": 2, "micro_batch": 24}},
            2,
            "!! 64 rows do not divide by micro-batches of 24: the last, of 16, is padded with rows",
        ),
        (
            {"layout": {"tensor": 3}},
            8,
            "!! layout: expected 8 rank(s), got tensor 3 = 3, which does not divide that",
        ),
        ({"layout": {"tensor": 4}}, 8, "!! plan.num_kv_heads: expected a multiple of tensor = 4, got 2"),
        ({"plan": {"device_memory": 1_000_000}}, 1, "!! does not fit: plan.device_memory is 1 MB, "),
    ],
)
def test_what_does_not_divide_or_fit_is_loud(raw: dict[str, Any], world_size: int, message: str) -> None:
    lines = described(raw, world_size)
    assert [line for line in loud(lines) if line.startswith(message)]
    assert "run: 100 steps, 819,200 tokens" in lines


def test_all_problems_stand_at_the_top() -> None:
    lines = described({"layout": {"tensor": 3, "context": 5}, "train": {"seq_len": 128}}, 8)
    assert len(loud(lines)) == 5
    assert lines[1:6] == loud(lines)
    assert not [line for line in lines if line.startswith(("memory", "rows"))]


def test_memory_is_of_the_stage_that_needs_most() -> None:
    lines = described({"plan": {"device_memory": 80_000_000_000}}, 2, FIRST, SECOND, device=CPU)
    (memory,) = [line for line in lines if line.startswith("memory")]
    assert memory.endswith("of stage 2")
    assert [line for line in lines if line.startswith("  fits: plan.device_memory is 80 GB, ")]
    assert "  stage 1: steps 1-100, 819,200 tokens, 64 rows of 128" in lines
    assert "  stage 2: steps 101-120, 163,840 tokens, 32 rows of 256" in lines
    assert len([line for line in lines if line.startswith("rows: ")]) == 2


def test_the_device_of_the_run_comes_first_and_a_gpu_last() -> None:
    """The memory of a CPU rank is compared with its share of the machine."""
    lines = described({}, 2, device=CPU)
    assert lines[2] == "precision (this machine, cpu): fp32; optimizer: adamw"
    (memory,) = [line for line in lines if line.startswith("memory")]
    assert memory.startswith("memory of a rank (this machine, cpu), estimated: ")
    assert [line for line in lines if line.startswith("  fits: the memory for each rank (this machine, cpu) is 1 GB, ")]
    need = memory_of_rank(SHAPE, load_settings({}, [], "test").for_device("cuda"), 2, 128, 64, "cuda")
    assert lines[-1] == f"on a GPU: bf16, compiled, {format_bytes(need.peak)} of memory for each rank"
    small = RankDevice("cpu", "this machine, cpu", 1_000_000)
    (problem,) = loud(described({}, 2, device=small))
    assert problem.startswith("!! does not fit: the memory for each rank (this machine, cpu) is 1 MB, ")


def test_parts_of_the_memory_sum_up() -> None:
    lines = described({"layout": {"data": "ddp"}}, 4)
    begin = next(number for number, line in enumerate(lines) if line.startswith("memory"))
    need = memory_of_rank(SHAPE, load_settings({"layout": {"data": "ddp"}}, [], "test"), 4, 128, 64, "cuda")
    parts = {name: size for name, size in need.at_peak.items() if size}
    assert sum(parts.values()) == need.peak
    assert f"estimated: {format_bytes(need.peak)} at its largest" in lines[begin]
    listed = sorted(parts.items(), key=lambda part: -part[1])
    assert lines[begin + 1 : begin + 1 + len(parts)] == [f"  {name}: {format_bytes(size)}" for name, size in listed]


def test_time_at_the_peak_of_the_devices() -> None:
    lines = described({"train": {"peak_flops": 1e12}}, 4)
    seconds = flops_per_token(SHAPE, 128) * 819_200 / 4 / 1e12
    assert f"  {seconds:.3g} s at the peak of the devices (1e+12 FLOP/s each)" in lines


def test_every_reason_to_refuse_a_run_is_loud() -> None:
    compressed = {"layout": {"data": "ddp", "compress": "powersgd"}}
    (line,) = loud(described(compressed, 1))
    assert line.startswith("!! layout.compress = powersgd: expected at least 2 ranks")
    lines = loud(described({"layout": {"context": 2}, "train": {"seq_len": 129}}, 2))  # the length of held-out rows
    assert lines[0] == (
        "!! train.seq_len: expected a multiple of context · tensor = 2, got 129, which leaves 1. Set train.seq_len to "
        "128."
    )


def test_a_start_is_refused_with_every_reason() -> None:
    settings = load_settings({"layout": {"tensor": 3, "context": 5}, "train": {"seq_len": 128}}, [], "test")
    with pytest.raises(ConfigError) as caught:
        check_ranks(plan_of(settings, FIRST), 8)
    lines = str(caught.value).splitlines()
    assert lines[0] == "layout: 5 problem(s) with 8 rank(s); nothing was started"
    assert [line.strip() for line in lines[1:]] == [
        line.removeprefix("!! ") for line in loud(describe_run(plan_of(settings, FIRST), settings, 8, GPU).splitlines())
    ]


def test_rows_of_spans_are_longer_than_their_tokens() -> None:
    objective = {"objective": "span", "document_mask": False, "mask_share": 0.5, "mean_span": 2.0, "seq_len": 128}
    spans = {"train": objective}
    positions = 128 + 2 * 32  # two sentinels for each span of two of 64 tokens
    lines, flops = described(spans, 1), flops_per_token(SHAPE, positions) * 64 * positions
    assert f"FLOPs: {flops:.3g} a step, {100 * flops:.3g} in all, {100 * flops:.3g} on each rank" in lines
    settings = load_settings(spans, [], "test")
    need = memory_of_rank(SHAPE, settings, 1, positions, 64, "cuda")
    assert any(line.startswith(f"memory of a rank (cuda), estimated: {format_bytes(need.peak)} at") for line in lines)
