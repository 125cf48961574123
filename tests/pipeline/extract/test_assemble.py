"""The text of kept blocks: headings, lists, tables, quotes, code, links and images, as text and as Markdown."""

import pytest
from resiliparse.parse.html import HTMLTree

from pipeline.extract.assemble import TextForm, assemble
from pipeline.extract.blocks import cut_blocks

URL = "https://example.org/a/page.html"


def write(body: str, kept: list[int] | None = None, **form: bool) -> str:
    blocks = cut_blocks(HTMLTree.parse(f"<body>{body}</body>").body.html)
    return assemble(blocks, list(range(len(blocks))) if kept is None else kept, TextForm(**form), URL)


@pytest.mark.parametrize(
    ("body", "text", "markdown"),
    [
        ("<h2>Title</h2><p>one  two\nthree", "Title\n\none two three", "## Title\n\none two three"),
        ("<p>a<br>b", "a\nb", "a\nb"),
        ("<ul><li>a<li>b</ul><p>c", "- a\n- b\n\nc", "- a\n- b\n\nc"),
        ("<ol start=3><li>a<li>b</ol>", "3. a\n4. b", "3. a\n4. b"),
        ("<ul><li>a<ul><li>b</ul><li><p>c<p>d</ul>", "- a\n  - b\n- c\n  d", "- a\n  - b\n- c\n  d"),
        ("<blockquote><p>a<p>b</blockquote>", "a\n\nb", "> a\n\n> b"),
        ("<pre><code class=language-py>if x:\n    y\n</code></pre>", "if x:\n    y", "```py\nif x:\n    y\n```"),
        ("<p>a <b>bold </b>word, <em>more</em> <code>x</code>", "a bold word, more x", "a **bold** word, *more* `x`"),
        (
            "<table><tr><th>k<th>v<tr><td>a<td><tr><td>b<td>2</table>",
            "k | v\na\nb | 2",
            "| k | v |\n| --- | --- |\n| a |  |\n| b | 2 |",
        ),
        ("<table><tr><td><p>menu<td><p>" + "word " * 70 + "<tr><td>foot<td>x</table>", None, None),
        ("<dl><dt>a<dd>b</dl>", "a\nb", "a\nb"),
    ],
)
def test_shapes(body: str, text: str | None, markdown: str | None) -> None:
    if text is None:
        assert " | " not in write(body)
        assert "---" not in write(body, markdown=True)
    else:
        assert (write(body), write(body, markdown=True)) == (text, markdown)


@pytest.mark.parametrize(
    ("body", "form", "expected"),
    [
        ('<p><a href="b?x=1&amp;y=2">this </a>page', {"links": True}, "this (https://example.org/a/b?x=1&y=2) page"),
        ('<p><a href="/b c">it</a>', {"links": True, "markdown": True}, "[it](https://example.org/b%20c)"),
        ('<p><a href="javascript:x()">it</a> <a href="#top">up</a> <a>no</a>', {"links": True}, "it up no"),
        ('<p>a <img alt="a &quot;b&quot;" src="i.png">', {"images": True}, 'a a "b"'),
        ('<p>a</p><img alt="x" src="/i.png"><p>b', {"images": True, "markdown": True}, "a\n\n![x](https://example.org/i.png)\n\nb"),
        ('<p>a</p><img alt="x" src="i.png"><p>b', {}, "a\n\nb"),
    ],
)  # fmt: skip
def test_links_and_images_by_choice(body: str, form: dict[str, bool], expected: str) -> None:
    assert write(body, **form) == expected


def test_only_kept_blocks_are_written() -> None:
    body = "<nav>menu</nav><p>one<ul><li>two<li>three</ul><p>four"
    assert write(body, [1, 3]) == "one\n\n- three"
    assert write(body, []) == ""


def test_deeply_nested_lists_stay_small() -> None:
    text = write("<ul><li>" * 300 + "deep")
    assert text.strip() == "- deep"
