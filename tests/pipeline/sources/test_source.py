"""The declaration: every reason is reached by some input, and files of every format open by what they hold."""

import gzip
import io
import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.engine.failures import FAILURE
from pipeline.engine.stage import Drop, Source, Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.formats import FORMATS
from pipeline.sources.source import (
    COMMON_REASONS,
    CRAWL_REASONS,
    PARENTS_REASONS,
    REASONS,
    SOURCE,
    open_split,
    reasons_of,
)
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from pipeline.steps.file_ranges import StartsTask, file_starts
from schemas.errors import ConfigError
from schemas.storage import Store
from tests.support.archives import link, package, tar, tar_of, zipped
from tests.support.tiny_archive import record

PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>page</p>"


def warc(block=PAGE, kind="response", **fields):
    named = {"WARC-Type": kind, "Content-Type": "application/http", "Content-Length": len(block)}
    named |= {name.replace("_", "-"): value for name, value in fields.items()}
    header = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return b"WARC/1.0\r\n" + header.encode() + b"\r\n" + block + b"\r\n\r\n"


def archive(name, flags=0):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr(name, b"words")
    data = bytearray(out.getvalue())
    for place in (6, data.index(b"PK\x01\x02") + 8):
        data[place] |= flags
    return bytes(data)


def post(kind, accepted=None):
    """A row of Posts.xml whose question has the id 1."""
    number = 1 if kind == 1 else 7
    parent = ' ParentId="1"' if kind == 2 else f' AcceptedAnswerId="{accepted}"' if accepted else ""
    return f'<row Id="{number}" PostTypeId="{kind}"{parent} Score="1" Title="t" Body="b"/>\n'.encode()


def submission(**values):
    return json.dumps({"id": "a", "title": "t", "selftext": "s"} | values).encode()


def paper(text):
    return tar({"2101.00001.gz": gzip.compress(text.encode(), mtime=0)})


def code(name, text, **settings):
    folder = {"code": {"licences": ["any"]} | settings}
    return "code", tar({name: text}), folder


