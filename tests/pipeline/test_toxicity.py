"""Toxicity: what counts as a word on a list, every limit from both sides, and a classifier that really predicts."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.engine.rules import evaluate_row
from pipeline.toxicity import (
    BUILT_IN,
    LANGUAGES,
    TOXICITY,
    ToxicityConfig,
    UnspacedWordList,
    WordList,
    checks,
    load_classifier,
    make_toxicity,
    model_files,
    read_wordlist,
    words_of,
)
from schemas.errors import ConfigError
from tests.support.native import needs_native, python_only, tricky_texts

pytestmark = pytest.mark.usefixtures("implementation")
LIST = WordList(["damn", "bloody hell", "hell", "half-wit", "s&m", "Scheiße", "🖕", "देखो"])


@pytest.mark.parametrize(
    ("text", "occurrences", "covered", "words"),
    [
        ("", 0, 0, 1),
        ("a damned fool", 0, 0, 3),
        ("Damn! (DAMN) damn's “damn” _damn_", 5, 5, 6),
        ("bloody hell", 1, 2, 2),
        ("bloody\n  hell, hell", 2, 3, 3),
        ("the bloody hill", 0, 0, 3),
        ("hell bloody", 1, 1, 2),
        ("a half wit and a half-wit", 2, 4, 7),
        ("it's m for me", 0, 0, 5),
        ("S&M here", 1, 2, 3),
        ("SCHEISSE, Scheiße", 2, 2, 2),
        ("so 🖕 there", 1, 1, 3),
        ("देखोगे देखो", 1, 1, 2),
        ("hello shell", 0, 0, 2),
    ],
)
def test_words_are_whole_and_without_case(text: str, occurrences: int, covered: int, words: int) -> None:
    assert LIST.count(text) == (occurrences, covered / words)


@needs_native
@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(("damn", "Hell", "bloody ", "SCHEISSE", "\ud800", "-", "İ", "ǰ")) | tricky_texts).map(
        "".join
    )
)
def test_the_screen_hides_no_word(text: str) -> None:
    result = LIST.count(text)
    with python_only():
        assert LIST.count(text) == result


@needs_native
def test_the_screen_parts_words_at_every_character_that_does() -> None:
    for code in range(0x20000):
        text = f"x{chr(code)}damn".casefold()
        if not LIST._screen.may_have(text):
            assert b"damn" not in words_of(text)


@pytest.mark.parametrize(
    ("text", "occurrences", "share"),
    [
        ("你这个笨蛋", 1, 2 / 5),
        ("笨 蛋", 0, 0),
        ("大笨蛋笨蛋", 2, 5 / 5),
        ("傻B! 傻Bob", 1, 2 / 7),
        ("他damn人 damned", 1, 4 / 12),
        ("你好", 0, 0),
        ("", 0, 0),
    ],
)
def test_languages_without_spaces_match_anywhere(text: str, occurrences: int, share: float) -> None:
    assert UnspacedWordList(["笨蛋", "大笨蛋", "傻B", "damn"]).count(text) == (occurrences, share)


def test_words_of() -> None:
    assert words_of("don't—stop “now” a_b 3.14 ５，é") == [
        *(b"don", b"t", b"stop", b"now", b"a", b"b", b"3", b"14", "５".encode(), "é".encode()),
    ]


def test_a_list_file_has_comments_and_words(tmp_path: Path) -> None:
    path = tmp_path / "en.txt"
    path.write_text("# a comment\n\nDamn\n  bloody hell \n***\n", encoding="utf-8")
    assert read_wordlist(str(path), "en").count("damn bloody hell comment") == (2, 3 / 4)
    assert isinstance(read_wordlist(str(path), "th"), UnspacedWordList)
    path.write_text("# nothing\n***\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"toxicity\.wordlists\.en: expected words, got none in .*en\.txt"):
        read_wordlist(str(path), "en")


@pytest.mark.parametrize("language", LANGUAGES)
def test_built_in_lists_find_their_own_words_only(language: str) -> None:
    path = model_files(ToxicityConfig())[f"wordlist_{language}"]
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if not line.startswith("#")]
    assert lines[0].startswith("# Built-in")
    assert 20 <= len(entries) == len(set(entries)) <= 60
    words = read_wordlist(path, language)
    for entry in entries:
        assert words.count(f"x {entry}. x")[0] >= 1, entry
    assert words.count("nothing of the kind 没有 нет")[0] == 0


# -------------------------------------------------------------------------------------------------------------- stage


def run(text: str, language: str | None = "en", **settings: object) -> tuple[dict, object]:
    config = ToxicityConfig.model_validate(settings)
    row = {"_body": text, "language": language}
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


@pytest.mark.parametrize(("language", "settings"), [("ja", {}), (None, {}), ("en", {"wordlists": {}})])
def test_without_a_list_nothing_is_measured(language: str | None, settings: dict) -> None:
    row, drop = run("damn " * 5, language, **settings)
    assert drop is None
    assert (row["toxic_words"], row["toxic_word_share"]) == (None, None)


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


def test_a_label_the_model_lacks_is_named(classifier: str) -> None:
    with pytest.raises(ConfigError, match=r"got '__label__toxi' \(did you mean '__label__toxic'\?\)\. Set"):
        load_classifier(classifier, "__label__toxi")


def test_every_reason_is_reached() -> None:
    assert set(TOXICITY.verdicts) == {"toxic_word_share", "toxic_words", "toxic_score"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classifier": "a.bin"}, "classifier, classifier_label: expected both or neither, got one"),
        ({"classifier_label": "__label__toxic"}, "classifier, classifier_label: expected both or neither, got one"),
        ({"max_score": 0.5}, "max_score: expected toxicity.classifier to be set, got 0.5 without it. Set"),
        (
            {"wordlists": {}, "max_words": 3, "max_word_share": 0.1},
            "max_word_share, max_words: expected at least one word list, got none",
        ),
        (
            {"wordlists": {"xx": "builtin", "en": "builtin"}},
            "expected 'builtin' only for de, en, es, fr, ru, zh, got it for xx. Set",
        ),
        ({"max_word_share": 1.5}, "less than or equal to 1"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        ToxicityConfig.model_validate(settings)
    assert message in str(error.value)


# ---------------------------------------------------------------------------------------------------------- real text


def test_large_lists_on_ordinary_and_on_labelled_text(shared_data: Path) -> None:
    lists = shared_data / "toxicity" / "wordlists" / "ldnoobw"
    english = read_wordlist(str(lists / "en.txt"), "en")
    hits = {True: 0, False: 0}
    total = {True: 0, False: 0}
    with gzip.open(shared_data / "toxicity" / "davidson_en.jsonl.gz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            toxic = record["label"] != "neither"
            total[toxic] += 1
            hits[toxic] += english.count(record["text"])[0] > 0
    assert hits[True] / total[True] >= 0.76
    assert hits[False] / total[False] <= 0.04
    dropped = documents = 0
    with gzip.open(shared_data / "text" / "brown.jsonl.gz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            documents += 1
            dropped += english.count(record["text"])[1] > 0.01
    assert (dropped, documents) == (3, 223)
