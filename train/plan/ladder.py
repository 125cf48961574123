"""The proxy runs of a ladder: sizes and lengths of small runs from which a scaling law is fitted.

Sizes and lengths are spaced evenly by ratio. Every run reads a token at most once and has its own learning rate
schedule, as in approach 3 of Hoffmann et al. 2022, arXiv 2203.15556. The available tokens limit the lengths, so that
repeated tokens do not influence the law.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schemas.errors import ConfigError
from schemas.text import format_short
from train.config.plan import PlanConfig
from train.model.shape import choose_shape, num_parameters, sized_parameters

SIZES, LENGTHS = (3, 5), (2, 6)
"""Minimum and maximum number of sizes of a ladder, and of lengths for each size."""
BODY_SHARE = 0.25
"""Least share of non-embedding parameters in the smallest model: below it, N predicts the loss poorly (Pearce and
Song 2024, arXiv 2406.12907)."""
SPAN = 4.0
"""Ratio of the largest to the smallest size; it is larger if there are tokens for a larger model."""
PLANNED_SHARE = 8.0
"""The largest proxy is this many times smaller than the model that has 20 unique tokens per parameter."""
MOST_RATIO, LEAST_RATIO = 80.0, 5.0
"""Tokens per parameter of the longest run of a size: the maximum, and the minimum for the largest size. With 1.6 (12
runs of 0.2 to 0.8 million parameters on 1.26 million tokens), models of twice the size had no lower loss."""
RANGE = 16.0
"""Ratio of the longest to the shortest run of a size."""
RATE_FACTORS = (0.5, 1.0, 2.0)
"""Learning rates that are tried first at the smallest model, as multiples of the rule's."""
MAX_RATES = 6
"""Maximum number of rates that are tried: while the best one is at an end, half of it or twice as much is tried too."""
LEAST_STEPS = 20
"""Fewest optimizer steps of a run: with fewer, most of it is warm-up."""


@dataclass(frozen=True)
class ProxyRun:
    """The size of one proxy run: a small model trained to fit a scaling law."""

    wanted: int
    """Requested number of parameters N, embeddings included; the nearest model shape is used."""
    params: int
    """N of that shape."""
    tokens: int
    """Number of training tokens D, before it is rounded to whole steps."""
    rate: float | None = None
    """Peak learning rate; None = that of the plan's rule, or of the recipe."""
    suffix: str = ""
    """End of the folder's name, for a run that searches the learning rate."""

    @property
    def name(self) -> str:
        """Name of the folder of the proxy run, such as `n350k-d1.26M`."""
        return f"n{format_short(self.params, '')}-d{format_short(self.tokens, '')}{self.suffix}"


def next_factor(losses: Mapping[float, float]) -> float | None:
    """Return the multiple of the rule's learning rate to try next; None = the best one is between two others.

    `losses`: held-out loss of each multiple that was tried.
    """
    left = [factor for factor in RATE_FACTORS if factor not in losses]
    if left:
        return left[0]
    best = min(losses, key=lambda factor: losses[factor])
    if len(losses) >= MAX_RATES or min(losses) < best < max(losses):
        return None
    return best / 2 if best == min(losses) else best * 2


def best_factor(losses: Mapping[float, float]) -> float:
    """Return the multiple of the rule's learning rate with the lowest loss.

    It is the lowest point of the parabola in log rate through the best multiple and its two neighbours, or the best
    multiple itself if that is at an end, or if the loss of a neighbour is not finite.
    """
    tried = sorted(losses)
    place = min(range(len(tried)), key=lambda index: losses[tried[index]])
    if place in (0, len(tried) - 1):
        return tried[place]
    x = [math.log(tried[index]) for index in (place - 1, place, place + 1)]
    y = [losses[tried[index]] for index in (place - 1, place, place + 1)]
    left, right = (y[0] - y[1]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if not math.isfinite(left + right) or left + right == 0:
        return tried[place]
    # The slopes of the parabola halfway to each neighbour are -left and right; between these it is zero at its bottom.
    return math.exp((x[0] + x[1]) / 2 + left / (left + right) * (x[2] - x[0]) / 2)


def smallest_size(vocab_size: int, sizing: PlanConfig) -> int:
    """Return N of the smallest model with at least BODY_SHARE of its parameters outside the embeddings."""
    params = 32.0 * vocab_size
    while True:
        shape = choose_shape(params, vocab_size, sizing)
        if num_parameters(shape, embeddings=False) >= BODY_SHARE * sized_parameters(shape):
            return sized_parameters(shape)
        params *= 1.1


def sizes_of(smallest: float, largest: float | None, number: int, unique: float) -> list[int]:
    """Return `number` model sizes N, spaced evenly by ratio.

    `largest`: None = chosen from the unique tokens. `unique`: number of unique tokens. Raises ConfigError if `number`
    is outside SIZES, if `largest` is not above `smallest`, or if there are too few tokens.
    """
    if not SIZES[0] <= number <= SIZES[1]:
        raise ConfigError(
            f"ladder --sizes: expected {SIZES[0]} to {SIZES[1]} model sizes, got {number}. "
            "Set --sizes within this range."
        )
    top = max(SPAN * smallest, unique / 20 / PLANNED_SHARE) if largest is None else largest
    if top <= smallest:
        raise ConfigError(
            f"ladder --largest: expected more parameters than the smallest proxy's {smallest:,.0f}, got {top:,.0f}. "
            "Raise --largest, or lower --smallest."
        )
    if unique < LEAST_RATIO * top:
        raise ConfigError(
            f"ladder: expected at least {LEAST_RATIO * top:,.0f} unique training tokens, {LEAST_RATIO:g} for each "
            f"parameter of the largest proxy, got {unique:,.0f} (a ladder repeats no token). Get more data, or lower "
            "--largest or --smallest."
        )
    return [round(size) for size in np.geomspace(smallest, top, number).tolist()]


def plan_proxies(sizes: Mapping[int, int], number: int, unique: float) -> list[ProxyRun]:
    """Return `number` proxy runs of every model size, the shortest run of a size first.

    `sizes`: requested N -> N of the nearest shape. `unique`: number of unique tokens; no run reads more. Raises
    ConfigError if `number` is outside LENGTHS, or if two sizes have the same shape.
    """
    if not LENGTHS[0] <= number <= LENGTHS[1]:
        raise ConfigError(
            f"ladder --tokens-per-size: expected {LENGTHS[0]} to {LENGTHS[1]} runs of each model size, got {number}. "
            "Set --tokens-per-size within this range."
        )
    if len(set(sizes.values())) < len(sizes):
        raise ConfigError(
            f"ladder: expected {len(sizes)} different model sizes, got shapes of "
            f"{', '.join(f'{size:,}' for size in sizes.values())} parameters. "
            "Raise --largest, or lower --sizes."
        )
    longest = {wanted: min(MOST_RATIO * params, unique) for wanted, params in sizes.items()}
    return [
        ProxyRun(wanted, params, round(tokens))
        for wanted, params in sizes.items()
        for tokens in np.geomspace(longest[wanted] / RANGE, longest[wanted], number).tolist()
    ]