def nulls(num_rows):
    sink = io.BytesIO()
    table = pa.table({"x": pa.nulls(num_rows)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return "arrow", sink.getvalue(), {}


CASES = {
    "too_many_rows": nulls(120_000),
    "not_a_page": ("warc", warc(kind="request"), {}),
    "http_status": ("warc", warc(PAGE.replace(b"200", b"404")), {}),
    "not_html": ("warc", warc(PAGE.replace(b"text/html", b"image/png")), {}),
    "no_http_header": ("warc", warc(b"<p>page</p>"), {}),
    "bad_http": ("warc", warc(PAGE.replace(b"200", b"two")), {}),
    "bad_encoding": ("warc", warc(PAGE.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n\0")), {}),
    "page_too_large": ("warc", warc(), {"max_page_bytes": 10}),
    "record_too_large": ("warc", warc(PAGE.ljust(1025)), {"max_record_bytes": 1024}),
    "empty_page": ("warc", warc(PAGE[:-11]), {}),
    "truncated_record": ("warc", warc()[:-9], {}),
    "lying_length": ("warc", warc(Content_Length=20), {}),
    "digest_mismatch": ("warc", warc(WARC_Block_Digest="md5:0"), {"verify_digests": True}),
    "bad_header": ("warc", warc(Content_Length="many"), {}),
    "bad_gzip": ("warc", gzip.compress(warc(), mtime=0)[:-8] + bytes(8), {}),
    "decoded_too_large": ("warc", zstandard.ZstdCompressor().compress(warc(bytes(70 << 20))), {}),
    "unreadable_gap": ("warc", b"no archive", {}),
    "empty_file": ("warc", b"", {}),
    "bad_line": ("jsonl", b"{", {}),
    "no_text_field": ("jsonl", b"{}", {}),
    "bad_parents": ("jsonl", b'{"text": "a", "parents": ["zz"]}', {"parents_field": "parents"}),
    "too_many_parents": (
        "jsonl",
        json.dumps({"text": "a", "parents": ["http://e.com/"] * 1001}).encode(),
        {"parents_field": "parents"},
    ),
    "bad_xml": ("mediawiki", b"<page><title>&bomb;</title></page>", {}),
    "other_namespace": ("mediawiki", b"<page><ns>14</ns></page>", {}),
    "not_wikitext": ("mediawiki", b"<page><revision><model>Scribunto</model></revision></page>", {}),
    "redirect": ("mediawiki", b"<page><redirect title='A' /></page>", {}),
    "disambiguation": ("mediawiki", b"<page><title>A (disambiguation)</title></page>", {}),
    "not_a_book": ("books", b"%PDF-1.4 " + bytes(99), {}),
    "bad_archive": ("books", b"PK\x03\x04", {}),
    "bad_epub": ("books", archive("mimetype"), {}),
    "encrypted_book": ("gutenberg", archive("a.txt", flags=1), {}),
    "unsafe_name": ("books", archive("../mimetype"), {}),
    "bad_row": ("reddit", b"{}", {}),
    "ragged_row": ("csv", b"text\na,b\n", {}),
    "not_a_question": ("stackexchange", post(4), {}),
    "joined_to_question": ("stackexchange", post(1, 9) + post(2), {}),
    "answer_without_question": ("stackexchange", post(2), {}),
    "question_dropped": ("stackexchange", post(1) + post(2), {"stackexchange": {"min_score": 5}}),
    "low_answer_score": ("stackexchange", post(1, 9) + post(2), {"stackexchange": {"min_answer_score": 5}}),
    "surplus_answer": ("stackexchange", post(1, 9) + post(2), {"stackexchange": {"max_answers": 0}}),
    "unanswered": ("stackexchange", post(1), {"stackexchange": {"keep_unanswered": False}}),
    "xml_doctype": ("stackexchange", b"<!DOCTYPE posts>\n", {}),
    "low_score": ("reddit", submission(score=1), {"reddit": {"min_score": 2}}),
    "subreddit_not_kept": ("reddit", submission(subreddit="b"), {"reddit": {"subreddits": ["a"]}}),
    "bot_author": ("reddit", submission(author="AutoModerator"), {}),
    "deleted_post": ("reddit", submission(selftext="[deleted]"), {}),
    "adult_content": ("reddit", submission(over_18=True), {}),
    "link_post": ("reddit", submission(selftext=""), {}),
    "title_only": ("reddit", submission(selftext="", is_self=True), {}),
    "not_a_file": ("code", tar_of(link("a.py", "/etc/passwd")), {}),
    "unsafe_path": ("code", tar({"../a.py": "x = 1"}), {}),
    "bad_member": ("code", zipped({"a.py": "x = 1" * 99}).replace(b"\x08\x00", b"\x63\x00"), {}),
    "package_too_large": ("arxiv", paper("x" * 5_000), {"arxiv": {"max_tex_bytes": 1024}}),
    "pdf_only": ("arxiv", tar({"2101.00001.pdf": b"%PDF-1.5"}), {}),
    "no_tex": ("arxiv", tar({"2101.00001.gz": package({"a.html": "<p>"})}), {}),
    "withdrawn": ("arxiv", paper("%auto-ignore\nThis paper was withdrawn."), {}),
    "no_main_file": ("arxiv", tar({"2101.00001.gz": package({"a.tex": r"\section{A}", "b.tex": r"\section{B}"})}), {}),
    "too_many_expansions": ("arxiv", paper(r"\documentclass{a}\def\a{\b\b}\def\b{\a\a}\begin{document}\a"), {}),
    "unknown_language": code("a.bin", "x = 1"),
    "other_language": code("a.py", "x = 1", languages=["Rust"]),
    "unknown_licence": code("a.py", "x = 1", licences=["MIT"]),
    "other_licence": code("a.py", "# SPDX-License-Identifier: GPL-3.0-only\nx = 1", licences=["MIT"]),
    "lock_file": code("yarn.lock", "x"),
    "vendored": code("node_modules/a.js", "let x = 1"),
    "generated": code("a.py", "# Code generated by a tool. DO NOT EDIT.\n"),
    "binary_file": code("a.py", "x\0y"),
    "hidden_xml": code("a.py", "<?xml version='1.0'?><a/>"),
    "too_many_lines": code("a.py", "x = 1\n" * 9, max_lines=8),
    "long_line": code("a.py", "x = 1 + " + "one + " * 200 + "1"),
    "long_lines": code("a.py", "x = one + two", max_mean_line_chars=12),
    "few_alphanumeric": code("a.py", "a = " + "(" * 20),
    "few_alphabetic": code("a.py", "a = " + "1, " * 20),
    "encoded_data": code("a.py", "a = '" + "QUJDREVGR0hJSktM" * 5 + "'"),
    "data_size": code("a.json", '{"name": "value"}'),
    "little_visible_text": code("a.html", "<p class='only-markup'>text</p>"),
}


def zip64(start: int) -> bytes:
    """An archive whose directory says that its member begins at `start`, which takes eight bytes."""
    data = zipped({"a.py": "x = 1"})
    at = data.index(b"PK\x01\x02")
    size = len(data) - at - 22 + 12
    entry = bytearray(data[at:-22])
    entry[30:32], entry[42:46] = struct.pack("<H", 12), b"\xff" * 4
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, size, at, 0)
    return data[:at] + bytes(entry) + struct.pack("<HHQ", 1, 8, start) + end


def tar_size(size: int) -> bytes:
    """An archive whose first header declares a size in base 256."""
    data = bytearray(tar({"a.py": "x = 1"}))
    data[124:136] = b"\x80" + size.to_bytes(11, "big")
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    return bytes(data)


ARC = b"http://e.com/ 1.2.3.4 20240101000000 text/html 999999999999999\nHTTP/1.1 200 OK\r\n\r\n<p>page</p>\n"
BEYOND = {
    "warc": ("warc", warc(Content_Length=999999999999999), "lying_length"),
    "warc at the end of an offset": ("warc", warc(Content_Length=(1 << 44) - 1), "truncated_record"),
    "arc": ("warc", ARC, "truncated_record"),
    "warc in gzip": ("warc", gzip.compress(warc(Content_Length=999999999999999)), "truncated_record"),
    "zip": ("code", zip64((1 << 63) - 1), "bad_member"),
    "zip with a sign": ("code", zip64((1 << 64) - 1), "bad_member"),
    "tar": ("code", tar_size(1 << 80), "truncated_record"),
    "zstd": ("jsonl", b"\x50\x2a\x4d\x18\xff\xff\xff\xff{}", "truncated_record"),
    "arrow": ("arrow", b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64), "unreadable_gap"),
    "parquet": ("parquet", b"PAR1" + bytes(64) + b"\xff\xff\xff\x7fPAR1", "unreadable_gap"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_lengths_beyond_any_file_are_counted(case, tmp_path):
    format_name, stored, reason = BEYOND[case]
    name = "f.zip" if stored.startswith(b"PK") else "f.tar" if case == "tar" else "f"
    file = tmp_path / name
    file.write_bytes(stored + (warc() if case == "warc" else b""))
    split = Split(0, file.name, str(file), file.stat().st_size, "", "web", format_name)
    stream = open_stream(split)
    rows = [*open_split(split, stream, SourceConfig(paths=("x",), code={"licences": ["any"]}))]
    assert reason in [drop.rule for _, drop in rows if drop is not None]
    rest = {"warc": [None], "zip": [Drop("bad_member")], "zip with a sign": [Drop("bad_member")]}
    assert [drop for _, drop in rows][1:] == rest.get(case, [])
    assert sum(row["length"] for row, _ in rows) in (0, split.size)
    assert stream.finish()[1] == split.size


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason not in CRAWL_REASONS])
def test_every_reason_is_reached(reason):
    format_name, stored, settings = CASES[reason]
    name = "f.zip" if stored.startswith(b"PK") else "f"
    split = Split(0, name, name, len(stored), "", "web", format_name)
    config = SourceConfig(paths=("x",), **settings)
    rows = list(open_split(split, io.BytesIO(stored), config))
    assert [row["text"] for row, drop in rows if drop and drop.rule == reason] == [None]
    expected = reasons_of(format_name, has_parents=reason in PARENTS_REASONS)
    assert {drop.rule for _, drop in rows if drop} <= {*expected}
    if FORMATS[format_name].in_bytes:
        assert sum(row["length"] for row, _ in rows) == len(stored)
    assert (rows[0][0]["offset"], rows[0][0]["_payload"]) == (0, None)


def test_the_reasons_are_closed():
    assert set(CASES) | set(CRAWL_REASONS) == set(REASONS)  # those of a crawl are reached in test_crawl_run.py
    assert reasons_of("warc") == COMMON_REASONS
    assert reasons_of("warc", is_crawl=True) == COMMON_REASONS | CRAWL_REASONS
    assert "redirect" in reasons_of("mediawiki")
    assert reasons_of("books") == reasons_of("gutenberg")
    assert all("too_many_rows" in reasons_of(name) for name in ("parquet", "arrow", "hf", "code"))


def test_declaration():
    assert isinstance(SOURCE, Source)
    assert (SOURCE.name, SOURCE.version, SOURCE.config, SOURCE.open) == ("source", 12, SourceConfig, open_split)
    ((row, drop),) = open_split(
        Split(0, "f", "f", 0, "", "web", "warc"), io.BytesIO(warc()), SourceConfig(paths=("x",))
    )
    assert tuple(row) == SOURCE.adds
    assert (drop, row["_payload"]) == (None, b"<p>page</p>")


def test_files_of_every_format_from_disk(tmp_path):
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(warc()))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "line"}).encode()))
    pq.write_table(pa.table({"text": ["row"]}), tmp_path / "c.parquet")
    config = SourceConfig(name="all", paths=(f"{tmp_path}/*",))
    found = []
    for split in find_splits(config):
        stream = open_stream(split)
        for row, drop in open_split(split, stream, config):
            found.append((row["source"], row["split"], row["_payload"] or row["text"], drop))
        assert stream.finish()[1] == split.size
    assert found == [
        ("all", "a.warc.gz", b"<p>page</p>", None),
        ("all", "b.jsonl.gz", "line", None),
        ("all", "c.parquet", "row", None),
    ]


