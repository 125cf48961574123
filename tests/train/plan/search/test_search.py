"""The search: times counted by hand, which layouts it looks at, what it refuses, and speeds that others published."""

import math
import re
from typing import Any

import pytest

from bench.published_steps import LLAMA_8B, LLAMA_70B, LLAMA_405B, PUBLISHED, Published
from bench.search_layouts import agreement, kendall
from schemas.errors import ConfigError
from train.config.layout import LayoutConfig
from train.config.settings import Settings
from train.data.stages import StagePlan
from train.model.shape import ModelShape, flops_per_token, num_parameters
from train.parallel.devices import KNOWN_DEVICES, Cluster, Device, Link
from train.parallel.layout import layout_problems
from train.parallel.memory import memory_of_rank
from train.plan.search.candidates import LayoutSplit
from train.plan.search.compute import Compute
from train.plan.search.cost import STEP_COMPONENTS, ClusterRings, bubble_share
from train.plan.search.search import predict, search

PLAIN = Device(
    name="plain",
    peak_flops={"fp32": 1e12, "bf16": 2e12},
    product_share=0.5,
    attention_share=0.25,
    memory_bytes=10_000_000_000,
    memory_bandwidth=1e11,
    traffic_share=1.0,
    op_seconds=0,
    host_seconds=0,
    collective_seconds=1e-5,
    within=Link(bandwidth=1e10, latency=1e-6),
    between=Link(bandwidth=1e9, latency=1e-5),
    overlap=0.0,
    gpus_per_node=4,
    source="made up",
)
"""Round numbers, and nothing that hides."""
SMALL = ModelShape(
    vocab_size=1000, num_layers=4, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ffw=96, tie_embeddings=False
)


def settings(layout: dict[str, Any] | None = None, **train: Any) -> Settings:
    return Settings.model_validate({"train": train, "layout": layout or {}})


def split(**changes: Any) -> LayoutSplit:
    whole = {"data": "zero3", "replicate": 1, "shard": 1, "context": 1, "context_by": "heads", "tensor": 1}
    return LayoutSplit(**(whole | {"pipeline": 1, "schedule": "1f1b", "stages": 1} | changes))


def test_collectives_by_hand() -> None:
    links = ClusterRings(Cluster(PLAIN, 4, 2))
    inside = links.ring(split(tensor=4, shard=2).axes, "tensor")
    assert (inside.size, inside.per_node, inside.nodes, inside.bandwidth) == (4, 4, 1, 1e10)
    assert inside.gather(8e6) == pytest.approx(1e-5 + 3e-6 + 3 / 4 * 8e6 / 1e10)
    across = links.ring(split(tensor=4, shard=2).axes, "shard", "context")
    assert (across.per_node, across.nodes, across.bandwidth) == (1, 2, 1e9)
    # Over both nodes four adapters carry at once; seven hops, one of them between the nodes.
    whole = links.ring(split(shard=8).axes, "shard", "context")
    assert (whole.per_node, whole.nodes, whole.bandwidth) == (4, 2, 4e9)
    assert whole.reduce(8e6) == pytest.approx(1e-5 + 2 * (6e-6 + 1e-5 + 7 / 8 * 8e6 / 4e9))
    assert whole.exchange(8e6) == pytest.approx(1e-5 + 6e-6 + 1e-5 + (1 - 4 / 8) * 8e6 / 1e9)
    assert links.ring(split(shard=8).axes, "tensor").gather(1e9) == 0


def test_a_group_that_lies_over_the_edge_of_a_node_is_the_one_that_counts() -> None:
    """On nodes of six, ranks 4 to 7 lie two and two; the search keeps matrices within a node."""
    links = ClusterRings(Cluster(PLAIN, 6, 2))
    ring = links.ring(split(tensor=4, shard=3).axes, "tensor")
    assert (ring.size, ring.per_node, ring.nodes, ring.bandwidth) == (4, 2, 2, 2e9)
    pair = links.ring(split(tensor=3, shard=4).axes, "shard", "context")  # ranks 0, 3, 6, 9
    assert (pair.per_node, pair.nodes) == (2, 2)
    whole = links.ring(split(shard=12).axes, "shard", "context")
    assert (whole.per_node, whole.nodes) == (6, 2)
    wide = SMALL.model_copy(update={"num_heads": 12, "num_kv_heads": 12})
    found = search(wide, settings({"pipeline": 1, "context": 1}), (120, 48), Cluster(PLAIN, 6, 2), top=50)
    assert {each.layout.tensor for each in found.best} == {1, 2, 3, 6}


