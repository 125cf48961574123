"""Features of a page's blocks: what text, markup, position, neighbors and the whole page say about each block.

All features are arrays over the blocks, stacked in the order of their names. Text is measured on the code points of the
whole page at once; what belongs to containers is measured once for each and then looked up for the blocks.
"""

import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.extract import native
from pipeline.extract.blocks import Blocks, Bools, Floats, Ints
from pipeline.extract.tags import BIT, CONTAINERS

NUM_PIECES = 40
"""Number of first words of a block that are looked up."""
LONG_WORDS = 15
"""Number of words from which a block is long, if less than half of it is in links."""
CACHED_PIECES = 1 << 17
_ABSENT = -49.0
"""The code of a word without log odds."""
_MARKS_AFTER = ",.:?!"
"""Marks that may follow a word of the title in a text."""

WORD, COMMA, IDEOGRAPH, SEPARATOR, CLOSING = (1 << bit for bit in range(5))
_COMMAS = ",，、،;；"
_SEPARATORS = "|›»•·/→"
_CLOSING = '.。!！?？…؟।:：;؛"”’»)）」』'
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")
_STRIPPED = ".,:;!?()[]{}\"'“”‘’«»…–—-|·•©→›<>*#/\\、。，：；！？（）【】「」『』《》"

KINDS = ("p", "li", "h1", "h2", "pre", "figcaption", "button", "div", "section")
"""Elements of a block that are features."""
_KIND_OF = {
    **{name: name for name in KINDS},
    **{"caption": "figcaption", "label": "button", "legend": "button", "article": "section", "main": "section"},
}
_KINDS = np.array([KINDS.index(_KIND_OF[name]) if name in _KIND_OF else -1 for name in CONTAINERS])
_LEVELS = np.array([int(name[1]) if name[0] == "h" and name[1:].isdigit() else 0 for name in CONTAINERS])
_PARAGRAPH, _ITEM, _ARTICLE = (CONTAINERS.index(name) for name in ("p", "li", "article"))
_CELLS = (CONTAINERS.index("td"), CONTAINERS.index("th"))
MARKED = (
    *("main", "footer", "figure", "form", "article", "scope", "aside", "section", "dialog", "blockquote", "list"),
    *("hidden", "noscript", "pre", "comments"),
)
"""Marks around a block that are features."""
_BITS = np.array([BIT[mark] for mark in MARKED])[:, None]

TYPES = (
    *("Offer", "Service", "NewsArticle", "Comment", "Person", "SoftwareApplication", "ItemList", "CollectionPage"),
    *("DiscussionForumPosting", "VideoObject", "FAQPage", "Product", "WebPage"),
)
"""Types of schema.org that are features of a page."""
OPEN_GRAPH = ("article", "product", "website")
"""First parts of `og:type` that are features of a page."""

_PATH_FACTOR, _CLASS_FACTOR = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
"""Odd factors of the hashes of paths and classes, which are computed modulo 2^64."""

Group = tuple[tuple[str, ...], npt.NDArray[np.generic]]
"""Names of features and their values for the blocks, (features, blocks)."""


@dataclass(frozen=True)
class PageFacts:
    """What a page says about itself outside its body."""

    title: str = ""
    types: Collection[str] = ()
    """Types of schema.org that the page declares."""
    open_graph: str = ""
    """The value of `og:type` in lower case."""


