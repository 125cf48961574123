"""`penstock export` of clean text and of tables: checks, the tasks of all shards, and the manifest `export.json`.

The manifest is written last, so a folder with it is a complete export. An interrupted export of the same documents
resumes: complete shards are not written again. If only its receipt is missing, nothing but that is written.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pyarrow.fs as pafs

from pipeline.disclosure.dataset_card import CardText
from pipeline.engine.parquet import WrittenFile, parts_of
from pipeline.engine.part import TaskResult
from pipeline.export.card import ExportFacts, export_card, export_croissant
from pipeline.export.rows import ALL, SIGNAL_TABLES, RowSource, open_rows
from pipeline.export.shards import (
    COMPRESSIONS,
    PARTIAL,
    SUFFIXES,
    PartCount,
    RowCountTask,
    ShardTask,
    TableTask,
    convert_part,
    count_rows,
    plan_shards,
    write_shard,
    written_files,
)
from schemas.errors import ConfigError, ContractError, reading
from schemas.exports import exported_files, read_receipts
from schemas.ids import canonical_json, digest_of
from schemas.manifest import Manifest, TableVersion, check_not_replaced, current_tables
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import check_no_pending_takedown

MANIFEST = "export.json"
PLAN = f"{PARTIAL}/plan.json"
CARD, CROISSANT = "README.md", "croissant.json"
DATASET_FORMAT = "huggingface-dataset"
"""Format with Parquet shards, a dataset card and Croissant metadata."""
FORMATS = ("jsonl", "parquet", DATASET_FORMAT)
ZSTD = "zstd"
"""The compression of JSON lines unless another one is chosen."""
VERSION = 1
"""Version of the format of exports; a change of bytes raises it."""
MAX_NAMES = 200
"""Maximum number of sources, languages and licences that the manifest counts."""
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 1 << 10, 4 * 10**9

NOTHING: Mapping[str, str] = {}
Runner = Callable[[Callable[[Any, bool], TaskResult], Sequence[Any], str], list[TaskResult]]
"""(function, tasks, label) → the results of the function, in the order of the tasks."""


@dataclass(frozen=True)
class ExportOptions:
    """What is exported, and how."""

    format: str
    """One of FORMATS."""
    signals: tuple[str, ...] = ()
    """Columns with measurements to add; `all` adds those with a value in any document."""
    where: str | None = None
    """Condition that documents must meet."""
    shard_bytes: int = 256 * 10**6
    """Size of a shard [bytes of text, before compression]."""

    compression: str = ZSTD
    """Compression of JSON lines: a key of COMPRESSIONS."""

    @property
    def suffix(self) -> str:
        """The suffix of the data files."""
        return suffix_of(self.format, self.compression)


def suffix_of(format: str, compression: str = ZSTD) -> str:
    """Return the suffix of the data files of a format. `compression` is that of JSON lines."""
    return COMPRESSIONS[compression] if format == "jsonl" else SUFFIXES["parquet"][0]


@dataclass(frozen=True)
class PreparedExport:
    """An export that can start: what it reads, and the identity by which an interrupted one resumes."""

    out: Store
    identity: dict[str, Any]
    rows: RowSource | None = None
    """The rows of clean text; None for the export of a table."""
    table: TableVersion | None = None
    """The version of the exported table; None for clean text."""
    manifest: dict[str, Any] | None = None
    """The manifest if the export is complete, and was killed before its receipt was written into the run."""


def prepare_export(
    run: Store, out: Store, options: ExportOptions, unmeasured: Mapping[str, str] = NOTHING
) -> PreparedExport:
    """Return an export of clean text after all checks, without writing anything.

    `unmeasured` maps columns that the run did not measure, which are null in every row, to the fix.
    Raises ConfigError if an option is not valid or the folder is in use, ContractError if a takedown is unfinished.
    """
    if not MIN_SHARD_BYTES <= options.shard_bytes <= MAX_SHARD_BYTES:
        raise ConfigError(
            f"export --shard-size: expected {MIN_SHARD_BYTES:,} bytes to {MAX_SHARD_BYTES // 10**9} GB, got "
            f"{options.shard_bytes:,} bytes. Correct --shard-size."
        )
    check_no_pending_takedown(run)
    rows = open_rows(run, options.signals, options.where, unmeasured)
    identity = {
        "version": VERSION,
        "tables": {name: table.manifest.digest for name, table in rows.tables.items()},
        "format": options.format,
        "signals": list(options.signals),
        "where": options.where,
        "shard_bytes": options.shard_bytes,
        **_compression(options.compression),
    }
    return PreparedExport(out, identity, rows, manifest=_check_out(run, out, identity))


def exportable_tables(run: Store) -> list[str]:
    """Return the names of the tables of a run whose parts are Parquet files with one schema."""
    return [name for name in current_tables(run) if TABLES[name].schema is not None]


def _compression(compression: str) -> dict[str, str]:
    """Return the compression for the identity of an export; the default is left out, as in earlier exports."""
    return {} if compression == ZSTD else {"compression": compression}


def prepare_table_export(run: Store, table: str, out: Store, format: str, compression: str = ZSTD) -> PreparedExport:
    """Return the export of a table after all checks, without writing anything.

    Raises ConfigError if the run has no such table or the folder is in use, ContractError if a takedown is unfinished.
    """
    check_no_pending_takedown(run)
    offered = exportable_tables(run)
    if table not in offered:
        raise ConfigError(
            f"export --table: expected one of {', '.join(offered) or 'the tables of a run, which has none'}, got "
            f"{table!r}. Name a table of {run.uri}."
        )
    if format not in SUFFIXES:
        raise ConfigError(f"export --table: expected --format {' or '.join(SUFFIXES)}, got {format}. Correct --format.")
    version = current_tables(run)[table]
    check_not_replaced(version.folder)
    digest = version.manifest.digest
    identity = {"version": VERSION, "tables": {table: digest}, "table": table, "format": format}
    identity |= _compression(compression)
    return PreparedExport(out, identity, table=version, manifest=_check_out(run, out, identity))


def _check_out(run: Store, out: Store, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Raise ConfigError unless the folder is absent, empty, or has an interrupted export with this identity.

    Return the manifest of such an export that lacks only its receipt in the run; None = there is more to do.
    """
    if out.fs.get_file_info(out.root).type == pafs.FileType.File:
        raise ConfigError(f"export --out {out.uri}: expected a folder, got a file. Name a new folder.")
    out.check_bucket()
    if out.exists(MANIFEST):
        manifest = out.read_json(MANIFEST)
        with reading(f"{out.uri}/{MANIFEST}", "the manifest of an export", "Name a new folder."):
            is_same = all(manifest["content"].get(name) == value for name, value in identity.items())
        if is_same and _lacks_receipt(run, out):
            return dict(manifest)
        raise ConfigError(
            f"export --out {out.uri}: expected a new or empty folder, got a complete export. Name a new folder."
        )
    if out.exists(PLAN):
        if out.read_json(PLAN) != identity:
            raise ConfigError(
                f"export --out {out.uri}: expected an empty folder or this export interrupted, got an interrupted "
                "export of other documents or options. Name a new folder."
            )
    elif (name := next(exported_files(out), None)) is not None:
        raise ConfigError(
            f"export --out {out.uri}: expected a new or empty folder, got one with files, such as {name}. Name a new "
            "folder."
        )
    return None


