"""The quality signals of a document: name, type, meaning and unit, each named after the work that introduced it.

Signals form families, and a family is measured as a whole or not at all: the columns of a disabled family are null.
Signals of words that whitespace separates are also null for scripts that are written without whitespace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Signal:
    """A measured column of the documents table."""

    name: str
    kind: pa.DataType
    meaning: str
    unit: str = ""


def _ratio(name: str, meaning: str) -> Signal:
    """Return a signal of type float32 with the unit `ratio`."""
    return Signal(name, pa.float32(), meaning, "ratio")


def _count(name: str, meaning: str, unit: str) -> Signal:
    """Return a signal of type int32."""
    return Signal(name, pa.int32(), meaning, unit)


def _grams(sizes: Iterable[int], name: str, meaning: str) -> tuple[Signal, ...]:
    """Return a signal of unit `ratio` for each n-gram size. The size replaces {n} in the name and the meaning."""
    return tuple(_ratio(name.format(n=n), meaning.format(n=n)) for n in sizes)


TOP, REPEATED = (2, 3, 4), range(5, 11)

GOPHER_QUALITY = (
    _count("gopher_num_words", "words with at least one character that is not punctuation", "words"),
    Signal("gopher_mean_word_length", pa.float32(), "mean length of those words", "code points"),
    _ratio("gopher_hash_ratio", "number of # over number of words"),
    _ratio("gopher_ellipsis_ratio", "number of ... and … over number of words"),
    _ratio("gopher_bullet_lines", "lines that begin with a bullet over lines"),
    _ratio("gopher_ellipsis_lines", "lines that end with an ellipsis over lines"),
    _ratio("gopher_alpha_words", "words with a letter over words"),
    _count(
        "gopher_stop_words", "distinct stop words of the language (English: Gopher's eight) among the words", "words"
    ),
)
GOPHER_REPETITION = (
    _ratio("gopher_dup_para_frac", "repeated paragraphs over paragraphs"),
    _ratio("gopher_dup_para_char_frac", "characters in repeated paragraphs over characters"),
    _ratio("gopher_dup_line_frac", "repeated lines over lines"),
    _ratio("gopher_dup_line_char_frac", "characters in repeated lines over characters"),
    *_grams(TOP, "gopher_top_{n}gram", "characters in the most frequent {n}-gram over characters"),
    *_grams(REPEATED, "gopher_dup_{n}gram", "characters in repeated {n}-grams over characters"),
)
C4 = (
    _count("c4_lines_cut", "lines cut by the C4 line rules", "lines"),
    _count("c4_num_sentences", "sentences left after the line rules", "sentences"),
    _count("c4_lorem_ipsum", "occurrences of the placeholder text lorem ipsum", "occurrences"),
    _count("c4_curly_brackets", "occurrences of an opening curly bracket", "occurrences"),
)
FINEWEB = (
    _ratio("fineweb_terminal_lines", "lines that end in terminal punctuation over lines, after the cuts"),
    _ratio("fineweb_short_lines", "lines of at most 30 characters over lines, after the cuts"),
    _ratio("fineweb_dup_line_chars", "characters in repeated lines over characters, after the cuts"),
    _ratio("fineweb_newline_ratio", "newlines over words, after the cuts"),
)
REFINEDWEB = (
    _count("refinedweb_lines_cut", "lines cut by the RefinedWeb line rules", "lines"),
    _ratio("refinedweb_removed_words", "words on what those rules cut over words, as DCLM counts words"),
)
DCLM = (
    _count("dclm_num_words", "words between ASCII whitespace that begin with a letter or digit", "words"),
    Signal("dclm_mean_word_length", pa.float32(), "mean length of words between whitespace", "code points"),
    _ratio("dclm_symbol_ratio", "number of #, ..., . . . and … over words between whitespace"),
    _ratio("dclm_bullet_lines", "lines that begin with ● • * or - over lines that are not blank"),
    _ratio("dclm_ellipsis_lines", "lines that end with an ellipsis over lines that are not blank"),
    _ratio("dclm_alpha_words", "words between whitespace with a letter over such words"),
    _count("dclm_stop_words", "occurrences of the language's stop words between whitespace, in any case", "words"),
    _ratio("dclm_dup_line_frac", "lines that occur more than once, the first included, over lines"),
    _ratio("dclm_dup_para_frac", "paragraphs that occur more than once over paragraphs"),
    _ratio("dclm_dup_line_char_frac", "characters in lines that occur more than once over characters in lines"),
    _ratio("dclm_dup_para_char_frac", "characters in paragraphs that occur more than once over those in paragraphs"),
    *_grams(TOP, "dclm_top_{n}gram", "characters in the longest most frequent {n}-gram of Unicode words over theirs"),
    *_grams(
        REPEATED, "dclm_dup_{n}gram", "characters in words of {n}-grams that occur more than once over those in words"
    ),
)
DOLMA = (
    _count("dolma_num_words", "words between whitespace", "words"),
    Signal("dolma_median_word_length", pa.float32(), "median length of those words", "code points"),
    _ratio("dolma_symbol_ratio", "words with # or … over words"),
    _ratio("dolma_alpha_words", "words with a letter over words"),
    _count("dolma_stop_words", "occurrences of the language's stop words, in their case", "words"),
    _ratio("dolma_bullet_lines", "lines that begin with * or - over lines"),
    _ratio("dolma_ellipsis_lines", "lines that end with … over lines"),
    _ratio("dolma_dup_line_frac", "lines that occur more than once, the first included, over lines"),
    _ratio("dolma_dup_line_char_frac", "characters in lines that occur more than once over characters in words"),
    *_grams(TOP, "dolma_top_{n}gram", "characters in the most frequent {n}-gram over characters in words"),
    *_grams(
        REPEATED, "dolma_dup_{n}gram", "characters in {n}-grams that occur more than once over those in all {n}-grams"
    ),
    _count("dolma_curly_brackets", "occurrences of an opening curly bracket", "occurrences"),
    _count("dolma_lorem_ipsum", "occurrences of lorem ipsum", "occurrences"),
    _count("dolma_javascript", "occurrences of javascript", "occurrences"),
)
REDPAJAMA = (
    _count("ccnet_nlines", "lines", "lines"),
    _count("rps_doc_word_count", "words after normalisation: lower case, no ASCII punctuation", "words"),
    Signal("rps_doc_mean_word_length", pa.float32(), "mean length of those words", "code points"),
    _ratio("rps_doc_symbol_to_word_ratio", "number of #, ... and … over raw words (runs of word characters or others)"),
    _ratio("rps_doc_frac_no_alph_words", "raw words without an ASCII letter over raw words"),
    _ratio("rps_doc_frac_all_caps_words", "raw words in upper case over raw words"),
    _ratio("rps_doc_stop_word_fraction", "raw words among the language's stop words (our list) over raw words"),
    _ratio("rps_doc_frac_unique_words", "distinct words over words"),
    Signal("rps_doc_unigram_entropy", pa.float32(), "entropy of the distribution of words", "nats"),
    _ratio("rps_doc_lorem_ipsum", "number of lorem ipsum over characters after normalisation"),
    _ratio("rps_doc_curly_bracket", "number of curly brackets over characters"),
    _count("rps_doc_num_sentences", "runs of characters up to . ! or ?", "sentences"),
    _ratio("rps_doc_frac_lines_end_with_ellipsis", "lines that end with an ellipsis over lines"),
    _ratio("rps_doc_frac_lines_start_with_bulletpoint", "lines that begin with a bullet over lines"),
    *_grams(TOP, "rps_doc_frac_chars_top_{n}gram", "characters in the most frequent {n}-gram over characters in words"),
    *_grams(
        REPEATED, "rps_doc_frac_chars_dupe_{n}grams", "characters in words of repeated {n}-grams over those in words"
    ),
)
BOILERPLATE = (
    _count(
        "boilerplate_phrases", "occurrences of the language's phrases of menus, consent, accounts, shops", "phrases"
    ),
    _ratio("boilerplate_lines", "lines with such a phrase over lines that are not blank"),
)
MARKUP = (
    _ratio("markup_chars", "characters in HTML tags and character references over characters"),
    _ratio("code_signs", "brackets, operators and other signs of code over characters that are not whitespace"),
    _ratio("code_lines", "lines that end like a statement or block of code over lines that are not blank"),
)
FAMILIES: Mapping[str, tuple[Signal, ...]] = {
    "gopher_repetition": GOPHER_REPETITION,
    "gopher_quality": GOPHER_QUALITY,
    "c4": C4,
    "fineweb": FINEWEB,
    "refinedweb": REFINEDWEB,
    "dclm": DCLM,
    "dolma": DOLMA,
    "redpajama": REDPAJAMA,
    "boilerplate": BOILERPLATE,
    "markup": MARKUP,
}
"""The signals of each family, by the family's name in the recipe."""
SIGNALS: tuple[Signal, ...] = tuple(signal for family in FAMILIES.values() for signal in family)
LINE_SIGNALS = (
    _ratio("rps_lines_ending_with_terminal_punctution_mark", "1 if it ends in . ! ? or ”"),
    _count("rps_lines_javascript_counts", "words that are javascript after normalisation", "words"),
    _count("rps_lines_num_words", "words after normalisation", "words"),
    _ratio("rps_lines_numerical_chars_fraction", "numeric characters over characters, both after normalisation"),
    _ratio("rps_lines_start_with_bulletpoint", "1 if it begins with a bullet"),
    _ratio("rps_lines_uppercase_letter_fraction", "upper case over characters, its newline included"),
    _ratio("refinedweb_line_uppercase", "upper case over characters, without its newline"),
    _ratio("refinedweb_line_digits", "digits over characters, without its newline"),
    _ratio("refinedweb_line_counter", "1 if it is a counter such as 3 likes"),
    _count("refinedweb_line_words", "words between whitespace", "words"),
)
"""The signals of each line of a text, by which lines can be cut later. The table `text` stores one float32 per line."""
REDPAJAMA_COLUMNS: Mapping[str, str] = {
    "ccnet_language_score": "documents.language_score",
    "ccnet_length": "documents.num_chars",
    "ccnet_perplexity": "scores.perplexity",
    "ccnet_bucket": "verdicts.perplexity_bucket",
    "rps_doc_ldnoobw_words": "documents.toxic_words",
    "rps_doc_ml_wikiref_score": "scores.classifier_scores",
    "rps_doc_ml_palm_score": "scores.classifier_scores",
    "rps_doc_ml_wikipedia_score": "scores.classifier_scores",
    "rps_doc_books_importance": "scores.importance",
    "rps_doc_openwebtext_importance": "scores.importance",
    "rps_doc_wikipedia_importance": "scores.importance",
    **{signal.name: f"documents.{signal.name}" for signal in REDPAJAMA},
    **{signal.name: f"text.{signal.name}" for signal in LINE_SIGNALS if signal.name.startswith("rps_")},
}
"""Table and column of each quality signal of RedPajama-V2, by the signal's name there. Some of its signals are not
measured: the UT1 block list, importances corrected for length, and CCNet's values before paragraph deduplication."""
