"""The erasure of weights that have read removed documents: none of their bytes are left, and a record says so."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.erasure import erasures_of
from schemas.storage import Store
from tests.support.paths import ROOT
from tests.support.tiny_runs import copied, make_run, notes, opened, trained
from tests.support.tiny_takedown import certificates, documents_of, spans_of, take_down
from tests.support.tiny_takedown import opened as dataset_of
from train.erase import find_replaced
from train.takedown_replay import REPLACED, begin_replay, steps_with_documents

CHECKER = ROOT / "pipeline/takedown/check_alone.py"


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """A trained run with checkpoints of steps 2, 4, 6 and 8."""
    changes = {"train": {"steps": 8}, "checkpoint": {"every": 2, "keep": 9}}
    return trained(make_run(tmp_path_factory.mktemp("old") / "run", changes), 1)


@pytest.fixture(scope="module")
def document(old: Path) -> str:
    """A document that the run first reads in step 5 or 6."""
    order = opened(old).order
    rows = [row for row in documents_of(dataset_of(old)) if row["stream"].endswith("/train")]
    steps = {row["doc_id"].hex(): steps_with_documents(order, spans_of([row])) for row in rows}
    return next(own for own, read in steps.items() if read and read[0] in (5, 6))


def state_files(folder: Path, steps: tuple[int, ...]) -> dict[str, Path]:
    """Return the state files of checkpoints by SHA-256."""
    own = [note for note in notes(folder) if note.step in steps]
    return {file.sha256: folder / note.name / name for note in own for name, file in note.files.items()}


def digests_in(folder: Path) -> set[str]:
    """Return the SHA-256 of every file of a run."""
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def check_alone(folder: Path, identifier: str) -> subprocess.CompletedProcess[str]:
    """Run the checker that needs the standard library only."""
    command = [sys.executable, str(CHECKER), str(folder), str(folder / f"takedowns/{identifier}.json")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_after_a_replay_no_byte_of_the_replaced_weights_is_left(old, document, tmp_path, capsys):
    run = copied(old, tmp_path / "run")
    dirty, clean = state_files(run, (6, 8)), state_files(run, (2, 4))
    assert dirty.keys() <= digests_in(run)
    assert take_down(run, doc=[document]) == 0
    assert begin_replay(Store(str(run)), "clean").from_step == 4
    identifier = certificates(run)[0].id
    weights = max((run / REPLACED).rglob("__0_0.distcp"), key=lambda path: path.parent.name)
    half = run / REPLACED / "0123456789ab/step-000008"
    half.mkdir(parents=True)
    shutil.copy(weights, half)  # as after a kill, without its metadata
    capsys.readouterr()
    assert take_down(run, erase_replaced=True, dry_run=True) == 0
    assert "3 checkpoint(s)" in capsys.readouterr().out
    assert dirty.keys() <= digests_in(run)
    assert take_down(run, erase_replaced=True) == 0
    assert "3 checkpoint(s)" in capsys.readouterr().out
    assert not dirty.keys() & digests_in(run)
    assert clean.keys() <= digests_in(run)
    assert not (run / REPLACED).exists()
    [(name, record)] = erasures_of(Store(str(run)), identifier)
    assert {file.sha256 for own in record.checkpoints for file in own.files} == dirty.keys()
    assert sorted(own.step or 0 for own in record.checkpoints) == [0, 6, 8]
    assert take_down(run, check=f"takedowns/{identifier}.json") == 0
    assert f"note: {name}: 3 checkpoint(s)" in capsys.readouterr().out
    assert check_alone(run, identifier).returncode == 0
    assert take_down(run, erase_replaced=True) == 0
    assert len([*erasures_of(Store(str(run)), identifier)]) == 1  # nothing was left to record

    back = state_files(old, (8,))
    shutil.copy(next(path for path in back.values() if path.name == "__0_0.distcp"), run / "train/forgotten")
    assert take_down(run, check=f"takedowns/{identifier}.json") == 1
    assert "got 1 file(s) of them, such as train/forgotten" in capsys.readouterr().out
    alone = check_alone(run, identifier)
    assert (alone.returncode, "train/forgotten: weights that were erased" in alone.stdout) == (1, True)


def test_with_a_takedown_the_checkpoints_that_have_read_the_documents_are_erased_at_once(old, document, tmp_path):
    run = copied(old, tmp_path / "run")
    dirty, clean = state_files(run, (6, 8)), state_files(run, (2, 4))
    assert take_down(run, doc=[document], erase_replaced=True) == 0
    assert not dirty.keys() & digests_in(run)
    assert [note.step for note in notes(run)] == [2, 4]
    assert clean.keys() <= digests_in(run)
    [(_, record)] = erasures_of(Store(str(run)), certificates(run)[0].id)
    assert [own.checkpoint for own in record.checkpoints] == [
        "train/checkpoints/step-000006",
        "train/checkpoints/step-000008",
    ]
    assert begin_replay(Store(str(run)), "clean").set_aside == []


def test_weights_that_training_writes_again_without_the_documents_are_not_recorded(old, document, tmp_path, capsys):
    """The first steps have no removed document, so their weights are the same bytes before and after a replay."""
    run = copied(old, tmp_path / "run")
    dirty, clean = state_files(run, (6, 8)), state_files(run, (2, 4))
    assert take_down(run, doc=[document]) == 0
    assert begin_replay(Store(str(run)), "0").from_step == 0
    trained(run, 1)
    assert len(state_files(run, (2, 4)).keys() & clean.keys()) == 2  # the tensors; the metadata of a save has its id
    capsys.readouterr()
    assert take_down(run, erase_replaced=True) == 0
    assert "4 checkpoint(s)" in capsys.readouterr().out
    assert not (run / REPLACED).exists()
    identifier = certificates(run)[0].id
    [(_, record)] = erasures_of(Store(str(run)), identifier)
    assert {file.sha256 for own in record.checkpoints for file in own.files} == dirty.keys()
    assert take_down(run, check=f"takedowns/{identifier}.json") == 0
    assert check_alone(run, identifier).returncode == 0


def test_a_replaced_checkpoint_is_recorded_for_a_takedown_before_its_dataset(old, document, tmp_path):
    """Training resumed from weights that had read the first document, so all later ones have read it too."""
    run = copied(old, tmp_path / "run")
    assert take_down(run, doc=[document]) == 0
    (first,) = [own.id for own in certificates(run)]
    begin_replay(Store(str(run)), "6")
    trained(run, 1)
    other = next(row["doc_id"].hex() for row in documents_of(dataset_of(run)) if row["stream"].endswith("/heldout"))
    assert take_down(run, doc=[other]) == 0
    (second,) = {own.id for own in certificates(run)} - {first}
    assert begin_replay(Store(str(run)), "clean").from_step == 4
    found = find_replaced(Store(str(run)))
    assert [own.step for own in found[first]] == [8, 6, 8]  # of the first training, and of that on each dataset
    assert second not in found


def test_a_changed_record_is_found(old, document, tmp_path, capsys):
    run = copied(old, tmp_path / "run")
    assert take_down(run, doc=[document], erase_replaced=True) == 0
    identifier = certificates(run)[0].id
    [(name, _)] = erasures_of(Store(str(run)), identifier)
    (run / name).write_text((run / name).read_text().replace('"step":8', '"step":4'))
    assert take_down(run, check=f"takedowns/{identifier}.json") == 1
    assert "expected the record of an erasure with its seal" in capsys.readouterr().out
    assert check_alone(run, identifier).returncode == 1


def test_a_run_without_takedowns_has_nothing_to_erase(old, tmp_path, capsys):
    run = copied(old, tmp_path / "run")
    assert take_down(run, erase_replaced=True) == 0
    assert "0 checkpoint(s), 0 bytes, were erased" in capsys.readouterr().out
    assert [note.step for note in notes(run)] == [2, 4, 6, 8]
