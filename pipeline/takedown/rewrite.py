"""New versions of a run's tables without some documents: files that hold them are rewritten, all others are shared.

Current versions are not changed. The takedown's id and the old version determine the folder name of a new version. The
new manifest names unchanged files by relative paths into the folder of the old version. When an interrupted takedown is
resumed, it writes only the files that are not complete.
"""

import os
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import PartResult, complete_part, delete_incomplete_parts
from pipeline.engine.step import add_figures
from pipeline.membership.index import cut_index_file, open_index
from pipeline.takedown.figures import Facts, counts_of, facts_of, without
from pipeline.takedown.membership import RemovalProofs, prove_removal
from pipeline.takedown.shards import (
    RemovedRows,
    blank_docs,
    blank_tokens,
    bucket_holds,
    cut_by_url,
    cut_docs,
    cut_tokens,
    find_removed_rows,
)
from pipeline.takedown.tables import (
    SpanTrace,
    counts_without_rows,
    holds_documents,
    rewrite_part,
    trace_spans,
)
from pipeline.tokens.streams import MIX_RULE, TOKENS, epoch_of_sources
from schemas.ids import canonical_json, digest_of
from schemas.leases import check_before_delete, check_still_held
from schemas.manifest import (
    MANIFEST_NAME,
    Counts,
    FileEntry,
    Manifest,
    TableVersion,
    make_manifest,
    open_table,
    read_run,
)
from schemas.storage import Store
from schemas.tables import TABLES, Table
from schemas.takedown import (
    FIGURE,
    Descent,
    FileChange,
    Mode,
    TableChange,
    origin_digest,
    positions_digest,
)
from schemas.tokens import MEMBERSHIP, Dataset, open_dataset, shard_key
from schemas.versions import DATASET


@dataclass
class Removal:
    """The documents of a takedown, and the data about them that is collected while tables are rewritten."""

    id: str
    mode: Mode
    salt: str
    documents: frozenset[bytes]
    most_traces: int
    """Maximum number of spans of a document's tokens, and of each of its texts, whose digests are recorded."""
    prove: bool = False
    """True = proofs of the documents against the Merkle roots of the dataset are made."""
    membership: RemovalProofs | None = None
    """These proofs, once the dataset was rewritten."""
    num_tokens: dict[bytes, int] = field(default_factory=dict)
    token_traces: dict[bytes, list[SpanTrace]] = field(default_factory=dict)
    text_traces: dict[bytes, list[SpanTrace]] = field(default_factory=dict)
    num_clean: dict[str, int] = field(default_factory=dict)
    """Number of removed documents that were kept in a version of `clean`, by the digest of that version."""
    facts: dict[bytes, Facts] = field(default_factory=dict)
    """Source, language and length of each removed document, by which later tables counted it."""

    @property
    def ids(self) -> pa.Array:
        """The ids of the documents as a sorted Arrow array."""
        return pa.array(sorted(self.documents), pa.binary(16))

    def trace_tokens(self, tokens: Any) -> list[SpanTrace]:
        """Return (32-bit hash, salted digest) of each traced span of a removed document's tokens."""
        return trace_spans(tokens, "tokens", self.salt, self.most_traces)

    def trace_texts(self, texts: Sequence[str]) -> list[SpanTrace]:
        """Return (32-bit hash, salted digest) of each traced span of a removed document's texts."""
        units = (np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts)
        return [span for own in units for span in trace_spans(own, "text", self.salt, self.most_traces)]

    def add_facts(self, part: PartResult) -> None:
        """Add the facts of documents in `part.figures` to `facts`."""
        self.facts |= {bytes.fromhex(name): Facts(*own) for name, own in part.figures.get("facts", {}).items()}

    def add_traces(self, part: PartResult) -> None:
        """Add the token counts and spans in `part.figures` to `num_tokens`, `token_traces` and `text_traces`."""
        for name, spans in part.figures.get("texts", {}).items():
            document = bytes.fromhex(name)
            self.text_traces[document] = [*self.text_traces.get(document, []), *map(tuple, spans)]
        for name, count, spans in part.figures.get("tokens", ()):
            document = bytes.fromhex(name)
            self.num_tokens[document] = self.num_tokens.get(document, 0) + count
            self.token_traces[document] = [*map(tuple, spans)]


