"""Tests of the order of the training samples: a bijection in every epoch, reached directly, and back."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_dataset import make_tiny_dataset

from schemas.errors import ConfigError
from schemas.tokens import Dataset, open_dataset
from train.config import TrainConfig
from train.order import Order, StreamOrder, make_heldout_order, make_order, permute
from train.skips import SkipList


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two sources of several shards, chunks of 256 tokens."""
    return open_dataset(make_tiny_dataset(tmp_path_factory.mktemp("run")))


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
    """Chi-square of (element, place) over 2,000 keys, below a bound that fair shuffles pass by more than six sigma."""
    keys = np.repeat(np.arange(2000, dtype=np.uint64), size)
    places = permute(np.tile(np.arange(size), 2000), np.full(len(keys), size), keys)
    counts = np.zeros((size, size))
    np.add.at(counts, (np.tile(np.arange(size), 2000), places), 1)
    chi, degrees = float(((counts - 2000 / size) ** 2 / (2000 / size)).sum()), (size - 1) ** 2
    assert chi < degrees + 6 * np.sqrt(2 * degrees) + 12


def stream(shards: list[int], chunk: int = 32, **config: int) -> StreamOrder:
    return StreamOrder("web", shards, chunk, TrainConfig(**({"seq_len": 8, "window_shards": 2} | config)))


