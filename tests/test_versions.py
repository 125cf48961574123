"""Versions by digest, dvc.yaml, and tables that DuckDB, Dask and Hugging Face datasets open as they are."""

import argparse
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import yaml
from lineage_run import edit, join_dataset, next_version
from report_run import make_run
from test_diff import write_manifest_lineage

from jobs.versions import FIRST_LINE, dvc_command, dvc_stages, fixed_part
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import PinnedRun, pinned_tables, run_at, standing_versions


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """The synthetic crawl with one dataset."""
    found = make_run(tmp_path / "run")
    join_dataset(found)
    write_manifest_lineage(found)
    return found


@pytest.fixture
def digests(run: Store) -> list[str]:
    """Digests of two datasets of the run; it stands on the second."""
    first = next_version(run, "tokens", lambda content: content["figures"].update(chunk_tokens=512))
    return [first, open_table(run, "tokens")[1].digest]


# ----------------------------------------------------------------------------------------------------------- by digest


def test_a_digest_opens_its_dataset(run: Store, digests: list[str]) -> None:
    assert [open_dataset(run_at(f"{run.uri}@{digest[:12]}")).digest for digest in digests] == digests
    assert [open_dataset(run_at(f"{run.uri}@{digest}")).chunk_tokens for digest in digests] == [256, 512]
    assert list(standing_versions(run, "tokens")) == ["v-next", "v-tiny"]
    pinned = run_at(f"{run.uri}@{digests[0]}")
    assert read_run(pinned).tables == dict.fromkeys(
        ("tokens", "tokenizer", "clean", "documents", "dedup", "verdicts"), "v-tiny"
    )


def test_the_current_version_and_a_plain_folder_are_the_run_itself(run: Store, digests: list[str]) -> None:
    assert not isinstance(run_at(f"{run.uri}@{digests[1][:12]}"), PinnedRun)
    assert not isinstance(run_at(run.uri), PinnedRun)
    assert run_at("s3://key:secret@host/bucket/run".replace("s3://", "")).uri.endswith("key:secret@host/bucket/run")


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run@abcdef")
    assert run_at(run.uri).uri == run.uri


def test_any_table_can_be_addressed(run: Store) -> None:
    digest = open_table(run, "dedup")[1].digest
    next_version(run, "dedup", lambda content: content["figures"].update(bait=1))
    assert read_run(run_at(f"{run.uri}@{digest[:10]}")).tables == {"dedup": "v-tiny", "verdicts": "v-tiny"}


def test_a_version_is_only_read(run: Store, digests: list[str]) -> None:
    pinned = run_at(f"{run.uri}@{digests[0]}")
    with pytest.raises(
        ContractError, match=r"train/plan\.json: promised to an earlier version of the run, which is only"
    ):
        pinned.write_atomic("train/plan.json", b"{}")
    again = pickle.loads(pickle.dumps(pinned))
    assert (type(again), again.uri, again.tables) == (PinnedRun, run.uri, pinned.tables)
    assert open_dataset(again).digest == digests[0]


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("12", "promised a digest behind @, 6 to 64 hex digits, found '12'"),
        ("latest", "promised a digest behind @, 6 to 64 hex digits, found 'latest'"),
        ("", "promised a digest behind @, 6 to 64 hex digits, found ''"),
        ("000000", "promised a version of this digest, found none; its datasets are {0}, {1}"),
    ],
)
def test_a_wrong_digest_is_refused(run: Store, digests: list[str], suffix: str, expected: str) -> None:
    names = [table.manifest.digest[:12] for table in standing_versions(run, "tokens").values()]
    assert sorted(names) == sorted(digest[:12] for digest in digests)
    with pytest.raises(ConfigError, match=expected.format(*names)):
        run_at(f"{run.uri}@{suffix}")


def test_a_digest_that_two_versions_begin_with_is_refused(run: Store) -> None:
    folder = Path(run.uri) / "tokens"
    shutil.copytree(folder / "v-tiny", folder / "v-copy")
    digest = open_table(run, "tokens")[1].digest
    with pytest.raises(ConfigError, match="promised one version, found tokens/v-copy, tokens/v-tiny; give more digits"):
        run_at(f"{run.uri}@{digest[:12]}")


def test_an_altered_manifest_has_lost_its_address(run: Store, digests: list[str]) -> None:
    edit(run, "tokens", lambda content: content["figures"].update(bait=1))
    with pytest.raises(ConfigError, match="promised a version of this digest, found none"):
        run_at(f"{run.uri}@{digests[0][:12]}")


