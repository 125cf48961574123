"""Tests of perplexity: values by hand, buckets and checks on both sides of each quantile, and invalid settings."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.engine.rules import evaluate_row
from pipeline.engine.stage import Quantile
from pipeline.perplexity.compile import compile_lm
from pipeline.perplexity.stage import (
    COLUMNS,
    HEAD_CUT,
    MIDDLE_CUT,
    PERPLEXITY,
    SCORED,
    PerplexityConfig,
    make_perplexity,
    perplexity_buckets,
    perplexity_of,
    score_with_checkpoint,
)
from schemas.errors import ConfigError, ContractError
from schemas.overrides import load_recipe
from tests.support.tiny_arpa import TINY, write_arpa

CUTOFFS = {HEAD_CUT: {"en": 340.0, "de": 370.0}, MIDDLE_CUT: {"en": 520.0, "de": 590.0}}
"""CCNet's values for its models."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    compile_lm(write_arpa(tmp_path / "en.arpa", TINY), str(tmp_path / "en.lm"), None, "en")
    return str(tmp_path / "en.lm")


def ngram(**settings) -> PerplexityConfig:
    return PerplexityConfig(scorer="ngram", **({"models": {"en": "en.lm"}} | settings))


def measured(model: str, text: str | None, language: str | None = "en") -> dict:
    row = {"language": language, "_body": text}
    assert make_perplexity(ngram(), {"lm_en": model})(row) is None
    return {name: row[name] for name in COLUMNS}


def float32(value: float) -> float:
    return float(np.float32(value))


def test_perplexity_by_hand(model: str) -> None:
    # Line `A b` is p(a|<s>) + p(b|<s> a) + bo(a b) + p(</s>|b) = -0.53125 over 3 tokens; `b` is -1.4375 over 2.
    assert measured(model, "A b\n\nb") == {
        "perplexity": float32(10 ** (1.96875 / 5)),
        "perplexity_tokens": 5,
        "paragraphs": [{"start": 0, "end": 3}, {"start": 5, "end": 6}],
        "paragraph_perplexity": [float32(10 ** (0.53125 / 3)), float32(10 ** (1.4375 / 2))],
    }


def test_spans_are_of_the_text_before_normalization(model: str) -> None:
    text = " \u00c1 \u2014 b\t\n\u2026\r\n\U0001f600 \u00e0"
    row = measured(model, text)
    assert [text[span["start"] : span["end"]] for span in row["paragraphs"]] == text.split("\n")
    # `a - b` has 3 words, `...` one, the last line two; each line end counts.
    assert row["perplexity_tokens"] == 4 + 2 + 3


@pytest.mark.parametrize("text", ["", "\n", " \n\t\r\n\u0301", "\0"])
def test_a_text_without_words_has_no_perplexity(model: str, text: str) -> None:
    empty = {"perplexity": None, "perplexity_tokens": 0, "paragraphs": [], "paragraph_perplexity": []}
    assert measured(model, text) == empty


def test_documents_without_a_model_or_text_are_null(model: str) -> None:
    null = dict.fromkeys(COLUMNS)
    assert measured(model, "a b", "de") == null
    assert measured(model, "a b", None) == null
    assert measured(model, None) == null
    row = {"language": "en", "_body": "a b"}
    make_perplexity(PerplexityConfig(), {})(row)
    assert {name: row[name] for name in COLUMNS} == null


def test_one_word_and_an_unpaired_surrogate(model: str) -> None:
    assert measured(model, "a")["perplexity"] == float32(10 ** (1.5625 / 2))
    # bo(<s>) + p(<unk>) + p(</s>)
    assert measured(model, "\ud800")["perplexity"] == float32(10 ** (3.5 / 2))


def test_a_long_text_is_the_sum_of_its_lines(model: str) -> None:
    lines = ["a b " * 300, "b", "", "a z b"] * 500
    whole = measured(model, "\n".join(lines))
    parts = [measured(model, line) for line in lines if line]
    assert whole["perplexity_tokens"] == sum(part["perplexity_tokens"] for part in parts)
    assert whole["paragraph_perplexity"] == [part["perplexity"] for part in parts]
    nats = math.fsum(math.log(part["perplexity"]) * part["perplexity_tokens"] for part in parts)
    assert whole["perplexity"] == pytest.approx(math.exp(nats / whole["perplexity_tokens"]), rel=1e-6)


def test_the_columns_of_a_checkpoint_are_not_changed() -> None:
    function = make_perplexity(PerplexityConfig(scorer="checkpoint:run"), {"checkpoint": "checkpoint.json"})
    row = {"language": "en", "_body": "a", "perplexity": 12.5}
    function(row)
    assert row["perplexity"] == 12.5
    assert row["paragraphs"] is None


