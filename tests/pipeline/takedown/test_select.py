"""The documents that a takedown finds: a host in every form in which browsers open it."""

import pyarrow as pa
import pytest

from pipeline.sources.provenance import domain_of
from pipeline.takedown.select import _Matchers
from schemas.errors import ConfigError
from tests.schemas.test_urls import SAME_HOST

OTHERS = [
    "http://victim.example.org/a",
    "http://1victim.example/",
    "http://evil.org/?u=http://victim.example",
    "doc-17",
]
UMLAUT = [
    "http://b\u00fccher.example/a",
    "http://xn--bcher-kva.example/a",
    "http://B\u00dcCHER.example/a",
    "http://bu\u0308cher.example/a",
    "http://b%C3%BCcher.example/",
    "http://www.b\u00fccher.example",
]


def found(kind: str, value: str, urls: list[str]) -> list[str]:
    """The URLs of the documents that match an item."""
    matchers = _Matchers([(kind, value)])
    ids = [number.to_bytes(16, "big") for number in range(1, len(urls) + 1)]
    domains = [domain_of(url) if "//" in url else None for url in urls]
    table = pa.table({"doc_id": pa.array(ids, pa.binary(16)), "url": urls, "domain": pa.array(domains, pa.string())})
    matchers.match(table)
    return [url for identifier, url in zip(ids, urls, strict=True) if identifier in matchers.documents[kind, value]]


def test_a_domain_is_found_in_every_form() -> None:
    assert found("domain", "victim.example", [*SAME_HOST, *OTHERS]) == SAME_HOST


@pytest.mark.parametrize("domain", ["b\u00fccher.example", "xn--bcher-kva.example"])
def test_a_domain_with_other_letters_is_found_in_every_form(domain: str) -> None:
    assert found("domain", domain, [*UMLAUT, *OTHERS]) == UMLAUT


def test_a_url_is_found_by_its_canonical_form_without_a_scheme_too() -> None:
    same = [
        "http://victim.example/a?x=1",
        "https://www.victim.example:443/a?x=1&utm_source=q",
        "//victim.example/a?x=1",
    ]
    assert found("url", same[0], [*same, "http://victim.example/b", *OTHERS]) == same


@pytest.mark.parametrize("host", ["www2.wiki.corp", "www.www3.wiki.corp", "wiki.corp"])
def test_a_url_is_found_under_every_www_of_a_host_without_a_public_suffix(host: str) -> None:
    same = [f"http://{name}wiki.corp/a" for name in ("", "www.", "www2.", "www%2e", "www33.")]
    assert found("url", f"http://{host}/a", [*same, "http://own.wiki.corp/a", *OTHERS]) == same


@pytest.mark.parametrize("url", ["", " ", "\t\n"])
def test_an_empty_url_is_not_that_of_documents_without_one(url: str) -> None:
    with pytest.raises(ConfigError, match="--url: expected a URL"):
        found("url", url, ["", "http://victim.example/a"])
