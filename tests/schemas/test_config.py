"""Recipes: every wrong name at once with the nearest valid one, content and execution fields apart."""

import argparse
from typing import ClassVar

import pytest
from pydantic import Field

from schemas.config import Section, build_recipe, execution, location
from schemas.errors import ConfigError
from schemas.overrides import Unset, add_override_options, load_recipe, override_words, parse_recipe, parse_value


class Quality(Section):
    min_words: int = 50
    max_words: int = 100_000


class Language(Section):
    model: str = location("lid")
    languages: tuple[str, ...] = ("en",)
    threads: int = execution(1)


class Vocabulary(Section):
    REPLACES: ClassVar = {"file": {"size", "sample"}}

    file: str | None = location(None)
    size: int = 100
    sample: int = 7
    lower: bool = False


KINDS = {"quality": Quality, "language": Language, "vocabulary": Vocabulary}


def test_every_wrong_name_is_reported_with_the_nearest_valid_one():
    raw = {"qualty": {}, "quality": {"min_word": 3, "max_words": "many"}, "language": {"langages": ["de"]}}
    with pytest.raises(ConfigError) as error:
        build_recipe(raw, KINDS, "r.toml")
    message = str(error.value)
    assert message.startswith("r.toml: expected valid settings, got 4 wrong:\n  ")
    assert message.endswith("\nNothing was started. Correct them in the recipe, or with --set and --unset.")
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


class Rule(Section):
    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,59}$")
    when: str


class Rules(Section):
    array: ClassVar = "stages"
    stages: tuple[Rule, ...] = ()


class Filters(Section):
    rule: tuple[Rule, ...] = ()


MANY = {**KINDS, "stage": Rules, "filters": Filters}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[filters.rule]\nname = "a"\nwhen = "b"\n',
            "filters.rule: expected tables [[filters.rule]], got one table. Write [[filters.rule]]",
        ),
        (
            '[stage]\nname = "a"\nwhen = "b"\n',
            "stage: expected tables [[stage]], got one table [stage]. Write [[stage]]",
        ),
        (
            "[[quality]]\nmin_words = 3\n",
            "quality: expected a section [quality], got tables [[quality]]. Write [quality]",
        ),
        ('[[stage]]\nname = "a"\n', "stage.stages.0.when: expected a value, got none. Set `when`"),
        (
            '[[stage]]\nname = "A b"\nwhen = "x"\n',
            "stage.stages.0.name: expected lower-case letters, digits and _, the first one a letter, at most 60 "
            "characters, got 'A b'",
        ),
    ],
)
def test_messages_are_in_words(text, expected):
    with pytest.raises(ConfigError) as error:
        load_recipe(parse_recipe(text, "r.toml"), [], MANY, "r.toml")
    lines = str(error.value).splitlines()
    assert lines[:2] == ["r.toml: expected valid settings, got 1 wrong:", f"  {expected}"]
    assert len(lines) == 3


def test_a_wrong_setting_names_the_option_that_set_it():
    raw = {"quality": {"max_words": "many"}}
    with pytest.raises(ConfigError) as error:
        load_recipe({}, ["quality.min_word=30"], KINDS, "own/run.json")
    assert str(error.value) == (
        "command line: expected valid settings, got 1 wrong:\n  --set quality.min_word: no such key (did you mean "
        "'min_words'?)\nNothing was started. Correct the options."
    )
    with pytest.raises(ConfigError) as error:
        load_recipe(raw, ["quality.min_word=30"], KINDS, "own/run.json")
    lines = str(error.value).splitlines()
    assert lines[0] == "own/run.json: expected valid settings, got 2 wrong:"
    assert [line.split(":")[0] for line in lines[1:3]] == ["  quality.max_words", "  --set quality.min_word"]


def test_an_override_of_a_whole_section_names_a_key():
    with pytest.raises(ConfigError, match=r"got \"stage=\[\]\"|got 'stage=\[\]'") as error:
        load_recipe({}, ["stage=[]"], MANY, "r")
    assert str(error.value).endswith("Write it as --set 'stage.stages=[]'.")


@pytest.mark.parametrize("override", ["quality.min_words", "min_words=3", "=3", "quality.=3"])
def test_an_override_of_another_form_is_rejected(override):
    with pytest.raises(ConfigError, match=rf"expected section\.key=value, got {override!r}\. Write it as --set"):
        load_recipe({}, [override], KINDS, "r")


def parsed(*words: str) -> list[str]:
    """The overrides that a command line gives."""
    parser = argparse.ArgumentParser()
    add_override_options(parser)
    return parser.parse_args(words).overrides