@dataclass
class _Draft:
    """A new version of a table while its files are written."""

    old: TableVersion
    folder: Store
    files: dict[str, WrittenFile] = field(default_factory=dict)
    """The rewritten files, by manifest key."""
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    rows: int = 0
    counts: Counts | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, part: PartResult) -> None:
        """Add the files of a rewritten part of the table to `files`."""
        self.files |= {written.key: written for written in part.files.values()}


def new_version(identifier: str, table: str, old: str) -> str:
    """Return the name of the version folder that replaces the folder `old` of a table in a takedown."""
    return f"v-{digest_of([identifier, table, old])[:12]}"


def write_versions(run: Store, removal: Removal) -> dict[str, TableChange]:
    """Write the new version of each table that holds data of the documents, or that was made from a changed table.

    Return the change of each of these tables, by name.
    """
    current = read_run(run).tables
    changes: dict[str, TableChange] = {}
    for table in (name for name in TABLES if name in current):
        old = TableVersion(*open_table(run, table))
        folder = run.child(f"{table}/{new_version(removal.id, table, current[table])}")
        check_before_delete(run)
        folder.delete(MANIFEST_NAME)
        delete_incomplete_parts(folder)
        draft = _Draft(old, folder, figures=figures_left(old.manifest.content.figures, removal.documents))
        started = datetime.now(UTC), time.monotonic(), time.process_time()
        _rewrite_dataset(run, draft, removal) if table == DATASET else _rewrite_parts(table, draft, removal)
        digests = {change.before: change.after for change in changes.values()}
        renamed = [entry for entry in old.manifest.content.inputs if entry.sha256 in digests]
        if not draft.files and not renamed:
            continue
        versions = {name: change.version_after for name, change in changes.items()}
        manifest = _manifest(draft, removal, digests, versions, started)
        check_still_held(run)
        folder.write_atomic(MANIFEST_NAME, canonical_json(manifest.model_dump(mode="json")))
        changes[table] = TableChange(
            before=old.manifest.digest,
            after=manifest.digest,
            version_before=current[table],
            version_after=folder.uri.rpartition("/")[2],
            rows=draft.rows,
            rewritten=list(_file_changes(draft)),
            shared=len(manifest.content.files) - len(draft.files),
        )
    return changes


def figures_left(figures: Mapping[str, Any], documents: frozenset[bytes]) -> dict[str, Any]:
    """Return the figures of a table without the examples that are removed documents.

    `losses` of the table `audit` names sources and domains that lost many copies, with pairs of documents. A domain of
    which every example is removed is left out, since the domain itself may have been taken down.
    """
    left = dict(figures)
    if "losses" in figures:
        removed = {document.hex() for document in documents}
        pairs = [[pair for pair in loss["pairs"] if not removed & {*pair.values()}] for loss in figures["losses"]]
        left["losses"] = [
            {**loss, "pairs": own}
            for loss, own in zip(figures["losses"], pairs, strict=True)
            if loss["kind"] != "domain" or own or not loss["pairs"]
        ]
    return left


def _rewrite_parts(table: str, draft: _Draft, removal: Removal) -> None:
    """Write new versions of the parts of a Parquet table that hold documents to remove."""
    verdicts: dict[str, int] = {}
    counted: dict[str, Any] = {}
    ids = removal.ids
    paths = draft.old.manifest.paths
    for ordinal, entry in enumerate(draft.old.manifest.content.files if TABLES[table].ids else ()):
        if not holds_documents(draft.old.folder, paths[entry.key], TABLES[table], ids):
            continue
        write = partial(_rewrite_part, draft, entry.key, (TABLES[table], ids), removal)
        part = complete_part(draft.folder, ordinal, write)
        draft.add(part)
        removal.add_traces(part)
        removal.add_facts(part)
        verdicts = add_figures(verdicts, part.figures["removed"])
        counted = add_figures(counted, part.figures["counted"])
    draft.figures = without(draft.figures, counted, TABLES[table])
    draft.rows = sum(verdicts.values())
    if TABLES[table].rows != "key":  # the counts of an index do not change: they are those of the step that wrote it
        draft.counts = counts_without_rows(draft.old.manifest.content.counts, TABLES[table], verdicts)
        if table == "clean":
            kept = draft.old.manifest.content.counts.rows_kept - draft.counts.rows_kept
            removal.num_clean[draft.old.manifest.digest] = kept


