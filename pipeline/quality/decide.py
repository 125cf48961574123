"""The quality stage: the signals of each text are measured and stored, and thresholds are declared, not applied.

What decides sees nothing but stored signals, so other thresholds can be tried on the table without the text. A limit
holds for the language it was set for: English has the published values, others those of their profile, and what no
language is named for holds for all.
"""

from collections.abc import Mapping, Sequence

from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Row, RowFunction
from pipeline.quality.c4_fineweb import LineRules
from pipeline.quality.config import QualityConfig
from pipeline.quality.gopher import STOP_WORDS, stop_codes
from pipeline.quality.refinedweb import RefinedWebRules
from pipeline.quality.rules import REASONS, Rule
from pipeline.quality.stage import ENGLISH, Measures, measure
from pipeline.quality.vocabularies import Vocabularies
from pipeline.text.profiles import Profile, load_profiles
from pipeline.text.words import Codes
from schemas.errors import ConfigError
from schemas.signals import LINE_SIGNALS, SIGNALS


def models(config: QualityConfig) -> dict[str, str]:
    """The file of profiles, if the recipe names one."""
    return {"profiles": config.profiles} if config.profiles else {}


def make(config: QualityConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that adds the signals, cuts and body of a document; it decides nothing."""
    profiles = load_profiles(models.get("profiles"))
    stop_words = {language: stop_codes(profile.stop_words) for language, profile in profiles.items()}
    vocabularies, measures = Vocabularies(), measures_of(config, stop_words)

    def quality(row: Row) -> None:
        row.update(measure(row["text"], row["language"], measures, vocabularies[row["language"]]))

    return quality


def measures_of(config: QualityConfig, stop_words: Mapping[str, Codes]) -> Measures:
    """What the settings ask to measure, given the codes of the stop words of each language."""
    lines = LineRules(config.c4_terminal_punctuation, config.c4_min_line_words, config.c4_max_word_length)
    english = {ENGLISH: stop_codes(STOP_WORDS)}
    refinedweb = RefinedWebRules(config.refinedweb_max_uppercase, config.refinedweb_min_line_words)
    families, cut_lines = frozenset(config.families), frozenset(config.cut_lines)
    return Measures(families, cut_lines, lines, refinedweb, {**stop_words, **english})


def checks(config: QualityConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """Every rule that decides, in order, with its limit in each language. Raises ConfigError for a bad profile.

    The built-in profiles were derived in the dialect "datatrove"; the others need a file derived in theirs.
    """
    profiles = load_profiles(models.get("profiles"))
    thresholds = {name for name in config.fields_of("decision") if name.startswith(("min_", "max_"))}
    unknown = sorted({name for profile in profiles.values() for name in profile.limits} - thresholds)
    if unknown:
        raise ConfigError(
            f"language profiles: promised limits of quality thresholds, found {unknown}; derive them anew"
        )
    known = profiles if config.dialect == "datatrove" or "profiles" in models else {}
    return [
        Check(rule.reason, rule.signal, rule.setting, limits_of(rule, config, known)) for rule in config.chosen_rules()
    ]


def limits_of(rule: Rule, config: QualityConfig, profiles: Mapping[str, Profile]) -> dict[str, float]:
    """The limit of a rule by language; a language that it does not name, and EVERY neither, is not checked."""
    limits = {language: p.limits[rule.setting] for language, p in profiles.items() if rule.setting in p.limits}
    limits.setdefault(ENGLISH, rule.limit)
    if rule.neutral:
        limits[EVERY] = rule.limit
    given = getattr(config, rule.setting)
    if given is not None:
        limits = dict.fromkeys(limits, given)
    return limits | {
        language: values[rule.setting] for language, values in config.by_language.items() if rule.setting in values
    }


QUALITY = PerDocument(
    name="quality",
    version=2,
    config=QualityConfig,
    reads=("text", "language"),
    adds=(
        *(signal.name for signal in SIGNALS),
        *("cuts", "lines", *(signal.name for signal in LINE_SIGNALS)),
        *("num_bytes", "_body", "_words"),
    ),
    reasons={},
    make=make,
    models=models,
    ends=False,
    verdicts=REASONS,
    checks=checks,
)
