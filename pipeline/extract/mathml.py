r"""Presentation MathML as LaTeX.

The markup is read once and without recursion: an element is converted at its end tag, from the LaTeX of its children.

Sources: MathML 3.0, W3C 2014, chapter 3; MathML Core, W3C 2023; the commands are those that both KaTeX
(https://katex.org/docs/supported) and MathJax (https://docs.mathjax.org/en/latest/input/tex) support.
"""

import re
from collections.abc import Callable
from html import unescape
from typing import NamedTuple

from pipeline.extract.math_symbols import braced, joined, symbol_latex

MAX_MARKUP_CHARS = 200_000
"""Maximum length of the markup of one formula [code points]."""
MAX_MATH_DEPTH = 100
"""Maximum nesting of the elements of one formula [levels]; formulas of real pages have less than 25."""

_TAG = re.compile(r"<(/?)(?:[\w.-]++:)?([a-zA-Z][\w.-]*+)([^<>]*+)>|([^<]++)|<")
"""A tag or text; serialized attributes contain `<` and `>` as entities."""
_COMMENT = re.compile(r"<!--(?:.*?-->|.*)", re.DOTALL)
_ATTRIBUTE = re.compile(r"""(?<![\w:-])([\w:-]++)\s*+=\s*+(?:"([^"]*+)"|'([^']*+)')""")

_TOKENS = frozenset(("mi", "mn", "mo", "mtext", "ms"))
_SKIPPED = frozenset(("annotation", "annotation-xml", "script", "style"))
_CONTENT_MARKUP = frozenset(("apply", "ci", "cn", "csymbol"))
_NO_CONTENT = frozenset(("br", "hr", "img", "input", "wbr"))

_FUNCTION_NAMES = "arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan tanh"
_LIMIT_NAMES = "det gcd inf lim liminf limsup max min Pr sup"
_LARGE_OPERATORS = (
    "bigcap bigcup bigodot bigoplus bigotimes bigsqcup biguplus bigvee bigwedge coprod int iint iiint oint"
)
_FUNCTIONS = frozenset(f"{_FUNCTION_NAMES} {_LIMIT_NAMES}".split())
_WITH_LIMITS = frozenset(rf"\{name}" for name in f"{_LIMIT_NAMES} {_LARGE_OPERATORS} prod sum".split())
_VARIANTS = {
    **{"bold": "mathbf", "normal": "mathrm", "bold-italic": "boldsymbol", "double-struck": "mathbb"},
    **{"script": "mathcal", "bold-script": "mathcal", "fraktur": "mathfrak", "bold-fraktur": "mathfrak"},
    **{"sans-serif": "mathsf", "bold-sans-serif": "mathsf", "monospace": "mathtt"},
}
"""Value of `mathvariant` → command. Source: MathML 3.0, section 3.2.2."""

