"""Tar and zip archives and folders: every byte belongs to a member or gap, at any damage, and no name is followed."""

import gzip
import io
import os
import random
import tarfile
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from pipeline.engine.stage import Drop
from pipeline.sources import provenance
from pipeline.sources.archives.folders import FolderArchive, folder_identity, list_folder
from pipeline.sources.archives.tar import BLOCK, ArchiveMember, DecodedBytes, TarReader, is_tar_header, is_unsafe
from pipeline.sources.archives.zip import read_zip
from pipeline.sources.compression import FrameReader
from tests.support.archives import link, tar, tar_of, zipped

FILES = {"a.txt": "one", "folder/b.txt": "two" * 400, "é/" + "n" * 120 + ".txt": "three", "empty": ""}


def read(data: bytes, max_bytes: int = 1 << 20, wanted: str = "") -> tuple[list[ArchiveMember], int]:
    stream = DecodedBytes(FrameReader(io.BytesIO(data), None))
    members = list(TarReader(stream, max_bytes, lambda name, size: wanted in name))
    return members, stream.position


def outcome(members: list[ArchiveMember]) -> list[tuple[str, str | None]]:
    return [(member.name, member.drop.rule if member.drop else None) for member in members]


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_members_of_a_tar_file(format_, pack):
    data = tar(FILES, format=format_)
    members, size = read(pack(data))
    assert {member.name: member.data.decode() for member in members} == FILES
    assert size == len(data)
    for member, after in zip(members, [*members[1:], None], strict=True):
        piece = data[member.start : after.start if after else None]
        ((again,), _) = read(piece)
        assert (again.name, again.data) == (member.name, member.data)


def test_content_is_loaded_only_if_it_is_wanted_and_not_too_large():
    members, _ = read(tar(FILES), max_bytes=100, wanted="b")
    assert [(member.name, member.size, member.data) for member in members[:2]] == [
        ("a.txt", 3, None),
        ("folder/b.txt", 1200, None),
    ]
    assert outcome(members)[:2] == [("a.txt", None), ("folder/b.txt", "record_too_large")]


def test_links_devices_and_pipes_are_not_followed():
    data = tar_of(link("a", "/etc/passwd"), link("b", "a", tarfile.LNKTYPE), link("c", "", tarfile.FIFOTYPE))
    assert outcome(read(data)[0]) == [("a", "not_a_file"), ("b", "not_a_file"), ("c", "not_a_file")]


@pytest.mark.parametrize(
    ("name", "unsafe"),
    [("a/b", False), ("a..b", False), ("../a", True), ("a/../b", True), ("/a", True), ("a\\..\\b", True)],
)
def test_names_that_lead_out(name, unsafe):
    assert is_unsafe(name) is unsafe


def test_archives_after_each_other_are_one():
    members, size = read(tar({"a": "1"}) + tar({"b": "2"}))
    assert [member.name for member in members] == ["a", "b"]
    assert size == 2 * len(tar({"a": "1"}))


def test_a_cut_file_is_a_truncated_record():
    data = tar({"a": "x" * 2000})
    assert outcome(read(data[:1000])[0]) == [("a", "truncated_record")]
    assert outcome(read(data[:300])[0]) == [("", "unreadable_gap")]


def test_reading_resumes_after_a_damaged_header():
    data = bytearray(tar({"a": "1", "b": "2", "c": "3"}))
    data[1024 + 10] ^= 255
    assert outcome(read(bytes(data))[0]) == [("a", None), ("", "unreadable_gap"), ("c", None)]


def test_reading_resumes_after_a_damaged_gzip_member():
    parts = [gzip.compress(tar({name: os.urandom(300_000)}), mtime=0) for name in "abc"]
    parts[1] = parts[1][:100_000] + bytes(50) + parts[1][100_050:]
    rules = outcome(read(b"".join(parts))[0])
    assert (rules[0], rules[-1]) == (("a", None), ("c", None))
    assert ("", "bad_gzip") in rules


