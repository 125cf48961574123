"""Manifests and `run.json`: a table version exists when its manifest exists, and its digest is its identity.

The block `content` describes the table and is equal for all runs that write the same bytes; the block `run` describes
how it was made. A manifest whose row counts do not add up cannot be made. `run.json` names the current versions.
"""

import difflib
import posixpath
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from schemas.errors import ConfigError, ContractError, describe_problems, reading
from schemas.ids import canonical_json, digest_of
from schemas.leases import check_still_held
from schemas.lock_files import TABLES_LOCK, describe_holders, is_written_elsewhere
from schemas.paths import is_below, is_version
from schemas.storage import CheckedPath, Store
from schemas.tables import TABLES

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
REPLACED_NAME = "takedown.json"
"""File in the folder of a version that a takedown has replaced; it names the version that replaces it."""
RUN_NAME = "run.json"
FROM_INPUT = "input:"
"""Prefix of the name of an input file in a lineage."""
RECIPE = "recipe"
"""Note of a manifest with the values of the recipe by which the table was made, as in `run.json`."""
MEMBER_INPUT = "dataset:"
"""Prefix of the names of members in the inputs and the lineage of a union of datasets."""


class _ManifestBlock(BaseModel):
    """The base class of all parts of a manifest and of `run.json`: they are immutable and reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class InputRange(_ManifestBlock):
    """A range of an input file, which was read into a part of its own."""

    begin: int
    """First byte of the range in the file."""
    bytes: int
    """Size of the range [bytes]; the next one begins after it."""
    sha256: str
    """SHA-256 of these bytes."""
    first: int | None
    """Offset of its first row, as in `documents`; None if it has no row."""


class InputEntry(_ManifestBlock):
    """One input of a step: a file from outside the run, or a table."""

    name: str
    """Canonical name of an input file, without its location, or the name of a table."""
    bytes: int
    """Size [bytes]; for a table, the sum over its files."""
    sha256: str
    """SHA-256 of the bytes as they were read; for a table, the digest of its manifest. For a file that was read in
    ranges, the SHA-256 of the digests of these, as bytes one after another."""
    part: int | None = Field(default=None, exclude_if=lambda part: part is None)
    """Number of the part that an input file was read into; left out where each file has a part of its own. For a file
    that was read in ranges, the number of the first; each further range has the next part."""
    ranges: list[InputRange] | None = Field(default=None, exclude_if=lambda ranges: ranges is None)
    """The ranges of a large file, in order; left out for a file that was read as a whole."""

    @property
    def num_parts(self) -> int:
        """The number of parts that the file was read into, or into one of which it was."""
        return 1 if self.ranges is None else len(self.ranges)


class FileEntry(_ManifestBlock):
    """One data file of the table."""

    key: str
    """Logical name, independent of the file's path, such as `part-00003` or `web/train/00000`."""
    rows: int
    """Number of rows."""
    bytes: int
    """Size of the file [bytes]."""
    sha256: str
    """SHA-256 of the file."""


class Counts(_ManifestBlock):
    """The row counts of a step: every row that entered it was kept, or dropped for a named reason."""

    rows_in: int
    """Number of rows that entered the step."""
    rows_kept: int
    """Number of rows that were kept."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Number of dropped rows by `stage/reason`; every declared reason is present, zeros included."""

    @model_validator(mode="after")
    def _add_up(self) -> "Counts":
        lost = self.rows_in - self.rows_kept - sum(self.dropped.values())
        if lost:
            raise ValueError(
                f"row counts: expected rows in = kept + dropped, got {self.rows_in} in, {self.rows_kept} kept and "
                f"{sum(self.dropped.values())} dropped, so {lost} unaccounted for. Count every row once: as kept, "
                "or under one reason."
            )
        return self

    def plus(self, other: "Counts") -> "Counts":
        """Return the sum of the counts of two disjoint sets of rows."""
        names = [*self.dropped, *(name for name in other.dropped if name not in self.dropped)]
        return Counts(
            rows_in=self.rows_in + other.rows_in,
            rows_kept=self.rows_kept + other.rows_kept,
            dropped={name: self.dropped.get(name, 0) + other.dropped.get(name, 0) for name in names},
        )


