"""Recognition of documents that takedowns removed from one run, in the tables of another run.

A certificate has salted digests only. So each id, URL and host of the other table is hashed and looked up. The digests
of URLs and hosts are those of their canonical forms, so the same page is found in whatever form its address is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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

HOST, CANONICAL, DOCUMENT = "host", "canonical", "document"
"""Kinds of the digests in `Certificate.forms`."""
HOSTS_IN_MEMORY = 1 << 16


def certificates_of(run: Store) -> Iterator[Certificate]:
    """Yield the certificates of all takedowns of a run, sorted by id."""
    names = sorted(run.child(TAKEDOWNS).walk()) if run.exists(TAKEDOWNS) else []
    for name in names:
        if "/" not in name and name.endswith(".json") and f"{TAKEDOWNS}/{name}" != PENDING_NAME:
            yield read_certificate(run, name.removesuffix(".json"))


def request_forms(salt: str, items: Sequence[tuple[str, str]]) -> list[str]:
    """Return the salted digests, sorted, of requested items in their canonical forms."""
    return sorted({salted_digest(salt, kind, value) for kind, value in forms_of_request(items)})


class RemovedDocuments:
    """The documents that takedowns removed from a run, as far as ids and addresses reveal them.

    Takedowns of the runs whose tables it reads count too: its own tables were made without their documents. Digests are
    grouped by their salt, so a document is hashed once for each salt and not for each takedown.
    """

    def __init__(self, run: Store):
        self._set([own for each in (run, *source_runs(run)) for own in certificates_of(each)])

    @classmethod
    def of(cls, certificates: Sequence[Certificate]) -> "RemovedDocuments":
        """Return the documents that the takedowns of these certificates removed."""
        removed = cls.__new__(cls)
        removed._set(certificates)
        return removed

    def _set(self, certificates: Sequence[Certificate]) -> None:
        self.certificates = [*certificates]
        self._by_salt: dict[str, _Digests] = {}
        for certificate in self.certificates:
            digests = self._by_salt.setdefault(certificate.salt, _Digests())
            for traces in certificate.documents:
                digests.documents.setdefault(traces.document, certificate)
            # A certificate of an earlier version has the requests as they were typed, and no forms.
            for asked in certificate.requests if certificate.forms is None else certificate.forms:
                digests.asked.setdefault(asked, certificate)
            if not certificate.keeps_derived:
                digests.of_parents |= {own.document for own in certificate.documents}
                digests.of_parents |= {*(certificate.requests if certificate.forms is None else certificate.forms)}

    @property
    def are_all_known(self) -> bool:
        """True if a table without a document that `find` recognizes holds none of the requested documents.

        False if near-duplicates were requested, which may have other ids and addresses in another run, or if an earlier
        version made a certificate.
        """
        return all(own.forms is not None and not own.near for own in self.certificates)

    @property
    def has_ids(self) -> bool:
        """True if documents were requested by their ids. A later crawl of such a page has another id."""
        return any(
            not {own.document for own in each.documents}.isdisjoint(each.forms or ()) for each in self.certificates
        )

    def find(
        self, doc_id: bytes, url: str, domain: str | None, parents: Sequence[str] | None = None
    ) -> Certificate | None:
        """Return the certificate of a takedown that removed a document of this id or address; None = there is none.

        `domain`: the registrable domain of the document. `parents`: ids and URLs of the documents that it was made
        from; it counts as removed with each of them, unless that takedown was asked to keep derived documents.
        """
        forms: list[tuple[str, bytes]] | None = None
        for salt, digests in self._by_salt.items():
            certificate = digests.find([(DOCUMENT, doc_id)], salt)
            if certificate is None and digests.asked:
                forms = forms_of_address(url, domain) if forms is None else forms
                certificate = digests.find(forms, salt)
            if certificate is None and parents:
                certificate = digests.find_parent(parents, salt)
            if certificate is not None:
                return certificate
        return None

    def find_parent(self, parents: Sequence[str]) -> Certificate | None:
        """Return the certificate of a takedown that removed one of these parents; None = there is none.

        A takedown that was asked to keep derived documents is left out.
        """
        found = (digests.find_parent(parents, salt) for salt, digests in self._by_salt.items())
        return next((certificate for certificate in found if certificate is not None), None)


@dataclass
class _Digests:
    """The digests of all certificates with one salt."""

    documents: dict[str, Certificate] = field(default_factory=dict)
    """Certificate by the digest of each removed document; of several, the first."""
    asked: dict[str, Certificate] = field(default_factory=dict)
    """Certificate by the digest of each request, or of its canonical form."""
    of_parents: set[str] = field(default_factory=set)
    """Those of these digests whose takedowns also removed derived documents."""

    def find(self, forms: Sequence[tuple[str, bytes]], salt: str) -> Certificate | None:
        """Return the certificate of a takedown with one of these forms."""
        return next((certificate for _, certificate in self._found(forms, salt)), None)

    def find_parent(self, parents: Sequence[str], salt: str) -> Certificate | None:
        """Return the certificate of a takedown that removed a parent together with what was made from it."""
        forms = [form for parent in parents for form in forms_of_parent(parent)]
        return next((own for digest, own in self._found(forms, salt) if digest in self.of_parents), None)

    def _found(self, forms: Sequence[tuple[str, bytes]], salt: str) -> Iterator[tuple[str, Certificate]]:
        for kind, value in forms:
            digest = salted_digest(salt, kind, value)
            certificate = self.documents.get(digest) or self.asked.get(digest)
            if certificate is not None:
                yield digest, certificate


def forms_of_parent(parent: str) -> list[tuple[str, bytes]]:
    """Return (kind, value) of every item of a request that a parent, an id or a URL, would match."""
    if "://" in parent:
        return forms_of_address(parent, None)
    return [(DOCUMENT, bytes.fromhex(parent))]


def forms_of_address(url: str, domain: str | None) -> list[tuple[str, bytes]]:
    """Return (kind, value) of every item of a request that a document of this address would match."""
    hosts = {host for address in {url, domain or ""} for host in _hosts_over(resolved_host(address))}
    values = [
        ("url", url),
        (CANONICAL, canonical_url(url)),
        *((kind, own) for own in hosts for kind in (HOST, "domain")),
    ]
    return [(kind, value.encode()) for kind, value in values]


def forms_of_request(items: Sequence[tuple[str, str]]) -> list[tuple[str, bytes]]:
    """Return (kind, value) of requested items in the forms by which documents and parents are compared with them.

    `items`: (kind, value) of every requested item.
    """
    forms = {
        "domain": lambda value: (HOST, resolved_host(parse_domain(value)).encode()),
        "url": lambda value: (CANONICAL, canonical_url(value).encode()),
        **dict.fromkeys(("doc", "near"), lambda value: (DOCUMENT, bytes.fromhex(value))),
    }
    return [forms[kind](value) for kind, value in items]


@lru_cache(HOSTS_IN_MEMORY)
def _hosts_over(host: str) -> tuple[str, ...]:
    """Return a host and all domains that it is below; none for an empty name."""
    return tuple(name for name in host_suffixes(f"http://{host}/") if is_host_of(host, name)) if host else ()
