"""Whole runs on a small demo crawl: same bytes at any partitioning, balanced books, resume, tables by manifest only."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe, stored_recipe
from jobs.whatif import deciding_models
from pipeline.build import Built
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.run import check_inputs, prepare, run_steps
from pipeline.show import column_equals, describe, find_documents, parse_where
from pipeline.whatif.predict import KEEP, predict
from pipeline.whatif.tell import kept_tokens, token_rates
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.tokens import open_dataset
from train.config.settings import load_settings
from train.plan.planned import write_plan
from train.plan.sizing import make_plan
from train.trace import documents_of_step, steps_of_url

pytestmark = pytest.mark.spark

RECIPE = Path(__file__).parents[1] / "jobs" / "recipes" / "demo.toml"
SMALL = [
    "tokenizer.vocab_size=1600",
    "tokens.shard_tokens=20000",
    "tokens.chunk_tokens=512",
    "tokens.heldout_share=0.1",
]
NAMES = ("documents", "text", "verdicts", "clusters", "dedup", "audit", "clean", "tokenizer", "tokens")


@pytest.fixture(scope="module")
def crawl(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("crawl")
    build_demo_crawl(folder, pages=240, seed=3)
    return folder


@pytest.fixture(scope="module")
def run_at(spark, crawl, tmp_path_factory):
    """A function that runs the crawl into a folder of its own (or a given one) with some partitions and settings."""

    def run(partitions=None, overrides=(), folder=None, until=None) -> Store:
        store = Store(str(folder or tmp_path_factory.mktemp("run")))
        paths = f'source.paths=["{crawl}/*.warc.gz"]'
        recipe = read_recipe(str(RECIPE), [paths, *SMALL, *overrides])
        run_steps(spark, prepare(recipe, until), store, partitions)
        return store

    return run


@pytest.fixture(scope="module")
def finished(run_at) -> Store:
    return run_at(2)


def digests(run: Store) -> dict[str, str]:
    return {name: open_table(run, name)[1].digest for name in NAMES}


@pytest.mark.parametrize("partitions", [1, 7])
def test_same_bytes_at_any_partitioning(run_at, finished, partitions):
    # `finished` ran at 2
    run = run_at(partitions, [f"dedup.partitions={partitions}", "dedup.finish_edges=0"])
    assert digests(run) == digests(finished)
    ours, theirs = open_dataset(run), open_dataset(finished)
    for one, two in zip(ours.streams["web/train"], theirs.streams["web/train"], strict=True):
        assert ours.folder.read_bytes(one.path) == theirs.folder.read_bytes(two.path)
    assert len(ours.streams["web/train"]) > 1


def test_books_balance_in_every_manifest_and_agree_with_the_tables(finished):
    for name in ("documents", "verdicts", "dedup", "clean"):
        folder, manifest = open_table(finished, name)
        counts = manifest.content.counts
        rows = [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]
        assert len(rows) == counts.rows_in
        assert sum(row["drop_stage"] is None for row in rows) == counts.rows_kept
        found = dict.fromkeys(counts.dropped, 0)
        for row in rows:
            if row["drop_stage"] is not None:
                found[f"{row['drop_stage']}/{row['drop_rule']}"] += 1
        assert found == counts.dropped
        assert counts.rows_kept > 50
    assert (
        open_table(finished, "dedup")[1].content.counts.rows_kept
        == open_table(finished, "clean")[1].content.counts.rows_in
    )


def verdicts(run: Store) -> dict[tuple[str, int], str | None]:
    """The final rule of every record (None: kept) by its place in the crawl."""
    found, places = {}, {}
    for name in ("documents", "verdicts", "dedup", "clean"):
        folder, manifest = open_table(run, name)
        for path in manifest.paths_of():
            for row in pq.read_table(folder.path(path)).to_pylist():
                if name == "documents":
                    places[row["doc_id"]] = (row["split"], row["offset"])
                if row["drop_rule"] != "dropped_before":
                    found[places[row["doc_id"]]] = row["drop_rule"]
    return found


def test_what_was_planted_is_found(finished, crawl):
    rules = verdicts(finished)
    groups: dict[str, list[tuple[str, str | None]]] = {}
    wrong = []
    for line in (crawl / "truth.jsonl").read_text().splitlines():
        case = json.loads(line)
        rule = rules[case["file"], case["offset"]]
        if "group" in case:
            groups.setdefault(case["group"], []).append((case["kind"], rule))
        elif (case["expected"] == "drop" and rule not in case["rules"]) or (case["expected"] == "keep" and rule):
            wrong.append((case["kind"], rule))
    assert len(wrong) <= 1, wrong
    exact = [
        rules for group in groups.values() if any("exact" in kind for kind, _ in group) for _, rules in [zip(*group)]
    ]
    assert len(exact) >= 4
    assert {rules.count(None) for rules in exact} == {1}
    near = [
        [rule for _, rule in group] for group in groups.values() if any(k in ("near_95", "near_90") for k, _ in group)
    ]
    assert len(near) >= 8
    assert {rules.count(None) for rules in near} == {1}
    far = [
        [rule for _, rule in group] for group in groups.values() if any(k in ("near_30", "near_50") for k, _ in group)
    ]
    assert {rule for rules in far for rule in rules} == {None}


def test_every_byte_of_every_archive_is_accounted_for(finished, crawl):
    folder, manifest = open_table(finished, "documents")
    covered: dict[str, int] = {}
    for path in manifest.paths_of():
        table = pq.read_table(folder.path(path), columns=["split", "length"])
        for split, length in zip(*(column.to_pylist() for column in table.columns)):
            covered[split] = covered.get(split, 0) + length
    assert covered == {path.name: path.stat().st_size for path in crawl.glob("*.warc.gz")}


def test_tables_have_their_schema_with_a_meaning_for_every_column(finished):
    for name, schema in TABLES.items():
        if name in ("scores", "repeats"):  # see test_run_models, test_repeats_part: they are not asked for here
            continue
        folder, manifest = open_table(finished, name)
        found = pq.read_schema(folder.path(manifest.paths_of()[0]))
        assert found.equals(schema)
        assert [field.metadata for field in found] == [field.metadata for field in schema]
        assert [field.name for field in schema if not (field.metadata or {}).get(b"meaning")] == []


def test_tokens_lead_to_their_documents(finished):
    dataset = open_dataset(finished)
    clean, manifest = open_table(finished, "clean")
    rows = [row for path in manifest.paths_of() for row in pq.read_table(clean.path(path)).to_pylist()]
    kept = {row["doc_id"]: row for row in rows if row["drop_stage"] is None}
    seen, clusters = set(), {}
    for stream, shards in dataset.streams.items():
        for shard in shards:
            tokens = pa.ipc.open_file(dataset.folder.open_input(shard.path)).read_all()
            docs = pa.ipc.open_file(dataset.folder.open_input(shard.docs_path)).read_all().to_pylist()
            assert tokens.column("doc_id").to_pylist() == [row["doc_id"] for row in docs]
            offset = 0
            for ids, row in zip(tokens.column("tokens").to_pylist(), docs):
                assert (row["token_offset"], row["num_tokens"]) == (offset, len(ids))
                assert (ids[0], ids[-1]) == (dataset.tokenizer.reserved["bos"], dataset.tokenizer.reserved["eos"])
                source = kept[row["doc_id"]]
                expected = (source["url"], source["split"], source["offset"], source["num_bytes"])
                assert (row["url"], row["split"], row["offset"], row["num_bytes"]) == expected
                clusters.setdefault(row["cluster"], set()).add(stream)
                seen.add(row["doc_id"])
                offset += len(ids)
            assert offset == shard.num_tokens
    assert seen == set(kept)
    assert {len(streams) for streams in clusters.values()} == {1}
    assert {"web/train", "web/heldout"} == set(dataset.streams)


def test_show_finds_documents_by_condition_with_verdict_and_provenance(finished):
    rows = list(find_documents(finished, parse_where("drop_rule = gopher_short_doc and language == 'en'"), 2))
    assert [row["drop_rule"] for row in rows] == ["gopher_short_doc"] * 2
    text = describe(rows[0], with_text=True)
    assert f"dropped by quality/gopher_short_doc ({rows[0]['gopher_num_words']}, limit 50)" in text
    assert rows[0]["url"] in text
    assert f"offset                     {rows[0]['offset']} bytes" in text
    (kept,) = find_documents(finished, parse_where("drop_stage is null and gopher_num_words > 100"), 1)
    assert kept["clean.text"] in describe(kept, with_text=True).replace("\n  | ", "\n")[-len(kept["clean.text"]) :]
    (same,) = find_documents(finished, column_equals("doc_id", kept["doc_id"].hex()), 5)
    assert same == kept


def test_every_document_of_a_step_is_traced_back_to_its_url_and_step(finished):
    dataset = open_dataset(finished)
    raw = {"plan": {"max_epochs": 100}, "train": {"seq_len": 128, "global_batch": 4, "steps": 20}}
    write_plan(finished, make_plan(finished, dataset, load_settings(raw, [], "test")))
    rows = documents_of_step(finished, 7)
    assert len({row.row for row in rows}) == 4
    for row in rows[:6]:
        (found,) = [found for found in steps_of_url(finished, row.url) if found.doc_id == row.doc_id]
        assert row in found.appearances


def test_a_second_run_does_nothing_and_a_changed_setting_redoes_only_what_depends_on_it(
    run_at, finished, tmp_path, capsys
):
    folder = tmp_path / "run"
    shutil.copytree(finished.root, folder)
    run_at(folder=folder)
    assert capsys.readouterr().err.count("stands") == 8
    run_at(folder=folder, overrides=["tokens.seed=9"])
    assert capsys.readouterr().err.count("stands") == 7
    before, after = digests(finished), digests(Store(str(folder)))
    assert {name for name in NAMES if before[name] != after[name]} == {"tokens"}


def test_a_table_without_manifest_does_not_exist_and_finished_parts_are_kept(run_at, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.root, folder)
    run = Store(str(folder))
    version = read_run(run).tables["clean"]
    (folder / "clean" / version / "manifest.json").unlink()
    with pytest.raises(ContractError, match=r"clean/v-.*found no manifest\.json"):
        open_table(run, "clean")
    run_at(folder=folder)
    assert digests(run) == digests(finished)


def test_an_input_that_changed_its_content_and_kept_its_looks_is_refused(finished):
    _, manifest = open_table(finished, "documents")
    sources = [entry.model_dump() for entry in manifest.content.inputs]
    identities = {name: value for name, value in manifest.run.lineage.items() if name.startswith("input:")}
    check_inputs(finished, "documents", Built(sources=sources), identities)
    changed = [sources[0] | {"sha256": "0" * 64}, *sources[1:]]
    with pytest.raises(ContractError, match=f"promised SHA-256 {sources[0]['sha256'][:16]}.*found 0000"):
        check_inputs(finished, "documents", Built(sources=changed), identities)
    touched = identities | {f"input:{sources[0]['name']}": "another size and time"}
    check_inputs(finished, "documents", Built(sources=changed), touched)


def test_wrong_step_and_missing_input_stop_before_anything_runs(run_at, tmp_path):
    with pytest.raises(
        ConfigError, match="'dedupe': no such step; the steps are documents, scores, verdicts, clusters, dedup"
    ):
        run_at(until="dedupe")
    with pytest.raises(ConfigError, match=r"nothing-\*"):
        run_at(overrides=[f"source.paths=['{tmp_path}/nothing-*']"], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_model_stops_before_anything_runs(run_at, tmp_path):
    with pytest.raises(ConfigError, match="no-such-model"):
        run_at(overrides=[f"language.model={tmp_path}/no-such-model.ftz"], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


TRIED = [
    "quality.min_words=120",
    "quality.max_top_4gram=0.5",
    "quality.rules=['gopher_repetition','gopher_quality']",
    "toxicity.max_word_share=0.5",
    'dedup.keep=["shortest"]',
]


def committed_fates(run: Store) -> dict[str, tuple[int, int]]:
    """Documents and characters by fate, from the books of `verdicts` and `dedup`."""
    fates = {}
    for name in ("verdicts", "dedup"):
        content = open_table(run, name)[1].content
        chars = content.figures["dropped_chars"]
        fates |= {rule: (number, chars[rule]) for rule, number in content.counts.dropped.items() if number}
        fates[KEEP] = (content.counts.rows_kept, content.figures["kept_chars"])
    del fates["dedup/dropped_before"]
    return fates


def predicted_fates(cells, after: bool) -> dict[str, tuple[int, int]]:
    fates: dict[str, tuple[int, int]] = {}
    for cell in cells:
        fate = cell.after if after else cell.before
        documents, chars = fates.get(fate, (0, 0))
        fates[fate] = (documents + cell.documents, chars + cell.chars)
    return fates


def test_a_what_if_predicts_what_a_run_with_those_settings_keeps(spark, run_at, finished, tmp_path):
    narrow = Store(str(tmp_path / "narrow"))  # without text and clean: no text is read
    kept = shutil.ignore_patterns("text", "clean", "tokenizer")
    shutil.copytree(finished.uri, narrow.uri, ignore=kept)
    wanted = stored_recipe(finished, TRIED)
    prediction = predict(spark, narrow, wanted, deciding_models(wanted))
    assert predicted_fates(prediction.cells, after=False) == committed_fates(finished)
    run = run_at(2, TRIED, until="dedup")
    assert predicted_fates(prediction.cells, after=True) == committed_fates(run)
    assert committed_fates(run) != committed_fates(finished)
    languages = open_table(finished, "clean")[1].content.figures["kept_languages"]
    before = {cell.language: 0 for cell in prediction.cells}
    for cell in prediction.cells:
        before[cell.language] += cell.documents if cell.before == KEEP else 0
    assert {name: number for name, number in before.items() if number} == languages
    dataset = sum(map(sum, open_table(finished, "tokens")[1].content.figures["streams"].values()))
    rates = token_rates(prediction.cells)
    assert kept_tokens(prediction.cells, False, rates) == (dataset, False)
    assert kept_tokens(prediction.cells, True, rates)[1]
    by_setting = {curve.reason: curve for curve in prediction.curves}
    points = dict(by_setting["gopher_short_doc"].points)
    assert max(points.values()) >= open_table(run, "verdicts")[1].content.counts.rows_kept


def test_other_thresholds_leave_the_measurements_standing(run_at, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.uri, folder)
    run = run_at(2, ["quality.min_words=120"], folder, until="verdicts")
    assert read_run(run).tables["documents"] == read_run(finished).tables["documents"]
    assert read_run(run).tables["verdicts"] != read_run(finished).tables["verdicts"]
