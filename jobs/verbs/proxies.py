"""Proxy runs: small training runs on the dataset of another run, each in a folder of its own.

A proxy run has an ordinary run folder: `penstock trace`, `generate` and `verify` work on it. A complete proxy run is
not trained again, so repeating an interrupted command resumes it. The second half of this module plans, trains and
evaluates pairs of proxy runs. A pair is one model on each of two datasets, equal in seed, shape, schedule and number of
tokens.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.recipe import recipe_sections, stored_recipe
from jobs.spark_session import worker_environment
from schemas.ablation import WITH, Measurement
from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.manifest import RUN_NAME, RunFile, read_run, write_run
from schemas.overrides import load_recipe
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.text import format_duration
from schemas.tokens import HELDOUT, Dataset, open_dataset
from schemas.versions import attach_run
from train.checkpoint.folder import Identity, deciding_settings, identify
from train.config.plan import PlanConfig
from train.config.recipe import resolve_recipe, with_recipe
from train.config.settings import Settings, settings_of
from train.data.heldout import OBJECTIVES
from train.data.order import heldout_streams
from train.data.shares import weights_of_epochs
from train.data.stages import NO_SKIPS, stage_lengths
from train.model.shape import choose_shape, sized_parameters
from train.monitor.metrics import MANIFEST_NAME, TrainManifest, read_train_manifest
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, check_settings_used, read_plan, write_plan

TABLES = ("tokens", "tokenizer")
"""Tables of the other run that a proxy run uses."""


@dataclass(frozen=True)
class Proxy:
    """A planned proxy run, which may be trained already."""

    run: Store
    plan: Plan

    @property
    def done(self) -> bool:
        """True if the proxy run has been trained to its last step, or as far as `guard.patience` let it."""
        if not self.run.exists(MANIFEST_NAME):
            return False
        # The stored plan has the number formats of the device, which a plan before training has not.
        manifest, stored = read_train_manifest(self.run), read_plan(self.run)
        trained = (manifest.dataset, manifest.plan) == (stored.dataset, digest_of(deciding_settings(stored)))
        ends_early = self.plan.settings.guard.patience is not None and manifest.steps < self.plan.steps
        return trained and (manifest.steps == self.plan.steps or ends_early)


def plan_proxy(parent: Store, folder: Store, overrides: Sequence[str]) -> Proxy:
    """Plan a proxy run in `folder` on the dataset of the run `parent`, with overrides such as `plan.params=1e6`.

    Raises ConfigError if the folder holds a run with another dataset or another plan.
    """
    if not folder.exists(RUN_NAME):
        attach_run(folder, parent, TABLES)
    dataset = open_dataset(folder)
    if dataset.digest != open_dataset(parent).digest:
        raise ConfigError(
            f"{folder.uri}: expected a run on dataset {open_dataset(parent).digest[:12]}, got one on dataset "
            f"{dataset.digest[:12]}. Delete the folder, then run the same command again."
        )
    settings = settings_of(stored_recipe(folder, overrides))
    stored = read_plan(folder).settings if folder.exists(PLAN_NAME) else None
    if stored is not None:  # the plan of a trained proxy run has the number formats that its device supports
        settings = settings.with_precisions_of(stored.content())
    if stored is None or stored.plan.recipe is not None:
        settings = with_recipe(settings)
    plan = make_plan(folder, dataset, settings)
    if not folder.exists(PLAN_NAME):
        write_plan(folder, plan)
    elif plan_identity(dataset, read_plan(folder)) != plan_identity(dataset, plan):
        raise ConfigError(
            f"{folder.uri}: expected a proxy run with the current settings, got one with other settings. Delete the "
            "folder, then run the same command again."
        )
    return Proxy(folder, plan)


def plan_identity(dataset: Dataset, plan: Plan) -> Identity:
    """Return all facts in a dataset and a plan that determine the trained weights."""
    return identify(dataset, plan, NO_SKIPS)


def train_proxy(proxy: Proxy, ranks: int = 1) -> TrainManifest:
    """Train or resume a proxy run to its end in child processes; a completed run is not trained again.

    The output goes to `train.log` in the folder of the run, which must be local. Raises ContractError if training
    fails.
    """
    if not proxy.done:
        command, environment = ["train.pretrain", proxy.run.uri], worker_environment()
        if ranks > 1:
            command = ["train.launch", "--standalone", "--nproc-per-node", str(ranks), "-m", *command]
            environment = {"OMP_NUM_THREADS": "1"} | environment
        log = proxy.run.path("train.log")
        with os.fdopen(proxy.run.open_own("train.log", os.O_WRONLY | os.O_APPEND), "ab") as lines:
            child = subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=lines, stderr=lines)
            code = _wait(child)
        if code or not proxy.done:
            with open(log, encoding="utf-8", errors="replace") as log_file:
                last = "\n".join(log_file.read().splitlines()[-5:])
            raise ContractError(
                f"{proxy.run.uri}: expected a trained proxy run, got exit code {code} from its process. Read "
                f"{log}, which ends with:\n{last}"
            )
    return read_train_manifest(proxy.run)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for a child process and return its exit code; if this process is terminated, terminate the child too."""
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if child.poll() is None:
            child.terminate()
            child.wait()


