"""A page as blocks: runs of text between the elements that start a new line, with the place of each in the markup.

The page is parsed once. The parser's tree is written as well-formed HTML, whose bytes are one array: tags, texts
and nesting follow from the positions of brackets. Visiting the nodes from Python takes many times as long.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.extract import native
from pipeline.extract.tags import (
    BREAK,
    CLOSES,
    CLOSES_BOLD,
    CLOSES_LINK,
    CLOSES_PRE,
    EFFECT_TABLES,
    IMAGE,
    LEFT_OUT,
    OPENS,
    OPENS_BOLD,
    OPENS_LINK,
    OPENS_PRE,
    RULE,
    Tag,
    effects_of,
    read_tags,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

MAX_TAGS = 100_000
"""Maximum number of tags of a page that are read; the largest of 2,367 real pages has 19,807."""
LINE_BREAK = "\v"
"""What `<br>` becomes in the text of a block, in which line ends are only spaces."""

NO_BREAK_SPACE = "\xa0"

_RAW = frozenset((b"script", b"style", b"iframe", b"textarea", b"noembed", b"noframes"))
"""Elements that are left out and contain no elements."""
_HEAD = re.compile(rb'([^ >]*+(?: [^ =>]*+="[^"]*+")*+)(?: [^ =>]*+(?:="[^"]*+)?)?')
"""A tag without its brackets, and what is read after it in vain; the name of an attribute can have quotes and brackets.
"""
HEAD_FACTOR = 8
"""Bytes that are read in vain of what is no tag, as a multiple of the size of the page; beyond it, each tag ends at its
first bracket. The content of elements such as `<xmp>` is not well-formed."""
_ESCAPED = (("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))

_LINK_AND_BOLD = np.zeros((2, 14), np.int64)
"""How each effect changes the number of open links and of open bold elements, (2, effects)."""
_LINK_AND_BOLD[0, [OPENS_LINK, CLOSES_LINK]] = _LINK_AND_BOLD[1, [OPENS_BOLD, CLOSES_BOLD]] = 1, -1


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of a page and the containers around them, in document order.

    Container 0 is the body. The containers in container i are numbered from i + 1 to `ends[i]` - 1.
    """

    html: bytes
    """The body in well-formed HTML, in UTF-8. Positions are those of its bytes."""
    tag_starts: Ints
    """Position of the first bracket of each tag (tags,). Tags that are left out with their text are not counted."""
    tag_ends: Ints
    """Position of the last bracket of each tag (tags,)."""
    text_ends: Ints
    """Position of the first bracket after the text that follows each tag (tags,)."""
    effects: npt.NDArray[np.int8]
    """What each tag does to the text, such as OPENS and BREAK (tags,)."""
    texts: list[str]
    """The text after each tag that has one, in HTML with its entities; after a `<br>` it begins with LINE_BREAK."""
    first_texts: list[int]
    """Number of the first of `texts` of each block (blocks,)."""
    last_texts: list[int]
    """Number of the first of `texts` after each block (blocks,)."""
    tags: list[Tag]
    """What each distinct start tag of a container says."""
    tag_of: Ints
    """Number in `tags` of each container (containers,)."""
    parents: Ints
    """Container around each container; that of the body is 0 (containers,)."""
    ends: Ints
    """Number of the first container after each container and all containers in it (containers,)."""
    depths: Ints
    """Number of containers around each container (containers,)."""
    opened: Ints
    """Tag that starts each container (containers,)."""
    own: Ints
    """Innermost container of each block (blocks,)."""
    first_tags: Ints
    """First tag of each block, the one that starts it (blocks,)."""
    last_tags: Ints
    """The first tag after each block (blocks,)."""
    chars: Ints
    """Length of each block's text without the spaces at its ends [code points] (blocks,)."""
    link_chars: Ints
    """Those of the characters that are in links (blocks,)."""
    bold_chars: Ints
    """Those of the characters that are bold or italic (blocks,)."""
    links: Ints
    """Number of links that start in each block (blocks,)."""
    images: Ints
    """Number of images in each block (blocks,)."""
    in_link: Bools
    """True for the blocks that start in a link (blocks,)."""
    is_cut: bool
    """True if the page has more than MAX_TAGS tags, so that the rest was not read."""

    def __len__(self) -> int:
        return len(self.own)

    def source(self, block: int) -> str:
        """Return the text of a block, with LINE_BREAK for `<br>` and white space as in the page."""
        return unescape("".join(self.texts[self.first_texts[block] : self.last_texts[block]]))

    def sources(self) -> list[str]:
        """Return the texts of all blocks without white space at their ends."""
        texts = ["".join(self.texts[first:last]).strip() for first, last in zip(self.first_texts, self.last_texts)]
        return [unescape(text) if "&" in text else text for text in texts]

    def container(self, number: int) -> Tag:
        """Return what the start tag of a container says."""
        return self.tags[int(self.tag_of[number])]

    def has_markup(self, part: str) -> bool:
        """Return True if the page has this in its markup."""
        return part.encode() in self.html

    def markup(self, block: int) -> bytes:
        """Return the markup of a block after its first tag, with elements that are left out."""
        first, last = self.first_tags[block], self.last_tags[block] - 1
        return self.html[self.tag_ends[first] + 1 : self.text_ends[last]] if last > first else b""

    def tag(self, number: int) -> str:
        """Return a tag without its brackets, such as `div class="menu"`."""
        return _decoded(self.html[self.tag_starts[number] + 1 : self.tag_ends[number]])

    def text(self, number: int) -> str:
        """Return the text between a tag and the next one, in HTML with its entities."""
        return _decoded(self.html[self.tag_ends[number] + 1 : self.text_ends[number]])


