"""The objectives: inputs and targets are the same for any rows, ranks and order of calls."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import RESERVED, TokenizerContract, open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import batches_of
from train.config.train import TrainConfig
from train.data.objective import BLOCK, Masking, Objective, cut_spans, segments
from train.data.packing import write_packing
from train.data.permutation import key_of, keys_of
from train.data.rows import IGNORED, Rows
from train.data.stages import num_spans, row_length

CONTRACT = TokenizerContract(
    kind="huggingface",
    sha256="",
    vocab_size=5000,
    reserved={name: i for i, name in enumerate(RESERVED)},
    before=[],
    after=["eos"],
)
MASK, FIRST = CONTRACT.reserved["mask"], len(RESERVED)
HIDDEN_AT, HIDDEN_AS = [0, 7, 28, 29, 37, 39], [3, 112, 3, 3, 3, 3]
SENTINELS = np.array([CONTRACT.reserved[f"sentinel_{i}"] for i in range(100)])


def span(**values: float) -> TrainConfig:
    return TrainConfig.model_validate({"objective": "span", "document_mask": False} | values)


def mask_tokens(ids: np.ndarray, own: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    return Masking(share, CONTRACT).hide(ids, own)


def keys(number: int, seed: int = 0) -> np.ndarray:
    return keys_of(key_of(seed, "objective"), np.arange(number))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"))


# ---------------------------------------------------------------------------------------------------------------- mlm


def test_shares_of_masked_random_and_kept_tokens() -> None:
    """A million tokens: shares within five standard deviations of 15 %, and of 80, 10 and 10 % of those."""
    ids = np.random.default_rng(0).integers(FIRST, 5000, (500, 2000)).astype(np.uint16)
    inputs, targets = mask_tokens(ids, keys(500), 0.15)
    chosen = targets != IGNORED
    assert (targets[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    number = chosen.sum()
    assert abs(number - 150_000) < 5 * np.sqrt(1e6 * 0.15 * 0.85)
    masked, kept = (inputs[chosen] == MASK).sum(), (inputs[chosen] == ids[chosen]).sum()
    drawn = inputs[chosen][(inputs[chosen] != MASK) & (inputs[chosen] != ids[chosen])]
    for count, share in ((masked, 0.8), (kept, 0.1 + 0.1 / 4895), (len(drawn), 0.1 * (1 - 1 / 4895))):
        assert abs(count - share * number) < 5 * np.sqrt(number * share * (1 - share))
    assert drawn.min() >= FIRST
    assert np.bincount(drawn, minlength=5000)[FIRST:].std() < 2.5
    # Every position is equally likely, and adjacent positions are independent.
    assert np.abs(chosen.sum(axis=0) - 75).max() < 6 * np.sqrt(500 * 0.15 * 0.85)
    for apart in (1, 2, 7):
        both = (chosen[:, apart:] & chosen[:, :-apart]).mean()
        assert abs(both - 0.15**2) < 6 * np.sqrt(0.15**2 / 1e6)


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.5, 1 - 1e-12])
def test_shares_at_the_ends_of_their_range(share: float) -> None:
    ids = np.random.default_rng(0).integers(FIRST, 5000, (100, 1000))
    inputs, targets = mask_tokens(ids, keys(100), share)
    number, masked = (targets != IGNORED).sum(), (inputs == MASK).sum()
    assert abs(number - 1e5 * share) <= 5 * np.sqrt(1e5 * share * (1 - share))
    assert abs(masked - 0.8 * number) <= 5 * np.sqrt(0.16 * number)


def test_reserved_tokens_are_neither_chosen_nor_drawn() -> None:
    ids = np.random.default_rng(0).integers(0, 2 * FIRST, (50, 200))
    inputs, targets = mask_tokens(ids, keys(50), 0.9)
    assert (targets[ids < FIRST] == IGNORED).all()
    assert (inputs[ids < FIRST] == ids[ids < FIRST]).all()
    assert ((inputs >= FIRST) | (inputs == MASK) | (ids < FIRST)).all()


def test_masks_depend_on_seed_and_sample_alone() -> None:
    ids = np.random.default_rng(0).integers(FIRST, 5000, (4, 300))
    whole = mask_tokens(ids, keys(4), 0.15)[0]
    assert (mask_tokens(ids[2:3], keys(4)[2:3], 0.15)[0] == whole[2:3]).all()
    assert (mask_tokens(ids, keys(4, seed=1), 0.15)[0] != whole).any()
    same = mask_tokens(np.repeat(ids[:1], 4, axis=0), keys(4), 0.15)[0]
    assert len({tuple(row) for row in same.tolist()}) == 4
    # The beginning of a row does not depend on the tokens after it, also with an odd number of tokens.
    for width in (1, 99, 100):
        assert (mask_tokens(ids[:, :width], keys(4), 0.15)[0] == whole[:, :width]).all()
    assert mask_tokens(ids[:0], keys(0), 0.15)[0].shape == (0, 300)


@pytest.mark.parametrize("width", [1000, 1001, BLOCK - 1, BLOCK + 1])
def test_rows_do_not_depend_on_the_rows_of_the_same_block(width: int) -> None:
    """More rows than a block, and rows longer than a block."""
    number = 3 * BLOCK // width + 2
    ids = np.random.default_rng(0).integers(FIRST, 5000, (number, width))
    config = span(seq_len=width, mean_span=width * 0.15 / 40)
    for hide in (lambda i, k: mask_tokens(i, k, 0.15), lambda i, k: cut_spans(i, k, config, SENTINELS)):
        whole = hide(ids, keys(number))
        for row in (0, number // 2, number - 1):
            alone = hide(ids[row : row + 1], keys(number)[row : row + 1])
            assert all((single[0] == both[row]).all() for single, both in zip(alone, whole, strict=True))


def test_masks_have_their_fixed_values() -> None:
    inputs, targets = mask_tokens(np.arange(FIRST, FIRST + 40)[None], keys(1), 0.2)
    assert np.flatnonzero(targets[0] != IGNORED).tolist() == HIDDEN_AT
    assert inputs[0][HIDDEN_AT].tolist() == HIDDEN_AS


def mixed(x: int) -> int:
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_masks_follow_from_the_definition() -> None:
    """Token by token in plain integers: half a 64-bit number decides a token's replacement, another draws its id."""
    ids = np.random.default_rng(0).integers(0, 5000, (3, 101))
    inputs, targets = mask_tokens(ids, keys(3), 0.4)
    golden, replacements = 0x9E3779B97F4A7C15, Counter[str]()
    for row, key in enumerate(keys(3).tolist()):
        for place, token in enumerate(ids[row].tolist()):
            number = mixed(key + golden * (place // 2 + 1)) >> 32 * (place % 2) & 0xFFFFFFFF
            share = number / 2**32 if token >= FIRST else 1.0
            word = FIRST + mixed(key + golden * (2**32 + place)) % (5000 - FIRST)
            replacement = next(
                n for n, end in (("mask", 0.32), ("word", 0.36), ("kept", 0.4), ("free", 2.0)) if share < end
            )
            replacements[replacement] += 1
            assert inputs[row, place] == {"mask": MASK, "word": word}.get(replacement, token)
            assert targets[row, place] == (IGNORED if replacement == "free" else token)
    assert min(replacements.values()) >= 5


# --------------------------------------------------------------------------------------------------------------- span


@pytest.mark.parametrize(
    ("seq_len", "share", "mean", "expected"),
    [
        # Raffel et al., section 3.1.4: of 512 tokens 15 % are 77, in 26 spans of 3 on average.
        (512, 0.15, 3.0, (77, 26)),
        (100, 0.15, 3.0, (15, 5)),
        (2, 0.15, 3.0, (1, 1)),
        (10, 0.9, 1.0, (9, 1)),
        (1, 0.5, 1.0, (0, 0)),
    ],
)
def test_numbers_of_spans(seq_len: int, share: float, mean: float, expected: tuple[int, int]) -> None:
    assert num_spans(span(mask_share=share, mean_span=mean), seq_len) == expected


def test_segments_end_at_the_smallest_numbers() -> None:
    """The numbers belong to the gaps before tokens 1 to 7; the smallest three of the first row are before 2, 5, 7."""
    bits = np.array([[0, 50, 20, 60, 40, 10, 70, 30], [99, 1, 2, 3, 4, 5, 6, 7]], np.uint64) << np.uint64(32)
    assert segments(bits, 4).tolist() == [[2, 3, 2, 1], [1, 1, 1, 5]]
    assert segments(bits, 1).tolist() == [[8], [8]]
    assert segments(bits, 8).tolist() == [[1] * 8] * 2


def test_a_row_of_two_spans() -> None:
    """Eight tokens, four of them cut, in two spans: the lengths alone decide which are kept and cut."""
    ids = np.arange(FIRST, FIRST + 8)[None]
    inputs, targets = cut_spans(ids, keys(1), span(mask_share=0.5, mean_span=2.0), SENTINELS)
    sequence = [*inputs[0].tolist(), int(targets[0, -1])]
    first, second, third = SENTINELS[:3].tolist()
    a, b = sequence.index(first), sequence.index(second)
    shown = [token for token in sequence[:6] if token not in (first, second)]
    spans = sequence[7 : sequence.index(second, 7)], sequence[sequence.index(second, 7) + 1 : -1]
    assert (b, sequence[6], sequence[-1]) == (5, first, third)
    assert shown[:a] + spans[0] + shown[a:] + spans[1] == ids[0].tolist()
    assert targets[0].tolist() == [IGNORED] * 5 + sequence[6:]


def test_length_of_a_row_follows_from_the_settings_alone() -> None:
    assert row_length(TrainConfig(seq_len=512)) == 512
    assert row_length(TrainConfig(seq_len=512, objective="mlm"), 256) == 256
    assert row_length(span(seq_len=512)) == 512 + 2 * 26
    assert row_length(span(seq_len=64), 100) == 110
    # 99 spans: 1980 tokens of 0.15 are 297 in spans of 3.
    assert row_length(span(seq_len=1980)) == 1980 + 198
    with pytest.raises(
        ConfigError,
        match=r"train.mean_span: expected at most 99 spans .* got 102 in 2048 tokens\. Raise train\.mean_span",
    ):
        row_length(span(seq_len=2048))
    with pytest.raises(ConfigError, match=r"at least 2 tokens for objective = span, got 1\. Raise train\.seq_len"):
        row_length(span(seq_len=1))


def restored(inputs: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """Return the text of a row from its two parts, and the lengths of its spans."""
    sequence = [*inputs, targets[-1]]
    first = next(place for place, target in enumerate(targets) if target != IGNORED) + 1
    text, tail = sequence[:first], sequence[first:]
    spans: dict[int, list[int]] = {}
    for token in tail:
        if token in SENTINELS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    assert list(spans) == SENTINELS[: len(spans)].tolist()
    assert spans[tail[-1]] == []
    whole = [token for entry in text for token in spans.get(entry, [entry])]
    return whole, [len(span) for span in list(spans.values())[:-1]]


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 200), st.floats(0.02, 0.9), st.floats(1, 20), st.integers(0, 99))
def test_no_token_is_lost_and_only_the_second_part_is_predicted(n: int, share: float, mean: float, seed: int) -> None:
    config = span(mask_share=share, mean_span=mean)
    noise, spans = num_spans(config, n)
    if spans > 99:
        return
    ids = np.random.default_rng(seed).integers(FIRST, 5000, (3, n))
    inputs, targets = cut_spans(ids, keys(3, seed), config, SENTINELS)
    assert inputs.shape == targets.shape == (3, n + 2 * spans)
    for row in range(3):
        whole, lengths = restored(inputs[row].tolist(), targets[row].tolist())
        assert whole == ids[row].tolist()
        assert (len(lengths), sum(lengths)) == (spans, noise)
        assert min(lengths) >= 1
        counted = targets[row] != IGNORED
        assert counted.sum() == noise + spans + 1
        # Each position predicts the next input; only the second part has a loss.
        assert (targets[row][:-1][counted[:-1]] == inputs[row][1:][counted[:-1]]).all()
        assert counted.tolist() == [False] * (n - noise + spans - 1) + [True] * (noise + spans + 1)


def test_spans_have_the_lengths_of_random_segments() -> None:
    """77 tokens in 26 spans: each has a mean length of 77/26 at any position, and length 1 as often as by chance.

    By chance: of the cuts of n tokens into k spans, C(n-2, k-2) of C(n-1, k-1) begin with a span of one token.
    """
    ids = np.broadcast_to(np.arange(FIRST, FIRST + 512), (2000, 512))
    inputs, targets = cut_spans(ids, keys(2000), span(seq_len=512), SENTINELS)
    lengths = np.array([restored(*pair)[1] for pair in zip(inputs[:300].tolist(), targets[:300].tolist())])
    assert lengths.mean() == pytest.approx(77 / 26)
    assert np.abs(lengths.mean(axis=0) - 77 / 26).max() < 6 * lengths.std() / np.sqrt(300)
    share = 25 / 76
    assert abs((lengths == 1).mean() - share) < 6 * np.sqrt(share * (1 - share) / lengths.size)
    assert len({tuple(row) for row in inputs.tolist()}) == 2000


def test_spans_have_their_fixed_values() -> None:
    inputs, _ = cut_spans(np.arange(FIRST, FIRST + 20)[None], keys(1), span(mask_share=0.3), SENTINELS)
    first, second = SENTINELS[:2].tolist()
    text, spans = [105, 106, 107, first, *range(113, 124), second], [first, *range(108, 113), second, 124]
    assert inputs[0].tolist() == text + spans


# ------------------------------------------------------------------------------------------------------ through batches


@pytest.mark.parametrize("objective", ["mlm", "span"])
def test_the_batch_does_not_depend_on_the_reading_rank(run: Store, objective: str) -> None:
    dataset = open_dataset(run)
    config = TrainConfig(seq_len=64, objective=objective, document_mask=objective == "mlm")
    whole = batches_of(dataset, config, 7).batch(40)
    parts = [batches_of(dataset, config, 7).batch(40, range(a, b)) for a, b in ((0, 3), (3, 4), (4, 7))]
    for field in dataclasses.fields(Rows):
        values = [getattr(part, field.name) for part in parts]
        assert values[0] is None or torch.equal(torch.cat(values), getattr(whole, field.name))
    assert whole.inputs_BT.shape == (7, row_length(config))
    again = batches_of(dataset, config.model_copy(update={"seed": 5}), 7)
    held = batches_of(dataset, config, 7).heldout(3).rows
    assert torch.equal(again.heldout(3).rows.inputs_BT, held.inputs_BT)
    assert torch.equal(again.heldout(3).rows.targets_BT, held.targets_BT)


def test_causal_rows_have_the_targets_of_the_stream(run: Store) -> None:
    objective = Objective(TrainConfig(), CONTRACT, 0)
    assert objective.predicts_next
    with pytest.raises(ValueError, match="expected objective = mlm or span, got causal"):
        objective.apply(np.zeros((1, 8), np.uint16), np.arange(1))
    rows = batches_of(open_dataset(run), TrainConfig(seq_len=64)).batch(0)
    assert torch.equal(rows.targets_BT[:, :-1], rows.inputs_BT[:, 1:])


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_tokens_without_a_mask_equal_the_stream(run: Store, packing: str) -> None:
    """Inputs and targets of masked rows restore the rows of the same samples, with padding and documents."""
    config = TrainConfig.model_validate({"seq_len": 64, "objective": "mlm", "packing": packing})
    write_packing(run, open_dataset(run), config)
    batches = batches_of(open_dataset(run), config, 50, run=run)
    rows = batches.batch(3)
    plain = batches_of(open_dataset(run), config.model_copy(update={"objective": "causal"}), 50, run=run).batch(3)
    chosen = rows.targets_BT != IGNORED
    assert torch.equal(torch.where(chosen, rows.targets_BT, rows.inputs_BT), plain.inputs_BT)
    assert rows.documents_BT is not None
    assert plain.documents_BT is not None
    assert torch.equal(rows.documents_BT, plain.documents_BT)
    assert (rows.inputs_BT.dtype, rows.targets_BT.dtype) == (torch.int64, torch.int64)
    assert rows.inputs_BT.is_contiguous()
    assert rows.targets_BT.is_contiguous()


def test_the_next_epoch_has_another_mask(run: Store) -> None:
    batches = batches_of(open_dataset(run), TrainConfig(seq_len=64, objective="mlm"), 1)
    first = batches.samples(0).pieces.start[0]
    number = next(n for n in range(1, 500) if batches.samples(n).pieces.start[0] == first)
    assert (batches.batch(0).targets_BT != batches.batch(number).targets_BT).any()


def test_padding_of_packed_rows_is_never_masked(run: Store) -> None:
    config = TrainConfig(seq_len=64, objective="mlm", packing="best_fit", mask_share=0.9)
    write_packing(run, open_dataset(run), config)
    batches, pad = batches_of(open_dataset(run), config, 50, run=run), CONTRACT.reserved["pad"]
    plain = batches_of(open_dataset(run), config.model_copy(update={"objective": "causal"}), 50, run=run).batch(0)
    rows, empty = batches.batch(0), plain.inputs_BT == pad
    assert 0 < empty.sum() < 64 * 50 / 4
    assert (rows.targets_BT[empty] == IGNORED).all()
    assert Counter(rows.inputs_BT[empty].tolist()) == {pad: int(empty.sum())}


def test_reserved_tokens_are_never_targets_of_a_span() -> None:
    tombstone = CONTRACT.reserved["tombstone"]
    ids = np.full((2, 50), tombstone, np.uint16)
    _, targets = Objective(span(seq_len=50), CONTRACT, 0).apply(ids, np.arange(2))
    assert not (targets == tombstone).any()
    assert (targets != IGNORED).sum() == 2 * (num_spans(span(), 50)[1] + 1)
