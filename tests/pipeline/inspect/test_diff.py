"""The difference of two runs: documents in and out by hand-made verdicts, and the rule whose threshold changed."""

import argparse
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.verbs.inspect import diff_command
from pipeline.inspect.diff import NOT_READ, compare_runs, open_compared_run
from pipeline.report.compare import write_comparison
from pipeline.tokens.streams import live_tokens
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.manifest import open_table, read_run, write_run
from schemas.storage import Store
from schemas.versions import attach_run, open_run, open_run_to_read
from tests.support.lineage_run import edit, join_dataset, next_version, record_files
from tests.support.report_run import LIMITS, MAKERS, READS, Record, add_training, crawl, identifier, make_run

SHORT, TOXIC, NEAR = "quality/gopher_short_doc", "toxicity/toxic_word_share", "dedup/near_duplicate"


def run_of(folder: Path, changes: dict[int, str] | None = None, more: Sequence[Record] = ()) -> Store:
    """Return the synthetic crawl in which some records, by index from the end (-1), have another verdict."""
    records = [*crawl(), *more]
    for index, outcome in (changes or {}).items():
        records[index] = replace(records[index], outcome=outcome)
    return make_run(folder, until="clean", records=records)


def diff(capsys: pytest.CaptureFixture[str], a: Any, b: Any, **given: Any) -> str:
    """Return the output of `penstock diff`."""
    arguments = argparse.Namespace(
        **{"a": getattr(a, "uri", a), "b": getattr(b, "uri", b), "list": 0, "json": None} | given
    )
    assert diff_command(arguments) == 0
    return capsys.readouterr().out


def test_equal_runs_are_reported_as_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    text = diff(capsys, a, b, list=3)
    assert text.splitlines()[-1] == "equal: the digests are the same, and so are documents and tokens"
    assert compare_runs(open_compared_run(a), open_compared_run(b), 3).documents == Counter()


