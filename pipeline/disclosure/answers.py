"""The facts file: a TOML file with the answers of a person, its template, and what is missing in it.

An answer is a text, a date, `yes` or `no`, or a list of texts. An empty one is missing; `not applicable` is an answer.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from pipeline.disclosure.questions import (
    DATE,
    KINDS,
    LIST,
    NOT_APPLICABLE,
    QUESTIONS,
    SOURCE_QUESTIONS,
    TEXT,
    YES_NO,
    Question,
)
from schemas.errors import ConfigError

GIVEN, MISSING, UNUSED = "given", "missing", "not applicable"
"""States of an answer."""
MAX_BYTES = 1 << 20
"""Maximum size of a facts file."""
MAX_PROBLEMS, SHOWN_NAME = 50, 100
"""Maximum number of wrong entries in an error message, and of characters of an unknown name."""
BARE = re.compile(r"[A-Za-z0-9_-]+")
SOURCES = "sources"
CLAIMS = (
    ("licensed.agreements", "licensed"),
    ("ab2013.licensed", "licensed"),
    ("private.obtained", "private"),
    ("synthetic.created", "synthetic"),
    ("other.used", "other"),
)
"""(answer, kind of a source): an answer `no` contradicts a source of this kind."""


@dataclass(frozen=True)
class FileAnswer:
    """An answer of the facts file, or its absence."""

    question: Question
    key: str
    """Its name in the facts file, such as `provider.name`."""
    state: str
    """GIVEN, MISSING or UNUSED."""
    value: str | tuple[str, ...] = ""
    """A text, or several; `yes` or `no`; a date as YYYY-MM-DD."""

    @property
    def is_yes(self) -> bool:
        """True if the answer is `yes`."""
        return self.value == "yes"


@dataclass(frozen=True)
class FactsFile:
    """The answers of a facts file for the sources of a run."""

    path: str
    """The facts file, as the user names it; empty without one."""
    values: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """FactsFile by name; those of a source are `sources.NAME.key`."""
    sources: tuple[str, ...] = ()
    """The sources of the run."""

    def of(self, key: str) -> FileAnswer:
        """Return the answer to a question of QUESTIONS."""
        question = next(question for question in QUESTIONS if question.key == key)
        kinds = {self.kind_of(source) for source in self.sources}
        return self._answer(question, key, kinds)

    def of_source(self, source: str, key: str) -> FileAnswer:
        """Return the answer to a question of SOURCE_QUESTIONS for a source of the run."""
        question = next(question for question in SOURCE_QUESTIONS if question.key == key)
        return self._answer(question, f"{SOURCES}.{source}.{key}", {self.kind_of(source)})

    def kind_of(self, source: str) -> str:
        """Return the kind of a source; empty if it is not given."""
        return str(self.values.get(f"{SOURCES}.{source}.kind", ""))

    def sources_of(self, kind: str) -> tuple[str, ...]:
        """Return the sources of a kind."""
        return tuple(source for source in self.sources if self.kind_of(source) == kind)

    def _answer(self, question: Question, key: str, kinds: set[str]) -> FileAnswer:
        """Return an answer; `kinds`: those of the sources that it is about, with an empty text for one not given."""
        value = self.values.get(key, "")
        if value == NOT_APPLICABLE:
            return FileAnswer(question, key, UNUSED, value)
        if value:
            return FileAnswer(question, key, GIVEN, value)
        condition, _, other = question.when.partition(":")
        if condition == "kind" and not kinds & {other, ""}:
            return FileAnswer(question, key, UNUSED)
        if condition == "yes" and (self.values.get(other) in ("no", NOT_APPLICABLE)):
            return FileAnswer(question, key, UNUSED)
        return FileAnswer(question, key, MISSING)


def read_answers(path: str | None, sources: Sequence[str]) -> FactsFile:
    """Return the answers of a facts file; None: none. `sources`: those of the run.

    Raises ConfigError, which names every wrong entry, if the file is no TOML file or has unknown names or wrong types.
    """
    if path is None:
        return FactsFile("", {}, tuple(sources))
    file = Path(path)
    if not file.is_file() or file.stat().st_size > MAX_BYTES:
        got = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        raise ConfigError(
            f"--facts {path}: expected a TOML file of at most {MAX_BYTES} bytes, got {got}. Write one with "
            "`penstock summary --template`."
        )
    try:
        raw = tomllib.loads(file.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also a number with too many digits
        raise ConfigError(f"--facts {path}: expected TOML, got an error: {error}. Correct the file.") from error
    values: dict[str, str | tuple[str, ...]] = {}
    problems: list[str] = []
    for key, value in _entries(raw):
        question = _question(key, sources)
        parsed = None if question is None else parse_answer(question, value)
        if question is None:
            problems.append(_unknown(key, sources) if len(problems) < MAX_PROBLEMS else key)
        elif parsed is None:
            problems.append(f"{key} = {_shown(value)}, not {expected_form(question)}")
        else:
            values[key] = parsed
    answers = FactsFile(path, values, tuple(sources))
    problems += _contradictions(answers)
    if problems:
        more = f" and {len(problems) - MAX_PROBLEMS:,} more" if len(problems) > MAX_PROBLEMS else ""
        raise ConfigError(
            f"--facts {path}: expected the names and forms of `penstock summary --template`, got "
            f"{'; '.join(problems[:MAX_PROBLEMS])}{more}. Correct the file."
        )
    return answers


def _unknown(key: str, sources: Sequence[str]) -> str:
    """Return an unknown name in words, with the nearest known one."""
    names = [*(known.key for known in QUESTIONS), *_source_keys(sources)]
    close = difflib.get_close_matches(key[:SHOWN_NAME], names, n=1)
    return f"unknown {key:.{SHOWN_NAME}}" + (f" (did you mean {close[0]}?)" if close else "")


def _shown(value: Any) -> str:
    """Return a value for an error message, in at most 100 characters."""
    if isinstance(value, int) and value.bit_length() > 300:  # Python refuses to print a number of 4,300 digits
        return "a very large number"
    return f"{type(value).__name__} of many values" if isinstance(value, dict | list) else f"{value!r:.100}"


def _contradictions(answers: FactsFile) -> list[str]:
    """Return each answer `no` that the kind of a source contradicts."""
    return [
        f"{key} = no, with {answers.sources_of(kind)[0]!r:.100} as a source of the kind {kind}"
        for key, kind in CLAIMS
        if answers.values.get(key) == "no" and answers.sources_of(kind)
    ]


def expected_form(question: Question) -> str:
    """Return the form of an answer in words."""
    if question.key == "kind":
        return f"one of {', '.join(KINDS)}"
    forms = {YES_NO: "yes or no", DATE: "a date such as 2026-08-02", LIST: "a list of texts"}
    return forms.get(question.kind, "a text")


def parse_answer(question: Question, value: Any) -> str | tuple[str, ...] | None:
    """Return an answer in its stored form, empty for a missing one; None if the value has another form."""
    if value in ("", [], NOT_APPLICABLE):
        return value or ""
    if question.kind == LIST:
        is_texts = isinstance(value, list) and all(isinstance(item, str) and item.strip() for item in value)
        return tuple(value) if is_texts else None
    if question.kind == YES_NO:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value if value in ("yes", "no") else None
    if question.kind == DATE:
        return _date(value)
    if question.key == "kind":
        return value if value in KINDS else None
    return value if isinstance(value, str) and value.strip() else None


def _date(value: Any) -> str | None:
    try:
        day = value if type(value) is date else date.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return day.isoformat()


def template(sources: Sequence[str]) -> str:
    """Return a facts file without answers: each question with its field, and the questions of each source."""
    lines = [
        "# Facts that only a person can give, for `penstock summary RUN --facts FILE`.",
        f'# An empty answer is missing. Write "{NOT_APPLICABLE}" where a question does not apply.',
    ]
    section = ""
    for question in QUESTIONS:
        own, _, name = question.key.partition(".")
        if own != section:
            lines += ["", f"[{own}]"]
            section = own
        lines += _question_lines(question, name)
    for source in sources or ("NAME",):
        quoted = source if BARE.fullmatch(source) else json.dumps(source)
        lines += ["", f"[{SOURCES}.{quoted}]"]
        for question in SOURCE_QUESTIONS:
            lines += _question_lines(question, question.key)
    return "\n".join(lines) + "\n"


def _question_lines(question: Question, name: str) -> list[str]:
    condition = {"yes": "if {} is yes", "kind": "if a source is {}"}
    kind, _, other = question.when.partition(":")
    notes = [
        question.field,
        *([condition[kind].format(other)] if kind else []),
        *(["optional"] if question.optional else []),
    ]
    form = "" if question.kind == TEXT else f" ({expected_form(question)})"
    empty = "[]" if question.kind == LIST else '""'
    return [f"# {', '.join(notes)}: {question.text}{form}", f"{name} = {empty}"]


def _entries(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a parsed facts file: `section.name`, or `sources.NAME.key`."""
    for section, values in raw.items():
        if not isinstance(values, dict):
            yield section, values
            continue
        for name, value in values.items():
            if section == SOURCES and isinstance(value, dict):
                yield from ((f"{SOURCES}.{name}.{key}", inner) for key, inner in value.items())
            else:
                yield f"{section}.{name}", value


def _source_keys(sources: Sequence[str]) -> list[str]:
    return [f"{SOURCES}.{source}.{question.key}" for source in sources for question in SOURCE_QUESTIONS]


def _question(key: str, sources: Sequence[str]) -> Question | None:
    known = {question.key: question for question in QUESTIONS}
    for source in sources:
        known |= {f"{SOURCES}.{source}.{question.key}": question for question in SOURCE_QUESTIONS}
    return known.get(key)
