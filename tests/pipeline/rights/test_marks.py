"""The marks of a page, in every spelling that pages use, and their cost on hostile pages."""

import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.rights import marks
from pipeline.rights.marks import MAX_TAG_BYTES, head_tags, head_tags_in_python, read_marks
from pipeline.rights.preferences import (
    MAX_AGENTS,
    MAX_FIELDS,
    MAX_LABELS,
    limit_directives,
    read_directives,
    read_policy,
    read_reservation,
    read_robots_tag,
    read_usage,
    rights_fields,
    usage_entries,
)
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import find_splits, open_stream
from tests.support.native import needs_native


def metas(*tags: str) -> bytes:
    return f"<html><head>{''.join(tags)}</head><body>".encode()


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ('<meta name="robots" content="noai, noimageai">', ["noai", "noimageai"]),
        ("<META NAME=ROBOTS CONTENT=NOAI>", ["noai"]),
        ("<meta content='NoAI;NOINDEX' name='Robots'/>", ["noai", "noindex"]),
        ('<meta\nname="robots"\tcontent = "noai noimageai">', ["noai", "noimageai"]),
        ('<meta name="robots" content="no-ai,no_image_ai">', ["noai", "noimageai"]),
        ('<meta name="robots" content="a > b, noai">', ["noai"]),
        ('<meta name="robots" content="&#110;oai">', []),
        ('<meta name="robots" content="noai&#44;noindex">', ["noai", "noindex"]),
        ('<meta name="GPTBot" content="noai">', ["gptbot:noai"]),
        ('<meta name="googlebot-news" content="noindex">', ["googlebot-news:noindex"]),
        ('<meta name="google-extended" content="noai">', ["google-extended:noai"]),
        ('<meta http-equiv="X-Robots-Tag" content="noai">', ["noai"]),
        (
            '<meta name="robots" content="none, unavailable_after: 25 Nov 2010 15:00:00 PST">',
            ["none", "unavailable_after"],
        ),
        ('<meta name="robots" content="index, follow, max-image-preview:large">', []),
        ('<meta name="description" content="how robots read noai and noindex">', []),
        ('<meta property="robots" content="noai">', []),
        ('<!-- <meta name="robots" content="noai"> -->', []),
        ('<script>"<meta name=robots content=noai>"</script>', []),
        ('<STYLE><meta name="robots" content="noai"></STYLE>', []),
        ('<title><meta name="robots" content="noai"></title>', []),
        ('<metadata name="robots" content="noai">', []),
        ('<meta name="robots">', []),
        ("""<meta name="a" content="it's > so"><meta name="robots" content="noai">""", ["noai"]),
        ("""<meta content="no > robots' rule" name="robots"><meta name=robots content=none>""", ["none"]),
        ("<meta name=a content=it's><meta name=robots content=noai>", ["noai"]),
    ],
)
def test_robots_directives_of_a_meta_tag(tag: str, expected: list[str]) -> None:
    assert read_marks((), metas(tag)).robots_meta == expected


@pytest.mark.parametrize("order", ["le", "be"])
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("mark", ["\ufeff", ""])
def test_a_page_of_wide_characters(order: str, bits: int, mark: str) -> None:
    page = mark + '<!DOCTYPE html><html><head><META NAME="robots" content="noai, noimageai"></head>'
    assert read_marks((), page.encode(f"utf-{bits}-{order}")).robots_meta == ["noai", "noimageai"]


@pytest.mark.parametrize("start", [b"", b"\0", b"\xff\xfe", b"\0" * 8, b"\xef\xbb\xbf", b"a\0b\0"])
def test_zeros_and_odd_bytes_at_the_beginning_of_a_page(start: bytes) -> None:
    page = start + metas(
        '<meta name="robots" content="noai">', '<meta name="a" content="a long description of it all">'
    )
    expected = [] if start == b"\xff\xfe" else ["noai"]  # read as UTF-16, as a browser does
    assert read_marks((), page).robots_meta == expected
    for size in range(len(page)):
        read_marks((), page[:size])


