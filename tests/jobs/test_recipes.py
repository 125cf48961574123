"""The recipes that come with the project: they are valid, and say what their first lines promise."""

import re
from pathlib import Path
from typing import Any

import pytest

from jobs.recipe import read_recipe, read_values
from pipeline.engine.stage import EVERY
from pipeline.extract.extract import ExtractConfig
from pipeline.prepare import prepare
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import ENGLISH, checks
from pipeline.text.profiles import ENGLISH_LIMITS, load_profiles
from schemas.errors import ConfigError
from schemas.overrides import Unset
from tests.support.paths import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "jobs" / "recipes").glob("*.toml"))}
PATHS = ['source.paths=["x.warc.gz"]']
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "c4": {
        "extract": {"extractor": "all", "max_text_chars": 190_000},
        "language": {"languages": ("en",), "min_score": 0.5},  # langdetect: 0.99
        "quality": {"c4_terminal_punctuation": True, "c4_min_line_words": 5, "c4_max_word_length": 1000},
        "toxicity": {"max_words": 0},
        "dedup": {"near": False, "by_url": "first"},
        "repeats": {"units": ("sentences",), "sentences": 3, "min_count": 2, "keep_first": True},
    },
    "ccnet": {
        "extract": {"extractor": "all", "min_text_chars": 300},
        "language": {"languages": (), "min_score": 0.5},
        "perplexity": {"head_share": 0.3, "middle_share": 0.6, "keep_buckets": ("head", "middle", "tail")},
        "repeats": {"units": ("line",), "min_unit_chars": 1},
        "tokens": {"buckets_by": "perplexity"},
    },
    "dclm": {
        "extract": {"extractor": "resiliparse"},
        "language": {"languages": ("en",), "min_score": 0.65},
        "quality": {"dialect": "dclm", "cut_lines": ("refinedweb",), "refinedweb_max_uppercase": 0.5},
        "classifier": {"min_score": {"quality": 0.018112}, "labels": {"quality": "__label__hq"}},
        "signature": {"shingle_words": 13},
        "dedup": {"threshold": 0.8, "min_similarity": 0.8},
        "repeats": {"units": ("line",)},
    },
    "dolma": {
        "language": {"languages": ("en",), "min_score": 0.5},
        "quality": {"dialect": "dolma", "cut_lines": ("c4",), "c4_terminal_punctuation": True},
        "decontaminate": {"ngram": 13, "action": "drop"},
        "dedup": {"near": False, "by_url": "first"},
        "repeats": {"units": ("line",)},
        "pii": {"types": ("email", "phone", "ip")},
    },
    "fineweb": {
        "extract": {"extractor": "trafilatura", "favor_precision": True},
        "language": {"languages": ("en",), "min_score": 0.65},
        "signature": {"family": "datatrove", "shingle_words": 5, "permutations": 112},
        "dedup": {"bands": 14, "rows": 8, "exact": "off", "min_similarity": 0},
        "pii": {"types": ("email", "ip")},
    },
    "fineweb2": {
        "extract": {"extractor": "trafilatura", "favor_precision": True},
        "language": {"languages": ()},
        "quality": {"cut_lines": ()},
        "signature": {"family": "datatrove", "shingle_words": 5, "permutations": 112},
        "dedup": {
            "bands": 14,
            "rows": 8,
            "scope": ("language",),
            "rehydration": {1: 1, 2: 2, 3: 3, 5: 5, 100: 8, 1000: 1},
        },
        "pii": {"types": ("email", "ip")},
    },
    "gopher": {
        "quality": {"dialect": "datatrove", "cut_lines": ()},
        "decontaminate": {"ngram": 13, "max_contaminated_share": 0.8, "action": "drop"},
        "signature": {"shingle_words": 13},
        "dedup": {"threshold": 0.8, "min_similarity": 0.8},
    },
    "redpajama2": {
        "extract": {"extractor": "all", "min_text_chars": 300},
        "language": {"languages": ("en", "de", "fr", "es", "it"), "min_score": 0.5},
        "quality": {"dialect": "redpajama", "families": ("redpajama", "lines"), "cut_lines": ()},
        "perplexity": {"head_share": 0.3, "middle_share": 0.6, "keep_buckets": ("head", "middle")},
        "signature": {"shingle_words": 13, "permutations": 128, "seed": 42},
        "dedup": {"exact": "raw", "near": False},
    },
    "refinedweb": {
        "extract": {"extractor": "trafilatura"},
        "language": {"languages": ("en",), "min_score": 0.65},
        "quality": {"dialect": "dclm", "cut_lines": ("refinedweb",), "refinedweb_min_line_words": 2},
        "signature": {"shingle_words": 5, "permutations": 9000},
        "dedup": {"bands": 20, "rows": 450, "min_similarity": 0, "by_url": "first"},
        "repeats": {"units": ("substring",), "length": 50, "on_substring": "cut", "min_left_chars": 20},
    },
}
"""Recipe → section → the settings that the paper or the published code states."""
GOPHER_REPETITION = {
    f"gopher_dup_{n}gram": limit for n, limit in zip(range(5, 11), (0.15, 0.14, 0.13, 0.12, 0.11, 0.1))
}
GOPHER_TOP = {"gopher_top_2gram": 0.2, "gopher_top_3gram": 0.18, "gopher_top_4gram": 0.16}
GOPHER_PARTS = {
    "gopher_dup_para_frac": 0.3,
    "gopher_dup_line_frac": 0.3,
    "gopher_dup_para_char_frac": 0.2,
    "gopher_dup_line_char_frac": 0.2,
}
GOPHER_LENGTHS = {"gopher_short_doc": 50, "gopher_long_doc": 100_000, "gopher_short_words": 3, "gopher_long_words": 10}
GOPHER_LINES = {
    "gopher_bullet_lines": 0.9,
    "gopher_ellipsis_lines": 0.3,
    "gopher_alpha_words": 0.8,
    "gopher_stop_words": 2,
}
GOPHER = GOPHER_REPETITION | GOPHER_TOP | GOPHER_PARTS | GOPHER_LENGTHS | GOPHER_LINES
HASHES = {"gopher_hashes": 0.1, "gopher_ellipses": 0.1}
SYMBOLS = {"gopher_symbols": 0.1}
LIMITS: dict[str, dict[str, float]] = {
    "c4": {"c4_lorem_ipsum": 0, "c4_curly_bracket": 0, "c4_too_few_sentences": 3},
    "ccnet": {},
    "dclm": GOPHER | SYMBOLS | {"refinedweb_removed_words": 0.05},
    "dolma": GOPHER_REPETITION
    | {"gopher_dup_line_frac": 0.3, "gopher_dup_line_char_frac": 0.3}
    | GOPHER_LENGTHS
    | GOPHER_LINES
    | SYMBOLS,
    "gopher": GOPHER | HASHES,
    "redpajama2": GOPHER_REPETITION | GOPHER_TOP | GOPHER_LENGTHS | SYMBOLS | {"gopher_bullet_lines": 0.9},
    "refinedweb": GOPHER | SYMBOLS | {"refinedweb_removed_words": 0.05},
}
"""Recipe → reason → its published limit for English."""


