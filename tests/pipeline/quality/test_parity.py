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

import pyarrow as pa
import pytest

from pipeline.engine.rules import KEPT, evaluate_checks
from pipeline.quality.c4_fineweb import C4LineRules
from pipeline.quality.config import QualityConfig
from pipeline.quality.rules import RuleSet
from pipeline.quality.stage import QualityMeasures, checks, measure
from pipeline.text.spacy_tokens import split_english
from pipeline.text.words import Vocabulary
from schemas.signals import SIGNALS
from schemas.tables import DOCUMENTS

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
SIGNAL_NAMES = [signal.name for signal in SIGNALS if signal.name.startswith(("gopher_", "c4_", "fineweb_"))]
ALL: tuple[RuleSet, ...] = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
CUT, COUNT, TERMINAL = (
    QualityMeasures(),
    QualityMeasures(cut_lines=frozenset()),
    QualityMeasures(lines=C4LineRules(terminal_punctuation=True)),
)
VARIANTS: dict[str, tuple[QualityMeasures, tuple[RuleSet, ...]]] = {
    "gopher_repetition": (CUT, ("gopher_repetition",)),
    "gopher_quality": (CUT, ("gopher_quality",)),
    "c4": (CUT, ("c4",)),
    "chained": (CUT, ALL),
    "fineweb": (COUNT, ("fineweb",)),
    "c4_default": (TERMINAL, ("c4",)),
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


def verdicts(rows: list[dict[str, Any]], sets: tuple[RuleSet, ...]) -> list[str | None]:
    """The reason for which each row is dropped, from the columns as the table stores them."""
    rules = checks(QualityConfig(rules=sets), {}, {})
    columns = {name: pa.array([row[name] for row in rows], DOCUMENTS.field(name).type) for name in SIGNAL_NAMES}
    columns["language"] = pa.array(["en"] * len(rows))
    first = evaluate_checks(rules, pa.RecordBatch.from_pydict(columns)).first
    return [None if number == KEPT else rules[number].reason for number in first]


def disagreements(pages: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str, str | None, str | None]]:
    """(page, variant, our rule or text, the peer's) wherever they differ."""
    vocabulary = Vocabulary(split_english)
    rows = {m: [measure(text, "en", m, vocabulary) for text, _ in pages] for m in (CUT, COUNT, TERMINAL)}
    for name, (measures, sets) in VARIANTS.items():
        ours = verdicts(rows[measures], sets)
        for (text, answer), reason, row in zip(pages, ours, rows[measures]):
            if reason != theirs(answer, name):
                yield answer["id"], name, reason, theirs(answer, name)
            digest = answer.get(f"{name}_sha1")
            # a separator that is not a newline stays as it is: cuts take away and add nothing
            if digest and not any(separator in text for separator in OTHER_SEPARATORS):
                left = hashlib.sha1(row["_body"].encode()).hexdigest()
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
