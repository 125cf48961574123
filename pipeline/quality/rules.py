"""The rules of each dialect: the signal, setting and limit of each check, in the order of the reference implementation.

Neutral rules do not depend on the language (repetition; number of words; symbols, bullets, ellipses; placeholder text
and brackets) and hold for every language. The limits of all others were set on English text: another language has them
only if its profile or `quality.by_language` sets a value. Limits and their order are those of the published
configurations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pipeline.quality.boilerplate import boilerplate_signals, markup_signals
from pipeline.quality.text import TextView
from schemas.config import Section, decision
from schemas.signals import BOILERPLATE, FAMILIES, MARKUP, SIGNALS, Signal

Dialect = Literal["datatrove", "dclm", "dolma", "redpajama"]
OwnFamily = Literal[
    "boilerplate",
    "markup",
]
"""Families of signals that are Penstock's own. Each has a rule set of the same name."""
RuleSet = Literal["gopher_repetition", "gopher_quality", "c4", "fineweb", "refinedweb", "top_ngrams", OwnFamily]
Peers = Literal["gopher_repetition", "gopher_quality", "c4", "fineweb", "refinedweb", "dclm", "dolma", "redpajama"]
Family = Literal[Peers, OwnFamily, "lines"]


class QualityLimits(Section):
    """The limits in the section `[quality]`; one that is not set has the value in LIMITS or the language's profile."""

    max_dup_para_frac: float | None = decision(None)
    """Maximum share of paragraphs that are repeated. This and the next twelve: Gopher, table A1."""
    max_dup_para_char_frac: float | None = decision(None)
    """Maximum share of characters that are in repeated paragraphs."""
    max_dup_line_frac: float | None = decision(None)
    """Maximum share of lines that are repeated."""
    max_dup_line_char_frac: float | None = decision(None)
    """Maximum share of characters that are in repeated lines."""
    max_top_2gram: float | None = decision(None)
    """Maximum share of characters that are in the most frequent 2-gram of words."""
    max_top_3gram: float | None = decision(None)
    """Maximum share of characters that are in the most frequent 3-gram of words."""
    max_top_4gram: float | None = decision(None)
    """Maximum share of characters that are in the most frequent 4-gram of words."""
    max_dup_5gram: float | None = decision(None)
    """Maximum share of characters that are in repeated 5-grams of words."""
    max_dup_6gram: float | None = decision(None)
    """Maximum share of characters that are in repeated 6-grams of words."""
    max_dup_7gram: float | None = decision(None)
    """Maximum share of characters that are in repeated 7-grams of words."""
    max_dup_8gram: float | None = decision(None)
    """Maximum share of characters that are in repeated 8-grams of words."""
    max_dup_9gram: float | None = decision(None)
    """Maximum share of characters that are in repeated 9-grams of words."""
    max_dup_10gram: float | None = decision(None)
    """Maximum share of characters that are in repeated 10-grams of words."""

    min_words: int | None = decision(None)
    """Minimum number of words other than punctuation [words]. This and the next eleven: Gopher, appendix A.1.1."""
    max_words: int | None = decision(None)
    """Maximum number of words other than punctuation [words]."""
    min_mean_word_length: float | None = decision(None)
    """Minimum mean length of these words [code points]."""
    max_mean_word_length: float | None = decision(None)
    """Maximum mean length of these words [code points]."""
    min_median_word_length: float | None = decision(None)
    """Minimum median length of these words, which dolma uses instead of the mean [code points]."""
    max_median_word_length: float | None = decision(None)
    """Maximum median length of these words, which dolma uses instead of the mean [code points]."""
    max_symbol_ratio: float | None = decision(None)
    """Maximum ratio of # and ellipses to words, for dialects that count both together."""
    max_hash_ratio: float | None = decision(None)
    """Maximum ratio of # to words."""
    max_ellipsis_ratio: float | None = decision(None)
    """Maximum ratio of ... and … to words."""
    max_bullet_lines: float | None = decision(None)
    """Maximum share of lines that start with a bullet."""
    max_ellipsis_lines: float | None = decision(None)
    """Maximum share of lines that end with an ellipsis."""
    min_alpha_words: float | None = decision(None)
    """Minimum share of words that contain a letter."""
    min_stop_words: int | None = decision(None)
    """Minimum number of distinct stop words of the language; for English, of Gopher's eight [words]."""

    max_lorem_ipsum: float | None = decision(None)
    """Maximum number of occurrences of `lorem ipsum`; in the dialect redpajama, per character. Source: C4."""
    max_curly_brackets: float | None = decision(None)
    """Maximum number of opening curly brackets, a sign of code or a template; in the dialect redpajama, maximum share
    of characters that are curly brackets. Source: C4."""
    max_javascript: int | None = decision(None)
    """Maximum number of occurrences of `javascript`. Source: C4 as dolma implements it."""
    min_sentences: int | None = decision(None)
    """Minimum number of sentences on the kept lines [sentences]. Source: C4."""

    min_terminal_lines: float | None = decision(None)
    """Minimum share of lines that end in terminal punctuation. This and the next three: FineWeb, section 3.6."""
    max_short_lines: float | None = decision(None)
    """Maximum share of lines with at most 30 characters."""
    max_dup_line_chars: float | None = decision(None)
    """Maximum share of characters that are in repeated lines."""
    max_newline_ratio: float | None = decision(None)
    """Maximum ratio of newlines to words; it is high for lists."""

    max_removed_words: float | None = decision(None)
    """Maximum share of words that RefinedWeb's line rules cut. Source: DCLM."""
    max_boilerplate_lines: float | None = decision(None)
    """Maximum share of lines with a phrase of menus, consent, accounts or shops. This and the next three are Penstock's
    own."""
    max_markup_chars: float | None = decision(None)
    """Maximum share of characters that are in HTML tags and character references."""
    max_code_signs: float | None = decision(None)
    """Maximum share of brackets, operators and similar signs among characters other than whitespace."""
    max_code_lines: float | None = decision(None)
    """Maximum share of lines that end like a statement or block of code."""


