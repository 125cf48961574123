"""`penstock ladder`: the proxy runs that it trains and resumes, the law that it fits, and plans by that law."""

import argparse
import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jobs.cli import main
from jobs.exit_codes import exit_code_of
from jobs.verbs import ladder as job
from jobs.verbs import proxies
from jobs.verbs.ladder import LAW_NAME, add_ladder_arguments, ladder_command
from jobs.verbs.proxies import Proxy
from schemas.errors import ConfigError
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.plan import PlanConfig
from train.model.shape import choose_shape, num_parameters
from train.monitor.metrics import read_train_manifest
from train.plan.ladder import BODY_SHARE, RANGE, ProxyRun, plan_proxies, sizes_of, smallest_size
from train.plan.make_plan import make_plan
from train.plan.plan import read_plan, read_settings
from train.scaling import fit
from train.scaling.fit import PUBLISHED, MeasuredLoss, fit_law, fit_or_hold_exponents, open_exponents
from train.scaling.laws import LossLaw
from train.scaling.own_law import LawFile, law_file, law_in, read_law, write_law
from train.scaling.repeats import worth_of_tokens

LAW = LossLaw("truth", "", floor=1.9, a=300.0, b=900.0, alpha=0.30, beta=0.28)
"""A law whose exponents are not the published ones."""


@pytest.fixture
def few_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that is not determined is fitted from a few starts: each ends somewhere else, after many steps."""
    monkeypatch.setattr(fit, "POLISHED", 6)


def grid(noise: float, sizes: int = 5, span: float = 16.0, seed: int = 0) -> list[MeasuredLoss]:
    """A ladder's runs whose losses follow LAW up to a share of noise."""
    random = np.random.default_rng(seed)
    runs = []
    for params in np.geomspace(1e6, 1e6 * span, sizes).tolist():
        for tokens in np.geomspace(80 * params / RANGE, 80 * params, 3).tolist():
            loss = LAW.loss(params, tokens) * math.exp(random.normal() * noise)
            runs.append(MeasuredLoss(params, tokens, loss, f"n{params:.0f}", "d" * 64, "p" * 64))
    return runs


# ------------------------------------------------------------------------------------------------------ fit and hold


def test_a_ladder_without_much_noise_gives_its_own_exponents() -> None:
    result = fit_or_hold_exponents(grid(0.0005), draws=12, share=0.9)
    assert result.held is None
    for name in ("floor", "alpha", "beta"):
        interval = result.intervals[name]
        assert interval.low - 0.005 < getattr(LAW, name) < interval.high + 0.005
    assert abs(result.law.alpha - PUBLISHED.alpha) > 0.03


@pytest.mark.usefixtures("few_starts")
def test_exponents_that_noise_leaves_open_are_held_as_published() -> None:
    """The rest still follows the runs: over them, the law is off by no more than the noise."""
    runs = grid(0.03, sizes=3, span=4.0)
    assert set(open_exponents(fit_law(runs, 12))) & {"alpha", "beta"}
    result = fit_or_hold_exponents(runs, draws=12, share=0.9)
    assert result.held == PUBLISHED
    assert (result.law.alpha, result.law.beta) == (PUBLISHED.alpha, PUBLISHED.beta)
    assert set(result.intervals) == {"floor", "a", "b"}
    written = law_file(result, runs, 0.9, "")
    assert written.law.deviation < 0.06
    assert written.law.held == ("alpha", "beta")
    assert written.law.interval("alpha") == written.law.interval("exponent") == "held, not fitted"
    assert written.law.source_of("alpha") == PUBLISHED.source
    assert written.law.interval("floor").startswith("90 % between ")


@pytest.mark.parametrize(
    ("width", "alpha", "is_open"), [(0.149, 0.3, False), (0.151, 0.3, True), (0.0, 0.0, True), (0.0, -0.1, True)]
)
def test_the_rule_on_both_sides(width: float, alpha: float, is_open: bool) -> None:
    """An exponent of 0.3 is open from an interval of 0.15 on."""
    law = LossLaw("", "", 1.0, 1.0, 1.0, alpha, 0.3)
    intervals = {"alpha": fit.BootstrapInterval(alpha, alpha + width), "beta": fit.BootstrapInterval(0.28, 0.32)}
    assert open_exponents(fit.Fit(law, 0.0, intervals, 9)) == (["alpha"] if is_open else [])
    assert open_exponents(fit.Fit(LossLaw("", "", 1.0, 1.0, 1.0, 0.3, 0.3), 0.0, {}, 9)) == []


