"""Pains of training numerics: losses that depend on the layout, corrupt exports, racing saves and invented MFU."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from schemas.storage import Store
from tests.support.model_oracle import TINY, small_model, some_ids
from tests.support.tiny_runs import assert_equal_up_to_rounding, make_run, metrics, trained
from tests.train.checkpoint.test_state import note, ranks_of_world, same_bits, tensors
from train.checkpoint.save import Saved, Saver
from train.checkpoint.state import read_state
from train.config.settings import load_settings
from train.config.train import CheckpointConfig
from train.model.shape import flops_per_token
from train.monitor.metrics import flops_utilisation
from train.parallel.devices import RunDevices, device_of, peak_of_devices, unknown_peak
from train.plan.plan import read_plan

RECIPE = {
    "train": {"steps": 6, "eval_every": 0, "eval_sequences": 4, "peak_flops": 1e12},
    "optim": {"warmup_steps": 6},
    "checkpoint": {"every": 0},
}
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "tensor": (2, ("layout.tensor=2",)),
    "tensor and context": (4, ("layout.tensor=2", "layout.context=2")),
    "pipeline": (2, ("layout.pipeline=2", "layout.micro_batch=2")),
}


@pytest.fixture(scope="module")
def run_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a layout to a run that was trained in it."""

    def make(name: str) -> Path:
        ranks, overrides = LAYOUTS[name]
        return trained(make_run(tmp_path_factory.mktemp("run") / "run", RECIPE), ranks, *overrides)

    return cache(make)


@pytest.mark.dist
def test_the_loss_does_not_depend_on_tensor_parallelism(run_in: Callable[[str], Path]) -> None:
    """torchtitan: with the same seed and settings, loss and gradient norm differed between degrees of tensor
    parallelism.

    https://github.com/pytorch/torchtitan/issues/1750

    Two tensor-parallel ranks have the losses of one rank within 1e-6 and its gradient norms within 1e-5.
    """
    assert_equal_up_to_rounding(run_in("tensor"), run_in("one"))


@pytest.mark.dist
@pytest.mark.slow
def test_two_kinds_of_parallelism_do_not_halve_the_loss(run_in: Callable[[str], Path]) -> None:
    """torchtitan: with tensor and context parallelism together, the reported loss was about half of the loss with one
    of them.

    https://github.com/pytorch/torchtitan/issues/3280

    Four ranks with both report the loss of one rank, for the whole batch and for each source.
    """
    assert_equal_up_to_rounding(run_in("tensor and context"), run_in("one"))
    for line, other in zip(metrics(run_in("tensor and context")), metrics(run_in("one")), strict=True):
        assert line.source_tokens == other.source_tokens
        assert line.losses == pytest.approx(other.losses, rel=1e-6)


@pytest.mark.dist
def test_flops_are_those_of_the_whole_model_in_a_pipeline(run_in: Callable[[str], Path]) -> None:
    """OLMo-core: under pipeline parallelism a rank knew its own layers only, so FLOPs per token were None.

    https://github.com/allenai/OLMo-core/pull/680

    The FLOPs are those of the plan's shape: a pipeline of two ranks reports an MFU with those of all layers.
    """
    for name, ranks in (("one", 1), ("pipeline", 2)):
        plan = read_plan(Store(str(run_in(name))))
        whole = flops_per_token(plan.shape, plan.seq_len)
        assert plan.flops_per_token == whole
        assert len({line.mfu for line in metrics(run_in(name))}) > 1
        for line in metrics(run_in(name)):
            positions = plan.global_batch * plan.seq_len / line.step_seconds
            assert line.mfu == pytest.approx(whole * positions / (ranks * 1e12))


