"""Documents that were made from others: a takedown of a parent also selects them, and what was made from them.

The rows of `documents` that name a selected document or a requested item in `parents` are selected, then the rows that
name these, until no row is added. Only selected documents are in memory. A cycle ends, because a row is added once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.takedown.check_result import CheckResult
from schemas.manifest import TableVersion, open_table, read_run
from schemas.older_tables import read_batches
from schemas.removed import CANONICAL, DOCUMENT, RemovedDocuments, forms_of_parent, forms_of_request
from schemas.storage import CheckedPath, Store
from schemas.tables import PARENTS
from schemas.takedown import Certificate
from schemas.urls import canonical_url

Form = tuple[str, bytes]
"""A document by its id or canonical URL, or a requested host: (kind, value)."""
ROWS_AT_ONCE = 1 << 16
COLUMNS = ("doc_id", "url", PARENTS.name)


@dataclass
class Descendants:
    """The documents of a run that were made from some documents or requested items."""

    parents: dict[bytes, str] = field(default_factory=dict)
    """The parent, as the row names it, for which each document was selected."""
    forms: set[Form] = field(default_factory=set)
    """The forms of selected documents and requested items that rows name as their parents."""

    def names(self, item: tuple[str, str]) -> bool:
        """Return True if a row names a requested item (kind, value), or a document that matches it, as its parent."""
        return {*forms_of_request([item])} <= self.forms


def find_descendants(run: Store, documents: frozenset[bytes], items: Sequence[tuple[str, str]]) -> Descendants:
    """Return the documents, none of `documents`, that were made from these or from requested items (kind, value).

    A document is found by its id and by its URL. Each pass over the table follows one step from child to parent
    against the order of the rows, and all steps in that order.
    """
    found, known = Descendants(), _Known({(DOCUMENT, own) for own in documents} | {*forms_of_request(items)}, documents)
    paths, ids = [*_paths_with_parents(run)], pa.array(sorted(documents), pa.binary())
    while paths and known.has_grown:
        known.has_grown = False
        for row in (row for table, path in paths for row in _rows_with_parents(table, path, ids)):
            _add_row(row, known, found)
    return found


@dataclass
class _Known:
    """The documents and requested items whose descendants are searched."""

    forms: set[Form]
    documents: frozenset[bytes]
    """The documents to start from."""
    has_grown: bool = True
    """True if a form was added after the row that may name it was read."""


def _add_row(row: dict[str, Any], known: _Known, found: Descendants) -> None:
    """Add a row to `found` if it has a known parent; add the URL of a selected row to `known`."""
    document, size = row["doc_id"], len(known.forms)
    for parent in row[PARENTS.name] or ():
        if hits := known.forms.intersection(forms_of_parent(parent)):
            found.forms |= hits
            if document not in known.documents:
                found.parents.setdefault(document, parent)
    if document in known.documents or document in found.parents:
        known.forms.add((DOCUMENT, document))
        if row["url"]:
            known.forms.add((CANONICAL, canonical_url(row["url"]).encode()))
    known.has_grown |= len(known.forms) > size


def _paths_with_parents(run: Store) -> Iterator[tuple[TableVersion, CheckedPath]]:
    """Yield the parts of `documents` with the column of parents; none if no source of the run has parents."""
    if "documents" in read_run(run).tables:
        yield from _parts_with_parents(TableVersion(*open_table(run, "documents")))


def _parts_with_parents(table: TableVersion) -> Iterator[tuple[TableVersion, CheckedPath]]:
    """Yield the parts of a version of `documents` that have the column of parents."""
    for path in table.manifest.paths_of("part-"):
        with table.folder.open_unchecked(path) as stream:
            if PARENTS.name in pq.ParquetFile(stream).schema_arrow.names:
                yield table, path


def _rows_with_parents(table: TableVersion, path: CheckedPath, ids: pa.Array) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part that have parents, and those with one of the given ids."""
    with table.folder.open_input(path) as stream:
        for batch in read_batches(pq.ParquetFile(stream), "documents", COLUMNS, ROWS_AT_ONCE):
            is_named = pc.is_in(batch.column("doc_id").cast(pa.binary()), ids)
            yield from batch.filter(pc.or_(is_named, pc.is_valid(batch.column(PARENTS.name)))).to_pylist()


def check_descendants(table: TableVersion, certificate: Certificate, checked: CheckResult) -> None:
    """Add a problem for the rows of `documents` that name a removed document as their parent.

    A takedown that was asked to keep derived documents has a note instead.
    """
    if certificate.keeps_derived:
        checked.notes.append(
            f"{certificate.derived_left:,} document(s) that were made from removed ones were kept, as certified"
        )
        return
    removed, left = RemovedDocuments.of([certificate]), list[str]()
    for part, path in _parts_with_parents(table):
        with part.folder.open_unchecked(path) as stream:
            for batch in read_batches(pq.ParquetFile(stream), "documents", ("doc_id", PARENTS.name), ROWS_AT_ONCE):
                for row in batch.filter(pc.is_valid(batch.column(PARENTS.name))).to_pylist():
                    if removed.find_parent(row[PARENTS.name]) is not None:
                        left.append(row["doc_id"].hex())
    if left:
        checked.problems.append(
            f"documents: expected no document that was made from a removed one, got {len(left):,}, such as {left[0]}. "
            f"Take it down with `penstock takedown RUN --doc {left[0]}`."
        )
