"""The writing of checkpoints during training: synchronously or in a background thread, with retention.

A checkpoint is complete or absent: every rank writes its share of the state, then rank 0 writes the metadata. A failed
save is an outcome and not an exception: training continues and earlier checkpoints are kept. `finish` raises an error
at the end of a run if the newest save has failed.
"""

import hashlib
import io
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from schemas.checkpoints import CHECKPOINTS, METADATA_NAME
from schemas.errors import ContractError, PenstockError
from schemas.leases import check_still_held
from schemas.logs import LOGGER
from schemas.storage import Store
from train.checkpoint.folder import CheckpointMetadata, StateFile, keep_newest, remove_checkpoint
from train.checkpoint.state import State
from train.config.train import CheckpointConfig
from train.parallel.ranks import CONTROL_TIMEOUT, PendingSum, Ranks
from train.remote.work import WorkFolder

# A background save writes copies of a rank's tensors in host memory while training continues. One set of buffers serves
# every save, pinned if the tensors are on a device, so memory does not grow after the first save. A tensor that another
# rank writes, since both hold it, is copied in the first save only.


class HostCopies:
    """Copies of a rank's tensors in host memory; `take` fills them, and `CopiesPlanner` passes them to DCP."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.problem: Exception | None = None
        self._taken: list[Any] = []
        self._written: tuple[list[Any], set[str]] = [], set()

    @torch.no_grad()
    def take(self, state: State) -> None:
        """Copy the tensors that this rank writes.

        An error is not raised here. The write of the copies reports the error to every rank.
        """
        self._taken = [(name, value.shape, value.dtype) for name, value in state.items()]
        signature, names = self._written
        mine = names if signature == self._taken else {*state}
        local = {name: _local(value) for name, value in state.items() if name in mine}
        try:
            self.values = {name: self._buffer(name, value) for name, value in local.items()}
            for name, value in local.items():
                self.values[name].copy_(value, non_blocking=True)
            if any(value.is_cuda for value in local.values()):
                torch.cuda.current_stream().synchronize()
            self.problem = None
        except (RuntimeError, MemoryError) as error:
            self.values, self.problem = {}, error

    def remember(self, names: set[str]) -> None:
        """Store the names of the tensors that this rank writes, for the following saves."""
        self._written = self._taken, names

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        held = self.values.get(name)
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            return held
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)


class CopiesPlanner(DefaultSavePlanner):
    """A DCP save planner that takes values from host copies instead of the live tensors."""

    def __init__(self, copies: HostCopies):
        super().__init__()
        self._copies = copies

    def create_local_plan(self) -> SavePlan:
        """Return the save plan of this rank. Raises the error of `take`, if any; DCP then reports it to all ranks."""
        if self._copies.problem is not None:
            raise self._copies.problem
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the final save plan of this rank, and store the names of its tensors."""
        plan = super().finish_plan(new_plan)
        self._copies.remember({item.index.fqn for item in plan.items})
        return plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the copy of this rank's shard of a tensor."""
        return self._copies.values[index.fqn]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


# Each tensor is written once: of the ranks that hold it, DCP chooses the rank with the least to write. Digests are
# computed from the bytes before they reach the file: this takes half the time of reading them again, and detects a disk
# that stores wrong bytes.


def write_checkpoint(
    run: Store,
    checkpoint: CheckpointMetadata,
    state: State,
    ranks: Ranks,
    copies: HostCopies | None = None,
    work: WorkFolder | None = None,
) -> CheckpointMetadata:
    """Write a checkpoint; return its metadata with the list of files. All ranks call this function together.

    Values come from `copies` if given, else from `state`. For a run on an object store, each rank writes its files to
    the folder `work` and uploads them. If the write fails, its files are removed. Rank 0 then raises ContractError, all
    other ranks FirstRankFailed.
    """
    work = work or WorkFolder(run, run)
    folder = Path(work.local.path(checkpoint.name))
    writer = _CheckpointWriter(folder, from_host=copies is not None)
    try:
        ranks.on_first(lambda: remove_checkpoint(run, checkpoint.step))
        save(
            state,
            storage_writer=writer,
            planner=CopiesPlanner(copies) if copies is not None else None,
            process_group=ranks.control,
        )
        files, problem = _gather_files(work, checkpoint.name, writer.digests.files, ranks)
        if problem:
            problem += _remove_incomplete(work, checkpoint, ranks)
            ranks.refuse(_save_error(folder, problem, f"Check {run.uri} and the disk"))
        return ranks.on_first(lambda: _commit(work, checkpoint.model_copy(update={"files": files})))
    except CheckpointException as failed:
        reasons = "; ".join(sorted({str(failure[0]) for failure in failed.failures.values()}))
        ranks.refuse(_save_error(folder, reasons + _remove_incomplete(work, checkpoint, ranks)))
    except OSError as error:
        raise _save_error(folder, str(error) + _remove_incomplete(work, checkpoint, ranks)) from error


