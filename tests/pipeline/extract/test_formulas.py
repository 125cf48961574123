"""Formulas of pages as LaTeX: each kind of markup, hostile pages, and real pages whose other text does not change."""

import re

import pytest
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from pipeline.extract import formulas
from pipeline.extract.charset import decode
from pipeline.extract.formulas import (
    MAX_LATEX_CHARS,
    FormulaCounts,
    formula_counts,
    may_have_formulas,
    write_formulas,
)
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.http import read_response
from tests.support.gold_pages import read_record
from tests.support.paths import SHARED

ANNOTATED = (
    '<math{}><semantics><mi>x</mi><annotation encoding="application/x-tex">{}</annotation></semantics></math>'.format
)
SQUARE = "<math><msup><mi>x</mi><mn>2</mn></msup></math>"


def written(html: str) -> str:
    """The body of a page after its formulas are written."""
    assert may_have_formulas(html)
    tree = HTMLTree.parse(f"<body>{html}</body>")
    write_formulas(tree)
    assert tree.body is not None
    return tree.body.html.removeprefix("<body>").removesuffix("</body>")


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (SQUARE, "$x^2$"),
        ('<math display="block"><mi>x</mi></math>', "<div>$$x$$</div>"),
        ('<math mode="display"><mi>x</mi></math>', "<div>$$x$$</div>"),
        (ANNOTATED("", r"\frac12 &lt; y"), r"$\frac12 &lt; y$"),
        (ANNOTATED(' alttext="\\no"', ""), r"$\no$"),
        ('<math alttext="\\displaystyle x_{1}"><mi>z</mi></math>', "$x_{1}$"),
        ('<math alttext="x squared"><mi>z</mi></math>', "$z$"),
        ("<m:math><m:mi>G</m:mi></m:math>", "$G$"),
        ("<math>\\alpha + 1</math>", r"$\alpha + 1$"),
        ('5<math><mspace width=".17em"></mspace></math>F', "5 F"),
        ("a<math></math>b", "ab"),
        ("<math><apply><ci>x</ci></apply></math>", "<math><apply><ci>x</ci></apply></math>"),
    ],
)
def test_mathml(html, text):
    assert written(f"<p>a {html} b</p>") == f"<p>a {text} b</p>"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ('<script type="math/tex">a < b % c\n+ d</script>', "$a &lt; b + d$"),
        ('<script type="math/tex; mode=display">x</script>', "<div>$$x$$</div>"),
        ('<script type="math/mml"> <mml:math> <mml:mi>A</mml:mi> </mml:math> </script>', "$A$"),
        ('<script type="math/asciimath">x^2</script>', '<script type="math/asciimath">x^2</script>'),
        (
            '<span class="MathJax_Preview">old</span><span class="MathJax" id="MathJax-Element-1-Frame"><nobr>x2</nobr>'
            f'<span class="MJX_Assistive_MathML">{SQUARE}</span></span><script type="math/tex">x^2</script>',
            "$x^2$",
        ),
        (
            '<div class="MathJax_Display"><span class="MathJax" id="MathJax-Element-2-Frame">x</span></div>\n'
            '<script type="math/tex; mode=display">x</script>',
            "\n<div>$$x$$</div>",
        ),
        (
            '<span class="MathJax_SVG" data-mathml="&lt;math&gt;&lt;mi&gt;y&lt;/mi&gt;&lt;/math&gt;"><svg/></span>',
            "$y$",
        ),
        (
            '<div class="MathJax_Display"><span data-mathml="&lt;math&gt;&lt;mi&gt;y&lt;/mi&gt;&lt;/math&gt;" '
            'class="MathJax">y</span></div>',
            "<div>$$y$$</div>",
        ),
        (f'<span class="MathJax"><i>x</i><span class="MJX_Assistive_MathML">{SQUARE}</span></span>', "$x^2$"),
        (
            '<mjx-container class="MathJax" display="true"><mjx-math><mjx-mi></mjx-mi></mjx-math>'
            f'<mjx-assistive-mml display="block">{SQUARE}</mjx-assistive-mml></mjx-container>',
            "<div>$$x^2$$</div>",
        ),
        ('<span class="MathJax_Preview">math</span>', '<span class="MathJax_Preview">math</span>'),
    ],
)
def test_mathjax(html, text):
    assert written(f"<section>a {html} b</section>") == f"<section>a {text} b</section>"


