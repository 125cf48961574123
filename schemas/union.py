"""The union of the token datasets of several runs: a manifest that names their shards, without copies.

A stream of the union is the streams of that name of all members, one after another. The members must have the same
tokenizer contract. Documents that several members have are counted; they stay.
"""

import math
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.arrow_files import ArrowFile
from schemas.errors import ConfigError, ContractError
from schemas.manifest import (
    Counts,
    Manifest,
    RunFile,
    make_manifest,
    member_input,
    open_table,
    read_manifest,
    read_run,
    write_manifest,
    write_run,
)
from schemas.older_tables import read_batches
from schemas.removed import RemovedDocuments
from schemas.storage import Store
from schemas.tables import PARENTS
from schemas.takedown import REMOVED_ID, Certificate
from schemas.tokens import (
    BY_TEXT,
    HELDOUT,
    HELDOUT_BY,
    MEMBERS,
    MEMBERSHIP,
    Dataset,
    Member,
    Shard,
    docs_key,
    open_dataset,
    shard_key,
)
from schemas.versions import DATASET

UNION_VERSION = 1
REPEATED = "repeated"
"""The figure in the manifest of a union that counts the documents of several members."""
IDS_AT_ONCE = 1 << 24
"""Number of document ids in memory at once, about; the indexes are read once for each so many."""
ROWS_AT_ONCE = 1 << 16
INDEX_COLUMNS = ["doc_id", "num_tokens", "length", "num_bytes"]
EXAMPLES = 3
"""Number of repeated documents that the figure names."""


def write_union(place: Store, runs: Sequence[Store]) -> Manifest:
    """Write a new run folder on the union of the datasets of several runs, and return the manifest of the union.

    The new run has the recipe and the tokenizer of the first. Raises ConfigError if a dataset is given twice or is on
    another filesystem, if the tokenizer contracts differ, or if two datasets have the same id for two records, and
    ContractError if a dataset has a document that was taken down from another.
    """
    datasets = [open_dataset(run) for run in runs]
    check_members(place, datasets)
    manifest = union_manifest(place, datasets)
    check_none_removed(datasets)
    tokenizer = datasets[0].tokenizer_folder.root
    tables = {
        "tokenizer": posixpath.relpath(tokenizer, place.child("tokenizer").root),
        DATASET: f"v-{manifest.digest[:12]}",
    }
    write_manifest(place.child(f"{DATASET}/{tables[DATASET]}"), manifest)
    write_run(place, RunFile(tables=tables, recipe=read_run(runs[0]).recipe))
    return manifest


def check_members(place: Store, datasets: Sequence[Dataset]) -> None:
    """Raise ConfigError, naming both datasets, if some datasets have no union in the run folder `place`."""
    first = datasets[0]
    seen: dict[str, Dataset] = {}
    for dataset in datasets:
        for member in dataset.members:
            if member.digest in seen:
                raise ConfigError(
                    f"{member.run.uri}: expected each dataset once, got {member.digest[:12]} also from "
                    f"{seen[member.digest].folder.uri}. Name it once."
                )
            seen[member.digest] = dataset
        if dataset.folder.fs != place.fs:
            raise ConfigError(
                f"{place.uri}: expected a folder on the filesystem of {dataset.folder.uri}, got another filesystem. "
                "Name a folder on the same filesystem."
            )
        if wrong := _contract_differences(first, dataset):
            raise ConfigError(
                f"{dataset.folder.uri}: expected the tokenizer contract of {first.folder.uri}, got other values: "
                f"{wrong}. Run one of them again with the tokenizer and the separators of the other."
            )


