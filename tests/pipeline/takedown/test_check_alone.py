"""The script for third parties: it accepts a true certificate, and finds each change, without any package."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.takedown import check_alone
from schemas.takedown import Certificate
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import certificates, documents_of, opened, take_down


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from which three documents were taken down with proofs."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    make_tiny_dataset(folder)
    documents = [row["doc_id"].hex() for row in documents_of(opened(folder))[4:30:9]]
    assert take_down(folder, doc=documents, prove=True) == 0
    return folder


def run_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a third party does, from a copy, without packages and without the project."""
    script = shutil.copy(check_alone.__file__, folder.parent / "script.py")
    (certificate,) = (path for path in (folder / "takedowns").glob("*.json") if path.stem != "pending")
    command = [sys.executable, "-I", "-S", str(script), str(folder), str(certificate), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)


def test_a_true_certificate(taken: Path) -> None:
    (certificate,) = certificates(taken)
    done = run_script(taken, certificate.seal)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"takedown {certificate.id}: everything that was checked agrees",
        f"seal {certificate.seal}; with proofs",
    ]
    other = run_script(taken, "0" * 64)
    assert other.returncode == 1
    assert "the seal that was published is 000" in other.stdout


def edit(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def reseal(path: Path, change: Callable[[Any], None]) -> None:
    """Change a certificate, and give it a valid seal."""
    edit(path, change)
    path.write_bytes(Certificate.model_validate_json(path.read_bytes()).sealed().to_bytes())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path, str, Path], None], str]] = {
    "a file": (lambda run, own, version: flip(next(version.rglob("*.arrow"))), "another SHA-256"),
    "a short file": (lambda run, own, version: next(version.rglob("*.arrow")).write_bytes(b"x"), "no file of"),
    "the manifest": (
        lambda run, own, version: edit(version / "manifest.json", lambda value: value["content"]["figures"].clear()),
        "the digest of the manifest is",
    ),
    "its counts": (
        lambda run, own, version: edit(
            version / "manifest.json", lambda value: value["content"]["counts"].update(rows_kept=1)
        ),
        "the counts of rows do not add up",
    ),
    "the manifest before": (
        lambda run, own, version: edit(
            run / f"takedowns/{own}/tokens.json", lambda value: value["content"]["files"].pop()
        ),
        "the manifest before has the digest",
    ),
    "the seal": (
        lambda run, own, version: edit(run / f"takedowns/{own}.json", lambda value: value.update(copies_left=9)),
        "the seal in the file is",
    ),
    "a document": (
        lambda run, own, version: reseal(run / f"takedowns/{own}.json", lambda value: value["documents"].pop()),
        "the id is not that of its content",
    ),
    "a root": (
        lambda run, own, version: reseal(
            run / f"takedowns/{own}.json", lambda value: value["membership"].update(after="0" * 64)
        ),
        "no proof that",
    ),
    "no version": (lambda run, own, version: shutil.rmtree(version), "no version v-"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_change_is_found(taken: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(taken, tmp_path / "run")
    (certificate,) = certificates(run)
    damage, message = DAMAGES[name]
    damage(run, certificate.id, run / "tokens" / certificate.tables["tokens"].version_after)
    done = run_script(run)
    assert (done.returncode, done.stderr) == (1, "")
    assert message in done.stdout


def test_no_file_outside_of_a_table_is_read(taken: Path, tmp_path: Path) -> None:
    run = shutil.copytree(taken, tmp_path / "run")
    (certificate,) = certificates(run)
    manifest = run / "tokens" / certificate.tables["tokens"].version_after / "manifest.json"
    edit(manifest, lambda value: value["run"]["paths"].update(dict.fromkeys(value["run"]["paths"], "../../x")))
    done = run_script(run)
    assert (done.returncode, done.stdout) == (1, "")
    assert "a file outside of the table tokens" in done.stderr


def test_no_folder_outside_of_a_table_is_read(taken: Path, tmp_path: Path) -> None:
    run = shutil.copytree(taken, tmp_path / "run")
    (certificate,) = certificates(run)
    edit(run / f"takedowns/{certificate.id}.json", lambda value: value["tables"]["tokens"].update(version_after="../x"))
    assert "with the name of another folder" in run_script(run).stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_proofs_of_the_other_version_are_none(taken: Path, tmp_path: Path, when: str) -> None:
    run = shutil.copytree(taken, tmp_path / "run")
    (certificate,) = certificates(run)
    folder, other = run / "takedowns" / certificate.id, "after" if when == "before" else "before"
    shutil.copy(folder / f"proofs-{other}.jsonl", folder / f"proofs-{when}.jsonl")
    assert f"proofs {when}: no proof that" in run_script(run).stdout


def test_a_proof_that_is_left_out_is_missed(taken: Path, tmp_path: Path) -> None:
    run = shutil.copytree(taken, tmp_path / "run")
    (certificate,) = certificates(run)
    path = run / f"takedowns/{certificate.id}/proofs-after.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert "proofs after: they are for other documents" in run_script(run).stdout


def proofs_of(folder: Path, when: str) -> tuple[Path, list[dict[str, Any]]]:
    (path,) = (folder / "takedowns").glob(f"*/proofs-{when}.jsonl")
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def forge(folder: Path, root: str, change: Callable[[dict[str, Any]], dict[str, Any]], when: str) -> None:
    """State another root after a takedown, with proofs against it that are made of those of a version."""
    (certificate,) = (folder / "takedowns").glob("*.json")
    reseal(certificate, lambda value: value["membership"].update(after=root))
    path, _ = proofs_of(folder, "after")
    path.write_text("".join(json.dumps(change(own)) + "\n" for own in proofs_of(folder, when)[1]))


def test_forged_proofs_of_absence_are_none(taken: Path, tmp_path: Path) -> None:
    """The documents are still in the dataset with the root before, and the empty tree is not that of the dataset."""
    before = certificates(taken)[0].membership
    assert before is not None
    for number, spelled in enumerate(("{}", " {}", "{} ")):

        def changed(own: dict[str, Any], spelled: str = spelled) -> dict[str, Any]:
            return own | {"leaf": [spelled.format(own["leaf"][0].upper()), *own["leaf"][1:]]}

        folder = Path(shutil.copytree(taken, tmp_path / str(number) / "run"))
        forge(folder, before.before, changed, "before")
        done = run_script(folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "not checked: ValueError('wrong hex digits')\n"
    folder = Path(shutil.copytree(taken, tmp_path / "empty" / "run"))
    forge(folder, "0" * 64, lambda own: own | {"leaf": None, "path": []}, "after")
    done = run_script(folder)
    assert done.returncode == 1
    assert "proofs after: the root is not that in the manifest of the dataset" in done.stdout


@pytest.mark.parametrize("kept", [(), ("before",), ("after",)])
def test_a_certificate_without_one_of_the_roots_has_no_proofs(
    taken: Path, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    folder = Path(shutil.copytree(taken, tmp_path / "run"))
    (path,) = (folder / "takedowns").glob("*.json")
    certificate = json.loads(path.read_text())
    certificate["membership"] = {when: certificate["membership"][when] for when in kept}
    del certificate["seal"]
    path.write_text(json.dumps(certificate | {"seal": check_alone.digest_of(certificate)}))
    done = run_script(folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has the roots before and after" in done.stderr


def test_a_certificate_without_its_tables_is_none(taken: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(taken, tmp_path / "run"))
    (certificate,) = (folder / "takedowns").glob("*.json")
    reseal(certificate, lambda value: value.update(tables={}, membership=None))
    done = run_script(folder)
    assert done.returncode == 1
    assert done.stdout.startswith("tokens: no version without the documents, though they had tokens\n")
    assert "which the takedown left as it was" in done.stdout


def test_no_text_of_a_certificate_reaches_the_terminal_as_a_command(taken: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(taken, tmp_path / "run"))
    (certificate,) = (folder / "takedowns").glob("*.json")
    edit(certificate, lambda value: value.update(seal="\x1b[2J\u202e\neverything that was checked agrees"))
    done = run_script(folder)
    assert done.returncode == 1
    assert done.stdout.replace("\n", "").isprintable()
    assert "\neverything" not in done.stdout


@pytest.mark.parametrize("content", ["", "[]", "3", "{}", '{"seal": 1}', "[" * 100_000])
def test_another_file_is_refused_in_one_line(taken: Path, tmp_path: Path, content: str) -> None:
    run = shutil.copytree(taken, tmp_path / "run")
    (certificate,) = certificates(run)
    (run / f"takedowns/{certificate.id}.json").write_text(content)
    done = run_script(run)
    assert done.returncode == 1
    assert done.stderr.startswith("not checked: ")
    assert len(done.stderr.splitlines()) == 1