def _gather_files(
    work: WorkFolder, folder: str, files: dict[str, StateFile], ranks: Ranks
) -> tuple[dict[str, StateFile], str]:
    """Upload this rank's state files if necessary; return the size and digest of those of all ranks, by file name.

    The second value is the reason of the first rank whose upload failed; empty if none did.
    """
    problem = ""
    try:
        if work.is_apart:
            work.upload_state(folder, files)
    except (OSError, PenstockError) as error:
        problem = str(error).rstrip(".")
    everywhere: list[tuple[Mapping[str, StateFile], str]] = [({}, "") for _ in range(ranks.world_size)]
    dist.all_gather_object(everywhere, (files, problem), group=ranks.control)
    named = {name: part[name] for part, _ in everywhere for name in part}
    return named, next((reason for _, reason in everywhere if reason), "")


def _commit(work: WorkFolder, checkpoint: CheckpointMetadata) -> CheckpointMetadata:
    """Make the names of all files durable, then write the metadata."""
    run = work.run
    work.publish()  # a checkpoint must not have steps without metrics
    check_still_held(run)
    run.sync(checkpoint.name)
    run.sync(CHECKPOINTS)  # torch has made this folder
    run.write_atomic(f"{checkpoint.name}/{METADATA_NAME}", checkpoint.to_bytes())
    return checkpoint


def _remove_incomplete(work: WorkFolder, checkpoint: CheckpointMetadata, ranks: Ranks) -> str:
    """Remove an incomplete checkpoint, and what a machine has of it; return a note for the error if that fails."""
    try:
        if ranks.leads_node:
            work.discard(checkpoint.name)
        if ranks.rank == 0:
            remove_checkpoint(work.run, checkpoint.step)
    except (OSError, PenstockError) as error:
        return f" (and a half-written folder, which cannot be removed: {error})"
    return ""


def _save_error(folder: Path, reason: str, fix: str = "Free disk space") -> ContractError:
    return ContractError(f"{folder}: expected a checkpoint, got {reason}. {fix}; earlier checkpoints are kept.")


class _Digested(io.BufferedWriter):
    """A new file that computes the digest of the bytes written to it."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "wb"))
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return super().write(data)


class _DigestingFileSystem(FileSystem):
    """The local filesystem, with the digest of every file written through it."""

    def __init__(self) -> None:
        self.files: dict[str, StateFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _Digested(Path(path)) as stream:
            yield stream
            if not stream.closed:  # torch syncs the metadata before Python has written the end of them
                stream.flush()
                os.fsync(stream.fileno())
        self.files[Path(path).name] = StateFile(size=stream.size, sha256=stream.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _CheckpointWriter(FileSystemWriter):
    """DCP's writer with one file and one thread per rank.

    DCP ignores exceptions of additional threads. A checkpoint could then lack tensors without an error.
    """

    def __init__(self, folder: Path, from_host: bool):
        # Copies need no device stream; the background thread would use one of device 0, whatever its rank.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0 if from_host else 10_000_000)
        self.fs = self.digests = _DigestingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _first_cause(error) from error


def _first_cause(error: BaseException) -> BaseException:
    """Return the OSError that led to an error; the error itself if there is none."""
    # torch.save raises a second error, which hides the OSError.
    first, cause = error, error.__context__
    while cause is not None:
        first = cause if isinstance(cause, OSError) else first
        cause = cause.__context__
    return first


@dataclass(frozen=True)
class Saved:
    """A checkpoint save that completed."""

    checkpoint: CheckpointMetadata
    seconds: float
    """Time from the call of `save` until the metadata was written [s]."""
    stalled: float
    """Time for which training was stopped [s]; in mode sync it includes the removal of old checkpoints."""


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint save that failed; its files are removed."""

    step: int
    reason: str


SaveOutcome = Saved | SaveFailed


@dataclass(frozen=True)
class _Written:
    """The result of writing a checkpoint, on one rank."""

    checkpoint: CheckpointMetadata | None
    reason: str
    """Why the write failed; empty if it succeeded."""
    ended: float


@dataclass(frozen=True)
class _PendingSave:
    """A checkpoint save in progress."""

    step: int
    began: float
    stalled: float
    written: Future[_Written]


