"""`penstock diff A B`: documents in and out between two runs or versions, and the rule responsible."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.inspect.diff import KEPT, ComparedRun, Difference, Example, compare_runs, open_compared_run
from schemas.errors import ConfigError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.versions import open_run

MovedCounts = Mapping[tuple[str, str], int]


def diff_command(arguments: argparse.Namespace) -> int:
    """Print which documents two runs or versions do not share, by source and rule, and their tokens by source."""
    if arguments.list < 0:
        raise ConfigError(f"diff --list: expected a number from 0 on, got {arguments.list}")
    a, b = open_compared_run(open_run(arguments.a)), open_compared_run(open_run(arguments.b))
    found = compare_runs(a, b, arguments.list)
    print(describe_difference(found, a, b))
    if arguments.json:
        path = Path(arguments.json).absolute()
        Store(str(path.parent)).write_atomic(path.name, canonical_json(to_json(found, a, b)))
    return 0


def describe_difference(found: Difference, a: ComparedRun, b: ComparedRun) -> str:
    """The difference as text."""
    lines = [
        f"{name}  {side.run.uri}  {'dataset' if side.dataset else 'clean'} {side.digest[:12]}  {kept:,} documents"
        for name, side, kept in zip("AB", (a, b), found.kept)
    ]
    if a.digest == b.digest:
        return "\n".join([*lines, "equal: one digest, so the same documents and the same tokens"])
    if found.settings:
        lines += ["", "settings that differ"]
        width = max(map(len, found.settings))
        lines += [f"  {name.ljust(width)}  {old} → {new}" for name, (old, new) in found.settings.items()]
    if not found.documents:
        lines += ["", "documents: the same in both"]
    for out, title in ((True, "out: kept by A, not by B, by what dropped them in B"), (False, _INTO)):
        lines += _told(found, found.moved(out), title, out)
    others = {key: count for key, count in found.documents.items() if KEPT not in key[1:]}
    if others:
        lines += ["", f"dropped by both, by another rule: {sum(others.values()):,}"]
        lines += [f"  {source}  {old} → {new}  {count:,}" for (source, old, new), count in _ordered(others)]
    return "\n".join([*lines, *_tokens(found.tokens)])


_INTO = "in: kept by B, not by A, by what dropped them in A"


def _told(found: Difference, moved: MovedCounts, title: str, out: bool) -> Iterator[str]:
    if not moved:
        return
    yield from ("", f"{title}: {sum(moved.values()):,}")
    for (source, rule), count in _ordered(moved):
        yield f"  {source}  {rule}  {count:,}"
        for example in found.examples.get((source, KEPT, rule) if out else (source, rule, KEPT), ()):
            yield f"    {_shown(example)}"


def _ordered(counts: Mapping[Any, int]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _shown(example: Example) -> str:
    limit = f", limit {example.limit:g}" if example.limit is not None else ""
    measured = f"  {example.value:g}{limit}" if example.value is not None else ""
    return f"{example.doc_id}{measured}  {example.url or ''}".rstrip()


def _tokens(tokens: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    if not tokens:
        return
    rows = [("tokens", "A", "B", "B - A")]
    rows += [(name, f"{old:,}", f"{new:,}", f"{new - old:+,}") for name, (old, new) in tokens.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    yield ""
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, 4))]
        yield "  ".join(cells)


def to_json(found: Difference, a: ComparedRun, b: ComparedRun) -> dict[str, Any]:
    """The whole difference as a JSON value."""
    return {
        "a": {"digest": a.digest, "documents": found.kept[0]},
        "b": {"digest": b.digest, "documents": found.kept[1]},
        "equal": a.digest == b.digest,
        "settings": {name: {"a": old, "b": new} for name, (old, new) in found.settings.items()},
        "documents": [
            {
                "source": source,
                "a": old,
                "b": new,
                "count": count,
                "examples": [vars(example) for example in found.examples.get((source, old, new), ())],
            }
            for (source, old, new), count in _ordered(found.documents)
        ],
        "tokens": {name: {"a": old, "b": new} for name, (old, new) in found.tokens.items()},
    }
