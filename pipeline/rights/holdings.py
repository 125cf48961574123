"""Everything that a run holds of a rightsholder: rows of each table, tokens, WARC files, and the marks of the pages."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.rights.stage import RIGHTS
from pipeline.takedown.select import ID, ROWS_AT_ONCE, Selection, batches_of
from pipeline.takedown.shards import find_removed_rows
from schemas.manifest import open_table, read_run
from schemas.older_tables import read_batches
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.tokens import open_dataset

FACTS = ("split", "drop_stage", "drop_rule", "licence", "declared_licence")
LICENCES = ("licence", "declared_licence", "header_licence")


@dataclass
class Holdings:
    """What a run holds of the selected documents."""

    documents: int
    rows: dict[str, int] = field(default_factory=dict)
    """Rows by table, dropped documents included; `tokens` counts documents of the dataset."""
    kept: dict[str, int] = field(default_factory=dict)
    """Rows by table that the table does not drop, where it has verdicts."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Documents by `stage/rule` that the table `documents` drops."""
    files: Counter[str] = field(default_factory=Counter)
    """Documents by input file, such as a WARC file."""
    marks: Counter[str] = field(default_factory=Counter)
    """Documents by mark of rights, such as `robots_meta: noai`."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens by stream of the dataset."""

    def to_json(self) -> dict[str, Any]:
        """Return the holdings as JSON values."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }


def find_holdings(run: Store, selection: Selection) -> Holdings:
    """Return what the tables and the dataset of a run hold of the selected documents."""
    holdings = Holdings(len(selection.documents))
    ids = pa.array(sorted(selection.documents), ID)
    tables = read_run(run).tables
    for name in (name for name, table in TABLES.items() if table.describes_documents and name in tables):
        with_verdicts = TABLES[name].has_verdicts
        for batch in batches_of(run, name, ["doc_id", *(["drop_stage"] if with_verdicts else [])]):
            own = batch.filter(pc.is_in(batch.column("doc_id"), ids))
            holdings.rows[name] = holdings.rows.get(name, 0) + own.num_rows
            if with_verdicts:
                holdings.kept[name] = holdings.kept.get(name, 0) + own.column("drop_stage").null_count
    if "documents" in tables:
        for row in _documents(run, ids):
            _count_document(row, holdings)
    if "tokens" in tables:
        for place in find_removed_rows(open_dataset(run), selection.documents):
            holdings.rows["tokens"] = holdings.rows.get("tokens", 0) + len(place.documents)
            holdings.tokens[place.shard.stream] += sum(length for _, length in place.spans)
    return holdings


def _documents(run: Store, ids: pa.Array) -> Iterator[dict[str, Any]]:
    """Yield the facts and marks of the documents with these ids; columns that the run does not have are absent."""
    folder, manifest = open_table(run, "documents")
    for path in manifest.paths_of("part-"):
        with folder.open_input(path) as stream:
            file = pq.ParquetFile(stream)
            names = [name for name in ("doc_id", *FACTS, *RIGHTS.adds) if name in file.schema_arrow.names]
            for batch in read_batches(file, "documents", names, ROWS_AT_ONCE):
                yield from batch.filter(pc.is_in(batch.column("doc_id").cast(ID), ids)).to_pylist()


def _count_document(row: dict[str, Any], holdings: Holdings) -> None:
    holdings.files[row["split"]] += 1
    if row["drop_stage"] is not None:
        holdings.dropped[f"{row['drop_stage']}/{row['drop_rule']}"] += 1
    for name in ("robots_meta", "content_usage", "robots_denied", "robots_usage"):
        holdings.marks.update(f"{name}: {value}" for value in row.get(name) or ())
    for name in ("tdm_reservation", *LICENCES):
        if row.get(name) is not None:
            holdings.marks[f"{name}: {row[name]}"] += 1


def most_common(counts: Counter[str], limit: int) -> Sequence[tuple[str, int]]:
    """Return the largest counts, at most `limit`, the largest first; equal ones by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]
