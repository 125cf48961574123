"""Charset detection: finds the charset of a page by byte order mark, HTTP header, meta tag or bytes, and decodes it.

Declarations are often wrong, so evidence has priority: valid UTF-8 is UTF-8 whatever the server declares, and a
declared charset must decode the bytes and match their script, or the next candidate is tried.
Source: labels WHATWG Encoding section 4.2, order of the candidates WHATWG HTML section 13.2.3.2.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

Origin = Literal["bom", "http", "meta", "utf-8", "detector"]
PLAIN_TEXT = "text/plain"
"""Media type of pages that are not parsed; their entities are content."""
DECODED = "_decoded"
"""Field of a row: its page, if a stage before extraction has decoded it."""
Candidate = tuple[str, Origin]

PRESCAN_BYTES = 4096
"""Number of first bytes of a page that are searched for a charset declaration. Browsers search at least 1,024, and some
real pages declare theirs later."""
MAX_DAMAGE = 0.05
"""Maximum share of non-ASCII characters that a charset may fail to decode before the next one is tried. A truncated
page has one or two such characters."""
MAX_UTF8_DAMAGE = 0.5
"""The same limit for UTF-8; it is higher, as valid UTF-8 sequences rarely occur by chance."""
MIN_HIGH_BYTES = 64
"""Minimum number of non-ASCII bytes with which the detector may overrule a declared charset. With this many, it was
wrong about the alphabet of 2 in 400 labelled Latin texts; with fewer, of 6 in 200."""
MAX_LATIN_RUNS = 0.75
"""Maximum share of non-ASCII bytes next to another one in a text in the Latin alphabet."""
MIN_UTF8_EXTRA = 4
"""Minimum number of UTF-8 continuation bytes with which valid UTF-8 overrules a declared multi-byte charset: one or two
GBK characters can be valid UTF-8 by chance."""
MIN_NUL_SHARE = 0.2
"""Minimum share of NULs at every second byte of a page in UTF-16, whose markup has a NUL in each ASCII character."""
MIN_TAGS = 2
"""Minimum number of tags in a page in UTF-16 with fewer NULs: in a long text without ASCII characters, few bytes are
NULs."""

_BOMS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_WIDER = {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs", "iso8859-11": "cp874"}
"""Codec of a charset label → the larger codec that pages with this label use in fact."""
_DOS = re.compile(r"(?:cp|ibm)(437|737|775|850|852|855|857|862|874|932|949)")
_UNLISTED = {
    "uhc": "cp949",
    "johab": "johab",
    "mac-cyrillic": "mac-cyrillic",
    "x-mac-cyrillic": "mac-cyrillic",
    "hz-gb-2312": "hz",
    "iso-2022-kr": "iso2022_kr",
    "iso2022_kr": "iso2022_kr",
}
"""Charset labels that old pages use and browsers reject for safety, with their codecs. UTF-7 is not accepted, because
it would change plain ASCII text."""
_NAMES = {
    "cp932": "shift_jis",
    "cp949": "euc-kr",
    "cp866": "ibm866",
    "cp874": "windows-874",
    "big5hkscs": "big5",
    "mac-roman": "macintosh",
    "mac-cyrillic": "x-mac-cyrillic",
    "utf-16-le": "utf-16le",
    "utf-16-be": "utf-16be",
    "hz": "hz-gb-2312",
}
_SEVEN_BIT = frozenset({"iso2022_jp", "iso2022_kr", "hz"})
_MULTI_BYTE = frozenset({"gb18030", "cp932", "cp949", "big5hkscs", "euc_jp", "johab"})
_LATIN = {
    "western": "cp1252 iso8859-3 iso8859-10 iso8859-14 iso8859-15 mac-roman cp437 cp850 cp1258",
    "central": "cp1250 iso8859-2 iso8859-16 cp852",
    "turkish": "cp1254 cp857",
    "baltic": "cp1257 iso8859-4 iso8859-13 cp775",
}
_ALPHABETS = {codec: alphabet for alphabet, codecs in _LATIN.items() for codec in codecs.split()} | {
    "iso8859-6": "cp1256",
    "iso8859-7": "cp1253",
    "iso8859-8": "cp1255",
    "koi8-u": "koi8-r",
}
"""Codec → name of its group of codecs, which the detector often confuses; other codecs are a group of their own."""
_TAG = re.compile(r"<[a-zA-Z/!]")
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
_META = re.compile(rb"<meta[\s/][^<>]*?\bcharset\s*=\s*[\"']?\s*([\w.:-]{2,40})", re.IGNORECASE)
_XML = re.compile(rb"\s*<\?xml\s[^<>]*?\bencoding\s*=\s*[\"']([\w.:-]{2,40})", re.IGNORECASE)
_HIGH_RUN = re.compile(rb"[\x80-\xff]{2,}")
_ASCII = bytes(range(128))


@dataclass(frozen=True, slots=True)
class Decoded:
    """The text of a page, the name of its charset, and how the charset was found."""

    text: str
    charset: str
    origin: Origin


def decode(payload: bytes, http_charset: str | None) -> Decoded:
    """Find the charset of a page and decode it.

    Bytes that the charset cannot decode become U+FFFD. NUL characters are removed.
    """
    for mark, codec in _BOMS:
        if payload.startswith(mark):
            return _decode_as(payload[len(mark) :], codec, "bom")
    http = codec_of(http_charset) if http_charset else None
    if b"\0" in payload:
        if wide := wide_codec(payload, http):
            return _decode_as(payload, wide, "http" if http == wide else "detector")
        payload = payload.replace(b"\0", b"")
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        return _decode_legacy(payload, _declarations(payload, http))
    extra = len(payload) - len(text)
    if http == "utf-8" and (extra or b"\x1b" not in payload):
        return Decoded(text, "utf-8", "http")  # True for most pages: the charset in their HTML head need not be read.
    declared = _declarations(payload, http)
    if extra < MIN_UTF8_EXTRA:
        for codec, origin in _rivals(payload, declared, ascii_only=not extra):
            other, damage = _try(payload, codec)
            if not damage:
                return Decoded(other, charset_name(codec), origin)
    return Decoded(text, "utf-8", _named_by("utf-8", declared, "utf-8"))


@lru_cache(maxsize=1024)
def codec_of(label: str) -> str | None:
    """Return the Python codec for a charset label, or None if the label is unknown."""
    label = label.strip(" \t\r\n\f\"';").lower()
    codec: str | None = map_encoding_to_html5(label, fallback_utf8=False)
    if codec is not None:
        return _WIDER.get(codec, codec)
    dos = _DOS.fullmatch(label)
    return f"cp{dos[1]}" if dos else _UNLISTED.get(label)


@lru_cache(maxsize=256)
def charset_name(codec: str) -> str:
    """Return the WHATWG name of a Python codec in lower case, or Python's name if WHATWG has none."""
    if codec in _NAMES:
        return _NAMES[codec]
    name = re.sub(r"^cp(?=125\d$)", "windows-", codec)
    return name.replace("iso8859", "iso-8859").replace("iso2022_", "iso-2022-").replace("euc_", "euc-")


