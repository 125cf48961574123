"""The report's section on deduplication: clusters, audit, the S-curve to scale, and what was cut."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.dedup.config import REPEATS
from pipeline.report.dedup import (
    MeasuredBin,
    audit,
    band_probability,
    clusters,
    curve_plot,
    deduplication,
    repeats,
    search,
    similarity_position,
)
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks, drops_by_rule, funnel_rows
from pipeline.report.page import write_report
from pipeline.report.samples import draw_samples
from schemas.storage import Store
from tests.support.report_audit import AUDITED, share
from tests.support.report_repeats import add_repeats
from tests.support.report_run import REASONS, SCRIPT, make_run, words_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return the synthetic run up to its audit."""
    return make_run(tmp_path_factory.mktemp("report") / "harbour", "audit")


def page_of(run: Store) -> str:
    return Path(write_report(run, None)).read_text()


def change(run: Store, table: str, block: str, values: dict[str, Any]) -> None:
    """Write values into a manifest, as a run with other settings would."""
    path = Path(run.uri) / table / "v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content" if block != "notes" else "run"][block] |= values
    path.write_text(json.dumps(manifest))


# ---------------------------------------------------------------------------------------------------------- clusters


def test_sizes_of_clusters(run: Store) -> None:
    result = clusters(collect_facts(run))
    assert result is not None
    assert (result.exact, result.near, result.same_url, result.num_clusters, result.largest) == (4, 3, 0, 3, 5)
    assert [(size.label, size.clusters, size.documents) for size in result.sizes] == [
        ("2", 1, 2),
        ("3", 1, 3),
        ("4", 0, 0),
        ("5", 1, 5),
    ]


def test_large_clusters_share_columns_of_powers_of_two(tmp_path: Path) -> None:
    facts = collect_facts(make_run(tmp_path / "run", "dedup"))
    sizes = facts.tables["dedup"].content.figures["cluster_sizes"]
    sizes |= {"8": 2, "9": 1, "16": 4, "17": 1, "100": 1}
    result = clusters(facts)
    assert result is not None
    assert [(size.label, size.clusters, size.documents) for size in result.sizes[6:]] == [
        ("8", 2, 16),
        ("9–16", 5, 73),
        ("17–32", 1, 17),
        ("33–64", 0, 0),
        ("65–128", 1, 100),
    ]


def test_the_candidate_search(run: Store) -> None:
    statistics = search(collect_facts(run))
    assert statistics is not None
    assert (statistics.compared, statistics.rounds, statistics.edges_by_round) == (((59, 71), (4, 6)), 3, (64, 31))
    assert (statistics.shuffled_bytes, statistics.layout, statistics.earlier) == (81_400, (14, 8), ())
    text = words_of(page_of(run))
    assert "Signatures 14 bands of 8 values" in text
    assert "Pairs compared 71, of which 59 were linked, then 6, of which 4 were linked" in text
    assert "Rounds of connected components 3; edges: 64, then 31" in text
    assert "Bytes shuffled 81.4 kB, 2.2 kB per document" in text
    assert "Earlier snapshots none" in text


def test_indexes_of_earlier_snapshots_are_named_and_make_no_table_stale(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clusters")
    path = Path(run.uri) / "clusters/v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["inputs"] += [
        {"name": f"earlier-{n}/{table}", "bytes": 1, "sha256": f"{n}" * 64}
        for n in (0, 1)
        for table in ("index", "representatives")
    ]
    path.write_text(json.dumps(manifest))
    facts = collect_facts(run)
    assert "clusters" in facts.tables
    statistics = search(facts)
    assert statistics is not None
    assert statistics.earlier == ("0" * 64, "1" * 64)
    assert not [check.claim for check in checks(facts) if "earlier" in check.claim]
    text = words_of(page_of(run))
    assert f"Earlier snapshots index {'0' * 64} index {'1' * 64}" in text
    assert "Survivors have not been chosen yet." in text


# ------------------------------------------------------------------------------------------------------------- audit


