"""Composition of the demo crawl: ordinary pages, and among them a known number of planted pages of every kind.

A planted page is made so that its correct verdict is known. Planted pages get their text first, and the ordinary pages
share the rest, up to a usual length. If fewer Python packages are installed, there are fewer planted pages and shorter
ordinary pages, but not fewer ordinary pages.
"""

import math
import random
import re
import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.demo_crawl.bad_pages import LOW_QUALITY, UNTITLED
from pipeline.demo_crawl.hostile_pages import FAKE_VALUES, broken_captures, good_page, personal_page, toxic_page
from pipeline.demo_crawl.html import CLEAN_LAYOUTS, LAYOUTS, Blocks, DemoPage, UrlGenerator, jaccard, prose
from pipeline.demo_crawl.text import SENTENCE_END, Stock, collect_passages, title_of
from pipeline.demo_crawl.write import ENCODINGS, Truth, capture_of, write_crawl
from schemas.errors import ConfigError

# Generated pages in other languages and charsets, whose charset is declared correctly, wrongly, or not at all.
#
# Texts are composed from `sentences.toml`: templates with gaps for whole phrases, so that the grammar is correct. Fixed
# sequences of words are short, so that two texts of one language share few 5-word shingles. The truth file has the
# actual charset of a page and the declared ones.

FILE = Path(__file__).with_name("sentences.toml")


@dataclass(frozen=True)
class Templates:
    """The sentence templates and phrases of one language."""

    menu: tuple[str, ...]
    """Labels of the navigation of a site."""
    titles: tuple[str, ...]
    """Templates of headings."""
    templates: tuple[str, ...]
    """Templates of sentences; `{name}` is a gap for a phrase of that name."""
    phrases: Mapping[str, tuple[str, ...]]
    """Gap name → phrases in the grammatical form that the gap requires."""
    space: str
    """Separator between two sentences."""


@dataclass(frozen=True)
class Encoding:
    """The language and charset of a page, and the charsets that the HTTP header and the HTML of the page declare.

    `http` or `meta` is None if no charset is declared there.
    """

    language: str
    """ISO 639-1 code; `sentences.toml` has a table of this name."""
    charset: str
    http: str | None
    meta: str | None

    @property
    def is_true(self) -> bool:
        """True if the HTTP header, the HTML or both declare a charset, and no declaration is wrong."""
        return {self.http, self.meta} - {None} == {self.charset}


CHARSETS = (
    Encoding("zh", "gb18030", "gb18030", "gb18030"),
    Encoding("zh", "gbk", None, "gbk"),
    Encoding("zh", "utf-8", "utf-8", "utf-8"),
    Encoding("ja", "shift_jis", "shift_jis", None),
    Encoding("ja", "euc-jp", None, "euc-jp"),
    Encoding("ja", "iso-2022-jp", None, "iso-2022-jp"),
    Encoding("ja", "utf-8", "utf-8", None),
    Encoding("ru", "windows-1251", "windows-1251", "windows-1251"),
    Encoding("ru", "koi8-r", None, "koi8-r"),
    Encoding("ru", "utf-8", None, "utf-8"),
    Encoding("de", "iso-8859-1", "iso-8859-1", None),
    Encoding("de", "utf-8", "utf-8", "utf-8"),
    Encoding("fr", "iso-8859-1", None, "iso-8859-1"),
    Encoding("fr", "windows-1252", "windows-1252", "windows-1252"),
    Encoding("es", "utf-8", "utf-8", "utf-8"),
    Encoding("es", "iso-8859-15", None, "iso-8859-15"),
    Encoding("it", "utf-8", "utf-8", "utf-8"),
    Encoding("fr", "utf-8", "iso-8859-1", "utf-8"),
    Encoding("de", "utf-8", "iso-8859-1", None),
    Encoding("es", "utf-8", None, "iso-8859-1"),
    Encoding("ru", "windows-1251", None, "utf-8"),
    Encoding("zh", "gb18030", "utf-8", None),
    Encoding("ja", "shift_jis", None, "utf-8"),
    Encoding("ru", "windows-1251", None, None),
    Encoding("zh", "gb18030", None, None),
    Encoding("ja", "shift_jis", None, None),
)
"""Every combination that is planted; those with wrong or missing declarations are last."""
DROPPED_LANGUAGE = "it"
"""The language that the demo recipe drops."""


