"""Tests of the corpora with known copies: the law of family sizes, exact similarities, the same bytes every time."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dedup_corpus import (
    OPERATIONS,
    Law,
    Stock,
    documents_of,
    made_up_texts,
    paragraphs_of,
    places_of,
    sizes_of,
    stock_of,
    write_split,
)
from tests.support.dedup_oracle import all_pairs, clusters_of, shingles_of


@pytest.fixture(scope="module")
def stock() -> Stock:
    return stock_of(made_up_texts(400_000, 5000), "made-up words")


def test_sizes_follow_the_law() -> None:
    law = Law(200_000, duplicated=0.4, exponent=2.2, largest=1000)
    sizes = sizes_of(law)
    assert sizes.sum() == law.documents
    copies = sizes[sizes > 1]
    assert copies.sum() == pytest.approx(0.4 * law.documents, rel=0.01)
    assert (np.diff(sizes) <= 0).all()
    counts = Counter(copies.tolist())
    for k in (3, 4, 6, 8):
        assert counts[k] / counts[2] == pytest.approx((k / 2) ** -2.2, abs=0.01)
    assert 500 < copies[0] <= 1000


def test_half_of_all_documents_are_one_text() -> None:
    law = Law(1000, skew=0.5)
    sizes = sizes_of(law)
    assert sizes[0] == 500
    assert sizes.sum() == 1000
    assert sizes[1:][sizes[1:] > 1].sum() == pytest.approx(0.4 * 500, abs=60)
    families, members = places_of(law)
    assert Counter(families.tolist())[0] == 500
    assert sorted(members[families == 0].tolist()) == list(range(500))
    assert sizes_of(Law(0)).tolist() == []


def test_documents_do_not_depend_on_the_order_of_splits(stock: Stock) -> None:
    law = Law(30_000)
    assert law.splits == 3
    one, other = (list(zip(documents_of(stock, law, split), range(5))) for split in (2, 2))
    assert one == other
    assert one[0][0].number == 20_000
    assert one[0][0].text != next(documents_of(stock, Law(30_000, seed=2), 2)).text


def test_similarities_are_exact_and_families_stay_apart(stock: Stock) -> None:
    copies = list(documents_of(stock, Law(1500, largest=30), 0))
    pairs = all_pairs([shingles_of(copy.text) for copy in copies], least=0.2)
    families = np.array([copy.family for copy in copies])
    assert (families[pairs.a] == families[pairs.b]).all()
    found = {(copies[a].number, copies[b].number): s for a, b, s in zip(pairs.a, pairs.b, pairs.similarity)}
    bases = {copy.family: copy for copy in copies if copy.operation == "base"}
    checked = Counter()
    for copy in copies:
        base = bases[copy.family]
        if copy.operation != "base" and copy.similarity >= 0.2:
            assert found[min(copy.number, base.number), max(copy.number, base.number)] == pytest.approx(copy.similarity)
            checked[copy.operation] += 1
    assert set(checked) == set(OPERATIONS)
    labels = clusters_of(len(copies), pairs.a, pairs.b)
    assert len(set(labels.tolist())) == pytest.approx(len(bases), abs=3)  # a substitution may leave less than 0.2


def test_pieces_are_words() -> None:
    text = " ".join(["One,", "well-known", "--", "(two)", *["x"] * 50, "end.", "more"])
    (found,) = paragraphs_of(text)
    assert found[:5] == [("One,", "one"), ("well", "well"), ("known", "known"), ("(two)", "two"), ("x", "x")]
    assert found[-1] == ("end.\n", "end")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def test_files_hold_what_was_asked(stock: Stock, tmp_path: Path) -> None:
    law = Law(40, largest=5)
    assert write_split(stock, law, 0, tmp_path) == 40
    rows, truth = (lines_of(tmp_path / f"{name}-00000.jsonl.gz") for name in ("corpus", "truth"))
    assert [row["url"] for row in rows] == [fact["url"] for fact in truth]
    assert Counter(Counter(fact["family"] for fact in truth).values()) == Counter(sizes_of(law).tolist())
    assert all(150 < len(row["text"].split()) < 1200 for row in rows)


def test_exact_pairs_by_hand() -> None:
    texts = ["a b c d e f", "A, b c d e f!", "a b c d e g", "a b", "", "  ", "x y z"]
    pairs = all_pairs([shingles_of(text) for text in texts], least=0.3)
    # abcde bcdef | abcde bcdef | abcde bcdeg: one of three shared
    assert list(zip(pairs.a, pairs.b, pairs.similarity)) == [(0, 1, 1.0), (0, 2, 1 / 3), (1, 2, 1 / 3)]
    assert shingles_of("東京 は 晴 れ", "char") == {"東京は晴れ"}
    assert len(pairs.least(1 / 3)) == 3
    assert len(pairs.least(0.34)) == 1
    assert clusters_of(4, np.array([0]), np.array([2])).tolist() == [0, 1, 0, 2]
