"""Bench of source formats: CPU time a document of our reader, beside the native parser of the format on the same bytes.

    python -m bench.formats [FORMATS ...]

The native parser is the least that a user would write: it yields the text of each document, and no id, offset, URL,
date, metadata or reason. Real dumps are those of the data beside the project; other files are made of its texts.
Both sides alternate in one process, and the best pass of each counts, of three or more.
"""

import argparse
import bz2
import csv
import gzip
import io
import json
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from fastwarc.warc import ArchiveIterator, WarcRecordType

from pipeline.sources.config import SourceConfig
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import find_splits, open_stream

DATA = Path(__file__).parents[2] / "shared" / "data"
PASSES, SECONDS = 3, 4.0
"""Minimum number of passes, and minimum CPU time of all passes of a format [s]: short ones vary more."""
TEXTS = (
    "text/brown.jsonl.gz",
    "text/speeches.jsonl.gz",
    "text/ud_english_docs.jsonl.gz",
    "sources/news/reuters.jsonl.gz",
)
"""Files with the texts of which tables are made: long ones, and thousands of short ones."""
COLUMNS = ("text", "id", "url", "lang")
CODE_PACKAGES = ("asyncio", "json", "email", "http", "idlelib", "logging", "unittest", "xml")
CHAPTER_FILES = ("text/speeches.jsonl.gz", "text/genesis.jsonl.gz")
MEDIAWIKI_XML = "{http://www.mediawiki.org/xml/export-0.10/}"


class SkippedError(Exception):
    """A format cannot be measured here, for this reason."""


# The files: real ones, or made of real texts.


def data(*names: str) -> list[Path]:
    """The files of these names below DATA. Raises SkippedError if one is missing."""
    paths = [DATA / name for name in names]
    if missing := [str(path.relative_to(DATA)) for path in paths if not path.exists()]:
        raise SkippedError(f"no data: {', '.join(missing)}")
    return paths


def lines_of(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects of files of JSON lines."""
    for path in data(*names):
        with gzip.open(path, "rb") as lines:
            yield from map(json.loads, lines)


@cache
def table() -> pa.Table:
    """The texts as a table of COLUMNS."""
    rows = [
        {"text": row["text"], "id": row["id"], "url": f"https://www.news{number % 97}.example/{number}", "lang": "en"}
        for number, row in enumerate(lines_of(TEXTS))
    ]
    return pa.Table.from_pylist(rows)


def make_jsonl(folder: Path) -> list[Path]:
    """JSON lines of the table, gzip."""
    path = folder / "texts.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table().to_pylist())
    return [path]


def make_csv(folder: Path) -> list[Path]:
    """CSV of the table, gzip."""
    path = folder / "texts.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table().to_pylist())
    return [path]


def make_parquet(folder: Path) -> list[Path]:
    """A Parquet file of the table, as pyarrow writes it by default."""
    pq.write_table(table(), folder / "texts.parquet")
    return [folder / "texts.parquet"]


def make_arrow(folder: Path) -> list[Path]:
    """An Arrow file of the table, in batches of 1,000 rows."""
    with pa.ipc.new_file(folder / "texts.arrow", table().schema) as writer:
        writer.write_table(table(), max_chunksize=1_000)
    return [folder / "texts.arrow"]


def make_hf(folder: Path) -> list[Path]:
    """A copy of the repository of a dataset, with one Parquet file."""
    (folder / "dataset" / "data").mkdir(parents=True)
    pq.write_table(table(), folder / "dataset" / "data" / "train-00000-of-00001.parquet")
    return [folder / "dataset"]


def make_books(folder: Path) -> list[Path]:
    """EPUBs of ten chapters each, of speeches and other texts."""
    texts = [(row["id"], row["text"]) for row in lines_of(CHAPTER_FILES)]
    return [make_epub(folder / f"book{at}.epub", texts[at : at + 10]) for at in range(0, len(texts), 10)]


def make_epub(path: Path, chapters: Sequence[tuple[str, str]]) -> Path:
    """An EPUB with these titles and texts as chapters."""
    numbers = range(len(chapters))
    items = "".join(f'<item id="c{n}" href="c{n}.xhtml" media-type="application/xhtml+xml"/>' for n in numbers)
    spine = "".join(f'<itemref idref="c{n}"/>' for n in numbers)
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f"<dc:title>{escape(path.stem)}</dc:title></metadata><manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        archive.writestr("META-INF/container.xml", '<container><rootfile full-path="book.opf"/></container>')
        archive.writestr("book.opf", package)
        for number, (title, text) in enumerate(chapters):
            paragraphs = "".join(f"<p>{escape(part)}</p>\n" for part in text.split("\n") if part.strip())
            page = f"<head><title>{escape(title)}</title></head><body><h1>{escape(title)}</h1>\n{paragraphs}</body>"
            archive.writestr(f"c{number}.xhtml", f'<html xmlns="http://www.w3.org/1999/xhtml">{page}</html>')
    return path


def make_code(folder: Path) -> list[Path]:
    """A tar archive of packages of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    with tarfile.open(folder / "library.tar.gz", "w:gz") as archive:
        for path in sorted(path for name in CODE_PACKAGES for path in (root / name).rglob("*.py")):
            archive.add(path, f"library/{path.relative_to(root)}")
    return [folder / "library.tar.gz"]


# The native parsers. Each yields the texts of the documents.


def parse_jsonl(path: Path, key: str = "text") -> Iterator[Any]:
    """gzip and json.loads."""
    with gzip.open(path, "rb") as lines:
        for line in lines:
            yield json.loads(line)[key]


def parse_csv(path: Path) -> Iterator[Any]:
    """gzip and csv.DictReader."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        yield from (row["text"] for row in csv.DictReader(lines))


def parse_parquet(path: Path) -> Iterator[Any]:
    """pyarrow's batches of default size and to_pylist of the columns that we carry."""
    for batch in pq.ParquetFile(path).iter_batches(columns=list(COLUMNS)):
        yield from batch.to_pylist()


def parse_hf(path: Path) -> Iterator[Any]:
    """The same as for Parquet, for each file of a folder."""
    for file in sorted(path.rglob("*.parquet")):
        yield from parse_parquet(file)


def parse_arrow(path: Path) -> Iterator[Any]:
    """pyarrow's record batches and to_pylist."""
    with pa.ipc.open_file(path) as file:
        for number in range(file.num_record_batches):
            yield from file.get_batch(number).to_pylist()


def parse_mediawiki(path: Path) -> Iterator[Any]:
    """bz2, lxml.etree.iterparse, and mwparserfromhell.parse for pages of articles that are no redirects."""
    import mwparserfromhell
    from lxml import etree

    with bz2.open(path) as stream:
        for _, page in etree.iterparse(stream, tag=f"{MEDIAWIKI_XML}page"):
            is_redirect = page.find(f"{MEDIAWIKI_XML}redirect") is not None
            if page.findtext(f"{MEDIAWIKI_XML}ns") == "0" and not is_redirect:
                yield mwparserfromhell.parse(page.findtext(f"{MEDIAWIKI_XML}revision/{MEDIAWIKI_XML}text") or "")
            page.clear()


def parse_gutenberg(path: Path) -> Iterator[Any]:
    """gzip and decode."""
    content = gzip.decompress(path.read_bytes())
    try:
        yield content.decode("utf-8")
    except UnicodeDecodeError:
        yield content.decode("latin-1")


def parse_books(path: Path) -> Iterator[Any]:
    """zipfile, and lxml.html with text_content for each chapter."""
    import lxml.html

    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".xhtml")]
        yield "\n\n".join(lxml.html.document_fromstring(archive.read(name)).text_content() for name in names)


