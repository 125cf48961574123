"""Tests of tokenizers: text survives a round trip, reserved ids cannot be injected, training is deterministic."""

import argparse
import gzip
import hashlib
import inspect
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pipeline.engine.step import TableResult
from pipeline.tokens.tokenizer import (
    CHUNK_CHARS,
    LINE_CHARS,
    PROBE_TEXTS,
    AlphabetTooLarge,
    Tokenizer,
    TokenizerConfig,
    cut_at_newlines,
    load_tokenizer,
    tokenizer_kind,
    train_tokenizer,
    training_lines,
)
from pipeline.tokens.train_tokenizer import MIN_COVERAGE, train_fitting
from schemas.errors import ConfigError
from schemas.tokens import ESCAPE, RESERVED, SPACE, escape, unescape

SAMPLE = [
    inspect.getsource(argparse),
    "Der schnelle braune Fuchs springt über den faulen Hund.\nLe cœur déçu mais l'âme plutôt naïve.",
    "Съешь ещё этих мягких французских булок\n我能吞下玻璃而不伤身体。いろはにほへと",
]
BPE = TokenizerConfig(vocab_size=700)
UNIGRAM = TokenizerConfig(vocab_size=700, algorithm="unigram")


@pytest.fixture(scope="module")
def bpe_model() -> bytes:
    return train_tokenizer(SAMPLE, BPE)


@pytest.fixture(scope="module")
def bpe(bpe_model: bytes) -> Tokenizer:
    return load_tokenizer(bpe_model, "sentencepiece", BPE)


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    return load_tokenizer(train_tokenizer(SAMPLE, UNIGRAM), "sentencepiece", UNIGRAM)


def byte_level(normalizer: object = None) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of the Hugging Face library, trained on the sample."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    if normalizer:
        model.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|start|>"]
    model.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    return model


@pytest.fixture(scope="module")
def given_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("given") / "tokenizer.json"
    byte_level().save(str(path))
    return path


def given_config(path: Path, **settings: object) -> TokenizerConfig:
    return TokenizerConfig.model_validate({"model": str(path), **settings})


@pytest.fixture(scope="module")
def huggingface(given_json: Path) -> Tokenizer:
    return load_tokenizer(given_json, "huggingface", given_config(given_json, special={"eos": "<|endoftext|>"}))


