"""Pages with fake personal data and pages with abuse, made of otherwise good text.

No value belongs to anybody: reserved domains and telephone numbers, published test cards, IBANs of banks that do not
exist, addresses for documentation, a group of social security numbers that is never given out. Checksums are valid.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable

from pipeline.demo_crawl.html import CLEAN
from pipeline.demo_crawl.page import Page, prose
from pipeline.demo_crawl.stock import Stock, title_of

DEMO_TOXIC_WORDS = ("damn", "crap", "bastard", "idiot", "moron", "stupid", "crappy", "idiotic")
"""Mild insults, all on the built-in English word list."""
TOXIC_STEP = 12
"""One word of this many is an insult: 8 % of the words, where the limit is 1 %."""

TEST_CARDS = (
    *("4111111111111111", "4242424242424242", "4012888888881881", "5555555555554444", "5105105105105100"),
    *("6011111111111117", "6011000990139424", "3530111333300000", "3566002020360505"),
)
"""Card numbers that payment companies publish for tests."""
NAMES = ("mara", "tobias", "elin", "joao", "priya", "kenji", "olga", "samir", "lucia", "erik", "hanna", "pablo")
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
SENTENCES: dict[str, tuple[str, ...]] = {
    "email": ("Write to {} if you would like a printed copy.", "Corrections are welcome at {} at any time."),
    "phone": ("For questions call {} during office hours.", "The telephone number of the editor is {} for now."),
    "credit_card": ("The order was paid with the credit card {} last week.", "A card with the number {} was refused."),
    "iban": ("Please transfer the fee to the account {} before Friday.", "The club's IBAN is {} as before."),
    "ip": ("The request came from the address {} shortly after noon.", "The log shows the IP {} several times."),
    "us_ssn": ("The form gives the social security number {} in the second line.", "Her SSN is {} on every page."),
    "crypto": ("Donations can be sent to the bitcoin address {} as well.", "The bitcoin wallet {} was empty by then."),
}
"""Sentences around a value, by the type of the value as the redaction names it."""


def email(rng: random.Random) -> str:
    """An address at a domain that is reserved for examples."""
    return f"{rng.choice(NAMES)}.{rng.choice(NAMES)}{rng.randrange(10, 99)}@example.{rng.choice(('com', 'org', 'net'))}"


def phone(rng: random.Random) -> str:
    """A number of the ranges kept free for fiction in the United States (555-01xx) and in London (020 7946 0xxx)."""
    area, line = rng.choice((212, 312, 415, 617, 206)), rng.randrange(100, 200)
    forms = (f"({area}) 555-0{line}", f"+1 {area}-555-0{line}", f"+44 20 7946 0{rng.randrange(1000):03d}")
    return rng.choice(forms)


def credit_card(rng: random.Random) -> str:
    """A published test number, in one piece or in fours."""
    number = rng.choice(TEST_CARDS)
    return rng.choice(("", " ", "-")).join(number[start : start + 4] for start in range(0, 16, 4))


def iban(rng: random.Random) -> str:
    """An IBAN with valid check digits at a bank that does not exist."""
    country, bank, digits = rng.choice((("DE", "00000000", 10), ("GB", "TEST000000", 8), ("NL", "TEST", 10)))
    account = bank + "".join(rng.choices("0123456789", k=digits))
    check = 98 - int("".join(str(int(sign, 36)) for sign in f"{account}{country}00")) % 97
    value = f"{country}{check:02d}{account}"
    return rng.choice((value, " ".join(value[start : start + 4] for start in range(0, len(value), 4))))


def ip(rng: random.Random) -> str:
    """An IPv4 address of the networks for documentation (RFC 5737), or a well-known public resolver."""
    network = rng.choice(("192.0.2", "198.51.100", "203.0.113"))
    return rng.choice((f"{network}.{rng.randrange(1, 255)}",) * 3 + ("8.8.4.4", "208.67.222.222"))


def us_ssn(rng: random.Random) -> str:
    """A social security number of the area 900 to 999, which is not given out, outside the groups of tax numbers."""
    return f"9{rng.randrange(10, 99)}-{rng.randrange(10, 50)}-{rng.randrange(1000, 9999)}"


def crypto(rng: random.Random) -> str:
    """A bitcoin address (P2PKH) with a valid checksum whose key nobody has."""
    payload = b"\x00" + rng.randbytes(20)
    payload += hashlib.sha256(hashlib.sha256(payload).digest()).digest()[:4]
    number, signs = int.from_bytes(payload, "big"), ""
    while number:
        number, rest = divmod(number, 58)
        signs = BASE58[rest] + signs
    return "1" * (len(payload) - len(payload.lstrip(b"\x00"))) + signs


VALUES: dict[str, Callable[[random.Random], str]] = {
    "email": email,
    "phone": phone,
    "credit_card": credit_card,
    "iban": iban,
    "ip": ip,
    "us_ssn": us_ssn,
    "crypto": crypto,
}


def personal_page(stock: Stock, url: str, kind: str, rng: random.Random) -> Page:
    """A good page that mentions one to three values of a type, and sometimes one of another."""
    topic, paragraphs = stock.paragraphs(1200)
    kinds = [kind] * rng.randint(1, 3) + rng.sample(sorted(VALUES), rng.randint(0, 1))
    values = [(name, VALUES[name](rng)) for name in kinds]
    for name, value in values:
        spot = rng.randrange(len(paragraphs))
        paragraphs[spot] = f"{paragraphs[spot]} {rng.choice(SENTENCES[name]).format(value)}"
    counts = dict(sorted(Counter(name for name, _ in values).items()))
    details = {"pii": counts, "values": [list(pair) for pair in values]}
    title, layout = title_of(topic, rng), rng.choice(CLEAN)
    return Page(url, title, prose(paragraphs), layout, kind=f"pii_{kind}", details=details)


def toxic_page(stock: Stock, url: str, rng: random.Random) -> Page:
    """A page of good text into which insults are strewn."""
    topic, paragraphs = stock.paragraphs(1000)
    total = abusive = 0
    for number, paragraph in enumerate(paragraphs):
        words = paragraph.split(" ")
        for spot in range(len(words) - 2, 0, 1 - TOXIC_STEP):
            words.insert(spot, rng.choice(DEMO_TOXIC_WORDS))
            abusive += 1
        total += len(words)
        paragraphs[number] = " ".join(words)
    details = {"toxic_word_share": round(abusive / total, 4)}
    page = Page(url, title_of(topic, rng), prose(paragraphs), rng.choice(CLEAN), kind="toxic", details=details)
    return page.dropped_by("toxic_word_share")
