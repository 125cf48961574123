"""A control of deduplication with known answers: near misses, of which none may be removed, and planted copies.

A near miss shares much with other documents and is no copy of any: forms with other facts, reports that differ in
numbers, pages with a common frame, articles with one quotation, translations. A planted copy is a document with a small
change. All words are made up, so the corpus is the same everywhere.
"""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.recipe import read_recipe
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.config import Recipe
from schemas.storage import Store
from tests.support.dedup_tables import Text, columns_of, recipe_of, table_of, write_documents

MISSES, PAIRS, FAMILIES = 120, 60, 30
"""Near misses of each kind, pairs of a base and a copy of each kind, and families of a base and several copies."""
FAMILY_COPIES = 4
SPLITS = 3
SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiouü"]
Draw = np.random.Generator
Words = list[str]


def vocabulary(size: int, ending: str) -> Words:
    """Return distinct made-up words; words of another ending are another language."""
    draw = np.random.default_rng(size)
    names = dict.fromkeys("".join(draw.choice(SYLLABLES, int(draw.integers(1, 4)))) + ending for _ in range(2 * size))
    return [*names][:size]


WORDS, OTHERS = vocabulary(4000, ""), vocabulary(4000, "x")
SHARES: npt.NDArray[np.float64] = 1 / np.arange(20, 4020)


def prose(draw: Draw, count: int) -> Words:
    """Return sentences of `count` words by Zipf's law."""
    words = [WORDS[place] for place in draw.choice(4000, count, p=SHARES / SHARES.sum()).tolist()]
    place = 0
    while (place := place + int(draw.integers(8, 20))) < count:
        words[place - 1] += "."
    return words


def fixed(seed: int, count: int) -> Words:
    """Return prose that all documents of a kind share."""
    return prose(np.random.default_rng(seed), count)


def filled(draw: Draw, frame: Words, every: int, slot: Callable[[Draw], str]) -> Words:
    """Return a frame in which every word at this distance is replaced by a slot's value."""
    return [slot(draw) if place % every == every - 1 else word for place, word in enumerate(frame)]


def number(draw: Draw) -> str:
    """Return a number as reports write it."""
    value = int(draw.integers(10, 99_999))
    return f"{value:,}" if value % 2 else f"{value / 100:.2f}"


def name(draw: Draw) -> str:
    """Return a name: a rare word with a capital."""
    return WORDS[int(draw.integers(500, 4000))].capitalize()


MISS: dict[str, Callable[[Draw, int], Words]] = {
    "form with other names": lambda draw, _: filled(draw, fixed(1, 160), 12, name),
    "form with few other names": lambda draw, _: filled(draw, fixed(11, 200), 20, name),
    "form with other names and figures": lambda draw, _: filled(
        draw, filled(draw, fixed(2, 200), 14, name), 11, number
    ),
    "report of other numbers": lambda draw, _: filled(draw, fixed(3, 140), 14, number),
    "stock list": lambda draw, _: [word for each in fixed(4, 60) for word in (each, number(draw), number(draw))],
    "page in a common frame": lambda draw, _: [*fixed(5, 125), *prose(draw, 120), *fixed(6, 125)],
    "article with the same quotation": lambda draw, _: [*prose(draw, 60), *fixed(7, 250), *prose(draw, 60)],
    "code with the same licence": lambda draw, _: [*fixed(8, 280), *prose(draw, 130)],
    "page of a list": lambda draw, place: [*fixed(9, 60), "page", str(place), *prose(draw, 80), *fixed(10, 40)],
}
"""Kinds of near misses: functions (random numbers, place) -> words. Their pairs are below a similarity of 0.7."""


def translated(words: Words) -> Words:
    """Return a text in the other made-up language; numbers and names stay."""
    place_of = {word: place for place, word in enumerate(WORDS)}
    return [OTHERS[place_of[plain]] if (plain := word.rstrip(".")) in place_of else word for word in words]


def substituted(words: Words, draw: Draw, share: float) -> Words:
    """Return the words with this share of them replaced."""
    changed = draw.random(len(words)) < share
    return [name(draw) if is_changed else word for word, is_changed in zip(words, changed)]


def around(words: Words, draw: Draw) -> Words:
    """Return the words with a frame of a tenth of their number."""
    half = len(words) // 20
    return [*prose(draw, half), *words, *prose(draw, half)]


