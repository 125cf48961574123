"""What repeated tokens are worth, and parameters in excess of what unique tokens carry: the data-constrained law.

Source: Muennighoff et al. 2023, arXiv 2305.16264, section 3 and appendix A; 182 runs of 7 million to 9 billion
parameters and 1 to 500 epochs. Up to 4 epochs are nearly as good as new tokens; behind some 40 nothing is left to gain.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from train.scaling.laws import LossLaw

SOURCE = "Muennighoff et al. 2023, arXiv 2305.16264, section 3"

LIFE_OF_REPEATS = 15.387756
"""R*_D: after so many repeats 1 - 1/e of what repeats can give has been given."""

LIFE_OF_EXCESS = 5.309743
"""R*_N: likewise for parameters beyond those that the unique tokens are best for."""

MOST_EPOCHS = 40
"""Passes behind which hardly anything is left to gain: by the law, 15.2 of the 16.4 times that all repeats can give."""

SIZES = (7e6, 9e9)
"""Parameters of the smallest and of the largest model that the law was fitted to."""

LAW = LossLaw(
    name="Muennighoff",
    source=SOURCE,
    floor=math.exp(0.6254804),
    a=math.exp(6.255414),
    b=math.exp(7.3049974),
    alpha=0.3526596,
    beta=0.3526596,
)
"""The law of tokens seen once; its exponents were tied, so N in proportion to D is best."""


def worth_of_tokens(unique: float, tokens: float) -> float:
    """D': how many unique tokens `tokens` drawn from `unique` ones are worth, at most 16.4 times the unique ones."""
    repeats = max(0.0, tokens / unique - 1)
    return min(tokens, unique) + unique * LIFE_OF_REPEATS * -math.expm1(-repeats / LIFE_OF_REPEATS)


def worth_of_params(unique: float, params: float) -> float:
    """N': how many parameters `params` are worth where there are `unique` tokens to learn from."""
    carried = LAW.for_tokens(unique).params
    excess = max(0.0, params / carried - 1)
    return min(params, carried) + carried * LIFE_OF_EXCESS * -math.expm1(-excess / LIFE_OF_EXCESS)


def expected_loss(params: float, tokens: float, unique: float) -> float:
    """L(N, D) [nats/token] of `tokens` drawn from `unique` ones, by the law's own corpus (C4) and tokenizer."""
    return LAW.loss(worth_of_params(unique, params), worth_of_tokens(unique, tokens))


@dataclass(frozen=True)
class Repeated:
    """What a run makes of its data."""

    tokens: float
    """D: tokens of the run."""
    unique: float
    """U: tokens that differ, of the sources in use."""
    worth: float
    """D': tokens that would do as well if all were new."""
    seen: float
    """Tokens that differ, of those that are read at all."""

    @property
    def epochs(self) -> float:
        """Passes over the unique tokens."""
        return self.tokens / self.unique

    @property
    def share(self) -> float:
        """What a token is worth of a new one, on average."""
        return self.worth / self.tokens


def repeated(drawn: Mapping[str, float], unique: Mapping[str, float]) -> Repeated:
    """What a run makes of sources that are drawn from, and repeated, one by one."""
    worth = math.fsum(worth_of_tokens(unique[source], tokens) for source, tokens in drawn.items())
    seen = math.fsum(min(unique[source], tokens) for source, tokens in drawn.items())
    return Repeated(math.fsum(drawn.values()), math.fsum(unique[source] for source in drawn), worth, seen)
