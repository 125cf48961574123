"""C4's line rules and signals, and FineWeb's signals.

The line rules return the spans of the text to keep; the text itself is never rewritten. These spans, joined, equal C4's
output: stripped lines without citations, and line breaks. `structure_cuts` cuts what these rules cut for its content,
and keeps headings and paragraph breaks. FineWeb's signals are measured on C4's output in both cases.
Source: Raffel et al. 2020, arXiv 1910.10683, section 2.2; Penedo et al. 2024, arXiv 2406.17557, section 3.6; both as
datatrove implements them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipeline.quality.boilerplate import labels_of
from pipeline.text.spans import Span, append_span, complement, lines_without, trim, union, without
from pipeline.text.words import ENDS_SENTENCE, MARK, SENTENCE_ENDS, Words

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
TERMINAL = (".", "?", "!", '"', "'")
PLACEHOLDER = "lorem ipsum"
SCRIPT = "javascript"
SCRIPT_NOTICE = re.compile(
    r"javascript\s*:|\b(?:enabl|disabl|activat|deactivat|allow)\w*|\bturn(?:ed)? o(?:n|ff)\b|\b(?:your|the) browser\b"
    r"|\brequire[sd]?\b|\bsupport(?:s|ed)?\b|\bneeds?\b|\bmust\b"
)
"""What a notice to switch JavaScript on says. Of 128 English lines with `javascript` on 3,383 real pages, 22 are such
notices or links, all of at most 21 words; the others are articles, on which C4's rule cuts whole paragraphs."""
MAX_NOTICE_WORDS = 25
MAX_LABEL = 40
"""Maximum length of a line that may be a label, with bullets and spaces [code points]."""
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


@dataclass(frozen=True, slots=True)
class C4LineRules:
    """The settings of C4's line rules."""

    terminal_punctuation: bool = False
    """True if a line is kept only if it ends in one of TERMINAL and not in an ellipsis."""
    min_words: int = 3
    """Minimum number of whitespace-separated words of a line [words]."""
    max_word_length: int = 1000
    """Maximum length of the longest whitespace-separated word of a line [code points]."""


@dataclass(frozen=True, slots=True)
class LineRuleResult:
    """What C4's line rules keep of a text, and the values of the signals c4_lorem_ipsum and c4_curly_brackets."""

    lines: list[int]
    """Indices of the lines that are kept."""
    cited: bool
    """True if the text contains citations such as `[1]`, which are cut from the kept lines."""
    spans: list[Span]
    """Kept spans of the text, with a newline between two lines; sorted, disjoint, not adjacent [code points]."""
    lorem_ipsum: int
    """Number of occurrences of `lorem ipsum` on lines that the preceding line rules keep."""
    curly_brackets: int
    """Number of opening curly brackets on lines that the preceding line rules keep."""


def keep_all_lines(text: str, counts: Sequence[int]) -> LineRuleResult:
    """Return a result that keeps the whole text, for languages other than English.

    `counts` has the number of whitespace-separated words on each line.
    """
    lines = [number for number, count in enumerate(counts) if count]
    return LineRuleResult(lines, False, [(0, len(text))], text.lower().count(PLACEHOLDER), text.count("{"))


def apply_line_rules(text: str, lines: Sequence[str], counts: Sequence[int], rules: C4LineRules) -> LineRuleResult:
    """Apply C4's line rules to a text, and return the lines and spans that the rules keep.

    `lines` are the text's lines with their line ends. `counts` has the number of whitespace-separated words on each
    line.
    """
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
            lowered_line = line.lower() if phrases else ""
            lorem_ipsum += lowered_line.count(PLACEHOLDER)
            if SCRIPT in lowered_line:
                continue
            curly_brackets += line.count("{")
            if any(phrase in lowered_line for phrase in POLICIES):
                continue
            kept.append(number)
    else:
        kept = candidates
    return LineRuleResult(kept, cited, _spans(text, lines, kept, cited), lorem_ipsum, curly_brackets)


def _spans(text: str, lines: Sequence[str], kept: Sequence[int], cited: bool) -> list[Span]:
    """Return the spans of the text to keep: every kept line, and one newline between two kept lines.

    Citations and the whitespace at both ends of a line are left out.
    """
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


