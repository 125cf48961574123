"""Hostile pages through the default extractor: each ends soon, in a text or a drop.

There are no limits of time here: without the bounds that they test, these pages take from minutes to hours, or GiB.
"""

import pytest

from pipeline.extract.blocks import MAX_TAGS
from tests.pipeline.extract.test_assemble import write
from tests.pipeline.extract.test_extract import SENTENCE, row, run

TEXT = SENTENCE * 3
MAIN = f"<p>{TEXT}</p>"


@pytest.mark.parametrize(
    "bomb",
    [
        "<select>" + "<option>o" * 100_000 + "</select>",
        "<select>" + "<OPTGROUP><oPtIoN>o</option></OPTGROUP>" * 50_000 + "</select>",
        "<div " + " ".join(f"a{number}=v" for number in range(100_000)) + "></div>",
        "<br " + " ".join(f"a{number}='>'" for number in range(100_000)) + ">",
        "<!--" + "<p>x" * MAX_TAGS,
        "<script>" + "<p>x" * MAX_TAGS,
        "\0" * 1_000_000 + " " * 1_000_000,
        "".join(f"<img src='data:image/png;base64,{'iVBORw0KGgo' * 10_000}' alt={number}>" for number in range(10)),
        "<template>" * 2_900,
        "<object>" * 2_900,
        "<object></object>" * 20_000,
        "<math><mrow>" * 1_400,
        "<script type='application/ld+json'>" + "[" * 100_000 + "</script>",
    ],
    ids=lambda bomb: bomb[:24],
)
def test_the_main_text_before_a_bomb_is_kept(bomb: str) -> None:
    page = row(MAIN + bomb, _http_charset="utf-8")
    assert run(page) is None
    assert page["text"] == TEXT.strip()


@pytest.mark.parametrize(
    ("bomb", "rule"),
    [
        ("<div>" * 100_000 + TEXT, "too_deep"),
        ("<p>" + "".join(f"<font color={n}>" for n in range(1_500)) + "<p>x" * 1_000, "unclosed_formatting"),
        ("<p>" + "&#xD800;" * 100_000, "undecodable"),
        ("<br>" * 500_000, "no_text"),
        ("<p>" + "word " * 1_100_000, "text_too_long"),
    ],
    ids=lambda bomb: bomb[:24],
)
def test_other_bombs_are_dropped(bomb: str, rule: str) -> None:
    drop = run(row(bomb, _http_charset="utf-8"))
    assert drop is not None
    assert drop.rule == rule


@pytest.mark.parametrize(
    ("body", "length"),
    [
        ("<ol>" + "<li>x" * 40_000, sum(len(f"{number}. x\n") for number in range(1, 40_001)) - 1),
        ("<ul><li>" * 1_000 + "<p>x" * 20_000, 20_000 * 22 - 1),
        ("<blockquote>" * 1_000 + "<p>x" * 5_000, 5_000 * 22 + 4_999 * 20 - 1),
        ("<table><tr>" + "<td>a<table><tr><td>1<td>2<tr><td>3<td>4</table>" * 5_000, None),
        ("<table><tr><td class=gutter>1<td>" * 700 + "<table><tr><td class=lineno>1<td>x</table>" * 5_000, None),
        ("<b>" * 2_000 + "x" * 1_000_000, 1_000_000 + 2 * 2),
    ],
    ids=lambda body: str(body)[:24],
)
def test_shapes_take_linear_time(body: str, length: int | None) -> None:
    text = write(body, markdown=True, links=True, images=True)
    assert length is None or len(text) == length
