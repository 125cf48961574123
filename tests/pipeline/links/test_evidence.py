"""Evidence of links: what counts, for URLs in all their forms and for domains, and tables that cannot be read."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.links import evidence
from pipeline.links.config import LinksConfig
from pipeline.links.evidence import NEEDED, Evidence, EvidenceIndex, build_evidence
from pipeline.links.stage import LINKS, make_links, model_files
from pipeline.links.table import LINKS as SCHEMA
from pipeline.sources.provenance import domain_of
from schemas.errors import ConfigError, ContractError
from schemas.urls import url_key


def link(url: str, page: str | None, score: int | None = None, rel: str | None = None) -> dict[str, Any]:
    target = {"url": url, "url_key": url_key(url), "domain": domain_of(url)}
    origin = {"from_url": page, "from_domain": domain_of(page) if page else None}
    return target | origin | {"text": None, "rel": rel, "score": score}


def write(path: Path, links: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(links, SCHEMA), path, row_group_size=3)
    return str(path)


def index_of(folder: Path, *links: dict[str, Any], **settings: Any) -> EvidenceIndex:
    half = len(links) // 2
    tables = (write(folder / "a.parquet", [*links[:half]]), write(folder / "b.parquet", [*links[half:]]))
    config = LinksConfig(tables=tables, **settings)
    (folder / "built").mkdir(exist_ok=True)
    made = build_evidence(config, model_files(config), str(folder / "built"))
    assert [path.name for path in (folder / "built").iterdir()] == ["link_evidence.arrow"]
    return EvidenceIndex(made[evidence.FILE])


def test_pages_domains_and_scores_are_counted_once(tmp_path: Path) -> None:
    links = (
        link("http://www.a.org/x", "http://b.org/1"),
        link("https://a.org/x?utm_source=b", "http://b.org/1"),  # the same link, in another form
        link("http://a.org/x#top", "http://b.org/2", score=7),
        link("http://a.org/x", "http://c.net/", score=-3),
        link("http://a.org/y", "http://c.net/", score=9),
        link("http://a.org/x", "http://www.a.org/z", score=99),  # of the domain itself
        link("http://d.org/", None),
    )
    index = index_of(tmp_path, *links)
    assert index.of_url("https://www.a.org/x") == Evidence(3, 7)
    assert index.of_url("http://a.org/y") == Evidence(1, 9)
    assert index.of_url("http://a.org/") == Evidence(0, None)
    assert index.of_domain("a.org") == Evidence(2, 9)
    assert index.of_domain("d.org") == Evidence(1, None)
    assert index.of_domain("b.org") == Evidence(0, None)


def test_links_with_low_scores_and_unendorsed_links_do_not_count(tmp_path: Path) -> None:
    links = (
        link("http://a.org/", "http://r.com/1", score=2),
        link("http://a.org/", "http://r.com/2", score=3),
        link("http://a.org/", "http://b.org/", rel="noopener NoFollow"),
        link("http://a.org/", "http://c.org/", rel="ugc,noopener"),
        link("http://a.org/", "http://d.org/", rel="noopener"),
    )
    assert index_of(tmp_path, *links, min_score=3).of_url("http://a.org") == Evidence(2, 3)
    (tmp_path / "all").mkdir()
    assert index_of(tmp_path / "all", *links, nofollow=True).of_url("http://a.org") == Evidence(5, 3)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.none() | st.integers(-5, 5)), max_size=60))
def test_the_index_agrees_with_a_plain_count(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int | None]]
) -> None:
    links = [link(f"http://t{url % 7}.org/{url}", f"http://f{page}.net/", score) for url, page, score in drawn]
    index = index_of(tmp_path_factory.mktemp("drawn"), *links)
    for url in range(31):
        own = [(page, score) for target, page, score in drawn if target == url]
        scores = [score for _, score in own if score is not None]
        expected = Evidence(len({page for page, _ in own}), max(scores, default=None))
        assert index.of_url(f"http://t{url % 7}.org/{url}") == expected
    for site in range(7):
        assert index.of_domain(f"t{site}.org").linked_from == len({page for url, page, _ in drawn if url % 7 == site})


def test_the_columns_of_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "links.parquet", [link("http://a.org/x", "http://b.org/", score=4)])
    config = LinksConfig(tables=(path,))
    measure = make_links(config, model_files(config) | build_evidence(config, model_files(config), str(tmp_path)))

    def measured(url: str | None, domain: str | None) -> tuple[Any, ...]:
        row = {"url": url, "domain": domain}
        assert measure(row) is None
        return tuple(row[name] for name in LINKS.adds)

    assert measured("http://a.org/x", "a.org") == (1, 4, 1, 4)
    assert measured("http://a.org/y", "a.org") == (0, None, 1, 4)
    assert measured(None, None) == (None, None, None, None)
    nothing = make_links(LinksConfig(), {})
    row: dict[str, Any] = {"url": "http://a.org/x", "domain": "a.org"}
    assert nothing(row) is None
    assert [row[name] for name in LINKS.adds] == [None] * 4


def test_tables_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no table")
    pq.write_table(pa.table({"url": ["http://a.org"], "score": [1]}), tmp_path / "b.parquet")
    for name, message in (("a", "a table of links"), ("b", "the columns .* without url_key, domain")):
        path = str(tmp_path / f"{name}.parquet")
        with pytest.raises(ConfigError, match=f"links.tables: expected {message}"):
            build_evidence(LinksConfig(tables=(path,)), {"table_0": path}, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"a.parquet", "b.parquet"}
    assert set(NEEDED) <= set(SCHEMA.names)
    with pa.OSFile(str(tmp_path / "c"), "wb") as sink:
        pa.ipc.new_file(sink, evidence._INDEX).close()
    with pytest.raises(ContractError, match=r"expected an index of 512 batches, got 0\. Delete the file"):
        EvidenceIndex(str(tmp_path / "c"))


def test_settings_without_tables_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_score, nofollow: expected links\.tables to be set, got none"):
        LinksConfig(min_score=3, nofollow=True)


def test_an_index_is_the_same_file_each_time(tmp_path: Path) -> None:
    links = [link(f"http://t{number}.org/", f"http://f{number % 3}.net/") for number in range(50)]
    path = write(tmp_path / "links.parquet", links)
    made = []
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        made.append(build_evidence(LinksConfig(tables=(path,)), {"table_0": path}, str(tmp_path / name)))
    assert Path(made[0]["evidence"]).read_bytes() == Path(made[1]["evidence"]).read_bytes()
