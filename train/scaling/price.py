"""The price of data in loss: the expected loss of a plan's model when fewer unique tokens are left for it."""

from collections.abc import Mapping
from typing import Any

from schemas.errors import reading
from train.config.plan import OwnLaw
from train.scaling.own_law import law_in
from train.scaling.repeats import expected_loss, worth_of_tokens


def price_of_data(own_law: Mapping[str, Any] | None, params: float, tokens: float, unique: float) -> float:
    """Return the expected loss [nats/token] of `params` parameters after `tokens` training tokens.

    `unique`: unique tokens that the training tokens are drawn from. `own_law`: the law in the settings of a plan that
    was fitted to the user's runs; None = the published law of repeated data, on C4. Raises ContractError if the law is
    not valid.
    """
    if own_law is None:
        return expected_loss(params, tokens, unique)
    with reading("train/plan.json", "a valid plan.own_law", "Run `penstock plan` again."):
        own = OwnLaw.model_validate(own_law)
    return law_in(own).loss(params, worth_of_tokens(unique, tokens))
