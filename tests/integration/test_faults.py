"""A disk that is full in every step, a folder that becomes read-only, and a clock that goes back."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.exit_codes import exit_code_of
from jobs.recipe import read_recipe
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.storage import Store
from tests.fixtures.make_run import RECIPE
from tests.support.kills import digests, various_pages

pytestmark = [pytest.mark.spark, pytest.mark.slow]
PAGE = 4096
"""Smallest space that a file of this file system takes [bytes]."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a small run."""
    folder = tmp_path_factory.mktemp("faults")
    for number in range(3):
        (folder / f"pages-{number}.jsonl").write_text(various_pages(20, number))
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(folder=folder).replace("pages.jsonl", "pages-*.jsonl"))
    return path


def run(spark: Any, recipe: Path, folder: Path, until: str | None = None) -> None:
    """Run the data steps up to `until` (None: all) in the session of the tests."""
    run_steps(spark, prepare(read_recipe(str(recipe), []), until), Store(str(folder)), 2)


@pytest.fixture(scope="module")
def whole(spark: Any, recipe: Path) -> dict[str, str]:
    """The digests of an undisturbed run."""
    run(spark, recipe, recipe.with_name("whole"))
    return digests(recipe.with_name("whole"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of one page."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={PAGE}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def remount(disk: Path, option: str) -> None:
    """Change an option of a mounted file system."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


def free_space(disk: Path, size: int) -> None:
    """Give a disk so much free space [bytes]."""
    remount(disk, "size=100m")
    status = os.statvfs(disk)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    remount(disk, f"size={used + size}")


def test_a_disk_that_is_full_in_every_step_ends_in_the_same_bytes(
    spark: Any, recipe: Path, whole: dict[str, str], disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step fails once at its first file, and once at a later one if it writes more than one block."""
    full: dict[str, list[int]] = {}
    steps = [step.name for step in prepare(read_recipe(str(recipe), []), None).steps]
    for step in steps:
        for size in (PAGE, 4 * PAGE):
            free_space(disk, size)
            capsys.readouterr()
            code = exit_code_of(partial(run, spark, recipe, disk / "run", step))
            message = capsys.readouterr().err
            if code:
                full.setdefault(step, []).append(size)
                assert code == 2
                assert message.count("expected writable storage, got an error: the disk is full.") == 1, message
        free_space(disk, 32 << 20)
        run(spark, recipe, disk / "run", step)
    print(full)
    assert [*full] == steps
    assert digests(disk / "run") == whole


def test_a_folder_that_becomes_read_only_ends_the_command_with_one_sentence(
    spark: Any, recipe: Path, whole: dict[str, str], disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remount(disk, "size=100m")
    run(spark, recipe, disk / "run", "verdicts")
    remount(disk, "ro")
    capsys.readouterr()
    assert main(["run", str(recipe), "--out", str(disk / "run")]) == 2
    error = capsys.readouterr().err
    assert "expected a folder that can be written, got an error: Read-only file system" in error
    assert error.count("\n") == 1
    remount(disk, "rw")
    run(spark, recipe, disk / "run")
    assert digests(disk / "run") == whole


def test_a_clock_that_goes_back_a_year_changes_no_bytes(
    spark: Any, recipe: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    """Seen from a clock that was set back, the files of a run lie in the future, and so does its lock."""
    folder = tmp_path / "run"
    run(spark, recipe, folder, "clusters")
    parts = folder / "dedup" / "v-0123456789ab" / "parts"
    parts.mkdir(parents=True)
    (parts / "part-00000.json").write_text(json.dumps({"files": {}}))  # what a step that was killed then has left
    future = time.time() + 365 * 86400
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (future, future))
    assert main(["gc", str(folder)]) == 0
    run(spark, recipe, folder)
    assert main(["gc", str(folder)]) == 0
    assert main(["verify", str(folder)]) == 0
    assert digests(folder) == whole
