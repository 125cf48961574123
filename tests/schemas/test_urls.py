"""Tests of URLs as keys: URLs with equal forms, URLs with different forms, and properties of the form."""

import gzip
import hashlib
import json
import re
import time
import unicodedata
from collections import defaultdict
from pathlib import Path

import idna
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.urls import (
    KEY_BYTES,
    canonical_url,
    host_suffixes,
    is_host_of,
    parse_domain,
    resolved_host,
    surt,
    url_key,
    url_pattern,
    web_host,
    with_scheme,
)

FORMS = [
    # RFC 3986, section 6.2: case, percent-encoding, dot segments (5.4's examples), ports, empty paths
    ("HTTP://www.EXAMPLE.com", "http://example.com/"),
    ("example://a/b/c/%7Bfoo%7D", "example://a/b/c/%7Bfoo%7D"),
    ("http://example.com/%7Efoo/%c3%b6/%2F%3f", "http://example.com/~foo/%C3%B6/%2F%3F"),
    ("http://example.com/a b/ö/%/%4/%g0/%%34", "http://example.com/a%20b/%C3%B6/%25/%254/%25g0/%254"),
    ("http://a.b/b/c/./../../g", "http://a.b/g"),
    ("http://a.b/mid/content=5/../6", "http://a.b/mid/6"),
    ("http://a.b/../../../g/.", "http://a.b/g"),
    ("http://a.b/b/%2e%2E/.g/g../..g", "http://a.b/.g/g../..g"),
    ("http://example.com:80/", "http://example.com/"),
    ("https://example.com:0443/", "http://example.com/"),
    ("https://example.com:", "http://example.com/"),
    ("http://example.com:8080/", "http://example.com:8080/"),
    ("http://example.com:00000443/", "http://example.com/"),
    ("http://example.com:0/", "http://example.com:0/"),
    ("http://example.com:65535/", "http://example.com:65535/"),
    ("http://example.com?", "http://example.com/"),
    # forms that browsers allow in addition
    (" \thttp://exam\nple.com/a\r\n ", "http://example.com/a"),
    ("http:\\\\example.com\\a\\b", "http://example.com/a/b"),
    ("//example.com/a", "http://example.com/a"),
    ("http://user:secret@example.com/", "http://example.com/"),
    ("http://example.com./", "http://example.com/"),
    # hosts
    ("https://www.example.com/a", "http://example.com/a"),
    ("https://www2.example.com/a", "http://example.com/a"),
    ("https://www.www.example.com/a", "http://example.com/a"),
    ("https://www.com/", "http://www.com/"),
    ("https://www123.example.com/", "http://www123.example.com/"),
    ("https://wwwexample.com/", "http://wwwexample.com/"),
    ("https://m.example.com/", "http://m.example.com/"),
    ("http://BÜCHER.example/", "http://xn--bcher-kva.example/"),
    ("http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"),
    ("http://b%C3%BCcher.example/", "http://xn--bcher-kva.example/"),
    ("http://straße.de/", "http://xn--strae-oqa.de/"),
    ("http://STRAẞE.de/", "http://xn--strae-oqa.de/"),
    ("http://例え。テスト/", "http://xn--r8jz45g.xn--zckzah/"),
    ("http://ｅｘａｍｐｌｅ．com/", "http://example.com/"),
    ("http://127.0.0.1:8000/a", "http://127.0.0.1:8000/a"),
    ("http://[2001:DB8:0:0::1]:8080", "http://[2001:db8::1]:8080/"),
    ("http://localhost/a", "http://localhost/a"),
    # fragments: removed, unless they are routes
    ("http://example.com/a#top", "http://example.com/a"),
    ("http://example.com/a?b#:~:text=x", "http://example.com/a?b"),
    ("http://example.com/#!/a b", "http://example.com/#!/a%20b"),
    ("http://example.com/app#/inbox/7", "http://example.com/app#/inbox/7"),
    # the end of the path
    ("http://example.com/a/", "http://example.com/a"),
    ("http://example.com/a//", "http://example.com/a"),
    ("http://example.com/a/index.html", "http://example.com/a"),
    ("http://example.com/Default.aspx?q=1", "http://example.com/?q=1"),
    ("http://example.com/index.html/index.php/", "http://example.com/"),
    ("http://example.com/index.php/a", "http://example.com/index.php/a"),
    ("http://example.com/my-index.html", "http://example.com/my-index.html"),
    ("http://example.com/index.xml", "http://example.com/index.xml"),
    # sessions
    ("http://example.com/a;jsessionid=FD52.1_cid382?x=1", "http://example.com/a?x=1"),
    ("http://example.com/a;JSESSIONID=1/b;v=2", "http://example.com/a/b;v=2"),
    ("http://example.com/(S(lit3py55t21z5v55vlm25s55))/o.aspx", "http://example.com/o.aspx"),
    ("http://example.com/f(S(1))/(note)/o", "http://example.com/f(S(1))/(note)/o"),
    ("http://example.com/?PHPSESSID=1&jsessionid=2&CFID=3&cftoken=4", "http://example.com/"),
    ("http://example.com/?t=1&sid=58428beaa14598c2e02d93ad5c773e4d", "http://example.com/?t=1"),
    ("http://example.com/?sid=7&s=shoes&session=2024-spring", "http://example.com/?s=shoes&session=2024-spring&sid=7"),
    ("http://example.com/?sid=abcdefghijklmnopqrstuvwxyzab", "http://example.com/?sid=abcdefghijklmnopqrstuvwxyzab"),
    # tracking
    ("http://example.com/?utm_source=a&UTM_Term=b&gclid=c&fbclid=d&id=1", "http://example.com/?id=1"),
    ("http://example.com/?ref=a&source=b&page=2", "http://example.com/?page=2&ref=a&source=b"),
    ("http://example.com/?utm=1&mygclid=2&pk_id=3", "http://example.com/?mygclid=2&pk_id=3&utm=1"),
    # parameters: sorted by name alone; values of one name may be a list, so they keep their order
    ("http://example.com/?b=1&a=2&b=0&&", "http://example.com/?a=2&b=1&b=0"),
    ("http://example.com/?a=&b", "http://example.com/?a=&b"),
    ("http://example.com/?q=a%20b+c%2Bd%7e", "http://example.com/?q=a+b+c%2Bd~"),
    ("http://example.com/?x[a]=1&y=é?/|", "http://example.com/?x%5Ba%5D=1&y=%C3%A9?/%7C"),
    # texts that are not web URLs
    ("", ""),
    ("  report 7 ", "report 7"),
    ("www.example.com/a#b", "www.example.com/a#b"),
    ("mailto:Jane@Example.com", "mailto:Jane@Example.com"),
    ("urn:uuid:1", "urn:uuid:1"),
    ("http://", "http://"),
    ("http:///a", "http:///a"),
    ("http://ex ample.com/", "http://ex ample.com/"),
    ("http://a..b/", "http://a..b/"),
    ("http://example.com:65536/", "http://example.com:65536/"),
    ("http://example.com:99999999999999999999/", "http://example.com:99999999999999999999/"),
    ("http://example.com:8o/", "http://example.com:8o/"),
    ("http://example.com:٤٤٣/", "http://example.com:٤٤٣/"),
    ("http://[::1/", "http://[::1/"),
    ("http://[1.2.3]/", "http://[1.2.3]/"),
    ("http://a.b/\ud800", "http://a.b/%ED%A0%80"),
    ("\ud800", "\ud800"),
]


