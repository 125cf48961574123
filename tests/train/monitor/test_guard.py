"""The guard: each verdict on both sides of its limit, and a state that JSON preserves exactly."""

import json
import math
import random

import pytest

from schemas.config import build_recipe
from schemas.errors import ConfigError
from train.config.train import GuardConfig
from train.monitor.guard import (
    MAX_SPIKES_IN_A_ROW,
    MIN_DEVIATION,
    MIN_NORM_SHARE,
    Bands,
    GuardState,
    Verdict,
    after_heldout,
    after_rewind,
    after_stage_change,
    after_step,
    bands_of,
    stop_error,
)

PROCEED, SKIP, SPIKE, STOP = Verdict.PROCEED, Verdict.SKIP, Verdict.SPIKE, Verdict.STOP
EIGHT = (1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0)
"""Mean 2, squared distances 8 · 1, so the deviation is √(8/7)."""
NAN, INF = math.nan, math.inf


def run(config: GuardConfig, *steps: tuple[float, float], state: GuardState | None = None):
    """The last state and every verdict of a run of (loss, gradient norm)."""
    state, verdicts = state or GuardState(), []
    for loss, norm in steps:
        state, verdict = after_step(state, config, loss, norm)
        verdicts.append(verdict)
    return state, verdicts


def watching(**settings) -> GuardConfig:
    return GuardConfig(spike_sigmas=6.0, spike_window=8, **settings)


# ------------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("bad", [(NAN, 1.0), (INF, 1.0), (-INF, 1.0), (2.0, INF), (2.0, NAN), (NAN, NAN)])
def test_a_step_that_is_not_finite_is_skipped(bad: tuple[float, float]) -> None:
    state, verdicts = run(GuardConfig(), (2.0, 1.0), bad, (2.0, 1.0))
    assert verdicts == [PROCEED, SKIP, PROCEED]
    assert (state.non_finite, state.skipped) == (0, 1)


def test_more_consecutive_non_finite_steps_than_allowed_stop() -> None:
    bad, good = (NAN, 1.0), (2.0, 1.0)
    state, verdicts = run(GuardConfig(max_non_finite=2), bad, bad, good, bad, bad, bad)
    assert verdicts == [SKIP, SKIP, PROCEED, SKIP, SKIP, STOP]
    assert (state.non_finite, state.skipped) == (3, 5)
    assert run(GuardConfig(max_non_finite=0), bad)[1] == [STOP]
    text = str(stop_error(state, GuardConfig(max_non_finite=2), 6))
    assert text.startswith("step 6: expected at most guard.max_non_finite = 2 steps in a row")
    assert "got 3." in text


def test_an_overflow_under_a_loss_scale_does_not_count_until_the_scale_has_come_down() -> None:
    config, state, scale, actual = GuardConfig(max_non_finite=1), GuardState(), 4.0, []
    for _ in range(4):
        state, verdict = after_step(state, config, 2.0, INF, loss_scale=scale)
        actual.append((scale, verdict, state.non_finite))
        scale = max(scale / 2, 1.0)
    assert actual == [(4.0, SKIP, 0), (2.0, SKIP, 0), (1.0, SKIP, 1), (1.0, STOP, 2)]
    assert state.skipped == 4
    # A loss that is not finite is not the scale's fault.
    assert after_step(GuardState(), config, NAN, INF, loss_scale=4.0)[0].non_finite == 1


# ------------------------------------------------------------------------------------------------- spikes


def test_the_level_by_hand() -> None:
    known, gradient = bands_of(GuardState(losses=EIGHT), watching())
    assert gradient is None
    assert known == pytest.approx((2.0, math.sqrt(8 / 7), 2.0 + 6 * math.sqrt(8 / 7)), rel=1e-15)
    assert bands_of(GuardState(losses=EIGHT[1:]), watching()) == (None, None)
    assert bands_of(GuardState(losses=EIGHT), GuardConfig()) == (None, None)