@pytest.mark.usefixtures("few_starts")
def test_a_law_of_runs_that_do_not_differ_by_size_is_not_written(tmp_path: Path) -> None:
    """Whose exponents are held, for the free fit makes N's as steep as it can."""
    random = np.random.default_rng(0)
    runs = [
        MeasuredLoss(n, d, 2 + 60 * d**-0.3 * math.exp(random.normal() * 0.01))
        for n, d in ((one.params, one.tokens) for one in grid(0.0))
    ]
    result = fit_or_hold_exponents(runs, draws=12, share=0.9)
    assert result.held == PUBLISHED
    with pytest.raises(ConfigError, match=r"expected runs whose loss falls with N, got a = .* the file is not written"):
        write_law(str(tmp_path / "law.json"), law_file(result, runs, 0.9, ""))
    assert not list(tmp_path.iterdir())


def test_a_term_that_is_sure_to_be_nothing_makes_no_law(tmp_path: Path) -> None:
    """An interval may be narrow around nothing: what counts is what the term falls by, beside the scatter."""
    runs = grid(0.003)
    good = law_file(fit_or_hold_exponents(runs, draws=20, share=0.9), runs, 0.9, "")
    write_law(str(tmp_path / "law.json"), good)
    nothing = 3.6e-46
    law = good.law.model_copy(update={"a": nothing, "intervals": good.law.intervals | {"a": (nothing, nothing)}})
    with pytest.raises(ConfigError, match=r"falls with N, got a = 3\.6e-46 .* the file is not written"):
        write_law(str(tmp_path / "other.json"), good.model_copy(update={"law": law}))
    assert [path.name for path in tmp_path.iterdir()] == ["law.json"]


def test_a_run_drawn_anew_may_have_one_size_only() -> None:
    """Whose A no float may hold."""
    assert fit._law(np.array([800.0, 3.0, 0.1, 30.0, 0.3]), "", "").a == math.exp(fit.LARGEST)


# ------------------------------------------------------------------------------------------------------------- rungs


def test_sizes_and_lengths_lie_evenly_by_ratio() -> None:
    assert sizes_of(1e6, 8e6, 4, 1e9) == [1_000_000, 2_000_000, 4_000_000, 8_000_000]
    assert sizes_of(1e6, None, 3, 2e7) == [1_000_000, 2_000_000, 4_000_000]
    assert sizes_of(1e6, None, 3, 1.6e9)[-1] == 10_000_000  # an eighth of what 20 tokens per parameter ask for
    rungs = plan_proxies({1_000_000: 1_048_576, 2_000_000: 2_000_000}, 3, 1e8)
    assert [(rung.params, rung.tokens) for rung in rungs] == [
        (1_048_576, 5_242_880),
        (1_048_576, 20_971_520),
        (1_048_576, 83_886_080),
        (2_000_000, 6_250_000),  # no run sees a token twice
        (2_000_000, 25_000_000),
        (2_000_000, 100_000_000),
    ]
    assert [rung.name for rung in rungs[:2]] == ["n1.05M-d5.24M", "n1.05M-d21M"]


@pytest.mark.parametrize("vocab_size", [4096, 32_000])
def test_the_smallest_size_is_no_bare_embedding(vocab_size: int) -> None:
    sizing = PlanConfig()
    params = smallest_size(vocab_size, sizing)
    shape = choose_shape(params, vocab_size, sizing)
    assert BODY_SHARE <= num_parameters(shape, embeddings=False) / params < 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sizes 2", "ladder --sizes: expected 3 to 5 model sizes, got 2"),
        ("--sizes 6", "ladder --sizes: expected 3 to 5 model sizes, got 6"),
        ("--tokens-per-size 1", "ladder --tokens-per-size: expected 2 to 6 runs of each model size, got 1"),
        ("--smallest 4e4 --largest 4e4", "expected more parameters than the smallest proxy's 40,000, got 40,000"),
        ("--largest 1e6", "expected at least 1,000,000 unique training tokens, 1 for each parameter of the largest"),
        ("--sizes 5 --largest 5e4", "expected 5 different model sizes, got shapes of 30,944, 30,944, "),
        (
            "--set train.global_batch=64",
            "expected at least 20 steps in every proxy run, got 4 steps in ",
        ),
        ("--set train.steps=5", "that the ladder does not choose itself, got train.steps."),
        ("--set quality.min_words=5", "that the ladder does not choose itself, got quality.min_words."),
        ("--set plan.law=own", "that the ladder does not choose itself, got plan.law."),
        ("--set optim.schedule=plateau", "optim.schedule = plateau: expected a schedule that scales with the length"),
        ("--set layout.tensor=2", "layout: expected"),
        ("--share 1", "ladder: expected --draws >= 0 and --share between 0 and 1, got 6 and 1"),
    ],
)
def test_ladders_that_cannot_be_are_refused_before_anything_is_written(
    dataset: Path, capsys: Any, words: str, message: str
) -> None:
    assert ladder(dataset, *SMALL, *words.split()) == 2
    assert message in capsys.readouterr().err
    assert not (dataset / "ladder").exists()


