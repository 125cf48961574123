"""Sentences of a text as spans: where toxicity is measured and, if a recipe wants that, cut."""

import re

from pipeline.text.spans import Span

MAX_SENTENCE = 400
"""Maximum length of a sentence; a longer one is divided at spaces [code points]."""
# It begins with a set of characters, which `re` searches for fastest. A run of signs is matched once, also where it
# ends no sentence, and the quantifiers are possessive: the time is linear.
_END = re.compile(
    r"""[.!?…。！？｡।۔\n](?:"""
    r"""(?<=[.!?…])[.!?…]*+["'»”’)\]]*+(\s*+)"""
    r"""|(?<=[。！？｡।۔])[。！？｡।۔]*+["'»”’」』）]*+\s*+"""
    r"""|\s*+)"""
)


def sentence_spans(text: str) -> list[Span]:
    """Return the spans of the sentences of a text, with the blanks after them; together they are the whole text.

    A sentence ends at a line end, and at a sign that ends sentences if a blank follows or the script has no blanks.
    """
    spans: list[Span] = []
    start = 0
    for match in _END.finditer(text):
        if match[1] == "":  # no blank follows the sign
            continue
        _append(spans, text, start, match.end())
        start = match.end()
    if start < len(text):
        _append(spans, text, start, len(text))
    return spans


def _append(spans: list[Span], text: str, start: int, end: int) -> None:
    while end - start > MAX_SENTENCE:
        space = text.rfind(" ", start + MAX_SENTENCE // 2, start + MAX_SENTENCE)
        stop = space + 1 if space > 0 else start + MAX_SENTENCE
        spans.append((start, stop))
        start = stop
    if start < end:
        spans.append((start, end))