def test_products_and_attention_by_hand() -> None:
    compute = Compute(SMALL, settings(document_mask=False, precision="fp32"), PLAIN, 128)
    # 64·(64 + 2·32 + 64 + 3·96) weights are 2 FLOPs for each of 256 positions, at half of 1e12; or memory is slower.
    found = compute.layer(split(), 2)
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    by_hand = sum(max(2 * 256 * k * n / 5e11, 4 * (256 * k + k * n + 256 * n) / 1e11) for k, n in sizes)
    assert found.products == pytest.approx(by_hand)
    # Two products for each pair of a causal half, at a quarter of the peak.
    assert found.attention == pytest.approx(4 * 2 * 128 * 128 / 2 * 64 / 2.5e11)
    # By keys half of the pairs cannot be left out, and a rank has half of the queries.
    by_keys = compute.layer(split(context=2, context_by="keys"), 2)
    assert by_keys.attention == pytest.approx(found.attention)
    assert compute.layer(split(tensor=2), 2).attention == pytest.approx(found.attention / 2)


def test_offloaded_updates_by_hand() -> None:
    """A thousand parameters: 28 bytes of AdamW each, 12 for norm and clipping, at 1e11 bytes/s on the device."""
    device = PLAIN.model_copy(update={"host_bandwidth": 1e9, "disk_bandwidth": 1e8})

    def seconds(**layout: Any) -> float:
        return Compute(SMALL, settings(layout, document_mask=False, precision="fp32"), device, 128).update(1000, 1)

    plain = 40_000 / 1e11
    assert seconds() == pytest.approx(plain)
    # Two states of four bytes are read and written.
    assert seconds(offload="optimizer") == pytest.approx(plain + 16_000 / 1e9)
    assert seconds(offload="optimizer", offload_dir="/nvme") == pytest.approx(plain + 16_000 / 1e9 + 16_000 / 1e8)
    assert seconds(offload="parameters") == pytest.approx(plain + 16_000 / 1e9)
    assert seconds(offload="all") == pytest.approx(48_000 / 1e9)
    assert seconds(offload="all", offload_dir="/nvme") == pytest.approx(48_000 / 1e9 + 16_000 / 1e8)
    # A weight of four bytes is read and written.
    weights = {"offload_weights_dir": "/nvme"}
    assert seconds(offload="parameters", **weights) == pytest.approx(plain + 16_000 / 1e9 + 8_000 / 1e8)
    assert seconds(offload="all", **weights) == pytest.approx(48_000 / 1e9 + 8_000 / 1e8)


def test_offloaded_weights_cross_the_link_in_every_micro_batch() -> None:
    """Two micro-batches of one rank: weights are read before the forward and the backward pass."""
    slow = {"host_bandwidth": 1e3, "disk_bandwidth": 1e2, "overlap": 0.0}
    cluster = Cluster(PLAIN.model_copy(update=slow), 1, 1)
    params = num_parameters(SMALL)
    outer = SMALL.vocab_size * SMALL.d_model * (1 if SMALL.tie_embeddings else 2) + SMALL.d_model

    def seconds(**layout: Any) -> dict[str, float]:
        return predict(SMALL, settings({"micro_batch": 4, "data": "zero3"} | layout), (128, 8), cluster).parts

    reads = 2 * 4 * (2 * params - outer)  # what is not in a layer stays until the backward pass
    for layout, of_reads in (({}, 1e-3), ({"offload_weights_dir": "/nvme"}, 1e-3 + 1e-2)):
        found = seconds(offload="parameters", **layout)
        assert found["weights"] == pytest.approx(reads * of_reads, rel=0.01)
        assert found["gradients"] == pytest.approx(2 * 4 * params * 1e-3, rel=0.01)
    assert seconds()["weights"] == seconds()["gradients"] == 0


