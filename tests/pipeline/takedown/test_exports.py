"""The deletion of exports by their receipts: a receipt of others names only what an export writes."""

import hashlib
from pathlib import Path

import pytest

from pipeline.takedown.exports import delete_export
from schemas.errors import ConfigError
from schemas.exports import ExportedFile, ExportReceipt, read_receipts
from schemas.storage import Store


def receipt_of(folder: Path, kind: str, *names: str) -> ExportReceipt:
    """Return a receipt of files that are in a folder, as they are there."""
    files = [
        ExportedFile(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name in names
        for data in [(folder / name).read_bytes()]
    ]
    named = {"id": "abcdefabcdef", "made": "", "destination": str(folder), "code_version": ""}
    return ExportReceipt(options={"format": kind}, table="tokens", tables={"tokens": ""}, files=files, **named)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("profile", "web.bin", "web.idx", "export.json", "data/part-0.parquet"):
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(name)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("kind", "names", "wrong"),
    [
        ("megatron", ("profile",), "with profile"),
        ("megatron", ("web.bin", "web.idx", "profile"), "with profile"),
        ("megatron", ("web.bin",), "without web.idx"),
        ("jsonl", ("profile", "web.bin", "web.idx", "export.json", "data/part-0.parquet"), "with profile"),
        ("parquet", ("data/part-0.parquet",), "without export.json"),
        ("other", ("profile",), "with profile"),
    ],
)
def test_a_file_that_no_export_writes_stays(folder: Path, kind: str, names: tuple[str, ...], wrong: str) -> None:
    for other in {*folder.rglob("*")} - {folder / name for name in names} if kind != "megatron" else ():
        other.unlink() if other.is_file() else None
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=f"expected the files of an export in .*, got a receipt abcdefabcdef {wrong}"):
        delete_export(Store(str(folder.parent / "run")), receipt_of(folder, kind, *names))
    assert sorted(folder.rglob("*")) == before


def test_the_files_of_an_export_are_deleted(folder: Path) -> None:
    run = Store(str(folder.parent / "run"))
    delete_export(run, receipt_of(folder, "megatron", "web.bin", "web.idx"))
    assert not {folder / "web.bin", folder / "web.idx"} & {*folder.iterdir()}
    assert (folder / "profile").exists()
    assert [own.deleted for own in read_receipts(run)] == [True]
