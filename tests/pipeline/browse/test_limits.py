"""Limits tried on the sample: equal to a full evaluation, to `penstock whatif`, and honest about their errors."""

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jobs.recipe import deciding_models, stored_recipe
from jobs.verbs.browse import open_run_of
from pipeline.browse import limits, sample
from pipeline.browse.limits import LimitsLoader, limits_answer, open_limits, parse_settings, sliders_of, try_limits
from pipeline.browse.rows import find_position
from pipeline.browse.sample import SampleProgress
from pipeline.inspect.whatif import KEPT_VERDICT, predict
from schemas.errors import ConfigError, ContractError
from schemas.manifest import RunFile, read_run, write_run
from tests.support.browse_run import LATIN, NO_TEXT, PAGES, SHORT_WORDS, identifier, make_browse_run
from tests.support.report_run import make_run

MEASURED = PAGES - 1  # all but the page without text


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> limits.RunLimits:
    """The limits of the tiny run, with all documents in the sample."""
    folder = tmp_path_factory.mktemp("limits") / "run"
    make_browse_run(folder)
    return open_limits(open_run_of(str(folder)), 1000, SampleProgress())


def slider(tried: limits.RunLimits, name: str) -> dict:
    """One slider by its id."""
    return next(item for item in sliders_of(tried)["sliders"] if item["id"] == name)


def test_the_sample_holds_every_document_with_signals(tried: limits.RunLimits) -> None:
    assert (tried.sample.batch.num_rows, tried.sample.population, tried.sample.is_exact) == (MEASURED, MEASURED, True)
    ids = tried.sample.batch.column("doc_id").to_pylist()
    assert {*ids} == {identifier(n) for n in range(PAGES) if n != NO_TEXT}
    assert [find_position(tried.run, id_) for id_ in ids] == [*tried.sample.positions]


def test_a_smaller_sample_is_the_start_of_a_larger_one(tried: limits.RunLimits) -> None:
    smaller = open_limits(tried.run, 7, SampleProgress()).sample
    assert smaller.batch.column("doc_id").to_pylist() == tried.sample.batch.column("doc_id").to_pylist()[:7]
    assert smaller.positions == tried.sample.positions[:7]
    assert not smaller.is_exact
    assert smaller.factor == MEASURED / 7


def test_a_slider_shows_the_limit_and_its_histogram(tried: limits.RunLimits) -> None:
    words = slider(tried, "quality.min_words")
    assert (words["rule"], words["side"], words["whole"], words["limit"]) == (
        "quality/gopher_short_doc",
        "min",
        True,
        50,
    )
    assert (words["dropped"], words["broken"], words["compared"]) == (12, 12, MEASURED)
    totals = {kind: sum(item[kind] for item in words["bins"]) for kind in ("kept", "here", "other")}
    assert totals == {"kept": MEASURED - 13, "here": 12, "other": 1}
    assert words["axis"]["low"] == 0
    assert words["bins"][0]["low"] == 0
    assert words["bins"][-1]["high"] == pytest.approx(words["axis"]["high"])
    assert sliders_of(tried)["sliders"][0]["id"] == "quality.min_words"
    assert (words["column_unit"], words["meaning"]) == ("words", "too few words")


@pytest.mark.parametrize(("low", "high", "knee"), [(0.0, 1.0, None), (2.0, 5000.0, 4.5)])
def test_an_axis_maps_its_edges_to_equal_positions(low: float, high: float, knee: float | None) -> None:
    axis = limits.SliderAxis(low, high, knee)
    edges = np.array(axis.edges(8))
    assert axis.positions(edges) == pytest.approx(np.linspace(0, 1, 9), abs=1e-9)
    assert (edges[0], edges[-1]) == pytest.approx((low, high))


def test_a_moved_limit_keeps_what_it_compares(tried: limits.RunLimits) -> None:
    overrides = parse_settings(tried, {"quality.min_words": 35.0, "quality.max_lorem_ipsum": 1})
    assert overrides == ["quality.min_words=35", "quality.max_lorem_ipsum=1"]
    answer = limits_answer(tried, overrides)
    before, after = (answer["totals"][name] for name in ("before", "after"))
    short = [n for n in SHORT_WORDS if 22 + n >= 35]
    assert (before["documents"], after["documents"]) == (MEASURED - 13, MEASURED - 13 + len(short) + 1)
    kept = {item["doc"] for item in answer["newly_kept"]}
    assert kept == {identifier(n).hex() for n in (*short, LATIN)}
    assert answer["newly_dropped"] == []
    assert answer["by_rule"] == [
        {"name": "quality/gopher_short_doc", "before": 12, "after": 12 - len(short)},
        {"name": "quality/c4_lorem_ipsum", "before": 1, "after": 0},
    ]
    assert [(row["name"], row["after"]["documents"]) for row in answer["by_language"]] == [("en", after["documents"])]
    assert set(answer["totals"]["error"].values()) == {0}
    assert after["tokens"] is None
    assert answer["command"] == (
        f"penstock whatif {tried.run.address} --set quality.min_words=35 --set quality.max_lorem_ipsum=1"
    )


