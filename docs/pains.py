"""The pains that users of other projects reported, read from the docstrings of `tests/pains`: the one list of them.

The docstring of a test has three paragraphs: the project and what went wrong, the link to the thread, and what holds
here.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "tests" / "pains"
LINK = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)/(?:issues|pull)/\d+")
FORM = re.compile(rf"(?P<project>[\w .-]+): (?P<problem>.+?)\n\n(?P<link>{LINK.pattern})\n\n(?P<here>.+)", re.DOTALL)

INTRODUCTION = """\
# Pains and their tests

Users of other projects reported the problems below in public, and their maintainers answered most of them openly: many
are solved there by now. Each row names the project and its thread, what went wrong, what must hold here, and the test
that puts Penstock into the same situation. The rows are written from the docstrings of these tests."""


class Pain(NamedTuple):
    """A problem that users of another project reported, and the test that shows what holds here."""

    test: str
    """File and function, such as `tests/pains/test_dedup.py::test_x`."""
    project: str
    """Name of the project."""
    link: str
    """Address of the thread."""
    problem: str
    """What went wrong, in sentences."""
    here: str
    """What must hold here, in sentences."""


class Subject(NamedTuple):
    """The pains of one test file."""

    title: str
    """What they are about."""
    pains: list[Pain]


def read_pain(test: str, docstring: str) -> Pain:
    """Return the pain that the docstring of a test describes. Raises ValueError if the docstring has another form."""
    links = [link[0] for link in LINK.finditer(docstring)]
    hit = FORM.fullmatch(docstring)
    if hit is None or len(links) != 1 or docstring.count("://") != 1:
        raise ValueError(
            f"{test}: expected a docstring of three paragraphs, `project: what went wrong`, one link to a thread and "
            f"what holds here, got {len(links)} links in {docstring!r:.80}. Correct the docstring."
        )
    return Pain(test, hit["project"], hit["link"], " ".join(hit["problem"].split()), " ".join(hit["here"].split()))


def read_pains(folder: Path = FOLDER) -> list[Subject]:
    """Return the pains of every test file in the folder, in the order of files and functions."""
    subjects = []
    for path in sorted(folder.glob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        subject = (ast.get_docstring(module) or "").removeprefix("Pains of ").partition(":")[0]
        functions = [
            node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        name = f"tests/pains/{path.name}"
        pains = [read_pain(f"{name}::{node.name}", ast.get_docstring(node) or "") for node in functions]
        subjects.append(Subject(subject[:1].upper() + subject[1:], pains))
    return subjects


def pains_page() -> str:
    """Return the page of all pains, with a table for each subject."""
    lines = [INTRODUCTION]
    for subject in read_pains():
        lines += [
            "",
            f"## {subject.title}",
            "",
            "| project | what went wrong | what holds here | test |",
            "|---|---|---|---|",
        ]
        for pain in subject.pains:
            texts = [text[:1].upper() + text[1:].replace("|", "\\|") for text in (pain.problem, pain.here)]
            lines.append(f"| [{pain.project}]({pain.link}) | {texts[0]} | {texts[1]} | `{pain.test}` |")
    return "\n".join(lines) + "\n"
