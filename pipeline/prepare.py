"""A run before it starts: its settings, inputs and models are checked, and the version of each step's tables is known.

The identity of a step follows from its stages, settings, models and inputs. A version of its tables with this identity
is complete, or is built; see `run.py`.
"""

import json
import posixpath
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.dedup.config import DEDUP, DedupConfig
from pipeline.engine.code_digest import code_digest, libraries_digest
from pipeline.engine.finished_parts import FOLDER, FinishedParts
from pipeline.engine.model_files import ModelFile, path_here, state_of
from pipeline.engine.stage import EVERY, PerDocument, Relation, Source, Split
from pipeline.engine.step import MADE_WITH, Model, Stage, Step, made_with_of, models_of_source
from pipeline.language import LANGUAGE, MODEL, known_languages
from pipeline.models import ModelsConfig, ensure_model
from pipeline.sources.splits import splits_of
from pipeline.stages import STEPS, canonical_recipe, steps_for
from pipeline.takedown.select import check_none_removed
from schemas.config import SEPARATOR, SOURCE, Recipe, Section, own_key, suggest_name
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of, file_sha256
from schemas.key_file import commitment, read_key
from schemas.manifest import FROM_INPUT, MANIFEST_NAME, TableVersion, read_manifest, read_run
from schemas.storage import Store
from schemas.takedown import has_takedowns, origin_digest, replaced_digests, resolve_version

Models = dict[str, dict[str, Model]]
SHOWN = 3
"""Maximum number of differences that a message names."""
SETTLED_NS = 2_000_000_000
"""A model file that changed less than this time before it was read is read again: it may have been replaced meanwhile
[ns]. File clocks are coarse."""
COMPILED = "compiled.json"
"""File beside compiled files with the path and SHA-256 of each."""


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
    models = find_models(recipe, steps)
    check_names(recipe, models)
    return Prepared(recipe, steps, splits, models)


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


BY_LANGUAGE = (("quality", "by_language"), ("toxicity", "wordlists"), ("perplexity", "models"), ("pii", "ner_models"))
"""Sections and their settings whose keys are codes of languages, or EVERY."""


def check_names(recipe: Recipe, models: Models) -> None:
    """Raise ConfigError, with the nearest names, if settings name sources or languages that no document has."""
    if problems := [*dict.fromkeys([*_unknown_sources(recipe), *_unknown_languages(recipe, models)])]:
        raise ConfigError("\n  ".join([f"{len(problems)} wrong name(s); nothing was started", *problems]))


def _unknown_sources(recipe: Recipe) -> Iterator[str]:
    dedup = recipe.section(DEDUP.name, DedupConfig)
    if dedup.indexes or dedup.write_index:
        return  # an earlier or a later snapshot may have other sources, and must have the same ranks
    for name in dedup.source_ranks:
        if name not in recipe.sources:
            near = suggest_name(name, recipe.sources)
            yield f"dedup.source_ranks: expected sources of the recipe, got {name!r}{near}. Correct or remove it."


def _unknown_languages(recipe: Recipe, models: Models) -> Iterator[str]:
    for source, own in recipe.by_source().items():
        given = {
            f"{section}.{key}": {*getattr(own[section], key)} - {EVERY}
            for section, key in BY_LANGUAGE
            if key in own[section].model_fields_set
        }
        if not any(given.values()):
            continue
        place = own_key(source, LANGUAGE.name) if LANGUAGE.name in own.own else LANGUAGE.name
        known = known_languages(models[place][MODEL].path)
        for setting, codes in given.items():
            for code in sorted(codes - known):
                yield (
                    f"{setting}: expected codes of languages that the model of [language] knows, got {code!r}"
                    f"{suggest_name(code, known)}. Correct the code."
                )


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
        started_ns = time.time_ns()
        local = ensure_model(place, config)
        state = state_of(str(local.path))
        is_settled = max(state[1:3], default=started_ns) < started_ns - SETTLED_NS
        path_here(ModelFile(str(local.path), state if is_settled else (), local.sha256), None)
        is_secret = isinstance(stage, PerDocument) and name in stage.secrets
        digest = commitment(read_key(str(local.path)), f"{stage.name}.{name}") if is_secret else local.sha256
        models[name] = Model(str(local.path), digest, is_shipped(stage, name), state, is_secret)
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
    """Return the files that a stage compiles from its models, by name.

    They are kept in the cache folder. A later run with the same code and libraries takes those that are not damaged.
    """
    if stage.compile is None:
        return {}
    digests = {name: model.sha256 for name, model in models.items()}
    made_with = [stage.name, stage.version, config.content(), digests, code_digest(), libraries_digest()]
    folder = Store(str(Path(store.cache).expanduser().absolute() / "compiled" / digest_of(made_with)[:16]))
    kept = kept_files(folder)
    place = next(iter(kept)).partition("/")[0] if kept else uuid.uuid4().hex[:8]  # nothing is replaced while it is used
    target = folder.path(place)
    Path(target).mkdir(parents=True, exist_ok=True)
    made = stage.compile(config, {name: model.path for name, model in models.items()}, target)
    if not made:
        Path(target).rmdir()
    names = {name: f"{place}/{Path(path).name}" for name, path in made.items()}
    found = {name: kept.get(names[name]) or file_sha256(Path(path)) for name, path in made.items()}
    if made and not kept:
        folder.write_atomic(COMPILED, canonical_json({names[name]: digest for name, digest in found.items()}))
    return {name: Model(path, found[name], state=state_of(path)) for name, path in made.items()}


