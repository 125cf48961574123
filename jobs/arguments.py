"""The declaration of a verb (subcommand) of `penstock`, and the arguments that several verbs share."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from schemas.overrides import add_override_options

RUN_HELP = "run folder: a local path or s3://, gs://, hdfs://"


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


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option `--verbose` of a verb that starts Spark."""
    parser.add_argument("--verbose", action="store_true", help="print the messages of Spark too")
