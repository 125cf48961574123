"""Selection of the documents of a takedown: by domain, URL or id, or a document with all its near-duplicates.

Both tables with URLs are searched: `documents`, which includes dropped documents and has URLs as they were crawled, and
the dataset, which has kept documents with redacted URLs. So is a table `clean` that is older than `documents`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.takedown.derived import Descendants, find_descendants
from schemas.arrow_files import ArrowFile
from schemas.errors import ConfigError, ContractError
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import MANIFEST_NAME, TableVersion, current_tables, open_table, read_run
from schemas.older_tables import read_batches
from schemas.paths import PLACE
from schemas.removed import RemovedDocuments, certificates_of
from schemas.storage import Store
from schemas.tables import PARENTS, TABLES
from schemas.takedown import STAGE, Certificate, check_no_takedowns, salted_digest
from schemas.tokens import open_dataset
from schemas.urls import canonical_url, host_suffixes, is_host_of, parse_domain, resolved_host, without_www
from schemas.versions import DATASET

ID = pa.binary(DOC_ID_BYTES)
CLUSTERED = tuple(
    name
    for name, table in TABLES.items()
    if table.rows == "document" and table.schema is not None and "cluster" in table.schema.names
)
"""Tables with the cluster of near-duplicates of every document, kept or dropped."""
BY_ID = ("doc", "near")
EXACT = "exact_duplicate"
"""The rule by which deduplication drops a document with the same text as the one that it keeps."""
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class TakedownRequest:
    """The request of a takedown: the domains, URLs and document ids to remove."""

    domains: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    """Ids (hex) of documents."""
    near: tuple[str, ...] = ()
    """Ids (hex) of documents to remove with their near-duplicates."""
    with_copies: bool = False
    """True = the near-duplicates of all selected documents are removed too."""
    keep_derived: bool = False
    """True = documents that were made from selected ones are kept."""

    def items(self) -> list[tuple[str, str]]:
        """Return the requested items as (kind, value); the kind is `domain`, `url`, `doc` or `near`."""
        kinds = {"domain": self.domains, "url": self.urls, "doc": self.documents, "near": self.near}
        return [(kind, value) for kind, values in kinds.items() for value in values]


@dataclass(frozen=True)
class Selection:
    """The ids of the documents that a takedown request matches."""

    request: TakedownRequest
    documents: frozenset[bytes]
    copies: frozenset[bytes]
    """Ids of their near-duplicates that were not requested."""
    matched: Mapping[tuple[str, str], frozenset[bytes]]
    """Ids of the documents that match each requested item."""
    urls: Mapping[bytes, str]
    """URL of each document that matches a domain, a URL or an id; near-duplicates are absent."""
    survivors: Mapping[bytes, bytes] = field(default_factory=dict)
    """Selected document that was dropped as an exact copy -> id of the document with the same text that was kept in its
    place and is not selected."""
    derived: Mapping[bytes, str] = field(default_factory=dict)
    """Document that was made from a selected document or a requested item -> this parent, as its row names it. Such
    documents are selected too, unless the request keeps them."""


def select_documents(run: Store, request: TakedownRequest) -> Selection:
    """Return the documents that match a request.

    Raises ConfigError if an item is not a valid domain or id, or matches no document.
    """
    if not request.items():
        raise ConfigError(
            "takedown: expected --domain, --url, --doc, --docs or --near, got none of them. Add one of them."
        )
    if not {"documents", "tokens"} & {*read_run(run).tables}:
        raise ConfigError(
            f"takedown: expected a run with documents or a dataset, got neither in {run.uri}. Pass the folder of a "
            "finished run."
        )
    matchers = _Matchers(request.items())
    for batch in _located(run):
        matchers.match(batch)
    matched = matchers.documents
    for item in (item for item in matched if item[0] == "near" and matched[item]):
        mates = _cluster_mates(run, matched[item])
        if not mates:
            raise ConfigError(
                f"--near {item[1]}: expected a document whose near-duplicates are known, got one without a "
                f"cluster in {run.uri}. Use --doc to remove the document alone."
            )
        matched[item] |= mates
    documents, derived, copies = _with_descendants(run, request, frozenset[bytes]().union(*matched.values()))
    is_named = (lambda item: False) if request.keep_derived else derived.names
    if missing := [item for item in matched if not matched[item] and not is_named(item)]:
        earlier = _earlier(run, missing)
        problems = [_no_match(run, item, earlier.get(item)) for item in missing]
        raise ConfigError("\n  ".join(problems))
    frozen = {item: frozenset(own) for item, own in matched.items()}
    survivors = _survivors(run, documents, copies)
    return Selection(request, documents, copies, frozen, matchers.urls, survivors, derived.parents)


def _with_descendants(
    run: Store, request: TakedownRequest, documents: frozenset[bytes]
) -> tuple[frozenset[bytes], Descendants, frozenset[bytes]]:
    """Return all documents to remove, those made from others, and the near-duplicates that are kept.

    `documents` match the request. Near-duplicates of derived documents, and documents made from near-duplicates, are
    added until there are no more, as far as the request asks for them.
    """
    while True:
        found = find_descendants(run, documents, request.items())
        every = documents if request.keep_derived else documents | found.parents.keys()
        copies = frozenset(_cluster_mates(run, every) - every)
        if not request.with_copies or not copies:
            return every, found, copies
        documents = documents | copies


def earlier_takedowns(run: Store, request: TakedownRequest) -> list[str]:
    """Return the ids of the takedowns that removed the requested items.

    Empty if any of the items was not removed by a takedown.
    """
    earlier = _earlier(run, request.items())
    return sorted({*earlier.values()}) if len(earlier) == len(request.items()) else []


def _earlier(run: Store, items: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the id of the takedown that removed each item; items that no takedown removed are absent."""
    takedowns: dict[tuple[str, str], str] = {}
    for certificate in certificates_of(run):
        for item in requested_items(certificate, items):
            takedowns.setdefault(item, certificate.id)
    return takedowns


