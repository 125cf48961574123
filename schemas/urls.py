"""URLs as keys: a canonical form that URLs of one page share, the sort-friendly form, and the parents of a host.

The canonical form follows RFC 3986 section 6.2 (case, percent-encoding, dot segments, default ports, empty paths) and
RFC 3987 with UTS 46 for hosts of other scripts. It also ignores what crawlers and archives ignore in their indexes: the
difference of http and https, `www.`, user names, fragments, session ids, tracking parameters, the order of parameters,
and a slash or index page at the end. If two pages had one canonical form, a document would be lost. Everything that may
identify another page is therefore kept: the case of a path, empty segments, parameters such as `ref` or `page`, hosts
such as `m.` or `amp.`, and fragments that are routes.
"""

import hashlib
import re
from functools import lru_cache
from ipaddress import IPv6Address
from urllib.parse import quote, unquote, urlsplit

from schemas.errors import ConfigError
from schemas.normalization import normalize

KEY_BYTES = 16
MAX_PORT = 65535
MAX_HOST_CHARS = 1_000
"""Maximum length of a host of another script than ASCII [code points]; DNS allows 253 bytes. Python's split of URLs and
its Punycode take time quadratic in it."""
MAX_LABEL_CHARS = 63
"""Maximum length of a label of such a host [code points]. Source: RFC 1035, section 2.3.4."""
DEFAULT_PORTS = frozenset({80, 443})
INDEX_PAGES = frozenset(
    {
        *("index.html", "index.htm", "index.shtml", "index.php", "index.asp", "index.aspx", "index.jsp"),
        *("default.html", "default.htm", "default.asp", "default.aspx"),
    }
)
"""Files that servers return for a folder (Apache's DirectoryIndex, IIS' default documents)."""
SESSIONS = frozenset({"jsessionid", "phpsessid", "cfid", "cftoken"})
"""Names of parameters that always hold a visitor's session, as server software sets them."""
LOOSE_SESSIONS = frozenset({"sid", "sess", "session", "session_id", "sessionid", "oscsid", "zenid", "s", "phpsid"})
"""Names of parameters that hold a session if their value looks like a session id; `?s=shoes` is a search."""
SESSION_VALUE = re.compile(r"[0-9a-f]{26}|[0-9a-f]{32}|[0-9a-f]{40}|(?=[^&]*\d)(?=[^&]*[a-z])[0-9a-z]{26,64}", re.I)
"""Values that look like session ids: 26, 32 or 40 hex digits, or 26 to 64 letters and digits mixed."""
TRACKING = frozenset(
    {
        *("gclid", "gclsrc", "dclid", "gbraid", "wbraid", "srsltid", "_ga", "_gl", "fbclid", "igshid", "igsh"),
        *("msclkid", "yclid", "ysclid", "_openstat", "twclid", "ttclid", "li_fat_id", "epik", "dicbo", "mkt_tok"),
        *("mc_cid", "mc_eid", "_hsenc", "_hsmi", "hsctatracking", "vero_id", "vero_conv", "oly_enc_id"),
        *("oly_anon_id", "s_kwcid", "ef_id", "wickedid", "rb_clickid", "ml_subscriber", "ml_subscriber_hash"),
        *("mibextid", "__twitter_impression", "pk_campaign", "pk_kwd", "pk_keyword", "pk_source", "pk_medium"),
    }
)
"""Names of parameters that advertisers and senders of mail append to links; servers do not choose pages by them."""
TRACKING_PREFIXES = ("utm_", "mtm_", "piwik_", "matomo_")
ROUTES = ("!", "%21", "/")
"""Prefixes of a fragment that names a page."""

