"""Groups of documents for the bias audit: people whom a text names, its dialect, topic, page type and country.

A document belongs to a group of people, a dialect or a topic if it has enough distinct terms of the group. One pass
over the words of the start of the text looks them up in a table for each language. Markers of a dialect are looked up
in every text, whatever its predicted language, because a language model may take a dialect for another language.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.text import native
from pipeline.text.term_words import term_words
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.text import _native

BUILT_IN = Path(__file__).with_name("groups.toml")
MAX_CHARS = 20_000
"""Maximum number of code points, from the start of a text, that are searched for terms."""
UNSPACED = frozenset({"ar", "arz", "hi", "ja", "zh"})
"""Languages whose terms match anywhere in a text: words are not separated, or have articles and endings attached."""
NO_COUNTRY = frozenset(
    (
        *("ai", "am", "bz", "cc", "cd", "eu", "fm", "gg", "gl", "io", "la", "ly", "me"),
        *("mu", "nu", "sc", "sh", "st", "su", "tk", "to", "tv", "vc", "vg", "ws"),
    )
)
"""Top-level domains of two letters that are mostly used by sites of other countries, or that are no country's."""
IDENTITY, DIALECT, TOPIC, PAGE, COUNTRY = "identity", "dialect", "topic", "page", "country"
WITH_TERMS = (IDENTITY, DIALECT, TOPIC)
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class Group:
    """A group of documents, and the terms by which one is recognized."""

    kind: str
    """IDENTITY, DIALECT or TOPIC."""
    name: str
    meaning: str
    terms: Mapping[str, Sequence[str]]
    """Terms by language; those of a dialect are under each language that the dialect belongs to."""

    @property
    def full_name(self) -> str:
        """The name in the column `groups`, such as `dialect/scots`."""
        return f"{self.kind}/{self.name}"


