"""Tests of blocks and of the counts of pages: by hand, with copies, and the same for any division into parts."""

import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from pipeline.dedup.repeats.keys import known_repeats
from pipeline.engine.spark import TALLIES
from pipeline.templates import blocks as module
from pipeline.templates.blocks import (
    PageCounts,
    PageTallies,
    addresses_and_texts,
    begins_title,
    blocks_of,
    copy_keys,
    host_number,
    pages_of_blocks,
    pages_of_hosts,
)


def lines_of(text: str) -> list[str]:
    found = blocks_of(text)
    return [text[start:end] for start, end in zip(found.starts.tolist(), found.ends.tolist())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Home\n\n  About us \n", ["Home", "  About us "]),
        ("12\n3 456\n—\n* * *\n7 days", ["7 days"]),  # numbers alone are cells of tables
        ("首页\nΑρχική", ["首页", "Αρχική"]),
        ("int main() {\n  return 0;\n}\n#include <stdio.h>\n// Driver code\nimport os\nfrom a.b import c", []),
        ("def run():\nrun()\nComments (3)\nprint(x)", ["Comments (3)", "print(x)"]),
        ("a\n```python\nx = total\n```\nb", ["a", "b"]),
        ("a\n```\nnever closed\nb", ["a"]),
        ("", []),
    ],
)
def test_blocks_are_lines_with_letters_that_are_no_code(text: str, expected: list[str]) -> None:
    assert lines_of(text) == expected


def test_lines_are_equal_by_case_digits_spaces_and_punctuation() -> None:
    keys = blocks_of("Copyright 2011, ACME!\ncopyright  2012 Acme\nCopyright 20111 ACME\nKopyright 2011 ACME").keys
    assert keys[0] == keys[1]
    assert len({*keys.tolist()}) == 3


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("A cure for sleep | Biolog.example", [True, False, False]),
        ("Biolog.example: a cure for sleep", [False, False, False]),
        (None, [False, False, False]),
    ],
)
def test_a_heading_is_the_beginning_of_the_title(title: str | None, expected: list[bool]) -> None:
    assert begins_title(blocks_of("A cure for sleep\nFor sleep\nMenu"), title).tolist() == expected


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("http://example.com/a", "https://WWW.Example.COM./b?c", True),
        ("http://example.com:80/a", "https://user:word@example.com:443/", True),
        ("http://example.com:8080/", "http://example.com/", False),
        ("http://münchen.example/", "http://xn--mnchen-3ya.example/x", True),
        ("http://blog.example.com/", "http://example.com/", False),
        ("http://[::1]/a", "http://[0:0:0:0:0:0:0:1]/b", True),
    ],
)
def test_hosts_are_compared_in_canonical_form(left: str, right: str, same: bool) -> None:
    assert (host_number(left) == host_number(right)) == same
    assert host_number(left) is not None


@pytest.mark.parametrize("url", [None, "", "mailto:a@example.com", "example.com/a", "http:///a", "http://a b/", "x"])
def test_a_page_without_a_web_address_has_no_host(url: str | None) -> None:
    assert host_number(url) is None


HOST, SAME_HASH = "news.example", "9man5bbsdcyq6wv1.ev.example"
"""A host, and another one with its xxh64: inverting that hash takes less than a second."""


def test_no_host_is_made_to_have_the_key_of_another_one() -> None:
    assert xxhash.xxh64_intdigest(HOST.encode()) == xxhash.xxh64_intdigest(SAME_HASH.encode())
    own, forged = (host_number(f"https://{host}/a") for host in (HOST, SAME_HASH))
    assert own is not None
    assert own != forged
    pages = [(number, f"https://{SAME_HASH}/{number}", f"The story\nLine {chr(97 + number)}") for number in range(6)]
    counts = counts_of([FakePart(0, [*pages, (9, f"https://{HOST}/s", "The story\nThe end")])])
    assert pages_of(counts, f"https://{HOST}/", "The story", "The end") == [1, 1, 1]


def test_a_key_of_a_text_is_no_sum_of_host_and_digest() -> None:
    """Pages of two hosts whose digests differ as the keys of the hosts do are no copies."""
    urls = [f"https://{host}/a" for host in ("a.example", "b.example")]
    hosts = [host_number(url) for url in urls]
    digest = sha256(b"text").digest()[:16]
    moved = int.from_bytes(digest[:8], "big") ^ int(hosts[0]) ^ int(hosts[1])
    digests = [digest, moved.to_bytes(8, "big") + digest[8:]]
    keys = [copy_keys(*page)[:, 0].tolist() for page in zip(urls, digests, hosts)]
    assert len({*keys[0], *keys[1]}) == 4


# Counts: parts are replaced by lists of pages, Spark by a sum over rows.

Page = tuple[int, str | None, str]
"""(number of the document, URL, text)"""


class FakePart:
    def __init__(self, ordinal: int, pages: Sequence[Page]):
        self.ordinal, self.pages = ordinal, pages


def doc_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def fake_read(part: Any, columns: Any, rows_at_once: int = 0) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict(
        {
            "doc_id": pa.array([doc_id(number) for number, _, _ in part.pages], pa.binary(16)),
            "url": pa.array([url for _, url, _ in part.pages], pa.string()),
            "text_digest": pa.array([sha256(text.encode()).digest()[:16] for _, _, text in part.pages], pa.binary(16)),
            "text": pa.array([text for _, _, text in part.pages], pa.string()),
        }
    )


