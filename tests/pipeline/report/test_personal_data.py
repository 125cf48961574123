"""The figures of personal data in a report: by type, language and source, and documents that kept their names."""

from pathlib import Path

from pipeline.report.facts import collect_facts
from pipeline.report.page import write_report
from pipeline.report.personal_data import personal_data
from tests.support.report_run import make_run, words_of


def test_the_figures_are_those_of_the_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    facts = collect_facts(run)
    found = personal_data(facts)
    assert {row.name: row.number for row in found.types} == {"email": 6, "phone": 3}
    assert (found.values, found.documents, found.dropped) == (9, 3, 0)
    assert sum(row.number for row in found.languages) == 9
    (source,) = found.sources
    kept = facts.tables["clean"].content.counts.rows_kept
    assert (source.name, source.documents, source.share, source.values) == ("web", 3, 3 / kept, 9)
    assert [(row.name, row.number) for row in found.names_kept] == [("ja", 5)]
    text = words_of(Path(write_report(run, None)).read_text())
    assert "9 values were replaced, form type . 3 kept documents had such a value" in text
    assert "Names were kept in 5 documents, because pii.ner_models has no model for their languages: ja 5" in text


def test_before_the_step_all_figures_are_empty(tmp_path: Path) -> None:
    found = personal_data(collect_facts(make_run(tmp_path / "run", "verdicts")))
    assert (found.values, found.documents, found.sources, found.names_kept) == (0, 0, [], [])
