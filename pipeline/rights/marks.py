"""The marks of rights that a page carries: those in its HTTP header and in the meta tags of its head.

Only the bytes before `</head>` or `<body>` are looked at, and of each tag a bounded part. Comments, scripts and styles
are skipped, since a tag in one of them is none.
"""

import codecs
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from pipeline.extract import native
from pipeline.extract.charset import wide_codec
from pipeline.extract.metadata_values import licence_name
from pipeline.rights.preferences import (
    AGENT_NAMES,
    ANY_AGENT,
    Fields,
    is_agent,
    limit_directives,
    read_directives,
    read_policy,
    read_reservation,
    read_robots_tag,
    read_usage,
    usage_entries,
)

MAX_HEAD_BYTES = 1 << 20
"""Number of bytes of a page that are searched if neither `</head>` nor `<body>` ends the search before."""
SNIFFED_BYTES = 1_024
"""Number of bytes of a page among which a NUL shows that it may be in UTF-16 or UTF-32."""
MAX_TAG_BYTES = 8_192
"""Number of bytes of a meta tag that are read."""
MAX_TAGS = 10_000
"""Maximum number of meta tags, comments, scripts and styles of a page that are looked at."""
_META, _COMMENT, _END, _RAW = 1, 2, 3, 4
_IN_HEAD = re.compile(
    rb"<(?:([mM][eE][tT][aA][\s/])|(!--)|(/[hH][eE][aA][dD]\b|[bB][oO][dD][yY]\b)"
    rb"|([sS](?:[cC][rR][iI][pP][tT]|[tT][yY][lL][eE])|[tT][iI][tT][lL][eE])\b)"
)
_RAW_END = {
    b"script": re.compile(rb"</[sS][cC][rR][iI][pP][tT]"),
    b"style": re.compile(rb"</[sS][tT][yY][lL][eE]"),
    b"title": re.compile(rb"</[tT][iI][tT][lL][eE]"),
}
_NAMES = frozenset(("robots", "x-robots-tag", "tdm-reservation", "tdm-policy"))
_BEFORE_END = b"\"'/"
"""Characters after which a bracket ends a tag almost always, so that quotes are not counted."""
_WHOLE_TAG = re.compile(rb"""(?:[^"'>]++|"[^"]*+"|'[^']*+')*+>""")
_MARKS = (b"no", b"tdm-", b"unavailable")
"""Texts of which a tag that declares a mark has one, in lower case."""
_ATTRIBUTE = re.compile(r"""([^\s/>="']{1,64})(?:\s{0,64}=\s{0,64}(?:"([^"]*)"?|'([^']*)'?|([^\s>"']*)))?|>""")
_LICENCE_LINK = re.compile(r"<([^<>]{1,2000})>([^<>]{0,500})")
_IS_LICENCE = re.compile(r";\s{0,8}rel\s{0,8}=\s{0,8}\"?[^\"]{0,100}\blicense\b", re.IGNORECASE)


@cache
def _words_of(agents: frozenset[str]) -> tuple[bytes, ...]:
    """Return texts of which the name of a mark has one, in lower case."""
    return (b"bot", b"tdm-", *sorted(name.encode() for name in agents if "bot" not in name and name != ANY_AGENT))


