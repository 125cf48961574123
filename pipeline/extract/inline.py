"""The text inside a block: emphasis, code, links, images, readings of ideographs and quotation marks."""

import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urljoin

import numpy as np

from pipeline.extract.blocks import LINE_BREAK, Blocks, unescape
from pipeline.extract.tags import IMAGE, OPENS_LINK

MAX_URL_CHARS = 2_000
"""Maximum length of the URL of a link or an image; a longer one is left out."""
MAX_MARKS = 10
"""Maximum number of open elements whose marks are written; those in deeper ones are left out."""

_URL = re.compile(r' (?:href|src)="([^"]*)"')
_LATER_URL = re.compile(r' data-(?:src|original|lazy-src|lazyload|actualsrc)="([^"]*)"')
"""The URL of an image that a script loads when it is scrolled to."""
_ALT = re.compile(r' alt="([^"]*)"')
_MARK_OF = {
    **{"b": "**", "strong": "**", "i": "*", "em": "*"},
    **dict.fromkeys(("code", "kbd", "samp", "tt"), "`"),
}
_BACKTICKS = re.compile("`+")
_PERMALINK = re.compile(r"[#¶§🔗\s\u200b\ufe0e\ufe0f]*")
"""Text of a link to the heading that it is in."""
_RUBY, _QUOTE, _LINK = b"<rt", b"<q>", b"<a"


@dataclass(frozen=True)
class TextForm:
    """How the text of a page is written."""

    markdown: bool = False
    links: bool = False
    """True to write the URL of each link after its text."""
    images: bool = False
    """True to write the alternative text of images, in Markdown with their URLs."""


class _Open(NamedTuple):
    """An element that is open."""

    tag: str
    start: int | None
    """Number of parts before it; None: it gets no marks."""
    source: str = ""
    """The start tag, for a link."""


class _End(str):
    """A mark after emphasized text, such as `**`; it is no mark that the page has in its text."""

    __slots__ = ()


