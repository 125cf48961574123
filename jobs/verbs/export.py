"""`penstock export`: clean text or a table for other programs, a model for Hugging Face, or tokens for Megatron."""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.arguments import Command, add_run, add_trust, add_verbose, whole
from jobs.recipe import stored_recipe, warn_of_spark
from jobs.spark_session import SparkConfig, spark_session, worker_environment
from pipeline.disclosure.answers import read_answers
from pipeline.disclosure.dataset_card import CardText
from pipeline.disclosure.facts import collect, sources_of
from pipeline.disclosure.hub import HubCard
from pipeline.disclosure.model_card import model_card
from pipeline.engine.part import TaskResult
from pipeline.engine.spark import run_tasks
from pipeline.export.card import published_recipe
from pipeline.export.export import (
    DATASET_FORMAT,
    ZSTD,
    ExportOptions,
    PreparedExport,
    Runner,
    export_table,
    export_text,
    prepare_export,
    prepare_table_export,
)
from pipeline.export.export import FORMATS as TEXT_FORMATS
from pipeline.export.shards import COMPRESSIONS
from pipeline.stages import unmeasured_columns
from schemas.config import Recipe, suggest_name
from schemas.errors import ConfigError, ContractError
from schemas.exports import begin_receipt, write_receipt
from schemas.locks import lock_export
from schemas.logs import LOGGER, log_words
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.takedown import check_no_pending_takedown
from schemas.text import format_bytes
from schemas.tokens import open_dataset
from schemas.versions import DATASET, open_run_to_read
from train.export.megatron import export_megatron
from train.trace.consumed import consumption_of

GROUP = "data"
VERBS = {
    "export": "Export clean text, a table, a model or tokens. Text becomes JSON lines, Parquet or a dataset for the "
    "Hugging Face Hub; a model becomes a folder of transformers, tokens the files of Megatron.",
}

Arguments = argparse.Namespace
FORMATS = (*TEXT_FORMATS, "huggingface", "megatron")
"""Formats of clean text; the model of a checkpoint as a folder of Hugging Face; the dataset as .bin and .idx files."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", re.IGNORECASE)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
DEFAULT_SHARD = "256MB"
OPTIONS = {
    "step": ("huggingface",),
    "weights": ("huggingface",),
    "facts": ("huggingface",),
    "table": ("jsonl", "parquet"),
    "signals": TEXT_FORMATS,
    "where": TEXT_FORMATS,
    "shard_size": TEXT_FORMATS,
    "compression": ("jsonl",),
    "name": (DATASET_FORMAT,),
    "licence": (DATASET_FORMAT,),
    "creator": (DATASET_FORMAT,),
    "url": (DATASET_FORMAT,),
}
"""The formats for which each option has an effect."""


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export` except the run."""
    parser.add_argument(
        "--format",
        choices=FORMATS,
        required=True,
        help="jsonl, parquet: clean text, or --table; huggingface-dataset: clean text with a dataset card and "
        "Croissant metadata; huggingface: a checkpoint; megatron: the token dataset",
    )
    parser.add_argument(
        "--out", required=True, help="folder to write, new or empty: a local path or s3://, gs://, abfs://, hdfs://"
    )
    parser.add_argument("--table", help="export this table of the run, such as documents, with ids in hexadecimal")
    parser.add_argument("--signals", metavar="NAMES", help="measurements to add as fields, separated by commas, or all")
    parser.add_argument("--where", metavar="CONDITION", help="only documents that meet it, such as 'language = de'")
    parser.add_argument(
        "--shard-size", metavar="SIZE", help=f"text of a shard before compression, such as 1GB; default {DEFAULT_SHARD}"
    )
    parser.add_argument(
        "--compression", choices=[*COMPRESSIONS], help=f"jsonl: compression of the files; default {ZSTD}"
    )
    parser.add_argument("--step", type=whole, help="huggingface: step of the checkpoint; default: the last")
    parser.add_argument(
        "--weights", choices=("model", "ema"), help="huggingface: ema = the moving average of a run with optim.ema"
    )
    parser.add_argument(
        "--facts", metavar="FILE", help="huggingface: answers for the model card, as for `penstock summary`"
    )
    parser.add_argument("--name", help="huggingface-dataset: name of the dataset; default: that of the folder")
    parser.add_argument(
        "--licence", metavar="ID", help="huggingface-dataset: licence of the whole dataset, such as odc-by"
    )
    parser.add_argument("--creator", help="huggingface-dataset: person or organization that publishes it")
    parser.add_argument("--url", help="huggingface-dataset: address where it is published")


