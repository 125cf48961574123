"""A run: each step is skipped if its tables exist for the same inputs and settings, else they are built and committed.

Inputs, models and the output folder are checked before the first task starts.
"""

import posixpath
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pyspark.sql import SparkSession

from pipeline.engine.code_digest import code_digest
from pipeline.engine.part import delete_part_results, delete_results_of_input, made_from
from pipeline.engine.part_times import write_part_times
from pipeline.engine.progress import Progress, reasons_text, step_fields, step_line, without_earlier_drops
from pipeline.engine.spark import ship_models, show_progress
from pipeline.engine.step import Step, StepContext, TableResult, add_figures
from pipeline.engine.tasks import newest_stage, work_since
from pipeline.prepare import (
    Prepared,
    find_version,
    finished_parts,
    inputs_digest,
    models_of,
    read_tables,
    relative_path,
    run_folders,
    shipped_models,
    step_content,
    step_identity,
)
from pipeline.stages import own_reasons, stages_by_source, steps_for
from schemas.errors import ContractError
from schemas.locks import lock_tables
from schemas.logs import LOGGER
from schemas.manifest import (
    FROM_INPUT,
    MANIFEST_NAME,
    RECIPE,
    RUN_NAME,
    Counts,
    InputEntry,
    RunFile,
    TableVersion,
    make_manifest,
    read_manifest,
    read_run,
    write_manifest,
    write_run,
)
from schemas.paths import check_deletable
from schemas.storage import Store
from schemas.takedown import check_no_takedowns
from schemas.versions import DATASET

DROPPING_STEPS = ("documents", "verdicts", "dedup", "repeats", "clean")
"""The steps that drop documents. If one of them keeps none, a run that builds a token dataset stops there."""


@dataclass(frozen=True, kw_only=True)
class Run(Prepared):
    """A run that builds its tables in a folder."""

    spark: SparkSession | None
    """None = every step is complete, so nothing is built."""
    folder: Store
    partitions: int | None
    """Maximum number of Spark tasks that process parts; None: it follows the cores."""


def run_steps(
    spark: SparkSession, prepared: Prepared, folder: Store, partitions: int | None, command: str = "penstock run"
) -> RunFile:
    """Build the tables of a run that do not exist yet, and return the content of its `run.json`.

    A complete step is skipped. An interrupted step resumes from its completed parts. `command` names this command in
    the lock file and in `progress.json`. Raises ContractError if another process writes to the run folder, or if no
    document is left for the tokenizer.
    """
    folder.make_parent(RUN_NAME)  # the folder of the lock file
    with lock_tables(folder, command, prepared.reuse):
        return run_locked_steps(spark, prepared, folder, partitions, command)


def run_locked_steps(
    spark: SparkSession | None,
    prepared: Prepared,
    folder: Store,
    partitions: int | None,
    command: str = "penstock run",
) -> RunFile:
    """Do the same as `run_steps`, for a caller that holds the lock on the tables of the run folder.

    `spark` may be None if every step is complete.
    """
    names = [step.name for step in prepared.steps]
    with show_progress(spark, command, names, folder) as progress:
        return _run_steps(Run(**vars(prepared), spark=spark, folder=folder, partitions=partitions), progress)


def _run_steps(run: Run, progress: Progress) -> RunFile:
    recipe, folder, steps = run.recipe, run.folder, run.steps
    code_digest()  # computed while the files are those that this process has imported
    used = {name for step in steps_for(recipe) if step.is_used(recipe) for name in step.writes}
    earlier = read_run(folder)
    existing = {name: version for name, version in earlier.tables.items() if name in used}
    state = RunFile(tables=existing, recipe=recipe.to_json())
    if not earlier.tables:
        write_run(folder, state)
    is_whole = used <= {name for step in steps for name in step.writes}
    if run.spark is not None:
        ship_models(run.spark, [model.file for model in shipped_models(run.models)])
    tables: dict[str, TableVersion] = {}
    is_new = False
    for step in steps:
        inputs = {name: tables[name] for name in step.inputs(recipe) if name in tables}
        folders = run_step(run, step, inputs | step.external_inputs(recipe, run.splits), progress)
        tables |= read_tables(folders)
        pointers = {name: relative_path(folder, name, written) for name, written in folders.items()}
        state = RunFile(tables=state.tables | pointers, recipe=state.recipe)
        # A recipe comes with its first new table: before, all tables are still those of the recipe that `run.json` has.
        is_new = is_new or not pointers.items() <= earlier.tables.items()
        if is_new or (is_whole and step is steps[-1]):
            write_run(folder, state)
        if steps[-1].name == DATASET:
            check_some_kept(step.name, {name: table.manifest.content.counts for name, table in tables.items()})
    return state


