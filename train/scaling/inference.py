"""Sizes for a model that will be used: the cheapest N and D of a loss, with the tokens it will read and write.

Source: Sardana et al. 2023, arXiv 2401.00448, section 2: least 6·N·D + 2·N·D_inference where L(N, D) is the target.
"""

import math
from dataclasses import dataclass

from schemas.errors import ConfigError
from train.scaling.laws import Allocation, LossLaw

SOURCE = "Sardana et al. 2023, arXiv 2401.00448, section 2"
STEPS = 200
"""Halvings of the search, each by the golden ratio: beyond the precision of a float."""


@dataclass(frozen=True)
class Lifetime:
    """A model with what it costs over its life."""

    size: Allocation
    loss: float
    """L(N, D) [nats/token]."""
    inference_tokens: float
    """Tokens that it reads and writes when in use."""

    @property
    def compute(self) -> float:
        """Of training and use [FLOPs]."""
        return self.size.compute + 2 * self.size.params * self.inference_tokens


def tokens_to_reach(law: LossLaw, params: float, loss: float) -> float:
    """D at which N = `params` reach a loss [nats/token]; infinite if they never do."""
    left = loss - law.floor - law.a * math.pow(params, -law.alpha)
    return math.pow(law.b / left, 1 / law.beta) if left > 0 else math.inf


def for_lifetime(law: LossLaw, loss: float, inference_tokens: float) -> Lifetime:
    """The cheapest model of a loss [nats/token] that will see so many tokens in use.

    Raises ConfigError if no model of the law reaches the loss.
    """
    if loss <= law.floor:
        raise ConfigError(
            f"inference-aware sizing: promised a loss above {law.floor:.4g}, where {law.name}'s law ends, found "
            f"{loss:.4g}; ask for a higher one"
        )

    def cost(log_params: float) -> float:
        params = math.exp(log_params)
        return params * (6 * tokens_to_reach(law, params, loss) + 2 * inference_tokens)

    # Between the smallest model that reaches the loss with any number of tokens and one with tokens to spare.
    low = math.log(law.a / (loss - law.floor)) / law.alpha
    high = low + 2 * math.log(1e6)
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(STEPS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if cost(left) < cost(right):
            high = right
        else:
            low = left
    params = math.exp((low + high) / 2)
    return Lifetime(Allocation(params, tokens_to_reach(law, params, loss)), loss, inference_tokens)
