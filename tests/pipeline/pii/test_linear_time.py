"""The time of every search is linear in the text: each family, each type and the whole redactor, up to 1 MB."""

from collections.abc import Callable

import pytest

from pipeline.pii.candidates import FAMILIES, fold
from pipeline.pii.phones import find_phones
from pipeline.pii.stage import Redactor
from pipeline.pii.types import TYPE_NAMES, load_recognizers
from tests.support.growth import MOST, growth

UNITS = [
    "1", "1 ", "11 ", "1.", "12.", "123-", "1 - ", "(1)", "AB12 ", "A", "0x1f", "c1q", "1Lm", ":", "a1:",
    "-1f", "@", "@a.", "/a", "=a", "user: a ", "P<", "1234567M", "1.23456, ", "1?2'3\"N ", "A(", "123456A",
    "A1-", "?A1", "12/2011 ", "x1 ", ".eyJabcdefgh", "token=", "Akia", "-----BEGIN PRIVATE KEY",
    "415 - 555 - 0139 ", "2019-09-16 ", "+ 1 ", "ext. 1 ", "CPF 529.982.247-25 ",
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed ", "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa ", "é中",
    "%20", "%2520", "?a=1+", "_", "_a", "No. ", "version 1.2.3.4 ", "a@example.com, 415-555-0139; ",
]  # fmt: skip
SIZES = (2_500, 25_000, 250_000)
"""Characters of the smaller text; the larger one has four times as many, up to 1 MB."""


def repeated(unit: str) -> Callable[[int], str]:
    """A function that returns the unit again and again, cut to a size [characters]."""
    return lambda size: (unit * (size // len(unit) + 1))[:size]


@pytest.fixture(scope="module")
def everything() -> Redactor:
    return Redactor(TYPE_NAMES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_search_of_a_family(name: str) -> None:

    def search(text: str) -> int:
        return sum(1 for _ in FAMILIES[name].pattern.finditer(text))

    for unit in UNITS:
        for size in SIZES:
            ratio = growth(search, repeated(fold(unit)), size)
            assert ratio <= MOST, (unit, size)


def test_each_type_on_windows_as_long_as_they_get() -> None:
    """A recognizer sees joined windows of 16,384 characters and little more; each is linear up to twice that."""
    for loaded in load_recognizers(TYPE_NAMES):
        for unit in UNITS:
            ratio = growth(loaded.find, repeated(fold(unit)), 8_192)
            assert ratio <= MOST, (loaded.kind.name, loaded.kind.family, unit)


@pytest.mark.parametrize("size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.slow) for size in SIZES[1:])])
def test_the_redactor_and_the_telephone_numbers(everything: Redactor, size: int) -> None:
    for unit in UNITS:
        assert growth(lambda text: everything.find(text, "en"), repeated(unit), size) <= MOST, unit
        assert growth(lambda text: list(find_phones(text, fold(text), "en")), repeated(unit), size) <= MOST, unit


@pytest.mark.parametrize("unit", ["1999  ", "1999-2000, ", "12/2011%20", "12 415-555-0139 "])
def test_lists_of_years_and_numbers(unit: str) -> None:
    assert growth(lambda text: list(find_phones(text, fold(text), "en")), repeated(unit), 25_000) <= MOST