def quality_of(name: str) -> QualityConfig:
    return read_recipe(str(RECIPES[name]), PATHS).section("quality", QualityConfig)


def limits_of(name: str) -> dict[str, dict[str, float]]:
    """The limits of every rule of a recipe, by reason and language."""
    return {check.reason: dict(check.limits) for check in checks(quality_of(name), {}, {})}


def test_all_recipes_are_known() -> None:
    assert list(RECIPES) == sorted([*PUBLISHED, "demo", "mixed", "web"])


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_valid_and_has_no_machine_path(path: Path) -> None:
    tables = read_values(str(path))["source"]
    names = [f"{table['name']}." for table in tables] if isinstance(tables, list) else [""]
    recipe = read_recipe(str(path), [f"source.{name}paths=['x.warc.gz']" for name in names])
    for own in recipe.by_source().values():
        assert own["source"].model_dump()["paths"] == ("x.warc.gz",)


def test_the_weights_and_ranks_of_the_mixture_name_its_sources() -> None:
    names = [table["name"] for table in read_values("mixed")["source"]]
    recipe = read_recipe("mixed", [f"source.{name}.paths=['x']" for name in names])
    assert recipe.sources == tuple(names)
    assert {*recipe["train"].model_dump()["weights"]} == {*recipe["dedup"].model_dump()["source_ranks"]} == {*names}
    assert sum(recipe["train"].model_dump()["weights"].values()) == 100


