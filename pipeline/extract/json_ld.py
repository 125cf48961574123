"""JSON-LD of a page: reads its scripts tolerantly, within limits of size, depth and number of nodes.

Scripts are often not valid JSON: they have trailing commas, comments, control characters in strings or several values.
Such a script is repaired once; if it is still not JSON, it is skipped and counted. Source: JSON-LD 1.1, W3C 2020,
section 7; the property names are those of schema.org.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Node = dict[str, Any]
"""A JSON object of a JSON-LD script."""

MAX_JSON_CHARS = 1 << 19
"""Maximum length of all JSON-LD scripts of a page together [code points]; the longest of 2,367 real pages has less than
half of it. A script that exceeds the rest is not read."""
MAX_DEPTH = 8
"""Maximum depth at which nodes are searched [levels of objects and arrays]."""
MAX_NODES = 2_000
"""Maximum number of objects and arrays of a page that are visited."""

_WRAPPING = re.compile(r"<!--|-->|<!\[CDATA\[|\]\]>|^[ \t]*//[^\n]*$|/\*[^*]{0,200}\*/", re.MULTILINE)
_STRING_OR_COMMA = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|,(?=\s*[}\]])', re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)
_LISTS = ("@graph", "mainEntity", "mainEntityOfPage")
"""Properties whose values describe the page as the script's top-level objects do."""


@dataclass(slots=True)
class JsonLd:
    """What the JSON-LD scripts of a page contain."""

    nodes: list[Node] = field(default_factory=list)
    """The objects that describe the page, in document order: those at the top level, in @graph and in mainEntity."""
    by_id: dict[str, Node] = field(default_factory=dict)
    """@id → object with properties, to resolve references."""
    types: set[str] = field(default_factory=set)
    """The schema.org types of all objects, at any depth."""
    num_unread: int = 0
    """Number of scripts that are not JSON after the repair, or that exceed MAX_JSON_CHARS."""

    def resolved(self, value: Any) -> Any:
        """Return the object that a reference such as `{"@id": "#author"}` names, or the value itself."""
        if isinstance(value, dict) and isinstance(identifier := value.get("@id"), str) and len(value) <= 2:
            return self.by_id.get(identifier, value)
        return value


def read_json_ld(scripts: Iterable[str]) -> JsonLd:
    """Return the nodes of the scripts, which are the texts of the page's `application/ld+json` elements."""
    page, chars = JsonLd(), 0
    roots = []
    for script in scripts:
        if chars + len(script) > MAX_JSON_CHARS:
            page.num_unread += 1
            continue
        chars += len(script)
        if not script.strip():
            continue
        try:
            roots.append(parse_tolerantly(script))
        except (ValueError, RecursionError):  # RecursionError: Python's parser stops at about 1,000 levels.
            page.num_unread += 1
    _visit(roots, page)
    return page


def parse_tolerantly(script: str) -> Any:
    """Return the first JSON value of a script. Raises ValueError if there is none, RecursionError if it is too deep."""
    script = script.strip().lstrip("\ufeff")
    try:
        return _DECODER.decode(script)
    except ValueError:
        repaired = _WRAPPING.sub(" ", script) if '"//' not in script else script
    if '"' not in repaired and "&quot;" in repaired:
        repaired = repaired.replace("&quot;", '"').replace("&amp;", "&")
    repaired = _STRING_OR_COMMA.sub(lambda match: "" if match[0] == "," else match[0], repaired).strip()
    return _DECODER.raw_decode(repaired)[0]


def _visit(roots: list[Any], page: JsonLd) -> None:
    """Add the nodes of parsed scripts to the page, in document order and without recursion."""
    stack: list[tuple[Any, int, bool]] = [(root, 0, True) for root in reversed(roots) if isinstance(root, dict | list)]
    num_visited = 0
    while stack and num_visited < MAX_NODES:
        value, depth, describes_page = stack.pop()
        num_visited += 1
        if isinstance(value, list):
            children = [(child, describes_page) for child in value[:MAX_NODES]]
        else:
            page.types.update(types_of(value))
            if describes_page:
                page.nodes.append(value)
            if isinstance(identifier := value.get("@id"), str) and len(value) > 1:
                page.by_id.setdefault(identifier, value)
            children = [(child, describes_page and key in _LISTS) for key, child in value.items()]
        if depth < MAX_DEPTH:
            pairs = [(child, depth + 1, describes) for child, describes in children if isinstance(child, dict | list)]
            stack += reversed(pairs)


def types_of(node: Node) -> list[str]:
    """Return the schema.org types of a node without their namespace, such as `NewsArticle`."""
    declared = node.get("@type")
    names = declared if isinstance(declared, list) else [declared]
    return [re.split(r"[/#:]", name.strip())[-1] for name in names[:8] if isinstance(name, str)]
