"""The recipes that come with the project: they are valid, and say what their first lines promise."""

from pathlib import Path

import pytest

from jobs.recipe import read_recipe
from pipeline.engine.stage import EVERY
from pipeline.extract.extract import ExtractConfig
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import checks
from pipeline.text.profiles import ENGLISH_LIMITS, load_profiles
from tests.support.paths import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "jobs" / "recipes").glob("*.toml"))}
PATHS = ['source.paths=["x.warc.gz"]']


def quality_of(name: str) -> QualityConfig:
    return read_recipe(str(RECIPES[name]), PATHS).section("quality", QualityConfig)


def limits_of(name: str) -> dict[str, dict[str, float]]:
    """The limits of every rule of a recipe, by reason and language."""
    return {check.reason: dict(check.limits) for check in checks(quality_of(name), {}, {})}


def test_all_recipes_are_known() -> None:
    assert list(RECIPES) == ["demo", "fineweb", "web"]


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_valid_and_has_no_machine_path(path: Path) -> None:
    assert read_recipe(str(path), PATHS)["source"].model_dump()["paths"] == ("x.warc.gz",)


@pytest.mark.parametrize(
    ("name", "unicode", "keep_structure"),
    [("web", "repair", True), ("demo", "repair", True), ("fineweb", "keep", False)],
)
def test_the_form_of_the_text(name: str, unicode: str, keep_structure: bool) -> None:
    assert read_recipe(str(RECIPES[name]), PATHS).section("extract", ExtractConfig).unicode == unicode
    assert quality_of(name).keep_structure is keep_structure
    assert quality_of(name).cut_lines == ("c4",)


def test_fineweb_has_the_published_settings() -> None:
    recipe = read_recipe(str(RECIPES["fineweb"]), PATHS)
    quality = quality_of("fineweb")
    assert quality.content() == QualityConfig().content()
    assert limits_of("fineweb") == limits_of("demo")  # the defaults
    assert limits_of("fineweb")["fineweb_dup_line_chars"]["en"] == 0.01
    assert limits_of("fineweb")["c4_curly_bracket"] == {"en": 0, EVERY: 0}
    assert (quality.c4_min_line_words, quality.c4_terminal_punctuation) == (3, False)
    expected = {
        "extract": {"extractor": "trafilatura", "favor_precision": True},
        "language": {"languages": ("en",), "min_score": 0.65},
        "signature": {"family": "datatrove", "shingle_words": 5, "permutations": 112},
        "dedup": {"bands": 14, "rows": 8, "exact": "off", "min_similarity": 0, "rehydration": {1: 1}},
        "pii": {"types": ("email", "ip")},
    }
    for section, values in expected.items():
        assert {name: getattr(recipe[section], name) for name in values} == values


def test_web_differs_from_fineweb_in_a_rule_and_in_limits() -> None:
    web, fineweb = (
        {c.setting: dict(c.limits) for c in checks(quality_of(name), {}, {})} for name in ("web", "fineweb")
    )
    assert fineweb.keys() - web.keys() == {"max_curly_brackets"}
    derived = load_profiles(str(ENGLISH_LIMITS))["en"].limits
    assert {name: limits["en"] for name, limits in web.items()} == {
        name: derived.get(name, fineweb[name]["en"]) for name in web
    }
    differ = {(name, lang) for name in web for lang in web[name] if web[name][lang] != fineweb[name][lang]}
    assert {(name, lang) for name, lang in differ if name != "max_dup_line_chars" and lang != "en"} == {
        ("max_short_lines", "ja")
    }
    assert web["max_short_lines"]["ja"] == web["max_short_lines"]["zh"]
    limits = web["max_dup_line_chars"]
    assert (limits["de"], limits["zh"]) == (0.05, 0.087)
    assert quality_of("web").cut_repeated_lines
