"""Nesting of a page, bounded before a parser sees it: HTML parsers and extractors are quadratic in depth.

Most pages have fewer start tags than the limit has levels and pass on a count of bytes; the others are scanned once.
The estimate errs on the deep side: an end tag closes only its own name, and tags inside scripts count as tags.
"""

import re

from pipeline.engine.stage import Drop

MAX_REOPENED = 2_250_000
"""Elements a parser may add by reopening unclosed formatting in every block that follows; 2 million take 770 MiB and
5 s in resiliparse 2.0.1, and the worst of 3,383 real pages has 19,167. Source: WHATWG HTML, section 13.2.4.3."""
SAFE_TAGS = 3_000
"""Start tags with which no page can reach MAX_REOPENED: half of them formatting, half blocks."""

NESTING_REASONS = {
    "too_deep": "elements are nested deeper than max_depth by the estimate; the value is where the scan stopped",
    "unclosed_formatting": "unclosed formatting elements would be reopened more often than a parser can bear",
}

SCAN_CHARS = 1 << 18
"""Text that is scanned at a time, so that the scan of a bomb ends soon."""

_TAG = re.compile(r"<(/?[a-zA-Z][^\s/>]*)")
_NO_CONTENT = "area base br col embed frame hr img input link meta param source track wbr"
_CLOSED_BY_NEXT = "a body dd dt head html li nobr option p tbody td tfoot th thead tr"
_DRAWING = "circle ellipse image line path polygon polyline rect stop use"  # closed in the start tag
_FLAT = frozenset(f"{_NO_CONTENT} {_CLOSED_BY_NEXT} {_DRAWING}".split())
_FORMATTING = frozenset(("b", "big", "code", "em", "font", "i", "s", "small", "strike", "strong", "tt", "u"))


def nesting_problem(payload: bytes, text: str, max_depth: int) -> Drop | None:
    """Why a page, as bytes and as text, is nested too deeply [levels] for a parser; None if it is not.

    Every `<` is a byte 0x3C in every charset we decode, so the bytes give an upper bound of the start tags.
    """
    safe = min(max_depth, SAFE_TAGS)
    num_tags = payload.count(b"<")
    if num_tags <= safe or num_tags - payload.count(b"</") <= safe:
        return None
    return _scan(text, max_depth)


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
    """Name of a tag; whether it starts an element, whether that nests, whether it is formatting."""
    name = tag.removeprefix("/").lower()
    return name, tag[0] != "/", name not in _FLAT, name in _FORMATTING
