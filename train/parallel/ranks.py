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

from schemas.errors import ConfigError, PenstockError

# The device of a rank: which one it trains on, and how its memory is allocated.

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that torch 2.11 to 2.13 read the settings of the CUDA allocator from, the newest name first."""


def device_of(cuda: bool, num_devices: int, local_rank: int, local_size: int) -> torch.device:
    """The device of rank `local_rank` (0 = first) of the `local_size` ranks of a machine: a GPU each, or the CPU.

    `cuda`: whether GPUs can be used at all. Raises ConfigError if there are fewer of them than ranks.
    """
    if not cuda:
        return torch.device("cpu")
    if local_size > num_devices:
        raise ConfigError(
            f"ranks: expected at most {num_devices} rank(s) on this machine, one for each GPU, got {local_size}. Start "
            f'fewer (`penstock train --ranks {num_devices}`), or set CUDA_VISIBLE_DEVICES="" to train on CPUs.'
        )
    return torch.device("cuda", local_rank)


def select_device(local_rank: int, local_size: int) -> torch.device:
    """`device_of` on this machine; a GPU becomes the current device of this process."""
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    device = device_of(cuda, torch.cuda.device_count(), local_rank, local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Backend of the process groups of ranks on such devices; tensors on the CPU always have one."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def torchrun_placement() -> tuple[int, int] | None:
    """The number of this rank among those of its machine, and how many they are; None = torchrun has not set them."""
    local_rank, local_size = (os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None if local_rank is None or local_size is None else (int(local_rank), int(local_size))


def use_expandable_segments() -> None:
    """Let the CUDA allocator grow its segments, unless the user has set how it allocates; call before CUDA starts.

    Chunks of logits of some 0.5 GB come and go beside weights that stay, so segments of fixed size fragment. Torch
    reads the variable when it first needs it, which is after its import (seen in the CUDA build of 2.11).
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


T = TypeVar("T")

# Rank 0 hashes the whole dataset while the others wait for its word. A rank that dies is noticed at once all the same,
# by its closed connections and by torchrun.
CONTROL_TIMEOUT = timedelta(hours=24)


class FirstRankFailed(PenstockError):
    """What the other ranks raise when rank 0, or the first of a machine, has failed; that one reports the reason."""


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
        return self.start_total(*values).wait()

    def start_total(self, *values: float) -> "Total":
        """The same sum, sent but not waited for; every rank starts its sums in the same order."""
        sums = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return PendingSum(sums, None)
        return PendingSum(sums, dist.all_reduce(sums, group=self.control, async_op=True))


class PendingSum:
    """A sum over all ranks on its way."""

    def __init__(self, sums: torch.Tensor, work: Any):
        """`work`: what is to be waited for; None = nothing, the sums are known."""
        self._sums, self._work = sums, work

    def wait(self) -> list[float]:
        """The sums, once every rank has sent its values."""
        if self._work is not None:
            self._work.wait()
        return self._sums.tolist()


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


def machine_placement(store: Any, rank: int, world_size: int) -> tuple[int, int]:
    """The number of this rank among those of its machine, and how many they are.

    As torchrun has set it: containers may share a hostname, or have several on one machine. Else ranks with one
    hostname count as those of one machine.
    """
    if (place := torchrun_placement()) is not None:
        return place
    store.set(f"host/{rank}", socket.gethostname())
    hosts = [store.get(f"host/{other}").decode() for other in range(world_size)]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """The ranks torchrun started, or this process alone: a GPU for each rank of a machine, or CPUs where none is.

    Raises ConfigError on the first rank of a machine that has fewer GPUs than ranks, FirstRankFailed on its others.
    """
    use_expandable_segments()
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    rank, world_size, place = 0, 1, (0, 1)
    if dist.is_torchelastic_launched():
        store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        store = dist.PrefixStore(agreed_start(store, rank, world_size), store)  # type: ignore[attr-defined]
        place = machine_placement(store, rank, world_size)
    try:
        device = select_device(*place)
    except PenstockError as error:
        raise error if place[0] == 0 else FirstRankFailed(str(error)) from error
    dist.init_process_group(
        backend_of(device),
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        local_size = torch.tensor(place[1])
        dist.all_reduce(local_size, dist.ReduceOp.MAX, group=control)
        yield Ranks(rank, world_size, int(local_size), device, control)
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
