"""The quality signals of a document: name, type, meaning and unit, each named after the work that introduced it.

Where writing does not separate words, a character counts as a word and the n-gram signals are null.
"""

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Signal:
    """One measured column of the documents table."""

    name: str
    kind: pa.DataType
    meaning: str
    unit: str = ""


def _ratio(name: str, meaning: str) -> Signal:
    return Signal(name, pa.float32(), meaning, "ratio")


def _count(name: str, meaning: str, unit: str) -> Signal:
    return Signal(name, pa.int32(), meaning, unit)


GOPHER_QUALITY = (
    _count("gopher_num_words", "words with at least one character that is not punctuation", "words"),
    Signal("gopher_mean_word_length", pa.float32(), "mean length of those words", "code points"),
    _ratio("gopher_hash_ratio", "number of # over number of words"),
    _ratio("gopher_ellipsis_ratio", "number of ... and … over number of words"),
    _ratio("gopher_bullet_lines", "lines that begin with a bullet over lines"),
    _ratio("gopher_ellipsis_lines", "lines that end with an ellipsis over lines"),
    _ratio("gopher_alpha_words", "words with a letter over words"),
    _count("gopher_stop_words", "distinct English stop words of the Gopher list among the words", "words"),
)
GOPHER_REPETITION = (
    _ratio("gopher_dup_para_frac", "repeated paragraphs over paragraphs"),
    _ratio("gopher_dup_para_char_frac", "characters in repeated paragraphs over characters"),
    _ratio("gopher_dup_line_frac", "repeated lines over lines"),
    _ratio("gopher_dup_line_char_frac", "characters in repeated lines over characters"),
    *(_ratio(f"gopher_top_{n}gram", f"characters in the most frequent {n}-gram over characters") for n in (2, 3, 4)),
    *(_ratio(f"gopher_dup_{n}gram", f"characters in repeated {n}-grams over characters") for n in range(5, 11)),
)
C4 = (
    _count("c4_lines_cut", "lines cut by the C4 line rules", "lines"),
    _count("c4_num_sentences", "sentences left after the line rules", "sentences"),
    _count("c4_lorem_ipsum", "occurrences of the placeholder text lorem ipsum", "occurrences"),
    _count("c4_curly_brackets", "occurrences of an opening curly bracket", "occurrences"),
)
FINEWEB = (
    _ratio("fineweb_terminal_lines", "lines that end in terminal punctuation over lines, after the C4 line rules"),
    _ratio("fineweb_short_lines", "lines of at most 30 characters over lines, after the C4 line rules"),
    _ratio("fineweb_dup_line_chars", "characters in repeated lines over characters, after the C4 line rules"),
    _ratio("fineweb_newline_ratio", "newlines over words, after the C4 line rules"),
)
SIGNALS = (
    Signal(
        "quality_scope",
        pa.string(),
        "which rules could decide: `all`, or `neutral` where no rules for the language exist",
    ),
    *GOPHER_REPETITION,
    *GOPHER_QUALITY,
    *C4,
    *FINEWEB,
)
