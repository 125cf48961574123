"""The graph of a lineage: nodes, links from sources to results, and breaks where a digest or file is not as expected.

In the order of nodes, every node comes after its sources. `reduced_links` and `fold_checkpoints` simplify the graph for
display.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from schemas.manifest import InputEntry, Manifest

Kind = Literal[
    "inputs",
    "outside",
    "table",
    "dataset",
    "takedown",
    "mix",
    "plan",
    "skips",
    "rewind",
    "quarantine",
    "checkpoint",
    "end",
]
FORMAT_VERSION = 1


@dataclass(frozen=True)
class NodeTable:
    """A table that a node represents: its name, its folder relative to the run, and its manifest."""

    name: str
    folder: str
    manifest: Manifest


@dataclass(frozen=True)
class Node:
    """Something that a run made, such as tables, a plan or a checkpoint, or an input that came from outside."""

    key: str
    """Path relative to the run, such as `clean/v-0123456789ab`; it is unique."""
    kind: Kind
    title: str
    """A title of a few words."""
    digest: str
    """SHA-256 (hex) that identifies the content of the node."""
    counts: Mapping[str, int | float]
    """Unit → count, such as documents, tokens or bytes, in the order of display."""
    at: str | None = None
    """Time at which the content was made, ISO 8601, UTC; None = unknown."""
    code: str | None = None
    """Version of the code that made the content; None = unknown."""
    notes: tuple[str, ...] = ()
    """Remarks to display, each without a full stop."""
    is_current: bool = True
    """True if this is the current version, False if a later version replaced it."""
    tables: tuple[NodeTable, ...] = ()
    """The tables of the node, if a step made it."""
    files: tuple[InputEntry, ...] = ()
    """The input files of the crawl, if the node represents them."""


@dataclass(frozen=True)
class Break:
    """An error message about an unexpected digest or file, with the key of the node at which it was found."""

    key: str
    message: str


Link = tuple[str, str]
"""Key of a source, and key of the node that was made from it."""


@dataclass(frozen=True)
class Lineage:
    """The graph of all inputs and results of a run; every node comes after the nodes that it was made from."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    breaks: tuple[Break, ...] = ()

    def node(self, key: str) -> Node:
        """Return the node with this key."""
        return next(node for node in self.nodes if node.key == key)

    def sources(self, key: str) -> list[str]:
        """Return the keys of the nodes from which the node with this key was made."""
        return [source for source, target in self.links if target == key]

    def to_json(self) -> dict[str, Any]:
        """Return the whole graph as a JSON value."""
        return {
            "format_version": FORMAT_VERSION,
            "nodes": [_json(node) for node in self.nodes],
            "links": [{"from": source, "to": target} for source, target in self.links],
            "breaks": [{"at": entry.key, "says": entry.message} for entry in self.breaks],
        }


def _json(node: Node) -> dict[str, Any]:
    tables = {held.name: held.manifest.digest for held in node.tables}
    models = {name: digest for held in node.tables for name, digest in held.manifest.content.models.items()}
    dropped = {name: count for held in node.tables for name, count in held.manifest.content.counts.dropped.items()}
    return {
        "key": node.key,
        "kind": node.kind,
        "title": node.title,
        "digest": node.digest,
        "counts": dict(node.counts),
        "at": node.at,
        "code_version": node.code,
        "notes": list(node.notes),
        "current": node.is_current,
        **({"tables": tables, "models": models, "dropped": dropped} if tables else {}),
        **({"files": [entry.model_dump() for entry in node.files]} if node.files else {}),
    }


@dataclass
class LineageBuilder:
    """A lineage under construction."""

    nodes: dict[str, Node] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    def add(self, node: Node, *sources: str) -> str:
        """Add a node, and a link from each of its sources, which are given by key; return the node's key."""
        self.nodes[node.key] = node
        self.links += [(source, node.key) for source in dict.fromkeys(sources)]
        return node.key

    def add_break(self, key: str, message: str) -> None:
        """Add a break, with its error message, at the node with this key."""
        self.breaks.append(Break(key, message))

    def done(self) -> Lineage:
        """Return the complete lineage, in which every node comes after its sources."""
        links = tuple(dict.fromkeys(link for link in self.links if link[0] in self.nodes))
        return Lineage(tuple(_sorted(self.nodes, links)), links, tuple(self.breaks))


