"""The examples for schedulers run the steps of a recipe in order, by commands that the jobs understand."""

import ast
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import run_stage
from jobs.recipe import read_recipe
from pipeline.stages import steps_for
from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "schedulers"


def steps() -> list[str]:
    """Return the names of the steps that the recipe uses. An example may leave some out: the next step builds them."""
    recipe = read_recipe("web", ["source.paths=['x.warc.gz']"])
    return [step.name for step in steps_for(recipe) if step.is_used(recipe)]


def given(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Return what `jobs/run_stage.py` would run for these arguments."""
    seen: list[tuple[Any, ...]] = []

    def run(*values: Any) -> Any:
        seen.append(values)
        return types.SimpleNamespace(text=lambda: "")

    monkeypatch.setattr(run_stage, "run_recipe", run)
    assert run_stage.main(arguments) == 0
    return seen[0]


def test_the_airflow_tasks_are_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse((FOLDER / "airflow_dag.py").read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert set(values["STEPS"]) <= {*steps()}
    assert [name for name in steps() if name in values["STEPS"]] == [*values["STEPS"]]
    assert values["STEPS"][-1] == steps()[-1]
    recipe, out, overrides, step, _ = given(["dedup", *values["ARGUMENTS"]], monkeypatch)
    assert (recipe, out, step) == ("web", "s3://corpus/run", "dedup")
    assert len(overrides) == 2
    assert Path(ROOT, values["SUBMIT"][-1]).exists()


def test_the_argo_steps_are_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    workflow = yaml.safe_load((FOLDER / "argo.yaml").read_text())
    run, step = workflow["spec"]["templates"]
    names = [group[0]["name"] for group in run["steps"]]
    assert [name for name in steps() if name in names] == names
    assert all(group[0]["arguments"]["parameters"][0]["value"] == group[0]["name"] for group in run["steps"])
    parameters = {each["name"]: each["value"] for each in workflow["spec"]["arguments"]["parameters"]}
    words = [
        word.replace("{{inputs.parameters.step}}", "tokens")
        .replace("{{workflow.parameters.recipe}}", parameters["recipe"])
        .replace("{{workflow.parameters.run}}", parameters["run"])
        .replace("{{workflow.parameters.crawl}}", parameters["crawl"])
        for word in step["container"]["args"]
    ]
    job = words.index("/app/jobs/run_stage.py")
    recipe, out, _, last, _ = given(words[job + 1 :], monkeypatch)
    assert (recipe, out, last) == ("web", "s3://corpus/run", "tokens")
    assert "{{" not in " ".join(words)
    assert "jobs/run_stage.py" in (ROOT / "docker/spark.Dockerfile").read_text()


def test_an_unknown_step_ends_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    code = run_stage.main(
        ["dedupe", "web", "--out", str(tmp_path / "run"), f"--set=source.paths=['{tmp_path}/a.jsonl']"]
    )
    assert code == 2
    assert "stage: expected a step, got 'dedupe'" in capsys.readouterr().err


def snapshot_settings() -> list[list[str]]:
    lines = (ROOT / "conf/snapshot.conf").read_text().splitlines()
    return [line.split() for line in lines if line[:1] not in ("#", "")]


def test_the_settings_for_a_snapshot_are_properties_of_spark() -> None:
    lines = snapshot_settings()
    assert all(len(words) == 2 and words[0].startswith("spark.") for words in lines)
    assert len({name for name, _ in lines}) == len(lines) > 15


SCRAPE = """
import sys
from urllib.request import urlopen
from jobs.spark_session import SparkConfig, open_session
settings = dict(line.split() for line in sys.argv[1].splitlines())
session = open_session(SparkConfig(master="local[1]", driver_memory="1g", settings=settings), "scrape")
session.range(10).collect()
port = session.sparkContext.uiWebUrl.rpartition(":")[2]
for path in ("/metrics/prometheus/", "/metrics/executors/prometheus/"):
    print(urlopen(f"http://127.0.0.1:{port}{path}").read().decode())
session.stop()
"""


@pytest.mark.spark
def test_prometheus_reads_figures_of_the_driver_and_of_executors() -> None:
    own = ("spark.ui", "spark.metrics")
    lines = "\n".join(f"{name} {value}" for name, value in snapshot_settings() if name.startswith(own))
    done = subprocess.run([sys.executable, "-c", SCRAPE, lines], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "metrics_penstock_driver_DAGScheduler_job_allJobs_Value" in done.stdout
    (tasks,) = (line for line in done.stdout.splitlines() if line.startswith("metrics_executor_completedTasks_total"))
    assert float(tasks.split()[-1]) > 0
