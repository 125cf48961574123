"""Values of page metadata: cleans strings, and parses dates, languages, licences, URLs and names of authors.

Every function takes what a page declares, which can be anything, and returns a value of one form or None.
"""

import html
import re
from collections.abc import Collection
from datetime import date
from urllib.parse import unquote, urljoin, urlsplit

from schemas.normalization import normalize

MAX_URL_CHARS = 2_000
"""Maximum length of a URL [code points]; a longer one is null, because a part of a URL names another page."""
MAX_VALUE_CHARS = 5_000
"""Length from which a declared value is cut before it is cleaned [code points]."""
MAX_AUTHORS = 20
MIN_DATE = date(1990, 1, 1)
"""First date that is accepted; the first web page is from 1990."""

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060\ufeff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NOT_ALNUM = re.compile(r"[\W_]+")
_TAGS = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")


def clean(value: object, max_chars: int) -> str | None:
    """Return a declared string on one line, in NFC, without entities, tags and control characters, cut to `max_chars`.

    None if it is not a string, or if nothing is left.
    """
    if not isinstance(value, str):
        return None
    text = value[:MAX_VALUE_CHARS]
    if "&" in text:
        text = html.unescape(text)
    if "<" in text:
        text = _TAGS.sub(" ", text)
    if not text.isascii():
        text = normalize("NFC", _SURROGATE.sub("\ufffd", text))
    return " ".join(_CONTROL.sub("", text).split())[:max_chars].strip() or None


def squeezed(text: str) -> str:
    """Return the letters and digits of a text in lower case, to compare titles and names."""
    return _NOT_ALNUM.sub("", normalize("NFKC", text).casefold())


# ----------------------------------------------------------------------------------------------------------------- URL


def absolute_url(value: object, base: str | None) -> str | None:
    """Return a declared URL resolved against `base`, without fragment. None if it is not a valid http(s) URL."""
    if not isinstance(value, str):
        return None
    value = value.strip()
    if not value or len(value) > MAX_URL_CHARS or _CONTROL.search(value) or _SURROGATE.search(value):
        return None
    try:
        url = urljoin(base or "", value)
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # such as "http://[" or a port that is not a number
        return None
    url = url.partition("#")[0]
    return url if is_web and not re.search(r"\s", url) and len(url) <= MAX_URL_CHARS else None


# ---------------------------------------------------------------------------------------------------------------- date

_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "january jan januar janvier janv enero ene gennaio gen janeiro jänner januari stycznia января",
            "february feb februar février févr fevrier febrero febbraio fevereiro fev februari lutego февраля",
            "march mar märz mars marzo março marco maart marca марта",
            "april apr avril avr abril abr aprile kwietnia апреля",
            "may mai mayo maggio maio mei maja мая",
            "june jun juni juin junio giugno junho czerwca июня",
            "july jul juli juillet juil julio luglio julho lipca июля",
            "august aug août aout agosto ago augustus sierpnia августа",
            "september sep sept septembre septiembre settembre setembro września сентября",
            "october oct oktober okt octobre octubre ottobre outubro października октября",
            "november nov novembre noviembre novembro listopada ноября",
            "december dec dezember dez décembre decembre diciembre dic dicembre dezembro grudnia декабря",
        ),
        1,
    )
    for name in names.split()
}
_PLAIN_SIGNS = str.maketrans(
    "".join(map(chr, [*range(0xFF10, 0xFF1A), *range(0x2010, 0x2014), 0x2212, 0xFF0F, 0xFF0E])), "0123456789-----/."
)
"""Full-width digits and separators, and dashes → those of ASCII."""
_ISO = re.compile(r"(?<!\d)((?:19|20)\d\d)([-/.]?)([01]?\d)\2([0-3]?\d)(?!\d)")
_COMPACT = re.compile(r"(?<!\d)((?:19|20)\d\d)([01]\d)([0-3]\d)(?:[T ]?[0-2]\d[0-5]\d(?:[0-5]\d)?Z?)?(?!\d)")
_CJK = re.compile(r"((?:19|20)\d\d) ?[年년] ?([01]?\d) ?[月월] ?([0-3]?\d) ?[日일]")
_DAY_FIRST = re.compile(
    r"(?<!\d)([0-3]?\d)(?:st|nd|rd|th|\.|er|º)?[ \-](?:de |of )?([^\W\d_]{3,10})\.?,?[ \-](?:de )?((?:19|20)\d\d)(?!\d)"
)
_MONTH_FIRST = re.compile(r"(?<![^\W_])([^\W\d_]{3,10})\.? ([0-3]?\d)(?:st|nd|rd|th)?,? ?((?:19|20)\d\d)(?!\d)")
_NUMERIC = re.compile(r"(?<!\d)([0-3]?\d)([./-])([0-3]?\d)\2((?:19|20)\d\d)(?!\d)")
_IN_PATH = re.compile(r"[/_-]((?:19|20)\d\d)([/_-])([01]?\d)\2([0-3]?\d)(?=[/_.-]|$)")


