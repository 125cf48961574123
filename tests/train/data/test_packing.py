"""Tests of best-fit packing: documents once per epoch, few of them cut, and an index that is written once."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import Dataset, Shard, open_dataset, shard_schema
from tests.support.checked_paths import checked
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import bare_dataset, batches_of, staged
from train.config.train import TrainConfig
from train.data import packing
from train.data.order import open_streams
from train.data.packing import best_fit, open_packings, packed_files, packing_folder, write_packing
from train.data.permutation import ChunkOrder, PackedIndex, PackedRows
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
    files = packing_folder(Store(str(tmp_path)), dataset, 8)
    names = ("00000.pieces.arrow", "00000.rows.arrow", "00000.chunks.arrow")
    assert dict(source) == {
        "files": {name: files.sha256(name) for name in names},
        "name": "web",
        "num_tokens": 32,
        "num_rows": 5,
        "num_documents": 7,
        "cut": 2,
        "cut_in_stream": 3,
        "padding": 1 - 32 / 40,
    }
    index = open_packings(Store(str(tmp_path)), dataset, config)["web"]
    assert index.chunk_begins.tolist() == [0, 2, 5]
    assert index.row_begins.tolist() == [0, 4, 5, 7, 8, 9]
    assert index.start.tolist() == [0, 11, 13, 15, 3, 16, 30, 21, 25]
    assert index.length.tolist() == [3, 2, 2, 1, 8, 5, 2, 4, 5]
    assert index.closed.tolist() == [1, 1, 1, 0, 0, 1, 0, 1, 1]
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


@st.composite
def corpora(draw: Any) -> tuple[list[list[int]], int, int]:
    """Draw shards of documents of some numbers of tokens, a chunk size and a row length that divides it."""
    shards = draw(st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=4))
    seq_len = draw(st.sampled_from([1, 3, 8]))
    return shards, seq_len * draw(st.sampled_from([1, 2, 5])), seq_len


@settings(max_examples=60, deadline=None)
@given(corpora(), st.integers(0, 9))
def test_every_token_once_per_epoch_and_back(corpus: tuple[list[list[int]], int, int], seed: int) -> None:
    shards, chunk, seq_len = corpus
    counts = [sum(lengths) for lengths in shards]
    config = TrainConfig(seq_len=seq_len, packing="best_fit")
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(Path(folder), shards, chunk)
        packing = write_packing(Store(folder), dataset, config)
        index = open_packings(Store(folder), dataset, config)["web"]
        chunks = ChunkOrder("web", counts, chunk, seed, 2)
        assert packing is not None
        assert packing.sources[0].num_tokens == chunks.num_chunks * chunk
        if not chunks.num_chunks:
            return
        rows = PackedRows(chunks, index)
        pieces = rows.pieces(np.arange(3 * rows.num_units), seq_len)
        tokens = [
            (e, t)
            for e, first, n in zip(pieces.epoch.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)
            for t in range(first, first + n)
        ]
        assert sorted(tokens) == [(e, t) for e in range(3) for t in range(chunks.num_chunks * chunk)]
        filled = np.bincount(pieces.row, weights=pieces.length)
        assert filled.max() <= seq_len
        assert [e for e, _ in tokens] == sorted(e for e, _ in tokens)
        # A piece is within a document and a chunk; it is closed where the document ends.
        ends = set(np.cumsum([n for lengths in shards for n in lengths]).tolist())
        for start, length, closed in zip(pieces.start.tolist(), pieces.length.tolist(), pieces.closed, strict=True):
            assert not ends & set(range(start + 1, start + length))
            assert start // chunk == (start + length - 1) // chunk
            assert closed == (start + length in ends)
        rows_of: dict[int, set[int]] = {}
        first_epoch = pieces.take(np.flatnonzero(pieces.epoch == 0))
        bounds = np.array([0, *sorted(ends)])
        for start, row in zip(first_epoch.start.tolist(), first_epoch.row.tolist(), strict=True):
            rows_of.setdefault(int(np.searchsorted(bounds, start, side="right")), set()).add(row)
        assert packing.sources[0].num_documents == len(rows_of)
        assert packing.sources[0].cut == sum(len(pieces) > 1 for pieces in rows_of.values())
        for epoch in (0, 2):
            for start in range(0, chunks.num_chunks * chunk, 7):
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
    monkeypatch.setattr(packing, "_write_source", None)
    assert write_packing(run, dataset, PACKED) == first
    assert packing_folder(run, dataset, 64).uri != packing_folder(run, dataset, 32).uri
    for config in (TrainConfig(seq_len=64),):
        assert (write_packing(run, dataset, config), open_packings(run, dataset, config)) == (None, None)


def test_the_same_index_whenever_it_is_written(tmp_path: Path) -> None:
    packing = []
    for name in ("a", "b"):
        run = make_tiny_dataset(tmp_path / name)
        dataset = open_dataset(run)
        write_packing(run, dataset, PACKED)
        folder = Path(packing_folder(run, dataset, 64).uri)
        packing.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert packing[0] == packing[1]
    assert sorted(packing[0])[:3] == ["00000.chunks.arrow", "00000.pieces.arrow", "00000.rows.arrow"]


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
    folder = packing_folder(run, dataset, 64)
    folder.write_atomic("packing.json", packing.model_copy(update={"seq_len": 32}).model_dump_json().encode())
    with pytest.raises(ContractError, match=r"expected version, dataset and seq_len .* got .* 32\)\. Remove"):
        open_packings(run, dataset, PACKED)
    wrong = [source.model_copy(update={"num_rows": 5}) for source in packing.sources]
    folder.write_atomic("packing.json", packing.model_copy(update={"sources": wrong}).model_dump_json().encode())
    with pytest.raises(ContractError, match=r"expected 5 rows of books, got \d+\. Remove the folder"):
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
    assert len(expected) == 3 * len(packed.sources)
    assert list(packed_files(run, dataset, TrainConfig(seq_len=64))) == []
    assert verify_dataset(run, dataset, expected) > len(expected)
    path = Path(expected[0][0].path(expected[0][1]))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ContractError, match=r"00000\.pieces\.arrow: expected SHA-256 .* got "):
        verify_dataset(run, dataset, expected)
