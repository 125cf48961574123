"""Bench of source formats that convert markup: CPU time a document, beside the bare parser on the same documents.

    python -m bench.formats [PATHS ...]

PATHS: dumps of wikis, by default those of the real data beside the project. Prints the time of reading the dump, of the
conversion of wikitext, and of mwparserfromhell where it is installed, which only parses. The best of three passes
counts.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from pipeline.sources.config import SourceConfig
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import find_splits, open_stream
from pipeline.sources.wiki import mediawiki
from pipeline.sources.wiki.blocks import WikiForm
from pipeline.sources.wiki.wikitext import text_of_wikitext

DUMPS = Path(__file__).parents[2] / "shared" / "data" / "sources" / "wikipedia" / "*.xml.bz2"
PASSES = 3


def read_dumps(paths: Sequence[str]) -> tuple[list[str], int, float]:
    """The wikitext of every kept page, the number of pages, and the CPU time of reading without conversion [s]."""
    sources: list[str] = []
    convert = mediawiki.text_of_wikitext
    mediawiki.text_of_wikitext = lambda source, *_: sources.append(source) or "x"  # type: ignore[func-returns-value]
    try:
        config, pages, started = SourceConfig(paths=tuple(paths), format="mediawiki"), 0, time.process_time()
        for split in find_splits(config):
            with closing(open_stream(split)) as stream:
                pages += sum(1 for _ in SOURCE.open(split, stream, config))
        return sources, pages, time.process_time() - started
    finally:
        mediawiki.text_of_wikitext = convert


def best_time(work: Callable[[str], object], sources: Sequence[str]) -> float:
    """CPU time of a function of all sources [s], the best of PASSES."""
    times = []
    for _ in range(PASSES):
        started = time.process_time()
        for source in sources:
            work(source)
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=[str(DUMPS)])
    sources, pages, reading = read_dumps(parser.parse_args().paths)
    kept = len(sources)
    print(f"{pages} pages, {kept} kept, {sum(map(len, sources)) / max(1, kept):.0f} characters of wikitext each")
    print(f"reading     {reading / max(1, pages) * 1e3:8.3f} ms a page")
    converting = best_time(lambda source: text_of_wikitext(source, WikiForm()), sources)
    print(f"conversion  {converting / max(1, kept) * 1e3:8.3f} ms a kept page")
    if find_spec("mwparserfromhell") is None:
        print("mwparserfromhell is not installed")
        return
    import mwparserfromhell

    parsing = best_time(mwparserfromhell.parse, sources)
    print(f"mwparserfromhell.parse {parsing / max(1, kept) * 1e3:8.3f} ms a kept page")
    print(f"conversion / parse     {converting / parsing:8.2f}")


if __name__ == "__main__":
    main()
