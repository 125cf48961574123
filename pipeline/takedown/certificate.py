"""The check of a takedown certificate against a run: every digest, every rewritten byte and every traced span.

Only the digests of the manifests are trusted. Every file is read from start to end; one that differs from its manifest
is one of the problems that are listed, so that opening it raises no error. Each rewritten file is encoded
again from its rows and must have the same bytes, so that padding holds no other data. All tokens and texts are scanned
for the spans whose digests the certificate lists.
"""

import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.engine.parquet import open_parquet, write_group
from pipeline.membership.index import canonical_metadata
from pipeline.takedown.check_result import NO_DOCUMENT, CheckResult, judge_shared_spans
from pipeline.takedown.commit import DERIVED_FILES, TRAINING_LOGS, documents_in_log, unreferenced_files
from pipeline.takedown.derived import check_descendants
from pipeline.takedown.exports import check_exports
from pipeline.takedown.membership import check_membership
from pipeline.takedown.papers import check_papers
from pipeline.takedown.shards import BLANK, KEPT, exact_copy
from pipeline.takedown.tables import TEXTS, SpanFinder, columns_with_ids, documents_named, plain_schema
from schemas.arrow_files import ArrowFile
from schemas.errors import ContractError
from schemas.manifest import MANIFEST_NAME, RUN_NAME, Manifest, TableVersion, open_table, read_manifest, read_run
from schemas.older_tables import read_batches
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import (
    PENDING_NAME,
    REMOVED_ID,
    STAGE,
    Certificate,
    descent_of,
    identify_takedown,
    parent_name,
    read_parent,
    salted_digest,
    takedown_ancestry,
)
from schemas.tokens import BY_ID, BY_URL, SHARD_DOCS, read_shards, shard_schema
from schemas.versions import DATASET, attached_runs

# The canonical bytes of a file: its rows, encoded again by the writer of such files.


