"""Whole runs on a device: compilation, resumes and offloading; a CPU cannot show all of it.

The GPU cases are the small runs of the rehearsal. Two of them have a tiny form that a CPU runs among the slow tests.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_calls import make_run
from bench.train_gpu import Compilations, compilations, count_from_here
from schemas.storage import Store
from tests.support.tiny_runs import cut_back, deviations, metrics, notes, state_at
from train.parallel.ranks import open_ranks
from train.pretrain.loop import train

CUDA = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")]
on_cpu = [pytest.mark.slow, pytest.mark.skipif(CUDA, reason="the GPU plays the same run")]
DEVICES = [pytest.param(True, marks=on_gpu, id="cuda"), pytest.param(False, marks=on_cpu, id="cpu")]
CLOSE = 1e-3
"""Relative deviation of losses and norms: sums of attention's backward pass have no fixed order on a GPU."""


def run_of(folder: Path, cuda: bool, *overrides: str, **changes: Any) -> Path:
    """Return a run folder, trained to its end."""
    made = folder if folder.exists() else make_run(folder, cuda, changes)
    with open_ranks() as ranks:
        assert ranks.device.type == ("cuda" if cuda else "cpu")
        assert train(Store(str(made)), overrides, ranks) == 0
    return made


def compiled_in(folder: Path, cuda: bool, precision: str, steps: int) -> Compilations:
    """Return what is compiled in a run that measures the held-out loss every three steps."""
    count_from_here()
    settings = {"train": {"precision": precision, "steps": steps, "eval_every": 3, "eval_sequences": 5}}
    run_of(folder, cuda, "layout.compile=true", **settings)
    lines = metrics(folder)
    assert [line.step for line in lines if line.heldout_loss is not None] == list(range(3, steps + 1, 3))
    return compilations()


@pytest.mark.parametrize("cuda", DEVICES)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_nothing_is_compiled_twice(tmp_path: Path, cuda: bool, precision: str) -> None:
    """Other document positions, evaluations and their rows all use the graphs that the first step compiled."""
    # One graph of all layers, forward and backward, and two of the loss.
    assert compiled_in(tmp_path / "run", cuda, precision, 9) == Compilations(graphs=3, recompilations=0)


@pytest.mark.parametrize("cuda", DEVICES)
def test_a_run_resumes_from_its_checkpoint(tmp_path: Path, cuda: bool) -> None:
    settings = {"train": {"precision": "bf16", "steps": 8}, "checkpoint": {"every": 4, "keep": 9}}
    whole = run_of(tmp_path / "whole", cuda, "layout.compile=true", **settings)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    cut_back(resumed, 4)
    assert [note.step for note in notes(resumed)] == [4]
    run_of(resumed, cuda, "layout.compile=true")
    assert [note.step for note in notes(resumed)] == [4, 8]
    loss, norm = deviations(resumed, whole)
    assert loss < CLOSE
    assert norm < 10 * CLOSE


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_deterministic_run_resumes_with_the_same_bits(tmp_path: Path, precision: str) -> None:
    settings = {"train": {"precision": precision, "steps": 8}, "checkpoint": {"every": 4, "keep": 9}}
    overrides = ("layout.compile=true", "train.deterministic=true")
    whole = run_of(tmp_path / "whole", True, *overrides, **settings)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    cut_back(resumed, 4)
    run_of(resumed, True, *overrides)
    assert [note.step for note in notes(resumed)] == [4, 8]
    assert deviations(resumed, whole) == (0.0, 0.0)
    states = [state_at(folder, 8) for folder in (resumed, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_offloading_changes_memory_and_not_the_losses(tmp_path: Path) -> None:
    settings = {"train": {"precision": "bf16", "steps": 5}}
    here = run_of(tmp_path / "here", True, **settings)
    away = run_of(tmp_path / "away", True, "layout.offload=true", **settings)
    assert deviations(away, here)[0] < CLOSE
    largest = [max(line.memory or 0 for line in metrics(folder)) for folder in (away, here)]
    assert 0 < largest[0] < largest[1]
