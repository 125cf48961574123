"""The commands of README.md and of the pages in `docs/`: all are parsed, and executed where one machine is enough.

A fenced block `console` has commands after `$ `, a block `bash` is a script. A comment `<!-- needs: … -->` before a
block states what one machine with a demo crawl lacks; such a block is only parsed. Blocks that neither start Spark nor
train run on a small demo run in the current process, those of the README always and others under the marker `slow`.
All blocks of a page run in their order, as processes, under `slow` too. `docs/extend/` has its own test,
tests/rules/test_extend.py.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from docs.generate import all_sections, verb_parser
from jobs.cli import list_verbs, main
from jobs.recipe import recipe_file, recipe_sections
from pipeline.sources.config import SourceConfig
from schemas.config import SOURCE
from schemas.overrides import load_recipe
from tests.support.paths import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    if "extend" not in path.parts
}
BLOCK = re.compile(r"(?:^<!-- needs: ([^\n]+) -->\n)?^```(console|bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = {
    "run",
    "stage",
    "whatif",
    "train-lm",
    "train-importance",
    "derive-profiles",
    "demo-crawl",
    "train",
    "calibrate",
} | {"ladder", "ablate", "export"}
"""Verbs that start Spark or train; `train --dry-run` and `ladder --dry-run` do neither."""
MAX_README_LINES = 150


@dataclass(frozen=True)
class Block:
    """A fenced block with commands."""

    page: str
    language: str
    needs: str
    """What the block needs besides this machine and the demo run; empty = nothing."""
    commands: tuple[str, ...]

    @property
    def is_long(self) -> bool:
        """Whether a command of the block starts Spark or trains."""
        words = [shlex.split(command) for command in self.commands]
        return any(line[0] != "penstock" or (line[1] in LONG and not line_is_short(line)) for line in words)


def line_is_short(line: list[str]) -> bool:
    """Whether a command with a verb of LONG neither starts Spark nor trains, because of its options."""
    return "--dry-run" in line or (line[1] == "export" and not {"jsonl", "parquet", "huggingface-dataset"} & {*line})


def commands_of(language: str, text: str) -> Iterator[str]:
    """The commands of a block: the lines after `$ `, or the lines of a script with continued lines joined."""
    if language == "console":
        yield from (line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
    else:
        yield from (line for line in text.replace("\\\n", " ").splitlines() if line.strip())


@cache
def blocks() -> list[Block]:
    """The blocks `console` and `bash` of all pages."""
    return [
        Block(page, language, needs, tuple(commands_of(language, text)))
        for page, content in PAGES.items()
        for needs, language, text in BLOCK.findall(content)
        if language != "python"
    ]


def command_lines(content: str) -> list[str]:
    """The commands of `penstock` in the blocks of a page."""
    found = BLOCK.findall(content)
    lines = [line for _, language, text in found if language != "python" for line in commands_of(language, text)]
    return [line for line in lines if line.startswith("penstock ")]


def mentions(content: str) -> list[str]:
    """The commands of `penstock` in the text of a page, in single backticks; they may lack arguments."""
    return re.findall(r"(?<!`)`(penstock [^`\n]+)`(?!`)", content)


# ---------------------------------------------------------------------------------------------------------------- fast


def test_the_readme_is_one_page() -> None:
    assert len(PAGES["README.md"].splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_parses(page: str) -> None:
    wrong = [f"{line}: {why}" for line in command_lines(PAGES[page]) if (why := complaint(line))]
    wrong += [f"{line}: {why}" for line in mentions(PAGES[page]) if (why := complaint(line, is_whole=False))]
    assert not wrong, "\n".join(wrong)


def complaint(line: str, is_whole: bool = True) -> str:
    """What is wrong with a command line; empty if nothing is. Only a whole line must have all its arguments."""
    words = shlex.split(line, comments=True)[1:]
    if words[0].startswith("-") or words[0] == "VERB":
        return ""
    if words[0] not in list_verbs():
        return "no such verb"
    parser = verb_parser(words[0])
    known = {name for action in parser._actions for name in action.option_strings}
    options = [word.partition("=")[0] for word in words[1:] if re.match(r"--[a-z]", word)]
    if unknown := [option for option in options if option not in known]:
        return f"no such option: {', '.join(unknown)}"
    overrides = [after for word, after in pairwise(words) if word == "--set"]
    return wrong_settings(overrides) or (parse(parser, words[1:]) if is_whole else "")


def parse(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """What a parser rejects; empty if nothing."""
    complaints: list[str] = []
    parser.error = complaints.append  # type: ignore[method-assign,assignment]
    parser.parse_args(words)
    return "; ".join(complaints)


def wrong_settings(overrides: list[str]) -> str:
    """The wrong settings among overrides, by the sections that declare them."""
    known = all_sections()
    for override in overrides:
        section, field = override.partition("=")[0].split(".")[:2]
        if section not in known:
            return f"no such section: {section}"
        if field not in known[section].model_fields:
            return f"no such field: {section}.{field}"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page: str) -> None:
    known = all_sections()
    named = re.findall(r"`(\w+)\.([a-z]\w+)(?: ?= ?[^`]+)?`", PAGES[page])
    wrong = [f"{name}.{key}" for name, key in named if name in known and key not in known[name].model_fields]
    assert [name for name in wrong if not name.endswith((".py", ".json", ".toml", ".html"))] == []


@pytest.mark.parametrize("page", PAGES)
def test_recipes_in_a_page_are_valid(page: str) -> None:
    for text in re.findall(r"^```toml\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL):
        values = tomllib.loads(text)
        known = {**all_sections(), **recipe_sections()}  # a recipe may have several tables [[stage]]
        assert {*values} <= {*known}
        own = SourceConfig.own_sections if isinstance(values.get(SOURCE), list) else set()
        kinds = {name: kind for name, kind in known.items() if name in values or name in own}
        load_recipe(values, [], kinds, page)


def test_recipes_that_commands_name_exist() -> None:
    missing, written = [], set()
    for block in blocks():
        for words in map(shlex.split, block.commands):
            if words[:2] == ["penstock", "init"]:
                written.add((block.page, verb_parser("init").parse_args(words[2:]).recipe))
            if words[0] == "penstock" and words[1] in ("run", "stage", "dvc") and not block.needs:
                arguments = verb_parser(words[1]).parse_args(words[2:])
                is_there = (block.page, arguments.recipe) in written or Path(recipe_file(arguments.recipe)).is_file()
                missing += [] if is_there else [arguments.recipe]
    assert missing == []


MADE_BY_OUT = ("run", "stage")
"""Verbs that make the run folder that `--out` names; `plan --dataset` makes the folder that it names first."""


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_commands_of_a_first_page_find_what_earlier_ones_made(page: str) -> None:
    """A reader pastes them in order, so each folder that a command reads was made by a command above it."""
    made: set[str] = set()
    missing = []
    for block in (block for block in blocks() if block.page == page and not block.needs):
        for line in block.commands:
            words = shlex.split(line)
            parsed = verb_parser(words[1]).parse_args(words[2:]) if words[0] == "penstock" else argparse.Namespace()
            values = vars(parsed)
            if words[1] == "demo-crawl" or words[1] in MADE_BY_OUT:
                made.add(values["out"])
            elif "run" in values and values["run"] not in made:
                missing.append(f"{line}: {values['run']}")
            inputs = [value for value in (values.get("overrides") or []) if value.startswith("source.paths=")]
            inputs += [f'["{path}"]' for path in values.get("source") or []]
            paths = [path for text in inputs for path in re.findall(r'"([^"]+)/[^"/]*"', text)]
            missing += [f"{line}: {path}" for path in paths if path not in made]
    assert missing == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock run web --out run --set source.paths='[\"x\"]'", ""),
        ("penstock runn web", "no such verb"),
        ("penstock run web --out run --sett x=1", "no such option: --sett"),
        ("penstock run web --out run --set sauce.paths=x", "no such section: sauce"),
        ("penstock run web --out run --set source.path=x", "no such field: source.path"),
        ("penstock whatif", "the following arguments are required: run"),
        ("penstock plan RUN --law FILE", ""),
    ],
)
def test_complaint(line: str, expected: str) -> None:
    assert complaint(line) == expected


# ----------------------------------------------------------------------------------------------------------- executed


@pytest.fixture(scope="module")
def workshop(crawl: Path, finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names that the pages use: `crawl`, the trained `run`, `other`, and small input files."""
    folder = tmp_path_factory.mktemp("workshop")
    shutil.copytree(crawl, folder / "crawl")
    shutil.copytree(finished.uri, folder / "run")
    call = shlex.split("train run --set train.steps=24 --set train.eval_every=3 --set checkpoint.every=8")
    small = shlex.split("--set train.global_batch=2 --set train.eval_sequences=2 --set train.seq_len=128")
    execute(["plan", "run", "--quiet", *small], folder)
    execute([*call, *small], folder)
    shutil.copytree(folder / "run", folder / "other")
    (folder / "gsm8k.jsonl").write_text('{"question": "How many apples does Anna have if she buys three more?"}\n')
    labelled = [f'{{"text": "{word} page {n} " , "label": "{word}"}}' for n in range(200) for word in ("good", "bad")]
    (folder / "pages.jsonl").write_text("\n".join(labelled) + "\n")
    lines = [f'{{"text": "Chapter {n}. The ship left the harbour on day {n} of the month."}}' for n in range(200)]
    (folder / "books.jsonl").write_text("\n".join(lines) + "\n")
    runs = [(n, d, 1.8 + 400 / n**0.34 + 410 / d**0.28) for n in (1e6, 4e6, 1.6e7, 6.4e7) for d in (1e7, 1e8, 1e9)]
    rows = [f"{n:.0f},{d:.0f},{loss:.4f}" for n, d, loss in runs]
    (folder / "runs.csv").write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    return folder


