"""Generated pages in other languages and charsets, whose charset is declared correctly, wrongly, or not at all.

Texts are composed from `sentences.toml`: templates with gaps for whole phrases, so that the grammar is correct. Fixed
sequences of words are short, so that two texts of one language share few 5-word shingles. The truth file has the actual
charset of a page and the declared ones.
"""

import random
import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.demo_crawl.html import CLEAN_LAYOUTS, DemoPage, prose

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
    """A language, the charset of a page, and the charsets that HTTP header and page declare; None = not declared."""

    language: str
    """ISO 639-1 code; `sentences.toml` has a table of this name."""
    charset: str
    http: str | None
    meta: str | None

    @property
    def is_true(self) -> bool:
        """True if header or page declare the charset, and every declaration is correct."""
        return {self.http, self.meta} - {None} == {self.charset}


ENCODINGS = (
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
    """Return the templates of a language of ENCODINGS."""
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
    """Return (title, paragraphs) of `num_sentences` sentences; a template repeats only after all others were used."""
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
    """Yield the options in random order without end; an option repeats only after all others."""
    while True:
        yield from rng.sample(options, len(options))


def _filled(template: str, phrases: Mapping[str, Iterator[str]]) -> str:
    parts: list[str] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal, next(phrases[name]) if name else ""]
    text = "".join(parts)
    return text[0].upper() + text[1:]
