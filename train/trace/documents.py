"""Title and signals of documents: rows of the very tables that the dataset was made of, found by file and offset.

The tables are columns in compressed groups, and the shuffle has spread a step's documents over all files, so this
costs some milliseconds a document; the index of the dataset alone does not.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.errors import ContractError
from schemas.manifest import MANIFEST_NAME, Manifest, part_key, read_manifest, read_run
from schemas.storage import Store
from schemas.tables import DOCUMENTS, PROVENANCE, VERDICT, to_mapping, value_type
from schemas.tokens import Dataset

NO_SIGNALS = {*(one.name for one in (*PROVENANCE, *VERDICT)), "raw_digest", "text_digest", "signature", "anchor"}
COLUMNS = {
    "documents": [name for name in DOCUMENTS.names if name not in NO_SIGNALS],
    "scores": ["perplexity", "perplexity_tokens", "classifier_scores", "importance"],
    "verdicts": ["perplexity_bucket"],
    "clean": ["title", "cluster_size", "weight", "pii_counts"],
}
"""What is shown of a document, by table."""


@dataclass(frozen=True)
class Detail:
    """What the tables say of a document."""

    title: str | None = None
    """Title, personal data replaced."""
    signals: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured, by column."""


def table_behind(folder: Store, made: Manifest, name: str) -> tuple[Store, Manifest] | None:
    """Folder and manifest of the table that the version in `folder` was made of; None if it does not stand any more.

    It lies in the same run, or in one that this run stands on: a manifest names it as if it lay here in any case.
    """
    if (version := made.run.lineage.get(name)) is None:
        return None
    run = folder.child("../..")
    ways = {f"{table}/{way}" for table, way in read_run(run).tables.items() if "/" in way}
    homes = [run, *(run.child(f"{way}/../..") for way in sorted(ways))]
    found = (home.child(f"{name}/{version}") for home in homes if home.exists(f"{name}/{version}/{MANIFEST_NAME}"))
    return next(((table, read_manifest(table)) for table in found), None)


class Details:
    """The tables that a dataset was made of, as far as they stand."""

    def __init__(self, dataset: Dataset):
        self._tables: dict[str, tuple[Store, Manifest]] = {}
        self._files: dict[tuple[str, int], _Part] = {}
        self._add("clean", (dataset.folder, dataset.manifest))
        if "clean" in self._tables:
            for name in ("documents", "scores", "verdicts"):
                self._add(name, self._tables["clean"])
        documents = self._tables.get("documents")
        names = [entry.name for entry in documents[1].content.inputs] if documents else []
        self._parts = {name: number for number, name in enumerate(names)}

    @property
    def missing(self) -> list[str]:
        """Tables that are not there, so that what they say is not shown."""
        return [name for name in ("documents", "clean") if name not in self._tables]

    def of(self, split: str, offset: int, doc_id: str) -> Detail:
        """What the tables say of the document of this id, whose record begins at `offset` of a file."""
        found: dict[str, Any] = {}
        for name, columns in COLUMNS.items():
            if name in self._tables and split in self._parts:
                row = self._part(name, self._parts[split]).row(bytes.fromhex(doc_id), offset, columns)
                found |= {column: value for column, value in row.items() if value is not None}
        title = found.pop("title", None)
        return Detail(title, found)

    def record(self, split: str, offset: int, doc_id: str) -> dict[str, Any]:
        """The whole row of `documents`; empty if the table or the row is not there."""
        if "documents" not in self._tables or split not in self._parts:
            return {}
        return self._part("documents", self._parts[split]).row(bytes.fromhex(doc_id), offset, DOCUMENTS.names)

    def _add(self, name: str, made: tuple[Store, Manifest]) -> None:
        """Open the version of a table that another was made of, if it stands."""
        if (found := table_behind(*made, name)) is not None:
            self._tables[name] = found

    def _part(self, name: str, number: int) -> "_Part":
        if (name, number) not in self._files:
            folder, manifest = self._tables[name]
            self._files[name, number] = _Part(folder, manifest.run.paths[part_key(number)])
        return self._files[name, number]


class _Part:
    """One file of a table, sorted by offset where it has that column."""

    def __init__(self, folder: Store, path: str):
        try:
            self._file = pq.ParquetFile(folder.open_input(path))
        except (OSError, pa.ArrowInvalid) as error:
            raise ContractError(f"{folder.uri}/{path}: promised a Parquet file, found {error}; restore it") from error
        self._names = set(self._file.schema_arrow.names)
        self._offsets: dict[int, int] = {}

    def row(self, doc_id: bytes, offset: int, columns: list[str]) -> dict[str, Any]:
        """Some columns of a document's row; empty if there is none."""
        wanted = pa.scalar(doc_id, pa.binary(16))
        for group in self._groups(offset):
            ids = self._file.read_row_group(group, columns=["doc_id"]).column(0)
            place = pc.index(ids, wanted).as_py()
            if place >= 0:
                names = [name for name in columns if name in self._names]
                table = self._file.read_row_group(group, columns=names, use_threads=False).slice(place, 1)
                row: dict[str, Any] = table.to_pylist()[0]
                entries = (field.name for field in table.schema if value_type(field.type) is not None)
                return row | {name: to_mapping(row[name]) for name in entries}
        return {}

    def _groups(self, offset: int) -> list[int]:
        """The row groups that may hold a record of this offset, the likeliest first."""
        groups = range(self._file.num_row_groups)
        if "offset" not in self._names:
            return list(groups)
        last = bisect_right(groups, offset, key=self._first_offset) - 1
        # Documents of one record may lie on both sides of an edge.
        return [group for group in (last, last - 1) if group >= 0]

    def _first_offset(self, group: int) -> int:
        if group not in self._offsets:
            self._offsets[group] = int(self._file.read_row_group(group, columns=["offset"]).column(0)[0].as_py())
        return self._offsets[group]
