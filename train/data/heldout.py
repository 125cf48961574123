"""Held-out documents of one dataset that another one trains on: found by look-ups, so that nobody is asked about them.

What is held out follows from the hash of a document's cluster, and the clusters of two datasets may differ: a document
that is held out here may be trained on there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.manifest import RUN_NAME, Table, open_table, read_run
from schemas.storage import Store
from schemas.tokens import HELDOUT, TRAIN, Dataset, open_dataset
from train.data.document_index import Documents
from train.data.order import heldout_streams
from train.data.permutation import Ints

OBJECTIVES = {"causal": 1, "mlm": 0}
"""What can be measured on held-out rows, and how far a target lies behind its position."""


@dataclass(frozen=True)
class HeldoutDocument:
    """A document with a token in a held-out row."""

    doc_id: bytes
    source: str
    first: int
    """Its first token in the held-out stream of its source."""
    end: int
    """Behind its last token."""


def row_starts(dataset: Dataset, seq_len: int, number: int) -> dict[str, Ints]:
    """First token in the stream of each of the first `number` held-out rows, by source."""
    streams = heldout_streams(dataset, seq_len)
    taken = {source: min(number, stream.num_units // seq_len) for source, stream in streams.items()}
    return {source: streams[source].pieces(np.arange(rows) * seq_len, seq_len).start for source, rows in taken.items()}


def heldout_documents(dataset: Dataset, seq_len: int, number: int) -> list[HeldoutDocument]:
    """Every document of the first `number` held-out rows of each source, in the order of the streams."""
    index, found = Documents(dataset), []
    for source, starts in row_starts(dataset, seq_len, number).items():
        # A row's last target is the token behind its inputs.
        ranges = [(start, start + seq_len + 1) for start in starts.tolist()]
        for row, first in index.covering(f"{source}/{HELDOUT}", ranges):
            found.append(HeldoutDocument(row["doc_id"], source, first, first + row["num_tokens"]))
    return found


def trained_on(doc_ids: Iterable[bytes], dataset: Dataset) -> set[bytes]:
    """Those of the documents that a dataset trains on."""
    index = Documents(dataset)
    placed = ((doc_id, index.of_id(doc_id)) for doc_id in doc_ids)
    return {doc_id for doc_id, found in placed if found is not None and found[0].endswith(f"/{TRAIN}")}


def copies_trained_on(runs: Sequence[Store], datasets: Sequence[Dataset], held: Iterable[bytes]) -> set[bytes]:
    """Those of documents held out of some runs that have a copy, by the clusters of any of them, in a training part.

    `datasets` are those that are trained on. The clusters are looked through two narrow columns at a time; where all
    are the same table and are cut by the same share and seed, none can stand on both sides, and nothing is read. For
    a run that stands on the dataset of another one, the clusters are those of that one.
    """
    homes = {home.uri: home for run in runs for home in [_home(run)]}
    cuts = [{key: _tokens(open_dataset(run)).get(key) for key in ("heldout_share", "seed")} for run in runs]
    clusters = {name: _digests(homes.values(), name) for name in ("clusters", "dedup")}
    if len({*clusters["clusters"]}) == 1 and all(cut == cuts[0] for cut in cuts) and None not in clusters["clusters"]:
        return set()
    tables = {
        digest: open_table(home, "dedup")
        for home, digest in zip(homes.values(), clusters["dedup"], strict=True)
        if digest
    }
    wanted, found = pa.array(sorted(set(held)), pa.binary(16)), set[bytes]()
    for table in (Table(*one) for one in tables.values()):
        asked = _rows(table, "doc_id", wanted)
        members = _rows(table, "cluster", pa.array(sorted({*asked.values()}), pa.binary(16)))
        trained = set[bytes]().union(*(trained_on(members, dataset) for dataset in datasets))
        touched = {members[identifier] for identifier in trained}
        found |= {identifier for identifier, cluster in asked.items() if cluster in touched}
    return found


def _home(run: Store) -> Store:
    """The run that has the clusters which the dataset of a run was cut by."""
    return run if "dedup" in read_run(run).tables else open_dataset(run).folder.child("../..")


def _digests(runs: Iterable[Store], name: str) -> list[str | None]:
    """Digest of a table in each run; None = it has none."""
    return [open_table(run, name)[1].digest if _stands(run, name) else None for run in runs]


def _stands(run: Store, name: str) -> bool:
    return run.exists(RUN_NAME) and name in read_run(run).tables


def _tokens(dataset: Dataset) -> Mapping[str, object]:
    settings: Mapping[str, object] = dataset.manifest.content.config.get("tokens", {})
    return settings


def _rows(table: Table, column: str, values: pa.Array) -> dict[bytes, bytes]:
    """Cluster by doc_id of the rows of `dedup` that have one of these values."""
    found: dict[bytes, bytes] = {}
    for path in table.manifest.paths_of():
        with table.folder.open_input(path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(columns=["doc_id", "cluster"]):
                ids, clusters = (batch.column(name).cast(pa.binary(16)) for name in ("doc_id", "cluster"))
                chosen = pc.is_in(ids if column == "doc_id" else clusters, value_set=values)
                found.update(zip(ids.filter(chosen).to_pylist(), clusters.filter(chosen).to_pylist(), strict=True))
    return found
