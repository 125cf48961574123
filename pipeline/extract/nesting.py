"""The nesting of a page, which is estimated before parsing: HTML parsers and extractors take time quadratic in depth.

Most pages have fewer start tags than the limit has levels, which a count of bytes shows; the others are scanned once.
The estimate is never too low: an end tag closes only elements of its own name, tags inside scripts and comments count
as tags, and an end tag that a parser may not see closes none that the parser may see.
"""

import re

from pipeline.engine.stage import Drop
from pipeline.extract import native

MAX_REOPENED = 250_000
"""Maximum number of elements that a parser adds by reopening unclosed formatting in each following block. 2 million
take 770 MiB and 5 s in resiliparse 2.0.1; the worst of 3,383 real pages has 19,167. Source: WHATWG HTML, 13.2.4.3."""
SAFE_TAGS = 1_000
"""Number of start tags up to which no page can exceed MAX_REOPENED. The worst page has as many formatting elements as
blocks, and 500 times 500 is MAX_REOPENED."""

NESTING_REASONS = {
    "too_deep": "elements are nested deeper than max_depth by the estimate; the value is where the scan stopped",
    "unclosed_formatting": "unclosed formatting elements would be reopened more often than a parser can bear",
}

ATTRIBUTE_FACTOR = 8
"""Length of the attributes that are read of a page, as a multiple of its length; beyond it no end tag counts."""

_MARKUP = re.compile(r"<(?:(/?[a-zA-Z][^\t\n\f\r />]*+)|!--|!\[CDATA\[|[!?/])")
_ATTRIBUTES = re.compile(
    r"""(?:[\t\n\f\r /]++|[^\t\n\f\r />][^\t\n\f\r />=]*+"""
    r"""(?:[\t\n\f\r ]*+=[\t\n\f\r ]*+(?:"[^"]*+"|'[^']*+'|(?!["'])[^\t\n\f\r >]*+))?+)*+"""
)
"""The attributes of a tag, as in WHATWG HTML, 13.2.5."""
_RAW = frozenset(("script", "style", "xmp", "iframe", "noembed", "noframes", "textarea", "title", "plaintext"))
"""Elements whose content is text to a parser, unless they are in a drawing, a menu or the like."""
_NO_CONTENT = "area base br col embed frame hr img input link meta param source track wbr"
_CLOSED_BY_NEXT = "a body dd dt head html li nobr option p tbody td tfoot th thead tr"
_DRAWING = "circle ellipse image line path polygon polyline rect stop use"  # closed in the start tag
_FLAT = frozenset(f"{_NO_CONTENT} {_CLOSED_BY_NEXT} {_DRAWING}".split())
_FORMATTING = frozenset(("b", "big", "code", "em", "font", "i", "s", "small", "strike", "strong", "tt", "u"))
KINDS = {name: (name in _FLAT) + 2 * (name in _FORMATTING) + 4 * (name in _RAW) for name in _FLAT | _FORMATTING | _RAW}
"""Bits of an element for the native module: it is no level of nesting, is formatting, has text as content."""
_FORMATTING_START = re.compile(rf"<(?:{'|'.join(sorted(_FORMATTING))})[\t\n\f\r />]", re.IGNORECASE)


def nesting_problem(payload: bytes, text: str, max_depth: int) -> Drop | None:
    """Return a Drop if a page has more than `max_depth` levels or too much unclosed formatting, else None.

    `payload` is the page as bytes, `text` the decoded page.
    """
    safe = min(max_depth, SAFE_TAGS)
    # Each `<` has the byte 0x3C in all supported charsets, so there are at most as many start tags as such bytes.
    if (num_tags := _num_start_tags(payload)) <= safe:
        return None
    if num_tags <= max_depth and num_tags * num_formatting(text) <= MAX_REOPENED:
        return None
    return scan(text, max_depth)


def _num_start_tags(payload: bytes) -> int:
    """Return the number of `<` without a following `/`."""
    if native.module is None:
        return payload.count(b"<") - payload.count(b"</")
    count: tuple[int, int] = native.loaded().count_tags(payload)
    return count[0] - count[1]


def num_formatting(text: str) -> int:
    """Return the number of start tags of formatting elements in a page."""
    if native.module is None:
        return num_formatting_in_python(text)
    count: int = native.loaded().count_formatting(text)
    return count


