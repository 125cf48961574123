"""Copies of sources that count numbers in shingles in different ways, and indexes of earlier snapshots of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.dedup.index import incompatibilities_of, numbers_of
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.config import Recipe
from schemas.storage import Store
from tests.support.dedup_tables import Text, columns_of, recipe_of, table_of, write_documents

SOURCES = ("news", "web")
KEPT = {"signature": {"numbers": "kept"}}


def report(seed: int, figures: int | None, words: int = 60) -> str:
    """A text of made-up words in which every fifth is a number; None: without numbers."""
    draw = np.random.default_rng(seed)
    found = ["".join(draw.choice(list("abcdefghij"), 6)) for _ in range(words)]
    numbers = np.random.default_rng(figures).integers(10, 999, words // 5) if figures is not None else []
    for place, number in enumerate(numbers):
        found[5 * place] = str(number)
    return " ".join(found)


TEXTS = {
    "news": {"a": report(1, 1), "b": report(1, 2), "story": report(2, None), "same": report(3, 3) + "."},
    "web": {"a": report(4, 4), "b": report(4, 5), "story": report(2, None) + " end", "same": report(3, 3) + "!"},
}


def recipe(folder: Path, own: dict[str, Any], **settings: dict[str, Any]) -> Recipe:
    inputs = folder / "inputs"
    tables = [
        {"name": name, "paths": [f"{inputs}/corpus-{place:05d}.jsonl"], **own.get(name, {})}
        for place, name in enumerate(SOURCES)
    ]
    return recipe_of(folder, len(SOURCES), {"source": tables, **settings})


def build(spark: Any, folder: Path, settings: Recipe, until: str) -> dict[bytes, str]:
    """Build the tables of a run up to a step; return the name of every document by doc_id."""
    rows = [[Text(f"https://{source}.org/{name}", text) for name, text in TEXTS[source].items()] for source in SOURCES]
    write_documents(folder, settings, lambda split: rows[split])
    run_steps(spark, prepare(settings, until), Store(str(folder)), None)
    names = [f"{source}/{name}" for source in SOURCES for name in TEXTS[source]]
    return dict(zip(columns_of(folder, "documents", ["doc_id"]).column("doc_id").to_pylist(), names))


@pytest.mark.spark
@pytest.mark.parametrize("verify", ["estimate", "jaccard"])
def test_each_source_counts_numbers_by_its_own_choice(spark, tmp_path: Path, verify: str) -> None:
    names = build(spark, tmp_path, recipe(tmp_path, {"news": KEPT}, dedup={"verify": verify}), "audit")
    rows = columns_of(tmp_path, "clusters", ["doc_id", "cluster"]).to_pylist()
    cluster = {names[row["doc_id"]]: row["cluster"] for row in rows}
    assert cluster["web/a"] == cluster["web/b"]
    assert cluster["news/a"] != cluster["news/b"]
    assert cluster["news/story"] == cluster["web/story"]  # without numbers, sources of different choices compare
    assert cluster["news/same"] != cluster["web/same"]  # every shingle has a number, and none of them matches
    pairs = columns_of(tmp_path, "audit", ["a", "b", "jaccard"]).to_pylist()
    jaccard = {tuple(sorted((names[row["a"]], names[row["b"]]))): row["jaccard"] for row in pairs}
    assert jaccard["web/a", "web/b"] == 1
    assert ("news/a", "news/b") not in jaccard  # less than the 0.2 that the audit lists
    assert jaccard["news/story", "web/story"] > 0.9


INDEXED = {"keep": ["snapshot"], "write_index": True}


@pytest.mark.spark
def test_an_index_refuses_another_choice_for_the_same_source(spark, tmp_path: Path) -> None:
    settings = recipe(tmp_path, {"news": KEPT}, dedup=INDEXED)
    build(spark, tmp_path, settings, "clusters")
    index = table_of(tmp_path, "index")
    assert index.manifest.content.figures["numbers"] == numbers_of(settings) == {"news": "kept", "web": "zero"}

    def problems(other: Recipe) -> list[str]:
        found = incompatibilities_of(index, other, prepare(other, "documents").splits, set())
        return [problem for problem in found if "numbers" in problem]

    assert problems(settings) == []
    assert problems(recipe(tmp_path, {}, dedup=INDEXED)) == [
        "source.news.signature.numbers: expected 'kept', with which the index was made, got 'zero'. Set "
        "source.news.signature.numbers to the value of the index."
    ]
    everywhere = recipe(tmp_path, {}, dedup=INDEXED, signature={"numbers": "kept"})
    assert [problem.partition(":")[0] for problem in problems(everywhere)] == ["source.web.signature.numbers"]
    # one source, and one that the index does not have
    one = {"paths": [f"{tmp_path}/inputs/*.jsonl"], "name": "news"}
    for name, value, expected in (("news", "zero", 1), ("news", "kept", 0), ("books", "kept", 0)):
        other = recipe_of(
            tmp_path, 2, {"source": {**one, "name": name}, "dedup": INDEXED, "signature": {"numbers": value}}
        )
        assert len(problems(other)) == expected