def test_bubble_by_hand() -> None:
    """Four ranks and layers: a 1F1B step is as long as m + 3 micro-batches, as far as stages are alike."""
    alike = {"pipeline": 4, "micro_batch": 1}
    found = predict(SMALL, settings(alike), (128, 8), Cluster(PLAIN, 4, 1))
    busy = sum(found.parts[name] for name in ("products", "attention", "traffic", "launches"))
    layer = busy / 8  # of one micro-batch; the slowest rank has the head, three others wait for it
    assert found.micro_batches == 8
    assert found.parts["bubble"] == pytest.approx(3 * layer, rel=0.05)
    assert [bubble_share(*each) for each in (("1f1b", 1), ("interleaved", 4), ("zero_bubble", 2))] == [1, 1 / 4, 1 / 6]


def test_parts_add_up_and_mean_something() -> None:
    for layout in ({"data": "ddp"}, {"tensor": 2}, {"context": 2}, {"pipeline": 2, "micro_batch": 1}, {"replicate": 2}):
        found = predict(SMALL, settings(layout), (128, 16), Cluster(PLAIN, 4, 1))
        assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
        assert set(found.parts) <= set(STEP_COMPONENTS)
        assert min(found.parts.values()) >= 0
        assert found.tokens_per_second == pytest.approx(16 * 128 / found.step_seconds)
        assert found.mfu == pytest.approx(flops_per_token(SMALL, 128) * found.tokens_per_second / 8e12)


@pytest.mark.parametrize(
    ("less", "more", "part"),
    [
        ({"micro_batch": 4}, {"micro_batch": 4, "activation_checkpointing": "full"}, "recompute"),
        ({"data": "zero2"}, {"data": "zero3", "micro_batch": 1}, "weights"),
        ({"data": "ddp"}, {"data": "zero1"}, "weights"),
        ({}, {"tensor": 2}, "tensor"),
        ({}, {"context": 4}, "context"),
        ({"pipeline": 2, "micro_batch": 1}, {"pipeline": 4, "micro_batch": 1}, "bubble"),
    ],
)
def test_what_costs_more(less: dict[str, Any], more: dict[str, Any], part: str) -> None:
    first, second = (predict(SMALL, settings(each), (128, 16), Cluster(PLAIN, 4, 1)) for each in (less, more))
    assert second.parts[part] > first.parts.get(part, 0)


def test_ranks_that_share_cores_wait_for_each_other() -> None:
    shared = PLAIN.model_copy(update={"at_once": 2})
    alone, four = (predict(SMALL, settings({"data": "ddp"}), (128, 16), Cluster(d, 4, 1)) for d in (PLAIN, shared))
    assert four.step_seconds == pytest.approx(2 * alone.step_seconds)
    # In a pipeline of four a rank waits anyway: a core that it leaves serves another.
    layout = {"pipeline": 4, "micro_batch": 4}
    alone, four = (predict(SMALL, settings(layout), (128, 16), Cluster(d, 4, 1)) for d in (PLAIN, shared))
    assert four.step_seconds < 1.5 * alone.step_seconds


def test_the_best_are_fit_to_run_and_have_other_axes() -> None:
    """What a run would refuse is not offered, and memory is that of the plan."""
    chosen, cluster = settings({"compile": True}, precision="bf16"), Cluster.of("h100-sxm", 8, 4)
    found = search(LLAMA_8B, chosen, (8192, 256), cluster)
    assert len(found.best) == 5
    assert len({each.split._replace(schedule="", stages=1) for each in found.best}) == 5
    assert [each.step_seconds for each in found.best] == sorted(each.step_seconds for each in found.best)
    for each in found.best:
        section = LayoutConfig.model_validate(each.layout_settings() | {"compile": True})
        assert section == each.layout
        laid_out = chosen.model_copy(update={"layout": section})
        assert not list(layout_problems(LLAMA_8B, laid_out, 32, [8192], 256))
        assert each.memory == memory_of_rank(LLAMA_8B, laid_out, 32, 8192, 256, "cuda")
        assert each.memory.peak <= found.limit == 80_000_000_000 * 92 // 100
        again = predict(LLAMA_8B, laid_out, (8192, 256), cluster)
        assert (again.step_seconds, again.parts) == (each.step_seconds, each.parts)
    assert found.refused["weights and states do not fit"][1].startswith("ddp, replicas 32: 96.")
    assert found.refused["slower"][0] > 1000
    assert "does not fit into memory" in found.refused
    shown = str(found)
    assert f"{found.searched:,} layouts for 32 h100-sxm, 4 node(s) of 8" in shown
    assert all(part in shown for part in ("MFU", "rejected:", "NVIDIA H100 data sheet"))


