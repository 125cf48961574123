"""Recognition of telephone numbers: runs of digits are parsed as numbers of the main countries of the page's language.

libphonenumber determines if a number is assigned or at least possible. Notation and nearby words determine if digits
are a telephone number at all. (presidio's recognizer runs libphonenumber's matcher over the text for each country.)
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from pipeline.pii.candidates import digit_runs, is_decimal

REGIONS = {
    language: tuple(regions.split())
    for language, regions in {
        "ar": "SA EG AE MA", "bg": "BG", "bn": "BD IN", "ca": "ES", "cs": "CZ", "da": "DK", "de": "DE AT CH",
        "el": "GR", "en": "US GB AU IN", "es": "ES MX AR CO", "et": "EE", "fa": "IR", "fi": "FI", "fr": "FR BE CH CA",
        "he": "IL", "hi": "IN", "hr": "HR", "hu": "HU", "id": "ID", "it": "IT CH", "ja": "JP", "ko": "KR", "lt": "LT",
        "lv": "LV", "ms": "MY", "nl": "NL BE", "no": "NO", "pl": "PL", "pt": "BR PT", "ro": "RO", "ru": "RU KZ BY",
        "sk": "SK", "sl": "SI", "sr": "RS", "sv": "SE", "th": "TH", "tr": "TR", "uk": "UA", "ur": "PK", "vi": "VN",
        "zh": "CN TW HK",
    }.items()
}  # fmt: skip
"""Countries that publish most of the pages in a language, by language code, the largest first."""
DEFAULT_REGIONS = ("US", "GB", "DE", "FR")
"""Countries tried for a page in any other language."""

INTERNATIONAL, ASSIGNED, WRITTEN_LIKE_PHONE = 0.9, 0.6, 0.45
"""Scores of an assigned number with country code, of an assigned national number, and of digits that only look like a
telephone number."""

MAX_GROUPS, NEAR = 8, 32
"""Maximum number of digit groups in a telephone number, and maximum distance of a naming word before it [characters].
"""
MAX_AREA = 10
"""Maximum length of a country code with the area code, as in `+49 (0) 30` [characters]. A bracket after more begins
another number."""

NAMING_WORDS = frozenset({
    "call", "cel", "cell", "celular", "cellulare", "contact", "fax", "fon", "fone", "handy", "hotline", "kom",
    "kontakt", "mob", "mobil", "mobile", "móvil", "ph", "phone", "portable", "ruf", "rufnummer", "sms", "tel",
    "telefon", "telefone", "telefono", "telefonu", "telefoon", "telemóvel", "telephone", "teléfono", "tfno", "tél",
    "téléphone", "tlf", "whatsapp", "моб", "тел", "телефон", "телефону", "факс", "هاتف", "تلفون", "جوال",
})  # fmt: skip
"""Words that mark digits close to them as a telephone number, if no other digits are between."""
NAMING_PARTS = (
    "电话", "電話", "手机", "手機", "热线", "熱線", "传真", "傳真", "携帯", "전화", "휴대폰", "팩스", "โทร", "फोन",
    "मोबाइल", "wa.me/",
)  # fmt: skip
"""The same in scripts without spaces, where these words occur inside longer runs of characters."""

_SIGNS = re.compile(r"(?:\+ |[+(]{0,2})\Z")
_GROUP = re.compile("[0-9]+")
_DIGITS, _WORD = re.compile(r"\d"), re.compile(r"[^\W\d_]+")
_INSIDE, _AFTER_AREA = re.compile(r"[ ./-]|\)?[ -]?\(|\)[ ./-]?|- "), re.compile(r"\)? ?[-/] ?")
"""Separators between the digit groups of a number, and between its area code and the rest; any other text separates two
numbers."""
# Three numbers with blanks around their dashes, as in 415 - 555 - 0139 and 1 - 800 - 555 - 0199.
_SPACED = re.compile(
    r"(?:1 ?- ?)?(?:\([0-9]{3}\) ?- ?[0-9]{3,4} ?- ?[0-9]{4}|[0-9]{3} - [0-9]{3,4} - [0-9]{4})(?![0-9]| ?-)"
)
# Notations of a fixed length without blanks, so that a number beside them is another: 415-555-0139, 06.12.34.56.78.
_CLOSED = re.compile(
    r"(?:(?:\([0-9]{3}\)[ -]?|[0-9]{3}[-.])[0-9]{3,4}[-.][0-9]{4}|0[0-9](?:[-.][0-9]{2}){4})(?![0-9]|[-.][0-9])"
)
_EXTENSION = re.compile(
    r"[ ,;]{0,2}\(?(?:(x|(?:ext(?:ension|n)?|durchwahl|poste|interno|ramal|anexo|toestel|wew|доб)\b[.: ]{0,3}"
    r"|(?:转|轉|分机|分機|内线|內線|内線)[:： ]{0,2})|#|\*|-(?=[0-9]{1,4}(?![-0-9])))[0-9]{1,6}(?![0-9A-Za-z])",
    re.IGNORECASE,
)
"""An extension after a number; a word for it marks the digits before it as a telephone number."""
_NEXT = re.compile(
    r"[\s)]{0,3}(?:[,;/|&、，；或和及]|\b(?:or|and|oder|und|ou|et|o|y|e|или|и|of|en)\b)[\s(+]{0,3}", re.IGNORECASE
)
"""What is between a number and a second number of the same person."""
# Digits with separators that are no telephone number: dates, also after minutes, years, pages of a journal, ranges of
# ZIP codes, the prefix of Britain's text relay, ISBN-13, groups as in an IP address or a US SSN.
_OTHER = re.compile(
    r"[0-5][0-9] (?:0[1-9]|[12][0-9]|3[01])\.(?:0[1-9]|1[0-2])\.(?:19|20)[0-9]{2}(?![0-9])"
    r"|(?:0?[1-9]|1[0-2])/(?:19|20)[0-9]{2}(?![0-9])|[0-9]{1,4}-[0-9]{1,4} \((?:1[5-9]|20)[0-9]{2}(?=\))"
    r"|0[0-9]{4} ?- ?0[0-9]{4}(?![0-9-])|1800[12](?= 0)"
    r"|(?:1[5-9]|20)[0-9]{2}[-./ ](?:0?[1-9]|1[0-2])[-./ ](?:0?[1-9]|[12][0-9]|3[01])(?![0-9])"
    r"|(?:0?[1-9]|[12][0-9]|3[01])[-./ ](?:0?[1-9]|[12][0-9]|3[01])[-./ ](?:1[5-9]|20)[0-9]{2}(?![0-9])"
    r"|(?:(?:1[5-9]|20)[0-9]{2}[ ()./-]{0,3}){2,}(?![0-9])"
    r"|97[89](?:[- ]?[0-9]){10}(?![0-9])"
    r"|[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?!\.?[0-9])|[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9])"
)
_BEFORE = re.compile(r"(?:[0-9A-Za-z]|[$]\s?|\b(?:isbn|issn|pmid|doi|ean|upc|sku)[\s.:-]*)\Z", re.IGNORECASE)
"""What no telephone number follows."""
_PART = re.compile(r"[0-9][-./]\Z")
"""What precedes a part of a longer number, unless a plus sign begins another one."""
_LABEL = re.compile(
    r"(?:[=#]\s?|(?<=[0-9A-Za-z])_|(?<=[a-z]{3})(?<!tel)(?<!fax)(?<!fon)(?<!one)(?<!mob)/"
    r"|\b(?:(?<!\bto )order|id|ref|art|(?P<number>no|nr))[\s.:-]*)\Z",
    re.IGNORECASE,
)
"""What mostly precedes other numbers: a parameter, an identifier, a path of an address, or a word such as order. After
it, only assigned numbers with a country code count, unless a word names them; after no. and nr., that word precedes."""
_FOLLOWING = re.compile(r"_?[0-9A-Za-z]|[-./:][0-9]|\s?(?:%|[$]|(?:EUR|USD|GBP|euros?|dollars?|km|kg)\b)")
_YEAR = re.compile(r" \(?(?:19|20)[0-9]{2}(?![0-9-])")
"""A year after a number, as in `030 901820 (2024)`."""
_THOUSANDS = re.compile(r" [0-9]{1,3},[0-9]{3}(?![0-9])")
"""The last group of a number with thousands after it, as in `1965 163,214,076`."""
# The 1 of mobile numbers in Mexico was abolished in 2019.
_TRUNK = re.compile(r"(?:\+ ?|00)(?:([0-9]{1,3})[ .-]0|(52)[ .-]?1)")
_STREET = re.compile(r" (?:[NSEW]\.? )?[A-Z][a-z]+ (?:St|Street|Ave|Avenue|Rd|Road|Blvd|Dr|Drive|Ln|Lane|Way)\b")
_STATE, _ZIP = re.compile(r"\b[A-Z]{2},? {1,2}\Z"), re.compile(r"[0-9]{5}-[0-9]{4}(?![0-9-])")
"""A street after what looks like a local number, and the state before a ZIP code of nine digits."""
# Lengths of digit groups that mark a telephone number without any other sign, as in 415-555-0139 and 138 0000 9430.
_GROUPINGS = {(3, 3, 4), (3, 4, 4), (1, 3, 3, 4), (1, 3, 3, 2, 2), (3, 3, 2, 2)}

Groups = list[tuple[int, int]]
PhoneSpan = tuple[int, int, float]
"""(start, end, score) of a telephone number."""


def find_phones(text: str, folded: str, language: str | None) -> Iterator[PhoneSpan]:
    """Yield (start, end, score) of every telephone number in a text, given the text and its ASCII form."""
    regions = REGIONS.get(language or "", DEFAULT_REGIONS)
    last = -1
    for run in digit_runs(folded):
        for groups in _segments(folded, run):
            first = size = 0
            is_named = False  # by a word before the first number of a list
            while first < len(groups):
                begin = groups[first][0]
                follows = last >= 0 and begin - last <= NEAR and _NEXT.fullmatch(text, last, begin) is not None
                follows = follows or (is_named and _is_alike(folded, groups, first, size))
                number = _number_in(text, folded, groups, (first, follows, regions))
                if number is None:
                    first, size = _next_closed(folded, groups, first), 0
                    continue
                yield number
                start, last, _ = number
                is_named = is_named or (not first and (follows or _names(text[max(0, start - NEAR) : start])))
                begin_number = bisect_left(groups, (start,), first)
                first = bisect_left(groups, (last,), begin_number)
                size = first - begin_number


def _next_closed(folded: str, groups: Groups, first: int) -> int:
    """Return the first group after `first` that begins a number in a closed notation after a blank."""
    for index in range(first + 1, len(groups)):
        begin = groups[index][0]
        bracket = folded.startswith("(", begin - 1)
        if folded.startswith(" ", begin - bracket - 1) and _CLOSED.match(folded, begin - bracket):
            return index
    return len(groups)


def _is_alike(folded: str, groups: Groups, first: int, size: int) -> bool:
    """Return True if `size` groups from the first on, and as many before it, have the same lengths.

    Between them is one blank or slash, as in a list of numbers of one notation.
    """
    before, after = groups[max(0, first - size) : first], groups[first : first + size]
    if len(before) < size or len(after) < size or not size:
        return False
    lengths = ([end - start for start, end in part] for part in (before, after))
    return next(lengths) == next(lengths) and folded[before[-1][1] : after[0][0]] in (" ", "/")


def _is_in_list(folded: str, groups: Groups, first: int, last: int) -> bool:
    """Return True if the groups from `first` to `last` are before or after as many groups with the same lengths."""
    size = last - first
    return _is_alike(folded, groups, last, size) or (last < len(groups) and _is_alike(folded, groups, first, size))


def _is_before_another(folded: str, groups: Groups, last: int, regions: tuple[str, ...]) -> bool:
    """Return True if the groups from `last` on, after a blank or slash, are another number or begin with a date."""
    if last == len(groups) or folded[groups[last - 1][1] : groups[last][0]] not in (" ", "/"):
        return False
    begin, end = groups[last][0], groups[-1][1]
    if _OTHER.match(folded, begin, end + 1):
        return True
    return len(groups) - last <= MAX_GROUPS and phone_score(folded[begin:end], False, regions) >= ASSIGNED


def _segments(folded: str, run: tuple[int, int]) -> Iterator[Groups]:
    """Divide the digit groups in the span `run` into lists. Each list could be one telephone number."""
    groups: Groups = []
    spaced = -1
    for match in _GROUP.finditer(folded, *run):
        if not groups:
            bracket = folded.startswith("(", match.start() - 1)
            whole = _SPACED.match(folded, match.start() - bracket)
            spaced = whole.end() if whole else -1
        elif match.end() > spaced:
            first, gap = groups[0][0], (groups[-1][1], match.start())
            area = (len(groups) == 1 and folded[first] == "0") or (
                gap[0] - first <= MAX_AREA and (folded.startswith("+", first - 1) or folded.startswith("00", first))
            )
            another = "(" in folded[slice(*gap)] and gap[0] - first > MAX_AREA
            inside = _INSIDE.fullmatch(folded, *gap) or (area and _AFTER_AREA.fullmatch(folded, *gap))
            if another or not inside:
                yield groups
                groups = []
        groups.append(match.span())
    yield groups


def _number_in(text: str, folded: str, groups: Groups, known: tuple[int, bool, tuple[str, ...]]) -> PhoneSpan | None:
    """Return the number at a group, or after dates.

    `known`: the number of the group, if the number follows another one, and the regions.
    """
    first, follows, regions = known
    begin = groups[first][0]
    start = begin - len(_SIGNS.findall(folded[max(0, begin - 2) : begin])[0])
    international = "+" in folded[start:begin] or folded.startswith("00", begin)
    # The number starts at the first group after dates and similar numbers. A list of years may continue after them.
    while not international and (other := _OTHER.match(folded, begin, groups[-1][1] + 1)):
        first = bisect_left(groups, (other.end(),), first)
        if first == len(groups):
            return None
        start = begin = groups[first][0]
    begins = "+" in folded[start:begin] or (follows and folded.startswith("/", start - 1))
    is_part = not begins and _PART.search(folded, max(0, start - 2), start)
    if is_part or _BEFORE.search(folded, max(0, start - 10), start):
        return None
    if _ZIP.match(folded, begin) and _STATE.search(folded, max(0, start - 6), start):
        return None
    end = groups[-1][1]
    named = (
        follows or _names(text[max(0, start - NEAR) : start]) or _names(text[end : end + NEAR // 4].partition("\n")[0])
    )
    label = _LABEL.search(folded, max(0, start - 12), start)
    least = INTERNATIONAL if label and not (named and _is_named_by(text, label)) else 0.0
    best: PhoneSpan | None = None
    for last in range(min(len(groups), first + MAX_GROUPS), first, -1):
        whole, end = last == len(groups), groups[last - 1][1]
        if end - begin < 9 and _STREET.match(folded, end):
            continue
        has_more = is_decimal(folded, begin, end) or _THOUSANDS.match(folded, groups[last - 1][0] - 1)
        if has_more and "+" not in folded[start:begin]:
            continue
        extension = _EXTENSION.match(text, end)
        marked = named or (extension is not None and extension[1] is not None)
        score = phone_score(folded[start:end], marked, regions)
        # A number that does not extend to the last group must be an assigned one.
        bar = best[2] if best else 0.0 if whole else WRITTEN_LIKE_PHONE
        if score < max(least, bar):
            continue
        in_list = score >= ASSIGNED and (
            ((named or last - first > 1) and _is_in_list(folded, groups, first, last))
            or _is_before_another(folded, groups, last, regions)
            or (best is None and last == len(groups) - 1 and _YEAR.match(folded, end) is not None)
            or (not whole and folded.startswith(" ", end) and _CLOSED.fullmatch(folded, start, end) is not None)
        )
        is_free = (whole or international or named) and (extension or not _FOLLOWING.match(folded, end))
        if in_list or (is_free and score > bar):
            open_bracket = folded[start] == "(" and ")" not in folded[start:end]
            best = start + open_bracket, extension.end() if extension else end, score
    return best


def _is_named_by(text: str, label: re.Match[str]) -> bool:
    """Return True if a number after this label may be the telephone number that a word near it names."""
    if label["number"] is None:
        return not label[0][0].isalpha()
    words = text[max(0, label.start() - NEAR) : label.start()].rstrip(" .:-").split()
    return words != [] and _names(words[-1])


def _names(near: str) -> bool:
    near = _DIGITS.split(near.lower())[-1]
    return not NAMING_WORDS.isdisjoint(_WORD.findall(near)) or any(part in near for part in NAMING_PARTS)


def phone_score(written: str, named: bool, regions: tuple[str, ...]) -> float:
    """Return the score (0..1) of digits with separators; 0 if the digits are not a telephone number.

    `named` is True if a nearby word or an extension marks the digits as a telephone number.
    """
    groups = _GROUP.findall(written)
    lengths = tuple(map(len, groups))
    digits, bracket = sum(lengths), written[0] == "(" and ")" in written
    if "+" in written[:2] or groups[0].startswith("00"):
        return _international(written, named) if 8 <= digits <= 17 else 0.0
    if not 7 <= digits <= 12 or (lengths[0] == 1 and groups[0] not in "18" and not bracket) or written.count("/") > 1:
        return 0.0
    trunk = groups[0][0] == "0" or bracket
    distinctive = (
        digits > 8 and len(groups) > 1 and (trunk or lengths in _GROUPINGS or ("-" in written and len(groups) > 2))
    )
    bare = digits > 8 and len(groups) == 1 and groups[0][0] in "018"
    if not (named or distinctive or bare):
        return 0.0  # Before libphonenumber, which takes 40 µs per country: pages contain many numbers.
    import phonenumbers

    for region in regions:
        number = _parse("".join(groups), region)
        if number is None or not phonenumbers.is_possible_number(number):
            continue
        if phonenumbers.is_valid_number(number):
            kinds = phonenumbers.PhoneNumberType.MOBILE, phonenumbers.PhoneNumberType.FIXED_LINE_OR_MOBILE
            if distinctive or named or phonenumbers.number_type(number) in kinds:
                return ASSIGNED
        elif trunk and distinctive and _GROUP.findall(_national(number)) == groups:
            return WRITTEN_LIKE_PHONE
    if trunk and len(groups) > 2 and 9 <= digits <= 11 and 2 <= lengths[0] <= 5 and min(lengths) > 1:
        return WRITTEN_LIKE_PHONE  # A national number of some other country.
    return WRITTEN_LIKE_PHONE if named and (len(groups) > 1 or digits > 8) else 0.0


def _international(written: str, named: bool) -> float:
    """Return the score of a string that starts with `+` or `00`; 0 if the string is not a telephone number."""
    import phonenumbers

    plus = "+" in written[:2]
    number = _parse(written.replace("+ ", "+") if plus else f"+{''.join(_GROUP.findall(written))[2:]}", None)
    if number is not None and not phonenumbers.is_possible_number(number):  # Perhaps with the 0 of a national number.
        number = _parse(_TRUNK.sub(r"+\1\2", written), None)
    if number is None or not phonenumbers.is_possible_number(number):
        return 0.0
    if phonenumbers.is_valid_number(number):
        return INTERNATIONAL
    # The number has a possible length but is not assigned.
    return ASSIGNED if plus else WRITTEN_LIKE_PHONE * named


def _parse(text: str, region: str | None) -> Any:
    import phonenumbers

    try:
        return phonenumbers.parse(text, region)
    except phonenumbers.NumberParseException:
        return None


def _national(number: Any) -> str:
    import phonenumbers

    return phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.NATIONAL)
