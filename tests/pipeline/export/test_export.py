"""Exports of clean text and tables, read again by other programs; counts, shards, resume and refusals."""

import json
import pickle
import re
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs.arguments import add_trust
from jobs.exit_codes import exit_code_of
from jobs.recipe import recipe_sections
from jobs.verbs.export import add_export_arguments, export_command, parse_size
from pipeline.disclosure.dataset_card import CardText
from pipeline.disclosure.hub import size_category
from pipeline.export.card import to_toml
from pipeline.export.export import (
    ExportOptions,
    PreparedExport,
    export_table,
    export_text,
    exportable_tables,
    prepare_export,
    prepare_table_export,
)
from pipeline.export.shards import PartCount, json_values, plan_shards
from pipeline.stages import unmeasured_columns
from schemas.config import build_recipe
from schemas.errors import ConfigError, ContractError
from schemas.exports import begin_receipt, read_receipts, write_receipt
from schemas.ids import digest_of
from schemas.lock_files import EXPORT_LOCK
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tables import META_FIELDS, META_NUMBERS
from tests.support.lineage_run import record_files
from tests.support.paths import ROOT
from tests.support.report_run import Record, crawl, identifier, make_run
from tests.support.tiny_takedown import rows_of, take_down

UNMEASURED = unmeasured_columns(build_recipe({"source": {"paths": ["x.warc.gz"]}}, recipe_sections(), "test"))
TEXT = CardText("penrose web", "odc-by", "Penrose", recipe={"quality": {"min_words": 30, "rules": ["c4"]}})


def run_here(function: Callable[[Any, bool], dict[str, Any]], tasks: Sequence[Any], label: str) -> list[dict[str, Any]]:
    """Run tasks in this process, in reverse order; tasks and results take the forms in which Spark moves them."""
    results = [json.loads(json.dumps(function(pickle.loads(pickle.dumps(task)), False))) for task in reversed(tasks)]
    return results[::-1]


def export(run: Store, out: Path, format: str, **options: Any) -> dict[str, Any]:
    """Export clean text and return the block `content` of the manifest."""
    chosen = ExportOptions(format, **options)
    manifest = export_text(prepare_export(run, Store(str(out)), chosen), chosen, TEXT, run_here)
    assert manifest == json.loads((out / "export.json").read_text())
    assert manifest["digest"] == digest_of(manifest["content"])
    assert not (out / "_incomplete").exists()
    content: dict[str, Any] = manifest["content"]
    return content


def lines_of(out: Path) -> list[dict[str, Any]]:
    """The rows of all JSON lines of an export, in the order of the shards."""
    rows = []
    for path in sorted((out / "data").glob("*.jsonl.zst")):
        with pa.CompressedInputStream(str(path), "zstd") as stream:
            rows += [json.loads(line) for line in stream.read().decode().split("\n")[:-1]]
    return rows


