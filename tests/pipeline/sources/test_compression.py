"""Frames: exact spans of gzip members, zstd frames and plain bytes, bounded pieces, and reading after damage."""

import bz2
import gzip
import io
import random

import lz4.frame
import pytest
import zstandard
from fastwarc.stream_io import ZstdWriter

from pipeline.sources import compression, provenance
from pipeline.sources.compression import FrameReader
from pipeline.sources.crawl.warc import RECORD_STARTS
from pipeline.sources.decoders import DECODED_BYTES
from pipeline.sources.lines import LineReader

RECORD = b"WARC/1.0\r\nWARC-Type: metadata\r\nContent-Length: 5\r\n\r\nhello\r\n\r\n"
NOISE = random.Random(1).randbytes(90_000)


def zstd(data):
    out = io.BytesIO()
    with ZstdWriter(out) as writer:
        writer.write(data)
    return out.getvalue()


def skippable(data):
    return b"\x5a\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


def spans(stored, starts=RECORD_STARTS):
    """(start, decoded bytes, fault) of every frame, and the size that the reader found."""
    frames = FrameReader(io.BytesIO(stored), starts)
    found = []
    while (piece := frames.next()) is not None:
        assert len(piece.data) <= DECODED_BYTES
        if piece.first and not (piece.fault and found and found[-1][0] == piece.start):
            found.append((piece.start, b"", None))
        start, data, _ = found[-1]
        found[-1] = (start, data + piece.data, piece.fault)
    return found, frames.end


@pytest.mark.parametrize("pack", [zstd, bz2.compress, lz4.frame.compress, gzip.compress])
def test_a_file_decodes_to_a_limited_number_of_bytes(pack, monkeypatch):
    monkeypatch.setattr(compression, "DECODED_FREE", 3 << 20)
    data = bytes(40 << 20)
    stored = pack(data)
    found, end = spans(stored + pack(b"after"), starts=None)
    assert end == len(stored + pack(b"after"))
    if len(stored) * compression.DECODED_A_BYTE > len(data):  # of LZ4 and gzip
        assert [(len(data), fault) for _, data, fault in found] == [(len(data), None), (5, None)]
    else:
        ((_, held, fault),) = found
        assert fault == "decoded_too_large"
        assert len(held) <= compression.most_decoded(end) < len(held) + DECODED_BYTES
    assert (len(found) == 1) == (pack in (zstd, bz2.compress))


class WithoutSize(io.BytesIO):
    """A file of a server that does not give its size."""

    def seek(self, offset, whence=0):
        return super().seek(0 if whence == 2 else offset)


@pytest.mark.parametrize("pack", [zstd, bz2.compress, gzip.compress])
def test_a_file_whose_size_is_unknown_is_read_whole(pack, monkeypatch):
    monkeypatch.setattr(compression, "DECODED_FREE", 1 << 10)
    monkeypatch.setattr(provenance, "FREE_ROWS", 10)
    data = b"".join(b"%d\n" % number for number in range(300_000))
    assert [*LineReader(FrameReader(WithoutSize(pack(data)), None), 100)][-1][1] == b"299999"


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress])
def test_every_frame_has_its_exact_start(pack):
    contents = [RECORD, RECORD + NOISE, b"", RECORD * 20_000]
    packed = [pack(content) for content in contents]
    found, end = spans(b"".join(packed))
    starts = [sum(map(len, packed[:index])) for index in range(4)]
    assert found == [(start, data, None) for start, data in zip(starts, contents, strict=True) if data]
    assert end == sum(map(len, packed))


