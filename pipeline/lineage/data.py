"""The half of a lineage that data jobs wrote: from the files of a crawl over every table to datasets.

A table names its inputs twice: by digest, in its content, and by version folder, in how it was run. The manifest that
stands in the folder must have the digest; if it has another one, the chain is broken there.
"""

import posixpath
from collections.abc import Mapping, Sequence

from pipeline.lineage.graph import LineageBuilder, Node, NodeTable
from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.manifest import MANIFEST_NAME, InputEntry, Manifest, read_manifest, read_run
from schemas.storage import Store
from schemas.takedown import Descent, certificate_name, descent_of, parent_name, read_parent, takedown_ancestry
from schemas.versions import DATASET

FROM_INPUT = "input:"


class TableTraversal:
    """The walk from tables back to what they were made from; every version is visited once."""

    def __init__(self, run: Store, growing: LineageBuilder, verify: bool):
        self.run = run
        self.standing = read_run(run).tables
        self.growing = growing
        self.verify = verify
        self.manifests: dict[str, Manifest] = {}
        self.nodes: dict[str, str] = {}
        """Key of the node that a table's folder belongs to."""
        self._steps: dict[str, str] = {}
        self._homes = _homes(run, self.standing)

    def visit(self, name: str, version: str, expected: str | None = None) -> str:
        """The key of the node of a table version, read with everything behind it."""
        version = self._way(name, version)
        place = f"{name}/{version}"
        if place not in self.nodes:
            self._read(name, version, expected)
        found = self.manifests.get(place)
        if found is not None and expected is not None and found.digest != expected:
            self.growing.broken(
                self.nodes[place], f"{place}: expected {expected[:12]}, got {found.digest[:12]}. It was altered."
            )
        return self.nodes[place]

    def _way(self, name: str, version: str) -> str:
        """A version as it is reached from here: manifests name it as if it stood in this run, and it may in another."""
        ways = (version, *(f"{home}/{name}/{version}" for home in self._homes))
        return next((way for way in ways if self.run.exists(f"{name}/{way}/{MANIFEST_NAME}")), version)

    def _read(self, name: str, version: str, expected: str | None) -> None:
        place = f"{name}/{version}"
        try:
            manifest = read_manifest(self.run.child(place))
        except ContractError as error:
            self.nodes[place] = place
            self.growing.add(Node(place, "table", name, expected or "", {}, is_current=self._is_current(name, version)))
            self.growing.broken(place, f"{place}: {str(error).partition(': ')[2]}")
            return
        self.manifests[place] = manifest
        sources, folder = self._sources(manifest), posixpath.basename(version)
        descent = self._descent(place, manifest)
        step = digest_of([manifest.content.stages, *([descent.id] if descent else [folder, manifest.run.started])])
        held = NodeTable(name, place, manifest)
        if name != DATASET and step in self._steps:  # a second table of one step, such as text beside documents
            self._join(self._steps[step], held, sources)
        else:
            self._steps[step] = self.nodes[place] = place
            self.growing.add(self._node(held), *sources, *self._parents(held))
        if self.verify:
            self._verify(held)

    def _join(self, key: str, held: NodeTable, sources: Sequence[str]) -> None:
        first = self.growing.nodes[key]
        self.nodes[held.folder] = key
        # A step's first table has its name; which of its tables is met first follows from who reads it.
        tables = tuple(sorted((*first.tables, held), key=lambda table: _rank(table.manifest, table.name)))
        self.growing.add(_node_of(key, tables, first.is_current), *sources)

    def _node(self, held: NodeTable) -> Node:
        name, version = held.folder.split("/", 1)
        return _node_of(held.folder, (held,), self._is_current(name, version))

    def _is_current(self, name: str, version: str) -> bool:
        home = posixpath.dirname(posixpath.dirname(version))
        if self.standing.get(name) == version or not home:
            return self.standing.get(name) == version
        return read_run(self.run.child(f"{name}/{home}")).tables.get(name) == posixpath.basename(version)

    def _sources(self, manifest: Manifest) -> list[str]:
        """Keys of what a table was made from; each is visited."""
        content, lineage = manifest.content, manifest.run.lineage
        found, files = [], []
        for entry in content.inputs:
            version = lineage.get(entry.name) or self.standing.get(entry.name)
            if f"{FROM_INPUT}{entry.name}" in lineage or version is None:
                files.append(entry)
            elif "/" in entry.name:
                found.append(self._outside(entry))
            else:
                found.append(self.visit(entry.name, version, entry.sha256))
        return [*found, *([self._inputs(files)] if files else [])]

    def _inputs(self, files: Sequence[InputEntry]) -> str:
        digest = digest_of([entry.model_dump() for entry in files])
        counts = {"files": len(files), "bytes": sum(entry.bytes for entry in files)}
        return self.growing.add(
            Node(f"inputs/{digest[:12]}", "inputs", "files of the crawl", digest, counts, files=tuple(files))
        )

    def _outside(self, entry: InputEntry) -> str:
        key, counts = f"outside/{entry.sha256[:12]}", {"bytes": entry.bytes}
        title = f"{entry.name.rpartition('/')[2]} of an earlier snapshot"
        return self.growing.add(Node(key, "outside", title, entry.sha256, counts, notes=(entry.name,)))

    def _parents(self, held: NodeTable) -> list[str]:
        """The takedown that a dataset came out of, linked to the version before it."""
        descent = self._descent(held.folder, held.manifest) if held.name == DATASET else None
        if descent is None:
            return []
        home = posixpath.normpath(posixpath.join(posixpath.dirname(held.folder), ".."))  # "." = this run
        run = self.run if home == "." else self.run.child(home)
        names = parent_name(descent.id, DATASET), certificate_name(descent.id)
        before, certificate = (posixpath.normpath(posixpath.join(home, name)) for name in names)
        try:
            parent = read_parent(run, descent.id, DATASET)
            taken = takedown_ancestry(run, held.manifest)[0]
        except ContractError as error:
            self.growing.broken(held.folder, str(error).removeprefix(f"{run.uri}/"))
            return []
        earlier = NodeTable(DATASET, before, parent)
        self.manifests[before], self.nodes[before] = parent, before
        self.growing.add(_node_of(before, (earlier,), False), *self._parents(earlier))
        counts = {"documents removed": len(taken.documents), "tokens": taken.num_tokens}
        digest = self.run.sha256(certificate)
        node = Node(certificate, "takedown", "takedown", digest, counts, taken.made, taken.code_version, (taken.mode,))
        return [self.growing.add(node, before)]

    def _descent(self, place: str, manifest: Manifest) -> Descent | None:
        """Which takedown made a version; None also where its manifest does not say it as it should, a break."""
        try:
            return descent_of(manifest)
        except ContractError as error:
            self.growing.broken(place, f"{place}: {str(error).partition(': ')[2]}")
            return None

    def _verify(self, held: NodeTable) -> None:
        """Read every file of a table again."""
        folder = self.run.child(held.folder)
        for entry in held.manifest.content.files:
            path = held.manifest.run.paths[entry.key]
            found = folder.sha256(path) if folder.exists(path) else "no file"
            if found != entry.sha256:
                self.growing.broken(
                    self.nodes[held.folder],
                    f"{held.folder}/{path}: expected {entry.sha256[:12]}, got {found[:12]}. Restore the file.",
                )


