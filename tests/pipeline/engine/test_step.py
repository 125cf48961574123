"""Steps of a run with several sources: settings, models and counts by source."""

from typing import Any

import pytest

from jobs.recipe import recipe_sections
from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import PartResult
from pipeline.engine.stage import Split
from pipeline.engine.step import BY_SOURCE, Model, PartSources, StepContext, combine_parts
from pipeline.prepare import Prepared, sections_of_stage, step_content
from pipeline.stages import steps_for
from pipeline.steps.verdicts import checks_of, cutoffs_of_stage, limits_of, quantiles_of, settings_by_source
from schemas.config import Recipe, build_recipe, own_key
from schemas.errors import ConfigError
from schemas.manifest import Counts
from tests.support.step_run import gathered

SPLITS = [("web", 0), ("web", 1), ("books", 2)]


def recipe(own: dict[str, Any] | None = None) -> Recipe:
    books = {"name": "books", "paths": ["b"], **(own or {})}
    raw = {"source": [{"paths": ["a"]}, books], "perplexity": {"scorer": "ngram", "models": {"en": "x"}}}
    return build_recipe(raw, recipe_sections(), "test")


def context(of: Recipe, models: dict[str, dict[str, Model]] | None = None) -> StepContext:
    splits = [Split(number, f"f{number}", "", 1, "", source, "jsonl") for source, number in SPLITS]
    return StepContext(None, of, (), {}, {}, splits, models or {}, None, dict.fromkeys(of.sources, ()))


def test_the_parts_of_a_source_have_its_settings() -> None:
    build = context(recipe({"quality": {"min_words": 3}}))
    words = [own.recipe["quality"].min_words for _, own in build.by_part(["x", "y", "z"])]
    assert words == [None, None, 3]
    sources = build.part_sources
    assert sources == PartSources((0, 2), ("web", "books"))
    assert [sources[part] for part in range(3)] == ["web", "web", "books"]


def test_one_source_has_one_context() -> None:
    of = build_recipe({"source": {"paths": ["a"]}}, recipe_sections(), "test")
    build = StepContext(None, of, (), {}, {}, (), {}, None)
    assert build.part_sources is None
    assert build.by_part(["x", "y"]) == [("x", build), ("y", build)]


def test_a_source_has_its_own_models_and_those_of_the_run() -> None:
    models = {
        "language": {"lid": Model("l", "1")},
        "quality": {"words": Model("w", "2")},
        own_key("books", "quality"): {"words": Model("v", "3")},
    }
    build = context(recipe({"quality": {"min_words": 3}}), models)
    assert build.of_source("books").model_paths() == {"language": {"lid": "l"}, "quality": {"words": "v"}}
    none = context(recipe({"quality": {"min_words": 3}}), {"quality": models["quality"]})
    assert none.of_source("books").model_paths() == {}  # its own settings name no model
    assert build.of_source("web").model_paths() == {"language": {"lid": "l"}, "quality": {"words": "w"}}


def test_counts_by_source_add_up_to_those_of_the_table() -> None:
    parts = [
        PartResult(
            {"t": WrittenFile("", "", n, 1, "")},
            Counts(rows_in=n, rows_kept=n - 1, dropped={"a/b": 1, "a/c": 0}),
            {"kept_chars": 10 * n},
        )
        for n in (3, 4, 5)
    ]
    one = {"rows_in": 7, "rows_kept": 5, "dropped": {"a/b": 2}, "kept_chars": 70, "dropped_chars": {}}
    two = {"rows_in": 5, "rows_kept": 4, "dropped": {"a/b": 1}, "kept_chars": 50, "dropped_chars": {}}
    results = gathered(parts, PartSources((0, 2), ("web", "books")))
    combined = combine_parts(results, ("t",), by_source=True)["t"]
    assert combined.figures[BY_SOURCE] == {"web": one, "books": two}
    assert BY_SOURCE not in combine_parts(results, ("t",))["t"].figures
    assert BY_SOURCE not in combine_parts(gathered(parts), ("t",), by_source=True)["t"].figures


def test_checks_and_quantiles_of_a_source_have_its_name() -> None:
    plain, own = recipe(), recipe({"perplexity": {"head_share": 0.2}, "quality": {"min_words": 3}})
    steps = {step.name: step for step in steps_for(own)}
    stages = [stage for stage in steps["verdicts"].stages if stage.name in ("quality", "perplexity")]
    assert {each.sources for each in settings_by_source(plain, "quality")} == {None}
    shared, books = settings_by_source(own, "quality")
    assert (shared.sources, books.sources) == (frozenset(("web",)), frozenset(("books",)))
    assert (books.key, books.suffix) == ("source.books.quality", " of books")
    checks = checks_of(stages, own, {}, {})
    labels = {check.label: check.sources for _, check in checks}
    assert labels["of books"] == frozenset(("books",))
    assert {check.own_source for _, check in checks if check.label.endswith("of books")} == {"books"}
    limits = limits_of(checks)
    assert {entry.get("own_source") for entry in limits.values()} == {None, "books"}
    assert all(("own_source" in entry) == name.endswith(" of books") for name, entry in limits.items())
    names = [quantile.name for quantile in quantiles_of(stages, own)]
    assert names
    assert {name.removesuffix(" of books") for name in names} == {*names} - {
        name for name in names if name.endswith(" of books")
    }
    cutoffs = {names[0]: {"en": 1.0}, f"{names[0]} of books": {"en": 2.0}}
    assert cutoffs_of_stage(cutoffs, own.of_source("books"), "perplexity")[names[0]] == {"en": 2.0}
    assert cutoffs_of_stage(cutoffs, own.of_source("web"), "perplexity")[names[0]] == {"en": 1.0}


def test_only_settings_that_differ_enter_the_fingerprint_of_a_step() -> None:
    def config(of: Recipe, step: str) -> dict[str, Any]:
        steps = steps_for(of)
        (found,) = [each for each in steps if each.name == step]
        content: dict[str, Any] = step_content(Prepared(of, steps, (), {}), found)["config"]
        return content

    strict = recipe({"quality": {"min_words": 3}})
    assert config(strict, "documents") == config(recipe(), "documents")  # a limit changes no measurement
    assert {*config(strict, "verdicts")} - {*config(recipe(), "verdicts")} == {"source.books.quality"}
    assert {*config(strict, "documents")["source"]} == {"web", "books"}
    assert {*sections_of_stage(strict, "source")} == {"source.web.source", "source.books.source"}


@pytest.mark.parametrize("section", ["dedup", "tokens"])
def test_a_section_of_all_documents_cannot_belong_to_a_source(section: str) -> None:
    with pytest.raises(ConfigError, match="expected a section that a source may have for itself"):
        recipe({section: {}})
