r"""Formulas of a page, written as LaTeX into its text.

A formula has its LaTeX in the page, or MathML that is converted. Inline formulas become `$…$`, display formulas `$$…$$`
in a block of their own. Formulas that are text already, such as `\(…\)`, stay as they are.

Sources: HTML Standard, MathML; MathML 3.0, W3C 2014, section 2.2 (display, alttext) and 5.1 (annotations); MathJax 2.7
and 3 (output in the page, `math/tex` scripts, assistive MathML); KaTeX, options (output); MediaWiki, extension Math.
"""

import re
from collections.abc import Iterator
from html import unescape
from itertools import islice
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

from resiliparse.parse.html import ElementNode, HTMLTree, Node, NodeType

from pipeline.extract.mathml import latex_of_mathml

MAX_FORMULAS = 10_000
"""Maximum number of formulas of a page that are written; the visible text of further ones stays."""
MAX_LATEX_CHARS = 20_000
"""Maximum length of one formula [code points]."""
MAX_PAGE_MARKUP = 50_000_000
"""Maximum length of the markup of all formulas of a page together [code points], nested ones counted once a level."""

_NEEDLES = ("math", "latex", "LaTeX2HTML", 'class="tex"', "equation?tex=")
"""Each kind of formula has one of them in its markup: `math` is in MathML, KaTeX, MathJax, Wikipedia and mathtex."""
_SELECTOR = ", ".join(
    (
        *("math", r"m\:math", r"mml\:math", 'script[type^="math/"]', ".katex-display", ".katex", "mjx-container"),
        *(".MathJax_Preview", ".MathJax_Display", ".MathJax_SVG_Display", ".MJXc-display", ".MathJax", ".MathJax_SVG"),
        *(".MathJax_CHTML", ".MathJax_MathML", ".mjx-chtml", ".mwe-math-element", "[data-tex]"),
        *('img[class*="tex"]', 'img[class*="math"]', 'img[src*="latex"]', 'img[src*="equation?tex="]'),
        *('img[src*="mathtex"]', 'img[alt^="$"]', 'img[alt^="\\\\"]', ".math", ".tex", ".latex"),
    )
)
_MATH = re.compile(r"<((?:[\w.-]++:)?)math\b([^<>]*+)>")
_ANNOTATION = re.compile(
    r"""<(?:[\w.-]++:)?annotation\b[^<>]*?\bencoding=["'](?:application/x-tex|tex|latex|application/x-latex)["'][^<>]*+>"""
    r"([^<]*+)<",
    re.IGNORECASE,
)
_ATTRIBUTE = re.compile(r"""(?<![\w:-])([\w:-]++)\s*+=\s*+(?:"([^"]*+)"|'([^']*+)')""")
_KATEX_MATHML = re.compile(r'class="katex-mathml"(?:(?!class="katex-mathml")[^<>])*+>')
_MATHJAX_SOURCE = re.compile(r'\bdata-mathml="([^"]*+)"')
_EMPTY_LINE = re.compile(r"\n[ \t]*\n")
_COMMENT = re.compile(r"(?<!\\)%[^\n]*+(\n?)")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_BLANK = re.compile(r"(?:\\[,;:! ]|\\q?quad(?![a-zA-Z])|\\(?:display|text)style(?![a-zA-Z])|[~\s{}])*+\Z")
_STYLE = re.compile(r"\\(?:display|text)style(?![a-zA-Z])\s*+")
_LATEX_SIGN = re.compile(r"\\[a-zA-Z]{2}|[_^]\s*(?:\{|\\)|\w\^[\w-]|(?<!\w)[a-zA-Z]_\w(?!\w)")
"""What LaTeX has and prose does not: a command, or a script."""
_LATEX_CLASS = re.compile(r"(?:^|\s)(?:tex|latex|texrender|mathtex|mwe-math-fallback-\S+)(?:\s|$)")
_QUERY = re.compile("[?#]")
_CODECOGS = re.compile(r"/(?:gif|png|svg|pdf)\.(?:latex|image|download)\?", re.IGNORECASE)
_CODECOGS_OPTION = re.compile(r"\s*\\(?:dpi\{\d+\}|(?:bg|fn)_\w+|inline|tiny|small|large|LARGE|huge)(?![a-zA-Z])\s*")
_RENDERED = ("MathJax", "MJXc", "mjx-")
_BLOCKS = frozenset(("P", "DIV", "DD", "CENTER", "FIGURE", "TD", "BLOCKQUOTE", "BODY", "SECTION", "ARTICLE"))
_MAX_SIBLINGS = 6
"""Maximum number of nodes between rendered output and its script, or around an image, that are compared."""


