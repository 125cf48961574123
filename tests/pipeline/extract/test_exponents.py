"""Raised and lowered numbers: marked beside other numbers, and in every reader of HTML."""

import pytest
from resiliparse.parse.html import HTMLTree

import penstock
from pipeline.extract.exponents import MAX_INNER, mark_exponents, may_have_exponents
from pipeline.extract.inline import TextForm
from pipeline.sources.forums.stackexchange import text_of_html

CASES = [
    ("10<sup>5</sup> m", "10^5 m"),
    ("10<SUP> 5 </SUP>", "10^ 5 "),
    ("10<sup>-3</sup> 10<sup>−3</sup>", "10^-3 10^−3"),
    ("<b>10</b><sup><i>5</i></sup>", "10^5"),
    ("3<sup>1</sup>/<sub>2</sub>", "3 1/2"),
    ("3<sup>1</sup>⁄<sub>2</sub>", "3 1⁄2"),
    ("3<span><sup>1</sup>/<sub>2</sub></span>", "3 1/2"),
    ("101<sub>2</sub>", "101_2"),
    ('2019<sup><a href="#n">3</a></sup>', "2019^3"),
    ("2<sup>2</sup><sup>3</sup>", "2^2^3"),
    ("٣<sup>2</sup>", "٣^2"),
    ("m<sup>2</sup> H<sub>2</sub>O 5<sup>th</sup> 10 <sup>5</sup> <sup>1</sup>/<sub>2</sub>", None),
    ("10<p><sup>5</sup>", None),
    ("2019<sup>[3]</sup> 10<sup></sup> <sup>14</sup>C 10<sup>1234567890123</sup>", None),
]


@pytest.mark.parametrize(("html", "text"), CASES)
def test_numbers_are_marked(html: str, text: str | None) -> None:
    assert may_have_exponents(html)
    tree = HTMLTree.parse(f"<p>{html}</p>")
    plain = tree.body.text
    assert bool(mark_exponents(tree)) == (text is not None)
    assert tree.body.text == (plain if text is None else text)


def test_pages_without_them() -> None:
    assert not may_have_exponents("<summary>10</summary>")
    assert mark_exponents(HTMLTree.parse("")) == 0
    deep = HTMLTree.parse(f"1<sup>{'<b>' * MAX_INNER}2</sup>")
    assert mark_exponents(deep) == 0


def test_pages_and_posts_have_the_marks() -> None:
    html = f"<article>{'<p>A long paragraph of words, which nobody reads.</p>' * 3}<p>About 10<sup>5</sup>.</p>"
    assert penstock.extract(html).text.endswith("About 10^5.")
    for markdown in (False, True):
        assert text_of_html("<p>About 10<sup>5</sup>.</p>", TextForm(markdown=markdown)) == "About 10^5."


def test_lists_of_posts_have_their_numbers() -> None:
    for markdown in (False, True):
        html = '<ol start="3"><li>a</li><li>b</li></ol>'
        assert text_of_html(html, TextForm(markdown=markdown)) == "3. a\n4. b"