class Content(_ManifestBlock):
    """The content of a table; the SHA-256 of its canonical JSON is the digest of the version."""

    format_version: int = FORMAT_VERSION
    """Version of the format of manifests."""
    table: str
    """Name of the table, such as `documents`."""
    stages: dict[str, int]
    """Version of every stage that was used, by name."""
    config: dict[str, Any]
    """The settings of every stage that was used, as far as they change the content."""
    inputs: list[InputEntry]
    """The files and tables that were read."""
    files: list[FileEntry]
    """The files that were written, in order."""
    counts: Counts
    """Rows that entered, were kept and were dropped."""
    models: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of every model file that was used, by name."""
    figures: dict[str, Any] = Field(default_factory=dict)
    """Further exact values (integers, strings) of this table, such as tokens per source."""


class _Example(BaseModel):
    count: int
    document: str
    message: str


class _KnownNotes(BaseModel):
    """The notes of a run block that are read again. Others may have any form."""

    errors: dict[str, _Example] = {}
    calls: dict[str, int] = {}
    cpu: dict[str, dict[str, float]] = {}
    pairs: list[dict[str, int]] = []
    rounds: int = 0
    edges_by_round: list[int] = []
    shuffled_bytes: int = 0
    task_seconds: float = 0.0
    ended_processes: dict[str, int] = {}
    transfers: dict[str, int] = {}


class RunBlock(_ManifestBlock):
    """The execution that made the table; it is not part of the table's identity."""

    paths: dict[str, str]
    """Path of every file relative to the manifest, by key."""
    blocks: dict[str, str] = Field(default_factory=dict)
    """Sizes and checksums of the record batches of token shards, by key: `size:checksum` in hexadecimal. The last is
    that of the end of the file."""
    started: str
    """Start of the step, ISO 8601, UTC."""
    wall_seconds: float
    """Duration [s]."""
    cpu_seconds: float
    """CPU time of the Python workers [s]."""
    code_version: str
    """Version of this package."""
    lineage: dict[str, str] = Field(default_factory=dict)
    """Version folder of every table that was read, and size and time of every other file, by name."""
    notes: dict[str, Any] = Field(default_factory=dict)
    """Values that depend on the execution, such as the rounds of clustering and the kinds of errors that occurred."""

    @field_validator("notes")
    @classmethod
    def _notes(cls, notes: dict[str, Any]) -> dict[str, Any]:
        _KnownNotes.model_validate(notes)
        return notes


class Manifest(_ManifestBlock):
    """The manifest of a committed table: its content, and how it was made."""

    content: Content
    run: RunBlock

    @model_validator(mode="after")
    def _paths(self) -> "Manifest":
        keys = [entry.key for entry in self.content.files]
        if len(set(keys)) != len(keys) or set(keys) != set(self.run.paths):
            unpaired = ", ".join(sorted(set(keys) ^ set(self.run.paths)))
            problem = f"a file without a path or a path without a file: {unpaired}" if unpaired else "a key twice"
            raise ValueError(
                f"run.paths: expected one path for every key of content.files, got {problem}. Run `penstock run` again."
            )
        return self

    @property
    def digest(self) -> str:
        """The identity of the version: the SHA-256 of the canonical JSON of `content`."""
        return digest_of(self.content.model_dump(mode="json"))

    @property
    def tables_read(self) -> dict[str, str]:
        """Digests, by name, of the tables of the same run that this table was made from."""
        inputs = (entry for entry in self.content.inputs if f"{FROM_INPUT}{entry.name}" not in self.run.lineage)
        return {entry.name: entry.sha256 for entry in inputs if entry.name in TABLES}

    @cached_property
    def paths(self) -> dict[str, CheckedPath]:
        """The path of every file by key, in the order of `content.files`."""
        files = self.content.files
        return {entry.key: CheckedPath(self.run.paths[entry.key], entry.bytes, entry.sha256) for entry in files}

    @cached_property
    def parts_of_inputs(self) -> dict[str, range]:
        """The numbers of the parts that each input file of `documents` was read into, by the file's name."""
        found = {}
        for place, entry in enumerate(self.content.inputs):
            first = place if entry.part is None else entry.part
            found[entry.name] = range(first, first + entry.num_parts)
        return found

    @cached_property
    def places_of_inputs(self) -> dict[str, tuple[str, str]]:
        """The source and the split of each input file of `documents`, by the file's name.

        With several sources, the name is `source/split`. Ids follow from both, so a file has the same in any run.
        """
        names = [entry.name for entry in self.content.inputs]
        source = self.content.config.get("source", {}).get("name")
        if isinstance(source, str):
            return {name: (source, name) for name in names}
        return {name: (own, split) for name in names for own, _, split in [name.partition("/")]}

    def paths_of(self, prefix: str = "") -> list[CheckedPath]:
        """Return the paths of the files whose key starts with `prefix`, in the order of `content.files`."""
        return [path for key, path in self.paths.items() if key.startswith(prefix)]


