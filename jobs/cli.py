"""The `penstock` command: it finds its verbs in `jobs/verbs` and imports only the module of the verb that is called.

A module of `jobs/verbs` defines `VERBS` (verb -> help text, whose first sentence `penstock --help` lists) and `GROUP`
(a key of GROUPS), two literals that are read here without an import, and `COMMANDS` (verb -> Command). A new verb is
therefore one new file there and its test.
"""

import argparse
import ast
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jobs.verbs
from schemas.logs import TEXT, LoggedParser, add_log_option, set_log

GROUPS = {
    "data": "from crawled pages to a token dataset",
    "training": "from a token dataset to a model",
    "inspect": "what a run keeps, drops and contains",
    "join": "from documents to optimizer steps and checkpoints, and back",
    "models": "models that data steps use",
    "other": "verbs without a group",
}
"""The groups of verbs in the help, in order, with what they are for."""


@dataclass(frozen=True)
class Verb:
    """A verb as `penstock --help` lists it."""

    module: str
    """Its module of `jobs/verbs`."""
    group: str
    """A key of GROUPS."""
    text: str
    """Help text; its first sentence fits on a line of `penstock --help`."""


def list_verbs() -> dict[str, Verb]:
    """Return every verb by name, sorted by group, then by name. The last group has the verbs of modules without one."""
    verbs: dict[str, Verb] = {}
    for module in pkgutil.iter_modules(jobs.verbs.__path__):
        literals = read_literals(Path(jobs.verbs.__path__[0], f"{module.name}.py").read_bytes())
        group = literals["GROUP"] if literals.get("GROUP") in GROUPS else [*GROUPS][-1]
        verbs |= {verb: Verb(module.name, group, text) for verb, text in literals.get("VERBS", {}).items()}
    return dict(sorted(verbs.items(), key=lambda item: ([*GROUPS].index(item[1].group), item[0])))


@cache
def read_literals(source: bytes) -> Mapping[str, Any]:
    """Return the literals `GROUP` and `VERBS` of a module's source by name, as far as the module has them."""
    literals: dict[str, Any] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="VERBS" | "GROUP" as name)], value=value):
                literals[name] = ast.literal_eval(value)
    return literals


def import_job(name: str) -> ModuleType:
    """Import and return a module of `jobs`."""
    # Called for the chosen verb only: `penstock --help` takes 0.1 s of CPU, and 2.2 s with all verbs imported.
    return importlib.import_module(f"jobs.{name}")


class PrintVersion(argparse.Action):
    """The option `--version`, which imports what it prints only when it is given."""

    def __call__(self, parser: argparse.ArgumentParser, *values: object) -> None:
        """Print the version of the package and exit."""
        print(f"penstock {import_job('arguments').penstock_version()}")
        parser.exit()


def build_parser(called: str | None) -> argparse.ArgumentParser:
    """Return a parser that lists every verb, but has arguments only for the verb `called`.

    If `called` is None, no verb has arguments. If it is no verb, the program ends with exit code 2.
    """
    verbs = list_verbs()
    parser = LoggedParser(
        prog="penstock",
        usage="penstock [-h] [--version] VERB ...",
        description="From the crawled web to a pretrained language model.",
        epilog=describe_verbs(verbs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=PrintVersion, nargs=0, help="show the version and exit")
    if called is not None and called not in verbs:
        close = difflib.get_close_matches(called, verbs, n=1, cutoff=0.5)
        hint = f"Did you mean `penstock {close[0]}`?" if close else "`penstock --help` lists them."
        parser.error(f"expected a verb, got {called!r}. {hint}")
    subparsers = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", help=argparse.SUPPRESS, prog="penstock"
    )
    for name, verb in verbs.items():
        added = subparsers.add_parser(name, description=verb.text)
        if name == called:
            command = import_job(f"verbs.{verb.module}").COMMANDS[name]
            added.epilog = f"example: penstock {command.example}"
            added.set_defaults(command=command.run)
            for add_arguments in command.add_arguments:
                add_arguments(added)
            add_log_option(added)
    return parser


def describe_verbs(verbs: Mapping[str, Verb]) -> str:
    """Return the list of verbs by group, with one line each."""
    width = max(map(len, verbs))
    lines = []
    for group in dict.fromkeys(verb.group for verb in verbs.values()):
        lines += ["", f"{group}: {GROUPS[group]}"]
        for name in (name for name, verb in verbs.items() if verb.group == group):
            lines.append(f"  {name:<{width}}  {verbs[name].text.partition('. ')[0].rstrip('.')}.")
    return "\n".join([*lines, "", "`penstock VERB --help` shows the options of a verb and an example."]).lstrip("\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 success, 1 nothing found, 2 an explained error, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    # `penstock` has no options of its own with a value, so the first other word is the verb.
    called = next((word for word in words if not word.startswith("-")), None)
    set_log(TEXT)
    try:
        arguments = build_parser(called).parse_args(words)
        code: int = import_job("exit_codes").exit_code_of(lambda: arguments.command(arguments), arguments)
        return code
    except KeyboardInterrupt:  # before the verb has started
        code = import_job("exit_codes").report_interrupt()
        return code


if __name__ == "__main__":
    sys.exit(main())
