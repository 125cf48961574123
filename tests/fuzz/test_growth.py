"""The known quadratic inputs: each takes time that is linear in its length, by the ratio at two sizes."""

import bz2
import gzip
import io
import re
import tarfile
import unicodedata
from contextlib import suppress
from datetime import datetime

import lz4.frame
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dedup.repeats.units import normal_forms
from pipeline.extract.extract import ExtractConfig, make_extract, normalize_text
from pipeline.language import text_between_tags
from pipeline.minhash.stage import text_digest
from pipeline.perplexity.model import normalize as ccnet_form
from pipeline.quality.text import normal_piece
from pipeline.sources.code.languages import language_of
from pipeline.sources.papers.tex.macros import TooManyExpansionsError, definitions
from pipeline.sources.papers.tex.project import TexProject, join_project, strip_comments
from pipeline.sources.papers.tex.render import TexOptions, render_tex
from pipeline.text.words import normal_words
from pipeline.toxicity.model import folded
from pipeline.toxicity.words import WordList
from schemas import normalization
from schemas.urls import canonical_url, host_suffixes, surt
from tests.fuzz.test_parsers import reader
from tests.support.growth import FACTOR, MOST, cpu_seconds, growth


def styles_of(text: str) -> None:
    """Look for the style files of a paper."""
    join_project({"m.tex": text}, "m.tex", 1 << 30)


def name_of(number: int) -> str:
    """A command of its own for each number."""
    return "\\x" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


