"""A run resumes from its checkpoint as if it had never stopped: bit for bit in its layout, up to rounding in another.

A killed run is simulated by cutting a run back to a checkpoint; test_survive.py has real kills. Each layout is trained
once to its end, and resumed runs are compared with it.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import (
    assert_equal_up_to_rounding,
    assert_same_bits,
    copied,
    cut_back,
    deviations,
    events,
    make_run,
    metrics,
    notes,
    state_at,
    trained,
)
from train.parallel.ranks import Ranks
from train.pretrain.run import TrainingRun
from train.pretrain.setup import TrainingSetup

pytestmark = pytest.mark.dist

KEPT, END = 6, 12
RECIPE = {
    "train": {"steps": END, "eval_every": 4, "eval_sequences": 4},
    "optim": {"warmup_steps": 12},
    "checkpoint": {"every": KEPT, "keep": 9},
}

# name: (ranks, overrides); RECIPE's batch of 5 and width of 74 leave every split uneven
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "two": (2, ()),
    "four": (4, ()),
    "ddp": (2, ("layout.data=ddp",)),
    "zero1": (2, ("layout.data=zero1",)),
    "zero2": (2, ("layout.data=zero2",)),
    "hsdp": (4, ("layout.replicate=2",)),
    "tensor": (2, ("layout.tensor=2",)),
    "tensor-shard": (4, ("layout.tensor=2", "layout.shard=2")),
    "context": (2, ("layout.context=2",)),
    "pipeline": (2, ("layout.pipeline=2", "layout.micro_batch=2")),
    "pipeline-shard": (4, ("layout.pipeline=2", "layout.micro_batch=1")),
}
Trained = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the complete run of a layout and optimizer, trained at first use; tests must not change it."""

    @cache
    def make(layout: str, optimizer: str = "adamw") -> Path:
        ranks, overrides = LAYOUTS[layout]
        run = make_run(tmp_path_factory.mktemp("runs") / "run", RECIPE | {"optim": optim(optimizer)})
        return trained(run, ranks, *overrides)

    return make


def optim(optimizer: str) -> dict[str, Any]:
    return RECIPE["optim"] | {"optimizer": optimizer}


def resumed(run: Path, to: Path, layout: str) -> Path:
    """Return a copy of a run, killed after its checkpoint of step KEPT and resumed in a layout."""
    killed = cut_back(copied(run, to), KEPT)
    (killed / "train/plan.json").unlink()  # it holds the layout before; the recipe names none
    ranks, overrides = LAYOUTS[layout]
    return trained(killed, ranks, *overrides)


MOVES = [
    *[(a, b, "adamw") for a in ("one", "two", "four") for b in ("one", "two", "four")],
    ("two", "tensor-shard", "muon"),
    ("tensor-shard", "two", "adafactor"),
    ("zero1", "two", "adafactor"),
    ("two", "zero1", "lamb"),
    ("pipeline", "one", "adamw"),
    ("pipeline", "pipeline", "muon"),
    ("one", "pipeline", "adafactor"),
    ("pipeline-shard", "tensor-shard", "muon"),
    ("tensor-shard", "pipeline-shard", "adamw"),
    ("ddp", "zero2", "muon"),
    ("zero2", "ddp", "adafactor"),
    ("zero1", "zero1", "muon"),
    ("hsdp", "four", "adamw"),
    ("hsdp", "hsdp", "adafactor"),
    ("four", "hsdp", "muon"),
    ("context", "tensor", "adamw"),
    ("tensor", "context", "muon"),
    ("tensor-shard", "tensor-shard", "adafactor"),
    ("one", "one", "lamb"),
]
REPRESENTATIVE = {
    ("one", "two", "adamw"),
    ("two", "tensor-shard", "muon"),
    ("zero1", "two", "adafactor"),
    ("pipeline", "one", "adamw"),
}


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        pytest.param(*move, marks=() if move in REPRESENTATIVE else pytest.mark.slow, id="-".join(move))
        for move in MOVES
    ],
)
def test_resumes_in_any_layout(uninterrupted: Trained, tmp_path: Path, before: str, after: str, optimizer: str) -> None:
    whole = uninterrupted(before, optimizer)
    run = resumed(whole, tmp_path / "run", after)
    results = events(run, "resumed")
    assert [(event.step, event.checkpoint) for event in results] == [(KEPT, "train/checkpoints/step-000006")]
    assert results[0].layout_before["ranks"] == LAYOUTS[before][0]
    assert results[0].layout["ranks"] == LAYOUTS[after][0]
    assert [record.step for record in metrics(run)] == list(range(1, END + 1))
    if before == after:
        assert_same_bits(run, whole)
    else:
        assert_equal_up_to_rounding(run, whole)
        state, other = state_at(run, END), state_at(whole, END)
        assert state.keys() == other.keys()
        far = {name: (state[name] - other[name]).norm() / other[name].norm().clamp(min=1e-30) for name in state}
        assert max(value for name, value in far.items() if name.startswith("model.")) < 1e-3
    # The checkpoint is unchanged, so nothing was learned from the steps that had been after it.
    kept, original = state_at(run, KEPT), state_at(whole, KEPT)
    assert all(torch.equal(kept[name], original[name]) for name in kept)