def parse_stackexchange(path: Path) -> Iterator[Any]:
    """gzip, lxml.etree.iterparse, and lxml.html with text_content for each post; without grouping by question."""
    import lxml.html
    from lxml import etree

    with gzip.open(path) as stream:
        for _, row in etree.iterparse(stream, tag="row"):
            body = row.get("Body") or "<p></p>"
            yield lxml.html.fromstring(body).text_content()
            row.clear()


def parse_reddit(path: Path) -> Iterator[Any]:
    """zstandard and json.loads."""
    with open(path, "rb") as stored, zstandard.ZstdDecompressor().stream_reader(stored) as stream:
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            yield json.loads(line)["selftext"]


def parse_arxiv(path: Path) -> Iterator[Any]:
    """tarfile, gzip, and pylatexenc's nodes of the TeX files: its conversion to text fails on one of them."""
    from pylatexenc.latexwalker import LatexWalker

    with tarfile.open(path) as papers:
        for paper in papers:
            with tarfile.open(fileobj=papers.extractfile(paper), mode="r:gz") as files:
                texts = [files.extractfile(file).read() for file in files if file.name.endswith(".tex")]  # type: ignore[union-attr]
            yield [LatexWalker(text.decode("utf-8", "replace")).get_latex_nodes() for text in texts]


def parse_unarxive(path: Path) -> Iterator[Any]:
    """gzip, json.loads, and the paragraphs joined."""
    for paragraphs in parse_jsonl(path, "body_text"):
        yield "\n\n".join(paragraph["text"] for paragraph in paragraphs)


def parse_code(path: Path) -> Iterator[Any]:
    """tarfile and decode."""
    with tarfile.open(path) as archive:
        for member in archive:
            if (content := archive.extractfile(member)) is not None:
                yield content.read().decode("utf-8", "replace")


def parse_warc(path: Path) -> Iterator[Any]:
    """fastwarc: the bodies of responses, as they were transferred."""
    with open(path, "rb") as stream:
        for record in ArchiveIterator(stream, record_types=WarcRecordType.response, parse_http=True):
            yield record.reader.read()


