"""A run of 48 documents with real signals, verdicts and clean texts, made without Spark, for the tests of `browse`.

Signals, verdicts and clean texts come from the stages themselves; only clusters and survivors are written by hand.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq

from jobs.recipe import recipe_sections
from pipeline.engine.parquet import PartWriter
from pipeline.engine.part import DropCounter, set_verdict
from pipeline.engine.stage import Drop, PerDocument
from pipeline.engine.worker import FusedStages
from pipeline.quality.stage import QUALITY
from pipeline.stages import DOCUMENT_COLUMNS, STEPS
from pipeline.toxicity.stage import TOXICITY
from schemas.config import Recipe, build_recipe
from schemas.ids import doc_id
from schemas.manifest import RunFile, make_manifest, open_table, part_key, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.tables import CLUSTERS, DEDUP, TEXT
from tests.support.step_run import add_step

PARTS = 2
PAGES = 48
SCRIPT = "<script>document.title='PWNED'</script>"
IMAGE = "<img src=x onerror=\"document.title='PWNED'\">"
ADDRESS = "jane.roe@penrose.com"
# fmt: off
WORDS = (
    "the", "of", "and", "to", "have", "with", "that", "be", "harbour", "signal",
    "river", "engine", "copper", "valley", "market", "museum", "orchard", "window", "granite", "paper",
    "garden", "lantern", "bridge", "station", "compass", "thunder", "canvas", "meadow", "pepper", "silver",
    "cotton", "marble", "walnut", "falcon", "teacher", "sailor", "winter", "summer", "morning", "evening",
    "letter", "number", "figure", "method", "result", "simple", "narrow", "gentle", "bright", "carries",
    "measures", "follows", "reaches", "builds", "covers", "remains", "becomes", "travels", "records", "answers",
    "collects", "gathers",
)
# fmt: on
HOSTILE, CUT, PERSONAL, ORIGINAL, COPY, LATIN, NO_TEXT = 0, 2, 3, 4, 5, 6, 7
"""Numbers of the documents with a property of their own."""
SHORT_WORDS = range(8, 20)
"""Numbers of documents with 30 to 41 words, fewer than `quality.min_words`."""
RECIPE: dict[str, Any] = {"source": {"paths": ["crawl-*.warc.gz"]}}


def sentences(seed: int, words: int, per_line: int = 10) -> str:
    """Return a text of so many words that passes every other default rule."""
    draw = Random(seed)
    chosen = ["the", "of", *(draw.choice(WORDS) for _ in range(words - 2))]  # two stop words
    lines = [" ".join(chosen[at : at + per_line]).capitalize() + "." for at in range(0, words, per_line)]
    return "\n".join(lines)


LINES = {
    HOSTILE: [f"Here is {IMAGE} in a sentence of six words.", f"{SCRIPT} runs here as a text."],
    CUT: ["Please enable javascript in your browser to see this page.", "This closing line ends the page."],
    PERSONAL: [f"Please write a letter to {ADDRESS} before the end of winter."],
    ORIGINAL: ["The market and the harbour have a letter to the signal."],
    COPY: ["The market and the haven have a letter to the stream."],
    LATIN: ["The words lorem ipsum are in this line of the page."],
}
"""Last lines of the text of some documents."""


def page(number: int) -> tuple[str, str | None]:
    """Return the title and text of a document."""
    if number == NO_TEXT:
        return f"Page {number}", None
    title = f"{SCRIPT} hostile" if number == HOSTILE else f"Page {number}"
    if number in SHORT_WORDS:
        return title, sentences(number, 22 + number, 6)
    start = sentences(ORIGINAL if number == COPY else number, 80)
    return title, "\n".join([start, *LINES.get(number, ())])


def identifier(number: int) -> bytes:
    """Return the doc_id of a document."""
    return doc_id("web", f"crawl-{number % PARTS}.warc.gz", 1000 * (number // PARTS))


def make_browse_run(folder: Path, until: str = "clean") -> Store:
    """Write the run with the tables up to `verdicts` or `clean`, and return it."""
    run = Store(str(folder))
    recipe = build_recipe(RECIPE, recipe_sections(), "test")
    models = {"toxicity": TOXICITY.models(recipe["toxicity"])}
    measure = FusedStages((QUALITY, TOXICITY), recipe, models)
    rows: list[list[dict[str, Any]]] = [[] for _ in range(PARTS)]
    for number in range(PAGES):
        rows[number % PARTS].append(_measured(number, measure))
    stages = [*(stage for stage in STEPS[0].stages if isinstance(stage, PerDocument)), STEPS[0].stages[0]]
    books = DropCounter([(stage.name, stage.reasons) for stage in stages])
    for part in rows:
        for row in part:
            books.enter(row, row.get("num_chars") or 0)
            books.tally("languages", "en")
    counts, figures = books.counts.model_dump(), books.figures
    _commit(run, "documents", rows, DOCUMENT_COLUMNS, {"counts": counts, "figures": figures, "recipe": recipe})
    _commit(run, "text", rows, TEXT, {"counts": {"rows_in": PAGES, "rows_kept": PAGES}})
    write_run(run, RunFile(tables={"documents": "v-0000000071a9", "text": "v-0000000071a9"}, recipe=recipe.to_json()))
    add_step(run, "verdicts", {})
    if until == "clean":
        _add_clusters(run, rows)
        add_step(run, "clean", {})
    return run


def _measured(number: int, measure: FusedStages) -> dict[str, Any]:
    title, text = page(number)
    row: dict[str, Any] = {"doc_id": identifier(number), "source": "web", "split": f"crawl-{number % PARTS}.warc.gz"}
    row |= {"offset": 1000 * (number // PARTS), "length": 1000, "url": f"https://c.example/{number}"}
    row |= {"domain": "c.example", "date": datetime(2026, 1, 1, tzinfo=UTC), "record_type": "response"}
    row |= {"title": title, "text": text, "language": "en", "drop_stage": None}
    if text is None:
        set_verdict(row, "extract", Drop("no_text"))
        return row | {"language": None}
    row["num_chars"] = len(text)
    measured = measure(row)
    return {name: value for name, value in measured.items() if name[0] != "_"} | {"body_chars": len(measured["_body"])}


def _commit(run: Store, table: str, rows: Sequence[Sequence[Mapping[str, Any]]], schema: Any, facts: Any) -> None:
    folder, files, paths = run.child(f"{table}/v-0000000071a9"), [], {}
    for part, some in enumerate(rows):
        with PartWriter(folder, part_key(part), schema) as writer:
            for row in some:
                writer.add(dict(row))
        entry = writer.written.to_json()
        paths[entry["key"]] = entry.pop("path")
        files.append(entry)
    recipe: Recipe | None = facts.get("recipe")
    config = {"quality": recipe["quality"].content()} if recipe else {}
    reads = facts.get("reads", ())
    inputs = [{"name": name, "bytes": 1, "sha256": open_table(run, name)[1].digest} for name in reads]
    if not reads:
        inputs = [{"name": f"crawl-{part}.warc.gz", "bytes": 24_000, "sha256": f"{part}" * 64} for part in range(PARTS)]
    content = {"table": table, "stages": {}, "config": config, "inputs": inputs, "files": files}
    content |= {"counts": facts["counts"], "figures": facts.get("figures", {})}
    how = {"paths": paths, "started": "2026-01-01T00:00:00+00:00", "wall_seconds": 1.0, "cpu_seconds": 1.0}
    lineage = {name: read_run(run).tables[name] for name in reads}
    write_manifest(folder, make_manifest(content, how | {"code_version": "0.1.0", "lineage": lineage}, table))


def _add_clusters(run: Store, rows: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Write `clusters` and `dedup`: COPY is a near copy of ORIGINAL, and every other document is alone."""
    pair = {identifier(ORIGINAL), identifier(COPY)}
    clusters: list[list[dict[str, Any]]] = [[] for _ in range(PARTS)]
    dedup: list[list[dict[str, Any]]] = [[] for _ in range(PARTS)]
    books = DropCounter([("dedup", {"exact_duplicate": "", "near_duplicate": "", "dropped_before": ""})])
    verdicts = _stored_verdicts(run)
    for part, some in enumerate(rows):
        for row in (row for row in some if row["drop_stage"] is None):
            own = row["doc_id"]
            joined = own in pair
            shared = {"doc_id": own, "cluster": min(pair) if joined else own, "similarity": 0.9 if joined else None}
            clusters[part].append(shared | {"leader": (pair - {own}).pop() if joined else None})
            final = shared | {"cluster_size": 2 if joined else 1, "weight": 1, "drop_stage": None}
            final["survivor"] = identifier(ORIGINAL) if joined else own
            if verdicts[own]:
                set_verdict(final, "dedup", Drop("dropped_before"))
            elif own == identifier(COPY):
                set_verdict(final, "dedup", Drop("near_duplicate", 0.9))
            books.enter(final, row["body_chars"])
            dedup[part].append(final)
    measured = sum(map(len, clusters))
    reads = ("documents", "verdicts")
    counts = {"rows_in": measured, "rows_kept": measured}
    _commit(run, "clusters", clusters, CLUSTERS, {"counts": counts, "reads": ("documents",)})
    write_run(run, RunFile(tables=read_run(run).tables | {"clusters": "v-0000000071a9"}, recipe=read_run(run).recipe))
    _commit(run, "dedup", dedup, DEDUP, {"counts": books.counts.model_dump(), "reads": (*reads, "clusters")})
    write_run(run, RunFile(tables=read_run(run).tables | {"dedup": "v-0000000071a9"}, recipe=read_run(run).recipe))


def _stored_verdicts(run: Store) -> dict[bytes, str | None]:
    folder, manifest = open_table(run, "verdicts")
    rows = [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]
    return {row["doc_id"]: row["drop_rule"] for row in rows}
