"""The objectives: what a row hides and asks for, by a counter hash of (seed, global sample index, position).

causal: the next token. mlm: tokens hidden from a model that sees both sides. span: spans cut out of a row, behind it.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.tokens import TokenizerContract
from train.config.train import TrainConfig
from train.data.counter import Bits, Ints, key_of, keys_of, mix, random_bits
from train.data.stages import num_spans
from train.rows import IGNORED, Rows

BLOCK = 1 << 14
"""Random numbers made at once."""
MASKED, RANDOM = 0.8, 0.1
"""Of the chosen tokens, the shares that become `mask` and a random id. Source: Devlin et al. 2018, section 3.1."""


def below(bits: Bits, share: float) -> NDArray[np.bool_]:
    """Where a random number falls into the lowest `share` of its range."""
    return bits < np.uint64(round(share * 2**64) if share < 1 else 2**64 - 1)


def mask_tokens(inputs: Ints, keys: Bits, share: float, tokenizer: TokenizerContract) -> tuple[Ints, Ints]:
    """Inputs (B, T) with `share` of the tokens hidden, and targets there, IGNORED elsewhere.

    Reserved tokens are neither chosen nor drawn. Source: Devlin et al. 2018, arXiv 1810.04805, section 3.1.
    """
    plain = np.ones(tokenizer.vocab_size, np.bool_)
    plain[list(tokenizer.reserved.values())] = False
    words = np.flatnonzero(plain)
    ids = inputs.reshape(-1)
    chosen, bits = _chosen(keys, inputs.shape[1], share)
    allowed = plain[ids[chosen]]
    chosen, bits = chosen[allowed], bits[allowed]
    fate = mix(bits + np.uint64(1))
    masked, drawn = below(fate, MASKED), np.flatnonzero(below(fate, MASKED + RANDOM) & ~below(fate, MASKED))
    word = (mix(bits[drawn] + np.uint64(2)) % np.uint64(len(words))).astype(np.int64)
    hidden, targets = ids.copy(), np.full(ids.shape, IGNORED, np.int64)
    hidden[chosen[masked]] = tokenizer.reserved["mask"]
    hidden[chosen[drawn]] = words[word]
    targets[chosen] = ids[chosen]
    return hidden.reshape(inputs.shape), targets.reshape(inputs.shape)


def _chosen(keys: Bits, width: int, share: float) -> tuple[Ints, Bits]:
    """Positions of rows laid end to end whose random number is below `share`, and these numbers."""
    places, numbers = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    # A block of rows stays in the cache: twice as fast as all rows at once (2.8 and 5.5 ns a token).
    step = max(1, BLOCK // max(1, width))
    for first in range(0, len(keys), step):
        bits = random_bits(keys[first : first + step], width).reshape(-1)
        places.append(np.flatnonzero(below(bits, share)))
        numbers.append(bits[places[-1]])
        places[-1] += first * width
    return np.concatenate(places), np.concatenate(numbers)


def cut_spans(ids: Ints, keys: Bits, config: TrainConfig, sentinels: Ints) -> tuple[Ints, Ints]:
    """Rows with spans replaced by sentinels, then the spans behind theirs and one sentinel more; and the targets.

    Both (B, row_length). Only what follows the text is predicted; a row begins with a token and ends with a span.
    Source: Raffel et al. 2019, arXiv 1910.10683, sections 3.1.4 and 3.3.4 (random segments of fixed number).
    """
    size = ids.shape[1]
    noise, spans = num_spans(config, size)
    bits = random_bits(keys, size)
    kept, cut = _segments(bits[:, : size - noise], spans), _segments(bits[:, size - noise :], spans)
    # kept[0] cut[0] kept[1] cut[1] ...: every token knows its span, and whether it is cut.
    lengths = np.stack([kept, cut], axis=2).reshape(-1)
    hidden = np.repeat(np.tile(np.arange(2 * spans) % 2 == 1, len(ids)), lengths).reshape(ids.shape)
    span = np.repeat(np.tile(np.arange(2 * spans) // 2, len(ids)), lengths).reshape(ids.shape)
    row = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    whole = np.empty((len(ids), size + 2 * spans + 1), np.int64)
    # A token moves by the sentinels and the tokens before it in its half.
    text, behind = ~hidden, size - noise + spans
    place = np.where(text, np.cumsum(text, axis=1) - 1 + span, behind + np.cumsum(hidden, axis=1) + span)
    number = np.arange(spans)
    whole[row, place] = ids
    whole[np.arange(len(ids))[:, None], np.cumsum(kept, axis=1) + number] = sentinels[:spans]
    whole[np.arange(len(ids))[:, None], behind + np.cumsum(cut, axis=1) - cut + number] = sentinels[:spans]
    whole[:, -1] = sentinels[spans]
    targets = whole[:, 1:].copy()
    targets[:, : behind - 1] = IGNORED
    return whole[:, :-1].copy(), targets


def _segments(bits: Bits, number: int) -> Ints:
    """Lengths (B, number), each at least 1, that sum to the width of `bits`: cuts at the smallest random numbers."""
    rows, size = bits.shape
    cuts = np.sort(np.argsort(bits[:, 1:], axis=1, kind="stable")[:, : number - 1], axis=1) + 1
    edges = np.concatenate([np.zeros((rows, 1), np.int64), cuts, np.full((rows, 1), size)], axis=1)
    return np.diff(edges, axis=1)


class Objective:
    """The objective of a run, applied to rows as they stand in the streams."""

    def __init__(self, config: TrainConfig, tokenizer: TokenizerContract, seed: int):
        self._config, self._tokenizer = config, tokenizer
        self._key = key_of(seed, "objective")
        self._sentinels = np.array([tokenizer.reserved[f"sentinel_{i}"] for i in range(100)])
        self._never = [tokenizer.reserved[name] for name in ("pad", "tombstone")]

    def rows(self, rows: Rows, index: Ints) -> Rows:
        """The rows, whose samples have these global indices, with the objective's inputs and targets."""
        if self._config.objective == "causal":
            return rows
        ids, keys = rows.inputs_BT.numpy(), keys_of(self._key, index)
        if self._config.objective == "mlm":
            inputs, targets = mask_tokens(ids, keys, self._config.mask_share, self._tokenizer)
        else:
            inputs, targets = cut_spans(ids, keys, self._config, self._sentinels)
            targets[np.isin(targets, self._never)] = IGNORED
        return replace(rows, inputs_BT=torch.from_numpy(inputs), targets_BT=torch.from_numpy(targets))
