"""Tests of SimHash: its bits by their definition, distances, and tables that find every near signature."""

from itertools import combinations
from math import comb

import numpy as np
import pytest

from pipeline.minhash.simhash import distance, hashes, sketch, table_keys
from pipeline.minhash.stage import SignatureConfig, as_matrix, signature, similarity, value_type
from schemas.errors import ConfigError

CONFIG = SignatureConfig(family="simhash")


def flipped(signature_: int, bits: tuple[int, ...]) -> int:
    return signature_ ^ sum(1 << bit for bit in bits)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0b1011], 0b1011),
        ([0b110, 0b011, 0b010], 0b010),
        ([0b01, 0b10], 0),  # a tie is no majority
        ([0b1] * 3 + [0b10] * 2, 0b1),  # every occurrence votes
        ([1 << 63, 1 << 63, 0], 1 << 63),
        ([(1 << 64) - 1] * 300 + [0] * 299, (1 << 64) - 1),
        ([(1 << 64) - 1] * 300 + [0] * 300, 0),
    ],
)
def test_bits_are_those_of_the_majority(codes: list[int], expected: int) -> None:
    assert sketch(np.array(codes, np.uint64), CONFIG).tolist() == [expected]


def test_signature_by_its_definition() -> None:
    text = "one two three four five six " * 3 + "seven"
    codes = hashes(text, "en", None, CONFIG).tolist()
    assert (len(codes), len(set(codes))) == (15, 7)
    votes = [sum(1 if code >> bit & 1 else -1 for code in codes) for bit in range(64)]
    stored = signature(text, "en", CONFIG)
    assert stored == sum(1 << bit for bit in range(64) if votes[bit] > 0).to_bytes(8, "little")
    assert (value_type(CONFIG), as_matrix([stored], "<u8").shape) == ("<u8", (1, 1))


def test_near_copies_differ_in_few_bits() -> None:
    generator = np.random.default_rng(5)
    words = np.array([a + b + c for a in "bcdfghjklmnp" for b in "aeiouy" for c in "bdfgklmnprst"])
    near, far = [], []
    for _ in range(100):
        base, other = generator.choice(words, 600), generator.choice(words, 600)
        changed = base.copy()
        changed[generator.integers(600)] = "new"  # five of 596 shingles
        values = as_matrix([signature(" ".join(text), "en", CONFIG) for text in (base, changed, other)], "<u8")[:, 0]
        near.append(int(distance(values[0], values[1])))
        far.append(int(distance(values[0], values[2])))
    assert np.mean(near) < 5
    assert np.mean(far) == pytest.approx(32, abs=4 * (16 / 100) ** 0.5)


def test_similarity_is_the_share_of_equal_bits() -> None:
    left, right = np.array([[0], [5], [(1 << 64) - 1]], np.uint64), np.array([[0], [6], [0]], np.uint64)
    assert similarity(left, right).tolist() == [1.0, 62 / 64, 0.0]
    assert distance(left[:, 0], right[:, 0]).tolist() == [0, 2, 64]


@pytest.mark.parametrize(("blocks", "max_distance"), [(6, 3), (4, 3), (5, 2), (10, 3), (3, 0), (64, 1), (7, 4)])
def test_near_signatures_share_a_key(blocks: int, max_distance: int) -> None:
    generator = np.random.default_rng(blocks)
    signatures = generator.integers(0, 1 << 64, 2000, dtype=np.uint64)
    # every combination of blocks that can be hit, then bits at random
    edges = [64 * block // blocks for block in range(blocks + 1)]
    hits = [tuple(edges[block] for block in chosen) for chosen in combinations(range(blocks), max_distance)]
    hits += [tuple(generator.choice(64, max_distance, replace=False).tolist()) for _ in range(2000 - len(hits))]
    others = [flipped(value, bits) for value, bits in zip(signatures.tolist(), hits)]
    left, right = (table_keys(np.array(each, np.uint64), blocks, max_distance) for each in (signatures, others))
    assert left.shape == (2000, comb(blocks, max_distance))
    assert (left == right).any(axis=1).all()


def test_every_pair_of_flipped_bits() -> None:
    flips = [*combinations(range(64), 2), *combinations(range(64), 1), ()]
    others = np.array([flipped(0x0123456789ABCDEF, bits) for bits in flips], np.uint64)
    keys = table_keys(others, 6, 2)
    assert (keys[:-1] == keys[-1]).any(axis=1).all()


def test_a_key_is_that_of_a_choice_of_blocks() -> None:
    keys = table_keys(np.array([0], np.uint64), 6, 3)[0]
    assert len(set(keys.tolist())) == 20  # equal blocks, but of other choices
    for chosen, number in zip(combinations(range(6), 3), range(20)):
        edges = [64 * block // 6 for block in range(7)]
        for block in range(6):
            other = table_keys(np.array([1 << edges[block]], np.uint64), 6, 3)[0]
            assert (other[number] == keys[number]) is np.bool_(block not in chosen)


def test_far_signatures_share_no_key() -> None:
    low, high = (table_keys(np.array([value], np.uint64), 6, 3) for value in (0, (1 << 64) - 1))
    assert not np.isin(low, high).any()
    assert table_keys(np.zeros(0, np.uint64), 6, 3).shape == (0, 20)


@pytest.mark.parametrize(("blocks", "max_distance"), [(3, 3), (2, 5), (65, 3), (4, -1)])
def test_impossible_tables_are_refused(blocks: int, max_distance: int) -> None:
    with pytest.raises(ConfigError, match=rf"got blocks = {blocks} and max_distance = {max_distance}\."):
        table_keys(np.zeros(1, np.uint64), blocks, max_distance)
