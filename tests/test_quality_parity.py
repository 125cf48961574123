"""The dialect "datatrove" against datatrove 0.10.1: its decisions and reasons on 1,689 real English pages.

The peer applies each rule set to the raw text, and all of them in FineWeb's order as `chained`. Tokens, decisions,
reasons and the text that C4 leaves are the same on every page; the fast test takes every third.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.pieces import split_english
from pipeline.quality.c4 import LineRules
from pipeline.quality.decide import QualityConfig, RuleSet, decide
from pipeline.quality.measure import measure
from pipeline.words import Vocabulary

NAMES = {
    "dup_para_frac": "gopher_dup_para_frac",
    "dup_para_char_frac": "gopher_dup_para_char_frac",
    "dup_line_frac": "gopher_dup_line_frac",
    "dup_line_char_frac": "gopher_dup_line_char_frac",
    **{f"top_{n}_gram": f"gopher_top_{n}gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"gopher_dup_{n}gram" for n in range(5, 11)},
    "gopher_short_doc": "gopher_short_doc",
    "gopher_long_doc": "gopher_long_doc",
    "gopher_below_avg_threshold": "gopher_short_words",
    "gopher_above_avg_threshold": "gopher_long_words",
    "gopher_too_many_end_ellipsis": "gopher_ellipsis_lines",
    "gopher_below_alpha_threshold": "gopher_alpha_words",
    "gopher_enough_stop_words": "gopher_stop_words",
    "lorem_ipsum": "c4_lorem_ipsum",
    "curly_bracket": "c4_curly_bracket",
    "too_few_sentences": "c4_too_few_sentences",
    "line_punct_ratio": "fineweb_terminal_lines",
    "short_line_ratio": "fineweb_short_lines",
    "char_dup_ratio": "fineweb_dup_line_chars",
    "list_ratio": "fineweb_newline_ratio",
}
"""The peer's reasons → ours."""
OTHER_SEPARATORS = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e")
ALL: tuple[RuleSet, ...] = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
VARIANTS: dict[str, tuple[LineRules, tuple[RuleSet, ...]]] = {
    "gopher_repetition": (LineRules(), ("gopher_repetition",)),
    "gopher_quality": (LineRules(), ("gopher_quality",)),
    "c4": (LineRules(), ("c4",)),
    "chained": (LineRules(), ALL),
    "fineweb": (LineRules(cut=False), ("fineweb",)),
    "c4_default": (LineRules(terminal_punctuation=True), ("c4",)),
}


@pytest.fixture(scope="module")
def pages(shared_data: Path) -> list[tuple[str, dict[str, Any]]]:
    """(text, the peer's answers) of every page."""
    files = [shared_data.parent / "peers" / f"filters_{side}.jsonl.gz" for side in ("in", "out")]
    if not all(file.exists() for file in files):
        pytest.skip(f"the peer's answers are not beside the project ({files[1].name} is missing)")
    with gzip.open(files[0], "rt") as texts, gzip.open(files[1], "rt") as answers:
        return [(json.loads(text)["text"], json.loads(answer)) for text, answer in zip(texts, answers)]


def theirs(answer: dict[str, Any], name: str) -> str | None:
    """The peer's reason in our words; None if it keeps the page."""
    reason = answer[name].partition(":")[2] if name == "chained" and answer[name] else answer[name]
    reason = reason[1] if isinstance(reason, list) else reason
    return NAMES[reason] if reason else None


def disagreements(pages: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str, str | None, str | None]]:
    """(page, variant, our rule or text, the peer's) wherever they differ."""
    vocabulary = Vocabulary(split_english)
    for text, answer in pages:
        rows = {rules: measure(text, "en", rules, vocabulary) for rules in {rules for rules, _ in VARIANTS.values()}}
        for name, (rules, sets) in VARIANTS.items():
            drop = decide(rows[rules], QualityConfig(rules=sets))
            ours, peers = drop.rule if drop else None, theirs(answer, name)
            if ours != peers:
                yield answer["id"], name, ours, peers
            digest = answer.get(f"{name}_sha1")
            # a separator that is not a newline stays as it is: cuts take away and add nothing
            if digest and not any(separator in text for separator in OTHER_SEPARATORS):
                left = hashlib.sha1(rows[rules]["_body"].encode()).hexdigest()
                if left != digest:
                    yield answer["id"], f"{name} text", left, digest


def different_tokens(pages: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """The pages whose tokens are not the peer's, which gives their SHA-1."""
    known: dict[str, Any] = {}
    for text, answer in pages:
        pieces = text.split()
        known |= {piece: split_english(piece) for piece in pieces if piece not in known}
        tokens = [token for piece in pieces for token in known[piece]]
        if hashlib.sha1("\x1f".join(tokens).encode()).hexdigest() != answer["words"]["sha1"]:
            yield answer["id"]


def test_every_third_page(pages: list[tuple[str, dict[str, Any]]]) -> None:
    assert list(different_tokens(pages[::3])) == []
    assert list(disagreements(pages[::3])) == []


@pytest.mark.slow
def test_every_page(pages: list[tuple[str, dict[str, Any]]]) -> None:
    assert len(pages) == 1689
    assert list(different_tokens(pages)) == []
    assert list(disagreements(pages)) == []
