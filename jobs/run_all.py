"""The spark-submit entry point: `spark-submit … jobs/run_all.py RECIPE --out RUN` runs every data step."""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from jobs.arguments import add_recipe, add_reuse
from jobs.exit_codes import exit_code_of
from jobs.recipe import read_recipe
from jobs.spark_session import REDACTING_WORKERS, WORKERS, SparkConfig, spark_session
from pipeline.forecast import Prices, check_rebuild, describe_run, forecast, is_complete, reuse_rows
from pipeline.pii.stage import PII, PiiConfig
from pipeline.prepare import Prepared, prepare
from pipeline.quality.limits import replacement_notes
from pipeline.quality.stage import QUALITY
from pipeline.run import run_locked_steps
from pipeline.summary import Summary, closing_summary
from schemas.checkpoints import CHECKPOINTS
from schemas.errors import ConfigError
from schemas.locks import lock_tables
from schemas.logs import LOGGER, PREFIX, TEXT, LoggedParser, add_log_option, set_log
from schemas.manifest import RUN_NAME
from schemas.overrides import override_words
from schemas.storage import Store
from schemas.tables import TABLES
from train.checkpoint.folder import list_checkpoints

FILE = "file://"
"""Scheme of a URI of a local file."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that are no settings."""

    reuse: str | None = None
    """Another run folder, whose complete tables are used in place of building the same ones."""
    verbose: bool = False
    """True = print the messages of Spark."""
    rebuild: Sequence[str] = ()
    """Large steps that are built again although only the code has changed."""


@dataclass(frozen=True)
class DryRunOptions:
    """Options of `--dry-run`."""

    reuse: str | None
    like: Sequence[str]
    """Runs to estimate the cost from: none, one or two."""
    prices: Prices


def run_recipe(
    recipe_path: str,
    out: str,
    overrides: Sequence[str],
    until: str | None = None,
    options: RunOptions = RunOptions(),
) -> Summary:
    """Run the data steps of a recipe into the run folder `out`, up to the step `until` (None: all of them).

    Return the closing summary. Raises ConfigError or ContractError before Spark starts if a setting is wrong, the
    folder cannot be written, another process uses it, or the run would take away the dataset of a trained model or
    build a large step again only because the code has changed.
    """
    started = time.monotonic()
    recipe = read_recipe(recipe_path, overrides)
    folder = Store(out)
    check_writable(folder)
    others = () if options.reuse is None else (open_reused(options.reuse, folder),)
    prepared = replace(prepare(recipe, until), reuse=others)
    check_inputs_apart(prepared, folder)
    models = {name: str(model.path) for name, model in prepared.models.get(QUALITY.name, {}).items()}
    for note in (*recipe.notes, *replacement_notes(recipe, models)):
        LOGGER.info(f"{PREFIX}{note}")
    config = recipe.section("spark", SparkConfig)
    folder.make_parent(RUN_NAME)  # the folder of the lock file
    with lock_tables(folder, "penstock run", others):
        verb = ["run"] if until is None else ["stage", until]
        check_trained(prepared, folder, [*verb, recipe_path, *override_words(overrides)])
        check_rebuild(prepared, folder, options.rebuild)
        # Spark takes seconds to start, and a complete run needs none of it.
        session = (
            nullcontext()
            if is_complete(prepared, folder)
            else spark_session(
                config, verbose=options.verbose, input_bytes=prepared.jvm_bytes, workers=workers_of(prepared)
            )
        )
        with session as spark:
            run_locked_steps(spark, prepared, folder, config.partitions, shlex.join(["penstock", *verb]))
    words = ["penstock", "run", recipe_path, "--out", out, *override_words(overrides)]
    seconds, rest = time.monotonic() - started, shlex.join(words) if until else None
    return closing_summary(folder, until, seconds, rest, reuse_rows(prepared, folder))


def workers_of(prepared: Prepared) -> str:
    """Return the module that forks the workers of a run: one that has loaded what replaces personal data if it does."""
    is_used = any(stage is PII for step in prepared.steps for stage in step.stages)
    is_used &= any(own.section(PII.name, PiiConfig).types for own in prepared.recipe.by_source().values())
    return REDACTING_WORKERS if is_used else WORKERS


def dry_run(recipe_path: str, out: str, overrides: Sequence[str], until: str | None, options: DryRunOptions) -> str:
    """Return what a run would build, why, and the estimated cost. No file is written and Spark is not started.

    Raises ConfigError like `run_recipe`, or if a run to estimate from is none.
    """
    folder = Store(out)
    others = () if options.reuse is None else (open_reused(options.reuse, folder),)
    prepared = replace(prepare(read_recipe(recipe_path, overrides), until), reuse=others)
    return describe_run(prepared, folder, [Store(run) for run in options.like], options.prices)


