"""Whole runs on a small demo crawl: same bytes at any partitioning, balanced books, resume, tables by manifest only."""

import contextlib
import io
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import deciding_models, stored_recipe
from pipeline.dedup.audit.step import OF_SOURCES
from pipeline.engine.step import TableResult
from pipeline.inspect.diff import compare_runs, open_compared_run
from pipeline.inspect.document_text import format_document
from pipeline.inspect.show import column_equals, find_documents, parse_where
from pipeline.inspect.whatif import KEPT_VERDICT, kept_tokens, predict, token_rates
from pipeline.membership.dataset import check_index, prove_in, tables_of
from pipeline.membership.tree import Leaf, build_tree, value_of
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks, funnel_rows
from pipeline.report.page import write_report
from pipeline.run import check_inputs
from pipeline.stages import DOCUMENT_COLUMNS
from pipeline.tokens import dataset as dataset_step
from pipeline.tokens import train_tokenizer
from pipeline.tokens.streams import TOKENS
from schemas.errors import ConfigError, ContractError
from schemas.ids import shuffle_key
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from schemas.tables import NOT_PLANTED, PARENTS, TABLES
from schemas.tokens import open_dataset
from schemas.versions import open_run as run_at_address
from tests.pipeline.tokens.test_streams import mix, written
from tests.support.table_readers import by_every_reader, check_reader
from tests.support.tiny_takedown import certificates, documents_of, take_down
from train.config.settings import load_settings
from train.plan.make_plan import make_plan
from train.plan.plan import write_plan
from train.trace import documents_of_step, steps_of_url

pytestmark = pytest.mark.spark

NAMES = ("documents", "text", "verdicts", "clusters", "dedup", "audit", "clean", "tokenizer", "tokens")
STREAMS = tuple(f"web+{bucket}/{split}" for bucket in ("low", "middle", "high") for split in ("train", "heldout"))
CUTS = {"low": (0.0, 0.75), "middle": (0.75, 0.85), "high": (0.85, 2.0)}
"""Least value of the demo's signal in each of its buckets, and the least above it."""


@by_every_reader
def test_others_read_every_table_as_it_is(reader, finished, tmp_path):
    assert check_reader(reader, finished, tmp_path) == {*NAMES} - {"tokenizer"}


def digests(run: Store) -> dict[str, str]:
    return {name: open_table(run, name)[1].digest for name in NAMES}


