"""The measure of extraction: one page with its human answer against an extracted text, and means with 95 % intervals.

Words are runs of letters and digits in lower case; each Han, kana or Hangul character is a word. F1, precision and
recall of a page come from the multisets of words, and those of a set are means over its pages. A snippet is found if it
is a substring of the extracted text after both are in NFC and each run of white space is one space. Intervals are
percentiles of a bootstrap that draws sites with replacement, because pages of one site resemble each other.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from jobs.recipe import read_recipe
from pipeline.engine.rules import columns_of, evaluate_checks
from pipeline.engine.stage import Row
from pipeline.extract.extract import EXTRACT
from pipeline.language import LANGUAGE
from pipeline.models import ModelsConfig, ensure_model
from pipeline.quality.stage import QUALITY
from tests.support.gold_pages import GoldPage

RESAMPLES = 1_000
SEED = 18

_ONE_CHARACTER = (
    "\u1100-\u11ff\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3131-\u318e\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af"
)
_WORD = re.compile(rf"[{_ONE_CHARACTER}]|[^\W_{_ONE_CHARACTER}]+")


@dataclass(frozen=True)
class Overlap:
    """Agreement of two texts, each number in 0..1."""

    f1: float
    precision: float
    """Share of the extracted words that are in the answer."""
    recall: float
    """Share of the answer's words that are extracted."""


@dataclass(frozen=True)
class PageScore:
    """What an extractor did on one page."""

    extractor: str
    page: str
    """The key of the page."""
    url: str
    set: str
    site: str
    language: str | None
    page_type: str | None
    num_bytes: int
    """Size of the page [bytes]."""
    seconds: float
    """CPU time of the extraction [s]."""
    error: str | None
    """The exception's class and message; the page then counts as an empty extraction."""
    num_words: int
    """Words of the extracted text."""
    f1: float | None
    """None if the page has no answer text; so are precision and recall."""
    precision: float | None
    recall: float | None
    num_with: int
    found_with: int
    """Snippets that must appear: their number, and that of those found."""
    num_without: int
    found_without: int
    """Snippets that must not appear: their number, and that of those found."""
    broken: tuple[str, ...] | None
    """Rules of the recipe that drop the extracted text, empty if it is kept; None if the answer text is dropped too."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    value: float
    low: float
    high: float
    num_pages: int
    """Pages on which it is measured."""


Ratio = tuple[float, float]
"""Numerator and denominator; a measure of some pages is the quotient of the sums."""
Measure = Callable[[PageScore], Ratio | None]
"""A page's part of a measure; None if the page has none."""


def words(text: str) -> list[str]:
    """Return the words of a text, in NFC and lower case."""
    return _WORD.findall(unicodedata.normalize("NFC", text).lower())


def overlap(answer: str, text: str) -> Overlap:
    """Return the agreement of an extracted text with an answer that has at least one word."""
    expected, extracted = Counter(words(answer)), Counter(words(text))
    common = (expected & extracted).total()
    if not common:
        return Overlap(0.0, 0.0, 0.0)
    size, answer_size = extracted.total(), expected.total()
    return Overlap(2 * common / (size + answer_size), common / size, common / answer_size)


def found_snippets(snippets: Sequence[str], text: str) -> int:
    """Return how many of the snippets a text contains, whatever its white space."""
    flat = _flat(text)
    return sum(_flat(snippet) in flat for snippet in snippets)


