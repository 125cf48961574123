"""The index by id: its root and proofs are those of the tree of all leaves; damaged and forged files are refused."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.engine.part import PartResult
from pipeline.membership import index as membership
from pipeline.membership.check_proof import check_proof
from pipeline.membership.dataset import check_index, prove_documents, prove_in, tables_of
from pipeline.membership.index import (
    TOP,
    IndexBits,
    MembershipIndex,
    cut_index_file,
    index_bits,
    membership_figures,
    open_index,
    write_index_file,
)
from pipeline.membership.tree import EMPTY, Leaf, Subtree, build_tree, prefix_of
from pipeline.tokens.dataset import StreamTotal, write_by_id
from schemas.errors import ContractError
from schemas.manifest import TableVersion, make_manifest, open_table
from schemas.storage import Store
from schemas.tokens import BY_ID, MEMBERSHIP, MEMBERSHIP_PARTS, by_id_key
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of, opened

Places = list[tuple[bytes, bytes]]


def sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def places(number: int) -> Places:
    """Sorted ids with a value each."""
    return sorted((sha(f"document {i}")[:16], sha(f"value {i}")) for i in range(number))


def batches(rows: Places, size: int = 3) -> Iterator[pa.RecordBatch]:
    """The rows in small batches, as they come from Spark."""
    for first in range(0, len(rows), size):
        own = rows[first : first + size]
        yield pa.RecordBatch.from_pylist([{"doc_id": key, "value": value} for key, value in own], BY_ID)


def write_index(folder: Store, rows: Places, bits: IndexBits) -> MembershipIndex:
    """Write the index of these rows."""
    parts: list[PartResult] = []
    for number in range(1 << bits.file):
        own = [row for row in rows if prefix_of(row[0], bits.file) == number]
        parts.append(write_index_file(folder, number, batches(own), bits))
    files = {number: (folder, part.files["by_id"].checked_path) for number, part in enumerate(parts)}
    return MembershipIndex(folder, files, tuple(Subtree.from_json(part.figures[TOP]) for part in parts))


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "index"))


@pytest.fixture
def table(tmp_path: Path) -> TableVersion:
    """A tiny dataset with two files in its index, of four batches each."""
    return TableVersion(*open_table(make_tiny_dataset(tmp_path / "run"), "tokens"))


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (0, (0, 0)),
        (4096, (0, 0)),
        (4097, (0, 1)),
        (8193, (0, 2)),
        (1_000_000, (0, 8)),
        (1_000_001, (1, 8)),
        (2_000_001, (2, 9)),
        (1_000_000_000, (10, 18)),
    ],
)
def test_the_number_of_files_follows_from_the_number_of_documents(documents: int, expected: tuple[int, int]) -> None:
    assert index_bits(documents) == expected


@pytest.mark.parametrize("number", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("bits", [IndexBits(0, 0), IndexBits(0, 3), IndexBits(2, 2), IndexBits(3, 5)])
def test_the_root_and_the_proofs_do_not_depend_on_the_files(folder: Store, number: int, bits: IndexBits) -> None:
    rows = places(number)
    leaves = [Leaf(key, (value,)) for key, value in rows]
    documents = [*(key for key, _ in rows[:5]), *(sha(f"absent {i}")[:16] for i in range(8)), bytes(16), b"\xff" * 16]
    root, expected = build_tree(lambda _: leaves, 0, documents)
    index = write_index(folder, rows, bits)
    assert index.root == root.hex()
    assert index.prove(documents) == expected
    assert [proof.is_present for proof in expected] == [proof.doc_id in dict(rows) for proof in expected]
    index.check()


def test_a_document_in_several_places_has_one_leaf(folder: Store) -> None:
    twice = (b"\x80" * 16, sha("a"))
    rows = sorted([*places(4), twice, (twice[0], sha("b"))])
    (proof,) = write_index(folder, rows, IndexBits(1, 2)).prove([twice[0]])
    assert proof.leaf == Leaf(twice[0], tuple(sorted([sha("a"), sha("b")])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [*rows[10:], *rows[:10]], "by_id/00001: expected ids in order that begin with 1, got 1"),
        (lambda rows: [(bytes(16), sha("x")), *rows], "expected ids in order that begin with 1, got 0 after them"),
    ],
)
def test_rows_in_another_order_or_of_another_file_are_refused(
    folder: Store, change: Callable[[Places], Places], message: str
) -> None:
    rows = [row for row in places(60) if row[0][0] & 128]
    with pytest.raises(ContractError, match=message):
        write_index_file(folder, 1, batches(change(rows)), IndexBits(1, 4))
    assert [*folder.walk()] == []


def test_a_file_without_documents_has_the_bytes_that_it_would_be_written_with(folder: Store) -> None:
    rows = places(200)
    index = write_index(folder, rows, IndexBits(1, 4))
    removed = {rows[3][0], rows[4][0], rows[120][0], b"\x01" * 16}
    expected = write_index(folder, [row for row in rows if row[0] not in removed], IndexBits(1, 4))
    numbers = index.files_with(removed)
    assert numbers == [0, 1]
    new = folder.child("new")
    parts = {number: cut_index_file(index.file(number), new, removed) for number in numbers}
    after = index.replaced(new, parts)
    assert after.figures == expected.figures
    for number in numbers:
        assert parts[number].files["by_id"].sha256 == expected.files[number][1].sha256  # type: ignore[attr-defined]
    assert index.files_with({rows[3][0]}) == [0]
    assert index.files_with({b"\x01" * 16}) == []
    after.check()
    assert [proof.is_present for proof in after.prove(removed)] == [False] * 4


def test_a_proof_reads_the_file_of_its_document_only(table: TableVersion) -> None:
    index = open_index(table.folder, table.manifest)
    assert index is not None
    absent = (bytes(15) + b"1", b"\xff" * 16)
    expected = prove_in(table, absent)
    Path(table.folder.path(index.files[1][1])).unlink()
    assert prove_in(table, absent[:1]).proofs == expected.proofs[:1]
    with pytest.raises(ContractError, match="no such file"):
        prove_in(table, absent[1:])


def test_the_index_of_a_dataset_agrees_with_its_shards(table: TableVersion) -> None:
    dataset = opened(Path(table.folder.root).parents[1])
    documents = [bytes(16), *(row["doc_id"] for row in documents_of(dataset)[::9])]
    proven = prove_in(table, documents)
    assert (proven.root, proven.proofs) == prove_documents(dataset.folder, dataset.streams, documents)
    assert proven.has_index
    assert check_index(table)
    assert [own.manifest.digest for own in tables_of(dataset)] == [dataset.digest]
    for proof in proven.proofs:
        assert check_proof(proof.to_json(), proven.root, proof.doc_id.hex()) == proof.is_present


def changed(table: TableVersion, **figures: Any) -> TableVersion:
    """The dataset with other figures in its manifest."""
    raw = table.manifest.model_dump(mode="json")
    raw["content"]["figures"] |= figures
    return replace(table, manifest=make_manifest(raw["content"], raw["run"], "tokens"))


def test_figures_that_do_not_agree_are_refused(table: TableVersion) -> None:
    parts = table.manifest.content.figures[MEMBERSHIP_PARTS]
    wrong: list[Any] = [parts[:1], [], None, ["zz", "zz"], [parts[0], [parts[1]]], [7, 8], [parts[0], ["ab" * 16]]]
    for value in (*wrong, [parts[1], parts[0]], [parts[0], ["ab" * 16, "cd" * 32]]):
        with pytest.raises(ContractError, match="expected a manifest with the Merkle root of its index by id, got"):
            prove_in(changed(table, **{MEMBERSHIP_PARTS: value}), [bytes(16)])
    with pytest.raises(ContractError, match=f"root {'11' * 32}, and [0-9a-f]{{64}} from its parts"):
        prove_in(changed(table, membership="11" * 32), [bytes(16)])


def with_file(table: TableVersion, write: Callable[[Any, pa.RecordBatch, dict[str, bytes], int], None]) -> TableVersion:
    """The dataset with another first file in its index, as a forger would write it: its digest is that in the manifest.

    `write(writer, rows, metadata, number)` writes each record batch.
    """
    index = open_index(table.folder, table.manifest)
    assert index is not None
    reader = pa.ipc.open_file(table.folder.open_input(index.files[0][1]))
    with pa.OSFile(table.folder.path("forged.arrow"), "wb") as sink, pa.ipc.new_file(sink, BY_ID) as writer:
        for number in range(reader.num_record_batches):
            own = reader.get_batch_with_custom_metadata(number)
            write(writer, own.batch, {TOP: own.custom_metadata[TOP]}, number)
    raw = table.manifest.model_dump(mode="json")
    entry = next(entry for entry in raw["content"]["files"] if entry["key"] == by_id_key(0))
    entry |= {"sha256": table.folder.sha256("forged.arrow"), "bytes": table.folder.size("forged.arrow")}
    raw["run"]["paths"][by_id_key(0)] = "forged.arrow"
    return replace(table, manifest=make_manifest(raw["content"], raw["run"], "tokens"))


def rows_with(batch: pa.RecordBatch, key: bytes | None) -> pa.RecordBatch:
    first = {"doc_id": key, "value": sha("x")}
    return pa.RecordBatch.from_pylist([first, *batch.to_pylist()], BY_ID)


FORGED: Sequence[tuple[Callable[[Any, pa.RecordBatch, dict[str, bytes], int], None], str]] = [
    (lambda w, rows, top, n: w.write_batch(rows_with(rows, b"\0" * 16) if n == 0 else rows, top), "from its rows|top"),
    (lambda w, rows, top, n: w.write_batch(rows_with(rows, b"\xff" * 16), top), "an id that does not begin with 000"),
    (lambda w, rows, top, n: w.write_batch(rows_with(rows, None), top), "a missing or wrong value"),
    (lambda w, rows, top, n: w.write_batch(rows, {}), "a missing or wrong value"),
    (lambda w, rows, top, n: w.write_batch(rows, {TOP: b"["}), "a missing or wrong value"),
    (lambda w, rows, top, n: w.write_batch(rows, {TOP: b"[" * 100_000}), "a missing or wrong value"),
    (lambda w, rows, top, n: w.write_batch(rows, {TOP: json.dumps("11" * 32).encode()}), "at the top of its part"),
    (lambda w, rows, top, n: w.write_batch(rows, top) if n else None, "3 record batches"),
]


@pytest.mark.parametrize(("write", "message"), FORGED)
def test_a_forged_file_is_refused(table: TableVersion, write: Any, message: str) -> None:
    forged = with_file(table, write)
    with pytest.raises(ContractError, match=message):
        prove_in(forged, [bytes(16)])
    with pytest.raises(ContractError, match=message):
        check_index(forged)


def test_a_stored_top_that_a_proof_does_not_read_is_compared_with_the_rows(table: TableVersion) -> None:
    """The tops of two batches are exchanged for others, so that the manifest could be made to agree with them."""
    forged = with_file(table, lambda w, rows, top, n: w.write_batch(rows, {TOP: json.dumps("11" * 32).encode()}))
    index = open_index(forged.folder, forged.manifest)
    assert index is not None
    tops = (index.file(0).top([]), index.tops[1])
    forged = changed(forged, **membership_figures(tops))
    with pytest.raises(ContractError, match=r"expected 111111111111 at the top of its part 000, got .* from its rows"):
        check_index(forged)
    with pytest.raises(ContractError, match=r"expected an index by id with proofs|at the top of its part"):
        prove_in(forged, [bytes(16)])


def test_an_index_of_other_documents_than_the_shards_is_refused(table: TableVersion) -> None:
    index = write_index(table.folder, places(50), IndexBits(1, 3))
    raw = table.manifest.model_dump(mode="json")
    for number, (_, path) in index.files.items():
        entry = next(entry for entry in raw["content"]["files"] if entry["key"] == by_id_key(number))
        entry |= {"sha256": table.folder.sha256(path), "bytes": table.folder.size(path)}
        raw["run"]["paths"][by_id_key(number)] = str(path)
    raw["content"]["figures"] |= index.figures
    other = replace(table, manifest=make_manifest(raw["content"], raw["run"], "tokens"))
    with pytest.raises(
        ContractError, match=f"expected Merkle root {index.root} of its index by id, got [0-9a-f]{{64}}"
    ):
        check_index(other)


def test_tops_as_json() -> None:
    leaf = Leaf(b"\1" * 16, (sha("a"), sha("b")))
    for top in (Subtree(EMPTY), Subtree(sha("x")), Subtree(leaf.digest, leaf)):
        assert Subtree.from_json(json.loads(json.dumps(top.to_json()))) == top
    for value in ("", "11", "zz" * 32, [], ["11" * 16], ["11" * 32, "11" * 32], ["11" * 16, "11" * 16], None, 7, [7]):
        with pytest.raises((ValueError, TypeError)):
            Subtree.from_json(value)


@pytest.mark.spark
@pytest.mark.parametrize("partitions", [1, 7])
def test_spark_writes_the_same_files_at_any_partitioning(
    spark: Any, folder: Store, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "DOCUMENTS_PER_FILE", 100)
    monkeypatch.setattr(membership, "DOCUMENTS_PER_BATCH", 20)
    rows = places(300)
    shuffled = random.Random(partitions).sample(rows, len(rows))
    frame = spark.createDataFrame(
        [(bytearray(key), bytearray(value)) for key, value in shuffled], "doc_id binary, value binary"
    )
    parts = write_by_id(frame.repartition(partitions), {"web/train": StreamTotal(300, 1, 0, 0)}, folder, first_part=5)
    expected = write_index(folder.child("expected"), rows, IndexBits(2, 4))
    assert membership_figures([Subtree.from_json(part.figures[TOP]) for part in parts]) == expected.figures
    assert expected.figures[MEMBERSHIP] == build_tree(lambda _: [Leaf(k, (v,)) for k, v in rows], 0)[0].hex()
    written = [part.files["by_id"] for part in parts]
    assert [(own.key, own.sha256) for own in written] == [
        (by_id_key(number), path.sha256)
        for number, (_, path) in expected.files.items()  # type: ignore[attr-defined]
    ]
