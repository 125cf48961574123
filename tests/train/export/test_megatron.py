"""Tests of the export to Megatron: a reader of the published format finds every document."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import tiny_dataset
from tests.support.s3_server import server
from tests.support.tiny_dataset import make_tiny_dataset, replace_token
from tests.support.tiny_takedown import documents_of as indexed
from tests.support.tiny_takedown import take_down
from train.export import megatron
from train.export.megatron import export_megatron

__all__ = ["server"]  # a fixture

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def documents_of(run: Store, source: str) -> list[list[int]]:
    """The training documents of a source, in the order of its shards."""
    dataset, documents = open_dataset(run), []
    for shard in dataset.streams[f"{source}/train"]:
        with pa.ipc.open_file(dataset.folder.path(shard.path)) as reader:
            documents += reader.read_all().column("tokens").to_pylist()
    return documents


def read_indexed(prefix: Path) -> tuple[str, list[list[int]]]:
    """Type and documents of a .bin and .idx, by the format's definition alone."""
    index, data = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code = struct.unpack_from("<QB", index, 9)
    sequences, bounds = struct.unpack_from("<QQ", index, 18)
    assert version == 1
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(index, "<i8", bounds, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * bounds
    assert documents.tolist() == list(range(sequences + 1))
    read = [np.frombuffer(data, DTYPES[code], n, at).tolist() for n, at in zip(lengths, pointers, strict=True)]
    assert sum(map(len, read)) * np.dtype(DTYPES[code]).itemsize == len(data)
    return DTYPES[code], read


@pytest.mark.parametrize(("vocab_size", "dtype"), [(512, "<u2"), (70_000, "<i4")])
def test_every_document_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, dtype: str
) -> None:
    monkeypatch.setattr(tiny_dataset, "BATCH_DOCUMENTS", 5)
    monkeypatch.setattr(megatron, "BLOCK", 37)
    run = make_tiny_dataset(tmp_path / "run", vocab_size=vocab_size)
    exported = export_megatron(run, Store(str(tmp_path / "out")))
    assert [source.source for source in exported] == ["books", "web"]
    for source in exported:
        documents = documents_of(run, source.source)
        assert read_indexed(tmp_path / "out" / source.prefix) == (dtype, documents)
        assert (source.num_documents, source.num_tokens) == (len(documents), sum(map(len, documents)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "books.bin",
        "books.idx",
        "web.bin",
        "web.idx",
    ]


@pytest.mark.parametrize("compact", [False, True])
def test_removed_documents_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compact: bool) -> None:
    monkeypatch.setattr(megatron, "BLOCK", 37)
    run = make_tiny_dataset(tmp_path / "run")
    before = documents_of(run, "web")
    removed = {0, 1, 7, len(before) - 1}
    ids = [row["doc_id"].hex() for row in indexed(open_dataset(run)) if row["stream"] == "web/train"]
    assert take_down(run.uri, doc=[ids[number] for number in removed], compact=compact) == 0
    kept = [document for number, document in enumerate(before) if number not in removed]
    exported = {source.source: source for source in export_megatron(run, Store(str(tmp_path / "out")))}
    assert read_indexed(tmp_path / "out" / "web")[1] == kept
    assert (exported["web"].num_documents, exported["web"].num_tokens) == (len(kept), sum(map(len, kept)))
    assert read_indexed(tmp_path / "out" / "books")[1] == documents_of(run, "books")


def test_a_shard_whose_checksums_were_fitted_is_refused(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    expected = replace_token(run, "web/train")
    with pytest.raises(ContractError, match=rf"web/train/.*: expected SHA-256 {expected}.*, got SHA-256 \w{{64}}"):
        export_megatron(run, Store(str(tmp_path / "out")))
    assert not (tmp_path / "out" / "web.idx").exists()


@pytest.mark.parametrize("place", ["local", "s3"])
def test_an_index_that_is_not_complete_does_not_exist(
    server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Megatron takes a source with both files for complete."""
    out = Store(str(tmp_path / "out") if place == "local" else "s3://bucket/megatron")
    lengths, calls = megatron._lengths, 0

    def interrupted(*arguments: Any) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        for number, own in enumerate(lengths(*arguments)):
            if calls == 2 and number == 1:  # the first call counts, and the second one writes
                raise KeyboardInterrupt
            yield own

    monkeypatch.setattr(megatron, "_lengths", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_megatron(make_tiny_dataset(tmp_path / "run", shard_tokens=1024), out)
    assert sorted(out.walk()) == ["books.bin"]


def test_an_index_appears_when_it_is_complete(tmp_path: Path) -> None:
    folder = Store(str(tmp_path))
    with megatron._whole_file(folder, "a.idx") as sink:
        sink.write(b"1")
        assert not folder.exists("a.idx")  # as after a kill
    assert [*folder.walk()] == ["a.idx"]


@pytest.mark.parametrize(
    ("column", "value"), [("token_offset", -9), ("token_offset", None), ("num_tokens", -1), ("num_tokens", 1 << 30)]
)
def test_an_index_with_wrong_places_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: int | None
) -> None:
    read = megatron.read_table

    def changed(*arguments: Any) -> pa.Table:
        table = read(*arguments)
        if column not in table.column_names:
            return table
        values = table[column].to_pylist()
        values[3] = value
        return table.set_column(table.column_names.index(column), column, pa.array(values, pa.int64()))

    monkeypatch.setattr(megatron, "read_table", changed)
    with pytest.raises(ContractError, match=r"expected documents that have the \d+ tokens of the shard one after"):
        export_megatron(make_tiny_dataset(tmp_path / "run"), Store(str(tmp_path / "out")))


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stranger's shard may have it, with fitted digests."""
    run = make_tiny_dataset(tmp_path / "run")
    size = open_dataset(run).tokenizer.vocab_size
    copy = megatron.OpenShard.copy

    def changed(self: Any, out: Any, *arguments: Any) -> None:
        copy(self, out, *arguments)
        out[-1] = size

    monkeypatch.setattr(megatron.OpenShard, "copy", changed)
    with pytest.raises(ContractError, match=rf"expected ids below the vocabulary size {size}, got {size}\."):
        export_megatron(run, Store(str(tmp_path / "out")))
