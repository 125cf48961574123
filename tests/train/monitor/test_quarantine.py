"""The quarantine list: lines are read back exactly, incomplete lines are ignored, invalid lines are rejected."""

import os
from pathlib import Path

import pytest

from schemas.errors import ContractError
from schemas.storage import Store
from train.monitor.quarantine import QUARANTINE_NAME, Quarantined, quarantine, read_quarantine

LINES = [
    Quarantined(
        **{"doc_id": f"{number:032x}", "url": "https://example.org/ü", "source": "web", "split": "a.warc.gz"},
        **{"offset": 17, "length": 300, "step": 13, "rewind": 1, "loss": 1 / 3, "targets": 40, "excess": 0.1},
        **{"limit": 0.05, "why": "an outlier among 7 documents"},
    )
    for number in range(3)
]


def test_lines_come_back_as_they_were_and_are_only_added(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    assert read_quarantine(run) == []
    quarantine(run, LINES[:1])
    before = (tmp_path / QUARANTINE_NAME).read_bytes()
    quarantine(run, LINES[1:])
    assert (tmp_path / QUARANTINE_NAME).read_bytes().startswith(before)
    assert read_quarantine(run) == LINES


def test_half_a_line_is_passed_over_wherever_it_was_cut(tmp_path: Path) -> None:
    run, line = Store(str(tmp_path)), LINES[1].model_dump_json().encode()
    for length in range(0, len(line), 7):
        run.write_atomic(QUARANTINE_NAME, LINES[0].model_dump_json().encode() + b"\n" + line[:length])
        assert read_quarantine(run) == LINES[:1]
    quarantine(run, LINES[2:])
    assert read_quarantine(run) == [LINES[0], LINES[2]]


@pytest.mark.parametrize(
    "line",
    [b"{}", b"12", b'{"doc_id": "xyz"}', b"0" * 32, b"# mine", LINES[1].model_dump_json().encode().replace(b":", b"=")],
)
def test_a_whole_line_that_is_no_document_is_refused(tmp_path: Path, line: bytes) -> None:
    run = Store(str(tmp_path))
    run.write_atomic(QUARANTINE_NAME, LINES[0].model_dump_json().encode() + b"\n" + line + b"\n")
    with pytest.raises(ContractError, match=r"quarantine.jsonl, line 2: expected a document, got"):
        read_quarantine(run)
    wrong = LINES[0].model_dump() | {"doc_id": "AB" * 16}
    with pytest.raises(ValueError, match="doc_id"):
        Quarantined.model_validate(wrong)


def test_the_disk_has_it_or_an_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(number))
    quarantine(Store(str(tmp_path)), LINES)
    assert len(synced) >= 2  # the file, and the folders that have its name
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        quarantine(Store(str(tmp_path)), LINES)
