"""The text of kept blocks: paragraphs, headings, lists, quotes and code, as text and as Markdown."""

import tracemalloc

import pytest
from resiliparse.parse.html import HTMLTree

from pipeline.extract.assemble import EMPTY_LINE, assemble
from pipeline.extract.blocks import cut_blocks
from pipeline.extract.formulas import write_formulas
from pipeline.extract.inline import TextForm

URL = "https://example.org/a/page.html"


def write(body: str, kept: list[int] | None = None, **form: bool) -> str:
    tree = HTMLTree.parse(f"<body>{body}</body>")
    write_formulas(tree)
    blocks = cut_blocks(tree.body.html)
    text = assemble(blocks, list(range(len(blocks))) if kept is None else kept, TextForm(**form), URL)
    return text.replace(EMPTY_LINE, "")


@pytest.mark.parametrize(
    ("body", "text", "markdown"),
    [
        ("<h2>Title</h2><p>one  two\nthree", "Title\n\none two three", "## Title\n\none two three"),
        ("<h1>One<br>Two</h1>", "One Two", "# One Two"),
        ("<a href=x><h3>In <b>a</b> link</h3></a>", "In a link", "### In a link"),
        ('<h2><a href=x>A</a><a class="anchor" href="#a">#</a></h2>', "A", "## A"),
        ('<h2>No. <a href="#a">1</a></h2>', "No. 1", "## No. 1"),
        ("<h2><div>a</div><div>b</div></h2>", "a\n\nb", "## a\n\n## b"),
        ("<p>a<br>b", "a\nb", "a\nb"),
        ("One.<br><br>Two.<br>\n<br/>Three.<br>&nbsp;<br>Four<br>line", "One.\n\nTwo.\n\nThree.\n\nFour\nline", None),
        ("<details><summary>More</summary><p>Inside</p></details>", "More\n\nInside", None),
        ("<address>A<br>B</address><hr>c", "A\nB\n\nc", None),
        ("<figure><img src=i alt=x><figcaption>The <b>cat</b></figcaption></figure>", "The cat", "The **cat**"),
        (
            "<p dir=rtl>مرحبا <b>بالعالم</b>، 123</p><ol dir=rtl><li>واحد<li>اثنان</ol>",
            "مرحبا بالعالم، 123\n\n1. واحد\n2. اثنان",
            "مرحبا **بالعالم**، 123\n\n1. واحد\n2. اثنان",
        ),
        ("<p>中文<br>第二行", "中文\n第二行", "中文\n第二行"),
    ],
)  # fmt: skip
def test_paragraphs_and_headings(body: str, text: str, markdown: str | None) -> None:
    assert (write(body), write(body, markdown=True)) == (text, text if markdown is None else markdown)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<ul><li>a<li>b</ul><p>c", "- a\n- b\n\nc"),
        ("<ul><li>a<br>b<br><br>c</ul>", "- a\n  b\n  c"),
        ("<ol start=9><li>a<li>b<p>c</ol>", "9. a\n10. b\n    c"),
        ("<ol><li>a<li value=7>b<li>c</ol>", "1. a\n7. b\n8. c"),
        ("<ol reversed><li>a<li>b</ol>", "2. a\n1. b"),
        ("<ol><li></li><li>b</ol>", "2. b"),
        ("<ul><li>a<ul><li>b</ul><li><p>c<p>d</ul>", "- a\n  - b\n- c\n  d"),
        ("<ul><li>a<ol><li>b<ul><li>c</ul></ol>d<li>e</ul>", "- a\n  1. b\n     - c\n  d\n- e"),
        ("<ul><li><ul><li>a<li>b</ul></ul>", "  - a\n  - b"),
        ("<p>in<ul><li>a</ul>out<ul><li>b</ul>", "in\n\n- a\n\nout\n\n- b"),
        ("<ul><li><h3>a</h3>b</ul>", "- a\n  b"),
        ("<dl><dt>a<dt>b<dd>c<dd><p>d<p>e</dl><p>f", "a\nb\nc\nd\ne\n\nf"),
        ("<dl><div><dt>a</dt><dd>b</dd></div><div><dt>c</dt><dd>d</dd></div></dl>", "a\nb\nc\nd"),
        ("<ul><li>- a<li>• b<li>-5<li>*c*<li>- </ul>", "- a\n- b\n- -5\n- *c*\n- -"),
        ("<ol><li>1. a<li>2. b<li>4. c<li>4.5 d</ol>", "1. a\n2. b\n3. 4. c\n4. 4.5 d"),
        ("<li>alone", "- alone"),
    ],
)
def test_lists(body: str, text: str) -> None:
    assert write(body) == text
    assert write(body, markdown=True).replace("### ", "") == text


