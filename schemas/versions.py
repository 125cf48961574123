"""Versions of a run: `RUN@<digest>` opens a run folder with one committed version and the tables it was made from.

A version is looked up by the digest of its manifest, never by the name of its folder. A version whose manifest was
altered is therefore not found. A new run folder can also use the tables of another run without copying them.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.fs as pafs

from schemas.errors import ConfigError, ContractError
from schemas.manifest import MANIFEST_NAME, RUN_NAME, RunFile, TableVersion, read_manifest, read_run, write_run
from schemas.storage import Store

DATASET = "tokens"
MIN_DIGITS = 6
ADDRESS = re.compile(r"(?P<run>.+)@(?P<digest>[^@/]*)")
DIGEST = re.compile(rf"[0-9a-f]{{{MIN_DIGITS},64}}")


class PinnedRun(Store):
    """A read-only run folder whose `run.json` names one committed version and the tables that it was made from."""

    def __init__(self, uri: str, tables: dict[str, str]):
        super().__init__(uri)
        self.tables = dict(tables)

    def __reduce__(self) -> tuple[Any, ...]:
        return PinnedRun, (self.address, self.tables)

    def read_json(self, name: str) -> Any:
        """Return the JSON value of a small file; in `run.json`, the tables are replaced by the pinned ones."""
        value = super().read_json(name)
        return value | {"tables": self.tables} if name == RUN_NAME else value

    def write_atomic(self, name: str, data: bytes) -> None:
        """Always raise ContractError: a file written for an earlier version would seem to describe the current one."""
        raise ContractError(
            f"{self.uri}/{name}: expected a run folder to write to, got an earlier version of one, which is read-only. "
            "Name the run folder without @<digest>."
        )


def open_run(address: str) -> Store:
    """Return the run folder that `RUN` or `RUN@<digest>` names.

    The digest is that of a dataset or of any other table, and may be abbreviated. Raises ConfigError if the digest
    matches no version or several versions.
    """
    match = ADDRESS.fullmatch(address)
    if match is None or Store(address).exists(RUN_NAME):
        return Store(address)
    run = Store(match["run"])
    if not run.exists(RUN_NAME):
        return Store(address)
    if not DIGEST.fullmatch(match["digest"]):
        raise ConfigError(
            f"{address}: expected a digest after @, {MIN_DIGITS} to 64 hex digits, got {match['digest']!r}. List the "
            "digests with `penstock lineage RUN`."
        )
    table, version = _find(run, match["digest"])
    if read_run(run).tables.get(table) == version:
        return run
    return PinnedRun(run.address, pinned_tables(run, table, version))


def list_versions(run: Store, table: str) -> dict[str, TableVersion]:
    """Return every committed version of a table, oldest first, by the name of its folder.

    If the current version is a folder of another run, the relative path of this folder is its name.
    """
    current = read_run(run).tables.get(table, "")
    names = [*_folders(run, table), *([current] if "/" in current else [])]
    folders = {name: run.child(f"{table}/{name}") for name in names}
    versions = {
        name: TableVersion(folder, read_manifest(folder))
        for name, folder in folders.items()
        if folder.exists(MANIFEST_NAME)
    }
    return dict(sorted(versions.items(), key=lambda item: (item[1].manifest.run.started, item[0])))


def pinned_tables(run: Store, table: str, version: str) -> dict[str, str]:
    """Return, by table, the version folder of `table` and of every table of the run that this version was made from.

    Raises ContractError if two of these tables were made from different versions of a third one.
    """
    pinned: dict[str, str] = {}
    waiting = [(table, version)]
    while waiting:
        name, folder = waiting.pop()
        if pinned.setdefault(name, folder) != folder:
            raise ContractError(
                f"{run.uri}/{table}/{version}: expected a table made from one version of {name}, got one made from "
                f"{name}/{folder} and {name}/{pinned[name]}. Run `penstock run` again."
            )
        lineage = read_manifest(run.child(f"{name}/{folder}")).run.lineage
        other = posixpath.dirname(posixpath.dirname(folder))  # a table of another run was made from tables of that run
        paths = {read: f"{other}/{read}/{made}" if other else made for read, made in lineage.items()}
        waiting += [(read, made) for read, made in paths.items() if is_table(run, read, made) and read != name]
    return pinned


def attach_run(new: Store, run: Store, tables: Sequence[str] | None = None) -> RunFile:
    """Write the `run.json` of a new run folder that uses the recipe and some tables of another run (None: all tables).

    No table is copied: `run.json` names the version folders by relative paths, so both folders may be moved together.
    Raises ConfigError if the new folder is a run already, or is on another filesystem.
    """
    if new.exists(RUN_NAME):
        raise ConfigError(f"{new.uri}: expected a new run folder, got an existing run. Name another folder.")
    if new.fs != run.fs:
        raise ConfigError(
            f"{new.uri}: expected a folder on the filesystem of {run.uri}, got another filesystem. Name a folder on "
            f"the filesystem of {run.uri}."
        )
    current = read_run(run)
    versions = {name: version for name, version in current.tables.items() if tables is None or name in tables}
    paths = {
        name: posixpath.relpath(run.child(f"{name}/{version}").root, new.child(name).root)
        for name, version in versions.items()
    }
    state = RunFile(tables=paths, recipe=current.recipe)
    write_run(new, state)
    return state


def attached_runs(run: Store) -> dict[str, list[str]]:
    """Find the runs in subfolders of a run that use its tables; return the names of these tables by subfolder."""
    attached: dict[str, list[str]] = {}
    for name in sorted(run.walk()):
        folder, _, file = name.rpartition("/")
        if file == RUN_NAME and folder:
            own = run.child(folder)
            roots = {table: own.child(f"{table}/{version}").root for table, version in read_run(own).tables.items()}
            shared = [table for table, root in roots.items() if root.startswith(run.child(table).root + "/")]
            attached |= {folder: shared} if shared else {}
    return attached


def check_own_tables(run: Store, what: str) -> None:
    """Raise ConfigError if a run uses tables of another run, because the command `what` would change that other run."""
    if foreign := sorted(table for table, path in read_run(run).tables.items() if path.startswith("../")):
        owner = run.child(f"{foreign[0]}/{read_run(run).tables[foreign[0]]}").uri.rsplit("/", 2)[0]
        raise ConfigError(
            f"{run.uri}: expected a run with its own tables for `{what}`, got {', '.join(foreign)} of {owner}. Use the "
            f"run folder {owner} instead."
        )


def is_table(run: Store, name: str, version: str) -> bool:
    """Return True if an entry of a manifest's lineage is a table of this run, not a file or a table of another run."""
    return "/" not in name and ":" not in name and run.exists(f"{name}/{version}/{MANIFEST_NAME}")