def save_again(setup: TrainingSetup, ranks: Ranks) -> int:
    """Save the state directly after it has been read, instead of training."""
    with ExitStack() as stack:
        run = TrainingRun(setup, ranks, stack, lambda: (False, False))
        run.save()
        run.finish_saves()
    return 0


@contextmanager
def only_saving() -> Iterator[None]:
    with mock.patch("train.pretrain.loop.pretrain", save_again):
        yield


@pytest.mark.parametrize("before", ["two", pytest.param("zero1", marks=pytest.mark.slow), "pipeline"])
def test_what_is_read_in_another_layout_is_what_was_written(
    uninterrupted: Trained, tmp_path: Path, before: str
) -> None:
    """Weights and moments of a checkpoint, read on four ranks of two axes and written again, keep every bit."""
    whole = uninterrupted(before, "adamw")
    run = cut_back(copied(whole, tmp_path / before), KEPT)
    (run / "train/plan.json").unlink()
    ranks, overrides = LAYOUTS["tensor-shard"]
    trained(run, ranks, *overrides, during=[(only_saving, ())])
    assert notes(run)[-1].layout.ranks == ranks
    state, original = state_at(run, KEPT), state_at(whole, KEPT)
    assert state.keys() == original.keys()
    assert [name for name in state if not torch.equal(state[name], original[name])] == []


# -------------------------------------------------------------------------------------- everything that a run remembers

LONG = ("powersgd", "randomk")
"""Cases of the long tests: another one compresses in the same way."""
REMEMBERED: dict[str, tuple[tuple[str, ...], dict[str, dict[str, Any]]]] = {
    "sync": (("layout.data=ddp",), {"checkpoint": {"mode": "sync"}}),
    "fp16": (
        (),
        {
            "train": {"precision": "fp16"},
            "optim": {"initial_loss_scale": 2.0**18, "loss_scale_steps": 4},
            "guard": {"spike_sigmas": 50.0, "spike_window": 8},
        },
    ),
    "plateau-mlm": (
        ("layout.data=zero1",),
        {
            "train": {"objective": "mlm", "eval_every": 1, "precision": "bf16"},
            "optim": {"schedule": "plateau", "plateau_patience": 1, "warmup_steps": 2, "learning_rate": 1e-2},
            "guard": {"patience": 11, "spike_sigmas": 9.0, "spike_window": 8},
        },
    ),
    "powersgd": (("layout.data=ddp", "layout.compress=powersgd", "layout.compress_rank=2"), {}),
    "topk": (
        ("layout.data=ddp", "layout.compress=topk", "layout.compress_share=0.1"),
        {"optim": {"optimizer": "muon"}},
    ),
    "powersgd-hsdp": (("layout.replicate=2", "layout.compress=powersgd"), {"checkpoint": {"mode": "sync"}}),
    "randomk": (("layout.data=ddp", "layout.compress=randomk"), {"train": {"precision": "fp16"}}),
    "stages": (
        ("layout.data=zero2", "layout.micro_batch=1"),
        {
            "train": {
                "steps": None,
                "stages": [{"tokens": 7 * 5 * 32}, {"tokens": 5 * 3 * 64, "seq_len": 64, "global_batch": 3}],
            },
            "optim": {"optimizer": "adafactor", "schedule": "wsd"},
        },
    ),
    "best-fit": (("layout.data=ddp",), {"train": {"packing": "best_fit"}, "optim": {"optimizer": "lamb"}}),
}


def changed(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: RECIPE.get(name, {}) | changes.get(name, {}) for name in {*RECIPE, *changes}}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in REMEMBERED]
)
def test_resumes_bit_exactly_with_everything_that_is_remembered(tmp_path: Path, name: str) -> None:
    overrides, changes = REMEMBERED[name]
    whole = trained(make_run(tmp_path / "whole", changed(changes)), 2, *overrides)
    run = trained(cut_back(copied(whole, tmp_path / "run"), KEPT), 2)
    assert_same_bits(run, whole)
    progress = next(note.progress for note in notes(run) if note.step == KEPT)
    if name == "fp16":
        assert (progress.guard.skipped, progress.finite_steps) == (1, 1)
        assert [record.loss_scale for record in metrics(run)[:KEPT]] == [*[2.0**18] * 4, 2.0**19, 2.0**18]
        assert len(progress.guard.losses) > 0
    if name == "plateau-mlm":
        assert len(progress.heldout) == KEPT
        assert len({record.learning_rate for record in metrics(run)[KEPT:]}) > 1
        assert progress.guard.best_heldout is not None
    if "compress" in "".join(overrides):
        kept = {key: value for key, value in state_at(run, KEPT).items() if key.startswith("compress.")}
        assert {key.split(".")[1] for key in kept} == {"rank-0", "rank-1"}
        assert all(value.any() for key, value in kept.items() if key.endswith((".error", ".right")))


