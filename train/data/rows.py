"""Rows of a global batch as tensors: inputs, targets, document numbers and sources.

Shape suffixes: B rows, T positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED = -100
"""The target of a position without a loss."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a global batch as tensors, in the order of the batch."""

    inputs_BT: Tensor
    """Input ids of the model, int64."""
    targets_BT: Tensor
    """Id to predict at each position, int64; IGNORED where none is."""
    documents_BT: Tensor | None
    """Number of each position's document in its row, int32, never decreasing; None = a row counts as one document."""
    sources_B: Tensor
    """Source of each row, int64, as an index into `SampleOrder.sources`; or a loss group of each position, (B, T)."""
    counted: int | None = None
    """Number of targets, if it was counted before the rows were copied to a device."""
    starts_N: Tensor | None = None
    """On a CUDA device, `document_starts` of the rows, made on the CPU: on the device, its length would require a
    synchronization."""
    keys_B: Tensor | None = None
    """64-bit key of each row, int64, from which its dropout masks are drawn; None = no dropout."""

    def __len__(self) -> int:
        return len(self.inputs_BT)

    def part(self, first: int, stop: int) -> "Rows":
        """Return the rows [first, stop)."""
        return self._apply(lambda tensor: tensor[first:stop])

    def to(self, device: torch.device) -> "Rows":
        """Return the same rows on a device, with their targets counted. A copy to a CUDA device is asynchronous."""
        if device.type != "cuda":
            return replace(self._apply(lambda tensor: tensor.to(device)), counted=self.num_targets)
        # Padded rows are in new memory, and a copy from memory that is not pinned blocks the host.
        on_device = self._apply(lambda tensor: _pinned(tensor).to(device, non_blocking=True))
        starts_N = None
        if self.documents_BT is not None:
            starts_N = document_starts(self.documents_BT).pin_memory().to(device, non_blocking=True)
        return replace(on_device, counted=self.num_targets, starts_N=starts_N)

    def pinned(self) -> "Rows":
        """Return the same rows in pinned memory."""
        return self._apply(Tensor.pin_memory)

    def _apply(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        documents_BT = None if self.documents_BT is None else change(self.documents_BT)
        keys_B = None if self.keys_B is None else change(self.keys_B)
        return Rows(
            change(self.inputs_BT), change(self.targets_BT), documents_BT, change(self.sources_B), keys_B=keys_B
        )

    def grouped(self, groups_BT: Tensor) -> "Rows":
        """Return the same rows with losses summed by the loss groups `groups_BT` (int64) instead of by source."""
        return replace(self, sources_B=groups_BT)

    def padded(self, number: int) -> "Rows":
        """Return at least `number` rows; rows that are added are copies of the first row, without targets."""
        missing = number - len(self)
        if missing <= 0:
            return self
        chosen = torch.cat([torch.arange(len(self)), torch.zeros(missing, dtype=torch.int64)])
        targets_BT = self.targets_BT[chosen]
        targets_BT[len(self) :] = IGNORED
        documents_BT = None if self.documents_BT is None else self.documents_BT[chosen]
        keys_B = None if self.keys_B is None else self.keys_B[chosen]
        return Rows(self.inputs_BT[chosen], targets_BT, documents_BT, self.sources_B[chosen], keys_B=keys_B)

    @property
    def draws(self) -> dict[str, Tensor]:
        """The keys of the rows as an argument of the model, by name; empty without dropout."""
        return {} if self.keys_B is None else {"keys_B": self.keys_B}

    def without_targets(self) -> "Rows":
        """Return the same rows with every target set to IGNORED."""
        return replace(self, targets_BT=torch.full_like(self.targets_BT, IGNORED), counted=0)

    @property
    def num_targets(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets_BT != IGNORED).sum()) if self.counted is None else self.counted


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return each document's start in the concatenated rows, then the end of the last row, int32, (documents + 1,).

    The end of a row also ends a document.
    """
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_N = begins_BT.flatten().nonzero()[:, 0].to(torch.int32)
    return torch.cat((starts_N, torch.tensor([documents_BT.numel()], dtype=torch.int32)))


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Return the concatenated rows of all `parts`, in their order."""
    documents = [part.documents_BT for part in parts if part.documents_BT is not None]
    keys = [part.keys_B for part in parts if part.keys_B is not None]
    return Rows(
        torch.cat([part.inputs_BT for part in parts]),
        torch.cat([part.targets_BT for part in parts]),
        torch.cat(documents) if documents else None,
        torch.cat([part.sources_B for part in parts]),
        keys_B=torch.cat(keys) if keys else None,
    )