def test_both_sides_of_six_deviations() -> None:
    state = GuardState(losses=EIGHT)
    limit = bands_of(state, watching()).loss.limit
    assert limit == pytest.approx(8.41426, abs=1e-5)
    for loss, verdict, losses in (
        (limit, PROCEED, (*EIGHT[1:], limit)),
        (math.nextafter(limit, INF), SPIKE, EIGHT),
        (-100.0, PROCEED, (*EIGHT[1:], -100.0)),
    ):
        after, actual = after_step(state, watching(), loss, 1.0)
        assert (actual, after.losses, after.spikes) == (verdict, losses, int(verdict is SPIKE))


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    steps = [(1.0, 1.0)] * 7
    assert run(watching(), *steps, (1e9, 1.0))[1] == [PROCEED] * 8
    assert run(watching(), *steps, (1.0, 1.0), (1e9, 1.0))[1] == [PROCEED] * 8 + [SPIKE]


def test_flat_losses_have_the_smallest_deviation() -> None:
    state = GuardState(losses=(2.0,) * 8)
    assert bands_of(state, watching()).loss == (2.0, MIN_DEVIATION, 2.0 + 6 * MIN_DEVIATION)
    assert run(watching(), (2.006, 1.0), state=state)[1] == [PROCEED]
    assert run(watching(), (2.0061, 1.0), state=state)[1] == [SPIKE]


def test_the_window_holds_the_last_finite_losses_that_are_no_spikes() -> None:
    steps = [(loss, 1.0) for loss in (5.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0)]
    state, verdicts = run(watching(), *steps, (NAN, 1.0), (99.0, 1.0), (2.5, INF))
    assert state.losses == (1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0)
    assert verdicts[-3:] == [SKIP, SPIKE, SKIP]
    assert run(GuardConfig(), *steps)[0].losses == ()


def test_spikes_without_end_are_a_new_level() -> None:
    state = GuardState(losses=EIGHT)
    state, verdicts = run(watching(), *[(50.0, 1.0)] * (MAX_SPIKES_IN_A_ROW + 1), state=state)
    assert verdicts == [SPIKE] * 8 + [PROCEED]
    assert (state.losses, state.spikes) == ((50.0,), 0)
    interrupted = [(50.0, 1.0)] * 8 + [(2.0, 1.0), (50.0, 1.0)]
    assert run(watching(), *interrupted, state=GuardState(losses=EIGHT))[1] == [SPIKE] * 8 + [PROCEED, SPIKE]


def test_a_new_stage_has_a_level_of_its_own() -> None:
    state = after_stage_change(GuardState(losses=EIGHT, spikes=2, skipped=3, rewinds=1))
    assert state == GuardState(skipped=3, rewinds=1)
    assert run(watching(), (99.0, 1.0), state=state)[1] == [PROCEED]


def test_rewinds_are_counted_across_the_checkpoint_they_go_back_to() -> None:
    config = watching(on_spike="rewind", max_rewinds=2)
    at_checkpoint = GuardState(losses=EIGHT, best_heldout=2.0)
    state, actual = at_checkpoint, []
    for _ in range(3):
        state, verdict = after_step(state, config, 99.0, 1.0)
        actual.append(verdict)
        if verdict is SPIKE:
            state = after_rewind(state, at_checkpoint, 9)
    assert actual == [SPIKE, SPIKE, STOP]
    assert state == at_checkpoint.model_copy(update={"rewinds": 2, "rewound": (9, 9)})
    assert str(stop_error(state, config, 9)) == (
        "step 9: expected at most guard.max_rewinds = 2 rewinds in guard.rewind_window = 1000 steps, got another "
        "spike. Raise guard.max_rewinds, or train again at a lower optim.learning_rate."
    )


@pytest.mark.parametrize(
    ("spikes", "verdicts"),
    [
        # Four spikes in a month, and a fifth: each window of 1,000 steps has one.
        ((100, 20_000, 40_000, 60_000, 80_000), [SPIKE] * 5),
        ((100, 200, 300), [SPIKE, SPIKE, STOP]),
        # The first one is out of the window of the third, at a distance of exactly 1,000 steps.
        ((100, 200, 1100, 1199), [SPIKE, SPIKE, SPIKE, STOP]),
        ((100, 200, 1099), [SPIKE, SPIKE, STOP]),
    ],
)
def test_rewinds_count_in_a_window_of_steps(spikes: tuple[int, ...], verdicts: list[Verdict]) -> None:
    config = watching(on_spike="rewind", max_rewinds=2, rewind_window=1000)
    state, actual = GuardState(losses=EIGHT), []
    for step in spikes:
        state, verdict = after_step(state, config, 99.0, 1.0, step=step)
        actual.append(verdict)
        if verdict is SPIKE:
            state = after_rewind(state, GuardState(losses=EIGHT), step)
    assert actual == verdicts
    assert "rewind_window" not in config.content()