def test_no_proxy_is_trained_through_a_link(tmp_path: Path, capsys: Any) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/ladder").symlink_to(tmp_path / "elsewhere")
    assert main(["ladder", run.uri]) == 2
    assert "run/ladder: expected a folder of the run to write to" in capsys.readouterr().err


def test_a_dataset_that_holds_nothing_out_has_no_loss_to_compare(tmp_path: Path, capsys: Any) -> None:
    run = make_tiny_dataset(tmp_path, {"web": 30})
    recipe = {"source": {"paths": ["x"]}, "train": {"seq_len": 256}}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    dataset = open_dataset(run)
    tokens = dataset.num_tokens("heldout")["web"]
    if tokens <= 256:
        pytest.fail(f"the tiny dataset holds {tokens} tokens out: fewer than a row")
    dataset.streams["web/heldout"].clear()
    with pytest.raises(ConfigError, match="expected held-out rows of 256 tokens, got none"):
        job._check(read_settings(run, dataset, []), dataset)


# -------------------------------------------------------------------------------------------------------- real proxies

SIZES = ("--sizes", "3", "--tokens-per-size", "2", "--smallest", "3e4", "--largest", "6.2e4", "--draws", "6")
SMALL = (*SIZES, "--no-rate-search")
LOWERED = {
    "train.plan.ladder.RANGE": 4.0,
    "jobs.verbs.ladder.RANGE": 4.0,
    "train.plan.ladder.LEAST_RATIO": 1.0,
    "train.scaling.own_law.LEAST_SHARE": -1.0,
    "train.scaling.own_law.LEAST_FALL": -1.0,
    "train.scaling.fit.POLISHED": 6,
}
RECIPE: dict[str, Any] = {
    "source": {"paths": ["x"]},
    "train": {"seq_len": 64, "steps": 7, "global_batch": 3},
    "plan": {"num_layers": 9, "law": "kaplan"},
}
NAMES = [f"n{params}-d{tokens}" for params in ("30.9k", "48.4k", "61.9k") for tokens in ("16.6k", "66.6k")]


def ladder(run: Path, *words: str) -> int:
    """The exit code of `penstock ladder RUN WORDS`, whose limits are lowered so that it is over soon."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    add_ladder_arguments(parser)
    arguments = parser.parse_args([str(run), *words])
    with contextlib.ExitStack() as stack:
        for name, value in LOWERED.items():
            stack.enter_context(mock.patch(name, value))
        return exit_code_of(lambda: ladder_command(arguments))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of some 65,000 tokens, whose recipe asks for a model of its own."""
    run = make_tiny_dataset(tmp_path_factory.mktemp("ladder") / "run", {"web": 330, "books": 130}, vocab_size=128)
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE}))
    return Path(run.uri)