def check_none_removed(run: Store, documents: TableVersion) -> None:
    """Raise ContractError if a table `documents` of another run may have a document that was taken down from `run`.

    Documents are recognized by their doc_id, and by their address if a takedown was asked to remove their URL or
    domain, and by their parents. Near-duplicates in another run have none of these in common, so after a takedown of
    them no table is accepted.
    """
    removed = RemovedDocuments(run)
    if not removed.are_all_known:
        check_no_takedowns(run, "documents")
    for path in documents.manifest.paths.values():
        with documents.folder.open_input(path) as stream:
            columns = ("doc_id", "url", "domain", PARENTS.name)
            for batch in read_batches(pq.ParquetFile(stream), "documents", columns, ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    doc_id, parents = row["doc_id"] or b"", row[PARENTS.name]
                    certificate = removed.find(doc_id, row["url"] or "", row["domain"], parents)
                    if certificate is not None:
                        raise ContractError(
                            f"{documents.folder.uri}: expected a table without the documents that takedown "
                            f"{certificate.id} removed from {run.uri}, got doc_id {doc_id.hex()}. "
                            "Take it down there too, and use a new run folder with --out."
                        )


def requested_items(certificate: Certificate, items: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the items, as (kind, value), that a takedown was asked to remove, or whose document it removed.

    A certificate has only salted digests of them. A domain or URL must be written as in the request.
    """
    removed = {traces.document for traces in certificate.documents}
    found = []
    for kind, value in items:
        is_request = salted_digest(certificate.salt, kind, value.encode()) in certificate.requests
        if is_request or (
            kind in BY_ID and salted_digest(certificate.salt, "document", parse_id(kind, value)) in removed
        ):
            found.append((kind, value))
    return found


def _no_match(run: Store, item: tuple[str, str], earlier: str | None) -> str:
    """Return the message for an item that matches no document."""
    where = f"--{item[0]} {item[1]}: expected a document of {run.uri}"
    if earlier:
        return f"{where}, got one that takedown {earlier} removed. Omit this option."
    if _has_other_versions(run):
        return (
            f"{where}, got none in its current tables. Its folder has tables of other settings or inputs, which may "
            f"hold it: `penstock takedown {quote(run.uri)} --drop-old` deletes them. Or correct the spelling."
        )
    if item[0] == "domain":
        return f"{where}, got none. `penstock report` lists the domains of a run; correct the spelling."
    return f"{where}, got none. Look it up with `penstock show`, and correct the spelling."


def _has_other_versions(run: Store) -> bool:
    """Return True if the run folder has a complete version of a table with text or URLs that is not current."""
    current = read_run(run).tables
    return any(
        name.partition("/")[0] != current.get(table) and PLACE.fullmatch(f"{table}/{name}") is not None
        for table in ("documents", "clean", DATASET)
        for name in run.child(table).walk()
        if name.endswith(f"/{MANIFEST_NAME}")
    )


def parse_id(kind: str, text: str) -> bytes:
    """Return a doc_id from hex digits. Raises ConfigError if the text is not a doc_id."""
    try:
        identifier = bytes.fromhex(text)
    except ValueError:
        identifier = b""
    if len(identifier) != DOC_ID_BYTES:
        raise ConfigError(
            f"--{kind}: expected a document id of {2 * DOC_ID_BYTES} hex digits, got {text!r}. Copy the id from "
            "`penstock show`."
        )
    return identifier


class _Matchers:
    """Finds the documents that match each requested item, in batches with the columns doc_id, url and domain."""

    def __init__(self, items: Sequence[tuple[str, str]]):
        self.documents: dict[tuple[str, str], set[bytes]] = {item: set() for item in items}
        self.urls: dict[bytes, str] = {}
        """URL of each matching document."""
        self._ids = {item: parse_id(*item) for item in items if item[0] in BY_ID}
        self._hosts = {item: _hosts(*item) for item in items if item[0] not in BY_ID}
        self._forms = {item: canonical_url(item[1]) for item in items if item[0] == "url"}
        self._below = {without_www(hosts[0]) for hosts in self._hosts.values() if hosts}
        self._all_hosts = {host for hosts in self._hosts.values() for host in hosts}
        # A row's registrable domain is a suffix of its host, so this filter leaves few rows to compare in Python.
        self._any_id = pa.array(sorted({*self._ids.values()}), ID)
        self._any_url = pa.array(sorted({value for kind, value in items if kind == "url"}), pa.string())

    def match(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Add each document of a batch to `documents[item]` for each requested item that the document matches."""
        near = pc.is_in(batch.column("doc_id"), self._any_id)
        if self._hosts:
            near = pc.or_(near, pc.is_in(batch.column("domain"), self._owners(batch.column("domain"))))
            near = pc.or_(near, pc.is_null(batch.column("domain")))  # addresses without a scheme
            near = pc.or_(near, pc.is_in(batch.column("url"), self._any_url))
        if not pc.any(near).as_py():
            return
        for row in batch.filter(near).to_pylist():
            for item, documents in self.documents.items():
                if self._matches(item, row):
                    documents.add(row["doc_id"])
                    self.urls.setdefault(row["doc_id"], row["url"] or "")

    def _owners(self, domains: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Return those of the registrable domains that may have hosts of a requested domain or URL.

        These are the domains themselves and their parents, in any of their forms. Where no public suffix is known, each
        host is a registrable domain of its own, so names below a requested domain are returned too.
        """
        owners = []
        for name in pc.unique(domains).to_pylist():
            host = resolved_host(name) if name else ""
            if host in self._all_hosts or any(parent in self._below for parent in host_suffixes(f"http://{host}/")):
                owners.append(name)
        return pa.array(owners, pa.string())

    def _matches(self, item: tuple[str, str], row: dict[str, Any]) -> bool:
        url, domain = row["url"] or "", row["domain"]
        if item in self._ids:
            return bool(row["doc_id"] == self._ids[item])
        if item in self._forms:
            return url == item[1] or canonical_url(url) == self._forms[item]
        wanted, host = self._hosts[item][0], resolved_host(url)
        return (domain is not None and resolved_host(domain) == wanted) or (host != "" and is_host_of(host, wanted))


def _hosts(kind: str, value: str) -> list[str]:
    """Return the host of the URL or domain `value` as ASCII, followed by all parents of this host.

    Raises ConfigError if `value` is not a valid domain, or a URL without a character, which every document without an
    address would match.
    """
    if kind == "url" and not canonical_url(value):
        raise ConfigError(
            f"--url: expected a URL, got {value!r}. Give the address, or the id of the document by --doc."
        )
    host = resolved_host(value if kind == "url" else parse_domain(value))
    return host_suffixes(f"http://{host}/") if host else []


def _located(run: Store) -> Iterator[pa.RecordBatch | pa.Table]:
    """Yield (doc_id, url, domain) of every document of a run that no takedown removed; documents may occur twice."""
    if "clean" in read_run(run).tables and "clean" not in current_tables(run):  # made from other `documents`
        yield from batches_of(run, "clean", ["doc_id", "url", "domain"])
    if "documents" in read_run(run).tables:
        for batch in batches_of(run, "documents", ["doc_id", "url", "domain", "drop_stage"]):
            yield batch.filter(pc.not_equal(pc.fill_null(batch.column("drop_stage"), ""), STAGE))
    if "tokens" in read_run(run).tables:
        dataset = open_dataset(run)
        for path in dataset.by_url:
            with dataset.folder.open_input(path) as stream:
                rows = ArrowFile(stream, f"{dataset.folder.uri}/{path}").read_all()
                yield rows.select(["doc_id", "url", "domain"])


def batches_of(run: Store, table: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the given columns of a table in batches.

    The first column must contain document ids. It is cast to binary(16).
    """
    folder, manifest = open_table(run, table)
    for path in manifest.paths_of("part-"):
        with folder.open_input(path) as stream:
            for batch in read_batches(pq.ParquetFile(stream), table, columns, ROWS_AT_ONCE):
                yield batch.set_column(0, columns[0], batch.column(columns[0]).cast(ID))


def _cluster_mates(run: Store, documents: frozenset[bytes] | set[bytes]) -> set[bytes]:
    """Return the ids of all documents in the clusters of near-duplicates to which the given documents belong."""
    ids = pa.array(sorted(documents), ID)
    clusters: set[bytes] = set()
    for batch in _clustered(run):
        clusters.update(batch.filter(pc.is_in(batch.column("doc_id"), ids)).column("cluster").to_pylist())
    chosen = pa.array(sorted(clusters - {None}), ID)
    mates: set[bytes] = set()
    for batch in _clustered(run):
        mates.update(batch.filter(pc.is_in(batch.column("cluster").cast(ID), chosen)).column("doc_id").to_pylist())
    return mates


def _survivors(run: Store, documents: frozenset[bytes], copies: frozenset[bytes]) -> dict[bytes, bytes]:
    """Return document -> survivor, for those of `documents` that were dropped as exact copies of one of `copies`."""
    if not copies or "dedup" not in read_run(run).tables:
        return {}
    ids, kept, pairs = pa.array(sorted(documents), ID), pa.array(sorted(copies), ID), list[tuple[bytes, bytes]]()
    for batch in batches_of(run, "dedup", ["doc_id", "survivor", "drop_rule"]):
        is_copy = pc.fill_null(pc.equal(batch.column("drop_rule"), EXACT), False)
        is_copy = pc.and_(is_copy, pc.is_in(batch.column("survivor").cast(ID), kept))
        rows = batch.filter(pc.and_(pc.is_in(batch.column("doc_id"), ids), is_copy))
        pairs += zip(rows.column("doc_id").to_pylist(), rows.column("survivor").to_pylist(), strict=True)
    return dict(pairs)


def _clustered(run: Store) -> Iterator[pa.RecordBatch | pa.Table]:
    """Yield the columns `doc_id` and `cluster` of the run's documents in batches; nothing if no table has clusters."""
    tables = read_run(run).tables
    table = next((name for name in CLUSTERED if name in tables), None)
    if table is not None:
        yield from batches_of(run, table, ["doc_id", "cluster"])
    elif "tokens" in tables:
        dataset = open_dataset(run)
        for shard in (shard for shards in dataset.streams.values() for shard in shards):
            with dataset.folder.open_input(shard.docs_path) as stream:
                rows = ArrowFile(stream, f"{dataset.folder.uri}/{shard.docs_path}").read_all()
                yield rows.select(["doc_id", "cluster"])
