"""Tests of the dialects beside datatrove's: known answers on one text, and on 1,689 pages what their peers decide.

The answers of dolma are those of its package 1.2.1. Those of DCLM and RedPajama-Data come from a transcription of their
functions that was run beside ours on the same texts, on fastText 0.9.2, uniseg 0.10.1 and Python's own `re`; thresholds
and order are those of the peers' configurations.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.engine.rules import KEPT, evaluate_checks
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import checks, make
from schemas.signals import FAMILIES, REDPAJAMA_COLUMNS
from schemas.tables import TABLES

pytestmark = pytest.mark.usefixtures("implementation")
TEXT = (
    "Menu\n\n* The cat's toy, e.g. No. 3.5, cost 1,250 at John's #1 shop…\n"
    "• the cat's toy cost more than the other toy - JavaScript { it's fine }\n"
    "The dog and the cat and the dog and the cat ran home. . .\n\n"
    "The dog and the cat and the dog and the cat ran home. . .\n"
    "LOREM ipsum, THE END ...\n12345\n3 Likes\n1,024 views!\nItems in cart Buy a toy\nNice story read more...\n"
    "Sign-in to the shop\ndon’t\u00a0stop cafés\u202f½ Дом 十年"
)
KNOWN = {
    "dclm_num_words": 77,
    "dclm_mean_word_length": 3.4444444,
    "dclm_symbol_ratio": 0.0666667,
    "dclm_bullet_lines": 2 / 13,
    "dclm_ellipsis_lines": 5 / 13,
    "dclm_alpha_words": 0.8111111,
    "dclm_stop_words": 20,
    "dclm_dup_line_frac": 0.1538462,
    "dclm_dup_line_char_frac": 0.2945736,
    "dclm_dup_para_frac": 0.0,
    "dclm_dup_para_char_frac": 0.0,
    "dclm_top_2gram": 0.1263158,
    "dclm_top_3gram": 0.1263158,
    "dclm_top_4gram": 0.1684211,
    **{f"dclm_dup_{n}gram": 0.2807018 for n in range(5, 11)},
    "refinedweb_lines_cut": 4,
    "refinedweb_removed_words": 0.1558442,
    "dolma_num_words": 90,
    "dolma_median_word_length": 3.0,
    "dolma_symbol_ratio": 0.0222222,
    "dolma_alpha_words": 0.8111111,
    "dolma_stop_words": 16,
    "dolma_bullet_lines": 0.0769231,
    "dolma_ellipsis_lines": 0.0769231,
    "dolma_dup_line_frac": 0.1538462,
    "dolma_dup_line_char_frac": 0.3677419,
    "dolma_top_2gram": 0.116129,
    "dolma_top_3gram": 0.116129,
    "dolma_top_4gram": 0.1548387,
    "dolma_dup_5gram": 0.2205882,
    "dolma_dup_6gram": 0.2029312,
    "dolma_dup_7gram": 0.185022,
    "dolma_dup_8gram": 0.1665944,
    "dolma_dup_9gram": 0.1476562,
    "dolma_dup_10gram": 0.1281595,
    "dolma_curly_brackets": 1,
    "dolma_lorem_ipsum": 1,
    "dolma_javascript": 1,
    "ccnet_nlines": 15,
    "rps_doc_word_count": 81,
    "rps_doc_num_sentences": 10,
    "rps_doc_mean_word_length": 3.4444444,
    "rps_doc_symbol_to_word_ratio": 0.0330579,
    "rps_doc_frac_lines_end_with_ellipsis": 0.2,
    "rps_doc_frac_lines_start_with_bulletpoint": 1 / 15,
    "rps_doc_frac_no_alph_words": 0.3553719,
    "rps_doc_frac_unique_words": 0.617284,
    "rps_doc_unigram_entropy": 3.559117,
    "rps_doc_frac_all_caps_words": 0.0247934,
    "rps_doc_lorem_ipsum": 0.0027855,
    "rps_doc_curly_bracket": 0.0049875,
    "rps_doc_frac_chars_top_2gram": 0.1290323,
    "rps_doc_frac_chars_top_3gram": 0.1290323,
    "rps_doc_frac_chars_top_4gram": 0.172043,
    **{f"rps_doc_frac_chars_dupe_{n}grams": 0.2867384 for n in range(5, 11)},
}
"""Signal → what its peer gives for TEXT."""
OURS = {
    "rps_doc_stop_word_fraction": 25 / 121,
    "boilerplate_phrases": 2,
    "boilerplate_lines": 2 / 13,
    "markup_chars": 0.0,
    "code_signs": 4 / 310,
    "code_lines": 1 / 13,
}
"""Signal → counted by hand."""
LANGUAGES = ("en", "de", "zh")


def measured(text: str, language: str = "en", dialect: str = "datatrove", **fields: Any) -> dict[str, Any]:
    """The row of a text with all families."""
    config = QualityConfig(dialect=dialect, families=(*FAMILIES, "lines"), **fields)
    row: dict[str, Any] = {"text": text, "language": language}
    make(config, {})(row)
    return row


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str, row: dict[str, Any]) -> None:
    assert row[name] == pytest.approx(KNOWN[name], abs=1e-7, rel=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_our_own_signals(name: str, row: dict[str, Any]) -> None:
    assert row[name] == pytest.approx(OURS[name])


@pytest.fixture(scope="module")
def row(implementation: str) -> dict[str, Any]:
    """TEXT measured."""
    return measured(TEXT)


def test_every_signal_has_a_known_answer() -> None:
    peers = ("dclm", "dolma", "redpajama", "refinedweb", "boilerplate", "markup")
    assert {signal.name for family in peers for signal in FAMILIES[family]} == {*KNOWN, *OURS}


def test_every_published_signal_of_redpajama_has_its_column() -> None:
    published = ["rps_doc_ldnoobw_words", "rps_doc_ut1_blacklist", "ccnet_perplexity", "ccnet_length"]
    assert [name for name in published if name not in REDPAJAMA_COLUMNS] == ["rps_doc_ut1_blacklist"]
    for target in REDPAJAMA_COLUMNS.values():
        table, _, column = target.partition(".")
        assert column in TABLES[table].schema.names


def test_all_occurrences_count_and_only_of_what_recurs() -> None:
    text = "a b c d e f a b c d e g"
    row = measured(text)
    assert row["dclm_dup_5gram"] == pytest.approx(10 / 12)
    assert row["rps_doc_frac_chars_dupe_5grams"] == pytest.approx(10 / 12)
    assert row["dolma_dup_5gram"] == pytest.approx(2 * 5 / (8 * 5))
    assert row["gopher_dup_5gram"] == pytest.approx(5 / len(text))
    assert (row["dclm_top_2gram"], row["dclm_dup_6gram"]) == (pytest.approx(4 / 12), 0)


def test_where_nothing_recurs_the_dialects_differ() -> None:
    row = measured("aa bbb c")
    assert [row[name] for name in ("dclm_top_2gram", "rps_doc_frac_chars_top_2gram")] == [0, 0]
    assert row["dolma_top_2gram"] == pytest.approx(5 / 6)  # the first of them, once
    assert [row[f"dolma_{name}"] for name in ("top_4gram", "dup_5gram")] == [None, None]


def test_ties_of_most_frequent_ngrams() -> None:
    text = "a b x long words y a b z long words"  # two bigrams occur twice
    row = measured(text)
    assert row["dclm_top_2gram"] == pytest.approx(2 * 9 / 25)  # the longest
    assert row["dolma_top_2gram"] == row["rps_doc_frac_chars_top_2gram"] == pytest.approx(2 * 2 / 25)  # the first


@pytest.mark.parametrize("text", ["", "\n", " \u00a0 ", ".", "a", "\0", "x\0y z", "\ud800 b"])
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("dialect", ["datatrove", "dclm", "dolma", "redpajama"])
def test_no_text_is_too_small(text: str, language: str, dialect: str) -> None:
    row = measured(text, language, dialect)
    assert row["num_bytes"] == len(row["_body"].encode("utf-8", "surrogatepass"))


def test_words_between_whitespace_are_not_measured_where_writing_has_none() -> None:
    row = measured("我们在北京的大学里学习中文。\n我们在北京的大学里学习中文。", "zh")
    assert not {"dclm_num_words", "dolma_num_words", "rps_doc_word_count"} & row.keys()
    assert (row["dclm_dup_line_frac"], row["dolma_dup_line_frac"]) == (1, 1)
    assert row["boilerplate_phrases"] == 0
    assert measured("x", "xx")["boilerplate_phrases"] is None


def test_zero_bytes_part_words_of_fasttext_alone() -> None:
    assert measured("ab\0cd \0 .\0ef")["dclm_num_words"] == 3
    assert measured("ab\0cd \0 .\0ef")["dolma_num_words"] == 3


DECIDED = {
    "dclm": {"gopher_dup_line_frac": 163, "gopher_dup_5gram": 131, "gopher_short_doc": 69, None: 1148},
    "dolma": {"gopher_dup_line_frac": 177, "c4_curly_bracket": 49, "c4_javascript": 30, None: 1249},
    "redpajama": {"gopher_dup_5gram": 265, "gopher_short_doc": 65, "gopher_top_4gram": 9, None: 1313},
}
"""Dialect → how many of the 1,689 pages its peer drops for some of the reasons, and keeps (None)."""


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DECIDED)
def test_real_pages_are_decided_as_by_the_peer(dialect: str, shared_data: Path) -> None:
    file = shared_data.parent / "peers" / "filters_in.jsonl.gz"
    if not file.exists():
        pytest.skip(f"the pages are not beside the project ({file.name} is missing)")
    config = QualityConfig(dialect=dialect)
    function, rules = make(config, {}), checks(config, {}, {})
    rows: list[dict[str, Any]] = []
    with gzip.open(file, "rt") as lines:
        for line in lines:
            rows.append({"text": json.loads(line)["text"], "language": "en"})
            function(rows[-1])
    columns = {rule.column: pa.array([row[rule.column] for row in rows]) for rule in rules}
    first = evaluate_checks(
        rules, pa.RecordBatch.from_pydict(columns | {"language": pa.array(["en"] * len(rows))})
    ).first
    counts = Counter(None if number == KEPT else rules[number].reason for number in first)
    assert {reason: counts[reason] for reason in DECIDED[dialect]} == DECIDED[dialect]
