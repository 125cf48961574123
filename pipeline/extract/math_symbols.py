r"""Characters of formulas as LaTeX.

The command follows from the Unicode name of a character where the names agree: Greek letters, mathematical alphabets,
arrows, negations, superscripts and fractions. A table contains the other characters. Source: the commands that both
KaTeX (https://katex.org/docs/supported) and MathJax (https://docs.mathjax.org/en/latest/input/tex) support.
"""

import re
import unicodedata
from functools import lru_cache

_NAMES = """
±pm ∓mp ×times ÷div ⋅cdot ·cdot ∘circ ∙bullet •bullet ⋆star ⊕oplus ⊖ominus ⊗otimes ⊘oslash ⊙odot †dagger ‡ddagger
∧wedge ∨vee ∩cap ∪cup ⊎uplus ⊓sqcap ⊔sqcup ∖setminus ≀wr ⋄diamond △triangle ⋈bowtie
≤leq ≥geq ⩽leqslant ⩾geqslant ≪ll ≫gg ≠neq ≡equiv ∼sim ≃simeq ≈approx ≅cong ≍asymp ≐doteq ∝propto ≺prec ≻succ
⪯preceq ⪰succeq ≲lesssim ≳gtrsim ≜triangleq ⊂subset ⊃supset ⊆subseteq ⊇supseteq ⊊subsetneq ⊋supsetneq
⊑sqsubseteq ⊒sqsupseteq ∈in ∋ni ∉notin ∣mid ∤nmid ∥parallel ∦nparallel ⊥perp ⟂perp ⊢vdash ⊣dashv ⊨models
∑sum ∏prod ∐coprod ∫int ∬iint ∭iiint ∮oint ⋃bigcup ⋂bigcap ⨆bigsqcup ⋁bigvee ⋀bigwedge ⨁bigoplus ⨂bigotimes
⨀bigodot ⨄biguplus ∀forall ∃exists ∄nexists ¬neg ⊤top ∅emptyset ∞infty ∂partial ∇nabla √surd ∠angle
∴therefore ∵because ℏhbar ℓell ℘wp ℜRe ℑIm ℵaleph ℶbeth ıimath ȷjmath …ldots ⋯cdots ⋮vdots ⋱ddots
⟨langle ⟩rangle 〈langle 〉rangle ⌈lceil ⌉rceil ⌊lfloor ⌋rfloor ‖| □square ■blacksquare ◊lozenge ♯sharp ♭flat
♮natural ↦mapsto ⇌rightleftharpoons ⇝leadsto ϵepsilon εvarepsilon ϕphi φvarphi ϑvartheta ϖvarpi ϱvarrho
ςvarsigma ϰvarkappa ϝdigamma
"""
"""Characters, each with the name of its command."""
_SYMBOLS = {
    **{entry[0]: rf"\{entry[1:]}" for entry in _NAMES.split()},
    **{sign: rf"\{sign}" for sign in "{}%&#$_"},
    **{"\\": r"\backslash", "~": r"\sim", "^": r"\wedge"},
    **dict(zip("−–∗′″‴⁄∕∶", ("-", "-", "*", "'", "''", "'''", "/", "/", ":"), strict=True)),
    **{"°": r"^{\circ}", "\u2009": r"\,", "\u200a": r"\,", "\u2003": r"\quad", "\xa0": r"\ ", "\u202f": r"\ "},
    **dict.fromkeys("\u2002\u2004\u2005", r"\;"),
    **dict.fromkeys("\u2061\u2062\u2063\u2064\u200b\u200c\u200d\u2060\ufeff\xad", ""),
}
"""Character → LaTeX, where it does not follow from the character's name."""

