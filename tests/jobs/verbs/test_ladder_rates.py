"""The learning-rate search of `penstock ladder`: which rates it tries, what it finds, and the plans that use it."""

import contextlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.verbs import ladder as job
from jobs.verbs.proxies import Proxy
from schemas.errors import ConfigError
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from tests.jobs.verbs.test_ladder import RECIPE, SIZES, ladder
from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.plan import PlanConfig
from train.config.settings import load_settings
from train.plan.ladder import MAX_RATES, RATE_FACTORS, best_factor, next_factor
from train.plan.make_plan import make_plan, rate_of_rule
from train.plan.plan import read_plan
from train.plan.rules import deepseek_learning_rate
from train.scaling.own_law import LawFile, read_law


def tried_until_done(best: float) -> dict[float, float]:
    """Return the losses of all multiples that a search tries if the loss is a parabola around `best`."""
    losses: dict[float, float] = {}
    while (factor := next_factor(losses)) is not None:
        losses[factor] = 3 + math.log(factor / best) ** 2
    return losses


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1.1, {0.5, 1.0, 2.0}),
        (0.6, {0.25, 0.5, 1.0, 2.0}),
        (2.5, {0.5, 1.0, 2.0, 4.0}),
        (4.5, {0.5, 1.0, 2.0, 4.0, 8.0}),
        (100.0, {0.5, 1.0, 2.0, 4.0, 8.0, 16.0}),
    ],
)
def test_rates_are_tried_until_the_best_has_two_neighbours(best: float, tried: set[float]) -> None:
    losses = tried_until_done(best)
    assert losses.keys() == tried
    assert len(losses) <= MAX_RATES
    expected = best if best < 50 else 16.0
    assert best_factor(losses) == pytest.approx(expected, rel=1e-9)


def test_a_parabola_is_not_drawn_through_infinity() -> None:
    assert best_factor({0.5: 3.0, 1.0: 2.9, 2.0: math.inf}) == 1.0
    assert best_factor({0.5: 3.0, 1.0: 3.0, 2.0: 3.0}) in RATE_FACTORS


@dataclass(frozen=True)
class Searched:
    """A ladder that searched its learning rate."""

    run: Path
    names: list[str]
    """Folders of the runs that it trained, in their order."""
    out: str

    @property
    def law(self) -> LawFile:
        """The law file that it wrote."""
        return read_law(str(self.run / job.LAW_NAME))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_dataset(tmp_path_factory.mktemp("rates") / "run", {"web": 330, "books": 130}, vocab_size=128)
    write_run(made, read_run(made).model_copy(update={"recipe": RECIPE}))
    return Path(made.uri)


@pytest.fixture(scope="module")
def searched(run: Path) -> Searched:
    """A real ladder, of which every run is trained."""
    names: list[str] = []

    def training(proxy: Proxy, ranks: int = 1) -> None:
        names.append(proxy.run.uri.rpartition("/")[2])
        tiny_runs.trained(Path(proxy.run.uri), ranks)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(job, "train_proxy", training)
        assert ladder(run, *SIZES) == 0
    return Searched(run, names, out.getvalue())


@pytest.mark.dist
def test_a_ladder_searches_the_rate_before_its_runs(searched: Searched) -> None:
    law, first = searched.law, "n30.9k-d16.6k"
    number = len(law.rates)
    assert 3 <= number <= MAX_RATES
    assert searched.names[:3] == [f"{first}-rate-x{factor:g}" for factor in RATE_FACTORS]
    assert len(searched.names) == number + 6
    assert {name for name in searched.names if "-rate-" in name} == {one.run.partition("/")[2] for one in law.rates}
    for one in law.rates:
        folder = Store(str(searched.run / one.run))
        assert read_plan(folder).learning_rate == one.rate
        assert tiny_runs.metrics(Path(folder.uri))[-1].heldout_loss == one.loss
    # The factor is that of the parabola, and it has scaled the rate of every run.
    middle = read_plan(Store(str(searched.run / "ladder" / f"{first}-rate-x1"))).learning_rate
    losses = {round(one.rate / middle, 2): one.loss for one in law.rates}
    assert law.law.rate_factor == pytest.approx(best_factor(losses), rel=0.02)
    assert law.law.rate is None
    for name in searched.names[number:]:
        plan = read_plan(Store(str(searched.run / "ladder" / name)))
        rule = next(figure for figure in plan.figures if figure.name == "compute").value
        assert plan.learning_rate == pytest.approx(deepseek_learning_rate(rule) * law.law.rate_factor, rel=1e-2)
    assert f"first the learning rate is searched at {first}: 3 to 6 runs of " in searched.out
    assert f"the best rate is x {law.law.rate_factor:.3g} of the rule's" in searched.out