# ------------------------------------------------------------------------------------------------- gradients


def test_both_sides_of_the_gradients_band() -> None:
    config, state = GuardConfig(grad_sigmas=2.0, spike_window=8), GuardState(norms=EIGHT)
    known = bands_of(state, config)
    assert known.loss is None
    assert known.gradient == pytest.approx((2.0, math.sqrt(8 / 7), 2.0 + 2 * math.sqrt(8 / 7)), rel=1e-15)
    limit = known.gradient.limit
    for norm, verdict, norms in (
        (limit, PROCEED, (*EIGHT[1:], limit)),
        (math.nextafter(limit, INF), SPIKE, EIGHT),
        (0.0, PROCEED, (*EIGHT[1:], 0.0)),
    ):
        after, actual = after_step(state, config, 99.0, norm)
        assert (actual, after.norms, after.losses) == (verdict, norms, ())


def test_flat_norms_have_the_smallest_deviation_which_has_their_scale() -> None:
    for scale in (1e-3, 1e3):
        state, config = GuardState(norms=(scale,) * 8), GuardConfig(grad_sigmas=6.0, spike_window=8)
        limit = bands_of(state, config).gradient.limit
        assert limit == pytest.approx(scale * (1 + 6 * MIN_NORM_SHARE))
        assert run(config, (2.0, limit), state=state)[1] == [PROCEED]
        assert run(config, (2.0, limit * (1 + 1e-9)), state=state)[1] == [SPIKE]


def test_the_quantities_above_their_band_are_named() -> None:
    config = watching(grad_sigmas=6.0)
    known = bands_of(GuardState(losses=EIGHT, norms=EIGHT), config)
    assert known.left(8.0, 8.0) == ()
    assert known.left(9.0, 8.0) == ("loss",)
    assert known.left(8.0, 9.0) == ("gradient",)
    assert known.left(9.0, 9.0) == ("loss", "gradient")
    assert Bands(None, None).left(9.0, 9.0) == ()


def test_a_spike_of_either_enters_neither_window_and_only_what_left_begins_anew() -> None:
    config, state = watching(grad_sigmas=6.0), GuardState(losses=EIGHT, norms=EIGHT)
    after, verdicts = run(config, (2.0, 50.0), (50.0, 2.0), state=state)
    assert verdicts == [SPIKE, SPIKE]
    assert after == state.model_copy(update={"spikes": 2})
    after, verdicts = run(config, *[(2.0, 50.0)] * (MAX_SPIKES_IN_A_ROW + 1), state=state)
    assert verdicts == [SPIKE] * 8 + [PROCEED]
    assert (after.losses, after.norms, after.spikes) == ((*EIGHT[1:], 2.0), (50.0,), 0)
    assert after_stage_change(state) == GuardState()


# ------------------------------------------------------------------------------------------------- held-out losses


def heldout(config: GuardConfig, *losses: float) -> tuple[GuardState, list[bool]]:
    state, stops = GuardState(), []
    for loss in losses:
        state, stop = after_heldout(state, config, loss)
        stops.append(stop)
    return state, stops


@pytest.mark.parametrize(
    ("patience", "improvement", "losses", "best", "since", "stops"),
    [
        (2, 0.0, (3.0, 2.0, 2.0), 2.0, 1, [False, False, False]),
        (2, 0.0, (3.0, 2.0, 2.0, 2.5), 2.0, 2, [False, False, False, True]),
        (2, 0.0, (3.0, 3.5, 2.5, 3.5, 3.5), 2.5, 2, [False, False, False, False, True]),
        (1, 0.25, (3.0, 2.75), 2.75, 0, [False, False]),
        (1, 0.25, (3.0, math.nextafter(2.75, 3)), 3.0, 1, [False, True]),
        # Small steps add up: each is measured from the minimum, not from the loss before.
        (3, 0.25, (3.0, 2.875, 2.75), 2.75, 0, [False, False, False]),
        (2, 0.0, (NAN, 3.0, NAN, INF), 3.0, 2, [False, False, False, True]),
        (1, 0.0, (INF,), None, 1, [True]),
    ],
)
def test_patience(patience, improvement, losses, best, since, stops) -> None:
    config = GuardConfig(patience=patience, min_improvement=improvement)
    state, actual = heldout(config, *losses)
    assert (actual, state.best_heldout, state.since_best) == (stops, best, since)


