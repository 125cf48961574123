"""The stage `toxicity`: every limit from both sides, the three actions, what is not measured, and the classifiers."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.classifier.fasttext import load_fasttext
from pipeline.engine.rules import evaluate_row
from pipeline.toxicity.model import LABELS, ToxicityModel, ngram_buckets, save_toxicity
from pipeline.toxicity.stage import (
    BUILT_IN,
    TOXICITY,
    ToxicityConfig,
    checks,
    load_classifiers,
    load_fasttext_score,
    make_toxicity,
    model_files,
)
from pipeline.toxicity.words import LANGUAGES
from schemas.errors import ConfigError, ContractError


def run(text: str, language: str | None = "en", **settings: object) -> tuple[dict, object]:
    config = ToxicityConfig.model_validate(settings)
    row = {
        "text": text,
        "cuts": [],
        "_body": text,
        "_words": None,
        "num_bytes": len(text.encode()),
        "language": language,
    }
    make_toxicity(config, model_files(config))(row)
    return row, evaluate_row(checks(config, {}, {}), row)


@pytest.mark.parametrize(
    ("num_words", "settings", "verdict"),
    [
        (100, {}, None),  # one word of a hundred is the limit itself
        (99, {}, ("toxic_word_share", 1 / 99, 0.01)),
        (99, {"max_word_share": None}, None),
        (99, {"max_word_share": None, "max_words": 1}, None),
        (100, {"max_words": 0}, ("toxic_words", 1, 0)),
    ],
)
def test_limits(num_words: int, settings: dict, verdict: tuple | None) -> None:
    row, drop = run("damn " + "word " * (num_words - 1), **settings)
    assert drop == (verdict and (verdict[0], pytest.approx(verdict[1]), pytest.approx(verdict[2])))
    assert (row["toxic_words"], row["toxic_word_share"], row["toxicity_score"]) == (1, 1 / num_words, None)
    assert set(TOXICITY.adds) <= set(row)


@pytest.mark.parametrize(("language", "settings"), [("eo", {}), (None, {}), ("en", {"wordlists": {}})])
def test_without_a_list_nothing_is_measured(language: str | None, settings: dict) -> None:
    row, drop = run("damn " * 5, language, **settings)
    assert drop is None
    assert (row["toxic_words"], row["toxic_word_share"], row["toxic_word_counts"]) == (None, None, None)
    assert row["toxicity_by"] == "none"


def test_a_list_by_path(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("ばか\n", encoding="utf-8")
    config = ToxicityConfig(wordlists={"ja": str(path), "en": BUILT_IN})
    files = model_files(config)
    assert (files["wordlist_ja"], Path(files["wordlist_en"]).name) == (str(path), "en.txt")
    row, drop = run("お前はばかだ", "ja", wordlists={"ja": str(path)})
    assert (row["toxic_words"], drop[0]) == (1, "toxic_word_share")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A supervised model of two words.

    fastText fills its input matrix in tenths, one a thread: with fewer threads, or where rows x dim is no multiple of
    ten, some of it stays unset.
    """
    import fasttext

    folder = tmp_path_factory.mktemp("model")
    lines = ["__label__toxic nasty nasty nasty", "__label__fine lovely lovely lovely"] * 400
    (folder / "train.txt").write_text("\n".join(lines), encoding="utf-8")
    model = fasttext.train_supervised(str(folder / "train.txt"), dim=10, epoch=25, thread=10, lr=0.5, verbose=0)
    model.save_model(str(folder / "model.bin"))
    return str(folder / "model.bin")


def test_the_classifier_scores_and_drops(classifier: str) -> None:
    settings = {"wordlists": {}, "classifier": classifier, "classifier_label": "__label__toxic"}
    row, drop = run("nasty\nnasty", None, **settings, max_score=0.5)
    assert (drop[0], drop[2]) == ("toxic_score", 0.5)
    assert drop[1] == pytest.approx(row["toxicity_score"])
    assert 0.9 < row["toxicity_score"] <= 1
    row, drop = run("lovely\nlovely", None, **settings, max_score=0.5)
    assert drop is None
    assert 0 <= row["toxicity_score"] < 0.1
    assert run("nasty", None, **settings)[1] is None  # without a limit it only measures
    assert run("nasty", None, **settings, max_score=1)[1] is None  # a maximum is inclusive to keep


@pytest.mark.parametrize("mark", ["</s>", "\n</s>\n", "x </s> </s>", "__label__fine </s>"])
def test_what_follows_a_mark_of_an_end_is_scored_too(classifier: str, mark: str) -> None:
    toxic = load_fasttext_score(classifier, "__label__toxic")
    assert toxic(f"{mark} nasty nasty nasty") > 0.9
    good = load_fasttext(classifier, "__label__fine", "classifier.models.x")
    assert good(f"{mark} nasty nasty nasty") < 0.1


def test_a_label_the_model_lacks_is_named(classifier: str) -> None:
    with pytest.raises(ConfigError, match=r"got '__label__toxi' \(did you mean '__label__toxic'\?\)\. Set"):
        load_fasttext_score(classifier, "__label__toxi")


