"""`penstock ladder`: small runs of several sizes and lengths on a run's dataset, and a scaling law fitted to them.

The proxy runs are stored in `RUN/ladder`, so the same command resumes an interrupted ladder.
"""

import argparse
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jobs.arguments import Command, add_overrides, add_run, number, whole
from jobs.recipe import recipe_sections, stored_recipe
from jobs.verbs.proxies import TABLES, Proxy, plan_proxy, train_proxy, with_shares
from jobs.verbs.scaling import add_interval_arguments, check_intervals, describe_fit, measured_run, print_law
from schemas.errors import ConfigError
from schemas.long_work import LongWork
from schemas.manifest import RUN_NAME, read_run, write_run
from schemas.overrides import load_recipe
from schemas.paths import check_own_folders
from schemas.storage import Store
from schemas.text import format_short, text_table
from schemas.tokens import Dataset, open_dataset
from schemas.versions import attach_run
from train.checkpoint.folder import local_path
from train.config.recipe import with_recipe
from train.config.settings import SECTIONS, Settings, load_settings
from train.data.order import heldout_streams
from train.model.shape import choose_shape, sized_parameters
from train.monitor.metrics import METRICS_NAME
from train.plan.ladder import LEAST_STEPS, RANGE, ProxyRun, plan_proxies, sizes_of, smallest_size
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, check_ranks, check_settings_used
from train.scaling.fit import fit_or_hold_exponents
from train.scaling.own_law import LawFile, law_file, write_law

GROUP = "training"
VERBS = {
    "ladder": "Fit a scaling law to proxy runs of several sizes. They are trained on a run's dataset.",
}

Arguments = argparse.Namespace
Recipe = dict[str, dict[str, Any]]
FOLDER, LAW_NAME = "ladder", "ladder/law.json"
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
    with tempfile.TemporaryDirectory() as scratch:  # a plan may write an index of packed rows
        steps = _planned(Store(scratch), dataset, recipe, arguments)
    print("\n".join(_describe_ladder(steps, left_out)), flush=True)
    if arguments.dry_run:
        return 0
    proxies = [_make_proxy(run, rung, recipe) for rung, _ in steps]
    _train(proxies, arguments.ranks)
    pairs = zip(proxies, steps, strict=True)
    measured = [measured_run(proxy.run, f"{FOLDER}/{rung.name}") for proxy, (rung, _) in pairs]
    fit = fit_or_hold_exponents(measured, arguments.draws, arguments.share)
    law = law_file(fit, measured, arguments.share, describe_fit(fit, arguments.draws, arguments.share))
    print("\n".join(_results(law)))
    print(print_law(law, fit, [law.law.compute * times for times in (1, 10, 100, 1000)]), flush=True)
    write_law(f"{run.uri}/{LAW_NAME}", law)
    place = f"{arguments.run.rstrip('/')}/{LAW_NAME}"
    print(f"{place} written; `penstock plan {arguments.run} --law {place}` uses it")
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
    settings, vocab_size = with_recipe(load_settings(recipe, [], scratch.uri)), dataset.tokenizer.vocab_size
    smallest = arguments.smallest or smallest_size(vocab_size, settings.plan)

    def planned(rung: ProxyRun) -> Plan:
        return make_plan(scratch, dataset, with_recipe(load_settings(recipe, _overrides(rung), scratch.uri)))

    unique = planned(ProxyRun(round(smallest), 1, 1 << 60)).num_tokens
    params = sizes_of(smallest, arguments.largest, arguments.sizes, unique)
    sizes = {size: sized_parameters(choose_shape(float(size), vocab_size, settings.plan)) for size in params}
    plans = [(rung, planned(rung)) for rung in plan_proxies(sizes, arguments.tokens_per_size, unique)]
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


def _overrides(rung: ProxyRun) -> list[str]:
    return [
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


def _describe_ladder(steps: Sequence[tuple[ProxyRun, Plan]], left_out: Sequence[str]) -> Iterator[str]:
    """Yield the lines that describe the proxy runs to be trained."""
    total = sum(flops_of(plan) for _, plan in steps)
    tokens = sum(plan.num_tokens for _, plan in steps)
    in_all = f"{format_short(tokens)} tokens, {total:.3g} FLOPs in all"
    yield f"ladder of {len(steps)} proxy runs: {in_all}; no run repeats a token"
    if left_out:
        yield f"  settings of the recipe that the ladder replaces: {', '.join(left_out)}"
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