KATEX = (
    '<span class="katex"><span class="katex-mathml">{}</span><span class="katex-html" aria-hidden="true">'
    '<span class="base">x2</span></span></span>'.format
)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (KATEX(ANNOTATED("", "x^2")), "$x^2$"),
        (f'<span class="katex-display">{KATEX(ANNOTATED("", "x^2"))}</span>', "<div>$$x^2$$</div>"),
        (KATEX(SQUARE), "$x^2$"),
        (KATEX("\n\n x\n\n\n 2\n\n\n \\begin{x}\n y &lt; 1 \\end{x}\n\n"), r"$\begin{x} y &lt; 1 \end{x}$"),
        (f'<span class="katex--display">{KATEX(ANNOTATED("", "x"))}</span>', None),
        ('<div class="katex"><p>No formula</p></div>', '<div class="katex"><p>No formula</p></div>'),
    ],
)
def test_katex(html, text):
    text = '<span class="katex--display"><div>$$x$$</div></span>' if text is None else text
    assert written(f"<section>a {html} math</section>") == f"<section>a {text} math</section>"


WIKIPEDIA = (
    '<span class="mwe-math-element"><span class="mwe-math-mathml-{0} mwe-math-mathml-a11y" style="display: none;">{1}'
    '</span><img class="mwe-math-fallback-image-{0}" src="https://wikimedia.org/api/rest_v1/media/math/render/svg/1" '
    'alt="{2}"></span>'.format
)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (WIKIPEDIA("inline", ANNOTATED(' alttext="b"', r"{\displaystyle E=mc^{2}}"), "c"), "$E=mc^{2}$"),
        (WIKIPEDIA("inline", ANNOTATED("", r"{\textstyle {a}} {b}"), "c"), r"${\textstyle {a}} {b}$"),
        (WIKIPEDIA("display", ANNOTATED(' display="block"', "x"), "c"), "<div>$$x$$</div>"),
        (WIKIPEDIA("inline", "", r"{\displaystyle x}"), "$x$"),
        (WIKIPEDIA("display", "", "x"), "<div>$$x$$</div>"),
    ],
)
def test_wikipedia(html, text):
    assert written(f"<dd>a {html} b</dd>") == f"<dd>a {text} b</dd>"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (r'<img class="tex" alt="\frac{1}{2}">', r"$\frac{1}{2}$"),
        ('<img class="wp latex" alt="x">', "$x$"),
        ('<img class="latex" alt="$x$" src="//latex.example.org/1.png">', "$x$"),
        (r'<img class="latexcenter math" alt="\[x_{1}\]">', "<div>$$x_{1}$$</div>"),
        ('<img class="math" alt="Math teacher">', '<img class="math" alt="Math teacher">'),
        ('<img class="context" alt="a_b.png" src="math.png">', '<img class="context" alt="a_b.png" src="math.png">'),
        ('<img src="https://s0.wp.com/latex.php?latex=%5Cpi%2B1+x&bg=ffffff" alt="">', r"$\pi+1 x$"),
        ('<img src="//latex.codecogs.com/gif.latex?%5Cinline&space;%5Cdpi{120}&space;42+x">', "$42+x$"),
        (r'<img src="https://www.zhihu.com/equation?tex=x%5E2%5C%5C" alt="x^2\\">', "<div>$$x^2$$</div>"),
        (r'<img src="/math/mathtex.cgi?x\,y" alt="">', r"$x\,y$"),
        ('<span class="ztext-math" data-tex="x^2"><svg></svg></span>', "$x^2$"),
    ],
)
def test_images(html, text):
    assert written(f"<p>a {html} b</p>") == f"<p>a {text} b</p>"