@dataclass(frozen=True, eq=False)
class WordOdds:
    """Words of short texts and of classes, with the log odds that a block with the word is main text."""

    text: Mapping[str, float]
    """Normalized word of a text → log odds against those of all blocks, 0 = no evidence."""
    markup: Mapping[str, float]
    """Word of a class, id or itemprop → log odds, as above."""
    stop_words: frozenset[str]
    """Stop words of all languages, in lower case."""
    _codes: "_PieceCodes" = field(init=False, repr=False)
    _scores: dict[tuple[str, ...], float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codes", _PieceCodes(self))

    def score(self, words: tuple[str, ...]) -> float:
        """Return the log odds of the word of a class with the strongest evidence, 0 without evidence."""
        score = self._scores.get(words)
        if score is None:
            if len(self._scores) > CACHED_PIECES:
                self._scores.clear()
            known = [self.markup[word] for word in words if word in self.markup]
            score = self._scores[words] = max(known, key=abs) if known else 0.0
        return score

    @cached_property
    def native(self) -> object:
        """The words as the native code looks them up."""
        words = dict.fromkeys((*self.text, *self.stop_words))
        return native.loaded().lexicon({word: self.code(word) for word in words}, _STRIPPED)

    def code(self, word: str) -> float:
        """Return the log odds of a normalized word, or _ABSENT if it has none; 100 more for a stop word."""
        return self.text.get(word, _ABSENT) + (100.0 if word in self.stop_words else 0.0)

    def look_up(self, sources: Sequence[str], title: Collection[str]) -> "FirstWords":
        """Return what the first words of each text say; `title` are forms of the words of the page's title."""
        if native.module is None:
            return self.look_up_in_python(sources, title)
        counts, codes, in_title = native.loaded().look_up(self.native, list(sources), set(title), NUM_PIECES, _ABSENT)
        return _first_words(
            np.frombuffer(counts, np.int64), np.frombuffer(codes, np.float32), np.frombuffer(in_title, np.bool_)
        )

    def look_up_in_python(self, sources: Sequence[str], title: Collection[str]) -> "FirstWords":
        """Return the same as `look_up`."""
        pieces = list(map(words_of_block, sources))
        flat = list(chain.from_iterable(pieces))
        forms = {form + mark for form in title for mark in ("", *_MARKS_AFTER) if len(form) > 2}
        if len(self._codes) > CACHED_PIECES:
            self._codes.clear()
        return _first_words(
            np.fromiter(map(len, pieces), np.int64, len(pieces)),
            np.fromiter(map(self._codes.__getitem__, flat), np.float32, len(flat)),
            np.fromiter(map(forms.__contains__, flat), np.bool_, len(flat)),
        )


class FirstWords(NamedTuple):
    """What the first words of texts say, word after word (words,)."""

    counts: Ints
    """Number of words of each text (texts,)."""
    odds: Floats
    """Log odds, 0 for words without."""
    known: Bools
    """True for words that have log odds."""
    is_stop: Bools
    """True for stop words."""
    in_title: Bools
    """True for words of the title."""


def _first_words(counts: Ints, codes: Floats, in_title: Bools) -> FirstWords:
    is_stop = codes >= 50
    odds = np.where(is_stop, codes - 100, codes)
    known = odds > -40
    return FirstWords(counts, np.where(known, odds, 0), known, is_stop, in_title)


class _PieceCodes(dict[str, float]):
    """Cache: piece of text → `WordOdds.code` of its word."""

    def __init__(self, lexicon: WordOdds):
        self.lexicon = lexicon

    def __missing__(self, piece: str) -> float:
        word = normal_word(piece)
        code = self[piece] = self.lexicon.code(word)
        return code


_ZEROS = dict.fromkeys(map(ord, "123456789"), "0")


def normal_word(piece: str) -> str:
    """Return a piece of text in lower case, without punctuation at its ends and with 0 for every digit."""
    word = piece.strip(_STRIPPED).lower() or piece
    return word if word.isalpha() else word.translate(_ZEROS)


def words_of_block(source: str) -> list[str]:
    """Return the first NUM_PIECES pieces between white space of a block's text."""
    return source.split(None, NUM_PIECES)[:NUM_PIECES]


@cache
def _classes() -> npt.NDArray[np.uint8]:
    """Return the class bits of each code point of the Basic Multilingual Plane (65536,)."""
    table = np.zeros(1 << 16, np.uint8)
    for code in range(1 << 16):
        category = unicodedata.category(chr(code))
        if category[0] in "LN" or category in ("Mn", "Mc"):
            table[code] = WORD
            if category == "Lo" and unicodedata.name(chr(code), "").startswith(_UNSPACED):
                table[code] |= IDEOGRAPH
    for characters, bit in ((_COMMAS, COMMA), (_SEPARATORS, SEPARATOR), (_CLOSING, CLOSING)):
        table[list(map(ord, characters))] |= bit
    return table


class Text:
    """The texts of a page's blocks, and counts of their characters and words (blocks,)."""

    def __init__(self, sources: Sequence[str]):
        self.sources = sources
        count = count_characters_in_python if native.module is None else _count_characters
        (self.chars, self.ideographs, self.words, self.commas, self.separators), self.is_closed = count(sources)
        self.words = self.words + self.ideographs


def _count_characters(sources: Sequence[str]) -> tuple[Floats, Bools]:
    """Return the counts of characters, ideographs, words, commas and separators of texts, (5, texts).

    Ideographs are no words here. Return also whether each text ends as a sentence does (texts,).
    """
    counts, is_closed = native.loaded().count_characters(list(sources), _classes())
    return np.frombuffer(counts, np.float32).reshape(5, -1), np.frombuffer(is_closed, np.bool_)


def count_characters_in_python(sources: Sequence[str]) -> tuple[Floats, Bools]:
    """Return the same as `_count_characters`."""
    points = np.frombuffer("\n".join(sources).encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _classes()[np.minimum(points, 0xFFFF)]
    lengths = np.fromiter(map(len, sources), np.int64, len(sources))
    starts = np.cumsum(lengths + 1) - lengths - 1
    is_spaced = (kinds & (WORD | IDEOGRAPH)) == WORD
    begins = is_spaced.copy()
    begins[1:] &= ~is_spaced[:-1]
    marks = ((kinds & bit) > 0 for bit in (COMMA, SEPARATOR))
    each = ((kinds & IDEOGRAPH) > 0, begins, *marks)
    counts = [np.add.reduceat(is_one, starts, dtype=np.float32) for is_one in each]
    return np.stack([np.maximum(lengths, 1).astype(np.float32), *counts]), (kinds[starts + lengths - 1] & CLOSING) > 0


class PageBlocks:
    """The blocks of a page in their containers, with sums over all blocks in each container."""

    def __init__(self, blocks: Blocks, words: Floats, lexicon: "WordOdds"):
        self.blocks, self.words = blocks, words
        self.link = (blocks.link_chars / np.maximum(blocks.chars, 1)).astype(np.float32)
        self.own = blocks.own
        self.up = [self.own]
        for _ in range(3):
            self.up.append(blocks.parents[self.up[-1]])
        self.elements = np.array([tag.element for tag in blocks.tags])[blocks.tag_of]
        self.element = self.elements[self.own]
        self.levels = _LEVELS[self.element]
        self.long = np.where((words >= LONG_WORDS) & (self.link < 0.5), words, np.float32(0))
        # A block after a container has a smaller container than those before it, so the blocks are sorted once.
        self._order = np.argsort(self.own, kind="stable")
        firsts = np.searchsorted(self.own[self._order], np.arange(len(self.elements) + 1))
        self._begins, self._ends = firsts[:-1], firsts[blocks.ends]
        self.num_blocks = self._ends - self._begins
        is_paragraph = self.element == _PARAGRAPH
        self.words_in, self.links_in, self.long_in, self.paragraphs_in = self.inside(
            np.stack([words, words * self.link, self.long, is_paragraph])
        )
        self.total, self.total_long = max(float(self.words_in[0]), 1.0), max(float(self.long_in[0]), 1.0)
        self.top = self._top()
        self.classes = np.array([lexicon.score(tag.words) for tag in blocks.tags], np.float32)[blocks.tag_of]
        self._inherit()

    def _inherit(self) -> None:
        """Set what each container has from those around it: marks, log odds of their classes, and the path to it.

        After round i, a value covers the container and the 2^i - 1 containers around it.
        """
        tags, tag_of = self.blocks.tags, self.blocks.tag_of
        size = len(tag_of)
        around = np.append(self.blocks.parents, size)
        around[0] = size  # A container of no effect, around the body.
        self.marks = np.append(np.array([tag.marks for tag in tags])[tag_of], 0)
        odds = np.append(self.classes, np.float32(0))
        self.lowest, self.highest, self.decayed = np.minimum(odds, 0), np.maximum(odds, 0), odds.copy()
        classes = np.array([hash(tag.words[:3]) for tag in tags])[tag_of]
        self.paths = np.append(self.elements + 1, 0)
        rate, factor = np.float32(0.8), np.array([_PATH_FACTOR])
        while (around[:size] < size).any():
            self.marks |= self.marks[around]
            self.lowest = np.minimum(self.lowest, self.lowest[around])
            self.highest = np.maximum(self.highest, self.highest[around])
            self.decayed += rate * self.decayed[around]
            self.paths += factor * self.paths[around]
            around, rate, factor = around[around], rate * rate, factor * factor
        self.marks, self.paths = self.marks[:size], self.paths[:size] + classes * np.array([_CLASS_FACTOR])
        self.lowest, self.highest, self.decayed = self.lowest[:size], self.highest[:size], self.decayed[:size]

    def inside(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        """Return the sums of values of blocks, (…, blocks), over all blocks in each container, (…, containers)."""
        sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
        np.cumsum(values[..., self._order], axis=-1, out=sums[..., 1:])
        inside: npt.NDArray[np.float64] = sums[..., self._ends] - sums[..., self._begins]
        return inside

    def _top(self) -> int:
        """Return the innermost container with at least 60 % of the words of long blocks."""
        if not self.long_in[0]:
            return 0
        around = np.flatnonzero(self.long_in >= 0.6 * self.long_in[0])
        return int(around[np.argmax(self.blocks.depths[around])])


def measure_blocks(page: PageBlocks, text: Text, facts: PageFacts, lexicon: WordOdds) -> list[Group]:
    """Return the features of each block of the first pass."""
    words_of_text, lexical = _lexical(text, facts, lexicon)
    classes, markup = _markup(page, lexicon)
    repeats = _repeats(text.sources)
    neighbors = np.stack([words_of_text, classes, page.levels, page.link, page.words, text.is_closed])
    is_title = lexical[1][-1]
    return [
        _text(page, text),
        lexical,
        markup,
        *_containers(page),
        (("repeats",), repeats[None]),
        _positions(page, is_title, words_of_text, classes),
        *_neighbors(page, neighbors),
        (tuple(f"kind_{kind}" for kind in KINDS), _KINDS[page.element] == np.arange(len(KINDS))[:, None]),
        _whole_page(page, text, repeats, facts),
    ]


def stacked(groups: Sequence[Group]) -> Floats:
    """Return the features as one matrix, (features, blocks)."""
    return np.concatenate([values for _, values in groups], dtype=np.float32, casting="unsafe")


def names_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return the names of the features in the order of the matrix."""
    return tuple(chain.from_iterable(names for names, _ in groups))


def _text(page: PageBlocks, text: Text) -> Group:
    blocks, words = page.blocks, np.maximum(text.words, 1)
    columns = {
        "words": text.words,
        "chars": text.chars,
        "link_share": page.link,
        "bold_share": blocks.bold_chars / np.maximum(blocks.chars, 1),
        "links": blocks.links,
        "in_link": blocks.in_link,
        "commas": text.commas / words,
        "word_chars": text.chars / words,
        "separators": text.separators,
        "images": blocks.images,
    }
    return tuple(columns), np.stack(list(columns.values()))


def _lexical(text: Text, facts: PageFacts, lexicon: WordOdds) -> tuple[Floats, Group]:
    """Return the mean log odds of each block's words, and the features of its words."""
    title, forms = _title_words(facts.title)
    counts, odds, known, is_stop, in_title = lexicon.look_up(text.sources, forms)
    starts = np.cumsum(counts) - counts
    total, num_known, num_stop, num_title = np.add.reduceat(
        np.stack([odds, known, is_stop, in_title]), starts, axis=1, dtype=np.float32
    )
    mean = total / np.maximum(num_known, 1)
    columns = {
        "lexicon_mean": mean,
        "lexicon_min": np.minimum(np.minimum.reduceat(odds, starts), 0),
        "lexicon_share": num_known / counts,
        "stop_words": num_stop / counts,
        "title_share": num_title / counts,
        "title_cover": num_title / max(1, len(title)),
    }
    return mean, (tuple(columns), np.stack(list(columns.values())))


def _title_words(title: str) -> tuple[set[str], set[str]]:
    """Return the distinct words of a title with more than two characters, and forms of its words."""
    words = {word for piece in title.split()[:NUM_PIECES] if len(word := piece.strip(_STRIPPED).lower()) > 2}
    return words, {form for word in words for form in (word, word.capitalize(), word.upper())} | set(title.split())


def _markup(page: PageBlocks, lexicon: WordOdds) -> tuple[Floats, Group]:
    """Return the log odds of the class of each block's container, and the features of the containers around it."""
    own = page.own
    _, up_1, up_2, up_3 = page.up
    measured = np.stack([page.classes, page.lowest, page.highest, page.decayed, page.blocks.depths])
    values = np.concatenate([measured[:, own], page.classes[np.stack([up_1, up_2, up_3])]])
    names = ("class_own", "class_lowest", "class_highest", "class_decayed", "depth", "class_1", "class_2", "class_3")
    is_marked = (page.marks[own] & _BITS) > 0
    group = ((*names, *(f"mark_{mark}" for mark in MARKED)), np.concatenate([values, is_marked]))
    return values[0], group


def _containers(page: PageBlocks) -> list[Group]:
    """Return what the containers around each block hold, and where the block is relative to the top container."""
    words = np.maximum(page.words_in, 1)
    measured = np.stack(
        [
            page.words_in / page.total,
            page.links_in / words,
            page.words_in / np.maximum(page.num_blocks, 1),
            page.long_in / page.total_long,
            np.log1p(page.num_blocks),
            page.paragraphs_in,
        ]
    )
    names = ("words", "link_share", "block_words", "long", "blocks", "paragraphs")
    around = [
        (tuple(f"{name}_{steps}" for name in names), measured[:, containers])
        for steps, containers in enumerate(page.up)
    ]
    return [*around, _top_columns(page), _clusters(page)]


def _top_columns(page: PageBlocks) -> Group:
    blocks, top, own = page.blocks, page.top, page.own
    numbers = np.arange(top + 1)
    holders = numbers[blocks.ends[: top + 1] > top]
    # The containers around the top one are nested, so a binary search finds the innermost that also holds a block.
    depth = np.minimum(
        np.searchsorted(holders, own, side="right"),
        len(holders) - np.searchsorted(blocks.ends[holders][::-1], own, "right"),
    )
    return ("in_top", "top_distance", "top_depth"), np.stack(
        [
            (own >= top) & (own < blocks.ends[top]),
            blocks.depths[own] - depth + 1,
            blocks.depths[own] - blocks.depths[top],
        ]
    )


def _clusters(page: PageBlocks) -> Group:
    """Return sums over the blocks with the same path of elements and the same class."""
    _, cluster = np.unique(page.paths[page.own], return_inverse=True)
    size, words, long = (np.bincount(cluster, weights) for weights in (None, page.words, page.long))
    measured = np.stack([np.log1p(size), words / page.total, words / size, long / page.total_long])
    return ("cluster_size", "cluster_words", "cluster_mean", "cluster_long"), measured[:, cluster]


def _repeats(sources: Sequence[str]) -> Floats:
    counts = Counter(sources)
    return np.fromiter(map(counts.__getitem__, sources), np.float32, len(sources))


def _positions(page: PageBlocks, title_cover: Floats, lexicon: Floats, classes: Floats) -> Group:
    size = len(page.words)
    number = np.arange(size)
    before = np.cumsum(page.words) - page.words
    long_until = np.cumsum(page.long)
    first = np.flatnonzero(page.levels == 1)
    title = int(np.argmax(title_cover)) if title_cover.max() > 0.5 else None
    heading = np.maximum.accumulate(np.where(page.levels > 0, number, -1))
    after = heading >= 0
    columns = {
        "words_before": before / page.total,
        "long_before": (long_until - page.long) / page.total_long,
        "long_until": long_until / page.total_long,
        "from_start": number,
        "to_end": size - number,
        "from_heading_1": number - first[0] if len(first) else np.full(size, -999),
        "from_title": number - title if title is not None else np.full(size, -999),
        "heading_level": np.where(after, page.levels[heading], 0),
        "from_heading": np.where(after, number - heading, 99),
        "heading_lexicon": np.where(after, lexicon[heading], 0),
        "heading_class": np.where(after, classes[heading], 0),
        "long": page.long,
    }
    return tuple(columns), np.stack(list(columns.values()))


def _shifted(values: npt.NDArray[np.generic], by: int) -> npt.NDArray[np.generic]:
    """Return the values of the block `by` places before each block, or of the one -`by` places after it, or 0.

    The last axis of `values` is the blocks.
    """
    shifted = np.zeros_like(values)
    if by > 0:
        shifted[..., by:] = values[..., :-by]
    else:
        shifted[..., :by] = values[..., -by:]
    return shifted


def _neighbors(page: PageBlocks, values: npt.NDArray[np.generic]) -> list[Group]:
    """Return features of the two blocks before and after each block, from values of (6, blocks)."""
    names = ("lexicon", "class", "level", "link_share", "words", "closed")
    groups: list[Group] = []
    for by, count in ((1, 6), (-1, 6), (2, 2), (-2, 2)):
        side = f"{'before' if by > 0 else 'after'}_{abs(by)}"
        groups.append((tuple(f"{name}_{side}" for name in names[:count]), _shifted(values[:count], by)))
    long, words, links = _window(np.stack([page.long, page.words, page.words * page.link]), 3)
    groups.append((("window_long", "window_links"), np.stack([long, links / np.maximum(words, 1)])))
    return groups


def _window(values: npt.NDArray[np.generic], reach: int) -> npt.NDArray[np.float64]:
    """Return the sums over each block and `reach` blocks before and after it; the last axis is the blocks."""
    size = values.shape[-1]
    sums = np.zeros((*values.shape[:-1], size + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    number = np.arange(size)
    window: npt.NDArray[np.float64] = (
        sums[..., np.minimum(number + reach + 1, size)] - sums[..., np.maximum(number - reach, 0)]
    )
    return window


def _whole_page(page: PageBlocks, text: Text, repeats: Floats, facts: PageFacts) -> Group:
    """Return what is the same for all blocks of a page."""
    size = len(page.words)
    long = page.long[page.long > 0]
    kind, _, _ = facts.open_graph.partition(".")
    values = {
        "words": np.log1p(page.total),
        "blocks": np.log1p(size),
        "link_share": page.links_in[0] / page.total,
        "long": page.total_long / page.total,
        "paragraphs": np.log1p(page.paragraphs_in[0]),
        "items": np.count_nonzero(page.element == _ITEM) / size,
        "cells": np.count_nonzero((page.element == _CELLS[0]) | (page.element == _CELLS[1])) / size,
        "headings": np.count_nonzero(page.levels) / size,
        "articles": np.count_nonzero(page.elements == _ARTICLE),
        "very_long": np.count_nonzero(page.words >= 40),
        "median_long": np.median(long) if len(long) else 0,
        "repeated": np.count_nonzero(repeats > 1) / size,
        "depth": page.blocks.depths[page.top],
        "ideographs": (text.ideographs / text.chars).mean(),
        "comments": page.words[page.marks[page.own] & BIT["comments"] > 0].sum() / page.total,
        **{f"og_{name}": kind.startswith(name) for name in OPEN_GRAPH},
        **{f"type_{name}": name in facts.types for name in TYPES},
    }
    names = tuple(f"page_{name}" for name in values)
    return names, np.broadcast_to(np.array(list(values.values()), np.float32)[:, None], (len(values), size))


def score_columns(page: PageBlocks, scores: Floats) -> list[Group]:
    """Return the features of the second pass: what the scores of the first pass say about the place of each block.

    `scores` are in 0..1, (blocks,).
    """
    words = page.words
    expected = words * scores
    total = max(float(expected.sum()), 1.0)
    groups: list[Group] = [(("score",), scores[None])]
    for by in (1, 2, 3, -1, -2, -3):
        groups.append(((f"score_{'before' if by > 0 else 'after'}_{abs(by)}",), _shifted(scores, by)[None]))
    both = np.stack([expected, words])
    for reach in (2, 5):
        sums = _window(both, reach)
        groups.append(((f"score_window_{reach}",), (sums[0] / np.maximum(sums[1], 1))[None]))
    expected_in = page.inside(expected)
    means = expected_in / np.maximum(page.words_in, 1)
    groups.append((("score_0", "score_1", "score_2"), means[np.stack(page.up[:3])]))
    groups.append((("score_share_0", "score_share_1"), expected_in[np.stack(page.up[:2])] / total))
    groups += [_likely(page, scores, expected / total), _sections(page, expected)]
    likely, unsure = scores > 0.5, (scores > 0.2) & (scores < 0.8)
    values = {
        "words": np.log1p(total),
        "share": total / page.total,
        "unsure": words[unsure].sum() / page.total,
        "highest": scores.max(),
        "blocks": np.count_nonzero(likely) / len(words),
        "likely": words[likely].sum() / page.total,
        "certain": np.log1p(words[scores > 0.8].sum()),
    }
    names = tuple(f"score_page_{name}" for name in values)
    whole = np.array(list(values.values()), np.float32)[:, None]
    return [*groups, (names, np.broadcast_to(whole, (len(values), len(words))))]


def _likely(page: PageBlocks, scores: Floats, expected: Floats) -> Group:
    """Return the distances to blocks of at least 8 words that are likely main text; `expected` has the sum 1."""
    size = len(scores)
    number = np.arange(size)
    is_likely = (scores > 0.5) & (page.words >= 8)
    first = int(np.argmax(is_likely)) if is_likely.any() else 0
    before = np.maximum.accumulate(np.where(is_likely, number, -999))
    after = np.minimum.accumulate(np.where(is_likely, number, size + 999)[::-1])[::-1]
    distances = [number - first, np.minimum(number - before, 50), np.minimum(after - number, 50)]
    names = ("from_first_likely", "from_likely", "to_likely", "score_before")
    return names, np.stack([*distances, np.cumsum(expected) - expected])


def _sections(page: PageBlocks, expected: Floats) -> Group:
    """Return the scores between two headings: of a block's section, and of those before and after it."""
    section = np.cumsum(page.levels > 0)
    expected_in = np.bincount(section, expected)
    means = expected_in / np.maximum(np.bincount(section, page.words), 1)
    names = ("score_section", "score_section_words", "score_section_after", "score_section_before")
    measured = np.stack([means, np.log1p(expected_in), _shifted(means, -1), _shifted(means, 1)])
    return names, measured[:, section]
