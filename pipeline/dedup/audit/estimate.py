"""Pairs of sampled documents, and shares of them with confidence intervals: recall, and the candidate curve.

The interval is Wilson's (1927) with an effective number of observations: n = p (1 - p) / v, where v is the variance of
p by the jackknife over groups, and n is at most the number of groups. A bootstrap of groups would give a share of 1 no
width, and recall is near 1. Source: Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial
Proportions in Clustered Surveys".
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.minhash.simhash import distance
from pipeline.minhash.stage import SignatureConfig, jaccard, similarity, value_type

# Pairs of sampled documents: their true Jaccard similarity, estimated similarity, common keys, and common clusters.
#
# The similarities of all pairs of a sample are products of sparse matrices, computed for one block of rows at a time.
# Documents with equal shingles enter a product once. Pairs with a similarity below FLOOR are discarded.

FLOOR = 0.2
"""Least Jaccard similarity of a pair that is counted."""
BLOCK_CELLS = 1 << 21
PAIRS_AT_ONCE = 1 << 14
Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AuditSample:
    """The documents in the audit's samples that can be compared, sorted by doc_id; arrays have one row per document."""

    docs: Sequence[bytes]
    scope: Rows
    """Hash of the document's values in the columns `dedup.scope`."""
    cluster: Rows
    """Integer id of each document's cluster; documents of one cluster have the same id."""
    source: Rows
    """Index of each document's source in `sources`."""
    sources: Sequence[str]
    """Names of the sources of the documents, sorted."""
    place: Rows
    """Place of each document in the keep order of the sample."""
    digest: Rows
    """Integer id of each document's normalised text; equal texts have the same id."""
    signatures: npt.NDArray[np.unsignedinteger]
    keys: Rows
    """Keys that near copies are likely to share, (documents, keys)."""
    sets: Any
    """Sparse matrix (documents, distinct shingles), 1 where the document has the shingle."""
    sizes: Rows
    """Number of distinct shingles of the document."""
    same: Rows
    """Row number of the first document with the same set of shingles, often the document itself."""
    with_numbers: Sequence[bytes | None]
    """Shingles in which numbers keep their digits, as sorted uint64; None outside the sample of removed documents."""
    row: dict[bytes, int]
    """Row number of each document, by doc_id."""
    without_text: frozenset[bytes]
    """Sampled documents that have no text, so they cannot be compared."""
    too_long: frozenset[bytes]
    """Sampled documents that have too many shingles to be compared."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of row numbers a < b in an `AuditSample`, with the true Jaccard similarity of the two documents."""

    a: Rows
    b: Rows
    jaccard: Numbers

    def take(self, indices: npt.NDArray[np.intp]) -> "Pairs":
        """Return the pairs at these indices."""
        return Pairs(self.a[indices], self.b[indices], self.jaccard[indices])


def concatenate_pairs(parts: Sequence[Pairs]) -> Pairs:
    """Return several `Pairs` as a single one, which is empty if `parts` is empty."""
    empty = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    columns = zip(*((part.a, part.b, part.jaccard) for part in (empty, *parts)))
    return Pairs(*map(np.concatenate, columns))


