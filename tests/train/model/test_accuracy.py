"""Token accuracy: counted as by argmax, in every form of the loss, without a change of the loss's bits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.rank_pool import shared_pool
from train.data.rows import IGNORED
from train.model.loss import HeadLoss, LossTally, VocabularyPart

ROWS, LENGTH, WIDTH, VOCAB = 4, 11, 6, 29


def a_case(dtype: torch.dtype, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Return a stream, a matrix of small whole numbers, so that largest logits are often equal, and targets."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(-1, 2, (ROWS, LENGTH, WIDTH), generator=draw).to(dtype)
    weight = torch.randint(-1, 2, (VOCAB, WIDTH), generator=draw).to(dtype)
    best = (x.float() @ weight.float().T).argmax(-1)
    targets = torch.where(torch.rand(ROWS, LENGTH, generator=draw) < 0.5, best, (best + 1) % VOCAB)
    targets[torch.rand(ROWS, LENGTH, generator=draw) < ignored] = IGNORED
    return x, weight, targets


def measured(head: HeadLoss, case: tuple[Tensor, ...], counts_right: bool) -> tuple[LossTally, tuple[Tensor, ...]]:
    """Return the tally by row, and total, losses and gradients."""
    x, weight = (value.detach().clone().requires_grad_() for value in case[:2])
    head.tally = LossTally.empty(ROWS, x.device, counts_right)
    total = head(x, weight, case[2], torch.arange(ROWS))
    return head.tally, (total.detach(), head.tally.losses_S, *torch.autograd.grad(total, (x, weight)))


@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_right_targets_are_those_of_argmax_and_the_loss_keeps_its_bits(
    dtype: torch.dtype, fused: bool, ignored: float
) -> None:
    case = a_case(dtype, ignored)
    settings: dict[str, Any] = {"z_loss": 0.1, "chunk_tokens": 12, "fused": fused, "multiple": 16}
    tally, values = measured(HeadLoss(**settings), case, True)
    expected = ((case[0].float() @ case[1].float().T).argmax(-1) == case[2]).sum(1)
    assert tally.right_S is not None
    assert tally.right_S.tolist() == expected.tolist()
    assert (0 < expected.sum() < tally.counts_S.sum()) or ignored == 1.0
    plain, without = measured(HeadLoss(**settings), case, False)
    assert plain.right_S is None
    assert [torch.equal(a, b) for a, b in zip(values, without, strict=True)] == [True] * 4


def test_a_model_without_an_opinion_predicts_the_lowest_id() -> None:
    # All logits are 0: a comparison of the target's logit with the largest one would count every target.
    targets = torch.tensor([[0, 1, 0, 5], [IGNORED, 28, 28, 28]])
    head = HeadLoss()
    head.tally = LossTally.empty(2, targets.device, counts_right=True)
    head(torch.ones(2, 4, WIDTH), torch.zeros(VOCAB, WIDTH), targets, torch.arange(2))
    assert head.tally.right_S is not None
    assert head.tally.right_S.tolist() == [2.0, 0.0]


def right_of_a_part(ranks: Any, largest: int) -> list[float]:
    """Return the right targets of each row on a rank that has some rows of the matrix."""
    x, weight, targets = a_case(torch.float32)
    mine = slice(largest * ranks.rank, largest * (ranks.rank + 1))
    head = HeadLoss(chunk_tokens=7, part=VocabularyPart(dist.group.WORLD, mine.start))
    return measured(head, (x, weight[mine], targets), True)[0].right_S.tolist()  # type: ignore[union-attr]


@pytest.mark.dist
def test_a_vocabulary_over_ranks_counts_the_same() -> None:
    expected = measured(HeadLoss(), a_case(torch.float32), True)[0].right_S
    assert expected is not None
    for largest in (15, 20):
        assert shared_pool().play(2, right_of_a_part, largest) == [expected.tolist()] * 2
