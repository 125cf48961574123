"""Which documents a takedown means: of a domain, of a URL, by id, or a document with all its near copies.

Every table that knows documents is asked: `documents` has those that were dropped too, and URLs as they were crawled;
the dataset has those that were kept, with URLs redacted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.errors import ConfigError
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from schemas.takedown import PENDING_NAME, STAGE, TAKEDOWNS, read_certificate, salted_digest
from schemas.tokens import open_dataset
from schemas.urls import canonical_url, host_suffixes

ID = pa.binary(DOC_ID_BYTES)
CLUSTERED = ("clusters", "dedup")
"""Tables that know near copies, whether they were kept or not."""
BY_ID = ("doc", "near")
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class TakedownRequest:
    """What was asked for."""

    domains: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    """Ids, hex."""
    near: tuple[str, ...] = ()
    """Ids, hex, of documents whose near copies are meant too."""

    def items(self) -> list[tuple[str, str]]:
        """(kind, value) of everything asked for."""
        kinds = {"domain": self.domains, "url": self.urls, "doc": self.documents, "near": self.near}
        return [(kind, value) for kind, values in kinds.items() for value in values]


@dataclass(frozen=True)
class Selection:
    """The documents that were found."""

    request: TakedownRequest
    documents: frozenset[bytes]
    copies_left: int
    """Near copies of them that were not asked for."""


def select_documents(run: Store, request: TakedownRequest) -> Selection:
    """The documents of a request. Raises ConfigError if something asked for is not a domain or an id, or not there."""
    if not request.items():
        raise ConfigError("takedown: expected --domain, --url, --doc or --near, got none of them")
    if not {"documents", "tokens"} & {*read_run(run).tables}:
        raise ConfigError(f"takedown: expected a run with documents or a dataset, got neither in {run.uri}")
    matchers = _Matchers(request.items())
    for batch in _located(run):
        matchers.look_at(batch)
    found = matchers.found
    for item in (item for item in found if item[0] == "near" and found[item]):
        mates = _cluster_mates(run, found[item])
        if not mates:
            raise ConfigError(
                f"--near {item[1]}: expected a document whose near copies are known, got no cluster of it in "
                f"{run.uri}. Run the recipe up to its clusters, or take it alone by --doc."
            )
        found[item] |= mates
    missing = [item for item in found if not found[item]]
    if missing:
        earlier = _earlier(run, missing)
        said = [_not_there(run, item, earlier.get(item)) for item in missing]
        raise ConfigError("takedown: " + "\n  ".join(said))
    documents = frozenset[bytes]().union(*found.values())
    return Selection(request, documents, len(_cluster_mates(run, documents) - documents))


def earlier_takedowns(run: Store, request: TakedownRequest) -> list[str]:
    """The takedowns that have removed everything asked for; empty if one thing was in none of them."""
    found = _earlier(run, request.items())
    return sorted({*found.values()}) if len(found) == len(request.items()) else []


def _earlier(run: Store, items: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The takedown that each item was in; absent = in none."""
    found: dict[tuple[str, str], str] = {}
    names = sorted(run.child(TAKEDOWNS).walk()) if run.exists(TAKEDOWNS) else []
    for name in names:
        if "/" in name or not name.endswith(".json") or f"{TAKEDOWNS}/{name}" == PENDING_NAME:
            continue
        certificate = read_certificate(run, name.removesuffix(".json"))
        gone = {removed.document for removed in certificate.documents}
        for kind, value in items:
            asked = salted_digest(certificate.salt, kind, value.encode()) in certificate.requests
            if asked or (kind in BY_ID and salted_digest(certificate.salt, "document", parse_id(kind, value)) in gone):
                found.setdefault((kind, value), certificate.id)
    return found


def _not_there(run: Store, item: tuple[str, str], earlier: str | None) -> str:
    hint = (
        f"it was taken down before, by {earlier}" if earlier else "`penstock show` and `penstock trace` find documents"
    )
    return f"--{item[0]} {item[1]}: expected a document of {run.uri}, got none. {hint}."