class FormulaCounts(NamedTuple):
    """What became of the formulas of a page."""

    written: int
    """Number of formulas that are LaTeX in the text now."""
    left: int
    """Number of formulas whose visible text stayed: without a source that can be converted, or beyond the limits.
    After MAX_FORMULAS this is the number of elements that were not read."""


class _Formula(NamedTuple):
    latex: str | None
    """LaTeX without delimiters; empty for one of spaces only, None if there is no source that can be converted."""
    display: bool = False
    rendered: bool = False
    """True for a second form of a formula that a script contains."""


def may_have_formulas(html: str) -> bool:
    """Return False if no formula of a known kind is in a page, by a few searches for names in its markup.

    Takes 0.3 ms for 100,000 characters, half as long as the selectors of `write_formulas`. Images that only the `$` of
    their alternative text makes a formula are known by the generator LaTeX2HTML.
    """
    return any(needle in html for needle in _NEEDLES)


def write_formulas(tree: HTMLTree) -> int:
    """Replace each formula of a page by its LaTeX as text, and return how many were replaced.

    The text around is not changed. Takes time linear in the page. `formula_counts` says more.
    """
    return formula_counts(tree).written


def formula_counts(tree: HTMLTree) -> FormulaCounts:
    """Replace each formula of a page by its LaTeX as `write_formulas` does, and return what became of them.

    A formula stays as it is beyond MAX_FORMULAS, MAX_LATEX_CHARS and MAX_PAGE_MARKUP, and beyond the limits of
    `pipeline.extract.mathml`.
    """
    if tree.document is None:
        return FormulaCounts(0, 0)
    # Iterating over the collection itself is quadratic in resiliparse 2.0.1.
    nodes = tree.document.query_selector_all(_SELECTOR).values()
    reader = _Reader()
    written = left = index = 0
    while index < len(nodes) and written < MAX_FORMULAS:
        node = nodes[index]
        index += 1
        formula = reader.read(node)
        if formula is None or node.parent is None:
            continue
        while index < len(nodes) and node.contains(nodes[index]):
            index += 1
        if formula.latex is None:
            left += 1
        elif formula.rendered:
            node.remove()
        else:
            written += _replace(tree, node, formula.latex, formula.display)
    return FormulaCounts(written, left + len(nodes) - index)


def _replace(tree: HTMLTree, node: ElementNode, latex: str, display: bool) -> bool:
    """Replace an element by a formula, or by a space if it is blank; return whether there is a formula."""
    blank = _BLANK.match(latex) is not None
    text = (" " if latex else "") if blank else f"$${latex}$$" if display else f"${latex}$"
    new = tree.create_text_node(text)
    if new is None:
        return False
    if display and not blank and (block := tree.create_element("div")) is not None:
        block.append_child(new)
        new = block
    node.replace_with(new)
    return not blank