def check_none_removed(datasets: Sequence[Dataset]) -> None:
    """Raise ContractError if a member of a union holds a document that a takedown removed from another member.

    Documents are recognized by id, and by their address if their URL or domain was taken down. Near-duplicates of a
    removed document are not. Personal data in the URLs of a dataset is replaced, so the URLs of the table `documents`
    of a member are compared too, if it has that table.
    """
    members = [(dataset, member) for dataset in datasets for member in dataset.members]
    removed = {member.run.uri: RemovedDocuments(member.run) for _, member in members}
    for dataset, member in members:
        others = [(uri, own) for uri, own in removed.items() if uri != member.run.uri and own.certificates]
        known = _removed_addresses(member.run, others) if others else {}
        for number in member.by_url if others else ():
            with dataset.folder.open_input(dataset.by_url[number]) as stream:
                table = ArrowFile(stream, f"{dataset.folder.uri}/{dataset.by_url[number]}").read_all()
                rows = table.select(["doc_id", "url", "domain"])
            for batch in rows.to_batches(max_chunksize=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    for uri, own in others:
                        certificate = own.find(row["doc_id"], row["url"] or "", row["domain"])
                        if certificate := certificate or known.get((uri, row["doc_id"])):
                            raise ContractError(
                                f"{member.run.uri}: expected a dataset without the documents that takedown "
                                f"{certificate.id} removed from {uri}, another member of the union, got doc_id "
                                f"{row['doc_id'].hex()}. Take it down there too, with the same options."
                            )


def _removed_addresses(
    run: Store, others: Sequence[tuple[str, RemovedDocuments]]
) -> dict[tuple[str, bytes], Certificate]:
    """Return the certificate by (run, doc_id) of documents in `documents` whose address or parent was taken down."""
    found: dict[tuple[str, bytes], Certificate] = {}
    if "documents" not in read_run(run).tables:
        return found
    folder, manifest = open_table(run, "documents")
    for path in manifest.paths_of():
        with folder.open_input(path) as stream:
            columns = ["doc_id", "url", "domain", PARENTS.name]
            for batch in read_batches(pq.ParquetFile(stream), "documents", columns, ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    for uri, own in others if row["url"] or row[PARENTS.name] else ():
                        address = row["url"] or "", row["domain"]
                        if certificate := own.find(row["doc_id"], *address, row[PARENTS.name]):
                            found[uri, row["doc_id"]] = certificate
    return found


def _contract_differences(first: Dataset, other: Dataset) -> str:
    expected, actual = first.tokenizer.model_dump(), other.tokenizer.model_dump()
    return "; ".join(
        f"{name} {expected[name]} there, {actual[name]} here"
        for name in expected
        if expected[name] != actual[name] and name != "reserved"
    ) or ("the ids of the reserved tokens" if expected != actual else "")


def union_manifest(place: Store, datasets: Sequence[Dataset]) -> Manifest:
    """Return the manifest of the union of datasets, for the folder `place`/tokens/<version>."""
    streams = list(dict.fromkeys(name for dataset in datasets for name in dataset.streams))
    files, paths, blocks = _files(place, datasets, streams)
    members = [member for dataset in datasets for member in dataset.members]
    counts = reduce(Counts.plus, (dataset.manifest.content.counts for dataset in datasets))
    content = {
        "table": DATASET,
        "stages": {"union": UNION_VERSION},
        "config": {DATASET: _common([member.settings for member in members])},
        "inputs": [
            {"name": member_input(member.digest), "bytes": _num_bytes(member), "sha256": member.digest}
            for member in members
        ],
        "files": files,
        "counts": counts.model_dump(),
        "figures": {
            "tokenizer": datasets[0].tokenizer.model_dump(mode="json"),
            # A chunk of the union is a chunk, or several, of each member.
            "chunk_tokens": math.gcd(*(dataset.chunk_tokens for dataset in datasets)),
            "streams": {
                name: [shard.num_tokens for dataset in datasets for shard in dataset.streams.get(name, [])]
                for name in streams
            },
            MEMBERS: [
                {
                    "digest": member.digest,
                    "settings": member.settings,
                    "shards": {stream: len(numbers) for stream, numbers in member.shards.items()},
                    "by_url": len(member.by_url),
                    **_own_figures(member),
                }
                for member in members
            ],
            REPEATED: repeated_documents([(dataset, member) for dataset in datasets for member in dataset.members]),
        },
    }
    lineage = {
        member_input(member.digest): posixpath.relpath(member.folder.root, place.child(DATASET).root)
        for member in members
    }
    run = {
        "paths": paths,
        "blocks": blocks,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_seconds": 0.0,
        "cpu_seconds": 0.0,
        "code_version": version("penstock"),
        "lineage": lineage,
    }
    return make_manifest(content, run, f"{place.uri}/{DATASET}")


def _files(
    place: Store, datasets: Sequence[Dataset], streams: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """Return the entries of all files of a union, and their paths and blocks, by new keys.

    Paths are relative to the version folder of the union.
    """
    files, paths, blocks = list[dict[str, Any]](), dict[str, str](), dict[str, str]()
    entries = [{entry.key: entry for entry in dataset.manifest.content.files} for dataset in datasets]
    numbers = Counter[str]()

    def add(which: int, old: str, new: str) -> None:
        dataset = datasets[which]
        files.append(entries[which][old].model_dump() | {"key": new})
        target = dataset.folder.path(dataset.manifest.paths[old])
        paths[new] = posixpath.relpath(target, place.child(f"{DATASET}/v").root)
        if old in dataset.manifest.run.blocks:
            blocks[new] = dataset.manifest.run.blocks[old]

    for name in streams:
        for which, dataset in enumerate(datasets):
            for shard in dataset.streams.get(name, []):
                for key_of in (shard_key, docs_key):
                    add(which, key_of(name, shard.number), key_of(name, numbers[name]))
                numbers[name] += 1
    for which, dataset in enumerate(datasets):
        for number in range(len(dataset.by_url)):
            add(which, f"by_url/{number:05d}", f"by_url/{numbers['by_url']:05d}")
            numbers["by_url"] += 1
    return files, paths, blocks


def _own_figures(member: Member) -> dict[str, Any]:
    """Return the Merkle root of a member, by which `penstock prove` proves its documents, and what it holds out by."""
    figures = read_manifest(member.folder).content.figures
    return {name: figures[name] for name in (MEMBERSHIP, HELDOUT_BY) if figures.get(name) is not None}


def _num_bytes(member: Member) -> int:
    return sum(entry.bytes for entry in read_manifest(member.folder).content.files)


def _common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all members share."""
    first, *others = settings
    return {key: value for key, value in first.items() if all(key in each and each[key] == value for each in others)}


# ----------------------------------------------------------------------------------------------------------- repetition


def repeated_documents(members: Sequence[tuple[Dataset, Member]]) -> dict[str, Any]:
    """Return counts of the documents, by id, that several members of a union have, and some examples.

    Keys: `documents`; `tokens` of their copies in all members but the first; `held_out_and_trained`, the documents that
    one member holds out and another trains on; `examples`, ids (hex).

    Raises ConfigError if members have the same id for different records: ids follow from the names of files.
    """
    have_other_files = _have_other_files([member.run for _, member in members])
    total = sum(shard.num_documents for dataset, member in members for shard in _shards(dataset, member))
    passes = max(1, -(-total // IDS_AT_ONCE))
    documents = tokens = mixed = 0
    examples: list[str] = []
    for number in range(passes if len(members) > 1 else 0):
        rows = np.concatenate([_rows(pair, place, number, passes) for place, pair in enumerate(members)])
        rows = rows[np.lexsort((rows["member"], rows["low"], rows["high"]))]
        is_first = np.ones(len(rows), bool)
        is_first[1:] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
        group = np.cumsum(is_first) - 1
        repeated = np.bincount(group) > 1
        held = np.bincount(group, rows["held_out"])
        _check_same_records(rows, is_first, have_other_files)
        documents += int(repeated.sum())
        tokens += int(rows["tokens"][~is_first].sum())
        mixed += int((repeated & (held > 0) & (held < np.bincount(group))).sum())
        for row in rows[is_first][repeated][: EXAMPLES - len(examples)]:
            examples.append(f"{int(row['high']):016x}{int(row['low']):016x}")
    return {"documents": documents, "tokens": tokens, "held_out_and_trained": mixed, "examples": examples}


ROW = np.dtype(
    [(name, "u8") for name in ("high", "low")]
    + [("member", "i4"), ("held_out", "?")]
    + [(name, "i8") for name in ("tokens", "length", "bytes")]
)
"""A document of a member: the two halves of its id, the member's number, whether it is held out, and the sizes of its
tokens, its record and its text."""


def _have_other_files(runs: Sequence[Store]) -> bool:
    """Return True if two runs have read different input files of one name, as far as they have the table `documents`.

    A name is that of the file below the source, from which ids follow.
    """
    known: dict[tuple[str, str], str] = {}
    for run in runs:
        if "documents" in read_run(run).tables:
            manifest = open_table(run, "documents")[1]
            for entry in manifest.content.inputs:
                if known.setdefault(manifest.places_of_inputs[entry.name], entry.sha256) != entry.sha256:
                    return True
    return False


def _check_same_records(rows: NDArray[Any], is_first: NDArray[np.bool_], have_other_files: bool) -> None:
    """Raise ConfigError if rows with the same id, which follow each other, are those of different records.

    The length of a record follows from its file. The size of its text also follows from settings, so it is compared
    only if two members have different files of one name.
    """
    names = ("length", "bytes") if have_other_files else ("length",)
    differs = ~is_first[1:] & np.logical_or.reduce([rows[name][1:] != rows[name][:-1] for name in names])
    if differs.any():
        row = rows[1:][differs][0]
        raise ConfigError(
            f"expected members with an id for each document, got {int(differs.sum()):,} ids of different records in "
            f"two of them, such as {int(row['high']):016x}{int(row['low']):016x}: they have read other files of the "
            "same names. Set source.snapshot to another name in one of their recipes, or rename its files, and run it "
            "again."
        )


def _rows(pair: tuple[Dataset, Member], place: int, number: int, passes: int) -> NDArray[Any]:
    """Return the documents of a member whose id is in part `number` of `passes`, as ROW."""
    dataset, member = pair
    parts = [np.empty(0, ROW)]
    for shard in _shards(dataset, member):
        table = _index_columns(dataset, shard)
        plain = table.column("doc_id").combine_chunks().cast(pa.binary(16))
        halves = np.frombuffer(plain.buffers()[1], ">u8", 2 * len(plain), 16 * plain.offset).reshape(-1, 2)
        removed = (halves == np.frombuffer(REMOVED_ID, ">u8")).all(1)
        chosen = np.flatnonzero((halves[:, 1] % passes == number) & ~removed)
        rows = np.empty(len(chosen), ROW)
        rows["high"], rows["low"], rows["member"] = halves[chosen, 0], halves[chosen, 1], place
        rows["held_out"] = shard.stream.endswith(f"/{HELDOUT}")
        for name, column in (("tokens", "num_tokens"), ("length", "length"), ("bytes", "num_bytes")):
            rows[name] = table.column(column).to_numpy()[chosen]
        parts.append(rows)
    return np.concatenate(parts)


def _shards(dataset: Dataset, member: Member) -> Iterator[Shard]:
    for stream, numbers in member.shards.items():
        yield from (dataset.streams[stream][number] for number in numbers)


def _index_columns(dataset: Dataset, shard: Shard) -> pa.Table:
    try:
        return ArrowFile(dataset.folder.open_input(shard.docs_path)).read_all().select(INDEX_COLUMNS)
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise ContractError(
            f"{dataset.folder.uri}/{shard.docs_path}: expected a readable index file, got an error: {error}. Restore "
            "the file from a backup."
        ) from error


def describe_union(manifest: Manifest) -> str:
    """Return a sentence or two on a union: its members, and the documents that several of them have."""
    digests = [entry["digest"] for entry in manifest.content.figures[MEMBERS]]
    runs = [posixpath.normpath(f"{manifest.run.lineage[member_input(digest)]}/../..") for digest in digests]
    names = [f"{posixpath.basename(run)} ({digest[:12]})" for run, digest in zip(runs, digests, strict=True)]
    text = f"union of {' and '.join(names)}"
    repeated = manifest.content.figures[REPEATED]
    if not _holds_out_the_same(manifest):
        text += (
            "; texts that one of them holds out may be trained on in another: to hold out the same, give all of them "
            f'tokens.heldout_by = "{BY_TEXT}" and the same tokens.seed and tokens.heldout_share'
        )
    if not repeated["documents"]:
        return f"{text}; no document is in two of them"
    examples = ", ".join(identifier[:12] for identifier in repeated["examples"])
    text += (
        f"; {repeated['documents']:,} documents are in two or more of them, such as {examples}: the "
        f"{repeated['tokens']:,} tokens of their further copies are read as well"
    )
    if mixed := repeated["held_out_and_trained"]:
        text += (
            f"; {mixed:,} of them are held out in one and trained on in another, so the held-out loss is too low. Take "
            "them down from one of the runs, or give both the same tokens.seed and tokens.heldout_share"
        )
    return text


def _holds_out_the_same(manifest: Manifest) -> bool:
    """Return True if no member of a union trains on a text that another one holds out, but for near copies."""
    figures = manifest.content.figures
    if not any(name.endswith(f"/{HELDOUT}") for name in figures["streams"]):
        return True
    chosen = {
        (entry.get(HELDOUT_BY), entry["settings"].get("seed"), entry["settings"].get("heldout_share"))
        for entry in figures[MEMBERS]
    }
    return len(chosen) == 1 and all(by == BY_TEXT for by, *_ in chosen)