def summed(batches: Sequence[pa.RecordBatch]) -> dict[bytes, int]:
    totals: dict[bytes, int] = {}
    for batch in batches:
        assert batch.schema == TALLIES
        for key, count in zip(batch.column("key").to_pylist(), batch.column("count").to_pylist()):
            totals[key] = totals.get(key, 0) + count
    return totals


def copies_of(parts: Sequence[FakePart], hosts: Any, ordinal: int) -> Any:
    rows = [row for part in parts for batch in addresses_and_texts(part, hosts) for row in batch.to_pylist()]
    totals = {key: sum(row["count"] for row in rows if row["key"] == key) for key in {row["key"] for row in rows}}
    best = {key: min(row["first"] for row in rows if row["key"] == key) for key in totals}
    own = [row for row in rows if row["part"] == ordinal and totals[row["key"]] > 1]
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([row["key"] for row in own], pa.binary()),
            "first": pa.array([row["first"] if row["first"] == best[row["key"]] else None for row in own], pa.binary()),
        }
    )
    return known_repeats([batch], (1,))[0]


def counts_of(parts: Sequence[FakePart]) -> PageCounts:
    of_hosts = summed([batch for part in parts for batch in pages_of_hosts(part)])
    hosts = np.array(sorted(int.from_bytes(key, "big") for key in of_hosts), np.uint64)
    batches = [batch for part in parts for batch in pages_of_blocks(part, hosts, copies_of(parts, hosts, part.ordinal))]
    totals = summed(batches)
    keys = [*totals]
    return PageCounts(
        [
            pa.RecordBatch.from_pydict(
                {"key": pa.array(keys, pa.binary()), "total": pa.array([totals[key] for key in keys], pa.int64())}
            )
        ]
    )


def pages_of(counts: PageCounts, url: str, *lines: str) -> list[int]:
    host = host_number(url)
    assert host is not None
    return [counts.of_host(host), *counts.of_blocks(host, blocks_of("\n".join(lines))).tolist()]


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_measured", fake_read)


def test_a_page_counts_once_for_a_line_that_it_has_twice() -> None:
    pages = [(number, f"http://a.example/{number}", f"Menu\nmenu\nStory {chr(97 + number)}") for number in range(4)]
    counts = counts_of([FakePart(0, [*pages, (9, "http://b.example/", "Menu\nOther")])])
    assert pages_of(counts, "http://a.example/", "Menu", "Story a", "Other") == [4, 4, 1, 0]
    assert pages_of(counts, "http://b.example/", "Menu", "Story a", "Other") == [1, 1, 0, 1]
    assert pages_of(counts, "http://c.example/", "Menu") == [0, 0]


def test_pages_with_one_url_or_one_text_count_once() -> None:
    body = "The only story\nof this page"
    same_url = [(number, "http://a.example/s", f"{body}\nvisit {chr(97 + number)}") for number in range(8)]
    same_text = [(10 + number, f"http://a.example/s?copy={number}", body) for number in range(8)]
    others = [(20 + number, f"http://a.example/{number}", f"Page {chr(97 + number)}") for number in range(3)]
    counts = counts_of([FakePart(0, same_url), FakePart(1, [*same_text, *others])])
    # one page of each group of copies is left
    assert pages_of(counts, "http://a.example/", *body.split("\n"), "Page b") == [5, 2, 2, 1]


def test_copies_do_not_count_but_are_known_where_they_are() -> None:
    """A part that has only copies gets the counts of their lines, so that they can be cut there, too."""
    pages = [(number, f"http://a.example/{number}", f"Menu\nText {chr(97 + number)}") for number in range(3)]
    parts = [FakePart(0, pages), FakePart(1, [(99, "http://a.example/1", "Menu\nNew text")])]
    hosts = np.array([host_number("http://a.example/")], np.uint64)
    rows = [*pages_of_blocks(parts[1], hosts, copies_of(parts, hosts, 1))]
    assert sorted(count for batch in rows for count in batch.column("count").to_pylist()) == [0, 0, 0]
    assert sum(batch.num_rows for batch in rows if len(batch.column("key")[0].as_py()) == 8) == 1


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_the_counts_are_the_same_for_any_division_into_parts(num_parts: int) -> None:
    rng = random.Random(5)
    words = ["Menu", "Contact", "Imprint", "Story one", "Story two", "Longer story", "Search"]
    pages: list[Page] = [
        (
            number,
            rng.choice([None, *(f"http://{host}.example/{rng.randrange(60)}" for host in "abc")]),
            "\n".join([*rng.sample(words, rng.randrange(6)), f"Visit {chr(97 + number % 26) * (number % 5)}"]),
        )
        for number in range(120)
    ]
    whole = counts_of([FakePart(0, pages)])
    rng.shuffle(pages)
    parts = [FakePart(number, pages[number::num_parts]) for number in range(num_parts)]
    divided = counts_of(parts)
    for host in "abc":
        expected = pages_of(whole, f"http://{host}.example/", *words)
        assert pages_of(divided, f"http://{host}.example/", *words) == expected
        assert expected[0] > 10
        assert max(expected[1:]) < expected[0]


def test_a_batch_of_counts_has_a_bounded_number_of_keys() -> None:
    pages = PageTallies(3, at_once=4)
    keys = np.array([[1, 5], [1, 6], [2, 5]], np.uint64)
    first = [*pages.add(keys, True), *pages.add(keys[:2], True)]
    assert [batch.column("count").to_pylist() for batch in first] == [[2, 2, 1]]
    assert first[0].column("part").to_pylist() == [3, 3, 3]
    assert [*pages.rest()] == []
    assert [*pages.add(keys[:1], False), *pages.rest()][0].column("count").to_pylist() == [0]
    assert [*pages.add(keys[:0], True), *pages.rest()] == []
