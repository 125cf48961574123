"""Language: known languages, both sides of the threshold, wrong settings, and real sentences with their labels."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.language import LANGUAGE, MODEL, LanguageConfig, load_model, make_language, predict
from pipeline.models import ModelsConfig, ensure_model
from pipeline.stage import Drop, Row
from schemas.errors import ConfigError

ENGLISH = "All human beings are born free and equal in dignity and rights."
GERMAN = "Alle Menschen sind frei und gleich an Würde und Rechten geboren."
JAPANESE = "すべての人間は、生れながらにして自由であり"


@pytest.fixture(scope="module")
def lid() -> str:
    """The path of lid.176.ftz, fetched into the user's cache on first use."""
    try:
        return str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    except ConfigError as error:
        pytest.skip(str(error))


def run(lid: str, text: str, **settings: Any) -> tuple[Drop | None, Row]:
    row = {"text": text}
    return make_language(LanguageConfig(**settings), {MODEL: lid})(row), row


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (ENGLISH, "en"),
        (GERMAN, "de"),
        ("Все люди рождаются свободными и равными в своём достоинстве и правах.", "ru"),
        ("人人生而自由，在尊严和权利上一律平等。", "zh"),
        (JAPANESE, "ja"),
        ("Tous les êtres humains\nnaissent libres\r\net égaux\x0ben dignité et en droits.", "fr"),
    ],
)
def test_known_languages(lid: str, text: str, language: str) -> None:
    drop, row = run(lid, text, languages=())
    assert (drop, row["language"]) == (None, language)
    assert 0.65 <= row["language_score"] <= 1.0


def test_the_score_is_a_float32_in_its_range(lid: str) -> None:
    model = load_model(lid)
    for text in (ENGLISH, GERMAN, ENGLISH * 50, JAPANESE, "...", "123", "Ω"):
        _, score = predict(model, text)
        assert score == float(np.float32(score))
        assert 0.0 < score <= 1.0
    assert model.predict([JAPANESE])[1][0][0] > 1.0  # the model's own rounding, which the column must not show


@pytest.mark.parametrize("languages", [("en", "de"), ()])
def test_the_threshold_is_inclusive(lid: str, languages: tuple[str, ...]) -> None:
    text = "free and equal, frei und gleich"
    score = run(lid, text, languages=(), min_score=0.0)[1]["language_score"]
    assert 0.2 < score < 0.9
    above = float(np.nextafter(np.float32(score), np.float32(1)))
    assert run(lid, text, languages=languages, min_score=score)[0] is None
    assert run(lid, text, languages=languages, min_score=above)[0] == Drop("language_uncertain", score, above)


def test_other_languages_are_dropped_whatever_their_score(lid: str) -> None:
    drop, row = run(lid, GERMAN)
    assert drop == Drop("language_not_wanted", row["language_score"])
    assert row["language"] == "de"
    assert run(lid, GERMAN, languages=("en", "de"))[0] is None
    drop, row = run(lid, "。", min_score=1.0)
    assert (drop, row["language"]) == (Drop("language_not_wanted", row["language_score"]), "ja")


def test_every_reason_is_declared() -> None:
    assert list(LANGUAGE.reasons) == ["language_not_wanted", "language_uncertain"]
    assert LANGUAGE.models(LanguageConfig(model="own.bin")) == {"language": "own.bin"}


def test_only_the_first_characters_are_looked_at(lid: str) -> None:
    text = ENGLISH + GERMAN * 9
    assert run(lid, text, languages=())[1]["language"] == "de"
    assert run(lid, text, max_chars=len(ENGLISH))[1] == run(lid, ENGLISH)[1] | {"text": text}


def test_wrong_languages_are_all_named(lid: str) -> None:
    with pytest.raises(ConfigError, match=r"lid.176.ftz knows, found 'enx' \(did you mean 'en'\?\), 'ua' .*; correct"):
        run(lid, ENGLISH, languages=("en", "enx", "ua"))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "x.ftz"
    with pytest.raises(ConfigError, match=r"promised a fastText model, found .*x\.ftz cannot be opened"):
        load_model(str(path))
    path.write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"promised a fastText model, found .*x\.ftz has wrong file format"):
        make_language(LanguageConfig(), {MODEL: str(path)})


def test_loading_prints_nothing(lid: str, capfd: pytest.CaptureFixture[str]) -> None:
    predict(load_model(lid), ENGLISH)
    assert capfd.readouterr() == ("", "")


def test_paragraphs_with_a_known_language(lid: str, shared_data: Path) -> None:
    """Macro accuracy on paragraphs of five sentences in 18 languages: 1.000 as measured."""
    model, right = load_model(lid), defaultdict(list)
    for line in gzip.decompress((shared_data / "langid/ud.jsonl.gz").read_bytes()).splitlines():
        entry = json.loads(line)
        if entry["kind"] == "paragraph" and len(right[entry["lang"]]) < 40:
            right[entry["lang"]].append(predict(model, entry["text"])[0] == entry["lang"].split("-")[0])
    assert len(right) >= 18
    assert sum(sum(answers) / len(answers) for answers in right.values()) / len(right) > 0.98
