"""`penstock mix suggest`: what the losses of a run say of its sources, as a table and as `mix.toml`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import ConfigError
from schemas.mix import Mix, SourceMix, mix_toml
from schemas.storage import Store
from schemas.versions import open_run
from train.mix.measured import MeasuredRun, measured_run
from train.mix.suggest import STEP_SIZE, suggest_by_law, suggest_by_reference
from train.scaling.own_law import read_law

Arguments = argparse.Namespace
EQUAL_SHARE = 1e-4
"""Shares that differ by less are called the same: a mix has five decimals."""
COLUMNS = ("source", "share", "", "passes", "", "loss", "against", "excess", "keep", "wanted tokens")


def add_mix_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mix`."""
    parser.add_argument("action", choices=("suggest",))
    parser.add_argument("run", help="trained run folder whose plan and losses are looked at")
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--reference", metavar="RUN", help="another trained run, to compare the loss by source with")
    against.add_argument(
        "--law",
        metavar="FILE",
        help="law of `penstock ladder` or `fit-scaling`, whose exponent of tokens the curve of each source is given; "
        "with neither, each has its own",
    )
    parser.add_argument("--tokens", type=float, help="length of the next run; default: as long as this one")
    parser.add_argument("--from-step", type=int, help="leave out what was measured before it; default: the warm-up")
    parser.add_argument("--step-size", type=float, help=f"with --reference: how far to go; default: {STEP_SIZE:g}")
    parser.add_argument("--out", default="mix.toml", help="file to write; default: mix.toml")
    parser.add_argument("--force", action="store_true", help="replace the file if it stands")


def mix_command(arguments: Arguments) -> int:
    """Suggest shares, repeats and what more to crawl, by what each source's loss says; write them to mix.toml."""
    out = Path(arguments.out).absolute()
    _check(arguments, out)
    run = measured_run(open_run(arguments.run))
    mix = _suggested(arguments, run)
    print(print_mix(mix))
    Store(str(out.parent)).write_atomic(out.name, mix_toml(mix).encode())
    if all(abs(run.shares[name] - part.share) < EQUAL_SHARE for name, part in mix.sources.items()):
        print("no source can be told from the others beyond the noise: the shares stay as they are")
    print(
        f"written to {arguments.out}; `penstock plan NEXT --dataset {arguments.run} --mix {arguments.out}` plans a run "
        f"by it, and tokens.mix in a recipe makes the next dataset by it"
    )
    return 0


def _check(arguments: Arguments, out: Path) -> None:
    if out.is_dir():
        raise ConfigError(f"mix suggest: expected a file to write, got the folder {arguments.out}. Name a file in it.")
    if out.exists() and not arguments.force:
        raise ConfigError(
            f"mix suggest: expected a new file, got {arguments.out}. Name another by --out, or replace it by --force."
        )
    if not out.parent.is_dir():
        raise ConfigError(f"mix suggest: expected a folder for {arguments.out}, got none. Make it first.")
    for name in ("tokens", "step_size", "from_step"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"mix suggest: expected --{name.replace('_', '-')} > 0, got {value:g}. Correct it.")
    unused = ["from_step"] if arguments.reference is not None else ["step_size"]
    if ignored := [name for name in unused if getattr(arguments, name) is not None]:
        wanted = "without --reference" if arguments.reference is not None else "with --reference"
        raise ConfigError(f"mix suggest: expected --{ignored[0].replace('_', '-')} {wanted}. Leave it out.")


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
    """A mix as text: a table, then the evidence of each source in words."""
    rows = [COLUMNS, *(tuple(_cells(name, part)) for name, part in mix.sources.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [f"mix for dataset {mix.dataset[:12]}, by {mix.reference}"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *(f"{name}: {part.why}" for name, part in mix.sources.items())])


def _cells(name: str, part: SourceMix) -> Iterator[str]:
    seen = part.evidence

    def shown(key: str, form: str) -> str:
        return format(seen[key], form) if key in seen else "-"

    yield name
    yield shown("share_before", ".4f")
    yield f"-> {part.share:.4f}"
    yield shown("passes_before", ".3g")
    yield f"-> {part.repeat:.3g}"
    yield shown("loss", ".4f")
    yield shown("reference" if "reference" in seen else "floor", ".4f")
    yield shown("excess", ".4f")
    yield f"{part.keep:.4g}"
    yield "-" if part.wanted_tokens is None else f"{part.wanted_tokens:,}"
