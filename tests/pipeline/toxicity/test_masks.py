"""Masked words: every kind of mask is found, ordinary text stays as it is, and both implementations agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.text.native import load
from pipeline.toxicity.masks import EVERY_SIGN, Sign, Unmasker
from tests.support.native import needs_native, python_only, tricky_texts

WORDS = ("fuck", "shit", "bitch", "idiot", "asshole", "дурак", "傻逼", "бляд")
UNMASKER = Unmasker(WORDS, {"motherf"})


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("f u c k this", "fuck this"),
        ("f.u.c.k f-u-c-k f_u_c_k", "fuck fuck fuck"),
        ("s h 1 t", "shit"),
        ("sh1t, b!tch and @sshole a$$hole", "shit, bitch and @sshole asshole"),
        ("f*ck f**k f#ck sh*t", "fuck fuck fuck shit"),
        ("fuuuuck fuuckkk shiiiit", "fuck fuck shit"),
        ("m0therf motherf*cker", "motherf motherf*cker"),
        ("fu\u200bck f\u00aduck", "fuck fuck"),
        ("ｆｕｃｋ 𝐟𝐮𝐜𝐤 ⓕⓤⓒⓚ", "fuck fuck fuck"),
        ("fuсk іdiot дypaк", "fuck idiot дурак"),
        ("你 傻 逼 吗", "你傻逼吗"),
        ("傻*逼", "傻逼"),
    ],
)
def test_masks_are_removed(text: str, plain: str) -> None:
    assert UNMASKER.unmask(text) == plain


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "the 1st and 2nd of h2o, c++ and b2b, covid19, mp3 files and 100% c#",
        "a b c d e f g",
        "u.s.a. and e.g. i.e. p.s.",
        "www aaa hmmm brrr sooo",
        "user@example.org costs $100 or us$5!!",
        "f ck, fu, sh t",
        "中文 和 英文",
        "москва 2024 г. и x-ray",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert UNMASKER.unmask(text) == text


@needs_native
@settings(max_examples=400)
@given(
    st.lists(
        st.sampled_from(
            ("f", "u", "c", "k", " ", "*", "1", "$", "fuck", "sh", "t", "і", "с", "\u200b", "傻", "逼", ".", "ｆ")
        )
        | tricky_texts
    ).map("".join)
)
def test_the_signs_hide_no_mask(text: str) -> None:
    folded = text.casefold()
    result = UNMASKER.unmask(folded)
    with python_only():
        assert UNMASKER.unmask(folded) == result


@needs_native
def test_signs() -> None:
    module = load("pipeline.text")
    assert module is not None
    assert EVERY_SIGN == Sign.SPACED | Sign.HIDDEN | Sign.TRIPLE | Sign.MIXED | Sign.UNUSUAL
    for text, sign in {
        "plain text, as it is in 2024.": Sign(0),
        "a b c d": Sign.SPACED,
        "sh1t": Sign.HIDDEN,
        "hmmm": Sign.TRIPLE,
        "fuсk": Sign.MIXED,
        "傻": Sign.UNUSUAL,
    }.items():
        assert Sign(module.mask_signs(text)) == sign, text


@pytest.mark.parametrize("unit", ["a ", "a*", "aaa", "1a", "aб", "傻 ", "𝐟", "$", "a.b"])
def test_a_megabyte_of_masks_is_read_once(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    UNMASKER.unmask(text)
