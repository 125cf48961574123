"""Versions of a run by digest: `RUN@<digest>` is the run folder as one of its committed tables saw it.

A version is found by the digest of its manifest, never by its folder's name, so a manifest that was altered cannot be
addressed by what it once held.
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
    """A run folder whose `run.json` names the tables of one version; nothing can be committed through it."""

    def __init__(self, uri: str, tables: dict[str, str]):
        super().__init__(uri)
        self.tables = dict(tables)

    def __reduce__(self) -> tuple[Any, ...]:
        return PinnedRun, (self.address, self.tables)

    def read_json(self, name: str) -> Any:
        """The JSON value of a small file; of `run.json`, with the tables of this version."""
        found = super().read_json(name)
        return found | {"tables": self.tables} if name == RUN_NAME else found

    def write_atomic(self, name: str, data: bytes) -> None:
        """Raises ContractError: what is made from an earlier version would stand as if made from the current one."""
        raise ContractError(
            f"{self.uri}/{name}: expected to an earlier version of the run, which is only read. Write to the run "
            "itself, or run its recipe into a folder of its own."
        )


def open_run(address: str) -> Store:
    """The run folder that `RUN` or `RUN@<digest>` names; the digest, of a dataset or any table, may be its beginning.

    Raises ConfigError if no version of that digest stands, or several do.
    """
    match = ADDRESS.fullmatch(address)
    if match is None or Store(address).exists(RUN_NAME):
        return Store(address)
    run = Store(match["run"])
    if not run.exists(RUN_NAME):
        return Store(address)
    if not DIGEST.fullmatch(match["digest"]):
        raise ConfigError(
            f"{address}: expected a digest behind @, {MIN_DIGITS} to 64 hex digits, got {match['digest']!r}. "
            "`penstock lineage RUN` shows them."
        )
    table, version = _find(run, match["digest"])
    if read_run(run).tables.get(table) == version:
        return run
    return PinnedRun(run.address, pinned_tables(run, table, version))


def list_versions(run: Store, table: str) -> dict[str, TableVersion]:
    """Every committed version of a table by folder name, oldest first; one of another run by its way."""
    current = read_run(run).tables.get(table, "")
    names = [*_folders(run, table), *([current] if "/" in current else [])]
    folders = {name: run.child(f"{table}/{name}") for name in names}
    found = {
        name: TableVersion(folder, read_manifest(folder))
        for name, folder in folders.items()
        if folder.exists(MANIFEST_NAME)
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].manifest.run.started, item[0])))


def pinned_tables(run: Store, table: str, version: str) -> dict[str, str]:
    """Version folder of every table that one version was made from, its own included.

    Raises ContractError if two of them were made from different versions of one table.
    """
    pinned: dict[str, str] = {}
    waiting = [(table, version)]
    while waiting:
        name, folder = waiting.pop()
        if pinned.setdefault(name, folder) != folder:
            raise ContractError(
                f"{run.uri}/{table}/{version}: expected tables of one piece, got it made from {name}/{folder} and "
                f"{name}/{pinned[name]}. Run the recipe again."
            )
        lineage = read_manifest(run.child(f"{name}/{folder}")).run.lineage
        other = posixpath.dirname(posixpath.dirname(folder))  # what another run made was made from its own tables
        ways = {read: f"{other}/{read}/{made}" if other else made for read, made in lineage.items()}
        waiting += [(read, made) for read, made in ways.items() if is_table(run, read, made) and read != name]
    return pinned


def attach_run(new: Store, run: Store, tables: Sequence[str] | None = None) -> RunFile:
    """Let a new run folder stand on the tables that another one stands on (None: on all of them), and on its recipe.

    Nothing is copied: `run.json` names the version folders by their way from here, so both folders may move together.
    Raises ConfigError if the new folder stands on tables already, or lies on another filesystem.
    """
    if new.exists(RUN_NAME):
        raise ConfigError(f"{new.uri}: expected a new run folder, got a run. Name another folder.")
    if new.fs != run.fs:
        raise ConfigError(f"{new.uri}: expected a folder on the filesystem of {run.uri}, got another. Move it there.")
    standing = read_run(run)
    named = {name: made for name, made in standing.tables.items() if tables is None or name in tables}
    ways = {
        name: posixpath.relpath(run.child(f"{name}/{made}").root, new.child(name).root) for name, made in named.items()
    }
    state = RunFile(tables=ways, recipe=standing.recipe)
    write_run(new, state)
    return state


def attached_runs(run: Store) -> dict[str, list[str]]:
    """The runs below a run's folder that stand on tables of it: names of the tables, by folder relative to the run."""
    found: dict[str, list[str]] = {}
    for name in sorted(run.walk()):
        folder, _, file = name.rpartition("/")
        if file == RUN_NAME and folder:
            own = run.child(folder)
            ways = {table: own.child(f"{table}/{way}").root for table, way in read_run(own).tables.items()}
            shared = [table for table, root in ways.items() if root.startswith(run.child(table).root + "/")]
            found |= {folder: shared} if shared else {}
    return found


def check_own_tables(run: Store, what: str) -> None:
    """Raises ConfigError if a run stands on tables of another one, which it must not change."""
    if foreign := sorted(table for table, way in read_run(run).tables.items() if way.startswith("../")):
        there = run.child(f"{foreign[0]}/{read_run(run).tables[foreign[0]]}").uri.rsplit("/", 2)[0]
        raise ConfigError(
            f"{run.uri}: expected to `{what}` a run with tables of its own, got {', '.join(foreign)} of {there}. "
            "Do it there."
        )


def is_table(run: Store, name: str, version: str) -> bool:
    """Whether an entry of a lineage is a table of this run, and not a file or a table of another run."""
    return "/" not in name and ":" not in name and run.exists(f"{name}/{version}/{MANIFEST_NAME}")


def _find(run: Store, digest: str) -> tuple[str, str]:
    """Table and version folder of the manifest whose digest begins so; datasets are looked at first."""
    others = sorted(read_run(run).tables.keys() - {DATASET})
    for tables in ([DATASET], others):
        found = [(name, version) for name in tables for version in _matching(run, name, digest)]
        if len(found) == 1:
            return found[0]
        if found:
            places = ", ".join(f"{name}/{version}" for name, version in found)
            raise ConfigError(f"{run.uri}@{digest}: expected one version, got {places}. Give more digits.")
    standing = ", ".join(table.manifest.digest[:12] for table in list_versions(run, DATASET).values())
    raise ConfigError(
        f"{run.uri}@{digest}: expected a version of this digest, got none. Its datasets are {standing or 'none yet'}."
    )


def _matching(run: Store, table: str, digest: str) -> Iterator[str]:
    for version, found in list_versions(run, table).items():
        if found.manifest.digest.startswith(digest):
            yield version


def _folders(run: Store, table: str) -> list[str]:
    """The version folders of a table: their names are no secret of a manifest, so the folder itself is asked."""
    selector = pafs.FileSelector(run.path(table), allow_not_found=True)
    infos = run.fs.get_file_info(selector)
    return sorted(info.base_name for info in infos if info.type == pafs.FileType.Directory)