@pytest.mark.parametrize(
    ("name", "unicode", "keep_structure"),
    [("web", "repair", True), ("demo", "repair", True), ("fineweb", "keep", False)],
)
def test_the_form_of_the_text(name: str, unicode: str, keep_structure: bool) -> None:
    assert read_recipe(str(RECIPES[name]), PATHS).section("extract", ExtractConfig).unicode == unicode
    assert quality_of(name).keep_structure is keep_structure
    assert quality_of(name).cut_lines == ("c4",)


def test_fineweb_has_the_published_settings() -> None:
    quality = quality_of("fineweb")
    assert quality.content() == QualityConfig().content()
    assert limits_of("fineweb") == limits_of("demo")  # the defaults
    assert limits_of("fineweb")["fineweb_dup_line_chars"]["en"] == 0.01
    assert limits_of("fineweb")["c4_curly_bracket"] == {"en": 0, EVERY: 0}
    assert (quality.c4_min_line_words, quality.c4_terminal_punctuation) == (3, False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_corpus_has_its_settings(name: str) -> None:
    recipe = read_recipe(name, PATHS)
    for section, values in PUBLISHED[name].items():
        assert {key: getattr(recipe[section], key) for key in values} == values


@pytest.mark.parametrize("name", LIMITS)
def test_a_published_corpus_has_its_limits(name: str) -> None:
    limits = {reason: of[ENGLISH] for reason, of in limits_of(name).items()}
    assert limits == pytest.approx(LIMITS[name], rel=1e-6)


def test_fineweb2_has_limits_by_language_and_its_own_for_repeated_characters() -> None:
    limits = limits_of("fineweb2")
    skipped = {"gopher_dup_para_frac", "gopher_dup_para_char_frac", "gopher_dup_line_char_frac", "fineweb_short_lines"}
    assert not skipped & limits.keys()
    assert {*limits["fineweb_dup_line_chars"].values()} == {0.1}
    assert len({*limits["gopher_alpha_words"].values()}) > 10
    assert not [reason for reason in limits if reason.startswith("c4")]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_states_its_paper_its_differences_and_its_sources(name: str) -> None:
    text = RECIPES[name].read_text(encoding="utf-8")
    head = text.split("\n[", 1)[0]
    assert re.search(r"\(.+ et al\. 20\d\d, arXiv \d{4}\.\d{5}", head)
    assert f"#   penstock run {name} --out run --set source.paths=" in head
    assert "\n# The same as published: " in head
    assert "\n# What differs:\n# - " in head
    own = {"source", "tokenizer", "tokens", "train"}  # the form of the dataset, which is no part of a corpus
    for section in read_values(name).keys() - own:
        assert f"\n[{section}]\n# Source: " in text, section


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("c4", ['repeats.units=["line"]', 'toxicity.wordlists={en="ldnoobw-en.txt"}', "pii.types=[]"]),
        ("ccnet", ['perplexity.models={en="en.lm"}', "perplexity.pieces={}", 'perplexity.keep_buckets=["head"]']),
        (
            "dclm",
            [
                *('classifier.models={quality="models/quality.bin"}', Unset("classifier.labels")),
                *(Unset("classifier.min_score"), "classifier.min_quantile={quality=0.9}"),
            ],
        ),
        ("dolma", ["decontaminate.evaluation_sets={}"]),
        ("fineweb2", ["quality.by_language={de={min_alpha_words=0.774,max_newline_ratio=0.152}}"]),
        ("gopher", ["decontaminate.evaluation_sets={}", Unset("decontaminate.max_contaminated_share")]),
        ("redpajama2", ["quality.rules=[]"]),
        ("redpajama2", ["dedup.near=true", "dedup.bands=9", "dedup.rows=13", "dedup.min_similarity=0"]),
        ("refinedweb", ["signature.permutations=112", "dedup.bands=14", "dedup.rows=8"]),
    ],
)
def test_the_other_settings_that_a_head_names_are_valid(name: str, overrides: list[str]) -> None:
    assert read_recipe(name, [*PATHS, *overrides])["source"].model_dump()["paths"] == ("x.warc.gz",)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("dclm", "models/openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train.bin"),
        ("dolma", "evaluation/paloma.jsonl"),
        ("gopher", "evaluation/lambada"),
    ],
)
def test_a_file_that_the_user_provides_is_named_before_anything_runs(tmp_path: Path, name: str, missing: str) -> None:
    (tmp_path / "x.warc").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"model {missing}.*: expected a model file, got nothing"):
        prepare(read_recipe(name, [f'source.paths=["{tmp_path}/x.warc"]']), None)


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
