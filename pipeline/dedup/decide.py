"""The decision about each document: its stored values, the totals of its URL and cluster, and the resulting verdict.

Of several documents, the one with the smallest byte string is best: a byte that marks a dropped document, its keep
order, and the digest of its text. A run, a later snapshot and a what-if compare the same strings.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dedup.config import EXACT, NEAR, SAME_URL, TAKEN_DOWN, DedupConfig
from pipeline.dedup.keep_order import EARLIER, PART_BYTES, order_columns, orders, rows_of_bytes
from pipeline.dedup.keys import DIGEST_BYTES, DIGESTS, scopes_of
from pipeline.engine.stage import Row
from pipeline.minhash.simhash import distance
from pipeline.minhash.stage import SignatureConfig, similarity, value_type
from schemas.ids import DOC_ID_BYTES
from schemas.tables import DROPPED_BEFORE
from schemas.urls import url_key

URL, CLUSTER = b"u", b"c"
"""First byte of a key, which says what the key is of: a URL or a cluster."""
DROPPED = b"\1"
NOT_DROPPED = b"\0"
URL_RULES = {"newest": ("latest",), "longest": ("longest",), "first": ("snapshot", "earliest")}
KnownTotals = Mapping[bytes, tuple[int, bytes]]
"""For each kind and key that occurs in a part: the number of documents with the key, and the lowest of their orders."""
BestCounts = dict[bytes, tuple[int, bytes]]
"""For each key: the number of documents counted so far, and the lowest of their orders."""


@dataclass(frozen=True)
class DedupFacts:
    """The stored values of a batch of documents that determine which of them survive deduplication."""

    ids: list[bytes]
    dropped: list[bool]
    """True for a document that an earlier verdict drops."""
    clusters: list[bytes]
    similarities: list[float | None]
    """Similarity of each document to the most similar one found; None if it is joined with no other."""
    orders: list[bytes]
    """Keep order of each document, followed by the digest of its text."""
    digest: int
    """Length of the text digest in `orders` [bytes]; 0 if `dedup.exact` is off."""
    urls: list[bytes | None]
    """Key of each canonical URL, followed by the scope; None if `by_url` is off or the document has no URL."""
    url_orders: list[bytes]
    """Keep order of each document among those of its URL."""
    chars: list[int]
    """Length of each text after cuts [code points]."""
    signatures: Sequence[bytes] = ()
    """Signature of each document; empty if `dedup.compare_survivor` is off."""
    taken_down: Collection[int] = ()
    """Numbers of the documents that no earlier verdict drops and that takedowns removed from earlier snapshots."""


@dataclass(frozen=True)
class SurvivorComparison:
    """The comparison of near copies with the documents that are kept: see `dedup.compare_survivor`."""

    dedup: DedupConfig
    signature: SignatureConfig
    kept: Mapping[bytes, bytes]
    """Signature of the document that a round keeps, by `round_key`. A document of an earlier snapshot has none if it
    leads no bucket of that snapshot's index."""
    rounds: int
    """Number of rounds in which documents have been chosen."""

    def similarity(self, left: bytes, right: bytes) -> float:
        """Return the estimated similarity of two documents, from their signatures."""
        one, two = (np.frombuffer(value, value_type(self.signature)) for value in (left, right))
        if self.signature.family == "simhash":
            return 1 - int(distance(one, two)[0]) / 64
        return float(np.float32(similarity(one[None], two[None])[0]))

    def is_copy(self, value: float | None) -> bool:
        """Return True if a document of this similarity to the one that is kept is dropped; None: it is not known."""
        if not self.dedup.requires_survivors:
            return True
        is_simhash = self.signature.family == "simhash"
        least = 1 - self.dedup.max_distance / 64 if is_simhash else float(np.float32(self.dedup.min_similarity))
        return value is not None and value >= least


@dataclass(frozen=True)
class Decision:
    """What becomes of a document: its row of the table `dedup`, without the verdict, and the verdict."""

    row: Row
    reason: str | None
    """Reason of its drop; None for a survivor."""
    chars: int
    """Length of its text [code points]."""
    part: int | None
    """Part of the document that is kept in place of a copy; None for a document that is kept, or was dropped before."""
    value: float | None
    """Similarity to that document if it was compared, else to the most similar document found; None without a copy."""
    round: int
    """Round that chose its survivor; 0 without `dedup.compare_survivor`."""
    total: int
    """Number of documents from which that round chose."""


