"""Stages of a recipe: what a run rejects before it starts, what a function may return, and a run with one on Spark."""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jobs.recipe import read_recipe, recipe_sections
from jobs.verbs.ablate import steps_of
from jobs.verbs.dvc import deciding_settings
from pipeline.engine.failures import CALLS, FAILURE, Failure
from pipeline.engine.spark import run_tasks, ship_models
from pipeline.engine.worker import FusedStages, local_models
from pipeline.inspect.document_text import format_document
from pipeline.inspect.show import columns_of_run, find_documents, parse_where
from pipeline.inspect.whatif import predict
from pipeline.inspect.whatif_limits import changed_settings
from pipeline.prepare import COMPILED, Prepared, find_models, step_identity
from pipeline.recipe_stages import FUNCTION, SECTION, RecipeStage, load_function, sample_row, without_quotes
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks, drops_by_rule
from pipeline.stages import (
    DOCUMENT_COLUMNS,
    declared_columns,
    declared_reasons,
    document_columns,
    reasons_of_run,
    steps_for,
)
from pipeline.summary import closing_summary
from schemas.config import build_recipe
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.manifest import open_table, read_run
from schemas.overrides import load_recipe
from tests.support.paths import ROOT

GOOD = """
from dataclasses import dataclass
import numpy as np

@dataclass
class Count:
    value: int

def measure(text, row, sign="?", most=3):
    if row["language"] == "fr":
        raise ValueError("no French")
    if text.count(sign) > most:
        return "too_curious"
    return {"curious": np.float64(text.count(sign) / 3), "first": text[:2], "marks": Count(text.count(sign)).value}
"""
COLUMNS = {"curious": "float32", "first": "string", "marks": "int32"}


@pytest.fixture
def stage(tmp_path):
    """A function that writes a file and returns the values of a stage that uses it."""

    def make(code=GOOD, name="curiosity", function="measure", **settings):
        (tmp_path / "mine.py").write_text(code)
        values = {"columns": COLUMNS, "reasons": {"too_curious": "too many questions"}} | settings
        return {"name": name, "function": f"{tmp_path}/mine.py:{function}", **values}

    return make


def recipe(*stages, **sections):
    raw = {"source": {"paths": ["x.warc.gz"]}, "stage": [*stages], **sections}
    return build_recipe(raw, recipe_sections(), "test")


def prepared(tmp_path, *stages):
    """The stages of the recipe with the paths of the copies of their files, as a run prepares them."""
    own = recipe(*stages, models={"cache": str(tmp_path / "cache")})
    (step,) = [step for step in steps_for(own) if step.name == "documents"]
    of_recipe = tuple(stage for stage in step.stages if stage.config is RecipeStage)
    (empty,) = [each for each in steps_for(own) if each.name == "verdicts"]
    paths = find_models(own, [type(empty)(writes=("x",), stages=of_recipe, reads=(), build=empty.build)])
    return own, of_recipe, {stage: {name: model.path for name, model in m.items()} for stage, m in paths.items()}


def row(**columns):
    return {"doc_id": bytes(16), "_body": "Who? What?", "language": "en"} | columns


