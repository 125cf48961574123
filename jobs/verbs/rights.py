"""`penstock rights` and `penstock robots`: what a run holds of a rightsholder, and the table of robots.txt by host."""

import argparse
import os
import shlex
from collections.abc import Iterator

from jobs.arguments import Command, add_run, whole
from jobs.verbs.takedown import addresses_of, describe_effects, effects_of
from pipeline.rights.holdings import Holdings, find_holdings, most_common
from pipeline.rights.table import write_robots
from pipeline.takedown.select import TakedownRequest, select_documents
from schemas.errors import ConfigError
from schemas.text import printable, printable_json, text_table
from schemas.versions import open_run_to_read

GROUP = "data"
VERBS = {
    "rights": "Print what a run holds of a domain, and its takedown. The steps that saw it are named too.",
    "robots": "Write robots.txt files of archives to a table by host.",
}
SHOWN = 12
"""Number of files and of marks that are printed; JSON has all of them."""


def add_rights_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rights` except the run."""
    parser.add_argument("--domain", required=True, metavar="HOST", help="a domain, the hosts below it included")
    parser.add_argument("--json", action="store_true", help="print JSON")


def rights_command(arguments: argparse.Namespace) -> int:
    """Print what a run holds of a domain. Raises ConfigError if it holds nothing of it."""
    run = open_run_to_read(arguments.run)
    selection = select_documents(run, TakedownRequest(domains=(arguments.domain,)))
    holdings = find_holdings(run, selection)
    effects = effects_of(run, selection.documents, addresses_of(selection))
    command = shlex.join(["penstock", "takedown", arguments.run, "--domain", arguments.domain])
    if arguments.json:
        values = {"run": run.uri, "domain": arguments.domain, **holdings.to_json(), "copies": len(selection.copies)}
        print(printable_json(values | {"effects": effects.model_dump(mode="json"), "takedown": command}, indent=1))
        return 0
    print(f"{holdings.documents:,} document(s) of {printable(arguments.domain)}")
    print("\n".join(_describe(holdings)))
    if selection.copies:
        print(f"{len(selection.copies):,} near-duplicates of them are from other domains")
    print("\n".join(describe_effects(effects)))
    print(f"to remove them: {printable(command)}")
    return 0


def _describe(holdings: Holdings) -> Iterator[str]:
    rows = [
        (name, f"{number:,} row(s)", f"{holdings.kept[name]:,} kept" if name in holdings.kept else "")
        for name, number in holdings.rows.items()
    ]
    yield from text_table(rows, indent="  ")
    for stream, number in sorted(holdings.tokens.items()):
        yield f"  {printable(stream)}: {number:,} tokens"
    for title, counts in (("dropped", holdings.dropped), ("marks", holdings.marks), ("files", holdings.files)):
        if counts:
            yield f"{title}:"
            shown = most_common(counts, SHOWN)
            yield from text_table([(f"{number:,}", printable(name)) for name, number in shown], indent="  ")
            if len(counts) > SHOWN:
                yield f"  … and {len(counts) - SHOWN:,} more; --json prints all"


def add_robots_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `robots`."""
    parser.add_argument(
        "files", nargs="+", help="WARC files of robots.txt, such as those of a crawl; patterns and URIs"
    )
    parser.add_argument("--out", required=True, help="table to write, for a setting of rights.robots")
    parser.add_argument(
        "--processes", type=whole, default=os.cpu_count() or 1, help="number of processes that read files"
    )


def robots_command(arguments: argparse.Namespace) -> int:
    """Write the table and print what was read, written and left out; return 1 if there is no robots.txt."""
    if arguments.processes < 1:
        raise ConfigError(f"--processes: expected at least 1, got {arguments.processes}. Correct --processes.")
    counts = write_robots(arguments.files, arguments.out, arguments.processes)
    print(
        f"{counts.records:,} records: robots.txt of {counts.hosts:,} hosts, tdmrep.json of {counts.tdm_hosts:,} hosts"
    )
    for cause, number in sorted(counts.left_out.items()):
        print(f"{number:>12,} records left out: {cause}")
    return 0 if counts.hosts else 1


COMMANDS = {
    "rights": Command((add_run, add_rights_arguments), rights_command, "rights run --domain example.com"),
    "robots": Command((add_robots_arguments,), robots_command, "robots 'robotstxt/*.warc.gz' --out robots-crawl.arrow"),
}
