"""Losses by source, events and waiting of the report: hand-computed from a few steps."""

import pytest

from pipeline.report.facts import ReportedStep
from pipeline.report.losses import SourceLosses, Waiting, by_source, describe_events, waiting
from tests.support.report_run import events, metrics_line


def step(number: int, **measured: object) -> ReportedStep:
    return ReportedStep(number, 1e-3, 9.0, 4.0, 1.0, **measured)  # type: ignore[arg-type]


def test_losses_are_means_over_the_tokens_of_the_last_tenth() -> None:
    steps = [step(n, losses={"web": 9.0}, source_tokens={"web": 100}) for n in range(1, 19)]
    steps.append(step(19, losses={"web": 2.0, "books": 5.0}, source_tokens={"web": 10, "books": 4}))
    steps.append(step(20, losses={"web": 3.0}, source_tokens={"web": 30}, heldout={"web": {"loss": 2.5}}))
    assert by_source(steps) == [
        SourceLosses("books", 4, 5.0, {}),
        SourceLosses("web", 1840, (2.0 * 10 + 3.0 * 30) / 40, {"loss": 2.5}),
    ]


def test_a_source_without_recent_or_finite_tokens_has_no_loss() -> None:
    steps = [step(1, losses={"web": 9.0}, source_tokens={"web": 100, "books": 50})]
    steps += [step(n, losses={"books": 1.0}, source_tokens={"books": 50}) for n in range(2, 11)]
    held = {"old": {"loss": 1.0}}
    assert by_source([*steps, step(11, heldout=held)]) == [
        # what was not finite in the first step does not count
        SourceLosses("books", 450, None, {}),
        SourceLosses("old", 0, None, {"loss": 1.0}),
        SourceLosses("web", 100, None, {}),
    ]
    assert by_source([step(1)]) == by_source([]) == []


def test_waiting_is_summed() -> None:
    lines = [ReportedStep(**{k: v for k, v in metrics_line(n).items() if k != "tokens"}) for n in (7, 20)]
    assert waiting(lines) == Waiting(0.025, 0.25, 1, 2_000, 100_000)
    assert waiting([]) == Waiting(0.0, 0.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("place", "what", "detail", "is_bad"),
    [
        (0, "update skipped", "loss not finite, grad_norm not finite, at a loss scale of 65,536", True),
        (2, "rewound", "back to step 10; 8 samples are skipped from then on", True),
        (3, "checkpoint not written", "No space left on device", True),
        (4, "asked to stop", "SIGTERM; train/checkpoints/step-000020 stands", False),
        (6, "resumed", "from step-000030", False),
        (7, "ended early", "no lower held-out loss in 3 measurements; the lowest was 4.2500", False),
        (8, "ended with an error", "4 steps in a row", True),
    ],
)
def test_events_are_told(place: int, what: str, detail: str, is_bad: bool) -> None:
    rows = describe_events(events())
    assert len(rows) == len(events()) - 1  # what a rewind has undone stands in its own row
    row = rows[place]
    assert (row.at, row.what, row.detail, row.is_bad) == ("2026-01-02 03:04:05", what, detail, is_bad)


def test_an_event_of_a_later_version_is_shown_by_its_name() -> None:
    (row,) = describe_events([{"kind": "moved_house", "step": 3, "at": "2026"}])
    assert (row.step, row.what, row.detail, row.is_bad) == (3, "moved house", "", False)
