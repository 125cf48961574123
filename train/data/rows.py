"""Rows of a global batch as tensors: what goes in, what is to come out, and where documents and sources lie.

Shape suffixes: B rows, T positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED = -100
"""The target of a position that counts nowhere."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a global batch, in its order."""

    inputs_BT: Tensor
    """Ids that the model sees, int64."""
    targets_BT: Tensor
    """Id to be predicted at each position, int64; IGNORED where nothing is."""
    documents_BT: Tensor | None
    """Number of the document of each position in its row, int32, never falling; None = a row counts as one document."""
    sources_B: Tensor
    """Source of each row, int64, as in `Order.sources`; or, (B, T), another group for the loss of each position."""
    counted: int | None = None
    """Number of targets, where it was counted before the rows went to a device."""
    starts_N: Tensor | None = None
    """On a CUDA device, `document_starts` of the rows: counted there, its length would have to be waited for."""

    def __len__(self) -> int:
        return len(self.inputs_BT)

    def part(self, first: int, stop: int) -> "Rows":
        """The rows [first, stop)."""
        return self._mapped(lambda tensor: tensor[first:stop])

    def to(self, device: torch.device) -> "Rows":
        """The same rows on a device, their targets counted; pinned ones are on their way there when this returns."""
        if device.type != "cuda":
            return replace(self._mapped(lambda tensor: tensor.to(device)), counted=self.num_targets)
        # Rows that were filled up lie elsewhere, and from memory that is not pinned the host waits for the copy.
        there = self._mapped(lambda tensor: _pinned(tensor).to(device, non_blocking=True))
        starts_N = None
        if self.documents_BT is not None:
            starts_N = document_starts(self.documents_BT).pin_memory().to(device, non_blocking=True)
        return replace(there, counted=self.num_targets, starts_N=starts_N)

    def pinned(self) -> "Rows":
        """The same rows in memory that a CUDA device reads by itself."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        documents_BT = None if self.documents_BT is None else change(self.documents_BT)
        return Rows(change(self.inputs_BT), change(self.targets_BT), documents_BT, change(self.sources_B))

    def grouped(self, groups_BT: Tensor) -> "Rows":
        """The same rows, with a group for the loss of each position, int64, in place of their sources."""
        return replace(self, sources_B=groups_BT)

    def padded(self, number: int) -> "Rows":
        """At least `number` rows: those that lack are copies of the first in which nothing is predicted."""
        lacking = number - len(self)
        if lacking <= 0:
            return self
        chosen = torch.cat([torch.arange(len(self)), torch.zeros(lacking, dtype=torch.int64)])
        targets_BT = self.targets_BT[chosen]
        targets_BT[len(self) :] = IGNORED
        documents_BT = None if self.documents_BT is None else self.documents_BT[chosen]
        return Rows(self.inputs_BT[chosen], targets_BT, documents_BT, self.sources_B[chosen])

    def uncounted(self) -> "Rows":
        """The same rows with nothing to be predicted."""
        return replace(self, targets_BT=torch.full_like(self.targets_BT, IGNORED), counted=0)

    @property
    def num_targets(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets_BT != IGNORED).sum()) if self.counted is None else self.counted


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def document_starts(documents_BT: Tensor) -> Tensor:
    """Where each document starts in rows laid end to end, then the end of the last row, int32, (documents + 1,).

    A document ends with its row. Compiled graphs take tensors of any such length.
    """
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_N = begins_BT.flatten().nonzero()[:, 0].to(torch.int32)
    return torch.cat((starts_N, torch.tensor([documents_BT.numel()], dtype=torch.int32)))


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several parts, in their order."""
    documents = [part.documents_BT for part in parts if part.documents_BT is not None]
    return Rows(
        torch.cat([part.inputs_BT for part in parts]),
        torch.cat([part.targets_BT for part in parts]),
        torch.cat(documents) if documents else None,
        torch.cat([part.sources_B for part in parts]),
    )
