"""The types of personal data: how candidates of each are found, which recognizer confirms them, and on what conditions.

Most recognizers are presidio's pattern recognizers, called directly: they need no language model and no network. If
many harmless numbers look like a type, a value counts only if a nearby word names it (`NHS number 943 476 5919`).
"""

import ipaddress
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import tldextract

from pipeline.pii.candidates import JOIN, NEAR_AFTER, NEAR_BEFORE, any_of
from pipeline.pii.secrets import PRIVATE_KEY, TOKENS, is_secret

# Uses the snapshot of the public suffix list in the package tldextract, without network and without a cache on disk.
_DOMAINS = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


@dataclass(frozen=True)
class PiiType:
    """A type of personal data; its placeholder is its name in upper case, such as `<EMAIL>`."""

    name: str
    family: str
    recognizer: str = "PatternRecognizer"
    """Name of its class in presidio_analyzer; the class's checksum, if it has one, always applies."""
    patterns: tuple[tuple[str, float], ...] = ()
    """Regular expressions with scores, which replace the recognizer's own."""
    check: Callable[[str], bool] | None = None
    """A further condition on the ASCII form of a value."""
    alone: float = 0.5
    """Minimum score of a pattern whose matches count without a nearby word that names the type."""
    confirmed: bool = False
    """True if a value counts only if its checksum confirms it; otherwise only a wrong checksum rejects it."""
    words: tuple[str, ...] = ()
    """Words that name the type, in addition to the recognizer's own."""
    default: bool = True
    """False if the type is only replaced where `pii.types` names it."""


def has_public_suffix(value: str) -> bool:
    """Return True if the domain of an e-mail address is under a public suffix, such as `.com`.

    `value` may end with the start of the next sentence, as in `name@example.com.Next`.
    """
    labels = re.split(r"@|%(?:25)?40", value)[-1].split(".")
    return any(_DOMAINS(".".join(labels[:end])).fqdn for end in range(len(labels), 1, -1))


def is_personal_address(value: str) -> bool:
    """Return True if an IP address may belong to a person: not private, loopback or multicast."""
    if ":" in value:  # Written in full, or global unicast, 2000::/3.
        return value.count(":") == 7 or int(ipaddress.IPv6Address(value)) >> 125 == 1
    first, second, *_ = map(int, value.split("."))
    private = first in (0, 10, 127) or first >= 224 or (first, second) in ((169, 254), (192, 168))
    return not private and not (first == 172 and 16 <= second < 32)


def is_resident_id(value: str) -> bool:
    """Return True if a Chinese resident id of 18 digits has a valid date of birth and check digit.

    Source: GB 11643-1999, MOD 11-2.
    """
    try:
        date(int(value[6:10]), int(value[10:12]), int(value[12:14]))
    except ValueError:
        return False
    total = sum(int(digit) * pow(2, 17 - index, 11) for index, digit in enumerate(value[:17]))
    return value[17].upper() == "10X98765432"[total % 11]


