"""The ranks of a run: process group, device, device mesh, control messages between ranks, and stop signals.

A single process is a group of size 1 and runs the same code.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schemas.errors import ConfigError, PenstockError
from schemas.logs import LOGGER
from train.config.layout import LayoutConfig
from train.parallel.layout import axes_of
from train.parallel.totals import RunningSum, SumThread

# The first functions select the device of a rank and configure its memory allocator.

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with the settings of the CUDA allocator in torch 2.11 to 2.13, the newest name first."""


def device_of(cuda: bool, num_devices: int, local_rank: int, local_size: int) -> torch.device:
    """Return the device of rank `local_rank` on a machine with `local_size` ranks: a GPU, or the CPU.

    `cuda`: True if GPUs can be used. Raises ConfigError if there are fewer GPUs than ranks.
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
    """Return `device_of` on this machine, and set a GPU as the current device of this process."""
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    device = device_of(cuda, torch.cuda.device_count(), local_rank, local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Return the torch.distributed backend for ranks on this device. The backend supports CPU tensors too."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


LOOPBACK = "127.0.0.1"
"""Address of this machine at which `train.launch` lets its ranks meet."""


def stay_on_loopback() -> None:
    """Bind gloo to the loopback interface if the ranks meet there, unless the user has chosen an interface."""
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if os.environ.get("MASTER_ADDR") == LOOPBACK and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def torchrun_placement() -> tuple[int, int] | None:
    """Return the local rank of this process and the number of ranks on its machine; None without torchrun."""
    local_rank, local_size = (os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None if local_rank is None or local_size is None else (int(local_rank), int(local_size))


def is_restarted() -> bool:
    """Return True if torchrun has started this rank again after a rank has failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


LAUNCHER = "PENSTOCK_LAUNCHER"
"""Environment variable with the process id of `train.launch`, which it sets for its ranks."""
WATCH_SECONDS = 1.0
"""Interval in which a rank that starts looks for its launcher [s]."""


def name_launcher() -> None:
    """Name this process to the ranks that it will start."""
    os.environ[LAUNCHER] = str(os.getpid())


def launcher_pid() -> int | None:
    """Return the process id of the torchrun that started this rank; None without torchrun.

    Without `train.launch` it is that of the parent, which is another process if torchrun has ended already.
    """
    if torchrun_placement() is None:
        return None
    return int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else os.getppid()


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """End this process with exit code 1 if its torchrun ends in the `with` block.

    A rank that starts waits for the store of its torchrun, which torch gives up after half an hour.
    """
    launcher, started = launcher_pid(), threading.Event()

    def watch() -> None:
        while not started.is_set():
            if os.getppid() != launcher:
                LOGGER.error("penstock: the process that started this rank has ended")
                os._exit(1)
            started.wait(WATCH_SECONDS)

    if launcher is not None:
        threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        started.set()


def use_expandable_segments() -> None:
    """Enable expandable segments in the CUDA allocator, unless the user has configured the allocator.

    Call this before CUDA starts.
    """
    # Chunks of logits of about 0.5 GB are allocated and freed beside weights that stay, so fixed-size segments
    # fragment. Torch reads the environment variable at first use, after its import (seen in the CUDA build of 2.11).
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable with the workspaces of cuBLAS."""


def use_fixed_order(fixed: bool) -> None:
    """Set whether CUDA uses only algorithms that add in a fixed order; call it before the first matrix product.

    An operator without such an algorithm then raises RuntimeError.
    """
    if fixed:
        # With workspaces of a fixed size, cuBLAS adds in a fixed order; torch requires the variable. By default torch
        # gives Hopper the same 32 MiB.
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(fixed)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


T = TypeVar("T")

# Rank 0 hashes the whole dataset while the other ranks wait for its broadcast. A rank that dies is still detected at
# once, by its closed connections and by torchrun.
CONTROL_TIMEOUT = timedelta(hours=24)


class FirstRankFailed(PenstockError):
    """Raised by ranks that did not fail, when rank 0 or the first rank of their machine has failed.

    The failed rank reports the reason.
    """


class PendingSum:
    """A running sum of values over all ranks."""

    def __init__(self, sums: torch.Tensor, work: RunningSum | None):
        """`work`: the running sum; None = `sums` are already the results."""
        self._sums, self._work = sums, work

    def wait(self) -> list[float]:
        """Wait for the sums, and return them."""
        if self._work is not None:
            self._work.wait()
        return self._sums.tolist()


@dataclass(frozen=True)
class Ranks:
    """This process and its position among all ranks of the run."""

    rank: int
    world_size: int
    local_size: int
    """Number of ranks on this machine."""
    device: torch.device
    """Device of this rank."""
    control: dist.ProcessGroup
    """Process group on the CPU for control messages."""
    leads_node: bool = True
    """True on one rank of each machine."""

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 only and broadcast its result. If the call raises, every rank raises an error."""
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
        """Raise `error` on rank 0, and FirstRankFailed on the other ranks. Call it if all ranks have the error."""
        raise error if self.rank == 0 else FirstRankFailed(str(error))

    def total(self, *values: float) -> list[float]:
        """Return each value summed over all ranks, in float64, the same on every rank."""
        return self.start_total(*values).wait()

    def start_total(self, *values: float) -> PendingSum:
        """Start to sum each value over all ranks, without waiting. Ranks must start their sums in the same order."""
        sums = torch.tensor(values, dtype=torch.float64)
        return PendingSum(sums, None if self.world_size == 1 else self._sums.start(sums))

    def end_sums(self) -> None:
        """End the thread of sums, if one has started. Call it before the process groups are destroyed."""
        if "_sums" in vars(self):
            self._sums.end()

    @cached_property
    def _sums(self) -> SumThread:
        return SumThread(self.control, self.rank, self.world_size)


