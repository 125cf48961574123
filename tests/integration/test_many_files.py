"""A source of many small files: they share parts, and the run has the same documents as with a part for each file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline.inspect.diff import compare_runs, open_compared_run
from pipeline.prepare import prepare
from pipeline.run import run_steps
from pipeline.sources import splits
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.paths import ROOT
from train.trace.documents import _PartFile

pytestmark = pytest.mark.spark
FILES = 24
SENTENCE = "The penstock of valley {0} carries the water of lake {0} down to turbine {0}, and its gate can be closed. "


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number in range(FILES):
        lines = [
            json.dumps({"url": f"https://example.org/{number}/{line}", "text": SENTENCE.format(number * 10 + line) * 6})
            for line in range(number % 3)  # every third file is empty
        ]
        (folder / f"{number:03}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def runs(spark: Any, files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """The run whose files share parts, and the run in which each has its own."""
    found = []
    for most in (8, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splits, "MAX_OWN_PARTS", most)
            patch.setattr(splits, "SHARED_FILES", 7)
            paths = f'source.paths=["{files}/*.jsonl"]'
            changes = [paths, "language.min_score=0", "quality.rules=[]"]
            recipe = read_recipe(str(ROOT / "jobs/recipes/demo.toml"), changes)
            store = Store(str(tmp_path_factory.mktemp("run")))
            run_steps(spark, prepare(recipe, "clean"), store, 2)
            found.append(store)
    return found[0], found[1]


def rows_of(run: Store, table: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths.values() for row in pq.read_table(folder.path(path)).to_pylist()]


@pytest.mark.parametrize("table", ["documents", "text", "clusters", "dedup", "clean"])
def test_the_rows_are_the_same(runs: tuple[Store, Store], table: str) -> None:
    shared, single = (rows_of(run, table) for run in runs)
    if table == "clusters":  # the order of documents has the number of the part
        shared, single = ([row["doc_id"] for row in rows] for rows in (shared, single))
    assert shared == single
    assert len(shared) > 0


def test_the_manifest_names_the_part_of_every_file(runs: tuple[Store, Store]) -> None:
    shared, single = (open_table(run, "documents")[1] for run in runs)
    assert Counter(parts[0] for parts in shared.parts_of_inputs.values()) == {0: 7, 1: 7, 2: 7, 3: 3}
    assert [*single.parts_of_inputs.values()] == [range(number, number + 1) for number in range(FILES)]
    assert [entry.part for entry in single.content.inputs] == [None] * FILES
    assert [entry.sha256 for entry in shared.content.inputs] == [entry.sha256 for entry in single.content.inputs]
    assert len(shared.content.files) == 4


def test_runs_with_other_parts_are_compared_file_by_file(runs: tuple[Store, Store]) -> None:
    difference = compare_runs(open_compared_run(runs[0]), open_compared_run(runs[1]), 3)
    assert not difference.documents
    assert not any(side.names for side in difference.unshared)
    assert difference.kept[0] == difference.kept[1] > 0


def test_the_row_of_a_document_is_found_in_a_shared_part(runs: tuple[Store, Store]) -> None:
    folder, manifest = open_table(runs[0], "documents")
    rows = [row for row in rows_of(runs[0], "documents") if row["doc_id"] is not None]
    files = [_PartFile("documents", folder, path, is_sorted=False) for path in manifest.paths.values()]
    for row in rows:
        file = files[manifest.parts_of_inputs[row["split"]][0]]
        assert file.row(row["doc_id"], row["offset"], ["url"]) == {"url": row["url"]}


def test_a_damaged_part_of_several_files_is_repaired(runs: tuple[Store, Store], capsys: Any) -> None:
    folder, manifest = open_table(runs[0], "documents")
    path = Path(folder.path(manifest.paths["part-00002"]))
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "MAX_OWN_PARTS", 8)
        patch.setattr(splits, "SHARED_FILES", 7)
        main(["repair", runs[0].root])
    assert path.read_bytes() == whole
    assert "part-00002" in capsys.readouterr().out
