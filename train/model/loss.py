"""Chunked cross-entropy over the vocabulary, fused with the output projection, and its sums by source.

The gradient is computed together with the loss, while a chunk's logits exist: all logits are never in memory at once
and never computed twice. The factor of the loss must be known in advance: 1 / number of targets in the global batch.
The vocabulary may be padded with zero rows for faster matrix products; weights and losses do not include them.

Shape suffixes: N tokens (n: of a chunk), D width, V vocabulary (of this rank), P vocabulary padded with zero rows, S
sources or other groups (G: some of them).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from train.data.rows import IGNORED
from train.model.attention import compute_dtype
from train.model.stopwatch import Stopwatch

# The loss of one chunk of logits, whose gradient overwrites them: in eager operations, or in two compiled functions.
#
# Compiled, each logit of 16 bits costs 6 bytes of memory traffic: the first function reads it, the second reads it
# again and writes its gradient. In eager operations it costs 44: copies to float32 and back, and a pass each for
# maximum, difference, exponential, sum and product. Those reuse their memory, and need no compiler: they are for
# CPUs.
#
# Shape suffixes: n tokens of a chunk (m: those of them in use), V vocabulary (of this rank).

SumsFunction = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor, Tensor]]
GradientFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float | None], None]


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap · tanh(logits / cap), whose magnitude is below `cap`; without a cap, the logits.

    Source: Gemma Team 2024 (Gemma 2), arXiv 2408.00118, section 2.
    """
    return logits if cap is None else cap * torch.tanh(logits / cap)


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output matrix on this rank, where a tensor axis divides the vocabulary."""

    group: dist.ProcessGroup
    """Ranks over which the vocabulary is split."""
    first: int
    """Id of the first row on this rank."""


class PlainChunkLoss:
    """The loss of a chunk of logits in eager operations, in place as far as possible."""

    def __init__(self, logits_nV: Tensor, part: VocabularyPart | None, cap: float | None):
        """`part`: the rows of the output matrix on this rank; None = all rows. `cap`: bound of the logits."""
        self._logits_nV, self._part, self._cap = logits_nV, part, cap
        wide = torch.promote_types(logits_nV.dtype, torch.float32)
        self._wide_nV = logits_nV if logits_nV.dtype == wide else torch.empty_like(logits_nV, dtype=wide)
        self._slopes_nV = torch.empty_like(self._wide_nV) if cap is not None else None
        self._sums_m = self._own_m = self._columns_m1 = logits_nV.new_empty(0)

    def losses(self, targets_m: Tensor) -> tuple[Tensor, Tensor]:
        """Return cross-entropy and log Z of each token; overwrites the logits if they are float32."""
        row = slice(len(targets_m))
        powers_mV = self._wide_nV[row]
        if self._wide_nV is not self._logits_nV:
            powers_mV.copy_(self._logits_nV[row])
        if self._cap is not None and self._slopes_nV is not None:
            powers_mV.div_(self._cap).tanh_()
            torch.addcmul(powers_mV.new_ones(()), powers_mV, powers_mV, value=-1, out=self._slopes_nV[row])
            powers_mV.mul_(self._cap)
        columns_m, self._own_m = _target_columns(targets_m, powers_mV.shape[1], self._part)
        self._columns_m1 = columns_m[:, None]
        at_target_m = powers_mV.gather(1, self._columns_m1)[:, 0].masked_fill_(~self._own_m, 0.0)
        most_m = powers_mV.amax(1)
        if self._part is not None:
            dist.all_reduce(most_m, dist.ReduceOp.MAX, self._part.group)
        sums_m = powers_mV.sub_(most_m[:, None]).exp_().sum(1)
        self._sums_m, at_target_m = _sum_over_parts(sums_m, at_target_m, self._part)
        log_z_m = most_m + self._sums_m.log()
        return log_z_m - at_target_m, log_z_m

    def write_gradient(self, shares_m: Tensor, factors_m: Tensor) -> None:
        """Overwrite the logits with their gradient; call `losses` first."""
        row = slice(len(shares_m))
        powers_mV = self._wide_nV[row].mul_((shares_m / self._sums_m)[:, None])
        powers_mV.scatter_add_(1, self._columns_m1, -(factors_m * self._own_m)[:, None])
        if self._slopes_nV is not None:
            powers_mV.mul_(self._slopes_nV[row])
        if self._wide_nV is not self._logits_nV:
            self._logits_nV[row].copy_(powers_mV)


class FusedChunkLoss:
    """The loss of a chunk of logits in two compiled functions."""

    def __init__(self, logits_nV: Tensor, part: VocabularyPart | None, cap: float | None):
        """`part`: the rows of the output matrix on this rank; None = all rows. `cap`: bound of the logits."""
        self._logits_nV, self._part, self._cap = logits_nV, part, cap
        self._columns_n = self._log_z_n = logits_nV.new_empty(0)

    def losses(self, targets_m: Tensor) -> tuple[Tensor, Tensor]:
        """Return cross-entropy and log Z of each token; the logits do not change."""
        number, size = len(targets_m), len(self._logits_nV)
        # Always the whole chunk, to avoid recompilation.
        targets_n = F.pad(targets_m, (0, size - number), value=IGNORED) if number < size else targets_m
        columns_n, own_n = _target_columns(targets_n, self._logits_nV.shape[1], self._part)
        most_n, sums_n, at_target_n = compiled_functions()[0](self._logits_nV, columns_n, self._cap)
        at_target_n = at_target_n.masked_fill(~own_n, 0.0)
        if self._part is not None:
            whole_n = most_n.clone()
            dist.all_reduce(whole_n, dist.ReduceOp.MAX, self._part.group)
            sums_n, most_n = sums_n * (most_n - whole_n).exp(), whole_n
        sums_n, at_target_n = _sum_over_parts(sums_n, at_target_n, self._part)
        self._log_z_n, self._columns_n = most_n + sums_n.log(), columns_n.masked_fill(~own_n, -1)
        return (self._log_z_n - at_target_n)[:number], self._log_z_n[:number]

    def write_gradient(self, shares_m: Tensor, factors_m: Tensor) -> None:
        """Overwrite the logits with their gradient; call `losses` first."""
        padding = len(self._logits_nV) - len(shares_m)
        shares_n, factors_n = (F.pad(x, (0, padding)) if padding else x for x in (shares_m, factors_m))
        compiled_functions()[1](self._logits_nV, self._log_z_n, shares_n, self._columns_n, factors_n, self._cap)


def softmax_sums(logits_nV: Tensor, columns_n: Tensor, cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's largest logit, sum of exp(logit - largest), and logit in column `columns_n`, in float32.

    `cap`: bound of the logits, as in `capped`; None = no bound.
    """
    wide_nV = capped(logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32)), cap)
    # With the dim kept, torch's compiler recognizes a softmax, and fuses both into one pass on a GPU.
    most_n1 = wide_nV.amax(1, keepdim=True)
    sums_n1 = (wide_nV - most_n1).exp().sum(1, keepdim=True)
    # The column of the stored logits, so that the compiler need not keep the wide ones.
    at_column_n1 = capped(logits_nV.gather(1, columns_n[:, None]).to(wide_nV.dtype), cap)
    return most_n1.squeeze(1), sums_n1.squeeze(1), at_column_n1.squeeze(1)


