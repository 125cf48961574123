"""The exports of a run that hold documents of a takedown: found by their receipts, checked, and deleted.

An export is outside of the run, so a takedown does not change it unless it is asked to make it again. What an export
holds follows from the versions of the tables that it was made from.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.takedown.shards import find_removed_rows
from pipeline.takedown.tables import holds_documents
from schemas.errors import ConfigError, PenstockError
from schemas.exports import (
    MODEL,
    TRAINED_ON,
    ExportReceipt,
    destination_of,
    exported_files,
    mark_deleted,
    read_receipts,
)
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import open_table, read_run
from schemas.paths import check_deletable
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import Certificate, Effects, TableChange, takedown_ancestry
from schemas.tokens import open_dataset
from schemas.versions import DATASET

OTHER_VERSION = "it is of tables with other settings or inputs than the current ones, so it cannot be made again"


def exports_with(run: Store, changes: Mapping[str, TableChange], effects: Effects) -> list[ExportReceipt]:
    """Return the exports that hold documents which a takedown removed, or models that were trained on them.

    An export of a version that is neither the one before the takedown nor the one after it may hold them, so it is
    returned too.
    """
    return [
        receipt
        for receipt in read_receipts(run)
        if not receipt.replaced_by and _may_hold(run, receipt, changes) and not _is_clean(receipt, effects)
    ]


def _is_clean(receipt: ExportReceipt, effects: Effects) -> bool:
    """Return True for a model of a checkpoint that was not trained on the documents.

    Training again after a takedown writes checkpoints of the same names, so the dataset is compared too.
    """
    clean = {(model.checkpoint, model.dataset) for model in effects.models if not model.may_have_seen}
    return (receipt.checkpoint, receipt.tables.get(DATASET)) in clean


def _may_hold(run: Store, receipt: ExportReceipt, changes: Mapping[str, TableChange]) -> bool:
    """Return True unless the exported table had none of the removed documents."""
    digest, change = receipt.tables[receipt.table], changes.get(receipt.table)
    if change is None:
        return digest != _current(run, receipt.table)
    return digest != change.after and (digest != change.before or change.rows > 0)


def _current(run: Store, table: str) -> str | None:
    """Return the digest of the current version of a table; None if the run has none."""
    return open_table(run, table)[1].digest if table in read_run(run).tables else None


def is_of_current(run: Store, receipt: ExportReceipt) -> bool:
    """Return True if an export is of the current version of its table, or of what this was before takedowns.

    Another version has other settings or inputs, so an export of the current one is no replacement.
    """
    if receipt.table not in read_run(run).tables:
        return False
    folder, manifest = open_table(run, receipt.table)
    earlier = takedown_ancestry(folder.child("../.."), manifest)
    return receipt.tables[receipt.table] in {manifest.digest, *(own.tables[receipt.table].before for own in earlier)}


def exports_before(run: Store, documents: frozenset[bytes], effects: Effects) -> list[ExportReceipt]:
    """Return the exports that would hold documents of a takedown which has not started, as `exports_with` does."""
    holding: dict[str, bool] = {}
    found = []
    for receipt in read_receipts(run):
        table = receipt.table
        if receipt.replaced_by or _is_clean(receipt, effects):
            continue
        if receipt.tables[table] == _current(run, table):
            if table not in holding:
                holding[table] = _holds(run, table, documents)
            if not holding[table]:
                continue
        found.append(receipt)
    return found


def _holds(run: Store, name: str, documents: frozenset[bytes]) -> bool:
    """Return True if the current version of a table has one of the documents."""
    if name == DATASET:
        return bool(find_removed_rows(open_dataset(run, even_replaced=True), documents))
    (folder, manifest), ids = open_table(run, name), pa.array(sorted(documents), pa.binary(DOC_ID_BYTES))
    return any(holds_documents(folder, path, TABLES[name], ids) for path in manifest.paths_of("part-"))


def describe_exports(run: Store, receipts: Sequence[ExportReceipt]) -> Iterator[str]:
    """Yield lines about exports that hold, or may hold, removed documents, with the command that makes each again."""
    for receipt in receipts:
        if not receipt.complete:
            yield (
                f"export {receipt.id}: began to write {receipt.options.get('format')} of {receipt.table} to "
                f"{receipt.destination} and did not end; delete what is in this folder"
            )
        elif receipt.options.get("format") == TRAINED_ON and receipt.checkpoint is None:
            yield f"run {receipt.destination} was trained on the dataset with them: delete what has read them there"
        elif receipt.options.get("format") == TRAINED_ON:
            yield (
                f"run {receipt.destination}: its training began from {receipt.checkpoint}, which was trained on them; "
                "delete its checkpoints"
            )
        elif receipt.options.get("format") == MODEL:
            yield f"export {receipt.id}: a model that was trained on them, in {receipt.destination}; delete it"
        else:
            again = f"delete it and make it again: `{receipt.command(run)}`"
            yield (
                f"export {receipt.id}: {receipt.options.get('format')} of {receipt.table} in {receipt.destination}; "
                f"{again if is_of_current(run, receipt) else f'delete it: {OTHER_VERSION}'}"
            )


def files_left(run: Store, receipt: ExportReceipt) -> list[str] | None:
    """Return the files of an export that are still at its destination with their old content; None: not reachable.

    Files that a newer export at this destination has with the same content are left out. Of an incomplete export these
    are all files in the folder.
    """
    newer = {
        (file.path, file.sha256)
        for other in read_receipts(run)
        if other.destination == receipt.destination and not other.replaced_by and other.id != receipt.id
        for file in other.files
    }
    try:
        out = destination_of(run, receipt)
        if not receipt.complete:
            return sorted(exported_files(out))
        present = [file for file in receipt.files if (file.path, file.sha256) not in newer and out.exists(file.path)]
        return [file.path for file in present if out.sha256(file.path) == file.sha256]
    except (PenstockError, OSError):
        return None


def check_exports(run: Store, certificate: Certificate) -> Iterator[str]:
    """Yield a note for each export that a certificate names: gone, not reachable, or still with removed documents."""
    receipts = {receipt.id: receipt for receipt in read_receipts(run)}
    for identifier in certificate.exports:
        if (receipt := receipts.get(identifier)) is None:
            yield f"export {identifier}: its receipt is absent, so it was not checked"
        elif receipt.options.get("format") == TRAINED_ON:
            began = f"began its training from {receipt.checkpoint}, which was trained on removed documents"
            began = began if receipt.checkpoint else "was trained on a dataset with removed documents"
            yield f"run {receipt.destination} {began}; its checkpoints were not checked"
        elif (left := files_left(run, receipt)) is None:
            yield f"export {identifier}: {receipt.destination} cannot be read from here, so it was not checked"
        elif left:
            what = "is a model trained on removed documents" if receipt.checkpoint else "still holds removed documents"
            what = what if receipt.complete else "was not written to the end and may hold removed documents"
            yield f"export {identifier}: {receipt.destination} {what}, in {len(left):,} file(s), such as {left[0]}"
        else:
            again = f", replaced by export {receipt.replaced_by}" if receipt.replaced_by else ""
            yield f"export {identifier}: no file of it is left in {receipt.destination}{again}"


def delete_export(run: Store, receipt: ExportReceipt) -> None:
    """Delete the files of an export, so that another one can be made in its folder, and record this in its run.

    Nothing is deleted a second time: the files of the new export have the same names, and it may resume. Files of
    Megatron may be in a folder with others. Raises ConfigError before anything is deleted if the folder has other or
    changed files, or if the receipt names files that no export writes: a receipt of others may name any.
    """
    if receipt.deleted:
        return
    out = destination_of(run, receipt)
    known: dict[str, Any] = {file.path: file.sha256 for file in receipt.files}
    present = [name for name in exported_files(out) if name in known or receipt.options.get("format") != MEGATRON]
    if known.keys().isdisjoint(present):
        return
    _check_files(receipt)
    for name in present:
        if known.get(name) is None or out.sha256(name) != known[name]:
            raise ConfigError(
                f"takedown --remake-exports: expected only files of export {receipt.id} in {out.uri}, got {name}, "
                "which is not one of them or was changed. Make this export again yourself."
            )
        check_deletable(out, name)
    for name in sorted(present, key=lambda own: own != "export.json"):
        out.delete(name)
    mark_deleted(run, receipt)


MEGATRON = "megatron"
TEXT_FILES = re.compile(r"export\.json|README\.md|croissant\.json|data/[^/]+")
"""The files of an export of documents or of a table, which always has export.json."""


def _check_files(receipt: ExportReceipt) -> None:
    """Raise ConfigError unless the files of a receipt are those of an export in its format."""
    names = {file.path for file in receipt.files}
    if receipt.options.get("format") == MEGATRON:
        written = {name for name in names if "/" not in name and name.endswith((".bin", ".idx"))}
        needed = {f"{name.removesuffix('.bin')}.idx" for name in names if name.endswith(".bin")}
    else:
        written, needed = {name for name in names if TEXT_FILES.fullmatch(name)}, {"export.json"}
    if wrong := [*sorted(names - written), *sorted(needed - names)]:
        raise ConfigError(
            f"takedown --remake-exports: expected the files of an export in {receipt.destination}, got a receipt "
            f"{receipt.id} {'with' if wrong[0] in names else 'without'} {wrong[0]}. Make this export again yourself."
        )
