"""What a checkpoint is read back as, beside its weights, and the folder of Qwen 3 or Llama that it is exported to."""

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from jobs.cli import main as penstock
from jobs.verbs.export import _model_card
from schemas.errors import ContractError
from schemas.exports import read_receipts
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.train.eval.test_generate import RECIPE
from train.checkpoint.folder import CheckpointMetadata, shape_of
from train.checkpoint.state import (
    check_objective,
    find_checkpoint,
    read_model,
    read_tokenizer,
    sequence_length_of,
)
from train.pretrain.__main__ import main as pretrain

pytest.importorskip("safetensors")

from train.export.llama import export_checkpoint, import_llama, main

STAGES = [{"tokens": 16 * 8 * 10}, {"seq_len": 32}]


@pytest.fixture(scope="module", params=[{}, {"qk_norm": False}], ids=["default", "without_qk_norm"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of 20 steps, its second half with longer sequences, and checkpoints on both sides."""
    run = make_tiny_dataset(tmp_path_factory.mktemp("export") / "run")
    train = RECIPE["train"] | {"steps": 20, "stages": STAGES}
    own = {"train": train, "checkpoint": {"every": 10}, "plan": RECIPE["plan"] | request.param}
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE | own}))
    assert pretrain([run.uri]) == 0
    return run


def with_settings(note: CheckpointMetadata, **settings: Any) -> CheckpointMetadata:
    identity = note.identity
    return note.model_copy(update={"identity": identity.model_copy(update={"settings": identity.settings | settings})})


def test_a_checkpoint_has_the_length_of_its_last_step(run: Store) -> None:
    # Step 10 is the last of the first stage; the seed checkpoint counts as the first step's.
    found = {
        step: sequence_length_of(find_checkpoint(run, 10).model_copy(update={"step": step}))
        for step in (0, 1, 10, 11, 20)
    }
    assert found == {0: 16, 1: 16, 10: 16, 11: 32, 20: 32}
    assert sequence_length_of(find_checkpoint(run, None)) == 32


def test_a_model_of_another_objective_is_refused(run: Store) -> None:
    note = find_checkpoint(run, None)
    check_objective(note, "causal")
    masked = with_settings(note, **{"train.objective": "mlm"})
    check_objective(masked, "causal", "mlm")
    with pytest.raises(ContractError, match=r"step-000020: expected .* train.objective = causal or span, got mlm"):
        check_objective(masked, "causal", "span")


@pytest.mark.parametrize(("step", "length"), [(10, 16), (None, 32)])
def test_a_checkpoint_becomes_a_model_folder_with_its_tokenizer(
    run: Store, tmp_path: Path, step: int | None, length: int
) -> None:
    note = export_checkpoint(run, tmp_path / "model", step)
    assert note == find_checkpoint(run, step)
    shape, state = import_llama(tmp_path / "model")
    expected = read_model(run, note, torch.device("cpu"))
    assert shape == shape_of(note) == expected.shape
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: parameter.tolist() for name, parameter in expected.named_parameters()
    }
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["model_type"] == ("qwen3" if shape.qk_norm else "llama")
    assert config["max_position_embeddings"] == length
    tokenizer = json.loads((tmp_path / "model/tokenizer.json").read_bytes())
    assert tokenizer["model"] == json.loads(read_tokenizer(open_dataset(run)))["model"]


def test_main(run: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "llama")
    assert main([run.uri, "--out", out]) == 0
    assert capsys.readouterr().out == f"{out}: the model of train/checkpoints/step-000020 and its tokenizer\n"
    assert main([run.uri, "--out", out]) == 2
    assert "expected a new folder, got one with files in it" in capsys.readouterr().err
    assert main([run.uri, "--out", f"{out}-7", "--step", "7"]) == 2
    assert "expected a checkpoint of step 7, got checkpoints of steps 10, 20. Name one" in capsys.readouterr().err


def test_a_model_of_tables_that_a_takedown_replaced_meanwhile_is_refused(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.root, tmp_path / "run")
    own, out = Store(str(tmp_path / "run")), tmp_path / "llama"

    def overtaken(*arguments: Any) -> CheckpointMetadata:
        note = export_checkpoint(*arguments)
        state = read_run(own)
        write_run(own, state.model_copy(update={"tables": state.tables | {"tokens": "v-000000000000"}}))
        return note

    monkeypatch.setattr("train.export.llama.export_checkpoint", overtaken)
    assert main([own.uri, "--out", str(out)]) == 2
    assert f"{out}: expected unchanged tables of {own.uri} during the export" in capsys.readouterr().err
    assert str(out) in [receipt.destination for receipt in read_receipts(own)]  # a takedown names the folder


def test_the_command_writes_the_card_of_the_step(run: Store, tmp_path: Path) -> None:
    facts = tmp_path / "facts.toml"
    facts.write_text('[model]\nnames = ["Example 1"]\nlicence = "apache-2.0"\n')
    words = ["export", run.uri, "--format", "huggingface", "--out", str(tmp_path / "llama"), "--step", "10"]
    assert penstock([*words, "--facts", str(facts)]) == 0
    card = (tmp_path / "llama/README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["library_name"], head["license"]) == ("transformers", "apache-2.0")
    assert "# Example 1\n" in card
    assert "after 10 optimizer steps, which have read 1,280 tokens" in card


def test_a_card_whose_facts_are_not_known_is_left_out_with_a_warning(
    run: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: Any) -> None:
        raise ContractError("RUN: expected a plan, got none. Plan it.")

    monkeypatch.setattr("jobs.verbs.export.consumption_of", unknown)
    assert _model_card(Namespace(run=run.uri, facts=None, step=None)) is None
    assert "the folder has no README.md, because a fact of the card is not known: RUN: expected a plan" in caplog.text
