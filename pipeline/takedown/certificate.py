"""The check of a certificate by anyone who has the run: every digest, every byte and every span is looked at again.

It trusts nothing but the manifests' digests: files are read whole, rewritten ones are written once more from what they
mean and must give the same bytes (so padding holds nothing), and all tokens and texts are scanned for the spans.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.takedown.commit import unreferenced_files
from pipeline.takedown.shards import exact_copy
from pipeline.takedown.tables import MATCHES, GroupWriter, SpanFinder, documents_named, match_key, plain_schema
from schemas.errors import ContractError
from schemas.manifest import RUN_NAME, Manifest, TableVersion, open_table, read_run
from schemas.storage import Store
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
from schemas.tokens import BY_URL, SHARD_DOCS, open_dataset, shard_schema
from schemas.versions import attached_runs

# What the check of a certificate has found: what does not hold, what is as declared, and how that is told.

COPY_SHARE = 0.5
"""A document that stands and holds this share of a removed one's spans is a copy of it."""


@dataclass
class CheckResult:
    """What a check has found."""

    problems: list[str] = field(default_factory=list)
    """What the certificate states and the run does not hold; empty = it holds."""
    notes: list[str] = field(default_factory=list)
    """What is as declared, and worth saying."""
    absent: list[str] = field(default_factory=list)
    """Tables of the certificate that a copy of the run has no file of."""
    files: int = 0
    """Files that were read whole."""
    tokens: int = 0
    """Tokens that were scanned."""
    text_bytes: int = 0
    """Bytes of text that were scanned."""
    shared: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    """Spans of a removed document (by number) that stand in another one (by name)."""


def judge_shared_spans(certificate: Certificate, checked: CheckResult) -> None:
    """A span outside of every document, or half of the spans in another one, is the removed text; less is shared."""
    few = 0
    for (owner, where), digests in sorted(checked.shared.items()):
        removed = certificate.documents[owner]
        total = len({one for _, one in (removed.text if "." in where.partition(" ")[0] else removed.tokens)})
        said = f"{where}: holds {len(digests)} of {total} spans of removed document {removed.document[:12]}"
        if where.endswith("no document"):
            checked.problems.append(f"{said}, outside of every document that stands")
        elif len(digests) < COPY_SHARE * total:
            few += 1
        elif certificate.copies_left:
            checked.notes.append(f"{said}: one of the {certificate.copies_left} copies that were not asked for")
        else:
            checked.problems.append(f"{said}: a copy of it; take it down too (--near takes copies)")
    if few:
        checked.notes.append(f"{few} document(s) that stand share a passage with a removed one")


def describe_check(certificate: Certificate, checked: CheckResult) -> Iterator[str]:
    """What a check has found, as lines of text."""
    removed = f"{len(certificate.documents)} document(s), {certificate.num_tokens:,} tokens"
    yield f"takedown {certificate.id} of {certificate.made}: {removed}, {certificate.mode}"
    yield f"seal {certificate.seal}"
    yield (
        f"read {checked.files:,} files; scanned {checked.tokens:,} tokens and {checked.text_bytes:,} bytes of text for "
        f"{sum(len(one.tokens) + len(one.text) for one in certificate.documents):,} spans"
    )
    yield from (f"note: {note}" for note in checked.notes)
    yield from (f"FAILED: {problem}" for problem in checked.problems)
    if checked.absent:
        yield f"not here, so not looked at: {', '.join(checked.absent)}"
    holds = "the certificate holds" + (" for what is here" if checked.absent else "")
    yield "the certificate does not hold" if checked.problems else holds


# The bytes that a file must have by what it holds: its rows written once more by the writer that makes such files.


class DigestSink:
    """A file object that only takes the SHA-256 of what is written to it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Hash a buffer; returns its size [bytes]."""
        view = memoryview(data)
        self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Position [bytes]."""
        return self._size

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """No more is written."""
        self.closed = True

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of everything written so far."""
        return self._digest.hexdigest()


def canonical_digest(name: str, table: TableVersion, key: str) -> str:
    """The SHA-256 that a rewritten file of a table must have by its rows."""
    path = table.manifest.run.paths[key]
    if name != "tokens":
        with table.folder.open_input(path) as file:
            stored = pq.ParquetFile(file)
            writer = GroupWriter(table.folder, key, plain_schema(stored.schema_arrow), DigestSink())
            for group in range(stored.num_row_groups):
                writer.write(stored.read_row_group(group))
        return str(writer.close()["sha256"])
    schema = _schema_of(key, table.manifest.content.figures["tokenizer"])
    sink = DigestSink()
    with table.folder.open_input(path) as file:
        reader = pa.ipc.open_file(file)
        writer_of = pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            writer_of.write_batch(pa.RecordBatch.from_arrays([_exact(one) for one in batch.columns], schema=schema))
        writer_of.close()
    return sink.sha256


