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
