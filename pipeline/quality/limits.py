"""The limits of the quality rules in words: which limit is in force, where it comes from, and which others it replaces.

A setting that a recipe does not set has the limit of the dialect. The profile of a language may have a limit of its
own; a limit that the recipe sets for all languages replaces it, unless `quality.by_language` names the language.
"""

from collections.abc import Collection, Mapping

from pipeline.engine.stage import EVERY
from pipeline.language import LANGUAGE, LanguageConfig
from pipeline.quality.config import QualityConfig
from pipeline.quality.rules import RULES, QualityLimits, QualityRule
from pipeline.quality.stage import ENGLISH, QUALITY, checks
from pipeline.text.profiles import load_profiles
from schemas.config import Recipe
from schemas.field_docs import toml_value

SHOWN_LANGUAGES = 16
"""Maximum number of languages that a note lists."""
Limits = Mapping[str, float]
"""Language → limit, with the limit of all others under EVERY."""
LIMIT_NAMES = frozenset(QualityLimits.model_fields)
"""Names of the settings of `[quality]` that are limits."""


def limits_by_setting(config: QualityConfig, models: Mapping[str, str]) -> dict[str, Limits]:
    """Return the limits by language of each setting that a chosen rule compares.

    `models` has the local path of the language profiles under `profiles`, if the recipe names a file of its own.
    """
    return {check.setting: check.limits for check in checks(config, models, {})}


def limit_in_force(
    setting: str, given: float | None, dialect: str, limits: Limits | None, languages: Collection[str] = ()
) -> str | None:
    """Return the limit of a setting of `[quality]` as text, with its origin if the recipe does not set it.

    `given`: the value in the recipe; None = not set. `limits`: the limits in force by language; None = no chosen rule
    compares the setting. `languages`: those that the run keeps; empty = all. None if there is no limit to state.
    """
    default = next((rule.limit for name, rule in _rules(setting) if name == dialect), None)
    if limits is None or default is None:
        return None
    common = default if given is None else given
    own = {name for name, limit in limits.items() if limit != common and (not languages or name in languages)}
    notes = [f"default of the dialect {dialect}"] if given is None else []
    if own:
        notes.append("1 language has its own limit" if len(own) == 1 else f"{len(own)} languages have their own limits")
    return f"{common:g} ({'; '.join(notes)})" if notes else f"{common:g}"


def default_limit(setting: str) -> str:
    """Return what a limit of `[quality]` is if the recipe does not set it, in one sentence.

    Languages are counted in the built-in profiles, which apply with the dialect `datatrove`.
    """
    dialects: dict[float, list[str]] = {}
    for dialect, rule in _rules(setting):
        dialects.setdefault(rule.limit, []).append(dialect)
    one = len(dialects) == 1
    limits = [f"{limit:g}" if one else f"{limit:g} ({', '.join(names)})" for limit, names in dialects.items()]
    text = f"If unset: the dialect's own limit, {' or '.join(limits)}"
    own = {name: p.limits[setting] for name, p in load_profiles(None).items() if setting in p.limits}
    own = {name: limit for name, limit in own.items() if limit not in dialects}
    if not own:
        return f"{text}."
    low, high = min(own.values()), max(own.values())
    spread = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f"{text}; {len(own)} {'language has its' if len(own) == 1 else 'languages have their'} own, {spread}."


def _rules(setting: str) -> list[tuple[str, QualityRule]]:
    return [
        (dialect, rule)
        for dialect, sets in RULES.items()
        for rules in sets.values()
        for rule in rules
        if rule.setting == setting
    ]


def replacement_notes(recipe: Recipe, models: Mapping[str, str], settings: Collection[str] = ()) -> list[str]:
    """Return a note for each limit of a recipe that replaces limits of single languages that the recipe keeps.

    Only own limits that differ from the dialect's limit are named. `models` is that of `limits_by_setting`.
    `settings`: only these settings of `[quality]`; empty = all.
    """
    config = recipe.section(QUALITY.name, QualityConfig)
    languages = recipe.section(LANGUAGE.name, LanguageConfig).languages
    without = config.model_copy(update=dict.fromkeys(LIMIT_NAMES))
    before, after = limits_by_setting(without, models), limits_by_setting(config, models)
    notes = []
    for rule in config.chosen_rules():
        given = getattr(config, rule.setting)
        if given is None or (settings and rule.setting not in settings):
            continue
        replaced = {
            name: limit
            for name, limit in sorted(before[rule.setting].items())
            if name not in (EVERY, ENGLISH)
            and (not languages or name in languages)
            and limit not in (rule.limit, after[rule.setting][name])
        }
        if replaced:
            notes.append(_replacement_note(rule, given, replaced, config))
    return notes


def _replacement_note(rule: QualityRule, given: float, replaced: Limits, config: QualityConfig) -> str:
    is_minimum = rule.setting.startswith("min_")
    stricter = {name: limit for name, limit in replaced.items() if (given > limit) == is_minimum}
    looser = {name: limit for name, limit in replaced.items() if name not in stricter}
    lines = [f"quality.{rule.setting} = {given:g} replaces limits of single languages:"]
    lines += [f"  {given:g} is stricter for {_listed(stricter)}"] if stricter else []
    lines += [f"  {given:g} is less strict for {_listed(looser)}"] if looser else []
    own = {} if rule.neutral else {ENGLISH: given}
    kept = own or replaced
    merged = {name: dict(limits) for name, limits in config.by_language.items()}
    for name, limit in kept.items():
        merged.setdefault(name, {})[rule.setting] = limit
    setting = f"quality.by_language='{toml_value(merged)}'"
    if own:
        lines.append(f"  To keep them and change English only, set this in its place: --set {setting}")
    else:
        lines.append(f"  To keep them, set this too: --set {setting}")
    return "\n".join(lines)


def _listed(limits: Limits) -> str:
    shown = [f"{name} ({limit:g})" for name, limit in list(limits.items())[:SHOWN_LANGUAGES]]
    more = len(limits) - len(shown)
    return ", ".join(shown) + (f" and {more} more languages" if more else "")
