"""Listed words as features of the toxicity classifier: which measures of the built-in word list a sentence has.

A classifier sees few labelled texts in most languages; a list names words that none of them has.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from pipeline.toxicity.words import LANGUAGES, LISTS, MEASURES, AnyWordList, read_wordlist
from schemas.ids import file_sha256

GROUP = 8
"""Number of sentences that are searched together, as most have no listed word."""
SEVERAL = "several"
FEATURES = (*MEASURES, SEVERAL)
"""A word of each measure is present; there is more than one listed word."""
Flags = npt.NDArray[np.bool_]


def listed_features(sentences: Sequence[str], language: str) -> Flags:
    """Return which FEATURES each sentence has (sentences, features); none in a language without a built-in list."""
    flags = np.zeros((len(sentences), len(FEATURES)), bool)
    if language not in LANGUAGES or not _has_listed(sentences, language):
        return flags
    for start in range(0, len(sentences), GROUP):
        group = sentences[start : start + GROUP]
        for number, sentence in enumerate(group if _has_listed(group, language) else (), start):
            found = _built_in(language).count(sentence).by_measure
            flags[number] = [*(measure in found for measure in MEASURES), sum(found.values()) > 1]
    return flags


def _has_listed(sentences: Sequence[str], language: str) -> bool:
    """Return True if one of the sentences may have a listed word: no match extends over a line end."""
    return bool(_built_in(language).count("\n".join(sentences)).by_measure)


def list_digests(languages: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the built-in list of each language that has one."""
    return {name: file_sha256(LISTS / f"{name}.txt") for name in sorted(languages) if name in LANGUAGES}


@cache
def _built_in(language: str) -> AnyWordList:
    return read_wordlist(str(LISTS / f"{language}.txt"), language)
