"""The tags of a page: what each does to the text, and what a start tag says about the text in its element.

The names of all tags of a page are recognized at once, as numbers; start tags are read one by one and kept in a cache.
"""

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.extract import native

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_NO_TEXT = frozenset(
    (
        *("script", "style", "svg", "template", "iframe", "object", "canvas", "select", "textarea", "datalist"),
        *("audio", "video", "map", "noembed", "noframes"),
    )
)
"""Elements whose text is left out."""
_ATTRIBUTE = re.compile(r' (role|itemprop|itemscope|hidden|aria-hidden|style)(?:="([^"]*)")?')
_MARKED = re.compile(rb" (?:role|itemprop|itemscope|hidden|aria-hidden|style)\b")
_LOWER = bytes(code if ord("a") <= code <= ord("z") else ord(" ") for code in range(256))
_NAME_WORD = re.compile(r"[A-Z][a-z]+|[a-z]{2,}|[A-Z]{2,}(?![a-z])")

CONTAINERS = (
    *("body", "div", "p", "ul", "ol", "li", "table", "tbody", "thead", "tfoot", "tr", "td", "th", "caption", "section"),
    *("article", "main", "header", "footer", "nav", "aside", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote"),
    *("dl", "dt", "dd", "figure", "figcaption", "form", "fieldset", "legend", "label", "button", "address", "details"),
    *("summary", "dialog", "dir", "center", "menu", "hgroup", "search", "noscript", "option", "optgroup"),
    *("colgroup", "frameset"),
)
"""Elements that start a new block. Their order gives them numbers."""
_NUMBER_OF = {name: number for number, name in enumerate(CONTAINERS)}

MARKS = (
    *("nav", "header", "footer", "aside", "article", "main", "noscript", "form", "table", "list", "item", "figure"),
    *("blockquote", "button", "dl", "pre", "label", "section", "address", "dialog", "details", "search", "hidden"),
    *("property", "scope", "body_property", "comments"),
)
"""What an element says about the blocks in it, each one bit: by its name, role, class, visibility or microdata."""
BIT = {mark: 1 << number for number, mark in enumerate(MARKS)}
_MARK_OF_TAG = {name: name for name in CONTAINERS if name in MARKS} | {"ul": "list", "ol": "list", "li": "item"}
_MARKS_OF_ELEMENT = [BIT.get(_MARK_OF_TAG.get(name, ""), 0) for name in (*CONTAINERS, "")]
"""Marks by the number of an element; the last one is for elements that are no containers."""
_MARK_OF_ROLE = {
    **dict.fromkeys(("navigation", "menu", "menubar", "tablist"), "nav"),
    **dict.fromkeys(("dialog", "alertdialog"), "dialog"),
    **{"main": "main", "article": "article", "complementary": "aside", "banner": "header"},
    **{"contentinfo": "footer", "search": "search", "button": "button"},
}
_COMMENTS = frozenset(
    (
        *("comment", "comments", "commentlist", "disqus", "respond", "reply", "replies", "livefyre", "kommentar"),
        *("kommentare", "commentaire", "commentaires", "comentarios", "commenti", "komentarze", "pinglun"),
    )
)
"""Words of classes around comments of readers. They are main text in a forum, and not below an article."""
_BODY_PROPERTIES = frozenset(("articleBody", "text", "description", "reviewBody"))

# What a tag does to the text. A tag that is not listed does nothing.
NOTHING, OPENS, CLOSES, RULE, OPENS_PRE, CLOSES_PRE, OPENS_LINK, CLOSES_LINK, OPENS_BOLD, CLOSES_BOLD, BREAK, IMAGE = (
    range(12)
)
LEFT_OUT, CLOSES_LEFT_OUT = 12, 13
_BOLD = ("b", "strong", "i", "em")
_EFFECT_OF = {
    **dict.fromkeys(CONTAINERS, OPENS),
    **{f"/{name}": CLOSES for name in CONTAINERS},
    **{"pre": OPENS_PRE, "/pre": CLOSES_PRE, "hr": RULE, "br": BREAK, "img": IMAGE, "a": OPENS_LINK, "/a": CLOSES_LINK},
    **dict.fromkeys(_BOLD, OPENS_BOLD),
    **{f"/{name}": CLOSES_BOLD for name in _BOLD},
    **dict.fromkeys(_NO_TEXT, LEFT_OUT),
    **{f"/{name}": CLOSES_LEFT_OUT for name in _NO_TEXT},
}
# The name of a tag is read as two numbers of 8 bytes, which are mixed into one key. The keys are in a table of slots.
_LOW, _HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_SPACES, _BRACKETS, _ALL = np.uint64(0x2020202020202020), np.uint64(0x3E3E3E3E3E3E3E3E), np.uint64(0xFFFFFFFFFFFFFFFF)
_MIX, _NO_BITS, _ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0), np.uint64(1)
_SLOT_BITS, _SLOT_FACTOR = 12, np.uint64(0xCC623AF8783354E7)
NAME_BYTES = 16
"""Number of bytes by which the name of a tag is recognized, with the one after it: `/blockquote` has 11."""


