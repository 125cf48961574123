"""How a checkpoint is written: every rank its share of the state, then the note, so that it is complete or absent.

Each tensor is written once: of the ranks that hold the same one, DCP chooses the rank with least to write. Digests are
taken of the bytes on their way to the file: half the time of reading them again, and a disk that errs is found out.
"""

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from schemas.errors import ContractError
from schemas.storage import Store
from train.checkpoint.folder import local_path, remove_checkpoint
from train.checkpoint.metadata import CHECKPOINTS, NOTE_NAME, Note, StateFile
from train.checkpoint.staging import CopiesPlanner, HostCopies
from train.checkpoint.state import State
from train.parallel.ranks import Ranks


def write_checkpoint(run: Store, note: Note, state: State, ranks: Ranks, copies: HostCopies | None = None) -> Note:
    """Write a checkpoint, its note last; returns the note with its files. All ranks call it together.

    Values are those of `copies`, if given, else those that the state has. Raises ContractError if it cannot be written
    (FirstRankFailed on all ranks but 0); then nothing of it is left.
    """
    folder = local_path(run, note.name)
    writer = _Writer(folder, from_host=copies is not None)
    try:
        ranks.on_first(lambda: remove_checkpoint(run, note.step))
        save(
            state,
            storage_writer=writer,
            planner=CopiesPlanner(copies) if copies is not None else None,
            process_group=ranks.control,
        )
        files = _gathered(writer.digests.files, ranks)
        return ranks.on_first(lambda: _commit(run, note.model_copy(update={"files": files})))
    except CheckpointException as failed:
        reasons = "; ".join(sorted({str(failure[0]) for failure in failed.failures.values()}))
        ranks.refuse(_unwritten(folder, reasons + _cleared(run, note, ranks)))
    except OSError as error:
        raise _unwritten(folder, str(error) + _cleared(run, note, ranks)) from error


def _gathered(files: Mapping[str, StateFile], ranks: Ranks) -> dict[str, StateFile]:
    """The files of all ranks."""
    everywhere: list[Mapping[str, StateFile]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(everywhere, files, group=ranks.control)
    return {name: part[name] for part in everywhere for name in part}


def _commit(run: Store, note: Note) -> Note:
    """Write the note, once the names of all files are durable."""
    run.sync(note.name)
    run.sync(CHECKPOINTS)
    run.write_atomic(f"{note.name}/{NOTE_NAME}", note.to_bytes())
    return note


def _cleared(run: Store, note: Note, ranks: Ranks) -> str:
    """Remove what was written, on rank 0, while no rank writes; returns what to add to the reason of the failure."""
    try:
        if ranks.rank == 0:
            remove_checkpoint(run, note.step)
    except OSError as error:
        return f" (and a half-written folder, which cannot be removed: {error})"
    return ""


def _unwritten(folder: Path, reason: str) -> ContractError:
    return ContractError(f"{folder}: promised a checkpoint, found {reason}; make room: the checkpoints before it stand")


class _Digested(io.BufferedWriter):
    """A new file that takes the digest of what is written to it."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "wb"))
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return super().write(data)


class _DigestingFileSystem(FileSystem):
    """The local filesystem, which knows the digest of every file written through it."""

    def __init__(self) -> None:
        self.files: dict[str, StateFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _Digested(Path(path)) as stream:
            yield stream
        self.files[Path(path).name] = StateFile(size=stream.size, sha256=stream.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """DCP's writer, one file a rank and one thread: an exception in DCP's further threads is lost, and with it,
    unnoticed, the tensors that they had still to write."""

    def __init__(self, folder: Path, from_host: bool):
        # Copies need no stream of a device; the background thread would take one of device 0, whatever its rank.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0 if from_host else 10_000_000)
        self.fs = self.digests = _DigestingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _first_cause(error) from error


def _first_cause(error: BaseException) -> BaseException:
    """The first error of the storage behind another; torch.save hides it behind one of its own when it closes."""
    first, behind = error, error.__context__
    while behind is not None:
        first = behind if isinstance(behind, OSError) else first
        behind = behind.__context__
    return first