WIDE = SMALL.model_copy(update={"d_model": 256, "d_ffw": 768, "num_layers": 8, "head_dim": 64})


@pytest.mark.parametrize(("shape", "batch"), [(SMALL, (128, 16)), (SMALL, (128, 4)), (WIDE, (64, 8))])
def test_exhaustive_search_finds_no_faster_layout(shape: ModelShape, batch: tuple[int, int]) -> None:
    """Against every layout timed and weighed one by one, from the least memory that any fits into.

    With all rows in one micro-batch no gradients add up, and with zero3 a rank alone frees its copies: each fits where
    nothing else does.
    """
    chosen, timed = settings(document_mask=False), []
    for layout in _every_layout():
        try:
            laid_out = chosen.model_copy(update={"layout": LayoutConfig.model_validate(layout)})
        except ValueError:
            continue
        if list(layout_problems(shape, laid_out, 4, [batch[0]], batch[1])):
            continue
        if layout["data"] in ("ddp", "zero1") and batch[1] < 4:
            continue
        each = predict(shape, laid_out, batch, Cluster(PLAIN, 4, 1))
        timed.append((each.memory.peak, each.step_seconds))
    assert len(timed) > 20
    for limit in sorted({peak for peak, _ in timed})[:40]:
        device = PLAIN.model_copy(update={"memory_bytes": limit})
        limited = chosen.model_copy(update={"plan": chosen.plan.model_copy(update={"device_memory": limit})})
        found = search(shape, limited, batch, Cluster(device, 4, 1), top=1)
        # Other schedules of a pipeline may be faster still.
        assert found.best[0].step_seconds <= min(seconds for peak, seconds in timed if peak <= limit), limit


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_every_known_device_has_a_plan(device: Device) -> None:
    chosen = Settings().with_precisions_for(device.kind, device.capability)
    assert chosen.train.precision in device.peak_flops
    found = search(SMALL, chosen, (128, 64), Cluster(device, device.gpus_per_node, 1), top=1)
    assert 0 < found.best[0].mfu < 1


def test_what_does_not_fit_is_named_with_its_own_bytes() -> None:
    """Not with those of another micro-batch of the same axes."""
    chosen, cluster = {"data": "zero2", "tensor": 1, "pipeline": 1, "context": 1}, Cluster.of("h100-sxm", 8, 4)
    found = search(LLAMA_70B, settings(chosen, precision="bf16"), (8192, 128), cluster)
    match = re.fullmatch(
        r"zero2, shard 32, micro-batches of (\d+), (\w+) recomputed: ([\d.]+) of 73.6 GB",
        found.refused["does not fit into memory"][1],
    )
    assert match is not None
    layout = chosen | {"micro_batch": int(match[1]), "activation_checkpointing": match[2]}
    again = predict(LLAMA_70B, settings(layout, precision="bf16"), (8192, 128), cluster)
    assert f"{again.memory.peak / 1e9:.4g}" == match[3]


def _every_layout() -> list[dict[str, Any]]:
    layouts: list[dict[str, Any]] = []
    axes = [{"tensor": t, "context": c, "pipeline": p} for t in (1, 2, 4) for c in (1, 2, 4) for p in (1, 2, 4)]
    for sizes in (sizes for sizes in axes if 4 % math.prod(sizes.values()) == 0):
        for data in ("ddp", "zero1", "zero2", "zero3"):
            for rows in (1, 2, 4, 8, 16):
                for mode in ("none", "selective", "full"):
                    layout = {"data": data, "micro_batch": rows, "activation_checkpointing": mode, **sizes}
                    layouts.append(layout)
                    if 4 // math.prod(sizes.values()) == 2 and data in ("zero2", "zero3"):
                        layouts.append(layout | {"replicate": 2})
    return layouts


