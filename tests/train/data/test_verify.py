"""The verification before training: a changed bit is rejected, a moved file is not."""

import os
import re
import shutil
import subprocess
import sys
import threading
from argparse import ArgumentParser
from pathlib import Path

import pytest

from jobs.verbs.verify import add_verify_arguments, verify_command
from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.manifest import RunFile, read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import flip_byte, make_tiny_dataset, settle
from train.checkpoint.folder import CheckpointMetadata, Layout, check_identity, identify
from train.config.settings import load_settings
from train.data import verify
from train.data.stages import NO_SKIPS
from train.data.verify import VERIFIED_NAME, file_digest, verify_dataset
from train.plan.make_plan import make_plan
from train.plan.plan import read_plan, write_plan

TABLE = "tokens/v-0000000071a9"


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return make_tiny_dataset(tmp_path, {"web": 20})


def test_every_file_is_read_once_while_it_stays_the_same(run: Store) -> None:
    settle(run)
    dataset = open_dataset(run)
    files = len(dataset.manifest.content.files) + 1
    assert [verify_dataset(run, dataset) for _ in range(2)] == [files, 0]
    path = run.path(f"{TABLE}/{dataset.streams['web/train'][0].path}")
    os.utime(path, (1, 1))
    assert [verify_dataset(run, dataset) for _ in range(2)] == [1, 0]


def test_a_file_that_was_just_written_is_read_again(run: Store) -> None:
    dataset = open_dataset(run)
    files = len(dataset.manifest.content.files) + 1
    assert [verify_dataset(run, dataset) for _ in range(2)] == [files, files]


