"""The settings of the quality stage: the signals to measure, the lines to cut, and the limits of the rules.

A limit that is not set has the value in `rules.LIMITS`, or that of the language's profile. Limits and rule sets change
verdicts only, so others can be tried on a finished run. Families, cuts and line settings change the stored tables.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from pipeline.quality.rules import (
    DEFAULT_RULES,
    REASONS,
    RULES,
    SIGNALS_OF,
    Dialect,
    Family,
    QualityLimits,
    QualityRule,
    RuleSet,
)
from schemas.config import Section, decision, location, suggest_name

LineRuleSet = Literal["c4", "refinedweb"]
CUTS: Mapping[Dialect, tuple[LineRuleSet, ...]] = {
    "datatrove": ("c4",),
    "dclm": ("refinedweb",),
    "dolma": (),
    "redpajama": (),
}
"""Dialect → the line rules with which its published pipeline cuts lines."""
CUTTING = get_args(LineRuleSet)


class RecipeRule(Section):
    """A rule of the recipe, `[[quality.rule]]`: a condition on stored columns that drops a document."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,59}$")
    """The name of the rule in verdicts and reports: lower-case letters, digits and _. No other rule may have it."""
    when: str
    """The condition under which a document is dropped, such as "code_lines > 0.3 and language != 'en'". It may name the
    columns of `documents` and `scores`; it has the language of `penstock show --where`: comparisons, `and`,
    `or`, `not`, `in`, `is null`, arithmetic."""
    reason: str = Field(min_length=1, max_length=200)
    """One sentence that states why such a document is dropped; the report and `penstock show` print it."""


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
    keep_structure: bool = False
    """True to keep headings, list items and paragraph breaks: line rules then cut a line for what it says, but not
    because it is short or has no end punctuation. Of short lines, C4's rules cut only labels such as `Share`, and of
    lines with `javascript` only notices. A run of cut lines leaves at most one paragraph break. Signals
    are measured on what the published rules leave in both cases, so that published limits apply. False: the text is as
    published; C4 leaves lines of three words and more without paragraph breaks."""
    cut_repeated_lines: bool = False
    """True to cut the later occurrences of a long line of prose before any signal is measured, so that no rule drops a
    page for an offer or a notice that it shows twice. Headings, labels, numbers, code and rows of tables stay. If more
    than half of the text would be cut, nothing is. False: as published."""
    profiles: str | None = location(None)
    """File of language profiles (stop words, limits) from `penstock derive-profiles`. If not set: the built-in ones."""
    english_limits: Literal["published", "derived"] = decision("published")
    """Limits of English. "derived": from main texts of English pages that people marked and from judged documents;
    they drop fewer good pages for as many bad ones. They are for the dialect datatrove, without `profiles`."""
    by_language: Mapping[str, Mapping[str, float]] = decision({})
    """Limits for single languages, such as {"de": {"min_words": 30}}; they override all other limits."""
    skip_rules: tuple[str, ...] = decision(())
    """Names of built-in rules that drop no document, such as ["c4_curly_bracket"]. Their signals are still measured, so
    that a rule of the recipe can compare them."""
    rule: tuple[RecipeRule, ...] = decision(())
    """Rules of the recipe, `[[quality.rule]]` with `name`, `when` and `reason`. They are checked in this order, after
    the built-in rules of this section."""

    c4_terminal_punctuation: bool = False
    """True to keep only lines that end in . ? ! or a quote: true in C4, false in FineWeb's recipe. This and the next
    two change which lines are cut from the stored text, so other values cannot be tried on a finished run."""
    c4_min_line_words: int = Field(default=3, ge=1)
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
        problems = [*self._idle_rule_sets(), *self._idle_settings(), *self._wrong_names()]
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
        if self.english_limits == "derived" and (self.dialect != "datatrove" or self.profiles):
            got = f"the dialect {self.dialect!r}" if self.dialect != "datatrove" else f"profiles {self.profiles!r}"
            problems.append(
                f"english_limits: expected the dialect 'datatrove' without profiles for 'derived', got {got}. "
                "Remove quality.english_limits."
            )
        if self.keep_structure and not self.cut_lines:
            problems.append(
                "keep_structure: expected line rules in cut_lines, got none. Remove quality.keep_structure."
            )
        for name in sorted(self.model_fields_set):
            rules = name.partition("_")[0]
            if rules in CUTTING and rules not in (*self.families, *self.cut_lines):
                problems.append(
                    f"{name}: expected {rules!r} in families or cut_lines, got it in neither. Remove quality.{name}."
                )
        return problems

    def _wrong_names(self) -> list[str]:
        """Return the problems of `skip_rules` and of the names in `rule`."""
        chosen = {rule.reason for rule in self._rules_of_sets()}
        problems = []
        for name in dict.fromkeys(self.skip_rules):
            if name not in REASONS:
                close = suggest_name(name, chosen)
                problems.append(
                    f"skip_rules: expected names of rules, got {name!r}{close}. Correct quality.skip_rules."
                )
            elif name not in chosen:
                problems.append(
                    f"skip_rules: expected rules in use, got {name!r}, which no chosen rule set of the dialect "
                    f"{self.dialect!r} has. Remove it from quality.skip_rules."
                )
        names = [rule.name for rule in self.rule]
        for listed, where in ((self.skip_rules, "skip_rules"), (names, "rule")):
            twice = sorted({name for name in listed if listed.count(name) > 1})
            problems += [
                f"{where}: expected each name once, got {name!r} more than once. Remove one." for name in twice
            ]
        problems += [
            f"rule: expected a new name, got {name!r}, which is a built-in rule. Rename the rule."
            for name in dict.fromkeys(names)
            if name in REASONS
        ]
        return problems

    def decisions(self) -> dict[str, Any]:
        """Return the fields that only change decisions, as JSON values.

        `rule`, `skip_rules` and published English limits are omitted: tables that were built before they existed stay
        valid.
        """
        values = super().decisions()
        if self.english_limits == "published":
            del values["english_limits"]
        return {name: value for name, value in values.items() if value or name not in ("rule", "skip_rules")}

    def chosen_rules(self) -> list[QualityRule]:
        """Return the built-in rules that may drop a document, in the order in which they are checked."""
        return [rule for rule in self._rules_of_sets() if rule.reason not in self.skip_rules]

    def _rules_of_sets(self) -> list[QualityRule]:
        names = DEFAULT_RULES[self.dialect] if self.rules is None else self.rules
        return [rule for name in names for rule in RULES[self.dialect].get(name, ())]


def family_of(column: str) -> str:
    """Return the name of the family of signals to which a column belongs."""
    return next(family for family, signals in SIGNALS_OF.items() if any(signal.name == column for signal in signals))