# Pairs of proxy runs: for every seed, one model on each of two datasets.

MIN_PARAMS: int = PlanConfig.model_fields["min_params"].default
MAX_PARAMS = 10_000_000
"""Largest default size of a proxy run [parameters]."""
TOKENS_PER_PARAMETER = 20.0
"""Default training tokens per parameter; plan.tokens_per_parameter has the source."""
RUN_ONLY_SETTINGS: Mapping[str, frozenset[str]] = {
    "plan": frozenset(
        (
            *("law", "law_file", "own_law", "tokens_per_parameter", "compute", "gpu_hours", "usd", "params"),
            *("inference_tokens", "max_epochs"),
            *("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ffw", "device_memory"),
        )
    ),
    "train": frozenset(
        ("seed", "global_batch", "steps", "stages", "skip_file", "eval_every", "eval_sequences", "profile")
    ),
    "optim": frozenset(("learning_rate", "warmup_steps")),
    "checkpoint": frozenset(("every", "keep_every")),
    "guard": frozenset(("patience", "min_improvement")),
}
"""Settings for the size and the devices of the run itself, which its proxy runs do not copy. Of `[layout]` they copy
only `micro_batch`."""
NO_EVALUATION = ("train.eval_every=0",)
"""Overrides of every proxy run, applied before those of the user: held-out losses are measured only after training."""


@dataclass(frozen=True)
class ProxySize:
    """The number of seeds, the size and the overridden settings of the proxy runs of an ablation."""

    seeds: int
    params: float | None
    """Parameters of a proxy run; None: 1/20 of the tokens of one pass, between `plan.min_params` and MAX_PARAMS."""
    tokens: int | None
    """Tokens of a proxy run; None: 20 for each parameter, at most one pass over the smaller dataset."""
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """The two proxy runs with the same seed: one trained with the rules, one without."""

    seed: int
    proxies: Mapping[str, Proxy]
    """The proxy runs, by `with` and `without` (the rules)."""


def plan_pairs(sides: Mapping[str, Store], folder: Store, size: ProxySize) -> list[Pair]:
    """Plan the proxy runs of all seeds in the folders `<folder>/with-seed-N` and `<folder>/without-seed-N`.

    `sides`: `with` and `without` -> the run that has this dataset. Raises ContractError if the two plans of a seed
    differ in shape, steps, learning rate or warm-up.
    """
    shared = shared_settings(sides, folder, size)
    pairs = []
    for seed in range(1, size.seeds + 1):
        own = [*shared, f"train.seed={seed}"]
        proxies = {side: plan_proxy(run, _proxy_folder(run, folder, side, seed), own) for side, run in sides.items()}
        check_pair([proxy.plan for proxy in proxies.values()])
        pairs.append(Pair(seed, proxies))
    return pairs


