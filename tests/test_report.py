"""The report: every number from a run whose books are known by hand, hostile text escaped, shown in a real browser."""

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import spacy
from tiny_dataset import make_tiny_dataset

from pipeline.build import add_figures, part_key
from pipeline.dedup.declare import DEDUP as DEDUP_STAGE
from pipeline.documents import MEASURED
from pipeline.fused import Books, set_verdict
from pipeline.pii import PII, PiiConfig
from pipeline.report.collect import Figure, Step, collect
from pipeline.report.funnel import checks, drops_by_rule, levels
from pipeline.report.numbers import estimate, number, percent, seconds, short, size
from pipeline.report.page import figure_text, write_report
from pipeline.report.plots import averaged, cluster_plot, line_plot, nice_ticks, training_plots
from pipeline.report.samples import PER_RULE, SHOWN_CHARS, draw_samples, plain, shortened
from pipeline.report.tallies import (
    SizeClass,
    clusters,
    contract,
    counts_of,
    languages,
    num_pages,
    streams,
    without_wordlist,
)
from pipeline.report.truth import score
from pipeline.sources.declare import SOURCE
from pipeline.stage import Drop
from pipeline.stages import all_stages
from pipeline.toxicity import TOXICITY, ToxicityConfig
from pipeline.writing import PartWriter
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, doc_id, shuffle_key
from schemas.manifest import RunFile, make_manifest, open_table, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.tables import CLEAN, DEDUP, DOCUMENTS, TEXT

SCRIPT = "<script>document.title='PWNED'</script>"
IMAGE = '"><img src=x onerror="document.title=\'PWNED\'">'
ADDRESS = "jane.roe@penrose.com"
MAKERS = {"documents": DOCUMENTS, "text": TEXT, "dedup": DEDUP, "clean": CLEAN}
STAGES: dict[str, tuple[Any, ...]] = {
    "documents": (SOURCE, *MEASURED),
    "text": (),
    "dedup": (DEDUP_STAGE,),
    "clean": (TOXICITY, PII),
}
REASONS = {stage.name: stage.reasons for stage in all_stages()}
PARTS = 2
COPIES: dict[str, list[int | None]] = {
    "dedup/exact_duplicate": [1, 1, 1, 1],
    "dedup/near_duplicate": [2, 2, 3],
    "toxicity/toxic_word_share": [None] * 3,
    "kept": [1, 2, 3, *[None] * 17],
}
"""Cluster of each page that reaches deduplication, by what becomes of it: one of 5, one of 3, one of 2 pages."""
SIZES = {1: 5, 2: 3, 3: 2}


@dataclass
class Tables:
    """Rows and books of the tables while they are written, part by part."""

    rows: dict[str, list[list[dict[str, Any]]]] = field(
        default_factory=lambda: {name: [[] for _ in range(PARTS)] for name in MAKERS}
    )
    books: dict[str, list[Books]] = field(
        default_factory=lambda: {
            name: [Books([(stage.name, stage.reasons) for stage in stages]) for _ in range(PARTS)]
            for name, stages in STAGES.items()
        }
    )


@dataclass(frozen=True)
class Record:
    """One record of the synthetic crawl, and the verdict it meets."""

    outcome: str = "kept"
    kind: str = "response"
    url: str | None = None
    text: str | None = None
    title: str | None = None
    language: str | None = None
    chars: int | None = None
    cluster: int | None = None
    pii: dict[str, int] = field(default_factory=dict)
    length: int = 1000


def crawl(hostile: str = SCRIPT + IMAGE) -> list[Record]:
    """53 records: 2 gaps, 7 no page, 2 without text, 5 Italian, 7 of low quality, 7 copies, 3 toxic, 20 kept."""
    records = [Record("source/unreadable_gap", "gap", length=700), Record("source/unreadable_gap", "gap", length=300)]
    records += [Record("source/not_a_page", "warcinfo")] * 2 + [Record("source/not_a_page", hostile)] * 2
    records += [Record("source/http_status", url=f"https://a.example/lost/{n}") for n in range(3)]
    records += [Record("extract/no_text", url=f"https://a.example/empty/{n}") for n in range(2)]
    italian = Record("language/language_not_wanted", text="Questa pagina parla del porto.", language="it", chars=200)
    records += [replace(italian, url=f"https://b.example/it/{n}") for n in range(5)]
    short = Record("quality/gopher_short_doc", text="Short.", language="en", chars=100)
    records += [replace(short, url=f"https://b.example/short/{n}") for n in range(6)]
    # deduplication looks at this one for its cluster although a rule has dropped it
    lorem = Record("quality/c4_lorem_ipsum", title=hostile, language="en", chars=400, cluster=4)
    lorem = replace(
        lorem, text=f"Write to {ADDRESS} or {hostile} by Lorem", url=f"https://b.example/{hostile}?to={ADDRESS}"
    )
    records.append(lorem)
    page = Record(language="en", chars=1000)
    for outcome, groups in COPIES.items():
        records += [
            replace(page, outcome=outcome, url=f"https://c.example/{outcome}/{n}", cluster=c, text=f"{outcome} {n}")
            for n, c in enumerate(groups)
        ]
    kept = records[-20:]
    records[-5:] = [replace(record, language="ja") for record in kept[-5:]]
    records[-20:-17] = [replace(record, pii={"email": 2, "phone": 1}) for record in kept[:3]]
    return records


