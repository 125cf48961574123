"""The graph of a lineage: what was made, from what, and every place where what was expected is not what is found."""

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
    """A table of a node: its name, its folder relative to the run, and what its manifest says."""

    name: str
    folder: str
    manifest: Manifest


@dataclass(frozen=True)
class Node:
    """Something that was made, or that came from outside."""

    key: str
    """Its place, such as `clean/v-0123456789ab`; unique."""
    kind: Kind
    title: str
    """What it is, in a few words."""
    digest: str
    """SHA-256 (hex) that it is known by."""
    counts: Mapping[str, int | float]
    """What it holds, by unit, in the order to be told."""
    at: str | None = None
    """When it was made, ISO 8601, UTC; None = not known."""
    code: str | None = None
    """Version of the code that made it; None = not known."""
    notes: tuple[str, ...] = ()
    """What else belongs to it, a clause each."""
    is_current: bool = True
    """Whether the run stands on it, and not on a later version."""
    tables: tuple[NodeTable, ...] = ()
    files: tuple[InputEntry, ...] = ()
    """Outside files that were read."""


@dataclass(frozen=True)
class Break:
    """A promise that does not hold, and the node it was found at."""

    key: str
    message: str


Link = tuple[str, str]
"""Keys of what was read and of what was made from it."""


@dataclass(frozen=True)
class Lineage:
    """Everything a run was made from and made; nodes stand after all they were made from."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    breaks: tuple[Break, ...] = ()

    def node(self, key: str) -> Node:
        """The node of a key."""
        return next(node for node in self.nodes if node.key == key)

    def sources(self, key: str) -> list[str]:
        """Keys of what a node was made from."""
        return [source for source, target in self.links if target == key]

    def to_json(self) -> dict[str, Any]:
        """The whole graph as a JSON value."""
        return {
            "format_version": FORMAT_VERSION,
            "nodes": [_json(node) for node in self.nodes],
            "links": [{"from": source, "to": target} for source, target in self.links],
            "breaks": [{"at": found.key, "says": found.message} for found in self.breaks],
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
    """A lineage while it is read."""

    nodes: dict[str, Node] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    def add(self, node: Node, *sources: str) -> str:
        """Add a node and the links to it; returns its key."""
        self.nodes[node.key] = node
        self.links += [(source, node.key) for source in dict.fromkeys(sources)]
        return node.key

    def broken(self, key: str, message: str) -> None:
        """Note a promise that does not hold."""
        self.breaks.append(Break(key, message))

    def done(self) -> Lineage:
        """The lineage, sorted."""
        links = tuple(dict.fromkeys(link for link in self.links if link[0] in self.nodes))
        return Lineage(tuple(_sorted(self.nodes, links)), links, tuple(self.breaks))


def _sorted(nodes: Mapping[str, Node], links: Sequence[Link]) -> list[Node]:
    """Nodes behind everything they were made from, else as they were added: what was made in a row stays together."""
    missing = dict.fromkeys(nodes, 0)
    following: dict[str, list[str]] = {}
    for source, target in links:
        missing[target] += 1
        following.setdefault(source, []).append(target)
    numbers, keys = {key: number for number, key in enumerate(nodes)}, list(nodes)
    ready = [numbers[key] for key in nodes if not missing[key]]
    found = []
    while ready:  # ascending numbers are a heap
        key = keys[heapq.heappop(ready)]
        found.append(nodes[key])
        for target in following.get(key, ()):
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, numbers[target])
    return found


def reduced_links(lineage: Lineage) -> list[Link]:
    """The links without those that a longer way says already: who made dedup from verdicts has read the documents."""
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
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        for target in following.get(waiting.pop(), ()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def fold_checkpoints(lineage: Lineage, fewest: int = 3) -> Lineage:
    """The lineage with `fewest` or more checkpoints in a row, between which nothing else happened, as one node."""
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
    """Whether a checkpoint stands between two others and no more is to be said of it than of the one before."""
    before = [lineage.node(key) for key in lineage.sources(node.key)]
    after = [lineage.node(target) for source, target in lineage.links if source == node.key]
    is_broken = any(found.key == node.key for found in lineage.breaks)
    between = [[one.kind for one in side] for side in (before, after)] == [["checkpoint"], ["checkpoint"]]
    return node.kind == "checkpoint" and between and node.notes == before[0].notes and not is_broken
