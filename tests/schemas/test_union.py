"""Datasets of several runs as one: streams, look-ups, identity, refusals, and documents that two of them have."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.engine.parquet import PartWriter
from schemas.errors import ConfigError, ContractError
from schemas.manifest import make_manifest, read_run, write_manifest, write_run
from schemas.removed import RemovedDocuments
from schemas.storage import Store
from schemas.tables import DOCUMENTS
from schemas.tokens import Dataset, open_dataset
from schemas.union import describe_union, union_manifest, write_union
from schemas.versions import attach_run, check_own_tables
from tests.support.lineage_run import edit
from tests.support.tiny_dataset import make_tiny_dataset, tiny_documents
from tests.support.tiny_takedown import certificates, take_down
from train.data.document_index import DocumentIndex, read_table
from train.data.shards import StreamReader


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    """Two runs, of which only the first has books and only the second has news, and their union."""
    folder = tmp_path_factory.mktemp("runs")
    first = make_tiny_dataset(folder / "first", {"web": 60, "books": 20})
    second = make_tiny_dataset(folder / "second", {"news": 30, "web": 45}, seed=7, chunk_tokens=128, suffix="b")
    union = Store(str(folder / "union"))
    write_union(union, [first, second])
    return [first, second, union]


def tokens(dataset: Dataset, stream: str) -> list[int]:
    number = sum(shard.num_tokens for shard in dataset.streams[stream])
    out = np.empty(number, dataset.tokenizer.dtype)
    reader = StreamReader(dataset.folder, dataset.streams[stream], dataset.tokenizer.dtype)
    reader.read(out, np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([number]))
    return out.tolist()


def documents(dataset: Dataset) -> list[dict]:
    rows = []
    for stream, shards in dataset.streams.items():
        for shard in shards:
            for row in read_table(dataset.folder, shard.docs_path).to_pylist():
                rows.append(row | {"stream": stream})
    return rows


def add_documents(run: Store, row: Mapping[str, Any], source: Any = None, inputs: Mapping[str, str] = {}) -> None:
    """Write the table `documents` of a row; `source`: its section, `inputs`: SHA-256 of each input file by name."""
    folder = run.child("documents/v-1")
    with PartWriter(folder, "part-00000", pa.schema([DOCUMENTS.field(name) for name in row])) as writer:
        writer.add(row)
    entry = writer.written.to_json()
    paths = {entry["key"]: entry.pop("path")}
    content = {
        "table": "documents",
        "stages": {},
        "config": {"source": source} if source else {},
        "inputs": [{"name": name, "bytes": 1, "sha256": digest * 64} for name, digest in inputs.items()],
        "files": [entry],
        "counts": {"rows_in": 1, "rows_kept": 1},
    }
    times = {"started": "2026-01-01T00:00:00+00:00", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0.1.0"}
    write_manifest(folder, make_manifest(content, {"paths": paths, **times}, "documents"))
    write_run(run, read_run(run).model_copy(update={"tables": {**read_run(run).tables, "documents": "v-1"}}))


def test_a_stream_of_the_union_is_the_streams_of_its_members(runs: list[Store]) -> None:
    first, second, union = map(open_dataset, runs)
    assert {*union.streams} == {*first.streams, *second.streams}
    for stream in union.streams:
        parts = [tokens(each, stream) for each in (first, second) if stream in each.streams]
        assert tokens(union, stream) == [token for part in parts for token in part]
        assert [shard.number for shard in union.streams[stream]] == [*range(len(union.streams[stream]))]
    assert union.chunk_tokens == 128
    assert union.manifest.content.counts.rows_kept == len(documents(first)) + len(documents(second))


def test_every_document_is_found_by_id_and_by_url(runs: list[Store]) -> None:
    union = open_dataset(runs[2])
    index, all_documents = DocumentIndex(union), documents(union)
    assert len(all_documents) == 155
    for row in all_documents:
        stream, found, begin = index.of_id(row["doc_id"])
        assert (stream, found["token_offset"], found["url"]) == (row["stream"], row["token_offset"], row["url"])
        assert (stream, begin) in [(other, start) for other, _, start in index.of_url(row["url"])]
        assert [each["doc_id"] for each, _ in index.between(stream, begin, begin + 1)] == [row["doc_id"]]
    assert index.of_id(bytes(15) + b"x") is None
    hosts = {row["url"].split("/")[2] for row in all_documents}
    assert sum(len(list(index.of_host(host))) for host in hosts) == 155


def test_the_identity_follows_from_the_members_and_their_order(runs: list[Store], tmp_path: Path) -> None:
    first, second, union = runs
    datasets = [open_dataset(run) for run in (first, second)]
    there = Store(str(tmp_path / "elsewhere" / "deep"))
    assert union_manifest(there, datasets).digest == open_dataset(union).digest
    assert union_manifest(there, datasets[::-1]).digest != open_dataset(union).digest
    inputs = [(entry.name, entry.sha256) for entry in open_dataset(union).manifest.content.inputs]
    assert inputs == [(f"dataset:{each.digest[:12]}", each.digest) for each in datasets]
    copies = [Store(str(shutil.copytree(run.root, tmp_path / name))) for name, run in (("x", first), ("y", second))]
    assert union_manifest(there, [open_dataset(run) for run in copies]).digest == open_dataset(union).digest
    assert [member.run.uri for member in open_dataset(union).members] == [first.uri, second.uri]


def test_a_union_of_a_union_has_all_members(runs: list[Store], tmp_path: Path) -> None:
    third = make_tiny_dataset(tmp_path / "third", {"web": 25}, seed=9, suffix="c")
    place = Store(str(tmp_path / "all"))
    write_union(place, [runs[2], third])
    dataset = open_dataset(place)
    assert [member.run.uri for member in dataset.members] == [runs[0].uri, runs[1].uri, third.uri]
    index = DocumentIndex(dataset)
    assert all(index.of_id(row["doc_id"]) for row in documents(dataset))
    assert len(documents(dataset)) == 180


def test_documents_of_two_members_are_counted(runs: list[Store], tmp_path: Path) -> None:
    twin = make_tiny_dataset(tmp_path / "twin", {"web": 60, "other": 10}, shard_tokens=500)
    place = Store(str(tmp_path / "both"))
    manifest = write_union(place, [runs[0], twin])
    shared = [row for row in documents(open_dataset(twin)) if row["stream"].startswith("web/")]
    figure = manifest.content.figures["repeated"]
    assert (figure["documents"], figure["tokens"]) == (60, sum(row["num_tokens"] for row in shared))
    assert figure["held_out_and_trained"] == 0
    text = describe_union(manifest)
    assert "60 documents are in two or more of them, such as " in text
    index = DocumentIndex(open_dataset(place))
    assert all(len(list(index.all_of_id(row["doc_id"]))) == 2 for row in shared)
    assert "no document is in two of them" in describe_union(open_dataset(runs[2]).manifest)


def test_documents_held_out_by_one_member_only(runs: list[Store], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("schemas.union.IDS_AT_ONCE", 20)  # several passes
    # Fewer documents in all: another tenth of them is held out.
    other = make_tiny_dataset(tmp_path / "other", {"web": 30})
    manifest = write_union(Store(str(tmp_path / "mixed")), [runs[0], other])
    held = [
        {row["doc_id"] for row in documents(open_dataset(run)) if row["stream"] == "web/heldout"}
        for run in (runs[0], other)
    ]
    known = {row["doc_id"] for row in documents(open_dataset(other))}
    figure = manifest.content.figures["repeated"]
    assert figure["documents"] == 30
    assert figure["held_out_and_trained"] == len((held[0] ^ held[1]) & known) > 0
    assert "are held out in one and trained on in another" in describe_union(manifest)


@pytest.mark.parametrize(
    ("figure", "settings", "is_named"),
    [
        ("text", {"seed": 3, "heldout_share": 0.1}, False),
        ("text", {"seed": 3, "heldout_share": 0.2}, True),
        ("text", {"seed": 4, "heldout_share": 0.1}, True),
        (None, {"seed": 3, "heldout_share": 0.1}, True),
    ],
)
def test_members_that_hold_out_other_texts_are_named(
    tmp_path: Path, figure: str | None, settings: dict[str, Any], is_named: bool
) -> None:
    runs = [make_tiny_dataset(tmp_path / name, {"web": 20}, suffix=name) for name in ("one", "two")]
    for run, by, own in zip(runs, ("text", figure), ({"seed": 3, "heldout_share": 0.1}, settings), strict=True):
        edit(run, "tokens", partial(held_out, by=by, settings=own))
    text = describe_union(write_union(Store(str(tmp_path / "union")), runs))
    assert ("texts that one of them holds out may be trained on in another" in text) is is_named
    assert "no document is in two of them" in text


def held_out(content: dict[str, Any], by: str | None, settings: Mapping[str, Any]) -> None:
    """Set what the manifest of a dataset says about held-out documents."""
    content["config"] = {"tokens": {**settings, "chunk_tokens": 256}}
    if by is not None:
        content["figures"]["heldout_by"] = by


def changed(**values: Any) -> Any:
    """A function that yields the documents of a tiny dataset with these values."""
    return lambda *arguments: (row | values for row in tiny_documents(*arguments))


def test_ids_of_different_records_are_refused(tmp_path: Path) -> None:
    one = make_tiny_dataset(tmp_path / "one", {"web": 20})
    two = make_tiny_dataset(tmp_path / "two", {"web": 30}, documents=changed(length=901))
    with pytest.raises(ConfigError, match=r"got 20 ids of different records .*source\.snapshot"):
        write_union(Store(str(tmp_path / "union")), [one, two])
    assert not (tmp_path / "union").exists()


@pytest.mark.parametrize(
    ("source", "name", "digest", "is_refused"),
    [
        ({"name": "web"}, "a.parquet", "b", True),
        ({"name": "web"}, "a.parquet", "a", False),
        ({"web": {}, "books": {}}, "web/a.parquet", "b", True),
        ({"web": {}, "books": {}}, "books/a.parquet", "b", False),
    ],
)
def test_records_without_a_size_are_known_by_their_files(
    tmp_path: Path, source: Any, name: str, digest: str, is_refused: bool
) -> None:
    """As rows of Parquet files; the same file gives texts of other sizes with other settings."""
    one = make_tiny_dataset(tmp_path / "one", {"web": 20}, documents=changed(length=1))
    two = make_tiny_dataset(tmp_path / "two", {"web": 20}, documents=changed(length=1, num_bytes=7))
    row = {"doc_id": b"x" * 16, "url": None, "domain": None}
    add_documents(one, row, {"name": "web"}, {"a.parquet": "a"})
    add_documents(two, row, source, {name: digest})
    place = Store(str(tmp_path / "union"))
    if is_refused:
        with pytest.raises(ConfigError, match="got 20 ids of different records"):
            write_union(place, [one, two])
    else:
        assert write_union(place, [one, two]).content.figures["repeated"]["documents"] == 20


def test_refusals(runs: list[Store], tmp_path: Path) -> None:
    first, second, union = runs
    place = Store(str(tmp_path / "new"))
    with pytest.raises(ConfigError, match=r"first: expected each dataset once, got [0-9a-f]{12} also from .*first"):
        write_union(place, [first, first])
    with pytest.raises(ConfigError, match=r"second: expected each dataset once"):
        write_union(place, [union, second])
    other = make_tiny_dataset(tmp_path / "other", {"web": 20}, vocab_size=300)
    with pytest.raises(
        ConfigError,
        match=r"other/tokens.*: expected the tokenizer contract of .*first/.*vocab_size 512 there, 300 here",
    ):
        write_union(place, [first, other])
    assert not place.exists("")
    with pytest.raises(ConfigError, match=r"for `takedown`, got a union of the datasets of .*first and .*second"):
        check_own_tables(union, "takedown")


@pytest.mark.parametrize("kind", ["doc", "url", "domain", "near"])
def test_what_was_taken_down_from_one_member_is_refused_in_another(tmp_path: Path, kind: str) -> None:
    """The union would bring it back, and no certificate would name the checkpoints that it trains."""
    one, two = tmp_path / "one", tmp_path / "two"
    make_tiny_dataset(one, {"web": 40})
    # The same pages, in a file of the same name for ids, and in one of another name for addresses.
    make_tiny_dataset(two, {"web": 50}, suffix="" if kind in ("doc", "near") else "b")
    page = documents(open_dataset(Store(str(one))))[4]
    host = page["url"].split("/")[2]
    values = {"doc": page["doc_id"].hex(), "near": page["doc_id"].hex(), "url": page["url"], "domain": host}
    assert take_down(one, **{kind: [values[kind]]}) == 0
    (certificate,) = certificates(one)
    place = Store(str(tmp_path / "union"))
    for runs in ([one, two], [two, one]):
        with pytest.raises(ContractError) as caught:
            write_union(place, [Store(str(run)) for run in runs])
        assert str(caught.value).startswith(
            f"{two}: expected a dataset without the documents that takedown {certificate.id} removed from {one}, "
            "another member of the union, got doc_id "
        )
    assert not place.exists("")
    if kind in ("url", "domain"):
        assert take_down(two, **{kind: [values[kind]]}) == 0
        write_union(place, [Store(str(one)), Store(str(two))])
        assert len(open_dataset(place).members) == 2


def test_a_removed_page_is_known_by_the_url_in_documents_if_that_of_the_dataset_is_redacted(tmp_path: Path) -> None:
    one = make_tiny_dataset(tmp_path / "one", {"web": 40})
    two = make_tiny_dataset(tmp_path / "two", {"news": 30}, suffix="b")
    page, same = documents(open_dataset(one))[4], documents(open_dataset(two))[7]
    row = {"doc_id": same["doc_id"], "url": page["url"], "domain": "example.org"}
    add_documents(two, row)
    assert take_down(tmp_path / "one", url=[page["url"]]) == 0
    with pytest.raises(ContractError, match=f"/two: expected a dataset without .* got doc_id {same['doc_id'].hex()}"):
        write_union(Store(str(tmp_path / "union")), [one, two])


def test_takedowns_of_a_run_count_for_runs_that_use_its_tables(tmp_path: Path) -> None:
    one = make_tiny_dataset(tmp_path / "one", {"web": 40})
    page = documents(open_dataset(one))[4]
    assert take_down(tmp_path / "one", url=[page["url"]]) == 0
    new = Store(str(tmp_path / "new"))
    attach_run(new, one)
    (certificate,) = RemovedDocuments(new).certificates
    assert certificate == certificates(tmp_path / "one")[0]
    assert RemovedDocuments(new).find(b"x" * 16, page["url"], None) == certificate


def test_members_of_a_union_are_compared_as_well(tmp_path: Path) -> None:
    one, two, three = (
        make_tiny_dataset(tmp_path / name, {"web": size}, suffix=suffix)
        for name, size, suffix in (("one", 20, "a"), ("two", 20, "b"), ("three", 25, "a"))
    )
    union = Store(str(tmp_path / "union"))
    write_union(union, [two, one])
    shared = documents(open_dataset(one))[4]["doc_id"].hex()
    assert take_down(tmp_path / "three", doc=[shared]) == 0
    with pytest.raises(
        ContractError, match=f"/one: expected a dataset without .* from .*/three, .* got doc_id {shared}"
    ):
        write_union(Store(str(tmp_path / "all")), [union, three])


def test_a_member_that_changed_is_an_error(runs: list[Store], tmp_path: Path) -> None:
    one, two = (make_tiny_dataset(tmp_path / name, {"web": 20}, suffix=name) for name in ("one", "two"))
    place = Store(str(tmp_path / "union"))
    write_union(place, [one, two])
    path = tmp_path / "one/tokens/v-0000000071a9/manifest.json"
    value = json.loads(path.read_text())
    value["content"]["config"] = {"tokens": {"seed": 3}}
    path.write_text(json.dumps(value))
    with pytest.raises(
        ContractError, match=r"one/tokens/v-0000000071a9: expected dataset [0-9a-f]{12}, a member of .*union"
    ):
        open_dataset(place)
    assert read_run(place).tables["tokenizer"] == "../../one/tokenizer/v-0000000071a9"
