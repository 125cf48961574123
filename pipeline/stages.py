"""Every stage and every step of a run, in order: what runs, the tables it reads and the tables it writes.

A stage processes one document, or declares the settings of a step that needs all documents; a step builds tables. They
are listed only here: a step gets its stages from this list, and the report, what-if and takedown read it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from pipeline.bias.stage import BIAS
from pipeline.classifier.importance import IMPORTANCE
from pipeline.classifier.stage import CLASSIFIER
from pipeline.decontaminate.stage import DECONTAMINATE
from pipeline.dedup.audit.step import audit_inputs, build_audit
from pipeline.dedup.clusters import build_clusters
from pipeline.dedup.config import AUDIT, DEDUP, NEAR, NEAR_MEANINGS, REPEATS
from pipeline.dedup.config import is_enabled as is_audited
from pipeline.dedup.index import representatives_of
from pipeline.dedup.repeats.step import build_repeats
from pipeline.dedup.repeats.step import is_enabled as cuts_repeats
from pipeline.dedup.survivors import build_dedup
from pipeline.engine.failures import failures_of
from pipeline.engine.part import EVERY_STAGE, FAILED
from pipeline.engine.stage import PerDocument, extend_schema
from pipeline.engine.step import Stage, Step
from pipeline.extract.extract import EXTRACT, ExtractConfig
from pipeline.language import LANGUAGE
from pipeline.links.stage import LINKS
from pipeline.minhash.stage import SIGNATURE
from pipeline.perplexity.paragraphs import PARAGRAPHS, check_paragraphs, cuts_paragraphs, stores_paragraphs
from pipeline.perplexity.stage import PERPLEXITY
from pipeline.pii.stage import PII, PiiConfig
from pipeline.plant.stage import PLANT, PlantConfig
from pipeline.quality.config import QualityConfig
from pipeline.quality.recipe_rules import canonical_rules, rule_columns, with_rules
from pipeline.quality.rules import SIGNALS_OF
from pipeline.quality.stage import QUALITY
from pipeline.recipe_stages import FUNCTION, SECTION, StagesConfig, columns_of_stage, make_stage
from pipeline.rights.stage import OF_HOST, RIGHTS
from pipeline.sources.source import COMMON_REASONS, SOURCE
from pipeline.steps.clean import build_clean
from pipeline.steps.documents import KEEP_TEXT, build_documents
from pipeline.steps.paragraphs import build_paragraphs
from pipeline.steps.requirements import bucket_tables, check_buckets, check_indexes, check_packages
from pipeline.steps.scores import build_scores, has_models
from pipeline.steps.verdicts import Reevaluation, build_verdicts
from pipeline.templates.stage import TEMPLATES, cuts_templates
from pipeline.templates.step import build_templates
from pipeline.tokens.dataset import build_tokens
from pipeline.tokens.streams import TOKENS
from pipeline.tokens.train_tokenizer import TOKENIZER, build_tokenizer
from pipeline.toxicity.stage import TOXICITY
from pipeline.urls.stage import URLS
from schemas.config import SEPARATOR, Recipe, Section
from schemas.errors import ConfigError
from schemas.manifest import Manifest, current_tables
from schemas.storage import Store
from schemas.tables import DOCUMENTS, TABLES, VERDICT_COLUMNS
from schemas.takedown import STAGE as TAKEDOWN

MEASURED: tuple[PerDocument, ...] = (
    URLS,  # before a stage that ends others, so that dropped documents have its columns too
    EXTRACT,
    RIGHTS,  # before a stage that ends others, so that dropped documents have marks too
    LANGUAGE,
    BIAS,
    QUALITY,
    DECONTAMINATE,
    TOXICITY,
    LINKS,
    SIGNATURE,
)
"""Stages that measure a document in the worker that reads it, in this order."""
DOCUMENT_COLUMNS: pa.Schema = extend_schema(DOCUMENTS, MEASURED)
"""All columns of the table `documents`: those of `schemas/tables.py`, then those that stages declare themselves."""
SCORED: tuple[PerDocument, ...] = (PERPLEXITY, CLASSIFIER, IMPORTANCE)
"""Stages that score the stored text with models."""
CHECKED: tuple[PerDocument, ...] = (TEMPLATES, *MEASURED, *SCORED, PARAGRAPHS)
"""Stages whose checks decide, in this order, whether a document is kept."""

NEEDED_SETTINGS = (
    (TOXICITY.name, "wordlists", ("toxic_words", "toxic_word_share", "toxic_word_counts")),
    (TOXICITY.name, "classifier", ("toxicity_score", "toxic_sentences", "toxic_share", "hateful_share")),
    (DECONTAMINATE.name, "evaluation_sets", ("contamination", "contaminated_share", "contaminated_pieces")),
    (DECONTAMINATE.name, "canaries", ("canaries",)),
    (QUALITY.name, "cut_repeated_lines", ("repeated_lines_cut",)),
    (LINKS.name, "tables", LINKS.adds),
    (RIGHTS.name, "robots", OF_HOST),
    (URLS.name, "block_lists", ("url_lists",)),
    (URLS.name, "allow_list", ("url_allowed",)),
    (URLS.name, "banned_words", ("url_banned_words",)),
    (URLS.name, "soft_banned_words", ("url_soft_words",)),
    (URLS.name, "banned_subwords", ("url_banned_subwords",)),
)
"""(section, setting, columns): the columns are null in every row if the setting is empty."""

STEPS: tuple[Step, ...] = (
    Step(
        writes=("documents", "text", "comparisons"),
        stages=(SOURCE, *MEASURED, KEEP_TEXT),
        reads=(),
        build=build_documents,
    ),
    Step(
        writes=("templates",),
        stages=(TEMPLATES, *MEASURED),
        reads=("documents", "text"),
        build=build_templates,
        uses=cuts_templates,
    ),
    Step(
        writes=("scores",),
        stages=(*SCORED, PARAGRAPHS),
        reads=("documents", "text", "templates"),
        build=build_scores,
        uses=lambda recipe: has_models(SCORED, recipe) or stores_paragraphs(recipe),
    ),
    Step(
        writes=("verdicts",),
        stages=CHECKED,
        reads=("documents", "templates", "scores"),
        build=build_verdicts,
        settings="decision",
    ),
    Step(
        writes=("clusters", "index"),
        stages=(SIGNATURE, DEDUP),
        reads=("documents", "text", "templates", "scores"),
        build=build_clusters,
        external_inputs=partial(check_indexes, partial(has_models, SCORED)),
    ),
    Step(
        writes=("dedup", "representatives"),
        stages=(DEDUP, BIAS),
        reads=("documents", "templates", "scores", "verdicts", "clusters", "index"),
        build=build_dedup,
        settings="decision",
        external_inputs=representatives_of,
    ),
    Step(
        writes=("audit",),
        stages=(AUDIT,),
        reads=("documents", "text", "templates", "clusters", "dedup"),
        build=build_audit,
        uses=is_audited,
        optional_inputs=audit_inputs,
    ),
    Step(
        writes=("paragraphs",),
        stages=(PARAGRAPHS,),
        reads=("documents", "text", "templates", "scores", "verdicts", "dedup"),
        build=build_paragraphs,
        settings="decision",
        uses=cuts_paragraphs,
    ),
    Step(
        writes=("repeats",),
        stages=(REPEATS, *CHECKED),
        reads=("documents", "text", "templates", "scores", "verdicts", "dedup", "paragraphs"),
        build=partial(build_repeats, make_reevaluator=Reevaluation),
        uses=cuts_repeats,
    ),
    Step(
        writes=("clean", "personal_data"),
        stages=(PII, PLANT),
        reads=("documents", "text", "templates", "dedup", "paragraphs", "repeats"),
        build=build_clean,
        external_inputs=check_packages,
    ),
    Step(
        writes=("tokenizer",),
        stages=(TOKENIZER,),
        reads=("clean",),
        build=build_tokenizer,
    ),
    Step(
        writes=("tokens",),
        stages=(TOKENS,),
        reads=("clean", "tokenizer"),
        build=build_tokens,
        optional_inputs=bucket_tables,
        external_inputs=check_buckets,
    ),
)


def stages_of(step: str) -> tuple[Stage, ...]:
    """Return the stages of the step with this name."""
    return {known.name: known.stages for known in STEPS}[step]


def all_stages() -> list[Stage]:
    """Return every stage of a run once, in order."""
    return list({stage.name: stage for step in STEPS for stage in step.stages}.values())


def sections() -> Mapping[str, type[Section]]:
    """Return the class of each recipe section of the data steps, by name: one for each stage, and `[[stage]]`."""
    return {stage.name: stage.config for stage in all_stages()} | {SECTION: StagesConfig}


# A recipe may extend these lists: by stages of its own, [[stage]], and by rules of the quality stage, [[quality.rule]].


def document_columns(recipe: Recipe) -> pa.Schema:
    """Return the columns of the table `documents` of this recipe's runs: DOCUMENT_COLUMNS and those of its stages."""
    return extend_schema(DOCUMENT_COLUMNS, _recipe_stages(recipe))


