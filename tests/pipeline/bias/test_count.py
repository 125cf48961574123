"""Counts of the bias audit by hand: who reached a filter, whom it drops, and the same sums at any partitioning."""

import numpy as np
import pyarrow as pa

from pipeline.bias.count import COLUMNS, DROPPED, EVERYONE, LENGTHS, REACHED, GroupCounter, rule_filters, stratum_of
from pipeline.engine.step import add_figures

ROWS = [
    (["a", "b"], "web", "en", 100),
    (["a"], "web", "en", 499),
    ([], "web", "en", 500),
    (None, "web", "en", 100),  # not measured: not counted
    (["b"], "web", None, None),
    (["b"], "books", "en", 100),
]


def batch(rows):
    kinds = (pa.list_(pa.string()), pa.string(), pa.string(), pa.int64())
    arrays = [pa.array(column, kind) for column, kind in zip(zip(*rows), kinds)]
    return pa.RecordBatch.from_arrays(arrays, list(COLUMNS))


def mask(*documents):
    found = np.zeros(len(ROWS), bool)
    found[list(documents)] = True
    return found


REACHING = ~mask(5)
FILTERS = rule_filters("quality", REACHING, {"short": mask(0, 3, 5), "long": mask(0, 2)})


def test_counts_by_filter_group_and_stratum():
    counter = GroupCounter()
    counter.add(batch(ROWS), FILTERS)
    short, middle, unknown = "web en 0", "web en 1", "web ? 0"
    assert counter.figures == {
        REACHED: {
            "quality": {
                EVERYONE: {short: 2, middle: 1, unknown: 1},
                "a": {short: 2},
                "b": {short: 1, unknown: 1},
            }
        },
        DROPPED: {
            "quality": {EVERYONE: {short: 1, middle: 1}, "a": {short: 1}, "b": {short: 1}},
            "quality/short": {EVERYONE: {short: 1}, "a": {short: 1}, "b": {short: 1}},
            "quality/long": {EVERYONE: {short: 1, middle: 1}, "a": {short: 1}, "b": {short: 1}},
        },
    }


def test_the_sum_over_batches_does_not_depend_on_their_borders():
    whole = GroupCounter()
    whole.add(batch(ROWS), FILTERS)
    parts = []
    for begin, end in ((0, 1), (1, 4), (4, 6)):
        counter = GroupCounter()
        cut = slice(begin, end)
        dropped = {"short": mask(0, 3, 5)[cut], "long": mask(0, 2)[cut]}
        counter.add(batch(ROWS[cut]), rule_filters("quality", REACHING[cut], dropped))
        parts.append(counter.figures)
    assert add_figures(add_figures(parts[0], parts[1]), parts[2]) == whole.figures


def test_a_stage_with_one_rule_is_counted_once():
    assert [each.name for each in rule_filters("toxicity", REACHING, {"toxic_words": mask(0)})] == [
        "toxicity/toxic_words"
    ]
    assert [each.name for each in FILTERS] == ["quality/short", "quality/long", "quality"]


def test_rows_of_a_stage():
    counter = GroupCounter()
    counter.add_row(["a"], "web en 0", "language", ("language", "language/language_uncertain"))
    counter.add_row([], "web en 0", "language", ())
    counter.add_row(None, "web en 0", "language", ("language",))
    assert counter.figures[REACHED] == {"language": {EVERYONE: {"web en 0": 2}, "a": {"web en 0": 1}}}
    assert counter.figures[DROPPED]["language/language_uncertain"] == {EVERYONE: {"web en 0": 1}, "a": {"web en 0": 1}}


def test_strata_at_the_limits_of_lengths():
    assert [stratum_of("web", "de", LENGTHS[0] + by) for by in (-1, 0)] == ["web de 0", "web de 1"]
    assert stratum_of("web", "de", LENGTHS[-1]) == f"web de {len(LENGTHS)}"
