"""Find the held-out documents of one dataset that are training data in another, so that evaluations can exclude them.

A hash of a document's cluster decides whether it is held out, and the clusters of two datasets may differ. A document
that is held out in the first dataset may therefore be training data in the second.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.manifest import RUN_NAME, TableVersion, open_table, read_run
from schemas.older_tables import read_batches
from schemas.storage import Store
from schemas.tokens import HELDOUT, TRAIN, Dataset, open_dataset
from train.data.document_index import DocumentIndex
from train.data.order import heldout_streams
from train.data.permutation import Ints

OBJECTIVES = {"causal": 1, "mlm": 0}
"""Objectives that can be evaluated on held-out rows, each with the offset of a target token from its position."""


@dataclass(frozen=True)
class HeldoutDocument:
    """A document with at least one token in a held-out row."""

    doc_id: bytes
    source: str
    first: int
    """Position of the document's first token in the held-out stream of its source."""
    end: int
    """Position after the document's last token, in the same stream."""


def row_starts(dataset: Dataset, seq_len: int, number: int) -> dict[str, Ints]:
    """Return, by source, the start positions of the first `number` held-out rows in the held-out stream."""
    streams = heldout_streams(dataset, seq_len)
    taken = {source: min(number, stream.num_units // seq_len) for source, stream in streams.items()}
    return {source: streams[source].pieces(np.arange(rows) * seq_len, seq_len).start for source, rows in taken.items()}


def heldout_documents(dataset: Dataset, seq_len: int, number: int) -> list[HeldoutDocument]:
    """Return every document with a token in the first `number` held-out rows of each source, in stream order."""
    index, documents = DocumentIndex(dataset), []
    for source, starts in row_starts(dataset, seq_len, number).items():
        # A row's last target is the token after its inputs.
        ranges = [(start, start + seq_len + 1) for start in starts.tolist()]
        for row, first in index.covering(f"{source}/{HELDOUT}", ranges):
            documents.append(HeldoutDocument(row["doc_id"], source, first, first + row["num_tokens"]))
    return documents


def trained_documents(doc_ids: Iterable[bytes], dataset: Dataset) -> set[bytes]:
    """Return those of `doc_ids` whose documents are in a training stream of the dataset."""
    index = DocumentIndex(dataset)
    return {id_ for id_ in doc_ids if any(stream.endswith(f"/{TRAIN}") for stream, *_ in index.all_of_id(id_))}


def trained_copies(runs: Sequence[Store], datasets: Sequence[Dataset], held: Iterable[bytes]) -> set[bytes]:
    """Return the ids in `held` whose documents have a copy in a training stream of one of `datasets`.

    `held`: ids of documents that `runs` hold out. Documents are copies of each other if one of `runs` has them in the
    same cluster. A run without clusters of its own uses the clusters of the run that wrote its dataset.
    """
    members = [member for run in runs for member in open_dataset(run, even_replaced=True).members]
    owners = {owner.uri: owner for run in runs for owner in _cluster_runs(run)}
    cuts = [{key: member.settings.get(key) for key in ("heldout_share", "seed")} for member in members]
    clusters = {name: _digests(owners.values(), name) for name in ("clusters", "dedup")}
    # With the same clusters, held-out share and seed, no cluster is both held out and trained on.
    if len({*clusters["clusters"]}) == 1 and all(cut == cuts[0] for cut in cuts) and None not in clusters["clusters"]:
        return set()
    tables = {
        digest: open_table(owner, "dedup", even_replaced=True)
        for owner, digest in zip(owners.values(), clusters["dedup"], strict=True)
        if digest
    }
    held_ids, copied = pa.array(sorted(set(held)), pa.binary(16)), set[bytes]()
    for table in (TableVersion(*opened) for opened in tables.values()):
        clusters_of_held = _cluster_rows(table, "doc_id", held_ids)
        clusters_of = _cluster_rows(table, "cluster", pa.array(sorted({*clusters_of_held.values()}), pa.binary(16)))
        trained = set[bytes]().union(*(trained_documents(clusters_of, dataset) for dataset in datasets))
        touched = {clusters_of[identifier] for identifier in trained}
        copied |= {identifier for identifier, cluster in clusters_of_held.items() if cluster in touched}
    return copied


def _cluster_runs(run: Store) -> list[Store]:
    """Return [run] if it has clusters of its own, else the runs that wrote its dataset."""
    if "dedup" in read_run(run).tables:
        return [run]
    return [member.run for member in open_dataset(run, even_replaced=True).members]


def _digests(runs: Iterable[Store], name: str) -> list[str | None]:
    opened = (open_table(run, name, even_replaced=True) if _has_table(run, name) else None for run in runs)
    return [own and own[1].digest for own in opened]


def _has_table(run: Store, name: str) -> bool:
    return run.exists(RUN_NAME) and name in read_run(run).tables


def _cluster_rows(table: TableVersion, column: str, values: pa.Array) -> dict[bytes, bytes]:
    """Return {doc_id: cluster} of the rows of table `dedup` with one of `values` in `column`."""
    clusters_by_id: dict[bytes, bytes] = {}
    for path in table.manifest.paths_of():
        with table.folder.open_input(path) as stream:
            for batch in read_batches(pq.ParquetFile(stream), "dedup", ["doc_id", "cluster"], 1 << 16):
                ids, clusters = (batch.column(name).cast(pa.binary(16)) for name in ("doc_id", "cluster"))
                chosen = pc.is_in(ids if column == "doc_id" else clusters, value_set=values)
                clusters_by_id.update(
                    zip(ids.filter(chosen).to_pylist(), clusters.filter(chosen).to_pylist(), strict=True)
                )
    return clusters_by_id
