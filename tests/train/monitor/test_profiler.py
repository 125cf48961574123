"""The profiler: valid windows, and recordings of exactly the steps in the window."""

import gzip
import json
import re
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.storage import Store
from train.config.train import ProfileWindow, parse_window
from train.monitor.profiler import NUM_OPERATORS, PROFILE_FOLDER, StepProfiler


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("", None),
        ("10-12", ProfileWindow(10, 12)),
        ("1-1", ProfileWindow(1, 1)),
        (" 7-20 ", ProfileWindow(7, 20)),
        ("20-20", ProfileWindow(20, 20)),
    ],
)
def test_windows(text: str, window: ProfileWindow | None) -> None:
    assert parse_window(text, 20) == window


@pytest.mark.parametrize("text", ["10", "12-10", "0-3", "a-b", "1-2-3", "-1-3", "1 - 3", "1.5-3", "١-٣", "-"])
def test_other_texts_are_refused(text: str) -> None:
    message = f"train.profile: expected steps FIRST-LAST from 1 on, such as 10-12, got {text!r}. Set train.profile="
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_window(text, 20)


def test_steps_beyond_the_run_are_refused() -> None:
    message = r"expected steps of the run, 1 to 20, got '20-21'\. Set train\.profile to steps up to 20\."
    with pytest.raises(ConfigError, match=message):
        parse_window("20-21", 20)


def work() -> None:
    import torch

    torch.ones(8, 8) @ torch.ones(8, 8)


def recorded(folder: Path) -> dict[str, list[str]]:
    """Return the steps in each trace of a run."""
    traces = sorted((folder / PROFILE_FOLDER).glob("*.json.gz"))
    actual = {trace.name: json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] for trace in traces}
    return {
        name: sorted({e["name"] for e in events if e["name"].startswith("step ")}) for name, events in actual.items()
    }


def train(folder: Path, window: ProfileWindow | None, *steps: int) -> None:
    with StepProfiler(Store(str(folder)), window) as profile:
        for step in steps:
            with profile.step(step):
                work()


def test_exactly_the_window_is_recorded(tmp_path: Path) -> None:
    train(tmp_path, ProfileWindow(2, 3), 1, 2, 3, 4, 5)
    assert recorded(tmp_path) == {"steps-2-3.json.gz": ["step 2", "step 3"]}
    table = (tmp_path / PROFILE_FOLDER / "steps-2-3.txt").read_text()
    assert "aten::mm" in table
    operators = [line for line in table.splitlines() if line.lstrip().startswith(("aten::", "step "))]
    assert 2 <= len(operators) <= NUM_OPERATORS
    assert sorted(path.name for path in (tmp_path / PROFILE_FOLDER).iterdir()) == ["steps-2-3.json.gz", "steps-2-3.txt"]


def test_nothing_is_written_without_a_window_or_outside_of_it(tmp_path: Path) -> None:
    train(tmp_path, None, 1, 2, 3)
    train(tmp_path, ProfileWindow(4, 5), 1, 2, 3)
    train(tmp_path, ProfileWindow(1, 2), 3, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_resumed_or_stopped_inside_the_window_records_the_rest(tmp_path: Path) -> None:
    train(tmp_path / "resumed", ProfileWindow(2, 4), 3, 4, 5)
    assert recorded(tmp_path / "resumed") == {"steps-3-4.json.gz": ["step 3", "step 4"]}
    train(tmp_path / "stopped", ProfileWindow(2, 4), 1, 2)
    assert recorded(tmp_path / "stopped") == {"steps-2-2.json.gz": ["step 2"]}


def test_a_rewind_out_of_the_window_ends_the_recording(tmp_path: Path) -> None:
    train(tmp_path, ProfileWindow(3, 5), 2, 3, 4, 1, 2, 3, 4, 5)
    assert recorded(tmp_path) == {"steps-3-4.json.gz": ["step 3", "step 4"]}


def test_an_error_in_a_step_passes_through_and_what_was_recorded_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StepProfiler(Store(str(tmp_path)), ProfileWindow(1, 9)) as profile:  # noqa: PT012
        with profile.step(1):
            work()
        with profile.step(2):
            raise ZeroDivisionError
    assert "steps-1-2.json.gz" in recorded(tmp_path)
