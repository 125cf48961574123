"""Rows and sums one step ahead: targets of all ranks, signals, read errors, and dropped requests."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.rank_pool import shared_pool
from train.data.batches import Prefetch
from train.data.rows import IGNORED, Rows
from train.pretrain.step import Feed

STOP = 10


def rows_of(step: int, num_targets: int) -> Rows:
    """Return a row of eight positions, of which `targets` are predicted."""
    targets = torch.full((1, 8), IGNORED)
    targets[0, :num_targets] = step
    return Rows(torch.full((1, 8), step), targets, None, torch.zeros(1, dtype=torch.int64))


def fed(ranks: Any, script: list[tuple[str, int]], counts: bool = True, signal_before: int = -1) -> list[Any]:
    """Return the results of a feed on this rank for a script of (send, take or drop, step).

    Rank 0 receives a stop signal before it requests `signal_before`; reading step 7 fails on the last rank.
    """
    signals = [False]

    def read(step: int) -> Rows:
        if step == 7 and ranks.rank == ranks.world_size - 1:
            raise OSError("step 7 is lost")
        return rows_of(step, 1 + ranks.rank + step % 2)

    actual: list[Any] = []
    with ExitStack() as stack:
        rows = Prefetch(read, STOP)
        feed = stack.enter_context(Feed(rows, ranks, counts or ranks.rank == 0, lambda: (signals[0], False)))
        for word, step in script:
            signals[0] = signals[0] or (step == signal_before and ranks.rank == 0)
            if word == "send":
                feed.request(step)
            elif word == "drop":
                feed.drop()
            else:
                try:
                    got = feed.take(step)
                    actual.append((int(got.rows.inputs_BT[0, 0]), got.num_targets, got.by_sigterm, got.by_sigint))
                except OSError as error:
                    actual.append(str(error))
        # A group whose ranks are out of step would sum something else here, or wait for ever.
        actual.append(ranks.total(1.0))
    return actual


AHEAD = [("take", 0), ("send", 1), ("take", 1), ("send", 2), ("take", 2)]


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_has_the_targets_of_all(world_size: int) -> None:
    everywhere = shared_pool().play(world_size, fed, AHEAD)
    sums = [sum(1 + rank + step % 2 for rank in range(world_size)) for step in range(3)]
    assert everywhere == [[*((step, sums[step], False, False) for step in range(3)), [world_size]]] * world_size


@pytest.mark.dist
def test_a_rank_that_reads_the_same_rows_as_another_counts_no_targets() -> None:
    everywhere = shared_pool().play(2, fed, AHEAD, False)
    assert [actual[1] for actual in everywhere[0][:3]] == [1, 2, 1]
    assert everywhere[0] == everywhere[1]


@pytest.mark.dist
def test_a_signal_reaches_all_ranks_with_the_next_request() -> None:
    everywhere = shared_pool().play(2, fed, [*AHEAD, ("send", 3), ("take", 3)], True, 2)
    assert [actual[2] for actual in everywhere[0][:4]] == [False, False, True, True]
    assert everywhere[0] == everywhere[1]


@pytest.mark.dist
def test_what_a_rewind_drops_leaves_ranks_in_step() -> None:
    """After a request for step 5, step 2 gets its own rows and sums; so does a step that was not requested."""
    script = [("take", 4), ("send", 5), ("drop", 0), ("take", 2), ("send", 3), ("take", 8)]
    everywhere = shared_pool().play(2, fed, script)
    assert [actual[:2] for actual in everywhere[0][:3]] == [(4, 3), (2, 3), (8, 3)]
    assert everywhere[0] == everywhere[1]


@pytest.mark.dist
def test_an_error_of_reading_is_raised_by_its_own_step_with_ranks_in_step() -> None:
    first, last = shared_pool().play(2, fed, [("take", 6), ("send", 7), ("take", 7)])
    assert first == [(6, 3, False, False), (7, 2, False, False), [2]]
    assert last == [(6, 3, False, False), "step 7 is lost", [2]]
