"""The estimate is compared with what torch's memory tracker counts while the real model makes two steps.

Most ranks are those of a fake process group: its collectives move no data, but every buffer of one rank is allocated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from schemas.errors import ConfigError
from tests.support.rank_pool import shared_pool
from train.config.settings import Settings, load_settings
from train.model.shape import ModelShape, num_parameters, params_of_layer
from train.parallel.memory import Widths, checkpoint_bytes, layers_to_recompute, memory_of_rank, zero_bytes


def shape(**changes: Any) -> ModelShape:
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "num_layers": 4,
        "d_model": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "d_ffw": 352,
        "tie_embeddings": True,
    }
    return ModelShape(**(settings | changes))


def settings_of(raw: dict[str, Any]) -> Settings:
    return load_settings(raw, [], "test")


def test_states_shard_as_in_the_zero_paper() -> None:
    """7.5B parameters on 64 ranks, 16 bits with float32 states: figure 1 of Rajbhandari et al. 2020."""
    widths = Widths(weight=2, gradient=2, states=12)
    actual = {
        data: sum(zero_bytes(7_500_000_000, 64, data, widths).values()) / 1e9
        for data in ("ddp", "zero1", "zero2", "zero3")
    }
    assert actual == pytest.approx({"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}, abs=0.05)
    assert zero_bytes(100, 4, "zero2", Widths(4, 4, 8)) == {"weight": 400, "gradient": 100, "states": 200}


def test_memory_by_hand() -> None:
    """Two layers of 31,488 + 128 parameters, 2 matrices of 500·64 and a norm; 4 ranks, float32, one micro-batch."""
    small = shape(vocab_size=500, num_layers=2, d_model=64, num_heads=4, head_dim=16, d_ffw=100, tie_embeddings=False)
    layer, outside = 31_488 + 128, 2 * 32_000 + 64
    params = 2 * layer + outside
    assert (params_of_layer(small), num_parameters(small)) == (layer, params)
    settings = settings_of({"layout": {"micro_batch": 4}, "train": {"document_mask": False}})
    need = memory_of_rank(small, settings, 4, 128, 16)
    # Of a position: both norms, their outputs, q and what attention gives, k and v, four tensors of the feed-forward,
    # log Z of 4 heads; once, the last norm.
    kept = 2 * (8 * 64 + 4) + 4 * (2 * 64 + 2 * 64 + 2 * 32 + 4 * 100) + 4 * 4
    assert need.moments["loss"] == {
        "weights": 4 * params // 4,
        "states": 8 * params // 4,
        "batch": 20 * 4 * 128,
        "gradients": 0,
        "activations": 4 * 128 * (2 * kept + 8 * 64 + 4),
        "transfer": 0,
        "gathered": 4 * (outside + layer),
        "loss": 4 * 512 * 500 + 4 * 500 * 64 + 2 * 4 * 512 * 64,
    }
    assert need.moments["update"]["gradients"] == 4 * params // 4
    assert need.peak == sum(need.at_peak.values()) == sum(need.moments[need.peak_moment].values())


def peak(raw: dict[str, Any], world_size: int, moment: str, **more: Any) -> dict[str, int]:
    return memory_of_rank(shape(**more), settings_of(raw), world_size, 64, 8).moments[moment]


def test_what_is_shared_out() -> None:
    params = num_parameters(shape())
    for data, weights, states in (("ddp", 1, 1), ("zero1", 1, 4), ("zero2", 4, 4), ("zero3", 4, 4)):
        need = peak({"layout": {"data": data}}, 4, "loss")
        assert (need["weights"], need["states"]) == (4 * params // weights, 8 * params // states), data
    # Replicas share nothing out; the parts of a sequence do; a matrix is in as many parts as its axis has ranks.
    assert peak({"layout": {"replicate": 2}}, 4, "loss")["weights"] == 2 * params
    assert peak({"layout": {"context": 2}}, 4, "loss")["weights"] == params
    assert peak({"layout": {"tensor": 2}}, 2, "loss")["weights"] == 2 * (params + 9 * 128)  # norms are on every rank
    # Without a lossy compression nothing is held back; with one, twice until the update is made.
    for compress, errors in (("none", 0), ("bf16", 0), ("topk", 8 * params), ("powersgd", 8 * params)):
        assert peak({"layout": {"data": "ddp", "compress": compress}}, 2, "update")["transfer"] == errors


def test_states_by_optimizer() -> None:
    params, matrices = num_parameters(shape()), 4 * (params_of_layer(shape()) - 256)
    states = {
        name: peak({"optim": {"optimizer": name}}, 1, "loss")["states"]
        for name in ("adamw", "lamb", "muon", "adafactor")
    }
    lengths = 512 + 128 + 4 * (2 * 256 + 2 * 192 + 3 * 480)
    assert states == {
        "adamw": 8 * params,
        "lamb": 8 * params,
        "muon": 8 * params - 4 * matrices,
        "adafactor": 4 * (lengths + 9 * 128),
    }


def test_a_pipeline_holds_what_is_in_flight() -> None:
    def activations(schedule: str, micro_batch: int, **more: Any) -> int:
        raw = {"layout": {"pipeline": 2, "schedule": schedule, "micro_batch": micro_batch} | more}
        raw["train"] = {"document_mask": False}
        return memory_of_rank(shape(), settings_of(raw), 2, 64, 8).moments["loss"]["activations"]

    item = activations("gpipe", 8)  # a single micro-batch
    assert activations("gpipe", 1) == pytest.approx(item, rel=0.05)  # all of them, an eighth each
    assert activations("1f1b", 1) == pytest.approx(item / 4, rel=0.1)  # two of eight, on the first rank
    assert activations("gpipe", 1, activation_checkpointing="full") < item / 8


def test_the_budget_decides_how_many_layers_compute_again() -> None:
    def layers(budget: int) -> int:
        layout = {"activation_checkpointing": "budget", "activation_budget": budget}
        raw = {"layout": layout, "train": {"document_mask": False}}
        return layers_to_recompute(shape(), settings_of(raw), 1, 64, 8)

    tokens = 8 * 64
    saved = tokens * (2 * (8 * 128 + 4) + 4 * (2 * 128 + 2 * 128 + 2 * 64 + 4 * 352) + 16)
    entry = tokens * 4 * 128
    assert layers(4 * saved) == 0
    assert layers(4 * saved - 1) == 1
    assert layers(2 * saved + 2 * entry) == 2
    assert layers(4 * entry) == 4
    with pytest.raises(ConfigError, match=f"expected at most {4 * entry - 1:,} bytes .* got {4 * entry:,} although"):
        layers(4 * entry - 1)


def test_offloaded_states_lie_in_the_memory_of_the_host() -> None:
    settings = settings_of({"layout": {"offload": True}})
    need = memory_of_rank(shape(), settings, 2, 64, 8, "cuda")
    assert need.host == 16 * num_parameters(shape()) // 2
    assert not {"weights", "states", "gradients"} & set(need.at_peak)
    assert memory_of_rank(shape(), settings, 2, 64, 8, "cpu").host == 0


@pytest.mark.parametrize(
    ("layout", "device", "host", "disk", "left"),
    [
        ({"offload": "optimizer"}, "cuda", 8, 0, {"weights", "gradients"}),
        ({"offload": "parameters"}, "cuda", 8, 0, {"states"}),
        ({"offload": "optimizer", "offload_dir": "/nvme"}, "cuda", 0, 8, {"weights", "gradients"}),
        ({"offload": "all", "offload_dir": "/nvme"}, "cuda", 8, 8, set()),
        ({"offload": "all", "offload_dir": "/nvme"}, "cpu", 0, 8, {"weights", "gradients"}),
        ({"offload": "parameters", "offload_weights_dir": "/nvme"}, "cuda", 4, 4, {"states"}),
        ({"offload": "all", "offload_dir": "/n", "offload_weights_dir": "/nvme"}, "cuda", 4, 12, set()),
        ({"offload": "optimizer"}, "cpu", 0, 0, {"weights", "gradients", "states"}),
    ],
)
def test_what_is_offloaded_apart(layout: dict, device: str, host: int, disk: int, left: set[str]) -> None:
    """`host` and `disk` in bytes of a parameter, of which a rank has half."""
    params = num_parameters(shape()) // 2
    need = memory_of_rank(shape(), settings_of({"layout": layout}), 2, 64, 8, device)
    assert (need.host, need.disk) == (host * params, disk * params)
    plain = memory_of_rank(shape(), settings_of({}), 2, 64, 8, device)
    kinds = {"weights", "gradients", "states"}
    assert {*need.moments["update"]} & kinds == left
    # Of a small model, all that is elsewhere is one group, which an update brings to the device.
    brought = (
        0
        if layout["offload"] == "all" or left == kinds
        else sum(plain.moments["update"][name] for name in kinds - left)
    )
    assert need.moments["update"]["update"] == plain.moments["update"]["update"] + brought
    assert sum(need.moments["loss"].values()) < sum(plain.moments["loss"].values()) or left == kinds


def test_a_checkpoint_holds_weights_and_states() -> None:
    params = num_parameters(shape())
    assert checkpoint_bytes(shape(), settings_of({"layout": {"tensor": 2}})) == 12 * params
    assert checkpoint_bytes(shape(), settings_of({"optim": {"optimizer": "adafactor"}})) < 4.1 * params


LARGE = {"vocab_size": 8192, "tie_embeddings": False}
MODERN = {
    **{"activation": "relu2", "qk_norm": True, "value_embeddings": 1, "residual_mixing": True},
    **{"window_pattern": "S", "window": 16, "logit_softcap": 15.0},
}
GPT2 = {"norm": "layernorm", "positions": "learned", "max_positions": 96, "bias": True, "activation": "gelu_tanh"}
BERT = {"norm_position": "post", "num_token_types": 2, "head_transform": True}


def two_layers(**changes: Any) -> ModelShape:
    return shape(num_layers=2, **changes)


CASES: list[tuple[ModelShape, dict[str, Any], int, int]] = [
    (two_layers(), {}, 1, 8),
    (two_layers(), {"layout": {"data": "ddp"}}, 2, 8),
    (two_layers(), {"layout": {"data": "zero1"}}, 2, 8),
    (two_layers(), {"layout": {"data": "zero2"}}, 2, 8),
    (two_layers(), {"layout": {"data": "zero3"}}, 2, 8),
    (two_layers(), {"layout": {"data": "zero3", "replicate": 2}}, 4, 8),
    (two_layers(), {"train": {"precision": "bf16"}}, 1, 8),
    (two_layers(), {"layout": {"activation_checkpointing": "full"}}, 2, 8),
    (two_layers(), {"layout": {"activation_checkpointing": "selective"}}, 2, 8),
    (two_layers(), {"optim": {"optimizer": "muon"}}, 2, 2),
    (two_layers(), {"optim": {"optimizer": "adafactor"}}, 2, 2),
    (two_layers(), {"optim": {"optimizer": "lamb"}}, 2, 2),
    (two_layers(positions="relative"), {}, 2, 8),
    (two_layers(**GPT2), {}, 2, 8),
    (two_layers(**GPT2, **BERT), {"layout": {"data": "ddp"}, "train": {"objective": "mlm"}}, 2, 8),
    (two_layers(**LARGE), {}, 1, 8),
    (two_layers(**LARGE), {"layout": {"chunk_tokens": 64}}, 1, 8),
    (two_layers(), {"layout": {"tensor": 2}}, 2, 8),
    (two_layers(), {"layout": {"context": 2}}, 2, 8),
    (two_layers(), {"layout": {"context": 2, "context_by": "keys"}}, 2, 8),
    (two_layers(**MODERN), {"optim": {"optimizer": "normuon"}}, 2, 8),
    (two_layers(**MODERN), {"layout": {"activation_checkpointing": "full"}, "optim": {"optimizer": "adafactor"}}, 1, 8),
    (two_layers(), {"train": {"dropout": 0.1}}, 1, 8),
    (two_layers(), {"train": {"attention_dropout": 0.1}}, 1, 8),
    (two_layers(), {"optim": {"ema": 0.9}}, 2, 2),
]
"""Every setting that the estimate depends on, once, with two layers; the long tests have four."""
SLOW: list[tuple[ModelShape, dict[str, Any], int, int]] = [
    (shape(), {"layout": {"data": "ddp"}, "train": {"precision": "bf16"}}, 2, 8),
    (shape(), {"layout": {"data": "zero3"}}, 4, 8),
    (shape(), {"layout": {"data": "zero2", "micro_batch": 2}}, 2, 8),
    (shape(), {"train": {"precision": "bf16"}, "layout": {"micro_batch": 1}}, 2, 8),
    (shape(), {"train": {"precision": "bf16", "document_mask": False}}, 2, 8),
    (shape(), {"optim": {"optimizer": "muon"}}, 1, 1),
    (shape(activation="gelu", bias=True, qk_norm=True), {}, 2, 8),
    (shape(head_dim=64), {}, 2, 8),
    (shape(**LARGE), {"train": {"precision": "bf16"}}, 2, 8),
    (shape(), {"layout": {"tensor": 2}}, 4, 8),
]
"""Further shapes, sizes and pairs of settings."""


PIPELINES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "gpipe", "data": "zero2"},
    {"schedule": "interleaved"},
]
WIDTH = 64


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "raw", "world_size", "global_batch"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_estimate_is_the_measured_peak(
    model: ModelShape, raw: dict[str, Any], world_size: int, global_batch: int
) -> None:
    with fake_ranks(world_size) as ranks:
        measured = peak_of_two_steps(ranks, model, raw, global_batch)
    estimate = memory_of_rank(model, settings_of(raw), world_size, WIDTH, global_batch)
    assert estimate.peak == pytest.approx(measured, rel=0.1), estimate.moments


@pytest.mark.dist
@pytest.mark.parametrize("data", ["ddp", "zero3"])
def test_frozen_parameters_have_no_gradient_and_no_state(data: str) -> None:
    model, raw = two_layers(**LARGE), {"train": {"freeze": ["embedding", "head", "blocks.*.ffn"]}}
    raw |= {"layout": {"data": data}}
    trained = num_parameters(model) - 2 * 8192 * 128 - 2 * 3 * 128 * 352
    estimate, settings = memory_of_rank(model, settings_of(raw), 2, WIDTH, 8), settings_of(raw)
    shards = 1 if data == "ddp" else 2
    assert estimate.moments["update"]["gradients"] == 4 * trained // shards
    assert estimate.moments["update"]["states"] == 8 * trained // shards
    assert checkpoint_bytes(model, settings) == 4 * num_parameters(model) + 8 * trained
    with fake_ranks(2) as ranks:
        measured = peak_of_two_steps(ranks, model, raw, 8)
    whole = memory_of_rank(model, settings_of({"layout": {"data": data}}), 2, WIDTH, 8)
    # An upper bound: activations that only gradients of frozen weights need are counted.
    assert measured <= estimate.peak < whole.peak


@pytest.mark.dist
@pytest.mark.parametrize("layout", PIPELINES)
def test_the_estimate_is_the_measured_peak_of_a_pipeline(layout: dict[str, Any]) -> None:
    """On two real processes, since stages exchange messages before they start."""
    model, raw = shape(tie_embeddings=False), {"layout": {"pipeline": 2, "micro_batch": 2} | layout}
    measured = shared_pool().play(2, peak_of_two_steps, model, raw, 8)
    estimate = memory_of_rank(model, settings_of(raw), 2, WIDTH, 8)
    assert estimate.peak == pytest.approx(max(measured), rel=0.1), estimate.moments


@contextmanager
def fake_ranks(world_size: int) -> Iterator[Any]:
    """The first rank of a group whose collectives move no data."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from train.parallel.ranks import Ranks

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield Ranks(0, world_size, 1, torch.device("cpu"), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def peak_of_two_steps(ranks: Any, model: ModelShape, raw: dict[str, Any], global_batch: int) -> int:
    """Return the peak bytes of tensors on this rank, states and batch included."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from train.data.rows import Rows
    from train.optim.optimizer import make_optimizer, update
    from train.parallel.parallelize import SplitModel

    settings = settings_of(raw)
    split = SplitModel(model, settings, ranks, 2, [(WIDTH, global_batch)])
    split.set_initial_weights(0)
    optimizer = make_optimizer(split.parameters_to_update(), settings.optim)
    ids = torch.ones(len(split.rows_here(global_batch)), WIDTH, dtype=torch.int64)
    documents = torch.zeros_like(ids, dtype=torch.int32) if settings.train.document_mask else None
    keys_B = ids[:, 0].clone() if settings.train.drops else None
    whole = Rows(ids, ids.clone(), documents, ids[:, 0].clone(), keys_B=keys_B)
    rows = split.micro_batches(whole, global_batch)
    tracker = MemTracker()
    # Its hooks on modules, which sum up by module, know a single forward pass; the peak does not come from them.
    tracker._pre_fw_hook = tracker._post_fw_hook = tracker._pre_bw_hook = tracker._post_bw_hook = lambda *unused: None
    weights = [parameter for part in split.parts for parameter in part.parameters()]
    states = [tensor for member in optimizer.members for tensor in member.state.values()]
    batch = [tensor for part in rows for tensor in (part.inputs_BT, part.targets_BT)]
    tracker.track_external(*(getattr(t, "_local_tensor", t).detach() for t in (*weights, *states, *batch)))
    with tracker:
        for step in (1, 2):
            if split.compressor is not None:
                split.compressor.start(step)
            split.backward(rows, 1e-3)
            with split.updating():
                update(optimizer, 1e-3)
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
