"""Two launches with `--nnodes 2` and a run folder each, as two machines with copies of a run on their own disks."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import flip_byte
from tests.support.tiny_runs import make_run

pytestmark = pytest.mark.dist


def test_the_machine_with_the_damaged_copy_says_so(tmp_path: Path) -> None:
    """Machine 1 has a changed bit in each shard; the check before training reads only the copy of machine 0."""
    run, copy = make_run(tmp_path / "run"), tmp_path / "copy"
    shutil.copytree(run, copy)
    dataset = open_dataset(Store(str(copy)))
    for stream, numbers in dataset.streams.items():
        for shard in numbers:
            if stream.endswith("/train"):
                flip_byte(dataset.folder.path(shard.path), -1500)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for number, folder in enumerate((run, copy)):
        place = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
        place += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        words = [sys.executable, "-m", "train.launch", *place, "-m", "train.pretrain", str(folder)]
        with (tmp_path / f"printed-{number}").open("w") as printed:
            processes.append(subprocess.Popen(words, stdout=printed, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    sound, damaged = ((tmp_path / f"printed-{number}").read_text() for number in range(2))
    assert 0 not in codes
    (sentence,) = [line for line in damaged.splitlines() if "expected checksum" in line]
    assert sentence.startswith(f"penstock: {copy}/tokens/")
    assert sentence.endswith(f"Run `penstock repair {copy}`, which builds damaged files again.")
    assert "Traceback" not in damaged
    assert "checksum" not in sound
