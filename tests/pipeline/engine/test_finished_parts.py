"""Where the results of parts that versions share are stored, and which paths they may name."""

from pathlib import Path

import pytest

from pipeline.engine.finished_parts import FINISHED, FinishedPart, FinishedParts, delete_finished_parts
from schemas.errors import ContractError
from schemas.storage import Store

OLD, NEW = "v-0123456789ab", "v-ba9876543210"


def parts_in(folder: Path) -> FinishedParts:
    return FinishedParts(Store(str(folder)), "run", {"web": "of web", "books": "of books"})


def test_a_name_follows_from_all_that_a_part_is_made_from(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    places = [
        parts.part([["a", 1]]),
        parts.part([["a", 2]]),
        *(parts.part([["a", 1]], own) for own in ("web", "books")),
    ]
    assert len({place.name for place in places}) == 4
    assert parts.part([["a", 1]]) == places[0]
    assert all(FINISHED.fullmatch(f"finished_parts/clean/{place.name}") for place in places)


def test_paths_are_relative_to_the_version_that_names_them(tmp_path: Path) -> None:
    part = FinishedPart(Store(str(tmp_path)), "x.json")
    old, new = Store(str(tmp_path / "clean" / OLD)), Store(str(tmp_path / "clean" / NEW))
    stored = part.stored_path("part-00000-a.parquet", old)
    assert stored == f"{OLD}/part-00000-a.parquet"
    assert part.path_in(old, stored) == "part-00000-a.parquet"
    assert part.path_in(new, stored) == f"../{OLD}/part-00000-a.parquet"
    assert new.path(part.path_in(new, stored)) == old.path("part-00000-a.parquet")


@pytest.mark.parametrize(
    "path", ["", "x.parquet", "../x.parquet", f"{OLD}/../../x", f"../{OLD}/x", f"{OLD}/", "/etc/passwd", f"{OLD}//x"]
)
def test_a_stored_path_stays_in_the_folder_of_its_table(tmp_path: Path, path: str) -> None:
    with pytest.raises(ContractError, match=r"x\.json: expected a file of a version of a table, got .* Delete"):
        FinishedPart(Store(str(tmp_path)), "x.json").path_in(Store(str(tmp_path / NEW)), path)


def test_results_are_not_deleted_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    result = outside / f"{'0' * 32}.json"
    result.write_text("{}")
    (tmp_path / "run" / "finished_parts").mkdir(parents=True)
    (tmp_path / "run" / "finished_parts" / "clean").symlink_to(outside)
    with pytest.raises(ContractError, match="symbolic link"):
        delete_finished_parts(Store(str(tmp_path / "run")))
    assert result.exists()


def test_only_results_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "finished_parts" / "clean"
    folder.mkdir(parents=True)
    for name in (f"{'0' * 32}.json", "mine.json"):
        (folder / name).write_text("{}")
    delete_finished_parts(Store(str(tmp_path)))
    assert [path.name for path in folder.iterdir()] == ["mine.json"]
    delete_finished_parts(Store(str(tmp_path / "nothing")))
