"""The log by which readers of Delta Lake open a table of a run: JSON files beside the folders of its versions.

The log lies in the folder of the table, in `_delta_log/`, because most readers accept only files below it. A commit
lists the files that the table's manifest names; nothing is copied. It has the number of rows of each file and no
smallest or largest values, which would keep values of documents that a takedown removes. Method: protocol of Delta
Lake, reader version 1 and writer version 2.
"""

import json
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from pipeline.register.tables import ParquetTable, Registered
from schemas.errors import ConfigError, ContractError, reading
from schemas.paths import DELTA_LOG, check_own_folders
from schemas.storage import MAX_JSON_BYTES, Store
from schemas.tables import TABLES

COMMIT = re.compile(r"\d{20}\.json")
PROTOCOL = {"minReaderVersion": 1, "minWriterVersion": 2}
KEEP_FILES = "interval 5200 weeks"
"""Time for which `VACUUM` keeps files that the log does not name: older versions of the table are below its folder."""
DIGEST = "penstock.digest"
"""Property of the table with the digest of its manifest."""
ENGINE = b'"engineInfo":"penstock"'
"""Part of the first line of every commit."""
MAX_FIRST_LINE = 500
PRIMITIVES: dict[str, str] = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date32[day]": "date",
}
"""Type of Delta by the type of Arrow."""


@dataclass
class DeltaState:
    """The state of a Delta table after the last commit of its log."""

    version: int = -1
    """Number of the last commit; -1 = there is none."""
    protocol: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """Path in the log -> size [bytes]."""


def register_delta(table: ParquetTable) -> Registered:
    """Make the Delta table in the folder of a table name exactly the files of the table's manifest.

    The caller holds the lock on the tables. Raises ConfigError if the table lies in another run, and ContractError if
    the folder has a log that this function cannot continue, or leads out of the run by a link.
    """
    if not table.is_own:
        raise ConfigError(
            f"register --delta: expected tables in the run folder itself, got {table.name} in {table.folder.uri}, of "
            "which this run makes use. Register that run, or name other tables with --table."
        )
    check_own_folders(table.folder.child(".."), f"{table.name}/{DELTA_LOG}")
    log = table.folder.child(DELTA_LOG)
    state = read_log(log)
    actions = list_changes(table, state, int(time.time() * 1000))
    if not actions:
        return Registered(state.version, is_changed=False)
    lines = (json.dumps(action, ensure_ascii=False, separators=(",", ":")) for action in actions)
    log.write_atomic(f"{state.version + 1:020}.json", "".join(f"{line}\n" for line in lines).encode())
    return Registered(state.version + 1, is_changed=True)


def list_changes(table: ParquetTable, state: DeltaState, now_ms: int) -> list[dict[str, Any]]:
    """Return the actions of the commit after which the log names the files of `table`; none if it does so already."""
    wanted = {quote(file.name): file for file in table.files}
    properties = {"delta.deletedFileRetentionDuration": KEEP_FILES, DIGEST: table.digest}
    schema = json.dumps({"type": "struct", "fields": [_field(column) for column in table.schema]}, ensure_ascii=False)
    content = {"schemaString": schema, "configuration": properties}
    is_same = content.items() <= state.metadata.items()
    if is_same and state.files == {name: file.path.num_bytes for name, file in wanted.items()}:
        return []
    operation = "WRITE" if state.metadata else "CREATE TABLE"
    info = {"timestamp": now_ms, "operation": operation, "operationParameters": {"mode": "Overwrite"}}
    actions: list[dict[str, Any]] = [{"commitInfo": info | {"engineInfo": "penstock"}}]
    if not state.protocol:
        actions.append({"protocol": PROTOCOL})
    if not is_same:
        described = {
            "id": str(uuid.uuid4()),
            "name": table.name,
            "description": TABLES[table.name].meaning,
            "format": {"provider": "parquet", "options": {}},
            "partitionColumns": [],
            "createdTime": now_ms,
        }
        actions.append({"metaData": described | state.metadata | content})
    for name in state.files:
        if name not in wanted:
            actions.append({"remove": {"path": name, "deletionTimestamp": now_ms, "dataChange": True}})
    for name, file in wanted.items():
        if state.files.get(name) != file.path.num_bytes:
            size = {"size": file.path.num_bytes, "modificationTime": table.started_ms}
            stats = json.dumps({"numRecords": file.rows})
            actions.append({"add": {"path": name, "partitionValues": {}, **size, "dataChange": True, "stats": stats}})
    return actions


def read_log(log: Store) -> DeltaState:
    """Return the state of a table after all commits of its log, which need not exist.

    Raises ContractError if commits are missing or cannot be read, or if the log has features of later versions.
    """
    names = sorted(name for name in log.names() if COMMIT.fullmatch(name))
    fix = f"Delete the folder {log.uri} and register again."
    if names != [f"{number:020}.json" for number in range(len(names))]:
        raise ContractError(f"{log.uri}: expected every commit from 0 on, got {names[0]} to {names[-1]}. {fix}")
    state = DeltaState()
    for number, name in enumerate(names):
        with reading(f"{log.uri}/{name}", "a commit of a Delta table", fix):
            for line in log.read_bytes(name, MAX_JSON_BYTES).splitlines():
                _apply(state, json.loads(line))
        state.version = number
    if state.protocol and state.protocol != PROTOCOL:
        raise ContractError(
            f"{log.uri}: expected a table of {PROTOCOL}, as registered, got {state.protocol} of another writer. {fix}"
        )
    return state


def is_own_commit(folder: Store, name: str) -> bool:
    """Return True if a file in the folder of a table is a commit that `register_delta` wrote."""
    log, _, file = name.partition("/")
    return (
        log == DELTA_LOG and COMMIT.fullmatch(file) is not None and ENGINE in folder.read_bytes(name)[:MAX_FIRST_LINE]
    )


def _apply(state: DeltaState, action: dict[str, Any]) -> None:
    match action:
        case {"protocol": protocol}:
            state.protocol = dict(protocol)
        case {"metaData": metadata}:
            state.metadata = dict(metadata)
        case {"add": added}:
            state.files[added["path"]] = int(added["size"])
        case {"remove": removed}:
            state.files.pop(removed["path"], None)


def _field(column: pa.Field) -> dict[str, Any]:
    """Return a column as a field of Delta's schema, with its meaning and unit as the comment."""
    texts = [value.decode() for key in (b"meaning", b"unit") if (value := (column.metadata or {}).get(key))]
    metadata = {"comment": f"{texts[0]} [{texts[1]}]" if len(texts) > 1 else texts[0]} if texts else {}
    return {"name": column.name, "type": _type(column.type, column.name), "nullable": True, "metadata": metadata}


def _type(kind: pa.DataType, column: str) -> Any:
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _type(kind.value_type, column), "containsNull": True}
    if pa.types.is_struct(kind):
        return {"type": "struct", "fields": [_field(inner) for inner in kind]}
    if pa.types.is_fixed_size_binary(kind):
        return "binary"
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return "timestamp"
    if str(kind) not in PRIMITIVES:
        raise ContractError(
            f"register --delta: expected columns of a type that Delta has, got {kind} in {column}. Leave out the table "
            "with --table."
        )
    return PRIMITIVES[str(kind)]
