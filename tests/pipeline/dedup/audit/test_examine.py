"""Tests of the audit: intervals, pairs and weights by hand, and estimates that cover the truth of a simulated run."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.dedup.audit import step as examining
from pipeline.dedup.audit.estimate import (
    all_pairs,
    bin_edges,
    effective_groups,
    estimates,
    grouped_share,
    jaccard_of,
    jaccards,
    read_sample,
    share_a_key,
    simple_share,
    theory,
    wilson,
)
from pipeline.dedup.audit.sample import (
    ANCHORED,
    JOINED,
    PROPOSALS,
    REMOVED,
    SAMPLED,
    UNIFORM,
    AuditSamples,
    choose,
    document_keys,
    hash_limit,
    hash_values,
)
from pipeline.dedup.audit.step import ExamineTask, examine
from pipeline.dedup.config import AuditConfig, DedupConfig
from pipeline.minhash.fast import sketch
from pipeline.minhash.permutations import mix_bits
from pipeline.minhash.stage import SignatureConfig, band_keys
from schemas.storage import Store
from schemas.tables import AUDIT

SIGNATURE = SignatureConfig()
NOBODY = AuditSamples(
    joined=[],
    removed=[],
    uniform=[],
    anchored=[],
    every_joined=False,
    every_removed=False,
    every_document=False,
    capped=[],
)

# --------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),
        (0.9, 100, 0.8256, 0.9448),
        (1.0, 10, 10 / (10 + 3.8414588), 1.0),
        (0.0, 10, 0.0, 3.8414588 / (10 + 3.8414588)),
        (1.0, 1, 0.2065, 1.0),
    ],
)
def test_wilson(share: float, count: int, low: float, high: float) -> None:
    assert wilson(share, count) == pytest.approx((low, high), abs=5e-5)


def test_a_share_has_its_number_of_pairs() -> None:
    assert simple_share(0, 0).to_json() == {"value": None, "low": None, "high": None, "pairs": 0}
    assert simple_share(9, 10).to_json() == {"value": 0.9, "low": 0.59585, "high": 0.982124, "pairs": 10}
    assert simple_share(9, 10, is_all=True).to_json() == {"value": 0.9, "low": 0.9, "high": 0.9, "pairs": 10}
    assert grouped_share(np.zeros(3), np.zeros(3), 0).value is None


def test_effective_groups_follow_the_variance_between_them() -> None:
    # Four groups of equal weight, two of them hits: leaving one out gives 1/3 or 2/3, so v = 3/4 x 4 x (1/6)^2 = 1/12
    # and n = 1/4 / (1/12) = 3.
    assert effective_groups(np.array([1.0, 1, 0, 0]), np.ones(4)) == pytest.approx(3)
    # A hundred pairs in two groups, one of them all hits: worth one observation, not a hundred.
    assert effective_groups(np.array([50.0, 0]), np.array([50.0, 50])) == pytest.approx(1)
    # Where nothing differs, a group is one observation, however many pairs it has; empty groups are none.
    assert effective_groups(np.array([40.0, 3, 0]), np.array([40.0, 3, 0])) == 2
    assert effective_groups(np.array([5.0]), np.array([9.0])) == 1
    # 1,000 groups of one pair with 900 hits are worth 999, by the variance of a sample.
    effective = effective_groups(np.repeat([1.0, 0.0], [900, 100]), np.ones(1000))
    assert effective == pytest.approx(999, rel=1e-6)
    share = grouped_share(np.repeat([1.0, 0.0], [900, 100]), np.ones(1000), 1000)
    assert (share.low, share.high) == pytest.approx(wilson(0.9, 999), abs=1e-6)


def test_the_theoretical_curve() -> None:
    # 0.7^8 = 0.05764801, (1 - 0.05764801)^14 = 0.43550
    assert theory(np.array([0.0, 0.7, 1.0]), 14, 8) == pytest.approx([0, 0.56450, 1], abs=1e-5)


@pytest.mark.parametrize(
    ("least", "edges"),
    [
        (0.7, [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0]),
        (0.92, [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 1.0]),
    ],
)
def test_the_least_similarity_of_a_copy_is_a_bin_edge(least: float, edges: list[float]) -> None:
    assert bin_edges(least) == edges
    assert bin_edges(0.1) == bin_edges(0.7)


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"documents": 0, "group": 9}, r"documents: expected more than 0 with group, got 0, .*remove audit\.group\."),
        ({"documents": 100, "group": 101}, r"group: expected at most documents = 100, got 101\. Set audit\.group"),
        ({"documents": 99}, r"documents: expected 0 \(no audit\) or at least 100, got 99\."),
        ({"documents": 20_001}, "less than or equal to 20000"),
        ({"min_jaccard": 0}, "greater than 0"),
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        AuditConfig(**values)


# ----------------------------------------------------------------------------------------------------------- samples


def doc(number: int) -> bytes:
    """Return the doc_id of a document of these tests; doc_ids sort like the numbers."""
    return number.to_bytes(8, "big") + hashlib.sha256(str(number).encode()).digest()[:8]


def test_keys_depend_on_the_document_its_seed_and_its_purpose_alone() -> None:
    ids = [hashlib.sha256(str(n).encode()).digest()[:16] for n in range(2000)]
    array = pa.array(ids, pa.binary(16))
    keys = document_keys(array, 0, JOINED)
    assert document_keys(array.slice(700, 5), 0, JOINED).tolist() == keys[700:705].tolist()
    assert keys.min() >= 0
    for other in (document_keys(array, 1, JOINED), document_keys(array, 0, UNIFORM)):
        low = (keys < hash_limit(0.5)) & (other < hash_limit(0.5))
        assert 430 < low.sum() < 570  # a quarter of 2,000, six standard deviations of 19 to either side
    assert (hash_limit(0), hash_limit(1), hash_limit(7)) == (0, 2**63 - 1, 2**63 - 1)


def proposal(sample: str, key: int, number: int, **more: Any) -> dict[str, Any]:
    return {"sample": sample, "key": key, "doc": doc(number), **more}


def test_the_lowest_keys_are_chosen_and_whole_groups() -> None:
    size = 100
    rows = [proposal(UNIFORM, 1000 - n, n) for n in range(size + 5)]
    rows += [proposal(JOINED, n, n, other=doc(n + 1)) for n in (3, 1, 2)]
    rows += [proposal(REMOVED, n, n, other=doc(300)) for n in range(200 + size, 199, -1)]
    # anchors by rank: one group of 500 documents of which the 40 first are known, one of 30, one of 31, one of 2
    for rank, (count, known) in enumerate([(500, 40), (30, 30), (31, 20), (2, 2)]):
        rows += [
            proposal(ANCHORED, n, 1000 * rank + n, rank=rank, group=bytes([rank]) * 16, count=count)
            for n in range(known)
        ]
    config = AuditConfig(documents=size, group=40)
    chosen = choose(pa.Table.from_pylist(rows[::-1], PROPOSALS), config, 10_000, 3, 101)
    assert chosen.uniform == [doc(n) for n in range(104, 4, -1)]
    assert chosen.joined == [(doc(n), doc(n + 1)) for n in (1, 2, 3)]
    assert chosen.removed == [(doc(n), doc(300)) for n in range(200, 300)]
    assert [len(group) for group in chosen.anchored] == [40, 30]  # 40 + 30 + 31 > 100; the 2 after it must wait as well
    assert (chosen.capped, chosen.every_joined, chosen.every_document) == ([500], True, False)
    assert not chosen.every_removed
    pairs = map(doc, [*range(1, 5), *range(200, 301)])
    assert chosen.wanted() == sorted({*chosen.uniform, *pairs, *(d for g in chosen.anchored for d in g)})
    assert choose(pa.Table.from_pylist(rows, PROPOSALS), config, 100, 101, 100).every_document
    other = choose(pa.Table.from_pylist(rows, PROPOSALS), config, 100, 101, 100)
    assert (other.every_joined, other.every_removed) == (False, True)


# ------------------------------------------------------------------------------------------------------ pairs by hand


def sampled(
    number: int,
    shingles: Iterable[int] | None,
    cluster: int = 0,
    scope: int = 0,
    keys: Sequence[int] | None = None,
    many: int | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """Return a row of a sampled document; its keys are its own number unless given. Its text has no numbers."""
    numbers = None if shingles is None else np.array(sorted(shingles), "<u8")
    signed = sketch(mix_bits(numbers), SIGNATURE) if numbers is not None and len(numbers) else np.zeros(112, np.uint32)
    return {
        "doc": doc(number),
        "scope": scope,
        "cluster": doc(cluster or number),
        "digest": hashlib.md5(b"" if numbers is None else numbers.tobytes()).digest(),
        "signature": signed.astype("<u4").tobytes(),
        "keys": np.array([number] if keys is None else keys, "<i8").tobytes(),
        "num_shingles": many if numbers is None else len(numbers),
        "shingles": None if numbers is None else numbers.tobytes(),
        "with_numbers": None if numbers is None else numbers.tobytes(),
        **{"source": "web", "order": doc(number), **columns},
    }


A, B, D = range(1, 11), [*range(1, 9), 11, 12], [*range(1, 10), 20]
ROWS = [
    sampled(1, A, cluster=1, keys=[7]),
    sampled(2, B, keys=[8]),
    sampled(3, A, cluster=1, keys=[7]),
    sampled(4, D, cluster=1, keys=[8]),
    sampled(5, A, scope=1, keys=[7]),
    sampled(6, [100, 101], keys=[9]),
    sampled(7, [], keys=[10]),
    sampled(8, [], keys=[11]),
]
"""1 and 3 are equal; 1, 2: 8/12; 1, 4: 9/11; 2, 4: 8/12; 5 is of another scope; 7 and 8 are empty."""


def table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), SAMPLED)


def test_jaccard_similarities_by_hand() -> None:
    sample = read_sample(table(ROWS[::-1]), SIGNATURE)
    assert sample.docs == [doc(n) for n in range(1, 9)]
    every = np.arange(8)
    similarities = jaccards(sample, every, every)
    assert similarities[0].tolist() == [1, 8 / 12, 1, 9 / 11, 1, 0, 0, 0]
    assert similarities[1].tolist() == [8 / 12, 1, 8 / 12, 8 / 12, 8 / 12, 0, 0, 0]
    assert similarities[6].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert np.array_equal(similarities, similarities.T)
    assert jaccard_of(sample, every, every[::-1]).tolist() == similarities[every, every[::-1]].tolist()
    assert share_a_key(sample, np.array([0, 0, 1]), np.array([2, 1, 3])).tolist() == [True, False, True]
    # equal sets have equal signatures; those of 9/11 agree in about that share of 112 values (standard error 0.036)
    equal, near = estimates(sample, np.array([0, 0]), np.array([2, 3]), False)
    assert equal == 1
    assert near == pytest.approx(9 / 11, abs=0.15)


def test_all_pairs_keep_to_a_scope_and_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = read_sample(table(ROWS), SIGNATURE)
    (pairs,) = all_pairs(sample, np.arange(8))
    together = list(zip(pairs.a.tolist(), pairs.b.tolist(), pairs.jaccard.tolist()))
    assert together == [
        (0, 1, 8 / 12),
        (0, 2, 1),
        (0, 3, 9 / 11),
        (1, 2, 8 / 12),
        (1, 3, 8 / 12),
        (2, 3, 9 / 11),
        (6, 7, 1),
    ]
    monkeypatch.setattr("pipeline.dedup.audit.estimate.BLOCK_CELLS", 8)
    blocks = list(all_pairs(sample, np.arange(8)))
    assert len(blocks) == 8
    assert [row for part in blocks for row in zip(part.a.tolist(), part.b.tolist(), part.jaccard.tolist())] == together


def run(
    tmp_path: Path, rows: Sequence[dict[str, Any]], chosen: AuditSamples, several: bool = False, **settings: Any
) -> Any:
    """Return the answer of `examine` for these rows."""
    folder = Store(str(tmp_path / f"audit-{len(list(tmp_path.glob('audit-*')))}"))
    task = ExamineTask(chosen, AuditConfig(**settings), DedupConfig(), SIGNATURE, folder, several)
    return examine(task, iter(table(rows).to_batches(max_chunksize=3)))


def with_samples(**samples: Any) -> AuditSamples:
    return AuditSamples(**{**vars(NOBODY), **samples})


def test_precision_and_recall_by_source(tmp_path: Path) -> None:
    rows = [
        sampled(1, A, cluster=1, source="news", order=b"2"),
        sampled(2, B, cluster=2, source="web", order=b"1"),
        sampled(3, A, cluster=1, source="news", order=b"3"),
        sampled(4, D, cluster=1, source="web", order=b"4"),
    ]
    joined, removed = [(doc(3), doc(1)), (doc(4), doc(1))], [(doc(3), doc(1)), (doc(4), doc(2))]
    chosen = with_samples(
        joined=joined, removed=removed, uniform=[doc(n) for n in range(1, 5)], every_document=True, every_joined=True
    )
    output = run(tmp_path, rows, chosen, min_jaccard=0.65, several=True)

    def hits(figures: dict[str, Any]) -> dict[str, list[tuple[float | None, int]]]:
        return {
            source: [(kinds[kind]["value"], kinds[kind]["pairs"]) for kind in ("within", "across")]
            for source, kinds in figures["by_source"].items()
        }

    # All pairs are copies. Removed: 1 (of 1-2), 3 (of 1-3 and 2-3), 4 (of 1-4, 2-4 and 3-4); joined: 1-3, 1-4 and 3-4.
    assert hits(output.figures["recall"][UNIFORM]) == {"news": [(1, 1), (0, 2)], "web": [(0, 1), (1, 2)]}
    # 3 with 1; 4 with 1, and with 2, which is kept in its place
    assert hits(output.figures["precision"][JOINED]) == {"news": [(1, 1), (None, 0)], "web": [(None, 0), (1, 1)]}
    assert hits(output.figures["precision"][REMOVED]) == {"news": [(1, 1), (None, 0)], "web": [(1, 1), (None, 0)]}
    written = pq.read_table(next(tmp_path.glob("audit-*")) / output.files["audit"].path)
    assert written.schema.equals(AUDIT)
    listed = {(row["sample"], row["a"], row["b"]): row for row in written.to_pylist()}
    pair = listed[UNIFORM, doc(1), doc(2)]
    assert (pair["a_source"], pair["b_source"], pair["a_first"]) == ("news", "web", False)
    assert "by_source" not in run(tmp_path / "one", rows, chosen).figures["recall"][UNIFORM]


def test_recall_by_hand(tmp_path: Path) -> None:
    chosen = with_samples(uniform=[doc(n) for n in range(1, 9)], anchored=[[doc(n) for n in (1, 2, 4)]])
    figures = run(tmp_path, ROWS, chosen, min_jaccard=0.65).figures
    assert (figures["min_jaccard"], figures["bands_rows"]) == (0.65, [14, 8])
    uniform, anchored = figures["recall"][UNIFORM], figures["recall"][ANCHORED]
    # from 0.65 on all seven pairs; three are in one cluster (1-3, 1-4, 3-4), and two share a key (1-3, 2-4)
    assert (uniform["documents"], uniform["pairs"], uniform["copies"], uniform["is_all"]) == (8, 7, 7, False)
    by_jaccard = {row["jaccard"]: row for row in uniform["by_jaccard"]}
    assert list(by_jaccard) == [0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0]
    assert (by_jaccard[0.65]["pairs"], by_jaccard[0.65]["joined"]["value"]) == (7, 0.428571)
    assert by_jaccard[0.65]["candidates"]["value"] == 0.285714
    # above 2/3 four pairs are left: 1-3, 1-4, 3-4 and the two empty documents
    assert (by_jaccard[0.7]["pairs"], by_jaccard[0.7]["joined"]["value"]) == (4, 0.75)
    assert (by_jaccard[1.0]["pairs"], by_jaccard[1.0]["joined"]["value"]) == (2, 0.5)
    # 1, 2, 3 and 4 hang together, so there are two groups, and the interval is that of two observations
    assert by_jaccard[0.65]["joined"]["low"] == pytest.approx(wilson(3 / 7, 2)[0], abs=1e-6)
    # weights of the anchored pairs: 12/8 for 1-2, 11/9 for 1-4, 12/8 for 2-4; only 1-4 is joined, only 2-4 a candidate
    by_jaccard = {row["jaccard"]: row for row in anchored["by_jaccard"]}
    assert by_jaccard[0.65]["joined"]["value"] == round((11 / 9) / (11 / 9 + 3), 6)
    assert by_jaccard[0.65]["candidates"]["value"] == round(1.5 / (11 / 9 + 3), 6)
    assert (anchored["documents"], anchored["groups"], anchored["pairs"]) == (3, 1, 3)
    bins = {row["lower"]: row for row in anchored["curve"]}
    assert list(bins) == [0.65, 0.8]
    first = bins[0.65]
    assert (first["upper"], first["jaccard"], first["pairs"], first["candidates"]) == (0.7, 0.666667, 2, 1)
    assert (first["joined"], first["share"]["value"]) == (0, 0.5)
    assert first["expected"] == round(float(theory(np.array([2 / 3]), 14, 8)[0]), 6)


def test_precision_by_hand(tmp_path: Path) -> None:
    rows = [*ROWS, sampled(9, None), sampled(10, None, many=10**6)]
    joined = [
        (doc(3), doc(1)),  # equal
        (doc(4), doc(1)),  # 9/11
        (doc(2), doc(4)),  # 8/12
        (doc(1), doc(3)),  # equal
        (doc(6), doc(99)),  # joined with an earlier snapshot
        (doc(5), doc(9)),  # its leader has no text
    ]
    removed = [*((row[0], doc(1)) for row in joined[:3]), (doc(6), doc(98)), (doc(5), doc(10))]  # 10: too much text
    figures = run(tmp_path, rows, with_samples(joined=joined, removed=removed)).figures
    assert figures["not_compared"] == {"without_text": 1, "too_long": 1}
    precision = figures["precision"]
    leader, survivor = precision[JOINED], precision[REMOVED]
    assert (leader["documents"], survivor["documents"]) == (6, 5)
    assert (leader["all"]["value"], leader["all"]["pairs"]) == (0.75, 4)
    assert (leader["near"]["value"], leader["near"]["pairs"]) == (0.5, 2)
    assert leader["jaccard"] == {"0.65": 1, "0.80": 1, "1.00": 2}
    assert (leader["earlier_snapshots"], leader["not_compared"]) == (1, 1)
    assert (survivor["all"]["value"], survivor["all"]["pairs"]) == (0.666667, 3)
    assert (survivor["earlier_snapshots"], survivor["not_compared"]) == (1, 1)
    assert leader["all"]["low"] == pytest.approx(wilson(0.75, 4)[0], abs=1e-6)
    complete = run(tmp_path, rows, with_samples(joined=joined[:4], every_joined=True)).figures["precision"]
    assert complete[JOINED]["all"] == {"value": 0.75, "low": 0.75, "high": 0.75, "pairs": 4}


def test_false_positives_by_hand(tmp_path: Path) -> None:
    other = np.array([*range(1, 10), 30], "<u8").tobytes()  # of 4 with numbers: 8 of 12 with those of 1
    rows = [
        sampled(1, A),
        sampled(2, A),
        sampled(3, B),
        sampled(4, D, with_numbers=np.array([*range(1, 9), 30, 31], "<u8").tobytes()),
        sampled(5, [*range(1, 10)], with_numbers=other),
    ]
    removed = [(doc(n), doc(1)) for n in (2, 3, 4, 5)]
    found = run(tmp_path, rows, with_samples(removed=removed)).figures["precision"][REMOVED]
    # of the three pairs of different texts, 3 has 8/12; 4 has 9/11, or 8/12 with numbers; 5 has 9/10, or 9/11
    assert (found["false_positives"]["value"], found["false_positives"]["pairs"]) == (0.333333, 3)
    assert found["false_positives_with_numbers"]["value"] == 0.666667
    low, high = wilson(1 / 3, 3)
    assert (found["false_positives"]["low"], found["false_positives"]["high"]) == pytest.approx((low, high), abs=1e-6)
    right = run(tmp_path, rows, with_samples(removed=[(doc(4), doc(1))] * 1)).figures["precision"][REMOVED]
    assert right["false_positives"] == {"value": 0.0, "low": 0.0, "high": 0.793451, "pairs": 1}
    every = run(tmp_path, rows, with_samples(removed=removed, every_removed=True)).figures["precision"][REMOVED]
    assert every["false_positives"] == {"value": 0.333333, "low": 0.333333, "high": 0.333333, "pairs": 3}


def test_the_table_has_the_pairs(tmp_path: Path) -> None:
    pairs = [(doc(4), doc(1))]
    chosen = with_samples(joined=pairs, removed=pairs, anchored=[[doc(n) for n in (1, 2, 4)]])
    answer = run(tmp_path, ROWS, chosen)
    rows = pq.read_table(next(tmp_path.glob("audit-*")) / answer.files["audit"].path)
    assert rows.schema.equals(pa.schema(list(AUDIT)[:-3]))  # the last three are those of sources
    assert (answer.counts.rows_in, answer.counts.rows_kept) == (5, 5)
    pairs = rows.to_pylist()
    assert [(row["sample"], row["a"], row["b"]) for row in pairs] == [
        ("joined", doc(1), doc(4)),
        ("removed", doc(1), doc(4)),
        ("anchored", doc(1), doc(2)),
        ("anchored", doc(1), doc(4)),
        ("anchored", doc(2), doc(4)),
    ]
    assert pairs[3]["jaccard"] == pytest.approx(9 / 11)
    assert pairs[3]["weight"] == pytest.approx(11 / 9)
    assert [row["candidate"] for row in pairs] == [False, False, False, False, True]
    assert [row["same_cluster"] for row in pairs] == [True, True, False, True, False]
    assert 0.6 < pairs[3]["estimate"] < 1


def test_a_few_of_many_pairs_are_listed_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "MAX_LISTED", 10)
    rows = [sampled(n, [*range(50), 1000 + n]) for n in range(1, 31)]
    answers = []
    for cells in (1 << 21, 64):
        monkeypatch.setattr("pipeline.dedup.audit.estimate.BLOCK_CELLS", cells)
        answers.append(run(tmp_path / str(cells), rows, with_samples(uniform=[doc(n) for n in range(1, 31)])))
    assert [answer.figures["recall"][UNIFORM]["pairs"] for answer in answers] == [435, 435]
    assert [answer.counts.rows_in for answer in answers] == [10, 10]
    assert answers[0].files["audit"].sha256 == answers[1].files["audit"].sha256
    assert answers[0].figures == answers[1].figures


def test_a_run_without_documents_or_copies_can_be_audited(tmp_path: Path) -> None:
    figures = run(tmp_path, [], NOBODY).figures
    assert figures["recall"][ANCHORED]["curve"] == []
    assert figures["recall"][UNIFORM]["by_jaccard"][0]["joined"]["value"] is None
    assert figures["precision"][JOINED]["all"]["pairs"] == 0
    chosen = with_samples(uniform=[doc(1), doc(2)], every_document=True)
    figures = run(tmp_path, [sampled(1, [1, 2]), sampled(2, [3, 4])], chosen).figures
    assert (figures["recall"][UNIFORM]["pairs"], figures["recall"][UNIFORM]["is_all"]) == (0, True)


# ---------------------------------------------------------------------------------------------------------- simulation


def corpus(seed: int, families: int = 700) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Documents in families of 1 to 6 that share some of their shingles, joined as 4 bands of 6 rows see them; and
    their anchors."""
    random = np.random.default_rng(seed)
    sets: list[np.ndarray] = []
    for _ in range(families):
        original = random.integers(0, 2**63, 120, dtype=np.uint64)
        sets.append(np.unique(original))
        for _ in range(random.integers(0, 6)):
            kept = random.random(120) < random.uniform(0.7, 1.0)
            fresh = random.integers(0, 2**63, int((~kept).sum()), dtype=np.uint64)
            sets.append(np.unique(np.concatenate([original[kept], fresh])))
    signatures = np.stack([sketch(mix_bits(numbers), SIGNATURE) for numbers in sets])
    keys = band_keys(signatures[:, :24], 4, 6).view(np.int64)
    clusters = np.arange(len(sets))
    for column in keys.T:  # what joins is a shared band; documents are few, so passes are enough
        for _ in range(8):
            _, bucket = np.unique(column, return_inverse=True)
            smallest = np.full(bucket.max() + 1, len(sets))
            np.minimum.at(smallest, bucket, clusters)
            clusters = smallest[bucket]
    anchors = np.array([mix_bits(numbers ^ np.uint64(seed + 977)).min() for numbers in sets], np.uint64)
    rows = [
        sampled(number + 1, numbers, cluster=int(cluster) + 1, keys=own)
        for number, (numbers, cluster, own) in enumerate(zip(sets, clusters, keys.tolist()))
    ]
    return rows, anchors


