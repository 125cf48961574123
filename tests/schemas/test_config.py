"""Recipes: every wrong name at once with the nearest valid one, content and execution fields apart."""

import pytest

from schemas.config import Section, build_recipe, execution, load_recipe, location, parse_recipe, parse_value
from schemas.errors import ConfigError


class Quality(Section):
    min_words: int = 50
    max_words: int = 100_000


class Language(Section):
    model: str = location("lid")
    languages: tuple[str, ...] = ("en",)
    threads: int = execution(1)


KINDS = {"quality": Quality, "language": Language}


def test_every_wrong_name_is_reported_with_the_nearest_valid_one():
    raw = {"qualty": {}, "quality": {"min_word": 3, "max_words": "many"}, "language": {"langages": ["de"]}}
    with pytest.raises(ConfigError) as error:
        build_recipe(raw, KINDS, "r.toml")
    message = str(error.value)
    assert message.startswith("r.toml: expected valid settings, got 4 wrong:\n  ")
    assert message.endswith("\nNothing was started. Correct them in the recipe or with --set.")
    assert "[qualty]: no such section (did you mean 'quality'?)" in message
    assert "quality.min_word: no such key (did you mean 'min_words'?)" in message
    assert "quality.max_words" in message
    assert "'many'" in message
    assert "language.langages: no such key (did you mean 'languages'?)" in message


def test_overrides_win_over_the_file_and_take_toml_values_or_plain_text():
    raw = parse_recipe("[quality]\nmin_words = 10\n", "r")
    overrides = ["quality.min_words=30", "language.languages=['de','zh']", "language.model=lid.176.ftz"]
    recipe = load_recipe(raw, overrides, KINDS, "r")
    assert recipe["quality"] == Quality(min_words=30)
    assert recipe["language"] == Language(languages=("de", "zh"), model="lid.176.ftz")
    assert raw == {"quality": {"min_words": 10}}


@pytest.mark.parametrize("override", ["quality.min_words", "min_words=3", "=3", "quality.=3"])
def test_an_override_of_another_form_is_rejected(override):
    with pytest.raises(ConfigError, match=rf"expected section\.key=value, got {override!r}\. Write it as --set"):
        load_recipe({}, [override], KINDS, "r")


def test_only_content_fields_enter_the_fingerprint():
    content = Language(model="/a/lid", threads=1).content()
    assert content == Language(model="/b/lid", threads=8).content() == {"languages": ["en"]}
    assert content != Language(languages=("de",)).content()


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Quality().min_words = 3


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("0.5", 0.5), ("true", True), ("a b", "a b"), ("[1,2]", [1, 2])])
def test_values(text, value):
    assert parse_value(text) == value


def test_bad_toml_names_the_file():
    with pytest.raises(ConfigError, match=r"r\.toml: expected valid TOML, got an error: .*\. Correct the TOML there\."):
        parse_recipe("[quality\n", "r.toml")


def test_a_stored_recipe_holds_what_was_set_and_reads_back_the_same():
    recipe = load_recipe({"quality": {"min_words": 10}}, ["language.threads=4"], KINDS, "r")
    assert recipe.to_json() == {"quality": {"min_words": 10}, "language": {"threads": 4}}
    assert dict(build_recipe(recipe.to_json(), KINDS, "stored")) == dict(recipe)