def test_plain_bytes_and_frames_of_every_kind_follow_each_other():
    packed = [skippable(b"dictionary"), zstd(RECORD), gzip.compress(RECORD), bz2.compress(RECORD), RECORD]
    found, end = spans(b"".join(packed))
    starts = [sum(map(len, packed[:index])) for index in range(1, 5)]
    assert found == [(start, RECORD, None) for start in starts]
    assert end == sum(map(len, packed))


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress])
@pytest.mark.parametrize(
    "junk", [b"\0" * 512, b"no record", NOISE[:700], b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd\xff\xff\xff\xff", b"\n\n"]
)
def test_junk_between_frames_is_one_fault(pack, junk):
    member = pack(RECORD)
    found, end = spans(member + junk + member + junk)
    kinds = {None, "unreadable_gap", "bad_gzip", "truncated_record"}
    assert [(start, data) for start, data, fault in found if fault is None] == [
        (0, RECORD),
        (len(member) + len(junk), RECORD),
    ]
    assert [start for start, _, fault in found if fault] == [len(member), 2 * len(member) + len(junk)]
    assert {fault for _, _, fault in found} <= kinds
    assert end == 2 * len(member + junk)


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress])
def test_damage_inside_a_frame_costs_that_frame_only(pack):
    member = pack(RECORD + NOISE)
    damaged = bytearray(member)
    middle = len(member) // 2
    damaged[middle : middle + 16] = bytes(byte ^ 0x55 for byte in member[middle : middle + 16])
    found, end = spans(member + bytes(damaged) + member)
    assert [start for start, _, _ in found] == [0, len(member), 2 * len(member)]
    assert [fault for _, _, fault in found] == [None, found[1][2], None]
    assert found[1][2] in ("bad_gzip", "truncated_record") or pack is zstd  # incompressible zstd blocks have no check
    assert end == 3 * len(member)


def stored_gzip(data):
    return gzip.compress(data, 0)


@pytest.mark.parametrize("size", [300, 1000, 30_000, 70_000, 200_000])
@pytest.mark.parametrize("pack", [stored_gzip, lambda data: lz4.frame.compress(data, block_linked=False)])
def test_a_cut_frame_of_stored_blocks_ends_where_the_next_frame_begins(pack, size):
    """The decoder passes over the cut and takes the next frames for bytes of the stored block."""
    following = [pack(RECORD + NOISE[:3000]), pack(RECORD)]
    cut = pack(RECORD + NOISE * 3)[:size]
    found, end = spans(b"".join([cut, *following, pack(RECORD)]))
    assert [start for start, _, _ in found] == [0, size, size + len(following[0]), size + sum(map(len, following))]
    assert [data for _, data, _ in found[1:]] == [RECORD + NOISE[:3000], RECORD, RECORD]
    assert [fault is None for _, _, fault in found] == [False, True, True, True]
    assert (RECORD + NOISE * 3).startswith(found[0][1])
    assert end == size + sum(map(len, following)) + len(pack(RECORD))


@pytest.mark.parametrize("inner", [gzip.compress, stored_gzip, zstd])
def test_a_frame_without_damage_may_contain_an_archive(inner):
    content = RECORD + NOISE[:50_000] + inner(RECORD) + NOISE[:200_000]
    packed = stored_gzip(content)
    found, end = spans(packed + stored_gzip(RECORD))
    assert found == [(0, content, None), (len(packed), RECORD, None)]
    assert end == len(packed) + len(stored_gzip(RECORD))


def test_a_frame_that_contains_an_archive_and_is_cut_far_after_it():
    content = RECORD + gzip.compress(RECORD) + NOISE * 5
    cut = stored_gzip(content)[:400_000]
    found, _ = spans(cut + stored_gzip(RECORD))
    assert [(start, fault) for start, _, fault in found] == [(0, "truncated_record"), (400_000, None)]
    assert len(found[0][1]) > 300_000


def test_a_damaged_first_slice_still_gives_the_bytes_before_the_damage():
    member = bytearray(gzip.compress(RECORD + NOISE[:20_000]))
    member[10_000:10_016] = bytes(16)
    ((start, data, fault),), _ = spans(bytes(member))
    assert (start, fault) == (0, "bad_gzip")
    assert data.startswith(RECORD)


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress])
@pytest.mark.parametrize("lost", [1, 4, 9])
def test_a_frame_that_the_file_ends_in(pack, lost):
    member = pack(RECORD + NOISE[:50_000])
    found, end = spans(member + member[:-lost])
    assert found[0] == (0, RECORD + NOISE[:50_000], None)
    assert (found[1][0], found[1][2], end) == (len(member), "truncated_record", 2 * len(member) - lost)


