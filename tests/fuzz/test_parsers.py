"""Fuzzers of readers, parsers, regular expressions and normal forms: no error, and time that is linear in the input.

A row of READERS or TEXTS is (name, function, seeds). Inputs are made of pieces of the seeds and of random ones. What
fails is written to `corpus/`, and so is what runs a line of our code that no earlier input ran, in the run of an hour.
Every later run begins with these files. Add them to a commit, with the repair of the code if there is one.
"""

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.decontaminate.index import located_characters, located_words
from pipeline.dedup.repeats.units import normal_forms
from pipeline.engine.stage import Split
from pipeline.extract.charset import decode
from pipeline.extract.extract import ExtractConfig, make_extract, normalize_text
from pipeline.extract.unicode import repair_text
from pipeline.minhash.stage import text_digest
from pipeline.pii.stage import Redactor
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import make as make_quality
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.http import parse_date, read_response
from pipeline.sources.formats import FORMATS
from pipeline.sources.provenance import domain_of
from pipeline.sources.rows import date_of
from pipeline.sources.source import open_split
from pipeline.sources.splits import HashedStream
from pipeline.sources.wiki.blocks import WikiForm
from pipeline.sources.wiki.wikitext import text_of_wikitext
from pipeline.text.spacy_tokens import splitter_of
from pipeline.text.words import normal_words
from pipeline.toxicity.words import UnspacedWordList, WordList
from schemas.signals import FAMILIES
from schemas.urls import canonical_url, host_suffixes, surt
from tests.pipeline.sources.test_source import BEYOND, CASES
from tests.support.growth import FACTOR, MOST, growth
from tests.support.paths import ROOT

CORPUS = Path(__file__).parent / "corpus"
CONFIG = SourceConfig(paths=("x",), code={"licences": ["any"]})
SIZE, SLOW_SIZE = 4_000, 250_000
"""Length of the smaller input of a comparison; the larger one is four times as long, up to 1 MB."""
MAX_KEPT = 2_000
"""Maximum length of an input that is kept because it runs a new line."""
OURS = tuple(f"{ROOT / room}/" for room in ("pipeline", "schemas"))
QUICK = settings(max_examples=6, suppress_health_check=[*HealthCheck], database=None)
HOUR = settings(max_examples=1_500, suppress_health_check=[*HealthCheck], database=None)


def reader(name: str) -> Callable[[bytes], None]:
    """A function that reads a file of a format to its end."""

    def read(data: bytes) -> None:
        file = "f.zip" if data.startswith(b"PK") else "f"
        stream = HashedStream(io.BytesIO(data))
        for _ in open_split(Split(0, file, file, len(data), "", "web", name), stream, CONFIG):
            pass

    return read


READERS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    name: (reader(name), [stored for kind, stored, _ in [*CASES.values(), *BEYOND.values()] if kind == name])
    for name in FORMATS
}
READERS |= {
    "http": (
        lambda data: read_response(data, CONFIG),
        [
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n<p>\r\n0\r\n\r\n",
            b"HTTP/1.1 200\nContent-Encoding: gzip, br, deflate, zstd\n\n\x1f\x8b\x08\0\0\0\0\0",
        ],
    ),
    "charset": (
        lambda data: decode(data, "gbk"),
        [b"<meta charset=utf-8>", b"<?xml encoding='hz'?>\xc3\xa4~{", b"\x1b$)C"],
    ),
}

