"""The verdicts pass: cut-offs from exact histograms at any partitioning, books by rule, what the report draws."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import recipe_sections
from pipeline.engine.results import SUMMED
from pipeline.engine.rules import COARSE, FINE, bins_of, lower_edge
from pipeline.engine.stage import Quantile
from pipeline.stages import CHECKED, DOCUMENT_COLUMNS
from pipeline.steps.verdicts import (
    SHOWN_LANGUAGES,
    VerdictsTask,
    checks_of,
    cutoffs_of,
    fold,
    histograms_of_part,
    limits_of,
    verdicts_part,
)
from schemas.overrides import load_recipe
from schemas.storage import Store
from tests.support.checked_paths import written_part
from tests.support.step_run import added_up


def recipe(*overrides):
    return load_recipe({"source": {"paths": ["x.warc.gz"]}}, overrides, recipe_sections(), "test")


def document(number, **columns):
    return {"doc_id": bytes([number]) * 16, "source": "web", "language": "en", "body_chars": 10} | columns


@pytest.fixture
def task(tmp_path):
    """A function that writes documents as one part and gives the task that judges it."""

    def make(rows, *overrides):
        table = pa.Table.from_pylist(rows, DOCUMENT_COLUMNS)
        pq.write_table(table, tmp_path / "documents.parquet")
        part = written_part(0, {"documents": Store(str(tmp_path))}, {"documents": "documents.parquet"})
        return VerdictsTask(part, CHECKED, recipe(*overrides), {}, {}, Store(str(tmp_path / "verdicts")))

    return make


def judged(task):
    answer = verdicts_part(task, False)
    path = task.folder.path(answer.files["verdicts"].path)
    return answer, pq.read_table(path).to_pylist()


def test_each_document_gets_its_verdict_and_the_books_count_it(task):
    rows = [
        document(1, gopher_num_words=60, body_chars=300),
        document(2, gopher_num_words=40, body_chars=200),
        document(3, toxic_word_share=0.02, gopher_num_words=60, body_chars=5, source="news"),
        document(4, drop_stage="language", drop_rule="language_not_wanted", body_chars=None),
    ]
    answer, verdicts = judged(task(rows))
    assert [(row["doc_id"][0], row["drop_stage"], row["drop_rule"]) for row in verdicts] == [
        (1, None, None),
        (2, "quality", "gopher_short_doc"),
        (3, "toxicity", "toxic_word_share"),
    ]
    assert (verdicts[1]["drop_value"], verdicts[1]["drop_limit"]) == (40, 50)
    counts = answer.counts.model_dump()
    assert (counts["rows_in"], counts["rows_kept"]) == (3, 1)
    assert {name: number for name, number in counts["dropped"].items() if number} == {
        "quality/gopher_short_doc": 1,
        "toxicity/toxic_word_share": 1,
    }
    declared = {f"{stage.name}/{reason}" for stage in CHECKED for reason in stage.verdicts}
    assert set(counts["dropped"]) == declared
    figures = answer.figures
    assert (figures["kept_chars"], figures["kept_sources"], figures["kept_source_chars"]) == (
        300,
        {"web": 1},
        {"web": 300},
    )
    assert figures["dropped_chars"] == {"quality/gopher_short_doc": 200, "toxicity/toxic_word_share": 5}


def test_where_nothing_is_checked_everything_is_kept(task):
    answer, verdicts = judged(task([document(1), document(2)], "quality.rules=[]", "toxicity.wordlists={}"))
    assert answer.counts.rows_kept == len(verdicts) == 2
    assert answer.figures["distributions"] == {}


def test_distributions_count_what_was_compared(task):
    answer, _ = judged(task([document(n, gopher_num_words=n * 30) for n in (1, 2, 3)] + [document(9)]))
    found = answer.figures["distributions"]["quality/gopher_short_doc"]
    assert list(found) == ["en"]
    edges = sorted((lower_edge(int(key), COARSE), count) for key, count in found["en"].items())
    assert [count for _, count in edges] == [1, 1, 1]
    assert [edge for edge, _ in edges] == [28, 56, 80]


def test_small_languages_are_shown_together():
    counts = {f"l{n:02}": {"5": n} for n in range(1, SHOWN_LANGUAGES + 3)}
    folded = fold(counts)
    assert len(folded) == SHOWN_LANGUAGES + 1
    assert folded["other"] == {"5": 1 + 2}


def test_cutoffs_are_those_of_all_parts_together():
    wanted = [Quantile("head", "perplexity", 0.5), Quantile("tail", "perplexity", 0.9)]
    (low,), (high,) = (bins_of(np.array([value]), FINE).tolist() for value in (100.0, 200.0))
    parts = [
        {"head": {"en": {str(low): 1}}, "tail": {"en": {str(low): 3}}},
        {"head": {"en": {str(high): 3}, "de": {}}, "tail": {}},
    ]
    found = cutoffs_of(wanted, added_up(parts))
    assert found == cutoffs_of(wanted, added_up(parts[::-1]))
    assert found == {"head": {"en": lower_edge(high + 1, FINE)}, "tail": {"en": lower_edge(low + 1, FINE)}}


def test_a_stage_without_quantiles_asks_for_no_histogram(task):
    assert histograms_of_part(task([document(1)]), False) == {SUMMED: {"histograms": {}}, "rows": 1}


def test_limits_are_recorded_with_their_setting_and_side():
    limits = limits_of(checks_of(CHECKED, recipe("quality.min_words=30"), {}, {}))
    assert limits["quality/gopher_short_doc"]["setting"] == "quality.min_words"
    assert limits["quality/gopher_short_doc"]["side"] == "min"
    assert limits["quality/gopher_short_doc"]["limits"]["*"] == 30
    assert limits["toxicity/toxic_word_share"]["limits"] == {"*": 0.01}