def check_some_kept(step: str, counts: Mapping[str, Counts]) -> None:
    """Raise ContractError if no document is left after a step, with the largest reasons of all tables built so far.

    `counts`: the row counts of the tables by name. A token dataset needs at least one document.
    """
    if step not in DROPPING_STEPS or counts[step].rows_kept:
        return
    dropped: dict[str, int] = {}
    for table in counts.values():
        dropped = add_figures(dropped, without_earlier_drops(table).dropped)
    raise ContractError(
        f"{step}: expected at least one document to be left, got none of {counts['documents'].rows_in:,} rows. "
        f"Dropped: {reasons_text(dropped) or 'none, because no row came in'}. Correct the settings of these stages, or "
        "source.paths; `penstock show RUN --where 'drop_rule = NAME'` prints dropped documents."
    )


def run_step(run: Run, step: Step, inputs: Mapping[str, TableVersion], progress: Progress) -> dict[str, Store]:
    """Return the folder of each table that a step writes. The tables are built unless all of them are complete.

    The complete tables may be in this run, or in another run that this run's `run.json` refers to. One line about the
    step is printed: that it is complete, or what it kept and dropped.
    """
    folders, owner = find_version(run, step, inputs, run.folder)
    if owner is not None:
        where = "" if owner.uri == run.folder.uri else f" in {owner.uri}"
        complete = f"{step.name:<10} is complete ({step_identity(run, step, inputs)[:12]}){where}"
        progress.say(complete, step=step.name)
        manifest = read_manifest(folders[step.name])
        progress.finish(step.name, "complete", manifest.content.counts, manifest.run.wall_seconds)
        return folders
    if not step.reads:
        for other in run_folders(run.folder, run.reuse):
            check_no_takedowns(other, step.name)
    for name, table in folders.items():
        check_deletable(run.folder, f"{name}/{posixpath.basename(table.root)}/x")
    with progress.step(step.name):
        build_step(run, step, inputs, folders)
    manifest = read_manifest(folders[step.name])
    progress.finish(step.name, "done", manifest.content.counts, manifest.run.wall_seconds)
    own = own_reasons({step.name: manifest})
    figures = step.name, manifest.content.counts, manifest.run.wall_seconds
    progress.say(step_line(*figures, own), **step_fields(*figures))
    return folders


def build_step(run: Run, step: Step, inputs: Mapping[str, TableVersion], folders: Mapping[str, Store]) -> None:
    """Build and commit the tables of a step in `folders`, by table."""
    if run.spark is None:
        raise ContractError(
            f"{run.folder.uri}: expected complete tables of the step {step.name}, got none: another process "
            "has deleted them. Run this command again."
        )
    started, clock, before = datetime.now(UTC), time.monotonic(), newest_stage(run.spark)
    for place in folders.values():
        place.make_parent("x")  # durably: results outside of the version will name its files
    with made_from(inputs_digest(inputs)):
        context = context_of(run, step, inputs, folders)
        built = step.build(replace(context, finished=finished_parts(run, step, run.folder)))
    check_inputs(run.folder, step.name, built[step.name], input_identities(run, step))  # before any table is committed
    work = work_since(run.spark, before)
    built[step.name].notes |= {"shuffled_bytes": work.shuffled_bytes, "task_seconds": round(work.task_seconds, 3)}
    timing = {"started": started.isoformat(timespec="seconds"), "wall_seconds": round(time.monotonic() - clock, 3)}
    write_part_times(run.folder, step.name, built[step.name].parts)  # first: a step that is committed is not repeated
    for table in reversed(step.writes):
        commit(run, step, folders[table], (table, built[table], inputs, timing))


