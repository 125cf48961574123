"""A page as blocks: runs of text between the elements that start a new line, with the place of each in the markup.

The page is parsed once. The parser's tree is written as well-formed HTML, whose code points are one array: tags, texts
and nesting follow from the positions of brackets. Visiting the nodes from Python takes many times as long.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

MAX_TAGS = 200_000
"""Maximum number of tags of a page that are read; the largest of 2,367 real pages has fewer than half as many."""
MAX_BRACKETS = 200
"""Maximum number of brackets in the attributes of a tag; the attributes of another one are not read."""
LINE_BREAK = "\v"
"""What `<br>` becomes in the text of a block, in which line ends are only spaces."""

NO_BREAK_SPACE = "\xa0"

_NO_TEXT = frozenset(
    (
        *(
            "script",
            "style",
            "svg",
            "template",
            "iframe",
            "object",
            "canvas",
            "select",
            "textarea",
            "datalist",
            "audio",
        ),
        *("video", "map", "noembed", "noframes"),
    )
)
"""Elements whose text is left out."""
_RAW = frozenset(("script", "style", "iframe", "textarea", "noembed", "noframes"))
"""Those of them that contain no elements."""
_HEAD = re.compile(r'[^ >]*+(?: [^ =>]*+="[^"]*+")*+>')
"""A tag without its first bracket; the name of an attribute can contain quotes and brackets."""
_ATTRIBUTE = re.compile(r' (role|itemprop|itemscope|hidden|aria-hidden|style)(?:="([^"]*)")?')
_MARKED = re.compile(r" (?:role|itemprop|itemscope|hidden|aria-hidden|style)\b")
_NAME_WORD = re.compile(r"[A-Z][a-z]+|[a-z]{2,}|[A-Z]{2,}(?![a-z])")
_ESCAPED = (("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))

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
NAME_CHARS = 12
"""Number of code points by which the name of a tag is recognized, with the one after it: `/blockquote` has 11."""
_POWERS = np.cumprod(np.full(NAME_CHARS, 0x9E3779B97F4A7C15, np.uint64))


def _key(name: str) -> int:
    """Return the code of a name, as it is computed for the tags of a page."""
    points = np.zeros(NAME_CHARS, np.uint64)
    points[: len(name)] = [ord(char) for char in name]
    return int((points * _POWERS).sum())


_BY_KEY = sorted((_key(name), name) for name in _EFFECT_OF)
_KEYS = np.array([key for key, _ in _BY_KEY], np.uint64)
_EFFECTS = np.array([_EFFECT_OF[name] for _, name in _BY_KEY], np.int8)
_IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])


class Tag(NamedTuple):
    """What a start tag says; it is the same for every place where the same tag occurs."""

    element: int
    """Number in CONTAINERS; -1 if it is no container."""
    marks: int
    """Bits of MARKS."""
    words: tuple[str, ...]
    """Words of its class, its id and its itemprop, in lower case."""


@lru_cache(maxsize=1 << 14)
def read_tag(source: str) -> Tag:
    """Return what a start tag says, from its source without brackets, such as `div class="menu"`."""
    name = source.partition(" ")[0]
    marks = BIT.get(_MARK_OF_TAG.get(name, ""), 0)
    words = name_words(_value(source, ' class="')) + name_words(_value(source, ' id="'))
    if not _COMMENTS.isdisjoint(words):
        marks |= BIT["comments"]
    if _MARKED.search(source) is not None:
        for attribute, value in _ATTRIBUTE.findall(source):
            marks |= _marks_of(attribute, value)
            if attribute == "itemprop":
                words += (f"itemprop:{value.lower()}",)
    return Tag(_NUMBER_OF.get(name, -1), marks, words)


def _value(source: str, start: str) -> str:
    """Return the value of the attribute that starts like this, such as ` class="`; empty if there is none."""
    place = source.find(start) + len(start)
    return source[place:].partition('"')[0] if place >= len(start) else ""


@lru_cache(maxsize=1 << 15)
def name_words(value: str) -> tuple[str, ...]:
    """Return the words of a class or id, such as ("post", "body") for `postBody`, in lower case."""
    return tuple(map(str.lower, _NAME_WORD.findall(value)))


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


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of a page and the containers around them, in document order.

    Container 0 is the body. The containers in container i are numbered from i + 1 to `ends[i]` - 1.
    """

    html: str
    """The body in well-formed HTML."""
    tag_starts: Ints
    """Position of the first bracket of each tag (tags,). Tags that are left out with their text are not counted."""
    tag_ends: Ints
    """Position of the last bracket of each tag (tags,)."""
    text_ends: Ints
    """Position of the first bracket after the text that follows each tag (tags,)."""
    effects: npt.NDArray[np.int8]
    """What each tag does to the text, such as OPENS and BREAK (tags,)."""
    joined: str
    """The texts after all tags, with LINE_BREAK for each `<br>`."""
    offsets: Ints
    """Position in `joined` of the text after each tag, and at last its length (tags + 1,)."""
    containers: list[Tag]
    """What the start tag of each container says (containers,)."""
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
        return unescape(self.joined[self.offsets[self.first_tags[block]] : self.offsets[self.last_tags[block]]])

    def sources(self) -> list[str]:
        """Return the texts of all blocks without white space at their ends."""
        starts, ends = self.offsets[self.first_tags].tolist(), self.offsets[self.last_tags].tolist()
        texts = [self.joined[start:end].strip() for start, end in zip(starts, ends)]
        return [unescape(text) for text in texts] if "&" in self.joined else texts

    def container(self, number: int) -> Tag:
        """Return what the start tag of a container says."""
        return self.containers[number]

    def has_markup(self, part: str) -> bool:
        """Return whether the page has this text in its markup."""
        return part in self.html

    def markup(self, block: int) -> str:
        """Return the markup of a block after its first tag, with elements that are left out."""
        first, last = self.first_tags[block], self.last_tags[block] - 1
        return self.html[self.tag_ends[first] + 1 : self.text_ends[last]] if last > first else ""

    def tag(self, number: int) -> str:
        """Return a tag without its brackets, such as `div class="menu"`."""
        return self.html[self.tag_starts[number] + 1 : self.tag_ends[number]]

    def text(self, number: int) -> str:
        """Return the text between a tag and the next one, in HTML with its entities."""
        return self.html[self.tag_ends[number] + 1 : self.text_ends[number]]