@pytest.fixture(params=["bpe", "unigram", "huggingface"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


# ------------------------------------------------------------------------------------------------------- the contract


@given(st.text())
@example("\u2581 \u2581\ufdd0\ufdd01")
@example(" \n\n  \0\t ")
@example("<bos><eos></s><|endoftext|><sentinel_7><0x0A>")
def test_nothing_is_lost_and_nothing_injected(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids.tolist()) & set(tokenizer.contract.reserved.values())
    assert ids.dtype == tokenizer.contract.dtype


def test_a_text_has_the_same_ids_at_each_call(given_json: Path, tmp_path: Path) -> None:
    model = json.loads(given_json.read_text(encoding="utf-8"))
    model["model"]["dropout"] = 0.3
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    text = "the river and the town beside the river " * 9
    expected = load_tokenizer(given_json, "huggingface", given_config(given_json)).encode(text).tolist()
    loaded = load_tokenizer(path, "huggingface", given_config(path))
    assert all(loaded.encode(text).tolist() == expected for _ in range(9))


def test_marks_that_a_model_does_not_call_special_are_text(tmp_path: Path) -> None:
    model = byte_level()
    model.add_tokens(["<|fim_prefix|>", "<tool_call>", "[INST]", "    ", "tramway"])
    model.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json", "huggingface", given_config(tmp_path / "tokenizer.json"))
    text = "a<|fim_prefix|>b<tool_call>c[INST]    tramway"
    ids = loaded.encode(text).tolist()
    assert loaded.decode(ids) == text
    found = [name for name, number in model.get_vocab().items() if number in ids and number >= 400]
    assert sorted(found) == ["    ", "tramway"]


def test_real_text_in_many_languages_is_kept(tokenizer: Tokenizer, shared_data: Path) -> None:
    counts: dict[str, int] = {}
    for name in ("ud", "lingua"):
        with gzip.open(shared_data / "langid" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                counts[record["lang"]] = counts.get(record["lang"], 0) + 1
                if counts[record["lang"]] <= 20:
                    assert tokenizer.decode(tokenizer.encode(record["text"])) == record["text"]
    assert len(counts) > 70


def test_the_contract_of_a_trained_model(bpe: Tokenizer, bpe_model: bytes) -> None:
    contract = bpe.contract
    assert (contract.kind, contract.vocab_size, contract.dtype) == ("sentencepiece", 700, "uint16")
    assert contract.sha256 == hashlib.sha256(bpe_model).hexdigest()
    assert tuple(contract.reserved) == RESERVED
    assert sorted(contract.reserved.values()) == [0, 1, 2, *range(4, 106)]
    assert [contract.reserved[name] for name in ("pad", "bos", "eos", "mask", "sentinel_99")] == [0, 1, 2, 4, 105]
    assert (contract.before, contract.after) == (["bos"], ["eos"])


def test_reserved_ids_have_no_text(bpe: Tokenizer, huggingface: Tokenizer) -> None:
    for tokenizer in (bpe, huggingface):
        reserved = [tokenizer.contract.reserved[name] for name in ("bos", "eos", "sentinel_3")]
        assert tokenizer.decode([reserved[0], *tokenizer.encode("a b").tolist(), *reserved[1:]]) == "a b"


def test_the_same_sample_gives_the_same_bytes(bpe_model: bytes) -> None:
    assert train_tokenizer(iter(SAMPLE), BPE) == bpe_model
    assert train_tokenizer(SAMPLE, UNIGRAM) == train_tokenizer(SAMPLE, UNIGRAM)
    assert train_tokenizer(SAMPLE[:-1], BPE) != bpe_model


def test_digits_are_split_or_not(bpe: Tokenizer) -> None:
    assert len(bpe.encode("2024")) == 4
    config = TokenizerConfig(vocab_size=700, split_digits=False)
    merged = load_tokenizer(train_tokenizer([*SAMPLE, "2024 " * 400], config), "sentencepiece", config)
    assert len(merged.encode(" 2024 2024")) == 2


# --------------------------------------------------------------------------------------------------------- long texts


@given(
    st.lists(st.sampled_from(["a", " ", "\n", "\n\n", "word ", "\u2581", "é", "\n x"]), max_size=40).map("".join),
    st.integers(1, 9),
)
def test_cutting_after_newlines_changes_nothing(bpe: Tokenizer, text: str, size: int) -> None:
    whole = Tokenizer(bpe.contract, bpe._encode, bpe._decode, cuttable=False).encode(text)
    ends = [0, *(end for end in range(1, len(text)) if text[end - 1] == "\n" and end % size == 0), len(text)]
    parts = [bpe.encode(text[start:end]) for start, end in itertools.pairwise(ends)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_a_long_text_is_encoded_as_if_whole(bpe: Tokenizer) -> None:
    text = "".join(itertools.islice(itertools.cycle(SAMPLE), 4)) + "\n" * 9 + "x" * (3 * CHUNK_CHARS)
    whole = Tokenizer(bpe.contract, bpe._encode, bpe._decode, cuttable=False)
    assert len(text) > 4 * CHUNK_CHARS
    assert bpe.encode(text).tolist() == whole.encode(text).tolist()
    assert bpe.decode(bpe.encode(text)) == text
    assert [ids.tolist() for ids in bpe.encode_batch([text, "", "a"])] == [
        bpe.encode(t).tolist() for t in (text, "", "a")
    ]


def test_cut_at_newlines() -> None:
    text = "x" * CHUNK_CHARS + "\n\n" + "y" * CHUNK_CHARS + "\nz"
    assert [len(span) for span in cut_at_newlines(text)] == [CHUNK_CHARS + 1, CHUNK_CHARS + 2, 1]
    assert "".join(cut_at_newlines(text)) == text
    assert cut_at_newlines("") == []


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (["a\n\nb ", "", "\n"], ["a", "b "]),
        ([SPACE], [f"{ESCAPE}1"]),
        (["x" * LINE_CHARS], ["x" * LINE_CHARS]),
        (["x" * (LINE_CHARS + 1)], ["x" * LINE_CHARS, "x"]),
        (["x" * 2000 + " " + "y" * 2000], ["x" * 2000, " " + "y" * 2000]),
        ([" " + "y" * (LINE_CHARS + 5)], [" " + "y" * (LINE_CHARS - 1), "y" * 6]),
    ],
)
def test_training_lines(texts: list[str], lines: list[str]) -> None:
    assert list(training_lines(texts)) == lines


@given(st.text(alphabet=f"ab01{SPACE}{ESCAPE}"))
def test_escaping_is_undone(text: str) -> None:
    assert SPACE not in escape(text)
    assert unescape(escape(text)) == text


# ------------------------------------------------------------------------------------------------------- given models


def test_missing_reserved_tokens_of_a_json_follow_the_vocabulary(given_json: Path, huggingface: Tokenizer) -> None:
    size = byte_level().get_vocab_size()
    contract = huggingface.contract
    assert (contract.kind, contract.vocab_size) == ("huggingface", size + len(RESERVED) - 1)
    assert contract.reserved["eos"] == tokenizers.Tokenizer.from_file(str(given_json)).token_to_id("<|endoftext|>")
    others = [number for name, number in contract.reserved.items() if name != "eos"]
    assert others == list(range(size, size + len(RESERVED) - 1))


def test_a_given_sentencepiece_model_keeps_its_own_ids(bpe_model: bytes, tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE[0].splitlines()), model_writer=model, vocab_size=500, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        control_symbols=["<cloze>"], minloglevel=2,
    )  # fmt: skip
    config = given_config(tmp_path / "given.model", special={"mask": "<cloze>"}, after=())
    given = load_tokenizer(model.getvalue(), "sentencepiece", config)
    names = ("bos", "eos", "mask", "pad", "tombstone", "sentinel_0")
    assert [given.contract.reserved[name] for name in names] == [1, 2, 3, 500, 501, 502]
    assert (given.contract.vocab_size, given.contract.after) == (500 + len(RESERVED) - 3, [])
    assert given.decode(given.encode(f" two  {SPACE} spaces\n")) == f" two  {SPACE} spaces\n"


def test_a_normalizing_model_is_rejected_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])).save(str(path))
    with pytest.raises(ConfigError, match=r"expected decode\(encode\(x\)\) == x, got 'é é ﬁ ½ å № ａｂ' for 'é e"):
        load_tokenizer(path, "huggingface", given_config(path))
    lossy = load_tokenizer(path, "huggingface", given_config(path, allow_lossy=True))
    assert lossy.decode(lossy.encode("ABC")) == "abc"


