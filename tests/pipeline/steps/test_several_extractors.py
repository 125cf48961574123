"""Several extractors: whose text of a page is kept, what a comparison holds, and what the limits then change."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe, recipe_sections
from pipeline.engine.stage import CPU, Row
from pipeline.engine.worker import FusedStages
from pipeline.extract import extract as extract_stage
from pipeline.extract.extract import EXTRACT, GUARD, ExtractConfig
from pipeline.extract.extractors import DecodedPage, Extraction, ExtractorError
from pipeline.inspect.whatif import Prediction, format_prediction
from pipeline.models import ModelsConfig, ensure_model
from pipeline.prepare import settings_of
from pipeline.quality.stage import QUALITY
from pipeline.report.extraction import LENGTH_TEXTS
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.stages import MEASURED, SOURCE, steps_for
from pipeline.steps import several_extractors
from pipeline.steps.documents import DocumentsTask, documents_part
from pipeline.steps.several_extractors import (
    COMPARED,
    LENGTHS,
    STOPPED,
    TRIED,
    SeveralExtractors,
    checks_of_text,
    figures_of_comparison,
    length_class,
    word_f1,
)
from schemas.config import Recipe, build_recipe
from schemas.errors import ConfigError
from schemas.ids import doc_id
from schemas.storage import Store
from schemas.tables import COMPARISONS
from tests.support.paths import ROOT

GOOD = "The gate of the penstock was closed in spring, and the water of the lake rose by three metres. "
TEXTS = {
    "penstock": {"good": GOOD * 3, "better": "short", "both": "short", "none": ""},
    "trafilatura": {"good": GOOD, "better": GOOD * 2, "both": "brief", "none": GOOD},
    "resiliparse": {"good": GOOD, "better": GOOD * 4, "both": GOOD * 4, "none": GOOD},
}
"""Text of each page by each extractor; "" = it finds none."""


def recipe_of(*extractors: str, **more: Any) -> Recipe:
    """Return a recipe with a union of these extractors, or with further settings of `[extract]` and other sections."""
    quality = {"rules": ["gopher_quality"], "min_words": 10, "families": ["gopher_quality"]}
    names = set(ExtractConfig.model_fields) - {"union"}
    extract = {name: more[name] for name in names & more.keys()} | ({"union": [*extractors]} if extractors else {})
    others = {name: value for name, value in more.items() if name not in ExtractConfig.model_fields}
    sections = {"extract": extract, "quality": quality, "source": {"paths": ["none"]}, **others}
    return build_recipe(sections, recipe_sections(), "test")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The extractors that read pages, in order; the name of a page is its HTML."""
    calls: list[str] = []

    def make(name: str, options: Any) -> Any:
        def extractor(page: DecodedPage) -> Extraction:
            calls.append(f"{name} {page.html}{' isolated' * options.isolated}")
            if page.html == "refused":
                raise ExtractorError("no", isolated="stopped" if options.isolated else None)
            return Extraction(TEXTS[name][page.html], None, None, name, 0.5 if name == "penstock" else None)

        return extractor

    monkeypatch.setattr(extract_stage, "make_extractor", make)
    return calls


def given(page: str, **columns: Any) -> Row:
    row = {"_payload": page.encode(), "_http_charset": None, "text": None, "language": "en", "doc_id": b""}
    return row | columns


def run_with(recipe: Recipe, page: str, **columns: Any) -> Row:
    return SeveralExtractors([EXTRACT, QUALITY], recipe, {})(given(page, **columns))


def run(page: str, *extractors: str, **columns: Any) -> Row:
    return run_with(recipe_of(*extractors), page, **columns)


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
    assert row[CPU]["union"] > 0


@pytest.mark.parametrize(("page", "text", "rule"), [("both", "short", None), ("refused", None, "parser_error")])
def test_a_page_on_which_no_text_passes_keeps_the_first(
    read: list[str], page: str, text: str | None, rule: str | None
) -> None:
    row = run(page, "penstock", "trafilatura")
    assert (row["text"], row.get("drop_rule")) == (text, rule)
    assert row[TRIED] == [("trafilatura", False)]
    assert row[STOPPED] == (["trafilatura"] if page == "refused" else [])


