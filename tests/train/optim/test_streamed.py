"""Offloaded optimizer states: the same bits as in memory, a small peak of memory, and files that leave nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schemas.errors import ConfigError
from tests.support.tiny_runs import assert_same_bits, copied, cut_back, make_run, state_at, trained
from train.config.layout import LayoutConfig
from train.config.settings import load_settings
from train.optim import streamed as module
from train.optim.optimizer import make_optimizer, set_step, state_tensors, update
from train.optim.streamed import StatePlace, StreamedRule, state_place, streamed

CPU = torch.device("cpu")
CAPTURED: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 300}


def parameters_of(seed: int, *sizes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return {
        f"blocks.{i}.up.{'bias' if len(size) == 1 else 'weight'}": nn.Parameter(torch.randn(size, generator=draw))
        for i, size in enumerate(sizes)
    }


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adafactor", "muon"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_updates_have_the_bits_of_updates_in_memory(
    optimizer: str, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAMED_NUMBERS", 100)
    sizes, place = ((8, 12), (5,), (16, 4), (3, 7), (0,)), StatePlace(CPU, folder=tmp_path if on_disk else None)
    config = load_settings({"optim": {"optimizer": optimizer, "learning_rate": 0.1}}, [], "test").optim
    both = [parameters_of(1, *sizes), parameters_of(1, *sizes)]
    plain = make_optimizer(both[0], config)
    away = make_optimizer(both[1], config, lambda members, make: streamed(place, members, make))
    assert any(len(rule.rules) > 1 for rule in away.rules if isinstance(rule, StreamedRule))
    set_step(plain, 0)
    set_step(away, 0)
    for step in range(4):
        for own in both:
            for number, parameter in enumerate(own.values()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + step)).cumsum(0)
        found_inf = torch.tensor(float(step == 2))
        for each in (plain, away):
            update(each, 0.1, grad_scale=torch.tensor(2.0), found_inf=found_inf)
    for one, other in zip(both[0].values(), both[1].values(), strict=True):
        assert torch.equal(one, other)
    states = state_tensors(away)
    assert {*states} == {*state_tensors(plain)}
    for name, value in state_tensors(plain).items():
        assert torch.equal(value, states[name]), name
    assert not [*tmp_path.iterdir()]  # the files have no names, so a killed process leaves none


PEAK = """
import sys
from pathlib import Path
import torch
from torch import nn
from train.config.settings import load_settings
from train.optim import streamed
from train.optim.optimizer import make_optimizer, set_step, state_tensors, update

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

streamed.STREAMED_NUMBERS = 1 << 20
torch.set_num_threads(1)
named = {f"blocks.{i}.up.weight": nn.Parameter(torch.full((1024, 1024), 0.1)) for i in range(24)}
gradients = {name: torch.full_like(parameter, 0.5) for name, parameter in named.items()}
place = streamed.StatePlace(torch.device("cpu"), folder=Path(sys.argv[1]) if sys.argv[1:] else None)
group = lambda members, make: streamed.streamed(place, members, make) if sys.argv[1:] else make(members)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS")
optimizer = make_optimizer(named, load_settings({}, [], "test").optim, group)
set_step(optimizer, 0)
for _ in range(3):
    update(optimizer, 0.1, gradients)
