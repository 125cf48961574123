"""The report of a run: a single self-contained HTML file without network requests.

All values pass through the escaping of the templates, since text comes from the web; none is ever marked as safe. The
policy of the page allows one script, by its digest: it sorts tables, and shows the command after a click on a number.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.engine.part_times import read_step_times
from pipeline.report import facts as numbers
from pipeline.report.bias import bias_report
from pipeline.report.charts import training_plots
from pipeline.report.commands import Commands
from pipeline.report.dedup import deduplication
from pipeline.report.extraction import extraction
from pipeline.report.facts import PlanFigure, RunFacts, Training, collect_facts
from pipeline.report.findings import Measured, findings, main_reasons
from pipeline.report.funnel import checks, compared_bytes, drops_by_rule, funnel_rows
from pipeline.report.ground_truth import Score, score
from pipeline.report.lineage import lineage_drawing
from pipeline.report.losses import SHOWN_VERDICTS, ablations, by_source, describe_events, waiting
from pipeline.report.personal_data import personal_data
from pipeline.report.recipe import package_versions, recipe_sections, recipe_text
from pipeline.report.rights import Loss, rights_view
from pipeline.report.samples import NearLimit, survey
from pipeline.report.signals import STAGES_WITH_SECTION, bucket_chart, buckets, charts
from pipeline.report.sources import sources
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
    toxicity_coverage,
    toxicity_measures,
)
from pipeline.report.training_files import ranks_view, task_rows
from pipeline.stages import STEPS, declared_reasons, sections
from schemas.config import Section
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.manifest import read_run
from schemas.planted import describe_planted
from schemas.storage import Store
from schemas.takedown import PENDING_NAME
from schemas.text import format_bytes, format_duration, format_short, printable_block

REPORT_NAME = "report.html"
MAX_INPUTS = 12
MAX_SHARDS = 40
"""Maximum number of input files that are listed, and of shards of each stream."""
LIMITS = {"max_inputs": MAX_INPUTS, "max_shards": MAX_SHARDS, "shown_verdicts": SHOWN_VERDICTS}
"""Numbers of rows that tables of the page show, by their names in the templates."""
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


SCRIPT = "script.html"
"""Template of the script that the page contains."""
PIECES = re.compile(r"[^_./:-]*[_./:-]*")
"""A part of a name with the signs after it; a line may break after such a part."""
EXCERPT_CHARS = 240
"""Number of characters of a kept sample that are visible before it is expanded."""


@dataclass(frozen=True)
class ReportOptions:
    """What a report shows besides the run folder."""

    truth: str | None = None
    """Path of the truth file of a demo crawl; None = there is none."""
    address: str | None = None
    """The run folder as the user names it, for the commands of the page; None = its absolute path or URI."""
    sections: Mapping[str, type[Section]] | None = None
    """The class of every section of a recipe, for its defaults; None = those of the data steps."""
    output: Store | None = None
    """The folder to write to; None = the run folder."""
    name: str = ""
    """The name of the file in `output`."""
    loss: Loss | None = None
    """The law by which the section on rights prices tokens; None = it has no prices."""


def write_report(run: Store, truth: str | None = None, options: ReportOptions | None = None) -> str:
    """Write the report of a run and return its path.

    `truth` is the truth file of a demo crawl, or None; `options` replaces it. Raises ConfigError if the folder is not a
    run folder, if the truth file is missing, or if a takedown is not finished. Raises ContractError, and leaves no
    report, if a table was replaced meanwhile.
    """
    options = options or ReportOptions(truth)
    versions = read_run(run).tables
    _check_versions(run, versions)
    facts = collect_facts(run)
    scores = score(facts, options.truth) if options.truth is not None else []
    page = render("page.html", _view(facts, scores, options))
    folder, name = (run, REPORT_NAME) if options.output is None else (options.output, options.name)
    _check_versions(run, versions)
    folder.write_atomic(name, page)
    try:
        # A takedown replaces tables before it deletes the report: either it deletes this page, or this check does.
        _check_versions(run, versions)
    except PenstockError:
        folder.delete(name)
        raise
    return f"{folder.uri}/{name}"


def _check_versions(run: Store, versions: Mapping[str, str]) -> None:
    """Raise an error if a run has other versions of tables, or a takedown that is not finished."""
    if run.exists(PENDING_NAME):
        raise ConfigError(
            f"{run.uri}: expected no unfinished takedown, got one, which removes documents that a report would show. "
            f"Wait for it, or finish it with `penstock takedown {quote(run.uri)}`, without other options."
        )
    now = read_run(run).tables
    if changed := sorted(name for name, version in versions.items() if now.get(name) != version):
        raise ContractError(
            f"{run.uri}: expected the same tables at the end of the report as at its start, got other versions of "
            f"{', '.join(changed)}. Run `penstock report` again."
        )


def render(template: str, values: Mapping[str, Any]) -> bytes:
    """Return a page as UTF-8; its templates get the values, and the digest of the script for the page's policy."""
    page = _environment().get_template(template).render(values, script_hash=script_hash(template_text(SCRIPT)))
    return page.encode("utf-8", "replace")


def template_text(name: str) -> str:
    """Return the text of a template without values, such as a script."""
    return _environment().get_template(name).render()