def unescape(text: str) -> str:
    """Return a text of the parser's HTML with its few entities decoded."""
    if "&" in text:
        for entity, char in _ESCAPED:
            text = text.replace(entity, char)
    return text


def cut_blocks(html: str) -> Blocks:
    """Return the blocks of a body in well-formed HTML, as the parser writes it: `<body …>…</body>`."""
    markup = _read_tags(html)
    effects, chars = markup.effects, markup.chars
    breaks = np.flatnonzero(effects == BREAK)
    starts_block = _starts_block(effects, chars, breaks)
    starts = np.flatnonzero(starts_block)
    containers, parents, ends, depths, opened, current = _nesting(markup, starts)
    in_link = np.cumsum((effects == OPENS_LINK).astype(np.int64) - (effects == CLOSES_LINK)) > 0
    is_bold = np.cumsum((effects == OPENS_BOLD).astype(np.int64) - (effects == CLOSES_BOLD)) > 0

    def sums(values: npt.NDArray[np.generic]) -> Ints:
        return np.add.reduceat(values.astype(np.int64), starts)

    size = sums(chars)
    has_text = size > 0
    lasts = np.append(starts[1:], len(effects))
    # An image belongs to the first block with text after it, if it has none itself.
    images = np.diff(np.cumsum(sums(effects == IMAGE))[has_text], prepend=0)
    return Blocks(
        markup.html,
        markup.starts,
        markup.ends,
        markup.text_ends,
        effects,
        *_joined(markup),
        containers,
        parents,
        ends,
        depths,
        opened,
        own=current[has_text],
        first_tags=starts[has_text],
        last_tags=lasts[has_text],
        chars=size[has_text],
        link_chars=sums(chars * in_link)[has_text],
        bold_chars=sums(chars * is_bold)[has_text],
        links=sums(effects == OPENS_LINK)[has_text],
        images=images,
        in_link=(in_link & (effects != OPENS_LINK))[starts][has_text],
        is_cut=markup.is_cut,
    )


class _Markup(NamedTuple):
    """The tags of a page without those that are left out; positions are those of the fields of Blocks (tags,)."""

    html: str
    points: npt.NDArray[np.uint32]
    """The code points of the page."""
    starts: Ints
    ends: Ints
    text_ends: Ints
    effects: npt.NDArray[np.int8]
    chars: Ints
    """Length of the text after each tag without the spaces at its ends [code points]."""
    is_cut: bool


def _read_tags(html: str) -> _Markup:
    """Return the tags of a body. Comments and the elements in _NO_TEXT are left out."""
    html = html.replace("&nbsp;", NO_BREAK_SPACE) or "<body>"
    points = np.frombuffer(html.encode("utf-32-le", "surrogatepass"), np.uint32)
    starts = np.flatnonzero(points == ord("<"))
    is_cut = len(starts) > MAX_TAGS
    if is_cut:
        html, points, starts = html[: starts[MAX_TAGS]], points[: starts[MAX_TAGS]], starts[:MAX_TAGS]
    brackets = np.append(np.flatnonzero(points == ord(">")), len(points))
    ends = brackets[np.searchsorted(brackets, starts)]
    effects = _effects(points, starts)
    quotes = np.flatnonzero(points == ord('"'))
    num_quotes = np.searchsorted(quotes, ends) - np.searchsorted(quotes, starts)
    is_comment = points[np.minimum(starts + 1, len(points) - 1)] == ord("!")
    has_bracket = np.append(starts[1:], len(points)) < ends
    special = np.flatnonzero((num_quotes & 1 > 0) | has_bracket | is_comment | (effects == LEFT_OUT))
    is_left_out = np.zeros(len(starts), bool)
    done = 0
    places = starts.tolist()
    for number in special.tolist():
        if number >= done:
            ends[number], begin, done = _corrected(places, number, html, effects[number] == LEFT_OUT)
            is_left_out[begin:done] = True
    kept = np.flatnonzero(~is_left_out)
    # A page that is cut inside a tag or a comment ends with it: there is no last bracket.
    ends = np.where((ends[kept] < 0) | (ends[kept] >= len(points)), len(points) - 1, ends[kept])
    text_ends = np.append(starts, len(points))[np.searchsorted(starts, ends)]
    is_solid = points > ord(" ")
    wide = np.flatnonzero(points >= 0x85)
    is_solid[wide] = ~_IS_SPACE[np.minimum(points[wide], len(_IS_SPACE) - 1)]
    solid = np.append(np.flatnonzero(is_solid), len(points))
    first, after = np.searchsorted(solid, ends + 1), np.searchsorted(solid, text_ends)
    chars = np.where(after > first, solid[after - 1] - solid[first] + 1, 0)
    return _Markup(html, points, starts[kept], ends, text_ends, effects[kept], chars, is_cut)


