"""Pairs of sampled documents: their true Jaccard similarity, whether deduplication could see them, and whether it did.

All pairs of a sample come from products of sparse matrices, one block of rows at a time; documents with equal shingles
are multiplied once. Pairs below FLOOR are counted and forgotten.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.minhash.simhash import distance
from pipeline.minhash.stage import SignatureConfig, similarity, value_type

FLOOR = 0.2
BLOCK_CELLS = 1 << 21
PAIRS_AT_ONCE = 1 << 14
Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AuditSample:
    """The documents that can be compared, sorted by doc_id; everything else is by row."""

    docs: Sequence[bytes]
    scope: Rows
    cluster: Rows
    """A number for each cluster."""
    digest: Rows
    """A number for each normalised text."""
    signatures: npt.NDArray[np.unsignedinteger]
    keys: Rows
    """(documents, keys)"""
    sets: Any
    """Sparse (documents, distinct shingles), 1 where the document has the shingle."""
    sizes: Rows
    same: Rows
    """The first document with the same shingles."""
    row: dict[bytes, int]
    without_text: frozenset[bytes]
    too_long: frozenset[bytes]


@dataclass(frozen=True)
class Pairs:
    """Pairs of documents by row, a < b, of one scope."""

    a: Rows
    b: Rows
    jaccard: Numbers

    def take(self, places: npt.NDArray[np.intp]) -> "Pairs":
        """Some of the pairs."""
        return Pairs(self.a[places], self.b[places], self.jaccard[places])


def concatenate_pairs(parts: Sequence[Pairs]) -> Pairs:
    """All pairs of the parts."""
    nothing = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    columns = zip(*((part.a, part.b, part.jaccard) for part in (nothing, *parts)))
    return Pairs(*map(np.concatenate, columns))


def read_sample(table: pa.Table, signature: SignatureConfig) -> AuditSample:
    """The sample from rows SAMPLED in any order."""
    from scipy.sparse import csr_matrix

    table = table.sort_by("doc").combine_chunks()
    missing = table.filter(table.column("shingles").is_null())
    table = table.filter(table.column("shingles").is_valid())
    docs, stored = table.column("doc").to_pylist(), table.column("shingles").to_pylist()
    sizes = np.array([len(found) // 8 for found in stored], np.int64)
    distinct, places = np.unique(np.frombuffer(b"".join(stored), "<u8"), return_inverse=True)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    sets = csr_matrix((np.ones(len(places), np.int32), places, starts), shape=(len(docs), max(1, len(distinct))))
    first: dict[bytes, int] = {}
    long = missing.column("num_shingles").is_valid()
    return AuditSample(
        docs=docs,
        scope=table.column("scope").to_numpy(),
        cluster=_codes(table.column("cluster")),
        digest=_codes(table.column("digest")),
        signatures=_matrix(table.column("signature"), value_type(signature)),
        keys=_matrix(table.column("keys"), "<i8"),
        sets=sets,
        sizes=sizes,
        same=np.array([first.setdefault(found, row) for row, found in enumerate(stored)], np.int64),
        row={doc: row for row, doc in enumerate(docs)},
        without_text=frozenset(missing.filter(pc.invert(long)).column("doc").to_pylist()),
        too_long=frozenset(missing.filter(long).column("doc").to_pylist()),
    )


def _codes(column: pa.ChunkedArray) -> Rows:
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in column.to_pylist()], np.int64)


def _matrix(column: pa.ChunkedArray, value: str) -> Any:
    return (
        np.frombuffer(b"".join(column.to_pylist()), value).reshape(len(column), -1) if len(column) else np.zeros((0, 1))
    )


def all_pairs(sample: AuditSample, rows: Rows) -> Iterator[Pairs]:
    """Every pair of these documents (ascending rows) that are of one scope and as similar as FLOOR, in blocks."""
    step = max(1, BLOCK_CELLS // max(1, len(rows)))
    for start in range(0, len(rows), step):
        left, right = rows[start : start + step], rows[start:]
        found = jaccards(sample, left, right)
        wanted = np.triu(np.ones(found.shape, bool), 1) & (sample.scope[left][:, None] == sample.scope[right])
        a, b = np.nonzero(wanted & (found >= FLOOR))
        yield Pairs(left[a], right[b], found[a, b])


def jaccards(sample: AuditSample, left: Rows, right: Rows) -> Numbers:
    """The true Jaccard similarity of each of `left` with each of `right` (left, right)."""
    one, one_of = np.unique(sample.same[left], return_inverse=True)
    other, other_of = np.unique(sample.same[right], return_inverse=True)
    common = (sample.sets[one] @ sample.sets[other].T).toarray()
    ratios = _ratio(common, sample.sizes[one][:, None], sample.sizes[other][None, :])
    found: Numbers = ratios[one_of][:, other_of]
    return found


def jaccard_of(sample: AuditSample, a: Rows, b: Rows) -> Numbers:
    """The true Jaccard similarity of document a[i] and document b[i] (pairs,)."""
    common: Rows = np.zeros(len(a), np.int64)
    for start in range(0, len(a), PAIRS_AT_ONCE):
        some = slice(start, start + PAIRS_AT_ONCE)
        common[some] = np.asarray(sample.sets[a[some]].multiply(sample.sets[b[some]]).sum(axis=1)).ravel()
    found: Numbers = _ratio(common, sample.sizes[a], sample.sizes[b])
    return found


def _ratio(common: Any, one: Any, other: Any) -> Any:
    """Two texts without a shingle are alike."""
    union = one + other - common
    return np.where(union > 0, common / np.maximum(union, 1), 1.0)


def share_a_key(sample: AuditSample, a: Rows, b: Rows) -> npt.NDArray[np.bool_]:
    """Whether document a[i] and document b[i] share a key, so that they were candidates (pairs,)."""
    found = np.zeros(len(a), bool)
    for column in sample.keys.T:
        found |= column[a] == column[b]
    return found


def estimates(sample: AuditSample, a: Rows, b: Rows, is_simhash: bool) -> Numbers:
    """The similarity that the signatures of document a[i] and document b[i] say (pairs,)."""
    found = np.zeros(len(a), np.float64)
    for start in range(0, len(a), PAIRS_AT_ONCE):
        some = slice(start, start + PAIRS_AT_ONCE)
        one, other = sample.signatures[a[some]], sample.signatures[b[some]]
        found[some] = 1 - distance(one[:, 0], other[:, 0]) / 64 if is_simhash else similarity(one, other)
    return found
