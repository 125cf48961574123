"""The mixture of sources: exact counts, with a deviation below one sample at any prefix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from train.data.order import MAX_BLOCK, Mixture, block_counts, schedule


def deviation(counts: list[int], slots: np.ndarray) -> float:
    """Return the largest |actual - target| over all sources and prefixes of a block."""
    taken = np.cumsum(slots[:, None] == np.arange(len(counts)), axis=0)
    target = np.arange(1, len(slots) + 1)[:, None] * np.array(counts) / sum(counts)
    return float(np.abs(taken - target).max())


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any))
def test_schedule_is_exact_and_never_a_sample_off(counts: list[int]) -> None:
    slots = schedule(counts)
    assert np.bincount(slots, minlength=len(counts)).tolist() == counts
    assert deviation(counts, slots) < 1


def test_largest_deficit_would_be_off_by_more_than_one() -> None:
    """The reason for deadlines: on these counts the common greedy rule deviates by more than a sample."""
    counts = [1, 5, 9, 2, 1, 25, 9, 1, 25, 9, 1]
    taken, slots = np.zeros(len(counts)), []
    for slot in range(1, sum(counts) + 1):
        source = int(np.argmax(slot * np.array(counts) / sum(counts) - taken))
        taken[source] += 1
        slots.append(source)
    assert round(deviation(counts, np.array(slots)), 3) == 1.205
    assert deviation(counts, schedule(counts)) < 1


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ({"web": 0.7, "books": 0.3}, {"web": 7, "books": 3}),
        ({"web": 1, "books": 2, "code": 0}, {"web": 1, "books": 2}),
        ({"web": 5.0}, {"web": 1}),
        ({"a": 1, "b": MAX_BLOCK - 1}, {"a": 1, "b": MAX_BLOCK - 1}),
        # One more than fits: 1/65537 of 65536 rounds up to the remaining sample.
        ({"a": 1, "b": MAX_BLOCK}, {"a": 1, "b": MAX_BLOCK - 1}),
        ({"a": 1e-3, "b": 1 / 3}, {"a": 196, "b": 65340}),
    ],
)
def test_counts_of_a_block(weights: dict[str, float], counts: dict[str, int]) -> None:
    assert block_counts(weights) == counts


def test_a_share_too_small_for_a_block_is_rejected() -> None:
    with pytest.raises(
        ConfigError,
        match=r"at least 1.53e-05 .* got a \(5e-06\)\. Set each of these weights to 0 in train\.weights, or",
    ):
        block_counts({"a": 5e-6, "b": 1 - 5e-6})


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 10**12))
def test_locate_and_find_are_inverse(counts: list[int], first: int) -> None:
    mixture = Mixture({str(source): count for source, count in enumerate(counts)})
    index = np.arange(first, first + 100)
    source, position = mixture.locate(index)
    for number in range(len(counts)):
        assert mixture.find(number, position[source == number]).tolist() == index[source == number].tolist()


def test_positions_of_a_source_have_no_gap_across_blocks() -> None:
    mixture = Mixture({"web": 3, "books": 2})
    source, position = mixture.locate(np.arange(40))
    assert position[source == 0].tolist() == list(range(24))
    assert position[source == 1].tolist() == list(range(16))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 500))
def test_taken_counts_the_first_samples_by_source(counts: list[int], number: int) -> None:
    mixture = Mixture({str(source): count for source, count in enumerate(counts)})
    source, _ = mixture.locate(np.arange(number))
    assert mixture.taken(number) == np.bincount(source, minlength=len(counts)).tolist()
