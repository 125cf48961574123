"""The check of a certificate: it is valid after a takedown, and reports a single byte that is left of a document."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline.dedup.index import MERGED
from pipeline.dedup.survivors import COUNTED
from pipeline.engine.parquet import PartWriter
from pipeline.report.page import write_report
from pipeline.takedown.certificate import check_certificate
from pipeline.takedown.check_result import CheckResult, describe_check, judge_shared_spans
from pipeline.takedown.tables import (
    SPAN_LENGTHS,
    SpanFinder,
    columns_with_ids,
    documents_named,
    holds_documents,
    rewrite_part,
    span_digest,
    trace_spans,
    window_marks,
)
from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.manifest import open_table, read_run, write_run
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import Certificate, Traces, parse_certificate, salted_digest
from tests.pipeline.takedown.test_rewrite import LONG
from tests.support.report_run import Record, crawl, identifier, make_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import certificates, documents_of, forge, opened, take_down

SALT = "5a17"
FORTY = "No other text of this run has the words of this text, on page forty. "


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A dataset from which one document of the second shard was taken down."""
    make_tiny_dataset(tmp_path / "run", {"web": 60, "books": 20})
    assert take_down(tmp_path / "run", doc=[chosen(tmp_path / "run")["doc_id"].hex()]) == 0
    return tmp_path / "run"


def chosen(folder: Path) -> dict:
    return [row for row in documents_of(opened(folder)) if row["stream"] == "web/train" and row["num_tokens"] > 100][20]