@pytest.mark.parametrize("partitions", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_same_bytes_at_any_partitioning(run_at, finished, partitions):
    # `finished` ran at 2
    run = run_at(partitions, [f"dedup.partitions={partitions}", "dedup.finish_edges=0"])
    assert digests(run) == digests(finished)
    ours, theirs = open_dataset(run), open_dataset(finished)
    assert {*ours.streams} == {*theirs.streams} == {*STREAMS}
    for stream in STREAMS:
        for one, two in zip(ours.streams[stream], theirs.streams[stream], strict=True):
            assert ours.folder.read_bytes(one.path) == theirs.folder.read_bytes(two.path)
    assert len(ours.streams["web+middle/train"]) > 1


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
    made = read_run(finished).tables
    assert {"documents", "text", "verdicts", "clusters", "dedup", "audit", "clean"} <= made.keys()
    for name, schema in ((table.name, table.schema) for table in TABLES.values() if table.schema is not None):
        if name not in made:  # see test_run_models, test_repeats_part: some tables are not asked for here
            continue
        folder, manifest = open_table(finished, name)
        if name == "documents":  # no source of the run has parents
            schema = pa.schema([field for field in DOCUMENT_COLUMNS if field.name != PARENTS.name])
        if name == "clean":  # nothing is planted
            schema = NOT_PLANTED
        if name == "audit":  # the run has one source
            schema = pa.schema([field for field in schema if field.name not in OF_SOURCES])
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
    assert set(dataset.streams) == {*STREAMS}


def parts_of_table(run: Store, table: str) -> list[dict]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


def test_a_source_is_cut_into_buckets_by_what_was_measured(finished):
    """Trace, the index by URL and the manifest say in which; the document index says whose source it is."""
    measured = {row["doc_id"]: row["fineweb_terminal_lines"] for row in parts_of_table(finished, "documents")}
    dataset = open_dataset(finished)
    rows = documents_of(dataset)
    for row in rows:
        low, high = CUTS[row["stream"].partition("/")[0].removeprefix("web+")]
        assert low <= measured[row["doc_id"]] < high
        assert row["source"] == "web"
    figures = dataset.manifest.content.figures
    cuts = {"by": "fineweb_terminal_lines", "cuts": [0.75, 0.85], "names": ["low", "middle", "high", "none"]}
    assert figures["buckets"] == cuts
    assert figures["documents"] == Counter(row["stream"] for row in rows)
    named = {row["doc_id"]: row["stream"] for path in dataset.by_url for row in rows_of_file(dataset, path)}
    assert named == {row["doc_id"]: row["stream"] for row in rows}


def test_the_manifest_has_the_root_of_all_documents(finished):
    """The root is that of the shards, and every document, its stream and its tokens are proven against it."""
    dataset = open_dataset(finished)
    rows = documents_of(dataset)
    leaves = [
        Leaf(row["doc_id"], (value_of(row["stream"], np.array(row["tokens"], dataset.tokenizer.dtype).tobytes()),))
        for row in sorted(rows, key=lambda row: row["doc_id"])
    ]
    root = build_tree(lambda _: leaves, 0)[0].hex()
    assert dataset.manifest.content.figures["membership"] == root
    (table,) = tables_of(dataset)
    proven = prove_in(table, [row["doc_id"] for row in rows])
    assert (proven.root, [proof.leaf for proof in proven.proofs]) == (root, leaves)
    assert proven.has_index
    assert check_index(table)


def rows_of_file(dataset, path: str) -> list[dict]:
    with dataset.folder.open_input(path) as file:
        return pa.ipc.open_file(file).read_all().to_pylist()


def test_sources_that_stay_whole_hold_the_same_documents(run_at, finished, tmp_path):
    """Neither the tokens of a document nor whether it is held out depends on buckets; only the last step is redone."""
    shutil.copytree(finished.root, tmp_path / "run")
    run = run_at(folder=tmp_path / "run", overrides=['tokens.buckets_by=""', "tokens.bucket_cuts=[]"])
    cut, whole = ({row["doc_id"]: row for row in documents_of(open_dataset(one))} for one in (finished, run))
    assert {row["stream"] for row in whole.values()} == {"web/train", "web/heldout"}
    assert "buckets" not in open_table(run, "tokens")[1].content.figures
    assert {name for name in NAMES if digests(run)[name] != digests(finished)[name]} == {"tokens"}
    assert whole.keys() == cut.keys()
    for identifier, row in whole.items():
        assert row["tokens"] == cut[identifier]["tokens"]
        assert row["stream"].partition("/")[2] == cut[identifier]["stream"].partition("/")[2]


@pytest.fixture(scope="module")
def mixed(run_at, finished, tmp_path_factory) -> Store:
    """The run with a mix that keeps half of the lowest bucket, three quarters of the highest, and wants more of it."""
    folder = tmp_path_factory.mktemp("mixed")
    shutil.copytree(finished.root, folder / "run")
    asked = {"web_low": {"keep": 0.5}, "web_middle": {}, "web_high": {"keep": 0.75, "wanted_tokens": 10**9}}
    path = written(folder, mix(**asked))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        run = run_at(3, folder=folder / "run", overrides=[f'tokens.mix="{path}"'])
    found = open_dataset(run).num_tokens()["web+high"]
    share, times = f"{found / 10**9:.2g}", f"{10**9 / found:.1f}"
    assert f"web+high: {share} of the 1.0e9 tokens that mix.toml asks for; {times} x as much crawl" in said.getvalue()
    assert said.getvalue().count("as much crawl") == 1
    return run


def test_a_mix_leaves_out_training_documents_by_hash_and_the_books_say_so(finished, mixed):
    before, after = documents_of(open_dataset(finished)), documents_of(open_dataset(mixed))
    keep = {"web+low/train": 0.5, "web+high/train": 0.75}
    stays = [row for row in before if shuffle_key(2, row["doc_id"]) / 2**63 < keep.get(row["stream"], 1)]
    assert 0 < len(stays) < len(before)
    place = {"start", "token_offset"}
    kept = {row["doc_id"]: {key: value for key, value in row.items() if key not in place} for row in stays}
    found = {row["doc_id"]: {key: value for key, value in row.items() if key not in place} for row in after}
    assert found == kept
    content, gone = open_table(mixed, "tokens")[1].content, len(before) - len(after)
    assert content.counts.dropped == {"tokens/mix": gone}
    assert (content.counts.rows_in, content.counts.rows_kept) == (len(before), len(after))
    tokens = open_dataset(mixed).num_tokens()
    assert {name: asked["found_tokens"] for name, asked in content.figures["mix"].items()} == tokens
    assert content.models.keys() == {"tokens/mix"}
    assert {name for name in NAMES if digests(mixed)[name] != digests(finished)[name]} == {"tokens"}


def test_a_difference_names_the_mix_for_what_it_leaves_out(finished, mixed):
    a, b = open_compared_run(run_at_address(f"{mixed.uri}@{digests(finished)['tokens']}")), open_compared_run(mixed)
    left = {row["doc_id"].hex() for row in documents_of(open_dataset(finished))}
    left -= {row["doc_id"].hex() for row in documents_of(open_dataset(mixed))}
    found = compare_runs(a, b, 1000)
    assert found.moved(out=True) == {("web", "tokens/mix"): len(left)}
    assert found.moved(out=False) == {}
    examples = found.examples["web", "kept", "tokens/mix"]
    assert {one.doc_id for one in examples} == left
    assert {one.limit for one in examples} == {0.5, 0.75}
    assert all(one.value >= one.limit for one in examples)
    assert found.kept[0] - found.kept[1] == len(left)
    assert {name: new for name, (old, new) in found.settings.items() if "keep" in name} == {
        "tokens.mix web+low: keep": 0.5,
        "tokens.mix web+high: keep": 0.75,
    }
    assert compare_runs(b, a, 0).moved(out=False) == {("web", "tokens/mix"): len(left)}
    assert found.tokens["web+middle/train"][0] == found.tokens["web+middle/train"][1]
    assert found.tokens["web+low/train"][0] > found.tokens["web+low/train"][1]


@pytest.mark.parametrize("compact", [False, True])
def test_a_takedown_keeps_the_books_of_what_a_mix_had_left_out(finished, mixed, tmp_path, compact):
    """One document of the dataset and one that the mix left out: the second leaves the count of dropped ones."""
    shutil.copytree(mixed.root, tmp_path / "run")
    run, before = Store(str(tmp_path / "run")), open_table(mixed, "tokens")[1].content
    inside = next(row for row in documents_of(open_dataset(mixed)) if row["stream"] == "web+low/train")
    ids = {row["doc_id"] for row in documents_of(open_dataset(mixed))}
    outside = next(row for row in documents_of(open_dataset(finished)) if row["doc_id"] not in ids)
    assert take_down(run.root, doc=[inside["doc_id"].hex(), outside["doc_id"].hex()], compact=compact) == 0
    (certificate,) = certificates(Path(run.root))
    assert take_down(run.root, check=f"takedowns/{certificate.id}.json") == 0
    after = open_table(run, "tokens")[1].content
    assert after.counts.rows_in == before.counts.rows_in - 2 == open_table(run, "clean")[1].content.counts.rows_kept
    assert after.counts.dropped == {"tokens/mix": before.counts.dropped["tokens/mix"] - 1}
    assert after.figures["documents"]["web+low/train"] == before.figures["documents"]["web+low/train"] - 1
    lost = inside["num_tokens"] if compact else 0
    for name, asked in before.figures["mix"].items():
        assert after.figures["mix"][name]["found_tokens"] == asked["found_tokens"] - lost * (name == "web+low")
    assert [check.claim for check in checks(collect_facts(run)) if not check.holds] == []
    assert inside["doc_id"] not in {row["doc_id"] for row in documents_of(open_dataset(run))}


def test_a_report_shows_buckets_and_what_the_mix_asks_for(mixed, tmp_path):
    shutil.copytree(mixed.root, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    write_report(run, None)
    page = " ".join((tmp_path / "run" / "report.html").read_text().split())
    assert "fineweb_terminal_lines, low below 0.75, middle from 0.75 to below 0.85, high from 0.85, none" in page
    found = open_dataset(run).num_tokens()["web+high"]
    assert (
        f'<code>web+high</code></th><td class="num">75.0 %</td><td class="num">1.50</td><td class="num">{found:,}'
        in page
    )
    assert "clean documents = documents in shards and those that the mix leaves out" in page
    content = open_table(run, "tokens")[1].content
    (level,) = [level for level in funnel_rows(collect_facts(run), {"tokens": TOKENS.reasons}) if level.name == "mix"]
    assert level.documents == content.counts.rows_kept


def test_a_what_if_leaves_out_what_the_mix_does(spark, mixed):
    prediction = predict(spark, mixed, stored_recipe(mixed, []), {})
    content = open_table(mixed, "tokens")[1].content
    for after in (False, True):
        fates = {name: count for name, (count, _) in predicted_fates(prediction.cells, after).items()}
        assert fates["tokens/mix"] == content.counts.dropped["tokens/mix"]
        assert fates[KEPT_VERDICT] == content.counts.rows_kept
    tokens = sum(map(sum, content.figures["streams"].values()))
    assert kept_tokens(prediction.cells, True, token_rates(prediction.cells)) == (tokens, False)


def test_show_finds_documents_by_condition_with_verdict_and_provenance(finished):
    rows = list(find_documents(finished, parse_where("drop_rule = gopher_short_doc and language == 'en'"), 2))
    assert [row["drop_rule"] for row in rows] == ["gopher_short_doc"] * 2
    text = format_document(rows[0], with_text=True)
    assert f"dropped by quality/gopher_short_doc ({rows[0]['gopher_num_words']}, limit 50)" in text
    assert rows[0]["url"] in text
    assert f"offset                     {rows[0]['offset']} bytes" in text
    (kept,) = find_documents(finished, parse_where("drop_stage is null and gopher_num_words > 100"), 1)
    assert (
        kept["clean.text"] in format_document(kept, with_text=True).replace("\n  | ", "\n")[-len(kept["clean.text"]) :]
    )
    (same,) = find_documents(finished, column_equals("doc_id", kept["doc_id"].hex()), 5)
    assert same == kept


def test_every_document_of_a_step_is_traced_back_to_its_url_and_step(finished, tmp_path):
    shutil.copytree(finished.root, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    raw = {"plan": {"max_epochs": 100}, "train": {"seq_len": 128, "global_batch": 4, "steps": 20}}
    write_plan(run, make_plan(run, open_dataset(run), load_settings(raw, [], "test")))
    rows = documents_of_step(run, 7)
    assert len({row.row for row in rows}) == 4
    for row in rows[:6]:
        (found,) = [found for found in steps_of_url(run, row.url) if found.doc_id == row.doc_id]
        assert row in found.appearances


def test_a_second_run_does_nothing_and_a_changed_setting_redoes_only_what_depends_on_it(
    run_at, finished, tmp_path, capsys
):
    folder = tmp_path / "run"
    shutil.copytree(finished.root, folder)
    run_at(folder=folder)
    assert capsys.readouterr().err.count("is complete") == 8
    run_at(folder=folder, overrides=["tokens.seed=9"])
    assert capsys.readouterr().err.count("is complete") == 7
    before, after = digests(finished), digests(Store(str(folder)))
    assert {name for name in NAMES if before[name] != after[name]} == {"tokens"}


def test_a_table_without_manifest_does_not_exist_and_finished_parts_are_kept(run_at, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.root, folder)
    run = Store(str(folder))
    version = read_run(run).tables["clean"]
    (folder / "clean" / version / "manifest.json").unlink()
    with pytest.raises(ContractError, match=r"clean/v-.*got no manifest\.json"):
        open_table(run, "clean")
    run_at(folder=folder)
    assert digests(run) == digests(finished)


def completed_files(folder: Path) -> dict[str, set[str]]:
    """The files of every completed part of a table's version, by the name of the part's result."""
    results = {path.name: json.loads(path.read_bytes()) for path in folder.glob("parts/part-*.json")}
    return {name: {file["path"] for file in result["files"].values()} for name, result in results.items()}


def without_table(finished: Store, folder: Path, table: str) -> Path:
    """Copy a run without one of its tables; return the folder of the version that is missing."""
    shutil.copytree(finished.root, folder)
    version = folder / table / read_run(finished).tables[table]
    shutil.rmtree(version)
    return version


def killed(*arguments, **named):
    raise KeyboardInterrupt


def test_a_killed_run_writes_again_only_the_parts_that_are_not_complete(run_at, finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    version, written = without_table(finished, folder, "tokens"), []
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(dataset_step, "write_index", killed)
            with pytest.raises(KeyboardInterrupt):
                run_at(folder=folder, until="tokens")
        written.append(completed_files(version))
        (version / "parts/part-00001.json").unlink()
    first, second = written
    assert len(first) > 2
    assert {name for name in first if first[name] != second[name]} == {"part-00001.json"}
    run_at(folder=folder, until="tokens")
    paths = {*open_table(Store(str(folder)), "tokens")[1].run.paths.values()}
    assert {name for name, files in second.items() if not files <= paths} == {"part-00001.json"}
    assert not list(version.glob("parts/*"))
    assert open_table(Store(str(folder)), "tokens")[1].digest == open_table(finished, "tokens")[1].digest


def test_a_killed_run_reads_the_sample_of_the_tokenizer_that_it_has_stored(run_at, finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    version, stored = without_table(finished, folder, "tokenizer"), []
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(train_tokenizer, "load_tokenizer", killed)
            with pytest.raises(KeyboardInterrupt):
                run_at(folder=folder, until="tokenizer")
        stored.append({path.name: path.stat().st_mtime_ns for path in (version / "scratch").iterdir()})
    assert stored[0] == stored[1]
    assert "sample.json" in stored[0]
    run_at(folder=folder, until="tokenizer")
    assert not (version / "scratch").exists()
    assert open_table(Store(str(folder)), "tokenizer")[1].digest == open_table(finished, "tokenizer")[1].digest


def test_an_input_that_changed_its_content_and_kept_its_looks_is_refused(finished):
    _, manifest = open_table(finished, "documents")
    sources = [entry.model_dump() for entry in manifest.content.inputs]
    identities = {name: value for name, value in manifest.run.lineage.items() if name.startswith("input:")}
    check_inputs(finished, "documents", TableResult(sources=sources), identities)
    changed = [sources[0] | {"sha256": "0" * 64}, *sources[1:]]
    with pytest.raises(ContractError, match=f"expected the recorded SHA-256 {sources[0]['sha256'][:16]}.*got 0000"):
        check_inputs(finished, "documents", TableResult(sources=changed), identities)
    touched = identities | {f"input:{sources[0]['name']}": "another size and time"}
    check_inputs(finished, "documents", TableResult(sources=changed), touched)


def test_wrong_step_and_missing_input_stop_before_anything_runs(run_at, tmp_path):
    with pytest.raises(ConfigError, match=r"stage: expected a step, got 'dedupe' .did you mean 'dedup'"):
        run_at(until="dedupe")
    with pytest.raises(ConfigError, match=r"expected a step that this recipe uses \(documents, verdicts.*got 'scores'"):
        run_at(until="scores")
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
        fates[KEPT_VERDICT] = (content.counts.rows_kept, content.figures["kept_chars"])
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
        before[cell.language] += cell.documents if cell.before == KEPT_VERDICT else 0
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
