"""`penstock lineage`: the graph from input files to checkpoints, as text, as JSON, or as OpenLineage events."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.arguments import Command, add_run
from pipeline.lineage.graph import Lineage, Node, fold_checkpoints, reduced_links
from pipeline.lineage.openlineage import openlineage_events
from pipeline.lineage.training import check_lineage, read_lineage
from pipeline.report.lineage import describe_count
from schemas.errors import ConfigError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.text import printable, printable_json_bytes, text_table
from schemas.versions import open_run
from train.checkpoint.folder import check_trained_order

GROUP = "join"
VERBS = {
    "lineage": "Print the lineage of a run, from inputs to checkpoints. A digest that does not match is an error.",
}

LINES = (".jsonl", ".ndjson")
"""File name suffixes that select one OpenLineage event per line; other files hold one JSON array of all events."""


def add_lineage_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lineage` except the run."""
    parser.add_argument("--out", help="write the graph to this JSON file")
    parser.add_argument(
        "--openlineage", help="write OpenLineage events to this file; one per line if it ends in .ndjson or .jsonl"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every file again and compare its digest, and compare plan and skip list with the checkpoints",
    )


def lineage_command(arguments: argparse.Namespace) -> int:
    """Print the lineage of a run, from input files to checkpoints. Raises ContractError if a digest does not match."""
    run = open_run(arguments.run)
    paths = [name for name in (arguments.out, arguments.openlineage) if name]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"lineage: expected two files, got {paths[0]} for both --out and --openlineage. Give each its own file."
        )
    lineage = read_lineage(run, arguments.verify)
    print(describe_lineage(fold_checkpoints(lineage), run.uri))
    # A lineage with a mismatch is printed but not exported, because an OpenLineage event cannot express the mismatch.
    check_lineage(lineage, run.uri)
    if arguments.verify:
        check_trained_order(run)
    if arguments.out:
        _write(arguments.out, printable_json_bytes(canonical_json(lineage.to_json())))
    if arguments.openlineage:
        _write(arguments.openlineage, encode_events(openlineage_events(lineage, run), arguments.openlineage))
    return 0


def encode_events(values: Sequence[dict[str, Any]], name: str) -> bytes:
    """Return OpenLineage events as bytes: JSON lines or a JSON array, as the suffix of the file `name` selects."""
    lines = [printable_json_bytes(canonical_json(event)) for event in values]
    return b"\n".join(lines) + b"\n" if name.endswith(LINES) else b"[\n" + b",\n".join(lines) + b"\n]\n"


def describe_lineage(lineage: Lineage, where: str) -> str:
    """Return the lineage as text: one line for each node, followed by its notes and mismatches."""
    numbers = {node.key: number for number, node in enumerate(lineage.nodes, start=1)}
    sources: dict[str, list[int]] = {}
    for source, target in reduced_links(lineage):
        sources.setdefault(target, []).append(numbers[source])
    rows = [_row(node, numbers[node.key], sources.get(node.key, [])) for node in lineage.nodes]
    lines = [f"lineage of {where}: {len(rows)} steps" if rows else f"lineage of {where}: no table exists yet"]
    indent = " " * (len(str(len(rows))) + 2)
    for node, line in zip(lineage.nodes, text_table(rows, "><")):
        lines.append(line)
        lines += [f"{indent}  {printable(note)}" for note in node.notes]
        lines += [f"{indent}! {printable(mismatch.message)}" for mismatch in lineage.breaks if mismatch.key == node.key]
    return "\n".join(lines)


def _row(node: Node, position: int, sources: Sequence[int]) -> tuple[str, str, str, str, str, str]:
    counts = ", ".join(describe_count(name, value) for name, value in node.counts.items())
    made = " ".join([(node.at or "")[:16].replace("T", " "), node.code or ""]).strip()
    earlier = "" if node.is_current else " (earlier)"
    origin = f"from {', '.join(map(str, sources))}" if sources else ""
    return str(position), node.title + earlier, node.digest[:12], counts, made, origin


def _write(name: str, data: bytes) -> None:
    path = Path(name).absolute()
    Store(str(path.parent)).write_atomic(path.name, data)


COMMANDS = {
    "lineage": Command(
        (add_run, add_lineage_arguments),
        lineage_command,
        "lineage run --out lineage.json --openlineage events.json",
    ),
}
