"""The difference of two runs: documents in and out by hand-made fates, and exactly the rule that a threshold moved."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.verbs.diff import diff_command
from pipeline.inspect.diff import NOT_READ, compare_runs, live_tokens, open_compared_run
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.manifest import open_table, write_run
from schemas.storage import Store
from schemas.versions import open_run
from tests.support.lineage_run import edit, join_dataset, next_version
from tests.support.report_run import LIMITS, Record, crawl, identifier, make_run

SHORT, TOXIC, NEAR = "quality/gopher_short_doc", "toxicity/toxic_word_share", "dedup/near_duplicate"


def run_of(folder: Path, changes: dict[int, str] | None = None, more: Sequence[Record] = ()) -> Store:
    """The synthetic crawl in which some records, by number from the end (-1), meet another fate."""
    records = [*crawl(), *more]
    for place, outcome in (changes or {}).items():
        records[place] = replace(records[place], outcome=outcome)
    return make_run(folder, until="clean", records=records)


def diff(capsys: pytest.CaptureFixture[str], a: Any, b: Any, **given: Any) -> str:
    """What `penstock diff` prints."""
    arguments = argparse.Namespace(
        **{"a": getattr(a, "uri", a), "b": getattr(b, "uri", b), "list": 0, "json": None} | given
    )
    assert diff_command(arguments) == 0
    return capsys.readouterr().out


def test_equal_runs_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    text = diff(capsys, a, b, list=3)
    assert text.splitlines()[-1] == "equal: one digest, so the same documents and the same tokens"
    assert compare_runs(open_compared_run(a), open_compared_run(b), 3).documents == Counter()


def test_documents_out_in_and_dropped_by_another_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run_of(tmp_path / "a", {-7: TOXIC, -8: SHORT})
    b = run_of(tmp_path / "b", {-4: SHORT, -5: SHORT, -6: NEAR, -8: TOXIC})
    found = compare_runs(open_compared_run(a), open_compared_run(b), 5)
    assert found.documents == {
        ("web", "kept", SHORT): 2,
        ("web", "kept", NEAR): 1,
        ("web", TOXIC, "kept"): 1,
        ("web", SHORT, TOXIC): 1,
    }
    assert found.moved(out=True) == {("web", SHORT): 2, ("web", NEAR): 1}
    assert found.moved(out=False) == {("web", TOXIC): 1}
    assert found.kept == (18, 16)
    total = len(crawl())
    examples = {one.doc_id: (one.value, one.limit) for one in found.examples["web", "kept", SHORT]}
    assert examples == {identifier(total - n).hex(): LIMITS["quality"] for n in (4, 5)}
    text = diff(capsys, a, b, list=1)
    assert "out: kept by A, not by B, by what dropped them in B: 3\n  web  quality/gopher_short_doc  2\n    " in text
    assert "  4, limit 50  https://c.example/kept/" in text
    assert "in: kept by B, not by A, by what dropped them in A: 1\n  web  toxicity/toxic_word_share  1\n" in text
    assert f"dropped by both, by another rule: 1\n  web  {SHORT} → {TOXIC}  1" in text


@pytest.mark.parametrize(("wanted", "listed"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_as_many_examples_as_asked_for(tmp_path: Path, wanted: int, listed: int) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT, -5: SHORT})
    found = compare_runs(open_compared_run(a), open_compared_run(b), wanted)
    assert [len(examples) for examples in found.examples.values()] == [listed]


def test_what_only_one_run_has_read(tmp_path: Path) -> None:
    more = [Record(language="en", chars=100, url=f"https://d.example/{n}", text=f"more {n}") for n in range(3)]
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", more=more)
    assert compare_runs(open_compared_run(a), open_compared_run(b), 0).documents == {("web", NOT_READ, "kept"): 3}
    assert compare_runs(open_compared_run(b), open_compared_run(a), 0).documents == {("web", "kept", NOT_READ): 3}


def test_files_in_another_order_or_of_other_names(tmp_path: Path) -> None:
    """Parts are joined by the name of their file, never by their number."""
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    edit(b, "documents", lambda content: content["inputs"][0].update(name="other.warc.gz"))
    documents = open_table(b, "documents")[1].digest
    for table in ("verdicts", "dedup", "clean"):
        for read in ("documents", "verdicts", "dedup"):
            _reads(b, table, read, open_table(b, read)[1].digest)
    assert documents == open_table(b, "documents")[1].digest
    found = compare_runs(open_compared_run(a), open_compared_run(b), 0)
    fates = Counter({name: sum(n for key, n in found.documents.items() if key[1:] == name) for name in FATES})
    assert fates["kept", NOT_READ] == fates[NOT_READ, "kept"] > 0
    assert sum(n for (_, old, new), n in found.documents.items() if NOT_READ not in (old, new)) == 0


FATES = (("kept", NOT_READ), (NOT_READ, "kept"))


def _reads(run: Store, table: str, read: str, digest: str) -> None:
    def change(content: dict[str, Any]) -> None:
        for entry in content["inputs"]:
            if entry["name"] == read:
                entry["sha256"] = digest

    edit(run, table, change)


def test_the_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT})
    diff(capsys, a, b, list=2, json=str(tmp_path / "out" / "diff.json"))
    found = json.loads((tmp_path / "out" / "diff.json").read_text())
    assert (found["equal"], found["a"]["documents"], found["b"]["documents"]) == (False, 20, 19)
    (entry,) = found["documents"]
    assert (entry["source"], entry["a"], entry["b"], entry["count"]) == ("web", "kept", SHORT, 1)
    assert entry["examples"][0] | {"url": ""} == {
        "doc_id": identifier(len(crawl()) - 4).hex(),
        "url": "",
        "value": 4.0,
        "limit": 50.0,
    }


def test_settings_and_tokens_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    join_dataset(run)
    before = open_table(run, "tokens")[1]

    def cut(content: dict[str, Any]) -> None:
        content["config"] = {"tokens": {"seed": 1}}
        content["figures"]["streams"]["web/train"][0] -= 7

    next_version(run, "tokens", cut)
    write_manifest_lineage(run)
    text = diff(capsys, f"{run.uri}@{before.digest[:8]}", run)
    assert "  tokens.seed  None → 1" in text
    assert "documents: the same in both" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("web/train"))
    total = sum(before.content.figures["streams"]["web/train"])
    assert row == ["web/train", f"{total:,}", f"{total - 7:,}", "-7"]


def write_manifest_lineage(run: Store) -> None:
    """Let the first dataset name the versions that it was made from."""
    for table, reads in {
        "tokens": ("clean", "tokenizer"),
        "clean": ("documents", "dedup"),
        "dedup": ("verdicts",),
    }.items():
        name = f"{table}/v-tiny/manifest.json"
        manifest = run.read_json(name)
        manifest["run"]["lineage"] = dict.fromkeys(reads, "v-tiny")
        run.write_atomic(name, canonical_json(manifest))


def test_tombstones_are_no_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    tokens = open_table(run, "tokens")[1]
    streams = {name: sum(shards) for name, shards in tokens.content.figures["streams"].items()}
    assert live_tokens(run, tokens) == streams


def test_bad_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="expected a number from 0 on, got -1"):
        diff(capsys, run, run, list=-1)
    with pytest.raises(ContractError, match="expected a table 'documents', got an empty run"):
        diff(capsys, run, str(tmp_path / "nothing"))
    edit(run, "verdicts", lambda content: content["figures"].update(bait=1))
    with pytest.raises(
        ContractError, match=r"expected `dedup` made from the `verdicts` that stands \(\w{12}\), got it"
    ):
        diff(capsys, run, run)


def test_a_table_that_the_run_no_longer_has_is_refused(tmp_path: Path) -> None:
    """The recipe was run again without its models, and stopped before it came to the verdicts."""
    run = run_of(tmp_path / "run")
    edit(run, "verdicts", lambda content: content["inputs"].append({"name": "scores", "bytes": 1, "sha256": "5" * 64}))
    with pytest.raises(ContractError, match=r"`verdicts` made from the `scores` that stands \(none\), found it made"):
        open_compared_run(run)


def test_tables_whose_rows_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT})
    parts = open_table(b, "verdicts")[1].paths_of()
    one, other = (b.read_bytes(f"verdicts/v-tiny/{path}") for path in parts)
    b.write_atomic(f"verdicts/v-tiny/{parts[0]}", other)
    b.write_atomic(f"verdicts/v-tiny/{parts[1]}", one)
    with pytest.raises(ContractError, match="expected the same documents in `documents` and `verdicts`, part-0000"):
        compare_runs(open_compared_run(a), open_compared_run(b), 0)


# ----------------------------------------------------------------------------------------------------- a real threshold


@pytest.mark.spark
def test_one_threshold_names_its_rule_and_its_documents(tmp_path: Path, spark: Any) -> None:
    """The negative control on a real run: what goes is exactly what has too few words, and only that rule is named."""
    from jobs.recipe import recipe_sections
    from pipeline.demo_crawl.build import build_demo_crawl
    from pipeline.run import prepare, run_steps
    from schemas.config import load_recipe

    build_demo_crawl(tmp_path / "crawl", 100, 1)
    run = Store(str(tmp_path / "run"))
    raw = {"source": {"paths": [str(tmp_path / "crawl" / "*.warc.gz")]}, "quality": {"min_words": 50}}
    digests = []
    for override in ([], ["quality.min_words=100"]):
        prepared = prepare(load_recipe(raw, override, recipe_sections(), "test"), "clean")
        write_run(run, run_steps(spark, prepared, run, 2))
        digests.append(open_table(run, "clean")[1].digest)
    a, b = (open_compared_run(open_run(f"{run.uri}@{digest[:12]}")) for digest in digests)
    words = {row["doc_id"]: row["gopher_num_words"] for row in rows(run, "documents", ["doc_id", "gopher_num_words"])}
    kept = [row["doc_id"] for row in rows(Store(a.run.uri), "clean", ["doc_id"], a.tables["clean"])]
    expected = {doc.hex() for doc in kept if words[doc] < 100}
    assert expected
    found = compare_runs(a, b, 1000)
    assert found.settings == {"quality.min_words": (50, 100)}
    assert found.moved(out=True) == {("web", SHORT): len(expected)}
    assert {one.doc_id for one in found.examples["web", "kept", SHORT]} == expected
    assert {(one.value, one.limit) for one in found.examples["web", "kept", SHORT]} == {
        (float(words[bytes.fromhex(doc)]), 100.0) for doc in expected
    }


def rows(run: Store, table: str, columns: list[str], opened: Any = None) -> list[dict[str, Any]]:
    """Rows of a table of a run."""
    folder, manifest = (opened.folder, opened.manifest) if opened else open_table(run, table)
    parts = [pq.read_table(folder.path(path), columns=columns).to_pylist() for path in manifest.paths_of()]
    return [row for part in parts for row in part]