def make_manifest(content: dict[str, Any], run: dict[str, Any], where: str) -> Manifest:
    """Return a validated manifest. Raises ContractError if row counts do not add up or a file has no path."""
    try:
        return Manifest.model_validate({"content": content, "run": run})
    except ValidationError as error:
        raise ContractError(
            f"{where}: expected a valid manifest, got {describe_problems(error)}. Run `penstock run` again."
        ) from error


def write_manifest(folder: Store, manifest: Manifest) -> None:
    """Write the manifest, which commits the table.

    Raises ContractError if the folder already has a manifest with different content, or if another process has taken
    over the lease on the run.
    """
    check_still_held(folder)
    if folder.exists(MANIFEST_NAME):
        committed = read_manifest(folder)
        if committed.digest != manifest.digest:
            raise ContractError(
                f"{folder.uri}: expected the committed content {committed.digest[:12]}, got {manifest.digest[:12]} "
                "from changed inputs or libraries. Use a new run folder with --out."
            )
        return
    folder.write_atomic(MANIFEST_NAME, canonical_json(manifest.model_dump(mode="json")))


def read_manifest(folder: Store) -> Manifest:
    """Return the manifest of a table version. Raises ContractError if it is missing or invalid."""
    if not folder.exists(MANIFEST_NAME):
        check_not_replaced(folder)
        raise ContractError(f"{folder.uri}: expected a table, got no {MANIFEST_NAME}. Run `penstock run`.")
    raw = folder.read_json(MANIFEST_NAME)
    content = raw.get("content") if isinstance(raw, dict) else None
    version = content.get("format_version", FORMAT_VERSION) if isinstance(content, dict) else FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise ContractError(
            f"{folder.uri}/{MANIFEST_NAME}: expected format version {FORMAT_VERSION}, got {version}. Use the version "
            "of penstock that wrote it."
        )
    with reading(f"{folder.uri}/{MANIFEST_NAME}", "a valid manifest"):
        manifest = Manifest.model_validate(raw)
        # Values of any kind: a half of a surrogate pair, or an infinite number, has no digest and cannot be printed.
        canonical_json([manifest.content.config, manifest.content.figures, manifest.run.notes])
    check_paths(manifest, f"{folder.uri}/{MANIFEST_NAME}")
    return manifest


def check_not_replaced(folder: Store) -> None:
    """Raise ContractError if a takedown has replaced a table version, whose files may still be there."""
    if folder.exists(REPLACED_NAME):
        replaced = folder.read_json(REPLACED_NAME)
        with reading(f"{folder.uri}/{REPLACED_NAME}", "the takedown that replaced this version"):
            by, version = replaced["id"], replaced["to"]
        raise ContractError(
            f"{folder.uri}: expected a table, got a version that takedown {by} has replaced by {version}. Plan "
            "a new run on the current dataset: `penstock plan NEW_RUN --dataset RUN`."
        )


def check_paths(manifest: Manifest, where: str) -> None:
    """Raise ContractError if a path or version in a manifest leads out of the folder of its table.

    The files of a union lie in the folders of its members, which its lineage names.
    """
    lineage = manifest.run.lineage
    members = {path for name, path in lineage.items() if name.startswith(MEMBER_INPUT)}
    read = [(name, path) for name, path in lineage.items() if name in TABLES]
    for name, path in [*read, *((manifest.content.table, path) for path in sorted(members))]:
        if not is_version(path, name):
            raise ContractError(
                f"{where}: expected the version folder of a table {name} in run.lineage, got {path!r:.200}. Restore "
                "the file from a backup."
            )
    folders = tuple(f"{posixpath.normpath(f'../{path}/..')}/" for path in members)
    for key, path in manifest.run.paths.items():
        start = next((folder for folder in folders if path.startswith(folder)), "")
        if not is_below(f"../{path[len(start) :]}" if start else path, levels=1):
            raise ContractError(
                f"{where}: expected a file in the folder of the table for {key!r:.200} in run.paths, got "
                f"{path!r:.200}. Restore the file from a backup."
            )


