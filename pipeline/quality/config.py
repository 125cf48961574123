"""The settings of the quality stage: the signals to measure, the lines to cut, and the limits of the rules.

A limit that is not set has the value in `rules.LIMITS`, or that of the language's profile. Limits and rule sets change
verdicts only, so others can be tried on a finished run. Families, cuts and line settings change the stored tables.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import model_validator

from pipeline.quality.rules import (
    DEFAULT_RULES,
    RULES,
    SIGNALS_OF,
    Dialect,
    Family,
    QualityLimits,
    QualityRule,
    RuleSet,
)
from schemas.config import decision, location, suggest_name

LineRuleSet = Literal["c4", "refinedweb"]
CUTS: Mapping[Dialect, tuple[LineRuleSet, ...]] = {
    "datatrove": ("c4",),
    "dclm": ("refinedweb",),
    "dolma": (),
    "redpajama": (),
}
"""Dialect → the line rules with which its published pipeline cuts lines."""
CUTTING = get_args(LineRuleSet)


class QualityConfig(QualityLimits):
    """The section `[quality]` of a recipe: the quality rules and their limits; a value equal to a limit is kept.

    The defaults are FineWeb's recipe.
    """

    dialect: Dialect = decision("datatrove")
    """The implementation of the published rules whose signals and limits decide."""
    rules: tuple[RuleSet, ...] | None = decision(None)
    """Rule sets that may drop a document, in this order. If not set: the default rule sets of the dialect."""
    families: tuple[Family, ...] = ()
    """Families of signals to measure; the columns of others are null. If not set: those that the dialect and the rules
    compare, because all families take three times as long as datatrove's four. `lines` are the signals of single lines,
    stored with the text: 1.1 kB of the 6.2 kB stored per page, where all other families together take 0.3 kB."""
    cut_lines: tuple[LineRuleSet, ...] = ()
    """Line rules that cut lines from the text. If not set: those of the dialect's published pipeline."""
    profiles: str | None = location(None)
    """File of language profiles (stop words, limits) from `penstock derive-profiles`. If not set: the built-in ones."""
    by_language: Mapping[str, Mapping[str, float]] = decision({})
    """Limits for single languages, such as {"de": {"min_words": 30}}; they override all other limits."""

    c4_terminal_punctuation: bool = False
    """True to keep only lines that end in . ? ! or a quote: true in C4, false in FineWeb's recipe. This and the next
    two change which lines are cut from the stored text, so other values cannot be tried on a finished run."""
    c4_min_line_words: int = 3
    """Minimum number of whitespace-separated words of a kept line [words]. Source: C4."""
    c4_max_word_length: int = 1000
    """Maximum length of a whitespace-separated word on a kept line [code points]. Source: C4's reference code."""

    refinedweb_max_uppercase: float = 0.5
    """Maximum share of upper-case characters of a kept line. Source: RefinedWeb. This and the next setting change which
    lines are cut from the stored text."""
    refinedweb_min_line_words: int = 2
    """Minimum number of whitespace-separated words of a kept line; empty lines are kept [words]. Source: RefinedWeb."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_dialect(cls, values: Any) -> Any:
        """Set `families` and `cut_lines`, if not set, to what the dialect needs, so that manifests list the values."""
        if not isinstance(values, Mapping):
            return values
        dialect, sets = values.get("dialect", "datatrove"), values.get("rules") or ()
        if dialect not in RULES or not isinstance(sets, (list, tuple)):
            return values
        names = dict.fromkeys([*DEFAULT_RULES[dialect], *(name for name in sets if name in RULES[dialect])])
        families = dict.fromkeys(family_of(rule.signal) for name in names for rule in RULES[dialect][name])
        return {"families": tuple(families), "cut_lines": CUTS[dialect]} | dict(values)

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "QualityConfig":
        """Raise ValueError if a rule set cannot be evaluated with these settings, or if a setting has no effect."""
        problems = [*self._idle_rule_sets(), *self._idle_settings()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _idle_rule_sets(self) -> list[str]:
        valid, names = RULES[self.dialect], self.rules or ()
        problems = [
            f"rules: expected each rule set once, got {name!r} {names.count(name)} times. Name it once."
            for name in sorted({name for name in names if names.count(name) > 1})
        ]
        for name in names:
            if name not in valid:
                problems.append(
                    f"rules: expected rule sets of the dialect {self.dialect!r}, got {name!r}"
                    f"{suggest_name(name, list(valid))}. Correct quality.rules."
                )
        for rule in self.chosen_rules():
            family = family_of(rule.signal)
            if family not in self.families:
                message = (
                    f"families: expected the family {family!r}, which the rules compare, got {list(self.families)}. "
                    f"Add {family!r} to quality.families."
                )
                problems += [message] if message not in problems else []
        return problems

    def _idle_settings(self) -> list[str]:
        compared = {rule.setting for rule in self.chosen_rules()}
        thresholds = set(QualityLimits.model_fields)
        given = [(name, name) for name in sorted(thresholds) if getattr(self, name) is not None]
        for language, limits in self.by_language.items():
            given += [(f"by_language.{language}.{name}", name) for name in limits]
        problems = []
        for where, name in given:
            if name not in thresholds:
                problems.append(
                    f"{where}: expected a limit of [quality], got {name!r}{suggest_name(name, thresholds)}. "
                    "Correct the name of the limit."
                )
            elif name not in compared:
                problems.append(
                    f"{where}: expected the limit of a rule in use, got one that no chosen rule of the dialect "
                    f"{self.dialect!r} uses. Remove quality.{where}."
                )
        for name in sorted(self.model_fields_set):
            rules = name.partition("_")[0]
            if rules in CUTTING and rules not in (*self.families, *self.cut_lines):
                problems.append(
                    f"{name}: expected {rules!r} in families or cut_lines, got it in neither. Remove quality.{name}."
                )
        return problems

    def chosen_rules(self) -> list[QualityRule]:
        """Return the rules that may drop a document, in the order in which they are checked."""
        names = DEFAULT_RULES[self.dialect] if self.rules is None else self.rules
        return [rule for name in names for rule in RULES[self.dialect].get(name, ())]


def family_of(column: str) -> str:
    """Return the name of the family of signals to which a column belongs."""
    return next(family for family, signals in SIGNALS_OF.items() if any(signal.name == column for signal in signals))
