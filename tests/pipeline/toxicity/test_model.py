"""The toxicity classifier: normalized text, n-grams, probabilities of both implementations, and files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.classifier.linear import write_model
from pipeline.toxicity.listed import FEATURES, list_digests, listed_features
from pipeline.toxicity.model import (
    KIND,
    LABELS,
    ToxicityModel,
    all_folded,
    folded,
    load_toxicity,
    ngram_buckets,
    normalize,
    quantized,
    save_toxicity,
)
from pipeline.toxicity.sentences import MAX_SENTENCE, sentence_spans
from schemas.errors import ConfigError
from tests.support.native import needs_native, python_only, tricky_texts

RANDOM = np.random.default_rng(3)
MODEL = ToxicityModel(
    {label: RANDOM.integers(-127, 128, 1 << 12).astype(np.int8) for label in LABELS},
    {"toxic": 0.01, "hate": 0.02},
    {"en": {label: {"bias": 0.25, "threshold": 0.5} for label in LABELS}, "de": {"toxic": {"bias": 0, "threshold": 1}}},
)


@pytest.mark.parametrize(
    ("sentence", "plain"),
    [
        ("", "  "),
        ("?!", "  "),
        ("Hello, World!!", " hello world "),
        ("It's 1999 or 20", " it s 0000 or 00 "),
        ("sooooo goood 111111", " soo good 000000 "),
        ("see https://example.org/a?b=c now", " see now "),
        ("@user_1 hi a@b.c", " hi a@b.c ".replace("@", " ").replace(".", " ")),
        ("http:// is no address, h", " http is no address h "),
        ("ＦＵＬＬ\u200b width ⓐ", " full width a "),
        ("Straße İ", " strasse i "),
        ("a_b__c", " a b c "),
    ],
)
def test_normalized_text(sentence: str, plain: str) -> None:
    assert normalize(folded(sentence)) == plain


@given(st.lists(tricky_texts | st.sampled_from(["", "\0", "\u0301e", "e", "\u1100", "\u1161", "İ", "ß"]), max_size=6))
def test_sentences_are_folded_together_as_each_alone(sentences: list[str]) -> None:
    assert all_folded(sentences) == [folded(sentence) for sentence in sentences]


def test_ngrams_by_hand() -> None:
    buckets, owners = ngram_buckets(["ab", "c"], "en", 1 << 12)
    # " ab " has 4 + 3 + 2 + 1 n-grams of 1 to 4 characters; " c " has 3 + 2 + 1.
    assert np.bincount(owners).tolist() == [10, 6]
    assert buckets.min() >= 0
    assert buckets.max() < 1 << 12
    other, _ = ngram_buckets(["ab", "c"], "de", 1 << 12)
    assert (buckets != other).mean() > 0.9
    alone, _ = ngram_buckets(["c"], "en", 1 << 12)
    assert sorted(alone.tolist()) == sorted(buckets[owners == 1].tolist())
    assert [len(part) for part in ngram_buckets([], "en", 1 << 12)] == [0, 0]


def test_a_probability_by_hand() -> None:
    buckets, _ = ngram_buckets(["ab"], "en", 1 << 12)
    margin = 0.01 * float(MODEL.weights["toxic"][buckets].astype(int).sum()) / np.sqrt(len(buckets)) + 0.25
    found = MODEL.probabilities(["ab"], "en")
    assert list(found) == ["toxic", "hate"]
    assert found["toxic"].tolist() == pytest.approx([1 / (1 + np.exp(-margin))])
    assert MODEL.probabilities(["ab"], "xx") == {}
    assert MODEL.probabilities([], "en") == {}
    assert list(MODEL.probabilities(["ab"], "de")) == ["toxic"]
    at = float(found["toxic"][0])
    values = {"toxic": {"bias": 0.25, "threshold": at}}
    assert ToxicityModel(MODEL.weights, MODEL.scales, {"en": values}).toxic_sentences(["ab"], "en")["toxic"].all()
    values = {"toxic": {"bias": 0.25, "threshold": at + 1e-9}}
    assert not ToxicityModel(MODEL.weights, MODEL.scales, {"en": values}).toxic_sentences(["ab"], "en")["toxic"].any()


def test_listed_words_add_to_the_margin() -> None:
    assert FEATURES == ("hate", "threat", "obscenity", "sexual", "violence", "several")
    sentences = ["A fine day.", "You idiot!", "Damn idiot", "porn"]
    assert listed_features(sentences, "en").astype(int).tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 1],
        [0, 0, 0, 1, 0, 0],
    ]
    assert not listed_features(sentences, "xx").any()
    assert listed_features([], "en").shape == (0, 6)
    values = {"bias": 0.25, "threshold": 0.5}
    more = values | {"listed_obscenity": 1.5, "listed_several": 0.5, "listed_sexual": -1.0}
    plain, added = (ToxicityModel(MODEL.weights, MODEL.scales, {"en": {"toxic": own}}) for own in (values, more))
    margins = [
        np.log(found / (1 - found)) for found in (m.probabilities(sentences, "en")["toxic"] for m in (plain, added))
    ]
    assert (margins[1] - margins[0]).tolist() == pytest.approx([0, 1.5, 2.0, -1.0])
    unlisted = added.probabilities(sentences, "en", may_be_listed=False)["toxic"]
    assert np.array_equal(unlisted, plain.probabilities(sentences, "en")["toxic"])


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(("idiot", "f u", " c k", "sh1t ", "son of", " a bitch", "fine", "\u200b", "* ")), max_size=40
    ),
    st.sampled_from((1, 2, 20)),
)
def test_listed_words_do_not_depend_on_the_other_sentences(parts: list[str], size: int) -> None:
    sentences = ["".join(parts[start : start + size]) for start in range(0, len(parts), size)] or [""]
    alone = np.concatenate([listed_features([sentence], "en") for sentence in sentences])
    assert np.array_equal(listed_features(sentences, "en"), alone)


@needs_native
@settings(max_examples=300)
@given(
    st.lists(
        st.lists(
            st.sampled_from(("http://", "https://x", "@", "user", " ", "aaa", "111", "_", "Hate", "\ud800", "ﬁ"))
            | tricky_texts
        ).map("".join),
        max_size=5,
    )
)
def test_both_implementations_agree(sentences: list[str]) -> None:
    native = MODEL.probabilities(sentences, "en")
    with python_only():
        python = MODEL.probabilities(sentences, "en")
    assert all(np.array_equal(native[label], python[label]) for label in native)


def test_files(tmp_path: Path) -> None:
    save_toxicity(tmp_path / "a.arrow", MODEL)
    save_toxicity(tmp_path / "b.arrow", MODEL)
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()
    read = load_toxicity(str(tmp_path / "a.arrow"), "toxicity.classifier")
    sentences = ["One.", "Another one!"]
    for label, found in MODEL.probabilities(sentences, "en").items():
        assert np.array_equal(read.probabilities(sentences, "en")[label], found)
    write_model(tmp_path / "c.arrow", KIND, {"normalization": 0, "max_ngram": 5}, {"toxic": np.zeros(8, np.int8)})
    with pytest.raises(ConfigError, match=r"expected a model with normalization 1 .* Train it again with"):
        load_toxicity(str(tmp_path / "c.arrow"), "toxicity.classifier")
    header = {"normalization": 1, "max_ngram": 5, "scales": {}, "languages": {"en": {"hate": {}}}}
    write_model(tmp_path / "d.arrow", KIND, header, {"toxic": np.zeros(8, np.int8)})
    with pytest.raises(ConfigError, match=r"expected a column of weights for each label, .* got \['toxic'\] of \[8\]"):
        load_toxicity(str(tmp_path / "d.arrow"), "toxicity.classifier")


def test_a_model_of_other_word_lists_is_refused(tmp_path: Path) -> None:
    assert len(list_digests(["en", "xx"])["en"]) == 64
    assert list(list_digests(["en", "xx"])) == ["en"]
    header = {"normalization": 1, "max_ngram": 5, "scales": {}, "languages": {}, "lists": {"en": "0" * 64}}
    write_model(tmp_path / "a.arrow", KIND, header, {"toxic": np.zeros(8, np.int8)})
    with pytest.raises(ConfigError, match=r"expected a model .* built-in word lists .* got other lists of en in"):
        load_toxicity(str(tmp_path / "a.arrow"), "toxicity.classifier")


def test_quantized() -> None:
    values, scale = quantized(np.array([1.0, -2.0, 0.0]))
    assert (values.tolist(), scale) == ([64, -127, 0], 2 / 127)
    assert quantized(np.zeros(2))[1] == 1.0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("One. Two! Three", ["One. ", "Two! ", "Three"]),
        ("Mr.Smith 3.14 is here", ["Mr.Smith 3.14 is here"]),
        ("“No.” He left.\n\nNext", ["“No.” ", "He left.\n\n", "Next"]),
        ("这是。那是！好", ["这是。", "那是！", "好"]),
        ("यह है। वह", ["यह है। ", "वह"]),
        ("من هذا؟ لا أعرف.", ["من هذا؟ ", "لا أعرف."]),
        ("Ո՞վ է։ Նա։", ["Ո՞վ է։ ", "Նա։"]),
        ("ይህ ነው። ያ", ["ይህ ነው። ", "ያ"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


@given(st.text(alphabet="ab .!\n。", max_size=2000))
def test_sentences_are_the_whole_text(text: str) -> None:
    spans = sentence_spans(text)
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(0 < end - start <= MAX_SENTENCE for start, end in spans if not text[start:end].isspace())


@pytest.mark.parametrize("unit", [".", "...x", "。", "\n", ".'", "! ", ". "])
def test_a_megabyte_is_divided_in_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit)) + "x"
    assert sum(end - start for start, end in sentence_spans(text)) == len(text)


def test_long_sentences_are_divided_at_spaces() -> None:
    text = "word " * 200
    assert all(text[end - 1] == " " for _, end in sentence_spans(text))
    assert len(sentence_spans("x" * 1000)) == 3