ABOVE, BELOW, COMPATIBLE = "\u0301", "\u0327", "\uff9e"
HOSTILE = {
    "text": (normalize_text, lambda n: "a" + ABOVE * n + BELOW * n),
    "text that decomposes": (normalize_text, lambda n: "a" + "\u0f73" * n),
    "copies": (text_digest, lambda n: "\u30ab" + ABOVE * n + COMPATIBLE * n + BELOW * n),
    "words for shingles": (normal_words, lambda n: "a" + ABOVE * n + BELOW * n),
    "words of redpajama": (normal_piece, lambda n: "a" + ".'" * n + ABOVE * n + BELOW * n),
    "perplexity": (ccnet_form, lambda n: "a" + ABOVE * n + BELOW * n),
    "repeats": (lambda text: normal_forms([text]), lambda n: "a" + ABOVE * n + BELOW * n),
    "word list": (WordList(dict.fromkeys(["s&m", "a+b"], "other")).count, lambda n: "s m a b " * n),
    "word list, decomposed": (WordList({"ab": "other"}).count, lambda n: "a" + ABOVE * n + BELOW * n),
    "word list, styled": (WordList({"ab": "other"}).count, lambda n: "\u24d0a" + ABOVE * n + BELOW * n),
    "sentence of the toxicity model": (folded, lambda n: "a" + ABOVE * n + BELOW * n),
    "host of marks": (canonical_url, lambda n: f"http://a{ABOVE * n}{BELOW * n}.com/"),
    "host of letters": (canonical_url, lambda n: f"http://{_letters(n)}.com/"),
    "labels of letters": (canonical_url, lambda n: f"http://{'.'.join(map(chr, range(0x4E00, 0x4E00 + n % 20_000)))}/"),
    "sorted host": (surt, lambda n: f"http://a{ABOVE * n}{BELOW * n}.com/"),
    "sorted host with a tab": (surt, lambda n: f"http:/\t/a{ABOVE * n}{BELOW * n}.com/"),
    "verbatim of TeX": (strip_comments, lambda n: "".join(f"\\verb{chr(0x4E00 + at)}" for at in range(n // 2))),
    "white space after a package of TeX": (styles_of, lambda n: "\\usepackage" + " " * n),
    "definitions of a style file": (definitions, lambda n: "".join(f"\\def{name_of(at)}{{}}" for at in range(n // 2))),
    "letters for macros": (
        lambda text: rendered(r"\def\a#1{\b}\def\b#1{\a}", r"\a " + text),
        lambda n: "x" * (25 * n),
    ),
    **{
        f"text between tags: {unit}": (text_between_tags, lambda n, unit=unit: unit * (30 * n // len(unit)))
        for unit in ("<", "<!--", "<!-- -", "<script>", "<script></", "<script></script", "<p ")
    },
    **{
        f"empty lines of code: {name}": (
            lambda text, name=name: language_of(name, lambda _: text),
            lambda n: "\n" * (3 * n),
        )
        for name in ("a.h", "a.m", "a.pl", "a.v", "a.ts", "a.fs", "a.d", "a.cls")
    },
    "domains": (host_suffixes, lambda n: f"http://u:p@{ABOVE * n}{BELOW * n}.com/"),
}
PAGES = {
    "marks": lambda n: f"<p>a{ABOVE * n}{BELOW * n}",
    "entities of marks": lambda n: f"<p>a{'&#x301;' * n}{'&#x327;' * n}",
    "entities": lambda n: f"<p>{'&amp;' * n}",
    "title": lambda n: f"<title>a{ABOVE * n}{BELOW * n}</title><p>",
    "attributes": lambda n: f"<p {' '.join(f'a{at}=1' for at in range(n))}>",
    "html tags": lambda n: "".join(f"<html a{at}>" for at in range(n)),
    "body tags": lambda n: "".join(f"<BODY a{at}='1'>" for at in range(n)),
    "options": lambda n: f"<select>{'<option>a' * n}</select>",
    "option groups": lambda n: f"<select>{'<optgroup>a</optgroup>' * n}</select>",
    "nesting": lambda n: "<div>" * n,
    "formatting": lambda n: "<p><b><i>" * n,
    "links": lambda n: "<a href=x>" * n,
    "cells": lambda n: f"<table>{'<td>x' * n}",
    "meta tags": lambda n: "".join(f"<meta name=a{at} content=b>" for at in range(n)),
    "attributes of formulas": lambda n: f"<span class='MathJax' data-mathml=\"&lt;math {'a' * n}&gt;x\">x</span>",
    "options of formulas": lambda n: (
        f"<img src='https://latex.codecogs.com/gif.latex?{chr(92)}{f'inline{chr(92)}' * n}x'>"
    ),
    "formulas": lambda n: f"<img src='http://a{ABOVE * n}{BELOW * n}/mathtex.cgi?x'>",
}
ZSTD, GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08"
FILES = {
    "chained zstd blocks": ("warc", lambda n: b"x" + (ZSTD + b"\x00\x58" + (6 << 3).to_bytes(3, "little")) * n),
    "zstd frames that fail late": ("warc", lambda n: late_failures(n // 1000, n // 3)),
    "gzip names": ("warc", lambda n: b"x" + (GZIP + b"\x08") * n),
    "gzip stored blocks": ("jsonl", lambda n: b"x" + (GZIP + b"\x00abcdef\x00\xff\x7f\x00\x80") * n),
    "gzip members cut short": ("jsonl", lambda n: gzip.compress(b"a" * 99)[:-9] * (n // 12)),
    "lz4 frames": ("jsonl", lambda n: b"x" + lz4.frame.compress(b"a" * 99, block_size=7)[:15] * n),
    "bzip2 blocks": ("jsonl", lambda n: b"x" + bz2.compress(b"a" * 99)[:30] * (n // 3)),
    "rows on one line": ("stackexchange", lambda n: b"<posts>" + b'<row Id="1" />' * (n // 3)),
    "a name without a value": ("stackexchange", lambda n: b"<posts>\n<row " + b"a" * n + b"/>\n</posts>"),
    "attributes of a post": (
        "stackexchange",
        lambda n: (
            b'<posts>\n<row Id="1" PostTypeId="1" AnswerCount="0" Title="a" Body="&lt;p %s&gt;b" />\n</posts>'
            % b" ".join(b"a%d" % at for at in range(n))
        ),
    ),
    "deep names": ("code", lambda n: tar_of("a/" * (n // 4) + "f.py")),
}
"""Format, and the bytes of a file of about n units."""
PROSE = "<p>The penstock carries water from the reservoir down to the turbine, and its gate can be closed. </p>" * 5


def rendered(macros: str, text: str) -> None:
    """Render a paper. Macros that expand without an end are stopped by a limit."""
    with suppress(TooManyExpansionsError):
        source = rf"\documentclass{{article}}{macros}\begin{{document}}{text}\end{{document}}"
        render_tex(TexProject(source, "m.tex"), TexOptions())


def late_failures(frames: int, blocks: int) -> bytes:
    """Frames of zstd that begin with a record, have a block that cannot be decoded, and share one chain of blocks."""

    def header(kind: int, size: int, last: int = 0) -> bytes:
        return (last | kind << 1 | size << 3).to_bytes(3, "little")

    record = b"WARC/1.0\r\n"
    begin = ZSTD + b"\x00\x58" + header(0, len(record)) + record + (header(1, 1 << 17) + b"a") * 8
    size = len(begin) + 5
    each = [begin + header(2, size * (frames - 1 - at) + 2) + b"\xff\xff" for at in range(frames)]
    return b"".join(each) + header(0, 0) * blocks + header(0, 0, 1)


def tar_of(name: str) -> bytes:
    """A compressed archive of one member of this name."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo(name)
        member.size = 12
        archive.addfile(member, io.BytesIO(b"print('abc')"))
    return out.getvalue()


def _letters(count: int) -> str:
    return "".join(chr(0x4E00 + at * 7919 % 20_000) for at in range(count))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_or_url_takes_time_linear_in_its_length(name):
    function, make = HOSTILE[name]
    assert growth(function, make, 40_000) < MOST


@pytest.mark.parametrize("name", PAGES)
def test_a_page_takes_time_linear_in_its_length(name):
    extract = make_extract(ExtractConfig(extractor="resiliparse"), {})

    def read(page: str) -> None:
        day = datetime(2024, 5, 18)
        extract(
            {"_payload": page.encode(), "_http_charset": "utf-8", "mime": None, "text": None, "url": None, "date": day}
        )

    # Beyond 14,143 attributes they are taken out, so that the larger page may take less time.
    assert growth(read, lambda n: f"<html><body>{PAGES[name](n)}{PROSE}", 20_000) < MOST


@pytest.mark.parametrize("name", FILES)
def test_a_file_takes_time_linear_in_its_size(name):
    """The first candidates after damage are read whatever they cost, so that small files say little."""
    file_format, make = FILES[name]
    assert growth(reader(file_format), make, 60_000) < MOST


def test_the_ratio_of_a_quadratic_function_is_not_accepted():
    assert growth(lambda text: unicodedata.normalize("NFC", text), HOSTILE["text"][1], 2_000) > MOST
    assert cpu_seconds(lambda: None, 2) < 1
    assert FACTOR < MOST < FACTOR**2


MARKS = [
    chr(code) for code in range(0x300, 0x1F000) if unicodedata.combining(unicodedata.normalize("NFKD", chr(code))[0])
]
RUNS = st.lists(
    st.tuples(
        st.sampled_from(["a", "\u00e9", "\u1e69", "\u30ab", "\uac00", "\u1100", " "]), st.text(MARKS, max_size=12)
    )
)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_a_normal_form_is_that_of_python(form, monkeypatch):
    monkeypatch.setattr(normalization, "LONG_RUN", 3)

    @settings(max_examples=150)
    @given(RUNS)
    def check(runs: list[tuple[str, str]]) -> None:
        text = "".join(map("".join, runs))
        assert normalization.normalize(form, text) == unicodedata.normalize(form, text)

    check()
    assert re.search("\u0327\u0301", normalization.normalize("NFD", "e" + ABOVE * 3 + BELOW)) is not None