COPY: dict[str, Callable[[Words, Draw], str]] = {
    "exact": lambda words, _: " ".join(words),
    "white space and case": lambda words, _: "\n\n".join(" ".join(words).upper().split(". ")),
    "punctuation": lambda words, _: " ".join(words).replace(".", " !"),
    "other code points": lambda words, _: unicodedata.normalize("NFD", "\u00a0".join(words).replace("u", "\u00fc")),
    "1 % of the words changed": lambda words, draw: " ".join(substituted(words, draw, 0.01)),
    "3 % of the words changed": lambda words, draw: " ".join(substituted(words, draw, 0.03)),
    "prefix": lambda words, draw: " ".join([*prose(draw, len(words) // 10), *words]),
    "suffix": lambda words, draw: " ".join([*words, *prose(draw, len(words) // 10)]),
    "frame": lambda words, draw: " ".join(around(words, draw)),
    "end cut off": lambda words, _: " ".join(words[: len(words) * 9 // 10]),
    "paragraphs in another order": lambda words, _: " ".join([*words[len(words) // 2 :], *words[: len(words) // 2]]),
    "another date and counter": lambda words, draw: " ".join([number(draw), *words, "read", number(draw), "times"]),
}
"""Kinds of planted copies: functions (words of the base, random numbers) -> text."""


@dataclass(frozen=True)
class Planted:
    """One document of the control."""

    kind: str
    text: str
    family: int
    """Number of the base and its copies; a near miss has a family of its own."""
    is_copy: bool


def documents() -> Iterator[Planted]:
    """Yield all documents, near misses first."""
    family = 0
    for row, (kind, make) in enumerate(MISS.items()):
        for place in range(MISSES):
            yield Planted(kind, " ".join(make(np.random.default_rng([1, row, place]), place)), family, False)
            family += 1
    for place in range(MISSES // 2):
        words = filled(np.random.default_rng([2, place]), prose(np.random.default_rng([3, place]), 180), 15, number)
        for text in (words, translated(words)):
            yield Planted("translation", " ".join(text), family, False)
            family += 1
    for row, (kind, copied) in enumerate(COPY.items()):
        for place in range(PAIRS):
            yield from copies(family, {kind: copied}, np.random.default_rng([4, row, place]))
            family += 1
    for place in range(FAMILIES):
        draw = np.random.default_rng([5, place])
        chosen = draw.choice(len(COPY), FAMILY_COPIES, replace=False).tolist()
        yield from copies(family, {f"family: {kind}": COPY[kind] for kind in [[*COPY][each] for each in chosen]}, draw)
        family += 1


def copies(family: int, kinds: dict[str, Callable[[Words, Draw], str]], draw: Draw) -> Iterator[Planted]:
    """Yield a base and a copy of each kind."""
    words = prose(draw, int(draw.integers(120, 500)))
    yield Planted("base", " ".join(words), family, False)
    for kind, copied in kinds.items():
        yield Planted(kind, copied(words, draw), family, True)


@dataclass(frozen=True)
class Outcome:
    """What deduplication did to the control."""

    misses: dict[str, tuple[int, int]]
    """By kind of near miss: (number removed, number)."""
    copies: dict[str, tuple[int, int]]
    """By kind of copy: (number of those of which only one of base and copy is kept, number)."""
    foreign: int
    """Removed copies in whose place a document of another family is kept."""
    false_positives: dict[str, Any]
    """The share that the run's own audit measured."""

    def share(self, kinds: dict[str, tuple[int, int]]) -> float:
        """Return the share over all kinds."""
        return sum(some for some, _ in kinds.values()) / sum(every for _, every in kinds.values())

    def lines(self) -> list[str]:
        """Return a table of all kinds."""
        shown = [f"removed {some:>3} of {every:>4}  {kind}" for kind, (some, every) in self.misses.items()]
        shown.append(f"near misses removed: {self.share(self.misses):.2%}, asked: at most 1 %")
        shown += [f"found   {some:>3} of {every:>4}  {kind}" for kind, (some, every) in self.copies.items()]
        shown.append(f"planted copies found: {self.share(self.copies):.2%}, asked: at least 95 %")
        shown.append(f"removed in favour of another family: {self.foreign}; audit: {self.false_positives}")
        return shown


def recipe_for(folder: Path, recipe: str, overrides: Sequence[str]) -> Recipe:
    """Return a recipe over the control, with the sections of deduplication of a recipe."""
    given = read_recipe(recipe, ['source.paths="x.jsonl"', *overrides]).to_json()
    return recipe_of(folder, SPLITS, {name: given[name] for name in ("signature", "dedup", "audit") if name in given})


def run_control(spark: Any, folder: Path, recipe: Recipe) -> Outcome:
    """Write the documents, run the steps up to the audit, and return what became of the documents."""
    every = [*documents()]
    order = np.random.default_rng(9).permutation(len(every)).tolist()

    def texts(split: int) -> Iterator[Text]:
        for place in order[split::SPLITS]:
            language = "de" if every[place].kind == "translation" and place % 2 else "en"
            yield Text(f"https://control.example/{place}", every[place].text, language)

    write_documents(folder, recipe, texts)
    run_steps(spark, prepare(recipe, "audit"), Store(str(folder)), None)
    ids = columns_of(folder, "documents", ["doc_id", "url"]).to_pylist()
    place_of = {row["doc_id"]: int(row["url"].rpartition("/")[2]) for row in ids}
    survivors = {place_of[row["doc_id"]]: row for row in columns_of(folder, "dedup", SURVIVOR).to_pylist()}
    removed = {place: place_of[row["survivor"]] for place, row in survivors.items() if row["drop_rule"]}
    base_of = {each.family: place for place, each in enumerate(every) if each.kind == "base"}
    outcome = Outcome({}, {}, sum(every[a].family != every[b].family for a, b in removed.items()), audited(folder))
    for place, each in enumerate(every):
        if each.kind != "base":
            kinds = outcome.copies if each.is_copy else outcome.misses
            some, total = kinds.get(each.kind, (0, 0))
            is_found = place in removed or (each.is_copy and base_of[each.family] in removed)
            kinds[each.kind] = some + is_found, total + 1
    return outcome


SURVIVOR = ["doc_id", "survivor", "drop_rule"]


def audited(folder: Path) -> dict[str, Any]:
    """Return the share of false positives that the audit of the run measured."""
    figures: dict[str, Any] = table_of(folder, "audit").manifest.content.figures["precision"]["removed"]
    return figures["false_positives"]
