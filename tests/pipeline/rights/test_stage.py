"""The stage of rights: its columns on rows of every kind, and the protocols that drop documents by them."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from pipeline.engine.rules import columns_of, evaluate_checks
from pipeline.engine.stage import Row
from pipeline.rights.config import RightsConfig
from pipeline.rights.preferences import HEADER_FIELDS
from pipeline.rights.protocols import COLUMNS, NEEDS, REASONS, is_allowed, reserved
from pipeline.rights.stage import OF_HOST, OF_PAGE, RIGHTS, checks, make_rights
from pipeline.rights.table import write_robots
from tests.support.tiny_archive import record

TEXTS = pa.list_(pa.string())
KINDS = {
    **dict.fromkeys(("robots_meta", "content_usage", "robots_denied", "robots_usage"), TEXTS),
    **dict.fromkeys(("domain", "licence", "declared_licence", "header_licence", "language"), pa.string()),
    "tdm_reservation": pa.int8(),
}
PAGE = b'<head><meta name="robots" content="noai"><meta name="tdm-reservation" content="1"></head>'


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in KINDS.items()]
    return pa.RecordBatch.from_arrays(arrays, list(KINDS))


def test_a_page_gets_the_marks_of_its_header_and_its_head() -> None:
    rights = make_rights(RightsConfig(), {})
    row: Row = {
        "url": "http://a.org/",
        "_payload": PAGE,
        "mime": "text/html",
        HEADER_FIELDS: (("x-robots-tag", "none"),),
    }
    assert rights(row) is None
    assert [row[name] for name in OF_PAGE] == [["noai", "none"], 1, None, [], None]
    assert [row[name] for name in OF_HOST] == [None, None, None]


def test_meta_tags_of_the_agents_of_a_recipe_count() -> None:
    config = RightsConfig(agents=("cohere-ai",), respect=("robots_meta",))
    page = b'<head><meta name="Cohere-AI" content="noai"><meta name="author" content="no"></head>'
    row: Row = {"url": "http://a.org/", "_payload": page, "mime": "text/html"}
    make_rights(config, {})(row)
    assert row["robots_meta"] == ["cohere-ai:noai"]
    assert reserved("robots_meta", config, batch(row)).tolist() == [True]


def test_rows_that_are_no_pages_have_no_marks() -> None:
    rights = make_rights(RightsConfig(), {})
    row: Row = {"url": None, "_payload": None, "mime": None, HEADER_FIELDS: None}
    rights(row)
    assert [row[name] for name in RIGHTS.adds] == [None] * 8
    row = {"url": None, "_payload": PAGE, "mime": "text/plain", HEADER_FIELDS: (("tdm-reservation", "0"),)}
    rights(row)
    assert [row[name] for name in OF_PAGE] == [[], 0, None, [], None]


def test_hosts_are_looked_up_in_each_table(tmp_path: Path) -> None:
    files = {
        "crawl": b"User-agent: *\nAllow: /",
        "later": b"User-agent: GPTBot\nUser-agent: CCBot\nDisallow: /a\nUser-agent: *\nContent-Usage: train-ai=n",
    }
    for name, text in files.items():
        block = b"HTTP/1.1 200 OK\r\n\r\n" + text
        (tmp_path / f"{name}.warc.gz").write_bytes(
            gzip.compress(record(block, WARC_Target_URI="http://x.org/robots.txt"))
        )
        write_robots([f"{tmp_path}/{name}.warc.gz"], f"{tmp_path}/{name}.arrow")
    config = RightsConfig(robots={name: f"{tmp_path}/{name}.arrow" for name in files}, agents=("GPTBot", "CCBot", "x"))
    rights = make_rights(config, RIGHTS.models(config))
    row: Row = {"url": "https://x.org/a/b", "_payload": None}
    rights(row)
    assert [row[name] for name in OF_HOST] == [
        ["crawl", "later"],
        ["later/GPTBot", "later/CCBot"],
        ["later/train-ai=n"],
    ]
    row = {"url": "https://y.org/a/b"}
    rights(row)
    assert [row[name] for name in OF_HOST] == [[], [], []]


def decide(protocol: str, row: dict[str, Any], **settings: Any) -> bool:
    config = RightsConfig.model_validate({"robots": {"crawl": "a", "later": "b"}, **settings})
    return bool(reserved(protocol, config, batch({}, row, {}))[1])


@pytest.mark.parametrize(
    ("protocol", "row", "settings", "expected"),
    [
        ("robots_meta", {"robots_meta": ["noai"]}, {}, True),
        ("robots_meta", {"robots_meta": ["noimageai", "noindex"]}, {}, False),
        ("robots_meta", {"robots_meta": ["noindex"]}, {"directives": ["noindex"]}, True),
        ("robots_meta", {"robots_meta": ["none"]}, {"directives": ["noindex"]}, True),
        ("robots_meta", {"robots_meta": ["gptbot:none"]}, {"directives": ["nofollow"]}, True),
        ("robots_meta", {"robots_meta": ["nocache"]}, {"directives": ["noarchive"]}, True),
        ("robots_meta", {"robots_meta": ["noindex"]}, {"directives": ["none"]}, False),
        ("robots_meta", {"robots_meta": ["gptbot:noai"]}, {}, True),
        ("robots_meta", {"robots_meta": ["otherbot:noai"]}, {}, False),
        ("robots_meta", {"robots_meta": ["otherbot:noai"]}, {"agents": ["OtherBot"]}, True),
        ("robots_meta", {"robots_meta": ["noai"], "domain": "a.org"}, {"allow_domains": ["a.org"]}, False),
        ("robots_meta", {"robots_meta": ["noai"], "domain": "b.org"}, {"allow_domains": ["a.org"]}, True),
        ("tdm", {"tdm_reservation": 1}, {}, True),
        ("tdm", {"tdm_reservation": 0}, {}, False),
        ("tdm", {"robots_usage": ["later/tdm-reservation=1"]}, {}, True),
        ("tdm", {"tdm_reservation": 0, "robots_usage": ["later/tdm-reservation=1"]}, {}, False),
        ("tdm", {"robots_usage": ["later/tdm-reservation=1"]}, {"dates": ["crawl"]}, False),
        ("content_usage", {"content_usage": ["train-ai=n"]}, {}, True),
        ("content_usage", {"content_usage": ["train-ai=y", "search=n"]}, {}, False),
        ("content_usage", {"content_usage": ["bots=n"]}, {}, True),
        ("content_usage", {"content_usage": ["bots=n", "train-ai=y"]}, {}, False),
        ("content_usage", {"robots_usage": ["crawl/train-ai=n"]}, {}, True),
        ("content_usage", {"content_usage": ["ai-train=no"]}, {}, False),
        ("content_signal", {"content_usage": ["ai-train=no"]}, {}, True),
        ("content_signal", {"content_usage": ["ai-input=no"]}, {}, False),
        ("content_signal", {"robots_usage": ["later/ai-train=no"]}, {"dates": ["later"]}, True),
        ("robots_txt", {"robots_denied": ["later/GPTBot"]}, {}, True),
        ("robots_txt", {"robots_denied": ["later/GPTBot"]}, {"dates": ["crawl"]}, False),
        ("robots_txt", {"robots_denied": []}, {}, False),
        ("licence", {"declared_licence": "CC-BY-4.0"}, {"licences": ["CC-BY"]}, False),
        ("licence", {"declared_licence": "CC-BY-SA-4.0"}, {"licences": ["CC-BY"]}, True),
        ("licence", {"licence": "MIT", "declared_licence": "CC-BY-4.0"}, {"licences": ["CC-BY"]}, True),
        ("licence", {"header_licence": "cc0-1.0"}, {"licences": ["CC0-1.0"]}, False),
        ("licence", {}, {"licences": ["CC-BY"]}, False),
        ("licence", {}, {"licences": ["CC-BY"], "unlicensed": "drop"}, True),
    ],
)
def test_each_protocol_decides_by_stored_columns(
    protocol: str, row: dict[str, Any], settings: dict[str, Any], expected: bool
) -> None:
    assert decide(protocol, row, **settings) is expected


def test_sliced_batches_are_decided_alike() -> None:
    rows = batch({"robots_meta": ["noai"]}, {"robots_meta": []}, {"robots_meta": ["noai", "none"]}, {})
    assert reserved("robots_meta", RightsConfig(), rows.slice(1)).tolist() == [False, True, False]
    assert reserved("robots_meta", RightsConfig(), pa.Table.from_batches([rows])).tolist() == [True, False, True, False]


def test_only_respected_protocols_drop() -> None:
    assert checks(RightsConfig(), {}, {}) == ()
    found = checks(RightsConfig(respect=("tdm", "robots_meta")), {}, {})
    assert [check.reason for check in found] == ["robots_meta", "tdm"]
    rows = batch({"tdm_reservation": 1}, {"robots_meta": ["noai"], "tdm_reservation": 1}, {})
    assert evaluate_checks(found, rows.select(columns_of(found))).first.tolist() == [1, 0, -1]
    assert REASONS.keys() == NEEDS.keys() == RIGHTS.verdicts.keys()
    assert {*COLUMNS} <= {*KINDS}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"respect": ["robots_txt"]}, "respect: expected rights.robots with the protocol robots_txt"),
        ({"respect": ["licence"]}, "respect: expected rights.licences with the protocol licence"),
        ({"dates": ["later"]}, "dates: expected names in rights.robots, got later"),
        ({"unlicensed": "drop"}, "unlicensed: expected rights.licences with it"),
        ({"directives": ["noway"]}, "expected directives of the list"),
        ({"robots": {"a/b": "x"}}, "expected names of letters"),
        ({"agents": ["GPTBot/1.1"]}, "expected names of agents as in robots.txt, such as CCBot, got 'GPTBot/1.1'"),
        ({"agents": ["CCBot, GPTBot"]}, "expected names of agents"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        RightsConfig.model_validate(settings)


def test_a_version_is_allowed_by_its_licence() -> None:
    allowed = ("CC-BY", "CC0-1.0")
    assert [is_allowed(name, allowed) for name in ("cc-by", "CC-BY-3.0-DE", "CC-BY-NC-4.0", "CC0-1.0", "CC0", "")] == [
        *(True, True, False, True, False, False)
    ]


@pytest.mark.parametrize(
    ("licence", "allowed", "expected"),
    [
        ("CC-BY-4.0 AND CC-BY-NC-ND-4.0", ("CC-BY",), False),
        ("Apache-2.0 AND SSPL-1.0", ("Apache",), False),
        ("CC-BY-SA-3.0 AND CC-BY-SA-4.0", ("CC-BY-SA-3.0", "CC-BY-SA-4.0"), True),
        ("CC-BY-SA-2.5 AND CC-BY-SA-4.0", ("CC-BY-SA",), True),
        ("MIT OR GPL-3.0-only", ("MIT",), True),
        ("mit or (Apache-2.0 WITH LLVM-exception)", ("Apache",), True),
        ("CC-BY-4.0, except the photos", ("CC-BY",), False),
        ("CC-BY-4.0 for the text", ("CC-BY",), False),
        ("Public domain", ("public domain",), True),
        ("http://creativecommons.org/licenses/by/4.0/", ("CC-BY-4.0",), True),
        ("http://creativecommons.org/licenses/by/4.0/", ("CC-BY",), True),
        ("http://creativecommons.org/licenses/by-nc-sa/4.0/", ("CC-BY",), False),
        ("http://creativecommons.org/publicdomain/zero/1.0/", ("CC0-1.0",), True),
        ("http://arxiv.org/licenses/nonexclusive-distrib/1.0/", ("CC-BY",), False),
        ("CC-BY-4.0", ("https://creativecommons.org/licenses/by/4.0/",), True),
        ("https://example.org/l", ("https://example.org/l",), True),
        ("", ("CC-BY",), False),
    ],
)
def test_all_licences_of_an_expression_count(licence: str, allowed: tuple[str, ...], expected: bool) -> None:
    assert is_allowed(licence, allowed) is expected


@pytest.mark.parametrize("domain", ["https://www.example.com/a", "www.example.com", "Example.com"])
def test_what_is_no_registrable_domain_is_refused(domain: str) -> None:
    with pytest.raises(ValueError, match=r"allow_domains.*\n.*expected registrable domains such as example\.com, got"):
        RightsConfig(allow_domains=("example.org", domain))
