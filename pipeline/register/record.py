"""`registered.json` in a run folder: where its tables were registered, so that a takedown can name what is stale."""

import shlex
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.storage import Store

RECORD = "registered.json"
DELTA, ICEBERG = "delta", "iceberg"


class Registration(BaseModel):
    """Tables of a run that were registered in one place."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format: str
    """`delta` or `iceberg`."""
    folder: str = ""
    """Folder of the metadata of Iceberg; empty for Delta, whose logs are in the run folder."""
    tables: list[str] = []
    """Names of the tables; empty = every Parquet table of the run."""

    def command(self, run: str) -> str:
        """Return the command that registers the tables of `run` again."""
        place = ["--iceberg", self.folder] if self.format == ICEBERG else ["--delta"]
        names = [word for name in self.tables for word in ("--table", name)]
        return shlex.join(["penstock", "register", run, *place, *names])


def read_registrations(run: Store) -> list[Registration]:
    """Return where the tables of a run were registered. Raises ContractError if the record cannot be read."""
    if not run.exists(RECORD):
        return []
    values = run.read_json(RECORD)
    try:
        return [Registration.model_validate(value) for value in values["registrations"]]
    except (ValidationError, KeyError, TypeError) as error:
        raise ContractError(
            f"{run.uri}/{RECORD}: expected a list of registrations, got another value. Delete the file and register "
            "the tables again."
        ) from error


def add_registration(run: Store, format: str, folder: str, tables: Sequence[str]) -> None:
    """Add a registration to the record of a run. `tables`: as in `Registration`."""
    places = {(each.format, each.folder): each for each in read_registrations(run)}
    before = places.get((format, folder))
    is_whole = not tables or (before is not None and not before.tables)
    names = [] if is_whole else sorted({*tables, *(before.tables if before is not None else ())})
    places[format, folder] = Registration(format=format, folder=folder, tables=names)
    values = [each.model_dump() for _, each in sorted(places.items())]
    run.write_atomic(RECORD, canonical_json({"registrations": values}))


def stale_commands(run: Store, changed: Sequence[str]) -> Iterator[str]:
    """Yield the commands that register changed tables again, where they were registered before."""
    for each in read_registrations(run):
        if not each.tables or {*each.tables} & {*changed}:
            yield each.command(run.uri)
