"""`penstock show`, `diff` and `whatif`: the documents of a run, two runs compared, and other limits tried."""

import argparse
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.arguments import Command, add_overrides, add_run, add_trust, add_verbose, whole
from jobs.recipe import check_addresses, deciding_models, stored_recipe, warn_of_spark
from jobs.spark_session import SparkConfig, spark_session
from pipeline.engine.spark import ship_models
from pipeline.inspect.diff import KEPT, ComparedRun, Difference, Example, compare_runs, open_compared_run
from pipeline.inspect.diff_training import PairRow
from pipeline.inspect.document_text import document_json, format_document, format_summary, has_raw_text
from pipeline.inspect.show import (
    WITH_TEXT,
    column_equals,
    columns_of_run,
    find_documents,
    host_below,
    parse_where,
    rule_equals,
    sample_documents,
)
from pipeline.inspect.whatif import Prediction, format_prediction, open_tables, predict, to_json
from pipeline.inspect.whatif_limits import changed_settings, describe_changes
from pipeline.report.facts import number
from pipeline.stages import reasons_of_run
from schemas.document_ids import ID_HELP, resolve_doc_ids
from schemas.errors import ConfigError
from schemas.ids import canonical_json
from schemas.logs import LOGGER
from schemas.storage import Store
from schemas.text import printable, printable_json_bytes, text_table
from schemas.urls import canonical_url
from schemas.versions import open_run_to_read

GROUP = "inspect"
VERBS = {
    "diff": "Compare two runs: settings, documents, tokens and training. Documents that only one of them keeps are "
    "counted by source and rule. RUN@digest names an earlier version.",
    "show": "Print documents with their verdicts, signals and provenance.",
    "whatif": "Predict what a run would keep with other thresholds. No text is read, and the run is not changed.",
}

