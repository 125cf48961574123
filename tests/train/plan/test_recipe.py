"""The recipes llama and modern: what they set, that a setting takes precedence, and that older plans do not change."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from schemas.errors import ConfigError
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.plan import PlanConfig
from train.config.recipe import MODERN, resolve_recipe, with_recipe
from train.config.settings import Settings, load_settings
from train.model.shape import choose_shape, num_parameters, sized_parameters
from train.plan.make_plan import make_plan
from train.plan.plan import read_plan, read_settings, settings_beyond_recipe, write_plan

OLDER = ROOT / "tests" / "fixtures" / "runs" / "0.1.0"


def resolved(**sections: dict[str, Any]) -> Settings:
    """Return the settings of a recipe file with these sections, as a plan stores them."""
    return resolve_recipe(with_recipe(load_settings(sections, [], "test")))


def test_a_recipe_file_without_a_recipe_is_llama() -> None:
    values = {name: section for name, section in resolved().to_json().items() if section}
    assert values == {"plan": {"recipe": "llama", "qk_norm": True}, "optim": {"z_loss": 1e-5}}


def test_modern_sets_every_part() -> None:
    settings = resolved(plan={"recipe": "modern"}, train={"seq_len": 1024})
    plan, optim = settings.to_json()["plan"], settings.to_json()["optim"]
    assert plan == {"recipe": "modern", "qk_norm": True, "window": 256} | dict(MODERN["plan"])
    assert optim == {"z_loss": 1e-5} | dict(MODERN["optim"])
    assert resolve_recipe(settings) == settings


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("plan", {"qk_norm": False, "activation": "gelu", "value_embeddings": 0, "logit_softcap": None}),
        ("plan", {"window_pattern": ""}),
        ("plan", {"window_pattern": "SL", "window": 5}),
        ("optim", {"z_loss": 0.0, "optimizer": "lamb"}),
        ("optim", {"muon_coefficients": "polar_express", "optimizer": "muon"}),
    ],
)
def test_a_setting_takes_precedence(section: str, values: dict[str, Any]) -> None:
    given = {section: values, "plan": {"recipe": "modern"} | (values if section == "plan" else {})}
    settings = resolved(**given)
    assert {name: getattr(getattr(settings, section), name) for name in values} == values


@pytest.mark.parametrize("sections", [{"plan": {"positions": "relative"}}, {"train": {"objective": "mlm"}}])
def test_modern_leaves_out_windows_where_attention_has_none(sections: dict[str, Any]) -> None:
    settings = resolved(**(sections | {"plan": {"recipe": "modern"} | sections.get("plan", {})}))
    assert (settings.plan.window_pattern, settings.plan.window) == ("", None)
    assert settings.plan.value_embeddings == MODERN["plan"]["value_embeddings"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"window_pattern": "SL"}, "window_pattern = SL requires window"),
        ({"window": 8}, "window requires window_pattern with an S"),
        ({"window_pattern": "L", "window": 8}, "window requires window_pattern with an S"),
        ({"window_pattern": "S", "window": 8, "positions": "relative"}, "window requires positions = rope"),
        ({"window_pattern": "SX", "window": 8}, "window_pattern"),
    ],
)
def test_a_window_without_effect_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({"plan": plan}, [], "test")


def test_all_heads_have_keys_below_a_billion_parameters() -> None:
    small, large = (choose_shape(size, 32_000, PlanConfig(recipe="llama")) for size in (5e8, 3e9))
    assert small.num_kv_heads == small.num_heads > 4
    assert large.num_kv_heads < large.num_heads
    assert choose_shape(5e8, 32_000, PlanConfig()).num_kv_heads < small.num_kv_heads
    assert choose_shape(5e8, 32_000, PlanConfig(recipe="llama", num_kv_heads=2)).num_kv_heads == 2


def test_value_embeddings_do_not_count_as_size() -> None:
    plain, modern = (choose_shape(1e8, 32_000, PlanConfig(recipe="llama", value_embeddings=n)) for n in (0, 2))
    assert modern.model_copy(update={"value_embeddings": 0}) == plain
    tables = -(-modern.num_layers // 2) * 32_000 * modern.key_width
    assert num_parameters(modern) == num_parameters(plain) + tables
    assert sized_parameters(modern) == num_parameters(plain)


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run with a tiny dataset, whose recipe is modern."""
    run = make_tiny_dataset(tmp_path / "run")
    recipe = {"plan": {"recipe": "modern", "logit_softcap": 20.0}, "train": {"seq_len": 64}}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    return run


def test_a_plan_stores_what_the_recipe_sets(run: Store) -> None:
    dataset = open_dataset(run)
    write_plan(run, make_plan(run, dataset, read_settings(run, dataset, [])))
    plan = read_plan(run)
    assert (plan.shape.activation, plan.shape.logit_softcap, plan.shape.window) == ("relu2", 20.0, 16)
    assert plan.settings.optim.optimizer == "normuon"
    # The settings of the plan give the same plan, and nothing in it was set by an earlier command.
    assert make_plan(run, dataset, read_settings(run, dataset, [])).model_dump() == plan.model_dump(
        exclude={"digest"}
    ) | {"digest": None}
    assert settings_beyond_recipe(run) == []


def test_windows_of_attention_to_both_sides_are_refused(run: Store) -> None:
    sections = {"plan": {"window_pattern": "S", "window": 8}, "train": {"seq_len": 64, "objective": "mlm"}}
    with pytest.raises(ConfigError, match=r"plan\.window: expected an objective with causal attention"):
        make_plan(run, open_dataset(run), load_settings(sections, [], "test"))


def test_a_plan_of_an_earlier_version_keeps_its_model(tmp_path: Path) -> None:
    """The run was trained without normalized queries and z-loss; planned again, it still fits its checkpoint."""
    shutil.copytree(OLDER, tmp_path / "run")
    before = read_plan(Store(str(tmp_path / "run")))
    # The precision of its device is not part of its plan.
    assert main(["plan", str(tmp_path / "run"), "--set", "train.precision=fp32", "--quiet"]) == 0
    after = read_plan(Store(str(tmp_path / "run")))
    assert after.shape == before.shape
    assert not after.shape.qk_norm
    assert (after.settings.plan.recipe, after.settings.optim.z_loss) == (None, 0.0)
