"""Items of a Penstock run for OLMo-core's data loader: `PenstockItems("run")[0]["input_ids"]`."""

import torch
from torch.utils.data import Dataset

import penstock


class PenstockItems(Dataset):
    """Items {"input_ids", "label_mask"}: int64 and bool of length seq_len; OLMo-core shifts the labels itself."""

    def __init__(self, run: str):
        self._samples = penstock.open(run).tokens.torch_dataset()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._samples[index]
        # A token has a loss if the position before it has a target; the first token of a row is never a label.
        has_loss = torch.cat([torch.zeros(1, dtype=torch.bool), row["targets"][:-1] >= 0])
        return {"input_ids": row["inputs"], "label_mask": has_loss}
