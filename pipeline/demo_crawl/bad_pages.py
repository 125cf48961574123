"""Low-quality pages: one kind for each rule of Gopher repetition, Gopher quality, C4 and FineWeb.

A page is good text with one defect, or text made of nothing but the defect. It passes all rules before its own.
"""

import random
import re
from collections.abc import Callable, Sequence

from pipeline.demo_crawl.html import Blocks, prose
from pipeline.demo_crawl.text import Stock

# Repetitive pages, one kind for each of Gopher's repetition rules.
#
# A phrase of n words that occurs twice also counts for the rules on shorter n-grams, but with fewer characters; each
# target below lies between the limit of its rule and the limits of the rules before it.

MakeBlocks = Callable[[Stock, random.Random], Blocks]

TOP_TARGETS = {2: 0.25, 3: 0.21, 4: 0.19}
"""n → share of the text that the most frequent n-gram covers; the limits of the rules are 0.20, 0.18 and 0.16."""
REPEATED_TARGETS = {5: 0.17, 6: 0.147, 7: 0.1345, 8: 0.1235, 9: 0.113, 10: 0.103}
"""n → minimum share of the text in repeated n-grams, which the last phrase exceeds by up to 0.02.

The limits of the rules are 0.15, 0.14 … 0.10."""


def repeated_paragraphs(stock: Stock, rng: random.Random) -> Blocks:
    """Make six paragraphs, each followed by the same short paragraph."""
    short = stock.sentences(1, 7, 9)[0]
    return prose([text for paragraph in stock.paragraphs(900, 6)[1][:6] for text in (paragraph, short)])


