"""The model files of a run as its tasks find them: each is the file whose digest the run has recorded, or an error.

A run takes days, and a user may put a longer list in the place of one that the run uses. Half of the documents would
then be measured with either, under the digest of the first.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.errors import ContractError
from schemas.ids import file_sha256

State = tuple[int, ...]
_COMPARED: dict[tuple[str, State], str] = {}
"""The SHA-256 of files that this process has read, by path and state."""


class ModelFile(str):
    """The path of a model file on the driver, with its state and SHA-256 when the run was prepared."""

    __slots__ = ("sha256", "state")
    state: State
    sha256: str | None
    """None: the content of the file is secret."""

    def __new__(cls, path: str, state: State, sha256: str | None) -> "ModelFile":
        self = super().__new__(cls, path)
        self.state, self.sha256 = state, sha256
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelFile, (str(self), self.state, self.sha256)

    def is_unchanged(self) -> bool:
        """Return True if a file of this path exists here, with the content that the run has recorded."""
        state = state_of(self)
        if not state or state == self.state or self.sha256 is None:
            return bool(state) and state == self.state
        if (str(self), state) not in _COMPARED:
            _COMPARED[str(self), state] = file_sha256(Path(self))
        return _COMPARED[str(self), state] == self.sha256


def path_here(path: str, shipped: Callable[[], str] | None) -> str:
    """Return the path of a model file on this machine: `path` if the file is here, else that of its shipped copy.

    `shipped` returns the path of the copy; None: nothing is shipped to here. Raises ContractError if a ModelFile has
    changed, and there is no copy of the one that the run has recorded.
    """
    if path.is_unchanged() if isinstance(path, ModelFile) else shipped is None or os.path.exists(path):
        return str(path)
    copy = shipped() if shipped is not None else ""
    if not isinstance(path, ModelFile) or os.path.exists(copy):
        return copy
    raise ContractError(
        f"models: expected {path} as it was when the run was prepared, got a changed file. Run the same command again, "
        "which builds tables with the new file, or restore the old one first."
    )


def state_of(path: str) -> State:
    """Return size, times and number of a file, which change with it; empty if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
