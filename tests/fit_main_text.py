"""Fit the model of main text on the real pages that people marked: the shipped model, and one per fold for the bench.

    python -m tests.fit_main_text [--folds FOLDER] [--processes N] [--only-folds]

The shipped model (`pipeline/extract/main_text.npz`, with its card beside it) learns from the sets whose licences allow
it, see TRAINED. With `--folds`, a model is also fitted for each of the five folds on the pages of the other four. With
these, `make bench-extraction` measures every page by a model that has not seen its site. A fit takes about 5 minutes.
"""

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pipeline.extract.main_text import SHIPPED_MODEL
from pipeline.fit.main_text import LabelledPage, MarkedPage, fit_main_text, label_page
from schemas.ids import file_sha256
from tests.support.gold_pages import NUM_FOLDS, GoldPage, gold_pages

TRAINED = {
    "wcxb": "CC-BY-4.0",
    "wcxb_more": "CC-BY-4.0",
    "scrapinghub": "MIT",
    "trafilatura": "Apache-2.0",
    "magic-html": "Apache-2.0",
    "chinese-wce": "MIT",
    "fundus": "MIT",
    "readability": "Apache-2.0",
    "newspaper": "MIT",
    "newspaper4k": "MIT",
}
"""Sets that the model learns from, with their licences. `daniel` (GPL-3.0) is for evaluation alone."""
SNIPPETS_WEIGHT = 0.3
"""Weight of a page that has only snippets, because they label few of its blocks."""


def marked(page: GoldPage) -> MarkedPage:
    """Return a page for training."""
    weight = 1.0 if page.text is not None else SNIPPETS_WEIGHT
    return MarkedPage(page.html, page.site, page.fold, page.text, page.with_, page.without, weight)


def card(pages: Sequence[GoldPage], model: Path) -> dict[str, object]:
    """Return the card of the model: what it is, what it learned from, and the digests of its training pages."""
    return {
        "model": model.name,
        "sha256": file_sha256(model),
        "bytes": model.stat().st_size,
        "licence": "Apache-2.0",
        "purpose": "scores the blocks of an HTML page by the share of their words that people mark as main text",
        "method": "two passes of gradient-boosted oblivious trees, pipeline/fit/main_text.py",
        "sets": {
            name: {"licence": TRAINED[name], "pages": count} for name, count in Counter(p.set for p in pages).items()
        },
        "sites": len({page.site for page in pages}),
        "pages_sha256": sorted(hashlib.sha256(page.html.encode()).hexdigest()[:16] for page in pages),
        "pages_sha256_of": "first 16 hexadecimal digits of the SHA-256 of each decoded page in UTF-8",
    }


def _fit(pages: Sequence[LabelledPage], path: Path) -> None:
    begin = time.monotonic()

    def report(line: str) -> None:
        print(f"{path.name}: {line} ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)

    fit_main_text(pages, report).save(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and write the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=Path, metavar="FOLDER", help="also fit a model for each fold, in FOLDER")
    parser.add_argument("--only-folds", action="store_true", help="do not fit the shipped model")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="number of models fitted at a time")
    options = parser.parse_args(arguments)
    pages = [page for page in gold_pages(tuple(TRAINED)) if page.text is not None or page.with_ or page.without]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("fork")) as pool:
        labelled = list(pool.map(label_page, map(marked, pages), chunksize=32))
    print(f"labelled {len(labelled)} pages", file=sys.stderr, flush=True)
    jobs: list[tuple[list[LabelledPage], Path]] = []
    if not options.only_folds:
        jobs.append((labelled, SHIPPED_MODEL))
    if options.folds:
        options.folds.mkdir(parents=True, exist_ok=True)
        for fold in range(NUM_FOLDS):
            others = [page for page in labelled if page.page.fold != fold]
            jobs.append((others, options.folds / f"fold-{fold}.npz"))
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("fork")) as pool:
        for done in [pool.submit(_fit, *job) for job in jobs]:
            done.result()
    if not options.only_folds:
        text = json.dumps(card(pages, SHIPPED_MODEL), indent=1)
        SHIPPED_MODEL.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