_ACCENTS = {
    **dict.fromkeys("^ˆ\u0302", ("hat", "widehat")),
    **dict.fromkeys("~˜∼\u0303", ("tilde", "widetilde")),
    **dict.fromkeys("¯‾_―─\u0304\u0305", ("bar", "overline")),
    **dict.fromkeys("→⃗", ("vec", "overrightarrow")),
    **dict.fromkeys("˙.\u0307", ("dot", "dot")),
    **dict.fromkeys("¨\u0308", ("ddot", "ddot")),
    **dict.fromkeys("ˇ\u030c", ("check", "check")),
    **{"⃛": ("dddot", "dddot"), "´": ("acute", "acute"), "`": ("grave", "grave"), "˘": ("breve", "breve")},
    **{"˚": ("mathring", "mathring"), "⏞": ("overbrace", "overbrace"), "←": ("overleftarrow", "overleftarrow")},
    **{"↔": ("overleftrightarrow", "overleftrightarrow"), "⏜": ("overparen", "overparen")},
}
"""Character above a base → commands for a base of one symbol and for a longer one."""
_UNDER = {**dict.fromkeys("_¯‾―─\u0332", "underline"), "⏟": "underbrace", "⏝": "underparen", "→": "underrightarrow"}
_ARROWS_OVER = {r"\rightarrow": "xrightarrow", r"\leftarrow": "xleftarrow", r"\longrightarrow": "xrightarrow"}
_FENCES = {
    **{"(": ")", "[": "]", "{": "}", "⟨": "⟩", "⌈": "⌉", "⌊": "⌋", "|": "|", "‖": "‖", "∣": "∣", "∥": "∥", "〈": "〉"},
}
_BARS = {"∣": "|", "∥": r"\|"}
_DIGRAPHS = {"<=": r"\leq", ">=": r"\geq", "!=": r"\neq", "->": r"\to", "=>": r"\Rightarrow", "...": r"\ldots"}
_MATRICES = {
    **{"()": "pmatrix", "[]": "bmatrix", "{}": "Bmatrix", "||": "vmatrix", "∣∣": "vmatrix"},
    **{"‖‖": "Vmatrix", "∥∥": "Vmatrix"},
}
_DEGREE = symbol_latex("°")
_STRIKES = {
    **{"box": "boxed", "roundedbox": "boxed", "top": "overline", "bottom": "underline", "radical": "sqrt"},
    **{"updiagonalstrike": "cancel", "downdiagonalstrike": "bcancel", "circle": "boxed"},
}
_TALL = re.compile(r"\\(?:d?frac|sum|prod|int|begin|atop|binom|left)\b")
_COMMAND = re.compile(r"\\[a-zA-Z]++(?:\{[^{}]*+\})?")
"""A command of at most one simple argument, which can have scripts without braces around it."""
_WIDTH = re.compile(r"\s*(-?(?:\d+\.?\d*|\.\d+))\s*(em|ex|px|pt|mu|cm|mm|in)?")
_EM_OF = {"ex": 0.45, "px": 1 / 16, "pt": 1 / 12, "mu": 1 / 18, "cm": 2.4, "mm": 0.24, "in": 6.0}
_NAMED_WIDTHS = {"thinmathspace": "0.17em", "mediummathspace": "0.22em", "thickmathspace": "0.28em"}


class _Piece(NamedTuple):
    """A converted element."""

    tag: str
    latex: str
    text: str = ""
    """Text of a token element, without spaces at its ends."""


class _Frame:
    """An element whose end tag has not been read."""

    __slots__ = ("markup", "pieces", "raw", "skipped", "tag", "text")

    def __init__(self, tag: str, markup: str, parent: "_Frame | None") -> None:
        self.tag = tag
        self.markup = markup
        self.pieces: list[_Piece] = []
        self.text: list[str] = []
        self.skipped: bool = tag in _SKIPPED or (parent is not None and parent.skipped)
        self.raw: bool = tag in _TOKENS or (parent is not None and parent.raw)
        """Whether the element is a token element or inside one: only its text counts."""

    def attributes(self) -> dict[str, str]:
        """Return the attributes by name, in lower case."""
        if "=" not in self.markup:
            return {}
        found = _ATTRIBUTE.findall(self.markup)
        return {name.lower(): unescape(double or single) for name, double, single in found}