def test_runs_with_one_dataset_and_other_documents_are_not_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B was run up to `clean` with other settings after its dataset was made."""
    changed = [*crawl()]
    changed[-4] = replace(changed[-4], outcome=SHORT)
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", records=changed)
    join_dataset(a)
    for table in ("tokenizer", "tokens"):
        inputs = json.loads(open_table(a, table)[1].content.model_dump_json())["inputs"]
        edit(b, table, lambda content, inputs=inputs: content.update(inputs=inputs))
    assert open_table(a, "tokens")[1].digest == open_table(b, "tokens")[1].digest
    text = diff(capsys, a, b, json=str(tmp_path / "diff.json"))
    assert "equal" not in text
    assert f"only in A, by the rule that dropped them in B: 1\n  web  {SHORT}  1\n" in text
    assert "\nB has a dataset made from another table `clean` than its current one, so its tokens are" in text
    assert "\nA has a dataset made" not in text
    assert json.loads((tmp_path / "diff.json").read_text())["equal"] is False
    page = Path(write_comparison(("a", a), ("b", b), Store(str(tmp_path)), "page.html")).read_text()
    assert "Both runs have the same digest" not in page
    assert "1 documents are kept only by A, 0 only by B." in page


def test_documents_out_in_and_dropped_by_another_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run_of(tmp_path / "a", {-7: TOXIC, -8: SHORT})
    b = run_of(tmp_path / "b", {-4: SHORT, -5: SHORT, -6: NEAR, -8: TOXIC})
    difference = compare_runs(open_compared_run(a), open_compared_run(b), 5)
    assert difference.documents == {
        ("web", "kept", SHORT): 2,
        ("web", "kept", NEAR): 1,
        ("web", TOXIC, "kept"): 1,
        ("web", SHORT, TOXIC): 1,
    }
    assert difference.moved(out=True) == {("web", SHORT): 2, ("web", NEAR): 1}
    assert difference.moved(out=False) == {("web", TOXIC): 1}
    assert difference.kept == (18, 16)
    total = len(crawl())
    examples = {example.doc_id: (example.value, example.limit) for example in difference.examples["web", "kept", SHORT]}
    assert examples == {identifier(total - n).hex(): LIMITS["quality"] for n in (4, 5)}
    text = diff(capsys, a, b, list=1)
    assert "only in A, by the rule that dropped them in B: 3\n  web  quality/gopher_short_doc  2\n    " in text
    assert "  4, limit 50  https://c.example/kept/" in text
    assert "only in B, by the rule that dropped them in A: 1\n  web  toxicity/toxic_word_share  1\n" in text
    assert f"dropped by both, by different rules: 1\n  web  {SHORT} → {TOXIC}  1" in text


@pytest.mark.parametrize(("num_examples", "listed"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_the_number_of_examples_is_limited(tmp_path: Path, num_examples: int, listed: int) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT, -5: SHORT})
    difference = compare_runs(open_compared_run(a), open_compared_run(b), num_examples)
    assert [len(examples) for examples in difference.examples.values()] == [listed]


def test_documents_that_only_one_run_has_read(tmp_path: Path) -> None:
    more = [Record(language="en", chars=100, url=f"https://d.example/{n}", text=f"more {n}") for n in range(3)]
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", more=more)
    assert compare_runs(open_compared_run(a), open_compared_run(b), 0).documents == {("web", NOT_READ, "kept"): 3}
    assert compare_runs(open_compared_run(b), open_compared_run(a), 0).documents == {("web", "kept", NOT_READ): 3}


def test_files_in_another_order_or_of_other_names(tmp_path: Path) -> None:
    """Parts are joined by the name of their file, never by their number."""
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    edit(b, "documents", lambda content: content["inputs"][0].update(name="other.warc.gz"))
    documents = open_table(b, "documents")[1].digest
    for table in ("verdicts", "clusters", "dedup", "clean"):
        for read in ("documents", "verdicts", "clusters", "dedup"):
            _reads(b, table, read, open_table(b, read)[1].digest)
    assert documents == open_table(b, "documents")[1].digest
    difference = compare_runs(open_compared_run(a), open_compared_run(b), 1)
    assert difference.documents == Counter()
    only_a, only_b = difference.unshared
    assert (only_a.names, only_b.names) == (["crawl-0.warc.gz"], ["other.warc.gz"])
    assert (only_a.rows, only_a.kept) == (only_b.rows, only_b.kept) == (27, 10)


def test_a_file_is_the_same_in_a_run_of_one_source_and_of_several(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT})
    edit(a, "documents", lambda content: content["config"].update(source={"name": "web"}))

    def of_several(content: dict[str, Any]) -> None:
        content["config"]["source"] = {"books": {"name": "books"}, "web": {"name": "web"}}
        for entry in content["inputs"]:
            entry["name"] = f"web/{entry['name']}"

    edit(b, "documents", of_several)
    for run in (a, b):
        record_files(run, "documents")
    difference = compare_runs(open_compared_run(a), open_compared_run(b), 1)
    assert difference.documents == {("web", "kept", SHORT): 1}
    assert [each.names for each in difference.unshared] == [[], []]


def test_a_file_without_rows_hides_no_other_file_of_its_part(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT, -5: SHORT})

    def with_an_empty_file(content: dict[str, Any]) -> None:
        content["config"]["source"] = {"name": "web"}
        content["inputs"] = [entry | {"part": part} for part, entry in enumerate(content["inputs"])]
        content["inputs"][1:1] = [{"name": "crawl-0.warc", "bytes": 0, "sha256": "e" * 64, "part": 0}]
        content["inputs"][3:3] = [{"name": "crawl-1.warc", "bytes": 0, "sha256": "e" * 64, "part": 1}]

    for run in (a, b):
        edit(run, "documents", with_an_empty_file)
        record_files(run, "documents")
    difference = compare_runs(open_compared_run(a), open_compared_run(b), 0)
    assert difference.documents == {("web", "kept", SHORT): 2}


def test_input_files_that_only_one_run_read_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the records are in a file that B names otherwise; their documents are not dropped by a rule."""
    a, b = run_of(tmp_path / "a", {-8: SHORT}), run_of(tmp_path / "b", {-8: TOXIC, -3: NEAR})
    edit(b, "documents", lambda content: content["inputs"][0].update(name="other.warc.gz"))
    for table in ("verdicts", "clusters", "dedup", "clean"):
        for read in ("documents", "verdicts", "clusters", "dedup"):
            _reads(b, table, read, open_table(b, read)[1].digest)
    text = diff(capsys, a, b, json=str(tmp_path / "diff.json"))
    assert (
        "\ninput files that only one run read; their documents are not compared\n"
        f"  only in A ({a.uri}): 1 file, 27 rows, 10 documents kept: crawl-0.warc.gz\n"
        f"  only in B ({b.uri}): 1 file, 27 rows, 9 documents kept: other.warc.gz\n"
    ) in text
    assert "not_read" not in text
    unshared = json.loads((tmp_path / "diff.json").read_text())["unshared_inputs"]
    assert unshared["b"] == {"names": ["other.warc.gz"], "rows": 27, "kept": 9}