def _decoded(part: bytes) -> str:
    return part.decode("utf-8", "surrogatepass")


def unescape(text: str) -> str:
    """Return a text of the parser's HTML with its few entities decoded."""
    if "&" in text:
        for entity, char in _ESCAPED:
            text = text.replace(entity, char)
    return text


def cut_blocks(html: str) -> Blocks:
    """Return the blocks of a body in well-formed HTML, as the parser writes it: `<body …>…</body>`."""
    markup = read_markup(html)
    effects, chars = markup.effects, markup.chars
    starts = np.flatnonzero(_starts_block(effects, chars))
    parents, ends, depths, opened, current = _nesting(markup, starts)
    in_link, in_bold = np.cumsum(_LINK_AND_BOLD[:, effects], axis=1) > 0
    is_image = effects == IMAGE
    size, link_chars, bold_chars, links, num_images = np.add.reduceat(
        np.stack([chars, chars * in_link, chars * in_bold, effects == OPENS_LINK, is_image]), starts, axis=1
    )
    has_text = size > 0
    lasts = np.append(starts[1:], len(effects))[has_text]
    own = current[has_text]
    starts_link = effects[starts] == OPENS_LINK
    first, last = np.searchsorted(markup.text_of, (starts[has_text], lasts)).tolist()
    return Blocks(
        markup.html,
        markup.starts,
        markup.ends,
        markup.text_ends,
        effects,
        markup.texts,
        first,
        last,
        *_containers(markup, opened, ends, own),
        parents,
        ends,
        depths,
        opened,
        own=own,
        first_tags=starts[has_text],
        last_tags=lasts,
        chars=size[has_text],
        link_chars=link_chars[has_text],
        bold_chars=bold_chars[has_text],
        links=links[has_text],
        # An image belongs to the first block with text after it, if it has none itself.
        images=np.diff(np.cumsum(num_images)[has_text], prepend=0),
        in_link=(in_link[starts] & ~starts_link)[has_text],
        is_cut=markup.is_cut,
    )


class Markup(NamedTuple):
    """The tags of a page without those that are left out; positions are those of the fields of Blocks (tags,)."""

    html: bytes
    starts: Ints
    ends: Ints
    text_ends: Ints
    effects: npt.NDArray[np.int8]
    chars: Ints
    """Length of the text after each tag without the spaces at its ends [code points]."""
    texts: list[str]
    text_of: Ints
    """Tag before each of `texts`, in ascending order."""
    is_cut: bool


def read_markup(source: str) -> Markup:
    """Return the tags of a body. Comments and the elements in _NO_TEXT are left out."""
    if native.module is None:
        return read_markup_in_python(source)
    html, starts, ends, text_ends, effects, chars, texts, text_of, is_cut = native.loaded().read_markup(
        source, (MAX_TAGS, HEAD_FACTOR), *EFFECT_TABLES
    )
    return Markup(
        html,
        starts=np.frombuffer(starts, np.int64),
        ends=np.frombuffer(ends, np.int64),
        text_ends=np.frombuffer(text_ends, np.int64),
        effects=np.frombuffer(effects, np.int8),
        chars=np.frombuffer(chars, np.int64),
        texts=texts,
        text_of=np.frombuffer(text_of, np.int64),
        is_cut=is_cut,
    )


