"""The price of data: the expected loss with fewer unique tokens, by the published law and by one's own."""

import pytest

from schemas.errors import ContractError
from train.scaling.own_law import price_of_data
from train.scaling.repeats import expected_loss, worth_of_tokens

OWN = {"floor": 2.0, "a": 100.0, "b": 200.0, "alpha": 0.5, "beta": 0.5, "num_runs": 6, "deviation": 0.01}
OWN |= {"params": 1e8, "tokens": 1e9, "compute": 6e17}


def test_the_published_law_prices_repeats() -> None:
    whole = price_of_data(None, 1e8, 4e9, 2e9)
    assert whole == expected_loss(1e8, 4e9, 2e9)
    assert price_of_data(None, 1e8, 4e9, 1e9) > whole


def test_an_own_law_prices_the_worth_of_the_tokens() -> None:
    # 2 + 100 / sqrt(1e4) + 200 / sqrt(1e6), while no token is repeated.
    assert price_of_data(OWN, 1e4, 1e6, 1e6) == pytest.approx(2 + 1 + 0.2)
    repeated = 2 + 1 + 200 * worth_of_tokens(5e5, 1e6) ** -0.5
    assert price_of_data(OWN, 1e4, 1e6, 5e5) == pytest.approx(repeated)
    assert repeated > 3.2


def test_a_damaged_law_is_refused() -> None:
    with pytest.raises(ContractError, match=r"train/plan\.json: expected a valid plan\.own_law, got floor: "):
        price_of_data({**OWN, "floor": "x"}, 1e8, 4e9, 2e9)
