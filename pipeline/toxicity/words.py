"""Word lists: occurrences of listed words and phrases in a text, by what they measure, such as threats.

Whole words match, regardless of case; in languages without spaces between words, matches may start anywhere. An entry
that ends with `*` also matches longer words. Words that are written to evade a list are found too: see `unmask`. Most
pages contain no listed word, so a text is first searched by the native screen; only a text with a hit is scanned word
by word.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import regex

from pipeline.text import native
from pipeline.text.native import loaded
from pipeline.text.term_words import term_words
from pipeline.toxicity.masks import Unmasker
from schemas.errors import ConfigError
from schemas.normalization import normalize

if TYPE_CHECKING:
    from pipeline.text import _native

LISTS = Path(__file__).parent / "lists"
LANGUAGES = tuple(sorted(file.stem for file in LISTS.iterdir() if file.suffix == ".txt"))
"""Languages with a built-in list, as lid.176 names them."""
UNSPACED = frozenset({"bo", "dz", "ja", "km", "ko", "lo", "my", "th", "wuu", "yue", "zh"})
"""Languages whose listed words match anywhere: those written without spaces between words, and Korean, whose words
take endings and grow together."""
MEASURES = ("hate", "threat", "obscenity", "sexual", "violence")
"""What the entries of a list measure; a file names them as sections, such as `[threat]`."""
OTHER = "other"
"""Measure of the entries of a file without sections."""

_SECTION = regex.compile(r"\[(\w+)\]")
MIN_PREFIX = 3
"""Minimum length of the part of an entry before `*` [code points]."""


class Occurrences(NamedTuple):
    """The listed words of a text."""

    by_measure: Mapping[str, int]
    """Number of matches by measure; a measure without a match is not named."""
    covered: Mapping[str, int]
    """Number of the text's words in these matches, by measure; of its characters in a language of UNSPACED."""
    size: int
    """Number of words of the text, or of its characters."""

    def total(self, measures: Collection[str]) -> int:
        """Return the number of matches of some measures."""
        return sum(number for name, number in self.by_measure.items() if name in measures)

    def share(self, measures: Collection[str]) -> float:
        """Return the share of the text's words, or characters, in the matches of some measures, 0..1."""
        return sum(number for name, number in self.covered.items() if name in measures) / max(1, self.size)


NOTHING = Occurrences({}, {}, 0)


def fold(text: str) -> str:
    """Return a text without differences of case. The dotless i of Turkish, whose capital is I, becomes i."""
    return text.casefold().replace("ı", "i").replace("i\u0307", "i")


def fold_entry(entry: str) -> str:
    """Return an entry of a list as texts are compared with it: without differences of case, and composed (NFC)."""
    return normalize("NFC", fold(entry)).strip()


class WordList:
    """The word list of a language with spaces between words: a measure for each entry."""

    def __init__(self, entries: Mapping[str, str]):
        self._by_first: dict[bytes, list[tuple[bytes, ...]]] = {}
        self._literal: dict[tuple[bytes, ...], str] = {}
        self._measure: dict[tuple[bytes, ...], str] = {}
        self._prefixes: dict[bytes, str] = {}
        for entry, measure in sorted({fold_entry(entry): measure for entry, measure in entries.items()}.items()):
            if entry.endswith("*"):
                self._prefixes[entry[:-1].encode()] = measure
                continue
            phrase = tuple(term_words(entry))
            self._measure[phrase] = measure
            self._by_first.setdefault(phrase[0], []).append(phrase)
            if regex.search(r"[^\w\s'’-]", entry):  # `s&m` must not match "it's m...".
                self._literal[phrase] = entry
        for phrases in self._by_first.values():
            phrases.sort(key=lambda phrase: (-len(phrase), phrase))
        self._firsts = frozenset(self._by_first)
        self._sizes = tuple(sorted({len(prefix) for prefix in self._prefixes}))
        single = {phrase[0].decode(): measure for phrase, measure in self._measure.items() if len(phrase) == 1}
        self._unmasker = Unmasker(single, {prefix.decode() for prefix in self._prefixes})

    @cached_property
    def _screen(self) -> "_native.WordSet":
        prefixes = [prefix.decode() for prefix in self._prefixes]
        single = [phrase[0].decode() for phrase in self._measure if len(phrase) == 1]
        pairs = [b" ".join(phrase[-2:]).decode() for phrase in self._measure if len(phrase) > 1]
        words: _native.WordSet = loaded().WordSet(single, prefixes, pairs)
        return words

    def count(self, text: str) -> Occurrences:
        """Return the listed words of a text.

        Longer phrases of the list match first, and no word of the text is in two matches.
        """
        folded = self._unmasker.unmask(fold(text))
        if native.module is not None and not self._screen.may_have(folded):
            return NOTHING
        words = term_words(folded)
        present = set(words)
        firsts = self._firsts & present
        longer = {word: measure for word in present if (measure := self._prefix_measure(word)) is not None}
        if not firsts and not longer:
            return NOTHING
        absent = {phrase for phrase, entry in self._literal.items() if phrase[0] in firsts and entry not in folded}
        found: Counter[str] = Counter()
        covered: Counter[str] = Counter()
        end = 0
        for position, word in enumerate(words):
            if position < end or (word not in firsts and word not in longer):
                continue
            end, measure = position, None
            for phrase in self._by_first.get(word, ()):
                if tuple(words[position : position + len(phrase)]) == phrase and phrase not in absent:
                    end, measure = position + len(phrase), self._measure[phrase]
                    break
            else:
                if word in longer:
                    end, measure = position + 1, longer[word]
            if measure is not None:
                found[measure] += 1
                covered[measure] += end - position
        return Occurrences(found, covered, len(words)) if found else NOTHING

    def _prefix_measure(self, word: bytes) -> str | None:
        for size in self._sizes:
            if (measure := self._prefixes.get(word[:size])) is not None:
                return measure
        return None


