"""The quality stage: measures and stores the signals of each text, and declares the checks on them.

The stage itself drops no document. The checks use stored signals only, so other limits can be tried without reading
text. A limit applies to the language for which it was set: English has the published limits or, if the recipe asks for
them, derived ones; other languages have those of their profiles. A neutral rule has the same limit in every language.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Row, RowFunction
from pipeline.quality.boilerplate import function_words
from pipeline.quality.c4_fineweb import (
    C4LineRules,
    apply_line_rules,
    fineweb_signals,
    keep_all_lines,
    num_sentences,
    structure_cuts,
)
from pipeline.quality.config import QualityConfig
from pipeline.quality.dclm_dolma import dclm_lines, dclm_words, dolma_lines, dolma_words
from pipeline.quality.gopher import STOP_WORDS, gopher_signals, repetition_signals, stop_codes
from pipeline.quality.redpajama import LineCounts, line_signals, redpajama_lines, redpajama_words
from pipeline.quality.refinedweb import RefinedWebRules, apply_refinedweb, share_of_words
from pipeline.quality.repeated_lines import repeated_line_cuts, spans_in_whole_text
from pipeline.quality.rules import NEW_SIGNALS, OWN_FAMILIES, REASONS, QualityLimits, QualityRule
from pipeline.quality.text import TextView
from pipeline.text.profiles import ENGLISH_LIMITS, LanguageProfile, load_profiles
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, splitter_of
from pipeline.text.spans import Span, complement, map_visible_spans, union, without
from pipeline.text.words import CAPACITY, Codes, Vocabulary
from schemas.errors import ConfigError
from schemas.signals import LINE_SIGNALS, SIGNALS
from schemas.tables import field as column

ENGLISH = "en"
NO_CODES: Codes = np.zeros(0, np.uint64)
REPEATED_LINES_CUT = "repeated_lines_cut"
_EMPTY_LINES = re.compile(r"\n\n(\n+)")
_RATIOS = tuple(signal.name for signal in (*SIGNALS, *NEW_SIGNALS) if signal.kind == pa.float32())


@dataclass(frozen=True, eq=False)
class QualityMeasures:
    """The signals to measure on each text and the lines to cut from it."""

    families: frozenset[str] = frozenset(("gopher_repetition", "gopher_quality", "c4", "fineweb"))
    cut_lines: frozenset[str] = frozenset(("c4",))
    """Names of the line rules that cut lines from the text; other line rules only count them."""
    lines: C4LineRules = field(default_factory=C4LineRules)
    refinedweb: RefinedWebRules = field(default_factory=RefinedWebRules)
    keep_structure: bool = False
    """True if the cuts keep short lines and paragraph breaks; the signals do not depend on it."""
    cut_repeated_lines: bool = False
    """True if lines that repeat an earlier line are cut before anything is measured."""
    stop_words: Mapping[str, Codes] = field(default_factory=lambda: {ENGLISH: stop_codes(STOP_WORDS)})
    """Sorted codes of the stop words of each language."""

    def applies(self, rules: str) -> bool:
        """Return True if these line rules ("c4" or "refinedweb") are needed for signals or to cut lines."""
        return rules in self.families or rules in self.cut_lines


def measure(text: str, language: str, measures: QualityMeasures, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the values that the stage adds to a row.

    The values are signals, spans to cut, the text after cuts, the size of this text [bytes] and the hashes of its
    words.
    """
    vocabulary.trim()
    whole = TextView(text, vocabulary)
    if not measures.cut_repeated_lines:
        return _measure(whole, language, measures)
    repeated, number = repeated_line_cuts(text, whole.lines, language)
    row = _measure(TextView(without(text, repeated), vocabulary) if repeated else whole, language, measures)
    row[REPEATED_LINES_CUT] = number
    if repeated:
        row["cuts"] = union(repeated, map_visible_spans(complement(repeated, len(text)), row["cuts"]))
        if "lines" in row:
            row["lines"] = spans_in_whole_text(repeated, len(text), row["lines"])
    return row