def shared_settings(sides: Mapping[str, Store], folder: Store, size: ProxySize) -> list[str]:
    """Return the overrides that give all proxy runs the same size, batch and number of steps.

    The number of steps is the smaller of those planned for the two datasets.
    """
    first = {side: _proxy_folder(run, folder, side, 1) for side, run in sides.items()}
    datasets = {side: open_dataset(run) for side, run in sides.items()}
    once = min(sum(dataset.num_tokens().values()) for dataset in datasets.values())
    sizing = resolve_recipe(with_recipe(settings_of(stored_recipe(first[WITH], size.overrides)))).plan
    params, _ = default_size(size, once, sizing.min_params)
    if size.params is None:  # the size that the vocabulary and [plan] allow
        params = float(sized_parameters(choose_shape(params, datasets[WITH].tokenizer.vocab_size, sizing)))
    fixed = [f"plan.params={params!r}", *NO_EVALUATION]
    if size.tokens is None:
        fixed += ["plan.max_epochs=1.0"]
    else:
        plan = _sized(first[WITH], datasets[WITH], [*fixed, *size.overrides])
        # A pass consists of whole chunks and blocks, so the requested tokens may need slightly more passes.
        passes = max(1.0, round(1.02 * size.tokens / once, 3))
        fixed += [f"plan.tokens_per_parameter={size.tokens / plan.num_params!r}", f"plan.max_epochs={passes!r}"]
    fixed += size.overrides
    plans = [_sized(first[side], datasets[side], fixed) for side in sides]
    fixed += [f"train.global_batch={min(plan.global_batch for plan in plans)}"]
    plans = [_sized(first[side], datasets[side], fixed) for side in sides]
    return [*fixed, f"train.steps={min(plan.steps for plan in plans)}"]


def check_pair(plans: Sequence[Plan]) -> None:
    """Raise ContractError if the plans of two proxy runs differ in shape, steps, learning rate or warm-up."""
    facts = [
        {
            "shape": plan.shape.model_dump(),
            "steps": [(stage.num_steps, stage.global_batch, stage.seq_len) for stage in plan.stages],
            "learning rate": plan.learning_rate,
            "warm-up": plan.warmup_steps,
        }
        for plan in plans
    ]
    for name, expected in facts[0].items():
        for other in facts[1:]:
            if other[name] != expected:
                raise ContractError(
                    f"ablate: expected proxy runs with equal {name}, got {expected} and {other[name]}. Set "
                    f"the same {name} for both with --set, as in --set optim.learning_rate=0.001."
                )


def train_pairs(pairs: Sequence[Pair], report: Callable[[str], None]) -> float:
    """Train every proxy run that is not complete, pass progress lines to `report`, and return the duration [s]."""
    waiting = [
        (f"{side}-seed-{pair.seed}", proxy) for pair in pairs for side, proxy in pair.proxies.items() if not proxy.done
    ]
    total = sum(len(pair.proxies) for pair in pairs)
    if len(waiting) < total:
        report(f"proxy runs {total - len(waiting)} of {total} are complete")
    started = time.monotonic()
    for number, (name, proxy) in enumerate(waiting, start=1):
        start = time.monotonic()
        manifest = train_proxy(proxy)
        now = time.monotonic()
        left = (now - started) / number * (len(waiting) - number)
        loss = "" if manifest.loss is None else f"  loss {manifest.loss:.4f}"
        times = f"{format_duration(now - start)}{f'  {format_duration(left)} left' if left else ''}"
        report(f"proxy run {number}/{len(waiting)}  {name:<16}  {manifest.steps:,} steps{loss}  {times}")
    return time.monotonic() - started


def evaluate_pairs(
    pairs: Sequence[Pair], on: Sequence[Store], folder: Store, sequences: int, left_out: set[bytes]
) -> dict[tuple[str, int], list[Measurement]]:
    """Return the losses of all proxy runs on held-out rows of each run in `on`, by (`with` or `without`, seed).

    `sequences` is the number of rows to read of each source. Documents with an id in `left_out` are excluded. Raises
    ContractError if the evaluation fails.
    """
    named = {(side, pair.seed): proxy.run for pair in pairs for side, proxy in pair.proxies.items()}
    folder.write_atomic("left-out.txt", "".join(f"{doc_id.hex()}\n" for doc_id in sorted(left_out)).encode())
    out, ids = folder.path("measurements.json"), folder.path("left-out.txt")
    command = [sys.executable, "-m", "train.eval.evaluate", *(run.uri for run in named.values())]
    command += [word for run in on for word in ("--on", run.uri)]
    command += ["--out", out, "--leave-out", ids, "--sequences", str(sequences)]
    done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise ContractError(
            f"{folder.uri}: expected losses of the proxy runs, got exit code {done.returncode} from their evaluation. "
            f"Correct the error below:\n{last}"
        )
    measurements = iter(Measurement.model_validate(value) for value in folder.read_json("measurements.json"))
    return {key: [next(measurements) for _ in on] for key in named}