@dataclass(frozen=True)
class Laddered:
    """A ladder that was killed and resumed."""

    run: Path
    first: tuple[str, ...]
    """Proxy runs that were started before it was killed; the last did not finish."""
    second: tuple[str, ...]
    """Proxy runs that were started afterwards."""
    out: str
    """What the second part printed."""

    @property
    def law(self) -> LawFile:
        """What it found."""
        return read_law(str(self.run / LAW_NAME))


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Processes started here have one core, so that training has one thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def laddered(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Laddered:
    run = tiny_runs.copied(dataset, tmp_path_factory.mktemp("laddered") / "run")
    begun: list[str] = []

    def training(proxy: Proxy, ranks: int = 1) -> None:
        name = proxy.run.uri.rpartition("/")[2]
        begun.append(name)
        if len(begun) == 3:
            raise KeyboardInterrupt
        if len(begun) == 1:
            with one_core():
                proxies.train_proxy(proxy)  # as it really is: in a process of its own
        else:
            tiny_runs.trained(Path(proxy.run.uri), 1)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(job, "train_proxy", training)
        assert ladder(run, *SMALL) == 130
        first = tuple(begun)
        assert not (run / LAW_NAME).exists()
        out.seek(out.truncate(0))
        assert ladder(run, *SMALL) == 0
    return Laddered(run, first, tuple(begun[len(first) :]), out.getvalue())


@pytest.mark.dist
def test_a_killed_ladder_resumes_with_the_runs_that_are_left(laddered: Laddered) -> None:
    assert list(laddered.first) == NAMES[:3]
    assert list(laddered.second) == NAMES[2:]
    assert (laddered.run / "ladder" / NAMES[0] / "train.log").read_text().count("trained: ") == 1


@pytest.mark.dist
def test_every_proxy_is_a_run_of_its_own_that_repeats_nothing(laddered: Laddered) -> None:
    """With the schedule, rate and batch of its own plan, measured on all held-out rows of the dataset."""
    seen = set()
    for name in NAMES:
        run = Store(str(laddered.run / "ladder" / name))
        plan = read_plan(run)
        assert plan.settings.plan.max_epochs == 1
        assert plan.stages[-1].end == plan.steps == read_train_manifest(run).steps >= 20
        assert plan.num_tokens <= open_dataset(run).num_tokens()["web"] + open_dataset(run).num_tokens()["books"]
        seen.add((plan.num_params, plan.learning_rate, plan.num_tokens))
        last = tiny_runs.metrics(Path(run.uri))[-1]
        assert last.heldout_loss == read_train_manifest(run).heldout_loss
        assert [line.step for line in tiny_runs.metrics(Path(run.uri)) if line.heldout_loss is not None] == [plan.steps]
    assert len(seen) == 6
    assert {params for params, _, _ in seen} == {30_944, 48_448, 61_856}


@pytest.mark.dist
def test_the_law_has_its_runs_and_says_how_it_was_fitted(laddered: Laddered) -> None:
    result, digest = laddered.law, open_dataset(Store(str(laddered.run))).digest
    assert result.law.dataset == digest
    assert [point.run for point in result.points] == [f"ladder/{name}" for name in NAMES]
    for point in result.points:
        run = Store(str(laddered.run / point.run))
        assert (point.params, point.tokens) == (read_plan(run).num_params, read_plan(run).num_tokens)
        assert point.loss == read_train_manifest(run).heldout_loss
        assert point.plan == read_train_manifest(run).plan
        assert point.fitted == pytest.approx(law_in(result.law).loss(point.params, point.tokens))
        assert point.residual == pytest.approx(math.log(point.loss / point.fitted))
    largest = result.points[-1]
    assert (result.law.params, result.law.tokens) == (largest.params, largest.tokens)
    assert result.law.compute == 6 * largest.params * largest.tokens
    assert result.law.deviation < 0.05
    assert "Huber loss" in result.how
    # Longer runs are better ones: there is something to fit.
    assert all(a.loss > b.loss for a, b in zip(result.points[::2], result.points[1::2], strict=True))


@pytest.mark.dist
def test_what_a_ladder_prints(laddered: Laddered) -> None:
    out = laddered.out
    assert "ladder of 6 proxy runs: 249 k tokens, " in out
    assert "settings of the recipe that the ladder replaces: plan." in out
    for point in laddered.law.points:
        assert f"{point.loss:.4f}  {point.fitted:.4f}" in out
    assert "N: all parameters, a tied embedding once" in out
    assert "beyond 100 times that, " in out
    assert "times the most expensive run: an extrapolation)" in out
    assert f"`penstock plan {laddered.run} --law {laddered.run}/ladder/law.json` uses it" in out


@pytest.mark.dist
def test_a_finished_ladder_trains_nothing_and_a_changed_one_is_refused(
    laddered: Laddered, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "train_proxy", None)
    before = (laddered.run / LAW_NAME).read_bytes()
    assert ladder(laddered.run, *SMALL) == 0
    assert (laddered.run / LAW_NAME).read_bytes() == before
    capsys.readouterr()
    assert ladder(laddered.run, *SMALL, "--set", "optim.weight_decay=0.2") == 2
    assert (
        f"ladder/{NAMES[0]}: expected a proxy run with the current settings, got one with other settings"
        in capsys.readouterr().err
    )
    assert ladder(laddered.run, *SMALL) == 0  # and what was refused has changed nothing


def test_a_dry_run_writes_nothing(dataset: Path, capsys: Any) -> None:
    assert ladder(dataset, *SMALL, "--dry-run") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert not (dataset / "ladder").exists()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("verify", " files match the manifest"),
        ("trace --step 3", "step 3, rows 0 to "),
        ("plan --quiet", "plan kept, because the run has checkpoints: "),
        ("lineage", "end of training"),
    ],
)
def test_a_proxy_is_a_run_like_any_other(laddered: Laddered, capsys: Any, words: str, text: str) -> None:
    verb, *more = words.split()
    proxy = laddered.run / "ladder" / NAMES[0]
    before = read_plan(Store(str(proxy)))
    assert main([verb, str(proxy), *more]) == 0
    assert text in capsys.readouterr().out
    after = read_plan(Store(str(proxy)))
    assert (after.shape, after.stages, after.learning_rate) == (before.shape, before.stages, before.learning_rate)


