"""Tests of deduplication streams at any batch boundary: equal documents, buckets, verification, and decisions."""

import numpy as np
import pyarrow as pa
import pytest

from pipeline.dedup.config import DEDUP, DedupConfig
from pipeline.dedup.decide import (
    Decision,
    DedupFacts,
    cluster_tallies,
    decide,
    early_drop_reasons,
    url_tallies,
    weight_of,
)
from pipeline.dedup.keys import (
    KEYS,
    LEADERS,
    PAIRED,
    PAYLOAD_REQUEST,
    check_method,
    equal_documents,
    iterate_windows,
    layout,
    num_keys,
    pairs_of_buckets,
    rows_of_buckets,
    sort_words,
)
from pipeline.dedup.survivors import write_verdict
from pipeline.dedup.verify import (
    BEST,
    FAILED,
    JOINED,
    OUTCOMES,
    WITH_PAYLOADS,
    attach_payloads,
    compare_pairs,
    make_comparison,
)
from pipeline.engine.part import DropCounter
from pipeline.minhash.stage import SignatureConfig
from schemas.errors import ConfigError, ContractError


def node(number: int) -> bytes:
    return number.to_bytes(20, "big")


def order(number: int) -> bytes:
    """Return a keep order of one byte before the node."""
    return bytes([number % 7]) + node(number)


def cut(rows: list[dict], schema: pa.Schema, size: int) -> list[pa.RecordBatch]:
    return [
        pa.RecordBatch.from_pylist(rows[start : start + size], schema=schema) for start in range(0, len(rows), size)
    ]


def number(value: bytes) -> int:
    return int.from_bytes(value[-20:], "big")


BUCKETS = [(-5, 1), (0, 7), (0, 1), (0, 8), (3, 14), (4, 21), (4, 2), (9, 3)]
"""(key, document) sorted by key and keep order."""


def bucket_rows(size: int, kind: str) -> list[dict]:
    rows = [{"key": key, "order": order(doc)} for key, doc in BUCKETS]
    buckets = rows_of_buckets(0, iter(cut(rows, KEYS, size)), 21)
    return [row for name, batch in buckets if name == kind for row in batch.to_pylist()]


@pytest.mark.parametrize("size", range(1, 9))
def test_members_pair_with_the_first_of_their_bucket_however_the_batches_are_cut(size):
    rows = bucket_rows(size, PAIRED)
    pairs = [row for row in rows if row["leader"] != PAYLOAD_REQUEST]
    numbers = [(row["key"], number(row["node"]), number(row["leader"]), number(row["order"])) for row in pairs]
    assert numbers == [(0, 1, 7, 1), (0, 8, 7, 8), (4, 2, 21, 2)]
    assert [number(row["node"]) for row in rows if row["leader"] == PAYLOAD_REQUEST] == [7, 21]
    leads = [(row["key"], row["order"]) for row in bucket_rows(size, LEADERS)]
    assert leads == [(-5, order(1)), (0, order(7)), (3, order(14)), (4, order(21)), (9, order(3))]


def test_a_huge_bucket_gives_one_pair_a_member():
    rows = [{"key": 1, "order": order(7 * doc)} for doc in range(1, 5001)]
    pairs = [row for batch in pairs_of_buckets(iter(cut(rows, KEYS, 700)), 21) for row in batch.to_pylist()]
    assert len(pairs) == 4999 + 1
    assert {row["leader"] for row in pairs} == {PAYLOAD_REQUEST, node(7)}


VALUES = np.arange(10, dtype="<u4")


def signed(shift: int) -> bytes:
    """Return a signature that differs from VALUES in its last `shift` values."""
    values = VALUES.copy()
    values[10 - shift :] += 100 if shift else 0
    return values.tobytes()


def met() -> list[dict]:
    """Documents 1 to 4 and the pairs (2, 1), (3, 1), (4, 1) under two keys, (4, 3); sorted by node and leader."""
    rows = [
        {"node": node(doc), "leader": b"", "payload": signed(shift)} for doc, shift in ((1, 0), (2, 3), (3, 4), (4, 4))
    ]
    rows += [{"node": node(doc), "leader": PAYLOAD_REQUEST} for doc in (1, 1, 3)]
    pairs = [(2, 1, 11), (3, 1, 12), (4, 1, 13), (4, 1, 14), (4, 3, 15)]
    rows += [{"node": node(a), "leader": node(b), "key": key, "order": order(a)} for a, b, key in pairs]
    filled = [{"key": 0, "order": b"", "payload": b"", **row} for row in rows]
    return sorted(filled, key=lambda row: (row["node"], row["leader"], row["key"]))


