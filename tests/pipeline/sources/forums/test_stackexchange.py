"""Stack Exchange: a document per question with its best answers first, and every row of Posts.xml accounted for."""

import bz2
import gzip
import io
import json
import tracemalloc
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest
import zstandard

from pipeline.engine.stage import Drop, Split
from pipeline.extract.extract import ExtractConfig, make_extract
from pipeline.sources import compression, provenance
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from schemas.errors import ConfigError
from tests.support.paths import SHARED

SAMPLES = SHARED / "sources" / "stackexchange"
SITE = {"site": "coffee.stackexchange.com"}
HEAD = b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?>\n<posts>\n'


def element(**attributes: Any) -> bytes:
    text = " ".join(f"{name}={quoteattr(str(value), {chr(10): '&#xA;'})}" for name, value in attributes.items())
    return f"  <row {text} />\n".encode()


def question(number: int = 1, **values: Any) -> bytes:
    known = {"CreationDate": "2015-01-27T20:09:32.720", "Score": 3, "Body": "<p>Why?</p>", "Title": "A title"}
    return element(Id=number, PostTypeId=1, **(known | values))


def answer(number: int, parent: int = 1, **values: Any) -> bytes:
    known = {"CreationDate": "2015-02-01T00:00:00.000", "Score": 1, "Body": f"<p>Answer {number}</p>"}
    return element(Id=number, PostTypeId=2, ParentId=parent, **(known | values))


def dump(*rows: bytes) -> bytes:
    return HEAD + b"".join(rows) + b"</posts>"


Rows = list[tuple[dict[str, Any], Drop | None]]


def read(stored: bytes, decoded: bytes | None = None, **settings: Any) -> Rows:
    """The rows of a file, after checking that they follow each other without a hole."""
    config = SourceConfig.model_validate({"paths": "x", "stackexchange": SITE | settings})
    split = Split(0, "Posts.xml", "Posts.xml", len(stored), "", "s", "stackexchange")
    rows = list(open_split(split, HashedStream(io.BytesIO(stored)), config))
    position = 0
    for row, _ in rows:
        assert row["offset"] == position
        position += row["length"]
    assert decoded is None or position == len(decoded)
    return rows


def rules(rows: Rows) -> list[str]:
    return [drop.rule if drop else "kept" for _, drop in rows]


def archive(path: Path, members: dict[str, bytes]) -> bytes:
    py7zr = pytest.importorskip("py7zr", reason="needs the package py7zr")
    with py7zr.SevenZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(data, name)
    return path.read_bytes()


def test_a_question_with_its_answers_best_first() -> None:
    rows = [
        answer(9, Score=2),  # before its question
        question(AcceptedAnswerId=7, Tags="<storage><whole-bean>", Title="A &amp; B"),
        answer(7, Score=0),
        answer(5, Score=8, Body="<p>If <code>a < b</code>:</p><pre><code>x = 1\n\n\n  y $z$\n</code></pre>"),
        answer(8, Score=2),
    ]
    content = dump(*rows)
    found = read(content, content)
    assert rules(found) == ["joined_to_question", "kept", *["joined_to_question"] * 3]
    row = found[1][0]
    texts = ["A &amp; B", "Why?", "Answer 7", "If a < b:", "x = 1\n\n\ufdd0\n  y $z$", "Answer 8", "Answer 9"]
    assert row["text"] == "\n\n".join(texts)
    assert (row["title"], row["url"]) == ("A &amp; B", "https://coffee.stackexchange.com/questions/1")
    assert (row["date"], row["licence"]) == (datetime(2015, 1, 27, 20, 9, 32, 720000, UTC), "CC-BY-SA-3.0")
    meta = json.loads(row["meta"])
    assert (meta["tags"], meta["answer_ids"], meta["answer_scores"]) == (
        ["storage", "whole-bean"],
        [7, 5, 8, 9],
        [0, 8, 2, 2],
    )
    assert row["parents"] == [f"https://coffee.stackexchange.com/a/{number}" for number in (7, 5, 8, 9)]
    for (offset, length), number in zip(meta["answer_offsets"], (7, 5, 8, 9), strict=True):
        assert f'<row Id="{number}"'.encode() in content[offset : offset + length]
    make_extract(ExtractConfig(extractor="all"), {})(row)
    assert "x = 1\n\n\n  y $z$" in row["text"]  # code as it is, its empty lines too


