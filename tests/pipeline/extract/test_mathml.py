"""Presentation MathML as LaTeX: each element by hand, and markup that is written to break the converter."""

import random

import pytest

from pipeline.extract.mathml import MAX_MARKUP_CHARS, MAX_MATH_DEPTH, latex_of_mathml

TABLE = "<mtable><mtr><mtd><mi>a</mi></mtd><mtd><mn>1</mn></mtd></mtr><mtr><mtd><mi>b</mi></mtd><mtd/></mtr></mtable>"


def math(inner: str) -> str | None:
    """The LaTeX of a formula with this content, in which spaces between tags are layout."""
    return latex_of_mathml(f"<math>{inner}</math>")


@pytest.mark.parametrize(
    ("markup", "latex"),
    [
        ("<mi>x</mi> <mo>=</mo>\n<mn>3.14</mn>", "x=3.14"),
        ("<mi>sin</mi><mo>\u2061</mo><mi>x</mi>", r"\sin x"),
        ("<mi>speed</mi><mo>mod</mo><mi mathvariant='italic'>ab</mi>", r"\mathrm{speed}\operatorname{mod}\mathit{ab}"),
        ('<mi mathvariant="bold">v</mi><mi mathvariant="normal">d</mi>', r"\mathbf{v}\mathrm{d}"),
        ('<mi mathvariant="normal">Γ</mi><mi mathvariant="bold">α</mi>', r"\Gamma\boldsymbol{\alpha}"),
        ("<mo>&lt;=</mo><mo>&amp;</mo><mo>{</mo>", r"\leq\&\{"),
        ("<mtext>if&nbsp;</mtext><mi>x</mi>", r"\text{if }x"),
        ("<mtext>50% of {A}_1</mtext>", r"\text{50\% of \{A\}\_1}"),
        ("<mtext>&nbsp;</mtext><mi>x</mi>", r"\ x"),
        ("<ms>ab</ms><ms lquote='«' rquote='»'>c</ms>", r'\text{"ab"}\text{«c»}'),
        ("<mi>x</mi><mtext>a <b>bold</b><br>word</mtext>", r"x\text{a bold word}"),
        ("<mi>a</mi>stray<mi>b</mi>", r"a\text{stray}b"),
        ("<mi>a</mi><mspace width='1em'/><mi>b</mi>", r"a\quad b"),
        ("<mspace width='.17em'/><mspace width='2em'/><mspace width='-1px'/><mspace/>", r"\,\qquad\!"),
        ("<mspace width='thickmathspace'/><mspace width='bad'/>", r"\;"),
    ],
)
def test_tokens(markup, latex):
    assert math(markup) == latex


@pytest.mark.parametrize(
    ("markup", "latex"),
    [
        ("<mfrac><mn>1</mn><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow></mfrac>", r"\frac{1}{a+b}"),
        ("<mfrac bevelled='true'><mn>1</mn><mn>2</mn></mfrac>", "1/2"),
        ("<mfrac linethickness='0'><mi>n</mi><mi>k</mi></mfrac>", r"{n \atop k}"),
        ("<mo>(</mo><mfrac linethickness='0px'><mi>n</mi><mi>k</mi></mfrac><mo>)</mo>", r"\binom{n}{k}"),
        ("<msqrt><mi>a</mi><mo>+</mo><mi>b</mi></msqrt>", r"\sqrt{a+b}"),
        ("<mroot><mi>x</mi><mn>3</mn></mroot>", r"\sqrt[3]{x}"),
        ("<mfenced><mi>a</mi><mi>b</mi></mfenced>", "(a,b)"),
        ("<mfenced open='[' close='' separators=';'><mi>a</mi><mi>b</mi><mi>c</mi></mfenced>", "[a;b;c"),
        ("<mfenced open='|' close='|'><mi>a</mi></mfenced>", "|a|"),
        ("<mrow><mo>(</mo><mfrac><mi>a</mi><mi>b</mi></mfrac><mo>)</mo></mrow>", r"\left( \frac{a}{b} \right)"),
        ("<mrow><mo>(</mo><mi>a</mi><mo>)</mo><mo>(</mo><msqrt/><mo>)</mo></mrow>", r"(a)(\sqrt{})"),
        ("<menclose notation='box updiagonalstrike'><mi>x</mi></menclose>", r"\cancel{\boxed{x}}"),
        ("<menclose notation='unknown'><mi>x</mi></menclose>", "x"),
        ("<mphantom><mi>x</mi></mphantom><mphantom/>", r"\phantom{x}"),
        ("<mstyle displaystyle='true'><mpadded><mi>x</mi></mpadded></mstyle>", "x"),
        ("<semantics><mi>x</mi><annotation encoding='StarMath 5.0'>size 12{x}</annotation></semantics>", "x"),
        ("<semantics><mi>x</mi><annotation-xml><ci>y</ci></annotation-xml></semantics>", "x"),
        ("<merror><mtext>bad</mtext></merror>", r"\text{bad}"),
    ],
)
def test_layout(markup, latex):
    assert math(markup) == latex


