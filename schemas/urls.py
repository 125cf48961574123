"""URLs as keys: the sort-friendly form, and the names under which a host may be filed."""

from urllib.parse import urlsplit


def surt(url: str) -> str:
    """The sort-friendly form of a URL: `https://www.example.com/a?b` gives `com,example,www)/a?b`; never raises."""
    host, rest = _parts(url)
    return f"{','.join(reversed(host.split('.')))}){rest}" if host else url


def host_suffixes(url: str) -> list[str]:
    """The host of a URL and every parent of it, longest first; one of them is its registrable domain."""
    host, _ = _parts(url)
    labels = host.split(".") if host else []
    return [".".join(labels[start:]) for start in range(len(labels))]


def _parts(url: str) -> tuple[str, str]:
    try:
        split = urlsplit(url)
        host = (split.hostname or "").rstrip(".")
    except ValueError:
        return "", url
    return host, (split.path or "/") + (f"?{split.query}" if split.query else "")