def parse_id(kind: str, text: str) -> bytes:
    """A doc_id given in hex. Raises ConfigError."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != DOC_ID_BYTES:
        raise ConfigError(f"--{kind}: expected a document id of {2 * DOC_ID_BYTES} hex digits, got {text!r}")
    return found


class _Matchers:
    """Finds the documents of every item in batches of (doc_id, url, domain)."""

    def __init__(self, items: Sequence[tuple[str, str]]):
        self.found: dict[tuple[str, str], set[bytes]] = {item: set() for item in items}
        self._ids = {item: parse_id(*item) for item in items if item[0] in BY_ID}
        self._hosts = {item: _hosts(*item) for item in items if item[0] not in BY_ID}
        self._forms = {item: canonical_url(item[1]) for item in items if item[0] == "url"}
        # The registrable domain is an ending of the host, so few rows are looked at one by one.
        self._any_id = pa.array(sorted({*self._ids.values()}), ID)
        self._any_host = pa.array(sorted({host for hosts in self._hosts.values() for host in hosts}), pa.string())
        self._any_url = pa.array(sorted({value for kind, value in items if kind == "url"}), pa.string())

    def look_at(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Enter the documents of a batch."""
        near = pc.is_in(batch.column("doc_id"), self._any_id)
        if self._hosts:
            near = pc.or_(near, pc.is_in(batch.column("domain"), self._any_host))
            near = pc.or_(near, pc.is_in(batch.column("url"), self._any_url))
        if not pc.any(near).as_py():
            return
        for row in batch.filter(near).to_pylist():
            for item, found in self.found.items():
                if self._means(item, row):
                    found.add(row["doc_id"])

    def _means(self, item: tuple[str, str], row: dict[str, Any]) -> bool:
        url, domain = row["url"] or "", row["domain"]
        if item in self._ids:
            return bool(row["doc_id"] == self._ids[item])
        if item in self._forms:
            return url == item[1] or canonical_url(url) == self._forms[item]
        host = self._hosts[item][0]
        return domain == host or host in host_suffixes(url)


def _hosts(kind: str, value: str) -> list[str]:
    """The host of a URL or a domain, and every parent of it. Raises ConfigError if it is no domain."""
    if kind == "url":
        return host_suffixes(value)
    plain = value.strip().strip(".").lower()
    hosts = host_suffixes(f"http://{plain}/")
    if not hosts or hosts[0] != plain:
        raise ConfigError(f"--domain: expected a domain such as example.com, got {value!r}")
    return hosts


def _located(run: Store) -> Iterator[pa.RecordBatch | pa.Table]:
    """(doc_id, url, domain) of every document of a run, some of them twice; what was removed before is left out."""
    if "documents" in read_run(run).tables:
        for batch in batches_of(run, "documents", ["doc_id", "url", "domain", "drop_stage"]):
            yield batch.filter(pc.not_equal(pc.fill_null(batch.column("drop_stage"), ""), STAGE))
    if "tokens" in read_run(run).tables:
        dataset = open_dataset(run)
        for path in dataset.by_url:
            with dataset.folder.open_input(path) as stream:
                yield pa.ipc.open_file(stream).read_all().select(["doc_id", "url", "domain"])


def batches_of(run: Store, table: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Columns of all parts of a table; ids have one type."""
    folder, manifest = open_table(run, table)
    for path in manifest.paths_of("part-"):
        with folder.open_input(path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS_AT_ONCE, columns=list(columns)):
                yield batch.set_column(0, columns[0], batch.column(columns[0]).cast(ID))


def _cluster_mates(run: Store, documents: frozenset[bytes] | set[bytes]) -> set[bytes]:
    """The documents of the clusters of some documents."""
    ids = pa.array(sorted(documents), ID)
    clusters: set[bytes] = set()
    for batch in _clustered(run):
        clusters.update(batch.filter(pc.is_in(batch.column("doc_id"), ids)).column("cluster").to_pylist())
    wanted = pa.array(sorted(clusters - {None}), ID)
    mates: set[bytes] = set()
    for batch in _clustered(run):
        mates.update(batch.filter(pc.is_in(batch.column("cluster").cast(ID), wanted)).column("doc_id").to_pylist())
    return mates


def _clustered(run: Store) -> Iterator[pa.RecordBatch | pa.Table]:
    """(doc_id, cluster) of every document whose cluster is known."""
    tables = read_run(run).tables
    table = next((name for name in CLUSTERED if name in tables), None)
    if table is not None:
        yield from batches_of(run, table, ["doc_id", "cluster"])
    elif "tokens" in tables:
        dataset = open_dataset(run)
        for shard in (shard for shards in dataset.streams.values() for shard in shards):
            with dataset.folder.open_input(shard.docs_path) as stream:
                yield pa.ipc.open_file(stream).read_all().select(["doc_id", "cluster"])
