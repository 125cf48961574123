"""The funnel of a run: documents kept after each stage, drops by rule, and consistency checks between tables.

Everything here is a sum over manifests; no row is read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.engine.part import EVERY_STAGE
from pipeline.report.facts import RunFacts, is_earlier_drop
from schemas.ids import digest_of
from schemas.manifest import Counts
from schemas.tables import LATER_VERDICTS, TABLES
from schemas.versions import DATASET

Reasons = Mapping[str, Mapping[str, str]]
"""Stage → rule → description, with the stages in the order of the run."""
DROPPING_TABLES = ("documents", *LATER_VERDICTS, DATASET)
"""Tables that drop documents, in the order in which a run builds them."""
CUTTING_TABLES = {
    "templates": "the same texts without the lines that many pages of their host have",
    "paragraphs": "the same texts without the paragraphs that were cut",
}
"""Description of the row of each table that only cuts texts."""
STAGE_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "documents": {
        "source": "records that are pages",
        "extract": "pages with a main text",
        "language": "texts in a language of the recipe",
    },
    "verdicts": {
        "templates": "texts of which the cuts of templates leave enough",
        "language": "texts in a single language",
        "quality": "texts that pass every quality rule",
        "decontaminate": "texts with little overlap with the evaluation sets",
        "toxicity": "texts within the toxicity limits",
        "perplexity": "texts within the perplexity limits",
        "classifier": "texts within the classifier limits",
        "importance": "texts close enough to the target corpus",
        "paragraphs": "texts of which the cuts of paragraphs leave enough",
    },
    "dedup": {"dedup": "unique documents and survivors of clusters"},
    "tokens": {"tokens": "clean documents that the mix keeps"},
}
"""Description of the documents kept by a stage, by table and stage."""
ROW_NAMES = {"tokens": "mix"}
"""Stage → name of its row, if that is not the stage's name: `tokens` is the name of the last row."""
DEFAULT_MEANING = "texts that the stage could process"
ALWAYS_SHOWN = {
    "documents": ("source", "extract", "language"),
    "verdicts": ("quality", "toxicity"),
    "dedup": ("dedup",),
}
"""Stages that have a row even if they dropped nothing, by table."""


@dataclass(frozen=True)
class FunnelRow:
    """Documents, characters and tokens kept after a stage; characters and tokens are None before text extraction."""

    name: str
    meaning: str
    documents: int
    chars: int | None
    tokens: float | None
    exact: bool = False
    """True if the tokens were counted, as in the last row; in the other rows they are estimated from the characters."""


@dataclass(frozen=True)
class RuleDrops:
    """Documents and characters that one rule dropped."""

    stage: str
    rule: str
    meaning: str
    count: int
    share: float
    """Share of all records of the run, 0..1."""
    chars: int

    @property
    def name(self) -> str:
        """The name of the rule in the manifests, `stage/rule`."""
        return f"{self.stage}/{self.rule}"


@dataclass(frozen=True)
class ConsistencyCheck:
    """Two numbers or digests that must be equal, and the `claim`, such as `survivors = documents cleaned`."""

    claim: str
    left: int | str
    right: int | str

    @property
    def holds(self) -> bool:
        """True if both numbers or digests are equal."""
        return self.left == self.right