def read_sample(table: pa.Table, signature: SignatureConfig) -> AuditSample:
    """Return an `AuditSample` made from the rows that `read_sampled` yields, in any order."""
    from scipy.sparse import csr_matrix

    table = table.sort_by("doc").combine_chunks()
    missing = table.filter(table.column("shingles").is_null())
    table = table.filter(table.column("shingles").is_valid())
    docs, stored = table.column("doc").to_pylist(), table.column("shingles").to_pylist()
    sizes = np.array([len(shingles) // 8 for shingles in stored], np.int64)
    distinct, columns = np.unique(np.frombuffer(b"".join(stored), "<u8"), return_inverse=True)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    sets = csr_matrix((np.ones(len(columns), np.int32), columns, starts), shape=(len(docs), max(1, len(distinct))))
    first: dict[bytes, int] = {}
    sources, source = np.unique(np.array(table.column("source").to_pylist(), object), return_inverse=True)
    order = table.column("order").to_pylist()
    place = np.zeros(len(docs), np.int64)
    place[sorted(range(len(docs)), key=order.__getitem__)] = np.arange(len(docs))
    long = missing.column("num_shingles").is_valid()
    return AuditSample(
        docs=docs,
        scope=table.column("scope").to_numpy(),
        cluster=_codes(table.column("cluster")),
        source=source.astype(np.int64),
        sources=sources.tolist(),
        place=place,
        digest=_codes(table.column("digest")),
        signatures=_matrix(table.column("signature"), value_type(signature)),
        keys=_matrix(table.column("keys"), "<i8"),
        sets=sets,
        sizes=sizes,
        same=np.array([first.setdefault(shingles, row) for row, shingles in enumerate(stored)], np.int64),
        with_numbers=table.column("with_numbers").to_pylist(),
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
    """Yield, in blocks, all pairs of documents of equal scope with a true Jaccard similarity of at least FLOOR.

    `rows` are the row numbers of the documents to pair, in ascending order. Each pair is yielded once.
    """
    step = max(1, BLOCK_CELLS // max(1, len(rows)))
    for start in range(0, len(rows), step):
        left, right = rows[start : start + step], rows[start:]
        similarities = jaccards(sample, left, right)
        is_pair = np.triu(np.ones(similarities.shape, bool), 1) & (sample.scope[left][:, None] == sample.scope[right])
        a, b = np.nonzero(is_pair & (similarities >= FLOOR))
        yield Pairs(left[a], right[b], similarities[a, b])


def jaccards(sample: AuditSample, left: Rows, right: Rows) -> Numbers:
    """Return the true Jaccard similarity of every row of `left` with every row of `right` (left, right)."""
    rows, row_of = np.unique(sample.same[left], return_inverse=True)
    columns, column_of = np.unique(sample.same[right], return_inverse=True)
    common = (sample.sets[rows] @ sample.sets[columns].T).toarray()
    ratios = _ratio(common, sample.sizes[rows][:, None], sample.sizes[columns][None, :])
    similarities: Numbers = ratios[row_of][:, column_of]
    return similarities


def jaccard_of(sample: AuditSample, a: Rows, b: Rows) -> Numbers:
    """Return, for each i, the true Jaccard similarity of documents a[i] and b[i] (pairs,)."""
    common: Rows = np.zeros(len(a), np.int64)
    for start in range(0, len(a), PAIRS_AT_ONCE):
        block = slice(start, start + PAIRS_AT_ONCE)
        common[block] = np.asarray(sample.sets[a[block]].multiply(sample.sets[b[block]]).sum(axis=1)).ravel()
    similarities: Numbers = _ratio(common, sample.sizes[a], sample.sizes[b])
    return similarities


def jaccard_with_numbers(sample: AuditSample, a: Rows, b: Rows) -> Numbers:
    """Return, for each i, the similarity of a[i] and b[i] by shingles in which numbers keep their digits (pairs,).

    All documents must be in the sample of removed documents, or be kept in the place of one of them.
    """
    sets = {row: np.frombuffer(sample.with_numbers[row] or b"", "<u8") for row in {*a.tolist(), *b.tolist()}}
    return np.array([jaccard(sets[one], sets[other]) for one, other in zip(a.tolist(), b.tolist())], np.float64)


def _ratio(common: Any, left: Any, right: Any) -> Any:
    union = left + right - common  # 0 if neither text has a shingle: such texts count as equal
    return np.where(union > 0, common / np.maximum(union, 1), 1.0)


def share_a_key(sample: AuditSample, a: Rows, b: Rows) -> npt.NDArray[np.bool_]:
    """Return, for each i, True if documents a[i] and b[i] have a common key (pairs,)."""
    shared = np.zeros(len(a), bool)
    for column in sample.keys.T:
        shared |= column[a] == column[b]
    return shared


def estimates(sample: AuditSample, a: Rows, b: Rows, is_simhash: bool) -> Numbers:
    """Return, for each i, the similarity of documents a[i] and b[i] as estimated from their signatures (pairs,)."""
    estimated = np.zeros(len(a), np.float64)
    for start in range(0, len(a), PAIRS_AT_ONCE):
        block = slice(start, start + PAIRS_AT_ONCE)
        left, right = sample.signatures[a[block]], sample.signatures[b[block]]
        estimated[block] = 1 - distance(left[:, 0], right[:, 0]) / 64 if is_simhash else similarity(left, right)
    return estimated


Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""
DIGITS = 6


@dataclass(frozen=True)
class ShareEstimate:
    """A share of pairs, 0 to 1, with its 95 % confidence interval; both are None if there are no pairs."""

    value: float | None
    low: float | None
    high: float | None
    pairs: int

    def to_json(self) -> dict[str, float | int | None]:
        """Return the share, its interval and the number of pairs in the form stored in the manifest."""
        return {"value": self.value, "low": self.low, "high": self.high, "pairs": self.pairs}


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a share that was measured on `count` independent observations."""
    square = Z * Z / count
    center = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / count / 4)
    return max(0.0, center - half), min(1.0, center + half)


def simple_share(hits: int, pairs: int, is_all: bool = False) -> ShareEstimate:
    """Return the share hits / pairs with its 95 % confidence interval; the pairs must be independent.

    If `is_all` is true, the pairs are all pairs of the run rather than a sample, so the interval has zero width.
    """
    if not pairs:
        return ShareEstimate(None, None, None, 0)
    value = hits / pairs
    return _share(value, (value, value) if is_all else wilson(value, pairs), pairs)


def grouped_share(hits: Numbers, weights: Numbers, pairs: int, is_all: bool = False) -> ShareEstimate:
    """Return the share sum(hits) / sum(weights) with its 95 % confidence interval.

    Pairs of the same group may depend on each other. `weights` (groups,) is the total weight of the pairs of each
    group. `hits` (groups,) is the weight of those pairs that have the measured property. `pairs` is the number of
    pairs.

    If `is_all` is true, the pairs are all pairs of the run rather than a sample, so the interval has zero width.
    """
    total = float(weights.sum())
    if not pairs or not total:
        return ShareEstimate(None, None, None, 0)
    value = min(1.0, float(hits.sum()) / total)
    return _share(value, (value, value) if is_all else wilson(value, effective_groups(hits, weights)), pairs)


def effective_groups(hits: Numbers, weights: Numbers) -> float:
    """Return the effective number of observations for `wilson`: 1 to the number of groups with pairs.

    For the formula, see the docstring of this module.
    """
    used = weights > 0
    hits, weights = hits[used], weights[used]
    groups, total, sum_hits = len(weights), float(weights.sum()), float(hits.sum())
    share = sum_hits / total
    if groups < 2:
        return 1.0
    if not 0 < share < 1:
        return float(groups)
    without = (sum_hits - hits) / (total - weights)
    variance = (groups - 1) / groups * float(((without - without.mean()) ** 2).sum())
    return min(float(groups), max(1.0, share * (1 - share) / variance)) if variance else float(groups)


def theory(jaccard: Numbers, bands: int, rows: int) -> Numbers:
    """Return the probability that documents of Jaccard similarity s share a band key: 1 - (1 - s^rows)^bands."""
    probability: Numbers = 1 - (1 - jaccard**rows) ** bands
    return probability


def _share(value: float, interval: tuple[float, float], pairs: int) -> ShareEstimate:
    low, high = interval
    return ShareEstimate(round(value, DIGITS), round(min(low, value), DIGITS), round(max(high, value), DIGITS), pairs)


# Sums over the pairs of a sample, by bins of similarity: recall, and the measured candidate curve.
#
# Sums are kept by document, so that pairs with a common document, which are not independent, can be grouped afterwards.

RECALL_MARGIN = 0.1
"""Recall is reported for similarities down to the least similarity of a copy minus this margin."""


def bin_edges(min_jaccard: float) -> list[float]:
    """Return the lower edges of the similarity bins, sorted: FLOOR to 1 in steps of 0.05, and `min_jaccard`.

    `min_jaccard`, the least similarity of a copy, is left out if it is below FLOOR.
    """
    steps = [round(0.05 * step, 2) for step in range(round(FLOOR / 0.05), 21)]
    return sorted({*steps, *([min_jaccard] if min_jaccard >= FLOOR else [])})


class PairTally:
    """Sums of the weights of pairs, by first document and similarity bin: of all, of candidate, and of joined pairs."""

    def __init__(self, groups: Rows, edges: Sequence[float], layout: tuple[int, int] | None):
        """Start with empty sums.

        `groups` is, for each document, the row number of the first document in its group. `edges` are the lower edges
        of the similarity bins. `layout` is (bands, rows), or None with SimHash.
        """
        self._groups, self._edges, self._layout = groups, np.array(edges), layout
        self._shape = (len(groups), len(edges))
        self._weights, self._candidates, self._joined = (np.zeros(self._shape) for _ in range(3))
        self._counts = np.zeros((3, len(edges)), np.int64)
        self._jaccards, self._expected = np.zeros(len(edges)), np.zeros(len(edges))

    def add(
        self, pairs: Pairs, weights: Numbers, candidates: npt.NDArray[np.bool_], joined: npt.NDArray[np.bool_]
    ) -> None:
        """Add pairs with a similarity of at least FLOOR to the sums.

        `candidates` is True for each pair with a common key, and `joined` for each pair in one cluster. From then on,
        the two documents of a pair are in one group.
        """
        bins = np.searchsorted(self._edges, pairs.jaccard, side="right") - 1
        cells = pairs.a * self._shape[1] + bins
        every = np.ones(len(bins), bool)
        for row, (sums, hits) in enumerate(
            ((self._weights, every), (self._candidates, candidates), (self._joined, joined))
        ):
            sums += np.bincount(cells, weights * hits, self._shape[0] * self._shape[1]).reshape(self._shape)
            self._counts[row] += np.bincount(bins[hits], minlength=self._shape[1])
        self._jaccards += np.bincount(bins, weights * pairs.jaccard, self._shape[1])
        if self._layout is not None:
            self._expected += np.bincount(bins, weights * theory(pairs.jaccard, *self._layout), self._shape[1])
        self._join(pairs)

    def _join(self, pairs: Pairs) -> None:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        ends = np.concatenate([pairs.a, np.arange(len(self._groups))]), np.concatenate([pairs.b, self._groups])
        graph = coo_matrix((np.ones(len(ends[0]), np.int8), ends), shape=(len(self._groups),) * 2)
        labels = connected_components(graph, directed=False)[1]
        self._groups = np.unique(labels, return_index=True)[1][labels]

    def pairs_from(self, edge: float) -> int:
        """Return the number of pairs with a similarity of at least `edge`, which must be a bin edge."""
        return int(self._counts[0][self._edges >= edge].sum())

    def recall(self, min_jaccard: float, is_all: bool) -> list[dict[str, Any]]:
        """Return recall as entries of the manifest, one for each bin edge of at least `min_jaccard` - `RECALL_MARGIN`.

        An entry describes the pairs whose similarity is at least its edge, `jaccard`. `joined` is the share of these
        pairs in one cluster. `candidates` is the share of these pairs with a common key.
        """
        edges = [edge for edge in self._edges.tolist() if edge >= min(min_jaccard, 1.0) - RECALL_MARGIN - 1e-9]
        return [
            {
                "jaccard": edge,
                "pairs": self.pairs_from(edge),
                "joined": self._share(self._joined, self._edges >= edge, is_all).to_json(),
                "candidates": self._share(self._candidates, self._edges >= edge, is_all).to_json(),
            }
            for edge in edges
        ]

    def joined_share(self, is_all: bool) -> ShareEstimate:
        """Return the share of all pairs that are in one cluster."""
        return self._share(self._joined, self._edges >= 0, is_all)

    def curve(self, is_all: bool) -> list[dict[str, Any]]:
        """Return the candidate curve as entries of the manifest, one for each similarity bin that contains a pair.

        `lower` and `upper` are the edges of the bin, and `jaccard` is the mean similarity of its pairs. `pairs`,
        `candidates` and `joined` are numbers of pairs. `share` is the measured share of candidates. `expected` is the
        share that follows from bands and rows; None with SimHash.
        """
        bins = []
        for index in np.flatnonzero(self._counts[0]).tolist():
            total = float(self._weights[:, index].sum())
            pairs, candidates, joined = self._counts[:, index].tolist()
            upper = float(self._edges[index + 1]) if index + 1 < len(self._edges) else 1.0
            expected = None if self._layout is None else round(float(self._expected[index]) / total, DIGITS)
            bins.append(
                {
                    "lower": float(self._edges[index]),
                    "upper": upper,
                    "jaccard": round(float(self._jaccards[index]) / total, DIGITS),
                    "pairs": pairs,
                    "candidates": candidates,
                    "joined": joined,
                    "share": self._share(self._candidates, np.arange(len(self._edges)) == index, is_all).to_json(),
                    "expected": expected,
                }
            )
        return bins

    def _share(self, hits: Numbers, bins: npt.NDArray[np.bool_], is_all: bool) -> ShareEstimate:
        members = np.unique(self._groups, return_inverse=True)[1]
        hit_sums, weight_sums = (
            np.bincount(members, sums[:, bins].sum(axis=1)).astype(np.float64) for sums in (hits, self._weights)
        )
        return grouped_share(hit_sums, weight_sums, int(self._counts[0][bins].sum()), is_all)


# Precision and recall by source: of pairs within one source, and of pairs across two.
#
# A pair counts for the source of the document that comes later in keep order, which is the one removed as a copy.

WITHIN, ACROSS = "within", "across"
"""Kinds of pairs: both documents are of one source, or of two."""
Truths = npt.NDArray[np.bool_]


def removed_of(sample: AuditSample, pairs: Pairs) -> Rows:
    """Return the row number of the document of each pair that comes later in keep order (pairs,)."""
    removed: Rows = np.where(sample.place[pairs.a] < sample.place[pairs.b], pairs.b, pairs.a)
    return removed


def _masks(sample: AuditSample, pairs: Pairs) -> dict[tuple[str, str], Truths]:
    """Return which pairs belong to each (source, kind)."""
    source = sample.source[removed_of(sample, pairs)]
    is_within = sample.source[pairs.a] == sample.source[pairs.b]
    kinds = {WITHIN: is_within, ACROSS: ~is_within}
    return {
        (name, kind): (source == number) & mask
        for number, name in enumerate(sample.sources)
        for kind, mask in kinds.items()
    }


def precision_by_source(sample: AuditSample, pairs: Pairs, hits: Truths, is_all: bool) -> dict[str, Any]:
    """Return the precision of joined pairs by source and kind, as figures of the manifest.

    `hits` is True for each pair that is a copy.
    """
    shares = {
        key: simple_share(int(hits[mask].sum()), int(mask.sum()), is_all) for key, mask in _masks(sample, pairs).items()
    }
    return _nested(sample, shares)


class RecallBySource:
    """Sums of the weights of pairs that are copies, by source and kind."""

    def __init__(self, sample: AuditSample, groups: Rows, limit: float):
        """Start with empty sums. `groups` is as in `PairTally`; pairs below the similarity `limit` are left out."""
        self._sample, self._limit = sample, limit
        keys = [(name, kind) for name in sample.sources for kind in (WITHIN, ACROSS)]
        self._tallies = {key: PairTally(groups, [limit], None) for key in keys}

    def add(self, pairs: Pairs, weights: Numbers, joined: Truths) -> None:
        """Add pairs; `joined` is True for each pair in one cluster."""
        chosen = np.flatnonzero(pairs.jaccard >= self._limit)
        pairs, weights, joined = pairs.take(chosen), weights[chosen], joined[chosen]
        for key, mask in _masks(self._sample, pairs).items():
            if mask.any():
                own = pairs.take(np.flatnonzero(mask))
                self._tallies[key].add(own, weights[mask], np.zeros(len(own.a), bool), joined[mask])

    def figures(self, is_all: bool) -> dict[str, Any]:
        """Return the recall by source and kind, as figures of the manifest."""
        shares = {key: tally.joined_share(is_all) for key, tally in self._tallies.items()}
        return _nested(self._sample, shares)


def _nested(sample: AuditSample, shares: dict[tuple[str, str], ShareEstimate]) -> dict[str, Any]:
    return {name: {kind: shares[name, kind].to_json() for kind in (WITHIN, ACROSS)} for name in sample.sources}