# ------------------------------------------------------------------------------------------------ plans by an own law


@pytest.fixture(scope="module")
def fitted(dataset: Path) -> LawFile:
    """A law of the dataset."""
    digest = open_dataset(Store(str(dataset))).digest
    law = LossLaw("", "", 1.0, 40.0, 120.0, 0.35, 0.40)
    lengths = np.geomspace(1e5, 4e6, 4).tolist()
    runs = [MeasuredLoss(n, d, law.loss(n, d), "", digest, "") for n in (3e4, 6e4, 1e5) for d in lengths]
    return law_file(fit_or_hold_exponents(runs, 20, 0.9), runs, 0.9, "synthetic")


@pytest.fixture
def own(tmp_path: Path, dataset: Path, fitted: LawFile) -> tuple[Store, LawFile, str]:
    """A run, and a law of its dataset with a file of it."""
    run = Store(str(tiny_runs.copied(dataset, tmp_path / "run")))
    write_run(run, read_run(run).model_copy(update={"recipe": {"source": {"paths": ["x"]}, "train": {"seq_len": 64}}}))
    write_law(str(tmp_path / "law.json"), fitted)
    return run, fitted, str(tmp_path / "law.json")


def planned(own: tuple[Store, LawFile, str], *words: str) -> dict[str, float]:
    """The figures of a plan by the own law."""
    run, _, place = own
    assert main(["plan", run.uri, *by_law(place), *words]) == 0
    return {one["name"]: one["value"] for one in run.read_json("train/plan.json")["figures"]}


def by_law(place: str) -> list[str]:
    return ["--set", "plan.law=own", "--set", f"plan.law_file={place}", "--set", "plan.min_params=1000"]


def test_from_tokens_from_a_budget_and_from_parameters(own: tuple[Store, LawFile, str]) -> None:
    law = law_in(own[1].law)
    assert law.alpha == pytest.approx(0.35, abs=1e-3)
    result = planned(own)
    assert result["wanted_params"] == round(law.for_tokens(result["unique_tokens"]).params)
    result = planned(own, "--flops", "3e10", "--set", "plan.max_epochs=100")
    best = law.for_compute(3e10)
    assert (result["size.own_law.params"], result["size.own_law.tokens"]) == (best.params, best.tokens)
    assert result["wanted_params"] == round(best.params)
    assert result["size.own_law.loss"] == law.loss(best.params, best.tokens)
    result = planned(own, "--params", "31000", "--set", "plan.max_epochs=100")
    assert result["tokens"] == pytest.approx(law.for_params(result["params"]).tokens, rel=0.01)


def test_the_own_law_stands_beside_the_eight_others_with_its_intervals(own: tuple[Store, LawFile, str]) -> None:
    planned(own)
    plan = read_plan(own[0])
    figures = {figure.name: figure for figure in plan.figures}
    assert sum(name.startswith("size.") and name.endswith(".params") for name in figures) == 9
    digest = open_dataset(own[0]).digest[:12]
    assert figures["size.own_law.params"].source == f"fitted to 12 runs on dataset {digest}"
    assert figures["own_law.alpha"].value == pytest.approx(0.35, abs=1e-3)
    assert figures["own_law.alpha"].formula.startswith("90 % between 0.3")
    assert figures["own_law.exponent"].value == pytest.approx(0.4 / 0.75, abs=1e-3)


