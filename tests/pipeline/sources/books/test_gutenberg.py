"""Books of Project Gutenberg: header, licence and credits of all ages are cut off, and the facts in them are kept."""

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.stage import Drop, Split
from pipeline.sources.books.gutenberg import cut_book, header_fields, open_gutenberg
from pipeline.sources.config import GutenbergConfig, SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from tests.support.paths import SHARED

CONFIG = SourceConfig(paths=("x",), max_record_bytes=1 << 16)
FIELDS = """\
The Project Gutenberg EBook of The Book, by A. Writer

This eBook is for the use of anyone anywhere at no cost.

Title: The Book
       A Story

Author: A. Writer

Release Date: May 8, 2007  [EBook #3261]
Last Updated: November 21, 2015

Language: French

Character set encoding: ISO-8859-1
"""
BODY = "CHAPTER I\n\nFirst words\u00e9.\n\nTranscriber's note: spelling kept."
MODERN_END = "*** END OF THE PROJECT GUTENBERG EBOOK THE BOOK ***\n\nSection 1. General Terms"
OLD_HEAD = """\
**The Project Gutenberg Etext of The Book, by A. Writer**

Copyright laws are changing all over the world, be sure to check.

**Welcome To The World of Free Plain Vanilla Electronic Texts**

The Book

by A. Writer

March, 1994  [Etext #114]

***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***
Why is this "Small Print!" statement here?
"""

HEADS = {
    "this": f"{FIELDS}\n*** START OF THIS PROJECT GUTENBERG EBOOK THE BOOK ***\n\n",
    "the": f"{FIELDS}\n*** START OF THE PROJECT GUTENBERG EBOOK THE BOOK ***\n\n",
    "no space": f"{FIELDS}\n***START OF THE PROJECT GUTENBERG EBOOK THE BOOK***\n\n",
    "two lines": f"{FIELDS}\n*** START OF THE PROJECT GUTENBERG EBOOK THE BOOK WITH A\nLONG TITLE ***\n\n",
    "e-text": f"{FIELDS}\n*** START OF THE PROJECT GUTENBERG E-TEXT, THE BOOK ***\n\n",
    "credits": f"{FIELDS}\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n\nProduced by A and the\nOnline Team\n\n",
    "transcribed": f"{FIELDS}\n***START OF THE PROJECT GUTENBERG EBOOK X***\n\n\nTranscribed from an edition by D\n\n",
    "e-text by": f"{FIELDS}\n***START OF THE PROJECT GUTENBERG EBOOK X***\n\nE-text prepared by A\n\nNote: "
    "Project Gutenberg also has an HTML version\n\n",
    "small print": f"{OLD_HEAD}*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n",
    "small print 2": f"{OLD_HEAD}*END THE SMALL PRINT! FOR PUBLIC DOMAIN E-TEXTS*Ver.07*END*\n\n\nScanned by A. B.\n\n",
    "before 1992": "Project Gutenberg Etext of The Book, by A. Writer\n[Etext #114]\n\nThis etext is of 1991.\n\n",
    "none": "",
}
TAILS = {
    "end of the": f"\n\nEnd of the Project Gutenberg EBook of The Book, by A. Writer\n\n{MODERN_END}",
    "end of": f"\n\nEnd of Project Gutenberg's The Book, by A. Writer\n\n{MODERN_END}",
    "mark": f"\n\n{MODERN_END}",
    "this mark": f"\n\n{MODERN_END.replace('OF THE', 'OF THIS')}",
    "no space": f"\n\n{MODERN_END.replace('*** END', '***END')}",
    "etext": "\n\n\nEnd of The Project Gutenberg Etext of The Book, by A. Writer\n",
    "this etext": "\n\nEnd of this Project Gutenberg Etext\n",
    "german": "\n\nEnde dieses Projekt Gutenberg Etextes The Book",
    "french": "\n\nFin de Project Gutenberg Etext The Book\n",
    "licence": "\n\n*** START: FULL LICENSE ***\n\nTHE FULL PROJECT GUTENBERG LICENSE",
    "small print": "\n\n***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nWhy is this",
    "none": "\n",
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tail", TAILS)
def test_what_is_around_a_book_is_cut_off(head: str, tail: str) -> None:
    book = cut_book(HEADS[head] + BODY + TAILS[tail])
    assert book.body.strip() == BODY


def test_a_book_that_mentions_the_marks_keeps_its_text() -> None:
    text = "The end.\n\nEnd of Project Gutenberg was a phrase.\n\n" + "Many words follow here.\n" * 4000 + BODY
    head = HEADS["this"]
    assert cut_book(head + text + TAILS["end of the"]).body.strip() == text
    assert cut_book("A text about the small print.\n\nFin").body == "A text about the small print.\n\nFin"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            FIELDS,
            {"Title": "The Book A Story", "Author": "A. Writer", "Release Date": "May 8, 2007", "Language": "French"},
        ),
        (OLD_HEAD, {"Title": "The Book", "Author": "A. Writer"}),
        ("Project Gutenberg's Etext of Emma, by Jane Austen\n", {"Title": "Emma", "Author": "Jane Austen"}),
        ("The Project Gutenberg EBook of Emma\n", {"Title": "Emma"}),
        ("", {}),
    ],
)
def test_header_fields(header: str, expected: dict[str, str]) -> None:
    assert expected.items() <= header_fields(header).items()