# Wrong stages.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "quality"}, "[[stage]] quality: expected a name that no section has, got 'quality'."),
        ({"name": "Mine"}, "stage.stages.0.name: expected lower-case letters, digits and _"),
        ({"function": "mine"}, "expected 'path/to/file.py:function' or 'module:function'"),
        ({"columns": {"curious": "float"}}, "stage.stages.0.columns.curious.type: Input should be 'float32'"),
        ({"columns": {"curious": {"type": "int32", "mean": "x"}}}, "no such key (did you mean 'meaning'?)"),
        ({"columns": {"_x": "int32"}}, "columns: expected names of lower-case letters, digits and _"),
        ({"columns": {"null": "int32"}}, "that are not reserved, got 'null'"),
        ({"reasons": {"failed": "x"}}, "reasons: expected names of lower-case letters, digits and _"),
        ({"columns": {}, "reasons": {}}, "columns, reasons: expected at least one of them"),
        ({"sample": 1}, "stage.stages.0.sample: no such key"),
        ({"version": 0}, "stage.stages.0.version: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_reported_with_the_recipe(stage, settings, message) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(stage() | settings)
    assert message in str(error.value)


def test_names_are_new_and_used_once(stage) -> None:
    with pytest.raises(ConfigError, match="name: expected each name once, got curiosity more than once"):
        recipe(stage(), stage())
    for taken in ("language", "gopher_num_words", "text", "perplexity", "cluster", "title"):
        with pytest.raises(ConfigError, match=f"expected new names of columns, got '{taken}'"):
            steps_for(recipe(stage(columns={taken: "int32"})))
    with pytest.raises(ConfigError, match="curiosity2: expected new names of columns, got 'curious'"):
        steps_for(recipe(stage(), stage(name="curiosity2")))
    with pytest.raises(ConfigError, match="takedown: expected another name"):
        steps_for(recipe(stage(name="takedown")))
    rule = {"name": "too_curious", "when": "marks > 1", "reason": "x"}
    with pytest.raises(ConfigError, match=r"got 'too_curious', which is a reason of \[curiosity\]"):
        steps_for(recipe(stage(), quality={"rule": [rule]}))


@pytest.mark.parametrize(
    ("code", "settings", "message"),
    [
        ("def measure(text, row:\n", {}, "expected Python in mine.py, got an error in line 1: "),
        (
            "import no_such_package\n",
            {},
            "got ModuleNotFoundError: No module named 'no_such_package' in line 1 of mine.py",
        ),
        ("x = 1 / 0\n", {}, "got ZeroDivisionError: division by zero in line 1 of mine.py"),
        ("def mesure(text, row): ...\n", {}, "a function 'measure' in mine.py, got none (did you mean 'mesure'?)"),
        ("measure = 3\n", {}, "expected a function 'measure' in mine.py, got none"),
        ("def measure(text): ...\n", {}, "a function that accepts (text, row), got measure(text): too many positional"),
        (
            GOOD,
            {"settings": {"sing": "!"}},
            "accepts (text, row, sing), got measure(text, row, sign='?', most=3): got an",
        ),
        (
            "def measure(text, row):\n    return words\n",
            {},
            "got NameError: name 'words' is not defined in line 2 of mine.py",
        ),
        ("def measure(text, row): return row['lang']\n", {}, "got KeyError: 'lang' in line 1 of mine.py"),
        ("def measure(text, row): return row['code_lines'] > 1\n", {}, "got TypeError"),  # `markup` is not measured
        (
            "def measure(text, row): return None\n",
            {},
            "on a sample text: expected a dict of columns or a reason, got None",
        ),
        ("def measure(text, row): return {'curios': 1}\n", {}, "got 'curios' (did you mean 'curious'?)"),
        (
            "def measure(text, row): return {'curious': 'x'}\n",
            {},
            "column curious: expected a finite number or None, got 'x'",
        ),
        (
            "def measure(text, row): return 'too_long'\n",
            {},
            "expected a declared reason ('too_curious'), got 'too_long'",
        ),
    ],
)
def test_wrong_functions_are_reported_before_a_run(tmp_path, stage, code, settings, message) -> None:
    with pytest.raises(ConfigError) as error:
        prepared(tmp_path, stage(code, **settings))
    assert str(error.value).startswith("[[stage]] curiosity: ")
    assert message in str(error.value)


@pytest.mark.parametrize("function", ["nowhere.py:f", "no_such_module:f", "no.such.module:f", "math:sqrt"])
def test_a_missing_file_is_reported(tmp_path, stage, function) -> None:
    with pytest.raises(ConfigError, match="expected a Python file for the function"):
        prepared(tmp_path, stage() | {"function": function})


# What a function may return.


def results(tmp_path, stage, *rows):
    own, stages, paths = prepared(tmp_path, stage)
    fused = FusedStages(stages, own, paths)
    return [fused(dict(each)) for each in rows], fused


def test_columns_drops_and_failures(tmp_path, stage) -> None:
    drop = "from pipeline.engine.stage import Drop\ndef measure(text, row): return Drop('too_curious', 4, 3.5)\n"
    (plain, curious, french), _ = results(tmp_path, stage(), row(), row(_body="????"), row(language="fr"))
    assert {name: plain[name] for name in COLUMNS} == {"curious": float(np.float32(2 / 3)), "first": "Wh", "marks": 2}
    assert "drop_stage" not in plain
    assert (curious["drop_stage"], curious["drop_rule"]) == ("curiosity", "too_curious")
    assert (french["drop_stage"], french["drop_rule"]) == ("curiosity", "failed")
    assert french[FAILURE] == Failure("curiosity", "ValueError", "mine.py:11", "no French")
    assert [each[CALLS] for each in (plain, curious, french)] == [["curiosity"]] * 3
    ((dropped,), _) = results(tmp_path, stage(drop), row())
    assert (dropped["drop_rule"], dropped["drop_value"], dropped["drop_limit"]) == ("too_curious", 4.0, 3.5)


def test_settings_are_keyword_arguments(tmp_path, stage) -> None:
    ((found,), _) = results(tmp_path, stage(settings={"sign": "W"}), row())
    assert found["marks"] == 2


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("float32", "0.1", float(np.float32(0.1))),
        ("float32", "np.float32(0.5)", 0.5),
        ("float32", "3", 3.0),
        ("float64", "0.1", 0.1),
        ("int32", "np.int64(7)", 7),
        ("int64", "2**62", 2**62),
        ("string", "'é'", "é"),
        ("bool", "np.bool_(True)", True),
        ("float32", "None", None),
        ("float32", "True", "a finite number or None, got True"),
        ("float32", "float('nan')", "a finite number or None, got nan"),
        ("float32", "1e300", "a finite number or None, got np.float32(inf)"),
        ("float64", "10**400", "a finite number or None, got 1000"),
        ("float64", "'1'", "a finite number or None, got '1'"),
        ("int32", "2**31", "int32 or None, got 2147483648"),
        ("int32", "1.0", "int32 or None, got 1.0"),
        ("int32", "True", "int32 or None, got True"),
        ("bool", "1", "bool or None, got 1"),
        ("string", "b'x'", "string or None, got b'x'"),
        ("string", "'\\ud800'", "string or None, got '\\ud800'"),
    ],
)
def test_values_are_of_the_declared_type(tmp_path, stage, kind, value, stored) -> None:
    code = f"import numpy as np\ndef measure(text, row):\n    return {{'x': {value} if text == 'now' else None}}\n"
    own = stage(code, columns={"x": kind})
    if not isinstance(stored, str) or (kind == "string" and len(stored) == 1):
        ((found,), _) = results(tmp_path, own, row(_body="now"))
        assert found["x"] == stored
        return
    with pytest.raises(ContractError) as error:
        results(tmp_path, own, row(_body="now"))
    assert f"[[stage]] curiosity: measure on document {'0' * 32}: column x: expected {stored}" in str(error.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{'other': 1}", "expected only declared columns, got 'other' (did you mean 'x'?)"),
        ("[1]", "expected a dict of columns or a reason, got [1]"),
        ("None", "expected a dict of columns or a reason, got None"),
        ("'bad'", "expected a declared reason ('too_curious'), got 'bad'"),
        ("Drop('too_curious', 'many')", "drop: expected a finite number or None, got 'many'"),
    ],
)
def test_a_wrong_result_ends_the_run_and_names_the_document(tmp_path, stage, answer, message) -> None:
    code = (
        "from pipeline.engine.stage import Drop\n"
        f"def measure(text, row):\n    return {answer} if text == 'now' else {{}}\n"
    )
    own, stages, paths = prepared(tmp_path, stage(code, columns={"x": "int32"}))
    fused = FusedStages(stages, own, paths)
    assert "drop_stage" not in fused(row())
    with pytest.raises(ContractError) as error:
        fused(row(_body="now", doc_id=bytes([171]) * 16))
    assert f"measure on document {'ab' * 16}" in str(error.value)
    assert message.replace(" (did you mean 'x'?)", "") in str(error.value)


