"""Spans of text as JSON values: texts divided where spans begin and end, search hits, and snippets.

Offsets count code points. A browser counts UTF-16 units, so texts are divided here and not in the page.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from schemas.entries import NAME, VALUE

MAX_HITS = 500
"""Maximum number of hits that are marked in a text."""
SNIPPET_CHARS = 90
"""Number of characters of a snippet before and after its hit."""


@dataclass(frozen=True)
class Mark:
    """A marked span [start, end) of a text, in code points."""

    start: int
    end: int
    kind: str
    """`cut`, `hit`, `pii`, `removed` or `added`."""
    reason: str = ""


@dataclass(frozen=True)
class Hits:
    """The occurrences of a searched text, in any case."""

    text: str

    def marks(self, whole: str) -> list[Mark]:
        """Return the first MAX_HITS occurrences in a text; none if the searched text is empty."""
        if not self.text:
            return []
        found = re.finditer(re.escape(self.text), whole, re.IGNORECASE)
        return [Mark(hit.start(), hit.end(), "hit") for hit, _ in zip(found, range(MAX_HITS))]


def divide(text: str, marks: Iterable[Mark]) -> list[dict[str, Any]]:
    """Return a text as consecutive pieces `{text, marks: {kind: reason}}`; marks of different kinds may overlap."""
    kept = [mark for mark in marks if 0 <= mark.start < mark.end and mark.start < len(text)]
    edges = sorted({0, len(text), *(min(edge, len(text)) for mark in kept for edge in (mark.start, mark.end))})
    opening: dict[int, list[Mark]] = {}
    for mark in kept:
        opening.setdefault(mark.start, []).append(mark)
    active: list[Mark] = []
    pieces: list[dict[str, Any]] = []
    for start, end in itertools.pairwise(edges):
        active = [mark for mark in active if mark.end > start] + opening.get(start, [])
        pieces.append({"text": text[start:end], "marks": {mark.kind: mark.reason for mark in active}})
    return pieces


def snippet(text: str, hits: Hits) -> list[dict[str, Any]]:
    """Return the surroundings of the first hit in a text, divided at the hits; empty if there is no hit."""
    marks = hits.marks(text)
    if not marks:
        return []
    start, end = max(0, marks[0].start - SNIPPET_CHARS), marks[0].end + SNIPPET_CHARS
    moved = [Mark(max(0, mark.start - start), mark.end - start, mark.kind) for mark in marks if mark.end <= end]
    return divide(text[start:end], moved)


def spans_of_cuts(cuts: Sequence[Any] | None, reason: str) -> list[Mark]:
    """Return the stored cuts of a text as marks; cuts without a reason of their own have the given one."""
    return [Mark(cut["start"], cut["end"], "cut", cut.get("reason") or reason) for cut in cuts or ()]


def json_value(value: Any) -> Any:
    """Return a stored value as a JSON value: bytes as hex digits, times as ISO 8601, lists as short text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict) and NAME in value:
        return f"{value[NAME]} {json_value(value[VALUE])}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {json_value(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(json_value(item)) for item in value) or "none"
    return value