class UnspacedWordList:
    """The word list of a language of UNSPACED: a measure for each entry.

    A listed word matches anywhere in the text. If it begins or ends with a Latin letter, the character next to that
    letter must not be a Latin letter or digit.
    """

    def __init__(self, entries: Mapping[str, str]):
        self._measure = {" ".join(fold_entry(entry).split()): measure for entry, measure in entries.items()}
        self._longest_first = sorted(self._measure, key=lambda entry: (-len(entry), entry))
        self._unmasker = Unmasker(self._measure, frozenset())

    def count(self, text: str) -> Occurrences:
        """Return the listed words of a text.

        Longer entries of the list match first, and no character of the text is in two matches.
        """
        folded = self._unmasker.unmask(fold(text))
        if not (present := self._present(folded)):
            return NOTHING
        matches = regex.findall("|".join(map(_latin_ends, present)), folded)
        if not matches:
            return NOTHING
        found: Counter[str] = Counter()
        covered: Counter[str] = Counter()
        for match in matches:
            found[self._measure[match]] += 1
            covered[self._measure[match]] += _characters(match)
        return Occurrences(found, covered, _characters(folded))

    @cached_property
    def _native(self) -> "_native.TermSet":
        terms: _native.TermSet = loaded().TermSet([], self._longest_first)
        return terms

    def _present(self, folded: str) -> list[str]:
        """Return the entries that are anywhere in a text, the longest first."""
        if native.module is None:
            return [entry for entry in self._longest_first if entry in folded]
        return [self._longest_first[number] for number in self._native.find(folded)]


AnyWordList = WordList | UnspacedWordList


def _characters(text: str) -> int:
    return sum(map(len, text.split()))


def _latin_ends(entry: str) -> str:
    start = "(?<![A-Za-z0-9])" if entry[0].isascii() else ""
    end = "(?![A-Za-z0-9])" if entry[-1].isascii() else ""
    return f"{start}{regex.escape(entry)}{end}"


def read_wordlist(path: str, language: str) -> AnyWordList:
    """Read the word list in a file: an entry per line, under the section of its measure, such as `[hate]`, if any.

    Raises ConfigError if the file is not UTF-8 or has no word, an unknown section, or a prefix that is too short.
    """
    where = f"toxicity.wordlists.{language}"
    entries: dict[str, str] = {}
    measure = OTHER
    try:
        content = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: expected a file of words in UTF-8, got {path} ({error}). Correct it.") from error
    for number, line in enumerate(content.splitlines(), 1):
        line = line.strip()
        if line.startswith("#") or not line:
            continue
        if section := _SECTION.fullmatch(line):
            measure = section[1]
            if measure not in MEASURES:
                raise ConfigError(
                    f"{where}: expected a section of {', '.join(MEASURES)}, got [{measure}] in line {number} of "
                    f"{path}. Rename the section."
                )
            continue
        if term_words(line.casefold()):
            check_prefix(line, f"{where}, line {number} of {path}", language)
            entries.setdefault(line, measure)
    if not entries:
        raise ConfigError(
            f"{where}: expected words, got none in {path}. "
            f"Set {where} to the path of a file with one word or phrase per line."
        )
    return UnspacedWordList(entries) if language in UNSPACED else WordList(entries)


def check_prefix(entry: str, where: str, language: str) -> None:
    """Raise ConfigError if an entry with `*` at its end is not one word of at least MIN_PREFIX letters before it."""
    if not entry.endswith("*"):
        return
    prefix = entry[:-1]
    if language in UNSPACED or len(prefix) < MIN_PREFIX or len(term_words(prefix.casefold())) != 1 or "*" in prefix:
        raise ConfigError(
            f"{where}: expected one word of at least {MIN_PREFIX} letters before `*` in a language with spaces, got "
            f"{entry!r}. Write the whole words in lines of their own."
        )