@dataclass(frozen=True)
class TableVersion:
    """A committed version of a table: its folder and its manifest."""

    folder: Store
    manifest: Manifest


def member_input(digest: str) -> str:
    """Return the name of a member of a union in its inputs and its lineage; `digest`: that of the member."""
    return f"{MEMBER_INPUT}{digest[:12]}"


def part_key(ordinal: int) -> str:
    """Return the manifest key of a part, such as `part-00003`."""
    return f"part-{ordinal:05d}"


class RunFile(_ManifestBlock):
    """`run.json`: the current version of each table, and the values of the recipe. It is the only file that changes."""

    tables: dict[str, str] = Field(default_factory=dict)
    """Version folder (`v-…`) by table name, relative to the table's folder: `../../../tokens/v-…` is another run's."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """The values that the recipe sets, by section."""


def read_run(run: Store) -> RunFile:
    """Return the content of `run.json`, which is empty for a new run. Raises ContractError if it has unknown tables."""
    if not run.exists(RUN_NAME):
        return RunFile()
    raw = run.read_json(RUN_NAME)
    with reading(f"{run.uri}/{RUN_NAME}", "the versions and the recipe of a run"):
        state = RunFile.model_validate(raw)
    if unknown := sorted(state.tables.keys() - TABLES.keys()):
        raise ContractError(
            f"{run.uri}/{RUN_NAME}: expected tables of this version of penstock, got {', '.join(unknown)}. Use the "
            "version of penstock that wrote them."
        )
    for table, path in state.tables.items():
        if not is_version(path, table):
            raise ContractError(
                f"{run.uri}/{RUN_NAME}: expected the version folder of a table {table} in `tables`, got {path!r:.200}. "
                "Restore the file from a backup."
            )
    return state


def write_run(run: Store, state: RunFile) -> None:
    """Write `run.json` of a run folder, replacing the old file atomically.

    Raises ContractError if another process has taken over the lease on the run.
    """
    check_still_held(run)
    run.write_atomic(RUN_NAME, canonical_json(state.model_dump(mode="json")))


def check_folder(run: Store) -> None:
    """Raise ConfigError, with the most similar name, if a local run folder does not exist."""
    if not run.is_local or run.exists(""):
        return
    path = Path(run.root)
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    close = difflib.get_close_matches(missing, [entry.name for entry in parent.iterdir() if entry.is_dir()], n=1)
    hint = f" (did you mean {str(parent / close[0])!r}?)" if close else ""
    raise ConfigError(f"{run.uri}: expected a run folder, got no such folder{hint}. Correct the path.")


def open_table(run: Store, table: str, even_replaced: bool = False) -> tuple[Store, Manifest]:
    """Return the folder and manifest of a table's current version in a run.

    `even_replaced`: for commands that only show or check data; True = open a version that a takedown has replaced, and
    whose files it has kept. Raises ContractError if there is no table, or a replaced one, and ConfigError if the run
    folder does not exist.
    """
    tables = read_run(run).tables
    if table not in tables:
        check_folder(run)
        if run.is_local and is_written_elsewhere(path := Path(run.root)):
            raise ContractError(
                f"{run.uri}: expected a table {table!r}, got a run that is being written by "
                f"{describe_holders(path / TABLES_LOCK)}. Wait until that process ends, then run this command again."
            )
        owners = sorted({run.child(f"{name}/{path}/../..").uri for name, path in tables.items() if "../" in path})
        fix = f"Name {' or '.join(owners)}, whose tables this run uses." if owners else "Run `penstock run`."
        raise ContractError(f"{run.uri}: expected a table {table!r}, got {sorted(tables) or 'an empty run'}. {fix}")
    folder = run.child(f"{table}/{tables[table]}")
    if not even_replaced:
        check_not_replaced(folder)
    return folder, read_manifest(folder)


def current_tables(run: Store) -> dict[str, TableVersion]:
    """Return the up-to-date tables of a run, in order, for commands that only show or check data.

    A table is up to date if it was made from the current, up-to-date versions of all tables that it reads.
    """
    tables: dict[str, TableVersion] = {}
    for name in (name for name in TABLES if name in read_run(run).tables):
        table = TableVersion(*open_table(run, name, even_replaced=True))
        reads = table.manifest.tables_read.items()
        if all(read in tables and tables[read].manifest.digest == digest for read, digest in reads):
            tables[name] = table
    return tables
