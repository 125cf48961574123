"""What a run would build again, and which of it a new version of penstock has to be asked for."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jobs import run_all
from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline import forecast as forecasts
from pipeline.engine.code_digest import code_digest
from pipeline.forecast import check_rebuild, forecast
from pipeline.prepare import Prepared, prepare, step_content
from schemas.errors import ConfigError
from schemas.manifest import FROM_INPUT, RunFile, make_manifest, write_manifest, write_run
from schemas.storage import Store
from tests.support.demo_run import RECIPE, SMALL

OLD = "v-0123456789ab"


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "pages.jsonl").write_text('{"text": "one"}\n')
    return f'source.paths=["{tmp_path}/pages.jsonl"]'


def prepared_with(source: str, *settings: str) -> Prepared:
    return prepare(read_recipe(str(RECIPE), [source, 'source.format="jsonl"', *SMALL, *settings]), None)


def commit_documents(folder: Path, prepared: Prepared, rows: int, code: str = "older code", **changed: Any) -> Store:
    """A run whose `documents` is complete as some code made it; `changed`: other values of stages and config."""
    run, step = Store(str(folder)), prepared.steps[0]
    content = step_content(prepared, step)
    content["stages"] = {**content["stages"], **changed.get("stages", {})}
    content["models"] = {**content["models"], **changed.get("models", {})}
    for section, values in changed.get("config", {}).items():
        kept = {name: value for name, value in content["config"][section].items() if values.get(name) != "absent"}
        content["config"][section] = kept | {name: value for name, value in values.items() if value != "absent"}
    for table in step.writes:
        counts = {"rows_in": rows, "rows_kept": rows}
        inputs = [{"name": "pages.jsonl", "bytes": 2500, "sha256": "0" * 64}]
        block = {"table": table, **content, "inputs": inputs, "files": [], "counts": counts}
        lineage = {f"{FROM_INPUT}{split.key}": split.identity for split in prepared.splits} | changed.get("lineage", {})
        how = {"paths": {}, "started": "2026-01-01", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0.1.0"}
        notes = {"code": code} if code else {}
        manifest = make_manifest(block, how | {"lineage": lineage, "notes": notes}, table)
        write_manifest(run.child(f"{table}/{OLD}"), manifest)
    write_run(run, RunFile(tables=dict.fromkeys(step.writes, OLD), recipe=prepared.recipe.to_json()))
    return run


@pytest.mark.parametrize("code", ["older code", ""])
@pytest.mark.parametrize("what", ["a new version of a stage", "a new setting", "another default"])
def test_an_upgrade_that_builds_a_large_step_again_asks(tmp_path: Path, source: str, code: str, what: str) -> None:
    prepared = prepared_with(source)
    name = next(iter(step_content(prepared, prepared.steps[0])["config"]["extract"]))
    value = "absent" if what == "a new setting" else 7
    is_stage = what == "a new version of a stage"
    changed = {"stages": {"extract": 0}} if is_stage else {"config": {"extract": {name: value}}}
    run = commit_documents(tmp_path / "run", prepared, 1_000_001, code, **changed)
    with pytest.raises(ConfigError) as caught:
        check_rebuild(prepared, run, ())
    message = str(caught.value)
    assert message.startswith(f"{run.uri}: expected tables of this version of penstock, got older ones, which it would")
    assert "\n  documents: 1,000,001 rows from 2.5 kB; " in message
    assert ("stage extract: 0 → " if is_stage else f"extract.{name}: ") in message
    assert "Nothing was started. Add --rebuild documents to the command" in message
    check_rebuild(prepared, run, ["documents"])
    with mock.patch.object(forecasts, "REBUILD_ROWS", 1_000_001):
        check_rebuild(prepared, run, ())
        with (
            mock.patch.object(forecasts, "REBUILD_BYTES", 2499),
            pytest.raises(ConfigError, match="--rebuild documents"),
        ):
            check_rebuild(prepared, run, ())


def test_what_the_user_changed_is_built_without_a_question(tmp_path: Path, source: str) -> None:
    before = prepared_with(source)
    name, value = next(
        (name, value)
        for name, value in step_content(before, before.steps[0])["config"]["extract"].items()
        if isinstance(value, int) and not isinstance(value, bool)
    )
    run = commit_documents(tmp_path / "set", before, 10**9, stages={"extract": 0})
    after = prepared_with(source, f"extract.{name}={value + 1}")
    assert forecast(after, run).changes[0].step == "documents"
    check_rebuild(after, run, ())
    # The setting is removed again, as `run.json` shows.
    run = commit_documents(tmp_path / "unset", after, 10**9, stages={"extract": 0})
    check_rebuild(before, run, ())
    # Other input files, and another model.
    run = commit_documents(tmp_path / "inputs", before, 10**9, lineage={f"{FROM_INPUT}other.jsonl": "x"})
    check_rebuild(before, run, ())
    run = commit_documents(tmp_path / "models", before, 10**9, models={"language/model": "0" * 64})
    check_rebuild(before, run, ())


def test_a_change_that_was_started_and_killed_is_not_asked_about_again(tmp_path: Path, source: str) -> None:
    """The recipe in `run.json` is the new one then, but the same code made the table."""
    prepared = prepared_with(source)
    name = next(iter(step_content(prepared, prepared.steps[0])["config"]["extract"]))
    run = commit_documents(tmp_path / "run", prepared, 10**9, code_digest(), config={"extract": {name: 7}})
    assert forecast(prepared, run).changes[0].reasons
    check_rebuild(prepared, run, ())


def test_an_equal_table_and_an_empty_folder_ask_nothing(tmp_path: Path, source: str) -> None:
    check_rebuild(prepared_with(source), Store(str(tmp_path / "new")), ())


def test_the_command_line_asks_before_spark_starts(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: Any, **__: Any) -> None:
        raise RuntimeError("Spark was started")

    monkeypatch.setattr(run_all, "spark_session", starts)
    run = commit_documents(tmp_path / "run", prepared_with(source), 10**7, stages={"extract": 0})
    settings = [source, 'source.format="jsonl"', *SMALL]
    words = ["run", str(RECIPE), "--out", run.uri, *(word for each in settings for word in ("--set", each))]
    assert main(words) == 2
    assert "documents: 10,000,000 rows from 2.5 kB; stage extract: 0 → " in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="Spark was started"):
        main([*words, "--rebuild", "documents"])
    assert main([*words, "--rebuild", "documnets"]) == 2
    assert (
        "--rebuild: expected a step of this run, got 'documnets' (did you mean 'documents'?)" in capsys.readouterr().err
    )
