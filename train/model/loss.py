"""The loss behind the last layer: cross-entropy over the vocabulary, some tokens at a time, and who it came from.

The gradient is computed together with the loss, while a chunk's logits exist; they are never whole in memory and never
computed twice. That needs the factor of the loss beforehand, which is known: 1 / targets of the global batch.

Shape suffixes: N tokens, D width, V vocabulary (of this rank), S sources or other groups (G: some of them).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.rows import IGNORED

GROUPS_AT_ONCE = 64
"""Rows of a one-hot matrix of groups and positions."""


@dataclass
class Tally:
    """Sums over the targets of rows seen so far, by source or another group, on this rank; float64."""

    losses_S: Tensor
    """Cross-entropy [nats]."""
    counts_S: Tensor
    """Number of targets."""

    @classmethod
    def empty(cls, num_sources: int, device: torch.device) -> "Tally":
        """Nothing seen."""
        zeros = torch.zeros(2, num_sources, dtype=torch.float64, device=device)
        return cls(zeros[0], zeros[1])

    def add(self, losses_BT: Tensor, targets_BT: Tensor, groups: Tensor) -> None:
        """Add the losses of rows, 0 where the target is IGNORED; `groups` of rows (B,) or of positions (B, T)."""
        counts_BT = (targets_BT != IGNORED).double()
        if groups.dim() == 2:
            self._add_positions(losses_BT.double().flatten(), counts_BT.flatten(), groups.flatten())
            return
        # A product with a one-hot matrix and not index_add_, whose order is undefined on CUDA.
        chosen_SB = (torch.arange(len(self.losses_S), device=groups.device)[:, None] == groups).double()
        self.losses_S += chosen_SB @ losses_BT.double().sum(1)
        self.counts_S += chosen_SB @ counts_BT.sum(1)

    def _add_positions(self, losses_N: Tensor, counts_N: Tensor, groups_N: Tensor) -> None:
        if not losses_N.is_cuda:
            self.losses_S.index_add_(0, groups_N, losses_N)
            self.counts_S.index_add_(0, groups_N, counts_N)
            return
        # Some groups at a time, for the one-hot matrix to stay small.
        for groups_G in torch.unique(groups_N).split(GROUPS_AT_ONCE):
            chosen_GN = (groups_G[:, None] == groups_N).double()
            self.losses_S[groups_G] += chosen_GN @ losses_N
            self.counts_S[groups_G] += chosen_GN @ counts_N


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output matrix that this rank holds."""

    group: dist.ProcessGroup
    """Ranks that hold the vocabulary between them."""
    first: int
    """Id of the first row here."""


class HeadLoss:
    """From the last residual stream to the loss; set `scale` and `tally` before use, and `num_targets` if known."""

    def __init__(self, z_loss: float = 0.0, chunk_tokens: int = 4096, part: VocabularyPart | None = None):
        """`part`: what this rank holds of the vocabulary; None = all of it."""
        self.z_loss, self.chunk_tokens, self.part = z_loss, chunk_tokens, part
        self.scale: float | Tensor = 1.0
        self.tally: Tally | None = None
        self.num_targets: int | None = None
        """Targets of the next rows that count; None = a CPU counts them, and CUDA computes every row."""

    def __call__(self, x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, sources_B: Tensor | None) -> Tensor:
        """Sum of (cross-entropy + z_loss · log² Z) · scale, a 0-d tensor with a gradient for stream and weights."""
        # Whether a gradient is wanted is always False inside of `forward`, so it is asked here.
        wanted = torch.is_grad_enabled() and (x_BTD.requires_grad or weight_VD.requires_grad)
        rows = (x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten())
        total: Tensor
        total, losses_N = _ChunkedLoss.apply(*rows, self, wanted)  # type: ignore[no-untyped-call]
        if self.tally is not None and sources_B is not None:
            self.tally.add(losses_N.view_as(targets_BT), targets_BT, sources_B)
        return total


class _ChunkedLoss(torch.autograd.Function):
    """Total loss (with gradient) and cross-entropy of each token (without)."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, head: HeadLoss, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        places_n, number = _that_count(targets_N, head.num_targets), len(x_ND)
        if places_n is not None:
            x_ND, targets_N = x_ND[places_n], targets_N[places_n]
        total, losses_n, gradients = _sums(x_ND, weight_VD, targets_N, head, wanted)
        if gradients is not None:
            ctx.save_for_backward(_spread(gradients[0], places_n, number), gradients[1].to(weight_VD.dtype))
        losses_N = _spread(losses_n, places_n, number)
        ctx.mark_non_differentiable(losses_N)
        return total, losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Both gradients times that of the total; the loss of single tokens has none."""
        gradient_ND, gradient_VD = (saved * gradients[0].to(saved.dtype) for saved in ctx.saved_tensors)
        return gradient_ND, gradient_VD, None, None, None


