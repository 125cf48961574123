"""A synthetic run folder of 53 records with known counts, made without Spark; shared by the report's tests.

Lengths are chosen so that every number of the report is different: after cuts a document has nine tenths of its
characters, in the clean table 850.
"""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.dedup.config import AUDIT
from pipeline.engine.parquet import PartWriter
from pipeline.engine.part import DropCounter, set_verdict
from pipeline.engine.rules import COARSE, count_bins
from pipeline.engine.stage import Drop, PerDocument, Relation
from pipeline.engine.step import add_figures
from pipeline.perplexity.paragraphs import PARAGRAPHS
from pipeline.pii.stage import PiiConfig
from pipeline.sources.provenance import domain_of
from pipeline.sources.source import COMMON_REASONS
from pipeline.stages import STEPS, all_stages
from pipeline.templates.stage import TEMPLATES
from pipeline.toxicity.stage import ToxicityConfig
from schemas.ids import canonical_json, doc_id
from schemas.manifest import RunFile, make_manifest, open_table, part_key, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.tables import TABLES
from tests.support.report_audit import FIGURES, NOTES
from tests.support.tiny_dataset import make_tiny_dataset

SCRIPT = "<script>document.title='PWNED'</script>"
IMAGE = '"><img src=x onerror="document.title=\'PWNED\'">'
ADDRESS = "jane.roe@penrose.com"
MAKERS = {
    name: TABLES[name].schema for name in ("documents", "text", "verdicts", "clusters", "dedup", "audit", "clean")
}
READS = {
    "verdicts": ("documents",),
    "clusters": ("documents", "text"),
    "dedup": ("documents", "verdicts", "clusters"),
    "audit": ("documents", "text", "clusters", "dedup"),
    "clean": ("documents", "text", "dedup"),
}
WITHOUT_BOOKS = ("text", "clusters", "audit")
"""Tables of steps that drop nothing."""
STAGES = {
    # the recipe cuts neither templates nor paragraphs
    name: tuple(stage for stage in step.stages if stage not in (TEMPLATES, PARAGRAPHS))
    for step in STEPS
    for name in step.writes
    if name in MAKERS
} | {"audit": (AUDIT,)}
MEASURED = [stage for stage in STAGES["verdicts"] if isinstance(stage, PerDocument)]
VERDICTS = {f"{stage.name}/{reason}" for stage in MEASURED for reason in stage.verdicts}
REASONS = {stage.name: {**stage.reasons, **getattr(stage, "verdicts", {})} for stage in all_stages()}
REASONS["source"] = COMMON_REASONS
PARTS = 2
COPIES: dict[str, list[int | None]] = {
    "dedup/exact_duplicate": [1, 1, 1, 1],
    "dedup/near_duplicate": [2, 2, 3],
    "toxicity/toxic_word_share": [None] * 3,
    "kept": [1, 2, 3, *[None] * 17],
}
"""Cluster of each page that passes the quality rules, by its verdict: one cluster of 5, one of 3, one of 2 pages."""
SIZES = {1: 5, 2: 3, 3: 2}
CLEAN_CHARS, CLEAN_BYTES = 850, 950
LIMITS = {"quality": (4.0, 50.0), "toxicity": (0.05, 0.01)}
"""Value and limit of the verdicts of a stage."""


@dataclass
class Tables:
    """Rows and drop counts of the tables while they are written, part by part."""

    rows: dict[str, list[list[dict[str, Any]]]] = field(
        default_factory=lambda: {name: [[] for _ in range(PARTS)] for name in MAKERS}
    )
    books: dict[str, list[DropCounter]] = field(
        default_factory=lambda: {name: [books_of(name) for _ in range(PARTS)] for name in MAKERS}
    )
    survivors: dict[int, bytes] = field(default_factory=dict)
    """Id of the kept document of each cluster."""


def books_of(name: str) -> DropCounter:
    """Return empty drop counts for a part of a table, as the pipeline steps create them."""
    if name == "verdicts":
        return DropCounter([(stage.name, stage.verdicts) for stage in MEASURED], raises=False)
    stages = [stage for stage in STAGES[name] if name == "dedup" or not isinstance(stage, Relation)]
    return DropCounter([(stage.name, COMMON_REASONS if stage.name == "source" else stage.reasons) for stage in stages])


