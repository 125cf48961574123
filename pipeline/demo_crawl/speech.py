"""Sentences in other languages: templates whose gaps are filled with whole phrases, so that the grammar holds.

Each language is a module `speech_xx.py` with its own templates and phrases. Fixed runs of words are kept short: two
texts of one language then share few 5-word shingles.
"""

import random
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Speech:
    """What is needed to write pages in one language."""

    language: str
    """ISO 639-1 code."""
    menu: tuple[str, ...]
    """Labels of a site's navigation."""
    titles: tuple[str, ...]
    """Templates of headings."""
    templates: tuple[str, ...]
    """Templates of sentences; `{name}` is a gap for one of the phrases of that name."""
    phrases: Mapping[str, str]
    """Phrases, separated by ` / `, by the name of the gap they fit, in the case and form that the gap wants."""
    space: str = " "
    """What stands between two sentences."""


def compose(speech: Speech, rng: random.Random, num_sentences: int) -> tuple[str, list[str]]:
    """(title, paragraphs) of a text of `num_sentences` sentences, none of its templates used twice in a round."""
    phrases = {name: _cycle(options.split(" / "), rng) for name, options in speech.phrases.items()}
    title, sentences = _filled(rng.choice(speech.titles), phrases), list[str]()
    while len(sentences) < num_sentences:
        sentences += [_filled(template, phrases) for template in rng.sample(speech.templates, len(speech.templates))]
    paragraphs: list[str] = []
    start = 0
    while start < num_sentences:
        end = min(num_sentences, start + rng.randint(3, 6))
        paragraphs.append(speech.space.join(sentences[start:end]))
        start = end
    return title, paragraphs


def _cycle(options: list[str], rng: random.Random) -> Iterator[str]:
    """The options in random order, again and again: one comes back only after all the others."""
    while True:
        yield from rng.sample(options, len(options))


def _filled(template: str, phrases: Mapping[str, Iterator[str]]) -> str:
    parts: list[str] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal, next(phrases[name]) if name else ""]
    text = "".join(parts)
    return text[0].upper() + text[1:]