def agreed_start(store: Any, rank: int, world_size: int) -> str:
    """Return a name that all ranks agree on for this start of the run. No earlier start has used the name."""
    # torchrun keeps the same store over its restarts, so a rank may read the address of a dead process there. gloo
    # would try to connect to it until it times out (seen in torch 2.13). Therefore rank 0 publishes a new name, and
    # every other rank answers with a name of its own. That rank returns the new name once rank 0 has confirmed its
    # answer.
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
    """Return the local rank of this process and the number of ranks on its machine."""
    # Containers may share a hostname, and a machine may have several hostnames.
    if (place := torchrun_placement()) is not None:
        return place
    store.set(f"host/{rank}", socket.gethostname())
    hosts = [store.get(f"host/{other}").decode() for other in range(world_size)]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """Return the context of the ranks that torchrun started, or of this process alone.

    Ranks use GPUs if there are any. If a machine has fewer GPUs than ranks, its first rank raises ConfigError and its
    other ranks raise FirstRankFailed.
    """
    use_expandable_segments()
    try:
        with ending_with_launcher():
            ranks = _open_ranks()
        try:
            yield ranks
        finally:
            ranks.end_sums()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_ranks() -> Ranks:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    rank, world_size, place = 0, 1, (0, 1)
    if dist.is_torchelastic_launched():
        stay_on_loopback()
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
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    local_size = torch.tensor(place[1])
    dist.all_reduce(local_size, dist.ReduceOp.MAX, group=control)
    return Ranks(rank, world_size, int(local_size), device, control, place[0] == 0)


def default_threads(ranks: Ranks) -> int:
    """Return the CPU threads for a rank: the cores of this process divided by the ranks of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks.local_size)


class Interruption:
    """A handler that records the first SIGINT or SIGTERM, so that the current step can be finished.

    After the first signal, SIGINT has its usual effect. A second SIGTERM is ignored. A rank whose torchrun has ended
    stops as after SIGTERM: nothing would restart or stop it.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._parent = launcher_pid()
        self._before: dict[int, Any] = {}

    @property
    def received(self) -> tuple[bool, bool]:
        """Return two booleans: whether the first signal was SIGTERM, and whether it was SIGINT."""
        return self.signal == signal.SIGTERM or self.is_orphaned, self.signal == signal.SIGINT

    @property
    def is_orphaned(self) -> bool:
        """True if the torchrun that started this rank has ended, for instance because it was killed."""
        return self._parent is not None and os.getppid() != self._parent

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
            # A scheduler that signals the whole job reaches a rank twice, directly and through torchrun. The second
            # signal would kill the rank during its last save.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


# The device mesh of a run: its axes over the ranks, and the process group of each parallel method.


@dataclass(frozen=True)
class Mesh:
    """The device mesh of a layout, with this rank's coordinates on its axes."""

    axes: dict[str, int]
    """Size of every axis, in the order of AXES."""
    whole: DeviceMesh
    """The mesh of all ranks. Its axes are `shard`, and every other axis larger than 1."""
    states: DeviceMesh
    """The mesh over which FSDP2 shards weights and states: `shard` times `context`. Replicas are a first axis, unless
    gradients between them are compressed, which FSDP2 does not handle."""

    def place(self, axis: str) -> int:
        """Return the coordinate of this rank on an axis."""
        return self.whole.get_local_rank(axis) if self.axes[axis] > 1 else 0

    def along(self, axis: str) -> DeviceMesh:
        """Return the mesh of the ranks that differ from this rank on `axis` only; the axis must be larger than 1."""
        return self.whole[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks of `along(axis)` as a process group."""
        return self.whole.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's data-parallel group, whose ranks read the same rows."""
        return self.place("replicate") * self.axes["shard"] + self.place("shard")

    @property
    def is_group_leader(self) -> bool:
        """True on the one rank of each data-parallel group that adds the counts of the group to global sums."""
        return not any(self.place(axis) for axis in ("pipeline", "context", "tensor"))


def build_mesh(layout: LayoutConfig, world_size: int, device_type: str) -> Mesh:
    """Build the mesh of a layout over all ranks. Raises ConfigError if the product of its axes is not `world_size`."""
    axes = axes_of(layout, world_size)
    kept = {axis: size for axis, size in axes.items() if size > 1 or axis == "shard"}
    whole = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    states = whole["shard"]
    if axes["context"] > 1:
        states = whole["shard", "context"]._flatten("states")
    if axes["replicate"] > 1 and layout.compress == "none":
        # FSDP2 uses the first of two axes for replicas and the second for shards.
        states = whole["replicate", "shard"]
        if axes["context"] > 1:
            whole["shard", "context"]._flatten("states")
            states = whole["replicate", "states"]
    return Mesh(axes, whole, states)


# Collectives on a flat tensor, with their names since torch 2.12. Older versions call them `all_gather_into_tensor` and
# `reduce_scatter_tensor`; newer versions warn about those names.

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Call as (output, input, group=...): concatenates the inputs of all ranks in the output of every rank."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Call as (output, input, group=...): writes this rank's part of the summed inputs of all ranks to the output."""