_WEB = re.compile(
    r"(?:https?:)?[/\\]{2}(?:[^/?#\\]*@)?(\[[^\]/?#]*\]|[^/?#:\\]*)(?::([0-9]*))?(?=[/?#\\]|\Z)"
    r"([^?#]*)(?:\?([^#]*))?(?:#(.*))?\Z",
    re.IGNORECASE | re.DOTALL,
)
_CONTROLS = "".join(map(chr, range(33)))
_INNER = re.compile(r"[\t\r\n]")
_SCHEME = re.compile(r"https?:/*|(?:[a-z][a-z0-9+.-]*:)?//|/+", re.IGNORECASE)
_SCHEMELESS = re.compile(
    r"(?![A-Za-z][A-Za-z0-9+.-]*:(?![0-9]+(?:[/?#\\]|\Z)))"  # no scheme, but perhaps a port
    r"(?=[^/?#\\\s]*[.\u3002\uff0e\uff61])[^/?#\\\s]++(?:[/?#\\]|\Z)"
)
_AUTHORITY_END = re.compile(r"[/?#]")
_HOST = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\Z")
_WWW = re.compile(r"(?:www[0-9]{0,2}\.)+(?=[^.]+\.)")
_INVISIBLE = re.compile("[\u00ad\u034f\u180b-\u180f\u200b\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0100-\U000e01ef]")
_FOLDED = re.compile("[^\u00df\u03c2]+")  # all but ß and ς, which UTS 46 keeps
_OTHER = re.compile(r"%[0-9A-Fa-f]{2}|[^A-Za-z0-9\-._~!$&'()*+,;=:@/]")
_OTHER_QUERY = re.compile(r"%[0-9A-Fa-f]{2}|[^A-Za-z0-9\-._~!$&'()*+,;=:@/?]")
_PATH_SESSION = re.compile(r";(?:jsessionid|phpsessid|sid)=[^/;]*", re.IGNORECASE)
_COOKIELESS = re.compile(r"/\((?:[A-Z]\([0-9A-Za-z_-]+\))+\)(?=/|\Z)")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def canonical_url(url: str) -> str:
    """Return the canonical form of a URL, such as `http://example.com/a?b=1`; URLs of the same page share one form.

    Never raises. Text that is not a web URL only loses surrounding whitespace and control characters, tabs and line
    breaks.
    """
    stripped = _INNER.sub("", url.strip(_CONTROLS))
    parts = _WEB.match(stripped)
    where = _site(parts) if parts is not None else None
    if parts is None or where is None:
        return stripped
    _, _, path, query, fragment = parts.groups()
    parameters = _query(query) if query else ""
    # Crawlers send no fragments. In a URL that was copied from a browser, `#!` and `#/` name the page.
    route = f"#{_encoded(fragment, _OTHER_QUERY)}" if fragment and fragment.startswith(ROUTES) else ""
    return f"http://{where}{_path(path)}{parameters}{route}"


def web_host(url: str) -> str | None:
    """Return the host of a web URL in its canonical form, with the port unless it is 80 or 443.

    The hosts of `https://www.Example.com/a` and `http://example.com:80` are equal. None if the text is not a web URL.
    """
    parts = _WEB.match(_INNER.sub("", url.strip(_CONTROLS)))
    return _site(parts) if parts is not None else None


def web_address(url: str) -> tuple[str, str] | None:
    """Return the host of a web URL in ASCII and lower case, and its path with the query as written.

    The host keeps `www.` and has no port; fragment and user name are left out. The path is '' or begins with `/`, `?`
    or a backslash. None if the text is not a web URL.
    """
    parts = _WEB.match(_INNER.sub("", url.strip(_CONTROLS)))
    if parts is None:
        return None
    host, _, path, query, _ = parts.groups()
    name = _full_host(host)
    return None if name is None else (name, path if query is None else f"{path}?{query}")


def with_scheme(address: str) -> str:
    """Return an address such as `example.com/a` or `//example.com/a` with a scheme; other text as it is.

    Never raises. Surrounding whitespace and control characters are removed, and tabs and line breaks within. A host
    must have a dot, since ids of documents have none.
    """
    stripped = _INNER.sub("", address.strip(_CONTROLS))
    if stripped.startswith("//"):
        return f"http:{stripped}"
    return f"http://{stripped}" if _SCHEMELESS.match(stripped) else stripped


def without_www(host: str) -> str:
    """Return a host without `www.`, `www2.` and the like before a domain of at least two labels."""
    return _WWW.sub("", host)