HTML = [
    "<p>",
    "<b>",
    "</b>",
    "<table><td>",
    "<a href='x'>",
    "<!--",
    "<script>",
    "<select><option>",
    "&amp;",
    "<svg><math>",
]
HTML += [
    "<html a",
    "<body b=1>",
    "<title>",
    "<meta name=date content=2024>",
    "<h1>words</h1>",
    "<pre>\n",
    "<li>",
    "<br>",
]
WIKI = [
    "{{a|b=",
    "}}",
    "[[File:a|",
    "]]",
    "{|",
    "|}",
    "<ref>",
    "</ref>",
    "<nowiki>",
    "'''",
    "== a ==",
    "-{",
    "}-",
    "<!--",
]
PROSE = [
    "the word ",
    "a@b.de",
    "+49 30 1234567 ",
    "http://a.de/x?",
    "192.168.0.1 ",
    "\u0301\u0327",
    "\u4e2d\u6587",
    "\n\n",
    "- ",
]
PROSE += [
    "{",
    "lorem ipsum ",
    "3 likes\n",
    "\u2026",
    "s&m ",
    "it's ",
    "U.S.A. ",
    ":-)",
    "\u0645\u0631\u062d",
    "\U0001f595",
    "...",
    "\t",
]
URLS = [
    "http://",
    "www.",
    "a.de",
    "/..",
    "/(S(a))",
    "?s=",
    "&utm_a=",
    "%41",
    "%E4",
    "#!",
    ";jsessionid=",
    "\u0301",
    "\u4e2d",
    ":80",
    "@",
]
DATES = ["2024-05-18", "T", "12:00:00", "+02:00", "Z", "20240518", "0", "99999999", "-", "."]


def _row(text: str) -> dict[str, Any]:
    return {"text": text, "language": "en", "_body": text}


@cache
def _page() -> Callable[[dict[str, Any]], Any]:
    return make_extract(ExtractConfig(extractor="resiliparse"), {})


@cache
def _quality() -> Callable[[dict[str, Any]], Any]:
    return make_quality(QualityConfig(families=tuple(FAMILIES)), {})


_redactor = cache(Redactor)


def read_page(text: str) -> None:
    """Extract the text of a page."""
    row = {"_payload": text.encode("utf-8", "surrogatepass"), "_http_charset": None, "mime": None, "text": None}
    _page()(row | {"url": "http://e.com/", "date": datetime(2024, 5, 18)})


TEXTS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "page": (read_page, HTML),
    "normal text": (normalize_text, PROSE),
    "repaired text": (lambda text: repair_text(text, True), [*PROSE, "\u00c3\u00a4", "&eacute;", "\u200b\u200d"]),
    "quality": (lambda text: _quality()(_row(text)), PROSE),
    "personal data": (lambda text: _redactor().redact(text, "de"), PROSE),
    "digest": (text_digest, PROSE),
    "words": (normal_words, PROSE),
    "evaluation words": (located_words, PROSE),
    "evaluation characters": (located_characters, PROSE),
    "English tokens": (splitter_of("en"), PROSE),
    "word list": (WordList(dict.fromkeys(["s&m", "bloody hell"], "other")).count, PROSE),
    "unspaced word list": (UnspacedWordList(dict.fromkeys(["\u4e2d\u6587", "abc"], "other")).count, PROSE),
    "repeats": (lambda text: normal_forms([text]), PROSE),
    "wikitext": (lambda text: text_of_wikitext(text, WikiForm()), WIKI),
    "canonical URL": (canonical_url, URLS),
    "sorted URL": (surt, URLS),
    "hosts": (host_suffixes, URLS),
    "domain": (domain_of, URLS),
    "archive date": (parse_date, DATES),
    "row date": (date_of, [*DATES, json.dumps("2024")]),
}


def kept_inputs(name: str) -> Iterator[bytes]:
    """The inputs on which this function has failed."""
    for file in sorted(CORPUS.glob(f"{name.replace(' ', '_')}-*")):
        yield file.read_bytes()


def keep(name: str, data: Any, why: str) -> None:
    """Write an input to the corpus."""
    CORPUS.mkdir(exist_ok=True)
    stored = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    (CORPUS / f"{name.replace(' ', '_')}-{why}").write_bytes(stored)