def context_of(run: Run, step: Step, inputs: Mapping[str, TableVersion], folders: Mapping[str, Store]) -> StepContext:
    """Return the context in which a step builds its tables in `folders`."""
    return StepContext(
        run.spark,
        run.recipe,
        step.stages,
        folders,
        inputs,
        run.splits,
        models_of(run, step),
        run.partitions,
        stages_by_source(step, run.recipe),
    )


def commit(
    run: Run, step: Step, folder: Store, facts: tuple[str, TableResult, Mapping[str, TableVersion], dict[str, Any]]
) -> None:
    """Commit one table: write its manifest, then delete the JSON files that described its parts."""
    table, built, inputs, timing = facts
    entries = [InputEntry.model_validate(source) for source in built.sources]
    for name, read in inputs.items():
        size = sum(entry.bytes for entry in read.manifest.content.files)
        entries.append(InputEntry(name=name, bytes=size, sha256=read.manifest.digest))
    content = {
        "table": table,
        **step_content(run, step),
        "inputs": [entry.model_dump() for entry in entries],
        "files": [entry.model_dump() for entry in built.files],
        "counts": built.counts.model_dump(),
        "figures": built.figures,
    }
    calls = {"calls": built.failures.calls} if built.failures.calls else {}
    how = {
        **timing,
        "paths": built.paths,
        "blocks": built.blocks,
        "cpu_seconds": round(built.cpu_seconds, 3),
        "code_version": version("penstock"),
        "lineage": {name: read.folder.uri.rsplit("/", 1)[-1] for name, read in inputs.items()}
        | input_identities(run, step),
        "notes": {
            **built.notes,
            RECIPE: run.recipe.to_json(),
            "code": code_digest(),
            "errors": built.failures.most_frequent(),
            **calls,
        },
    }
    write_manifest(folder, make_manifest(content, how, folder.uri))
    delete_part_results(folder)
    for warning in built.failures.warnings():
        LOGGER.warning(f"{step.name}: {warning}")


def input_identities(run: Run, step: Step) -> dict[str, str]:
    """Return size and modification time of each input file that a step reads, as `lineage` of a manifest has them."""
    return {} if step.reads else {f"{FROM_INPUT}{split.key}": split.identity for split in run.splits}


def check_inputs(folder: Store, table: str, built: TableResult, identities: Mapping[str, str]) -> None:
    """Compare the input files' digests with the digests that this run recorded when it built the table before.

    Raises ContractError if the content of a file changed but its name, size and modification time did not; the stored
    results of its parts are deleted, so that the next run reads the file again. Of two readings of a file of Common
    Crawl with different sizes, one was cut, because the file was unreachable.
    """
    tables = read_run(folder).tables
    if not built.sources or table not in tables or not folder.exists(f"{table}/{tables[table]}/{MANIFEST_NAME}"):
        return
    earlier = read_manifest(folder.child(f"{table}/{tables[table]}"))
    digests = {(entry.name, entry.bytes, entry.num_parts): entry.sha256 for entry in earlier.content.inputs}
    for source in built.sources:
        name, now = (source["name"], source["bytes"], len(source.get("ranges", [None]))), source["sha256"]
        key = f"{FROM_INPUT}{source['name']}"
        same = earlier.run.lineage.get(key) == identities.get(key)
        if same and digests.get(name, now) != now:
            delete_results_of_input(folder, table, source["name"])
            raise ContractError(
                f"input {source['name']}: expected the recorded SHA-256 {digests[name][:16]}…, got {now[:16]}… "
                "although size and modification time are unchanged. Restore the file, or name another folder with "
                "--out."
            )
