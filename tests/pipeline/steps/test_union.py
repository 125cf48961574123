"""The union of extractors: whose text of a page is kept, what is counted, and what the limits of rules then change."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe, recipe_sections
from pipeline.engine.stage import CPU, Row
from pipeline.engine.worker import FusedStages
from pipeline.extract import extract as extract_stage
from pipeline.extract.extract import EXTRACT, GUARD
from pipeline.extract.extractors import DecodedPage, Extraction, ExtractorError
from pipeline.inspect.whatif import Prediction, format_prediction
from pipeline.models import ModelsConfig, ensure_model
from pipeline.quality.stage import QUALITY
from pipeline.run import settings_of
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.stages import MEASURED, SOURCE, steps_for
from pipeline.steps import union
from pipeline.steps.documents import DocumentsTask, documents_part
from pipeline.steps.union import TRIED, ExtractorUnion, checks_of_text
from schemas.config import Recipe, build_recipe
from schemas.errors import ConfigError
from schemas.storage import Store
from tests.support.paths import ROOT

GOOD = "The gate of the penstock was closed in spring, and the water of the lake rose by three metres. "
TEXTS = {
    "penstock": {"good": GOOD * 3, "better": "short", "both": "short", "none": ""},
    "trafilatura": {"good": GOOD, "better": GOOD * 2, "both": "brief", "none": GOOD},
    "resiliparse": {"good": GOOD, "better": GOOD * 4, "both": GOOD * 4, "none": GOOD},
}
"""Text of each page by each extractor; "" = it finds none."""


def recipe_of(*extractors: str, **more: Any) -> Recipe:
    quality = {"rules": ["gopher_quality"], "min_words": 10, "families": ["gopher_quality"]}
    sections = {"extract": {"union": [*extractors]}, "quality": quality, "source": {"paths": ["none"]}, **more}
    return build_recipe(sections, recipe_sections(), "test")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The extractors that read pages, in order; the name of a page is its HTML."""
    calls: list[str] = []

    def make(name: str, options: Any) -> Any:
        def extractor(page: DecodedPage) -> Extraction:
            calls.append(f"{name} {page.html}{' isolated' * options.isolated}")
            if page.html == "refused":
                raise ExtractorError("no")
            return Extraction(TEXTS[name][page.html], None, None, name, 0.5 if name == "penstock" else None)

        return extractor

    monkeypatch.setattr(extract_stage, "make_extractor", make)
    return calls


def in_english(row: Row) -> None:
    row["language"], row["language_score"] = "en", 1.0


def run(page: str, *extractors: str, **columns: Any) -> Row:
    recipe = recipe_of(*extractors)
    stages = [EXTRACT, QUALITY]
    row = {"_payload": page.encode(), "_http_charset": None, "text": None, "language": "en", "doc_id": b"", **columns}
    return ExtractorUnion(stages, recipe, {})(row)


@pytest.mark.parametrize(
    ("page", "text", "by", "tried"),
    [
        ("good", GOOD * 3, "penstock", []),
        ("better", GOOD * 2, "trafilatura", [("trafilatura", True)]),
        ("none", GOOD, "trafilatura", [("trafilatura", True)]),
        ("both", GOOD * 4, "resiliparse", [("trafilatura", False), ("resiliparse", True)]),
    ],
)
def test_the_first_text_that_passes_is_kept(
    read: list[str], page: str, text: str, by: str, tried: list[tuple[str, bool]]
) -> None:
    row = run(page, "penstock", "trafilatura", "resiliparse")
    assert (row["text"], row["extracted_by"], row.get("drop_stage")) == (text.strip(), by, None)
    assert row.get(TRIED, []) == tried
    assert read == [f"penstock {page}", *(f"{name} {page} isolated" for name, _ in tried)]
    assert row["gopher_num_words"] == len(row["text"].split())
    assert row[GUARD] == "none"
    assert ("union" in row[CPU]) == bool(tried)


@pytest.mark.parametrize(("page", "text", "rule"), [("both", "short", None), ("refused", None, "parser_error")])
def test_a_page_on_which_no_text_passes_keeps_the_first(
    read: list[str], page: str, text: str | None, rule: str | None
) -> None:
    row = run(page, "penstock", "trafilatura")
    assert (row["text"], row.get("drop_rule")) == (text, rule)
    assert row[TRIED] == [("trafilatura", False)]


def test_the_order_of_the_union_decides(read: list[str]) -> None:
    assert run("none", "trafilatura", "penstock")["extracted_by"] == "trafilatura"
    assert run("better", "resiliparse", "penstock")["text"] == (GOOD * 4).strip()


@pytest.mark.parametrize(
    ("columns", "page"),
    [
        ({"text": "short"}, "both"),
        ({"mime": "text/plain"}, "both"),
        ({}, "<div>" * 4000),
    ],
)
def test_rows_without_other_texts_are_not_tried(read: list[str], columns: dict[str, Any], page: str) -> None:
    row = run(page, "penstock", "trafilatura", **columns)
    assert TRIED not in row
    assert not any("trafilatura" in call for call in read)


def test_a_second_opinion_is_not_asked_for_again(read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXTS["penstock"], "good", "short")
    first = FusedStages.__call__
    monkeypatch.setattr(
        union.FusedStages, "__call__", lambda self, row: {**first(self, row), "extracted_by": "trafilatura"}
    )
    assert run("good", "penstock", "trafilatura")[TRIED] == []


