"""What the report shows of extraction: counts of the manifest, CPU times of its run block, and lines without names."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.parquet import PartWriter
from pipeline.report.extraction import CountRow, GuardRow, UnionRow, extraction, only_in
from pipeline.report.facts import collect_facts
from pipeline.report.page import write_report
from schemas.ids import canonical_json
from schemas.manifest import MANIFEST_NAME, RunFile, make_manifest, part_key, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.tables import COMPARISONS
from tests.support.report_run import ADDRESS, IMAGE, identifier, make_run, words_of

FIGURES: dict[str, Any] = {
    "second_opinions": {"none": 180, "unsure/used": 12, "short/empty": 4, "unsure/limit": 3, "empty/too_large": 1},
    "empty_pages": {"de/short_text": 2, "?/error: stopped": 1},
    "limited_pages": {"options": 1, "tags": 5},
    "extractor_errors": {"trafilatura/ValueError": 2, "penstock/RecursionError": 3},
    "union_tried": {"trafilatura": 40, "all": 30},
    "union_taken": {"trafilatura": 10},
    "union_chars": {"trafilatura": 8500},
    "stopped_extractors": {"trafilatura": 3},
    "compared_f1": {"0.9": 6, "0.3": 2},
    "compared_lengths": {"similar": 5, "below_half": 3},
    "compared_rules": {"both_pass": 4, "only_second_passes": 3, "both_fail": 1},
    "compared_chars": {"first_chars": 9000, "second_chars": 7000},
}
CPU = {
    "extract": {"seconds": 1.0, "rows": 200},
    "second_opinion": {"seconds": 0.6, "rows": 20},
    "union": {"seconds": 2.5, "rows": 40},
    "compare resiliparse": {"seconds": 0.016, "rows": 8},
    "compare trafilatura": {"seconds": 0.4, "rows": 8},
}
EXTRACT = {
    "extractor": "resiliparse",
    "union": ["resiliparse", "trafilatura", "all"],
    "compare": "trafilatura",
    "compare_share": 0.1,
}


def add_comparisons(run: Store, texts: list[tuple[str, str, float]]) -> None:
    """Add the table `comparisons` with one row for each pair of texts to a run, in two parts."""
    folder, files, paths = run.child("comparisons/v-0000000071a9"), [], {}
    for part in range(2):
        with PartWriter(folder, part_key(part), COMPARISONS) as writer:
            for number, (first, second, f1) in enumerate(texts):
                if number % 2 == part:
                    row = {"doc_id": identifier(number), "language": "en", "word_f1": f1, "first": "resiliparse"}
                    row |= {"second": "trafilatura", "first_text": first, "second_text": second}
                    row |= {"first_chars": len(first), "second_chars": len(second), "second_rule": "quality/short"}
                    writer.add(row)
        entry = writer.written.to_json()
        paths[entry["key"]] = entry.pop("path")
        files.append(entry)
    counts = {"rows_in": len(texts), "rows_kept": len(texts)}
    content = {"table": "comparisons", "stages": {"extract": 2}, "config": {"extract": EXTRACT}, "models": {}}
    content |= {"inputs": [], "files": files, "counts": counts, "figures": {}}
    how = {"paths": paths, "started": "2026-01-01T00:00:00+00:00", "wall_seconds": 8.0, "code_version": "0.1.0"}
    write_manifest(folder, make_manifest(content, how | {"cpu_seconds": 1.0}, "comparisons"))
    state = read_run(run)
    write_run(run, RunFile(tables=state.tables | {"comparisons": "v-0000000071a9"}, recipe=state.recipe))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a run with second opinions, a union and a comparison."""
    run = make_run(tmp_path_factory.mktemp("report") / "harbour", figures={"documents": FIGURES})
    folder = run.child("documents/v-0000000071a9")
    manifest = folder.read_json(MANIFEST_NAME)
    manifest["content"]["config"]["extract"] = EXTRACT
    manifest["run"]["notes"] = {"cpu": CPU}
    folder.write_atomic(MANIFEST_NAME, canonical_json(manifest))
    pairs = [(f"The same line.\nWrite to {ADDRESS} by day.", f"The same line.\nOnly here {IMAGE}", 0.3)]
    pairs += [("One line.\nTwo  lines.", f"Two lines.\nNumber {number}.", 0.9) for number in range(11)]
    add_comparisons(run, pairs)
    return run


def test_figures_of_the_manifest(run: Store) -> None:
    found = extraction(collect_facts(run))
    assert found.milliseconds == pytest.approx(1000 * (1.0 + 0.6) / 200)
    assert found.guard[0] == GuardRow("unsure", "the second text is used", 12, 12 / 200)
    assert (found.guard_pages, found.guard_share, found.guard_seconds) == (200, 16 / 200, 0.6)
    assert found.empty == (("short_text", "de", 2), ("error: stopped", "?", 1))
    assert found.limited[0] == ("of more than 100,000 tags, the first are read", 5)
    assert len(found.limited) == 2
    assert found.errors == (("penstock", "RecursionError", 3), ("trafilatura", "ValueError", 2))
    assert [row.extractor for row in found.union] == ["trafilatura", "all"]
    assert found.union[1] == UnionRow("all", 30, 0, 0, found.union[1].tokens)
    assert (found.union_seconds, found.stopped) == (2.5, 3)
    both = found.comparison
    assert both is not None
    assert (both.first, both.second, both.pages, both.chars) == ("resiliparse", "trafilatura", 8, (9000, 7000))
    assert both.milliseconds == pytest.approx((2.0, 50.0))
    assert both.f1 == (CountRow("0.9 to 1.0", 6, 0.75), CountRow("0.3 to 0.4", 2, 0.25))
    assert both.rules[1] == CountRow("only the second passes", 3, 3 / 8)


def test_pages_are_shown_by_lines_of_one_text_only_without_personal_data(run: Store) -> None:
    both = extraction(collect_facts(run)).comparison
    assert both is not None
    assert (len(both.different), len(both.random)) == (4, 4)
    assert {page.doc_id for page in both.different}.isdisjoint(page.doc_id for page in both.random)
    worst = both.different[0]
    assert worst.word_f1 == pytest.approx(0.3)
    assert worst.lines == (("Write to <EMAIL> by day.",), (f"Only here {IMAGE}",))
    assert worst.rules == ("", "quality/short")
    assert both.different[1].lines[0] == ("One line.",)


def test_the_page_of_the_report(run: Store) -> None:
    page = Path(write_report(run)).read_text()
    assert ADDRESS not in page
    assert IMAGE not in page
    words = words_of(page)
    assert f"Only here {IMAGE}" in words
    assert "8 ms of CPU per page" in words
    assert "trafilatura was asked about 8.0 % of 200 pages" in words
    assert "of more than 100,000 tags, the first are read 5" in words
    assert "trafilatura ValueError 2" in words
    assert "resiliparse and trafilatura compared" in words


def test_a_run_without_figures_of_extraction(tmp_path: Path) -> None:
    found = extraction(collect_facts(make_run(tmp_path / "run")))
    assert found.is_empty


def test_lines_that_only_one_text_has() -> None:
    assert only_in("a\n b  c\n\na\nd", "b c\na\nx") == ["a", "d"]
    assert only_in("", "a") == []
