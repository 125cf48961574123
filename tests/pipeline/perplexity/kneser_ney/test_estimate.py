"""Tests of counts, discounts, contexts, messages and reading of text, on sentences that are counted by hand."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from pipeline.perplexity.kneser_ney.arpa import join_messages, message_grams, message_rows
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.kneser_ney.estimate import (
    BOS,
    EOS,
    CountsOfCounts,
    Discounts,
    combine_counts,
    context_buckets,
    contexts_by_bucket,
    estimate_discounts,
    ngrams_by_order,
    owner_parts,
    suffix_order,
    sum_contexts,
    windows,
)
from pipeline.perplexity.kneser_ney.read_text import (
    ByteRange,
    find_ranges,
    make_chunks,
    read_lines,
    sha256_of,
    split_words,
)
from schemas.errors import ConfigError, ContractError

A, B, C = 3, 4, 5


def spelled(grams: np.ndarray) -> list[str]:
    """Return columns as text, first word first."""
    names = {0: "<unk>", BOS: "<s>", EOS: "</s>", A: "a", B: "b", C: "c"}
    return [" ".join(names[int(word)] for word in column[::-1]) for column in grams.T]


def test_windows_end_at_every_word_and_are_padded_with_sentence_starts() -> None:
    line = np.array([A, B, EOS, EOS, C, EOS], np.uint32)
    assert spelled(windows(line, 3)) == [
        *("<s> <s> a", "<s> a b", "a b </s>"),
        "<s> <s> </s>",
        *("<s> <s> c", "<s> c </s>"),
    ]
    assert spelled(windows(line, 1)) == ["a", "b", "</s>", "</s>", "c", "</s>"]
    assert windows(line[:0], 3).shape == (3, 0)


@pytest.mark.parametrize("bits", [3, 13, 21, 32])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_suffix_order_is_that_of_tuples(bits: int, rows: int) -> None:
    grams = np.random.default_rng(bits + rows).integers(0, 7, (rows, 500), dtype=np.uint32)
    grams[:, ::2] += np.uint32(2**bits - 7)  # the highest ids of so many bits
    grams %= np.uint32(2**bits - 1)
    ordered = grams[:, suffix_order(grams, bits)]
    assert [tuple(column) for column in ordered.T] == sorted(tuple(column) for column in grams.T)


def test_levels_hold_adjusted_counts_and_raw_counts() -> None:
    # a b / c b / a b: "b" occurs three times, after two different words; "<s> a" has its raw count.
    line = np.array([A, B, EOS, C, B, EOS, A, B, EOS], np.uint32)
    orders = ngrams_by_order(*combine_counts(windows(line, 3), np.ones(9, np.int64), 3))
    tables = [
        {name: (int(count), int(raw)) for name, count, raw in zip(spelled(level.grams), level.counts, level.raw)}
        for level in orders
    ]
    assert tables == [
        {"</s>": (1, 3), "a": (1, 2), "b": (2, 3), "c": (1, 1)},
        {"b </s>": (2, 3), "<s> a": (2, 2), "a b": (1, 2), "c b": (1, 1), "<s> c": (1, 1)},
        {"a b </s>": (2, 2), "c b </s>": (1, 1), "<s> a b": (2, 2), "<s> c b": (1, 1)},
    ]
    assert spelled(orders[1].grams[:, orders[2].suffix]) == ["b </s>", "b </s>", "a b", "c b"]
    assert orders[1].kept(1, 6).tolist() == [True, True, True, False, False]
    assert orders[1].kept(0, B).tolist() == [False, True, False, False, False]
    # Sentence ends are kept at any threshold.
    assert orders[0].kept(3, 6).tolist() == [True, False, False, False]


def test_levels_of_nothing() -> None:
    orders = ngrams_by_order(np.zeros((3, 0), np.uint32), np.zeros(0, np.int64))
    assert [(level.grams.shape, len(level.counts)) for level in orders] == [((1, 0), 0), ((2, 0), 0), ((3, 0), 0)]
    assert CountsOfCounts.of(orders[1].counts, orders[1].kept(0, 9)) == CountsOfCounts()


def test_tally() -> None:
    counts = np.array([1, 1, 2, 3, 4, 5, 9])
    kept = np.array([True, False, True, True, True, True, False])
    expected = CountsOfCounts(7, 5, 2, 1, 1, 1, kept_ones=1, kept_twos=1, kept_more=3, pruned_mass=10, mass=25)
    assert CountsOfCounts.of(counts, kept) == expected
    assert CountsOfCounts.of(counts[:3], kept[:3]) + CountsOfCounts.of(counts[3:], kept[3:]) == expected


def test_discounts_by_hand() -> None:
    # Y = 10 / (10 + 2*5) = .5: D1 = 1 - 2*.5*5/10, D2 = 2 - 3*.5*2/5, D3+ = 3 - 4*.5*1/2
    discounts, problem = estimate_discounts(2, CountsOfCounts(ones=10, twos=5, threes=2, fours=1), None)
    assert ((discounts.d1, discounts.d2, discounts.d3_plus), problem) == (pytest.approx((0.5, 1.4, 2.0)), None)
    assert discounts.of(np.array([1, 2, 3, 7])).tolist() == pytest.approx([0.5, 1.4, 2.0, 2.0])
    ints = (np.array([value]) for value in (3, 1, 2, 4, 20))
    assert discounts.freed(*ints)[0] == pytest.approx((3 * 0.5 + 1.4 + 2 * 2.0 + 4) / 20)


@pytest.mark.parametrize(
    ("ones", "twos", "threes", "fours", "problem"),
    [
        (0, 5, 2, 1, "no 3-gram with an adjusted count of 1"),
        (9, 0, 2, 1, "no 3-gram with an adjusted count of 2"),
        (9, 5, 0, 1, "no 3-gram with an adjusted count of 3"),
        (10, 5, 7, 1, "a discount of -0.1 for adjusted counts of 2"),  # 2 - 3*.5*7/5
        (10, 5, 2, 4, "a discount of -1 for adjusted counts of 3"),  # 3 - 4*.5*4/2
        (10, 5, 2, 3, None),  # 3 - 4*.5*3/2 = 0, which is allowed
        (10, 5, 2, 0, None),
    ],
)
def test_degenerate_counts(ones: int, twos: int, threes: int, fours: int, problem: str | None) -> None:
    tally = CountsOfCounts(ones=ones, twos=twos, threes=threes, fours=fours)
    discounts, reason = estimate_discounts(3, tally, [0.5, 1.0])
    assert reason == problem
    if problem is None:
        assert discounts.d3_plus == pytest.approx(3 - 2 * fours / 2)
        return
    assert discounts == Discounts(0.5, 1.0, 1.0)
    with pytest.raises(
        ContractError,
        match=rf"expected text with enough different 3-grams .* got {problem} .*\[{ones}, {twos}, {threes}, ",
    ):
        estimate_discounts(3, tally, None)


def test_sums_are_in_the_order_of_the_contexts_that_were_sent() -> None:
    line = np.array([A, B, EOS, C, B, EOS, A, B, EOS], np.uint32)
    level = ngrams_by_order(*combine_counts(windows(line, 3), np.ones(9, np.int64), 3))[1]
    keep = np.array([True, True, True, False, True])  # c b is pruned
    for number in (1, 2, 3):
        pairs = contexts_by_bucket(level, keep, number)
        totals = [sum_contexts([pair], Discounts(0.5, 1.0, 1.5), 3, np.zeros(0, np.uint64)) for pair in pairs]
        by_context = {}
        for (contexts, _), total in zip(pairs, totals):
            sums = total.sums[0]
            by_context |= dict(zip(spelled(contexts), zip(sums.mass.tolist(), sums.freed.tolist())))
        # b: "b </s>" 2; <s>: "<s> a" 2 and "<s> c" 1; a: "a b" 1; c: "c b" 1, pruned: all of it backs off
        assert by_context == {"b": (2, 0.5), "<s>": (3, 0.5), "a": (1, 0.5), "c": (1, 1.0)}


def test_owners_keep_suffixes_together() -> None:
    rng = np.random.default_rng(1)
    grams = rng.integers(1, 40, (4, 2000), dtype=np.uint32)
    bounds = np.unique((grams[0, :9].astype(np.uint64) << np.uint64(32)) | grams[1, :9])
    assert (owner_parts(grams, bounds) == owner_parts(grams[:2], bounds)).all()
    assert (np.diff(owner_parts(grams[:, suffix_order(grams, 6)], bounds)) >= 0).all()
    assert set(context_buckets(grams, 5).tolist()) == {0, 1, 2, 3, 4}
    assert (context_buckets(grams, 5)[::2] == context_buckets(grams[:, ::2], 5)).all()


def test_messages_are_joined_from_rows_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.perplexity.kneser_ney.arpa.ROW_BYTES", 7)
    grams, counts = np.arange(15, dtype=np.uint32).reshape(3, 5), np.arange(5) - 2
    rows = [
        *message_rows(4, 1, 3, grams, counts),
        *message_rows(4, 0, 3, grams[:, :2], counts[:2]),
        *message_rows(4, 2, 3),
    ]
    messages = join_messages(reversed(rows))
    assert list(messages) == [(3, 0), (3, 1)]
    received_grams, received_counts = message_grams(messages[3, 1], 3)
    assert (received_grams.tolist(), received_counts.tolist()) == (grams.tolist(), counts.tolist())


def chunked(lines: list[bytes | None], num_tokens: int = 100, reserved: str = "refuse") -> list[list[bytes]]:
    """Return the words of each chunk as text."""
    texts = []
    for chunk in make_chunks(
        [pa.array(lines[:2], pa.binary()), pa.array(lines[2:], pa.binary())], num_tokens, reserved
    ):
        words = [b"\n", *(word.as_py() for word in chunk.words)]
        texts.append(b" ".join(words[number] for number in chunk.line).split(b" "))
    return texts


def test_words_are_separated_by_spaces() -> None:
    lines = [b"a  b\tc\r", b"", None, b" \xff\xfe x\x00y \xc2\xa0 z\x0bz", b"one\ntwo  three"]
    assert chunked(lines) == [
        [
            *(b"a", b"b", b"c", b"\n", b"\n"),
            *(b"\xff\xfe", b"x", b"y", b"\xc2\xa0", b"z\x0bz", b"\n"),
            *(b"one", b"\n", b"two", b"three", b"\n"),
        ]
    ]
    assert split_words(pa.array(["à b", None, "c"])[1:]).to_pylist() == [[b"c"]]
    assert chunked([None]) == []
    assert chunked([b"a b", b"c", b"a b c", b"d"], num_tokens=3) == [
        [b"a", b"b", b"\n", b"c", b"\n"],
        [b"a", b"b", b"c", b"\n", b"d", b"\n"],
    ]


@pytest.mark.parametrize("word", [b"<s>", b"</s>", b"<unk>"])
def test_reserved_words_are_rejected_or_skipped(word: bytes) -> None:
    lines = [b"a b", b"a " + word + b" b", word]
    with pytest.raises(ContractError, match=rf"got {word.decode()}\. Set train_lm\.reserved_words = 'skip'\."):
        chunked(lines)
    assert chunked(lines, reserved="skip") == [[b"a", b"b", b"\n", b"a", b"b", b"\n", b"\n"]]
    assert chunked([b"<S> <UNK> </s>x"]) == [[b"<S>", b"<UNK>", b"</s>x", b"\n"]]


@pytest.mark.parametrize("text", [b"", b"\n", b"a b\n\nlonger line here\nc", b"\n\nx\n", b"no end" * 9])
def test_every_line_is_read_once_at_any_cut(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text)
    expected = text.removesuffix(b"\n").split(b"\n") if text else []
    for range_bytes in (1, 2, 3, 5, 8, 100):
        for block_bytes in (1, 4, 1000):
            parts = find_ranges([str(path)], range_bytes=range_bytes)
            read = [line for part in parts for lines in read_lines(part, block_bytes) for line in lines.to_pylist()]
            assert read == expected, (range_bytes, block_bytes)
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(text[:5]) + gzip.compress(text[5:]))
    (part,) = find_ranges([str(packed)])
    assert [line for lines in read_lines(part, 4) for line in lines.to_pylist()] == expected
    assert sha256_of(str(path)) != sha256_of(str(packed))


def test_wrong_inputs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_lm.input: expected text files, got none\. Set train_lm\.input"):
        find_ranges([])
    with pytest.raises(ConfigError, match=r"train_lm.input: 1 problem.*(?s:.*)none-here.*"):
        find_ranges([str(tmp_path / "none-here*.txt")])
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"a b c\n" * 1000)[:30])
    with pytest.raises(ContractError, match=r"broken.gz: expected a gzip file, got .*\. Replace the file"):
        list(read_lines(ByteRange(str(broken), "broken.gz", 0, None)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": 0}, "greater than or equal to 1"),
        ({"order": 2, "prune": [0, 0, 1]}, r"at most 2 thresholds.*got \[0, 0, 1\]\. Remove 1 of them"),
        ({"prune": [0, 2, 1]}, r"do not decrease, got \[0, 2, 1\]"),
        ({"prune": [-1]}, r"thresholds >= 0 .*got \[-1\]"),
        ({"discount_fallback": []}, r"1 to 3 discounts, got \[\]"),
        ({"discount_fallback": [0.5, 2.1]}, r"for counts 1, 2 and 3\+, got \[0.5, 2.1\]"),
        ({"vocab_pad": 9, "interpolate_unigrams": False}, r"_unigrams = true, got false.* Remove train_lm\.vocab"),
        ({"reserved_words": "keep"}, "'refuse' or 'skip'"),
        ({"memory": "2g"}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainLmConfig(**settings)


def test_thresholds_are_padded_with_the_last() -> None:
    assert TrainLmConfig(order=4).thresholds() == [0, 0, 0, 0]
    assert TrainLmConfig(order=4, prune=[0, 1]).thresholds() == [0, 1, 1, 1]
    assert set(TrainLmConfig(partitions=3).content()) & {"partitions", "chunk_tokens", "input", "limit_vocab"} == set()
