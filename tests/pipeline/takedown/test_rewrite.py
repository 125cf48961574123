"""A takedown from a dataset and from a whole run: removed data, unchanged data, and rejected requests."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine.parquet import PartWriter
from pipeline.lineage.training import read_lineage
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks
from pipeline.summary import closing_summary
from pipeline.takedown.rewrite import figures_left
from pipeline.takedown.select import TakedownRequest, select_documents
from pipeline.takedown.shards import RemovedRows, blank_docs, blank_tokens, cut_docs, cut_tokens
from pipeline.takedown.tables import counts_without_rows, rewrite_part
from schemas.errors import ConfigError, ContractError
from schemas.ids import doc_id
from schemas.manifest import Counts, current_tables, open_table, read_run, write_run
from schemas.storage import Store
from schemas.tables import TABLES, VERDICT_COLUMNS, Table
from schemas.takedown import REMOVED_ID, check_no_takedowns, descent_of, resolve_version
from tests.support.report_run import Record, crawl, identifier, make_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import all_bytes, certificates, documents_of, opened, rows_of, take_down, tokens_of
from train.data.document_index import DocumentIndex

LONG = "The harbour master wrote down every ship that came in before the storm of 1887, and this is page {}. "


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> Path:
    """A dataset that no test changes."""
    folder = tmp_path_factory.mktemp("unchanged") / "run"
    make_tiny_dataset(folder, {"web": 60, "books": 20})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_tiny_dataset(tmp_path / "run", {"web": 60, "books": 20})
    return tmp_path / "run"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run with every table; the texts of its pages are long enough to be traced."""
    records = [
        Record(r.outcome, r.kind, r.url, None if r.text is None else LONG.format(n) + r.text, r.title, r.language,
               r.chars, r.cluster, r.pii, r.length)
        for n, r in enumerate(crawl())
    ]  # fmt: skip
    make_run(tmp_path / "whole", records=records)
    return tmp_path / "whole"


# ------------------------------------------------------------------------------------------------------------- shards


def test_a_shard_without_removals_is_written_with_the_same_bytes(unchanged: Path, tmp_path: Path) -> None:
    dataset, new = opened(unchanged), Store(str(tmp_path))
    for shard in (shard for shards in dataset.streams.values() for shard in shards):
        place, none = RemovedRows(shard, np.empty(0, np.int64), [], []), []
        made = [blank_tokens(dataset.folder, place, new, "uint16", 4), cut_tokens(dataset.folder, place, new, "uint16")]
        assert [(written.sha256, removed) for written, removed in made] == [(shard.sha256, none)] * 2
        docs = [blank_docs(dataset.folder, place, new), cut_docs(dataset.folder, place, new)]
        assert [written.sha256 for written in docs] == [shard.docs_sha256] * 2


def test_only_touched_shards_are_rewritten_and_positions_kept(run: Path) -> None:
    before = documents_of(opened(run))
    streams = {
        shard.path: tokens_of(opened(run), shard.path) for shards in opened(run).streams.values() for shard in shards
    }
    old, files = opened(run), all_bytes(run)
    chosen = before[17]
    assert take_down(run, doc=[chosen["doc_id"].hex()]) == 0
    new = opened(run)
    after = documents_of(new)
    assert [row["start"] for row in after] == [row["start"] for row in before]
    for was, now in zip(before, after, strict=True):
        if was["doc_id"] != chosen["doc_id"]:
            assert now == was
            continue
        assert now["tokens"] == [new.tokenizer.reserved["tombstone"]] * was["num_tokens"]
        assert (now["doc_id"], now["url"], now["split"], now["length"]) == (REMOVED_ID, "", "", 0)
        assert [now[name] for name in ("domain", "date", "language", "cluster")] == [None] * 4
    rewritten = {change.key for change in certificates(run)[0].tables["tokens"].rewritten}
    assert len(rewritten) == 4  # a shard, its documents, a bucket by URL, a file of the index by id
    for entry in old.manifest.content.files:
        path = new.manifest.paths[entry.key]
        assert path.startswith("../v-0000000071a9/") == (entry.key not in rewritten)
        stays = (run / "tokens/v-0000000071a9" / old.manifest.paths[entry.key]).exists()
        assert stays == (entry.key not in rewritten)
    assert not (run / "tokens/v-0000000071a9/manifest.json").exists()
    assert len(streams) == sum(len(shards) for shards in new.streams.values())
    # No byte of the document is left anywhere below the run.
    text = np.array(chosen["tokens"][1:-1], np.uint16).tobytes()
    assert sum(text in data for data in files.values()) == 1
    assert sum(text in data for data in all_bytes(run).values()) == 0
    assert sum(chosen["doc_id"] in data for data in all_bytes(run).values()) == 0
    assert sum(chosen["doc_id"].hex().encode() in data for data in all_bytes(run).values()) == 0


