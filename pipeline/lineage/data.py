"""The lineage of the data: from the files of a crawl, through every table and takedown, to datasets.

The manifest of a table names each input table twice: by digest in the block `content`, and by version folder in the
block `run`. The manifest in that folder must have that digest; otherwise the lineage has a break.
"""

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.lineage.graph import LineageBuilder, Node, NodeTable
from pipeline.tokens.streams import live_tokens
from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.manifest import FROM_INPUT, MANIFEST_NAME, MEMBER_INPUT, InputEntry, Manifest, read_manifest, read_run
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import Descent, certificate_name, descent_of, parent_name, read_parent, takedown_ancestry
from schemas.versions import DATASET

POSITIONS = {name: number for number, name in enumerate(TABLES)}


class TableTraversal:
    """Follows tables back to the tables and files that they were made from. Each table version is read once."""

    def __init__(self, run: Store, builder: LineageBuilder, verify: bool):
        self.run = run
        self.current = read_run(run).tables
        self.builder = builder
        self.verify = verify
        self.manifests: dict[str, Manifest] = {}
        self.nodes: dict[str, str] = {}
        """Key of the node of each table, by the folder of the table."""
        self._steps: dict[str, str] = {}
        self._source_runs = _source_runs(run, self.current)

    def visit(self, name: str, version: str, expected: str | None = None) -> str:
        """Add a table version, and all that the version was made from, to the lineage.

        Return the key of the version's node. Adds a break if the digest of the version is not `expected`.
        """
        version = self._path(name, version)
        folder = f"{name}/{version}"
        if folder not in self.nodes:
            self._read(name, version, expected)
        manifest = self.manifests.get(folder)
        if manifest is not None and expected is not None and manifest.digest != expected:
            self.builder.add_break(
                self.nodes[folder],
                f"{folder}: expected {expected[:12]}, got {manifest.digest[:12]}. Restore the altered manifest.",
            )
        return self.nodes[folder]

    def _path(self, name: str, version: str) -> str:
        """Return the path of a version relative to the folder of its table; the version may be in another run."""
        paths = (version, *(f"{source}/{name}/{version}" for source in self._source_runs))
        return next((path for path in paths if self.run.exists(f"{name}/{path}/{MANIFEST_NAME}")), version)

    def _read(self, name: str, version: str, expected: str | None) -> None:
        """Read a table version and add a node for it.

        A second table of a step is added to the node of the step's first table.
        """
        folder = f"{name}/{version}"
        try:
            manifest = read_manifest(self.run.child(folder))
        except ContractError as error:
            self.nodes[folder] = folder
            is_current = self._is_current(name, version)
            self.builder.add(Node(folder, "table", name, expected or "", {}, is_current=is_current))
            self.builder.add_break(folder, f"{folder}: {str(error).partition(': ')[2]}")
            return
        self.manifests[folder] = manifest
        sources, base = self._sources(manifest), posixpath.basename(version)
        descent = self._descent(folder, manifest)
        step = digest_of([manifest.content.stages, *([descent.id] if descent else [base, manifest.run.started])])
        held = NodeTable(name, folder, manifest)
        if name != DATASET and step in self._steps:  # a second table of a step, such as text with documents
            self._join(self._steps[step], held, sources)
        else:
            self._steps[step] = self.nodes[folder] = folder
            self.builder.add(self._node(held), *sources, *self._parents(held))
        if self.verify:
            self._verify(held)

    def _join(self, key: str, held: NodeTable, sources: Sequence[str]) -> None:
        """Add a table to the node that already holds another table of the same step."""
        first = self.builder.nodes[key]
        self.nodes[held.folder] = key
        # The node is named after the step's first table, whatever the order in which its tables are visited.
        tables = tuple(sorted((*first.tables, held), key=lambda table: POSITIONS[table.name]))
        self.builder.add(_node_of(key, tables, first.is_current), *sources)

    def _node(self, held: NodeTable) -> Node:
        name, version = held.folder.split("/", 1)
        node = _node_of(held.folder, (held,), self._is_current(name, version))
        return self._without_removed(node, held, self.run.child(held.folder).child("../.."))

    def _without_removed(self, node: Node, held: NodeTable, run: Store) -> Node:
        """Return the node of a dataset with the tokens that are left after takedowns; other nodes are unchanged.

        `run`: the run folder that has the dataset.
        """
        if held.name != DATASET:
            return node
        try:
            left = live_tokens(run, held.manifest)
        except ContractError:  # `_parents` adds a break for it
            return node
        return replace(node, counts={**node.counts, "tokens": sum(left.values())})

    def _is_current(self, name: str, version: str) -> bool:
        """Return True if a version of a table is the current one in its run."""
        source = posixpath.dirname(posixpath.dirname(version))
        if self.current.get(name) == version or not source:
            return self.current.get(name) == version
        return read_run(self.run.child(f"{name}/{source}")).tables.get(name) == posixpath.basename(version)

    def _sources(self, manifest: Manifest) -> list[str]:
        """Add the inputs of a table to the lineage; return the keys of their nodes."""
        content, lineage = manifest.content, manifest.run.lineage
        keys, files = [], []
        for entry in content.inputs:
            version = lineage.get(entry.name) or self.current.get(entry.name)
            if f"{FROM_INPUT}{entry.name}" in lineage or version is None:
                files.append(entry)
            elif entry.name.startswith(MEMBER_INPUT):
                keys.append(self.visit(DATASET, version, entry.sha256))
            elif "/" in entry.name:
                keys.append(self._outside(entry))
            else:
                keys.append(self.visit(entry.name, version, entry.sha256))
        return [*keys, *([self._inputs(files)] if files else [])]

    def _inputs(self, files: Sequence[InputEntry]) -> str:
        """Add one node for all input files of a crawl; return the key of the node."""
        digest = digest_of([entry.model_dump() for entry in files])
        counts = {"files": len(files), "bytes": sum(entry.bytes for entry in files)}
        return self.builder.add(
            Node(f"inputs/{digest[:12]}", "inputs", "files of the crawl", digest, counts, files=tuple(files))
        )

    def _outside(self, entry: InputEntry) -> str:
        """Add a node for an input that is a table of an earlier snapshot; return the key of the node."""
        key, counts = f"outside/{entry.sha256[:12]}", {"bytes": entry.bytes}
        title = f"{entry.name.rpartition('/')[2]} of an earlier snapshot"
        return self.builder.add(Node(key, "outside", title, entry.sha256, counts, notes=(entry.name,)))

    def _parents(self, held: NodeTable, source: str | None = None) -> list[str]:
        """Add to the lineage the takedown that made a version of the dataset, and the version before the takedown.

        `source`: the folder of the version's run, relative to this run; None = the folder that `held.folder` is in.
        Return [key of the takedown], or [] if no valid takedown made the version.
        """
        descent = self._descent(held.folder, held.manifest) if held.name == DATASET else None
        if descent is None:
            return []
        if source is None:
            source = posixpath.normpath(posixpath.join(posixpath.dirname(held.folder), ".."))  # "." = this run
        run = self.run if source == "." else self.run.child(source)
        names = parent_name(descent.id, DATASET), certificate_name(descent.id)
        before, certificate = (posixpath.normpath(posixpath.join(source, name)) for name in names)
        try:
            parent = read_parent(run, descent.id, DATASET)
            taken = takedown_ancestry(run, held.manifest)[0]
        except ContractError as error:
            self.builder.add_break(held.folder, str(error).removeprefix(f"{run.uri}/"))
            return []
        earlier = NodeTable(DATASET, before, parent)
        self.manifests[before], self.nodes[before] = parent, before
        node = self._without_removed(_node_of(before, (earlier,), False), earlier, run)
        self.builder.add(node, *self._parents(earlier, source))
        counts = {"documents removed": len(taken.documents), "tokens": taken.num_tokens}
        digest = self.run.sha256(certificate)
        node = Node(certificate, "takedown", "takedown", digest, counts, taken.made, taken.code_version, (taken.mode,))
        return [self.builder.add(node, before)]

    def _descent(self, folder: str, manifest: Manifest) -> Descent | None:
        """Return the manifest's record of a takedown; None if no takedown made the version.

        Adds a break to the lineage if the record is invalid.
        """
        try:
            return descent_of(manifest)
        except ContractError as error:
            self.builder.add_break(folder, f"{folder}: {str(error).partition(': ')[2]}")
            return None

    def _verify(self, held: NodeTable) -> None:
        """Add a break for every file of a table that is missing or whose digest differs from the manifest."""
        folder = self.run.child(held.folder)
        for entry in held.manifest.content.files:
            path = held.manifest.paths[entry.key]
            try:
                digest = folder.sha256(path) if folder.exists(path) else "no file"
            except ContractError:
                digest = "a folder, pipe or device"
            if digest != entry.sha256:
                self.builder.add_break(
                    self.nodes[held.folder],
                    f"{held.folder}/{path}: expected {entry.sha256[:12]}, got {digest[:12]}. Restore the file.",
                )


