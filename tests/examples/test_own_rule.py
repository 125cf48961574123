"""The example with a stage and rules of a recipe: a run accepts it; its function and rules decide as expected."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from examples.own_rule.measure import measure
from jobs.recipe import read_recipe
from pipeline.prepare import prepare
from pipeline.quality.config import QualityConfig
from pipeline.quality.recipe_rules import check_rules
from schemas.config import Recipe
from schemas.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.tiny_archive import page

FOLDER = ROOT / "examples" / "own_rule"
OFFERS = "Lamp 12 € now. Chair $45.00 now. Table 99,90 EUR now. Vase £7 now. Rug ¥800 now. Bed 300 USD now, only today."
SHOP = pa.field("prices", pa.int32()), pa.field("prices_per_100_words", pa.float32())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example beside a small archive."""
    return Path(shutil.copytree(FOLDER, tmp_path / "own_rule", ignore=shutil.ignore_patterns("__pycache__")))


def recipe_in(folder: Path) -> Recipe:
    """The recipe of the example, with an archive of its own."""
    (folder / "one.warc").write_bytes(page(1))
    return read_recipe(str(folder / "recipe.toml"), [f"source.paths=['{folder}/one.warc']"])


def test_a_run_accepts_the_recipe(folder: Path) -> None:
    steps = prepare(recipe_in(folder), "verdicts").steps
    (documents,) = [step for step in steps if step.name == "documents"]
    (shop,) = [stage for stage in documents.stages if stage.name == "shop"]
    assert [(column.name, column.type) for column in shop.columns] == [(field.name, field.type) for field in SHOP]


def test_a_wrong_column_or_reason_is_reported_before_anything_starts(folder: Path) -> None:
    path = folder / "recipe.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("prices >= 5", "price >= 5"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"quality.rule price_list: when: expected the name of a column .*'prices'"):
        prepare(recipe_in(folder), "verdicts")
    path.write_text(text.replace("{ min_words = 20 }", "{ least = 20 }"), encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a function that accepts"):
        prepare(recipe_in(folder), "verdicts")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OFFERS, {"prices": 6, "prices_per_100_words": 6 / 23 * 100}),
        ("A text in the year 2024 with 12 eggs.", {"prices": 0, "prices_per_100_words": None}),
        ("12 34\n***", "no_letters"),
    ],
)
def test_what_the_function_returns(text: str, expected: dict[str, Any] | str) -> None:
    assert measure(text, {"language": "en"}) == expected


def test_what_the_rules_drop(folder: Path) -> None:
    config = recipe_in(folder).section("quality", QualityConfig)

    def broken(**signals: float) -> list[tuple[Any, ...]]:
        return [tuple(rule) for rule in check_rules(signals, config, "en", SHOP)]

    assert broken(prices=5, prices_per_100_words=4.5) == [("price_list", None, None)]
    assert broken(prices=4, prices_per_100_words=4.5) == broken(prices=5, prices_per_100_words=4) == []
    assert broken(code_lines=0.31, gopher_stop_words=3) == [("code", None, None)]
    assert broken(c4_curly_brackets=9) == []


def test_the_signals_of_the_rules_are_those_of_the_package() -> None:
    code = "for (i = 0; i < 9; i++) {\n  print(i);\n}\n" * 20
    signals = penstock.signals(code, language="en", families=["gopher_quality", "markup"])
    assert (signals["code_lines"], signals["gopher_stop_words"]) == (1, 0)
