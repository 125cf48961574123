"""The device of a rank, errors before any rank starts, and the configuration of the GPU allocator."""

import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from schemas.errors import ConfigError
from tests.support.rank_pool import shared_pool
from tests.support.tiny_runs import make_run
from train.calibrate.measure import calibrate
from train.parallel.ranks import (
    ALLOCATOR_SETTINGS,
    FirstRankFailed,
    backend_of,
    device_of,
    machine_placement,
    open_ranks,
    use_expandable_segments,
    use_fixed_order,
)
from train.pretrain.__main__ import main


@pytest.mark.parametrize(
    ("cuda", "num_devices", "local_rank", "local_size", "expected"),
    [
        (False, 0, 0, 1, "cpu"),
        (False, 0, 3, 4, "cpu"),
        (False, 8, 0, 1, "cpu"),
        (True, 1, 0, 1, "cuda:0"),
        (True, 8, 0, 1, "cuda:0"),
        (True, 8, 7, 8, "cuda:7"),
        (True, 8, 1, 4, "cuda:1"),
    ],
)
def test_each_rank_has_a_gpu_or_all_are_on_cpus(
    cuda: bool, num_devices: int, local_rank: int, local_size: int, expected: str
) -> None:
    device = device_of(cuda, num_devices, local_rank, local_size)
    assert device == torch.device(expected)
    assert backend_of(device) == ("gloo" if expected == "cpu" else "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("local_rank", [0, 1, 2])
def test_more_ranks_than_gpus_are_refused(local_rank: int) -> None:
    with pytest.raises(ConfigError) as refused:
        device_of(True, 2, local_rank, 3)
    assert str(refused.value) == (
        "ranks: expected at most 2 rank(s) on this machine, one for each GPU, got 3. Start fewer (`penstock train "
        '--ranks 2`), or set CUDA_VISIBLE_DEVICES="" to train on CPUs.'
    )


def with_gpus(number: int) -> Any:
    """Torch reports so many GPUs; none of them is touched, since the refusal comes first."""
    return mock.patch.multiple(
        "torch.cuda", is_available=mock.Mock(return_value=True), device_count=mock.Mock(return_value=number)
    )


NO_GPU = "expected at most 0 rank(s) on this machine, one for each GPU, got 1"


def test_the_command_refuses_with_one_sentence_and_changes_nothing(tmp_path: Any, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    with with_gpus(0), mock.patch.object(dist, "is_nccl_available", return_value=True):
        assert main(["--run", str(run), "--set", "train.steps=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"penstock: ranks: {NO_GPU}")
    assert error.count("\n") == 1
    assert not dist.is_initialized()
    assert not (run / "train").exists()


def test_calibrate_refuses_before_a_rank_starts(tmp_path: Any) -> None:
    with with_gpus(1), pytest.raises(ConfigError, match=r"at most 1 rank\(s\) on this machine.*got 2"):
        calibrate(tmp_path / "here.json", ranks=2)
    assert not (tmp_path / "here.json").exists()


def refused_on(ranks: Any) -> tuple[str, str]:
    """The error of this rank where the two of a machine have one GPU."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    with pytest.MonkeyPatch.context() as patch, with_gpus(1):
        for name, value in zip(names, (ranks.rank, 2), strict=True):
            patch.setenv(name, str(value))
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(dist, "is_torchelastic_launched", lambda: True)
        patch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), ranks.rank, 2)]))
        patch.setattr("train.parallel.ranks.agreed_start", lambda *unused: "start")
        try:
            with open_ranks():
                return "none", ""
        except (ConfigError, FirstRankFailed) as error:
            return type(error).__name__, str(error)


@pytest.mark.dist
def test_the_first_rank_of_a_machine_reports_for_all() -> None:
    actual = shared_pool().play(2, refused_on)
    assert [name for name, _ in actual] == ["ConfigError", "FirstRankFailed"]
    assert actual[0][1] == actual[1][1]
    assert "at most 1 rank(s) on this machine, one for each GPU, got 2" in actual[0][1]


def test_the_place_is_that_of_torchrun_and_not_of_the_hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight containers of one name have a GPU each; without torchrun's variables, ranks are grouped by hostname."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert machine_placement(dist.HashStore(), 5, 8) == (0, 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    store = dist.HashStore()
    for rank, host in enumerate(("one", "two", "one", "two", "two")):
        store.set(f"host/{rank}", host)
    monkeypatch.setattr("socket.gethostname", lambda: "two")
    assert machine_placement(store, 4, 5) == (2, 3)
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    assert machine_placement(store, 0, 5) == (0, 2)


# ----------------------------------------------------------------------------------------------- the allocator of CUDA

GIVEN_AND_EXPECTED = [
    ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
]
"""Settings of the CUDA allocator in the environment, and those after the ranks have opened."""
CHILD = """
import json, os, sys
import torch
from train.parallel.ranks import open_ranks
names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
for given in json.loads(sys.argv[1]):
    if os.fork():  # torch is imported once
        os.wait()
        continue
    os.environ.update(given)
    with open_ranks():
        after = {name: os.environ[name] for name in names if name in os.environ}
        print(json.dumps([after, torch.cuda.is_initialized()]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def allocator_settings() -> list[list[object]]:
    """Return for each of GIVEN_AND_EXPECTED the settings after the ranks have opened, and if CUDA has started."""
    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_SETTINGS}
    command = [sys.executable, "-c", CHILD, json.dumps([given for given, _ in GIVEN_AND_EXPECTED])]
    actual = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in actual.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(GIVEN_AND_EXPECTED)))
def test_ranks_set_expandable_segments_before_cuda_starts(allocator_settings: list[list[object]], number: int) -> None:
    assert allocator_settings[number] == [GIVEN_AND_EXPECTED[number][1], False]


PROBE = """
import os, torch
os.environ["PYTORCH_ALLOC_CONF"] = "no_such_setting:True"
try:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA, and reads no such variable")
def test_torch_reads_the_variable_after_its_import() -> None:
    """A setting that does not exist is refused, so the variable was read although torch had been imported before."""
    actual = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True)
    assert "no_such_setting" in actual.stdout


def test_what_the_user_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "backend:cudaMallocAsync")
    use_expandable_segments()
    assert {os.environ[name] for name in ALLOCATOR_SETTINGS} == {"backend:cudaMallocAsync"}


def test_a_fixed_order_of_sums_is_set_and_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        use_fixed_order(False)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        use_fixed_order(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        use_fixed_order(False)
    assert not torch.are_deterministic_algorithms_enabled()
