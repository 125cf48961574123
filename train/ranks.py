"""The ranks of a run: process group and mesh, words between ranks, and how a run is stopped from outside.

One process is a group of one and runs the same code.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schemas.errors import PenstockError

T = TypeVar("T")

# Rank 0 hashes the whole dataset while the others wait for its word. A rank that dies is noticed at once all the same,
# by its closed connections and by torchrun.
CONTROL_TIMEOUT = timedelta(hours=24)


class FirstRankFailed(PenstockError):
    """What the other ranks raise when rank 0 has failed; rank 0 itself tells the user why."""


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together."""

    rank: int
    world_size: int
    local_size: int
    """Number of ranks on this machine."""
    mesh: DeviceMesh
    device: torch.device
    """Device of this rank, of the mesh's type."""
    control: dist.ProcessGroup
    """Group on the CPU for words rather than numbers."""

    def on_first(self, function: Callable[[], T]) -> T:
        """The result of `function()`, called on rank 0 alone. Raises on every rank if it raised there."""
        cause: Exception | None = None
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer = [function(), None]
            except Exception as error:
                cause, answer = error, [None, str(error)]
        dist.broadcast_object_list(answer, src=0, group=self.control)
        if cause is not None:
            raise cause
        if answer[1] is not None:
            raise FirstRankFailed(answer[1])
        return cast(T, answer[0])

    def refuse(self, error: PenstockError) -> NoReturn:
        """Raise an error that every rank has found on its own, so that the user reads it once."""
        raise error if self.rank == 0 else FirstRankFailed(str(error))

    def total(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64, the same on every rank."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """The ranks torchrun started, or this process alone. A device of its own for each rank of a machine, else CPUs."""
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname(), group=control)
        local_size = max(hosts.count(host) for host in hosts)
        kind = "cuda" if nccl and torch.cuda.device_count() >= local_size else "cpu"
        if kind == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        yield Ranks(dist.get_rank(), dist.get_world_size(), local_size, mesh, device, control)
    finally:
        dist.destroy_process_group()


def default_threads(ranks: Ranks) -> int:
    """CPU threads for one rank: the cores this process may use, shared by the ranks of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks.local_size)


class Interruption:
    """Notes the first SIGINT or SIGTERM so that the step can be finished; the next one acts as it always did."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
