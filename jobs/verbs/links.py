"""`penstock links`: the pages that Reddit submissions with enough points link to, as a Parquet table."""

import argparse
from pathlib import Path

import pyarrow.parquet as pq

from jobs.arguments import Command
from pipeline.sources.link_evidence import LINKS, count_links
from schemas.errors import ConfigError

GROUP = "data"
VERBS = {
    "links": "Count the pages that Reddit submissions link to. Writes a Parquet table with the columns url, domain, "
    "links and score, sorted by URL.",
}


def links_command(arguments: argparse.Namespace) -> int:
    """Write the table of links, and print what was counted; return 1 if there is no link."""
    out = Path(arguments.out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out: expected a file in an existing folder, got {out}. Create the folder {out.parent}.")
    partial = out.with_name(f"{out.name}.partial")
    rows = 0
    try:
        with pq.ParquetWriter(partial, LINKS, compression="zstd") as writer:
            counts = count_links(arguments.paths, arguments.min_score, writer.write_batch)
        rows = pq.read_metadata(partial).num_rows
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{counts.pop('linked', 0):,} submissions link to {rows:,} pages: {out}")
    for reason, number in sorted(counts.items()):
        print(f"  {reason:<20}{number:>12,} rows")
    return 0 if rows else 1


def add_links_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `links`."""
    parser.add_argument("paths", nargs="+", help="files of submissions, such as RS_2015-01.zst, with wildcards")
    parser.add_argument("--out", required=True, help="the Parquet file to write")
    parser.add_argument("--min-score", type=int, default=3, help="minimum score of a submission (default: %(default)s)")


COMMANDS = {
    "links": Command((add_links_arguments,), links_command, "links RS_2015-01.zst --out links.parquet"),
}