def test_sizes_and_times_take_one_request_a_file_and_many_at_once(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        run.write_atomic(f"files/{number}", b"")
    asked, waiting, stat = list[str](), threading.Barrier(3, timeout=60), os.stat

    def asking(path: str) -> os.stat_result:
        asked.append(path)
        if len(asked) <= 3:
            waiting.wait()  # the first three requests are made at the same time, by three threads
        return stat(path)

    monkeypatch.setattr(verify.os, "stat", asking)
    expected = [(run, f"files/{number}", "") for number in range(300)]
    problems: list[str] = []
    files = verify.list_files([*expected, (run, "files", ""), (run, "none", "")], problems)
    assert [file.path for file in files] == [f"files/{number}" for number in range(300)]
    assert len(asked) == 302
    assert [text.partition(": ")[0].rpartition("/")[2] for text in problems] == ["files", "none"]


@pytest.mark.parametrize("kind", ["path", "docs_path"])
def test_one_flipped_bit_is_rejected_with_both_digests(run: Store, kind: str) -> None:
    settle(run)
    dataset = open_dataset(run)
    assert verify_dataset(run, dataset) > 0
    shard = dataset.streams["web/train"][1]
    name = f"{TABLE}/{getattr(shard, kind)}"
    flip_byte(run.path(name))
    expected = shard.sha256 if kind == "path" else shard.docs_sha256
    message = (
        rf"got 1 file\(s\) that differ\. .*{getattr(shard, kind)}: expected SHA-256 {expected}, got {run.sha256(name)}"
    )
    with pytest.raises(ContractError, match=f"(?s){message}"):
        verify_dataset(run, dataset)
    flip_byte(run.path(name))
    assert verify_dataset(run, dataset) == 1


def test_another_tokenizer_of_the_same_size_is_rejected(run: Store) -> None:
    dataset = open_dataset(run)
    path = Path(run.path("tokenizer/v-0000000071a9/tokenizer.json"))
    text = path.read_text()
    swapped = text.replace('"baba": 105', '"dada": 105').replace('"dada": 181', '"baba": 181')
    assert swapped != text
    assert len(swapped) == len(text)
    path.write_text(swapped)
    actual = run.sha256("tokenizer/v-0000000071a9/tokenizer.json")
    with pytest.raises(ContractError, match=f"expected SHA-256 {dataset.tokenizer.sha256}, got {actual}"):
        verify_dataset(run, dataset)


def test_all_problems_are_reported_at_once(run: Store) -> None:
    dataset = open_dataset(run)
    first, second = dataset.streams["web/train"][:2]
    run.delete(f"{TABLE}/{first.path}")
    flip_byte(run.path(f"{TABLE}/{second.path}"))
    with pytest.raises(
        ContractError, match=rf"2 file\(s\)[\s\S]*{first.path}: expected a file that a manifest names, got"
    ):
        verify_dataset(run, dataset)


def test_renamed_and_moved_shards_are_the_same_dataset(run: Store) -> None:
    before = open_dataset(run)
    manifest = run.child(TABLE).read_json("manifest.json")
    for number, (key, path) in enumerate(sorted(manifest["run"]["paths"].items())):
        manifest["run"]["paths"][key] = f"elsewhere/{number}.arrow"
        run.make_parent(f"{TABLE}/elsewhere/x")
        os.rename(run.path(f"{TABLE}/{path}"), run.path(f"{TABLE}/elsewhere/{number}.arrow"))
    run.write_atomic(f"{TABLE}/manifest.json", canonical_json(manifest))
    after = open_dataset(run)
    assert after.digest == before.digest
    assert after.streams["web/train"][0].path != before.streams["web/train"][0].path
    assert verify_dataset(run, after) == len(after.manifest.content.files) + 1


# ---------------------------------------------------------------------------------- large files: resuming, --paranoid


def num_files(run: Store) -> int:
    return len(open_dataset(run).manifest.content.files) + 1


def unseen_flip(path: str) -> None:
    """Change a byte of a file without changing its size and modification time."""
    before = os.stat(path)
    flip_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_change_that_keeps_size_and_modification_time_is_seen(run: Store) -> None:
    settle(run)
    dataset = open_dataset(run)
    assert [verify_dataset(run, dataset) for _ in range(2)] == [num_files(run), 0]
    shard = dataset.streams["web/train"][0]
    unseen_flip(run.path(f"{TABLE}/{shard.path}"))
    with pytest.raises(ContractError, match=f"(?s)1 file.*expected SHA-256 {shard.sha256}"):
        verify_dataset(run, dataset)


def test_a_copy_of_a_file_is_read_again(run: Store) -> None:
    """As on another machine that has its own copy of the dataset, beside the results of the first."""
    settle(run)
    dataset = open_dataset(run)
    assert [verify_dataset(run, dataset) for _ in range(2)] == [num_files(run), 0]
    path = run.path(f"{TABLE}/{dataset.streams['web/train'][0].path}")
    shutil.copy2(path, f"{path}.copy")
    os.replace(f"{path}.copy", path)
    assert [verify_dataset(run, dataset) for _ in range(2)] == [1, 0]


def test_paranoid_reads_files_that_look_unchanged(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that errs: nothing wrote the file, so no time changes."""
    monkeypatch.setattr(verify, "_change_of", lambda *file: (1, 1))
    settle(run)
    dataset = open_dataset(run)
    assert verify_dataset(run, dataset) == num_files(run)
    shard = dataset.streams["web/train"][0]
    path = run.path(f"{TABLE}/{shard.path}")
    unseen_flip(path)
    assert verify_dataset(run, dataset) == 0
    for paranoid in (True, False):  # a detected problem is not forgotten
        with pytest.raises(ContractError, match=f"(?s)1 file.*expected SHA-256 {shard.sha256}"):
            verify_dataset(run, dataset, paranoid=paranoid)
    unseen_flip(path)
    assert [verify_dataset(run, dataset, paranoid=paranoid) for paranoid in (False, True, False)] == [
        1,
        num_files(run),
        0,
    ]


def test_a_bad_file_costs_no_good_one_a_second_reading(run: Store) -> None:
    settle(run)
    dataset = open_dataset(run)
    path = run.path(f"{TABLE}/{dataset.streams['web/train'][1].docs_path}")
    unseen_flip(path)
    for _ in range(2):
        with pytest.raises(ContractError, match=r"1 file\(s\)"):
            verify_dataset(run, dataset)
    unseen_flip(path)
    assert verify_dataset(run, dataset) == 1


@pytest.mark.parametrize("paranoid", [False, True])
def test_a_killed_verification_resumes(run: Store, paranoid: bool) -> None:
    settle(run)
    verify_dataset(run, open_dataset(run))
    if not paranoid:
        run.delete(VERIFIED_NAME)
    code = f"""
import os
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.data import verify
digest, done = verify.file_digest, []
def dying(*arguments):
    if len(done) == 4:
        os._exit(9)
    found = digest(*arguments)
    done.append(found)
    return found
verify.file_digest, verify.SAVE_SECONDS, verify.os.cpu_count = dying, 0.0, lambda: 1
run = Store({run.uri!r})
verify.verify_dataset(run, open_dataset(run), paranoid={paranoid})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert len(run.read_json(VERIFIED_NAME)) == 4
    assert verify_dataset(run, open_dataset(run)) == num_files(run) - 4


def test_digests_do_not_depend_on_the_block_size(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (0, 1, 7, 8, 9, 64):
        run.write_atomic("bytes", bytes(range(size)))
        for block in (1, 8, 1 << 20):
            monkeypatch.setattr(verify, "BLOCK_BYTES", block)
            assert file_digest(run, "bytes") == run.sha256("bytes")
    with pytest.raises(ContractError, match="no-such-file: expected a readable file, got "):
        file_digest(run, "no-such-file")


# ------------------------------------------------------------------------------------------------- the contract itself


def with_separators(run: Store, after: list[str]) -> None:
    """Set the tokens after each document in both tables of a run."""
    for table, name in ((TABLE, "tokenizer"), ("tokenizer/v-0000000071a9", "contract")):
        manifest = run.read_json(f"{table}/manifest.json")
        manifest["content"]["figures"][name]["after"] = after
        run.write_atomic(f"{table}/manifest.json", canonical_json(manifest))


def test_a_doubled_separator_is_rejected_with_both_sides(run: Store) -> None:
    settings = load_settings({"train": {"seq_len": 32, "steps": 5}}, [], "test")
    before = open_dataset(run)
    plan = make_plan(run, before, settings)
    write_plan(run, plan)
    layout = Layout(ranks=1, axes={}, settings={}, threads=1, device="cpu", kernels="")
    note = CheckpointMetadata(step=3, identity=identify(before, plan, NO_SKIPS), layout=layout)
    with_separators(run, ["eos", "eos"])
    after = open_dataset(run)
    assert after.digest != before.digest
    with pytest.raises(ContractError, match=f"expected dataset {before.digest}, got {after.digest}"):
        read_plan(run)
    actual = identify(after, make_plan(run, after, settings), NO_SKIPS)
    expected = note.identity
    with pytest.raises(ContractError) as rejected:
        check_identity(note, actual)
    for name in ("dataset", "tokenizer"):
        assert f"{name}: expected {getattr(expected, name)}, got {getattr(actual, name)}" in str(rejected.value)
    with_separators(run, ["eos"])
    check_identity(note, identify(open_dataset(run), plan, NO_SKIPS))


def test_a_separator_that_one_table_alone_doubles_is_rejected(run: Store) -> None:
    manifest = run.read_json(f"{TABLE}/manifest.json")
    manifest["content"]["figures"]["tokenizer"]["after"] = ["eos", "eos"]
    run.write_atomic(f"{TABLE}/manifest.json", canonical_json(manifest))
    with pytest.raises(ContractError, match="the tokenizer contract of the table `tokenizer`, got different values"):
        open_dataset(run)


# --------------------------------------------------------------------------------------------- the command and its line


def test_the_command_reports_the_number_of_files_it_read(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    settle(run)
    parser = ArgumentParser()
    parser.add_argument("run")
    add_verify_arguments(parser)
    counts = []
    for words in ([], [], ["--paranoid"]):
        assert verify_command(parser.parse_args([run.uri, *words])) == 0
        counts += re.findall(r"(\d+) were read", capsys.readouterr().out)
    number = num_files(run)
    assert counts == [str(number), "0", str(number)]


def test_an_earlier_version_is_verified_by_its_digest(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    settle(run)
    before, manifest_before = open_dataset(run).digest, run.read_json(f"{TABLE}/manifest.json")
    manifest_before["run"]["lineage"] = {"tokenizer": "v-0000000071a9"}
    run.write_atomic(f"{TABLE}/manifest.json", canonical_json(manifest_before))
    shutil.copytree(run.path(TABLE), run.path("tokens/v-000000000ae8"))
    manifest = run.read_json("tokens/v-000000000ae8/manifest.json")
    manifest["content"]["config"]["bait"] = {}
    run.write_atomic("tokens/v-000000000ae8/manifest.json", canonical_json(manifest))
    write_run(run, RunFile(tables=read_run(run).tables | {"tokens": "v-000000000ae8"}))
    parser = ArgumentParser()
    parser.add_argument("run")
    add_verify_arguments(parser)
    for read in (num_files(run), 0):
        assert verify_command(parser.parse_args([f"{run.uri}@{before[:12]}"])) == 0
        assert f"dataset {before[:12]}: all {num_files(run)} files" in (out := capsys.readouterr().out)
        assert f"{read} were read now" in out


@pytest.mark.parametrize(
    ("kept", "message"), [(b"[]", r"got \[\]\. Delete this file"), (b"null", "got None"), (b"{", "JSON")]
)
def test_a_damaged_file_of_results_is_named(run: Store, kept: bytes, message: str) -> None:
    run.write_atomic(VERIFIED_NAME, kept)
    with pytest.raises(ContractError, match=f"{VERIFIED_NAME}: expected.*{message}"):
        verify_dataset(run, open_dataset(run))
