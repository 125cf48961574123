"""The settings of the quality stage: the signals to measure, the lines to cut, and the limits of the rules.

An absent limit has the default in `rules.LIMITS`, or that of the language's profile. Limits and rule sets change
verdicts only, so they can be tried on a finished run; families, cuts and line settings change the stored tables.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import model_validator

from pipeline.quality.rules import DEFAULT_RULES, RULES, Dialect, QualityRule, RuleSet
from schemas.config import Section, decision, location, suggest_name
from schemas.signals import FAMILIES

Peers = Literal["gopher_repetition", "gopher_quality", "c4", "fineweb", "refinedweb", "dclm", "dolma", "redpajama"]
Family = Peers | Literal["boilerplate", "markup", "lines"]
LineRuleSet = Literal["c4", "refinedweb"]
CUTS: Mapping[Dialect, tuple[LineRuleSet, ...]] = {
    "datatrove": ("c4",),
    "dclm": ("refinedweb",),
    "dolma": (),
    "redpajama": (),
}
"""Dialect → line rules that its published pipeline cuts with."""
CUTTING = get_args(LineRuleSet)


class QualityConfig(Section):
    """The section `[quality]` of a recipe; `min_` and `max_` are inclusive to keep. Defaults: FineWeb's recipe."""

    dialect: Dialect = decision("datatrove")
    """Implementation of the published rules that decides."""
    rules: tuple[RuleSet, ...] | None = decision(None)
    """Rule sets that may drop a document, in this order; absent: all of the dialect, in its order."""
    families: tuple[Family, ...] = ()
    """Families of signals to measure; the columns of others are null. Absent: those that the dialect and the rules
    compare, because all families take three times as long as datatrove's four. `lines` are the signals of single lines,
    stored with the text: 1.1 kB of the 6.2 kB stored per page, where all other families together take 0.3 kB."""
    cut_lines: tuple[LineRuleSet, ...] = ()
    """Line rules that cut lines from the text; absent: those of the dialect's published pipeline."""
    profiles: str | None = location(None)
    """File of language profiles (stop words, limits) from `penstock derive-profiles`; absent: the built-in profiles."""
    by_language: Mapping[str, Mapping[str, float]] = decision({})
    """Limits for single languages, such as {"de": {"min_words": 30}}; they replace all others."""

    max_dup_para_frac: float | None = decision(None)
    """Repeated paragraphs over paragraphs. This and the next twelve: Gopher, table A1."""
    max_dup_para_char_frac: float | None = decision(None)
    """Characters in repeated paragraphs over characters."""
    max_dup_line_frac: float | None = decision(None)
    """Repeated lines over lines."""
    max_dup_line_char_frac: float | None = decision(None)
    """Characters in repeated lines over characters."""
    max_top_2gram: float | None = decision(None)
    """Characters in the most frequent 2-gram of words over characters."""
    max_top_3gram: float | None = decision(None)
    """The same for 3-grams."""
    max_top_4gram: float | None = decision(None)
    """The same for 4-grams."""
    max_dup_5gram: float | None = decision(None)
    """Characters in repeated 5-grams of words over characters."""
    max_dup_6gram: float | None = decision(None)
    """The same for 6-grams."""
    max_dup_7gram: float | None = decision(None)
    """The same for 7-grams."""
    max_dup_8gram: float | None = decision(None)
    """The same for 8-grams."""
    max_dup_9gram: float | None = decision(None)
    """The same for 9-grams."""
    max_dup_10gram: float | None = decision(None)
    """The same for 10-grams."""

    min_words: int | None = decision(None)
    """Minimum of words other than punctuation [words]. This and the next eleven: Gopher, appendix A.1.1."""
    max_words: int | None = decision(None)
    """Maximum of words other than punctuation [words]."""
    min_mean_word_length: float | None = decision(None)
    """Minimum of the mean length of those words [code points]."""
    max_mean_word_length: float | None = decision(None)
    """Maximum of the mean length of those words [code points]."""
    min_median_word_length: float | None = decision(None)
    """Minimum of the median length of those words, which dolma uses [code points]."""
    max_median_word_length: float | None = decision(None)
    """Maximum of the median length of those words, which dolma uses [code points]."""
    max_symbol_ratio: float | None = decision(None)
    """Number of # and ellipses over words, for dialects that count both together."""
    max_hash_ratio: float | None = decision(None)
    """Number of # over words."""
    max_ellipsis_ratio: float | None = decision(None)
    """Number of ... and … over words."""
    max_bullet_lines: float | None = decision(None)
    """Lines that start with a bullet over lines."""
    max_ellipsis_lines: float | None = decision(None)
    """Lines that end with an ellipsis over lines."""
    min_alpha_words: float | None = decision(None)
    """Words with a letter over words."""
    min_stop_words: int | None = decision(None)
    """Distinct stop words of the language's list, Gopher's eight for English [words]."""

    c4_terminal_punctuation: bool = False
    """True to keep only lines that end in . ? ! or a quote: true in C4, false in FineWeb's recipe. This and the next
    two change the cuts, and so the text; they cannot be tried on a finished table."""
    c4_min_line_words: int = 3
    """Minimum number of whitespace-separated words of a kept line [words]. C4."""
    c4_max_word_length: int = 1000
    """Maximum length of a whitespace-separated word on a kept line [code points]. C4's reference code."""
    max_lorem_ipsum: float | None = decision(None)
    """Occurrences of lorem ipsum. C4. RedPajama-V2: over characters."""
    max_curly_brackets: float | None = decision(None)
    """Opening curly brackets, a sign of code or a template. C4. RedPajama-V2: share of the characters."""
    max_javascript: int | None = decision(None)
    """Occurrences of javascript. dolma's C4."""
    min_sentences: int | None = decision(None)
    """Sentences on the kept lines [sentences]. C4."""

    min_terminal_lines: float | None = decision(None)
    """Lines that end in terminal punctuation over lines. This and the next three: FineWeb, section 3.6."""
    max_short_lines: float | None = decision(None)
    """Lines of at most 30 characters over lines."""
    max_dup_line_chars: float | None = decision(None)
    """Characters in repeated lines over characters."""
    max_newline_ratio: float | None = decision(None)
    """Newlines over words, high for lists."""

    refinedweb_max_uppercase: float = 0.5
    """Maximum share of upper-case characters of a kept line. RefinedWeb; this and the next change the cuts, like C4's
    line settings."""
    refinedweb_min_line_words: int = 2
    """Minimum number of whitespace-separated words of a kept line, empty lines excepted [words]. RefinedWeb."""
    max_removed_words: float | None = decision(None)
    """Words that RefinedWeb's line rules cut over words. DCLM."""
    max_boilerplate_lines: float | None = decision(None)
    """Lines with a phrase of menus, consent, accounts or shops over lines. This and the next three: our own."""
    max_markup_chars: float | None = decision(None)
    """Characters in HTML tags and character references over characters."""
    max_code_signs: float | None = decision(None)
    """Brackets, operators and similar signs over characters other than whitespace."""
    max_code_lines: float | None = decision(None)
    """Lines that end like a statement or block of code over lines."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_dialect(cls, values: Any) -> Any:
        """Fill in the families and cuts, so that the section's content lists what is measured for every dialect."""
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
        """Raise ValueError that lists all rule sets that cannot decide and all settings that would be ignored."""
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
        thresholds = {name for name in self.fields_of("decision") if name.startswith(("min_", "max_"))}
        given = [(name, name) for name in sorted(thresholds) if getattr(self, name) is not None]
        for language, limits in self.by_language.items():
            given += [(f"by_language.{language}.{name}", name) for name in limits]
        problems = []
        for where, name in given:
            if name not in thresholds:
                problems.append(
                    f"{where}: expected a limit of [quality], got {name!r}{suggest_name(name, thresholds)}. Correct it."
                )
            elif name not in compared:
                problems.append(
                    f"{where}: expected the limit of a rule that decides, got one that no chosen rule of "
                    f"{self.dialect!r} compares. Remove it."
                )
        for name in sorted(self.model_fields_set):
            rules = name.partition("_")[0]
            if rules in CUTTING and rules not in (*self.families, *self.cut_lines):
                problems.append(
                    f"{name}: expected a line rule that is measured or cut, got {rules!r}, which is neither. Remove it."
                )
        return problems

    def chosen_rules(self) -> list[QualityRule]:
        """Return the rules that decide, in order."""
        names = DEFAULT_RULES[self.dialect] if self.rules is None else self.rules
        return [rule for name in names for rule in RULES[self.dialect].get(name, ())]


def family_of(column: str) -> str:
    """Return the name of the family of signals that a column belongs to."""
    return next(family for family, signals in FAMILIES.items() if any(signal.name == column for signal in signals))