def _schema_of(key: str, contract: Mapping[str, Any]) -> pa.Schema:
    if key.startswith("by_url/"):
        return BY_URL
    dtype = "uint16" if contract["vocab_size"] <= 1 << 16 else "uint32"
    return SHARD_DOCS if key.endswith(".docs") else shard_schema(dtype)


def _exact(array: pa.Array) -> pa.Array:
    """The array with buffers of exactly its own values; tokens are hundreds of megabytes and are not copied."""
    if not pa.types.is_list(array.type):
        return exact_copy(array)
    offsets = array.offsets.to_numpy()
    tokens = array.flatten().to_numpy(zero_copy_only=True)
    return pa.ListArray.from_arrays(
        pa.array((offsets - offsets[0]).astype(np.int32)), pa.array(tokens), type=array.type
    )


TEXT_COLUMNS = ("text", "title", "url")
UNRECORDED = ("index", "representatives", "audit", "tokenizer")
"""Tables whose rows are no documents."""


def check_certificate(run: Store, certificate: Certificate) -> CheckResult:
    """Whether a run holds nothing of the documents that a certificate names. Raises nothing for what it finds."""
    checked = CheckResult()
    _check_id(certificate, checked)
    if run.exists(PENDING_NAME):
        checked.problems.append(f"{PENDING_NAME}: expected a takedown that is done, got one under way. Run it again.")
    here = _tables_here(run, certificate, checked)
    for name, table in here.items():
        if name in certificate.tables:
            _check_versions(run, name, table.manifest, certificate, checked)
        _check_files(name, table, certificate, checked)
        try:
            if name == "tokens":
                _check_shards(run, certificate, checked)
            else:
                _check_rows(name, table, certificate, checked)
        except (OSError, pa.ArrowException, ContractError) as error:
            checked.problems.append(f"{name}: expected files that can be scanned, got {error}")
    for name in unreferenced_files(run, here):
        checked.problems.append(
            f"{name}: expected no old file, got one that no standing version names. `penstock takedown --drop-old`."
        )
    for folder in attached_runs(run):
        if own := sorted(name for name, way in read_run(run.child(folder)).tables.items() if not way.startswith("../")):
            checked.problems.append(
                f"{folder}: expected no copy below the run, got a run with {', '.join(own)} of its own, made from "
                "tables of this one and not looked at. Remove it."
            )
    judge_shared_spans(certificate, checked)
    return checked


def _tables_here(run: Store, certificate: Certificate, checked: CheckResult) -> dict[str, TableVersion]:
    """Every table that stands, those that came later too; one of which a copy of the run has no file is absent."""
    standing, found = read_run(run).tables, dict[str, TableVersion]()
    for name in dict.fromkeys([*certificate.tables, *standing]):
        places = (run.child(name), run.child(f"{name}/{standing.get(name, '.')}"))  # or another run's folder
        if not any(file for place in places for file in place.walk()):
            checked.absent.append(name)
        elif name not in standing:
            checked.problems.append(f"{name}: expected by the certificate, {RUN_NAME} names no such table")
        else:
            try:
                found[name] = TableVersion(*open_table(run, name))
            except (ContractError, ValidationError, OSError) as error:
                checked.problems.append(f"{name}: expected a table that can be read, got {error}")
    if not found.keys() & certificate.tables.keys():
        checked.problems.append(f"{run.uri}: expected tables of the certificate, got none. Name the run's folder.")
    return found


def _check_id(certificate: Certificate, checked: CheckResult) -> None:
    if certificate.seal != certificate.content_digest:
        seal = certificate.seal or "none"
        checked.problems.append(
            f"certificate: expected seal {seal}, what it says has {certificate.content_digest}. It was edited."
        )
    found = identify_takedown(certificate.standing, certificate.mode, [one.document for one in certificate.documents])
    if found != certificate.id:
        checked.problems.append(f"certificate: expected id {certificate.id}, what it lists has {found}. It was edited.")
    for name, change in certificate.tables.items():
        if change.before != certificate.standing.get(name):
            expected = certificate.standing.get(name)
            checked.problems.append(f"certificate: expected {name} {expected} at its beginning, got {change.before}")