def _measure(whole: TextView, language: str, measures: QualityMeasures) -> dict[str, Any]:
    """Return the values that `measure` returns, for a text without repeated lines; `cuts` are spans of this text."""
    text, vocabulary = whole.text, whole.vocabulary
    row = _families(whole, language, measures)
    cuts: list[Span] = []
    body = whole
    lines = LineCounts(whole) if measures.applies("refinedweb") or "lines" in measures.families else None
    if lines is not None and "lines" in measures.families:
        row |= line_signals(lines)
    if measures.applies("c4"):
        signals, c4_cuts, c4_body = _c4(whole, language, measures.lines)
        row |= signals if "c4" in measures.families else {}
        if "c4" in measures.cut_lines:
            cuts, body = c4_cuts, c4_body
    if lines is not None and measures.applies("refinedweb"):
        signals, refinedweb_cuts, refinedweb_body = _refinedweb(lines, language, measures.refinedweb)
        row |= signals if "refinedweb" in measures.families else {}
        if "refinedweb" in measures.cut_lines:
            all_cuts = union(cuts, refinedweb_cuts)
            body = TextView(without(text, all_cuts), vocabulary) if cuts else refinedweb_body
            cuts = all_cuts
    if "fineweb" in measures.families:
        row |= fineweb_signals(body.text, len(body.words.flags))
    if measures.keep_structure:
        cuts = _structure_cuts(whole, lines, language, measures)
        body = TextView(without(text, cuts), vocabulary) if cuts else whole
    row["cuts"], row["_body"], row["_words"] = cuts, body.text, body.keys
    row["num_bytes"] = len(body.text.encode("utf-8", "surrogatepass"))
    # The table stores float32. Values are rounded here too, so that checks on new and on stored values agree.
    measured = [name for name in _RATIOS if row.get(name) is not None]
    row.update(zip(measured, np.array([row[name] for name in measured], np.float32).tolist()))
    return row


def _families(whole: TextView, language: str, measures: QualityMeasures) -> dict[str, Any]:
    """Return the signals of the chosen families that are measured on the whole text, before any cut."""
    families, stop_words = measures.families, measures.stop_words.get(language, NO_CODES)
    spaced = language not in UNSPACED_LANGUAGES  # In the others, whitespace does not separate words.
    row: dict[str, Any] = {}
    if "gopher_repetition" in families:
        row |= repetition_signals(whole.text, whole.words)
    if "gopher_quality" in families:
        row |= gopher_signals(whole.text, whole.lines, whole.words, stop_words)
    if "dclm" in families:
        row |= dclm_lines(whole.text)
        row |= dclm_words(whole, stop_words) if spaced else {}
    if "dolma" in families:
        row |= dolma_lines(whole)
        row |= dolma_words(whole, stop_words) if spaced else {}
    if "redpajama" in families:
        row |= redpajama_lines(whole)
        words = stop_codes(function_words()) if language == ENGLISH else stop_words
        row |= redpajama_words(whole, words) if spaced else {}
    for name, family in OWN_FAMILIES.items():
        row |= family.measure(whole, language) if name in families else {}
    return row


def _c4(whole: TextView, language: str, rules: C4LineRules) -> tuple[dict[str, Any], list[Span], TextView]:
    """Return C4's signals, the spans that its line rules cut, and the text after these cuts."""
    text, lines, counts = whole.text, whole.lines, whole.counts
    kept = apply_line_rules(text, lines, counts, rules) if language == ENGLISH else keep_all_lines(text, counts)
    remains = "".join([text[start:end] for start, end in kept.spans])
    left = TextView(remains, whole.vocabulary) if kept.cited else whole.only(kept.lines, remains)
    signals = {
        "c4_lines_cut": len(counts) - counts.count(0) - len(kept.lines),
        "c4_num_sentences": num_sentences(left.words, [count for count in left.counts if count]),
        "c4_lorem_ipsum": kept.lorem_ipsum,
        "c4_curly_brackets": kept.curly_brackets,
    }
    return signals, complement(kept.spans, len(text)), left


def _refinedweb(
    lines: LineCounts, language: str, rules: RefinedWebRules
) -> tuple[dict[str, Any], list[Span], TextView]:
    """Return RefinedWeb's signals, the spans that its line rules cut, and the text after these cuts."""
    whole = lines.whole
    cuts, num_cut = apply_refinedweb(lines, rules, language == ENGLISH)
    left = TextView(without(whole.text, cuts), whole.vocabulary) if cuts else whole
    signals = {"refinedweb_lines_cut": num_cut, "refinedweb_removed_words": share_of_words(whole, cuts)}
    return signals, cuts, left


def _structure_cuts(whole: TextView, lines: LineCounts | None, language: str, measures: QualityMeasures) -> list[Span]:
    """Return the spans to cut by the rules in `cut_lines`, without the rules on the length or the end of a line."""
    cuts: list[Span] = []
    if "c4" in measures.cut_lines and language == ENGLISH:
        cuts = structure_cuts(whole.text, whole.lines, measures.lines)
    if lines is not None and "refinedweb" in measures.cut_lines:
        rules = replace(measures.refinedweb, keep_structure=True)
        others = apply_refinedweb(lines, rules, language == ENGLISH)[0]
        cuts = _at_most_one_break(whole.text, union(cuts, others)) if cuts and others else cuts or others
    return cuts


def _at_most_one_break(text: str, cuts: list[Span]) -> list[Span]:
    """Return the cuts of two rule sets, extended so that adjacent cuts do not leave two paragraph breaks together."""
    extra = [match.span(1) for match in _EMPTY_LINES.finditer(without(text, cuts))]
    return union(cuts, map_visible_spans(complement(cuts, len(text)), extra))