def test_an_unknown_gpu_has_no_mfu() -> None:
    """torchtitan: a GPU that was not in the table had the peak of an A100, and an MFU of 152 %.

    https://github.com/pytorch/torchtitan/pull/4779

    An unknown device has no MFU, and a line says how to give its peak.
    """
    settings = load_settings({"train": {"precision": "bf16"}}, [], "test")
    unknown = RunDevices(kind="cuda", capability=(9, 5), name="AMD Instinct MI350X")
    assert peak_of_devices(settings, unknown) is None
    assert flops_utilisation(1e6, 1e9, 8, None) is None
    assert "the peak of AMD Instinct MI350X is not known. Set train.peak_flops" in unknown_peak(settings, unknown)[0]
    given = load_settings({"train": {"precision": "bf16", "peak_flops": 2.3e15}}, [], "test")
    assert peak_of_devices(given, unknown) == 2.3e15


def test_the_peak_of_an_a100_is_the_dense_one() -> None:
    """OLMo-core: the dense peak of an A100 was halved again, as if it counted sparsity, so its MFU was twice too high.

    https://github.com/allenai/OLMo-core/pull/614

    The peak is 312 TFLOP/s, the dense rate of bf16: 156 TFLOP/s of model FLOPs are an MFU of one half.
    """
    device = device_of("a100-80gb")
    assert device.peak_flops["bf16"] == 312e12
    assert flops_utilisation(156e12 / 1e9, 1e9, 1, device.utilisation_peak("bf16")) == pytest.approx(0.5)


def test_mfu_refers_to_the_format_of_the_products() -> None:
    """torchtitan: MFU was divided by the TF32 peak, although the products were in bf16, which is twice as fast.

    https://github.com/pytorch/torchtitan/issues/668

    On a GPU the denominator is the dense bf16 peak in every precision.
    """
    for name, tf32 in (("a100-80gb", 156e12), ("h100-sxm", 494.7e12)):
        device = device_of(name)
        for precision in device.peak_flops:
            peak = device.utilisation_peak(precision)
            assert peak == device.peak_flops["bf16"]
            assert peak == pytest.approx(2 * tf32, rel=1e-3)


def test_tied_weights_are_exported_once_and_read_back(tmp_path: Path) -> None:
    """torchtitan: in a model with tied embeddings, the export wrote an empty file for the head, which no reader of
    safetensors opened.

    https://github.com/pytorch/torchtitan/pull/3764

    In a folder of several files, every file opens, the tied matrix is in one of them, and the logits are equal.
    """
    safetensors = pytest.importorskip("safetensors")
    from train.export.llama import export_llama, import_llama

    shape = TINY.model_copy(update={"tie_embeddings": True})
    model = small_model(shape)
    export_llama(dict(model.named_parameters()), shape, 64, None, tmp_path / "llama", max_shard_bytes=20_000)
    files, names = sorted((tmp_path / "llama").glob("*.safetensors")), []
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            stored = list(opened.keys())
            assert all(opened.get_tensor(name).numel() for name in stored)
            names += stored
    assert len(files) > 1
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    read_shape, state = import_llama(tmp_path / "llama")
    assert read_shape.tie_embeddings
    again = small_model(shape, seed=1)
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again(some_ids()), model(some_ids()))


def test_a_background_save_does_not_see_the_next_step(tmp_path: Path) -> None:
    """PyTorch: an asynchronous checkpoint of parameters on CPUs held the values of the next update, if that came before
    the files were written.

    https://github.com/pytorch/pytorch/issues/144657

    Weights that change directly after the call, while the files are written, are not in the checkpoint.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver(Store(str(tmp_path)), CheckpointConfig(mode="async"), ranks_of_world())
    try:
        state = tensors()
        assert saver.save(note(1), state) == []
        for value in state.values():
            value.zero_()
        (outcome,) = saver.finish()
        assert isinstance(outcome, Saved)
        read = tensors(9)
        read_state(Store(str(tmp_path)), outcome.checkpoint, read)
        assert same_bits(read, tensors())
    finally:
        saver.close()
        dist.destroy_process_group()