def read(stored: bytes, name: str = "b.txt", config: SourceConfig = CONFIG) -> list[tuple[dict[str, Any], Drop | None]]:
    """The rows of a file, after checking that they follow each other without a hole."""
    split = Split(0, name, name, len(stored), "", "books", "gutenberg")
    rows = [*open_gutenberg(split, HashedStream(io.BytesIO(stored)), config)]
    assert [row["offset"] for row, _ in rows] == [sum(row["length"] for row, _ in rows[:n]) for n in range(len(rows))]
    return rows


def packed(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("_", "."), data)
    return out.getvalue()


MODERN = (HEADS["credits"] + BODY + TAILS["end of"]).encode("latin-1")


@pytest.mark.parametrize(
    ("name", "pack"), [("b.txt", bytes), ("b.txt.gz", gzip.compress), ("b.zip", lambda data: packed(b_txt=data))]
)
def test_a_book(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / name).write_bytes(pack(MODERN))
    config = SourceConfig(paths=(f"{tmp_path}/*",), format="gutenberg")
    (split,) = find_splits(config)
    ((row, drop),) = open_split(split, open_stream(split), config)
    assert (drop, row["text"], row["title"]) == (None, BODY, "The Book A Story")
    assert (row["url"], row["domain"]) == ("https://www.gutenberg.org/ebooks/3261", "gutenberg.org")
    assert (row["date"], row["record_type"]) == (datetime(2007, 5, 8, tzinfo=UTC), "book")
    assert json.loads(row["meta"]) == {"author": "A. Writer", "language": "French", "ebook": 3261}
    again = refetch(split, row, config)
    assert (again.changes, again.head) == ((), MODERN[:2000])


@pytest.mark.parametrize(
    ("label", "codec"),
    [
        ("UTF-8", "utf-8"),
        ("ISO-8859-1", "latin-1"),
        ("8859-1", "latin-1"),
        ("Windows-1252", "cp1252"),
        ("ASCII", "utf-8"),
    ],
)
def test_charsets(label: str, codec: str) -> None:
    stored = MODERN.decode("latin-1").replace("ISO-8859-1", label).encode(codec)
    ((row, drop),) = read(stored)
    assert (drop, row["text"]) == (None, BODY)


def test_number_and_date_of_old_books_and_of_names() -> None:
    ((row, _),) = read((HEADS["small print"] + BODY).encode())
    assert (row["url"], row["date"]) == ("https://www.gutenberg.org/ebooks/114", datetime(1994, 3, 1, tzinfo=UTC))
    assert read(b"words", "pg0042.txt.gz")[0][0]["url"] == "https://www.gutenberg.org/ebooks/42"
    assert read(b"words", "1/2/12-0.txt")[0][0]["url"] == "https://www.gutenberg.org/ebooks/12"
    assert read(b"words", "notes12.txt")[0][0]["url"] is None
    assert "copyrighted" in read(b"This is a COPYRIGHTED Project Gutenberg eBook\n\n" + b"words\n" * 99)[0][0]["meta"]