def test_repeats_are_worth_less_to_the_own_law_too(own: tuple[Store, LawFile, str]) -> None:
    law = law_in(own[1].law)
    result = planned(own, "--set", "train.steps=2000", "--set", "train.global_batch=2", "--set", "plan.max_epochs=9")
    worth = worth_of_tokens(result["unique_tokens"], result["tokens"])
    assert result["tokens"] == 256_000 > worth
    assert result["expected_loss"] == pytest.approx(law.loss(result["params"], worth))
    advice = [line for line in read_plan(own[0]).advice if "times, worth" in line]
    assert f"expected loss {result['expected_loss']:.3f}, with as many new ones" in advice[0]
    assert "(by the own law; Muennighoff" in advice[0]


def test_a_plan_stands_without_the_file_of_its_law(own: tuple[Store, LawFile, str]) -> None:
    run, result, place = own
    planned(own)
    Path(place).unlink()
    plan, dataset = read_plan(run), open_dataset(run)
    assert plan.settings.plan.own_law == result.law
    assert plan.settings.plan.law_file is None
    assert make_plan(run, dataset, read_settings(run, dataset, ["train.log_every=3"])).shape == plan.shape


def test_a_law_of_another_dataset_and_one_that_reaches_far_are_warned_of(own: tuple[Store, LawFile, str]) -> None:
    run, result, place = own
    planned(own)
    assert not [line for line in read_plan(run).advice if "own law was fitted" in line]
    for times, warned in ((90.0, False), (110.0, True)):
        law = result.law.model_copy(update={"dataset": "a" * 64})
        planned(own)
        plan = read_plan(run)
        law = law.model_copy(update={"compute": 6 * plan.num_params * plan.num_tokens / times})
        write_law(place, result.model_copy(update={"law": law}))
        planned(own)
        said = "\n".join(read_plan(run).advice)
        assert "The own law was fitted on dataset aaaaaaaaaaaa, this run's is " in said
        assert (f"This plan costs {times:.0f} times the dearest run that the own law was fitted to" in said) == warned


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "expected a fitted law, got no such file. Make it with `penstock ladder`"),
        ("{", "expected JSON, got "),
        ("[]", "expected a law of format version 1, got None"),
        ({"format_version": 2}, "expected a law of format version 1, got 2"),
        ({"law.alpha": -0.3}, "law.alpha: Input should be greater than 0 (-0.3)"),
        ({"law.beta": 0}, "law.beta: Input should be greater than 0 (0)"),
        ({"law.floor": math.nan}, "law.floor: Input should be a finite number (nan)"),
        ({"law.a": None}, "law.a: Input should be a valid number (None)"),
        (
            {"law.alpha": 1e-6, "law.beta": 1e-6},
            "own law: expected a positive, finite N and D for the largest of its 12 runs, got none from `least ",
        ),
        ({"law.more": 1}, "law.more: Extra inputs are not permitted"),
    ],
)
def test_files_that_hold_no_law_are_refused(
    own: tuple[Store, LawFile, str], capsys: Any, change: Any, message: str
) -> None:
    run, result, place = own
    if change is None:
        Path(place).unlink()
    elif isinstance(change, str):
        Path(place).write_text(change)
    else:
        raw = result.model_dump(mode="json")
        for name, value in change.items():
            *sections, key = name.split(".")
            (raw[sections[0]] if sections else raw)[key] = value
        Path(place).write_text(json.dumps(raw))
    assert main(["plan", run.uri, *by_law(place)]) == 2
    error = capsys.readouterr().err
    assert f"plan.law_file = {place}: " in error
    assert message in error
    assert not run.exists("train/plan.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.law=own"], "law = own requires law_file"),
        (["plan.law_file=law.json"], "law_file and own_law require law = own"),
        (["plan.law=own", "plan.law_file=law.json", "plan.tokens_per_parameter=30"], "requires law = ratio"),
    ],
)
def test_a_law_and_its_file_want_each_other(
    own: tuple[Store, LawFile, str], capsys: Any, words: Sequence[str], message: str
) -> None:
    run = own[0]
    assert main(["plan", run.uri, *(part for word in words for part in ("--set", word))]) == 2
    assert message in capsys.readouterr().err
    assert not run.exists("train/plan.json")


def test_a_name_tells_both_numbers() -> None:
    assert ProxyRun(0, 30_880, 5_056).name == "n30.9k-d5.06k"