def _source_runs(run: Store, current: Mapping[str, str]) -> list[str]:
    """Return the paths of the other runs whose tables this run uses, directly or through another run.

    A path is relative to the folder of a table of this run, such as `../../RUN`.
    """
    sources, waiting = set[str](), [*current.items()]
    while waiting:
        table, path = waiting.pop()
        if table == DATASET:
            waiting += [
                (table, posixpath.normpath(f"{posixpath.dirname(path)}/{own}".lstrip("/")))
                for own in _members(run, path)
            ]
        source = posixpath.dirname(posixpath.dirname(path))
        if source and source not in sources:
            sources.add(source)
            tables = read_run(run.child(f"{table}/{source}")).tables
            waiting += [
                (name, posixpath.normpath(f"{source}/{name}/{own}")) for name, own in tables.items() if "/" in own
            ]
    return sorted(sources)


def _members(run: Store, version: str) -> list[str]:
    """Return the paths of the members of a dataset if it is a union, relative to the folder of its table."""
    folder = run.child(f"{DATASET}/{version}")
    lineage = read_manifest(folder).run.lineage if folder.exists(MANIFEST_NAME) else {}
    return [path for name, path in lineage.items() if name.startswith(MEMBER_INPUT)]


def _node_of(key: str, tables: tuple[NodeTable, ...], is_current: bool) -> Node:
    """Return the node of the tables that a step made."""
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
    """Return counts of the tables of a step: rows and kept rows of the first table, and bytes of all tables.

    `kept` is omitted if all rows are kept.
    """
    counts = tables[0].manifest.content.counts
    size = sum(entry.bytes for held in tables for entry in held.manifest.content.files)
    kept = {"kept": counts.rows_kept} if counts.rows_kept != counts.rows_in else {}
    return {"rows": counts.rows_in, **kept, "bytes": size}


def dataset_counts(manifest: Manifest) -> dict[str, int | float]:
    """Return the number of documents, tokens, shards and bytes of a dataset, including held-out streams."""
    streams: Mapping[str, Sequence[int]] = manifest.content.figures.get("streams", {})
    return {
        "documents": manifest.content.counts.rows_kept,
        "tokens": sum(sum(shards) for shards in streams.values()),
        "shards": sum(len(shards) for shards in streams.values()),
        "bytes": sum(entry.bytes for entry in manifest.content.files),
    }
