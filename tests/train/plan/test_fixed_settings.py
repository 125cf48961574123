"""Tests of train/plan/advice.py, and of what the search chooses for one GPU: formats, compilation, micro-batches."""

import re
from typing import Any

import pytest

from train.config.layout import CHUNK_TOKENS
from train.config.plan import PlanConfig
from train.config.settings import Settings
from train.data.stages import StagePlan
from train.model.shape import ModelShape, choose_shape, flops_per_token
from train.parallel.devices import Cluster, Device, device_of
from train.parallel.memory import memory_of_rank
from train.plan.layouts import costs_of_fixed, without_settings
from train.plan.search.candidates import LayoutSplit
from train.plan.search.compute import Compute, loss_bytes_per_logit
from train.plan.search.search import predict, search

ROWS, LENGTH = 512, 1024
ONE_RANK = LayoutSplit("zero2", 1, 1, 1, "heads", 1, 1, "1f1b", 1)


@pytest.fixture(scope="module")
def gpt() -> ModelShape:
    return choose_shape(124e6, 50304, PlanConfig())


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(sections)


def costs(shape: ModelShape, device: str, gpus: int = 1, **sections: dict[str, Any]) -> list[str]:
    """The sentences of a plan whose recipe says so."""
    stage = StagePlan(seq_len=LENGTH, global_batch=ROWS, first_step=0, num_steps=10, counts={"web": 1})
    cluster, chosen = Cluster.of(device, gpus, 1), settings(**sections)
    found = search(shape, chosen, [stage], cluster).best[0].step_seconds
    return list(costs_of_fixed(shape, chosen, [stage], cluster, found))


# ---------------------------------------------------------------------------------------------------------- one GPU


@pytest.mark.parametrize(("device", "least", "peak"), [("h100-sxm", 300_000, 989.4e12), ("a100-80gb", 150_000, 312e12)])
def test_one_gpu_gets_bf16_and_compiled_layers(gpt: ModelShape, device: str, least: int, peak: float) -> None:
    best = search(gpt, Settings(), (LENGTH, ROWS), Cluster.of(device, 1, 1)).best[0]
    assert best.tokens_per_second > least
    assert best.layout.compile is True
    assert best.mfu == pytest.approx(flops_per_token(gpt, LENGTH) * best.tokens_per_second / peak)
    bf16 = settings(train={"precision": "bf16"}, layout=best.layout_settings())
    again = predict(gpt, bf16, (LENGTH, ROWS), Cluster.of(device, 1, 1))
    assert (again.step_seconds, again.memory) == (pytest.approx(best.step_seconds), best.memory)
    # The settings of a CPU would be less than half as fast although fp32 is TF32 there, and the MFU shows it.
    single = settings(train={"precision": "fp32"}, layout={"compile": False, "micro_batch": 8})
    slow = predict(gpt, single, (LENGTH, ROWS), Cluster.of(device, 1, 1))
    assert slow.tokens_per_second < best.tokens_per_second / 2
    assert slow.mfu / best.mfu == pytest.approx(slow.tokens_per_second / best.tokens_per_second)


def test_a_cpu_gets_fp32_without_compilation(gpt: ModelShape) -> None:
    best = search(gpt, Settings(), (LENGTH, 8), Cluster.of("cpu", 1, 1)).best
    device = device_of("cpu").model_copy(update={"memory_bytes": 64 * 10**9})
    best = search(gpt, Settings(), (LENGTH, 8), Cluster(device, 1, 1)).best
    assert best[0].layout.compile is False
    single = settings(train={"precision": "fp32"}, layout=best[0].layout_settings())
    assert predict(gpt, single, (LENGTH, 8), Cluster(device, 1, 1)).step_seconds == pytest.approx(best[0].step_seconds)


def test_an_older_gpu_gets_fp16(gpt: ModelShape) -> None:
    """By the capability that calibration measures; its MFU is by bf16 if it has any, else by its own format."""
    old = device_of("a100-40gb").model_copy(update={"capability": (7, 0)})
    best = search(gpt, Settings(), (LENGTH, ROWS), Cluster(old, 1, 1)).best[0]
    fp16 = settings(train={"precision": "fp16"}, layout=best.layout_settings())
    assert predict(gpt, fp16, (LENGTH, ROWS), Cluster(old, 1, 1)).step_seconds == pytest.approx(best.step_seconds)
    without_bf16 = old.model_copy(update={"peak_flops": {"fp32": 15e12, "fp16": 125e12}})
    assert without_bf16.utilisation_peak("fp16") == 125e12


def test_a_pipeline_that_cannot_be_compiled_is_compared_with_one_that_is(gpt: ModelShape) -> None:
    found = search(gpt, settings(layout={"pipeline": 2}), (LENGTH, ROWS), Cluster.of("h100-sxm", 4, 1), top=50).best
    assert all(each.layout.compile is (each.layout.schedule not in ("zero_bubble", "zbv")) for each in found)
    split = settings(layout={"pipeline": 2, "data": "zero2", "schedule": "zbv"}, plan={"tie_embeddings": False})
    untied = gpt.model_copy(update={"tie_embeddings": False})
    best = search(untied, split, (LENGTH, ROWS), Cluster.of("h100-sxm", 4, 1)).best
    assert best
    assert not any(each.layout.compile for each in best)


# --------------------------------------------------------------------------------------------------- what is fixed