def _check_versions(run: Store, name: str, standing: Manifest, certificate: Certificate, checked: CheckResult) -> None:
    """The standing version is the one the certificate names, or comes from it; what it shares is as it was."""
    change = certificate.tables[name]
    try:
        if standing.digest != change.after:
            line = [one.tables[name].before for one in takedown_ancestry(run, standing)]
            if change.after not in line:
                checked.problems.append(f"{name}: expected version {change.after}, the run holds {standing.digest}")
            else:
                checked.notes.append(f"{name}: later takedowns have made {standing.digest[:12]} of {change.after[:12]}")
            return
        descent = descent_of(standing)
        said = (descent.id, descent.parent, descent.mode) if descent else None
        if said != (own := (certificate.id, change.before, certificate.mode)):
            checked.problems.append(f"{name}: expected a version made by {own}, got {said} in its manifest")
        if not run.exists(parent_name(certificate.id, name)):
            checked.notes.append(f"{name}: the manifest before is not here, so files that were kept were not compared")
            return
        parent = read_parent(run, certificate.id, name)
    except (ContractError, ValidationError, OSError) as error:
        checked.problems.append(f"{name}: {error}")
        return
    rewritten = {one.key: one for one in change.rewritten}
    old = {entry.key: entry.sha256 for entry in parent.content.files}
    for entry in standing.content.files:
        one = rewritten.get(entry.key)
        expected = one.after if one else old.get(entry.key)
        if entry.sha256 != expected:
            checked.problems.append(f"{name}/{entry.key}: expected SHA-256 {expected}, got {entry.sha256}")


def _check_files(name: str, table: TableVersion, certificate: Certificate, checked: CheckResult) -> None:
    """Every file has the bytes its manifest promises; a rewritten one those that follow from its rows."""
    change = certificate.tables.get(name)
    rewritten = {one.key for one in change.rewritten} if change else set[str]()
    for entry in table.manifest.content.files:
        path = table.manifest.run.paths[entry.key]
        try:
            found = table.folder.sha256(path)
            again = canonical_digest(name, table, entry.key) if entry.key in rewritten else found
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            checked.problems.append(f"{name}/{entry.key}: expected a file, got {error}")
            continue
        checked.files += 1
        if found != entry.sha256:
            checked.problems.append(f"{name}/{entry.key}: expected SHA-256 {entry.sha256}, got {found}")
        if again != found:
            checked.problems.append(
                f"{name}/{entry.key}: expected no byte beside its rows, got some: its rows alone have SHA-256 {again}"
                f", the file has {found} (certificate made with pyarrow {certificate.pyarrow_version}, checked with "
                f"{pa.__version__})"
            )


def _check_rows(name: str, table: TableVersion, certificate: Certificate, checked: CheckResult) -> None:
    """No row of a removed document stands but blanked ones; no text holds its spans."""
    gone = {one.document for one in certificate.documents}
    if name in UNRECORDED:
        _check_named(name, table, (gone, certificate.salt), checked)
        return
    finder = SpanFinder("text", certificate.salt, [(i, one.text) for i, one in enumerate(certificate.documents)])
    for path in table.manifest.paths_of("part-"):
        with table.folder.open_input(path) as stream:
            file = pq.ParquetFile(stream)
            columns = [one for one in TEXT_COLUMNS if one in file.schema_arrow.names]
            verdict = ["drop_stage"] if "drop_stage" in file.schema_arrow.names else []
            for batch in file.iter_batches(batch_size=4096, columns=["doc_id", *verdict, *columns]):
                ids = batch.column("doc_id").to_pylist()
                for row, identifier in enumerate(ids):
                    if salted_digest(certificate.salt, "document", identifier) in gone:
                        _check_blank(name, batch, row, checked)
                for column in columns:
                    _scan_text(f"{name}.{column}", batch.column(column), ids, (finder, checked))


def _check_named(name: str, table: TableVersion, removed: tuple[set[str], str], checked: CheckResult) -> None:
    """No row of an index or an audit names a removed document."""
    gone, salt = removed
    for entry in table.manifest.content.files if name != "tokenizer" else ():
        if (match := match_key(name, entry.key)) is None:
            continue
        with table.folder.open_input(table.manifest.run.paths[entry.key]) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(columns=list(MATCHES[match][0])):
                if number := sum(salted_digest(salt, "document", one) in gone for one in documents_named(batch, match)):
                    checked.problems.append(f"{name}/{entry.key}: expected no removed document, got {number}")


