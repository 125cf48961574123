"""Forms of types that only `pii.types` switches on: passports, licences, plates, devices, places and user names.

None of them has a check digit, except the machine-readable zone of a passport. Many harmless codes have these forms, so
most of them count only if a nearby word names them.
"""

import re

# One or two letters and six to eight digits (most countries), nine digits (US), two digits, two letters and five digits
# (FR), ten digits in groups (RU), nine letters and digits that begin with C to Z (DE).
PASSPORTS = (
    r"(?<![\w-])(?-i:[A-Z]{1,2} ?[0-9]{6,8}|[0-9]{8,9}|[0-9]{2}[A-Z]{2}[0-9]{5}|[0-9]{2} ?[0-9]{2} ?[0-9]{6}"
    r"|[CFGHJKLMNPRTVWXYZ](?=(?:[A-Z]{0,3}[0-9]){4})[CFGHJKLMNPRTVWXYZ0-9]{8})(?![\w-])"
)
TRAVEL_ZONE = (
    r"(?:(?<![A-Z0-9<])(?-i:P[A-Z<][A-Z<]{42})\s{1,3})?(?<![A-Z0-9<])(?-i:[A-Z0-9<]{9}[0-9][A-Z<]{3}[0-9]{7}[MFX<][0-9]{7}"
    r"[A-Z0-9<]{14}[0-9<][0-9])(?![A-Z0-9<])"
)
"""The second line of the zone, with the first one that has the name, if it precedes."""
# The states' formats as the American Association of Motor Vehicle Administrators lists them: a letter with 6 to 14
# digits (most states), 7 to 9 digits, two letters with six digits, groups as in Florida, Illinois and New York.
DRIVER_LICENSES = (
    r"(?<![\w-])(?-i:[A-Z][0-9]{6,14}|[0-9]{7,9}|[A-Z]{2}[0-9]{6}[A-Z]?|[A-Z][0-9]{3}-[0-9]{3,4}-[0-9]{2,4}(?:-[0-9]{3}-[0-9])?"
    r"|[0-9]{3}[ -][0-9]{3}[ -][0-9]{3}|[0-9]{2}-[0-9]{3}-[0-9]{4}|[0-9]{3}[A-Z]{2}[0-9]{4})(?![\w-])"
)
# Surname, decade, month (women add 50), day, year, initials and check characters. Source: DVLA, driver number.
UK_LICENCE = (
    r"(?<!\w)(?-i:[A-Z]{1,5}9{0,4}(?<=(?<!\w)[A-Z9]{5})[0-9](?:[05][1-9]|[16][0-2])(?:0[1-9]|[12][0-9]|3[01])[0-9][A-Z9]{2}"
    r"[0-9A-Z]{3})(?!\w)"
)
PLATES = (
    r"(?<![\w-])(?-i:[A-Z]{1,3}[- ][A-Z]{1,2}[ -]?[0-9]{1,4}[EH]?|[A-Z]{2}[0-9]{2} ?[A-Z]{3}|[A-Z]{2}-[0-9]{3}-[A-Z]{2}"
    r"|[A-Z]{2} ?[0-9]{3} ?[A-Z]{2}|[0-9]{4} ?[B-DF-HJ-NP-TV-Z]{3}|[A-Z]{2}[ -]?[0-9]{1,2}[ -]?[A-Z]{1,3}[ -]?[0-9]{4}"
    r"|[A-Z]{3}[- ]?[0-9]{3,4}|[A-Z]{3}[0-9][A-Z][0-9]{2}|[0-9][A-Z]{3}[0-9]{3}|[A-Z]{2,3} [A-Z0-9]{4,5}"
    r"|[0-9]{2} ?[A-Z]{1,3} ?[0-9]{2,5}|[0-9]{1,2}-[A-Z]{2,3}-[0-9]{1,3}|[A-Z]{1,2}-[0-9]{2,3}-[A-Z]{1,2})(?![\w-])"
    r"|\?(?-i:[A-Z])[.?]?(?-i:[A-Z0-9]{5,6})(?!\w)"
)
"""Plates of Germany, Britain, France, Italy, Spain, India, the United States, Brazil, Poland, Turkey, the Netherlands
and China."""
MAC = r"(?<![\w-])(?<!\b[0-9A-F]{2}:)[0-9A-F]{2}([:-])(?:[0-9A-F]{2}\1){4}[0-9A-F]{2}(?![\w-]|:[0-9A-F]{2}\b)"
_FINE, _COARSE, _MARK = r"\.[0-9]{5,15}", r"\.[0-9]{4}", r" ?[?'\"]{0,2} ?"
_MINUTES = rf"[?] ?[0-9]{{1,2}}{_MARK}(?:[0-9]{{1,2}}(?:\.[0-9]{{1,6}})?{_MARK})?"
COORDINATES = (
    (rf"(?<![\w.-]|[0-9],)[-+]?[0-9]{{1,2}}{_FINE}(?:, ?|; ?| )[-+]?[0-9]{{1,3}}{_FINE}(?!\w|\.\w)", 0.6),
    (rf"(?<![\w.-]|[0-9],)[-+]?[0-9]{{1,2}}{_COARSE}(?:, ?|; ?| )[-+]?[0-9]{{1,3}}{_COARSE}(?!\w|\.\w)", 0.1),
    (r"(?<![\w.-]|[0-9],)[0-9]{1,2}\.[0-9]{3,15}\?? ?[NS][,;/ ]{1,3}[0-9]{1,3}\.[0-9]{3,15}\?? ?[EWO](?!\w)", 0.6),
    (rf"(?<!\w)[0-9]{{1,2}}{_MINUTES}[NS][,; ]{{0,3}}[0-9]{{1,3}}{_MINUTES}[EWO](?!\w)", 0.6),
)
"""Decimal degrees with five places or more, about 1 m, and degrees with minutes. The degree sign is `?` in ASCII. Rates
of currencies have four places, so these need a nearby word."""
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{1,28}[A-Za-z0-9_](?![\w/-]|\.\w)"
_OF_CODE = (
    r"(?!(?i:context|type|id|graph|value|param|returns?|see|author|import|media|property|dataclass|override|deprecated"
    r"|test|staticmethod|classmethod|charset|keyframes|include|everyone|here|all)\b)"
)
HANDLES = (
    (rf"(?<![\w@./+%\"'`-])@{_OF_CODE}(?=\w*[A-Za-z])[A-Za-z0-9_]{{3,30}}(?![\w@(/-]|\.[a-z])", 0.6),
    (rf"(?<=\b(?:twitter|instagram|facebook|github|tiktok)\.com/|\bt\.me/)@?{_NAME}", 0.6),
    (rf"(?<=\b(?:user ?name|user id|login|screen name|nickname)(?:: ?| is |=))@?{_NAME}(?! =|\()", 0.6),
)
"""Mentions, pages of social networks, and named user names. Decorators and keys of code also begin with an at sign."""


def is_device_address(value: str) -> bool:
    """Return True if a MAC address is that of one device: not a group address, and not all zeros."""
    octets = bytes.fromhex(re.sub("[:-]", "", value))
    return not octets[0] & 1 and len(set(octets)) > 2


def is_place(value: str) -> bool:
    """Return True if two numbers are a latitude and a longitude."""
    numbers = [abs(float(number)) for number in re.findall(r"[0-9]+(?:\.[0-9]+)?", value)]
    if len(numbers) != 2:
        return True  # Degrees, minutes and seconds, with letters for the directions.
    return numbers[0] <= 90 and numbers[1] <= 180


def is_machine_readable(value: str) -> bool:
    """Return True if the check digits of the second line of a passport agree. Source: ICAO Doc 9303, part 4."""
    line = value.upper()[-44:]
    return all(line[at] == _check_digit(line[begin:at]) for begin, at in ((0, 9), (13, 19), (21, 27))) and line[
        43
    ] == _check_digit(line[0:10] + line[13:20] + line[21:43])


def _check_digit(field: str) -> str:
    places = (0 if char == "<" else int(char, 36) for char in field)
    return str(sum(place * (7, 3, 1)[index % 3] for index, place in enumerate(places)) % 10)
