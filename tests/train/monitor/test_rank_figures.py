"""The rule that names slow ranks, by hand on both sides of its limit, and the lines of ranks.jsonl."""

import json
from pathlib import Path

import pytest

from schemas.errors import ContractError
from schemas.paths import RANKS_NAME
from schemas.storage import Store
from train.monitor.rank_figures import RankFigures, SlowRank, read_ranks, slow_ranks


def figures(rank: int, compute: float, data: float = 0.0, stage: int = 0) -> RankFigures:
    """Return the figures of a rank; a step takes 2 s."""
    given = {"step": 10, "steps": 10, "rank": rank, "host": f"h{rank}", "device": "cpu", "stage": stage}
    return RankFigures(**given, step_seconds=2.0, data_seconds=data, compute_seconds=compute)


def test_computing_longer_than_the_median_is_named_from_the_limit_on() -> None:
    window = [figures(0, 1.0), figures(1, 1.0), figures(2, 1.5), figures(3, 1.49)]
    # Of four times the lower middle one counts.
    assert slow_ranks(window, 1.5) == [SlowRank(2, "h2", "compute", 1.5, pytest.approx(1 / 3))]
    assert slow_ranks(window, 1.51) == []
    assert [slow.rank for slow in slow_ranks(window, 1.4)] == [2, 3]


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    assert slow_ranks([figures(0, 3.0), figures(1, 1.0)], 2.0) == [
        SlowRank(0, "h0", "compute", 3.0, pytest.approx(2 / 3))
    ]
    assert slow_ranks([figures(0, 1.0)], 1.1) == []


def test_waiting_for_rows_makes_the_step_longer_by_what_others_do_not_wait() -> None:
    # Without the excess of 1 s the step would take 1 s: factor 2.
    window = [figures(0, 1.0, 0.25), figures(1, 1.0, 0.25), figures(2, 1.0, 1.25)]
    assert slow_ranks(window, 1.5) == [SlowRank(2, "h2", "data", 2.0, 0.5)]
    # If all wait for rows, none is slow.
    assert slow_ranks([figures(rank, 1.0, 1.9) for rank in range(3)], 1.1) == []


def test_stages_of_a_pipeline_are_compared_among_themselves() -> None:
    window = [figures(0, 0.1), figures(1, 0.1), figures(2, 5.0, stage=1), figures(3, 5.0, stage=1)]
    assert slow_ranks(window, 1.5) == []
    assert [slow.rank for slow in slow_ranks([*window, figures(4, 10.0, stage=1)], 1.5)] == [4]


def test_nothing_measured_is_no_alarm() -> None:
    assert slow_ranks([figures(0, 0.0), figures(1, 0.0)], 1.5) == []


def test_lines_come_back_with_four_digits_and_without_defaults(tmp_path: Path) -> None:
    line = figures(1, 0.123456).model_copy(update={"sent": {"send": 123456789}, "memory": 123456789})
    assert json.loads(line.line()) == {
        **{"step": 10, "steps": 10, "rank": 1, "host": "h1", "device": "cpu", "step_seconds": 2.0},
        **{"data_seconds": 0.0, "compute_seconds": 0.1235, "memory": 123456789, "sent": {"send": 123456789}},
    }
    run = Store(str(tmp_path))
    assert read_ranks(run) == []
    run.write_atomic(RANKS_NAME, line.line() + b"\n" + line.line()[:30])
    assert read_ranks(run) == [line.model_copy(update={"compute_seconds": 0.1235})]
    run.write_atomic(RANKS_NAME, b'{"step": 1}\n')
    with pytest.raises(ContractError, match=r"ranks\.jsonl, line 1: expected the figures of a rank"):
        read_ranks(run)
