"""A run: each step is skipped if its tables exist for the same inputs and settings, else they are built and committed.

Inputs, models and the output folder are checked before the first task starts.
"""

import json
import posixpath
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from pipeline.engine.code_digest import code_digest
from pipeline.engine.part import delete_part_results, made_from
from pipeline.engine.part_times import write_part_times
from pipeline.engine.progress import Progress, reasons_text, step_line, without_earlier_drops
from pipeline.engine.spark import ship_models, show_progress
from pipeline.engine.stage import PerDocument, Relation, Source, Split
from pipeline.engine.step import Model, Stage, Step, StepContext, TableResult, add_figures
from pipeline.engine.tasks import newest_stage, work_since
from pipeline.models import ModelsConfig, ensure_model
from pipeline.sources.splits import splits_of
from pipeline.stages import STEPS, canonical_recipe, own_reasons, stages_by_source, steps_for
from pipeline.takedown.select import check_none_removed
from schemas.config import SEPARATOR, SOURCE, Recipe, Section, own_key, suggest_name
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of, file_sha256
from schemas.locks import lock_tables
from schemas.manifest import (
    FROM_INPUT,
    MANIFEST_NAME,
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
from schemas.takedown import (
    check_no_takedowns,
    descent_of,
    has_takedowns,
    origin_digest,
    resolve_version,
    takedown_ancestry,
)
from schemas.versions import DATASET

Models = dict[str, dict[str, Model]]
DROPPING_STEPS = ("documents", "verdicts", "dedup", "repeats", "clean")
"""The steps that drop documents. If one of them keeps none, a run that builds a token dataset stops there."""
CONTENT = ("stages", "config", "models")
"""The fields of a manifest's content that follow from a recipe."""
SHOWN = 3
"""Maximum number of differences that a message names."""


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its settings, inputs and models have been checked."""

    recipe: Recipe
    steps: Sequence[Step]
    splits: Sequence[Split]
    models: Models
    reuse: tuple[Store, ...] = ()
    """Other runs whose complete tables are used in place of building the same ones."""

    @property
    def input_bytes(self) -> int:
        """Return the size of all input files [bytes]."""
        return sum(split.size for split in self.splits)

    @property
    def jvm_bytes(self) -> int:
        """Return the size of all inputs in the measure of the JVM's work, which follows the number of rows [bytes].

        An archive of pages counts a sixteenth, because a page takes 18 kB of it.
        """
        return sum(split.size // 16 if split.format == "warc" else split.size for split in self.splits)


@dataclass(frozen=True)
class Run:
    """The session, settings and inputs that all steps of a run share."""

    spark: SparkSession | None
    """None = every step is complete, so nothing is built."""
    recipe: Recipe
    folder: Store
    splits: Sequence[Split]
    models: Models
    partitions: int | None
    reuse: tuple[Store, ...] = ()


def prepare(recipe: Recipe, until: str | None) -> Prepared:
    """Return the steps up to and including `until` (None: all), with their inputs and models.

    Raises ConfigError if there is no such step, if an input or a model is missing, or if a rule or stage of the recipe
    is wrong.
    """
    names = [step.name for step in STEPS]
    if until is not None and until not in names:
        raise ConfigError(f"stage: expected a step, got {until!r}{suggest_name(until, names)}. Name a step of a run.")
    recipe = canonical_recipe(recipe)
    known = steps_for(recipe)
    steps = [step for step in known[: names.index(until) + 1 if until else None] if step.is_used(recipe)]
    if until is not None and until not in [step.name for step in steps]:
        used = ", ".join(step.name for step in known if step.is_used(recipe))
        raise ConfigError(
            f"stage: expected a step that this recipe uses ({used}), got {until!r}, which none of its settings and "
            "models asks for. Name another step, or add its settings; `penstock settings` lists them."
        )
    splits = splits_of(recipe)
    for step in steps:
        step.external_inputs(recipe, splits)
    return Prepared(recipe, steps, splits, find_models(recipe, steps))


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
        run = Run(spark, prepared.recipe, folder, prepared.splits, prepared.models, partitions, prepared.reuse)
        return _run_steps(run, prepared.steps, progress)


def _run_steps(run: Run, steps: Sequence[Step], progress: Progress) -> RunFile:
    recipe, folder = run.recipe, run.folder
    code_digest()  # computed while the files are those that this process has imported
    used = {name for step in steps_for(recipe) if step.is_used(recipe) for name in step.writes}
    existing = {name: version for name, version in read_run(folder).tables.items() if name in used}
    state = RunFile(tables=existing, recipe=recipe.to_json())
    write_run(folder, state)
    if run.spark is not None:
        ship_models(run.spark, [model.path for model in shipped_models(run.models)])
    tables: dict[str, TableVersion] = {}
    for step in steps:
        inputs = {name: tables[name] for name in step.inputs(recipe) if name in tables}
        folders = run_step(run, step, inputs | step.external_inputs(recipe, run.splits), progress)
        tables |= read_tables(folders)
        pointers = {name: relative_path(folder, name, written) for name, written in folders.items()}
        state = RunFile(tables=state.tables | pointers, recipe=state.recipe)
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


def find_models(recipe: Recipe, steps: Sequence[Step]) -> Models:
    """Return every model file that the steps need, fetched and verified.

    Raises ConfigError, before any task runs, if a model is missing or does not work with the settings.
    """
    config = recipe.section("models", ModelsConfig)
    models: Models = {}
    stages = {stage.name: stage for step in steps for stage in step.stages if not isinstance(stage, Source)}
    for name, stage in stages.items():
        for key, section in sections_of_stage(recipe, name).items():
            if found := models_of_stage(stage, section, config):
                models[key] = found
    return models


def sections_of_stage(recipe: Recipe, stage: str) -> dict[str, Section]:
    """Return the settings of a stage: those of the run by its name, then those that sources have for themselves."""
    if stage == SOURCE and recipe.has_several_sources:
        return {own_key(name, SOURCE): each[SOURCE] for name, each in recipe.by_source().items()}
    own = {name: each for name, each in recipe.by_source().items() if stage in each.own}
    return {stage: recipe[stage]} | {own_key(name, stage): each[stage] for name, each in own.items()}


def models_of_stage(stage: PerDocument | Relation, section: Section, config: ModelsConfig) -> dict[str, Model]:
    """Return the models that a stage needs with some settings, fetched and verified."""
    models: dict[str, Model] = {}
    for name, place in stage.models(section).items():
        local = ensure_model(place, config)
        models[name] = Model(str(local.path), local.sha256, is_shipped(stage, name))
    if isinstance(stage, PerDocument):
        models |= compiled(stage, section, models, config) if models else {}
        paths = {name: model.path for name, model in models.items()}
        if paths:  # a model that does not work with the settings fails here and not on the workers
            stage.make(section, paths)
        stage.checks(section, paths, {})
    return models


def shipped_models(models: Models) -> list[Model]:
    """Return the model files that are copied to the workers."""
    return [model for named in models.values() for model in named.values() if model.shipped]


def is_shipped(stage: Stage, name: str) -> bool:
    """Return True if Spark workers open this model file. Such a file must be copied to the workers."""
    return isinstance(stage, PerDocument) and stage.compile is None and not name.startswith(stage.stays)


def compiled(stage: PerDocument, config: Section, models: Mapping[str, Model], store: ModelsConfig) -> dict[str, Model]:
    """Return the files that a stage compiles from its models, by name."""
    if stage.compile is None:
        return {}
    identity = digest_of([stage.name, stage.version, config.content(), sorted(m.sha256 for m in models.values())])
    folder = Path(store.cache).expanduser().absolute() / "compiled" / identity[:16]
    folder.mkdir(parents=True, exist_ok=True)
    made = stage.compile(config, {name: model.path for name, model in models.items()}, str(folder))
    return {name: Model(path, file_sha256(Path(path))) for name, path in made.items()}


def run_step(run: Run, step: Step, inputs: Mapping[str, TableVersion], progress: Progress) -> dict[str, Store]:
    """Return the folder of each table that a step writes. The tables are built unless all of them are complete.

    The complete tables may be in this run, or in another run that this run's `run.json` refers to. One line about the
    step is printed: that it is complete, or what it kept and dropped.
    """
    folders, owner = find_version(run, step, inputs, run.folder)
    if owner is not None:
        where = "" if owner.uri == run.folder.uri else f" in {owner.uri}"
        progress.say(f"{step.name:<10} is complete ({step_identity(run, step, inputs)[:12]}){where}")
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
    progress.say(step_line(step.name, manifest.content.counts, manifest.run.wall_seconds, own))
    return folders


def find_version(
    run: Run | Prepared, step: Step, inputs: Mapping[str, TableVersion], folder: Store
) -> tuple[dict[str, Store], Store | None]:
    """Return the folder of each table of a step, and the run that has the tables complete; None = no run has.

    That run is the run `folder` or another one that it uses. Without it, the folders are those in which the run would
    build the tables. Raises ContractError if a folder has the name of this version and the tables of another one.
    """
    version = f"v-{step_identity(run, step, inputs)[:12]}"
    owners = run_folders(folder, run.reuse)
    for owner in owners:
        folders = version_folders(owner, step, version)
        if not all(table.exists(MANIFEST_NAME) for table in folders.values()):
            continue
        tables = read_tables(folders)
        check_content(run, step, tables)
        is_own = owner.uri == folder.uri
        if check_inputs_read(run, step, tables, inputs, is_own) and (
            is_own or is_without_removed(folder, tables, inputs)
        ):
            return folders, owner
    return version_folders(owners[0], step, version), None


def check_content(run: Run | Prepared, step: Step, tables: Mapping[str, TableVersion]) -> None:
    """Raise ContractError if tables were written by other stages, settings or models than those of a step.

    The folder of a version is named after them, but anybody can rename a folder.
    """
    expected = _facts(step_content(run, step))
    for table in tables.values():
        _check_facts(table, expected, _facts(table.manifest.content.model_dump(mode="json", include={*CONTENT})))


def check_inputs_read(
    run: Run | Prepared,
    step: Step,
    tables: Mapping[str, TableVersion],
    inputs: Mapping[str, TableVersion],
    is_own: bool,
) -> bool:
    """Return True if tables were made from the inputs of a step, or from what these were before a takedown in one run.

    A takedown removes documents from all tables of its run, and from none of another run that reads them. The indexes
    of earlier snapshots, which only name documents, may have changed by takedowns in their runs. `is_own`: the
    tables are in the folder of the run; raises ContractError if they were made from other inputs. Those of another run
    may be: its tables have equal settings, but other code may have written them.
    """
    files = {} if step.reads else {f"{FROM_INPUT}{split.key}": split.identity for split in run.splits}
    expected = {name: table.manifest.digest for name, table in inputs.items()} | files
    for table in tables.values():
        read = {entry.name: entry.sha256 for entry in table.manifest.content.inputs}
        actual = {name: value for name, value in table.manifest.run.lineage.items() if name.startswith(FROM_INPUT)}
        for name, given in inputs.items():
            is_earlier = read.get(name) != expected[name] and read.get(name) in _earlier_digests(given)
            if is_earlier and name in step.reads and run_of(table).uri != run_of(given).uri:
                if not is_own:
                    return False
                raise ContractError(
                    f"{table.folder.uri}: expected a version without the documents that a takedown removed from "
                    f"{run_of(given).uri}, got one that was made before. Remove the folder, and run again."
                )
            actual[name] = expected[name] if is_earlier else read.get(name, "")
        if expected != actual and not is_own:
            return False
        _check_facts(table, expected, actual)
    return True


def run_of(table: TableVersion) -> Store:
    """Return the folder of the run that a version of a table is in."""
    return table.folder.child("../..")


def _earlier_digests(table: TableVersion) -> set[str]:
    """Return the digests of the versions that takedowns have replaced by this version of a table."""
    if descent_of(table.manifest) is None:
        return set()
    certificates = takedown_ancestry(table.folder.child("../.."), table.manifest)
    return {certificate.tables[table.manifest.content.table].before for certificate in certificates}


def _facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stages, settings and models of a table's content by name, such as `language.min_score`."""
    plain: dict[str, Any] = json.loads(canonical_json({name: content[name] for name in CONTENT}))
    settings = {f"{section}.{key}": value for section, own in plain["config"].items() for key, value in own.items()}
    stages = {f"stage {name}": value for name, value in plain["stages"].items()}
    return stages | settings | {f"model {name}": value for name, value in plain["models"].items()}


def _check_facts(table: TableVersion, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Raise ContractError, with the first differences, if a table was made from other stages, settings or inputs."""
    names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    if names:
        shown = [[f"{name} {facts.get(name)!r:.80}" for name in names[:SHOWN]] for facts in (expected, actual)]
        more = f" and {len(names) - SHOWN:,} more differences" if len(names) > SHOWN else ""
        raise ContractError(
            f"{table.folder.uri}: expected a version with {', '.join(shown[0])}, got {', '.join(shown[1])}{more}. "
            "Remove the folder, and run again."
        )


def is_without_removed(folder: Store, tables: Mapping[str, TableVersion], inputs: Mapping[str, TableVersion]) -> bool:
    """Return True if no document that was taken down from the run `folder` is in tables of another run.

    `inputs`: the tables that the step reads in the run; empty for the first step. Raises ContractError if the tables
    of the first step have such a document, because a rebuild would read it again.
    """
    if not has_takedowns(folder):
        return True
    if not inputs:
        check_none_removed(folder, tables["documents"])
        return True
    return all(
        table.manifest.tables_read.get(name) in (None, inputs[name].manifest.digest)
        for table in tables.values()
        for name in inputs
    )


def read_tables(folders: Mapping[str, Store]) -> dict[str, TableVersion]:
    """Return the tables in these folders with their manifests, by name."""
    return {name: TableVersion(folder, read_manifest(folder)) for name, folder in folders.items()}


def build_step(run: Run, step: Step, inputs: Mapping[str, TableVersion], folders: Mapping[str, Store]) -> None:
    """Build and commit the tables of a step in `folders`, by table."""
    if run.spark is None:
        raise ContractError(
            f"{run.folder.uri}: expected complete tables of the step {step.name}, got none: another process "
            "has deleted them. Run this command again."
        )
    started, clock, before = datetime.now(UTC), time.monotonic(), newest_stage(run.spark)
    with made_from(inputs_digest(inputs)):
        built = step.build(context_of(run, step, inputs, folders))
    work = work_since(run.spark, before)
    built[step.name].notes |= {"shuffled_bytes": work.shuffled_bytes, "task_seconds": round(work.task_seconds, 3)}
    timing = {"started": started.isoformat(timespec="seconds"), "wall_seconds": round(time.monotonic() - clock, 3)}
    write_part_times(run.folder, step.name, built[step.name].parts)  # first: a step that is committed is not repeated
    for table in reversed(step.writes):
        commit(run, step, folders[table], (table, built[table], inputs, timing))


def inputs_digest(inputs: Mapping[str, TableVersion]) -> str:
    """Return the digest of the tables that a step reads, which a takedown changes; empty if it reads none."""
    return digest_of({name: table.manifest.digest for name, table in inputs.items()}) if inputs else ""


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


def run_folders(folder: Store, reuse: Sequence[Store] = ()) -> list[Store]:
    """Return the run folder, the folders of other runs whose tables its `run.json` refers to, and the same of `reuse`.

    No folder is listed twice.
    """
    folders = {folder.uri: folder}
    for run in (folder, *reuse):
        paths = [f"{name}/{path}" for name, path in read_run(run).tables.items() if "/" in path]
        folders |= {other.uri: other for other in (run, *(run.child(f"{path}/../..") for path in paths))}
    return list(folders.values())


def version_folders(folder: Store, step: Step, version: str) -> dict[str, Store]:
    """Return the folder of this version of each table that a step writes, by table. The folders need not exist."""
    # A takedown replaces the version that was built from these inputs and settings by another one.
    return {name: folder.child(f"{name}/{resolve_version(folder, name, version)}") for name in step.writes}


def relative_path(folder: Store, table: str, written: Store) -> str:
    """Return the path of a version folder for `run.json`, relative to the table's folder in this run."""
    return posixpath.relpath(written.root, folder.child(table).root)


def models_of(run: Run | Prepared, step: Step) -> Models:
    """Return the models of a step's stages."""
    names = {stage.name for stage in step.stages}
    return {key: models for key, models in run.models.items() if key.rpartition(SEPARATOR)[2] in names}


def step_identity(run: Run | Prepared, step: Step, inputs: Mapping[str, TableVersion]) -> str:
    """Return the digest that identifies a step's output.

    The digest depends on the versions, columns, settings and model digests of the step's stages, and on the step's
    inputs.
    """
    reads: Any = {name: origin_digest(table.manifest) for name, table in inputs.items()}
    if not step.reads:
        reads = [(split.key, split.size, split.identity, split.format) for split in run.splits]
        if len({split.ordinal for split in run.splits}) < len(run.splits):
            reads.append([split.ordinal for split in run.splits])
        if divided := [(split.key, split.num_ranges) for split in run.splits if split.num_ranges > 1]:
            reads.append({"ranges": divided})
    columns = [column.name for stage in step.stages if isinstance(stage, PerDocument) for column in stage.columns]
    more = {"columns": columns} if columns else {}
    return digest_of({"table": step.name, **step_content(run, step), "reads": reads, **more})


def step_content(run: Run | Prepared, step: Step) -> dict[str, Any]:
    """Return the versions, content settings and model digests of a step's stages."""
    models = models_of(run, step)
    return {
        "stages": {stage.name: stage.version for stage in step.stages},
        "config": {
            key: settings
            for stage in step.stages
            for key, settings in (
                [(stage.name, settings_of_sources(run.recipe, step))]
                if isinstance(stage, Source)
                else own_settings(run.recipe, stage.name, step)
            )
        },
        "models": {f"{stage}/{name}": model.sha256 for stage, named in models.items() for name, model in named.items()},
    }


def settings_of_sources(recipe: Recipe, step: Step) -> dict[str, Any]:
    """Return the settings of the source, or with several sources those of each, by its name."""
    found = {name: settings_of(own[SOURCE], step) for name, own in recipe.by_source().items()}
    return found if recipe.has_several_sources else next(iter(found.values()))


def own_settings(recipe: Recipe, stage: str, step: Step) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the settings of a stage that change what a step writes, and those of each source if they differ."""
    shared: dict[str, Any] = {}
    for key, section in sections_of_stage(recipe, stage).items():
        settings = settings_of(section, step)
        if key == stage or settings != shared:
            yield key, settings
        shared = settings if key == stage else shared


def settings_of(section: Section, step: Step) -> dict[str, Any]:
    """Return the settings of one section that change what a step writes."""
    content = section.content() if step.settings != "decision" else {}
    return content | (section.decisions() if step.settings != "content" else {})


def commit(
    run: Run, step: Step, folder: Store, facts: tuple[str, TableResult, Mapping[str, TableVersion], dict[str, Any]]
) -> None:
    """Commit one table: write its manifest, then delete the JSON files that described its parts."""
    table, built, inputs, timing = facts
    identities = {f"{FROM_INPUT}{split.key}": split.identity for split in run.splits} if not step.reads else {}
    check_inputs(run.folder, table, built, identities)
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
        "lineage": {name: read.folder.uri.rsplit("/", 1)[-1] for name, read in inputs.items()} | identities,
        "notes": {**built.notes, "code": code_digest(), "errors": built.failures.most_frequent(), **calls},
    }
    write_manifest(folder, make_manifest(content, how, folder.uri))
    delete_part_results(folder)
    for warning in built.failures.warnings():
        print(f"{step.name}: {warning}", file=sys.stderr)


def check_inputs(folder: Store, table: str, built: TableResult, identities: Mapping[str, str]) -> None:
    """Compare the input files' digests with the digests that this run recorded when it built the table before.

    Raises ContractError if the content of a file changed but its name, size and modification time did not.
    """
    tables = read_run(folder).tables
    if not built.sources or table not in tables or not folder.exists(f"{table}/{tables[table]}/{MANIFEST_NAME}"):
        return
    earlier = read_manifest(folder.child(f"{table}/{tables[table]}"))
    digests = {(entry.name, entry.num_parts): entry.sha256 for entry in earlier.content.inputs}
    for source in built.sources:
        name, now = (source["name"], len(source.get("ranges", [None]))), source["sha256"]
        key = f"{FROM_INPUT}{source['name']}"
        same = earlier.run.lineage.get(key) == identities.get(key)
        if same and digests.get(name, now) != now:
            raise ContractError(
                f"input {source['name']}: expected the recorded SHA-256 {digests[name][:16]}…, got {now[:16]}… "
                "although size and modification time are unchanged. Restore the file, or name another folder with "
                "--out."
            )