@pytest.mark.parametrize(("tokens", "chunks"), [(0, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_a_chunk_needs_one_token_more(tokens: int, chunks: int) -> None:
    assert stream([tokens]).num_chunks == chunks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(lambda shards: sum(shards) > 32))
def test_every_sample_once_per_epoch_whatever_the_shards(shards: list[int]) -> None:
    order = stream(shards)
    epoch, start = order.locate(np.arange(3 * order.num_samples))
    assert epoch.tolist() == np.repeat([0, 1, 2], order.num_samples).tolist()
    for number in range(3):
        begins = start[epoch == number]
        assert sorted(begins.tolist()) == list(range(0, order.num_samples * 8, 8))
        assert order.find(number, begins).tolist() == np.flatnonzero(epoch == number).tolist()
        # A chunk's samples follow each other.
        assert (np.diff(begins.reshape(-1, 4), axis=1) == 8).all()


def test_epochs_seeds_and_sources_differ() -> None:
    def begins(order: StreamOrder, epoch: int) -> list[int]:
        number = order.num_samples
        return order.locate(np.arange(epoch * number, (epoch + 1) * number))[1].tolist()

    order = stream([2000, 2000])
    other = StreamOrder("books", [2000, 2000], 32, TrainConfig(seq_len=8, window_shards=2))
    found = [begins(order, 0), begins(order, 1), begins(stream([2000, 2000], seed=1), 0), begins(other, 0)]
    assert len({tuple(starts) for starts in found}) == 4
    assert begins(order, 0) == begins(stream([2000, 2000]), 0)


def test_a_window_is_finished_before_the_next_begins() -> None:
    order = stream([320] * 12, window_shards=3)
    assert order.windows.tolist() == [0, 30, 60, 90]
    _, start = order.locate(np.arange(order.num_samples))
    windows = np.searchsorted(order.windows, start // 32, side="right")
    assert sorted(windows[np.flatnonzero(np.diff(windows, prepend=-1))].tolist()) == [1, 2, 3, 4]


def test_proportional_weights_finish_all_sources_together(dataset: Dataset) -> None:
    order = make_order(dataset, TrainConfig(seq_len=64))
    assert order.counts == {"books": 5, "web": 16}
    total = sum(stream.num_samples for stream in order.streams)
    found = order.samples(0, 2 * total)
    assert (found.epoch == np.repeat([0, 1], total)).all()
    for number, source in enumerate(order.streams):
        begins = found.start[(found.source == number) & (found.epoch == 0)]
        assert sorted(begins.tolist()) == list(range(0, source.num_samples * 64, 64))


def test_weights_are_realised_at_every_prefix(dataset: Dataset) -> None:
    order = make_order(dataset, TrainConfig(seq_len=64, weights={"web": 0.37, "books": 0.63}))
    source = order.samples(0, 1000).source
    web = np.cumsum(source == order.sources.index("web"))
    assert np.abs(web - 0.37 * np.arange(1, 1001)).max() < 1


@pytest.mark.parametrize("skip", [(), (0, 5, 6, 41)])
def test_any_slice_is_a_slice_of_the_whole(dataset: Dataset, skip: tuple[int, ...]) -> None:
    order = make_order(dataset, TrainConfig(seq_len=64), SkipList(skip))
    whole = order.samples(0, 300)
    assert whole.index[:4].tolist() == ([0, 1, 2, 3] if not skip else [1, 2, 3, 4])
    for first, count in [(0, 1), (7, 13), (150, 150), (299, 1)]:
        part = order.samples(first, count)
        for name in ("index", "source", "epoch", "start"):
            assert getattr(part, name).tolist() == getattr(whole, name)[first : first + count].tolist()
    assert order.sample(17) == (order.sources[whole.source[17]], whole.epoch[17], whole.start[17])


def test_skipping_moves_the_rest_up_and_changes_nothing_else(dataset: Dataset) -> None:
    plain = make_order(dataset, TrainConfig(seq_len=64))
    skipping = make_order(dataset, TrainConfig(seq_len=64), SkipList((2, 9)))
    kept = [index for index in range(102) if index not in (2, 9)]
    assert skipping.samples(0, 100).start.tolist() == plain.samples(0, 102).start[kept].tolist()
    source, epoch, start = plain.sample(9)
    assert [part.tolist() for part in skipping.find(source, epoch, np.array([start]))] == [[9], [-1]]
    assert skipping.digest == plain.digest


def test_find_is_the_inverse_of_samples_in_late_epochs(dataset: Dataset) -> None:
    order = make_order(dataset, TrainConfig(seq_len=32, weights={"web": 1, "books": 3}), SkipList((5,)))
    found = order.samples(10**6, 500)
    for number in range(500):
        source, epoch, start = order.sources[found.source[number]], int(found.epoch[number]), found.start[number]
        index, used = order.find(source, epoch, np.array([start]))
        assert (index.tolist(), used.tolist()) == ([found.index[number]], [10**6 + number])


def test_order_is_what_it_always_was(dataset: Dataset) -> None:
    """Fixed values: a change here means that standing runs could not be resumed or traced; raise ORDER_VERSION."""
    order = make_order(dataset, TrainConfig(seq_len=64))
    assert keyed(12, 1) == [0, 1, 10, 3, 7, 2, 9, 8, 11, 5, 6, 4]
    assert order.samples(0, 8).start.tolist() == [5376, 5440, 5504, 2048, 5568, 1024, 1088, 2112]
    assert order.digest[:16] == "0dcf579a13279f52"


def test_digest_changes_with_all_that_decides_the_order(dataset: Dataset) -> None:
    configs = [{}, {"seed": 1}, {"seq_len": 32}, {"window_shards": 1}, {"weights": {"web": 1, "books": 1}}]
    digests = [make_order(dataset, TrainConfig(**({"seq_len": 64} | config))).digest for config in configs]
    assert len(set(digests)) == len(configs)
    assert make_order(dataset, TrainConfig(seq_len=64, learning_rate=1e-4, micro_batch=3)).digest == digests[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seq_len": 96}, r"divisor of the dataset's chunk_tokens 256, found 96; choose one of .*64, 128, 256"),
        ({"weights": {"web": 1, "boks": 1}}, r"'boks' is no source \(did you mean 'books'\?\); 'books' is not named"),
        ({"weights": {"web": 1}}, r"'books' is not named \(0 leaves it out\)"),
    ],
)
def test_settings_that_do_not_fit_the_dataset_are_refused(dataset: Dataset, config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_order(dataset, TrainConfig(**({"seq_len": 64} | config)))


def test_a_source_without_one_chunk_is_refused_unless_left_out(tmp_path: Path) -> None:
    dataset = open_dataset(make_tiny_dataset(tmp_path, {"web": 12, "memo": 2}, chunk_tokens=1024))
    tokens = dataset.num_tokens()["memo"]
    assert 0 < tokens < 1025
    with pytest.raises(ConfigError, match=rf"at least 1025 training tokens .* found memo has {tokens} tokens"):
        make_order(dataset, TrainConfig(seq_len=64))
    assert make_order(dataset, TrainConfig(seq_len=64, weights={"web": 1, "memo": 0})).sources == ("web",)


def test_heldout_order_is_the_same_for_every_seed(dataset: Dataset) -> None:
    one, two = (make_heldout_order(dataset, TrainConfig(seq_len=64, seed=seed)) for seed in (0, 7))
    assert isinstance(one, Order)
    assert isinstance(two, Order)
    assert one.samples(0, 12).start.tolist() == two.samples(0, 12).start.tolist()
    assert make_heldout_order(dataset, TrainConfig(seq_len=4096)) is None