def read_groups(path: str | Path) -> tuple[Group, ...]:
    """Return the groups of a TOML file, in its order. Raises ConfigError if the file is no list of groups."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _wrong(path, "a TOML file", str(error)) from error
    groups = []
    for kind, named in tables.items():
        if kind not in WITH_TERMS or not isinstance(named, Mapping):
            raise _wrong(path, f"only tables of {', '.join(WITH_TERMS)}", repr(kind))
        groups += [_group(path, kind, name, values) for name, values in named.items()]
    return tuple(groups)


def _group(path: str | Path, kind: str, name: str, values: Any) -> Group:
    where = f"{kind}.{name}"
    if not NAME.fullmatch(name):
        raise _wrong(path, "a name of lower-case letters, digits and underscores", repr(where))
    if not isinstance(values, Mapping) or not isinstance(values.get("meaning"), str):
        raise _wrong(path, f"{where}.meaning to be a text", repr(values)[:80])
    if kind == DIALECT:
        languages = values.get("languages")
        if not _is_texts(languages) or not _is_texts(values.get("markers")):
            raise _wrong(path, f"{where}.languages and {where}.markers to be lists of texts", repr(values)[:80])
        terms = {language: tuple(values["markers"]) for language in values["languages"]}
    else:
        terms = {language: own for language, own in values.items() if language != "meaning"}
        wrong = [language for language, own in terms.items() if not _is_texts(own)]
        if wrong or not terms:
            raise _wrong(path, f"lists of terms by language in {where}", repr(values.get(wrong[0]) if wrong else None))
    empty = [term for own in terms.values() for term in own if not term_words(term.casefold())]
    if empty:
        raise _wrong(path, f"terms with a letter or digit in {where}", repr(empty[0]))
    return Group(kind, name, values["meaning"], {language: tuple(own) for language, own in terms.items()})


def _is_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def _wrong(path: str | Path, expected: str, got: str) -> ConfigError:
    return ConfigError(f"bias.groups: {path}: expected {expected}, got {got}. Correct the file, or set bias.groups.")


@cache
def built_in_meanings() -> Mapping[str, str]:
    """Return the meaning of each group that is shipped, by its full name."""
    return {group.full_name: group.meaning for group in read_groups(BUILT_IN)}


class _Terms:
    """The terms of one language, by the numbers of the groups that have them."""

    def __init__(self) -> None:
        self._phrases: dict[tuple[bytes, ...], list[int]] = {}
        self._anywhere: dict[str, list[int]] = {}

    def add(self, term: str, group: int, anywhere: bool) -> None:
        """Add a term of a group; with `anywhere`, it also matches within words."""
        folded = term.casefold()
        if anywhere:
            self._anywhere.setdefault(folded, []).append(group)
        else:
            self._phrases.setdefault(tuple(term_words(folded)), []).append(group)

    @cached_property
    def _native(self) -> "_native.TermSet":
        phrases = [[word.decode() for word in phrase] for phrase in self._phrases]
        terms: _native.TermSet = native.loaded().TermSet(phrases, [*self._anywhere])
        return terms

    @cached_property
    def _entries(self) -> list[tuple[bytes, list[int]]]:
        """The text and the groups of each term, in the order of `TermSet`."""
        phrases = [(b" ".join(phrase), groups) for phrase, groups in self._phrases.items()]
        return phrases + [(term.encode(), groups) for term, groups in self._anywhere.items()]

    @cached_property
    def _by_first(self) -> Mapping[bytes, list[tuple[int, tuple[bytes, ...]]]]:
        by_first: dict[bytes, list[tuple[int, tuple[bytes, ...]]]] = {}
        for number, phrase in enumerate(self._phrases):
            by_first.setdefault(phrase[0], []).append((number, phrase))
        return by_first

    def find(self, folded: str) -> Iterator[tuple[bytes, list[int]]]:
        """Yield each term in a casefolded text, with its groups."""
        for number in self._find_in_python(folded) if native.module is None else self._native.find(folded):
            yield self._entries[number]

    def _find_in_python(self, folded: str) -> Iterator[int]:
        words = term_words(folded)
        present, joined = set(words), b" %b " % b" ".join(words)
        for first in self._by_first.keys() & present:
            for number, phrase in self._by_first[first]:
                if len(phrase) == 1 or (present.issuperset(phrase) and b" %b " % b" ".join(phrase) in joined):
                    yield number
        for number, term in enumerate(self._anywhere, len(self._phrases)):
            if term in folded:
                yield number


class GroupFinder:
    """Finds the groups of documents by their terms."""

    def __init__(self, groups: Iterable[Group], min_terms: Mapping[str, int]):
        """`min_terms`: minimum number of distinct terms of a document by the kind of a group; others are not found."""
        self._groups = [group for group in groups if group.kind in min_terms]
        self._least = [min_terms[group.kind] for group in self._groups]
        languages = {language for group in self._groups for language in group.terms}
        self._terms = {language: _Terms() for language in sorted(languages)}
        self._other = _Terms()  # of a language without terms of its own
        for number, group in enumerate(self._groups):
            own = {term for language, terms in group.terms.items() if language not in UNSPACED for term in terms}
            for table in (self._other, *self._terms.values()) if group.kind == DIALECT else ():
                for term in sorted(own):
                    table.add(term, number, anywhere=False)
            for language, terms in group.terms.items():
                anywhere = language in UNSPACED
                for term in dict.fromkeys(terms) if anywhere or group.kind != DIALECT else ():
                    self._terms[language].add(term, number, anywhere)

    def find(self, text: str, languages: Iterable[str | None]) -> list[str]:
        """Return the full names of the groups that a text belongs to; terms of `languages` are looked for."""
        folded = text[:MAX_CHARS].casefold()
        found: dict[int, set[bytes]] = defaultdict(set)
        tables = {id(table): table for name in languages if name for table in (self._terms.get(name, self._other),)}
        for table in tables.values():
            for term, groups in table.find(folded):
                for group in groups:
                    found[group].add(term)
        return [self._groups[group].full_name for group in sorted(found) if len(found[group]) >= self._least[group]]


def country_of(domain: str | None) -> str | None:
    """Return the top-level domain of a country, such as `de`; None for others, and for those in NO_COUNTRY."""
    top = (domain or "").rpartition(".")[2]
    return top if len(top) == 2 and top.isascii() and top.isalpha() and top not in NO_COUNTRY else None
