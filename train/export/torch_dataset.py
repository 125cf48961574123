"""The training samples of a run as a torch Dataset, for other training loops.

    loader = DataLoader(penstock.open("RUN").tokens.torch_dataset(), batch_size=8, num_workers=2)
    for batch in loader:
        loss = my_loss(my_model(batch["inputs"]), batch["targets"])

Leave `shuffle` off: the samples are already shuffled, in the order of the run's plan.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import open_run
from train.checkpoint.folder import open_trained_order
from train.data.batches import Batches
from train.data.packing import packed_files
from train.data.verify import verify_dataset
from train.plan.plan import read_plan


class SampleDataset(Dataset[dict[str, Tensor]]):
    """The samples of one training stage of a run's plan; every worker process opens the shards itself.

    They are those of the plan: `train.steps` times the global batch, without a partial last step, so a plan with few
    steps has few samples. The SHA-256 of each file that has changed since the last comparison is compared first.
    """

    def __init__(self, run: str, stage: int = 0):
        self.run, self.stage = run, stage

    @cached_property
    def _batches(self) -> Batches:
        run = open_run(self.run)
        dataset = open_dataset(run)
        plan = read_plan(run, dataset)
        # The list of compared files is in the run folder, which an earlier version of it is not allowed to write to.
        verify_dataset(Store(run.address), dataset, packed_files(run, dataset, plan.settings.train))
        return Batches(dataset, plan.settings.train, open_trained_order(run, dataset, plan))

    def __getstate__(self) -> dict[str, Any]:
        return {"run": self.run, "stage": self.stage}

    def __len__(self) -> int:
        return self._batches.order.stages[self.stage].num_samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the samples with these indices. A DataLoader fetches a whole batch with this method."""
        if outside := [number for number in numbers if not 0 <= number < len(self)]:
            raise IndexError(f"sample {outside[0]} of {len(self)}")
        rows = self._batches.read(self._batches.order.at(self.stage, np.array(numbers, np.int64)))
        named = {"inputs": rows.inputs_BT, "targets": rows.targets_BT, "documents": rows.documents_BT}
        present = {name: value for name, value in (named | {"source": rows.sources_B}).items() if value is not None}
        return [{name: value[i] for name, value in present.items()} for i in range(len(rows))]
