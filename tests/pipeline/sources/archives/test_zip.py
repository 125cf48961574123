"""Zip archives: with and without a directory, members that are damaged or lie about their size, and unsafe names."""

import io
import struct
import zipfile

import pytest

from pipeline.sources.archives.zip import MAX_JOINED, is_unsafe_name, read_zip
from tests.pipeline.sources.archives.test_tar import FILES, outcome
from tests.support.archives import zipped


def test_members_of_a_zip_file_with_and_without_its_directory():
    data = zipped(FILES | {"stored/": ""})
    members = list(read_zip(io.BytesIO(data), 1 << 20, lambda name, size: True))
    assert {member.name: (member.data or b"").decode() for member in members} == FILES
    cut = data[: data.rfind(b"PK\x01\x02") - 1000]
    rest = list(read_zip(io.BytesIO(cut[: members[2].start]), 1 << 20, lambda name, size: True))
    assert [member.data for member in rest] == [member.data for member in members[:2]]
    for member, after in zip(members, [*members[1:], None], strict=True):
        piece = data[member.start : after.start if after else None]
        again = next(read_zip(io.BytesIO(piece), 1 << 20, lambda name, size: True))
        assert (again.name, again.data) == (member.name, member.data)


def test_a_zip_bomb_is_refused_without_unpacking():
    data = zipped({"bomb": b"0" * (1 << 22), "a": "1"})
    members = list(read_zip(io.BytesIO(data), 1 << 16, lambda name, size: True))
    assert outcome(members) == [("bomb", "record_too_large"), ("a", None)]
    lying = data.replace((1 << 22).to_bytes(4, "little"), (9).to_bytes(4, "little"))
    assert outcome(list(read_zip(io.BytesIO(lying), 1 << 16, lambda name, size: True)))[0] == (
        "bomb",
        "record_too_large",
    )


def test_a_wrong_checksum_and_no_zip_at_all():
    data = zipped({"a": "content"}, 0).replace(b"content", b"contend")
    assert outcome(list(read_zip(io.BytesIO(data), 100, lambda name, size: True))) == [("a", "bad_member")]
    assert outcome(list(read_zip(io.BytesIO(b"no zip"), 100, lambda name, size: True))) == [("", "unreadable_gap")]


def read(data, **options):
    """The members of an archive."""
    return list(read_zip(io.BytesIO(data), 1 << 20, lambda name, size: True, **options))


def test_archives_in_front_of_the_last_one_are_read():
    parts = [zipped({"a.py": "one", "b.py": "two"}), zipped({"c.py": "three"}), zipped({"d.py": "four", "e/": ""})]
    data = b"".join(parts)
    members = read(data)
    assert [(member.name, member.data) for member in members] == [
        ("a.py", b"one"), ("b.py", b"two"), ("c.py", b"three"), ("d.py", b"four")
    ]  # fmt: skip
    for member, after in zip(members, [*members[1:], None], strict=True):
        (again,) = read(data[member.start : after.start if after else None])
        assert (again.name, again.data) == (member.name, member.data)
    begun = members[2].start
    assert outcome(read(data, depth=MAX_JOINED)) == [("", "unreadable_gap"), ("d.py", None)]
    assert outcome(read(data, depth=MAX_JOINED - 1)) == [("", "unreadable_gap"), ("c.py", None), ("d.py", None)]
    assert read(data, depth=MAX_JOINED)[0][:3] == (0, "", begun + len(parts[1]))


