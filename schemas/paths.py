"""The paths that a run's own files name: which of them stay inside of the run, or lead to the tables of another run.

A run folder may come from a stranger. A manifest, `run.json` or a checkpoint then names files that its author chose, so
each reader of a name checks it here before it opens, hashes or deletes anything.

Readers follow symbolic links, since a folder of a run may lie on another disk. Nothing is deleted through a link, and
training writes through none that leads out of the run. Of the folder of a table, which may hold files of its owner too,
only the files of versions are deleted.
"""

import os
import posixpath
import re
from collections.abc import Iterable

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tables import TABLES

PLACE = re.compile(rf"(?P<table>{'|'.join(TABLES)})/(?P<version>v-[0-9a-f]{{12}})/(?P<rest>.+)", re.DOTALL)
"""Path of a file of a version of a table, relative to the run. Other files of a run's tables are never deleted."""

PLAN_NAME = "train/plan.json"
METRICS_NAME = "train/metrics.jsonl"
RANKS_NAME = "train/ranks.jsonl"
HARNESS_NAME = "train/harness.jsonl"
"""Files of training that both halves read: plan, metrics of each step, figures of each rank, downstream results."""

DELTA_LOG = "_delta_log"
"""Folder in the folder of a table with the log that `penstock register --delta` writes."""

REMOTE = frozenset(("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"))
"""Schemes of addresses of storage that is opened with the credentials of this process."""

FORBIDDEN = frozenset("\0\\")
"""A name with a NUL cannot be opened; a backslash separates folders on Windows."""


def is_below(path: str, levels: int = 0) -> bool:
    """Return True if a relative path is plain and names a file below a folder, or below one `levels` above it.

    A plain path has no empty, `.` or inner `..` segment and is not absolute. After `..`, it names at least a folder and
    a file there.
    """
    segments = path.split("/")
    names = segments[_num_parents(segments) :]
    above = len(segments) - len(names)
    return above <= levels and len(names) > (above > 0) and all(map(_is_name, names))


def is_version(path: str, table: str) -> bool:
    """Return True if a path, relative to the folder of a table, names a version: of this run or of another run.

    It is a folder there, such as `v-…`, or leads to the folder of this table in another run, as
    `../../../tokens/v-…` does.
    """
    segments = path.split("/")
    above = _num_parents(segments)
    names = segments[above:]
    belongs = names[-2:-1] == [table] if above else len(names) == 1
    return belongs and all(map(_is_name, names))


def check_deletable(folder: Store, name: str, levels: int = 0) -> None:
    """Raise ContractError if a symbolic link below a local folder leads to the file of this name.

    `levels`: the number of folders from `folder` up to that folder, such as 2 from a version of a table to its run.
    """
    if not folder.is_local:
        return
    for _ in range(levels):
        name, folder = f"{posixpath.basename(folder.root)}/{name}", folder.child("..")
    root, place = os.path.realpath(folder.root), os.path.realpath(os.path.dirname(folder.path(name)))
    if os.path.commonpath([root, place]) != root:
        raise ContractError(
            f"{folder.uri}/{name}: expected a file of the run to delete, got one in {place}, where a symbolic link "
            "leads. Delete the link, and the files that it leads to if they belong to the run."
        )


def check_own_folders(run: Store, name: str) -> None:
    """Raise ContractError if a folder of a local run, or a folder in it, is a symbolic link that leads out of the run.

    `name`: the folder, relative to the run. The run folder itself may be reached through a link.
    """
    if not run.is_local:
        return
    root, waiting, seen = os.path.realpath(run.root), [run.path(name)], set[str]()
    while waiting:
        place = waiting.pop()
        real = os.path.realpath(place)
        if os.path.commonpath([root, real]) != root:
            raise _link_of_run(place)
        if real not in seen and os.path.isdir(real):
            seen.add(real)  # a link may lead to a folder above it
            waiting += [entry.path for entry in os.scandir(place) if os.path.isdir(entry.path)]


def check_unlinked_tables(run: Store, tables: Iterable[str] = TABLES) -> None:
    """Raise ContractError if the folder of a table of a local run, or a folder of a version, is a symbolic link.

    Such a link may lead to another table or out of the run, so nothing can be deleted or replaced there.
    """
    for table in tables if run.is_local else ():
        top = run.path(table)
        if os.path.islink(top):
            raise _link_of_run(top)
        for folder, names, _ in os.walk(top):
            if folder == top:  # the owner may keep other folders here
                names[:] = [name for name in names if PLACE.fullmatch(f"{table}/{name}/x")]
            for place in (f"{folder}/{name}" for name in names):
                if os.path.islink(place):
                    raise _link_of_run(place)


def _link_of_run(place: str) -> ContractError:
    return ContractError(
        f"{place}: expected a folder of the run to write to and delete from, got a symbolic link to "
        f"{os.path.realpath(place)}. Replace the link by the folder, or mount the other disk in its place."
    )


def _num_parents(segments: list[str]) -> int:
    """Return the number of leading `..` segments."""
    return next((number for number, segment in enumerate(segments) if segment != ".."), len(segments))


def _is_name(segment: str) -> bool:
    return segment not in ("", ".", "..") and not FORBIDDEN.intersection(segment)


def is_on_known_server(run: Store, address: str) -> bool:
    """Return True if an address that a file of a run names leads to no server that only this file names.

    The credentials of this process would be sent there. Known are the server of the run itself, and those of S3 and GCS
    that the environment or the provider decides. Other addresses than those of storage are read without credentials.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in REMOTE:
        return True
    known_scheme, _, known = run.address.partition("://")
    server, known_server = (each.partition("/")[0].rpartition("@")[2] for each in (rest, known))
    has_options = "?" in rest and rest.partition("?")[2] != known.partition("?")[2]
    return not has_options and (scheme in ("s3", "gs", "gcs") or (scheme, server) == (known_scheme, known_server))
