"""`penstock verify` reads every file of the tables that a run names, in whichever run folder they lie."""

from pathlib import Path

import pytest

from jobs.cli import main
from schemas.manifest import RunFile, make_manifest, open_table, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.tokens import MEMBERSHIP, MEMBERSHIP_PARTS
from schemas.versions import attach_run
from tests.support.tiny_dataset import flip_byte, make_tiny_dataset


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run whose dataset was made from a table `clean`, as that of every real run."""
    run = make_tiny_dataset(tmp_path / "run", {"web": 20})
    for name in ("tokenizer", "tokens"):
        folder, manifest = open_table(run, name)
        raw = manifest.model_dump(mode="json")
        raw["content"]["inputs"] = [{"name": "clean", "bytes": 1, "sha256": "0" * 64}]
        folder.delete("manifest.json")
        write_manifest(folder, make_manifest(raw["content"], raw["run"], name))
    return run


@pytest.mark.parametrize("place", ["beside", "run/ladder/small"])
def test_the_tables_of_another_run_are_read(
    run: Store, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    attached = tmp_path / place
    attach_run(Store(str(attached)), run, ("tokens", "tokenizer"))
    folder, manifest = open_table(run, "tokens")
    number = len(manifest.paths) + 1  # the file of the tokenizer
    assert main(["verify", str(attached), "--paranoid"]) == 0
    printed = capsys.readouterr().out
    assert f": all {number} files match the manifests of tokenizer, tokens in {run.uri}. {number} were read" in printed
    path = next(iter(manifest.paths.values()))
    flip_byte(folder.path(path))
    assert main(["verify", str(attached)]) == 2
    assert f"{folder.uri}/{path}" in capsys.readouterr().err


def test_a_dataset_without_the_tables_it_was_made_from_is_read(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", run.uri, "--paranoid"]) == 0
    assert " files match the manifests of tokenizer, tokens. " in capsys.readouterr().out
    folder, manifest = open_table(run, "tokens")
    flip_byte(folder.path(next(iter(manifest.paths.values()))))
    assert main(["verify", run.uri]) == 2


@pytest.mark.parametrize("damage", ["size", "checksum", "key"])
def test_damaged_blocks_of_a_manifest_are_found(run: Store, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else covers them: they are no part of the digest, and training reads by them."""
    folder, manifest = open_table(run, "tokens")
    raw = manifest.model_dump(mode="json")
    key = next(iter(raw["run"]["blocks"]))
    size, mark, checksum = raw["run"]["blocks"][key].partition(":")
    flipped = {
        "size": f"1{size}{mark}{checksum}",
        "checksum": f"{size}{mark}{int(checksum[0], 16) ^ 1:x}{checksum[1:]}",
    }
    raw["run"]["blocks"] |= {key if damage != "key" else "web/none": flipped.get(damage, f"{size}{mark}{checksum}")}
    folder.delete("manifest.json")
    write_manifest(folder, make_manifest(raw["content"], raw["run"], "tokens"))
    assert main(["verify", run.uri]) == (0 if damage == "checksum" else 2)
    assert main(["verify", run.uri, "--paranoid"]) == 2
    named = "web/none" if damage == "key" else key
    message = f"{folder.uri}/manifest.json: expected the blocks of the file {named!r} in run.blocks, got others"
    assert message in capsys.readouterr().err


def test_the_index_by_id_is_compared_with_the_shards_if_every_file_is_read(
    run: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files have the digests of the manifest, but are those of another dataset."""
    folder, manifest = open_table(run, "tokens")
    other_folder, other = open_table(make_tiny_dataset(tmp_path / "other", {"web": 21}), "tokens")
    raw = manifest.model_dump(mode="json")
    for name in (MEMBERSHIP, MEMBERSHIP_PARTS):
        raw["content"]["figures"][name] = other.content.figures[name]
    entries = {entry.key: entry for entry in other.content.files if entry.key.startswith("by_id/")}
    raw["content"]["files"] = [
        entries[entry["key"]].model_dump() if entry["key"] in entries else entry for entry in raw["content"]["files"]
    ]
    for key in entries:
        Path(folder.path(other.paths[key])).write_bytes(Path(other_folder.path(other.paths[key])).read_bytes())
        raw["run"]["paths"][key] = str(other.paths[key])
    folder.delete("manifest.json")
    write_manifest(folder, make_manifest(raw["content"], raw["run"], "tokens"))
    assert main(["verify", run.uri]) == 0
    assert main(["verify", run.uri, "--paranoid"]) == 2
    root = other.content.figures[MEMBERSHIP]
    assert f"expected Merkle root {root} of its index by id, got " in capsys.readouterr().err


def test_a_run_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Store(str(tmp_path)), RunFile())
    assert read_run(Store(str(tmp_path))).tables == {}
    assert main(["verify", str(tmp_path)]) == 2
    assert "expected a table 'tokens', got an empty run" in capsys.readouterr().err
