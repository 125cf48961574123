"""Files of a bucket, against a server of S3 on this machine: streams, ranges, missing and changed files, and access."""

import os
import random
import threading
from unittest import mock

import pytest

from pipeline.sources.common_crawl import requests
from pipeline.sources.common_crawl.download import Download, FileFacts, Patience, RemoteStream, fetch_range
from pipeline.sources.common_crawl.requests import ChangedFileError, UnreachableFileError, is_near, remote_file
from schemas.errors import ConfigError
from schemas.storage import Store
from tests.support.s3_server import server

__all__ = ["server"]  # a fixture
CONTENT = random.Random(1).randbytes(1_500_000)
QUICK = Patience(seconds=5.0, first=0.01)
URI = "s3://bucket/files/a.warc.gz"


@pytest.fixture(autouse=True)
def written(server: int) -> None:
    """The file in the bucket."""
    requests._s3_client.cache_clear()
    Store("s3://bucket/files").write_atomic("a.warc.gz", CONTENT)


def test_a_file_is_one_request() -> None:
    stream = RemoteStream(remote_file(URI), QUICK)
    assert stream.seek(0, 2) == len(CONTENT)
    stream.seek(0)
    assert stream.read() == CONTENT
    assert stream.transfers == {"requests": 1, "bytes": len(CONTENT)}
    stream.close()


@pytest.mark.parametrize(("first", "end"), [(0, 10), (1000, 1001), (1_499_990, 1_500_010), (1_600_000, 1_600_010)])
def test_ranges(first: int, end: int) -> None:
    assert fetch_range(remote_file(URI), first, end, QUICK) == CONTENT[first:end]


def test_a_missing_file_and_a_changed_one() -> None:
    with pytest.raises(UnreachableFileError) as raised:
        fetch_range(remote_file("s3://bucket/files/none"), 0, None, QUICK)
    assert raised.value.status == 404
    facts = FileFacts()
    download = Download(remote_file(URI), facts, QUICK, threading.Event())
    assert b"".join(download.blocks(0, 10)) == CONTENT[:10]
    Store("s3://bucket/files").write_atomic("a.warc.gz", CONTENT[1:])
    with pytest.raises(ChangedFileError, match="got another version of it"):
        b"".join(download.blocks(10, 20))


def test_no_server_is_an_error() -> None:
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}):
        requests._s3_client.cache_clear()
        with pytest.raises(UnreachableFileError, match="no connection"):
            fetch_range(remote_file(URI), 0, None, Patience(seconds=5.0, first=0.01, connects=2))
    requests._s3_client.cache_clear()


def test_access_is_near_with_credentials_and_the_region_of_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_near("us-east-1")
    assert not is_near("eu-central-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    assert not is_near("us-east-1")


def test_no_boto3_is_named() -> None:
    requests._s3_client.cache_clear()
    with mock.patch.dict("sys.modules", {"boto3": None}):
        assert not is_near("us-east-1")
        with pytest.raises(ConfigError, match="expected the package boto3, which reads s3"):
            fetch_range(remote_file(URI), 0, None, QUICK)
