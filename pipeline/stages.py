"""The table of contents: every step of a run in order, the tables it writes, and the stages that decide them."""

from collections.abc import Mapping, Sequence
from functools import partial

from pipeline.classifier.importance import ImportanceConfig
from pipeline.classifier.stage import ClassifierConfig
from pipeline.dedup.audit.config import AUDIT
from pipeline.dedup.audit.config import wanted as audits
from pipeline.dedup.audit.step import build_audit
from pipeline.dedup.clusters import build_clusters
from pipeline.dedup.config import DEDUP, DedupConfig
from pipeline.dedup.index import indexes_of, representatives_of
from pipeline.dedup.keep_order import order_columns
from pipeline.dedup.repeats.config import REPEATS
from pipeline.dedup.repeats.step import build_repeats
from pipeline.dedup.repeats.step import wanted as cuts_repeats
from pipeline.dedup.survivors import build_dedup
from pipeline.engine.stage import Split
from pipeline.engine.step import Stage, TableJob
from pipeline.minhash.stage import SIGNATURE
from pipeline.perplexity.stage import PerplexityConfig
from pipeline.quality.config import QualityConfig
from pipeline.steps import clean, documents, scores
from pipeline.steps.clean import build_clean
from pipeline.steps.documents import build_documents
from pipeline.steps.verdicts import JUDGED, Rejudge, build_verdicts
from pipeline.tokens.dataset import build_tokens
from pipeline.tokens.streams import BY_PERPLEXITY, CLASSIFIER, FAMILY_OF, IMPORTANCE, TOKENS, TokensConfig, check_names
from pipeline.tokens.train_tokenizer import TOKENIZER, build_tokenizer
from schemas.config import Recipe, Section, nearest
from schemas.errors import ConfigError
from schemas.manifest import Table


def checked_indexes(recipe: Recipe, splits: Sequence[Split]) -> dict[str, Table]:
    """The earlier indexes of a run. Raises ConfigError if keep rules ask for scores that no step makes."""
    keep = recipe.section(DEDUP.name, DedupConfig)
    if "scores" in order_columns(keep) and not scores.wanted(recipe):
        raise ConfigError(f"dedup.keep: expected scores of models, got {list(keep.keep)} and no model that is asked")
    return indexes_of(recipe, splits)


def checked_streams(recipe: Recipe, splits: Sequence[Split]) -> dict[str, Table]:
    """No table. Raises ConfigError if sources are to be cut by what is not measured, or the mix names other ones."""
    config = recipe.section(TOKENS.name, TokensConfig)
    by, families = config.buckets_by, recipe.section("quality", QualityConfig).families
    if by == BY_PERPLEXITY and recipe.section("perplexity", PerplexityConfig).scorer is None:
        raise ConfigError(
            "tokens.buckets_by: expected buckets of perplexity, got no perplexity.scorer, so nothing measures it. "
            "Name a scorer and its models, or a signal."
        )
    if config.measure and config.measure.name and by not in (scored := scores_of(recipe)):
        found = f"{by!r}{nearest(by, scored)}" if scored else f"{by!r} and no model that scores texts"
        section, _, name = by.partition(".")
        raise ConfigError(
            f"tokens.buckets_by: expected the score of a model of the recipe, got {found}. Give {section}.models a "
            f"model {name!r}, or cut by something else."
        )
    if by in FAMILY_OF and FAMILY_OF[by] not in families:
        raise ConfigError(
            f"tokens.buckets_by: expected a signal that is measured, got {by!r} of the family {FAMILY_OF[by]!r}, but "
            f"quality.families has only {', '.join(families)}. Add it, or name another signal."
        )
    check_names(config, sorted({split.source for split in splits}))
    return {}


def scores_of(recipe: Recipe) -> list[str]:
    """The scores that the models of a recipe give each text, as `section.name`."""
    models = {
        CLASSIFIER: recipe.section(CLASSIFIER, ClassifierConfig).models,
        IMPORTANCE: recipe.section(IMPORTANCE, ImportanceConfig).models,
    }
    return [f"{section}.{name}" for section, names in models.items() for name in names]


def cut_by(recipe: Recipe) -> tuple[str, ...]:
    """The tables that the buckets of a recipe's sources are read from."""
    config = recipe.section(TOKENS.name, TokensConfig)
    if config.measure and config.measure.name:
        return ("documents", config.measure.table)
    return ("documents", "verdicts", "repeats") if config.buckets_by else ()


STEPS: tuple[TableJob, ...] = (
    TableJob(("documents", "text"), documents.STAGES, (), build_documents),
    TableJob(("scores",), scores.STAGES, ("documents", "text"), scores.build_scores, wanted=scores.wanted),
    TableJob(("verdicts",), JUDGED, ("documents", "scores"), build_verdicts, settings="decision"),
    TableJob(
        ("clusters", "index"),
        (SIGNATURE, DEDUP),
        ("documents", "text", "scores"),
        build_clusters,
        outside=checked_indexes,
    ),
    TableJob(
        ("dedup", "representatives"),
        (DEDUP,),
        ("documents", "scores", "verdicts", "clusters", "index"),
        build_dedup,
        settings="decision",
        outside=representatives_of,
    ),
    TableJob(("audit",), (AUDIT,), ("documents", "text", "clusters"), build_audit, wanted=audits),
    TableJob(
        ("repeats",),
        (REPEATS, *JUDGED),
        ("documents", "text", "scores", "verdicts", "dedup"),
        partial(build_repeats, make_judge=Rejudge),
        wanted=cuts_repeats,
    ),
    TableJob(("clean",), clean.STAGES, ("documents", "text", "dedup", "repeats"), build_clean),
    TableJob(("tokenizer",), (TOKENIZER,), ("clean",), build_tokenizer),
    TableJob(
        ("tokens",),
        (TOKENS,),
        ("clean", "tokenizer"),
        build_tokens,
        asks=cut_by,
        outside=checked_streams,
    ),
)


def all_stages() -> list[Stage]:
    """Every stage of a run, once, in order."""
    return list({stage.name: stage for step in STEPS for stage in step.stages}.values())


def sections() -> Mapping[str, type[Section]]:
    """The recipe sections of the data half: one for each stage."""
    return {stage.name: stage.config for stage in all_stages()}