@pytest.fixture
def removed(tmp_path_factory) -> dict:
    """The document before its removal."""
    folder = tmp_path_factory.mktemp("before") / "run"
    make_tiny_dataset(folder, {"web": 60, "books": 20})
    return chosen(folder)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run with every table from which a page was taken down; its text is traced."""
    records = [
        Record(r.outcome, r.kind, r.url, None if r.text is None else LONG.format(n) + r.text, r.title, r.language,
               r.chars, r.cluster, r.pii, r.length)
        for n, r in enumerate(crawl())
    ]  # fmt: skip
    records[40] = Record(records[40].outcome, text=FORTY * 4, language="en", chars=1000, url=records[40].url)
    make_run(tmp_path / "whole", records=records)
    assert take_down(tmp_path / "whole", doc=[identifier(40).hex()]) == 0
    return tmp_path / "whole"


def checked(folder: Path) -> CheckResult:
    return check_certificate(Store(str(folder)), certificates(folder)[-1])


def rewritten(folder: Path, ending: str, table: str = "tokens") -> str:
    """Return the key of the rewritten file of a kind."""
    keys = [change.key for change in certificates(folder)[-1].tables[table].rewritten if change.key.endswith(ending)]
    return keys[0]


def padding(folder: Path, key: str) -> int:
    """Return a position in the last record batch of a file that no value uses: the end of a buffer of odd length."""
    store, manifest = open_table(Store(str(folder)), "tokens")
    with pa.memory_map(store.path(manifest.paths[key])) as file:
        base = file.read_buffer().address
        reader = pa.ipc.open_file(file)
        batch = reader.get_batch(reader.num_record_batches - 1)
        ends = [b.address + b.size - base for column in batch.columns for b in column.buffers() if b is not None]
    return next(end for end in ends if end % 8)


# -------------------------------------------------------------------------------------------------------------- spans


def test_a_mark_is_the_rolling_hash_of_its_window() -> None:
    """The expected values are computed directly: the upper half of Σ unit · m^(15 - i) mod 2^64."""
    import hashlib

    multiplier = int.from_bytes(hashlib.sha256(f"{SALT} tokens".encode()).digest()[:8], "little") | 1
    units = np.arange(40, dtype=np.uint16) * 7 % 31
    plain = [
        sum(int(unit) * pow(multiplier, 15 - i, 1 << 64) for i, unit in enumerate(units[at : at + 16])) % (1 << 64)
        >> 32
        for at in range(25)
    ]
    assert window_marks(units, "tokens", SALT).tolist() == plain
    assert window_marks(units[:16], "tokens", SALT).tolist() == plain[:1]
    assert window_marks(units[:15], "tokens", SALT).tolist() == []


def test_spans_are_found_at_every_position_and_nothing_else() -> None:
    numbers = np.random.default_rng(1)
    document = numbers.integers(0, 50_000, 100).astype(np.uint16)
    spans = trace_spans(document, "tokens", SALT)
    assert len(spans) == 6  # 100 // 16, spread over the document
    finder = SpanFinder("tokens", SALT, [(3, spans)])
    stream = numbers.integers(0, 50_000, 200_000).astype(np.uint16)
    assert list(finder.find(stream)) == []
    for position in (0, 65_530, 131_000, 200_000 - 100):  # at the edges of blocks too
        planted = stream.copy()
        planted[position : position + 100] = document
        hits = list(finder.find(planted))
        assert {span for _, span, _ in hits} == {span for _, span in spans}
        assert hits[0][0] == position
        assert hits[-1][0] == position + 84
        assert {tuple(owners) for _, _, owners in hits} == {(3,)}
    planted[position + 3] += 1  # another token: the window that holds it is no longer found
    assert len(list(finder.find(planted))) == 5
    assert list(finder.find(stream.astype(np.uint32))) == []


@pytest.mark.parametrize(("length", "count"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (16 * 64, 64), (5000, 64)])
def test_the_number_of_spans_of_a_document(length: int, count: int) -> None:
    assert len(trace_spans(np.arange(length).astype(np.uint16), "tokens", SALT)) == count
    assert len(trace_spans(np.arange(length).astype(np.uint16), "tokens", SALT, most=3)) == min(3, count)


def test_windows_of_few_distinct_tokens_are_omitted() -> None:
    assert trace_spans(np.full(64, 7, np.uint16), "tokens", SALT) == []
    assert len(trace_spans(np.tile(np.arange(4), 4).astype(np.uint16), "tokens", SALT)) == 1
    assert len(trace_spans(np.tile(np.arange(3), 6)[:16].astype(np.uint16), "tokens", SALT)) == 0


def test_digests_depend_on_salt_and_kind_but_not_on_the_type() -> None:
    window = np.arange(16)
    same = {span_digest(window.astype(kind), "tokens", SALT) for kind in (np.uint16, np.uint32, np.int64)}
    assert len(same) == 1
    assert len({*same, span_digest(window, "tokens", "other"), span_digest(window, "text", SALT)}) == 3


# -------------------------------------------------------------------------------------------------------------- checks


def test_a_certificate_is_valid_and_reports_its_scope(run: Path, removed: dict) -> None:
    result = checked(run)
    assert result.problems == []
    assert result.files == len(opened(run).manifest.content.files) + 1  # and the tokenizer's
    assert result.tokens == sum(shard.num_tokens for shards in opened(run).streams.values() for shard in shards)
    certificate = certificates(run)[0]
    lines = list(describe_check(certificate, result))
    assert f"1 document(s), {removed['num_tokens']} tokens, tombstones" in lines[0]
    assert lines[-1] == "the certificate is valid"
    assert [traces.num_tokens for traces in certificate.documents] == [removed["num_tokens"]]
    # The certificate does not reveal the document.
    text = json.dumps(certificate.model_dump(mode="json"))
    assert removed["doc_id"].hex() not in text
    assert removed["url"] not in text
    assert certificate.documents[0].document == salted_digest(certificate.salt, "document", removed["doc_id"])
    assert certificate.windows == SPAN_LENGTHS


@pytest.mark.parametrize("ending", [".docs", ".tokens"])
def test_one_byte_in_padding_is_found(run: Path, removed: dict, ending: str) -> None:
    key = rewritten(run, ending)
    at = padding(run, key)
    forge(run, key, lambda data: data[:at] + removed["url"].encode()[:1] + data[at + 1 :])
    problems = checked(run).problems
    assert len(problems) == 1
    assert problems[0].startswith(f"tokens/{key}: expected no bytes besides its rows, which have SHA-256 ")


def test_one_byte_in_the_padding_of_another_index_is_found(run: Path) -> None:
    key = next(change.key for change in certificates(run)[0].tables["tokens"].rewritten if "by_url" in change.key)
    forge(run, key, lambda data: data[:8] + data[8:].replace(b"ARROW1", b"x", 0) + b"")
    assert checked(run).problems == []
    at = padding(run, key)
    forge(run, key, lambda data: data[:at] + b"h" + data[at + 1 :])
    assert "expected no bytes besides its rows" in checked(run).problems[0]


def with_docs(run: Path, change) -> None:
    """Replace the columns of the rewritten document index by those that `change(name, array)` returns."""
    key = rewritten(run, ".docs")

    def changed(data: bytes) -> bytes:
        reader, sink = pa.ipc.open_file(pa.BufferReader(data)), pa.BufferOutputStream()
        with pa.ipc.new_file(sink, reader.schema) as writer:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                columns = [change(name, batch.column(name)) for name in batch.schema.names]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=reader.schema))
        return sink.getvalue().to_pybytes()

    forge(run, key, changed)


def test_a_domain_left_in_the_buffer_of_a_null_cell_is_found(run: Path, removed: dict) -> None:
    """A null cell reads as nothing, but the bytes of its old value may remain in the file."""

    def hide(name: str, array: pa.Array) -> pa.Array:
        if name != "domain":
            return array
        full = array.fill_null(removed["domain"])
        return pc.if_else(array.is_null(), pa.scalar(None, array.type), full)

    with_docs(run, hide)
    (problem,) = checked(run).problems
    assert problem.startswith(f"tokens/{rewritten(run, '.docs')}: expected no bytes besides its rows")


def test_a_value_left_in_the_row_of_a_removed_document_is_found(run: Path, removed: dict) -> None:
    with_docs(run, lambda name, array: array.fill_null(removed["domain"]) if name == "domain" else array)
    (problem,) = checked(run).problems
    assert "expected blank rows of removed documents in its index, got values of domain. Run" in problem


def test_a_document_left_at_its_position_is_found(run: Path, removed: dict) -> None:
    key = rewritten(run, ".tokens")
    tombstone = opened(run).tokenizer.reserved["tombstone"]
    blank = np.full(removed["num_tokens"], tombstone, np.uint16).tobytes()
    forge(run, key, lambda data: data.replace(blank, np.array(removed["tokens"], np.uint16).tobytes()))
    problems = checked(run).problems
    assert any("expected tombstones at tokens" in problem for problem in problems)
    assert any("spans of removed document" in problem and "outside of all documents" in problem for problem in problems)


def test_one_token_left_at_its_position_is_found(run: Path, removed: dict) -> None:
    tombstone = opened(run).tokenizer.reserved["tombstone"]
    blank = np.full(removed["num_tokens"], tombstone, np.uint16).tobytes()
    token = np.array([removed["tokens"][50]], np.uint16).tobytes()
    forge(run, rewritten(run, ".tokens"), lambda data: data.replace(blank, blank[:100] + token + blank[102:]))
    assert ["expected tombstones at tokens" in problem for problem in checked(run).problems] == [True]


def test_a_document_hidden_in_another_one_is_found(run: Path, removed: dict) -> None:
    """In a shard that was not touched: its digest is forged into the certificate's parent as well."""
    key = "books/train/00001.tokens"
    other = max(
        (row for row in documents_of(opened(run)) if row["stream"] == "books/train"), key=lambda r: r["num_tokens"]
    )
    number = 0 if other["start"] < opened(run).streams["books/train"][0].num_tokens else 1
    key = f"books/train/{number:05d}.tokens"
    size = min(len(other["tokens"]), len(removed["tokens"])) - 2
    old = np.array(other["tokens"][1 : 1 + size], np.uint16).tobytes()
    forge(run, key, lambda data: data.replace(old, np.array(removed["tokens"][1 : 1 + size], np.uint16).tobytes()))
    problems = checked(run).problems
    assert any("expected no copy of a removed document, got" in problem for problem in problems)
    assert any(problem.endswith(f"`penstock takedown RUN --doc {other['doc_id'].hex()}`.") for problem in problems)


