"""A page of the demo crawl before it is HTML: its text in blocks, and what was planted in it.

Also the exact similarity that near copies are labelled with: Jaccard over sets of 5-word shingles of the main text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SHINGLE_WORDS = 5
WORD = re.compile(r"\w+")

Expected = Literal["keep", "drop", "either"]
Blocks = tuple[tuple[str, str], ...]
"""(element, text) of each block: `p`, `h2` or `pre`; a newline inside a `p` is a line break."""


@dataclass(frozen=True)
class Page:
    """One page: where it lives, what it says, how it is encoded, and its label."""

    url: str
    title: str
    blocks: Blocks
    layout: str
    """Name of a layout in `layout.LAYOUTS`."""
    kind: str = "page"
    """What was planted; `page` is an ordinary page."""
    rules: tuple[str, ...] = ()
    """Names of the rules that may drop it, the intended one first."""
    expected: Expected = "keep"
    """What should become of it; of an original and its copies any one may be the page that is kept."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the truth file says besides."""
    language: str = "en"
    charset: str = "utf-8"
    """Encoding of the bytes."""
    http_charset: str | None = "utf-8"
    """Encoding that the Content-Type header names; None names none."""
    meta_charset: str | None = "utf-8"
    """Encoding that the page's own meta element names; None leaves the element out."""
    encoding: str = "identity"
    """Content and transfer encoding of the body, one of `write.ENCODINGS`."""
    extras: bool = False
    """Whether the layout may add tables, code and comments of its own to the main part."""
    rendered_as: str | None = None
    """URL of the page whose bytes this one repeats; None for a page of its own."""
    menu: tuple[str, ...] = ("Home", "Guides", "Reference", "About", "Contact")
    """Labels of the navigation, in the page's language."""

    def dropped_by(self, *rules: str) -> "Page":
        """The page, to be dropped by one of these rules, the first one intended."""
        return replace(self, rules=rules, expected="drop")

    @property
    def main_text(self) -> str:
        """What a perfect extractor returns: title and blocks, separated by blank lines."""
        return "\n\n".join(
            [self.title, *(text for _, text in self.blocks)] if self.title else [t for _, t in self.blocks]
        )


def prose(paragraphs: list[str]) -> Blocks:
    """Blocks of plain paragraphs."""
    return tuple(("p", paragraph) for paragraph in paragraphs)


def shingles(text: str) -> set[tuple[str, ...]]:
    r"""The set of 5 consecutive words of a text, words being lower-cased runs of `\w`."""
    words = WORD.findall(text.lower())
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}


def jaccard(a: str, b: str) -> float:
    """The Jaccard similarity in [0, 1] of two texts' shingle sets; 1 when both are empty."""
    first, second = shingles(a), shingles(b)
    return len(first & second) / len(first | second) if first or second else 1.0
