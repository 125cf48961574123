"""Recipes by path, and shipped recipes by name."""

import re

import pytest

from jobs.cli import main
from jobs.recipe import (
    RECIPES,
    check_lengths,
    read_recipe,
    recipe_file,
    recipe_sections,
    shipped_recipes,
    stored_recipe,
)
from pipeline.export.card import published_recipe
from pipeline.sources.config import SourceConfig
from schemas.config import can_be_off
from schemas.errors import ConfigError
from schemas.storage import Store


def test_the_shipped_recipes_have_the_names_of_their_files():
    shipped = shipped_recipes()
    assert {"demo", "web"} <= {*shipped}
    assert list(shipped) == sorted(shipped)
    assert shipped["web"] == RECIPES / "web.toml"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("web", str(RECIPES / "web.toml")),
        ("web.toml", str(RECIPES / "web.toml")),
        ("jobs/recipes/web.toml", "jobs/recipes/web.toml"),
        ("folder/web", "folder/web"),
        ("wiki", "wiki"),
    ],
)
def test_a_name_without_a_folder_is_a_shipped_recipe(recipe, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()  # a run folder of this name is no recipe
    assert recipe_file(recipe) == expected


def test_a_file_here_precedes_the_shipped_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.toml").write_text('[source]\nname = "mine"\n')
    assert recipe_file("web.toml") == "web.toml"
    assert read_recipe("web.toml", ["source.paths=['x']"]).section("source", SourceConfig).name == "mine"
    assert read_recipe("web", ["source.paths=['x']"]).section("source", SourceConfig).name == "web"


def test_similar_names_are_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"recipe webb: .* \(did you mean 'web'\?\)\. Correct the path, or name"):
        read_recipe("webb", [])
    with pytest.raises(ConfigError, match=r"\(did you mean 'mine.toml'\?\)"):
        read_recipe("mien.toml", [])
    with pytest.raises(ConfigError, match=r"owm: expected a run folder, got no such folder \(did you mean '.*/own'"):
        stored_recipe(Store("owm"), [])


def test_an_unknown_recipe_is_an_error_that_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match=r"recipe wiki: expected a readable TOML file, got .* shipped recipe: c4, "):
        read_recipe("wiki", [])


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("train.seq_len=300", "train.seq_len"),
        ("tokens.chunk_tokens=2047", "train.seq_len"),
        ("train.stages=[{tokens=9000}, {seq_len=300}]", "train.stages[1].seq_len"),
    ],
)
def test_a_length_that_divides_no_chunk_is_found_before_the_data_are_read(setting, where):
    with pytest.raises(ConfigError, match=f"demo: {re.escape(where)}: expected a divisor of tokens.chunk_tokens"):
        check_lengths(read_recipe("demo", [setting]), "demo")
    check_lengths(read_recipe("demo", ["train.seq_len=1024", "train.stages=[{tokens=9000}, {seq_len=64}]"]), "demo")


def test_a_run_with_such_a_length_starts_nothing(tmp_path, capsys):
    words = ["run", "demo", "--out", str(tmp_path / "run"), "--set", "train.seq_len=300"]
    assert main([*words, "--set", "source.paths=['no_such.warc.gz']"]) == 2
    assert "demo: train.seq_len: expected a divisor of tokens.chunk_tokens = 2048, got 300" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


OFF_BY_NAME = [
    f"{section}.{key}"
    for section, kind in recipe_sections().items()
    for key, info in kind.model_fields.items()
    if can_be_off(info)
]
WITH_IT = {
    "decontaminate.max_pieces": ['decontaminate.evaluation_sets={q="q.jsonl"}', "decontaminate.action=cut"],
    "decontaminate.max_canaries": ["decontaminate.canaries=['GUID']"],
    "toxicity.max_cut_share": ["toxicity.action=cut_sentences"],
}
"""Settings without which others have no effect."""


@pytest.mark.parametrize("setting", OFF_BY_NAME)
def test_each_setting_whose_default_is_not_off_can_be_turned_off(setting, tmp_path, capsys):
    section, _, key = setting.partition(".")
    recipe = read_recipe("demo", ["source.paths=['x']", *WITH_IT.get(setting, []), f"{setting}=none"])
    assert getattr(recipe[section], key) is None
    (tmp_path / "own.toml").write_text(f'[source]\npaths = ["x"]\n[{section}]\n{key} = "none"\n')
    if setting not in WITH_IT:
        assert getattr(read_recipe(str(tmp_path / "own.toml"), [])[section], key) is None
    if key not in {"clip_norm", "straggler_factor"}:  # the card of a dataset has the settings of the data
        assert published_recipe(recipe)[section][key] == "none"
    assert main(["settings", setting]) == 0
    shown = capsys.readouterr().out
    assert 'number or "none"' in shown and '"none"' in shown.partition("\n      ")[2]


def test_the_settings_that_can_be_turned_off_are_those():
    assert {"optim.clip_norm", "guard.straggler_factor", "urls.max_soft_words", *WITH_IT} <= {*OFF_BY_NAME}
    with pytest.raises(ConfigError, match="quality.min_words: Input should be a valid integer"):
        read_recipe("demo", ["source.paths=['x']", "quality.min_words=none"])