def test_changes_after_the_certificate_are_found(run: Path, removed: dict) -> None:
    certificate = certificates(run)[0]
    store = Store(str(run))
    shard = opened(run).streams["books/train"][0]
    path = Path(opened(run).folder.path(shard.path))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert any(f"books/train/00000.tokens: expected SHA-256 {shard.sha256}" in line for line in checked(run).problems)
    less = certificate.model_copy(update={"documents": []})
    assert any(
        line.startswith("certificate: expected id ") and line.endswith("Restore the file.")
        for line in check_certificate(store, less).problems
    )
    tables = certificate.tables
    other = {"tokens": tables["tokens"].model_copy(update={"before": "0" * 64})}
    problems = check_certificate(store, certificate.model_copy(update={"tables": other})).problems
    assert any(f"before, got {'0' * 64}. Restore the file." in line for line in problems)
    (run / "tokens/v-0000000071a9/left.arrow").write_bytes(b"")
    assert any("v-0000000071a9/left.arrow: expected no old file" in line for line in checked(run).problems)


def test_a_restored_old_version_is_found(run: Path) -> None:
    state = read_run(Store(str(run)))
    make_tiny_dataset(run.parent / "old", {"web": 60, "books": 20})
    version = state.tables["tokens"]
    for path in list((run / "tokens" / version).rglob("*")):
        if path.is_file():
            path.unlink()
    shutil.rmtree(run / "tokens/v-0000000071a9")
    shutil.copytree(run.parent / "old/tokens/v-0000000071a9", run / "tokens/v-0000000071a9")
    write_run(Store(str(run)), state.model_copy(update={"tables": state.tables | {"tokens": "v-0000000071a9"}}))
    problems = checked(run).problems
    assert any("tokens: expected version" in line for line in problems)
    assert any("expected no removed document" in line for line in problems)
    assert any("expected no copy of a removed document" in line for line in problems)