METAS = ['{"score":3.5,"by":"ann"}', '{"score":1}', None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The synthetic crawl with a token dataset; three kept documents more, with meta."""
    records = crawl() + [Record(title=f"T{n}", text="raw", language="en", chars=9, meta=m) for n, m in enumerate(METAS)]
    figures = {"documents": {META_FIELDS: {"score": 2, "by": 1}, META_NUMBERS: {"score": 2}}}
    return make_run(tmp_path_factory.mktemp("export") / "run", "clean", records, figures)


def kept_ids(run: Store) -> list[str]:
    """The ids of the documents that `clean` keeps, in the order of its parts."""
    folder, manifest = open_table(run, "clean")
    tables = [pq.read_table(folder.path(path)) for path in manifest.paths_of()]
    return [row["doc_id"].hex() for table in tables for row in table.to_pylist() if row["drop_stage"] is None]


# ----------------------------------------------------------------------------------------------------- JSON lines


def test_json_lines_have_every_kept_document_once(run: Store, tmp_path: Path) -> None:
    content = export(run, tmp_path, "jsonl", signals=("gopher_num_words", "language_score"))
    rows = lines_of(tmp_path)
    assert [row["id"] for row in rows] == kept_ids(run)
    kept = {name: open_table(run, name)[1].content.counts.rows_kept for name in ("dedup", "clean")}
    assert kept == {"dedup": 23, "clean": 23}
    assert content["counts"] == {
        "clean": 23,
        "left_out_by_where": 0,
        "exported": len(rows),
        "text_bytes": 23 * 950,
        "with_licence": 0,
    }
    by_id = {row["id"]: row for row in rows}
    assert by_id[identifier(53).hex()] == {
        "id": identifier(53).hex(),
        "text": "…",
        "title": "T0",
        "url": None,
        "date": "2026-01-01T00:00:00Z",
        "source": "web",
        "language": "en",
        "licence": None,
        "meta": METAS[0],
        "gopher_num_words": None,
        "language_score": None,
    }
    assert content["languages"] == {"en": 18, "ja": 5}
    assert [file["path"] for file in content["files"]] == ["data/train-00000.jsonl.zst"]
    assert Store(str(tmp_path)).sha256("data/train-00000.jsonl.zst") == content["files"][0]["sha256"]


def test_shards_hold_the_texts_that_begin_in_them(run: Store, tmp_path: Path) -> None:
    content = export(run, tmp_path / "a", "jsonl", shard_bytes=4000)
    # 23 texts of 950 bytes: the first five begin before 4,000, the next four before 8,000
    assert [file["rows"] for file in content["files"]] == [5, 4, 4, 4, 5, 1]
    assert [row["id"] for row in lines_of(tmp_path / "a")] == kept_ids(run)
    again = export(run, tmp_path / "b", "jsonl", shard_bytes=4000)
    assert again == content
    assert export(run, tmp_path / "c", "parquet", shard_bytes=4000)["counts"] == content["counts"]


WHERE = {"language = ja": 5, "meta.score > 3": 1, "title = T1": 1, f"id = {identifier(55).hex()}": 1}


def test_conditions_and_signals_use_the_columns_of_show(run: Store, tmp_path: Path) -> None:
    rows = {
        where: export(run, tmp_path / str(number), "jsonl", where=where)["counts"] for number, where in enumerate(WHERE)
    }
    assert {where: counts["exported"] for where, counts in rows.items()} == WHERE
    assert rows["language = ja"]["left_out_by_where"] == 18
    assert [json.loads(row["meta"]) for row in lines_of(tmp_path / "1")] == [{"score": 3.5, "by": "ann"}]
    content = export(run, tmp_path / "none", "parquet", where="language = xx")
    assert (content["counts"]["exported"], content["files"]) == (0, [])


def test_all_signals_are_those_with_a_value(run: Store, tmp_path: Path) -> None:
    content = export(run, tmp_path, "parquet", signals=("all",))
    assert [*content["columns"]][9:] == ["body_chars", "perplexity_bucket"]
    assert pq.read_table(tmp_path / "data").column("body_chars").to_pylist()[:2] == [900, 900]


@pytest.mark.parametrize(("compression", "suffix"), [("zstd", "jsonl.zst"), ("gzip", "jsonl.gz"), ("none", "jsonl")])
def test_compressions_hold_the_same_lines(run: Store, tmp_path: Path, compression: str, suffix: str) -> None:
    content = export(run, tmp_path / "a", "jsonl", compression=compression)
    (name,) = [file["path"] for file in content["files"]]
    assert name == f"data/train-00000.{suffix}"
    assert content.get("compression") == (None if compression == "zstd" else compression)
    with pa.input_stream(str(tmp_path / "a" / name), compression="detect") as stream:
        lines = stream.read().decode().split("\n")
    assert [json.loads(line)["id"] for line in lines[:-1]] == kept_ids(run)
    assert export(run, tmp_path / "b", "jsonl", compression=compression) == content
    prepared = prepare_table_export(run, "dedup", Store(str(tmp_path / "t")), "jsonl", compression)
    export_table(prepared, run_here)
    assert sorted(path.name.partition(".")[2] for path in (tmp_path / "t/data").iterdir())[0] == suffix


PYTHON = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/guides/export.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("library", ["pyarrow", "pandas", "datasets"])
def test_the_page_reads_its_exports(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, library: str
) -> None:
    if library == "pandas":
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    if library == "datasets":
        request.getfixturevalue("datasets")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (text,) = [text for text in PYTHON if f"import {library}" in text or f"from {library}" in text]
    export(run, tmp_path / "clean", "jsonl")
    export(run, tmp_path / "plain", "jsonl", compression="gzip")
    export(run, tmp_path / "parquet", "parquet")
    export(run, tmp_path / "dataset", "huggingface-dataset")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(text, "export.md", "exec"), names)
    if library == "pandas":
        assert names["frame"]["id"].to_list() == kept_ids(run)
    elif library == "pyarrow":
        assert names["lines"].column("id").to_pylist() == names["table"].column("id").to_pylist() == kept_ids(run)
    else:
        assert names["rows"]["id"] == kept_ids(run)


def test_numbers_of_json_lines() -> None:
    floats = pa.chunked_array([pa.array([0.1, float("nan"), float("-inf"), None, 1e-8], pa.float32())])
    assert json_values(floats) == [0.1, None, None, None, 1e-8]


# --------------------------------------------------------------------------------------------------- other readers


def test_parquet_is_read_by_pandas_and_duckdb_and_written_as_json(run: Store, tmp_path: Path) -> None:
    import pandas as pd

    export(run, tmp_path, "parquet", signals=("body_chars",))
    frame = pd.read_parquet(tmp_path / "data")
    rows = [json.loads(line) for line in frame.to_json(orient="records", lines=True).splitlines()]
    assert [row["id"] for row in rows] == kept_ids(run)
    assert set(frame.dtypes.astype(str)) == {"object", "int64"}
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    query = "select count(*), max((meta->>'score')::double) from read_parquet(?)"
    assert duckdb.connect().execute(query, [f"{tmp_path}/data/*.parquet"]).fetchall() == [(23, 3.5)]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package `datasets`, with a cache of its own and no network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("datasets", reason="datasets is not installed")


def test_the_dataset_opens_in_datasets(run: Store, tmp_path: Path, datasets: Any) -> None:
    out = tmp_path / "set"
    export(run, out, "huggingface-dataset", signals=("body_chars",), shard_bytes=4000)
    opened = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert [*opened] == ["train"]
    assert opened["train"]["id"] == kept_ids(run)
    assert str(opened["train"].features["body_chars"].dtype) == "int64"
    opened["train"].to_json(str(tmp_path / "again.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == kept_ids(run)
    assert json.loads(rows[-1]["meta"] or "null") in [json.loads(meta or "null") for meta in METAS]
    content = export(run, tmp_path / "lines", "jsonl", shard_bytes=4000)
    names = [decompressed(str(tmp_path / "lines" / file["path"])) for file in content["files"]]
    # Its reader of JSON infers the types from the first file, in which a field may be null in every row.
    features = datasets.Features({name: datasets.Value("string") for name in content["columns"]})
    given = {"data_files": names, "features": features, "cache_dir": str(tmp_path / "cache"), "split": "train"}
    opened = datasets.load_dataset("json", **given)
    assert opened["id"] == kept_ids(run)


def decompressed(name: str) -> str:
    """Decompress a file beside itself; `datasets` reads zstd only where the package `zstandard` is installed."""
    with pa.CompressedInputStream(name, "zstd") as stream:
        Path(name.removesuffix(".zst")).write_bytes(stream.read())
    return name.removesuffix(".zst")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_every_table_opens_in_pandas_and_datasets(run: Store, tmp_path: Path, datasets: Any, format: str) -> None:
    import pandas as pd

    assert exportable_tables(run) == ["documents", "text", "verdicts", "clusters", "dedup", "audit", "clean"]
    for table in exportable_tables(run):
        out = tmp_path / table
        prepared = prepare_table_export(run, table, Store(str(out)), format)
        manifest = export_table(prepared, run_here)
        entries = open_table(run, table)[1].content.files
        assert [file["rows"] for file in manifest["content"]["files"]] == [entry.rows for entry in entries]
        rows = sum(entry.rows for entry in entries)
        if not rows:
            continue
        names = sorted(str(own) for own in (out / "data").iterdir())
        names = names if format == "parquet" else [decompressed(name) for name in names]
        kind = {"parquet": "parquet", "jsonl": "json"}[format]
        found = datasets.load_dataset(kind, data_files=names, cache_dir=str(tmp_path / "cache"), split="train")
        found.to_json(str(tmp_path / f"{table}.jsonl"))
        again = [json.loads(line) for line in (tmp_path / f"{table}.jsonl").read_text().splitlines()]
        assert len(again) == rows, table
        key = "a" if table == "audit" else "doc_id"
        assert all(re.fullmatch("[0-9a-f]{32}", row[key]) for row in again), table
        if format == "parquet":
            frame = pd.concat(map(pd.read_parquet, names))
            text = frame.to_json(orient="records", lines=True)
            assert [json.loads(line)[key] for line in text.splitlines()] == [row[key] for row in again], table


# ------------------------------------------------------------------------------------------------------------ card


def test_the_card_has_a_head_that_the_hub_reads_and_the_counts_of_the_manifests(run: Store, tmp_path: Path) -> None:
    content = export(run, tmp_path, "huggingface-dataset", where="language = en", shard_bytes=4000)
    card = (tmp_path / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "odc-by"
    assert head["language"] == ["en"]
    assert head["size_categories"] == ["n<1K"]
    assert head["task_categories"] == ["text-generation"]
    assert head["configs"] == [{"config_name": "default", "data_files": [{"split": "train", "path": "data/*.parquet"}]}]
    assert head["dataset_info"]["features"][:2] == [
        {"name": "id", "dtype": "string"},
        {"name": "text", "dtype": "string"},
    ]
    assert head["dataset_info"]["splits"][0]["num_examples"] == content["counts"]["exported"] == 18
    assert "| records of the inputs |  | 56 |\n| `extract/no_text` | 2 | 54 |" in card
    assert "| `quality/gopher_short_doc` | 6 | " in card
    assert "| documents of clean text |  | 23 |\n| `language = en` | 5 | 18 |" in card
    assert "| `email` | 6 |\n| `phone` | 3 |" in card
    assert '```toml\n[quality]\nmin_words = 30\nrules = ["c4"]\n```' in card
    assert open_table(run, "clean")[1].digest in card
    left = int(re.findall(r"\| ([\d,]+) \|\n\| documents of clean text", card)[0])
    assert left == 23


def test_croissant_has_the_required_properties(run: Store, tmp_path: Path) -> None:
    """Those that the specification marks as required, for each kind of object."""
    content = export(run, tmp_path, "huggingface-dataset", signals=("body_chars",), shard_bytes=4000)
    found = json.loads((tmp_path / "croissant.json").read_text())
    required = {"@context", "@type", "conformsTo", "description", "license", "name", "url", "creator", "datePublished"}
    assert required <= found.keys()
    assert (found["@type"], found["conformsTo"]) == ("sc:Dataset", "http://mlcommons.org/croissant/1.1")
    context = found["@context"]
    assert (context["@vocab"], context["cr"]) == ("https://schema.org/", "http://mlcommons.org/croissant/")
    assert context["conformsTo"] == "dct:conformsTo"
    *files, file_set = found["distribution"]
    assert [(file["contentUrl"], file["sha256"]) for file in files] == [
        (file["path"], file["sha256"]) for file in content["files"]
    ]
    for file in files:
        assert {"@type", "@id", "name", "contentUrl", "encodingFormat", "sha256"} <= file.keys()
        assert (tmp_path / file["contentUrl"]).stat().st_size == int(file["contentSize"].split()[0])
    assert {"@type", "@id", "encodingFormat", "includes"} <= file_set.keys()
    assert {*tmp_path.glob(file_set["includes"])} == {tmp_path / file["contentUrl"] for file in files}
    (records,) = found["recordSet"]
    assert records["key"] == {"@id": "documents/id"}
    names = pq.read_schema(tmp_path / "data" / "train-00000.parquet").names
    assert [field["name"] for field in records["field"]] == names == [*content["columns"]]
    for field in records["field"]:
        assert {"@type", "@id", "dataType", "source"} <= field.keys()
        assert field["source"] == {"fileSet": {"@id": file_set["@id"]}, "extract": {"column": field["name"]}}
    assert records["field"][-1]["dataType"] == "sc:Integer"


def test_mlcroissant_reads_the_records_of_an_export(run: Store, tmp_path: Path) -> None:
    mlcroissant = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed")
    content = export(run, tmp_path, "huggingface-dataset")
    dataset = mlcroissant.Dataset(str(tmp_path / "croissant.json"))
    assert not dataset.metadata.issues.errors
    assert not dataset.metadata.issues.warnings
    records = [record["documents/id"] for record in dataset.records("documents")]
    assert len({*records}) == len(records) == content["counts"]["exported"]


def test_names_of_users_and_data_do_not_break_the_card(tmp_path: Path) -> None:
    hostile = '<script>x</script> | "q": [a](b)'
    run = make_run(tmp_path / "run", "clean", [Record(text="raw", language=hostile, chars=9)])
    options = ExportOptions("huggingface-dataset")
    out = Store(str(tmp_path / "out"))
    export_text(prepare_export(run, out, options), options, CardText(hostile, hostile, hostile), run_here)
    card = (tmp_path / "out" / "README.md").read_text()
    head, body = card.split("---\n", 2)[1:]
    assert yaml.safe_load(head)["pretty_name"] == hostile
    assert "language" not in yaml.safe_load(head)
    assert "<script>" not in body


@pytest.mark.parametrize(
    ("number", "name"), [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**12 - 1, "100B<n<1T"), (10**12, "n>1T")]
)
def test_size_categories(number: int, name: str) -> None:
    assert size_category(number) == name


def test_toml_is_read_again() -> None:
    import tomllib

    values = {
        "a": {"x y": 'q"\\\n\u20ac\U0001f600\x7f', "b": True, "c": [1, 2.5], "d": {"e.f": {"g": "h"}}, "empty": {}}
    }
    assert tomllib.loads(to_toml(values)) == values


# ---------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(
    ("parts", "size", "expected"),
    [
        ([[4, 4], [4]], 10, [[(0, 0), (0, 4), (1, 0)]]),
        ([[9, 9]], 10, [[(0, 0), (0, 9)]]),  # no text begins after byte 10
        ([[5, 5], [5]], 10, [[(0, 0), (0, 5)], [(1, 0)]]),
        ([[35, 1]], 10, [[(0, 0)], [(0, 35)]]),  # no text begins in the second and third ten bytes
        ([[35]], 10, [[(0, 0)]]),
        ([[], [3], []], 10, [[(1, 0)]]),
        ([[10, 0], [0, 3]], 10, [[(0, 0)], [(0, 10), (1, 0), (1, 0)]]),
        ([[0]], 10, [[(0, 0)]]),
        ([[]], 10, []),
    ],
)
def test_the_shards_of_texts(parts: list[list[int]], size: int, expected: list[list[tuple[int, int]]]) -> None:
    """`expected` is (part, first byte in the part) of the texts of each shard."""
    counts, starts = [], [[sum(own[:n]) for n in range(len(own))] for own in parts]
    for own, begins in zip(parts, starts):
        large = tuple((begin, length) for begin, length in zip(begins, own) if length > size)
        counts.append(PartCount(len(own), len(own), sum(own), begins[-1] if own else None, large))
    shards = plan_shards(counts, size)
    assert [shard.number for shard in shards] == list(range(len(expected)))
    found = [
        [(p, begin) for p, base in shard.parts for begin in starts[p] if shard.first <= base + begin < shard.last]
        for shard in shards
    ]
    assert found == expected


def test_random_texts_are_in_one_shard_each() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(1, 60))
        parts = [rng.integers(0, 50, rng.integers(0, 6)).tolist() for _ in range(rng.integers(1, 5))]
        counts, positions, base = [], [], 0
        for number, own in enumerate(parts):
            begins = [sum(own[:n]) for n in range(len(own))]
            large = tuple((begin, length) for begin, length in zip(begins, own) if length > size)
            counts.append(PartCount(len(own), len(own), sum(own), begins[-1] if own else None, large))
            positions += [(number, base + begin) for begin in begins]
            base += sum(own)
        found: list[tuple[int, int]] = []
        for shard in plan_shards(counts, size):
            held = [(p, at) for p, at in positions if shard.first <= at < shard.last]
            assert held
            assert {p for p, _ in held} <= {p for p, _ in shard.parts}
            found += held
        assert found == positions


# ----------------------------------------------------------------------------------------------- resume and refusals


def test_an_interrupted_export_resumes(run: Store, tmp_path: Path) -> None:
    whole = export(run, tmp_path / "whole", "jsonl", shard_bytes=4000)
    out, options = tmp_path / "out", ExportOptions("jsonl", shard_bytes=4000)

    def broken(function: Any, tasks: Sequence[Any], label: str) -> list[dict[str, Any]]:
        if label == "count":
            return run_here(function, tasks, label)
        run_here(function, tasks[:2], label)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_text(prepare_export(run, Store(str(out)), options), options, TEXT, broken)
    assert not (out / "export.json").exists()
    first = out / "data" / "train-00000.jsonl.zst"
    before = first.stat().st_mtime_ns
    (out / "_incomplete" / "train-00002-0123.jsonl.zst").write_bytes(b"half")
    with pytest.raises(ConfigError, match="an interrupted export of other documents or options"):
        prepare_export(run, Store(str(out)), ExportOptions("jsonl", shard_bytes=5000))
    assert export(run, out, "jsonl", shard_bytes=4000) == whole
    assert first.stat().st_mtime_ns == before
    assert {path.name for path in out.iterdir()} == {"data", "export.json"}


@pytest.mark.parametrize("table", [None, "clean"])
def test_an_export_that_lacks_only_its_receipt_is_completed(run: Store, tmp_path: Path, table: str | None) -> None:
    """All files of an export are hashed for its receipt: a kill meanwhile must not leave the receipt incomplete."""
    out, options = Store(str(tmp_path / "out")), ExportOptions("jsonl")

    def prepared() -> PreparedExport:
        return prepare_table_export(run, table, out, "jsonl") if table else prepare_export(run, out, options)

    def finish(own: PreparedExport, run_all: Any) -> dict[str, Any]:
        return export_table(own, run_all) if table else export_text(own, options, TEXT, run_all)

    read = {"clean": prepared().identity["tables"]["clean"]}
    begin_receipt(run, out, {"format": "jsonl"}, read)
    whole = finish(prepared(), run_here)
    out.write_atomic("_incomplete/plan.json", b"{}")  # killed before the folder was deleted
    again = prepared()
    assert again.manifest == whole
    assert finish(again, None) == whole
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data", "export.json"]
    with pytest.raises(ConfigError, match="got a complete export"):
        prepare_export(run, out, ExportOptions("parquet"))
    write_receipt(run, out, {"format": "jsonl"}, read)
    assert [own.complete for own in read_receipts(run) if own.destination == out.address] == [True]
    with pytest.raises(ConfigError, match="got a complete export"):
        prepared()


def test_a_table_is_exported_as_it_was_when_the_export_was_prepared(tmp_path: Path) -> None:
    """A takedown after the checks, while Spark starts, gives the run another version."""
    run = make_run(tmp_path / "run", "clean")
    num_rows = sum(file.rows for file in open_table(run, "clean")[1].content.files)
    prepared = prepare_table_export(run, "clean", Store(str(tmp_path / "out")), "jsonl")
    with mock.patch("pipeline.export.export.current_tables", return_value={}):
        manifest = export_table(prepared, run_here)
    assert manifest["content"]["tables"] == prepared.identity["tables"]
    assert manifest["content"]["counts"]["rows"] == num_rows


def test_the_lock_of_a_killed_export_does_not_count_as_a_file(run: Store, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / EXPORT_LOCK).write_text("{}\n")
    assert prepare_export(run, Store(str(tmp_path / "out")), ExportOptions("jsonl")).manifest is None


def test_folders_in_use_are_refused(run: Store, tmp_path: Path) -> None:
    export(run, tmp_path / "done", "jsonl")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("x")
    for name, message in (
        ("done", "expected a new or empty folder, got a complete export"),
        ("used", r"got one with files, such as notes\.txt"),
        ("used/notes.txt", "expected a folder, got a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare_export(run, Store(str(tmp_path / name)), ExportOptions("jsonl"))
    assert (tmp_path / "used" / "notes.txt").read_text() == "x"


def test_counts_that_differ_from_the_manifest_stop_the_export(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    folder, manifest = open_table(run, "clean")
    path = folder.path(manifest.paths_of()[0])
    pq.write_table(pq.read_table(path).slice(1), path)
    record_files(run, "clean")
    options = ExportOptions("jsonl")
    out = Store(str(tmp_path / "out"))
    with pytest.raises(ContractError, match="expected 20 documents of `clean`, as the manifest counts, got 19"):
        export_text(prepare_export(run, out, options), options, TEXT, run_here)
    assert not out.exists("export.json")


def test_unfinished_takedowns_and_runs_without_clean_text_are_refused(tmp_path: Path) -> None:
    out = Store(str(tmp_path / "out"))
    with pytest.raises(
        ConfigError, match=r"expected a run with up-to-date clean text, got none in .* \(missing: clean\)"
    ):
        prepare_export(make_run(tmp_path / "a", "dedup"), out, ExportOptions("jsonl"))
    run = make_run(tmp_path / "b", "clean")
    run.write_atomic("takedowns/pending.json", b"{}")
    with pytest.raises(ContractError, match="expected no unfinished takedown"):
        prepare_export(run, out, ExportOptions("jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": ("gopher_num_word",)}, "'gopher_num_word' (did you mean 'gopher_num_words'?)"),
        ({"signals": ("num_words",)}, "'num_words' (did you mean 'gopher_num_words'?)"),
        (
            {"signals": ("gopher_num_words", "dclm_num_words", "code_lines", "toxicity_score")},
            "measured, got 'dclm_num_words', 'code_lines', 'toxicity_score', which are null in every document. Remove "
            "them, or run the recipe again: Add 'dclm' to quality.families; Add 'markup' to quality.families; Set "
            "toxicity.classifier. Measured: ",
        ),
        ({"signals": ("drop_rule",)}, "expected signals of"),
        ({"where": "langage = de"}, "did you mean 'language'?"),
        ({"shard_bytes": 10}, "export --shard-size: expected 1,024 bytes to 4 GB, got 10 bytes"),
    ],
)
def test_wrong_options_are_refused(run: Store, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare_export(run, Store(str(tmp_path)), ExportOptions("jsonl", **options), UNMEASURED)
    assert not [*tmp_path.iterdir()]


def test_tables_that_cannot_be_exported_are_refused(run: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected one of documents, text, .*, got 'tokens'"):
        prepare_table_export(run, "tokens", Store(str(tmp_path)), "jsonl")
    with pytest.raises(ConfigError, match="expected --format jsonl or parquet, got huggingface-dataset"):
        prepare_table_export(run, "clean", Store(str(tmp_path)), "huggingface-dataset")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "megatron", "--step", "3"], "export --step: expected --format huggingface, got megatron."),
        (
            ["--format", "jsonl", "--licence", "x"],
            "export --licence: expected --format huggingface-dataset, got jsonl.",
        ),
        (
            ["--format", "parquet", "--compression", "gzip"],
            "--compression: expected --format jsonl, got parquet",
        ),
        (["--format", "jsonl", "--table", "clean", "--where", "x = 1"], "got --where. Remove --where."),
        (["--format", "huggingface", "--signals", "all"], "export --signals: expected --format jsonl or parquet or"),
        (["--format", "jsonl"], "expected a run folder, got a folder without a recipe"),
    ],
)
def test_the_command_refuses_options_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    parser = ArgumentParser()
    parser.add_argument("run")
    add_export_arguments(parser)
    add_trust(parser)
    arguments = parser.parse_args([str(tmp_path), "--out", str(tmp_path / "out"), *words])
    assert exit_code_of(lambda: export_command(arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("256MB", 256_000_000), ("1.5 gb", 1_500_000_000), ("100k", 100_000), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_without_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a size such as 256MB or 1GB, got 'big'"):
        parse_size("big")


# --------------------------------------------------------------------------------------------------------- takedown


def test_documents_that_were_taken_down_are_not_exported(tmp_path: Path) -> None:
    records = [Record(title=f"T{n}", text="raw", language="en", chars=9, meta=meta) for n, meta in enumerate(METAS)]
    run = make_run(tmp_path / "run", "clean", records)
    removed = identifier(0)
    assert take_down(run.uri, doc=[removed.hex()[:12]]) == 0
    (blank,) = [row for row in rows_of(tmp_path / "run", "documents") if row["doc_id"] == removed]
    assert (blank["drop_stage"], blank["meta"], blank["licence"], blank["url"]) == ("takedown", None, None, None)
    assert '"by":"ann"' not in repr(rows_of(tmp_path / "run", "documents") + rows_of(tmp_path / "run", "clean"))
    content = export(run, tmp_path / "out", "jsonl")
    assert (content["counts"]["exported"], content["counts"]["clean"]) == (2, 2)
    assert removed.hex() not in [row["id"] for row in lines_of(tmp_path / "out")]
