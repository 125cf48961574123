"""`penstock links`: a Parquet file of the links in WAT files, Reddit submissions and dumps of wikis."""

import argparse
import os

from jobs.arguments import Command, whole
from pipeline.links.table import write_links
from schemas.errors import ConfigError

GROUP = "data"
VERBS = {
    "links": "Write the links of WAT files, Reddit and wikis to a table.",
}


def add_links_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `links`."""
    parser.add_argument(
        "files", nargs="+", help="WAT files, Reddit submissions as JSON lines, dumps of wikis; patterns and URIs"
    )
    parser.add_argument("--out", required=True, help="Parquet file to write")
    parser.add_argument("--internal", action="store_true", help="write links between pages of one domain too")
    parser.add_argument(
        "--processes", type=whole, default=os.cpu_count() or 1, help="number of processes that read files"
    )


def links_command(arguments: argparse.Namespace) -> int:
    """Write the links and print what was read, written and left out; return 1 if there are no links."""
    if arguments.processes < 1:
        raise ConfigError(f"--processes: expected at least 1, got {arguments.processes}. Correct --processes.")
    counts = write_links(arguments.files, arguments.out, arguments.internal, arguments.processes)
    print(f"{counts.records:,} records: {counts.pages:,} pages and submissions with {counts.links:,} links written")
    for what, causes in (("records", counts.left_out), ("links", counts.links_left_out)):
        for cause, number in sorted(causes.items()):
            print(f"{number:>12,} {what} left out: {cause}")
    return 0 if counts.links else 1


COMMANDS = {
    "links": Command((add_links_arguments,), links_command, "links 'crawl/*.wat.gz' --out links.parquet"),
}