@pytest.mark.parametrize(("url", "expected"), FORMS)
def test_forms(url: str, expected: str) -> None:
    assert canonical_url(url) == expected
    assert canonical_url(expected) == expected


APART = [
    ("http://example.com/A", "http://example.com/a"),
    ("http://example.com/a//b", "http://example.com/a/b"),
    ("http://example.com/a%2Fb", "http://example.com/a/b"),
    ("http://example.com/?a=", "http://example.com/?a"),
    ("http://example.com/?a=1&a=2", "http://example.com/?a=2&a=1"),
    ("http://example.com/?page=1", "http://example.com/?page=2"),
    ("http://en.example.com/", "http://example.com/"),
    ("http://example.com/%E9", "http://example.com/%C3%A9"),
    ("http://example.com/#!a", "http://example.com/#!b"),
    ("ftp://example.com/", "http://example.com/"),
]


@pytest.mark.parametrize(("first", "second"), APART)
def test_urls_that_may_be_two_pages_have_different_forms(first: str, second: str) -> None:
    assert canonical_url(first) != canonical_url(second)


PIECES = st.sampled_from(
    [
        *(
            "http://",
            "https://",
            "HTTP:",
            "//",
            "/",
            "\\",
            "?",
            "#",
            "#!",
            "&",
            "=",
            ";",
            ":",
            "@",
            "%",
            "%2",
            "%2e",
            "%2F",
        ),
        *(
            "www.",
            "www2.",
            "example.com",
            "a",
            "B",
            ".",
            "..",
            "/./",
            "/../",
            "index.html",
            "default.aspx",
            ":80",
            ":443",
        ),
        *("utm_x=1", "sid=", "0" * 32, ";jsessionid=1", ";jses", "(S(a))", "[::1]", "[", "]", " ", "\t", "ö", "ß", "Σ"),
        *("\u3002", "\ud800", "xn--", "-", "\u00ad", "ﬁ", "℀", "٠", "\u200d", "İ", "+", "%20", "~", "|"),
    ]
)
URLS = st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join), st.text(max_size=20).map("http://a.b/".__add__))