@pytest.mark.parametrize(
    ("log10", "tokens", "expected"),
    [(0.0, 3, 1.0), (-3.0, 3, 10.0), (-1e9, 1, float(np.finfo(np.float32).max)), (-math.inf, 1, 3.4028234663852886e38)],
)
def test_perplexity_of(log10: float, tokens: int, expected: float) -> None:
    assert perplexity_of(log10, tokens) == expected


def test_bucket() -> None:
    values = [339.99, 340.0, 519.99, 520.0, math.nan, 1.0, 1.0]
    heads = [340.0, 340.0, 340.0, 340.0, 340.0, math.nan, 340.0]
    middles = [520.0, 520.0, 520.0, 520.0, 520.0, 520.0, math.nan]
    expected = ["head", "middle", "middle", "tail", "all", "all", "all"]
    assert perplexity_buckets(values, heads, middles).tolist() == expected
    assert perplexity_buckets(values[:4], 340.0, 520.0).tolist() == expected[:4]
    assert perplexity_buckets([], 340.0, 520.0).tolist() == []
    # Compared as float32, as they are stored: 0.1 is not below float32(0.1).
    assert perplexity_buckets(0.1, float32(0.1), 1.0).tolist() == "middle"


HEAD, MIDDLE, TAIL = (339.99, "perplexity_head"), (340.0, "perplexity_middle"), (520.0, "perplexity_tail")


@pytest.mark.parametrize(
    ("keep", "dropped"),
    [
        (("head", "middle", "tail"), []),
        (("tail", "head", "middle"), []),
        (("head", "middle"), [TAIL]),
        (("head",), [MIDDLE, TAIL]),
        (("middle", "tail"), [HEAD]),
        (("tail",), [HEAD, MIDDLE]),
        (("middle",), [HEAD, TAIL]),
    ],
)
def test_kept_buckets_on_both_sides_of_the_cut_offs(keep: tuple, dropped: list) -> None:
    checks = PERPLEXITY.checks(ngram(keep_buckets=keep), {}, CUTOFFS)
    assert {check.reason for check in checks} == {reason for _, reason in dropped}
    for value, reason in (HEAD, MIDDLE, (519.99, "perplexity_middle"), TAIL):
        verdict = evaluate_row(checks, {"language": "en", "perplexity": value})
        assert (verdict and verdict[0]) == (reason if reason in {name for _, name in dropped} else None), value
    # Another language has other quantiles; a language without quantiles, or a null perplexity, passes every check.
    german = evaluate_row(checks, {"language": "de", "perplexity": 369.0})
    assert (german and german[0]) == ("perplexity_head" if HEAD in dropped else None)
    assert evaluate_row(checks, {"language": "fr", "perplexity": 10_000.0}) is None
    assert evaluate_row(checks, {"language": "en", "perplexity": None}) is None


def test_absolute_limits_are_inclusive() -> None:
    config = ngram(min_perplexity=10.0, max_perplexity=1000.0, keep_buckets=("head", "middle"))
    checks = PERPLEXITY.checks(config, {}, CUTOFFS)

    def reason(value: float, language: str = "fr") -> str | None:
        verdict = evaluate_row(checks, {"language": language, "perplexity": value})
        return verdict and verdict[0]

    values = [9.99, 10.0, 1000.0, 1000.1]
    assert [reason(value) for value in values] == ["perplexity_low", None, None, "perplexity_high"]
    assert [reason(value, "en") for value in (1000.0, 1000.1)] == ["perplexity_tail", "perplexity_high"]
    assert {check.reason for check in checks} <= set(PERPLEXITY.verdicts)


def test_quantiles_of_a_config() -> None:
    assert list(PERPLEXITY.quantiles(ngram(head_share=0.25, middle_share=0.5))) == [
        Quantile("perplexity_head", "perplexity", 0.25),
        Quantile("perplexity_middle", "perplexity", 0.5),
    ]
    assert list(PERPLEXITY.quantiles(PerplexityConfig())) == []
    assert list(PERPLEXITY.checks(PerplexityConfig(), {}, {})) == []
    assert list(PERPLEXITY.checks(ngram(keep_buckets=("head",)), {}, {})[0].limits) == []


