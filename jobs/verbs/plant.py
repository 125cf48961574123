"""`penstock plant-test`: the test on the weights of a checkpoint for planted identifiers.

Torch is imported in the child process that it starts, never in this one.
"""

import argparse

from jobs.arguments import Command, add_checker, add_run, whole
from jobs.verbs.train import add_step, in_torch
from schemas.document_ids import ID_HELP

GROUP = "join"
VERBS = {
    "plant-test": "Test whether a checkpoint knows planted identifiers. Those of removed documents are tested apart.",
}
VALUES = ("key_file", "step", "controls", "most", "takedown", "out")
"""Options with one value, which the child process has too."""


def add_plant_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plant-test`, except the run and the step."""
    parser.add_argument(
        "--key-file", metavar="FILE", required=True, help="file of the secret key, as plant.key_file of the recipe"
    )
    parser.add_argument("--controls", type=whole, help="strings that each identifier is compared with; default 99")
    parser.add_argument("--most", type=whole, help="maximum number of documents of a group; default 1000")
    parser.add_argument("--doc", action="append", default=[], help=f"only this document, by {ID_HELP}; may be repeated")
    parser.add_argument(
        "--domain",
        action="append",
        default=[],
        help="only documents of this registrable domain that are in the dataset; may be repeated",
    )
    parser.add_argument(
        "--takedown",
        metavar="ID",
        help="of removed documents, only those of this takedown; the result is also written beside its certificate",
    )
    parser.add_argument("--out", metavar="FILE", help="write the result to this file; it has no key and no strings")
    add_checker(parser, "schemas", "ranks.py", "a result")


def plant_command(arguments: argparse.Namespace) -> int:
    """Test a checkpoint for planted identifiers."""
    command = [arguments.run]
    for name in VALUES:
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("doc", "domain"):
        command += [word for value in getattr(arguments, name) for word in (f"--{name}", value)]
    return in_torch("train.eval.planted", *command)


COMMANDS = {
    "plant-test": Command(
        (add_run, add_plant_arguments, add_step),
        plant_command,
        "plant-test run --key-file plant.key --out planted.json",
    ),
}
