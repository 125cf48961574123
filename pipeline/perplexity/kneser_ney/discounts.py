"""Discounts of modified Kneser-Ney smoothing, from counts of counts.

Source: Chen and Goodman 1998, equation 26; when it fails and what then: Heafield et al. 2013 and lmplz.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from schemas.errors import ContractError

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """Sums over n-grams of one order: the only thing about them that the driver ever sees."""

    number: int = 0
    kept: int = 0
    """Those that pruning leaves."""
    ones: int = 0
    """Adjusted counts of 1, pruned or not; `twos`, `threes`, `fours` likewise."""
    twos: int = 0
    threes: int = 0
    fours: int = 0
    kept_ones: int = 0
    kept_twos: int = 0
    kept_more: int = 0
    """Kept with an adjusted count of 3 or more."""
    pruned_mass: int = 0
    """Adjusted counts of the pruned, summed."""
    mass: int = 0
    """All adjusted counts, summed."""

    @classmethod
    def of(cls, counts: Ints, kept: Flags) -> Self:
        """The tally of n-grams by their adjusted counts and whether they are kept."""
        few = np.bincount(np.minimum(counts, 5), minlength=6).tolist()
        left = np.bincount(np.minimum(counts[kept], 3), minlength=4).tolist()
        return cls(
            number=len(counts),
            kept=int(kept.sum()),
            ones=few[1],
            twos=few[2],
            threes=few[3],
            fours=few[4],
            kept_ones=left[1],
            kept_twos=left[2],
            kept_more=left[3],
            pruned_mass=int(counts[~kept].sum()),
            mass=int(counts.sum()),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Discounts:
    """What is taken from adjusted counts of 1, 2 and 3 or more."""

    one: float
    two: float
    more: float

    def of(self, counts: Ints) -> Floats:
        """The discount of each count."""
        table: Floats = np.array([0.0, self.one, self.two, self.more])
        return np.take(table, np.minimum(counts, 3))

    def freed(self, ones: Ints, twos: Ints, more: Ints, pruned: Ints, mass: Ints) -> Floats:
        """The share of each context's mass that its back-off gets, from integer sums over what follows the context."""
        shares: Floats = (self.one * ones + self.two * twos + self.more * more + pruned) / mass
        return shares


def estimated(order: int, tally: Tally, fallback: Sequence[float] | None) -> tuple[Discounts, str | None]:
    """The discounts of an order, and why the closed form failed if the fallback stands in for it.

    Raises ContractError if it fails and there is no fallback.
    """
    have = [tally.ones, tally.twos, tally.threes, tally.fours]
    problem = None
    values: list[float] = []
    if missing := [count for count in (1, 2, 3) if not have[count - 1]]:
        problem = f"no {order}-gram with an adjusted count of {missing[0]}"
    else:
        share = have[0] / (have[0] + 2 * have[1])
        values = [count - (count + 1) * share * have[count] / have[count - 1] for count in (1, 2, 3)]
        wrong = [(count, value) for count, value in enumerate(values, 1) if not 0 <= value <= count]
        if wrong:
            problem = f"a discount of {wrong[0][1]:.6g} for adjusted counts of {wrong[0][0]}"
    if problem is None:
        return Discounts(*values), None
    if fallback is None:
        raise ContractError(
            f"train_lm: promised {order}-grams with adjusted counts from which discounts follow, found {problem} "
            f"(counts of counts 1 to 4: {have}); give more text or one with fewer repeated lines, or set "
            "discount_fallback, for example to [0.5, 1, 1.5]"
        )
    filled = [*fallback, *[fallback[-1]] * (3 - len(fallback))]
    return Discounts(*filled), problem
