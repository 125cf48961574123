"""Files of a run folder that nothing uses: what killed processes left, and what later results replaced.

A file of a table is used if the manifest of a committed version names it, or if a step that is not complete would
resume from it. Versions with a manifest stay, also those that `run.json` no longer names and those that a takedown
with `--keep-old` keeps. Run folders inside the run folder are not searched, and the files that they use stay.
"""

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import pyarrow.fs as pafs
from pydantic import ValidationError

from pipeline.engine.code_digest import code_digest, libraries_digest
from pipeline.engine.finished_parts import FINISHED
from pipeline.engine.guard import PARTS
from pipeline.engine.part import FRAMES, SCRATCH, PartResult
from schemas.errors import ConfigError, ContractError
from schemas.leases import delete_files
from schemas.manifest import MANIFEST_NAME, REPLACED_NAME, RUN_NAME, read_manifest
from schemas.paths import PLACE
from schemas.s3_requests import SCHEME, S3Requests, Upload
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import PENDING_NAME

TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.partial$")
"""Name of a file that is written under this name and then renamed."""
CHECKPOINT = re.compile(r"(train/checkpoints/step-\d{6,})/")
CHECKPOINT_METADATA = "checkpoint.json"
RESULT = re.compile(rf"(?P<folder>.*/){PARTS}/part-\d{{5,}}\.json")
"""Path of the stored result of a part; its files are relative to the folder before `parts/`."""
LISTING = re.compile(rf"(?P<folder>.*/{SCRATCH}/(?:.*/)?)[^/]+\.json")
"""Path of the list of a stored frame; the files of the frame are relative to its folder."""

REPAIR = "repair"
"""Folder of a run in which `penstock repair` builds tables again. It is deleted at the end of a repair."""
REPAIR_FILE = re.compile(rf"{REPAIR}/(?:{'|'.join(TABLES)})/.+")
"""Path of a file that a repair writes."""

READ_AT_ONCE = 32
"""Number of results of finished parts that are read at a time."""

UNNAMED = "no manifest names it"
REPLACED_PART = "result of a part whose table is complete"
LEFT_PART = "left by a killed attempt"
OTHER_CODE = "written by other code or libraries, so a resumed step would write it again"
LOST_PART = "result of a part whose files are gone"
STALE = "of a version that was not completed, and another one was completed later"
TAKEN_DOWN = "of a version that a takedown has replaced and deleted"
UNREADABLE = "intermediate result that cannot be read"
HALF_CHECKPOINT = "of a checkpoint that was not completed"
HALF_WRITE = "file that was not completed"
HALF_UPLOAD = "upload to the object store that was not completed"


@dataclass(frozen=True)
class Garbage:
    """A file, or an unfinished upload, that nothing uses."""

    path: str
    """Path relative to the run folder."""
    bytes: int
    why: str
    upload: Upload | None = None
    """The upload, if this is no file."""


@dataclass(frozen=True)
class _File:
    bytes: int
    changed: float
    """Time of the last change [s since 1970], by the clock of the storage."""


def find_garbage(run: Store) -> list[Garbage]:
    """Return what nothing uses in a run folder, sorted by path.

    The caller holds the exclusive lock on the tables. Raises ConfigError if the folder has no `run.json`, or an
    unfinished takedown. Raises ContractError if a manifest cannot be read.
    """
    if not run.exists(RUN_NAME):
        raise ConfigError(f"{run.uri}: expected a run folder, got one without {RUN_NAME}. Correct the path.")
    if run.exists(PENDING_NAME):
        raise ConfigError(
            f"{run.uri}: expected no unfinished takedown, got one, which needs files that no manifest names yet. "
            f"Finish it with `penstock takedown {quote(run.uri)}`, without other options."
        )
    every = _list_files(run)
    inner = _inner_runs(every)
    files = {name: file for name, file in every.items() if not name.startswith(inner)}
    used = {*_named_by_manifests(run, every), *_named_by_manifests(run, _linked_manifests(run))}
    reasons, resumable = _finished_parts(run, files, used)
    for name in files:
        if TEMPORARY.search(name):
            reasons[name] = HALF_WRITE
        elif REPAIR_FILE.fullmatch(name):
            reasons[name] = LEFT_PART
        elif (match := CHECKPOINT.match(name)) and f"{match[1]}/{CHECKPOINT_METADATA}" not in files:
            reasons[name] = HALF_CHECKPOINT
    for names in _by_version(files).values():
        version = {name: files[name] for name in names}
        reasons |= dict(_garbage_of_version(run, version, files, (used, resumable)))
    found = [Garbage(name, files[name].bytes, why) for name, why in reasons.items() if name not in used]
    if run.uri.startswith(SCHEME):
        # An export may be uploading to another folder of the run: it takes no lock on it.
        uploads = (upload for upload in S3Requests(run).uploads() if not upload.name.startswith(inner))
        kinds = (PLACE.fullmatch, REPAIR_FILE.fullmatch, CHECKPOINT.match)
        own = (upload for upload in uploads if any(kind(upload.name) for kind in kinds))
        found += [Garbage(upload.name, upload.bytes, HALF_UPLOAD, upload) for upload in own]
    return sorted(found, key=lambda each: each.path)