def read_markup_in_python(source: str) -> Markup:
    """Return the same as `read_markup`, by array operations."""
    source = source.replace("&nbsp;", NO_BREAK_SPACE) if "&nbsp;" in source else source
    html = source.encode("utf-8", "surrogatepass") or b"<body>"
    points = np.frombuffer(html, np.uint8)
    starts = np.flatnonzero(points == ord("<"))
    is_cut = len(starts) > MAX_TAGS
    if is_cut:
        html, points, starts = html[: starts[MAX_TAGS]], points[: starts[MAX_TAGS]], starts[:MAX_TAGS]
    brackets = np.append(np.flatnonzero(points == ord(">")), len(points))
    ends = brackets[np.searchsorted(brackets, starts)]
    effects = effects_of(html, starts)
    quotes = np.flatnonzero(points == ord('"'))
    num_quotes = np.searchsorted(quotes, ends) - np.searchsorted(quotes, starts)
    is_comment = points[np.minimum(starts + 1, len(points) - 1)] == ord("!")
    has_bracket = np.append(starts[1:], len(points)) < ends
    special = np.flatnonzero((num_quotes & 1 > 0) | has_bracket | is_comment | (effects == LEFT_OUT))
    text_ends = np.append(starts, len(points))
    if len(special):
        is_kept = np.ones(len(starts), bool)
        done = wasted = 0
        places, limit = starts.tolist(), HEAD_FACTOR * len(html)
        for number, is_left_out in zip(special.tolist(), (effects[special] == LEFT_OUT).tolist()):
            if number >= done:
                close = int(ends[number]) if ends[number] < len(html) else -1
                head, vain = _end_of_head(html, places[number] + 1, close) if wasted <= limit else (close, 0)
                wasted += vain
                ends[number], begin, done = _corrected(places, number, html, is_left_out, head)
                is_kept[begin:done] = False
        kept = np.flatnonzero(is_kept)
        starts, ends, effects = starts[kept], ends[kept], effects[kept]
    # A page that is cut inside a tag or a comment ends with it: there is no last bracket.
    ends = np.where((ends < 0) | (ends >= len(points)), len(points) - 1, ends)
    text_ends = text_ends[np.searchsorted(text_ends[:-1], ends)]
    texts, text_of = _texts(html, ends, text_ends, effects == BREAK)
    chars = np.zeros(len(starts), np.int64)
    chars[text_of] = list(map(len, map(str.strip, texts)))
    return Markup(html, starts, ends, text_ends, effects, chars, texts, text_of, is_cut)


def _end_of_head(html: bytes, start: int, close: int) -> tuple[int, int]:
    """Return the position of the bracket that ends a tag, and the number of bytes that were read in vain.

    `close`: the position of the first bracket, which ends what is no tag; -1: there is none.
    """
    head = _HEAD.match(html, start)
    if head is None or html.startswith(b"!--", start):
        return close, 0
    end = head.end(1)
    return (end, 0) if html[end : end + 1] == b">" else (close, head.end() - start)


def _corrected(starts: list[int], number: int, html: bytes, is_left_out: bool, end: int) -> tuple[int, int, int]:
    """Return the end of a tag that is a comment, has a bracket in an attribute or starts what is left out.

    Return also the first tag that is left out with it, and the first tag after these. `end`: that of the tag, unless
    it is a comment.
    """
    start = starts[number] + 1
    if html.startswith(b"!--", start):
        close = html.find(b"-->", start)
        end = close + 2 if close >= 0 else len(html)
    elif is_left_out:
        # The end tag stays, because the text after it is text of the page.
        name = html[start:end].partition(b" ")[0]
        return end, number, bisect_left(starts, _close_of(name, html, end))
    return end, number + 1, bisect_left(starts, end)


