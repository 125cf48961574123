"""HashedStream takes the digest of the whole file however it is read; Blocks finds bytes anywhere in it."""

import hashlib
import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sources.stream import BLOCK_BYTES, OVERLAP_BYTES, Blocks, HashedStream, open_stream
from pipeline.stage import Split

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
JUMPS = st.lists(st.tuples(st.integers(0, len(CONTENT) + 10), st.integers(-1, 3000)), max_size=12)


@given(JUMPS)
def test_digest_and_bytes_do_not_depend_on_how_the_file_is_read(jumps):
    stream = HashedStream(io.BytesIO(CONTENT))
    for position, size in jumps:
        assert stream.seek(position) == position
        expected = CONTENT[position:] if size < 0 else CONTENT[position : position + size]
        assert stream.read(size) == expected
        assert stream.tell() == position + len(expected)
    assert stream.finish() == (DIGEST, len(CONTENT))


def test_finish_without_reading_reads_everything():
    assert HashedStream(io.BytesIO(CONTENT)).finish() == (DIGEST, 10240)
    assert HashedStream(io.BytesIO(b"")).finish() == (hashlib.sha256(b"").hexdigest(), 0)


def test_open_stream_reads_a_local_file_through_its_path_and_its_uri(tmp_path):
    path = tmp_path / "a b.warc"
    path.write_bytes(CONTENT)
    for uri in (str(path), f"file://{tmp_path}/a%20b.warc"):
        stream = open_stream(Split(0, "a b.warc", uri, len(CONTENT), "", "web", "warc"))
        assert stream.read(3) == b"\x00\x01\x02"
        assert stream.seek(-2, 2) == 10238
        assert stream.finish() == (DIGEST, 10240)
        stream.close()
        assert stream.closed


def test_open_stream_of_a_file_that_is_gone_says_which(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.warc"):
        open_stream(Split(0, "gone.warc", str(tmp_path / "gone.warc"), 1, "", "web", "warc"))


class ShortReads(io.BytesIO):
    """A file whose reads return less than was asked for, as pipes and object stores may."""

    def read(self, size=-1):
        return super().read(min(size, 40_000) if size > 0 else size)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3 * BLOCK_BYTES - 8), min_size=1, max_size=8, unique=True), st.booleans())
def test_search_finds_every_match_across_blocks(positions, short):
    content = bytearray(3 * BLOCK_BYTES)
    expected = []
    for position in sorted(positions):
        if not expected or position >= expected[-1] + 6:
            content[position : position + 6] = b"needle"
            expected.append(position)
    blocks = Blocks((ShortReads if short else io.BytesIO)(bytes(content)))
    assert list(blocks.search(re.compile(b"needle"), 0)) == expected
    assert list(blocks.search(re.compile(b"needle"), expected[-1] + 1)) == []


def test_at_and_peek_reach_the_end_and_not_further():
    content = bytes(BLOCK_BYTES) + b"tail"
    blocks = Blocks(io.BytesIO(content))
    assert len(blocks.at(0, BLOCK_BYTES + 4)) == BLOCK_BYTES
    assert bytes(blocks.at(BLOCK_BYTES + 1, 10)) == b"ail"
    assert blocks.peek(BLOCK_BYTES - 1, 3) == b"\0ta"
    assert blocks.peek(BLOCK_BYTES + 2, 100) == b"il"
    assert blocks.peek(BLOCK_BYTES + 4, 1) == b""
    assert not blocks.at(BLOCK_BYTES + 4, 1)
    assert blocks.size() == BLOCK_BYTES + 4
    assert OVERLAP_BYTES < BLOCK_BYTES >> 4