def _decode_as(payload: bytes, codec: str, origin: Origin) -> Decoded:
    return Decoded(payload.decode(codec, "replace").replace("\0", ""), charset_name(codec), origin)


def _declarations(payload: bytes, http: str | None) -> list[Candidate]:
    """Return the charsets that the HTTP header and the start of the page declare, as (codec, origin)."""
    declared: list[Candidate] = [(http, "http")] if http else []
    head = payload[:PRESCAN_BYTES]
    if b"<!--" in head:
        head = _COMMENT.sub(b"", head)
    match = _META.search(head) or _XML.match(head)
    if match and (codec := codec_of(match[1].decode("ascii", "replace"))):
        declared.append((codec, "meta"))
    return declared


def _named_by(codec: str, declared: list[Candidate], otherwise: Origin) -> Origin:
    """Return where this codec is declared first (such as the HTTP header), or `otherwise` if it is not declared."""
    return next((origin for name, origin in declared if name == codec), otherwise)


def wide_codec(payload: bytes, http: str | None = None) -> str | None:
    """Return the codec of a page in UTF-16 or UTF-32; None if it is in neither. `http`: codec of the HTTP header."""
    mark = next((codec for mark, codec in _BOMS if payload.startswith(mark)), None)
    if mark is not None:
        return mark if mark != "utf-8" else None
    return _dense_wide_codec(payload) or _sparse_wide_codec(payload, http) if b"\0" in payload else None


