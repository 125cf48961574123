"""All signals of one text that are asked for, measured in one walk over its lines and words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.quality.boilerplate import boilerplate, function_words, markup
from pipeline.quality.c4_fineweb import LineRules, apply_line_rules, keep_every_line, num_sentences
from pipeline.quality.dclm_dolma import dclm_lines, dclm_words
from pipeline.quality.dolma import dolma_lines, dolma_words
from pipeline.quality.fineweb import fineweb
from pipeline.quality.gopher import STOP_WORDS, gopher, stop_codes
from pipeline.quality.lines import Lines, line_signals
from pipeline.quality.parts import Parts
from pipeline.quality.redpajama import redpajama_lines, redpajama_words
from pipeline.quality.refinedweb import RefinedWebRules, apply_refinedweb, share_of_words
from pipeline.quality.repetition import repetition
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES
from pipeline.text.spans import Span, between, union, without
from pipeline.text.words import Codes, Vocabulary
from schemas.signals import SIGNALS

ENGLISH = "en"
NO_CODES: Codes = np.zeros(0, np.uint64)
_RATIOS = tuple(signal.name for signal in SIGNALS if signal.kind == pa.float32())


@dataclass(frozen=True, eq=False)
class Measures:
    """What is measured of each text and what is cut from it."""

    families: frozenset[str] = frozenset(("gopher_repetition", "gopher_quality", "c4", "fineweb"))
    cut_lines: frozenset[str] = frozenset(("c4",))
    """Names of the line rules whose finds are cut, not only counted."""
    lines: LineRules = field(default_factory=LineRules)
    refinedweb: RefinedWebRules = field(default_factory=RefinedWebRules)
    stop_words: Mapping[str, Codes] = field(default_factory=lambda: {ENGLISH: stop_codes(STOP_WORDS)})
    """`stop_codes` of the stop words of each language."""

    def wants(self, rules: str) -> bool:
        """Whether line rules are counted or cut."""
        return rules in self.families or rules in self.cut_lines


def measure(text: str, language: str, measures: Measures, vocabulary: Vocabulary) -> dict[str, Any]:
    """The signals of the text, its `cuts`, and of what they leave `num_bytes`, `_body` and `_words` (their xxh64)."""
    vocabulary.trim()
    whole = Parts(text, vocabulary)
    row = _families(whole, language, measures)
    cuts: list[Span] = []
    body = whole
    lines = Lines(whole) if measures.wants("refinedweb") or "lines" in measures.families else None
    if lines is not None and "lines" in measures.families:
        row |= line_signals(lines)
    if measures.wants("c4"):
        signals, found, left = _c4(whole, language, measures.lines)
        row |= signals if "c4" in measures.families else {}
        if "c4" in measures.cut_lines:
            cuts, body = found, left
    if lines is not None and measures.wants("refinedweb"):
        signals, found, left = _refinedweb(lines, language, measures.refinedweb)
        row |= signals if "refinedweb" in measures.families else {}
        if "refinedweb" in measures.cut_lines:
            both = union(cuts, found)
            body = Parts(without(text, both), vocabulary) if cuts else left
            cuts = both
    if "fineweb" in measures.families:
        row |= fineweb(body.text, len(body.words.flags))
    row["cuts"], row["_body"], row["_words"] = cuts, body.text, vocabulary.keys(body.numbers)
    row["num_bytes"] = len(body.text.encode("utf-8", "surrogatepass"))
    # the table stores float32: rounding here makes a decision taken now and one replayed from the table the same
    measured = [name for name in _RATIOS if row.get(name) is not None]
    row.update(zip(measured, np.array([row[name] for name in measured], np.float32).tolist()))
    return row


def _families(whole: Parts, language: str, measures: Measures) -> dict[str, Any]:
    """The signals of all families that look at the whole text, before any cut."""
    families, stop_words = measures.families, measures.stop_words.get(language, NO_CODES)
    spaced = language not in UNSPACED_LANGUAGES  # elsewhere what lies between whitespace is no word
    row: dict[str, Any] = {}
    if "gopher_repetition" in families:
        row |= repetition(whole.text, whole.words)
    if "gopher_quality" in families:
        row |= gopher(whole.text, whole.lines, whole.words, stop_words)
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
    if "boilerplate" in families:
        row |= boilerplate(whole, language)
    if "markup" in families:
        row |= markup(whole)
    return row


def _c4(whole: Parts, language: str, rules: LineRules) -> tuple[dict[str, Any], list[Span], Parts]:
    """The signals of C4, the cuts that its line rules ask for, and what these leave."""
    text, lines, counts = whole.text, whole.lines, whole.counts
    kept = apply_line_rules(text, lines, counts, rules) if language == ENGLISH else keep_every_line(text, counts)
    remains = "".join([text[start:end] for start, end in kept.spans])
    left = Parts(remains, whole.vocabulary) if kept.cited else whole.only(kept.lines, remains)
    signals = {
        "c4_lines_cut": len(counts) - counts.count(0) - len(kept.lines),
        "c4_num_sentences": num_sentences(left.words, [count for count in left.counts if count]),
        "c4_lorem_ipsum": kept.lorem_ipsum,
        "c4_curly_brackets": kept.curly_brackets,
    }
    return signals, between(kept.spans, len(text)), left


def _refinedweb(lines: Lines, language: str, rules: RefinedWebRules) -> tuple[dict[str, Any], list[Span], Parts]:
    """The signals of RefinedWeb, the cuts that its line rules ask for, and what these leave."""
    whole = lines.whole
    cuts, num_cut = apply_refinedweb(lines, rules, language == ENGLISH)
    left = Parts(without(whole.text, cuts), whole.vocabulary) if cuts else whole
    signals = {"refinedweb_lines_cut": num_cut, "refinedweb_removed_words": share_of_words(whole, cuts)}
    return signals, cuts, left