@pytest.mark.parametrize(
    ("sections", "begin"),
    [
        ({"layout": {"compile": False}}, "layout.compile = false costs "),
        ({"layout": {"micro_batch": 1}}, "layout.micro_batch = 1 costs "),
        ({"layout": {"activation_checkpointing": "full"}}, 'layout.activation_checkpointing = "full" costs '),
        (
            {"layout": {"activation_checkpointing": "budget", "activation_budget": 10**6}},
            'layout.activation_checkpointing = "budget" costs ',
        ),
        ({"train": {"precision": "fp32", "document_mask": False}}, 'train.precision = "fp32" costs '),
    ],
)
def test_a_fixed_setting_has_its_price(gpt: ModelShape, sections: dict[str, dict[str, Any]], begin: str) -> None:
    (sentence,) = costs(gpt, "h100-sxm", **sections)
    said = re.fullmatch(r"(.*) costs (\d+) %: (\S+) s a step in place of (\S+) s; leave it out\.", sentence)
    assert said is not None
    assert sentence.startswith(begin)
    share, slow, fast = int(said[2]) / 100, float(said[3]), float(said[4])
    assert slow / fast - 1 == pytest.approx(share, abs=0.02 * (1 + share))
    free = search(gpt, Settings(), (LENGTH, ROWS), Cluster.of("h100-sxm", 1, 1)).best[0]
    assert fast == pytest.approx(free.step_seconds, rel=0.01)


def test_what_costs_nothing_is_not_mentioned(gpt: ModelShape) -> None:
    best = search(gpt, Settings(), (LENGTH, ROWS), Cluster.of("h100-sxm", 1, 1)).best[0]
    assert costs(gpt, "h100-sxm") == []
    assert costs(gpt, "h100-sxm", layout=best.layout_settings(), train={"precision": "bf16"}) == []
    # Another format that is as fast, and one that is faster and that nobody is urged to take.
    assert costs(gpt, "h100-sxm", train={"precision": "fp16"}) == []
    assert costs(gpt, "h100-sxm", train={"precision": "fp8"}) == []


def test_settings_are_freed_one_by_one() -> None:
    chosen = settings(layout={"compile": False, "micro_batch": 1}, train={"seq_len": 64})
    freed = without_settings(chosen, "layout", ("compile",))
    assert freed is not None
    assert freed.layout.model_dump(exclude_unset=True) == {"micro_batch": 1}
    assert freed.train == chosen.train
    assert without_settings(chosen, "train", ("precision",)) is None
    # What a recipe sets to its default is fixed all the same.
    default = settings(layout={"activation_checkpointing": "none"})
    freed = without_settings(default, "layout", ("activation_checkpointing", "activation_budget"))
    assert freed is not None
    assert freed.layout.model_fields_set == set()


# ----------------------------------------------------------------------------------------------------- how it counts


def test_a_compiled_micro_batch_is_filled_up(gpt: ModelShape) -> None:
    """Of 96 rows in micro-batches of 64 a compiled model computes 128, an eager one 96."""

    def products(compiled: bool, rows: int) -> float:
        chosen = settings(layout={"compile": compiled, "micro_batch": 64}, train={"precision": "bf16"})
        return predict(gpt, chosen, (LENGTH, rows), Cluster.of("h100-sxm", 1, 1)).parts["products"]

    assert products(True, 96) == pytest.approx(products(True, 128))
    assert products(False, 96) == pytest.approx(0.75 * products(False, 128))
    best = search(gpt, Settings(), (LENGTH, 148), Cluster.of("h100-sxm", 2, 1)).best[0]
    rows = -(-148 // (best.split.replicate * best.split.shard))
    assert best.micro_batches * best.layout.rows_at_once - rows < best.micro_batches


@pytest.mark.parametrize(
    ("width", "compiled", "expected"), [(2, True, 6), (4, True, 12), (2, False, 44), (4, False, 32)]
)
def test_the_loss_reads_and_writes_so_many_bytes(gpt: ModelShape, width: int, compiled: bool, expected: int) -> None:
    assert loss_bytes_per_logit(width, compiled) == expected
    device = wide_products(device_of("h100-sxm"))
    chosen = settings(
        layout={"compile": compiled}, train={"precision": "bf16" if width == 2 else "fp32", "document_mask": False}
    )
    seconds = Compute(gpt, chosen, device, LENGTH).head(ONE_RANK, 8)
    bandwidth = device.traffic_share * device.memory_bandwidth
    tokens, d, columns = 8 * LENGTH, gpt.d_model, 50304
    products = 3 * width * (tokens * d + d * columns + tokens * columns)
    assert seconds == pytest.approx((products + expected * tokens * columns) / bandwidth)


def wide_products(device: Device) -> Device:
    """The same with products that cost their bytes alone."""
    return device.model_copy(update={"peak_flops": dict.fromkeys(device.peak_flops, 1e30)})


def test_the_vocabulary_is_padded_on_a_gpu_but_not_in_a_flop_count(gpt: ModelShape) -> None:
    ragged = gpt.model_copy(update={"vocab_size": 50257})
    heads = [Compute(shape, Settings(), device_of("h100-sxm"), LENGTH).head(ONE_RANK, 8) for shape in (gpt, ragged)]
    assert heads[0] == pytest.approx(heads[1])
    cpu = [Compute(shape, Settings(), device_of("cpu"), LENGTH).head(ONE_RANK, 8) for shape in (gpt, ragged)]
    assert cpu[1] < cpu[0]
    assert flops_per_token(gpt, LENGTH) - flops_per_token(ragged, LENGTH) == 6 * 47 * gpt.d_model


def test_a_compiled_loss_needs_no_copy_of_the_logits(gpt: ModelShape) -> None:
    compiled, eager = (
        memory_of_rank(gpt, settings(layout={"compile": each, "micro_batch": 8}), 1, LENGTH, 8, "cuda").moments["loss"][
            "loss"
        ]
        for each in (True, False)
    )
    assert eager - compiled == 4 * CHUNK_TOKENS["cuda"] * 50304
