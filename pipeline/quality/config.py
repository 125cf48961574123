"""The settings of the quality stage: what is measured, what is cut, and what is asked of the measurements.

An absent threshold has the published value of the dialect, or of the language's profile. Thresholds and rule sets only
decide, so they can be tried on a finished run; families, cuts and C4's line settings change what is stored.
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
"""Dialect → line rules that its pipeline cuts by."""
CUTTING = get_args(LineRuleSet)


class QualityConfig(Section):
    """What a document must measure to be kept; `min_` and `max_` are inclusive to keep. Defaults: FineWeb's recipe."""

    dialect: Dialect = decision("datatrove")
    """Whose reading of the published rules decides."""
    rules: tuple[RuleSet, ...] | None = decision(None)
    """Rule sets that may drop a document, in this order; absent: all of the dialect, in its order."""
    families: tuple[Family, ...] = ()
    """Families of signals that are measured; the columns of others are null. Absent: those that the dialect and the
    rules look at, because all take three times as long as datatrove's four. `lines` are the signals of single lines,
    stored beside the text: 1.1 kB a page of 6.2 kB as stored, where all other families together take 0.3."""
    cut_lines: tuple[LineRuleSet, ...] = ()
    """Line rules that cut lines from the text; absent: those that the dialect's own pipeline cuts by."""
    profiles: str | None = location(None)
    """File of language profiles (stop words, limits) from `penstock derive-profiles`; absent: the ones built in."""
    by_language: Mapping[str, Mapping[str, float]] = decision({})
    """Thresholds for one language, such as {"de": {"min_words": 30}}; they replace all others."""

    max_dup_para_frac: float | None = decision(None)
    """Repeated paragraphs over paragraphs; 0.30. This and the next twelve: Gopher, table A1."""
    max_dup_para_char_frac: float | None = decision(None)
    """Characters in repeated paragraphs over characters; 0.20."""
    max_dup_line_frac: float | None = decision(None)
    """Repeated lines over lines; 0.30."""
    max_dup_line_char_frac: float | None = decision(None)
    """Characters in repeated lines over characters; 0.20."""
    max_top_2gram: float | None = decision(None)
    """Characters in the most frequent 2-gram of words over characters; 0.20."""
    max_top_3gram: float | None = decision(None)
    """The same for 3-grams; 0.18."""
    max_top_4gram: float | None = decision(None)
    """The same for 4-grams; 0.16."""
    max_dup_5gram: float | None = decision(None)
    """Characters in repeated 5-grams of words over characters; 0.15."""
    max_dup_6gram: float | None = decision(None)
    """The same for 6-grams; 0.14."""
    max_dup_7gram: float | None = decision(None)
    """The same for 7-grams; 0.13."""
    max_dup_8gram: float | None = decision(None)
    """The same for 8-grams; 0.12."""
    max_dup_9gram: float | None = decision(None)
    """The same for 9-grams; 0.11."""
    max_dup_10gram: float | None = decision(None)
    """The same for 10-grams; 0.10."""

    min_words: int | None = decision(None)
    """Words that are not mere punctuation [words]; 50. This and the next nine: Gopher, appendix A.1.1."""
    max_words: int | None = decision(None)
    """The same, from above [words]; 100,000."""
    min_mean_word_length: float | None = decision(None)
    """Mean length of those words [code points]; 3."""
    max_mean_word_length: float | None = decision(None)
    """The same, from above [code points]; 10."""
    min_median_word_length: float | None = decision(None)
    """The median of their lengths, where the dialect looks at it (dolma) [code points]; 3."""
    max_median_word_length: float | None = decision(None)
    """The same, from above [code points]; 10."""
    max_symbol_ratio: float | None = decision(None)
    """Number of # and ellipses over words, where the dialect counts both together; 0.1."""
    max_hash_ratio: float | None = decision(None)
    """Number of # over words; 0.1."""
    max_ellipsis_ratio: float | None = decision(None)
    """Number of ... and … over words; 0.1."""
    max_bullet_lines: float | None = decision(None)
    """Lines that begin with a bullet over lines; 0.9."""
    max_ellipsis_lines: float | None = decision(None)
    """Lines that end with an ellipsis over lines; 0.3."""
    min_alpha_words: float | None = decision(None)
    """Words with a letter over words; 0.8."""
    min_stop_words: int | None = decision(None)
    """Distinct stop words of the language's list, Gopher's eight for English [words]; 2."""

    c4_terminal_punctuation: bool = False
    """Whether a line must end in . ? ! or a quote to stay: C4 says yes, FineWeb's recipe no. This and the next two
    change the cuts, and with them the text, so they cannot be tried on the table."""
    c4_min_line_words: int = 3
    """Words between whitespace that a line must have to stay [words]. C4."""
    c4_max_word_length: int = 1000
    """Length of the longest word between whitespace that a line may have to stay [code points]. C4's reference code."""
    max_lorem_ipsum: float | None = decision(None)
    """Occurrences of lorem ipsum; 0. C4. RedPajama-V2: over characters."""
    max_curly_brackets: float | None = decision(None)
    """Opening curly brackets: the page is code or a template; 0. C4. RedPajama-V2: share of the characters."""
    max_javascript: int | None = decision(None)
    """Occurrences of javascript; 0. dolma's C4."""
    min_sentences: int | None = decision(None)
    """Sentences on the lines that stay [sentences]; 5. C4."""

    min_terminal_lines: float | None = decision(None)
    """Lines that end in terminal punctuation over lines; 0.12. This and the next three: FineWeb, section 3.6."""
    max_short_lines: float | None = decision(None)
    """Lines of at most 30 characters over lines; 0.67."""
    max_dup_line_chars: float | None = decision(None)
    """Characters in repeated lines over characters; 0.01."""
    max_newline_ratio: float | None = decision(None)
    """Newlines over words: the page is a list; 0.3."""

    refinedweb_max_uppercase: float = 0.5
    """Share of upper case among the characters that a line may have to stay. RefinedWeb; this and the next change the
    cuts, like C4's line settings."""
    refinedweb_min_line_words: int = 2
    """Words between whitespace that a line must have to stay, empty lines excepted [words]. RefinedWeb."""
    max_removed_words: float | None = decision(None)
    """Words on what RefinedWeb's line rules cut over words; 0.05. DCLM."""
    max_boilerplate_lines: float | None = decision(None)
    """Lines with a phrase of menus, consent, accounts or shops over lines; 0.3. This and the next three: our own."""
    max_markup_chars: float | None = decision(None)
    """Characters in HTML tags and character references over characters; 0.1."""
    max_code_signs: float | None = decision(None)
    """Brackets, operators and the like over characters that are not whitespace; 0.1."""
    max_code_lines: float | None = decision(None)
    """Lines that end like a statement or block of code over lines; 0.3."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_dialect(cls, values: Any) -> Any:
        """Fill in families and cuts, so that the content of a section says what was measured, whatever decides."""
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
        """Raise ValueError for rule sets that cannot decide and settings that nothing looks at, all of them at once."""
        problems = [*self._idle_rule_sets(), *self._idle_settings()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _idle_rule_sets(self) -> list[str]:
        valid, names = RULES[self.dialect], self.rules or ()
        problems = [f"rules: {name!r} is named twice" for name in sorted({n for n in names if names.count(n) > 1})]
        for name in names:
            if name not in valid:
                problems.append(
                    f"rules: {name!r} is no rule set of the dialect {self.dialect!r}{suggest_name(name, list(valid))}"
                )
        for rule in self.chosen_rules():
            family = family_of(rule.signal)
            if family not in self.families:
                message = (
                    f"families: rules look at the family {family!r}, which is not measured; add it and run the recipe"
                )
                problems += [message] if message not in problems else []
        return problems

    def _idle_settings(self) -> list[str]:
        looked_at = {rule.setting for rule in self.chosen_rules()}
        thresholds = {name for name in self.fields_of("decision") if name.startswith(("min_", "max_"))}
        given = [(name, name) for name in sorted(thresholds) if getattr(self, name) is not None]
        for language, limits in self.by_language.items():
            given += [(f"by_language.{language}.{name}", name) for name in limits]
        problems = []
        for where, name in given:
            if name not in thresholds:
                problems.append(f"{where}: no such threshold{suggest_name(name, thresholds)}")
            elif name not in looked_at:
                problems.append(f"{where} would be ignored: no rule of {self.dialect!r} that decides looks at it")
        for name in sorted(self.model_fields_set):
            rules = name.partition("_")[0]
            if rules in CUTTING and rules not in (*self.families, *self.cut_lines):
                problems.append(f"{name} would be ignored: the lines of {rules!r} are neither measured nor cut")
        return problems

    def chosen_rules(self) -> list[QualityRule]:
        """The rules that decide, in order."""
        names = DEFAULT_RULES[self.dialect] if self.rules is None else self.rules
        return [rule for name in names for rule in RULES[self.dialect].get(name, ())]


def family_of(column: str) -> str:
    """The family of signals that a column belongs to."""
    return next(family for family, signals in FAMILIES.items() if any(signal.name == column for signal in signals))
