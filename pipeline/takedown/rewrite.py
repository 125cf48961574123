"""New versions of a run's tables without some documents: touched files are written anew, all others are shared.

Nothing that stands is changed here. A new version lies in a folder named by the takedown and the version before it,
and names the files it shares by their place in that version's folder.
"""

import os
import posixpath
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.takedown.shards import (
    RemovedRows,
    blank_docs,
    blank_tokens,
    cut_by_url,
    cut_docs,
    cut_tokens,
    find_removed_rows,
)
from pipeline.takedown.tables import counts_without_rows, match_key, rewrite_part, trace_spans
from pipeline.tokens.streams import MIX_RULE, TOKENS
from schemas.ids import canonical_json, digest_of
from schemas.manifest import (
    MANIFEST_NAME,
    Counts,
    FileEntry,
    InputEntry,
    Manifest,
    TableVersion,
    make_manifest,
    open_table,
    read_run,
)
from schemas.storage import Store
from schemas.takedown import FIGURE, Descent, FileChange, Mode, TableChange, origin_digest, positions_digest
from schemas.tokens import TRAIN, Dataset, open_dataset, shard_key

TABLE_ORDER = (
    *("documents", "text", "scores", "verdicts", "clusters", "index", "dedup", "representatives", "audit", "repeats"),
    *("clean", "tokenizer", "tokens"),
)
"""The tables of a run, each behind those it was made from."""
Entry = dict[str, Any]


@dataclass
class Removal:
    """What is removed, and what was found of it while tables are written anew."""

    id: str
    mode: Mode
    salt: str
    documents: frozenset[bytes]
    most_traces: int
    """Spans of a document that are traced at most, of its tokens and of its text."""
    num_tokens: dict[bytes, int] = field(default_factory=dict)
    token_traces: dict[bytes, list[tuple[int, str]]] = field(default_factory=dict)
    text_traces: dict[bytes, list[tuple[int, str]]] = field(default_factory=dict)
    num_clean: dict[str, int] = field(default_factory=dict)
    """How many of them had been kept in a version of `clean`, by its digest."""

    @property
    def ids(self) -> pa.Array:
        """The documents as an array."""
        return pa.array(sorted(self.documents), pa.binary(16))

    def trace_tokens(self, document: bytes, tokens: Any) -> None:
        """Remember spans of the tokens of a document."""
        self.num_tokens[document] = self.num_tokens.get(document, 0) + len(tokens)
        self.token_traces[document] = trace_spans(tokens, "tokens", self.salt, self.most_traces)

    def trace_texts(self, texts: Mapping[bytes, list[str]]) -> None:
        """Remember spans of the texts of documents."""
        for document, found in texts.items():
            for text in found:
                units = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
                traced = trace_spans(units, "text", self.salt, self.most_traces)
                self.text_traces[document] = [*self.text_traces.get(document, []), *traced]


@dataclass
class _Draft:
    """A new version while its files are written."""

    old: TableVersion
    folder: Store
    entries: dict[str, Entry] = field(default_factory=dict)
    """Of the rewritten files, by key."""
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    rows: int = 0
    counts: Counts | None = None
    figures: dict[str, Any] = field(default_factory=dict)


def new_version(identifier: str, table: str, old: str) -> str:
    """The version folder that a takedown writes in place of another one."""
    return f"v-{digest_of([identifier, table, old])[:12]}"