def test_a_stage_without_columns_may_return_none(tmp_path, stage) -> None:
    ((found,), _) = results(tmp_path, stage("def measure(text, row): return None\n", columns={}), row())
    assert "drop_stage" not in found


def test_a_row_has_every_column_and_those_of_earlier_stages(tmp_path, stage) -> None:
    code = "def measure(text, row): return {'seen': ' '.join(sorted(row)), 'before': row['marks']}\n"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/later.py").write_text(code)
    later = {
        "name": "later",
        "function": f"{tmp_path}/other/later.py:measure",
        "columns": {"seen": "string", "before": "int32"},
    }
    own, stages, paths = prepared(tmp_path, stage(), later)
    found = FusedStages(stages, own, paths)(row(_secret=1))
    assert found["before"] == 2
    assert {"url", "gopher_num_words", "signature", "text_digest", "curious"} <= set(found["seen"].split())
    assert not {"_body", "_secret", "drop_rule"} & set(found["seen"].split())


def test_the_sample_has_the_columns_that_the_recipe_measures() -> None:
    sample = sample_row(DOCUMENT_COLUMNS, {"code_lines"})
    assert sample["code_lines"] is None
    assert {"body_chars", "second_language"} <= {name for name, value in sample.items() if value is None}
    arrays = {name: [value] for name, value in sample.items() if not isinstance(value, dict)}
    schema = pa.schema([field for field in DOCUMENT_COLUMNS if field.name in arrays])
    assert pa.table(arrays, schema).num_rows == 1  # every value is of its column's type


