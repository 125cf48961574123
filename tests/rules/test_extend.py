"""The pages of `docs/extend/`, executed: each is applied to a copy of the tree, in which its commands succeed.

A fenced block `python new=PATH` creates a file. A block `python add=PATH after='LINE'` is inserted after the first line
that equals LINE, without regard to indentation. In a block `console` each `$ command` exits with 0 and prints the lines
that follow it; the commands of a block `console spark` start Spark. A block `text` is only read.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "extend"
LIMITS = {
    "rule.md": 3,
    "pii_type.md": 2,
    "source_format.md": 3,
    "stage.md": 3,
    "verb.md": 2,
    "optimizer.md": 3,
    "model.md": 3,
    "table.md": 4,
}
"""Maximum number of files that an extension touches, its test included."""
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
PAGES = [name for name in TEXTS if name != "index.md"]
ON_SPARK = [name for name in PAGES if "```console spark" in TEXTS[name]]
"""Pages that show the new thing in a run."""
COPIED = ("penstock", "schemas", "pipeline", "train", "jobs", "tests", "bench", "docs")
FENCE = re.compile(r"^```(\w+)(?: +([^\n]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"python": [sys.executable], "penstock": [sys.executable, "-m", "jobs.cli"]}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    words: tuple[str, ...]
    """What follows the language on the first line."""
    text: str

    @property
    def attributes(self) -> dict[str, str]:
        """The words of the form name=value."""
        return dict(word.split("=", 1) for word in self.words if "=" in word)


def blocks_of(page: str) -> list[Block]:
    """The blocks of the text of a page, in order."""
    return [Block(language, tuple(shlex.split(info)), text) for language, info, text in FENCE.findall(page)]


def apply(block: Block, root: Path) -> str:
    """Create or extend the file of a block and return its path."""
    match block.attributes:
        case {"new": name, **rest} if not rest:
            path = root / name
            assert not path.exists(), f"{name} exists already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        case {"add": name, "after": anchor, **rest} if not rest:
            path = root / name
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            number = next((number for number, line in enumerate(lines, 1) if line.strip() == anchor.strip()), None)
            assert number is not None, f"{name} has no line {anchor!r}"
            path.write_text("".join([*lines[:number], block.text, *lines[number:]]), encoding="utf-8")
        case other:
            raise AssertionError(f"expected new=PATH or add=PATH after=LINE, got {other}")
    return name


def apply_page(name: str, root: Path) -> set[str]:
    """Apply every block of a page but commands and plain text; return the files that it touches."""
    return {apply(block, root) for block in blocks_of(TEXTS[name]) if block.language not in ("console", "text")}


def copy_tree(root: Path) -> Path:
    """Copy the project's source, tests and documentation to a folder, with what is compiled."""
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, root / path.name)
    return root


def run(command: str, root: Path) -> str:
    """Run a command of a page in a copy of the tree and return what it prints; it must exit with 0."""
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [*PROGRAMS[program], *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_blocks(name: str, words: tuple[str, ...], root: Path) -> int:
    """Run the commands of a page's console blocks with these words, check their output, and return their number."""
    number = 0
    for block in blocks_of(TEXTS[name]):
        if block.language != "console" or block.words != words:
            continue
        output = ""
        for line in block.text.splitlines():
            if line.startswith("$ "):
                output = run(line.removeprefix("$ "), root)
                number += 1
            else:
                assert line in output.splitlines(), f"{name}: expected the line {line!r}, got\n{output}"
    return number


def check_style(files: Iterable[str], root: Path) -> None:
    """Run the linter and the formatter on the Python files that a page touches."""
    sources = " ".join(sorted(name for name in files if name.endswith(".py")))
    run(f"python -m ruff check --no-cache {sources}", root)
    run(f"python -m ruff format --no-cache --check {sources}", root)


@pytest.mark.parametrize(
    "name", [name if name in ("rule.md", "stage.md") else pytest.param(name, marks=pytest.mark.slow) for name in PAGES]
)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    files = apply_page(name, copy_tree(tmp_path))
    assert any(Path(path).name.startswith("test_") for path in files)
    assert len(files) <= LIMITS[name], sorted(files)
    listed = set(re.findall(r"^\d\. `([^`]+)`", TEXTS[name].split("## ")[0], re.MULTILINE))
    assert listed == files, "the list of files at the top of the page"
    check_style(files, tmp_path)
    assert run_blocks(name, (), tmp_path) > 0


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_SPARK)
def test_a_page_does_what_it_says_in_a_run(name: str, tmp_path: Path) -> None:
    apply_page(name, copy_tree(tmp_path))
    assert run_blocks(name, ("spark",), tmp_path) > 0


def test_the_tree_keeps_its_rules_with_all_pages_applied(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    check_style({path for name in PAGES for path in apply_page(name, tmp_path)}, tmp_path)
    run("python -m pytest tests/rules/test_layout.py tests/rules/test_words.py -k 'tree_keeps or test_words'", tmp_path)


def test_the_index_lists_every_page_with_its_number_of_files() -> None:
    rows = re.findall(r"^\|[^|]*\[[^]]+\]\((\w+\.md)\) *\|[^|]+\| *(\d+) *\|$", TEXTS["index.md"], re.MULTILINE)
    assert {name: int(limit) for name, limit in rows} == {name: LIMITS[name] for name in PAGES}


def test_the_pages_with_a_run_show_it_on_spark() -> None:
    assert {"rule.md", "stage.md"} <= {*ON_SPARK}


def test_blocks_and_their_attributes() -> None:
    page = "```python add=a.py after='x = \"\\d\"'\n    y = 2\n```\ntext\n```console spark\n$ penstock --help\n```\n"
    first, second = blocks_of(page)
    assert (first.attributes, first.text) == ({"add": "a.py", "after": 'x = "\\d"'}, "    y = 2\n")
    assert (second.language, second.words, second.attributes) == ("console", ("spark",), {})


def test_an_addition_follows_the_first_line_that_equals_the_anchor(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = [\n    1,\n    2,\n    1,\n]\n")
    (addition,) = blocks_of("```python add=a.py after='1,'\n    9,\n```\n")
    assert apply(addition, tmp_path) == "a.py"
    assert (tmp_path / "a.py").read_text() == "x = [\n    1,\n    9,\n    2,\n    1,\n]\n"
    for wrong in ("add=a.py after='7,'", "new=a.py", "add=a.py", "new=b.py after='x'", "of=a.py"):
        (block,) = blocks_of(f"```python {wrong}\n```\n")
        with pytest.raises(AssertionError):
            apply(block, tmp_path)
    assert not (tmp_path / "b.py").exists()
