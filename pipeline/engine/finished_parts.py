"""Parts that later versions of a table take over: their results, stored under a digest of what a part is made from.

A version of a table follows from all its inputs, so one archive more makes another version. Its parts follow from their
own inputs: a part that an earlier version of the same run has, made by the same code and the same libraries, is not
written again. The later manifest names the file of the earlier version, with the same bytes. The results lie in
`finished_parts/STEP/` of the run, outside of the versions, and stay there: `penstock gc` deletes those that no run
could use, and a takedown all of them.
"""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.leases import delete_files
from schemas.paths import check_deletable, is_below
from schemas.storage import Store

FOLDER = "finished_parts"
"""Folder of a run with the results, by step."""
FINISHED = re.compile(rf"{FOLDER}/(?P<table>[a-z_]+)/[0-9a-f]{{32}}\.json")
"""Path of a result, relative to the run."""
_STORED = re.compile(r"(?P<version>v-[0-9a-f]{12})/(?P<path>.+)", re.DOTALL)


@dataclass(frozen=True)
class FinishedPart:
    """Where the result of one part is stored for all versions of its tables."""

    folder: Store
    name: str

    def stored_path(self, path: str, place: Store) -> str:
        """Return the path of a file of the version in `place`, relative to the folder of the table."""
        return f"{posixpath.basename(place.root)}/{path}"

    def path_in(self, place: Store, stored: str) -> str:
        """Return a stored path relative to the version in `place`.

        Raises ContractError if it leads out of the folder of the table.
        """
        match = _STORED.fullmatch(stored)
        if match is None or not is_below(match["path"]):
            raise ContractError(
                f"{self.folder.uri}/{self.name}: expected a file of a version of a table, got {stored!r:.200}. Delete "
                "the file."
            )
        return match["path"] if match["version"] == posixpath.basename(place.root) else f"../{stored}"


@dataclass(frozen=True)
class FinishedParts:
    """The parts of a step that versions of its tables share."""

    folder: Store
    made_with: str
    """Digest of the stages, settings, models and libraries with which parts are made."""
    by_source: Mapping[str, str]
    """The same with those of one source alone, by source."""

    def part(self, made_from: Any, source: str | None = None) -> FinishedPart:
        """Return the place of the result of a part. `made_from`: JSON values that identify all that the part reads.

        `source`: that of the part, if only its own stages, settings and models matter; None = those of the run.
        """
        made_with = self.made_with if source is None else self.by_source[source]
        return FinishedPart(self.folder, f"{digest_of([made_with, made_from])[:32]}.json")


def delete_finished_parts(run: Store) -> None:
    """Delete the results of all parts of a run, so that no later version takes over what they name.

    Raises ContractError if a symbolic link leads to one of them.
    """
    names = [name for name in run.child(FOLDER).walk() if FINISHED.fullmatch(f"{FOLDER}/{name}")]
    for folder in {posixpath.dirname(name) for name in names}:
        check_deletable(run, f"{FOLDER}/{folder}/x")
    delete_files(run, [f"{FOLDER}/{name}" for name in names])