def test_without_patience_a_run_continues() -> None:
    state, actual = heldout(GuardConfig(), 1.0, *[2.0] * 50)
    assert (set(actual), state.best_heldout, state.since_best) == ({False}, 1.0, 50)


# ------------------------------------------------------------------------------------------------- state and settings


def test_a_run_resumed_from_json_at_any_step_gets_the_same_verdicts() -> None:
    rng, config = random.Random(5), watching(grad_sigmas=6.0, patience=3, max_non_finite=1)
    steps = [
        (rng.choice([rng.gauss(2, 0.1)] * 12 + [NAN, 9.0]), rng.choice([rng.gauss(1, 0.1)] * 9 + [5.0, INF]))
        for _ in range(300)
    ]
    whole, broken = GuardState(), GuardState()
    seen = set()
    for loss, norm in steps:
        whole, verdict = after_step(whole, config, loss, norm)
        broken = GuardState.model_validate(json.loads(json.dumps(broken.to_json(), allow_nan=False)))
        broken, again = after_step(broken, config, loss, norm)
        whole, stop = after_heldout(whole, config, loss)
        broken, stops = after_heldout(broken, config, loss)
        assert (broken, again, stops) == (whole, verdict, stop)
        seen |= {verdict, stop}
    assert seen == {*Verdict, True, False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_spike": "rewind"}, "on_spike = rewind requires spike_sigmas or grad_sigmas"),
        ({"quarantine": True}, "quarantine requires spike_sigmas or grad_sigmas, such as 6"),
        ({"spike_window": 64}, "spike_window requires spike_sigmas or grad_sigmas"),
        ({"spike_sigmas": 6, "max_rewinds": 5}, "max_rewinds requires on_spike = rewind or quarantine"),
        ({"spike_sigmas": 6, "rewind_window": 5}, "rewind_window requires on_spike = rewind or quarantine"),
        ({"grad_sigmas": 0}, "guard.grad_sigmas: Input should be greater than 0, got 0"),
        ({"min_improvement": 0.1}, "min_improvement requires patience"),
        ({"spike_sigmas": 6, "spike_window": 7}, "guard.spike_window: Input should be greater than or equal to 8"),
        ({"patience": 0}, "guard.patience: Input should be greater than or equal to 1, got 0"),
        ({"max_non_finite": -1}, "guard.max_non_finite: Input should be greater than or equal to 0, got -1"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_recipe({"guard": settings}, {"guard": GuardConfig}, "recipe.toml")


def test_settings_can_be_written_out_whole_and_read_again() -> None:
    for config in (GuardConfig(), watching(on_spike="rewind", max_rewinds=1, patience=2, min_improvement=0.5)):
        assert GuardConfig.model_validate(config.model_dump()) == config


def test_what_a_spike_leads_to() -> None:
    assert not GuardConfig().watches
    for settings, rewinds in (
        ({"spike_sigmas": 6.0}, False),
        ({"grad_sigmas": 6.0, "on_spike": "rewind"}, True),
        ({"grad_sigmas": 6.0, "quarantine": True, "max_rewinds": 1}, True),
    ):
        config = GuardConfig(spike_window=8, **settings)
        assert (config.watches, config.rewinds) == (True, rewinds)
        state = GuardState(losses=EIGHT, norms=EIGHT, rewinds=1, rewound=(1,))
        expected = STOP if config == config.model_copy(update={"max_rewinds": 1}) and rewinds else SPIKE
        assert after_step(state, config, 50.0, 50.0)[1] is expected


def test_only_content_that_was_set_shows_in_an_identity() -> None:
    # A checkpoint of a version without these settings can resume: an absent name counts as None.
    content = GuardConfig(spike_sigmas=6.0).content()
    assert content["grad_sigmas"] is None
    assert not {"quarantine", "max_rewinds"} & content.keys()