def _dense_wide_codec(payload: bytes) -> str | None:
    """Return the codec of a page in UTF-16 or UTF-32 that is mostly ASCII characters; None if it is no such page."""
    # ASCII characters have NUL bytes in these codecs; the positions of the bytes show the width and the byte order.
    sample = payload[:PRESCAN_BYTES]
    shares = [sample[index::4].count(0) / len(sample[index::4] or b"x") for index in range(4)]
    zeros = [share >= MIN_NUL_SHARE for share in shares]
    patterns = {
        (False, True, False, True): "utf-16-le",
        (True, False, True, False): "utf-16-be",
        (False, True, True, True): "utf-32-le",
        (True, True, True, False): "utf-32-be",
    }
    return patterns.get((zeros[0], zeros[1], zeros[2], zeros[3]))


def _sparse_wide_codec(payload: bytes, http: str | None) -> str | None:
    """Return the codec of a page in UTF-16 that has few ASCII characters; None if it is no such page.

    The page must decode to a text with tags, or the HTTP header must declare UTF-16. Other pages with NULs do neither.
    """
    declared = http if http is not None and http.startswith("utf-16") else None
    for codec in ("utf-16-le", "utf-16-be"):
        text, damage = _try(payload, codec)
        if damage <= MAX_DAMAGE and (codec == declared or len(_TAG.findall(text)) >= MIN_TAGS):
            return codec
    return None


def _rivals(payload: bytes, declared: list[Candidate], ascii_only: bool) -> Iterator[Candidate]:
    """Yield (codec, origin) of the charsets to try instead of UTF-8 on a page that is valid UTF-8.

    If `ascii_only` is True, these are 7-bit charsets. Otherwise they are the multi-byte charsets that the page
    declares.
    """
    yield from ((codec, origin) for codec, origin in declared if codec in (_SEVEN_BIT if ascii_only else _MULTI_BYTE))
    if ascii_only and b"\x1b" in payload:
        codec = codec_of(detect_encoding(payload, html5_compatible=False) or "")
        if codec in _SEVEN_BIT:
            yield codec, "detector"


def _decode_legacy(payload: bytes, declared: list[Candidate]) -> Decoded:
    """Decode a page that is not valid UTF-8.

    The first charset is used that gives few errors and text in the detected alphabet. If there is none, the charset
    with the smallest share of errors is used.
    """
    detected = codec_of(detect_encoding(payload, html5_compatible=False) or "")
    candidates: list[Candidate] = [("utf-8", _named_by("utf-8", declared, "utf-8"))]
    candidates += [(codec, origin) for codec, origin in declared if not codec.startswith("utf-")]
    candidates += [(codec, "detector") for codec in (detected, "cp1252") if codec]
    alphabet = _alphabet(payload, detected)
    tried: list[tuple[float, str, Candidate]] = []
    for codec, origin in candidates:
        text, damage = _try(payload, codec)
        if codec == "utf-8":
            fits = damage <= MAX_UTF8_DAMAGE
        else:
            fits = damage <= MAX_DAMAGE and alphabet in (None, _ALPHABETS.get(codec, codec))
        if fits:
            return Decoded(text, charset_name(codec), origin)
        tried.append((damage, text, (codec, origin)))
    _, text, (codec, origin) = min(tried, key=lambda entry: entry[0])
    return Decoded(text, charset_name(codec), origin)


def _alphabet(payload: bytes, detected: str | None) -> str | None:
    """Return the alphabet of the charset `detected`.

    None if the page has too few non-ASCII bytes, or if these bytes contradict `detected`.
    """
    high = len(payload.translate(None, _ASCII))
    if high < MIN_HIGH_BYTES or detected is None or detected.startswith("utf-"):
        return None
    alphabet = _ALPHABETS.get(detected, detected)
    # Accented Latin letters are mostly isolated; letters of other alphabets are adjacent.
    isolated = sum(map(len, _HIGH_RUN.findall(payload))) <= MAX_LATIN_RUNS * high
    return alphabet if isolated == (alphabet in _LATIN) else None


def _try(payload: bytes, codec: str) -> tuple[str, float]:
    """Return the text decoded by this codec, and the share of its non-ASCII characters that could not be decoded."""
    try:
        return payload.decode(codec), 0.0
    except UnicodeDecodeError:
        text = payload.decode(codec, "replace")
    written = payload.count(b"\xef\xbf\xbd") if codec == "utf-8" else 0
    return text, (text.count("\ufffd") - written) / (len(text) - len(text.encode("ascii", "ignore")))
