"""Damaged tables: no step reads them, and a repair builds exactly the damaged files again, with the same digests."""

import shutil
from pathlib import Path

import pytest

from jobs.cli import main
from jobs.recipe import stored_recipe
from pipeline.garbage import REPAIR
from pipeline.repair import find_damage, own_tables, repair, steps_to_repair
from pipeline.run import prepare
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