def test_scores_of_models_are_no_rules_for_texts() -> None:
    settings = {"classifier": "x.bin", "classifier_label": "toxic", "max_score": 0.5}
    recipe = recipe_of("penstock", "all", toxicity={**settings, "wordlists": {"en": "built-in"}, "max_words": 3})
    names = {f"{stage}/{check.reason}" for stage, check in checks_of_text(MEASURED, recipe, {})}
    assert "toxicity/toxic_words" in names
    assert "toxicity/toxic_score" not in names
    assert "quality/gopher_short_doc" in names


def test_limits_enter_the_fingerprint_of_documents_with_a_union_only() -> None:
    for extractors, has_limits in (((), False), (("penstock", "trafilatura"), True)):
        sections = {"source": {"paths": ["none"]}, "extract": {"union": [*extractors]} if extractors else {}}
        recipe = build_recipe(sections, recipe_sections(), "test")
        documents = steps_for(recipe)[0]
        assert ("min_words" in settings_of(recipe["quality"], documents)) == has_limits
        assert ("union" in settings_of(recipe["extract"], documents)) == has_limits
        verdicts = next(step for step in steps_for(recipe) if step.name == "verdicts")
        assert settings_of(recipe["quality"], verdicts) == recipe["quality"].decisions()


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"union": []}, ["union: expected at least two extractors, got []"]),
        ({"union": ["penstock"]}, ["union: expected at least two extractors, got ['penstock']"]),
        ({"union": ["all", "penstock", "all"]}, ["union: expected each extractor once, got 'all' more than once"]),
        (
            {"union": ["penstock", "all"], "extractor": "resiliparse", "favor_precision": True},
            [
                "union: expected extractor = 'resiliparse' as its first, got 'penstock'. Remove extract.extractor.",
                "favor_precision: expected extractor = 'trafilatura', got 'penstock', 'all'",
            ],
        ),
        (
            {"union": ["resiliparse", "all"], "links": True, "format": "markdown"},
            ["format: expected extractor = 'penstock', got 'resiliparse', 'all'", "links: expected extractor"],
        ),
    ],
)
def test_refusals(settings: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        build_recipe({"source": {"paths": ["none"]}, "extract": settings}, recipe_sections(), "test")
    for problem in problems:
        assert problem in str(refused.value)


def test_settings_belong_to_the_extractor_in_the_union() -> None:
    for extractors in (["penstock", "trafilatura"], ["trafilatura", "penstock"]):
        settings = {"union": extractors, "favor_precision": True, "links": True}
        recipe = build_recipe({"source": {"paths": ["none"]}, "extract": settings}, recipe_sections(), "test")
        assert recipe["extract"].extractor == extractors[0]
        assert EXTRACT.models(recipe["extract"]) == {"main_text": "main-text"}


def test_a_what_if_says_what_it_cannot_predict() -> None:
    assert "from another extractor" in format_prediction(Prediction((), (), False, chooses_texts=True), {})
    assert "from another extractor" not in format_prediction(Prediction((), (), False), {})


# A part of `documents` of a demo crawl.


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pipeline.demo_crawl.build import build_demo_crawl

    folder = tmp_path_factory.mktemp("crawl")
    build_demo_crawl(folder, pages=100, seed=5)
    return folder


def make_task(crawl: Path, out: Path, *overrides: str) -> DocumentsTask:
    recipe = read_recipe(
        str(ROOT / "jobs" / "recipes" / "demo.toml"), [f'source.paths=["{crawl}/*.warc.gz"]', *overrides]
    )
    models: dict[str, dict[str, str]] = {}
    try:
        for stage in MEASURED:
            places = stage.models(recipe[stage.name])
            models[stage.name] = {name: str(ensure_model(p, ModelsConfig()).path) for name, p in places.items()}
    except ConfigError as error:
        pytest.skip(str(error))
    split = find_splits(recipe.section("source", SourceConfig))[0]
    return DocumentsTask(split, SOURCE, MEASURED, recipe, models, Store(f"{out}/documents"), Store(f"{out}/text"))


@pytest.mark.slow
def test_a_part_with_a_union_balances_and_has_the_same_bytes_when_it_is_retried(crawl: Path, tmp_path: Path) -> None:
    settings = 'extract.union=["resiliparse","trafilatura"]', "quality.min_words=120"
    first = documents_part(make_task(crawl, tmp_path / "a", *settings), False)
    again = documents_part(make_task(crawl, tmp_path / "b", *settings), True)
    assert [first.files[name].sha256 for name in first.files] == [again.files[name].sha256 for name in again.files]
    assert (first.counts, first.figures) == (again.counts, again.figures)
    rows = pq.read_table(tmp_path / "a" / "documents" / first.files["documents"].path).to_pylist()
    taken = [row for row in rows if row["extracted_by"] == "trafilatura"]
    figures = first.figures
    assert figures["union_tried"]["trafilatura"] > 0
    assert figures.get("union_taken", {}).get("trafilatura", 0) == len(taken)
    assert figures.get("union_chars", {}).get("trafilatura", 0) == sum(row["body_chars"] for row in taken)
    assert first.cpu["union"]["rows"] == figures["union_tried"]["trafilatura"]
    alone = documents_part(make_task(crawl, tmp_path / "c", "quality.min_words=120"), False)
    own = pq.read_table(tmp_path / "c" / "documents" / alone.files["documents"].path).to_pylist()
    assert alone.counts.rows_in == first.counts.rows_in == len(rows)
    assert [row for row in own if row["doc_id"] not in {one["doc_id"] for one in taken}] == [
        row for row in rows if row not in taken
    ]
