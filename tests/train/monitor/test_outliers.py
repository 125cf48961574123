"""The attribution of spikes: excesses, source levels and outliers, computed by hand on both sides of each limit."""

import math

import pytest

from tests.train.monitor.test_events import METRICS
from train.monitor.guard import MIN_DEVIATION
from train.monitor.quarantine import (
    MAD_TO_DEVIATION,
    MAX_SHARE,
    OUTLIER,
    GroupLevels,
    OwnLoss,
    SourceLevels,
    attribute_spike,
    excess_of,
    merge_parts,
)


def records(*losses: dict[str, tuple[float, int]]):
    """Return steps with the loss and number of targets of each source."""
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


def test_the_level_of_a_language_is_a_median_and_few_documents_are_drawn_to_the_source() -> None:
    sources = SourceLevels(records({"web": (2.0, 10), "code": (1.0, 10)}))
    losses = [*[("web", "en", 3.0)] * 9, ("web", "en", 90.0), ("web", "ja", 7.0), ("web", "ja", 9.0)]
    levels = GroupLevels(losses, sources)
    assert levels.of("web", "en") == 3.0
    # 12 documents of web have the median 3: two of eight count for Japanese, whose median is 8.
    assert levels.of("web", "ja") == (2 * 8.0 + 6 * 3.0) / 8
    assert (levels.of("web", ""), levels.of("web", "ru"), levels.of("code", "")) == (3.0, 3.0, 1.0)
    assert GroupLevels([("web", "en", 5.0)] * 7, sources).of("web", "en") == (7 * 5.0 + 2.0) / 8


def test_the_mean_of_few_targets_counts_for_less() -> None:
    assert excess_of(7.0, 32, 3.0) == pytest.approx(4 * math.sqrt(0.5))
    assert excess_of(7.0, 4, 3.0) == pytest.approx(4 / 3)
    assert excess_of(2.0, 96, 3.0) == pytest.approx(-math.sqrt(0.75))
    assert excess_of(7.0, 10**9, 3.0) == pytest.approx(4.0, rel=1e-7)


def test_the_parts_of_a_document_are_merged() -> None:
    parts = [("a", "web", 5.0, 30, 3.0), ("b", "code", 1.0, 32, 1.0), ("a", "web", 2.0, 2, 3.0)]
    # 154 nats over 32 targets.
    assert merge_parts([*parts, ("c", "web", None, 0, None)]) == [
        OwnLoss("a", "web", 4.8125, 32, pytest.approx(1.8125 * math.sqrt(0.5))),
        OwnLoss("b", "code", 1.0, 32, 0.0),
    ]


def test_outliers_are_blamed_on_both_sides_of_the_limit() -> None:
    # Median 3, distances 3 2 1 0 1 2 and that of the last: their median is 2.
    around = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    limit = 3 + OUTLIER * MAD_TO_DEVIATION * 2
    assert limit == pytest.approx(13.3782)
    for last, why in ((math.nextafter(limit, 99), "an outlier among 7 documents"), (limit, "the worst of its batch")):
        actual = attribute_spike(of(*around, last))
        assert actual.limit == pytest.approx(limit)
        assert [blamed.excess for blamed in actual.documents_blamed] == [last]
        assert actual.why.startswith(why)


def test_at_most_a_tenth_is_blamed_but_at_least_a_single_document() -> None:
    assert MAX_SHARE == 0.1
    excesses = [float(i % 3) for i in range(27)]
    actual = attribute_spike(of(*excesses, 90.0, 80.0, 70.0))
    assert [blamed.excess for blamed in actual.documents_blamed] == [90.0, 80.0, 70.0]
    assert actual.why == "an outlier among 30 documents"
    actual = attribute_spike(of(*excesses[:-1], 90.0, 80.0, 70.0))
    assert [blamed.excess for blamed in actual.documents_blamed] == [90.0, 80.0]
    assert actual.why == "an outlier among 29 documents; of 3 such the worst 2"


def test_documents_that_are_all_alike_have_the_smallest_deviation() -> None:
    limit = 1.0 + OUTLIER * MIN_DEVIATION
    actual = attribute_spike(of(1.0, 1.0, 1.0, limit + 1e-9))
    assert (actual.limit, len(actual.documents_blamed), actual.why) == (limit, 1, "an outlier among 4 documents")
    assert attribute_spike(of(1.0, 1.0, 1.0, limit)).why == "the worst of its batch, in which none is an outlier"


def test_few_documents() -> None:
    with pytest.raises(ValueError, match="documents: expected at least 1, got 0"):
        attribute_spike([])
    assert attribute_spike(of(2.0)).documents_blamed == tuple(of(2.0))
    # Of two, neither can be an outlier: the median lies between them and the deviation is half of their distance.
    assert [blamed.excess for blamed in attribute_spike(of(0.0, 100.0)).documents_blamed] == [100.0]
    assert attribute_spike(of(0.0, 100.0)).limit == pytest.approx(50 + OUTLIER * MAD_TO_DEVIATION * 50)


@pytest.mark.parametrize("excesses", [(0.0,), (-2.0,), (-9.0, -9.0, -9.0, -1.0), (-3.0, 0.0)])
def test_who_is_no_worse_than_its_source_is_not_blamed(excesses: tuple[float, ...]) -> None:
    assert attribute_spike(of(*excesses)).documents_blamed == ()
    assert attribute_spike(of(*excesses)).why == "none lies above its source"
    assert attribute_spike(of(*excesses, 1e-9)).documents_blamed == tuple(of(*excesses, 1e-9)[-1:])


def test_equal_excesses_are_ordered_by_document_id() -> None:
    item, two = (OwnLoss(name, "web", 9.0, 9, 5.0) for name in ("aa", "bb"))
    assert attribute_spike([two, item]).documents_blamed == attribute_spike([item, two]).documents_blamed == (item,)
