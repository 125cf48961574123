"""The transaction of a takedown: if the process is killed, either all old or all new versions are current.

The file `takedowns/pending.json` is written first, then the new files, the manifests and the certificate. A single
write of `run.json` replaces the old versions by the new ones. Old files are deleted only after that, and `pending.json`
last. The next takedown of the run finishes an interrupted one first.
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.engine.finished_parts import delete_finished_parts
from pipeline.engine.part import delete_part_results
from pipeline.register.delta import is_own_commit
from pipeline.takedown.exports import exports_with
from pipeline.takedown.membership import write_proofs
from pipeline.takedown.papers import delete_papers
from pipeline.takedown.rewrite import Removal, new_version, write_versions
from pipeline.takedown.select import Selection
from pipeline.takedown.tables import SPAN_LENGTHS, spans_per_document
from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of
from schemas.leases import check_before_delete, check_still_held
from schemas.manifest import MANIFEST_NAME, REPLACED_NAME, RUN_NAME, open_table, read_manifest, read_run, write_run
from schemas.paths import PLACE, check_deletable, check_unlinked_tables
from schemas.removed import certificates_of, request_forms
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import (
    PENDING_NAME,
    REMOVED_ID,
    TAKEDOWN_ID,
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
"""Logs of training that name documents; each line is a JSON object."""
DERIVED_FILES = ("report.html",)
"""Files of a run that quote documents and that a takedown deletes, because they can be written again."""
DESCRIPTIVE_FIELDS = ("url", "split")
"""Fields of a log line that a takedown blanks along with the doc_id, because they identify the document."""


class PendingTakedown(BaseModel):
    """`takedowns/pending.json`: an unfinished takedown. It contains document ids; the takedown deletes it last."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    id: str = Field(pattern=TAKEDOWN_ID)
    """Id of the takedown."""
    mode: Mode
    """`tombstones` if positions are kept, `compact` if they are moved."""
    salt: str
    """Salt of every digest of the certificate."""
    documents: list[str]
    """Ids (hex) of the documents to remove."""
    requests: list[str]
    """Salted digests of the requests."""
    forms: list[str] | None = None
    """Salted digests of the requests in their canonical forms; None = an earlier version began the takedown."""
    near: bool = False
    """True if near-duplicates were requested too."""
    derived: int = 0
    """Number of the documents that were not requested, but made from others."""
    derived_left: int = 0
    """Number of documents that were made from others and are kept."""
    keeps_derived: bool = False
    """True if documents that were made from others are kept."""
    copies_left: int
    """Number of near-duplicates of the documents that are kept."""
    tables: dict[str, str]
    """Version folder of every table, by name, before the takedown."""
    digests: dict[str, str]
    """Digest of each of these versions, by name of the table."""
    effects: Effects
    """Effects of the documents on training."""
    keep_old: bool
    """True if the old files are kept until `penstock takedown --drop-old`."""
    prove: bool = False
    """True if proofs of the documents against the Merkle roots of the dataset are written."""


def begin_takedown(
    run: Store, selection: Selection, mode: Mode, effects: Effects, *, keep_old: bool, prove: bool = False
) -> PendingTakedown:
    """Write `takedowns/pending.json` and return its content; `finish_takedown` then removes the documents."""
    tables = read_run(run).tables
    digests = {name: open_table(run, name)[1].digest for name in TABLES if name in tables}
    ids = sorted(document.hex() for document in selection.documents)
    request = selection.request
    # All takedowns of a run have one salt, so that a document of another run is looked up once for all of them.
    earlier = next(certificates_of(run), None)
    salt = digest_of([digests, ids]) if earlier is None else earlier.salt
    pending = PendingTakedown(
        id=identify_takedown(digests, mode, [salted_digest(salt, "document", bytes.fromhex(own)) for own in ids]),
        mode=mode,
        salt=salt,
        documents=ids,
        requests=sorted(salted_digest(salt, kind, value.encode()) for kind, value in request.items()),
        forms=request_forms(salt, request.items()),
        near=bool(request.near) or request.with_copies,
        derived=0 if request.keep_derived else len(selection.derived),
        derived_left=len(selection.derived) if request.keep_derived else 0,
        keeps_derived=request.keep_derived,
        copies_left=len(selection.copies),
        tables=tables,
        digests=digests,
        effects=effects,
        keep_old=keep_old,
        prove=prove,
    )
    run.write_atomic(PENDING_NAME, canonical_json(pending.model_dump(mode="json")))
    return pending