def script_hash(script: str) -> str:
    """Return the source expression by which a Content-Security-Policy allows one inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "estimate", "brief", "percent", "digest"):
        environment.filters[name] = getattr(numbers, name)
    environment.filters |= {"short": format_short, "size": format_bytes, "seconds": format_duration}
    environment.filters |= {"figure": figure_text, "pieces": name_pieces, "excerpt": excerpt}
    return environment


def _printable(value: Any) -> Any:
    """Return the value of an expression with control characters as visible escapes; text that is HTML is left as is."""
    return printable_block(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def name_pieces(name: str) -> list[str]:
    """Return a name as the parts between which a line may break: after underscores, dots, slashes and hyphens."""
    return [piece for piece in PIECES.findall(name) if piece]


def excerpt(text: str) -> str:
    """Return at most EXCERPT_CHARS characters of a text."""
    return text if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]}…"


def _near_by_rule(near: Mapping[str, NearLimit]) -> dict[str, list[NearLimit]]:
    """Return the documents near limits by `stage/rule`; a rule with several checks has several limits."""
    by_rule: dict[str, list[NearLimit]] = {}
    for name, pair in near.items():
        by_rule.setdefault(name.partition(" ")[0], []).append(pair)
    return by_rule


def _view(facts: RunFacts, scores: Sequence[Score], options: ReportOptions) -> dict[str, Any]:
    """Return the variables of the page's templates, by name."""
    reasons = declared_reasons(facts.tables)
    drops = drops_by_rule(facts, reasons)
    drawn = charts(facts, drops)
    documents = facts.figures("documents")
    kept, samples = survey(facts)
    commands = Commands(options.address or facts.run.address, facts)
    copies, checked, pages = deduplication(facts), checks(facts), num_pages(facts)
    measured = Measured(facts, drops, checked, kept, copies, pages, commands, bias_report(facts))
    return {
        "commands": commands,
        "findings": findings(measured) if pages else [],
        "reasons": main_reasons(drops),
        "kept": kept,
        "sources": sources(facts),
        "rights": None if kept is None else rights_view(facts, kept.rights, options.loss),
        "near_limits": _near_by_rule(samples.near),
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
        **_language_view(facts),
        "samples": samples,
        "checks": checked,
        "stored": ranked_counts(documents.get("stored_bytes", {})),
        "compared_bytes": compared_bytes(facts),
        "record_types": ranked_counts(documents.get("record_types", {})),
        "extraction": extraction(facts),
        "charsets": ranked_counts(documents.get("charsets", {})),
        "dedup": copies,
        "bias": measured.bias,
        **_toxicity_view(facts),
        "pii": personal_data(facts),
        "planted": describe_planted(facts.tables["clean"].content) if "clean" in facts.tables else "",
        "contract": contract(facts),
        "streams": streams(facts),
        "buckets_text": describe_buckets(facts),
        "mix_shares": mix_shares(facts),
        **_cost_view(facts),
        "num_pages": pages,
        **_training_view(facts.training),
        "ranks": ranks_view(facts.run),
        "tasks": task_rows(facts.run),
        **_recipe_view(facts, options),
        "ablations": ablations(facts.run, facts.tables["tokens"].digest if "tokens" in facts.tables else None),
        "scores": _by_group(scores),
        "lineage": lineage_drawing(facts.run),
        **LIMITS,
    }


def _language_view(facts: RunFacts) -> dict[str, Any]:
    """Return the variables of the section on languages."""
    documents = facts.figures("documents")
    return {
        "languages": languages(facts),
        "mixtures": ranked_counts(documents.get("mixed_languages", {})),
        "max_mixtures": MAX_MIXTURES,
        "dropped_early": sum(documents.get("dropped_early", {}).values()),
    }


def _toxicity_view(facts: RunFacts) -> dict[str, Any]:
    """Return the variables of the section on toxicity."""
    return {
        "toxicity": facts.settings("toxicity"),
        "toxicity_coverage": toxicity_coverage(facts),
        "toxicity_measures": toxicity_measures(facts),
        "marked": facts.figures("verdicts").get("marked", {}),
    }


def _cost_view(facts: RunFacts) -> dict[str, Any]:
    """Return the variables of the section on processing time."""
    named = {step.name for step in STEPS}
    steps = costs(facts, named)
    is_complete = len(steps) == len(named & facts.tables.keys())  # a takedown leaves no time of the run
    return {
        "costs": steps,
        "cpu_seconds": sum(cost.cpu_seconds for cost in steps) if is_complete else 0,
        "part_times": read_step_times(facts.run, [cost.step for cost in steps]),
    }


def _training_view(training: Training) -> dict[str, Any]:
    """Return the variables of the sections on training and its plan."""
    figures = training.plan.figures if training.plan else ()
    named = {figure.name: figure for figure in figures}
    return {
        "headline": [(label, named[name]) for name, label in HEADLINE.items() if name in named],
        "figures": [figure for figure in figures if not figure.name.startswith(MEMORY)],
        "memory": [figure for figure in figures if figure.name.startswith(MEMORY)],
        "training": training,
        "plots": training_plots(training.steps),
        "by_source": by_source(training.steps),
        "waiting": waiting(training.steps),
        "events": describe_events(training.events),
        "max_events": MAX_EVENTS,
    }


def _recipe_view(facts: RunFacts, options: ReportOptions) -> dict[str, Any]:
    """Return the variables of the section on the recipe."""
    recipe = recipe_sections(facts, options.sections or sections()) if facts.recipe else []  # not recorded
    return {
        "recipe": recipe,
        "recipe_text": recipe_text(recipe),
        "num_set": sum(len(part.set_lines) for part in recipe),
        "num_settings": sum(len(part.lines) for part in recipe),
        "versions": package_versions(),
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
