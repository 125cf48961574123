"""What is taken out of a page before it is parsed: options, attributes, and tags beyond the limit."""

import pytest

from pipeline.extract import page_limits
from pipeline.extract.blocks import MAX_TAGS
from pipeline.extract.page_limits import LONG_TAG, MAX_OPTIONS, bearable, first_tags

REST = "</select><p>text"


@pytest.mark.parametrize("option", ["<option>", "<OPTION value=1>", "<optgroup label='a b'>"])
def test_options_beyond_the_limit_lose_their_tags(option: str) -> None:
    page = f"<select>{option * MAX_OPTIONS}{REST}"
    assert bearable(page) == (page, ())
    assert bearable(f"{option}{page}") == (f" <select>{' ' * MAX_OPTIONS}{REST}", ("options",))


def test_other_tags_are_no_options() -> None:
    page = "<object></object><ol><output>" * MAX_OPTIONS
    assert bearable(page) == (page, ())


def attributes(count: int, value: str = "") -> str:
    return " ".join(f"a{number}{value}" for number in range(count))


@pytest.mark.parametrize("value", ["", "=1", '="1"', "='>'", ' = "<"', "=''/"])
def test_tags_with_many_attributes_lose_them(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "SAFE_CHARS", 1000)
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", 300**2 + 200**2)
    page = f"<p {attributes(300, value)}>a</p><p class=x>b<p {attributes(200, value)}>c"
    assert bearable(page) == (page, ())
    cut = bearable(page.replace(">b", f"><p {attributes(150, value)}>b"))
    assert cut == ("<p>a</p><p class=x><p>b<p>c", ("attributes",))


@pytest.mark.parametrize("root", ["html", "body", "BODY", "Html"])
@pytest.mark.parametrize("value", ["", '="1"'])
def test_repeated_roots_count_as_one_tag(root: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "SAFE_CHARS", 1000)
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", 300**2)
    tags = [f"<{root} a{number}{value}>" for number in range(301)]
    others = '<html x="1"><body y="1">' + "<hr a=1><b a=1>" * 400
    others = others.replace(f"<{root.lower()} ", "<p ")
    page = f"{others}{''.join(tags[1:])}text"
    assert bearable(page) == (page, ())
    assert bearable(f"{others}{''.join(tags)}text") == (f"{others}{f'<{root}>' * 301}text", ("attributes",))


@pytest.mark.parametrize("before", ['<p ="x>', "<p a=b'c>", "<p 'a>", "a < b '", "<!-- ' -->", '<p a= =">'])
def test_quotes_that_are_none_hide_no_attributes(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "SAFE_CHARS", 1000)
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", 300**2 - 1)
    assert bearable(f"{before}<p {attributes(300)}>x").html == f"{before}<p>x"


def test_long_values_are_no_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "SAFE_CHARS", 1000)
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", 4)
    page = f'<p title="{"many words " * LONG_TAG}" class=x>a'
    assert bearable(page) == (page, ())


def test_tags_beyond_the_limit_are_not_parsed() -> None:
    page = "<p>" * MAX_TAGS + "a "
    assert first_tags(page) == page
    assert first_tags(page + "<p>b<p>c") == page
