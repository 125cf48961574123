"""The proxies of a ladder: sizes and lengths of small runs that a law of a dataset can be fitted to.

Sizes and lengths lie evenly by ratio; every run sees tokens once and has a schedule of its own, as in approach 3 of
Hoffmann et al. 2022, arXiv 2203.15556. Lengths are bound by the tokens there are, so that no repeats enter the law.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schemas.errors import ConfigError
from train.config.plan import PlanConfig
from train.model.shape import choose_shape, num_parameters

SIZES, LENGTHS = (3, 5), (2, 6)
"""Fewest and most sizes of a ladder, and lengths of each."""
BODY_SHARE = 0.25
"""Share of the smallest model that is no embedding: where it is less, N says little of what the model can (Pearce and
Song 2024, arXiv 2406.12907)."""
SPAN = 4.0
"""Largest size over smallest, where the data asks for no more."""
PLANNED_SHARE = 8.0
"""The largest proxy is this many times smaller than a model of 20 tokens per parameter."""
MOST_RATIO, LEAST_RATIO = 80.0, 5.0
"""Tokens per parameter of the longest run of a size: where there are enough, and the least for the largest size. With
1.6 (12 runs of 0.2 to 0.8 million parameters on 1.26 million tokens), models of twice the size had no lower loss."""
RANGE = 16.0
"""Longest run of a size over its shortest."""
LEAST_STEPS = 20
"""Steps of the shortest run: with fewer, most of it is warm-up."""


@dataclass(frozen=True)
class Rung:
    """A proxy that is wanted."""

    wanted: int
    """N that the nearest shape is looked for, embeddings included."""
    params: int
    """N of that shape."""
    tokens: int
    """D, before it is rounded to whole steps."""

    @property
    def name(self) -> str:
        """Folder of the proxy, such as `n350k-d1.26M`."""
        return f"n{short(self.params)}-d{short(self.tokens)}"


def short(number: float) -> str:
    """A number in three digits, such as 1.26M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def smallest_size(vocab_size: int, sizing: PlanConfig) -> int:
    """N of the smallest model of which BODY_SHARE is no embedding."""
    params = 32.0 * vocab_size
    while True:
        shape = choose_shape(params, vocab_size, sizing)
        if num_parameters(shape, embeddings=False) >= BODY_SHARE * num_parameters(shape):
            return num_parameters(shape)
        params *= 1.1


def sizes_of(smallest: float, largest: float | None, number: int, unique: float) -> list[int]:
    """The sizes that are wanted; `unique`: tokens that one pass gives; largest None = by what they are enough for.

    Raises ConfigError if tokens are too few for the largest, naming the least that it needs.
    """
    if not SIZES[0] <= number <= SIZES[1]:
        raise ConfigError(f"ladder --sizes: expected {SIZES[0]} to {SIZES[1]}, got {number}")
    top = max(SPAN * smallest, unique / 20 / PLANNED_SHARE) if largest is None else largest
    if top <= smallest:
        raise ConfigError(
            f"ladder --largest: expected more parameters than the smallest proxy's {smallest:,.0f}, got {top:,.0f}. "
            "Raise it, or lower --smallest."
        )
    if unique < LEAST_RATIO * top:
        raise ConfigError(
            f"ladder: expected at least {LEAST_RATIO * top:,.0f} unique training tokens, {LEAST_RATIO:g} for each "
            f"parameter of the largest proxy, got {unique:,.0f}, and a ladder repeats none. Get more data, or lower "
            "--largest or --smallest."
        )
    return [round(size) for size in np.geomspace(smallest, top, number).tolist()]


def rungs_of(sizes: Mapping[int, int], number: int, unique: float) -> list[Rung]:
    """The runs of every size, `number` lengths each, shortest first; `sizes`: N that the shape has, by the wanted one.

    Raises ConfigError if two sizes have one shape.
    """
    if not LENGTHS[0] <= number <= LENGTHS[1]:
        raise ConfigError(f"ladder --tokens-per-size: expected {LENGTHS[0]} to {LENGTHS[1]}, got {number}")
    if len(set(sizes.values())) < len(sizes):
        raise ConfigError(
            f"ladder: expected {len(sizes)} sizes, got models of {', '.join(f'{size:,}' for size in sizes.values())} "
            "parameters and none between them. Raise --largest, or ask for fewer --sizes."
        )
    longest = {wanted: min(MOST_RATIO * params, unique) for wanted, params in sizes.items()}
    return [
        Rung(wanted, params, round(tokens))
        for wanted, params in sizes.items()
        for tokens in np.geomspace(longest[wanted] / RANGE, longest[wanted], number).tolist()
    ]
