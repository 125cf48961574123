"""The rules of each dialect: which signal is compared with which setting, in the order in which its peer looks at them.

Neutral rules have no language in their terms (repetition; number of words; symbols, bullets, ellipses; placeholder and
brackets) and hold everywhere. The limits of all others were set on English text: another language has them only where
its profile or the recipe gives a value. Thresholds and their order are those of the peers' own configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Dialect = Literal["datatrove", "dclm", "dolma", "redpajama"]
RuleSet = Literal[
    "gopher_repetition", "gopher_quality", "c4", "fineweb", "refinedweb", "top_ngrams", "boilerplate", "markup"
]


@dataclass(frozen=True, slots=True)
class QualityRule:
    """One comparison of a stored signal with a limit."""

    reason: str
    signal: str
    setting: str
    """Field of the quality section that replaces the limit; its prefix tells the side."""
    limit: float
    """As published, for English; for every language if the rule is neutral."""
    neutral: bool = False


GOPHER_LIMITS = {
    "max_dup_para_frac": 0.30,
    "max_dup_para_char_frac": 0.20,
    "max_dup_line_frac": 0.30,
    "max_dup_line_char_frac": 0.20,
    "max_top_2gram": 0.20,
    "max_top_3gram": 0.18,
    "max_top_4gram": 0.16,
    "max_dup_5gram": 0.15,
    "max_dup_6gram": 0.14,
    "max_dup_7gram": 0.13,
    "max_dup_8gram": 0.12,
    "max_dup_9gram": 0.11,
    "max_dup_10gram": 0.10,
}
"""Source: Rae et al. 2021, arXiv 2112.11446, table A1."""


def _repetition(column: str, *settings: str) -> tuple[QualityRule, ...]:
    """Gopher's repetition rules on the columns that begin like this, in the order of the settings."""
    names = [(setting.removeprefix("max_"), setting) for setting in settings]
    return tuple(
        QualityRule(f"gopher_{name}", column + name, setting, GOPHER_LIMITS[setting], True) for name, setting in names
    )


