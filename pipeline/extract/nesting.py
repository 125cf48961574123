"""The nesting of a page, which is estimated before parsing: HTML parsers and extractors take time quadratic in depth.

Most pages have fewer start tags than the limit has levels, which a count of bytes shows; the others are scanned once.
The estimate is never too low: an end tag closes only elements of its own name, and tags inside scripts count as tags.
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

SCAN_CHARS = 1 << 18
"""Length of text that is scanned at a time [code points], so that the scan of a maliciously nested page ends early."""

_TAG = re.compile(r"<(/?[a-zA-Z][^\s/>]*)")
_NO_CONTENT = "area base br col embed frame hr img input link meta param source track wbr"
_CLOSED_BY_NEXT = "a body dd dt head html li nobr option p tbody td tfoot th thead tr"
_DRAWING = "circle ellipse image line path polygon polyline rect stop use"  # closed in the start tag
_FLAT = frozenset(f"{_NO_CONTENT} {_CLOSED_BY_NEXT} {_DRAWING}".split())
_FORMATTING = frozenset(("b", "big", "code", "em", "font", "i", "s", "small", "strike", "strong", "tt", "u"))
_FORMATTING_START = re.compile(rf"<(?:{'|'.join(sorted(_FORMATTING))})[\s/>]", re.IGNORECASE)


def nesting_problem(payload: bytes, text: str, max_depth: int) -> Drop | None:
    """Return a Drop if a page has more than `max_depth` levels or too much unclosed formatting, else None.

    `payload` is the page as bytes, `text` the decoded page.
    """
    safe = min(max_depth, SAFE_TAGS)
    # Each `<` has the byte 0x3C in all supported charsets, so there are at most as many start tags as such bytes.
    num_tags = payload.count(b"<")
    if num_tags <= safe or (num_tags := num_tags - payload.count(b"</")) <= safe:
        return None
    if num_tags <= max_depth and num_tags * num_formatting(text) <= MAX_REOPENED:
        return None
    return _scan(text, max_depth)


def num_formatting(text: str) -> int:
    """Return the number of start tags of formatting elements in a page."""
    if native.module is None:
        return num_formatting_in_python(text)
    count: int = native.loaded().count_formatting(text)
    return count


def num_formatting_in_python(text: str) -> int:
    """Return the same as `num_formatting`."""
    return len(_FORMATTING_START.findall(text))


def _scan(text: str, max_depth: int) -> Drop | None:
    kinds: dict[str, tuple[str, bool, bool, bool]] = {}
    opened: dict[str, int] = {}
    depth = formatting = reopened = start = 0
    while start >= 0:
        end = text.find("<", start + SCAN_CHARS)
        for tag in _TAG.findall(text, start, end if end >= 0 else len(text)):
            kind = kinds.get(tag)
            if kind is None:
                kind = kinds[tag] = _kind(tag)
            name, starts, nests, formats = kind
            if not starts:
                if opened.get(name):
                    opened[name] -= 1
                    depth -= 1
                    formatting -= formats
                continue
            if nests:
                opened[name] = opened.get(name, 0) + 1
                depth += 1
                if depth > max_depth:
                    return Drop("too_deep", depth, max_depth)
            if formats:
                formatting += 1
            elif formatting:
                reopened += formatting
                if reopened > MAX_REOPENED:
                    return Drop("unclosed_formatting", reopened, MAX_REOPENED)
        start = end
    return None


def _kind(tag: str) -> tuple[str, bool, bool, bool]:
    """Return (name, is a start tag, counts as a level of nesting, is a formatting tag) of a tag."""
    name = tag.removeprefix("/").lower()
    return name, tag[0] != "/", name not in _FLAT, name in _FORMATTING
