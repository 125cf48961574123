"""Manifests: a table exists when its manifest exists, and its identity is the digest of what it says.

`content` says what the table is (same for every run that gives the same bytes); `run` says how it came about. A
manifest whose books do not balance cannot be made.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of
from schemas.storage import Store

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
REPLACED_NAME = "takedown.json"
"""In the folder of a version that a takedown has replaced: which version stands in its place."""
RUN_NAME = "run.json"


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class InputEntry(_Block):
    """One input of a stage: a file of the outside world, or a table by its dataset digest."""

    name: str
    """Canonical name without location (a split), or the name of a table."""
    bytes: int
    """Size [bytes]; of a table, the sum over its files."""
    sha256: str
    """SHA-256 of the bytes as they were read; of a table, its dataset digest."""


class FileEntry(_Block):
    """One data file of the table."""

    key: str
    """Logical name, independent of where the file lies, such as `part-00003` or `web/train/00000`."""
    rows: int
    """Number of rows."""
    bytes: int
    """Size of the file [bytes]."""
    sha256: str
    """SHA-256 of the file."""


class Counts(_Block):
    """The books of a stage: every row that came in was kept or dropped for a named reason."""

    rows_in: int
    """Number of rows that entered the stage."""
    rows_kept: int
    """Number of rows that left it."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Number of rows dropped, by `stage/reason`; every declared reason is present, zeros included."""

    @model_validator(mode="after")
    def _balance(self) -> "Counts":
        lost = self.rows_in - self.rows_kept - sum(self.dropped.values())
        if lost:
            raise ValueError(
                f"the books do not balance: {self.rows_in} rows in, {self.rows_kept} kept, "
                f"{sum(self.dropped.values())} dropped by name, so {lost} unaccounted for"
            )
        return self

    def plus(self, other: "Counts") -> "Counts":
        """The books of two disjoint sets of rows together."""
        names = [*self.dropped, *(name for name in other.dropped if name not in self.dropped)]
        return Counts(
            rows_in=self.rows_in + other.rows_in,
            rows_kept=self.rows_kept + other.rows_kept,
            dropped={name: self.dropped.get(name, 0) + other.dropped.get(name, 0) for name in names},
        )


class Content(_Block):
    """What the table is. Its canonical JSON is what the dataset digest is taken over."""

    format_version: int = FORMAT_VERSION
    """Version of this layout."""
    table: str
    """Name of the table, such as `documents`."""
    stages: dict[str, int]
    """Version of every stage that took part."""
    config: dict[str, Any]
    """Content settings of every stage that took part."""
    inputs: list[InputEntry]
    """What was read."""
    files: list[FileEntry]
    """What was written, in order."""
    counts: Counts
    """The books."""
    models: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of every model file that took part, by name."""
    figures: dict[str, Any] = Field(default_factory=dict)
    """Further exact counts (integers, strings) that belong to this table, such as tokens per source."""


class RunBlock(_Block):
    """How the table came about; not part of its identity."""

    paths: dict[str, str]
    """Path of every file relative to the manifest, by key."""
    started: str
    """Start of the stage, ISO 8601, UTC."""
    wall_seconds: float
    """Duration [s]."""
    cpu_seconds: float
    """CPU time of the Python workers [s]."""
    code_version: str
    """Version of this package."""
    lineage: dict[str, str] = Field(default_factory=dict)
    """Version folder of every input table; identity (size and time) of every outside file."""
    notes: dict[str, Any] = Field(default_factory=dict)
    """What depends on how the work was done, such as rounds of clustering, and kinds of errors met."""


class Manifest(_Block):
    """A committed table: what it is, and how it came about."""

    content: Content
    run: RunBlock

    @model_validator(mode="after")
    def _paths(self) -> "Manifest":
        keys = [entry.key for entry in self.content.files]
        if len(set(keys)) != len(keys) or set(keys) != set(self.run.paths):
            raise ValueError("every file has one path and every path one file, by unique keys")
        return self

    @property
    def digest(self) -> str:
        """The dataset's identity: SHA-256 of the canonical JSON of `content`."""
        return digest_of(self.content.model_dump(mode="json"))

    def paths_of(self, prefix: str = "") -> list[str]:
        """Paths of the files whose key starts with `prefix`, in order."""
        return [self.run.paths[entry.key] for entry in self.content.files if entry.key.startswith(prefix)]


