"""The metadata by which readers of Apache Iceberg open a table of a run, whose files stay where they are.

`FOLDER/<table>/metadata/` has the layout of a file-system catalogue: `v1.metadata.json`, `v2.metadata.json` and so on,
and the number of the current one in `version-hint.text`. Files have absolute locations. Their columns have no ids, so
the property `schema.name-mapping.default` maps names to ids. No smallest or largest values are stored, which would keep
values of documents that a takedown removes. Method: specification of Iceberg, version 2.
"""

import logging
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.register.tables import ParquetTable, Registered, location_of
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store

DIGEST = "penstock.digest"
"""Property of the table with the digest of its manifest."""
PROPERTIES = {"format-version": "2", "gc.enabled": "false", "write.metadata.metrics.default": "none"}
"""Properties of every table. Without `gc.enabled`, expiring snapshots would delete files of earlier versions."""
IDENTIFIER = ("run", "table")
"""Name of the one table in the catalogue, which is in memory and used for a single commit."""
HINT = "version-hint.text"
NOT_IN_LOCATIONS = "#?%"
"""Characters of a local path that readers of a location take for something else."""


def register_iceberg(table: ParquetTable, out: Store) -> Registered:
    """Make the Iceberg table in a folder of `out` name exactly the files of a table's manifest.

    The caller holds the lock on the tables of the run. Raises ConfigError if pyiceberg is not installed, a path cannot
    be a location, or the folder has another table. Raises ContractError if its metadata cannot be read or continued.
    """
    folder = out.child(table.name)
    _check_locations(table, folder)
    number = _current_number(folder)
    with _pyiceberg() as catalog_type:
        catalog = catalog_type("penstock", warehouse=location_of(out), **_connection(out))
        catalog.create_namespace(IDENTIFIER[0])
        if number and not _update_table(catalog, table, folder, number):
            return Registered(number, is_changed=False)
        if not number:
            with catalog.create_table_transaction(
                IDENTIFIER,
                _documented(table.schema),
                location=location_of(folder),
                properties=PROPERTIES | {DIGEST: table.digest},
            ) as transaction:
                _map_names(transaction)
                _replace_files(transaction, table, {})
        _publish(catalog.load_table(IDENTIFIER), folder.child("metadata"), number + 1)
    return Registered(number + 1, is_changed=True)


def _update_table(catalog: Any, table: ParquetTable, folder: Store, number: int) -> bool:
    """Commit the files and columns of `table` to an existing table. Return False if it has these already."""
    metadata = f"{location_of(folder)}/metadata/v{number}.metadata.json"
    existing = catalog.register_table(IDENTIFIER, metadata)
    if existing.location() != location_of(folder):
        raise ConfigError(
            f"{folder.uri}: expected a table that was registered in this folder, got one of {existing.location()}. "
            "Register into a new folder."
        )
    before = {task.file.file_path: task.file for task in existing.scan().plan_files()}
    if existing.properties.get(DIGEST) == table.digest and before.keys() == {file.location for file in table.files}:
        return False
    columns = _documented(table.schema)
    try:
        with existing.transaction() as transaction:
            transaction.set_properties({DIGEST: table.digest})
            with transaction.update_schema(allow_incompatible_changes=True) as update:
                for name in (name for name in existing.schema().column_names if "." not in name):
                    if name not in columns.names:
                        update.delete_column(name)
                update.union_by_name(columns)
            _map_names(transaction)
            _replace_files(transaction, table, before)
    except ValueError as error:  # such as a column whose type has changed
        raise ContractError(
            f"{folder.uri}: expected a table whose columns can be changed to those of the run, got an error: {error}. "
            "Delete that folder and register again."
        ) from error
    return True