def groups_of(rows: Sequence[dict[str, Any]], anchors: np.ndarray, seed: int, share: float) -> list[list[bytes]]:
    """The documents of the anchors whose hash is low, where there are two of them at least."""
    found: dict[int, list[bytes]] = {}
    for row, anchor, rank in zip(rows, anchors.tolist(), hash_values(anchors, seed, "anchor").tolist()):
        if rank < hash_limit(share):
            found.setdefault(anchor, []).append(row["doc"])
    return [members for _, members in sorted(found.items()) if len(members) > 1]


def test_the_estimate_covers_the_recall_of_a_simulated_run(tmp_path: Path) -> None:
    rows, anchors = corpus(5)
    task = ExamineTask(
        with_samples(uniform=[row["doc"] for row in rows], every_document=True),
        AuditConfig(),
        DedupConfig(bands=4, rows=6),
        SIGNATURE,
        Store(str(tmp_path)),
    )
    truth = examine(task, iter(table(rows).to_batches())).figures["recall"][UNIFORM]
    exact = {row["jaccard"]: row for row in truth["by_jaccard"]}
    assert exact[0.7]["pairs"] > 1000
    assert 0.5 < exact[0.7]["joined"]["value"] < 0.95  # some copies are missed, so that recall is worth estimating
    assert exact[0.7]["joined"]["low"] == exact[0.7]["joined"]["high"]
    covered = tried = 0
    errors = []
    for seed in range(40):
        chosen = with_samples(anchored=groups_of(rows, anchors, seed, 0.3))
        again = ExamineTask(chosen, task.audit, task.dedup, SIGNATURE, Store(str(tmp_path / f"{seed}")))
        found = examine(again, iter(table(rows).to_batches())).figures["recall"][ANCHORED]
        for row in found["by_jaccard"]:
            if row["jaccard"] in (0.6, 0.7, 0.8):
                value = exact[row["jaccard"]]["joined"]["value"]
                covered += row["joined"]["low"] <= value <= row["joined"]["high"]
                tried += 1
                errors.append(row["joined"]["value"] - value)
    assert tried == 120
    assert covered >= 108  # 95 % are expected; draws of one corpus overlap, so some room is left
    assert abs(np.mean(errors)) < 0.02  # the estimate has no bias
    # the measured curve is the theoretical one
    for point in truth["curve"]:
        if point["pairs"] >= 300:
            assert point["share"]["value"] == pytest.approx(point["expected"], abs=0.08)