def test_compacted_shards_have_no_tombstones(run: Path) -> None:
    before = documents_of(opened(run))
    removed = {row["doc_id"] for row in (before[3], before[30], before[31])}
    assert take_down(run, doc=[identifier.hex() for identifier in removed], compact=True) == 0
    new = opened(run)
    after = documents_of(new)
    stay = [row for row in before if row["doc_id"] not in removed]
    assert [row["doc_id"] for row in after] == [row["doc_id"] for row in stay]
    assert [row["tokens"] for row in after] == [row["tokens"] for row in stay]
    for name, shards in new.streams.items():
        assert [len(tokens_of(new, shard.path)) for shard in shards] == [shard.num_tokens for shard in shards]
        assert name in opened(run).streams
    descent = descent_of(new.manifest)
    assert descent is not None
    assert descent.mode == "compact"


def test_batches_have_the_fixed_size_again(tmp_path: Path) -> None:
    make_tiny_dataset(tmp_path / "run", {"web": 2700}, shard_tokens=10**9)
    rows = documents_of(opened(tmp_path / "run"))
    removed = [rows[300], rows[1400], rows[-1]]
    assert take_down(tmp_path / "run", doc=[row["doc_id"].hex() for row in removed], compact=True) == 0
    dataset = opened(tmp_path / "run")
    shard = dataset.streams["web/train"][0]
    sizes = {}
    for path in (shard.path, shard.docs_path):
        with dataset.folder.open_input(path) as file:
            reader = pa.ipc.open_file(file)
            sizes[path] = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
    number = 2430 - sum(row["stream"] == "web/train" for row in removed)
    assert list(sizes.values()) == [[1024, 1024, number - 2048]] * 2
    assert take_down(tmp_path / "run", check=f"takedowns/{certificates(tmp_path / 'run')[0].id}.json") == 0


def test_a_shard_may_lose_every_document(tmp_path: Path) -> None:
    for compact in (False, True):
        folder = tmp_path / f"run{compact}"
        make_tiny_dataset(folder, {"web": 60, "books": 10})
        assert (
            take_down(folder, doc=[row["doc_id"].hex() for row in documents_of(opened(folder))[:1]], compact=compact)
            == 0
        )
        assert take_down(folder, check=f"takedowns/{certificates(folder)[0].id}.json") == 0
        left = [row for row in documents_of(opened(folder)) if row["stream"] == "books/heldout"]
        assert [row["doc_id"] for row in left] == ([] if compact else [REMOVED_ID])


@pytest.mark.parametrize("compact", [False, True])
def test_no_byte_of_a_removed_domain_is_left(run: Path, compact: bool) -> None:
    name = b"site3.co.uk"
    assert sum(name in data for data in all_bytes(run).values()) > 2  # document indexes and the index by URL
    assert take_down(run, domain=[name.decode()], compact=compact) == 0
    assert [file for file, data in all_bytes(run).items() if name in data] == []


