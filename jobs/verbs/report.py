"""`penstock report`: the report of a run."""

import argparse

from jobs.arguments import Command, add_run
from jobs.recipe import recipe_sections
from pipeline.report.page import ReportOptions, write_report
from schemas.storage import Store

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
    options = ReportOptions(arguments.truth, arguments.run, recipe_sections())
    print(f"report: {write_report(Store(arguments.run), options=options)}")
    return 0


COMMANDS = {
    "report": Command(
        (add_run, add_report_arguments),
        report_command,
        "report run --truth crawl/truth.jsonl",
    ),
}
