"""The text inside blocks: emphasis, links and images by choice, ruby and quotation marks."""

import pytest

from pipeline.extract.assemble import assemble
from pipeline.extract.blocks import cut_blocks
from pipeline.extract.inline import MAX_URL_CHARS, TextForm
from tests.pipeline.extract.test_assemble import write
from tests.support.growth import MOST, growth

LINKS, IMAGES, MARKDOWN = {"links": True}, {"images": True}, {"markdown": True}


@pytest.mark.parametrize(
    ("body", "markdown"),
    [
        ("<p>a <b>bold </b>word, <em>more</em> <code>x</code>", "a **bold** word, *more* `x`"),
        ("<p><i><b>a</b></i> un<b>bel</b>iev<b> </b>able", "***a*** un**bel**iev able"),
        ("<p><b>a</b><b>b</b> <b>c</b>", "**ab** **c**"),
        ("<p><b>a</b><i>b</i><code>c</code><code>d</code>", "**a***b*`c``d`"),
        ("<p><b>a</b><i><b>b</b></i>", "**a*****b***"),
        ("<p><strong>a <b>b</b></strong> <em><span><i>c</i></span></em> <i><b><i>d</i></b></i>", "**a b** *c* ***d***"),
        ("<p><code>a <em>b</em> <kbd>c</kbd> <q>d</q></code>", "`a b c “d”`"),
        ("<p><code>a`b</code> <kbd>``</kbd>", "`` a`b `` ``` `` ```"),
        ("<p>**a** <b>b", "**a** **b**"),
        ("<h2><b>a</b> <code>b</code></h2>", "## a b"),
    ],
)
def test_marks_of_markdown(body: str, markdown: str) -> None:
    assert write(body, markdown=True) == markdown


def test_adjacent_marks_take_linear_time() -> None:
    def page(size: int) -> str:
        return "<p>" + f"<b>{'a' * 200}</b>" * size

    assert growth(lambda body: write(body, markdown=True), page, 5_000) <= MOST


@pytest.mark.parametrize(
    ("path", "query", "expected"),
    [("b" * 100, "?" + "q" * MAX_URL_CHARS, "https://a.org/x"), ("b" * MAX_URL_CHARS, "", "x")],
)
def test_links_are_not_resolved_against_a_very_long_address(path: str, query: str, expected: str) -> None:
    blocks = cut_blocks('<body><p><a href="x">it</a></p></body>')
    text = assemble(blocks, [0], TextForm(links=True), f"https://a.org/{path}{query}")
    assert text == f"it ({expected})"


def test_marks_in_deep_nesting_are_left_out() -> None:
    assert write("<p>" + "<b><i>" * 100 + "a", markdown=True) == "***a***"
    assert write("<p>" + "<q>" * 9 + "<b><i>a", markdown=True) == "“**a**”"


@pytest.mark.parametrize(
    ("body", "form", "expected"),
    [
        ('<p><a href="b?x=1&amp;y=2">this </a>page', LINKS, "this (https://example.org/a/b?x=1&y=2) page"),
        ('<p><a href="/b c">it</a>', LINKS | MARKDOWN, "[it](https://example.org/b%20c)"),
        ('<p><code><a href="/b">it</a></code>', LINKS | MARKDOWN, "`it`"),
        ('<p><a href="/b"><em>it</em></a>', LINKS | MARKDOWN, "[*it*](https://example.org/b)"),
        ('<p><b>a</b><a href="/b"><b>it</b></a>', LINKS | MARKDOWN, "**a**[**it**](https://example.org/b)"),
        (
            '<a href="/b"><h2>a</h2><div>b</div></a><p>c',
            LINKS | MARKDOWN,
            "## [a](https://example.org/b)\n\n[b](https://example.org/b)\n\nc",
        ),
        ('<p><a href="javascript:x()">it</a> <a href="#top">up</a> <a>no</a>', LINKS, "it up no"),
        ('<p><a href="http://[x">it</a>', LINKS, "it"),
        ('<p><a href="/' + "x" * 2000 + '">it</a>', LINKS, "it"),
        ('<p><a href="/b">it</a>', {}, "it"),
        ('<p>a <img alt="a &quot;b&quot;" src="i.png">', IMAGES, 'a a "b"'),
        ('<p>a <img alt="x" src="i.png">', {}, "a"),
        ('<p>a</p><img alt="x" src="/i.png"><p>b', IMAGES | MARKDOWN, "a\n\n![x](https://example.org/i.png)\n\nb"),
        ('<p>a</p><img alt="x" src="i.png"><p>b', {}, "a\n\nb"),
        (
            '<p><img alt="x" src="data:image/png;base64,AA" data-src="/i.png"> a',
            IMAGES | MARKDOWN,
            "![x](https://example.org/i.png) a",
        ),
        ('<p><img alt="x" src="data:image/png;base64,AA"> a', IMAGES | MARKDOWN, "x a"),
        ('<img alt="x" src="/i.png"><p>b</p><img alt="y">', IMAGES, "x\n\nb\n\ny"),
        ('<figure><img alt="x"><figcaption>c</figcaption></figure>', IMAGES, "x\n\nc"),
        ('<p><a href="/b"><img alt="x" src="/i"></a>', IMAGES | LINKS | MARKDOWN, ""),
        (
            '<p><a href="/b"><img alt="x" src="/i"></a> t',
            IMAGES | LINKS | MARKDOWN,
            "[![x](https://example.org/i)](https://example.org/b) t",
        ),
    ],
)  # fmt: skip
def test_links_and_images_by_choice(body: str, form: dict[str, bool], expected: str) -> None:
    assert write(body, **form) == expected


def test_images_beside_blocks_that_are_left_out() -> None:
    """Images count in the container around a kept block, not those of the blocks that are left out."""
    body = (
        '<img alt="logo"><p>menu</p><img alt="advert"><article><img alt="first"><p>text</p><p>more</p>'
        '<img alt="last"></article><div><img alt="next"><p>other</p></div>'
    )
    assert write(body, [1, 2], images=True) == "first\n\ntext\n\nmore\n\nlast"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<p><ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp>字<rp>(</rp><rt>ji</rt><rp>)</rp></ruby>", "漢(kan)字(ji)"),
        ("<p><ruby>漢<rp>（</rp><rt>かん</rt><rp>）</rp></ruby>", "漢（かん）"),
        ("<p><ruby>漢<rt>かん</rt></ruby>です", "漢(かん)です"),
        ("<p><ruby>漢<rt></rt></ruby>です", "漢です"),
        ("<p>he said <q>yes</q>, <q>“no”</q>", "he said “yes”, “no”"),
        ("<p>x<sup>2</sup> H<sub>2</sub>O super<wbr>cali", "x2 H2O supercali"),
        ("<p><del>old</del> <ins>new</ins>", "old new"),
        ("<p>a<textarea>b</textarea><input value=c><iframe>d</iframe><svg><text>e</text></svg>f", "af"),
    ],
)  # fmt: skip
def test_what_a_reader_sees(body: str, expected: str) -> None:
    assert write(body) == expected