def proxy_settings(run: Store, overrides: Sequence[str]) -> Settings:
    """Return the settings of the proxy runs of a run, except their size."""
    recipe = load_recipe(
        proxy_recipe(read_run(run).recipe), [*NO_EVALUATION, *overrides], recipe_sections(), f"{run.uri}/{RUN_NAME}"
    )
    return with_recipe(settings_of(recipe))


def check_settings(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError if proxy runs with these settings cannot be trained or have no comparable held-out loss."""
    if (objective := settings.train.objective) not in OBJECTIVES:
        raise ConfigError(
            f"ablate: expected train.objective = {' or '.join(OBJECTIVES)}, got {objective}. Use --set "
            f"train.objective={next(iter(OBJECTIVES))} for the proxy runs."
        )
    check_settings_used(settings, dataset)


def check_planned(run: Store, size: ProxySize) -> None:
    """Raise ConfigError or ContractError if no proxy run on the dataset of `run` can be planned."""
    with tempfile.TemporaryDirectory() as scratch:
        shared_settings({WITH: run}, Store(scratch), size)


def check_heldout(datasets: Mapping[str, Dataset], settings: Settings) -> None:
    """Raise ConfigError if one of the datasets has no held-out row that is long enough for the proxy runs."""
    seq_len = stage_lengths(settings.train)[-1]
    for name, dataset in datasets.items():
        if not heldout_streams(dataset, seq_len):
            num_tokens = sum(dataset.num_tokens(HELDOUT).values())
            raise ConfigError(
                f"{name}: expected a source with held-out text for a row of {seq_len} tokens, got only {num_tokens:,} "
                "held-out tokens in all sources. Raise tokens.heldout_share, then run the recipe again."
            )


def _proxy_folder(run: Store, folder: Store, side: str, seed: int) -> Store:
    """Return the folder of a proxy run; if it is missing, create it as a run on the dataset of `run`."""
    new = folder.child(f"{side}-seed-{seed}")
    if not new.exists(RUN_NAME):
        state = attach_run(new, run, TABLES)
        recipe = with_shares(proxy_recipe(state.recipe), open_dataset(run))
        write_run(new, RunFile(tables=state.tables, recipe=recipe))
    return new


def with_shares(recipe: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Return the recipe with `train.epochs`, which decides the length of a run, as shares of the same sources."""
    train = dict(recipe.get("train", {}))
    if epochs := train.pop("epochs", None):
        train["weights"] = weights_of_epochs(epochs, dataset)
    return {**recipe, "train": train} if epochs else dict(recipe)


def proxy_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a run without its settings for size and devices, for use by proxy runs."""
    placed = {"layout": {"micro_batch"}, "cluster": set[str]()}
    # The rate of a run with muP is that of its proxies too: it is the same for every width, and no rule gives one.
    kept = {"learning_rate"} if recipe.get("plan", {}).get("parametrization") == "mup" else set[str]()
    changed = {
        name: {
            key: value
            for key, value in recipe[name].items()
            if key not in RUN_ONLY_SETTINGS.get(name, frozenset()) - kept and key in placed.get(name, recipe[name])
        }
        for name in recipe.keys() & (RUN_ONLY_SETTINGS.keys() | placed.keys())
    }
    return {name: changed.get(name, values) for name, values in recipe.items()}


def _sized(folder: Store, dataset: Dataset, overrides: Sequence[str]) -> Plan:
    return make_plan(folder, dataset, with_recipe(settings_of(stored_recipe(folder, overrides))))


def default_size(size: ProxySize, once: float, least: int = MIN_PARAMS) -> tuple[float, float]:
    """Return the parameters and tokens of a proxy run: those in `size`, or else defaults.

    `once`: tokens in one pass over the dataset. `least`: the lowest default number of parameters.
    """
    params = size.params or min(max(once / TOKENS_PER_PARAMETER, least), MAX_PARAMS)
    return params, size.tokens or min(TOKENS_PER_PARAMETER * params, once)


def describe_default_size() -> str:
    """Return a description of the default number of parameters, for the help of `--params`."""
    return f"1/20 of the tokens of one pass, {MIN_PARAMS:,} to {MAX_PARAMS:,}"
