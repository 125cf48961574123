"""The facts file: forms of answers, what is missing, what does not apply, and its template."""

import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from pipeline.disclosure.answers import MISSING, UNUSED, FactsFile, parse_answer, read_answers, template
from pipeline.disclosure.questions import DATE, LIST, QUESTIONS, SOURCE_QUESTIONS, YES_NO, Question
from schemas.errors import ConfigError
from tests.pipeline.disclosure.facts_file import COMPLETE


def read(folder: Path, text: str, sources: tuple[str, ...] = ("web", "books")) -> FactsFile:
    file = folder / "facts.toml"
    file.write_text(text)
    return read_answers(str(file), sources)


def test_a_complete_file_leaves_nothing_missing(tmp_path: Path) -> None:
    answers = read(tmp_path, COMPLETE)
    states = {question.key: answers.of(question.key).state for question in QUESTIONS if not question.optional}
    assert [key for key, state in states.items() if state == MISSING] == []
    assert states["model.base_models"] == UNUSED
    assert states["private.datasets"] == UNUSED  # because private.obtained is no
    assert answers.of("content.continuous_training").value == "no"
    assert answers.of("model.placed_on_market").value == "2026-11-25"
    assert answers.sources_of("crawled") == ("web",)
    assert answers.of_source("web", "title").state == UNUSED
    assert answers.of_source("books", "title").value == "Books"


def test_without_a_file_all_is_missing() -> None:
    answers = read_answers(None, ["web"])
    assert {answers.of(question.key).state for question in QUESTIONS} == {MISSING}
    assert answers.of_source("web", "kind").state == MISSING


def test_a_question_of_a_kind_is_unused_only_if_every_kind_is_known(tmp_path: Path) -> None:
    known = read(tmp_path, '[sources.web]\nkind = "public"\n[sources.books]\nkind = "other"\n')
    assert known.of("crawler.names").state == UNUSED
    partly = read(tmp_path, '[sources.web]\nkind = "public"\n')
    assert partly.of("crawler.names").state == MISSING


def test_every_wrong_entry_is_named(tmp_path: Path) -> None:
    text = '[provider]\nnmae = "x"\n[document]\nupdated = "soon"\n[user]\ninteractions = "maybe"\n'
    text += '[sources.web]\nkind = "crawl"\n[sources.wbe]\nkind = "other"\n[model]\nnames = "one"\n'
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    for part in (
        "unknown provider.nmae (did you mean provider.name?)",
        "document.updated = 'soon', not a date such as 2026-08-02",
        "user.interactions = 'maybe', not yes or no",
        "sources.web.kind = 'crawl', not one of public, ",
        "unknown sources.wbe.kind (did you mean sources.web.kind?)",
        "model.names = 'one', not a list of texts",
    ):
        assert part in message


@pytest.mark.parametrize("kind", ["licensed", "private", "synthetic", "other"])
def test_an_answer_that_a_source_contradicts_is_refused(tmp_path: Path, kind: str) -> None:
    names = {"licensed": "agreements", "private": "obtained", "synthetic": "created", "other": "used"}
    sources = f'[sources.web]\nkind = "{kind}"\n'
    assert read(tmp_path, f'{sources}[{kind}]\n{names[kind]} = "yes"\n').sources_of(kind) == ("web",)
    with pytest.raises(ConfigError, match=f"{kind}.{names[kind]} = no, with 'web' as a source of the kind {kind}"):
        read(tmp_path, f'{sources}[{kind}]\n{names[kind]} = "no"\n')


@pytest.mark.parametrize("text", ["[provider", "\x00", "a = 1979-99-99"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected TOML, got an error"):
        read(tmp_path, text)


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    assert read(tmp_path, "#" * ((1 << 20) - 1) + "\n").values == {}
    with pytest.raises(ConfigError, match=r"at most 1048576 bytes, got 1048577 bytes"):
        read(tmp_path, "#" * (1 << 20) + "\n")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (YES_NO, True, "yes"),
        (YES_NO, "no", "no"),
        (YES_NO, 1, None),
        (DATE, date(2026, 8, 2), "2026-08-02"),
        (DATE, "2026-08-02", "2026-08-02"),
        (DATE, "2026-13-02", None),
        (LIST, ["a", "b"], ("a", "b")),
        (LIST, [" "], None),
        (LIST, [], ""),
        (LIST, "not applicable", "not applicable"),
        ("text", "a", "a"),
        ("text", " ", None),
        ("text", 3, None),
        ("text", "", ""),
    ],
)
def test_forms_of_answers(kind: str, value: Any, expected: Any) -> None:
    assert parse_answer(Question("a.b", "1", "?", kind), value) == expected


def test_the_template_has_every_question_once_and_is_a_file_without_answers(tmp_path: Path) -> None:
    names = ('we"b]\n[x', "books")
    parsed = tomllib.loads(template(names))
    keys = [f"{section}.{name}" for section, own in parsed.items() if section != "sources" for name in own]
    assert sorted(keys) == sorted(question.key for question in QUESTIONS)
    assert {*parsed["sources"]} == {*names}
    assert [*parsed["sources"]["books"]] == [question.key for question in SOURCE_QUESTIONS]
    answers = read(tmp_path, template(names), names)
    assert {*answers.values.values()} == {""}
    assert {answers.of(question.key).state for question in QUESTIONS} == {MISSING}


HOSTILE_VALUES = (
    *("inf", "-inf", "nan", "-0.0", "1e400", "9" * 400, "9" * 5000, "0x" + "f" * 5000, "true", "{}", "[[]]", "[1]"),
    *("0001-01-01", "9999-12-31", "2026-02-30", "1979-05-27T07:32:00-08:00", "07:32:00", '"\\u0000"', '" "', "''"),
    *(
        '"2026-1-1"',
        '"99999-01-01"',
        "[" * 5000 + "]" * 5000,
        "{a = {b = {c = 1}}}",
        '["", 3]',
        '"\\ud800"',
        "=",
        "\x00",
    ),
)


def refusal(folder: Path, text: str) -> str:
    """The error message of a facts file; empty if it is accepted."""
    try:
        read(folder, text)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", HOSTILE_VALUES, ids=range(len(HOSTILE_VALUES)))
def test_any_value_is_an_answer_or_one_sentence(tmp_path: Path, value: str) -> None:
    keys = [question.key.split(".", 1) for question in QUESTIONS[::4]]
    keys += [["sources.web", question.key] for question in SOURCE_QUESTIONS]
    for section, name in [*keys, ["sources", "web"], [value, "x"], ["document", value]]:
        for text in (f"[{section}]\n{name} = {value}\n", f"{section}.{name} = {value}\n"):
            message = refusal(tmp_path, text)
            assert message == "" or message.startswith(f"--facts {tmp_path}/facts.toml: expected ")
            assert len(message) < 1000 + len(str(tmp_path))


def test_many_wrong_names_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, "\n".join(f"x{number} = 1" for number in range(50_000)))
    assert "unknown x0; unknown x1;" in message
    assert message.endswith("; unknown x49 and 49,950 more. Correct the file.")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\x00", b"a = '" + b"x" * (1 << 20), b"\xed\xa0\x80", b""])
def test_any_bytes_are_a_facts_file_or_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "facts.toml").write_bytes(data)
    if data:
        with pytest.raises(ConfigError, match=r"--facts .*facts.toml: expected "):
            read_answers(str(tmp_path / "facts.toml"), ("web",))
    else:
        assert read_answers(str(tmp_path / "facts.toml"), ("web",)).values == {}
