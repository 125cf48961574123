"""Exports leave receipts in their run, by which a takedown names, checks and makes again those with its documents."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jobs.cli import main
from pipeline.garbage import find_garbage
from pipeline.takedown.exports import exports_before, exports_with, files_left
from schemas.errors import ContractError
from schemas.exports import MODEL, ExportReceipt, begin_receipt, read_receipts, write_receipt
from schemas.locks import lock_export
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.takedown import PENDING_NAME, Effects, TrainedCheckpoint
from tests.support.s3_server import server
from tests.support.tiny_takedown import all_bytes, certificates, documents_of, opened, rows_of, take_down

__all__ = ["server"]  # a fixture

pytestmark = pytest.mark.spark


@pytest.fixture
def run(finished: Store, tmp_path: Path) -> Path:
    """A copy of the shared run without the receipts that other tests leave in it."""
    shutil.copytree(finished.root, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    return tmp_path / "run"


def export(run: Path, name: str, *options: str) -> Path:
    """Export a run with these options into a folder beside it."""
    out = run.parent / name
    assert main(["export", str(run), "--out", str(out), *options]) == 0
    return out


def receipts(run: Path) -> dict[str, ExportReceipt]:
    """The receipts by the name of the destination; of several, the one that is not replaced."""
    found = sorted(read_receipts(Store(str(run))), key=lambda own: own.replaced_by == "")
    return {Path(own.destination).name: own for own in found}


def test_a_receipt_names_what_was_written_and_read(run: Path) -> None:
    text = export(run, "text", "--format", "jsonl", "--where", "num_chars > 0", "--compression", "gzip")
    tokens = export(run, "tokens", "--format", "megatron")
    store = Store(str(run))
    of_text, of_tokens = receipts(run)["text"], receipts(run)["tokens"]
    assert of_text.options == {"format": "jsonl", "where": "num_chars > 0", "compression": "gzip"}
    assert (of_text.table, of_tokens.table) == ("clean", "tokens")
    assert of_text.tables == {name: open_table(store, name)[1].digest for name in of_text.tables}
    assert of_text.counts["exported"] == len([row for row in rows_of(run, "clean") if row["drop_stage"] is None])
    for out, receipt in ((text, of_text), (tokens, of_tokens)):
        assert {file.path for file in receipt.files} == {*all_bytes(out)}
        assert [file.sha256 for file in receipt.files] == [Store(str(out)).sha256(file.path) for file in receipt.files]
        command = receipt.command(store)
        assert command.startswith(f"penstock export {run} --out {out} --")
        assert f"--format {receipt.options['format']}" in command
    assert [own.path for own in find_garbage(store) if own.path.startswith("exports/")] == []


def test_exports_with_removed_documents_are_named_checked_and_made_again(run: Path, capsys) -> None:
    text = export(run, "text", "--format", "jsonl", "--compression", "none")
    table = export(run, "table", "--format", "parquet", "--table", "verdicts")
    tokens = export(run, "tokens", "--format", "megatron")
    document = next(row for row in rows_of(run, "clean") if row["drop_stage"] is None)
    identifier = document["doc_id"].hex()
    assert any(identifier.encode() in data for data in all_bytes(text).values())
    capsys.readouterr()
    assert take_down(run, doc=[identifier], dry_run=True) == 0
    shown = capsys.readouterr().out
    for out in (text, table, tokens):
        assert f"--out {out} " in shown
    assert take_down(run, doc=[identifier]) == 0
    (certificate,) = certificates(run)
    assert {*certificate.exports} == {own.id for own in receipts(run).values()}
    capsys.readouterr()
    check = ["takedown", str(run), "--check", f"takedowns/{certificate.id}.json"]
    assert main(check) == 0
    assert capsys.readouterr().out.count("still holds removed documents") == 3

    (table / "own.txt").write_text("a file of the user")
    assert take_down(run, remake_exports=True) == 1
    shown = capsys.readouterr().out
    assert "got own.txt, which is not one of them or was changed" in shown
    assert (table / "export.json").exists()
    assert not any(identifier.encode() in data for data in all_bytes(text).values())
    assert json.loads((text / "export.json").read_bytes())["content"]["counts"]["exported"] > 0
    (table / "own.txt").unlink()
    assert take_down(run, remake_exports=True) == 0
    assert {own.tables[own.table] for own in receipts(run).values()} == {
        change.after for name, change in certificate.tables.items() if name in ("clean", "verdicts", "tokens")
    }
    capsys.readouterr()
    assert main(check) == 0
    shown = capsys.readouterr().out
    assert "still holds" not in shown
    assert shown.count(", replaced by export ") == 3


def test_an_export_of_other_settings_is_named_and_not_replaced(run: Path, run_at, capsys) -> None:
    out = export(run, "out", "--format", "jsonl", "--compression", "none")
    before = all_bytes(out)
    run_at(2, ["quality.min_words=150"], run, "tokens")
    document = next(row for row in rows_of(run, "clean") if row["drop_stage"] is None)
    assert take_down(run, doc=[document["doc_id"].hex()], remake_exports=True) == 1
    shown = capsys.readouterr().out
    assert shown.count("tables with other settings or inputs than the current ones, so it cannot be made again") == 2
    assert "make it again: `" not in shown
    assert all_bytes(out) == before
    shutil.rmtree(out)
    assert take_down(run, remake_exports=True) == 0


class Killed(BaseException):
    """The process ends here."""


INTERRUPTED = {
    "jsonl": "pipeline.export.export._finish",  # all files are written, and no manifest
    "megatron": "schemas.storage.Store.sync",  # the first file is written, and no index
}


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_a_killed_replacement_resumes(run: Path, kind: str) -> None:
    out = export(run, "out", "--format", kind)
    old = receipts(run)["out"]
    documents = [row for row in documents_of(opened(run)) if row["stream"].endswith("/train")]
    first = min(documents, key=lambda row: row["stream"])  # in the file of Megatron that is written first
    assert take_down(run, doc=[first["doc_id"].hex()]) == 0
    with mock.patch(INTERRUPTED[kind], side_effect=Killed), pytest.raises(Killed):
        take_down(run, remake_exports=True)
    assert {*all_bytes(out)} & {file.path for file in old.files}  # a new file under an old name
    assert take_down(run, remake_exports=True) == 0
    new = receipts(run)["out"]
    assert new.id != old.id
    assert {file.path for file in new.files} == {*all_bytes(out)}
    count = "exported" if kind == "jsonl" else "documents"
    assert new.counts[count] == old.counts[count] - 1


def test_a_killed_export_is_named_by_a_takedown(run: Path, capsys) -> None:
    with mock.patch(INTERRUPTED["jsonl"], side_effect=Killed), pytest.raises(Killed):
        export(run, "out", "--format", "jsonl")
    begun = receipts(run)["out"]
    assert (begun.complete, begun.files) == (False, [])
    document = next(row for row in rows_of(run, "clean") if row["drop_stage"] is None)
    assert take_down(run, doc=[document["doc_id"].hex()]) == 0
    assert f"to {run.parent / 'out'} and did not end; delete what is in this folder" in capsys.readouterr().out
    (certificate,) = certificates(run)
    check = ["takedown", str(run), "--check", f"takedowns/{certificate.id}.json"]
    assert main(check) == 0
    assert "was not written to the end and may hold removed documents" in capsys.readouterr().out
    shutil.rmtree(run.parent / "out")
    assert main(check) == 0
    assert "no file of it is left" in capsys.readouterr().out


def test_a_resumed_export_completes_its_receipt(run: Path) -> None:
    with mock.patch(INTERRUPTED["jsonl"], side_effect=Killed), pytest.raises(Killed):
        export(run, "out", "--format", "jsonl")
    out = export(run, "out", "--format", "jsonl")
    (receipt,) = read_receipts(Store(str(run)))
    assert receipt.complete
    assert {file.path for file in receipt.files} == {*all_bytes(out)}


def test_an_export_without_the_documents_is_not_named(run: Path, capsys) -> None:
    dropped = next(row for row in rows_of(run, "documents") if row["drop_stage"] is not None and row["url"])
    export(run, "text", "--format", "jsonl")
    capsys.readouterr()
    assert take_down(run, doc=[dropped["doc_id"].hex()], dry_run=True) == 0
    assert "export " not in capsys.readouterr().out.replace("exports without", "")
    assert take_down(run, doc=[dropped["doc_id"].hex()]) == 0
    assert certificates(run)[0].exports == []


@pytest.mark.parametrize("kind", ["jsonl", "megatron", "huggingface"])
def test_nothing_is_exported_while_a_takedown_is_not_finished(run: Path, kind: str, capsys) -> None:
    Store(str(run)).write_atomic(PENDING_NAME, b"{}")
    assert main(["export", str(run), "--format", kind, "--out", str(run.parent / "out")]) == 2
    assert "expected no unfinished takedown" in capsys.readouterr().err
    assert not (run.parent / "out").exists()


@pytest.mark.parametrize("kind", ["jsonl", "megatron"])
def test_two_exports_do_not_write_into_one_folder(run: Path, kind: str, capsys) -> None:
    with lock_export(Store(str(run.parent / "out")), "penstock export"):
        assert main(["export", str(run), "--format", kind, "--out", str(run.parent / "out")]) == 2
    assert "expected a free lock for `penstock export`" in capsys.readouterr().err
    assert receipts(run) == {}


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../b", ""])
def test_a_receipt_that_names_files_elsewhere_is_refused(run: Path, path: str) -> None:
    export(run, "tokens", "--format", "megatron")
    name = next((run / "exports").iterdir())
    value = json.loads(name.read_bytes())
    value["files"][0]["path"] = path
    name.write_text(json.dumps(value))
    with pytest.raises(ContractError, match="expected the receipt of an export"):
        take_down(run, doc=[documents_of(opened(run))[3]["doc_id"].hex()], dry_run=True)


def test_a_run_that_cannot_be_written_is_exported_with_a_warning(run: Path, caplog) -> None:
    (run / "exports").write_text("a file in the place of the folder")
    out = export(run, "tokens", "--format", "megatron")
    assert [*out.glob("*.idx")]
    assert "so a takedown will not name it" in caplog.text


def test_a_model_is_clean_only_if_it_is_of_the_clean_checkpoint(run: Path, tmp_path: Path) -> None:
    """A checkpoint that was trained again has the name of the one before, on another dataset."""
    store, name, old = Store(str(run)), "train/checkpoints/step-000010", "0" * 64
    receipt = write_receipt(
        store, Store(str(tmp_path / "model")), {"format": MODEL}, {"tokens": old}, names=[], checkpoint=name
    )
    for dataset, expected in ((old, []), (opened(run).digest, [receipt])):
        effects = Effects(models=[TrainedCheckpoint(checkpoint=name, step=10, dataset=dataset, saw=False)])
        assert exports_before(store, frozenset(), effects) == expected
        assert exports_with(store, {}, effects) == expected


def test_a_receipt_leads_to_no_server_that_it_alone_names(
    server: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"s3://bucket/named?endpoint_override=127.0.0.1:{server}&scheme=http"
    assert main(["export", str(run), "--format", "megatron", "--out", out]) == 0
    (receipt,) = read_receipts(Store(str(run)))
    assert receipt.destination == out
    assert files_left(Store(str(run)), receipt) is None
    before = sorted(Store(out).walk())
    document = documents_of(opened(run))[4]["doc_id"].hex()
    assert main(["takedown", str(run), "--doc", document, "--remake-exports"]) == 1
    assert f"got one that only receipt {receipt.id} names" in capsys.readouterr().out
    assert sorted(Store(out).walk()) == before


def test_an_export_on_an_object_store_is_made_again(server: int, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    out = "s3://bucket/receipts"
    assert main(["export", str(run), "--format", "megatron", "--out", out]) == 0
    (old,) = read_receipts(Store(str(run)))
    assert old.destination == out
    assert "secret" not in (run / f"exports/{old.id}.json").read_text()
    documents = {row["doc_id"] for row in documents_of(opened(run)) if row["stream"].endswith("/train")}
    assert take_down(run, doc=[min(documents).hex()], remake_exports=True) == 0
    (new,) = (own for own in read_receipts(Store(str(run))) if not own.replaced_by)
    assert new.counts["documents"] == old.counts["documents"] - 1
    assert sorted(Store(out).walk()) == [file.path for file in new.files]
    assert files_left(Store(str(run)), new) == [file.path for file in new.files]
    assert files_left(Store(str(run)), old) == []


def test_an_export_that_a_takedown_overtakes_writes_no_document(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The takedown runs between the look-up of the tables and the receipt, and keeps the old files."""
    gone = documents_of(opened(run))[4]["doc_id"].hex()

    def overtaken(*arguments: Any) -> ExportReceipt:
        assert take_down(run, doc=[gone], keep_old=True) == 0
        return begin_receipt(*arguments)

    monkeypatch.setattr("jobs.verbs.export.begin_receipt", overtaken)
    out = run.parent / "late"
    assert main(["export", str(run), "--format", "jsonl", "--out", str(out)]) == 2
    assert "made by another command meanwhile. Run the export again." in capsys.readouterr().err
    assert not [*out.rglob("*.zst")]