def test_images_of_latex2html():
    page = (
        '<meta content="LaTeX2HTML v2002"><p>a <img alt="$x$" src="img1.png"> cost <img alt="$5 off" src="2.png"></p>'
    )
    assert written(page).endswith('<p>a $x$ cost <img alt="$5 off" src="2.png"></p>')


def test_an_image_alone_in_its_block_is_a_display_formula():
    assert written('<p> <img class="tex" alt="x"><!-- end --></p>') == "<p> <div>$$x$$</div><!-- end --></p>"
    crowd = "<i></i>" * 9
    assert written(f'<p>{crowd}<img class="tex" alt="x"></p>') == f"<p>{crowd}$x$</p>"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (r'<span class="math inline">\alpha_1</span>', r"$\alpha_1$"),
        (r'<div class="math"> \frac{1}{2} </div>', r"<div>$$\frac{1}{2}$$</div>"),
        (r'<span class="math">\(\alpha_1\)</span>', r'<span class="math">\(\alpha_1\)</span>'),
        ('<p class="math">1 yr = 525600 min</p>', '<p class="math">1 yr = 525600 min</p>'),
        ('<div class="math"><b>x^2</b></div>', '<div class="math"><b>x^2</b></div>'),
    ],
)
def test_latex_that_only_a_class_marks(html, text):
    assert written(f"<div>a {html} b</div>") == f"<div>a {text} b</div>"


@pytest.mark.parametrize(
    "html", [r"<p>Let \(x\) and \[y^2\] cost $5, $$z$$ x<sup>2</sup></p>", "<p>Aftermath</p>", "", "<p>x"]
)
def test_other_text_stays(html):
    tree = HTMLTree.parse(html)
    before = str(tree)
    assert (write_formulas(tree), str(tree)) == (0, before)


@pytest.mark.parametrize(
    "html",
    ["<p>text</p>" * 9000, '<p class="text-xl">x</p><script>Math.max(1)</script><code>\\</code>$', ""],
)
def test_pages_without_a_name_of_a_formula_have_none(html):
    assert not may_have_formulas(html)


# -------------------------------------------------------------------------------------------------------------- limits


def counts(html: str) -> FormulaCounts:
    """What becomes of the formulas of a page."""
    return formula_counts(HTMLTree.parse(f"<body>{html}"))


def test_formulas_that_cannot_be_converted_are_counted_and_stay():
    html = (
        '<p><math><apply><ci>kept</ci></apply></math> <span class="katex"><span class="katex-html">x2</span></span></p>'
    )
    tree = HTMLTree.parse(html)
    assert formula_counts(tree) == FormulaCounts(written=0, left=2)
    assert extract_plain_text(tree, main_content=False) == "kept x2"


def test_long_formulas_stay():
    assert counts(f'<script type="math/tex">{"x" * MAX_LATEX_CHARS}</script>') == (1, 0)
    assert counts(f'<script type="math/tex">{"x" * (MAX_LATEX_CHARS + 1)}</script>') == (0, 1)
    rendered = '<span class="MathJax">seen</span><script type="math/tex">{}</script>'.format
    tree = HTMLTree.parse(rendered("x" * (MAX_LATEX_CHARS + 1)))
    assert formula_counts(tree) == (0, 1)
    assert extract_plain_text(tree, main_content=False) == "seen"


def test_at_most_so_many_formulas_are_written(monkeypatch):
    monkeypatch.setattr(formulas, "MAX_FORMULAS", 3)
    assert counts(SQUARE * 3) == (3, 0)
    assert counts(SQUARE * 5) == (3, 2)