def _lacks_receipt(run: Store, out: Store) -> bool:
    """Return True if a run has the receipt of an export to this folder that was not complete."""
    return any(own.destination == out.address and not own.complete for own in read_receipts(Store(run.address)))


def export_text(prepared: PreparedExport, options: ExportOptions, text: CardText, run_all: Runner) -> dict[str, Any]:
    """Write the clean text of a run, with the manifest last, and return the manifest.

    Raises ContractError if the exported documents are not those that the manifest of `clean` counts.
    """
    out, source = prepared.out, prepared.rows
    if source is None:
        raise ContractError("export: expected rows of clean text, got a table. Use `export_table`.")
    if prepared.manifest is not None:
        return _ended(out, prepared.manifest)
    out.write_atomic(PLAN, canonical_json(prepared.identity))
    tables = {name: source.tables[name] for name in ("clean", *SIGNAL_TABLES) if name in source.tables}
    parts = parts_of(tables)
    measures = [*options.signals] == [ALL]
    counted = run_all(
        count_rows, [RowCountTask(source, part, options.shard_bytes, measures) for part in parts], "count"
    )
    if measures:
        found = {name for result in counted for name in result["measured"]}
        signals = tuple(name for name in source.signals if name in found)
        source = RowSource(source.tables, signals, source.where, source.columns, source.meta)
    fields = PartCount.__dataclass_fields__
    counts = [PartCount(**{name: result[name] for name in fields}) for result in counted]
    clean = source.tables["clean"].manifest
    _check_count("documents of `clean`", sum(count.num_clean for count in counts), clean.content.counts.rows_kept)
    tasks = [
        ShardTask(source, shard, tuple(parts[number] for number, _ in shard.parts), out, options.suffix)
        for shard in plan_shards(counts, options.shard_bytes)
    ]
    files = written_files(run_all(write_shard, tasks, "export"))
    num_documents = sum(file.rows for file in files)
    _check_count("exported documents", num_documents, sum(count.rows for count in counts))
    numbers = {
        "clean": clean.content.counts.rows_kept,
        "left_out_by_where": clean.content.counts.rows_kept - num_documents,
        "exported": num_documents,
        "text_bytes": sum(count.bytes for count in counts),
        "with_licence": sum(result["with_licence"] for result in counted),
    }
    content = {
        **prepared.identity,
        "columns": {column.name: str(column.type) for column in source.schema},
        "counts": numbers,
        **{name: _most_frequent(result[name] for result in counted) for name in ("sources", "languages", "licences")},
        "files": [_file_json(file) for file in files],
    }
    if options.format == DATASET_FORMAT:
        facts = ExportFacts(source.tables, source.schema, content, digest_of(content))
        pages = {
            CARD: export_card(facts, text).to_bytes(),
            CROISSANT: canonical_json(export_croissant(facts, text)) + b"\n",
        }
        for name, data in pages.items():
            out.write_atomic(name, data)
    return _finish(out, content, clean)


