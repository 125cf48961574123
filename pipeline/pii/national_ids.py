"""Check digits and dates of birth of national numbers, each by its published definition.

A function gets a number without separators and returns True if it can be one. Names begin with the country's code.
"""

import re
from collections.abc import Iterable
from datetime import date

_LETTERS = {char: index for index, char in enumerate("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")}
_TW_AREAS = dict(zip("ABCDEFGHJKLMNPQRSTUVXYWZIO", range(10, 36)))
_HETU = "0123456789ABCDEFHJKLMNPRSTUVWXY"


def weighted(digits: str, weights: Iterable[int]) -> int:
    """Return the sum of the digits, each multiplied by its weight."""
    return sum(int(digit) * weight for digit, weight in zip(digits, weights))


def has_luhn(digits: str) -> bool:
    """Return True if the last digit is the Luhn check digit of the others. Source: ISO/IEC 7812-1, annex B."""
    doubled = "0246813579"
    return sum(int(doubled[int(d)] if index % 2 else d) for index, d in enumerate(reversed(digits))) % 10 == 0


def is_day(year: int, month: int, day: int) -> bool:
    """Return True if the calendar has this day."""
    try:
        date(year, month, day)
    except ValueError:
        return False
    return True


def is_short_day(year: str, month: int, day: int) -> bool:
    """Return True if the calendar has this day in a year of two digits, in either century."""
    return is_day(2000 + int(year), month, day) or is_day(1900 + int(year), month, day)


