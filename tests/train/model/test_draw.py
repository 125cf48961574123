"""Normal numbers by position: any region equals the same region of the whole tensor, and the numbers are normal."""

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.model.draw import AT_ONCE, _bits, _log, _normal, normal_part, num_drawn

NUMBER = 2_000_000


def whole(seed: int, name: str, *size: int, threads: int = 1) -> np.ndarray:
    return normal_part((seed, name), size, [slice(0, length) for length in size], 1.0, threads)


@given(st.data())
def test_a_region_is_a_part_of_the_whole(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    region = []
    for length in size:
        first = data.draw(st.integers(0, length))
        region.append(slice(first, data.draw(st.integers(first, length))))
    part = normal_part((3, "w"), size, region, 1.0)
    assert np.array_equal(part, whole(3, "w", *size)[tuple(region)])
    assert part.size <= num_drawn(size, region) <= part.size + 16 * max(1, math.prod(size))


def test_threads_and_pieces_do_not_change_a_number() -> None:
    size = (3, AT_ONCE // 2 + 1)
    alone = whole(1, "w", *size)
    assert np.array_equal(alone, whole(1, "w", *size, threads=3))
    last = normal_part((1, "w"), size, (slice(2, 3), slice(AT_ONCE // 2 - 5, AT_ONCE // 2 + 1)), 1.0)
    assert np.array_equal(alone[2:, -6:], last)


def test_a_row_split_draws_its_rows_only_and_a_column_split_its_columns() -> None:
    size = (1024, 4096)
    assert num_drawn(size, (slice(0, 64), slice(0, 4096))) == 64 * 4096
    assert num_drawn(size, (slice(0, 1024), slice(512, 1024))) == 1024 * 512
    assert num_drawn(size, (slice(0, 0), slice(0, 4096))) == 0


def test_the_bits_are_those_of_philox_4x64_10() -> None:
    """The second block of key 0: ten rounds by Python's integers, from the definition of Salmon et al., section 3.3."""
    mask = (1 << 64) - 1
    c0, c1, c2, c3, k0, k1 = 2, 0, 0, 0, 0, 0  # numpy counts before it draws: counter 1 begins with block 2
    for _ in range(10):
        one, two = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (two >> 64) ^ c1 ^ k0, two & mask, (one >> 64) ^ c3 ^ k1, one & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    expected = [half for word in (c0, c1, c2, c3) for half in (word & 0xFFFFFFFF, word >> 32)]
    assert _bits(0, 8, 8).tolist() == expected


@pytest.mark.parametrize("bits", [0, 1, 77, 1 << 20, 0x13333333, 0x40000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_a_number_is_the_quantile_of_its_bits(bits: int) -> None:
    number = _normal(np.array([bits], np.uint32))[0]
    assert number == pytest.approx(NormalDist().inv_cdf((bits + 0.5) / 2**32), rel=2e-7)
    assert _normal(np.array([2**32 - 1 - bits], np.uint32))[0] == -number


def test_the_logarithm_needs_no_library() -> None:
    values = np.concatenate([np.geomspace(1e-10, 0.075, 10_000), [0.5, 0.25]])
    assert np.abs(_log(values) - np.log(values)).max() < 1e-9


def test_the_numbers_are_frozen() -> None:
    """Another digest is another model for the same seed: raise the version of the rule instead."""
    digest = hashlib.sha256(whole(0, "embedding.weight", 300, 40).tobytes()).hexdigest()
    assert digest == "148f956bdaee008284dfd02c658cc056d5ea285bdcfc0b8aea8cdba4585474b5"


def test_moments_and_distribution_are_normal() -> None:
    numbers = whole(5, "w", NUMBER).astype(np.float64)
    error = NUMBER**-0.5
    # The k-th moment of n numbers deviates by the root of (m_2k - m_k^2) / n; five deviations are allowed.
    for power, expected, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10_395 - 225)):
        assert abs((numbers**power).mean() - expected) < 5 * math.sqrt(spread) * error
    grid = np.linspace(-4, 4, 161)
    shares = np.searchsorted(np.sort(numbers), grid) / NUMBER
    distance = max(abs(share - NormalDist().cdf(at)) for share, at in zip(shares, grid, strict=True))
    assert distance < 1.95 * error  # Kolmogorov and Smirnov, at 0.1 %


def test_neighbours_names_and_seeds_are_independent() -> None:
    numbers, error = whole(5, "w", NUMBER).astype(np.float64), NUMBER**-0.5
    for distance in (1, 2, 3, 4, 8, 1024):
        here, there = numbers[:-distance], numbers[distance:]
        for one, other in ((here, there), (here**2 - 1, there**2 - 1)):
            assert abs((one * other).mean()) < 5 * error * one.std() * other.std()
    for other in (whole(5, "v", NUMBER), whole(6, "w", NUMBER)):
        assert abs((numbers * other).mean()) < 5 * error
        assert not np.array_equal(numbers[:8], other[:8])