def test_a_limit_that_is_not_set_is_the_limit_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT})
    setting = {"setting": "quality.min_alpha_words"}
    limits = {
        "quality/gopher_alpha_words of books": {**setting, "limits": {"en": 0.5}, "own_source": "books"},
        "quality/gopher_alpha_words share of words": {**setting, "limits": {"en": 0.8, "de": 0.729}},
    }
    for run, given in ((a, None), (b, 0.7)):
        quality = {"dialect": "datatrove", "min_alpha_words": given, "profiles": None, "max_javascript": given}

        def change(content: dict[str, Any], quality: dict[str, Any] = quality) -> None:
            content["config"] = {"quality": quality}
            content["figures"]["limits"] = limits

        edit(run, "verdicts", change)
        digest = open_table(run, "verdicts")[1].digest
        for table in ("clusters", "dedup", "clean"):
            _reads(run, table, "verdicts", digest)
        _reads(run, "clean", "dedup", open_table(run, "dedup")[1].digest)
    text = diff(capsys, a, b, json=str(tmp_path / "diff.json"))
    in_force = "0.8 (default of the dialect datatrove; 1 language has its own limit)"
    assert f"  quality.min_alpha_words  {in_force} → 0.7\n" in text
    assert "  quality.max_javascript   unset → 0.7\n" in text
    written = json.loads((tmp_path / "diff.json").read_text())
    assert written["settings"]["quality.min_alpha_words"] == {"a": None, "b": 0.7}
    assert written["setting_texts"]["quality.min_alpha_words"] == {"a": in_force, "b": "0.7"}


def _reads(run: Store, table: str, read: str, digest: str) -> None:
    def change(content: dict[str, Any]) -> None:
        for entry in content["inputs"]:
            if entry["name"] == read:
                entry["sha256"] = digest

    edit(run, table, change)


def test_the_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT})
    diff(capsys, a, b, list=2, json=str(tmp_path / "out" / "diff.json"))
    difference = json.loads((tmp_path / "out" / "diff.json").read_text())
    sides = difference["a"]["documents"], difference["b"]["documents"]
    assert (difference["equal"], *sides) == (False, 20, 19)
    (entry,) = difference["documents"]
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
    assert "  tokens.seed  unset → 1" in text
    assert "documents: both keep the same" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("web/train"))
    total = sum(before.content.figures["streams"]["web/train"])
    assert row == ["web/train", f"{total:,}", f"{total - 7:,}", "-7"]


def write_manifest_lineage(run: Store) -> None:
    """Write the versions that the first dataset was made from into its lineage."""
    for table, reads in {"tokens": ("clean", "tokenizer"), **READS}.items():
        name = f"{table}/v-0000000071a9/manifest.json"
        manifest = run.read_json(name)
        manifest["run"]["lineage"] = dict.fromkeys(reads, "v-0000000071a9")
        run.write_atomic(name, canonical_json(manifest))