def funnel_rows(facts: RunFacts, reasons: Reasons) -> list[FunnelRow]:
    """Return the rows of the funnel, starting with all records; empty if the table `documents` does not exist yet."""
    if "documents" not in facts.tables:
        return []
    left = facts.tables["documents"].content.counts.rows_in
    text = _kept_chars(facts, "documents") + sum(_dropped_chars(facts, "documents").values())
    rows: list[tuple[str, str, int, int | None]] = [("records", "all records and gaps of the inputs", left, None)]
    for table in (name for name in TABLES if name in (*DROPPING_TABLES, *CUTTING_TABLES)):
        if table not in facts.tables:
            continue
        chars = _dropped_chars(facts, table)
        if table in CUTTING_TABLES:
            text = _kept_chars(facts, table)
            rows.append((table, CUTTING_TABLES[table], left, text))
            continue
        if table == "repeats":
            left, text = facts.tables[table].content.counts.rows_kept, _kept_chars(facts, table)
            rows.append(("repeats", "texts without repeated passages, checked again", left, text))
            continue
        if table == "verdicts":
            text = _kept_chars(facts, table) + sum(chars.values())
            rows.append(("cuts", "the same texts without cut lines", left, text))
        for stage, dropped in _by_stage(facts.tables[table].content.counts, reasons).items():
            left -= dropped
            text -= sum(number for name, number in chars.items() if _stage_of(name) == stage)
            if dropped or stage in ALWAYS_SHOWN.get(table, ()):
                meaning = STAGE_MEANINGS.get(table, {}).get(stage, DEFAULT_MEANING)
                rows.append((ROW_NAMES.get(stage, stage), meaning, left, text))
        if table == "clean":
            text = _kept_chars(facts, "clean")
            rows.append(("redaction", "the same texts with personal data replaced", left, text))
    return _with_tokens(facts, rows)


def _with_tokens(facts: RunFacts, rows: list[tuple[str, str, int, int | None]]) -> list[FunnelRow]:
    total = sum(facts.tokens_left.values())
    clean = _kept_chars(facts, "clean") - sum(_dropped_chars(facts, "tokens").values())
    rate = total / clean if clean else None
    funnel = [FunnelRow(*row, None if rate is None or row[3] is None else row[3] * rate) for row in rows]
    if "tokens" in facts.tables:
        documents = facts.tables["tokens"].content.counts.rows_kept
        funnel.append(FunnelRow("tokens", "documents in the shards, with separators", documents, clean, total, True))
    return funnel


def _kept_chars(facts: RunFacts, table: str) -> int:
    return int(facts.figures(table).get("kept_chars", 0))


def _dropped_chars(facts: RunFacts, table: str) -> dict[str, int]:
    return {
        name: number
        for name, number in facts.figures(table).get("dropped_chars", {}).items()
        if not is_earlier_drop(name)
    }


def _by_stage(counts: Counts, reasons: Reasons) -> dict[str, int]:
    """Return the number of dropped rows by stage, in the order of the run."""
    totals: dict[str, int] = {}
    for name, number in _in_order(counts.dropped, reasons):
        if not is_earlier_drop(name):
            totals[_stage_of(name)] = totals.get(_stage_of(name), 0) + number
    return totals


def _stage_of(name: str) -> str:
    return name.partition("/")[0]


def _in_order(dropped: Mapping[str, int], reasons: Reasons) -> list[tuple[str, int]]:
    order = {stage: index for index, stage in enumerate(reasons)}
    return sorted(dropped.items(), key=lambda item: order.get(_stage_of(item[0]), len(order)))


def drops_by_rule(facts: RunFacts, reasons: Reasons) -> dict[str, list[RuleDrops]]:
    """Return the drops of every declared rule by stage, in the order of the run.

    The rules of a stage are sorted by drops, most first.
    """
    total = facts.tables["documents"].content.counts.rows_in if "documents" in facts.tables else 0
    counts: Counter[str] = Counter()  # a rule is applied twice if texts are checked again after passages were cut
    chars: Counter[str] = Counter()
    for table in DROPPING_TABLES:
        if table in facts.tables:
            counts.update(facts.tables[table].content.counts.dropped)
            chars.update(_dropped_chars(facts, table))
    drops: dict[str, list[RuleDrops]] = {}
    for name, count in _in_order(counts, reasons):
        stage, _, rule = name.partition("/")
        meaning = reasons.get(stage, {}).get(rule) or EVERY_STAGE.get(rule, "")
        row = RuleDrops(stage, rule, meaning, count, count / total if total else 0.0, chars[name])
        if not is_earlier_drop(name):
            drops.setdefault(stage, []).append(row)
    return {stage: sorted(rows, key=lambda row: (-row.count, row.rule)) for stage, rows in drops.items()}