def make_run(folder: Path, until: str = "tokens", hostile: str = SCRIPT + IMAGE) -> Store:
    """A run folder of the synthetic crawl with the tables up to `until`."""
    names = ("documents", "text", "dedup", "clean", "tokens")
    names = names[: names.index(until) + 1]
    run = make_tiny_dataset(folder, {"web": 20}) if "tokens" in names else Store(str(folder))
    tables = Tables()
    for place, record in enumerate(crawl(hostile)):
        add_record(tables, place, record)
    digests: dict[str, str] = {}
    for name in names[:4]:
        digests[name] = commit_table(run, name, tables, digests)
    pointers = read_run(run).tables | dict.fromkeys(digests, "v-tiny")
    write_run(run, RunFile(tables=pointers, recipe={}))
    return run


def place_of(number: int) -> tuple[int, int]:
    """Part and byte offset of a record."""
    return number % PARTS, 1000 * (number // PARTS)


def identifier(number: int) -> bytes:
    """The doc_id of a record."""
    part, offset = place_of(number)
    return doc_id("web", f"crawl-{part}.warc.gz", offset)


def add_record(tables: Tables, number: int, record: Record) -> None:
    """Add a record to every table that it reaches, the way the passes do."""
    part, offset = place_of(number)
    stage, _, rule = record.outcome.partition("/")
    row: dict[str, Any] = {"doc_id": identifier(number), "source": "web", "split": f"crawl-{part}.warc.gz"}
    row |= {"offset": offset, "length": record.length, "url": record.url, "domain": None}
    row |= {"date": datetime(2026, 1, 1, tzinfo=UTC), "language": record.language}
    first = dict(row, record_type=record.kind, num_chars=record.chars, drop_stage=None)
    first["charset"] = "utf-8" if record.chars else None
    if stage in ("source", *(measured.name for measured in MEASURED)):
        set_verdict(first, stage, Drop(rule, 4.0, 50.0) if stage == "quality" else Drop(rule))
    books = tables.books["documents"][part]
    books.enter(first, record.chars or 0)
    books.tally("record_types", record.kind)
    books.tally("stored_bytes", f"gap/{rule}" if record.kind == "gap" else "records", record.length)
    if record.language:
        books.tally("languages", record.language)
        books.tally("charsets", "utf-8")
        if first["drop_stage"] is None:
            books.tally("kept_languages", record.language)
            books.tally("kept_language_chars", record.language, record.chars or 0)
    tables.rows["documents"][part].append(first)
    tables.rows["text"][part].append(
        {"doc_id": row["doc_id"], "title": record.title, "text": record.text, "cuts": None}
    )
    if first["drop_stage"] is not None and record.cluster is None:
        return
    add_later(tables, part, dict(row), record, first["drop_stage"] is not None)


def add_later(tables: Tables, part: int, row: dict[str, Any], record: Record, dropped_before: bool) -> None:
    """Add a record to dedup and, if it survives there, to clean."""
    stage, _, rule = record.outcome.partition("/")
    members = {"cluster": row["doc_id"] if record.cluster is None else doc_id("cluster", "", record.cluster)}
    members["cluster_size"] = SIZES.get(record.cluster or 0, 1)
    second = row | members | {"survivor": members["cluster"], "drop_stage": None}
    books = tables.books["dedup"][part]
    if dropped_before:
        set_verdict(second, "dedup", Drop("dropped_before"))
    elif stage == "dedup":
        set_verdict(second, "dedup", Drop(rule, 0.9 if rule == "near_duplicate" else 1.0))
    elif members["cluster_size"] > 1:
        books.tally("cluster_sizes", str(members["cluster_size"]))
    books.enter(second, record.chars or 0)
    tables.rows["dedup"][part].append(second)
    if second["drop_stage"] is not None:
        return
    third = row | members | {"drop_stage": None, "text": "…", "num_chars": 900, "num_bytes": 950}
    third["pii_counts"] = list(record.pii.items())
    books = tables.books["clean"][part]
    if stage == "toxicity":
        set_verdict(third, stage, Drop(rule, 0.05, 0.01))
        third["text"] = None
    else:
        for name, value in (("kept_bytes", "web"), ("kept_languages", row["language"])):
            books.tally(name, value, 950 if name == "kept_bytes" else 1)
        for kind, count in record.pii.items():
            books.tally("pii", kind, count)
    books.enter(third, 900)
    tables.rows["clean"][part].append(third)


def commit_table(run: Store, name: str, tables: Tables, digests: dict[str, str]) -> str:
    """Write the parts and the manifest of a table; returns its digest."""
    folder, files, paths = run.child(f"{name}/v-tiny"), [], {}
    figures: dict[str, Any] = {"rounds": 3} if name == "dedup" else {}
    counts = None
    for part, rows in enumerate(tables.rows[name]):
        writer = PartWriter(folder, part_key(part), MAKERS[name])
        for row in rows:
            writer.add(row)
        entry = writer.close()
        paths[entry["key"]] = entry.pop("path")
        files.append(entry)
        answer = tables.books[name][part].to_json()
        if name == "text":
            answer["counts"] = {"rows_in": len(rows), "rows_kept": len(rows)}
        figures = add_figures(figures, answer["figures"]) if name != "text" else {}
        counts = add_figures(counts, answer["counts"]) if counts else answer["counts"]
    sizes = [sum(row["length"] for row in rows) for rows in tables.rows["documents"]]
    inputs = [
        {"name": f"crawl-{part}.warc.gz", "bytes": size, "sha256": f"{part}" * 64} for part, size in enumerate(sizes)
    ]
    reads = {"dedup": ("documents",), "clean": ("documents", "text", "dedup")}.get(name, ())
    content = {
        "table": name,
        "stages": {stage.name: stage.version for stage in STAGES[name]},
        "config": {"toxicity": ToxicityConfig().content(), "pii": PiiConfig().content()} if name == "clean" else {},
        "models": {"toxicity/wordlist_en": "e" * 64} if name == "clean" else {},
        "inputs": [{"name": read, "bytes": 1, "sha256": digests[read]} for read in reads] or inputs,
        "files": files,
        "counts": counts,
        "figures": figures,
    }
    how = {"paths": paths, "started": "2026-01-01T00:00:00+00:00", "wall_seconds": 8.0, "code_version": "0.1.0"}
    manifest = make_manifest(content, how | {"cpu_seconds": 11.0 if name == "documents" else 2.5}, name)
    write_manifest(folder, manifest)
    return manifest.digest


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The whole synthetic run with a plan, 40 training steps and a checkpoint."""
    run = make_run(tmp_path_factory.mktemp("report") / "harbour")
    add_training(run)
    return run


def add_training(run: Store) -> None:
    """What the training half writes, as JSON."""
    dataset = open_table(run, "tokens")[1].digest
    figures = [
        {"name": "params", "value": 1_234_567, "unit": "parameters", "formula": "N = 2·d", "source": "count"},
        {"name": "learning_rate", "value": 0.00123, "unit": "", "formula": "0.3118·C^−0.125", "source": "Bi et al."},
        {"name": "memory.2.states", "value": 2_500_000, "unit": "bytes", "formula": "16·N", "source": "estimate"},
    ]
    run.write_atomic("train/plan.json", canonical_json({"dataset": dataset, "steps": 40, "figures": figures}))
    lines = [
        {"step": k, "loss": 8 - 0.1 * k, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 1, "tokens_per_second": 9.0}
        | ({"heldout_loss": 8.5 - 0.1 * k} if k % 20 == 0 else {})
        for k in range(1, 41)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run.write_atomic("train/metrics.jsonl", (text + '{"step": 41, "lo').encode())
    identity = {"dataset": dataset, "tokenizer": "t" * 64, "settings": {"train.seed": 1}, "skip_list": "s" * 64}
    layout = {"ranks": 2, "micro_batch": 8, "threads": 1, "device": "cpu"}
    note = {"step": 40, "identity": identity, "layout": layout, "files": {"a": 1_000_000, "b": 500_000}}
    run.write_atomic("train/checkpoints/step-000040/checkpoint.json", canonical_json(note))
    run.write_atomic("train/manifest.json", canonical_json({"steps": 40, "loss": 4.0, "heldout_loss": 4.5678}))


@pytest.fixture(scope="module")
def page(run: Store) -> str:
    """The report of that run."""
    path = write_report(run, None)
    assert path == f"{run.uri}/report.html"
    return Path(path).read_text()


def words_of(page: str) -> str:
    """The text that a reader sees, on one line."""
    text = re.sub(r"<(style|title)>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (number, 1234567, "1,234,567"),
        (number, 0.123456, "0.1235"),
        (number, 2.0, "2"),
        (number, 12345.6, "12,346"),
        (number, None, "–"),
        (estimate, 740_123.0, "≈ 740 k"),
        (estimate, None, "–"),
        (short, 999.4, "999"),
        (short, 999.6, "1 k"),
        (short, 4.67e11, "467 G"),
        (percent, 0.0, "0.0 %"),
        (percent, 0.0004, "< 0.1 %"),
        (percent, 0.0005, "0.1 %"),
        (percent, 0.9994, "99.9 %"),
        (percent, 0.9996, "> 99.9 %"),
        (percent, 1.0, "100.0 %"),
        (size, 999, "999 bytes"),
        (size, 1_969_604, "1.97 MB"),
        (size, None, "–"),
        (seconds, 8.04, "8.0 s"),
        (seconds, 99.94, "99.9 s"),
        (seconds, 150, "2 min"),
        (seconds, 3780, "1 h 03 min"),
        (figure_text, Figure("a", 2_500_000, "bytes", "", ""), "2.5 MB"),
        (figure_text, Figure("a", 9.82e11, "FLOPs", "", ""), "982 G"),
        (figure_text, Figure("a", 184_608, "parameters", "", ""), "184,608"),
    ],
)
def test_numbers_are_written_for_readers(function: Any, value: Any, expected: str) -> None:
    assert function(value) == expected


def test_the_funnel_follows_the_documents_from_the_records_to_the_tokens(run: Store) -> None:
    found = levels(collect(run), REASONS)
    assert [(level.name, level.documents, level.chars) for level in found] == [
        ("records", 53, None),
        ("source", 44, 32_000),
        ("extract", 42, 32_000),
        ("language", 37, 31_000),
        ("quality", 30, 30_000),
        ("dedup", 23, 23_000),
        ("toxicity", 20, 20_300),
        ("redaction", 20, 18_000),
        ("tokens", 20, 18_000),
    ]
    tokens = sum(sum(shards) for shards in open_table(run, "tokens")[1].content.figures["streams"].values())
    assert (found[-1].tokens, found[-1].exact) == (tokens, True)
    assert found[-2].tokens == pytest.approx(tokens)
    assert not found[-2].exact
    assert found[4].tokens == pytest.approx(tokens * 30_000 / 18_000)
    assert found[0].tokens is None


def test_every_declared_rule_is_counted_and_explained(run: Store) -> None:
    drops = drops_by_rule(collect(run), REASONS)
    assert list(drops) == ["source", "extract", "language", "quality", "minhash", "dedup", "toxicity", "pii"]
    loud = {row.name: (row.count, row.chars) for rows in drops.values() for row in rows if row.count}
    assert loud == {
        "source/not_a_page": (4, 0),
        "source/http_status": (3, 0),
        "source/unreadable_gap": (2, 0),
        "extract/no_text": (2, 0),
        "language/language_not_wanted": (5, 1000),
        "quality/gopher_short_doc": (6, 600),
        "quality/c4_lorem_ipsum": (1, 400),
        "dedup/exact_duplicate": (4, 4000),
        "dedup/near_duplicate": (3, 3000),
        "toxicity/toxic_word_share": (3, 2700),
    }
    assert all(row.meaning for rows in drops.values() for row in rows)
    assert drops["quality"][0].share == pytest.approx(6 / 53)
    assert {row.rule for row in drops["pii"]} == {"failed", "crashed"}
    assert "dropped_before" not in {row.rule for row in drops["dedup"]}


def test_the_tallies_are_those_of_the_crawl(run: Store) -> None:
    facts = collect(run)
    assert num_pages(facts) == 44
    rows, more = languages(facts)
    assert [(row.code, row.found, row.passed, row.passed_chars, row.clean) for row in rows] == [
        ("en", 32, 25, 25_000, 15),
        ("it", 5, 0, 0, 0),
        ("ja", 5, 5, 5000, 5),
    ]
    assert more == 0
    assert without_wordlist(facts) == 5
    found = clusters(facts)
    assert found is not None
    assert (found.exact, found.near, found.rounds, found.num_clusters, found.largest) == (4, 3, 3, 3, 5)
    assert [(size.label, size.clusters, size.documents) for size in found.sizes] == [
        ("2", 1, 2),
        ("3", 1, 3),
        ("4", 0, 0),
        ("5", 1, 5),
    ]
    assert [stream.name for stream in streams(facts)] == ["web/heldout", "web/train"]
    assert contract(facts)["bytes_per_token"] == 20 * 950 / sum(stream.tokens for stream in streams(facts))
    assert [(count.name, count.number) for count in counts_of({"a": 1, "b": 3})] == [("b", 3), ("a", 1)]


def test_large_clusters_share_columns_of_powers_of_two(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dedup")
    facts = collect(run)
    sizes = facts.tables["dedup"].content.figures["cluster_sizes"]
    sizes |= {"8": 2, "9": 1, "16": 4, "17": 1, "100": 1}
    found = clusters(facts)
    assert found is not None
    assert [(size.label, size.clusters, size.documents) for size in found.sizes[6:]] == [
        ("8", 2, 16),
        ("9–16", 5, 73),
        ("17–32", 1, 17),
        ("33–64", 0, 0),
        ("65–128", 1, 100),
    ]


def test_the_books_meet_from_table_to_table(run: Store) -> None:
    found = {check.claim: (check.left, check.right) for check in checks(collect(run))}
    assert all(left == right for left, right in found.values())
    assert found["bytes of records and gaps = bytes of the inputs"] == (52_000, 52_000)
    assert found["documents kept = documents deduplicated"] == (30, 30)
    assert found["copies kept = documents cleaned"] == (23, 23)
    assert found["clean documents = documents in shards"] == (20, 20)
    assert {"clean read the dedup shown here", "the plan is for this dataset"} < set(found)
    assert "checkpoint of step 40 was trained on this dataset" in found


def test_a_broken_account_is_said_aloud(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "text")
    path = Path(run.uri) / "documents/v-tiny/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["inputs"][0]["bytes"] += 7
    path.write_text(json.dumps(manifest))
    text = words_of(Path(write_report(run, None)).read_text())
    assert "1 of 2 checks do not hold" in text
    assert "7 bytes are unaccounted for" in text


# -------------------------------------------------------------------------------------------------------------- plots


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 5, 10]),
        (0, 100, [0, 50, 100]),
        (1, 160, [50, 100, 150]),
        (5.31, 8.6, [6, 7, 8]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == expected


def test_a_curve_keeps_its_ends_and_shrinks_to_means() -> None:
    assert averaged([(1, 2.0), (2, 4.0), (3, 9.0)], limit=2) == [(1.5, 3.0), (3, 9.0)]
    assert averaged([(1, 2.0), (2, 4.0)], limit=2) == [(1, 2.0), (2, 4.0)]
    assert len(averaged([(x, 1.0) for x in range(100_000)])) <= 400
    plot = line_plot("Loss", "", [("", [(1, 0.0), (2, 50.0), (3, 100.0)], True)])
    (curve,) = plot.curves
    places = [tuple(map(float, point.split(","))) for point in curve.points.split()]
    assert [x for x, _ in places] == [0, 500, 1000]
    assert places[0][1] == plot.inner
    assert places[0][1] > places[1][1] > places[2][1] > 0
    assert [x for x, _ in curve.dots] == [11.0, 55.5, 100.0]
    assert plot.summary == "Loss over steps 1 to 3: loss 0 to 100"


def test_a_flat_curve_and_a_single_step_can_be_drawn() -> None:
    (plot,) = (plot for plot in training_plots([Step(7, 2.5, 1.0, 1e-3, 10.0, None)]) if plot.title == "Loss")
    assert plot.curves[0].points.startswith("0.0,")
    assert training_plots([]) == []


def test_columns_turn_logarithmic_when_one_dwarfs_the_others() -> None:
    even = cluster_plot([SizeClass("2", 50, 100), SizeClass("3", 1, 3)])
    uneven = cluster_plot([SizeClass("2", 51, 102), SizeClass("3", 1, 3)])
    assert even is not None
    assert uneven is not None
    assert cluster_plot([]) is None
    assert (even.is_log, uneven.is_log) == (False, True)
    assert even.columns[1].height == pytest.approx(even.columns[0].height / 50, abs=0.01)
    assert uneven.columns[1].height > uneven.columns[0].height / 10
    assert even.columns[1].note == "1 clusters of 3, 3 documents"


# ------------------------------------------------------------------------------------------------------------ samples


def test_samples_are_those_with_the_smallest_hash(run: Store) -> None:
    drawn = draw_samples(collect(run))
    assert drawn.rows_read == 53
    order = sorted(range(16, 22), key=lambda place: shuffle_key(0, identifier(place)))[:PER_RULE]
    found = [sample.url for sample in drawn.by_rule["quality/gopher_short_doc"]]
    assert found == [f"https://b.example/short/{place - 16}" for place in order]
    assert drawn.by_rule["dedup/near_duplicate"][0].value == pytest.approx(0.9)
    (toxic, *_) = drawn.by_rule["toxicity/toxic_word_share"]
    assert (toxic.limit, toxic.text.startswith("toxicity/toxic_word_share")) == (0.01, True)
    assert "kept" not in drawn.by_rule
    assert "dedup/dropped_before" not in drawn.by_rule
    assert {sample.why_empty for sample in drawn.by_rule["source/http_status"]} == {"no text was extracted"}


def test_samples_are_redacted(run: Store) -> None:
    (sample,) = draw_samples(collect(run)).by_rule["quality/c4_lorem_ipsum"]
    assert ADDRESS not in f"{sample.url} {sample.text} {sample.title}"
    assert sample.text.startswith("Write to <EMAIL> or <script>")
    assert "<EMAIL>" in sample.url


def test_text_that_the_recipe_left_out_is_named_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "documents")
    tables = Tables()
    for place, record in enumerate(crawl()):
        add_record(tables, place, replace(record, text=None))
    commit_table(run, "text", tables, {})
    write_run(run, RunFile(tables={"documents": "v-tiny", "text": "v-tiny"}))
    drawn = draw_samples(collect(run))
    assert {sample.why_empty for sample in drawn.by_rule["quality/gopher_short_doc"]} == {
        "the text was left out of the run, as its recipe says"
    }


def find_names_by(run: Store, pipeline: Path) -> None:
    """Make the run one that looked for names by the spaCy pipeline in a zip file."""
    path = Path(run.uri) / "clean/v-tiny/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["models"]["pii/ner"] = "f" * 64
    path.write_text(json.dumps(manifest))
    write_run(run, RunFile(tables=read_run(run).tables, recipe={"pii": {"ner_model": str(pipeline)}}))


def test_names_are_replaced_where_the_run_looked_for_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    pipeline = spacy.blank("en")
    pipeline.add_pipe("entity_ruler").add_patterns([{"label": "PERSON", "pattern": "Lorem"}])  # type: ignore[attr-defined]
    pipeline.to_disk(tmp_path / "names")
    find_names_by(run, Path(shutil.make_archive(str(tmp_path / "names"), "zip", tmp_path / "names")))
    (sample,) = draw_samples(collect(run)).by_rule["quality/c4_lorem_ipsum"]
    assert sample.text.endswith("by <PERSON>")


def test_without_the_name_finder_of_the_run_no_text_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    find_names_by(run, tmp_path / "lost.zip")
    assert draw_samples(collect(run)).by_rule == {}
    text = words_of(Path(write_report(run, None)).read_text())
    assert "Samples are left out: the pipeline that found names in the run is not where its recipe says" in text


def test_a_sample_is_one_short_line_of_what_can_be_seen() -> None:
    assert plain("a\n\n b\u202ec\x00\ud800") == "a bc"
    assert shortened("x" * SHOWN_CHARS) == "x" * SHOWN_CHARS
    assert shortened("x" * (SHOWN_CHARS + 1)) == "x" * (SHOWN_CHARS - 1) + "…"
    cut = shortened("word " * 100)
    assert cut.endswith("word…")
    assert len(cut) <= SHOWN_CHARS


# -------------------------------------------------------------------------------------------------------------- truth


def truth_line(kind: str, number: int, *rules: str, **details: Any) -> dict[str, Any]:
    """A planted record at the place of a record of the crawl."""
    part, offset = place_of(number)
    line = {"kind": kind, "url": crawl()[number].url or f"https://z.example/{number}", "file": f"crawl-{part}.warc.gz"}
    return line | {"offset": offset, "rules": list(rules), "expected": "drop" if rules else "keep"} | details


def write_truth(path: Path) -> str:
    """A truth file about the crawl: kept pages are records 33 to 52, the exact copies 23 to 26, near ones 27 to 29."""
    copies, rules = ("exact_duplicate", "near_duplicate"), ("gopher_short_doc",)
    lines = [
        truth_line("original", 33, group="one"),
        truth_line("original", 34, group="two"),
        truth_line("exact_text", 23, *copies, group="one", jaccard=1.0),
        truth_line("exact_text", 27, *copies, group="one", jaccard=1.0),
        truth_line("near_80", 28, "near_duplicate", group="two", jaccard=0.8),
        truth_line("near_70", 35, "near_duplicate", group="two", jaccard=0.7, expected="either"),
        truth_line("near_30", 36, group="two", jaccard=0.3),
        truth_line("gopher_short_doc", 16, *rules),
        truth_line("gopher_short_doc", 22, *rules),
        truth_line("toxic", 30, "toxic_word_share"),
        truth_line("language", 52, language="ja", charset="utf-8"),
        truth_line("language", 40, language="fr", charset="shift_jis"),
        truth_line("pii_email", 33, pii={"email": 2, "phone": 2}, values=[["email", "planted@penrose.com"]]),
        truth_line("pii_email", 34, pii={"email": 1}),
        truth_line("record_garbage", 0, "unreadable_gap"),
        truth_line("encoding_br", 41),
        truth_line("no_text", 9, "no_text") | {"file": "elsewhere.warc.gz"},
        truth_line("empty_body", 9, "no_text") | {"file": "elsewhere.warc.gz", "url": "https://z.example/none"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_found_and_planted_for_every_kind(run: Store, tmp_path: Path) -> None:
    scores = score(collect(run), write_truth(tmp_path / "truth.jsonl"))
    found = {row.kind: (row.found, row.planted, row.others) for row in scores}
    lost = "5 gopher_short_doc, 5 language_not_wanted, 3 exact_duplicate, 3 http_status, 2 toxic_word_share"
    lost += ", 1 near_duplicate, 1 no_text"
    assert found == {
        "same text, other layout": (1, 2, "1 near_duplicate"),
        "0.80": (1, 1, ""),
        "0.70": (0, 1, "1 kept"),
        "0.30": (1, 1, ""),
        "gopher_short_doc": (1, 2, "1 c4_lorem_ipsum"),
        "toxic": (1, 1, ""),
        "declared rightly": (2, 2, ""),
        "language ja": (1, 1, ""),
        "language fr": (0, 1, "1 en"),
        "charset utf-8": (1, 1, ""),
        "charset shift_jis": (0, 1, "1 utf-8"),
        "email": (3, 3, "1 more in these pages"),
        "phone": (1, 2, "1 more in these pages"),
        "pii_email": (2, 2, ""),
        "record_garbage": (1, 1, ""),
        "encoding_br": (1, 1, ""),
        "no_text": (1, 1, ""),
        "empty_body": (0, 1, "1 no row"),
        "ordinary pages": (13, 33, lost),
    }
    assert [row.kind for row in scores if not row.judged] == ["0.70"]
    page = Path(write_report(run, str(tmp_path / "truth.jsonl"))).read_text()
    assert "Found and planted" in page
    assert "1 c4_lorem_ipsum" in page
    assert "planted@penrose.com" not in page


def test_a_truth_file_that_is_none_is_refused(run: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: promised a truth file, found nothing"):
        write_report(run, str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "other.json").write_text('{"files": []}\n')
    with pytest.raises(ConfigError, match=r"other\.json: promised one planted record a line, found KeyError"):
        write_report(run, str(tmp_path / "other.json"))


# --------------------------------------------------------------------------------------------------------------- page


def test_the_numbers_appear(run: Store, page: str) -> None:
    text = words_of(page)
    tokens = open_table(run, "tokens")[1]
    total = sum(sum(shards) for shards in tokens.content.figures["streams"].values())
    for expected in (
        f"2 files of 52 kB held 53 records; 20 documents are left, cut into {total:,} tokens. All 11 checks",
        tokens.digest,
        "Pages per CPU second 2.8 16.0 s of CPU in 5 steps",
        "Held-out loss 4.568 after 40 steps",
        "gopher_short_doc too few words 6 11.3 % 600",
        "52,000 bytes in the rows, 52,000 in the files. The account balances.",
        "gap/unreadable_gap 1,000 1.9 %",
        "it 5 0 0 0",
        "email 6 66.7 %",
        "9 values were replaced",
        "5 clean documents are in languages without one",
        "params 1,234,567 parameters N = 2·d count",
        "memory.2.states 2.5 MB",
        "40 of 40 steps were made; the loss of the last one is 4.0000",
        "checkpoint 40 1.5 MB, 2 × cpu, 1 threads each",
    ):
        assert expected in text
    assert 'aria-label="Loss over steps 1 to 40: training 7.9 to 4; held out 6.5 to 4.5"' in page


def test_the_same_run_gives_the_same_report(run: Store, page: str) -> None:
    assert Path(write_report(run, None)).read_text() == page


@pytest.mark.parametrize("until", ["documents", "text", "dedup", "clean"])
def test_a_run_that_is_not_done_has_a_report(tmp_path: Path, until: str) -> None:
    run = make_run(tmp_path / "run", until)
    text = words_of(Path(write_report(run, None)).read_text())
    assert "53 records" in text
    assert ("Deduplication has not run yet." in text) == (until in ("documents", "text"))
    assert ("Toxicity has not been measured yet." in text) == (until != "clean")
    for missing in (
        "no tokenizer yet",
        "No tokens have been written",
        "has not been sized yet",
        "No step has been made",
    ):
        assert missing in text


def test_tables_of_an_earlier_version_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = Path(run.uri) / "dedup/v-tiny/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["inputs"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    facts = collect(run)
    assert (list(facts.tables), facts.stale) == (["documents", "text", "tokenizer", "tokens"], ["dedup", "clean"])
    text = words_of(Path(write_report(run, None)).read_text())
    assert "Left out: dedup, clean, made from other versions of the tables before." in text


def test_an_empty_run_says_so_and_another_folder_is_refused(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    with pytest.raises(ConfigError, match=r"promised a run folder, found no run\.json"):
        write_report(run, None)
    write_run(run, RunFile())
    assert "No table stands yet" in Path(write_report(run, None)).read_text()


def test_a_damaged_plan_or_metrics_file_is_named(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    write_run(run, RunFile())
    run.write_atomic("train/metrics.jsonl", b'{"step": 1}\n')
    with pytest.raises(ContractError, match=r"metrics\.jsonl: promised one step a line, found 'loss'"):
        write_report(run, None)
    run.write_atomic("train/plan.json", b'{"figures": []}')
    with pytest.raises(ContractError, match=r"plan\.json: promised a plan, found 'dataset'"):
        write_report(run, None)


# ------------------------------------------------------------------------------------------------------------- safety


def test_hostile_text_is_escaped(page: str) -> None:
    assert "<script" not in page.lower()
    assert "<img" not in page.lower()
    assert page.count("&lt;script&gt;document.title=&#39;PWNED&#39;&lt;/script&gt;") >= 4  # kind, url, title, text
    assert "&lt;img src=x onerror=" in page
    assert ADDRESS not in page


def test_no_template_or_module_marks_anything_as_safe() -> None:
    files = list((Path(__file__).parents[1] / "pipeline" / "report").glob("*.*"))
    assert {"page.html", "page.py"} < {file.name for file in files}
    marks = re.compile(r"\|\s*safe\b|\bMarkup\b|autoescape\s*(?:=\s*)?[Ff]alse|\bon\w+=|javascript:|https?://|url\(")
    assert [(file.name, hit.group()) for file in files if (hit := marks.search(file.read_text()))] == []


class Outline(HTMLParser):
    """Open elements, ids, links and what each table and drawing says about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag not in ("meta", "col", "br"):
            self.open.append(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        is_inner = tag == "svg" and "svg" in self.open[:-1]
        if tag == "svg" and not is_inner and not ("aria-hidden" in values or values.get("aria-label")):
            self.problems.append("a drawing without a description")
        if tag == "th" and values.get("scope") not in ("col", "row", "rowgroup"):
            self.problems.append("a heading without scope")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")


def test_the_page_is_well_formed_and_described(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert (outline.open, outline.problems) == ([], [])
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.links
    assert {link.removeprefix("#") for link in outline.links} <= set(outline.ids)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page


# ------------------------------------------------------------------------------------------------------------ browser


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[[Path, str], str]:
    """Loads a file in a headless browser with no profile and returns the page as it then stands."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium on the PATH")

    def load(file: Path, profile: str) -> str:
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        switches += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        switches += [f"--user-data-dir={tmp_path / profile}", "--virtual-time-budget=2000", "--dump-dom"]
        done = subprocess.run(
            [program, *switches, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    return load


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A web server on this machine: its address and the paths it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", asked
        httpd.shutdown()


@pytest.mark.browser
def test_a_browser_runs_no_script_and_asks_no_network(
    tmp_path: Path, chromium: Callable[[Path, str], str], server: tuple[str, list[str]]
) -> None:
    address, asked = server
    hostile = f'{SCRIPT}"><img src={address}/pixel onerror="document.title=\'PWNED\'">'
    report = Path(write_report(make_run(tmp_path / "harbour", hostile=hostile), None))
    title = "<title>harbour · Penstock report</title>"
    shown = chromium(report, "escaped")
    assert title in shown
    assert "All 9 checks" in words_of(shown)
    assert asked == []
    # The policy is the second wall: it holds where the escaping is taken away ...
    raw = html.unescape(report.read_text())
    (tmp_path / "raw.html").write_text(raw)
    assert title in chromium(tmp_path / "raw.html", "policy")
    assert asked == []
    # ... and without both the same page does what it was made for, so this test would see it.
    (tmp_path / "bare.html").write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", raw))
    assert "<title>PWNED</title>" in chromium(tmp_path / "bare.html", "bare")
    assert set(asked) == {"/pixel"}