def read_pending(run: Store) -> PendingTakedown | None:
    """Return the unfinished takedown of a run; None = there is none.

    Raises ContractError if `takedowns/pending.json` is not valid.
    """
    if not run.exists(PENDING_NAME):
        return None
    try:
        return PendingTakedown.model_validate(run.read_json(PENDING_NAME))
    except ValidationError as error:
        raise ContractError(
            f"{run.uri}/{PENDING_NAME}: expected a valid record of an unfinished takedown, got an error: {error}. "
            "Delete the file if run.json still names the table versions from before the takedown."
        ) from error


def finish_takedown(run: Store, pending: PendingTakedown) -> Certificate:
    """Carry out a takedown, or the rest of an interrupted one, and return its certificate."""
    current = read_run(run)
    if current.tables == pending.tables:
        certificate = _prepare(run, pending)
        after = {name: change.version_after for name, change in certificate.tables.items()}
        write_run(run, current.model_copy(update={"tables": current.tables | after}))
    else:
        certificate = read_certificate(run, pending.id)
        after = {name: change.version_after for name, change in certificate.tables.items()}
        if current.tables != pending.tables | after:
            raise ContractError(
                f"{run.uri}/run.json: expected the table versions from the start of takedown {pending.id}, got others: "
                "run.json was changed before the takedown was finished. Restore run.json from a backup."
            )
    for table, change in certificate.tables.items():
        moved = {"to": change.version_after, "id": certificate.id}
        run.write_atomic(f"{table}/{change.version_before}/{REPLACED_NAME}", canonical_json(moved))
        delete_part_results(run.child(f"{table}/{change.version_after}"))
    delete_finished_parts(run)  # they describe files with the documents
    _clean_logs(run, {*pending.documents})
    for name in DERIVED_FILES:
        _delete(run, name)
    delete_papers(run)
    if pending.keep_old:
        _retire_others(run, certificate)
    else:
        # Versions of other settings, and tables that a changed recipe no longer makes, such as `comparisons`, have
        # rows of the documents too.
        drop_old(run)
    _delete(run, PENDING_NAME)
    return certificate


def _delete(run: Store, name: str) -> None:
    check_before_delete(run)
    run.delete(name)


def _retire_others(run: Store, certificate: Certificate) -> None:
    """Mark all versions that are not current as replaced: those of other settings may hold removed documents.

    The version that replaces such a version does not exist. A run with those settings builds it from tables without
    the documents, or is refused. What an interrupted run left of a version is deleted.
    """
    current = read_run(run).tables
    for table in TABLES:
        for other in sorted(_complete_versions(_files_of_versions(run, table)) - {current.get(table)}):
            if not run.exists(marker := f"{table}/{other}/{REPLACED_NAME}"):
                moved = {"to": new_version(certificate.id, table, other), "id": certificate.id}
                run.write_atomic(marker, canonical_json(moved))
    _delete_files(run, [*_unfinished_files(run)])


def _unfinished_files(run: Store) -> Iterator[str]:
    """Yield the files of versions without a manifest, unless a version with one names them."""
    for table in TABLES:
        names = _files_of_versions(run, table)
        complete = _complete_versions(names)
        manifests = {version: read_manifest(run.child(f"{table}/{version}")) for version in complete}
        named = {_path_in_table(version, path) for version, own in manifests.items() for path in own.paths.values()}
        for name in names:
            if name.partition("/")[0] not in complete and name not in named and not name.endswith(f"/{REPLACED_NAME}"):
                yield f"{table}/{name}"


