"""Every regular expression of the package takes linear time on the texts that it is applied to.

The patterns are collected from the modules: compiled ones in globals, containers and classes, and literals that are
passed to functions of `re`. Each one is searched for in repetitions of the characters and words that it names. What is
superlinear then must be in BOUNDED, with the reason for which no stranger can make it slow.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cache
from re import _constants, _parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

import pytest

from tests.support.growth import FACTOR, MOST, cpu_seconds
from tests.support.paths import ROOT

PACKAGES = ("schemas", "pipeline", "jobs", "train", "penstock")
SIZES = (64, 512)
"""Lengths of the smaller text; the larger one is FACTOR times as long. A cubic pattern is found at the first."""
SUSPECT = 0.002
"""CPU time of a search in a text of 2 * FACTOR times such a length from which its growth is measured [s]."""
MOST_UNITS = 40
ANYTHING = ("a", " ", "\n", "<", "1", "a ", "=")
NAMES_OF_OURS = "names of files in a run folder, which are short"
TITLES = "titles and names of at most 1,000 characters, whose runs of blanks are single blanks"
SERVERS = "an error of the store that the user has chosen"
BOUNDED: dict[str, str] = {
    "schemas.storage.AWS_ERROR": SERVERS,
    "schemas.storage.AZURE_ERROR": SERVERS,
    "schemas.storage:' \\\\(Request ID: [^)]*\\\\)'.sub": SERVERS,
    "jobs.spark_session.JAVA_CLASS": "one line of an error of Spark, and only its first match",
    "pipeline.engine.spark.MARKED_ERROR": "an error of Spark with a mark that our workers wrote",
    "pipeline.extract.charset._COMMENT": "the first 4,096 bytes of a page",
    "pipeline.extract.metadata._SEPARATOR": TITLES,
    "pipeline.extract.metadata_values._AFTER_NAME": TITLES,
    "pipeline.extract.metadata_values._SEVERAL": TITLES,
    "pipeline.garbage.LISTING": NAMES_OF_OURS,
    "pipeline.sources.code.languages._FIRST_LINE": "the first 200 characters of a file",
    "pipeline.sources.code.licences._TAG_END": "an expression of at most 401 characters",
    "pipeline.sources.formats._DUMP": "names of files, and paths in an archive, of at most 64 KiB",
    "pipeline.sources.formats.SITES": "paths in an archive, of at most 64 KiB",
    "pipeline.sources.formats.POSTS_NAMES": "paths in an archive, of at most 64 KiB",
    "pipeline.sources.splits.TOKEN": "a pattern of files in the user's own recipe",
    "pipeline.tokens.tokenizer:'\\\\d+ vs (\\\\d+)'.search": "an error of the library that trains tokenizers",
}
"""Why a pattern that is superlinear is safe, by its name: what it is applied to."""


def children(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, own.name, None) for own in fields(value))


def compiled_in(value: object, depth: int = 3) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth:
        for child in children(value):
            yield from compiled_in(child, depth - 1)


def patterns_of(module: ModuleType) -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Yield (name, pattern) of the compiled patterns in a module's globals and classes."""
    for name, value in vars(module).items():
        owned = vars(value).items() if isinstance(value, type) and value.__module__ == module.__name__ else ()
        for label, own in ((name, value), *((f"{name}.{attribute}", own) for attribute, own in owned)):
            yield from ((f"{module.__name__}.{label}", pattern) for pattern in compiled_in(own))


