"""C4's line rules, as spans to cut from a text, and what they leave: sentences, placeholder text, curly brackets.

The text itself is never rewritten: text minus cuts is what C4 leaves, its lines stripped, without citations, joined by
the line breaks of the text. Source: Raffel et al. 2020, arXiv 1910.10683, section 2.2, as datatrove reads it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipeline.text.spans import Span, append_span, trim
from pipeline.text.words import ENDS_SENTENCE, MARK, SENTENCE_ENDS, Words

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
TERMINAL = (".", "?", "!", '"', "'")
PLACEHOLDER = "lorem ipsum"
SCRIPT = "javascript"
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


@dataclass(frozen=True, slots=True)
class C4LineRules:
    """The settings of the line rules."""

    terminal_punctuation: bool = False
    """Whether a line must end in TERMINAL, and not in an ellipsis."""
    min_words: int = 3
    """Words between whitespace that a line needs."""
    max_word_length: int = 1000
    """Length of the longest such word that a line may have [code points]."""


@dataclass(frozen=True, slots=True)
class LineRuleResult:
    """What the line rules leave of a text."""

    lines: list[int]
    """Numbers of the lines that stay."""
    cited: bool
    """Whether the text has citations, which are cut from these lines."""
    spans: list[Span]
    """What stays of the text, newlines between lines included; sorted, disjoint, not adjacent [code points]."""
    lorem_ipsum: int
    """Occurrences of the placeholder on lines that the other rules would keep."""
    curly_brackets: int
    """Opening curly brackets on such lines."""


def keep_all_lines(text: str, counts: Sequence[int]) -> LineRuleResult:
    """The whole text, placeholder and brackets counted everywhere: for languages that the line rules do not know."""
    lines = [number for number, count in enumerate(counts) if count]
    return LineRuleResult(lines, False, [(0, len(text))], text.lower().count(PLACEHOLDER), text.count("{"))


def apply_line_rules(text: str, lines: Sequence[str], counts: Sequence[int], rules: C4LineRules) -> LineRuleResult:
    """What stays of a text, given its lines with their ends and the number of pieces on each."""
    lowered = text.lower()
    phrases = [phrase for phrase in (PLACEHOLDER, SCRIPT, *POLICIES) if phrase in lowered]
    cited = "[" in text and CITATION.search(text) is not None
    candidates = [number for number, count in enumerate(counts) if count >= rules.min_words]
    lorem_ipsum = curly_brackets = 0
    if (
        phrases
        or cited
        or rules.terminal_punctuation
        or "{" in text
        or max(map(len, lines), default=0) > rules.max_word_length
    ):
        kept = []
        for number in candidates:
            line = lines[number].strip()
            if len(line) > rules.max_word_length and max(map(len, line.split())) > rules.max_word_length:
                continue
            line = CITATION.sub("", line) if cited else line
            if rules.terminal_punctuation and (not line.endswith(TERMINAL) or line.endswith("...")):
                continue
            small = line.lower() if phrases else ""
            lorem_ipsum += small.count(PLACEHOLDER)
            if SCRIPT in small:
                continue
            curly_brackets += line.count("{")
            if any(phrase in small for phrase in POLICIES):
                continue
            kept.append(number)
    else:
        kept = candidates
    return LineRuleResult(kept, cited, _spans(text, lines, kept, cited), lorem_ipsum, curly_brackets)


def _spans(text: str, lines: Sequence[str], kept: Sequence[int], cited: bool) -> list[Span]:
    """The kept lines without surrounding whitespace and citations, and one line break between any two of them."""
    ends = list(accumulate(map(len, lines)))
    spans: list[Span] = []
    for before, number in zip([-1, *kept], kept):
        line, end = lines[number], ends[number]
        if before >= 0:
            append_span(spans, ends[before] - 1, ends[before])
        start, stop = end - len(line.lstrip()), end - len(line) + len(line.rstrip())
        for match in CITATION.finditer(text, start, stop) if cited else ():
            append_span(spans, start, match.start())
            start = match.end()
        append_span(spans, start, stop)
    return trim(text, spans)


def num_sentences(words: Words, pieces: Sequence[int]) -> int:
    """Sentences on lines with these numbers of pieces, none of them 0; each line has at least one.

    A sentence begins with a line, and with a token after a sentence end that is not punctuation itself.
    """
    if not pieces:
        return 0
    line_starts = np.concatenate(([0], np.cumsum(pieces)[:-1]))
    tokens = np.add.reduceat(words.counts, line_starts)
    telling = (words.flags & MARK) == 0
    ends = (words.flags[telling] & ENDS_SENTENCE) > 0
    line = np.repeat(np.arange(len(pieces)), tokens)[telling]
    return len(pieces) + int(np.count_nonzero(ends[:-1] & ~ends[1:] & (line[1:] == line[:-1])))


# FineWeb's quality signals: lines that end like sentences, short lines, repeated lines, newlines among words.
#
# Source: Penedo et al. 2024, arXiv 2406.17557, section 3.6, as datatrove reads it.

SHORT_LINE = 30  # [characters] a line of at most this length is short; part of the signal's definition


def fineweb_signals(body: str, num_tokens: int) -> dict[str, float]:
    """The signals FINEWEB of a text after cuts that has this many tokens."""
    lines = [line for line in body.split("\n") if line and not line.isspace()]
    num_lines, newlines = max(len(lines), 1), body.count("\n")
    repeated = sum(map(len, lines)) - sum(map(len, set(lines)))
    return {
        "fineweb_terminal_lines": sum(line[-1] in SENTENCE_ENDS for line in lines) / num_lines,
        "fineweb_short_lines": sum(len(line) <= SHORT_LINE for line in lines) / num_lines,
        "fineweb_dup_line_chars": repeated / max(len(body) - newlines, 1),
        "fineweb_newline_ratio": newlines / max(num_tokens, 1),
    }
