"""Known answers as tests: newswire and altered texts by the functions alone, a corpus of known families by a run."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.storage import Store
from tests.support.dedup_corpus import Copy, Law, documents_of, made_up_texts, stock_of
from tests.support.dedup_oracle import Pairs, expected_recall
from tests.support.dedup_reference import KEPT, KnownSet, Ours, Truth, middle, mutations, records, reuters, theory
from tests.support.dedup_tables import Text, columns_of, recipe_of, write_documents

DOCUMENTS = 1500
BANDS = (14, 8)


@pytest.mark.slow
def test_reuters_pairs_are_those_of_the_data(shared_data: Path) -> None:
    known = KnownSet("reuters", reuters())
    given = {
        tuple(sorted((known.places[entry["a"]], known.places[entry["b"]]))): entry["jaccard5w"]
        for entry in records(shared_data / "dedup" / "reuters_pairs.jsonl.gz")
    }
    assert len(given) == 459
    assert known.truth.similarities == pytest.approx(given, abs=1e-3)
    found = Ours()(known, 0.7)
    # by shingles as ours are made; a pair counts once, so five in a hundred of 318 are four standard errors
    own = known.normal.pairs.least(0.7)
    assert known.normal.recall(found, 0.7) == pytest.approx(theory(own, 0.7), abs=0.05)
    assert known.normal.precision(found, 0.7) > 0.95
    # by plain words, with numbers as 0 and with numbers that keep their digits
    assert 0.5 < known.truth.precision(found, 0.7) < 0.65
    assert known.truth.precision(Ours(KEPT)(known, 0.7), 0.7) > 0.98


@pytest.mark.slow
def test_altered_texts_are_found_as_theory_says(shared_data: Path) -> None:
    known, ours = KnownSet("mutations", mutations()), Ours()
    assert len(known.documents) == 3172
    for threshold in (0.5, 0.8):
        found = ours(known, threshold)
        expected = theory(known.normal.pairs.least(threshold), threshold)
        assert known.normal.recall(found, threshold) == pytest.approx(expected, abs=0.03)
        assert known.normal.precision(found, threshold) > 0.9


def test_expected_recall() -> None:
    assert expected_recall(np.array([1.0, 1.0]), 0.7, BANDS, 112) == 1
    assert expected_recall(np.array([0.1]), 0.0, BANDS, 112) == 0
    # every pair reaches an estimate of 0, so only the bands decide: 1 - (1 - 0.7^8)^14
    assert expected_recall(np.array([0.7]), 0.0, BANDS, 112) == pytest.approx(1 - (1 - 0.7**8) ** 14, abs=0.03)
    assert np.isnan(expected_recall(np.array([]), 0.7, BANDS, 112))
    assert middle(14, 8) == pytest.approx(0.6847, abs=1e-4)


def test_recall_and_precision_by_hand() -> None:
    truth = Truth(Pairs(np.array([0, 0]), np.array([1, 2]), np.array([0.9, 0.6])))
    found = Pairs(np.array([1, 1]), np.array([0, 2]), np.array([1.0, 1.0]))
    assert (truth.recall(found, 0.7), truth.recall(found, 0.5)) == (1, 0.5)
    assert (truth.precision(found, 0.7), truth.precision(found, 0.95)) == (0.5, 0)
    assert np.isnan(truth.recall(found, 0.95))


@pytest.fixture(scope="module")
def corpus() -> list[Copy]:
    stock = stock_of(made_up_texts(300_000, 5000), "made-up words")
    return list(documents_of(stock, Law(DOCUMENTS, largest=40), 0))


@pytest.mark.spark
def test_a_run_finds_the_families_of_a_corpus(spark, corpus: list[Copy], tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, 3, {})
    write_documents(tmp_path, recipe, lambda split: [Text(str(copy.number), copy.text) for copy in corpus[split::3]])
    run_steps(spark, prepare(recipe, "clusters"), Store(str(tmp_path)), None)
    table = columns_of(tmp_path, "clusters", ["doc_id", "cluster"])
    clusters = dict(zip(range(DOCUMENTS), table.column("cluster").to_pylist()))
    in_order = [copy for split in range(3) for copy in corpus[split::3]]
    cluster_of = {copy.number: clusters[place] for place, copy in enumerate(in_order)}
    family_of: dict[bytes, set[int]] = {}
    for copy in corpus:
        family_of.setdefault(cluster_of[copy.number], set()).add(copy.family)
    assert max(map(len, family_of.values())) == 1
    bases = {copy.family: cluster_of[copy.number] for copy in corpus if copy.operation == "base"}
    for low, high, lost in ((0.95, 1.01, 0.0), (0.8, 0.95, 0.05), (0.7, 0.8, 0.2)):
        chosen = [c for c in corpus if c.operation != "base" and low <= c.similarity < high]
        together = np.mean([cluster_of[copy.number] == bases[copy.family] for copy in chosen])
        similarities = np.array([copy.similarity for copy in chosen])
        # a copy is compared with the document that leads its bucket, which need not be the base
        assert len(chosen) > 30
        assert together >= expected_recall(similarities, 0.7, BANDS, 112) - lost - 1e-9