@dataclass(frozen=True)
class Record:
    """One record of the synthetic crawl, and its verdict."""

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
    cuts: tuple[tuple[int, int], ...] | None = None
    meta: str | None = None

    @property
    def body_chars(self) -> int:
        """Characters after cuts."""
        return (self.chars or 0) * 9 // 10


def crawl(hostile: str = SCRIPT + IMAGE) -> list[Record]:
    """Return 53 records: 2 gaps, 7 no page, 2 without text, 5 Italian, 7 of low quality, 7 copies, 3 toxic, 20 kept."""
    records = [Record("source/unreadable_gap", "gap", length=700), Record("source/unreadable_gap", "gap", length=300)]
    records += [Record("source/not_a_page", "warcinfo")] * 2 + [Record("source/not_a_page", hostile)] * 2
    records += [Record("source/http_status", url=f"https://a.example/lost/{n}") for n in range(3)]
    records += [Record("extract/no_text", url=f"https://a.example/empty/{n}") for n in range(2)]
    italian = Record("language/language_not_wanted", text="Questa pagina parla del porto.", language="it", chars=200)
    records += [replace(italian, url=f"https://b.example/it/{n}") for n in range(5)]
    short = Record("quality/gopher_short_doc", text="Short.", language="en", chars=100)
    records += [replace(short, url=f"https://b.example/short/{n}") for n in range(6)]
    # a page of a cluster whose other pages are kept: it is in the cluster although a rule dropped it
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


def make_run(
    folder: Path,
    until: str = "tokens",
    records: Sequence[Record] | None = None,
    figures: Mapping[str, Mapping[str, Any]] | None = None,
) -> Store:
    """Write a run folder of the synthetic crawl with the tables up to `until`, and with further `figures`."""
    names = (*MAKERS, "tokens")
    names = names[: names.index(until) + 1]
    run = make_tiny_dataset(folder, {"web": 20}) if "tokens" in names else Store(str(folder))
    tables, records = Tables(), crawl() if records is None else records
    tables.survivors = {r.cluster: identifier(n) for n, r in enumerate(records) if r.cluster and r.outcome == "kept"}
    for number, record in enumerate(records):
        add_record(tables, number, record)
    digests: dict[str, str] = {}
    for name in names:
        if name in MAKERS:
            digests[name] = commit_table(run, name, tables, digests, (figures or {}).get(name, {}))
    pointers = read_run(run).tables | dict.fromkeys(digests, "v-0000000071a9")
    write_run(run, RunFile(tables=pointers, recipe={}))
    return run


