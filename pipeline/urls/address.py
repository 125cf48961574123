"""The form of a URL in which it is compared with lists and words, and the keys of its domains and prefixes."""

import re
from collections.abc import Iterator
from hashlib import blake2s
from urllib.parse import unquote_to_bytes

from schemas.urls import web_address, with_scheme, without_www

MAX_DOMAIN_BYTES = 253
"""Maximum length of a domain. Source: RFC 1035, section 2.3.4, as text."""
MAX_ENTRY_BYTES = 2_000
"""Maximum length of a URL of a list. Only prefixes up to the longest entry are hashed, so long URLs cost little."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:(?!\d{1,5}(?:[/?#]|\Z))", re.IGNORECASE)
"""The scheme of another address, such as `mailto:`; a host with a port has digits after the colon."""
ENDS = b"/?&"
"""Bytes at which a URL continues an entry of a list."""


def address_of(url: str) -> tuple[bytes, bytes] | None:
    """Return host and path of a web or FTP URL in lower case, percent-encoding decoded once; None for another text.

    The URL may have no scheme, as `example.com/a`. The host is ASCII and has no port; the path begins with `/` and has
    the query, but no fragment. The path is UTF-8, or any bytes that were percent-encoded.
    """
    url = f"http{url[3:]}" if url[:6].lower() == "ftp://" else url
    parts = web_address(url) or web_address(with_scheme(url))
    if parts is None:
        return None
    host, path = parts
    if "%" in path or not path.isascii():
        path_bytes = unquote_to_bytes(path.encode("utf-8", "surrogatepass"))
        lowered = path_bytes.decode("utf-8", "surrogateescape").lower().encode("utf-8", "surrogateescape")
    else:
        lowered = path.lower().encode("ascii")
    if b"\\" in lowered:
        lowered = lowered.replace(b"\\", b"/")
    return host.encode("ascii"), lowered if lowered[:1] == b"/" else b"/" + lowered


def entry_of(line: str) -> bytes | None:
    """Return the domain, or host and path, of a line of a list; None if it is no entry or too long."""
    start = line.find("://") + 3 if line.startswith(("http://", "https://", "ftp://")) else 0
    rest = line[start:]
    is_other = not rest or rest.startswith(("/", "?", "#")) or _SCHEME.match(rest)
    parts = None if is_other else address_of(f"http://{rest}")
    if parts is None or not parts[0] or len(parts[0]) > MAX_DOMAIN_BYTES:
        return None
    host, path = parts[0], parts[1].rstrip(b"/")
    entry = site_of(host) + path if path else host
    return entry if len(entry) <= MAX_ENTRY_BYTES else None


def site_of(host: bytes) -> bytes:
    """Return a host without `www.`, as entries with a path have it."""
    return without_www(host.decode("latin-1")).encode("latin-1") if host.startswith(b"www") else host


def key_of(entry: bytes) -> int:
    """Return the key of a domain, or of host and path: BLAKE2s of 8 bytes (RFC 7693), as a little-endian number."""
    return int.from_bytes(blake2s(entry, digest_size=8).digest(), "little")


def domains_of(host: bytes) -> Iterator[bytes]:
    """Yield the parent domains of a host, shortest first, then the host. An IP address has no parents."""
    if host[:1] == b"[" or host[host.rfind(b".") + 1 :].isdigit():
        if len(host) <= MAX_DOMAIN_BYTES:
            yield host
        return
    at = len(host)
    while at > 0:
        at = host.rfind(b".", 0, at)
        if len(host) - at - 1 > MAX_DOMAIN_BYTES:
            return
        yield host[at + 1 :]


def prefixes_of(site: bytes, path: bytes, longest: int) -> Iterator[bytes]:
    """Yield the prefixes of host and path that an entry may be, of at most `longest` bytes, shortest first."""
    address = site + path
    for end in range(len(site) + 1, min(len(address), longest) + 1):
        if end == len(address) or address[end] in ENDS:
            yield address[:end]
