"""Both ways to measure a text, with the native module and in Python alone, and texts on which they could differ."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st

from pipeline.extract import native as of_pages
from pipeline.text import native as of_texts
from pipeline.text.spacy_tokens import FORMS, MARKS, QUOTES, UNITS

needs_native = pytest.mark.skipif(
    of_texts.module is None, reason="the native module is not built from these sources (pip install -e .)"
)

SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2028\u2029\u202f\u205f\u3000"
_LETTERS = (
    "aAbZsS\u00e9\u00f6\u00df\u0130\u03a3\u03c3\u03c2\u01c5\ud55c\u4e2d\u56fd\u3042\u30a2\u0e01\u05d0\u0627\u0915\u02b0"
)
_DIGITS = "0123\u0661\u0662\uff11\u00bd\u00b2\u2460"
_SIGNS = (
    "+-\u2013\u2014~:<>=/\\|@#$%&*^.,;!?_'\"\u2019\u2026\u060c\u066b\u2396\u00b0\u00b7\u20ac\u2605\U0001f600\0\u200b"
)
_PARTS = (
    *(
        "".join(pair)
        for pair in ("\r\n", "...", "US$", "C$", "........", "km/h", "https://a.b/c", "e-mail", "lorem ipsum")
    ),
    *("\u0301", "\u0327", "\u302e", "\u0345", "\ud800", "\udfff", "javascript", "LOREM", "1,250.50", "3.5.2", "\u1fef"),
    *sorted(FORMS)[::17],
    *UNITS.split()[::3],
)
tricky_texts = st.lists(
    st.sampled_from((*_PARTS, *SPACES, *_LETTERS, *_DIGITS, *_SIGNS, *MARKS, *QUOTES)) | st.text(max_size=3),
    max_size=40,
).map("".join)
"""Texts of what the tokenizers, the normal words and Unicode treat in special ways, and of any other characters."""


@contextmanager
def python_only() -> Iterator[None]:
    """Measure in Python alone, as a machine without the native module does."""
    modules = of_texts.module, of_pages.module
    of_texts.module = of_pages.module = None
    try:
        yield
    finally:
        of_texts.module, of_pages.module = modules