_DUP_PARTS = ("max_dup_para_frac", "max_dup_para_char_frac", "max_dup_line_frac", "max_dup_line_char_frac")
_DCLM_PARTS = ("max_dup_line_frac", "max_dup_para_frac", "max_dup_line_char_frac", "max_dup_para_char_frac")
_TOP = tuple(f"max_top_{n}gram" for n in (2, 3, 4))
_DUP = tuple(f"max_dup_{n}gram" for n in range(5, 11))
_RPS_NGRAMS = tuple(
    QualityRule(f"gopher_{kind}_{n}gram", f"rps_doc_frac_chars_{column}", f"max_{kind}_{n}gram", limit, True)
    for kind, n, column, limit in (
        *(("top", n, f"top_{n}gram", GOPHER_LIMITS[f"max_top_{n}gram"]) for n in (2, 3, 4)),
        *(("dup", n, f"dupe_{n}grams", GOPHER_LIMITS[f"max_dup_{n}gram"]) for n in range(5, 11)),
    )
)
_DATATROVE: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "gopher_repetition": _repetition("gopher_", *_DUP_PARTS, *_TOP, *_DUP),
    "gopher_quality": (
        QualityRule("gopher_short_doc", "gopher_num_words", "min_words", 50, True),
        QualityRule("gopher_long_doc", "gopher_num_words", "max_words", 100_000, True),
        QualityRule("gopher_short_words", "gopher_mean_word_length", "min_mean_word_length", 3),
        QualityRule("gopher_long_words", "gopher_mean_word_length", "max_mean_word_length", 10),
        QualityRule("gopher_hashes", "gopher_hash_ratio", "max_hash_ratio", 0.1, True),
        QualityRule("gopher_ellipses", "gopher_ellipsis_ratio", "max_ellipsis_ratio", 0.1, True),
        QualityRule("gopher_bullet_lines", "gopher_bullet_lines", "max_bullet_lines", 0.9, True),
        QualityRule("gopher_ellipsis_lines", "gopher_ellipsis_lines", "max_ellipsis_lines", 0.3, True),
        QualityRule("gopher_alpha_words", "gopher_alpha_words", "min_alpha_words", 0.8),
        QualityRule("gopher_stop_words", "gopher_stop_words", "min_stop_words", 2),
    ),
    "c4": (
        QualityRule("c4_lorem_ipsum", "c4_lorem_ipsum", "max_lorem_ipsum", 0, True),
        QualityRule("c4_curly_bracket", "c4_curly_brackets", "max_curly_brackets", 0, True),
        QualityRule("c4_too_few_sentences", "c4_num_sentences", "min_sentences", 5),
    ),
    "fineweb": (
        QualityRule("fineweb_terminal_lines", "fineweb_terminal_lines", "min_terminal_lines", 0.12),
        QualityRule("fineweb_short_lines", "fineweb_short_lines", "max_short_lines", 0.67),
        QualityRule("fineweb_dup_line_chars", "fineweb_dup_line_chars", "max_dup_line_chars", 0.01),
        QualityRule("fineweb_newline_ratio", "fineweb_newline_ratio", "max_newline_ratio", 0.3),
    ),
}
"""Source: datatrove 0.10.1, `examples/fineweb.py` and the defaults of its filters."""
_DCLM: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "gopher_quality": (
        QualityRule("gopher_short_doc", "dclm_num_words", "min_words", 50, True),
        QualityRule("gopher_long_doc", "dclm_num_words", "max_words", 100_000, True),
        QualityRule("gopher_short_words", "dclm_mean_word_length", "min_mean_word_length", 3),
        QualityRule("gopher_long_words", "dclm_mean_word_length", "max_mean_word_length", 10),
        QualityRule("gopher_symbols", "dclm_symbol_ratio", "max_symbol_ratio", 0.1, True),
        QualityRule("gopher_bullet_lines", "dclm_bullet_lines", "max_bullet_lines", 0.9, True),
        QualityRule("gopher_ellipsis_lines", "dclm_ellipsis_lines", "max_ellipsis_lines", 0.3, True),
        QualityRule("gopher_alpha_words", "dclm_alpha_words", "min_alpha_words", 0.8),
        QualityRule("gopher_stop_words", "dclm_stop_words", "min_stop_words", 2),
    ),
    "gopher_repetition": _repetition("dclm_", *_DCLM_PARTS, *_TOP, *_DUP),
    "refinedweb": (QualityRule("refinedweb_removed_words", "refinedweb_removed_words", "max_removed_words", 0.05),),
}
"""Source: DCLM, `baselines/baselines_configs/dclm_baseline_refinedweb.yaml`."""
_DOLMA: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "c4": (
        QualityRule("c4_curly_bracket", "dolma_curly_brackets", "max_curly_brackets", 0, True),
        QualityRule("c4_lorem_ipsum", "dolma_lorem_ipsum", "max_lorem_ipsum", 0, True),
        QualityRule("c4_javascript", "dolma_javascript", "max_javascript", 0, True),
    ),
    "gopher_quality": (
        QualityRule("gopher_short_doc", "dolma_num_words", "min_words", 50, True),
        QualityRule("gopher_long_doc", "dolma_num_words", "max_words", 100_000, True),
        QualityRule("gopher_short_words", "dolma_median_word_length", "min_median_word_length", 3),
        QualityRule("gopher_long_words", "dolma_median_word_length", "max_median_word_length", 10),
        QualityRule("gopher_symbols", "dolma_symbol_ratio", "max_symbol_ratio", 0.1, True),
        QualityRule("gopher_alpha_words", "dolma_alpha_words", "min_alpha_words", 0.8),
        QualityRule("gopher_stop_words", "dolma_stop_words", "min_stop_words", 2),
        QualityRule("gopher_bullet_lines", "dolma_bullet_lines", "max_bullet_lines", 0.9, True),
        QualityRule("gopher_ellipsis_lines", "dolma_ellipsis_lines", "max_ellipsis_lines", 0.3, True),
    ),
    "gopher_repetition": (
        QualityRule("gopher_dup_line_frac", "dolma_dup_line_frac", "max_dup_line_frac", 0.3, True),
        QualityRule("gopher_dup_line_char_frac", "dolma_dup_line_char_frac", "max_dup_line_char_frac", 0.3, True),
        *_repetition("dolma_", *_DUP),
    ),
    "top_ngrams": _repetition("dolma_", *_TOP),
}
"""Source: dolma, the mixer's exclusions of its CCCC set (tags gopher_v2, c4_v2). They name the most frequent n-grams
`…_2gram` where the tagger writes `…_2grams`, so these never excluded a document: here a rule set of its own."""
_REDPAJAMA: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "gopher_quality": (
        QualityRule("gopher_short_doc", "rps_doc_word_count", "min_words", 50, True),
        QualityRule("gopher_long_doc", "rps_doc_word_count", "max_words", 100_000, True),
        QualityRule("gopher_short_words", "rps_doc_mean_word_length", "min_mean_word_length", 3),
        QualityRule("gopher_long_words", "rps_doc_mean_word_length", "max_mean_word_length", 10),
        QualityRule("gopher_symbols", "rps_doc_symbol_to_word_ratio", "max_symbol_ratio", 0.1, True),
        QualityRule("gopher_bullet_lines", "rps_doc_frac_lines_start_with_bulletpoint", "max_bullet_lines", 0.9, True),
    ),
    "gopher_repetition": _RPS_NGRAMS,
    "c4": (
        QualityRule("c4_lorem_ipsum", "rps_doc_lorem_ipsum", "max_lorem_ipsum", 0, True),
        QualityRule("c4_curly_bracket", "rps_doc_curly_bracket", "max_curly_brackets", 0, True),
        QualityRule("c4_too_few_sentences", "rps_doc_num_sentences", "min_sentences", 5),
    ),
}
"""Source: the example of the dataset's card, which gives Gopher's rules up to the most frequent 2-gram and leaves the
others to the reader: here with Gopher's own limits. C4's limits are C4's."""
_OURS: Mapping[RuleSet, tuple[QualityRule, ...]] = {
    "boilerplate": (QualityRule("boilerplate_lines", "boilerplate_lines", "max_boilerplate_lines", 0.3, True),),
    "markup": (
        QualityRule("markup_chars", "markup_chars", "max_markup_chars", 0.1, True),
        QualityRule("code_signs", "code_signs", "max_code_signs", 0.1, True),
        QualityRule("code_lines", "code_lines", "max_code_lines", 0.3, True),
    ),
}
"""Our own, beside any dialect where the recipe names them. Of 1,689 real English pages they drop 32, 16 of them for
boilerplate."""
RULES: Mapping[Dialect, Mapping[RuleSet, tuple[QualityRule, ...]]] = {
    "datatrove": {**_DATATROVE, **_OURS},
    "dclm": {**_DCLM, **_OURS},
    "dolma": {**_DOLMA, **_OURS},
    "redpajama": {**_REDPAJAMA, **_OURS},
}
"""Dialect → rule set → its rules, in the order in which the peer looks at them."""