@pytest.mark.parametrize(
    ("message", "text", "expected"),
    [
        ("boom", "the boom of a gun", "boom"),
        ("no French", "Voici un texte", "no French"),
        ("invalid literal for int() with base 10: '12,50 EUR'", "It costs 12,50 EUR for you", ""),
        ("bad name Jane Doe", "written by Jane Doe in May", "bad name …"),
        ("no user jane@example.org here", "mail jane@example.org", "no user … here"),
        ("cannot parse the ship left the harbour", "And the ship left the harbour.", "cannot parse …"),
        ("'price'", "no such word", "'price'"),
        ("got 'a\\nJane'", "a Jane", "got '…'"),
        ("'jane@example.org' of jane doe, may", "Jane@Example.org, Jane Doe, May", "'…' of …"),
        ("invalid literal for int() with base 10: '4930901820'", "call +49 30 901820", ""),
        ("bad number 4930901820 or jane%40example.org", "+49 (30) 901820 Jane@Example.Org", "bad number … or …"),
        ("index 10 is out of range", "1, 0", "index 10 is out of range"),
        ("x" * 300, "y", "x" * 160 + "…"),
    ],
)
def test_messages_quote_nothing_of_a_document(message, text, expected) -> None:
    assert without_quotes(message, text) == (expected or "invalid literal for int() with base 10: '…'")


def test_the_limit_of_failures_changes_no_fingerprint(tmp_path, stage) -> None:
    own = recipe(stage(), models={"cache": str(tmp_path / "cache")})
    other = recipe(stage(max_failed_share=0.5), models={"cache": str(tmp_path / "cache")})
    assert own["curiosity"].content() == other["curiosity"].content()
    with pytest.raises(ConfigError, match="max_failed_share"):
        recipe(stage(max_failed_share=1.5))


# Recipes, fingerprints, commands.


def test_columns_have_a_meaning_a_unit_and_an_order(stage) -> None:
    own = recipe(stage(columns={"b": {"type": "float32", "meaning": "m", "unit": "u"}, "a": "string"}))
    added = [*document_columns(own)][len(DOCUMENT_COLUMNS) :]
    assert [field.name for field in added] == ["a", "b"]
    assert added[1].metadata == {b"meaning": b"m", b"unit": b"u"}
    assert [*document_columns(load_recipe(own.to_json(), [], recipe_sections(), "x"))] == [*document_columns(own)]