def _effects(points: npt.NDArray[np.uint32], starts: Ints) -> npt.NDArray[np.int8]:
    """Return what each tag does to the text."""
    places = np.minimum(starts[:, None] + np.arange(1, NAME_CHARS + 1), len(points) - 1)
    names = points[places]
    in_name = np.logical_and.accumulate((names != ord(" ")) & (names != ord(">")), axis=1)
    keys = np.where(in_name, names, np.uint32(0)).astype(np.uint64) @ _POWERS
    rank = np.minimum(np.searchsorted(_KEYS, keys), len(_KEYS) - 1)
    is_known = _KEYS[rank] == keys
    return np.where(is_known, _EFFECTS[rank], np.int8(NOTHING))


def _corrected(starts: list[int], number: int, html: str, is_left_out: bool) -> tuple[int, int, int]:
    """Return the end of a tag that is a comment, has a bracket in an attribute or starts what is left out.

    Return also the first tag that is left out with it, and the first tag after these.
    """
    start = starts[number] + 1
    if html.startswith("!--", start):
        close = html.find("-->", start)
        end = close + 2 if close >= 0 else len(html)
    else:
        found = _HEAD.match(html, start)
        end = found.end() - 1 if found is not None else html.find(">", start)
        if is_left_out:
            # The end tag stays, because the text after it is text of the page.
            name = html[start:end].partition(" ")[0]
            return end, number, bisect_left(starts, _close_of(name, html, end))
    return end, number + 1, bisect_left(starts, end)


def _close_of(name: str, html: str, end: int) -> int:
    """Return the position of the end tag of an element whose start tag ends at `end`; the page's end without one."""
    is_open = 1
    while is_open:
        close = html.find(f"</{name}>", end)
        if close < 0:
            return len(html)
        is_open += (html.count(f"<{name}", end, close) if name not in _RAW else 0) - 1
        end = close + 1
    return close


def _joined(markup: _Markup) -> tuple[str, Ints]:
    """Return the texts after all tags, joined, with a LINE_BREAK for each `<br>`, and their positions (tags + 1,)."""
    size = len(markup.points)
    has_text = markup.text_ends > markup.ends + 1
    steps = np.zeros(size + 2, np.int8)
    steps[markup.ends[has_text] + 1] = 1
    steps[markup.text_ends[has_text]] = -1
    is_text = np.cumsum(steps, dtype=np.int8)[:size].astype(bool)
    is_break = markup.effects == BREAK
    breaks = markup.ends[is_break]
    points = markup.points.copy()
    points[breaks], is_text[breaks] = ord(LINE_BREAK), True
    lengths = np.maximum(markup.text_ends - markup.ends - 1, 0) + is_break
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return points[is_text].tobytes().decode("utf-32-le", "surrogatepass"), offsets


def _starts_block(effects: npt.NDArray[np.int8], chars: Ints, breaks: Ints) -> Bools:
    """Return True for tags that start a block (tags,): containers outside `<pre>`, and the second of two `<br>`."""
    in_pre = np.cumsum((effects == OPENS_PRE).astype(np.int64) - (effects == CLOSES_PRE))
    starts: Bools = (effects >= OPENS) & (effects <= RULE) & (in_pre == 0)
    starts |= (effects == OPENS_PRE) & (in_pre == 1)
    starts |= (effects == CLOSES_PRE) & (in_pre == 0)
    starts[breaks[1:][(np.diff(breaks) == 1) & (chars[breaks[:-1]] == 0) & (in_pre[breaks[1:]] == 0)]] = True
    starts[0] = True
    return starts


def _nesting(markup: _Markup, starts: Ints) -> tuple[list[Tag], Ints, Ints, Ints, Ints, Ints]:
    """Return the containers, their parents, ends, depths and tags, and the innermost one after each tag of `starts`."""
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
    begins, closes_tag = (markup.starts[opened] + 1).tolist(), markup.ends[opened].tolist()
    containers = [read_tag(markup.html[begin:end]) for begin, end in zip(begins, closes_tag)]
    return containers, parents, ends, depths, opened, innermost(inner - 1, order)