def _sorted(nodes: Mapping[str, Node], links: Sequence[Link]) -> list[Node]:
    """Return the nodes in the order of addition, changed only so that each node comes after its sources."""
    missing = dict.fromkeys(nodes, 0)
    following: dict[str, list[str]] = {}
    for source, target in links:
        missing[target] += 1
        following.setdefault(source, []).append(target)
    numbers, keys = {key: number for number, key in enumerate(nodes)}, list(nodes)
    ready = [numbers[key] for key in nodes if not missing[key]]
    ordered = []
    while ready:  # ascending numbers are a heap
        key = keys[heapq.heappop(ready)]
        ordered.append(nodes[key])
        for target in following.get(key, ()):
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, numbers[target])
    return ordered


def reduced_links(lineage: Lineage) -> list[Link]:
    """Return the links without those that a longer path implies.

    For example, documents → dedup is omitted because of documents → verdicts → dedup.
    """
    following: dict[str, list[str]] = {}
    for source, target in lineage.links:
        following.setdefault(source, []).append(target)
    kept = []
    for source, targets in following.items():
        for target in targets:
            others = [other for other in targets if other != target]
            if target not in _reached(following, others):
                kept.append((source, target))
    return kept


def _reached(following: Mapping[str, Sequence[str]], start: Iterable[str]) -> set[str]:
    """Return the keys of all nodes to which a path leads from one of the nodes `start`."""
    reached: set[str] = set()
    waiting = list(start)
    while waiting:
        for target in following.get(waiting.pop(), ()):
            if target not in reached:
                reached.add(target)
                waiting.append(target)
    return reached


def fold_checkpoints(lineage: Lineage, fewest: int = 3) -> Lineage:
    """Return the lineage with each chain of at least `fewest` plain checkpoints (`_is_plain`) merged into one node."""
    plain = [node.key for node in lineage.nodes if _is_plain(lineage, node)]
    runs: list[list[str]] = []
    for key in plain:
        if runs and (runs[-1][-1], key) in lineage.links:
            runs[-1].append(key)
        else:
            runs.append([key])
    renamed: dict[str, str] = {}
    nodes = {node.key: node for node in lineage.nodes}
    for keys in (keys for keys in runs if len(keys) >= fewest):
        first, last = nodes[keys[0]], nodes[keys[-1]]
        steps = f"{int(first.counts['steps']):,} to {int(last.counts['steps']):,}"
        size = sum(nodes[key].counts["bytes"] for key in keys)
        title = f"{len(keys)} more checkpoints, of steps {steps}"
        nodes[keys[-1]] = replace(last, title=title, counts={"bytes": size})
        renamed |= dict.fromkeys(keys[:-1], keys[-1])
    links = [(renamed.get(a, a), renamed.get(b, b)) for a, b in lineage.links]
    shown = tuple(nodes[node.key] for node in lineage.nodes if node.key not in renamed)
    return Lineage(shown, tuple(dict.fromkeys(link for link in links if link[0] != link[1])), lineage.breaks)


def _is_plain(lineage: Lineage, node: Node) -> bool:
    """Return True for a checkpoint that may be merged with its neighbors.

    Its only source and its only result are checkpoints, it has no break, and it has the same notes as its source.
    """
    before = [lineage.node(key) for key in lineage.sources(node.key)]
    after = [lineage.node(target) for source, target in lineage.links if source == node.key]
    is_broken = any(entry.key == node.key for entry in lineage.breaks)
    between = [[near.kind for near in side] for side in (before, after)] == [["checkpoint"], ["checkpoint"]]
    return node.kind == "checkpoint" and between and node.notes == before[0].notes and not is_broken
