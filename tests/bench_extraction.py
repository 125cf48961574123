"""Extractors side by side on real pages with the main text that people marked: F1, snippets, documents lost, CPU time.

    python -m tests.bench_extraction [--sets NAME…] [--extractors NAME…] [--compare A B] [--json FILE]
                                     [--save FILE] [--load FILE] [--before FILE] [--every N] [--processes N]

The extractors of the pipeline run as the stage `extract` with its default settings. Other libraries run where they are
installed (`pip install -e '.[extractors]'`). `--save` writes the score of every page as JSON lines, and `--load` reads
such a file in place of running the extractors in it: both together resume a run that was stopped. `--before` reads the
scores of an earlier version, under names such as `resiliparse (before)`. A complete run of all libraries takes about 25
minutes of CPU.
The measures are explained in `tests/support/gold_measure.py`.
"""

import argparse
import json
import multiprocessing
import signal
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

from tests.support.gold_extractors import Extract, label_of, loaders
from tests.support.gold_measure import (
    MEASURES,
    Comparison,
    Estimate,
    PageScore,
    RecipeRules,
    compare,
    estimate,
    score_page,
)
from tests.support.gold_pages import MORE, SETS, GoldPage, gold_pages, missing_data

PAGE_SECONDS = 60.0
"""Wall-clock time after which an extraction is stopped and counted as an error [s]. Native code is not interrupted."""
MIN_GROUP = 5
"""Minimum number of pages for which a language has a row of its own in the printed tables."""
SIZES = (30_000, 100_000, 300_000)
"""Bounds between the groups of page sizes [bytes]."""
SIZE_NAMES = ("to 30 kB", "30 to 100 kB", "100 to 300 kB", "over 300 kB")
WCXB = ("wcxb", MORE)
"""Sets whose pages have one of seven page types."""
BASE = "trafilatura"
"""Extractor from which the others' differences are printed."""
NUM_LARGEST = 20
"""Pages that a comparison prints for each of the two directions."""


# --------------------------------------------------------------------------------------------------------- measurement


class PageTimeout(BaseException):
    """An extraction took longer than PAGE_SECONDS. Not an Exception, so that no library catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise PageTimeout in the block after this wall-clock time [s]. Only in the main thread.

    A timer of CPU time is no alternative: some systems then measure the CPU time of the process in steps of 4 ms.
    """

    def stop(number: int, frame: Any) -> None:
        raise PageTimeout

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def extract_timed(extract: Extract, page: GoldPage) -> tuple[str, float, str | None]:
    """The extracted text, the CPU time [s], and the error; the text is empty if the extractor fails."""
    text, error = "", None
    with time_limit(PAGE_SECONDS):
        start = time.thread_time()
        try:
            text = extract(page)
        except PageTimeout:
            error = f"PageTimeout: stopped after {PAGE_SECONDS:g} s"
        except Exception as failure:  # any exception of a foreign library is counted and printed
            error = " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
        seconds = time.thread_time() - start
    if not isinstance(text, str):
        text, error = "", f"TypeError: expected a text, got {type(text).__name__}"
    return text, seconds, error


def measure(name: str, extract: Extract, pages: Sequence[GoldPage], rules: RecipeRules) -> list[PageScore]:
    """The score of every page. One of each fold and language is extracted first, so that no time includes loading."""
    firsts = {key: page for page in reversed(pages) for key in (page.fold, page.language)}
    for page in firsts.values():
        extract_timed(extract, page)
    return [score_page(name, page, *extract_timed(extract, page), rules) for page in pages]


def measure_all(names: Iterable[str], pages: Sequence[GoldPage], processes: int) -> Iterator[list[PageScore] | str]:
    """For each extractor its scores, or the reason why it is skipped, in the order of the names."""
    rules = RecipeRules()
    for page in pages:
        rules.keeps_answer(page)  # once, before the processes start
    run = partial(_measure_named, pages=pages, rules=rules)
    if processes == 1:
        yield from map(run, names)
        return
    _JOB.append(run)  # inherited by the processes: the pages are not sent to them
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_run_job, names)


_JOB: list[Callable[[str], list[PageScore] | str]] = []


def _run_job(name: str) -> list[PageScore] | str:
    return _JOB[-1](name)


def _measure_named(name: str, pages: Sequence[GoldPage], rules: RecipeRules) -> list[PageScore] | str:
    try:
        extract = loaders()[name]()
    except ImportError as error:
        return f"{name}: skipped, it is not installed ({error})"
    scores = measure(name, extract, pages, rules)
    print(f"{name}: {len(scores)} pages, {sum(score.seconds for score in scores):.0f} s of CPU", file=sys.stderr)
    return scores


