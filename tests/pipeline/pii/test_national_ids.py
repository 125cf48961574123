"""National numbers: published examples and numbers computed by hand, each also with a wrong check digit or date."""

import pytest

from pipeline.pii import national_ids as ids
from pipeline.pii.stage import Redactor

# Type → text with a value, and the same text with a wrong one. Published examples: Finland 131052-308T, Croatia
# 33392005961, Switzerland 756.9217.0769.85, Mexico HEGG560427MVZRRL04, Estonia 37605030299.
EXAMPLES = {
    # 9·1+8·2+7·3+6·4+5·5+4·6+3·7+2·8 = 156, less the last digit 2: 154 = 14·11
    "nl_bsn": ("BSN: 123456782.", "BSN: 123456783."),
    # 97 - 850730033 mod 97 = 28
    "be_national_number": ("nr 85.07.30-033.28 is", "nr 85.07.30-033.29 is"),
    # 97 - 1850578006084 mod 97 = 91
    "fr_nir": ("sécu 1 85 05 78 006 084 91, né", "sécu 1 85 05 78 006 084 92, né"),
    # 5·10+2·9+9·8+9·7+8·6+2·5+2·4+4·3+7·2 = 295, 2950 mod 11 = 2; then 347 with 2·2, 3470 mod 11 = 5
    "br_cpf": ("de 529.982.247-25 em", "de 529.982.247-26 em"),
    # 1·9+1·8+2·7+2·6+3·5+3·4+4·3+4·2+5·1 = 95
    "ru_snils": ("112-233-445 95", "112-233-445 96"),
    "ru_inn": ("ИНН 500100732259", "ИНН 500100732258"),
    "mx_curp": ("CURP HEGG560427MVZRRL04", "CURP HEGG560427MVZRRL05"),
    # 7801233540 = 11 · 709203049 + 1, and 780123354 mod 11 = 10 is written as 0
    "cz_rodne_cislo": ("rodné číslo 780123/3540", "rodné číslo 780123/3541"),
    "ro_cnp": ("CNP 1800101221144", "CNP 1800101221145"),
    # a day of birth alone: no 31st of February
    "dk_cpr": ("CPR-nr. 070761-4285", "CPR-nr. 310261-4285"),
    "no_fodselsnummer": ("fødselsnummer 151086 95088", "fødselsnummer 151086 95089"),
    # 131052308 mod 31 = 25, the 26th character T
    "fi_hetu": ("131052-308T", "131052-308U"),
    "hr_oib": ("OIB 33392005961", "OIB 33392005962"),
    # 1·9+2·8+3·7+4·6+5·5+6·4+7·3+8·2 = 156 = 14·11 + 2: 11 - 2 = 9
    "pt_nif": ("NIF 123 456 789", "NIF 123 456 788"),
    # 2·5+0+1·3+2·2+3·7+4·6+5·5+6·4+7·3+8·2 = 148 = 13·11 + 5: 11 - 5 = 6
    "ar_cuil": ("20-12345678-6", "20-12345678-7"),
    # 8·2+7·3+6·4+5·5+4·6+3·7+2·2+1·3 = 138 = 12·11 + 6: 11 - 6 = 5
    "cl_rut": ("12.345.678-5", "12.345.678-K"),
    "za_id": ("ID number 8001015009087", "ID number 8001015009088"),
    # Luhn: 1+4+3+8+5+3+7+7+2 = 40
    "il_id": ("תעודת זהות 123456782", "תעודת זהות 123456783"),
    # 36·9+10·8+1·7+2·6+3·5+4·4+5·3+6·2 = 481, and 3 more: 484 = 44·11
    "hk_id": ("A123456(3)", "A123456(4)"),
    # A is 10: 1+0·9+1·8+2·7+3·6+4·5+5·4+6·3+7·2+8·1+9 = 130
    "tw_id": ("身分證 A123456789", "身分證 A123456788"),
    "ch_ahv": ("756.9217.0769.85", "756.9217.0769.86"),
    # 1·3+2·7+3·9+0·5+1·8+0·4+1·2+8·1+0·6 = 62 = 5·11 + 7
    "at_svnr": ("SVNR 1237 010180", "SVNR 1238 010180"),
    "gr_amka": ("ΑΜΚΑ 01013099997", "ΑΜΚΑ 01013099998"),
    # 1·8+2·7+3·6+4·5+5·4+6·3+7·2 = 112, and A in the second place 9: 121 = 5·23 + 6, F
    "ie_pps": ("PPS No 1234567FA", "PPS No 1234567GA"),
    # 0·10+4·9+9·8+9·7+3·6+7·5+0·4+8·3+9·2 = 266 = 24·11 + 2: 11 - 2 = 9
    "ir_melli": ("کد ملی 0499370899", "کد ملی 0499370898"),
    "ua_rnokpp": ("РНОКПП 1759013776", "РНОКПП 1759013777"),
    # 3·1+7·2+6·3+0·4+5·5+0·6+3·7+0·8+2·9+9·1 = 108 = 9·11 + 9
    "ee_isikukood": ("isikukood 37605030299", "isikukood 37605030298"),
    "lt_asmens_kodas": ("asmens kodas 33309240064", "asmens kodas 33309240065"),
    # 1·6+2·5+3·4+4·3+5·2+6·7+7·6+8·5+9·4+0·3+1·2 = 212 = 19·11 + 3: 11 - 3 = 8
    "jp_my_number": ("マイナンバー 1234 5678 9018", "マイナンバー 1234 5678 9019"),
    "id_nik": ("NIK 3174054107900001", "NIK 3174053202900001"),
    "my_kad": ("MyKad 900131-14-5678", "MyKad 900231-14-5678"),
    "eg_national_id": ("الرقم القومي 29001012112345", "الرقم القومي 29013012112345"),
    "vn_cccd": ("CCCD 001090012345", "CCCD 097090012345"),
    "pk_cnic": ("CNIC 35202-1234567-1", "CNIC 95202-1234567-1"),
    # the middle group 93 is not given out
    "us_itin": ("ITIN 912-70-1234", "ITIN 912-93-1234"),
}
NEEDS_NO_WORD = {
    "be_national_number", "fr_nir", "br_cpf", "ru_snils", "mx_curp", "fi_hetu", "ar_cuil", "cl_rut", "hk_id", "ch_ahv",
}  # fmt: skip
"""Types whose usual form counts without a nearby word."""


