"""The report of a run: a single self-contained HTML file without scripts or network requests.

All values pass through the escaping of the templates, since text comes from the web; none is ever marked as safe.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.report import facts as numbers
from pipeline.report.charts import training_plots
from pipeline.report.dedup import deduplication
from pipeline.report.facts import PlanFigure, RunFacts, collect_facts
from pipeline.report.funnel import checks, drops_by_rule, funnel_rows
from pipeline.report.ground_truth import Score, score
from pipeline.report.lineage import lineage_drawing
from pipeline.report.losses import SHOWN_VERDICTS, ablations, by_source, describe_events, waiting
from pipeline.report.samples import draw_samples
from pipeline.report.signals import STAGES_WITH_SECTION, bucket_chart, buckets, charts
from pipeline.report.tallies import (
    canaries,
    contract,
    costs,
    describe_buckets,
    evaluation_sets,
    languages,
    mix_shares,
    num_pages,
    ranked_counts,
    streams,
    without_wordlist,
    wordlists,
)
from pipeline.stages import declared_reasons
from schemas.storage import Store
from schemas.text import format_bytes, format_duration, format_short

REPORT_NAME = "report.html"
MAX_INPUTS = 12
MAX_SHARDS = 40
"""Maximum number of input files that are listed, and of shards of each stream."""
MAX_EVENTS = 12
"""Number of training events that are visible; the others are in a section to expand."""
MAX_MIXTURES = 12
"""Maximum number of pairs of languages in mixed texts that are listed."""
HEADLINE = {
    "params": "Parameters",
    "tokens": "Training tokens",
    "steps": "Steps",
    "batch_tokens": "Tokens per step",
    "learning_rate": "Peak learning rate",
    "compute": "Compute",
}
"""Figures of the plan that are shown as tiles, with their labels."""
MEMORY = "memory."
"""Prefix of the plan's figures that are in a section to expand: a few for each number of ranks."""


def write_report(run: Store, truth: str | None) -> str:
    """Write the report of a run and return its path; `truth` is the truth file of a demo crawl, or None.

    Raises ConfigError if the folder is not a run folder or the truth file is missing.
    """
    facts = collect_facts(run)
    scores = score(facts, truth) if truth is not None else []
    page = _environment().get_template("page.html").render(_view(facts, scores))
    run.write_atomic(REPORT_NAME, page.encode("utf-8", "replace"))
    return f"{run.uri}/{REPORT_NAME}"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "estimate", "brief", "percent", "digest"):
        environment.filters[name] = getattr(numbers, name)
    environment.filters |= {"short": format_short, "size": format_bytes, "seconds": format_duration}
    environment.filters["figure"] = figure_text
    return environment


def _view(facts: RunFacts, scores: Sequence[Score]) -> dict[str, Any]:
    """Return the variables of the page's templates, by name."""
    reasons = declared_reasons(facts.tables)
    drops = drops_by_rule(facts, reasons)
    drawn = charts(facts, drops)
    documents = facts.figures("documents")
    training = facts.training
    figures = training.plan.figures if training.plan else ()
    named = {figure.name: figure for figure in figures}
    steps = costs(facts)
    return {
        "name": facts.run.uri.rstrip("/").rpartition("/")[2],
        "facts": facts,
        "tables": facts.tables,
        "levels": funnel_rows(facts, reasons),
        "drops": drops,
        "charts": drawn,
        "drawn_rules": {chart.counted_as: chart.anchor for rows in drawn.values() for chart in rows},
        "own_section": STAGES_WITH_SECTION,
        "buckets": buckets(facts),
        "bucket_chart": bucket_chart(facts),
        "evaluation_sets": evaluation_sets(facts),
        "canaries": canaries(facts),
        "mixtures": ranked_counts(documents.get("mixed_languages", {})),
        "max_mixtures": MAX_MIXTURES,
        "samples": draw_samples(facts),
        "checks": checks(facts),
        "stored": ranked_counts(documents.get("stored_bytes", {})),
        "record_types": ranked_counts(documents.get("record_types", {})),
        "languages": languages(facts),
        "charsets": ranked_counts(documents.get("charsets", {})),
        "dedup": deduplication(facts),
        "toxicity": facts.settings("toxicity"),
        "wordlists": wordlists(facts),
        "without_wordlist": without_wordlist(facts),
        "classifier": "classifier" in facts.models("toxicity"),
        "pii": ranked_counts(facts.figures("clean").get("pii", {})),
        "contract": contract(facts),
        "streams": streams(facts),
        "buckets_text": describe_buckets(facts),
        "mix_shares": mix_shares(facts),
        "costs": steps,
        "cpu_seconds": sum(cost.cpu_seconds for cost in steps),
        "num_pages": num_pages(facts),
        "headline": [(label, named[name]) for name, label in HEADLINE.items() if name in named],
        "figures": [figure for figure in figures if not figure.name.startswith(MEMORY)],
        "memory": [figure for figure in figures if figure.name.startswith(MEMORY)],
        "training": training,
        "plots": training_plots(training.steps),
        "by_source": by_source(training.steps),
        "waiting": waiting(training.steps),
        "events": describe_events(training.events),
        "max_events": MAX_EVENTS,
        "ablations": ablations(facts.run, facts.tables["tokens"].digest if "tokens" in facts.tables else None),
        "shown_verdicts": SHOWN_VERDICTS,
        "scores": _by_group(scores),
        "lineage": lineage_drawing(facts.run),
        "max_inputs": MAX_INPUTS,
        "max_shards": MAX_SHARDS,
    }


def _by_group(scores: Sequence[Score]) -> dict[str, list[Score]]:
    groups: dict[str, list[Score]] = {}
    for row in scores:
        groups.setdefault(row.group, []).append(row)
    return groups


def figure_text(figure: PlanFigure) -> str:
    """Format a computed value of the training plan according to its unit."""
    if figure.unit == "bytes":
        return format_bytes(figure.value)
    if figure.unit == "FLOPs":
        return format_short(figure.value)
    return numbers.number(figure.value)
