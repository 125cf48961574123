"""Numbers raised or lowered beside other numbers, which their text alone runs together: `10<sup>5</sup>` is not 105.

A mark is put between them, as in LaTeX and Markdown: `10^5`, and `101_2`. A raised number before a slash is the
numerator of a fraction after a whole number: `3 1/2`. Other raised and lowered texts, as in `m<sup>2</sup>`, stay as
they are.
"""

import re

from resiliparse.parse.html import DOMNode, HTMLTree, NodeType

MAX_EXPONENTS = 100_000
"""Maximum number of raised and lowered elements of a page that are looked at."""
MAX_INNER = 4
"""Maximum number of elements around the text before or in a raised number, such as a link around a footnote."""

_MAY_HAVE = re.compile(r"<su[pb][\s>]", re.IGNORECASE)
_NUMBER = re.compile(r"\s*[+\u2212\u2013-]?\d+(?:[.,]\d+)?\s*")
_MAX_CHARS = 12
_INLINE = frozenset(("span", "b", "strong", "i", "em", "font", "small"))
"""Elements that a number can begin with, as in `1<span class="fraction"><sup>1</sup>⁄<sub>2</sub></span>`."""
_SLASHES = ("/", "\u2044", "\u2215")


def may_have_exponents(html: str) -> bool:
    """Return False if nothing on a page is raised or lowered."""
    return _MAY_HAVE.search(html) is not None


def mark_exponents(tree: HTMLTree) -> int:
    """Put `^` or `_` between numbers and the raised or lowered numbers after them; return how many were marked."""
    if tree.document is None:
        return 0
    marked = 0
    for node in tree.document.query_selector_all("sup, sub").values()[:MAX_EXPONENTS]:
        inner, parent = _text_of(node, is_last=False), node.parent
        if parent is None or len(inner) > _MAX_CHARS or _NUMBER.fullmatch(inner) is None:
            continue
        before = node.prev if node.prev is not None else parent.prev if parent.tag in _INLINE else None
        if not _text_of(before, is_last=True)[-1:].isdecimal():
            continue
        is_fraction = node.tag == "sup" and _text_of(node.next, is_last=False).startswith(_SLASHES)
        mark = " " if is_fraction else "^" if node.tag == "sup" else "_"
        if (text := tree.create_text_node(mark)) is not None:
            parent.insert_before(text, node)
            marked += 1
    return marked


def _text_of(node: DOMNode | None, is_last: bool) -> str:
    """Return the text of a node that is a text, or that begins or ends with one; empty for others."""
    for _ in range(MAX_INNER):
        if node is None or node.type == NodeType.TEXT:
            break
        node = node.last_child if is_last else node.first_child
    return str(node.value) if node is not None and node.type == NodeType.TEXT else ""