def facts_columns(config: DedupConfig) -> dict[str, list[str]]:
    """Return the stored columns that `facts_of` reads, by table."""
    columns = order_columns(config)
    digest = [DIGESTS[config.exact]] if config.exact != "off" else []
    url = ["url", "num_bytes", "date", "snapshot"] if config.by_url != "off" else []
    columns["documents"] = list(dict.fromkeys([*columns["documents"], *config.scope, *digest, *url, "body_chars"]))
    if config.compares_survivors:
        columns["documents"].append("signature")
    return columns | {"verdicts": ["drop_stage"], "clusters": ["cluster", "similarity"]}


def facts_of(batch: pa.RecordBatch, ordinal: int, config: DedupConfig) -> DedupFacts:
    """Return the `DedupFacts` of a batch of part `ordinal`; the batch has the columns of `facts_columns`."""
    order = orders(batch, ordinal, config)
    if config.exact != "off":
        order = np.concatenate([order, rows_of_bytes(batch.column(DIGESTS[config.exact]), DIGEST_BYTES)], axis=1)
    urls: list[bytes | None] = [None] * batch.num_rows
    url_orders = [b""] * batch.num_rows
    if config.by_url != "off":
        scopes = [scope.tobytes() for scope in scopes_of(batch, config)]
        urls = [url_key(url) + scope if url else None for url, scope in zip(batch.column("url").to_pylist(), scopes)]
        rule = config.model_copy(update={"keep": URL_RULES[config.by_url]})
        url_orders = _rows(orders(batch, ordinal, rule))
    return DedupFacts(
        ids=batch.column("doc_id").to_pylist(),
        dropped=batch.column("drop_stage").is_valid().to_pylist(),
        clusters=batch.column("cluster").to_pylist(),
        similarities=batch.column("similarity").to_pylist(),
        orders=_rows(order),
        digest=DIGEST_BYTES if config.exact != "off" else 0,
        urls=urls,
        url_orders=url_orders,
        chars=batch.column("body_chars").to_pylist(),
        signatures=batch.column("signature").to_pylist() if config.compares_survivors else (),
    )