def test_locations_and_decisions_are_not_content() -> None:
    config = ngram(pieces={"en": "sp.model"}, max_perplexity=9.0)
    assert config.content() == {}
    assert config.decisions() == {
        "head_share": 0.3,
        "middle_share": 0.6,
        "keep_buckets": ["head", "middle", "tail"],
        "min_perplexity": None,
        "max_perplexity": 9.0,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scorer": "kenlm"}, 'scorer: expected "ngram" or "checkpoint:PATH", got \'kenlm\''),
        ({"scorer": "checkpoint:"}, "got 'checkpoint:'"),
        ({"models": {"en": "en.lm"}}, "models would be ignored with scorer = None"),
        ({"max_perplexity": 9.0, "head_share": 0.2}, "head_share, max_perplexity would be ignored with scorer = None"),
        ({"scorer": "ngram"}, r"requires models by language, got none\. Set perplexity\.models"),
        ({"scorer": "ngram", "models": {"en": "x"}, "python": "p"}, "python would be ignored with scorer = 'ngram'"),
        ({"scorer": "checkpoint:run", "models": {"en": "x"}}, "models would be ignored with scorer = 'checkpoint:run'"),
        (
            {"scorer": "ngram", "models": {"en": "x"}, "pieces": {"de": "y"}},
            r"expected languages that perplexity\.models has, got de\. Remove",
        ),
        (
            {"scorer": "checkpoint:run", "head_share": 0.6},
            r"head_share: expected less than middle_share = 0\.6, got 0\.6\. Lower perplexity\.head_share",
        ),
        ({"scorer": "checkpoint:run", "keep_buckets": []}, r"adjacent buckets, each once, got \[\]"),
        ({"scorer": "checkpoint:run", "keep_buckets": ["head", "tail"]}, r"got \['head', 'tail'\]"),
        ({"scorer": "checkpoint:run", "keep_buckets": ["head", "head"]}, r"got \['head', 'head'\]"),
        ({"scorer": "checkpoint:run", "keep_buckets": ["feet"]}, "'feet'"),
        (
            {"scorer": "checkpoint:run", "min_perplexity": 20.0, "max_perplexity": 10.0},
            r"min_perplexity: expected at most max_perplexity = 10\.0, got 20\.0\. Lower perplexity\.min_perplexity",
        ),
    ],
)
def test_invalid_settings_are_rejected(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe({"perplexity": settings}, [], {"perplexity": PerplexityConfig}, "recipe")


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PERPLEXITY.models(PerplexityConfig()) == {}
    config = ngram(models={"en": "en.lm", "de": "de.arpa.bin", "fr": "fr.bin"}, pieces={"de": "sp", "fr": "words"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("pipeline.perplexity.model.find_spec", lambda name: object())
    assert PERPLEXITY.models(config) == {
        "lm_en": "en.lm",
        "lm_de": "de.arpa.bin",
        "lm_fr": "fr.bin",
        "pieces_de": "sp",
    }
    monkeypatch.setattr("pipeline.perplexity.model.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"de\.arpa\.bin: expected the package kenlm for a KenLM binary, got no"):
        PERPLEXITY.models(config)
    assert PERPLEXITY.models(ngram()) == {"lm_en": "en.lm"}


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    files = {name: {"size": 1, "sha256": "0" * 64} for name in ("b.distcp", ".metadata")}
    (tmp_path / "checkpoint.json").write_text(json.dumps({"files": files}))
    assert PERPLEXITY.models(PerplexityConfig(scorer=f"checkpoint:{tmp_path}")) == {
        "checkpoint": f"{tmp_path}/checkpoint.json",
        "checkpoint/.metadata": f"{tmp_path}/.metadata",
        "checkpoint/b.distcp": f"{tmp_path}/b.distcp",
    }
    with pytest.raises(
        ConfigError, match=r"expected a checkpoint folder, got one without a valid checkpoint\.json \(FileNotFound"
    ):
        PERPLEXITY.models(PerplexityConfig(scorer=f"checkpoint:{tmp_path}/none"))


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (
            "import sys; print('x', file=sys.stderr); print('penstock: no checkpoint', file=sys.stderr); sys.exit(2)",
            ConfigError,
            r"expected scores by RUN, got the error: penstock: no checkpoint\. Set perplexity\.scorer to",
        ),
        ("import no_such_torch", ConfigError, "error: ModuleNotFoundError: No module named 'no_such_torch'"),
        ("import os; os._exit(7)", ContractError, r"got the error: exit status 7\."),
    ],
)
def test_errors_of_the_process_of_a_checkpoint(tmp_path: Path, code: str, kind: type, message: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{code}\n")
    python.chmod(0o755)
    config = PerplexityConfig(scorer="checkpoint:RUN", python=str(python))
    with pytest.raises(kind, match=message):
        score_with_checkpoint(config, ["in.parquet"], ["out.parquet"])
    config = PerplexityConfig(scorer="checkpoint:RUN", python=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="expected a Python with torch, got"):
        score_with_checkpoint(config, ["in.parquet"], ["out.parquet"])


def test_many_files_take_several_processes(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'log')!r}, 'a').write(repr(sys.argv[1:]))")
    python.chmod(0o755)
    config = PerplexityConfig(scorer="checkpoint:RUN", python=str(python))
    score_with_checkpoint(config, [f"i{n}" for n in range(257)], [f"o{n}" for n in range(257)])
    first, second = (tmp_path / "log").read_text().replace("][", "]\n[").splitlines()
    assert "'i255', '--out', 'o0'" in first
    assert second == "['-P', '-m', 'train.eval.score', '--checkpoint', 'RUN', '--in', 'i256', '--out', 'o256']"


def test_the_columns_are_those_of_the_table() -> None:
    assert SCORED.names == ["doc_id", *COLUMNS]
    assert set(PERPLEXITY.adds) == set(COLUMNS)
