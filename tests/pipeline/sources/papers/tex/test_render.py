r"""The text of TeX source: macros, paragraphs, formulas, lists, floats; and source made to take long."""

import tracemalloc

import pytest

from pipeline.sources.papers.tex.macros import TooManyExpansionsError
from pipeline.sources.papers.tex.project import TexProject, strip_comments
from pipeline.sources.papers.tex.render import TexOptions, TexText, render_tex


def rendered(source: str, **options) -> TexText:
    return render_tex(TexProject(strip_comments(source), "a.tex"), TexOptions(**options))


def text_of(source: str, **options) -> str:
    return rendered(source, **options).text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # words and characters
        ("One\ntwo  three\n\nfour", "One two three\n\nfour"),
        (r"\emph{a} {\bf b} \textbf{\textit{c}}", "a b c"),
        (r"``q'' `s' a--b---c~d \% \& \$5 \_ \{x\}", "“q” ‘s’ a–b—c d % & $5 _ {x}"),
        (r"\'e \^{o} \c{c} \v s \"{\i} na\"ive \aa{} \ss", "é ô ç š ï naïve å ß"),
        (r"\LaTeX{} and \LaTeX\ are", "LaTeX and LaTeX are"),
        ("a% comment\nb \\% c", "ab % c"),
        (r"\unknown[x]{kept} \label{gone}\vspace{1em}end", "kept end"),
        (r"\href{http://a.example}{link} \url{http://b.example/x_y}", "link http://b.example/x_y"),
        (r"a\footnote{Note.} b", "a (Note.) b"),
        (r"a \\[2pt] b \newline c", "a\nb\nc"),
        (r"\vskip 10pt plus 2pt a \hspace*{1cm} b", "a b"),
        (r"\verb|x_y %z| \verb+$+", "x_y %z $"),
        # numbers
        (r"3\nicefrac{1}{2} \sfrac12 \frac{a}{b}", "3 1/2 1/2 a/b"),
        (r"10\textsuperscript{5} 10\textsuperscript{-3} m\textsuperscript{2} 101\textsubscript{2} H\textsubscript{2}O",
         "10^5 10^-3 m2 101_2 H2O"),
        (r"\SI{5}{\kilo\metre\per\second} \unit{\micro\gram} \qty{3}{m/s}", "5 kilometre per second microgram 3 m/s"),
        (r"\SIrange{1}{5}{\kilo\metre} \numrange{2}{3} \ang{45} \ding{51}\ding{99}", "1–5 kilometre 2–3 45° ✓"),
        # headings, lists, environments
        ("\\section{One}\nText\n\\subsection*{Two}Text", "One\n\nText\n\nTwo\n\nText"),
        (r"\begin{itemize}\item a \item b\end{itemize}", "- a\n- b"),
        (r"\begin{enumerate}\item a \item[(x)] b \item c\end{enumerate}", "1. a\n(x) b\n3. c"),
        (r"\begin{quote}a\end{quote}b", "a\n\nb"),
        (r"\newtheorem{thm}{Theorem}\begin{thm}[Euler] a\end{thm}", "Theorem (Euler). a"),
        (r"\begin{proof}a\end{proof}", "Proof. a"),
        ("\\begin{verbatim}\nif x:\n    y % z\n\\end{verbatim}", "if x:\n    y % z"),
        (r"a\begin{comment}b\end{comment}\begin{thebibliography}{9}\bibitem{x} y\end{thebibliography}", "a"),
        # formulas
        (r"let $x_1 < 2$ and \(y\)", "let $x_1 < 2$ and $y$"),
        (r"a \[ x = 1 \] b $$ y $$", "a\n\n$$x = 1$$\n\nb\n\n$$y$$"),
        ("\\begin{equation}\\label{e} x\n\\end{equation}", "$$ x $$"),
        (
            "\\begin{align}a &= b \\\\\n c &= d \\nonumber\\end{align}",
            "\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}",
        ),
        (r"$\text{if $x$ is} y$", r"$\text{if $x$ is} y$"),
        ("an open $x\n\nparagraph", "an open $x\n\nparagraph"),
        # macros
        (r"\newcommand{\R}{\mathbb{R}}$x \in \R$", r"$x \in \mathbb{R}$"),
        (r"\newcommand{\two}[2]{#2 #1}\two{a}{b}", "b a"),
        (r"\newcommand{\opt}[2][d]{#1#2}\opt{a} \opt[c]{a}", "da ca"),
        (r"\def\pair#1#2{(#1,#2)}$\pair ab \pair{c}{d}$", "$(a,b) (c,d)$"),
        (r"\newcommand\be{\begin{equation}}\newcommand\ee{\end{equation}}\be x \ee", "$$ x $$"),
        (r"\DeclareMathOperator{\tr}{tr}$\tr A$", r"$\operatorname{tr} A$"),
        (r"\let\eps\epsilon $\eps x$", r"$\epsilon x$"),
        (r"\newenvironment{note}[1]{Note #1: }{!}\begin{note}{1}a\end{note}", "Note 1: a!"),
        (r"\newcommand{\x}{1}\renewcommand{\x}{2}\providecommand{\x}{3}\x", "2"),
        (r"\def\a{\a b}\a", ""),
        # conditions
        (r"\iffalse a \iftrue b \fi \else c \fi d", "c d"),
        (r"\newif\ifdraft\drafttrue\ifdraft a\else b\fi\draftfalse\ifdraft c\fi", "a"),
        # citations, references
        (r"as shown~\cite{a,b}, and \citep[see][]{c}.", "as shown, and."),
        (r"a (see \cite{a}; \citealt{b}) b", "a b"),
        (r"(\ref{a}) or [\cite{x}]", "or"),
    ],
)  # fmt: skip
def test_text(source: str, text: str) -> None:
    assert text_of(source) == text


