"""Tests of the answers of a trace: title, signals, text, checkpoints, scans, and the command around them."""

import json
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.exit_codes import exit_code_of
from jobs.verbs.trace import add_trace_arguments, trace_command
from schemas.checkpoints import METADATA_NAME
from schemas.ids import canonical_json
from schemas.manifest import RunFile, make_manifest, read_run, write_manifest, write_run
from schemas.storage import CheckedPath, Store
from schemas.tables import CLEAN, DEDUP, DOCUMENTS
from schemas.text import CONTROL_CHARACTERS
from schemas.tokens import open_dataset
from schemas.versions import attach_run
from tests.support import tiny_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from train.checkpoint.folder import CheckpointMetadata, Layout, identify
from train.config.settings import load_settings
from train.data.stages import NO_SKIPS
from train.monitor.events import EVENTS_NAME, Skipped
from train.plan.make_plan import make_plan
from train.plan.plan import read_plan, write_plan
from train.trace.answer import AnswerOptions, DocumentsAnswer, TraceAnswers, present_documents, to_json_value
from train.trace.documents import DocumentDetail, _PartFile

RECIPE: dict[str, Any] = {
    "plan": {"num_layers": 1, "d_model": 16, "num_heads": 2},
    "train": {"seq_len": 64, "global_batch": 6, "steps": 20},
}
SPLITS = ["books.warc.gz", "web.warc.gz"]
GROUP = 5
Printed = tuple[int, str, str]


def rows_of(run: Store) -> list[dict[str, Any]]:
    """Every document of the dataset with its tokens, in the order of files and offsets."""
    dataset, rows = open_dataset(run), []
    for stream, shards in dataset.streams.items():
        for shard in shards:
            with pa.ipc.open_file(dataset.folder.path(shard.path)) as reader:
                tokens = reader.read_all().column("tokens").to_pylist()
            with pa.ipc.open_file(dataset.folder.path(shard.docs_path)) as reader:
                docs = reader.read_all().to_pylist()
            rows += [row | {"tokens": own, "stream": stream} for row, own in zip(docs, tokens, strict=True)]
    return sorted(rows, key=lambda row: (row["split"], row["offset"]))


def text_of(row: dict[str, Any]) -> str:
    """The words of a document."""
    vocabulary = {number: word for word, number in VOCABULARY.items()}
    return " ".join(vocabulary[token] for token in row["tokens"][1:-1])


VOCABULARY: dict[str, int] = {}


def write_table(run: Store, name: str, schema: pa.Schema, rows: list[dict[str, Any]], lineage: dict[str, str]) -> None:
    """A table of two parts, in small row groups."""
    folder, entries, paths = run.child(f"{name}/v-test"), [], {}
    for number, split in enumerate(SPLITS):
        key, path = f"part-{number:05d}", f"{number}.parquet"
        part = pa.Table.from_pylist([row for row in rows if row["split"] == split], schema)
        folder.make_parent(path)
        pq.write_table(part, folder.path(path), row_group_size=GROUP, write_statistics=False)
        size, sha256 = folder.size(path), folder.sha256(path)
        entries.append({"key": key, "rows": part.num_rows, "bytes": size, "sha256": sha256})
        paths[key] = path
    content = {"table": name, "stages": {}, "config": {}, "files": entries, "figures": {}}
    content["inputs"] = [{"name": split, "bytes": 0, "sha256": ""} for split in SPLITS]
    content["counts"] = {"rows_in": len(rows), "rows_kept": len(rows)}
    block = {"paths": paths, "started": "", "wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": "test"}
    write_manifest(folder, make_manifest(content, block | {"lineage": lineage}, name))


