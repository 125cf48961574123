"""Test files are collected where Spark is missing: what lacks a package is skipped, what lacks our own file fails."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

MAIN = "import sys; {before}import pytest; sys.exit(pytest.main(['-q', '-rs', '-p', 'no:cacheprovider', 'tests']))"
WITHOUT = "sys.modules['pyspark'] = None; "


def run(folder: Path, before: str) -> "subprocess.CompletedProcess[str]":
    """The tests of a folder in a process of its own."""
    command = [sys.executable, "-c", MAIN.format(before=before)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def folder_with(folder: Path, imported: str) -> Path:
    """A project of two test files, one of which imports something."""
    (folder / "tests/support").mkdir(parents=True)
    (folder / "train").mkdir()
    support = [f"support/{name}.py" for name in ("__init__", "demo_run", "expensive_files", "paths")]
    for name in ("__init__.py", "conftest.py", *support):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    (folder / "tests/test_one.py").write_text(f"import {imported}\n\n\ndef test_it():\n    assert False\n")
    (folder / "tests/test_two.py").write_text("def test_it():\n    assert True\n")
    return folder


def test_a_missing_package_skips_the_file(tmp_path: Path) -> None:
    done = run(folder_with(tmp_path, "not_installed_anywhere.part"), WITHOUT)
    assert done.returncode == 0, done.stdout
    assert "not_installed_anywhere is not installed, and no Spark" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout


def test_a_missing_file_of_ours_is_an_error(tmp_path: Path) -> None:
    done = run(folder_with(tmp_path, "train.not_written"), WITHOUT)
    assert done.returncode == 2, done.stdout
    assert "No module named 'train.not_written'" in done.stdout


def test_with_spark_a_missing_package_is_an_error(tmp_path: Path) -> None:
    spark = "import types, importlib.machinery as m; spark = types.ModuleType('pyspark'); "
    spark += "spark.__spec__ = m.ModuleSpec('pyspark', None); sys.modules['pyspark'] = spark; "
    done = run(folder_with(tmp_path, "not_installed_anywhere"), spark)
    assert done.returncode == 2, done.stdout
    assert "No module named 'not_installed_anywhere'" in done.stdout
