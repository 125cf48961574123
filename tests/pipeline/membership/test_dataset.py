"""The root of a dataset from its shards, the proofs of a takedown, and the script that checks them on its own."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.cli import main
from pipeline.membership import dataset as membership
from pipeline.membership.dataset import prove_documents
from pipeline.membership.tree import Leaf, build_tree
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.takedown import MEMBERSHIP, Certificate, MembershipRoots
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import certificates, documents_of, opened, take_down

ABSENT = "ab" * 16


def leaf_of(row: dict) -> Leaf:
    """The leaf of a document, computed from its row: SHA-256 of its stream, a zero byte and its tokens."""
    tokens = np.array(row["tokens"], np.uint16).tobytes()
    return Leaf(row["doc_id"], (hashlib.sha256(row["stream"].encode() + b"\0" + tokens).digest(),))


def root_of(folder: Path) -> str:
    dataset = opened(folder)
    return prove_documents(dataset.folder, dataset.streams, ())[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_tiny_dataset(tmp_path / "run", {"web": 60, "books": 20})
    return tmp_path / "run"


@pytest.fixture
def checker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["prove", "--checker"]) == 0
    (tmp_path / "alone").mkdir()
    script = tmp_path / "alone/check_proof.py"
    script.write_text(capsys.readouterr().out)
    return script


def check(script: Path, *words: str) -> tuple[int, str]:
    """Run the script without our packages, and return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), *words], capture_output=True, text=True, cwd=script.parent, env={}
    )
    return done.returncode, done.stdout + done.stderr


def test_the_root_is_that_of_the_leaves_of_all_documents(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = sorted(leaf_of(row) for row in documents_of(opened(run)))
    expected = build_tree(lambda _: leaves, 0)[0].hex()
    assert root_of(run) == expected
    monkeypatch.setattr(membership, "DOCUMENTS_PER_BUCKET", 7)  # 4 bits: 16 buckets
    assert root_of(run) == expected


def test_the_script_has_at_most_fifty_lines_and_imports_the_standard_library(checker: Path) -> None:
    lines = checker.read_text().splitlines()
    assert len(lines) <= 50
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names


def test_a_person_proves_and_checks(run: Path, checker: Path, tmp_path: Path, capsys) -> None:
    document, file = documents_of(opened(run))[8]["doc_id"].hex(), str(tmp_path / "proofs.jsonl")
    assert main(["prove", str(run), "--doc", document[:12], "--doc", ABSENT, "--out", file]) == 0
    out, root = capsys.readouterr().out, root_of(run)
    assert f"root {root}\n" in out
    assert f"  {document}  present, " in out
    assert f"  {ABSENT}  absent, " in out
    assert check(checker, file, root, document) == (0, f"{document} present\n")
    assert check(checker, file, root, ABSENT) == (0, f"{ABSENT} absent\n")
    assert check(checker, file, "11" * 32, document) == (1, "not proven: another root\n")
    assert check(checker, file, root, "cd" * 16) == (1, "no proof of this document\n")
    assert check(checker, str(tmp_path / "none"), root, document)[0] == 1
    lines = Path(file).read_text().splitlines()
    for line in lines:
        proof = json.loads(line)
        Path(file).write_text(json.dumps(proof | {"leaf": None}))
        assert check(checker, file, root, proof["doc_id"]) == (1, "not proven: another root\n")
    Path(file).write_text("{")
    assert check(checker, file, root, document)[0] == 1


def test_a_url_names_its_documents(run: Path, capsys) -> None:
    row = documents_of(opened(run))[8]
    assert main(["prove", str(run), "--url", row["url"]]) == 0
    assert f"  {row['doc_id'].hex()}  present, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "prove: expected a run with --doc or --url, got none"),
        ([], "prove: expected a run with --doc or --url, got none"),
        (["RUN", "--checker", "--doc", ABSENT], "prove --checker: expected no other argument, got RUN, --doc"),
        (["RUN", "--doc", "zz"], "--doc: expected a document id of 12 to 32 hex digits, got 'zz'"),
    ],
)
def test_wrong_arguments(run: Path, words: list[str], message: str, capsys) -> None:
    assert main(["prove", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("compact", [False, True])
def test_a_takedown_proves_presence_before_and_absence_after(run: Path, checker: Path, compact: bool) -> None:
    before, removed = root_of(run), [documents_of(opened(run))[row]["doc_id"].hex() for row in (8, 9, 40)]
    assert take_down(run, doc=removed, compact=compact, prove=True) == 0
    (certificate,) = certificates(run)
    after = root_of(run)  # computed again, from the rewritten shards
    assert certificate.membership == MembershipRoots(before=before, after=after)
    assert before != after
    assert open_table(Store(str(run)), "tokens")[1].content.figures[MEMBERSHIP] == after
    files = {when: str(run / f"takedowns/{certificate.id}/proofs-{when}.jsonl") for when in ("before", "after")}
    for document in removed:
        assert check(checker, files["before"], before, document) == (0, f"{document} present\n")
        assert check(checker, files["after"], after, document) == (0, f"{document} absent\n")
        assert check(checker, files["before"], after, document)[0] == 1
        assert check(checker, files["after"], before, document)[0] == 1
    assert take_down(run, check=f"takedowns/{certificate.id}.json") == 0


def test_a_later_takedown_without_proofs_has_no_root(run: Path, capsys) -> None:
    first, second = (documents_of(opened(run))[row]["doc_id"].hex() for row in (8, 30))
    assert take_down(run, doc=[first], prove=True) == 0
    (earlier,) = certificates(run)
    assert take_down(run, doc=[second]) == 0
    assert MEMBERSHIP not in open_table(Store(str(run)), "tokens")[1].content.figures
    assert [own.membership for own in certificates(run) if own.id != earlier.id] == [None]
    assert take_down(run, check=f"takedowns/{earlier.id}.json") == 0  # its proofs are still checked


def test_the_check_reports_wrong_roots_and_proofs(run: Path, tmp_path: Path, capsys) -> None:
    removed = documents_of(opened(run))[8]["doc_id"].hex()
    assert take_down(run, doc=[removed], prove=True) == 0
    (certificate,) = certificates(run)
    name, folder = f"takedowns/{certificate.id}.json", run / f"takedowns/{certificate.id}"
    old, new = ((folder / f"proofs-{when}.jsonl").read_bytes() for when in ("before", "after"))
    for content in (new, b"", b"[]\n", b"{}\n", old + old, b"[" * 100_000):
        (folder / "proofs-before.jsonl").write_bytes(content)
        assert take_down(run, check=name) == 1
        assert f"FAILED: takedowns/{certificate.id}/proofs-before.jsonl: expected" in capsys.readouterr().out
    (folder / "proofs-before.jsonl").unlink()
    assert take_down(run, check=name) == 0
    assert "proofs-before.jsonl is absent, so the proofs in it were not checked" in capsys.readouterr().out
    forged = certificate.model_copy(
        update={"membership": certificate.membership.model_copy(update={"after": "11" * 32})}
    )
    (run / name).write_bytes(Certificate.sealed(forged).to_bytes())
    assert take_down(run, check=name) == 1
    assert f"FAILED: tokens: expected Merkle root {'11' * 32}, got {root_of(run)}" in capsys.readouterr().out
