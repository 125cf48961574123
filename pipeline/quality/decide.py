"""The quality stage: every signal is measured on every text, then a cheap comparison with the thresholds decides.

`decide` sees nothing but stored signals, so other thresholds can be tried on the table without the text. Both sides of
a comparison are rounded to float32, as the table stores them: a share of exactly 3/10 is not above a limit of 0.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from pipeline.pieces import split_english, split_neutral
from pipeline.quality.c4 import LineRules
from pipeline.quality.measure import measure
from pipeline.stage import Drop, PerDocument, Row, RowFunction
from pipeline.words import Vocabulary
from schemas.config import Section
from schemas.signals import SIGNALS

RuleSet = Literal["gopher_repetition", "gopher_quality", "c4", "fineweb"]


class QualityConfig(Section):
    """What a document must measure to be kept; `min_` and `max_` are inclusive to keep. Defaults: FineWeb's recipe."""

    dialect: Literal["datatrove"] = "datatrove"
    """Whose reading of the published rules the signals follow."""
    rules: tuple[RuleSet, ...] = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
    """Rule sets that may drop a document, in this order; without c4 no line is cut. All signals are measured anyway."""

    max_dup_para_frac: float = 0.30
    """Repeated paragraphs over paragraphs. This and the next twelve: Gopher, table A1."""
    max_dup_para_char_frac: float = 0.20
    """Characters in repeated paragraphs over characters."""
    max_dup_line_frac: float = 0.30
    """Repeated lines over lines."""
    max_dup_line_char_frac: float = 0.20
    """Characters in repeated lines over characters."""
    max_top_2gram: float = 0.20
    """Characters in the most frequent 2-gram of words over characters."""
    max_top_3gram: float = 0.18
    """The same for 3-grams."""
    max_top_4gram: float = 0.16
    """The same for 4-grams."""
    max_dup_5gram: float = 0.15
    """Characters in repeated 5-grams of words over characters."""
    max_dup_6gram: float = 0.14
    """The same for 6-grams."""
    max_dup_7gram: float = 0.13
    """The same for 7-grams."""
    max_dup_8gram: float = 0.12
    """The same for 8-grams."""
    max_dup_9gram: float = 0.11
    """The same for 9-grams."""
    max_dup_10gram: float = 0.10
    """The same for 10-grams."""

    min_words: int = 50
    """Words that are not mere punctuation [words]. This and the next nine: Gopher, appendix A.1.1."""
    max_words: int = 100_000
    """The same, from above [words]."""
    min_mean_word_length: float = 3.0
    """Mean length of those words [code points]."""
    max_mean_word_length: float = 10.0
    """The same, from above [code points]."""
    max_hash_ratio: float = 0.1
    """Number of # over words."""
    max_ellipsis_ratio: float = 0.1
    """Number of ... and … over words."""
    max_bullet_lines: float = 0.9
    """Lines that begin with a bullet over lines."""
    max_ellipsis_lines: float = 0.3
    """Lines that end with an ellipsis over lines."""
    min_alpha_words: float = 0.8
    """Words with a letter over words."""
    min_stop_words: int = 2
    """Distinct English stop words of Gopher's list of eight [words]."""

    c4_terminal_punctuation: bool = False
    """Whether a line must end in . ? ! or a quote to stay: C4 says yes, FineWeb's recipe no. This and the next two
    change the cuts, and with them the text, so they cannot be tried on the table."""
    c4_min_line_words: int = 3
    """Words between whitespace that a line must have to stay [words]. C4."""
    c4_max_word_length: int = 1000
    """Length of the longest word between whitespace that a line may have to stay [code points]. C4's reference code."""
    max_lorem_ipsum: int = 0
    """Occurrences of lorem ipsum. C4."""
    max_curly_brackets: int = 0
    """Opening curly brackets: the page is code or a template. C4."""
    min_sentences: int = 5
    """Sentences on the lines that stay [sentences]. C4."""

    min_terminal_lines: float = 0.12
    """Lines that end in terminal punctuation over lines. This and the next three: FineWeb, section 3.6."""
    max_short_lines: float = 0.67
    """Lines of at most 30 characters over lines."""
    max_dup_line_chars: float = 0.01
    """Characters in repeated lines over characters."""
    max_newline_ratio: float = 0.3
    """Newlines over words: the page is a list."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One comparison of a stored signal with a limit of the config."""

    reason: str
    signal: str
    limit: str
    """Field of QualityConfig; its prefix tells the side."""
    meaning: str
    neutral: bool = False
    """Whether it also decides where no rules for the language exist."""