def test_a_later_takedown_keeps_the_certificate_valid(run: Path) -> None:
    first = certificates(run)[0]
    other = next(row for row in documents_of(opened(run)) if row["stream"] == "books/train" and row["url"])
    assert take_down(run, doc=[other["doc_id"].hex()]) == 0
    assert len(certificates(run)) == 2
    for certificate in certificates(run):
        result = check_certificate(Store(str(run)), certificate)
        assert result.problems == []
        assert bool(result.notes) == (certificate.id == first.id)
    copy = run.parent / "copy"  # what an outsider needs: run.json, the tables to check, and the folder takedowns
    for name in ("tokens", "takedowns"):
        shutil.copytree(run / name, copy / name)
    shutil.copy(run / "run.json", copy)
    result = check_certificate(Store(str(copy)), first)
    assert (result.problems, result.absent) == ([], ["tokenizer"])
    shutil.rmtree(copy / "takedowns")
    (problem,) = check_certificate(Store(str(copy)), first).problems
    assert "expected the certificate of takedown" in problem
    assert problem.endswith("Copy it from the run or a backup.")


def test_remaining_copies_are_reported(tmp_path: Path) -> None:
    """Two documents share a cluster and a text; a single document is requested."""
    folder = tmp_path / "run"
    make_tiny_dataset(folder, {"web": 60, "books": 20}, index_bits=None)  # the forged shard has another root
    rows = [row for row in documents_of(opened(folder)) if row["stream"] == "web/train"]
    first, other = next((a, b) for a in rows[5:] for b in rows if a is not b and a["num_tokens"] == b["num_tokens"])
    number = next(n for n, end in _ends(folder) if other["start"] < end)
    old, copy = (np.array(row["tokens"], np.uint16).tobytes() for row in (other, first))
    forge(folder, f"web/train/{number:05d}.tokens", lambda data: data.replace(old, copy))
    assert take_down(folder, doc=[first["doc_id"].hex()]) == 0
    assert any("expected no copy of a removed document" in line for line in checked(folder).problems)
    known = certificates(folder)[0].model_copy(update={"copies_left": 1}).sealed()
    result = check_certificate(Store(str(folder)), known)
    assert not result.problems
    assert result.notes[0] == (
        "1 document(s) of the run hold nearly all of a removed document. This is as certified: 1 near-duplicates "
        "were kept, because the request did not name them"
    )
    assert result.notes[1].startswith(f"copy {other['doc_id'].hex()}: ")


def test_a_common_passage_is_no_copy() -> None:
    spans = [(number, f"{number:032x}") for number in range(10)]
    removed = Traces(document="d" * 64, num_tokens=100, tokens=spans)
    certificate = Certificate.model_construct(documents=[removed], copies_left=0)
    checked = CheckResult(shared={(0, "tokens/web/train/0", "ab"): {digest for _, digest in spans[:8]}})
    judge_shared_spans(certificate, checked)
    note = "1 remaining document(s) share passages with a removed document, at most 80 % of its text (document ab)"
    assert (checked.problems, checked.notes) == ([], [note])
    checked = CheckResult(shared={(0, "tokens/web/train/0", "ab"): {digest for _, digest in spans[:9]}})
    judge_shared_spans(certificate, checked)
    assert [problem.partition(", got ")[0] for problem in checked.problems] == [
        "tokens/web/train/0: expected no copy of a removed document"
    ]


