"""The vocabulary: words that `docs/glossary.md` replaces are in no name, docstring, comment or message."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("schemas", "pipeline", "train", "jobs")
BANNED = {
    "promised": "expected",
    "stands": "exists, is complete",
    "standing": "existing, complete",
    "told": "reported, given",
    "tells": "reports, shows",
    "tell": "report, show",
    "culprit": "outlier",
    "culprits": "outliers",
    "homes": "run folders",
    "ways": "layouts, methods",
    "mailed": "shuffled",
    "fate": "verdict",
    "fates": "verdicts",
    "goes on": "resumes, continues",
    "go on": "resume, continue",
    "going on": "continuing",
    "went on": "continued",
    "who sees whom": "attention mask",
    "nobody": "no one, or the passive",
    "whoever": "the caller",
    "begun": "started",
    "learnt": "learned",
    "reckon": "compute",
    "reckons": "computes",
    "mended": "fixed",
    "heals": "repairs",
    "unseen": "held-out",
}
"""Word or phrase -> the words to use."""
ON_DISK = {
    ("pipeline/lineage/training.py", "begun"),
    ("pipeline/report/losses.py", "begun"),
    ("train/monitor/events.py", "begun"),
    ("train/monitor/metrics.py", "begun"),
    ("train/monitor/metrics.py", "went on"),
    ("train/eval/paired.py", "told"),
    ("pipeline/perplexity/compile.py", "homes"),
    ("pipeline/perplexity/model.py", "homes"),
    ("pipeline/takedown/certificate.py", "standing"),
    ("pipeline/takedown/commit.py", "standing"),
    ("schemas/takedown.py", "standing"),
    ("schemas/tables.py", "stands"),
    ("train/parallel/devices.py", "ways"),
}
"""(file, word) of keys, column meanings and texts that stored files contain."""
PATTERN = re.compile(r"\b(" + "|".join(sorted(BANNED, key=len, reverse=True)) + r")\b", re.IGNORECASE)


def files() -> list[Path]:
    """The source files of the four packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def words_of(text: str) -> list[tuple[int, str]]:
    """(line, text) of every name, string and comment of a file; underscores of names separate words.

    The name `tell` is left out: it is the method of file objects.
    """
    kinds = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (token.start[0], token.string.replace("_", " ") if token.type == tokenize.NAME else token.string)
        for token in tokens
        if token.type in kinds and (token.type, token.string) != (tokenize.NAME, "tell")
    ]


def breaches(text: str) -> list[tuple[int, str]]:
    """(line, banned word) of a file."""
    return [(line, hit[1].lower()) for line, word in words_of(text) for hit in PATTERN.finditer(word)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1  # it goes on\n", [(1, "goes on")]),
        ('"""What stands."""\n', [(1, "stands")]),
        ("def tell_all(): ...\n", [(1, "tell")]),
        ("standard = understand = 'fateful, intelligent'\n", []),
    ],
)
def test_breaches(text: str, expected: list[tuple[int, str]]) -> None:
    assert breaches(text) == expected


def test_banned_words_are_not_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}, use: {BANNED[word]}"
        for path in files()
        for line, word in breaches(path.read_text(encoding="utf-8"))
        if (path.relative_to(ROOT).as_posix(), word) not in ON_DISK
    ]
    assert not found, f"{len(found)} banned words\n" + "\n".join(found)


def test_errors_have_the_form() -> None:
    """A message that says what was expected says what it got instead, and ends with a full stop."""
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            raised = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
            if not raised or ast.unparse(node.exc.func) not in {"ConfigError", "ContractError"}:
                continue
            message = node.exc.args[0]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            if ": expected " in text and ("got " not in text or not text.endswith((".", "?", "{}"))):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[-80:]}")
    assert not found, f"{len(found)} messages\n" + "\n".join(found)


def test_no_class_name_has_two_meanings() -> None:
    """Public class names are unique in the tree."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
