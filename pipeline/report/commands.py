"""The `penstock` command that prints the rows that a number of the report counts.

A number has a command if a condition of `penstock show --where` selects exactly its rows, and if all values in it are
plain names: a value from the web with spaces or quotes is never part of a command.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.facts import RunFacts, is_earlier_drop
from pipeline.report.funnel import DROPPING_TABLES, RuleDrops
from pipeline.report.judged import MAX_ROWS
from pipeline.report.signals import OTHER, Chart, Histogram
from pipeline.tokens.streams import TOKENS
from schemas.versions import DATASET

PLAIN = re.compile(r"[\w.:+/-]+", re.ASCII)
"""Values that need no quotes, neither in a shell nor in a condition."""
IS_KEPT = "drop_stage is null"


@dataclass(frozen=True)
class Commands:
    """The commands of one run; every method returns an empty string if no command prints exactly these rows."""

    run: str
    """The run folder as the user names it."""
    facts: RunFacts

    @property
    def quoted(self) -> str:
        """The run folder as a word of a shell command."""
        return shlex.quote(self.run)

    def show(self, count: int | None, *terms: str) -> str:
        """Return the command that prints the `count` rows that meet all terms."""
        if not count:
            return ""
        return f"penstock show {self.quoted} --where {shlex.quote(' and '.join(terms))} --limit {count}"

    def where(self, count: int | None, values: Mapping[str, object], *terms: str) -> str:
        """Return the command that prints the `count` rows in which the columns have these values and the terms hold."""
        if not all(PLAIN.fullmatch(str(value)) for value in values.values()):
            return ""
        return self.show(count, *(f"{name} = {value}" for name, value in values.items()), *terms)

    def rule(self, row: RuleDrops) -> str:
        """Return the command for the documents that a rule dropped."""
        return self.where(row.count, {"drop_stage": row.stage, "drop_rule": row.rule})

    def stage(self, name: str, count: int) -> str:
        """Return the command for the `count` documents that a stage dropped."""
        total = 0
        for table in (table for table in DROPPING_TABLES if table in self.facts.tables):
            dropped = self.facts.tables[table].content.counts.dropped
            counted = (rule for rule in dropped if rule.partition("/")[0] == name and not is_earlier_drop(rule))
            total += sum(dropped[rule] for rule in counted)
        stage = TOKENS.name if name == "mix" else name
        return self.where(count, {"drop_stage": stage}) if total == count or stage == TOKENS.name else ""

    def kept(self, count: int | None, **values: object) -> str:
        """Return the command for the `count` kept documents in which the columns have these values."""
        return self.where(count, values, IS_KEPT)

    def cleaned(self, count: int | None, **values: object) -> str:
        """Return the command for rows of `clean`, unless the mix leaves some of them out of the dataset."""
        tokens = self.facts.tables.get(DATASET)
        is_mixed = tokens is not None and any(tokens.content.counts.dropped.values())
        return "" if is_mixed or "clean" not in self.facts.tables else self.kept(count, **values)

    def year(self, count: int, year: str) -> str:
        """Return the command for the `count` kept documents of a year; an empty year is that of undated documents."""
        if not self.reads_all:
            return ""
        if not year:
            return self.show(count, IS_KEPT, "date is null")
        first, end = f"{year}-01-01T00:00:00Z", f"{int(year) + 1:04d}-01-01T00:00:00Z"
        return self.show(count, IS_KEPT, f"date >= {first}", f"date < {end}")

    def document(self, doc_id: str) -> str:
        """Return the command for one document, by its doc_id in hexadecimal."""
        return f"penstock show {self.quoted} --doc {doc_id[:12]} --text"

    def domain(self, count: int, name: str) -> str:
        """Return the command for the `count` kept documents of a domain."""
        return self.kept(count, domain=name) if self.reads_all else ""

    def beyond(self, chart: Chart, measured: Histogram) -> str:
        """Return the command for the documents of one language beyond the limit of a rule."""
        if measured.limit is None or measured.language == OTHER or not self.facts.is_number(chart.column):
            return ""
        sign = "<" if chart.side == "min" else ">"
        return self.where(
            measured.beyond, {"language": measured.language}, f"{chart.column} {sign} {measured.limit:.9g}"
        )

    @property
    def reads_all(self) -> bool:
        """True if the report reads every row, so that counts of the rows that it reads are those of the run."""
        sizes: Sequence[int] = [entry.rows for entry in self.facts.tables["documents"].content.files]
        return sum(sizes) <= MAX_ROWS
