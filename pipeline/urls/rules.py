"""Which lists and words of a recipe an address has: one call for a URL, natively or in Python, with equal answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pyarrow as pa

from pipeline.text import native
from pipeline.urls.address import domains_of, key_of, prefixes_of, site_of
from pipeline.urls.table import UrlTable
from schemas.errors import ConfigError

MIN_SUBWORD_BYTES = 3
WORD = re.compile(rb"[a-z0-9\x80-\xff]+")
"""A word of an address: a run of letters and digits, of any script."""


class UrlHits(NamedTuple):
    """What the rules have of an address."""

    mask: int
    """The lists that have it, as bits; see `pipeline.urls.table`."""
    banned: int
    """Different banned words."""
    soft: int
    """Different soft words."""
    subwords: int
    """Different banned sequences."""


class Matcher(Protocol):
    """The native or the Python implementation."""

    def match(self, host: bytes, path: bytes) -> tuple[int, int, int, int]:
        """Return the `UrlHits` of an address of `address_of`."""


@dataclass(frozen=True)
class UrlWords:
    """The words of a recipe, in lower case."""

    banned: Sequence[bytes] = ()
    soft: Sequence[bytes] = ()
    subwords: Sequence[bytes] = ()


class PythonMatcher:
    """The reference, for machines without a compiler."""

    def __init__(self, table: UrlTable, words: UrlWords):
        self._table, self._subwords = table, tuple(words.subwords)
        self._banned, self._soft = frozenset(words.banned), frozenset(words.soft)

    def match(self, host: bytes, path: bytes) -> tuple[int, int, int, int]:
        """Return the `UrlHits` of an address."""
        mask = 0
        if len(self._table.keys):
            for entry in domains_of(host):
                mask |= self._table.mask_of(key_of(entry))
            for entry in prefixes_of(site_of(host), path, self._table.longest):
                mask |= self._table.mask_of(key_of(entry))
        if not (self._banned or self._soft or self._subwords):
            return mask, 0, 0, 0
        words = WORD.findall(host + path)
        different = set(words)
        joined = b"".join(words)
        subwords = sum(part in joined for part in self._subwords)
        return mask, len(different & self._banned), len(different & self._soft), subwords


def make_matcher(table: UrlTable, words: UrlWords) -> Matcher:
    """Return the native matcher, or the one in Python if this machine has no native module."""
    if native.module is None:
        return PythonMatcher(table, words)
    matcher: Matcher = native.loaded().UrlRules(
        (table.keys, table.masks, table.starts, table.shift, table.longest),
        list(words.banned),
        list(words.soft),
        list(words.subwords),
    )
    return matcher


def read_words(path: str, where: str, is_part: bool) -> tuple[bytes, ...]:
    """Return the words of a file in lower case and sorted; with `is_part`, sequences of characters inside words.

    Raises ConfigError for a file that cannot be read or has no word, and with its number for a line that is no word.
    """
    try:
        with pa.input_stream(path, compression="detect") as stream:
            content = stream.read()
        lines = content.decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: expected a file of words in UTF-8, got {path} ({error}). Correct it.") from error
    words: set[bytes] = set()
    for number, line in enumerate(lines, 1):
        word = line.strip().lower().encode()
        if not word or word.startswith(b"#"):
            continue
        if not WORD.fullmatch(word) or (is_part and len(word) < MIN_SUBWORD_BYTES):
            expected = (
                f"at least {MIN_SUBWORD_BYTES} letters or digits" if is_part else "one word of letters and digits"
            )
            raise ConfigError(
                f"{where}: {path}:{number}: expected {expected}, got {line.strip()[:80]!r}. Correct the line."
            )
        words.add(word)
    if not words:
        raise ConfigError(f"{where}: expected at least one word, got none in {path}. Add words, or unset {where}.")
    return tuple(sorted(words))