@pytest.mark.dist
def test_the_same_command_trains_nothing_again(searched: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "train_proxy", None)
    before = (searched.run / job.LAW_NAME).read_bytes()
    assert ladder(searched.run, *SIZES) == 0
    assert (searched.run / job.LAW_NAME).read_bytes() == before


@pytest.mark.dist
def test_a_plan_by_the_law_has_the_factor(searched: Searched, capsys: Any) -> None:
    law = searched.run / job.LAW_NAME
    assert main(["plan", str(searched.run), "--law", str(law), "--set", "train.steps=7"]) == 0
    plan = read_plan(Store(str(searched.run)))
    compute = next(figure for figure in plan.figures if figure.name == "compute").value
    factor = plan.settings.plan.own_law.rate_factor
    assert factor == searched.law.law.rate_factor != 1
    assert plan.learning_rate == pytest.approx(deepseek_learning_rate(compute) * factor, rel=5e-3)
    capsys.readouterr()


def test_a_law_of_an_earlier_version_has_no_factor(tmp_path: Path) -> None:
    numbers = {"floor": 1.7, "a": 400.0, "b": 400.0, "alpha": 0.34, "beta": 0.28}
    own = {**numbers, "num_runs": 6, "deviation": 0.01, "params": 1e6, "tokens": 1e8, "compute": 6e14}
    (tmp_path / "law.json").write_text(json.dumps({"format_version": 1, "law": own, "how": "", "points": []}))
    law = read_law(str(tmp_path / "law.json")).law
    assert rate_of_rule(PlanConfig(law="own", own_law=law), 1e18) == pytest.approx(0.3118 * 1e18**-0.125, rel=5e-3)
    doubled = law.model_copy(update={"rate_factor": 2.0})
    assert rate_of_rule(PlanConfig(law="own", own_law=doubled), 1e18) == pytest.approx(0.6236 * 1e18**-0.125, rel=5e-3)
    found = law.model_copy(update={"rate": 0.0123, "mup_base_width": 64})
    mup = {"parametrization": "mup", "mup_base_width": 64, "law": "own"}
    assert rate_of_rule(PlanConfig.model_validate(mup | {"own_law": found}), 1e18) == 0.0123
    for other in (law, found.model_copy(update={"mup_base_width": 32})):
        with pytest.raises(ConfigError, match="that was found at the base width 64, got a law"):
            rate_of_rule(PlanConfig.model_validate(mup | {"own_law": other}), 1e18)
    with pytest.raises(ConfigError, match=r"got no law\. Set optim\.learning_rate"):
        rate_of_rule(PlanConfig(parametrization="mup"), 1e18)


def test_under_mup_all_runs_have_one_rate(run: Path, capsys: Any) -> None:
    """A search starts from the rule's rate for the first run, and what it finds is the rate of every width."""
    words = ("--set", "plan.parametrization=mup", "--set", "plan.mup_base_width=32")
    assert ladder(run, *SIZES, *words, "--dry-run") == 0
    assert "first the learning rate is searched at n30.9k-d16.6k: 3 to 6 runs" in capsys.readouterr().out
    tried = {factor: job.TriedRate(run="", rate=factor, loss=3 + math.log(factor) ** 2) for factor in (0.5, 1.0, 2.0)}
    found = job.FoundRate.of(tried, read_plan_of_mup(run))
    assert (found.mup_base_width, found.rate_of(read_plan_of_mup(run))) == (32, 0.01)
    assert ladder(run, *SIZES, *words, "--set", "optim.optimizer=lamb", "--dry-run") == 2
    assert "expected optim.optimizer = adamw or muon" in capsys.readouterr().err


def read_plan_of_mup(run: Path):
    plan = {"parametrization": "mup", "mup_base_width": 32, "params": 3e4}
    raw = {"train": {"seq_len": 64}, "plan": plan, "optim": {"learning_rate": 0.01}}
    dataset = job.open_dataset(Store(str(run)))
    return make_plan(Store(str(run)), dataset, load_settings(raw, [], "test"))


@pytest.mark.dist
def test_a_coordinate_check_of_a_recipe(run: Path, capfd: Any) -> None:
    words = ("--set", "plan.parametrization=mup", "--set", "plan.mup_base_width=16")
    assert main(["ladder", str(run), "--coordinate-check", *words]) == 0
    out = capfd.readouterr().out
    assert "width 16  width 32  width 64  width 128" in out
    assert "activations move alike at all widths" in out