def test_the_setting_accepts_every_registered_format_and_no_other(tmp_path):
    (tmp_path / "set").mkdir()
    for name in ("a", "set/a.parquet"):
        (tmp_path / name).write_bytes(b"")
    needed = {"stackexchange": {"stackexchange": {"site": "a.stackexchange.com"}}, "hf": {"paths": f"{tmp_path}/set"}}
    for name in FORMATS:
        settings = {"paths": f"{tmp_path}/a", "format": name} | needed.get(name, {})
        assert [split.format for split in find_splits(SourceConfig.model_validate(settings))] == [name]
    with pytest.raises(ConfigError, match=r"source\.format: .*got 'parqet' \(did you mean 'parquet'\?\)"):
        find_splits(SourceConfig(paths=(f"{tmp_path}/a",), format="parqet"))
    assert [row.name for row in FORMATS.values()] == list(FORMATS)


@pytest.mark.parametrize(
    ("name", "formats"),
    [("a.warc.zst", ["warc"]), ("a.ARC", ["warc"]), ("a.json.bz2", ["jsonl"]), ("a.pq", ["parquet"]), ("a.pq.gz", [])],
)
def test_suffixes_name_one_format(name, formats):
    assert [row.name for row in FORMATS.values() if row.suffixes.search(name)] == formats