def structure_cuts(text: str, lines: Sequence[str], rules: C4LineRules) -> list[Span]:
    """Return the spans to cut by those of C4's line rules that look at what a line says, in order.

    They cut notices about JavaScript, lines with the phrase of a policy or too long a word, citations, and short lines
    that are only a label such as `Share`. Other lines with `javascript`, other short lines, lines without end
    punctuation, indentation and paragraph breaks stay. `lines` are the text's lines with their line ends.
    """
    labels = labels_of("en")
    lowered = text.lower()
    phrases = [phrase for phrase in (SCRIPT, *POLICIES) if phrase in lowered]
    cited = "[" in text and CITATION.search(text) is not None
    has_debris = bool(phrases) or max(map(len, lines), default=0) > rules.max_word_length
    cut = {n for n, line in enumerate(lines) if len(line) <= MAX_LABEL and _label(line) in labels}
    citations: list[Span] = []
    end = 0
    for number, line in enumerate(lines) if has_debris or cited else ():
        start, end = end, end + len(line)
        if has_debris and _is_debris(line, phrases, rules.max_word_length):
            cut.add(number)
        elif cited and "[" in line:
            spans = _citations(text, start, end)
            if spans and not without(line, [(a - start, b - start) for a, b in spans]).strip():
                cut.add(number)
            citations += spans
    if not cut and not citations:
        return []
    kept = lines_without(lines, cut)
    return complement(trim(text, complement(union(complement(kept, len(text)), citations), len(text))), len(text))


def _label(line: str) -> str:
    """Return a line in lower case without bullets and outer punctuation, as labels are listed."""
    return line.strip().strip("•…»«›‹.:>< ").lower()


def _is_debris(line: str, phrases: Sequence[str], max_word_length: int) -> bool:
    """Return True if a line is a notice about JavaScript, or contains another of the phrases or too long a word."""
    if phrases:
        lowered = line.lower()
        if any(phrase in lowered for phrase in phrases if phrase != SCRIPT):
            return True
        if SCRIPT in lowered and SCRIPT_NOTICE.search(lowered) and len(line.split()) <= MAX_NOTICE_WORDS:
            return True
    return len(line) > max_word_length and max(map(len, line.split()), default=0) > max_word_length


def _citations(text: str, start: int, end: int) -> list[Span]:
    """Return the spans of the citations on the line text[start:end], with the spaces before if no word follows."""
    spans: list[Span] = []
    for match in CITATION.finditer(text, start, end):
        low = spans[-1][1] if spans else start
        first, last = match.span()
        if last == end or not text[last].isalnum():
            while first > low and text[first - 1].isspace():
                first -= 1
        append_span(spans, first, last)
    return spans


def num_sentences(words: Words, counts: Sequence[int]) -> int:
    """Return the number of sentences in a text.

    `counts` has the number of whitespace-separated words on each line that is not blank.
    """
    if not counts:
        return 0
    line_starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    tokens = np.add.reduceat(words.counts, line_starts)
    unmarked = (words.flags & MARK) == 0
    # Every line starts a sentence. After its end, the next token that is not punctuation starts another sentence.
    ends = (words.flags[unmarked] & ENDS_SENTENCE) > 0
    line = np.repeat(np.arange(len(counts)), tokens)[unmarked]
    return len(counts) + int(np.count_nonzero(ends[:-1] & ~ends[1:] & (line[1:] == line[:-1])))


# FineWeb's signals: lines that end like sentences, short lines, repeated lines, and the ratio of newlines to words.

SHORT_LINE = 30  # Maximum length of a short line [characters]; part of the signal's definition.


def fineweb_signals(body: str, num_tokens: int) -> dict[str, float]:
    """Return the signals in `schemas.signals.FINEWEB` for a text after cuts. `num_tokens` is its number of tokens."""
    lines = [line for line in body.split("\n") if line and not line.isspace()]
    num_lines, newlines = max(len(lines), 1), body.count("\n")
    repeated = sum(map(len, lines)) - sum(map(len, set(lines)))
    return {
        "fineweb_terminal_lines": sum(line[-1] in SENTENCE_ENDS for line in lines) / num_lines,
        "fineweb_short_lines": sum(len(line) <= SHORT_LINE for line in lines) / num_lines,
        "fineweb_dup_line_chars": repeated / max(len(body) - newlines, 1),
        "fineweb_newline_ratio": newlines / max(num_tokens, 1),
    }
