"""Blocks of a page: their texts, and their place in the markup against a walk with a stack."""

from collections.abc import Callable

import numpy as np
import pytest
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from pipeline.extract import blocks
from pipeline.extract.blocks import MAX_TAGS, Blocks, Markup, cut_blocks, read_markup, read_markup_in_python
from pipeline.extract.tags import BIT, CONTAINERS, LEFT_OUT, NOTHING, OPENS, OPENS_PRE, effects_of, name_words, read_tag
from tests.support.gold_pages import gold_pages, missing_data
from tests.support.growth import MOST, growth


def cut(body: str) -> Blocks:
    tree = HTMLTree.parse(f"<html><body>{body}</body></html>")
    return cut_blocks(tree.body.html)


def texts(body: str) -> list[str]:
    return [" ".join(text.split()) for text in cut(body).sources()]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", []),
        ("text", ["text"]),
        ("<p>a<p>b", ["a", "b"]),
        ("<p>a <b>bold</b> and <i>more</i>", ["a bold and more"]),
        ("a<br>b", ["a b"]),
        ("a<br> <br>b", ["a", "b"]),
        ("<div>a<hr>b</div>", ["a", "b"]),
        ("<pre>one\n<div>two</div></pre>three", ["one two", "three"]),
        ("<p>a<script>document.write('<p>no</p><script>')</script>b", ["ab"]),
        ("a<style>p {}</style><svg><text>no</text></svg><select><option>no</select>b", ["ab"]),
        ("<template><template>no</template>no</template>yes", ["yes"]),
        ("<object><object>no</object>no</object>yes", ["yes"]),
        ("<!-- <p>no --><p>yes<!--no-->", ["yes"]),
        ('<p title="a > b < c">yes</p>', ["yes"]),
        ('<p "="">yes</p><p class="x" <a="">also</p>', ["yes", "also"]),
        ("1 &lt; 2 &amp;amp; &quot;", ['1 < 2 &amp; "']),
        ("&nbsp;<p>&nbsp;a&nbsp;b", ["a b"]),
        ("<ul><li>a<ul><li>b</ul>c</ul>", ["a", "b", "c"]),
        ("<p>中文。<p>ไทย<p dir=rtl>عربي", ["中文。", "ไทย", "عربي"]),
        ("<table><tr><td>a<td><td>b</table>", ["a", "b"]),
    ],
)
def test_texts_of_blocks(body: str, expected: list[str]) -> None:
    assert texts(body) == expected


def test_counts_of_a_block() -> None:
    blocks = cut('<img><p>see <a href="#">this <b>page</b></a> <img></p><a href="#"><div>linked</div></a>')
    assert blocks.sources() == ["see this page", "linked"]
    assert blocks.chars.tolist() == [3 + 4 + 4, 6]  # of the texts between tags, without the spaces at their ends
    assert (blocks.link_chars.tolist(), blocks.bold_chars.tolist()) == ([8, 6], [4, 0])
    assert (blocks.links.tolist(), blocks.in_link.tolist()) == ([1, 0], [False, True])
    assert blocks.images.tolist() == [1 + 1, 0]


def test_a_line_break_is_kept() -> None:
    assert cut("a<br>b").sources() == ["a\vb"]


@pytest.mark.parametrize(
    ("source", "marks", "words"),
    [
        ("div", [], []),
        ('nav class="mainMenu top-bar"', ["nav"], ["main", "menu", "top", "bar"]),
        ('div role="navigation" id="n1"', ["nav"], []),
        ('div hidden=""', ["hidden"], []),
        ('div style="color: red; display: none"', ["hidden"], []),
        ('div aria-hidden="false"', [], []),
        ('p itemprop="articleBody"', ["property", "body_property"], ["itemprop:articlebody"]),
        ('ol class="commentlist"', ["list", "comments"], ["commentlist"]),
        ('div itemscope="" itemtype="https://schema.org/Article"', ["scope"], []),
    ],
)
def test_what_a_tag_says(source: str, marks: list[str], words: list[str]) -> None:
    tag = read_tag(source.encode())
    assert [mark for mark in BIT if tag.marks & BIT[mark]] == sorted(marks, key=list(BIT).index)
    assert list(tag.words) == words
    assert CONTAINERS[tag.element] == source.partition(" ")[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"post-body b2 x", ("post", "body")),
        (b"PostBody HTMLView a", ("post", "body", "html", "view")),
        ("über-uns".encode(), ("ber", "uns")),
        (b"12 _", ()),
        (b"ABC", ("abc",)),
    ],
)
def test_words_of_a_class(value: bytes, words: tuple[str, ...]) -> None:
    assert name_words(value) == words


@pytest.mark.parametrize(
    ("tag", "effect"),
    [
        *((f"<{name}>", OPENS_PRE if name == "pre" else OPENS) for name in CONTAINERS),
        *((f"<{name} id='a'>", OPENS_PRE if name == "pre" else OPENS) for name in CONTAINERS),
        ("<blockquotes>", NOTHING),
        ("<blockquote-with-a-long-name>", NOTHING),
        ("<d>", NOTHING),
        ("<>", NOTHING),
        ("<é>", NOTHING),
        ("<textarea rows=2>", LEFT_OUT),
        ("<p", OPENS),
    ],
)
def test_the_effect_of_a_tag(tag: str, effect: int) -> None:
    html = f"a{tag}".encode()
    assert effects_of(html, np.array([1])).tolist() == [effect]


