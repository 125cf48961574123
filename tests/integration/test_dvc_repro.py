"""The real `dvc` runs the stages of a dvc.yaml: all of them once, then only what is out of date."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.recipe import read_recipe
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.stages import STEPS
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tokens import open_dataset

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BESIDE = Path(sys.executable).parent
PROGRAMS = f"{BESIDE}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
RECIPE = """
[source]
paths = ["crawl/*.warc.gz"]
[spark]
master = "local[2]"
driver_memory = "1g"
shuffle_partitions = 4
[audit]
documents = 0
[tokenizer]
vocab_size = 1600
[tokens]
seed = 0
shard_tokens = 20000
chunk_tokens = 512
heldout_share = 0.1
[plan]
num_layers = 1
d_model = 32
num_heads = 2
max_epochs = 1
[train]
seq_len = 64
global_batch = 4
steps = 4
"""


class Project:
    """A folder that DVC looks after, and the run in it."""

    def __init__(self, folder: Path, dvc: str):
        self.folder, self.dvc = folder, dvc
        self.run = Store(str(folder / "run"))
        self.recipe = folder / "recipe.toml"
        self.environment = os.environ | {"PATH": PROGRAMS, "XDG_CONFIG_HOME": str(folder / "config")}

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=3600
        )

    def must(self, *words: str) -> str:
        done = self.call(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def repro(self, *stages: str) -> list[str]:
        """The stages that `dvc repro` has run."""
        return ran(self.must(self.dvc, "repro", *stages))

    def digest(self, table: str) -> str:
        return open_table(self.run, table)[1].digest

    def set(self, before: str, after: str) -> None:
        text = self.recipe.read_text()
        assert before in text
        self.recipe.write_text(text.replace(before, after))


def ran(output: str) -> list[str]:
    return re.findall(r"Running stage '(\w+)'", output)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A recipe with its dvc.yaml, of which nothing has run; DVC tells nobody, and asks for no newer version."""
    dvc = shutil.which("dvc", path=PROGRAMS)
    if dvc is None:
        pytest.skip(f"dvc is neither on the PATH nor in {BESIDE}")
    project = Project(tmp_path_factory.mktemp("dvc"), dvc)
    build_demo_crawl(project.folder / "crawl", 100, 1)
    project.recipe.write_text(RECIPE)
    for option, value in (("analytics", "false"), ("check_update", "false")):  # before there is a project
        project.must(dvc, "config", "--global", f"core.{option}", value)
    project.must(dvc, "init", "-q", "--no-scm")
    project.must(dvc, "config", "core.site_cache_dir", str(project.folder / "cache"))
    assert "dvc.yaml: 10 stages" in project.must("penstock", "dvc", "recipe.toml", "--out", "run")
    return project


@pytest.fixture(scope="module")
def wanted(project: Project) -> list[str]:
    """The steps of the recipe."""
    recipe = read_recipe(str(project.recipe), [])
    return [step.name for step in STEPS if step.is_used(recipe)]


@pytest.fixture(scope="module")
def finished(project: Project, wanted: list[str]) -> Project:
    """The same, after `dvc repro` has run every stage once, each after those that it reads."""
    found = project.repro()
    assert sorted(found) == sorted(["settings", *wanted, "train", "report"])
    assert found[:2] == ["settings", "documents"]
    assert found[-3:] == ["tokens", "train", "report"]
    return project


def test_the_run_holds_a_dataset_a_model_and_a_report(finished: Project) -> None:
    assert "web/train" in open_dataset(finished.run).streams
    assert finished.run.read_json("train/manifest.json")["steps"] == 4
    assert finished.run.exists("report.html")


def test_what_stands_is_not_run_again(finished: Project, wanted: list[str]) -> None:
    output = finished.must(finished.dvc, "repro")
    assert ran(output) == []
    assert all(f"Stage '{name}' didn't change, skipping" in output for name in [*wanted, "train", "report"])
    assert "Data and pipelines are up to date." in finished.must(finished.dvc, "status")


def test_a_setting_that_changes_no_result_runs_no_stage(finished: Project) -> None:
    finished.set("shuffle_partitions = 4", "shuffle_partitions = 3")
    assert finished.repro() == ["settings"]


def test_a_late_setting_runs_late_stages_and_leaves_a_trained_model(finished: Project) -> None:
    before = {name: finished.digest(name) for name in ("tokenizer", "tokens")}
    finished.set("seed = 0", "seed = 1")
    done = finished.call(finished.dvc, "repro")
    assert ran(done.stdout) == ["settings", "tokens"]
    assert done.returncode != 0
    assert "remove train/checkpoints to train from the beginning" in done.stderr
    assert {name: finished.digest(name) for name in ("tokenizer", "tokens")} == before
    shutil.rmtree(finished.folder / "run" / "train")
    assert finished.repro() == ["tokens", "train", "report"]
    assert finished.digest("tokenizer") == before["tokenizer"]
    assert finished.digest("tokens") != before["tokens"]
    assert finished.run.read_json("train/plan.json")["dataset"] == finished.digest("tokens")


def test_going_back_to_an_earlier_version_runs_what_reads_it(finished: Project) -> None:
    shutil.rmtree(finished.folder / "run" / "train")  # data steps do not replace the dataset of a trained model
    now = finished.digest("verdicts")
    finished.set("[audit]", "[quality]\nmin_words = 70\n[audit]")
    assert finished.repro("dedup") == ["settings", "verdicts", "dedup"]
    other = finished.digest("dedup")
    finished.set("[quality]\nmin_words = 70\n", "")
    assert finished.repro("dedup") == ["settings", "verdicts", "dedup"]
    assert finished.digest("verdicts") == now
    assert finished.digest("dedup") != other


def test_what_is_damaged_or_removed_is_made_again(finished: Project) -> None:
    folder, manifest = open_table(finished.run, "verdicts")
    path = Path(folder.path(manifest.paths_of()[0]))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        assert finished.repro("verdicts") == ["verdicts"]
        again = open_table(finished.run, "verdicts")[1]
        assert again.digest == manifest.digest
        assert [folder.sha256(each) for each in again.paths_of()] == [each.sha256 for each in again.content.files]
        assert again.run.paths != manifest.paths
        shutil.rmtree(finished.folder / "run" / "verdicts")
