"""Nesting: the count that lets most pages pass, the scan behind it, and bombs of several kinds."""

import pytest

from pipeline.engine.stage import Drop
from pipeline.extract.nesting import MAX_REOPENED, SAFE_TAGS, SCAN_CHARS, nesting_problem

DEEP = Drop("too_deep", 3001, 3000)


def problem(text: str, max_depth: int = 3000, charset: str = "utf-8") -> Drop | None:
    return nesting_problem(text.encode(charset), text, max_depth)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<div>" * 3000, None),
        ("<div>" * 3001, DEEP),
        ("<DIV class=x>\n" * 100_000, DEEP),
        ("<div>" * 100_000 + "</div>" * 100_000, DEEP),
        ("<div></x>" * 100_000, DEEP),
        ("<b>" * 100_000, DEEP),
        ("<table><tr><td>" * 3001, DEEP),
        ("<ul><li>" * 3000, None),
        ("<x-y>" * 3001, DEEP),
        ("<div>text</div>" * 5000, None),
        ("<p>one<br><img src=x><li>two<td>three<a name=x>" * 1000, None),
        ("<svg>" + "<path d='M0 0'/>" * 5000 + "</svg>", None),
        ("<div></DIV>" * 5000, None),
        ("</div>" * 5000 + "<div>" * 3000, None),
        ("a < b && c <d" * 5000, DEEP),
        ("", None),
        ("<", None),
    ],
)
def test_depth(text: str, expected: Drop | None) -> None:
    assert problem(text) == expected


@pytest.mark.parametrize(("depth", "expected"), [(3, None), (4, Drop("too_deep", 4, 3))])
def test_a_low_limit_is_kept_exactly(depth: int, expected: Drop | None) -> None:
    assert problem("<p>x<br>" * 100 + "<div>" * depth + "</div>" * depth, max_depth=3) == expected


def test_tags_at_the_seams_of_the_scan_count_once() -> None:
    filler = "<p>" * SAFE_TAGS
    for shift in range(12):
        text = filler + "x" * (SCAN_CHARS - len(filler) - shift) + "<section>" * 3001
        assert problem(text) == DEEP
        assert problem(text[: -len("<section>")]) is None


@pytest.mark.parametrize(("blocks", "reopens"), [(500, False), (501, True)])
def test_unclosed_formatting(blocks: int, reopens: bool) -> None:
    assert MAX_REOPENED == 500 * 500
    text = "<p>" + "".join(f"<font color={number}>" for number in range(500)) + "<p>x" * blocks
    assert problem(text) == (Drop("unclosed_formatting", 250_500, MAX_REOPENED) if reopens else None)


@pytest.mark.parametrize(
    ("tag", "reopens"), [("b", True), ("B", True), ("br", False), ("body", False), ("span", False)]
)
def test_only_formatting_elements_are_reopened(tag: str, reopens: bool) -> None:
    text = f"<{tag}>" * 600 + "<p>x" * 600
    assert problem(text) == (Drop("unclosed_formatting", 250_200, MAX_REOPENED) if reopens else None)


def test_closed_formatting_is_not_reopened() -> None:
    assert problem("<p><font color=1><b>x</b></font>" * 100_000) is None


def test_too_few_tags_to_do_harm_are_not_scanned() -> None:
    assert SAFE_TAGS**2 / 4 <= MAX_REOPENED
    assert problem("<b>" * 500 + "<p>" * 500, max_depth=10**6) is None


@pytest.mark.parametrize("charset", ["utf-8", "utf-16", "utf-16-be", "utf-32", "cp1252", "iso2022_jp"])
def test_the_count_hides_nothing_in_any_charset(charset: str) -> None:
    assert problem("<div>" * 3000, charset=charset) is None
    assert problem("<div>" * 3001, charset=charset) == DEEP
    assert problem("㰯" * 9000 + "<div>" * 3001, charset=charset if "utf" in charset else "utf-8") == DEEP
