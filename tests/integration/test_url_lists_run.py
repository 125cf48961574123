"""A run with lists of domains: dropped before or after extraction, listed pages leave the same documents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe
from pipeline.prepare import prepare
from pipeline.report.page import write_report
from pipeline.run import run_steps
from pipeline.urls.stage import LISTED
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.urls import web_host

pytestmark = pytest.mark.spark
LISTS = 'urls.block_lists={{ adult = "{0}/adult", games = "{0}/games" }}'


def rows_of(run: Store, table: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(run, table)
    tables = [pq.read_table(folder.path(path), filesystem=folder.fs) for path in manifest.paths_of()]
    return pa.concat_tables(tables).sort_by("doc_id").to_pylist()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, crawl: Path, spark) -> Callable[..., Store]:
    """Runs up to `clean` on a crawl of which a quarter of the hosts is on a list in UT1's form."""
    folder = tmp_path_factory.mktemp("urls")
    paths = [f"source.paths=['{crawl}/*.warc.gz']"]
    first = Store(str(folder / "first"))
    run_steps(spark, prepare(read_recipe("demo", paths), "documents"), first, 2)
    hosts = sorted({host for row in rows_of(first, "documents") if (host := web_host(row["url"] or ""))})
    for name, own in (("adult", hosts[::8]), ("games", hosts[4::8])):
        (folder / name).mkdir()
        (folder / name / "domains").write_text("\n".join(own))

    def run(name: str, *settings: str) -> Store:
        made = Store(str(folder / name))
        recipe = read_recipe("demo", [*paths, LISTS.format(folder), *settings])
        run_steps(spark, prepare(recipe, "clean"), made, 2)
        return made

    return run


def test_pages_on_early_lists_are_counted_and_not_extracted(runs: Callable[..., Store]) -> None:
    late, early = runs("late"), runs("early", 'urls.early_lists=["adult", "games"]')
    listed = [row for row in rows_of(late, "documents") if row["url_lists"]]
    documents = {row["doc_id"]: row for row in rows_of(early, "documents")}
    assert len(listed) > 20
    assert {documents[row["doc_id"]]["drop_rule"] for row in listed if row["drop_stage"] is None} == {LISTED}
    assert all(documents[row["doc_id"]]["url_lists"] == row["url_lists"] for row in listed)
    dropped = [row for row in documents.values() if row["drop_rule"] == LISTED]
    assert len(dropped) == open_table(early, "documents")[1].content.counts.dropped[f"urls/{LISTED}"] >= len(listed) / 2
    assert {row["language"] for row in dropped} == {None}
    texts = {row["doc_id"]: row["text"] for row in rows_of(early, "text")}
    assert {texts[row["doc_id"]] for row in dropped} == {None}

    # Of copies, one on a list may have been the one to keep, so the kept documents are compared before deduplication.
    kept = [{row["doc_id"] for row in rows_of(run, "verdicts") if row["drop_stage"] is None} for run in (late, early)]
    assert kept[0] == kept[1]
    write_report(early)
    assert "a list of `urls.early_lists` has its address" in early.read_bytes("report.html").decode()


def test_some_lists_may_be_early(runs: Callable[..., Store]) -> None:
    run = runs("some", 'urls.early_lists=["games"]')
    documents = rows_of(run, "documents")
    assert {tuple(row["url_lists"]) for row in documents if row["drop_rule"] == LISTED} == {("games",)}
    later = [row["doc_id"] for row in documents if row["drop_stage"] is None and row["url_lists"]]
    verdicts = {row["doc_id"]: row for row in rows_of(run, "verdicts")}
    assert later
    assert {(verdicts[own]["drop_stage"], verdicts[own]["drop_rule"]) for own in later} == {("urls", "url_list")}