_EMAIL = (
    r"(?<![A-Za-z0-9])[A-Za-z0-9_](?:[A-Za-z0-9._%+'-]{0,126}[A-Za-z0-9_+-])?(?:@|%(?:25)?40)"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+(?:[A-Za-z]{2,24}|xn--[A-Za-z0-9-]{2,59})(?![A-Za-z0-9_])"
)
# Issuer ranges as the networks publish them: Visa, Mastercard (also 2221-2720), Discover, UnionPay, JCB, Mir in fours;
# American Express and Diners in their own groups; JCB's old ranges. Visa numbers of 13 or 19 digits and Maestro numbers
# look like article numbers, so they count only if a nearby word names them.
_CARD = (
    r"\b(?:4\d{3}|5[1-5]\d\d|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)|6(?:011|4[4-9]\d|5\d\d|2\d\d)|35(?:2[89]|[3-8]\d)"
    r"|220[0-4])([ -]?)\d{4}\1\d{4}\1\d{4}\b"
)
_CARD_UNEVEN = r"\b(?:3[47]\d\d([ -]?)\d{6}\1\d{5}|3(?:0[0-5]|[689]\d)\d([ -]?)\d{6}\2\d{4}|(?:2131|1800)\d{11})\b"
_CARD_LOOSE = r"\b(?:4\d{12}|[456]\d{18}|(?:5[0678]\d\d|6\d{3})([ -]?)\d{4}\1\d{4}(?:\1\d{1,4})?|3\d{15})\b"
_IPV4_END = r"(?!(?-i:[0-9a-z_])|\.\w)"
_IPV4 = (
    (rf"(?<![\w.])(?=[0-9.]*[0-9]{{2}})(?:[0-9]{{1,3}}\.){{3}}[0-9]{{1,3}}{_IPV4_END}", 0.6),
    (rf"(?<![\w.])(?:[0-9]\.){{3}}[0-9]{_IPV4_END}", 0.1),  # such as 8.8.4.4, but it is mostly a version number
)
_IPV6 = r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f]{1,4}|(?:[0-9]{1,3}\.){3}[0-9]{1,3})?(?![\w:])"
_SSN = ((r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b", 0.8), (r"\b[0-9]{3}([ .]?)[0-9]{2}\1[0-9]{4}\b", 0.1))
NAMED_ONLY = 2.0
"""Value of `alone` for a type whose values count only if a nearby word names the type."""

TYPES = (
    PiiType("email", "at", patterns=((_EMAIL, 0.9),), check=has_public_suffix),
    PiiType("email", "percent", patterns=((_EMAIL, 0.9),), check=has_public_suffix),
    PiiType("phone", "digits"),
    PiiType("credit_card", "digits", "CreditCardRecognizer", ((_CARD, 0.6), (_CARD_UNEVEN, 0.6), (_CARD_LOOSE, 0.1)),
            words=("carte", "karte", "kreditkarte", "tarjeta", "carta", "cartão", "карта", "карты", "卡号", "银行卡")),
    PiiType("iban", "codes", "IbanRecognizer"),
    PiiType("ip", "dots", "IpRecognizer", _IPV4, is_personal_address, words=("address", "adresse", "dns", "server")),
    PiiType("ip", "colons", "IpRecognizer", ((_IPV6, 0.6),), is_personal_address),
    PiiType("crypto", "coins", "CryptoRecognizer"),
    PiiType("cn_id", "digits", patterns=((r"\b[1-9][0-9]{16}[0-9X](?![0-9])", 0.9),), check=is_resident_id),
    PiiType("us_ssn", "digits", "UsSsnRecognizer", _SSN),
    PiiType("ca_sin", "digits", "CaSinRecognizer", alone=NAMED_ONLY),
    PiiType("uk_nhs", "digits", "NhsRecognizer", alone=NAMED_ONLY),
    PiiType("uk_nino", "codes", "UkNinoRecognizer"),
    PiiType("au_tfn", "digits", "AuTfnRecognizer", alone=NAMED_ONLY),
    PiiType("au_medicare", "digits", "AuMedicareRecognizer", alone=NAMED_ONLY),
    PiiType("in_aadhaar", "digits", "InAadhaarRecognizer", alone=NAMED_ONLY, words=("aadhar", "आधार")),
    PiiType("in_pan", "codes", "InPanRecognizer", ((r"\b[A-Z]{3}[ABCFGHJLPT][A-Z][0-9]{4}[A-Z]\b", 0.5),)),
    PiiType("sg_nric", "digits", "SgFinRecognizer", alone=NAMED_ONLY),
    PiiType("de_tax_id", "digits", "DeTaxIdRecognizer", alone=NAMED_ONLY),
    PiiType("es_nif", "digits", "EsNifRecognizer"),
    PiiType("es_nie", "digits", "EsNieRecognizer"),
    PiiType("it_fiscal_code", "codes", "ItFiscalCodeRecognizer", alone=0.3, confirmed=True),
    PiiType("pl_pesel", "digits", "PlPeselRecognizer", alone=NAMED_ONLY),
    PiiType("se_personnummer", "digits", "SePersonnummerRecognizer", alone=NAMED_ONLY),
    PiiType("kr_rrn", "digits", "KrRrnRecognizer", alone=NAMED_ONLY, words=("주민등록번호",)),
    PiiType("th_tnin", "digits", "ThTninRecognizer", alone=NAMED_ONLY),
    PiiType("tr_id", "digits", "TrNationalIdRecognizer", alone=NAMED_ONLY),
    PiiType("secret", "tokens", patterns=tuple((pattern, 0.7) for pattern in TOKENS), check=is_secret, default=False),
    PiiType("secret", "keys", patterns=((PRIVATE_KEY, 0.95),), check=is_secret, default=False),
)  # fmt: skip
"""If two overlapping values have equal scores, lengths and starts, the earlier type is chosen. South Africa's id is
omitted, because presidio's check of it depends on today's date."""
TYPE_NAMES = tuple(dict.fromkeys(kind.name for kind in TYPES))
DEFAULT_TYPES = tuple(dict.fromkeys(kind.name for kind in TYPES if kind.default))


@dataclass(frozen=True)
class LoadedRecognizer:
    """A type of personal data, its loaded recognizer, and a pattern for words that name the type, such as `IBAN`."""

    kind: PiiType
    recognizer: Any
    words: re.Pattern[str] | None

    def is_named(self, text: str, start: int, end: int) -> bool:
        """Return True if a word near text[start:end] names the type, such as `IBAN`."""
        near = text[max(0, start - NEAR_BEFORE) : start] + JOIN + text[end : end + NEAR_AFTER]
        return self.words is not None and self.words.search(near) is not None

    def find(self, text: str) -> list[tuple[int, int, float, bool]]:
        """Return (start, end, score, alone) of every value in an ASCII text.

        `alone` is True if the value is personal data even without a nearby word that names the type.
        """
        values = []
        for result in self.recognizer.analyze(text, self.recognizer.supported_entities, None):
            if self.kind.confirmed and result.score < 1:
                continue
            if self.kind.check is None or self.kind.check(text[result.start : result.end]):
                strength = result.analysis_explanation.original_score
                values.append((result.start, result.end, float(result.score), strength >= self.kind.alone))
        return values


def import_presidio() -> Any:
    """Import presidio_analyzer with its log disabled: a recognizer that fails would log personal data."""
    # presidio imports torch if it is installed but does not need it here. torch is hidden during the import, which
    # saves 2 s and 180 MB in each worker (measured).
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import presidio_analyzer.predefined_recognizers
    finally:
        if hidden:
            del sys.modules["torch"]
    logging.getLogger("presidio-analyzer").disabled = True
    return presidio_analyzer


def load_recognizers(names: tuple[str, ...]) -> list[LoadedRecognizer]:
    """Return the loaded recognizers of these types, except `phone`, which `phones.py` recognizes."""
    kinds = [kind for kind in TYPES if kind.name in names and kind.name != "phone"]
    if not kinds:
        return []
    presidio = import_presidio()
    loaded = []
    for kind in kinds:
        options: dict[str, Any] = {}
        if kind.patterns:
            patterns = [presidio.Pattern(kind.name, pattern, score) for pattern, score in kind.patterns]
            options = {"patterns": patterns, "supported_entity": kind.name.upper()}
        module = presidio if kind.recognizer == "PatternRecognizer" else presidio.predefined_recognizers
        recognizer = getattr(module, kind.recognizer)(**options)
        words = any_of(*kind.words, *map(str.strip, recognizer.context or ()))
        loaded.append(LoadedRecognizer(kind, recognizer, re.compile(words, re.IGNORECASE) if words else None))
    return loaded
