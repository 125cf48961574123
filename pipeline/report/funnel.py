"""The way of the documents through the run: what each stage left, what each rule dropped, and whether the books meet.

Everything here is a sum over manifests; no row is read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.engine.part import EVERY_STAGE
from pipeline.report.facts import EARLIER_DROPS, TABLES_FROM_INPUTS, RunFacts, is_of_another_run
from schemas.manifest import Counts

Reasons = Mapping[str, Mapping[str, str]]
"""Every stage in the order of the run, with the meaning of each of its reasons."""
DROPPING_TABLES = ("documents", "verdicts", "dedup", "repeats", "clean", "tokens")
"""Tables that drop documents, in the order of the run."""
STAGE_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "documents": {
        "source": "records that hold a page",
        "extract": "pages with a main text",
        "language": "texts in a wanted language",
    },
    "verdicts": {
        "language": "texts that are in one language",
        "quality": "texts that pass every quality rule",
        "decontaminate": "texts that share little with the evaluation sets",
        "toxicity": "texts below the toxicity limits",
        "perplexity": "texts as likely as the limits ask",
        "classifier": "texts that the classifiers keep",
        "importance": "texts near enough to the targets",
    },
    "dedup": {"dedup": "one copy of each cluster"},
    "tokens": {"tokens": "clean documents that the mix keeps"},
}
"""What a stage leaves of a table, in words."""
ROW_NAMES = {"tokens": "mix"}
"""Stages whose level has another name, because theirs is that of the last."""
DEFAULT_MEANING = "texts that it could measure"
ALWAYS_SHOWN = {
    "documents": ("source", "extract", "language"),
    "verdicts": ("quality", "toxicity"),
    "dedup": ("dedup",),
}
"""Stages that have their line even where they dropped nothing, by table."""


@dataclass(frozen=True)
class FunnelRow:
    """What was left at one point of the way; characters and tokens are None before there was any text."""

    name: str
    meaning: str
    documents: int
    chars: int | None
    tokens: float | None
    exact: bool = False
    """Whether the tokens were counted; before the last step they are an estimate from the characters."""


@dataclass(frozen=True)
class RuleDrops:
    """What one rule dropped."""

    stage: str
    rule: str
    meaning: str
    count: int
    share: float
    """Of all records of the run, 0..1."""
    chars: int

    @property
    def name(self) -> str:
        """`stage/rule`, as the manifests write it."""
        return f"{self.stage}/{self.rule}"


@dataclass(frozen=True)
class ConsistencyCheck:
    """Two numbers or digests that must be equal, and what they are."""

    claim: str
    left: int | str
    right: int | str

    @property
    def holds(self) -> bool:
        """Whether they are equal."""
        return self.left == self.right


def funnel_rows(facts: RunFacts, reasons: Reasons) -> list[FunnelRow]:
    """What was left after each step, first the records as they came in; empty while there are no documents."""
    if "documents" not in facts.tables:
        return []
    left = facts.tables["documents"].content.counts.rows_in
    text = _kept_chars(facts, "documents") + sum(_dropped_chars(facts, "documents").values())
    found: list[tuple[str, str, int, int | None]] = [("records", "records and gaps as they came in", left, None)]
    for table in DROPPING_TABLES:
        if table not in facts.tables:
            continue
        chars = _dropped_chars(facts, table)
        if table == "repeats":
            left, text = facts.tables[table].content.counts.rows_kept, _kept_chars(facts, table)
            found.append(("repeats", "texts without what stands elsewhere, judged again", left, text))
            continue
        if table == "verdicts":
            text = _kept_chars(facts, table) + sum(chars.values())
            found.append(("cuts", "the same texts, lines cut", left, text))
        for stage, dropped in _by_stage(facts.tables[table].content.counts, reasons).items():
            left -= dropped
            text -= sum(number for name, number in chars.items() if _stage_of(name) == stage)
            if dropped or stage in ALWAYS_SHOWN.get(table, ()):
                meaning = STAGE_MEANINGS.get(table, {}).get(stage, DEFAULT_MEANING)
                found.append((ROW_NAMES.get(stage, stage), meaning, left, text))
        if table == "clean":
            text = _kept_chars(facts, "clean")
            found.append(("redaction", "the same texts, personal data replaced", left, text))
    return _with_tokens(facts, found)


def _with_tokens(facts: RunFacts, found: list[tuple[str, str, int, int | None]]) -> list[FunnelRow]:
    total = sum(sum(shards) for shards in facts.figures("tokens").get("streams", {}).values())
    clean = _kept_chars(facts, "clean") - sum(_dropped_chars(facts, "tokens").values())
    rate = total / clean if clean else None
    rows = [FunnelRow(*row, None if rate is None or row[3] is None else row[3] * rate) for row in found]
    if "tokens" in facts.tables:
        documents = facts.tables["tokens"].content.counts.rows_kept
        rows.append(FunnelRow("tokens", "documents in the shards, separators counted", documents, clean, total, True))
    return rows


def _kept_chars(facts: RunFacts, table: str) -> int:
    return int(facts.figures(table).get("kept_chars", 0))


def _dropped_chars(facts: RunFacts, table: str) -> dict[str, int]:
    return {
        name: number
        for name, number in facts.figures(table).get("dropped_chars", {}).items()
        if name not in EARLIER_DROPS
    }


def _by_stage(counts: Counts, reasons: Reasons) -> dict[str, int]:
    """Drops by stage, in the order of the run."""
    totals: dict[str, int] = {}
    for name, number in _in_order(counts.dropped, reasons):
        if name not in EARLIER_DROPS:
            totals[_stage_of(name)] = totals.get(_stage_of(name), 0) + number
    return totals


def _stage_of(name: str) -> str:
    return name.partition("/")[0]


def _in_order(dropped: Mapping[str, int], reasons: Reasons) -> list[tuple[str, int]]:
    order = {stage: place for place, stage in enumerate(reasons)}
    return sorted(dropped.items(), key=lambda item: order.get(_stage_of(item[0]), len(order)))


def drops_by_rule(facts: RunFacts, reasons: Reasons) -> dict[str, list[RuleDrops]]:
    """Every declared rule by stage, in the order of the run, the rules that dropped most first."""
    total = facts.tables["documents"].content.counts.rows_in if "documents" in facts.tables else 0
    counts: Counter[str] = Counter()  # a rule counts twice where texts were judged again after passages were cut
    chars: Counter[str] = Counter()
    for table in DROPPING_TABLES:
        if table in facts.tables:
            counts.update(facts.tables[table].content.counts.dropped)
            chars.update(_dropped_chars(facts, table))
    found: dict[str, list[RuleDrops]] = {}
    for name, count in _in_order(counts, reasons):
        stage, _, rule = name.partition("/")
        meaning = reasons.get(stage, {}).get(rule) or EVERY_STAGE.get(rule, "")
        row = RuleDrops(stage, rule, meaning, count, count / total if total else 0.0, chars[name])
        if name not in EARLIER_DROPS:
            found.setdefault(stage, []).append(row)
    return {stage: sorted(rows, key=lambda row: (-row.count, row.rule)) for stage, rows in found.items()}


def checks(facts: RunFacts) -> list[ConsistencyCheck]:
    """Every equation between tables, plan and checkpoints that the run's standing parts allow to check."""
    return [*_book_checks(facts), *_identity_checks(facts)]