def outcomes(size: int, config: DedupConfig) -> dict[str, list[dict]]:
    carried = [row for batch in attach_payloads(iter(cut(met(), WITH_PAYLOADS, size))) for row in batch.to_pylist()]
    carried.sort(key=lambda row: (row["leader"], row["node"]))
    schema = pa.schema([pa.field(name, pa.binary()) for name in ("leader", "node", "payload", "keys", "order")])
    compare = make_comparison(config, SignatureConfig(permutations=10))
    by_kind: dict[str, list[dict]] = {kind: [] for kind in OUTCOMES}
    for kind, batch in compare_pairs(iter(cut(carried, schema, size)), compare):
        by_kind[kind] += batch.to_pylist()
    return by_kind


@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_pairs_meet_their_signatures_and_those_at_the_limit_are_joined(size):
    rows = outcomes(size, DedupConfig(exact="off", min_similarity=0.7))
    joined = {(number(row["node"]), number(row["other"]), round(row["similarity"], 6)) for row in rows[JOINED]}
    assert joined == {(2, 1, 0.7), (4, 3, 1.0)}
    assert {(number(row["node"]), number(row["other"])) for row in rows[BEST]} == {(1, 2), (3, 4)}
    again = sorted((row["key"], number(row["order"])) for row in rows[FAILED])
    assert again == [(12, 3), (13, 4), (14, 4)]


def test_a_document_without_a_signature_is_an_error_and_not_a_loss():
    rows = [row for row in met() if row["leader"] or row["node"] != node(2)]
    with pytest.raises(ContractError, match="expected a signature for every document of a bucket"):
        list(attach_payloads(iter(cut(rows, WITH_PAYLOADS, 4))))


def payloads(*values: bytes) -> pa.Array:
    return pa.array(values, pa.binary())


def test_equal_digests_join_regardless_of_the_signatures():
    compare = make_comparison(DedupConfig(min_similarity=0.9), SignatureConfig(permutations=10))
    same, other = b"d" * 16, b"e" * 16
    similarities = compare(payloads(same + signed(0), same + signed(0)), payloads(same + signed(9), other + signed(9)))
    assert similarities[0] == 1
    assert np.isnan(similarities[1])
    only = make_comparison(DedupConfig(near=False), SignatureConfig())
    assert np.isnan(only(payloads(same), payloads(other))).all()
    assert only(payloads(same), payloads(same)).tolist() == [1.0]


def test_simhashes_join_up_to_the_distance():
    compare = make_comparison(DedupConfig(exact="off"), SignatureConfig(family="simhash"))
    base = np.uint64(0xF0F0)
    near, far = (np.uint64(base ^ np.uint64(bits)).tobytes() for bits in (0b111, 0b1111))
    similarities = compare(payloads(base.tobytes(), base.tobytes()), payloads(near, far))
    assert similarities[0] == np.float32(1 - 3 / 64)
    assert np.isnan(similarities[1])


def test_true_jaccard_decides_with_verify_jaccard():
    config = DedupConfig(verify="jaccard", exact="off", min_similarity=0.5)
    compare = make_comparison(config, SignatureConfig())
    sets = [np.array(values, "<u8").tobytes() for values in ([1, 2, 3], [2, 3, 4], [3, 4, 5])]
    similarities = compare(payloads(sets[0], sets[0]), payloads(sets[1], sets[2]))
    assert similarities[0] == np.float32(0.5)
    assert np.isnan(similarities[1])


def test_windows_have_the_same_rows_however_the_batches_are_cut(monkeypatch):
    monkeypatch.setattr("pipeline.dedup.keys.WINDOW", 4)
    schema = pa.schema([("x", pa.int64())])
    for size in (1, 3, 4, 9, 11):
        rows = [{"x": value} for value in range(11)]
        windows = [batch.column(0).to_pylist() for batch in iterate_windows(iter(cut(rows, schema, size)))]
        assert windows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_equal_documents_know_the_first_in_keep_order_and_the_smallest_id():
    identity = np.array([[5, 5], [9, 9], [5, 5], [5, 6], [5, 5]], np.uint64)
    rows = np.array(
        [list(bytes([rank]) + node(doc)) for rank, doc in ((2, 1), (0, 2), (1, 3), (0, 4), (3, 0))], np.uint8
    )
    leads, smallest = equal_documents(identity, rows)
    assert leads.tolist() == [2, 1, 2, 3, 2]
    assert smallest.tolist() == [4, 1, 4, 3, 4]
    assert np.lexsort(sort_words(rows)).tolist() == [1, 3, 2, 0, 4]


def test_bands_must_fit_the_signature():
    assert layout(DedupConfig(bands=20, rows=5), SignatureConfig()) == (20, 5)
    with pytest.raises(ConfigError, match=r"at most signature\.permutations = 112 values, got 20 x 6 = 120\. Lower"):
        layout(DedupConfig(bands=20, rows=6), SignatureConfig())
    with pytest.raises(ConfigError, match=r"dedup\.blocks: expected no value with signature\.family = 'fast'"):
        check_method(DedupConfig(blocks=7), SignatureConfig())
    with pytest.raises(ConfigError, match=r"dedup\.bands, dedup\.rows: .* = 'simhash', which ignores it, got one"):
        check_method(DedupConfig(bands=7, rows=2), SignatureConfig(family="simhash"))
    assert num_keys(DedupConfig(), SignatureConfig()) == 15
    assert num_keys(DedupConfig(exact="off"), SignatureConfig(family="simhash")) == 20
    assert num_keys(DedupConfig(near=False), SignatureConfig()) == 1


