"""`penstock plan` on the datasets of several runs: plan, training, trace, lineage, and a takedown from one of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jobs.cli import main
from jobs.verbs import plan as plan_verb
from schemas.errors import ConfigError
from schemas.locks import lock_tables, lock_training
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import RECIPE, metrics
from train.parallel.ranks import open_ranks
from train.plan.plan import read_plan
from train.pretrain.loop import train

STEPS = 8


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs and the folder of a third, not made yet."""
    recipe = {name: dict(section) for name, section in RECIPE.items()} | {"source": {"paths": ["x"]}}
    recipe["train"] |= {"steps": STEPS, "weights": {"web": 1, "books": 1, "news": 2}}
    for name, sources in (("first", {"web": 60, "books": 20}), ("second", {"web": 40, "news": 30})):
        run = make_tiny_dataset(tmp_path / name, sources, suffix=name)
        write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    return [tmp_path / name for name in ("first", "second", "next")]


def plan(runs: list[Path], *more: str) -> int:
    first, second, following = map(str, runs)
    return main(["plan", following, "--dataset", first, "--dataset", second, *more])


def answers(capsys: pytest.CaptureFixture[str], *command: str) -> dict:
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_training_on_the_datasets_of_two_runs(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(runs, "--dry-run") == 0
    assert not runs[2].exists()
    assert plan(runs) == 0
    assert "union of first (" in (printed := capsys.readouterr().err)
    assert "no document is in two of them" in printed
    union = open_dataset(Store(str(runs[2])))
    assert read_plan(Store(str(runs[2]))).dataset == union.digest
    assert plan(runs, "--quiet") == 0  # again: the same dataset
    assert plan([runs[1], runs[0], runs[2]]) == 2
    assert "expected a new run folder or one on dataset" in capsys.readouterr().err
    with open_ranks() as ranks:
        assert train(Store(str(runs[2])), [], ranks) == 0
    seen = [line.source_tokens for line in metrics(runs[2])]
    total = {name: sum(line.get(name, 0) for line in seen) for name in ("web", "books", "news")}
    assert total["news"] == total["web"] + total["books"]
    step = answers(capsys, "trace", str(runs[2]), "--step", "3")
    splits = {part["split"] for part in step["parts"]}
    assert splits <= {f"{name}.warc.gz" for name in ("webfirst", "booksfirst", "websecond", "newssecond")}
    assert len(splits) > 1
    assert main(["verify", str(runs[2])]) == 0


def test_lineage_and_trace_lead_to_each_member(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(runs, "--quiet") == 0
    capsys.readouterr()
    assert main(["lineage", str(runs[2])]) == 0
    text = capsys.readouterr().out
    for run in runs:
        assert open_dataset(Store(str(run))).digest[:12] in text
    found = [
        answers(capsys, "trace", str(runs[2]), "--url", f"http://www.site2.co.uk/{name}/2?q=1")
        for name in ("news", "books", "web")
    ]
    assert [{document["split"] for document in each["documents"]} for each in found] == [
        {"newssecond.warc.gz"},
        {"booksfirst.warc.gz"},
        {"webfirst.warc.gz", "websecond.warc.gz"},
    ]


def test_a_takedown_from_a_member(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(runs, "--quiet") == 0
    assert main(["takedown", str(runs[2]), "--url", "http://www.site2.co.uk/news/2?q=1"]) == 2
    assert "got a union of the datasets of" in capsys.readouterr().err
    assert main(["takedown", str(runs[1]), "--url", "http://www.site2.co.uk/news/2?q=1"]) == 0
    capsys.readouterr()
    assert main(["trace", str(runs[2]), "--step", "1"]) == 2
    assert "got a version that takedown" in capsys.readouterr().err
    following = runs[2].with_name("after")
    assert plan([*runs[:2], following], "--quiet") == 0
    before = answers(capsys, "trace", str(following), "--url", "http://www.site3.co.uk/news/3?q=1")
    assert before["num_documents"] == 1
    assert main(["trace", str(following), "--url", "http://www.site2.co.uk/news/2?q=1"]) == 1  # no such document


# ------------------------------------------------------------------------------------ two processes and one new folder


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def while_planning(act: Callable[[], None]) -> Any:
    """Run `act` once in the middle of planning, when another process may do the same."""
    choose, acts = plan_verb.choose_layout, [act]

    def choosing(plan: Any) -> Any:
        if acts:
            acts.pop()()
        return choose(plan)

    return mock.patch.object(plan_verb, "choose_layout", choosing)


def test_a_plan_that_fails_leaves_the_folder_that_another_process_has_made(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The other process wins the race for the lock after this one has looked at the folder."""
    wait, kept = plan_verb._make_folder, dict[Path, bytes]()

    def late(run: Store) -> list[Path]:
        new = wait(run)
        assert plan(runs, "--quiet") == 0  # the other process
        (runs[2] / "train/checkpoints").mkdir()
        (runs[2] / "train/checkpoints/state").write_bytes(b"state")
        kept.update(files_of(runs[2]))
        return new

    with mock.patch.object(plan_verb, "_make_folder") as made:
        made.side_effect = lambda run: late(run) if made.call_count == 1 else wait(run)
        assert plan(runs, "--set", "train.seq_len=100000") == 2
    assert "train.seq_len" in capsys.readouterr().err
    assert files_of(runs[2]) == kept
    assert kept


def test_a_new_folder_is_locked_from_the_beginning(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    codes = []
    with while_planning(lambda: codes.append(plan(runs, "--quiet"))):
        assert plan(runs, "--quiet") == 0
    assert codes == [2]
    error = capsys.readouterr().err
    assert f"{runs[2]}/train.lock: expected a free lock for `penstock plan`, got one held by `penstock plan`" in error
    assert read_plan(Store(str(runs[2]))).dataset == open_dataset(Store(str(runs[2]))).digest


@pytest.mark.parametrize("error", [ConfigError("wrong"), KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("before", [None, "notes.txt", "train/notes.txt"])
def test_a_failed_plan_of_a_new_folder_leaves_what_was_there(
    runs: list[Path], before: str | None, error: BaseException
) -> None:
    deep = runs[2] / "a/b"
    if before:
        (deep / before).parent.mkdir(parents=True)
        (deep / before).write_text("mine")

    def fail() -> None:
        assert (deep / "run.json").exists()
        assert (deep / "tokens").exists()
        raise error

    with while_planning(fail):
        assert plan([*runs[:2], deep], "--set", "train.packing='best_fit'") in (2, 130)
    assert [path for path in runs[2].rglob("*") if path.is_file()] == ([deep / before] if before else [])
    assert runs[2].exists() == bool(before)


def test_a_plan_waits_for_nobody(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """It names who trains in the folder, or who changes the tables that it would use."""
    assert plan(runs, "--quiet") == 0
    before = files_of(runs[2])
    with lock_training(Store(str(runs[2])), "penstock train"):
        assert plan(runs, "--quiet", "--set", "train.seed=4") == 2
    assert "train.lock: expected a free lock for `penstock plan`, got one held by `penstock train`" in (
        capsys.readouterr().err
    )
    new = runs[2].with_name("new")
    with lock_tables(Store(str(runs[1])), "penstock takedown"):
        assert plan([*runs[:2], new], "--quiet") == 2
    assert "second/tables.lock: expected a free lock for `penstock plan`, got one held by `penstock takedown`" in (
        capsys.readouterr().err
    )
    assert (files_of(runs[2]), new.exists()) == (before, False)


def test_the_plan_of_a_run_that_is_trained_is_printed(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(runs[0]), "--quiet", "--set", "train.weights={}"]) == 0  # on its own tables
    with open_ranks() as ranks:
        assert train(Store(str(runs[0])), [], ranks) == 0
    capsys.readouterr()
    with lock_training(Store(str(runs[0])), "penstock train"):
        assert main(["plan", str(runs[0])]) == 0
    assert "plan kept, because the run has checkpoints" in capsys.readouterr().out


def test_a_plan_of_a_trained_run_keeps_what_training_has_set(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(runs[0]), "--quiet", "--set", "train.weights={}"]) == 0
    (runs[0] / "train/own.txt").write_text("")
    kept = ["checkpoint.keep=9", "train.log_every=3", 'train.skip_file="own.txt"']
    with open_ranks() as ranks:
        assert train(Store(str(runs[0])), kept, ranks) == 0
    assert main(["plan", str(runs[0]), "--quiet", "--set", "plan.world_sizes=[1,2]"]) == 0
    settings = read_plan(Store(str(runs[0]))).settings
    assert (settings.checkpoint.keep, settings.train.log_every, settings.train.skip_file) == (9, 3, "own.txt")
    assert settings.plan.world_sizes == (1, 2)


def test_a_setting_of_the_data_is_not_ignored(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "tokens.chunk_tokens=64", "--unset", "quality.min_words", "--set", "train.weights={}"]
    assert main(["plan", str(runs[0]), "--dry-run", *given]) == 2
    shown = capsys.readouterr().err
    assert "got tokens.chunk_tokens=64, quality.min_words. Give settings of the data to `penstock run`" in shown
    assert main(["plan", str(runs[0]), "--dry-run", "--set", "trian.steps=1"]) == 2
    assert "no such section (did you mean 'train'?)" in capsys.readouterr().err


def test_a_misspelled_folder_is_neither_made_nor_locked(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(runs[0].with_name("firts"))]) == 2
    assert "expected a run folder, got no such folder (did you mean" in capsys.readouterr().err
    assert not runs[0].with_name("firts").exists()