def call(name: str, function: Callable[[Any], Any], data: Any) -> None:
    """Call a function; write the input to the corpus if it fails. The last that hypothesis tries is the smallest."""
    try:
        function(data)
    except Exception as error:
        keep(name, data, type(error).__name__)
        raise


Lines = set[tuple[str, int]]
"""Lines of code by file name."""


def lines_of(function: Callable[[Any], Any], data: Any) -> Lines:
    """Call a function, and return the lines of our code that it runs."""
    lines: Lines = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(OURS):
            return None
        lines.add((name, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        function(data)
    finally:
        sys.settrace(None)
    return lines


def cases() -> list[Any]:
    """(name, function, strategy of pieces, empty input, from stored bytes) of every row."""
    slices = [
        (name, function, st.sampled_from(seeds or [b"x"]).flatmap(pieces) | st.binary(max_size=8), b"", bytes)
        for name, (function, seeds) in READERS.items()
    ]
    texts = [(name, function, of_seeds(seeds), "", to_text) for name, (function, seeds) in TEXTS.items()]
    return [pytest.param(*case, id=case[0]) for case in [*slices, *texts]]


def pieces(seed: bytes) -> st.SearchStrategy[bytes]:
    """A strategy of a seed and its slices."""
    ends = st.tuples(st.integers(0, len(seed)), st.integers(0, len(seed)))
    return st.just(seed) | ends.map(lambda pair: seed[min(pair) : max(pair)])


def of_seeds(seeds: list[str]) -> st.SearchStrategy[str]:
    """A strategy of one of the seeds, or a short text."""
    return st.sampled_from(seeds) | st.text(max_size=4)


def digest(data: Any) -> str:
    """A name for an input, by its content."""
    stored = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    return hashlib.sha256(stored).hexdigest()[:10]


def to_text(data: bytes) -> str:
    """The text of a stored input."""
    return data.decode("utf-8", "surrogatepass")


CASE = ("name", "function", "piece", "empty", "load")


def check_errors(case: tuple[Any, ...], how: settings) -> None:
    """No input raises an error."""
    name, function, piece, empty, load = case
    known: Lines = set()
    for data in kept_inputs(name):
        known |= lines_of(function, load(data)) if how is HOUR else set()
        function(load(data))

    @how
    @given(st.lists(piece, max_size=12))
    def check(parts: list[Any]) -> None:
        data = empty.join(parts)
        call(name, function, data)
        if how is HOUR and len(data) <= MAX_KEPT and (new := lines_of(function, data) - known):
            known.update(new)
            keep(name, data, digest(data))

    check()


def check_growth(case: tuple[Any, ...], how: settings, size: int) -> None:
    """The time of repeated pieces, after a first one, is linear in their number."""
    name, function, piece, empty, _ = case

    @how
    @given(st.lists(piece, max_size=2), st.lists(piece, min_size=1, max_size=4))
    def check(first: list[Any], repeated: list[Any]) -> None:
        unit = empty.join(repeated) or empty.join([*repeated, b"x" if empty == b"" else "x"])

        def make(length: int) -> Any:
            return empty.join(first) + unit * max(1, length // len(unit))

        ratio = growth(function, make, size)
        if ratio > MOST:
            raise AssertionError(f"{name}: {FACTOR} times the input took {ratio:.1f} times as long: {first} {unit!r}")

    check()


@pytest.mark.parametrize(CASE, cases())
def test_no_input_raises_an_error(name, function, piece, empty, load):
    check_errors((name, function, piece, empty, load), QUICK)


@pytest.mark.parametrize(CASE, cases())
def test_time_is_linear(name, function, piece, empty, load):
    check_growth((name, function, piece, empty, load), settings(QUICK, max_examples=3), SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(CASE, cases())
def test_for_an_hour(name, function, piece, empty, load):
    check_errors((name, function, piece, empty, load), HOUR)
    check_growth((name, function, piece, empty, load), settings(HOUR, max_examples=40), SLOW_SIZE)
