"""Whole runs with dropout: its masks follow the samples, so a resumed run and one on other ranks draw the same."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_runs
from train.data.permutation import key_of, keys_of

pytestmark = pytest.mark.dist
CHANGES = {
    "train": {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1, "steps": 10, "eval_every": 5},
    "optim": {"warmup_steps": 5},
}


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.trained(tiny_runs.make_run(tmp_path_factory.mktemp("dropout") / "run", CHANGES), 1)


def test_rows_have_the_keys_of_their_samples(dropped: Path) -> None:
    batches = tiny_runs.opened(dropped)
    rows, samples = batches.batch(3), batches.samples(3)
    expected = keys_of(key_of(0, "dropout"), samples.index).view("int64")
    assert rows.keys_B.tolist() == expected.tolist()
    assert rows.part(1, 3).keys_B.tolist() == expected[1:3].tolist()
    assert rows.padded(7).keys_B.tolist() == [*expected, expected[0], expected[0]]
    assert batches.heldout(2).rows.keys_B is None
    assert batches.heldout(2).rows.draws == {}


def test_a_resumed_run_drops_the_same(dropped: Path, tmp_path: Path) -> None:
    again = tiny_runs.cut_back(tiny_runs.copied(dropped, tmp_path / "again"), 5)
    tiny_runs.assert_same_bits(tiny_runs.trained(again, 1), dropped)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "layout.micro_batch=2"), (2, "layout.context=2")])
def test_other_ranks_drop_the_same(dropped: Path, tmp_path: Path, ranks: int, layout: str) -> None:
    other = tiny_runs.make_run(tmp_path / "other", CHANGES)
    tiny_runs.assert_equal_up_to_rounding(tiny_runs.trained(other, ranks, layout), dropped)


def test_dropout_changes_the_weights(dropped: Path, tmp_path: Path) -> None:
    changes = CHANGES | {"train": {"steps": 10, "eval_every": 5}}
    plain = tiny_runs.trained(tiny_runs.make_run(tmp_path / "plain", changes), 1)
    states = [tiny_runs.state_at(folder, 10)["model.embedding.weight"] for folder in (dropped, plain)]
    assert not torch.equal(*states)
    settings = [tiny_runs.notes(folder)[-1].identity.settings for folder in (dropped, plain)]
    assert settings[0]["train.attention_dropout"] == 0.1
    assert not [name for name in settings[1] if "dropout" in name]
