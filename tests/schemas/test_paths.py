"""The paths that a run's files name: none leads out of the run, in any verb, and nothing is deleted through a link."""

import json
import os
import posixpath
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.cli import main
from jobs.recipe import recipe_sections
from jobs.run_all import check_inputs_apart
from jobs.verbs import dvc
from pipeline.engine.part import delete_incomplete_parts, delete_part_results
from pipeline.engine.stage import Split
from pipeline.garbage import find_garbage
from pipeline.prepare import Prepared
from pipeline.takedown.commit import drop_old, files_left
from schemas.config import build_recipe
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table, read_run, write_run
from schemas.origin import ModelOrigin
from schemas.paths import is_below, is_on_known_server, is_version
from schemas.storage import Store
from schemas.takedown import parse_certificate
from schemas.union import write_union
from schemas.versions import attach_run
from tests.support.lineage_run import lineage_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import all_bytes, certificates, documents_of, opened, take_down
from train.data.stages import append_to_skip_list, read_skip_list

HOSTILE = (
    "../../../victim.txt",
    "/etc/victim.txt",
    "a/../../x",
    "part\0.parquet",
    "C:\\victim.txt",
    "..\\..\\victim.txt",
    "./part",
    "a//b",
    "..",
    "../v-0000000007e4",
    "s3://bucket/key",
    "",
)


@pytest.mark.parametrize(
    ("path", "below", "beside"),
    [
        ("part-00000.parquet", True, True),
        ("web/train/shard-00000.arrow", True, True),
        ("../v-1/part", False, True),
        ("../v-1/a/part", False, True),
        ("../../v-1/part", False, False),
        ("a/../b", False, False),
        ("a..b/..c", True, True),
        *((path, False, False) for path in HOSTILE),
    ],
)
def test_paths(path: str, below: bool, beside: bool) -> None:
    assert (is_below(path), is_below(path, levels=1)) == (below, beside)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("v-1", True),
        ("../../../tokens/v-1", True),
        ("../../other/tokens/v-1", True),
        ("../../other/clean/v-1", False),
        ("../tokens", False),
        ("tokens/v-1", False),
        ("../../other/tokens/..", False),
        *((path, False) for path in HOSTILE if path != "../v-0000000007e4"),
        ("../v-0000000007e4", False),
    ],
)
def test_versions(path: str, expected: bool) -> None:
    assert is_version(path, "tokens") is expected


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b", "v-1", "\0", "\\", "/"]), max_size=6).map("/".join))
def test_what_is_accepted_stays_below(path: str) -> None:
    if is_below(path):
        assert posixpath.normpath(f"/run/t/v/{path}") == f"/run/t/v/{path}"
    if is_below(path, levels=1):
        assert posixpath.normpath(f"/run/t/v/{path}").startswith("/run/t/")


@pytest.mark.parametrize(
    ("run", "address", "known"),
    [
        ("/runs/a", "/runs/b", True),
        ("/runs/a", "s3://bucket/b", True),
        ("/runs/a", "gs://bucket/b", True),
        ("/runs/a", "https://example.com/b?c=d", True),
        ("/runs/a", "a pattern with s3://in?it", True),
        ("/runs/a", "s3://bucket/b?endpoint_override=evil.example", False),
        ("/runs/a", "s3://bucket/b?region=us-east-1", False),
        ("/runs/a", "hdfs://evil.example:8020/b", False),
        ("/runs/a", "abfs://a@evil.dfs.core.windows.net/b", False),
        ("s3://bucket/a?endpoint_override=own", "s3://other/b?endpoint_override=own", True),
        ("s3://bucket/a?endpoint_override=own", "s3://other/b?endpoint_override=evil", False),
    ],
)
def test_servers_that_only_a_run_names(run: str, address: str, known: bool) -> None:
    assert is_on_known_server(cast(Store, SimpleNamespace(address=run)), address) is known


def test_an_origin_on_a_server_is_refused() -> None:
    with pytest.raises(ValidationError, match="expected a local folder, got s3://bucket/a"):
        ModelOrigin(path="s3://bucket/a", format="checkpoint", digest="", vocab_size=1)


# ------------------------------------------------------------------------------------------ verbs on a stranger's run


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A pipe, so that a verb that opens it never returns; the alarm then fails the test."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the victim was opened")

    path = tmp_path / "victim.txt"
    os.mkfifo(path)
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    yield path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def edit_json(path: Path, *keys: str, value: Any) -> None:
    stored = json.loads(path.read_bytes())
    place = stored
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(stored))


