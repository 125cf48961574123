"""Values of personal data beside other text: in lines of CSV, in JSON, in lists, addresses and markup."""

import pytest

from pipeline.pii.stage import Redactor
from tests.pipeline.pii.test_national_ids import EXAMPLES, value_of

VALUES = [(right.split(value_of(right))[0].strip(" .:,"), value_of(right), "en") for right, _ in EXAMPLES.values()] + [
    ("", "ana.lopez@example.com", "en"),
    ("", "415-555-0139", "en"),
    ("", "(415) 555-0139", "en"),
    ("", "+49 30 901820", "en"),
    ("", "+4930901820", "en"),
    ("", "030 901820", "de"),
    ("", "06 12 34 56 78", "fr"),
    ("", "06.12.34.56.78", "fr"),
    ("", "138-0000-9430", "zh"),
    ("", "4111111111111111", "en"),
    ("", "4111 1111 1111 1111", "en"),
    ("", "378282246310005", "en"),
    ("", "GB82 WEST 1234 5698 7654 32", "en"),
    ("", "203.0.113.7", "en"),
    ("", "2001:db8::1f", "en"),
    ("", "521-09-9997", "en"),
    ("", "AB123456C", "en"),
    ("DNI", "12345678Z", "es"),
    ("", "11010519491231002X", "zh"),
    ("PESEL", "44051401359", "pl"),
    ("Aadhaar", "2341 2341 2346", "en"),
    ("RRN", "900101-1234568", "ko"),
    ("", "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa", "en"),
]
"""A word that names a value, or none; the value; and the language of the page."""


@pytest.fixture(scope="module")
def redactor() -> Redactor:
    return Redactor()


@pytest.mark.parametrize(
    "context",
    [
        *("a,{},b", "17,{},42", "17,{},2001-01-01", "{}, {}", "a;{};b", "{};{}", "a|{}|b", "17|{}|42", "17\t{}\t42"),
        *(
            '{{"k":"{}","n":3}}',
            '["{}","{}"]',
            "[{}, {}]",
            "({})",
            "is {}.",
            "is {}.Next",
            "'{}'",
            "<td>{}</td>",
            "{}\n{}",
        ),
        *("x: {}", "**{}**", "`{}`", "{}?", "{}!", "x%20{}%20y", "<{}>", "{} and {}", "• {}", "- {}", "{} - home"),
        *("号{}号", "{}: home", "_{}_", "{} 2024", "{} (2024)", "{}, 42", "{} / {}", "{}/{}", "{} {}"),
    ],
)
def test_a_value_is_found_beside_any_text(redactor: Redactor, context: str) -> None:
    for word, value, language in VALUES:
        text = f"{word}: {context}" if word else context
        expected = context.count("{}")
        found = redactor.redact(text.format(value, value), language)
        assert sum(found[1].values()) == expected, found
        assert value not in found[0]


def test_the_fields_of_a_line_are_found_one_by_one(redactor: Redactor) -> None:
    numbers = ["521-09-9997", "415-555-0139", "4111111111111111", "529.982.247-25", "756.9217.0769.85", "203.0.113.7"]
    for first in numbers:
        for second in numbers:
            line, found = redactor.redact(f"1,{first},{second},2", "en")
            assert sum(found.values()) == 2, line


@pytest.mark.parametrize(
    "text",
    [
        *(
            "BSN 123456782,50 EUR",
            "BSN 0,123456782",
            "NIF 123.456.789,50",
            "NIF 123 456 789,5",
            "card 0,4111111111111111",
        ),
        *("fox mar 02 1965 163,214,076", "airport mar 05 1970 100,489,626", "SSN 521-09-9997/12", "ITIN 912-70-1234/A"),
        *("version 1.2.3.4/1.2.3.5", "tel 12345678,50", "OIB 33392005961,7"),
    ],
)
def test_decimals_and_parts_of_other_numbers_are_left(redactor: Redactor, text: str) -> None:
    assert redactor.redact(text, "en") == (text, {})
