"""What makes a parser slow or large is taken out of a page before it is parsed; main text is not among it.

The limits are on amounts of work, so they are the same on every machine, and real pages are far from them. Limits by
which a page is dropped are in `pipeline.extract.extract`.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from pipeline.extract import native
from pipeline.extract.blocks import MAX_TAGS

MAX_OPTIONS = 5_000
"""Maximum number of options of menus on a page; the tags of more are removed. resiliparse 2.0.1 takes time quadratic in
the options of one menu: 0.1 s for 4,000, 0.3 s for 8,000, more than 40 s for 100,000."""
MAX_ATTRIBUTE_PAIRS = 200_000_000
"""Maximum sum over all tags of the square of their number of attributes; beyond it, tags with many lose them.
resiliparse 2.0.1 compares each attribute with those before it: 1.1 s for 20,000 in one tag, 6.4 s for 40,000. The
`html` tags of a page count as one tag, and so do its `body` tags, because a parser gives their attributes to the first.
"""
SAFE_CHARS = 28_000
"""Length up to which no page exceeds MAX_ATTRIBUTE_PAIRS [code points]: an attribute has two with its separator."""
LONG_TAG = 400
"""Length of a tag from which its attributes are counted [code points]. With 16 MiB of tags that are as long, the parser
takes 2 s."""

READ_FACTOR = 32
"""Characters of tags that are read, as a multiple of the page; tags inside each other's attributes are read again."""
TOO_MUCH = (1 << 63) - 1
"""The work of a page whose tags have more characters than that."""
MAX_CUTS = 3
"""Number of times that tags lose their attributes, of which each may join the parts of others."""

_OPTION = re.compile(r"<opt(?:ion|group)\b[^<>]*+>?", re.IGNORECASE)
_SPACE = r"\t\n\f\r "
"""The white space of HTML; a no-break space is part of a name or a value."""
_VALUE = rf"""(?:[{_SPACE}]*+=[{_SPACE}]*+(?:"[^"]*+"|'[^']*+'|(?!["'])[^{_SPACE}>]*+))?+"""
_ATTRIBUTE = re.compile(rf"[^{_SPACE}/>][^{_SPACE}/>=]*+{_VALUE}")
_PLAIN_TAG = r"""(?![hH]tml|[bB]ody)[a-zA-Z][a-z0-9]*+(?: [a-z-]++="[^"]*+"){0,50}+ ?/?>"""
"""A tag with few attributes, written as most are: these are passed over, which takes a third of the time off."""
_TAG = re.compile(rf"<(?!{_PLAIN_TAG})[a-zA-Z][^{_SPACE}/>]*+(?:[{_SPACE}/]++|[^{_SPACE}/>][^{_SPACE}/>=]*+{_VALUE})*+")
_NAME = re.compile(rf"<[^{_SPACE}/>]*+")
_ROOTS = ("<html", "<body")


class BearablePage(NamedTuple):
    """A decoded page without what a parser cannot bear."""

    html: str
    limits: tuple[str, ...]
    """The limits that the page exceeded, `options` and `attributes`; empty = nothing was taken out."""


TAGS = "tags"
"""The limit of a page of which only the first MAX_TAGS tags are read."""


def bearable(page: str) -> BearablePage:
    """Return a decoded page without too many options and too many attributes of a tag."""
    few_options = _with_few_options(page)
    html = _with_few_attributes(few_options)
    changed = {"options": few_options is not page, "attributes": html is not few_options}
    return BearablePage(html, tuple(name for name, is_changed in changed.items() if is_changed))


def _with_few_options(page: str) -> str:
    if page.count("<") <= MAX_OPTIONS or len(_OPTION.findall(page)) <= MAX_OPTIONS:
        return page
    return _OPTION.sub(" ", page)


def _with_few_attributes(page: str) -> str:
    """Return a page within MAX_ATTRIBUTE_PAIRS. Tags are read as in the HTML Standard, 13.2.5.

    Whether a bracket begins a tag depends on the parser's state, so each one that could is read: also in scripts and
    comments, and inside the attributes of another tag.
    """
    for _ in range(MAX_CUTS):
        if len(page) <= SAFE_CHARS:
            return page
        long, *of_roots = attribute_work(page)
        cut_roots = {root for root, count in zip(_ROOTS, of_roots, strict=True) if count**2 > MAX_ATTRIBUTE_PAIRS}
        if long <= MAX_ATTRIBUTE_PAIRS and not cut_roots:
            return page
        page = _without_attributes(page, long > MAX_ATTRIBUTE_PAIRS, cut_roots)
    return page[:SAFE_CHARS]


def _without_attributes(page: str, cuts_long: bool, cut_roots: Collection[str]) -> str:
    """Return a page without the attributes of the long tags, or of the tags of some roots."""
    parts: list[str] = []
    done = place = 0
    while (match := _TAG.search(page, place)) is not None:
        start, end = match.span()
        place = start + 1
        if (cuts_long and end - start > LONG_TAG) or page[start : start + 5].lower() in cut_roots:
            parts.append(page[done : _end_of_name(page, start)])
            done = place = end
    return "".join([*parts, page[done:]])


def _end_of_name(page: str, start: int) -> int:
    return _NAME.match(page, start).end()  # type: ignore[union-attr]


def attribute_work(page: str) -> tuple[int, int, int]:
    """Return the largest sum, over long tags of which none is in another, of the square of their attributes' number.

    Return also the number of attributes of the `html` tags and of the `body` tags.
    """
    if native.module is None:
        return attribute_work_in_python(page)
    work: tuple[int, int, int] = native.loaded().count_attributes(page, LONG_TAG, READ_FACTOR)
    return work


def attribute_work_in_python(page: str) -> tuple[int, int, int]:
    """Return the same as `attribute_work`."""
    long: list[tuple[int, int, int]] = []
    roots, size, place = dict.fromkeys(_ROOTS, 0), 0, 0
    while (match := _TAG.search(page, place)) is not None:
        start, end = match.span()
        place, size = start + 1, size + end - start
        if size > READ_FACTOR * len(page):
            return TOO_MUCH, roots["<html"], roots["<body"]
        root = page[start : min(end, start + 5)].lower()
        if end - start > LONG_TAG or root in roots:
            number = len(_ATTRIBUTE.findall(page, _end_of_name(page, start), end))
            if end - start > LONG_TAG:
                long.append((start, end, number**2))
            if root in roots:
                roots[root] += number
    return _most_work(long), roots["<html"], roots["<body"]


def _most_work(tags: Sequence[tuple[int, int, int]]) -> int:
    """Return the largest sum over tags that share no character. `tags`: (start, end, work), by start."""
    starts, most = [start for start, _, _ in tags], [0] * (len(tags) + 1)
    for at in reversed(range(len(tags))):
        _, end, work = tags[at]
        most[at] = max(most[at + 1], work + most[bisect_left(starts, end, at)])
    return most[0]


def first_tags(page: str) -> str:
    """Return a page up to the bracket after MAX_TAGS, of which each can start a tag."""
    if page.count("<") <= MAX_TAGS:
        return page
    last = next(islice(re.finditer("<", page), MAX_TAGS, None))
    return page[: last.start()]
