"""Histograms in the report: axes on which every limit divides its documents correctly, and the sections with them."""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decontaminate.stage import CANARIES, DOCUMENTS, ITEMS, NGRAMS, SETS, WHOLE_ITEMS
from pipeline.engine.rules import COARSE, lower_edge
from pipeline.perplexity.stage import HEAD_CUT, MIDDLE_CUT
from pipeline.report.charts import BIN_OF_ZERO, Axis, bin_of, labels, make_axis
from pipeline.report.facts import RunFacts, collect_facts
from pipeline.report.funnel import drops_by_rule
from pipeline.report.page import write_report
from pipeline.report.signals import (
    MAX_ROWS,
    MIN_BAR_HEIGHT,
    Chart,
    Histogram,
    bucket_chart,
    buckets,
    charts,
    make_spread,
    note,
)
from pipeline.report.tallies import evaluation_sets
from tests.support.report_run import REASONS, bins, judged, limit, make_run, words_of


def counts(*values: float) -> dict[int, int]:
    """Return the coarse bins of some values."""
    return {int(key): count for key, count in bins(values).items()}


def edges(axis: Axis) -> list[tuple[float, float]]:
    """Return the first value of each slot, and the first one after it."""
    return [(slot.low, slot.high) for slot in axis.slots]


# --------------------------------------------------------------------------------------------------------------- axis


def test_whole_numbers_have_adjacent_slots() -> None:
    axis = make_axis(counts(0, 1, 6), [], whole=True)
    assert edges(axis) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 10)]
    assert [(slot.left, slot.right) for slot in axis.slots][:3] == [(0, 44), (60, 177.5), (177.5, 295)]
    assert axis.slots[-1].right == 1000


def test_octaves_are_equally_wide_and_few_bins_are_not_too_wide() -> None:
    axis = make_axis(counts(0.5, 1.0), [], whole=False)
    assert edges(axis) == [
        *((0.3125, 0.375), (0.375, 0.4375), (0.4375, 0.5), (0.5, 0.625)),
        *((0.625, 0.75), (0.75, 0.875), (0.875, 1.0), (1.0, 1.25)),
    ]
    assert [slot.left for slot in axis.slots] == [0, 125, 250, 375, 500, 625, 750, 875]


@pytest.mark.parametrize(
    ("value", "position"), [(0.1, 0), (0.3125, 0), (0.5, 375), (0.5625, 437.5), (1.0, 875), (1.25, 1000), (9, 1000)]
)
def test_the_position_of_a_value_is_proportional_within_its_bin(value: float, position: float) -> None:
    assert make_axis(counts(0.5, 1.0), [], whole=False).place(value) == position


@pytest.mark.parametrize(
    ("side", "value", "position"),
    [
        ("max", 0, 60),  # between the zeros and the ones
        ("max", 2, 295),
        ("max", 2.5, 295),
        ("min", 0, 0),
        ("min", 2, 177.5),
        ("min", 1.5, 177.5),
        ("max", 8, 60 + 7.5 * 117.5),  # 8 and 9 share a slot
    ],
)
def test_a_limit_lies_between_the_whole_numbers_that_it_divides(side: Any, value: float, position: float) -> None:
    assert make_axis(counts(0, 1, 6), [], whole=True).cut(value, side) == position


def test_a_value_equal_to_the_limit_is_kept() -> None:
    axis = make_axis(counts(0.5, 1.0), [], whole=False)
    assert axis.cut(0.5, "min") == 375
    assert axis.cut(0.5, "max") == 375 + 0.2 * 125  # values equal to the lower edge are in this bin
    assert axis.cut(0.5625, "max") == axis.cut(0.5625, "min") == 437.5
    zeros = make_axis(counts(0.0, 0.5), [], whole=False)
    assert zeros.slots[0].key == BIN_OF_ZERO
    assert (zeros.cut(0.0, "min"), zeros.cut(0.0, "max")) == (0, 60)


def test_limits_are_on_the_axis_even_without_documents_there() -> None:
    axis = make_axis(counts(300.0, 310.0), [50.0, 100_000.0], whole=True)
    assert axis.slots[0].low <= 50 < axis.slots[0].high
    assert axis.slots[-1].low <= 100_000 < axis.slots[-1].high


