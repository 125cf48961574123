"""Proxies: small training runs on the dataset of another run, each in a folder of its own, to learn something from.

A proxy is a run folder like any other: `penstock trace`, `generate` or `verify` work on it. What was trained to its end
stands, so the same command goes on where one was broken off.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.recipe import recipe_sections, stored_recipe
from jobs.spark_session import worker_environment
from schemas.ablation import WITH, Measurement
from schemas.config import load_recipe
from schemas.errors import ConfigError, ContractError
from schemas.manifest import RUN_NAME, RunFile, read_run, write_run
from schemas.storage import Store
from schemas.tokens import HELDOUT, Dataset, open_dataset
from schemas.versions import attach_run
from train.checkpoint.folder import identify
from train.checkpoint.metadata import Identity
from train.config.plan import PlanConfig
from train.config.settings import Settings, settings_of
from train.data.heldout import OBJECTIVES
from train.data.order import heldout_streams
from train.data.stages import NO_SKIPS, stage_lengths
from train.model.shape import choose_shape, num_parameters
from train.monitor.metrics import MANIFEST_NAME, TrainManifest, read_train_manifest
from train.plan.make_plan import make_plan
from train.plan.plan import PLAN_NAME, Plan, check_used, read_plan, write_plan

TABLES = ("tokens", "tokenizer")
"""Tables of another run that a proxy stands on."""


@dataclass(frozen=True)
class Proxy:
    """A run that is planned, and trained if `done`."""

    run: Store
    plan: Plan

    @property
    def done(self) -> bool:
        """Whether it was trained to its end."""
        return self.run.exists(MANIFEST_NAME)


def plan_proxy(parent: Store, folder: Store, overrides: Sequence[str]) -> Proxy:
    """The run `folder` on the dataset of `parent`, planned with overrides of its recipe (`plan.params=1e6`).

    Raises ConfigError if the folder holds a run with another dataset or another plan.
    """
    if not folder.exists(RUN_NAME):
        attach_run(folder, parent, TABLES)
    dataset = open_dataset(folder)
    if dataset.digest != open_dataset(parent).digest:
        raise ConfigError(
            f"{folder.uri}: expected a run on dataset {open_dataset(parent).digest[:12]}, got {dataset.digest[:12]}. "
            "Remove the folder."
        )
    settings = settings_of(stored_recipe(folder, overrides))
    if folder.exists(PLAN_NAME):  # a proxy that was trained has its number formats from the device
        settings = settings.with_precisions_of(read_plan(folder).settings.content())
    plan = make_plan(folder, dataset, settings)
    if not folder.exists(PLAN_NAME):
        write_plan(folder, plan)
    elif plan_identity(dataset, read_plan(folder)) != plan_identity(dataset, plan):
        raise ConfigError(f"{folder.uri}: expected a run with these settings, got another. Remove the folder.")
    return Proxy(folder, plan)


def plan_identity(dataset: Dataset, plan: Plan) -> Identity:
    """What decides the weights of a proxy."""
    return identify(dataset, plan, NO_SKIPS)


def train_proxy(proxy: Proxy, ranks: int = 1) -> TrainManifest:
    """Train a proxy to its end in processes of its own, or go on; one that is done is not trained again.

    Its lines go to `train.log` in its folder, which is local. Raises ContractError with the last of them if it fails.
    """
    if not proxy.done:
        command, environment = ["train.pretrain", proxy.run.uri], worker_environment()
        if ranks > 1:
            command = ["train.launch", "--standalone", "--nproc-per-node", str(ranks), "-m", *command]
            environment = {"OMP_NUM_THREADS": "1"} | environment
        log = proxy.run.path("train.log")
        with open(log, "ab") as lines:
            child = subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=lines, stderr=lines)
            code = _waited(child)
        if code or not proxy.done:
            with open(log, encoding="utf-8", errors="replace") as told:
                last = "\n".join(told.read().splitlines()[-5:])
            raise ContractError(f"{proxy.run.uri}: expected a trained proxy, its process ended with {code}:\n{last}")
    return read_train_manifest(proxy.run)


def _waited(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a child, which does not outlive this process: it is asked to end where this one is."""
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if child.poll() is None:
            child.terminate()
            child.wait()


# Pairs of proxies: for every seed one model on each of two datasets, equal in shape, schedule and number of tokens.

