"""The archive of Spark's classes: a JVM of a local run uses it, and starts without it if it does not fit."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.class_archive import MAGIC, is_archive, write_archive
from jobs.spark_session import archive_file
from schemas.errors import ConfigError
from tests.support.paths import ROOT

pytestmark = pytest.mark.dist
LOADED = """
from jobs.spark_session import SparkConfig, spark_session
with spark_session(SparkConfig(master="local[1]", driver_memory="512m")) as spark:
    print(spark.range(3).count())
"""
"""Starts a session. With the option below, its JVM says where each class comes from."""
LOG = "-Xlog:class+load:file={}"


def sources_of(home: Path, log: Path) -> list[str]:
    """Return where a JVM loads the classes of Spark from, with the archive of a home folder."""
    given = {"HOME": str(home), "JDK_JAVA_OPTIONS": LOG.format(log), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", LOADED]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3"]
    return re.findall(r"org\.apache\.spark\.SparkContext source: (.*)", log.read_text())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with an archive: the one that `make setup` has written, or else a new one."""
    folder, made = tmp_path_factory.mktemp("home"), archive_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        file = archive_file()
        assert file is not None
        if made is not None and is_archive(made):
            file.parent.mkdir(parents=True, mode=0o700)
            file.symlink_to(made)
        else:
            words = [sys.executable, "-m", "jobs.class_archive"]
            done = subprocess.run(words, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True)
            assert done.stdout == f"written: {file}\n"
        assert is_archive(file)
        assert [path.name for path in file.parent.iterdir()] == [file.name]  # the run that wrote it is gone
    return folder


def test_the_jvm_of_a_session_uses_the_archive(home: Path, tmp_path: Path) -> None:
    assert sources_of(home, tmp_path / "log") == ["shared objects file (top)"]


def test_a_jvm_without_an_archive_or_with_a_damaged_one_starts(home: Path, tmp_path: Path) -> None:
    (source,) = sources_of(tmp_path / "nothing", tmp_path / "first")
    assert source.startswith("file:")
    damaged = shutil.copytree(home, tmp_path / "damaged")
    (file,) = damaged.rglob("*.jsa")
    file.chmod(0o600)
    file.write_bytes(b"\0" * 4096)
    assert not is_archive(file)
    assert sources_of(damaged, tmp_path / "second") == [source]


def test_without_java_there_is_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert archive_file() is None
    with pytest.raises(ConfigError, match="java: expected a Java of version 17 or 21, got none"):
        write_archive()


def test_an_archive_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.jsa"
    assert not is_archive(file)
    file.write_bytes(MAGIC.to_bytes(4, sys.byteorder) + b"rest")
    assert is_archive(file)