def walk(blocks: Blocks) -> tuple[list[int], list[int], list[int]]:
    """The parent, the end and the depth of each container, by a stack."""
    stack: list[int] = []
    parents, ends, depths, pre = [], [], [], 0
    for number in range(len(blocks.tag_starts)):
        name = blocks.tag(number).partition(" ")[0]
        element = name.lstrip("/")
        if element not in CONTAINERS:
            continue
        if name == element:
            pre += element == "pre" and pre > 0
            if (pre and element != "pre") or pre > 1:
                continue
            parents.append(stack[-1] if stack else 0)
            depths.append(len(stack))
            stack.append(len(ends))
            ends.append(-1)
            pre = pre or int(element == "pre")
        elif not pre or element == "pre":
            pre = max(0, pre - 1)
            if not pre:
                ends[stack.pop()] = len(ends)
    return parents, [len(ends) if end < 0 else end for end in ends], depths


@pytest.mark.parametrize(
    "body",
    [
        "<div><p>a</p><ul><li>b<li>c</ul></div><p>d",
        "<pre>a<div>b</div><pre>c</pre></pre><div>d</div>",
        "<table><colgroup><col><col></colgroup><tr><td>a</table>",
        "<div>" * 300 + "deep",
        "<noscript><div>a</div></noscript><template><div></template><p>b",
    ],
)
def test_containers_are_those_of_a_walk(body: str) -> None:
    blocks = cut(body)
    assert (blocks.parents.tolist(), blocks.ends.tolist(), blocks.depths.tolist()) == walk(blocks)


def test_more_tags_than_are_read() -> None:
    blocks = cut_blocks("<body>" + "<p>a</p>" * (MAX_TAGS // 2) + "</body>")
    assert blocks.is_cut
    assert len(blocks) == MAX_TAGS // 2
    assert not cut("<p>a</p>").is_cut


@pytest.mark.parametrize("cut", ["<!--" + "<" * 9, '<p title="' + "<" * 9, '<p class="a' + "<" * 9, "<script>x"])
def test_a_page_that_is_cut_inside_a_tag(cut: str) -> None:
    blocks = cut_blocks("<body>" + "<p>a</p>" * (MAX_TAGS // 2 - 2) + cut + '<">--><p>b</p>' * 4)
    assert blocks.is_cut
    assert len(blocks) == MAX_TAGS // 2 - 2
    assert {blocks.tag(number).partition(" ")[0] for number in range(len(blocks.tag_starts))} >= {"p", "/p"}


@pytest.mark.skipif(missing_data(("wcxb",)) is not None, reason=missing_data(("wcxb",)) or "")
def test_no_text_of_real_pages_is_lost() -> None:
    """Every word that the library writes for the whole page is in a block, and containers are those of a walk."""
    lost = total = 0
    for number, page in enumerate(gold_pages(("wcxb",))):
        if number % 12:
            continue
        tree = HTMLTree.parse(page.html)
        blocks = cut_blocks(tree.body.html)
        assert (blocks.parents.tolist(), blocks.ends.tolist(), blocks.depths.tolist()) == walk(blocks)
        assert np.all(blocks.chars > 0)
        words = extract_plain_text(tree, main_content=False, alt_texts=False, list_bullets=False).split()
        known = set(" ".join(blocks.sources()).split())
        lost += sum(word not in known for word in words)
        total += len(words)
    assert total > 30_000
    assert lost / total < 0.01


RUNNING_ON = (
    *('<" e="<" c=">" d="', '<" e="<" a="" a="" c=">" d="', "<", "< ", "<<<<a b c", "<a =", '<a b="', "<a b='", "<!"),
    *('<i x="', '<br x=">" ', "<svg ", '<svg "', "<svg>", "</svg>", "<script ", '<script x="'),
)


@pytest.mark.parametrize("read", [read_markup, read_markup_in_python])
@pytest.mark.parametrize("unit", RUNNING_ON)
def test_tags_that_run_on_take_time_linear_in_the_page(
    unit: str, read: Callable[[str], Markup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_TAGS", 10**6)

    def make(size: int) -> str:
        return f"<body><xmp>{unit * (size // len(unit))}</xmp></body>"

    assert growth(read, make, 100_000) < MOST


@pytest.mark.parametrize("read", [read_markup, read_markup_in_python])
def test_the_first_tags_that_run_on_are_read_to_their_ends(read: Callable[[str], Markup]) -> None:
    unit = '<" e="<" c=">" d="'
    few, many = (read(f"<body><xmp>{unit * count}</xmp><p title='<'>a</body>") for count in (2, 2_000))
    assert few.texts[-1] == many.texts[-1] == "a"
    assert len(many.starts) > 2_000