@dataclass(frozen=True, slots=True)
class QualityRule:
    """A comparison of a stored signal with a limit."""

    reason: str
    signal: str
    setting: str
    """Field of the section `[quality]` that overrides the limit; its prefix is `min_` or `max_`."""
    limit: float
    """The published limit for English; for every language if the rule is neutral."""
    neutral: bool = False
    """True if the rule does not depend on the language."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """A row of LIMITS: the reason, setting, default limit and meaning of a rule."""

    reason: str
    setting: str
    limit: float
    meaning: str
    neutral: bool = False


LIMITS = (
    _Limit("gopher_dup_para_frac", "max_dup_para_frac", 0.30, "too many repeated paragraphs", True),
    _Limit("gopher_dup_line_frac", "max_dup_line_frac", 0.30, "too many repeated lines", True),
    _Limit(
        "gopher_dup_para_char_frac", "max_dup_para_char_frac", 0.20, "too much of the text in repeated paragraphs", True
    ),
    _Limit("gopher_dup_line_char_frac", "max_dup_line_char_frac", 0.20, "too much of the text in repeated lines", True),
    *(
        _Limit(
            f"gopher_top_{n}gram", f"max_top_{n}gram", limit, f"one {n}-gram of words fills too much of the text", True
        )
        for n, limit in ((2, 0.20), (3, 0.18), (4, 0.16))
    ),
    *(
        _Limit(
            f"gopher_dup_{n}gram",
            f"max_dup_{n}gram",
            limit,
            f"repeated {n}-grams of words fill too much of the text",
            True,
        )
        for n, limit in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
    ),
    _Limit("gopher_short_doc", "min_words", 50, "too few words", True),
    _Limit("gopher_long_doc", "max_words", 100_000, "too many words", True),
    _Limit("gopher_short_words", "min_mean_word_length", 3, "words too short on average"),
    _Limit("gopher_short_words", "min_median_word_length", 3, "words too short on average"),
    _Limit("gopher_long_words", "max_mean_word_length", 10, "words too long on average"),
    _Limit("gopher_long_words", "max_median_word_length", 10, "words too long on average"),
    _Limit("gopher_symbols", "max_symbol_ratio", 0.1, "too many # and ellipses for its words", True),
    _Limit("gopher_hashes", "max_hash_ratio", 0.1, "too many # for its words", True),
    _Limit("gopher_ellipses", "max_ellipsis_ratio", 0.1, "too many ... for its words", True),
    _Limit("gopher_bullet_lines", "max_bullet_lines", 0.9, "almost every line is a bullet", True),
    _Limit("gopher_ellipsis_lines", "max_ellipsis_lines", 0.3, "too many lines trail off", True),
    _Limit("gopher_alpha_words", "min_alpha_words", 0.8, "too few words with a letter"),
    _Limit("gopher_stop_words", "min_stop_words", 2, "too few stop words of its language"),
    _Limit("c4_lorem_ipsum", "max_lorem_ipsum", 0, "placeholder text", True),
    _Limit("c4_curly_bracket", "max_curly_brackets", 0, "curly bracket: code or a template", True),
    _Limit("c4_javascript", "max_javascript", 0, "mentions javascript", True),
    _Limit("c4_too_few_sentences", "min_sentences", 5, "too few sentences on the kept lines"),
    _Limit("fineweb_terminal_lines", "min_terminal_lines", 0.12, "too few lines end like a sentence"),
    _Limit("fineweb_short_lines", "max_short_lines", 0.67, "too many short lines"),
    _Limit("fineweb_dup_line_chars", "max_dup_line_chars", 0.01, "repeated lines after the line rules"),
    _Limit("fineweb_newline_ratio", "max_newline_ratio", 0.3, "too many newlines for its words"),
    _Limit(
        "refinedweb_removed_words",
        "max_removed_words",
        0.05,
        "too much of it on lines of capitals, digits, counters or single words",
    ),
    _Limit(
        "boilerplate_lines",
        "max_boilerplate_lines",
        0.3,
        "too many lines with phrases of menus, consent, accounts or shops",
        True,
    ),
    _Limit("markup_chars", "max_markup_chars", 0.1, "too much of it HTML", True),
    _Limit("code_signs", "max_code_signs", 0.1, "too many brackets and operators", True),
    _Limit("code_lines", "max_code_lines", 0.3, "too many lines end like code", True),
)
"""One row per setting. Repetition: Rae et al. 2021, arXiv 2112.11446, table A1; others: as in the dialects below."""
REASONS: Mapping[str, str] = {row.reason: row.meaning for row in LIMITS}
"""Reason → its meaning; each dialect uses some of these."""
_BY_SETTING = {row.setting: row for row in LIMITS}


def _rules(**signals: str) -> tuple[QualityRule, ...]:
    """Return a rule for each argument `setting=signal`, in order. The setting is the limit of the signal."""
    rows = [(_BY_SETTING[setting], signal) for setting, signal in signals.items()]
    return tuple(QualityRule(row.reason, signal, row.setting, row.limit, row.neutral) for row, signal in rows)


def _repetition(column: str, *settings: str) -> tuple[QualityRule, ...]:
    """Return Gopher's repetition rules for these settings, in order.

    The setting `max_NAME` limits the signal with the name `column` + `NAME`.
    """
    return _rules(**{setting: column + setting.removeprefix("max_") for setting in settings})


_DUP_PARTS = ("max_dup_para_frac", "max_dup_para_char_frac", "max_dup_line_frac", "max_dup_line_char_frac")
_DCLM_PARTS = ("max_dup_line_frac", "max_dup_para_frac", "max_dup_line_char_frac", "max_dup_para_char_frac")
_TOP = tuple(f"max_top_{n}gram" for n in (2, 3, 4))
_DUP = tuple(f"max_dup_{n}gram" for n in range(5, 11))
_RPS_NGRAMS = _rules(
    **{f"max_top_{n}gram": f"rps_doc_frac_chars_top_{n}gram" for n in (2, 3, 4)},
    **{f"max_dup_{n}gram": f"rps_doc_frac_chars_dupe_{n}grams" for n in range(5, 11)},
)
_DATATROVE: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "gopher_repetition": _repetition("gopher_", *_DUP_PARTS, *_TOP, *_DUP),
    "gopher_quality": _rules(
        min_words="gopher_num_words",
        max_words="gopher_num_words",
        min_mean_word_length="gopher_mean_word_length",
        max_mean_word_length="gopher_mean_word_length",
        max_hash_ratio="gopher_hash_ratio",
        max_ellipsis_ratio="gopher_ellipsis_ratio",
        max_bullet_lines="gopher_bullet_lines",
        max_ellipsis_lines="gopher_ellipsis_lines",
        min_alpha_words="gopher_alpha_words",
        min_stop_words="gopher_stop_words",
    ),
    "c4": _rules(
        max_lorem_ipsum="c4_lorem_ipsum",
        max_curly_brackets="c4_curly_brackets",
        min_sentences="c4_num_sentences",
    ),
    "fineweb": _rules(
        min_terminal_lines="fineweb_terminal_lines",
        max_short_lines="fineweb_short_lines",
        max_dup_line_chars="fineweb_dup_line_chars",
        max_newline_ratio="fineweb_newline_ratio",
    ),
}
"""Source: datatrove 0.10.1, `examples/fineweb.py` and the defaults of its filters."""
_DCLM: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "gopher_quality": _rules(
        min_words="dclm_num_words",
        max_words="dclm_num_words",
        min_mean_word_length="dclm_mean_word_length",
        max_mean_word_length="dclm_mean_word_length",
        max_symbol_ratio="dclm_symbol_ratio",
        max_bullet_lines="dclm_bullet_lines",
        max_ellipsis_lines="dclm_ellipsis_lines",
        min_alpha_words="dclm_alpha_words",
        min_stop_words="dclm_stop_words",
    ),
    "gopher_repetition": _repetition("dclm_", *_DCLM_PARTS, *_TOP, *_DUP),
    "refinedweb": _rules(max_removed_words="refinedweb_removed_words"),
}
"""Source: DCLM, `baselines/baselines_configs/dclm_baseline_refinedweb.yaml`."""
_DOLMA: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "c4": _rules(
        max_curly_brackets="dolma_curly_brackets",
        max_lorem_ipsum="dolma_lorem_ipsum",
        max_javascript="dolma_javascript",
    ),
    "gopher_quality": _rules(
        min_words="dolma_num_words",
        max_words="dolma_num_words",
        min_median_word_length="dolma_median_word_length",
        max_median_word_length="dolma_median_word_length",
        max_symbol_ratio="dolma_symbol_ratio",
        min_alpha_words="dolma_alpha_words",
        min_stop_words="dolma_stop_words",
        max_bullet_lines="dolma_bullet_lines",
        max_ellipsis_lines="dolma_ellipsis_lines",
    ),
    "gopher_repetition": (
        *_repetition("dolma_", "max_dup_line_frac"),
        replace(*_repetition("dolma_", "max_dup_line_char_frac"), limit=0.3),
        *_repetition("dolma_", *_DUP),
    ),
    "top_ngrams": _repetition("dolma_", *_TOP),
}
"""Source: dolma, the mixer's exclusions of its CCCC set (tags gopher_v2, c4_v2). They call the most frequent n-grams
`…_2gram`, but the tagger writes `…_2grams`, so these never excluded a document: here they are a separate rule set."""
_REDPAJAMA: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "gopher_quality": _rules(
        min_words="rps_doc_word_count",
        max_words="rps_doc_word_count",
        min_mean_word_length="rps_doc_mean_word_length",
        max_mean_word_length="rps_doc_mean_word_length",
        max_symbol_ratio="rps_doc_symbol_to_word_ratio",
        max_bullet_lines="rps_doc_frac_lines_start_with_bulletpoint",
    ),
    "gopher_repetition": _RPS_NGRAMS,
    "c4": _rules(
        max_lorem_ipsum="rps_doc_lorem_ipsum",
        max_curly_brackets="rps_doc_curly_bracket",
        min_sentences="rps_doc_num_sentences",
    ),
}
"""Source: the example on the dataset's card. It shows Gopher's rules up to the most frequent 2-gram and leaves out the
others, which have Gopher's own limits here. C4's rules have C4's limits."""


