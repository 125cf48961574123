"""Search for values: by patterns of our own, by recognizers of presidio, and for numbers of a length that types share.

A number may be written in groups, such as `529.982.247-25`. One search of a text finds the numbers of a length; each
type of that length then compares the digits with its check digits.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import regex

from pipeline.pii.candidates import is_decimal

Value = tuple[int, int, float, float]
"""(start, end, score, strength) of a value: its score against other types, and how much its form alone proves."""
CHECKED = 1.0
"""Score of a value whose check digits or form were compared."""
LENGTHS = range(9, 17)
"""Lengths of the numbers that are searched [digits]."""
_BEFORE, _AFTER = regex.compile("[0-9] "), regex.compile(" [0-9]")
LOOSE = 0.1
"""Strength of a number in any other form than those that its type names."""

_SEPARATORS, _FORM = str.maketrans("", "", " ./-"), str.maketrans("123456789", "000000000")
# A separator is followed by two digits, except before the last digit: "1 2 3 4 5 …" is no number, and takes no time.
_NUMBERS = {
    length: regex.compile(
        rf"(?<![0-9A-Za-z+]|[0-9][-.])[0-9](?:(?:[ ./-](?=[0-9]{{2}}))?[0-9]){{{length - 2}}}[ ./-]?[0-9]"
        r"(?!-?[0-9A-Za-z]|\.(?![A-Z][a-z])[0-9A-Za-z])"
    )
    for length in LENGTHS
}


@lru_cache(maxsize=len(LENGTHS))
def numbers_of(text: str, length: int) -> tuple[tuple[int, int, str], ...]:
    """Return (start, end, digits) of every number of this length [digits] in an ASCII text; they may overlap.

    A number in groups with further digits on both sides is a part of a row of numbers, and left out. So are numbers
    with decimals, and numbers beside a slash, unless one of the same form is on its other side.
    """
    spans = [match.span() for match in _NUMBERS[length].finditer(text, overlapped=True)]
    return tuple(
        (start, end, text[start:end].translate(_SEPARATORS))
        for start, end in spans
        if (end - start == length or start < 2 or not (_BEFORE.match(text, start - 2) and _AFTER.match(text, end)))
        and not is_decimal(text, start, end)
        and not _is_beside_slash(text, start, end)
    )


def _is_beside_slash(text: str, start: int, end: int) -> bool:
    """Return True if a slash with other text than a number of the same form is beside the number text[start:end]."""
    form, size = text[start:end].translate(_FORM), end - start
    before, after = text[max(0, start - 1 - size) : start - 1], text[end + 1 : end + 1 + size]
    return (start > 1 and text[start - 1] == "/" and text[start - 2].isdigit() and before.translate(_FORM) != form) or (
        text[end : end + 1] == "/" and after[:1].isalnum() and after.translate(_FORM) != form
    )


def number_search(
    length: int, forms: Sequence[tuple[str, float]], check: Callable[[str], bool]
) -> Callable[[str], Iterator[Value]]:
    """Return a function that finds the numbers of a length whose digits pass a check.

    `forms` are patterns of how a number may be written, with the strength of each. Any other form has LOOSE.
    """
    compiled = [(regex.compile(pattern), strength) for pattern, strength in forms]

    def search(text: str) -> Iterator[Value]:
        for start, end, digits in numbers_of(text, length):
            if check(digits):
                strengths = (strength for form, strength in compiled if form.fullmatch(text, start, end))
                yield start, end, CHECKED, next(strengths, LOOSE)

    return search


def pattern_search(
    patterns: Sequence[tuple[str, float]], check: Callable[[str], bool] | None
) -> Callable[[str], Iterator[Value]]:
    """Return a function that finds the values that match a pattern, each with its strength, and pass the check."""
    compiled = [(regex.compile(pattern, regex.IGNORECASE), strength) for pattern, strength in patterns]

    def search(text: str) -> Iterator[Value]:
        for pattern, strength in compiled:
            for match in pattern.finditer(text):
                if check is None or check(match.group()):
                    yield match.start(), match.end(), strength if check is None else CHECKED, strength

    return search


def presidio_search(
    recognizer: Any, check: Callable[[str], bool] | None, confirmed: bool
) -> Callable[[str], Iterator[Value]]:
    """Return a function that finds the values of a recognizer of presidio that pass a check.

    `confirmed` is True if the recognizer's checksum must confirm a value; otherwise only a wrong checksum rejects it.
    """

    def search(text: str) -> Iterator[Value]:
        for result in recognizer.analyze(text, recognizer.supported_entities, None):
            if confirmed and result.score < 1:
                continue
            if check is None or check(text[result.start : result.end]):
                strength = result.analysis_explanation.original_score
                yield result.start, result.end, float(result.score), strength

    return search


def import_presidio() -> Any:
    """Import presidio_analyzer with its log disabled: a recognizer that fails would log personal data."""
    # presidio imports torch and transformers if they are installed but does not need them here. They are hidden during
    # the import, which saves 2 s and 180 MB in each worker (measured for torch).
    hidden = [name for name in ("torch", "transformers") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import presidio_analyzer.predefined_recognizers
    finally:
        for name in hidden:
            del sys.modules[name]
    logging.getLogger("presidio-analyzer").disabled = True
    return presidio_analyzer
