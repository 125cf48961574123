"""Files on a server that fails in many ways: the bytes are right, or an error says why there are none."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.sources.common_crawl import download, requests
from pipeline.sources.common_crawl.download import (
    Download,
    FileFacts,
    Patience,
    RandomAccessFile,
    RecordRange,
    RemoteStream,
    coalesce,
    fetch_range,
    read_ranges,
)
from pipeline.sources.common_crawl.requests import (
    ChangedFileError,
    HttpFile,
    UnreachableFileError,
    remote_file,
    seconds_to_wait,
)
from tests.support.crawl_server import CrawlServer, Faults, serving

CONTENT = random.Random(1).randbytes(3_000_000)


class Clock:
    """A clock that advances by the waits alone, which it records."""

    def __init__(self) -> None:
        self.time, self.waits = 0.0, list[float]()

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.time += seconds
        self.waits.append(seconds)
        return stop.is_set()

    def patience(self, **settings: Any) -> Patience:
        return Patience(now=lambda: self.time, wait=self.wait, jitter=lambda: 0.5, **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.warc.gz").write_bytes(CONTENT)
    (tmp_path / "empty.warc.gz").write_bytes(b"")
    return tmp_path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def short_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "STALL_SECONDS", 0.3)


def whole(server: CrawlServer, clock: Clock, name: str = "a.warc.gz") -> tuple[bytes, dict[str, int]]:
    stream = RemoteStream(HttpFile(f"{server.uri}/{name}"), clock.patience())
    data = stream.read()
    stream.close()
    return data, dict(stream.transfers)


def test_a_file_is_read_by_one_request(folder: Path, clock: Clock) -> None:
    with serving(folder) as server:
        data, counts = whole(server, clock)
        assert data == CONTENT
        assert counts == {"requests": 1, "bytes": len(CONTENT)}
        assert server.requests == [("a.warc.gz", None)]
        assert whole(server, clock, "empty.warc.gz") == (b"", {"requests": 1})


FAULTS: dict[str, tuple[dict[int, tuple[Any, ...]], dict[str, int]]] = {
    "truncated": ({1: ("truncate", 1000), 2: ("truncate", 2_000_000)}, {"truncated_answers": 2}),
    "busy": (
        {1: ("status", 503), 2: ("status", 429), 3: ("status", 500)},
        dict.fromkeys(("status_503", "status_429"), 1),
    ),
    "stalls": ({1: ("stall", 70_000, 1.0)}, {"stalls": 1}),
    "more": ({1: ("more",)}, {}),
    "ignores ranges": ({1: ("truncate", 500_000), 2: ("ignore_range",)}, {"truncated_answers": 1}),
    "another range": ({1: ("truncate", 500_000), 2: ("wrong_range",)}, {"wrong_ranges": 1}),
    "other bytes": ({1: ("truncate", 500_000), 2: ("shifted",)}, {"wrong_ranges": 1}),
    "never a right range": (
        {1: ("truncate", 500_000), 2: ("shifted",), 3: ("shifted",), 4: ("wrong_range",), 5: ("shifted",)},
        {"wrong_ranges": 3},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_bytes_are_right_whatever_the_server_does(folder: Path, clock: Clock, name: str) -> None:
    plan, expected = FAULTS[name]
    with serving(folder, Faults(plan)) as server:
        data, counts = whole(server, clock)
    assert data == CONTENT
    assert {key: counts.get(key) for key in expected} == expected
    assert counts["requests"] == 1 + sum(
        value for key, value in counts.items() if key not in ("requests", "bytes", "waited_seconds")
    )


def test_a_break_is_resumed_at_its_place(folder: Path, clock: Clock) -> None:
    with serving(folder, Faults({1: ("truncate", 1_500_000)})) as server:
        whole(server, clock)
        assert [asked for _, asked in server.requests] == [None, f"bytes={1_500_000 - 64}-"]


@pytest.mark.parametrize("place", [0, 2_900_000])
def test_another_version_of_the_file_is_an_error(
    folder: Path, clock: Clock, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "AHEAD_BYTES", 300_000)  # the break is not reached before the file is another one
    with serving(folder, Faults({1: ("truncate", 1_500_000)})) as server:
        stream = RemoteStream(HttpFile(f"{server.uri}/a.warc.gz"), clock.patience())
        assert stream.read(10) == CONTENT[:10]
        (folder / "a.warc.gz").write_bytes(CONTENT[1:])
        stream.seek(place)
        with pytest.raises(ChangedFileError, match="got another version of it"):
            stream.read()


def test_retry_after_is_waited_for(folder: Path, clock: Clock) -> None:
    plan = {1: ("status", 503, {"Retry-After": "120"}), 2: ("status", 429), 3: ("status", 503)}
    with serving(folder, Faults(plan)) as server:
        assert whole(server, clock)[0] == CONTENT
    assert clock.waits == [120.0, 2.0, 4.0]


def test_waits_grow_up_to_a_maximum_and_end(folder: Path, clock: Clock) -> None:
    faults = Faults(dict.fromkeys(range(1, 200), ("status", 503)))
    with serving(folder, faults) as server, pytest.raises(UnreachableFileError) as raised:
        whole(server, clock)
    assert clock.waits[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert clock.time <= 4 * 3600 < clock.time + 300
    assert "503" in raised.value.cause
    assert "request(s) in 14," in str(raised.value)


def test_a_wait_that_is_longer_than_the_patience_is_not_begun(folder: Path, clock: Clock) -> None:
    faults = Faults({1: ("status", 503, {"Retry-After": "99999"})})
    with serving(folder, faults) as server, pytest.raises(UnreachableFileError, match="503"):
        whole(server, clock)
    assert clock.waits == []


@pytest.mark.parametrize(("status", "requests_made"), [(404, 1), (403, 1), (410, 1)])
def test_a_missing_file_is_asked_for_once(folder: Path, clock: Clock, status: int, requests_made: int) -> None:
    with serving(folder, Faults({1: ("status", status)})) as server:
        with pytest.raises(UnreachableFileError) as raised:
            whole(server, clock)
        assert (raised.value.status, len(server.requests)) == (status, requests_made)


def test_a_server_that_sends_a_byte_at_a_time_is_given_up(folder: Path, clock: Clock) -> None:
    faults = Faults(dict.fromkeys(range(1, 5000), ("truncate", 70)))
    with serving(folder, faults) as server, pytest.raises(UnreachableFileError, match="the connection ended at byte"):
        whole(server, clock)


def test_no_server_is_an_error_and_not_a_wait_for_ever(clock: Clock) -> None:
    with pytest.raises(UnreachableFileError, match="no connection"):
        fetch_range(HttpFile("http://127.0.0.1:9/a"), 0, None, clock.patience(seconds=10))
    assert clock.waits == [1.0, 2.0, 4.0]
    with pytest.raises(UnreachableFileError, match="no connection"):
        fetch_range(HttpFile("http://127.0.0.1:9/a"), 0, None, clock.patience(connects=3))
    assert clock.waits == [1.0, 2.0, 4.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("file:///etc/passwd", "302 Found - Redirection to url"),
        ("ftp://a.example/x", "a redirect to ftp://a.example/x"),
    ],
)
def test_redirects_stay_on_the_web(folder: Path, clock: Clock, to: str, message: str) -> None:
    faults = Faults({1: ("status", 302, {"Location": to})})
    with serving(folder, faults) as server, pytest.raises(UnreachableFileError, match=message):
        whole(server, clock)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 100000000\r\n\r\n", b"a"),
    ],
    ids=["a header", "interim answers", "the body of a redirect"],
)
def test_a_server_that_drips_has_a_limit_of_time(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, first: bytes, again: bytes
) -> None:
    monkeypatch.setattr(requests, "HEAD_SECONDS", 0.2)
    faults = Faults(dict.fromkeys(range(1, 100), ("drip", first, again)))
    raised: list[Exception] = []

    def fetch() -> None:
        try:
            fetch_range(HttpFile(f"{server.uri}/a.warc.gz"), 0, None, clock.patience(seconds=4))
        except UnreachableFileError as error:
            raised.append(error)

    with serving(folder, faults) as server:
        reader = threading.Thread(target=fetch, daemon=True)
        reader.start()
        reader.join(10)
        assert len(raised) == 1


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (302, {"Location": "http://[::1/"}),
        (302, {"Location": "http://\xe9.example/\xe9"}),
        (200, {"Content-Length": "\xb2"}),
        (200, {"Content-Length": "9" * 5000}),
        (503, {"Retry-After": "\xb2"}),
    ],
)
def test_an_answer_that_makes_no_sense_is_asked_for_again(
    folder: Path, clock: Clock, status: int, headers: dict[str, str]
) -> None:
    with serving(folder, Faults({1: ("status", status, headers)})) as server:
        assert whole(server, clock)[0] == CONTENT


def test_redirects_are_followed_with_the_range_and_are_bounded(folder: Path, clock: Clock) -> None:
    with serving(folder) as other:
        there = {"Location": f"{other.uri}/a.warc.gz"}
        with serving(folder, Faults({1: ("status", 307, there)})) as server:
            assert fetch_range(HttpFile(f"{server.uri}/a.warc.gz"), 5, 9, clock.patience()) == CONTENT[5:9]
        assert other.requests == [("a.warc.gz", "bytes=5-8")]
    loops = Faults({number: ("status", 302, {"Location": "/a.warc.gz"}) for number in range(1, 30)})
    with serving(folder, loops) as server, pytest.raises(UnreachableFileError, match="302"):
        whole(server, clock)


def test_seeks(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BEHIND_BYTES", 100_000)
    with serving(folder) as server:
        stream = RemoteStream(HttpFile(f"{server.uri}/a.warc.gz"), clock.patience())
        assert stream.seek(0, 2) == len(CONTENT)
        stream.seek(0)
        numbers = random.Random(2)
        for _ in range(200):
            place, size = numbers.randrange(len(CONTENT) + 1000), numbers.choice((1, 10, 1 << 16, 1 << 20))
            stream.seek(place)
            data = stream.read(size)
            assert data == CONTENT[place : place + len(data)]
            assert bool(data) == (place < len(CONTENT))
            assert stream.tell() == place + len(data)
        stream.close()
        before = len(server.requests)
        stream = RemoteStream(HttpFile(f"{server.uri}/a.warc.gz"), clock.patience())
        for place in (0, 90_000, 10_000, 150_000, 120_000):  # within what is kept
            stream.seek(place)
            assert stream.read(1000) == CONTENT[place : place + 1000]
        stream.close()
        assert len(server.requests) == before + 1


def test_a_stream_reads_no_further_ahead_than_its_limit(folder: Path, clock: Clock, monkeypatch: Any) -> None:
    monkeypatch.setattr(download, "AHEAD_BYTES", 300_000)
    with serving(folder) as server:
        stream = RemoteStream(HttpFile(f"{server.uri}/a.warc.gz"), clock.patience())
        stream.read(1)
        threading.Event().wait(0.3)
        reading = stream._reading
        assert reading is not None
        assert 300_000 <= len(reading.data) < 300_000 + (256 << 10)
        assert stream.read() == CONTENT[1:]
        stream.close()


def test_ranges_and_random_access(folder: Path, clock: Clock) -> None:
    with serving(folder) as server:
        uri = f"{server.uri}/a.warc.gz"
        assert fetch_range(HttpFile(uri), 10, 20, clock.patience()) == CONTENT[10:20]
        assert fetch_range(HttpFile(uri), len(CONTENT) - 5, len(CONTENT) + 5, clock.patience()) == CONTENT[-5:]
        assert fetch_range(HttpFile(uri), len(CONTENT) + 5, len(CONTENT) + 9, clock.patience()) == b""
        file = RandomAccessFile(HttpFile(uri), clock.patience())
        assert file.seek(-10, 2) == len(CONTENT) - 10
        assert file.read() == CONTENT[-10:]
        file.seek(7)
        assert (file.read(3), file.tell()) == (CONTENT[7:10], 10)


def test_neighbouring_ranges_share_a_request(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [RecordRange(100, 200), RecordRange(200, 300), RecordRange(5000, 5100), RecordRange(2_000_000, 2_000_010)]
    assert coalesce(spans, None) == [spans[:3], spans[3:]]
    assert coalesce(spans, 500) == [spans]  # more than 30 % of the file
    assert coalesce([], None) == []
    assert coalesce([RecordRange(0, 1), RecordRange((1 << 20) + 1, (1 << 20) + 2)], None) != [spans]
    with serving(folder, Faults({1: ("truncate", 150)})) as server:
        facts = FileFacts()
        reader = Download(HttpFile(f"{server.uri}/a.warc.gz"), facts, clock.patience(), threading.Event())
        found = list(read_ranges(reader, coalesce(spans, None)))
        assert found == [(span, CONTENT[span.first : span.end]) for span in spans]
        assert [asked for _, asked in server.requests] == ["bytes=100-5099", "bytes=186-5099", "bytes=2000000-2000009"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        ("Fri, 01 Mar 2024 00:00:30 GMT", 30.0),
        ("Thu, 29 Feb 2024 00:00 GMT", 0.0),
        ("soon", None),
        ("-5", None),
    ],
)
def test_seconds_to_wait(text: str | None, expected: float | None) -> None:
    from datetime import UTC, datetime

    assert seconds_to_wait(text, datetime(2024, 3, 1, tzinfo=UTC)) == expected


def test_places() -> None:
    assert isinstance(remote_file("https://a.example/x"), HttpFile)
    found: Any = remote_file("s3://bucket/a/b")
    assert (found.bucket, found.key) == ("bucket", "a/b")
    assert remote_file("/folder/a") is None
    assert remote_file("gs://bucket/a") is None