def write_versions(run: Store, removal: Removal) -> dict[str, TableChange]:
    """Write new versions of all tables that hold something of the documents, or were made from one that does."""
    standing = read_run(run).tables
    changes: dict[str, TableChange] = {}
    for table in (name for name in TABLE_ORDER if name in standing):
        old = TableVersion(*open_table(run, table))
        folder = run.child(f"{table}/{new_version(removal.id, table, standing[table])}")
        clear_folder(folder)
        draft = _Draft(old, folder, figures=dict(old.manifest.content.figures))
        started = datetime.now(UTC), time.monotonic(), time.process_time()
        _rewrite_dataset(run, draft, removal) if table == "tokens" else _rewrite_parts(table, draft, removal)
        digests = {change.before: change.after for change in changes.values()}
        renamed = [entry for entry in old.manifest.content.inputs if entry.sha256 in digests]
        if not draft.entries and not renamed:
            continue
        versions = {name: change.version_after for name, change in changes.items()}
        manifest = _manifest(draft, removal, digests, versions, started)
        folder.write_atomic(MANIFEST_NAME, canonical_json(manifest.model_dump(mode="json")))
        changes[table] = TableChange(
            before=old.manifest.digest,
            after=manifest.digest,
            version_before=standing[table],
            version_after=folder.uri.rpartition("/")[2],
            rows=draft.rows,
            rewritten=list(_file_changes(draft)),
            shared=len(manifest.content.files) - len(draft.entries),
        )
    return changes


def clear_folder(folder: Store) -> None:
    """Remove what an attempt that was broken off has left in a version folder, its manifest first."""
    folder.delete(MANIFEST_NAME)
    for name in list(folder.walk()):
        folder.delete(name)


def _rewrite_parts(table: str, draft: _Draft, removal: Removal) -> None:
    """Write the touched parts of a Parquet table."""
    fates: dict[str, int] = {}
    ids = removal.ids
    paths = draft.old.manifest.run.paths
    for entry in draft.old.manifest.content.files if table != "tokenizer" else ():
        match = match_key(table, entry.key)
        if match is None:
            continue
        made = rewrite_part(draft.old.folder, paths[entry.key], draft.folder, entry.key, (table, match, ids))
        if made is not None:
            draft.entries[entry.key] = made.entry
            removal.trace_texts(made.texts)
            for name, number in made.removed.items():
                fates[name] = fates.get(name, 0) + number
    draft.rows = sum(fates.values())
    # What the manifests of these two count is not their rows.
    if table not in ("index", "representatives"):
        draft.counts = counts_without_rows(draft.old.manifest.content.counts, table, fates)
        if table == "clean":
            kept = draft.old.manifest.content.counts.rows_kept - draft.counts.rows_kept
            removal.num_clean[draft.old.manifest.digest] = kept


def _rewrite_dataset(run: Store, draft: _Draft, removal: Removal) -> None:
    """Write the touched shards, their document indexes and the touched buckets of the index by URL."""
    dataset = open_dataset(run)
    places = find_removed_rows(dataset, removal.documents)
    buckets = [one.key for one in draft.old.manifest.content.files if one.key.startswith("by_url/")]
    ids, paths = removal.ids, dataset.manifest.run.paths
    # Copying, digests and the disk leave Python's lock alone, so threads share the work.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        urls = [pool.submit(cut_by_url, dataset.folder, key, paths[key], draft.folder, ids) for key in buckets]
        shards = [pool.submit(_rewrite_shard, dataset, place, draft.folder, removal) for place in places]
    for place, shard in zip(places, shards, strict=True):
        entries, removed = shard.result()
        draft.entries |= {entry["key"]: entry for entry in entries}
        draft.spans[shard_key(place.shard.stream, place.shard.number)] = place.spans
        for document, tokens in zip(place.documents, removed, strict=True):
            removal.trace_tokens(document, tokens)
    draft.entries |= {entry["key"]: entry for one in urls if (entry := one.result()) is not None}
    draft.rows = sum(len(place.rows) for place in places)
    draft.counts = _counts_of_dataset(draft, removal)
    if "documents" in draft.figures:
        numbers = dict(draft.figures["documents"])
        for place in places:
            numbers[place.shard.stream] -= len(place.rows)
        draft.figures["documents"] = numbers
    if removal.mode == "compact":
        lost = {(place.shard.stream, place.shard.number): sum(n for _, n in place.spans) for place in places}
        draft.figures["streams"] = {
            stream: [tokens - lost.get((stream, number), 0) for number, tokens in enumerate(counts_of)]
            for stream, counts_of in draft.figures["streams"].items()
        }
        if MIX_RULE in draft.figures:
            left = {name: sum(shards) for name, shards in draft.figures["streams"].items()}
            draft.figures[MIX_RULE] = {
                source: asked | {"found_tokens": left[f"{source}/{TRAIN}"]}
                for source, asked in draft.figures[MIX_RULE].items()
            }


