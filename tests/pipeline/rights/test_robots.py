"""Rules of robots.txt by RFC 9309, preferences in it, and the entries of tdmrep.json."""

import codecs
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rights.robots import (
    MAX_BYTES,
    MAX_LOCATIONS,
    matches,
    normalized,
    parse_robots,
    path_of,
    reduce_robots,
    reduce_tdmrep,
)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("/fish", "/fish.html", True),
        ("/fish", "/Fish", False),
        ("/fish", "/catfish", False),
        ("/fish/", "/fish", False),
        ("/*.php", "/a/b.php?x", True),
        ("/*.php$", "/a/b.php", True),
        ("/*.php$", "/a/b.php?x", False),
        ("/fish*.php", "/fishheads/a.php", True),
        ("/fish*.php", "/Fish.php", False),
        ("/$", "/", True),
        ("/$", "/a", False),
        ("*", "/", True),
        ("/a**b", "/ab", True),
        ("/a*a$", "/a", False),
        ("/a*a$", "/aa", True),
        ("/a*bc*c$", "/abc", False),
        ("/a$b", "/a$b", True),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@pytest.mark.parametrize(
    ("rules", "path", "denied"),
    [
        ("Allow: /p\nDisallow: /", "/page", False),
        ("Allow: /folder\nDisallow: /folder", "/folder/page", False),
        ("Allow: /page\nDisallow: /*.htm", "/page.htm", True),
        ("Allow: /$\nDisallow: /", "/", False),
        ("Allow: /$\nDisallow: /", "/page", True),
        ("Disallow:", "/page", False),
        ("Disallow: page", "/page", True),
        ("Disallow: /%7Ea", "/~a", True),
        ("Disallow: /ü", "/%c3%bc", True),
        ("disallow : / # all", "/page", True),
        ("Noindex: /", "/page", False),
    ],
)
def test_the_longest_rule_decides(rules: str, path: str, denied: bool) -> None:
    robots = parse_robots(f"User-agent: *\n{rules}".encode())
    assert robots.denies("GPTBot", normalized(path)) is denied


ROBOTS = b"""\xef\xbb\xbf# comment
Disallow: /before
User-agent: GPTBot
User-Agent: CCBot/2.0 (x)

Disallow: /
User-agent: *\r
Sitemap: https://a.org/s.xml
Allow: /
Content-Signal: search=yes,ai-train=no
Content-Usage: train-ai=n
Content-Usage: /ok/ train-ai=y
user-agent: gptbot
Allow: /open
User-agent: empty
"""


def test_groups() -> None:
    robots = parse_robots(ROBOTS)
    assert [robots.denies(agent, "/a") for agent in ("GPTBot", "ccbot", "other", "empty")] == [True, True, False, False]
    assert [robots.denies(agent, "/open") for agent in ("GPTBot", "ccbot")] == [False, True]
    assert not robots.denies("other", "/before")
    assert robots.usage("other", "/a") == {"search": "yes", "ai-train": "no", "train-ai": "n"}
    assert robots.usage("other", "/ok/a") == {"train-ai": "y"}
    assert robots.usage("gptbot", "/a") == {}
    assert robots.usage("empty", "/a") == {}


def test_of_equal_paths_the_preference_that_denies_counts() -> None:
    rules = b"User-agent: *\nContent-Usage: /a train-ai=n\nContent-Usage: /a train-ai=y, search=y"
    assert parse_robots(rules).usage("x", "/a") == {"train-ai": "n", "search": "y"}


LINES = st.sampled_from(
    [
        *("User-agent: *", "User-agent: a", "user-agent:b", "Allow: /a", "Disallow: /", "Disallow:", "Disallow: /a*b$"),
        *("Content-Usage: train-ai=n", "Content-Usage: /a train-ai=y", "Content-Signal: ai-train=no", "Sitemap: x", ""),
        *("Disallow: /ü %", "nonsense", "User-agent: ", "Allow: /#x", "tdm-reservation: 1 /a"),
    ]
)


@given(st.lists(LINES, max_size=14), st.sampled_from(["\n", "\r", "\r\n"]))
def test_the_reduced_form_has_the_same_meaning(lines: list[str], end: str) -> None:
    data = end.join(line for line in lines if not line.startswith("tdm")).encode()
    robots, again = parse_robots(data), parse_robots(reduce_robots(data))
    for agent in ("a", "b", "c"):
        for path in ("/", "/a", "/ab", "/a1b", "/%C3%BC%20%"):
            assert robots.denies(agent, path) == again.denies(agent, path)
            assert robots.usage(agent, path) == again.usage(agent, path)


def test_only_whole_lines_of_the_first_bytes_are_read() -> None:
    start = b"User-agent: *\nDisallow: /first\n"
    fill = b"#" * (MAX_BYTES - len(start) - len(b"Disallow: /aa")) + b"\n"
    data = start + fill[1:] + b"Disallow: /aaa\n"
    assert len(data) > MAX_BYTES
    reduced = parse_robots(reduce_robots(data))
    assert reduced.denies("x", "/first")
    assert not reduced.denies("x", "/aaa")
    late = b"#" * MAX_BYTES + b"\nUser-agent: *\nDisallow: /late"
    assert parse_robots(reduce_robots(late)).groups == {}


def test_a_robots_txt_cannot_state_a_reservation_of_tdmrep() -> None:
    assert parse_robots(reduce_robots(b"User-agent: *\ntdm-reservation: 1 /\nDisallow: /a")).tdm == []


