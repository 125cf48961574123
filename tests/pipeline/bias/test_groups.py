"""Groups of documents: enough distinct terms of the language, markers in any language, countries, hostile texts."""

import gzip
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bias.groups import (
    BUILT_IN,
    DIALECT,
    IDENTITY,
    MAX_CHARS,
    TOPIC,
    UNSPACED,
    Group,
    GroupFinder,
    country_of,
    read_groups,
)
from pipeline.bias.stage import GROUPS, BiasConfig, make_bias
from pipeline.text.term_words import term_words
from schemas.errors import ConfigError
from tests.support.native import needs_native, python_only, tricky_texts

LEAST = {IDENTITY: 2, DIALECT: 3, TOPIC: 4}


@pytest.fixture(scope="module")
def finder() -> GroupFinder:
    return GroupFinder(read_groups(BUILT_IN), LEAST)


@pytest.mark.parametrize(
    ("text", "languages", "groups"),
    [
        ("A MOSQUE, and the Muslims’ library.", ("en",), ["identity/muslims"]),
        ("A mosque and a mosque.", ("en",), []),  # one distinct term
        ("A mosque and the Muslims.", ("de",), []),  # terms of another language
        ("A mosque and the Muslims.", ("sv", "en"), ["identity/muslims"]),
        ("Mosquetaires and muslimin.", ("en",), []),  # only whole words match
        ("Les juives et l’islam, d'une mosquée", ("fr",), ["identity/muslims"]),
        ("trans women and trans men", ("en",), ["identity/transgender_people"]),
        ("transport women", ("en",), []),
        ("清真寺附近的穆斯林", ("zh",), ["identity/muslims"]),
        ("清真寺附近", ("zh",), []),
        ("She finna go, he be late, y'all ain't ready", ("en",), ["dialect/african_american_english"]),
        ("She finna go, he be late, y'all ain't ready", ("jv",), ["dialect/african_american_english"]),
        ("She will go, he'll be late, you are not ready", ("en",), []),
        ("Es isch nöd eifach gsi", ("de",), ["dialect/swiss_german"]),
        ("Es isch nöd eifach", ("de",), []),
        ("احنا مش عايز نروح كده دلوقتي", ("ar",), ["dialect/egyptian_arabic"]),
        ("the recipe: ingredients, butter, flour", ("en",), ["topic/cooking"]),
        ("the recipe: ingredients, butter", ("en",), []),
        ("", ("en",), []),
        ("\ud800 mosque muslims", ("en",), ["identity/muslims"]),
    ],
)
def test_groups_of_texts(finder, text, languages, groups):
    assert finder.find(text, languages) == groups


def test_terms_beyond_the_maximum_length_are_not_read(finder):
    def text(filled: int) -> str:
        return "x" * (filled - len(" islam mosque")) + " islam mosque"

    assert finder.find(text(MAX_CHARS), ("en",)) == ["identity/muslims"]
    assert finder.find(text(MAX_CHARS + 1), ("en",)) == []


@pytest.mark.parametrize(
    "text",
    ["he be " * 200_000, "a" * 1_000_000, "ain't " * 200_000, "’" * 1_000_000, "清真" * 500_000, "\u0130" * 1_000_000],
    ids=["phrases", "letters", "markers", "quotes", "chinese", "grows"],
)
def test_hostile_texts_take_no_longer_than_their_start(finder, text):
    started = time.thread_time()
    finder.find(text, ("en", "zh"))
    assert time.thread_time() - started < 0.5


TERMS = ("he be", "be", "be he be", "清真寺", "真", "ain't", "\u00e9", "muslim women", "x" * 40, "\U0001f600\u00e9")


@needs_native
@given(st.lists(st.sampled_from((*TERMS, " ", "’", "\ud800", "h", "寺", "-")) | tricky_texts, max_size=12).map("".join))
def test_the_native_terms_are_those_of_python(text):
    groups = [
        Group(kind, f"{kind}{number}", "x", {language: (term,)})
        for number, term in enumerate(TERMS)
        for kind, language in ((IDENTITY, "en"), (TOPIC, "zh"))
    ]
    finder = GroupFinder(groups, {IDENTITY: 1, TOPIC: 1})
    found = finder.find(text, ("en", "zh"))
    with python_only():
        assert finder.find(text, ("en", "zh")) == found