def nl_bsn(digits: str) -> bool:
    """Netherlands, burgerservicenummer. Source: Besluit burgerservicenummer, the eleven test."""
    return weighted(digits, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0 and len(set(digits)) > 1


def de_tax_id(digits: str) -> bool:
    """Germany, Steuer-Identifikationsnummer. Source: BZSt; ISO/IEC 7064, MOD 11,10; no digit is there four times."""
    product = 10
    for digit in digits[:10]:
        product = ((int(digit) + product) % 10 or 10) * 2 % 11
    return (11 - product) % 10 == int(digits[10]) and digits[0] != "0" and max(map(digits[:10].count, digits[:10])) < 4


def th_tnin(digits: str) -> bool:
    """Thailand, identification number of citizens. Source: Department of Provincial Administration, modulo 11."""
    return (11 - weighted(digits, range(13, 1, -1)) % 11) % 10 == int(digits[12]) and digits[0] in "12345678"


def be_national_number(digits: str) -> bool:
    """Belgium, rijksregisternummer. Source: Royal Decree of 3 April 1984, article 3; 2 precedes births from 2000 on."""
    base, check, month = int(digits[:9]), int(digits[9:]), int(digits[2:4]) % 20
    return check in (97 - base % 97, 97 - (2_000_000_000 + base) % 97) and month <= 12 and int(digits[4:6]) <= 31


def fr_nir(digits: str) -> bool:
    """France, numéro de sécurité sociale. Source: INSEE, decree 82-103; the key is 97 minus the rest by 97."""
    month = int(digits[3:5])
    return int(digits[13:]) == 97 - int(digits[:13]) % 97 and digits[0] in "12378" and (month <= 12 or month >= 20)


def br_cpf(digits: str) -> bool:
    """Brazil, CPF of a person. Source: Receita Federal, two check digits modulo 11."""
    if len(set(digits)) == 1:
        return False
    first = weighted(digits[:9], range(10, 1, -1)) * 10 % 11 % 10
    return digits[9:] == f"{first}{weighted(digits[:10], range(11, 1, -1)) * 10 % 11 % 10}"


def br_cnpj(digits: str) -> bool:
    """Brazil, CNPJ of a firm, of digits alone. Source: Receita Federal, two check digits modulo 11."""
    weights = (6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2)
    first = weighted(digits[:12], weights[1:]) * 10 % 11 % 10
    second = weighted(digits[:13], weights) * 10 % 11 % 10
    return len(set(digits)) > 1 and digits[12:] == f"{first}{second}"


def ru_snils(digits: str) -> bool:
    """Russia, SNILS. Source: Pension Fund of Russia, resolution 192p; check digits exist above 001-001-998."""
    return int(digits[:9]) > 1_001_998 and weighted(digits[:9], range(9, 0, -1)) % 101 % 100 == int(digits[9:])


def ru_inn(digits: str) -> bool:
    """Russia, INN of a person. Source: Federal Tax Service, order ММВ-7-6/435@."""
    weights = (3, 7, 2, 4, 10, 3, 5, 9, 4, 6, 8)
    first, second = weighted(digits, weights[1:]) % 11 % 10, weighted(digits, weights) % 11 % 10
    return digits[10:] == f"{first}{second}" and digits[:2] != "00"


def mx_curp(value: str) -> bool:
    """Mexico, CURP. Source: RENAPO, Instructivo normativo; the place of each character times 18 to 2."""
    code = value.upper()
    places = [_LETTERS[char] + (char > "N") for char in code]  # Ñ follows N in its alphabet.
    check = -sum(place * (18 - index) for index, place in enumerate(places[:17])) % 10
    return code[17] == str(check) and is_short_day(code[4:6], int(code[6:8]), int(code[8:10]))


def cz_rodne_cislo(digits: str) -> bool:
    """Czechia and Slovakia, rodné číslo from 1954 on. Source: act 133/2000 Sb., paragraph 13."""
    month = int(digits[2:4]) % 50
    month -= 20 * (month > 20)
    divides = int(digits) % 11 == 0 or (int(digits[:9]) % 11 == 10 and digits[9] == "0")
    return divides and is_short_day(digits[:2], month, int(digits[4:6]))


def ro_cnp(digits: str) -> bool:
    """Romania, cod numeric personal. Source: Emergency Ordinance 97/2005 and the norms of the population register."""
    check = weighted(digits, (2, 7, 9, 1, 4, 6, 3, 5, 8, 2, 7, 9)) % 11
    known = digits[0] != "0" and is_short_day(digits[1:3], int(digits[3:5]), int(digits[5:7]))
    return known and int(digits[12]) == (1 if check == 10 else check)


def dk_cpr(digits: str) -> bool:
    """Denmark, CPR number. Its day of birth alone: since 2007 check digits are not always valid. Source: CPR office."""
    return is_short_day(digits[4:6], int(digits[2:4]), int(digits[:2]))


def no_fodselsnummer(digits: str) -> bool:
    """Norway, fødselsnummer and D-number. Source: Skatteetaten, two check digits modulo 11."""
    first = -weighted(digits, (3, 7, 6, 1, 8, 9, 4, 5, 2)) % 11
    second = -weighted(digits, (5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11
    day = int(digits[:2]) - 40 * (digits[0] in "4567")
    return digits[9:] == f"{first}{second}" and is_short_day(digits[4:6], int(digits[2:4]), day)


def hr_oib(digits: str) -> bool:
    """Croatia, OIB. Source: ISO/IEC 7064, MOD 11,10."""
    rest = 10
    for digit in digits[:10]:
        rest = ((rest + int(digit)) % 10 or 10) * 2 % 11
    return (rest + int(digits[10])) % 10 == 1


def pt_nif(digits: str) -> bool:
    """Portugal, NIF of a person. Source: Decree-Law 14/2013; persons have 1, 2, 3 or 45 in front."""
    check = -weighted(digits, range(9, 1, -1)) % 11 % 10
    return int(digits[8]) == check and (digits[0] in "123" or digits[:2] == "45")


def ar_cuil(digits: str) -> bool:
    """Argentina, CUIT or CUIL of a person. Source: AFIP; persons have 20, 23, 24, 25, 26 or 27 in front."""
    check = -weighted(digits, (5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11
    return digits[:2] in ("20", "23", "24", "25", "26", "27") and int(digits[10]) == (9 if check == 10 else check)


def cl_rut(value: str) -> bool:
    """Chile, RUT of a person. Source: Servicio de Impuestos Internos; modulo 11, K is 10, firms have 50 million on."""
    code = re.sub("[.-]", "", value.upper())
    number = code[:-1]
    check = -weighted(number[::-1], (2, 3, 4, 5, 6, 7, 2, 3)) % 11
    return code[-1] == "0123456789K"[check] and 1_000_000 <= int(number) < 50_000_000


def za_id(digits: str) -> bool:
    """South Africa, identity number. Source: Department of Home Affairs; day of birth, citizenship, Luhn digit."""
    return has_luhn(digits) and digits[10] in "012" and is_short_day(digits[:2], int(digits[2:4]), int(digits[4:6]))


def il_id(digits: str) -> bool:
    """Israel, teudat zehut. Source: Population Registry, the Luhn digit of nine digits."""
    return has_luhn(digits) and len(set(digits)) > 1


def hk_id(value: str) -> bool:
    """Hong Kong, identity card. Source: Immigration Department, weights 9 to 1 modulo 11; A is the check digit 10."""
    code = re.sub("[()]", "", value.upper()).rjust(9)
    places = [36 if char == " " else _LETTERS[char] for char in code]  # A single letter counts as if after a space.
    return sum(place * (9 - index) for index, place in enumerate(places)) % 11 == 0


def tw_id(value: str) -> bool:
    """Taiwan, national identification number. Source: Ministry of the Interior; weights 1, 9, 8 … 1, 1 modulo 10."""
    area = _TW_AREAS[value[0].upper()]
    return (area // 10 + weighted(f"{area % 10}{value[1:]}", (9, 8, 7, 6, 5, 4, 3, 2, 1, 1))) % 10 == 0


def ch_ahv(digits: str) -> bool:
    """Switzerland, AHV number. Source: Central Compensation Office, 756 and the check digit of EAN-13."""
    return digits[:3] == "756" and weighted(digits, (1, 3) * 6 + (1,)) % 10 == 0


def at_svnr(digits: str) -> bool:
    """Austria, Sozialversicherungsnummer. Source: Dachverband; months 13 to 15 are for days without a free number."""
    month = int(digits[6:8])
    known = is_short_day(digits[8:], min(month, 12), int(digits[4:6])) and month <= 15 and digits[0] != "0"
    return known and weighted(digits[:3] + digits[4:], (3, 7, 9, 5, 8, 4, 2, 1, 6)) % 11 == int(digits[3])


def gr_amka(digits: str) -> bool:
    """Greece, AMKA. Source: amka.gr; day of birth and Luhn digit."""
    return has_luhn(digits) and dk_cpr(digits)


def ie_pps(value: str) -> bool:
    """Ireland, PPS number. Source: Department of Social Protection; weights 8 to 2, and 9 for the last, modulo 23."""
    code = value.upper()
    second = _LETTERS[code[8]] - 9 if len(code) == 9 and code[8] != "W" else 0
    return (weighted(code, range(8, 1, -1)) + 9 * second) % 23 == (_LETTERS[code[7]] - 9) % 23


def fi_hetu(value: str) -> bool:
    """Finland, henkilötunnus. Source: Digital and Population Data Services Agency; 31 check characters."""
    code = value.upper()
    known = is_short_day(code[4:6], int(code[2:4]), int(code[:2]))
    return known and _HETU[int(code[:6] + code[7:10]) % 31] == code[10]


def ir_melli(digits: str) -> bool:
    """Iran, national code. Source: National Organization for Civil Registration, weights 10 to 2 modulo 11."""
    rest = weighted(digits, range(10, 1, -1)) % 11
    return int(digits[9]) == (rest if rest < 2 else 11 - rest) and len(set(digits)) > 1


def ua_rnokpp(digits: str) -> bool:
    """Ukraine, taxpayer number of a person. Source: State Tax Service; days since 1899-12-31 and a check digit."""
    check = weighted(digits, (-1, 5, 7, 9, 4, 6, 10, 5, 7)) % 11 % 10
    return int(digits[9]) == check and 3_650 < int(digits[:5]) < 55_000


def ee_isikukood(digits: str) -> bool:
    """Estonia and Lithuania, isikukood and asmens kodas. Source: standard EVS 585; two rows of weights modulo 11."""
    check = weighted(digits, (1, 2, 3, 4, 5, 6, 7, 8, 9, 1)) % 11
    if check == 10:
        check = weighted(digits, (3, 4, 5, 6, 7, 8, 9, 1, 2, 3)) % 11 % 10
    known = digits[0] in "12345678" and is_short_day(digits[1:3], int(digits[3:5]), int(digits[5:7]))
    return known and int(digits[10]) == check


def jp_my_number(digits: str) -> bool:
    """Japan, individual number. Source: Ministry of Internal Affairs, ordinance 85 of 2014, article 5."""
    rest = weighted(digits, (6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11
    return int(digits[11]) == (0 if rest <= 1 else 11 - rest)


def id_nik(digits: str) -> bool:
    """Indonesia, NIK, which has no check digit: region and day of birth; women add 40. Source: act 23 of 2006."""
    day = int(digits[6:8])
    known = is_short_day(digits[10:12], int(digits[8:10]), day - 40 * (day > 40))
    return known and 11 <= int(digits[:2]) <= 96 and digits[12:] != "0000"


def my_kad(digits: str) -> bool:
    """Malaysia, MyKad number, which has no check digit: day of birth and place. Source: JPN."""
    return is_short_day(digits[:2], int(digits[2:4]), int(digits[4:6])) and digits[6:8] not in ("00", "17", "18", "19")


def eg_national_id(digits: str) -> bool:
    """Egypt, national number, whose check digit is not published: century, day of birth and governorate."""
    known = digits[0] in "23" and is_day(
        1700 + 100 * int(digits[0]) + int(digits[1:3]), int(digits[3:5]), int(digits[5:7])
    )
    return known and (1 <= int(digits[7:9]) <= 35 or digits[7:9] == "88")


def vn_cccd(digits: str) -> bool:
    """Vietnam, citizen number, which has no check digit: province and century. Source: decree 137/2015."""
    return 1 <= int(digits[:3]) <= 96 and digits[3] in "0123"


def pk_cnic(digits: str) -> bool:
    """Pakistan, CNIC, which has no check digit: its first digit is a province. Source: NADRA."""
    return digits[0] in "1234567"


def us_itin(digits: str) -> bool:
    """United States, ITIN: 9 in front, 50 to 65, 70 to 88, 90 to 92 or 94 to 99 in the middle. Source: IRS."""
    group = int(digits[3:5])
    return digits[0] == "9" and (50 <= group <= 65 or 70 <= group <= 88 or 90 <= group <= 92 or group >= 94)