def test_a_checksum_that_does_not_match():
    member = bytearray(gzip.compress(RECORD))
    member[-8] ^= 1
    assert spans(bytes(member) + gzip.compress(RECORD))[0][1:] == [(len(member), RECORD, None)]
    assert spans(bytes(member))[0][0][2] == "bad_gzip"


def test_text_needs_no_record_to_start_with():
    assert spans(b"any words", None) == ([(0, b"any words", None)], 9)
    packed = gzip.compress(b"words")
    found, end = spans(packed + b"junk" + packed, None)
    assert found == [(0, b"words", None), (len(packed), b"", "unreadable_gap"), (len(packed) + 4, b"words", None)]
    assert end == 2 * len(packed) + 4


def test_next_start_passes_over_magic_bytes_that_do_not_decode_to_a_record():
    stored = b"\x1f\x8b\x08\0" + gzip.compress(b"not a record") + b"WARC/1.0 in a text " + gzip.compress(RECORD)
    frames = FrameReader(io.BytesIO(stored), RECORD_STARTS)
    assert frames.next_start(0) == len(stored) - len(gzip.compress(RECORD))
    arc = b"...\nhttp://a.com/ 1.2.3.4 20080101000000 text/html 3\nabc"
    assert FrameReader(io.BytesIO(arc), RECORD_STARTS).next_start(0) == 4


def decoded(stored):
    """The decoded bytes of a file, and the reasons of bytes that cannot be decoded."""
    reader = FrameReader(io.BytesIO(stored), None)
    blocks = list(iter(reader.next, None))
    return b"".join(block.data for block in blocks), [block.fault for block in blocks if block.fault]


def test_a_zstd_frame_with_a_window_of_2_gib():
    compressor = zstandard.ZstdCompressor().compressobj()
    stored = bytearray(compressor.compress(b"words " * 50_000) + compressor.flush())
    assert stored[4] & 0x20 == 0  # with a window descriptor, in the next byte
    stored[5] = 31 - 10 << 3
    assert decoded(bytes(stored)) == (b"words " * 50_000, [])
    stored[5] = 32 - 10 << 3
    assert decoded(bytes(stored))[1] == ["bad_gzip"]


@pytest.mark.parametrize("options", [{}, {"content_checksum": True}, {"block_linked": False, "block_checksum": True}])
def test_lz4_frames(options):
    text = random.Random(1).randbytes(300_000)
    stored = lz4.frame.compress(text, **options) + lz4.frame.compress(b"second", **options)
    assert decoded(stored) == (text + b"second", [])
    found, faults = decoded(stored[:-1])
    assert found.startswith(text)
    assert faults == ["truncated_record"]
    if options:
        damaged = stored[:200_000] + bytes([stored[200_000] ^ 1]) + stored[200_001:]
        found, faults = decoded(damaged)
        assert found.endswith(b"second")
        assert faults == ["bad_gzip"]


def test_frames_after_a_damaged_one_of_many_decoded_bytes_are_read():
    """What a frame decodes to is no waste, however much it is."""
    lines = b"".join(b"%d the same words again and again in every line of this frame\n" % at for at in range(600_000))
    damaged = bytearray(zstandard.ZstdCompressor().compress(lines))
    damaged[-40] ^= 255
    reader = FrameReader(io.BytesIO(bytes(damaged) + zstandard.ZstdCompressor().compress(b"good\n" * 1000) * 3), None)
    blocks = [*iter(reader.next, None)]
    assert len(lines) > 16 * len(damaged) + (16 << 20)
    assert [block.fault for block in blocks if block.fault] == ["bad_gzip"]
    assert b"".join(block.data for block in blocks).count(b"good\n") == 3000
