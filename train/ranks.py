"""The ranks of a run: process group and device, words between ranks, and how a run is stopped from outside.

One process is a group of one and runs the same code.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist

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
    device: torch.device
    """Device of this rank."""
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
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.control)
        return sums.tolist()


def agreed_start(store: Any, rank: int, world_size: int) -> str:
    """A name that all ranks of this start have agreed on, and none of a start before.

    torchrun keeps one store over its restarts, so a rank may find there what a dead one has left: the address where it
    listened, to which gloo then tries to connect until it gives up (seen in torch 2.13). So rank 0 calls under a new
    name, the others answer with one of their own, and a call counts once it has confirmed that very answer.
    """
    own = uuid4().hex
    if rank == 0:
        store.set("start", own)
        for other in range(1, world_size):
            store.set(f"{own}/confirmed/{other}", store.get(f"{own}/answer/{other}"))
        return own
    call = ""
    while not store.check([f"{call}/confirmed/{rank}"]) or store.get(f"{call}/confirmed/{rank}").decode() != own:
        latest = store.get("start").decode()
        if latest != call:
            call = latest
            store.set(f"{call}/answer/{rank}", own)
        time.sleep(0.01)
    return call


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """The ranks torchrun started, or this process alone. A device of its own for each rank of a machine, else CPUs."""
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    if dist.is_torchelastic_launched():
        store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        store = dist.PrefixStore(agreed_start(store, rank, world_size), store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
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
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        yield Ranks(dist.get_rank(), dist.get_world_size(), local_size, device, control)
    finally:
        dist.destroy_process_group()


def default_threads(ranks: Ranks) -> int:
    """CPU threads for one rank: the cores this process may use, shared by the ranks of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks.local_size)


class Interruption:
    """Notes the first SIGINT or SIGTERM so that the step can be finished; a SIGINT behind it acts as it always did.

    A SIGTERM behind a SIGTERM does nothing: a scheduler that signals the whole job reaches a rank twice, by itself and
    by torchrun, and the second would kill it in its last save. SIGKILL is for whoever cannot wait.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> tuple[bool, bool]:
        """Whether this process was asked to stop by SIGTERM, and by SIGINT."""
        return self.signal == signal.SIGTERM, self.signal == signal.SIGINT

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