def test_unset_removes_a_key_and_the_order_of_the_command_line_counts():
    raw = {"quality": {"min_words": 10, "max_words": 20}}
    unset, reset = ["--unset", "quality.min_words"], ["--set", "quality.min_words=30"]
    assert load_recipe(raw, parsed(*unset), KINDS, "r").to_json() == {"quality": {"max_words": 20}}
    assert load_recipe(raw, parsed(*unset), KINDS, "r")["quality"] == Quality(max_words=20)
    assert load_recipe(raw, parsed(*unset, *reset), KINDS, "r")["quality"] == Quality(min_words=30, max_words=20)
    assert load_recipe(raw, parsed(*reset, *unset), KINDS, "r")["quality"] == Quality(max_words=20)
    # A key that is not set stays so, and the same command can be repeated on what the first one stored.
    assert load_recipe({}, parsed(*unset), KINDS, "r").to_json() == {}
    assert raw == {"quality": {"min_words": 10, "max_words": 20}}


def test_overrides_become_words_of_a_command_line_again():
    words = ["--set", "quality.min_words=3", "--unset", "quality.max_words", "--set", "language.model=a b"]
    assert override_words(parsed(*words)) == words
    assert parsed(*override_words(parsed(*words))) == ["quality.min_words=3", Unset("quality.max_words"), words[-1]]


def test_a_wrong_unset_is_listed_with_the_other_wrong_settings():
    with pytest.raises(ConfigError) as error:
        load_recipe(
            {}, [Unset("qualty.min_words"), Unset("quality.min_word"), "language.langages=['de']"], KINDS, "r.toml"
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "command line: expected valid settings, got 3 wrong:"
    assert lines[1] == "  --unset qualty.min_words: no such section (did you mean 'quality'?)"
    assert lines[2] == "  --unset quality.min_word: no such key (did you mean 'min_words'?)"
    assert lines[3].startswith("  --set language.langages: no such key (did you mean 'languages'?)")


@pytest.mark.parametrize("override", ["quality", "quality.", ".min_words", "quality.min_words=3"])
def test_an_unset_of_another_form_is_rejected(override):
    with pytest.raises(ConfigError, match=rf"--unset: expected section\.key, got {override!r}\. Write it as --unset"):
        load_recipe({}, [Unset(override)], KINDS, "r")


def test_a_key_on_the_command_line_replaces_those_of_the_file_that_exclude_it():
    raw = {"vocabulary": {"size": 300, "sample": 9, "lower": True}}
    recipe = load_recipe(raw, ["vocabulary.file=a.json"], KINDS, "r")
    assert recipe.to_json() == {"vocabulary": {"file": "a.json", "lower": True}}
    assert recipe.notes == (
        "vocabulary.size and vocabulary.sample of the recipe are not used, because --set gives vocabulary.file",
    )
    # What the command line sets itself is kept, so that the section can reject the contradiction.
    recipe = load_recipe(raw, ["vocabulary.file=a.json", "vocabulary.size=5"], KINDS, "r")
    assert recipe.to_json() == {"vocabulary": {"file": "a.json", "size": 5, "lower": True}}
    assert recipe.notes == ("vocabulary.sample of the recipe is not used, because --set gives vocabulary.file",)
    written = {"vocabulary": {"file": "a.json", "size": 300}}
    assert load_recipe(written, ["vocabulary.lower=true"], KINDS, "r").notes == ()
    unset = load_recipe(raw, ["vocabulary.file=a.json", Unset("vocabulary.file")], KINDS, "r")
    assert (unset.to_json(), unset.notes) == (raw, ())


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


class Truths(Section):
    number: int = 1
    share: float | None = None
    numbers: dict[str, tuple[float, ...]] = Field({})
    near: bool = False
    mixed: dict[str, bool | int] = Field({})
    inner: Quality = Quality()


@pytest.mark.parametrize("value", ["number=true", "share=false", "numbers={a=[1, true]}", "inner={min_words=true}"])
def test_true_is_no_number(value: str) -> None:
    with pytest.raises(ConfigError, match="expected another value than true or false, got"):
        load_recipe({}, [f"truths.{value}"], {"truths": Truths}, "r")


def test_what_may_be_true() -> None:
    values = {"number": 0, "share": 1, "near": True, "mixed": {"a": True, "b": 3}, "inner": {"min_words": 1}}
    assert load_recipe({"truths": values}, [], {"truths": Truths}, "r")["truths"].mixed == {"a": True, "b": 3}