peak = memory("VmHWM") - before
print(peak, sum(value.nbytes for value in state_tensors(optimizer).values()), named["blocks.3.up.weight"][0, 0].item())
"""
"""A program that prints the most memory of three updates, above that before the states exist; the bytes of the states;
and a weight. Its argument is the folder of the states."""


def test_states_on_a_disk_are_not_in_memory(tmp_path: Path) -> None:
    """192 MiB of states: on a disk, those of a group of 8 MiB are in memory at once."""
    (here, states, weight), (away, on_disk, same) = (
        map(float, subprocess.run([sys.executable, "-c", PEAK, *words], **CAPTURED).stdout.split())
        for words in ((), (str(tmp_path),))
    )
    assert (states, weight) == (on_disk, same)
    assert states == 24 * 8 << 20
    print(f"states {states / 2**20:.0f} MiB; peak in memory {here / 2**20:.0f}, on a disk {away / 2**20:.0f} MiB")
    assert here > 0.9 * states
    assert away < 0.25 * states


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    place = StatePlace(CPU, folder=tmp_path / "file" / "folder")
    config = load_settings({}, [], "test").optim
    with pytest.raises(ConfigError, match=r"layout\.offload_dir: expected a folder with space for .* more bytes"):
        make_optimizer(parameters_of(1, (4, 4)), config, lambda members, make: streamed(place, members, make))


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ({}, None),
        ({"offload": True}, None),
        ({"offload": "all"}, None),
        ({"offload": "all", "offload_dir": "/nvme"}, StatePlace(CPU, folder=Path("/nvme"))),
        ({"offload": "optimizer", "data": "ddp"}, StatePlace(torch.device("cuda:1"))),
        ({"offload": "parameters"}, StatePlace(torch.device("cuda:1"), on_device=True)),
        ({"offload": False}, None),
    ],
)
def test_settings_choose_the_place(layout: dict, place: StatePlace | None) -> None:
    settings = LayoutConfig.model_validate(layout)
    assert state_place(settings, torch.device("cuda:1")) == place
    assert settings.offload in ("none", "parameters", "optimizer", "all")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"offload": "parameters", "data": "ddp"}, "offload = parameters requires data = zero2 or zero3, got ddp"),
        ({"offload": True, "data": "zero1"}, "offload = all requires data = zero2 or zero3, got zero1"),
        ({"offload_dir": "/nvme"}, "offload_dir requires offload = optimizer or all, got none"),
        ({"offload": "parameters", "offload_dir": "/nvme"}, "offload_dir requires offload = optimizer or all"),
        ({"offload": "optimizer", "offload_weights_dir": "/n"}, "offload_weights_dir requires offload = parameters or"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(layout: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({"layout": layout}, [], "test")


WEIGHTS = """
import sys
from pathlib import Path
import torch
from train.config.settings import Settings
from train.data.rows import Rows
from train.model.shape import ModelShape
from train.parallel.parallelize import SplitModel
from train.parallel.ranks import open_ranks

def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

torch.set_num_threads(1)
folder = {"offload_weights_dir": sys.argv[1]} if sys.argv[1:] else {}
settings = Settings.model_validate({"layout": {"offload": "parameters", "micro_batch": 1} | folder})
shape = ModelShape(
    vocab_size=512, num_layers=16, d_model=512, num_heads=8, num_kv_heads=8, head_dim=64, d_ffw=1536,
    tie_embeddings=True
)
ids = torch.ones(1, 64, dtype=torch.int64)
rows = Rows(ids, ids.clone(), None, torch.zeros(1, dtype=torch.int64))
with open_ranks() as ranks:
    before = memory()
    model = SplitModel(shape, settings, ranks, 1, [(64, 1)])
    model.set_initial_weights(0)
    model.measure(model.part_of(rows), 1)
    model.release()
    loss = model.measure(model.part_of(rows), 1).losses_S.item()
    print(memory() - before, sum(value.nbytes for value in model.parameters.values()), loss)
"""
"""A program that prints the memory, above that before the model exists, after two forward passes; the bytes of the
weights; and the loss. Pages of files do not count: the operating system takes them back when it needs memory."""


@pytest.mark.dist
def test_weights_on_a_disk_are_not_in_memory(tmp_path: Path) -> None:
    # So that malloc gives the gathered weights of each layer back to the operating system.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    (here, weights, loss), (away, on_disk, same) = (
        map(float, subprocess.run([sys.executable, "-c", WEIGHTS, *words], env=env, **CAPTURED).stdout.split())
        for words in ((), (str(tmp_path),))
    )
    assert (weights, loss) == (on_disk, same)
    print(f"weights {weights / 2**20:.0f} MiB; in memory {here / 2**20:.0f}, on a disk {away / 2**20:.0f} MiB")
    assert here > 0.9 * weights
    assert away < 0.1 * weights
    assert not [*tmp_path.iterdir()]


@pytest.mark.dist
def test_a_run_with_states_on_a_disk_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Two ranks, in modes that change over the run: the weights are those of a run that offloads nothing."""
    settings = {"checkpoint": {"every": 3, "mode": "sync"}, "train": {"steps": 6}}
    plain = trained(make_run(tmp_path / "plain", settings), 2)
    run = make_run(tmp_path / "run", settings)
    trained(run, 2, "layout.offload=optimizer", f"layout.offload_dir={tmp_path / 'nvme'}")
    assert_same_bits(run, plain)
    trained(cut_back(run, 3), 2, "layout.offload=all")  # the host computes updates, with states in the folder
    assert_same_bits(run, plain)
    trained(cut_back(run, 3), 2, f"layout.offload_weights_dir={tmp_path / 'nvme'}")
    assert_same_bits(run, plain)
    assert not [*(tmp_path / "nvme").iterdir()]
    other = trained(cut_back(copied(plain, tmp_path / "other"), 3), 2, "layout.offload=parameters")
    assert_same_bits(other, plain)
    assert {name.partition(".")[0] for name in state_at(run, 6)} == {"model", "exp_avg", "exp_avg_sq"}