def write_gradient(
    logits_nV: Tensor, log_z_n: Tensor, shares_n: Tensor, columns_n: Tensor, factors_n: Tensor, cap: float | None
) -> None:
    """Overwrite the logits with their gradient: exp(logit − log Z) · share, minus the factor in column `columns_n`.

    `columns_n`: column of each token's target; −1 = no column on this rank. `cap`: bound of the logits, as in `capped`.
    """
    columns_V = torch.arange(logits_nV.shape[1], device=logits_nV.device)
    at_target_nV = torch.where(columns_V == columns_n[:, None], factors_n[:, None], 0.0)
    bounded_nV = capped(logits_nV.to(log_z_n.dtype), cap)
    gradient_nV = (bounded_nV - log_z_n[:, None]).exp() * shares_n[:, None] - at_target_nV
    # The derivative of cap · tanh(z / cap) is 1 - tanh².
    logits_nV.copy_(gradient_nV if cap is None else gradient_nV * (1 - (bounded_nV / cap).square()))


@cache
def compiled_functions() -> tuple[SumsFunction, GradientFunction]:
    """Return `softmax_sums` and `write_gradient` as functions that torch.compile compiles for each shape of chunk."""
    return torch.compile(softmax_sums, dynamic=False), torch.compile(write_gradient, dynamic=False)


