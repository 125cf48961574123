"""What makes a parser slow or large is taken out of a page before it is parsed; main text is not among it.

The limits are on amounts of work, so they are the same on every machine, and real pages are far from them. Limits by
which a page is dropped are in `pipeline.extract.extract`.
"""

import re
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

_OPTION = re.compile(r"<opt(?:ion|group)\b[^<>]*+>?", re.IGNORECASE)
_VALUE = r"""(?:\s*+=\s*+(?:"[^"]*+"|'[^']*+'|(?!["'])[^\s>]*+))?+"""
_ATTRIBUTE = re.compile(rf"[^\s/>][^\s/>=]*+{_VALUE}")
_PLAIN_TAG = r"""(?![hH]tml|[bB]ody)[a-zA-Z][a-z0-9]*+(?: [a-z-]++="[^"]*+"){0,50}+ ?/?>"""
"""A tag with few attributes, written as most are: these are passed over, which takes a third of the time off."""
_TAG = re.compile(rf"<(?!{_PLAIN_TAG})[a-zA-Z][^\s/>]*+(?:[\s/]++|[^\s/>][^\s/>=]*+{_VALUE})*+")
_NAME = re.compile(r"<[^\s/>]*+")
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
    """Return a page within MAX_ATTRIBUTE_PAIRS. Tags are read as in the HTML Standard, 13.2.5, also in scripts."""
    if len(page) <= SAFE_CHARS:
        return page
    long, *of_roots = attribute_work(page)
    roots = dict(zip(_ROOTS, of_roots, strict=True))
    cuts_long = long > MAX_ATTRIBUTE_PAIRS
    cut_roots = {root for root, count in roots.items() if count**2 > MAX_ATTRIBUTE_PAIRS}
    if not cuts_long and not cut_roots:
        return page

    def cut(match: re.Match[str]) -> str:
        tag = match[0]
        is_cut = (cuts_long and len(tag) > LONG_TAG) or tag[:5].lower() in cut_roots
        return _NAME.findall(tag)[0] if is_cut else tag

    return _TAG.sub(cut, page)


def attribute_work(page: str) -> tuple[int, int, int]:
    """Return the sum over long tags of the square of their number of attributes.

    Return also the number of attributes of the `html` tags and of the `body` tags.
    """
    if native.module is None:
        return attribute_work_in_python(page)
    work: tuple[int, int, int] = native.loaded().count_attributes(page, LONG_TAG)
    return work


def attribute_work_in_python(page: str) -> tuple[int, int, int]:
    """Return the same as `attribute_work`."""
    long, roots = 0, dict.fromkeys(_ROOTS, 0)
    for tag in _TAG.findall(page):
        if len(tag) > LONG_TAG:
            long += _num_attributes(tag) ** 2
        if (root := tag[:5].lower()) in roots:
            roots[root] += _num_attributes(tag)
    return long, roots["<html"], roots["<body"]


def _num_attributes(tag: str) -> int:
    return len(_ATTRIBUTE.findall(tag, _NAME.match(tag).end()))  # type: ignore[union-attr]


def first_tags(page: str) -> str:
    """Return a page up to the bracket after MAX_TAGS, of which each can start a tag."""
    if page.count("<") <= MAX_TAGS:
        return page
    last = next(islice(re.finditer("<", page), MAX_TAGS, None))
    return page[: last.start()]
