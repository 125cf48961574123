"""The order of samples that is read after training is the one that the checkpoints were trained in, or an error."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.cli import main
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks
from schemas.storage import Store
from tests.support.tiny_runs import copied, make_run, notes, opened, trained
from tests.support.tiny_takedown import take_down
from train.checkpoint.folder import check_trained_order
from train.export.torch_dataset import SampleDataset

RECIPE = {
    "source": {"paths": ["x"]},
    "train": {"steps": 8, "eval_every": 0, "eval_sequences": None},
    "guard": {"on_spike": "rewind", "spike_sigmas": 90.0},
    "checkpoint": {"every": 4, "keep": 9},
}
URL = "http://www.site3.co.uk/web/3?q=1"
READERS: dict[str, Callable[[Path], int]] = {
    "trace --step": lambda run: main(["trace", str(run), "--step", "3", "--brief"]),
    "trace --url": lambda run: main(["trace", str(run), "--url", URL, "--brief"]),
    "takedown": lambda run: main(["takedown", str(run), "--url", URL, "--dry-run"]),
    "lineage": lambda run: main(["lineage", str(run), "--verify"]),
}
"""The verbs that read the order of samples of a trained run."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with an empty skip list."""
    return trained(make_run(tmp_path_factory.mktemp("plain") / "run", RECIPE), 1)


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained without three samples."""
    run = make_run(tmp_path_factory.mktemp("skipping") / "run", RECIPE)
    (run / "train").mkdir()
    (run / "train/skips.txt").write_text("3\n4\n17\n")
    return trained(run, 1)


def refused(read: Callable[[Path], int], run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a verb, which must be one line."""
    capsys.readouterr()
    assert read(run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("verb", READERS)
def test_the_order_of_a_trained_run_is_read(plain: Path, skipping: Path, verb: str) -> None:
    assert READERS[verb](plain) == 0
    assert READERS[verb](skipping) == 0


@pytest.mark.parametrize("verb", READERS)
def test_samples_added_to_the_skip_list_after_training_are_refused(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    run = copied(plain, tmp_path / "run")
    (run / "train/skips.txt").write_text("0\n1\n2\n3\n4\n")
    error = refused(READERS[verb], run, capsys)
    assert "skip list: expected new entries from sample 40 on, got [0, 1, 2, 3, 4]" in error
    (run / "train/skips.txt").write_text("40\n41\n")  # not used yet, so training would continue with this list
    assert READERS[verb](run) == 0


@pytest.mark.parametrize("verb", [verb for verb in READERS if verb != "lineage"])
@pytest.mark.parametrize(("left", "number"), [(None, 0), ("", 0), ("3\n4\n", 2), ("4\n3\n17\n", 3)])
def test_a_lost_or_changed_skip_list_is_refused(
    skipping: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, left: str | None, number: int
) -> None:
    run = copied(skipping, tmp_path / "run")
    path = run / "train/skips.txt"
    path.unlink() if left is None else path.write_text(left)
    digest = notes(run)[-1].identity.skip_list[:12]
    error = refused(READERS[verb], run, capsys)
    assert f"skip list: expected the checkpoint's 3 entries with digest {digest} first, got {number} entries" in error
    assert main(["lineage", str(run), "--verify"]) == 2
    assert f"expected a skip list {digest} of 3" in capsys.readouterr().err


@pytest.mark.parametrize("verb", READERS)
def test_a_plan_with_another_order_than_the_checkpoints_is_refused(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    run, other = copied(plain, tmp_path / "run"), copied(plain, tmp_path / "other")
    shutil.rmtree(other / "train/checkpoints")
    for change, words in (
        ("train.seed=5", "train.seed 5 in place of 0"),
        ("train.global_batch=4", "train.global_batch 4 in place of 5"),
    ):
        assert main(["plan", str(other), "--quiet", "--set", change]) == 0
        assert READERS[verb](other) == 0  # without checkpoints, every plan is as good
        shutil.copy(other / "train/plan.json", run / "train/plan.json")
        error = refused(READERS[verb], run, capsys)
        assert "expected the plan that train/checkpoints/step-000008 was trained with, got one with" in error
        assert words in error
        shutil.copy(plain / "train/plan.json", other / "train/plan.json")


def test_a_plan_that_differs_in_the_learning_rate_has_the_same_order(plain: Path, tmp_path: Path) -> None:
    run, other = copied(plain, tmp_path / "run"), copied(plain, tmp_path / "other")
    shutil.rmtree(other / "train/checkpoints")
    assert main(["plan", str(other), "--quiet", "--set", "optim.learning_rate=0.02"]) == 0
    shutil.copy(other / "train/plan.json", run / "train/plan.json")
    check_trained_order(Store(str(run)))


@pytest.fixture(scope="module")
def faster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the same dataset as `plain`, trained with another learning rate."""
    recipe = {**RECIPE, "optim": {"learning_rate": 0.02}}
    return trained(make_run(tmp_path_factory.mktemp("faster") / "run", recipe), 1)


USERS: dict[str, Callable[[Path, Path], int]] = {
    "generate": lambda run, out: main(["generate", str(run), "--tokens", "2"]),
    "evaluate": lambda run, out: main(["evaluate", str(run), "--on", str(run), "--sequences", "1"]),
    "export": lambda run, out: main(["export", str(run), "--format", "huggingface", "--out", str(out)]),
}
"""The verbs that use the weights of a trained run."""


@pytest.mark.parametrize("verb", USERS)
def test_weights_trained_with_another_plan_are_refused(
    plain: Path, faster: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    assert USERS[verb](faster, tmp_path / "first") == 0
    run = copied(plain, tmp_path / "run")
    shutil.rmtree(run / "train/checkpoints")
    shutil.copytree(faster / "train/checkpoints", run / "train/checkpoints")
    error = refused(lambda run: USERS[verb](run, tmp_path / "second"), run, capfd)
    assert "expected the plan that train/checkpoints/step-000008 was trained with, got one with optim." in error
    assert error.endswith("in place of 0.02. Restore the file or the checkpoint from a backup.")
    (run / "train/plan.json").unlink()
    assert USERS[verb](run, tmp_path / "third") == 0  # nothing is left to compare with


def test_the_report_finds_weights_trained_with_another_plan(plain: Path, faster: Path, tmp_path: Path) -> None:
    claims = {f"checkpoint of step {step} was trained with this plan" for step in (4, 8)}
    for checkpoints, equal in ((plain, True), (faster, False)):
        run = copied(plain, tmp_path / checkpoints.parent.name)
        shutil.rmtree(run / "train/checkpoints")
        shutil.copytree(checkpoints / "train/checkpoints", run / "train/checkpoints")
        found = {check.claim: check.holds for check in checks(collect_facts(Store(str(run))))}
        assert {claim: found[claim] for claim in claims} == dict.fromkeys(claims, equal)


def test_the_samples_for_other_trainers_are_those_of_the_checkpoints(plain: Path, tmp_path: Path) -> None:
    run = copied(plain, tmp_path / "run")
    assert len(SampleDataset(str(run))) == opened(run).order.stages[0].num_samples
    (run / "train/skips.txt").write_text("0\n")
    with pytest.raises(Exception, match="expected new entries from sample 40 on"):
        len(SampleDataset(str(run)))


def test_a_takedown_of_a_run_with_another_skip_list_removes_nothing(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(plain, tmp_path / "run")
    (run / "train/skips.txt").write_text("0\n1\n2\n3\n4\n")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(Exception, match="expected new entries from sample 40 on"):
        take_down(run, url=[URL])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
