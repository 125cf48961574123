"""Figures of benchmarks: pages print the last ones, and what is older than a change of its code is named."""

import subprocess
from pathlib import Path

import pytest

from bench.figures import FOLDER, ROOT, ages, load_figures, measured_now, outdated, values, write_pages


def test_pages_print_the_last_figures() -> None:
    assert outdated() == []


def test_what_is_measured_exists() -> None:
    for name, measured in load_figures().items():
        for path in measured.measures:
            assert (ROOT / path).exists(), f"{name} measures {path}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one measured file, one other file, and a page."""
    git(tmp_path, "init", "--quiet")
    for name, text in (("code.py", "1"), ("other.py", "1"), ("README.md", "")):
        (tmp_path / name).write_text(text)
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    own = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *own, "-C", str(folder), *arguments], check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")


def measure(folder: Path, milliseconds: float) -> None:
    measured_now("python -m bench.speed", ("code.py",), {"ms": milliseconds}, folder).save("speed", folder)


def test_figures_are_older_than_a_change_of_what_they_measure(checkout: Path) -> None:
    measure(checkout, 1.23456)
    commit(checkout)
    assert ages(checkout) == []
    (checkout / "other.py").write_text("2")
    commit(checkout)
    assert ages(checkout) == []
    for count in (1, 2):
        (checkout / "code.py").write_text(f"changed {count}")
        commit(checkout)
        (line,) = ages(checkout)
        assert f"{count} commit(s) before the last change" in line
        assert "Run python -m bench.speed." in line
    measure(checkout, 2)
    assert ages(checkout) == []


def test_changes_that_are_not_committed_are_named(checkout: Path) -> None:
    (checkout / "code.py").write_text("2")
    measure(checkout, 1)
    assert load_figures(checkout)["speed"].commit.endswith("+")
    (line,) = ages(checkout)
    assert "files that were not committed" in line


def test_a_commit_that_the_clone_does_not_have_is_named(checkout: Path) -> None:
    measure(checkout, 1)
    path = checkout / FOLDER / "speed.json"
    path.write_text(path.read_text().replace('"commit": "', '"commit": "0000'))
    (line,) = ages(checkout)
    assert "a commit that this clone does not have" in line


def test_pages_follow_the_figures(checkout: Path) -> None:
    page = checkout / "README.md"
    page.write_text("| a | <!-- figure speed.ms -->9<!-- --> ms | <!-- figure speed.ms --><!-- --> |")
    measure(checkout, 1234.56)
    assert values(checkout) == {"speed.ms": "1,235"}
    assert len(outdated(checkout)) == 2
    write_pages(checkout)
    assert (
        page.read_text() == "| a | <!-- figure speed.ms -->1,235<!-- --> ms | <!-- figure speed.ms -->1,235<!-- --> |"
    )
    assert outdated(checkout) == []
    page.write_text("<!-- figure speed.unknown -->1<!-- -->")
    assert outdated(checkout) == ["README.md: speed.unknown is 1, expected None"]
    with pytest.raises(KeyError):
        write_pages(checkout)