def test_options() -> None:
    assert text_of(r"a~\cite{b, c} in \ref{d}", citations=True) == "a [b, c] in [d]"
    assert text_of(r"\section{A}\subsection{B}", markdown=True) == "## A\n\n### B"
    table = r"x\begin{table}\caption{Cap}\begin{tabular}{ll}a & b \\ c & \multicolumn{1}{l}{d}\end{tabular}\end{table}y"
    assert text_of(table) == "x\n\nCap\n\ny"
    assert text_of(table, floats="none") == "xy"
    assert text_of(table, floats="all").split() == ["x", "a", "|", "b", "c", "|", "d", "y"]


def test_title_authors_and_abstract() -> None:
    paper = rendered(
        r"\documentclass{article}\title[Short]{A \emph{long}\\ title\thanks{x}}\author{Ann Bee}\author{C. Dee\inst{1}}"
        r"\begin{document}\maketitle\begin{abstract}We show $x$.\end{abstract}\section{I}Body.\end{document}"
    )
    assert (paper.title, paper.authors, paper.abstract) == ("A long title", ["Ann Bee", "C. Dee1"], "We show $x$.")
    assert paper.text == "We show $x$.\n\nI\n\nBody."


def test_definitions_in_a_style_of_the_paper_are_used() -> None:
    style = r"\newcommand{\q}{\mathcal{Q}}\def\inner@one{x}\newcommand{\bad}{\inner@one}"
    paper = render_tex(TexProject(r"$\q$ \bad", "a.tex", [style]), TexOptions())
    assert paper.text == r"$\mathcal{Q}$"


@pytest.mark.parametrize(
    "bomb",
    [
        r"\def\a{\b\b}\def\b{\c\c}\def\c{\a\a}\a",
        "".join(rf"\def\{'x' * n}{{\{'x' * (n + 1)}\{'x' * (n + 1)}}}" for n in range(1, 40)) + r"\x",
        rf"\def\a{{{'word ' * 9_000}}}" + r"\a" * 900,
        rf"\def\a#1{{{'#1' * 5_000}}}\a{{{'~' * 5_000}}}",
        r"\texorpdfstring{" * 6_000,
        rf"\newtheorem{{a}}{{{'x' * 5_000}}}" + r"\begin{a}\end{a}" * 5_000,
        rf"\newenvironment{{a}}{{}}{{{'~' * 5_000}}}" + r"\begin{a}\end{a}" * 5_000,
    ],
)
def test_bombs_of_macros_end(bomb: str) -> None:
    with pytest.raises(TooManyExpansionsError):
        text_of(bomb)


def test_what_macros_yield_is_counted_before_it_is_made() -> None:
    macros = rf"\def\a#1{{{'#1' * 20_000}}}\a{{{'~' * 100_000}}}"  # two billion tokens
    tracemalloc.start()
    with pytest.raises(TooManyExpansionsError):
        text_of(macros)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 200 << 20


def test_macros_of_style_files() -> None:
    """The last definition of a name counts; one that cannot be expanded leaves the one before."""
    style = r"\def\a{one}\def\a{two}\def\b{three}\def\b{\@x}\newenvironment{e}{four }{ five}"
    project = TexProject(r"\a{} \b{} \c \begin{e}x\end{e}", "a.tex", [style, r"\def\c{six}"])
    assert render_tex(project, TexOptions()).text == "two three six four x five"


@pytest.mark.parametrize(
    "source",
    [
        "{" * 200_000,
        "}" * 200_000,
        "$" * 100_001,
        r"\begin{a}" * 50_000,
        r"\begin{verbatim}" * 50_000,
        r"\x[" * 20_000,
        r"\begin{equation}" * 20_000,
        "\\footnote{" * 50_000,
        r"\iftrue" * 50_000,
        r"\iffalse" * 50_000,
        r"\verb" * 50_000,
        "%" * 200_000,
        "\\" * 200_001,
        r"\newcommand" * 30_000,
        r"\cite{a}, " * 30_000,
        "(" + r"\cite{a}, " * 30_000,
        " " * 500_000 + "(" * 100_000,
        r"\begin{a}" * 20_000 + r"\end{b}" * 20_000,
        "{" * 50_000 + r"\item " * 50_000,
    ],
)
def test_hostile_source_ends(source: str) -> None:
    """Time grows with the length of the source alone; these take seconds at most."""
    assert isinstance(text_of(source), str)