def _check_blank(name: str, batch: pa.RecordBatch, row: int, checked: CheckResult) -> None:
    said = {one: batch.column(one)[row].as_py() for one in batch.schema.names if one != "doc_id"}
    left = [one for one, value in said.items() if one != "drop_stage" and value is not None]
    if left or said.get("drop_stage", STAGE) != STAGE or name not in ("documents", "text"):
        checked.problems.append(f"{name}: expected no row of a removed document, got one with {left or 'its id'}")


def _scan_text(where: str, column: pa.Array, ids: list[bytes], with_: tuple[SpanFinder, CheckResult]) -> None:
    finder, checked = with_
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    if not len(offsets) or column.buffers()[2] is None:
        return
    content = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    checked.text_bytes += len(content)
    for place, digest, owners in finder.find(content):
        row = int(np.searchsorted(offsets - offsets[0], place, side="right")) - 1
        for owner in owners:
            checked.shared.setdefault((owner, f"{where} of {ids[row].hex()}"), set()).add(digest)


def _check_shards(run: Store, certificate: Certificate, checked: CheckResult) -> None:
    """Removed documents are in no shard and no index, their places hold tombstones, and no span of theirs is found."""
    dataset = open_dataset(run)
    gone = {one.document for one in certificate.documents}
    tombstone = dataset.tokenizer.reserved["tombstone"]
    finder = SpanFinder("tokens", certificate.salt, [(i, one.tokens) for i, one in enumerate(certificate.documents)])
    for stream, shards in dataset.streams.items():
        for shard in shards:
            where = f"tokens/{stream}/{shard.number}"
            with dataset.folder.open_input(shard.path) as file, dataset.folder.open_input(shard.docs_path) as docs:
                index = pa.ipc.open_file(docs).read_all().select(["doc_id", "token_offset", "num_tokens"])
                named = _Named(index, gone, certificate.salt)
                if named.removed:
                    checked.problems.append(f"{where}: expected no removed document in its index, got {named.removed}")
                reader, first = pa.ipc.open_file(file), 0
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    tokens = batch.column("tokens").flatten().to_numpy(zero_copy_only=True)
                    named.check_ids(batch.column("doc_id"), where, checked)
                    for place, digest, owners in finder.find(tokens):
                        other = named.document_at(first + place)
                        for owner in owners:
                            checked.shared.setdefault((owner, f"{where}: {other}"), set()).add(digest)
                    named.check_tombstones(first, tokens, tombstone, (where, checked))
                    first += len(tokens)
                checked.tokens += first
    for path in dataset.by_url:
        with dataset.folder.open_input(path) as file:
            ids = pa.ipc.open_file(file).read_all().column("doc_id").to_pylist()
        if found := [one for one in ids if salted_digest(certificate.salt, "document", one) in gone]:
            checked.problems.append(f"tokens/{path}: expected no removed document, got {len(found)}")


class _Named:
    """What the document index of a shard says."""

    def __init__(self, index: pa.Table, gone: set[str], salt: str):
        self._ids: list[bytes] = index.column("doc_id").to_pylist()
        self._begins = index.column("token_offset").to_numpy()
        self._lengths = index.column("num_tokens").to_numpy()
        self._row = 0
        self.removed = sum(salted_digest(salt, "document", one) in gone for one in self._ids)

    def document_at(self, token: int) -> str:
        """The document that a token belongs to, hex; `no document` if it belongs to none."""
        row = int(np.searchsorted(self._begins, token, side="right")) - 1
        if row < 0 or token >= self._begins[row] + self._lengths[row] or self._ids[row] == REMOVED_ID:
            return "no document"
        return self._ids[row].hex()

    def check_ids(self, ids: pa.Array, where: str, checked: CheckResult) -> None:
        """The documents of a batch are those that the index names."""
        found = ids.to_pylist()
        if found != self._ids[self._row : self._row + len(found)]:
            checked.problems.append(f"{where}: expected the documents of its index, got others")
        self._row += len(found)

    @cached_property
    def _blank(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.array([one == REMOVED_ID for one in self._ids], np.bool_))

    def check_tombstones(self, first: int, tokens: Any, tombstone: int, said: tuple[str, CheckResult]) -> None:
        """Where the index names no document, the tokens of a batch, which begins at `first`, are tombstones."""
        for row in self._blank.tolist():
            begin, end = int(self._begins[row]) - first, int(self._begins[row] + self._lengths[row]) - first
            own = tokens[max(0, begin) : max(0, end)]
            if (own != tombstone).any():
                problem = f"expected tombstones at tokens [{begin + first}, {end + first}), got others"
                said[1].problems.append(f"{said[0]}: {problem}")