def test_tombstones_are_no_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    tokens = open_table(run, "tokens")[1]
    streams = {name: sum(shards) for name, shards in tokens.content.figures["streams"].items()}
    assert live_tokens(run, tokens) == streams


def test_bad_arguments_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="expected a number of at least 0, got -1"):
        diff(capsys, run, run, list=-1)
    with pytest.raises(ConfigError, match="nothing: expected a run folder, got no such folder"):
        diff(capsys, run, str(tmp_path / "nothing"))
    edit(run, "verdicts", lambda content: content["figures"].update(bait=1))
    with pytest.raises(
        ContractError,
        match=r"`dedup` made from the current `verdicts` \(\w{12}\), got `dedup` made from `verdicts` \w{12}\. Run",
    ):
        diff(capsys, run, run)


def test_a_table_that_the_run_no_longer_has_is_rejected(tmp_path: Path) -> None:
    """The recipe was run again without its models, and stopped before the verdicts."""
    run = run_of(tmp_path / "run")
    edit(run, "verdicts", lambda content: content["inputs"].append({"name": "scores", "bytes": 1, "sha256": "5" * 64}))
    with pytest.raises(
        ContractError,
        match=r"`verdicts` made from the current `scores` \(none\), got `verdicts` made from `scores` 5{12}\.",
    ):
        open_compared_run(run)


def test_tables_whose_rows_do_not_belong_together_are_rejected(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", {-4: SHORT})
    parts = open_table(b, "verdicts")[1].paths_of()
    first, second = (b.read_bytes(f"verdicts/v-0000000071a9/{path}") for path in parts)
    b.write_atomic(f"verdicts/v-0000000071a9/{parts[0]}", second)
    b.write_atomic(f"verdicts/v-0000000071a9/{parts[1]}", first)
    record_files(b, "verdicts")
    with pytest.raises(
        ContractError, match=r"part-0000. of `verdicts` to hold the same documents as part-0000. of `documents`"
    ):
        compare_runs(open_compared_run(a), open_compared_run(b), 0)


# ------------------------------------------------------------------------------------------- two models on one dataset


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Store, Store]:
    """Return a trained run, and a run on its dataset with another plan and 20 steps fewer."""
    run, new = make_run(tmp_path / "run"), Store(str(tmp_path / "new"))
    join_dataset(run)
    write_manifest_lineage(run)
    add_training(run)
    attach_run(new, run, ("tokens", "tokenizer"))
    plan = run.read_json("train/plan.json") | {"num_params": 2_000, "learning_rate": 0.01, "shape": {"d_model": 64}}
    plan["stages"][-1] |= {"seq_len": 16, "global_batch": 5}
    plan["settings"] |= {"optim": {"name": "muon"}}
    new.write_atomic("train/plan.json", canonical_json(plan))
    lines = run.read_bytes("train/metrics.jsonl").splitlines(keepends=True)[:20]
    new.write_atomic("train/metrics.jsonl", b"".join(lines))
    return run, new


def test_two_models_on_one_dataset(planned: tuple[Store, Store], capsys: pytest.CaptureFixture[str]) -> None:
    text = diff(capsys, *planned)
    assert "\nequal: the digests are the same, and so are documents and tokens\n" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["optim.name", "unset", "→", '"muon"'] in lines
    assert ["model.d_model", "unset", "→", "64"] in lines
    assert [
        "equal:",
        "the",
        "digests",
        "are",
        "the",
        "same,",
        "and",
        "so",
        "are",
        "documents",
        "and",
        "tokens",
    ] in lines
    for row in (
        ["parameters", "–", "2,000"],
        ["steps", "40", "20", "-20"],
        ["tokens", "seen", "3,200", "1,600", "-1,600"],
        ["tokens", "per", "second", "9", "9", "0"],
        ["loss", "of", "the", "last", "step", "4", "6", "+2"],
        ["held-out", "loss", "web", "4.45", "6.45", "+2"],
    ):
        assert row in lines


