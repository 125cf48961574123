"""Cost of the stage `urls` for a URL: the whole function of a row, and its parts, natively and in Python.

    python -m bench.urls URLS.txt [ENTRIES]

Each line of the file is a URL. The lists have ENTRIES entries (5,000,000 by default): every hundredth host and URL of
the file, and made-up domains and URLs. Times are CPU time of one core, best of three.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.text import native
from pipeline.urls.address import address_of
from pipeline.urls.config import BUILT_IN, UrlsConfig
from pipeline.urls.stage import compile_table, make_urls, model_files
from schemas.urls import web_host

ROUNDS = 3
SUBWORDS = ("porno", "xvideo", "sextub", "camgirl", "hentai", "casinobonus", "freespins", "viagra", "pokerdepos")
SOFT_WORDS = ("sex", "sexy", "adult", "cam", "cams", "escort", "nude", "nudes", "erotic", "teen", "hot", "casino")


def best_of(function: Callable[[Any], object], values: Sequence[Any]) -> float:
    """CPU seconds that the function needs for all values."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for value in values:
            function(value)
        best = min(best, time.process_time() - started)
    return best


def write_lists(folder: Path, urls: Sequence[str], entries: int) -> None:
    """Write a category in UT1's form: nine domains for each URL."""
    hosts = [host for url in urls[::100] if (host := web_host(url))]
    made_up = [f"site{number}.example{number % 97}.com" for number in range(entries * 9 // 10)]
    paths = [f"host{number}.com/a/page{number}" for number in range(entries // 10)]
    (folder / "domains").write_text("\n".join([*hosts, *made_up]), encoding="utf-8")
    (folder / "urls").write_text("\n".join(paths), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Print the costs."""
    urls = [line for line in Path(arguments[0]).read_text(encoding="utf-8").splitlines() if line]
    entries = int(arguments[1]) if len(arguments) > 1 else 5_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "adult").mkdir()
        write_lists(folder / "adult", urls, entries)
        (folder / "subwords").write_text("\n".join(SUBWORDS))
        (folder / "soft").write_text("\n".join(SOFT_WORDS))
        config = UrlsConfig(
            block_lists={"adult": f"{folder}/adult"},
            banned_words=BUILT_IN,
            soft_banned_words=f"{folder}/soft",
            banned_subwords=f"{folder}/subwords",
        )
        started = time.process_time()
        models = model_files(config)
        models |= compile_table(config, models, str(folder))
        size = Path(models["table"]).stat().st_size
        print(f"table of {entries:,} entries: {time.process_time() - started:.1f} s, {size / 1e6:.0f} MB")
        rows = [{"url": url} for url in urls]
        report("address alone", best_of(address_of, urls), len(urls))
        if native.module is not None:
            report("whole row, native", best_of(make_urls(config, models), rows), len(urls))
            native.module = None
        report("whole row, Python", best_of(make_urls(config, models), rows), len(urls))
        print(f"listed: {sum(bool(row['url_lists']) for row in rows):,} of {len(rows):,} URLs")


def report(name: str, seconds: float, count: int) -> None:
    """Print the time for a URL and the URLs in a second."""
    print(f"{name}: {seconds / count * 1e6:.2f} us per URL, {count / seconds:,.0f} URLs/s")


if __name__ == "__main__":
    main(sys.argv[1:])