SHOWN_INPUTS = 3
"""Maximum number of input files that `diff` names for each run."""
MovedCounts = Mapping[tuple[str, str], int]


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diff`."""
    parser.add_argument("a", help="run folder, or RUN@digest")
    parser.add_argument("b", help="run folder, or RUN@digest")
    parser.add_argument(
        "--list", type=whole, default=0, metavar="N", help="example documents to list for each source and rule"
    )
    parser.add_argument("--json", help="write the whole difference to this JSON file")


def diff_command(arguments: argparse.Namespace) -> int:
    """Print the difference of two runs or versions: settings, documents that only one keeps, tokens and training."""
    if arguments.list < 0:
        raise ConfigError(f"diff --list: expected a number of at least 0, got {arguments.list}. Give --list 0 or more.")
    a, b = open_compared_run(open_run_to_read(arguments.a)), open_compared_run(open_run_to_read(arguments.b))
    difference = compare_runs(a, b, arguments.list)
    print(describe_difference(difference, a, b))
    if arguments.json:
        path = Path(arguments.json).absolute()
        Store(str(path.parent)).write_atomic(
            path.name, printable_json_bytes(canonical_json(difference_to_json(difference, a, b)))
        )
    return 0


def describe_difference(difference: Difference, a: ComparedRun, b: ComparedRun) -> str:
    """Return the difference of two runs as text to print."""
    lines = [
        f"{name}  {side.run.uri}  {'dataset' if side.dataset else 'clean'} {side.digest[:12]}  {kept:,} documents"
        for name, side, kept in zip("AB", (a, b), difference.kept)
    ]
    if difference.settings:
        lines += ["", "settings that differ"]
        rows = [(name, f"{old} → {new}") for name, (old, new) in difference.setting_texts.items()]
        lines += text_table(rows, indent="  ")
    lines += ["", *difference.notes] if difference.notes else []
    lines += _unshared_lines(difference, a, b)
    if difference.is_equal:
        lines += [""] * bool(difference.settings or difference.notes)
        lines += ["equal: the digests are the same, and so are documents and tokens"]
        return "\n".join(map(printable, [*lines, *_training(difference.training)]))
    if not difference.documents and a.has_documents and b.has_documents:
        partly = any(each.names for each in difference.unshared)
        lines += ["", f"documents: both keep the same{' of the input files that both read' if partly else ''}"]
    for out, title in ((True, "only in A, by the rule that dropped them in B"), (False, _INTO)):
        lines += _moved_lines(difference, difference.moved(out), title, out)
    both_dropped = {key: count for key, count in difference.documents.items() if KEPT not in key[1:]}
    if both_dropped:
        lines += ["", f"dropped by both, by different rules: {sum(both_dropped.values()):,}"]
        lines += [f"  {source}  {old} → {new}  {count:,}" for (source, old, new), count in _ordered(both_dropped)]
    return "\n".join(map(printable, [*lines, *_tokens(difference.tokens), *_training(difference.training)]))


def _unshared_lines(difference: Difference, a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    """Yield a line for each run that read input files which the other did not read."""
    if not any(each.names for each in difference.unshared):
        return
    yield from ("", "input files that only one run read; their documents are not compared")
    for label, side, inputs in zip("AB", (a, b), difference.unshared):
        if inputs.names:
            files = f"{len(inputs.names):,} file{'s' if len(inputs.names) > 1 else ''}"
            shown = [printable(name) for name in inputs.names[:SHOWN_INPUTS]]
            more = [f"{len(inputs.names) - len(shown):,} more"] if len(inputs.names) > len(shown) else []
            counts = f"{inputs.rows:,} rows, {inputs.kept:,} documents kept"
            yield f"  only in {label} ({side.run.uri}): {files}, {counts}: {', '.join([*shown, *more])}"


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
    return f"{example.doc_id}{measured}  {printable(example.url or '')}".rstrip()


def _tokens(tokens: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    if not tokens:
        return
    rows = [("tokens", "A", "B", "B - A")]
    rows += [(name, f"{old:,}", f"{new:,}", f"{new - old:+,}") for name, (old, new) in tokens.items()]
    yield from ("", *text_table(rows, "<>"))


def _training(figures: Sequence[PairRow]) -> Iterator[str]:
    if not figures:
        return
    rows = [("training", "A", "B", "B - A")]
    for row in figures:
        change = "" if row.change is None else f"{'+' if row.change > 0 else ''}{number(row.change)}"
        rows.append((printable(row.name), number(row.a), number(row.b), change))
    yield from ("", *text_table(rows, "<>>>"))


def difference_to_json(difference: Difference, a: ComparedRun, b: ComparedRun) -> dict[str, Any]:
    """Return the whole difference as a JSON value."""
    return {
        "a": {"digest": a.digest, "documents": difference.kept[0]},
        "b": {"digest": b.digest, "documents": difference.kept[1]},
        "equal": difference.is_equal,
        "settings": {name: {"a": old, "b": new} for name, (old, new) in difference.settings.items()},
        "setting_texts": {name: {"a": old, "b": new} for name, (old, new) in difference.setting_texts.items()},
        "unshared_inputs": {name: vars(inputs) for name, inputs in zip("ab", difference.unshared)},
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
        "training": {row.name: {"a": row.a, "b": row.b} for row in difference.training},
        "notes": difference.notes,
    }


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `show` except the run."""
    parser.add_argument("--doc", metavar="ID", help=ID_HELP)
    parser.add_argument("--url", help="URL as it was crawled; without an exact match, URLs of the same canonical form")
    parser.add_argument("--domain", metavar="HOST", help="documents of a domain, the hosts below it included")
    parser.add_argument("--rule", help="rule that dropped the documents, such as gopher_short_doc")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="condition on columns, such as 'language = de' or 'meta.score > 3'; may be repeated",
    )
    parser.add_argument("--limit", type=whole, metavar="N", help="maximum number of documents; default 10")
    parser.add_argument("--random", type=whole, metavar="N", help="N documents at random, in place of the first ones")
    parser.add_argument(
        "--seed", type=whole, help="seed of --random; the same seed gives the same documents; default 0"
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="print the clean text too, or the raw text of dropped documents with the cut spans marked",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--all", action="store_true", help="print every column of each document; the default for a single document"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object per document and line")


def show_command(arguments: argparse.Namespace) -> int:
    """Print documents with their verdicts, signals and provenance."""
    check_show(arguments)
    run = open_run_to_read(arguments.run)
    columns = columns_of_run(run)
    reasons = reasons_of_run(run)
    shown = num_raw = 0
    rows = _shown_documents(arguments, run, columns)
    head = list(itertools.islice(rows, 2))
    is_whole = arguments.all or len(head) == 1
    for row in itertools.chain(head, rows):
        if arguments.text and has_raw_text(row) and not num_raw:
            LOGGER.info("show: the text of dropped documents is raw and may hold personal data")
        shown, num_raw = shown + 1, num_raw + has_raw_text(row)
        if arguments.json:
            print(document_json(row, arguments.text))
        elif is_whole:
            print(format_document(row, arguments.text, columns, reasons) + "\n")
        else:
            print(format_summary(row, arguments.text, reasons) + "\n")
    if arguments.json:
        LOGGER.info(f"{shown} document(s)", extra={"documents": shown})
    else:
        print(f"{shown} document(s)")
    return 0 if shown else 1


def check_show(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an option of `show` is out of range or would have no effect, or nothing is asked for."""
    for name in ("limit", "random"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"show --{name}: expected at least 1 document, got {value}. Give a larger number.")
    if arguments.random is not None and arguments.limit is not None:
        raise ConfigError("show: expected --random or --limit, got both. Remove --limit.")
    if arguments.seed is not None and arguments.random is None:
        raise ConfigError("show: expected --seed only together with --random, got no --random. Add --random.")
    if arguments.random is not None and arguments.url is not None:
        raise ConfigError("show: expected --random or --url, got both. Remove --random.")
    named = (arguments.doc, arguments.url, arguments.domain, arguments.rule, arguments.where, arguments.random)
    if not any(named):
        raise ConfigError(
            "show: expected --doc, --url, --domain, --rule, --where or --random, got none of them. Add one."
        )


def _shown_documents(arguments: argparse.Namespace, run: Store, columns: pa.Schema) -> Iterator[dict[str, Any]]:
    """Yield the documents that the arguments of `show` select."""
    conditions = [parse_where(text, columns) for text in arguments.where]
    if arguments.doc:
        conditions.append(column_equals("doc_id", resolve_doc_ids(run, {arguments.doc: "--doc"})[0]))
    conditions += [host_below(arguments.domain)] if arguments.domain else []
    conditions += [rule_equals(run, arguments.rule)] if arguments.rule else []
    both = functools.partial(functools.reduce, operator.and_)
    if arguments.random is not None:
        seed = 0 if arguments.seed is None else arguments.seed
        yield from sample_documents(run, both(conditions or [WITH_TEXT]), arguments.random, seed, arguments.text)
        return
    limit = 10 if arguments.limit is None else arguments.limit
    if not arguments.url:
        yield from find_documents(run, both(conditions), limit, with_text=arguments.text)
        return
    exact = both([*conditions, column_equals("url", arguments.url)])
    row = None
    for row in find_documents(run, exact, limit, with_text=arguments.text):
        yield row
    if row is None:
        form = printable(canonical_url(arguments.url))
        LOGGER.info(f"show: no document has exactly this URL; searching for the canonical form {form}")
        anything = both(conditions or [pc.field("url").is_valid()])
        yield from find_documents(run, anything, limit, arguments.url, arguments.text)


def add_whatif_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `whatif` except the run and `--set`."""
    parser.add_argument("--json", help="write the whole prediction to this file, every curve included")


def whatif_command(arguments: argparse.Namespace) -> int:
    """Predict what a finished run would keep with other thresholds, without reading texts or changing the run."""
    run = open_run_to_read(arguments.run)
    warn_of_spark(run, arguments.trust_run)
    predicted = predict_run(run, arguments.overrides, arguments.verbose, arguments.trust_run)
    print(format_prediction(*predicted))
    if arguments.json:
        folder, _, name = arguments.json.rpartition("/")
        Store(folder or ".").write_atomic(name, printable_json_bytes(canonical_json(to_json(*predicted))))
    return 0


def predict_run(
    run: Store, overrides: Sequence[str], verbose: bool = False, trust: bool = False
) -> tuple[Prediction, dict[str, tuple[object, object]], tuple[str, ...]]:
    """Return the prediction for a run, the changed settings as name → (old value, new value), and lines about them.

    `verbose`: print the messages of Spark. `trust`: use all settings of Spark that the run names. Raises
    ConfigError if a what-if cannot change one of the settings.
    """
    committed, proposed = stored_recipe(run, [], trust=trust), stored_recipe(run, overrides, trust=trust)
    check_addresses(run, proposed, overrides, trust)
    changed = changed_settings(committed, proposed)
    models = deciding_models(proposed)
    described = describe_changes(committed, proposed, changed, models.get("quality", {}))
    tables = open_tables(run)  # a missing or inconsistent run is rejected before Spark starts
    size = sum(entry.bytes for entry in tables["documents"].manifest.content.inputs) if "documents" in tables else None
    with spark_session(proposed.section("spark", SparkConfig), "penstock what-if", verbose, size) as spark:
        ship_models(spark, [path for paths in models.values() for path in paths.values()])
        return predict(spark, run, proposed, models), changed, described


COMMANDS = {
    "diff": Command((add_diff_arguments,), diff_command, "diff run@62330853215d run --list 3"),
    "show": Command(
        (add_run, add_show_arguments),
        show_command,
        "show run --where 'language = de and drop_rule = gopher_short_doc' --limit 3",
    ),
    "whatif": Command(
        (add_run, add_overrides, add_trust, add_verbose, add_whatif_arguments),
        whatif_command,
        "whatif run --set quality.min_words=30 --set toxicity.max_words=0",
    ),
}
