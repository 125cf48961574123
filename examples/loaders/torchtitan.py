"""Samples of a Penstock run for torchtitan: give `PenstockSamples` to its `ParallelAwareDataloader` as the dataset."""

from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import IterableDataset

import penstock


class PenstockSamples(IterableDataset):
    """Yields ({"input": tokens}, labels), int64 of length seq_len, without end; labels of -100 have no loss."""

    def __init__(self, run: str, dp_rank: int = 0, dp_world_size: int = 1):
        self._samples, self._rows = penstock.open(run).tokens.torch_dataset(), 0
        self._rank, self._ranks = dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            row = self._samples[(self._rows + self._rank) % len(self._samples)]
            self._rows += self._ranks
            yield {"input": row["inputs"]}, row["targets"]

    def state_dict(self) -> dict[str, int]:  # it does not depend on the number of ranks
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rows = state["rows"]
