"""`penstock fit-scaling`: a scaling law, fitted to trained runs or to a table of runs."""

import argparse
import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs.arguments import Command, number, whole
from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.checkpoint.folder import deciding_settings
from train.config.plan import OwnLaw
from train.dataset_history import digests_at_same_positions
from train.monitor.metrics import MANIFEST_NAME, read_train_manifest
from train.plan.plan import read_plan, verify_plan
from train.scaling.fit import NAMES, Fit, MeasuredLoss, fit_or_hold_exponents, interval_of
from train.scaling.laws import LossLaw
from train.scaling.own_law import MAX_EXTRAPOLATION, LawFile, law_file, law_in, write_law

GROUP = "training"
VERBS = {
    "fit-scaling": "Fit a scaling law L(N, D) to measured runs. L(N, D) = E + A/N^alpha + B/D^beta is printed with "
    "intervals.",
}

Arguments = argparse.Namespace
COLUMNS = ("params", "tokens", "loss")
"""Columns of a table of runs: N, D and the last loss [nats/token]."""
BUDGETS = (1e18, 1e20, 1e22, 1e24)
"""Budgets for which the optimal numbers of parameters and tokens are printed [FLOPs]."""


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fit-scaling`."""
    parser.add_argument(
        "runs", nargs="+", help=f"folders of completed runs, or .csv files with the columns {', '.join(COLUMNS)}"
    )
    add_interval_arguments(parser)
    parser.add_argument("--out", help="JSON file for the law; `penstock plan --law` reads it")


def add_interval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the confidence intervals of a fit."""
    parser.add_argument("--draws", type=whole, default=200, help="bootstrap samples for the intervals")
    parser.add_argument("--share", type=number, default=0.9, help="share of the samples that an interval contains")


def fit_scaling_command(arguments: Arguments) -> int:
    """Fit the scaling law L(N, D) = E + A/N^alpha + B/D^beta to runs, and print it with intervals."""
    check_intervals(arguments, "fit-scaling")
    measured = [run for name in arguments.runs for run in _measured_runs(name)]
    fit = fit_or_hold_exponents(measured, arguments.draws, arguments.share)
    law = law_file(fit, measured, arguments.share, describe_fit(fit, arguments.draws, arguments.share))
    print(print_law(law, fit, BUDGETS))
    if arguments.out:
        write_law(arguments.out, law)
    return 0


def check_intervals(arguments: Arguments, verb: str) -> None:
    """Raise ConfigError if the options for the confidence intervals are out of range."""
    if arguments.draws < 0 or not 0 < arguments.share < 1:
        raise ConfigError(
            f"{verb}: expected --draws >= 0 and --share between 0 and 1, got {arguments.draws} and "
            f"{arguments.share:g}. Correct the flag that is out of range."
        )


def _measured_runs(name: str) -> Iterator[MeasuredLoss]:
    if name.endswith(".csv"):
        yield from _of_table(Path(name))
    else:
        yield measured_run(Store(name), name)


def measured_run(run: Store, name: str) -> MeasuredLoss:
    """Return the parameters, the tokens and the final loss of a run; the loss is the held-out loss if there is one.

    Raises ConfigError if the run is not complete, was planned again since it was trained, or has no final loss.
    Raises ContractError if its plan or the manifest of its training was edited, as far as they show it.
    """
    try:
        manifest, plan = read_train_manifest(run), read_plan(run)
    except OSError as error:
        raise ConfigError(
            f"{name}: expected a completed run, got an incomplete one. Train it to its end with `penstock train`."
        ) from error
    if manifest.plan != digest_of(deciding_settings(plan)):
        raise ConfigError(
            f"{name}: expected the plan that the run was trained with, got one of other settings or of another "
            "version. Train the run again with `penstock train`."
        )
    dataset = open_dataset(run)
    verify_plan(run, dataset, plan)
    if manifest.dataset not in digests_at_same_positions(dataset):
        raise ContractError(
            f"{name}/{MANIFEST_NAME}: expected dataset {dataset.digest[:12]} of the run, got {manifest.dataset[:12]}. "
            "Train the run again with `penstock train`."
        )
    if manifest.steps != plan.steps:
        raise ContractError(
            f"{name}/{MANIFEST_NAME}: expected the {plan.steps} steps of the plan, got {manifest.steps}. Remove this "
            "run from the command."
        )
    loss = manifest.loss if manifest.heldout_loss is None else manifest.heldout_loss
    if loss is None:
        raise ConfigError(f"{name}: expected a loss at the end of the run, got none. Remove this run from the command.")
    if not 0 < loss < math.inf:
        raise ContractError(
            f"{name}/{MANIFEST_NAME}: expected a loss above 0, got {loss}. Remove this run from the command."
        )
    text = "training loss" if manifest.heldout_loss is None else "held-out loss"
    kind = f"{text} by tokenizer {digest_of(dataset.tokenizer.model_dump(mode='json'))[:12]}"
    return MeasuredLoss(plan.num_params, plan.num_tokens, loss, name, manifest.dataset, manifest.plan, kind)


def _of_table(path: Path) -> Iterator[MeasuredLoss]:
    if not path.is_file():
        raise ConfigError(f"{path}: expected a CSV table of runs, got no such file. Correct the path.")
    with path.open(newline="", encoding="utf-8") as lines:
        table = csv.DictReader(lines)
        if lacking := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
            raise ConfigError(
                f"{path}: expected the columns {', '.join(COLUMNS)}, got no {', '.join(lacking)}. Add these "
                "columns, and name them in the first line."
            )
        for row in table:
            try:
                params, tokens, loss = (float(row[name]) for name in COLUMNS)
                yield MeasuredLoss(params, tokens, loss, f"{path}, line {table.line_num}")
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}, line {table.line_num}: expected three numbers, got {list(row.values())}. Correct "
                    "this line."
                ) from error


def describe_fit(fit: Fit, draws: int, share: float) -> str:
    """Return a sentence on how a scaling law was fitted, for the file of the law."""
    how = (
        f"Huber loss (1e-3) of ln L, least by L-BFGS over {fit.num_runs} runs; {100 * share:g} % intervals of {draws} "
        "fits to as many runs drawn from them with replacement"
    )
    if fit.held is None:
        return how
    return f"{how}; these left the exponents open, which are held as published ({fit.held.source})"


def print_law(file: LawFile, fit: Fit, budgets: Sequence[float]) -> str:
    """Return a fitted law as text: its parameters, how it was fitted, and the optimal sizes for budgets [FLOPs]."""
    law = file.law
    counted = "all parameters, a tied embedding once" if law.counts == "all" else "parameters without embeddings"
    lines = [f"L(N, D) of {law.num_runs} runs: {law_in(law).formula}", f"  N: {counted}"]
    for name in (*NAMES, "exponent"):
        lines.append(f"  {name:9s} {getattr(law_in(law), name):12.6g}  {law.interval(name)}")
    lines.append(f"  off by {100 * law.deviation:.2g} % of the loss on these runs (root mean square)")
    lines.append(f"  {file.how}")
    lines += [_best(law, fit, compute) for compute in budgets]
    lines.append(
        f"  largest of these runs: N {law.params:,.0f}, D {law.tokens:,.0f}, 6ND {law.compute:.3g} FLOPs; beyond "
        f"{MAX_EXTRAPOLATION:g} times that, {MAX_EXTRAPOLATION * law.compute:.3g} FLOPs, the law is an extrapolation"
    )
    return "\n".join(lines)


def _best(law: OwnLaw, fit: Fit, compute: float) -> str:
    """Return a line about a budget [FLOPs]: the optimal N and D and the loss, with intervals."""
    best = law_in(law).for_compute(compute)
    intervals = _intervals(fit, compute, law.share)
    note = (
        f"  ({compute / law.compute:,.0f} times the most expensive run: an extrapolation)"
        if compute > MAX_EXTRAPOLATION * law.compute
        else ""
    )
    return (
        f"  {compute:.0e} FLOPs: {best.params:.3g} parameters{intervals[0]}, {best.tokens:.3g} tokens, "
        f"loss {law_in(law).loss(best.params, best.tokens):.4f}{intervals[1]}{note}"
    )


def _intervals(fit: Fit, compute: float, share: float) -> tuple[str, str]:
    """Return the bootstrap intervals of the optimal N and of the loss at this N, as text.

    Both are '' if there are no bootstrap fits, or if a bootstrap fit has no optimum.
    """
    sizes = [size for law in fit.drawn if (size := _best_of(law, compute)) is not None]
    if not sizes or len(sizes) < len(fit.drawn):  # a sample has no best sizes, so there is no interval
        return "", ""
    params, loss = (interval_of(values, share) for values in zip(*sizes, strict=True))
    return f" ({params.low:.3g} to {params.high:.3g})", f" ({loss.low:.3f} to {loss.high:.3f})"


def _best_of(law: LossLaw, compute: float) -> tuple[float, float] | None:
    try:
        best = law.for_compute(compute)
        return best.params, law.loss(best.params, best.tokens)
    except (OverflowError, ValueError, ZeroDivisionError):
        return None


COMMANDS = {
    "fit-scaling": Command((add_fit_arguments,), fit_scaling_command, "fit-scaling runs.csv --out law.json"),
}