def parse_date(value: object) -> date | None:
    """Return the calendar date that a string states, in the string's own time zone. None if it states none.

    ISO 8601, RFC 2822, `May 17, 2024`, `17. Mai 2024`, `2024年5月17日` and `17.05.2024` are read. Numbers such as
    `03/04/2024` are ambiguous and give None. A day of more than 31 or a month of more than 12 gives None.
    """
    if not isinstance(value, str) or not any(character.isdigit() for character in value[:200]):
        return None
    text = value[:200]
    if not text.isascii():
        text = normalize("NFC", " ".join(text.split())).translate(_PLAIN_SIGNS)
    if match := _ISO.search(text) or _COMPACT.search(text) or _CJK.search(text):
        groups = match.groups()
        return _day(groups[0], groups[-2], groups[-1])
    if match := _DAY_FIRST.search(text):
        return _day(match[3], _MONTHS.get(match[2].casefold(), 0), match[1])
    if match := _MONTH_FIRST.search(text):
        return _day(match[3], _MONTHS.get(match[1].casefold(), 0), match[2])
    if match := _NUMERIC.search(text):
        first, separator, second, year = match.groups()
        if separator == "." or int(first) > 12:
            return _day(year, second, first)
        return _day(year, first, second) if int(second) > 12 or first == second else None
    return None


def is_month(word: str) -> bool:
    """Return whether a word is the name of a month or its abbreviation."""
    return word.rstrip(".,").casefold() in _MONTHS


def date_in_url(url: str) -> date | None:
    """Return the date in the path of a URL, such as `/2024/05/17/` or `-2024-05-17`. None if there is none."""
    match = _IN_PATH.search(url.partition("?")[0][:MAX_URL_CHARS])
    return _day(match[1], match[3], match[4]) if match else None


def _day(year: str, month: str | int, day: str) -> date | None:
    try:
        return date(int(year), int(month), int(day))
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------------ language

_LANGUAGES = {
    **{"iw": "he", "in": "id", "ji": "yi", "jw": "jv", "mo": "ro", "sh": "sr"},
    **{"jp": "ja", "cn": "zh", "cz": "cs", "dk": "da", "gr": "el", "ua": "uk", "vn": "vi"},
    **{"eng": "en", "deu": "de", "ger": "de", "fra": "fr", "fre": "fr", "spa": "es", "ita": "it", "por": "pt"},
    **{"rus": "ru", "zho": "zh", "chi": "zh", "jpn": "ja", "kor": "ko", "pol": "pl", "nld": "nl", "dut": "nl"},
    **{"ara": "ar", "tur": "tr", "ell": "el", "gre": "el", "ces": "cs", "cze": "cs", "swe": "sv", "ukr": "uk"},
}
"""Deprecated codes, country codes that pages use by mistake (they name no language), and ISO 639-2 codes."""
_NO_LANGUAGE = frozenset(("und", "mul", "zxx", "mis"))
_PRIMARY = re.compile(r"([a-z]{2,3})(?:[-_][a-z0-9]{1,8})*", re.IGNORECASE)


def language_code(value: object) -> str | None:
    """Return the BCP 47 primary subtag of a declaration, such as `pt` of `pt_BR`. None if it names no one language."""
    match = _PRIMARY.fullmatch(value.strip()[:40]) if isinstance(value, str) else None
    if match is None:
        return None
    code = match[1].lower()
    return None if code in _NO_LANGUAGE else _LANGUAGES.get(code, code)


# ------------------------------------------------------------------------------------------------------------- licence

_PART = "(?:BY|NC|ND|SA)"
_PARTS = re.compile(_PART)
_CC_URL = re.compile(
    rf"CREATIVECOMMONS\.ORG/+(?:LICEN[CS]ES|PUBLICDOMAIN)/+(ZERO|MARK|{_PART}(?:[^A-Z0-9/?#]{{1,3}}{_PART})*)"
    r"(?=[^A-Z0-9+_-]|\Z)(?:/+(\d\.\d)(?:/+(IGO|[A-Z]{2})\b(?!\.))?)?"
)
_VERSION = r"(?: ?(?:V|VERSION)?\.? ?(\d\.\d))?"
_CC_TEXT = re.compile(rf"\b(?:CC|CREATIVE COMMONS) ?(0(?![A-Z0-9])|ZERO|BY(?: ?(?:NC|ND|SA))*)(?![A-Z]){_VERSION}")
_CC_NAME = re.compile(r"\bCREATIVE COMMONS (?:LICEN[CS]E )?(ATTRIBUTION(?![A-Z])[^.;\d]{0,80})(\d\.\d)?")
_NAMED_PARTS = {
    "NC": re.compile(r"\bNON? ?COMMERCIAL|\bNC\b"),
    "ND": re.compile(r"\bNON? ?DERIV|\bND\b"),
    "SA": re.compile(r"\bSHARE ?ALIKE|\bSA\b"),
}
_FORMAT_CHARS = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff]")


