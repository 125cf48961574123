"""Training writes and deletes nothing through a symbolic link that leads out of the run folder."""

import os
import shutil
from pathlib import Path

import pytest

from jobs.cli import main
from schemas.errors import ContractError
from schemas.storage import Store
from tests.support.tiny_runs import copied, make_run, notes, train, trained
from train.checkpoint.folder import keep_newest, remove_checkpoint, remove_incomplete
from train.config.train import CheckpointConfig
from train.takedown_replay import begin_replay

RECIPE = {
    "source": {"paths": ["x"]},
    "train": {"steps": 4, "eval_every": 0, "eval_sequences": None},
    "checkpoint": {"every": 1, "keep": 2},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained run."""
    return make_run(tmp_path_factory.mktemp("plain") / "run", RECIPE)


@pytest.fixture
def run(plain: Path, tmp_path: Path) -> Path:
    return copied(plain, tmp_path / "run")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user with what the cleaning of a run looks for."""
    folder = tmp_path / "elsewhere"
    for name in ("step-001000/model.safetensors", "step-000001/__0_0.distcp", "download.partial", "plan.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of the user")
    return folder


def all_files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


LINKS = (
    "train",
    "train/checkpoints",
    "train/checkpoints/step-000001",
    "train/packing",
    "train/replaced",
    "train/new/a",
)


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_run_is_refused_and_nothing_is_deleted(
    run: Path, elsewhere: Path, name: str, absolute: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    target = str(elsewhere) if absolute else os.path.relpath(elsewhere, (run / name).parent)
    (run / name).symlink_to(target)
    before, own = all_files(elsewhere), sorted(run.rglob("*"))
    expected = f"{run / name}: expected a folder of the run to write to and delete from, got a symbolic link to "
    expected += f"{elsewhere}. Replace the link by the folder, or mount the other disk in its place."
    for words in (["plan", str(run)], ["train", str(run)], ["train", str(run), "--replay-from", "clean"]):
        assert main(words) == 2
        assert expected in (error := capsys.readouterr().err)
        assert error.count("\n") == 1
    for act in (
        lambda: remove_incomplete(Store(str(run))),
        lambda: begin_replay(Store(str(run)), "clean"),
    ):
        with pytest.raises(ContractError, match="got a symbolic link to"):
            act()
    (item,) = train(run, 1)  # as `penstock-rank` starts it
    assert expected in item.error
    assert (all_files(elsewhere), sorted(run.rglob("*"))) == (before, own)


@pytest.mark.parametrize("name", ["train", "train/checkpoints"])
def test_retention_removes_no_checkpoint_behind_a_link(run: Path, tmp_path: Path, name: str) -> None:
    trained(run, 1)
    (run / name).rename(tmp_path / "away")
    (run / name).symlink_to(tmp_path / "away")
    before = sorted((tmp_path / "away").rglob("*"))
    store = Store(str(run))
    with pytest.raises(ContractError, match="where a symbolic link leads"):
        remove_checkpoint(store, 4)
    with pytest.raises(ContractError, match="where a symbolic link leads"):
        keep_newest(store, CheckpointConfig(keep=1))
    assert sorted((tmp_path / "away").rglob("*")) == before


def test_verified_files_are_not_recorded_behind_a_link(
    run: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "train").symlink_to(elsewhere)
    (elsewhere / "plan.json").unlink()
    before = all_files(elsewhere)
    assert main(["verify", str(run)]) == 2
    assert "got a symbolic link to" in capsys.readouterr().err
    assert all_files(elsewhere) == before


def test_links_that_stay_in_the_run_and_a_link_to_the_run_are_followed(run: Path, tmp_path: Path) -> None:
    (run / "train").mkdir()
    (run / "large").mkdir()
    (run / "train/checkpoints").symlink_to("../large")
    (run / "train/back").symlink_to("..")  # a circle
    (tmp_path / "name").symlink_to(run)
    assert main(["plan", str(tmp_path / "name"), "--quiet"]) == 0
    trained(tmp_path / "name", 1)
    assert [note.step for note in notes(run)] == [3, 4]
    assert sorted(path.name for path in (run / "large").iterdir()) == ["step-000003", "step-000004"]
    shutil.rmtree(run / "large/step-000004")
    (run / "large/step-000004").mkdir()
    assert remove_incomplete(Store(str(tmp_path / "name"))) == ["step-000004"]
