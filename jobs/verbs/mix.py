"""`penstock mix suggest`: shares of the sources for the next run, from the losses of a run, as `mix.toml`."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from jobs.arguments import Command, number, whole
from schemas.errors import ConfigError
from schemas.mix import Mix, SourceMix, mix_toml
from schemas.storage import Store
from schemas.text import text_table
from schemas.versions import open_run
from train.mix.measured import MeasuredRun, measured_run
from train.mix.suggest import STEP_SIZE, suggest_by_law, suggest_by_reference
from train.scaling.own_law import read_law

GROUP = "training"
VERBS = {
    "mix": "Suggest shares of the sources for the next run. The shares, repeats and amounts to crawl follow from the "
    "losses of each source, and are written to mix.toml.",
}

Arguments = argparse.Namespace
EQUAL_SHARE = 1e-4
"""Shares that differ by less count as equal, since a mix file has five decimals of a share."""
COLUMNS = ("source", "share", "", "passes", "", "loss", "against", "excess", "keep", "tokens to collect")


def add_mix_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mix`."""
    parser.add_argument("action", choices=("suggest",), help="what to do")
    parser.add_argument("run", help="folder of a trained run; its plan and losses are read")
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--reference", metavar="RUN", help="another trained run, whose losses by source are compared")
    against.add_argument(
        "--law",
        metavar="FILE",
        help="scaling law of `penstock ladder` or `fit-scaling`; its token exponent is used for the loss curve of each "
        "source. Default: an exponent for each source, fitted to its curve",
    )
    parser.add_argument("--tokens", type=number, help="tokens of the next run; default: as many as this one")
    parser.add_argument(
        "--from-step", type=whole, help="ignore losses before this step; default: the end of the warm-up"
    )
    parser.add_argument(
        "--step-size", type=number, help=f"with --reference: step size of the update of shares; default: {STEP_SIZE:g}"
    )
    parser.add_argument("--out", default="mix.toml", help="file to write; default: mix.toml")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def mix_command(arguments: Arguments) -> int:
    """Suggest the mix of the next run from the losses of each source, and write it to a mix file."""
    out = Path(arguments.out).absolute()
    _check(arguments, out)
    run = measured_run(open_run(arguments.run))
    mix = _suggested(arguments, run)
    print(print_mix(mix))
    Store(str(out.parent)).write_atomic(out.name, mix_toml(mix).encode())
    if all(abs(run.shares[name] - part.share) < EQUAL_SHARE for name, part in mix.sources.items()):
        print("no source differs from the others by more than noise: the shares are unchanged")
    print(
        f"written to {arguments.out}; "
        f"`penstock plan NEXT --dataset {quote(arguments.run)} --mix {quote(arguments.out)}` plans a run "
        f"with it, and the setting tokens.mix uses it for the next dataset"
    )
    return 0


def _check(arguments: Arguments, out: Path) -> None:
    if out.is_dir():
        raise ConfigError(
            f"mix suggest: expected a file to write, got the folder {arguments.out}. Set --out to a file there."
        )
    if out.exists() and not arguments.force:
        raise ConfigError(
            f"mix suggest: expected a new file, got {arguments.out}. Set --out to another file, or add --force "
            "to replace this one."
        )
    if not out.parent.is_dir():
        raise ConfigError(f"mix suggest: expected a folder for {arguments.out}, got none. Create {out.parent}.")
    for name in ("tokens", "step_size", "from_step"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(
                f"mix suggest: expected --{name.replace('_', '-')} > 0, got {value:g}. Give a larger number."
            )
    unused = ["from_step"] if arguments.reference is not None else ["step_size"]
    if ignored := [name for name in unused if getattr(arguments, name) is not None]:
        condition, actual = ("without", "with") if arguments.reference is not None else ("with", "without")
        flag = f"--{ignored[0].replace('_', '-')}"
        raise ConfigError(
            f"mix suggest: expected {flag} only {condition} --reference, got {flag} {actual} --reference. "
            f"Remove {flag}."
        )


def _suggested(arguments: Arguments, run: MeasuredRun) -> Mix:
    if arguments.reference is not None:
        reference = measured_run(open_run(arguments.reference))
        return suggest_by_reference(run, reference, arguments.tokens, arguments.step_size or STEP_SIZE)
    from_step = arguments.from_step or run.plan.warmup_steps + 1
    if arguments.law is None:
        return suggest_by_law(run, tokens=arguments.tokens, from_step=from_step)
    law = read_law(arguments.law, "--law").law
    return suggest_by_law(run, law.beta, law.source, arguments.tokens, from_step)


def print_mix(mix: Mix) -> str:
    """Return a mix as text to print: a table, then the evidence for each source."""
    rows = [COLUMNS, *(tuple(_cells(name, part)) for name, part in mix.sources.items())]
    lines = [f"mix for dataset {mix.dataset[:12]}, by {mix.reference}", *text_table(rows, "<>")]
    return "\n".join([*lines, *(f"{name}: {part.why}" for name, part in mix.sources.items())])


def _cells(name: str, part: SourceMix) -> Iterator[str]:
    evidence = part.evidence

    def shown(key: str, form: str) -> str:
        return format(evidence[key], form) if key in evidence else "-"

    yield name
    yield shown("share_before", ".4f")
    yield f"-> {part.share:.4f}"
    yield shown("passes_before", ".3g")
    yield f"-> {part.repeat:.3g}"
    yield shown("loss", ".4f")
    yield shown("reference" if "reference" in evidence else "floor", ".4f")
    yield shown("excess", ".4f")
    yield f"{part.keep:.4g}"
    yield "-" if part.wanted_tokens is None else f"{part.wanted_tokens:,}"


COMMANDS = {
    "mix": Command((add_mix_arguments,), mix_command, "mix suggest run --reference reference --out mix.toml"),
}