def foreign_page(encoding: Encoding, url: str, rng: random.Random) -> DemoPage:
    """Return a page of 16 to 26 sentences in the language and charset of the encoding."""
    templates = templates_of(encoding.language)
    title, paragraphs = compose(templates, rng, rng.randint(16, 26))
    page = DemoPage(
        url=url,
        title=title,
        blocks=prose(paragraphs),
        layout=rng.choice(CLEAN_LAYOUTS),
        kind="language" if encoding.is_true else "wrong_charset",
        language=encoding.language,
        charset=encoding.charset,
        http_charset=encoding.http,
        meta_charset=encoding.meta,
        menu=templates.menu,
    )
    return page if encoding.language != DROPPED_LANGUAGE else page.dropped_by("language_not_wanted")


def templates_of(language: str) -> Templates:
    """Return the sentence templates and phrases of a language that CHARSETS lists."""
    values = _read_languages()[language]
    return Templates(
        menu=tuple(values["menu"]),
        titles=tuple(values["titles"]),
        templates=tuple(values["templates"]),
        phrases={name: tuple(phrases) for name, phrases in values["phrases"].items()},
        space=values.get("space", " "),
    )


@cache
def _read_languages() -> Mapping[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def compose(templates: Templates, rng: random.Random, num_sentences: int) -> tuple[str, list[str]]:
    """Return a title, and paragraphs of `num_sentences` sentences in total.

    A template is used again only after all other templates were used.
    """
    phrases = {name: _cycle(options, rng) for name, options in templates.phrases.items()}
    title, sentences = _filled(rng.choice(templates.titles), phrases), list[str]()
    while len(sentences) < num_sentences:
        order = rng.sample(templates.templates, len(templates.templates))
        sentences += [_filled(template, phrases) for template in order]
    paragraphs: list[str] = []
    start = 0
    while start < num_sentences:
        end = min(num_sentences, start + rng.randint(3, 6))
        paragraphs.append(templates.space.join(sentences[start:end]))
        start = end
    return title, paragraphs


def _cycle(options: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    while True:
        yield from rng.sample(options, len(options))


def _filled(template: str, phrases: Mapping[str, Iterator[str]]) -> str:
    parts: list[str] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal, next(phrases[name]) if name else ""]
    text = "".join(parts)
    return text[0].upper() + text[1:]


# Exact copies, and near copies whose true Jaccard similarity is measured and stored.
#
# A near copy replaces single words; each changes the up to five shingles that contain it, so with S shingles and k
# words the similarity is about (S - 5k) / (S + 5k). A binary search finds the number of words closest to the target.

LEVELS = (0.95, 0.9, 0.8, 0.7, 0.5, 0.3)
"""Target similarities of near copies."""
MIN_DUPLICATE, MAX_DISTINCT = 0.75, 0.65
"""Pairs with at least the first similarity are copies, up to the second distinct; between them, both are correct."""
NEAR_COPY_CHARS = 1800
"""Length of a near copy, long enough to reach the highest target: one word of 300 changes the similarity by 0.03."""
REPLACEABLE = re.compile(r"[a-z]{2,}")


def exact_copies(original: DemoPage, urls: list[str], same_bytes: bool, rng: random.Random) -> list[DemoPage]:
    """Return the original and one copy for each URL.

    If `same_bytes` is True, the copies have the same bytes. Otherwise they have the same text in another layout.
    """
    kind = "exact_bytes" if same_bytes else "exact_text"
    pages = [replace(original, kind="original", details={"group": original.url, "copies": kind})]
    for url in urls:
        other = rng.choice([name for name in CLEAN_LAYOUTS if name != original.layout])
        copy = replace(original, url=url, kind=kind, details={"group": original.url, "jaccard": 1.0})
        copy = replace(copy, rendered_as=original.url) if same_bytes else replace(copy, layout=other)
        pages.append(copy.dropped_by("exact_duplicate", "near_duplicate"))
    return pages


def near_copy(original: DemoPage, url: str, level: float, words: list[str], rng: random.Random) -> list[DemoPage]:
    """Return the original and a copy in which single words are replaced.

    The Jaccard similarity of the two pages is as close to `level` as possible. The details of the copy have the exact
    value.
    """
    kind = f"near_{round(100 * level)}"
    copy = replace(
        original, url=url, kind=kind, blocks=_altered(original, level, words, rng), layout=rng.choice(CLEAN_LAYOUTS)
    )
    similarity = jaccard(original.main_text, copy.main_text)
    if similarity >= MIN_DUPLICATE:
        copy = copy.dropped_by("near_duplicate")
    elif similarity > MAX_DISTINCT:
        copy = replace(copy.dropped_by("near_duplicate"), expected="either")
    details = {"group": original.url, "jaccard": round(similarity, 6)}
    return [
        replace(original, kind="original", details={"group": original.url, "copies": kind}),
        replace(copy, details=details),
    ]


def _altered(page: DemoPage, level: float, words: list[str], rng: random.Random) -> Blocks:
    """Return the blocks of a page with so many words replaced that the similarity to the page is closest to `level`."""
    texts = [text.split(" ") for _, text in page.blocks]
    positions = [(b, w) for b, text in enumerate(texts) for w, word in enumerate(text) if REPLACEABLE.fullmatch(word)]
    rng.shuffle(positions)
    fillers = [rng.choice([word for word in rng.sample(words, 2) if word != texts[b][w]]) for b, w in positions]

    def altered(count: int) -> Blocks:
        changed = [list(text) for text in texts]
        for (block, word), filler in zip(positions[:count], fillers):
            changed[block][word] = filler
        return tuple((element, " ".join(text)) for (element, _), text in zip(page.blocks, changed))

    def similarity(count: int) -> float:
        return jaccard(page.main_text, replace(page, blocks=altered(count)).main_text)

    low, high = 0, len(positions)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if similarity(middle) >= level else (low, middle)
    return altered(min((low, high), key=lambda count: abs(similarity(count) - level)))


MEDIAN_CHARS = 900
"""Median of the requested length of an ordinary page; lengths are log-normal [code points]."""
SPREAD = 0.5
MEAN_OVER_MEDIAN = math.exp(SPREAD**2 / 2)
OVERSHOOT_CHARS = 260
"""Mean excess of a page over its requested length, since paragraphs stay whole; measured [code points]."""
MIN_CHARS = 450
"""Minimum length of an ordinary page: about 70 words, where Gopher requires 50 [code points]."""
SPARE_CHARS = 800
"""Text that is reserved for every ordinary page if little text is available [code points]."""
MIN_SENTENCES = 6
"""Minimum number of sentences of an ordinary page, where C4 requires 5."""
CASE_CHARS = 94_000
"""Length of the text of one planted page of every kind together; measured [code points]."""
FIXED_CHARS = 200_000
"""Length of the text of the pages that are planted in fixed numbers, and for the vocabulary [code points]."""
MIN_CASES = 4
"""Minimum number of planted pages of each kind."""
MIN_PAGES = 100
"""Minimum number of ordinary pages, so that they are not too few among the planted pages."""


def build_demo_crawl(out: Path, pages: int = 3000, seed: int = 1) -> Truth:
    """Write a crawl of `pages` ordinary and about 1,500 planted pages to `out`; return the content of its truth files.

    The same installed packages, pages and seed give the same bytes. Raises ConfigError if `pages` is too small, or too
    large for the documentation of the installed packages.
    """
    if pages < MIN_PAGES:
        raise ConfigError(
            f"demo-crawl: expected at least {MIN_PAGES} pages, got {pages}. Set --pages to at least {MIN_PAGES}."
        )
    cases = max(MIN_CASES, pages // 150)
    mean = int(MEDIAN_CHARS * MEAN_OVER_MEDIAN) + OVERSHOOT_CHARS
    stock = Stock(collect_passages(FIXED_CHARS + cases * CASE_CHARS + pages * mean))
    cases = max(MIN_CASES, min(cases, (stock.num_chars - FIXED_CHARS - pages * SPARE_CHARS) // CASE_CHARS))
    rng = random.Random(f"demo crawl {seed}")
    urls = UrlGenerator(rng)
    captures = [capture_of(page) for page in planted_pages(stock, urls, cases, rng)]
    captures += broken_captures(stock, urls, rng)
    captures += [capture_of(page) for page in ordinary_pages(stock, urls, pages, rng)]
    return write_crawl(out, captures, seed)


def ordinary_pages(stock: Stock, urls: UrlGenerator, pages: int, rng: random.Random) -> Iterator[DemoPage]:
    """Yield pages of good text in all layouts; one in twelve has a content or transfer encoding such as gzip."""
    encodings = [name for name in ENCODINGS if name != "identity"]
    for number in range(pages):
        mean = stock.num_chars / (pages - number) - OVERSHOOT_CHARS
        median = max(1.0, min(MEDIAN_CHARS, mean / MEAN_OVER_MEDIAN))
        size = min(6 * MEDIAN_CHARS, max(MIN_CHARS, rng.lognormvariate(math.log(median), SPREAD)))
        topic, paragraphs = stock.paragraphs(int(size))
        while sum(len(SENTENCE_END.split(paragraph)) for paragraph in paragraphs) < MIN_SENTENCES:
            paragraphs += stock.paragraphs(1)[1]
        url, layout = urls.new(topic), rng.choice(list(LAYOUTS))
        page = DemoPage(url, title_of(topic, rng), prose(paragraphs), layout, extras=True)
        yield page if number % 12 else encoded(page, encodings[number // 12 % len(encodings)])


def planted_pages(stock: Stock, urls: UrlGenerator, cases: int, rng: random.Random) -> Iterator[DemoPage]:
    """Yield the planted pages, most kinds `cases` times. Originals of copies are included."""
    for number in range(cases):
        for same_bytes in (True, False):
            original = good_page(stock, urls, rng)
            yield from exact_copies(original, [urls.new("copy") for _ in range(1 + number % 3)], same_bytes, rng)
        for level in LEVELS:
            original = good_page(stock, urls, rng, NEAR_COPY_CHARS)
            yield from near_copy(original, urls.new("copy"), level, stock.words[:3000], rng)
        for kind in LOW_QUALITY:
            if kind != "gopher_long_doc" or number < 2:
                yield low_quality_page(kind, stock, urls, rng)
        for kind in FAKE_VALUES:
            yield personal_page(stock, urls.new("contact"), kind, rng)
        yield toxic_page(stock, urls.new("rant"), rng)
        for charset in CHARSETS[number % 2 :: 2]:
            yield foreign_page(charset, urls.new(charset.language), rng)


def low_quality_page(kind: str, stock: Stock, urls: UrlGenerator, rng: random.Random) -> DemoPage:
    """Return a page of the given kind, which the rule of the kind should drop."""
    make, rule = LOW_QUALITY[kind]
    title = "" if kind in UNTITLED else title_of(" ".join(rng.sample(stock.words[300:2000], 2)), rng)
    page = DemoPage(urls.new("page"), title, make(stock, rng), rng.choice(CLEAN_LAYOUTS), kind=kind)
    # The defect can be so strong that language identification fails too.
    return page.dropped_by(rule, "language_uncertain")


def encoded(page: DemoPage, encoding: str) -> DemoPage:
    """Return the page with a content or transfer encoding, one of `write.ENCODINGS`."""
    return DemoPage(page.url, page.title, page.blocks, page.layout, kind=f"encoding_{encoding}", encoding=encoding)