def checked_stages(recipe: Recipe) -> tuple[PerDocument, ...]:
    """Return the stages whose checks decide, in this order, whether a document is kept with this recipe.

    Raises ConfigError if a stage or rule of the recipe is wrong, or if its limits of paragraphs cannot be applied.
    """
    for own in recipe.by_source().values():
        check_paragraphs(own)
    stages = (TEMPLATES, *_measured_stages(recipe), *SCORED, PARAGRAPHS)
    return tuple(stage for stage in stages if _is_in_use(stage, "verdicts", recipe))


def steps_for(recipe: Recipe) -> tuple[Step, ...]:
    """Return the steps of this recipe's runs: STEPS with the stages and rules of the recipe.

    A step has the stages TEMPLATES, PARAGRAPHS and PLANT only if the recipe uses them there, so that other recipes keep
    their fingerprints.
    Raises ConfigError if a stage or rule of the recipe is wrong, or if its limits of paragraphs cannot be applied.
    """
    for own in recipe.by_source().values():
        check_paragraphs(own)
    measured = _measured_stages(recipe)
    stages = {step.name: [stage for stage in step.stages if _is_in_use(stage, step.name, recipe)] for step in STEPS}
    steps = [replace(step, stages=_extended(stages[step.name], measured)) for step in STEPS]
    first = steps[0]
    writes = first.writes if compares(recipe) else _without(first, "comparisons").writes
    # Limits choose between the texts of a union, and a comparison counts which texts fail them.
    settings: Literal["content", "all"] = "all" if uses_union(recipe) or compares(recipe) else "content"
    others = [step if audits_personal_data(recipe) else _without(step, "personal_data") for step in steps[1:]]
    return (replace(first, writes=writes, settings=settings), *others)


