"""Two launches with `--nnodes 2` and a run folder each, as two machines with copies of a run on their own disks."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.cli import main as penstock
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import flip_byte
from tests.support.tiny_runs import make_run

pytestmark = pytest.mark.dist


def shards(copy: Path) -> Iterator[str]:
    """The shards of training of a run."""
    dataset = open_dataset(Store(str(copy)))
    for stream, numbers in dataset.streams.items():
        if stream.endswith("/train"):
            yield from (dataset.folder.path(shard.path) for shard in numbers)


def train(folders: tuple[Path, Path], printed: Path) -> tuple[list[int], list[str]]:
    """Train with two machines that have a folder each; return their exit codes, and what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for number, folder in enumerate(folders):
        place = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
        place += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        words = [sys.executable, "-m", "train.launch", *place, "-m", "train.pretrain", str(folder)]
        with (printed / f"printed-{number}").open("w") as output:
            processes.append(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return codes, [(printed / f"printed-{number}").read_text() for number in range(2)]


@pytest.mark.parametrize(
    ("settings", "damage", "found"),
    [
        ({}, shards, "expected SHA-256"),
        (
            {"train": {"packing": "best_fit"}, "layout": {"data": "ddp"}},
            lambda copy: map(str, copy.glob("train/packing/*/*.chunks.arrow")),
            "expected SHA-256",
        ),
    ],
    ids=["shards", "packed rows"],
)
def test_the_machine_with_the_damaged_copy_says_so(tmp_path: Path, settings, damage, found: str) -> None:
    """Machine 1 has a changed bit in each file of its copy, which the check before training reads there."""
    run, copy = make_run(tmp_path / "run", {"source": {"paths": ["x"]}} | settings), tmp_path / "copy"
    assert penstock(["plan", str(run)]) == 0
    shutil.copytree(run, copy)
    for path in damage(copy):
        flip_byte(path)
    codes, (sound, damaged) = train((run, copy), tmp_path)
    assert 0 not in codes
    sentences = [line for line in damaged.splitlines() if found in line]
    assert {str(copy) in line for line in sentences} == {True}
    assert "penstock repair" in damaged
    assert "Traceback" not in damaged
    assert found not in sound