def read_scores(path: Path) -> dict[str, list[PageScore]]:
    """The scores in a file that `--save` wrote, by extractor."""
    scores: dict[str, list[PageScore]] = {}
    names = {field.name for field in fields(PageScore)}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.keys() != names:
            raise SystemExit(f"{path}: expected scores with {sorted(names)}, got {sorted(row)}. Write the file again.")
        row["broken"] = None if row["broken"] is None else tuple(row["broken"])
        scores.setdefault(row["extractor"], []).append(PageScore(**row))
    return scores


# ----------------------------------------------------------------------------------------------------------- the report

Scores = Mapping[str, Sequence[PageScore]]
"""The scores of each extractor."""
Group = Callable[[PageScore], str | None]


def size_of(score: PageScore) -> str:
    """The group of a page's size."""
    return SIZE_NAMES[bisect_right(SIZES, score.num_bytes)]


GROUPS: Mapping[str, Group] = {
    "set": lambda score: score.set,
    "language": lambda score: score.language,
    "page_type": lambda score: score.page_type,
    "wcxb_type": lambda score: score.page_type if score.set in WCXB else None,
    "size": size_of,
}
TITLES: Mapping[str, str] = {
    "f1": "F1",
    "without": "Share of the unwanted snippets found",
    "empty": "Share of the pages with an answer on which nothing is extracted",
    "lost": "Good documents lost",
}
"""The four figures that are printed by set, language and page type."""


def pooled(scores: Sequence[PageScore]) -> list[PageScore]:
    """The scores on the pages of `html_gold`."""
    return [score for score in scores if score.set != MORE]


def grouped(scores: Sequence[PageScore], group: Group) -> dict[str, list[PageScore]]:
    """The scores by group, the largest group first; pages that have none are left out."""
    groups: dict[str, list[PageScore]] = {}
    for score in scores:
        if (name := group(score)) is not None:
            groups.setdefault(name, []).append(score)
    return dict(sorted(groups.items(), key=lambda entry: (-len(entry[1]), entry[0])))


def times(scores: Sequence[PageScore]) -> dict[str, float]:
    """Mean, median and 95th percentile of the CPU time of a page [ms]."""
    values = sorted(score.seconds * 1e3 for score in scores)
    return {"mean": mean(values), "median": median(values), "p95": values[int(0.95 * (len(values) - 1))]}


def lost_by_rule(scores: Sequence[PageScore]) -> dict[str, float]:
    """Share of the good documents whose extracted text breaks a rule, by rule; one document may break several."""
    good = [score.broken for score in scores if score.broken is not None]
    counts = Counter(rule for broken in good for rule in broken)
    return {rule: count / len(good) for rule, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))}


def figures(scores: Sequence[PageScore]) -> dict[str, Any]:
    """Everything that is measured on some pages: each measure with its interval, the times, the rules, the errors."""
    estimates = {name: estimate(scores, part) for name, part in MEASURES.items()}
    return {
        "pages": len(scores),
        **{name: asdict(value) for name, value in estimates.items() if value is not None},
        "milliseconds": times(scores),
        "lost_by_rule": lost_by_rule(scores),
        "error_kinds": dict(Counter(score.error.partition(":")[0] for score in scores if score.error)),
    }


def as_json(scores: Scores) -> dict[str, Any]:
    """The whole report: for each extractor all figures over `html_gold`, and by set, language, page type and size."""
    return {
        name: {
            "label": label_of(name),
            "html_gold": figures(pooled(of_one)) if pooled(of_one) else None,
            **{
                f"by_{kind}": {key: figures(part) for key, part in grouped(of_one, group).items()}
                for kind, group in GROUPS.items()
            },
        }
        for name, of_one in scores.items()
    }


def cell(value: Estimate | None) -> str:
    """A measure and half the width of its interval, as `.831±.009`."""
    if value is None:
        return "-"
    return f"{_short(value.value)}±{_short((value.high - value.low) / 2)}"


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with the title before it."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows)]
    return "\n".join([f"\n{title}\n", *lines])


def overview(scores: Scores) -> str:
    """The table of all extractors over `html_gold`, with F1 on the set of `html_gold_more`."""
    head = ["extractor", "F1", "precision", "recall", f"F1 {MORE}", "with", "without", "empty", "good documents lost"]
    rows = []
    for name, of_one in scores.items():
        main = pooled(of_one)
        more = estimate([score for score in of_one if score.set == MORE], MEASURES["f1"])
        values = {kind: cell(estimate(main, part)) for kind, part in MEASURES.items()}
        shown = [values["f1"], values["precision"], values["recall"], cell(more)]
        rows.append([label_of(name), *shown, *(values[kind] for kind in ("with", "without", "empty", "lost"))])
    return table("All pages of html_gold (F1: those with an answer text), ± half of the 95 % interval", head, rows)