VERBS: dict[str, tuple[str, list[str]]] = {
    "verify": ("tokens", ["verify", "RUN"]),
    "report": ("clean", ["report", "RUN"]),
    "show": ("documents", ["show", "RUN", "--random", "1"]),
    "lineage": ("clean", ["lineage", "RUN"]),
    "lineage --verify": ("clean", ["lineage", "RUN", "--verify"]),
    "plan": ("tokens", ["plan", "RUN"]),
    "train": ("tokens", ["train", "RUN", "--dry-run"]),
    "trace": ("tokens", ["trace", "RUN", "--step", "3"]),
    "prove": ("tokens", ["prove", "RUN", "--doc", "00" * 16]),
    "takedown": ("documents", ["takedown", "RUN", "--doc", "00" * 16]),
    "register": ("clean", ["register", "RUN", "--delta"]),
    "drop-old": ("tokens", ["takedown", "RUN", "--drop-old"]),
}


@pytest.mark.parametrize("hostile", [HOSTILE[0], "/ABSOLUTE", *HOSTILE[2:5]])
@pytest.mark.parametrize("verb", VERBS)
def test_a_manifest_cannot_name_a_file_elsewhere(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str], verb: str, hostile: str
) -> None:
    run = lineage_run(tmp_path / "run")
    table, words = VERBS[verb]
    folder, manifest = open_table(run, table)
    path = str(victim) if hostile == "/ABSOLUTE" else hostile
    key = manifest.content.files[0].key
    edit_json(Path(folder.path("manifest.json")), "run", "paths", key, value=path)
    assert main([{"RUN": run.uri}.get(word, word) for word in words]) == 2
    printed = capsys.readouterr()
    assert f"{table}/v-0000000071a9" in printed.err
    assert "expected a file in the folder of the table" in printed.err
    assert f"got {path!r}" in printed.err
    assert "Traceback" not in printed.err
    assert victim.exists()


@pytest.mark.parametrize("hostile", ["../../../victim.txt", "../../../victim", "/etc", "a/../../v", "v\0", "C:\\v"])
@pytest.mark.parametrize("verb", ["verify", "report", "show", "train"])
def test_run_json_cannot_name_a_folder_elsewhere(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str], verb: str, hostile: str
) -> None:
    run = lineage_run(tmp_path / "run")
    table, words = VERBS[verb]
    edit_json(tmp_path / "run/run.json", "tables", table, value=hostile)
    assert main([{"RUN": run.uri}.get(word, word) for word in words]) == 2
    assert f"run.json: expected the version folder of a table {table} in `tables`, got {hostile!r}" in (
        capsys.readouterr().err
    )


def test_a_lineage_cannot_name_a_folder_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lineage_run(tmp_path / "run")
    folder, manifest = open_table(run, "tokens")
    lineage = manifest.run.lineage | {"clean": "../../../victim"}
    edit_json(Path(folder.path("manifest.json")), "run", "lineage", value=lineage)
    assert main(["lineage", run.uri]) == 2
    assert "expected the version folder of a table clean in run.lineage, got '../../../victim'" in (
        capsys.readouterr().err
    )


def test_attached_runs_and_unions_are_read(tmp_path: Path) -> None:
    """Legal paths to other runs: those that `attach_run` and `write_union` write."""
    first = make_tiny_dataset(tmp_path / "first")
    second = make_tiny_dataset(tmp_path / "second", seed=1, suffix="b")
    for place in (Store(str(tmp_path / "deep/er/run")), Store(str(tmp_path / "first/nested"))):
        attach_run(place, first)
        assert open_table(place, "tokens")[1].digest == open_table(first, "tokens")[1].digest
    union = Store(str(tmp_path / "union"))
    made = write_union(union, [first, second])
    assert open_table(union, "tokens")[1].digest == made.digest
    manifest = Path(open_table(union, "tokens")[0].path("manifest.json"))
    key = made.content.files[0].key
    for hostile in (
        "../../../first/tokens/../../victim",
        "../../../third/tokens/v-0000000071a9/x",
        "../../../first/tokens/x",
    ):
        edit_json(manifest, "run", "paths", key, value=hostile)
        with pytest.raises(ContractError, match="expected a file in the folder of the table"):
            open_table(union, "tokens")


