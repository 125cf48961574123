"""What is taken out of a page before it is parsed: options, attributes, and tags beyond the limit."""

import pytest

from pipeline.extract import page_limits
from pipeline.extract.blocks import MAX_TAGS
from pipeline.extract.page_limits import LONG_TAG, MAX_OPTIONS, attribute_work, bearable, first_tags
from tests.support.growth import MOST, growth

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


HIDING = [
    '<p x=\xa0">',
    "<p x=\x1c'>",
    '<!-- <p x="-->',
    "<script>'<p x=\"</script>",
    "<!-- <p x=\"--><q y='\">'",
    "<p x='<q y=\">",
]


@pytest.mark.parametrize("before", HIDING)
def test_what_may_be_no_attribute_hides_no_attributes(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "SAFE_CHARS", 1000)
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", 300**2 - 1)
    page = f"{before}<p {attributes(300)}>x\"' >"
    assert attribute_work(page)[0] >= 300**2
    html, limits = bearable(page)
    assert limits == ("attributes",)
    assert "a299" not in html


def test_tags_in_the_attributes_of_another_count_once() -> None:
    inner = f"<p {attributes(300)} x='"
    outer = f'<p {attributes(100)} y="{inner}">'
    assert attribute_work(outer + "'>")[0] == 301**2
    assert attribute_work((outer + "'>") * 2)[0] == 2 * 301**2
    assert attribute_work("<p 'a" * 1000)[0] == page_limits.TOO_MUCH


def test_what_the_cut_of_a_tag_joins_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "SAFE_CHARS", 1000)
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", 300**2 - 1)
    page = f'<i x="<q y=\'">\' {attributes(300)}> " {attributes(300)}>text'
    html, _ = bearable(page)
    assert attribute_work(html)[0] < 300**2
    assert html.endswith(">text")


def test_a_page_that_no_cut_helps_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", -1)
    assert bearable("<p>" * 20_000) == (("<p>" * 20_000)[: page_limits.SAFE_CHARS], ("attributes",))


@pytest.mark.parametrize("unit", ["<p 'a", "<p x=\"<p y='", "<a ", "<a b=", "<body ", "<a<", "<p a='<p b=\""])
def test_counts_take_time_linear_in_the_length(unit: str) -> None:
    assert growth(attribute_work, lambda n: unit * (n // len(unit)), 100_000) < MOST


def test_long_values_are_no_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_limits, "SAFE_CHARS", 1000)
    monkeypatch.setattr(page_limits, "MAX_ATTRIBUTE_PAIRS", 4)
    page = f'<p title="{"many words " * LONG_TAG}" class=x>a'
    assert bearable(page) == (page, ())


def test_tags_beyond_the_limit_are_not_parsed() -> None:
    page = "<p>" * MAX_TAGS + "a "
    assert first_tags(page) == page
    assert first_tags(page + "<p>b<p>c") == page