class DigestSink:
    """A file object that computes the SHA-256 of the data written to it, and discards the data."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Add a buffer to the digest and return the size of the buffer [bytes]."""
        view = memoryview(data)
        self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def close(self) -> None:
        """Mark the file as closed."""
        self.closed = True

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of everything written so far."""
        return self._digest.hexdigest()


def canonical_digest(name: str, table: TableVersion, key: str) -> str:
    """Return the SHA-256 that a rewritten file must have.

    The rows of the file are encoded again to compute the SHA-256. `name` is the name of the table, `key` the name of
    the file in the manifest.
    """
    path = table.manifest.paths[key]
    sink = DigestSink()
    if name != DATASET:
        with table.folder.open_unchecked(path) as file:
            stored = pq.ParquetFile(file)
            with open_parquet(sink, plain_schema(stored.schema_arrow)) as writer:
                for group in range(stored.num_row_groups):
                    write_group(writer, stored.read_row_group(group))
        return sink.sha256
    schema = _schema_of(key, table.manifest.content.figures["tokenizer"])
    with table.folder.open_unchecked(path) as file:
        reader = ArrowFile(file)
        writer_of = pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            writer_of.write_batch(
                pa.RecordBatch.from_arrays([_exact(column) for column in batch.columns], schema=schema),
                canonical_metadata(table, key, number),
            )
        writer_of.close()
    return sink.sha256


def _schema_of(key: str, contract: Mapping[str, Any]) -> pa.Schema:
    """Return the Arrow schema of a dataset file: a shard, a document index or a file of the index by URL or by id."""
    if key.startswith(("by_url/", "by_id/")):
        return BY_URL if key.startswith("by_url/") else BY_ID
    dtype = "uint16" if contract["vocab_size"] <= 1 << 16 else "uint32"
    return SHARD_DOCS if key.endswith(".docs") else shard_schema(dtype)


def _exact(array: pa.Array) -> pa.Array:
    """Return the array with buffers that hold only its own values."""
    if not pa.types.is_list(array.type):
        return exact_copy(array)
    offsets = array.offsets.to_numpy()
    tokens = array.flatten().to_numpy(zero_copy_only=True)  # not copied, because tokens are large
    return pa.ListArray.from_arrays(
        pa.array((offsets - offsets[0]).astype(np.int32)), pa.array(tokens), type=array.type
    )


TEXT_COLUMNS = ("title", "url", *TEXTS)
"""Columns that are scanned for the texts of removed documents, in tables that have the ids of documents."""
DOC_ID = re.compile("[0-9a-f]{32}")
VERSIONS = re.compile(rb'<meta name="table-versions" content="([^"]*)">')
"""The versions of the tables that a report was made from, as it names them."""


def check_certificate(run: Store, certificate: Certificate) -> CheckResult:
    """Check that a run holds no data of the documents that a certificate names.

    Problems are returned in the result and not raised.
    """
    checked = CheckResult()
    _check_id(certificate, checked)
    if run.exists(PENDING_NAME):
        checked.problems.append(
            f"{PENDING_NAME}: expected no unfinished takedown, got one. Run `penstock takedown` to finish it."
        )
    present = _tables_present(run, certificate, checked)
    for name, table in present.items():
        if name in certificate.tables:
            _check_versions(run, name, table.manifest, certificate, checked)
        _check_files(name, table, certificate, checked)
        try:
            if name == DATASET:
                _check_shards(table, certificate, checked)
                check_membership(run, table, certificate, checked)
            else:
                _check_rows(name, table, certificate, checked)
                if name == "documents":
                    check_descendants(table, certificate, checked)
        except (OSError, pa.ArrowException, ContractError) as error:
            checked.problems.append(
                f"{name}: expected files that can be scanned, got an error: {str(error).rstrip('.')}. "
                "Restore them from a backup."
            )
    current = read_run(run).tables
    unreferenced = {*unreferenced_files(run, [*present, *(table for table in TABLES if table not in current)])}
    for name in sorted(unreferenced - {*_files_of_takedown(run, certificate)} if unreferenced else unreferenced):
        checked.problems.append(
            f"{name}: expected no old file, got one of no current version. Run `penstock takedown --drop-old`."
        )
    for folder in attached_runs(run):
        if own := sorted(
            name for name, path in read_run(run.child(folder)).tables.items() if not path.startswith("../")
        ):
            checked.problems.append(
                f"{folder}: expected no tables made from this run, got a run with its own {', '.join(own)}, which are "
                "not checked. Remove that run."
            )
    _check_report(run, certificate, checked)
    _check_logs(run, certificate, checked)
    checked.problems += check_papers(run, certificate)
    checked.notes += check_exports(run, certificate)
    judge_shared_spans(certificate, checked)
    return checked


def _files_of_takedown(run: Store, certificate: Certificate) -> Iterator[str]:
    """Yield the unchanged files of the versions that the takedown made, which a later run with other settings keeps."""
    for table, change in certificate.tables.items():
        folder = run.child(f"{table}/{change.version_after}")
        try:
            manifest = read_manifest(folder)
            if manifest.digest != change.after:
                continue
            paths = {manifest.paths[entry.key]: entry.sha256 for entry in manifest.content.files}
            whole = [path for path, sha256 in paths.items() if folder.sha256(path) == sha256]
        except (ContractError, OSError):
            continue  # the files are named as old ones
        yield f"{table}/{change.version_after}/{MANIFEST_NAME}"
        yield from (posixpath.normpath(f"{table}/{change.version_after}/{path}") for path in whole)


def _check_report(run: Store, certificate: Certificate, checked: CheckResult) -> None:
    """Check that the report of the run was not made from tables with the removed documents, which it may quote."""
    for report in DERIVED_FILES:
        named = VERSIONS.search(run.read_bytes(report)) if run.exists(report) else None
        shown = {*named[1].decode().split()} if named else set[str]()
        if old := sorted(shown & {f"{name}/{change.version_before}" for name, change in certificate.tables.items()}):
            checked.problems.append(
                f"{report}: expected no report of tables with removed documents, got one of {', '.join(old)}. Write it "
                "again with `penstock report`."
            )


def _check_logs(run: Store, certificate: Certificate, checked: CheckResult) -> None:
    """Check that no log of training names a removed document."""
    removed = {traces.document for traces in certificate.documents}
    for name in TRAINING_LOGS:
        for own in {*documents_in_log(run.read_bytes(name))} if run.exists(name) else ():
            if own is None:
                checked.notes.append(f"{name} has an incomplete line, which was not checked")
            elif DOC_ID.fullmatch(own) and salted_digest(certificate.salt, "document", bytes.fromhex(own)) in removed:
                checked.problems.append(f"{name}: expected no removed document, got {own}. Delete the lines with it.")


def _tables_present(run: Store, certificate: Certificate, checked: CheckResult) -> dict[str, TableVersion]:
    """Return the current tables that have files in this copy of the run.

    The name of a table without files is added to `checked.absent`. A table that cannot be read is a problem.
    """
    current, tables = read_run(run).tables, dict[str, TableVersion]()
    for name in dict.fromkeys([*certificate.tables, *current]):
        folders = (run.child(name), run.child(f"{name}/{current.get(name, '.')}"))  # or another run's folder
        if not any(file for folder in folders for file in folder.walk()):
            checked.absent.append(name)
        elif name not in current:
            checked.problems.append(f"{name}: expected a table in {RUN_NAME}, got none. Restore {RUN_NAME}.")
        else:
            try:
                tables[name] = TableVersion(*open_table(run, name))
            except (ContractError, ValidationError, OSError) as error:
                checked.problems.append(
                    f"{name}: expected a table that can be read, got an error: {str(error).rstrip('.')}. Restore it "
                    "from a backup."
                )
    if not tables.keys() & certificate.tables.keys():
        checked.problems.append(f"{run.uri}: expected tables of the certificate, got none. Name the run's folder.")
    return tables


def _check_id(certificate: Certificate, checked: CheckResult) -> None:
    """Check the seal and the id of a certificate against its content."""
    if certificate.seal != certificate.content_digest:
        seal = certificate.seal or "none"
        checked.problems.append(
            f"certificate: expected seal {seal}, got {certificate.content_digest} from its content. Restore the file."
        )
    documents = [traces.document for traces in certificate.documents]
    actual = identify_takedown(certificate.versions, certificate.mode, documents)
    if actual != certificate.id:
        checked.problems.append(
            f"certificate: expected id {certificate.id}, got {actual} from its content. Restore the file."
        )
    for name, change in certificate.tables.items():
        if change.before != certificate.versions.get(name):
            expected = certificate.versions.get(name)
            checked.problems.append(
                f"certificate: expected {name} {expected} before, got {change.before}. Restore the file."
            )


def _check_versions(run: Store, name: str, current: Manifest, certificate: Certificate, checked: CheckResult) -> None:
    """Check that a table's current version is not the one before the takedown.

    If the takedown of the certificate made it, check also that every file that the takedown did not rewrite has the
    same SHA-256 as before.
    """
    change = certificate.tables[name]
    try:
        if current.digest != change.after:
            ancestors = [later.tables[name].before for later in takedown_ancestry(run, current)]
            if current.digest == change.before:
                checked.problems.append(
                    f"{name}: expected version {change.after}, got {current.digest} in the run. Restore {RUN_NAME}."
                )
            elif change.after not in ancestors:
                checked.notes.append(
                    f"{name}: version {current.digest[:12]} has other settings or inputs than {change.after[:12]}, so "
                    "it was only searched for what was removed"
                )
            else:
                checked.notes.append(f"{name}: later takedowns replaced {change.after[:12]} by {current.digest[:12]}")
            return
        descent = descent_of(current)
        recorded = (descent.id, descent.parent, descent.mode) if descent else None
        if recorded != (own := (certificate.id, change.before, certificate.mode)):
            checked.problems.append(
                f"{name}: expected (takedown, version before, mode) = {own} in its manifest, got {recorded}. Restore "
                "the manifest from a backup."
            )
        if not run.exists(parent_name(certificate.id, name)):
            checked.notes.append(f"{name}: the manifest before is absent, so unchanged files were not compared")
            return
        parent = read_parent(run, certificate.id, name)
    except (ContractError, ValidationError, OSError) as error:
        checked.problems.append(f"{name}: {error}")
        return
    rewritten = {file.key: file for file in change.rewritten}
    old = {entry.key: entry.sha256 for entry in parent.content.files}
    for entry in current.content.files:
        file = rewritten.get(entry.key)
        expected = file.after if file else old.get(entry.key)
        if entry.sha256 != expected:
            checked.problems.append(
                f"{name}/{entry.key}: expected SHA-256 {expected}, got {entry.sha256}. Restore the manifest."
            )


def _check_files(name: str, table: TableVersion, certificate: Certificate, checked: CheckResult) -> None:
    """Check the SHA-256 of every file of a table against its manifest.

    For a rewritten file, check also that it contains nothing but its rows.
    """
    change = certificate.tables.get(name)
    is_rewritten = change is not None and descent_of(table.manifest) is not None
    rewritten = {file.key for file in change.rewritten} if change and is_rewritten else set[str]()
    for entry in table.manifest.content.files:
        path = table.manifest.paths[entry.key]
        try:
            actual = table.folder.sha256(path)
            canonical = canonical_digest(name, table, entry.key) if entry.key in rewritten else actual
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            checked.problems.append(f"{name}/{entry.key}: expected a file, got {error}. Restore the file.")
            continue
        checked.files += 1
        if actual != entry.sha256:
            checked.problems.append(
                f"{name}/{entry.key}: expected SHA-256 {entry.sha256}, got {actual}. Restore the file."
            )
        if canonical != actual:
            checked.problems.append(
                f"{name}/{entry.key}: expected no bytes besides its rows, which have SHA-256 {canonical}, got {actual} "
                f"(certificate made with pyarrow {certificate.pyarrow_version}, checked with {pa.__version__}). "
                "Restore the file."
            )


def _check_rows(name: str, table: TableVersion, certificate: Certificate, checked: CheckResult) -> None:
    """Check that a table's rows of removed documents are blanked, and scan its texts for spans of these documents."""
    removed = {traces.document for traces in certificate.documents}
    describes_documents = TABLES[name].describes_documents
    if not describes_documents:
        _check_named(name, table, (removed, certificate.salt), checked)
        schema = TABLES[name].schema
        if schema is None or "doc_id" not in schema.names or {*TEXTS}.isdisjoint(schema.names):
            return
    finder = SpanFinder("text", certificate.salt, [(i, traces.text) for i, traces in enumerate(certificate.documents)])
    for path in table.manifest.paths_of("part-"):
        with table.folder.open_unchecked(path) as stream:
            file = pq.ParquetFile(stream)
            columns = [column for column in TEXT_COLUMNS if column in file.schema_arrow.names]
            verdict = ["drop_stage"] if "drop_stage" in file.schema_arrow.names else []
            for batch in read_batches(file, name, ["doc_id", *verdict, *columns], 4096):
                ids = batch.column("doc_id").to_pylist()
                for row, identifier in enumerate(ids if describes_documents else ()):
                    if salted_digest(certificate.salt, "document", identifier) in removed:
                        _check_blank(name, batch, row, checked)
                for column in columns:
                    _scan_text(f"{name}.{column}", batch.column(column), ids, (finder, checked))


