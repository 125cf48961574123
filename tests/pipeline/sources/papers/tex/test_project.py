"""The main file of a paper, its inputs, comments and characters."""

import pytest

from pipeline.sources.papers.tex.project import MAX_INPUTS, decode_tex, find_main, join_project, strip_comments

MAIN = r"\documentclass{a}\begin{document}x\end{document}"


@pytest.mark.parametrize(
    ("files", "main"),
    [
        ({"paper.tex": MAIN, "a.tex": "text"}, "paper.tex"),
        ({"b/main.tex": MAIN, "z.tex": MAIN}, "z.tex"),
        ({"a.tex": MAIN, "b.tex": r"\documentclass{a}\begin{document}\input{a}\end{document}"}, "b.tex"),
        ({"a.tex": r"\documentclass{a}\input{b}", "b.tex": r"\begin{document}"}, "b.tex"),
        ({"a.tex": r"\magnification=1200 text \bye", "b.tex": "text"}, "a.tex"),
        ({"a.tex": r"\section{One} text"}, "a.tex"),
        ({"a.tex": r"\section{One}", "b.tex": r"\section{Two}"}, None),
        ({"a.txt": "no command"}, None),
        ({}, None),
    ],
)
def test_main_file(files: dict[str, str], main: str | None) -> None:
    assert find_main(files) == main


def test_inputs_are_joined_in_place() -> None:
    files = {
        "main.tex": r"a\input{parts/b}c\include{d.tex}\input e \subfile{S}\import{parts/}{f}\end{document}gone",
        "parts/b.tex": r"[b\input{c}]",
        "parts/c.tex": "(c)",
        "d.tex": "d",
        "e.tex": "e",
        "s.TEX": "s",
        "parts/f.tex": "f",
    }
    project = join_project(files, "main.tex", 1000)
    assert project is not None
    assert project.text.replace(" ", "") == "a[b(c)]cdesf"
    assert not project.problems


def test_what_leads_out_loops_or_is_missing_is_counted() -> None:
    files = {"a.tex": r"\input{../b}\input{/etc/passwd}\input{b}\input{none}", "b.tex": r"b\input{a}\input{b}"}
    project = join_project(files, "a.tex", 1000)
    assert project is not None
    assert (project.text, dict(project.problems)) == ("b", {"outside": 2, "loop": 2, "missing": 1})


def test_too_much_text_and_too_many_inputs_are_refused() -> None:
    assert join_project({"a.tex": "x" * 100}, "a.tex", 99) is None
    assert join_project({"a.tex": "x" * 100}, "a.tex", 100) is not None
    assert join_project({"a.tex": r"\input{b}" * (MAX_INPUTS + 1), "b.tex": ""}, "a.tex", 1000) is None
    doubling = {f"{n}.tex": rf"x\input{{{n + 1}}}\input{{{n + 1}}}" for n in range(40)}
    assert join_project(doubling, "0.tex", 1 << 20) is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a % b\nc", "a c"),
        (r"50\% of", r"50\% of"),
        ("a\\\\% b\nc", "a\\\\c"),
        ("\\verb|%| a % b", "\\verb|%| a "),
        ("\\begin{verbatim}%\\end{verbatim}% x", "\\begin{verbatim}%\\end{verbatim}"),
        ("\\begin{verbatim} % x\ny", "\\begin{verbatim} y"),
        ("a%\n\nb", "a\n\nb"),
    ],
)
def test_comments(source: str, text: str) -> None:
    assert strip_comments(source) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("é".encode(), "é"),
        ("é".encode("latin-1"), "é"),
        (rb"\usepackage[latin2]{inputenc} " + "ł".encode("iso8859-2"), r"\usepackage[latin2]{inputenc} ł"),
        (rb"\usepackage[koi8-r]{inputenc}" + "д".encode("koi8-r"), r"\usepackage[koi8-r]{inputenc}д"),
        (b"a\r\nb\rc\0\x1c", "a\nb\nc"),
    ],
)
def test_characters(data: bytes, text: str) -> None:
    assert decode_tex(data) == text


def test_a_style_file_is_read_once_by_all_its_names() -> None:
    packages = "".join(rf"\usepackage{{{name}}}" for name in ("a", "./a", "b/../a", "c", "A"))
    files = {"m.tex": rf"\documentclass [x] {{a}}{packages}\begin{{document}}x", "a.sty": "one", "c.sty": "two"}
    project = join_project(files, "m.tex", 1000)
    assert project is not None
    assert project.styles == ["two", "one"]