class SignalFamily(NamedTuple):
    """A family of Penstock's own signals: the signals, the function that measures them, and the rules on them."""

    signals: tuple[Signal, ...]
    measure: Callable[[TextView, str], Mapping[str, Any]]
    """Function from (whole text, language) to the values of the signals by name."""
    rules: tuple[QualityRule, ...]


_MARKUP_RULES = _rules(max_markup_chars="markup_chars", max_code_signs="code_signs", max_code_lines="code_lines")
OWN_FAMILIES: Mapping[OwnFamily, SignalFamily] = {
    "boilerplate": SignalFamily(BOILERPLATE, boilerplate_signals, _rules(max_boilerplate_lines="boilerplate_lines")),
    "markup": SignalFamily(MARKUP, markup_signals, _MARKUP_RULES),
}
"""Penstock's own families, which are measured with any dialect if the recipe names them or their rules. The rules of
the first two drop 32 of 1,689 real English pages, 16 of them for boilerplate."""
SIGNALS_OF: Mapping[str, tuple[Signal, ...]] = {
    **FAMILIES,
    **{name: family.signals for name, family in OWN_FAMILIES.items()},
}
"""The signals of every family."""
NEW_SIGNALS = tuple(s for family in OWN_FAMILIES.values() for s in family.signals if s not in SIGNALS)
"""Signals that `schemas/signals.py` does not declare: their columns follow all others of `documents`."""
_OURS: Mapping[RuleSet, tuple[QualityRule, ...]] = {name: family.rules for name, family in OWN_FAMILIES.items()}
RULES: Mapping[Dialect, Mapping[RuleSet, tuple[QualityRule, ...]]] = {
    "datatrove": {**_DATATROVE, **_OURS},
    "dclm": {**_DCLM, **_OURS},
    "dolma": {**_DOLMA, **_OURS},
    "redpajama": {**_REDPAJAMA, **_OURS},
}
"""Dialect → rule set → its rules, in the order of the reference implementation."""

DEFAULT_RULES: Mapping[Dialect, tuple[RuleSet, ...]] = {
    "datatrove": ("gopher_repetition", "gopher_quality", "c4", "fineweb"),
    "dclm": ("gopher_quality", "gopher_repetition", "refinedweb"),
    "dolma": ("c4", "gopher_quality", "gopher_repetition"),
    "redpajama": ("gopher_quality", "gopher_repetition"),
}
"""Dialect → default rule sets: those of its published pipeline, in its order."""