def _counts_of_dataset(draft: _Draft, removal: Removal) -> Counts:
    """The books of a dataset into which some documents never came, those included that the mix had left out."""
    content, rule = draft.old.manifest.content, f"{TOKENS.name}/{MIX_RULE}"
    read = next((entry.sha256 for entry in content.inputs if entry.name == "clean"), "")
    came_in = removal.num_clean.get(read, draft.rows) if rule in content.counts.dropped else draft.rows
    dropped = dict(content.counts.dropped)
    if came_in != draft.rows:
        dropped[rule] -= came_in - draft.rows
    rows_in, rows_kept = content.counts.rows_in - came_in, content.counts.rows_kept - draft.rows
    return Counts(rows_in=rows_in, rows_kept=rows_kept, dropped=dropped)


def _rewrite_shard(
    dataset: Dataset, place: RemovedRows, new: Store, removal: Removal
) -> tuple[list[Entry], list[NDArray[np.unsignedinteger]]]:
    """Write one shard and its document index; returns their entries and the removed tokens."""
    contract, old = dataset.tokenizer, dataset.folder
    if removal.mode == "compact":
        made, removed = cut_tokens(old, place, new, contract.dtype)
        return [made, cut_docs(old, place, new)], removed
    made, removed = blank_tokens(old, place, new, contract.dtype, contract.reserved["tombstone"])
    return [made, blank_docs(old, place, new)], removed


def _manifest(
    draft: _Draft,
    removal: Removal,
    digests: Mapping[str, str],
    versions: Mapping[str, str],
    started: tuple[datetime, float, float],
) -> Manifest:
    """The manifest of a new version: the old one with what has changed, and where it comes from."""
    old, content = draft.old.manifest, draft.old.manifest.content
    before = draft.old.folder.uri.rpartition("/")[2]
    files = [FileEntry(**_entry(draft.entries[one.key])) if one.key in draft.entries else one for one in content.files]
    shared = {key: posixpath.normpath(f"../{before}/{path}") for key, path in old.run.paths.items()}
    inputs = [
        InputEntry(name=one.name, bytes=one.bytes, sha256=digests.get(one.sha256, one.sha256)) for one in content.inputs
    ]
    read = {one.name: one.sha256 for one in content.inputs if one.sha256 in digests}
    earlier = content.figures.get(FIGURE, {}).get("read_before", {})
    descent = Descent(
        id=removal.id,
        parent=old.digest,
        origin=origin_digest(old),
        positions="" if removal.mode == "compact" else positions_digest(old),
        mode=removal.mode,
        read_before=read | earlier,
    )
    said = content.model_copy(
        update={
            "files": files,
            "inputs": inputs,
            "counts": draft.counts or content.counts,
            "figures": draft.figures | {FIGURE: descent.model_dump(mode="json")},
        }
    )
    how = old.run.model_copy(
        update={
            "paths": shared | {key: entry["path"] for key, entry in draft.entries.items()},
            "started": started[0].isoformat(timespec="seconds"),
            "wall_seconds": round(time.monotonic() - started[1], 3),
            "cpu_seconds": round(time.process_time() - started[2], 3),
            "code_version": version("penstock"),
            "lineage": {name: versions.get(name, place) for name, place in old.run.lineage.items()},
        }
    )
    return make_manifest(said.model_dump(mode="json"), how.model_dump(mode="json"), draft.folder.uri)


def _entry(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if name != "path"}


def _file_changes(draft: _Draft) -> Iterator[FileChange]:
    for one in draft.old.manifest.content.files:
        if one.key in draft.entries:
            spans = draft.spans.get(one.key, [])
            yield FileChange(key=one.key, before=one.sha256, after=draft.entries[one.key]["sha256"], spans=spans)