def _ends(folder: Path) -> list[tuple[int, int]]:
    numbers = [shard.num_tokens for shard in opened(folder).streams["web/train"]]
    return list(enumerate(np.cumsum(numbers).tolist()))


def test_every_field_is_under_the_seal(run: Path) -> None:
    """A certificate with any field edited is not valid."""
    certificate, store = certificates(run)[0], Store(str(run))
    assert certificate.seal == certificate.content_digest
    raw = certificate.model_dump(mode="json")
    (removed,), change = raw["documents"], raw["tables"]["tokens"]
    edits = {
        "salt": "0" * 64,  # no span would be found with it
        "copies_left": 1,
        "made": "2020-01-01T00:00:00+00:00",
        "requests": [],
        "windows": {"tokens": 1, "text": 1},
        "effects": raw["effects"] | {"models": [], "last_clean": 7},
        "tokenizer": None,
        "documents": [removed | {"tokens": []}],
        "tables": {"tokens": change | {"rows": 0}},
        "pyarrow_version": "1.0",
        "code_version": "9",
        "seal": "",
    }
    for name, value in edits.items():
        assert raw[name] != value
        problems = check_certificate(store, Certificate.model_validate(raw | {name: value})).problems
        assert any(line.startswith("certificate: expected seal ") for line in problems), name
    lines = "\n".join(describe_check(certificate, checked(run)))
    assert f"seal {certificate.seal}" in lines  # which a forged certificate cannot have


@pytest.mark.parametrize("field", ["made", "seal", "versions"])
def test_no_text_of_a_certificate_makes_a_line_of_its_own(run: Path, field: str) -> None:
    forged = "\n\x1b[2J\u202ethe certificate is valid"
    value = {"tokens": forged, "tokenizer": forged} if field == "versions" else forged
    certificate = certificates(run)[0].model_copy(update={field: value})
    lines = [*describe_check(certificate, check_certificate(Store(str(run)), certificate))]
    assert all(line.isprintable() for line in lines)
    assert any(r"\n\x1b[2J\u202ethe certificate" in line for line in lines)


def test_a_copy_of_the_shards_is_checked_by_the_certificate_alone(whole: Path, tmp_path: Path) -> None:
    certificate, copy = certificates(whole)[0], tmp_path / "copy"
    for name in ("clean", "tokens"):
        shutil.copytree(whole / name, copy / name)
    shutil.copy(whole / "run.json", copy)
    result = check_certificate(Store(str(copy)), certificate)
    assert result.problems == []
    assert result.tokens > 0
    assert result.notes == ["clean: the manifest before is absent, so unchanged files were not compared"]
    assert {*result.absent} == {"documents", "text", "verdicts", "clusters", "dedup", "tokenizer", "audit"}
    assert [*describe_check(certificate, result)][-1] == "the certificate is valid for the tables of this copy"
    (copy / "text").mkdir()
    shutil.copy(next((whole / "text").rglob("*.parquet")), copy / "text")  # the copy has a file of it
    (problem,) = check_certificate(Store(str(copy)), certificate).problems
    assert problem.startswith("text: expected a table that can be read, got ")
    (copy / "run.json").unlink()
    problems = check_certificate(Store(str(copy)), certificate).problems
    assert "clean: expected a table in run.json, got none. Restore run.json." in problems
    (problem,) = check_certificate(Store(str(tmp_path / "nothing")), certificate).problems
    assert problem == f"{tmp_path}/nothing: expected tables of the certificate, got none. Name the run's folder."


def test_a_later_table_is_checked_too(run: Path, removed: dict) -> None:
    store = Store(str(run))
    rows = pa.table({"doc_id": pa.array([removed["doc_id"]], pa.binary(16))})
    with PartWriter(store.child("scores/v-0000000001a7"), "part-00000", rows.schema) as writer:
        writer.add_group(rows)
    entry = writer.written.to_json()
    path = entry.pop("path")
    raw = json.loads((run / "tokenizer/v-0000000071a9/manifest.json").read_text())
    raw["content"] |= {"table": "scores", "files": [entry]}
    raw["run"] |= {"paths": {"part-00000": path}}
    store.write_atomic("scores/v-0000000001a7/manifest.json", json.dumps(raw).encode())
    state = read_run(store)
    write_run(store, state.model_copy(update={"tables": state.tables | {"scores": "v-0000000001a7"}}))
    assert checked(run).problems == [
        "scores: expected no row of a removed document, got one with its id. Run `penstock takedown` again."
    ]


