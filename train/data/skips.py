"""The skip list: global sample indices that training passes over, in a file that only ever grows.

A global index is the number of the stage << 40 | the index in the stage. The samples of the stage after a skipped one
move up, and later stages begin behind them; nothing else changes. A checkpoint carries the length and the digest of
the list it was trained under, so that a list that was edited, or that skips what was already used, is refused.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.storage import Store

Ints = NDArray[np.int64]

STAGE_BITS = 40
"""A global sample index is the number of its stage << STAGE_BITS | its index in the stage."""


@dataclass(frozen=True)
class SkipList:
    """Skipped global sample indices in the order they were appended."""

    indices: tuple[int, ...] = ()

    @cached_property
    def _sorted(self) -> Ints:
        return np.unique(np.array(self.indices, np.int64))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the list in its order."""
        return digest_of(list(self.indices))

    def of_stage(self, stage: int) -> "SkipList":
        """What is skipped in one stage, by index in the stage, in ascending order."""
        first = stage << STAGE_BITS
        begin, end = np.searchsorted(self._sorted, [first, first + (1 << STAGE_BITS)])
        return SkipList(tuple((self._sorted[begin:end] - first).tolist()))

    @property
    def last_stage(self) -> int:
        """The last stage in which something is skipped; 0 if nothing is."""
        return int(self._sorted[-1]) >> STAGE_BITS if len(self._sorted) else 0

    def pass_over(self, number: Ints) -> Ints:
        """The index of the `number`-th sample that is not skipped, in one stage."""
        # Before the k-th skipped index lie _sorted[k] - k samples that are used.
        used_before = self._sorted - np.arange(len(self._sorted))
        return number + np.searchsorted(used_before, number, side="right")

    def number_of(self, index: Ints) -> Ints:
        """How many samples are used before these indices of one stage; -1 where the sample itself is skipped."""
        before = np.searchsorted(self._sorted, index, side="left")
        return np.where(np.isin(index, self._sorted), -1, index - before)

    def check_continues(self, length: int, digest: str, used: int, stage: int = 0) -> None:
        """Raises ContractError unless this is the list a run used so far, plus indices it has not reached.

        `length` and `digest` are those of the list in the checkpoint, which stands in `stage` after `used` of its
        samples. An entry of a stage that is over would move the stages after it, so it is refused too.
        """
        standing = SkipList(self.indices[:length])
        if len(self.indices) < length or standing.digest != digest:
            raise ContractError(
                f"skip list: promised the checkpoint's {length} entries with digest {digest[:12]} at its head, "
                f"found {len(self.indices)} entries, head digest {standing.digest[:12]}; restore it, it may only grow"
            )
        reached = (stage << STAGE_BITS) + int(standing.of_stage(stage).pass_over(np.array([used]))[0])
        late = [index for index in self.indices[length:] if index < reached]
        if late:
            raise ContractError(
                f"skip list: promised new entries from sample {reached} on, found {late[:5]}, which the checkpoint has "
                "already used; resume from an earlier checkpoint"
            )


NO_SKIPS = SkipList()


def read_skip_list(run: Store, name: str) -> SkipList:
    """The skip list in `<run>/train/<name>`: one index a line, `#` begins a comment; an empty name means none.

    Raises ConfigError if the file is missing, ContractError if a line is not an index.
    """
    if not name:
        return NO_SKIPS
    path = f"train/{name}"
    if not run.exists(path):
        raise ConfigError(
            f"train.skip_file: promised a file {run.uri}/{path}, found none; create it, or leave the setting empty"
        )
    indices = []
    for number, line in enumerate(run.read_bytes(path).decode("utf-8", "replace").splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if entry and not (entry.isascii() and entry.isdigit() and int(entry) < 1 << 63):
            raise ContractError(
                f"{run.uri}/{path}, line {number}: promised a sample index from 0 to 2^63 - 1, found "
                f"{entry!r}; correct the line"
            )
        if entry:
            indices.append(int(entry))
    return SkipList(tuple(indices))


def append_to_skip_list(run: Store, name: str, indices: list[int], reason: str) -> SkipList:
    """Append global sample indices and a one-line reason to `<run>/train/<name>`; returns the list that now stands."""
    path = f"train/{name}"
    standing = run.read_bytes(path) if run.exists(path) else b""
    if standing and not standing.endswith(b"\n"):
        standing += b"\n"
    comment = " ".join(reason.split())
    run.write_atomic(path, standing + "".join(f"{index}  # {comment}\n" for index in indices).encode())
    return read_skip_list(run, name)