def test_members_that_no_directory_lists_are_a_gap():
    data, empty = zipped({"a.py": "one", "b.py": "two"}), zipped({})
    assert outcome(read(data + empty)) == [("a.py", None), ("b.py", None)]
    second = data.index(b"PK\x03\x04", 4)
    begin, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    for lost in (0, 1):  # the directory lists only one of both
        size = (end - begin) // 2
        entry = data[begin + (1 - lost) * size :][:size]
        tail = data[end : end + 8] + struct.pack("<2H", 1, 1) + struct.pack("<2I", size, begin) + b"\0\0"
        members = read(data[:begin] + entry + tail)
        gap = (0, "", second) if lost == 0 else (second, "", begin - second)
        assert [member[:3] for member in members if member.drop] == [gap]
        assert [member.name for member in members if not member.drop] == [["b.py"], ["a.py"]][lost]
    cut = zipped({"c.py": "three"})[:-30]  # an archive without its end after a whole one
    assert outcome(read(data + cut)) == [("a.py", None), ("b.py", None), ("", "unreadable_gap")]
    far = zipped({"c.py": "three", "long": "x" * 70_000}, 0)[:-30]
    assert outcome(read(data + far)) == [("a.py", None), ("b.py", None), ("", "unreadable_gap")]
    for stub in (b"#!/bin/sh PK\x03\x04 exit" * 20_000, b"PK\x03\x04" * 300_000, b"\0" * 40):
        assert outcome(read(stub + data)) == [("a.py", None), ("b.py", None)]


@pytest.mark.parametrize(
    ("name", "unsafe"),
    [("a/b", False), ("../a", True), ("/a", True), ("a\\..\\b", True), ("C:/a", True), ("a:b", False), ("a\0b", True)],
)
def test_names_that_point_outside(name, unsafe):
    assert is_unsafe_name(name) is unsafe


def test_members_that_share_their_bytes_are_not_decompressed_again():
    """Thousands of entries may name the same bytes, which would decompress to any size."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("a.txt", "a" * 100_000)
    data = archive.getvalue()
    begin = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    entry, tail = data[begin:end], bytearray(data[end:])
    copies = b"".join(entry.replace(b"a.txt", b"%c.txt" % letter) for letter in b"abcdef")
    tail[8:12], tail[12:16] = struct.pack("<2H", 6, 6), struct.pack("<I", len(copies))
    members = list(read_zip(io.BytesIO(data[:begin] + copies + bytes(tail)), 1 << 20, lambda name, size: True))
    assert [member.data is not None for member in members] == [True] + [False] * 5
    assert {member.drop.rule for member in members[1:]} == {"lying_length"}


def test_a_member_without_a_name_is_read():
    data = zipped({"a.txt": "one"})
    members = list(read_zip(io.BytesIO(_renamed(data)), 1 << 20, lambda name, size: True))
    assert [(member.name, member.data) for member in members] == [("", b"one")]


def _renamed(data: bytes) -> bytes:
    """The archive with the name `a.txt` cut to nothing, in the directory alone."""
    begin = data.index(b"PK\x01\x02")
    entry = data[begin : data.index(b"PK\x05\x06")]
    other = entry[:28] + b"\0\0" + entry[30:46] + entry[46 + 5 :]
    tail = bytearray(data[begin + len(entry) :])
    tail[12:16] = struct.pack("<I", len(other))
    return data[:begin] + other + bytes(tail)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
@pytest.mark.parametrize("listed", [80, 150, 1_000_000, 0xFFFFFFF0])
def test_a_wrong_size_in_the_directory_costs_at_most_its_own_member(method: int, listed: int) -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as archive:
        for name in "abcd":
            archive.writestr(name, name * 90)
        archive.filelist[1].compress_size = listed
    members = list(read_zip(io.BytesIO(sink.getvalue()), 1 << 16, lambda name, size: True))
    assert [member.name for member in members] == [*"abcd"]
    for member in members[:1] + members[2:]:
        assert (member.data, member.drop) == ((member.name * 90).encode(), None)
    is_cut = method == zipfile.ZIP_STORED and listed < 90
    assert members[1].data == (None if is_cut else b"b" * 90)
    assert (members[1].drop is not None) == is_cut


def test_a_place_in_the_directory_without_a_header_costs_no_other_member() -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name in "abc":
            archive.writestr(name, name * 90)
        archive.filelist[1].header_offset = 60  # among the bytes of the first
    members = list(read_zip(io.BytesIO(sink.getvalue()), 1 << 16, lambda name, size: True))
    found = {member.name: (member.data, member.drop and member.drop.rule) for member in members}
    assert found.pop("b")[1] in ("bad_member", "lying_length")
    assert (found["a"], found["c"]) == ((b"a" * 90, None), (b"c" * 90, None))
