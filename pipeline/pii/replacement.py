"""What replaces a value of personal data: its type, a fixed text, a keyed pseudonym, or a surrogate that no one has.

A pseudonym and a surrogate follow from the value and a secret key, so that one value becomes the same text in every
document. Without the key, no one can test which value a pseudonym replaced.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Literal
from unicodedata import decimal

from pipeline.pii.candidates import plain_value
from schemas.normalization import normalize

Form = Literal["type", "text", "pseudonym", "surrogate"]
KEYED: frozenset[str] = frozenset(("pseudonym", "surrogate"))
"""Forms that need a key."""
PSEUDONYM_LETTERS = 12
"""Letters of a pseudonym, of 4 bits each: among 2 million values of a type, two share one with probability 0.7 %."""
LETTERS = "abcdefghijklmnop"
"""The letters of pseudonyms. They are no digits, which could look like a telephone number."""
MAX_PLACEHOLDER = 100
"""Maximum length of a placeholder [characters]."""

_FIRST_NAMES = """
    Ada Bea Cleo Dana Eli Finn Gus Hana Ilse Jona Kim Lou Mika Nico Odil Pia Quin Rene Sascha Toni Uli Vale Wim
    Xeni Yael Zoe
"""
FIRST_NAMES = tuple(_FIRST_NAMES.split())
_LAST_NAMES = """
    Aldwick Brennor Caldry Dornfeld Elmstra Farrowby Grenholt Hartvale Inglemoor Jarnwick Kestrow Lindmere
    Marlowen Norbeck Ostervale Pellmoor Quarrick Rosmark Selbrook Tarnwell Umberly Varnholt Westmarch Yarrowdale
    Zellwick
"""
LAST_NAMES = tuple(_LAST_NAMES.split())
"""Names of surrogates: first names of any sex, and last names that were made up."""
_CARDS = """
    4111111111111111 4012888888881881 5555555555554444 5105105105105100 378282246310005 371449635398431
    6011111111111117 6011000990139424 3530111333300000 30569309025904
