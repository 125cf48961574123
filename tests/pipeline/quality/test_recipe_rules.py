"""Rules of a recipe: wrong ones are reported before a run, verdicts by hand, and what-if, report and show read them."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import recipe_sections
from pipeline.engine.results import SUMMED
from pipeline.inspect.document_text import format_document
from pipeline.inspect.show import find_documents, parse_where
from pipeline.inspect.whatif_limits import changed_settings, curves_of, sensitivity_part
from pipeline.inspect.without_rules import leave_out_rules
from pipeline.perplexity.paragraphs import PARAGRAPHS
from pipeline.plant.stage import PLANT
from pipeline.prepare import Prepared, step_identity
from pipeline.quality.config import QualityConfig
from pipeline.quality.recipe_rules import BrokenRule, check_rules
from pipeline.quality.rules import REASONS
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import drops_by_rule
from pipeline.report.signals import charts
from pipeline.stages import (
    DOCUMENT_COLUMNS,
    STEPS,
    canonical_recipe,
    checked_stages,
    declared_reasons,
    reasons_of_run,
    steps_for,
)
from pipeline.steps.verdicts import VerdictsTask, checks_of, limits_of, verdicts_part
from pipeline.templates.stage import TEMPLATES
from schemas.config import build_recipe
from schemas.errors import ConfigError
from schemas.manifest import open_table
from schemas.overrides import load_recipe
from schemas.storage import Store
from tests.support.checked_paths import written_part
from tests.support.report_run import make_run
from tests.support.step_run import add_step

CODE = {"name": "no_code", "when": "code_lines > 0.3", "reason": "It is code."}
BOTH = {"name": "odd", "when": "code_lines > 0.1 and language == 'en' or num_chars <= 2", "reason": "It is odd."}
FAMILIES = ["gopher_repetition", "gopher_quality", "c4", "fineweb", "markup"]


def values(*rules, **settings):
    return {"source": {"paths": ["x.warc.gz"]}, "quality": {"families": FAMILIES, "rule": [*rules], **settings}}


def recipe(*rules, **settings):
    return build_recipe(values(*rules, **settings), recipe_sections(), "test")


# Wrong rules.


@pytest.mark.parametrize(
    ("rules", "settings", "message"),
    [
        ([CODE, CODE], {}, "rule: expected each name once, got 'no_code' more than once."),
        ([CODE | {"name": "gopher_short_doc"}], {}, "expected a new name, got 'gopher_short_doc', which is a built-in"),
        (
            [CODE | {"name": "No code"}],
            {},
            "quality.rule.0.name: expected lower-case letters, digits and _",
        ),
        ([CODE | {"whn": "x"}], {}, "quality.rule.0.whn: no such key (did you mean 'when'?)"),
        (
            [{"name": "a", "when": "num_chars > 1"}],
            {},
            "quality.rule.0.reason: expected a value, got none.",
        ),
        ([CODE | {"reason": ""}], {}, "quality.rule.0.reason: String should have at least 1 character"),
        ([], {"skip_rules": ["c4_curly_brackt"]}, "got 'c4_curly_brackt' (did you mean 'c4_curly_bracket'?)"),
        ([], {"skip_rules": ["c4_javascript"]}, "expected rules in use, got 'c4_javascript', which no chosen rule set"),
        ([], {"skip_rules": ["c4_lorem_ipsum"] * 2}, "skip_rules: expected each name once, got 'c4_lorem_ipsum'"),
        (
            [],
            {"skip_rules": ["c4_curly_bracket"], "max_curly_brackets": 3},
            "max_curly_brackets: expected the limit of a rule in use",
        ),
    ],
)
def test_wrong_names_are_reported_with_the_recipe(rules, settings, message) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(*rules, **settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (
            {"when": "code_line > 0.3"},
            {},
            "quality.rule no_code: when: expected the name of a column at character 1 of",
        ),
        ({"when": "code_lines > 'a'"}, {}, "expected a number at character 14 of `code_lines > 'a'`, got text 'a'"),
        ({"when": "drop_rule = a"}, {}, "got 'drop_rule'"),
        (
            {"when": "num_chars > 9 and meta.score > 3"},
            {},
            "quality.rule no_code: when: expected columns that every row has, got 'meta.score', a field of `meta`, "
            "which only conditions on a finished run can name. Declare a column in a [[stage]] whose function",
        ),
        (
            {},
            {"families": FAMILIES[:4]},
            "when: expected columns that the recipe measures, got 'code_lines' of the family 'markup'. "
            "Add 'markup' to quality.families.",
        ),
        ({"when": "perplexity > 900"}, {}, "got 'perplexity'. Set the models of [perplexity]."),
        ({"when": "toxicity_score > 0.5"}, {}, "got 'toxicity_score'. Set toxicity.classifier."),
        ({"when": "canaries > 0"}, {}, "got 'canaries'. Set decontaminate.canaries."),
        ({"when": "repeated_lines_cut > 3"}, {}, "got 'repeated_lines_cut'. Set quality.cut_repeated_lines."),
        ({"name": "near_duplicate"}, {}, "expected a new name, got 'near_duplicate', which is a reason of [dedup]."),
        ({"name": "toxic_words"}, {}, "expected a new name, got 'toxic_words', which is a reason of [toxicity]."),
    ],
)
def test_wrong_conditions_are_reported_before_a_run(rule, settings, message) -> None:
    wrong = recipe(CODE | rule, **settings)
    for check in (steps_for, checked_stages):
        with pytest.raises(ConfigError) as error:
            check(wrong)
        assert message in str(error.value)


def test_a_rule_looks_for_a_part_of_a_text() -> None:
    rule = {"name": "print_page", "when": "url contains 'print=' and mime not contains pdf", "reason": "It is printed."}
    config = QualityConfig(rule=[rule], rules=[])
    for url, mime, is_dropped in (
        ("https://a.example/?print=1", "text/html", True),
        ("https://a.example/?Print=1", "text/html", False),
        ("https://a.example/?print=1", "application/pdf", False),
        ("https://a.example/?print=1", None, False),
        (None, "text/html", False),
    ):
        broken = check_rules({"url": url, "mime": mime}, config, "en")
        assert [each.reason for each in broken] == ["print_page"] * is_dropped, (url, mime)
    like = QualityConfig(rule=[rule | {"when": "url like '%?print=%'"}], rules=[])
    for url, is_dropped in (("https://a.example/?print=1", True), ("https://a.example/print=1", False), (None, False)):
        assert len(check_rules({"url": url, "mime": "text/html"}, like, "en")) == is_dropped
    with pytest.raises(ConfigError, match="Write url contains 'text'"):
        steps_for(recipe(rule | {"when": "url ilike '%print%'"}))


def test_all_wrong_conditions_are_reported_at_once() -> None:
    rules = [
        {"name": f"r{n}", "when": when, "reason": "x"} for n, when in enumerate(["a > 1", "num_chars > 1", "b > 1"])
    ]
    with pytest.raises(ConfigError) as error:
        steps_for(recipe(*rules))
    assert "quality.rule r0" in str(error.value)
    assert "quality.rule r2" in str(error.value)
    assert "quality.rule r1" not in str(error.value)


# Verdicts.


def document(number, **columns):
    return {"doc_id": bytes([number]) * 16, "source": "web", "language": "en", "body_chars": 10} | columns


@pytest.fixture
def task(tmp_path):
    def make(rows, own):
        pq.write_table(pa.Table.from_pylist(rows, DOCUMENT_COLUMNS), tmp_path / "documents.parquet")
        part = written_part(0, {"documents": Store(str(tmp_path))}, {"documents": "documents.parquet"})
        return VerdictsTask(part, checked_stages(own), own, {}, {}, Store(str(tmp_path / "verdicts")))

    return make


def test_rules_drop_after_the_built_in_ones_with_value_and_limit(task) -> None:
    equal = {"name": "equal", "when": "num_chars = 7", "reason": "x"}
    rows = [
        document(1, code_lines=0.3),  # the limit, rounded to float32 as the column is
        document(2, code_lines=0.31),
        document(3, code_lines=0.2),
        document(4, code_lines=0.2, language="de"),
        document(5, num_chars=2, language=None),
        document(6, code_lines=0.9, gopher_num_words=1),
        document(7, num_chars=7),
        document(8),
        document(9, code_lines=0.9, drop_stage="extract", drop_rule="no_text"),
    ]
    job = task(rows, recipe(CODE, BOTH, equal))
    answer = verdicts_part(job, False)
    found = {
        row["doc_id"][0]: (row["drop_stage"], row["drop_rule"], row["drop_value"], row["drop_limit"])
        for row in pq.read_table(job.folder.path(answer.files["verdicts"].path)).to_pylist()
    }
    near = pytest.approx
    assert found == {
        1: ("quality", "odd", None, None),
        2: ("quality", "no_code", near(0.31), near(0.3)),
        3: ("quality", "odd", None, None),
        4: (None,) * 4,
        5: ("quality", "odd", None, None),
        6: ("quality", "gopher_short_doc", 1, 50),
        7: ("quality", "equal", 7, 7),
        8: (None,) * 4,
    }
    dropped = answer.counts.dropped
    assert {name: count for name, count in dropped.items() if count} == {
        "quality/no_code": 1,
        "quality/odd": 3,
        "quality/equal": 1,
        "quality/gopher_short_doc": 1,
    }
    assert set(dropped) == {f"{stage.name}/{reason}" for stage in job.stages for reason in stage.verdicts}
    assert answer.counts.rows_in == answer.counts.rows_kept + 6
    drawn = [f"quality/{rule}" for rule in ("no_code", "odd", "equal")]
    assert [name for name in drawn if name in answer.figures["distributions"]] == ["quality/no_code"]
    assert answer.figures["beyond"]["quality/odd"] == {"en": 4, "*": 1}


def test_a_rule_that_drops_nothing_is_counted_as_zero(task) -> None:
    answer = verdicts_part(task([document(1)], recipe(CODE)), False)
    assert answer.counts.dropped["quality/no_code"] == 0


def test_only_comparisons_with_a_number_have_a_limit() -> None:
    rules = [
        CODE,
        BOTH,
        {"name": "few", "when": "5 >= num_chars", "reason": "x"},
        {"name": "equal", "when": "num_chars = 7", "reason": "x"},
    ]
    own = recipe(*rules)
    limits = limits_of(checks_of(checked_stages(own), own, {}, {}))
    described = {name: limits[f"quality/{name}"] for name in ("no_code", "few")}
    setting = {"setting": "quality.rule"}
    assert described == {
        "no_code": setting | {"column": "code_lines", "side": "max", "limits": {"*": 0.3}},
        "few": setting | {"column": "num_chars", "side": "min", "limits": {"*": 5.0}},
    }
    assert not {"quality/odd", "quality/equal"} & limits.keys()


def test_skipped_rules_drop_nothing_and_a_rule_can_exempt_pages_with_code(task) -> None:
    braces = {"name": "braces", "when": "c4_curly_brackets > 0 and code_lines < 0.1", "reason": "Not code."}
    rows = [document(n, c4_curly_brackets=1, code_lines=share) for n, share in ((1, 0.2), (2, 0.0))]
    own = recipe(braces, skip_rules=["c4_curly_bracket"])
    dropped = verdicts_part(task(rows, own), False).counts.dropped
    assert (dropped["quality/braces"], dropped["quality/c4_curly_bracket"]) == (1, 0)


# What-if, fingerprints, ablation.


def test_a_what_if_may_change_rules_and_has_curves_of_strict_comparisons(task) -> None:
    committed = recipe()
    override = 'quality.rule=[{name="no_code", when="code_lines > 0.3", reason="It is code."}]'
    tried = load_recipe(
        committed.to_json(), [override, 'quality.skip_rules=["c4_curly_bracket"]'], recipe_sections(), "x"
    )
    assert changed_settings(committed, tried) == {
        "quality.rule": ([], [CODE]),
        "quality.skip_rules": ([], ["c4_curly_bracket"]),
    }
    few, upto = (
        {"name": n, "when": when, "reason": "x"} for n, when in (("few", "num_chars < 5"), ("upto", "num_chars <= 1"))
    )
    own = recipe(CODE, BOTH | {"when": "not num_chars > 0"}, few, upto)
    rows = [document(n, code_lines=n / 10, num_chars=n) for n in range(1, 9)]
    job = task(rows, own)
    curves = {curve.reason: curve for curve in curves_of(job, sensitivity_part(job, False)[SUMMED]["alone"])}
    assert not {"odd", "upto"} & curves.keys()
    assert (curves["no_code"].setting, dict(curves["no_code"].limits)) == ("quality.rule", {"*": 0.3})
    assert curves["few"].points == ((2, 2), (3, 1))  # documents 2 and 3 pass the other rules


def identities(own):
    known = canonical_recipe(own)
    run = Prepared(known, (), (), {})
    return {step.name: step_identity(run, step, {}) for step in steps_for(known)}


def test_a_rule_changes_the_fingerprint_of_verdicts_only() -> None:
    none, one = identities(recipe()), identities(recipe(CODE))
    assert {name for name in none if none[name] != one[name]} == {"verdicts"}
    spelled = CODE | {"when": "( code_lines>.3 )"}
    assert identities(recipe(spelled)) == one
    assert identities(recipe(CODE | {"when": "code_lines > 0.31"}))["verdicts"] != one["verdicts"]
    skipped = identities(recipe(skip_rules=["c4_curly_bracket"]))
    assert {name for name in none if none[name] != skipped[name]} == {"verdicts"}


def test_recipes_without_rules_have_the_settings_that_they_had() -> None:
    assert not {"rule", "skip_rules"} & QualityConfig().decisions().keys()
    # these stages are in the steps of recipes that use them only
    optional = (TEMPLATES, PARAGRAPHS, PLANT)
    listed = [tuple(stage for stage in step.stages if stage not in optional) for step in STEPS]
    assert [step.stages for step in steps_for(recipe())] == listed


def test_a_rule_can_be_left_out() -> None:
    def load(raw):
        return build_recipe(raw, recipe_sections(), "test")

    left = leave_out_rules(values(CODE, BOTH), ["quality.no_code"], load)["quality"]
    assert [rule["name"] for rule in left["rule"]] == ["odd"]
    assert "rule" not in leave_out_rules(values(CODE), ["quality.no_code"], load)["quality"]
    left = leave_out_rules(values(skip_rules=["c4_curly_bracket"]), ["quality.c4"], load)["quality"]
    assert "skip_rules" not in left


# Report and show.


def test_report_and_show_print_the_reason_of_the_recipe(tmp_path) -> None:
    run = make_run(tmp_path / "run", "dedup")
    rule = {"name": "long_page", "when": "num_chars > 950", "reason": "It is long."}
    before = open_table(run, "verdicts")[1].content.counts
    add_step(run, "verdicts", {"quality": {"rule": [rule]}})
    counts = open_table(run, "verdicts")[1].content.counts
    assert before.rows_kept > 0
    facts = collect_facts(run)
    drops = drops_by_rule(facts, declared_reasons(facts.tables))
    (row,) = [row for row in drops["quality"] if row.rule == "long_page"]
    assert (row.count, row.meaning) == (counts.dropped["quality/long_page"], "It is long.")
    assert row.count > 0
    (chart,) = [chart for chart in charts(facts, drops)["quality"] if chart.rule == "long_page"]
    assert (chart.meaning, chart.setting, chart.side, chart.dropped) == (
        "It is long.",
        "quality.rule",
        "max",
        row.count,
    )
    reasons = reasons_of_run(run)
    assert reasons["quality/long_page"] == "It is long."
    assert reasons["quality/gopher_short_doc"] == "too few words"
    (found,) = find_documents(run, parse_where("drop_rule = long_page"), 1)
    first = format_document(found, False, meanings=reasons).splitlines()[0]
    assert re.fullmatch(r"document \w{32}  dropped by quality/long_page \(1000, limit 950\): It is long\.", first), (
        first
    )
    assert "quality/long_page" not in reasons_of_run(make_run(tmp_path / "other", "dedup"))


# The function for values in hand.


def test_check_rules_lists_every_broken_rule() -> None:
    config = QualityConfig.model_validate({"rule": [CODE, BOTH]})
    signals = {"gopher_num_words": 49, "code_lines": 0.5, "gopher_alpha_words": 0.1}
    near = pytest.approx
    assert check_rules(signals, config, "en") == [
        ("gopher_short_doc", 49, 50),
        ("gopher_alpha_words", near(0.1), near(0.8)),
        ("no_code", near(0.5), near(0.3)),
        ("odd", None, None),
    ]
    assert [broken.reason for broken in check_rules(signals, config, "xx")] == ["gopher_short_doc", "no_code"]
    assert check_rules({"gopher_num_words": 50}, QualityConfig(), "en") == []
    assert check_rules({}, QualityConfig(), "en") == []
    own = QualityConfig.model_validate({"rule": [CODE | {"when": "my_words > 1"}]})
    more = [pa.field("my_words", pa.int32())]
    assert check_rules({"my_words": 2}, own, "en", more) == [BrokenRule("no_code", 2, 1)]
    with pytest.raises(ConfigError, match=r"got 'code_line' \(did you mean 'code_lines'\?\)"):
        check_rules({"code_line": 1}, config, "en")


def test_reasons_of_built_in_rules_stay_a_closed_list() -> None:
    assert declared_reasons({})["quality"] == REASONS
