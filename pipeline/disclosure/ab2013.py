"""The documentation of training data that California's AB 2013 asks for: twelve disclosures.

Source: California Civil Code section 3111, added by AB 2013 (Statutes of 2024, chapter 817), in force since 2026-01-01.
"""

from collections.abc import Iterator

from pipeline.disclosure.answers import GIVEN, FactsFile
from pipeline.disclosure.eu import language_name
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.paper import Entry, Filler, Paper, PaperField, PaperSection
from pipeline.disclosure.table_facts import stage_rows

NAME = "ab2013"
TITLE = "Documentation of training data"
FORM = "California Civil Code section 3111 (AB 2013, Statutes of 2024, chapter 817)"


def ab2013_documentation(facts: DisclosedFacts, answers: FactsFile) -> Paper:
    """Return the documentation of a run."""
    filler = Filler(facts, answers)
    fields = tuple(PaperField(f"({n})", title, tuple(own)) for n, (title, own) in enumerate(_disclosures(filler), 1))
    section = PaperSection("3111", "High-level summary of the datasets", fields)
    return Paper(NAME, TITLE, FORM, (), (section,), filler.origins())


def _disclosures(filler: Filler) -> Iterator[tuple[str, list[Entry]]]:
    asked = filler.asked
    yield "Sources or owners of the datasets", [asked("ab2013.owners"), _sources(filler)]
    yield "How the datasets further the intended purpose", [asked("ab2013.purpose")]
    yield "Number of data points", [_counts(filler)]
    yield "Types of data points", [asked("content.types"), _languages(filler)]
    yield "Copyright, trademark, patent or public domain", [asked("ab2013.protected")]
    yield "Purchased or licensed datasets", [asked("ab2013.licensed")]
    yield "Personal information", [asked("ab2013.personal"), *_replaced(filler)]
    yield "Aggregate consumer information", [asked("ab2013.aggregate")]
    yield "Cleaning, processing and other modification", [_stages(filler)]
    yield "Period of data collection", [_periods(filler), asked("content.continuous_training")]
    yield "Date of first use", [asked("ab2013.first_used")]
    yield "Synthetic data", [asked("synthetic.created"), *_synthetic(filler)]


def _sources(filler: Filler) -> Entry:
    rows = [(name, filler.answers.kind_of(name) or "not given") for name in filler.facts.value("sources")]
    return filler.table("sources", "Sources", ("source", "kind"), rows, "sources")


def _counts(filler: Filler) -> Entry:
    facts = filler.facts
    read = facts.value("documents_read")
    rows = [(name, f"{read.get(name, 0):,}", f"{tokens:,}") for name, tokens in facts.value("sources").items()]
    head = ("source", "documents", "tokens read")
    return filler.table("counts", "Documents and tokens", head, rows, "documents_read", "sources")


def _languages(filler: Filler) -> Entry:
    rows = [(language_name(code), f"{number:,}") for code, number in filler.facts.value("languages")]
    return filler.table("languages", "Text by detected language", ("language", "tokens"), rows, "languages")


def _replaced(filler: Filler) -> Iterator[Entry]:
    found = filler.facts.facts.get("personal_data")
    if found is not None:
        rows = [(kind, f"{number:,}") for kind, number in sorted(found.value.items())]
        yield filler.table("replaced", "Values that were replaced, by type", ("type", "values"), rows, "personal_data")


def _stages(filler: Filler) -> Entry:
    rows = [(stage, tables, dropped) for stage, tables, _, dropped, _ in stage_rows(filler.facts)]
    return filler.table("stages", "Stages of processing", ("stage", "tables", "documents dropped"), rows, "stages")


def _periods(filler: Filler) -> Entry:
    rows = [(name, first, last) for name, (first, last) in filler.facts.value("months").items()]
    return filler.table("periods", "Months of capture, by source", ("source", "first", "last"), rows, "months")


def _synthetic(filler: Filler) -> Iterator[Entry]:
    names = filler.answers.sources_of("synthetic")
    if names:
        yield Entry("synthetic.sources", "Synthetic sources", GIVEN, names, origins=("facts file",))
