"""The example with one's own archives: its script runs from archives to an exported model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.recipe import read_recipe
from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "own_archives"


def test_the_recipe_is_valid() -> None:
    recipe = read_recipe(str(FOLDER / "recipe.toml"), ["source.paths=['x']"])
    assert recipe.to_json()["tokens"]["chunk_tokens"] % recipe.to_json()["train"]["seq_len"] == 0


@pytest.mark.spark
@pytest.mark.slow
def test_the_script_runs_to_its_end(crawl: Path, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jobs.cli "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        [FOLDER / "run.sh", f"{crawl}/*.warc.gz", "out"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "STEPS": "8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert "step 8, rows 0 to " in done.stdout
    assert (tmp_path / "out" / "llama" / "config.json").is_file()
    assert (tmp_path / "out" / "report.html").is_file()