def _without(step: Step, table: str) -> Step:
    return replace(step, writes=tuple(name for name in step.writes if name != table))


def audits_personal_data(recipe: Recipe) -> bool:
    """Return True if the step `clean` also writes the table `personal_data`."""
    return any(own.section(PII.name, PiiConfig).audit for own in recipe.by_source().values())


def stages_by_source(step: Step, recipe: Recipe) -> dict[str, tuple[Stage, ...]]:
    """Return the stages of a step for each source; empty if the recipe has one source."""
    if not recipe.has_several_sources:
        return {}
    own = {name: {each.name: each for each in steps_for(of)} for name, of in recipe.by_source().items()}
    return {name: steps[step.name].stages for name, steps in own.items()}


def compares(recipe: Recipe) -> bool:
    """Return True if two extractors are compared, so that the first step also writes the table `comparisons`."""
    return any(config.compare is not None for config in _extract_configs(recipe))


def uses_union(recipe: Recipe) -> bool:
    """Return True if limits choose between the texts of several extractors, so that they change `documents`."""
    return any(config.union for config in _extract_configs(recipe))


def _extract_configs(recipe: Recipe) -> list[ExtractConfig]:
    return [own.section(EXTRACT.name, ExtractConfig) for own in recipe.by_source().values()]


def _is_in_use(stage: Stage, step: str, recipe: Recipe) -> bool:
    """Return True if a step has the stage with this recipe."""
    if stage is PARAGRAPHS:
        uses = stores_paragraphs if step == "scores" else cuts_paragraphs
        return any(uses(own) for own in recipe.by_source().values())
    if stage is PLANT:
        return recipe.section(PLANT.name, PlantConfig).share > 0
    return stage is not TEMPLATES or cuts_templates(recipe)


