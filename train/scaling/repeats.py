"""The data-constrained scaling law: the worth of repeated tokens and of excess parameters.

Source: Muennighoff et al. 2023, arXiv 2305.16264, section 3 and appendix A; 182 runs of 7 million to 9 billion
parameters and 1 to 500 epochs. Up to 4 epochs are nearly as good as new tokens; after some 40 nothing is left to gain.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from train.scaling.laws import LossLaw

SOURCE = "Muennighoff et al. 2023, arXiv 2305.16264, section 3"

LIFE_OF_REPEATS = 15.387756
"""R*_D: the number of repeats after which 1 - 1/e of the possible gain is reached."""

LIFE_OF_EXCESS = 5.309743
"""R*_N: the same constant for parameters in excess of the number for which the unique tokens are optimal."""

MOST_EPOCHS = 40
"""Passes after which little is left to gain: by the law they are worth 15.2 of at most 16.4 times the unique tokens."""

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
"""The law for tokens seen once; its exponents were tied, so N in proportion to D is optimal."""


def worth_of_tokens(unique: float, tokens: float) -> float:
    """Return D', the number of new tokens that have the effect of `tokens` training tokens.

    `unique`: number of unique tokens that the training tokens are drawn from. D' is at most 16.4 · `unique`.
    """
    repeats = max(0.0, tokens / unique - 1)
    return min(tokens, unique) + unique * LIFE_OF_REPEATS * -math.expm1(-repeats / LIFE_OF_REPEATS)


def worth_of_params(unique: float, params: float) -> float:
    """Return N', the effective number of parameters; parameters beyond the optimum for `unique` tokens count less."""
    carried = LAW.for_tokens(unique).params
    excess = max(0.0, params / carried - 1)
    return min(params, carried) + carried * LIFE_OF_EXCESS * -math.expm1(-excess / LIFE_OF_EXCESS)


def expected_loss(params: float, tokens: float, unique: float) -> float:
    """Return the loss [nats/token] on the law's corpus, C4, after training on repeated tokens.

    `tokens`: number of training tokens; `unique`: number of unique tokens that they are drawn from.
    """
    return LAW.loss(worth_of_params(unique, params), worth_of_tokens(unique, tokens))


@dataclass(frozen=True)
class RepeatedData:
    """Token counts of a run that repeats data."""

    tokens: float
    """D: tokens of the run."""
    unique: float
    """U: unique tokens of the sources in use."""
    worth: float
    """D': number of new tokens that would have the same effect."""
    seen: float
    """Unique tokens that are read at least once."""

    @property
    def epochs(self) -> float:
        """Mean number of passes over the unique tokens."""
        return self.tokens / self.unique

    @property
    def share(self) -> float:
        """Mean worth of a training token relative to a new one, 0 to 1."""
        return self.worth / self.tokens


def count_repeated_tokens(drawn: Mapping[str, float], unique: Mapping[str, float]) -> RepeatedData:
    """Return the token counts of a run.

    `drawn`: training tokens of each source; `unique`: unique tokens of each source.
    """
    worth = math.fsum(worth_of_tokens(unique[source], tokens) for source, tokens in drawn.items())
    seen = math.fsum(min(unique[source], tokens) for source, tokens in drawn.items())
    return RepeatedData(math.fsum(drawn.values()), math.fsum(unique[source] for source in drawn), worth, seen)