def latex_of_mathml(markup: str) -> str | None:
    """Return the LaTeX of a `<math>` element, on one line and without delimiters; empty if the element is.

    `markup` is the element as a parser serializes it, or XML; names may have a prefix. Elements of HTML inside count by
    their text. Text that is directly in `<math>`, without any element, is LaTeX already. None if the markup exceeds
    MAX_MARKUP_CHARS or MAX_MATH_DEPTH, or is Content MathML. Takes time linear in the markup.
    """
    if len(markup) > MAX_MARKUP_CHARS:
        return None
    root = _Frame("math", "", None)
    stack = [root]
    has_elements = False
    for match in _TAG.finditer(_COMMENT.sub("", markup)):
        end, name, attributes, text = match.groups()
        if text is not None:
            stack[-1].text.append(text)
            if text.strip() and not stack[-1].raw:
                _flush(stack[-1])
            continue
        tag = (name or "").lower()
        if end:
            _close(stack, tag)
        elif tag in _NO_CONTENT:
            stack[-1].text.append(" ")
        elif tag:
            has_elements = has_elements or tag != "math"
            if tag in _CONTENT_MARKUP and not stack[-1].skipped:
                return None
            if len(stack) > MAX_MATH_DEPTH:
                return None
            stack.append(_Frame(tag, attributes, stack[-1]))
            if attributes.endswith("/"):
                _close(stack, tag)
    if not has_elements:
        return " ".join(unescape(_COMMENT.sub("", re.sub(r"<[^<>]*+>", " ", markup))).split())
    while len(stack) > 1:
        _close(stack, stack[-1].tag)
    return _row(root.pieces).latex


def _close(stack: list[_Frame], tag: str) -> None:
    """Convert the elements that an end tag closes; an end tag of no open element changes nothing."""
    if all(frame.tag != tag for frame in stack[1:]):
        return
    while True:
        frame = stack.pop()
        parent = stack[-1]
        if not frame.skipped:
            if parent.raw:
                parent.text += frame.text
            else:
                parent.pieces.append(_convert(frame))
        if frame.tag == tag:
            return


def _flush(frame: _Frame) -> None:
    """Make text that is directly in an element of layout a piece of its own."""
    text = " ".join(unescape("".join(frame.text)).split())
    frame.text = []
    if not frame.skipped:
        frame.pieces.append(_Piece("mtext", rf"\text{{{_escaped(text)}}}", text))


def _convert(frame: _Frame) -> _Piece:
    if frame.raw:
        return _token(frame)
    if frame.tag == "mtable":
        return _table(frame)
    if frame.tag == "mfrac" and frame.attributes().get("linethickness", "").strip("empxtc%") in ("0", "0.0"):
        above, below = _children(frame.pieces, 2)
        return _Piece("atop", rf"{{{above.latex} \atop {below.latex}}}", f"{{{above.latex}}}{{{below.latex}}}")
    rule = _RULES.get(frame.tag)
    if rule is None:
        return _row(frame.pieces)
    return _Piece(frame.tag, rule(frame.pieces, frame))


# ------------------------------------------------------------------------------------------------------------- tokens


def _token(frame: _Frame) -> _Piece:
    text = unescape("".join(frame.text)).strip(" \t\r\n\f")
    if frame.tag in ("mtext", "ms"):
        words = " ".join(text.split()) if text.strip() else ""
        if not words:
            return _Piece("mtext", r"\ " if text else "")
        if text[0] == "\xa0":
            words = f" {words}"
        if text[-1] == "\xa0":
            words += " "
        if frame.tag == "ms":
            attributes = frame.attributes()
            words = attributes.get("lquote", '"') + words + attributes.get("rquote", '"')
        return _Piece("mtext", rf"\text{{{_escaped(words)}}}", text)
    text = " ".join(text.split()) if text.strip() else ""
    if len(text) > 1 and text.isalpha() and text.isascii() and frame.tag != "mn":
        return _Piece(frame.tag, _name(text, frame), text)
    if frame.tag != "mn" and " " in text:
        return _Piece(frame.tag, rf"\text{{{_escaped(text)}}}", text)
    latex = _DIGRAPHS.get(text) or joined([symbol_latex(character) for character in text])
    if frame.tag == "mi" and text.isalnum():
        variant = _VARIANTS.get(frame.attributes().get("mathvariant", ""))
        if variant and not latex.startswith(r"\math") and (variant != "mathrm" or latex[0] != "\\"):
            variant = "boldsymbol" if latex[0] == "\\" and variant == "mathbf" else variant
            latex = rf"\{variant}{{{latex}}}"
    return _Piece(frame.tag, latex, text)


