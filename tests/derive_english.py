"""Derive the English limits of `pipeline/text/english.toml`, and measure on other pages and labels what they drop.

    python -m tests.derive_english [--write] [--repeats 10]

Every limit starts at a percentile of the main texts that people marked, as for other languages, and never stricter
than published. People's labels then decide which limits pay to be stricter: the step that drops the most bad documents
for the pages that it costs is taken, until BUDGET of the pages is dropped. Steps are percentiles, so that a limit never
depends on one document. The figures are cross-fitted: sites and labels are split into halves or fifths, and each is
measured by limits that were derived without it; the mean over random splits is printed. Intervals are percentiles of a
bootstrap over sites or judged documents. The set `daniel` (GPL) is only measured.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import penstock
from bench.quality import lines_of, table
from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig
from pipeline.engine.stage import Check, Row
from pipeline.fit.classifier import kappa
from pipeline.models import ModelsConfig, ensure_model
from pipeline.quality.stage import ENGLISH
from pipeline.text.profiles import ENGLISH_LIMITS
from schemas.tables import DOCUMENTS
from tests.fit_main_text import TRAINED
from tests.support.gold_measure import RecipeRules
from tests.support.gold_pages import gold_pages
from tests.support.paths import SHARED

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Limits = dict[str, float]
"""Limit by setting, where a larger value is always worse: those of minima are negative."""

TAIL, MARGIN = 0.005, 0.25
"""Percentile of a limit that labels do not move, and its margin, as `penstock derive-profiles` has them. Limits of
repetition have no margin: the judged documents have little repetition, so they cannot tell what a loose limit costs."""
STEPS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05)
"""Shares of the pages that a limit may drop when labels move it."""
BUDGET = 0.08
"""Maximum share of the pages that the limits drop together."""
GOOD_WEIGHT = 0.5
"""How many dropped bad documents a dropped good one is worth. With 1, fewer of both are dropped for the same pages."""
FIXED = ("max_words", "max_lorem_ipsum")
"""Settings whose published limits stay."""
ALWAYS_PUBLISHED = (*FIXED, "min_words", "min_stop_words")
"""Settings whose limits start as published, as in the profiles of other languages."""
BASELINE = ("quality.english_limits='published'", "quality.by_language={}", "quality.max_dup_line_chars=0.05")
"""Settings of the recipe `web` with published limits, but the limit of repeated lines that it had for resiliparse."""
CLASSIFIER_LIMITS = (0.0, 0.2, 0.5)
NAME = "quality-en"
LOST = "lost"
"""Key of a row that an earlier stage drops."""
SEED, RESAMPLES = 18, 1_000


@dataclass(frozen=True, eq=False)
class Measured:
    """What the rules compare of some English texts."""

    values: Mapping[str, Floats]
    """Value of each text by setting, negative for minima; minus infinity where a text has none."""
    scores: Floats
    """Score of the shipped classifier."""
    lost: Mask
    """Texts that an earlier stage drops, such as empty ones."""

    def breaks(self, limits: Mapping[str, float], min_score: float = 0.0) -> Mask:
        """Return which texts are lost, break a limit, or have a lower score."""
        broken: Mask = self.lost | (self.scores < min_score)
        for setting, limit in limits.items():
            broken |= self.values[setting] > limit
        return broken


def measure_rows(rows: Sequence[Row], checks: Sequence[Check]) -> Measured:
    """Return what the checks compare of the rows of the stage `quality`."""
    place = str(ensure_model(NAME, ModelsConfig()).path)
    classify = CLASSIFIER.make(ClassifierConfig(models={NAME: NAME}), {NAME: place})
    scores = []
    for row in rows:
        classified: Row = {"_body": row["_body"], "language": ENGLISH}
        classify(classified)
        scores.append(classified["classifier_scores"][NAME])
    values = {}
    for check in checks:
        column = np.array([np.nan if row.get(check.column) is None else row[check.column] for row in rows], np.float64)
        values[check.setting] = np.nan_to_num(column * sign_of(check.setting), nan=-np.inf)
    return Measured(values, np.array(scores), np.array([LOST in row for row in rows]))


def sign_of(setting: str) -> int:
    """Return -1 for a minimum and 1 for a maximum."""
    return -1 if setting.startswith("min_") else 1


def is_repetition(setting: str) -> bool:
    """Return True for the limits of repeated lines, paragraphs and n-grams."""
    return setting.startswith(("max_dup_", "max_top_"))


def first_limits(texts: Measured, pages: Mask, checks: Sequence[Check]) -> Limits:
    """Return the limits before labels move them: never stricter than published."""
    limits = {}
    for check in checks:
        setting, sign = check.setting, sign_of(check.setting)
        published = sign * check.limits[ENGLISH]
        if setting in ALWAYS_PUBLISHED:
            limits[setting] = published
            continue
        edge = sign * float(np.quantile(texts.values[setting][pages], 1 - TAIL))
        is_share = (DOCUMENTS.field(check.column).metadata or {}).get(b"unit") == b"ratio"
        room = MARGIN * (min(edge, 1 - edge) if is_share and edge < 1 else edge)
        limits[setting] = max(published, sign * edge + (0 if is_repetition(setting) else room))
    return limits


def derive(
    texts: Measured, pages: Mask, judged: Measured, labels: tuple[Mask, Mask], checks: Sequence[Check]
) -> Limits:
    """Return limits from the main texts `pages` and the judged documents of `labels` (documents to use, good)."""
    used, good = labels
    limits = first_limits(texts, pages, checks)
    steps = {
        name: sorted({float(np.quantile(values[pages], 1 - share)) for share in STEPS}, reverse=True)
        for name, values in texts.values.items()
        if name not in FIXED
    }
    weight = used.sum() / pages.sum()
    while True:
        costs, drops = texts.breaks(limits) & pages, judged.breaks(limits) & used
        best, choice = 0.0, None
        for name, stricter in steps.items():
            for limit in stricter:
                if limit >= limits[name]:
                    continue
                more = pages & ~costs & (texts.values[name] > limit)
                new = used & ~drops & (judged.values[name] > limit)
                gain = int((new & ~good).sum()) - GOOD_WEIGHT * int((new & good).sum())
                if gain <= 0 or costs.sum() + more.sum() > BUDGET * pages.sum():
                    continue
                worth = gain / (more.sum() * weight + 0.5)  # half a document: a free step is not worth everything
                if worth > best:
                    best, choice = worth, (name, limit)
        if choice is None:
            return limits
        limits[choice[0]] = choice[1]


def rounded(limits: Limits, checks: Sequence[Check]) -> dict[str, float]:
    """Return the limits as settings, rounded in the direction that is less strict, sorted by name."""
    result = {}
    for check in checks:
        digits = 1 if pa.types.is_integer(DOCUMENTS.field(check.column).type) else 1000
        value = math.ceil(round(limits[check.setting] * digits, 6)) / digits
        result[check.setting] = abs(value) if value else 0.0
    return dict(sorted(result.items()))


def toml_of(limits: Mapping[str, float], published: Mapping[str, float], num_pages: int, num_judged: int) -> str:
    """Return the text of `english.toml`: the limits that differ from the published ones."""
    lines = [
        f"# Derived by `python -m tests.derive_english --write` from main texts of {num_pages} English pages and the",
        f"# labels of {num_judged} documents: tail {TAIL}, margin {MARGIN}, budget {BUDGET}. Others are as published.",
        "",
        f"[{ENGLISH}]",
        'script = "Latn"',
        f"[{ENGLISH}.limits]",
    ]
    lines += [f"{name} = {limit:g}" for name, limit in limits.items() if limit != published[name]]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True, eq=False)
class Data:
    """The pages and the judged documents."""

    answers: Measured
    """Main texts of English pages by people."""
    ours: Measured
    """Texts of the same pages by `penstock`."""
    sites: npt.NDArray[Any]
    usable: Mask
    """Pages of sets from which limits may be derived."""
    judged: Measured
    good: Mask
    others: tuple[int, int]
    """Pages in other wanted languages, or of an uncertain language: their number, and how many of them are dropped."""


def read_data(rules: RecipeRules) -> Data:
    """Read and measure everything."""
    pages, rows, ours, others = [], [], [], [0, 0]
    for page in gold_pages():
        if page.text is None:
            continue
        row, drop = rules.row_of(page.text)
        if drop == "language_not_wanted":
            continue
        if drop is not None or row["language"] != ENGLISH:
            others[0] += 1
            others[1] += bool(rules.broken(page.text))
            continue
        own, drop = rules.row_of(penstock.extract(page.html, extractor="penstock").text)
        pages.append(page)
        rows.append(row)
        ours.append({"_body": "", LOST: True} if drop is not None else own)
    judged = lines_of(SHARED / "quality" / "dclm_human.jsonl.gz")
    return Data(
        answers=measure_rows(rows, rules.quality_checks),
        ours=measure_rows(ours, rules.quality_checks),
        sites=np.array([page.site for page in pages]),
        usable=np.array([page.set in TRAINED for page in pages]),
        judged=measure_rows([rules.quality_row(row["text"], ENGLISH) for row in judged], rules.quality_checks),
        good=np.array([bool(row["label"]) for row in judged]),
        others=(others[0], others[1]),
    )


def cross_fitted(data: Data, checks: Sequence[Check], folds: int, repeats: int) -> list[tuple[Limits, Mask, Mask]]:
    """Return, for each fold of each repeat, the limits, and the pages and documents that they were not derived from."""
    random = np.random.default_rng(SEED)
    names, numbers = np.unique(data.sites, return_inverse=True)
    fitted = []
    for _ in range(repeats):
        pages, documents = random.integers(0, folds, len(names))[numbers], random.integers(0, folds, len(data.good))
        for fold in range(folds):
            labels = (documents != fold, data.good)
            limits = derive(data.answers, (pages != fold) & data.usable, data.judged, labels, checks)
            fitted.append((limits, pages == fold, documents == fold))
    return fitted


def mean_dropped(texts: Measured, fitted: Sequence[tuple[Limits, Mask]], min_score: float) -> Floats:
    """Return how often each text is dropped by limits that were not derived from it."""
    total, counts = np.zeros(len(texts.scores)), np.zeros(len(texts.scores))
    for limits, measured in fitted:
        total += measured & texts.breaks(limits, min_score)
        counts += measured
    return total / np.maximum(counts, 1)


def interval(figure: Any, groups: npt.NDArray[Any]) -> str:
    """Return a figure of indices with its 95 % interval; groups are drawn with replacement."""
    random = np.random.default_rng(SEED)
    names, numbers = np.unique(groups, return_inverse=True)
    members = [np.flatnonzero(numbers == number) for number in range(len(names))]
    draws = [
        figure(np.concatenate([members[one] for one in random.integers(0, len(names), len(names))]))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{figure(np.arange(len(groups))):.3f} ({low:.3f}–{high:.3f})"


def mean_kappa(dropped: Floats, good: Mask) -> float:
    """Return kappa of decisions of which only the share of splits that drop a document is known: the expected one."""
    kept = 1 - dropped
    agreed = (kept * good + dropped * ~good).mean()
    chance = kept.mean() * good.mean() + dropped.mean() * (1 - good.mean())
    return float((agreed - chance) / (1 - chance))


def row_of(name: str, data: Data, drops: tuple[Floats, Floats, Floats]) -> list[Any]:
    """Return a row of the table: what is dropped of pages (people's text, ours) and of judged documents."""
    answers, ours, judged = drops
    documents, good = np.arange(len(data.good)), data.good
    every = (answers.sum() + data.others[1]) / (len(answers) + data.others[0])
    return [
        name,
        every,
        interval(lambda chosen: answers[chosen].mean(), data.sites),
        interval(lambda chosen: ours[chosen].mean(), data.sites),
        interval(lambda chosen: judged[chosen][~good[chosen]].mean(), documents),
        interval(lambda chosen: judged[chosen][good[chosen]].mean(), documents),
        interval(lambda chosen: mean_kappa(judged[chosen], good[chosen]), documents),
    ]


def figures(data: Data, published: Limits, fitted: Mapping[str, Sequence[tuple[Limits, Mask, Mask]]]) -> str:
    """Return the table of published limits, and of limits derived on other pages and labels."""
    texts = (data.answers, data.ours, data.judged)
    of_kind: dict[str, list[Sequence[tuple[Limits, Mask]]]] = {
        "published": [[(published, np.ones(len(one.scores), bool))] for one in texts]
    }
    for name, limits in fitted.items():
        pages, documents = [(one, here) for one, here, _ in limits], [(one, there) for one, _, there in limits]
        of_kind[name] = [pages, pages, documents]
    rows = []
    for name, parts in of_kind.items():
        for min_score in CLASSIFIER_LIMITS:
            answers, ours, judged = (mean_dropped(one, part, min_score) for one, part in zip(texts, parts))
            rows.append(row_of(f"{name}, {NAME} {min_score:g}", data, (answers, ours, judged)))
    header = ["limits", "all main texts", "English main texts", "our text of them", "bad", "good", "kappa"]
    return table(header, rows)


def main() -> int:
    """Measure, print, and write the limits if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="random splits to average over")
    parser.add_argument("--write", action="store_true", help="write pipeline/text/english.toml")
    arguments = parser.parse_args()
    rules = RecipeRules("web", BASELINE)
    checks, data = rules.quality_checks, read_data(rules)
    published = {check.setting: sign_of(check.setting) * check.limits[ENGLISH] for check in checks}
    print(f"{len(data.sites)} English pages, {data.others[0]} others, {len(data.good)} judged documents\n")
    folds = {"derived on halves": 2, "derived on four fifths": 5}
    fitted = {name: cross_fitted(data, checks, number, arguments.repeats) for name, number in folds.items()}
    print(figures(data, published, fitted))
    limits = derive(data.answers, data.usable, data.judged, (np.ones(len(data.good), bool), data.good), checks)
    dropped = data.judged.breaks(limits)
    print(f"derived from all: kappa {kappa(~dropped, data.good):.3f} on the documents that chose the limits\n")
    text = toml_of(rounded(limits, checks), rounded(published, checks), int(data.usable.sum()), len(data.good))
    print(text)
    if arguments.write:
        ENGLISH_LIMITS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
