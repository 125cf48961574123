"""The words of a text as terms are compared with it: lists of listed words, of groups of people, of topics.

A word is a run of characters between white space and punctuation, or one symbol such as an emoji. Letters of every
script, digits of ASCII, and marks belong to words; `ain't` is two words.
"""

import regex

PUNCTUATION = regex.compile(
    r"[\u0080-\u00bf\u2000-\u206f\u2e00-\u2e7f\u3000-\u303f\ufe00-\ufe0f\uff00-\uff0f\uff1a-\uff20]"
)
"""Characters beyond ASCII that separate words."""
SYMBOL = regex.compile(r"[\u2190-\u245f\u2500-\u2bff\U0001f000-\U0001f12f\U0001f18a-\U0001faff]")
"""Characters of which each is a word: arrows, shapes, emoji."""
# ASCII bytes that are not letters or digits become spaces; bytes above ASCII belong to longer characters and are kept.
_SEPARATORS = bytes(byte if byte >= 128 or chr(byte).isalnum() else 32 for byte in range(256))


def term_words(text: str) -> list[bytes]:
    """Return the words of a casefolded text as UTF-8, split at spaces, at punctuation and around symbols."""
    if not text.isascii():
        text = SYMBOL.sub(r" \g<0> ", PUNCTUATION.sub(" ", text))
    return text.encode("utf-8", "replace").translate(_SEPARATORS).split()