def test_several_tags_and_fields_combine() -> None:
    fields = rights_fields(
        b"HTTP/1.1 200 OK\r\nx-robots-tag: GPTBot: noai, nofollow\r\nX-ROBOTS-TAG:noindex\r\nServer: x\r\n"
        b"Content-Usage: train-ai=n, search=y\r\nContent-Signal: ai-train=no"
    )
    marks = read_marks(fields, metas('<meta name="robots" content="noai">', '<meta name="robots" content="none">'))
    assert marks.robots_meta == ["noai", "noindex", "none", "gptbot:noai", "gptbot:nofollow"]
    assert marks.content_usage == ["ai-train=no", "search=y", "train-ai=n"]


def test_tags_after_the_head_are_not_read() -> None:
    tag = b'<meta name="robots" content="noai">'
    assert read_marks((), b"<head></head>" + tag).robots_meta == []
    assert read_marks((), b"<BODY class=a>" + tag).robots_meta == []
    assert read_marks((), b"<bodyguard>" + tag).robots_meta == ["noai"]
    assert read_marks((), tag).robots_meta == ["noai"]


@pytest.mark.parametrize(
    ("header", "tags", "expected"),
    [
        ("1", (), 1),
        (" 0 ", (), 0),
        ("2", (), None),
        ("true", (), None),
        ("0, 1", (), 1),
        ("0, 0", (), 0),
        ("", ("1",), 1),
        ("1", ("0",), 0),
        ("0", ("x",), 0),
        ("0", ("0", "1"), 1),
    ],
)
def test_a_meta_tag_precedes_the_header_of_a_reservation(header: str, tags: tuple[str, ...], expected: int) -> None:
    page = metas(*(f'<meta name="tdm-reservation" content="{value}">' for value in tags))
    fields = rights_fields(f"HTTP/1.1 200 OK\r\nTDM-Reservation: {header}".encode())
    assert read_marks(fields, page).tdm_reservation == expected


def test_a_policy_is_a_web_address() -> None:
    page = metas('<meta name="TDM-Policy" content="https://a.org/policy.json">')
    assert read_marks((), page).tdm_policy == "https://a.org/policy.json"
    assert read_policy("https://" + "a" * 1_992) is not None
    for wrong in ("javascript:x", "https://a b", "https://a\x1b[2J", "https://" + "a" * 1_993, ""):
        assert read_policy(wrong) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('<https://creativecommons.org/licenses/by/4.0/>; rel="license"', "CC-BY-4.0"),
        ("</a>; rel=next, <https://a.org/terms>; rel=license", "https://a.org/terms"),
        ("<https://a.org/terms>; rel=licensed", None),
        ("<javascript:x>; rel=license", None),
    ],
)
def test_the_licence_of_the_header(value: str, expected: str | None) -> None:
    assert read_marks((("link", value),), b"").header_licence == expected


def test_robots_tags_name_agents() -> None:
    assert read_robots_tag("noai") == {"noai"}
    assert read_robots_tag("otherbot: noindex, nofollow, gptbot: noai") == {
        *("otherbot:noindex", "otherbot:nofollow", "gptbot:noai")
    }
    assert read_robots_tag("max-snippet: 0, noai") == {"noai"}
    assert read_robots_tag("unavailable_after: 25 Nov 2010 15:00:00 GMT") == {"unavailable_after"}


def test_preferences_are_read_leniently() -> None:
    assert read_usage('Train-AI=N , search=y;a="b", bots, x=maybe, =n') == {"train-ai": "n", "search": "y"}
    assert read_usage("train-ai=n, train-ai=y") == {"train-ai": "y"}
    assert read_usage("search=yes,ai-train=no") == {"search": "yes", "ai-train": "no"}


def test_stored_lists_are_bounded_and_keep_reservations() -> None:
    many = {f"bot{number}:noai" for number in range(100)} | {"noai"}
    assert len(limit_directives(many)) == MAX_AGENTS + 1
    assert "zzz:noai" in limit_directives({*many, "zzz:noai"}, frozenset(["zzz"]))
    assert limit_directives(many)[0] == "noai"
    labels = {f"a{number:03}": "n" for number in range(100)} | {"train-ai": "n"}
    assert len(usage_entries(labels)) == MAX_LABELS
    assert "train-ai=n" in usage_entries(labels)
    assert len(rights_fields(b"\nX-Robots-Tag: noai" * 1_000)) == MAX_FIELDS
    many_links = b"HTTP/1.1 200 OK" + b"\r\nLink: </a.css>; rel=preload" * 1_000 + b"\r\nX-Robots-Tag: noai"
    assert rights_fields(many_links)[MAX_FIELDS:] == (("x-robots-tag", "noai"),)
    folded = b"HTTP/1.1 200 OK\r\nX-Robots-Tag: noindex,\r\n\tnoai\r\nTDM-Reservation:\r\n 1\r\nServer: x"
    assert rights_fields(folded) == (("x-robots-tag", "noindex, noai"), ("tdm-reservation", "1"))


