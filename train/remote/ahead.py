"""The use of a run's shards by step, and their download before the steps that read them.

The order of the samples is a pure function of the step, so the shards of the next steps are known, and for a shard in
the cache the next step that reads it. One process of a machine downloads ahead, the one that gets the lock; the others
only read. All ranks of a machine read rows of the same windows of shards, so the shards of a whole global batch count.
"""

import fcntl
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np

from schemas.errors import ConfigError, PenstockError
from schemas.ids import digest_of
from schemas.logs import LOGGER
from schemas.storage import CheckedPath
from schemas.tokens import HELDOUT, TRAIN, Dataset, Shard
from train.data.batches import Batches
from train.data.order import SampleOrder
from train.data.permutation import ChunkOrder, Ints
from train.remote.cache import ShardCache

AT_ONCE = 4
"""Number of shards that are downloaded at a time."""
MAX_STEPS_AHEAD = 2000
"""Maximum number of steps whose shards are looked up ahead; a step of 4,096 rows takes about 2 ms."""
STEPS_OPEN = 2
"""Number of steps, from the one that is read on, whose shards stay open."""
STEPS_HELD = 4
"""Number of consecutive steps whose shards the ranks of a machine may have open together, since none is more than two
steps before another."""


class ShardUse:
    """Which steps of an order read which token shards. Any thread may ask."""

    def __init__(self, dataset: Dataset, order: SampleOrder):
        self._order, self._lock = order, threading.Lock()
        self._shards: list[Sequence[Shard]] = [dataset.streams[f"{source}/{TRAIN}"] for source in order.sources]
        self._begins = [_begins(shards) for shards in self._shards]
        self._places: dict[str, list[tuple[int, int]]] = {}
        for source, shards in enumerate(self._shards):
            for number, shard in enumerate(shards):
                self._places.setdefault(shard.sha256, []).append((source, number))
        self._steps: dict[str, Ints] = {}
        self._of_step: dict[int, dict[str, CheckedPath]] = {}

    def of_step(self, step: int) -> dict[str, CheckedPath]:
        """Return the shards with tokens of a step's global batch (0 = first step), by SHA-256."""
        with self._lock:
            if step not in self._of_step:
                for old in [known for known in self._of_step if known < step - STEPS_HELD]:
                    del self._of_step[old]
                self._of_step[step] = self._find(step)
            return self._of_step[step]

    def next_use(self, sha256: str, step: int) -> float:
        """Return the first step from `step` on that reads a shard; infinity if no step does."""
        with self._lock:
            if sha256 not in self._steps:
                self._steps[sha256] = self._steps_of(sha256)
            steps = self._steps[sha256]
        at = int(np.searchsorted(steps, step))
        return int(steps[at]) if at < len(steps) else math.inf

    def _find(self, step: int) -> dict[str, CheckedPath]:
        samples, paths = self._order.samples(step), dict[str, CheckedPath]()
        pieces = samples.pieces
        sources = samples.source[pieces.row]
        for source in np.unique(sources).tolist():
            start, length = (values[sources == source] for values in (pieces.start, pieces.length))
            begins = self._begins[source]
            # The token after the last input of a piece is read too, as its target.
            first = np.searchsorted(begins, start, side="right") - 1
            last = np.searchsorted(begins, start + length, side="right") - 1
            for one, end in np.unique(np.stack([first, last], axis=1), axis=0).tolist():
                for shard in self._shards[source][one : end + 1]:
                    paths[shard.sha256] = shard.path
        return paths

    def _steps_of(self, sha256: str) -> Ints:
        """Return all steps that read a shard, in ascending order."""
        steps = [np.empty(0, np.int64)]
        for source, number in self._places.get(sha256, ()):
            start, stop = self._begins[source][number : number + 2].tolist()
            for stage, places in self._order.find(self._order.sources[source], max(0, start - 1), stop):
                plan = self._order.stages[stage]
                steps.append(plan.first_step + places // plan.global_batch)
        return np.unique(np.concatenate(steps))


class ReadAhead:
    """Downloads the shards of the next steps in threads; leaving the context ends them."""

    def __init__(self, cache: ShardCache, use: ShardUse, batches: Batches, stop: int, name: str):
        """`batches`: their reader, whose files it closes; `stop`: the end of the steps that are read.

        `name`: a text that only the ranks of the same run have.
        """
        self._cache, self._use, self._batches, self._stop = cache, use, batches, stop
        self._lock = cache.root / f"{cache.folder.name}-{digest_of(name)[:16]}.lock"
        self._step, self._walked = 0, -1
        self._known: dict[str, CheckedPath] = {}
        self._wake, self._ended, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._warned = False
        cache.next_use = lambda sha256: use.next_use(sha256, self._step)
        cache.on_full = lambda: batches.close_shards(frozenset())
        self._thread = threading.Thread(target=self._loop, name="shards", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Note that a step is read now (0 = first), and close the shards that no step reads soon."""
        self._step = step
        self._idle.clear()
        self._wake.set()
        self._batches.close_shards(frozenset(self._open_at(step)))

    def end(self, step: int) -> None:
        """Note that the rows of a step have been read."""
        self._batches.close_shards(frozenset(self._open_at(step + 1)))

    def wait(self) -> None:
        """Wait until all shards that the cache has room for are downloaded."""
        self._idle.wait()

    def _open_at(self, step: int) -> dict[str, CheckedPath]:
        """Return the shards that may stay open while a step is read; none if the cache has no room for all ranks'."""
        held = self._of_steps(step, STEPS_HELD)
        if sum(path.num_bytes for path in held.values()) > self._cache.num_bytes:
            return {}
        return self._of_steps(step, STEPS_OPEN)

    def _of_steps(self, first: int, number: int) -> dict[str, CheckedPath]:
        steps = range(first, min(first + number, self._stop))
        return {sha256: path for step in steps for sha256, path in self._use.of_step(step).items()}

    def _loop(self) -> None:
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="download") as pool:
                while not self._ended.is_set():
                    self._wake.wait()
                    self._wake.clear()
                    with suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # stays held: taken again by its holder
                        self._download(pool)
                    if not self._wake.is_set():
                        self._idle.set()
        finally:
            os.close(file)

    def _download(self, pool: ThreadPoolExecutor) -> None:
        """Download shards in the order of their next use until the cache is full of earlier ones."""
        while not self._ended.is_set():
            self._look_ahead()
            missing = [path for path in self._known.values() if not self._cache.has(path)]
            uses = [(self._use.next_use(path.sha256, self._step), path) for path in missing]
            some = sorted(uses, key=lambda entry: entry[0])[:AT_ONCE]
            if not some:
                return
            try:
                if not all([*pool.map(lambda entry: self._cache.fetch(entry[1], entry[0]), some)]):
                    return
            except (PenstockError, OSError) as error:
                if not self._warned:  # the step that needs the shard raises the error, if it comes again
                    LOGGER.warning(f"penstock: a shard cannot be downloaded ahead: {error}")
                self._warned = True
                return

    def _look_ahead(self) -> None:
        """Look up the shards of the next steps, of as many as the cache has room for."""
        self._walked = max(self._walked, self._step - 1)
        self._known = {sha256: path for sha256, path in self._known.items() if self._is_ahead(sha256)}
        size = sum(path.num_bytes for path in self._known.values())
        last = min(self._stop, self._step + MAX_STEPS_AHEAD)
        while size < self._cache.num_bytes and self._walked + 1 < last and not self._ended.is_set():
            self._walked += 1
            for sha256, path in self._use.of_step(self._walked).items():
                if sha256 not in self._known:
                    self._known[sha256] = path
                    size += path.num_bytes

    def _is_ahead(self, sha256: str) -> bool:
        return self._use.next_use(sha256, self._step) <= self._walked

    def close(self) -> None:
        """End the threads, and close the files of the batches. A shard that is being downloaded is completed."""
        self._ended.set()
        self._wake.set()
        self._thread.join()
        self._batches.close_shards(frozenset())  # after a rewind, others are read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_bound(dataset: Dataset, order: SampleOrder, num_bytes: int, evaluates: bool = False) -> None:
    """Raise ConfigError if a cache of this size has no room for the largest window of shards of each source.

    `evaluates`: True if held-out shards are read too, one at a time.
    """
    need, what = 0, "which the largest windows of shards of the sources have together"
    for source, stream in zip(order.sources, order.streams, strict=True):
        need += window_bytes(dataset.streams[f"{source}/{TRAIN}"], stream.chunks)
    held = [shards for stream, shards in dataset.streams.items() if evaluates and stream.endswith(f"/{HELDOUT}")]
    largest = max((shard.path.num_bytes for shards in held for shard in shards), default=0)
    if largest > need:
        need, what = largest, "the size of the largest held-out shard"
    if need > num_bytes:
        raise ConfigError(
            f"train.cache_bytes: expected at least {need:,} bytes, {what}, got {num_bytes:,}. "
            "Raise train.cache_bytes, or free disk space in train.cache_dir."
        )


def window_bytes(shards: Sequence[Shard], chunks: ChunkOrder) -> int:
    """Return the largest number of bytes of the shards of one window of a source."""
    edges = np.append(chunks.windows, chunks.num_chunks) * chunks.chunk_tokens
    begins, sizes = _begins(shards), np.cumsum([0, *(shard.path.num_bytes for shard in shards)])
    first = np.searchsorted(begins, edges[:-1], side="right") - 1
    end = np.searchsorted(begins, edges[1:], side="right")  # with the token after the last one of the window
    return int((sizes[np.minimum(end, len(shards))] - sizes[first]).max(initial=0))


def _begins(shards: Sequence[Shard]) -> Ints:
    return np.cumsum([0, *(shard.num_tokens for shard in shards)]).astype(np.int64)
