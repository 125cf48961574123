"""The report on personal data: values by type, language and source, and documents that kept their names."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.pii.stage import PII
from pipeline.report.facts import RunFacts
from pipeline.report.tallies import Count, ranked_counts


@dataclass(frozen=True)
class SourceShare:
    """How many of the kept documents of a source had personal data."""

    name: str
    documents: int
    """Kept documents with a replaced value."""
    share: float
    """Their share of the kept documents of the source, 0..1."""
    values: int
    """Replaced values, those of documents that the stage dropped included."""


@dataclass(frozen=True)
class PersonalData:
    """The figures of personal data of a run."""

    types: list[Count]
    """Replaced values by type."""
    languages: list[Count]
    """Replaced values by language."""
    sources: list[SourceShare]
    documents: int | None
    """Kept documents with a replaced value; None in a run of an earlier version, which did not count them."""
    dropped: int
    """Documents that the limits of the stage dropped."""
    names_kept: list[Count]
    """Documents whose names were kept, because no model reads their language, by language."""
    replacement: str
    """The setting pii.replacement of the run."""

    @property
    def values(self) -> int:
        """The number of replaced values."""
        return sum(row.number for row in self.types)


def personal_data(facts: RunFacts) -> PersonalData:
    """Return the figures of personal data; all are 0 or empty before the step `clean` ran."""
    figures = facts.figures("clean")
    with_any: Mapping[str, int] = figures.get("pii_documents", {})
    kept: Mapping[str, int] = figures.get("kept_documents", {})
    values: Mapping[str, int] = figures.get("pii_sources", {})
    is_counted = bool(values) or not figures.get("pii")
    dropped = facts.tables["clean"].content.counts.dropped if "clean" in facts.tables else {}
    return PersonalData(
        types=ranked_counts(figures.get("pii", {})),
        languages=ranked_counts(figures.get("pii_languages", {})),
        sources=[
            SourceShare(name, with_any.get(name, 0), with_any.get(name, 0) / kept[name], values.get(name, 0))
            for name in sorted(kept)
            if kept[name] and is_counted
        ],
        documents=sum(with_any.values()) if is_counted else None,
        dropped=sum(dropped.get(f"{PII.name}/{reason}", 0) for reason in PII.reasons),
        names_kept=ranked_counts(figures.get("names_kept", {})),
        replacement=facts.settings(PII.name).get("replacement", "type"),
    )