def test_only_the_beginning_of_a_value_is_read() -> None:
    within = '<meta name="robots" content="' + "x," * 1_000 + 'noai">'
    assert read_marks((), metas(within)).robots_meta == ["noai"]
    beyond = '<meta name="robots" content="' + "x," * MAX_TAG_BYTES + 'noai">'
    assert read_marks((), metas(beyond)).robots_meta == []
    assert read_directives("x" * 4_097 + " noai") == set()
    assert read_reservation("1" + " " * 5_000) == 1


HOSTILE = {
    "tags": b'<meta name="robots" content="noai">' * 30_000,
    "content": b'<meta name="robots" content="' + b"noai," * 200_000 + b'">',
    "names": b"<meta " + b"bot no " * 150_000 + b">",
    "quotes": b"<meta bot no='" * 75_000,
    "open": b"<meta bot no" * 90_000,
    "brackets": b"<" * 1_000_000,
    "comments": b"<!--" * 250_000,
    "closed comments": b"<!---->" * 150_000,
    "scripts": b"<script>" * 130_000,
    "spaces": b"<meta name" + b" " * 1_000_000 + b"=robots no>",
    "equals": b"<meta bot no" + b"=" * 1_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_page_takes_time_linear_in_its_size(name: str) -> None:
    page = HOSTILE[name]
    started = time.thread_time()
    read_marks((), page[: len(page) // 8])
    part = time.thread_time() - started
    started = time.thread_time()
    read_marks((), page)
    assert time.thread_time() - started < max(1.0, 40 * part)


@pytest.mark.parametrize("value", ["noai," * 200_000, "a:" * 500_000, "<" * 1_000_000, "=n" * 500_000, " " * 1_000_000])
def test_a_hostile_header_takes_little_time(value: str) -> None:
    head = "".join(f"\n{name}: {value}" for name in ("x-robots-tag", "link", "content-usage", "tdm-policy")).encode()
    started = time.thread_time()
    read_marks(rights_fields(head), b"")
    read_marks((("x-robots-tag", value), ("link", value[:4096]), ("content-usage", value)), b"")
    assert time.thread_time() - started < 1.0


TAG_PIECES = (
    *("<meta ", "<META\n", "<meta/", "<metadata", "<!--", "<!-->", "-->", "</head>", "</headers>", "<body", "<bodyx"),
    *("<script>", "</script>", "<SCRIPTS>", "</scrip", "<style x>", "</style", "<title>", "</TITLE>", "<", ">", "</"),
    *('name="robots"', "content='noai'", "content=noindex", "tdm-reservation", "ClaudeBot", "no", '"', "'", "/", " "),
    *("\0", "\u00e9", "_", "1"),
)


@needs_native
@given(st.lists(st.sampled_from(TAG_PIECES), max_size=40).map("".join))
def test_the_native_tags_are_those_of_python(source: str) -> None:
    page = source.encode()
    assert head_tags(page) == head_tags_in_python(page)


@needs_native
@pytest.mark.parametrize("limit", ["MAX_HEAD_BYTES", "MAX_TAG_BYTES", "MAX_TAGS"])
@given(st.lists(st.sampled_from(TAG_PIECES), max_size=40).map("".join), st.integers(0, 120))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_native_tags_at_limits(monkeypatch: pytest.MonkeyPatch, limit: str, source: str, value: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(marks, limit, value)
        assert head_tags(source.encode()) == head_tags_in_python(source.encode())


def test_equal_tags_of_real_pages(shared_data: Path) -> None:
    config = SourceConfig(paths=(str(shared_data / "warc/pages-002.warc.gz"),))
    found = 0
    for split in find_splits(config):
        with closing(open_stream(split)) as stream:
            for row, drop in islice(SOURCE.open(split, stream, config), 300):
                if drop is None:
                    tags = head_tags(row["_payload"])
                    assert tags == head_tags_in_python(row["_payload"])
                    found += len(tags)
    assert found > 30