def literals_of(module: ModuleType) -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Yield (name, pattern) of the literals that a module passes to functions of `re`."""
    source = (ROOT / (module.__file__ or "")).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str | bytes)
            and node.func.attr != "compile"
        ):
            yield f"{module.__name__}:{node.args[0].value!r}.{node.func.attr}", re.compile(node.args[0].value)


def collect(package: str) -> dict[str, re.Pattern[Any]]:
    """Each pattern of a package once, by the first name that it was found under."""
    found: dict[tuple[Any, int], tuple[str, re.Pattern[Any]]] = {}
    root = importlib.import_module(package)
    names = [package, *(own.name for own in pkgutil.walk_packages(root.__path__, f"{package}."))]
    for module in map(importlib.import_module, (name for name in names if not name.endswith("__main__"))):
        if (module.__file__ or "").endswith(".py"):
            for name, pattern in (*patterns_of(module), *literals_of(module)):
                found.setdefault((pattern.pattern, pattern.flags), (name, pattern))
    return dict(found.values())


def named(node: Any) -> Iterator[str]:
    """Yield the characters that a parsed pattern names: literals, both ends of ranges, and one of each class."""
    if isinstance(node, _parser.SubPattern):
        for operation, argument in node:
            if operation in (_constants.LITERAL, _constants.NOT_LITERAL):
                yield chr(argument)
            elif operation is _constants.RANGE:
                yield from map(chr, argument)
            elif operation is _constants.CATEGORY:
                yield {"DIGIT": "7", "SPACE": " ", "WORD": "a"}[str(argument).rpartition("_")[2]]
            else:
                yield from named(argument)
    elif isinstance(node, tuple) and len(node) == 2 and node[0] in (_constants.LITERAL, _constants.RANGE):
        yield from [chr(node[1])] if node[0] is _constants.LITERAL else map(chr, node[1])
    elif isinstance(node, list | tuple):
        for child in node:
            yield from named(child)


def runs_of(node: Any) -> Iterator[str]:
    """Yield the literal words in a parsed pattern."""
    run = ""
    for operation, argument in node:
        if operation is _constants.LITERAL:
            run += chr(argument)
            continue
        if run:
            yield run
        run = ""
        for part in argument if isinstance(argument, list | tuple) else (argument,):
            for own in part if isinstance(part, list) else (part,):
                if isinstance(own, _parser.SubPattern):
                    yield from runs_of(own)
    if run:
        yield run


def units_of(pattern: re.Pattern[Any]) -> list[str]:
    """What is repeated in the texts for a pattern."""
    tree = _parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    characters, runs = sorted({*named(tree)}), [*dict.fromkeys(runs_of(tree))]
    step = -(-len(characters) // 16) or 1
    pairs = [first + second for first in runs[:3] for second in (*characters[::step][:3], *runs[:3])]
    return [*dict.fromkeys([*runs[:8], *characters[::step], *pairs, *ANYTHING])][:MOST_UNITS]


def text_of(pattern: re.Pattern[Any], unit: str, start: str, size: int) -> Any:
    text = f"{start}{unit * (size // len(unit))}\0"
    return text if isinstance(pattern.pattern, str) else text.encode("utf-8", "surrogatepass")


def methods_in(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, method) of the calls `NAME.method` and `module.NAME.method`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and hasattr(re.Pattern, node.attr):
            owner = node.value
            if isinstance(owner, ast.Name | ast.Attribute):
                yield (owner.id if isinstance(owner, ast.Name) else owner.attr), node.attr


@cache
def methods_by_name() -> dict[str, set[str]]:
    """The methods by which patterns are used: of `module._PRIVATE` in its module, of `PUBLIC` anywhere."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, method in methods_in(path.read_text(encoding="utf-8")):
                found.setdefault(f"{module}.{name}" if name.startswith("_") else name, set()).add(method)
    return found


def methods_of(name: str) -> set[str]:
    """The methods by which a pattern is used; those of a pattern in a container are not known."""
    last = name.rpartition(".")[2]
    if ":" in name:
        return {last}
    return methods_by_name().get(name if last.startswith("_") else last, {"finditer"})


def run(pattern: re.Pattern[Any], method: str, text: Any) -> None:
    """Use a pattern on a text from its begin to its end."""
    if method in ("match", "fullmatch"):
        getattr(pattern, method)(text)
        return
    for _ in pattern.finditer(text):
        pass


def is_superlinear(pattern: re.Pattern[Any], unit: str, start: str, method: str) -> bool:
    def seconds(size: int, runs: int) -> float:
        text = text_of(pattern, unit, start, size)
        return cpu_seconds(lambda: run(pattern, method, text), runs)

    for size in SIZES:
        if seconds(2 * FACTOR * size, 1) < SUSPECT:
            continue
        few, many = seconds(size, 3), seconds(FACTOR * size, 1)
        if many > MOST * few and seconds(FACTOR * size, 2) > MOST * min(few, seconds(size, 5)):
            return True
    return False


def superlinear(pattern: re.Pattern[Any], methods: Set[str] = frozenset({"finditer"})) -> str | None:
    """The unit whose repetition takes superlinear time, if any."""
    units = units_of(pattern)
    starts = ["", *dict.fromkeys(unit for unit in units[:1] if unit not in ANYTHING)]
    each = methods & {"match", "fullmatch"} | ({"finditer"} if methods - {"match", "fullmatch"} else set())
    tried = ((unit, start, method) for method in sorted(each) for start in starts for unit in units)
    return next((unit for unit, start, method in tried if is_superlinear(pattern, unit, start, method)), None)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_pattern_is_superlinear_on_the_text_of_a_stranger(package: str) -> None:
    patterns = collect(package)
    units = {name: superlinear(patterns[name], methods_of(name)) for name in patterns if name not in BOUNDED}
    assert {name: f"{patterns[name].pattern!r:.90} in {unit!r}" for name, unit in units.items() if unit} == {}


def test_a_quadratic_pattern_is_found_and_a_linear_one_is_not() -> None:
    assert superlinear(re.compile(r"\s+x")) is not None
    assert superlinear(re.compile(r"<!--.*?-->", re.DOTALL)) is not None
    assert superlinear(re.compile(rb"(?:a|b)*c")) is not None
    assert superlinear(re.compile(r"[a-z]{1,40}@x")) is None


def test_every_reason_is_of_a_pattern_that_exists() -> None:
    names = {name for package in PACKAGES for name in collect(package)}
    assert [name for name in BOUNDED if name not in names] == []
