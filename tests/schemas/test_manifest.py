"""Manifests: row counts add up or nothing is written, identity is content, a table exists if its manifest does."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.errors import ConfigError, ContractError
from schemas.manifest import (
    Counts,
    Manifest,
    RunFile,
    make_manifest,
    open_table,
    read_manifest,
    read_run,
    write_manifest,
    write_run,
)
from schemas.storage import Store

ENTRY = {"key": "part-00000", "rows": 2, "bytes": 10, "sha256": "ab"}


def content(**changes):
    counts = {"rows_in": 3, "rows_kept": 2, "dropped": {"s/a": 1, "s/b": 0}}
    return {
        "table": "t",
        "stages": {"s": 1},
        "config": {"s": {"x": 1}},
        "inputs": [],
        "files": [ENTRY],
        "counts": counts,
    } | changes


def how(**changes):
    paths = {"part-00000": "part-00000-x.parquet"}
    return {"paths": paths, "started": "now", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0"} | changes


@given(st.integers(0, 99), st.integers(0, 99), st.lists(st.integers(0, 99), max_size=3), st.integers(-3, 3))
def test_counts_add_up_or_cannot_be_made(kept, extra, drops, lost):
    dropped = {str(i): n for i, n in enumerate(drops)} | {"x": extra}
    total = kept + sum(dropped.values()) + lost
    if lost == 0:
        assert Counts(rows_in=total, rows_kept=kept, dropped=dropped).rows_in == total
    else:
        with pytest.raises(ValidationError, match=f"so {lost} unaccounted for"):
            Counts(rows_in=total, rows_kept=kept, dropped=dropped)


def test_counts_that_do_not_add_up_are_rejected_with_their_values():
    with pytest.raises(ContractError, match="got 4 in, 2 kept and 1 dropped, so 1 unaccounted for"):
        make_manifest(content(counts={"rows_in": 4, "rows_kept": 2, "dropped": {"s/a": 1}}), how(), "t")


def test_identity_is_content_not_path_or_time():
    first = make_manifest(content(), how(), "t")
    other = make_manifest(content(), how(paths={"part-00000": "elsewhere"}, started="later", wall_seconds=9.0), "t")
    assert first.digest == other.digest
    changed = make_manifest(content(files=[ENTRY | {"sha256": "ac"}]), how(), "t")
    assert changed.digest != first.digest


def test_a_file_without_a_path_is_rejected():
    with pytest.raises(ContractError, match=r"run\.paths: expected one path for every key .*: part-00000\."):
        make_manifest(content(), how(paths={}), "t")


def test_manifests_are_immutable_and_equal_content_may_be_written_twice(tmp_path):
    folder = Store(str(tmp_path / "t"))
    write_manifest(folder, make_manifest(content(), how(), "t"))
    write_manifest(folder, make_manifest(content(), how(started="later"), "t"))
    assert read_manifest(folder).run.started == "now"
    with pytest.raises(
        ContractError, match=r"expected the committed content \w{12}, got \w{12} .* Use a new run folder"
    ):
        write_manifest(folder, make_manifest(content(stages={"s": 2}), how(), "t"))


def test_a_table_exists_when_its_manifest_exists(tmp_path):
    run = Store(str(tmp_path))
    with pytest.raises(ContractError, match="expected a table 'documents', got an empty run"):
        open_table(run, "documents")
    write_run(run, RunFile(tables={"documents": "v-1"}))
    with pytest.raises(ContractError, match=r"got no manifest\.json\. Run `penstock run`\."):
        open_table(run, "documents")
    write_manifest(run.child("documents/v-1"), make_manifest(content(), how(), "t"))
    assert open_table(run, "documents")[1].content.table == "t"
    assert read_run(run).tables == {"documents": "v-1"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("crawl/rnu", " (did you mean '{}/crawl/run'?)"), ("crwal/run", " (did you mean '{}/crawl'?)"), ("zzz", "")],
)
def test_a_missing_folder_is_no_empty_run(tmp_path, name, hint):
    (tmp_path / "crawl" / "run").mkdir(parents=True)
    with pytest.raises(ConfigError) as raised:
        open_table(Store(str(tmp_path / name)), "tokens")
    where = f"{tmp_path}/{name}: expected a run folder, got no such folder"
    assert str(raised.value) == f"{where}{hint.format(tmp_path)}. Correct the path."


def test_counts_of_parts_are_summed():
    counts = Counts(rows_in=3, rows_kept=2, dropped={"a": 1, "b": 0})
    assert counts.plus(Counts(rows_in=2, rows_kept=0, dropped={"b": 2})) == Counts(
        rows_in=5, rows_kept=2, dropped={"a": 1, "b": 2}
    )


def test_the_published_json_schema_documents_every_field():
    schema = Manifest.model_json_schema()
    fields = [f for kind in schema["$defs"].values() for f in kind["properties"].values()]
    assert len(fields) > 20
    assert [f for f in fields if "description" not in f] == []


def test_another_format_is_named_with_both_versions(tmp_path):
    folder = Store(str(tmp_path))
    write_manifest(folder, make_manifest(content(format_version=99), how(), "t"))
    with pytest.raises(ContractError, match=r"expected format version 1, got 99. Use the version of penstock"):
        read_manifest(folder)


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999", '"\\ud800"', '{"\\udfff": 1}'])
@pytest.mark.parametrize("place", ['"wall_seconds":', '"figures":{"x":', '"notes":{"x":', '"config":{"s":{"x":'])
def test_values_that_have_no_digest_are_refused(tmp_path, value, place):
    folder = Store(str(tmp_path / "t"))
    values = {"figures": {"x": 0}, "config": {"s": {"x": 0}}}
    write_manifest(folder, make_manifest(content(**values), how(wall_seconds=0, notes={"x": 0}), "t"))
    written = folder.read_bytes("manifest.json").decode()
    (number,) = (each for each in ("0", "0.0") if f"{place}{each}" in written and f"{place}{each}." not in written)
    folder.write_atomic("manifest.json", written.replace(f"{place}{number}", f"{place}{value}").encode())
    with pytest.raises(ContractError, match=r"t/manifest\.json: expected a valid manifest, got .* from a backup\."):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("errors", 3), ("errors", {"a": 3}), ("errors", {"a": {"count": 1, "document": ""}}), ("cpu", {"a": []})],
        *[("pairs", {}), ("edges_by_round", 1), ("rounds", "x"), ("calls", {"a": None}), ("shuffled_bytes", [])],
    ],
)
def test_notes_that_are_read_again_have_their_form(tmp_path, name, value):
    folder = Store(str(tmp_path / "t"))
    notes = {"own": [1], "errors": {"a": {"count": 1, "document": "", "message": ""}}}
    write_manifest(folder, make_manifest(content(), how(notes=notes), "t"))
    assert read_manifest(folder).run.notes == notes
    raw = folder.read_json("manifest.json")
    raw["run"]["notes"][name] = value
    folder.write_atomic("manifest.json", json.dumps(raw).encode())
    with pytest.raises(ContractError, match=rf"t/manifest\.json: expected a valid manifest, got .*{name}"):
        read_manifest(folder)


def test_a_replaced_table_and_a_missing_table_have_different_errors(tmp_path):
    folder = Store(str(tmp_path / "tokens/v-1"))
    with pytest.raises(ContractError, match=r"got no manifest\.json\. Run `penstock run`\."):
        read_manifest(folder)
    folder.write_atomic("takedown.json", b'{"to": "v-2", "id": "4a3b"}')
    with pytest.raises(ContractError, match="a version that takedown 4a3b has replaced by v-2"):
        read_manifest(folder)
