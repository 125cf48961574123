"""Types that only `pii.types` switches on: values that are replaced, and codes of the same form that are left."""

import pytest

from pipeline.pii.on_request import is_device_address, is_machine_readable, is_place
from pipeline.pii.stage import Redactor

ON_REQUEST = ("passport", "us_driver_license", "uk_driving_licence", "vehicle_plate", "mac", "coordinates", "username")
# The example of ICAO Doc 9303, part 4, appendix A.
ZONE = "P<UTOERIKSSON<<ANNA<MARIA<<<<<<<<<<<<<<<<<<<\nL898902C36UTO7408122F1204159ZE184226B<<<<<10"
FOUND = [
    ("passport", "Passport No. 533380006, issued", "Passport No. <PASSPORT>, issued"),
    ("passport", "Reisepass C01X00T47", "Reisepass <PASSPORT>"),
    ("passport", "护照号码：E12345678。", "护照号码：<PASSPORT>。"),
    ("passport", "passeport 12AB34567", "passeport <PASSPORT>"),
    ("passport", f"scan: {ZONE} end", "scan: <PASSPORT> end"),
    ("us_driver_license", "driver's license D1234567 of", "driver's license <US_DRIVER_LICENSE> of"),
    ("us_driver_license", "DLN: S530-4607-0121", "DLN: <US_DRIVER_LICENSE>"),
    ("uk_driving_licence", "MORGA657054SM9IJ", "<UK_DRIVING_LICENCE>"),
    ("vehicle_plate", "license plate 7ABC123", "license plate <VEHICLE_PLATE>"),
    ("vehicle_plate", "Kennzeichen B-MW 1234", "Kennzeichen <VEHICLE_PLATE>"),
    ("vehicle_plate", "immatriculation AB-123-CD", "immatriculation <VEHICLE_PLATE>"),
    ("vehicle_plate", "车牌京A12345", "车牌<VEHICLE_PLATE>"),
    ("mac", "at 00:1A:2B:3C:4D:5E, 00-1a-2b-3c-4d-5f", "at <MAC>, <MAC>"),
    ("mac", "MAC:00:1A:2B:3C:4D:5E: lost", "MAC:<MAC>: lost"),
    ("coordinates", "48.858370, 2.294481 is", "<COORDINATES> is"),
    ("coordinates", "Paris,48.858370,2.294481,FR at 48.858371, 2.294481.", "Paris,<COORDINATES>,FR at <COORDINATES>."),
    ("coordinates", "GPS 48.8583, 2.2944", "GPS <COORDINATES>"),
    ("coordinates", "40°26′46″N 79°58′56″W", "<COORDINATES>"),
    ("coordinates", "51.477° N, 0.001° W", "<COORDINATES>"),
    ("username", "follow @ana_lopez on", "follow <USERNAME> on"),
    ("username", "https://twitter.com/ana_lopez", "https://twitter.com/<USERNAME>"),
    ("username", "Username: wapuser1", "Username: <USERNAME>"),
]
LEFT = [
    *("533380006", "ticket E12345678", "passport office 12 34", "passport number 1234"),
    ZONE.replace("L898902C36", "L898902C37"),
    *("D1234567", "license MIT 2.0", "MORGA613054SM9IJ"),
    *("7ABC123", "B-MW 1234", "plate with 1234 holes"),
    *("01:00:5E:3C:4D:5E", "00:00:00:00:00:00", "00:1A:2B:3C:4D", "00:1A:2B:3C:4D:5E:6F", "00:1A-2B:3C:4D:5E"),
    *("1.2770, 1.2860", "10.1063/1.3488806", "95.123456, 12.123456", "48.858370 and 2.294481"),
    *("@property\ndef f", '"@context": "x"', "a@example.com", "maps/@52.5200,13.4050,17z", "https://twitter.com/a/b"),
]


@pytest.fixture(scope="module")
def redactor() -> Redactor:
    return Redactor(ON_REQUEST)


@pytest.mark.parametrize(("kind", "text", "expected"), FOUND)
def test_values_are_replaced(redactor: Redactor, kind: str, text: str, expected: str) -> None:
    assert redactor.redact(text) == (expected, {kind: expected.count(f"<{kind.upper()}>")})
    assert Redactor(("iban",)).redact(text)[1] == {}


@pytest.mark.parametrize("text", LEFT)
def test_lookalikes_are_left(redactor: Redactor, text: str) -> None:
    assert redactor.redact(text) == (text, {})


def test_each_is_shown() -> None:
    assert {kind for kind, _, _ in FOUND} == set(ON_REQUEST)


def test_a_firm_counts_on_request() -> None:
    text = "CNPJ: 11.222.333/0001-81"
    assert Redactor().redact(text, "pt") == (text, {})
    assert Redactor(("br_cnpj",)).redact(text, "pt") == ("CNPJ: <BR_CNPJ>", {"br_cnpj": 1})


def test_checks() -> None:
    assert is_machine_readable(ZONE)
    assert not is_machine_readable(ZONE[:-1] + "1")
    assert not is_device_address("02-00-00-00-00-02")  # two different octets
    assert is_device_address("02:00:00:00:01:03")
    assert is_place("-90.00000, 180.00000")
    assert not is_place("90.00001, 1.00000")
    assert not is_place("1.00000, 180.00001")
