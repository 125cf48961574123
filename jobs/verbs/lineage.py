"""`penstock lineage`: where a run comes from and what was made of it, as text, as JSON, and for catalogues."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.lineage.graph import Lineage, Node, fold_checkpoints, reduced_links
from pipeline.lineage.openlineage import openlineage_events
from pipeline.lineage.read import check_lineage, read_lineage
from pipeline.report.facts import number, short, size
from schemas.errors import ConfigError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.versions import open_run

LINES = (".jsonl", ".ndjson")
"""Suffixes of a file of events that holds one a line; any other is one JSON array."""


def lineage_command(arguments: argparse.Namespace) -> int:
    """Print what a run was made from, from the files of the crawl to its checkpoints; a broken chain is an error."""
    run = open_run(arguments.run)
    wanted = [name for name in (arguments.out, arguments.openlineage) if name]
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"lineage: expected two files, got --out and --openlineage {wanted[0]}. Name another.")
    lineage = read_lineage(run, arguments.verify)
    print(describe_lineage(fold_checkpoints(lineage), run.uri))
    # A broken chain is shown, and never handed on: an OpenLineage event has no words for it.
    check_lineage(lineage, run.uri)
    if arguments.out:
        _write(arguments.out, canonical_json(lineage.to_json()))
    if arguments.openlineage:
        _write(arguments.openlineage, encode_events(openlineage_events(lineage, run), arguments.openlineage))
    return 0


def encode_events(found: Sequence[dict[str, Any]], name: str) -> bytes:
    """Events as the file of this name holds them."""
    lines = [canonical_json(event) for event in found]
    return b"\n".join(lines) + b"\n" if name.endswith(LINES) else b"[\n" + b",\n".join(lines) + b"\n]\n"


def describe_lineage(lineage: Lineage, where: str) -> str:
    """The lineage as text: a line for each node, behind everything it was made from, and what does not hold."""
    places = {node.key: place for place, node in enumerate(lineage.nodes, start=1)}
    sources: dict[str, list[int]] = {}
    for source, target in reduced_links(lineage):
        sources.setdefault(target, []).append(places[source])
    rows = [_row(node, places[node.key], sources.get(node.key, [])) for node in lineage.nodes]
    widths = [max(len(row[column]) for row in rows) for column in range(5)] if rows else [0] * 5
    lines = [f"lineage of {where}: {len(rows)} steps" if rows else f"lineage of {where}: no table stands yet"]
    for node, row in zip(lineage.nodes, rows):
        cells = [row[0].rjust(widths[0]), *(row[column].ljust(widths[column]) for column in range(1, 5)), row[5]]
        lines.append("  ".join(cells).rstrip())
        indent = " " * (widths[0] + 2)
        lines += [f"{indent}  {note}" for note in node.notes]
        lines += [f"{indent}! {found.message}" for found in lineage.breaks if found.key == node.key]
    return "\n".join(lines)


def _row(node: Node, place: int, sources: Sequence[int]) -> tuple[str, str, str, str, str, str]:
    """Number, title, digest, counts, when and by what code, and the numbers of what it was made from."""
    counts = ", ".join(format_count(name, value) for name, value in node.counts.items())
    made = " ".join([(node.at or "")[:16].replace("T", " "), node.code or ""]).strip()
    earlier = "" if node.is_current else " (earlier)"
    origin = f"from {', '.join(map(str, sources))}" if sources else ""
    return str(place), node.title + earlier, node.digest[:12], counts, made, origin


def format_count(unit: str, value: int | float) -> str:
    """A count with its unit, such as `53 rows` or `1.2 GB`."""
    if unit == "bytes":
        return size(value)
    if isinstance(value, float):
        return f"{unit} {value:.4f}"
    return f"{number(value) if value < 10**7 else short(value)} {unit}"


def _write(name: str, data: bytes) -> None:
    path = Path(name).absolute()
    Store(str(path.parent)).write_atomic(path.name, data)
