"""Tests of train/pretrain/setup.py: `plan.json` is read and verified, and made anew in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError, ContractError
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_runs import make_run
from train.parallel.devices import RunDevices
from train.plan.layouts import plan_for_devices
from train.plan.plan import Plan, read_plan, write_plan
from train.pretrain import setup
from train.pretrain.setup import call_planner  # before the fixture of all tests of training replaces it

CPU = RunDevices("cpu")


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return Store(str(make_run(tmp_path / "run")))


def current(run: Store, *overrides: str) -> Plan:
    return setup.current_plan(run, open_dataset(run), overrides, CPU)[0]


def test_the_planner_returns_the_same_plan_from_a_process_of_its_own(run: Store) -> None:
    overrides = ["train.steps=12", 'optim.schedule="linear"']
    assert call_planner(run, overrides, CPU) == plan_for_devices(run, overrides, CPU)
    gpu = RunDevices("cuda", (8, 9), "NVIDIA GeForce RTX 4090", 2, 2)
    plan, lines = call_planner(run, [], gpu)
    assert (plan, lines) == plan_for_devices(run, [], gpu)
    assert len(lines) == 1
    assert "penstock calibrate" in lines[0]


@pytest.mark.parametrize(
    ("override", "kind", "message"),
    [
        ("train.steps=100000", ConfigError, "expected at most plan.max_epochs"),
        ("plan.params=1000", ConfigError, "Give them to `penstock plan`"),
        ("train.stepz=3", ConfigError, "train.stepz"),
    ],
)
def test_an_error_of_the_planner_is_raised_here(
    run: Store, override: str, kind: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind, match=message):
        call_planner(run, [override], CPU)
    assert capfd.readouterr() == ("", "")  # the trainer prints it


def test_a_planner_that_is_killed_is_not_an_error_of_the_user(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="expected exit code 0, got 1"):
        call_planner(run, [], CPU)


def test_a_plan_for_these_settings_and_devices_is_not_made_again(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def planner(*arguments: Any) -> tuple[Plan, list[str]]:
        calls.append(arguments[1])
        return plan_for_devices(*arguments)

    monkeypatch.setattr(setup, "call_planner", planner)
    first = current(run)
    write_plan(run, first.model_copy(update={"settings": setup._stored(first.settings)}))
    assert current(run).settings == first.settings.model_copy(update={"train": read_plan(run).settings.train})
    assert current(run, "train.profile='2:4'").settings.train.profile == "2:4"
    assert calls == [()]
    assert current(run, "train.steps=12").steps == 12
    assert calls == [(), ("train.steps=12",)]


def double(name: str) -> Callable[[dict[str, Any]], None]:
    def change(plan: dict[str, Any]) -> None:
        plan[name] *= 2

    return change


def shorter(plan: dict[str, Any]) -> None:
    stage = plan["stages"][-1]
    stage["num_steps"] -= 1


def other_tokenizer(plan: dict[str, Any]) -> None:
    plan["tokenizer"] = "0" * 64


def other_order(plan: dict[str, Any]) -> None:
    plan["order"] = "0" * 64


def other_model(plan: dict[str, Any]) -> None:
    plan["shape"]["rope_theta"] = 3.0


def other_training(plan: dict[str, Any]) -> None:
    plan["settings"].setdefault("optim", {})["weight_decay"] = 0.9


@pytest.mark.parametrize("change", [other_model, other_training])
def test_a_plan_of_the_same_figures_that_was_changed_by_hand_is_rejected(
    run: Store, change: Callable[[dict[str, Any]], None]
) -> None:
    plan, _ = plan_for_devices(run, [], CPU)
    write_plan(run, plan.model_copy(update={"settings": setup._stored(plan.settings)}))
    raw = run.read_json(PLAN_NAME)
    change(raw)
    run.write_atomic(PLAN_NAME, json.dumps(raw).encode())
    with pytest.raises(ContractError, match=r"expected the plan with digest \w{64}, got \w{64}, so it was edited"):
        current(run)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (double("num_params"), "num_params"),
        (double("learning_rate"), "learning_rate"),
        (double("warmup_steps"), "warmup_steps"),
        (shorter, "steps"),
        (other_tokenizer, "tokenizer"),
        (other_order, "order"),
    ],
)
def test_a_plan_that_was_changed_by_hand_is_rejected(
    run: Store, change: Callable[[dict[str, Any]], None], name: str
) -> None:
    plan, _ = plan_for_devices(run, [], CPU)
    write_plan(run, plan.model_copy(update={"settings": setup._stored(plan.settings)}))
    current(run)
    raw = run.read_json(PLAN_NAME)
    change(raw)
    run.write_atomic(PLAN_NAME, json.dumps(raw).encode())
    with pytest.raises(ContractError, match=rf"plan\.json: expected {name} = .*Run `penstock plan` again"):
        current(run)


def test_a_rank_loads_no_planner() -> None:
    code = "import sys, train.pretrain.__main__; print(*sorted(n for n in sys.modules if n.startswith('train.plan.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["train.plan.plan", "train.plan.rules"]