def test_tdmrep() -> None:
    entries = [
        {"location": "/", "tdm-reservation": 1, "tdm-policy": "https://a.org/p"},
        {"location": "/open/*", "tdm-reservation": 0},
        {"location": "/\n1 /x", "tdm-reservation": 1},
        {"location": "/b", "tdm-reservation": True},
        {"location": "/c", "tdm-reservation": 2},
        "x",
    ]
    robots = parse_robots(reduce_tdmrep(json.dumps(entries).encode()))
    assert [robots.reservation(path) for path in ("/", "/open/a", "/b", "/c")] == [1, 0, 1, 1]
    assert len(robots.tdm) == 2
    for wrong in (b"", b"{}", b"[", b"[" * 100_000, b"\xff", b'{"location": "/"}'):
        assert reduce_tdmrep(wrong) == b""
    many = [{"location": f"/{number}", "tdm-reservation": 1} for number in range(MAX_LOCATIONS + 1)]
    assert len(parse_robots(reduce_tdmrep(json.dumps(many[:-1]).encode())).tdm) == MAX_LOCATIONS
    free = [{"location": f"/{number}", "tdm-reservation": 0} for number in range(MAX_LOCATIONS)]
    for last, expected in ((0, None), (1, 1)):
        robots = parse_robots(reduce_tdmrep(json.dumps([*free, {"location": "/x", "tdm-reservation": last}]).encode()))
        assert (robots.reservation("/x/y"), robots.reservation("/7")) == (expected, 0)
    long = json.dumps([{"note": "x" * MAX_BYTES, "location": "/", "tdm-reservation": 1}]).encode()
    assert parse_robots(reduce_tdmrep(long)).reservation("/a") == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://a.org", "/"),
        ("https://a.org?x=1", "/?x=1"),
        ("https://a.org/b?c=/d#e", "/b?c=/d"),
        ("https://a.org/%7eb/%c3%BC ü", "/~b/%C3%BC%20%C3%BC"),
        ("https://a.org#/b", "/"),
    ],
)
def test_the_path_of_an_address(url: str, expected: str) -> None:
    assert path_of(url) == expected


HOSTILE = {
    "agents": b"User-agent: a\n" * 30_000 + b"Disallow: /b\n" * 7_000,
    "names": b"".join(b"User-agent: a%d\n" % number for number in range(15_000)) + b"Disallow: /\n" * 15_000,
    "rules": b"User-agent: *\n" + b"Disallow: /*a*b*c\n" * 28_000,
    "equal": b"User-agent: *\n" + b"Disallow: /\n" * 40_000,
    "stars": b"User-agent: *\nDisallow: /" + b"*a" * 250_000,
    "usage": b"User-agent: *\n" + b"Content-Usage: / train-ai=n\n" * 18_000,
    "line": b"x" * 1_000_000,
    "ends": b"\r\n" * 500_000,
    "colons": b":" * 1_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_takes_little_time(name: str) -> None:
    started = time.thread_time()
    robots = parse_robots(reduce_robots(HOSTILE[name]))
    path = "/" + "a" * 4_095
    robots.denies("a", path)
    robots.usage("a", path)
    assert time.thread_time() - started < 5.0


SHUT = "User-agent: GPTBot\nDisallow: /\n"


@pytest.mark.parametrize(
    "file",
    [
        SHUT.encode(),
        codecs.BOM_UTF8 + SHUT.encode(),
        b"\n" + codecs.BOM_UTF8 + SHUT.encode(),  # two files, one after the other
        codecs.BOM_UTF16_LE + SHUT.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + SHUT.encode("utf-16-be"),
        SHUT.replace("\n", "\r").encode(),
        SHUT.replace("\n", "\r\n").encode(),
        SHUT.upper().encode(),
        SHUT.replace(": ", ":\u00a0").encode(),
        *(SHUT.replace("Disallow", name).encode() for name in ("Dissallow", "disalow", "Diasllow", "DISALLAW")),
        SHUT.replace("GPTBot", "GPTBot/1.1 (+https://openai.com/gptbot)").encode(),
        SHUT.replace("Dis", "Sitemap: https://a.example/s.xml\nDis").encode(),
    ],
)
def test_every_writing_of_a_rule_denies(file: bytes) -> None:
    assert parse_robots(reduce_robots(file)).denies("GPTBot", "/page")


@pytest.mark.parametrize(
    ("rule", "url"),
    [
        ("/path/file-with-a-%2A.html", "/path/file-with-a-*.html"),  # the first two are those of RFC 9309, 2.2.3
        ("/path/foo-%24", "/path/foo-$"),
        ("/foo/bar?baz=https://foo.bar", "/foo/bar?baz=https%3A%2F%2Ffoo.bar"),  # 2.2.2
        ("/foo/bar?baz=https%3A%2F%2Ffoo.bar", "/foo/bar?baz=https://foo.bar"),
        ("/a$b", "/a%24b"),
        ("/a$b", "/a$b"),
        ("/*?u=http:", "/x?u=http%3a//y"),
    ],
)
def test_encoded_and_plain_characters_of_a_path_are_the_same(rule: str, url: str) -> None:
    robots = parse_robots(reduce_robots(f"User-agent: *\nDisallow: {rule}".encode()))
    assert robots.denies("GPTBot", path_of(f"https://a.example{url}"))


@pytest.mark.parametrize(("rule", "url"), [("/a%2Fb", "/a/b"), ("/a%24", "/a"), ("/a%2A", "/ab"), ("/a$b", "/ab")])
def test_encoded_separators_and_signs_have_no_meaning(rule: str, url: str) -> None:
    robots = parse_robots(reduce_robots(f"User-agent: *\nDisallow: {rule}".encode()))
    assert not robots.denies("GPTBot", path_of(f"https://a.example{url}"))
