"""The loss of a chunk of logits, and its slopes in their place: by single operations, or by two compiled functions.

Compiled, each logit of 16 bits costs 6 bytes of memory traffic: the first function reads it, the second reads it again
and writes its slope. In single operations it costs 44: copies to float32 and back, and a pass each for maximum,
difference, exponential, sum and product. Those reuse their memory, and need no compiler: they are for CPUs.

Shape suffixes: n tokens of a chunk (m: those of them in use), V vocabulary (of this rank).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from train.data.rows import IGNORED

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