def test_the_audit_is_in_the_report(run: Store) -> None:
    result = audit(collect_facts(run))
    assert result is not None
    assert (result.best, result.at_limit.value, result.at_limit.text) == ("anchored", 0.8642, "86.4 %")
    assert [row.is_limit for row in result.recall] == [False, True, False]
    text = words_of(page_of(run))
    for expected in (
        "Precision 98.2 % 97.0 % to 99.0 %",
        "Recall 86.4 % 82.0 % to 91.0 %",
        "at least 0.7 count as copies. The uniform sample compares all pairs of 2,000 documents; 9 pairs",
        "1,234 documents in 432 groups",
        "98,765 documents of 2 larger groups were left out.",
        "Linked pairs by true similarity Similarity from Pairs 1.00 1,290 0.70 663 0.65 37 Recall",
        "with the document to which it was linked 1,990 98.2 % 97.0 % to 99.0 % 700 95.0 % 93.0 % to 97.0 % 0",
        "with the document that is kept in its place 1,981 90.0 % 88.0 % to 92.0 % 612 83.3 % 80.0 % to 86.0 % 9 8",
        "False positives 16.7 % 14.0 % to 20.0 %",
        "Of 612 near copies that were dropped, 16.7 % (14.0 % to 20.0 %) are less similar than 0.7 to",
        "If numbers keep their digits in shingles, 25.0 % (22.0 % to 29.0 %) are.",
        "at least 0.7 2,345 86.4 % 82.0 % to 91.0 % 89.8 % 85.0 % to 93.0 % 9 77.8 % 45.0 % to 94.0 % 88.9 %",
        "equal shingles 321 100.0 % 97.5 % to 100.0 % 100.0 % 97.5 % to 100.0 % 0 – –",
    ):
        assert expected in text


def test_the_similarity_to_what_is_kept_is_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    assert "estimated similarity to the document that is kept" not in words_of(page_of(run))
    change(run, "dedup", "figures", {"survivor_similarity": {"0.65": 4, "0.90": 17, "not compared": 2}})
    expected = "document that is kept Similarity from Documents not compared 2 0.90 17 0.65 4"
    assert expected in words_of(page_of(run))


def test_losses_of_sources_and_domains_are_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    assert "Sources and domains of which a large share" not in words_of(page_of(run))
    pairs = [
        {"removed": "a1" * 16, "kept": "b2" * 16, "jaccard": 0.8125},
        {"removed": "c3" * 16, "kept": "d4" * 16, "jaccard": None},
    ]
    loss = {"kind": "domain", "name": "lost.org", "documents": 400, "removed": 300, "pairs": pairs}
    change(run, "audit", "figures", {"losses": [loss]})
    page = page_of(run)
    text = words_of(page)
    assert "domain lost.org 400 300 75.0 % a1a1a1a1a1a1 b2b2b2b2b2b2 0.8125" in text
    assert "domain lost.org 400 300 75.0 % c3c3c3c3c3c3 d4d4d4d4d4d4 –" in text
    assert "75.0 % of the documents of domain lost.org are dropped as copies." in text
    assert "--doc a1a1a1a1a1a1 --text" in page
    assert "--doc d4d4d4d4d4d4" not in page  # it is of an earlier snapshot, or without text