def _check_named(name: str, table: TableVersion, removed_and_salt: tuple[set[str], str], checked: CheckResult) -> None:
    """Check that no row of an index or an audit table has the id of a removed document."""
    removed, salt = removed_and_salt
    for entry in table.manifest.content.files if TABLES[name].ids else ():
        with table.folder.open_unchecked(table.manifest.paths[entry.key]) as stream:
            file = pq.ParquetFile(stream)
            columns = columns_with_ids(TABLES[name], file.schema_arrow.names)
            for batch in read_batches(file, name, columns, 1 << 16) if columns else ():
                if number := sum(
                    salted_digest(salt, "document", own) in removed for own in documents_named(batch, columns)
                ):
                    checked.problems.append(
                        f"{name}/{entry.key}: expected no removed document, got {number}. Run `penstock takedown` "
                        "again."
                    )


def _check_blank(name: str, batch: pa.RecordBatch, row: int, checked: CheckResult) -> None:
    """Check that the row of a removed document is blanked, and that the table may contain blanked rows."""
    values = {column: batch.column(column)[row].as_py() for column in batch.schema.names if column != "doc_id"}
    left = [column for column, value in values.items() if column != "drop_stage" and value is not None]
    if left or values.get("drop_stage", STAGE) != STAGE or not TABLES[name].blank_keeps:
        checked.problems.append(
            f"{name}: expected no row of a removed document, got one with {left or 'its id'}. Run `penstock takedown` "
            "again."
        )


