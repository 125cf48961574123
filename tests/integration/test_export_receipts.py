"""Exports leave receipts in their run, by which a takedown names, checks and makes again those with its documents."""

import json
import shutil
from pathlib import Path

import pytest

from jobs.cli import main
from pipeline.garbage import find_garbage
from schemas.errors import ContractError
from schemas.exports import ExportReceipt, read_receipts
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.tiny_takedown import all_bytes, certificates, documents_of, opened, rows_of, take_down

pytestmark = pytest.mark.spark


@pytest.fixture
def run(finished: Store, tmp_path: Path) -> Path:
    shutil.copytree(finished.root, tmp_path / "run")
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


def test_an_export_without_the_documents_is_not_named(run: Path, capsys) -> None:
    dropped = next(row for row in rows_of(run, "documents") if row["drop_stage"] is not None and row["url"])
    export(run, "text", "--format", "jsonl")
    capsys.readouterr()
    assert take_down(run, doc=[dropped["doc_id"].hex()], dry_run=True) == 0
    assert "export " not in capsys.readouterr().out.replace("exports without", "")
    assert take_down(run, doc=[dropped["doc_id"].hex()]) == 0
    assert certificates(run)[0].exports == []


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