def test_a_stray_value_does_not_stretch_the_axis_but_a_limit_does() -> None:
    stray = {bin_of(1e-30): 1, bin_of(1.0): 1000, bin_of(3e38): 2}
    axis = make_axis(stray, [], whole=False)
    assert len(axis.slots) == 72
    assert axis.slots[0].low <= 1.0 <= axis.slots[-1].low
    assert axis.slot(bin_of(1e-30)) == axis.slots[0]
    assert axis.slot(bin_of(3e38)) == axis.slots[-1]
    assert make_axis(stray, [1e-30], whole=False).slots[0].key == bin_of(1e-30)


def test_a_signal_with_both_signs_has_zero_in_the_middle() -> None:
    axis = make_axis(counts(-2.0, -0.001, 0.0, 3.0), [], whole=False)
    lows = [slot.low for slot in axis.slots]
    assert lows == sorted(lows)
    assert axis.slots[0].low <= -2 < axis.slots[0].high
    zero = axis.slot(BIN_OF_ZERO)
    before, after = (axis.slots[axis.slots.index(zero) + step] for step in (-1, 1))
    assert (zero.key, zero.left - before.right, after.left - zero.right) == (BIN_OF_ZERO, 16, 16)
    assert (
        max(sum(slot.key < BIN_OF_ZERO for slot in axis.slots), sum(slot.key > BIN_OF_ZERO for slot in axis.slots))
        <= 24
    )
    assert [label.text for label in labels(axis)] == ["-1", "-0.3", "-0.1", "0", "2"]


def test_infinity_and_an_axis_of_zeros_can_be_drawn() -> None:
    assert [label.text for label in labels(make_axis(counts(0.0), [], whole=False))] == ["0"]
    assert [label.text for label in labels(make_axis(counts(0), [0], whole=True))] == [
        "0",
        "1",
        "2",
        "3",
        "5",
        "7",
        "10",
    ]
    endless = make_axis({bin_of(math.inf): 3, bin_of(5.0): 1}, [], whole=False)
    assert endless.slot(bin_of(math.inf)) == endless.slots[-1]
    assert labels(endless) != []


@pytest.mark.parametrize(
    ("values", "whole", "expected"),
    [
        ((1, 20_000), True, ["1", "10", "100", "1 k", "10 k"]),
        ((0.0, 0.0105, 0.33), False, ["0", "0.02", "0.05", "0.1", "0.2"]),
        ((0.35, 0.99), False, ["0.3", "0.5", "0.7", "1"]),
        ((1e-9, 1e-5, 1.0), False, ["1e-5", "1e-4", "0.001", "0.01", "0.1", "1"]),
    ],
)
def test_labels_are_round_and_do_not_touch(values: tuple[float, ...], whole: bool, expected: list[str]) -> None:
    shown = labels(make_axis(counts(*values), [], whole))
    assert [label.text for label in shown] == expected
    assert all(left.end < right.start for left, right in pairwise(shown))


VALUES = st.floats(-1e9, 1e9, width=32).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(st.lists(VALUES, min_size=1, max_size=30), st.lists(VALUES, max_size=3), st.booleans())
def test_positions_increase_with_their_values(values: list[float], limits: list[float], whole: bool) -> None:
    values = [float(round(value)) for value in values] if whole else values
    axis = make_axis(counts(*values), limits, whole)
    assert axis.slots[0].left == 0
    assert axis.slots[-1].right == pytest.approx(1000) or [slot.key for slot in axis.slots] == [BIN_OF_ZERO]
    positions = [axis.place(value) for value in sorted(values)]
    assert positions == sorted(positions)
    assert all(axis.cut(limit, "min") <= axis.cut(limit, "max") for limit in limits)
    for value in values:
        slot = axis.slot(bin_of(value))
        assert slot.low <= value < slot.high or slot.key == BIN_OF_ZERO or slot.key != bin_of(value)


# ------------------------------------------------------------------------------------------------------------- spread


def test_bar_heights_are_cube_roots_and_change_color_at_the_limit() -> None:
    spread = make_spread([Histogram("en", counts(*[0] * 8, 1), (0,), 1)], "max", True, ("kept", "beyond"))
    (row,) = spread.rows
    assert spread.height == 58
    assert row.parts == (("kept", "M0 58V3H44V58"), ("beyond", "M60 58V30.5H178V58"))  # 55 px, and half of it
    assert row.cuts == ("60",)
    assert spread.grid.startswith("M22 0V58M119 0V58")


