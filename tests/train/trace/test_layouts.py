"""The layout of a step is the one in which it was computed, whichever checkpoints are left."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from tests.support.tiny_runs import copied, make_run, notes, signalled, train, trained

pytestmark = pytest.mark.dist

CHANGED = 6
"""Step after which the run is stopped on two ranks and resumed on one."""
EVENTS = "train/events.jsonl"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of steps 1 to 6 on two ranks and 7 to 16 on one, with the checkpoints of steps 12 and 16 left."""
    recipe = {"train": {"steps": 16, "eval_every": 0, "eval_sequences": None}, "checkpoint": {"every": 4, "keep": 2}}
    folder = make_run(tmp_path_factory.mktemp("run") / "run", recipe)
    assert [item.code for item in train(folder, 2, during=[(signalled, (CHANGED, signal.SIGTERM, 0))])] == [0, 0]
    assert notes(folder)[-1].step == CHANGED
    trained(folder, 1)
    assert [note.step for note in notes(folder)] == [12, 16]
    return folder


def answer(run: Path, step: int, rank: int, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    code = main(["trace", str(run), "--step", str(step), "--rank", str(rank), "--brief", "--json"])
    printed = capsys.readouterr()
    return json.loads(printed.out) if code == 0 else printed.err


def test_a_step_before_a_resume_has_the_ranks_of_the_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A batch of five rows: two and three on two ranks, all on one.
    for step, rank, rows, named in (
        (1, 0, [0, 2], "the start of training"),
        (CHANGED, 0, [0, 2], "the start of training"),
        (CHANGED, 1, [2, 5], "the start of training"),
        (CHANGED + 1, 0, [0, 5], f"the resume from step {CHANGED}"),
        (16, 0, [0, 5], f"the resume from step {CHANGED}"),
    ):
        found = answer(run, step, rank, capsys)
        assert (found["rows"], found["layout"]) == (rows, named)
        assert {part["row"] for part in found["parts"]} == set(range(*rows))
    expected = f"--rank: expected 0 to 0, the ranks of the resume from step {CHANGED}, got 1"
    assert expected in answer(run, CHANGED + 1, 1, capsys)
    capsys.readouterr()
    assert main(["trace", str(run), "--step", "2", "--rank", "1", "--brief"]) == 0
    assert "rows 2 to 4 of the global batch" in (out := capsys.readouterr().out)
    assert "layout of the start of training" in out


@pytest.mark.parametrize("left", ["no file", "the resume", "another training"])
def test_without_its_events_a_step_before_the_first_checkpoint_has_no_layout(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    folder = copied(run, tmp_path / "run")
    path = folder / EVENTS
    lines = path.read_text().splitlines(keepends=True)
    kept = {"no file": [], "the resume": lines[-1:], "another training": lines[:1]}[left]
    assert [json.loads(line)["kind"] for line in kept] == {
        "the resume": ["resumed"],
        "another training": ["begun"],
    }.get(left, [])
    path.write_text("".join(kept)) if kept else path.unlink()
    for step in (1, CHANGED, *([] if left == "the resume" else [11])):
        error = answer(folder, step, 0, capsys)
        assert error.splitlines() == [error.strip()]
        assert (
            f"expected a step whose layout is recorded, got step {step}: train/events.jsonl does not have it" in error
        )
        assert "Give the number of ranks with --ranks" in error
    for step in (12, 13, 16):
        assert answer(folder, step, 0, capsys)["rows"] == [0, 5]
    assert main(["trace", str(folder), "--step", "1", "--rank", "0", "--ranks", "2", "--brief"]) == 0


def test_a_planned_step_without_any_training_has_the_layout_of_the_plan(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(run, tmp_path / "run")
    shutil.rmtree(folder / "train/checkpoints")
    (folder / EVENTS).unlink()
    assert answer(folder, 1, 0, capsys)["layout"] == "the plan on 1 rank(s)"


def test_an_event_without_a_layout_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(run, tmp_path / "run")
    begun = json.loads((folder / EVENTS).read_text().splitlines()[0])
    layout = begun["layout"]
    wrong = layout | {"settings": layout["settings"] | {"micro_batch": "x"}}
    for damaged in ({}, wrong, layout | {"axes": layout["axes"] | {"shard": 0}}):
        (folder / EVENTS).write_text(json.dumps(begun | {"layout": damaged}) + "\n")
        assert "expected the layout of the ranks in the event `begun` of step 0" in answer(folder, 1, 0, capsys)