def _that_count(targets_N: Tensor, number: int | None) -> Tensor | None:
    """Places of the targets that count, of which there are `number`; None: all rows are computed.

    Masked language models ignore five of six. A CUDA device would have to be waited for to know their number, so where
    nobody has counted them before, every row is computed there.
    """
    if number is None and not targets_N.is_cuda:
        number = int((targets_N != IGNORED).sum())
    if number is None or number == len(targets_N):
        return None
    return torch.nonzero_static(targets_N != IGNORED, size=number)[:, 0]


def _spread(rows: Tensor, places_n: Tensor | None, number: int) -> Tensor:
    """Rows at their places among `number`, with zeros elsewhere; without places they are all there are."""
    return rows if places_n is None else rows.new_zeros(number, *rows.shape[1:]).index_copy_(0, places_n, rows)


def _sums(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, head: HeadLoss, wanted: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Total loss, cross-entropy of each token, and if `wanted` the total's gradients for the stream and the matrix."""
    number = _number_format(x_ND)
    wide = torch.promote_types(number, torch.float32)
    matrix_VD, x_ND = weight_VD.to(number), x_ND.to(number)
    total, losses_N = x_ND.new_zeros((), dtype=wide), x_ND.new_zeros(len(x_ND), dtype=wide)
    gradient_ND = torch.empty_like(x_ND) if wanted else None
    gradient_VD = torch.zeros_like(matrix_VD, dtype=wide) if wanted else None
    # The same memory for every chunk: fresh pages for each made the whole a third slower (4 MB and more, one core).
    logits_nV = x_ND.new_empty(min(head.chunk_tokens, len(x_ND)), len(matrix_VD))
    wide_nV = logits_nV if number == wide else torch.empty_like(logits_nV, dtype=wide)
    for start in range(0, len(x_ND), head.chunk_tokens):
        part = slice(start, min(start + head.chunk_tokens, len(x_ND)))
        row = slice(part.stop - start)
        torch.mm(x_ND[part], matrix_VD.T, out=logits_nV[row])
        powers_nV = logits_nV[row] if number == wide else wide_nV[row].copy_(logits_nV[row])
        places_n1, own_n = _places(targets_N[part], powers_nV.shape[1], head.part)
        losses_n, log_z_n, sums_n = _exponentiate(powers_nV, places_n1, own_n, head.part)
        counts_n = targets_N[part] != IGNORED
        losses_N[part] = losses_n.masked_fill_(~counts_n, 0.0)
        factor_n = share_n = counts_n.to(wide) * head.scale
        total += (losses_n * factor_n).sum()
        if head.z_loss:
            total += (head.z_loss * log_z_n.square() * factor_n).sum()
            share_n = factor_n * (1 + 2 * head.z_loss * log_z_n)
        if gradient_ND is not None and gradient_VD is not None:
            powers_nV.mul_((share_n / sums_n)[:, None]).scatter_add_(1, places_n1, -(factor_n * own_n)[:, None])
            slopes_nV = powers_nV if number == wide else logits_nV[row].copy_(powers_nV)
            torch.mm(slopes_nV, matrix_VD, out=gradient_ND[part])
            if number == wide:
                gradient_VD.addmm_(slopes_nV.T, x_ND[part])
            else:
                gradient_VD += slopes_nV.T @ x_ND[part]
    return total, losses_N, None if gradient_ND is None or gradient_VD is None else (gradient_ND, gradient_VD)


def _number_format(x_ND: Tensor) -> torch.dtype:
    kind = x_ND.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_ND.dtype


def _exponentiate(
    logits_nV: Tensor, places_n1: Tensor, own_n: Tensor, part: VocabularyPart | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy and log Z of each token, and the sum of the exponentials that take the place of the logits.

    These are relative to the largest logit of a token. The three are those of the whole vocabulary.
    """
    most_n, at_target_n = logits_nV.amax(1), logits_nV.gather(1, places_n1)[:, 0].masked_fill_(~own_n, 0.0)
    if part is not None:
        dist.all_reduce(most_n, dist.ReduceOp.MAX, part.group)
    sums_n = logits_nV.sub_(most_n[:, None]).exp_().sum(1)
    if part is not None:
        both_2n = torch.stack((sums_n, at_target_n))
        dist.all_reduce(both_2n, group=part.group)
        sums_n, at_target_n = both_2n.unbind()
    log_z_n = most_n + sums_n.log()
    return log_z_n - at_target_n, log_z_n, sums_n


def _places(targets_n: Tensor, num_here: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Column of each target, (n, 1), 0 where it is not here, and whether it is."""
    places_n = targets_n - (part.first if part else 0)
    own_n = (places_n >= 0) & (places_n < num_here)
    return places_n.masked_fill(~own_n, 0)[:, None], own_n