def _paper(macro: str) -> bytes:
    body = r"\begin{document}Hello \a{x} world, \begin{q}{x}hi\end{q}\end{document}"
    return gzip.compress((r"\documentclass{article}" + macro + body).encode())


def _zoned(zone: str, arrow: bool) -> bytes:
    table = pa.table({"text": ["hello there"], "when": pa.array([1], pa.timestamp("ms", tz=zone))})
    sink = io.BytesIO()
    if not arrow:
        pq.write_table(table, sink)
        return sink.getvalue()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


ODD = {
    "reddit: a time of 5,000 digits": (
        "reddit",
        "RS_2020-01",
        b'{"id":"d","title":"x","created_utc":"%s"}' % (b"9" * 5000),
    ),
    "reddit: an id with a letter that is A to Z in another case": (
        "reddit",
        "RS_2020-01",
        '{"id":"174\u01300r","title":"x"}'.encode(),
    ),
    "arxiv: a digit that is no number": ("arxiv", "2001.00001.gz", _paper(r"\newcommand{\a}[1]{#²}")),
    "arxiv: a digit in a circle": ("arxiv", "2001.00001.gz", _paper(r"\newenvironment{q}[1]{#③}{}")),
    **{f"parquet: time zone {zone!r}": ("parquet", "f", _zoned(zone, False)) for zone in ("Nope/Zone", "+99:99")},
    **{f"arrow: time zone {zone!r}": ("arrow", "f", _zoned(zone, True)) for zone in ("Nope/Zone", "UTC\0")},
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_ends_no_file(name: str) -> None:
    """Each of these raised an error in the reader, which no retry could pass."""
    file_format, file, data = ODD[name]
    config = SourceConfig(paths=("x",))
    split = Split(0, file, file, len(data), "", "web", file_format)
    ((row, drop),) = open_split(split, HashedStream(io.BytesIO(data)), config)
    assert row["record_type"] != "gap"
    assert (drop is not None and drop.rule == "bad_row") == ("an id" in name)


def test_an_error_of_a_reader_costs_the_rest_of_the_file_and_is_named(monkeypatch) -> None:
    """An error in the program must not end the run: the gap is counted, and the line of code is in the manifest."""
    from pipeline.sources import formats

    def broken(split: Split, stream: Any, config: SourceConfig) -> Any:
        rows = own.open(split, stream, config)
        yield next(rows)
        yield next(rows)
        raise KeyError("a bug")

    own = formats.FORMATS["warc"]
    data = b"".join(gzip.compress(record(b"a", kind="resource")) for _ in range(5))
    monkeypatch.setitem(formats.FORMATS, "warc", replace(own, open=broken))
    rows = list(
        open_split(
            Split(0, "f", "f", len(data), "", "web", "warc"), HashedStream(io.BytesIO(data)), SourceConfig(paths=("x",))
        )
    )
    assert [row["record_type"] for row, _ in rows] == ["resource", "resource", "gap"]
    gap, drop = rows[-1]
    assert drop == Drop("unreadable_gap", float(gap["length"]))
    assert sum(row["length"] for row, _ in rows) == len(data)
    assert len({row["doc_id"] for row, _ in rows}) == len(rows)
    failure = gap[FAILURE]
    assert (failure.stage, failure.error, failure.place.partition(":")[0]) == ("source", "KeyError", "test_source.py")


class FailingFile(io.BytesIO):
    """A file one read of which fails, although the next ones do not."""

    def __init__(self, content: bytes, fails_at: int):
        super().__init__(content)
        self.num_reads, self._fails_at = 0, fails_at

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        if self.num_reads == self._fails_at:
            raise OSError("the disk is gone")
        return super().read(size)


def stored_rows(name: str) -> bytes:
    """A file of 30 rows, which do not compress, in the format of its name."""
    random = Random(1)
    texts = [random.randbytes(60_000).hex() for _ in range(30)]
    table, sink = pa.table({"text": texts}), io.BytesIO()
    if name.endswith("parquet"):
        pq.write_table(table, sink, row_group_size=5)
    elif name.endswith("arrow"):
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    elif name.endswith("7z"):
        rows = (f'<row Id="{n}" PostTypeId="1" Score="1" Title="t" Body="{text}" />' for n, text in enumerate(texts, 1))
        with pytest.importorskip("py7zr").SevenZipFile(sink, "w") as archive:
            archive.writestr("\n".join(["<posts>", *rows, "</posts>"]), "Posts.xml")
    else:
        lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
        sink.write(zstandard.ZstdCompressor().compress(lines))
    return sink.getvalue()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst", "cooking.stackexchange.com.7z"])
def test_errors_of_the_storage_are_raised(name: str) -> None:
    """Decoders and pyarrow take them for damage, and the next read may work: the rows must not become a gap."""
    content = stored_rows(name)
    kind = {"parquet": "parquet", "arrow": "arrow", "zst": "jsonl", "7z": "stackexchange"}[name.rpartition(".")[2]]
    split = Split(0, name, name, len(content), "", "web", kind)

    def read(fails_at: int) -> tuple[int, FailingFile]:
        file = FailingFile(content, fails_at)
        stream = HashedStream(file)
        kept = sum(drop is None for _, drop in open_split(split, stream, SourceConfig(paths=("x",))))
        assert stream.finish()[1] == len(content)
        return kept, file

    kept, file = read(0)
    assert kept == 30
    for number in {1, 2, *range(3, file.num_reads, max(1, file.num_reads // 6)), file.num_reads}:
        with pytest.raises(OSError, match="the disk is gone"):
            read(number)


def test_an_error_of_the_storage_ends_the_search_for_ranges(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(stored_rows(path.name))
    config = SourceConfig(paths=(str(path),), part_bytes=1 << 20)
    (split,) = find_splits(config)
    with (
        patch("pipeline.steps.file_ranges.open_stream", lambda _: HashedStream(FailingFile(path.read_bytes(), 1))),
        pytest.raises(OSError, match="the disk is gone"),
    ):
        file_starts(StartsTask(split, config, Store(str(tmp_path / "ranges"))), False)


def test_record_types_of_any_text_are_one() -> None:
    blocks = [gzip.compress(record(b"a", kind="z" * 5000)), gzip.compress(record(b"a", kind="odd kind"))]
    data = b"".join(blocks)
    split = Split(0, "f", "f", len(data), "", "web", "warc")
    rows = list(open_split(split, HashedStream(io.BytesIO(data)), SourceConfig(paths=("x",))))
    assert {row["record_type"] for row, _ in rows} == {"other"}
