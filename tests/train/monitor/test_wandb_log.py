"""Weights & Biases: what a real offline run file holds after a run that was resumed, and what is refused before it."""

import json
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from tests.support.tiny_runs import cut_back, make_run, metrics, train, trained
from train.config.settings import Settings, load_settings
from train.monitor import wandb_log
from train.monitor.wandb_log import WANDB_NAME, WandbLog, check_wandb, shown_settings, wandb_id

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="the package wandb is not installed")
OFFLINE = ("train.wandb=tiny", "train.wandb_mode=offline", "train.wandb_name=first try")
BLOCK = 32768


def records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run file: blocks of 32 KiB with chunks (checksum, length, kind, bytes)."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def logged(folder: Path) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """Return the ids, the steps and the settings in all offline files of a run, the oldest first."""
    ids, steps, config = [], [], {}
    for path in sorted(folder.glob("train/wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.HasField("run"):
                ids.append(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                names = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                steps.append({name: value for name, value in names.items() if not name.startswith("_")})
    return ids, steps, config


@needs_wandb
@pytest.mark.dist
def test_a_resumed_run_continues_the_same_run_with_the_figures_of_every_step(tmp_path: Path) -> None:
    folder = trained(make_run(tmp_path / "run"), 1, *OFFLINE)
    ids, steps, config = logged(folder)
    assert ids == [wandb_id(Store(str(folder)))]
    expected = [{"optimizer_step": line.step, **line.scalars()} for line in metrics(folder)]
    assert steps == expected
    assert {"loss/web", "heldout/web/accuracy", "learning_rate"} <= set().union(*steps)
    assert config["train"]["steps"] == 20
    assert config["optim"]["learning_rate"] == 1e-3
    # Killed directly after its checkpoint of step 15, and started again.
    trained(cut_back(folder, 15), 1)
    again, steps, _ = logged(folder)
    assert again == ids * 2
    assert [step["optimizer_step"] for step in steps] == [*range(1, 21), *range(16, 21)]


@needs_wandb
@pytest.mark.dist
def test_a_failure_of_the_package_does_not_end_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "train").mkdir()
    (folder / "train/wandb").write_text("a file where W&B makes its folder")
    (result,) = train(folder, 1, *OFFLINE)
    assert result.code == 0, result
    assert len(metrics(folder)) == 20


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_log, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"expected the package wandb for project 'tiny', got none\. Install"):
        check_wandb(load_settings({}, OFFLINE, "test").train)
    check_wandb(Settings().train)


def test_a_full_queue_drops_steps_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_log, "MAX_WAITING", 3)
    monkeypatch.setattr(wandb_log, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(WandbLog, "_write_all", lambda self: None)  # a thread that takes nothing
    log = WandbLog(Store(str(tmp_path)), load_settings({}, OFFLINE, "test"))
    for step in range(9):
        log.write(step, {"loss": 1.0})
    log.close()
    assert [record.message for record in caplog.records] == [
        "penstock: W&B: 3 steps wait; later ones are dropped",
        "penstock: W&B: the last steps could not be written",
    ]


def test_no_key_is_shown() -> None:
    # A recipe with a secret is refused before; this is for settings that were stored by another program.
    values = {"train": {"wandb": "p", "wandb_name": "https://me:secret@host/x"}, "optim": {"learning_rate": 0.1}}
    settings = Settings.model_validate(values)
    assert shown_settings(settings) == {"train": {"wandb": "p"}, "optim": {"learning_rate": 0.1}}


@pytest.mark.parametrize("text", [b"[]", b'{"id": "../x"}', b'{"id": 3}'])
def test_a_damaged_id_is_refused(tmp_path: Path, text: bytes) -> None:
    run = Store(str(tmp_path))
    run.write_atomic(WANDB_NAME, text)
    with pytest.raises(ContractError, match=r"wandb\.json: expected the id of a W&B run"):
        wandb_id(run)


@pytest.mark.parametrize("name", ["wandb_entity", "wandb_name"])
def test_what_would_be_ignored_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} requires wandb, the name of a project"):
        load_settings({"train": {name: "x"}}, [], "test")