def _book_checks(facts: RunFacts) -> Iterator[ConsistencyCheck]:
    """Within a table the books balance, or its manifest could not be read; here they meet from table to table."""
    counts = {name: table.content.counts for name, table in facts.tables.items()}
    if "documents" in facts.tables:
        inputs = sum(entry.bytes for entry in facts.tables["documents"].content.inputs)
        stored = sum(facts.figures("documents").get("stored_bytes", {}).values())
        yield ConsistencyCheck("bytes of records and gaps = bytes of the inputs", stored, inputs)
    if "text" in counts:
        yield ConsistencyCheck("rows of text = rows of documents", counts["text"].rows_in, counts["documents"].rows_in)
    for table in ("scores", "verdicts", "clusters"):
        if table in counts:
            yield ConsistencyCheck(
                f"documents measured = rows of {table}", counts["documents"].rows_kept, counts[table].rows_in
            )
    if "dedup" in counts and "verdicts" in counts:
        entered = _entered(counts["dedup"])
        yield ConsistencyCheck(
            "documents that pass the verdicts = documents deduplicated", counts["verdicts"].rows_kept, entered
        )
    if "repeats" in counts and "dedup" in counts:
        entered = _entered(counts["repeats"])
        yield ConsistencyCheck("copies kept = documents searched for repeats", counts["dedup"].rows_kept, entered)
    if "clean" in counts:
        claim, before = ("documents left", "repeats") if "repeats" in counts else ("copies kept", "dedup")
        yield ConsistencyCheck(f"{claim} = documents cleaned", counts[before].rows_kept, counts["clean"].rows_in)
    if "tokens" in counts and "clean" in counts:
        claim = "clean documents = documents in shards"
        claim += " and those that the mix leaves out" if any(counts["tokens"].dropped.values()) else ""
        yield ConsistencyCheck(claim, counts["clean"].rows_kept, counts["tokens"].rows_in)


def _entered(counts: Counts) -> int:
    """Rows that a step judged, those it only looked at left out."""
    return counts.rows_in - sum(counts.dropped.get(name, 0) for name in EARLIER_DROPS)


def _identity_checks(facts: RunFacts) -> Iterator[ConsistencyCheck]:
    digests = {name: table.digest for name, table in facts.tables.items()}
    for name, table in facts.tables.items():
        entries = table.content.inputs if name not in TABLES_FROM_INPUTS else []
        for entry in entries:
            if is_of_another_run(entry.name):
                continue
            yield ConsistencyCheck(f"{name} read the {entry.name} shown here", entry.sha256, digests[entry.name])
    if facts.training.plan and "tokens" in digests:
        yield ConsistencyCheck("the plan is for this dataset", facts.training.plan.dataset, digests["tokens"])
    for checkpoint in facts.training.checkpoints:
        if "tokens" in digests:
            claim = f"checkpoint of step {checkpoint.step:,} was trained on this dataset"
            yield ConsistencyCheck(claim, checkpoint.dataset, digests["tokens"])
