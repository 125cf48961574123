"""Tests of the mix: losses at the end, laws of sources, shares from both, the noise and the bound of repeats."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.manifest import read_run
from schemas.mix import mix_toml, read_mix
from schemas.storage import Store
from tests.support.measured_runs import STEPS, measured, run_of
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.data.order import block_counts, tokens_by_source
from train.mix.measured import final_loss, fit_power_law, learning_of, measured_run
from train.mix.suggest import (
    UNITS,
    by_excess,
    by_learning,
    clip_shares,
    most_passes,
    round_shares,
    significant_figures,
    suggest_by_law,
    suggest_by_reference,
    worth_of_pass,
)
from train.monitor.metrics import read_metrics
from train.plan.make_plan import make_plan
from train.plan.plan import mix_overrides
from train.scaling.repeats import worth_of_tokens

# -------------------------------------------------------------------------------------------------------------- curves


def test_a_level_is_the_end_of_a_line_through_the_last_points() -> None:
    level = final_loss([1, 2, 3, 4, 5, 6], [99, 5, 4, 3, 2, 1])
    assert (level.value, level.error, level.points) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-12), 5)


def test_the_error_of_a_level_is_that_of_the_line_at_its_end() -> None:
    """x̄ = 1.5, Sxx = 5, slope -1/5, squares left 0.8, so s² = 0.4 and error² = 0.4·(1/4 + 1.5²/5) = 0.28."""
    level = final_loss([0, 1, 2, 3], [1, 0, 1, 0])
    assert level.value == pytest.approx(0.5 - 0.3)
    assert level.error == pytest.approx(math.sqrt(0.28))


def test_a_law_of_a_given_exponent_has_a_closed_form() -> None:
    """(n / end)^-0.5 is 4, 2, 1, and the losses are 1 + 2 of it."""
    law = fit_power_law(np.array([1.0, 4, 16]), np.array([9.0, 5, 3]), 16.0, 0.5)
    assert (law.floor, law.rest, law.speed) == (pytest.approx(1), pytest.approx(2), pytest.approx(1))


@pytest.mark.parametrize("exponent", [0.1, 0.3, 0.9, 1.7])
def test_a_law_is_found_again(exponent: float) -> None:
    tokens = np.arange(1.0, 21)
    law = fit_power_law(tokens, 2 + 1.5 * (tokens / 20) ** -exponent, 20.0)
    assert (law.floor, law.rest, law.exponent) == (
        pytest.approx(2, abs=1e-4),
        pytest.approx(1.5, abs=1e-4),
        pytest.approx(exponent, abs=1e-4),
    )


@pytest.mark.parametrize(
    ("losses", "floor"),
    [([6.0] * 8, 6.0), ([6.0 + 0.1 * i for i in range(8)], 6.35)],  # flat; rising, as what is learnt by heart
)
def test_what_does_not_fall_has_no_speed(losses: list[float], floor: float) -> None:
    learning = learning_of(list(range(1, 9)), losses)
    assert (learning.law.speed, learning.law.floor) == (0.0, pytest.approx(floor))


def test_no_floor_is_below_zero() -> None:
    tokens = np.arange(1.0, 9)
    law = fit_power_law(tokens, 8 - 0.9 * tokens, 8.0)
    assert law.floor == 0
    assert law.rest > 0


def test_the_error_of_a_speed_is_its_spread_over_samples() -> None:
    tokens, random = np.arange(1.0, 21), np.random.default_rng(0)
    truth = 2 + 1.5 * (tokens / 20) ** -0.3
    found = [learning_of(tokens.tolist(), (truth + random.normal(0, 0.01, 20)).tolist()) for _ in range(30)]
    spread = np.std([one.law.speed for one in found])
    assert np.mean([one.law.speed for one in found]) == pytest.approx(0.45, abs=0.01)
    assert 0.5 < np.mean([one.error for one in found]) / spread < 2


# -------------------------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize(("error", "apart"), [(0.235, {"a", "b"}), (0.236, set())])
def test_noise_is_that_of_the_difference_from_the_mean(error: float, apart: set[str]) -> None:
    """Mean 1/2, so both are 1/2 away; the error of that is error / √2, three of which are 1/2 at 0.2357."""
    found = significant_figures({"a": 1.0, "b": 0.0}, dict.fromkeys("ab", error), dict.fromkeys("ab", 0.5))
    assert found.keys() == apart


def test_equal_figures_are_not_told_apart_however_sure() -> None:
    assert significant_figures({"a": 0.1 + 0.2, "b": 0.3}, dict.fromkeys("ab", 0.0), {"a": 0.9, "b": 0.1}) == {}


@pytest.mark.parametrize(
    ("excess", "step_size", "first"),
    [
        ((math.log(3), 0), 1.0, 3 / 4),
        ((math.log(3), 0), 2.0, 9 / 10),
        ((0.2, 0.2), 1.0, 1 / 2),
        ((-5, 0), 1.0, 1 / 2),  # better than the reference is no excess
        ((1000, 1000 - math.log(3)), 1.0, 3 / 4),
    ],
)
def test_shares_by_excess_are_a_round_of_exponentiated_gradient(
    excess: tuple[float, float], step_size: float, first: float
) -> None:
    found = by_excess({"a": 0.5, "b": 0.5}, dict(zip("ab", excess, strict=True)), step_size)
    assert found == {"a": pytest.approx(0.999 * first + 0.0005), "b": pytest.approx(0.999 * (1 - first) + 0.0005)}


def test_shares_by_learning_follow_speed() -> None:
    """0.2 · 0.3 to 0.8 · 0.1 is 3 to 4."""
    found = by_learning({"a": 0.2, "b": 0.8}, {"a": 0.3, "b": 0.1})
    assert found == {"a": pytest.approx(0.999 * 3 / 7 + 0.0005), "b": pytest.approx(0.999 * 4 / 7 + 0.0005)}
    assert by_learning({"a": 0.2, "b": 0.8}, {"a": 0.0, "b": 0.0}) == {"a": 0.2, "b": 0.8}


def test_a_pass_is_worth_the_slope_of_the_law_of_repeats() -> None:
    for passes in (1.5, 4.0, 11.7, 40.0):
        slope = (worth_of_tokens(1.0, passes + 1e-6) - worth_of_tokens(1.0, passes - 1e-6)) / 2e-6
        assert worth_of_pass(passes) == pytest.approx(slope, rel=1e-4)
    assert worth_of_pass(0.3) == 1.0


@pytest.mark.parametrize(("max_epochs", "most"), [(4.0, 4.0), (11.0, 11.0), (40.0, 1 + 15.387756 * math.log(2))])
def test_passes_that_are_worth_it(max_epochs: float, most: float) -> None:
    assert most_passes(max_epochs) == pytest.approx(most)
    assert worth_of_pass(most_passes(40.0)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1, 1, 1), (0.6, 0.3, 0.1)),
        ((0.4, 1, 1), (0.4, 0.45, 0.15)),
        ((0.4, 0.44, 1), (0.4, 0.44, 0.16)),  # what the first gave up would lift the second over its own limit
        ((0.3, 0.2, 0.1), (1 / 2, 1 / 3, 1 / 6)),  # not enough data: in proportion to what there is
    ],
)
def test_what_is_cut_off_goes_to_the_others(limits: tuple[float, ...], expected: tuple[float, ...]) -> None:
    found = clip_shares({"a": 0.6, "b": 0.3, "c": 0.1}, dict(zip("abc", limits, strict=True)))
    assert list(found.values()) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.01, 1)), min_size=1, max_size=8))
def test_bounded_shares_add_up_and_keep_their_limits(parts: list[tuple[float, float]]) -> None:
    total = math.fsum(share for share, _ in parts)
    shares = {str(i): share / total for i, (share, _) in enumerate(parts)}
    limits = {str(i): limit for i, (_, limit) in enumerate(parts)}
    found = clip_shares(shares, limits)
    assert math.fsum(found.values()) == pytest.approx(1)
    if math.fsum(limits.values()) > 1:
        assert all(found[name] <= limits[name] + 1e-12 for name in found)


def test_shares_are_rounded_to_what_a_block_holds() -> None:
    assert round_shares({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, ()) == {"a": 0.33334, "b": 0.33334, "c": 0.33332}
    for full in ((), {"b"}, {"a", "b"}):
        assert round_shares({"a": 1 / 3, "b": 2 / 3}, full) == {"a": 0.33334, "b": 0.66666}
    assert round_shares({"a": 1 / 3, "b": 2 / 3}, {"a"}) == {"a": 0.33332, "b": 0.66668}
    assert round_shares({"a": 1e-9, "b": 1 - 1e-9, "c": 0.0}, ()) == {"a": 2e-5, "b": 0.99998, "c": 0.0}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda found: sum(found) > 1e-3), st.integers(0, 4095))
def test_rounded_shares_are_exact_in_a_block(values: list[float], full: int) -> None:
    total = math.fsum(values)
    shares = {str(i): value / total for i, value in enumerate(values)}
    found = round_shares(shares, {name for name in shares if full >> int(name) & 1})
    assert sum(round(share * UNITS) for share in found.values()) == UNITS
    assert all((found[name] > 0) == (share > 0) for name, share in shares.items())
    counts = block_counts(found)
    block = sum(counts.values())
    assert all(counts[name] * UNITS == round(found[name] * UNITS) * block for name in counts)


# --------------------------------------------------------------------------------------------------------- suggestions


def falling(start: float, rest: float, exponent: float, noise: float = 0.0) -> Callable[[int], float]:
    """A loss of `start` + `rest` at the last step, falling as a power of steps."""
    return lambda step: start + rest * (step / STEPS) ** -exponent + noise * math.sin(7.0 * step * step)


def test_equal_excess_leaves_the_shares(tmp_path: Path) -> None:
    run = measured(
        tmp_path / "run", {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}, train={"weights": WEIGHTS}
    )
    other = measured(
        tmp_path / "other", {"web": falling(2.8, 1, 0.3), "books": falling(1.8, 1, 0.3)}, optim={"learning_rate": 2e-3}
    )
    mix = suggest_by_reference(run, other)
    assert {name: part.share for name, part in mix.sources.items()} == WEIGHTS
    assert "within 3 standard errors of the mean of all sources" in mix.sources["web"].why
    assert mix.sources["web"].evidence["excess"] == pytest.approx(0.2)
    assert mix.sources["web"].keep == 1
    assert (mix.dataset, mix.plan) == (run.dataset.digest, run.digest)


WEIGHTS = {"books": 0.25, "web": 0.75}


def test_excess_moves_the_shares(tmp_path: Path) -> None:
    """Excess 0.5 and 0: shares in the proportion 0.75·e^0.5 to 0.25, smoothed; 4 parts in 5 of the tokens, no more."""
    run = measured(
        tmp_path / "run", {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}, train={"weights": WEIGHTS}
    )
    other = measured(
        tmp_path / "other", {"web": falling(2.5, 1, 0.3), "books": falling(2, 1, 0.3)}, optim={"learning_rate": 2e-3}
    )
    mix = suggest_by_reference(run, other)
    raised = 0.75 * math.exp(0.5)
    share = 0.999 * raised / (raised + 0.25) + 0.0005
    web, books = mix.sources["web"], mix.sources["books"]
    assert web.share == pytest.approx(share, abs=2e-5)
    assert web.share + books.share == pytest.approx(1, abs=1e-12)
    assert web.repeat == pytest.approx(web.share * STEPS * 64 / run.unique["web"])
    assert web.evidence["share_before"] == 0.75
    assert web.evidence["tokens_seen"] == 48 * STEPS
    assert "the share rises from 0.7500 to 0.8315" in web.why
    assert "the share falls from 0.2500 to 0.1685" in books.why
    # books are read a quarter of a time, and fell by evidence.
    assert books.keep == math.ceil(books.repeat * 1e4) / 1e4 < 0.5
    assert web.keep == 1


def test_excess_within_the_noise_leaves_the_shares(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3, noise=0.1), "books": falling(2, 1, 0.3, noise=0.1)}
    run = measured(tmp_path / "run", curves, train={"weights": WEIGHTS})
    other = measured(
        tmp_path / "other", {"web": falling(2.95, 1, 0.3), "books": falling(2, 1, 0.3)}, optim={"learning_rate": 2e-3}
    )
    mix = suggest_by_reference(run, other)
    assert {name: part.share for name, part in mix.sources.items()} == WEIGHTS
    assert mix.sources["web"].evidence["excess_error"] > 0.02


def test_a_source_at_its_floor_loses_share(tmp_path: Path) -> None:
    """Speeds 0.3 and 0: all goes to web but for the smoothing, 0.0005 of it."""
    run = measured(tmp_path / "run", {"web": falling(3, 1, 0.3), "noise": lambda step: 5.0})
    mix = suggest_by_law(run)
    assert mix.sources["noise"].share == pytest.approx(0.0005, abs=2e-5)
    assert mix.sources["web"].evidence["speed"] == pytest.approx(0.3, abs=1e-3)
    assert mix.sources["web"].evidence["floor"] == pytest.approx(3, abs=1e-2)
    assert mix.sources["noise"].keep < 0.01
    assert "for each e-fold of tokens" in mix.sources["web"].why
    assert "from step 1" in mix.reference


def test_equal_speeds_leave_the_shares(tmp_path: Path) -> None:
    run = measured(
        tmp_path / "run", {"web": falling(3, 1, 0.3), "books": falling(1, 1, 0.3)}, train={"weights": WEIGHTS}
    )
    assert {name: part.share for name, part in suggest_by_law(run).sources.items()} == WEIGHTS


def test_a_given_exponent_needs_fewer_points(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(1, 0.1, 0.3)}
    run = measured(tmp_path / "run", curves, train={"eval_every": 25})
    with pytest.raises(
        ConfigError, match=r"at least 6 held-out losses .* got 4 of books, 4 of web\. Train .*eval_every=8"
    ):
        suggest_by_law(run)
    mix = suggest_by_law(run, 0.3, "of a ladder")
    assert "a = 0.3 of the law of a ladder" in mix.reference
    found = {name: part.evidence["speed"] for name, part in mix.sources.items()}
    assert found == {"books": pytest.approx(0.03), "web": pytest.approx(0.3)}


def test_the_bound_of_repeats_binds_and_asks_for_more(tmp_path: Path) -> None:
    """web has 3,072 tokens: 6,400 of the run are two passes; of a run of 64,000 tokens it could give a fifth."""
    curves = {"web": falling(3, 1, 0.3), "books": lambda step: 5.0}
    run = measured(tmp_path / "run", curves, documents={"web": 22, "books": 400})
    mix = suggest_by_law(run, tokens=64_000.0)
    web, books = mix.sources["web"], mix.sources["books"]
    limit = (4 * run.unique["web"] - 32) / 64_000
    assert web.share == math.floor(limit * UNITS) / UNITS
    assert web.share + books.share == pytest.approx(1, abs=1e-12)
    assert 3.98 < web.repeat <= 4
    assert web.wanted_tokens == math.ceil(web.evidence["share_unbounded"] * 64_000 / 4)
    assert web.wanted_tokens > run.unique["web"]
    assert f"{web.wanted_tokens:,} unique tokens are wanted" in web.why
    assert books.wanted_tokens is None
    assert books.evidence["run_tokens"] == 64_000


def test_where_all_is_read_too_often_shares_follow_the_tokens(tmp_path: Path) -> None:
    run = measured(tmp_path / "run", {"web": falling(3, 1, 0.3), "books": lambda step: 5.0})
    mix = suggest_by_law(run, tokens=1e6)
    passes = [part.repeat for part in mix.sources.values()]
    assert passes[0] == pytest.approx(passes[1], rel=0.02)
    assert mix.sources["web"].wanted_tokens == math.ceil(mix.sources["web"].evidence["share_unbounded"] * 1e6 / 4)


def test_what_is_not_held_out_is_compared_by_its_training_losses(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    run = measured(tmp_path / "run", curves, held_out={"web"})
    other = measured(
        tmp_path / "other", {**curves, "books": falling(1.5, 1, 0.3)}, held_out={"web"}, optim={"learning_rate": 2e-3}
    )
    books = suggest_by_reference(run, other).sources["books"]
    assert books.why.startswith("training loss 2.9997, in the reference 2.4997: ")
    assert "(nothing of it is held out)" in books.why
    assert (books.evidence["is_heldout"], books.evidence["measurements"]) == (0, 10)
    with pytest.raises(ConfigError, match=r"got 0 of books\. .*a larger tokens\.heldout_share, or use --reference"):
        suggest_by_law(run)


def test_a_source_that_was_left_out_stays_out(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3), "code": falling(1, 0.1, 0.3)}
    run = measured(tmp_path / "run", curves, train={"weights": {"web": 1, "code": 1, "books": 0}})
    mix = suggest_by_law(run)
    assert (mix.sources["books"].share, mix.sources["books"].repeat) == (0, 0)
    assert "left out of the run" in mix.sources["books"].why
    assert mix.sources["web"].share + mix.sources["code"].share == pytest.approx(1, abs=1e-12)


def test_stages_of_other_mixtures_are_no_run_of_one_law(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    stages = [{"tokens": 64 * STEPS // 2, "weights": {"web": web, "books": 4 - web}} for web in (3, 1)]
    with pytest.raises(ConfigError, match=r"got books 0\.250, web 0\.750 in the first and books 0\.750, .* in stage 2"):
        measured(tmp_path / "run", curves, train={"steps": None, "stages": stages})
    for stage in stages:
        del stage["weights"]
    run = measured(tmp_path / "same", curves, train={"steps": None, "stages": stages})
    assert suggest_by_law(run).sources.keys() == {"web", "books"}


def test_no_mix_is_suggested_from_an_edited_plan(tmp_path: Path) -> None:
    run = measured(tmp_path / "run", {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)})
    folder = Store(str(tmp_path / "run"))
    assert measured_run(folder).plan == run.plan
    folder.write_atomic("train/plan.json", canonical_json(folder.read_json("train/plan.json") | {"num_params": 10**9}))
    with pytest.raises(ContractError, match=r"plan.json: expected num_params = \d+, got 1000000000"):
        measured_run(folder)


def test_a_mix_is_read_back_from_its_file(tmp_path: Path) -> None:
    mix = suggest_by_law(measured(tmp_path / "run", {"web+head": falling(3, 1, 0.3), "web+tail": lambda step: 5.0}))
    (tmp_path / "mix.toml").write_text(mix_toml(mix), encoding="utf-8")
    assert read_mix(str(tmp_path / "mix.toml")) == mix


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_passes_are_those_of_the_plan(tmp_path: Path, packing: str) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": lambda step: 5.0}
    run = measured(tmp_path / "run", curves, train={"packing": packing})
    figures = {figure.name: figure.value for figure in run.plan.figures}
    for name, part in suggest_by_law(run).sources.items():
        assert part.evidence["passes_before"] == pytest.approx(figures[f"epochs.{name}"])
    assert sum(run.unique.values()) == figures["unique_tokens"]


def test_documents_that_an_epoch_reads_several_times_belong_to_their_source(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "web+x3": lambda step: 9.0, "books": lambda step: 5.0}
    documents = {"web": 40, "web+x3": 3, "books": 40}
    run = measured(tmp_path / "run", curves, held_out={"web", "books"}, documents=documents)
    figures = {figure.name: figure.value for figure in run.plan.figures}
    tokens = {name: figures[f"epochs.{name}"] for name in curves}
    drawn = tokens_by_source(run.plan.stages)
    unique = {name: drawn[name] / passes for name, passes in tokens.items()}
    assert run.unique["web"] == pytest.approx(unique["web"] + 3 * unique["web+x3"], abs=1)
    assert sum(run.shares.values()) == pytest.approx(1)
    targets = run.steps[0].source_tokens
    assert targets.keys() == {"web", "books"}
    seen = read_metrics(Store(str(tmp_path / "run")))[-1].source_tokens
    mean = (4 * seen["web"] + 9 * seen["web+x3"]) / (seen["web"] + seen["web+x3"])
    assert run.training("web").losses[-1] == pytest.approx(mean)
    assert run.heldout("web").losses[-1] == 4.0  # the repeated documents have none of their own
    suggested = suggest_by_law(run)
    assert suggested.sources.keys() == {"web", "books"}
    path = tmp_path / "mix.toml"
    path.write_text(mix_toml(suggested))
    weights, _ = mix_overrides(str(path), run.dataset)
    assert weights.startswith('train.weights={"books" = ')
    settings = load_settings(read_run(Store(str(tmp_path / "run"))).recipe, [weights], "test")
    counts = make_plan(Store(str(tmp_path / "run")), run.dataset, settings).stages[0].counts
    assert counts.keys() == curves.keys()
    assert counts["web+x3"] / counts["web"] == pytest.approx(3 * unique["web+x3"] / unique["web"], rel=0.05)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_runs_that_say_nothing_of_a_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources in use, got one: web\. Give"):
        measured_run(run_of(tmp_path / "one", {"web": falling(3, 1, 0.3)}))
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    with pytest.raises(ConfigError, match=r"got one: web; books has weight 0, so it was not measured\. Give"):
        measured_run(run_of(tmp_path / "left", curves, train={"weights": {"web": 1, "books": 0}}))
    run = run_of(tmp_path / "run", curves)
    run.delete("train/metrics.jsonl")
    with pytest.raises(ContractError, match=r"got no step in train/metrics\.jsonl\. Run `penstock train`"):
        measured_run(run)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "the same plan .*: a run cannot be its own reference"),
        ({"train": {"seq_len": 16}}, "train.seq_len = 16, but 32 in the measured run"),
        ({"train": {"eval_sequences": 2}}, "a different set or number of held-out rows of books"),
        ({"train": {"document_mask": False}}, "train.document_mask = False, but True in the measured run"),
    ],
)
def test_references_that_measured_something_else(tmp_path: Path, changes: dict, found: str) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    run, other = measured(tmp_path / "run", curves), measured(tmp_path / "other", curves, **changes)
    with pytest.raises(ConfigError, match=found):
        suggest_by_reference(run, other)


def test_references_on_other_datasets(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    run = measured(tmp_path / "run", curves)
    fewer = measured(tmp_path / "fewer", {"web": curves["web"], "code": curves["books"]})
    with pytest.raises(ConfigError, match="no source books"):
        suggest_by_reference(run, fewer)
    longer = measured(tmp_path / "longer", curves, documents={"web": 40, "books": 60})
    with pytest.raises(ConfigError, match="a different set or number of held-out rows of books"):
        suggest_by_reference(run, longer)


def test_another_training_part_of_the_same_held_out_documents_is_a_reference(tmp_path: Path) -> None:
    """Documents are drawn and held out by their number here, so web is as it was while code comes on top."""
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    run = measured(tmp_path / "run", curves)
    more = measured(tmp_path / "more", {**curves, "web": falling(2, 1, 0.3), "code": falling(1, 1, 0.3)})
    assert run.dataset.digest != more.dataset.digest
    assert suggest_by_reference(run, more).sources["web"].share > 0.5


def test_too_few_measurements_of_the_end(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    run = measured(tmp_path / "run", curves, train={"eval_every": 50})
    other = measured(tmp_path / "other", curves)
    with pytest.raises(ConfigError, match=r"at least 4 held-out losses of books, got 2\. Train with .*eval_every=8 or"):
        suggest_by_reference(run, other)


def test_a_source_of_one_row_is_cut_but_not_left_out(tmp_path: Path) -> None:
    """web is one row of 256 tokens, which one pass reads: nothing is left of it for a longer run."""
    make_tiny_dataset(tmp_path / "run", {"web": 5, "books": 60})
    curves = {"web": falling(3, 1, 0.3), "books": lambda step: 5.0}
    train = {"seq_len": 256, "global_batch": 1, "steps": 24, "eval_every": 1}
    with pytest.raises(
        ConfigError, match="expected at least one row of every source in use, got none of web in 24 steps"
    ):
        measured(tmp_path / "run", curves, train=train | {"weights": {"web": 1, "books": 99}})
    sizes = {"train": train | {"weights": {"web": 1, "books": 23}}, "plan": {"max_epochs": 1}}
    run = measured(tmp_path / "run", curves, **sizes)
    assert run.unique["web"] == 256
    for tokens in (1e5, 1e8):
        mix = suggest_by_law(run, tokens=tokens)
        web = mix.sources["web"]
        assert (web.share > 0, web.keep, web.wanted_tokens is not None) == (True, 1.0, True)


def test_what_a_reference_never_read_is_no_measure(tmp_path: Path) -> None:
    curves = {"web": falling(3, 1, 0.3), "books": falling(2, 1, 0.3)}
    three = {"web": 40, "books": 40, "code": 40}
    run = measured(tmp_path / "three", curves | {"code": falling(2, 1, 0.3)}, documents=three)
    weights = {"train": {"weights": {"web": 1, "books": 1, "code": 0}}}
    other = measured(tmp_path / "other", curves | {"code": falling(4, 1, 0.3)}, documents=three, **weights)
    with pytest.raises(ConfigError, match="code with weight 0, so it was not measured"):
        suggest_by_reference(run, other)
    assert suggest_by_reference(other, run).sources["code"].share == 0  # the run itself may leave one out
