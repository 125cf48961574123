"""What replaces a value: each form, its consistency, its dependence on the key, and surrogates that no one has."""

import hashlib
from pathlib import Path

import pytest

from pipeline.models import ModelsConfig
from pipeline.pii.replacement import (
    CARDS,
    FIRST_NAMES,
    LAST_NAMES,
    PHONES,
    SURROGATE_TYPES,
    Replacement,
    is_reserved,
    normalized,
)
from pipeline.pii.stage import PII, PiiConfig, Redactor, make_pii
from pipeline.prepare import models_of_stage
from schemas.errors import ConfigError
from schemas.key_file import commitment

KEY = bytes(range(32))
SECRET = hashlib.sha256(b"a key of this test").digest()
PSEUDONYMS, SURROGATES = Replacement("pseudonym", key=KEY), Replacement("surrogate", key=KEY)


def test_a_type_and_a_fixed_text() -> None:
    assert Replacement().of("credit_card", "4111") == "<CREDIT_CARD>"
    assert Replacement("text", "[PII_REDACTED]").of("email", "a@b.c") == "[PII_REDACTED]"


def test_a_pseudonym_is_the_same_for_one_value_and_differs_for_others() -> None:
    first = PSEUDONYMS.of("email", "Ana@Example.com", "en")
    assert first == PSEUDONYMS.of("email", "ana@example.com", "zh")
    assert first.startswith("<EMAIL_")
    assert len(first) == len("<EMAIL_>") + 12
    assert {*first[7:-1]} <= {*"abcdefghijklmnop"}
    others = [PSEUDONYMS.of("email", "anb@example.com"), PSEUDONYMS.of("person", "Ana@Example.com")]
    others.append(Replacement("pseudonym", key=KEY + b"x").of("email", "ana@example.com"))
    assert len({first, *(text.removeprefix("<PERSON") for text in others)}) == 4


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("email", "A%40b.COM", "a@b.com"),
        ("phone", "%2B49%2030%20901820", "+4930901820"),
        ("phone", "030+901820", "030901820"),
        ("phone", "(415) 555-0139", "4155550139"),
        ("phone", "+1 415 555 0139", "+14155550139"),
        ("iban", "GB82 WEST 1234", "gb82west1234"),
        ("person", "Ana \n López", "ana lópez"),
        ("ip", "2001:DB8::1", "2001:db8::1"),
        ("secret", "Ab-C", "Ab-C"),
        ("credit_card", "４１１１ 1111", "41111111"),
    ],
)
def test_values_are_normalized(kind: str, value: str, expected: str) -> None:
    assert normalized(kind, value) == expected


@pytest.mark.parametrize(
    ("value", "language", "start"),
    [
        ("(415) 867-5309", "en", "202-555-01"),
        ("+44 20 8765 4321", "en", "+44 20 7946 0"),
        ("01 42 68 53 00", "fr", "01 99 00 "),
        ("0033 1 42 68 53 00", "de", "+33 1 99 00 "),
        ("030 901820", "de", "030 23125 "),
        ("+46 8 123 456 78", None, "+46 8-465 004 "),
        ("+61 2 9876 5432", None, "+61 2 5550 "),
        ("138 0000 9430", "zh", "<PHONE>"),
        ("+86 138 0000 9430", "en", "<PHONE>"),
    ],
)
def test_phones_become_fiction_numbers_of_their_country(value: str, language: str | None, start: str) -> None:
    made = SURROGATES.of("phone", value, language)
    assert made.startswith(start)
    assert made == "<PHONE>" or is_reserved("phone", made)


@pytest.mark.parametrize(
    ("kind", "taken", "free"),
    [
        ("email", "zoe@example.invalid", "zoe@example.invalid.com"),
        ("ip", "192.0.2.9", "192.0.3.9"),
        ("ip", "2001:db8:1::2", "2001:db9:1::2"),
        ("credit_card", "4111 1111 1111 1111", "4111 1111 1111 1129"),
        ("us_ssn", "987-65-4329", "987-65-4330"),
        ("phone", "202-555-0199", "202-555-0200"),
        ("phone", "+44 20 7946 0999", "+44 20 7946 1000"),
        ("iban", "", "GB82"),
    ],
)
def test_reserved_ranges_end_where_they_end(kind: str, taken: str, free: str) -> None:
    assert is_reserved(kind, taken) == (kind != "iban")
    assert not is_reserved(kind, free)


