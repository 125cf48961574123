"""The receipts of exports: what `penstock export` wrote from a run, where, and from which versions of its tables.

A receipt is a file `exports/<id>.json` of the run. A takedown reads it to name the copies outside of the run that hold
removed documents. A run whose training begins from a checkpoint of this run leaves a receipt too.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from schemas.errors import ContractError, reading
from schemas.ids import canonical_json, digest_of
from schemas.lock_files import EXPORT_LOCK
from schemas.paths import is_below, is_on_known_server
from schemas.storage import Store
from schemas.takedown import TAKEDOWN_ID

EXPORTS = "exports"
"""Folder of a run with the receipts of its exports."""
RECEIPT = re.compile(r"[0-9a-f]{12}\.json")
MODEL = "huggingface"
"""Format of an export of a checkpoint as a folder of Hugging Face."""
TRAINED_ON = "training"
"""Format of the receipt of another run that began its training from a checkpoint of this run, directly or not, or that
was trained on its dataset."""


class ExportedFile(BaseModel):
    """A file of an export."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Path relative to the destination."""
    bytes: int
    """Size of the file [bytes]."""
    sha256: str
    """SHA-256 of its content (hex)."""


class ExportReceipt(BaseModel):
    """`exports/<id>.json`: an export of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    """Version of the file format."""
    id: str = Field(pattern=TAKEDOWN_ID)
    """Id of the export: a digest of the destination, the options, the tables and the checkpoint."""
    made: str
    """Time at which the export was complete, or at which an incomplete one was started, ISO 8601, UTC."""
    destination: str
    """URI or absolute path of the folder. A URI with credentials in it is refused before an export starts."""
    options: dict[str, Any]
    """Options of the command that were given, by name, such as `format`."""
    table: str
    """The table whose documents were exported, or on which the model was trained."""
    tables: dict[str, str]
    """Digest of every table that was read, by name."""
    checkpoint: str | None = None
    """Folder of the checkpoint that was exported, or that a training began from, relative to the run; None = none."""
    counts: dict[str, int] = {}
    """Numbers of what was written, such as documents and tokens."""
    files: list[ExportedFile]
    """Every file of a complete export."""
    code_version: str
    """Version of this package."""
    replaced_by: str = ""
    """Id of a later export at the same destination; empty = there is none."""
    deleted: bool = False
    """True if a takedown has deleted its files to make it again; what is at the destination now is not of this one."""
    complete: bool = True
    """False from the start of an export to its end: if it was killed, files at the destination may hold documents."""

    def command(self, run: Store) -> str:
        """Return the command that makes the export again, to be run when its folder is empty."""
        options = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return shlex.join(["penstock", "export", run.uri, "--out", self.destination, *options])


def begin_receipt(
    run: Store, out: Store, options: Mapping[str, Any], read: Mapping[str, str], checkpoint: str | None = None
) -> ExportReceipt:
    """Write into a run the receipt of an export that is not complete, and return it; `write_receipt` completes it.

    If the export is killed, a takedown still knows its destination. Arguments are those of `write_receipt`.
    """
    receipt = _receipt(out, options, read, checkpoint=checkpoint).model_copy(update={"complete": False})
    known = next((own for own in read_receipts(Store(run.address)) if own.id == receipt.id), None)
    if known is None or known.deleted or known.replaced_by:
        _store(Store(run.address), receipt)
    return receipt if known is None else known


def exported_files(out: Store) -> Iterator[str]:
    """Yield the names of the files in the folder of an export, but for the lock of a process that writes there."""
    return (name for name in out.walk() if name != EXPORT_LOCK)


def write_receipt(
    run: Store,
    out: Store,
    options: Mapping[str, Any],
    read: Mapping[str, str],
    names: Sequence[str] | None = None,
    **more: Any,
) -> ExportReceipt:
    """Write the receipt of a complete export into its run, and return it. Every file of the export is hashed.

    Earlier receipts of the same destination are marked as replaced.

    `options`: those of the command. `read`: digest of each table that was read, that of the documents first. `names`:
    the files; None: all in the folder. `more`: `counts` and `checkpoint` of the receipt.
    """
    files = [
        ExportedFile(path=name, bytes=out.size(name), sha256=out.sha256(name))
        for name in sorted(exported_files(out) if names is None else names)
    ]
    receipt = _receipt(out, options, read, files=files, **more)
    folder = Store(run.address)  # an earlier version of a run is read-only, but not its folder
    for other in [*read_receipts(folder)]:
        if other.destination == receipt.destination and not other.replaced_by and other.id != receipt.id:
            _store(folder, other.model_copy(update={"replaced_by": receipt.id}))
    _store(folder, receipt)
    return receipt


def _receipt(out: Store, options: Mapping[str, Any], read: Mapping[str, str], **more: Any) -> ExportReceipt:
    given = {name: value for name, value in sorted(options.items()) if value is not None}
    return ExportReceipt(
        id=digest_of([out.address, given, dict(read), more.get("checkpoint")])[:12],
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        destination=out.address,
        options=given,
        table=next(iter(read)),
        tables=dict(read),
        code_version=version("penstock"),
        **{"files": [], **more},
    )


def mark_deleted(run: Store, receipt: ExportReceipt) -> None:
    """Record in a run that all files of an export are deleted."""
    _store(run, receipt.model_copy(update={"deleted": True}))


def _store(run: Store, receipt: ExportReceipt) -> None:
    run.write_atomic(f"{EXPORTS}/{receipt.id}.json", canonical_json(receipt.model_dump(mode="json")))


def read_receipts(run: Store) -> Iterator[ExportReceipt]:
    """Yield the receipts of a run, sorted by id. Raises ContractError if one is damaged or names files elsewhere."""
    names = sorted(run.child(EXPORTS).walk())
    for name in (name for name in names if RECEIPT.fullmatch(name)):
        where = f"{run.uri}/{EXPORTS}/{name}"
        with reading(where, "the receipt of an export", "Delete it; a takedown then does not know this export."):
            receipt = ExportReceipt.model_validate(run.read_json(f"{EXPORTS}/{name}"))
            _check_paths(name, receipt.id, [file.path for file in receipt.files])
        yield receipt


def destination_of(run: Store, receipt: ExportReceipt) -> Store:
    """Return the folder of an export. Raises ContractError if it is on a server that only the receipt names."""
    if not is_on_known_server(run, receipt.destination):
        raise ContractError(
            f"{receipt.destination}: expected an export on a server that the environment or the address of the run "
            f"names, got one that only receipt {receipt.id} names. Look after this export yourself."
        )
    return Store(receipt.destination)


def _check_paths(name: str, identifier: str, paths: Sequence[str]) -> None:
    """Raise ValueError unless a receipt has the name of its id, and its files are below the destination."""
    if name != f"{identifier}.json":
        raise ValueError(f"id {identifier}")
    if bad := [path for path in paths if not is_below(path)]:
        raise ValueError(f"a file {bad[0]!r:.60} outside of the destination")
