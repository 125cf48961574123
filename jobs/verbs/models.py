"""`penstock models`: the store of downloaded models."""

import argparse

from jobs.arguments import Command
from pipeline.models import ModelsConfig, fetch_model, list_models, verify_model
from schemas.errors import ConfigError

VERBS = {
    "models": "List, fetch or verify the models of the store.",
}


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `models`."""
    parser.add_argument("action", choices=("list", "fetch", "verify"))
    parser.add_argument("name", nargs="?", help="name of a model, as `penstock models list` prints it")


def models_command(arguments: argparse.Namespace) -> int:
    """List, fetch or verify the models of the store."""
    config = ModelsConfig()
    if arguments.action == "list":
        for row in list_models(config):
            print(row)
        return 0
    if not arguments.name:
        raise ConfigError(
            f"models {arguments.action}: expected a name, got none. Choose one that `penstock models list` prints."
        )
    print((fetch_model if arguments.action == "fetch" else verify_model)(arguments.name, config))
    return 0


COMMANDS = {
    "models": Command((add_models_arguments,), models_command, "models fetch lid.176.ftz"),
}