def write_note(run: Store, step: int, ranks: int) -> None:
    """A checkpoint as far as its note."""
    identity = identify(open_dataset(run), read_plan(run), NO_SKIPS)
    axes = {"pipeline": 1, "replicate": 1, "shard": ranks, "context": 1, "tensor": 1}
    layout = Layout(ranks=ranks, axes=axes, settings={"micro_batch": 2}, threads=1, device="cpu", kernels="")
    note = CheckpointMetadata(step=step, identity=identity, layout=layout)
    run.write_atomic(f"{note.name}/{METADATA_NAME}", note.to_bytes())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A planned run with its tables and two checkpoints, the first on two ranks and the second on three."""
    folder = tmp_path_factory.mktemp("answers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_dataset, "BATCH_DOCUMENTS", 4)
        run = make_tiny_dataset(folder, {"web": 40, "books": 12}, shard_tokens=1500)
    tokenizer = json.loads(Path(run.path("tokenizer/v-0000000071a9/tokenizer.json")).read_text())
    VOCABULARY.update(tokenizer["model"]["vocab"])
    rows = rows_of(run)
    documents = [row | {"gopher_num_words": row["num_tokens"] - 2, "drop_stage": None} for row in rows]
    # A dropped record between two documents, and one more document of the same record.
    documents += [row | {"doc_id": bytes([7] * 15 + [i]), "gopher_num_words": -1} for i, row in enumerate(rows[::3])]
    documents += dropped_rows(rows)
    documents[7] = documents[7] | {"url": RAW_URL}
    documents.sort(key=lambda row: (row["split"], row["offset"], row["doc_id"]))
    write_table(run, "documents", DOCUMENTS, [filled(row, DOCUMENTS) for row in documents], {})
    copies = {bytes([8] * 16): rows[5], bytes([9] * 16): {"doc_id": bytes([10] * 16)}}
    judged = [
        row | {"survivor": copies[row["doc_id"]]["doc_id"], "drop_stage": "dedup", "drop_rule": "exact_duplicate"}
        for row in documents
        if row["doc_id"] in copies
    ]
    write_table(run, "dedup", DEDUP, judged, {"documents": "v-test"})
    clean = [
        row
        | {"title": f"Title of {row['doc_id'].hex()}", "text": text_of(row), "pii_counts": [("email", 2), ("ip", 1)]}
        for row in rows
    ]
    clean[0] = clean[0] | {"drop_stage": "clean", "drop_rule": "empty"}
    write_table(run, "clean", CLEAN, [filled(row, CLEAN) for row in clean], {"documents": "v-test"})
    manifest = run.read_json("tokens/v-0000000071a9/manifest.json")
    manifest["run"]["lineage"] = {"clean": "v-test"}
    run.write_atomic("tokens/v-0000000071a9/manifest.json", canonical_json(manifest))
    tables = read_run(run).tables | {"documents": "v-test", "dedup": "v-test", "clean": "v-test"}
    write_run(run, RunFile(tables=tables, recipe=RECIPE))
    write_plan(run, make_plan(run, open_dataset(run), load_settings(RECIPE, [], "test")))
    write_note(run, 5, 2)
    write_note(run, 12, 3)
    return run


RAW_URL = "http://www.site1.co.uk/?mail=jane@example.org"
"""URL of a kept document as it was crawled; the dataset has it without the address."""


def dropped_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that are in no dataset: two exact copies (the survivor of the second was dropped too) and a short page."""
    short = {"drop_stage": "quality", "drop_rule": "gopher_short_doc", "drop_value": 36.0, "drop_limit": 50.0}
    return [
        rows[3] | {"doc_id": bytes([8] * 16), "url": "http://copy.example/1", "domain": "copy.example"},
        rows[4] | {"doc_id": bytes([9] * 16), "url": "http://copy.example/2", "domain": "copy.example"},
        rows[5] | {"doc_id": bytes([11] * 16), "url": "http://short.example/", "domain": "short.example"} | short,
    ]


