"""The wheel: it holds every file that the packages read, and runs the demo in an environment without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("schemas", "pipeline", "jobs", "train", "penstock")
METADATA = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


NATIVE = {f"pipeline/{room}/_native{sysconfig.get_config_var('EXT_SUFFIX')}" for room in ("text", "extract")}
"""The native modules, which a compiler builds."""


def build_wheel(folder: Path, **variables: str) -> Path:
    """The wheel of a copy of the checkout, so that no product of the build is left in it."""
    copy, out = folder / "copy", folder / "dist"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in METADATA:
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
    environment = os.environ | variables
    done = subprocess.run([*command, copy], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("penstock-*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a machine with a compiler builds."""
    if shutil.which((sysconfig.get_config_var("CXX") or "c++").split()[0]) is None:
        pytest.skip("this machine has no C++ compiler")
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert {"jobs/recipes/web.toml", "pipeline/report/page.html", "pipeline/text/cpp/module.cpp"} <= files
    assert packed_files(wheel) == files | NATIVE


def packed_files(wheel: Path) -> set[str]:
    """The files of a wheel without those about it."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


IMPLEMENTATION = """
from pipeline.extract import native as pages
from pipeline.text import native as texts
print(texts.__file__, *("python" if native.module is None else "native" for native in (texts, pages)))
"""


def implementations(wheel: Path, folder: Path) -> list[str]:
    """What reads texts and pages where the wheel is unpacked into a folder."""
    zipfile.ZipFile(wheel).extractall(folder)
    command = [sys.executable, "-c", IMPLEMENTATION]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    file, *names = done.stdout.split()
    assert Path(file).is_relative_to(folder)
    return names


def test_the_wheel_has_the_native_modules_of_its_sources(wheel: Path, tmp_path: Path) -> None:
    assert implementations(wheel, tmp_path) == ["native", "native"]


def test_without_a_compiler_the_wheel_uses_python(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CC="false", CXX="false")
    assert NATIVE.isdisjoint(packed_files(wheel))
    assert implementations(wheel, tmp_path / "unpacked") == ["python", "python"]


def test_each_package_is_typed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [package for package in PACKAGES if f"{package}/py.typed" not in names] == []


def test_the_metadata_is_complete(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    for line in (
        "Name: penstock",
        "Author: Penstock developers",
        "License: Apache-2.0",
        "Requires-Python: <3.14,>=3.11",
        "Classifier: Typing :: Typed",
        "Provides-Extra: data",
        "Provides-Extra: train",
        "Provides-Extra: all",
        "Description-Content-Type: text/markdown",
    ):
        assert line in text.splitlines(), line
    (scripts,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "penstock = jobs.cli:main" in archive.read(scripts).decode()


def borrow_dependencies(site: Path) -> None:
    """Link every installed package but Penstock into the folder of packages of another environment.

    Links, not a .pth file: the demo crawl reads the documentation in this folder.
    """
    for folder in map(Path, dict.fromkeys(path for path in sys.path if path.endswith("site-packages"))):
        for entry in folder.iterdir():
            ours = "penstock" in entry.name or entry.suffix == ".pth"
            if not ours and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)


@pytest.mark.spark
@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are those of this environment; the packages are the wheel's."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=300)
    site = next((home / "lib").glob("python*/site-packages"))
    borrow_dependencies(site)
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel]
    subprocess.run(install, check=True, timeout=300)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside = tmp_path / "outside"
    outside.mkdir()

    def call(*words: str) -> str:
        done = subprocess.run(
            [home / "bin" / "penstock", *words],
            cwd=outside,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    imported = subprocess.run(
        [python, "-c", "import jobs, penstock, pipeline, schemas, train; print(jobs.__file__)"],
        cwd=outside,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(imported.stdout.strip()).is_relative_to(site)
    call("demo-crawl", "demo/crawl", "--pages", "120")
    call("run", "demo", "--out", "demo/run", "--set", "tokenizer.vocab_size=1600")
    assert "demo/run/report.html" in call("report", "demo/run", "--truth", "demo/crawl/truth.jsonl")
    assert (outside / "demo" / "run" / "train" / "plan.json").is_file()
