"""The loss after the last layer: cross-entropy over the vocabulary, some tokens at a time, and who it came from.

The gradient is computed together with the loss, while a chunk's logits exist; they are never whole in memory and never
computed twice. That needs the factor of the loss beforehand, which is known: 1 / targets of the global batch. The
vocabulary may be filled up with rows of zeros for the sake of the matrix products: neither weights nor losses see them.

Shape suffixes: N tokens (n: of a chunk), D width, V vocabulary (of this rank), P the same with rows of zeros, S sources
or other groups (G: some of them).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from train.data.rows import IGNORED
from train.model.attention import number_format

# The loss of a chunk of logits, and its slopes in their place: by single operations, or by two compiled functions.
#
# Compiled, each logit of 16 bits costs 6 bytes of memory traffic: the first function reads it, the second reads it
# again and writes its slope. In single operations it costs 44: copies to float32 and back, and a pass each for
# maximum, difference, exponential, sum and product. Those reuse their memory, and need no compiler: they are for
# CPUs.
#
# Shape suffixes: n tokens of a chunk (m: those of them in use), V vocabulary (of this rank).

Sums = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Slopes = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output matrix that this rank holds."""

    group: dist.ProcessGroup
    """Ranks that hold the vocabulary between them."""
    first: int
    """Id of the first row here."""