@pytest.fixture(scope="module")
def redactor() -> Redactor:
    return Redactor()


def value_of(text: str) -> str:
    """The part of an example that has digits, from its first to its last one and the letters beside them."""
    words = [word for word in text.replace(",", "").split() if any(char.isdigit() for char in word)]
    return " ".join(words).strip(".")


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_right_number_is_replaced_and_a_wrong_one_is_not(redactor: Redactor, kind: str) -> None:
    right, wrong = EXAMPLES[kind]
    value = value_of(right)
    assert redactor.redact(right, "xx") == (right.replace(value, f"<{kind.upper()}>"), {kind: 1})
    assert kind not in redactor.redact(wrong, "xx")[1]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_number_without_a_word_counts_only_in_a_form_of_its_own(redactor: Redactor, kind: str) -> None:
    found = redactor.redact(value_of(EXAMPLES[kind][0]), "xx")[1]
    assert (kind in found) is (kind in NEEDS_NO_WORD)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CPF 52998224725", "CPF <BR_CPF>"),
        ("52998224725", "52998224725"),
        ("hetu 131052-3085 on", "hetu 131052-3085 on"),  # 131052308 mod 31 = 25 is T, never 5
        ("010101A123N", "<FI_HETU>"),  # 010101123 mod 31 = 20
        ("130202A982D", "130202A982D"),
        ("RUT 7.654.321-6", "RUT <CL_RUT>"),
        ("run 7654321-6", "run <CL_RUT>"),
        ("G123456(A)", "<HK_ID>"),
        ("BSN 0.123456782", "BSN 0.123456782"),  # after a decimal point
        ("BSN 123456782.5", "BSN 123456782.5"),
        ("BSN 123456782-1", "BSN 123456782-1"),  # a part of a longer number
        ("BSN 1 2 3 4 5 6 7 8 2", "BSN 1 2 3 4 5 6 7 8 2"),
        ("BSN 12 345 67 82, born 1980", "BSN <NL_BSN>, born 1980"),
        ("BSN 1 123456782 1980", "BSN 1 <NL_BSN> 1980"),
        ("BSN 7 123 456 782 9", "BSN 7 123 456 782 9"),  # in a row of numbers
        ("123 456 782 9 BSN", "<NL_BSN> 9 BSN"),
        ("BSN 123 456 782 9", "BSN <NL_BSN> 9"),
        ("AHV-Nummer 7569217076985", "AHV-Nummer <CH_AHV>"),
        ("NIF 500 000 000", "NIF 500 000 000"),  # a firm's first digit
    ],
)
def test_forms(redactor: Redactor, text: str, expected: str) -> None:
    assert redactor.redact(text, "xx")[0] == expected


def test_numbers_that_only_their_dates_reject() -> None:
    assert ids.is_short_day("00", 2, 29)
    assert not ids.is_short_day("01", 2, 29)
    assert ids.za_id("8001015009087")
    assert not ids.za_id("8013015009082")  # the 13th month; the Luhn digit is right
    assert ids.has_luhn("8013015009082")
    assert not ids.ro_cnp("1801301221142")  # 2·1+7·8+1·1+4·3+3·1+5·2+8·2+2·1+7·1+9·4 = 145 = 13·11 + 2
    assert ids.has_luhn("32013099992")
    assert not ids.gr_amka("32013099992")
    assert ids.ar_cuil("20123456786")
    assert not ids.ar_cuil("30123456781")  # a firm's prefix: 153 = 13·11 + 10, and 11 - 10 = 1 is the right digit


@pytest.mark.parametrize(
    ("check", "digits"),
    [
        (ids.br_cpf, "11111111111"),
        (ids.br_cnpj, "00000000000000"),
        (ids.nl_bsn, "000000000"),
        (ids.il_id, "000000000"),
        (ids.ir_melli, "1111111111"),
        (ids.ru_snils, "00000000000"),
        (ids.ru_inn, "000000000000"),
    ],
)
def test_repeated_digits_are_no_number(check, digits: str) -> None:
    assert not check(digits)


def test_further_published_and_computed_numbers() -> None:
    assert ids.br_cnpj("11222333000181")
    assert not ids.br_cnpj("11222333000182")
    # D-number: the day is 40 higher. 9th to 11th digit by the weights of the source.
    assert ids.no_fodselsnummer("15108695088")
    assert ids.be_national_number("00012556777") is (
        (97 - 2_000_125_567 % 97) == 77
    )  # born in 2000: 2 precedes the digits
    assert ids.ie_pps("6433435F")
    assert ids.hr_oib("69435151530")
    assert ids.ru_snils("11223344595")
    assert ids.vn_cccd("096090012345")
    assert not ids.vn_cccd("000090012345")
    assert ids.pt_nif("123456789")
    assert ids.eg_national_id("29001018812345")  # 88: born abroad
    assert not ids.eg_national_id("29001013612345")
    assert ids.us_itin("900650000")
    assert not ids.us_itin("900660000")
    assert ids.us_itin("900700000")
    assert not ids.us_itin("800700000")