def test_nothing_fits() -> None:
    found = search(LLAMA_405B, settings(precision="bf16"), (8192, 64), Cluster.of("h100-sxm", 8, 1))
    assert found.best == ()
    count, example = found.refused["weights and states do not fit"]
    assert count > 100
    assert "of 73.6 GB" in example
    assert "none fits" in str(found)


def test_what_the_recipe_sets_is_kept() -> None:
    found = search(SMALL, settings({"tensor": 2, "micro_batch": 4}), (128, 16), Cluster(PLAIN, 4, 2))
    assert {(each.layout.tensor, each.layout.micro_batch) for each in found.best} == {(2, 4)}


def test_what_does_not_divide_is_counted() -> None:
    odd = SMALL.model_copy(update={"num_heads": 3, "num_kv_heads": 3})
    kept = settings({"pipeline": 1})
    count, example = search(odd, kept, (128, 16), Cluster(PLAIN, 4, 1)).refused["does not divide"]
    assert count > 0
    assert example == "zero2, shard 2 · tensor 2: plan.num_heads: expected a multiple of tensor = 2, got 3"
    few = search(SMALL, settings(), (128, 2), Cluster(PLAIN, 4, 1))
    _, example = few.refused["fewer sequences than groups of ranks"]
    assert "4 groups of ranks, 2 sequences a step" in example


def test_stages_of_a_run_are_weighed_by_their_steps() -> None:
    counts = {"web": 1}
    short = StagePlan(first_step=0, num_steps=30, seq_len=128, global_batch=16, counts=counts)
    long = StagePlan(first_step=30, num_steps=10, seq_len=256, global_batch=16, counts=counts)
    one, other, both = (
        predict(SMALL, settings({"data": "ddp"}), run, Cluster(PLAIN, 4, 1)) for run in ([short], [long], [short, long])
    )
    assert both.step_seconds == pytest.approx((3 * one.step_seconds + other.step_seconds) / 4)
    assert both.memory.peak == other.memory.peak > one.memory.peak


def test_recomputation_that_a_run_would_refuse_is_not_offered() -> None:
    chosen = settings({"tensor": 2, "compile": True}, attention_dropout=0.1)
    found = search(SMALL, chosen, (128, 16), Cluster(PLAIN, 4, 2), top=50)
    count, example = found.refused["torch does not compile the recomputation"]
    assert count > 1
    assert "train.attention_dropout, got full" in example


def test_a_layout_that_does_not_go_in_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected axes that work on 4 plain, 1 node.s. of 4, got fewer sequences"):
        predict(SMALL, settings({"data": "ddp"}), (128, 2), Cluster(PLAIN, 4, 1))
    with pytest.raises(ConfigError, match=r"that plain computes in .fp32, bf16., got fp16"):
        search(SMALL, settings(precision="fp16"), (128, 16), Cluster(PLAIN, 4, 1))


def test_a_thousand_gpus_are_searched_whole() -> None:
    found = search(LLAMA_70B, settings(precision="bf16"), (8192, 1024), Cluster.of("h100-sxm", 8, 128))
    assert found.searched > 50_000
    assert len(found.best) == 5


@pytest.mark.parametrize("each", PUBLISHED, ids=lambda each: each.name)
def test_predictions_are_near_published_speeds(each: Published) -> None:
    """0.89 to 1.36 of what others measured with their code; the shares of a peak were chosen on the same figures."""
    chosen = settings({"data": "zero3", "compile": False} | each.layout, precision="bf16")
    found = predict(each.shape, chosen, (each.seq_len, each.rows), Cluster.of(each.device, 8, each.nodes))
    assert 0.85 < found.tokens_per_second / (8 * each.nodes) / each.speed < 1.4


def test_orders_are_compared_by_pairs() -> None:
    """Of 3 pairs two are right; with ties of a quarter, one of the wrong kind counts no more."""
    assert agreement([1, 2, 3], [10, 12, 11], 0.0) == (2 / 3, 3)
    assert agreement([1, 2, 3], [10, 12, 11], 0.15) == (1.0, 1)
    assert agreement([1, 2], [5, 5], 0.1) == (1.0, 0)
    assert [kendall([1, 2, 3], found) for found in ([1, 2, 3], [3, 2, 1])] == [1, -1]
