"""Damaged tables: no step reads them, and a repair builds exactly the damaged files again, with the same digests."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.recipe import check_addresses, stored_recipe, warn_of_spark
from jobs.spark_session import SparkConfig
from pipeline.garbage import REPAIR
from pipeline.models import ModelsConfig
from pipeline.prepare import prepare
from pipeline.repair import find_damage, own_tables, repair, steps_to_repair
from schemas.errors import ContractError
from schemas.manifest import open_table, read_run
from schemas.storage import Store

pytestmark = pytest.mark.spark


@pytest.fixture
def run(finished, tmp_path) -> Store:
    """A copy of the finished run that a test may damage."""
    shutil.copytree(finished.root, tmp_path / "run")
    return Store(str(tmp_path / "run"))


def flip(path: Path) -> None:
    """Flip one bit at a third of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def files_of(run: Store) -> dict[str, tuple[str, int]]:
    """Return SHA-256 and inode of every file that a manifest names."""
    return {
        f"{name}/{path}": (table.folder.sha256(path), Path(table.folder.path(path)).stat().st_ino)
        for name, table in own_tables(run).items()
        for path in table.manifest.paths.values()
    }


def test_a_step_refuses_a_table_with_a_flipped_bit_and_commits_nothing(run, run_at):
    folder, manifest = open_table(run, "text")
    flip(Path(folder.path(manifest.paths_of()[0])))
    before = read_run(run).tables
    with pytest.raises(
        ContractError, match=r"text/.*expected SHA-256 \w{64} .* got SHA-256 \w{64}\. Run `penstock repair"
    ):
        run_at(2, ["quality.min_words=45"], run.root)
    assert read_run(run).tables["clean"] == before["clean"]


ABLATE = ("--without", "quality.gopher_quality")


def with_recipe(run: Store, **sections: Any) -> None:
    """Add sections to the recipe in the `run.json` of a run."""
    path = Path(run.root) / "run.json"
    state = json.loads(path.read_text())
    state["recipe"] |= sections
    path.write_text(json.dumps(state))


def test_a_repair_executes_no_file_that_a_run_names(run, tmp_path, capsys):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef f(text, row): return None\n")
    with_recipe(
        run, stage=[{"name": "evil", "function": f"{tmp_path / 'evil.py'}:f", "columns": {"marks": {"type": "int32"}}}]
    )
    folder, manifest = open_table(run, "verdicts")
    flip(Path(folder.path(manifest.paths_of()[0])))
    assert main(["repair", run.root]) == 2
    assert f"expected --trust-run, because repair executes what the run names ({tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


def test_an_ablation_executes_no_file_that_a_run_names(run, tmp_path, capsys):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef f(text, row): return None\n")
    with_recipe(
        run, stage=[{"name": "evil", "function": f"{tmp_path / 'evil.py'}:f", "columns": {"marks": {"type": "int32"}}}]
    )
    assert main(["ablate", run.root, *ABLATE, "--dry-run"]) == 2
    assert f"expected --trust-run, because ablate executes what the run names ({tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("verb", ["whatif", "ablate"])
def test_credentials_go_to_no_server_that_a_run_names(run, capsys, verb):
    address = "s3://bucket/a?endpoint_override=127.0.0.1:9"
    recipe = read_run(run).recipe
    with_recipe(run, dedup={**recipe.get("dedup", {}), "indexes": [address]})
    words = [verb, run.root, *(["--set", "quality.min_words=60"] if verb == "whatif" else [*ABLATE, "--dry-run"])]
    assert main(words) == 2
    assert f"got {address} in its recipe, to which your credentials would be sent." in capsys.readouterr().err
    stored = stored_recipe(run, [f'dedup.indexes=["{address}"]'])
    check_addresses(run, stored, [f'dedup.indexes=["{address}"]'])
    check_addresses(run, stored, trust=True)


