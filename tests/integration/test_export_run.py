"""Exports by Spark at any number of partitions, to an object store, and of rows with fields beside the text."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import penstock
from jobs.recipe import read_recipe
from pipeline.disclosure.dataset_card import CardText
from pipeline.engine.spark import run_tasks
from pipeline.export.export import ExportOptions, export_text, prepare_export
from pipeline.inspect.show import columns_of_run, find_documents, parse_where
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tables import META_CUT, META_FIELDS, META_NUMBERS
from tests.pipeline.export.test_export import run_here
from tests.support.demo_run import RECIPE

pytestmark = pytest.mark.spark
OPTIONS = ExportOptions("huggingface-dataset", ("all",), None, 50_000)


def export(run: Store, out: str, run_all: Callable[..., Any]) -> dict[str, Any]:
    """Export the clean text of a run and return the block `content` of the manifest."""
    content: dict[str, Any] = export_text(
        prepare_export(run, Store(out), OPTIONS), OPTIONS, CardText("set", recipe={}), run_all
    )["content"]
    return content


def test_a_program_exports_by_the_api(spark, finished: Store, tmp_path: Path) -> None:
    penstock.open(finished.root).export(str(tmp_path / "out"), format="jsonl")
    counts = json.loads((tmp_path / "out/export.json").read_text())["content"]["counts"]
    assert counts["exported"] == open_table(finished, "clean")[1].content.counts.rows_kept


def test_the_partitions_do_not_change_a_byte(spark, finished: Store, tmp_path: Path) -> None:
    found = []
    for number, partitions in enumerate((1, 3)):
        out = tmp_path / str(number)
        found.append(
            export(finished, str(out), lambda work, tasks, label, n=partitions: run_tasks(spark, work, tasks, label, n))
        )
    found.append(export(finished, str(tmp_path / "here"), run_here))
    assert found[0] == found[1] == found[2]
    kept = open_table(finished, "clean")[1].content.counts.rows_kept
    assert found[0]["counts"]["exported"] == kept == open_table(finished, "dedup")[1].content.counts.rows_kept
    assert len(found[0]["files"]) > 3
    for name in ("README.md", "croissant.json"):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_fields_of_lines_are_carried_redacted_and_searched(spark, tmp_path: Path) -> None:
    words = "The river port of the old town is described in this text, and every {} of it has a harbour of its own. "
    rows = [
        {
            "text": words.format(name) * 12,
            "url": f"http://www.penrose.com/{name}",
            "score": score,
            "category": "news",
            "author": f"{name}@penrose.com",
            "when": "2024-05-06",
            "rights": "CC0-1.0",
        }
        for name, score in (("street", 3.5), ("square", 2), ("quarter", 4))
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [
        f'source.paths=["{tmp_path}/lines.jsonl"]',
        "source.date_field=when",
        "source.licence_field=rights",
        "quality.rules=[]",
        "dedup.near=false",
    ]
    run = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(read_recipe(str(RECIPE), settings), "clean"), run, 1)
    figures = open_table(run, "documents")[1].content.figures
    assert figures[META_FIELDS] == {"author": 3, "category": 3, "score": 3}
    assert (figures[META_NUMBERS], META_CUT in figures) == ({"score": 3}, False)
    folder, manifest = open_table(run, "clean")
    clean = pq.read_table(folder.path(manifest.paths_of()[0])).to_pylist()
    assert [json.loads(row["meta"]) for row in clean] == [
        {"score": score, "category": "news", "author": "<EMAIL>"} for score in (3.5, 2, 4)
    ]
    assert {(row["licence"], row["date"].isoformat()) for row in clean} == {("CC0-1.0", "2024-05-06T00:00:00+00:00")}
    columns = columns_of_run(run)
    rows_found = find_documents(run, parse_where("meta.score > 3 and meta.category = 'news'", columns), 9)
    assert [row["url"] for row in rows_found] == ["http://www.penrose.com/street", "http://www.penrose.com/quarter"]
    content = export(run, str(tmp_path / "out"), run_here)
    assert (content["licences"], content["counts"]["with_licence"]) == ({"CC0-1.0": 3}, 3)


def test_an_object_store_holds_the_same_export(finished: Store, tmp_path: Path, monkeypatch) -> None:
    moto_server = pytest.importorskip("moto.server", reason="moto[server], a server of S3 for tests, is not installed")
    from tests.integration.test_object_store import environment

    served = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    try:
        for name, value in environment(served.get_host_and_port()[1]).items():
            monkeypatch.setitem(os.environ, name, value)
        Store("s3://bucket?allow_bucket_creation=true").fs.create_dir("bucket")
        content = export(finished, "s3://bucket/out", run_here)
        assert content == export(finished, str(tmp_path), run_here)
        remote = Store("s3://bucket/out")
        assert {*remote.walk()} == {
            path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
        }
        for file in content["files"]:
            assert remote.sha256(file["path"]) == file["sha256"]
    finally:
        served.stop()