MIN_PARAMS: int = PlanConfig.model_fields["min_params"].default
MAX_PARAMS = 10_000_000
"""Largest proxy where none is asked for [parameters]."""
TOKENS_PER_PARAMETER = 20.0
"""Training tokens per parameter where no number of tokens is asked for; plan.tokens_per_parameter has the source."""
RUN_ONLY_SETTINGS: Mapping[str, frozenset[str]] = {
    "plan": frozenset(
        (
            *("law", "tokens_per_parameter", "compute", "gpu_hours", "usd", "params", "inference_tokens", "max_epochs"),
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
"""Settings of a recipe that size or place the run itself: a proxy has its own; of `[layout]` it has `micro_batch`."""
NO_EVALUATION = ("train.eval_every=0",)
"""Overrides of every proxy, before those that are asked for: it is measured at its end."""


@dataclass(frozen=True)
class ProxySize:
    """What is asked of the proxies."""

    seeds: int
    params: float | None
    """None: a 20th of the tokens, between `plan.min_params` and MAX_PARAMS."""
    tokens: int | None
    """None: 20 for each parameter, at most one pass over the smaller dataset."""
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """The two proxies of a seed."""

    seed: int
    proxies: Mapping[str, Proxy]
    """By side."""


def plan_pairs(sides: Mapping[str, Store], folder: Store, wanted: ProxySize) -> list[Pair]:
    """The pairs in `<folder>/{with,without}-seed-N`, planned. Raises ContractError if they are no pairs."""
    shared = shared_settings(sides, folder, wanted)
    pairs = []
    for seed in range(1, wanted.seeds + 1):
        own = [*shared, f"train.seed={seed}"]
        proxies = {side: plan_proxy(run, _begun(run, folder, side, seed), own) for side, run in sides.items()}
        check_pair([proxy.plan for proxy in proxies.values()])
        pairs.append(Pair(seed, proxies))
    return pairs


def shared_settings(sides: Mapping[str, Store], folder: Store, wanted: ProxySize) -> list[str]:
    """The overrides that make all proxies alike: N, batch, and as many steps as both datasets give."""
    first = {side: _begun(run, folder, side, 1) for side, run in sides.items()}
    datasets = {side: open_dataset(run) for side, run in sides.items()}
    once = min(sum(dataset.num_tokens().values()) for dataset in datasets.values())
    sizing = settings_of(stored_recipe(first[WITH], wanted.overrides)).plan
    params, _ = default_size(wanted, once, sizing.min_params)
    if wanted.params is None:  # whatever the vocabulary and [plan] make of it
        params = float(num_parameters(choose_shape(params, datasets[WITH].tokenizer.vocab_size, sizing)))
    fixed = [f"plan.params={params!r}", *NO_EVALUATION]
    if wanted.tokens is None:
        fixed += ["plan.max_epochs=1.0"]
    else:
        plan = _sized(first[WITH], datasets[WITH], [*fixed, *wanted.overrides])
        # A pass is cut at whole chunks and blocks, so the tokens asked for may take a little more than their share.
        passes = max(1.0, round(1.02 * wanted.tokens / once, 3))
        fixed += [f"plan.tokens_per_parameter={wanted.tokens / plan.num_params!r}", f"plan.max_epochs={passes!r}"]
    fixed += wanted.overrides
    plans = [_sized(first[side], datasets[side], fixed) for side in sides]
    fixed += [f"train.global_batch={min(plan.global_batch for plan in plans)}"]
    plans = [_sized(first[side], datasets[side], fixed) for side in sides]
    return [*fixed, f"train.steps={min(plan.steps for plan in plans)}"]


def check_pair(plans: Sequence[Plan]) -> None:
    """Raises ContractError if two proxies differ in more than their data."""
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
                    f"ablate: expected proxies alike in {name}, got {expected} and {other[name]}. Set it for both."
                )


def train_pairs(pairs: Sequence[Pair], say: Callable[[str], None]) -> float:
    """Train every proxy that is not done, and say how far it has come; returns the seconds it took."""
    waiting = [
        (f"{side}-seed-{pair.seed}", proxy) for pair in pairs for side, proxy in pair.proxies.items() if not proxy.done
    ]
    total = sum(len(pair.proxies) for pair in pairs)
    if len(waiting) < total:
        say(f"proxies    {total - len(waiting)} of {total} stand")
    started = time.monotonic()
    for number, (name, proxy) in enumerate(waiting, start=1):
        begun = time.monotonic()
        manifest = train_proxy(proxy)
        now = time.monotonic()
        left = (now - started) / number * (len(waiting) - number)
        loss = "" if manifest.loss is None else f"  loss {manifest.loss:.4f}"
        say(
            f"proxy {number}/{len(waiting)}  {name:<16}  {manifest.steps:,} steps{loss}  {now - begun:.1f} s"
            f"{f'  {left:.0f} s left' if left else ''}"
        )
    return time.monotonic() - started


def evaluate_pairs(
    pairs: Sequence[Pair], on: Sequence[Store], folder: Store, sequences: int, left_out: set[bytes]
) -> dict[tuple[str, int], list[Measurement]]:
    """What every proxy loses on the held-out rows of each run, by side and seed, in a process of its own.

    Raises ContractError with the last that it said if it fails.
    """
    named = {(side, pair.seed): proxy.run for pair in pairs for side, proxy in pair.proxies.items()}
    folder.write_atomic("left-out.txt", "".join(f"{doc_id.hex()}\n" for doc_id in sorted(left_out)).encode())
    out, ids = folder.path("measurements.json"), folder.path("left-out.txt")
    command = [sys.executable, "-m", "train.eval.evaluate", *(run.uri for run in named.values())]
    command += [word for run in on for word in ("--on", run.uri)]
    command += ["--out", out, "--leave-out", ids, "--sequences", str(sequences)]
    done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        told = "\n".join(done.stderr.splitlines()[-5:])
        raise ContractError(
            f"{folder.uri}: expected measured proxies, the process ended with {done.returncode}:\n{told}"
        )
    found = iter(Measurement.model_validate(one) for one in folder.read_json("measurements.json"))
    return {key: [next(found) for _ in on] for key in named}


def proxy_settings(run: Store, overrides: Sequence[str]) -> Settings:
    """The settings that proxies of a run are planned by, but for their size."""
    recipe = load_recipe(
        proxy_recipe(read_run(run).recipe), [*NO_EVALUATION, *overrides], recipe_sections(), f"{run.uri}/{RUN_NAME}"
    )
    return settings_of(recipe)


def check_settings(settings: Settings, dataset: Dataset) -> None:
    """Raises ConfigError if proxies with these settings could not be trained, or not be asked about held-out text."""
    if (objective := settings.train.objective) not in OBJECTIVES:
        raise ConfigError(
            f"ablate: expected train.objective = {' or '.join(OBJECTIVES)}, got {objective}. Give --set "
            f"train.objective={next(iter(OBJECTIVES))} for the proxies."
        )
    check_used(settings, dataset)


def check_heldout(datasets: Mapping[str, Dataset], settings: Settings) -> None:
    """Raises ConfigError if one of the datasets holds out no row that such proxies can be asked about."""
    seq_len = stage_lengths(settings.train)[-1]
    for name, dataset in datasets.items():
        if not heldout_streams(dataset, seq_len):
            found = sum(dataset.num_tokens(HELDOUT).values())
            raise ConfigError(
                f"{name}: expected held-out rows of {seq_len} tokens, got {found:,} in all. Run the recipe with "
                "a larger tokens.heldout_share."
            )


def _begun(run: Store, folder: Store, side: str, seed: int) -> Store:
    """The folder of a proxy, which stands on the dataset of its side; its recipe is that of the run, less its size."""
    new = folder.child(f"{side}-seed-{seed}")
    if not new.exists(RUN_NAME):
        state = attach_run(new, run, TABLES)
        write_run(new, RunFile(tables=state.tables, recipe=proxy_recipe(state.recipe)))
    return new


def proxy_recipe(recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A recipe without what sizes or places the training of the run itself."""
    placed = {"layout": {"micro_batch"}, "cluster": set[str]()}
    return {
        name: {
            key: value
            for key, value in values.items()
            if key not in RUN_ONLY_SETTINGS.get(name, ()) and key in placed.get(name, values)
        }
        for name, values in recipe.items()
    }


def _sized(folder: Store, dataset: Dataset, overrides: Sequence[str]) -> Plan:
    return make_plan(folder, dataset, settings_of(stored_recipe(folder, overrides)))


def default_size(wanted: ProxySize, once: float, least: int = MIN_PARAMS) -> tuple[float, float]:
    """Parameters and tokens that a proxy is to have; `once`: tokens of one pass over the smaller dataset."""
    params = wanted.params or min(max(once / TOKENS_PER_PARAMETER, least), MAX_PARAMS)
    return params, wanted.tokens or min(TOKENS_PER_PARAMETER * params, once)


def describe_default_size() -> str:
    """What the size of a proxy is where none is asked for, in words."""
    return f"a 20th of the tokens of one pass, {MIN_PARAMS:,} to {MAX_PARAMS:,}"
