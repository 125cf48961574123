"""`penstock ladder`: small runs of several sizes and lengths on a run's dataset, and a scaling law fitted to them.

The proxy runs are stored in `RUN/ladder`, so the same command resumes an interrupted ladder.
"""

import argparse
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from jobs.arguments import Command, add_overrides, add_run, number, whole
from jobs.recipe import recipe_sections, stored_recipe
from jobs.verbs.proxies import TABLES, Proxy, plan_proxy, train_proxy, with_shares
from jobs.verbs.scaling import add_interval_arguments, check_intervals, describe_fit, measured_run, print_law
from jobs.verbs.train import in_torch
from schemas.errors import ConfigError
from schemas.long_work import LongWork
from schemas.manifest import RUN_NAME, read_run, write_run
from schemas.overrides import load_recipe
from schemas.paths import METRICS_NAME, check_own_folders
from schemas.storage import Store
from schemas.text import format_short, text_table
from schemas.tokens import Dataset, open_dataset
from schemas.versions import attach_run
from train.checkpoint.folder import local_path
from train.config.recipe import resolve_recipe, with_recipe
from train.config.settings import SECTIONS, Settings, load_settings
from train.data.order import heldout_streams
from train.model.shape import choose_shape, flops_per_token, sized_parameters
from train.plan.ladder import (
    LEAST_STEPS,
    MAX_RATES,
    MOST_RATIO,
    RANGE,
    RATE_FACTORS,
    ProxyRun,
    best_factor,
    next_factor,
    plan_proxies,
    sizes_of,
    smallest_size,
)
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, check_ranks, check_settings_used
from train.plan.rules import deepseek_learning_rate
from train.scaling.fit import fit_or_hold_exponents
from train.scaling.own_law import LawFile, TriedRate, law_file, write_law

GROUP = "training"
VERBS = {
    "ladder": "Fit a scaling law to proxy runs of several sizes. They are trained on a run's dataset.",
}

Arguments = argparse.Namespace
Recipe = dict[str, dict[str, Any]]
FOLDER, LAW_NAME = "ladder", "ladder/law.json"
NARROWEST = 64
"""d_model of the narrowest model of a coordinate check, whose widest model is 8 times wider; less if the base width of
muP is less."""
LADDER_SETTINGS = {
    "plan": "law law_file own_law tokens_per_parameter compute gpu_hours usd params inference_tokens max_epochs "
    "num_layers d_model",
    "train": "steps stages eval_every eval_sequences skip_file profile",
    "guard": "patience min_improvement",
}
"""Settings that the ladder chooses itself, by section; `--set` cannot override them."""
SIZE_SETTINGS = {"plan": "num_heads num_kv_heads d_ffw", "train": "global_batch", "optim": "learning_rate warmup_steps"}
"""Settings of a recipe that are right only for its own model; the plan of each proxy run chooses them unless `--set`
does."""
MEASURED_ROWS = 4096
"""Maximum number of held-out rows that are measured of a source. With 512 tokens in a row, the sampling error is below
0.2 % of a nat for all runs."""
LAST_STEP_ONLY = 1 << 40
"""Steps between held-out losses: more than any run has, so that only the last step is measured."""
UNBOUNDED_SCHEDULES = ("plateau", "step")
"""Learning rate schedules whose form does not depend on the length of the run."""
POLL_SECONDS = 0.5
FLOPS_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
"""Units of the progress line: the first of which the work has at least 1,000, or else the last."""


