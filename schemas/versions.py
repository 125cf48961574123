"""Versions of a run: `RUN@<digest>` opens a run folder with one committed version and the tables it was made from.

A version is looked up by the digest of its manifest, never by the name of its folder. A version whose manifest was
altered is therefore not found. A new run folder can also use the tables of another run without copying them.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow.fs as pafs

from schemas.errors import ConfigError, ContractError, reading
from schemas.logs import LOGGER
from schemas.manifest import (
    MANIFEST_NAME,
    MEMBER_INPUT,
    RECIPE,
    RUN_NAME,
    RunFile,
    TableVersion,
    open_table,
    read_manifest,
    read_run,
    write_run,
)
from schemas.storage import Store
from schemas.tables import TABLES

DATASET = "tokens"
MIN_DIGITS = 6
ADDRESS = re.compile(r"(?P<run>.+)@(?P<digest>[^@/]*)")
DIGEST = re.compile(rf"[0-9a-f]{{{MIN_DIGITS},64}}")


class PinnedRun(Store):
    """A read-only run folder.

    Its `run.json` names one committed version and the tables that this version was made from, and has the recipe of the
    run that made it.
    """

    def __init__(self, uri: str, tables: dict[str, str], digest: str, recipe: dict[str, Any]):
        """`digest`: that of the version. `recipe`: the values of its recipe; empty = not recorded."""
        super().__init__(uri)
        self.tables, self.digest, self.recipe = dict(tables), digest, recipe

    def __reduce__(self) -> tuple[Any, ...]:
        return PinnedRun, (self.address, self.tables, self.digest, self.recipe)

    @property
    def pinned_address(self) -> str:
        """What `open_run` opens as this version."""
        return f"{self.address}@{self.digest}"

    def read_json(self, name: str) -> Any:
        """Return the JSON value of a small file. `run.json` has the pinned versions and their recipe."""
        value = super().read_json(name)
        with reading(f"{self.uri}/{name}", "a JSON object"):
            return value | {"tables": self.tables, "recipe": self.recipe} if name == RUN_NAME else value

    def write_atomic(self, name: str, data: bytes) -> None:
        """Always raise ContractError, because an earlier version is read-only."""
        raise ContractError(
            f"{self.uri}/{name}: expected a run folder to write to, got an earlier version of one, which is read-only. "
            "Name the run folder without @<digest>."
        )


class LinkedRun(Store):
    """A run folder on the dataset of another run, with the tables there that this dataset was made from.

    Its `run.json`, which is read-only, names these tables too. Other files are written to the folder as usual.
    """

    def __init__(self, uri: str, linked: dict[str, str]):
        super().__init__(uri)
        self.linked = dict(linked)

    def __reduce__(self) -> tuple[Any, ...]:
        return LinkedRun, (self.address, self.linked)

    def read_json(self, name: str) -> Any:
        """Return the JSON value of a small file. In `run.json`, `tables` names the tables of the other run too."""
        value = super().read_json(name)
        with reading(f"{self.uri}/{name}", "a JSON object with the tables of the run"):
            return value | {"tables": self.linked | value["tables"]} if name == RUN_NAME else value

    def write_atomic(self, name: str, data: bytes) -> None:
        """Replace a file atomically. Raises ContractError for `run.json`, which would name the other run's tables."""
        if name == RUN_NAME:
            raise ContractError(
                f"{self.uri}/{name}: expected a run folder of its own, got one opened with the tables of another run. "
                "Open it without them."
            )
        super().write_atomic(name, data)


def address_to_read(run: Store) -> str:
    """Return the address that `open_run_to_read` opens as the same version of a run."""
    return run.pinned_address if isinstance(run, PinnedRun) else run.address


def open_run_to_read(address: str) -> Store:
    """Return the run folder that `RUN` or `RUN@<digest>` names, as `open_run` does, for a command that reads tables.

    A run on the dataset of another run also has the tables there that the dataset was made from, as far as they exist.
    """
    run = open_run(address)
    tables = read_run(run).tables
    if isinstance(run, PinnedRun) or "documents" in tables or not tables.get(DATASET, "").startswith("../"):
        return run
    linked = _made_from(run, tables[DATASET])
    return LinkedRun(run.address, linked) if linked else run


