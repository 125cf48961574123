"""Derived profiles: counted by hand, the same bytes for any files and for a run's stored signals, wrong settings."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.engine.rules import FINE, count_bins
from pipeline.engine.stage import EVERY, Check
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import QUALITY
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.text.derive_profiles import (
    CountTask,
    DeriveConfig,
    derive_profiles,
    frequent_words,
    limits_of,
    script_of,
    signal_histograms,
    stop_words_of,
    word_counts,
    word_ranks,
    words_of,
)
from pipeline.text.profiles import load_profiles
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tables import DOCUMENTS, TEXT
from tests.support.checked_paths import written_part

QUALITY_CONFIG = QualityConfig()
GERMAN = [f"der Hund und die Katze sind im Haus Nummer {n} und nicht auf dem Dach.\n" * (n % 3 + 1) for n in range(12)]
CHINESE = [f"人人生而自由，在尊严和权利上一律平等。第{n}条。" for n in range(12)]
DOCUMENTS_BY_LANGUAGE = [("xa", text) for text in GERMAN] + [("zh", text) for text in CHINESE] + [("xb", "one two")]


def write(path: Path, documents: Sequence[tuple[str, str]]) -> str:
    lines = "".join(json.dumps({"lang": lang, "text": text}) + "\n" for lang, text in documents)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return str(path)


def task_of(path: str, words: dict[str, tuple[str, ...]] | None = None) -> CountTask:
    config = SourceConfig.model_validate({"paths": (path,), "format": "jsonl"})
    return CountTask(find_splits(config)[0], QUALITY_CONFIG, words=words or {})


def settings(**values: object) -> DeriveConfig:
    return DeriveConfig.model_validate({"min_documents": 3, **values})


def test_what_may_be_a_stop_word() -> None:
    assert list(words_of("der Hund, der 3. „im“ x2 में", "de")) == ["der", "der", "im", "में"]
    assert list(words_of("人人生而自由，2024年", "zh")) == ["人", "人生", "而", "自由", "年"]


def test_words_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [("xa", "a b a"), ("xa", "b c"), ("xb", "d")])
    answer = frequent_words(task_of(path), False)
    assert (answer["documents"], answer["totals"], answer["rows"]) == ({"xa": 2, "xb": 1}, {"xa": 5, "xb": 1}, 3)
    assert answer["candidates"] == {"xa": {"a": 0, "b": 0, "c": 0}, "xb": {"d": 0}}
    counted = word_counts(task_of(path, {"xa": ("a", "b")}), False)
    assert (counted["counts"], counted["holding"]) == ({"xa": {"a": 2, "b": 2}}, {"xa": {"a": 1, "b": 2}})


def test_a_rare_word_is_no_candidate(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [("xa", "a " * 1_999 + "b"), ("xa", "c")])
    assert frequent_words(task_of(path), False)["candidates"] == {"xa": {"a": 0}}


def test_the_best_ranks_of_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [("xa", "a b z"), ("xa", "c"), ("xa", "z")])
    ranks = word_ranks(task_of(path, {"xa": ("a", "b", "c")}), False)["ranks"]["xa"]
    assert ranks == {"1": {"1": 1, "3": 1, "4": 1}, "2": {"2": 1, "4": 2}, "3": {"4": 3}, "4": {"4": 3}}


def test_stop_words_until_documents_hold_four() -> None:
    words = tuple("abcdefghijkl")
    config = settings(reference=("x",), tail=0.01)
    sure = {"1": {"1": 100}, "2": {"2": 100}, "3": {"3": 100}}
    assert stop_words_of(words, 3, {**sure, "4": {"4": 100}}, config).words == words[:8]
    assert stop_words_of(words, 9, {**sure, "4": {"4": 100}}, config).words == words[:9]
    late = stop_words_of(words, 3, {**sure, "4": {"4": 90, "10": 10}}, config)
    assert (late.words, late.min_words) == (words[:10], 2)
    # one document of a hundred may be without; two may not, and more words would not help
    assert stop_words_of(words, 3, {**sure, "4": {"4": 99, "13": 1}}, config).min_words == 2
    fewer = stop_words_of(words, 3, {**sure, "4": {"4": 98, "13": 2}}, config)
    assert (fewer.words, fewer.min_words) == (words[:8], 1)
    none = {"1": {"13": 100}, "2": {"13": 100}, "3": {"13": 100}, "4": {"13": 100}}
    assert stop_words_of(words, 3, none, config).min_words == 0


def bins(values: Sequence[float]) -> dict[str, int]:
    return {str(key): count for key, count in count_bins(np.array(values, np.float64), FINE).items()}


def limit(setting: str, published: float, values: Sequence[float], column: str, **more: object) -> float | None:
    """The limit of one rule for English, from these measurements of 100 documents of language xx."""
    check = Check("r", column, setting, {"en": published, **({EVERY: published} if more.get("every") else {})})
    own = {setting: bins(values)}
    peers = {setting: bins(more.get("peers", values))}  # type: ignore[arg-type]
    language = str(more.get("language", "xx"))
    return limits_of(language, [check], own, peers, settings(reference=("x",), tail=0.01)).get(setting)


def test_limits_by_hand() -> None:
    """With 100 documents one may lie beyond; the margin is a quarter of the percentile or of what it leaves to 1."""
    shares = [0.5] * 2 + [0.9] * 98
    assert limit("min_terminal_lines", 0.12, shares, "fineweb_terminal_lines") == 0.12
    assert limit("min_alpha_words", 0.8, shares, "gopher_alpha_words") == 0.375
    assert limit("min_alpha_words", 0.8, [0.5] + [0.9] * 99, "gopher_alpha_words") == 0.8
    assert limit("min_alpha_words", 0.8, [0.76] * 2 + [0.9] * 98, "gopher_alpha_words") == 0.7
    assert limit("max_short_lines", 0.67, [0.8] * 2 + [0.1] * 98, "fineweb_short_lines") == 0.851
    assert limit("max_short_lines", 0.67, [0.8] + [0.1] * 99, "fineweb_short_lines") == 0.67
    assert limit("min_sentences", 5, [3.0] * 2 + [9.0] * 98, "c4_num_sentences") == 2
    assert limit("max_newline_ratio", 0.3, [2.0] * 2 + [0.1] * 98, "fineweb_newline_ratio") == 2.502
    # peers give their percentile without a margin
    assert limit("min_alpha_words", 0.8, [0.9] * 9, "gopher_alpha_words", peers=[0.6] * 100) == 0.6


def test_the_length_of_words_is_scaled_by_the_median() -> None:
    lengths = [2.29] * 100  # half of the English median
    assert limit("max_mean_word_length", 10, lengths, "gopher_mean_word_length") == pytest.approx(5.0, abs=0.01)
    assert limit("min_mean_word_length", 3, lengths, "gopher_mean_word_length") == pytest.approx(1.5, abs=0.01)
    assert limit("max_mean_word_length", 10, [2.29] * 98 + [7.0] * 2, "gopher_mean_word_length") == 7.002


def test_rules_for_every_language_move_for_ngrams_of_dictionary_words_alone() -> None:
    values = [0.3] * 2 + [0.0] * 98
    assert limit("max_dup_5gram", 0.15, values, "gopher_dup_5gram", every=True) is None
    assert limit("max_dup_5gram", 0.15, values, "gopher_dup_5gram", every=True, language="zh") == 0.376
    assert limit("max_dup_5gram", 0.15, [0.0] * 100, "gopher_dup_5gram", every=True, language="zh") is None
    assert limit("max_bullet_lines", 0.9, [1.0] * 100, "gopher_bullet_lines", every=True, language="zh") is None
    assert limit("min_words", 50, [3.0] * 100, "gopher_num_words", every=True, language="zh") is None


def test_scripts() -> None:
    assert script_of(["der", "und"]) == "Latn"
    assert script_of(["的", "の"]) == "Jpan"
    assert script_of(["的", "是"]) == "Hani"
    assert script_of(["в", "и", "x"]) == "Cyrl"
    assert script_of(["1"]) == "Zyyy"


def test_the_file_is_the_same_however_the_text_is_parted(tmp_path: Path) -> None:
    write(tmp_path / "whole.jsonl", DOCUMENTS_BY_LANGUAGE)
    write(tmp_path / "part-1.jsonl", DOCUMENTS_BY_LANGUAGE[::2])
    write(tmp_path / "part-0.jsonl.gz", DOCUMENTS_BY_LANGUAGE[1::2])
    one = derive_profiles(settings(reference=(str(tmp_path / "whole.jsonl"),)), str(tmp_path / "one.toml"))
    derive_profiles(settings(reference=(str(tmp_path / "part-*"),)), str(tmp_path / "two.toml"))
    assert (tmp_path / "one.toml").read_bytes() == (tmp_path / "two.toml").read_bytes()
    assert load_profiles(str(tmp_path / "one.toml")) == one
    assert list(one) == ["xa", "zh"]
    assert {"der", "und", "die", "im", "auf", "nicht"} <= one["xa"].stop_words
    assert {"自由", "和", "在"} <= one["zh"].stop_words
    assert (one["xa"].script, one["zh"].script) == ("Latn", "Hani")
    assert one["xa"].limits["min_stop_words"] == one["zh"].limits["min_stop_words"] == 2


@pytest.mark.spark
def test_workers_count_the_same(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "part-0.jsonl", DOCUMENTS_BY_LANGUAGE[::2])
    write(tmp_path / "part-1.jsonl", DOCUMENTS_BY_LANGUAGE[1::2])
    config = settings(reference=(str(tmp_path / "part-*"),))
    here, there = tmp_path / "here.toml", tmp_path / "there.toml"
    assert derive_profiles(config, str(here)) == derive_profiles(config, str(there), spark)
    assert here.read_bytes() == there.read_bytes()


def test_stored_signals_give_the_same_histograms(tmp_path: Path) -> None:
    """Of a run no text is read for limits; documents of other sources and dropped ones do not count."""
    measure = QUALITY.make(QUALITY_CONFIG, {})
    rows, texts = [], []
    for number, (language, text) in enumerate([*DOCUMENTS_BY_LANGUAGE, ("xa", "other"), ("xa", "dropped")]):
        row = {"doc_id": number.to_bytes(16), "language": language, "text": text, "num_chars": len(text)}
        measure(row)
        row |= {"source": "other" if text == "other" else "books", "body_chars": len(row["_body"])}
        row |= {"drop_stage": "language"} if text == "dropped" else {}
        rows.append(row)
        texts.append({"doc_id": row["doc_id"], "text": text, "cuts": []})
    pq.write_table(pa.Table.from_pylist(rows, DOCUMENTS), tmp_path / "documents.parquet")
    pq.write_table(pa.Table.from_pylist(texts, TEXT), tmp_path / "text.parquet")
    store = Store(str(tmp_path))
    part = written_part(
        0, {"documents": store, "text": store}, {"documents": "documents.parquet", "text": "text.parquet"}
    )
    stored = CountTask(part, QUALITY_CONFIG, ("books",))
    read = task_of(write(tmp_path / "a.jsonl", DOCUMENTS_BY_LANGUAGE))
    assert signal_histograms(stored, False) == signal_histograms(read, False)
    assert frequent_words(stored, False) == frequent_words(read, False)


@pytest.mark.parametrize("line", ['{"lang": "xa"}', '{"lang": "xa", "text": null}', "[]", "no json"])
def test_a_line_that_is_no_document(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"lang": "xa", "text": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: expected an object with the strings `lang` and `text`"):
        derive_profiles(settings(reference=(str(path),)), str(tmp_path / "out.toml"))


def test_too_little_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [("xa", "a"), ("en", "a"), ("en", "a"), ("en", "a")])
    expected = r"expected a language other than en with at least 3 documents, got \{'en': 3, 'xa': 1\}"
    with pytest.raises(ConfigError, match=expected):
        derive_profiles(settings(reference=(path,)), str(tmp_path / "out.toml"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "expected either derive.reference or derive.run, got neither. Set"),
        ({"reference": ("a",), "run": "b"}, "expected either derive.reference or derive.run, got both. Set"),
        ({"reference": ("a",), "sources": ("web",)}, "sources: expected derive.run to be set too, got no run. Remove"),
        ({"reference": ("a",), "min_stop_words": 9, "max_stop_words": 8}, "max_stop_words: expected at least"),
        ({"reference": ("a",), "tail": 0.5}, "less than 0.5"),
    ],
)
def test_wrong_settings(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeriveConfig.model_validate(values)
