"""Documents that takedowns removed are recognized in a table of another run, by id and in every form of an address."""

from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.sources.provenance import domain_of
from pipeline.takedown.select import check_none_removed
from schemas.errors import ContractError
from schemas.manifest import TableVersion, make_manifest
from schemas.removed import RemovedDocuments, request_forms
from schemas.storage import Store
from schemas.takedown import Certificate, salted_digest
from tests.schemas.test_urls import SAME_HOST
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import certificates, documents_of, opened, take_down

PAGE = "http://www.site3.co.uk/web/3?q=1"
"""A page of the tiny dataset."""
SAME_PAGE = [PAGE, "https://site3.co.uk:443/web/3?q=1", "HTTP://WWW.SITE3.co.uk/web/./3?q=1&utm_source=x#top"]
OTHER_PAGES = [
    "http://www.site3.co.uk/web/10?q=1",
    "http://shop.site3.co.uk/",
    "//SITE3.co.uk.:8080/a",
    "site3.co.uk/x",
]
OTHER_HOSTS = ["http://www.site4.co.uk/web/3?q=1", "http://mysite3.co.uk/", "http://site3.co.uk.evil.example/", "", "3"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_tiny_dataset(tmp_path / "run", {"web": 30})
    return tmp_path / "run"


def table_of(folder: Path, urls: list[str], ids: list[bytes] | None = None) -> TableVersion:
    """Write a table `documents` of pages of the next crawl, which have other ids."""
    ids = [number.to_bytes(16, "big") for number in range(1, len(urls) + 1)] if ids is None else ids
    store, path = Store(str(folder / "documents/v-000000000ae8")), "part-00000.parquet"
    store.make_parent(path)
    pq.write_table(pa.table({"doc_id": ids, "url": urls, "domain": pa.nulls(len(urls), pa.string())}), store.path(path))
    file = {"key": "part-00000", "rows": len(urls), "bytes": store.size(path), "sha256": store.sha256(path)}
    counts = {"rows_in": len(urls), "rows_kept": len(urls)}
    content = {"table": "documents", "stages": {}, "config": {}, "inputs": [], "files": [file], "counts": counts}
    how = {"paths": {"part-00000": path}, "started": "", "wall_seconds": 0, "cpu_seconds": 0, "code_version": ""}
    return TableVersion(store, make_manifest(content, how, "documents"))


def write(run: Path, certificate: dict[str, Any]) -> str:
    """Write a certificate with a new seal, and return its name."""
    sealed = Certificate.model_validate(certificate).sealed()
    name = f"takedowns/{sealed.id}.json"
    (run / name).write_bytes(sealed.to_bytes())
    return name


@pytest.mark.parametrize("url", [*SAME_PAGE, *OTHER_PAGES])
def test_a_page_of_a_removed_domain_is_recognized_in_another_file(run: Path, tmp_path: Path, url: str) -> None:
    assert take_down(run, domain=["Site3.co.uk"]) == 0
    check_none_removed(Store(str(run)), table_of(tmp_path / "free", OTHER_HOSTS))
    other = table_of(tmp_path / "other", [*OTHER_HOSTS, url])
    expected = f"{other.folder.uri}: expected a table without the documents that takedown {certificates(run)[0].id} "
    with pytest.raises(ContractError) as caught:
        check_none_removed(Store(str(run)), other)
    assert str(caught.value).startswith(f"{expected}removed from {run}, got doc_id {len(OTHER_HOSTS) + 1:032x}. ")


@pytest.mark.parametrize("asked", SAME_PAGE)
@pytest.mark.parametrize("url", SAME_PAGE)
def test_a_removed_url_is_recognized_in_every_form(run: Path, tmp_path: Path, asked: str, url: str) -> None:
    assert take_down(run, url=[asked]) == 0
    check_none_removed(Store(str(run)), table_of(tmp_path / "free", [*OTHER_HOSTS, *OTHER_PAGES]))
    with pytest.raises(ContractError, match="expected a table without the documents"):
        check_none_removed(Store(str(run)), table_of(tmp_path / "other", [url]))


def test_a_removed_id_is_recognized_and_other_ids_of_its_page_are_not(run: Path, tmp_path: Path) -> None:
    document = documents_of(opened(run))[4]
    assert take_down(run, doc=[document["doc_id"].hex()]) == 0
    check_none_removed(Store(str(run)), table_of(tmp_path / "free", [document["url"]]))
    with pytest.raises(ContractError, match=f"got doc_id {document['doc_id'].hex()}"):
        check_none_removed(Store(str(run)), table_of(tmp_path / "other", [""], [document["doc_id"]]))


def test_a_host_is_recognized_in_every_form(run: Path) -> None:
    """The forms are those by which a takedown finds the documents of a domain in its own run."""
    assert take_down(run, domain=["site3.co.uk"]) == 0
    (certificate,) = certificates(run)
    forms = request_forms(certificate.salt, [("domain", "Victim.Example")])
    write(run, certificate.model_dump(mode="json") | {"forms": forms})
    removed = RemovedDocuments(Store(str(run)))
    assert [removed.find(bytes(16), form, None) for form in SAME_HOST] == [removed.certificates[0]] * len(SAME_HOST)
    assert removed.find(bytes(16), "", "victim.example") == removed.certificates[0]
    assert [form for form in OTHER_HOSTS if removed.find(bytes(16), form, None)] == []


@pytest.mark.parametrize("how", ["near", "with_copies"])
def test_near_duplicates_have_other_ids_so_no_other_table_is_accepted(run: Path, tmp_path: Path, how: str) -> None:
    document = documents_of(opened(run))[4]["doc_id"].hex()
    request = {"near": [document]} if how == "near" else {"doc": [document], "with_copies": True}
    assert take_down(run, **request) == 0
    with pytest.raises(ContractError, match="documents: expected unchanged settings after the takedowns in"):
        check_none_removed(Store(str(run)), table_of(tmp_path / "other", ["http://example.com/"]))


@pytest.mark.parametrize("how", ["doc", "url", "domain"])
def test_a_takedown_by_id_is_recognized_by_the_id_alone(run: Path, how: str) -> None:
    row = documents_of(opened(run))[4]
    value = {"doc": row["doc_id"].hex(), "url": row["url"], "domain": domain_of(row["url"])}[how]
    assert take_down(run, **{how: [value]}) == 0
    removed = RemovedDocuments(Store(str(run)))
    assert removed.has_ids == (how == "doc")
    assert removed.find(row["doc_id"], "", None) is not None
    assert (removed.find(bytes(16), row["url"], None) is not None) == (how != "doc")


def test_a_certificate_of_an_earlier_version(run: Path, tmp_path: Path) -> None:
    """It has the requests as they were typed: what they match is recognized, and no table is accepted as free of it."""
    assert take_down(run, domain=["site3.co.uk"]) == 0
    fields = certificates(run)[0].model_dump(mode="json")
    name = write(run, {field: value for field, value in fields.items() if field not in ("forms", "near")})
    removed = RemovedDocuments(Store(str(run)))
    assert removed.find(bytes(16), "https://shop.site3.co.uk/a", None) == removed.certificates[0]
    assert removed.find(bytes(16), "https://site4.co.uk/a", None) is None
    with pytest.raises(ContractError, match="documents: expected unchanged settings after the takedowns in"):
        check_none_removed(Store(str(run)), table_of(tmp_path / "other", ["http://example.com/"]))
    assert take_down(run, check=name) == 0


def test_a_document_is_hashed_as_often_for_a_thousand_certificates_as_for_one(run: Path) -> None:
    """All takedowns of a run have one salt, so the work of a look-up does not grow with their number."""
    for number in (3, 4):
        assert take_down(run, domain=[f"site{number}.co.uk"]) == 0
    first, second = certificates(run)
    assert first.salt == second.salt
    digests = [request_forms(first.salt, [("domain", f"site{number}.example")]) for number in range(1000)]
    many = [first.model_copy(update={"forms": forms}) for forms in digests]
    hashed: list[int] = []
    for own in ([many[-1]], many):
        with mock.patch("schemas.removed.salted_digest", side_effect=salted_digest) as counted:
            removed = RemovedDocuments.of(own)
            assert removed.find(bytes(16), "http://a.site999.example/1", None) == many[-1]
            assert removed.find(bytes(16), "http://other.example/1", None, ["http://other.example/2"]) is None
            hashed.append(counted.call_count)
    assert hashed[0] == hashed[1]
