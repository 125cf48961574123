"""The limits in force and where they come from, and the limits of single languages that a recipe's limit replaces."""

import pytest

from jobs.recipe import recipe_sections
from pipeline.inspect.whatif_limits import changed_settings, describe_changes
from pipeline.quality.config import QualityConfig
from pipeline.quality.limits import LIMIT_NAMES, default_limit, limit_in_force, limits_by_setting, replacement_notes
from pipeline.quality.rules import RULES
from schemas.overrides import load_recipe

LANGUAGES = 'language.languages=["en","de","ru","zh"]'


def recipe(*overrides):
    return load_recipe({"source": {"paths": ["x.warc.gz"]}}, overrides, recipe_sections(), "test")


def in_force(setting, *languages, **settings):
    config = QualityConfig(**settings)
    limits = limits_by_setting(config, {}).get(setting)
    return limit_in_force(setting, getattr(config, setting, None), config.dialect, limits, languages)


def test_a_limit_that_is_not_set_has_its_value_and_its_origin():
    assert in_force("min_words", "en", "de") == "50 (default of the dialect datatrove)"
    assert in_force("min_alpha_words", "en") == "0.8 (default of the dialect datatrove)"
    several = "0.8 (default of the dialect datatrove; 2 languages have their own limits)"
    assert in_force("min_alpha_words", "en", "de", "ru") == several
    one = "0.01 (default of the dialect datatrove; 1 language has its own limit)"
    assert in_force("max_dup_line_chars", "en", "de", "zh") == one  # the limit of German is the default
    everything = "0.15 (default of the dialect datatrove; 3 languages have their own limits)"
    assert in_force("max_dup_5gram") == everything
    assert in_force("max_dup_line_char_frac", dialect="dolma") == "0.3 (default of the dialect dolma)"
    assert in_force("min_alpha_words", "ru", dialect="dclm") == "0.8 (default of the dialect dclm)"


def test_a_limit_of_the_recipe_is_the_limit_in_force():
    assert in_force("min_words", min_words=30) == "30"
    own = {"de": {"min_words": 20}}
    assert in_force("min_words", min_words=30, by_language=own) == "30 (1 language has its own limit)"
    assert in_force("min_words", "en", min_words=30, by_language=own) == "30"


def test_what_is_not_compared_has_no_limit_in_force():
    assert in_force("max_javascript") is None
    assert in_force("max_lorem_ipsum", rules=["gopher_quality"]) is None
    assert limit_in_force("dialect", None, "dclm", {}) is None


def test_every_limit_states_its_default():
    assert default_limit("min_words") == "If unset: the dialect's own limit, 50."
    assert (
        default_limit("min_alpha_words")
        == "If unset: the dialect's own limit, 0.8; 70 languages have their own, 0.359 to 0.729."
    )
    assert default_limit("max_dup_10gram") == "If unset: the dialect's own limit, 0.1; 1 language has its own, 0.2."
    assert (
        default_limit("max_dup_line_char_frac")
        == "If unset: the dialect's own limit, 0.2 (datatrove, dclm) or 0.3 (dolma)."
    )
    assert {rule.setting for sets in RULES.values() for rules in sets.values() for rule in rules} == LIMIT_NAMES


def test_a_limit_that_replaces_those_of_languages_is_noted():
    assert replacement_notes(recipe(LANGUAGES, "quality.min_alpha_words=0.7"), {}) == [
        "quality.min_alpha_words = 0.7 replaces limits of single languages:\n"
        "  0.7 is stricter for ru (0.611), zh (0.494)\n"
        "  0.7 is less strict for de (0.729)\n"
        "  To keep them and change English only, set this in its place: "
        "--set quality.by_language='{en = {min_alpha_words = 0.7}}'"
    ]
    # A rule that holds for every language: the limit stays for all others.
    assert replacement_notes(recipe(LANGUAGES, "quality.max_dup_5gram=0.2"), {}) == [
        "quality.max_dup_5gram = 0.2 replaces limits of single languages:\n"
        "  0.2 is stricter for zh (0.246)\n"
        "  To keep them, set this too: --set quality.by_language='{zh = {max_dup_5gram = 0.246}}'"
    ]


@pytest.mark.parametrize("limit", ["min_alpha_words", "max_dup_5gram"])
def test_the_advice_keeps_the_limits_of_the_languages(limit):
    given = recipe(LANGUAGES, f"quality.{limit}=0.2", "quality.by_language={ru = {min_words = 9}}")
    (note,) = replacement_notes(given, {})
    override = note.rpartition("--set ")[2].replace("'", "")
    kept = [] if limit == "min_alpha_words" else [f"quality.{limit}=0.2"]
    followed = recipe(LANGUAGES, override, *kept)
    assert replacement_notes(followed, {}) == []
    default, after = (limits_by_setting(each["quality"], {})[limit] for each in (recipe(LANGUAGES), followed))
    assert {name: after[name] for name in ("ru", "zh") if name in after} == {
        name: default[name] for name in ("ru", "zh") if name in default
    }
    assert after["en"] == 0.2
    assert limits_by_setting(followed["quality"], {})["min_words"]["ru"] == 9


def test_no_note_where_no_own_limit_is_replaced():
    assert replacement_notes(recipe(LANGUAGES), {}) == []
    assert replacement_notes(recipe("quality.min_alpha_words=0.7"), {}) == []  # English only
    assert replacement_notes(recipe(LANGUAGES, "quality.min_words=30"), {}) == []
    own = "quality.by_language={zh = {max_dup_line_chars = 0.087}}"
    assert replacement_notes(recipe(LANGUAGES, "quality.max_dup_line_chars=0.05", own), {}) == []
    two = recipe(LANGUAGES, "quality.min_alpha_words=0.7", "quality.max_dup_5gram=0.2")
    assert len(replacement_notes(two, {})) == 2
    assert len(replacement_notes(two, {}, ["max_dup_5gram"])) == 1


def test_a_what_if_states_both_limits_and_what_they_replace():
    committed, tried = recipe(LANGUAGES), recipe(LANGUAGES, "quality.min_alpha_words=0.7", "toxicity.max_words=0")
    changed = changed_settings(committed, tried)
    lines = describe_changes(committed, tried, changed, {})
    assert lines[:2] == (
        "quality.min_alpha_words: 0.8 (default of the dialect datatrove; 3 languages have their own limits) -> 0.7",
        "toxicity.max_words: unset -> 0",
    )
    assert lines[2].startswith("note: quality.min_alpha_words = 0.7 replaces limits of single languages:\n")
    # A limit that the run already had is no news.
    before, after = (
        recipe(LANGUAGES, "quality.min_alpha_words=0.7"),
        recipe(LANGUAGES, "quality.min_alpha_words=0.7", "quality.min_words=30", 'dedup.keep=["longest"]'),
    )
    assert describe_changes(before, after, changed_settings(before, after), {}) == (
        "quality.min_words: 50 (default of the dialect datatrove) -> 30",
        'dedup.keep: ["source_rank", "longest", "earliest"] -> ["longest"]',
    )
