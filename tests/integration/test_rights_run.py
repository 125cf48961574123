"""A real run of pages with marks: their columns, and the verdicts by the protocols that the recipe respects."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.rights.table import write_robots
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.tiny_archive import record

pytestmark = pytest.mark.spark

TEXT = " ".join(
    f"The keeper of house {number} walked along the river every morning, and she wrote down what the water had brought."
    for number in range(30)
)
PAGES = {
    "http://a.example/plain": ("", ""),
    "http://a.example/meta": ("", '<meta name="robots" content="noai">'),
    "http://b.example/header": ("TDM-Reservation: 1\r\nX-Robots-Tag: noarchive\r\n", ""),
    "http://c.example/closed/page": ("", ""),
    "http://c.example/open/page": ("Content-Usage: train-ai=n\r\n", ""),
}
ROBOTS = b"User-agent: GPTBot\nDisallow: /closed\n\nUser-agent: *\nDisallow:"


def archive(path: Path) -> None:
    stored = b""
    for url, (header, tag) in PAGES.items():
        page = f"<html><head>{tag}<title>{url}</title></head><body><article><p>{TEXT} {url}</p></article></body></html>"
        block = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n{header}\r\n{page}".encode()
        stored += gzip.compress(record(block, WARC_Target_URI=url))
    path.write_bytes(stored)


def test_marks_are_columns_and_respected_protocols_drop(run_at: Callable[..., Store], tmp_path: Path) -> None:
    archive(tmp_path / "pages.warc.gz")
    block = b"HTTP/1.1 200 OK\r\n\r\n" + ROBOTS
    (tmp_path / "robots.warc.gz").write_bytes(
        gzip.compress(record(block, WARC_Target_URI="http://c.example/robots.txt"))
    )
    write_robots([f"{tmp_path}/robots.warc.gz"], f"{tmp_path}/robots.arrow")
    overrides = [
        f'source.paths=["{tmp_path}/pages.warc.gz"]',
        f'rights.robots={{ crawl = "{tmp_path}/robots.arrow" }}',
        'rights.respect=["robots_meta", "tdm", "robots_txt"]',
    ]
    run = run_at(overrides=overrides, until="verdicts")
    folder, manifest = open_table(run, "documents")
    rows = {row["url"]: row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()}
    assert {url: rows[url]["robots_meta"] for url in PAGES} == {
        **{url: [] for url in PAGES},
        "http://a.example/meta": ["noai"],
        "http://b.example/header": ["noarchive"],
    }
    assert rows["http://b.example/header"]["tdm_reservation"] == 1
    assert rows["http://c.example/open/page"]["content_usage"] == ["train-ai=n"]
    assert [rows[url]["robots_denied"] for url in PAGES] == [[], [], [], ["crawl/GPTBot"], []]
    assert [rows[url]["robots_files"] for url in PAGES] == [[], [], [], ["crawl"], ["crawl"]]
    counts = open_table(run, "verdicts")[1].content.counts
    assert {name: number for name, number in counts.dropped.items() if name.startswith("rights/") and number} == {
        "rights/robots_meta": 1,
        "rights/tdm": 1,
        "rights/robots_txt": 1,
    }