def remove_garbage(run: Store, garbage: Sequence[Garbage]) -> None:
    """Remove what `find_garbage` returned, and local folders that are empty afterwards.

    The lists of intermediate files go first, so that a killed process leaves no list without its files.
    """
    files = [each.path for each in garbage if each.upload is None]
    lists = [name for name in files if any(kind.fullmatch(name) for kind in (RESULT, LISTING, FINISHED))]
    for names in (lists, sorted({*files} - {*lists})):
        delete_files(run, names)
        if run.is_local:
            _remove_empty_folders(run, names)
    for upload in (each.upload for each in garbage if each.upload is not None):
        S3Requests(run).abort(upload)


def _list_files(run: Store) -> dict[str, _File]:
    """Return every file below a run folder by path. Links to folders are not followed."""
    if not run.is_local:
        infos = run.fs.get_file_info(pafs.FileSelector(run.root, recursive=True))
        return {
            info.path[len(run.root) + 1 :]: _File(info.size, info.mtime_ns / 1e9)
            for info in infos
            if info.type == pafs.FileType.File
        }
    files = {}
    for folder, _, names in os.walk(run.root):
        for path in (Path(folder, name) for name in names):
            state = path.lstat()
            files[path.relative_to(run.root).as_posix()] = _File(state.st_size, state.st_mtime)
    return files


def _linked_manifests(run: Store) -> Iterator[str]:
    """Yield the manifests of versions whose folder is reached through a link, which `_list_files` does not follow.

    A version that is moved to another disk still names files of other versions.
    """
    for table in TABLES if run.is_local else ():
        folder = Path(run.root, table)
        for version in folder.iterdir() if folder.is_dir() else ():
            if (folder.is_symlink() or version.is_symlink()) and (version / MANIFEST_NAME).is_file():
                yield f"{table}/{version.name}/{MANIFEST_NAME}"


def _inner_runs(files: Iterable[str]) -> tuple[str, ...]:
    """Return the subfolders that are run folders themselves, each with a slash at the end."""
    return tuple(f"{posixpath.dirname(name)}/" for name in files if name.endswith(f"/{RUN_NAME}"))


