"""Gradient-boosted oblivious trees as arrays: the prediction for all rows at once, in numpy.

All nodes of one level of an oblivious tree have the same split, so a leaf's number is made of one bit per level.
Source: Prokhorenkova et al. 2018, arXiv 1706.09516, section 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

ROWS_AT_ONCE = 1 << 12
"""Number of rows that are predicted together, so that the memory does not grow with them."""


@dataclass(frozen=True, eq=False)
class Trees:
    """An ensemble of trees of one depth."""

    features: npt.NDArray[np.int16]
    """Feature of each distinct split (splits,)."""
    bounds: Floats
    """Bound of each distinct split: its bit is 1 if the feature's value is greater (splits,)."""
    levels: npt.NDArray[np.int16]
    """Split of each level of each tree; level i is bit i of the leaf's number (depth, trees)."""
    leaves: Floats
    """Value of each leaf (trees, 2^depth)."""
    bias: float
    """Value that is added to the sum of the trees' leaves."""

    def predict(self, matrix: Floats) -> Floats:
        """Return the prediction for each row of a matrix of features, (features, rows)."""
        size = matrix.shape[1]
        parts = [self._predict(matrix[:, start : start + ROWS_AT_ONCE]) for start in range(0, size, ROWS_AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _predict(self, matrix: Floats) -> Floats:
        exceeds = (matrix[self.features] > self.bounds[:, None]).view(np.uint8)
        # From the highest bit on, because adding a number to itself is faster than shifting it.
        leaf = exceeds[self.levels[-1]]
        for splits in self.levels[-2::-1]:
            np.add(leaf, leaf, out=leaf)
            leaf |= exceeds[splits]
        places = leaf + (np.arange(len(self.leaves), dtype=np.int32) << np.int32(len(self.levels)))[:, None]
        total: Floats = np.take(self.leaves, places).sum(axis=0, dtype=np.float32) + np.float32(self.bias)
        return total

    def arrays(self, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays for a file, each with a name that starts with `prefix`."""
        return {
            f"{prefix}_features": self.features,
            f"{prefix}_bounds": self.bounds,
            f"{prefix}_levels": self.levels,
            f"{prefix}_leaves": self.leaves,
            f"{prefix}_bias": np.array(self.bias, np.float32),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]], prefix: str) -> "Trees":
        """Return the trees whose arrays have names that start with `prefix`."""
        features, bounds, levels, leaves, bias = (
            arrays[f"{prefix}_{name}"] for name in ("features", "bounds", "levels", "leaves", "bias")
        )
        return cls(
            features.astype(np.int16),
            bounds.astype(np.float32),
            levels.astype(np.int16),
            leaves.astype(np.float32),
            float(bias),
        )