def test_an_audit_by_an_older_version_has_no_sample_of_removed_copies(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    path = Path(run.uri) / "audit/v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["content"]["figures"]["losses"], manifest["content"]["figures"]["precision"]["removed"]
    path.write_text(json.dumps(manifest))
    assert "False positives –" in words_of(page_of(run))


def test_the_audit_by_source_is_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    precision, recall = AUDITED["precision"], AUDITED["recall"]
    linked = {"news": {"within": share(0.5, 0.4, 0.6, 80), "across": share(None)}}
    found = {
        "news": {"within": share(0.6, 0.5, 0.7, 90), "across": share(0.7, 0.6, 0.8, 91)},
        "web": {"within": share(None), "across": share(0.8, 0.7, 0.9, 92)},
    }
    figures = {
        "precision": {**precision, "joined": {**precision["joined"], "by_source": linked}},
        "recall": {**recall, "anchored": {**recall["anchored"], "by_source": found}},
    }
    change(run, "audit", "figures", figures)
    text = words_of(page_of(run))
    assert "and recall in the anchored sample" in text
    assert "news 80 50.0 % 40.0 % to 60.0 % 0 – 90 60.0 % 50.0 % to 70.0 % 91 70.0 % 60.0 % to 80.0 %" in text
    assert "web 0 – 0 – 0 – 92 80.0 % 70.0 % to 90.0 %" in text


def test_a_run_that_was_compared_whole_has_no_intervals(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    whole = {**AUDITED["recall"]["uniform"], "is_all": True}
    whole["by_jaccard"] = [
        row | {"joined": share(0.75, 0.75, 0.75, 40), "candidates": share(0.8, 0.8, 0.8, 40)}
        for row in whole["by_jaccard"]
    ]
    change(run, "audit", "figures", {"recall": {**AUDITED["recall"], "uniform": whole}})
    text = words_of(page_of(run))
    assert "All pairs of the 2,000 documents of the run were compared, so these figures are exact." in text
    assert "Recall 75.0 % of 40 pairs" in text


def test_without_an_audit_nothing_is_claimed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dedup")
    assert deduplication(collect_facts(run)).audit is None
    text = words_of(page_of(run))
    assert "Clusters by number of documents" in text
    assert "Recall" not in text
    assert "Probability of sharing an LSH bucket" not in text


def measured(jaccard: float, share: float, low: float, high: float) -> MeasuredBin:
    return MeasuredBin(0.65, 0.7, jaccard, share, low, high, 455, 0.468)


def test_the_curve_is_drawn_to_scale() -> None:
    points = {"anchored": [measured(0.5, 0.25, 0.2, 0.3)], "uniform": [measured(1.0, 1.0, 0.9, 1.0)]}
    plot = curve_plot(points, 0.7, (14, 8))
    assert plot is not None
    uniform, anchored = plot.points  # those in color are drawn last, on top
    assert (anchored.accent, uniform.accent, plot.samples) == (True, False, ("anchored", "uniform"))
    assert (anchored.x, uniform.x, plot.limit) == (54.0, 97.0, similarity_position(0.7))
    assert similarity_position(0) == plot.left == 97.0 - plot.width
    tick = {tick.label: tick.at for tick in plot.y_ticks}
    assert anchored.y == tick["25 %"]
    assert uniform.y == uniform.top == tick["100 %"]
    assert anchored.top < anchored.y < anchored.bottom < tick["0 %"]
    line = [tuple(map(float, point.split(","))) for point in plot.theory.split()]
    assert (len(line), line[0], line[-1]) == (101, (0.0, plot.inner), (1000.0, 0.0))
    assert line[70][1] == pytest.approx(plot.inner * (1 - 0.5645), abs=0.02)  # 14 bands of 8 at 0.7
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)
    assert anchored.note == "similarity 0.65 to 0.7: 25.0 % of 455 pairs (20.0 % to 30.0 %), theory 46.8 %"
    assert plot.summary.startswith(
        "Share of pairs that share an LSH bucket, by true similarity; anchored sample: similarity"
    )
    assert plot.summary.endswith(
        "uniform sample: similarity 0.65 to 0.7: 100.0 % of 455 pairs (90.0 % to 100.0 %), theory 46.8 %"
    )


def test_without_bands_there_is_no_theory_and_without_pairs_no_plot() -> None:
    point = MeasuredBin(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3, None)
    plot = curve_plot({"anchored": [], "uniform": [point]}, 0.7, None)
    assert plot is not None
    assert (plot.theory, plot.samples, plot.points[0].note) == ("", ("uniform",), "similarity 1: 100.0 % of 3 pairs")
    assert curve_plot({"anchored": [], "uniform": []}, 0.7, (14, 8)) is None
    assert band_probability(0.7, 14, 8) == pytest.approx(0.5645, abs=1e-5)


def test_the_curve_is_described_and_the_page_holds_it(run: Store) -> None:
    page = page_of(run)
    assert (
        'aria-label="Share of pairs that share an LSH bucket, by true similarity; anchored sample: similarity 0.2 to'
        in page
    )
    assert page.count('class="measured accent"') == 3
    assert page.count('class="measured"') == 1
    assert "14 bands of 8" in words_of(page)


# ----------------------------------------------------------------------------------------------------------- repeats


def test_passages_cut_by_repeats(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    add_repeats(run)
    facts = collect_facts(run)
    result = repeats(facts)
    assert result is not None
    assert [(row.kind, row.documents, row.passages, row.chars) for row in result.kinds] == [
        ("line", 4, 12, 500),
        (SCRIPT, 1, 2, 150),
    ]
    assert (result.documents, result.chars, result.dropped) == (5, 650, 2)
    reasons = {**REASONS, REPEATS.name: REPEATS.reasons}
    last = funnel_rows(facts, reasons)[-1]
    assert (last.name, last.documents, last.chars) == ("repeats", 18, 15_555)
    drops = drops_by_rule(facts, reasons)
    counted = {row.name: (row.count, row.chars) for rows in drops.values() for row in rows if row.count}
    assert counted["quality/gopher_short_doc"] == (7, 6 * 90 + 900)  # six before, one after its passages were cut
    assert counted["repeats/nothing_left"] == (1, 900)
    assert "repeats/dropped_before" not in counted
    claims = {check.claim: (check.left, check.right) for check in checks(facts)}
    assert claims["survivors = documents searched for repeats"] == (20, 20)
    assert set(draw_samples(facts).by_rule) >= {"repeats/nothing_left", "dedup/near_duplicate"}
    page = page_of(run)
    assert (
        "650 characters were cut from 5 documents; 2 of these documents were dropped, since the rest failed a rule."
        in words_of(page)
    )
    assert "line 500 76.9 % 12 4" in words_of(page)
    assert page.lower().count("<script") == 1  # the script of the page itself