def test_members_of_an_archive_are_records(tmp_path: Path) -> None:
    members = {"a.txt": MODERN, "a.htm": b"<p>", "../b.txt": b"words", "c.TXT": b"words", "d.txt": b"x" * (1 << 17)}
    path = tmp_path / "a.zip"
    path.write_bytes(packed(**members))
    rows = read(path.read_bytes())
    rules = [drop.rule if drop else "kept" for _, drop in rows]
    assert rules == ["kept", "not_a_book", "unsafe_name", "kept", "record_too_large"]
    split = Split(0, "a.zip", str(path), path.stat().st_size, "", "books", "gutenberg")
    assert refetch(split, rows[3][0], CONFIG).changes == ()
    assert refetch(split, rows[3][0], CONFIG).head == b"words"
    assert refetch(split, rows[3][0] | {"offset": 7}, CONFIG).changes == (
        f"length: expected {rows[3][0]['length']} bytes from 7 on, got 0",
    )


@pytest.mark.parametrize(
    ("name", "members", "numbers"),
    [
        ("two.zip", {"84-0.txt": b"words", "1342.txt": b"words"}, [84, 1342]),
        ("77.zip", {"a.txt": b"words", "b.txt": b"words"}, [None, None]),
        ("77.zip", {"a.txt": b"words"}, [77]),
        ("one.zip", {"84-0.txt": b"words"}, [None]),
    ],
)
def test_the_number_of_a_member_is_that_when_it_is_read_again(
    tmp_path: Path, name: str, members: dict[str, bytes], numbers: list[int | None]
) -> None:
    (tmp_path / name).write_bytes(packed(**members))
    config = SourceConfig(paths=(f"{tmp_path}/*",), format="gutenberg")
    (split,) = find_splits(config)
    rows = [row for row, _ in open_split(split, open_stream(split), config)]
    assert [row["url"] for row in rows] == [n and f"https://www.gutenberg.org/ebooks/{n}" for n in numbers]
    assert [refetch(split, row, config).changes for row in rows] == [()] * len(rows)


def damaged_archives() -> dict[str, bytes]:
    whole = packed(a_txt=b"words " * 200)
    start = whole.index(b"a.txt") + 5
    encrypted = bytearray(whole)
    encrypted[6] |= 1
    encrypted[whole.index(b"PK\x01\x02") + 8] |= 1
    lying = bytearray(packed(a_txt=b"0" * (1 << 20)))
    for position in (22, lying.index(b"PK\x01\x02") + 24):
        lying[position : position + 4] = (10).to_bytes(4, "little")
    method = bytearray(whole)
    method[8] = method[whole.index(b"PK\x01\x02") + 10] = 6
    huge = bytearray(whole)
    huge[-10:-6] = (1 << 31).to_bytes(4, "little")
    return {
        "bad_archive cut": whole[:-30],
        "bad_archive data": whole[:start] + b"\xff" * 8 + whole[start + 8 :],
        "bad_archive start only": b"PK\x03\x04",
        "bad_archive list": bytes(huge),
        "bad_archive method": bytes(method),
        "bad_archive size": bytes(lying),
        "encrypted_book": bytes(encrypted),
        "record_too_large bomb": packed(a_txt=b"0" * (1 << 22)),
    }


@pytest.mark.parametrize("name", damaged_archives())
def test_damaged_archives(name: str) -> None:
    stored = damaged_archives()[name]
    ((row, drop),) = read(stored)
    assert (drop and drop.rule, row["length"]) == (name.split()[0], len(stored))


