"""The table of robots.txt by host, made from real archives of a few records."""

import gzip
import random
from pathlib import Path

import pytest

from pipeline.rights.table import RobotsTable, host_of, write_robots
from schemas.errors import ContractError
from tests.support.tiny_archive import record

DENY = b"User-agent: *\nDisallow: /\n"


def response(
    url: str, body: bytes = b"", status: str = "200 OK", date: str = "2024-05-18T01:58:10Z", **more: str
) -> bytes:
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in more.items())
    block = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\n{fields}\r\n".encode() + body
    return gzip.compress(record(block, WARC_Target_URI=url, WARC_Date=date))


RECORDS = [
    response("https://A.org/robots.txt", DENY),
    response("http://a.org:80/robots.txt", b"", date="2023-01-01T00:00:00Z"),
    response("https://www.a.org/robots.txt", b"User-agent: *\nDisallow: /b"),
    response("https://a.org:8443/robots.txt", b"User-agent: *\nAllow: /"),
    response("https://gone.org/robots.txt", DENY, "404 Not Found"),
    response("https://down.org/robots.txt", DENY, "503 Service Unavailable"),
    response("https://moved.org/robots.txt", DENY, "301 Moved Permanently"),
    response("https://zip.org/robots.txt", gzip.compress(DENY), Content_Encoding="gzip"),
    response("https://empty.org/robots.txt?x", b""),
    response("https://a.org/.well-known/tdmrep.json", b'[{"location": "/n", "tdm-reservation": 1}]'),
    response("https://tdm.org/.well-known/tdmrep.json", b'[{"location": "/", "tdm-reservation": 1}]'),
    response("https://a.org/page/robots.txt", DENY),
    gzip.compress(record(b"software: x", kind="warcinfo", WARC_Target_URI=None)),
]


def archive(path: Path, records: list[bytes]) -> None:
    path.write_bytes(b"".join(records))


def test_the_latest_file_of_each_host(tmp_path: Path) -> None:
    archive(tmp_path / "robots.warc.gz", RECORDS)
    counts = write_robots([f"{tmp_path}/robots.warc.gz"], f"{tmp_path}/t.arrow")
    assert (counts.records, counts.hosts, counts.tdm_hosts) == (13, 6, 2)
    assert counts.left_out == {"earlier": 1, "server_error": 1, "redirect": 1, "other_address": 1, "not_a_response": 1}
    table = RobotsTable(f"{tmp_path}/t.arrow")
    verdicts = {
        url: (table.of_url(url)[1], table.of_url(url)[0].denies("GPTBot", "/b"))
        for url in (
            *("http://a.org/b", "https://www.a.org/x", "https://a.org:8443/b", "http://gone.org", "http://down.org/b"),
            *("http://moved.org/b", "http://zip.org/b", "http://empty.org/b", "http://tdm.org/b", "http://new.org/b"),
        )
    }
    assert list(verdicts.values()) == [
        *((True, True), (True, True), (True, False), (True, False), (False, False)),
        *((False, False), (True, True), (True, False), (False, False), (False, False)),
    ]
    assert table.of_url("http://a.org/n/1")[0].reservation("/n/1") == 1
    assert table.of_url("http://a.org/n/1")[0].reservation("/") is None
    assert table.of_url("no address")[1] is False


def test_the_table_does_not_depend_on_files_or_processes(tmp_path: Path) -> None:
    archive(tmp_path / "all.warc.gz", RECORDS)
    shuffled = RECORDS.copy()
    random.Random(0).shuffle(shuffled)
    for number in range(3):
        archive(tmp_path / f"part-{number}.warc.gz", shuffled[number::3])
    write_robots([f"{tmp_path}/all.warc.gz"], f"{tmp_path}/one.arrow")
    write_robots([f"{tmp_path}/part-*.warc.gz"], f"{tmp_path}/three.arrow")
    write_robots([f"{tmp_path}/part-*.warc.gz"], f"{tmp_path}/spawned.arrow", processes=2)
    first = (tmp_path / "one.arrow").read_bytes()
    assert (tmp_path / "three.arrow").read_bytes() == first
    assert (tmp_path / "spawned.arrow").read_bytes() == first
    assert not list(tmp_path.glob("*.partial"))


def test_damage_is_counted(tmp_path: Path) -> None:
    whole = b"".join(RECORDS[:3])
    (tmp_path / "cut.warc.gz").write_bytes(whole[: len(RECORDS[0]) + 40])
    counts = write_robots([f"{tmp_path}/cut.warc.gz"], f"{tmp_path}/t.arrow")
    assert counts.hosts == 1
    assert counts.records == 2
    assert sum(counts.left_out.values()) == 1


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0nonsense", b"\0" * 1_000])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.arrow").write_bytes(content)
    with pytest.raises(ContractError, match=r"rights\.robots: expected a table of robots\.txt, got .*penstock robots"):
        RobotsTable(f"{tmp_path}/t.arrow")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://A.org:443/x", "a.org"),
        ("http://user:x@a.org.:8080", "a.org:8080"),
        ("http://a.org?x", "a.org"),
        ("a.org/x", ""),
        ("http://bücher.example/", "xn--bcher-kva.example"),
        ("http://xn--bcher-kva.example:80/", "xn--bcher-kva.example"),
        ("http://B%C3%BCcher%2Eexample:8080/", "xn--bcher-kva.example:8080"),
        ("http://a。org/", "a.org"),
        ("mailto:x", ""),
    ],
)
def test_hosts(url: str, host: str) -> None:
    assert host_of(url) == host