def costs(scores: Scores) -> str:
    """The table of CPU time, by page size too, and of errors, over all sets."""
    head = ["extractor", "mean", "median", "p95", *SIZE_NAMES, "errors"]
    rows = []
    for name, of_one in scores.items():
        sizes = grouped(of_one, size_of)
        by_size = [f"{times(sizes[size])['mean']:.1f}" if size in sizes else "-" for size in SIZE_NAMES]
        errors = sum(score.error is not None for score in of_one)
        rows.append([label_of(name), *(f"{t:.1f}" for t in times(of_one).values()), *by_size, str(errors)])
    return table("CPU time of a page [ms], over all sets; by page size: the mean. Pages with an error", head, rows)


def by_group(title: str, scores: Scores, kind: str, part: str) -> str:
    """A table of one measure by group; a column for each extractor."""
    groups = {name: grouped(of_one, GROUPS[kind]) for name, of_one in scores.items()}
    first = next(iter(groups.values()))
    rows = []
    for key in first:
        estimates = [estimate(of_one.get(key, []), MEASURES[part]) for of_one in groups.values()]
        num_pages = max((value.num_pages for value in estimates if value), default=0)
        if num_pages >= MIN_GROUP:
            rows.append([key, str(num_pages), *map(cell, estimates)])
    return table(title, [kind.replace("_", " "), "pages", *scores], rows)


def differences(scores: Scores) -> str:
    """The table of paired differences of F1 from the extractor BASE, by set, language and type; empty without it."""
    if BASE not in scores or len(scores) < 2:
        return ""
    base = {kind: grouped(scores[BASE], GROUPS[kind]) for kind in ("set", "language", "wcxb_type")}
    others = [name for name in scores if name != BASE]
    rows = []
    for kind, groups in base.items():
        for key, of_base in groups.items():
            parts = [[score for score in scores[name] if GROUPS[kind](score) == key] for name in others]
            num_pages = sum(score.f1 is not None for score in of_base)
            if num_pages >= MIN_GROUP:
                name = f"{kind.replace('_', ' ')} {key}"
                rows.append([name, str(num_pages), *(signed(compare(part, of_base).difference) for part in parts)])
    return table(f"F1 minus that of {BASE}, paired by page", ["pages of", "pages", *others], rows)


def signed(value: Estimate) -> str:
    """A difference and half the width of its interval, as `+.012±.009`."""
    return f"{value.value:+.3f}±{_short((value.high - value.low) / 2)}".replace("0.", ".", 1)


def rules_lost(scores: Scores) -> str:
    """The table of the rules that drop the extracted text of a good document, over `html_gold`."""
    shares = {name: lost_by_rule(pooled(of_one)) for name, of_one in scores.items()}
    rules = sorted(
        {rule for share in shares.values() for rule in share}, key=lambda r: -max(s.get(r, 0) for s in shares.values())
    )
    rows = [[rule, *(_short(share.get(rule, 0.0)) for share in shares.values())] for rule in rules]
    return table("Good documents of html_gold lost, by rule (one may break several)", ["rule", *scores], rows)


def errors(scores: Scores) -> str:
    """The most frequent error of each extractor that failed."""
    lines = []
    for name, of_one in scores.items():
        kinds = Counter(score.error for score in of_one if score.error)
        lines += [f"{name}: {count} pages: {error}" for error, count in kinds.most_common(3)]
    return "\n".join(["\nErrors, the most frequent first\n", *lines]) if lines else ""


PLACES: Mapping[str, str] = {
    "set": "by set",
    "language": "by language, all sets",
    "page_type": "by page type, all sets that state it",
    "wcxb_type": "by page type, sets of WCXB",
}
"""Group → how a title names it."""


def report(scores: Scores) -> str:
    """The report on all extractors."""
    return "\n".join(
        [
            overview(scores),
            costs(scores),
            *(
                by_group(f"{title} {where}", scores, kind, part)
                for part, title in TITLES.items()
                for kind, where in PLACES.items()
            ),
            by_group("Share of the wanted snippets found by set", scores, "set", "with"),
            differences(scores),
            rules_lost(scores),
            errors(scores),
        ]
    )