@pytest.mark.parametrize("pair", [("``", '"'), ("“", '"'), ("–", "-"), ("…", "..."), ("€", "EUR")])
def test_a_model_that_replaces_quotes_dashes_or_signs_is_rejected(pair: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level(normalizers.Replace(*pair)).save(str(path))
    with pytest.raises(ConfigError, match=r"expected decode\(encode\(x\)\) == x"):
        load_tokenizer(path, "huggingface", given_config(path))


def test_a_model_that_drops_unknown_characters_is_rejected(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE[0].splitlines()),
        model_writer=model,
        vocab_size=200,
        model_type="bpe",
        minloglevel=2,
    )
    path = tmp_path / "given.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(
        ConfigError, match=r"expected decode\(encode\(x\)\) == x, got '' for ' '\. Set tokenizer\.allow_lossy"
    ):
        load_tokenizer(path, "sentencepiece", given_config(path))


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ({"eos": "<|end|>"}, r"special\.eos: expected a token of the model, got '<\|end\|>'\. Set tokenizer\.special"),
        ({"eos": "a"}, r"expected no reserved ids in encoded text, got the id of 'eos' for "),
    ],
)
def test_a_reserved_name_requires_a_special_token(given_json: Path, special: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(given_json, "huggingface", given_config(given_json, special=special))


def test_a_reserved_name_requires_a_control_symbol(bpe_model: bytes, tmp_path: Path) -> None:
    config = given_config(tmp_path / "given.model", special={"mask": "self"})
    message = r"tokenizer\.special\.mask: expected a control symbol of the model, got 'self'\. Set tokenizer\.special"
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(bpe_model, "sentencepiece", config)


@pytest.mark.parametrize(("path", "kind"), [("a/tokenizer.json", "huggingface"), ("a/b.model", "sentencepiece")])
def test_the_kind_follows_the_name(path: str, kind: str) -> None:
    assert tokenizer_kind(path) == kind


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("config", [BPE, UNIGRAM], ids=["bpe", "unigram"])
def test_a_vocabulary_too_large_names_the_largest_possible(config: TokenizerConfig) -> None:
    texts = ["ab ba cab abba " * 9]
    message = r"700 pieces, got a sample of text that has at most (\d+)\. Set tokenizer\.vocab_size to at most \1\."
    with pytest.raises(ConfigError, match=message) as error:
        train_tokenizer(texts, config)
    largest = int(str(error.value).split("at most ")[1].split(".")[0])
    with pytest.raises(ValidationError):  # so little text allows less than any setting
        config.model_validate({"vocab_size": largest})
    assert train_tokenizer(texts, config.model_copy(update={"vocab_size": largest}))


def test_a_vocabulary_too_small_names_the_least() -> None:
    texts = ["".join(map(chr, range(0x4E00, 0x4F00)))]
    config = TokenizerConfig(vocab_size=400, character_coverage=1)
    message = r"expected 400 pieces, got a sample of text whose characters, .* alone are 619\. Set .* to at least 619\."
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(texts, config)
    assert train_tokenizer(texts, TokenizerConfig(vocab_size=619, character_coverage=1))


RARE = "".join(map(chr, range(0x4E00, 0x4F00)))
"""256 characters that are in no other text of the sample."""


def test_a_small_vocabulary_encodes_rare_characters_as_bytes() -> None:
    """600 ids: 363 are reserved ids, bytes and the newline, and a quarter of the other 237 is left to merges."""
    texts, built = [*SAMPLE[:1], RARE], TableResult()
    config = TokenizerConfig(vocab_size=600)
    with pytest.raises(AlphabetTooLarge) as error:
        train_tokenizer(texts, config)
    data = train_fitting(texts, config, built)
    assert built.figures["ids_needed"] == error.value.num_needed > 600
    assert 0 < built.figures["characters_as_bytes"] < 256
    assert 0.5 < built.figures["lowered_coverage"] < 0.9995
    tokenizer = load_tokenizer(data, "sentencepiece", config)
    assert tokenizer.contract.vocab_size == 600
    for text in (*texts, *PROBE_TEXTS):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert train_fitting(texts, config, TableResult()) == data
    # Characters whose frequencies are equal are ordered by code point, so a first one has an id and a last one has not.
    assert [len(tokenizer.encode(character)) for character in (RARE[0], RARE[-1])] == [1, 3]


@pytest.mark.parametrize("settings", [{"vocab_size": 600, "character_coverage": 0.9995}, {"vocab_size": 400}])
def test_a_coverage_that_is_set_or_cannot_fit_is_not_lowered(settings: dict[str, Any]) -> None:
    built = TableResult()
    with pytest.raises(AlphabetTooLarge, match=r"Set tokenizer\.vocab_size to at least \d+"):
        train_fitting([*SAMPLE[:1], RARE], TokenizerConfig(**settings), built)
    assert built.figures == {}


def test_a_vocabulary_that_suffices_is_not_changed(bpe_model: bytes) -> None:
    built = TableResult()
    assert (train_fitting(SAMPLE, BPE, built), built.figures) == (bpe_model, {})


def test_errors_of_an_empty_and_of_a_failing_sample() -> None:
    with pytest.raises(ConfigError, match="expected text to train on, got none"):
        train_tokenizer(["", "\n"], BPE)

    def broken():
        yield "a line"
        raise FileNotFoundError("part-00003")

    with pytest.raises(FileNotFoundError, match="part-00003"):
        train_tokenizer(broken(), BPE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"before": ["boss"]}, "expected names of reserved tokens, got 'boss' (did you mean 'bos'?). Correct"),
        ({"model": "a.json", "special": {"end": "</s>"}}, "expected names of reserved tokens, got 'end'"),
        ({"special": {"eos": "</s>"}}, "special would be ignored, because tokenizer.model is not set. Set tokenizer"),
        (
            {"model": "a.json", "vocab_size": 32000, "algorithm": "bpe"},
            "algorithm, vocab_size would be ignored, because tokenizer.model is set. Remove algorithm, vocab_size from "
            "[tokenizer], or add --unset tokenizer.algorithm --unset tokenizer.vocab_size.",
        ),
        ({"vocab_size": 399}, "greater than or equal to 400"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        TokenizerConfig.model_validate(settings)
    assert message in str(error.value)


def test_every_probe_is_a_different_text() -> None:
    assert len(set(PROBE_TEXTS)) == len(PROBE_TEXTS)


def test_a_text_of_many_rare_characters_ends_no_run() -> None:
    """Their share is larger than SentencePiece may leave out by its coverage."""
    many = "".join(map(chr, range(0x4E00, 0x5E00)))
    texts, built = [*SAMPLE[:1], many], TableResult()
    config = TokenizerConfig(vocab_size=600)
    data = train_fitting(texts, config, built)
    assert built.figures["lowered_coverage"] < MIN_COVERAGE
    tokenizer = load_tokenizer(data, "sentencepiece", config)
    assert tokenizer.contract.vocab_size == 600
    for text in (*texts, *PROBE_TEXTS):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert train_fitting(texts, config, TableResult()) == data