def test_removed_documents_are_in_no_index_and_others_are(run: Path) -> None:
    rows = documents_of(opened(run))
    chosen, other = rows[9], rows[10]
    assert take_down(run, url=[chosen["url"]]) == 0
    documents = DocumentIndex(opened(run))
    assert list(documents.of_url(chosen["url"])) == []
    listed = [row["doc_id"] for _, row, _ in documents.of_url(other["url"])]
    assert other["doc_id"] in listed or other["url"] == chosen["url"]


# ---------------------------------------------------------------------------------------------------------- selection


def test_domains_urls_ids_and_copies_are_found(whole: Path, run: Path) -> None:
    store = Store(str(run))
    rows = documents_of(opened(run))
    of_domain = {row["doc_id"] for row in rows if row["domain"] == "site3.co.uk"}
    for name in ("site3.co.uk", "SITE3.co.uk.", "www.site3.co.uk"):
        assert select_documents(store, TakedownRequest(domains=(name,))).documents == of_domain
    assert len(of_domain) > 5
    url = rows[20]["url"]
    same = {row["doc_id"] for row in rows if row["url"] == url}
    forms = (url, url.replace("http://www.", "https://"), f"{url}&utm_source=mail#top")
    assert [select_documents(store, TakedownRequest(urls=(form,))).documents for form in forms] == [same] * 3
    # The whole run has dropped pages and clusters of near copies.
    near = select_documents(Store(str(whole)), TakedownRequest(near=(identifier(24).hex(),)))
    clusters = {row["doc_id"]: row["cluster"] for row in rows_of(whole, "clusters")}
    assert near.documents == {document for document, cluster in clusters.items() if cluster == clusters[identifier(24)]}
    assert (len(near.documents), near.copies) == (5, frozenset())
    alone = select_documents(Store(str(whole)), TakedownRequest(documents=(identifier(24).hex(),)))
    assert (alone.documents, alone.copies) == ({identifier(24)}, near.documents - {identifier(24)})
    both = select_documents(Store(str(whole)), TakedownRequest(documents=(identifier(24).hex(),), with_copies=True))
    assert (both.documents, both.copies) == (near.documents, frozenset())


def test_a_domain_without_a_public_suffix_has_its_hosts(run: Path, tmp_path: Path) -> None:
    rows = documents_of(opened(run))
    every = select_documents(Store(str(run)), TakedownRequest(domains=("co.uk",)))
    assert every.documents == {row["doc_id"] for row in rows}
    hosts = ("archive.gannet.example", "gannet.example", "notgannet.example")
    records = [Record(language="en", chars=100, url=f"https://{host}/", text=host) for host in hosts]
    store = make_run(tmp_path / "own", "documents", records)
    found = select_documents(store, TakedownRequest(domains=("gannet.example", "notgannet.example")))
    assert {value: {*documents} for (_, value), documents in found.matched.items()} == {
        "gannet.example": {identifier(0), identifier(1)},
        "notgannet.example": {identifier(2)},
    }
    with pytest.raises(ConfigError, match=r"--domain example: expected a document of .*, got none"):
        select_documents(store, TakedownRequest(domains=("example", "gannet.example")))


def test_documents_that_only_older_tables_have_are_found(whole: Path, tmp_path: Path) -> None:
    """The step `documents` was run again without some of the inputs, and later steps were not."""
    store, gone = Store(str(whole)), next(row for row in rows_of(whole, "clean") if row["url"])
    other = make_run(
        tmp_path / "other", "documents", [Record(language="en", chars=9, url="http://a.example/", text="t")]
    )
    state, new = read_run(store), "v-0123456789ab"
    shutil.copytree(open_table(other, "documents")[0].root, whole / "documents" / new)
    tables = {name: version for name, version in state.tables.items() if name not in ("text", "tokens")}
    write_run(store, state.model_copy(update={"tables": tables | {"documents": new}}))
    assert "clean" not in current_tables(store)
    request = TakedownRequest(urls=(gone["url"],))
    assert gone["doc_id"] in select_documents(store, request).documents
    write_run(store, state.model_copy(update={"tables": {"documents": new}}))
    with pytest.raises(
        ConfigError, match=r"got none in its current tables.* `penstock takedown .* --drop-old` deletes"
    ):
        select_documents(store, request)
    assert take_down(whole, drop_old=True) == 0
    assert not [*whole.glob("clean/v-*/*")]
    with pytest.raises(ConfigError, match=r"got none. Look it up with `penstock show`, and correct the spelling"):
        select_documents(store, request)