def test_tables_of_two_pieces_are_refused(run: Store) -> None:
    next_version(run, "documents", lambda content: content["figures"].update(bait=1))
    name = "verdicts/v-tiny/manifest.json"
    manifest = run.read_json(name)
    manifest["run"]["lineage"] = {"documents": "v-next", "input:x": "1:2"}
    run.write_atomic(name, json.dumps(manifest).encode())
    with pytest.raises(ContractError, match="promised tables of one piece, found it made from documents/v-"):
        pinned_tables(run, "tokens", "v-tiny")


# ----------------------------------------------------------------------------------------------------------------- DVC

RECIPE = '[source]\npaths = ["crawl/*.warc.gz", "s3://bucket/more/*.warc.gz"]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a recipe."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_dvc(out: str = "run", *overrides: str) -> dict[str, Any]:
    """The stages of the dvc.yaml that is written."""
    assert dvc_command(argparse.Namespace(recipe="recipe.toml", out=out, overrides=list(overrides))) == 0
    found: dict[str, Any] = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]
    return found


def test_the_stages_follow_the_steps(folder: Path) -> None:
    stages = write_dvc("runs/one", "quality.min_words=60", "tokens.seed=2")
    assert list(stages) == [
        *("documents", "verdicts", "clusters", "dedup", "audit", "clean", "tokenizer", "tokens", "train", "report")
    ]
    given = "--set quality.min_words=60 --set tokens.seed=2"
    assert stages["clean"]["cmd"] == [f"penstock stage clean recipe.toml --out runs/one {given}"]
    assert stages["train"]["cmd"] == ["penstock plan runs/one --quiet", "penstock train runs/one"]
    assert stages["documents"]["deps"] == ["recipe.toml", "crawl"]
    assert stages["tokens"]["deps"] == ["recipe.toml", "runs/one/clean", "runs/one/tokenizer"]
    kept = {"cache": False, "persist": True}
    assert stages["documents"]["outs"] == [{"runs/one/documents": kept}, {"runs/one/text": kept}]
    assert stages["train"]["metrics"] == [{"runs/one/train/manifest.json": kept}]
    outs = [path for stage in stages.values() for out in stage["outs"] + stage.get("metrics", []) for path in out]
    assert len(set(outs)) == len(outs)
    written = {"recipe.toml", "crawl", *outs}
    assert all(dep in written for stage in stages.values() for dep in stage["deps"])


def test_a_setting_with_spaces_quotes_and_braces_stays_one_word(folder: Path) -> None:
    found = dvc_stages("recipe.toml", "run", ["source.name=a", "tokens.seed=1"])[0].commands[0]
    assert found[-4:] == ("--set", "source.name=a", "--set", "tokens.seed=1")
    stages = write_dvc("run", "language.languages=['en', 'de']")
    assert "--set 'language.languages=['" in stages["clean"]["cmd"][0]


def test_only_a_file_of_its_own_is_replaced(folder: Path) -> None:
    write_dvc()
    assert Path("dvc.yaml").read_text().startswith(FIRST_LINE)
    write_dvc("other")
    assert "other/clean" in Path("dvc.yaml").read_text()
    Path("dvc.yaml").write_text("stages: {}\n")
    with pytest.raises(ConfigError, match=r"dvc\.yaml: promised a file that `penstock dvc` wrote, found another one"):
        write_dvc()


@pytest.mark.parametrize("out", ["s3://bucket/run", "/elsewhere/run", "../run", "."])
def test_a_run_that_dvc_cannot_look_after_is_refused(folder: Path, out: str) -> None:
    with pytest.raises(ConfigError, match=r"dvc --out: promised a run folder below .*, found "):
        write_dvc(out)
    assert not Path("dvc.yaml").exists()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("crawl/*.warc.gz", "crawl"),
        ("crawl/2024/**/a.warc", "crawl/2024"),
        ("a.jsonl", "a.jsonl"),
        ("*.jsonl", "."),
        ("/data/x[12]/a", "/data"),
        ("/*", "/"),
    ],
)
def test_the_fixed_part_of_a_pattern(pattern: str, expected: str) -> None:
    assert fixed_part(pattern) == expected


