"""The local folder of a training run on an object store, where its files are written before they are uploaded.

Objects cannot be appended to, so logs grow in this folder. They are uploaded before each checkpoint exists, after a
rewind and at the end. A crash therefore loses the log of the steps after the newest checkpoint, which a resume computes
and logs again, and events since then. At a start the files of the store replace those of the folder.
"""

import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from schemas.checkpoints import CHECKPOINTS
from schemas.errors import ConfigError
from schemas.ids import digest_of
from schemas.paths import METRICS_NAME, RANKS_NAME
from schemas.storage import Store
from train.checkpoint.folder import StateFile
from train.config.train import TrainConfig
from train.monitor.events import EVENTS_NAME
from train.monitor.wandb_log import WANDB_NAME
from train.remote.cache import make_private
from train.remote.transfer import upload

RUNS = "runs"
"""Folder of a cache folder with a folder for each run on an object store."""
TRAIN = "train"
PARTIAL = ".partial"
LOGS = (METRICS_NAME, EVENTS_NAME, RANKS_NAME, WANDB_NAME)
"""Files that a resumed run continues."""


@dataclass(frozen=True)
class WorkFolder:
    """Where a run writes its logs and its checkpoints first; for a local run, that is the run folder itself."""

    run: Store
    """The run folder."""
    local: Store
    """The folder on this machine, with the same relative paths."""
    _uploaded: dict[str, tuple[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_apart(self) -> bool:
        """True if files must be uploaded to the run folder."""
        return not self.run.is_local

    def clear(self) -> None:
        """Remove what an earlier process left in the local folder. Call it on one rank of each machine."""
        if self.is_apart:
            shutil.rmtree(self.local.path(TRAIN), ignore_errors=True)

    def fetch(self) -> None:
        """Copy the logs of the run to the local folder, to append to them. Call it on rank 0."""
        for name in LOGS if self.is_apart else ():
            if self.run.exists(name):
                self.local.write_atomic(name, self.run.read_bytes(name))

    def publish(self) -> None:
        """Upload each log that has changed. Call it on rank 0; any thread may."""
        if not self.is_apart:
            return
        with self._lock:
            for name in sorted(self.local.child(TRAIN).walk()):
                path = f"{TRAIN}/{name}"
                if path.startswith(f"{CHECKPOINTS}/") or path.endswith(PARTIAL):
                    continue
                state = Path(self.local.path(path)).stat()
                if self._uploaded.get(path) != (now := (state.st_size, state.st_mtime_ns)):
                    upload(Path(self.local.path(path)), self.run, path)
                    self._uploaded[path] = now

    def upload_state(self, folder: str, files: dict[str, StateFile]) -> None:
        """Upload state files of a checkpoint that this rank has written, then remove the local ones."""
        place = Path(self.local.path(folder))
        for name, file in files.items():
            upload(place / name, self.run, f"{folder}/{name}", file.sha256)
            (place / name).unlink()

    def discard(self, folder: str) -> None:
        """Remove what is left in the local folder of a checkpoint that could not be saved."""
        if self.is_apart:
            shutil.rmtree(self.local.path(folder), ignore_errors=True)


def work_folder(run: Store, config: TrainConfig) -> WorkFolder:
    """Return the work folder of a run. Raises ConfigError if the run is on an object store and has no cache folder.

    Raises it too if another user can write to the folder.
    """
    check_cache_given(run, config)
    if run.is_local:
        return WorkFolder(run, run)
    make_private(Path(config.cache_dir, RUNS))
    return WorkFolder(run, Store(f"{config.cache_dir}/{RUNS}/{digest_of(run.uri)[:16]}"))


def check_cache_given(folder: Store, config: TrainConfig) -> None:
    """Raise ConfigError if a folder is on an object store, and `train.cache_dir` is not set."""
    if not folder.is_local and not config.cache_dir:
        raise ConfigError(
            f"train.cache_dir: expected a folder on a local disk, because {folder.uri} is on an object store, got "
            "none. Set train.cache_dir."
        )
