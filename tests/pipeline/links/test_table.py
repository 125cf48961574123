"""Links of WAT files, Reddit submissions and wikis, what is left out and counted, and the same bytes each time."""

import gzip
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from pipeline.links.readers import MAX_LINKS, MAX_URL_CHARS, LinkCounts, read_links
from pipeline.links.table import write_links
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from schemas.errors import ConfigError
from tests.support.growth import MOST, growth


def record(value: object, kind: str = "metadata") -> bytes:
    """A record of a WAT file."""
    block = json.dumps(value).encode() if not isinstance(value, bytes) else value
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Length: {len(block)}\r\n\r\n"
    return gzip.compress(head.encode() + block + b"\r\n\r\n", mtime=0)


def page(links: list[object], **head: object) -> dict:
    html = {"HTML-Metadata": {"Head": head, "Links": links}}
    payload = {"Payload-Metadata": {"HTTP-Response-Metadata": html}}
    return {"Envelope": payload | {"WARC-Header-Metadata": {"WARC-Target-URI": "http://a.example.com/x/y"}}}


def link(url: object, **fields: object) -> dict:
    return {"path": "A@/href", "url": url} | fields


def read(data: bytes, name: str = "a.wat.gz", internal: bool = False) -> tuple[list[dict], LinkCounts]:
    counts = LinkCounts()
    return list(read_links(name, io.BytesIO(data), internal, counts)), counts


def test_a_long_base_costs_no_time_for_each_link() -> None:
    def links_of(count: int) -> bytes:
        links = [link("x/y")] * count + [link("http://b.example.org/")]
        return record(page(links, Base=f"http://a.example.net/{'b/' * 8 * count}"))

    rows, counts = read(links_of(500))
    assert [row["url"] for row in rows] == ["http://b.example.org/"]
    assert counts.links_left_out == {"not_web": 500}
    assert growth(read, links_of, 1_500) < MOST


def test_a_page_with_a_long_address_has_none() -> None:
    value = page([link("http://b.example.org/"), link("/relative")])
    value["Envelope"]["WARC-Header-Metadata"]["WARC-Target-URI"] = f"http://a.example.com/{'x' * MAX_URL_CHARS}"
    (row,), counts = read(record(value))
    assert (row["url"], row["from_url"], row["from_domain"]) == ("http://b.example.org/", None, None)
    assert counts.links_left_out == {"not_web": 1}


def test_links_of_a_wat_file() -> None:
    links = [
        link("http://b.example.org/1", text="To\n B", rel="nofollow"),
        link("../z"),
        link("//c.example.net/?q=1"),
        link("mailto:a@example.com"),
        link("http://[bad"),
        link("https:///nowhere"),
        link(7),
        {"path": "IMG@/src", "url": "http://b.example.org/i.png"},
        "no link",
    ]
    rows, counts = read(b"".join([record({}, "warcinfo"), record(page(links)), record({}), record(b"{"), record([])]))
    assert [(row["url"], row["domain"], row["text"], row["rel"]) for row in rows] == [
        ("http://b.example.org/1", "example.org", "To B", "nofollow"),
        ("http://c.example.net/?q=1", "example.net", None, None),
    ]
    assert {(row["from_url"], row["from_domain"], row["score"]) for row in rows} == {
        ("http://a.example.com/x/y", "example.com", None)
    }
    assert (counts.records, counts.pages, counts.links) == (5, 1, 2)
    assert counts.left_out == {"no_html": 2, "bad_json": 2}
    assert counts.links_left_out == {"same_domain": 1, "not_web": 2, "no_domain": 1}
    inner, _ = read(record(page([link("../z")], Base="http://a.example.com/q/")), internal=True)
    assert [row["url"] for row in inner] == ["http://a.example.com/z"]


def test_a_page_with_too_many_links_and_damage() -> None:
    data = record(page([link(f"http://b.example.org/{n}") for n in range(MAX_LINKS + 3)]))
    rows, counts = read(data + data[:-20])
    assert (len(rows), counts.links_left_out["over_limit"]) == (MAX_LINKS, 3)
    assert counts.left_out == {"truncated_record": 1}