"""
CARDS = tuple(_CARDS.split())
"""Numbers that card networks and payment services publish for tests."""
IP_NETWORKS = ("192.0.2.", "198.51.100.", "203.0.113.")
"""Networks of documentation; source: RFC 5737. For IPv6 it is 2001:db8::/32; source: RFC 3849."""


@dataclass(frozen=True)
class FictionNumbers:
    """Telephone numbers of a country that its regulator sets aside for fiction."""

    code: str
    """Country code."""
    national: str
    """National number in its usual form, with `#` for each digit that may be chosen."""


PHONES: Mapping[str, FictionNumbers] = {
    "us": FictionNumbers("1", "202-555-01##"),
    "gb": FictionNumbers("44", "020 7946 0###"),
    "fr": FictionNumbers("33", "01 99 00 ## ##"),
    "au": FictionNumbers("61", "02 5550 ####"),
    "de": FictionNumbers("49", "030 23125 ###"),
    "se": FictionNumbers("46", "08-465 004 ##"),
}
"""Fiction numbers by country. Sources: NANPA (555-0100 to 555-0199), Ofcom (numbers for drama use), ARCEP (decision
2018-0881), ACMA (numbers for use in radio, television and films), Bundesnetzagentur, PTS."""
COUNTRY_OF = {"en": "us", "fr": "fr", "de": "de", "sv": "se"}
"""Country of a number without a country code, by the language of the document."""


@dataclass(frozen=True)
class Replacement:
    """Chooses the text that replaces a value."""

    form: Form = "type"
    placeholder: str = ""
    """With the form `text`: what replaces every value."""
    key: bytes = b""
    """With a keyed form: the key, as `schemas.key_file` reads it."""

    def of(self, kind: str, value: str, language: str | None = None) -> str:
        """Return the text that replaces a value of a type in a document of a language."""
        if self.form == "type":
            return f"<{kind.upper()}>"
        if self.form == "text":
            return self.placeholder
        digest = self._digest(kind, value)
        if self.form == "surrogate" and (made := surrogate(kind, plain_value(value), language, digest)) is not None:
            return made
        if self.form == "surrogate":
            return f"<{kind.upper()}>"
        number = int.from_bytes(digest[:8], "big")
        return f"<{kind.upper()}_{''.join(LETTERS[number >> 4 * place & 15] for place in range(PSEUDONYM_LETTERS))}>"

    def _digest(self, kind: str, value: str) -> bytes:
        # BLAKE2b takes keys of up to 64 bytes, so the key is the digest of the whole key.
        key = hashlib.blake2b(self.key).digest()
        return hashlib.blake2b(
            f"{kind}\0{normalized(kind, value)}".encode("utf-8", "surrogatepass"), key=key, digest_size=16
        ).digest()


BY_TYPE = Replacement()
"""The default: the placeholder of the type, such as `<EMAIL>`."""


_SIGNS_OF_NAMES = str.maketrans("\u2019\u2018\u02bc\u2010\u2011\u2013", "'''---")
"""Apostrophes and hyphens as they are in names → those of ASCII."""


def normalized(kind: str, value: str) -> str:
    """Return the form of a value that does not depend on how it is written: case, blanks, separators and escapes.

    The prefix 00 of a telephone number is `+`, and a 0 in parentheses after the code of a country is left out.
    """
    value = plain_value(value)
    folded = normalize("NFKC", value).casefold()
    if kind in ("person", "location", "organisation"):
        return " ".join(folded.translate(_SIGNS_OF_NAMES).split())
    if kind == "email":
        return folded
    if kind == "ip":
        return _address(folded)
    if kind == "secret":
        return value
    is_abroad = kind == "phone" and folded.lstrip("( ").startswith(("+", "00"))
    kept = filter(str.isalnum, folded.replace("(0)", "") if is_abroad else folded)
    plain = "".join(str(decimal(char)) if char.isdecimal() else char for char in kept)
    return f"+{plain.removeprefix('00')}" if is_abroad else plain


def _address(text: str) -> str:
    """Return an IPv6 address in its shortest form, and other text as it is."""
    try:
        return IPv6Address(text.strip("[]")).compressed
    except ValueError:
        return text


def surrogate(kind: str, value: str, language: str | None, digest: bytes) -> str | None:
    """Return a value of the same type that can belong to no one, chosen by 16 random bytes; None if there is none."""
    make = _SURROGATES.get(kind)
    return make(value, language, digest) if make is not None else None


def is_reserved(kind: str, value: str) -> bool:
    """Return True if a value is of a range that is set aside, as all surrogates are, so that it belongs to no one."""
    digits = "".join(filter(str.isdigit, value))
    if kind == "email":
        return value.casefold().endswith("@example.invalid")
    if kind == "ip":
        return value.startswith((*IP_NETWORKS, "2001:db8:"))
    if kind == "credit_card":
        return digits in CARDS
    if kind == "us_ssn":
        return re.fullmatch("98765432[0-9]", digits) is not None
    if kind == "phone":
        return any(re.search(_digits_of(numbers).replace("#", "[0-9]") + r"\Z", digits) for numbers in PHONES.values())
    return False


def _digits_of(numbers: FictionNumbers) -> str:
    """Return the digits of fiction numbers without the prefix 0, with `#` for those that may be chosen."""
    return "".join(filter(lambda sign: sign.isdigit() or sign == "#", numbers.national)).lstrip("0")


def _numbered(form: str, digest: bytes) -> str:
    """Return the form with a digit for each `#`, by the digest."""
    number, made = int.from_bytes(digest, "big"), []
    for sign in form:
        if sign == "#":
            number, digit = divmod(number, 10)
            sign = str(digit)
        made.append(sign)
    return "".join(made)


def _phone(value: str, language: str | None, digest: bytes) -> str | None:
    written = value.strip()
    abroad = "+" in written[:2] or written.startswith("00")
    digits = "".join(filter(str.isdigit, normalize("NFKC", written))).lstrip("0")
    country = COUNTRY_OF.get(language or "")
    if abroad:
        country = next((name for name, numbers in PHONES.items() if digits.startswith(numbers.code)), None)
    if country is None:
        return None
    numbers = PHONES[country]
    national = _numbered(numbers.national, digest)
    return f"+{numbers.code} {national.removeprefix('0')}" if abroad else national


def _email(value: str, language: str | None, digest: bytes) -> str:
    name = FIRST_NAMES[digest[0] % len(FIRST_NAMES)].lower()
    return f"{name}.{''.join(LETTERS[byte & 15] for byte in digest[1:9])}@example.invalid"


def _ip(value: str, language: str | None, digest: bytes) -> str:
    if ":" in value:
        return f"2001:db8:{digest[0:2].hex()}:{digest[2:4].hex()}::{digest[4:6].hex()}"
    return f"{IP_NETWORKS[digest[0] % len(IP_NETWORKS)]}{digest[1]}"


def _card(value: str, language: str | None, digest: bytes) -> str:
    return CARDS[digest[0] % len(CARDS)]


def _ssn(value: str, language: str | None, digest: bytes) -> str:
    return f"987-65-432{digest[0] % 10}"


def _person(value: str, language: str | None, digest: bytes) -> str:
    last = LAST_NAMES[digest[1] % len(LAST_NAMES)]
    return f"{FIRST_NAMES[digest[0] % len(FIRST_NAMES)]} {last}" if " " in value.strip() else last


_SURROGATES: Mapping[str, Callable[[str, str | None, bytes], str | None]] = {
    "email": _email,
    "phone": _phone,
    "ip": _ip,
    "credit_card": _card,
    "us_ssn": _ssn,
    "person": _person,
}
SURROGATE_TYPES = tuple(_SURROGATES)
"""Types that have surrogates; values of other types get the placeholder of their type."""