@pytest.mark.parametrize(
    ("body", "markdown"),
    [
        ("<blockquote><p>a<p>b</blockquote><p>c", "> a\n>\n> b\n\nc"),
        ("<blockquote>a<blockquote>b</blockquote></blockquote>", "> a\n>\n> > b"),
        ("<blockquote>a</blockquote><blockquote>b</blockquote>", "> a\n\n> b"),
        ("<blockquote><ul><li>a<li>b</ul></blockquote>", "> - a\n> - b"),
        ("<blockquote><pre>a\n\n\n  b</pre></blockquote>", "> ```\n> a\n>\n>\n>   b\n> ```"),
        ("<blockquote><table><tr><td>a<td>b<tr><td>c<td>d</table>", "> | a | b |\n> | --- | --- |\n> | c | d |"),
    ],
)  # fmt: skip
def test_quotes(body: str, markdown: str) -> None:
    assert write(body, markdown=True) == markdown
    assert not write(body).startswith(">")


NUMBERED = (
    # Rouge, Pygments, Hexo: a cell with all numbers, a cell with all lines
    '<table class="rouge-table"><tr><td class="rouge-gutter gl"><pre class="lineno">1\n2\n</pre></td>'
    '<td class="rouge-code"><pre><i>if</i> x:\n    y\n</pre></td></tr></table>',
    '<table class="highlighttable"><tr><td class="linenos"><div class="linenodiv"><pre>1\n2</pre></div></td>'
    '<td class="code"><div><pre><i>if</i> x:\n    y\n</pre></div></td></tr></table>',
    '<figure class="highlight"><table><tr><td class="gutter"><pre><span>1</span><br><span>2</span><br></pre></td>'
    '<td class="code"><pre><span>if x:</span><br><span>    y</span><br></pre></td></tr></table></figure>',
    # GitHub: a row for each line
    '<table class="highlight"><tr><td class="blob-num" data-line-number=1></td><td class="blob-code">if x:</td></tr>'
    '<tr><td class="blob-num" data-line-number=2></td><td class="blob-code">    y</td></tr></table>',
    # SyntaxHighlighter: an element for each line
    '<table><tr><td class="gutter"><div class="line">1</div><div class="line">2</div></td><td class="code"><div>'
    '<div class="line"><code>if x:</code></div><div class="line"><code>&nbsp;&nbsp;&nbsp;&nbsp;</code><code>y</code>'
    "</div></div></td></tr></table>",
    "<code>if x:<br>&nbsp;&nbsp;&nbsp;&nbsp;y</code>",
)


@pytest.mark.parametrize("body", NUMBERED)
def test_code_without_its_line_numbers(body: str) -> None:
    assert write(f"<p>a</p>{body}<p>b") == "a\n\nif x:\n    y\n\nb"
    assert write(f"<p>a</p>{body}<p>b", markdown=True) == "a\n\n```\nif x:\n    y\n```\n\nb"


def test_a_code_table_is_code_only_to_the_last_kept_block() -> None:
    assert write(f"<p>a</p>{NUMBERED[3]}<p>b", [1]) == "if x:"
    assert write(f"<p>a</p>{NUMBERED[0]}<p>b", [0, 3]) == "a\n\nb"


@pytest.mark.parametrize("gutter", ["", "menu", "1 menu"])
def test_a_layout_table_with_a_gutter_is_no_code(gutter: str) -> None:
    cells = f'<td class="gutter">{gutter}</td><td><p>one</p><p>two</p></td>'
    assert write(f"<table><tr>{cells}</tr></table>").endswith("one\n\ntwo")