def test_a_repair_deletes_nothing_elsewhere(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    folder, manifest = open_table(run, "tokens")
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    edit_json(
        Path(folder.path("manifest.json")), "run", "paths", manifest.content.files[0].key, value="../../../victim.txt"
    )
    with mock.patch.object(dvc, "run_recipe"), pytest.raises(ContractError, match="expected a file in the folder"):
        dvc.run_and_repair("recipe.toml", run.uri, [], "tokens")
    assert victim.read_text() == "mine"


def moved_with_link(folder: Path, away: Path) -> None:
    """Move a folder away and leave a symbolic link."""
    folder.rename(away)
    folder.symlink_to(away)


def test_a_repair_deletes_nothing_through_a_link(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    folder, manifest = open_table(run, "tokens")
    moved_with_link(Path(folder.root), tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    damaged = Path(folder.path(manifest.paths_of()[0]))
    damaged.write_bytes(b"damaged")
    with mock.patch.object(dvc, "run_recipe"), pytest.raises(ContractError, match="got a symbolic link to"):
        dvc.run_and_repair("recipe.toml", run.uri, [], "tokens")
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


def other_files(folder: Path) -> Path:
    """Write files that are not of a run, two of them with paths as in a table, and return their folder."""
    for name in ("photos/2024/1.jpg", "notes.txt", "v-0123456789ab/part", "v-0123456789ab/manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


@pytest.mark.parametrize("place", ["paragraphs", "clean", "tokens/v-0123456789ab", "tokens/v-0000000071a9/web"])
@pytest.mark.parametrize("words", [["--url", "https://a.example/"], ["--drop-old"], ["--url", "x", "--dry-run"]])
def test_a_takedown_refuses_a_link_in_place_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, words: list[str]
) -> None:
    run, home = make_tiny_dataset(tmp_path / "run"), other_files(tmp_path / "home")
    link = tmp_path / "run" / place
    if link.exists():
        shutil.rmtree(link)
    link.symlink_to(home)
    before = all_bytes(tmp_path)
    assert main(["takedown", run.uri, *words]) == 2
    assert capsys.readouterr().err == (
        f"penstock: {link}: expected a folder of the run to write to and delete from, got a symbolic link to {home}. "
        "Replace the link by the folder, or mount the other disk in its place.\n"
    )
    assert all_bytes(tmp_path) == before


def test_a_takedown_refuses_a_table_that_is_a_link_to_another(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    (tmp_path / "run/clean").symlink_to("tokens")
    with pytest.raises(ContractError, match="run/clean: expected a folder of the run"):
        drop_old(run)


def test_a_takedown_leaves_files_that_are_of_no_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of tables are ordinary words, so the folder of a table may be one of the owner's."""
    run, elsewhere = make_tiny_dataset(tmp_path / "run"), other_files(tmp_path / "elsewhere")
    for name in ("text/notes.md", "tokens/crawl.warc.gz", "tokens/v-2/part", "tokens/v-0123456789ab/part"):
        run.write_atomic(name, b"mine")
    (tmp_path / "run/tokens/link").symlink_to(elsewhere / "photos")
    (tmp_path / "run/tokens/file").symlink_to(elsewhere / "notes.txt")
    before = all_bytes(elsewhere)
    left = ["text/notes.md", "tokens/crawl.warc.gz", "tokens/file", "tokens/link/2024/1.jpg", "tokens/v-2/part"]
    assert files_left(run) == left
    document = documents_of(opened(tmp_path / "run"))[3]["doc_id"].hex()
    assert take_down(tmp_path / "run", doc=[document]) == 0
    line = f"left, because no version of a table has such a path; may hold removed documents: {', '.join(left)}\n"
    assert line in capsys.readouterr().out
    assert not run.exists("tokens/v-0123456789ab/part")
    run.write_atomic("tokens/v-0123456789ab/part", b"old")
    assert take_down(tmp_path / "run", drop_old=True) == 0
    assert capsys.readouterr().out == f"1 file(s) deleted that no current version contains\n{line}"
    assert (all_bytes(elsewhere), files_left(run)) == (before, left)


def test_gc_leaves_files_that_are_of_no_version(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    run.write_atomic("documents/v-2/notes.md", b"mine")
    assert find_garbage(run) == []


def test_a_table_that_lies_on_another_disk_is_read(tmp_path: Path) -> None:
    """A link in place of the whole table is the owner's."""
    run = make_tiny_dataset(tmp_path / "run")
    moved_with_link(tmp_path / "run/tokens", tmp_path / "disk")
    assert opened(tmp_path / "run").digest
    assert {f"tokens/{name}" for name in run.child("tokens").walk()} <= {*run.walk()}


@pytest.mark.parametrize("name", ["parts", "parts/suspects", "."])
def test_results_of_parts_are_not_deleted_through_a_link(tmp_path: Path, name: str) -> None:
    home, run = tmp_path / "home", Store(str(tmp_path / "run"))
    other_files(home)
    other_files(home / "parts")
    before = all_bytes(home)
    link = tmp_path / "run/clean/v-0123456789ab" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(home)
    for delete in (delete_part_results, delete_incomplete_parts)[: 1 if "parts" in name else 2]:
        with pytest.raises(ContractError, match="where a symbolic link leads"):
            delete(run.child("clean/v-0123456789ab"))
    shutil.rmtree(tmp_path / "run/clean")
    (tmp_path / "run/clean").symlink_to(home)
    with pytest.raises(ContractError, match="where a symbolic link leads"):
        delete_incomplete_parts(run.child("clean/v-0123456789ab"))
    assert all_bytes(home) == before


def test_a_repair_deletes_only_files_of_versions(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    (tmp_path / "run/tokens/v-0000000071a9").rename(tmp_path / "run/tokens/mine")
    write_run(run, read_run(run).model_copy(update={"tables": {"tokens": "mine"}}))
    folder, manifest = open_table(run, "tokens")
    Path(folder.path(manifest.paths_of()[0])).write_bytes(b"damaged")
    before = all_bytes(tmp_path / "run")
    with mock.patch.object(dvc, "run_recipe"), pytest.raises(ContractError, match=r"tokens/mine/.*such as tokens/v-"):
        dvc.run_and_repair("recipe.toml", run.uri, [], "tokens")
    assert all_bytes(tmp_path / "run") == before


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_inputs_lie_outside_of_the_tables_of_a_run(tmp_path: Path, scheme: str) -> None:
    for name in ("documents/a.warc.gz", "inputs/b.warc.gz", "documents2/c.warc.gz"):
        other_files((tmp_path / name).parent)
        (tmp_path / name).write_bytes(b"x")
    run = Store(str(tmp_path))
    for name in ("inputs/b.warc.gz", "documents2/c.warc.gz", "run.json"):
        check_inputs_apart(prepared_from(f"{scheme}{tmp_path}/{name}"), run)
    with pytest.raises(ConfigError, match=r"--out .*: expected input files outside of the .* got .*a.warc.gz in doc"):
        check_inputs_apart(prepared_from(f"{scheme}{tmp_path}/documents/a.warc.gz"), run)
    (tmp_path / "link").symlink_to(tmp_path / "documents")
    with pytest.raises(ConfigError, match="Move the input files, or name another folder"):
        check_inputs_apart(prepared_from(f"{scheme}{tmp_path}/link/a.warc.gz"), run)


def prepared_from(uri: str) -> Prepared:
    recipe = build_recipe({"source": {"paths": [uri]}}, recipe_sections(), "test")
    return Prepared(recipe, [], [Split(0, "a", uri, 1, "", "web", "warc")], {})


def test_a_certificate_cannot_name_a_folder_elsewhere(tmp_path: Path) -> None:
    make_tiny_dataset(tmp_path / "run")
    take_down(tmp_path / "run", doc=[documents_of(opened(tmp_path / "run"))[3]["doc_id"].hex()])
    value = certificates(tmp_path / "run")[0].model_dump(mode="json")
    assert parse_certificate(value, "there").tables
    value["tables"]["tokens"]["version_before"] = "../../../victim"
    with pytest.raises(ContractError, match=r"there: expected version folders of tables, got '../../../victim'"):
        parse_certificate(value, "there")


@pytest.mark.parametrize("hostile", HOSTILE[:6])
def test_a_skip_list_lies_in_the_train_folder(tmp_path: Path, hostile: str) -> None:
    run, victim = Store(str(tmp_path / "run")), tmp_path / "victim.txt"
    victim.write_text("1\n")
    with pytest.raises(ConfigError, match=r"train.skip_file: expected a file below the run's train folder, got"):
        read_skip_list(run, hostile)
    with pytest.raises(ConfigError, match=r"train.skip_file: expected a file below"):
        append_to_skip_list(run, hostile, [2], "spike")
    assert victim.read_text() == "1\n"