def test_a_bin_that_the_limit_crosses_is_divided_by_the_counts() -> None:
    values = [0.5] * 8 + [1.0] * 64
    exact = Histogram("en", counts(*values), (0.5625,), 65)
    (row,) = make_spread([exact], "max", False, ("kept", "beyond")).rows
    eight, first = (58 - 55 * (number / 64) ** (1 / 3) for number in (7, 1))
    assert row.parts == (
        ("kept", f"M375 58V{eight:.1f}H438V58"),
        ("beyond", f"M438 58V{first:.1f}H500V58M875 58V3H1000V58"),
    )
    all_above = Histogram("en", counts(*values), (0.5625,), 72)
    (row,) = make_spread([all_above], "max", False, ("kept", "beyond")).rows
    assert [name for name, _ in row.parts] == ["beyond"]
    (row,) = make_spread([Histogram("en", counts(*values), (0.5625,))], "max", False, ("kept", "beyond")).rows
    assert row.parts[0] == ("kept", "M375 58V30.5H438V58")  # not counted: both sides as high as the bin


def test_the_smallest_bin_is_visible_and_rows_without_a_limit_are_neutral() -> None:
    rows = [Histogram("en", counts(*[0] * 1_000_000, 9), (5,), 1), Histogram("other", counts(0))]
    first, second = make_spread(rows, "max", True, ("kept", "beyond")).rows
    assert f"V{42 - MIN_BAR_HEIGHT:.1f}H" in first.parts[1][1]
    assert ([name for name, _ in second.parts], second.cuts) == (["neutral"], ())


def test_the_most_frequent_languages_come_first_and_the_others_last() -> None:
    sizes = {"other": 90, "a": 1, "b": 7, "c": 5, "d": 5, "e": 3, "f": 2}
    spread = make_spread([Histogram(name, counts(*[1] * size)) for name, size in sizes.items()], "max", True, ("kept",))
    assert [row.measured.language for row in spread.rows] == ["b", "c", "d", "e", "f"]
    assert [row.measured.language for row in spread.more] == ["a", "other"]
    assert (len(spread.rows), spread.height) == (MAX_ROWS, 28)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (
            Histogram("en", counts(*[0] * 9, 4), (3,), 1),
            "10 documents, at least half of them at 0; 1 (10.0 %) beyond the",
        ),
        (Histogram("ja", counts(100, 200, 300, 400)), "4 documents, at least half of them from 96 to 320"),
        (Histogram("de", counts(7.0)), "1 document, at least half of them from 7 to 8"),
        (Histogram("fr", {bin_of(math.inf): 2}), "2 documents, at least half of them from ∞ to ∞"),
    ],
)
def test_the_description_of_a_row(measured: Histogram, expected: str) -> None:
    assert note(measured).startswith(f"{measured.language}: {expected}")


def test_bins_are_those_of_the_manifest() -> None:
    assert (lower_edge(bin_of(50.0), COARSE), lower_edge(bin_of(50.0) + 1, COARSE)) == (48, 56)


# ------------------------------------------------------------------------------------------------------------- charts


def facts_of(folder: Path, **figures: dict[str, Any]) -> RunFacts:
    """Return the facts of a run up to its verdicts, with these figures of its tables."""
    return collect_facts(make_run(folder / "run", "verdicts", figures=figures))


def charts_of(facts: RunFacts) -> dict[str, list[Chart]]:
    """Return the charts of a run."""
    return charts(facts, drops_by_rule(facts, REASONS))


def test_every_check_has_a_chart_and_most_drops_come_first(tmp_path: Path) -> None:
    by_stage = charts_of(facts_of(tmp_path, verdicts=judged()))
    assert [(chart.name, chart.dropped) for rows in by_stage.values() for chart in rows] == [
        ("quality/gopher_short_doc", 6),
        ("quality/c4_lorem_ipsum", 1),
        ("quality/gopher_long_doc", 0),
        ("toxicity/toxic_word_share", 3),
    ]
    short, lorem, long, toxic = (chart for rows in by_stage.values() for chart in rows)
    assert (short.side, short.unit, short.anchor) == ("min", "words", "rule-quality-gopher_short_doc")
    assert short.column_meaning == "words with at least one character that is not punctuation"
    assert (toxic.unit, toxic.setting, toxic.meaning[:9]) == ("", "toxicity.max_word_share", "too large")
    shown = [(row.measured.language, row.measured.limit, row.measured.beyond) for row in short.spread.rows]
    assert shown == [("en", 50, 6), ("ja", 30, 0)]
    assert [name for name, _ in short.spread.rows[0].parts] == ["beyond", "kept"]
    assert [name for name, _ in short.spread.rows[1].parts] == ["kept"]
    assert short.spread.rows[0].measured.share == pytest.approx(6 / 32)
    assert [row.cuts for row in lorem.spread.rows] == [("60",), ("60",)]
    assert [name for name, _ in long.spread.rows[0].parts] == ["kept"]


