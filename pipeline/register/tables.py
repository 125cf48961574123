"""The tables of a run that other programs can register: their columns, and exactly the files of their manifests.

These are the tables whose files are all Parquet with the same columns. The folder of a table may hold further files,
such as those of other versions or of killed processes, which no registration names.
"""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from schemas.config import suggest_name
from schemas.errors import ConfigError, ContractError
from schemas.manifest import (
    RUN_NAME,
    TableVersion,
    check_folder,
    check_not_replaced,
    current_tables,
    open_table,
    read_run,
)
from schemas.storage import CheckedPath, Store
from schemas.tables import TABLES


@dataclass(frozen=True)
class TableFile:
    """A Parquet file of a table."""

    path: CheckedPath
    """Path relative to the folder of the version."""
    rows: int
    """Number of rows."""
    name: str
    """Path relative to the folder of the table, such as `v-0123456789ab/part-00000-0123456789ab.parquet`."""
    location: str
    """Absolute location, with its scheme: file://, s3://, gs://, abfs:// or hdfs://."""


@dataclass(frozen=True)
class ParquetTable:
    """The current version of a table of a run, with the files that its manifest names."""

    name: str
    version: Store
    """Folder of the version."""
    is_own: bool
    """False if the table lies in another run, whose tables this run uses."""
    digest: str
    """Digest of the manifest."""
    started_ms: int
    """Start of the step that made it [ms since 1970, UTC]."""
    schema: pa.Schema
    """The columns of the files. The metadata of a field has its meaning and unit."""
    files: tuple[TableFile, ...]

    @property
    def folder(self) -> Store:
        """The folder of the table, which has a folder for each version."""
        return self.version.child("..")


@dataclass(frozen=True)
class Registered:
    """What a registration of a table did."""

    version: int
    """Number of the version of the Delta or Iceberg table."""
    is_changed: bool
    """False if the table had the same files before, so that nothing was written."""


def parquet_tables(run: Store, names: Sequence[str] = ()) -> list[ParquetTable]:
    """Return the current Parquet tables of a run, in order. `names`: some of them; empty = all.

    Raises ConfigError if the folder is no run, or has no such table, or if a table is out of date. Raises ContractError
    if the run has no tables, or if a takedown has replaced one of these.
    """
    tables = _named_tables(run, names)
    return [_describe(name, table, "/" in read_run(run).tables[name]) for name, table in tables.items()]


def check_files(table: ParquetTable) -> None:
    """Raise ContractError if a file of a table is missing or has another size. The content of files is not read."""
    folder = table.version
    infos = folder.fs.get_file_info([folder.path(file.path) for file in table.files])
    for file, info in zip(table.files, infos):
        if info.type != pafs.FileType.File or info.size != file.path.num_bytes:
            found = f"a file of {info.size} bytes" if info.type == pafs.FileType.File else "no such file"
            raise ContractError(
                f"{folder.uri}/{file.path}: expected a file of {file.path.num_bytes} bytes as the manifest names it, "
                f"got {found}. {folder.repair_fix}"
            )


def location_of(folder: Store, name: str = "") -> str:
    """Return the absolute location of a file with its scheme, as Iceberg names it."""
    place = folder.child(name) if name else folder
    return f"file://{place.root}" if folder.is_local else place.uri


def _named_tables(run: Store, names: Sequence[str]) -> dict[str, TableVersion]:
    check_folder(run)
    if not run.exists(RUN_NAME):
        raise ConfigError(f"{run.uri}: expected a run folder, got one without {RUN_NAME}. Correct the path.")
    known = [name for name in read_run(run).tables if TABLES[name].schema is not None]
    if not known:
        open_table(run, "documents")  # raises an error that says what the folder is
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(
            f"{run.uri}: expected a table whose files are Parquet, got {wrong[0]!r}{suggest_name(wrong[0], known)}. "
            "Correct the name."
        )
    current = current_tables(run)
    chosen = [name for name in TABLES if name in (names or known)]
    if outdated := [name for name in chosen if name not in current]:
        raise ConfigError(
            f"{run.uri}: expected tables that are up to date, got {', '.join(outdated)}, made from tables that have "
            "changed since. Run `penstock run` with the recipe of the run: it builds them again."
        )
    for name in chosen:
        check_not_replaced(current[name].folder)
    return {name: current[name] for name in chosen}


def _describe(name: str, table: TableVersion, is_foreign: bool) -> ParquetTable:
    folder, manifest = table.folder, table.manifest
    version = posixpath.basename(folder.root)
    files = []
    for entry in manifest.content.files:
        path = manifest.paths[entry.key]
        inside = posixpath.normpath(f"{version}/{path}")
        files.append(TableFile(path, entry.rows, inside, location_of(folder, path)))
    schema = TABLES[name].schema
    if files:
        with folder.open_input(files[0].path) as stream:
            schema = pq.read_schema(stream)
    started = datetime.fromisoformat(manifest.run.started)
    return ParquetTable(
        name, folder, not is_foreign, manifest.digest, int(started.timestamp() * 1000), schema, tuple(files)
    )
