"""A crawl of Common Crawl by its name: the same tables from a folder, from a server that fails, and from S3.

The crawl is a copy of the bucket with archives of the demo crawl and, where they are beside the project, real ones.
"""

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.prepare import prepare
from pipeline.run import run_steps
from pipeline.sources.common_crawl import requests
from pipeline.sources.common_crawl.columns import INDEX_SCHEMA
from schemas.errors import ContractError
from schemas.manifest import Manifest, open_table
from schemas.storage import Store
from tests.support.crawl_server import Faults, serving
from tests.support.paths import ROOT, SHARED
from tests.support.s3_server import environment, server

__all__ = ["server"]  # a fixture

pytestmark = [pytest.mark.spark, pytest.mark.slow]
CRAWL = "CC-MAIN-2024-10"
SEGMENT = f"crawl-data/{CRAWL}/segments/1708/warc"
REAL = ("real/CC-MAIN-2020-34-part0.warc.gz", "real/whirlwind.warc.gz", "udhr-lang.warc.gz")
SMALL = ('quality.rules=["gopher_quality"]', 'language.languages=["en"]', "language.min_score=0")
WHERE = "fetch_status = 200 and content_languages like 'eng%'"
FAULTS = {
    1: ("truncate", 20_000),
    2: ("status", 503, {"Retry-After": "1"}),
    3: ("shifted",),
    4: ("wrong_range",),
    5: ("ignore_range",),
}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the paths of the bucket of Common Crawl."""
    root, demo = tmp_path_factory.mktemp("bucket"), tmp_path_factory.mktemp("demo")
    build_demo_crawl(demo, pages=100, seed=3)
    (root / SEGMENT).mkdir(parents=True)
    for archive in demo.glob("*.warc.gz"):
        shutil.copy(archive, root / SEGMENT)
    for name in REAL if (SHARED / "warc").is_dir() else ():
        shutil.copyfile(SHARED / "warc" / name, root / SEGMENT / Path(name).name)
    paths = sorted(path.relative_to(root).as_posix() for path in (root / SEGMENT).iterdir())
    (root / f"crawl-data/{CRAWL}/warc.paths.gz").write_bytes(gzip.compress("\n".join(paths).encode()))
    return root


@pytest.fixture
def run(spark: Any, tmp_path: Path) -> Any:
    """A function that builds the table `documents` of the crawl with some settings."""

    def run(*changes: str, folder: Store | None = None) -> Store:
        store = folder or Store(str(tmp_path / f"run-{random.random()}"))
        recipe = read_recipe(str(ROOT / "jobs/recipes/demo.toml"), [f"source.crawl={CRAWL}", *SMALL, *changes])
        run_steps(spark, prepare(recipe, "documents"), store, None)
        return store

    return run


@pytest.fixture(scope="module")
def whole(spark: Any, bucket: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The run that reads the folder."""
    store = Store(str(tmp_path_factory.mktemp("whole")))
    recipe = read_recipe(
        str(ROOT / "jobs/recipes/demo.toml"), [f"source.crawl={CRAWL}", *SMALL, f"source.mirror={bucket}"]
    )
    run_steps(spark, prepare(recipe, "documents"), store, None)
    return store


def manifest(run: Store, table: str = "documents") -> Manifest:
    return open_table(run, table)[1]


def digests(run: Store) -> list[str]:
    return [manifest(run, table).digest for table in ("documents", "text")]


def rows_of(run: Store, table: str) -> list[dict[str, Any]]:
    folder, found = open_table(run, table)
    return [row for path in found.run.paths.values() for row in pq.read_table(folder.path(path)).to_pylist()]


def archives(bucket: Path) -> list[str]:
    return sorted(path.relative_to(bucket).as_posix() for path in (bucket / SEGMENT).iterdir())


def test_files_have_their_names_in_the_bucket(whole: Store, bucket: Path) -> None:
    content = manifest(whole).content
    assert [entry.name for entry in content.inputs] == archives(bucket)
    assert [entry.bytes for entry in content.inputs] == [(bucket / name).stat().st_size for name in archives(bucket)]
    assert {row["snapshot"] for row in rows_of(whole, "documents")} == {CRAWL}
    assert "where" not in content.config["source"]
    assert content.counts.rows_kept > 20


