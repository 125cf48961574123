"""Metadata of real pages beside trafilatura's: right, missing and wrong titles, authors and dates, and CPU time.

    python -m bench.metadata [--every N]

Right is equality of the letters and digits in lower case; authors are compared as sets, dates by day. `without` are
values for pages on which people marked none. Both sides read the same decoded pages and their URLs in one run, and
accept no date after the pages were fetched. The CPU time of ours is without the parse, which extraction shares; that of
all gold pages is printed last.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import date

import trafilatura
from resiliparse.parse.html import HTMLTree

from pipeline.extract.metadata import read_metadata
from pipeline.extract.metadata_values import squeezed
from tests.support.gold_pages import GoldPage, gold_pages, missing_data

FETCHED = date(2026, 3, 31)
"""A day after which no page of the data was fetched."""
WITH_ANSWERS = ("wcxb", "wcxb_more")
Fields = tuple[str | None, str | None, str | None]
"""Title, author, date."""
Reader = Callable[[GoldPage], tuple[Fields, float]]
"""Function from a page to its fields and the CPU time that reading them takes [s]."""


def ours(page: GoldPage) -> tuple[Fields, float]:
    """The fields by this project, from a parsed page."""
    tree = HTMLTree.parse(page.html)
    started = time.process_time()
    found = read_metadata(tree, page.url, FETCHED, page.html)
    seconds = time.process_time() - started
    return (found.title, found.author, found.date_published and found.date_published.isoformat()), seconds


def of_trafilatura(page: GoldPage) -> tuple[Fields, float]:
    """The fields by trafilatura, which parses the page."""
    started = time.process_time()
    dates = {"original_date": True, "extensive_search": True, "max_date": FETCHED.isoformat()}
    found = trafilatura.extract_metadata(page.html, default_url=page.url, date_config=dates)
    return (found.title, found.author, found.date), time.process_time() - started


def form(name: str, value: str | None) -> object:
    """The form in which values of a field are compared; false if there is no value."""
    if name == "author":
        return frozenset(filter(None, map(squeezed, re.split(r"[,;]| and | & ", value or ""))))
    return (value or "")[:10] if name == "date" else squeezed(value or "")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="read only every Nth page (default 1)")
    every = parser.parse_args().every
    if reason := missing_data():
        print(f"skipped: {reason}")
        return
    readers: dict[str, Reader] = {"penstock": ours, "trafilatura": of_trafilatura}
    counts: Counter[tuple[str, str, str]] = Counter()
    seconds = dict.fromkeys(readers, 0.0)
    pages = list(gold_pages(WITH_ANSWERS))[::every]
    for page in pages:
        for reader, read in readers.items():
            fields, spent = read(page)
            seconds[reader] += spent
            for name, answer, value in zip(("title", "author", "date"), (page.title, page.author, page.date), fields):
                truth, given = form(name, answer), form(name, value)
                kind = "right" if given == truth else "missing" if not given else "wrong" if truth else "without"
                counts[name, reader, kind if truth or given else "both null"] += 1
    print(
        f"{'field':<8} {'reader':<12} {'marked':>6} {'right':>6} {'missing':>7} {'wrong':>6} {'without':>7} {'F1':>6}"
    )
    for name in ("title", "author", "date"):
        for reader in readers:
            right, missing, wrong, without = (counts[name, reader, k] for k in ("right", "missing", "wrong", "without"))
            marked, given = right + missing + wrong, right + wrong + without
            f1 = 2 * right / max(1, marked + given)
            print(f"{name:<8} {reader:<12} {marked:>6} {right:>6} {missing:>7} {wrong:>6} {without:>7} {f1:>6.3f}")
    for reader in readers:
        print(f"{reader}: {seconds[reader] / len(pages) * 1e3:.2f} ms a page, {len(pages)} pages")
    every_page = [(ours(page)[1], page.num_bytes) for page in gold_pages()][::every]
    mean, size = (sum(values) / len(every_page) for values in zip(*every_page))
    print(f"all gold pages: {mean * 1e3:.3f} ms a page of {size / 1e3:.0f} kB, {len(every_page)} pages")


if __name__ == "__main__":
    main()