NASTY, FINE = "You are a nasty fool. ", "The river is wide and calm here. "


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of English that takes sentences with `nasty` for toxic and none for hateful."""
    weights = {label: np.zeros(1 << 14, np.int8) for label in LABELS}
    for word in ("nasty",):
        buckets, _ = ngram_buckets([word], "en", 1 << 14)
        common, _ = ngram_buckets([FINE, "You are a fool."], "en", 1 << 14)
        weights["toxic"][np.setdiff1d(buckets, common)] = 100
    known = {"en": {"toxic": {"bias": -3.0, "threshold": 0.5}, "hate": {"bias": -3.0, "threshold": 0.5}}}
    path = tmp_path_factory.mktemp("sentences") / "model.arrow"
    save_toxicity(path, ToxicityModel(weights, dict.fromkeys(LABELS, 0.1), known))
    return str(path)


def test_sentences_are_scored_and_drop(sentences: str) -> None:
    settings = {"wordlists": {}, "classifier": sentences}
    share = len(NASTY) / len(NASTY + FINE)
    row, drop = run(NASTY + FINE, **settings, max_toxic_share=0.3)
    assert (row["toxic_sentences"], row["toxic_share"], row["hateful_share"]) == (1, pytest.approx(share), 0)
    assert drop == ("toxic_sentences", pytest.approx(share), pytest.approx(0.3))
    assert row["toxicity_by"] == "model"
    assert run(NASTY + FINE, **settings, max_toxic_share=0.6)[1] is None
    assert run(NASTY + FINE, **settings)[1] is None
    row, drop = run(NASTY, "de", **settings, max_toxic_share=0.0)
    assert (row["toxic_share"], row["toxic_sentences"], row["toxicity_by"], drop) == (None, None, "none", None)


def test_hateful_sentences_drop(sentences: str, tmp_path: Path) -> None:
    weights = {label: np.full(1 << 10, 100, np.int8) for label in LABELS}
    known = {"en": {label: {"bias": 0.0, "threshold": 0.5} for label in LABELS}}
    save_toxicity(tmp_path / "all.arrow", ToxicityModel(weights, dict.fromkeys(LABELS, 1.0), known))
    settings = {"wordlists": {}, "classifier": str(tmp_path / "all.arrow")}
    assert run(FINE, **settings, max_hateful_share=0.9)[1] == ("hateful_sentences", 1.0, pytest.approx(0.9))
    assert run(FINE, **settings, max_hateful_share=1.0)[1] is None


def test_toxic_sentences_are_cut(sentences: str) -> None:
    text = FINE + NASTY + FINE + "What the f*ck. " + FINE
    row, drop = run(text, classifier=sentences, action="cut_sentences")
    assert (row["_body"], drop) == (FINE * 3, None)
    start = len(FINE)
    assert row["cuts"] == [(start, start + len(NASTY)), (start + len(NASTY + FINE), len(text) - len(FINE))]
    assert row["toxic_cut_share"] == pytest.approx(1 - 3 * len(FINE) / len(text))
    assert row["num_bytes"] == len(row["_body"])
    assert (row["toxic_words"], row["toxic_sentences"]) == (1, 1)  # measured before the cut
    row, drop = run(NASTY + "Damn. ", classifier=sentences, action="cut_sentences")
    assert (row["_body"], drop) == ("", ("toxic_cut", 1.0, 0.5))
    assert run(NASTY + "Damn. ", classifier=sentences, action="cut_sentences", max_cut_share=None)[1] is None
    row, drop = run(FINE, classifier=sentences, action="cut_sentences")
    assert (row["_body"], row["cuts"], row["toxic_cut_share"], drop) == (FINE, [], 0.0, None)


LONG = "the river is wide and calm, "


@pytest.mark.parametrize(
    ("before", "listed"),
    [
        ("", "I am going\nto kill you"),
        (FINE, "f. u. c. k."),
        *((LONG * 14 + "x" * extra + " ", "son of a bitch") for extra in range(1, 12)),
        *((LONG * 14 + "x" * extra + " ", "motherfucker") for extra in range(1, 12)),
    ],
)
def test_a_listed_phrase_over_the_ends_of_sentences_is_cut(before: str, listed: str, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("going to kill you\nfuck\nson of a bitch\nmotherfucker\n", encoding="utf-8")
    text = f"{FINE}{before}{listed} and more words here. {FINE}{listed}. {FINE}"
    settings = {"wordlists": {"en": str(path)}, "max_cut_share": None}
    row, _ = run(text, action="cut_sentences", **settings)
    assert row["toxic_words"] == 2
    assert row["_body"].count(FINE.strip()) == text.count(FINE.strip())
    again, _ = run(row["_body"], action="cut_sentences", **settings)
    assert (again["toxic_words"], again["cuts"]) == (0, [])


def test_a_word_without_a_sentence_end_near_it_is_cut() -> None:
    for place in range(390, 401):
        text = "今天天气很好，" * 60
        text = text[:place] + "操你妈" + text[place:]
        row, _ = run(text, "zh", action="cut_sentences", max_cut_share=None)
        assert row["toxic_words"] == 1
        assert run(row["_body"], "zh")[0]["toxic_words"] == 0


def test_sentences_are_cut_after_earlier_cuts(sentences: str) -> None:
    config = ToxicityConfig(classifier=sentences, action="cut_sentences")
    text = FINE + "MENU" + NASTY + FINE
    start = len(FINE)
    row = {"text": text, "cuts": [(start, start + 4)], "_body": FINE + NASTY + FINE, "_words": None, "language": "en"}
    make_toxicity(config, model_files(config))(row)
    assert (row["cuts"], row["_body"]) == ([(start, start + 4 + len(NASTY))], FINE + FINE)
    row |= {"cuts": [], "_body": NASTY}
    with pytest.raises(ContractError, match="expected `_body` to be the text without `cuts`"):
        make_toxicity(config, model_files(config))(row)


def test_a_text_that_is_measured_again_is_not_cut(sentences: str) -> None:
    config = ToxicityConfig(classifier=sentences, action="cut_sentences")
    row = {"text": NASTY, "_rest": NASTY, "_body": NASTY, "_words": None, "language": "en"}
    make_toxicity(config, model_files(config))(row)
    assert (row["_body"], row["toxic_cut_share"], row["toxic_sentences"]) == (NASTY, None, 1)


def test_marks_do_not_drop(sentences: str) -> None:
    config = ToxicityConfig(action="mark", max_words=0)
    marking = checks(config, {}, {})
    assert {check.reason for check in marking} == {"toxic_word_share", "toxic_words"}
    assert all(check.marks for check in marking)
    assert run("damn", action="mark", max_words=0)[1] is None


def test_measures_that_do_not_count() -> None:
    text = "He raped and strangled her. "
    row, drop = run(text)
    assert (row["toxic_word_counts"], row["toxic_words"], drop) == ({"violence": 2}, 0, None)
    row, drop = run(text, measures=["violence"])
    assert (row["toxic_words"], row["toxic_word_share"], drop[0]) == (2, 0.4, "toxic_word_share")


def test_every_reason_is_reached() -> None:
    assert set(TOXICITY.verdicts) == {
        *("toxic_word_share", "toxic_words", "toxic_score"),
        *("toxic_sentences", "hateful_sentences", "toxic_cut"),
    }


def test_settings_that_do_not_suit_the_file(classifier: str, sentences: str) -> None:
    config = ToxicityConfig(classifier=sentences, classifier_label="__label__toxic")
    with pytest.raises(ConfigError, match=r"expected a fastText model, got .*, a model of sentences"):
        load_classifiers(config, model_files(config))
    config = ToxicityConfig(classifier=classifier, classifier_label="__label__toxic", max_toxic_share=0.1)
    with pytest.raises(ConfigError, match=r"max_toxic_share: expected a classifier of sentences, got .*, a fastText"):
        load_classifiers(config, model_files(config))
    config = ToxicityConfig(classifier=classifier)
    with pytest.raises(ConfigError, match="expected the label of a fastText model, got none for"):
        load_classifiers(config, model_files(config))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classifier_label": "__label__toxic"}, "classifier_label: expected toxicity.classifier to be set"),
        ({"max_toxic_share": 0.5}, "max_toxic_share: expected toxicity.classifier to be set, got 0.5 without it"),
        ({"classifier": "a.bin", "max_score": 0.5}, "max_score: expected toxicity.classifier_label to be set, got 0.5"),
        ({"measures": ["thread"]}, "got 'thread' (did you mean 'threat'?)"),
        ({"measures": []}, "got none. Correct toxicity.measures"),
        (
            {"action": "cut_sentences", "max_words": 3},
            "max_words: expected a limit that applies with action = 'cut_sent",
        ),
        (
            {"action": "cut_sentences", "classifier": "x", "max_toxic_share": 0.0},
            "max_toxic_share: expected a limit that",
        ),
        (
            {"action": "cut_sentences", "wordlists": {}},
            "action: expected word lists or a classifier with cut_sentences",
        ),
        ({"max_cut_share": 0.3}, "max_cut_share: expected a limit that applies with action = 'drop', got 0.3"),
        ({"max_score": 0.5}, "max_score: expected toxicity.classifier to be set, got 0.5 without it. Set"),
        (
            {"wordlists": {}, "max_words": 3, "max_word_share": 0.1},
            "max_word_share, max_words: expected at least one word list, got none",
        ),
        (
            {"wordlists": {"xx": "builtin", "en": "builtin"}},
            f"expected 'builtin' only for {', '.join(LANGUAGES)}, got it for xx. Set",
        ),
        ({"max_word_share": 1.5}, "less than or equal to 1"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        ToxicityConfig.model_validate(settings)
    assert message in str(error.value)


def test_a_file_that_is_no_classifier_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"no model")
    with pytest.raises(
        ConfigError, match=r"toxicity\.classifier: expected a classifier or a fastText model, got a file"
    ):
        load_fasttext_score(str(tmp_path / "x.bin"), "__label__toxic")