def test_a_server_that_fails_gives_the_same_tables(whole: Store, bucket: Path, run: Any) -> None:
    with serving(bucket, Faults(FAULTS)) as web:
        found = run(f"source.mirror={web.uri}")
        assert web.most_open <= 4  # a task has one connection, and a broken one may end late
    assert digests(found) == digests(whole)
    counts = manifest(found).run.notes["transfers"]
    files = len(archives(bucket))
    large = sum((bucket / name).stat().st_size > 20_000 for name in archives(bucket))
    assert counts["truncated_answers"] == large
    assert counts["status_503"] == large
    assert counts["wrong_ranges"] == 2 * large
    assert counts["requests"] == files + 4 * large
    assert counts["bytes"] >= sum(entry.bytes for entry in manifest(found).content.inputs)
    assert counts["waited_seconds"] >= 3 * large
    assert "transfers" not in manifest(whole).run.notes


def test_a_server_that_stalls_gives_the_same_tables(whole: Store, bucket: Path, run: Any) -> None:
    plan = {1: ("stall", 30_000, requests.STALL_SECONDS + 2)}
    with serving(bucket, Faults(plan)) as web:
        found = run(f"source.mirror={web.uri}")
    assert digests(found) == digests(whole)
    assert manifest(found).run.notes["transfers"]["stalls"] > 0


def test_s3_gives_the_same_tables(whole: Store, bucket: Path, run: Any, server: int, spark: Any) -> None:
    store = Store("s3://bucket/mirror")
    for path in bucket.rglob("*"):
        if path.is_file():
            store.write_atomic(path.relative_to(bucket).as_posix(), path.read_bytes())
    given = spark.sparkContext.environment
    with mock.patch.dict(given, environment(server)):
        found = run("source.mirror=s3://bucket/mirror")
    assert digests(found) == digests(whole)
    assert manifest(found).run.notes["transfers"]["requests"] == len(archives(bucket))


def test_few_files_and_connections(whole: Store, bucket: Path, run: Any) -> None:
    with serving(bucket) as web:
        found = run(f"source.mirror={web.uri}", "source.files=2", "source.connections=1")
        assert web.most_open == 1
        assert len(web.requests) == 3
    names = {entry.name for entry in manifest(found).content.inputs}
    chosen = [row for row in rows_of(whole, "documents") if row["split"] in names]
    assert rows_of(found, "documents") == chosen
    assert len(names) == 2


def fetched(web: Any) -> set[str]:
    return {path for path, _ in web.requests if path.endswith(".warc.gz")}


def test_more_files_of_a_crawl_are_read_and_those_of_the_run_before_are_not(
    whole: Store, bucket: Path, run: Any, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "grown"))
    with serving(bucket) as web:
        run(f"source.mirror={web.uri}", "source.files=2", folder=store)
        first = fetched(web)
    with serving(bucket) as web:
        run(f"source.mirror={web.uri}", folder=store)
        assert fetched(web) == {*archives(bucket)} - first
    assert len(first) == 2
    assert digests(store) == digests(whole)


# ------------------------------------------------------------------------------------------- files that are unreachable


@pytest.fixture
def damaged(bucket: Path, tmp_path: Path) -> Path:
    """A copy of the bucket in which one archive is missing."""
    copy = tmp_path / "damaged"
    shutil.copytree(bucket, copy)
    (copy / archives(bucket)[0]).unlink()
    return copy


def test_a_missing_file_stops_the_run(damaged: Path, bucket: Path, run: Any) -> None:
    name = archives(bucket)[0]
    with serving(damaged) as web:
        for root, cause in ((web.uri, "404 Not Found"), (str(damaged), "no such file")):
            with pytest.raises(ContractError) as raised:
                run(f"source.mirror={root}")
            assert str(raised.value).startswith(
                f"{root}/{name}: expected a file that can be read, got {cause}. Run the"
            )


def test_a_missing_file_is_a_gap_if_some_may_be(damaged: Path, bucket: Path, whole: Store, run: Any) -> None:
    name = archives(bucket)[0]
    with serving(damaged) as web:
        found = run(f"source.mirror={web.uri}", "source.max_unreadable=0.5")
    (gap,) = [row for row in rows_of(found, "documents") if row["split"] == name]
    assert (gap["record_type"], gap["drop_rule"], gap["drop_value"]) == ("gap", "unreachable_file", 404.0)
    assert (gap["offset"], gap["length"]) == (0, 0)
    others = [row for row in rows_of(whole, "documents") if row["split"] != name]
    assert [row for row in rows_of(found, "documents") if row["split"] != name] == others
    made = manifest(found)
    assert made.content.counts.dropped["source/unreachable_file"] == 1
    (error,) = made.run.notes["errors"].values()
    assert (error["count"], error["message"]) == (1, "404 Not Found")
    assert digests(run(f"source.mirror={damaged}", "source.max_unreadable=0.5"))[1] == digests(found)[1]