def test_functions_are_looked_up_in_the_folder_of_the_recipe(tmp_path, monkeypatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for path in ("a/near.py", "b/near.py", "b/far.py"):
        (tmp_path / path).write_text(GOOD)
    monkeypatch.chdir(tmp_path / "b")
    texts = [
        f'[[stage]]\nname = "s{n}"\nfunction = "{function}:measure"\nreasons = {{x{n} = "x"}}\n'
        for n, function in enumerate(["near.py", "near", "far.py", "json", "nowhere.py"])
    ]
    (tmp_path / "a/r.toml").write_text('[source]\npaths = ["x"]\n' + "".join(texts))
    own = read_recipe(str(tmp_path / "a/r.toml"), [])
    assert [each.function for each in own[SECTION].stages] == [
        f"{tmp_path}/a/near.py:measure",
        f"{tmp_path}/a/near.py:measure",
        f"{tmp_path}/b/far.py:measure",
        "json:measure",
        "nowhere.py:measure",
    ]
    assert own["s0"] is own[SECTION].stages[0]
    assert "s0" not in list(own)


def identity(tmp_path, *stages):
    own, _, _ = prepared(tmp_path, *stages)
    steps = [step for step in steps_for(own) if step.name in ("documents", "verdicts")]
    measured = find_models(
        own, [type(steps[0])(("x",), tuple(s for s in steps[0].stages if s.config is RecipeStage), (), print)]
    )
    run = Prepared(own, (), (), measured)
    return [step_identity(run, step, {}) for step in steps]


def test_the_content_of_the_file_and_the_settings_are_in_the_fingerprint(tmp_path, stage) -> None:
    first = identity(tmp_path, stage())
    assert identity(tmp_path, stage()) == first
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/other.py").write_text(GOOD)
    moved = stage() | {"function": f"{tmp_path}/moved/other.py:measure"}
    assert identity(tmp_path, moved) == first  # the path does not matter
    twice = GOOD + "\nagain = measure\n"
    seen = [first[0]]
    for code, settings in (
        (GOOD + "\n", {}),
        (twice, {}),
        (twice, {"function": "again"}),
        (GOOD, {"settings": {"sign": "!"}}),
        (GOOD, {"version": 2}),
        (GOOD, {"reasons": {"too_curious": "other words"}}),
        (GOOD, {"columns": COLUMNS | {"first": {"type": "string", "meaning": "m"}}}),
    ):
        seen.append(identity(tmp_path, stage(code, **settings))[0])
    assert len(set(seen)) == len(seen)
    assert identity(tmp_path) != first


def test_a_what_if_rejects_another_stage_and_ablate_and_dvc_see_it(stage) -> None:
    before, after = recipe(), recipe(stage())
    with pytest.raises(ConfigError, match=r"stage\.stages: it changes what is measured, or the text itself"):
        changed_settings(before, after)
    assert steps_of(before, after)[0] == ("documents", True)
    assert steps_of(after, before)[0] == ("documents", True)
    assert not any(again for _, again in steps_of(after, after))
    rule = {"name": "many", "when": "marks > 1", "reason": "x"}
    settings = deciding_settings(recipe(stage(), quality={"rule": [rule]}))
    assert settings["documents"]["documents"]["settings"]["curiosity"]["function"].endswith("mine.py:measure")
    assert json.dumps(settings)


def test_the_examples_of_the_pages_are_valid(tmp_path) -> None:
    code = 'def questions(text, row, sign="?"): return {"question_marks": text.count(sign)}\n'
    (tmp_path / "my_filters.py").write_text(code)
    for page, first in (("rule.md", "[quality]\nskip_rules"), ("stage.md", "[[stage]]")):
        text = (ROOT / "docs/extend" / page).read_text()
        (example,) = [
            block for block in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S) if block.startswith(first)
        ]
        assert page == "rule.md" or code.split(": return")[0] in example
        path = tmp_path / "r.toml"
        path.write_text('[source]\npaths = ["x"]\n' + example)
        own = read_recipe(str(path), [f"models.cache={tmp_path}/cache"])
        assert steps_for(own)
        for stage in own[SECTION].stages:
            (declared,) = [each for step in steps_for(own)[:1] for each in step.stages if each.name == stage.name]
            assert load_function(declared.models(stage)[FUNCTION], stage)("a? b?", {}) == {"question_marks": 2}


# On Spark.


@pytest.mark.parametrize("is_listed", [False, True])
def test_another_file_in_the_place_of_the_copy_is_not_run(tmp_path, stage, is_listed) -> None:
    """A process that can write to the cache can also write its list of digests."""
    _, _, paths = prepared(tmp_path, stage())
    copy = Path(paths["curiosity"][FUNCTION])
    copy.write_text("raise SystemExit('not the file of the recipe')")
    if is_listed:
        listed = {f"{copy.parent.name}/{copy.name}": hashlib.sha256(copy.read_bytes()).hexdigest()}
        (copy.parent.parent / COMPILED).write_text(json.dumps(listed))
    copy = Path(prepared(tmp_path, stage())[2]["curiosity"][FUNCTION])
    assert copy.read_text() == (tmp_path / "mine.py").read_text()


@pytest.mark.spark
def test_workers_run_the_copy_of_the_file(spark, tmp_path, stage, monkeypatch) -> None:
    """Once Spark has sent the copy, neither the user's file nor the driver's copy is needed, as on a cluster."""
    own, stages, paths = prepared(tmp_path, stage())
    monkeypatch.setattr("pipeline.engine.spark.on_this_machine", lambda session: False)
    ship_models(spark, [paths["curiosity"][FUNCTION]])
    run_tasks(spark, lambda task, retried: {}, [0], "test", None)  # Spark sends files with the first task
    for path in (tmp_path / "mine.py", Path(paths["curiosity"][FUNCTION])):
        os.unlink(path)

    def measure(task, retried):
        found = FusedStages(stages, own, local_models(paths))(dict(task))
        return {"marks": found["marks"], "rows": 1}

    assert run_tasks(spark, measure, [row(), row(_body="?")], "test", None) == [
        {"marks": 2, "rows": 1},
        {"marks": 1, "rows": 1},
    ]