@given(URLS)
@example("http://ς.com/")
@example("http://İ.com/")
@settings(max_examples=600, deadline=None)
def test_the_form_of_a_form_is_itself(url: str) -> None:
    form = canonical_url(url)
    assert canonical_url(form) == form
    assert len(url_key(url)) == KEY_BYTES


@given(st.permutations(["a=1", "b=2", "c", "utm_medium=x", "d=%41"]), st.sampled_from(["http", "HTTPS"]))
def test_order_scheme_and_noise_do_not_matter(parameters: list[str], scheme: str) -> None:
    assert canonical_url(f"{scheme}://www.A.org/x/?{'&'.join(parameters)}") == "http://a.org/x?a=1&b=2&c&d=A"


def test_hosts_of_other_scripts_are_those_of_idna() -> None:
    other = []
    for code in (*range(0x80, 0x3100), *range(0x4E00, 0x9FFF, 97), *range(0xA000, 0xD7A3, 53), *range(0xF900, 0xFFF0)):
        try:
            expected = idna.encode(f"a{chr(code)}.example", uts46=True).decode()
        except idna.IDNAError:
            continue  # no host
        if canonical_url(f"http://a{chr(code)}.example/") != f"http://{expected}/":
            other.append(chr(code))
    # invisible fillers and vowels, and the lunate sigma; characters that this Python's Unicode lacks are left out
    known = [char for char in other if unicodedata.category(char) != "Cn"]
    assert known == ["\u03f2", "\u115f", "\u1160", "\u17b4", "\u17b5", "\uffa0"]


def test_keys_are_of_the_form() -> None:
    expected = hashlib.sha256(b"http://example.com/a").digest()[:16]
    assert url_key("https://www.example.com/a/?utm_source=x#y") == expected
    assert url_key("http://example.com/b") != expected
    assert len(url_key("\ud800")) == 16


@pytest.mark.parametrize(
    "piece", ["/..", "/index.html", "%", "&a=1", ";jsessionid=", "/(S(a))", "www.", "[", "://", "/(S(a)"]
)
def test_long_urls_take_time_in_proportion(piece: str) -> None:
    # a bound on the growth and no speed test: a pattern that backtracks would take hours
    started = time.process_time()
    canonical_url("http://example.com/" + piece * 50_000)
    canonical_url("http://" + piece * 50_000)
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://www.Example.com./a?b", "example.com"),
        ("http://user@example.com:443", "example.com"),
        ("//example.com:8080/a", "example.com:8080"),
        ("http://straße.example/", "xn--strae-oqa.example"),
        ("http://[0:0::1]:80/", "[::1]"),
        ("http://example.com:65536/", None),
        ("http://a b/", None),
        ("ftp://example.com/", None),
        ("example.com/a", None),
        ("", None),
    ],
)
def test_the_host_of_a_web_url_is_that_of_its_form(url: str, host: str | None) -> None:
    assert web_host(url) == host
    if host is not None:
        assert canonical_url(url).startswith(f"http://{host}/")


def test_sort_friendly_form() -> None:
    assert surt("https://www.example.com/a?b") == "com,example,www)/a?b"
    assert surt("http://EXAMPLE.com.") == "com,example)/"
    assert surt("no url") == "no url"
    assert surt("http://[::1") == "http://[::1"


def test_host_suffixes() -> None:
    assert host_suffixes("https://a.b.example.co.uk/x") == [
        *("a.b.example.co.uk", "b.example.co.uk", "example.co.uk", "co.uk", "uk")
    ]
    assert host_suffixes("no url") == []


