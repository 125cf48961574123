"""Damaged files of `train/`: each verb answers with one sentence and exit code 2, or trains all the same."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from jobs.cli import main as penstock
from tests.support.tiny_runs import copied, make_run, trained
from train.eval import evaluate, generate
from train.export import llama
from train.pretrain.__main__ import main as pretrain

pytestmark = pytest.mark.dist

PLAN, CHECKPOINT = "train/plan.json", "train/checkpoints/step-000004/checkpoint.json"
METRICS, EVENTS, VERIFIED = "train/metrics.jsonl", "train/events.jsonl", "train/verified.json"
FILES = (PLAN, CHECKPOINT, METRICS, EVENTS, VERIFIED)
DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "binary": lambda data: bytes(range(256)),
    "list": lambda data: b"[]\n",
    "wrong types": lambda data: json.dumps({key: [None] for key in json.loads(data.splitlines()[0])}).encode() + b"\n",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"train": {"steps": 6, "eval_every": 0}, "optim": {"warmup_steps": 2}, "checkpoint": {"every": 4}}
    folder = trained(make_run(tmp_path_factory.mktemp("damage") / "run", changes), 1)
    path = folder / PLAN
    path.write_text(json.dumps(json.loads(path.read_bytes())))  # on one line
    shutil.rmtree(folder / "train/checkpoints/step-000006")
    return folder


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A verb that reads a pipe never returns; the alarm then fails the test."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError("a verb hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(200)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Call verbs on a damaged run; fail on a traceback, and on an error without a sentence."""
    verbs = (
        lambda: penstock(["verify", str(folder)]),
        lambda: generate.main([str(folder), "--tokens", "2"]),
        lambda: pretrain([str(folder)]),
    )
    codes = []
    for verb in verbs:
        capsys.readouterr()
        codes.append(verb())
        printed = capsys.readouterr().err
        assert codes[-1] in (0, 2)
        assert (codes[-1] == 0) or ("expected" in printed and "got" in printed), printed
    return codes


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damage: str) -> None:
    folder = copied(run, tmp_path / "run")
    path = folder / file
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    codes = answers(folder, capsys)
    if file == CHECKPOINT:
        assert codes[1:] == [2, 2]
    if file == PLAN:
        assert codes[2] == 2


def test_a_flipped_bit_in_any_file_of_a_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever reads a checkpoint compares all of its files, and names the expected and the actual digest."""
    folder = copied(run, tmp_path / "run")
    checkpoint = (folder / CHECKPOINT).parent
    names = sorted(path.name for path in checkpoint.iterdir())
    assert {".metadata", "__0_0.distcp", "checkpoint.json"} <= {*names}
    readers = {
        "generate": lambda: generate.main([str(folder), "--tokens", "2"]),
        "evaluate": lambda: evaluate.main([str(folder), "--on", str(folder), "--sequences", "2"]),
        "export": lambda: llama.main([str(folder), "--out", str(tmp_path / "exported")]),
        "resume": lambda: pretrain([str(folder)]),
    }
    for name in names:
        path = checkpoint / name
        data = path.read_bytes()
        # A digit of a number: the file stays JSON, and the checkpoint stays one of this run.
        place = data.index(b'"heldout"') - 20 if name == "checkpoint.json" else len(data) // 2
        place = max(i for i in range(place) if data[i : i + 1].isdigit()) if name == "checkpoint.json" else place
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        for reader, read in readers.items():
            capsys.readouterr()
            assert read() == 2, (name, reader)
            printed = capsys.readouterr().err
            pattern = r"expected content with digest '[0-9a-f]{64}', got [0-9a-f]{64}"
            pattern = pattern if name == "checkpoint.json" else r"expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}"
            assert re.search(pattern, printed), (name, reader, printed)
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pytest.mark.parametrize("file", [CHECKPOINT, METRICS, EVENTS])
def test_a_folder_or_a_pipe_in_place_of_a_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, kind: str
) -> None:
    folder = copied(run, tmp_path / "run")
    (folder / file).unlink()
    os.mkfifo(folder / file) if kind == "pipe" else (folder / file).mkdir()
    assert answers(folder, capsys)[2] == 2


def test_a_torn_last_line_of_the_metrics_is_ignored(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(run, tmp_path / "run")
    with (folder / METRICS).open("ab") as stream:
        stream.write(b'{"step": 5, "lo')
    assert answers(folder, capsys) == [0, 0, 0]


def test_a_plan_of_a_thousand_million_layers_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(run, tmp_path / "run")
    plan = json.loads((folder / PLAN).read_bytes())
    plan["shape"]["num_layers"] = plan["settings"]["plan"]["num_layers"] = 1_000_000_000
    (folder / PLAN).write_text(json.dumps(plan))
    assert penstock(["train", str(folder), "--dry-run"]) == 2
    assert "less than or equal to 10000" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.objective", "train.stages", "shape.d_model"])
def test_a_checkpoint_without_a_setting(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = copied(run, tmp_path / "run")
    stored = json.loads((folder / CHECKPOINT).read_bytes())
    del stored["identity"]["settings"][name]
    (folder / CHECKPOINT).write_text(json.dumps(stored))
    assert answers(folder, capsys)[1:] == [2, 2]