def licence_name(value: object) -> str | None:
    """Return the SPDX-like name of a Creative Commons licence that a URL or a text names. None if it names none.

    The version and the jurisdiction are part of the name if they are declared: `CC-BY-SA-3.0-DE`, `CC-BY`, `CC0-1.0`.
    The conditions NC, ND and SA count in any order and with any signs between them.
    """
    if not isinstance(value, str):
        return None
    text = value[:MAX_VALUE_CHARS].upper()
    if match := _CC_URL.search(unquote(text) if "%" in text else text):
        kind, version, place = match.groups()
        if kind in ("ZERO", "MARK"):
            return _joined("CC0" if kind == "ZERO" else "CC-PDM", version)
        return _joined(_with_parts(_PARTS.findall(kind)), version, None if place == "EN" else place)
    # Blanks and dashes of all kinds are one blank, since editors replace them.
    text = re.sub(r"[^A-Z0-9.;]+", " ", _FORMAT_CHARS.sub("", normalize("NFKC", text)))
    if match := _CC_TEXT.search(text):
        kind, version = match.groups()
        if kind in ("0", "ZERO"):
            return _joined("CC0", version)
        if match[0].startswith("CC") or kind != "BY" or version:  # "Creative Commons by" is no licence
            return _joined(_with_parts(_PARTS.findall(kind)), version)
    if match := _CC_NAME.search(text):
        named = [part for part, pattern in _NAMED_PARTS.items() if pattern.search(match[1])]
        return _joined(_with_parts(["BY", *named]), match[2])
    return None


def _with_parts(parts: Collection[str]) -> str:
    return "-".join(("CC", *(part for part in ("BY", "NC", "ND", "SA") if part in parts)))


def _joined(*parts: str | None) -> str:
    return "-".join(filter(None, parts))


# -------------------------------------------------------------------------------------------------------------- author

_BY = re.compile(
    r"^(?:(?:(?i:article|story|guide|words|text|post|posted|published|written|reviewed|author|autor|auteur|автор)\b(?:\s*[:：|/]\s*|"
    r"\s+(?=(?i:by|von|por|par)\b))|(?:By|BY|by|Von|VON|von|Por|por|Par|par|di|af|av|door|przez)\b:?\s+|"
    r"(?:By|by|作者|文|記者|记者)\s*[:：]\s*|[-–—•|:：@]\s*))+"
)
_GLUED_BY = re.compile(r"^(?:(?:[Ww]ritten|[Pp]osted) ?)?[Bb]y(?=[A-Z])")
_AFTER_NAME = re.compile(
    r"\s*(?:[|•·–—»]|\s-\s|\(|,?\s(?:on|at|in)(?:\s\d|$)|"
    r"\d{1,2}(?:st|nd|rd|th)?\s(?=[A-Z][a-z]{2})|,?\s\d|"
    r"[.,]?\s?(?i:(?:last )?updated|published|posted|(?:medically )?reviewed|fact[- ]checked|edited)\b|"
    r"(?:(?<=[^\W\d_A-Z])|,?\s)(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]{0,6}\.? ?\d|"
    r",?\s?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}\b[, ]).*$"
)
_SEVERAL = re.compile(r"\s*(?:[;、|]|,?\s+(?:and|und|et|y|e|&)\s+)\s*")
_NO_NAME = frozenset(
    (
        *("admin", "administrator", "author", "editor", "guest", "null", "none", "undefined", "unknown", "anonymous"),
        *("nan", "na", "user", "webmaster", "true", "false", "by"),
    )
)


def author_names(values: list[str]) -> list[str]:
    """Return the distinct names of bylines, without "By" and its like, dates, URLs, addresses and placeholders."""
    names: dict[str, str] = {}
    for value in values[:MAX_AUTHORS]:
        if re.search(r"https?:|www\.|@\w+\.\w|\.(?:com|org|net)/", value):
            continue
        for part in _SEVERAL.split(_BY.sub("", _GLUED_BY.sub("", value))):
            name = _AFTER_NAME.sub("", _BY.sub("", part)).strip(" ,.:-–—|•·*\"'“”/") if part else ""
            key = squeezed(name)
            if len(key) >= 2 and len(name) <= 100 and key not in _NO_NAME:
                names.setdefault(key, name)
    return list(names.values())[:MAX_AUTHORS]
