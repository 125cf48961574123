"""`penstock show`: documents of a run by id, URL or condition, with their verdicts and signals."""

import argparse
import functools
import operator

from jobs.arguments import Command, add_run
from pipeline.inspect.show import column_equals, columns_of_run, find_documents, format_document, parse_where
from schemas.errors import ConfigError
from schemas.versions import open_run

VERBS = {
    "show": "Print documents with their verdicts, signals and provenance.",
}


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `show` except the run."""
    parser.add_argument("--doc", help="document id, 32 hex digits")
    parser.add_argument("--url", help="URL as it was crawled")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        help="condition on columns of documents, such as 'language = de'; may be repeated",
    )
    parser.add_argument("--limit", type=int, default=10, help="maximum number of documents; default 10")
    parser.add_argument("--text", action="store_true", help="print the clean text too")


def show_command(arguments: argparse.Namespace) -> int:
    """Print documents with their verdicts, signals and provenance."""
    run = open_run(arguments.run)
    columns = columns_of_run(run)
    conditions = [parse_where(text, columns) for text in arguments.where]
    conditions += [column_equals("doc_id", arguments.doc)] if arguments.doc else []
    conditions += [column_equals("url", arguments.url)] if arguments.url else []
    if not conditions:
        raise ConfigError("show: expected --doc, --url or --where, got none of them. Add one.")
    condition = functools.reduce(operator.and_, conditions)
    number = 0
    for row in find_documents(run, condition, arguments.limit):
        print(format_document(row, arguments.text, columns) + "\n")
        number += 1
    print(f"{number} document(s)")
    return 0 if number else 1


COMMANDS = {
    "show": Command(
        (add_run, add_show_arguments),
        show_command,
        "show run --where 'language = de and drop_rule = gopher_short_doc' --limit 3",
    ),
}