# The table.


@dataclass(frozen=True)
class Format:
    """A format to measure."""

    name: str
    native: str
    """What the native parser is."""
    files: Callable[[Path], list[Path]]
    """Returns the files, which may be made in a folder. Raises SkippedError."""
    parse: Callable[[Path], Iterable[Any]]
    """The native parser of one of the files."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the source."""
    needs: tuple[str, ...] = ()
    """Packages that the native parser needs."""


WIKIS = ("sources/wikipedia/enwiki-pages-articles-part0.xml.bz2", "sources/wikipedia/ltgwiki-pages-articles.xml.bz2")
BOOKS = ("1342-0", "14263-8", "3261", "44157-0", "972")
FORMATS = (
    Format("jsonl", "json.loads", make_jsonl, parse_jsonl),
    Format("csv", "csv.DictReader", make_csv, parse_csv),
    Format("parquet", "pyarrow", make_parquet, parse_parquet),
    Format("arrow", "pyarrow", make_arrow, parse_arrow),
    Format("hf", "pyarrow", make_hf, parse_hf),
    Format("mediawiki", "mwparserfromhell", lambda _: data(*WIKIS), parse_mediawiki, {}, ("mwparserfromhell", "lxml")),
    Format("gutenberg", "decode", lambda _: data(*(f"sources/gutenberg/{n}.txt.gz" for n in BOOKS)), parse_gutenberg),
    Format("books", "zipfile, lxml.html", make_books, parse_books, {}, ("lxml",)),
    Format(
        "stackexchange",
        "iterparse, lxml.html",
        lambda _: data("sources/stackexchange/quantumcomputing.Posts.xml.gz"),
        parse_stackexchange,
        {"stackexchange": {"site": "quantumcomputing.stackexchange.com"}},
        ("lxml",),
    ),
    Format("reddit", "json.loads", lambda _: data("sources/reddit/submissions.jsonl.zst"), parse_reddit),
    Format("arxiv", "pylatexenc", lambda _: data("sources/arxiv/src_sample.tar"), parse_arxiv, needs=("pylatexenc",)),
    Format("unarxive", "json.loads", lambda _: data("sources/arxiv/unarxive.jsonl.gz"), parse_unarxive),
    Format("code", "tarfile, decode", make_code, parse_code, {"code": {"licences": ("any",)}}),
    Format("warc", "fastwarc", lambda _: data("warc/pages-002.warc.gz"), parse_warc),
)


@dataclass
class Work:
    """What our reader yields of a format."""

    records: int = 0
    documents: int = 0
    size: int = 0
    """Size of the texts or pages of the documents [bytes]."""


def read_ours(config: SourceConfig) -> Work:
    """Read all files of a source to their end."""
    work = Work()
    for split in find_splits(config):
        with closing(open_stream(split)) as stream:
            for row, drop in SOURCE.open(split, stream, config):
                work.records += 1
                if drop is None:
                    work.documents += 1
                    work.size += len(row["text"] or row["_payload"] or "")
    return work


def parse_native(entry: Format, paths: Sequence[Path]) -> None:
    """Parse all files by the native parser."""
    for path in paths:
        for _ in entry.parse(path):
            pass


def cpu_time(work: Callable[[], object]) -> float:
    """CPU time of a function [s]."""
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(entry: Format, folder: Path) -> str:
    """The row of a format in the table."""
    try:
        if missing := [name for name in entry.needs if find_spec(name) is None]:
            raise SkippedError(f"{', '.join(missing)} is not installed")
        paths = entry.files(folder)
    except SkippedError as reason:
        return f"{entry.name:14}  not measured: {reason}"
    config = SourceConfig(paths=tuple(map(str, paths)), format=entry.name, **entry.settings)
    work = read_ours(config)
    times: list[tuple[float, float]] = []
    while len(times) < PASSES or sum(map(sum, times)) < SECONDS:
        times.append((cpu_time(lambda: read_ours(config)), cpu_time(lambda: parse_native(entry, paths))))
    ours, native = (min(side) / work.documents * 1e3 for side in zip(*times, strict=True))
    return (
        f"{entry.name:14} {work.records:8,} {work.documents:10,} {work.size / work.documents / 1e3:10.1f} "
        f"{ours:10.3f} {native:10.3f} {ours / native:7.2f}  {entry.native}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMATS", help="names of formats; by default all")
    names = parser.parse_args().formats
    print(
        f"{'format':14} {'records':>8} {'documents':>10} {'KB each':>10} {'ms ours':>10} {'ms native':>10} "
        f"{'ratio':>7}  native parser"
    )
    for entry in FORMATS:
        if not names or entry.name in names:
            with tempfile.TemporaryDirectory() as folder:
                print(measure(entry, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