def _texts(html: bytes, ends: Ints, text_ends: Ints, is_break: Bools) -> tuple[list[str], Ints]:
    """Return the texts after the tags that have one, with LINE_BREAK before that of a `<br>`, and these tags."""
    begins = ends + 1 - is_break
    text_of = np.flatnonzero(text_ends > begins)
    if not len(text_of):
        return [], text_of
    # The bracket of a `<br>` becomes the line break.
    points = np.frombuffer(html, np.uint8).copy()
    points[ends[is_break & (text_ends > begins)]] = ord(LINE_BREAK)
    source = points.tobytes()
    parts = [source[begin:end] for begin, end in zip(begins[text_of].tolist(), text_ends[text_of].tolist())]
    # No text has this bracket, because the next bracket is its end.
    return _decoded(b"<".join(parts)).split("<"), text_of


def _close_of(name: bytes, html: bytes, end: int) -> int:
    """Return the position of the end tag of an element whose start tag ends at `end`; the page's end without one."""
    is_open = 1
    while is_open:
        close = html.find(b"</%b>" % name, end)
        if close < 0:
            return len(html)
        is_open += (html.count(b"<%b" % name, end, close) if name not in _RAW else 0) - 1
        end = close + 1
    return close


def _starts_block(effects: npt.NDArray[np.int8], chars: Ints) -> Bools:
    """Return True for tags that start a block (tags,): containers outside `<pre>`, and the second of two `<br>`."""
    starts: Bools = (effects >= OPENS) & (effects <= RULE)
    is_pre = effects == OPENS_PRE
    in_pre = None
    if is_pre.any():
        closes_pre = effects == CLOSES_PRE
        in_pre = np.cumsum(is_pre.astype(np.int64) - closes_pre)
        starts = (starts & (in_pre == 0)) | (is_pre & (in_pre == 1)) | (closes_pre & (in_pre == 0))
    breaks = np.flatnonzero(effects == BREAK)
    if len(breaks) > 1:
        second = breaks[1:][(np.diff(breaks) == 1) & (chars[breaks[:-1]] == 0)]
        starts[second if in_pre is None else second[in_pre[second] == 0]] = True
    starts[0] = True
    return starts


def _nesting(markup: Markup, starts: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the parents, ends, depths and tags of the containers, and the innermost one after each of `starts`."""
    effect = markup.effects[starts]
    opens = (effect == OPENS) | (effect == OPENS_PRE)
    closes = (effect == CLOSES) | (effect == CLOSES_PRE)
    order = np.arange(len(starts))
    # Number of open containers after each tag; the body stays open, also if the page ends before its end.
    inner = np.maximum(np.cumsum(opens.astype(np.int64) - closes), 1)
    first = np.flatnonzero(opens)
    depths = inner[first] - 1
    # Of the containers of one depth, the last one before a tag is the one that is open at the tag.
    size = len(starts) + 1
    ranks = np.argsort(depths, kind="stable")
    keys = (depths * size + first)[ranks]

    def innermost(depth: Ints, places: Ints) -> Ints:
        found: Ints = ranks[np.searchsorted(keys, depth * size + places, side="right") - 1]
        return found

    parents = np.minimum(innermost(np.maximum(depths - 1, 0), first), np.maximum(np.arange(len(first)) - 1, 0))
    last = np.flatnonzero(closes)
    closed = np.cumsum(opens.astype(np.int64) - closes)[last]
    close_ranks = np.argsort(closed, kind="stable")
    close_keys = (closed * size + last)[close_ranks]
    place = np.searchsorted(close_keys, depths * size + first)
    ends = np.full(len(first), len(first))
    has_end = place < len(close_keys)
    has_end[has_end] = closed[close_ranks[place[has_end]]] == depths[has_end]
    ends[has_end] = np.searchsorted(first, last[close_ranks[place[has_end]]])
    opened = starts[first]
    return parents, ends, depths, opened, innermost(inner - 1, order)


def _containers(markup: Markup, opened: Ints, ends: Ints, own: Ints) -> tuple[list[Tag], Ints]:
    """Return the distinct tags of the containers, and the number of each container's tag among them.

    Of a container without text, only the name of the element is read.
    """
    blocks = np.bincount(own, minlength=len(opened) + 1).cumsum()
    has_text = blocks[ends - 1] > np.append(0, blocks)[: len(opened)]
    return read_tags(markup.html, markup.starts[opened] + 1, markup.ends[opened], has_text)