def _scan_text(where: str, column: pa.Array, ids: list[bytes], scan: tuple[SpanFinder, CheckResult]) -> None:
    """Scan a column of texts, and add the digest of each span of a removed document to `checked.shared`."""
    finder, checked = scan
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    if not len(offsets) or column.buffers()[2] is None:
        return
    content = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    checked.text_bytes += len(content)
    for position, digest, owners in finder.find(content):
        row = int(np.searchsorted(offsets - offsets[0], position, side="right")) - 1
        for owner in owners:
            checked.shared.setdefault((owner, where, ids[row].hex()), set()).add(digest)


def _check_shards(table: TableVersion, certificate: Certificate, checked: CheckResult) -> None:
    """Check that no shard or index of the dataset names a removed document.

    Check also that all tokens of blanked documents are tombstones. The digest of each span of a removed document
    in any tokens is added to `checked.shared`.
    """
    folder = table.folder
    contract, streams = read_shards(folder, table.manifest)
    removed = {traces.document for traces in certificate.documents}
    tombstone = contract.reserved["tombstone"]
    finder = SpanFinder(
        "tokens", certificate.salt, [(i, traces.tokens) for i, traces in enumerate(certificate.documents)]
    )
    for stream, shards in streams.items():
        for shard in shards:
            where = f"tokens/{stream}/{shard.number}"
            with folder.open_unchecked(shard.path) as file, folder.open_unchecked(shard.docs_path) as docs:
                index = ArrowFile(docs).read_all()
                rows = _IndexRows(index, removed, certificate.salt)
                if left := rows.columns_left():
                    checked.problems.append(
                        f"{where}: expected blank rows of removed documents in its index, got values of "
                        f"{', '.join(left)}. Run `penstock takedown` again."
                    )
                if rows.removed:
                    checked.problems.append(
                        f"{where}: expected no removed document in its index, got {rows.removed}. Run `penstock "
                        "takedown` again."
                    )
                reader, first = ArrowFile(file), 0
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    tokens = batch.column("tokens").flatten().to_numpy(zero_copy_only=True)
                    rows.check_ids(batch.column("doc_id"), where, checked)
                    for position, digest, owners in finder.find(tokens):
                        other = rows.document_at(first + position)
                        for owner in owners:
                            checked.shared.setdefault((owner, where, other), set()).add(digest)
                    rows.check_tombstones(first, tokens, tombstone, (where, checked))
                    first += len(tokens)
                checked.tokens += first
    for path in (*table.manifest.paths_of("by_url/"), *table.manifest.paths_of("by_id/")):
        with folder.open_unchecked(path) as file:
            ids = ArrowFile(file).read_all().column("doc_id").to_pylist()
        if number := sum(salted_digest(certificate.salt, "document", own) in removed for own in ids):
            checked.problems.append(
                f"tokens/{path}: expected no removed document, got {number}. Run `penstock takedown` again."
            )