def test_the_rest_of_a_file_that_ends_in_the_middle_is_a_gap(bucket: Path, whole: Store, run: Any) -> None:
    with serving(bucket, Faults({1: ("truncate", 1_500_000), 2: ("status", 410)})) as web:
        found = run(f"source.mirror={web.uri}", "source.max_unreadable=1")
    rows, expected = rows_of(found, "documents"), {row["doc_id"]: row for row in rows_of(whole, "documents")}
    for name in archives(bucket):
        *records, last = [row for row in rows if row["split"] == name]
        size = (bucket / name).stat().st_size
        assert sum(row["length"] for row in (*records, last)) == size
        assert (last["drop_rule"] == "unreachable_file") == (size > 1_500_000)
        assert len(records) > 1  # all that were read in whole blocks
        assert all(row == expected[row["doc_id"]] for row in records[:-1])


def test_too_many_missing_files_stop_the_run_which_then_resumes(
    damaged: Path, bucket: Path, whole: Store, run: Any, tmp_path: Path
) -> None:
    name, share = archives(bucket)[0], 0.9 / len(archives(bucket))
    store = Store(str(tmp_path / "resumed"))
    with serving(damaged) as web:
        with pytest.raises(ContractError) as raised:
            run(f"source.mirror={web.uri}", f"source.max_unreadable={share}", folder=store)
        assert str(raised.value).startswith(
            f"source.max_unreadable: expected at most {share:g} of the files of {CRAWL} to be unreachable, got 1 of "
            f"{len(archives(bucket))}, the first {name} (404 Not Found). Run the same command again"
        )
    with serving(bucket) as web:
        run(f"source.mirror={web.uri}", f"source.max_unreadable={share}", folder=store)
        assert {path for path, _ in web.requests if path.endswith(".warc.gz")} == {name}  # the others are kept
    assert digests(store) == digests(whole)


def test_a_larger_run_tries_again_what_was_unreachable_and_keeps_the_others(
    bucket: Path, whole: Store, run: Any, tmp_path: Path
) -> None:
    settings = [f"source.crawl={CRAWL}", f"source.mirror={bucket}", "source.files=2", *SMALL]
    splits = prepare(read_recipe(str(ROOT / "jobs/recipes/demo.toml"), settings), "documents").splits
    missing, read = (split.name for split in splits)
    damaged, store = shutil.copytree(bucket, tmp_path / "damaged"), Store(str(tmp_path / "grown"))
    (damaged / missing).unlink()
    with serving(damaged) as web:
        run(f"source.mirror={web.uri}", "source.max_unreadable=0.5", "source.files=2", folder=store)
        assert fetched(web) == {missing, read}
    assert manifest(store).content.counts.dropped["source/unreachable_file"] == 1
    with serving(bucket) as web:
        run(f"source.mirror={web.uri}", folder=store)
        assert fetched(web) == {*archives(bucket)} - {read}
    assert digests(store) == digests(whole)


# ------------------------------------------------------------------------------------------------------------- by index


LANGUAGES = ("eng", "eng,deu", "deu", "fra,eng", None)


@pytest.fixture(scope="module")
def index(whole: Store, bucket: Path) -> list[dict[str, Any]]:
    """The rows of the index, which is written into the bucket: two files of pages, and one of redirects."""
    rows = [row for row in rows_of(whole, "documents") if row["record_type"] == "response" and row["length"]]
    places = [(row["split"], row["offset"]) for row in rows_of(whole, "documents")]
    rows = [row for row in rows if places.count((row["split"], row["offset"])) == 1]
    numbers = random.Random(4)
    entries = [
        dict.fromkeys(INDEX_SCHEMA.names)
        | {
            "url": row["url"],
            "fetch_status": row["http_status"],
            "content_languages": numbers.choice(LANGUAGES),
            "warc_filename": row["split"],
            "warc_record_offset": row["offset"],
            "warc_record_length": row["length"],
            "doc_id": row["doc_id"],
        }
        for row in rows
    ]
    numbers.shuffle(entries)
    files = []
    half = len(entries) // 2
    for subset, number, part in (
        ("warc", 0, entries[:half]),
        ("warc", 1, entries[half:]),
        ("crawldiagnostics", 0, entries[:3]),
    ):
        name = f"cc-index/table/cc-main/warc/crawl={CRAWL}/subset={subset}/part-{number}.parquet"
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(part, INDEX_SCHEMA)
        pq.write_table(table, bucket / name, row_group_size=50)
        files.append(name)
    listed = gzip.compress("\n".join(files).encode())
    (bucket / f"crawl-data/{CRAWL}/cc-index-table.paths.gz").write_bytes(listed)
    return entries