@pytest.mark.parametrize(
    ("markup", "latex"),
    [
        ("<msub><mi>x</mi><mi>i</mi></msub><msup><mi>α</mi><mn>10</mn></msup>", r"x_i\alpha^{10}"),
        ("<msubsup><mo>∫</mo><mn>0</mn><mi>∞</mi></msubsup>", r"\int_0^{\infty}"),
        ("<msup><mrow><mi>a</mi><mi>b</mi></mrow><mn>2</mn></msup>", "{ab}^2"),
        ("<msup><mrow><mo>(</mo><mi>a</mi><mi>b</mi><mo>)</mo></mrow><mn>2</mn></msup>", "(ab)^2"),
        ("<msup><msub><mi>x</mi><mn>1</mn></msub><mn>2</mn></msup>", "{x_1}^2"),
        ("<msup><mi>f</mi><mo>″</mo></msup><msup><mi>x</mi><mo>°</mo></msup>", r"f''x^{\circ}"),
        ("<msup><mrow/><mrow><mo>−</mo><mn>1</mn></mrow></msup>", "{}^{-1}"),
        ("<msup><mi>x</mi></msup><msub/>", "x{}"),
        ("<msup><mi>x</mi><mi>a</mi><mi>b</mi></msup>", "x^{ab}"),
        ("<munder><mi>lim</mi><mrow><mi>x</mi><mo>→</mo><mn>0</mn></mrow></munder>", r"\lim_{x\rightarrow0}"),
        ("<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover>", r"\sum_{i=1}^n"),
        ("<munder><mi>argmax</mi><mi>x</mi></munder>", r"\operatorname*{argmax}_x"),
        ("<mover><mi>x</mi><mo>^</mo></mover><mover><mi>x</mi><mo>¯</mo></mover>", r"\hat{x}\bar{x}"),
        ("<mover><mrow><mi>A</mi><mi>B</mi></mrow><mo>→</mo></mover>", r"\overrightarrow{AB}"),
        ("<mover><mo>→</mo><mi>f</mi></mover><mover><mo>=</mo><mi>d</mi></mover>", r"\xrightarrow{f}\overset{d}{=}"),
        ("<munderover><mo>→</mo><mi>a</mi><mi>b</mi></munderover>", r"\xrightarrow[a]{b}"),
        ("<munder><mi>A</mi><mi>n</mi></munder><munder><mi>x</mi><mo>_</mo></munder>", r"\underset{n}{A}\underline{x}"),
        ("<munderover><mi>A</mi><mi>b</mi><mi>c</mi></munderover>", r"\overset{c}{\underset{b}{A}}"),
        ("<munder><munder><mi>x</mi><mo>⏟</mo></munder><mtext>n</mtext></munder>", r"\underbrace{x}_{\text{n}}"),
        (
            "<mmultiscripts><mi>X</mi><mi>a</mi><mi>b</mi><mprescripts/><mi>c</mi><none/></mmultiscripts>",
            "{}_cX_a^b",
        ),
        ("<mmultiscripts><mi>X</mi><mi>a</mi><none/><none/><mi>b</mi></mmultiscripts><mmultiscripts/>", "X_a{}^b{}"),
    ],
)
def test_scripts(markup, latex):
    assert math(markup) == latex