def test_a_dry_run_lists_documents_and_their_copies(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, before = identifier(24), all_bytes(whole)
    url = next(row["url"] for row in rows_of(whole, "documents") if row["doc_id"] == document)
    assert take_down(whole, doc=[document.hex()], url=[url], dry_run=True) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("4 near-duplicates of them are not selected; --with-copies removes them too")
    assert lines[:4] == [
        "1 document(s) to be removed", f"  --url {url}: 1", f"  --doc {document.hex()}: 1",
        f"  {document.hex()[:12]}  {url}",
    ]  # fmt: skip
    clusters = {row["doc_id"]: row["cluster"] for row in rows_of(whole, "clusters")}
    copies = sorted(own.hex() for own in clusters if clusters[own] == clusters[document] and own != document)
    assert lines[at + 1 : at + 5] == [f"  {copy[:12]}" for copy in copies]
    assert all_bytes(whole) == before


def test_an_exact_copy_whose_text_stays_is_reported(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged = rows_of(whole, "dedup")
    copies = {row["doc_id"]: row["survivor"] for row in judged if row["drop_rule"] == "exact_duplicate"}
    copy, survivor = next((own, kept) for own, kept in sorted(copies.items()) if kept is not None)
    assert take_down(whole, doc=[copy.hex()], dry_run=True) == 0
    out = capsys.readouterr().out
    assert (
        "the text of 1 of them stays: they are exact copies of documents that are not selected; "
        f"--with-copies removes these too\n  {copy.hex()[:12]} is a copy of {survivor.hex()[:12]}\n"
        "  0 step(s) of the plan contain that text\n"
    ) in out
    for request in ({"doc": [copy.hex()], "with_copies": True}, {"doc": [copy.hex(), survivor.hex()]}):
        assert take_down(whole, dry_run=True, **request) == 0
        assert "of them stays" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domain": ["example.com"]}, "--domain example.com: expected a document of .*, got none"),
        ({"domain": ["co.uk/x"]}, "expected a domain such as example.com, got 'co.uk/x'"),
        ({"domain": [""]}, "expected a domain such as example.com, got ''"),
        ({"url": ["http://nowhere.example/"]}, "--url http://nowhere.example/: expected a document"),
        ({"doc": ["00" * 16]}, f"--doc {'00' * 16}: expected a document"),
        ({"doc": ["xyz"]}, "--doc: expected a document id of 12 to 32 hex digits, got 'xyz'"),
        ({"near": ["ab" * 15]}, f"--near {'ab' * 15}: expected the beginning of a document id of .*, got no document"),
        ({}, "expected --domain, --url, --doc, --docs or --near, got none of them"),
        ({"check": "a.json", "drop_old": True}, "expected --check or --drop-old without other options"),
        ({"check": "a.json", "compact": True}, "without other options, got --check, --compact"),
        ({"drop_old": True, "doc": ["00" * 16]}, "without other options, got --drop-old, --doc"),
        ({"check": "a.json"}, "expected a certificate, got no file a.json"),
    ],
)
def test_invalid_requests_are_rejected_before_any_write(unchanged: Path, arguments: dict, message: str) -> None:
    before = all_bytes(unchanged)
    with pytest.raises(ConfigError, match=message):
        take_down(unchanged, **arguments)
    assert all_bytes(unchanged) == before


