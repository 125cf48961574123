"""Tests of best-fit packing: documents once per epoch, few of them cut, and an index that is written once."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.storage import Store
from schemas.takedown import positions_digest
from schemas.tokens import Dataset, Shard, open_dataset, shard_schema
from tests.support.checked_paths import checked
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import bare_dataset, batches_of, staged
from train.config.train import PACK_CHUNKS, TrainConfig
from train.data import packing
from train.data.order import open_streams
from train.data.packed_rows import PackedIndex, PackedRows, PackingShape, best_fit
from train.data.packing import open_packings, packed_files, packing_folder, write_packing
from train.data.permutation import ChunkOrder
from train.data.rows import IGNORED
from train.data.verify import verify_dataset

PACKED = TrainConfig(seq_len=64, packing="best_fit")


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([], []),
        ([10], [[0]]),
        ([10, 10], [[0], [1]]),
        # 7, then 6, then 5; 4 fills the row of 6, 3 the row of 7, and 2 is placed after the 5.
        ([2, 7, 3, 6, 4, 5], [[0, 5], [1, 2], [3, 4]]),
        # The 1 fills the row 5 + 4; first fit would use the older row of 7.
        ([7, 5, 4, 1], [[0], [1, 2, 3]]),
        ([5, 5, 5, 5], [[0, 1], [2, 3]]),
    ],
)
def test_best_fit_by_hand(lengths: list[int], rows: list[list[int]]) -> None:
    assert best_fit(lengths, 10) == rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_places_every_part_once_and_leaves_no_two_rows_that_could_be_one(lengths: list[int]) -> None:
    rows = best_fit(lengths, 20)
    assert sorted(part for row in rows for part in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[part] for part in row) <= 20 for row in rows)
    assert rows == sorted(rows)
    sizes = sorted(sum(lengths[part] for part in row) for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 20


def dataset_of(folder: Path, shards: list[list[int]], chunk_tokens: int) -> Dataset:
    """Write a source of shards with documents of these numbers of tokens; ids ascend from 105."""
    schema, made, token = shard_schema("uint16"), [], 105
    index = pa.schema([("token_offset", pa.int64()), ("num_tokens", pa.int64())])
    for number, lengths in enumerate(shards):
        documents = [list(range(token + sum(lengths[:i]), token + sum(lengths[: i + 1]))) for i in range(len(lengths))]
        token += sum(lengths)
        rows = [{"doc_id": bytes(16), "tokens": tokens} for tokens in documents]
        docs = [{"token_offset": sum(lengths[:i]), "num_tokens": n} for i, n in enumerate(lengths)]
        for name, kind, values in ((f"{number}.arrow", schema, rows), (f"{number}.docs", index, docs)):
            with pa.ipc.new_file(str(folder / name), kind) as writer:
                writer.write_batch(pa.RecordBatch.from_pylist(values, kind))
        paths = [checked(Store(str(folder)), f"{number}.{ending}") for ending in ("arrow", "docs")]
        made.append(Shard("web/train", number, *paths, sum(lengths), 0, "", ""))
    return bare_dataset(Store(str(folder)), {"web/train": made}, chunk_tokens, 1 << 16)


def test_rows_by_hand(tmp_path: Path) -> None:
    """Chunks of 16 tokens, rows of 8, documents of 3, 10, 2, 0, 6 | 4, 5, 9 tokens in two shards: 39 tokens."""
    dataset = dataset_of(tmp_path, [[3, 10, 2, 0, 6], [4, 5, 9]], 16)
    config = TrainConfig(seq_len=8, packing="best_fit", window_shards=9)
    packing = write_packing(Store(str(tmp_path)), dataset, config)
    assert packing is not None
    (source,) = packing.sources
    # Chunk 0: parts 3, 8+2 (cut at a row), 2, 1 (of the 6, cut by the chunk): rows 8 | 3+2+2+1.
    # Chunk 1: parts 5 (of the 6), 4, 5, 2 (of the 9): rows 5 | 5 | 4: 2 fits best after the first 5.
    files = packing_folder(Store(str(tmp_path)), dataset, config)
    assert dict(source) == {
        "files": {"00000.chunks.arrow": files.sha256("00000.chunks.arrow")},
        "name": "web",
        "num_tokens": 32,
        "num_rows": 5,
        "num_documents": 7,
        "cut": 2,
        "cut_in_stream": 3,
        "padding": 1 - 32 / 40,
    }
    index = open_packings(Store(str(tmp_path)), dataset, config)["web"]
    assert index.group_begins.tolist() == [0, 2, 5]
    first, second = index.group(0), index.group(1)
    assert (first.row_begins.tolist(), second.row_begins.tolist()) == ([0, 4, 5], [0, 2, 3, 4])
    assert [*first.start.tolist(), *second.start.tolist()] == [0, 11, 13, 15, 3, 16, 30, 21, 25]
    assert [*first.length.tolist(), *second.length.tolist()] == [3, 2, 2, 1, 8, 5, 2, 4, 5]
    assert [*first.closed.tolist(), *second.closed.tolist()] == [1, 1, 1, 0, 0, 1, 0, 1, 1]
    assert (first.column.tolist(), second.column.tolist()) == ([0, 3, 5, 7, 0], [0, 5, 0, 0])
    batches = batches_of(dataset, config, 5, run=Store(str(tmp_path)))
    rows, starts = batches.batch(0), batches.samples(0).pieces
    place = {int(starts.start[i]): int(starts.row[i]) for i in range(len(starts)) if not starts.column[i]}
    row = place[0]
    assert rows.inputs_BT[row].tolist() == [105, 106, 107, 116, 117, 118, 119, 120]
    # A document's last token predicts nothing; the last token before a cut predicts the document's next token.
    assert rows.targets_BT[row].tolist() == [106, 107, IGNORED, 117, IGNORED, 119, IGNORED, 121]
    assert rows.documents_BT[row].tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    row = place[21]
    assert rows.inputs_BT[row].tolist() == [126, 127, 128, 129, 0, 0, 0, 0]
    assert rows.targets_BT[row].tolist() == [127, 128, 129, *[IGNORED] * 5]
    assert rows.documents_BT[row].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_group_of_chunks_by_hand(tmp_path: Path) -> None:
    """The same documents in one group of two chunks: no piece is cut at token 16, and a row less is needed."""
    dataset = dataset_of(tmp_path, [[3, 10, 2, 0, 6], [4, 5, 9]], 16)
    config = TrainConfig(seq_len=8, packing="best_fit", pack_chunks=64)
    packing = write_packing(Store(str(tmp_path)), dataset, config)
    assert packing is not None
    assert (packing.pack_chunks, packing.version) == (64, 3)
    # Pieces 3, 8 + 2, 2, 6, 4, 5, 2 (of the 9): rows 8 | 6 + 2 | 5 + 3 | 4 + 2 + 2, sorted by their longest piece.
    (source,) = packing.sources
    assert (source.num_rows, source.cut, source.padding) == (4, 1, 0.0)
    group = open_packings(Store(str(tmp_path)), dataset, config)["web"].group(0)
    assert group.row_begins.tolist() == [0, 1, 3, 6, 8]
    assert group.start.tolist() == [3, 11, 15, 13, 21, 30, 0, 25]
    assert group.length.tolist() == [8, 2, 6, 2, 4, 2, 3, 5]
    assert group.closed.tolist() == [0, 1, 1, 1, 1, 0, 1, 1]


@st.composite
def corpora(draw: Any) -> tuple[list[list[int]], int, int]:
    """Draw shards of documents of some numbers of tokens, a chunk size and a row length that divides it."""
    shards = draw(st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=4))
    seq_len = draw(st.sampled_from([1, 3, 8]))
    return shards, seq_len * draw(st.sampled_from([1, 2, 5])), seq_len


@settings(max_examples=60, deadline=None)
@given(corpora(), st.integers(0, 9), st.sampled_from([None, 1, 2, 3, 64]))
def test_every_token_once_per_epoch_and_back(
    corpus: tuple[list[list[int]], int, int], seed: int, together: int | None
) -> None:
    shards, chunk, seq_len = corpus
    counts = [sum(lengths) for lengths in shards]
    config = TrainConfig(seq_len=seq_len, packing="best_fit", pack_chunks=together)
    size = chunk * (together or 1)
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(Path(folder), shards, chunk)
        packing = write_packing(Store(folder), dataset, config)
        index = open_packings(Store(folder), dataset, config)["web"]
        chunks = ChunkOrder("web", counts, chunk, seed, 2, together or 1)
        assert packing is not None
        number = chunks.num_tokens
        assert packing.sources[0].num_tokens == number == max(0, sum(counts) - 1) // chunk * chunk
        if not chunks.num_chunks:
            return
        rows = PackedRows(chunks, index)
        pieces = rows.pieces(np.arange(3 * rows.num_units), seq_len)
        tokens = [
            (e, t)
            for e, first, n in zip(pieces.epoch.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)
            for t in range(first, first + n)
        ]
        assert sorted(tokens) == [(e, t) for e in range(3) for t in range(number)]
        filled = np.bincount(pieces.row, weights=pieces.length)
        assert filled.max() <= seq_len
        assert [e for e, _ in tokens] == sorted(e for e, _ in tokens)
        # A piece is within a document and a group; it is closed where the document ends.
        ends = set(np.cumsum([n for lengths in shards for n in lengths]).tolist())
        for start, length, closed in zip(pieces.start.tolist(), pieces.length.tolist(), pieces.closed, strict=True):
            assert not ends & set(range(start + 1, start + length))
            assert start // size == (start + length - 1) // size
            assert closed == (start + length in ends)
        rows_of: dict[int, set[int]] = {}
        first_epoch = pieces.take(np.flatnonzero(pieces.epoch == 0))
        bounds = np.array([0, *sorted(ends)])
        for start, row in zip(first_epoch.start.tolist(), first_epoch.row.tolist(), strict=True):
            rows_of.setdefault(int(np.searchsorted(bounds, start, side="right")), set()).add(row)
        assert packing.sources[0].num_documents == len(rows_of)
        assert packing.sources[0].cut == sum(len(pieces) > 1 for pieces in rows_of.values())
        for epoch in (0, 2):
            for start in range(0, number, 7):
                first, stop = rows.touching(epoch, start, start + 5)
                hit = (pieces.start < start + 5) & (pieces.start + pieces.length > start) & (pieces.epoch == epoch)
                assert sorted(first.tolist()) == np.unique(pieces.row[hit]).tolist()
                assert (stop - first == 1).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"))


def test_the_index_is_written_once_and_for_its_own_length(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(run)
    with pytest.raises(
        ContractError, match=r"expected an index of packed rows, got no packing.json\. Run `penstock plan`"
    ):
        open_packings(run, dataset, PACKED)
    first = write_packing(run, dataset, PACKED)
    monkeypatch.setattr(packing, "_count_parts", None)
    assert write_packing(run, dataset, PACKED) == first
    others = [TrainConfig(seq_len=32), TrainConfig(seq_len=64, packing="best_fit", pack_chunks=2)]
    assert len({packing_folder(run, dataset, config).uri for config in (PACKED, *others)}) == 3
    for config in (TrainConfig(seq_len=64),):
        assert (write_packing(run, dataset, config), open_packings(run, dataset, config)) == (None, None)


def test_the_same_index_whenever_it_is_written(tmp_path: Path) -> None:
    packing = []
    for name in ("a", "b"):
        run = make_tiny_dataset(tmp_path / name)
        dataset = open_dataset(run)
        write_packing(run, dataset, PACKED)
        folder = Path(packing_folder(run, dataset, PACKED).uri)
        packing.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert packing[0] == packing[1]
    assert sorted(packing[0]) == ["00000.chunks.arrow", "00001.chunks.arrow", "packing.json"]


def test_the_index_is_memory_mapped(run: Store) -> None:
    write_packing(run, open_dataset(run), PACKED)
    before = pa.total_allocated_bytes()
    packing = open_packings(run, open_dataset(run), PACKED)
    assert isinstance(packing["web"], PackedIndex)
    assert pa.total_allocated_bytes() == before


def test_an_index_that_was_changed_is_rejected(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path)
    dataset = open_dataset(run)
    packing = write_packing(run, dataset, PACKED)
    assert packing is not None
    folder = packing_folder(run, dataset, PACKED)
    folder.write_atomic("packing.json", packing.model_copy(update={"seq_len": 32}).model_dump_json().encode())
    with pytest.raises(
        ContractError, match=r"expected version, dataset, seq_len and pack_chunks .* got .* 32, 1\)\. R"
    ):
        open_packings(run, dataset, PACKED)
    wrong = [source.model_copy(update={"num_rows": 5}) for source in packing.sources]
    folder.write_atomic("packing.json", packing.model_copy(update={"sources": wrong}).model_dump_json().encode())
    with pytest.raises(
        ContractError, match=r"expected 5 rows of books in \d+ groups, got \d+ in \d+\. Remove the folder"
    ):
        open_packings(run, dataset, PACKED)
    folder.write_atomic("packing.json", b"{}")
    with pytest.raises(ContractError, match=r"packing.json: expected the summary of a packing index, got "):
        write_packing(run, dataset, PACKED)


def test_fewer_documents_are_cut_and_stages_continue_row_by_row(run: Store) -> None:
    dataset = open_dataset(run)
    packing = write_packing(run, dataset, PACKED)
    assert packing is not None
    assert all(source.cut < source.cut_in_stream for source in packing.sources)
    config = staged(
        [{"tokens": 64 * 5 * 9}, {"global_batch": 3, "weights": {"web": 1, "books": 3}}], packing="best_fit"
    )
    batches = batches_of(dataset, config, 5, run=run)
    streams = open_streams(dataset, config, open_packings(run, dataset, config))
    seen: dict[str, list[tuple[int, int]]] = {source: [] for source in batches.order.sources}
    for step in range(batches.order.stages[-1].end):
        samples = batches.samples(step)
        pieces = samples.pieces
        for row, epoch, start in zip(pieces.row.tolist(), pieces.epoch.tolist(), pieces.start.tolist(), strict=True):
            seen[batches.order.sources[samples.source[row]]].append((epoch, start))
    for source, parts in seen.items():
        expected = streams[source].pieces(np.arange(len(parts)), 64)
        assert parts == list(zip(expected.epoch.tolist(), expected.start.tolist(), strict=True))[: len(parts)]


def test_a_changed_byte_of_the_index_is_detected_before_training(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path)
    dataset = open_dataset(run)
    packed = write_packing(run, dataset, PACKED)
    expected = list(packed_files(run, dataset, PACKED))
    assert len(expected) == len(packed.sources)
    assert list(packed_files(run, dataset, TrainConfig(seq_len=64))) == []
    assert verify_dataset(run, dataset, expected) > len(expected)
    path = Path(expected[0][0].path(expected[0][1]))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ContractError, match=r"00000\.chunks\.arrow: expected SHA-256 .* got "):
        verify_dataset(run, dataset, expected)


# ------------------------------------------------------------------------------------------------- counts at any scale


def lengths_like_fineweb(tokens: int) -> list[int]:
    """Return document lengths with the median of FineWeb, 570 tokens, and a mean of 940, that add up to `tokens`."""
    lengths = np.rint(np.random.default_rng(0).lognormal(np.log(570), 1, tokens // 500)).astype(np.int64) + 1
    ends = np.cumsum(lengths)
    return np.diff([0, *ends[ends < tokens].tolist(), tokens]).tolist()


def test_groups_of_64_chunks_leave_little_padding(tmp_path: Path) -> None:
    """At the default chunk of 8,192 tokens; these are the figures of docs/guides/training.md."""
    dataset, padding = bare_documents(tmp_path, lengths_like_fineweb(1 << 21)), {}
    for seq_len in (1024, 2048, 4096, 8192):
        for together in (1, 64):
            config = TrainConfig(seq_len=seq_len, packing="best_fit", pack_chunks=together)
            packed = write_packing(Store(str(tmp_path)), dataset, config)
            assert packed is not None
            padding[seq_len, together] = packed.sources[0].padding
            assert together == 1 or packed.sources[0].cut < 0.3 * packed.sources[0].num_documents
    assert all(padding[seq_len, 1] > 0.1 for seq_len in (1024, 2048, 4096))
    assert all(padding[seq_len, 64] < 0.02 for seq_len in (1024, 2048, 4096, 8192))


def bare_documents(folder: Path, *shards: list[int]) -> Dataset:
    """Write shards with a document index only, at the default chunk size."""
    index, made = pa.schema([("token_offset", pa.int64()), ("num_tokens", pa.int64())]), []
    for number, lengths in enumerate(shards):
        offsets = np.cumsum([0, *lengths])[:-1]
        with pa.ipc.new_file(str(folder / f"{number}.docs"), index) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(offsets), pa.array(lengths)], schema=index))
        path = checked(Store(str(folder)), f"{number}.docs")
        made.append(Shard("web/train", number, path, path, sum(lengths), len(lengths), "", ""))
    return bare_dataset(Store(str(folder)), {"web/train": made}, 8192, 1 << 16)


def test_processes_share_the_parts_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = lengths_like_fineweb(1 << 20)
    dataset = bare_documents(tmp_path, lengths[:400], lengths[400:])
    config, files = TrainConfig(seq_len=1024, packing="best_fit", pack_chunks=4), []
    for name, size in (("one", 1 << 30), ("several", 1 << 18), ("resumed", 1 << 18)):
        run = Store(str(tmp_path / name))
        folder = packing_folder(run, dataset, config)
        monkeypatch.setattr(packing, "PART_TOKENS", size)
        if name == "resumed":
            parts = list(packing._parts(dataset, config, 0, "web"))
            assert len(parts) == 4
            packing._count_part(folder, dataset, parts[1])
            wrong = packing._read_part(folder, parts[1]).model_copy(update={"documents": 10**6})
            folder.write_atomic(parts[1].path, wrong.model_dump_json().encode())
        summary = write_packing(run, dataset, config)
        assert summary is not None
        # A part that was finished before is not counted again.
        assert (summary.sources[0].num_documents > 10**6) == (name == "resumed")
        files.append({path.name: path.read_bytes() for path in Path(folder.uri).iterdir()})
    assert files[0] == files[1]
    assert files[2]["00000.chunks.arrow"] == files[0]["00000.chunks.arrow"]
    assert sorted(files[2]) == ["00000.chunks.arrow", "packing.json"]


def test_ten_billion_documents_are_counted_in_minutes_and_stored_in_megabytes() -> None:
    """10^10 documents of 1,000 tokens; a piece takes 0.5 to 1 microsecond on one core."""
    documents, cores = 10**10, 64
    shape = PackingShape(documents * 1000 // 8192 * 8192, 8192, PACK_CHUNKS, 2048)
    num_parts = -(-shape.num_tokens // packing.PART_TOKENS)
    assert num_parts > 100 * cores  # the cores finish together
    assert 8 * (shape.num_groups + 1) < 160e6  # bytes of the index; 13 bytes a piece would be 170 GB
    pieces = documents * (1 + 1000 / 2048)
    assert pieces * 1e-6 / cores < 5 * 60  # seconds


def test_the_index_of_an_earlier_version_opens(tmp_path: Path) -> None:
    """It has two more tables for each source, a summary without `pack_chunks`, and the same rows."""
    run = make_tiny_dataset(tmp_path)
    dataset = open_dataset(run)
    packed = write_packing(run, dataset, PACKED)
    assert packed is not None
    folder = packing_folder(run, dataset, PACKED)
    folder.write_atomic("00000.pieces.arrow", b"pieces")
    files = packed.sources[0].files | {"00000.pieces.arrow": folder.sha256("00000.pieces.arrow")}
    sources = [packed.sources[0].model_copy(update={"files": files}), *packed.sources[1:]]
    text = packed.model_copy(update={"sources": sources}).model_dump_json(exclude={"pack_chunks"})
    folder.write_atomic("packing.json", text.encode())
    index = open_packings(run, dataset, PACKED)["books"]
    assert (
        index.identity == folder.root.rpartition("/")[2] == digest_of([2, positions_digest(dataset.manifest), 64])[:16]
    )
    assert len(list(packed_files(run, dataset, PACKED))) == len(packed.sources) + 1


def test_rows_of_short_documents_do_not_come_first(tmp_path: Path) -> None:
    """The rows of a group are read in sequence, so each half of them must have documents of the same lengths."""
    dataset = bare_documents(tmp_path, lengths_like_fineweb(1 << 22))
    config = TrainConfig(seq_len=2048, packing="best_fit", pack_chunks=256)
    write_packing(Store(str(tmp_path)), dataset, config)
    group = open_packings(Store(str(tmp_path)), dataset, config)["web"].group(0)
    half = group.num_rows // 2
    first, second = group.length[group.row < half].mean(), group.length[group.row >= half].mean()
    assert 0.9 < first / second < 1.1


def test_unsorted_documents_are_refused(tmp_path: Path) -> None:
    dataset = bare_documents(tmp_path, [4000, 5000, 6000])
    path = Path(dataset.streams["web/train"][0].docs_path)
    table = pa.ipc.open_file(str(tmp_path / path)).read_all()
    with pa.ipc.new_file(str(tmp_path / path), table.schema) as writer:
        writer.write_table(table.take(pa.array([1, 0, 2])))
    dataset.streams["web/train"][0] = replace(
        dataset.streams["web/train"][0], docs_path=checked(Store(str(tmp_path)), str(path))
    )
    with pytest.raises(ContractError, match=r"0\.docs: expected documents sorted by token_offset within 15000 tokens"):
        write_packing(Store(str(tmp_path)), dataset, TrainConfig(seq_len=1024, packing="best_fit"))