def _flat(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


class RecipeRules:
    """The rules of a shipped recipe that drop a document for its language or quality."""

    def __init__(self, recipe: str = "web", settings: Sequence[str] = ()):
        """Load the stages of the recipe with other settings, such as `quality.min_words=30`.

        Raises ConfigError if the language model can neither be found nor fetched.
        """
        sections = read_recipe(recipe, ['source.paths=["gold"]', *settings])
        self._functions, self._checks = [], []
        self._good: dict[str, bool] = {}
        for stage in (EXTRACT, LANGUAGE, QUALITY):
            config = sections[stage.name]
            paths = {
                name: str(ensure_model(model, ModelsConfig()).path) for name, model in stage.models(config).items()
            }
            self._functions.append(stage.make(config, paths))
            self._checks += stage.checks(config, paths, {})
        self.quality_checks = list(QUALITY.checks(sections["quality"], paths, {}))

    def keeps_answer(self, page: GoldPage) -> bool:
        """Return whether the page has an answer text that the recipe keeps. The verdict is stored for the next call."""
        if page.key not in self._good:
            self._good[page.key] = page.text is not None and not self.broken(page.text)
        return self._good[page.key]

    def broken(self, text: str) -> tuple[str, ...]:
        """Return the names of the rules that a main text breaks, each once; empty if the recipe keeps it.

        A text that the stages `extract` or `language` drop has this one rule: nothing more is measured on it.
        """
        row, dropped = self.row_of(text)
        if dropped is not None:
            return (dropped,)
        columns = {name: pa.array([row.get(name)]) for name in columns_of(self._checks)}
        columns = {name: c.cast(pa.float64()) if c.type == pa.null() else c for name, c in columns.items()}
        broken = evaluate_checks(self._checks, pa.RecordBatch.from_pydict(columns)).broken[:, 0]
        return tuple(dict.fromkeys(check.reason for check, breaks in zip(self._checks, broken) if breaks))

    def row_of(self, text: str) -> tuple[Row, str | None]:
        """Return the row of a main text after the stages, and the rule of the stage that drops it, if one does."""
        row: Row = {"text": text}
        for function in self._functions:
            if drop := function(row):
                return row, drop.rule
        return row, None

    def quality_row(self, text: str, language: str) -> Row:
        """Return the row of a text after the stage `quality` alone."""
        row: Row = {"text": text, "language": language}
        self._functions[-1](row)
        return row


def score_page(
    extractor: str, page: GoldPage, text: str, seconds: float, error: str | None, rules: RecipeRules
) -> PageScore:
    """Return the score of a text that an extractor returned for a page."""
    agreement = None if page.text is None else overlap(page.text, text)
    return PageScore(
        extractor=extractor,
        page=page.key,
        url=page.url,
        set=page.set,
        site=page.site,
        language=page.language,
        page_type=page.page_type,
        num_bytes=page.num_bytes,
        seconds=seconds,
        error=error,
        num_words=len(words(text)),
        f1=agreement and agreement.f1,
        precision=agreement and agreement.precision,
        recall=agreement and agreement.recall,
        num_with=len(page.with_),
        found_with=found_snippets(page.with_, text),
        num_without=len(page.without),
        found_without=found_snippets(page.without, text),
        broken=rules.broken(text) if rules.keeps_answer(page) else None,
    )


MEASURES: Mapping[str, Measure] = {
    "f1": lambda score: None if score.f1 is None else (score.f1, 1),
    "precision": lambda score: None if score.precision is None else (score.precision, 1),
    "recall": lambda score: None if score.recall is None else (score.recall, 1),
    "with": lambda score: (score.found_with, score.num_with) if score.num_with else None,
    "without": lambda score: (score.found_without, score.num_without) if score.num_without else None,
    "empty": lambda score: None if score.f1 is None and not score.num_with else (not score.num_words, 1),
    "lost": lambda score: None if score.broken is None else (bool(score.broken), 1),
    "errors": lambda score: (score.error is not None, 1),
}
"""F1, precision and recall of words; shares of wanted and of unwanted snippets found; share of pages with an answer
text or wanted snippets on which nothing is extracted; share of the good documents, whose answer the recipe keeps, that
are lost because the recipe drops the extracted text; share of pages on which the extractor failed."""


def estimate(scores: Sequence[PageScore], measure: Measure) -> Estimate | None:
    """Return a measure of some pages with its interval; None if no page has it."""
    measured = [(score.site, part) for score in scores if (part := measure(score)) is not None]
    return bootstrap([site for site, _ in measured], [part for _, part in measured]) if measured else None


def bootstrap(sites: Sequence[str], parts: Sequence[Ratio]) -> Estimate:
    """Return the quotient of the sums of `parts`, with the 2.5th and 97.5th percentile over resamples of sites.

    `sites` has the site of each part. The result does not depend on the order of the pages, but for rounding.
    """
    names, numbers = np.unique(np.array(sites), return_inverse=True)
    sums = np.array([np.bincount(numbers, column, len(names)) for column in zip(*parts)])
    draws = np.random.default_rng(SEED).integers(0, len(names), (RESAMPLES, len(names)))
    numerators, denominators = sums[:, draws].sum(axis=2)
    low, high = np.percentile(numerators / denominators, [2.5, 97.5])
    value = sums[0].sum() / sums[1].sum()
    return Estimate(float(value), float(low), float(high), len(parts))


@dataclass(frozen=True)
class Comparison:
    """Two extractors on the same pages: the mean of the differences of F1, first minus second."""

    difference: Estimate
    pages: tuple[tuple[PageScore, PageScore], ...]
    """Scores of each page by the first and by the second, from the largest gain of the first to its largest loss."""


def compare(first: Sequence[PageScore], second: Sequence[PageScore]) -> Comparison:
    """Return the paired comparison of two extractors. Raises ValueError if no page with an answer has both scores."""
    others = {score.page: score for score in second}
    pairs = [(score, others[score.page]) for score in first if score.f1 is not None and score.page in others]
    if not pairs:
        raise ValueError("compare: expected pages with an answer that both extractors read, got none.")
    pairs.sort(key=lambda pair: (pair[1].f1 - pair[0].f1, pair[0].page))
    parts = [(a.f1 - b.f1, 1.0) for a, b in pairs]
    return Comparison(bootstrap([a.site for a, _ in pairs], parts), tuple(pairs))