def header_everywhere() -> bytes:
    """32 bytes that are a header with a right checksum, and a size that is no number, at each of their copies."""
    for filler in range(200):
        unit = bytearray(b"a" * 8 + bytes([97 + filler % 26, 97 + filler // 26]) + b"a" * 18 + b"zzzz")
        unit[1:7] = b"ustar\0"
        for total in range(20_000, 60_000):
            unit[20:28] = b"%06o\0 " % total
            if 16 * sum(unit) - sum(unit[20:28]) + 8 * 32 == total:
                return bytes(unit)
    raise AssertionError("no such bytes")


def test_headers_that_cannot_be_read_are_one_gap_that_is_read_once(monkeypatch):
    unit = header_everywhere()
    assert is_tar_header(unit * 16)
    data = tar({"a": "1"})[:1024] + unit * 8_000 + tar({"c": "3"})
    num_read = 0
    read_bytes = DecodedBytes.read

    def counted(self, size):
        nonlocal num_read
        found = read_bytes(self, size)
        num_read += len(found)
        return found

    monkeypatch.setattr(DecodedBytes, "read", counted)
    assert outcome(read(data)[0]) == [("a", None), ("", "unreadable_gap"), ("c", None)]
    assert num_read < 2 * len(data)


def test_short_gaps_between_files_copy_few_bytes(monkeypatch):
    file = tar({"b": "2"})[:1024]
    data = (b"garbage" * 74)[:BLOCK] + file
    copied = 0
    unread = DecodedBytes.unread

    def counted(self, block):
        nonlocal copied
        before = self._block
        unread(self, block)
        copied += len(self._block) if self._block is not before else 0

    monkeypatch.setattr(DecodedBytes, "unread", counted)
    members, _ = read(data * 500)
    assert outcome(members) == [("", "unreadable_gap"), ("b", None)] * 500
    assert copied < 4 * len(data) * 500


def test_an_archive_with_too_many_members(monkeypatch):
    monkeypatch.setattr(provenance, "FREE_ROWS", 30)
    monkeypatch.setattr(provenance, "ROWS_A_BYTE", 0)
    few, many = tar({f"{number}": "1" for number in range(30)}), tar({f"{number}": "1" for number in range(31)})
    assert all(member.drop is None for member in read(few)[0])
    members, _ = read(many)
    assert [member.drop for member in members] == [None] * 30 + [Drop("too_many_rows", 30.0, 30.0)]
    assert (members[-1].start, members[-1].name) == (30 * 1024, "")


def test_a_huge_name_is_passed_over():
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 20
    data = info.tobuf() + b"n" * (1 << 20) + tar({"a": "1"})
    ((member,), size) = read(data)
    assert (member.name, member.start, size) == ("a", 0, len(data))


def test_random_bytes_never_raise():
    source = random.Random(1)
    whole = bytearray(tar(FILES) + zipped(FILES))
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(source.randrange(1, 8)):
            data[source.randrange(len(data))] = source.randrange(256)
        data = bytes(data[: source.randrange(len(data))])
        members, size = read(data)
        assert size <= len(data)
        assert all(0 <= member.start <= size for member in members)
        zip_members = list(read_zip(io.BytesIO(data[-4000:]), 1 << 16, lambda name, size: True))
        assert all(0 <= member.start <= 4000 for member in zip_members)


# Folders


def make_folder(root: Path) -> Path:
    (root / "src" / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("ref")
    (root / "README.md").write_text("# Title")
    (root / "src" / ("n" * 120 + ".py")).write_text("x = 1\n" * 500)
    (root / "src" / "deep" / "b.py").write_text("")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe")
    return root


def test_a_folder_is_read_as_a_tar_archive(tmp_path):
    fs, root = pafs.LocalFileSystem(), str(make_folder(tmp_path / "repo"))
    data = FolderArchive(fs, root).read()
    assert len(data) == folder_identity(list_folder(fs, root))[0]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = [(info.name, info.size, info.type) for info in archive]
    assert names == [
        ("README.md", 7, b"0"),
        ("loop", 0, b"2"),
        ("pipe", 0, b"6"),
        ("src/deep/b.py", 0, b"0"),
        ("src/" + "n" * 120 + ".py", 3000, b"0"),
    ]
    assert outcome(read(data)[0])[1:3] == [("loop", "not_a_file"), ("pipe", "not_a_file")]


def test_any_part_of_a_folder_archive_can_be_read(tmp_path):
    archive = FolderArchive(pafs.LocalFileSystem(), str(make_folder(tmp_path / "repo")))
    data = archive.read()
    source = random.Random(2)
    for _ in range(50):
        start, size = source.randrange(len(data)), source.randrange(2000)
        archive.seek(start)
        assert archive.read(size) == data[start : start + size]
        assert archive.tell() == min(len(data), start + size)
    archive.close()


def test_a_changed_file_changes_the_identity_and_a_shorter_one_raises(tmp_path):
    fs, root = pafs.LocalFileSystem(), make_folder(tmp_path / "repo")
    before = folder_identity(list_folder(fs, str(root)))
    archive = FolderArchive(fs, str(root))
    (root / "README.md").write_text("#")
    assert folder_identity(list_folder(fs, str(root)))[1] != before[1]
    with pytest.raises(OSError, match=r"README\.md: expected 7 bytes, got 1; the file changed"):
        archive.read()


def test_headers_without_a_member_fill_no_memory():
    """Each extended header may name fields that no reader uses; only those of a file are kept."""
    header = tarfile.TarInfo("p")
    header.type = b"x"
    blocks = []
    for number in range(200):
        fields = b"".join(b"%d x%d-%d=\n" % (len(b"%d-%d" % (number, at)) + 6, number, at) for at in range(10, 99))
        header.size = len(fields)
        blocks.append(header.tobuf(tarfile.USTAR_FORMAT) + fields + b"\0" * (-len(fields) % 512))
    stream = DecodedBytes(FrameReader(io.BytesIO(b"".join(blocks) + tar({"a.txt": "one"})), None))
    reader, sizes = TarReader(stream, 1 << 20, lambda name, size: True), []
    extension = reader._extension
    reader._extension = lambda *header: sizes.append(len(fields := extension(*header))) or fields
    assert [member.name for member in reader] == ["a.txt"]
    assert sizes == [1] * 200


@pytest.mark.parametrize("name", ["a/" * 300 + "b", "a" * 5000])
def test_a_path_that_no_filesystem_takes_is_unsafe(name):
    assert is_unsafe(name)
    assert not is_unsafe(name[:400])