def test_real_urls_fold_only_with_their_own_page(shared_data: Path) -> None:
    """Pages that fold together show the same page; of the pages known to be the same under two URLs, these fold."""
    with gzip.open(shared_data / "warc" / "pages-index.jsonl.gz", "rt", encoding="utf-8") as stream:
        urls = {json.loads(line)["url"] for line in stream}
    with gzip.open(shared_data / "dedup" / "page_groups.jsonl.gz", "rt", encoding="utf-8") as stream:
        groups = [{record["url"] for record in json.loads(line)["records"]} for line in stream]
    forms = defaultdict(set)
    for url in urls | set().union(*groups):
        forms[canonical_url(url)].add(url)
    folded = [
        urls_of for urls_of in forms.values() if len(urls_of) > 1 and not any(urls_of <= group for group in groups)
    ]
    several = [group for group in groups if len(group) > 1]
    assert (len(urls), len(several)) == (3319, 48)
    assert len([group for group in several if len({canonical_url(url) for url in group}) == 1]) == 5
    assert [{url.partition("#")[0] for url in urls_of} for urls_of in folded] == [{min(urls_of) for urls_of in folded}]


@pytest.mark.parametrize(
    ("host", "domain", "expected"),
    [
        ("gannet.example", "gannet.example", True),
        ("archive.gannet.example", "gannet.example", True),
        ("a.b.gannet.example", "gannet.example", True),
        ("notgannet.example", "gannet.example", False),
        ("gannet.example", "archive.gannet.example", False),
        ("www.gov.uk", "gov.uk", True),
        ("example.com", "com", False),
        ("localhost", "localhost", True),
        ("a.localhost", "localhost", False),
        ("1.2.3.4", "1.2.3.4", True),
        ("1.2.3.4", "2.3.4", False),
        ("::1.2.3.4", "1.2.3.4", False),
    ],
)
def test_a_host_is_of_a_domain(host: str, domain: str, expected: bool) -> None:
    assert is_host_of(host, domain) is expected
    where = f"[{host}]" if ":" in host else host
    for url in (f"http://{where}/a", f"HTTPS://User:x@{where.upper()}.:8080?q", f"http://{where}"):
        matches = pc.match_substring_regex(pa.array([url]), url_pattern(domain), ignore_case=True)
        assert matches.to_pylist() == [expected]


@pytest.mark.parametrize("url", ["http://x.org/gannet.example/", "http://gannet.example@x.org/", "no url", "urn:a"])
def test_a_domain_elsewhere_in_a_url_is_not_its_host(url: str) -> None:
    matches = pc.match_substring_regex(pa.array([url]), url_pattern("gannet.example"), ignore_case=True)
    assert matches.to_pylist() == [False]


@pytest.mark.parametrize(
    "text", ["http://a.example/", "a.example/x", "a.example:80", "", " ", "a b.example", "u@a.example"]
)
def test_a_domain_is_a_host_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--domain: expected a domain such as example.com, got '{re.escape(text)}'"):
        parse_domain(text)
    assert parse_domain(" WWW.A.Example. ") == "www.a.example"


SAME_HOST = [
    "http://victim.example/a",
    "HTTPS://VICTIM.example.:8080/a",
    "http://user:p@victim.example/",
    "//victim.example/a",
    "victim.example/a",
    "victim.example:8080/a",
    "http:/victim.example/a",
    "http:\\\\victim.example\\a",
    "http://victim.example\\@evil.example/",
    "http://victim%2Eexample/a",
    "http://victim\u3002example/a",
    "http://\uff56ictim.example/a",
    "http://vic\ttim.example/a",
    "http://vic\u00adtim.example/a",
    "ftp://victim.example/x",
]


@pytest.mark.parametrize("address", SAME_HOST)
def test_the_host_that_a_browser_opens(address: str) -> None:
    assert resolved_host(address) == "victim.example"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://b\u00fccher.example/a", "xn--bcher-kva.example"),
        ("http://BU\u0308CHER.example", "xn--bcher-kva.example"),
        ("b%C3%BCcher.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("http://evil.example/?u=http://victim.example", "evil.example"),
        ("", ""),
        ("http://", ""),
    ],
)
def test_a_host_has_one_form(address: str, host: str) -> None:
    assert resolved_host(address) == host


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("a.org/x", "http://a.org/x"),
        (" user@a.org:8080?x\n", "http://user@a.org:8080?x"),
        ("bücher。example", "http://bücher。example"),
        ("//a.org/x", "http://a.org/x"),
        *((text, text) for text in ("http://a.org", "doc-17", "mailto:x@a.org", "/x.html", "a b.org", "")),
    ],
)
def test_an_address_gets_a_scheme_if_it_has_none(address: str, expected: str) -> None:
    assert with_scheme(address) == expected


def test_a_long_text_gets_no_scheme_in_little_time() -> None:
    started = time.perf_counter()
    for unit in (".", "a.", "a", "a:", "a:1"):
        with_scheme(unit * 200_000 + " ")
    assert time.perf_counter() - started < 2