def _replace_files(transaction: Any, table: ParquetTable, before: dict[str, Any]) -> None:
    """Add a snapshot with exactly the files of a table; `before` has the entries of the last one, by location."""
    from pyiceberg.io import load_file_io
    from pyiceberg.io.pyarrow import parquet_file_to_data_file

    wanted = {file.location for file in table.files}
    removed = [entry for location, entry in before.items() if location not in wanted]
    added = [file.location for file in table.files if file.location not in before]
    if not removed and not added and before:
        return
    io = load_file_io(_connection(table.version), location_of(table.version))
    update = transaction.update_snapshot(snapshot_properties={DIGEST: table.digest})
    with update.overwrite() if removed else update.fast_append() as snapshot:
        for entry in removed:
            snapshot.delete_data_file(entry)
        for location in added:
            snapshot.append_data_file(parquet_file_to_data_file(io, transaction.table_metadata, location))


def _map_names(transaction: Any) -> None:
    mapping = transaction.table_metadata.schema().name_mapping
    transaction.set_properties({"schema.name-mapping.default": mapping.model_dump_json()})


def _publish(table: Any, metadata: Store, number: int) -> None:
    """Store the metadata of the committed table as version `number`, and name it in the hint."""
    made = posixpath.basename(table.metadata_location)
    if metadata.is_local:
        for name in metadata.names():
            metadata.sync(name)
    metadata.write_atomic(f"v{number}.metadata.json", metadata.read_bytes(made))
    metadata.write_atomic(HINT, str(number).encode())
    metadata.delete(made)


def _current_number(folder: Store) -> int:
    """Return the number of the current version of a table; 0 if there is none."""
    if not folder.exists(f"metadata/{HINT}"):
        return 0
    text = folder.read_bytes(f"metadata/{HINT}").decode("utf-8", "replace").strip()
    if not text.isdecimal() or not folder.exists(f"metadata/v{text}.metadata.json"):
        raise ContractError(
            f"{folder.uri}/metadata/{HINT}: expected the number of a version, got {text!r:.40}. Delete the folder "
            f"{folder.uri} and register again."
        )
    return int(text)


def _documented(schema: pa.Schema) -> pa.Schema:
    """Return the columns with their meaning where pyiceberg reads the description of a column."""

    def documented(column: pa.Field) -> pa.Field:
        meaning = (column.metadata or {}).get(b"meaning")
        return column.with_metadata({"doc": meaning}) if meaning else column.remove_metadata()

    return pa.schema([documented(column) for column in schema])


def _check_locations(table: ParquetTable, folder: Store) -> None:
    """Raise ConfigError if a local path has a character that readers of a location take for something else."""
    for store in (store for store in (table.folder, folder) if store.is_local):
        if odd := sorted({*NOT_IN_LOCATIONS} & {*store.root}):
            raise ConfigError(
                f"register --iceberg: expected a path without {' '.join(NOT_IN_LOCATIONS)}, got {odd[0]} in "
                f"{store.root}. Rename that folder."
            )


def _connection(store: Store) -> dict[str, str]:
    """Return the region and endpoint of an object store as pyiceberg names them; credentials are those around it."""
    if not isinstance(store.fs, pafs.S3FileSystem):
        return {}
    _, (options, *_) = store.fs.__reduce__()
    endpoint = options["endpoint_override"]  # with a scheme if it is that of the environment
    address = endpoint if "://" in endpoint or not endpoint else f"{options['scheme']}://{endpoint}"
    return {"s3.region": store.fs.region} | ({"s3.endpoint": address} if address else {})


@contextmanager
def _pyiceberg() -> Iterator[Any]:
    """Yield pyiceberg's catalogue in memory. Its warnings about absent statistics are not printed in the block."""
    try:
        from pyiceberg.catalog.memory import InMemoryCatalog
    except ImportError as error:
        raise ConfigError(
            f"register --iceberg: expected the package pyiceberg with SQLAlchemy, got an error: {error}. Install it "
            "with `pip install 'penstock[register]'`."
        ) from error
    logger = logging.getLogger("pyiceberg.io.pyarrow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield InMemoryCatalog
    finally:
        logger.setLevel(level)
