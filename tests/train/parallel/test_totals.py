"""Sums over ranks: the right sum on every rank, in hops that grow with the logarithm of the number of ranks."""

import math
import threading

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_pool import RankFailed, shared_pool
from train.parallel.totals import num_hops, sum_route


def played(world_size: int) -> tuple[list[int], int]:
    """Return the sum that each rank has after the messages of all routes, and the longest chain of messages."""
    routes = [sum_route(rank, world_size) for rank in range(world_size)]
    sums, waited = [3 * rank + 1 for rank in range(world_size)], [0] * world_size
    for rank, route in enumerate(routes):
        if route.folds_into is not None:
            assert routes[route.folds_into].folded == rank
            sums[route.folds_into] += sums[rank]
            waited[route.folds_into] = 1
    inner = [rank for rank, route in enumerate(routes) if route.folds_into is None]
    for number in range(len(routes[0].partners)):
        partners = {rank: routes[rank].partners[number] for rank in inner}
        assert all(partners[partner] == rank for rank, partner in partners.items())
        sums[: len(inner)] = [sums[rank] + sums[partners[rank]] for rank in inner]
        waited[: len(inner)] = [1 + max(waited[rank], waited[partners[rank]]) for rank in inner]
    for rank, route in enumerate(routes):
        if route.folds_into is not None:
            sums[rank], waited[rank] = sums[route.folds_into], waited[route.folds_into] + 1
    return sums, max(waited)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8, 12, 64, 100, 1000, 1024])
def test_every_rank_gets_the_sum_in_few_hops(world_size: int) -> None:
    sums, hops = played(world_size)
    assert sums == [sum(3 * rank + 1 for rank in range(world_size))] * world_size
    assert hops == num_hops(world_size) <= math.log2(world_size) + 2


def test_a_ring_has_two_hundred_times_as_many_hops() -> None:
    assert (num_hops(1000), 2 * (1000 - 1)) == (11, 1998)


def test_the_first_rounds_stay_within_a_node_of_eight() -> None:
    for rank in range(64):
        assert [partner // 8 == rank // 8 for partner in sum_route(rank, 64).partners] == [True] * 3 + [False] * 3


def summed(ranks, number: int) -> tuple[list[list[float]], list[float]]:
    """Return sums that were started together, and the first of them by an all-reduce."""
    started = [ranks.start_total(ranks.rank, 2.0**step, 0.1) for step in range(number)]
    reference = torch.tensor([ranks.rank, 1.0, 0.1], dtype=torch.float64)
    dist.all_reduce(reference, group=ranks.control)  # while the sums run, on the same group
    return [total.wait() for total in started], reference.tolist()


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_sums_that_run_together_are_those_of_an_all_reduce(world_size: int) -> None:
    everywhere = shared_pool().play(world_size, summed, 5)
    for sums, reference in everywhere:
        assert [total[0] for total in sums] == [reference[0]] * 5
        assert [total[1] for total in sums] == [world_size * 2.0**step for step in range(5)]
        assert sums[0][2] == pytest.approx(reference[2], rel=1e-15)
    assert all(sums == everywhere[0][0] for sums, _ in everywhere), "ranks have other bits"


def threads_after_the_end(ranks) -> bool:
    """Return True if the thread of sums ends."""
    ranks.total(1.0)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "sums" and thread.is_alive())
    ranks.end_sums()
    thread.join(30)
    return not thread.is_alive()


@pytest.mark.dist
def test_the_thread_of_sums_ends_with_the_ranks() -> None:
    assert shared_pool().play(2, threads_after_the_end) == [True, True]


def failing(ranks) -> None:
    """End the last rank before its sum; the others wait for it."""
    if ranks.rank == ranks.world_size - 1:
        raise ValueError("this rank has failed")
    ranks.total(1.0)


@pytest.mark.dist
def test_a_rank_that_fails_ends_the_wait_of_its_partner() -> None:
    with pytest.raises(RankFailed, match="this rank has failed"):
        shared_pool().play(2, failing)