@pytest.mark.parametrize("compress", ["powersgd", pytest.param("topk", marks=pytest.mark.slow)])
def test_what_compression_remembers_is_dropped_in_another_layout_loudly(tmp_path: Path, compress: str) -> None:
    ranks, overrides = 4, ("layout.data=ddp", f"layout.compress={compress}")
    whole = trained(make_run(tmp_path / "whole", RECIPE), 2, *overrides)
    run = cut_back(copied(whole, tmp_path / "run"), KEPT)
    number = sum(key.startswith("compress.") for key in state_at(run, KEPT))
    alone = tiny_runs.train(run, 1)[0].error
    assert f"layout.compress = {compress}: expected at least 2 ranks that exchange gradients, got one rank" in alone
    results = tiny_runs.train(run, ranks)
    assert [item.code for item in results] == [0] * ranks
    assert "in another layout, so gradients are compressed differently (ranks 2, now 4; replicate 2, now 4)" in (
        results[0].out
    )
    text = "was computed in another layout: the compression state stored there is dropped"
    assert f"train/checkpoints/step-000006 {text} ({number} tensors)" in results[0].out
    assert all(text not in item.out for item in results[1:])
    assert [record.step for record in metrics(run)] == list(range(1, END + 1))
    loss, _ = deviations(run, whole)
    assert 0 < loss < 0.05
    assert metrics(run)[KEPT].loss == pytest.approx(metrics(whole)[KEPT].loss, rel=1e-6)


def test_powersgd_begins_with_a_random_factor(tmp_path: Path) -> None:
    changes = RECIPE | {"checkpoint": {"first": True}}
    run = trained(make_run(tmp_path / "run", changes), 2, "layout.data=ddp", "layout.compress=powersgd")
    state = state_at(run, 0)
    rights = {key: value for key, value in state.items() if key.endswith(".right")}
    assert len(rights) > 10
    assert all(value.std() > 0.5 for value in rights.values())
    assert not any(value.any() for key, value in state.items() if key.endswith(".error"))


# ------------------------------------------------------------------------------------------------------------ identity


def test_moved_and_renamed_shards_are_accepted(uninterrupted: Trained, tmp_path: Path) -> None:
    whole = uninterrupted("two", "adamw")
    run = cut_back(copied(whole, tmp_path / "elsewhere"), KEPT)
    folder = next(path for path in (run / "tokens").iterdir())
    moved = folder.rename(folder.with_name("v-moved"))
    text = (moved / "manifest.json").read_text()
    for shard in sorted(moved.glob("web/train/shard-*.arrow")):
        new = shard.with_name(shard.name.replace("shard-", "part-"))
        shard.rename(new)
        text = text.replace(f'"web/train/{shard.name}"', f'"web/train/{new.name}"')
    (moved / "manifest.json").write_text(text)
    store = Store(str(run))
    file = read_run(store)
    write_run(store, file.model_copy(update={"tables": file.tables | {"tokens": "v-moved"}}))
    assert "web/train/part-00000.arrow" in read_run_paths(store)
    assert_same_bits(trained(run, 2), whole)


def read_run_paths(store: Store) -> list[str]:
    return list(open_dataset(store).manifest.paths.values())


def test_another_dataset_tokenizer_or_setting_is_refused_with_both_sides(
    uninterrupted: Trained, tmp_path: Path
) -> None:
    run = cut_back(copied(uninterrupted("two", "adamw"), tmp_path / "run"), KEPT)
    note = notes(run)[-1]
    error = tiny_runs.train(run, 2, "optim.beta2=0.98", 'train.weights={"web"=1, "books"=1}')[0].error
    assert "ContractError: train/checkpoints/step-000006: expected the run that this checkpoint" in error
    assert "optim.beta2: expected 0.95, got 0.98" in error
    assert "train.weights: expected {}, got {'web': 1.0, 'books': 1.0}" in error
    assert "order: expected " not in error  # it follows from the weights
    recipe = read_run(Store(str(run))).recipe
    for name in ("tokens", "tokenizer"):
        shutil.rmtree(run / name)
    (run / "train/plan.json").unlink()
    make_tiny_dataset(run, vocab_size=640)
    write_run(Store(str(run)), read_run(Store(str(run))).model_copy(update={"recipe": recipe}))
    error = tiny_runs.train(run, 2)[0].error
    assert f"dataset: expected {note.identity.dataset}, got {open_dataset(Store(str(run))).digest}" in error
    assert f"tokenizer: expected {note.identity.tokenizer}, got " in error
    assert "shape.vocab_size: expected 512, got 640" in error
    assert notes(run)[-1] == note