def test_the_times_of_several_extractors_do_not_mix(read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a stage before extraction has spent time on the row. Each look at this clock takes a second."""
    seconds = itertools.count()
    monkeypatch.setattr("time.thread_time", lambda: float(next(seconds)))
    row = run("both", "penstock", "trafilatura", "resiliparse", **{CPU: {"language": 5.0}})
    assert row[CPU]["language"] == 5.0
    assert row[CPU]["extract"] == row[CPU]["quality"] == 1.0


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
        several_extractors.FusedStages,
        "__call__",
        lambda self, row: {**first(self, row), "extracted_by": "trafilatura"},
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
            [
                "format: expected only extractors that follow it, 'penstock' and 'trafilatura', got 'resiliparse', "
                "'all'. Remove extract.format.",
                "links: expected only extractors",
            ],
        ),
        (
            {"union": ["penstock", "trafilatura", "all"], "format": "markdown"},
            ["format: expected only extractors that follow it, 'penstock' and 'trafilatura', got 'all'."],
        ),
        (
            {"compare": "resiliparse", "images": True},
            ["images: expected only extractors that follow it, 'penstock' and 'trafilatura', got 'resiliparse'."],
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
    return DocumentsTask((split,), SOURCE, MEASURED, recipe, models, Store(f"{out}/documents"), Store(f"{out}/text"))


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
    assert first.cpu["union"]["rows"] > figures["union_tried"]["trafilatura"]
    alone = documents_part(
        make_task(crawl, tmp_path / "c", 'extract.extractor="resiliparse"', "quality.min_words=120"), False
    )
    own = pq.read_table(tmp_path / "c" / "documents" / alone.files["documents"].path).to_pylist()
    assert alone.counts.rows_in == first.counts.rows_in == len(rows)
    assert [row for row in own if row["doc_id"] not in {one["doc_id"] for one in taken}] == [
        row for row in rows if row not in taken
    ]


@pytest.mark.slow
def test_second_opinions_are_the_same_when_a_part_is_retried(crawl: Path, tmp_path: Path) -> None:
    settings = 'extract.extractor="penstock"', "extract.min_expected_f1=0.98", "extract.max_second_opinions=0.5"
    first = documents_part(make_task(crawl, tmp_path / "a", *settings), False)
    again = documents_part(make_task(crawl, tmp_path / "b", *settings), True)
    assert [first.files[name].sha256 for name in first.files] == [again.files[name].sha256 for name in again.files]
    assert first.figures == again.figures
    opinions = first.figures["second_opinions"]
    assert min(opinions.get("unsure/used", 0), opinions.get("unsure/limit", 0)) > 0
    rows = pq.read_table(tmp_path / "a" / "documents" / first.files["documents"].path).to_pylist()
    asked = [row for row in rows if row["second_opinion"] is not None]
    assert len(asked) == sum(opinions.values()) - opinions.get("none", 0) == first.cpu["second_opinion"]["rows"]


# The comparison of two extractors.


def test_a_comparison_holds_both_texts_and_does_not_change_the_document(read: list[str]) -> None:
    recipe = recipe_of(extractor="penstock", compare="resiliparse", compare_share=1)
    row = run_with(recipe, "better", doc_id=b"\x01" * 16)
    assert (row["text"], row["extracted_by"], TRIED in row) == ("short", "penstock", False)
    expected = {"doc_id": b"\x01" * 16, "language": "en", "first": "penstock", "second": "resiliparse"}
    expected |= {"word_f1": 0.0, "first_chars": 5, "second_chars": len(GOOD) * 4 - 1, "second_rule": None}
    expected |= {"first_rule": "quality/gopher_short_doc", "first_text": "short", "second_text": (GOOD * 4).strip()}
    assert row[COMPARED] == expected
    assert [*row[COMPARED]] == COMPARISONS.names
    assert {"compare penstock", "compare resiliparse"} <= {*row[CPU]}
    assert [*figures_of_comparison(row[COMPARED])] == [
        ("compared_f1", "0.0", 1),
        ("compared_lengths", "above_double", 1),
        ("compared_rules", "only_second_passes", 1),
        ("compared_chars", "first_chars", 5),
        ("compared_chars", "second_chars", 4 * len(GOOD) - 1),
    ]


def test_a_union_and_a_comparison_read_a_page_once(read: list[str]) -> None:
    recipe = recipe_of("penstock", "resiliparse", compare="resiliparse", compare_share=1)
    row = run_with(recipe, "better", doc_id=b"\x01" * 16)
    assert (row["extracted_by"], row[COMPARED]["first_text"]) == ("resiliparse", "short")
    assert read == ["penstock better", "resiliparse better isolated"]


def test_the_sample_is_a_share_of_the_pages_by_their_id(read: list[str]) -> None:
    recipe = recipe_of(extractor="penstock", compare="resiliparse", compare_share=0.25)
    measure = SeveralExtractors([EXTRACT, QUALITY], recipe, {})
    ids = [doc_id("web", "a", number) for number in range(400)]
    chosen = {one for one in ids if COMPARED in measure(given("good", doc_id=one))}
    assert 70 <= len(chosen) <= 130  # 100 expected
    again = SeveralExtractors([EXTRACT, QUALITY], recipe, {})
    assert {one for one in reversed(ids) if COMPARED in again(given("good", doc_id=one))} == chosen


@pytest.mark.parametrize(
    ("first", "second", "f1"),
    [
        ("", "", 1.0),
        ("a", "", 0.0),
        ("A b c", "a b", 2 * 2 / 5),
        ("a a", "a", 2 * 1 / 3),
        ("水力 x", "水 x", 2 * 2 / 5),
        ("one, two!", "two one", 1.0),
    ],
)
def test_the_f1_of_words(first: str, second: str, f1: float) -> None:
    assert word_f1(first, second) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (0, 0, "both_empty"),
        (0, 1, "first_empty"),
        (1, 0, "second_empty"),
        (100, 49, "below_half"),
        (100, 50, "below_0.8"),
        (100, 79, "below_0.8"),
        (100, 80, "similar"),
        (100, 125, "similar"),
        (100, 126, "above_1.25"),
        (100, 200, "above_1.25"),
        (100, 201, "above_double"),
    ],
)
def test_classes_of_length(first: int, second: int, name: str) -> None:
    assert length_class(first, second) == name
    assert {*LENGTHS} == {*LENGTH_TEXTS}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"extractor": "all", "compare": "all"}, "compare: expected another extractor than extractor = 'all', got"),
        ({"compare_share": 0.5}, "compare_share: expected extract.compare, got none, so that 0.5 is ignored"),
        ({"compare": "all", "compare_share": 0}, "compare_share: Input should be greater than 0"),
    ],
)
def test_refused_comparisons(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_recipe({"source": {"paths": ["none"]}, "extract": settings}, recipe_sections(), "test")
    assert problem in str(refused.value)


def test_a_comparison_is_a_table_of_its_recipes_only() -> None:
    for settings, is_compared in (({}, False), ({"compare": "all"}, True)):
        recipe = build_recipe({"source": {"paths": ["none"]}, "extract": settings}, recipe_sections(), "test")
        documents = steps_for(recipe)[0]
        assert ("comparisons" in documents.writes) == is_compared
        found = settings_of(recipe["extract"], documents)
        assert ("compare" in found, "compare_share" in found) == (is_compared, is_compared)
        assert ("min_words" in settings_of(recipe["quality"], documents)) == is_compared


@pytest.mark.slow
def test_a_part_with_a_comparison(crawl: Path, tmp_path: Path) -> None:
    settings = 'extract.compare="trafilatura"', "extract.compare_share=0.3"
    tasks = [
        replace(make_task(crawl, tmp_path / name, *settings), comparisons=Store(f"{tmp_path}/{name}/comparisons"))
        for name in ("a", "b")
    ]
    first, again = documents_part(tasks[0], False), documents_part(tasks[1], True)
    assert [first.files[name].sha256 for name in first.files] == [again.files[name].sha256 for name in again.files]
    assert first.figures == again.figures
    rows = pq.read_table(tmp_path / "a" / "comparisons" / first.files["comparisons"].path).to_pylist()
    assert len(rows) == sum(first.figures["compared_rules"].values()) == first.cpu["compare trafilatura"]["rows"] > 5
    alone = documents_part(make_task(crawl, tmp_path / "c"), False)
    for name in ("documents", "text"):
        assert alone.files[name].sha256 == first.files[name].sha256
