"""Runs that earlier versions of penstock made are opened by every verb that reads a run; see tests/fixtures."""

import shlex
import shutil
from pathlib import Path

import pytest

from jobs.cli import main
from schemas.manifest import current_tables, read_run
from schemas.storage import Store
from tests.support.paths import ROOT

RUNS = sorted((ROOT / "tests" / "fixtures" / "runs").iterdir())
MAX_BYTES = 400_000
READS = (
    "show {run} --where 'drop_stage is null' --limit 2 --text",
    "show {run} --where 'url is not null' --limit 3 --json",
    "lineage {run} --verify",
    "verify {run} --paranoid",
    "diff {run} {run}",
    "report {run}",
    "trace {run} --step 1 --text",
    "gc {run} --dry-run",
    "takedown {run} --domain site1.example.com --dry-run",
    "export {run} --format megatron --out {out}",
    "plan {run} --dry-run",
    "train {run} --dry-run",
    "generate {run} --prompt The --tokens 4",
)
"""Verbs that read a run without Spark."""


@pytest.mark.parametrize("folder", RUNS, ids=[path.name for path in RUNS])
def test_a_kept_run_is_small_and_has_every_table(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < MAX_BYTES
    tables = current_tables(Store(str(folder)))
    assert {*tables} == {*read_run(Store(str(folder))).tables}
    assert {"documents", "text", "verdicts", "clusters", "dedup", "clean", "tokenizer", "tokens"} <= {*tables}
    assert list(folder.glob("train/checkpoints/step-*/checkpoint.json"))


@pytest.mark.parametrize("words", READS, ids=[words.partition(" ")[0] for words in READS])
@pytest.mark.parametrize("folder", RUNS, ids=[path.name for path in RUNS])
def test_every_verb_opens_the_run_of_an_older_version(
    folder: Path, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "run")
    places = {"run": tmp_path / "run", "out": tmp_path / "out"}
    code = main([word.format(**places) for word in shlex.split(words)])
    assert code == 0, capsys.readouterr().err
