"""Characters as LaTeX: those that follow from their Unicode name, and those of the table."""

import unicodedata

import pytest

from pipeline.extract.math_symbols import joined, symbol_latex


@pytest.mark.parametrize(
    ("characters", "latex"),
    [
        ("αωλΓΛΩ", r"\alpha \omega \lambda \Gamma \Lambda \Omega"),
        ("ΑΒΗΡΧΜΝοΟ", r"\mathrm{A} \mathrm{B} \mathrm{H} \mathrm{P} \mathrm{X} \mathrm{M} \mathrm{N} o \mathrm{O}"),
        ("εϵφϕςϑ", r"\varepsilon \epsilon \varphi \phi \varsigma \vartheta"),
        ("ℝℂ𝔸", r"\mathbb{R} \mathbb{C} \mathbb{A}"),
        ("𝐱𝛂𝑥𝓁𝔤ℒ𝖠𝙰", r"\mathbf{x} \boldsymbol{\alpha} x \mathcal{l} \mathfrak{g} \mathcal{L} \mathsf{A} \mathtt{A}"),
        (
            "←⇒↔⟹⟷↑⇕",
            r"\leftarrow \Rightarrow \leftrightarrow \Longrightarrow \longleftrightarrow \uparrow \Updownarrow",
        ),
        ("↪↦⇀↗↙", r"\hookrightarrow \mapsto \rightharpoonup \nearrow \swarrow"),
        ("≠∉≮⊄≢", r"\neq \notin \not< \not\subset \not\equiv"),
        ("²₁½⁻", r"^2 _1 \frac{1}{2} ^-"),
        ("≤×∞∂∑⟨‖", r"\leq \times \infty \partial \sum \langle \|"),
        ("−′∗…", r"- ' * \ldots"),
        ("{%_\\", r"\{ \% \_ \backslash"),
        ("a1é中Ϣ☃", "a 1 é 中 Ϣ ☃"),
    ],
)
def test_symbols(characters, latex):
    assert " ".join(symbol_latex(character) for character in characters) == latex


def test_invisible_operators_and_spaces():
    assert [symbol_latex(sign) for sign in "\u2061\u2062\u2063\u2064\u200b\xad"] == [""] * 6
    assert [symbol_latex(sign) for sign in "\xa0\u2009\u2003\u2004"] == [r"\ ", r"\,", r"\quad", r"\;"]


def test_every_character_has_latex_of_one_line():
    for code in range(0x20, 0x1D800):
        if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co"):
            assert len(symbol_latex(chr(code)).splitlines()) < 2 or chr(code) in "\x85\u2028\u2029"


@pytest.mark.parametrize(
    ("parts", "latex"),
    [
        ([r"\alpha", "x"], r"\alpha x"),
        ([r"\alpha", "1", "x"], r"\alpha1x"),
        ([r"\alpha", "", "x"], r"\alpha x"),
        ([r"\mathbb{R}", "x"], r"\mathbb{R}x"),
        (["x", r"\alpha"], r"x\alpha"),
        ([r"\,", "x"], r"\,x"),
        ([], ""),
    ],
)
def test_a_command_and_a_letter_are_separated(parts, latex):
    assert joined(parts) == latex
