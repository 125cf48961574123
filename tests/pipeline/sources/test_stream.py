"""HashedStream takes the digest of the whole file however it is read."""

import hashlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.stage import Split
from pipeline.sources.splits import HashedStream, open_stream

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
JUMPS = st.lists(st.tuples(st.integers(0, len(CONTENT) + 10), st.integers(-1, 3000)), max_size=12)


@given(JUMPS)
def test_digest_and_bytes_do_not_depend_on_how_the_file_is_read(jumps):
    stream = HashedStream(io.BytesIO(CONTENT))
    for place, size in jumps:
        position = min(place, len(CONTENT))
        assert stream.seek(place) == position
        expected = CONTENT[position:] if size < 0 else CONTENT[position : position + size]
        assert stream.read(size) == expected
        assert stream.tell() == position + len(expected)
    assert stream.finish() == (DIGEST, len(CONTENT))


@given(JUMPS, st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT)))
def test_the_digest_of_a_range_is_that_of_its_bytes(jumps, begin, size):
    stream = HashedStream(io.BytesIO(CONTENT), begin, begin + size)
    for place, wanted in jumps:
        position = stream.seek(place)
        assert stream.read(wanted) == (CONTENT[position:] if wanted < 0 else CONTENT[position : position + wanted])
    part = CONTENT[begin : begin + size]
    assert stream.finish() == (hashlib.sha256(part).hexdigest(), len(part))


class CountedBytes(io.BytesIO):
    num_read = 0

    def read(self, size=-1):
        data = super().read(size)
        self.num_read += len(data)
        return data


@pytest.mark.parametrize(("first", "num_read"), [(0, 4000), (1000, 3000), (1300, 3000), (3999, 3000)])
def test_the_bytes_before_the_first_record_of_a_range_are_read_once(first, num_read):
    inner = CountedBytes(CONTENT)
    stream = HashedStream(inner, 1000, 4000)
    stream.seek(first)
    while stream.tell() < 4000:
        stream.read(min(500, 4000 - stream.tell()))
    stream.finish()
    assert inner.num_read == num_read


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
