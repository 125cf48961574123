"""Dropout: its masks against a second computation in numpy, their statistics, and the gradient through them."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tests.support.model_oracle import TINY, small_model, some_ids
from train.config.settings import load_settings
from train.config.train import TrainConfig
from train.data.permutation import key_of, keys_of, mix_bits
from train.model.dropout import (
    ATTENTION_OUTPUT,
    ATTENTION_WEIGHTS,
    EMBEDDING,
    FEED_FORWARD_OUTPUT,
    RowDraws,
    derived_keys,
    drop_channels,
    kept,
)
from train.model.transformer import Transformer, enable_dropout

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def row_keys(number: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(keys_of(key_of(seed, "dropout"), np.arange(number)).view(np.int64))


def draws_of(rows: int, length: int, seed: int = 0) -> RowDraws:
    return RowDraws(row_keys(rows, seed), torch.arange(length), torch.arange(1024))


def mask_of(draws: RowDraws, layer: int, site: int, width: int, rate: float) -> np.ndarray:
    """Return the mask (B, T, width) of a layer's site."""
    keys = derived_keys(draws.of_layer(layer).keys_of(site), draws.positions_t)
    return kept(keys, draws.counters_N[:width], rate).numpy()


def written_out(keys_B: torch.Tensor, layer: int, site: int, position: int, channel: int, rate: float) -> list[bool]:
    """Return whether a number is kept, in unsigned integers of numpy, for each row."""
    keys = keys_B.numpy().view(np.uint64)
    with np.errstate(over="ignore"):
        for number in (layer, site, position):
            keys = mix_bits(keys + GOLDEN * np.uint64(number + 1))
        x = np.uint32(0x9E3779B1) * np.uint32(channel) + keys.astype(np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = ((x ^ (x >> np.uint32(15))) + (keys >> np.uint64(32)).astype(np.uint32)) * np.uint32(0x846CA68B)
    # The lowest share `rate` of the numbers is dropped, counted from the most negative one as a signed integer.
    return ((x ^ np.uint32(1 << 31)) >= np.uint32(round(rate * 2**32))).tolist()


@pytest.mark.parametrize("layer", [-1, 0, 7])
def test_masks_equal_a_computation_in_numpy(layer: int) -> None:
    draws, site, rate = draws_of(5, 9), 2, 0.3
    mask = mask_of(draws, layer, site, 6, rate)
    for position in range(9):
        for channel in range(6):
            assert mask[:, position, channel].tolist() == written_out(
                draws.keys_B, layer, site, position, channel, rate
            )


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_rate(rate: float) -> None:
    mask = mask_of(draws_of(64, 128), 3, FEED_FORWARD_OUTPUT, 256, rate)
    deviation = (rate * (1 - rate) / mask.size) ** 0.5
    assert abs((~mask).mean() - rate) < 4 * deviation
    for axis in (0, 1, 2):  # nor does any row, position or channel differ more than by chance
        shares = (~mask).mean(axis=tuple({0, 1, 2} - {axis}))
        assert np.abs(shares - rate).max() < 5 * deviation * len(shares) ** 0.5


def test_masks_are_independent_of_their_neighbours() -> None:
    """The correlation of a mask and of itself moved by some rows, positions or channels is that of chance."""
    mask = mask_of(draws_of(64, 128), 0, ATTENTION_OUTPUT, 256, 0.5).astype(np.float64) * 2 - 1
    for axis, moves in ((0, (1, 2, 32)), (1, (1, 2, 3, 16, 64)), (2, (1, 2, 3, 8, 64, 128))):
        for move in moves:
            assert abs((mask * np.roll(mask, move, axis)).mean()) < 5 / mask.size**0.5, (axis, move)


def test_masks_of_layers_sites_and_seeds_are_independent() -> None:
    sites = [(0, ATTENTION_OUTPUT), (0, FEED_FORWARD_OUTPUT), (1, ATTENTION_OUTPUT), (40, ATTENTION_OUTPUT)]
    masks = [mask_of(draws_of(32, 128), layer, site, 256, 0.5) for layer, site in [*sites, (-1, EMBEDDING)]]
    masks += [mask_of(draws_of(32, 128, seed=1), 0, ATTENTION_OUTPUT, 256, 0.5)]
    for first, second in combinations(masks, 2):
        assert abs((first == second).mean() - 0.5) < 5 * 0.5 / first.size**0.5


def test_bits_of_words_are_balanced() -> None:
    """Runs of 8 channels take each of their 256 patterns equally often (chi-square, 255 degrees of freedom)."""
    mask = mask_of(draws_of(64, 128), 2, ATTENTION_OUTPUT, 256, 0.5)
    words = np.packbits(mask.reshape(-1, 8), axis=1)[:, 0]
    counts = np.bincount(words, minlength=256)
    expected = len(words) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 370  # exceeded by chance once in 10^6


def test_positions_draw_for_themselves() -> None:
    """A rank with some of the positions draws what a rank with all draws for them."""
    whole, x = draws_of(3, 12), torch.ones(3, 12, 20)
    part = replace(whole, positions_t=whole.positions_t[4:8])
    everywhere = drop_channels(x, 0.4, whole, ATTENTION_OUTPUT)
    assert torch.equal(drop_channels(x[:, 4:8], 0.4, part, ATTENTION_OUTPUT), everywhere[:, 4:8])
    assert set(everywhere.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert drop_channels(x, 0.0, whole, EMBEDDING) is x
    assert drop_channels(x, 0.4, None, EMBEDDING) is x


def stream_square(model: Transformer, ids: torch.Tensor, documents_BT: torch.Tensor, keys_B: torch.Tensor):
    """Return a figure of the last layer's output in float64: logits would be float32."""
    seen: list[torch.Tensor] = []
    with model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])):
        model(ids, documents_BT, keys_B=keys_B)
    return seen[0].square().mean()


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Through all three kinds, in float64, also where layers are computed again in the backward pass."""
    rates = TrainConfig(dropout=0.3, attention_dropout=0.25, embedding_dropout=0.2)
    ids, keys_B = some_ids(), row_keys(3)
    documents_BT = torch.tensor([[0] * 4 + [1] * 7] * 3, dtype=torch.int32)
    losses = {}
    for recompute in ("none", "full", "selective"):
        model = small_model(TINY, recompute=recompute).double()
        enable_dropout(model, rates)
        loss = stream_square(model, ids, documents_BT, keys_B)
        loss.backward()
        losses[recompute] = loss.item(), [p.grad for p in model.parameters() if p.grad is not None]
    assert losses["full"][0] == losses["none"][0] == losses["selective"][0]
    for name in ("full", "selective"):
        torch.testing.assert_close(losses[name][1], losses["none"][1], rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        for parameter, gradient in zip(
            [p for p in model.parameters() if p.grad is not None], losses["none"][1], strict=True
        ):
            direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
            parameter.add_(direction, alpha=1e-3)
            above = stream_square(model, ids, documents_BT, keys_B)
            parameter.add_(direction, alpha=-2e-3)
            below = stream_square(model, ids, documents_BT, keys_B)
            parameter.add_(direction, alpha=1e-3)
            assert ((above - below) / 2e-3).item() == pytest.approx(
                (gradient * direction).sum().item(), rel=5e-3, abs=2e-4
            )


def test_without_keys_nothing_is_dropped() -> None:
    plain, model, ids = small_model(TINY), small_model(TINY), some_ids()
    enable_dropout(model, TrainConfig(dropout=0.3, attention_dropout=0.25, embedding_dropout=0.2))
    torch.testing.assert_close(model(ids), plain(ids))
    assert not torch.equal(model(ids, keys_B=row_keys(3)), plain(ids))


def test_attention_drops_weights_after_the_softmax() -> None:
    """The mean of many masks is attention without dropout; each weight is 0 or divided by the share that is kept."""
    model, ids = small_model(TINY), some_ids(1).repeat(4000, 1)
    enable_dropout(model, TrainConfig(attention_dropout=0.5))
    layer, seen = model.layers[0].attention, []
    core = layer.core
    layer.core = lambda q, k, v, mask: (
        seen.append((core(q, k, v, mask), core(q, k, v, replace(mask, draws=None)))) or seen[0][1]
    )
    with torch.no_grad():
        model(ids, keys_B=row_keys(4000))
    dropped, whole = seen[0]
    # The first position sees itself only: its weight is 0 or 2, for each head and row.
    ratio = (dropped[:, :, 0] / whole[:, :, 0]).mean(-1)
    assert set(ratio.round().unique().tolist()) == {0.0, 2.0}
    assert abs(ratio.mean().item() - 1) < 4 / (4000 * 4) ** 0.5
    torch.testing.assert_close(dropped.mean(0), whole.mean(0), rtol=0, atol=0.1)


def test_what_the_plan_has_at_zero() -> None:
    content = load_settings({}, [], "test").content()
    assert not [name for name in content if "dropout" in name]
    content = load_settings({"train": {"dropout": 0.1}}, [], "test").content()
    assert {name: value for name, value in content.items() if "dropout" in name} == {"train.dropout": 0.1}


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_outside_of_zero_to_one_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.dropout"):
        load_settings({"train": {"dropout": rate}}, [], "test")


def test_keys_of_attention_differ_by_head() -> None:
    keys = derived_keys(row_keys(2), torch.arange(4))
    assert len(keys.unique()) == 8
    assert ATTENTION_WEIGHTS != ATTENTION_OUTPUT
