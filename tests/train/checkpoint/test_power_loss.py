"""Power loss during training: at every moment a checkpoint is on the disk with its files and metrics, or not there."""

import json
import os
import random
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.power_loss import KINDS, Recording, durable, record_script, recorded, write_state
from tests.support.tiny_runs import assert_same_bits, make_run, trained

pytestmark = pytest.mark.dist
SEED = 20
STATES = int(os.environ.get("POWER_LOSSES", "6"))
"""Number of states that a training is resumed from."""
METADATA = re.compile(r"(?P<folder>train/checkpoints/step-\d+)/checkpoint\.json")
SETTINGS = {"train": {"steps": 12, "eval_every": 5}, "checkpoint": {"every": 3}, "layout": {"data": "ddp"}}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A training of one rank that was recorded, the making of its run folder included."""
    folder = tmp_path_factory.mktemp("power")
    run = folder / "run"
    recording = Recording(run, folder / "record")
    make_run(folder / "made", SETTINGS)
    copied = "import os, sys; from pathlib import Path; from schemas.storage import Store\n"
    copied += "made, run = Path(sys.argv[1]), Store(sys.argv[2])\n"
    copied += "for path in made.rglob('*'):\n    if path.is_file():\n"
    copied += "        run.write_atomic(path.relative_to(made).as_posix(), path.read_bytes())\n"
    environment = recorded(run, recording.to)
    run.mkdir()
    core = min(os.sched_getaffinity(0))
    for words in (["-c", copied, str(folder / "made"), str(run)], ["-m", "train.pretrain", str(run)]):
        subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            check=True,
            timeout=600,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # one thread, as in the pool of ranks
        )
    return recording


def test_what_a_durable_checkpoint_needs_is_durable(training: Recording) -> None:
    steps = set()
    for number, (kind, *_), root in training.replay():
        if kind != "D":
            continue
        files = durable(root)
        for path, content in files.items():
            if content is None or not (match := METADATA.fullmatch(path)):
                continue
            metadata = json.loads(content.read_bytes())
            for name, file in metadata["files"].items():
                state = files.get(f"{match['folder']}/{name}")
                assert state is not None, f"change {number}: {path} names {name}"
                assert sha256(state.read_bytes()).hexdigest() == file["sha256"], f"change {number}: {path} names {name}"
            metrics = files["train/metrics.jsonl"]
            assert metrics is not None
            logged = [json.loads(line)["step"] for line in metrics.read_bytes().splitlines()]
            assert logged[: metadata["step"]] == [*range(1, metadata["step"] + 1)]
            steps.add(metadata["step"])
    assert {3, 6, 9, 12} <= steps


SMALL = """
import sys
from pathlib import Path
import torch
from torch.distributed.checkpoint import save
from schemas.storage import Store
from train.checkpoint.save import _CheckpointWriter
save({"a": torch.ones(3)}, storage_writer=_CheckpointWriter(Path(sys.argv[1]) / "c", from_host=False), no_dist=True)
Store(sys.argv[1]).sync("c")
"""


def test_the_index_of_a_small_checkpoint_is_durable(tmp_path: Path) -> None:
    """torch syncs `.metadata` while up to 8 KB of it are still in the buffer of Python."""
    *_, (_, _, root) = record_script(SMALL, tmp_path / "run").replay()
    files = durable(root)
    for path in (tmp_path / "run/c").iterdir():
        content = files[f"c/{path.name}"]
        assert content is not None
        assert content.read_bytes() == path.read_bytes() != b""


@pytest.mark.parametrize("number", range(STATES))
def test_a_training_resumes_from_what_a_power_loss_leaves(training: Recording, tmp_path: Path, number: int) -> None:
    choose = random.Random(f"{SEED}/{number}")
    lines = training.lines
    first = next(index for index, line in enumerate(lines) if line[1] == str(training.root / "train"))
    kind, change = KINDS[number % len(KINDS)], choose.randrange(first, len(lines))
    write_state(training.at(change), tmp_path / "run", kind, choose)
    assert_same_bits(trained(tmp_path / "run", 1), training.root)
