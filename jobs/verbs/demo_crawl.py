"""`penstock demo-crawl`: a small synthetic crawl whose spam, duplicates and other defects are known."""

import argparse
from pathlib import Path

from jobs.arguments import Command
from pipeline.demo_crawl.build import build_demo_crawl

VERBS = {
    "demo-crawl": "Build a demo crawl: WARC files, and truth.jsonl, which lists their planted duplicates and defects.",
}


def add_demo_crawl_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo-crawl`."""
    parser.add_argument("out", help="folder for the WARC files and truth.jsonl")
    parser.add_argument(
        "--pages", type=int, default=3000, help="base pages; planted duplicates and defects are added to them"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random content; default 1")


def demo_crawl_command(arguments: argparse.Namespace) -> int:
    """Build a demo crawl: WARC files, and truth.jsonl, which lists their planted duplicates and defects."""
    truth = build_demo_crawl(Path(arguments.out), arguments.pages, arguments.seed)
    print(f"{truth.num_pages} pages in {arguments.out}; truth.jsonl lists what is planted")
    return 0


COMMANDS = {
    "demo-crawl": Command((add_demo_crawl_arguments,), demo_crawl_command, "demo-crawl demo/crawl --pages 3000"),
}
