"""Provenance: registrable domains without a network, and lengths that add up by construction."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.stage import Drop, Split
from pipeline.sources import provenance
from pipeline.sources.provenance import SourceItem, account_bytes, domain_of, new_row
from schemas.ids import doc_id

SPLIT = Split(0, "s", "s", 0, "", "web", "warc")


@pytest.mark.parametrize(
    ("url", "domain"),
    [
        ("http://www.bbc.co.uk/news?x=http://a.com", "bbc.co.uk"),
        ("HTTPS://User:Pass@WWW.Example.COM.:8080/a", "example.com"),
        ("https://a@b@c.example.org/", "example.org"),
        ("http://foo.github.io#x", "github.io"),
        ("http://www.city.kawasaki.jp/", "city.kawasaki.jp"),
        ("http://a.b.xn--fiqs8s/", "b.xn--fiqs8s"),
        ("http://www.MÜNCHEN.de/", "xn--mnchen-3ya.de"),
        ("http://www.xn--mnchen-3ya.de/", "xn--mnchen-3ya.de"),
        ("http://пример.рф/", "xn--e1afmkfd.xn--p1ai"),
        ("http://a.пример.рф/", "xn--e1afmkfd.xn--p1ai"),
        ("http://192.168.1.1:80/", None),  # an address may be that of a person, and no address is a domain
        ("http://user@9.8.7.65./x", None),
        ("http://9%2E8.7.65/", None),
        ("http://9。8.7.65/", None),
        ("http://0x7f.1/", None),
        ("http://9.8.7.65,/", None),
        ("http://9.8.7.65%20/", None),
        ("http://9.8.7.65.nip.io/", "nip.io"),
        ("http://2130706433/", None),
        ("http://[2001:db8::1]:80/x", None),
        ("http://1.2.3.4.example.com/", "example.com"),
        ("http://4chan.org/", "4chan.org"),
        ("http://page.site.invalid/x", "page.site.invalid"),
        ("http://localhost", "localhost"),
        ("http://co.uk/", "co.uk"),
        ("http://evil.com\\@good.com/", "evil.com"),
        ("http:///path", None),
        ("http://[broken/", None),
        ("dns:www.archive.org", None),
        ("no url", None),
        ("", None),
    ],
)
def test_domain(url, domain):
    assert domain_of(url) == domain


def test_domains_need_no_network(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket, "socket", refuse)
    provenance._public_suffixes.cache_clear()
    provenance._domain.cache_clear()
    assert domain_of("http://news.example.com.au/") == "example.com.au"


@given(st.text(max_size=60))
def test_no_url_raises(text):
    domain_of(f"http://{text}")
    new_row("response", text)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 10))
def test_lengths_add_up_and_ids_are_unique(starts, rest):
    starts = sorted(starts)
    end = (starts[-1] if starts else 0) + rest
    rows = list(account_bytes(iter([SourceItem(start, new_row("row"), None) for start in starts]), SPLIT, lambda: end))
    assert sum(row["length"] for row, _ in rows) == end
    assert [row["offset"] for row, _ in rows] == [0, *starts[1:]]
    assert len({row["doc_id"] for row, _ in rows}) == len(rows) == max(len(starts), 1)


def test_account_numbers_the_parts_of_one_start():
    items = [SourceItem(start, new_row("row"), None) for start in (0, 5, 5, 5, 9)]
    rows = [row for row, _ in account_bytes(iter(items), SPLIT, lambda: 12)]
    assert [row["length"] for row in rows] == [5, 0, 0, 4, 3]
    places = [(0, 0), (5, 0), (5, 1), (5, 2), (9, 0)]
    assert [row["doc_id"] for row in rows] == [doc_id("web", "s", offset, part) for offset, part in places]


def test_a_file_without_items_is_one_gap():
    ((row, drop),) = account_bytes(iter([]), SPLIT, lambda: 20)
    assert (row["record_type"], row["offset"], row["length"], drop) == ("gap", 0, 20, Drop("empty_file"))