def _find(run: Store, digest: str) -> tuple[str, str]:
    """Return the table and version whose digest starts with `digest`; datasets are looked up first."""
    others = sorted(read_run(run).tables.keys() - {DATASET})
    for tables in ([DATASET], others):
        found = [(name, version) for name in tables for version in _matching(run, name, digest)]
        if len(found) == 1:
            return found[0]
        if found:
            folders = ", ".join(f"{name}/{version}" for name, version in found)
            raise ConfigError(
                f"{run.uri}@{digest}: expected one version, got {folders}. Give more digits of the digest."
            )
    datasets = ", ".join(table.manifest.digest[:12] for table in list_versions(run, DATASET).values())
    raise ConfigError(
        f"{run.uri}@{digest}: expected a version with this digest, got none. Name one of the datasets: "
        f"{datasets or 'none yet'}."
    )


def _matching(run: Store, table: str, digest: str) -> Iterator[str]:
    """Yield the version folders of a table whose digest starts with `digest`."""
    for version, committed in list_versions(run, table).items():
        if committed.manifest.digest.startswith(digest):
            yield version


def _folders(run: Store, table: str) -> list[str]:
    """Return the names of all version folders of a table, from a listing, because no manifest names them all."""
    selector = pafs.FileSelector(run.path(table), allow_not_found=True)
    infos = run.fs.get_file_info(selector)
    return sorted(info.base_name for info in infos if info.type == pafs.FileType.Directory)