def fulfil(entry: dict[str, Any]) -> bool:
    return entry["fetch_status"] == 200 and (entry["content_languages"] or "").startswith("eng")


def test_a_condition_gives_the_rows_of_the_whole_run(
    whole: Store, bucket: Path, index: list[dict[str, Any]], run: Any
) -> None:
    wanted = {entry["doc_id"] for entry in index if fulfil(entry)}
    assert 20 < len(wanted) < len(index) / 2
    local = run(f"source.mirror={bucket}", f"source.where={WHERE}")
    with serving(bucket, Faults({1: ("truncate", 20_000), 2: ("shifted",)})) as web:
        served = run(f"source.mirror={web.uri}", f"source.where={WHERE}")
        asked = [path for path, span in web.requests if path.endswith(".warc.gz")]
    assert digests(served) == digests(local)
    for table in ("documents", "text"):
        expected = [row for row in rows_of(whole, table) if row["doc_id"] in wanted]
        assert rows_of(local, table) == expected
    assert {row["doc_id"] for row in rows_of(local, "documents")} == wanted
    content = manifest(local).content
    assert content.config["source"]["where"] == WHERE
    assert sum(entry.bytes for entry in content.inputs) == sum(
        entry["warc_record_length"] for entry in index if fulfil(entry)
    )
    assert len(asked) < len(wanted) / 2  # neighbouring records share a request
    assert not any("scratch" in name for name in local.walk())


def test_a_condition_applies_to_the_chosen_files(whole: Store, bucket: Path, index: Any, run: Any) -> None:
    found = run(f"source.mirror={bucket}", "source.where=content_languages is null", "source.files=2")
    names = [entry.name for entry in manifest(found).content.inputs]
    wanted = {e["doc_id"] for e in index if e["content_languages"] is None and e["warc_filename"] in names}
    assert {row["doc_id"] for row in rows_of(found, "documents")} == wanted
    assert len(names) == 2


def test_an_archive_without_a_chosen_record_is_not_fetched(bucket: Path, index: Any, run: Any) -> None:
    entry = next(entry for entry in index if fulfil(entry) and index.count(entry) == 1)
    with serving(bucket) as web:
        found = run(f"source.mirror={web.uri}", f"source.where=url = '{entry['url']}'")
        assert {path for path, _ in web.requests if path.endswith(".warc.gz")} == {
            row["split"] for row in rows_of(found, "documents")
        }
    assert entry["doc_id"] in {row["doc_id"] for row in rows_of(found, "documents")}


def test_an_index_without_a_column_is_named(bucket: Path, index: Any, run: Any, tmp_path: Path) -> None:
    copy = tmp_path / "old"
    shutil.copytree(bucket, copy)
    for path in copy.rglob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["content_languages"]), path)
    with pytest.raises(Exception, match="got an index without content_languages"):
        run(f"source.mirror={copy}", f"source.where={WHERE}")


def test_records_are_fetched_again_by_trace(
    bucket: Path, index: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["tokenizer.vocab_size=600", "tokens.shard_tokens=16384", "tokens.chunk_tokens=256", *SMALL]
    with serving(bucket) as web:
        changes = [f"source.crawl={CRAWL}", f"source.mirror={web.uri}", f"source.where={WHERE}", *settings]
        sets = [word for change in changes for word in ("--set", change)]
        assert main(["run", str(ROOT / "jobs/recipes/demo.toml"), "--out", str(tmp_path / "run"), *sets]) == 0
        kept = {row["doc_id"] for row in rows_of(Store(str(tmp_path / "run")), "clean")}
        row = next(row for row in rows_of(Store(str(tmp_path / "run")), "documents") if row["doc_id"] in kept)
        web.requests.clear()
        capsys.readouterr()
        code = main(["trace", str(tmp_path / "run"), "--doc", row["doc_id"].hex(), "--refetch", "--json"])
        answer = json.loads(capsys.readouterr().out)
        spans = [span for path, span in web.requests if path == row["split"]]
    assert code == 0
    (record,) = answer["records"]
    assert (record["changes"], record["offset"], record["length"]) == ([], row["offset"], row["length"])
    assert record["uri"] == f"{web.uri}/{row['split']}"
    assert spans == [f"bytes={row['offset']}-{row['offset'] + row['length'] - 1}"]
    assert "WARC/1.0" in record["head"]