OF_NAMES = _words_of(AGENT_NAMES)


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a page; None: the page declares nothing of this kind."""

    robots_meta: list[str]
    """Robots directives, sorted: `noai` for all agents, `gptbot:noai` for one."""
    tdm_reservation: int | None
    """1: text and data mining is reserved; 0: it is not. That of a meta tag precedes that of the header."""
    tdm_policy: str | None
    content_usage: list[str]
    """Usage preferences of the header, sorted, such as `train-ai=n` and `ai-train=no`."""
    header_licence: str | None
    """Licence that the header links: an SPDX-like name, or its address."""


def read_marks(fields: Fields, page: bytes, agents: frozenset[str] = AGENT_NAMES) -> Marks:
    """Return the marks in the header fields of a page and in the meta tags of its head.

    `agents`: names in lower case of agents whose meta tags count, besides those that have `bot` in their names.
    """
    directives: set[str] = set()
    reservations: list[int | None] = []
    policies: list[str | None] = []
    for name, content in head_metas(page, agents):
        if name == "tdm-reservation":
            reservations.append(read_reservation(content))
        elif name == "tdm-policy":
            policies.append(read_policy(content))
        elif name == "x-robots-tag":
            directives |= read_robots_tag(content)
        else:
            agent = "" if name == "robots" else f"{name}:"
            directives.update(agent + directive for directive in read_directives(content))
    usage: dict[str, str] = {}
    licence = None
    in_header: list[int | None] = []
    for name, value in fields:
        if name == "x-robots-tag":
            directives |= read_robots_tag(value)
        elif name == "tdm-reservation":
            in_header.append(read_reservation(value))
        elif name == "tdm-policy":
            policies.append(read_policy(value))
        elif name == "link":
            licence = licence or _linked_licence(value)
        else:
            usage |= read_usage(value)
    return Marks(
        limit_directives(directives, agents),
        _strictest(reservations, in_header),
        next(filter(None, policies), None),
        usage_entries(usage),
        licence,
    )


def _strictest(*groups: Iterable[int | None]) -> int | None:
    """Return the largest value of the first group that has one; None if none has."""
    for group in groups:
        if values := [value for value in group if value is not None]:
            return max(values)
    return None


def head_metas(page: bytes, agents: frozenset[str] = AGENT_NAMES) -> list[tuple[str, str]]:
    """Return (name in lower case, content) of each meta tag of the head that declares a mark, in their order."""
    tags = head_tags(_in_single_bytes(page), _words_of(agents))
    return [mark for tag in tags if (mark := _mark_of(tag, agents)) is not None]


def _in_single_bytes(page: bytes) -> bytes:
    """Return the beginning of a page in UTF-16 or UTF-32 as UTF-8, in which ASCII characters have one byte each."""
    if b"\0" not in page[:SNIFFED_BYTES] and not page.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return page
    head = page[: 4 * MAX_HEAD_BYTES]
    codec = wide_codec(head)
    return page if codec is None else head.decode(codec, "replace").encode("utf-8", "replace")


def head_tags(page: bytes, names: tuple[bytes, ...] = OF_NAMES) -> list[bytes]:
    """Return the attributes of each meta tag of the head that may declare a mark, in their order.

    `names`: texts of which the name of a mark has one, in lower case.
    """
    if native.module is None:
        return head_tags_in_python(page, names)
    limits = (MAX_HEAD_BYTES, MAX_TAG_BYTES, MAX_TAGS)
    tags: list[bytes] = native.loaded().head_tags(page, limits, _MARKS, names)
    return tags


def head_tags_in_python(page: bytes, names: tuple[bytes, ...] = OF_NAMES) -> list[bytes]:
    """Return the same as `head_tags`."""
    found: list[bytes] = []
    position = 0
    for _ in range(MAX_TAGS):
        match = _IN_HEAD.search(page, position, MAX_HEAD_BYTES)
        if match is None or match.lastindex == _END:
            break
        position = match.end()
        if match.lastindex == _META:
            start, position = position, _tag_end(page, position)
            lower = page[start:position].lower()
            if any(mark in lower for mark in _MARKS) and any(name in lower for name in names):
                found.append(page[start:position])
        elif match.lastindex == _COMMENT:
            position = page.find(b"-->", position - 2, MAX_HEAD_BYTES)
        else:
            end = _RAW_END[match[_RAW].lower()].search(page, position, MAX_HEAD_BYTES)
            position = -1 if end is None else end.end()
        if position < 0:  # a comment or script without an end extends to the end of the page
            break
    return found


def _tag_end(page: bytes, start: int) -> int:
    """Return the position after the bracket that ends the tag whose attributes begin at `start`."""
    limit = start + MAX_TAG_BYTES
    end = page.find(b">", start, limit)
    if end < 0:
        return limit
    if page[end - 1] in _BEFORE_END or not (page.count(b'"', start, end) % 2 or page.count(b"'", start, end) % 2):
        return end + 1
    whole = _WHOLE_TAG.match(page, start, limit)  # the bracket may be in a value
    return end + 1 if whole is None else whole.end()


def _mark_of(source: bytes, agents: frozenset[str]) -> tuple[str, str] | None:
    """Return (name, content) of a meta tag, from its bytes after its name; None if it declares no mark."""
    attributes: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(source.decode("utf-8", "replace")):
        if match[1] is None:
            break
        value = next((group for group in match.groups()[1:] if group is not None), "")
        attributes.setdefault(match[1].lower(), value)
    name = html.unescape(attributes.get("name") or attributes.get("http-equiv") or "").strip().lower()
    content = attributes.get("content")
    if content is None or not (name in _NAMES or is_agent(name, agents)):
        return None
    content = html.unescape(content)
    return (name, content) if name.startswith("tdm-") or read_directives(content) else None


def _linked_licence(value: str) -> str | None:
    """Return the licence of a header field Link; None if it links none."""
    for target, parameters in _LICENCE_LINK.findall(value):
        if _IS_LICENCE.search(parameters):
            return licence_name(target) or read_policy(target)
    return None