def _keys(first: Words, second: Words) -> Words:
    """Return the key of each tag, from the two numbers of 8 bytes after its first bracket (tags,)."""
    first_part = _before_end(first)
    is_whole = first_part == _ALL
    second = np.where(is_whole, second & _before_end(second), _NO_BITS)
    keys: Words = (first & first_part) * _MIX + second
    return keys


def _before_end(words: Words) -> Words:
    """Return a mask of the bytes of each number before its first space or bracket; all bits if it has none."""
    spaces, brackets = words ^ _SPACES, words ^ _BRACKETS
    ends = (((spaces - _LOW) & ~spaces) | ((brackets - _LOW) & ~brackets)) & _HIGH
    lowest = (ends & (~ends + _ONE)) >> np.uint64(7)
    return lowest - _ONE


def _slots(keys: Words) -> Ints:
    return ((keys * _SLOT_FACTOR) >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


def _tables() -> tuple[Words, npt.NDArray[np.int8]]:
    """Return the key and the effect in each slot. Raises ValueError if two names have the same slot."""
    names = b"".join(f"{name}>".encode().ljust(NAME_BYTES) for name in _EFFECT_OF)
    words = np.frombuffer(names, "<u8").astype(np.uint64).reshape(-1, 2)
    keys = _keys(words[:, 0], words[:, 1])
    slots = _slots(keys)
    if len(np.unique(slots)) < len(slots):
        raise ValueError("expected a slot of its own for each name of a tag. Change _SLOT_FACTOR.")
    key_of, effect_of = np.zeros(1 << _SLOT_BITS, np.uint64), np.zeros(1 << _SLOT_BITS, np.int8)
    key_of[slots], effect_of[slots] = keys, list(_EFFECT_OF.values())
    return key_of, effect_of


_KEY_OF, _EFFECT_IN = _tables()
EFFECT_TABLES = _KEY_OF, _EFFECT_IN, int(_MIX), int(_SLOT_FACTOR)
"""The tables and factors by which the native code finds the effect of a name."""


def effects_of(html: bytes, starts: Ints) -> npt.NDArray[np.int8]:
    """Return what each tag does to the text, from the positions of the tags' first brackets (tags,)."""
    padded = html + b" " * (NAME_BYTES + 1)
    # A view of the eight bytes from each position on.
    words: Words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
    keys = _keys(words[starts + 1], words[starts + 9])
    slots = _slots(keys)
    return np.where(_KEY_OF[slots] == keys, _EFFECT_IN[slots], np.int8(NOTHING))


class Tag(NamedTuple):
    """What a start tag says; it is the same for every place where the same tag occurs."""

    element: int
    """Number in CONTAINERS; -1 if it is no container."""
    marks: int
    """Bits of MARKS."""
    words: tuple[str, ...]
    """Words of its class, its id and its itemprop, in lower case."""


def read_tags(html: bytes, begins: Ints, ends: Ints, is_read: npt.NDArray[np.bool_]) -> tuple[list[Tag], Ints]:
    """Return the distinct start tags of a page, and the number of each tag among them.

    `begins` and `ends` are the positions after the first bracket and of the last bracket of each tag. Where `is_read`
    is False, only the name of the element is read.
    """
    if native.module is not None:
        tags, tag_of = native.loaded().read_tags(_native_tables(), html, begins, ends, is_read, NAME_BYTES)
        return list(map(Tag._make, tags)), np.frombuffer(tag_of, np.int64)
    return read_tags_in_python(html, begins, ends, is_read)


def read_tags_in_python(
    html: bytes, begins: Ints, ends: Ints, is_read: npt.NDArray[np.bool_]
) -> tuple[list[Tag], Ints]:
    """Return the same as `read_tags`."""
    sources = [
        html[begin:end] if is_whole else html[begin : begin + NAME_BYTES].partition(b" ")[0].partition(b">")[0]
        for begin, end, is_whole in zip(begins.tolist(), ends.tolist(), is_read.tolist())
    ]
    numbers = {source: number for number, source in enumerate(dict.fromkeys(sources))}
    return list(map(read_tag, numbers)), np.fromiter(map(numbers.__getitem__, sources), np.int64, len(sources))


@lru_cache(maxsize=1)
def _native_tables() -> object:
    """Return the tables by which the native code reads start tags."""
    bits = tuple(BIT[mark] for mark in ("comments", "hidden", "property", "body_property", "scope"))
    roles = {role: BIT[mark] for role, mark in _MARK_OF_ROLE.items()}
    return native.loaded().tag_tables(_NUMBER_OF, roles, _MARKS_OF_ELEMENT, _COMMENTS, _BODY_PROPERTIES, bits)


@lru_cache(maxsize=1 << 14)
def read_tag(source: bytes) -> Tag:
    """Return what a start tag says, from its source without brackets, such as `div class="menu"`."""
    name, _, attributes = source.partition(b" ")
    element = _NUMBER_OF.get(name.decode("ascii", "replace"), -1)
    marks = _MARKS_OF_ELEMENT[element]
    if not attributes:
        return Tag(element, marks, ())
    words = name_words(_value(source, b' class="'))
    if identifier := _value(source, b' id="'):
        words += name_words(identifier)
    if not _COMMENTS.isdisjoint(words):
        marks |= BIT["comments"]
    if _MARKED.search(source) is not None:
        for attribute, value in _ATTRIBUTE.findall(source.decode("utf-8", "replace")):
            marks |= _marks_of(attribute, value)
            if attribute == "itemprop":
                words += (f"itemprop:{value.lower()}",)
    return Tag(element, marks, words)


def _value(source: bytes, start: bytes) -> bytes:
    """Return the value of the attribute that starts like this, such as ` class="`; empty if there is none."""
    place = source.find(start) + len(start)
    return source[place:].partition(b'"')[0] if place >= len(start) else b""


@lru_cache(maxsize=1 << 15)
def name_words(value: bytes) -> tuple[str, ...]:
    """Return the words of a class or id, such as ("post", "body") for `postBody`, in lower case."""
    if value.islower():
        return tuple([word for word in value.translate(_LOWER).decode("ascii").split() if len(word) > 1])
    return tuple(map(str.lower, _NAME_WORD.findall(value.decode("ascii", "replace"))))


def _marks_of(attribute: str, value: str) -> int:
    if attribute == "role":
        return BIT.get(_MARK_OF_ROLE.get(value, ""), 0)
    if attribute == "itemprop":
        return BIT["property"] | (BIT["body_property"] if value in _BODY_PROPERTIES else 0)
    if attribute == "itemscope":
        return BIT["scope"]
    is_hidden = (
        attribute == "hidden"
        or (attribute == "aria-hidden" and value == "true")
        or (attribute == "style" and "display:none" in value.replace(" ", ""))
    )
    return BIT["hidden"] if is_hidden else 0
