"""The benchmarks can be imported: no test executes most of them, and what they measure moves."""

import importlib
import os
from pathlib import Path

import pytest

from bench.scaling import interval
from tests.bench_race import Result, run, tree_memory
from tests.bench_snapshot import line, predict

ROOT = Path(__file__).parents[2]
MODULES = sorted(f"bench.{path.stem}" for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__")
OF_TESTS = sorted(f"tests.{path.stem}" for path in (ROOT / "tests").glob("bench_*.py"))


@pytest.mark.parametrize("name", [*MODULES, *OF_TESTS])
def test_a_bench_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__


def test_a_line_has_a_fixed_part_and_one_for_each_unit() -> None:
    assert line([1, 2, 4], [12, 14, 18]) == pytest.approx((2, 10))


def test_eight_times_are_predicted_from_less(capsys: pytest.CaptureFixture[str]) -> None:
    costs = [{"cpu": 10.0 + 2 * size} for size in (1, 2, 4)]
    lines = predict([1, 2, 4, 8], [*costs, {"cpu": 20.0}])
    assert lines["cpu"] == pytest.approx(line([1, 2, 4, 8], [12, 14, 18, 20]))
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[:5] == ["cpu", "26.0", "20.0", "+30.0%", "+380.0%"]


def test_the_memory_and_the_costs_of_a_command_are_measured() -> None:
    costs: dict[str, float] = {}
    code = "import time; held = bytearray(200 << 20); time.sleep(1.5); print(len(held))"
    assert run(["python3", "-c", code], costs).strip() == str(200 << 20)
    assert 200 < costs["peak_mb"] < 400
    assert costs["wall"] > 1.5
    assert tree_memory(os.getpid()) > 10
    assert Result("a", "b", pages=10, cpu=4.0).rate == 2.5


def test_a_command_that_fails_shows_its_errors() -> None:
    with pytest.raises(SystemExit, match=r"expected exit code 0, got 3:\nno archives"):
        run(["python3", "-c", "import sys; sys.stderr.write('no archives'); sys.exit(3)"], {})


def test_the_interval_of_an_efficiency_holds_the_ratio_and_narrows_to_it() -> None:
    low, middle, high = interval([[8.0, 8.0], [8.0]], [[5.0], [5.0, 5.0]], 0.5)
    assert (low, middle, high) == (0.8, 0.8, 0.8)
    low, middle, high = interval([[7.0, 8.0, 9.0], [8.0, 10.0]], [[5.0], [4.0, 6.0]], 0.5)
    assert low < middle == 0.8 < high
