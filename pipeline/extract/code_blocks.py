"""The text of a code block, as its author typed it.

Highlighters wrap the tokens and lines of code in elements, and pages add line numbers and buttons. A scan of the
serialized element keeps the text, its indentation and its line ends, and leaves out what was added.

Sources: HTML Standard, 4.4.3 (pre) and 4.5.15 (code: classes `language-…`); the markup of Pygments, Rouge, Chroma,
Prism, highlight.js, google-code-prettify, SyntaxHighlighter and GitHub.
"""

import re
from collections import Counter
from html import unescape
from typing import NamedTuple

_TOKEN = re.compile(r"<(/?)([a-zA-Z][^\s<>/]*+)([^<>]*+)>|<!--(?:.*?-->|.*)|([^<]++|<)", re.DOTALL)
_TAG = re.compile(r"<[^<>]*+>")
_CLASS = re.compile(r"""\bclass\s*+=\s*+(?:"([^"]*+)"|'([^']*+)')""")
_LINE_NUMBER = re.compile(r'\bdata-line-number="(\d++)"')
_DATA_LANGUAGE = re.compile(r'\bdata-lang(?:uage)?="([^"]++)"')
_LINE_END = re.compile(r"\r\n?")

_NO_CONTENT = frozenset(("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "wbr"))
_SKIPPED_TAGS = frozenset(("button", "clipboard-copy", "script", "select", "style", "svg", "template"))
_LINE_TAGS = frozenset(("div", "li", "p", "tr"))
"""Elements that begin and end a line."""
_CELL_TAGS = frozenset(("td", "th"))
_LAYOUT_TAGS = frozenset(("colgroup", "ol", "table", "tbody", "tfoot", "thead", "tr", "ul"))
"""Elements in which white space is layout of the markup, also inside `<pre>`."""
_GUTTERS = frozenset(
    (
        *("gutter", "rouge-gutter", "lineno", "linenos", "linenodiv", "linenumber", "line-number", "line_number"),
        *("line-numbers-rows", "lnt", "ln", "lnum", "blob-num", "hljs-ln-numbers", "hljs-ln-n", "crayon-num"),
        *("crayon-nums", "pre-numbering", "lines-num", "react-syntax-highlighter-line-number", "code-line-number"),
    )
)
"""Classes of the elements that hold line numbers."""
_CONTROL = re.compile(r"(?:\S+[-_])?(?:copy|copybtn|copybutton|clipboard)(?:[-_](?:btn|button|code|icon|link))?")
_CONTROL_TAGS = frozenset(("a", "div", "i", "span"))
"""Class and names of the elements that copy the code."""
_TOOLBARS = frozenset(("toolbar", "hljs-button", "zeroclipboard-container", "sr-only"))
_CODE_TAGS = frozenset(("code", "div", "figure", "pre", "samp", "table", "td"))
"""Elements whose class can name the language; a highlighter's `<span>` can name that of code inside code."""
_LANGUAGE = re.compile(
    r"(?:^|\s)(?:language-|lang-|highlight-source-|highlight-text-|highlight-(?=\S+\s+notranslate)|brush:\s*|sourceCode\s+|hljs\s+(?!language-|lang-))"
    r"([a-zA-Z][\w+#.-]*)",
)
_HIGHLIGHTER = re.compile(r"highlight|code|source|snippet|prettyprint", re.IGNORECASE)
_NO_LANGUAGE = frozenset(
    (
        *("auto", "code", "default", "highlight", "literal-block", "nohighlight", "none", "notranslate", "null"),
        *("numbersource", "output", "plain", "plaintext", "text", "txt", "undefined", "wrap"),
    )
)

_MAX_NUMBER_PARTS = 3
"""Maximum number of texts of an element that are compared with its `data-line-number`."""


class Code(NamedTuple):
    """A code block."""

    text: str
    """The code, without empty lines at its ends; lines end with `\\n`."""
    language: str | None
    """The programming language as the page names it, in lower case; None if no class names one."""


def code_of(html: str) -> Code:
    """Return the text and the language of a code block, from the serialized `<pre>`, `<code>` or table of code.

    `html` is well-formed: the inner HTML, or the outer HTML for the classes of the element itself. Indentation and
    empty lines are kept. `<br>` and elements of a line end lines. Entities are decoded once, and no-break spaces become
    spaces. Line numbers, buttons, scripts and drawings are left out. Takes time linear in `html`.
    """
    scan = _Scan()
    for match in _TOKEN.finditer(_LINE_END.sub("\n", html)):
        end, name, attributes, text = match.groups()
        if text is not None:
            scan.add(text)
        elif name and end:
            scan.end(name.lower())
        elif name:
            scan.start(name.lower(), attributes)
    return Code(scan.text(), scan.language)


def language_of(classes: str) -> str | None:
    """Return the programming language that a `class` attribute names, in lower case; None if it names none."""
    for match in _LANGUAGE.finditer(classes):
        language = match[1].lower().rstrip(".-")
        if language and language not in _NO_LANGUAGE:
            return language
    return None


def holds_line_numbers(tag: str) -> bool:
    """Return whether a start tag has a class of line numbers; `tag` is its source without brackets."""
    return not _GUTTERS.isdisjoint(_classes(tag).lower().split())


def language_around(tag: str) -> str | None:
    """Return the programming language that the start tag of an element around code names; None if it names none.

    Classes such as `lang-en` name the language of a page, so that the class must be of a highlighter too.
    """
    classes = _classes(tag)
    return language_of(classes) if _HIGHLIGHTER.search(classes) is not None else None


def has_code_alone(html: str) -> bool:
    """Return whether the text of an element is in one `<code>`, which is then a block of code without `<pre>`."""
    start, end = html.find("<code"), html.rfind("</code>")
    if start < 0 or end < start or html.count("<code") > 1:
        return False
    return not _TAG.sub("", html[:start] + html[end:]).strip()


class _Open(NamedTuple):
    """An element whose end tag has not been read."""

    tag: str
    parts_before: int
    number: str | None
    """Line number that the element has as an attribute."""


class _Scan:
    """The text of a code block so far."""

    def __init__(self) -> None:
        self.language: str | None = None
        self.parts: list[str] = []
        self.stack: list[_Open] = []
        self.num_open: Counter[str] = Counter()
        self.skipped_from: int | None = None
        """Number of open elements outside the one that is left out; None outside such elements."""

    def add(self, text: str) -> None:
        """Add the text between two tags."""
        if self.skipped_from is None and not (self.stack and self.stack[-1].tag in _LAYOUT_TAGS and text.isspace()):
            self.parts.append(unescape(text).replace("\xa0", " "))

    def start(self, tag: str, attributes: str) -> None:
        """Read a start tag."""
        skipping = self.skipped_from is not None
        if tag in _NO_CONTENT:
            if tag == "br" and not skipping:
                self.parts.append("\n")
            return
        number = None
        if not skipping:
            classes = _classes(attributes)
            if tag in _SKIPPED_TAGS or (classes and _is_added(tag, classes.lower().split())):
                self.skipped_from = len(self.stack)
            else:
                if self.language is None and tag in _CODE_TAGS:
                    self.language = language_of(classes) or _language_of_data(attributes)
                if tag in _LINE_TAGS:
                    self._end_line(0)
                elif tag in _CELL_TAGS and self.parts and not self.parts[-1].endswith("\n"):
                    self.parts.append("\t")
                found = _LINE_NUMBER.search(attributes)
                number = found[1] if found is not None else None
        self.stack.append(_Open(tag, len(self.parts), number))
        self.num_open[tag] += 1

    def end(self, tag: str) -> None:
        """Read an end tag; it closes the elements inside that are still open."""
        if not self.num_open[tag]:
            return
        while True:
            element = self.stack.pop()
            self.num_open[element.tag] -= 1
            if self.skipped_from is None:
                self._close(element)
            elif self.skipped_from == len(self.stack):
                self.skipped_from = None
            if element.tag == tag:
                return

    def _close(self, element: _Open) -> None:
        if element.number is not None and len(self.parts) <= element.parts_before + _MAX_NUMBER_PARTS:
            is_number = "".join(self.parts[element.parts_before :]).strip() == element.number
            del self.parts[element.parts_before if is_number else len(self.parts) :]
        if element.tag in _LINE_TAGS:
            if len(self.parts) == element.parts_before and element.tag != "tr":
                self.parts.append("\n")
            self._end_line(element.parts_before)

    def _end_line(self, parts_before: int) -> None:
        """End the line, unless it has ended or nothing was added since `parts_before`."""
        if len(self.parts) > parts_before and not self.parts[-1].endswith("\n"):
            self.parts.append("\n")

    def text(self) -> str:
        """Return the code without empty lines at its ends."""
        text = _without_numbers("".join(self.parts).rstrip())
        indentation = len(text) - len(text.lstrip())
        return text[text.rfind("\n", 0, indentation) + 1 :]


def _is_added(tag: str, classes: list[str]) -> bool:
    """Whether an element holds line numbers or is a control of the page."""
    if tag == "table":
        return False
    if not _GUTTERS.isdisjoint(classes) or not _TOOLBARS.isdisjoint(classes):
        return True
    return tag in _CONTROL_TAGS and any(_CONTROL.fullmatch(name) is not None for name in classes)


def _without_numbers(text: str) -> str:
    """Return the text without line numbers that no class marks: one above each line, or all of them above the code."""
    lines = text.lstrip("\n").split("\n")
    half = (len(lines) + 1) // 2
    if half < 2 or lines[0].strip() != "1":
        return text
    numbers = [str(number) for number in range(1, half + 1)]
    if [line.strip() for line in lines[::2]] == numbers:
        return "\n".join(lines[1::2])
    if [line.strip() for line in lines[:half]] == numbers and len(lines) == 2 * half:
        return "\n".join(lines[half:])
    return text


def _classes(attributes: str) -> str:
    found = _CLASS.search(attributes) if "class" in attributes else None
    return unescape(found[1] or found[2] or "") if found is not None else ""


def _language_of_data(attributes: str) -> str | None:
    found = _DATA_LANGUAGE.search(attributes)
    language = found[1].strip().lower() if found is not None else ""
    return language if language and language not in _NO_LANGUAGE else None