def _name(text: str, frame: _Frame) -> str:
    """Return the LaTeX of an identifier or operator of several letters."""
    if text in _FUNCTIONS:
        return rf"\{text}"
    if frame.tag == "mo":
        return rf"\operatorname{{{text}}}"
    variant = frame.attributes().get("mathvariant", "normal")
    return rf"\{'mathit' if variant == 'italic' else _VARIANTS.get(variant, 'mathrm')}{{{text}}}"


def _escaped(text: str) -> str:
    """Return a text as LaTeX in text mode."""
    return re.sub(r"[{}%&#$_]", r"\\\g<0>", text.replace("\\", "/"))


# -------------------------------------------------------------------------------------------------------------- layout


def _row(pieces: list[_Piece]) -> _Piece:
    """Return the pieces as one; a single piece keeps its kind."""
    pieces = _with_environments([piece for piece in pieces if piece.latex])
    if len(pieces) == 1:
        return pieces[0]
    if len(pieces) > 2 and _is_fenced(pieces):
        inner = joined([piece.latex for piece in pieces[1:-1]])
        if _TALL.search(inner):
            opening, closing = (_BARS.get(piece.text, piece.latex) for piece in (pieces[0], pieces[-1]))
            return _Piece("fenced", rf"\left{opening} {inner} \right{closing}")
        return _Piece("fenced", joined([pieces[0].latex, inner, pieces[-1].latex]))
    return _Piece("mrow", joined([piece.latex for piece in pieces]))


def _is_fenced(pieces: list[_Piece]) -> bool:
    """Whether the first piece is a parenthesis that only the last one closes."""
    opening = pieces[0].text if pieces[0].tag == "mo" else ""
    closing = _FENCES.get(opening)
    if closing is None or pieces[-1].tag != "mo" or pieces[-1].text != closing:
        return False
    if opening == closing:
        return all(piece.text != opening for piece in pieces[1:-1])
    depth = 0
    for piece in pieces[:-1]:
        if piece.tag == "mo":
            depth += (piece.text == opening) - (piece.text == closing)
            if depth == 0:
                return False
    return depth == 1


def _with_environments(pieces: list[_Piece]) -> list[_Piece]:
    """Return the pieces, with each fenced table as a matrix or as cases and each fenced stack as a binomial."""
    if all(piece.tag not in ("mtable", "atop") for piece in pieces):
        return pieces
    merged: list[_Piece] = []
    index = 0
    while index < len(pieces):
        piece = pieces[index]
        before = merged[-1].text if merged and merged[-1].tag == "mo" else ""
        following = pieces[index + 1] if index + 1 < len(pieces) else None
        after = following.text if following is not None and following.tag == "mo" else ""
        index += 1
        if piece.tag == "atop" and before + after == "()":
            merged[-1] = _Piece("mrow", rf"\binom{piece.text}")
            index += 1
        elif piece.tag == "mtable" and before + after in _MATRICES:
            merged[-1] = _Piece("mrow", _environment(_MATRICES[before + after], piece.text))
            index += 1
        elif piece.tag == "mtable" and before == "{":
            merged[-1] = _Piece("mrow", _environment("cases", piece.text))
        else:
            merged.append(piece)
    return merged


def _environment(name: str, rows: str) -> str:
    return rf"\begin{{{name}}} {rows} \end{{{name}}}"


def _base(piece: _Piece) -> str:
    """Return the LaTeX of what a script is attached to."""
    if not piece.latex:
        return "{}"
    if piece.tag in ("mi", "mn", "mo", "mtext") and "^" not in piece.latex:
        return piece.latex
    return piece.latex if piece.tag == "fenced" or _COMMAND.fullmatch(piece.latex) else f"{{{piece.latex}}}"


