"""A takedown from its intent to its end: killed anywhere, the old or the new versions stand, and the next call ends it.

The intent is written first, then new files, manifests and certificate; one write of run.json puts the new versions in
place of the old ones. Only behind it is anything deleted, and the intent last of all.
"""

import json
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.takedown.rewrite import TABLE_ORDER, Removal, write_versions
from pipeline.takedown.select import Selection
from pipeline.takedown.tables import SPAN_LENGTHS, spans_per_document
from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of
from schemas.manifest import MANIFEST_NAME, REPLACED_NAME, open_table, read_run, write_run
from schemas.storage import Store
from schemas.takedown import (
    PENDING_NAME,
    REMOVED_ID,
    Certificate,
    Effects,
    Mode,
    TableChange,
    Traces,
    TrainedTokenizer,
    certificate_name,
    identify_takedown,
    parent_name,
    read_certificate,
    salted_digest,
)

TRAINING_LOGS = ("train/events.jsonl", "train/quarantine.jsonl")
"""What a training run tells of documents, an object a line."""
DERIVED_FILES = ("report.html",)
"""Files of a run that quote documents and can be made again."""
DESCRIPTIVE_FIELDS = ("url", "split")
"""What it says of a document, besides numbers and its id."""


class PendingTakedown(BaseModel):
    """`takedowns/pending.json`: a takedown under way; it holds ids, and goes when it is done."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    id: str
    """The takedown."""
    mode: Mode
    """Whether positions are kept."""
    salt: str
    """Goes into every digest of the certificate."""
    documents: list[str]
    """Ids, hex."""
    requests: list[str]
    """Salted digests of what was asked for."""
    copies_left: int
    """Near copies that still stand afterwards."""
    tables: dict[str, str]
    """The versions that stood when it began."""
    digests: dict[str, str]
    """Their digests."""
    effects: Effects
    """What training had seen of the documents."""
    keep_old: bool
    """Whether the old files stay until told."""


def begin_takedown(run: Store, selection: Selection, mode: Mode, effects: Effects, keep_old: bool) -> PendingTakedown:
    """Write the intent of a takedown; from here on every call of `finish_takedown` brings it to its end."""
    tables = read_run(run).tables
    digests = {name: open_table(run, name)[1].digest for name in TABLE_ORDER if name in tables}
    ids = sorted(document.hex() for document in selection.documents)
    salt = digest_of([digests, ids])
    pending = PendingTakedown(
        id=identify_takedown(digests, mode, [salted_digest(salt, "document", bytes.fromhex(one)) for one in ids]),
        mode=mode,
        salt=salt,
        documents=ids,
        requests=sorted(salted_digest(salt, kind, value.encode()) for kind, value in selection.request.items()),
        copies_left=selection.copies_left,
        tables=tables,
        digests=digests,
        effects=effects,
        keep_old=keep_old,
    )
    run.write_atomic(PENDING_NAME, canonical_json(pending.model_dump(mode="json")))
    return pending


def read_pending(run: Store) -> PendingTakedown | None:
    """The takedown that was begun and not ended; None = there is none."""
    if not run.exists(PENDING_NAME):
        return None
    try:
        return PendingTakedown.model_validate(run.read_json(PENDING_NAME))
    except ValidationError as error:
        raise ContractError(
            f"{run.uri}/{PENDING_NAME}: expected a takedown under way, got {error}. If run.json still names the old "
            "versions, remove it and begin again."
        ) from error


def finish_takedown(run: Store, pending: PendingTakedown) -> Certificate:
    """Bring a takedown to its end, from wherever it was broken off; returns its certificate."""
    standing = read_run(run)
    if standing.tables == pending.tables:
        certificate = _prepare(run, pending)
        after = {name: change.version_after for name, change in certificate.tables.items()}
        write_run(run, standing.model_copy(update={"tables": standing.tables | after}))
    else:
        certificate = read_certificate(run, pending.id)
        after = {name: change.version_after for name, change in certificate.tables.items()}
        if standing.tables != pending.tables | after:
            raise ContractError(
                f"{run.uri}: expected the tables that takedown {pending.id} began with, got others. Something else "
                f"has changed run.json meanwhile: restore it, or remove {PENDING_NAME} and begin again."
            )
    for table, change in certificate.tables.items():
        moved = {"to": change.version_after, "id": certificate.id}
        run.write_atomic(f"{table}/{change.version_before}/{REPLACED_NAME}", canonical_json(moved))
    _clean_told(run, {*pending.documents})
    for name in DERIVED_FILES:
        run.delete(name)
    if not pending.keep_old:
        drop_old(run, list(certificate.tables))
    run.delete(PENDING_NAME)
    return certificate


def _prepare(run: Store, pending: PendingTakedown) -> Certificate:
    """Write the new versions and the certificate; nothing that stands is changed."""
    documents = frozenset(bytes.fromhex(one) for one in pending.documents)
    removal = Removal(pending.id, pending.mode, pending.salt, documents, spans_per_document(len(documents)))
    tokenizer = _tokenizer(run)
    for table in (name for name in TABLE_ORDER if name in pending.tables):
        path = f"{table}/{pending.tables[table]}/{MANIFEST_NAME}"
        run.write_atomic(parent_name(pending.id, table), run.read_bytes(path))
    changes = write_versions(run, removal)
    certificate = _certificate(pending, removal, changes, tokenizer)
    run.write_atomic(certificate_name(pending.id), certificate.to_bytes())
    return certificate


def _certificate(
    pending: PendingTakedown, removal: Removal, changes: dict[str, TableChange], tokenizer: TrainedTokenizer | None
) -> Certificate:
    traces = [
        Traces(
            document=salted_digest(pending.salt, "document", one),
            num_tokens=removal.num_tokens.get(one, 0),
            tokens=removal.token_traces.get(one, []),
            text=removal.text_traces.get(one, []),
        )
        for one in removal.documents
    ]
    return Certificate(
        id=pending.id,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        mode=pending.mode,
        salt=pending.salt,
        requests=pending.requests,
        documents=sorted(traces, key=lambda one: one.document),
        copies_left=pending.copies_left,
        standing=pending.digests,
        tables=changes,
        windows=SPAN_LENGTHS,
        effects=pending.effects,
        tokenizer=tokenizer,
        code_version=version("penstock"),
        pyarrow_version=pa.__version__,
    ).sealed()


def _tokenizer(run: Store) -> TrainedTokenizer | None:
    """The tokenizer that stands, and what it was trained on."""
    if "tokenizer" not in read_run(run).tables:
        return None
    content = open_table(run, "tokenizer")[1].content
    read = {entry.name: entry.sha256 for entry in content.inputs}
    read |= content.figures.get("takedown", {}).get("read_before", {})
    return TrainedTokenizer(sha256=content.figures["contract"]["sha256"], read=read.get("clean", ""))


def _clean_told(run: Store, documents: set[str]) -> None:
    """Blank what a training run tells of documents; lines of a run that was killed stay as they are."""
    for name in TRAINING_LOGS:
        text = run.read_bytes(name) if run.exists(name) else b""
        if (now := b"\n".join(_cleaned(line, documents) for line in text.split(b"\n"))) != text:
            run.write_atomic(name, now)


def _cleaned(line: bytes, documents: set[str]) -> bytes:
    """A line without what it says of documents: a spike's list of them, a rewind's, or a quarantined one itself."""
    try:
        told = json.loads(line)
        said = [one for one in (told, *told.get("documents", ())) if one.get("doc_id") in documents]
        ids = told.get("quarantined", [])
        if not said and documents.isdisjoint(ids):
            return line
    except (ValueError, AttributeError, TypeError):
        return line
    for one in said:
        one |= {name: "" for name in DESCRIPTIVE_FIELDS if name in one} | {"doc_id": REMOVED_ID.hex()}
    if ids:
        told["quarantined"] = [REMOVED_ID.hex() if one in documents else one for one in ids]
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def unreferenced_files(run: Store, tables: Collection[str] = TABLE_ORDER) -> Iterator[str]:
    """Files of some of the run's tables that no version that stands names: they may hold what was removed."""
    standing = read_run(run).tables
    for table in (name for name in TABLE_ORDER if name in standing and name in tables):
        manifest = open_table(run, table)[1]
        named = {f"{table}/{_place(standing[table], path)}" for path in manifest.run.paths.values()}
        named.add(f"{table}/{standing[table]}/{MANIFEST_NAME}")
        for name in sorted(run.child(table).walk()):
            if f"{table}/{name}" not in named and not name.endswith(f"/{REPLACED_NAME}"):
                yield f"{table}/{name}"


def _place(standing: str, path: str) -> str:
    """Where a file of the standing version lies in the folder of its table."""
    parts = [standing, *path.split("/")]
    while ".." in parts:
        at = parts.index("..")
        del parts[at - 1 : at + 1]
    return "/".join(parts)


def drop_old(run: Store, tables: list[str] | None = None) -> list[str]:
    """Delete the files that no standing version names, manifests first; returns their names. None = of all tables."""
    names = [name for name in unreferenced_files(run) if tables is None or name.partition("/")[0] in tables]
    for name in (name for name in names if name.endswith(f"/{MANIFEST_NAME}")):
        run.delete(name)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(run.delete, (name for name in names if not name.endswith(f"/{MANIFEST_NAME}"))))
    return names
