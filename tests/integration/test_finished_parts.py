"""Parts that versions of a table share: a run with one archive more reads this archive and no other."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline.engine.code_digest import code_digest
from pipeline.engine.finished_parts import FOLDER
from pipeline.forecast import plan_steps
from pipeline.garbage import LOST_PART, OTHER_CODE, STALE, UNREADABLE, find_garbage
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.errors import ContractError
from schemas.manifest import current_tables, open_table
from schemas.storage import Store
from tests.support.demo_run import RECIPE, SMALL

pytestmark = pytest.mark.spark
TAKEN_OVER = ("documents", "verdicts", "clean")
"""The steps whose parts later versions take over."""


class Killed(BaseException):
    """In place of the end of a process."""


@pytest.fixture(scope="module")
def archives(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archives")
    for path in sorted(crawl.glob("*.warc.gz")):
        shutil.copy2(path, folder)
    assert len(list(folder.iterdir())) >= 3
    return folder


def run_on(spark, archives: Path, folder: Path, pattern: str = "*", until: str | None = None, more=()) -> Store:
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{archives}/{pattern}.warc.gz"]', *SMALL, *more])
    run_steps(spark, prepare(recipe, until), Store(str(folder)), 2)
    return Store(str(folder))


def written(run: Store, table: str) -> tuple[int, int]:
    """Return the numbers of files that the current version of a table has in its own folder, and in other versions."""
    paths = open_table(run, table)[1].run.paths.values()
    others = sum(path.startswith("../") for path in paths)
    return len(paths) - others, others


@pytest.fixture(scope="module")
def grown(spark, archives: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of two archives that all others were added to, and what the second run printed."""
    folder = tmp_path_factory.mktemp("grown") / "run"
    run_on(spark, archives, folder, "demo-00[01]")
    said: list[str] = []
    with mock.patch("pipeline.engine.progress.Progress.say", lambda self, line, **fields: said.append(line)):
        run_on(spark, archives, folder)
    return folder, said


def test_only_added_archives_are_read_and_every_table_is_that_of_a_run_on_all(
    spark, archives: Path, grown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run, said = Store(str(grown[0])), grown[1]
    number = len(list(archives.iterdir()))
    assert written(run, "documents") == written(run, "text") == (number - 2, 2)
    assert f"2 of {number:,} parts are those of an earlier version of the table" in said
    whole = run_on(spark, archives, tmp_path / "whole")
    assert {name: table.manifest.digest for name, table in current_tables(run).items()} == {
        name: table.manifest.digest for name, table in current_tables(whole).items()
    }
    notes = open_table(run, "documents")[1].run.notes
    assert notes["cpu"].keys() == open_table(whole, "documents")[1].run.notes["cpu"].keys()
    assert main(["verify", str(grown[0])]) == 0


def test_a_version_with_other_settings_takes_over_nothing(
    spark, archives: Path, grown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder = shutil.copytree(grown[0], tmp_path / "run")
    run = run_on(spark, archives, folder, until="documents", more=["extract.links=true"])
    assert written(run, "documents")[1] == 0


def test_a_changed_archive_is_read_again(spark, archives: Path, grown: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, copies = shutil.copytree(grown[0], tmp_path / "run"), shutil.copytree(archives, tmp_path / "archives")
    first = min(copies.iterdir())
    os.utime(first, ns=(0, first.stat().st_mtime_ns + 1))
    run = run_on(spark, copies, folder, until="documents")
    assert written(run, "documents") == (1, len(list(copies.iterdir())) - 1)


def test_a_restored_archive_is_read_again(spark, archives: Path, tmp_path: Path) -> None:
    """The error asks for the old file, so the parts of the changed one must not be taken over afterwards."""
    copies, links = shutil.copytree(archives, tmp_path / "archives"), ["extract.links=true"]
    first = copies / "demo-000.warc.gz"
    before, times = first.read_bytes(), first.stat()
    run_on(spark, copies, tmp_path / "run", "demo-00[01]", until="documents")
    first.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ContractError, match="although size and modification time are unchanged"):
        run_on(spark, copies, tmp_path / "run", "demo-00[01]", until="documents", more=links)
    first.write_bytes(before)
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len([*(tmp_path / "run" / FOLDER / "documents").iterdir()]) == 2  # of the other archive, with both settings
    run = run_on(spark, copies, tmp_path / "run", "demo-00[01]", until="documents", more=links)
    other = run_on(spark, copies, tmp_path / "other", "demo-00[01]", until="documents", more=links)
    tables = [current_tables(each) for each in (run, other)]
    assert len({tuple(table.manifest.digest for table in each.values()) for each in tables}) == 1


def test_parts_of_other_code_are_written_again(
    spark, archives: Path, grown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder = shutil.copytree(grown[0], tmp_path / "run")
    for path in (folder / FOLDER / "documents").iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "another"}))
    run = run_on(spark, archives, folder, "demo-00[02]", until="documents")
    assert written(run, "documents") == (2, 0)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"files": 1}', "[" * 100_000])