def test_the_other_languages_have_a_limit_only_if_it_is_the_same(tmp_path: Path) -> None:
    spread = {"en": bins([1, 2]), "other": bins([1, 2, 3])}
    same = limit("quality.min_words", "gopher_num_words", every=2, en=1, de=2)
    other = limit("quality.min_words", "gopher_num_words", every=2, en=1, de=3)
    names = ("quality/gopher_short_doc", "quality/gopher_long_doc")
    figures = {
        "limits": dict(zip(names, (same, other))),
        "distributions": dict.fromkeys(names, spread),
        "beyond": {name: {"en": 0, "de": 1, "nl": 1} for name in names},
    }
    rows_of = {chart.name: chart.spread.rows for chart in charts_of(facts_of(tmp_path, verdicts=figures))["quality"]}
    assert [row.measured.limits for row in rows_of[names[0]]] == [(1,), (2,)]
    assert [row.measured.limits for row in rows_of[names[1]]] == [(1,), ()]
    assert [row.measured.beyond for row in rows_of[names[0]]] == [0, 2]


def test_the_number_beyond_a_limit_is_unknown_if_it_was_not_counted(tmp_path: Path) -> None:
    figures = {name: value for name, value in judged().items() if name != "beyond"}
    facts = facts_of(tmp_path, verdicts=figures)
    (row, _) = charts_of(facts)["quality"][0].spread.rows
    assert (row.measured.beyond, row.measured.share) == (None, None)
    assert row.note == "en: 32 documents, at least half of them from 256 to 320"
    assert "en 50 – – ja 30 – –" in words_of(Path(write_report(facts.run, None)).read_text())


def test_a_rule_with_two_checks_has_two_charts(tmp_path: Path) -> None:
    names = ("quality/gopher_short_doc", "quality/gopher_short_doc 2")
    check = limit("classifier.min_score", "classifier_scores", every=0.5)
    figures = {
        "limits": dict.fromkeys(names, check),
        "distributions": {name: {"en": bins([0.25, 0.75])} for name in names},
    }
    first, second = charts_of(facts_of(tmp_path, verdicts=figures))["quality"]
    assert [first.rule, second.rule] == ["gopher_short_doc", "gopher_short_doc 2"]
    assert (second.dropped, second.counted_as, second.unit) == (6, "quality/gopher_short_doc", "")
    assert second.column_meaning == "probability of the good class, by classifier"
    assert first.anchor != second.anchor


def perplexities() -> dict[str, Any]:
    """Return the perplexity figures of a run."""
    return {
        "cutoffs": {HEAD_CUT: {"en": 200.0}, MIDDLE_CUT: {"en": 400.0}},
        "buckets": {"en": {"head": 10, "middle": 10, "tail": 12}, "ja": {"all": 5}},
        "measures": {"perplexity": {"en": bins([100] * 10 + [300] * 10 + [900] * 12)}},
    }


def test_buckets_of_a_language_with_its_cut_offs(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, verdicts=perplexities())
    english, japanese = buckets(facts)
    assert english.counts == {"head": 10, "middle": 10, "tail": 12, "all": 0}
    assert (english.documents, english.head_cut, english.middle_cut) == (32, 200, 400)
    assert (japanese.documents, japanese.counts["all"], japanese.head_cut) == (5, 5, None)
    chart = bucket_chart(facts)
    assert chart is not None
    (row,) = chart.spread.rows
    assert [name for name, _ in row.parts] == ["kept", "part", "lost"]
    assert len(row.cuts) == 2
    text = words_of(Path(write_report(facts.run, None)).read_text())
    assert "en 10 10 12 0 200 400 ja 0 0 0 5 – –" in text


def test_a_run_without_a_language_model_has_no_buckets(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, verdicts={"buckets": {"en": {"all": 32}}, "cutoffs": {}})
    assert (buckets(facts), bucket_chart(facts)) == ([], None)