@pytest.mark.parametrize(
    ("body", "text", "markdown"),
    [
        (
            "<pre><code class=language-py>if x:\n\n\n\ty  \n</code></pre>",
            "if x:\n\n\n\ty",
            "```py\nif x:\n\n\n\ty\n```",
        ),
        ("<div class='highlight-sh notranslate'><div><pre>a</pre></div></div>", "a", "```sh\na\n```"),
        ("<div class='lang-en'><pre>a</pre></div>", "a", "```\na\n```"),
        ("<pre>a<br>  b<br>c</pre>", "a\n  b\nc", "```\na\n  b\nc\n```"),
        ("<pre>a ``` b\n````</pre>", "a ``` b\n````", "`````\na ``` b\n````\n`````"),
        ("<ol><li>Run:<pre>$ a\n\n\n  b</pre>then</ol>", "1. Run:\n   $ a\n\n\n     b\n   then", None),
        ("<ul><li><pre>- a</pre></ul>", "- - a", "- ```\n  - a\n  ```"),
        ("<p>a <code>b</code> c", "a b c", "a `b` c"),
        ("<p>a <code>b</code><br>c", "a b\nc", "a `b`\nc"),
        ("<code>a<br>b</code> <code>c</code>", "a\nb c", "`a\nb` `c`"),
    ],
)
def test_code(body: str, text: str, markdown: str | None) -> None:
    assert write(body) == text
    if markdown is not None:
        assert write(body, markdown=True) == markdown


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<p>a <math><msup><mi>x</mi><mn>2</mn></msup></math> b", "a $x^2$ b"),
        ("<p>a <math display=block><mi>x</mi></math> b", "a\n\n$$x$$\n\nb"),
        ("<p>a <script type='math/tex'>x^2</script> b", "a $x^2$ b"),
        ("<ul><li>a <script type='math/tex; mode=display'>y</script>b</ul>", "- a\n  $$y$$\n  b"),
        ('<p>a <img class="tex" alt="x^2" src=i> b', "a $x^2$ b"),
        (
            '<p>a <span class="katex"><span class="katex-mathml"><math><semantics><mi>c</mi><annotation '
            'encoding="application/x-tex">\\sqrt{c}</annotation></semantics></math></span><span class="katex-html" '
            'aria-hidden="true">c</span></span> b',
            "a $\\sqrt{c}$ b",
        ),
        (
            '<p>a <mjx-container jax="CHTML" display="true"><mjx-math>x</mjx-math><mjx-assistive-mml><math><mi>x</mi>'
            "</math></mjx-assistive-mml></mjx-container> b",
            "a\n\n$$x$$\n\nb",
        ),
        (r"<p>a \(x\) and \[y\]", r"a \(x\) and \[y\]"),
        ("<table><tr><th>a<th>b<tr><td><math><mi>x</mi></math><td>1</table>", "a | b\n$x$ | 1"),
    ],
)
def test_formulas(body: str, text: str) -> None:
    assert write(body) == text


def test_only_kept_blocks_are_written() -> None:
    body = "<nav>menu</nav><p>one<ul><li>two<li>three</ul><p>four"
    assert write(body, [1, 3]) == "one\n\n- three"
    assert write(body, []) == ""


@pytest.mark.parametrize("markdown", [False, True])
def test_deep_nesting_stays_small(markdown: bool) -> None:
    assert write("<ul><li>" * 300 + "deep", markdown=markdown) == "  " * 9 + "- deep"
    quotes = write("<blockquote>" * 300 + "<p>a<p>b", markdown=markdown)
    assert len(quotes) == (10 * 2 * 3 + 3 if markdown else 4)


def test_items_of_deep_lists_take_little_memory() -> None:
    body = "<ul><li>" * 1_000 + "<li>x" * 5_000
    write(body)
    tracemalloc.start()
    write(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6  # 5 million references to items take 40 MB


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ("<pre>    a\n  b</pre>", f"{EMPTY_LINE}    a\n  b"),
        ("<p>x</p><pre>    a\n  b</pre>", "x\n\n    a\n  b"),
        ("<pre>\n\n\tif x:\n\t\ty</pre>", f"{EMPTY_LINE}\tif x:\n\t\ty"),
        ("<pre>a\n  b</pre>", "a\n  b"),
        ("<p>  x", "x"),
        ("<ul><li><ul><li>a</ul></ul>", "  - a"),
    ],
)
def test_the_indentation_of_code_at_the_start_is_marked(body: str, begins: str) -> None:
    blocks = cut_blocks(HTMLTree.parse(f"<body>{body}</body>").body.html)
    assert assemble(blocks, list(range(len(blocks))), TextForm()) == begins
