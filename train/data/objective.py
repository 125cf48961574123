"""The training objectives, which make inputs and targets of rows from their tokens.

causal: predict the next token. mlm: predict masked tokens, with attention to both sides. span: predict spans that are
cut out of the row and appended to it. Random choices are hashes of (seed, global sample index, position). A few rows
are processed at a time, so that all temporary arrays fit the cache.
"""

from collections.abc import Iterator

import numpy as np

from schemas.tokens import TokenizerContract
from train.config.train import TrainConfig
from train.data.permutation import GOLDEN, Bits, Ints, key_of, keys_of, mix_bits, random_bits
from train.data.rows import IGNORED
from train.data.shards import Tokens
from train.data.stages import num_spans

BLOCK = 1 << 15
"""Number of tokens in the rows that are processed at once. Their random numbers fill 128 KiB: to allocate a larger
array takes as long as the hashing."""
MASKED, RANDOM = 0.8, 0.1
"""Share of the chosen tokens that become the token `mask`, and share that become a random id. Source: Devlin et al.
2018, section 3.1."""
DRAWN_FROM = 1 << 32
"""Offset of the counters that draw random ids, so that they never equal a counter that chooses positions."""


class Masking:
    """Masks random tokens of rows, for objective = mlm. Source: Devlin et al. 2018, arXiv 1810.04805, section 3.1."""

    def __init__(self, share: float, tokenizer: TokenizerContract):
        """`share`: share of the tokens that are predicted. Reserved tokens are never masked or drawn as random ids."""
        self._mask = tokenizer.reserved["mask"]
        self._plain = np.ones(tokenizer.vocab_size, np.bool_)
        self._plain[list(tokenizer.reserved.values())] = False
        self._words = np.flatnonzero(self._plain)
        limits = [min(round(share * part * 2**32), 2**32 - 1) for part in (MASKED, MASKED + RANDOM, 1.0)]
        # Each position has one random number. If it is low enough, the token is predicted; its value decides what
        # replaces the token.
        self._masked, self._changed, self._chosen = (np.uint32(limit) for limit in limits)

    def hide(self, ids: Tokens, keys: Bits) -> tuple[Ints, Ints]:
        """Return inputs (B, T) with some tokens masked, and targets (B, T): the masked tokens, elsewhere IGNORED."""
        inputs, targets = np.empty(ids.shape, np.int64), np.empty(ids.shape, np.int64)
        for rows in _blocks(ids):
            inputs[rows], targets[rows] = ids[rows], IGNORED
            self._hide(inputs[rows].reshape(-1), targets[rows].reshape(-1), keys[rows], ids.shape[1])
        return inputs, targets

    def _hide(self, ids: Ints, targets: Ints, keys: Bits, width: int) -> None:
        # Each 64-bit number yields two of 32 bits.
        numbers = random_bits(keys, -(-width // 2)).astype("<u8", copy=False).view("<u4")[:, :width].reshape(-1)
        places = np.flatnonzero(numbers < self._chosen)
        chosen = ids.take(places)
        allowed = self._plain.take(chosen)
        places, chosen = places[allowed], chosen[allowed]
        targets[places] = chosen
        choice = numbers.take(places)
        replacement = np.where(choice < self._masked, self._mask, chosen)
        drawn = np.flatnonzero((choice >= self._masked) & (choice < self._changed))
        row, column = np.divmod(places[drawn], width)
        word = mix_bits(keys[row] + GOLDEN * (column + DRAWN_FROM).astype(np.uint64)) % np.uint64(len(self._words))
        replacement[drawn] = self._words[word.astype(np.int64)]
        ids[places] = replacement


def cut_spans(ids: Tokens, keys: Bits, config: TrainConfig, sentinels: Ints) -> tuple[Ints, Ints]:
    """Return inputs and targets, both (B, row_length), with random spans moved to the end of the row.

    The new row is the text with a sentinel in place of each span, then each span after its sentinel, then one more
    sentinel. Only tokens after the text are targets. Source: Raffel et al. 2019, arXiv 1910.10683, sections 3.1.4 and
    3.3.4 (random segments of fixed number).
    """
    size = ids.shape[1]
    noise, spans = num_spans(config, size)
    shape, text_end = (len(ids), size + 2 * spans), size - noise + spans
    inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
    for rows in _blocks(ids):
        bits = random_bits(keys[rows], size)
        # Kept and cut segments alternate: a row begins with a kept segment and ends with a span.
        kept, cut = segments(bits[:, : size - noise], spans), segments(bits[:, size - noise :], spans)
        whole = _move_spans(ids[rows], kept, cut, sentinels)
        inputs[rows] = whole[:, :-1]
        targets[rows, : text_end - 1] = IGNORED
        targets[rows, text_end - 1 :] = whole[:, text_end:]
    return inputs, targets


def _move_spans(ids: Tokens, kept: Ints, cut: Ints, sentinels: Ints) -> Tokens:
    """Return the rows with sentinels added and their spans moved to the end, (B, row_length + 1).

    `kept`, `cut`, (B, spans): lengths of the segments that stay in the text, and of the spans that are moved.
    """
    rows, spans = kept.shape
    kept_ends, cut_ends = np.cumsum(kept, axis=1), np.cumsum(cut, axis=1)
    text_end, width = int(kept_ends[0, -1]) + spans, ids.shape[1] + 2 * spans + 1
    begin, number = np.arange(rows)[:, None] * width, np.arange(spans)
    in_text = begin + kept_ends + number
    before = begin + text_end + cut_ends - cut + number
    # Each position's token index is that of the position before plus one, except for jumps. A sentinel occupies the
    # index of the token after it in the text, and of the token before its span.
    steps = np.ones(rows * width, np.int64)
    steps[in_text[:, :-1] + 1] = cut[:, :-1]
    steps[before[:, 1:]] = kept[:, 1:]
    steps[before[:, 0]] = kept[:, 0] - 1 - kept_ends[:, -1] - (cut_ends - cut)[:, -1]
    steps[width - 1 :: width] = 0
    steps[0] = 0
    whole = ids.reshape(-1).take(np.cumsum(steps))
    whole[in_text] = whole[before] = sentinels[:spans]
    whole[width - 1 :: width] = sentinels[spans]
    return whole.reshape(rows, width)


def segments(bits: Bits, number: int) -> Ints:
    """Return random segment lengths (B, number), each at least 1. The sum of each row is the width of `bits`."""
    rows, size = bits.shape
    edges = np.zeros((rows, number + 1), np.int64)
    edges[:, -1] = size
    if number > 1:
        # Cut at the positions of the smallest random numbers. Their lowest bits hold the position, so no two are equal.
        low = np.uint64((1 << size.bit_length()) - 1)
        marked = bits[:, 1:] & ~low
        marked |= np.arange(1, size, dtype=np.uint64)
        edges[:, 1:-1] = np.sort(np.partition(marked, number - 2, axis=1)[:, : number - 1] & low, axis=1)
    return np.diff(edges, axis=1)


class Objective:
    """The training objective of a run; makes the inputs and targets of rows from their tokens."""

    def __init__(self, config: TrainConfig, tokenizer: TokenizerContract, seed: int):
        self._config, self._key = config, key_of(seed, "objective")
        self._masking = Masking(config.mask_share, tokenizer)
        self._sentinels = np.array([tokenizer.reserved[f"sentinel_{i}"] for i in range(100)])
        self._never = [tokenizer.reserved[name] for name in ("pad", "tombstone")]

    @property
    def predicts_next(self) -> bool:
        """True for objective = causal: rows do not change, and each token predicts the next."""
        return self._config.objective == "causal"

    def apply(self, ids: Tokens, index: Ints) -> tuple[Ints, Ints]:
        """Return inputs and targets, both (B, row_length).

        `ids`: tokens of the samples, (B, T). `index`: global indices of the samples. Raises ValueError for objective =
        causal.
        """
        # The last target of a causal row is the token after the row, which is not in `ids`.
        if self.predicts_next:
            raise ValueError(
                "Objective.apply: expected objective = mlm or span, got causal. "
                "Read the targets of causal rows from the stream."
            )
        keys = keys_of(self._key, index)
        if self._config.objective == "mlm":
            return self._masking.hide(ids, keys)
        inputs, targets = cut_spans(ids, keys, self._config, self._sentinels)
        for never in self._never:
            if (ids == never).any():
                targets[targets == never] = IGNORED
        return inputs, targets


def _blocks(ids: Tokens) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, ids.shape[1]))
    for first in range(0, len(ids), step):
        yield slice(first, first + step)