class PlainChunkLoss:
    """In single operations, as much as possible in place."""

    def __init__(self, logits_nV: Tensor, part: VocabularyPart | None):
        """`part`: what this rank holds of the vocabulary; None = all of it."""
        self._logits_nV, self._part = logits_nV, part
        wide = torch.promote_types(logits_nV.dtype, torch.float32)
        self._wide_nV = logits_nV if logits_nV.dtype == wide else torch.empty_like(logits_nV, dtype=wide)
        self._sums_m = self._own_m = self._places_m1 = logits_nV.new_empty(0)

    def losses(self, targets_m: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and log Z; exponentials take the place of the wide logits."""
        row = slice(len(targets_m))
        powers_mV = self._wide_nV[row]
        if self._wide_nV is not self._logits_nV:
            powers_mV.copy_(self._logits_nV[row])
        places_m, self._own_m = _places(targets_m, powers_mV.shape[1], self._part)
        self._places_m1 = places_m[:, None]
        at_target_m = powers_mV.gather(1, self._places_m1)[:, 0].masked_fill_(~self._own_m, 0.0)
        most_m = powers_mV.amax(1)
        if self._part is not None:
            dist.all_reduce(most_m, dist.ReduceOp.MAX, self._part.group)
        sums_m = powers_mV.sub_(most_m[:, None]).exp_().sum(1)
        self._sums_m, at_target_m = _over_parts(sums_m, at_target_m, self._part)
        log_z_m = most_m + self._sums_m.log()
        return log_z_m - at_target_m, log_z_m

    def into_slopes(self, shares_m: Tensor, factors_m: Tensor) -> None:
        """Slopes, from the exponentials that `losses` has left."""
        row = slice(len(shares_m))
        powers_mV = self._wide_nV[row].mul_((shares_m / self._sums_m)[:, None])
        powers_mV.scatter_add_(1, self._places_m1, -(factors_m * self._own_m)[:, None])
        if self._wide_nV is not self._logits_nV:
            self._logits_nV[row].copy_(powers_mV)


class FusedChunkLoss:
    """In two compiled functions, always over the whole chunk: another size would be compiled anew."""

    def __init__(self, logits_nV: Tensor, part: VocabularyPart | None):
        """`part`: what this rank holds of the vocabulary; None = all of it."""
        self._logits_nV, self._part = logits_nV, part
        self._places_n = self._log_z_n = logits_nV.new_empty(0)

    def losses(self, targets_m: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and log Z; the logits stay as they are."""
        number, size = len(targets_m), len(self._logits_nV)
        targets_n = F.pad(targets_m, (0, size - number), value=IGNORED) if number < size else targets_m
        places_n, own_n = _places(targets_n, self._logits_nV.shape[1], self._part)
        most_n, sums_n, at_target_n = compiled()[0](self._logits_nV, places_n)
        at_target_n = at_target_n.masked_fill(~own_n, 0.0)
        if self._part is not None:
            whole_n = most_n.clone()
            dist.all_reduce(whole_n, dist.ReduceOp.MAX, self._part.group)
            sums_n, most_n = sums_n * (most_n - whole_n).exp(), whole_n
        sums_n, at_target_n = _over_parts(sums_n, at_target_n, self._part)
        self._log_z_n, self._places_n = most_n + sums_n.log(), places_n.masked_fill(~own_n, -1)
        return (self._log_z_n - at_target_n)[:number], self._log_z_n[:number]

    def into_slopes(self, shares_m: Tensor, factors_m: Tensor) -> None:
        """Slopes, from the logits."""
        lacking = len(self._logits_nV) - len(shares_m)
        shares_n, factors_n = (F.pad(each, (0, lacking)) if lacking else each for each in (shares_m, factors_m))
        compiled()[1](self._logits_nV, self._log_z_n, shares_n, self._places_n, factors_n)


def sums_of(logits_nV: Tensor, places_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit of each token, the sum of exponentials relative to it, and the logit at a place; float32."""
    wide_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    # With the dim kept, torch's compiler knows a softmax by it, and makes one pass of both on a GPU.
    most_n1 = wide_nV.amax(1, keepdim=True)
    sums_n1 = (wide_nV - most_n1).exp().sum(1, keepdim=True)
    at_place_n1 = logits_nV.gather(1, places_n[:, None]).to(wide_nV.dtype)
    return most_n1.squeeze(1), sums_n1.squeeze(1), at_place_n1.squeeze(1)


def slopes_into(logits_nV: Tensor, log_z_n: Tensor, shares_n: Tensor, places_n: Tensor, factors_n: Tensor) -> None:
    """Replace each logit by exp(logit − log Z) · share, less the factor at the token's place (−1 = at none)."""
    columns_V = torch.arange(logits_nV.shape[1], device=logits_nV.device)
    at_target_nV = torch.where(columns_V == places_n[:, None], factors_n[:, None], 0.0)
    powers_nV = (logits_nV.to(log_z_n.dtype) - log_z_n[:, None]).exp()
    logits_nV.copy_(powers_nV * shares_n[:, None] - at_target_nV)


@cache
def compiled() -> tuple[Sums, Slopes]:
    """Both functions, compiled anew for each size of a chunk."""
    return torch.compile(sums_of, dynamic=False), torch.compile(slopes_into, dynamic=False)


def _over_parts(sums_n: Tensor, at_target_n: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Both summed over the ranks that share the vocabulary."""
    if part is None:
        return sums_n, at_target_n
    both_2n = torch.stack((sums_n, at_target_n))
    dist.all_reduce(both_2n, group=part.group)
    return both_2n[0], both_2n[1]


def _places(targets_n: Tensor, num_here: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Column of each target, 0 where it is not here, and whether it is."""
    places_n = targets_n - (part.first if part else 0)
    own_n = (places_n >= 0) & (places_n < num_here)
    return places_n.masked_fill(~own_n, 0), own_n


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


class HeadLoss:
    """From the last residual stream to the loss; set `scale` and `tally` before use, and `num_targets` if known."""

    def __init__(
        self,
        z_loss: float = 0.0,
        chunk_tokens: int = 4096,
        part: VocabularyPart | None = None,
        fused: bool = False,
        multiple: int = 1,
    ):
        """`part`: what this rank holds of the vocabulary; None = all of it. `fused`: whether chunks, then of one size,
        are computed by compiled functions. `multiple`: what the columns of the logits are filled up to a multiple of.
        """
        self.z_loss, self.chunk_tokens, self.part = z_loss, chunk_tokens, part
        self.fused, self.multiple = fused, multiple
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
        # Compiled chunks keep their size however many targets of a batch count.
        size = min(head.chunk_tokens, number if head.fused else len(x_ND))
        total, losses_n, gradients = _sums(x_ND, weight_VD, targets_N, (head, size), wanted)
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
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, how: tuple[HeadLoss, int], wanted: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Total loss, cross-entropy of each token, and if `wanted` the total's gradients for the stream and the matrix.

    `how`: the head, and the tokens of a chunk.
    """
    head, size = how
    number = number_format(x_ND)
    wide = torch.promote_types(number, torch.float32)
    matrix_PD, x_ND = _filled_up(weight_VD.to(number), head.multiple), x_ND.to(number)
    total, losses_N = x_ND.new_zeros((), dtype=wide), x_ND.new_zeros(len(x_ND), dtype=wide)
    gradient_ND = torch.empty_like(x_ND) if wanted else None
    gradient_PD = torch.zeros_like(matrix_PD, dtype=wide) if wanted else None
    # The same memory for every chunk: fresh pages for each made the whole a third slower (4 MB and more, one core).
    logits_nP = x_ND.new_empty(size, len(matrix_PD))
    chunk = (FusedChunkLoss if head.fused else PlainChunkLoss)(logits_nP[:, : len(weight_VD)], head.part)
    for start in range(0, len(x_ND), max(size, 1)):
        part = slice(start, min(start + size, len(x_ND)))
        slopes_nP = logits_nP[: part.stop - start]
        torch.mm(x_ND[part], matrix_PD.T, out=slopes_nP)
        counts_n = targets_N[part] != IGNORED
        factors_n = counts_n.to(wide) * head.scale
        losses_n, log_z_n = chunk.losses(targets_N[part])
        losses_N[part] = losses_n.masked_fill_(~counts_n, 0.0)
        total += (losses_n * factors_n).sum()
        if head.z_loss:
            total += (head.z_loss * log_z_n.square() * factors_n).sum()
        if gradient_ND is not None and gradient_PD is not None:
            # A tensor of its own: torch compiles anew for one that is given twice.
            shares_n = factors_n * (1 + 2 * head.z_loss * log_z_n) if head.z_loss else factors_n.clone()
            chunk.into_slopes(shares_n, factors_n)
            torch.mm(slopes_nP, matrix_PD, out=gradient_ND[part])
            if number == wide:
                gradient_PD.addmm_(slopes_nP.T, x_ND[part])
            else:
                gradient_PD += slopes_nP.T @ x_ND[part]
    if gradient_ND is None or gradient_PD is None:
        return total, losses_N, None
    return total, losses_N, (gradient_ND, gradient_PD[: len(weight_VD)])


def _filled_up(matrix_VD: Tensor, multiple: int) -> Tensor:
    """The matrix with rows of zeros up to a multiple; itself, and not a copy, where it lacks none."""
    lacking = -len(matrix_VD) % multiple
    return F.pad(matrix_VD, (0, 0, 0, lacking)) if lacking else matrix_VD
