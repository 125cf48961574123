"""The order of one source: in every epoch a bijection with a direct inverse, at any row length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.permutation import ChunkOrder, Pieces, StreamRows, concatenate_ranges, join_pieces, permute


def keyed(size: int, key: int, backwards: bool = False, index: np.ndarray | None = None) -> list[int]:
    index = np.arange(size) if index is None else index
    return permute(index, np.full(size, size), np.full(size, key, np.uint64), backwards).tolist()


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(0, (1 << 64) - 1))
def test_permute_is_a_bijection_with_an_inverse(size: int, key: int) -> None:
    there = keyed(size, key)
    assert sorted(there) == list(range(size))
    assert keyed(size, key, True, np.array(there)) == list(range(size))


def test_permute_of_many_sizes_at_once_equals_one_by_one() -> None:
    sizes = np.array([1, 2, 1000, 10**12])
    index = np.array([0, 1, 999, 10**12 - 1])
    key = np.array([1, 2, 3, 4], np.uint64)
    single = [permute(index[i : i + 1], sizes[i : i + 1], key[i : i + 1])[0] for i in range(4)]
    assert permute(index, sizes, key).tolist() == single
    assert permute(permute(index, sizes, key), sizes, key, True).tolist() == index.tolist()


@pytest.mark.parametrize("size", [2, 7, 40])
def test_permute_sends_every_element_everywhere(size: int) -> None:
    """Chi-square of (element, position) over 2,000 keys, below a bound that fair shuffles meet by six sigma."""
    keys = np.repeat(np.arange(2000, dtype=np.uint64), size)
    places = permute(np.tile(np.arange(size), 2000), np.full(len(keys), size), keys)
    counts = np.zeros((size, size))
    np.add.at(counts, (np.tile(np.arange(size), 2000), places), 1)
    chi, degrees = float(((counts - 2000 / size) ** 2 / (2000 / size)).sum()), (size - 1) ** 2
    assert chi < degrees + 6 * np.sqrt(2 * degrees) + 12


def test_permute_has_its_fixed_values() -> None:
    assert keyed(12, 1) == [0, 1, 10, 3, 7, 2, 9, 8, 11, 5, 6, 4]


def test_ranges() -> None:
    numbers, which = concatenate_ranges(np.array([5, 9, 0]), np.array([2, 0, 3]))
    assert numbers.tolist() == [5, 6, 0, 1, 2]
    assert which.tolist() == [0, 0, 2, 2, 2]


def rows(shards: list[int], chunk: int = 32, source: str = "web", seed: int = 0, window_shards: int = 2) -> StreamRows:
    return StreamRows(ChunkOrder(source, shards, chunk, seed, window_shards))


@pytest.mark.parametrize(("tokens", "chunks"), [(0, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_a_chunk_needs_one_token_more(tokens: int, chunks: int) -> None:
    assert rows([tokens]).chunks.num_chunks == chunks


def inputs_of(pieces: Pieces) -> list[tuple[int, int]]:
    """Return (epoch, token of the stream) of every input, in order."""
    parts = zip(pieces.epoch.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)
    return [(epoch, token) for epoch, start, length in parts for token in range(start, start + length)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(lambda shards: sum(shards) > 32), st.data())
def test_every_token_once_per_epoch_at_any_lengths(shards: list[int], data: st.DataObject) -> None:
    """Three epochs in runs of rows of changing length, so that rows cross chunks and epochs."""
    order, position, actual = rows(shards), 0, []
    while position < 3 * order.num_units:
        length = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
        number = data.draw(st.integers(1, 40))
        pieces = order.pieces(position + length * np.arange(number), length)
        assert np.bincount(pieces.row, weights=pieces.length, minlength=number).tolist() == [length] * number
        assert (pieces.column[np.diff(pieces.row, prepend=-1) == 1] == 0).all()
        assert len(pieces) <= 2 * number
        actual += inputs_of(pieces)
        position += length * number
    whole = [entry for entry in actual if entry[0] < 3]
    assert sorted(whole) == [(epoch, token) for epoch in range(3) for token in range(order.num_units)]
    assert [entry[0] for entry in actual] == sorted(entry[0] for entry in actual)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=9).filter(lambda shards: sum(shards) > 32), st.data())
def test_touching_is_the_inverse_of_pieces(shards: list[int], data: st.DataObject) -> None:
    order, epoch = rows(shards), data.draw(st.integers(0, 3))
    start = data.draw(st.integers(0, order.num_units + 5))
    stop = data.draw(st.integers(start + 1, order.num_units + 10))
    first, end = order.touching(epoch, start, stop)
    positions = [position for a, b in zip(first, end, strict=True) for position in range(a, b)]
    tokens = inputs_of(order.pieces(np.array(positions, np.int64), 1))
    assert sorted(tokens) == [(epoch, token) for token in range(start, min(stop, order.num_units))]


def test_a_row_over_an_edge_has_two_pieces() -> None:
    order = rows([200])
    chunk = order.chunks.chunks(0, np.array([0, 1]))
    pieces = order.pieces(np.array([24, 32]), 16)
    assert pieces.row.tolist() == [0, 0, 1]
    assert pieces.column.tolist() == [0, 8, 0]
    assert pieces.length.tolist() == [8, 8, 16]
    assert pieces.start.tolist() == [chunk[0] * 32 + 24, chunk[1] * 32, chunk[1] * 32]
    assert not pieces.closed.any()


def test_joined_pieces_lie_by_row() -> None:
    order = rows([200])
    entry, two = order.pieces(np.array([24]), 16), order.pieces(np.array([0, 8]), 8)
    joined = join_pieces([entry, two], [np.array([1]), np.array([2, 0])])
    assert joined.row.tolist() == [0, 1, 1, 2]
    assert joined.start.tolist() == [two.start[1], *entry.start, two.start[0]]
    assert len(join_pieces([], [])) == 0


def test_epochs_seeds_and_sources_differ() -> None:
    def begins(order: StreamRows, epoch: int) -> tuple[int, ...]:
        number = order.num_units
        return tuple(order.pieces(np.arange(epoch * number, (epoch + 1) * number, 8), 8).start.tolist())

    order, shards = rows([2000, 2000]), [2000, 2000]
    actual = [begins(order, 0), begins(order, 1), begins(rows(shards, seed=1), 0), begins(rows(shards, source="b"), 0)]
    assert len(set(actual)) == 4
    assert begins(order, 0) == begins(rows(shards), 0)


def test_a_window_is_finished_before_the_next_begins() -> None:
    order = rows([320] * 12, window_shards=3)
    assert order.chunks.windows.tolist() == [0, 30, 60, 90]
    start = order.pieces(np.arange(0, order.num_units, 8), 8).start
    windows = np.searchsorted(order.chunks.windows, start // 32, side="right")
    assert sorted(windows[np.flatnonzero(np.diff(windows, prepend=-1))].tolist()) == [1, 2, 3, 4]
    # A chunk's rows follow each other.
    assert (np.diff(start.reshape(-1, 4), axis=1) == 8).all()


def test_many_epochs_evict_old_tables_and_rebuild_them() -> None:
    order = rows([500])
    early = order.pieces(np.arange(0, 480, 8), 8).start.tolist()
    for epoch in range(20):
        order.pieces(np.array([epoch * order.num_units]), 8)
    assert order.pieces(np.arange(0, 480, 8), 8).start.tolist() == early