def _prepare(run: Store, pending: PendingTakedown) -> Certificate:
    """Write the new table versions and the certificate; `run.json` still names the old versions afterwards."""
    documents = frozenset(bytes.fromhex(own) for own in pending.documents)
    removal = Removal(
        pending.id, pending.mode, pending.salt, documents, spans_per_document(len(documents)), pending.prove
    )
    tokenizer = _tokenizer(run)
    for table in (name for name in TABLES if name in pending.tables):
        path = f"{table}/{pending.tables[table]}/{MANIFEST_NAME}"
        run.write_atomic(parent_name(pending.id, table), run.read_bytes(path))
    changes = write_versions(run, removal)
    if removal.membership is not None:
        write_proofs(run, pending.id, removal.membership)
    certificate = _certificate(pending, removal, changes, tokenizer)
    exports = [receipt.id for receipt in exports_with(run, changes, pending.effects)]
    certificate = certificate.model_copy(update={"exports": exports}).sealed()
    run.write_atomic(certificate_name(pending.id), certificate.to_bytes())
    return certificate


def _certificate(
    pending: PendingTakedown, removal: Removal, changes: dict[str, TableChange], tokenizer: TrainedTokenizer | None
) -> Certificate:
    """Return the certificate of a takedown without its exports and its seal."""
    traces = [
        Traces(
            document=salted_digest(pending.salt, "document", document),
            num_tokens=removal.num_tokens.get(document, 0),
            tokens=removal.token_traces.get(document, []),
            text=removal.text_traces.get(document, []),
        )
        for document in removal.documents
    ]
    return Certificate(
        id=pending.id,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        mode=pending.mode,
        salt=pending.salt,
        requests=pending.requests,
        forms=pending.forms,
        near=pending.near,
        derived=pending.derived,
        derived_left=pending.derived_left,
        keeps_derived=pending.keeps_derived,
        documents=sorted(traces, key=lambda own: own.document),
        copies_left=pending.copies_left,
        versions=pending.digests,
        tables=changes,
        windows=SPAN_LENGTHS,
        effects=pending.effects,
        tokenizer=tokenizer,
        membership=removal.membership.roots if removal.membership else None,
        code_version=version("penstock"),
        pyarrow_version=pa.__version__,
    )


def _tokenizer(run: Store) -> TrainedTokenizer | None:
    """Return the digests of the run's tokenizer and of its training data; None if the run has no tokenizer."""
    if "tokenizer" not in read_run(run).tables:
        return None
    content = open_table(run, "tokenizer")[1].content
    read = {entry.name: entry.sha256 for entry in content.inputs}
    read |= content.figures.get("takedown", {}).get("read_before", {})
    return TrainedTokenizer(sha256=content.figures["contract"]["sha256"], read=read.get("clean", ""))


def _clean_logs(run: Store, documents: set[str]) -> None:
    """Blank removed documents in the logs of training, and delete incomplete lines, which killed processes leave."""
    for name in TRAINING_LOGS:
        text = run.read_bytes(name) if run.exists(name) else b""
        lines = (_cleaned(line, documents) for line in text.split(b"\n"))
        if (now := b"\n".join(line for line in lines if line is not None)) != text:
            run.write_atomic(name, now)


def documents_in_log(text: bytes) -> Iterator[str | None]:
    """Yield the id of each document that a log of training names, and None for an incomplete line."""
    for line in filter(None, text.split(b"\n")):
        try:
            event = json.loads(line)
            ids = [entry.get("doc_id") for entry in (event, *event.get("documents", ()))]
            yield from (str(own) for own in (*ids, *event.get("quarantined", ())) if own)
        except (ValueError, AttributeError, TypeError, RecursionError):
            yield None