def test_one_item_without_a_match_stops_the_takedown(unchanged: Path) -> None:
    before = all_bytes(unchanged)
    with pytest.raises(ConfigError, match=r"example\.com"):
        take_down(unchanged, domain=["site3.co.uk", "example.com"])
    assert all_bytes(unchanged) == before
    assert take_down(unchanged, domain=["site3.co.uk"], dry_run=True) == 0
    assert all_bytes(unchanged) == before
    with pytest.raises(ConfigError, match="expected a run with documents or a dataset, got neither"):
        take_down(unchanged / "nowhere", domain=["site3.co.uk"])


def test_documents_of_a_file_are_taken_down(run: Path, tmp_path: Path) -> None:
    first, second = [row["doc_id"] for row in documents_of(opened(run))][:2]
    listed = tmp_path / "quarantine.jsonl"
    lines = [{"doc_id": identifier.hex(), "step": 3} for identifier in (first, second, first, bytes(16))]
    lines[0]["title"] = "in two\u2028lines"
    texts = (json.dumps(line, ensure_ascii=False) for line in lines)
    listed.write_text("\r\n".join(texts) + "\n\n", encoding="utf-8-sig", newline="")
    assert take_down(run, docs=str(listed)) == 0
    assert len(certificates(run)[0].documents) == 2
    listed.write_text('{"doc": 1}\n')
    with pytest.raises(ConfigError, match=r"line 1: expected an object with a doc_id, got '.\"doc\": 1.'"):
        take_down(run, docs=str(listed))
    with pytest.raises(ConfigError, match="expected a readable file of JSON lines, got an error"):
        take_down(run, docs=str(tmp_path / "none"))


