"""Recognition of documents that takedowns removed from one run, in the tables of another run.

A certificate has salted digests only. So each id, URL and host of the other table is hashed and looked up. The digests
of URLs and hosts are those of their canonical forms, so the same page is found in whatever form its address is written.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from schemas.storage import Store
from schemas.takedown import (
    PENDING_NAME,
    TAKEDOWNS,
    Certificate,
    read_certificate,
    salted_digest,
)
from schemas.urls import canonical_url, host_suffixes, is_host_of, parse_domain, resolved_host
from schemas.versions import source_runs

HOST, CANONICAL = "host", "canonical"
"""Kinds of the digests in `Certificate.forms`."""
HOSTS_IN_MEMORY = 1 << 16


def certificates_of(run: Store) -> Iterator[Certificate]:
    """Yield the certificates of all takedowns of a run, sorted by id."""
    names = sorted(run.child(TAKEDOWNS).walk()) if run.exists(TAKEDOWNS) else []
    for name in names:
        if "/" not in name and name.endswith(".json") and f"{TAKEDOWNS}/{name}" != PENDING_NAME:
            yield read_certificate(run, name.removesuffix(".json"))


def request_forms(salt: str, items: Sequence[tuple[str, str]]) -> list[str]:
    """Return the salted digests, sorted, of the requested domains and URLs in their canonical forms.

    `items`: (kind, value) of every requested item; kinds other than `domain` and `url` have no such form.
    """
    forms = {"domain": lambda value: (HOST, resolved_host(parse_domain(value)))}
    forms["url"] = lambda value: (CANONICAL, canonical_url(value))
    pairs = [forms[kind](value) for kind, value in items if kind in forms]
    return sorted({salted_digest(salt, kind, value.encode()) for kind, value in pairs})


class RemovedDocuments:
    """The documents that takedowns removed from a run, as far as ids and addresses reveal them.

    Takedowns of the runs whose tables it reads count too: its own tables were made without their documents.
    """

    def __init__(self, run: Store):
        self.certificates = [own for each in (run, *source_runs(run)) for own in certificates_of(each)]
        self._removed = [{traces.document for traces in own.documents} for own in self.certificates]
        # A certificate of an earlier version has the requests as they were typed, and no forms.
        self._asked = [{*(own.requests if own.forms is None else own.forms)} for own in self.certificates]

    @property
    def are_all_known(self) -> bool:
        """True if a table without a document that `find` recognizes holds none of the requested documents.

        False if near-duplicates were requested, which may have other ids and addresses in another run, or if an earlier
        version made a certificate.
        """
        return all(own.forms is not None and not own.near for own in self.certificates)

    def find(self, doc_id: bytes, url: str, domain: str | None) -> Certificate | None:
        """Return the certificate of the takedown that removed a document of this id or address; None = there is none.

        `domain`: the registrable domain of the document.
        """
        forms: list[tuple[str, bytes]] | None = None
        for certificate, removed, asked in zip(self.certificates, self._removed, self._asked, strict=True):
            if salted_digest(certificate.salt, "document", doc_id) in removed:
                return certificate
            if not asked:
                continue
            forms = _forms(url, domain) if forms is None else forms
            if any(salted_digest(certificate.salt, kind, value) in asked for kind, value in forms):
                return certificate
        return None


def _forms(url: str, domain: str | None) -> list[tuple[str, bytes]]:
    """Return (kind, value) of every item of a request that a document of this address would match."""
    hosts = {host for address in {url, domain or ""} for host in _hosts_over(resolved_host(address))}
    values = [
        ("url", url),
        (CANONICAL, canonical_url(url)),
        *((kind, own) for own in hosts for kind in (HOST, "domain")),
    ]
    return [(kind, value.encode()) for kind, value in values]


@lru_cache(HOSTS_IN_MEMORY)
def _hosts_over(host: str) -> tuple[str, ...]:
    """Return a host and all domains that it is below; none for an empty name."""
    return tuple(name for name in host_suffixes(f"http://{host}/") if is_host_of(host, name)) if host else ()