def export_command(arguments: Arguments) -> int:
    """Export clean text, a table, a model or tokens in the format of another program."""
    check_export(arguments)
    check_no_pending_takedown(Store(arguments.run))
    if arguments.format == "huggingface":
        return _export_model(arguments)
    out = Store(arguments.out)
    if arguments.format == "megatron":
        with lock_export(out, "penstock export"):
            return _export_megatron(arguments, out)
    run = open_run_to_read(arguments.run)
    recipe = stored_recipe(run, [], trust=arguments.trust_run)
    warn_of_spark(run, arguments.trust_run)
    export = _export_text if arguments.table is None else _export_table
    with lock_export(out, "penstock export"):
        return export(arguments, run, out, recipe)


def _export_text(arguments: Arguments, run: Store, out: Store, recipe: Recipe) -> int:
    """Export the clean text of a run."""
    signals = tuple(name.strip() for name in (arguments.signals or "").split(",") if name.strip())
    size = parse_size(DEFAULT_SHARD if arguments.shard_size is None else arguments.shard_size)
    options = ExportOptions(arguments.format, signals, arguments.where, size, arguments.compression or ZSTD)
    prepared = prepare_export(run, out, options, unmeasured_columns(recipe))
    given = {name: value for name in ("licence", "creator", "url") if (value := getattr(arguments, name)) is not None}
    name = arguments.name or out.uri.rstrip("/").rpartition("/")[2]
    text = CardText(name=name, recipe=published_recipe(recipe), **given)
    read = _read_first("clean", prepared)
    _begin_receipt(arguments, run, out, read)
    manifest = _in_spark(recipe, arguments.verbose, lambda run_all: export_text(prepared, options, text, run_all))
    _leave_receipt(arguments, run, out, read, counts=manifest["content"]["counts"])
    counts, files = manifest["content"]["counts"], manifest["content"]["files"]
    left_out = f"; {counts['left_out_by_where']:,} did not meet --where" if arguments.where else ""
    print(
        f"{out.uri}: {counts['exported']:,} documents, {format_bytes(counts['text_bytes'])} of text, in {len(files):,} "
        f"file(s){left_out}; export.json has their digests"
    )
    return 0


def _export_model(arguments: Arguments) -> int:
    """Export a checkpoint in a process of its own, which imports torch; return its exit code."""
    step = [] if arguments.step is None else ["--step", str(arguments.step)]
    program = [sys.executable, "-m", "train.start", "--quiet", *log_words(), "train.export.llama"]
    weights = [] if arguments.weights is None else ["--weights", arguments.weights]
    command = [*program, arguments.run, "--out", arguments.out, *step, *weights]
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        if (card := _model_card(arguments)) is not None:
            path = Path(folder) / "README.md"
            path.write_bytes(card.to_bytes())
            command += ["--card", str(path)]
        return subprocess.run(command, env=worker_environment(), check=False).returncode


def _model_card(arguments: Arguments) -> HubCard | None:
    """Return the card of the model; None, with a warning, if what it has read is not known."""
    run = open_run_to_read(arguments.run)
    try:
        dataset = open_dataset(run)
        answers = read_answers(arguments.facts, sources_of(dataset))
        facts = collect(run, dataset, consumption_of(run, dataset, arguments.step), answers, False)
        card = model_card(facts, answers)
    except ContractError as error:
        LOGGER.warning(f"export: the folder has no README.md, because a fact of the card is not known: {error}")
        return None
    return replace(card, head={"library_name": "transformers", **card.head})


def check_export(arguments: Arguments) -> None:
    """Raise ConfigError if the format is none, or if an option has no effect with it."""
    if arguments.format not in FORMATS:  # from Python
        raise ConfigError(
            f"export: expected one of the formats {', '.join(FORMATS)}, got {arguments.format!r}"
            f"{suggest_name(str(arguments.format), FORMATS)}. Correct the format."
        )
    for name, formats in OPTIONS.items():
        if getattr(arguments, name) is not None and arguments.format not in formats:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"export {flag}: expected --format {' or '.join(formats)}, got {arguments.format}. Remove {flag}."
            )
    unused = [name for name in ("signals", "where", "shard_size") if getattr(arguments, name) is not None]
    if arguments.table is not None and unused:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise ConfigError(f"export --table: expected no option for clean text, got {flags}. Remove {flags}.")