def make_manifest(content: dict[str, Any], run: dict[str, Any], where: str) -> Manifest:
    """A checked manifest. Raises ContractError if the books do not balance or a file has no path."""
    try:
        return Manifest.model_validate({"content": content, "run": run})
    except ValidationError as error:
        raise ContractError(f"{where}: the manifest cannot be written: {error}") from error


def write_manifest(folder: Store, manifest: Manifest) -> None:
    """Commit a table: from this write on it exists. Raises ContractError if another content stands there."""
    if folder.exists(MANIFEST_NAME):
        standing = read_manifest(folder)
        if standing.digest != manifest.digest:
            raise ContractError(
                f"{folder.uri}: expected immutable, holds {standing.digest[:12]}, now found {manifest.digest[:12]}; "
                "an input or a library changed under the same settings: use a new run folder"
            )
        return
    folder.write_atomic(MANIFEST_NAME, canonical_json(manifest.model_dump(mode="json")))


def read_manifest(folder: Store) -> Manifest:
    """The manifest of a table version. Raises ContractError if there is none or it does not hold together."""
    if not folder.exists(MANIFEST_NAME):
        if folder.exists(REPLACED_NAME):
            moved = folder.read_json(REPLACED_NAME)
            raise ContractError(
                f"{folder.uri}: expected a table, got that takedown {moved['id']} has put {moved['to']} in its "
                "place. A run on the old one cannot go on: plan anew, in another folder."
            )
        raise ContractError(f"{folder.uri}: expected a table, got no {MANIFEST_NAME}. Run the stage that writes it.")
    raw = folder.read_json(MANIFEST_NAME)
    content = raw.get("content") if isinstance(raw, dict) else None
    version = content.get("format_version", FORMAT_VERSION) if isinstance(content, dict) else FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise ContractError(
            f"{folder.uri}/{MANIFEST_NAME}: expected format version {FORMAT_VERSION}, got {version}. Use the version "
            "of penstock that wrote it, or run its stage again."
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        raise ContractError(f"{folder.uri}/{MANIFEST_NAME}: does not hold together: {error}") from error


@dataclass(frozen=True)
class TableVersion:
    """A committed table of the run: where it lies and what it says."""

    folder: Store
    manifest: Manifest


def part_key(ordinal: int) -> str:
    """The manifest key of a part, such as `part-00003`."""
    return f"part-{ordinal:05d}"


class RunFile(_Block):
    """`run.json`: which version of each table the run stands on, and what its recipe set. The one file that changes."""

    tables: dict[str, str] = Field(default_factory=dict)
    """Version folder (`v-…`) by table name, relative to the table's folder: `../../../tokens/v-…` is another run's."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """What the recipe set, by section."""


def read_run(run: Store) -> RunFile:
    """The state of a run folder; empty for a new one."""
    if not run.exists(RUN_NAME):
        return RunFile()
    return RunFile.model_validate(run.read_json(RUN_NAME))


def write_run(run: Store, state: RunFile) -> None:
    """Replace the state of a run folder."""
    run.write_atomic(RUN_NAME, canonical_json(state.model_dump(mode="json")))


def open_table(run: Store, table: str) -> tuple[Store, Manifest]:
    """Folder and manifest of a run's current version of a table. Raises ContractError if it does not exist yet."""
    tables = read_run(run).tables
    if table not in tables:
        raise ContractError(
            f"{run.uri}: expected a table {table!r}, got {sorted(tables) or 'an empty run'}. Run its stage."
        )
    folder = run.child(f"{table}/{tables[table]}")
    return folder, read_manifest(folder)