@pytest.mark.parametrize(
    ("before", "after", "latex"),
    [
        ("", "", r"\begin{matrix} a & 1 \\ b & \end{matrix}"),
        ("<mo>(</mo>", "<mo>)</mo>", r"\begin{pmatrix} a & 1 \\ b & \end{pmatrix}"),
        ("<mi>A</mi><mo>=</mo><mo>[</mo>", "<mo>]</mo><mo>,</mo>", r"A=\begin{bmatrix} a & 1 \\ b & \end{bmatrix},"),
        ("<mo>|</mo>", "<mo>|</mo>", r"\begin{vmatrix} a & 1 \\ b & \end{vmatrix}"),
        ("<mo>‖</mo>", "<mo>‖</mo>", r"\begin{Vmatrix} a & 1 \\ b & \end{Vmatrix}"),
        ("<mo>{</mo>", "<mo></mo>", r"\begin{cases} a & 1 \\ b & \end{cases}"),
    ],
)
def test_tables(before, after, latex):
    assert math(f"{before}{TABLE}{after}") == latex


def test_aligned_and_labelled_rows():
    rows = TABLE.replace("<mtable>", '<mtable columnalign="right left">')
    assert math(rows) == r"\begin{aligned} a & 1 \\ b & \end{aligned}"
    labelled = "<mtable><mlabeledtr><mtd><mtext>(3)</mtext></mtd><mtd><mi>E</mi></mtd></mlabeledtr></mtable>"
    assert math(labelled) == r"\begin{matrix} E & \text{(3)} \end{matrix}"


def test_text_without_elements_is_latex():
    assert math(r" \frac{1}{2} &amp; <!-- no --> x ") == r"\frac{1}{2} & x"
    assert math("") == ""


def test_names_can_have_a_prefix_and_unclosed_elements_end():
    prefixed = "<m:math><m:semantics><m:mrow><m:mi>G</m:mi><m:mrow/></m:mrow></m:semantics></m:math>"
    assert latex_of_mathml(prefixed) == "G"
    assert latex_of_mathml("<math><mfrac><mi>a</mi><mrow><mi>b") == r"\frac{a}{b}"
    assert latex_of_mathml("</mrow><math></mi><mi>a</mrow></mi></math></math>") == "a"


def test_content_markup_is_not_converted():
    assert math("<apply><plus/><ci>x</ci><cn>1</cn></apply>") is None


def test_limits():
    deep = MAX_MATH_DEPTH - 2
    assert math("<mrow>" * deep + "<mi>x</mi>" + "</mrow>" * deep) == "x"
    assert math("<mrow>" * MAX_MATH_DEPTH + "<mi>x") is None
    room = MAX_MARKUP_CHARS - len("<math><mn></mn></math>")
    assert math(f"<mn>{'1' * room}</mn>") == "1" * room
    assert math(f"<mn>{'1' * (room + 1)}</mn>") is None


@pytest.mark.parametrize(
    "markup",
    [
        *("<" * 100_000, '<a "' * 40_000, "<!--" * 40_000, "<math>" + "</mi>" * 30_000, "<mi a='" * 20_000),
        *("<math>" + "<mover>" * 95 + "<mi>xyz</mi>" * 15_000, "<math>" + "<mo>(</mo>" * 15_000),
    ],
)
def test_markup_that_is_written_to_break_the_converter(markup):
    latex = latex_of_mathml(markup)
    assert latex is not None
    assert len(latex) <= 4 * len(markup)


def test_random_markup_raises_nothing():
    draw = random.Random(5)
    names = ("math", "mrow", "mi", "mo", "mtext", "msup", "munderover", "mtable", "mtr", "mtd", "mfenced")
    names += ("mmultiscripts", "mprescripts", "b", "br")
    for _ in range(300):
        pieces = []
        for _ in range(draw.randrange(60)):
            name = draw.choice(names)
            pieces.append(draw.choice((f"<{name}>", f"</{name}>", f"<{name}/>", "x", "&lt;", "∑", "(", " ", "&#8289;")))
        latex = latex_of_mathml("".join(pieces))
        assert latex is None or "\n" not in latex