def _made_from(run: Store, version: str) -> dict[str, str]:
    """Return table -> version folder, relative to `run`, of the tables that a dataset of another run was made from."""
    paths: dict[str, str] = {}
    waiting = [run.child(f"{DATASET}/{version}")]
    while waiting:
        folder = waiting.pop()
        owner, lineage = folder.child("../.."), read_manifest(folder).run.lineage
        attached = read_run(owner).tables
        for name, made in lineage.items():
            # The other run may itself use the table of a third run.
            places = [made, *([attached[name]] if attached.get(name, "").endswith(f"/{made}") else [])]
            place = next((place for place in places if is_table(owner, name, place)), None)
            if place is not None and name not in paths:
                waiting.append(owner.child(f"{name}/{place}"))
                paths[name] = posixpath.relpath(waiting[-1].root, run.child(name).root)
    return paths


def open_run(address: str) -> Store:
    """Return the run folder that `RUN` or `RUN@<digest>` names.

    The digest is that of a dataset or of any other table, and may be abbreviated. Raises ConfigError if the digest
    matches no version or several versions.
    """
    match = ADDRESS.fullmatch(address)
    has_options = match is not None and "://" in address and "?" in match["run"]  # a digest follows them, and no name
    if match is None or (not has_options and Store(address).exists(RUN_NAME)):
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
    if read_run(run).tables.get(table) == version and replaced_input(run, table) is None:
        return run
    made = read_manifest(run.child(f"{table}/{version}"))
    return PinnedRun(run.address, pinned_tables(run, table, version), made.digest, made.run.notes.get(RECIPE, {}))