def test_markdown() -> None:
    body = "<h2>Head</h2><pre><code>x\n</code></pre><blockquote><p>said</p></blockquote>"
    ((row, _),) = read(dump(question(Body=body)), markdown=True)
    assert row["text"] == "A title\n\n## Head\n\n```\nx\n```\n\n> said"


@pytest.mark.parametrize(
    ("rows", "settings", "found"),
    [
        ([question(Score=2), answer(2)], {"min_score": 3}, ["low_score", "question_dropped"]),
        ([question(Score=3)], {"min_score": 3}, ["kept"]),
        ([question(), answer(2, Score=1)], {"min_answer_score": 2}, ["kept", "low_answer_score"]),
        ([question(AcceptedAnswerId=2), answer(2)], {"min_answer_score": 2}, ["kept", "joined_to_question"]),
        ([question()], {"keep_unanswered": False}, ["unanswered"]),
        (
            [question(), answer(2)],
            {"keep_unanswered": False, "min_answer_score": 2},
            ["unanswered", "low_answer_score"],
        ),
        (
            [question(), answer(2), answer(3, Score=5)],
            {"max_answers": 1},
            ["kept", "surplus_answer", "joined_to_question"],
        ),
        ([answer(2, parent=4)], {}, ["answer_without_question"]),
        ([element(Id=5, PostTypeId=4, Body="x")], {}, ["not_a_question"]),
        ([b"<row Id='1' />\n"], {}, ["bad_row"]),
        ([element(PostTypeId=1)], {}, ["bad_row"]),
        ([question(Body=""), question(2, Body="", Title="")], {}, ["kept", "empty_page"]),
        ([b'<row Id="1" PostTypeId="1" Body="cut\n', question(2)], {}, ["bad_row", "kept"]),
        ([question().rstrip() + question(2)], {}, ["kept", "kept"]),
    ],
)
def test_every_reason(rows: list[bytes], settings: Any, found: list[str]) -> None:
    assert rules(read(dump(*rows), dump(*rows), **settings)) == found


@pytest.mark.parametrize(
    ("day", "licence"),
    [
        ("2011-04-07", "CC-BY-SA-2.5"),
        ("2011-04-08", "CC-BY-SA-3.0"),
        ("2018-05-01", "CC-BY-SA-3.0"),
        ("2018-05-02", "CC-BY-SA-4.0"),
    ],
)
def test_the_licence_follows_from_the_day(day: str, licence: str) -> None:
    post = question(CreationDate=f"{day}T23:59:59.000")
    ((row, _),) = read(dump(post))
    assert row["licence"] == licence
    both = read(dump(post, answer(2, CreationDate="2024-01-01T00:00:00.000", ContentLicense="CC BY-SA 4.0")))
    assert both[0][0]["licence"] == " AND ".join(sorted({licence, "CC-BY-SA-4.0"}))


def test_entities_are_not_expanded() -> None:
    bomb = b'<?xml version="1.0"?>\n<!DOCTYPE posts [\n<!ENTITY a "aaaa">\n<!ENTITY b "&a;&a;">\n]>\n<posts>\n'
    content = bomb + b'<row Id="1" PostTypeId="1" Title="x" Body="&b;" />\n' + question(2) + b"</posts>"
    assert rules(read(content, content)) == ["xml_doctype", "bad_row", "kept"]
    for body in ("&#0;", "&#x110000;", "&#65;&#x42;"):
        content = dump(b'<row Id="1" PostTypeId="1" Title="x" Body="%s" />' % body.encode())
        assert rules(read(content, content)) == ["kept"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, zstandard.compress])
