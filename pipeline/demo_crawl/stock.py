"""The stock of English text that pages are made of: every paragraph is handed out once.

Text is used up in order, so a page is about one subject, and no two pages share more than a few words.
"""

import random
import re
from collections.abc import Iterator

from pipeline.demo_crawl.text import Passage, vocabulary
from schemas.errors import ConfigError

MERGED_CHARS = 240
"""Shorter paragraphs are joined with the next one: web pages seldom have one-line paragraphs [code points]."""
SENTENCE_END = re.compile(r"(?<=[a-z)][.?!]) (?=[A-Z])")
PLAIN = re.compile(r"[A-Z][\w,;:'\"() -]+\w\.")


class Stock:
    """Unused paragraphs with their topics, and the vocabulary of all of them."""

    def __init__(self, passages: list[Passage]):
        self.words = [word for word in vocabulary(passages) if len(word) > 1]
        """Lower-case words, the most frequent first."""
        self.num_chars = sum(passage.num_chars for passage in passages)
        """Length of the unused text [code points]."""
        self._paragraphs = _merged(passages)
        self._sentences: list[str] = []

    def paragraphs(self, min_chars: int, min_count: int = 1) -> tuple[str, list[str]]:
        """(topic, unused paragraphs), as long [code points] and as many as asked for. Raises ConfigError at the end."""
        topic, taken, size = "", list[str](), 0
        while size < min_chars or len(taken) < min_count:
            found = next(self._paragraphs, None)
            if found is None:
                raise ConfigError(
                    "demo-crawl: promised the pages asked for, found all installed documentation used up; "
                    "ask for fewer pages"
                )
            topic = topic or found[0]
            taken.append(found[1])
            size += len(found[1])
            self.num_chars -= len(found[1])
        return topic, taken

    def distinct(self, num_chars: int, min_words: int = 9, max_words: int = 30) -> list[str]:
        """Unused sentences of at least `num_chars` code points in all, no two of which share three words in a row."""
        found: list[str] = []
        seen: set[tuple[str, ...]] = set()
        while sum(map(len, found)) < num_chars:
            sentence = self.sentences(1, min_words, max_words)[0]
            words = sentence.lower().rstrip(".").split(" ")
            triples = set(zip(words, words[1:], words[2:]))
            if seen.isdisjoint(triples):
                found.append(sentence)
                seen |= triples
        return found

    def sentences(self, count: int, min_words: int = 7, max_words: int = 30) -> list[str]:
        """`count` unused sentences of plain words, with their number of words within the bounds."""
        found: list[str] = []
        while len(found) < count:
            fitting = [s for s in self._sentences if min_words <= s.count(" ") + 1 <= max_words][: count - len(found)]
            found += fitting
            self._sentences = [s for s in self._sentences if s not in fitting]
            if len(found) < count:
                new = SENTENCE_END.split(self.paragraphs(1)[1][0])
                self._sentences = self._sentences[-50:] + [sentence for sentence in new if PLAIN.fullmatch(sentence)]
        return found


def title_of(topic: str, rng: random.Random) -> str:
    """A heading for a page about a topic."""
    title = rng.choice(TITLES).format(topic)
    return title[0].upper() + title[1:]


def _merged(passages: list[Passage]) -> Iterator[tuple[str, str]]:
    for passage in passages:
        pending = ""
        for paragraph in passage.paragraphs:
            pending = f"{pending} {paragraph}" if pending else paragraph
            if len(pending) >= MERGED_CHARS:
                yield passage.topic, pending
                pending = ""
        if pending:
            yield passage.topic, pending


TITLES = (
    "Notes on {}",
    "A closer look at {}",
    "What to know about {}",
    "{} in practice",
    "Getting along with {}",
    "Questions about {}",
    "How {} behaves",
    "The details of {}",
    "Reading about {}",
    "{} explained",
    "Using {} without surprises",
    "Background to {}",
)
