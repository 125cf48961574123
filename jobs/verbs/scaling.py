"""`penstock fit-scaling`: a law of loss, fitted to runs of one's own or to a table of them."""

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from schemas.errors import ConfigError
from schemas.storage import Store
from train.config.plan import OwnLaw
from train.monitor.metrics import read_train_manifest
from train.plan.plan import read_plan
from train.scaling.fit import NAMES, Fit, Measured, fit_or_hold, interval_of
from train.scaling.laws import LossLaw
from train.scaling.own_law import FAR, LawFile, law_file, law_in, write_law

Arguments = argparse.Namespace
COLUMNS = ("params", "tokens", "loss")
"""Of a table of runs: N, D and the last loss [nats/token]."""
BUDGETS = (1e18, 1e20, 1e22, 1e24)
"""What the best sizes are printed for [FLOPs]."""


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fit-scaling`."""
    parser.add_argument(
        "runs", nargs="+", help=f"run folders trained to their end, or .csv files with the columns {', '.join(COLUMNS)}"
    )
    add_interval_arguments(parser)
    parser.add_argument("--out", help="file to write the law to, as JSON; `penstock plan --law` takes it")


def add_interval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how the intervals of a fit are made."""
    parser.add_argument("--draws", type=int, default=200, help="samples of the runs that the intervals are made of")
    parser.add_argument("--share", type=float, default=0.9, help="share of them that an interval holds")


def fit_scaling_command(arguments: Arguments) -> int:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to runs and print it, with intervals and what it says of budgets."""
    check_intervals(arguments, "fit-scaling")
    measured = [one for name in arguments.runs for one in _measured(name)]
    fit = fit_or_hold(measured, arguments.draws, arguments.share)
    found = law_file(fit, measured, arguments.share, describe_fit(fit, arguments.draws, arguments.share))
    print(print_law(found, fit, BUDGETS))
    if arguments.out:
        write_law(arguments.out, found)
    return 0


def check_intervals(arguments: Arguments, verb: str) -> None:
    """Raises ConfigError if intervals cannot be made so."""
    if arguments.draws < 0 or not 0 < arguments.share < 1:
        raise ConfigError(
            f"{verb}: expected --draws >= 0 and --share between 0 and 1, got {arguments.draws} and "
            f"{arguments.share:g}. Correct them."
        )


def _measured(name: str) -> Iterator[Measured]:
    if name.endswith(".csv"):
        yield from _of_table(Path(name))
    else:
        yield measured_run(Store(name), name)


def measured_run(run: Store, name: str) -> Measured:
    """What a law is fitted to of a run that was trained to its end. Raises ConfigError if it has no loss there."""
    try:
        manifest, plan = read_train_manifest(run), read_plan(run)
    except OSError as error:
        raise ConfigError(f"{name}: expected a run that was trained to its end, got none. Train it.") from error
    loss = manifest.loss if manifest.heldout_loss is None else manifest.heldout_loss
    if loss is None:
        raise ConfigError(f"{name}: expected a loss at the end of the run, got none. Leave this run out.")
    return Measured(plan.num_params, plan.num_tokens, loss, name, manifest.dataset, manifest.plan)


def _of_table(path: Path) -> Iterator[Measured]:
    if not path.is_file():
        raise ConfigError(f"{path}: expected a table of runs, got no such file. Name another.")
    with path.open(newline="", encoding="utf-8") as lines:
        table = csv.DictReader(lines)
        if lacking := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
            raise ConfigError(
                f"{path}: expected the columns {', '.join(COLUMNS)}, got no {', '.join(lacking)}. Name them so."
            )
        for row in table:
            try:
                params, tokens, loss = (float(row[name]) for name in COLUMNS)
                yield Measured(params, tokens, loss, f"{path}, line {table.line_num}")
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}, line {table.line_num}: expected three numbers, got {list(row.values())}. Correct it."
                ) from error


def describe_fit(fit: Fit, draws: int, share: float) -> str:
    """How a law was fitted, in words."""
    how = (
        f"Huber loss (1e-3) of ln L, least by L-BFGS over {fit.num_runs} runs; {100 * share:g} % intervals of {draws} "
        "fits to as many runs drawn from them with replacement"
    )
    if fit.held is None:
        return how
    return f"{how}; these left the exponents open, which are held as published ({fit.held.source})"


def print_law(found: LawFile, fit: Fit, budgets: Sequence[float]) -> str:
    """A fitted law as text: its numbers, how it was fitted, and what it says of budgets [FLOPs]."""
    law = found.law
    counted = "all parameters, a tied embedding once" if law.counts == "all" else "parameters without embeddings"
    lines = [f"L(N, D) of {law.num_runs} runs: {law_in(law).formula}", f"  N: {counted}"]
    for name in (*NAMES, "exponent"):
        lines.append(f"  {name:9s} {getattr(law_in(law), name):12.6g}  {law.told(name)}")
    lines.append(f"  off by {100 * law.deviation:.2g} % of the loss on these runs (root of the mean square)")
    lines.append(f"  {found.how}")
    lines += [_best(law, fit, compute) for compute in budgets]
    lines.append(
        f"  largest of these runs: N {law.params:,.0f}, D {law.tokens:,.0f}, 6ND {law.compute:.3g} FLOPs; beyond "
        f"{FAR:g} times that, {FAR * law.compute:.3g} FLOPs, the law is a guess"
    )
    return "\n".join(lines)


def _best(law: OwnLaw, fit: Fit, compute: float) -> str:
    """What the law says of a budget, with intervals of N and of the loss."""
    best = law_in(law).for_compute(compute)
    sure = _sure(fit, compute, law.share)
    guess = f"  ({compute / law.compute:,.0f} times the dearest run: a guess)" if compute > FAR * law.compute else ""
    return (
        f"  {compute:.0e} FLOPs: {best.params:.3g} parameters{sure[0]}, {best.tokens:.3g} tokens, "
        f"loss {law_in(law).loss(best.params, best.tokens):.4f}{sure[1]}{guess}"
    )


def _sure(fit: Fit, compute: float, share: float) -> tuple[str, str]:
    """Intervals of the best N for a budget and of the loss there, by the laws of the samples; empty = none holds."""
    found = [size for law in fit.drawn if (size := _best_of(law, compute)) is not None]
    if not found or len(found) < len(fit.drawn):  # a sample without best sizes: no interval holds
        return "", ""
    params, loss = (interval_of(values, share) for values in zip(*found, strict=True))
    return f" ({params.low:.3g} to {params.high:.3g})", f" ({loss.low:.3f} to {loss.high:.3f})"


def _best_of(law: LossLaw, compute: float) -> tuple[float, float] | None:
    try:
        best = law.for_compute(compute)
        return best.params, law.loss(best.params, best.tokens)
    except (OverflowError, ValueError, ZeroDivisionError):
        return None
