"""`penstock fit-scaling`: a law of loss, fitted to runs of one's own or to a table of them."""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import ConfigError
from schemas.ids import canonical_json
from schemas.storage import Store
from train.plan.planned import read_plan
from train.scaling.fit import Fit, Measured, fit_law
from train.watch.metrics import read_train_manifest

Arguments = argparse.Namespace
COLUMNS = ("params", "tokens", "loss")
"""Of a table of runs: N, D and the last loss [nats/token]."""


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fit-scaling`."""
    parser.add_argument(
        "runs", nargs="+", help=f"run folders trained to their end, or .csv files with the columns {', '.join(COLUMNS)}"
    )
    parser.add_argument("--draws", type=int, default=200, help="samples of the runs that the intervals are made of")
    parser.add_argument("--share", type=float, default=0.9, help="share of them that an interval holds")
    parser.add_argument("--out", help="file to write the law to, as JSON")


def fit_scaling_command(arguments: Arguments) -> int:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to runs and print it, with intervals and what it says of budgets."""
    if arguments.draws < 0 or not 0 < arguments.share < 1:
        raise ConfigError(
            f"fit-scaling: promised --draws >= 0 and --share between 0 and 1, found {arguments.draws} and "
            f"{arguments.share:g}; correct them"
        )
    measured = [one for name in arguments.runs for one in _measured(name)]
    fit = fit_law(measured, arguments.draws, arguments.share)
    print(print_fit(fit, arguments.share))
    if arguments.out:
        law = {name: getattr(fit.law, name) for name in ("floor", "a", "b", "alpha", "beta")}
        intervals = {name: [found.low, found.high] for name, found in fit.intervals.items()}
        Path(arguments.out).write_bytes(canonical_json(law | {"runs": fit.num_runs, "intervals": intervals}))
    return 0


def _measured(name: str) -> Iterator[Measured]:
    if name.endswith(".csv"):
        yield from _of_table(Path(name))
        return
    run = Store(name)
    manifest, plan = read_train_manifest(run), read_plan(run)
    loss = manifest.loss if manifest.heldout_loss is None else manifest.heldout_loss
    if loss is None:
        raise ConfigError(f"{name}: promised a loss at the end of the run, found none; leave this run out")
    yield Measured(plan.num_params, plan.num_tokens, loss)


def _of_table(path: Path) -> Iterator[Measured]:
    if not path.is_file():
        raise ConfigError(f"{path}: promised a table of runs, found no such file; name another")
    with path.open(newline="", encoding="utf-8") as lines:
        table = csv.DictReader(lines)
        if lacking := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
            raise ConfigError(
                f"{path}: promised the columns {', '.join(COLUMNS)}, found no {', '.join(lacking)}; name them so"
            )
        for row in table:
            try:
                yield Measured(*(float(row[name]) for name in COLUMNS))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}, line {table.line_num}: promised three numbers, found {list(row.values())}; correct it"
                ) from error


def print_fit(fit: Fit, share: float) -> str:
    """A fitted law as text."""
    rows = [(name, getattr(fit.law, name)) for name in ("floor", "a", "b", "alpha", "beta", "exponent")]
    lines = [f"L(N, D) of {fit.num_runs} runs: {fit.law.formula}"]
    for name, value in rows:
        found = fit.intervals.get(name)
        told = f"  {100 * share:g} % between {found.low:.5g} and {found.high:.5g}" if found else ""
        lines.append(f"  {name:9s} {value:12.6g}{told}")
    for compute in (1e18, 1e20, 1e22, 1e24):
        best = fit.law.for_compute(compute)
        loss = fit.law.loss(best.params, best.tokens)
        lines.append(f"  {compute:.0e} FLOPs: {best.params:.3g} parameters, {best.tokens:.3g} tokens, loss {loss:.4f}")
    return "\n".join(lines)
