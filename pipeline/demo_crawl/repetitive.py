"""Pages that repeat themselves, one kind for each of Gopher's repetition rules, made so that no earlier rule fires.

A phrase of n words that occurs twice also counts for the rules on shorter n-grams, but with fewer characters; each
target below lies between the rule's own limit and what the rules before it would let pass.
"""

import random
from collections.abc import Callable

from pipeline.demo_crawl.page import Blocks, prose
from pipeline.demo_crawl.stock import Stock

Make = Callable[[Stock, random.Random], Blocks]

TOP_TARGETS = {2: 0.25, 3: 0.21, 4: 0.19}
"""Share of the text that one n-gram fills; the limits are 0.20, 0.18 and 0.16."""
REPEATED_TARGETS = {5: 0.17, 6: 0.147, 7: 0.1345, 8: 0.1235, 9: 0.113, 10: 0.103}
"""Least share of the text in repeated n-grams; one phrase more adds up to 0.02. The limits are 0.15, 0.14 … 0.10."""


def repeated_paragraphs(stock: Stock, rng: random.Random) -> Blocks:
    """Six paragraphs and a short one that stands between them again and again."""
    short = stock.sentences(1, 7, 9)[0]
    return prose([text for paragraph in stock.paragraphs(900, 6)[1][:6] for text in (paragraph, short)])


def repeated_paragraph_chars(stock: Stock, rng: random.Random) -> Blocks:
    """One long paragraph twice among many short ones: few paragraphs, many characters."""
    paragraphs = stock.sentences(10)
    long = " ".join(stock.distinct(sum(map(len, paragraphs)) // 2))
    return prose([*paragraphs[:3], long, *paragraphs[3:8], long, *paragraphs[8:]])


def repeated_lines(stock: Stock, rng: random.Random) -> Blocks:
    """Paragraphs of one new line and one that they all share."""
    short = stock.sentences(1, 7, 9)[0]
    return prose([f"{paragraph}\n{short}" for paragraph in stock.paragraphs(1500, 8)[1]])


def repeated_line_chars(stock: Stock, rng: random.Random) -> Blocks:
    """One long line in two paragraphs that differ, among many short lines."""
    lines = stock.sentences(10)
    long = " ".join(stock.distinct(sum(map(len, lines)) // 2))
    return prose([*lines[:3], f"{lines[3]}\n{long}", *lines[4:8], f"{long}\n{lines[8]}", lines[9]])


def top_ngram(n: int) -> Make:
    """Pages in which one n-gram fills too much of the text."""

    def make(stock: Stock, rng: random.Random) -> Blocks:
        phrase = " ".join(rng.sample([word for word in stock.words[200:2000] if len(word) == 7], n))
        sentences = stock.distinct(1500)
        size, share = sum(map(len, sentences)) + len(sentences), TOP_TARGETS[n]
        count = round(share * size / (len(phrase) - share * (len(phrase) + 1)))
        return prose(_inserted(sentences, [phrase] * count, rng))

    return make


def repeated_ngrams(n: int) -> Make:
    """Pages in which many phrases of n words occur twice."""

    def make(stock: Stock, rng: random.Random) -> Blocks:
        words = [word for word in stock.words[100:3000] if 4 <= len(word) <= 8]
        sentences = stock.distinct(2800)
        size, share = sum(map(len, sentences)) + len(sentences), REPEATED_TARGETS[n]
        phrases: list[str] = []
        repeated = 0
        while repeated < share * size:
            phrase = " ".join(rng.sample(words, n))
            phrases += [phrase, phrase]
            repeated += len(phrase) - phrase.count(" ")
            size += 2 * (len(phrase) + 1)
        rng.shuffle(phrases)
        return prose(_inserted(sentences, phrases, rng))

    return make


def _inserted(sentences: list[str], phrases: list[str], rng: random.Random) -> list[str]:
    """The sentences as paragraphs, the phrases spread over them, each between two words of a sentence."""
    words = [sentence.split(" ") for sentence in sentences]
    gaps = [(number, spot) for number, sentence in enumerate(words) for spot in range(1, len(sentence))]
    step = len(gaps) / len(phrases)
    chosen = [gaps[int(step * (index + 0.5))] for index in range(len(phrases))]
    for (number, spot), phrase in sorted(zip(chosen, phrases), reverse=True):
        words[number].insert(spot, phrase)
    lines = [" ".join(sentence) for sentence in words]
    return [" ".join(lines[start : start + 4]) for start in range(0, len(lines), 4)]


REPETITIVE: dict[str, Make] = {
    "gopher_dup_para_frac": repeated_paragraphs,
    "gopher_dup_para_char_frac": repeated_paragraph_chars,
    "gopher_dup_line_frac": repeated_lines,
    "gopher_dup_line_char_frac": repeated_line_chars,
    **{f"gopher_top_{n}gram": top_ngram(n) for n in TOP_TARGETS},
    **{f"gopher_dup_{n}gram": repeated_ngrams(n) for n in REPEATED_TARGETS},
}
"""The function that makes a page's blocks, by the rule that should drop it."""