DEFAULT_RULES: Mapping[Dialect, tuple[RuleSet, ...]] = {
    "datatrove": ("gopher_repetition", "gopher_quality", "c4", "fineweb"),
    "dclm": ("gopher_quality", "gopher_repetition", "refinedweb"),
    "dolma": ("c4", "gopher_quality", "gopher_repetition"),
    "redpajama": ("gopher_quality", "gopher_repetition"),
}
"""Dialect → rule sets that decide where the recipe names none: those of its pipeline, in its order."""

_PARTS = {"para": "paragraphs", "line": "lines"}
REASONS: Mapping[str, str] = {
    **{f"gopher_dup_{part}_frac": f"too many repeated {whole}" for part, whole in _PARTS.items()},
    **{f"gopher_dup_{part}_char_frac": f"too much of the text in repeated {whole}" for part, whole in _PARTS.items()},
    **{f"gopher_top_{n}gram": f"one {n}-gram of words fills too much of the text" for n in (2, 3, 4)},
    **{f"gopher_dup_{n}gram": f"repeated {n}-grams of words fill too much of the text" for n in range(5, 11)},
    "gopher_short_doc": "too few words",
    "gopher_long_doc": "too many words",
    "gopher_short_words": "words too short on average",
    "gopher_long_words": "words too long on average",
    "gopher_symbols": "too many # and ellipses for its words",
    "gopher_hashes": "too many # for its words",
    "gopher_ellipses": "too many ... for its words",
    "gopher_bullet_lines": "almost every line is a bullet",
    "gopher_ellipsis_lines": "too many lines trail off",
    "gopher_alpha_words": "too few words with a letter",
    "gopher_stop_words": "too few stop words of its language",
    "c4_lorem_ipsum": "placeholder text",
    "c4_curly_bracket": "curly bracket: code or a template",
    "c4_javascript": "speaks of javascript",
    "c4_too_few_sentences": "too few sentences on the lines that stay",
    "fineweb_terminal_lines": "too few lines end like a sentence",
    "fineweb_short_lines": "too many short lines",
    "fineweb_dup_line_chars": "repeated lines after the line rules",
    "fineweb_newline_ratio": "too many newlines for its words",
    "refinedweb_removed_words": "too much of it on lines of capitals, digits, counters or single words",
    "boilerplate_lines": "too many lines with phrases of menus, consent, accounts or shops",
    "markup_chars": "too much of it HTML",
    "code_signs": "too many brackets and operators",
    "code_lines": "too many lines end like code",
}
"""Reason → what it means; every dialect drops for some of these."""