def comparison(title: str, result: Comparison) -> str:
    """The mean difference with its interval, and the pages with the largest difference each way."""
    mean_difference = result.difference
    lines = [
        f"\n{title}: F1 {mean_difference.value:+.4f}, 95 % interval {mean_difference.low:+.4f} to "
        f"{mean_difference.high:+.4f}, {mean_difference.num_pages} pages"
    ]
    gains = [pair for pair in result.pages if pair[0].f1 > pair[1].f1][:NUM_LARGEST]
    losses = [pair for pair in reversed(result.pages) if pair[0].f1 < pair[1].f1][:NUM_LARGEST]
    for heading, pairs in (("largest gains", gains), ("largest losses", losses)):
        lines.append(f"  {heading}:")
        lines += [f"    {a.f1 - b.f1:+.3f}  {a.f1:.3f} {b.f1:.3f}  {a.page}  {a.url}" for a, b in pairs]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- the command


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench_extraction", description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="sets of pages; default: all")
    parser.add_argument("--extractors", nargs="+", metavar="NAME", help="default: all that are installed")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="the pages on which two extractors differ most")
    parser.add_argument("--json", type=Path, help="file for all figures with their intervals")
    parser.add_argument("--save", type=Path, help="file for the score of every page, JSON lines")
    parser.add_argument("--load", type=Path, help="file of --save; the extractors in it are not run again")
    parser.add_argument("--before", type=Path, help="file of --save by an earlier version; its names get `(before)`")
    parser.add_argument("--every", type=int, default=1, help="read one page in N of each set")
    parser.add_argument("--processes", type=int, default=1, help="extractors that run at the same time")
    given = parser.parse_args(argv)
    for name in ("every", "processes"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(given, name)}")
    return given


def stored_scores(given: argparse.Namespace) -> dict[str, list[PageScore]]:
    """The scores in the files of `--load` and `--before`, on the sets that are measured."""
    loaded = read_scores(given.load) if given.load else {}
    before = read_scores(given.before) if given.before else {}
    named = {**loaded, **{f"{name} (before)": scores for name, scores in before.items()}}
    return {name: [score for score in scores if score.set in given.sets] for name, scores in named.items()}


def names_of(given: argparse.Namespace, stored: Iterable[str]) -> list[str]:
    """The extractors to report. Raises SystemExit if one is unknown."""
    known = list(dict.fromkeys([*stored, *loaders()]))
    names = list(given.compare or given.extractors or known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"bench_extraction: expected extractors of {known}, got {unknown}. Correct the names.")
    return names


def check_pages(scores: Scores) -> None:
    """Raise SystemExit unless all extractors were measured on the same pages."""
    pages = {name: {score.page for score in of_one} for name, of_one in scores.items()}
    if len({frozenset(keys) for keys in pages.values()}) > 1:
        sizes = {name: len(keys) for name, keys in pages.items()}
        raise SystemExit(
            f"bench_extraction: expected the same pages for every extractor, got {sizes} pages. Use the --sets and "
            "--every of the stored scores."
        )


def save(file: Path | None, scores: Scores) -> None:
    """Write the file of `--save`; it is replaced in one step, so that it is complete at any time."""
    if file:
        lines = (json.dumps({**asdict(score), "extractor": name}) for name in scores for score in scores[name])
        new = file.with_name(f"{file.name}.new")
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.replace(file)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the extractors and print the report."""
    given = arguments(argv)
    if reason := missing_data(given.sets):
        raise SystemExit(f"bench_extraction: {reason}")
    stored = stored_scores(given)
    names = names_of(given, stored)
    new = [name for name in names if name not in stored]
    pages = []
    for name in given.sets if new else ():
        pages += islice(gold_pages((name,)), 0, None, given.every)
    scores: dict[str, list[PageScore]] = {name: stored[name] for name in names if name in stored}
    for name, result in zip(new, measure_all(new, pages, given.processes)) if new else ():
        if isinstance(result, str):
            print(result)
        else:
            scores[name] = result
            save(given.save, scores)  # after each one: a run that is stopped is resumed with --load
    scores = {name: scores[name] for name in names if name in scores}
    check_pages(scores)
    save(given.save, scores)
    if given.json:
        given.json.write_text(json.dumps(as_json(scores), indent=1) + "\n", encoding="utf-8")
    if not given.compare:
        print(report(scores))
    elif len(scores) == 2:
        print_comparison(scores)


def print_comparison(scores: Scores) -> None:
    """Print the comparison of two extractors over `html_gold` and over all sets."""
    (a, first), (b, second) = scores.items()
    parts = {"html_gold": (pooled(first), pooled(second)), "all sets": (first, second)}
    for title, (left, right) in parts.items():
        if any(score.f1 is not None for score in left):
            print(comparison(f"{a} minus {b}, {title}", compare(left, right)))


if __name__ == "__main__":
    main()