def repeated_paragraph_chars(stock: Stock, rng: random.Random) -> Blocks:
    """Make many short paragraphs, and one long paragraph that occurs twice."""
    paragraphs = stock.sentences(10)
    long = " ".join(stock.distinct(sum(map(len, paragraphs)) // 2))
    return prose([*paragraphs[:3], long, *paragraphs[3:8], long, *paragraphs[8:]])


def repeated_lines(stock: Stock, rng: random.Random) -> Blocks:
    """Make paragraphs of two lines. The second line is the same in all paragraphs."""
    short = stock.sentences(1, 7, 9)[0]
    return prose([f"{paragraph}\n{short}" for paragraph in stock.paragraphs(1500, 8)[1]])


def repeated_line_chars(stock: Stock, rng: random.Random) -> Blocks:
    """Make many short lines, with the same long line in two different paragraphs."""
    lines = stock.sentences(10)
    long = " ".join(stock.distinct(sum(map(len, lines)) // 2))
    return prose([*lines[:3], f"{lines[3]}\n{long}", *lines[4:8], f"{long}\n{lines[8]}", lines[9]])


def top_ngram(n: int) -> MakeBlocks:
    """Return a function that makes pages in which a single phrase of n words covers too much of the text."""

    def make(stock: Stock, rng: random.Random) -> Blocks:
        phrase = " ".join(rng.sample([word for word in stock.words[200:2000] if len(word) == 7], n))
        sentences = stock.distinct(1500)
        size, share = sum(map(len, sentences)) + len(sentences), TOP_TARGETS[n]
        count = round(share * size / (len(phrase) - share * (len(phrase) + 1)))
        return prose(_inserted(sentences, [phrase] * count, rng))

    return make


def repeated_ngrams(n: int) -> MakeBlocks:
    """Return a function that makes pages in which many phrases of n words occur twice."""

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
    """Return paragraphs of the sentences, with the phrases inserted at even distances between words of a sentence."""
    words = [sentence.split(" ") for sentence in sentences]
    gaps = [(number, index) for number, sentence in enumerate(words) for index in range(1, len(sentence))]
    step = len(gaps) / len(phrases)
    chosen = [gaps[int(step * (index + 0.5))] for index in range(len(phrases))]
    for (number, index), phrase in sorted(zip(chosen, phrases), reverse=True):
        words[number].insert(index, phrase)
    lines = [" ".join(sentence) for sentence in words]
    return [" ".join(lines[start : start + 4]) for start in range(0, len(lines), 4)]


REPETITIVE: dict[str, MakeBlocks] = {
    "gopher_dup_para_frac": repeated_paragraphs,
    "gopher_dup_para_char_frac": repeated_paragraph_chars,
    "gopher_dup_line_frac": repeated_lines,
    "gopher_dup_line_char_frac": repeated_line_chars,
    **{f"gopher_top_{n}gram": top_ngram(n) for n in TOP_TARGETS},
    **{f"gopher_dup_{n}gram": repeated_ngrams(n) for n in REPEATED_TARGETS},
}
"""Rule → the function that makes the blocks of a page that the rule should drop."""


SHORT_WORDS = re.findall(
    "[a-z]+", "a i it is to be we go up on at in so as an do he my by no of or us me if the and she you"
)
"""Words of one to three letters."""
SHORT_ADJECTIVES = ("red", "old", "new", "big", "cold", "warm", "tall", "soft", "dark", "wide", "long", "loud")
STOP_WORD_REPLACEMENTS = {
    **{"the": "this", "of": "from", "to": "into", "and": "plus"},
    **{"that": "which", "with": "using", "be": "stay", "have": "own"},
}
"""Each of the eight stop words of Gopher's list → the word that replaces it."""
NOTICES = (
    "See our privacy policy.",
    "This site uses cookies.",
    "Read the terms of use.",
    "Turn javascript on first.",
    "Here is the cookie policy.",
    "Visitors accept the use of cookies.",
    "We use cookies here.",
    "Without javascript nothing works.",
)


def short_doc(stock: Stock, rng: random.Random) -> Blocks:
    """Make four or five sentences."""
    return prose(stock.distinct(180, 8, 10))


def long_doc(stock: Stock, rng: random.Random) -> Blocks:
    """Make more than 100,000 words, drawn from the vocabulary."""
    words = rng.choices(stock.words[:4000], k=130_000)
    sentences = [" ".join(words[start : start + 12]).capitalize() + "." for start in range(0, len(words), 12)]
    return prose([" ".join(sentences[start : start + 8]) for start in range(0, len(sentences), 8)])


def short_words(stock: Stock, rng: random.Random) -> Blocks:
    """Make sentences of words of one to three letters."""
    return prose([_sentences(SHORT_WORDS, 9, 4, rng) for _ in range(6)])


def long_words(stock: Stock, rng: random.Random) -> Blocks:
    """Make sentences of words of eleven letters and more."""
    return prose([_sentences([word for word in stock.words if len(word) > 10], 8, 3, rng) for _ in range(6)])


def hashes(stock: Stock, rng: random.Random) -> Blocks:
    """Make text in which every third word is a hash tag."""
    return prose([_every(3, lambda word: f"#{word}", text) for text in stock.paragraphs(900)[1]])


def ellipses(stock: Stock, rng: random.Random) -> Blocks:
    """Make text in which every third word, but no line, ends in an ellipsis."""
    trailing = (_every(3, lambda word: f"{word.rstrip('.')}...", text) for text in _lines(stock, 9))
    return prose([f"{text} That is all." for text in trailing])


def bullet_lines(stock: Stock, rng: random.Random) -> Blocks:
    """Make a bullet list of sentences without other text."""
    bullet = rng.choice(("•", "-"))
    return prose(["\n".join(f"{bullet} {sentence}" for sentence in stock.sentences(30))])


def ellipsis_lines(stock: Stock, rng: random.Random) -> Blocks:
    """Make text in which four lines of five end in an ellipsis."""
    lines = stock.sentences(15, 12)
    return prose(["\n".join(line[:-1] + "..." if number % 5 else line for number, line in enumerate(lines))])


def alpha_words(stock: Stock, rng: random.Random) -> Blocks:
    """Make text in which a number follows every second word."""
    return prose([_every(2, lambda word: f"{word} {rng.randrange(1000, 99999)}", text) for text in _lines(stock, 8)])


def stop_words(stock: Stock, rng: random.Random) -> Blocks:
    """Make text without the eight stop words that Gopher requires."""
    pattern = re.compile(rf"\b({'|'.join(STOP_WORD_REPLACEMENTS)})\b")
    return prose(
        [pattern.sub(lambda match: STOP_WORD_REPLACEMENTS[match[1]], text) for text in stock.paragraphs(1000)[1]]
    )


def lorem_ipsum(stock: Stock, rng: random.Random) -> Blocks:
    """Make good text with a leftover placeholder."""
    paragraphs = stock.paragraphs(1200)[1]
    return prose([*paragraphs, "Lorem ipsum dolor sit amet, consectetur adipiscing elit."])


def curly_bracket(stock: Stock, rng: random.Random) -> Blocks:
    """Make good text with one paragraph of a template in which `{name}` was not filled in."""
    paragraphs = stock.paragraphs(1200)[1]
    return prose([*paragraphs[:2], "Dear {name}, your order has left our house.", *paragraphs[2:]])


def few_sentences(stock: Stock, rng: random.Random) -> Blocks:
    """Make three very long sentences."""
    parts = [", and ".join(sentence[:-1].lower() for sentence in stock.sentences(3, 9)) for _ in range(3)]
    return prose([part.capitalize() + "." for part in parts])


def policy_lines(stock: Stock, rng: random.Random) -> Blocks:
    """Make eight lines that C4 removes because of a notice, such as one about cookies, and three more lines.

    The three lines are too little text for the page to be kept.
    """
    lines = [f"{sentence} {notice}" for sentence, notice in zip(stock.sentences(8, 9), NOTICES)]
    return prose([*lines, *stock.sentences(3, 9)])


def no_terminal(stock: Stock, rng: random.Random) -> Blocks:
    """Make lines of two sentences, the second without its full stop."""
    sentences = stock.sentences(24)
    return prose([f"{first} {second[:-1]}" for first, second in zip(sentences[::2], sentences[1::2])])


def short_lines(stock: Stock, rng: random.Random) -> Blocks:
    """Make 40 lines that are sentences of four short words, and four longer lines."""
    nouns = rng.sample([word for word in stock.words[200:4000] if 4 <= len(word) <= 7], 40)
    adjectives = rng.choices(SHORT_ADJECTIVES, k=40)
    return prose([f"The {noun} is {adjective}." for noun, adjective in zip(nouns, adjectives)] + _lines(stock, 4))


def repeated_line(stock: Stock, rng: random.Random) -> Blocks:
    """Make good text in which one line occurs twice: Gopher keeps it, FineWeb drops it."""
    lines = _lines(stock, 9)
    line = stock.sentences(1, 9, 14)[0]
    return prose([*lines[:3], line, *lines[3:], line])


def newlines(stock: Stock, rng: random.Random) -> Blocks:
    """Make lines of three words: two in five are longer than 30 characters, and one in six ends a sentence."""
    long = [word for word in stock.words if 10 <= len(word) <= 14]
    short = [word for word in stock.words[100:3000] if 3 <= len(word) <= 7]
    lines = []
    for number in range(60):
        words = rng.sample(long if number % 5 < 2 else short, 3)
        if number % 5 >= 2:
            words[1] = ("the", "to", "of", "with")[number % 4]
        lines.append(" ".join(words).capitalize() + ("." if number % 6 == 0 else ""))
    return prose(lines)


def _lines(stock: Stock, count: int) -> list[str]:
    """Return `count` paragraphs of two sentences each."""
    sentences = stock.sentences(2 * count, 8)
    return [f"{first} {second}" for first, second in zip(sentences[::2], sentences[1::2])]


def _every(step: int, change: Callable[[str], str], text: str) -> str:
    return " ".join(change(word) if number % step == step - 1 else word for number, word in enumerate(text.split(" ")))


def _sentences(words: Sequence[str], size: int, count: int, rng: random.Random) -> str:
    return " ".join(" ".join(rng.choices(words, k=size)).capitalize() + "." for _ in range(count))


LOW_QUALITY: dict[str, tuple[MakeBlocks, str]] = {
    **{rule: (make, rule) for rule, make in REPETITIVE.items()},
    "gopher_short_doc": (short_doc, "gopher_short_doc"),
    "gopher_long_doc": (long_doc, "gopher_long_doc"),
    "gopher_short_words": (short_words, "gopher_short_words"),
    "gopher_long_words": (long_words, "gopher_long_words"),
    "gopher_hashes": (hashes, "gopher_hashes"),
    "gopher_ellipses": (ellipses, "gopher_ellipses"),
    "gopher_bullet_lines": (bullet_lines, "gopher_bullet_lines"),
    "gopher_ellipsis_lines": (ellipsis_lines, "gopher_ellipsis_lines"),
    "gopher_alpha_words": (alpha_words, "gopher_alpha_words"),
    "gopher_stop_words": (stop_words, "gopher_stop_words"),
    "c4_lorem_ipsum": (lorem_ipsum, "c4_lorem_ipsum"),
    "c4_curly_bracket": (curly_bracket, "c4_curly_bracket"),
    "c4_too_few_sentences": (few_sentences, "c4_too_few_sentences"),
    "c4_policy_lines": (policy_lines, "c4_too_few_sentences"),
    "fineweb_terminal_lines": (no_terminal, "fineweb_terminal_lines"),
    "fineweb_short_lines": (short_lines, "fineweb_short_lines"),
    "fineweb_dup_line_chars": (repeated_line, "fineweb_dup_line_chars"),
    "fineweb_newline_ratio": (newlines, "fineweb_newline_ratio"),
}
"""Kind → (the function that makes the blocks of the page, the rule that should drop the page)."""
UNTITLED = frozenset({"c4_too_few_sentences", "fineweb_newline_ratio", "gopher_short_words", "gopher_stop_words"})
"""Kinds whose page has no heading, since one more line would change the verdict."""