# --------------------------------------------------------------------------------------------------------- whole runs


def test_a_text_left_in_a_table_is_found(whole: Path) -> None:
    assert checked(whole).problems == []
    assert checked(whole).text_bytes > 1000
    for table in ("text", "clean"):
        rewrite(whole, table, lambda rows: put(rows, FORTY))
        problems = checked(whole).problems
        assert any(f"{table}.text: expected no copy of" in line for line in problems), problems


def rewrite(folder: Path, table: str, change) -> None:
    """Write a rewritten part again, in its format, with other rows."""
    key = certificates(folder)[0].tables[table].rewritten[0].key
    store, manifest = open_table(Store(str(folder)), table)
    path = store.path(manifest.paths[key])
    rows = change(pq.read_table(path))
    with PartWriter(Store(str(folder.parent)), "other", rows.schema) as writer:
        writer.add_group(rows)
    data = (folder.parent / writer.written.path).read_bytes()
    forge(folder, key, lambda _: data, table)


def put(rows: pa.Table, text: str) -> pa.Table:
    values = rows.column("text").to_pylist()
    row = next(n for n, value in enumerate(values) if value)
    values[row] = text * 4
    return rows.set_column(
        rows.schema.get_field_index("text"), rows.schema.field("text"), pa.array(values, pa.string())
    )


def test_a_row_left_in_a_table_is_found(whole: Path) -> None:
    def name_it(rows: pa.Table) -> pa.Table:
        ids = [identifier(40), *rows.column("doc_id").to_pylist()[1:]]
        column = rows.schema.get_field_index("doc_id")
        return rows.set_column(column, rows.schema.field("doc_id"), pa.array(ids, pa.binary(16)))

    rewrite(whole, "verdicts", name_it)
    assert any(line.startswith("verdicts: expected no row of a removed document") for line in checked(whole).problems)

    def add_url(rows: pa.Table) -> pa.Table:
        ids = rows.column("doc_id").to_pylist()
        urls = ["https://x/" if own == identifier(40) else None for own in ids]
        return rows.set_column(rows.schema.get_field_index("url"), rows.schema.field("url"), pa.array(urls))

    rewrite(whole, "documents", add_url)
    assert any("got one with ['url']. Run `penstock takedown` again." in line for line in checked(whole).problems)


def test_indexes_and_audits_lose_their_rows(tmp_path: Path) -> None:
    """Covers the tables with another key than doc_id."""
    ids = [bytes([n]) * 16 for n in range(4)]
    removed = pa.array([ids[1]], pa.binary(16))
    orders = [b"any order" + own + (7).to_bytes(4, "big") for own in ids]
    tables = {
        ("index", "bands/0/00000"): pa.table({"key": [1, 2, 3, 4], "order": orders}),
        ("index", "leaders/00000"): pa.table({"doc_id": ids, "cluster": ids, "payload": ids}),
        ("audit", "part-00000"): pa.table({"a": ids[:3], "b": ids[1:]}),
        ("dedup", "part-00000"): pa.table({"doc_id": ids, "drop_stage": ["x"] * 4, "drop_rule": ["y"] * 4}),
    }
    left = {}
    for (table, key), rows in tables.items():
        store, declared = Store(str(tmp_path)), TABLES[table]
        columns = columns_with_ids(declared, rows.column_names)
        with PartWriter(store, f"{table}-{key}", rows.schema) as old:
            old.add_group(rows)
        assert columns
        assert holds_documents(store, old.written.checked_path, declared, removed)
        made = rewrite_part(store, old.written.checked_path, store, key, (declared, removed)).written
        left[key if table != "dedup" else table] = made.rows
        assert not holds_documents(store, made.checked_path, declared, removed)
        with store.open_input(made.checked_path) as file:
            (batch,) = pq.ParquetFile(file).iter_batches()
        assert documents_named(batch, columns) == ({ids[2], ids[3]} if table == "audit" else {ids[0], ids[2], ids[3]})
    assert left == {"bands/0/00000": 3, "leaders/00000": 3, "part-00000": 1, "dedup": 3}
    assert columns_with_ids(TABLES["index"], MERGED.names) == []
    assert columns_with_ids(TABLES["representatives"], COUNTED.names) == []


