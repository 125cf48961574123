"""`penstock report`: the report of a run, of two runs side by side, or of a run while it is under way."""

import argparse
from pathlib import Path

from jobs.arguments import RUN_HELP, Command, whole
from jobs.recipe import recipe_sections
from pipeline.report.compare import write_comparison
from pipeline.report.live import LiveServer
from pipeline.report.page import ReportOptions, write_report
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.versions import open_run_to_read
from train.scaling.own_law import price_of_data

GROUP = "inspect"
VERBS = {
    "report": "Write the report of a run as one HTML page. It can compare two runs, or show a run live.",
}
COMPARISON_NAME = "compare.html"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("run", help=f"{RUN_HELP}; or RUN@digest with --out")
    parser.add_argument("other", nargs="?", help="a second run, or RUN@digest: the page compares both")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"file to write; default: report.html in the run folder, or {COMPARISON_NAME} here for two runs",
    )
    parser.add_argument(
        "--truth", help="truth file of a demo crawl: adds the share of planted defects that were detected, by kind"
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="serve a local page with the progress of the run, refreshed every two seconds, until Ctrl+C",
    )
    parser.add_argument("--port", type=whole, help="port of the live page; default: any free port")


def report_command(arguments: argparse.Namespace) -> int:
    """Write the report of a run or of two runs, or serve the live page of a run."""
    check_arguments(arguments)
    options = ReportOptions(arguments.truth, arguments.run, recipe_sections(), *output_of(arguments.out), price_of_data)
    if arguments.live:
        serve_live(Store(arguments.run), arguments.port or 0, options)
    elif arguments.other is not None:
        output, name = output_of(arguments.out or COMPARISON_NAME)
        runs = [(address, open_run_to_read(address)) for address in (arguments.run, arguments.other)]
        print(f"report: {write_comparison(runs[0], runs[1], output or Store('.'), name)}")
    else:
        print(f"report: {write_report(open_run_to_read(arguments.run), options=options)}")
    return 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an argument would be ignored."""
    wrong = []
    if arguments.live:
        given = {"a second run": arguments.other, "--out": arguments.out, "--truth": arguments.truth}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise ConfigError(f"report --live: expected one run, got {' and '.join(wrong)} too. Leave out --live.")
    elif arguments.port is not None:
        raise ConfigError(f"report --port: expected --live with it, got --port {arguments.port} alone. Add --live.")
    if arguments.other is not None and arguments.truth is not None:
        raise ConfigError(f"report --truth: expected one run, got {arguments.run} and {arguments.other}. Name one run.")
    if arguments.port is not None and not 0 <= arguments.port <= 65535:
        raise ConfigError(f"report --port: expected 0 to 65535, got {arguments.port}. Give a valid port.")


def output_of(path: str | None) -> tuple[Store | None, str]:
    """Return folder and name of the file to write; None and an empty name if `path` is None.

    Raises ConfigError if the path is a folder, or in a local folder that does not exist.
    """
    if path is None:
        return None, ""
    if "://" not in path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise ConfigError(f"report --out: expected a file in an existing folder, got {path}. Correct the path.")
    folder, _, name = path.rpartition("/")
    return Store(folder or ("/" if path.startswith("/") else ".")), name


def serve_live(run: Store, port: int, options: ReportOptions) -> None:
    """Serve the live page of a run until the command is interrupted."""
    server = LiveServer(run, port, options)
    try:
        print(f"live: {server.address}", flush=True)
        print("Ctrl+C closes the page; the run continues.", flush=True)
        server.serve()
    except KeyboardInterrupt:
        print("live page closed")


COMMANDS = {
    "report": Command(
        (add_report_arguments,),
        report_command,
        "report run --truth crawl/truth.jsonl",
    ),
}
