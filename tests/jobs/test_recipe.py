"""Recipes by path, and shipped recipes by name."""

import re

import pytest

from jobs.cli import main
from jobs.recipe import (
    RECIPES,
    read_recipe,
    read_values,
    recipe_file,
    recipe_sections,
    shipped_recipes,
    stored_recipe,
)
from jobs.verbs.run import check_training
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


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "mine.toml").write_text('[source]\nname = "mine"\n', encoding="utf-8-sig")
    assert read_values(str(tmp_path / "mine.toml")) == {"source": {"name": "mine"}}


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
    with pytest.raises(ConfigError, match=f"{re.escape(where)}: expected a divisor of tokens.chunk_tokens"):
        check_training(read_recipe("demo", [setting]), "demo")
    check_training(read_recipe("demo", ["train.seq_len=1024", "train.stages=[{tokens=9000}, {seq_len=64}]"]), "demo")


def test_the_default_length_is_compared_with_the_chunks_too(tmp_path):
    (tmp_path / "r.toml").write_text('[source]\npaths = ["x"]\n[tokens]\nchunk_tokens = 256\n')
    with pytest.raises(ConfigError, match=r"train.seq_len: expected a divisor of tokens.chunk_tokens = 256, got 512"):
        check_training(read_recipe(str(tmp_path / "r.toml"), []), "r.toml")
    check_training(read_recipe(str(tmp_path / "r.toml"), ["train.stages=[{seq_len=64}]"]), "r.toml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.device=h101"], "device: expected one of "),
        (["plan.usd=5", "cluster.device=h100-sxm"], "plan.usd = 5: expected a price of a device hour"),
        (["plan.gpu_hours=1"], "plan.gpu_hours: expected the peak FLOP/s of a device"),
        (["plan.law=own", "plan.law_file=gone.json"], "gone.json"),
        (["train.init_from=gone"], "train.init_from: expected a folder, got gone, which does not exist"),
        (["plan.parametrization=mup"], "plan.parametrization = mup: expected a learning rate"),
        (["plan.parametrization=mup", "optim.optimizer=lamb", "optim.learning_rate=1"], "got lamb"),
        (["guard.patience=2", "train.eval_every=0"], "guard.patience = 2: expected held-out losses"),
        (["train.epochs={web=9}"], "train.epochs: expected at most plan.max_epochs = "),
        (["plan.window=64", "plan.window_pattern=SL", "train.objective=mlm"], "plan.window: expected an objective"),
        (["plan.model=none_such"], "plan.model: expected one of moe"),
        (["plan.model=moe", "train.freeze=['blocks']"], "train.freeze: expected a transformer of Penstock, got plan"),
        (["train.freeze=['block.0']"], "train.freeze: expected the beginning of the name of a parameter"),
        (["train.freeze=['*']"], "train.freeze: expected parameters that are trained"),
        (["plan.num_layers=2", "train.freeze=['blocks.2']"], "got 'blocks.2'"),
        (["train.profile='10'"], "train.profile: expected steps FIRST-LAST"),
        (["train.steps=9", "train.profile=9-10"], "train.profile: expected steps of the run, 1 to 9"),
        (["train.skip_file=../skips.txt"], "train.skip_file: expected a file below the run's train folder"),
        (["train.weights={web=1, books=2}"], "train.weights: expected sources of the recipe, got 'books'"),
        (["train.epochs={wev=1}"], "train.epochs: expected sources of the recipe, got 'wev' (did you mean 'web'?)"),
        (["train.stages=[{tokens=9000}, {weights={boks=1}}]"], "train.stages[1].weights: expected sources of the"),
        (["plan.d_model=100", "plan.num_heads=7"], "plan"),
        (
            ["train.objective=span", "train.document_mask=false", "train.mask_share=0.5", "train.mean_span=1"],
            "train.mean_span: expected at",
        ),
    ],
)
def test_training_settings_that_suit_no_dataset_are_found_before_the_data_are_read(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_training(read_recipe("demo", settings), "demo")


def test_layers_that_the_plan_may_choose_and_sources_of_repeated_documents_can_be_named():
    values = ["train.freeze=['blocks.30', 'embedding']", "train.weights={web=1, 'web+x3'=2}", "train.profile=2-9"]
    check_training(read_recipe("demo", values), "demo")


def test_all_of_them_are_in_one_message():
    wrong = ["cluster.device=h101", "guard.patience=2", "train.eval_every=0", "train.seq_len=300"]
    with pytest.raises(ConfigError, match=r"demo: 3 problem\(s\); nothing was started") as caught:
        check_training(read_recipe("demo", wrong), "demo")
    assert all(name in str(caught.value) for name in ("h101", "guard.patience", "got 300"))


@pytest.mark.parametrize("recipe", sorted(shipped_recipes()))
def test_no_shipped_recipe_has_such_settings(recipe):
    sources = read_values(recipe).get("source", {})
    names = [f"{table['name']}." for table in sources] if isinstance(sources, list) else [""]
    check_training(read_recipe(recipe, [f"source.{name}paths=['x']" for name in names]), recipe)


@pytest.mark.parametrize("flags", [["--like", "run"], ["--core-hour-usd", "1"], ["--gb-month-usd", "0"]])
@pytest.mark.parametrize("verb", [["run"], ["stage", "documents"]])
def test_options_of_an_estimate_need_a_dry_run(verb, flags, tmp_path, capsys):
    (tmp_path / "x.warc").write_text("")
    words = [*verb, "demo", "--out", str(tmp_path / "run"), "--set", f"source.paths=['{tmp_path}/x.warc']", *flags]
    assert main(words) == 2
    assert f"{flags[0]}: expected --dry-run with it, got none" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_with_such_a_length_starts_nothing(tmp_path, capsys):
    words = ["run", "demo", "--out", str(tmp_path / "run"), "--set", "train.seq_len=300"]
    assert main([*words, "--set", "source.paths=['no_such.warc.gz']"]) == 2
    assert "train.seq_len: expected a divisor of tokens.chunk_tokens = 2048, got 300" in capsys.readouterr().err
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
    assert shown.count('"none"') == 2  # in the type and in the meaning


def test_the_settings_that_can_be_turned_off_are_those():
    assert {"optim.clip_norm", "guard.straggler_factor", "urls.max_soft_words", *WITH_IT} <= {*OFF_BY_NAME}
    with pytest.raises(ConfigError, match=r"quality\.min_words: Input should be a valid integer"):
        read_recipe("demo", ["source.paths=['x']", "quality.min_words=none"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["text.sample_share=0.5"], "sample_share: expected text.dropped = 'sample' with it, got 'keep'"),
        (["language.excerpts=0", "language.excerpt_chars=80"], "excerpt_chars: expected language.excerpts of at least"),
        (["language.excerpts=0", "language.min_second_share=0.3"], "min_second_share: expected language.excerpts"),
        (["toxicity.wordlists={}", "toxicity.measures=['hate']"], "measures: expected at least one word list"),
        (["bias.kinds=['page']", "bias.min_terms=5"], "min_terms: expected identity among the kinds, got ['page']"),
        (
            ["repeats.units=['substring']", "repeats.on_substring='drop'", "repeats.min_left_chars=50"],
            "min_left_chars (ignored with on_substring 'drop', which cuts nothing)",
        ),
    ],
)
def test_a_setting_that_other_settings_leave_without_effect_is_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_recipe("demo", ["source.paths=['x']", *settings])