def _sum_over_parts(sums_n: Tensor, at_target_n: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    if part is None:
        return sums_n, at_target_n
    both_2n = torch.stack((sums_n, at_target_n))
    dist.all_reduce(both_2n, group=part.group)
    return both_2n[0], both_2n[1]


def _target_columns(targets_n: Tensor, num_here: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Return each target's column in this rank's logits, and a mask: True if this rank has the column.

    The column is 0 where the mask is False.
    """
    columns_n = targets_n - (part.first if part else 0)
    own_n = (columns_n >= 0) & (columns_n < num_here)
    return columns_n.masked_fill(~own_n, 0), own_n


MAX_GROUPS = 64
"""Maximum number of rows in a one-hot matrix of groups and positions."""


@dataclass
class LossTally:
    """Sums of losses and numbers of targets on this rank, by source or another group, in float64."""

    losses_S: Tensor
    """Sum of cross-entropies [nats]."""
    counts_S: Tensor
    """Number of targets."""
    right_S: Tensor | None = None
    """Number of targets that have the largest logit, counted for groups of whole rows; None = not counted."""
    figures_F: Tensor | None = None
    """Sums of the figures of a model of the user; None = it has none."""

    @classmethod
    def empty(cls, num_sources: int, device: torch.device, counts_right: bool = False) -> Self:
        """Return a tally with all sums 0. `counts_right`: the targets with the largest logit are counted too."""
        zeros = torch.zeros(3, num_sources, dtype=torch.float64, device=device)
        return cls(zeros[0], zeros[1], zeros[2] if counts_right else None)

    def add(self, losses_BT: Tensor, targets_BT: Tensor, groups: Tensor, right_BT: Tensor | None = None) -> None:
        """Add the losses and targets of rows; a loss must be 0 where its target is IGNORED.

        `groups`: source or other group of each row (B,), or of each position (B, T). `right_BT`: whether a target has
        the largest logit.
        """
        counts_BT = (targets_BT != IGNORED).double()
        if groups.dim() == 2:
            self._add_positions(losses_BT.double().flatten(), counts_BT.flatten(), groups.flatten())
            return
        # A product with a one-hot matrix and not index_add_, whose order is undefined on CUDA.
        chosen_SB = (torch.arange(len(self.losses_S), device=groups.device)[:, None] == groups).double()
        self.losses_S += chosen_SB @ losses_BT.double().sum(1)
        self.counts_S += chosen_SB @ counts_BT.sum(1)
        if self.right_S is not None and right_BT is not None:
            self.right_S += chosen_SB @ right_BT.double().sum(1)

    def _add_positions(self, losses_N: Tensor, counts_N: Tensor, groups_N: Tensor) -> None:
        if not losses_N.is_cuda:
            self.losses_S.index_add_(0, groups_N, losses_N)
            self.counts_S.index_add_(0, groups_N, counts_N)
            return
        # A few groups at a time keep the one-hot matrix small.
        for groups_G in torch.unique(groups_N).split(MAX_GROUPS):
            chosen_GN = (groups_G[:, None] == groups_N).double()
            self.losses_S[groups_G] += chosen_GN @ losses_N
            self.counts_S[groups_G] += chosen_GN @ counts_N


class HeadLoss:
    """The output projection and the loss. Set `scale`, and optionally `tally` and `num_targets`, before use."""

    def __init__(
        self,
        z_loss: float = 0.0,
        chunk_tokens: int = 4096,
        part: VocabularyPart | None = None,
        fused: bool = False,
        multiple: int = 1,
        softcap: float | None = None,
    ):
        """`part`: the rows of the output matrix on this rank; None = all rows. `fused`: compute the loss in compiled
        functions. `multiple`: pad the columns of the logits to a multiple of this number. `softcap`: bound of the
        logits; None = no bound.
        """
        self.z_loss, self.chunk_tokens, self.part = z_loss, chunk_tokens, part
        self.fused, self.multiple, self.softcap = fused, multiple, softcap
        self.scale: float | Tensor = 1.0
        self.tally: LossTally | None = None
        self.num_targets: int | None = None
        """Number of targets in the next call that are not IGNORED; None = a CPU counts them, CUDA computes every
        row."""
        self.stopwatch: Stopwatch | None = None
        """Measures the loss of training steps, unless its vocabulary is split over ranks; None = no measurement."""

    def __call__(
        self,
        x_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        sources_B: Tensor | None,
        bias_V: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of (cross-entropy + z_loss · log² Z) · scale, 0-d.

        `x_BTD`, `weight_VD` and `bias_V` get gradients.
        """
        # Inside of `forward` gradients are always disabled, so whether one is required is determined here.
        needs_gradient = torch.is_grad_enabled() and (x_BTD.requires_grad or weight_VD.requires_grad)
        rows = (x_BTD.flatten(0, 1), weight_VD, bias_V, targets_BT.flatten())
        total: Tensor
        timed = self.stopwatch is not None and self.part is None and needs_gradient
        with self.stopwatch.running() if self.stopwatch is not None and timed else nullcontext():
            total, losses_N, right_N = _ChunkedLoss.apply(*rows, (self, needs_gradient))  # type: ignore[no-untyped-call]
        if self.tally is not None and sources_B is not None:
            right_BT = None if right_N is None else right_N.view_as(targets_BT)
            self.tally.add(losses_N.view_as(targets_BT), targets_BT, sources_B, right_BT)
        return total

    @property
    def counts_right(self) -> bool:
        """True if the targets with the largest logit are counted."""
        return self.tally is not None and self.tally.right_S is not None


class _ChunkedLoss(torch.autograd.Function):
    """The total loss, which has a gradient, and two values of each token, which have none.

    They are its cross-entropy, and whether it has the largest logit; None if that is not counted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: tuple["HeadLoss", bool],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        head, needs_gradient = settings
        indices_n, number = _counted_targets(targets_N, head.num_targets), len(x_ND)
        if indices_n is not None:
            x_ND, targets_N = x_ND[indices_n], targets_N[indices_n]
        # Compiled chunks keep their size for any number of targets in a batch.
        size = min(head.chunk_tokens, number if head.fused else len(x_ND))
        right_n = torch.zeros_like(targets_N, dtype=torch.bool) if head.counts_right else None
        chunks = ChunkSettings(head, size, right_n)
        total, losses_n, gradients = _chunked_loss(x_ND, weight_VD, bias_V, targets_N, chunks, needs_gradient)
        if gradients is not None:
            saved = [_scatter_rows(gradients[0], indices_n, number), gradients[1].to(weight_VD.dtype)]
            saved += [] if bias_V is None else [gradients[2].to(bias_V.dtype)]
            ctx.save_for_backward(*saved)
        losses_N = _scatter_rows(losses_n, indices_n, number)
        right_N = None if right_n is None else _scatter_rows(right_n, indices_n, number)
        ctx.mark_non_differentiable(*(losses_N,) if right_N is None else (losses_N, right_N))
        return total, losses_N, right_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the residual stream, of the output matrix and of its bias."""
        scaled = [saved * gradients[0].to(saved.dtype) for saved in ctx.saved_tensors]
        gradient_ND, gradient_VD, gradient_V = scaled if len(scaled) == 3 else (*scaled, None)
        return gradient_ND, gradient_VD, gradient_V, None, None


def _counted_targets(targets_N: Tensor, number: int | None) -> Tensor | None:
    """Return the indices of the targets that are not IGNORED; None = compute the losses of all positions.

    `number`: number of targets that are not IGNORED; None = unknown.
    """
    # Masked language models ignore five of six targets. Counting the others on a CUDA device requires a
    # synchronization.
    if number is None and not targets_N.is_cuda:
        number = int((targets_N != IGNORED).sum())
    if number is None or number == len(targets_N):
        return None
    return torch.nonzero_static(targets_N != IGNORED, size=number)[:, 0]


def _scatter_rows(rows: Tensor, indices_n: Tensor | None, number: int) -> Tensor:
    """Return `number` rows: `rows` at `indices_n`, zeros elsewhere. Without `indices_n`, return `rows`."""
    return rows if indices_n is None else rows.new_zeros(number, *rows.shape[1:]).index_copy_(0, indices_n, rows)


class ChunkSettings(NamedTuple):
    """How the loss is computed chunk by chunk."""

    head: HeadLoss
    size: int
    """Tokens of a chunk."""
    right_N: Tensor | None
    """Is set to whether each target has the largest logit; None = this is not computed."""


def write_right(right_n: Tensor, logits_nV: Tensor, targets_n: Tensor, part: VocabularyPart | None) -> None:
    """Set `right_n` to whether each target has the largest logit of all ranks; the lowest id wins a tie.

    IGNORED targets never have it.
    """
    # A pass of its own over the logits, so that the loss has the same bits with and without it. Comparing the logit of
    # the target with the maximum that the loss computes would count ties, which are frequent in bf16.
    most_n, columns_n = logits_nV.max(1)
    ids_n = columns_n + (part.first if part else 0)
    if part is not None:
        whole_n = most_n.clone()
        dist.all_reduce(whole_n, dist.ReduceOp.MAX, part.group)
        ids_n = torch.where(most_n == whole_n, ids_n, torch.iinfo(ids_n.dtype).max)
        dist.all_reduce(ids_n, dist.ReduceOp.MIN, part.group)
    torch.eq(ids_n, targets_n, out=right_n)


def _chunked_loss(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    settings: ChunkSettings,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Return the total loss, the cross-entropy of each token, and the gradients of the total loss.

    The gradients are those of `x_ND`, `weight_VD` and `bias_V`; None without `needs_gradient`.
    """
    head, size, right_N = settings
    dtype = compute_dtype(x_ND)
    wide = torch.promote_types(dtype, torch.float32)
    matrix_PD, x_ND = _pad_to_multiple(weight_VD.to(dtype), head.multiple), x_ND.to(dtype)
    total, losses_N = x_ND.new_zeros((), dtype=wide), x_ND.new_zeros(len(x_ND), dtype=wide)
    gradient_ND = torch.empty_like(x_ND) if needs_gradient else None
    gradient_PD = torch.zeros_like(matrix_PD, dtype=wide) if needs_gradient else None
    gradient_V = x_ND.new_zeros(len(weight_VD), dtype=wide)
    # Every chunk reuses the same memory: new pages for each made the loss a third slower (4 MB and more, one core).
    logits_nP = x_ND.new_empty(size, len(matrix_PD))
    chunk = (FusedChunkLoss if head.fused else PlainChunkLoss)(logits_nP[:, : len(weight_VD)], head.part, head.softcap)
    for start in range(0, len(x_ND), max(size, 1)):
        part = slice(start, min(start + size, len(x_ND)))
        gradient_nP = logits_nP[: part.stop - start]
        torch.mm(x_ND[part], matrix_PD.T, out=gradient_nP)
        if bias_V is not None:
            gradient_nP[:, : len(bias_V)] += bias_V.to(dtype)
        if right_N is not None:
            write_right(right_N[part], gradient_nP[:, : len(weight_VD)], targets_N[part], head.part)
        counts_n = targets_N[part] != IGNORED
        factors_n = counts_n.to(wide) * head.scale
        losses_n, log_z_n = chunk.losses(targets_N[part])
        losses_N[part] = losses_n.masked_fill_(~counts_n, 0.0)
        total += (losses_n * factors_n).sum()
        if head.z_loss:
            total += (head.z_loss * log_z_n.square() * factors_n).sum()
        if gradient_ND is not None and gradient_PD is not None:
            # A clone: torch would recompile for the same tensor passed twice.
            shares_n = factors_n * (1 + 2 * head.z_loss * log_z_n) if head.z_loss else factors_n.clone()
            chunk.write_gradient(shares_n, factors_n)
            if bias_V is not None:
                gradient_V += gradient_nP[:, : len(bias_V)].sum(0, dtype=wide)
            torch.mm(gradient_nP, matrix_PD, out=gradient_ND[part])
            if dtype == wide:
                gradient_PD.addmm_(gradient_nP.T, x_ND[part])
            else:
                gradient_PD += gradient_nP.T @ x_ND[part]
    if gradient_ND is None or gradient_PD is None:
        return total, losses_N, None
    return total, losses_N, (gradient_ND, gradient_PD[: len(weight_VD)], gradient_V)


def _pad_to_multiple(matrix_VD: Tensor, multiple: int) -> Tensor:
    """Return the matrix, with zero rows appended if its number of rows is not a multiple of `multiple`."""
    padding = -len(matrix_VD) % multiple
    return F.pad(matrix_VD, (0, 0, 0, padding)) if padding else matrix_VD
