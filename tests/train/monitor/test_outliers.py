"""Whom a spike is blamed on: excesses, levels of sources and outliers, computed by hand on both sides of each limit."""

import math

import pytest

from tests.train.monitor.test_events import METRICS
from train.monitor.guard import MIN_DEVIATION
from train.monitor.quarantine import (
    MAD_TO_DEVIATION,
    MAX_SHARE,
    OUTLIER,
    OwnLoss,
    SourceLevels,
    attribute_spike,
    excess_of,
    merge_parts,
)


def records(*losses: dict[str, tuple[float, int]]):
    """Steps with the loss and number of targets of each source."""
    return [
        METRICS.model_copy(
            update={
                "losses": {source: loss for source, (loss, _) in step.items()},
                "source_tokens": {source: tokens for source, (_, tokens) in step.items()},
            }
        )
        for step in losses
    ]


def of(*excesses: float) -> list[OwnLoss]:
    return [OwnLoss(f"{i:032x}", "web", 9.0, 99, excess) for i, excess in enumerate(excesses)]


def test_the_level_of_a_source_is_the_mean_over_its_targets() -> None:
    levels = SourceLevels(records({"web": (4.0, 30), "code": (1.0, 10)}, {"web": (2.0, 10)}))
    assert (levels.of("web"), levels.of("code")) == (3.5, 1.0)
    # (120 + 10 + 20) nats over 50 targets.
    assert levels.of("books") == 3.0
    assert SourceLevels([]).of("web") == 0.0


def test_the_mean_of_few_targets_counts_for_less() -> None:
    assert excess_of(7.0, 32, 3.0) == pytest.approx(4 * math.sqrt(0.5))
    assert excess_of(7.0, 4, 3.0) == pytest.approx(4 / 3)
    assert excess_of(2.0, 96, 3.0) == pytest.approx(-math.sqrt(0.75))
    assert excess_of(7.0, 10**9, 3.0) == pytest.approx(4.0, rel=1e-7)


def test_the_parts_of_a_document_are_one() -> None:
    levels = SourceLevels(records({"web": (3.0, 1), "code": (1.0, 1)}))
    parts = [("a", "web", 5.0, 30), ("b", "code", 1.0, 32), ("a", "web", 2.0, 2), ("c", "web", None, 0)]
    # 154 nats over 32 targets.
    assert merge_parts(parts, levels) == [
        OwnLoss("a", "web", 4.8125, 32, pytest.approx(1.8125 * math.sqrt(0.5))),
        OwnLoss("b", "code", 1.0, 32, 0.0),
    ]


def test_outliers_are_blamed_on_both_sides_of_the_limit() -> None:
    # Median 3, distances 3 2 1 0 1 2 and that of the last: their median is 2.
    around = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    limit = 3 + OUTLIER * MAD_TO_DEVIATION * 2
    assert limit == pytest.approx(13.3782)
    for last, why in ((math.nextafter(limit, 99), "an outlier among 7 documents"), (limit, "the worst of its batch")):
        found = attribute_spike(of(*around, last))
        assert found.limit == pytest.approx(limit)
        assert [culprit.excess for culprit in found.documents_blamed] == [last]
        assert found.why.startswith(why)


def test_at_most_a_tenth_is_blamed_and_always_one() -> None:
    assert MAX_SHARE == 0.1
    excesses = [float(i % 3) for i in range(27)]
    found = attribute_spike(of(*excesses, 90.0, 80.0, 70.0))
    assert [culprit.excess for culprit in found.documents_blamed] == [90.0, 80.0, 70.0]
    assert found.why == "an outlier among 30 documents"
    found = attribute_spike(of(*excesses[:-1], 90.0, 80.0, 70.0))
    assert [culprit.excess for culprit in found.documents_blamed] == [90.0, 80.0]
    assert found.why == "an outlier among 29 documents; of 3 such the worst 2"


def test_documents_that_are_all_alike_have_the_smallest_deviation() -> None:
    limit = 1.0 + OUTLIER * MIN_DEVIATION
    found = attribute_spike(of(1.0, 1.0, 1.0, limit + 1e-9))
    assert (found.limit, len(found.documents_blamed), found.why) == (limit, 1, "an outlier among 4 documents")
    assert attribute_spike(of(1.0, 1.0, 1.0, limit)).why == "the worst of its batch, in which none is an outlier"


def test_few_documents() -> None:
    with pytest.raises(ValueError, match="no document to blame"):
        attribute_spike([])
    assert attribute_spike(of(2.0)).documents_blamed == tuple(of(2.0))
    # Of two, neither can be an outlier: the median lies between them and the deviation is half of their distance.
    assert [culprit.excess for culprit in attribute_spike(of(0.0, 100.0)).documents_blamed] == [100.0]
    assert attribute_spike(of(0.0, 100.0)).limit == pytest.approx(50 + OUTLIER * MAD_TO_DEVIATION * 50)


@pytest.mark.parametrize("excesses", [(0.0,), (-2.0,), (-9.0, -9.0, -9.0, -1.0), (-3.0, 0.0)])
def test_who_is_no_worse_than_its_source_is_not_blamed(excesses: tuple[float, ...]) -> None:
    assert attribute_spike(of(*excesses)).documents_blamed == ()
    assert attribute_spike(of(*excesses)).why == "none lies above its source"
    assert attribute_spike(of(*excesses, 1e-9)).documents_blamed == tuple(of(*excesses, 1e-9)[-1:])


def test_equals_are_told_apart_by_their_id() -> None:
    one, two = (OwnLoss(name, "web", 9.0, 9, 5.0) for name in ("aa", "bb"))
    assert attribute_spike([two, one]).documents_blamed == attribute_spike([one, two]).documents_blamed == (one,)