def export_table(prepared: PreparedExport, run_all: Runner) -> dict[str, Any]:
    """Write a table of a run with plain types, one file for each part, with the manifest last; return the manifest."""
    out, version = prepared.out, prepared.table
    if version is None:
        raise ContractError("export: expected a table, got rows of clean text. Use `export_text`.")
    table = prepared.identity["table"]
    if prepared.manifest is not None:
        return _ended(out, prepared.manifest)
    out.write_atomic(PLAN, canonical_json(prepared.identity))
    suffix = suffix_of(prepared.identity["format"], prepared.identity.get("compression", ZSTD))
    tasks = [
        TableTask(version.folder, path, table, number, out, suffix)
        for number, path in enumerate(version.manifest.paths_of())
    ]
    files = written_files(run_all(convert_part, tasks, "export"))
    rows = sum(file.rows for file in files)
    _check_count(f"rows of `{table}`", rows, sum(entry.rows for entry in version.manifest.content.files))
    content = {**prepared.identity, "counts": {"rows": rows}, "files": [_file_json(file) for file in files]}
    return _finish(out, content, version.manifest)


def _finish(out: Store, content: dict[str, Any], made_from: Manifest) -> dict[str, Any]:
    """Delete what an unfinished export leaves, write the manifest, and return it."""
    manifest = {
        "content": content,
        "digest": digest_of(content),
        "run": {"code_version": version("penstock"), "data_built": made_from.run.started},
    }
    for name in sorted(out.child(PARTIAL).walk()):
        if f"{PARTIAL}/{name}" != PLAN:
            out.delete(f"{PARTIAL}/{name}")
    out.write_atomic(MANIFEST, canonical_json(manifest))
    return _ended(out, manifest)


def _ended(out: Store, manifest: dict[str, Any]) -> dict[str, Any]:
    """Delete the plan of an export that has a manifest, and return the manifest."""
    if out.exists(PARTIAL):
        out.delete_folder(PARTIAL)
    return manifest


def _check_count(what: str, number: int, expected: int) -> None:
    if number != expected:
        raise ContractError(
            f"export: expected {expected:,} {what}, as the manifest counts, got {number:,}. Run `penstock verify RUN`."
        )


def _file_json(file: WrittenFile) -> dict[str, Any]:
    return {"path": file.path, "rows": file.rows, "bytes": file.bytes, "sha256": file.sha256}


def _most_frequent(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of counts by name, sorted by name, of the MAX_NAMES most frequent names."""
    totals: Counter[str] = Counter()
    for count in counts:
        totals.update(count)
    return dict(sorted(sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:MAX_NAMES]))