def test_damage_costs_what_is_lost(pack: Any) -> None:
    content = dump(*[question(number, Body="x" * 200) for number in range(1, 3000)])
    rows = read(pack(content)[:-30])
    assert all(row["text"] for row, drop in rows if drop is None)
    assert {"truncated_record", "bad_row", "kept"} >= set(rules(rows))


def test_a_row_and_a_question_that_are_too_large() -> None:
    config = SourceConfig.model_validate(
        {"paths": "x", "max_record_bytes": 2000, "max_page_bytes": 1500, "stackexchange": SITE}
    )
    content = dump(question(Body="x" * 3000), question(2, Body="y" * 1600), question(3), question(4))
    content += b"".join(answer(number, 4, Body="z" * 900) for number in range(10, 20))
    split = Split(0, "Posts.xml", "Posts.xml", len(content), "", "s", "stackexchange")
    found = rules(list(open_split(split, HashedStream(io.BytesIO(content)), config)))
    assert found[:4] == ["record_too_large", "page_too_large", "kept", "page_too_large"]


def test_deeply_nested_markup_is_left_out() -> None:
    ((row, _),) = read(dump(question(Body="<b>" * 20_000 + "deep")))
    assert row["text"].split() == ["A", "title", "deep"]


@pytest.mark.parametrize("name", ["Posts.xml", "Posts.xml.gz", "coffee.stackexchange.com.7z"])
def test_files_from_disk_and_a_question_read_again(tmp_path: Path, name: str) -> None:
    content = dump(question(), answer(2), question(3, Body="<p>ü</p>" * 5), answer(4, 3))
    folder = tmp_path / "coffee.stackexchange.com"
    folder.mkdir()
    if name.endswith(".7z"):
        archive(folder / name, {"Badges.xml": b"<badges/>" * 9, "Posts.xml": content, "Users.xml": b"<users/>"})
    else:
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    config = SourceConfig(paths=(f"{folder}/*",))
    (split,) = find_splits(config)
    assert split.format == "stackexchange"
    stream = open_stream(split)
    rows = list(open_split(split, stream, config))
    assert stream.finish()[1] == split.size
    assert rules(rows) == ["kept", "joined_to_question"] * 2
    assert sum(row["length"] for row, _ in rows) == len(content)
    for row, _ in rows:
        found = refetch(split, row, config)
        assert found.changes == ()
        assert found.head == content[row["offset"] : row["offset"] + row["length"]]
    assert refetch(split, rows[2][0] | {"page_bytes": 1}, config).changes == ("page_bytes: expected 1, got 45",)


