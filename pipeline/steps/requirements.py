"""Checks of what a step needs besides its own section, made before anything runs: settings, other runs and packages."""

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
    is_held_out_by_text,
)
from schemas.config import Recipe, suggest_name
from schemas.errors import ConfigError
from schemas.key_file import read_key
from schemas.manifest import TableVersion


def check_indexes(
    has_scores: Callable[[Recipe], bool], recipe: Recipe, splits: Sequence[Split]
) -> dict[str, TableVersion]:
    """Return the snapshot indexes of earlier runs that deduplication reads.

    Raises ConfigError if dedup.keep requires scores but the recipe configures no model.
    """
    keep = recipe.section(DEDUP.name, DedupConfig)
    if "scores" in order_columns(keep) and not has_scores(recipe):
        raise ConfigError(
            f"dedup.keep: expected a model that computes the scores in {list(keep.keep)}, got no model in the recipe. "
            "Set classifier.models, importance.models or perplexity.scorer."
        )
    return indexes_of(recipe, splits)


def check_buckets(recipe: Recipe, splits: Sequence[Split]) -> dict[str, TableVersion]:
    """Check the settings of quality buckets. The result is empty: the buckets need no table of another run.

    Raises ConfigError if the run does not measure the signal or score in tokens.buckets_by, or if tokens.mix names
    unknown sources.
    """
    config = recipe.section(TOKENS.name, TokensConfig)
    by, families = config.buckets_by, recipe.section("quality", QualityConfig).families
    if by == BY_PERPLEXITY and recipe.section("perplexity", PerplexityConfig).scorer is None:
        raise ConfigError(
            "tokens.buckets_by: expected perplexity.scorer to be set for buckets by perplexity, got no scorer. "
            "Set perplexity.scorer."
        )
    if config.measure and config.measure.name and by not in (scored := scores_of(recipe)):
        got = f"{by!r}{suggest_name(by, scored)}" if scored else f"{by!r} and no model that scores texts"
        section, _, name = by.partition(".")
        raise ConfigError(
            f"tokens.buckets_by: expected the score of a model in the recipe, got {got}. Add a model {name!r} to "
            f"{section}.models."
        )
    if by in FAMILY_OF and FAMILY_OF[by] not in families:
        raise ConfigError(
            f"tokens.buckets_by: expected a signal that is measured, got {by!r} of the family {FAMILY_OF[by]!r}, but "
            f"quality.families has only {', '.join(families)}. Add {FAMILY_OF[by]} to quality.families, or set "
            "tokens.buckets_by to another signal."
        )
    check_mix_sources(config, sorted({split.source for split in splits}))
    return {}


def check_packages(recipe: Recipe, splits: Sequence[Split]) -> dict[str, TableVersion]:
    """Check that the packages for `pii` are installed and its key is usable. The result is empty: it needs no table.

    Raises ConfigError if a package is missing, or if a key is too short.
    """
    configs = [own.section(PII.name, PiiConfig) for own in recipe.by_source().values()]
    types = {kind for config in configs for kind in config.types}
    needed = {
        "phonenumbers": bool(types),  # presidio imports it too
        "presidio-analyzer": bool(types - {"phone"}) or any(config.ner_models for config in configs),
        "spacy": any(bool(config.ner_models) for config in configs),
    }
    for package, is_needed in needed.items():
        if is_needed and find_spec(package.replace("-", "_")) is None:
            raise ConfigError(
                f"pii: expected the package {package} to be installed, got none. Run `pip install penstock[pii]`."
            )
    for config in configs:
        if config.key_file is not None:
            read_key(config.key_file)
    return {}


def scores_of(recipe: Recipe) -> list[str]:
    """Return the names of the scores that the models of a recipe compute, as `section.name`."""
    models = {
        CLASSIFIER: recipe.section(CLASSIFIER, ClassifierConfig).models,
        IMPORTANCE: recipe.section(IMPORTANCE, ImportanceConfig).models,
    }
    return [f"{section}.{name}" for section, names in models.items() for name in names]


def bucket_tables(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the tables from which documents are assigned to quality buckets, and are held out."""
    config = recipe.section(TOKENS.name, TokensConfig)
    names: tuple[str, ...] = ()
    if config.measure and config.measure.name:
        names = ("documents", config.measure.table)
    elif config.buckets_by:
        names = ("documents", "templates", "verdicts", "repeats")
    if is_held_out_by_text(recipe):
        names = tuple(dict.fromkeys((*names, "documents", "templates")))
    return names
