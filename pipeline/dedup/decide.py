"""The decision about a document: what a part knows of it, what the totals say of its URL and its cluster, its fate.

The best of several documents is the smallest of byte strings: a byte that says whether it was dropped, its keep order,
and the digest of its text. A run, a later snapshot and a what-if compare the same strings.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dedup.config import DROPPED_BEFORE, EXACT, NEAR, SAME_URL, DedupConfig
from pipeline.dedup.keep_order import PART_BYTES, order_columns, orders, rows_of_bytes
from pipeline.dedup.keys import DIGEST_BYTES, DIGESTS, scopes_of
from pipeline.engine.stage import Row
from schemas.ids import DOC_ID_BYTES
from schemas.urls import url_key

URL, CLUSTER = b"u", b"c"
"""First byte of a key, which tells what it is a key of."""
DROPPED = b"\1"
NOT_DROPPED = b"\0"
URL_RULES = {"newest": ("latest",), "longest": ("longest",), "first": ("snapshot", "earliest")}
KnownTotals = Mapping[bytes, tuple[int, bytes]]
"""Total and best of every key that a part was told of, by kind and key."""
BestCounts = dict[bytes, tuple[int, bytes]]


@dataclass(frozen=True)
class DedupFacts:
    """What decides about a batch of documents."""

    ids: list[bytes]
    dropped: list[bool]
    """Whether a verdict has dropped it."""
    clusters: list[bytes]
    similarities: list[float | None]
    """None for a document that is joined with no other."""
    orders: list[bytes]
    """Keep order and digest of the text, as bytes."""
    digest: int
    """Length of that digest [bytes]; 0 where texts are not compared exactly."""
    urls: list[bytes | None]
    """Key of the canonical URL, with the scope; None where URLs do not decide."""
    url_orders: list[bytes]
    chars: list[int]


def facts_columns(config: DedupConfig) -> dict[str, list[str]]:
    """The stored columns that facts are made of, by table."""
    columns = order_columns(config)
    digest = [DIGESTS[config.exact]] if config.exact != "off" else []
    url = ["url", "num_bytes", "date", "snapshot"] if config.by_url != "off" else []
    columns["documents"] = list(dict.fromkeys([*columns["documents"], *config.scope, *digest, *url, "body_chars"]))
    return columns | {"verdicts": ["drop_stage"], "clusters": ["cluster", "similarity"]}


def facts_of(batch: pa.RecordBatch, ordinal: int, config: DedupConfig) -> DedupFacts:
    """The facts of a batch with the columns of `facts_columns`."""
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
    )


def _rows(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    width = rows.shape[1]
    flat = rows.tobytes()
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def url_tallies(facts: DedupFacts, found: BestCounts) -> None:
    """Count the URLs of the documents that no verdict has dropped, and note the best of each."""
    for key, order, dropped in zip(facts.urls, facts.url_orders, facts.dropped):
        if key is not None and not dropped:
            _enter(found, key, order)


def cluster_tallies(facts: DedupFacts, known: KnownTotals, found: BestCounts, alone: bool) -> None:
    """Count the documents of each cluster, and note the best; those that are joined with no other only if `alone`."""
    gone = early_drop_reasons(facts, known)
    for place, cluster in enumerate(facts.clusters):
        if alone or facts.similarities[place] is not None:
            _enter(found, cluster, (DROPPED if gone[place] else NOT_DROPPED) + facts.orders[place])


def _enter(found: BestCounts, key: bytes, order: bytes) -> None:
    count, best = found.get(key, (0, order))
    found[key] = (count + 1, min(best, order))


def early_drop_reasons(facts: DedupFacts, known: KnownTotals) -> list[str | None]:
    """The reason for which each document is out before copies of its text are looked at; None for the others."""
    found: list[str | None] = []
    for dropped, key, order in zip(facts.dropped, facts.urls, facts.url_orders):
        if dropped:
            found.append(DROPPED_BEFORE)
        elif key is not None and known.get(URL + key, (1, order))[1] != order:
            found.append(SAME_URL)
        else:
            found.append(None)
    return found


def decide(facts: DedupFacts, known: KnownTotals) -> Iterator[tuple[Row, str | None, int]]:
    """The row of every document without its verdict, the reason it is dropped for (None: it stays), and its length."""
    for place, reason in enumerate(early_drop_reasons(facts, known)):
        identifier = facts.ids[place]
        own = (DROPPED if reason else NOT_DROPPED) + facts.orders[place]
        size, best = known.get(CLUSTER + facts.clusters[place], (1, own))
        survivor = None if best[:1] == DROPPED else doc_id_of(best, facts.digest)
        if reason is None and survivor != identifier:
            reason = EXACT if facts.digest and best[-facts.digest :] == own[-facts.digest :] else NEAR
        row: Row = {
            "doc_id": identifier,
            "cluster": facts.clusters[place],
            "cluster_size": size,
            "survivor": survivor,
            "similarity": facts.similarities[place],
        }
        yield row, reason, facts.chars[place]


def doc_id_of(best: bytes, digest: int) -> bytes:
    """The doc_id in the best of a cluster, which ends in part and digest."""
    end = len(best) - digest - PART_BYTES
    return best[end - DOC_ID_BYTES : end]


def weight_of(size: int, config: DedupConfig) -> int:
    """How often a surviving document may be repeated for the size of its cluster."""
    return config.rehydration[max(limit for limit in config.rehydration if limit <= size)]