def place_of(number: int) -> tuple[int, int]:
    """Return part and byte offset of a record."""
    return number % PARTS, 1000 * (number // PARTS)


def identifier(number: int) -> bytes:
    """Return the doc_id of a record."""
    part, offset = place_of(number)
    return doc_id("web", f"crawl-{part}.warc.gz", offset)


def add_record(tables: Tables, number: int, record: Record) -> None:
    """Add a record to every table that it reaches, as the pipeline steps do."""
    part, offset = place_of(number)
    stage, _, rule = record.outcome.partition("/")
    row: dict[str, Any] = {"doc_id": identifier(number), "source": "web", "split": f"crawl-{part}.warc.gz"}
    row |= {"offset": offset, "length": record.length, "url": record.url}
    row["domain"] = domain_of(record.url) if record.url else None
    row |= {"date": datetime(2026, 1, 1, tzinfo=UTC), "language": record.language}
    row["meta"] = record.meta
    first = dict(row, record_type=record.kind, num_chars=record.chars, drop_stage=None)
    first["charset"] = "utf-8" if record.chars else None
    if record.outcome != "kept" and stage != "dedup" and record.outcome not in VERDICTS:
        set_verdict(first, stage, Drop(rule))
    if first["drop_stage"] is None:
        first["body_chars"] = record.body_chars
        add_verdict(tables, part, row, record)
    books = tables.books["documents"][part]
    books.enter(first, record.chars or 0)
    books.tally("record_types", record.kind)
    books.tally("stored_bytes", f"gap/{rule}" if record.kind == "gap" else "records", record.length)
    if record.language:
        books.tally("languages", record.language)
        books.tally("charsets", "utf-8")
    tables.rows["documents"][part].append(first)
    tables.rows["text"][part].append(
        {
            "doc_id": row["doc_id"],
            "title": record.title,
            "text": record.text,
            "cuts": record.cuts and [{"start": start, "end": end} for start, end in record.cuts],
        }
    )


def add_verdict(tables: Tables, part: int, row: dict[str, Any], record: Record) -> None:
    """Add the verdict of a measured record, and add the record to later tables."""
    stage, _, rule = record.outcome.partition("/")
    verdict = {"doc_id": row["doc_id"], "perplexity_bucket": "all", "drop_stage": None}
    if record.outcome in VERDICTS:
        set_verdict(verdict, stage, Drop(rule, *LIMITS[stage]))
    books = tables.books["verdicts"][part]
    books.enter(verdict, record.body_chars)
    if verdict["drop_stage"] is None:
        books.tally("kept_languages", record.language or "?")
        books.tally("kept_language_chars", record.language or "?", record.body_chars)
    tables.rows["verdicts"][part].append(verdict)
    add_later(tables, part, dict(row), record)


def add_later(tables: Tables, part: int, row: dict[str, Any], record: Record) -> None:
    """Add a record to dedup and, if it survives, to clean."""
    stage, _, rule = record.outcome.partition("/")
    members = {"cluster": row["doc_id"] if record.cluster is None else doc_id("cluster", "", record.cluster)}
    tables.rows["clusters"][part].append({"doc_id": row["doc_id"], "cluster": members["cluster"]})
    members["cluster_size"] = SIZES.get(record.cluster or 0, 1)
    survivor = row["doc_id"] if record.cluster is None else tables.survivors.get(record.cluster)
    second = row | members | {"survivor": survivor, "drop_stage": None}
    books = tables.books["dedup"][part]
    if record.outcome in VERDICTS:
        set_verdict(second, "dedup", Drop("dropped_before"))
    elif stage == "dedup":
        set_verdict(second, "dedup", Drop(rule, 0.9 if rule == "near_duplicate" else 1.0))
    elif members["cluster_size"] > 1:
        books.tally("cluster_sizes", str(members["cluster_size"]))
    books.enter(second, record.body_chars)
    tables.rows["dedup"][part].append(second)
    if second["drop_stage"] is not None:
        return
    third = row | members | {"drop_stage": None, "text": "…", "num_chars": CLEAN_CHARS, "num_bytes": CLEAN_BYTES}
    third["pii_counts"] = dict(record.pii)
    third["title"] = record.title
    books = tables.books["clean"][part]
    books.tally("kept_bytes", "web", CLEAN_BYTES)
    books.tally("kept_languages", row["language"])
    for kind, count in record.pii.items():
        books.tally("pii", kind, count)
        books.tally("pii_languages", row["language"], count)
        books.tally("pii_sources", "web", count)
    if record.pii:
        books.tally("pii_documents", "web")
    books.tally("kept_documents", "web")
    if row["language"] == "ja":
        books.tally("names_kept", "ja")
    books.enter(third, CLEAN_CHARS)
    tables.rows["clean"][part].append(third)


def commit_table(run: Store, name: str, tables: Tables, digests: Mapping[str, str], extra: Mapping[str, Any]) -> str:
    """Write the parts and the manifest of a table, and return its digest."""
    folder, files, paths = run.child(f"{name}/v-0000000071a9"), [], {}
    figures: dict[str, Any] = {}
    counts = None
    for part, rows in enumerate(tables.rows[name]):
        with PartWriter(folder, part_key(part), MAKERS[name]) as writer:
            for row in rows:
                writer.add(row)
        entry = writer.written.to_json()
        paths[entry["key"]] = entry.pop("path")
        files.append(entry)
        counted = tables.books[name][part].counts.model_dump()
        if name in WITHOUT_BOOKS:
            counted = {"rows_in": len(rows), "rows_kept": len(rows)}
        else:
            figures = add_figures(figures, tables.books[name][part].figures)
        counts = add_figures(counts, counted) if counts else counted
    sizes = [sum(row["length"] for row in rows) for rows in tables.rows["documents"]]
    inputs = [
        {"name": f"crawl-{part}.warc.gz", "bytes": size, "sha256": f"{part}" * 64} for part, size in enumerate(sizes)
    ]
    toxicity = ToxicityConfig()
    configs = {
        "documents": {
            "toxicity": toxicity.content(),
        },
        "verdicts": {"toxicity": toxicity.decisions()},
        "clean": {"pii": PiiConfig().content()},
    }
    content = {
        "table": name,
        "stages": {stage.name: stage.version for stage in STAGES[name]},
        "config": configs.get(name, {}),
        "models": {"toxicity/wordlist_en": "e" * 64} if name == "documents" else {},
        "inputs": [{"name": read, "bytes": 1, "sha256": digests[read]} for read in READS.get(name, ())] or inputs,
        "files": files,
        "counts": counts,
        "figures": figures | FIGURES.get(name, {}) | dict(extra),
    }
    how = {"paths": paths, "started": "2026-01-01T00:00:00+00:00", "wall_seconds": 8.0, "code_version": "0.1.0"}
    how |= {"cpu_seconds": 11.0 if name == "documents" else 2.5, "notes": NOTES.get(name, {})}
    manifest = make_manifest(content, how, name)
    write_manifest(folder, manifest)
    return manifest.digest


def bins(values: Iterable[float]) -> dict[str, int]:
    """Return the coarse bins of some values, as a manifest holds them."""
    return {str(key): count for key, count in count_bins(np.array(list(values), np.float64), COARSE).items()}


def limit(setting: str, column: str, **limits: float) -> dict[str, Any]:
    """Return the manifest entry of a check; `every` means all languages without a limit of their own."""
    named = {("*" if language == "every" else language): value for language, value in limits.items()}
    side = setting.rpartition(".")[2][:3]
    return {"setting": setting, "column": column, "side": side, "limits": named}


def judged() -> dict[str, Any]:
    """Return the figures of the manifest of `verdicts` for four checks of the synthetic crawl."""
    words = {"en": bins([4] * 6 + [300] * 26), "ja": bins([120] * 5)}
    shares = {"en": bins([0.0] * 28 + [0.004, 0.05, 0.05, 0.05])}
    return {
        "limits": {
            "quality/gopher_short_doc": limit("quality.min_words", "gopher_num_words", every=50, ja=30),
            "quality/gopher_long_doc": limit("quality.max_words", "gopher_num_words", every=100_000),
            "quality/c4_lorem_ipsum": limit("quality.max_lorem_ipsum", "c4_lorem_ipsum", every=0, en=0),
            "toxicity/toxic_word_share": limit("toxicity.max_word_share", "toxic_word_share", every=0.01),
        },
        "distributions": {
            "quality/gopher_short_doc": words,
            "quality/gopher_long_doc": words,
            "quality/c4_lorem_ipsum": {"en": bins([0] * 31 + [2]), "ja": bins([0] * 5)},
            "toxicity/toxic_word_share": shares,
        },
        "beyond": {
            "quality/gopher_short_doc": {"en": 6},
            "quality/gopher_long_doc": {},
            "quality/c4_lorem_ipsum": {"en": 1},
            "toxicity/toxic_word_share": {"en": 3},
        },
    }


def add_training(run: Store) -> None:
    """Write the JSON files of training: 40 steps of two sources, of which the seventh was skipped."""
    dataset = open_table(run, "tokens")[1].digest
    figures = [
        {"name": "params", "value": 1_234_567, "unit": "parameters", "formula": "N = 2·d", "source": "count"},
        {"name": "learning_rate", "value": 0.00123, "unit": "", "formula": "0.3118·C^−0.125", "source": "Bi et al."},
        {"name": "memory.2.states", "value": 2_500_000, "unit": "bytes", "formula": "16·N", "source": "estimate"},
    ]
    stages = [{"first_step": 0, "num_steps": 30}, {"first_step": 30, "num_steps": 10}]
    plan = {"dataset": dataset, "stages": stages, "settings": {"train": {"steps": 40}}, "figures": figures}
    plan["order"] = "o" * 64
    run.write_atomic("train/plan.json", canonical_json(plan))
    text = "".join(json.dumps(metrics_line(step)) + "\n" for step in range(1, 41))
    run.write_atomic("train/metrics.jsonl", (text + '{"step": 41, "lo').encode())
    text = "".join(json.dumps(event) + "\n" for event in events())
    run.write_atomic("train/events.jsonl", (text + '{"kind": "spi').encode())
    identity = {"dataset": dataset, "tokenizer": "t" * 64, "order": "o" * 64, "skip_list": "s" * 64}
    identity["settings"] = {"train.seed": 1}
    layout = {"ranks": 2, "axes": {"shard": 2, "tensor": 1}, "settings": {}, "threads": 1, "device": "cpu"}
    files = {name: {"size": size, "sha256": "f" * 64} for name, size in (("a", 1_000_000), ("b", 500_000))}
    note = {"step": 40, "identity": identity, "layout": layout, "files": files}
    run.write_atomic("train/checkpoints/step-000040/checkpoint.json", canonical_json(note))
    run.write_atomic("train/manifest.json", canonical_json({"steps": 40, "loss": 4.0, "heldout_loss": 4.5678}))


def metrics_line(step: int) -> dict[str, Any]:
    """Return one step: `web` has three times the tokens of `books` and a loss that is 0.4 lower."""
    line: dict[str, Any] = {"step": step, "learning_rate": 1e-3, "tokens": 80, "tokens_per_second": 9.0}
    line |= {"step_seconds": 2.0, "data_seconds": 0.05, "bytes_sent": 1_000, "bytes_plain": 50_000}
    line |= {"source_tokens": {"web": 60, "books": 20}}
    if step == 7:
        return line | {"skipped": True, "loss": None, "grad_norm": None}
    loss = 8 - 0.1 * step
    line |= {"loss": loss, "grad_norm": 1.0, "losses": {"web": loss - 0.1, "books": loss + 0.3}}
    if step % 20 == 0:
        line |= {"heldout_loss": loss + 0.5, "checkpoint_stall": 0.25}
        line["heldout"] = {"web": {"loss": loss + 0.45, "perplexity": 85.6, "bits_per_byte": None}}
    return line


def events() -> list[dict[str, Any]]:
    """Return the events of those steps, including hostile text."""
    documents = [{"url": url, "doc_id": "d" * 32} for url in ("https://a.example/1", SCRIPT, SCRIPT, "")]
    level = {"loss": 7.25, "mean": 6.5, "deviation": 0.1, "limit": 7.1}
    before = {"ranks": 4, "axes": {"shard": 4}, "device": "cpu"}
    rows: list[dict[str, Any]] = [
        {"kind": "skipped", "step": 7, "loss": None, "grad_norm": None, "loss_scale": 65536.0},
        {"kind": "spike", "step": 12, **level, "documents": documents},
        {"kind": "undone", "step": 11, "metrics": {}},
        {"kind": "rewound", "step": 12, "to_step": 10, "checkpoint": "step-000010", "samples": list(range(8))},
        {"kind": "failed_save", "step": 15, "error": "No space left on device"},
        {"kind": "interrupted", "step": 20, "signal": "SIGTERM", "checkpoint": "train/checkpoints/step-000020"},
        {"kind": "resumed", "step": 20, "checkpoint": "step-000020", "layout": RESUMED, "layout_before": before},
        {"kind": "resumed", "step": 30, "checkpoint": "step-000030", "layout": RESUMED, "layout_before": RESUMED},
        {"kind": "early_stop", "step": 40, "heldout_loss": 4.5, "best": 4.25, "since_best": 3},
        {"kind": "stopped", "step": 40, "reason": "4 steps in a row"},
    ]
    return [event | {"at": "2026-01-02T03:04:05.678+00:00"} for event in rows]


RESUMED = {"ranks": 2, "axes": {"shard": 2}, "device": "cpu"}


def whole_run(folder: Path) -> Store:
    """Return the synthetic run with histograms, a plan, 40 training steps and a checkpoint."""
    run = make_run(folder, figures={"verdicts": judged()})
    add_training(run)
    return run


def words_of(page: str) -> str:
    """Return the visible text of a page on one line."""
    text = re.sub(r"<(style|title|script)>.*?</\1>", " ", page, flags=re.DOTALL).replace("<wbr>", "")
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())