def checks(facts: RunFacts) -> list[ConsistencyCheck]:
    """Return every consistency check between the tables, plan and checkpoints that exist in the run."""
    return [*_count_checks(facts), *_identity_checks(facts)]


def compared_bytes(facts: RunFacts) -> int:
    """Return the bytes of the input files whose rows count bytes of the stored file."""
    if "documents" not in facts.tables:
        return 0
    other: Mapping[str, int] = facts.figures("documents").get("other_inputs", {})
    return sum(entry.bytes for entry in facts.tables["documents"].content.inputs) - sum(other.values())


def _count_checks(facts: RunFacts) -> Iterator[ConsistencyCheck]:
    """Yield the checks that compare counts of different tables."""
    # Counts within one table are validated when its manifest is read.
    counts = {name: table.content.counts for name, table in facts.tables.items()}
    if "documents" in facts.tables:
        stored = sum(facts.figures("documents").get("stored_bytes", {}).values())
        if inputs := compared_bytes(facts):
            yield ConsistencyCheck("bytes of records and gaps = bytes of the inputs", stored, inputs)
    for name, own in counts.items():
        if TABLES[name].rows == "record" and name != "documents":
            yield ConsistencyCheck(f"rows of {name} = rows of documents", own.rows_in, counts["documents"].rows_in)
        if TABLES[name].rows == "document":
            yield ConsistencyCheck(f"documents extracted = rows of {name}", counts["documents"].rows_kept, own.rows_in)
    if "dedup" in counts and "verdicts" in counts:
        entered = _entered(counts["dedup"])
        yield ConsistencyCheck(
            "documents that pass the verdicts = documents deduplicated", counts["verdicts"].rows_kept, entered
        )
    if "repeats" in counts and "dedup" in counts:
        entered = _entered(counts["repeats"])
        yield ConsistencyCheck("survivors = documents searched for repeats", counts["dedup"].rows_kept, entered)
    if "clean" in counts:
        claim, before = ("documents kept", "repeats") if "repeats" in counts else ("survivors", "dedup")
        yield ConsistencyCheck(f"{claim} = documents cleaned", counts[before].rows_kept, counts["clean"].rows_in)
    if "tokens" in counts and "clean" in counts:
        claim = "clean documents = documents in shards"
        claim += " and those that the mix leaves out" if any(counts["tokens"].dropped.values()) else ""
        yield ConsistencyCheck(claim, counts["clean"].rows_kept, counts["tokens"].rows_in)


def _entered(counts: Counts) -> int:
    """Return the number of rows that a step checked. Rows that an earlier step dropped are not included."""
    return counts.rows_in - sum(number for name, number in counts.dropped.items() if is_earlier_drop(name))


def _identity_checks(facts: RunFacts) -> Iterator[ConsistencyCheck]:
    digests = {name: table.digest for name, table in facts.tables.items()}
    for name, table in facts.tables.items():
        for read, digest in table.tables_read.items():
            yield ConsistencyCheck(f"{name} was made from this version of {read}", digest, digests[read])
    if facts.training.plan and "tokens" in digests:
        yield ConsistencyCheck("the plan was made for this dataset", facts.training.plan.dataset, digests["tokens"])
    for checkpoint in facts.training.checkpoints:
        if "tokens" in digests:
            claim = f"checkpoint of step {checkpoint.step:,} was trained on this dataset"
            yield ConsistencyCheck(claim, checkpoint.dataset, digests["tokens"])
        if facts.training.plan:
            planned, used = facts.training.plan.deciding_settings, checkpoint.deciding_settings
            names = planned.keys() & used.keys()
            left, right = (digest_of({name: each[name] for name in names}) for each in (used, planned))
            yield ConsistencyCheck(f"checkpoint of step {checkpoint.step:,} was trained with this plan", left, right)