class _Reader:
    """Reads the formulas of one page, within MAX_PAGE_MARKUP."""

    def __init__(self) -> None:
        self.markup_left = MAX_PAGE_MARKUP
        self._math, self._answer = "", _latex_of_math("")

    def read(self, node: ElementNode) -> _Formula | None:
        """Return the formula that an element is; None if it is none."""
        tag = (node.local_name or "").lower()
        if tag == "math" or tag.endswith(":math"):
            return self._of_math(node, display=False)
        if tag == "script":
            return _of_script(node)
        if tag == "img":
            return _of_image(node)
        classes = node.class_name or ""
        if tag == "mjx-container":
            return self._of_math(node, display=node.getattr("display") in ("true", "block"))
        if "katex" in classes:
            return self._of_katex(node, classes)
        if "mwe-math-element" in classes:
            return self._of_wikipedia(node, classes)
        if any(name in classes for name in _RENDERED):
            return self._of_mathjax(node, classes)
        if (source := node.getattr("data-tex")) is not None:
            return _Formula(_tidy(source), source.rstrip().endswith("\\\\"))
        return _of_text(node, tag, classes)

    def _markup(self, node: ElementNode) -> str:
        """Return the serialized element; empty if the page's formulas are too long."""
        if self.markup_left <= 0:
            return ""
        markup = node.html
        self.markup_left -= len(markup)
        return markup

    def _latex(self, markup: str) -> tuple[str | None, bool]:
        """Return what `_latex_of_markup` does; elements around one `<math>`, one in the other, convert it once."""
        if (math := _first_math(markup)) != self._math:
            self._math, self._answer = math, _latex_of_math(math)
        return self._answer

    def _of_math(self, node: ElementNode, display: bool) -> _Formula:
        latex, is_block = self._latex(self._markup(node))
        return _Formula(latex, display or is_block)

    def _of_katex(self, node: ElementNode, classes: str) -> _Formula | None:
        child = node.first_element_child
        if child is None or "katex" not in (child.class_name or ""):
            return None
        display = "katex-display" in classes.split() or _has_class(node.parent_element, "katex--display")
        markup = self._markup(node)
        latex, is_block = self._latex(markup)
        if latex is None and (hidden := _KATEX_MATHML.search(markup)) is not None:
            # Some sites keep only the text of KaTeX's MathML: that of its elements, then the LaTeX.
            text = markup[hidden.end() :].partition("</span>")[0]
            source = _EMPTY_LINE.split(unescape(text).strip())[-1] if "<" not in text else ""
            latex = _tidy(source) if source else None
        return _Formula(latex, display or is_block)

    def _of_wikipedia(self, node: ElementNode, classes: str) -> _Formula:
        markup = self._markup(node)
        latex, display = self._latex(markup)
        if latex is None and (image := node.query_selector("img")) is not None and image.getattr("alt"):
            latex = _tidy(image.getattr("alt") or "")
        return _Formula(latex, display or "-block" in classes or "fallback-image-display" in markup)

    def _of_mathjax(self, node: ElementNode, classes: str) -> _Formula | None:
        """Return the formula of output of MathJax 2; it is the second form if a script with the source follows."""
        script = next((other for other in _after(node) if _is_script(other)), None)
        if isinstance(script, ElementNode):
            source = _of_script(script)
            if source is not None and source.latex is not None:
                return _Formula("", rendered=True)
        if "Preview" in classes:
            return None
        display = "isplay" in classes
        if source_markup := node.getattr("data-mathml"):
            latex, is_block = self._latex(source_markup)
            return _Formula(latex, display or is_block)
        markup = self._markup(node)
        inner = _MATHJAX_SOURCE.search(markup)
        latex, is_block = self._latex(unescape(inner[1]) if inner is not None else markup)
        if latex is None and "MathJax-Element" not in markup:
            return None
        return _Formula(latex, display or is_block)


def _latex_of_markup(markup: str) -> tuple[str | None, bool]:
    """Return the LaTeX of the first `<math>` of serialized markup, None without a source; and whether it is a block."""
    return _latex_of_math(_first_math(markup))


def _first_math(markup: str) -> str:
    """Return the first element `<math>` of serialized markup; empty without one."""
    start = _MATH.search(markup)
    if start is None:
        return ""
    end = markup.find(closing := f"</{start[1]}math>", start.end())
    return markup[start.start() : end + len(closing) if end >= 0 else len(markup)]


def _latex_of_math(math: str) -> tuple[str | None, bool]:
    """Return the LaTeX of an element `<math>`, None without a source; and whether it is a block."""
    start = _MATH.match(math)
    if start is None:
        return None, False
    found = _ATTRIBUTE.findall(start[2])
    attributes = {name.lower(): unescape(double or single) for name, double, single in found}
    display = attributes.get("display") == "block" or attributes.get("mode") == "display"
    annotation = _ANNOTATION.search(math)
    for source in (unescape(annotation[1]) if annotation else "", attributes.get("data-latex", "")):
        if source.strip():
            return _tidy(source), display
    alternative = attributes.get("alttext", "")
    if _LATEX_SIGN.search(alternative):
        return _tidy(alternative), display
    latex = latex_of_mathml(math)
    return latex if latex is None else _tidy(latex), display


def _of_script(node: ElementNode) -> _Formula | None:
    """Return the formula of a script of MathJax 2; None for other types than TeX and MathML."""
    kind = (node.getattr("type") or "").lower()
    text = node.text or ""
    if kind.startswith(("math/tex", "math/latex")):
        return _Formula(_tidy(text), "mode=display" in kind.replace(" ", ""))
    if kind.startswith("math/mml"):
        latex, display = _latex_of_markup(text)
        return _Formula(latex, display or "mode=display" in kind.replace(" ", ""))
    return None


