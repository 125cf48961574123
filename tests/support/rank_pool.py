"""A pool of processes for all tests that need several ranks: starting a process costs more than its work.

`pool.play(4, function, *arguments)` calls `function(ranks, *arguments)` on four ranks at once, in a process group made
for this call, and returns the result of each rank. Functions are imported by name, so they must be top-level.
"""

import contextlib
import itertools
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 300
SECONDS_AFTER_FAILURE = 5
MOST = 8
PRELOADED = ["tests.support.tiny_runs", "torch.distributed.checkpoint", "torch.utils.tensorboard", "pandas"]
"""Modules that the server of the processes imports once; a process that imported them itself would need a second."""


class RankFailed(Exception):
    """The error of a rank, as text."""


class RankPool:
    """Processes that wait for work; they start when first needed and end with the test session."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._context = context
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._numbers = itertools.count()

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks that have started."""
        return [process.pid for process in self._processes]

    def play(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return `function(ranks, *arguments)` of each rank. Raises RankFailed with the error of every failed rank."""
        while len(self._processes) < world_size:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, os.getcwd(), sys.path), daemon=True)
            process.start()
            there.close()  # else the death of this process would not close the pipe
            self._processes.append(process)
            self._pipes.append(here)
        port = _free_port()
        for rank, pipe in enumerate(self._pipes[:world_size]):
            pipe.send((rank, world_size, port, function, arguments))
        answers = self._answers(world_size)
        if failed := [f"rank {rank}: {error}" for rank, (_, error) in sorted(answers.items()) if error]:
            if len(answers) < world_size:  # the others wait for one that has failed
                self.close()
            raise RankFailed("\n".join(failed))
        return [answers[rank][0] for rank in range(world_size)]

    def _answers(self, world_size: int) -> dict[int, tuple[Any, str | None]]:
        """Return the answers of the ranks; after a failure the others get a moment to fail as well."""
        answers: dict[int, tuple[Any, str | None]] = {}
        limit = time.monotonic() + SECONDS
        while len(answers) < world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size]) if rank not in answers}
            ready = wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):  # the second if it had not read all that it got
                    answers[rank] = None, "died"
                if answers[rank][1]:
                    limit = min(limit, time.monotonic() + SECONDS_AFTER_FAILURE)
        for rank in range(world_size):
            if rank not in answers and not any(error for _, error in answers.values()):
                answers[rank] = None, f"gave no answer in {SECONDS} s"
        return answers

    def close(self) -> None:
        """Stop the processes; the next `play` starts new ones."""
        for process in self._processes:
            process.kill()
        self._processes, self._pipes = [], []


@cache
def shared_pool() -> RankPool:
    """Return the pool of the test session."""
    return RankPool()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _serve(pipe: Connection, folder: str, path: list[str]) -> None:
    import torch

    os.chdir(folder)
    sys.path[:] = path
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, port, function, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            with _as_rank(rank, world_size, port) as ranks:
                answer = function(ranks, *arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)


@contextlib.contextmanager
def _as_rank(rank: int, world_size: int, port: int) -> Iterator[Any]:
    from train.parallel.ranks import open_ranks

    names = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values = ("test", rank, world_size, rank, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    try:
        with open_ranks() as ranks:
            yield ranks
    finally:
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's caches of the meshes of this call: it would look up their groups in the next call."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