def _cleaned(line: bytes, documents: set[str]) -> bytes | None:
    """Return a log line in which the given documents are blanked; None if the line is incomplete."""
    # A line describes a document, lists the documents of a loss spike, or lists the ids that a rewind quarantined.
    try:
        event = json.loads(line)
        entries = [entry for entry in (event, *event.get("documents", ())) if entry.get("doc_id") in documents]
        ids = event.get("quarantined", [])
        if not entries and documents.isdisjoint(ids):
            return line
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None if line else line  # no reader uses it, and it may have the address of a removed document
    for entry in entries:
        entry |= {name: "" for name in DESCRIPTIVE_FIELDS if name in entry} | {"doc_id": REMOVED_ID.hex()}
    if ids:
        event["quarantined"] = [REMOVED_ID.hex() if own in documents else own for own in ids]
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def unreferenced_files(run: Store, tables: Collection[str] = tuple(TABLES)) -> Iterator[str]:
    """Yield the files of `tables` that belong to no current version; they may hold removed documents."""
    current = read_run(run).tables
    for table in (name for name in TABLES if name in tables):
        named: set[str] = set()
        if table in current:
            manifest = open_table(run, table)[1]
            named |= {f"{table}/{_path_in_table(current[table], path)}" for path in manifest.paths.values()}
            named.add(f"{table}/{current[table]}/{MANIFEST_NAME}")
        for name in _files_of_versions(run, table):
            if f"{table}/{name}" not in named and not name.endswith(f"/{REPLACED_NAME}"):
                yield f"{table}/{name}"


def _files_of_versions(run: Store, table: str) -> list[str]:
    """Return the files of all versions of a table, relative to its folder, sorted."""
    return [name for name in _own_files(run, table) if PLACE.fullmatch(f"{table}/{name}")]


def files_left(run: Store) -> list[str]:
    """Return the files in the folders of tables that belong to no version, which a takedown neither reads nor deletes.

    They may be the user's own, or copies of versions under other names. Commits that `penstock register` wrote are left
    out, because they hold no value of a document.
    """
    return [
        f"{table}/{name}"
        for table in TABLES
        for name in _own_files(run, table)
        if not PLACE.fullmatch(f"{table}/{name}") and not is_own_commit(run.child(table), name)
    ]


def _own_files(run: Store, table: str) -> list[str]:
    """Return the files below the folder of a table, relative to it, sorted; not those of a run folder there."""
    names = sorted(run.child(table).walk())
    runs = tuple(f"{table}/{name}".removesuffix(RUN_NAME) for name in names if f"/{name}".endswith(f"/{RUN_NAME}"))
    return [name for name in names if not f"{table}/{name}".startswith(runs)]


def _complete_versions(names: Iterable[str]) -> set[str]:
    """Return the versions of a table that have a manifest among its files `names`."""
    return {name.partition("/")[0] for name in names if name.partition("/")[2] == MANIFEST_NAME}


def _path_in_table(version: str, path: str) -> str:
    """Convert the path of a file relative to a version's folder to its path relative to the table's folder."""
    segments = [version, *path.split("/")]
    while ".." in segments:
        at = segments.index("..")
        del segments[at - 1 : at + 1]
    return "/".join(segments)


def drop_old(run: Store) -> list[str]:
    """Delete the files of versions of all tables that no current version names, and return their names.

    Raises ContractError before anything is deleted if a symbolic link leads to one of them.
    """
    check_unlinked_tables(run)
    names = [*unreferenced_files(run)]
    _delete_files(run, names)
    return names


def _delete_files(run: Store, names: Sequence[str]) -> None:
    """Delete files of tables. Raises ContractError before anything is deleted if a link leads to one of them."""
    check_still_held(run)
    for name in names:
        check_deletable(run, name)
    # Manifests are deleted first, so that no version is left with a manifest but without its files.
    for name in (name for name in names if name.endswith(f"/{MANIFEST_NAME}")):
        _delete(run, name)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(partial(_delete, run), (name for name in names if not name.endswith(f"/{MANIFEST_NAME}"))))