def _rewrite_part(draft: _Draft, key: str, how: tuple[Table, pa.Array], removal: Removal) -> PartResult:
    """Write one part of a table without the documents, and return the result of the part.

    The `figures` of the result have the number of removed rows by verdict, the spans of removed texts by doc_id, what
    the figures of the table count for the removed rows, and facts of the removed documents for later tables.
    """
    made, table = rewrite_part(draft.old.folder, draft.old.manifest.paths[key], draft.folder, key, how), how[0]
    texts = {document.hex(): removal.trace_texts(own) for document, own in made.texts.items()}
    counted = counts_of(table, made.rows, removal.facts)
    facts = {own.hex(): astuple(found) for own, found in facts_of(removal.facts, table.name, made.rows).items()}
    return _result([made.written], removed=made.removed, texts=texts, counted=counted, facts=facts)


def _result(files: Sequence[WrittenFile], **figures: Any) -> PartResult:
    counts = Counts(rows_in=files[0].rows, rows_kept=files[0].rows)  # All files have the same number of rows.
    return PartResult({written.key: written for written in files}, counts, figures)


def _rewrite_dataset(run: Store, draft: _Draft, removal: Removal) -> None:
    """Write new versions of the shards, document indexes and files of both indexes that hold documents to remove."""
    dataset = open_dataset(run)
    targets = find_removed_rows(dataset, removal.documents)
    ids, paths = removal.ids, dataset.manifest.paths
    keys = [entry.key for entry in draft.old.manifest.content.files if entry.key.startswith("by_url/")]
    # Copies, digests and disk access release the GIL, so the work runs in threads.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        is_touched = pool.map(lambda key: bucket_holds(dataset.folder, paths[key], ids), keys)
        buckets = [key for key, is_one in zip(keys, is_touched, strict=True) if is_one]
        writes = [
            *(partial(_rewrite_shard, dataset, target, draft.folder, removal) for target in targets),
            *(partial(_rewrite_bucket, dataset, key, draft.folder, ids) for key in buckets),
        ]
        for part in pool.map(partial(complete_part, draft.folder), range(len(writes)), writes):
            draft.add(part)
            removal.add_traces(part)
    _rewrite_membership(dataset, draft, removal, first_part=len(writes))
    draft.spans = {shard_key(target.shard.stream, target.shard.number): target.spans for target in targets}
    draft.rows = sum(len(target.rows) for target in targets)
    draft.counts = _counts_of_dataset(draft, removal)
    if "documents" in draft.figures:
        numbers = dict(draft.figures["documents"])
        for target in targets:
            numbers[target.shard.stream] -= len(target.rows)
        draft.figures["documents"] = numbers
    if removal.mode == "compact":
        lost = {(target.shard.stream, target.shard.number): sum(n for _, n in target.spans) for target in targets}
        draft.figures["streams"] = {
            stream: [tokens - lost.get((stream, number), 0) for number, tokens in enumerate(counts_of)]
            for stream, counts_of in draft.figures["streams"].items()
        }
        if MIX_RULE in draft.figures:
            left = epoch_of_sources({name: sum(shards) for name, shards in draft.figures["streams"].items()})
            draft.figures[MIX_RULE] = {
                source: reduction | {"found_tokens": left[source]}
                for source, reduction in draft.figures[MIX_RULE].items()
            }


def _rewrite_membership(dataset: Dataset, draft: _Draft, removal: Removal, first_part: int) -> None:
    """Write the files of the index by id without the documents, update the root, and make the proofs if asked for.

    Numbers of parts start at `first_part`. A dataset without an index loses its root unless proofs are made.
    """
    before, after = open_index(dataset.folder, dataset.manifest), None
    if before is not None:
        numbers = before.files_with(removal.documents)
        writes = [partial(cut_index_file, before.file(number), draft.folder, removal.documents) for number in numbers]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            parts = [
                *pool.map(partial(complete_part, draft.folder), range(first_part, first_part + len(writes)), writes)
            ]
        for part in parts:
            draft.add(part)
        after = before.replaced(draft.folder, dict(zip(numbers, parts, strict=True)))
        draft.figures |= after.figures
    elif draft.files:
        draft.figures.pop(MEMBERSHIP, None)  # it is the root of the old version
    if removal.prove:
        removal.membership = prove_removal(dataset, removal.documents, (before, after) if before and after else None)
        draft.figures[MEMBERSHIP] = removal.membership.after