def test_a_damaged_result_is_replaced(
    spark, archives: Path, grown: tuple[Path, list[str]], tmp_path: Path, content: str
) -> None:
    folder = shutil.copytree(grown[0], tmp_path / "run")
    for path in (folder / FOLDER / "documents").iterdir():
        path.write_text(content)
    prepared = prepare(recipe_of(archives, "demo-00[02]"), "documents")
    assert plan_steps(prepared, Store(str(folder)))[0].state == "to build"
    if content == "{}":  # each takes seconds
        run = run_on(spark, archives, folder, "demo-00[02]", until="documents")
        assert written(run, "documents") == (2, 0)
        assert plan_steps(prepare(recipe_of(archives, "demo-002"), None), run)[0].state.endswith(
            "1 of 1 parts are written"
        )


def test_a_larger_run_takes_over_the_parts_of_a_killed_one(spark, archives: Path, tmp_path: Path) -> None:
    with mock.patch("pipeline.run.commit", side_effect=Killed), pytest.raises(Killed):
        run_on(spark, archives, tmp_path / "run", "demo-00[01]")
    plan = plan_steps(prepare(recipe_of(archives), None), Store(str(tmp_path / "run")))
    number = len(list(archives.iterdir()))
    assert plan[0].state == f"to build, 2 of {number:,} parts are written"
    run = run_on(spark, archives, tmp_path / "run", until="documents")
    assert written(run, "documents") == (number - 2, 2)
    assert find_garbage(run) == []


def recipe_of(archives: Path, pattern: str = "*"):
    return read_recipe(str(RECIPE), [f'source.paths=["{archives}/{pattern}.warc.gz"]', *SMALL])


def test_gc_keeps_what_a_run_would_take_over(
    spark, archives: Path, grown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder = shutil.copytree(grown[0], tmp_path / "run")
    assert find_garbage(Store(str(folder))) == []
    first, second, third = sorted((folder / FOLDER / "documents").iterdir())[:3]
    first.write_text("{")
    second.write_text(json.dumps(json.loads(second.read_text()) | {"code": "another"}))
    lost = json.loads(third.read_text())
    lost["files"]["text"]["path"] = "v-0123456789ab/part-00000-aaaaaaaaaaaa.parquet"
    third.write_text(json.dumps(lost))
    expected = {first: UNREADABLE, second: OTHER_CODE, third: LOST_PART}
    assert {each.path: each.why for each in find_garbage(Store(str(folder)))} == {
        path.relative_to(folder).as_posix(): why for path, why in expected.items()
    }
    assert main(["gc", str(folder)]) == 0
    run = run_on(spark, archives, folder)  # complete
    assert len(list((folder / FOLDER / "documents").iterdir())) == len(list(archives.iterdir())) - 3
    assert main(["verify", run.uri]) == 0


def test_parts_of_a_killed_run_are_garbage_when_another_version_was_completed_later(
    spark, archives: Path, tmp_path: Path
) -> None:
    with mock.patch("pipeline.run.commit", side_effect=Killed), pytest.raises(Killed):
        run_on(spark, archives, tmp_path / "run", "demo-00[01]", more=["extract.links=true"])
    run = run_on(spark, archives, tmp_path / "run", "demo-002", until="documents")
    garbage = find_garbage(run)
    assert {each.why for each in garbage} == {STALE}
    assert sum(each.path.startswith(FOLDER) for each in garbage) == 2
    assert sum(each.path.endswith(".parquet") for each in garbage) == 4


def test_a_damaged_shared_file_is_found_and_repaired(
    spark, archives: Path, grown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder = shutil.copytree(grown[0], tmp_path / "run")
    table, manifest = open_table(Store(str(folder)), "documents")
    shared = next(path for path in manifest.run.paths.values() if path.startswith("../"))
    place = Path(table.path(shared))
    before = place.read_bytes()
    place.write_bytes(before[:100] + bytes([before[100] ^ 1]) + before[101:])
    assert main(["verify", str(folder)]) == 2
    assert main(["repair", str(folder)]) == 0
    assert place.read_bytes() == before
    assert main(["verify", str(folder)]) == 0


def test_a_takedown_leaves_no_result(grown: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder = shutil.copytree(grown[0], tmp_path / "run")
    assert main(["takedown", str(folder), "--domain", "www.tern.example"]) == 0
    assert [*(folder / FOLDER).rglob("*.json")] == []
    assert main(["verify", str(folder)]) == 0
    assert find_garbage(Store(str(folder))) == []


def test_results_name_their_code(grown: tuple[Path, list[str]]) -> None:
    for step in TAKEN_OVER:
        stored = [json.loads(path.read_text()) for path in (grown[0] / FOLDER / step).iterdir()]
        assert {each["code"] for each in stored} == {code_digest()}


def test_a_dry_run_counts_the_written_parts_of_rows_with_parents(spark, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"text": f"A text of {name}.", "of": "http://a.org/"}) + "\n"
        )

    def recipe(names: str):
        return read_recipe("web", [f'source.paths=["{tmp_path}/[{names}].jsonl"]', "source.parents_field=of"])

    run = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(recipe("a"), "documents"), run, 2)
    (plan,) = plan_steps(prepare(recipe("ab"), "documents"), run)
    assert plan.state == "to build, 1 of 2 parts are written"