def add_ladder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ladder` except the run and `--set`."""
    parser.add_argument("--sizes", type=whole, default=4, help="number of model sizes, 3 to 5")
    parser.add_argument(
        "--tokens-per-size", type=whole, default=3, help="runs of each size, with different numbers of tokens"
    )
    parser.add_argument("--smallest", type=number, metavar="N", help="parameters of the smallest model")
    parser.add_argument("--largest", type=number, metavar="N", help="parameters of the largest model")
    parser.add_argument(
        "--no-rate-search", action="store_true", help="use the learning rates of the plan's rule, and try no others"
    )
    parser.add_argument(
        "--coordinate-check",
        action="store_true",
        help="train nothing, but compare how activations of models of four widths move in their first updates",
    )
    parser.add_argument("--ranks", type=whole, default=1, help="processes that train a proxy together")
    add_interval_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the proxy runs, and train nothing")


def ladder_command(arguments: Arguments) -> int:
    """Train proxy runs of several sizes and lengths on a run's dataset, and fit a scaling law to them."""
    check_intervals(arguments, "ladder")
    if arguments.ranks < 1:
        raise ConfigError(f"ladder: expected --ranks >= 1, got {arguments.ranks}. Give the number of processes.")
    run = Store(arguments.run)
    local_path(run, FOLDER)
    check_own_folders(run, FOLDER)
    dataset = open_dataset(run)
    shared, left_out = shared_recipe(run, arguments.overrides)
    recipe = with_shares(shared, dataset)
    settings = with_recipe(load_settings(recipe, [], f"{run.uri}/{RUN_NAME}"))
    _check(settings, dataset)
    if arguments.coordinate_check:
        return _check_coordinates(resolve_recipe(settings), dataset)
    searches = not arguments.no_rate_search and settings.optim.learning_rate is None
    with tempfile.TemporaryDirectory() as scratch:  # a plan may write an index of packed rows
        steps = _planned(Store(scratch), dataset, recipe, arguments)
    print("\n".join(_describe_ladder(steps, left_out, searches)), flush=True)
    if arguments.dry_run:
        return 0
    tried = _search_rate(run, steps[0], recipe, arguments.ranks) if searches else {}
    found = FoundRate.of(tried, steps[0][1])
    if tried:
        print(found.describe(), flush=True)
    rungs = [replace(rung, rate=found.rate_of(plan)) if tried else rung for rung, plan in steps]
    proxies = [_make_proxy(run, rung, recipe) for rung in rungs]
    _train(proxies, arguments.ranks)
    pairs = zip(proxies, steps, strict=True)
    measured = [measured_run(proxy.run, f"{FOLDER}/{rung.name}") for proxy, (rung, _) in pairs]
    fit = fit_or_hold_exponents(measured, arguments.draws, arguments.share)
    law = law_file(fit, measured, arguments.share, describe_fit(fit, arguments.draws, arguments.share))
    law = found.added_to(law)
    print("\n".join(_results(law)))
    print(print_law(law, fit, [law.law.compute * times for times in (1, 10, 100, 1000)]), flush=True)
    write_law(f"{run.uri}/{LAW_NAME}", law)
    place = f"{arguments.run.rstrip('/')}/{LAW_NAME}"
    print(f"{place} written; `penstock plan {quote(arguments.run)} --law {quote(place)}` uses it")
    return 0


def shared_recipe(run: Store, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Return the recipe that all proxy runs share, and the names of the run's settings that this recipe omits.

    Raises ConfigError if an override names a setting that the ladder chooses, or a setting that is not used in
    training.
    """
    named = {text.partition("=")[0].strip() for text in overrides}
    wrong = sorted(name for name in named if name in _names(LADDER_SETTINGS) or name.partition(".")[0] not in SECTIONS)
    if wrong:
        raise ConfigError(
            f"ladder --set: expected training settings that the ladder does not choose itself, got {', '.join(wrong)}. "
            "Remove these overrides."
        )
    stored = stored_recipe(run, overrides).to_json()
    omitted = {*_names(LADDER_SETTINGS), *_names(SIZE_SETTINGS)} - named
    sections = {section: values for section, values in stored.items() if section in SECTIONS}
    left_out = [f"{name}.{key}" for name, values in sections.items() for key in values if f"{name}.{key}" in omitted]
    used = {
        name: {key: value for key, value in values.items() if f"{name}.{key}" not in omitted}
        for name, values in sections.items()
    }
    return stored | used, left_out


def _names(settings: dict[str, str]) -> set[str]:
    return {f"{section}.{key}" for section, keys in settings.items() for key in keys.split()}


def _check(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError if the settings or the dataset do not suit the proxy runs of a ladder."""
    check_settings_used(settings, dataset)
    if not heldout_streams(dataset, settings.train.seq_len):
        raise ConfigError(
            f"{dataset.folder.uri}: expected held-out rows of {settings.train.seq_len} tokens, got none. Raise "
            "tokens.heldout_share, or lower train.seq_len."
        )
    if settings.optim.schedule in UNBOUNDED_SCHEDULES:
        raise ConfigError(
            f"optim.schedule = {settings.optim.schedule}: expected a schedule that scales with the length of a run, "
            "got one that does not. Use --set optim.schedule=cosine."
        )


def _planned(scratch: Store, dataset: Dataset, recipe: Recipe, arguments: Arguments) -> list[tuple[ProxyRun, Plan]]:
    """Return the proxy runs and their plans. Raises ConfigError if the dataset is too small for a proxy run."""
    settings = resolve_recipe(with_recipe(load_settings(recipe, [], scratch.uri)))
    vocab_size = dataset.tokenizer.vocab_size
    if settings.plan.model:
        raise ConfigError(
            f"ladder: expected the transformer, whose sizes it chooses, got plan.model = {settings.plan.model}. Train "
            "runs of several plan.params, and fit them with `penstock fit-scaling`."
        )
    smallest = arguments.smallest or smallest_size(vocab_size, settings.plan)

    def planned(rung: ProxyRun) -> Plan:
        return make_plan(scratch, dataset, with_recipe(load_settings(recipe, _overrides(rung), scratch.uri)))

    first = _first_rate(settings, smallest, vocab_size)
    unique = planned(ProxyRun(round(smallest), 1, 1 << 60, first)).num_tokens
    params = sizes_of(smallest, arguments.largest, arguments.sizes, unique)
    sizes = {size: sized_parameters(choose_shape(float(size), vocab_size, settings.plan)) for size in params}
    rungs = [replace(rung, rate=first) for rung in plan_proxies(sizes, arguments.tokens_per_size, unique)]
    plans = [(rung, planned(rung)) for rung in rungs]
    if short_runs := [(rung, plan) for rung, plan in plans if plan.steps < LEAST_STEPS]:
        rung, plan = max(short_runs, key=lambda pair: LEAST_STEPS / pair[1].steps * pair[0].tokens)
        least = round(LEAST_STEPS * plan.global_batch * plan.seq_len * RANGE)
        raise ConfigError(
            f"ladder: expected at least {LEAST_STEPS} steps in every proxy run, got {plan.steps} steps in {rung.name}. "
            f"Lower train.global_batch ({plan.global_batch}) or train.seq_len ({plan.seq_len}) by --set. Otherwise add "
            f"data, from {unique:,} to {least:,} unique training tokens."
        )
    for _, plan in plans:
        check_ranks(plan, arguments.ranks)
    return plans


def _first_rate(settings: Settings, smallest: float, vocab_size: int) -> float | None:
    """Return the rate that a search under muP starts from: the rule's for the shortest run of the smallest model.

    None = each run has the rate of the rule, or of the recipe.
    """
    if settings.plan.parametrization != "mup" or settings.optim.learning_rate is not None:
        return None
    shape = choose_shape(float(smallest), vocab_size, settings.plan)
    compute = flops_per_token(shape, settings.train.seq_len, logits=False) * MOST_RATIO / RANGE * smallest
    return float(f"{deepseek_learning_rate(compute):.3g}")


def _overrides(rung: ProxyRun) -> list[str]:
    return [
        *([] if rung.rate is None else [f"optim.learning_rate={rung.rate!r}"]),
        f"plan.params={float(rung.wanted)!r}",
        f"plan.tokens_per_parameter={rung.tokens / rung.params!r}",
        "plan.max_epochs=1",
        f"train.eval_every={LAST_STEP_ONLY}",
        f"train.eval_sequences={MEASURED_ROWS}",
    ]


def _make_proxy(run: Store, rung: ProxyRun, recipe: Recipe) -> Proxy:
    """Write the recipe of a proxy run into its folder, and plan the proxy run.

    Raises ConfigError if the folder holds a proxy run with other settings.
    """
    folder = run.child(f"{FOLDER}/{rung.name}")
    # The recipe contains the overrides, so that it gives the same plan without them.
    own = load_recipe(recipe, _overrides(rung), recipe_sections(), folder.uri).to_json()
    if not folder.exists(RUN_NAME):
        attach_run(folder, run, TABLES)
    before = read_run(folder)
    if before.recipe != own:
        write_run(folder, before.model_copy(update={"recipe": own}))
    try:
        return plan_proxy(run, folder, [])
    except ConfigError:
        write_run(folder, before)
        raise


def _search_rate(run: Store, first: tuple[ProxyRun, Plan], recipe: Recipe, ranks: int) -> dict[float, TriedRate]:
    """Train the shortest run of the smallest model at several learning rates.

    Return each run by its multiple of the first rate. A run that is complete is not trained again.
    """
    (rung, plan), tried = first, dict[float, TriedRate]()
    while (factor := next_factor({key: run_of.loss for key, run_of in tried.items()})) is not None:
        rate = float(f"{factor * plan.learning_rate:.3g}")
        proxy = _make_proxy(run, replace(rung, rate=rate, suffix=f"-rate-x{factor:g}"), recipe)
        _train([proxy], ranks)
        name = f"{FOLDER}/{proxy.run.uri.rpartition('/')[2]}"
        tried[factor] = TriedRate(run=name, rate=rate, loss=measured_run(proxy.run, name).loss)
    return tried


@dataclass(frozen=True)
class FoundRate:
    """The result of a search of the learning rate at the smallest model."""

    tried: Sequence[TriedRate]
    """The runs of the search, by ascending rate; empty = no search."""
    factor: float
    """Multiple of the first rate with the lowest loss."""
    first: float
    """Rate that the search started from."""
    mup_base_width: int | None
    """`plan.mup_base_width` of the runs; None = the standard parametrization."""

    @classmethod
    def of(cls, tried: Mapping[float, TriedRate], plan: Plan) -> "FoundRate":
        """Return the result of a search; `plan`: that of the shortest run of the smallest model."""
        sizing, losses = plan.settings.plan, {factor: run.loss for factor, run in tried.items()}
        base = sizing.mup_base_width if sizing.parametrization == "mup" else None
        factor = float(f"{best_factor(losses):.3g}") if tried else 1.0
        return cls([tried[key] for key in sorted(tried)], factor, plan.learning_rate, base)

    def rate_of(self, plan: Plan) -> float:
        """Return the learning rate of a proxy run from its plan: under muP the same for all, else the rule's times the
        factor.
        """
        rate = self.first if self.mup_base_width else plan.learning_rate
        return float(f"{rate * self.factor:.3g}")

    def describe(self) -> str:
        """Return a line with the losses of all rates, and the best rate."""
        losses = ", ".join(f"{run.rate:.3g}: {run.loss:.4f}" for run in self.tried)
        every = "all runs have this rate" if self.mup_base_width else "all rates of the rule are multiplied by it"
        return f"held-out loss by learning rate: {losses}; the best rate is x {self.factor:.3g} of the rule's, {every}"

    def added_to(self, law: LawFile) -> LawFile:
        """Return the content of a law file with the result, which plans by the law then use."""
        if not self.tried:
            return law
        rate = self.first * self.factor if self.mup_base_width else None
        own = {"rate": rate and float(f"{rate:.3g}"), "mup_base_width": self.mup_base_width}
        own |= {} if self.mup_base_width else {"rate_factor": self.factor}
        return law.model_copy(update={"law": law.law.model_copy(update=own), "rates": list(self.tried)})


def _check_coordinates(settings: Settings, dataset: Dataset) -> int:
    """Run the coordinate check in a process of its own, which imports torch; return its exit code."""
    narrowest = settings.plan.mup_base_width if settings.plan.parametrization == "mup" else NARROWEST
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(settings.to_json()), encoding="utf-8")
        sizes = ["--vocabulary", str(dataset.tokenizer.vocab_size), "--narrowest", str(min(narrowest, NARROWEST))]
        return in_torch("train.eval.coordinates", str(path), *sizes)


def flops_of(plan: Plan) -> float:
    """Return the training FLOPs of a planned run, over all its steps."""
    return float(plan.flops_per_token) * plan.num_tokens


def _train(proxies: Sequence[Proxy], ranks: int) -> None:
    """Train the proxy runs that are not complete, with one progress line for all."""
    left = [proxy for proxy in proxies if not proxy.done]
    total = sum(flops_of(proxy.plan) for proxy in left)
    scale, unit = next((pair for pair in FLOPS_UNITS if total >= 1e3 * pair[0]), FLOPS_UNITS[-1])
    with LongWork(f"ladder, {len(left)} of {len(proxies)} proxy runs", round(total / scale), unit) as work:
        done = 0.0
        for proxy in left:
            with _followed(work, proxy, done / scale, flops_of(proxy.plan) / scale):
                train_proxy(proxy, ranks)
            done += flops_of(proxy.plan)
            work.add(round(done / scale) - work.done)


@contextmanager
def _followed(work: LongWork, proxy: Proxy, before: float, whole: float) -> Iterator[None]:
    """Advance the progress line `work` while another process trains `proxy` in the `with` block.

    `before`: the work of the earlier proxy runs. `whole`: the work of `proxy`. Both are in the unit of `work`.
    """
    stop = threading.Event()

    def follow() -> None:
        while not stop.wait(POLL_SECONDS):
            if proxy.run.exists(METRICS_NAME):
                steps = proxy.run.read_bytes(METRICS_NAME).count(b"\n")
                work.add(round(before + whole * min(steps / proxy.plan.steps, 1.0)) - work.done)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _describe_ladder(steps: Sequence[tuple[ProxyRun, Plan]], left_out: Sequence[str], searches: bool) -> Iterator[str]:
    """Yield the lines that describe the proxy runs to be trained; `searches`: with a search of the learning rate."""
    total = sum(flops_of(plan) for _, plan in steps)
    tokens = sum(plan.num_tokens for _, plan in steps)
    in_all = f"{format_short(tokens)} tokens, {total:.3g} FLOPs in all"
    yield f"ladder of {len(steps)} proxy runs: {in_all}; no run repeats a token"
    if left_out:
        yield f"  settings of the recipe that the ladder replaces: {', '.join(left_out)}"
    if searches:
        rung, plan = steps[0]
        rates = ", ".join(f"{factor * plan.learning_rate:.3g}" for factor in RATE_FACTORS)
        cost = f"{len(RATE_FACTORS)} to {MAX_RATES} runs of {flops_of(plan):.2e} FLOPs"
        yield f"  first the learning rate is searched at {rung.name}: {cost}, at {rates} and, if needed, further rates"
    rows = [("proxy", "layers x width", "N", "D", "D/N", "steps x batch", "FLOPs")]
    for rung, plan in steps:
        shape = f"{plan.shape.num_layers} x {plan.shape.d_model}"
        ratio = f"{plan.num_tokens / plan.num_params:.3g}"
        counts = f"{plan.steps:,} x {plan.global_batch}"
        flops = f"{flops_of(plan):.2e}"
        rows.append((rung.name, shape, f"{plan.num_params:,}", f"{plan.num_tokens:,}", ratio, counts, flops))
    yield from text_table(rows, "<>", "  ")


def _results(law: LawFile) -> Iterator[str]:
    """Yield the lines of a table with the measured and the fitted loss of every proxy run."""
    rows = [("proxy", "N", "D", "held-out loss", "fitted", "residual")]
    for point in law.points:
        numbers = f"{point.loss:.4f}", f"{point.fitted:.4f}", f"{100 * point.residual:+.2f} %"
        rows.append((point.run.removeprefix(f"{FOLDER}/"), f"{point.params:,.0f}", f"{point.tokens:,.0f}", *numbers))
    yield from text_table(rows, "<>", "  ")


COMMANDS = {
    "ladder": Command(
        (add_run, add_overrides, add_ladder_arguments),
        ladder_command,
        "ladder run --sizes 4",
    ),
}
