"""The test on ranks: hand-computed values, calibrated without a model, and a checker that needs no other package."""

import hashlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.key_file import commitment
from schemas.ranks import BELOW, CHANCE, LEARNED, commit, problems_of, rank_test

KEY = hashlib.sha256(b"a key").digest()


def test_by_hand() -> None:
    # 4 ranks of 99 controls: shares 1, 1, 0.5 and 0.5; variance of a uniform share 101 / 1188.
    found = rank_test([99, 99, 49.5, 49.5], 99)
    assert (found["n"], found["mean"], found["verdict"]) == (4, 0.75, CHANCE)
    assert found["z"] == pytest.approx(0.25 / math.sqrt(101 / 1188 / 4))
    assert found["p"] == pytest.approx(0.0432, abs=2e-4)
    # 0.34 of the variance of a yes-or-no value: 4 / (4 · 101 / 1188) = 11.76 trials.
    assert (found["low"], found["high"]) == (pytest.approx(0.46496, abs=1e-4), pytest.approx(0.91194, abs=1e-4))
    assert found["detectable"] == pytest.approx(0.5 + 2.8016 * math.sqrt(101 / 1188 / 4), abs=1e-4)


def test_verdicts_and_ends() -> None:
    assert rank_test([99] * 30, 99)["verdict"] == LEARNED
    assert rank_test([0] * 30, 99)["verdict"] == BELOW
    assert rank_test([99] * 30, 99)["high"] == pytest.approx(1)
    assert 0.95 < rank_test([99] * 30, 99)["low"] < 1
    assert 0 < rank_test([99] * 300, 99)["p"] < 1e-50
    assert rank_test([], 99)["n"] == 0


def uniform(rng: random.Random) -> float:
    return rng.randint(0, 99)


def learned(rng: random.Random) -> float:
    return round(99 * rng.random() ** 0.5)


def some_learned(rng: random.Random) -> float:
    return 99 if rng.random() < 0.3 else rng.randint(0, 99)


@pytest.mark.parametrize(("draw", "mean"), [(uniform, 0.5), (learned, 2 / 3), (some_learned, 0.65)])
@pytest.mark.parametrize("number", [20, 80])
def test_the_interval_holds_the_mean_and_the_verdict_is_calibrated(draw: Any, mean: float, number: int) -> None:
    rng = random.Random(4)
    results = [rank_test([draw(rng) for _ in range(number)], 99) for _ in range(600)]
    assert sum(own["low"] <= mean <= own["high"] for own in results) >= 600 * 0.91
    if draw is uniform:
        assert sum(own["verdict"] == LEARNED for own in results) <= 600 * 0.045
        assert sum(own["p"] <= 0.5 for own in results) == pytest.approx(300, abs=50)
    else:
        power = sum(own["verdict"] == LEARNED for own in results) / 600
        assert power > 0.55 if number == 20 else power > 0.98


def test_the_smallest_mean_is_found_four_times_of_five() -> None:
    smallest = rank_test([50] * 40, 99)["detectable"]
    exponent = (1 - smallest) / smallest  # the mean of u ** exponent is 1 / (1 + exponent)
    rng = random.Random(5)
    results = [rank_test([round(99 * rng.random() ** exponent) for _ in range(40)], 99) for _ in range(600)]
    assert sum(own["verdict"] == LEARNED for own in results) / 600 == pytest.approx(0.8, abs=0.06)


def result() -> dict[str, Any]:
    ranks = {"trained": [99.0, 98.0, 97.5, 99.0, 90.0], "removed": [1.0, 50.0, 99.0], "not read": []}
    rows = [{"group": group, "rank": rank} for group, own in ranks.items() for rank in own]
    groups = {group: rank_test(own, 99) | {"of": len(own)} for group, own in ranks.items()}
    return {"commitment": commitment(KEY, "plant"), "controls": 99, "documents": rows, "groups": groups}


def check(tmp_path: Path, value: Any, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a third party does: from a file, without packages and without the project."""
    script = tmp_path / "check.py"
    script.write_bytes((Path(__file__).parents[2] / "schemas/ranks.py").read_bytes())
    (tmp_path / "result.json").write_text(json.dumps(value))
    command = [sys.executable, "-I", "-S", str(script), str(tmp_path / "result.json"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)


def test_the_script_recomputes_the_numbers_and_the_commitment(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "hex").write_text(f"{KEY.hex()}\n")
    (tmp_path / "other").write_bytes(KEY[1:])
    assert commit(KEY) == commitment(KEY, "plant")
    good = check(tmp_path, result(), "key")
    assert (good.returncode, good.stderr) == (0, "")
    assert check(tmp_path, result(), "hex").stdout == good.stdout
    assert check(tmp_path, result(), "other").stdout == "the key is another one\n"
    changed = result()
    changed["documents"][0]["rank"] = 3.0
    bad = check(tmp_path, changed, "key")
    assert bad.returncode == 1
    assert "trained: mean is" in bad.stdout
    less = result()
    del less["documents"][-1]
    assert "removed: n is 2 by the ranks, not 3" in problems_of(less)


@pytest.mark.parametrize("value", [[], 3, {}, {"groups": 1}, {"groups": {"a": {}}, "documents": [], "controls": 0}])
def test_other_values_are_refused_in_one_line(tmp_path: Path, value: Any) -> None:
    done = check(tmp_path, value)
    assert done.returncode == 1
    assert done.stderr.startswith("not checked: ")
    assert "Traceback" not in done.stderr