def test_elements_around_one_formula_convert_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []
    monkeypatch.setattr(formulas, "latex_of_mathml", lambda math: converted.append(math))
    inner = "<math><mi>x</mi><mfoo>y</mfoo></math>"
    other = "<math><mi>z</mi></math>"
    page = f"{'<span class=MathJax>' * 9}{inner}{'</span>' * 9}<p><span class=MathJax>{other}</span>"
    assert formula_counts(HTMLTree.parse(page)) == FormulaCounts(0, 2)
    assert converted == [inner, other]


def test_the_markup_of_a_page_is_limited(monkeypatch):
    monkeypatch.setattr(formulas, "MAX_PAGE_MARKUP", 2 * len(SQUARE))
    assert counts(SQUARE * 2) == (2, 0)
    assert counts(SQUARE * 3) == (2, 1)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<math>" * 1500 + "<mi>x", (0, 1)),
        ("<math>" + "<mrow>" * 1500 + "<mi>x", (0, 1)),
        ('<span class="katex"><span class=katex-html>' * 700, (0, 1)),
        ('<span class="mwe-math-element">' * 1500 + "x" * 100_000, (0, 1)),
        ('<span class="MathJax">' * 500 + "x" * 10_000, (0, 0)),
        ('<div class="math">' * 1500 + "x" * 100_000, (0, 0)),
        (SQUARE * 20_000, (10_000, 10_000)),
        ("<math><mi>" + "x" * 500_000 + "</mi></math>", (0, 1)),
        ("<math><math><p>x<math><svg><math>" * 20, None),
        ("<math><mtext><table><tr><td><math><mi>x", None),
    ],
)
def test_pages_that_are_written_to_break_the_reader(html, expected):
    result = counts(html)
    assert expected is None or result == expected


# ---------------------------------------------------------------------------------------------------------- real pages

ARCHIVES = SHARED / "warc"
REAL = {
    "prefixed MathML": ("pages-000.warc.gz", 4382885, r"m\:math", 187, r"$\frac{12}{172}$"),
    "MathML in scripts": ("pages-000.warc.gz", 8525406, 'script[type="math/mml"]', 3, "$AA$"),
    "MathML": ("pages-000.warc.gz", 10573426, "math", 5, "${}^{-1}$"),
    "LaTeX in math": ("pages-000.warc.gz", 10960129, "math", 68, "$H psi = - frac{hbar^2}{2 m} nabla^2 psi + V psi$"),
    "KaTeX": ("pages-001.warc.gz", 2232762, ".katex", 141, r"$\lim\limits_{x \to 1}\dfrac{x^2-1}{x-1}$"),
    "WordPress": ("pages-001.warc.gz", 12003501, "img.latex", 1, "$2omega_0, 2omega_0-4pi, "),
    "images": ("pages-002.warc.gz", 3467697, 'img[src*="latex"]', 3, r"$\frac{42+43}{2} = \frac{85}{2} = 42.5$"),
}
"""Kind → archive, offset, selector of the formulas, their number and the start of one of them."""


def words(text: str) -> list[str]:
    """The words of a text without its formulas."""
    return re.findall(r"\w+", re.sub(r"\$\$?[^$]*\$\$?", " ", text))


def whole_text(tree: HTMLTree) -> str:
    """The whole text of a page."""
    return str(extract_plain_text(tree, main_content=False, alt_texts=False, links=False))


@pytest.mark.skipif(not ARCHIVES.exists(), reason="the real archives are not beside the project")
@pytest.mark.parametrize("kind", REAL)
def test_text_outside_formulas_of_real_pages_is_unchanged(kind):
    archive, offset, selector, number, formula = REAL[kind]
    response = read_response(read_record(ARCHIVES / archive, offset), SourceConfig(paths=("gold",)))
    assert response.body is not None
    html = decode(response.body, response.charset).text.replace("$", "§")
    assert may_have_formulas(html)
    tree, without = HTMLTree.parse(html), HTMLTree.parse(html)
    assert formula_counts(tree) == (number, 0)
    for node in without.document.query_selector_all(selector).values():
        node.replace_with(without.create_text_node(" "))
    assert formula in whole_text(tree)
    assert words(whole_text(tree)) == words(whole_text(without))
