"""The `penstock` command: it finds its verbs in `jobs/verbs` and imports only the module of the verb that is called.

A module of `jobs/verbs` defines two dictionaries: the literal `VERBS` (verb -> one line of help), which is read here
without an import, and `COMMANDS` (verb -> Command). A new verb is therefore one new file there and its test.
"""

import argparse
import ast
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import jobs.verbs


def list_verbs() -> dict[str, tuple[str, str]]:
    """Return verb -> (module of `jobs/verbs`, one line of help), sorted by verb."""
    verbs: dict[str, tuple[str, str]] = {}
    for module in pkgutil.iter_modules(jobs.verbs.__path__):
        source = Path(jobs.verbs.__path__[0], f"{module.name}.py").read_bytes()
        verbs |= {verb: (module.name, text) for verb, text in read_verbs(source).items()}
    return dict(sorted(verbs.items()))


def read_verbs(source: bytes) -> dict[str, str]:
    """Return the literal `VERBS` of a module's source; empty if the module has none."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="VERBS")], value=value):
                return dict(ast.literal_eval(value))
    return {}


def import_job(name: str) -> ModuleType:
    """Import and return a module of `jobs`."""
    # Called for the chosen verb only: `penstock --help` takes 0.13 s, and 2.2 s with all verbs imported (2 cores).
    return importlib.import_module(f"jobs.{name}")


def build_parser(called: str | None) -> argparse.ArgumentParser:
    """Return a parser that lists every verb, but has arguments only for the verb `called`.

    If `called` is None, no verb has arguments.
    """
    parser = argparse.ArgumentParser(
        prog="penstock", description="From the crawled web to a pretrained language model."
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (module, text) in list_verbs().items():
        added = subparsers.add_parser(verb, help=text, description=text)
        if verb == called:
            command = import_job(f"verbs.{module}").COMMANDS[verb]
            added.epilog = f"example: penstock {command.example}"
            added.set_defaults(command=command.run)
            for add_arguments in command.add_arguments:
                add_arguments(added)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 success, 1 nothing found, 2 an explained error, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    # `penstock` has no options of its own but --help, so the first other word is the verb.
    arguments = build_parser(next((word for word in words if not word.startswith("-")), None)).parse_args(words)
    code: int = import_job("exit_codes").exit_code_of(lambda: arguments.command(arguments))
    return code


if __name__ == "__main__":
    sys.exit(main())