def kept_files(folder: Store) -> dict[str, str]:
    """Return path -> SHA-256 of the compiled files that an earlier run has kept in a folder.

    Empty if there are none, or if one of them is damaged.
    """
    try:
        digests = folder.read_json(COMPILED)
        is_kept = isinstance(digests, dict) and all(folder.sha256(path) == digests[path] for path in digests)
    except (ContractError, OSError):
        return {}
    return digests if is_kept else {}


def find_version(
    run: Prepared, step: Step, inputs: Mapping[str, TableVersion], folder: Store
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


def check_content(run: Prepared, step: Step, tables: Mapping[str, TableVersion]) -> None:
    """Raise ContractError if tables were written by other stages, settings or models than those of a step.

    The folder of a version is named after them, but anybody can rename a folder.
    """
    expected = _facts(step_content(run, step))
    for table in tables.values():
        _check_facts(table, expected, _facts(made_with_of(table.manifest)))


def check_inputs_read(
    run: Prepared,
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
            replaced = replaced_digests(run_of(given), given.manifest) if read.get(name) != expected[name] else set()
            is_earlier = read.get(name) in replaced
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


def _facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stages, settings and models of a table's content by name, such as `language.min_score`."""
    plain: dict[str, Any] = json.loads(canonical_json({name: content[name] for name in MADE_WITH}))
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


def inputs_digest(inputs: Mapping[str, TableVersion]) -> str:
    """Return the digest of the tables that a step reads, which a takedown changes; empty if it reads none."""
    return digest_of({name: table.manifest.digest for name, table in inputs.items()}) if inputs else ""


def finished_parts(run: Prepared, step: Step, folder: Store) -> FinishedParts:
    """Return the parts that all versions of a step's tables in the run `folder` share."""

    def made_with(recipe: Recipe, models: Models) -> str:
        content = step_content(replace(run, recipe=recipe, models=models), step)
        return digest_of({"table": step.name, **content, "columns": columns_of(step), "libraries": libraries_digest()})

    own = {name: made_with(each, models_of_source(run.models, each)) for name, each in run.recipe.by_source().items()}
    return FinishedParts(folder.child(f"{FOLDER}/{step.name}"), made_with(run.recipe, run.models), own)


def columns_of(step: Step) -> list[str]:
    """Return the names of the columns that the stages of a step add."""
    return [column.name for stage in step.stages if isinstance(stage, PerDocument) for column in stage.columns]


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


def models_of(run: Prepared, step: Step) -> Models:
    """Return the models of a step's stages."""
    names = {stage.name for stage in step.stages}
    return {key: models for key, models in run.models.items() if key.rpartition(SEPARATOR)[2] in names}


def step_identity(run: Prepared, step: Step, inputs: Mapping[str, TableVersion]) -> str:
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
    more = {"columns": columns} if (columns := columns_of(step)) else {}
    return digest_of({"table": step.name, **step_content(run, step), "reads": reads, **more})


def step_content(run: Prepared, step: Step) -> dict[str, Any]:
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
                else own_settings(run, stage, step)
            )
        },
        "models": {f"{stage}/{name}": model.sha256 for stage, named in models.items() for name, model in named.items()},
    }


def settings_of_sources(recipe: Recipe, step: Step) -> dict[str, Any]:
    """Return the settings of the source, or with several sources those of each, by its name."""
    found = {name: settings_of(own[SOURCE], step) for name, own in recipe.by_source().items()}
    return found if recipe.has_several_sources else next(iter(found.values()))


def own_settings(run: Prepared, stage: Stage, step: Step) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the settings of a stage that change what a step writes, and those of each source if they differ.

    Settings of a source also differ if they name no list or model where those of the run do, or if equal ones have
    quantiles of the documents of this source alone.
    """
    shared: dict[str, Any] = {}
    quantiles = stage.quantiles if isinstance(stage, PerDocument) and step.settings == "decision" else None
    for key, section in sections_of_stage(run.recipe, stage.name).items():
        settings = settings_of(section, step)
        has_none = run.recipe.has_several_sources and stage.name in run.models and key not in run.models
        # if both have models, the names of these differ
        has_own = quantiles is not None and key not in run.models and bool(quantiles(section))
        if key == stage.name or settings != shared or has_none or has_own:
            yield key, settings
        shared = settings if key == stage.name else shared


def settings_of(section: Section, step: Step) -> dict[str, Any]:
    """Return the settings of one section that change what a step writes."""
    content = section.content() if step.settings != "decision" else {}
    return content | (section.decisions() if step.settings != "content" else {})
