"""`penstock diff A B`: the documents that only one of two runs or versions keeps, and the rule that dropped each."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.arguments import Command
from pipeline.inspect.diff import KEPT, ComparedRun, Difference, Example, compare_runs, open_compared_run
from schemas.errors import ConfigError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.text import text_table
from schemas.versions import open_run

VERBS = {
    "diff": "Compare two runs or versions: documents that only one of them keeps, by source and rule, and tokens.",
}

MovedCounts = Mapping[tuple[str, str], int]


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diff`."""
    parser.add_argument("a", help="run folder, or RUN@digest")
    parser.add_argument("b", help="run folder, or RUN@digest")
    parser.add_argument(
        "--list", type=int, default=0, metavar="N", help="example documents to list for each source and rule"
    )
    parser.add_argument("--json", help="write the whole difference to this JSON file")


def diff_command(arguments: argparse.Namespace) -> int:
    """Compare two runs or versions: documents that only one of them keeps, by source and rule, and tokens."""
    if arguments.list < 0:
        raise ConfigError(f"diff --list: expected a number of at least 0, got {arguments.list}. Give --list 0 or more.")
    a, b = open_compared_run(open_run(arguments.a)), open_compared_run(open_run(arguments.b))
    difference = compare_runs(a, b, arguments.list)
    print(describe_difference(difference, a, b))
    if arguments.json:
        path = Path(arguments.json).absolute()
        Store(str(path.parent)).write_atomic(path.name, canonical_json(to_json(difference, a, b)))
    return 0


def describe_difference(difference: Difference, a: ComparedRun, b: ComparedRun) -> str:
    """Return the difference of two runs as text to print."""
    lines = [
        f"{name}  {side.run.uri}  {'dataset' if side.dataset else 'clean'} {side.digest[:12]}  {kept:,} documents"
        for name, side, kept in zip("AB", (a, b), difference.kept)
    ]
    if difference.settings:
        lines += ["", "settings that differ"]
        rows = [(name, f"{old} → {new}") for name, (old, new) in difference.settings.items()]
        lines += text_table(rows, indent="  ")
    if a.digest == b.digest:
        return "\n".join([*lines, "equal: the digests are the same, and so are documents and tokens"])
    if not difference.documents:
        lines += ["", "documents: both keep the same"]
    for out, title in ((True, "only in A, by the rule that dropped them in B"), (False, _INTO)):
        lines += _moved_lines(difference, difference.moved(out), title, out)
    both_dropped = {key: count for key, count in difference.documents.items() if KEPT not in key[1:]}
    if both_dropped:
        lines += ["", f"dropped by both, by different rules: {sum(both_dropped.values()):,}"]
        lines += [f"  {source}  {old} → {new}  {count:,}" for (source, old, new), count in _ordered(both_dropped)]
    return "\n".join([*lines, *_tokens(difference.tokens)])


_INTO = "only in B, by the rule that dropped them in A"


def _moved_lines(difference: Difference, moved: MovedCounts, title: str, is_out: bool) -> Iterator[str]:
    if not moved:
        return
    yield from ("", f"{title}: {sum(moved.values()):,}")
    for (source, rule), count in _ordered(moved):
        yield f"  {source}  {rule}  {count:,}"
        for example in difference.examples.get((source, KEPT, rule) if is_out else (source, rule, KEPT), ()):
            yield f"    {_describe_example(example)}"


def _ordered(counts: Mapping[Any, int]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _describe_example(example: Example) -> str:
    limit = f", limit {example.limit:g}" if example.limit is not None else ""
    measured = f"  {example.value:g}{limit}" if example.value is not None else ""
    return f"{example.doc_id}{measured}  {example.url or ''}".rstrip()


def _tokens(tokens: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    if not tokens:
        return
    rows = [("tokens", "A", "B", "B - A")]
    rows += [(name, f"{old:,}", f"{new:,}", f"{new - old:+,}") for name, (old, new) in tokens.items()]
    yield from ("", *text_table(rows, "<>"))


def to_json(difference: Difference, a: ComparedRun, b: ComparedRun) -> dict[str, Any]:
    """Return the whole difference as a JSON value."""
    return {
        "a": {"digest": a.digest, "documents": difference.kept[0]},
        "b": {"digest": b.digest, "documents": difference.kept[1]},
        "equal": a.digest == b.digest,
        "settings": {name: {"a": old, "b": new} for name, (old, new) in difference.settings.items()},
        "documents": [
            {
                "source": source,
                "a": old,
                "b": new,
                "count": count,
                "examples": [vars(example) for example in difference.examples.get((source, old, new), ())],
            }
            for (source, old, new), count in _ordered(difference.documents)
        ],
        "tokens": {name: {"a": old, "b": new} for name, (old, new) in difference.tokens.items()},
    }


COMMANDS = {
    "diff": Command((add_diff_arguments,), diff_command, "diff run@62330853215d run --list 3"),
}