_GREEK = re.compile(r"GREEK (SMALL|CAPITAL) LETTER (\w+)\Z")
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon"
)
_GREEK_LETTERS = frozenset(f"{_GREEK_NAMES} phi chi psi omega".split())
_GREEK_COMMANDS = frozenset(
    ("gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega")
)
"""Greek letters whose capitals have a command; the other capitals look like Latin ones."""
_LATIN_CAPITALS = {"eta": "H", "mu": "M", "nu": "N", "rho": "P", "chi": "X"}
"""Greek letters whose capitals look like another Latin letter than the first of their name."""
_ARROW = re.compile(r"(LONG )?(LEFT|RIGHT|UP|DOWN|LEFT RIGHT|UP DOWN)(?:WARDS)?( DOUBLE)? ARROW( WITH HOOK)?\Z")
_HARPOON = re.compile(r"(LEFT|RIGHT)WARDS HARPOON WITH BARB (UP|DOWN)WARDS\Z")
_DIAGONAL = re.compile(r"(N|S)\w+ (E|W)\w+ ARROW\Z")
_ALPHABETS = (
    (re.compile(r"DOUBLE-STRUCK"), "mathbb"),
    (re.compile(r"FRAKTUR|BLACK-LETTER"), "mathfrak"),
    (re.compile(r"SCRIPT"), "mathcal"),
    (re.compile(r"MONOSPACE"), "mathtt"),
    (re.compile(r"SANS-SERIF"), "mathsf"),
    (re.compile(r"BOLD ITALIC"), "boldsymbol"),
    (re.compile(r"BOLD"), "mathbf"),
)
"""Words of the Unicode name of a letter → command of its alphabet; the first that matches is used."""
_WORD_AT_END = re.compile(r"\\[a-zA-Z]+\Z")


def joined(parts: list[str]) -> str:
    r"""Return parts of LaTeX one after the other, with a space where a command such as `\alpha` meets a letter."""
    latex: list[str] = []
    for part in parts:
        if part:
            if latex and part[0].isalpha() and _WORD_AT_END.search(latex[-1][-24:]):
                latex.append(" ")
            latex.append(part)
    return "".join(latex)


def braced(latex: str) -> str:
    """Return LaTeX as an argument of a script: in braces, unless it is one character."""
    return latex if len(latex) == 1 else f"{{{latex}}}"


@lru_cache(maxsize=4096)
def symbol_latex(character: str) -> str:
    """Return the LaTeX of one character in math mode: a command, or the character itself if there is none."""
    if (latex := _SYMBOLS.get(character)) is not None:
        return latex
    if character.isascii():
        return character
    name = unicodedata.name(character, "")
    if (greek := _GREEK.match(name)) is not None:
        return _greek(character, *greek.groups())
    if (arrow := _ARROW.match(name)) is not None:
        return _arrow(*arrow.groups())
    if (harpoon := _HARPOON.match(name)) is not None:
        return rf"\{harpoon[1].lower()}harpoon{harpoon[2].lower()}"
    if (diagonal := _DIAGONAL.match(name)) is not None:
        return rf"\{diagonal[1].lower()}{diagonal[2].lower()}arrow"
    parts = unicodedata.normalize("NFD", character)
    if len(parts) == 2 and parts[1] == "\u0338":
        return rf"\not{symbol_latex(parts[0])}"
    return _compatible(character, name)


def _greek(character: str, case: str, name: str) -> str:
    name = "lambda" if name == "LAMDA" else name.lower()
    if name not in _GREEK_LETTERS:
        return character
    if case == "SMALL":
        return "o" if name == "omicron" else rf"\{name}"
    if name in _GREEK_COMMANDS:
        return rf"\{name.capitalize()}"
    return rf"\mathrm{{{_LATIN_CAPITALS.get(name, name[0].upper())}}}"


def _arrow(long: str | None, direction: str, double: str | None, hook: str | None) -> str:
    name = f"{'long' if long else ''}{direction.replace(' ', '').lower()}arrow"
    if hook:
        return rf"\hook{name}"
    return rf"\{name.capitalize() if double else name}"


def _compatible(character: str, name: str) -> str:
    """Return the LaTeX of a character that Unicode defines as another form of others, such as 𝐀, ² or ½."""
    kind, _, codes = unicodedata.decomposition(character).rpartition("> ")
    plain = "".join(chr(int(code, 16)) for code in codes.split()) if kind else ""
    if kind == "<font":
        letter = symbol_latex(plain)
        command = next((command for words, command in _ALPHABETS if words.search(name)), None)
        if command == "mathbf" and letter.startswith("\\"):
            command = "boldsymbol"  # \mathbf has no effect on Greek letters
        return letter if command is None else rf"\{command}{{{letter}}}"
    if kind in ("<super", "<sub"):
        return f"{'^' if kind == '<super' else '_'}{braced(joined([symbol_latex(part) for part in plain]))}"
    if kind == "<fraction":
        above, _, below = plain.partition("\u2044")
        return rf"\frac{{{above}}}{{{below}}}"
    return character