def num_formatting_in_python(text: str) -> int:
    """Return the same as `num_formatting`."""
    return len(_FORMATTING_START.findall(text))


def scan(text: str, max_depth: int) -> Drop | None:
    """Return what `nesting_problem` does, for a page of any number of tags."""
    if native.module is None:
        return scan_in_python(text, max_depth)
    found = native.loaded().nesting(text, KINDS, ATTRIBUTE_FACTOR, max_depth, MAX_REOPENED)
    if found is None:
        return None
    rule, value = found
    return Drop(rule, value, max_depth if rule == "too_deep" else MAX_REOPENED)


def scan_in_python(text: str, max_depth: int) -> Drop | None:
    """Return the same as `scan`."""
    kinds: dict[str, tuple[str, bool, bool, bool]] = {}
    opened: dict[str, list[int]] = {}
    hiding = _Hiding(text)
    depth = formatting = reopened = 0
    for match in _MARKUP.finditer(text):
        tag, place = match[1], match.start()
        begin = hiding.see(match)
        if tag is None:
            continue
        kind = kinds.get(tag)
        if kind is None:
            kind = kinds[tag] = _kind(tag)
        name, starts, nests, formats = kind
        if not starts:
            if (places := opened.get(name)) and places[-1] > begin:
                places.pop()
                depth -= 1
                formatting -= formats
            continue
        if nests:
            opened.setdefault(name, []).append(place)
            depth += 1
            if depth > max_depth:
                return Drop("too_deep", depth, max_depth)
        if formats:
            formatting += 1
        elif formatting:
            reopened += formatting
            if reopened > MAX_REOPENED:
                return Drop("unclosed_formatting", reopened, MAX_REOPENED)
    return None


class _Hiding:
    """The ranges of a page in which a parser may see no tags: comments, attributes, scripts and the like.

    Which of them there are depends on the parser's state, so one begins at every place where one could, and none ends
    too early. If an end tag is in one that a parser sees, so is each start tag after the last begin before the end tag.
    """

    def __init__(self, text: str):
        self._text = text
        self._open: list[tuple[int, int]] = []
        """(begin, end) of ranges, by begin; the last one is open."""
        self._ends: dict[tuple[str, str], int] = {}
        """The place of each mark that was found last, by mark and use."""
        self._left = ATTRIBUTE_FACTOR * len(text)

    def see(self, match: re.Match[str]) -> int:
        """Return the begin of the last range around a match, -1 without one; add the range that begins with it."""
        place = match.start()
        while self._open and self._open[-1][1] <= place:
            self._open.pop()
        begin = self._open[-1][0] if self._open else -1
        if (end := self._end_of(match)) > match.end():
            self._open.append((place, end))
        return begin

    def _end_of(self, match: re.Match[str]) -> int:
        tag, after = match[1], match.end()
        if tag is None:
            mark = match[0][1:]
            return self._after({"!--": "-->", "![CDATA[": "]]>"}.get(mark, ">"), after)
        if (name := tag.lower()) in _RAW:
            return self._after_raw(name, after)
        if self._left < 0:  # Tags in attributes of each other would be read again and again.
            return len(self._text)
        end = after
        if self._text[after : after + 1] != ">" and (attributes := _ATTRIBUTES.match(self._text, after)):
            end = attributes.end()
            self._left -= end - after
        return end

    def _after_raw(self, name: str, place: int) -> int:
        """Return the end of a script or the like. In a script, its end tag is text in some comments."""
        end = self._after(f"</{name}", place)
        while name == "script" and (comment := self._after("<!--", place, "in script")) < end:
            place = self._after("-->", comment + 4, "in script")
            end = self._after("</script", place, "in script")
        return end

    def _after(self, mark: str, place: int, use: str = "") -> int:
        """Return the next place of a mark, in letters of any case; the end of the text if there is none.

        It may be a later one than the next if an earlier call for the same use was for a later place.
        """
        end = self._ends.get((mark, use), -1)
        if end < place:
            found = re.compile(re.escape(mark), re.IGNORECASE | re.ASCII).search(self._text, place)
            end = self._ends[mark, use] = found.start() if found is not None else len(self._text)
        return end


def _kind(tag: str) -> tuple[str, bool, bool, bool]:
    """Return (name, is a start tag, counts as a level of nesting, is a formatting tag) of a tag."""
    name = tag.removeprefix("/").lower()
    return name, tag[0] != "/", name not in _FLAT, name in _FORMATTING