@pytest.mark.spark
def test_dvc_runs_the_stages_and_skips_what_stands(folder: Path) -> None:
    dvc = shutil.which("dvc")
    if dvc is None:
        pytest.skip("dvc is not installed on the PATH")
    from pipeline.demo_crawl.build import build_demo_crawl

    build_demo_crawl(folder / "crawl", 100, 1)
    Path("recipe.toml").write_text('[source]\npaths = ["crawl/*.warc.gz"]\n')
    write_dvc()
    environment = {"PATH": f"{Path(sys.executable).parent}:{Path(dvc).parent}:/usr/bin:/bin", "HOME": str(folder)}

    def call(*words: str) -> str:
        done = subprocess.run([dvc, *words], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call("init", "-q", "--no-scm")
    assert "Running stage 'verdicts'" in call("repro", "verdicts")
    assert {*read_run(Store("run")).tables} == {"documents", "text", "verdicts"}
    assert "Stage 'verdicts' didn't change, skipping" in call("repro", "verdicts")
    before = open_table(Store("run"), "documents")[1].digest
    Path("recipe.toml").write_text('[source]\npaths = ["crawl/*.warc.gz"]\n[quality]\nmin_words = 70\n')
    assert "Running stage 'verdicts'" in call("repro", "verdicts")
    assert open_table(Store("run"), "documents")[1].digest == before
    assert len(standing_versions(Store("run"), "verdicts")) == 2


# -------------------------------------------------------------------------------------------------- tables of others


def parts(run: Store, table: str) -> list[str]:
    """Paths of the parts of a table."""
    folder, manifest = open_table(run, table)
    return [folder.path(path) for path in manifest.paths_of()]


def shards(run: Store) -> list[str]:
    """Paths of the token shards of one stream."""
    dataset = open_dataset(run)
    return [dataset.folder.path(shard.path) for shard in dataset.streams["web/train"]]


@pytest.mark.parametrize("table", ["documents", "text", "verdicts", "dedup", "clean"])
def test_duckdb_opens_the_tables(run: Store, table: str) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    found = duckdb.connect().execute(
        "select count(*), count(distinct doc_id) from read_parquet(?)", [parts(run, table)]
    )
    rows = sum(entry.rows for entry in open_table(run, table)[1].content.files)
    assert found.fetchall() == [(rows, rows)]


def test_duckdb_joins_counts_and_reads_shards(run: Store) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    query = "select drop_rule, count(*) from read_parquet(?) where drop_stage is not null group by all order by all"
    found = dict(duckdb.connect().execute(query, [parts(run, "verdicts")]).fetchall())
    assert found == {"c4_lorem_ipsum": 1, "gopher_short_doc": 6, "toxic_word_share": 3}
    emails = "select sum(pii_counts['email']) from read_parquet(?)"
    assert duckdb.connect().execute(emails, [parts(run, "clean")]).fetchall() == [(6,)]
    tokens = pads.dataset(shards(run), format="ipc")
    connection = duckdb.connect()
    connection.register("shards", tokens)
    (total,) = connection.execute("select sum(len(tokens)) from shards").fetchall()[0]
    assert total == open_dataset(run).num_tokens()["web"]


@pytest.mark.parametrize("table", ["documents", "text", "verdicts", "dedup", "clean"])
def test_dask_opens_the_tables(run: Store, table: str) -> None:
    frames = pytest.importorskip("dask.dataframe", reason="dask[dataframe] is not installed")
    frame = frames.read_parquet(parts(run, table))
    assert len(frame) == sum(entry.rows for entry in open_table(run, table)[1].content.files)
    assert list(frame.columns) == pq.read_schema(parts(run, table)[0]).names


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hugging Face datasets, with a cache of its own and no network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("datasets", reason="datasets is not installed")


def test_datasets_opens_tables_without_maps_as_they_are(run: Store, hub: Any, tmp_path: Path) -> None:
    for table in ("text", "verdicts", "dedup"):
        found = hub.load_dataset("parquet", data_files=parts(run, table), split="train", cache_dir=str(tmp_path))
        assert found.num_rows == sum(entry.rows for entry in open_table(run, table)[1].content.files)


def test_datasets_opens_the_columns_of_a_table_that_are_no_maps(run: Store, hub: Any, tmp_path: Path) -> None:
    """`datasets` 5.2 knows no Arrow maps: of `documents` and `clean` it is told which columns to read."""
    schema = pq.read_schema(parts(run, "clean")[0]).remove_metadata()
    plain = pa.schema([field for field in schema if not pa.types.is_map(field.type)])
    features = hub.Features.from_arrow_schema(plain)
    given = {"data_files": parts(run, "clean"), "split": "train", "cache_dir": str(tmp_path)}
    found = hub.load_dataset("parquet", columns=plain.names, features=features, **given)
    assert (found.num_rows, found[0]["text"]) == (20, "…")


def test_datasets_opens_shards_as_they_are(run: Store, hub: Any, tmp_path: Path) -> None:
    found = hub.load_dataset("arrow", data_files=shards(run), split="train", cache_dir=str(tmp_path))
    assert sum(map(len, found["tokens"])) == open_dataset(run).num_tokens()["web"]


def test_pyarrow_opens_shards_and_parts_as_datasets(run: Store) -> None:
    tokens = pads.dataset(shards(run), format="ipc")
    lengths = [len(row) for row in tokens.to_table().column("tokens").to_pylist()]
    assert sum(lengths) == open_dataset(run).num_tokens()["web"]
    assert pads.dataset(parts(run, "documents"), format="parquet").count_rows() == 53
