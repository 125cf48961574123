"""Features of a text for hashed models: keys of its words, and the buckets that its word n-grams fall into.

Words are the normal words of `languages/words.py` (lower case, numbers as 0, no punctuation, no accents), so a model
sees what is said and not how it is set. Characters of scripts that do not separate words are words of their own. Model
files carry FEATURES: whoever changes what a text's buckets are gives it another number.
"""

import re

import numpy as np
import numpy.typing as npt

from pipeline.engine.stage import Row
from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.words import Codes, Vocabulary

FEATURES = 1
"""Version of the definition in this module."""
MAX_NGRAM = 3

Buckets = npt.NDArray[np.int64]

_UNSPACED = re.compile(f"[{UNSPACED}]")
_FIRST_UNSPACED = 0x0E00
# odd 64-bit numbers, one for each place in an n-gram: the first digits of the fractional parts of e, pi and sqrt(2)
_PLACES = np.array([0xB7E151628AED2A6B, 0x243F6A8885A308D3, 0x6A09E667F3BCC909], np.uint64)


def new_vocabulary() -> Vocabulary:
    """A vocabulary that is asked for the keys of words alone."""
    return Vocabulary(str.split)


def word_keys_of(text: str, vocabulary: Vocabulary) -> Codes:
    """The 64-bit key of each word of the text, in order."""
    vocabulary.trim()
    if not text.isascii() and _highest(text) >= _FIRST_UNSPACED:
        text = _UNSPACED.sub(r" \g<0> ", text)
    return vocabulary.keys(vocabulary.numbers(text.split()))


def _highest(text: str) -> int:
    # an eighth of the time that the expression takes to look at every character of a Latin text
    return int(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).max())


def keys_of_row(row: Row, vocabulary: Vocabulary) -> Codes:
    """The word keys of the row's text after cuts, taken once however many models ask."""
    keys: Codes | None = row.get("_word_keys")
    if keys is None:
        keys = row["_word_keys"] = word_keys_of(row["_body"], vocabulary)
    return keys


def ngram_codes(keys: Codes, max_n: int) -> Codes:
    """The 64-bit codes of all runs of 1 to `max_n` words, single words first."""
    orders = []
    for n in range(1, min(max_n, len(keys)) + 1):
        total = np.zeros(len(keys) - n + 1, np.uint64)
        for place in range(n):
            total += keys[place : len(keys) - n + 1 + place] * _PLACES[place]
        orders.append(_mixed(total))
    return np.concatenate(orders) if orders else np.zeros(0, np.uint64)


def _mixed(codes: Codes) -> Codes:
    # the high bits choose the bucket, so every bit must reach them. Source: Stafford 2011, variant 13 of MurmurHash3
    codes = (codes ^ (codes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(31))


def buckets_of(codes: Codes, num_buckets: int) -> Buckets:
    """The bucket of each code, 0 to num_buckets - 1; at most 2^32 buckets."""
    high = codes >> np.uint64(32)
    return ((high * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.int64)