def facts(**columns) -> DedupFacts:
    """Return three documents of one cluster: a verdict drops 1; 2 and 3 share a URL, and 2 is the longer text."""
    values = {
        "ids": [bytes(15) + bytes([number]) for number in (1, 2, 3)],
        "dropped": [True, False, False],
        "clusters": [b"k" * 16] * 3,
        "similarities": [1.0, 1.0, 0.75],
        "digest": 0,
        "urls": [None, b"u", b"u"],
        "url_orders": [b"", b"9", b"1"],
        "chars": [10, 20, 30],
    } | columns
    orders = [bytes([rank]) + identifier + bytes(4) for rank, identifier in zip((0, 1, 2), values["ids"])]
    return DedupFacts(orders=orders, **values)


def totals_of(facts: DedupFacts, known: dict) -> dict:
    """Return the totals that a run of a single part computes."""
    urls, clusters = {}, {}
    url_tallies(facts, urls)
    totals = known | {b"u" + key: value for key, value in urls.items() if value[0] > 1}
    cluster_tallies(facts, totals, clusters, alone=False)
    return totals | {b"c" + key: value for key, value in clusters.items()}


def test_documents_of_one_url_come_first_then_copies_of_one_text():
    documents = facts()
    known = totals_of(documents, {})
    assert early_drop_reasons(documents, known) == ["dropped_before", "same_url", None]
    rows = [
        (found.row["survivor"][-1], found.row["cluster_size"], found.reason, found.chars)
        for found in decide(documents, known)
    ]
    assert rows == [(3, 3, "dropped_before", 10), (3, 3, "same_url", 20), (3, 3, None, 30)]


def test_the_first_in_keep_order_that_no_verdict_dropped_survives():
    documents = facts(urls=[None] * 3)
    reasons = [found.reason for found in decide(documents, totals_of(documents, {}))]
    assert reasons == ["dropped_before", None, "near_duplicate"]
    assert [found.part for found in decide(documents, totals_of(documents, {}))] == [None, None, 0]
    equal = facts(urls=[None] * 3, digest=2)
    assert [found.reason for found in decide(equal, totals_of(equal, {}))][2] == "exact_duplicate"
    dropped = facts(urls=[None] * 3, dropped=[True] * 3)
    assert {found.row["survivor"] for found in decide(dropped, totals_of(dropped, {}))} == {None}


def test_a_document_alone_is_its_own_survivor():
    documents = facts(urls=[None] * 3, similarities=[None] * 3, clusters=[b"1" * 16, b"2" * 16, b"3" * 16])
    rows = [
        (found.row["survivor"] == found.row["doc_id"], found.row["cluster_size"], found.reason)
        for found in decide(documents, {})
    ]
    assert rows == [(False, 1, "dropped_before"), (True, 1, None), (True, 1, None)]


def test_an_earlier_url_or_copy_always_wins():
    documents = facts()
    known = {b"uu": (2, b"")}
    assert early_drop_reasons(documents, known) == ["dropped_before", "same_url", "same_url"]
    earlier = (4, b"\0" + b"\0" * 21)
    assert [found.reason for found in decide(facts(urls=[None] * 3), {b"c" + b"k" * 16: earlier})] == [
        "dropped_before",
        "near_duplicate",
        "near_duplicate",
    ]


def test_every_verdict_is_counted_and_weights_follow_the_size():
    config = DedupConfig(rehydration={1: 1, 2: 2, 3: 3, 5: 5, 100: 8, 1000: 1})
    assert {weight_of(size, DedupConfig()) for size in (1, 2, 100, 10**9)} == {1}
    assert [weight_of(size, config) for size in (1, 2, 3, 4, 5, 99, 100, 999, 1000, 10**9)] == [
        1,
        2,
        3,
        3,
        5,
        5,
        8,
        8,
        1,
        1,
    ]
    books = DropCounter([(DEDUP.name, DEDUP.reasons)], raises=False)
    rows = []
    for reason in (None, *DEDUP.reasons):
        rows.append({"cluster_size": 3, "similarity": 0.9})
        write_verdict(Decision(rows[-1], reason, 5, None, 0.9, 0, 3), config, books)
    assert [row["weight"] for row in rows] == [3, None, None, None, None]
    assert [row.get("drop_value") for row in rows] == [None, None, None, 0.9, 0.9]
    assert books.dropped == {f"dedup/{reason}": 1 for reason in DEDUP.reasons}
    assert books.figures["cluster_sizes"] == {"3": 1}