def test_a_repeated_takedown_changes_nothing(run: Path, capsys) -> None:
    rows = documents_of(opened(run))
    assert take_down(run, domain=["site3.co.uk"]) == 0
    after = all_bytes(run)
    capsys.readouterr()
    assert take_down(run, domain=["site3.co.uk"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    removed = next(row for row in rows if row["domain"] == "site3.co.uk")
    assert take_down(run, doc=[removed["doc_id"].hex()]) == 0
    assert all_bytes(run) == after
    with pytest.raises(ConfigError, match=r"got one that takedown \w+ removed\. Omit this option\."):
        take_down(run, doc=[removed["doc_id"].hex(), "00" * 16])


# -------------------------------------------------------------------------------------------------------- whole runs


def test_every_table_loses_the_documents(whole: Path) -> None:
    tables = ("documents", "text", "verdicts", "clusters", "dedup", "clean")
    before = {name: rows_of(whole, name) for name in tables}
    kept, short = identifier(34), identifier(18)  # a page that was kept, and one that a rule dropped
    assert {row["doc_id"]: row["drop_rule"] for row in before["verdicts"]}[short] == "gopher_short_doc"
    add_quotes(whole, kept)
    assert take_down(whole, doc=[kept.hex(), short.hex()]) == 0
    after = {name: rows_of(whole, name) for name in tables}
    for name in ("documents", "text"):
        assert [row["doc_id"] for row in after[name]] == [row["doc_id"] for row in before[name]]
        for was, now in zip(before[name], after[name], strict=True):
            if was["doc_id"] not in (kept, short):
                assert now == was
                continue
            values = {column: value for column, value in now.items() if value is not None}
            position = {
                column: was[column] for column in ("doc_id", "source", "split", "offset", "length") if column in was
            }
            verdict = {"record_type": "response", "drop_stage": "takedown", "drop_rule": "removed"}
            assert values == (position | verdict if name == "documents" else {"doc_id": was["doc_id"]})
    for name in tables[2:]:
        assert after[name] == [row for row in before[name] if row["doc_id"] not in (kept, short)]
    assert not (whole / "report.html").exists()
    assert not (whole / "croissant.json").exists()
    assert [path for path in (whole / "summaries").rglob("*") if path.is_file()] == []
    logs = {name: (whole / f"train/{name}.jsonl").read_text() for name in ("events", "quarantine")}
    assert not any(kept.hex() in text or "c.example/kept" in text for text in logs.values())
    spike, _, rewound = logs["events"].splitlines()  # the incomplete line had its address
    assert json.loads(spike)["documents"][1]["url"] == "http://b/"
    assert json.loads(rewound)["quarantined"] == ["00" * 16, "11" * 16]
    assert [json.loads(line)["url"] for line in logs["quarantine"].splitlines()] == ["", "http://b/"]
    text = LONG.format(34).encode()
    assert not any(text in data for data in all_bytes(whole).values())


def add_quotes(folder: Path, document: bytes) -> None:
    """Write files outside the tables that name documents: a report, a paper, and logs of training."""
    (folder / "report.html").write_text("a quotation")
    (folder / "croissant.json").write_text("{}")
    (folder / "summaries/0123456789ab").mkdir(parents=True, exist_ok=True)
    (folder / "summaries/0123456789ab/eu.json").write_text("c.example")
    entry = {"doc_id": document.hex(), "url": "https://c.example/kept/0", "split": "crawl-0.warc.gz"}
    other = {"doc_id": "00" * 16, "url": "http://b/", "split": "b"}
    rewound = {"kind": "rewound", "step": 3, "quarantined": [document.hex(), "11" * 16]}
    events = [{"kind": "spike", "documents": [entry, other]}, {"kind": "begun", "step": 0}, rewound]
    (folder / "train").mkdir(exist_ok=True)
    listed = [json.dumps(row | {"step": 3}) + "\n" for row in (entry, other)]
    (folder / "train/quarantine.jsonl").write_text("".join(listed))
    broken = json.dumps(events[0])[:130]
    assert entry["url"] in broken
    (folder / "train/events.jsonl").write_text("\n".join([broken, *map(json.dumps, events), broken]))


def test_the_counts_of_all_tables_still_agree(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", until="clean")
    tables, wrong = [*current_tables(run)], unequal(run)
    assert take_down(run.uri, near=[identifier(24).hex()], doc=[identifier(18).hex()]) == 0
    assert ([*current_tables(run)], unequal(run)) == (tables, wrong)
    counts = open_table(run, "documents")[1].content.counts
    assert counts.dropped["takedown/removed"] == 6


def unequal(run: Store) -> list[str]:
    """Return the equations between tables that are violated."""
    return [check.claim for check in checks(collect_facts(run)) if check.left != check.right]


@pytest.mark.parametrize(
    ("table", "removed", "kept", "dropped", "rows_in"),
    [
        ("documents", {"kept": 2, "source/gap": 1}, 4, {"source/gap": 1, "source/other": 2, "takedown/removed": 3}, 10),
        ("dedup", {"kept": 2, "source/gap": 1}, 4, {"source/gap": 1, "source/other": 2}, 7),
        ("clean", {"kept": 1}, 5, {"source/gap": 2, "source/other": 2}, 9),
        ("text", {"kept": 2}, 6, {"source/gap": 2, "source/other": 2}, 10),
    ],
)
def test_the_counts_of_a_table(table: str, removed: dict, kept: int, dropped: dict, rows_in: int) -> None:
    counts = Counts(rows_in=10, rows_kept=6, dropped={"source/gap": 2, "source/other": 2})
    assert counts_without_rows(counts, TABLES[table], removed) == Counts(
        rows_in=rows_in, rows_kept=kept, dropped=dropped
    )


@pytest.mark.parametrize("table", [table for table in TABLES.values() if table.schema], ids=lambda table: table.name)
def test_every_table_loses_or_blanks_the_rows_of_a_document(table: Table, tmp_path: Path) -> None:
    store, ids = Store(str(tmp_path)), [bytes([n]) * 16 for n in range(4)]
    rows = [{name: ids[n + place] for place, name in enumerate(table.ids)} | example(table, n) for n in range(3)]
    with PartWriter(store, "old", table.schema) as old:
        old.add_group(pa.Table.from_pylist(rows, table.schema))
    made = rewrite_part(
        store, old.written.checked_path, store, "part-00000", (table, pa.array([ids[1]], pa.binary(16)))
    )
    left = pq.read_table(store.path(made.written.path)).to_pylist()
    if not table.blank_keeps:
        number = sum(ids[1] in (row[name] for name in table.ids) for row in rows)
        assert left == [row for row in filled(table, rows) if ids[1] not in (row[name] for name in table.ids)]
        assert sum(made.removed.values()) == number == len(table.ids)
        return
    assert made.removed == {"kept": 1}
    blanked = {name: value for name, value in left[1].items() if value is not None}
    verdict = {"drop_stage": "takedown", "drop_rule": "removed"} if table.has_verdicts else {}
    assert blanked == {name: value for name, value in rows[1].items() if name in table.blank_keeps} | verdict
    assert [left[0], left[2]] == [row for n, row in enumerate(filled(table, rows)) if n != 1]


def example(table: Table, number: int) -> dict[str, object]:
    """Return values of the columns of texts and whole numbers, without the verdict."""
    named = {*table.ids, *VERDICT_COLUMNS}
    fields = [field for field in table.schema if field.name not in named]
    texts = {field.name: f"text {number}" for field in fields if pa.types.is_string(field.type)}
    return texts | {field.name: number for field in fields if pa.types.is_integer(field.type)}


def filled(table: Table, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the rows with all columns of the table."""
    return [dict.fromkeys(table.schema.names) | row for row in rows]


def test_other_versions_of_a_table_are_deleted_too(whole: Path) -> None:
    run = Store(str(whole))
    version = whole / "clean/v-0000000007e4"
    version.mkdir()
    for path in (whole / "clean/v-0000000071a9").iterdir():
        (version / path.name).write_bytes(path.read_bytes())
    assert take_down(whole, doc=[identifier(34).hex()]) == 0
    assert list(version.iterdir()) == []
    assert read_run(run).tables["clean"] != "v-0000000071a9"


def test_figures_name_no_removed_document_and_no_domain_of_them_alone() -> None:
    ids = [bytes([number]) * 16 for number in range(5)]

    def loss(kind: str, name: str, *pairs: tuple[int, int]) -> dict[str, Any]:
        named = [{"removed": ids[a].hex(), "kept": ids[b].hex(), "jaccard": 0.9} for a, b in pairs]
        return {"kind": kind, "name": name, "documents": 60, "removed": 40, "pairs": named}

    losses = [
        loss("source", "web", (0, 1)),
        loss("domain", "gone.example", (0, 1)),
        loss("domain", "b", (0, 1), (2, 3)),
    ]
    left = figures_left({"losses": losses, "other": 1}, frozenset(ids[:1]))
    assert left == {"losses": [loss("source", "web"), loss("domain", "b", (2, 3))], "other": 1}
    assert figures_left({"losses": losses}, frozenset(ids[4:])) == {"losses": losses}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["../../../outside"], "'../../../outside'"),
        (["../../clean/v-0000000007e4"], "'../../clean/v-0000000007e4'"),
        (["v-0"], "'v-0'"),
        (["v-1", "v-2", "v-0"], "'v-0'"),
    ],
)
def test_a_replaced_version_names_another_one_of_its_table(tmp_path: Path, names: list[str], problem: str) -> None:
    for number, name in enumerate(names):
        (tmp_path / f"clean/v-{number}").mkdir(parents=True)
        (tmp_path / f"clean/v-{number}/takedown.json").write_text(json.dumps({"to": name, "id": "0123456789ab"}))
    with pytest.raises(ContractError, match=f"expected the name of another version of clean, got {problem}\\."):
        resolve_version(Store(str(tmp_path)), "clean", "v-0")


def test_a_rerun_neither_restores_documents_nor_loses_its_version(whole: Path) -> None:
    run = Store(str(whole))
    assert resolve_version(run, "clean", "v-0000000071a9") == "v-0000000071a9"
    check_no_takedowns(run, "documents")
    assert take_down(whole, doc=[identifier(34).hex()]) == 0
    assert take_down(whole, doc=[identifier(35).hex()]) == 0
    assert resolve_version(run, "clean", "v-0000000071a9") == read_run(run).tables["clean"]
    assert resolve_version(run, "clean", "v-0000000007e4") == "v-0000000007e4"
    with pytest.raises(ContractError, match="documents: expected unchanged settings after the takedowns"):
        check_no_takedowns(run, "documents")


def test_documents_of_no_dataset_are_taken_down_too(tmp_path: Path) -> None:
    make_run(tmp_path / "run", until="clean")
    assert take_down(tmp_path / "run", url=["https://b.example/it/3"]) == 0
    certificate = certificates(tmp_path / "run")[0]
    assert certificate.tables["documents"].rows == 1
    assert "tokens" not in certificate.tables
    assert take_down(tmp_path / "run", check=f"takedowns/{certificate.id}.json") == 0


def test_near_copies_without_clusters_are_rejected(whole: Path) -> None:
    """Without clusters a document would be removed alone, without a word about its copies."""
    store, document = Store(str(whole)), identifier(24).hex()
    state = read_run(store)
    unclustered = {name: version for name, version in state.tables.items() if name in ("documents", "text", "verdicts")}
    write_run(store, state.model_copy(update={"tables": unclustered}))
    before = all_bytes(whole)
    with pytest.raises(
        ConfigError, match=f"--near {document}: expected a document whose near-duplicates are known, got one without"
    ):
        take_down(whole, near=[document])
    assert all_bytes(whole) == before
    assert take_down(whole, doc=[document]) == 0


@pytest.mark.parametrize("compact", [False, True])
def test_summary_and_lineage_count_the_tokens_that_are_left(run: Path, compact: bool) -> None:
    store = Store(str(run))
    total = sum(row["num_tokens"] for row in documents_of(opened(run)))
    assert take_down(run, domain=["site3.co.uk"], compact=compact) == 0
    (certificate,) = certificates(run)
    left = documents_of(opened(run))
    num_left = sum(row["num_tokens"] for row in left if row["doc_id"] != REMOVED_ID)
    removed = sum(len(row["tokens"]) for row in left) - num_left
    assert (removed, num_left + certificate.num_tokens) == (0 if compact else certificate.num_tokens, total)
    lines = closing_summary(store, None, 1.0).text().splitlines()
    shown = [re.findall(r"[\d,]+(?= in | held out| removed)", line) for line in lines if line.startswith("  tokens")]
    numbers = [[int(number.replace(",", "")) for number in row] for row in shown]
    assert sum(train + heldout for train, heldout, *_ in numbers) == num_left
    assert sum(sum(row[2:]) for row in numbers) == removed
    lineage = read_lineage(store)
    (dataset,) = [node for node in lineage.nodes if node.kind == "dataset" and node.is_current]
    assert dataset.counts["tokens"] == num_left


def test_removing_all_documents_leaves_nothing_to_train_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = [row["doc_id"].hex() for row in documents_of(opened(run))]
    assert take_down(run, doc=everything[1:]) == 0
    assert "no document is left" not in capsys.readouterr().out
    assert take_down(run, doc=everything[:1]) == 0
    assert "no document is left in the dataset, so nothing can be trained on it" in capsys.readouterr().out
    assert opened(run).manifest.content.counts.rows_kept == 0


def test_a_dataset_with_no_other_table(run: Path) -> None:
    tables = read_run(Store(str(run))).tables
    assert sorted(tables) == ["tokenizer", "tokens"]
    identifier_of = doc_id("web", "web.warc.gz", 1000)
    assert take_down(run, doc=[identifier_of.hex()]) == 0