def canonical_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with the conditions of its rules in canonical form, so that spelling changes no fingerprint.

    Raises ConfigError if a rule of the recipe is wrong.
    """
    own = {
        name: {QUALITY.name: _canonical_quality(of)}
        for name, of in recipe.by_source().items()
        if QUALITY.name in of.own
    }
    rules = _canonical_quality(recipe)
    recipe = recipe.with_own(own) if own else recipe
    return recipe.with_section(QUALITY.name, rules) if rules.rule else recipe


def _canonical_quality(recipe: Recipe) -> QualityConfig:
    return canonical_rules(_quality(recipe), rule_columns(document_columns(recipe)), dict(_unmeasured(recipe)))


# The stages and rules of a run's recipe, as the manifests of its tables declare them.


def declared_reasons(tables: Mapping[str, Manifest]) -> dict[str, dict[str, str]]:
    """Return the meaning of every reason by stage, in the order of a run; stages and rules of the recipe included."""
    reasons = {stage.name: {**stage.reasons, **_verdicts(stage)} for stage in all_stages()}
    own = {name: settings["reasons"] for name, settings in _declared_stages(tables).items()}
    last = MEASURED[-1].name
    ordered = [pair for name in reasons for pair in ((name, reasons[name]), *(own.items() if name == last else ()))]
    found = dict(ordered)
    for table in tables.values():
        for key, settings in table.content.config.items():
            for rule in settings.get("rule", ()) if key.rpartition(SEPARATOR)[2] == QUALITY.name else ():
                found[QUALITY.name][rule["name"]] = rule["reason"]
    if "documents" in tables:  # the reasons of formats that the run does not read are left out
        counted = tables["documents"].content.counts.dropped
        known = {name for name in SOURCE.reasons if name in COMMON_REASONS or f"{SOURCE.name}/{name}" in counted}
        found[SOURCE.name] = {name: text for name, text in SOURCE.reasons.items() if name in known}
    verify = tables["clusters"].content.config.get(DEDUP.name, {}).get("verify") if "clusters" in tables else None
    if (
        DEDUP.name in tables
        and tables[DEDUP.name].content.config.get(DEDUP.name, {}).get("compare_survivor") == "require"
    ):
        verify = "require"
    if verify in NEAR_MEANINGS:
        found[DEDUP.name][NEAR] = NEAR_MEANINGS[verify]
    return found


def reasons_of_run(run: Store) -> dict[str, str]:
    """Return the meaning of every reason of a run by `stage/reason`, with the errors of the stages of its recipe."""
    tables = {name: table.manifest for name, table in current_tables(run).items()}
    failures = failures_of(manifest.run.notes for manifest in tables.values())
    failed = {f"{stage}/{FAILED}": failures.describe(stage) for stage in failures.stages()}
    known = declared_reasons(tables)
    meanings = {f"{stage}/{reason}": text for stage, reasons in known.items() for reason, text in reasons.items()}
    return meanings | own_reasons(tables) | failed


def own_reasons(tables: Mapping[str, Manifest]) -> dict[str, str]:
    """Return the meanings of the reasons that a recipe declares, by `stage/reason`, errors of its stages included.

    `tables` are manifests of the run; those of `documents` and `verdicts` have declarations.
    """
    known, built_in = declared_reasons(tables), declared_reasons({})
    own = {
        f"{stage}/{reason}": meaning
        for stage, reasons in known.items()
        for reason, meaning in reasons.items()
        if reason not in built_in.get(stage, {})
    }
    failed = {f"{stage}/{reason}": text for stage in _declared_stages(tables) for reason, text in EVERY_STAGE.items()}
    return own | failed


def declared_columns(tables: Mapping[str, Manifest]) -> pa.Schema:
    """Return the columns of the table `documents` of a run, those of the recipe's stages included."""
    declared = _declared_stages(tables).values()
    return pa.schema(
        [*DOCUMENT_COLUMNS, *(column for each in declared for column in columns_of_stage(each["columns"]))]
    )