class _IndexRows:
    """Compares the record batches of a shard, in order, with the rows of the shard's document index."""

    def __init__(self, index: pa.Table, removed: set[str], salt: str):
        self._ids: list[bytes] = index.column("doc_id").to_pylist()
        self._begins = index.column("token_offset").to_numpy()
        self._lengths = index.column("num_tokens").to_numpy()
        self._row = 0
        self._index = index
        self.removed = sum(salted_digest(salt, "document", own) in removed for own in self._ids)

    def columns_left(self) -> list[str]:
        """Return the columns in which the row of a blanked document has another value than the takedown wrote."""
        rows = self._index.take(pa.array(self._blank))
        names = [name for name in rows.schema.names if name not in KEPT]
        return [name for name in names if set(rows.column(name).to_pylist()) - {BLANK.get(name)}]

    def document_at(self, token: int) -> str:
        """Return the id (hex) of the document that a token of the shard belongs to, or NO_DOCUMENT."""
        row = int(np.searchsorted(self._begins, token, side="right")) - 1
        if row < 0 or token >= self._begins[row] + self._lengths[row] or self._ids[row] == REMOVED_ID:
            return NO_DOCUMENT
        return self._ids[row].hex()

    def check_ids(self, ids: pa.Array, where: str, checked: CheckResult) -> None:
        """Check that the documents of the shard's next record batch are the next documents in the index."""
        documents = ids.to_pylist()
        if documents != self._ids[self._row : self._row + len(documents)]:
            checked.problems.append(f"{where}: expected the documents of its index, got others. Restore the shard.")
        self._row += len(documents)

    @cached_property
    def _blank(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.array([own == REMOVED_ID for own in self._ids], np.bool_))

    def check_tombstones(self, first: int, tokens: Any, tombstone: int, report: tuple[str, CheckResult]) -> None:
        """Check one record batch: all tokens of blanked documents must be tombstones.

        `tokens` are the tokens of the batch. `first` is the position of the first of these tokens in the shard.
        """
        where, checked = report
        for row in self._blank.tolist():
            begin, end = int(self._begins[row]) - first, int(self._begins[row] + self._lengths[row]) - first
            own = tokens[max(0, begin) : max(0, end)]
            if (own != tombstone).any():
                checked.problems.append(
                    f"{where}: expected tombstones at tokens [{begin + first}, {end + first}), got others. Restore the "
                    "shard."
                )