def test_an_estimate_has_its_error(tried: limits.RunLimits) -> None:
    some = open_limits(tried.run, 20, SampleProgress())
    totals = limits_answer(some, ["quality.min_words=0"])["totals"]
    cells = try_limits(some, [])
    share = sum(cell.documents for cell in cells if cell.before == KEPT_VERDICT) / 20
    assert totals["before"]["documents"] == round(share * MEASURED)
    after = sum(cell.documents for cell in try_limits(some, ["quality.min_words=0"]) if cell.after == KEPT_VERDICT) / 20
    deviation = math.sqrt(after * (1 - after) * 20 / 19)
    expected = math.ceil(1.959964 * MEASURED * math.sqrt((1 - 20 / MEASURED) / 20) * deviation)
    assert totals["error"]["documents"] == expected > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quality.min_wordz": 1}, "settings: expected limits of this run, got 'quality.min_wordz'"),
        ({"quality.min_words": "1"}, "quality.min_words: expected a finite number, got '1'"),
        ({"quality.min_words": math.nan}, "quality.min_words: expected a finite number, got 'nan'"),
        ({"quality.min_words": 10**400}, "quality.min_words: expected a finite number, got '1000000"),
        ({"quality.min_words": True}, "expected a finite number, got 'True'"),
        ([], "settings: expected an object of limits, got list"),
    ],
)
def test_wrong_settings_are_explained(tried: limits.RunLimits, settings: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_settings(tried, settings)


def test_a_limit_out_of_range_is_the_message_of_the_recipe(tried: limits.RunLimits) -> None:
    with pytest.raises(ConfigError, match=r"toxicity\.max_word_share: Input should be less than or equal to 1, got 7"):
        limits_answer(tried, parse_settings(tried, {"toxicity.max_word_share": 7}))


def test_runs_that_cannot_be_tried_are_explained(tmp_path: Path) -> None:
    store = make_browse_run(tmp_path / "run", "verdicts")
    state = read_run(store)
    changed = state.recipe | {"quality": {"min_words": 20}}
    write_run(store, RunFile(tables=state.tables, recipe=changed))
    with pytest.raises(
        ContractError, match="expected verdicts by the limits of the recipe, got other limits of quality"
    ):
        open_limits(open_run_of(store.uri), 9, SampleProgress())
    with pytest.raises(ConfigError, match="expected a run folder, got a folder without a recipe"):
        open_limits(open_run_of(make_run(tmp_path / "bare", "dedup").uri), 9, SampleProgress())


def test_a_run_of_many_parts_is_read_in_part(tried: limits.RunLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "MAX_ROWS_READ", 10)
    progress = SampleProgress()
    some = open_limits(tried.run, 1000, progress).sample
    assert (some.parts_read, progress.rows_read, progress.rows_total) == (1, 10, 10)
    assert len({position.part for position in some.positions}) == 1
    assert some.population == MEASURED


def wait_for(loader: LimitsLoader) -> limits.RunLimits:
    """The limits, once the sample is read."""
    while (value := loader.get()) is None:
        pass
    return value


def test_the_loader_reads_once_and_repeats_errors(tried: limits.RunLimits, tmp_path: Path) -> None:
    loader = LimitsLoader(tried.run)
    value = wait_for(loader)
    assert loader.get() is value
    broken = LimitsLoader(open_run_of(make_run(tmp_path / "bare", "dedup").uri))
    for _ in range(2):
        with pytest.raises(ConfigError, match="without a recipe"):
            wait_for(broken)


TRIED = [
    "quality.min_words=20",
    "toxicity.max_word_share=0.5",
    "quality.max_dup_line_chars=0.2",
    "quality.min_sentences=9",
]


@pytest.mark.spark
@pytest.mark.parametrize("overrides", [[], TRIED])
def test_the_answer_equals_the_what_if(spark, finished, overrides) -> None:
    tried = open_limits(open_run_of(finished.uri), 50_000, SampleProgress())
    assert tried.sample.is_exact
    wanted = stored_recipe(finished, overrides)
    predicted = predict(spark, finished, wanted, deciding_models(wanted))
    checked: Counter[tuple[str, str]] = Counter()
    expected: Counter[tuple[str, str]] = Counter()
    chars: Counter[str] = Counter()
    for cell in try_limits(tried, overrides):
        checked[cell.after, cell.language] += cell.documents
        chars[cell.after] += cell.chars
    for cell in predicted.cells:
        # Documents that deduplication or the mix drops have passed all checks.
        after = KEPT_VERDICT if cell.after.startswith(("dedup/", "tokens/")) else cell.after
        expected[after, cell.language] += cell.documents
        chars[after] -= cell.chars
    assert checked == expected
    assert set(chars.values()) == {0}
    assert sum(count for (after, _), count in checked.items() if after == KEPT_VERDICT) > 100
    tokens = sum(cell.tokens for cell in predicted.cells)
    assert int(np.nansum(tried.sample.tokens)) == tokens > 0