def _of_image(node: ElementNode) -> _Formula | None:
    source, alternative, classes = (node.getattr(name) or "" for name in ("src", "alt", "class"))
    latex = _latex_of_url(source)
    if latex is None:
        marked = _LATEX_CLASS.search(classes) is not None
        delimited = any(
            alternative.startswith(opening) and alternative.endswith(closing) and len(alternative) > 2 * len(opening)
            for opening, closing in _DELIMITERS
        )
        likely = "math" in classes or alternative.startswith(("\\", "$"))
        if not (alternative and (marked or delimited or (likely and _LATEX_SIGN.search(alternative)))):
            return None
        latex = alternative
    display = "display" in classes or latex.startswith((r"\[", "$$")) or latex.rstrip().endswith("\\\\") or _alone(node)
    return _Formula(_tidy(latex), display)


def _latex_of_url(url: str) -> str | None:
    """Return the LaTeX that the address of an image contains, for servers that draw formulas; None for others."""
    if "latex" not in url and "tex" not in url:
        return None
    _, _, query = url.partition("?")
    if "latex.php?" in url or "equation?tex=" in url:
        fields = parse_qs(query.replace("&#038;", "&"), keep_blank_values=True)
        return next((fields[name][0] for name in ("latex", "tex") if name in fields), None)
    if _CODECOGS.search(url) or _QUERY.split(url, maxsplit=1)[0].endswith("mathtex.cgi"):
        latex = unquote(query).replace("&space;", " ").replace("&plus;", "+").replace("&amp;", "&")
        begin = 0
        while (option := _CODECOGS_OPTION.match(latex, begin)) is not None:
            begin = option.end()
        return latex[begin:] or None
    return None


def _of_text(node: ElementNode, tag: str, classes: str) -> _Formula | None:
    """Return the formula of an element such as `<span class="math">` that contains nothing but LaTeX."""
    if node.first_element_child is not None:
        return None
    text = (node.text or "").strip()
    if len(text) > MAX_LATEX_CHARS or not _LATEX_SIGN.search(text) or text.startswith(("$", r"\(", r"\[")):
        return None
    return _Formula(_tidy(text), tag not in ("span", "i", "em", "code", "a", "b") or "display" in classes)


def _tidy(source: str) -> str | None:
    """Return LaTeX on one line, without comments, delimiters and the style that renderers add; None if it is too long.

    Source of the style: MediaWiki puts `{\\displaystyle …}` around each formula.
    """
    if len(source) > MAX_LATEX_CHARS:
        return None
    latex = " ".join(_COMMENT.sub(lambda own: own[1] or own[0], source).split())
    for opening, closing in _DELIMITERS:
        inner = latex[len(opening) : -len(closing)]
        if latex.startswith(opening) and latex.endswith(closing) and inner and opening not in inner:
            latex = inner.strip()
            break
    if latex.startswith(("{\\displaystyle", "{\\textstyle")) and _closes_at_end(latex):
        latex = latex[1:-1]
    latex = latex[style.end() :] if (style := _STYLE.match(latex)) is not None else latex
    while latex.endswith("\\\\"):
        latex = latex[:-2].rstrip()
    return latex.strip()


def _closes_at_end(latex: str) -> bool:
    """Whether the brace that opens at the first character closes at the last one."""
    depth, escaped = 0, False
    for index, character in enumerate(latex):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        else:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return index == len(latex) - 1
    return False


def _after(node: ElementNode) -> Iterator[Node]:
    """Yield the nodes after an element up to a script or text, at most _MAX_SIBLINGS."""
    following: Node | None = node.next_sibling
    for _ in range(_MAX_SIBLINGS):
        if following is None or (following.type == NodeType.TEXT and (following.value or "").strip()):
            return
        yield following
        if _is_script(following):
            return
        following = following.next_sibling


def _is_script(node: Node) -> bool:
    return isinstance(node, ElementNode) and node.tag == "script" and (node.getattr("type") or "").startswith("math/")


def _has_class(node: ElementNode | None, name: str) -> bool:
    return node is not None and name in (node.class_name or "").split()


def _alone(node: ElementNode) -> bool:
    """Whether a block contains nothing but the element."""
    parent = node.parent_element
    if parent is None or (parent.tag_name or "").upper() not in _BLOCKS:
        return False
    children = list(islice(_children(parent), _MAX_SIBLINGS + 1))
    return len(children) <= _MAX_SIBLINGS and all(child == node or _is_blank(child) for child in children)


def _children(parent: ElementNode) -> Iterator[Node]:
    child = parent.first_child
    while child is not None:
        yield child
        child = child.next_sibling


def _is_blank(node: Node | None) -> bool:
    if node is None or node.type == NodeType.COMMENT:
        return True
    return node.type == NodeType.TEXT and not (node.value or "").strip()