@pytest.mark.spark
def test_a_run_with_a_stage_and_a_rule_on_its_column(run_at, spark, tmp_path, stage) -> None:
    values = stage(columns=COLUMNS | {"curious": {"type": "float32", "meaning": "question marks", "unit": "thirds"}})
    values |= {"settings": {"sign": ":", "most": 2}, "max_failed_share": 1}
    own = f"stage.stages=[{toml(values)}]"
    run = run_at(2, [own], until="dedup")
    columns = columns_of_run(run)
    assert columns.field("curious").metadata == {b"meaning": b"question marks", b"unit": b"thirds"}
    documents = open_table(run, "documents")[1]
    assert documents.content.counts.dropped["curiosity/failed"] > 0
    (failed,) = documents.run.notes["errors"].items()
    french = [found["doc_id"] for found in find_documents(run, parse_where("drop_rule = failed", columns), 9999)]
    assert failed == (
        "curiosity: ValueError at mine.py:11",
        {"count": len(french), "document": min(french).hex(), "message": "no French"},
    )
    failure = f"ValueError: no French (mine.py:11), {len(french)} document(s), such as {min(french).hex()}"
    calls = documents.run.notes["calls"]["curiosity"]
    assert f"stage curiosity failed on {len(french)} of {calls} document(s): {failure}" in (
        closing_summary(run, "dedup", 1.0).text()
    )
    assert reasons_of_run(run)["curiosity/failed"] == failure
    assert documents.content.models["curiosity/function"]
    (kept,) = find_documents(run, parse_where("marks = 1 and drop_stage is null", columns), 1)
    assert "  curious                    0.333333 thirds" in format_document(kept, False, columns).splitlines()
    dropped = list(find_documents(run, parse_where("drop_rule = too_curious", columns), 999))
    assert len(dropped) == documents.content.counts.dropped["curiosity/too_curious"] > 0
    shown = format_document(dropped[0], False, columns, reasons_of_run(run)).splitlines()[0]
    assert shown.endswith("  dropped by curiosity/too_curious: too many questions")
    # A what-if of a rule on the new column predicts what the run then keeps, from the same measurements.
    rule = 'quality.rule=[{name="asks", when="marks > 0 and language = \'en\'", reason="It asks."}]'
    stored = load_recipe(read_run(run).recipe, [rule], recipe_sections(), "run.json")
    prediction = predict(spark, run, stored, {})
    predicted = sum(cell.documents for cell in prediction.cells if cell.after == "quality/asks")
    version = read_run(run).tables["documents"]
    run_at(2, [own, rule], folder=run.root, until="dedup")
    assert read_run(run).tables["documents"] == version
    counts = open_table(run, "verdicts")[1].content.counts
    assert counts.dropped["quality/asks"] == predicted > 0
    facts = collect_facts(run)
    reasons = declared_reasons(facts.tables)
    rows = {drop.name: drop for drops in drops_by_rule(facts, reasons).values() for drop in drops}
    assert (rows["quality/asks"].meaning, rows["quality/asks"].count) == ("It asks.", predicted)
    assert rows["curiosity/too_curious"].meaning == "too many questions"
    assert all(check.holds for check in checks(facts))
    assert declared_columns(facts.tables).field("marks").type == pa.int32()


@pytest.mark.spark
def test_a_stage_that_fails_too_often_ends_the_step(run_at, stage) -> None:
    code = "def measure(text, row):\n    if text[0] != 'P': raise ValueError('boom')\n    return {}\n"
    with pytest.raises(
        ConfigError,
        match=r"\[\[stage\]\] curiosity: expected the function to fail on at most 1 % of the documents, got errors on "
        r"[\d,]+ of [\d,]+: ValueError: boom \(mine.py:2\), [\d,]+ document\(s\), such as \w{32}\. Correct the",
    ):
        run_at(2, [f"stage.stages=[{toml(stage(code))}]"], until="documents")


@pytest.mark.spark
def test_a_wrong_result_ends_the_run(run_at, stage) -> None:
    code = "def measure(text, row): return {'marks': 1 if row['split'] == 'sample.warc.gz' else 'many'}\n"
    with pytest.raises(
        PenstockError, match=r"measure on document \w{32}: column marks: expected int32 or None, got 'many'"
    ):
        run_at(2, [f"stage.stages=[{toml(stage(code))}]"], until="documents")


def toml(value):
    """Write a value as inline TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
