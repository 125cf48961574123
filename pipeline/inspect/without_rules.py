"""The settings to change in a recipe so that a named rule no longer drops documents (`penstock ablate --without`).

A rule is named `section.reason`, such as `toxicity.toxic_words`. In the section `quality`, the name of a rule set can
replace the reason. The name of a section alone means all of its rules. A rule that the recipe does not have is an
error, since leaving it out would change nothing.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.classifier.importance import ImportanceConfig
from pipeline.classifier.stage import ClassifierConfig
from pipeline.decontaminate.config import DecontaminateConfig
from pipeline.dedup.config import EXACT, NEAR, NEAR_ONLY, SAME_URL, DedupConfig, RepeatsConfig
from pipeline.language import LanguageConfig
from pipeline.perplexity.paragraphs import ParagraphsConfig
from pipeline.perplexity.stage import BUCKETS, PerplexityConfig
from pipeline.quality.config import QualityConfig
from pipeline.quality.rules import DEFAULT_RULES, RULES, QualityLimits, QualityRule
from pipeline.sources.config import SourceConfig
from pipeline.templates.stage import TemplatesConfig
from pipeline.toxicity.stage import ToxicityConfig
from schemas.config import SOURCE, Recipe, Section, suggest_name
from schemas.errors import ConfigError

USE_DEFAULT = object()
"""Value in an `Edit` that means: remove the setting from the recipe, so that its default applies."""
UNREACHABLE_LIMIT = 10**9
"""A maximum that no signal exceeds; signals are shares, ratios, and counts within one document."""
UNIT_SETTINGS: dict[str, set[str]] = {
    "sentences": {"sentences"},
    "substring": {"substring_unit", "substring_length", "on_substring", "max_repeated_share"},
}
"""Settings of `[repeats]` that apply to only one of its `units`, by the name of the unit."""
Values = dict[str, dict[str, Any]]
Edit = Mapping[str, Any]
"""Setting → new value, for the settings of one section that switch off a rule."""


def leave_out_rules(values: Mapping[str, Any], words: Sequence[str], load: Callable[[Values], Recipe]) -> Values:
    """Return the values of a recipe, by section, with the named rules switched off and the named sources left out.

    `words` are the values of --without. `load` validates values and returns a recipe. Raises ConfigError if a rule or
    source is not in the recipe or is named twice.
    """
    left: Values = copy.deepcopy(dict(values))
    recipe = load(left)
    known = rules_of(recipe) | _sources_of(recipe)
    for word in words:
        if words.count(word) > 1:
            raise ConfigError(
                f"--without {word}: expected every rule once, got it {words.count(word)} times. "
                f"Pass --without {word} once."
            )
        if word not in _words(known):
            close = suggest_name(word, _words(known)) if known else ""
            raise ConfigError(f"--without: expected a rule of the recipe, got {word!r}{close}. {_list_rules(known)}")
    for word in words:
        section = word.partition(".")[0]
        if section == SOURCE:
            _leave_out_source(left, word.partition(".")[2])
            continue
        while edit := _chosen(rules_of(load(left)), word):
            edited = {**left.get(section, {}), **edit}
            left[section] = {key: value for key, value in edited.items() if value is not USE_DEFAULT}
            if word != section:
                break
    return left


def rules_of(recipe: Recipe) -> dict[str, Edit]:
    """Return every rule of a recipe that can be left out: `section.reason` → the settings that switch it off."""
    return {
        f"{section}.{rule}": edit
        for section, (kind, edits) in _SECTIONS.items()
        if section in recipe
        for rule, edit in edits(recipe.section(section, kind))
    }


def _sources_of(recipe: Recipe) -> dict[str, Edit]:
    """Return `source.NAME` of each source that can be left out: one of several."""
    return {f"{SOURCE}.{name}": {} for name in recipe.sources} if recipe.has_several_sources else {}


def _leave_out_source(values: Values, name: str) -> None:
    """Remove a source from the values of a recipe, and from the settings that name it."""
    tables: Any = values[SOURCE]
    default = SourceConfig.model_fields["name"].default
    values[SOURCE] = [table for table in tables if table.get("name", default) != name]  # type: ignore[assignment]
    train: Any = values.get("train", {})
    for shares in (train.get("weights"), train.get("epochs"), *(own.get("weights") for own in train.get("stages", ()))):
        (shares or {}).pop(name, None)
    ranks = values.get("dedup", {}).get("source_ranks")
    if ranks is not None:
        values["dedup"]["source_ranks"] = [other for other in ranks if other != name]


def _words(known: Mapping[str, Edit]) -> set[str]:
    return {*known, *(section for word in known if (section := word.partition(".")[0]) != SOURCE)}


def _chosen(known: Mapping[str, Edit], word: str) -> Edit:
    """Return the settings that switch off the rule `word`, or the first rule of section `word`; empty if unknown."""
    return next((edit for name, edit in known.items() if word in (name, name.partition(".")[0])), {})


def _list_rules(known: Mapping[str, Edit]) -> str:
    if not known:
        return "Remove --without: the recipe has no rule that can be left out."
    sections: dict[str, list[str]] = {}
    for name in known:
        section, _, rule = name.partition(".")
        sections.setdefault(section, []).append(rule)
    lines = [f"\n  {section}: {', '.join(rules)}" for section, rules in sections.items()]
    return "Name one of the recipe's rules as section.rule, or a section for all of its rules:" + "".join(lines)


Edits = Iterator[tuple[str, Edit]]


def _of_language(config: LanguageConfig) -> Edits:
    if config.languages:
        yield "language_not_wanted", {"languages": []}
    if config.min_score > 0:
        yield "language_uncertain", {"min_score": 0.0}
    if config.min_language_share is not None:
        yield "language_mixed", {"min_language_share": USE_DEFAULT}


def _of_quality(config: QualityConfig) -> Edits:
    """Yield (name, edit) of each group of rules in quality.rules, then of each single rule, then of the recipe's own.

    The edit of a single built-in rule sets a limit that every document passes.
    """
    names = DEFAULT_RULES[config.dialect] if config.rules is None else config.rules
    for name in names:
        left = [other for other in names if other != name]
        rules = [rule for other in left for rule in RULES[config.dialect].get(other, ())]
        skipped = [reason for reason in config.skip_rules if reason in {rule.reason for rule in rules}]
        edit = {"rules": left, **_remove_unused(config, {rule.setting for rule in rules})}
        yield name, edit | ({"skip_rules": skipped or USE_DEFAULT} if config.skip_rules else {})
    others = {rule.setting for rule in config.chosen_rules()}
    for rule in config.chosen_rules():
        if not _is_off(config, rule):
            limit = 0 if rule.setting.startswith("min_") else UNREACHABLE_LIMIT
            yield rule.reason, {**_remove_unused(config, others - {rule.setting}), rule.setting: limit}
    for own in config.rule:
        rest = [other.model_dump() for other in config.rule if other.name != own.name]
        yield own.name, {"rule": rest or USE_DEFAULT}


def _is_off(config: QualityConfig, rule: QualityRule) -> bool:
    return bool(getattr(config, rule.setting) == (0 if rule.setting.startswith("min_") else UNREACHABLE_LIMIT))


def _remove_unused(config: QualityConfig, used: set[str]) -> dict[str, Any]:
    """Return an edit that removes all thresholds except `used`."""
    # The recipe rejects thresholds that no rule uses.
    edit: dict[str, Any] = {
        name: USE_DEFAULT
        for name in QualityLimits.model_fields
        if getattr(config, name) is not None and name not in used
    }
    languages = {
        language: left
        for language, limits in config.by_language.items()
        if (left := {name: limit for name, limit in limits.items() if name in used})
    }
    return edit | ({"by_language": languages} if config.by_language else {})


def _of_decontaminate(config: DecontaminateConfig) -> Edits:
    if config.evaluation_sets and config.action != "measure":
        others = ("max_ngrams", "max_contaminated_share", "cut_margin", "min_piece_chars", "min_pieces", "max_pieces")
        yield "contaminated", {**dict.fromkeys(others, USE_DEFAULT), "action": "measure"}
    if config.canaries and config.max_canaries is not None:
        yield "canary", {"max_canaries": None}


def _of_toxicity(config: ToxicityConfig) -> Edits:
    if config.action != "drop":
        if config.action == "cut_sentences" and config.max_cut_share is not None:
            yield "toxic_cut", {"max_cut_share": None}
        return
    if config.wordlists and config.max_word_share is not None:
        yield "toxic_word_share", {"max_word_share": None}
    if config.wordlists and config.max_words is not None:
        yield "toxic_words", {"max_words": None}
    if config.max_score is not None:
        yield "toxic_score", {"max_score": None}
    if config.max_toxic_share is not None:
        yield "toxic_sentences", {"max_toxic_share": None}
    if config.max_hateful_share is not None:
        yield "hateful_sentences", {"max_hateful_share": None}


def _of_perplexity(config: PerplexityConfig) -> Edits:
    if config.min_perplexity is not None:
        yield "perplexity_low", {"min_perplexity": USE_DEFAULT}
    if config.max_perplexity is not None:
        yield "perplexity_high", {"max_perplexity": USE_DEFAULT}
    if set(config.keep_buckets) != set(BUCKETS):
        yield "keep_buckets", {"keep_buckets": USE_DEFAULT}


def _of_classifier(config: ClassifierConfig) -> Edits:
    if config.min_score:
        yield "classifier_score", {"min_score": USE_DEFAULT}
    if config.min_quantile:
        yield "classifier_quantile", {"min_quantile": USE_DEFAULT}
    if config.min_alpha:
        yield "classifier_sampled", {"min_alpha": USE_DEFAULT, "seed": USE_DEFAULT}


def _of_importance(config: ImportanceConfig) -> Edits:
    if config.min_importance:
        yield "importance_low", {"min_importance": USE_DEFAULT}
    if config.min_quantile:
        yield "importance_quantile", {"min_quantile": USE_DEFAULT}
    if config.min_gumbel_quantile:
        yield "importance_resampled", {"min_gumbel_quantile": USE_DEFAULT, "seed": USE_DEFAULT}


def _of_paragraphs(config: ParagraphsConfig) -> Edits:
    """Yield the limits of the perplexity and of the length; the rule LITTLE_LEFT is off without both."""
    both = config.by_perplexity and config.by_length
    for name, settings in (("perplexity", config.by_perplexity), ("length", config.by_length)):
        if settings:
            others = [] if both else ["min_left_chars"]
            yield name, dict.fromkeys([*settings, *others], USE_DEFAULT)


def _of_templates(config: TemplatesConfig) -> Edits:
    """Yield the cuts of lines; nothing is left of the section without them."""
    if config.min_share is not None:
        yield "lines", dict.fromkeys(TemplatesConfig.model_fields, USE_DEFAULT)


def _of_dedup(config: DedupConfig) -> Edits:
    if config.by_url != "off":
        yield SAME_URL, {"by_url": USE_DEFAULT}
    if config.exact != "off":
        yield EXACT, {"exact": "off"}
    if config.near:
        yield NEAR, {**dict.fromkeys(NEAR_ONLY, USE_DEFAULT), "near": False}


def _of_repeats(config: RepeatsConfig) -> Edits:
    for unit in config.units:
        left = [other for other in config.units if other != unit]
        unused = UNIT_SETTINGS.get(unit, set()) if left else set(RepeatsConfig.model_fields)
        unused = unused | ({"min_unit_chars"} if left == ["substring"] else set())
        yield unit, {**dict.fromkeys(unused, USE_DEFAULT), "units": left}


_SECTIONS: Mapping[str, tuple[type[Section], Callable[[Any], Edits]]] = {
    "templates": (TemplatesConfig, _of_templates),
    "language": (LanguageConfig, _of_language),
    "quality": (QualityConfig, _of_quality),
    "decontaminate": (DecontaminateConfig, _of_decontaminate),
    "toxicity": (ToxicityConfig, _of_toxicity),
    "perplexity": (PerplexityConfig, _of_perplexity),
    "classifier": (ClassifierConfig, _of_classifier),
    "importance": (ImportanceConfig, _of_importance),
    "paragraphs": (ParagraphsConfig, _of_paragraphs),
    "dedup": (DedupConfig, _of_dedup),
    "repeats": (RepeatsConfig, _of_repeats),
}
"""Section → its class and the function that yields (rule, edit) of its rules that drop documents, in their order."""