def _scripts(base: str, below: _Piece | None, above: _Piece | None) -> str:
    latex = base
    if below is not None and below.latex:
        latex += f"_{braced(below.latex)}"
    if above is not None and above.latex:
        latex += above.latex if above.latex == _DEGREE or not above.latex.strip("'") else f"^{braced(above.latex)}"
    return latex


def _children(pieces: list[_Piece], count: int) -> list[_Piece]:
    """Return exactly `count` children: missing ones are empty, and the last one contains those that are too many."""
    if len(pieces) > count:
        pieces = [*pieces[: count - 1], _row(pieces[count - 1 :])]
    return [*pieces, *[_Piece("none", "")] * (count - len(pieces))]


def _sub(pieces: list[_Piece], _: _Frame) -> str:
    base, below = _children(pieces, 2)
    return _scripts(_base(base), below, None)


def _sup(pieces: list[_Piece], _: _Frame) -> str:
    base, above = _children(pieces, 2)
    return _scripts(_base(base), None, above)


def _subsup(pieces: list[_Piece], _: _Frame) -> str:
    base, below, above = _children(pieces, 3)
    return _scripts(_base(base), below, above)


def _limits(base: _Piece) -> str | None:
    """Return the LaTeX of an operator that has its limits above and below; None if it is no such operator."""
    if base.latex in _WITH_LIMITS or re.match(r"\\(?:over|under)brace\{", base.latex):
        return base.latex
    if base.latex.startswith(r"\operatorname{") or (base.tag == "mi" and base.latex.startswith(r"\mathrm{")):
        return rf"\operatorname*{{{base.text}}}" if base.text else None
    return None


def _over(pieces: list[_Piece], _: _Frame) -> str:
    base, above = _children(pieces, 2)
    if (commands := _ACCENTS.get(above.text)) is not None:
        symbol = len(base.latex) == 1 or re.fullmatch(r"\\[a-zA-Z]+|\\math\w+\{.\}", base.latex) is not None
        return rf"\{commands[0 if symbol else 1]}{{{base.latex}}}"
    if (limits := _limits(base)) is not None:
        return _scripts(limits, None, above)
    if not above.latex:
        return base.latex
    if base.latex in _ARROWS_OVER:
        return rf"\{_ARROWS_OVER[base.latex]}{{{above.latex}}}"
    return rf"\overset{{{above.latex}}}{{{base.latex}}}"


def _below(pieces: list[_Piece], _: _Frame) -> str:
    base, below = _children(pieces, 2)
    if below.text in _UNDER:
        return rf"\{_UNDER[below.text]}{{{base.latex}}}"
    if (limits := _limits(base)) is not None:
        return _scripts(limits, below, None)
    return rf"\underset{{{below.latex}}}{{{base.latex}}}" if below.latex else base.latex


def _underover(pieces: list[_Piece], frame: _Frame) -> str:
    base, below, above = _children(pieces, 3)
    if (limits := _limits(base)) is not None:
        return _scripts(limits, below, above)
    if base.latex in _ARROWS_OVER and above.latex:
        return rf"\{_ARROWS_OVER[base.latex]}[{below.latex}]{{{above.latex}}}"
    return _over([_Piece("munder", _below([base, below], frame)), above], frame)


def _multiscripts(pieces: list[_Piece], _: _Frame) -> str:
    """Pairs of scripts after the base, then, after `<mprescripts>`, the pairs before it. Source: section 3.4.7."""
    base, scripts = (pieces[0], pieces[1:]) if pieces else (_Piece("none", ""), [])
    cut = next((index for index, piece in enumerate(scripts) if piece.tag == "mprescripts"), len(scripts))
    after, before = scripts[:cut], scripts[cut + 1 :]
    latex = "".join(_scripts("{}", *_children(before[at : at + 2], 2)) for at in range(0, len(before), 2))
    latex = joined([latex, _base(base)])
    for at in range(0, len(after), 2):
        latex = _scripts(latex if at == 0 else f"{latex}{{}}", *_children(after[at : at + 2], 2))
    return latex


