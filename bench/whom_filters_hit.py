"""False positives of a recipe's toxicity stage on cases that are not hateful, by the people they name and language.

    python -m bench.whom_filters_hit DATA [--recipe web] [--set toxicity.max_words=0]

DATA is a file of JSON lines, gzipped or not, with `text`, `label` (hateful or non-hateful), `target` and `lang`, such
as Multilingual HateCheck (Röttger et al. 2022, arXiv 2206.09917). A case is flagged if a limit of the stage would drop
a document of this text. Targets are compared within their languages; p is adjusted for the number of targets.
"""

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.recipe import read_recipe
from pipeline.bias.statistics import adjusted, compare, wilson
from pipeline.engine.rules import RowChecks
from pipeline.engine.stage import extend_schema
from pipeline.models import ModelsConfig, ensure_model
from pipeline.toxicity.stage import TOXICITY
from schemas.config import Recipe
from schemas.tables import DOCUMENTS

NOT_HATEFUL, HATEFUL = "non-hateful", "hateful"
NO_TARGET = "none"
"""Target of a case that names no people, such as one of profanity alone."""


@dataclass(frozen=True)
class Case:
    """One test case, and whether the stage measured it and would drop it."""

    language: str
    target: str
    label: str
    functionality: str
    is_measured: bool
    is_flagged: bool


def read_cases(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file of JSON lines, which may be gzipped."""
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as stream:
        yield from map(json.loads, stream)


def judge_cases(rows: Iterator[Mapping[str, Any]], recipe: Recipe) -> list[Case]:
    """Return the cases as the toxicity stage of a recipe judges them; a language that it cannot measure is marked."""
    section = recipe[TOXICITY.name]
    models = {
        name: place if Path(place).exists() else str(ensure_model(place, ModelsConfig()).path)
        for name, place in TOXICITY.models(section).items()
    }
    measure = TOXICITY.make(section, models)
    kinds = {field.name: field.type for field in extend_schema(DOCUMENTS, [TOXICITY])}
    checks = RowChecks(TOXICITY.checks(section, models, {}), kinds)
    cases = []
    for values in rows:
        row = {"text": values["text"], "_body": values["text"], "language": values["lang"], "source": "cases"}
        measure(row)
        is_measured = any(row.get(name) is not None for name in TOXICITY.adds)
        flagged = checks.first_broken(row) >= 0
        target, functionality = values.get("target") or NO_TARGET, values.get("functionality") or ""
        cases.append(Case(values["lang"], target, values["label"], functionality, is_measured, flagged))
    return cases


def lines_of(cases: Sequence[Case], name: str) -> list[tuple[str, int, int, int, int]]:
    """Return, by value of a field: cases that are not hateful, those flagged, hateful cases, those flagged."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        counts[getattr(case, name)].update([case.label, f"{case.label} flagged"] if case.is_flagged else [case.label])
    columns = [column for label in (NOT_HATEFUL, HATEFUL) for column in (label, f"{label} flagged")]
    return [(value, *(own[column] for column in columns)) for value, own in sorted(counts.items())]


def levels_of(cases: Sequence[Case]) -> dict[str, float]:
    """Return, by target, the adjusted p of its share of flagged cases that are not hateful, against other targets."""
    cases = [case for case in cases if case.label == NOT_HATEFUL and case.target != NO_TARGET]
    places = {language: at for at, language in enumerate(sorted({case.language for case in cases}))}
    everyone = np.zeros((2, len(places)), np.int64)
    by_target: dict[str, Any] = defaultdict(lambda: np.zeros((2, len(places)), np.int64))
    for case in cases:
        for counts in (everyone, by_target[case.target]):
            counts[:, places[case.language]] += (1, case.is_flagged)
    compared = {name: compare((own[0], own[1]), (everyone[0], everyone[1])) for name, own in by_target.items()}
    found = {name: rates.p for name, rates in compared.items() if rates is not None}
    return dict(zip(found, adjusted([*found.values()])))


def main() -> None:
    """Print the shares of flagged cases by target, language and kind of test."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--recipe", default="web")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe, ['source.paths=["none"]', *arguments.overrides])
    cases = judge_cases(read_cases(arguments.data), recipe)
    measured = [case for case in cases if case.is_measured]
    left_out = sorted({case.language for case in cases if not case.is_measured})
    print(f"{len(cases):,} cases, {len(measured):,} measured; languages that are not: {left_out or 'none'}")
    levels = levels_of(measured)
    for name in ("target", "language", "functionality"):
        print(f"\n{name:28} not hateful  flagged     share (95 % interval)     hateful  flagged   share  adjusted p")
        for value, number, flagged, hateful, hits in lines_of(measured, name):
            low, high = wilson(flagged / number, number) if number else (0.0, 1.0)
            share = f"{flagged / number:7.1%} ({low:.1%} to {high:.1%})" if number else "–"
            rate = f"{hits / hateful:7.1%}" if hateful else "–"
            level = f"{levels[value]:.3g}" if name == "target" and value in levels else ""
            print(f"{value:28} {number:11,} {flagged:8,} {share:>30} {hateful:7,} {hits:8,} {rate:>7}  {level}")


if __name__ == "__main__":
    main()