def test_links_of_submissions() -> None:
    lines = [
        {"url": "http://b.example.org/1", "title": "T", "score": 7, "permalink": "/r/a/1/", "is_self": False},
        {"url": "https://www.reddit.com/r/a", "title": "T", "is_self": True},
        {"title": "no URL"},
        [],
    ]
    rows, counts = read("\n".join(map(json.dumps, lines)).encode() + b"\n\n{", "RS_2020-01.jsonl")
    (row,) = rows
    assert (row["from_url"], row["from_domain"], row["text"], row["score"]) == (
        "https://www.reddit.com/r/a/1/", "reddit.com", "T", 7,
    )  # fmt: skip
    assert (counts.records, counts.pages, counts.left_out) == (5, 1, {"no_link": 2, "bad_json": 2})


def test_links_of_articles() -> None:
    text = """A [http://b.org/1 the ''source'']. See https://c.net/x_(y), and (http://c.net/z).
    <ref>{{cite web |url=http://d.com/a?b=1|title=T}}</ref> [[Other]] [https://d.com/2]
    <!-- http://hidden.org/ --> https://w.example.org/wiki/Own ftp://e.org/"""
    page = "<page><title>T</title><ns>{}</ns><revision><text>{}</text></revision></page>"
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    head = "<mediawiki><siteinfo><base>https://w.example.org/wiki/Main_Page</base></siteinfo>"
    pages = [page.format(0, escaped), page.format(1, escaped), page.format(0, "#REDIRECT [[Other]]"), "<page><title>"]
    rows, counts = read((head + "".join(pages)).encode(), "wiki.xml")
    assert [(row["url"], row["text"]) for row in rows] == [
        ("http://b.org/1", "the ''source''"),
        ("https://c.net/x_(y)", None),
        ("http://c.net/z", None),
        ("http://d.com/a?b=1", None),
        ("https://d.com/2", None),
    ]
    assert {row["from_url"] for row in rows} == {"https://w.example.org/wiki/T"}
    assert (counts.records, counts.pages, counts.links, counts.links_left_out) == (4, 1, 5, {"same_domain": 1})
    assert counts.left_out == {"other_namespace": 1, "redirect": 1, "truncated_record": 1}


def test_the_verb_writes_the_same_file_with_any_number_of_processes(tmp_path: Path, capsys) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.wat.gz").write_bytes(record(page([link(f"http://{name}.example.org/")])))
    outs = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}" / "links.parquet"
        assert main(["links", f"{tmp_path}/*.wat.gz", "--out", str(out), "--processes", str(processes)]) == 0
        assert "2 records: 2 pages and submissions with 2 links written" in capsys.readouterr().out
        outs.append(out.read_bytes())
        assert [path.name for path in out.parent.iterdir()] == ["links.parquet"]
    assert outs[0] == outs[1]
    assert pq.read_table(tmp_path / "1" / "links.parquet")["domain"].to_pylist() == ["example.org"] * 2


def test_wrong_files_and_settings_are_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.warc.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"files: expected WAT files .* got a\.warc\.gz"):
        write_links([f"{tmp_path}/*"], str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"files: 1 problem\(s\)"):
        write_links([f"{tmp_path}/none"], str(tmp_path / "out"))
    assert main(["links", "a", "--out", "b", "--processes", "0"]) == 2
    assert "--processes: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("format_name", ["auto", "warc"])
def test_a_recipe_with_a_wat_file_is_refused_before_it_starts(tmp_path: Path, format_name: str) -> None:
    (tmp_path / "a.warc.wat.gz").write_bytes(record({}))
    with pytest.raises(ConfigError, match=r"a WAT file, which has no text\. Use `penstock links`"):
        find_splits(SourceConfig(paths=(f"{tmp_path}/*",), format=format_name))


def test_real_files(shared_data: Path, tmp_path: Path) -> None:
    names = (
        *("warc/real/whirlwind.warc.wat.gz", "sources/reddit/submissions.jsonl.zst"),
        "sources/wikipedia/enwiki-pages-articles-part0.xml.bz2",
    )
    paths = [shared_data / name for name in names]
    if not all(path.exists() for path in paths):
        pytest.skip("no samples of WAT files, submissions and wikis")
    counts = write_links([*map(str, paths)], str(tmp_path / "links.parquet"))
    assert (counts.records, counts.pages) == (5706, 1837)
    assert counts.pages + sum(counts.left_out.values()) == counts.records
    assert pq.read_metadata(tmp_path / "links.parquet").num_rows == counts.links == 4493