def execute(words: list[str], folder: Path) -> str:
    """Run `penstock` in a process of its own; it must exit with 0. Return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"$ penstock {shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def executable(page: str) -> list[Block]:
    """The blocks of a page that one machine with a demo run can execute."""
    return [block for block in blocks() if block.page == page and not block.needs]


def made_by_long_commands(page: str) -> set[str]:
    """The folders that the long commands of a page make."""
    commands = (shlex.split(command) for block in executable(page) if block.is_long for command in block.commands)
    return {words[words.index("--out") + 1] for words in commands if "--out" in words}


QUICK = [page for page in PAGES if any(not block.is_long for block in executable(page))]
SLOW = [page for page in PAGES if any(block.is_long for block in executable(page))]


@pytest.mark.spark
@pytest.mark.parametrize(
    "page", [page if page == "README.md" else pytest.param(page, marks=pytest.mark.slow) for page in QUICK]
)
def test_quick_commands_of_a_page(
    page: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(workshop, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    made = {"demo/run": "run", "demo/crawl": "crawl"}
    for name in made if "demo" in PAGES[page] else ():  # what the long commands of the page make
        shutil.copytree(workshop / made[name], tmp_path / "w" / name)
    others = made_by_long_commands(page) - made.keys()
    for block in executable(page):
        for command in block.commands if not block.is_long else ():
            if not others.isdisjoint(shlex.split(command)):
                continue
            code = main(shlex.split(command)[1:])
            printed = capsys.readouterr()
            assert code == 0, f"$ {command}\n{printed.out[-2000:]}{printed.err[-2000:]}"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_all_commands_of_a_page(page: str, workshop: Path, tmp_path: Path) -> None:
    shutil.copytree(workshop, tmp_path / "w")
    for block in executable(page):
        for command in block.commands:
            words = shlex.split(command)
            assert words[0] == "penstock", f"{page}: only commands of penstock are executed, got {command}"
            execute(words[1:], tmp_path / "w")


@pytest.mark.spark
@pytest.mark.parametrize("page", [page for page in PAGES if "```python\n" in PAGES[page]])
def test_python_of_a_page(page: str, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    for needs, language, text in BLOCK.findall(PAGES[page]):
        if language == "python" and not needs:
            exec(compile(text, page, "exec"), {"__name__": "page"})
