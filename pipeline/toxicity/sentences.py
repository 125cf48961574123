"""Sentences of a text as spans: where toxicity is measured and, if a recipe wants that, cut."""

import re
from collections.abc import Callable, Sequence

from pipeline.text.spans import Span

MAX_SENTENCE = 400
"""Maximum length of a sentence; a longer one is divided at spaces [code points]."""
REACH = 200
"""Length of text on each side of the end of a sentence in which a listed phrase that extends over it is looked for
[code points]. It is longer than any phrase of the built-in lists, also with a point or line end between its letters."""
# It begins with a set of characters, which `re` searches for fastest. A run of signs is matched once, also where it
# ends no sentence, and the quantifiers are possessive: the time is linear.
_END = re.compile(
    r"""[.!?…؟։።。！？｡।۔\n](?:"""
    r"""(?<=[.!?…؟։።])[.!?…؟։።]*+["'»”’)\]]*+(\s*+)"""
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


def sentences_with(text: str, spans: Sequence[Span], has: Callable[[str], bool]) -> set[int]:
    """Return the numbers of the sentences to cut so that `has` is false of the rest of the text.

    Of a match that extends over the ends of sentences, all of these sentences are returned.
    """

    def joined(numbers: Sequence[int]) -> str:
        return "".join([text[slice(*spans[number])] for number in numbers])

    def search(first: int, last: int) -> set[int]:
        if not has(joined(range(first, last))):
            return set()
        if last - first == 1:
            return {first}
        middle = (first + last) // 2
        found = search(first, middle) | search(middle, last)
        while has(joined(beside := _beside(spans, range(first, last), middle, found))):
            found.update(_narrowed(beside, lambda numbers: has(joined(numbers))))
        return found

    return search(0, len(spans)) if spans else set()


def _beside(spans: Sequence[Span], numbers: range, middle: int, found: set[int]) -> list[int]:
    """Return the numbers, without those of `found`, of the sentences within REACH of the start of sentence `middle`."""
    near: list[int] = []
    for side in (range(middle - 1, numbers.start - 1, -1), range(middle, numbers.stop)):
        left = REACH
        for number in side:
            if left <= 0:
                break
            if number not in found:
                near.append(number)
                left -= spans[number][1] - spans[number][0]
    return sorted(near)


def _narrowed(numbers: list[int], has: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return the last of the shortest sequences of consecutive numbers that `has` is still true of."""
    least, most = 0, len(numbers)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if has(numbers[middle:]) else (least, middle)
    numbers = numbers[least:]
    least, most = 0, len(numbers)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if has(numbers[:middle]) else (middle, most)
    return numbers[:most]
