"""Pages that several extractors read: their union, and a comparison of two of them on a sample.

In a union, a page whose text fails the rules gets the text of the next extractor whose text passes. The rules are the
checks of the stages that measure a document in the worker, as far as they need neither quantiles of the data nor scores
of models. Source of the union: arXiv 2602.19548.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from pipeline.engine.rules import KEPT, RowChecks
from pipeline.engine.stage import CPU, Check, PerDocument, Row, extend_schema
from pipeline.engine.worker import FusedStages, ModelPaths
from pipeline.extract.charset import PLAIN_TEXT
from pipeline.extract.extract import (
    ERRORS,
    EXTRACT,
    GUARD,
    ISOLATED,
    ExtractConfig,
    config_of_extractor,
    make_extract,
)
from pipeline.extract.extractors import Name
from pipeline.extract.nesting import NESTING_REASONS
from pipeline.language import LANGUAGE, NOT_WANTED
from schemas.config import Recipe
from schemas.ids import is_in_share, shuffle_key
from schemas.tables import DOCUMENTS

TRIED = "_tried"
"""Field of a row: (extractor, whether its text was taken) of each further extractor that read its page."""
STOPPED = "_stopped"
"""Field of a row: further extractors that a limit of CPU time ended on its page."""
COMPARED = "_compared"
"""Field of a row: the row of its page in the table `comparisons`."""
UNION, COMPARE = "union", "compare"
"""Names under which CPU time is counted: of the rules and the further extractors of a union, and, followed by the name
of an extractor, of its extraction of compared pages."""
COMPARED_CHARS = 100_000
"""Maximum length of a stored text of a comparison [code points]."""
COMPARE_SEED = 1
SECOND_OPINION = "second_opinion"
MODEL_SCORES = frozenset(("toxicity_score", "toxic_share", "hateful_share"))
"""Columns of the measured stages that are scores of models."""


def checks_of_text(stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths) -> list[tuple[str, Check]]:
    """Return the checks that the text of one document can be compared with when it is extracted, and their stages."""
    return [
        (stage.name, check)
        for stage in stages
        if not stage.quantiles(recipe[stage.name])
        for check in stage.checks(recipe[stage.name], models.get(stage.name, {}), {})
        if MODEL_SCORES.isdisjoint((check.column, *check.needs))
    ]


class TextRules:
    """The rules of a recipe for the text of one document."""

    def __init__(self, stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths):
        """`models` are paths on this worker."""
        named = checks_of_text(stages, recipe, models)
        self._names = [f"{stage}/{check.reason}" for stage, check in named]
        kinds = {field.name: field.type for field in extend_schema(DOCUMENTS, stages)}
        self._checks = RowChecks([check for _, check in named], kinds)

    def broken(self, row: Row) -> str | None:
        """Return `stage/reason` of the drop of a measured row, or of the first check that it breaks; None if none."""
        if row.get("drop_stage") is not None:
            return f"{row['drop_stage']}/{row['drop_rule']}"
        first = self._checks.first_broken(row)
        return None if first == KEPT else self._names[first]


class SeveralExtractors:
    """The measured stages as one function of a row, for recipes with `extract.union` or `extract.compare`."""

    def __init__(self, stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths):
        """Load the stages once, and every extractor. `models` are paths on this worker."""
        config = recipe.section(EXTRACT.name, ExtractConfig)
        self._config = config
        self._first = FusedStages([stage for stage in stages if stage.name == EXTRACT.name], recipe, models)
        self._rest = FusedStages([stage for stage in stages if stage.name != EXTRACT.name], recipe, models)
        self._rules = TextRules(stages, recipe, models)
        # A library can hang on a page, so the further extractors run where a limit ends them.
        isolated = replace(EXTRACT, make=partial(make_extract, isolated=True))
        self._others = {
            name: FusedStages([isolated], recipe.with_section(EXTRACT.name, config_of_extractor(config, name)), models)
            for name in config.extractors[1:]
        }

    def __call__(self, row: Row) -> Row:
        """Return the row measured on the text of the first extractor of the union whose text passes the rules.

        If none passes, or without a union, it is measured on the text of the first. The fields TRIED, COMPARED and CPU
        of the row hold what the further extractors did, and what that took.
        """
        given = {name: value for name, value in row.items() if name != CPU}
        first = self._measured(self._first, row)
        name = self._config.compare
        if name is not None and not is_in_share(shuffle_key(COMPARE_SEED, given["doc_id"]), self._config.compare_share):
            name = None
        if not (self._config.union or name) or not _has_other_texts(given, first):
            return first
        started = time.thread_time()
        page = _Page(given, first, self._rules.broken(first))
        page.rules_seconds = time.thread_time() - started
        chosen = self._chosen(page) if self._config.union else first
        if name is not None:
            chosen[COMPARED] = self._compared(page, name)
            chosen[CPU][f"{COMPARE} {self._config.extractor}"] = page.seconds
            chosen[CPU][f"{COMPARE} {name}"] = extraction_seconds(page.others[name])
        chosen[STOPPED] = [other for other, its in page.others.items() if its.get(ISOLATED) == "stopped"]
        chosen[ERRORS] = [error for row in (page.first, *page.others.values()) for error in row.get(ERRORS, ())]
        return chosen

    def _chosen(self, page: "_Page") -> Row:
        """Return the row of the union, with the fields TRIED and CPU."""
        started = time.thread_time()
        chosen, tried, elsewhere = page.first, [], 0.0
        for name in self._config.union[1:] if page.broken is not None else ():
            if page.first.get("extracted_by") == name and not self._config.favor_precision:
                continue  # the second opinion on this page was the same text
            other = self._other(page, name)
            elsewhere += other[CPU].get(SECOND_OPINION, 0.0)
            is_better = self._rules.broken(other) is None
            tried.append((name, is_better))
            if is_better:
                chosen = dict(other)
                break
        if chosen is not page.first:
            chosen[CPU] = page.first[CPU]
            chosen |= {name: page.first[name] for name in (GUARD, SECOND_OPINION) if name in page.first}
        chosen[TRIED] = tried
        chosen[CPU][UNION] = page.rules_seconds + time.thread_time() - started + elsewhere
        return chosen

    def _compared(self, page: "_Page", name: Name) -> Row:
        """Return the row of the table `comparisons`."""
        other = self._other(page, name)
        texts = page.first["text"] or "", other["text"] or ""
        return {
            "doc_id": page.given["doc_id"],
            "language": page.first.get("language"),
            "first": self._config.extractor,
            "second": name,
            "word_f1": word_f1(*texts),
            "first_chars": len(texts[0]),
            "second_chars": len(texts[1]),
            "first_rule": page.broken,
            "second_rule": self._rules.broken(other),
            "first_text": texts[0][:COMPARED_CHARS],
            "second_text": texts[1][:COMPARED_CHARS],
        }

    def _other(self, page: "_Page", name: Name) -> Row:
        if name not in page.others:
            page.others[name] = self._measured(self._others[name], dict(page.given))
        return page.others[name]

    def _measured(self, extract: FusedStages, row: Row) -> Row:
        row = extract(row)
        return row if row.get("drop_stage") is not None else self._rest(row)


class _Page:
    """A page, and its rows as they are measured on the texts of its extractors."""

    def __init__(self, given: Row, first: Row, broken: str | None):
        self.given, self.first, self.broken = given, first, broken
        self.seconds = extraction_seconds(first)
        self.rules_seconds = 0.0
        self.others: dict[Name, Row] = {}


def extraction_seconds(row: Row) -> float:
    """Return the CPU time of the extraction of a measured row [s], that of other processes included."""
    return float(row[CPU].get(EXTRACT.name, 0.0) + row[CPU].get(SECOND_OPINION, 0.0))


def _has_other_texts(given: Row, first: Row) -> bool:
    """Return False for rows that have no page, and for pages that no other text can save."""
    if given["text"] is not None or given.get("mime") == PLAIN_TEXT:
        return False
    dropped_by = first.get("drop_stage"), first.get("drop_rule")
    if dropped_by == (LANGUAGE.name, NOT_WANTED):
        return False  # the text is not bad: the recipe wants other languages
    return not (dropped_by[0] == EXTRACT.name and dropped_by[1] in NESTING_REASONS)


# A comparison of two texts.

_ONE_CHARACTER = "\u3005-\u3007\u3041-\u3096\u30a1-\u30fa\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\U00020000-\U000323af"
_WORD = re.compile(rf"[{_ONE_CHARACTER}]|[^\W_{_ONE_CHARACTER}]+")


def word_f1(first: str, second: str) -> float:
    """Return the F1 of the words of two texts as multisets, in 0..1; 1 if neither has a word.

    Words are runs of letters and digits in lower case; each ideograph, kana and Hangul syllable is a word.
    """
    words, others = (Counter(_WORD.findall(text.lower())) for text in (first, second))
    if not words and not others:
        return 1.0
    return 2 * (words & others).total() / (words.total() + others.total())


def figures_of_comparison(compared: Row) -> Iterator[tuple[str, str, int]]:
    """Yield what a row of `comparisons` adds to the counts of the manifest, as (figure, name, amount)."""
    tenth = min(9, int(10 * compared["word_f1"]))
    yield "compared_f1", f"{tenth / 10:.1f}", 1
    yield "compared_lengths", length_class(compared["first_chars"], compared["second_chars"]), 1
    fails = compared["first_rule"] is not None, compared["second_rule"] is not None
    yield "compared_rules", OUTCOMES[fails], 1
    for name in ("first_chars", "second_chars"):
        yield "compared_chars", name, compared[name]


OUTCOMES = {
    (False, False): "both_pass",
    (True, False): "only_second_passes",
    (False, True): "only_first_passes",
    (True, True): "both_fail",
}
"""Which of two texts pass the rules, by (the first fails, the second fails)."""
LENGTHS = (
    "second_empty",
    "below_half",
    "below_0.8",
    "similar",
    "above_1.25",
    "above_double",
    "first_empty",
    "both_empty",
)
"""Classes of the length of the second text over that of the first; the limits 0.8 and 1.25 are similar."""


def length_class(first: int, second: int) -> str:
    """Return the class in LENGTHS of the lengths of two texts."""
    if not first or not second:
        return "both_empty" if first == second else "second_empty" if first else "first_empty"
    if 4 * first <= 5 * second and 4 * second <= 5 * first:
        return "similar"
    if second < first:
        return "below_half" if 2 * second < first else "below_0.8"
    return "above_double" if second > 2 * first else "above_1.25"
