"""The moving average of the weights: against a loop over the checkpoints of each step, resumed, and used afterwards."""

from pathlib import Path

import pytest
import torch

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from tests.support import tiny_runs
from train.checkpoint.state import read_model
from train.config.settings import load_settings
from train.eval.evaluate import evaluate
from train.eval.generate import TextSampler
from train.export.llama import export_checkpoint, import_llama
from train.monitor.metrics import StepMetrics
from train.optim.average import decay_of

pytestmark = pytest.mark.dist
DECAY, STEPS = 0.8, 8
CHANGES = {
    "plan": {"qk_norm": False},  # Llama, as which it is exported, has none
    "optim": {"ema": DECAY},
    "train": {"steps": STEPS, "eval_every": 4},
    "checkpoint": {"every": 1, "keep": 20, "first": True},
}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averages on one rank, with a checkpoint of every step."""
    return tiny_runs.trained(tiny_runs.make_run(tmp_path_factory.mktemp("ema") / "run", CHANGES), 1)


def test_the_decay_rises_with_the_updates() -> None:
    values = [decay_of(torch.tensor(float(step)), DECAY).item() for step in (1, 2, 35, 36, 1000)]
    assert values == pytest.approx([2 / 11, 3 / 12, 36 / 45, 0.8, 0.8])


def test_the_average_is_that_of_the_weights_of_each_step(averaged: Path) -> None:
    states = [tiny_runs.state_at(averaged, step) for step in range(STEPS + 1)]
    names = [name.removeprefix("model.") for name in states[0] if name.startswith("model.")]
    assert {f"ema.{name}" for name in names} <= states[0].keys()
    for name in names:
        average = states[0][f"model.{name}"].double()
        assert torch.equal(states[0][f"ema.{name}"], states[0][f"model.{name}"])
        for step in range(1, STEPS + 1):
            decay = min(DECAY, (1 + step) / (10 + step))
            average = decay * average + (1 - decay) * states[step][f"model.{name}"].double()
            torch.testing.assert_close(states[step][f"ema.{name}"].double(), average, rtol=1e-5, atol=1e-7)
        assert not torch.equal(states[STEPS][f"ema.{name}"], states[STEPS][f"model.{name}"])


def test_a_resumed_run_has_the_same_averages(averaged: Path, tmp_path: Path) -> None:
    again = tiny_runs.cut_back(tiny_runs.copied(averaged, tmp_path / "again"), 5)
    tiny_runs.assert_same_bits(tiny_runs.trained(again, 1), averaged)


def test_averages_change_no_weights(averaged: Path, tmp_path: Path) -> None:
    """Not even though they take the place of the weights in an evaluation."""
    changes = CHANGES | {"optim": {}, "checkpoint": {"every": STEPS}}
    plain = tiny_runs.trained(tiny_runs.make_run(tmp_path / "plain", changes), 1)
    with_averages, without = tiny_runs.state_at(averaged, STEPS), tiny_runs.state_at(plain, STEPS)
    assert all(torch.equal(with_averages[name], value) for name, value in without.items())
    assert not [name for name in without if name.startswith("ema.")]
    run, note = Store(str(plain)), tiny_runs.notes(plain)[-1]
    assert "optim.ema" not in note.identity.settings
    with pytest.raises(ConfigError, match="expected a checkpoint with averaged weights, got"):
        TextSampler(run, None, "ema").continue_text("bebu", 3)


def test_the_average_of_a_frozen_parameter_is_the_parameter(tmp_path: Path) -> None:
    freeze = {"train": CHANGES["train"] | {"freeze": ["blocks.0", "embedding"]}, "checkpoint": {"every": STEPS}}
    run = tiny_runs.trained(tiny_runs.make_run(tmp_path / "run", CHANGES | freeze), 1)
    store, note = Store(str(run)), tiny_runs.notes(run)[-1]
    state, device = tiny_runs.state_at(run, STEPS), torch.device("cpu")
    averaged = dict(read_model(store, note, device, "ema").named_parameters())
    frozen = {name for name in averaged if name.startswith(("blocks.0.", "embedding."))}
    assert 0 < len(frozen) < len(averaged)
    for name, value in averaged.items():
        assert torch.equal(value, state[f"model.{name}" if name in frozen else f"ema.{name}"]), name
    damaged = note.model_copy(
        update={"identity": note.identity.model_copy(update={"settings": note.identity.settings | {"train.freeze": 1}})}
    )
    with pytest.raises(ContractError, match=r"expected a list of patterns in train\.freeze"):
        read_model(store, damaged, device, "ema")


@pytest.mark.parametrize("layout", ["layout.data=zero1", "layout.tensor=2", "layout.pipeline=2"])
def test_layouts_average_alike(averaged: Path, tmp_path: Path, layout: str) -> None:
    run = tiny_runs.make_run(tmp_path / "run", CHANGES | {"checkpoint": {"every": STEPS}})
    tiny_runs.trained(run, 2, layout, "layout.micro_batch=2")
    expected, actual = tiny_runs.state_at(averaged, STEPS), tiny_runs.state_at(run, STEPS)
    for name, value in expected.items():
        if name.startswith("ema."):
            torch.testing.assert_close(actual[name], value, rtol=0, atol=2e-5)
    pairs = zip(tiny_runs.metrics(run), tiny_runs.metrics(averaged), strict=True)
    for line, other in pairs:
        if other.ema_heldout_loss is not None:
            assert line.ema_heldout_loss == pytest.approx(other.ema_heldout_loss, rel=1e-6)


def test_the_held_out_loss_of_the_average_is_measured_beside_the_other(averaged: Path) -> None:
    """And is the loss that `penstock evaluate --weights ema` measures of the same rows."""
    lines: list[StepMetrics] = tiny_runs.metrics(averaged)
    assert [line.step for line in lines if line.ema_heldout_loss is not None] == [4, STEPS]
    rows = tiny_runs.RECIPE["train"]["eval_sequences"]
    for weights, expected in (("model", lines[-1].heldout_loss), ("ema", lines[-1].ema_heldout_loss)):
        (measured,) = evaluate([str(averaged)], [str(averaged)], rows, (), None, weights)
        nats = sum(source.nats for source in measured.sources.values())
        targets = sum(source.targets for source in measured.sources.values())
        assert nats / targets == pytest.approx(expected, rel=1e-5)
    assert lines[-1].heldout_loss != lines[-1].ema_heldout_loss


def test_averaged_weights_write_text_and_are_exported(averaged: Path, tmp_path: Path) -> None:
    run = Store(str(averaged))
    texts = [TextSampler(run, None, weights).continue_text("bebu", 30, 0.0) for weights in ("model", "ema")]
    assert all(text.startswith("bebu") for text in texts)
    export_checkpoint(run, tmp_path / "llama", weights="ema")
    state = tiny_runs.state_at(averaged, STEPS)
    assert all(torch.equal(value, state[f"ema.{name}"]) for name, value in import_llama(tmp_path / "llama")[1].items())


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_decays_of_nothing_are_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"optim\.ema"):
        load_settings({"optim": {"ema": decay}}, [], "test")