def _by_version(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of all tables by the name of their version folder, which the tables of a step share."""
    versions: dict[str, list[str]] = defaultdict(list)
    for name in files:
        if match := PLACE.fullmatch(name):
            versions[match["version"]].append(name)
    return versions


def _named_by_manifests(run: Store, files: Iterable[str]) -> Iterator[str]:
    """Yield the paths of every manifest of a version of a table, and of the files that it names, relative to `run`.

    The manifests of run folders inside the run folder count too. A named path may lie outside of the run folder.
    """
    for name in files:
        parts = name.split("/")
        if len(parts) < 3 or parts[-1] != MANIFEST_NAME or parts[-3] not in TABLES:
            continue
        folder = posixpath.dirname(name)
        yield name
        paths = read_manifest(run.child(folder)).run.paths.values()
        yield from (posixpath.normpath(f"{folder}/{path}") for path in paths)


def _finished_parts(run: Store, files: Mapping[str, _File], used: set[str]) -> tuple[dict[str, str], set[str]]:
    """Return the results of finished parts that no run would take over, with the reasons, and the versions of others.

    The files of the others are added to `used`.
    """
    names = [name for name in files if FINISHED.fullmatch(name)]
    with ThreadPoolExecutor(max_workers=READ_AT_ONCE) as pool:
        lists = [*pool.map(partial(_read_list, run), names)]
    reasons: dict[str, str] = {}
    resumable, kept = set[str](), set[str]()
    for name, found in zip(names, lists, strict=True):
        is_current, paths = found or (False, [])
        own = {f"{table}/{path}" for table in TABLES for path in paths} & files.keys()
        tables, versions = {path.split("/")[0] for path in own}, {path.split("/")[0] for path in paths}
        later = [time for version in versions for time in _completed(files, tables, version)]
        if found is None:
            reasons[name] = UNREADABLE
        elif not is_current:
            reasons[name] = OTHER_CODE
        elif len(own) < len(paths):
            reasons[name] = LOST_PART
        elif not own <= used and any(files[name].changed < time for time in later):
            reasons[name] = STALE
        else:
            kept |= own
            resumable |= versions
    used |= kept
    return reasons, resumable


def _garbage_of_version(
    run: Store, own: dict[str, _File], files: dict[str, _File], known: tuple[set[str], set[str]]
) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) of the files of one version, of all tables of a step, that no step would resume from.

    `known`: the used files, and the versions with finished parts that a run may take over.
    """
    used, resumable = known
    tables = {name.partition("/")[0] for name in own}
    version = next(iter(own)).split("/")[1]
    complete = {table for table in tables if f"{table}/{version}/{MANIFEST_NAME}" in own}
    results = {name: _read_list(run, name) for name in own if RESULT.fullmatch(name) or LISTING.fullmatch(name)}
    lists = {name: found for name, found in results.items() if name.partition("/")[0] not in complete}
    changed = max((own[name].changed for name in lists), default=0.0)
    is_stale = version not in resumable and any(changed < other for other in _completed(files, tables, version))
    resumed = {name for name, found in lists.items() if found is not None and found[0]}
    kept = {path for name in resumed for path in _files_of(name, lists[name], tables)} if not is_stale else set()
    for name in own.keys() - used - kept:
        table, _, rest = name.split("/", 2)
        if rest == REPLACED_NAME or (name in resumed and not is_stale):
            continue
        if name in results:
            other = UNREADABLE if results[name] is None else OTHER_CODE
            yield name, REPLACED_PART if table in complete else STALE if is_stale else other
        elif table not in complete and f"{table}/{version}/{REPLACED_NAME}" in own:
            yield name, TAKEN_DOWN
        else:
            yield name, UNNAMED if table in complete else STALE if is_stale else LEFT_PART


def _completed(files: Mapping[str, _File], tables: set[str], version: str) -> Iterator[float]:
    """Yield the times at which other versions of tables were completed."""
    for name, file in files.items():
        match = PLACE.fullmatch(name)
        if match and match["rest"] == MANIFEST_NAME and match["table"] in tables and match["version"] != version:
            yield file.changed


_List = tuple[bool, list[str]]
"""True if this code wrote a list of intermediate files with these libraries, and the paths in the list."""


def _read_list(run: Store, name: str) -> _List | None:
    """Return the content of the result of a part, or of the list of a stored frame; None if it cannot be read."""
    try:
        value: Any = run.read_json(name)
        if RESULT.fullmatch(name) or FINISHED.fullmatch(name):
            result = PartResult.from_json(value)
            return _is_current(result.code, result.libraries), [written.path for written in result.files.values()]
        stored = (file for frame in value[FRAMES].values() for file in frame["files"])
        return _is_current(value["code"], value.get("libraries", "")), [file["path"] for file in stored]
    except (ContractError, ValidationError, KeyError, TypeError, AttributeError):
        return None


def _is_current(code: str, libraries: str) -> bool:
    return (code, libraries) == (code_digest(), libraries_digest())


def _files_of(name: str, found: _List | None, tables: set[str]) -> Iterator[str]:
    """Yield the files in a list of intermediate files, relative to the run folder.

    The result of a part is in the folder of the step's first table, and its files may be those of any table of it.
    """
    match = RESULT.fullmatch(name) or LISTING.fullmatch(name)
    if match is None or found is None:
        return
    inside = match["folder"].partition("/")[2]
    yield from (posixpath.normpath(f"{table}/{inside}{path}") for table in tables for path in found[1])


def _remove_empty_folders(run: Store, names: Sequence[str]) -> None:
    """Remove the local folders of removed files that are empty now, and make the removal durable."""
    folders = {posixpath.dirname(name) for name in names} - {""}
    for folder in sorted(folders, key=lambda each: each.count("/"), reverse=True):
        while folder:
            with suppress(OSError):
                os.rmdir(run.path(folder))  # fails unless the folder is empty
            if os.path.isdir(run.path(folder)):
                run.sync(folder)
                break
            folder = posixpath.dirname(folder)
