"""Pages with fake personal data, toxic pages, and captures that are broken, hostile, or not pages.

No value is that of a real person: reserved domains and telephone numbers, published test cards, IBANs of banks that do
not exist, addresses for documentation, unassigned social security numbers. Checksums are valid. None of the captures
may stop a run or damage its neighbors.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from pipeline.demo_crawl.html import CLEAN_LAYOUTS, DemoPage, UrlGenerator, prose
from pipeline.demo_crawl.text import Stock, title_of
from pipeline.demo_crawl.write import Capture, Fault, capture_of, http_response

DEMO_TOXIC_WORDS = ("damn", "crap", "bastard", "idiot", "moron", "stupid", "crappy", "idiotic")
"""Mild insults, all on the built-in English word list."""
TOXIC_STEP = 12
"""Distance between insults in words: 8 % of the words are insults, where the limit is 1 %."""

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
"""Type of personal data → sentences with a gap for a value of this type."""


def email(rng: random.Random) -> str:
    """Return an email address at a domain that is reserved for examples."""
    return f"{rng.choice(NAMES)}.{rng.choice(NAMES)}{rng.randrange(10, 99)}@example.{rng.choice(('com', 'org', 'net'))}"


def phone(rng: random.Random) -> str:
    """Return a phone number reserved for fiction in the United States (555-01xx) or in London (020 7946 0xxx)."""
    area, line = rng.choice((212, 312, 415, 617, 206)), rng.randrange(100, 200)
    forms = (f"({area}) 555-0{line}", f"+1 {area}-555-0{line}", f"+44 20 7946 0{rng.randrange(1000):03d}")
    return rng.choice(forms)


def credit_card(rng: random.Random) -> str:
    """Return a card number that is published for tests, without separators or in groups of four digits."""
    number = rng.choice(TEST_CARDS)
    return rng.choice(("", " ", "-")).join(number[start : start + 4] for start in range(0, 16, 4))


def iban(rng: random.Random) -> str:
    """Return an IBAN with valid check digits at a bank that does not exist."""
    country, bank, digits = rng.choice((("DE", "00000000", 10), ("GB", "TEST000000", 8), ("NL", "TEST", 10)))
    account = bank + "".join(rng.choices("0123456789", k=digits))
    check = 98 - int("".join(str(int(sign, 36)) for sign in f"{account}{country}00")) % 97
    value = f"{country}{check:02d}{account}"
    return rng.choice((value, " ".join(value[start : start + 4] for start in range(0, len(value), 4))))


def ip(rng: random.Random) -> str:
    """Return an IPv4 address of the documentation networks (RFC 5737), or of a well-known public resolver."""
    network = rng.choice(("192.0.2", "198.51.100", "203.0.113"))
    return rng.choice((f"{network}.{rng.randrange(1, 255)}",) * 3 + ("8.8.4.4", "208.67.222.222"))


def us_ssn(rng: random.Random) -> str:
    """Return a value that looks like a US social security number but is never assigned.

    It starts with 9 and is not a tax number.
    """
    return f"9{rng.randrange(10, 99)}-{rng.randrange(10, 50)}-{rng.randrange(1000, 9999)}"


def crypto(rng: random.Random) -> str:
    """Return a random bitcoin address (P2PKH) with a valid checksum and no known key."""
    payload = b"\x00" + rng.randbytes(20)
    payload += hashlib.sha256(hashlib.sha256(payload).digest()).digest()[:4]
    number, signs = int.from_bytes(payload, "big"), ""
    while number:
        number, rest = divmod(number, 58)
        signs = BASE58[rest] + signs
    return "1" * (len(payload) - len(payload.lstrip(b"\x00"))) + signs


FAKE_VALUES: dict[str, Callable[[random.Random], str]] = {
    "email": email,
    "phone": phone,
    "credit_card": credit_card,
    "iban": iban,
    "ip": ip,
    "us_ssn": us_ssn,
    "crypto": crypto,
}


def personal_page(stock: Stock, url: str, kind: str, rng: random.Random) -> DemoPage:
    """Return a good page with one to three values of the type `kind` of personal data.

    Some pages have one more value, of any type.
    """
    topic, paragraphs = stock.paragraphs(1200)
    kinds = [kind] * rng.randint(1, 3) + rng.sample(sorted(FAKE_VALUES), rng.randint(0, 1))
    values = [(name, FAKE_VALUES[name](rng)) for name in kinds]
    for name, value in values:
        index = rng.randrange(len(paragraphs))
        paragraphs[index] = f"{paragraphs[index]} {rng.choice(SENTENCES[name]).format(value)}"
    counts = dict(sorted(Counter(name for name, _ in values).items()))
    details = {"pii": counts, "values": [list(pair) for pair in values]}
    title, layout = title_of(topic, rng), rng.choice(CLEAN_LAYOUTS)
    return DemoPage(url, title, prose(paragraphs), layout, kind=f"pii_{kind}", details=details)


def toxic_page(stock: Stock, url: str, rng: random.Random) -> DemoPage:
    """Return a page of good text with insults inserted at regular distances."""
    topic, paragraphs = stock.paragraphs(1000)
    total = abusive = 0
    for number, paragraph in enumerate(paragraphs):
        words = paragraph.split(" ")
        for index in range(len(words) - 2, 0, 1 - TOXIC_STEP):
            words.insert(index, rng.choice(DEMO_TOXIC_WORDS))
            abusive += 1
        total += len(words)
        paragraphs[number] = " ".join(words)
    details = {"toxic_word_share": round(abusive / total, 4)}
    page = DemoPage(
        url, title_of(topic, rng), prose(paragraphs), rng.choice(CLEAN_LAYOUTS), kind="toxic", details=details
    )
    return page.dropped_by("toxic_word_share")


# Captures that are broken, hostile, or not pages. Some of them must be dropped, the others must be kept.

HTML = [("Content-Type", "text/html; charset=utf-8")]
NESTED_TAGS = 100_000
BIG_PAGE_BYTES = 20_000_000
FAULTS: dict[Fault, tuple[str, ...]] = {
    "corrupt": ("bad_gzip",),
    "truncated": ("truncated_record", "bad_gzip"),
    "length_too_small": ("lying_length",),
    "length_too_large": ("lying_length", "truncated_record"),
    "no_length": ("bad_header",),
    "garbage": ("unreadable_gap",),
}
"""Damage of a record in its file → rules that may drop the record."""


def broken_captures(stock: Stock, urls: UrlGenerator, rng: random.Random) -> Iterator[Capture]:
    """Yield a few broken captures of each kind."""
    for _ in range(3):
        yield from _not_pages(urls, rng)
        yield from _odd_bytes(stock, urls, rng)
        yield from _wrong_encodings(stock, urls, rng)
    yield from _hostile(stock, urls)
    for fault, rules in FAULTS.items():
        capture = capture_of(good_page(stock, urls, rng))
        yield replace(capture, kind=f"record_{fault}", rules=rules, expected="drop", fault=fault)


def good_page(stock: Stock, urls: UrlGenerator, rng: random.Random, min_chars: int = 1200) -> DemoPage:
    """Return a page of good text in a layout that adds nothing to the extracted text."""
    topic, paragraphs = stock.paragraphs(min_chars)
    return DemoPage(urls.new(topic), title_of(topic, rng), prose(paragraphs), rng.choice(CLEAN_LAYOUTS))


def _not_pages(urls: UrlGenerator, rng: random.Random) -> Iterator[Capture]:
    lost = b"<!DOCTYPE html><html><head><title>Not found</title></head><body><h1>Not found</h1></body></html>"
    url = urls.new("missing")
    yield _dropped("not_found", url, http_response(url, lost, HTML, status="404 Not Found"), "http_status")
    url, target = urls.new("moved"), ("Location", urls.new("here"))
    yield _dropped("redirect", url, http_response(url, b"", [*HTML, target], status="301 Moved"), "http_status")
    url = urls.new("busy")
    yield _dropped("server_error", url, http_response(url, lost, HTML, status="503 Unavailable"), "http_status")
    url, pdf = urls.new("paper"), b"%PDF-1.7\n" + rng.randbytes(4000) + b"\n%%EOF\n"
    yield _dropped("pdf", url, http_response(url, pdf, [("Content-Type", "application/pdf")]), "not_html")
    url, image = urls.new("picture"), b"\x89PNG\r\n\x1a\n" + rng.randbytes(2000)
    yield _dropped("image", url, http_response(url, image, [("Content-Type", "image/png")]), "not_html")
    url = urls.new("blank")
    yield _dropped("empty_body", url, http_response(url, b"", HTML), "empty_page")
    url, script = (
        urls.new("app"),
        b'<html><head><script>start("app");</script></head><body><div id="root"></div></body></html>',
    )
    yield _dropped("no_text", url, http_response(url, script, HTML), "no_text")
    yield _dropped("no_http_header", urls.new("bare"), b"<html><body>no header</body></html>", "no_http_header")


def _odd_bytes(stock: Stock, urls: UrlGenerator, rng: random.Random) -> Iterator[Capture]:
    """Yield pages with a few bytes of invalid UTF-8 or with NUL bytes, which should be kept."""
    for kind, odd in (("invalid_utf8", b"\xff\xfe\x80"), ("nul_bytes", b"\x00")):
        capture = capture_of(good_page(stock, urls, rng))
        head, _, body = capture.response.partition(b"<p>")
        spaces = [position for position, byte in enumerate(body) if byte == 0x20]
        for position in sorted(rng.sample(spaces, 4), reverse=True):
            body = body[:position] + odd + body[position:]
        html = (head + b"<p>" + body).partition(b"\r\n\r\n")[2]
        yield replace(capture, kind=kind, response=http_response(capture.url, html, HTML))


def _wrong_encodings(stock: Stock, urls: UrlGenerator, rng: random.Random) -> Iterator[Capture]:
    """Yield captures whose body contradicts the Content-Encoding.

    The bodies are plain text as `gzip`, gzip as `br`, and truncated gzip.
    """
    capture = capture_of(good_page(stock, urls, rng))
    html = capture.response.partition(b"\r\n\r\n")[2]
    plain = http_response(capture.url, html, [*HTML, ("Content-Encoding", "gzip")])
    yield replace(capture, kind="encoding_undone", response=plain)
    url = urls.new("mislabelled")
    zipped = http_response(url, html, HTML, "gzip").replace(b"Content-Encoding: gzip", b"Content-Encoding: br")
    yield _dropped("encoding_wrong", url, zipped, "bad_encoding")
    url = urls.new("short")
    yield _dropped("encoding_cut", url, http_response(url, html, HTML, "gzip")[:-400], "bad_encoding")


def _hostile(stock: Stock, urls: UrlGenerator) -> Iterator[Capture]:
    """Yield a page with 100,000 nested elements and a page of 20 MB, both of which compress to a small record."""
    text = stock.paragraphs(1000)[1][0].encode()
    url = urls.new("deep")
    deep = b"<html><body>" + b"<div>" * NESTED_TAGS + text + b"</div>" * NESTED_TAGS + b"</body></html>"
    yield _dropped("nested_tags", url, http_response(url, deep, HTML), "too_deep")
    url, paragraph = urls.new("huge"), b"<p>" + text + b"</p>\n"
    huge = b"<html><body>" + paragraph * (BIG_PAGE_BYTES // len(paragraph) + 1) + b"</body></html>"
    yield _dropped("huge_page", url, http_response(url, huge, HTML), "page_too_large", "record_too_large")


def _dropped(kind: str, url: str, response: bytes, *rules: str) -> Capture:
    return Capture(url, response, kind, "drop", rules)
