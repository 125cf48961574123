"""Tests of the settings and the checks of the stage `templates`."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs.recipe import recipe_sections
from pipeline.engine.rules import evaluate_row
from pipeline.stages import CHECKED, MEASURED, STEPS, checked_stages, steps_for
from pipeline.steps.verdicts import split_columns
from pipeline.templates.stage import TEMPLATES, TemplatesConfig, chars_left
from pipeline.templates.step import measured_again
from schemas.config import Recipe
from schemas.errors import ConfigError
from schemas.overrides import load_recipe
from schemas.tables import MEASURED_AGAIN, TABLES
from schemas.tables import TEMPLATES as SCHEMA


def recipe(*overrides: str) -> Recipe:
    return load_recipe({}, ['source.paths=["x"]', *overrides], recipe_sections(), "test")


def test_pages_needed_is_the_larger_of_the_number_and_the_share() -> None:
    config = TemplatesConfig(min_share=0.3, min_pages=5)
    # 30 % of 16 pages are 4.8 pages, of 17 are 5.1, of 20 exactly 6, of 21 are 6.3
    assert [config.pages_needed(pages) for pages in (10, 16, 17, 20, 21, 1000)] == [5, 5, 6, 6, 7, 300]
    assert TemplatesConfig(min_share=0.1, min_pages=2).pages_needed(30) == 3  # 0.1 * 30 is above 3 in floating point
    assert TemplatesConfig(min_share=1.0).pages_needed(12) == 12


@pytest.mark.parametrize("name", ["min_pages", "min_host_pages", "min_left_chars"])
def test_settings_that_would_be_ignored_are_refused(name: str) -> None:
    assert recipe("templates.min_share=0.3", f"templates.{name}=7")
    with pytest.raises(ConfigError, match=f"got {name} without min_share. Set templates.min_share, such as 0.3"):
        recipe(f"templates.{name}=7")


@pytest.mark.parametrize("value", ["0", "1.01", "-0.5"])
def test_a_share_is_above_0_and_at_most_1(value: str) -> None:
    with pytest.raises(ConfigError, match=r"templates\.min_share"):
        recipe(f"templates.min_share={value}")


def test_recipes_without_templates_have_neither_the_step_nor_the_stage() -> None:
    def places(wanted: Recipe) -> list[str]:
        return [step.name for step in steps_for(wanted) if TEMPLATES in step.stages]

    assert places(recipe()) == []
    assert not any(step.is_used(recipe()) for step in STEPS if step.name == "templates")
    used = recipe("templates.min_share=0.3")
    assert places(used) == ["templates", "verdicts", "repeats"]
    assert [step.name for step in STEPS if step.is_used(used)][:2] == ["documents", "templates"]
    assert checked_stages(used)[0] is TEMPLATES
    assert TEMPLATES not in checked_stages(recipe())
    assert CHECKED[0] is TEMPLATES


def test_every_step_that_reads_documents_or_texts_reads_templates() -> None:
    later = [step for step in STEPS if {"documents", "text"} & {*step.reads} and step.name != "templates"]
    assert [step.name for step in later if "templates" not in step.reads] == []
    assert len(later) == 8


def test_all_that_a_stage_measures_on_the_text_is_measured_again() -> None:
    stages = measured_again(MEASURED)
    assert [stage.name for stage in stages] == ["quality", "decontaminate", "toxicity", "signature"]
    added = {name for stage in stages for name in stage.adds if name[0] != "_"} - {"cuts"}
    declared = {column.name for stage in stages for column in stage.columns}
    assert added - declared <= {*SCHEMA.names}
    assert {*MEASURED_AGAIN} - added == {"num_chars", "body_chars"}
    assert TABLES["templates"].measured_again


CHECKS = TEMPLATES.checks(TemplatesConfig(min_share=0.3, min_left_chars=50), {}, {})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"num_chars": 50, "template_chars": 9, "remainder_drop": None}, None),
        ({"num_chars": 49, "template_chars": 9, "remainder_drop": None}, ("little_left", 49.0, 50.0)),
        ({"num_chars": 0, "template_chars": 900, "remainder_drop": None}, ("little_left", 0.0, 50.0)),
        ({"num_chars": 49, "template_chars": 0, "remainder_drop": None}, None),  # nothing was cut
        ({"num_chars": 49, "template_chars": None, "remainder_drop": None}, None),
    ],
)
def test_a_document_is_dropped_if_the_cuts_leave_little(row: dict[str, Any], expected: Any) -> None:
    assert evaluate_row(CHECKS, row | {"language": "en"}) == expected


def test_a_document_is_dropped_if_a_stage_drops_the_rest() -> None:
    row = {"num_chars": 500, "template_chars": 0, "remainder_drop": "mine/too_sad", "language": "en"}
    reason, value, limit = evaluate_row(CHECKS, row) or ("", 0.0, 0.0)
    assert reason == "remainder"
    assert np.isnan([value, limit]).all()
    assert TEMPLATES.checks(TemplatesConfig(), {}, {}) == ()


def test_what_is_left_is_unknown_for_documents_without_cuts() -> None:
    columns = {"num_chars": pa.array([9, 9, 9, None]), "template_chars": pa.array([1, 0, None, 1])}
    left = chars_left(pa.RecordBatch.from_pydict(columns))
    assert left[0] == 9
    assert np.isnan(left[1:]).all()


def test_columns_are_read_from_the_tables_that_have_them() -> None:
    names = ["doc_id", "num_chars", "template_chars", "perplexity"]
    assert split_columns(names, {}) == {"documents": ["doc_id", "num_chars"]}
    assert split_columns(names, {"templates": None, "scores": None}) == {
        "documents": ["doc_id", "num_chars"],
        "templates": ["template_chars"],
        "scores": ["perplexity"],
    }