def test_equal_groups_of_real_texts(finder, shared_data):
    with gzip.open(shared_data / "langid/ud.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    joined = [" ".join(texts[first : first + 200]) for first in range(0, len(texts), 200)]
    languages = ("en", "de", "zh", "ar", "hi", "fr", "ja")
    found = [finder.find(text, languages) for text in joined]
    with python_only():
        assert [finder.find(text, languages) for text in joined] == found
    assert sum(map(len, found)) > 20


def test_every_shipped_term_can_match(finder):
    """A text of all terms of a group, in one language, belongs to the group, and no term is listed for two meanings."""
    for group in read_groups(BUILT_IN):
        for language, terms in group.terms.items():
            text = " . ".join(terms) if language not in UNSPACED else "".join(terms)
            if len(terms) >= LEAST[group.kind]:
                assert group.full_name in finder.find(text, (language,)), (group.full_name, language)
            for term in terms:
                assert term_words(term.casefold())


def test_the_shipped_groups_cover_ten_languages_and_name_their_sources():
    groups = read_groups(BUILT_IN)
    people = [group for group in groups if group.kind == IDENTITY]
    assert len({language for group in people for language in group.terms}) >= 10
    assert len({group.full_name for group in groups}) == len(groups)
    text = Path(BUILT_IN).read_text(encoding="utf-8")
    assert text.count("source = ") == sum(group.kind == DIALECT for group in groups)


@pytest.mark.parametrize(
    ("domain", "country"),
    [
        ("example.de", "de"),
        ("bbc.co.uk", "uk"),
        ("a.io", None),
        ("a.eu", None),
        ("a.com", None),
        (None, None),
        ("de", "de"),
    ],
)
def test_countries(domain, country):
    assert country_of(domain) == country


def row(**values):
    return {"text": "mosque muslims", "language": "en", "declared_language": None, "domain": "a.at"} | values


def test_the_stage_adds_all_kinds_or_those_of_the_recipe():
    models = {GROUPS: str(BUILT_IN)}
    document = row(page_type="article")
    assert make_bias(BiasConfig(), models)(document) is None
    assert document[GROUPS] == ["identity/muslims", "page/article", "country/at"]
    document = row(page_type="article")
    make_bias(BiasConfig(kinds=("country",)), models)(document)
    assert document[GROUPS] == ["country/at"]
    document = row()
    make_bias(BiasConfig(min_terms=3), models)(document)
    assert document[GROUPS] == ["country/at"]
    for unmeasured, config in ((row(), BiasConfig(kinds=())), (row(language=None), BiasConfig())):
        make_bias(config, models)(unmeasured)
        assert unmeasured[GROUPS] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =", "expected a TOML file"),
        ("[people.a]\nmeaning = 'x'", "expected only tables of identity, dialect, topic, got 'people'"),
        ("[topic.A]\nmeaning = 'x'", "expected a name of lower-case letters"),
        ("[topic.a]\nen = ['x']", "expected topic.a.meaning to be a text"),
        ("[topic.a]\nmeaning = 'x'", "expected lists of terms by language in topic.a, got None"),
        ("[topic.a]\nmeaning = 'x'\nen = [1]", "expected lists of terms by language in topic.a"),
        ("[topic.a]\nmeaning = 'x'\nen = ['!']", "expected terms with a letter or digit in topic.a, got '!'"),
        ("[dialect.a]\nmeaning = 'x'\nlanguages = ['en']", "dialect.a.languages and dialect.a.markers to be lists"),
    ],
)
def test_a_wrong_file_of_groups_is_refused(tmp_path, text, message):
    path = tmp_path / "groups.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_groups(path)


def test_groups_of_an_own_file(tmp_path):
    path = tmp_path / "groups.toml"
    path.write_text("[dialect.kotava]\nmeaning = 'Kotava'\nlanguages = ['avk']\nmarkers = ['va', 'batlize', 'tir']\n")
    finder = GroupFinder(read_groups(path), LEAST)
    assert finder.find("Va batlize tir", ("fr",)) == ["dialect/kotava"]
