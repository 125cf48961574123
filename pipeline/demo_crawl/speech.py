"""Generated sentences in other languages: templates with gaps for whole phrases, so that the grammar is correct.

Each language is a module `speech_xx.py` with its own templates and phrases. Fixed sequences of words are short, so that
two texts of one language share few 5-word shingles.
"""

import random
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Speech:
    """The templates and phrases of one language."""

    language: str
    """ISO 639-1 code."""
    menu: tuple[str, ...]
    """Labels of the navigation of a site."""
    titles: tuple[str, ...]
    """Templates of headings."""
    templates: tuple[str, ...]
    """Templates of sentences; `{name}` is a gap for a phrase of that name."""
    phrases: Mapping[str, str]
    """Gap name → phrases, separated by ` / `, in the grammatical form that the gap requires."""
    space: str = " "
    """Separator between two sentences."""


def compose(speech: Speech, rng: random.Random, num_sentences: int) -> tuple[str, list[str]]:
    """Return (title, paragraphs) of `num_sentences` sentences; a template repeats only after all others were used."""
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
    """Yield the options in random order without end; an option repeats only after all others."""
    while True:
        yield from rng.sample(options, len(options))


def _filled(template: str, phrases: Mapping[str, Iterator[str]]) -> str:
    parts: list[str] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal, next(phrases[name]) if name else ""]
    text = "".join(parts)
    return text[0].upper() + text[1:]
