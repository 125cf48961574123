"""The types of personal data: how candidates of each are found, which recognizer confirms them, and on what conditions.

Most recognizers are presidio's pattern recognizers, called directly: they need no language model and no network. If
many harmless numbers look like a type, a value counts only if a nearby word names it (`NHS number 943 476 5919`).
"""

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import tldextract

from pipeline.pii import national_ids as ids
from pipeline.pii.candidates import JOIN, NEAR_AFTER, NEAR_BEFORE, any_of
from pipeline.pii.crypto import is_base58check, is_ethereum_address, is_segwit
from pipeline.pii.matching import Value, import_presidio, number_search, numbers_of, pattern_search, presidio_search
from pipeline.pii.on_request import (
    COORDINATES,
    DRIVER_LICENSES,
    HANDLES,
    MAC,
    PASSPORTS,
    PLATES,
    TRAVEL_ZONE,
    UK_LICENCE,
    is_device_address,
    is_machine_readable,
    is_place,
)
from pipeline.pii.secrets import PRIVATE_KEY, SECRETS, is_secret

# Uses the snapshot of the public suffix list in the package tldextract, without network and without a cache on disk.
_DOMAINS = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


@dataclass(frozen=True)
class PiiType:
    """A type of personal data; its placeholder is its name in upper case, such as `<EMAIL>`."""

    name: str
    family: str
    recognizer: str = "PatternRecognizer"
    """Name of its class in presidio_analyzer; the class's checksum, if it has one, always applies. Empty: our
    patterns are searched directly."""
    patterns: tuple[tuple[str, float], ...] = ()
    """Regular expressions with scores, which replace the recognizer's own. With `digits`, the forms in which the number
    is written, each with its score; any other form has 0.1."""
    check: Callable[[str], bool] | None = None
    """A further condition on the ASCII form of a value; with `digits`, on the digits alone."""
    digits: int = 0
    """Number of digits of a value without letters, 9 to 16: all types of one length share one search. 0 for others.
    A recognizer of presidio with this field runs only if the text has such a number."""
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

    `value` may end with the start of the next sentence, as in `name@example.com.Next` and `name@example.com-Tel.No`.
    """
    labels = value.rpartition("@")[2].split(".")
    whole = (labels[:end] for end in range(len(labels), 1, -1))
    cut = ([*labels[:at], labels[at].partition("-")[0]] for at in range(1, len(labels)) if "-" in labels[at])
    return any(_DOMAINS(".".join(domain)).fqdn for domain in (*whole, *cut))


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
    r"(?<![A-Za-z0-9])[A-Za-z0-9_](?:[A-Za-z0-9._%+'-]{0,126}[A-Za-z0-9_+-])?@"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+(?:[A-Za-z]{2,24}|xn--[A-Za-z0-9-]{2,59})(?![A-Za-z0-9])"
)
# Issuer ranges as the networks publish them: Visa, Mastercard (also 2221-2720), Discover, UnionPay, JCB, Mir in fours;
# American Express and Diners in their own groups; JCB's old ranges. Visa numbers of 13 or 19 digits and Maestro numbers
# look like article numbers, so they count only if a nearby word names them.
_FIELD = r"(?<=[0-9]{3}[ -]?[0-9]{4},)|(?<=[0-9],)(?=[0-9 -]{12,24},)"
"""After the comma of another number, but no decimals: after a long number, or before another comma."""
_WHOLE, _END = rf"(?<![0-9A-Za-z])(?:(?<![0-9][.,])|{_FIELD})", r"(?![0-9A-Za-z])"
_CARD = (
    _WHOLE + r"(?:4\d{3}|5[1-5]\d\d|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)|6(?:011|4[4-9]\d|5\d\d|2\d\d)"
    r"|35(?:2[89]|[3-8]\d)|220[0-4])([ -]?)\d{4}\1\d{4}\1\d{4}" + _END
)
_CARD_UNEVEN = (
    _WHOLE + r"(?:3[47]\d\d([ -]?)\d{6}\1\d{5}|3(?:0[0-5]|[689]\d)\d([ -]?)\d{6}\2\d{4}|(?:2131|1800)\d{11})" + _END
)
_CARD_LOOSE = _WHOLE + r"(?:4\d{12}|[456]\d{18}|(?:5[0678]\d\d|6\d{3})([ -]?)\d{4}\1\d{4}(?:\1\d{1,4})?|3\d{15})" + _END
# Four numbers after such a word, or all below 64, are mostly a version or a section; only a naming word makes them an
# address. A number with leading zeros is none.
_VERSION = (
    r"(?<!\b(?:versions?|version[a-z]{1,3}|vers?|v|builds?|releases?|firmware|driver|updates?|rev|kernel|sdk|chrome|opera"
    r"|section|chapter|clause|article|part|item)[\s.:#/v-]{1,3})"
)
_IPV4_START = rf"(?<![\w.])(?:(?<!\w/)|(?<=(?:[0-9]{{1,3}}\.){{3}}[0-9]{{1,3}}/)){_VERSION}(?![0-9.]*\b0[0-9])"
_IPV4_END = r"(?!(?-i:_?[0-9a-z])|\.(?!(?-i:[A-Z][a-z]))\w|-(?-i:[a-z]))"
_IPV4_LARGE = r"(?=[0-9.]*(?<![0-9])(?:6[4-9]|[7-9][0-9]|[12][0-9]{2})(?![0-9]))"
_IPV4_BODY = r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}"
_IPV4 = (
    (rf"{_IPV4_START}{_IPV4_LARGE}{_IPV4_BODY}{_IPV4_END}", 0.6),
    (rf"{_IPV4_START}(?!{_IPV4_LARGE}){_IPV4_BODY}{_IPV4_END}", 0.1),
)
# A colon before an address ends a word that is no group of digits, as in `IP:2001:db8::1`.
_IPV6 = (
    r"(?<![\w.]|::|(?<![0-9A-Za-z])[0-9A-Fa-f]{1,4}:)(?:[0-9A-Fa-f]{0,4}:){2,7}"
    r"(?:[0-9A-Fa-f]{1,4}|(?:[0-9]{1,3}\.){3}[0-9]{1,3})?(?<!(?<!:):)(?!_?[0-9A-Za-z]|:[0-9A-Fa-f:])"
)
_SSN = (
    (r"(?<![0-9A-Za-z])[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9A-Za-z])", 0.8),
    (r"\b[0-9]{3}([ .]?)[0-9]{2}\1[0-9]{4}\b", 0.1),
)
_SWISS, _BELGIAN = r"756\.[0-9]{4}\.[0-9]{4}\.[0-9]{2}", r"[0-9]{2}\.[0-9]{2}\.[0-9]{2}-[0-9]{3}\.[0-9]{2}"
_CPF, _CNPJ = r"[0-9]{3}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}", r"[0-9]{2}\.[0-9]{3}\.[0-9]{3}/[0-9]{4}-[0-9]{2}"
_NIF = ((r"\b[0-9]{7,8}-?[A-Z]\b", 0.5), (r"(?<![\w.])[0-9]{1,2}\.[0-9]{3}\.[0-9]{3}[ -]?[A-Z]\b", 0.5))
_NIR = r"[1-8] [0-9]{2} [0-9]{2} [0-9]{2} [0-9]{3} [0-9]{3} [0-9]{2}"
_CURP = r"\b[A-Z]{4}[0-9]{6}[HMX][A-Z]{5}[A-Z0-9][0-9]\b"
_RUT = (
    (r"(?<![\w.])[0-9]{1,2}\.[0-9]{3}\.[0-9]{3}-[0-9K](?![\w-])", 0.6),
    (r"(?<![\w.-])[0-9]{7,8}-?[0-9K](?![\w-])", 0.1),
)
_HETU = (
    (r"(?<![\w-])[0-9]{6}-[0-9]{3}[A-Y](?!\w)|(?<!\w)[0-9]{6}[A-F+U-Y][0-9]{3}[0-9A-Y](?!\w)", 0.6),
    (r"(?<![\w-])[0-9]{6}-[0-9]{4}(?![\w-])", 0.1),
)
_HKID = ((r"(?<!\w)[A-Z]{1,2}[0-9]{6}\([0-9A]\)", 0.6), (r"(?<!\w)[A-Z]{1,2}[0-9]{6}[0-9A](?!\w)", 0.1))
_ETHEREUM = r"(?<!\w)(?-i:0x[0-9a-fA-F]{40})(?!\w)"
_MIXED_CASE = r"(?-i:(?=0x[0-9A-F]*[a-f])(?=0x[0-9a-f]*[A-F]))"
_COIN = r"(?<!\w)(?-i:[13LMDXT][1-9A-HJ-NP-Za-km-z]{25,34})(?!\w)"
_SEGWIT = r"(?<!\w)(?-i:(?:bc|ltc)1[ac-hj-np-z02-9]{11,71})(?!\w)"
NAMED_ONLY = 2.0
"""Value of `alone` for a type whose values count only if a nearby word names the type."""

TYPES = (
    PiiType("email", "at", patterns=((_EMAIL, 0.9),), check=has_public_suffix),
    PiiType("phone", "digits"),
    PiiType("credit_card", "digits", "CreditCardRecognizer", ((_CARD, 0.6), (_CARD_UNEVEN, 0.6), (_CARD_LOOSE, 0.1)),
            words=("carte", "karte", "kreditkarte", "tarjeta", "carta", "cartão", "карта", "карты", "卡号", "银行卡")),
    PiiType("iban", "codes", "IbanRecognizer"),
    PiiType("ip", "dots", "IpRecognizer", _IPV4, is_personal_address, words=("address", "adresse", "dns", "server")),
    PiiType("ip", "colons", "IpRecognizer", ((_IPV6, 0.6),), is_personal_address),
    PiiType("crypto", "coins", "", ((_COIN, 0.9),), is_base58check),
    PiiType("crypto", "segwit", "", ((_SEGWIT, 0.9),), is_segwit),
    PiiType("crypto", "hex", "", ((_MIXED_CASE + _ETHEREUM, 0.9), (_ETHEREUM, 0.1)), is_ethereum_address, words=(
            "ethereum", "ether", "eth", "wallet", "wallets", "address", "erc20", "usdt", "钱包")),
    PiiType("cn_id", "digits", "", ((r"\b[1-9][0-9]{16}[0-9X](?![0-9])", 0.9),), check=is_resident_id),
    PiiType("us_ssn", "digits", "UsSsnRecognizer", _SSN, digits=9),
    PiiType("ca_sin", "digits", "CaSinRecognizer", digits=9, alone=NAMED_ONLY),
    PiiType("uk_nhs", "digits", "NhsRecognizer", digits=10, alone=NAMED_ONLY),
    PiiType("uk_nino", "codes", "UkNinoRecognizer"),
    PiiType("au_tfn", "digits", "AuTfnRecognizer", digits=9, alone=NAMED_ONLY),
    PiiType("au_medicare", "digits", "AuMedicareRecognizer", digits=10, alone=NAMED_ONLY),
    PiiType("in_aadhaar", "digits", "InAadhaarRecognizer", digits=12, alone=NAMED_ONLY, words=("aadhar", "आधार")),
    PiiType("in_pan", "codes", "InPanRecognizer", ((r"\b[A-Z]{3}[ABCFGHJLPT][A-Z][0-9]{4}[A-Z]\b", 0.5),)),
    PiiType("sg_nric", "digits", "SgFinRecognizer", alone=NAMED_ONLY),
    PiiType("de_tax_id", "digits", "", (), ids.de_tax_id, 11, NAMED_ONLY, words=(
            "steueridentifikationsnummer", "identifikationsnummer", "steuerliche identifikation",
            "steuer identifikation", "steuer-id", "steuerid", "idnr", "steuer-idnr", "steuernummer", "bzst")),
    PiiType("es_nif", "digits", "EsNifRecognizer", _NIF),
    PiiType("es_nie", "digits", "EsNieRecognizer"),
    PiiType("it_fiscal_code", "codes", "ItFiscalCodeRecognizer", alone=0.3, confirmed=True),
    PiiType("pl_pesel", "digits", "PlPeselRecognizer", digits=11, alone=NAMED_ONLY),
    PiiType("se_personnummer", "digits", "SePersonnummerRecognizer", alone=NAMED_ONLY),
    PiiType("kr_rrn", "digits", "KrRrnRecognizer", digits=13, alone=NAMED_ONLY, words=("주민등록번호",)),
    PiiType("th_tnin", "digits", "", (), ids.th_tnin, 13, NAMED_ONLY, words=(
            "thai national id", "thai id number", "tnin", "เลขประจำตัวประชาชน", "เลขบัตรประชาชน", "รหัสปชช")),
    PiiType("tr_id", "digits", "TrNationalIdRecognizer", digits=11, alone=NAMED_ONLY),
    PiiType("us_itin", "digits", "", (), ids.us_itin, 9, NAMED_ONLY,
            words=("itin", "taxpayer", "tax id", "individual taxpayer identification")),
    PiiType("nl_bsn", "digits", "", (), ids.nl_bsn, 9, NAMED_ONLY,
            words=("bsn", "burgerservicenummer", "sofinummer", "sofi")),
    PiiType("be_national_number", "digits", "", ((_BELGIAN, 0.6),), ids.be_national_number, 11, words=(
            "rijksregisternummer", "rijksregister", "insz", "niss", "registre national", "numéro national",
            "nationaal nummer")),
    PiiType("fr_nir", "digits", "", ((_NIR, 0.6),), ids.fr_nir, 15, words=(
            "nir", "sécurité sociale", "securite sociale", "sécu", "insee", "assuré social")),
    PiiType("br_cpf", "digits", "", ((_CPF, 0.6),), ids.br_cpf, 11, words=("cpf", "cadastro de pessoas físicas")),
    PiiType("br_cnpj", "digits", "", ((_CNPJ, 0.6),), ids.br_cnpj, 14, words=("cnpj",), default=False),
    PiiType("ru_snils", "digits", "", ((r"[0-9]{3}-[0-9]{3}-[0-9]{3} [0-9]{2}", 0.6),), ids.ru_snils, 11,
            words=("снилс", "snils", "страховой номер")),
    PiiType("ru_inn", "digits", "", (), ids.ru_inn, 12, NAMED_ONLY, words=("инн", "inn", "налогоплательщика")),
    PiiType("mx_curp", "codes", "", ((_CURP, 0.9),), ids.mx_curp),
    PiiType("cz_rodne_cislo", "digits", "", (), ids.cz_rodne_cislo, 10, NAMED_ONLY,
            words=("rodné číslo", "rodne cislo", "rodného čísla", "r.č", "rč", "birth number")),
    PiiType("ro_cnp", "digits", "", (), ids.ro_cnp, 13, NAMED_ONLY, words=("cnp", "cod numeric personal")),
    PiiType("dk_cpr", "digits", "", (), ids.dk_cpr, 10, NAMED_ONLY,
            words=("cpr", "cpr-nr", "cpr-nummer", "cprnr", "cprnummer", "personnummer")),
    PiiType("no_fodselsnummer", "digits", "", (), ids.no_fodselsnummer, 11, NAMED_ONLY, words=(
            "fødselsnummer", "fødselsnr", "fodselsnummer", "personnummer", "d-nummer", "fnr")),
    PiiType("fi_hetu", "digits", "", _HETU, ids.fi_hetu, words=("hetu", "henkilötunnus", "henkilötunnuksen",
            "personbeteckning", "sotu", "personal identity code")),
    PiiType("fi_hetu", "dots", "", _HETU, ids.fi_hetu),
    PiiType("hr_oib", "digits", "", (), ids.hr_oib, 11, NAMED_ONLY, words=("oib", "osobni identifikacijski broj")),
    PiiType("pt_nif", "digits", "", (), ids.pt_nif, 9, NAMED_ONLY,
            words=("nif", "contribuinte", "identificação fiscal")),
    PiiType("ar_cuil", "digits", "", ((r"[0-9]{2}-[0-9]{8}-[0-9]", 0.6),), ids.ar_cuil, 11, words=("cuil", "cuit")),
    PiiType("cl_rut", "digits", "", _RUT, ids.cl_rut,
            words=("rut", "run", "rol único tributario", "cédula de identidad")),
    PiiType("za_id", "digits", "", (), ids.za_id, 13, NAMED_ONLY, words=(
            "id number", "identity number", "id no", "identity no", "south african id", "rsa id", "identiteitsnommer")),
    PiiType("il_id", "digits", "", (), ids.il_id, 9, NAMED_ONLY, words=(
            "ת.ז", "ת״ז", 'ת"ז', "תעודת זהות", "מספר זהות", "teudat zehut", "israeli id")),
    PiiType("hk_id", "digits", "", _HKID, ids.hk_id, words=("hkid", "identity card", "身份證", "身份证", "身份證號碼")),
    PiiType("hk_id", "dots", "", _HKID, ids.hk_id),
    PiiType("tw_id", "digits", "", ((r"(?<!\w)[A-Z][1289][0-9]{8}(?!\w)", 0.1),), ids.tw_id, alone=NAMED_ONLY,
            words=("身分證", "身份證", "統一編號", "national id", "id number")),
    PiiType("ch_ahv", "digits", "", ((_SWISS, 0.9),), ids.ch_ahv, 13, words=(
            "ahv", "avs", "ahv-nummer", "sozialversicherungsnummer", "oasi")),
    PiiType("at_svnr", "digits", "", (), ids.at_svnr, 10, NAMED_ONLY, words=(
            "svnr", "sv-nr", "sv-nummer", "sozialversicherungsnummer", "versicherungsnummer", "vsnr")),
    PiiType("gr_amka", "digits", "", (), ids.gr_amka, 11, NAMED_ONLY, words=("αμκα", "α.μ.κ.α", "amka")),
    PiiType("ie_pps", "digits", "", ((r"(?<!\w)[0-9]{7}[A-W][A-IW]?(?!\w)", 0.1),), ids.ie_pps,
            alone=NAMED_ONLY, words=("pps", "ppsn", "pps no", "personal public service")),
    PiiType("ir_melli", "digits", "", (), ids.ir_melli, 10, NAMED_ONLY,
            words=("کد ملی", "کدملی", "شماره ملی", "melli")),
    PiiType("ua_rnokpp", "digits", "", (), ids.ua_rnokpp, 10, NAMED_ONLY,
            words=("рнокпп", "іпн", "ідентифікаційний")),
    PiiType("ee_isikukood", "digits", "", (), ids.ee_isikukood, 11, NAMED_ONLY, words=("isikukood", "isikukoodi")),
    PiiType("lt_asmens_kodas", "digits", "", (), ids.ee_isikukood, 11, NAMED_ONLY,
            words=("asmens kodas", "asmens kodo", "a.k")),
    PiiType("jp_my_number", "digits", "", (), ids.jp_my_number, 12, NAMED_ONLY,
            words=("マイナンバー", "個人番号", "my number")),
    PiiType("id_nik", "digits", "", (), ids.id_nik, 16, NAMED_ONLY, words=("nik", "ktp", "induk kependudukan")),
    PiiType("my_kad", "digits", "", (), ids.my_kad, 12, NAMED_ONLY, words=(
            "mykad", "no. k/p", "kad pengenalan", "nric", "ic no", "ic number")),
    PiiType("eg_national_id", "digits", "", (), ids.eg_national_id, 14, NAMED_ONLY, words=(
            "الرقم القومي", "رقم قومي", "بطاقة", "national id")),
    PiiType("vn_cccd", "digits", "", (), ids.vn_cccd, 12, NAMED_ONLY, words=("cccd", "căn cước", "định danh")),
    PiiType("pk_cnic", "digits", "", (), ids.pk_cnic, 13, NAMED_ONLY, words=(
            "cnic", "nicop", "شناختی کارڈ", "national identity card")),
    PiiType("passport", "codes_on_request", "", ((PASSPORTS, 0.6),), None, 0, NAMED_ONLY, default=False, words=(
            "passport", "passports", "passport no", "passeport", "reisepass", "pasaporte", "passaporto", "passaporte",
            "paspoort", "pass-nr", "паспорт", "паспорта", "护照", "護照", "パスポート", "旅券", "여권", "جواز")),
    PiiType("passport", "travel_zone", "", ((TRAVEL_ZONE, 0.9),), is_machine_readable, default=False),
    PiiType("us_driver_license", "codes_on_request", "", ((DRIVER_LICENSES, 0.6),),
            alone=NAMED_ONLY, default=False, words=(
            "driver's license", "drivers license", "driver license", "driver’s license", "dl", "dln",
            "driver's licence")),
    PiiType("uk_driving_licence", "codes_on_request", "", ((UK_LICENCE, 0.9),), default=False),
    PiiType("vehicle_plate", "plates", "", ((PLATES, 0.6),), None, 0, NAMED_ONLY, default=False, words=(
            "license plate", "licence plate", "plate number", "plate no", "number plate", "registration number",
            "registration plate", "kennzeichen", "immatriculation", "immatriculé", "immatriculée", "plaque", "targa",
            "matrícula", "matricula", "placa", "placas", "kenteken", "rejestracyjny", "rejestracyjna", "plaka",
            "госномер", "车牌", "車牌", "ナンバープレート")),
    PiiType("mac", "colons", "", ((MAC, 0.9),), is_device_address, default=False),
    PiiType("mac", "hyphens", "", ((MAC, 0.9),), is_device_address, default=False),
    PiiType("coordinates", "degrees", "", COORDINATES, is_place, default=False, words=(
            "coordinates", "latitude", "lat", "gps", "coordonnées", "koordinaten", "coordenadas", "坐标",
            "координаты")),
    PiiType("username", "handles", "", HANDLES, default=False),
    *(PiiType("secret", family, patterns=tuple((pattern, 0.7) for pattern in patterns), check=is_secret, default=False)
      for family, patterns in SECRETS.items()),
    PiiType("secret", "keys", patterns=((PRIVATE_KEY, 0.95),), check=is_secret, default=False),
)  # fmt: skip
"""If two overlapping values have equal scores, lengths and starts, the earlier type is chosen. Presidio's check of
South Africa's id depends on today's date, so ours replaces it."""
TYPE_NAMES = tuple(dict.fromkeys(kind.name for kind in TYPES))
DEFAULT_TYPES = tuple(dict.fromkeys(kind.name for kind in TYPES if kind.default))


@dataclass(frozen=True)
class LoadedRecognizer:
    """A type of personal data, its search, and a pattern for words that name the type, such as `IBAN`."""

    kind: PiiType
    search: Callable[[str], Iterable[Value]]
    words: re.Pattern[str] | None

    def is_named(self, text: str, start: int, end: int) -> bool:
        """Return True if a word near text[start:end] names the type, such as `IBAN`."""
        near = text[max(0, start - NEAR_BEFORE) : start] + JOIN + text[end : end + NEAR_AFTER]
        return self.words is not None and self.words.search(near) is not None

    def find(self, text: str) -> list[tuple[int, int, float, bool]]:
        """Return (start, end, score, alone) of every value in an ASCII text.

        `alone` is True if the value is personal data even without a nearby word that names the type.
        """
        if self.kind.digits and not numbers_of(text, self.kind.digits):  # Most texts have no number of a given length.
            return []
        return [(start, end, score, strength >= self.kind.alone) for start, end, score, strength in self.search(text)]


def load_recognizers(names: tuple[str, ...]) -> list[LoadedRecognizer]:
    """Return the loaded recognizers of these types, except `phone`, which `phones.py` recognizes."""
    kinds = [kind for kind in TYPES if kind.name in names and kind.name != "phone"]
    presidio = import_presidio() if kinds else None
    loaded = []
    for kind in kinds:
        search, named = _load(kind, presidio)
        words = any_of(*kind.words, *map(str.strip, named))
        loaded.append(LoadedRecognizer(kind, search, re.compile(words, re.IGNORECASE) if words else None))
    return loaded


def _load(kind: PiiType, presidio: Any) -> tuple[Callable[[str], Iterable[Value]], Sequence[str]]:
    """Return the search of a type, and the words that its recognizer knows to name it."""
    if not kind.recognizer:
        if kind.digits and kind.check:
            return number_search(kind.digits, kind.patterns, kind.check), ()
        return pattern_search(kind.patterns, kind.check), ()
    options: dict[str, Any] = {}
    if kind.patterns:
        patterns = [presidio.Pattern(kind.name, pattern, score) for pattern, score in kind.patterns]
        options = {"patterns": patterns, "supported_entity": kind.name.upper()}
    module = presidio if kind.recognizer == "PatternRecognizer" else presidio.predefined_recognizers
    recognizer = getattr(module, kind.recognizer)(**options)
    return presidio_search(recognizer, kind.check, kind.confirmed), recognizer.context or ()
