"""`penstock register`: the tables of a run as Delta or Iceberg tables over the files that are already written."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

from jobs.arguments import Command, add_run
from pipeline.register.delta import register_delta
from pipeline.register.iceberg import register_iceberg
from pipeline.register.record import DELTA, ICEBERG, add_registration
from pipeline.register.tables import ParquetTable, Registered, check_files, location_of, parquet_tables
from schemas.errors import ConfigError
from schemas.locks import lock_export, lock_tables
from schemas.logs import LOGGER
from schemas.storage import Store
from schemas.takedown import check_no_pending_takedown

GROUP = "data"
VERBS = {
    "register": "Register the tables of a run with Delta or Iceberg. The files stay as they are; only metadata is "
    "written. Run it again after the tables have changed.",
}
RAW = ("documents", "text", "comparisons")
"""Tables that may hold personal data."""


def register_command(arguments: argparse.Namespace) -> int:
    """Register tables of a run, and print the version of each."""
    if not arguments.delta and arguments.iceberg is None:
        raise ConfigError("register: expected --delta or --iceberg FOLDER, got neither. Give one.")
    run = Store(arguments.run)
    out = None if arguments.iceberg is None else Store(arguments.iceberg)
    what = "penstock register"
    with lock_tables(run, what), nullcontext() if out is None else lock_export(out, what):
        check_no_pending_takedown(run)
        tables = parquet_tables(run, arguments.table)
        for table in tables:
            check_files(table)
        if arguments.delta:
            for table in tables:
                _print(table, location_of(table.folder), register_delta(table))
            add_registration(run, DELTA, "", arguments.table)
        if out is not None:
            for table in tables:
                _print(table, location_of(out, table.name), register_iceberg(table, out))
            add_registration(run, ICEBERG, out.uri, arguments.table)
    _warn_of_raw(tables)
    return 0


def _print(table: ParquetTable, place: str, registered: Registered) -> None:
    rows, files = sum(file.rows for file in table.files), len(table.files)
    what = f"{rows:,} rows in {files:,} file(s)" if registered.is_changed else "unchanged"
    print(f"{table.name}: version {registered.version} at {place}, {what}", flush=True)


def _warn_of_raw(tables: Sequence[ParquetTable]) -> None:
    if raw := [table.name for table in tables if table.name in RAW]:
        LOGGER.warning(f"register: raw tables, which may hold personal data: {', '.join(raw)}")


def add_register_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `register` except the run."""
    parser.add_argument("--delta", action="store_true", help="write a log of Delta Lake into the folder of each table")
    parser.add_argument(
        "--iceberg", metavar="FOLDER", help="write metadata of Iceberg into this folder: a local path or s3://, hdfs://"
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        action="append",
        default=[],
        help="register this table, such as clean; may be repeated; default: every table of Parquet files",
    )


COMMANDS = {
    "register": Command((add_run, add_register_arguments), register_command, "register run --delta --table clean"),
}
