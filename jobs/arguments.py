"""The declaration of a verb (subcommand) of `penstock`, and the arguments that several verbs share."""

import argparse
import importlib.resources
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from schemas.overrides import add_override_options

RUN_HELP = "run folder: a local path or s3://, gs://, abfs://, hdfs://"


MAX_WHOLE_NUMBER = 10**15 - 1
"""Larger numbers do not fit the types of the libraries that receive them."""


def whole(text: str) -> int:
    """Parse an argument as a whole number from 0 to MAX_WHOLE_NUMBER."""
    if re.fullmatch("[0-9]{1,15}", text) is None:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {MAX_WHOLE_NUMBER}, got {text!r:.40}")
    return int(text)


def number(text: str) -> float:
    """Parse an argument as a finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number from 0, got {text!r:.40}")
    return value


@dataclass(frozen=True)
class Command:
    """A verb of the command `penstock`."""

    add_arguments: tuple[Callable[[argparse.ArgumentParser], None], ...]
    run: Callable[[argparse.Namespace], int]
    """Runs the verb on its parsed arguments and returns the exit code."""
    example: str
    """A complete command line without `penstock`, shown at the end of the help text."""


def penstock_version() -> str:
    """Return the version of this package."""
    return version("penstock")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run folder argument."""
    parser.add_argument("run", help=RUN_HELP)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the repeatable options `--set` and `--unset`, which override settings."""
    add_override_options(parser)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a verb that runs the data steps: the recipe, the run folder, `--set` and `--unset`."""
    parser.add_argument("recipe", help="recipe: a TOML file of settings, or the name of a shipped one, such as web")
    parser.add_argument("--out", required=True, help=RUN_HELP)
    add_overrides(parser)
    add_verbose(parser)


def add_reuse(parser: argparse.ArgumentParser) -> None:
    """Add the options for another run whose tables a new run uses, and for steps that are built again."""
    parser.add_argument(
        "--reuse",
        metavar="RUN",
        help="another run on the same filesystem: tables with the same settings and inputs are used, not copied",
    )
    parser.add_argument(
        "--rebuild",
        metavar="STEP",
        action="append",
        default=[],
        help="build a large step again although only the version of penstock has changed; may be repeated",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trust-run` of a verb that starts Spark on an existing run."""
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="use all Spark settings, execute the files, and fetch models to the folder, that the run names: they can "
        "start any program",
    )


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option `--verbose` of a verb that starts Spark."""
    parser.add_argument("--verbose", action="store_true", help="print the messages of Spark and of its workers too")


class PrintScript(argparse.Action):
    """An option that prints a script of the package and exits; `const` is the package and the file of the script.

    No other argument is needed with it, also if the verb requires some.
    """

    def __call__(self, parser: argparse.ArgumentParser, *values: object) -> None:
        """Print the script and exit."""
        package, name = self.const
        print((importlib.resources.files(package) / name).read_text(encoding="utf-8"), end="")
        parser.exit()


def add_checker(parser: argparse.ArgumentParser, package: str, name: str, checks: str) -> None:
    """Add the option `--checker`, which prints a script. `checks`: what the script checks."""
    parser.add_argument(
        "--checker",
        action=PrintScript,
        nargs=0,
        const=(package, name),
        default=argparse.SUPPRESS,
        help=f"print the script that checks {checks}, and do nothing else; it needs the standard library only",
    )