def filled(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """A row with every column of a table."""
    return {name: row.get(name) for name in schema.names}


@pytest.fixture
def trace(run: Store, capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """The command: exit code, output and errors."""

    def call(*words: str, at: Store = run) -> Printed:
        parser = ArgumentParser()
        parser.add_argument("run")
        add_trace_arguments(parser)
        arguments = parser.parse_args([at.uri, *words])
        code = exit_code_of(lambda: trace_command(arguments))
        return (code, *capsys.readouterr())

    return call


def test_title_signals_and_text_are_those_of_the_document(run: Store, trace: Callable[..., Printed]) -> None:
    rows = {row["doc_id"].hex(): row for row in rows_of(run)}
    code, out, _ = trace("--step", "3", "--text", "--json")
    found = json.loads(out)
    assert (code, found["step"], found["rows"], found["dataset"]) == (0, 3, [0, 6], open_dataset(run).digest)
    assert len(found["parts"]) > 6
    for part in found["parts"]:
        row = rows[part["doc_id"]]
        assert part["title"] == f"Title of {part['doc_id']}"
        assert part["signals"]["gopher_num_words"] == row["num_tokens"] - 2
        assert part["signals"]["pii_counts"] == {"email": 2, "ip": 1}
        assert part["cluster"] == row["cluster"].hex()
        words = row["tokens"][part["doc_start"] : part["doc_stop"]]
        inner = [token for token in words if token not in (row["tokens"][0], row["tokens"][-1])]
        assert part["text"] == text_of({"tokens": [0, *inner, 0]})


def test_documents_of_a_member_of_many_records_are_found(tmp_path: Path) -> None:
    """The records of one gzip member have one offset, and fill several row groups."""
    offsets = [0] * 7 + [10] * 23 + [20] * 4 + [30] * 10
    rows = [{"doc_id": number.to_bytes(16, "big"), "offset": offset} for number, offset in enumerate(offsets)]
    schema = pa.schema([pa.field("doc_id", pa.binary(16)), pa.field("offset", pa.int64())])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "part.parquet", row_group_size=GROUP)
    folder = Store(str(tmp_path))
    path = CheckedPath("part.parquet", folder.size("part.parquet"), folder.sha256("part.parquet"))
    part = _PartFile("documents", folder, path, is_sorted=True)
    assert [part.row(row["doc_id"], row["offset"], ["doc_id", "offset"]) for row in rows] == rows
    assert [part.row(rows[0]["doc_id"], offset, ["offset"]) for offset in (-1, 15, 40)] == [{}] * 3


def test_every_document_is_reported_with_the_checkpoints_that_saw_it(run: Store) -> None:
    answers = TraceAnswers(run, AnswerOptions(text=True))
    for row in rows_of(run):
        (described, seen), *_ = answers.document(row["doc_id"].hex()).documents
        assert (described.detail.title, described.text) == (f"Title of {row['doc_id'].hex()}", text_of(row))
        steps = seen.steps
        first = next((step for step in (5, 12) if steps and step >= steps[0]), None)
        clean = [step for step in (5, 12) if not steps or step < steps[0]]
        assert (seen.first_checkpoint, seen.last_checkpoint) == (first, 12 if first else None)
        assert (seen.last_clean, seen.trained) == (clean[-1] if clean else None, 12)


def test_a_rank_reads_its_rows_by_the_layout_of_the_step(trace: Callable[..., Printed]) -> None:
    # Six rows on two ranks up to step 5, on three after it; micro-batches of two.
    for words, rows, named in (
        (["--step", "5", "--rank", "1"], [3, 6], "step-000005"),
        (["--step", "5", "--rank", "1", "--micro-batch", "0"], [3, 5], "step-000005"),
        (["--step", "5", "--rank", "1", "--micro-batch", "1"], [5, 6], "step-000005"),
        (["--step", "6", "--rank", "1"], [2, 4], "step-000012"),
        (["--step", "20", "--rank", "2"], [4, 6], "step-000012"),
        (["--step", "6", "--rank", "1", "--ranks", "6"], [1, 2], "the plan on 6 rank(s)"),
    ):
        found = json.loads(trace(*words, "--brief", "--json")[1])
        assert (found["rows"], named in found["layout"]) == (rows, True)
        assert {part["row"] for part in found["parts"]} == set(range(*rows))
    shown = trace("--step", "5", "--rank", "1", "--brief")[1]
    assert "step 5, rows 3 to 5 of the global batch" in shown
    assert "layout of checkpoint train/checkpoints/step-000005" in shown


@pytest.mark.parametrize("kept", ["clean", "shards"])
def test_a_scan_finds_all_documents_with_a_string(
    run: Store, trace: Callable[..., Printed], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(run)
    string = " ".join(text_of(rows[9]).split()[3:6])
    expected = {row["doc_id"].hex() for row in rows if string in text_of(row)}
    assert rows[9]["doc_id"].hex() in expected
    if kept == "shards":
        monkeypatch.setattr("train.trace.documents.origin_table", lambda *made: None)
    code, out, err = trace("--contains", string, "--json", "--limit", "99")
    assert {document["doc_id"] for document in json.loads(out)["documents"]} == expected
    assert (code, "scan" in err or "decoding" in err) == (0, True)
    code, out, _ = trace("--contains", "no such words in it")
    assert (code, out.splitlines()[0]) == (
        1,
        "no document of the dataset contains exactly this string; upper and lower case differ",
    )


@pytest.mark.parametrize("own", [(), ("tokens", "tokenizer"), ("tokens", "tokenizer", "clean")])
def test_a_run_on_the_dataset_of_another_one_has_its_titles_and_texts(
    run: Store, trace: Callable[..., Printed], tmp_path: Path, own: tuple[str, ...]
) -> None:
    branch, new = Store(str(tmp_path / "branch")), Store(str(tmp_path / "new"))
    state = attach_run(branch, run)
    for name in own:  # made anew on the other tables
        version = state.tables[name].rpartition("/")[2]
        shutil.copytree(run.path(f"{name}/{version}"), branch.path(f"{name}/{version}"))
        write_run(branch, RunFile(tables=read_run(branch).tables | {name: version}, recipe=RECIPE))
    attach_run(new, branch, ("tokens", "tokenizer"))
    write_plan(new, make_plan(new, open_dataset(new), load_settings(RECIPE, [], "test")))
    row = rows_of(run)[9]
    code, out, err = trace("--contains", text_of(row), "--json", at=new)
    (found,) = json.loads(out)["documents"]
    doc_id = row["doc_id"].hex()
    assert (code, "scanning the clean text of " in err, found["doc_id"]) == (0, True, doc_id)
    assert found["title"] == f"Title of {doc_id}"
    assert found["signals"]["gopher_num_words"] == row["num_tokens"] - 2
    assert TraceAnswers(new, AnswerOptions()).details.record(row["split"], row["offset"], doc_id)["url"] == row["url"]


def test_a_row_that_was_dropped_while_cleaning_is_in_no_dataset(run: Store, trace: Callable[..., Printed]) -> None:
    gone = rows_of(run)[0]["doc_id"].hex()
    out = trace("--contains", text_of(rows_of(run)[0])[:60], "--json")[1]
    assert gone not in {document["doc_id"] for document in json.loads(out)["documents"]}


def test_a_domain_is_summed_over_all_and_listed_in_part(run: Store, trace: Callable[..., Printed]) -> None:
    number = sum(row["domain"] == "site2.co.uk" for row in rows_of(run))
    code, out, _ = trace("--domain", "site2.co.uk", "--brief", "--limit", "2")
    assert (code, number > 3) == (0, True)
    assert f"all {number} document(s), {number - 2} of them not listed: " in out
    assert "last clean checkpoint none, train from step 0" in out
    whole = json.loads(trace("--domain", "site2.co.uk", "--json", "--brief", "--limit", "99")[1])
    steps = {step for document in whole["documents"] for step in document["seen"]["steps"]}
    assert (whole["seen"]["steps"], len(whole["documents"])) == (sorted(steps), number)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "21"], "--step: expected 1 to 20, the steps of the plan, got 21"),
        (["--step", "0"], "--step: expected 1 to 20, the steps of the plan, got 0"),
        (
            ["--step", "5", "--rank", "2"],
            "--rank: expected 0 to 1, the ranks of checkpoint train/checkpoints/step-000005",
        ),
        (["--step", "5", "--rank", "0", "--micro-batch", "2"], "--micro-batch: expected 0 to 1"),
        (
            ["--step", "4", "--rank", "0"],
            "--rank: expected a step whose layout is recorded, got step 4: train/events.jsonl does not have it, and "
            "the first checkpoint kept is that of step 5. Give the number of ranks with --ranks.",
        ),
        (["--step", "1", "--micro-batch", "0"], "expected --rank with --micro-batch or --ranks"),
        (["--url", "http://x/", "--rank", "0"], "expected --step with --rank"),
        (["--step", "1", "--rank", "0", "--ranks", "0"], "trace --ranks: expected at least 1, got 0"),
        (["--step", "1", "--limit", "0"], "trace --limit: expected at least 1 document, got 0"),
        (["--step", "1", "--set", "source.paths=[]"], "trace: expected --set and --unset only together with --refetch"),
        (["--doc", "xyz"], "--doc: expected a document id of 12 to 32 hex digits, got 'xyz'"),
        (["--doc", "abcd"], "--doc: expected a document id of 12 to 32 hex digits, got 'abcd'"),
        (["--domain", "http://site1.co.uk/"], "--domain: expected a domain such as example.com"),
        (["--contains", ""], "--contains: expected a string to look for, got an empty one"),
    ],
)
def test_bad_input_is_one_clear_sentence(trace: Callable[..., Printed], words: list[str], message: str) -> None:
    code, out, err = trace(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_an_empty_result_has_a_message(trace: Callable[..., Printed]) -> None:
    assert trace("--url", "http://site1.co.uk/none")[:2] == (
        1,
        "no document of the run has this URL, kept or dropped\n",
    )
    assert trace("--domain", "site99.co.uk")[:2] == (
        1,
        "no document of the run, kept or dropped, is from this domain; give a domain such as example.com\n",
    )
    assert trace("--doc", "00" * 16)[:2] == (1, "no document of the run has this id, kept or dropped\n")


@pytest.mark.parametrize("option", [("--url", "http://copy.example/1"), ("--url", "https://www.copy.example/1/#a")])
def test_a_dropped_copy_leads_to_the_document_in_its_place(
    run: Store, trace: Callable[..., Printed], option: tuple[str, str]
) -> None:
    survivor = rows_of(run)[5]["doc_id"].hex()
    code, out, err = trace(*option, "--brief")
    lines = out.splitlines()
    assert lines[:3] == [
        "document 080808080808 is not in the dataset: dropped by dedup/exact_duplicate: its text equals that of the "
        "survivor, as `dedup.exact` compares them  http://copy.example/1",
        f"  document {survivor[:12]} has the same text and was kept in its place",
        f"trace of {survivor[:12]}:",
    ]
    assert "\n".join(lines[3:]) + "\n" == trace("--doc", survivor, "--brief")[1]
    assert (code, err) == (0, "trace: not in the dataset; searching the table `documents`\n")
    values = json.loads(trace(*option, "--brief", "--json")[1])
    assert (values["num_documents"], values["instead"]["documents"][0]["doc_id"]) == (0, survivor)
    assert values["dropped"] == [
        {"doc_id": "08" * 16, "url": "http://copy.example/1", "stage": "dedup", "rule": "exact_duplicate"}
        | {"value": None, "limit": None, "survivor": survivor}
    ]


def test_a_document_that_a_rule_dropped_has_the_rule(trace: Callable[..., Printed]) -> None:
    text = "document 0b0b0b0b0b0b is not in the dataset: dropped by quality/gopher_short_doc (36, limit 50): "
    text += "too few words"
    for option in (("--url", "http://short.example/"), ("--domain", "short.example"), ("--doc", "0b0b0b0b0b0b")):
        assert trace(*option)[:2] == (1, f"{text}  http://short.example/\n")
    out = trace("--domain", "copy.example", "--limit", "1", "--brief")[1]
    assert ("copy.example/1" in out, "copy.example/2" in out) == (True, False)
    assert trace("--url", "http://copy.example/2")[:2] == (
        1,
        "document 090909090909 is not in the dataset: dropped by dedup/exact_duplicate: its text equals that of "
        "the survivor, as `dedup.exact` compares them  http://copy.example/2\n"
        "  document 0a0a0a0a0a0a has the same text and was kept in its place\n"
        "0a0a0a0a0a0a: not in the dataset either; `penstock show RUN --doc ID` has the rule\n",
    )


def test_a_url_with_personal_data_is_found_as_it_was_crawled(run: Store, trace: Callable[..., Printed]) -> None:
    own = rows_of(run)[7]["doc_id"].hex()
    code, out, _ = trace("--url", RAW_URL, "--brief")
    first = f"document {own[:12]} is in the dataset, where its URL has placeholders for personal data  {RAW_URL}"
    assert (code, out.splitlines()[0]) == (0, first)
    assert trace("--doc", own, "--brief")[1] in out


def test_the_documents_of_a_step_are_limited(run: Store, trace: Callable[..., Printed]) -> None:
    whole = json.loads(trace("--step", "3", "--json", "--brief")[1])
    documents = list(dict.fromkeys(part["doc_id"] for part in whole["parts"]))
    assert (whole["num_spans"], whole["num_documents"]) == (len(whole["parts"]), len(documents))
    for limit in (1, 2, len(documents), 99):
        code, out, _ = trace("--step", "3", "--json", "--brief", "--limit", str(limit))
        parts = [part for part in whole["parts"] if part["doc_id"] in documents[:limit]]
        assert (code, json.loads(out)) == (0, whole | {"parts": parts})
    head = trace("--step", "3", "--limit", "2")[1].splitlines()[0]
    spans = len(whole["parts"])
    assert head == (
        f"step 3, rows 0 to 5 of the global batch, {spans} spans; those of 2 of {len(documents)} documents are listed"
    )


def test_a_step_that_made_no_update_says_so(run: Store, trace: Callable[..., Printed]) -> None:
    folder = Path(run.path(EVENTS_NAME))
    folder.write_text(Skipped(step=3, loss=None, grad_norm=None).model_dump_json() + "\n", encoding="utf-8")
    try:
        for step, skipped in (("2", False), ("3", True)):
            assert json.loads(trace("--step", step, "--json", "--brief")[1])["skipped"] is skipped
            shown = trace("--step", step, "--brief")[1].splitlines()[0]
            assert ("was skipped, because it was not finite" in shown) is skipped
    finally:
        folder.unlink()


def test_a_document_in_no_step_says_so_once(run: Store, trace: Callable[..., Printed]) -> None:
    held = next(row for row in rows_of(run) if row["stream"] == "web/heldout")
    out = trace("--doc", held["doc_id"].hex(), "--brief")[1]
    assert out.count("in no step") == 1


def test_a_run_without_a_plan_and_tables(trace: Callable[..., Printed], tmp_path: Path) -> None:
    bare = make_tiny_dataset(tmp_path / "bare", {"web": 20})
    code, _, err = trace("--step", "1", at=bare)
    assert (code, "expected a plan, got no train/plan.json. Make it with `penstock plan`" in err) == (2, True)
    write_plan(bare, make_plan(bare, open_dataset(bare), load_settings(RECIPE, [], "test")))
    code, out, _ = trace("--step", "1", at=bare)
    assert (code, "(without title or signals: the table documents and clean is missing)" in out) == (0, True)
    code, out, _ = trace("--url", rows_of(bare)[0]["url"], "--brief", at=bare)
    assert (code, "there is no checkpoint" in out or "in no step" in out) == (0, True)


def test_json_has_no_numbers_that_json_has_not() -> None:
    value = {"a": float("nan"), "b": [1.5, float("inf")], "c": b"\x01", "d": [("en", 1)], "e": None, "f": True}
    assert to_json_value(value) == {"a": None, "b": [1.5, None], "c": "01", "d": [["en", 1]], "e": None, "f": True}


def test_a_look_up_loads_neither_torch_nor_pandas(run: Store) -> None:
    code = (
        "import sys; from schemas.storage import Store; from train.trace import documents_of_step, steps_of_url\n"
        f"found = documents_of_step(Store({run.uri!r}), 3); steps_of_url(Store({run.uri!r}), found[0].url)\n"
        "print({'torch', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ------------------------------------------------------------------------------------------------- the original records


@pytest.fixture
def archive(run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """An archive with a record where the index locates one document, and that document's row."""
    row = next(row for row in rows_of(run) if row["split"] == "web.warc.gz" and row["offset"])
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>A page.</p>"
    head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {row['url']}\r\nContent-Type: application/http\r\n"
    record = f"{head}Content-Length: {len(page)}\r\n\r\n".encode() + page + b"\r\n\r\n"
    path = tmp_path / "web.warc.gz"
    path.write_bytes(b"\n" * row["offset"] + record.ljust(row["length"], b"\n"))
    recorded = {"offset": row["offset"], "length": row["length"], "url": row["url"], "record_type": "response"}
    monkeypatch.setattr("train.trace.documents.DetailReader.record", lambda *arguments: recorded)
    return path, row


def test_the_original_record_is_read_again(trace: Callable[..., Printed], archive: tuple[Path, dict[str, Any]]) -> None:
    path, row = archive
    words = ("--doc", row["doc_id"].hex(), "--brief", "--refetch", "--set", f'source.paths=["{path}"]')
    code, out, _ = trace(*words)
    assert (code, f"{path}@{row['offset']}+{row['length']}: the same record; RAW:" in out) == (0, True)
    assert "  | <p>A page.</p>" in out
    (record,) = json.loads(trace(*words, "--json")[1])["records"]
    assert (record["changes"], record["head"].startswith("WARC/1.0\r\n")) == ([], True)
    path.write_bytes(path.read_bytes().replace(b"/web/", b"/wob/"))
    code, out, _ = trace(*words)
    changed = row["url"].replace("/web/", "/wob/")
    assert (code, f"differs from the record that was read\n  url: expected {row['url']}, got {changed}\n" in out) == (
        1,
        True,
    )


def test_an_archive_that_is_not_there_is_named(
    trace: Callable[..., Printed], archive: tuple[Path, dict[str, Any]]
) -> None:
    path, row = archive
    words = ("--doc", row["doc_id"].hex(), "--brief", "--refetch", "--set")
    code, _, err = trace(*words, f'source.paths=["{path.parent}/none-*.warc.gz"]')
    assert (code, "got no file that matches" in err) == (2, True)
    path.rename(path.parent / "other.warc.gz")
    code, _, err = trace(*words, f'source.paths=["{path.parent}/other.warc.gz"]')
    assert (code, "--refetch: expected the file web.warc.gz in source.paths, got no such file" in err) == (2, True)


def test_control_characters_of_titles_texts_and_signals_are_escaped(run: Store) -> None:
    answer = TraceAnswers(run, AnswerOptions()).document(rows_of(run)[0]["doc_id"].hex()[:12])
    ((document, seen),) = answer.documents
    hostile = "A\x1b]0;owned\x07\x9b31m\u202etitle"
    shown = replace(document, detail=DocumentDetail(hostile, {"by": {hostile: 1}}), text=f"a\n{hostile}\r\n")
    text = present_documents(DocumentsAnswer(1, answer.seen, [(shown, seen)]), "none")
    assert "  A\\x1b]0;owned\\x07\\x9b31m\\u202etitle\n" in text
    assert text.count("\\x1b]0;owned\\x07") == 3
    assert CONTROL_CHARACTERS.findall(text.replace("\n", "")) == []