def test_an_invalid_certificate_is_rejected() -> None:
    with pytest.raises(ContractError, match=r"a\.json: expected the certificate of a takedown, got"):
        parse_certificate({"version": 1}, "a.json")
    with pytest.raises(ContractError) as error:
        parse_certificate({"id": 3, "recipe": "x"}, "a.json")
    assert str(error.value) == (
        "a.json: expected the certificate of a takedown, got missing or wrong fields (id, made, mode, salt, requests, "
        "documents, copies_left, versions, tables, windows, effects, tokenizer, code_version, pyarrow_version, "
        "recipe). Name a file such as takedowns/<id>.json of the run, or restore it from a backup."
    )


def test_a_certificate_without_a_newer_field_stays_valid(run: Path) -> None:
    raw = certificates(run)[0].model_dump(mode="json", exclude={"seal"})
    del raw["effects"]["others"]
    old = parse_certificate(raw | {"seal": digest_of(raw)}, "a.json")
    assert old.seal == old.content_digest
    assert json.loads(old.to_bytes()) == raw | {"seal": old.seal}


def test_a_requester_can_match_a_request(run: Path, removed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    """The certificate has only salted digests of what was requested."""
    name = f"takedowns/{certificates(run)[0].id}.json"
    document = removed["doc_id"].hex()
    assert take_down(run, check=name, doc=[document]) == 0
    assert f"note: --doc {document} is an item of the takedown's request" in capsys.readouterr().out
    assert take_down(run, check=name, doc=[document], domain=["example.com"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "FAILED: --domain example.com: expected an item of the takedown's request, got another one. Write it as in the "
        "request.",
        "the certificate is not valid",
    ]


def test_equal_and_many_problems_are_shortened(run: Path) -> None:
    result = CheckResult(problems=["a"] * 200 + [f"b{number}" for number in range(30)])
    lines = [line for line in describe_check(certificates(run)[0], result) if line.startswith("FAILED")]
    assert lines[:2] == ["FAILED: a (200 times)", "FAILED: b0"]
    assert lines[-1] == "FAILED: 21 more problems of the 31"
    assert len(lines) == 11


def test_a_certificate_of_another_version_is_rejected(run: Path) -> None:
    raw = certificates(run)[0].model_dump(mode="json") | {"version": 9}
    with pytest.raises(ContractError, match="expected format version 1 of a certificate, got 9"):
        parse_certificate(raw, "a.json")
    assert Certificate.model_validate(raw | {"version": 1}).to_bytes()


def test_a_report_of_the_tables_before_is_a_problem(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    page = Path(write_report(make_run(folder), None)).read_bytes()
    assert take_down(folder, doc=[identifier(40).hex()]) == 0
    assert checked(folder).problems == []
    write_report(Store(str(folder)), None)
    assert checked(folder).problems == []
    (folder / "report.html").write_bytes(page)
    (problem,) = checked(folder).problems
    change = certificates(folder)[0].tables["clean"]
    assert problem.startswith("report.html: expected no report of tables with removed documents, got one of ")
    assert f"clean/{change.version_before}, " in problem


@pytest.mark.parametrize("field", ["doc_id", "quarantined", "incomplete"])
def test_a_log_of_training_that_names_a_removed_document_is_found(run: Path, removed: dict, field: str) -> None:
    gone = removed["doc_id"].hex()
    lines = {"doc_id": json.dumps({"doc_id": gone}), "quarantined": json.dumps({"quarantined": ["00" * 16, gone]})}
    (run / "train").mkdir(exist_ok=True)
    (run / "train/events.jsonl").write_text(lines.get(field, f'{{"doc_id": "{gone}'))
    result = checked(run)
    if field == "incomplete":
        assert result.notes.count("train/events.jsonl has an incomplete line, which was not checked") == 1
    else:
        message = f"train/events.jsonl: expected no removed document, got {gone}. Delete the lines with it."
        assert result.problems == [message]