def test_an_export_starts_no_program_that_a_run_names(run, tmp_path):
    options = f"-Xlog:gc:file={tmp_path / 'executed'}"  # the JVM writes this file if it obeys
    with_recipe(run, spark={"driver_memory": "512m", "settings": {"spark.driver.extraJavaOptions": options}})
    words = ["export", run.root, "--format", "jsonl", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "jobs.cli", *words], capture_output=True, text=True, check=True)
    assert "not used, because a run folder is not trusted: spark.settings; --trust-run uses it\n" in done.stderr
    assert [*tmp_path.glob("out/**/*.jsonl*")]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"master": "local[2,4]", "driver_memory": "3g", "partitions": 4}, ["driver_memory", "master", "partitions"]),
        ({"master": "spark://evil:7077", "settings": {"spark.jars": "http://evil/a.jar"}}, []),
        ({"driver_memory": "2g -agentpath:/evil.so", "shuffle_partitions": 8}, ["shuffle_partitions"]),
    ],
)
def test_settings_of_spark_that_are_used_of_a_foreign_run(run, settings, used, capsys):
    with_recipe(run, spark=settings)
    section = stored_recipe(run, [], trust=False).section("spark", SparkConfig)
    assert sorted(section.model_fields_set) == used
    warn_of_spark(run, trust=False)
    said = capsys.readouterr().err
    assert all(f"spark.{name}" in said for name in settings.keys() - used)
    warn_of_spark(run, trust=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("cache", "offline"), [("~/.cache/penstock/models", False), ("/srv/models", True)])
def test_nothing_is_downloaded_into_a_folder_of_models_of_a_foreign_run(run, cache, offline):
    with_recipe(run, models={"cache": cache, "offline": False})
    assert stored_recipe(run, [], trust=False).section("models", ModelsConfig).offline is offline
    assert stored_recipe(run, [], trust=True).section("models", ModelsConfig).offline is False


def test_damaged_keys_stop_the_search_for_copies_with_one_sentence(run, run_at):
    """Its tasks return rows to Spark, so that Spark raises an exception of its own."""
    folder, manifest = open_table(run, "documents")
    flip(Path(folder.path(manifest.paths_of()[0])))
    with pytest.raises(ContractError, match=r"documents/.*expected SHA-256"):
        run_at(2, ["dedup.threshold=0.8"], run.root)


def damage_every_table(run: Store) -> set[str]:
    """Damage a file of every table, and two more; return their names."""
    damaged = set()
    for name, table in own_tables(run).items():
        paths = list(table.manifest.paths.values())
        chosen = [paths[0], paths[-1]] if name == "tokens" else paths[:1]
        for path in chosen:
            flip(Path(table.folder.path(path)))
            damaged.add(f"{name}/{path}")
    text, clean = (open_table(run, name) for name in ("text", "clean"))
    path = Path(text[0].path(text[1].paths_of()[1]))
    path.write_bytes(path.read_bytes()[:-7])
    Path(clean[0].path(clean[1].paths_of()[1])).unlink()
    return damaged | {f"text/{text[1].paths_of()[1]}", f"clean/{clean[1].paths_of()[1]}"}


def test_a_repair_builds_exactly_the_damaged_files_again(spark, finished, run, tmp_path):
    before = files_of(run)
    damaged = damage_every_table(run)
    found = find_damage(own_tables(run))
    assert {f"{file.table}/{file.path}" for file in found} == damaged
    prepared = prepare(stored_recipe(run, []), None)
    repaired = repair(spark, prepared, run, steps_to_repair(prepared, run, found))
    assert {*repaired} == damaged
    after = files_of(run)
    assert {name: digest for name, (digest, _) in after.items()} == {
        name: digest for name, (digest, _) in before.items()
    }
    assert {name for name in before if after[name][1] != before[name][1]} <= damaged
    assert not run.exists(REPAIR)
    assert find_damage(own_tables(run)) == []


def test_other_settings_than_those_of_the_table_are_refused_before_spark_starts(run):
    folder, manifest = open_table(run, "clean")
    flip(Path(folder.path(manifest.paths_of()[0])))
    prepared = prepare(stored_recipe(run, ['pii.types=["email"]']), None)
    with pytest.raises(ContractError, match="expected the settings, models and inputs that clean was built from"):
        steps_to_repair(prepared, run, find_damage(own_tables(run)))


def test_the_verb_lists_the_damage(run, capsys):
    assert main(["repair", run.root]) == 0
    assert "files match their manifests" in capsys.readouterr().out
    folder, manifest = open_table(run, "clusters")
    path = manifest.paths_of()[0]
    flip(Path(folder.path(path)))
    assert main(["repair", run.root, "--dry-run"]) == 2
    assert f"clusters/{path}: expected SHA-256 {path.sha256}, got " in capsys.readouterr().out