def _repetition_rules() -> tuple[Rule, ...]:
    parts = [
        (f"dup_{part}_{kind}", f"too many repeated {whole}s")
        for part, whole in (("para", "paragraph"), ("line", "line"))
        for kind in ("frac", "char_frac")
    ]
    parts += [(f"top_{n}gram", f"one {n}-gram of words fills too much of the text") for n in (2, 3, 4)]
    parts += [(f"dup_{n}gram", f"repeated {n}-grams of words fill too much of the text") for n in range(5, 11)]
    return tuple(Rule(f"gopher_{name}", f"gopher_{name}", f"max_{name}", meaning, True) for name, meaning in parts)


RULES: dict[RuleSet, tuple[Rule, ...]] = {
    "gopher_repetition": _repetition_rules(),
    "gopher_quality": (
        Rule("gopher_short_doc", "gopher_num_words", "min_words", "too few words", True),
        Rule("gopher_long_doc", "gopher_num_words", "max_words", "too many words", True),
        Rule("gopher_short_words", "gopher_mean_word_length", "min_mean_word_length", "words too short on average"),
        Rule("gopher_long_words", "gopher_mean_word_length", "max_mean_word_length", "words too long on average"),
        Rule("gopher_hashes", "gopher_hash_ratio", "max_hash_ratio", "too many # for its words", True),
        Rule("gopher_ellipses", "gopher_ellipsis_ratio", "max_ellipsis_ratio", "too many ... for its words", True),
        Rule("gopher_bullet_lines", "gopher_bullet_lines", "max_bullet_lines", "almost every line is a bullet", True),
        Rule("gopher_ellipsis_lines", "gopher_ellipsis_lines", "max_ellipsis_lines", "too many lines trail off", True),
        Rule("gopher_alpha_words", "gopher_alpha_words", "min_alpha_words", "too few words with a letter"),
        Rule("gopher_stop_words", "gopher_stop_words", "min_stop_words", "too few English stop words"),
    ),
    "c4": (
        Rule("c4_lorem_ipsum", "c4_lorem_ipsum", "max_lorem_ipsum", "placeholder text", True),
        Rule("c4_curly_bracket", "c4_curly_brackets", "max_curly_brackets", "curly bracket: code or a template", True),
        Rule("c4_too_few_sentences", "c4_num_sentences", "min_sentences", "too few sentences on the lines that stay"),
    ),
    "fineweb": (
        Rule(
            "fineweb_terminal_lines",
            "fineweb_terminal_lines",
            "min_terminal_lines",
            "too few lines end like a sentence",
        ),
        Rule("fineweb_short_lines", "fineweb_short_lines", "max_short_lines", "too many short lines"),
        Rule(
            "fineweb_dup_line_chars",
            "fineweb_dup_line_chars",
            "max_dup_line_chars",
            "repeated lines after the line rules",
        ),
        Rule("fineweb_newline_ratio", "fineweb_newline_ratio", "max_newline_ratio", "too many newlines for its words"),
    ),
}
"""Every rule, in the order in which the dialect looks at them.

Neutral, because no language is in their terms: repetition; number of words; symbols, bullets, ellipses; placeholder and
brackets. English alone: length of words, letters, stop words (Gopher); the line rules and sentences (C4: words between
spaces, English phrases), so no line of another language is cut; and FineWeb's four, whose limits were set on English
text after the line rules. Where writing does not separate words, a character counts as one and no n-gram is measured.
"""


@lru_cache(maxsize=256)
def _stored(limit: float) -> float:
    return float(np.float32(limit))


def decide(signals: Mapping[str, Any], config: QualityConfig) -> Drop | None:
    """The first rule that the stored signals break, or None. A signal that is None was not measured and breaks none."""
    everything = signals["quality_scope"] == "all"
    for name in config.rules:
        for rule in RULES[name]:
            value = signals[rule.signal]
            if value is None or not (everything or rule.neutral):
                continue
            limit = getattr(config, rule.limit)
            broken = value < _stored(limit) if rule.limit.startswith("min_") else value > _stored(limit)
            if broken:
                return Drop(rule.reason, value, limit)
    return None


def make(config: QualityConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that adds the signals, cuts and body of a document and decides."""
    english, neutral = Vocabulary(split_english), Vocabulary(split_neutral)
    rules = LineRules(
        "c4" in config.rules, config.c4_terminal_punctuation, config.c4_min_line_words, config.c4_max_word_length
    )

    def quality(row: Row) -> Drop | None:
        vocabulary = english if row["language"] == "en" else neutral
        row.update(measure(row["text"], row["language"], rules, vocabulary))
        return decide(row, config)

    return quality


QUALITY = PerDocument(
    name="quality",
    version=1,
    config=QualityConfig,
    reads=("text", "language"),
    adds=(*(signal.name for signal in SIGNALS), "cuts", "num_bytes", "_body", "_words"),
    reasons={rule.reason: rule.meaning for rules in RULES.values() for rule in rules},
    make=make,
    ends=False,
)