def _site(parts: re.Match[str]) -> str | None:
    """Return host and port of a matched URL, without a default port; None if one of them is not valid."""
    host, port = parts.group(1, 2)
    number = int(port.lstrip("0")[:6] or "0") if port else 80
    name = _host(host)
    if name is None or number > MAX_PORT:
        return None
    return name if number in DEFAULT_PORTS else f"{name}:{number}"


def url_key(url: str) -> bytes:
    """Return the first 16 bytes of the SHA-256 of a URL's canonical form."""
    return hashlib.sha256(canonical_url(url).encode("utf-8", "surrogatepass")).digest()[:KEY_BYTES]


def surt(url: str) -> str:
    """Return a URL's sort-friendly form: `com,example,www)/a?b` for `https://www.example.com/a?b`."""
    host, rest = _parts(url)
    return f"{','.join(reversed(host.split('.')))}){rest}" if host else url


def host_suffixes(url: str) -> list[str]:
    """Return the host of a URL and all parent domains of the host, longest first."""
    host, _ = _parts(url)
    labels = host.split(".") if host else []
    return [".".join(labels[start:]) for start in range(len(labels))]


def resolved_host(address: str) -> str:
    """Return the host that a browser opens for an address, as ASCII in lower case; '' if there is none.

    The address may have no scheme, as `example.com/a`, and its host may have percent-encoded or full-width letters.
    `bücher.example` and `xn--bcher-kva.example` are the same host.
    """
    text = _INNER.sub("", address.strip(_CONTROLS)).replace("\\", "/")
    scheme = _SCHEME.match(text)
    host = unquote((host_suffixes(f"http://{text[scheme.end() if scheme else 0 :]}") or [""])[0])
    return (ascii_host(host) or host).lower().strip(".")


def is_host_of(host: str, domain: str) -> bool:
    """Return True if a host is `domain` or below it, as `news.example.com` is below `example.com`.

    An IP address, and a name without a dot, such as `com` or `localhost`, have no hosts below them.
    """
    return host == domain or (_has_hosts_below(domain) and host.endswith(f".{domain}"))


def _has_hosts_below(domain: str) -> bool:
    return "." in domain and ":" not in domain and not domain.rpartition(".")[2].isdigit()


def parse_domain(text: str) -> str:
    """Return the domain that a user named, in lower case. Raises ConfigError if the text is not the name of a host."""
    domain = text.strip().strip(".").lower()
    if not domain or " " in domain or host_suffixes(f"http://{domain}/")[:1] != [domain]:
        raise ConfigError(
            f"--domain: expected a domain such as example.com, got {text!r}. Give the host name alone, or use --url."
        )
    return domain


def url_pattern(domain: str) -> str:
    """Return a regular expression (RE2, in any case) for the URLs whose host is `domain` or below it."""
    below = r"(?:[^/?#\\@:]*\.)?" if _has_hosts_below(domain) else ""
    user = r"(?:[^/?#\\]*@)?"
    return rf"^[a-z][a-z0-9+.-]*://{user}{below}{re.escape(domain)}\.?(?::[0-9]*)?(?:[/?#\\]|$)"


def _parts(url: str) -> tuple[str, str]:
    """Return the host of a URL, and the path with the query. The host is '' if the URL cannot be parsed."""
    try:
        if len(url) > MAX_HOST_CHARS and not url.isascii() and _has_long_host(url):
            return "", url
        split = urlsplit(url)
        host = (split.hostname or "").rstrip(".")
    except ValueError:
        return "", url
    return host, (split.path or "/") + (f"?{split.query}" if split.query else "")


def _has_long_host(url: str) -> bool:
    """Return True if the part of a URL that may hold a host is longer than MAX_HOST_CHARS."""
    authority = _INNER.sub("", url).partition("//")[2]
    end = _AUTHORITY_END.search(authority)
    return (end.start() if end else len(authority)) > MAX_HOST_CHARS


@lru_cache(maxsize=1 << 12)
def _host(host: str) -> str | None:
    """Return the host in ASCII and lower case, without `www.` and final dots; None if it is not a valid host."""
    name = _full_host(host)
    return None if name is None else without_www(name)