def test_a_run_on_the_dataset_of_another_one_has_its_documents(planned: tuple[Store, Store], tmp_path: Path) -> None:
    run, new = planned
    linked = open_run_to_read(new.uri)
    assert read_run(linked).tables.keys() == {"documents", "text", "verdicts", "clusters", "dedup", "clean"} | {
        *read_run(new).tables
    }
    assert {name: open_table(linked, name)[1] for name in MAKERS if name != "audit"} == {
        name: open_table(run, name)[1] for name in MAKERS if name != "audit"
    }
    assert pickle.loads(pickle.dumps(linked)).read_json("run.json") == linked.read_json("run.json")
    with pytest.raises(ContractError, match=r"run\.json: expected a run folder of its own, got one opened with"):
        write_run(linked, read_run(linked))
    third = Store(str(tmp_path / "third"))
    attach_run(third, new, ("tokens", "tokenizer"))
    assert compare_runs(open_compared_run(run), open_compared_run(open_run_to_read(third.uri)), 1).kept == (20, 20)


def test_tables_that_are_gone_are_named(planned: tuple[Store, Store], capsys: pytest.CaptureFixture[str]) -> None:
    run, new = planned
    for name in ("documents", "clean"):
        shutil.rmtree(Path(run.path(name)))
    lines = diff(capsys, new, new).splitlines()
    sentence = (
        "has a dataset without the tables `documents` and `clean`, so documents, rules and lengths are not compared."
    )
    assert [f"A {sentence}", f"B {sentence}"] == [line for line in lines if sentence in line]
    with pytest.raises(ContractError, match=f"expected a table 'documents', got .* Name {run.uri}, whose tables"):
        open_table(new, "documents")


def test_what_one_run_lacks_is_one_sentence(planned: tuple[Store, Store], capsys: pytest.CaptureFixture[str]) -> None:
    run, new = planned
    Path(new.path("train/metrics.jsonl")).unlink()
    assert "B is planned and not trained yet, so it has no losses." in diff(capsys, run, new).splitlines()
    Path(new.path("train/plan.json")).unlink()
    lines = diff(capsys, run, new).splitlines()
    assert "B has no plan, so it has no figures of training." in lines
    assert not any("optim.name" in line for line in lines)
    other = run_of(Path(run.path("../other")))
    assert "B has no dataset yet, so it has no tokens." in diff(capsys, run, other).splitlines()


# ----------------------------------------------------------------------------------------------------- a real threshold


@pytest.mark.spark
def test_one_threshold_names_its_rule_and_its_documents(tmp_path: Path, spark: Any) -> None:
    """On a real run, exactly the documents with too few words are dropped, and only that rule is named."""
    from jobs.recipe import recipe_sections
    from pipeline.demo_crawl.build import build_demo_crawl
    from pipeline.prepare import prepare
    from pipeline.run import run_steps
    from schemas.overrides import load_recipe

    build_demo_crawl(tmp_path / "crawl", 100, 1)
    run = Store(str(tmp_path / "run"))
    archive = min((tmp_path / "crawl").glob("*.warc.gz"))  # one of four is enough
    raw = {"source": {"paths": [str(archive)]}, "quality": {"min_words": 50}}
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
    difference = compare_runs(a, b, 1000)
    assert difference.settings == {"quality.min_words": (50, 100)}
    assert difference.moved(out=True) == {("web", SHORT): len(expected)}
    examples = difference.examples["web", "kept", SHORT]
    assert {example.doc_id for example in examples} == expected
    assert {(example.value, example.limit) for example in examples} == {
        (float(words[bytes.fromhex(doc)]), 100.0) for doc in expected
    }


def rows(run: Store, table: str, columns: list[str], opened: Any = None) -> list[dict[str, Any]]:
    """Return the rows of a table of a run."""
    folder, manifest = (opened.folder, opened.manifest) if opened else open_table(run, table)
    parts = [pq.read_table(folder.path(path), columns=columns).to_pylist() for path in manifest.paths_of()]
    return [row for part in parts for row in part]