class Inline:
    """Writes the texts of the blocks of one page."""

    def __init__(self, blocks: Blocks, form: TextForm, base: str | None):
        """`base`: URL of the page, against which the URLs of links and images are resolved.

        Nothing is resolved against a URL of more than MAX_URL_CHARS without its query: each link would repeat it.
        """
        self.blocks, self.form = blocks, form
        place = re.split("[?#]", base or "", maxsplit=1)[0]
        self.base = place if len(place) <= MAX_URL_CHARS else ""
        self._is_plain = not (form.markdown or form.links or form.images)
        self._links = np.flatnonzero(blocks.effects == OPENS_LINK) if form.links else None

    def text(self, block: int, in_heading: bool = False) -> str:
        """Return the text of a block with LINE_BREAK for `<br>`, and with marks as they are chosen.

        A heading has no marks of emphasis, and no link to itself such as `#`.
        """
        if self._is_plain:
            markup = self.blocks.markup(block)
            if not (in_heading and _LINK in markup) and _RUBY not in markup and _QUOTE not in markup:
                return self.blocks.source(block)
        first, last = int(self.blocks.first_tags[block]), int(self.blocks.last_tags[block])
        parts: list[str] = []
        opened = self._around(block, first)
        for token in range(first, last):
            source = self.blocks.tag(token)
            tag = source.partition(" ")[0]
            if tag.startswith("/"):
                if opened and opened[-1].tag == tag[1:]:
                    self._close(parts, opened, in_heading)
            elif tag in ("a", "q", "rt") or (tag in _MARK_OF and self.form.markdown and not in_heading):
                start = len(parts) if len(opened) < MAX_MARKS and not self._is_marked(opened, tag) else None
                opened.append(_Open(tag, start, source if tag == "a" else ""))
            elif tag == "img" and self.form.images:
                parts.append(self.image(token))
            if text := (LINE_BREAK if tag == "br" else "") + unescape(self.blocks.text(token)):
                parts.append(text)
        while opened:
            self._close(parts, opened, in_heading)
        return "".join(parts)

    def _around(self, block: int, first: int) -> list[_Open]:
        """Return the link in which a block starts, if links are written."""
        if self._links is None or not self.blocks.in_link[block]:
            return []
        number = int(np.searchsorted(self._links, first)) - 1
        return [_Open("a", 0, self.blocks.tag(int(self._links[number])))] if number >= 0 else []

    def _is_marked(self, opened: list[_Open], tag: str) -> bool:
        """Whether an element needs no mark: one around it has the same, or is code, in which marks would be read."""
        marks = {_MARK_OF[element.tag] for element in opened if element.tag in _MARK_OF}
        return ("`" in marks and tag not in ("q", "rt")) or _MARK_OF.get(tag) in marks

    def _close(self, parts: list[str], opened: list[_Open], in_heading: bool) -> None:
        """Close the last open element: put marks around its parts, without the white space at their ends."""
        element = opened.pop()
        if element.start is None:
            return
        inner = "".join(parts[element.start :])
        core = inner.strip()
        if not core:
            return
        lead, tail = inner[: inner.index(core)], inner[inner.index(core) + len(core) :]
        if element.tag == "a":
            if in_heading and "#" in element.source and _PERMALINK.fullmatch(core):
                del parts[element.start :]
                return
            url = self._url(element.source) if self.form.links else None
            marked = core if url is None else f"[{core}]({url})" if self.form.markdown else f"{core} ({url})"
        elif element.tag == "rt":
            marked = core if self._has_parentheses(parts, element.start, core) else f"({core})"
        elif element.tag == "q":
            marked = core if core[0] in "\"“„«‘'「" else f"“{core}”"
        elif (mark := _MARK_OF[element.tag]) == "`":
            fence = _fence(core)
            marked = f"{fence} {core} {fence}" if len(fence) > 1 else f"`{core}`"
        else:
            around = opened[-1].start if opened else 0
            before = parts[element.start - 1] if element.start > (around or 0) and not lead else ""
            # As in `<b>a</b><b>b</b>`: the marks of both would be read as text.
            joins = isinstance(before, _End) and before == mark
            parts[element.start - joins :] = filter(None, (lead, "" if joins else mark, core, _End(mark), tail))
            return
        parts[element.start :] = filter(None, (lead, marked, tail))

    def _has_parentheses(self, parts: list[str], start: int, core: str) -> bool:
        """Whether a reading is in parentheses already, which `<rp>` holds for readers without ruby."""
        before = "".join(parts[max(0, start - 4) : start]).rstrip()
        return before.endswith(("(", "（", "《", "【", "[")) or core[0] in "(（《【["

    def _url(self, attributes: str) -> str | None:
        found = _URL.search(attributes)
        if found is None or not found[1].strip() or len(found[1]) > MAX_URL_CHARS:
            return None
        url = unescape(found[1].strip())
        if url.startswith(("#", "data:", "javascript:")):
            return None
        try:
            return urljoin(self.base, url).replace(" ", "%20")
        except ValueError:
            return None

    def image(self, token: int) -> str:
        """Return an image, given by its tag: its alternative text, and in Markdown its URL."""
        attributes = self.blocks.tag(token)
        alt = _ALT.search(attributes)
        text = " ".join(unescape(alt[1]).split()) if alt else ""
        if not self.form.markdown:
            return text
        later = _LATER_URL.search(attributes)
        url = (self._url(f' src="{later[1]}"') if later else None) or self._url(attributes)
        return f"![{text}]({url})" if url else text

    def images(self, tokens: range) -> str:
        """Return the images among some tags, one per line."""
        return "\n".join(filter(None, (self.image(n) for n in tokens if self.blocks.effects[n] == IMAGE)))


def _fence(code: str) -> str:
    """Return the backticks around code, more than the code has itself."""
    return "`" * (1 + max(map(len, _BACKTICKS.findall(code)), default=0))
