"""Words of writing that does not separate them: ICU's dictionaries of Chinese, Japanese, Thai, Lao, Khmer and Burmese.

ICU picks the dictionary by the script of the text and not by the locale. Tibetan has none and falls into syllables, of
which its spelling marks the ends.
"""

from collections.abc import Callable, Iterable
from functools import cache

LOCALE = "und"
MAX_RUN = 4_096
"""Longest run that ICU is asked at once [code points]: it keeps tables of the whole run. Longer ones are cut here."""


@cache
def _word_breaker() -> Callable[[str, str], Iterable[str]]:
    from icu4py.breakers import WordBreaker

    return WordBreaker


def words_of_run(run: str) -> list[str]:
    """The words of a run of such writing without whitespace, in order; together they spell the run."""
    breaker = _word_breaker()
    words: list[str] = []
    for start in range(0, len(run), MAX_RUN):
        words.extend(breaker(run[start : start + MAX_RUN], LOCALE))
    return words
