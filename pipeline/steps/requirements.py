"""Requirements of a step that its own section cannot check: other sections, tables of other runs, and packages."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from pipeline.classifier.importance import ImportanceConfig
from pipeline.classifier.stage import ClassifierConfig
from pipeline.dedup.config import DEDUP, DedupConfig
from pipeline.dedup.index import indexes_of
from pipeline.dedup.keep_order import order_columns
from pipeline.engine.stage import Split
from pipeline.perplexity.stage import PerplexityConfig
from pipeline.pii.stage import PII, PiiConfig
from pipeline.quality.config import QualityConfig
from pipeline.tokens.streams import (
    BY_PERPLEXITY,
    CLASSIFIER,
    FAMILY_OF,
    IMPORTANCE,
    TOKENS,
    TokensConfig,
    check_mix_sources,
)
from schemas.config import Recipe, suggest_name
from schemas.errors import ConfigError
from schemas.manifest import TableVersion


def check_indexes(
    has_scores: Callable[[Recipe], bool], recipe: Recipe, splits: Sequence[Split]
) -> dict[str, TableVersion]:
    """Return the snapshot indexes of earlier runs. Raises ConfigError if keep rules use scores that no step makes."""
    keep = recipe.section(DEDUP.name, DedupConfig)
    if "scores" in order_columns(keep) and not has_scores(recipe):
        raise ConfigError(
            f"dedup.keep: expected scores of models, got {list(keep.keep)} and a recipe without a model. "
            "Set classifier.models, importance.models or perplexity.scorer."
        )
    return indexes_of(recipe, splits)


def check_buckets(recipe: Recipe, splits: Sequence[Split]) -> dict[str, TableVersion]:
    """Return no table. Raises ConfigError if buckets use a signal that is not measured, or the mix unknown sources."""
    config = recipe.section(TOKENS.name, TokensConfig)
    by, families = config.buckets_by, recipe.section("quality", QualityConfig).families
    if by == BY_PERPLEXITY and recipe.section("perplexity", PerplexityConfig).scorer is None:
        raise ConfigError(
            "tokens.buckets_by: expected buckets of perplexity, got no perplexity.scorer, so nothing measures it. "
            "Set perplexity.scorer and its models, or name a signal."
        )
    if config.measure and config.measure.name and by not in (scored := scores_of(recipe)):
        got = f"{by!r}{suggest_name(by, scored)}" if scored else f"{by!r} and no model that scores texts"
        section, _, name = by.partition(".")
        raise ConfigError(
            f"tokens.buckets_by: expected the score of a model of the recipe, got {got}. Give {section}.models a "
            f"model {name!r}, or name another column."
        )
    if by in FAMILY_OF and FAMILY_OF[by] not in families:
        raise ConfigError(
            f"tokens.buckets_by: expected a signal that is measured, got {by!r} of the family {FAMILY_OF[by]!r}, but "
            f"quality.families has only {', '.join(families)}. Add it to quality.families, or name another signal."
        )
    check_mix_sources(config, sorted({split.source for split in splits}))
    return {}


def check_packages(recipe: Recipe, splits: Sequence[Split]) -> dict[str, TableVersion]:
    """Return no table. Raises ConfigError if a package that finds the chosen personal data is not installed."""
    config = recipe.section(PII.name, PiiConfig)
    needed = {
        "phonenumbers": bool(config.types),  # presidio imports it too
        "presidio-analyzer": bool({*config.types} - {"phone"}),
        "spacy": config.ner_model is not None,
    }
    for package, is_needed in needed.items():
        if is_needed and find_spec(package.replace("-", "_")) is None:
            raise ConfigError(
                f"pii: expected the package {package} to find personal data, got none. Install penstock[pii]."
            )
    return {}


def scores_of(recipe: Recipe) -> list[str]:
    """Return the names of the scores that the models of a recipe give each text, as `section.name`."""
    models = {
        CLASSIFIER: recipe.section(CLASSIFIER, ClassifierConfig).models,
        IMPORTANCE: recipe.section(IMPORTANCE, ImportanceConfig).models,
    }
    return [f"{section}.{name}" for section, names in models.items() for name in names]


def bucket_tables(recipe: Recipe) -> tuple[str, ...]:
    """Return the tables from which the quality buckets of a recipe's token streams are read."""
    config = recipe.section(TOKENS.name, TokensConfig)
    if config.measure and config.measure.name:
        return ("documents", config.measure.table)
    return ("documents", "verdicts", "repeats") if config.buckets_by else ()
