"""`penstock report`: the report of a run."""

import argparse

from jobs.arguments import Command, add_run
from pipeline.report.page import write_report
from schemas.storage import Store

GROUP = "inspect"
VERBS = {
    "report": "Write the report of a run as one HTML page.",
}


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report` except the run."""
    parser.add_argument(
        "--truth", help="truth file of a demo crawl: adds the share of planted defects that were detected, by kind"
    )


def report_command(arguments: argparse.Namespace) -> int:
    """Write the report of a run as one HTML page."""
    print(f"report: {write_report(Store(arguments.run), arguments.truth)}")
    return 0


COMMANDS = {
    "report": Command(
        (add_run, add_report_arguments),
        report_command,
        "report run --truth crawl/truth.jsonl",
    ),
}
