"""The short answer of a report: what share was kept, the main reasons for drops, and what deserves a look.

Every finding compares a measured value with a fixed level that is named in the text or here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.engine.failures import failures_of
from pipeline.engine.part import CRASHED, FAILED
from pipeline.report.bias import BiasReport, sentence, worst_of_people
from pipeline.report.commands import Commands
from pipeline.report.corpus import LARGE_PAGE, LITTLE_TEXT, Kept
from pipeline.report.dedup import Dedup
from pipeline.report.facts import RunFacts, number, percent
from pipeline.report.funnel import ConsistencyCheck, RuleDrops
from pipeline.report.losses import describe_events
from pipeline.report.tallies import languages
from schemas.text import format_short
from schemas.tokens import HELDOUT

MAIN_REASONS = 3
MIN_DOCUMENTS = 30
"""Minimum number of documents of a language or corpus for which shares are compared."""
MAX_RULE_SHARE = 0.25
"""Share of the pages above which a single rule is reported."""
MAX_GAP_SHARE = 0.01
MAX_HOLLOW_SHARE = 0.05
MAX_DOMAIN_SHARE = 0.1
MIN_PRECISION = 0.9
MIN_PASS_RATIO = 0.5
"""A language is reported if its pass rate is below this share of the pass rate of all documents."""
MAX_LOSS_GAP = 0.3
"""Difference of held-out and training loss above which overfitting is reported [nats/token]."""
FAILURES = (FAILED, CRASHED)
"""Rules that count documents that could not be processed."""
SHOWN_ERRORS = 3
"""Number of kinds of errors of a stage that the text names."""


@dataclass(frozen=True)
class Anomaly:
    """One measured value that deserves a look, as a sentence."""

    text: str
    anchor: str
    """The id of the section with the details."""
    command: str = ""
    """The command that prints the documents; empty if there is none."""


def main_reasons(drops: Mapping[str, Sequence[RuleDrops]]) -> list[RuleDrops]:
    """Return the rules that dropped the most pages. Records that are no pages are not counted."""
    rows = [row for stage, rows in drops.items() if stage != "source" for row in rows if row.count]
    return sorted(rows, key=lambda row: (-row.count, row.name))[:MAIN_REASONS]


@dataclass(frozen=True)
class Measured:
    """The figures of a page that findings compare with their levels."""

    facts: RunFacts
    drops: Mapping[str, Sequence[RuleDrops]]
    checks: Sequence[ConsistencyCheck]
    kept: Kept | None
    dedup: Dedup
    pages: int
    commands: Commands
    bias: BiasReport


def findings(page: Measured) -> list[Anomaly]:
    """Return what deserves a look, the most severe first; empty if nothing does."""
    return [*_broken(page), *_lost(page), *_uneven(page), *_biased(page), *_training(page)]


def _broken(page: Measured) -> Iterator[Anomaly]:
    failed = [check for check in page.checks if not check.holds]
    if failed:
        claims = "; ".join(check.claim for check in failed[:MAIN_REASONS])
        yield Anomaly(f"{len(failed)} of {len(page.checks)} consistency checks failed: {claims}.", "identity")
    failures = failures_of(manifest.run.notes for manifest in page.facts.tables.values())
    for rows in page.drops.values():
        for row in rows:
            if row.rule in FAILURES and row.count:
                text = f"Stage {row.stage} could not process {number(row.count)} documents ({row.rule})."
                errors = failures.describe(row.stage, SHOWN_ERRORS) if row.rule == FAILED else ""
                text += f" {errors}." if errors else ""
                yield Anomaly(text, "drops", page.commands.rule(row))
    stored = page.facts.figures("documents").get("stored_bytes", {})
    gaps = sum(size for name, size in stored.items() if name.startswith("gap/"))
    total = sum(stored.values()) or 1
    if gaps / total > MAX_GAP_SHARE:
        yield Anomaly(f"{percent(gaps / total)} of the bytes of the inputs belong to no readable record.", "bytes")


def _lost(page: Measured) -> Iterator[Anomaly]:
    for row in main_reasons(page.drops):
        if page.pages >= MIN_DOCUMENTS and row.count > MAX_RULE_SHARE * page.pages:
            share = percent(row.count / page.pages)
            yield Anomaly(f"One rule, {row.rule}, drops {share} of the pages.", "drops", page.commands.rule(row))
    kept = page.kept
    if kept and kept.large_pages and kept.without_text > MAX_HOLLOW_SHARE * kept.large_pages:
        text = (
            f"{number(kept.without_text)} of {number(kept.large_pages)} pages larger than {LARGE_PAGE // 1000} kB have "
            f"fewer than {LITTLE_TEXT} characters of text. Extraction may have lost their main text."
        )
        terms = (f"page_bytes > {LARGE_PAGE}", f"num_chars < {LITTLE_TEXT}")
        yield Anomaly(text, "drops", page.commands.show(kept.without_text, *terms) if page.commands.reads_all else "")
    audit = page.dedup.audit
    precision = audit.precision[0].all if audit else None
    if precision and precision.value is not None and precision.value < MIN_PRECISION:
        yield Anomaly(f"Only {precision.text} of the linked pairs of documents really are copies.", "dedup")
    for loss in (audit.losses if audit else ())[:MAIN_REASONS]:
        text = f"{percent(loss.share)} of the documents of {loss.kind} {loss.name} are dropped as copies."
        yield Anomaly(text, "dedup", page.commands.document(loss.pairs[0].removed))


def _uneven(page: Measured) -> Iterator[Anomaly]:
    rows = [row for row in languages(page.facts)[0] if row.passed is not None]
    extracted, passed = sum(row.documents for row in rows), sum(row.passed or 0 for row in rows)
    for row in rows:
        rate, others = (row.passed or 0) / row.documents, passed / (extracted or 1)
        if row.passed and row.documents >= MIN_DOCUMENTS and rate < MIN_PASS_RATIO * others:
            text = (
                f"{percent(rate)} of the documents in {row.code} pass every rule, {percent(others)} of all documents."
            )
            yield Anomaly(text, "languages")
    kept = page.kept
    for domain in kept.domains if kept and kept.documents >= MIN_DOCUMENTS else ():
        if domain.char_share > MAX_DOMAIN_SHARE:
            command = page.commands.domain(domain.documents, domain.name)
            text = f"{percent(domain.char_share)} of the kept characters are from one domain, {domain.name}."
            yield Anomaly(text, "kept", command)


def _biased(page: Measured) -> Iterator[Anomaly]:
    worst = worst_of_people(page.bias)
    if worst is not None:
        yield Anomaly(sentence(worst), "bias")


def _training(page: Measured) -> Iterator[Anomaly]:
    training = page.facts.training
    bad = [event for event in describe_events(training.events) if event.is_bad]
    if bad:
        kinds = ", ".join(dict.fromkeys(event.name for event in bad))
        yield Anomaly(f"Training has {len(bad)} event{'s' if len(bad) != 1 else ''} to check: {kinds}.", "training")
    losses = [step.loss for step in training.steps if step.loss is not None]
    if len(losses) > 1 and losses[-1] >= losses[0]:
        text = f"The training loss did not fall: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last."
        yield Anomaly(text, "training")
    outcome = training.outcome or {}
    heldout, loss = outcome.get("heldout_loss"), outcome.get("loss")
    documents = _heldout_documents(page.facts)
    if heldout is None or loss is None or heldout - loss <= MAX_LOSS_GAP or documents < MIN_DOCUMENTS:
        return
    text = f"The held-out loss is {format_short(heldout - loss)} nats per token above the training loss."
    figures = training.plan.figures if training.plan else ()
    repeated = max((figure.value for figure in figures if figure.name.startswith("epochs.")), default=0.0)
    cause = f"A source was read {repeated:.3g} times, so the model may be overfitted."
    if repeated <= 1:
        cause = "No token was read twice, so the cause is not overfitting; the held-out text may differ."
    yield Anomaly(f"{text} {cause}", "training")


def _heldout_documents(facts: RunFacts) -> int:
    """Return the number of held-out documents of the dataset."""
    files = facts.tables["tokens"].content.files if "tokens" in facts.tables else ()
    return sum(file.rows for file in files if f"/{HELDOUT}/" in file.key and file.key.endswith(".docs"))