def test_a_dump_with_too_many_rows_and_an_archive_that_holds_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "DECODED_FREE", 2 << 20)
    repeated = dump(question(1)).replace(
        b"</posts>", f'<row Id="0" Title="{"a" * 99}"/>\n'.encode() * 60_000 + b"</posts>"
    )
    rows = read(archive(tmp_path / "a.7z", {"Posts.xml": repeated}))
    assert rules(rows)[0] == "kept"
    assert rules(rows)[-1] == "decoded_too_large"
    monkeypatch.undo()
    monkeypatch.setattr(provenance, "FREE_ROWS", 50)
    monkeypatch.setattr(provenance, "ROWS_A_BYTE", 0)
    rows = read(dump(question(1)).replace(b"</posts>", b'<row Id="0"/>' * 100 + b"</posts>"))
    assert rules(rows)[-1] == "too_many_rows"
    assert len(rows) == 51


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    stored = archive(tmp_path / "a.7z", {"Posts.xml": dump(*[question(n) for n in range(1, 2000)])})
    assert rules(read(archive(tmp_path / "b.7z", {"Users.xml": b"x"}))) == ["unreadable_gap"]
    for damaged in (stored[:40], stored[: len(stored) // 2], stored[:32] + b"\xff" * 50 + stored[82:], stored[:6]):
        rows = read(damaged)
        assert rows[-1][1] is not None
        assert rows[-1][1].rule in ("bad_gzip", "truncated_record", "unreadable_gap", "bad_row")


def test_a_site_is_needed(tmp_path: Path) -> None:
    (tmp_path / "Posts.xml").write_bytes(dump())
    with pytest.raises(ConfigError, match=r"without the name of a site\. Set source\.stackexchange\.site\."):
        find_splits(SourceConfig(paths=(f"{tmp_path}/Posts.xml",)))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("coffee", {"kept": 225, "joined_to_question": 327, "not_a_question": 40}),
        ("quantumcomputing", {"kept": 612, "joined_to_question": 1060, "not_a_question": 314}),
    ],
)
@pytest.mark.skipif(not SAMPLES.exists(), reason=f"needs the samples in {SAMPLES}")
def test_every_row_of_real_dumps(name: str, counts: dict[str, int]) -> None:
    stored = (SAMPLES / f"{name}.Posts.xml.gz").read_bytes()
    rows = read(stored, gzip.decompress(stored))
    assert Counter(rules(rows)) == counts
    kept = [row for row, drop in rows if drop is None]
    assert sum(len(json.loads(row["meta"]).get("answer_ids", ())) for row in kept) == counts["joined_to_question"]


def test_answers_are_joined_to_the_first_of_several_questions_with_one_id() -> None:
    """Joined to each of them, they would take time and memory quadratic in the size of the file."""
    rows = read(dump(question(1, Title="first"), answer(2), question(1, Title="second"), answer(3)))
    assert rules(rows) == ["kept", "joined_to_question", "bad_row", "joined_to_question"]
    assert (rows[0][0]["title"], json.loads(rows[0][0]["meta"])["answer_ids"]) == ("first", [2, 3])


def test_surplus_answers_of_interleaved_questions_are_found() -> None:
    posts = [question(number) for number in (1, 2)]
    posts += [answer(10 + number, 1 + number % 2, Score=number) for number in range(8)]
    found = rules(read(dump(*posts), max_answers=2))
    assert found == ["kept"] * 2 + ["surplus_answer"] * 4 + ["joined_to_question"] * 4


def test_an_answer_is_joined_once_or_its_row_says_why_not() -> None:
    foreign = answer(2, Body="BODY").replace(b"BODY", b"long &nbsp; and valuable")
    rows = read(dump(question(1), foreign, answer(3, Body="once only"), answer(3, Body="once only")))
    assert rules(rows) == ["kept", "bad_row", "joined_to_question", "bad_row"]
    assert rows[0][0]["text"].count("once only") == 1
    assert json.loads(rows[0][0]["meta"])["answer_ids"] == [3]
    lost = question(1, Body="BODY").replace(b"BODY", b"a &nbsp; b")
    assert rules(read(dump(lost, answer(2)))) == ["bad_row", "question_dropped"]
    escaped = question(1, Body="a &amp;nbsp; b")
    assert rules(read(dump(escaped, answer(2)))) == ["kept", "joined_to_question"]


def test_a_second_dump_in_an_archive_is_reported(tmp_path: Path) -> None:
    members = {f"{name}/Posts.xml": dump(question(number)) for number, name in enumerate("ab", 1)}
    assert rules(read(archive(tmp_path / "a.7z", members))) == ["kept", "unreadable_gap"]


def test_answers_that_are_too_large_are_not_read() -> None:
    """All answers of a question have 200 MB, and a text at most 16."""
    body = "x" * (1 << 20)
    stored = gzip.compress(dump(question(), *(answer(number, Body=body) for number in range(2, 202))), 1)
    tracemalloc.start()
    drops = [drop and drop.rule for _, drop in read(stored)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert drops == ["page_too_large", *["joined_to_question"] * 200]
    assert most < 60 << 20