def parse_size(text: str) -> int:
    """Return a size such as `256MB` in bytes; k, M and G are powers of 1000. Raises ConfigError if it is not one."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"export --shard-size: expected a size such as 256MB or 1GB, got {text!r}. Write a number and a unit."
        )
    return int(float(match[1]) * UNITS[match[2].lower()])


def _export_table(arguments: Arguments, run: Store, out: Store, recipe: Recipe) -> int:
    """Export a table of a run."""
    prepared: PreparedExport = prepare_table_export(
        run, arguments.table, out, arguments.format, arguments.compression or ZSTD
    )
    if arguments.table in ("text", "comparisons"):
        LOGGER.warning(f"export: the table `{arguments.table}` is raw and may hold personal data")
    read = _read_first(arguments.table, prepared)
    _begin_receipt(arguments, run, out, read)
    manifest = _in_spark(recipe, arguments.verbose, lambda run_all: export_table(prepared, run_all))
    counts, files = manifest["content"]["counts"], manifest["content"]["files"]
    _leave_receipt(arguments, run, out, read, counts=counts)
    rows = counts["rows"]
    print(f"{out.uri}: {rows:,} rows of {arguments.table} in {len(files):,} file(s)")
    return 0


def _in_spark(recipe: Recipe, verbose: bool, work: Callable[[Runner], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work`, which runs tasks in a Spark session with the settings of the recipe."""
    config = recipe.section("spark", SparkConfig)
    with spark_session(config, "penstock export", verbose) as spark:

        def run_all(function: Callable[[Any, bool], TaskResult], tasks: Sequence[Any], label: str) -> list[TaskResult]:
            return run_tasks(spark, function, tasks, label, config.partitions)

        return work(run_all)


def _export_megatron(arguments: Arguments, out: Store) -> int:
    run = Store(arguments.run)
    read = {DATASET: open_dataset(run).digest}
    _begin_receipt(arguments, run, out, read)
    exported = export_megatron(run, out)
    for source in exported:
        print(f"{arguments.out}/{source.prefix}: {source.num_documents:,} documents, {source.num_tokens:,} tokens")
    numbers = {
        "documents": sum(own.num_documents for own in exported),
        "tokens": sum(own.num_tokens for own in exported),
    }
    names = [f"{source.prefix}.{suffix}" for source in exported for suffix in ("bin", "idx")]
    _leave_receipt(arguments, run, out, read, names=names, counts=numbers)
    return 0


def _read_first(table: str, prepared: PreparedExport) -> dict[str, str]:
    """Return the digest of each table that an export reads, with that of `table` first."""
    digests: dict[str, str] = prepared.identity["tables"]
    return {table: digests[table]} | digests


def _begin_receipt(arguments: Arguments, run: Store, out: Store, read: dict[str, str]) -> None:
    """Write the receipt of an export before its first file, so that a takedown names it even if it is killed.

    Raises ContractError if a takedown has started since the tables were looked up: either it reads the receipt, or it
    is seen here.
    """
    _or_warn(run, out, lambda: begin_receipt(run, out, _options(arguments), read))
    check_no_pending_takedown(Store(run.address))
    for table, digest in read.items():
        if (current := open_table(run, table)[1].digest) != digest:
            raise ContractError(
                f"{run.uri}/{table}: expected version {digest[:12]}, got {current[:12]}, made by another command "
                "meanwhile. Run the export again."
            )


def _leave_receipt(arguments: Arguments, run: Store, out: Store, read: dict[str, str], **more: Any) -> None:
    """Write the receipt of a complete export into its run."""
    _or_warn(run, out, lambda: write_receipt(run, out, _options(arguments), read, **more))


def _options(arguments: Arguments) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("format", *OPTIONS)}


def _or_warn(run: Store, out: Store, write: Callable[[], object]) -> None:
    """Write a receipt; a run that cannot be written has a warning instead."""
    try:
        write()
    except (OSError, ContractError) as error:
        LOGGER.warning(f"export: {run.uri} has no receipt of {out.uri}, so a takedown will not name it: {error}")


COMMANDS = {
    "export": Command(
        (add_run, add_export_arguments, add_trust, add_verbose),
        export_command,
        "export run --format jsonl --out clean --signals gopher_num_words --where 'language = de'",
    ),
}
