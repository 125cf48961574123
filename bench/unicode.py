"""Bench of Unicode repair: CPU time of extraction and of the repair, and what is repaired, on real pages.

    python -m bench.unicode [PATHS ...]

PATHS: WARC files, by default those of the real data beside the project. Prints one line for all pages and one for pages
that need no repair, the cost that every clean page pays. The best of five passes counts.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from pipeline.extract.charset import decode
from pipeline.extract.extract import normalize_text
from pipeline.extract.extractors import DecodedPage, ExtractorError, Options, make_extractor
from pipeline.extract.unicode import repair_text
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import find_splits, open_stream

PAGES = Path(__file__).parents[2] / "shared" / "data" / "warc" / "pages-*.warc.gz"
PASSES = 5


def extracted_texts(paths: Sequence[str]) -> tuple[list[str], float]:
    """The extracted text of every page before normalization, and the CPU time of decoding and extraction [s]."""
    config, texts, seconds = SourceConfig(paths=tuple(paths)), [], 0.0
    extract = make_extractor("resiliparse", Options())
    for split in find_splits(config):
        with closing(open_stream(split)) as stream:
            for row, drop in SOURCE.open(split, stream, config):
                if drop is not None or row["text"] is not None:
                    continue
                started = time.process_time()
                try:
                    texts.append(extract(DecodedPage(decode(row["_payload"], row["_http_charset"]).text)).text)
                except ExtractorError as error:
                    print(f"{row['url']}: {error}")
                seconds += time.process_time() - started
    return texts, seconds


def best_time(work: Callable[[str], object], texts: Sequence[str]) -> float:
    """CPU time of a function of all texts [s], the best of PASSES."""
    times = []
    for _ in range(PASSES):
        started = time.process_time()
        for text in texts:
            work(text)
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=[str(PAGES)])
    texts, seconds = extracted_texts(parser.parse_args().paths)
    stage = (seconds + best_time(normalize_text, texts)) / len(texts)
    results = [repair_text(text) for text in texts]
    clean = [text for text, result in zip(texts, results) if result.text == text and not result.mojibake]
    print(f"decode, extract, normalize  {stage * 1e6:8.1f} µs/page  {len(texts)} pages")
    for name, group in (("all pages", texts), ("clean pages", clean)):
        cost = best_time(repair_text, group) / len(group)
        print(f"repair of {name:<17} {cost * 1e6:8.1f} µs/page  {len(group)} pages  {cost / stage:.1%} of the stage")
    repairs: Counter[str] = Counter()
    for result in results:
        repairs.update(result.repairs)
    print(dict(repairs), "mojibake left:", sum(result.mojibake for result in results))


if __name__ == "__main__":
    main()
