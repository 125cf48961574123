"""The default rules on clean text of many languages: under 5 % of the half they were not derived from is dropped."""

from pathlib import Path

import pytest

from pipeline.text.profiles import load_profiles
from schemas.errors import ConfigError
from tests.support.language_reference import PAGES, dropped, known_languages, reference

ENOUGH = 20
"""Documents without which 5 % are less than one of them."""
KNOWN_ABOVE = {"sw"}
"""Two of 28 documents repeat themselves."""


@pytest.mark.slow
def test_clean_text_stays(shared_data: Path) -> None:
    try:
        known = known_languages()
    except ConfigError as error:
        pytest.skip(str(error))
    documents = [document for document in reference(shared_data, known) if document.half == 1]
    found = dropped(document for document in documents if document.origin != PAGES and document.lang != "en")
    profiled = {lang: answer for lang, answer in found.items() if lang in load_profiles(None)}
    reliable = {lang: answer for lang, answer in profiled.items() if answer.documents >= ENOUGH}
    assert len(reliable) >= 30
    assert {
        "ar",
        "de",
        "es",
        "fa",
        "fr",
        "hi",
        "id",
        "it",
        "ja",
        "ko",
        "pl",
        "pt",
        "ru",
        "th",
        "tr",
        "uk",
        "vi",
        "zh",
    } <= set(reliable)
    assert {lang: answer.share for lang, answer in reliable.items() if answer.share >= 0.05}.keys() <= KNOWN_ABOVE
    together = sum(answer.rules.total() for answer in profiled.values()) / sum(a.documents for a in profiled.values())
    assert together < 0.02