def list_versions(run: Store, table: str) -> dict[str, TableVersion]:
    """Return the committed versions of a table, oldest first, by the name of the version folder.

    If the current version is in another run, its name is the relative path of the folder there.
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
    """Return table -> version folder, for `version` of `table` and the tables of the run that it was made from.

    Raises ContractError if it was made from two versions of the same table.
    """
    pinned: dict[str, str] = {}
    waiting = [(table, version)]
    while waiting:
        name, folder = waiting.pop()
        if pinned.setdefault(name, folder) != folder:
            raise ContractError(
                f"{run.uri}/{table}/{version}: expected one version of {name} in the lineage, got {name}/{folder} and "
                f"{name}/{pinned[name]}. Run `penstock run` again."
            )
        lineage = read_manifest(run.child(f"{name}/{folder}")).run.lineage
        other = posixpath.dirname(posixpath.dirname(folder))  # a table of another run was made from tables of that run
        paths = {read: f"{other}/{read}/{made}" if other else made for read, made in lineage.items()}
        waiting += [(read, made) for read, made in paths.items() if is_table(run, read, made) and read != name]
    return pinned


def replaced_input(run: Store, table: str) -> str | None:
    """Return a table of a run whose current version is not the one that `table` was made from; None = there is none.

    A run has such tables after a command with other settings ended before it had built all of them. Tables of other
    runs, and those whose manifest cannot be read, count as current.
    """
    tables = read_run(run).tables
    if table not in tables or "/" in tables[table]:
        return None
    try:
        for name, digest in open_table(run, table)[1].tables_read.items():
            if name not in tables or open_table(run, name)[1].digest != digest:
                return name
            if (deeper := replaced_input(run, name)) is not None:
                return deeper
    except ContractError:
        return None  # the dataset needs no other table, so a user may have removed them
    return None


def warn_of_replaced_tables(runs: Sequence[Store]) -> None:
    """Print a line for each run whose dataset was made with other settings than its recipe has."""
    for run in runs:
        if (name := replaced_input(run, DATASET)) is not None:
            LOGGER.warning(
                f"penstock: {run.uri}: the dataset was made with other settings than those in {RUN_NAME}: the table "
                f"`{name}` has changed since. `penstock run` makes a dataset with these settings."
            )


def attach_run(new: Store, run: Store, tables: Sequence[str] | None = None) -> RunFile:
    """Write and return the `run.json` of a new run that uses the recipe and tables of another run, without copies.

    `tables`: the names of these tables; None = all tables. Raises ConfigError if the new folder is a run already, or is
    on another filesystem.
    """
    if new.exists(RUN_NAME):
        raise ConfigError(f"{new.uri}: expected a new run folder, got an existing run. Name another folder.")
    if new.fs != run.fs:
        raise ConfigError(
            f"{new.uri}: expected a folder on the filesystem of {run.uri}, got another filesystem. Name a folder on "
            "the same filesystem."
        )
    current = read_run(run)
    versions = {name: version for name, version in current.tables.items() if tables is None or name in tables}
    # With relative paths, both run folders may be moved together.
    paths = {
        name: posixpath.relpath(run.child(f"{name}/{version}").root, new.child(name).root)
        for name, version in versions.items()
    }
    state = RunFile(tables=paths, recipe=current.recipe)
    write_run(new, state)
    return state


def source_runs(run: Store) -> list[Store]:
    """Return the other runs whose tables a run reads: those that `run.json` names, those of a union, and theirs."""
    found, waiting = {run.uri: run}, [run]
    while waiting:
        reader = waiting.pop()
        for source in _named_runs(reader):
            if source.uri not in found:
                found[source.uri] = source
                waiting.append(source)
    return [source for source in found.values() if source is not run]


def _named_runs(run: Store) -> Iterator[Store]:
    """Yield the runs that `run.json` and the manifest of a union name."""
    tables = read_run(run).tables
    for name, version in tables.items():
        if "/" in version:
            yield run.child(f"{name}/{version}/../..")
    folder = run.child(f"{DATASET}/{tables[DATASET]}") if DATASET in tables else None
    if folder is not None and folder.exists(MANIFEST_NAME):
        with suppress(ContractError):  # a damaged manifest stops the command that reads it, and not `repair`
            lineage = read_manifest(folder).run.lineage
            for member in (path for name, path in lineage.items() if name.startswith(MEMBER_INPUT)):
                yield folder.child(f"../{member}/../..")


def attached_runs(run: Store) -> dict[str, list[str]]:
    """Return subfolder -> names of the tables of `run` that the run in this subfolder uses."""
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
    """Raise ConfigError if a run uses tables of other runs, which the command `what` would change."""
    tables = read_run(run).tables
    folder = run.child(f"{DATASET}/{tables.get(DATASET, '')}")
    lineage = read_manifest(folder).run.lineage if folder.exists(MANIFEST_NAME) else {}
    if members := [path for name, path in lineage.items() if name.startswith(MEMBER_INPUT)]:
        owners = [run.child(f"{DATASET}/{path}/../..").uri for path in members]
        raise ConfigError(
            f"{run.uri}: expected a run with its own tables for `{what}`, got a union of the datasets of "
            f"{' and '.join(owners)}. Use these run folders instead, then plan a new run on their datasets."
        )
    if foreign := sorted(table for table, path in tables.items() if path.startswith("../")):
        owner = run.child(f"{foreign[0]}/{tables[foreign[0]]}").uri.rsplit("/", 2)[0]
        raise ConfigError(
            f"{run.uri}: expected a run with its own tables for `{what}`, got the tables {', '.join(foreign)} of "
            f"{owner}. Use the run folder {owner} instead."
        )


def is_table(run: Store, name: str, version: str) -> bool:
    """Return True if an entry of a manifest's lineage is a table of this run."""
    return name in TABLES and run.exists(f"{name}/{version}/{MANIFEST_NAME}")


def _find(run: Store, digest: str) -> tuple[str, str]:
    """Return the table and version whose digest starts with `digest`; a dataset takes precedence."""
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
    for version, committed in list_versions(run, table).items():
        if committed.manifest.digest.startswith(digest):
            yield version


def _folders(run: Store, table: str) -> list[str]:
    """Return the names of all version folders of a table."""
    # The folder is listed, because no manifest names all versions.
    selector = pafs.FileSelector(run.path(table), allow_not_found=True)
    infos = run.fs.get_file_info(selector)
    return sorted(info.base_name for info in infos if info.type == pafs.FileType.Directory)