def _counts_of_dataset(draft: _Draft, removal: Removal) -> Counts:
    """Return the row counts of a dataset without the removed documents."""
    content, rule = draft.old.manifest.content, f"{TOKENS.name}/{MIX_RULE}"
    read = next((entry.sha256 for entry in content.inputs if entry.name == "clean"), "")
    came_in = removal.num_clean.get(read, draft.rows) if rule in content.counts.dropped else draft.rows
    dropped = dict(content.counts.dropped)
    if came_in != draft.rows:  # The mix had left some of the removed documents out of the dataset.
        dropped[rule] -= came_in - draft.rows
    rows_in, rows_kept = content.counts.rows_in - came_in, content.counts.rows_kept - draft.rows
    return Counts(rows_in=rows_in, rows_kept=rows_kept, dropped=dropped)


def _rewrite_shard(dataset: Dataset, target: RemovedRows, new: Store, removal: Removal) -> PartResult:
    """Write one shard and its document index without the removed documents, and return the result.

    The `figures` of the result have (doc_id, number of tokens, spans of tokens) of each removed document.
    """
    contract, old = dataset.tokenizer, dataset.folder
    if removal.mode == "compact":
        made, removed = cut_tokens(old, target, new, contract.dtype)
        docs = cut_docs(old, target, new)
    else:
        made, removed = blank_tokens(old, target, new, contract.dtype, contract.reserved["tombstone"])
        docs = blank_docs(old, target, new)
    traced = zip(target.documents, removed, strict=True)
    return _result([made, docs], tokens=[[own.hex(), len(ids), removal.trace_tokens(ids)] for own, ids in traced])


def _rewrite_bucket(dataset: Dataset, key: str, new: Store, ids: pa.Array) -> PartResult:
    return _result([cut_by_url(dataset.folder, key, dataset.manifest.paths[key], new, ids)])


def _manifest(
    draft: _Draft,
    removal: Removal,
    digests: Mapping[str, str],
    versions: Mapping[str, str],
    started: tuple[datetime, float, float],
) -> Manifest:
    """Return the manifest of a new version: the old manifest with the changed files and the takedown."""
    old, content = draft.old.manifest, draft.old.manifest.content
    before = draft.old.folder.uri.rpartition("/")[2]
    files = [_entry(draft.files[own.key]) if own.key in draft.files else own for own in content.files]
    shared = {key: posixpath.normpath(f"../{before}/{path}") for key, path in old.run.paths.items()}
    inputs = [entry.model_copy(update={"sha256": digests.get(entry.sha256, entry.sha256)}) for entry in content.inputs]
    read = {entry.name: entry.sha256 for entry in content.inputs if entry.sha256 in digests}
    earlier = content.figures.get(FIGURE, {}).get("read_before", {})
    descent = Descent(
        id=removal.id,
        parent=old.digest,
        origin=origin_digest(old),
        positions="" if removal.mode == "compact" else positions_digest(old),
        mode=removal.mode,
        read_before=read | earlier,
    )
    new_content = content.model_copy(
        update={
            "files": files,
            "inputs": inputs,
            "counts": draft.counts or content.counts,
            "figures": draft.figures | {FIGURE: descent.model_dump(mode="json")},
        }
    )
    new_run = old.run.model_copy(
        update={
            "paths": shared | {key: written.path for key, written in draft.files.items()},
            "blocks": old.run.blocks | {key: file.blocks for key, file in draft.files.items() if file.blocks},
            "started": started[0].isoformat(timespec="seconds"),
            "wall_seconds": round(time.monotonic() - started[1], 3),
            "cpu_seconds": round(time.process_time() - started[2], 3),
            "code_version": version("penstock"),
            "lineage": {name: versions.get(name, version_read) for name, version_read in old.run.lineage.items()},
        }
    )
    return make_manifest(new_content.model_dump(mode="json"), new_run.model_dump(mode="json"), draft.folder.uri)


def _entry(written: WrittenFile) -> FileEntry:
    return FileEntry(key=written.key, rows=written.rows, bytes=written.bytes, sha256=written.sha256)


def _file_changes(draft: _Draft) -> Iterator[FileChange]:
    """Yield the change of each rewritten file: old and new digest, and the positions of the removed tokens."""
    for entry in draft.old.manifest.content.files:
        if entry.key in draft.files:
            spans, after = draft.spans.get(entry.key, []), draft.files[entry.key].sha256
            yield FileChange(key=entry.key, before=entry.sha256, after=after, spans=spans)
