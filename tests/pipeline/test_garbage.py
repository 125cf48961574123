"""`penstock gc`: what killed processes left goes, and what a manifest, another run or a resumed step uses stays."""

import fcntl
import json
import os
import posixpath
import shutil
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from jobs.cli import main
from pipeline.engine.part import PartTarget, TableTarget, write_part
from pipeline.garbage import (
    HALF_CHECKPOINT,
    HALF_WRITE,
    LEFT_PART,
    OTHER_CODE,
    REPLACED_PART,
    STALE,
    TAKEN_DOWN,
    UNNAMED,
    UNREADABLE,
    find_garbage,
    remove_garbage,
)
from schemas.errors import ConfigError, ContractError
from schemas.lock_files import TABLES_LOCK
from schemas.manifest import MANIFEST_NAME, open_table, read_run
from schemas.storage import Store
from schemas.takedown import PENDING_NAME
from schemas.tokens import open_dataset
from schemas.union import write_union
from schemas.versions import attach_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of, opened, take_down

NEW = "v-0123456789ab"
"""A version that is not complete."""
VALUES = pa.schema([pa.field("value", pa.int64())])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_tiny_dataset(tmp_path / "run", {"web": 30, "books": 10})
    return tmp_path / "run"


def put(path: Path, text: str = "x", changed: float | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if changed is not None:
        os.utime(path, (changed, changed))


def reasons(run: Path) -> dict[str, str]:
    return {each.path: each.why for each in find_garbage(Store(str(run)))}


def every_file(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def two_tables(run: Path, ordinal: int, code: str | None = None):
    """Write a part of two tables of a step, as a run does that is killed later."""

    def fill(output):
        output.write({"value": ordinal})
        output.books.enter({}, 1)

    tables = {name: TableTarget(Store(str(run / name / NEW)), VALUES) for name in ("documents", "text")}
    with mock.patch("pipeline.engine.part.code_digest", return_value=code) if code else mock.MagicMock():
        return write_part(PartTarget(ordinal, tables), fill)


def test_a_whole_run_has_no_garbage(run: Path) -> None:
    assert reasons(run) == {}
    before = every_file(run)
    assert main(["gc", str(run)]) == 0
    assert every_file(run) == before


def test_leftovers_of_committed_versions_go(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = read_run(Store(str(run))).tables["tokens"]
    before = every_file(run)
    left = {
        f"tokens/{version}/web/train/00000.tokens-aaaaaaaaaaaa.arrow": UNNAMED,
        f"tokens/{version}/parts/part-00000.json": REPLACED_PART,
        f"tokens/{version}/scratch/round-0.json": REPLACED_PART,
        f"tokens/{version}/scratch/components/pairs-0-bbbbbbbbbbbb.arrow": UNNAMED,
        "run.json.01234567.partial": HALF_WRITE,
        "train/plan.json.89abcdef.partial": HALF_WRITE,
        "train/checkpoints/step-000020/__0_0.distcp": HALF_CHECKPOINT,
    }
    for name in left:
        put(run / name, "{}")
    kept = {"notes.txt": "mine", "train/checkpoints/step-000010/checkpoint.json": "{}", "train/x.partial": "mine"}
    kept |= {"train/checkpoints/step-000010/__0_0.distcp": "state", "exports/tokens/v-x/data.jsonl": "mine"}
    for name, text in kept.items():
        put(run / name, text)
    assert reasons(run) == left
    assert main(["gc", str(run), "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert every_file(run).keys() == before.keys() | left.keys() | kept.keys()
    assert "7 files, 14 bytes, would be removed; this was a dry run" in listed
    assert main(["gc", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:-1] == listed.splitlines()[:-1]
    assert out.endswith("7 files, 14 bytes, were removed\n")
    for name, why in left.items():
        assert any(line.split() == [name, "2", *why.split()] for line in out.splitlines())
    assert every_file(run) == before | {name: text.encode() for name, text in kept.items()}
    assert not (run / "tokens" / version / "scratch").exists()
    assert not (run / "train/checkpoints/step-000020").exists()


def test_completed_parts_of_an_interrupted_step_stay(run: Path) -> None:
    results = [two_tables(run, ordinal) for ordinal in range(3)]
    for name in ("documents", "text"):
        put(run / name / NEW / "part-00003-aaaaaaaaaaaa.parquet", "PAR1")
    before = every_file(run)
    stubs = {f"{name}/{NEW}/part-00003-aaaaaaaaaaaa.parquet": LEFT_PART for name in ("documents", "text")}
    assert reasons(run) == stubs
    remove_garbage(Store(str(run)), find_garbage(Store(str(run))))
    assert every_file(run).keys() == before.keys() - stubs.keys()
    assert [two_tables(run, ordinal) for ordinal in range(3)] == results  # nothing is written again


def test_stored_frames_of_an_interrupted_step_stay(run: Path) -> None:
    from pipeline.engine.code_digest import code_digest, libraries_digest

    folder = run / "clusters" / NEW / "scratch"

    def store(name: str, code: str, libraries: str) -> None:
        files = [{"path": f"{Path(name).name}-0-aaaaaaaaaaaa.arrow", "rows": 1, "bytes": 1, "batches": 1}]
        frame = {"schema": "a int", "files": files}
        made_by = {"code": code, "libraries": libraries}
        put(folder / f"{name}.json", json.dumps(made_by | {"frames": {Path(name).name: frame}}))
        put(folder / Path(name).parent / files[0]["path"])

    for name in ("round-0", "components/edges"):
        store(name, code_digest(), libraries_digest())
    store("round-1", "other code", libraries_digest())
    store("round-3", code_digest(), "other libraries")
    put(folder / "round-2-0-bbbbbbbbbbbb.arrow")
    scratch = f"clusters/{NEW}/scratch"
    assert reasons(run) == {
        f"{scratch}/round-1.json": OTHER_CODE,
        f"{scratch}/round-1-0-aaaaaaaaaaaa.arrow": LEFT_PART,
        f"{scratch}/round-3.json": OTHER_CODE,
        f"{scratch}/round-3-0-aaaaaaaaaaaa.arrow": LEFT_PART,
        f"{scratch}/round-2-0-bbbbbbbbbbbb.arrow": LEFT_PART,
    }


def test_parts_that_a_resumed_step_would_write_again_go(run: Path) -> None:
    kept, other = two_tables(run, 0), two_tables(run, 1, "other code")
    put(run / "documents" / NEW / "parts/part-00002.json", "{not JSON")
    put(run / "documents" / NEW / "parts/part-00003.json", '{"files": 1}')
    assert reasons(run) == {
        f"documents/{NEW}/parts/part-00001.json": OTHER_CODE,
        f"documents/{NEW}/parts/part-00002.json": UNREADABLE,
        f"documents/{NEW}/parts/part-00003.json": UNREADABLE,
        **{f"{table}/{NEW}/{written.path}": LEFT_PART for table, written in other.files.items()},
    }
    assert main(["gc", str(run)]) == 0
    assert two_tables(run, 0) == kept


def test_an_unfinished_version_goes_once_another_version_was_completed_later(run: Path) -> None:
    two_tables(run, 0)
    names = {name for name in every_file(run) if NEW in name}
    shutil.copytree(run / "tokens", run / "documents", dirs_exist_ok=True)  # any other version with a manifest
    (manifest,) = run.glob(f"documents/v-*/{MANIFEST_NAME}")
    os.utime(manifest, (1, 1))
    assert {name for name in reasons(run) if NEW in name} == set()
    os.utime(manifest, (9e9, 9e9))
    assert {name: why for name, why in reasons(run).items() if NEW in name} == dict.fromkeys(names, STALE)


def test_a_table_that_was_committed_before_the_first_table_of_its_step_stays(run: Path) -> None:
    """The first table is committed last, so a kill between the two leaves one manifest."""
    result = two_tables(run, 0)
    (manifest,) = run.glob(f"tokens/v-*/{MANIFEST_NAME}")
    value = json.loads(manifest.read_text())
    entry = {name: getattr(result.files["text"], name) for name in ("key", "rows", "bytes", "sha256")}
    value["content"] |= {"table": "text", "files": [entry]}
    value["run"]["paths"] = {entry["key"]: result.files["text"].path}
    put(run / "text" / NEW / MANIFEST_NAME, json.dumps(value))
    assert reasons(run) == {}


def test_what_other_runs_use_stays(run: Path, tmp_path: Path) -> None:
    attach_run(Store(str(run / "ladder/small")), Store(str(run)))
    make_tiny_dataset(tmp_path / "other", {"web": 12}, suffix="-b")
    write_union(Store(str(run / "both")), [Store(str(run)), Store(str(tmp_path / "other"))])
    put(run / "ladder/small/train/plan.json.01234567.partial")  # of a run of its own, which may be at work
    put(run / "both/tokens/v-000000000000/parts/part-00000.json", "{}")
    assert reasons(run) == {}
    # The union inside the folder names shards whose own manifest is gone.
    (manifest,) = run.glob(f"tokens/v-*/{MANIFEST_NAME}")
    manifest.unlink()
    gone = reasons(run)
    folder = posixpath.relpath(next(run.glob("both/tokens/v-*")), run)
    for path in open_table(Store(str(run / "both")), "tokens")[1].paths_of():
        assert posixpath.normpath(f"{folder}/{path}") not in gone


@pytest.mark.parametrize("keep_old", [False, True])
def test_what_a_takedown_keeps_stays_until_drop_old(run: Path, keep_old: bool) -> None:
    document = documents_of(opened(run))[8]["doc_id"].hex()
    assert take_down(run, doc=[document], keep_old=keep_old) == 0
    before = every_file(run)
    assert reasons(run) == {}
    assert main(["gc", str(run)]) == 0
    assert every_file(run) == before
    (certificate,) = (name for name in before if name.startswith("takedowns/") and name.count("/") == 1)
    assert take_down(run, check=certificate) == (1 if keep_old else 0)
    if not keep_old:
        old = next(path.parent for path in run.glob("tokens/v-*/takedown.json"))
        put(old / "web/train/00000.tokens-aaaaaaaaaaaa.arrow")
        assert reasons(run) == {
            f"tokens/{old.name}/web/train/00000.tokens-aaaaaaaaaaaa.arrow": TAKEN_DOWN,
        }
    assert main(["verify", str(run)]) == 0


def test_an_unfinished_takedown_is_finished_first(run: Path) -> None:
    put(run / PENDING_NAME, "{}")
    with pytest.raises(ConfigError, match=r"expected no unfinished takedown, .* `penstock takedown .*/run`, without"):
        find_garbage(Store(str(run)))


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_nothing_happens_while_another_process_writes(
    run: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(run / "run.json.01234567.partial")
    with open(run / TABLES_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # such as of a process that trains
        assert main(["gc", str(run), *flags]) == 2
    assert "tables.lock: expected a free lock for `penstock gc`, got one held by " in capsys.readouterr().err
    assert (run / "run.json.01234567.partial").exists()


def test_links_and_paths_out_of_the_run_are_not_followed(run: Path, tmp_path: Path) -> None:
    put(tmp_path / "outside" / "part-00000-aaaaaaaaaaaa.parquet")
    put(tmp_path / "victim.txt")
    (run / "documents").mkdir()
    (run / "documents" / NEW).symlink_to(tmp_path / "outside", target_is_directory=True)
    (run / "text" / NEW).mkdir(parents=True)
    (run / "text" / NEW / "part-00000-aaaaaaaaaaaa.parquet").symlink_to(tmp_path / "victim.txt")
    two_tables_result = {"files": {"text": {"path": "../../../victim.txt"}}, "code": "x"}
    put(run / "clean" / NEW / "parts/part-00000.json", json.dumps(two_tables_result))
    assert main(["gc", str(run)]) == 0
    assert (tmp_path / "outside" / "part-00000-aaaaaaaaaaaa.parquet").exists()
    assert (tmp_path / "victim.txt").exists()
    assert not (run / "text" / NEW).exists()


def test_files_that_a_version_on_another_disk_names_stay(run: Path, tmp_path: Path) -> None:
    """A takedown shares files between versions; then the new version is moved to another disk."""
    assert take_down(run, doc=[documents_of(opened(run))[7]["doc_id"].hex()]) == 0
    version = run / "tokens" / read_run(Store(str(run))).tables["tokens"]
    shutil.move(version, tmp_path / "disk")
    version.symlink_to(tmp_path / "disk", target_is_directory=True)
    assert main(["verify", str(run)]) == 0
    before = every_file(run)
    assert main(["gc", str(run)]) == 0
    assert every_file(run) == before
    assert main(["verify", str(run)]) == 0


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "documents" / NEW / "part-00000-aaaaaaaaaaaa.parquet")
    assert main(["gc", str(tmp_path)]) == 2
    assert "expected a run folder, got one without run.json. Correct the path." in capsys.readouterr().err
    assert (tmp_path / "documents" / NEW / "part-00000-aaaaaaaaaaaa.parquet").exists()


def test_a_damaged_manifest_stops_before_anything_is_removed(run: Path) -> None:
    (manifest,) = run.glob(f"tokens/v-*/{MANIFEST_NAME}")
    manifest.write_text("{}")
    with pytest.raises(ContractError, match="expected a valid manifest"):
        find_garbage(Store(str(run)))


def test_a_killed_removal_leaves_no_result_without_its_files(run: Path) -> None:
    """The process is killed before each of its deletions in turn; a resumed step then reads no missing file."""
    for after in range(5):
        shutil.rmtree(run / "documents", ignore_errors=True)
        shutil.rmtree(run / "text", ignore_errors=True)
        two_tables(run, 0, "other code")
        deleted: list[str] = []

        def delete(store: Store, name: str, deleted: list[str] = deleted, after: int = after) -> None:
            if len(deleted) >= after:
                raise KeyboardInterrupt
            deleted.append(name)
            os.unlink(store.path(name))

        garbage = find_garbage(Store(str(run)))
        assert len(garbage) == 3
        with mock.patch.object(Store, "delete", delete):
            try:
                remove_garbage(Store(str(run)), garbage)
            except KeyboardInterrupt:
                assert after < 3
        if list(run.glob("documents/v-*/parts/*.json")):
            assert len(list(run.glob("*/v-0123456789ab/*.parquet"))) == 2
    assert open_dataset(Store(str(run))).num_tokens()