def _homes(run: Store, standing: Mapping[str, str]) -> list[str]:
    """The way from a table's folder to every other run whose tables this one stands on, or one of those runs does."""
    found, waiting = set[str](), [*standing.items()]
    while waiting:
        table, way = waiting.pop()
        home = posixpath.dirname(posixpath.dirname(way))
        if home and home not in found:
            found.add(home)
            there = read_run(run.child(f"{table}/{home}")).tables
            waiting += [(name, posixpath.normpath(f"{home}/{name}/{own}")) for name, own in there.items() if "/" in own]
    return sorted(found)


def _rank(manifest: Manifest, name: str) -> tuple[bool, str]:
    """Tables of one step, the one with its books first."""
    return not manifest.content.counts.dropped, name


def _node_of(key: str, tables: tuple[NodeTable, ...], is_current: bool) -> Node:
    first = tables[0].manifest
    title = ", ".join(held.name for held in tables)
    is_dataset = tables[0].name == DATASET
    counts = dataset_counts(first) if is_dataset else table_counts(tables)
    return Node(
        key=key,
        kind="dataset" if is_dataset else "table",
        title="dataset" if is_dataset else title,
        digest=first.digest,
        counts=counts,
        at=first.run.started,
        code=first.run.code_version,
        is_current=is_current,
        tables=tables,
    )


def table_counts(tables: Sequence[NodeTable]) -> dict[str, int | float]:
    """Rows in and kept by the books of the first table, and the bytes of all."""
    counts = tables[0].manifest.content.counts
    size = sum(entry.bytes for held in tables for entry in held.manifest.content.files)
    kept = {"kept": counts.rows_kept} if counts.rows_kept != counts.rows_in else {}
    return {"rows": counts.rows_in, **kept, "bytes": size}


def dataset_counts(manifest: Manifest) -> dict[str, int | float]:
    """Documents, tokens of both splits and shards of a dataset."""
    streams: Mapping[str, Sequence[int]] = manifest.content.figures.get("streams", {})
    return {
        "documents": manifest.content.counts.rows_kept,
        "tokens": sum(sum(shards) for shards in streams.values()),
        "shards": sum(len(shards) for shards in streams.values()),
        "bytes": sum(entry.bytes for entry in manifest.content.files),
    }
