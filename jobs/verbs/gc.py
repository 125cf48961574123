"""`penstock gc`: the removal of the files in a run folder that nothing uses."""

import argparse

from jobs.arguments import Command, add_run
from pipeline.garbage import find_garbage, remove_garbage
from schemas.locks import lock_tables
from schemas.storage import Store
from schemas.text import format_bytes, printable, text_table

GROUP = "data"
VERBS = {
    "gc": "Remove the files of a run that nothing uses. They are what killed processes left in it, and what later "
    "results replaced. Committed versions stay.",
}


def gc_command(arguments: argparse.Namespace) -> int:
    """List the files of a run that nothing uses, with size and reason, and remove them unless it is a dry run."""
    run = Store(arguments.run)
    with lock_tables(run, "penstock gc"):
        garbage = find_garbage(run)
        if garbage:
            rows = [(printable(each.path), f"{each.bytes:,}", each.why) for each in garbage]
            print("\n".join(text_table([("path", "bytes", "why"), *rows], "<><")))
        size = format_bytes(sum(each.bytes for each in garbage))
        if arguments.dry_run:
            print(f"{len(garbage):,} files, {size}, would be removed; this was a dry run")
            return 0
        remove_garbage(run, garbage)
        print(f"{len(garbage):,} files, {size}, were removed")
    return 0


def add_gc_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `gc` except the run."""
    parser.add_argument("--dry-run", action="store_true", help="print the same list, and remove nothing")


COMMANDS = {
    "gc": Command((add_run, add_gc_arguments), gc_command, "gc run --dry-run"),
}