def _rows(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    width = rows.shape[1]
    flat = rows.tobytes()
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def url_tallies(facts: DedupFacts, tally: BestCounts) -> None:
    """Add the documents of each URL to `tally`: their number, and the first of them by the rule `dedup.by_url`.

    Documents that an earlier verdict drops are left out, and those that were taken down.
    """
    for index, (key, order, dropped) in enumerate(zip(facts.urls, facts.url_orders, facts.dropped)):
        if key is not None and not dropped and index not in facts.taken_down:
            _count(tally, key, order)


def cluster_tallies(facts: DedupFacts, known: KnownTotals, tally: BestCounts, alone: bool) -> None:
    """Add the documents of each cluster to `tally`: their number, and the first of them in keep order.

    In this order, documents that are already dropped come last. Documents without a copy count only if `alone` is true.
    """
    reasons = early_drop_reasons(facts, known)
    for index, cluster in enumerate(facts.clusters):
        if alone or facts.similarities[index] is not None:
            _count(tally, cluster, (DROPPED if reasons[index] else NOT_DROPPED) + facts.orders[index])


def _count(tally: BestCounts, key: bytes, order: bytes) -> None:
    count, best = tally.get(key, (0, order))
    tally[key] = (count + 1, min(best, order))


def early_drop_reasons(facts: DedupFacts, known: KnownTotals) -> list[str | None]:
    """Return, for each document, the reason for which it is dropped regardless of its cluster; None if there is none.

    The reason is DROPPED_BEFORE if an earlier verdict drops the document, and TAKEN_DOWN if a takedown removed it from
    an earlier snapshot. It is SAME_URL if another document of the same URL precedes it by the rule `dedup.by_url`.
    """
    reasons: list[str | None] = []
    for index, (dropped, key, order) in enumerate(zip(facts.dropped, facts.urls, facts.url_orders)):
        if dropped:
            reasons.append(DROPPED_BEFORE)
        elif index in facts.taken_down:
            reasons.append(TAKEN_DOWN)
        elif key is not None and known.get(URL + key, (1, order))[1] != order:
            reasons.append(SAME_URL)
        else:
            reasons.append(None)
    return reasons


def round_key(number: int, cluster: bytes) -> bytes:
    """Return the key of the documents of a cluster that round `number` chooses from; round 0 has all of them."""
    return (bytes([number]) if number else CLUSTER) + cluster


def choose_survivor(
    facts: DedupFacts, index: int, known: KnownTotals, comparison: SurvivorComparison
) -> tuple[int, bytes, float | None]:
    """Return (round, order of the document that is kept, similarity to it) for a document without an earlier drop.

    A document that is kept has its own order, and no similarity. The round is `comparison.rounds` for a document that
    is no copy of those which these rounds keep.
    """
    own = NOT_DROPPED + facts.orders[index]
    for number in range(comparison.rounds):
        key = round_key(number, facts.clusters[index])
        best = known.get(key, (1, own))[1]
        if best == own:
            return number, own, None
        is_equal = facts.digest > 0 and best[-facts.digest :] == own[-facts.digest :]
        if is_equal:
            return number, best, 1.0
        value = comparison.similarity(facts.signatures[index], comparison.kept[key]) if key in comparison.kept else None
        if comparison.is_copy(value):
            return number, best, value
    return comparison.rounds, own, None


def rest_tallies(facts: DedupFacts, known: KnownTotals, comparison: SurvivorComparison, tally: BestCounts) -> None:
    """Add to `tally`, by cluster, the documents that are no copy of those which the rounds so far keep."""
    for index, reason in enumerate(early_drop_reasons(facts, known)):
        if reason is None and facts.similarities[index] is not None:
            number, own, _ = choose_survivor(facts, index, known, comparison)
            if number == comparison.rounds:
                _count(tally, facts.clusters[index], own)


def decide(facts: DedupFacts, known: KnownTotals, comparison: SurvivorComparison | None = None) -> Iterator[Decision]:
    """Yield the decision about every document. With `comparison`, near copies are compared with what is kept."""
    for index, reason in enumerate(early_drop_reasons(facts, known)):
        identifier = facts.ids[index]
        own = (DROPPED if reason else NOT_DROPPED) + facts.orders[index]
        size, best = known.get(CLUSTER + facts.clusters[index], (1, own))
        number, total, value = 0, size, facts.similarities[index]
        if reason is None and comparison is not None:
            number, best, value = choose_survivor(facts, index, known, comparison)
            total = known.get(round_key(number, facts.clusters[index]), (1, own))[0]
        survivor = None if best[:1] == DROPPED else doc_id_of(best, facts.digest)
        if reason is None and survivor != identifier:
            reason = EXACT if facts.digest and best[-facts.digest :] == own[-facts.digest :] else NEAR
        part = None
        if reason == SAME_URL:
            part = part_of(known[URL + (facts.urls[index] or b"")][1], 0)
        elif reason in (EXACT, NEAR):
            part = part_of(best, facts.digest)
        row: Row = {
            "doc_id": identifier,
            "cluster": facts.clusters[index],
            "cluster_size": size,
            "survivor": survivor,
            "similarity": facts.similarities[index],
        }
        yield Decision(row, reason, facts.chars[index], part, value, number, total)


def doc_id_of(best: bytes, digest: int) -> bytes:
    """Return the doc_id in `best`, which is a keep order followed by a text digest of `digest` bytes."""
    end = len(best) - digest - PART_BYTES
    return best[end - DOC_ID_BYTES : end]


def part_of(best: bytes, digest: int) -> int:
    """Return the part of the document of a keep order, which a text digest of `digest` bytes may follow.

    An empty keep order is that of a document of an earlier snapshot: EARLIER.
    """
    end = len(best) - digest
    return int.from_bytes(best[end - PART_BYTES : end], "big") if best else EARLIER


def weight_of(size: int, config: DedupConfig) -> int:
    """Return the weight of the survivor of a cluster of this size: how often an epoch of training reads it."""
    return config.rehydration[max(limit for limit in config.rehydration if limit <= size)]