def _declared_stages(tables: Mapping[str, Manifest]) -> dict[str, dict[str, Any]]:
    known = {stage.name for stage in all_stages()}
    config = tables["documents"].content.config if "documents" in tables else {}
    return {name: settings for name, settings in config.items() if name not in known and FUNCTION in settings}


def _quality(recipe: Recipe) -> QualityConfig:
    return recipe.section(QUALITY.name, QualityConfig)


def _extended(stages: Sequence[Stage], measured: Sequence[PerDocument]) -> tuple[Stage, ...]:
    """Return the stages of a step, with `measured` in place of MEASURED."""
    names, known = [stage.name for stage in stages], [stage.name for stage in MEASURED]
    first = names.index(known[0]) if known[0] in names else len(names)
    if names[first : first + len(known)] != known:
        return tuple(stages)
    return (*stages[:first], *measured, *stages[first + len(known) :])


def _measured_stages(recipe: Recipe) -> tuple[PerDocument, ...]:
    own = _recipe_stages(recipe)
    columns = rule_columns(document_columns(recipe))
    for of_source in recipe.by_source().values():
        canonical_rules(_quality(of_source), columns, dict(_unmeasured(of_source)))  # reports wrong rules
    rules = [rule for of_source in recipe.by_source().values() for rule in _quality(of_source).rule]
    config = _quality(recipe).model_copy(update={"rule": tuple({rule.name: rule for rule in rules}.values())})
    measured = (*(with_rules(config, columns) if stage is QUALITY else stage for stage in MEASURED), *own)
    names = {rule.name for rule in config.rule}
    taken = {reason: stage.name for stage in (*all_stages(), *own) for reason in (*stage.reasons, *_verdicts(stage))}
    problems = [
        f"quality.rule: expected a new name, got {name!r}, which is a reason of [{taken[name]}]. Rename the rule."
        for name in sorted(names & taken.keys())
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return measured


def _verdicts(stage: Stage) -> Mapping[str, str]:
    return stage.verdicts if isinstance(stage, PerDocument) else {}


def _recipe_stages(recipe: Recipe) -> tuple[PerDocument, ...]:
    """Return the stages of the recipe. Raises ConfigError if one has the name of another stage or column."""
    schemas = [table.schema for table in TABLES.values() if table.describes_documents and table.schema is not None]
    taken = {name for schema in schemas for name in schema.names}
    taken |= {*DOCUMENT_COLUMNS.names, *(name for stage in all_stages() for name in getattr(stage, "adds", ()))}
    problems: list[str] = []
    stages: list[PerDocument] = []
    rows = pa.schema([column for column in DOCUMENT_COLUMNS if column.name not in VERDICT_COLUMNS])
    unmeasured = unmeasured_columns(recipe).keys()
    for config in recipe.section(SECTION, StagesConfig).stages:
        where = f"[[{SECTION}]] {config.name}"
        if config.name == TAKEDOWN:
            problems.append(f"{where}: expected another name, got that of takedowns. Rename the stage.")
        problems += [
            f"{where}: expected new names of columns, got {name!r}, which a table has already. Rename the column."
            for name in sorted(config.columns.keys() & taken)
        ]
        stages.append(make_stage(config, rows, unmeasured))
        taken |= config.columns.keys()
        rows = extend_schema(rows, stages[-1:])
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(stages)


def unmeasured_columns(recipe: Recipe) -> dict[str, str]:
    """Return the columns of `documents` and `scores` that are null in every row with this recipe, with the fix."""
    families = {name: signals for name, signals in SIGNALS_OF.items() if name not in _quality(recipe).families}
    fixes = {signal.name: f"Add {name!r} to quality.families" for name, own in families.items() for signal in own}
    return dict(_unmeasured(recipe)) | fixes


def _unmeasured(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (column, fix) of each column, other than quality signals, that is null in every row with this recipe."""
    for stage in SCORED:
        if not stage.models(recipe[stage.name]):
            yield from ((name, f"Set the models of [{stage.name}]") for name in stage.adds)
    for section, setting, columns in NEEDED_SETTINGS:
        if not getattr(recipe[section], setting):
            yield from ((name, f"Set {section}.{setting}") for name in columns)