def options_of(arguments: argparse.Namespace) -> RunOptions:
    """Return the options that the arguments of a verb contain."""
    return RunOptions(arguments.reuse, arguments.verbose, arguments.rebuild)


def check_writable(folder: Store) -> None:
    """Raise ConfigError if a run folder cannot be created or written to."""
    if not folder.is_local:
        folder.check_bucket()
        return
    path = Path(folder.root)
    try:
        if path.is_file():
            raise ConfigError(f"--out {folder.uri}: expected a folder, got a file. Name another folder.")
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing):  # permissions alone do not show if a filesystem is read-only
            return
    except OSError as error:
        raise ConfigError(
            f"--out {folder.uri}: expected a folder that can be written, got an error: {error.strerror}. Name another "
            "folder, or change its permissions."
        ) from error


def check_inputs_apart(prepared: Prepared, folder: Store) -> None:
    """Raise ConfigError if an input file lies in the folder of a table of the run, in which versions are deleted."""
    root = os.path.realpath(folder.root) if folder.is_local else folder.uri
    for uri in (uri for split in prepared.splits for uri in (split.uri, *split.companions)):
        is_local = "://" not in uri or uri.startswith(FILE)
        path = unquote(uri.removeprefix(FILE)) if uri.startswith(FILE) else uri
        place = os.path.realpath(path) if is_local else uri.partition("?")[0]
        table = place.removeprefix(f"{root}/").partition("/")[0]
        if is_local == folder.is_local and place.startswith(f"{root}/") and table in TABLES:
            raise ConfigError(
                f"--out {folder.uri}: expected input files outside of the folders of its tables, got {uri} in {table}. "
                "Move the input files, or name another folder."
            )


def open_reused(address: str, folder: Store) -> Store:
    """Return the run of `--reuse`. Raises ConfigError if `folder` cannot refer to its tables."""
    run = Store(address)
    if not run.exists(RUN_NAME):
        raise ConfigError(f"--reuse {address}: expected a run folder, got one without {RUN_NAME}. Correct the path.")
    if run.uri == folder.uri:
        raise ConfigError(f"--reuse {address}: expected another run than --out, got the same. Remove --reuse.")
    if run.fs != folder.fs:
        raise ConfigError(
            f"--reuse {address}: expected a run on the filesystem of {folder.uri}, got one on another filesystem. Set "
            "--out to a folder on the filesystem of the run."
        )
    return run


def check_trained(prepared: Prepared, folder: Store, command: Sequence[str]) -> None:
    """Check that a run does not replace the dataset that the checkpoints of its folder were trained on.

    `command`: the words after `penstock`, without folders. Raises ConfigError with the command for a new run folder.
    """
    if not (checkpoints := list_checkpoints(folder)):
        return
    expected = forecast(prepared, folder)
    dataset, checkpoint = expected.complete.get("tokens"), checkpoints[-1]
    if not expected.changes or (dataset is not None and dataset.manifest.digest == checkpoint.identity.dataset):
        return
    steps = [change.step for change in expected.changes]
    reasons = [f"\n  {reason}" for change in expected.changes for reason in change.reasons]
    words = [*command, "--out", _new_name(folder)]
    if expected.complete:
        words += ["--reuse", folder.uri]
    raise ConfigError(
        f"{folder.uri}: expected the settings and inputs of the dataset that {checkpoint.name} was trained on, got "
        f"others, which replace {', '.join(steps)}{''.join(reasons)}\nNothing was started. Use a new run folder"
        f"{', which shares the unchanged tables' if expected.complete else ''}:\n  penstock {shlex.join(words)}\n"
        f"Or undo the change, or remove {CHECKPOINTS} to train from the beginning."
    )


def _new_name(folder: Store) -> str:
    """Return the path of a folder beside a run folder that does not exist."""
    number = 2
    while Path(name := f"{folder.root}-{number}").exists():
        number += 1
    return name


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the recipe and return the exit code."""
    set_log(TEXT)
    parser = LoggedParser(description=__doc__)
    add_recipe(parser)
    add_reuse(parser)
    add_log_option(parser)
    given = parser.parse_args(argv)

    def run() -> None:
        summary = run_recipe(given.recipe, given.out, given.overrides, options=options_of(given))
        print(summary.text())

    return exit_code_of(run, given)


if __name__ == "__main__":
    sys.exit(main())