@pytest.mark.parametrize(
    ("stored", "rule"),
    [
        (b"", "empty_file"),
        (b" \n\n ", "empty_page"),
        (b"\x00\x01\x02\x03 \xff" * 50, "not_a_book"),
        (b"x" * (1 << 17), "record_too_large"),
        (gzip.compress(b"x" * (1 << 24)), "record_too_large"),
        (gzip.compress(MODERN)[:-20], "truncated_record"),
        (gzip.compress(MODERN)[:-8] + bytes(8), "bad_gzip"),
    ],
)
def test_damaged_files(stored: bytes, rule: str) -> None:
    ((row, drop),) = read(stored)
    assert (drop and drop.rule, row["text"]) == (rule, None)


def test_lines_are_kept_by_choice() -> None:
    text = ("words of a line that is rather long for its width\n" * 4).encode()
    assert "\n" not in read(text)[0][0]["text"]
    config = CONFIG.model_copy(update={"gutenberg": GutenbergConfig(join_lines=False)})
    assert read(text, config=config)[0][0]["text"].count("\n") == 3


@given(st.lists(st.sampled_from([*HEADS.values(), *TAILS.values(), "\n\n", "words", "***"]), max_size=6), st.binary())
def test_no_file_raises(parts: list[str], rest: bytes) -> None:
    content = "".join(parts).encode() + rest
    assert sum(row["length"] for row, _ in read(content)) >= 0


GUTENBERG = SHARED / "sources" / "gutenberg"


@pytest.mark.skipif(not GUTENBERG.is_dir(), reason=f"no real books in {GUTENBERG}")
@pytest.mark.parametrize(
    ("name", "title", "first", "last", "chars"),
    [
        ("972.txt.gz", "The Devil's Dictionary", "THE DEVIL'S DICTIONARY", "every two years.", 359079),
        ("3261.txt.gz", "News from Nowhere or An Epoch of Rest", "NEWS FROM NOWHERE", "must have meant.", 422625),
        ("44157-0.txt.gz", "Entre Nous", "Au lecteur.", "vensterbank.)", 119801),
        ("1342-0.txt.gz", "Pride and Prejudice", "PRIDE AND PREJUDICE", "uniting them.", 684427),
        ("14263-8.txt.gz", "Katrine", "[Illustration:", "THE END", 344783),
    ],
)
def test_real_books(name: str, title: str, first: str, last: str, chars: int) -> None:
    config = SourceConfig(paths=(str(GUTENBERG / name),), format="gutenberg")
    (split,) = find_splits(config)
    ((row, drop),) = open_split(split, open_stream(split), config)
    text = row["text"]
    assert (drop, row["title"].startswith(title), text.startswith(first), text.endswith(last)) == (
        None,
        True,
        True,
        True,
    )
    assert len(text) == chars
    assert "Gutenberg" not in text
    assert refetch(split, row, config).changes == ()


def test_long_white_space_in_a_header_is_read_as_a_short_one() -> None:
    """The pattern of the first line takes the fourth power of its length: without this the test does not end."""
    gap, lines = " " * 1_000, "\n \t" * 300
    assert header_fields(f"The Project Gutenberg{gap}EBook{gap}of Emma\n") == {"Title": "Emma"}
    assert header_fields(f"The Project Gutenberg{lines}EBook of Emma\n") == {"Title": "Emma"}
    assert header_fields(f"The Project Gutenberg EBook of Emma{gap}\n{gap}by somebody\n") == {"Title": "Emma"}
    assert "Title" not in header_fields(f"The Project Gutenberg{gap}{'x' * 300}\n")


def test_members_that_share_their_bytes_are_read_once() -> None:
    data = packed(a_txt=MODERN, b_txt=MODERN)
    begin, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    first = data[begin : data.index(b"PK\x01\x02", begin + 4)]
    listed = (
        b"".join(first.replace(b"a.txt", b"%c.txt" % letter) for letter in b"acdefg") + data[begin + len(first) : end]
    )
    tail = bytearray(data[end:])
    tail[8:12], tail[12:16] = struct.pack("<2H", 7, 7), struct.pack("<I", len(listed))
    rows = read(data[:begin] + listed + bytes(tail), "b.zip")
    assert sorted(drop.rule if drop else "kept" for _, drop in rows) == ["bad_archive"] * 5 + ["kept"] * 2