def test_every_surrogate_is_reserved_or_not_found_again() -> None:
    redactor = Redactor()
    values = {
        "email": "u{}@corp.com",
        "ip": "8.8.{}.4",
        "credit_card": "45{}",
        "us_ssn": "{}",
        "phone": "+1415867{:04}",
    }
    for kind in (*values, "person"):
        for number in range(200):
            made = SURROGATES.of(kind, values.get(kind, "Jo {}").format(number), "en")
            assert kind == "person" or is_reserved(kind, made)
            for start, end, found, _ in redactor.find(f"It is {made} here.", "en"):
                assert is_reserved(found, f"It is {made} here."[start:end]), (made, found)
    assert {*SURROGATE_TYPES} == {*values, "person"}
    assert SURROGATES.of("iban", "GB82WEST12345698765432") == "<IBAN>"


def test_a_surrogate_name_has_as_many_parts() -> None:
    first, last = SURROGATES.of("person", "Ana Maria López").split()
    assert (first in FIRST_NAMES, last in LAST_NAMES) == (True, True)
    assert SURROGATES.of("person", "López") in LAST_NAMES
    assert len({SURROGATES.of("person", f"A B{number}") for number in range(500)}) > 200


def test_the_test_cards_have_valid_check_digits() -> None:
    for card in CARDS:
        doubled = [int(digit) * (1 + at % 2) for at, digit in enumerate(reversed(card))]
        assert sum(number // 10 + number % 10 for number in doubled) % 10 == 0
    assert len(PHONES) == 6


def test_a_key_file_makes_the_same_pseudonym_in_every_column(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{SECRET.hex()}\n")
    config = PiiConfig(types=("email",), replacement="pseudonym", key_file=str(tmp_path / "key"))
    row = {"text": "a@example.com A@example.com b@example.com", "title": "a@example.com", "url": None, "language": "en"}
    make_pii(config, {"key": str(tmp_path / "key")})(row)
    first, second, third = row["text"].split()
    assert first == second == row["title"] == Replacement("pseudonym", key=SECRET).of("email", "a@example.com")
    assert third != first


def test_the_key_is_recorded_by_a_commitment_and_never_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    config = PiiConfig(types=("email",), replacement="pseudonym", key_file=str(path))
    model = models_of_stage(PII, config, ModelsConfig(offline=True))["key"]
    assert (model.path, model.sha256) == (str(path), commitment(SECRET, "pii.key"))
    assert model.sha256 != hashlib.sha256(SECRET).hexdigest()
    path.write_text("correct horse battery staple, and several more words")
    with pytest.raises(ConfigError, match="got a text"):
        models_of_stage(PII, config, ModelsConfig(offline=True))


SPELLINGS = {
    "phone": (
        *("+49 30 1234567", "0049 30 1234567", "+49 (0)30 1234567", "+49 (30) 1234567", "(+49) 30-123-45-67"),
        *(
            "+49\u00a030\u00a01234567",
            "%2B49301234567",
            "\uff0b49 30 1234567",
            "+\u0664\u0669 30 1234567",
            "00 49 30/1234567",
        ),
    ),
    "person": ("Anna O'Neill-Ros\u00e9", "ANNA O\u2019NEILL-ROS\u00c9", "Anna\nO\u02bcNeill\u2011Rose\u0301"),
    "ip": ("2001:db8::1", "2001:DB8::1", "2001:0db8:0:0:0:0:0:1"),
    "email": ("Ana@Example.com", "ana%40example.com", "\uff41na@example.com"),
    "credit_card": ("4111 1111 1111 1111", "4111-1111-1111-1111", "\uff14111111111111111"),
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_every_spelling_of_a_value_has_one_pseudonym(kind: str) -> None:
    assert len({PSEUDONYMS.of(kind, value) for value in SPELLINGS[kind]}) == 1


def test_other_numbers_have_other_pseudonyms() -> None:
    values = ("+49 30 1234567", "030 1234567", "+49 300 1234567", "+4 930 1234567 8", "49 30 1234567")
    assert len({PSEUDONYMS.of("phone", value) for value in values}) == len(values)