# The vocabularies (caches of word properties) of a worker: languages with the same tokenizer share one, so that their
# number does not grow with the number of languages.


class Vocabularies:
    """The vocabulary of each language, created on first use; languages with the same tokenizer share one."""

    def __init__(self, capacity: int = CAPACITY):
        self._capacity = capacity
        self._by_splitter: dict[Callable[[str], Sequence[str]], Vocabulary] = {}

    def __getitem__(self, language: str) -> Vocabulary:
        split = splitter_of(language)
        if split not in self._by_splitter:
            self._by_splitter[split] = Vocabulary(split, self._capacity)
        return self._by_splitter[split]


# The stage's functions.


def models(config: QualityConfig) -> dict[str, str]:
    """Return {"profiles": path of the file of language profiles}; empty if quality.profiles is not set."""
    return {"profiles": config.profiles} if config.profiles else {}


def make(config: QualityConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that adds the signals, the cuts and the text after cuts to a row; it drops no document."""
    profiles = load_profiles(models.get("profiles"))
    stop_words = {language: stop_codes(profile.stop_words) for language, profile in profiles.items()}
    vocabularies, measures = Vocabularies(), measures_of(config, stop_words)

    def quality(row: Row) -> None:
        row.update(measure(row["text"], row["language"], measures, vocabularies[row["language"]]))

    return quality


def measures_of(config: QualityConfig, stop_words: Mapping[str, Codes]) -> QualityMeasures:
    """Return the signals to measure and the lines to cut; `stop_words` has the codes of each language's stop words."""
    lines = C4LineRules(config.c4_terminal_punctuation, config.c4_min_line_words, config.c4_max_word_length)
    english = {ENGLISH: stop_codes(STOP_WORDS)}
    refinedweb = RefinedWebRules(config.refinedweb_max_uppercase, config.refinedweb_min_line_words)
    return QualityMeasures(
        families=frozenset(config.families),
        cut_lines=frozenset(config.cut_lines),
        lines=lines,
        refinedweb=refinedweb,
        keep_structure=config.keep_structure,
        cut_repeated_lines=config.cut_repeated_lines,
        stop_words={**stop_words, **english},
    )


def checks(config: QualityConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """Return the check of every chosen rule, in order, with its limit in each language.

    Raises ConfigError if a profile sets a limit that is not a limit of the section `[quality]`.
    """
    profiles = load_profiles(models.get("profiles"))
    thresholds = QualityLimits.model_fields.keys()
    unknown = sorted({name for profile in profiles.values() for name in profile.limits} - thresholds)
    if unknown:
        raise ConfigError(
            f"language profiles {models.get('profiles', '(built-in)')}: expected names of limits in [quality], got "
            f"{unknown}. Run `penstock derive-profiles` again."
        )
    # The built-in profiles were derived with the dialect "datatrove".
    known = profiles if config.dialect == "datatrove" or "profiles" in models else {}
    if config.english_limits == "derived":
        known = {**known, **load_profiles(str(ENGLISH_LIMITS))}
    return [
        Check(rule.reason, rule.signal, rule.setting, limits_of(rule, config, known)) for rule in config.chosen_rules()
    ]


def limits_of(rule: QualityRule, config: QualityConfig, profiles: Mapping[str, LanguageProfile]) -> dict[str, float]:
    """Return the limits of a rule by language. A limit under EVERY is for all languages that are not listed."""
    limits = {language: p.limits[rule.setting] for language, p in profiles.items() if rule.setting in p.limits}
    limits.setdefault(ENGLISH, rule.limit)
    if rule.neutral:
        limits[EVERY] = rule.limit
    given = getattr(config, rule.setting)
    if given is not None:
        limits = dict.fromkeys(limits, given)
    return limits | {
        language: values[rule.setting] for language, values in config.by_language.items() if rule.setting in values
    }


QUALITY = PerDocument(
    name="quality",
    version=2,
    config=QualityConfig,
    reads=("text", "language"),
    adds=(
        *(signal.name for signal in (*SIGNALS, *NEW_SIGNALS)),
        *(REPEATED_LINES_CUT, "cuts", "lines", *(signal.name for signal in LINE_SIGNALS)),
        *("num_bytes", "_body", "_words"),
    ),
    reasons={},
    make=make,
    models=models,
    ends=False,
    verdicts=REASONS,
    checks=checks,
    again="text",
    columns=(
        *(column(s.name, s.kind, s.meaning, s.unit) for s in NEW_SIGNALS),
        column(REPEATED_LINES_CUT, pa.int32(), "lines cut because they repeat an earlier line of the text", "lines"),
    ),
)