def contamination() -> dict[str, Any]:
    """Return the figures of a run about evaluation sets and mixed-language documents."""
    return {
        SETS: {"quiz": {"items": 8, "indexed": 6, "ngrams": 100}, "sums": {"items": 4, "indexed": 4, "ngrams": 50}},
        DOCUMENTS: {"quiz": 3},
        NGRAMS: {"quiz": 41},
        ITEMS: {"quiz:1": 2, "quiz:7": 1},
        WHOLE_ITEMS: {"quiz:7": 1},
        CANARIES: {"documents": 1, "occurrences": 2},
        "mixed_languages": {"en+de": 3, "ja+en": 1},
    }


def test_the_hits_of_every_evaluation_set(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, documents=contamination())
    quiz, sums = evaluation_sets(facts)
    assert (quiz.name, quiz.items, quiz.searched, quiz.found, quiz.mostly_found) == ("quiz", 8, 6, 2, 1)
    assert (quiz.documents, quiz.ngrams, quiz.share) == (3, 41, 0.25)
    assert (sums.documents, sums.ngrams, sums.found, sums.share) == (0, 0, 0, 0.0)
    text = words_of(Path(write_report(facts.run, None)).read_text())
    assert "quiz 3 41 8 6 2 25.0 % 1 sums 0 0 4 4 0 0.0 % 0" in text
    assert "Canary strings occur 2 times in 1 document." in text
    assert "en + de 3 75.0 % ja + en 1 25.0 %" in text


# --------------------------------------------------------------------------------------------------------------- page


def test_the_cards_describe_their_drawings(tmp_path: Path) -> None:
    page = Path(write_report(facts_of(tmp_path, verdicts=judged()).run, None)).read_text()
    text = words_of(page)
    for expected in (
        "gopher_short_doc 6 dropped too few words Language Distribution at least beyond share",
        "share en 50 6 18.8 % ja 30 0 0.0 %",
        "gopher_num_words : words with at least one character that is not punctuation; limit quality.min_words",
        "toxic_word_share 3 dropped",
        "1 more rule dropped nothing. gopher_long_doc 0 dropped",
    ):
        assert expected in text
    assert (
        "<title>en: 32 documents, at least half of them from 256 to 320; 6 (18.8 %) beyond the limit of 50</title>"
        in page
    )
    assert '<a class="plain" href="#rule-quality-gopher_short_doc"><code>gopher_<wbr>short_<wbr>doc</code></a>' in page
    quality, toxicity = page.index('id="signals"'), page.index('id="toxicity"')
    assert quality < page.index('id="rule-quality-gopher_short_doc"') < toxicity
    assert page.index('id="rule-toxicity-toxic_word_share"') > toxicity


def test_sections_exist_only_if_the_run_has_their_data(tmp_path: Path) -> None:
    optional = ("signals", "perplexity", "classifiers", "contamination")
    names = ("classifier/classifier_score", "perplexity/perplexity_tail", "decontaminate/contaminated")
    check = limit("classifier.min_score", "classifier_scores", every=0.5)
    checked = {"limits": dict.fromkeys(names, check), "distributions": {name: {"en": bins([0.25])} for name in names}}
    runs: dict[str, tuple[dict[str, Any], set[str]]] = {
        "bare": ({}, set()),
        "judged": ({"verdicts": judged()}, {"signals"}),
        "perplexity": ({"verdicts": perplexities()}, {"perplexity"}),
        "sets": ({"documents": contamination()}, {"contamination"}),
        "checks": ({"verdicts": checked}, {"perplexity", "classifiers", "contamination"}),
    }
    for name, (figures, expected) in runs.items():
        page = Path(write_report(facts_of(tmp_path / name, **figures).run, None)).read_text()
        sections = {section for section in re.findall(r'<section id="(\w+)"', page) if section in optional}
        assert (name, sections) == (name, expected)
        assert {link for link in re.findall(r'<li><a href="#(\w+)"', page) if link in optional} == expected


def test_a_hostile_language_is_escaped(tmp_path: Path) -> None:
    code = '"><img src=x onerror="document.title=1">'
    figures = {"distributions": {"quality/gopher_short_doc": {code: bins([4, 60])}}, "limits": judged()["limits"]}
    page = Path(write_report(facts_of(tmp_path, verdicts=figures).run, None)).read_text()
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=&#34;document.title=1") == 2  # heading of its row, title of its drawing
