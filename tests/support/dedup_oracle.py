"""All pairs of texts above a similarity, exactly: shingle sets as a sparse matrix times itself.

A shingle is five consecutive words (lower-cased runs of letters, digits and underscores) or, where writing does not
separate words, five consecutive characters without white space. Nothing of ours takes part, so it can judge ours.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

SIZE = 5
WORD = re.compile(r"\w+")
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts a < b by index, with their exact similarity."""

    a: Ints
    b: Ints
    similarity: npt.NDArray[np.float64]

    def least(self, threshold: float) -> "Pairs":
        """Return the pairs of at least this similarity."""
        chosen = self.similarity >= threshold - 1e-9
        return Pairs(self.a[chosen], self.b[chosen], self.similarity[chosen])

    def __len__(self) -> int:
        return len(self.a)


def shingles_of(text: str, unit: str = "word") -> set[str]:
    """Return the distinct shingles of a text; all of it if it is shorter; none if it has no words."""
    if unit == "char":
        return runs_of("".join(text.split()), "")
    return runs_of(WORD.findall(text.lower()), " ")


def runs_of(units: Sequence[str], space: str) -> set[str]:
    """Return the distinct runs of five units; all units if there are fewer; none if there are none."""
    return {space.join(units[i : i + SIZE]) for i in range(max(1, len(units) - SIZE + 1))} if units else set()


def all_pairs(sets: Sequence[set[str]], least: float = 0.3, block: int = 2000) -> Pairs:
    """Return every pair of shingle sets whose Jaccard similarity is at least `least`."""
    numbers: dict[str, int] = {}
    columns = np.fromiter((numbers.setdefault(s, len(numbers)) for shingles in sets for s in shingles), np.int64)
    sizes = np.array([len(shingles) for shingles in sets])
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    matrix = csr_matrix((np.ones(len(columns), np.int32), columns, bounds), shape=(len(sets), len(numbers)))
    matrix = matrix[:, np.bincount(columns, minlength=len(numbers)) > 1]  # a shingle of one text makes no pair
    other = matrix.T.tocsc()
    blocks: list[tuple[Ints, Ints, npt.NDArray[np.float64]]] = []
    for start in range(0, len(sets), block):
        shared = (matrix[start : start + block] @ other).tocoo()
        a, b = shared.row.astype(np.int64) + start, shared.col.astype(np.int64)
        similarity = shared.data / (sizes[a] + sizes[b] - shared.data)
        chosen = np.flatnonzero((a < b) & (similarity >= least))
        chosen = chosen[np.lexsort((b[chosen], a[chosen]))]
        blocks.append((a[chosen], b[chosen], similarity[chosen]))
    return Pairs(*(np.concatenate(parts) for parts in zip(*blocks)))


def clusters_of(count: int, a: Ints, b: Ints) -> Ints:
    """Return the component of each of `count` texts under these pairs."""
    from scipy.sparse.csgraph import connected_components

    graph = csr_matrix((np.ones(len(a), np.int8), (a, b)), shape=(count, count))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def survivors_by_rounds(
    members: Sequence[bytes], is_copy: Callable[[bytes, bytes], bool], rounds: int
) -> dict[bytes, bytes]:
    """Return the member that is kept in place of each member of a cluster, itself if it is kept.

    In each round the first of the rest is kept, and all its copies are dropped. `members` are in keep order.
    """
    survivors: dict[bytes, bytes] = {}
    rest = list(members)
    for _ in range(rounds):
        first = next(iter(rest), b"")
        survivors |= {each: first for each in rest if each == first or is_copy(first, each)}
        rest = [each for each in rest if each not in survivors]
    return survivors | {each: each for each in rest}


def expected_recall(
    similarities: npt.NDArray[np.float64], least: float, layout: tuple[int, int], permutations: int
) -> float:
    """Return the mean probability that pairs of these similarities share a band and reach the estimate `least`.

    The values of two signatures agree independently, by 4,000 draws for each level. NaN without a pair.
    """
    bands, rows = layout
    draw = np.random.default_rng(5)
    levels, counts = np.unique(np.round(similarities, 2), return_counts=True)
    shares = []
    for level in levels:
        equal = draw.random((4000, permutations)) < level
        candidate = equal[:, : bands * rows].reshape(len(equal), bands, rows).all(axis=2).any(axis=1)
        shares.append((candidate & (equal.mean(axis=1) >= least)).mean())
    return float(np.average(shares, weights=counts)) if len(levels) else float("nan")