@lru_cache(maxsize=1 << 12)
def _full_host(host: str) -> str | None:
    """Return the host in ASCII and lower case, without final dots; None if it is not a valid host."""
    if host.startswith("["):
        try:
            return f"[{IPv6Address(host[1:-1]).compressed}]"
        except ValueError:
            return None
    if "%" in host:
        host = unquote(host)
    name = host.lower() if host.isascii() else ascii_host(host)
    if name is None:
        return None
    name = name.rstrip(".")
    return name if _HOST.match(name) else None


def ascii_host(host: str) -> str | None:
    """Return a host with its non-ASCII labels in Punycode, by the non-transitional mapping of UTS 46.

    None if the host or such a label is too long.

    Python's `idna` codec follows the older standard IDNA 2003, which maps `straße` to `strasse`, a different domain.
    """
    if len(host) > MAX_HOST_CHARS:
        return None
    folded = _FOLDED.sub(_casefold, normalize("NFKC", _INVISIBLE.sub("", host)).replace("\u1e9e", "\u00df"))
    labels = normalize("NFKC", folded).replace("\u3002", ".").split(".")
    if any(len(label) > MAX_LABEL_CHARS and not label.isascii() for label in labels):
        return None
    return ".".join(label if label.isascii() else f"xn--{_punycode(label)}" for label in labels)


def _casefold(match: re.Match[str]) -> str:
    return match[0].casefold()


def _punycode(label: str) -> str:
    return label.encode("punycode").decode("ascii")


def _path(path: str) -> str:
    """Return the canonical path: percent-encoded, without session ids, dot segments, final slashes and index page."""
    if "\\" in path:
        path = path.replace("\\", "/")
    path = _encoded(path, _OTHER)
    if ";" in path:
        path = _PATH_SESSION.sub("", path)
    if "/(" in path:
        path = _COOKIELESS.sub("", path)
    if "/." in path:
        path = _without_dots(path)
    while True:
        path = path.rstrip("/")
        last = path[path.rfind("/") + 1 :]
        if last.lower() not in INDEX_PAGES:
            return path or "/"
        path = path[: -len(last)]


def _without_dots(path: str) -> str:
    """Return the path without `.` and `..` segments. Source: RFC 3986, section 5.2.4."""
    kept: list[str] = []
    segments = path.split("/")
    for segment in segments:
        if segment == "..":
            del kept[max(1, len(kept) - 1) :]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return "/".join(kept)


def _query(query: str) -> str:
    """Return `?` and the parameters that may select a page, sorted by name; '' if there are none."""
    parameters = _encoded(query, _OTHER_QUERY).replace("%20", "+").split("&")
    named = [(parameter.partition("=")[0], parameter) for parameter in parameters]
    kept = [pair for pair in named if pair[1] and not _is_noise(*pair)]
    if not kept:
        return ""
    if len(kept) > 1:
        kept.sort(key=_first)  # parameters of one name keep their order, because they may form a list
    return "?" + "&".join([parameter for _, parameter in kept])


def _first(pair: tuple[str, str]) -> str:
    return pair[0]


def _is_noise(name: str, parameter: str) -> bool:
    """Return True if a parameter holds a session id or tracking data."""
    lower = name.lower()
    if lower in LOOSE_SESSIONS:
        return SESSION_VALUE.fullmatch(parameter, len(name) + 1) is not None
    return lower in TRACKING or lower in SESSIONS or lower.startswith(TRACKING_PREFIXES)


def _encoded(text: str, other: re.Pattern[str]) -> str:
    """Return the text with normalized percent-encoding. Source: RFC 3986, section 6.2.2.

    `other` matches the percent-encoded bytes, and the characters that must be percent-encoded.
    """
    return other.sub(_replacement, text)


def _replacement(match: re.Match[str]) -> str:
    return _normalized(match[0])


@lru_cache(maxsize=1 << 12)
def _normalized(text: str) -> str:
    """Return the percent-encoded form of a character, or the normal form of a percent-encoded byte."""
    if len(text) == 1:
        return quote(text, safe="", errors="surrogatepass")
    char = chr(int(text[1:], 16))
    return char if char in _UNRESERVED else text.upper()  # only unreserved characters are decoded