def _fraction(pieces: list[_Piece], frame: _Frame) -> str:
    above, below = _children(pieces, 2)
    if frame.attributes().get("bevelled") == "true":
        return f"{_base(above)}/{_base(below)}"
    return rf"\frac{{{above.latex}}}{{{below.latex}}}"


def _root(pieces: list[_Piece], _: _Frame) -> str:
    base, index = _children(pieces, 2)
    return rf"\sqrt[{index.latex}]{{{base.latex}}}" if index.latex else rf"\sqrt{{{base.latex}}}"


def _space(_: list[_Piece], frame: _Frame) -> str:
    width = frame.attributes().get("width", "")
    measured = _WIDTH.match(_NAMED_WIDTHS.get(width, width))
    em = float(measured[1]) * _EM_OF.get(measured[2], 1.0) if measured else 0.0
    sizes = ((1.8, r"\qquad"), (0.8, r"\quad"), (0.25, r"\;"), (0.01, r"\,"))
    return next((latex for least, latex in sizes if em >= least), r"\!" if em < 0 else "")


def _fenced(pieces: list[_Piece], frame: _Frame) -> str:
    """`<mfenced>` is the row of its arguments between parentheses, with separators. Source: section 3.3.8."""
    attributes = frame.attributes()
    separators = "".join(attributes.get("separators", ",").split())
    row = [_Piece("mo", symbol_latex(mark), mark) for mark in attributes.get("open", "(").strip()[:1]]
    for index, piece in enumerate(pieces):
        if index and separators:
            mark = separators[min(index, len(separators)) - 1]
            row.append(_Piece("mo", symbol_latex(mark), mark))
        row.append(piece)
    row += [_Piece("mo", symbol_latex(mark), mark) for mark in attributes.get("close", ")").strip()[:1]]
    return _row(row).latex


def _enclosed(pieces: list[_Piece], frame: _Frame) -> str:
    latex = _row(pieces).latex
    for notation in sorted(set(frame.attributes().get("notation", "").split()) & set(_STRIKES)):
        latex = rf"\{_STRIKES[notation]}{{{latex}}}"
    return latex


def _table(frame: _Frame) -> _Piece:
    rows = r" \\ ".join(piece.latex for piece in frame.pieces)
    attributes = frame.attributes()
    aligned = attributes.get("columnalign", "").split()[:2] == ["right", "left"]
    return _Piece("mtable", _environment("aligned" if aligned else "matrix", rows), rows)


def _table_row(pieces: list[_Piece], frame: _Frame) -> str:
    cells = [piece.latex for piece in pieces]
    if frame.tag == "mlabeledtr" and cells:
        cells = [*cells[1:], cells[0]]
    return " & ".join(cells).strip()


def _row_latex(pieces: list[_Piece], _: _Frame) -> str:
    return _row(pieces).latex


_RULES: dict[str, Callable[[list[_Piece], _Frame], str]] = {
    **{"msub": _sub, "msup": _sup, "msubsup": _subsup, "mover": _over, "munder": _below, "munderover": _underover},
    **{"mmultiscripts": _multiscripts, "mfrac": _fraction, "mroot": _root, "mspace": _space, "mfenced": _fenced},
    **{"menclose": _enclosed, "mtr": _table_row, "mlabeledtr": _table_row, "mtd": _row_latex},
    "msqrt": lambda pieces, _: rf"\sqrt{{{_row(pieces).latex}}}",
    "mphantom": lambda pieces, _: rf"\phantom{{{_row(pieces).latex}}}" if pieces else "",
    **dict.fromkeys(("none", "mprescripts", "malignmark", "maligngroup"), lambda pieces, _: ""),
}
"""Element → the function that returns its LaTeX from its children; other elements are rows of their children."""
