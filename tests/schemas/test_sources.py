"""Recipes with several sources: each has its own sections, and every wrong setting is reported at once."""

from typing import ClassVar

import pytest
from pydantic import Field

from schemas.config import Section, build_recipe, own_key
from schemas.errors import ConfigError
from schemas.overrides import Unset, load_recipe, parse_recipe


class Options(Section):
    depth: int = 1


class Source(Section):
    own_sections = frozenset(("quality", "signature"))

    name: str = Field("web")
    paths: tuple[str, ...] = ()
    options: Options | None = None


class Quality(Section):
    REPLACES: ClassVar = {"min_lines": frozenset(("min_words",))}

    min_words: int = 50
    max_words: int = 100_000
    min_lines: int = 0


class Dedup(Section):
    near: bool = True


class Signature(Section):
    OWN_FIELDS: ClassVar = frozenset(("numbers",))

    numbers: str = "zero"
    seed: int = 1


KINDS = {"source": Source, "quality": Quality, "dedup": Dedup, "signature": Signature}
RECIPE = """
[[source]]
paths = ["a"]
[[source]]
name = "books"
paths = ["b"]
[source.quality]
min_words = 5
[quality]
min_words = 20
max_words = 99
"""


def recipe(text=RECIPE, overrides=()):
    return load_recipe(parse_recipe(text, "r.toml"), overrides, KINDS, "r.toml")


def test_a_source_has_the_sections_of_the_run_with_its_own_settings():
    found = recipe()
    assert found.sources == ("web", "books")
    web, books = found.by_source().values()
    assert (web["quality"].min_words, web["quality"].max_words) == (20, 99)
    assert (books["quality"].min_words, books["quality"].max_words) == (5, 99)
    assert (web["source"].paths, books["source"].paths) == (("a",), ("b",))
    assert (web.own, books.own) == (frozenset(), frozenset(("quality",)))
    assert books["dedup"] is found["dedup"]
    assert found.section_at(own_key("books", "quality")) is books["quality"]
    with pytest.raises(KeyError):
        found["source"]  # there is no one source of the run


def test_an_override_that_sources_replace_is_named():
    found = recipe(overrides=["quality.min_words=7"])
    assert [own["quality"].min_words for own in found.by_source().values()] == [7, 5]
    why = "because the recipe sets it for books; --set source.books.quality.min_words replaces that"
    assert found.notes == (f"--set quality.min_words does not apply to books, {why}",)
    assert recipe(overrides=["quality.max_words=7", "source.books.quality.min_words=3"]).notes == ()
    alone = '[source]\nname = "books"\npaths = ["a"]\n[source.quality]\nmin_words = 5'
    found = recipe(alone, ["quality.min_words=7"])
    assert found.of_source("books")["quality"].min_words == 5
    assert found.notes == (f"--set quality.min_words has no effect, {why}",)
    assert recipe(alone, ["source.books.quality.min_words=3"]).of_source("books")["quality"].min_words == 3


def test_an_own_setting_replaces_the_settings_of_the_run_that_it_excludes():
    found = recipe(RECIPE.replace("min_words = 5", "min_lines = 3")).of_source("books")
    assert (found["quality"].min_lines, found["quality"].min_words) == (3, 50)


def test_a_stored_recipe_reads_back_the_same():
    found = recipe()
    again = load_recipe(found.to_json(), (), KINDS, "run.json")
    assert again.to_json() == found.to_json()
    assert again.to_json()["source"][1] == {"name": "books", "paths": ["b"], "quality": {"min_words": 5}}
    assert [*again.differences(found)] == [*found.differences(found)]


def test_one_source_is_the_same_as_a_single_table():
    one = recipe('[[source]]\npaths = ["a"]\n[source.quality]\nmin_words = 7')
    assert one.to_json() == recipe('[source]\npaths = ["a"]\n[quality]\nmin_words = 7').to_json()
    assert not one.has_several_sources
    assert one.of_source("web") is one


def test_overrides_name_the_source():
    changes = ["source.books.paths=['c']", "source.books.quality.max_words=7", Unset("source.books.quality.min_words")]
    books = recipe(overrides=changes).of_source("books")
    assert (books["source"].paths, books["quality"].max_words, books["quality"].min_words) == (("c",), 7, 20)
    one = recipe('[source]\npaths = ["a"]', ["source.quality.min_words=3", "source.web.paths=['z']"])
    assert (one["quality"].min_words, one["source"].paths) == (3, ("z",))
    with pytest.raises(ConfigError, match=r"expected the name of a source, as in source.web.paths, source.books.paths"):
        recipe(overrides=["source.paths=['c']"])


def test_unset_adds_no_table_and_reports_wrong_names():
    one = '[source]\npaths = ["a"]\n'
    plain = recipe(one).to_json()
    for name in ("source.quality.min_words", "source.options.depth", "source.web.options.depth"):
        changed = recipe(one, [Unset(name)])
        assert (changed.to_json(), changed["source"].options) == (plain, None)
    assert recipe(overrides=[Unset("source.books.options.depth")]).to_json() == recipe().to_json()
    assert recipe(one + "[source.options]\ndepth = 3", [Unset("source.options.depth")])["source"].options.depth == 1
    wrong = ("source.quality.min_word", "source.web.pathz", "source.options.dept", "source.qualty.min_words")
    with pytest.raises(ConfigError) as error:
        recipe(one, map(Unset, wrong))
    lines = str(error.value).splitlines()
    assert [line.partition(" no such key ")[0].strip() for line in lines[1:5]] == [f"--unset {name}:" for name in wrong]
    assert ["min_words" in lines[1], "paths" in lines[2], "depth" in lines[3], "quality" in lines[4]] == [True] * 4


def test_every_wrong_setting_of_every_source_is_reported_at_once():
    raw = {
        "source": [
            {"name": "a", "pathz": [], "quality": {"min_word": 1}},
            {"name": "a", "dedup": {"near": False}, "quality": 3},
        ]
    }
    with pytest.raises(ConfigError) as error:
        build_recipe(raw, KINDS, "r.toml")
    message = str(error.value)
    assert "got 5 wrong" in message
    assert "[[source]]: expected a name of its own for each source, got 'a' more than once" in message
    assert "source.a.pathz: no such key (did you mean 'paths'?)" in message
    assert "source.a.quality.min_word: no such key (did you mean 'min_words'?)" in message
    assert (
        "source.dedup: expected a section that a source may have for itself (quality, signature), got [source.dedup]"
        in message
    )
    assert "source.quality: expected a table [source.quality], got 3" in message


def test_a_setting_that_all_sources_share_is_none_of_a_source():
    own = recipe(RECIPE + "\n[signature]\nseed = 3", ["source.books.signature.numbers=kept"])
    books = own.of_source("books")["signature"]
    assert (books.numbers, books.seed, own["signature"].numbers) == ("kept", 3, "zero")
    with pytest.raises(ConfigError) as error:
        recipe(overrides=["source.books.signature.seed=2", "source.books.signature.sed=2"])
    message = str(error.value)
    assert "got 2 wrong" in message
    assert (
        "source.signature.seed: expected a setting of [signature] that a source may have for itself (numbers), got "
        "seed = 2. Write signature.seed, for all sources"
    ) in message
    assert "source.books.signature.sed: no such key (did you mean 'seed'?)" in message


def test_recipes_with_other_sources_are_not_compared():
    rest = recipe(RECIPE.replace('[[source]]\npaths = ["a"]\n', ""))
    assert rest.sources == ("books",)
    assert rest["quality"].min_words == 5
    with pytest.raises(ConfigError, match="expected the same sources"):
        [*recipe().differences(rest)]
