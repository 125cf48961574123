"""Stages of a recipe, `[[stage]]`: a Python function of the user that measures each document in the fused pass.

The function is called as `function(text, row, **settings)`. `text` is the text after the cuts of line rules, and `row`
has all columns of `documents` that earlier stages set. It returns a dict of the declared columns (a missing column is
null), or drops the document: by the name of a declared reason, or by `Drop(reason, value, limit)`. A stage without
columns keeps a document by returning None.

The file of the function is copied when a run is prepared, and the copy is sent to the workers: it may import the
packages that are installed there, but no other file. Its SHA-256 is in the manifest, so an edited file runs again.
"""

import hashlib
import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pydantic import Field, JsonValue, field_validator, model_validator

from pipeline.engine.part import EVERY_STAGE
from pipeline.engine.stage import Drop, PerDocument, Row, RowFunction
from schemas.condition_parts import Kind, kind_of
from schemas.config import Section, execution, suggest_name
from schemas.entries import value_type
from schemas.errors import ConfigError, ContractError
from schemas.expressions import KEYWORDS
from schemas.tables import DROPPED_BEFORE, field

NAME = r"^[a-z][a-z0-9_]{0,59}$"
SECTION = "stage"
ColumnType = Literal["float32", "float64", "int32", "int64", "string", "bool"]
TYPES: Mapping[ColumnType, pa.DataType] = {
    "float32": pa.float32(),
    "float64": pa.float64(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}
FUNCTION = "function"
"""The name under which the manifest lists the SHA-256 of a stage's file."""
MESSAGE_CHARS = 160
"""Maximum length of the message of an error that the manifest stores [characters]."""
SHOWN_CHARS = 60
"""Number of characters of a wrong value that an error message repeats."""
MIN_VALUE_CHARS = 6
"""Minimum number of letters and digits of a value that is compared without its separators."""
SAMPLE_TEXT = (
    "Penstock calls each function of a recipe once on this text before a run starts.\n\n"
    "It has two paragraphs of plain English, so that a function can measure words, lines and characters.\n"
)


class StageColumn(Section):
    """A column that a stage of a recipe adds to `documents`."""

    type: ColumnType
    """Type of the values; numbers are rounded to it."""
    meaning: str = ""
    """What the column means; the report and `penstock show` print it."""
    unit: str = ""
    """Unit of the values, such as "words"; empty = none."""


class RecipeStage(Section):
    """A stage of a recipe, `[[stage]]`: its function, and the columns and reasons that the function may return."""

    name: str = Field(pattern=NAME)
    """The name of the stage in verdicts and manifests: lower-case letters, digits and _."""
    function: str = Field(json_schema_extra={"role": "location"})
    """"path/to/file.py:function" or "module:function", looked up in the recipe's folder, then in the current folder. A
    module that is in neither may be an installed one."""
    columns: dict[str, StageColumn] = Field({})
    """Columns that the function returns: name = "float32", or name = {type = "float32", meaning = "…", unit = "…"}. The
    types are float32, float64, int32, int64, string and bool."""
    reasons: dict[str, str] = Field({})
    """Reasons for which the function may drop a document, with their meanings."""
    settings: dict[str, JsonValue] = Field({})
    """Keyword arguments of the function."""
    max_failed_share: float = execution(0.01, ge=0, le=1)
    """Maximum share of the documents on which the function may raise an error. Above it, the step ends with the error;
    an error on fewer documents drops each as `failed`. The share is compared once the function was called on 100
    documents; the step also ends if it fails on each of the first 100 of an input file. With 1, no error ends it."""
    version: int = Field(1, ge=1)
    """Version of the results. Raise it if they change although the file does not, as with another package version."""

    @field_validator("columns", mode="before")
    @classmethod
    def _types_alone(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: {"type": value} if isinstance(value, str) else value for name, value in values.items()}

    @model_validator(mode="after")
    def _names(self) -> "RecipeStage":
        problems = []
        file, _, function = self.function.rpartition(":")
        if not (file and function.isidentifier()):
            problems.append(
                "function: expected 'path/to/file.py:function' or 'module:function', got "
                f"{self.function!r}. Correct it."
            )
        for kind, names, taken in (
            ("columns", self.columns, KEYWORDS),
            ("reasons", self.reasons, (*EVERY_STAGE, DROPPED_BEFORE)),
        ):
            for name in names:
                is_name = name.isascii() and name.isidentifier() and name == name.lower() and name[0] != "_"
                if not is_name or name in taken:
                    problems.append(
                        f"{kind}: expected names of lower-case letters, digits and _ that are not reserved, got "
                        f"{name!r}. Rename it."
                    )
        if not self.columns and not self.reasons:
            problems.append("columns, reasons: expected at least one of them, got neither. Declare what it returns.")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def file_name(self) -> str:
        """The name of the file or module, without folders."""
        return self.function.rpartition(":")[0].rpartition("/")[2]

    @property
    def function_name(self) -> str:
        """The name of the function in its file."""
        return self.function.rpartition(":")[2]

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured: the name of the function, but not the path of its file."""
        return super().content() | {"function": self.function_name}


class StagesConfig(Section):
    """The stages of a recipe, `[[stage]]`, in the order in which they run."""

    array: ClassVar[str] = "stages"
    stages: tuple[RecipeStage, ...] = ()
    """Stages that run after the built-in ones; a recipe writes each as a table `[[stage]]`."""

    @model_validator(mode="after")
    def _once(self) -> "StagesConfig":
        names = [stage.name for stage in self.stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"name: expected each name once, got {', '.join(twice)} more than once. Rename one.")
        return self


def resolve_functions(values: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the values of a recipe in which the files of functions have absolute paths.

    A file is looked up in `folder`, the recipe's, and then in the current folder. Others are left as they are.
    """
    stages = values.get(SECTION)
    if not isinstance(stages, list):
        return dict(values)
    return {**values, SECTION: [_resolved(stage, folder) for stage in stages]}


def _resolved(stage: Any, folder: str) -> Any:
    if not isinstance(stage, Mapping) or not isinstance(stage.get("function"), str):
        return stage  # reported when the recipe is validated
    file, _, function = stage["function"].rpartition(":")
    path = file if _is_path(file) else file.replace(".", "/") + ".py"
    places = [os.path.abspath(os.path.join(place, path)) for place in (folder, ".")]
    existing = next((place for place in places if os.path.isfile(place)), None)
    return stage if existing is None else {**stage, "function": f"{existing}:{function}"}


def _is_path(file: str) -> bool:
    return file.endswith(".py") or "/" in file


def file_of(stage: RecipeStage) -> str:
    """Return the path of the file with a stage's function. Raises ConfigError if there is no such file."""
    file = stage.function.rpartition(":")[0]
    if _is_path(file):
        path: str | None = file
    else:
        try:
            spec = importlib.util.find_spec(file)
        except (ImportError, ValueError) as error:
            raise _no_file(stage, f"an error: {error}") from error
        path = spec.origin if spec else None
    if path is None or not os.path.isfile(path):
        raise _no_file(stage, "none")
    if not path.endswith(".py"):
        raise _no_file(stage, path)
    return path


def _no_file(stage: RecipeStage, got: str) -> ConfigError:
    return ConfigError(
        f"[[stage]] {stage.name}: expected a Python file for the function {stage.function!r} in the recipe's folder, "
        f"the current folder or an installed package, got {got}. Correct `function`."
    )


def make_stage(config: RecipeStage, columns: pa.Schema, unmeasured: Collection[str]) -> PerDocument:
    """Return the declaration of a stage of a recipe.

    `columns` are the columns of the rows that the function gets; those in `unmeasured` are null in every row.
    """
    return PerDocument(
        name=config.name,
        version=config.version,
        config=RecipeStage,
        reads=("_body",),
        adds=tuple(sorted(config.columns)),
        reasons=config.reasons,
        make=partial(_make, columns.names),
        models=_models,
        compile=partial(_copy, columns, frozenset(unmeasured)),
        max_failed_share=config.max_failed_share,
        describe=partial(_describe_failure, config.file_name),
        columns=columns_of_stage({name: column.model_dump() for name, column in config.columns.items()}),
    )


def columns_of_stage(columns: Mapping[str, Mapping[str, Any]]) -> tuple[pa.Field, ...]:
    """Return the columns of a stage, sorted by name, from their `type`, `meaning` and `unit`."""
    return tuple(field(name, TYPES[c["type"]], c["meaning"], c["unit"]) for name, c in sorted(columns.items()))


def _models(config: RecipeStage) -> dict[str, str]:
    return {FUNCTION: file_of(config)}


def _copy(
    columns: pa.Schema, unmeasured: frozenset[str], config: RecipeStage, models: Mapping[str, str], folder: str
) -> dict[str, str]:
    """Check a stage's function, copy its file into `folder` under a name made from its content, and return the path."""
    path = Path(models[FUNCTION])
    source = path.read_bytes()
    target = Path(folder) / f"{path.stem}-{hashlib.sha256(source).hexdigest()[:12]}.py"
    if not target.is_file() or target.read_bytes() != source:
        unfinished = target.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(source)
        unfinished.replace(target)
    _call_on_sample(load_function(str(target), config), config, sample_row(columns, unmeasured))
    return {FUNCTION: str(target)}


def load_function(path: str, config: RecipeStage) -> Callable[..., Any]:
    """Return the function of a stage from a copy of its file.

    Raises ConfigError if the file cannot be imported, or if it has no such function with the stage's settings.
    """
    where = f"[[stage]] {config.name}"
    file = config.file_name
    source = Path(path).read_bytes()
    module = ModuleType(f"penstock_stage_{config.name}_{hashlib.sha256(source).hexdigest()[:12]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look a module up by its name
    try:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except SyntaxError as error:
        raise ConfigError(
            f"{where}: expected Python in {file}, got an error in line {error.lineno}: {error.msg}. Correct the file."
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{where}: expected a file that can be imported by itself, got {_described(error, file)}. Correct the "
            "file, or install the package that it imports."
        ) from error
    function: Callable[..., Any] | None = getattr(module, config.function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        close = suggest_name(config.function_name, names) if names else ""
        raise ConfigError(
            f"{where}: expected a function {config.function_name!r} in {file}, got none{close}. Correct `function`."
        )
    _check_signature(function, config, where)
    return function


def _check_signature(function: Callable[..., Any], config: RecipeStage, where: str) -> None:
    try:
        inspect.signature(function).bind("", {}, **config.settings)
    except TypeError as error:
        names = "".join(f", {name}" for name in sorted(config.settings))
        raise ConfigError(
            f"{where}: expected a function that accepts (text, row{names}), got "
            f"{config.function_name}{inspect.signature(function)}: {error}. Correct the function or its `settings`."
        ) from error


def _described(error: BaseException, file: str) -> str:
    """Return the type and message of an error, and the last line of the user's file that led to it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = _line_of(error, file)
    return f"{text} in line {line} of {file}" if line else text


def _line_of(error: BaseException, file: str) -> int:
    """Return the last line of a file that led to an error; 0: none did."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return line


def _describe_failure(file: str, error: BaseException, row: Row) -> tuple[str, str]:
    """Return the place in the user's file and the message of an error, without what it quotes from the document."""
    return f"{file}:{_line_of(error, file) or '?'}", without_quotes(_message(error), _quotable(row))


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # the `__str__` of an exception class of the user
        text = f"the text of the error raised {type(broken).__name__}"
    return " ".join(text[: 2 * MESSAGE_CHARS].split())


def _quotable(row: Row) -> str:
    """Return the text of a document with the texts of its columns, from which messages must not quote."""
    values = (value for value in row.values() if isinstance(value, str))
    return " ".join(" ".join(values).split())


def without_quotes(message: str, text: str) -> str:
    """Return a message in which words that `text` contains are replaced by `…`, as far as they may be personal data.

    Such words are in quotation marks, have a digit, an `@` or a capital letter, or are three or more in a row. Their
    case does not count, nor do separators in words with a digit or an `@`, since functions change both. The result has
    at most MESSAGE_CHARS characters.
    """
    folded, joined = text.casefold(), _joined(text)

    def is_quoted(part: str) -> bool:
        value = _joined(part) if any(c.isdigit() or c == "@" for c in part) else ""
        return part.casefold() in folded or (len(value) >= MIN_VALUE_CHARS and value in joined)

    def hidden(match: re.Match[str]) -> str:
        parts = [part.strip() for part in re.split(r"\\.|\s{2,}", match[2])]
        return f"{match[1]}…{match[1]}" if any(part and is_quoted(part) for part in parts) else match[0]

    words = re.sub(r"(['\"])(.*?)\1", hidden, message).split()
    runs = [" ".join(words[start : start + 3]).casefold() in folded for start in range(max(0, len(words) - 2))]
    shown = []
    for place, word in enumerate(words):
        core = word.strip(".,;:!?()[]{}<>'\"")
        is_telling = any(c.isdigit() or c == "@" for c in core) or (place > 0 and core[:1].isupper())
        in_run = any(runs[max(0, place - 2) : place + 1])
        shown.append("…" if in_run or (is_telling and is_quoted(core)) else word)
    result = re.sub(r"…(?: …)+", "…", " ".join(shown))
    return result if len(result) <= MESSAGE_CHARS else f"{result[:MESSAGE_CHARS]}…"


def _joined(text: str) -> str:
    """Return the letters and digits of a text, case-folded and without percent-encoding."""
    return "".join(filter(str.isalnum, unquote(text).casefold()))


def sample_row(columns: pa.Schema, unmeasured: Collection[str]) -> Row:
    """Return a row with a plausible value in each column, on which functions are tried before a run."""
    known = {
        "source": "web",
        "split": "sample.warc.gz",
        "url": "https://www.example.org/sample",
        "domain": "example.org",
        "date": datetime(2024, 1, 1, tzinfo=UTC),
        "record_type": "response",
        "http_status": 200,
        "mime": "text/html",
        "charset": "utf-8",
        "num_chars": len(SAMPLE_TEXT),
        "body_chars": None,  # set when the document is written
        "language": "en",
        "second_language": None,  # null for most documents
    }
    return {c.name: None if c.name in unmeasured else known.get(c.name, _sample_value(c.type)) for c in columns}


def _sample_value(kind: pa.DataType) -> Any:
    if pa.types.is_date(kind):
        return date(2024, 1, 1)
    values: Mapping[Kind, Any] = {
        "a number": 0.25 if pa.types.is_floating(kind) else 1,
        "text": "sample",
        "true or false": True,
        "bytes": bytes(16),
        "a list": {} if value_type(kind) is not None else [],
    }
    return values.get(kind_of(kind))


def _call_on_sample(function: Callable[..., Any], config: RecipeStage, row: Row) -> None:
    where = f"[[stage]] {config.name}: {config.function_name}"
    try:
        answer = function(SAMPLE_TEXT, row, **config.settings)
    except Exception as error:
        raise ConfigError(
            f"{where}: expected a result for a sample of plain English text, got "
            f"{_described(error, config.file_name)}. Correct the function. A column that the recipe "
            "does not measure is None."
        ) from error
    try:
        _result(answer, config, f"{where} on a sample text")
    except ContractError as error:
        raise ConfigError(str(error)) from error


def _make(names: Sequence[str], config: RecipeStage, models: Mapping[str, str]) -> RowFunction:
    """Return the function of a row that calls the user's function and checks what it returns."""
    function = load_function(models[FUNCTION], config)

    def measure(row: Row) -> Drop | None:
        answer = function(row["_body"], {name: row.get(name) for name in names}, **config.settings)
        where = f"[[stage]] {config.name}: {config.function_name} on document {row['doc_id'].hex()}"
        values, drop = _result(answer, config, where)
        row.update(values)
        return drop

    return measure


def _result(answer: Any, config: RecipeStage, where: str) -> tuple[Row, Drop | None]:
    """Return the columns and the drop that a function returned. Raises ContractError if it may not return them."""
    fix = f"Correct the function, or `columns` and `reasons` of [[stage]] {config.name}."
    if isinstance(answer, str):
        answer = Drop(answer)
    if isinstance(answer, Drop):
        if answer.rule not in config.reasons:
            declared = ", ".join(map(repr, config.reasons)) or "none"
            raise ContractError(f"{where}: expected a declared reason ({declared}), got {answer.rule!r}. {fix}")
        numbers = [_number(value, f"{where}: drop", fix) for value in (answer.value, answer.limit)]
        return {}, Drop(answer.rule, *numbers)
    if answer is None and not config.columns:
        return {}, None
    if not isinstance(answer, Mapping):
        raise ContractError(f"{where}: expected a dict of columns or a reason, got {_shown(answer)}. {fix}")
    unknown = [name for name in answer if name not in config.columns]
    if unknown:
        close = suggest_name(str(unknown[0]), config.columns) if config.columns else ""
        raise ContractError(f"{where}: expected only declared columns, got {unknown[0]!r}{close}. {fix}")
    values = {
        name: _value(value, config.columns[name].type, f"{where}: column {name}", fix) for name, value in answer.items()
    }
    return values, None


def _number(value: Any, where: str, fix: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ContractError(f"{where}: expected a finite number or None, got {_shown(value)}. {fix}")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _value(value: Any, kind: ColumnType, where: str, fix: str) -> Any:
    """Return the value of a column as it is stored. Raises ContractError if it is not of the column's type."""
    if value is None:
        return None
    if kind in ("float32", "float64"):
        # The table stores float32. Values are rounded here too, so that later stages read what is stored.
        with np.errstate(over="ignore"):
            number = _number(value, where, fix) or 0.0
            return _number(np.float32(number) if kind == "float32" else number, where, fix)
    if kind in ("int32", "int64"):
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if is_whole and -(2 ** (int(kind[3:]) - 1)) <= int(value) < 2 ** (int(kind[3:]) - 1):
            return int(value)
    elif kind == "bool" and isinstance(value, (bool, np.bool_)):
        return bool(value)
    elif kind == "string" and isinstance(value, str) and value.encode("utf-8", "replace").decode() == value:
        return value
    raise ContractError(f"{where}: expected {kind} or None, got {_shown(value)}. {fix}")
