"""Tests of train/plan/layouts.py: what a device makes of settings that are not fixed, in a plan and at start."""

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import Settings, load_settings
from train.model import attention as documents
from train.model.shape import ModelShape
from train.parallel.devices import RunDevices, peak_of_devices, unknown_peak
from train.parallel.memory import memory_of_rank
from train.parallel.ranks import open_ranks
from train.plan.layouts import resolve_plan
from train.plan.make_plan import make_plan
from train.plan.plan import MIN_BLOCKS_HEAD, Plan, check_document_mask
from train.pretrain.setup import devices_of

H100 = RunDevices("cuda", (9, 0), "NVIDIA H100 80GB HBM3")
A100 = RunDevices("cuda", (8, 0), "NVIDIA A100-SXM4-80GB")
V100 = RunDevices("cuda", (7, 0), "Tesla V100-SXM2-16GB")
GEFORCE = RunDevices("cuda", (8, 9), "NVIDIA GeForce RTX 4090")
CPU = RunDevices("cpu")
HEADS = ModelShape(
    vocab_size=512, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ffw=96, tie_embeddings=False
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("placed")
    make_tiny_dataset(folder)
    return Store(str(folder))


def planned(tiny: Store, **sections: dict[str, Any]) -> Plan:
    return make_plan(tiny, open_dataset(tiny), settings(**sections))


def settings(**sections: dict[str, Any]) -> Settings:
    given = {"train": {"seq_len": 64, "global_batch": 32}} | sections
    return load_settings(given, [], "test")


@pytest.mark.parametrize(
    ("kind", "capability", "precision", "compiled", "muon"),
    [
        ("cpu", None, "fp32", False, "fp32"),
        ("cuda", None, "bf16", True, "bf16"),
        ("cuda", (10, 0), "bf16", True, "bf16"),
        ("cuda", (8, 0), "bf16", True, "bf16"),
        ("cuda", (7, 5), "fp16", True, "bf16"),
        ("cuda", (7, 0), "fp16", True, "bf16"),
        ("cuda", (6, 1), "fp32", True, "bf16"),
    ],
)
def test_automatic_settings_go_by_the_device(
    kind: str, capability: tuple[int, int] | None, precision: str, compiled: bool, muon: str
) -> None:
    found = settings(optim={"optimizer": "muon"}).for_device(kind, capability)
    assert (found.train.precision, found.layout.compile, found.layout.micro_batch) == (precision, compiled, 8)
    assert found.optim.muon_precision == muon
    assert found.for_device("cpu") == found.for_device("cuda") == found
    # What a plan keeps of it is what was chosen.
    assert load_settings(found.to_json(), [], "test") == found
    assert found.content()["train.precision"] == precision


def test_what_is_set_is_kept_and_what_is_automatic_survives_a_file() -> None:
    given = settings(
        train={"precision": "fp16"},
        layout={"compile": False, "micro_batch": 3},
        optim={"optimizer": "muon", "muon_precision": "fp32"},
    )
    assert given.for_device("cuda") == given
    auto = settings(train={"precision": "auto"}, layout={"compile": "auto"})
    again = load_settings(auto.to_json(), [], "test")
    assert again == auto
    assert (again.train.precision, again.layout.compile, again.layout.micro_batch) == ("auto", "auto", None)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_a_split_backward_pass_is_not_compiled(schedule: str) -> None:
    layout = settings(layout={"pipeline": 2, "data": "zero2", "schedule": schedule}).for_device("cuda").layout
    assert layout.compile is False


def test_the_precision_of_an_optimiser_that_is_not_used_is_no_content() -> None:
    """Checkpoints of AdamW have one identity on every device."""
    assert settings().content()["optim.muon_precision"] == "fp32"
    assert settings().for_device("cuda").content()["optim.muon_precision"] == "fp32"
    assert settings().for_device("cuda").to_json().get("optim", {}) == {}


def test_a_number_of_rows_that_is_not_chosen_is_not_computed_with() -> None:
    with pytest.raises(ValueError, match=r"layout.micro_batch: expected a number of rows, got None"):
        _ = settings().layout.rows_at_once


def test_memory_goes_by_the_device() -> None:
    explicit = settings(train={"precision": "bf16"}, layout={"compile": True, "micro_batch": 8})
    assert memory_of_rank(HEADS, settings(), 1, 64, 32, "cuda") == memory_of_rank(HEADS, explicit, 1, 64, 32, "cuda")
    plain = settings(train={"precision": "fp32"}, layout={"compile": False, "micro_batch": 8})
    assert memory_of_rank(HEADS, settings(), 1, 64, 32) == memory_of_rank(HEADS, plain, 1, 64, 32)


# ------------------------------------------------------------------------------------------------- where a run starts


@pytest.mark.parametrize("here", [H100, A100], ids=lambda here: here.name)
def test_a_device_of_the_table_has_its_micro_batch_searched_for(tiny: Store, here: RunDevices) -> None:
    plan, lines = resolve_plan(planned(tiny), here)
    chosen = plan.settings
    assert (chosen.train.precision, chosen.layout.compile) == ("bf16", True)
    assert chosen.layout.micro_batch == 32  # all rows of a model that is so small
    assert chosen.layout.data == "zero3"  # axes are not searched for
    assert lines == []
    assert resolve_plan(plan, here) == (plan, [])


def test_memory_bounds_what_is_searched_for(tiny: Store) -> None:
    """With hardly any room the same model gets fewer rows at once, or computes layers again."""
    whole = memory_of_rank(planned(tiny).shape, settings(layout={"micro_batch": 32}), 1, 64, 32, "cuda").peak
    less = settings(plan={"device_memory": round(0.9 * whole)})
    plan = planned(tiny).model_copy(update={"settings": less})
    layout = resolve_plan(plan, H100)[0].settings.layout
    assert (layout.micro_batch or 0) < 32 or layout.activation_checkpointing != "none"


def test_what_a_recipe_fixes_is_kept(tiny: Store) -> None:
    fixed = {"micro_batch": 4, "compile": False, "activation_checkpointing": "full"}
    plan, _ = resolve_plan(
        planned(tiny, layout=fixed, train={"seq_len": 64, "global_batch": 32, "precision": "fp16"}), H100
    )
    layout = plan.settings.layout
    assert (layout.micro_batch, layout.compile, layout.activation_checkpointing) == (4, False, "full")
    assert plan.settings.train.precision == "fp16"


def test_several_ranks_share_a_batch(tiny: Store) -> None:
    eight = RunDevices("cuda", (9, 0), "NVIDIA H100 80GB HBM3", 8, 8)
    assert resolve_plan(planned(tiny), eight)[0].settings.layout.micro_batch == 4
    pipeline = {"pipeline": 2, "schedule": "1f1b"}
    found = resolve_plan(planned(tiny, layout=pipeline), RunDevices("cuda", (9, 0), "NVIDIA H200", 2, 2))[
        0
    ].settings.layout
    assert (found.pipeline, found.schedule) == (2, "1f1b")
    assert found.rows_at_once <= 16  # a micro-batch for each stage


def test_an_unknown_device_has_plain_defaults_and_says_so(tiny: Store) -> None:
    plan, (defaults,) = resolve_plan(planned(tiny), GEFORCE)
    assert (plan.settings.train.precision, plan.settings.layout.compile) == ("bf16", True)
    assert plan.settings.layout.micro_batch == 8
    assert defaults.startswith("NVIDIA GeForce RTX 4090: expected a device with a known profile")
    assert "`penstock calibrate FILE.json`" in defaults
    (mfu,) = unknown_peak(plan.settings, GEFORCE)
    assert mfu.startswith("MFU is not shown: the peak of NVIDIA GeForce RTX 4090 is not known.")
    older, _ = resolve_plan(planned(tiny), V100)
    assert older.settings.train.precision == "fp16"


def test_a_cpu_computes_in_fp32_without_compilation(tiny: Store) -> None:
    plan, lines = resolve_plan(planned(tiny), CPU)
    found = plan.settings
    assert (found.train.precision, found.layout.compile, found.layout.micro_batch) == ("fp32", False, 8)
    assert (lines, unknown_peak(found, CPU)) == ([], [])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_an_mfu_is_a_share_of_the_bf16_peak_in_every_precision(precision: str) -> None:
    chosen = settings(train={"precision": precision})
    assert peak_of_devices(chosen, H100) == 989.4e12
    assert peak_of_devices(chosen, A100) == 312e12
    assert peak_of_devices(chosen, GEFORCE) is None
    assert peak_of_devices(settings(train={"precision": precision, "peak_flops": 2e12}), H100) == 2e12
    # The plan's device is the better witness, unless the run started on another kind of device.
    named = settings(train={"precision": precision}, cluster={"device": "a100-40gb"})
    assert peak_of_devices(named, H100) == 312e12
    assert peak_of_devices(named, CPU) is None


def test_documents_in_fp32_are_refused_on_a_gpu(tiny: Store) -> None:
    assert MIN_BLOCKS_HEAD == documents.MIN_FLEX_HEAD
    single = {"precision": "fp32"}
    with pytest.raises(ConfigError, match=r"expected a 16-bit dtype .* got fp32\. Set train\.precision"):
        check_document_mask(HEADS, settings(train=single), "cuda")
    given = {"seq_len": 64, "global_batch": 32, "precision": "fp32"}
    heads = {"num_layers": 2, "d_model": 64, "num_heads": 4}
    with pytest.raises(ConfigError, match="expected a 16-bit dtype"):
        resolve_plan(planned(tiny, train=given, plan=heads), H100)
    check_document_mask(HEADS, settings(train=single), "cpu")
    check_document_mask(HEADS, settings(), "cuda")
    check_document_mask(HEADS, settings(train=single | {"document_mask": False}), "cuda")
    check_document_mask(HEADS, settings(train=single, layout={"context": 2, "context_by": "keys"}), "cuda")
    check_document_mask(HEADS.model_copy(update={"positions": "relative"}), settings(train=single), "cuda")
    check_document_mask(HEADS.model_copy(update={"head_dim": 8}), settings(train=single), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_gpu_is_known_by_its_name_and_capability(tiny: Store) -> None:
    with open_ranks() as ranks:
        here = devices_of(ranks)
    assert (here.kind, here.name) == ("cuda", torch.cuda.get_device_name())
    found = resolve_plan(planned(tiny), here)[0].settings
    assert found == found.for_device("cpu")
    assert found.train.precision == ("bf16" if torch.cuda.get_device_capability() >= (8, 0) else found.train.precision)