class Saver:
    """The writer of a run's checkpoints, one after another; all ranks make the same calls at the same steps.

    In mode async a thread writes copies of the state while training continues.
    """

    def __init__(self, run: Store, config: CheckpointConfig, ranks: Ranks, work: WorkFolder | None = None):
        """`work`: the local folder of a run on an object store; None = the run is local."""
        self.failures = 0
        """Number of saves that have failed so far."""
        self._run, self._config, self._ranks, self._work = run, config, ranks, work
        self._job: _PendingSave | None = None
        self._completed: PendingSum | None = None
        self._last: SaveOutcome | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._copies: HostCopies | None = None
        self._writers = ranks
        if config.mode == "async":
            self._pool, self._copies = ThreadPoolExecutor(1, thread_name_prefix="checkpoint"), HostCopies()
            # Collectives that two threads start on the same process group run in no fixed order, which can deadlock.
            self._writers = replace(ranks, control=dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))

    def prepare(self, state: State) -> None:
        """Allocate host memory for copies now, so that the first save stalls training no longer than later ones."""
        if self._copies is not None:
            self._copies.take(state)

    def save(self, checkpoint: CheckpointMetadata, state: State) -> list[SaveOutcome]:
        """Write a checkpoint (mode sync), or start to write it (mode async).

        Mode sync returns the outcome of this save. Mode async waits for the previous save, if any, and returns the
        outcome of that save. The tensors may change after the call.
        """
        began = time.monotonic()
        known = self.wait()
        written: Future[_Written] = Future()
        if self._pool is None or self._copies is None:
            written.set_result(self._write(checkpoint, state))
        else:
            self._copies.take(state)
            written = self._pool.submit(self._write, checkpoint, state)
        self._job = _PendingSave(checkpoint.step, began, time.monotonic() - began, written)
        return known if self._pool else self.wait()

    def poll(self) -> list[SaveOutcome]:
        """Return the outcome of the save in progress if all ranks had completed it at the previous call, else []."""
        if self._job is None:
            return []
        completed, self._completed = self._completed, None
        if completed is not None and completed.wait() == [self._ranks.world_size]:
            return self.wait()
        # The next call reads this sum over ranks, so that no step waits for another rank.
        self._completed = self._ranks.start_total(int(self._job.written.done()))
        return []

    def wait(self) -> list[SaveOutcome]:
        """Wait for the save in progress, if any, and return its outcome, the same on every rank.

        Call it before checkpoints of this run are read again, as for a rewind.
        """
        if self._job is None:
            return []
        job, self._job = self._job, None
        completed, self._completed = self._completed, None
        if completed is not None:
            completed.wait()
        written = job.written.result()
        reasons = [""] * self._ranks.world_size
        dist.all_gather_object(reasons, written.reason, group=self._ranks.control)
        reason = next(filter(None, reasons), "")
        if reason or written.checkpoint is None:
            self._last = SaveFailed(job.step, reason)
            self.failures += 1
            self._warn(f"training continues without a checkpoint of step {job.step}, failure {self.failures}: {reason}")
        else:
            self._last = Saved(written.checkpoint, written.ended - job.began, job.stalled)
        return [self._last]

    def finish(self) -> list[SaveOutcome]:
        """Wait for the last save of a run and return its outcome. Raises ContractError if the newest save failed."""
        known = self.wait()
        if isinstance(self._last, SaveFailed):
            self._ranks.refuse(ContractError(self._last.reason))
        return known

    def close(self) -> None:
        """Wait for the background thread to end and release it; do not call `save` afterwards."""
        if self._pool is not None:
            self._pool.shutdown()
            dist.destroy_process_group(self._writers.control)
        self._pool, self._copies = None, None

    def _write(self, checkpoint: CheckpointMetadata, state: State) -> _Written:
        """Write a checkpoint together with all ranks, then remove earlier ones that retention does not keep."""
        try:
            checkpoint = write_checkpoint(self._run, checkpoint, state, self._writers, self._copies, self._work)
        except Exception as error:
            reason = str(error) if isinstance(error, PenstockError) else f"step {checkpoint.step}: {error!r}"
            return _Written(None, reason, time.monotonic())
        ended = time.monotonic()
        try:
            if self._ranks.rank == 0:
                keep_newest(self._run, self._config)
        except (OSError, PenstockError) as error:
            self._warn(f"an old checkpoint cannot be removed: {error}")
        return _Written(checkpoint, "", ended)

    def _warn(self, text: str) -> None:
        if self._ranks.rank == 0:
            LOGGER.warning(f"penstock: {text}")
