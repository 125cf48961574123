"""Sums over all ranks while training continues, in a number of hops that grows with the logarithm of the ranks.

gloo's all-reduce is a ring, whose hops grow with the number of ranks. Here a rank exchanges its partial sums with one
partner per round, at distances 1, 2, 4, …, so the first rounds stay within a node. Source: Thakur et al. 2005,
"Optimization of collective communication operations in MPICH", section 4.5 (recursive doubling).
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist

TAG = 1
"""Tag of the messages of sums, which no other message of their process group has."""


@dataclass(frozen=True)
class SumRoute:
    """The ranks with which a rank exchanges partial sums, in order."""

    folds_into: int | None
    """The rank that adds this rank's values to its own and returns the result; None = this rank takes part itself."""
    folded: int | None
    """The rank whose values this rank adds to its own at first; None = none."""
    partners: tuple[int, ...]
    """The partner of each round."""

    @property
    def hops(self) -> int:
        """Messages that one after another pass before this rank has the sum."""
        return 2 if self.folds_into is not None else len(self.partners) + (self.folded is not None)


def sum_route(rank: int, world_size: int) -> SumRoute:
    """Return the route of a rank. Ranks beyond the largest power of two fold into ranks below it."""
    rounds = world_size.bit_length() - 1
    inner = 1 << rounds
    if rank >= inner:
        return SumRoute(rank - inner, None, ())
    folded = rank + inner if rank + inner < world_size else None
    return SumRoute(None, folded, tuple(rank ^ 1 << number for number in range(rounds)))


def num_hops(world_size: int) -> int:
    """Return the messages that one after another pass before the last rank has the sum."""
    rounds = world_size.bit_length() - 1
    return rounds if world_size == 1 << rounds else rounds + 2


class RunningSum:
    """A sum that a thread computes; `wait` returns when it is complete."""

    def __init__(self, sums: torch.Tensor):
        """`sums`: the values of this rank, which are replaced by the sums of all ranks."""
        self.sums = sums
        self._completed, self._error = threading.Event(), list[BaseException]()

    def complete(self, error: BaseException | None = None) -> None:
        """Record that the sum is complete, or the error that ended it."""
        self._error += [error] if error else []
        self._completed.set()

    def wait(self) -> None:
        """Wait for the sums. Raises the error of the exchange, for instance if another rank has died."""
        self._completed.wait()
        if self._error:
            raise self._error[0]


class SumThread:
    """A thread that sums values over all ranks of a group, one sum after another, in the order of their starts."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int):
        self._group, self._route = group, sum_route(rank, world_size)
        self._queue: SimpleQueue[RunningSum | None] = SimpleQueue()
        # A daemon: if another rank has failed, the thread may wait for it when this process ends.
        threading.Thread(target=self._work, name="sums", daemon=True).start()

    def start(self, values: torch.Tensor) -> RunningSum:
        """Start to sum a 1-D tensor of the CPU over all ranks."""
        running = RunningSum(values)
        self._queue.put(running)
        return running

    def end(self) -> None:
        """End the thread after the sums that have started, without waiting for them."""
        self._queue.put(None)

    def _work(self) -> None:
        while (running := self._queue.get()) is not None:
            try:
                self._sum(running.sums)
            except Exception as error:
                running.complete(error)
            else:
                running.complete()

    def _sum(self, sums: torch.Tensor) -> None:
        route = self._route
        if route.folds_into is not None:
            self._send(sums, route.folds_into)
            sums.copy_(self._receive(sums, route.folds_into))
            return
        if route.folded is not None:
            sums += self._receive(sums, route.folded)
        for theirs in self._exchanges(sums):
            # Both partners add the same two numbers, so every rank has the same bits.
            sums += theirs
        if route.folded is not None:
            self._send(sums, route.folded)

    def _exchanges(self, sums: torch.Tensor) -> Iterator[torch.Tensor]:
        for partner in self._route.partners:
            mine = sums.clone()
            sent = dist.isend(mine, group=self._group, group_dst=partner, tag=TAG)
            yield self._receive(sums, partner)
            if sent is not None:
                sent.wait()

    def _send(self, values: torch.Tensor, rank: int) -> None:
        dist.send(values.clone(), group=self._group, group_dst=rank, tag=TAG)

    def _receive(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        values = torch.empty_like(like)
        dist.recv(values, group=self._group, group_src=rank, tag=TAG)
        return values
