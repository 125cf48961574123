"""The root of a dataset from its shards, the proofs of a takedown, and the script that checks them on its own."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jobs.cli import main
from pipeline.membership import dataset as membership
from pipeline.membership.dataset import prove_documents
from pipeline.membership.index import membership_figures
from pipeline.membership.tree import EMPTY, Leaf, Subtree, build_tree
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.takedown import Certificate, MembershipRoots
from schemas.tokens import MEMBERS, MEMBERSHIP, MEMBERSHIP_PARTS, by_id_key
from schemas.union import write_union
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


def test_every_takedown_has_a_root(run: Path, capsys) -> None:
    first, second = (documents_of(opened(run))[row]["doc_id"].hex() for row in (8, 30))
    assert take_down(run, doc=[first], prove=True) == 0
    (earlier,) = certificates(run)
    assert take_down(run, doc=[second]) == 0
    assert opened(run).manifest.content.figures[MEMBERSHIP] == root_of(run)
    (later,) = (own for own in certificates(run) if own.id != earlier.id)
    assert later.membership is None
    rewritten = [change.key for change in later.tables["tokens"].rewritten if change.key.startswith("by_id/")]
    assert rewritten == [by_id_key(bytes.fromhex(second)[0] >> 7)]
    for certificate in (earlier, later):
        assert (
            take_down(run, check=f"takedowns/{certificate.id}.json") == 0
        )  # the proofs of the first are still checked
    left = {row["doc_id"] for row in ids_of(run)}
    assert not left & {bytes.fromhex(first), bytes.fromhex(second)}
    assert len(left) == 78


def ids_of(run: Path) -> list[dict]:
    """The rows of the index by id."""
    dataset = opened(run)
    paths = dataset.manifest.paths_of("by_id/")
    return [row for path in paths for row in pa.ipc.open_file(dataset.folder.open_input(path)).read_all().to_pylist()]


@pytest.mark.parametrize("prove", [False, True])
def test_a_dataset_of_an_earlier_version_has_a_root_after_a_takedown_with_proofs(
    tmp_path: Path, checker: Path, prove: bool, capsys
) -> None:
    folder = tmp_path / "older"
    make_tiny_dataset(folder, {"web": 60, "books": 20}, index_bits=None)
    assert MEMBERSHIP not in opened(folder).manifest.content.figures
    first, second = (documents_of(opened(folder))[row]["doc_id"].hex() for row in (8, 30))
    file = str(tmp_path / "proofs.jsonl")
    assert main(["prove", str(folder), "--doc", first, "--out", file]) == 0
    out = capsys.readouterr().out
    assert "wrote it without an index by id, so all of its shards were read" in out
    assert check(checker, file, root_of(folder), first) == (0, f"{first} present\n")
    assert take_down(folder, doc=[first], prove=True) == 0
    assert take_down(folder, doc=[second], prove=prove) == 0
    assert opened(folder).manifest.content.figures.get(MEMBERSHIP) == (root_of(folder) if prove else None)
    for certificate in certificates(folder):
        assert take_down(folder, check=f"takedowns/{certificate.id}.json") == 0


def test_proofs_of_a_union_are_those_of_its_members(run: Path, checker: Path, tmp_path: Path, capsys) -> None:
    make_tiny_dataset(tmp_path / "second", {"web": 20, "news": 15}, suffix="b")
    make_tiny_dataset(tmp_path / "third", {"web": 20}, index_bits=None)  # the first 20 documents of `run`
    members = [run, tmp_path / "second", tmp_path / "third"]
    union = tmp_path / "union"
    write_union(Store(str(union)), [Store(str(own)) for own in members])
    both, second = (
        documents_of(opened(members[2]))[0]["doc_id"].hex(),
        documents_of(opened(members[1]))[3]["doc_id"].hex(),
    )
    names = [opened(own).digest[:12] for own in members]
    documents = {both: [0, 2], second: [1], ABSENT: []}
    words = [word for own in documents for word in ("--doc", own)]
    assert main(["prove", str(union), *words, "--out", str(tmp_path / "proofs.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "a union of 3; a document is absent if no member has it\n" in out
    for document, owners in documents.items():
        state = f"present in {', '.join(names[own] for own in owners)}" if owners else "absent"
        assert f"  {document}  {state}\n" in out
        for number, (member, name) in enumerate(zip(members, names, strict=True)):
            result = check(checker, str(tmp_path / f"proofs-{name}.jsonl"), root_of(member), document)
            assert result == (0, f"{document} {'present' if number in owners else 'absent'}\n")
    assert all(f"root {root_of(member)}\n" in out for member in members)
    assert out.count("without an index by id") == 1
    entries = opened(union).manifest.content.figures[MEMBERS]
    assert [entry.get(MEMBERSHIP) for entry in entries] == [root_of(members[0]), root_of(members[1]), None]
    assert main(["verify", str(union), "--paranoid"]) == 0


@pytest.mark.parametrize("what", ["root", "parts", "row"])
def test_the_check_of_a_takedown_compares_the_index_with_the_shards(run: Path, what: str, capsys) -> None:
    removed = documents_of(opened(run))[8]["doc_id"]
    assert take_down(run, doc=[removed.hex()]) == 0
    (certificate,) = certificates(run)
    store, manifest = open_table(Store(str(run)), "tokens")
    raw = manifest.model_dump(mode="json")
    figures = raw["content"]["figures"]
    if what == "root":
        figures[MEMBERSHIP] = "11" * 32
    elif what == "parts":
        figures |= membership_figures([Subtree(EMPTY), Subtree(EMPTY)])
    else:  # the old file, in which the removed document is still listed
        old = json.loads((run / f"takedowns/{certificate.id}/tokens.json").read_text())
        key = by_id_key(removed[0] >> 7)
        write_old_file(run, raw, key)
        figures |= {name: old["content"]["figures"][name] for name in (MEMBERSHIP, MEMBERSHIP_PARTS)}
    Path(store.path("manifest.json")).write_text(json.dumps(raw))
    assert take_down(run, check=f"takedowns/{certificate.id}.json") == 1
    out = capsys.readouterr().out
    assert {
        "root": "the Merkle root of its index by id",
        "parts": "expected Merkle root",
        "row": "expected Merkle root",
    }[what] in out
    if what == "row":
        assert "by_id/" in out
        assert "expected no removed document, got 1" in out


def write_old_file(run: Path, raw: dict, key: str) -> None:
    """Write the file of the index as it was before the takedown, made again from a run without it."""
    make_tiny_dataset(run.with_name("before"), {"web": 60, "books": 20})
    before = opened(run.with_name("before"))
    path = before.folder.path(before.manifest.paths[key])
    Path(opened(run).folder.path("old.arrow")).write_bytes(Path(path).read_bytes())
    raw["run"]["paths"][key] = "old.arrow"
    entry = next(entry for entry in raw["content"]["files"] if entry["key"] == key)
    old = next(entry for entry in before.manifest.content.files if entry.key == key)
    entry |= {"sha256": old.sha256, "bytes": old.bytes, "rows": old.rows}


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
