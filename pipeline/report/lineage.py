"""Layout of the lineage drawing: a row for each node, with dots on vertical tracks at the left.

A link is drawn along a track, a vertical line, until it reaches its target node; links to the same node share a track.
Links that a longer path implies are not drawn, so a run of any size needs two or three tracks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.lineage.graph import Lineage, Node, fold_checkpoints, reduced_links
from pipeline.lineage.training import read_lineage
from pipeline.report.facts import number
from schemas.storage import Store
from schemas.text import format_bytes, format_short

ROW, LINE, DOT = 66, 17, 15
"""Height of a row, height of a line of text, and distance of the dot from the top of the row [px]."""
TRACK, EDGE = 20, 12
"""Width of a track, and of the margin before the first [px]."""
NOTES = 2
"""Maximum number of notes and failed checks shown at a node; the node's tooltip has all of them."""
WIDTH = 680
"""Width of the longest line [px]."""


@dataclass(frozen=True)
class TextLine:
    """One line of the text beside a node: its vertical position [px], its text and its style."""

    y: int
    words: str
    style: str


@dataclass(frozen=True)
class DrawnNode:
    """A node of the drawing: the position of its dot [px], its style, and the text beside it."""

    x: int
    y: int
    style: str
    title: str
    hint: str
    """Text of the tooltip: the key, the whole digest, every note and every failed check."""
    digest: str
    texts: tuple[TextLine, ...]


@dataclass(frozen=True)
class Drawing:
    """The whole drawing of a lineage; lengths in [px]."""

    width: int
    height: int
    left: int
    """Horizontal position of the text."""
    summary: str
    paths: tuple[str, ...]
    """The SVG path of each link."""
    stops: tuple[DrawnNode, ...]
    breaks: tuple[str, ...]


def lineage_drawing(run: Store) -> Drawing:
    """Return the drawing of a run's lineage, in which a long series of checkpoints is one node."""
    return draw(fold_checkpoints(read_lineage(run)))


def draw(lineage: Lineage) -> Drawing:
    """Return the drawing of a lineage."""
    links = reduced_links(lineage)
    tracks, lanes = _tracks([node.key for node in lineage.nodes], links)
    broken = {
        node.key: [failure.message for failure in lineage.breaks if failure.key == node.key] for node in lineage.nodes
    }
    tops = _tops(lineage.nodes, broken)
    positions = {node.key: (EDGE + TRACK * tracks[node.key], tops[node.key] + DOT) for node in lineage.nodes}
    left = EDGE + TRACK * (max([*tracks.values(), *lanes.values()], default=0) + 1)
    paths = tuple(_path(positions[a], positions[b], EDGE + TRACK * lanes[a, b]) for a, b in links)
    stops = tuple(_stop(node, positions[node.key], broken[node.key]) for node in lineage.nodes)
    breaks = tuple(dict.fromkeys(failure.message for failure in lineage.breaks))
    height = max(tops.values(), default=0) + ROW + LINE * NOTES if lineage.nodes else 0
    kinds = ", ".join(node.title for node in lineage.nodes)
    summary = f"Lineage in {len(lineage.nodes)} steps: {kinds}" + (f"; {len(breaks)} checks failed" if breaks else "")
    return Drawing(WIDTH, height, left, summary, paths, stops, breaks)


def _tops(nodes: Sequence[Node], broken: dict[str, list[str]]) -> dict[str, int]:
    """Return the vertical position of the top of each node's row [px]; a row with notes is taller."""
    tops, y = {}, 0
    for node in nodes:
        tops[node.key] = y
        y += ROW + LINE * min(NOTES, len(node.notes) + len(broken[node.key]))
    return tops


def _tracks(keys: Sequence[str], links: Sequence[tuple[str, str]]) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Return the track of each node and the track of each link; a track is a vertical line of the drawing.

    Links to the same node share a track.
    """
    rows = {key: row for row, key in enumerate(keys)}
    ahead = dict.fromkeys(keys, 0)
    for source, target in sorted(links, key=lambda link: -rows[link[1]]):
        ahead[source] = max(ahead[source], ahead[target] + 1)
    open_to: dict[int, str] = {}
    tracks: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    for key in keys:
        arriving = [track for track, target in open_to.items() if target == key]
        tracks[key] = min(arriving, default=_free(open_to))
        for track in arriving:
            del open_to[track]
        targets = [target for source, target in links if source == key]
        # The target with the longest path continues on the track, so a table without descendants gets a side track.
        targets.sort(key=lambda target: (-ahead[target], rows[target]))
        for target in targets:
            shared = [track for track, goal in open_to.items() if goal == target]
            track = shared[0] if shared else tracks[key] if tracks[key] not in open_to else _free(open_to)
            open_to[track] = target
            lanes[key, target] = track
    return tracks, lanes


def _free(open_to: dict[int, str]) -> int:
    return next(track for track in range(len(open_to) + 1) if track not in open_to)


def _path(start: tuple[int, int], end: tuple[int, int], x: int) -> str:
    """Return the SVG path of a link from the dot `start`, along the vertical track at `x`, to the dot `end`."""
    (x0, y0), (x1, y1) = start, end
    bend = min(ROW // 2, (y1 - y0) // 2)
    path = f"M{x0} {y0}"
    if x != x0:
        path += f"C{x0} {y0 + bend} {x} {y0} {x} {y0 + bend}"
    if x != x1:
        path += f"V{y1 - bend}C{x} {y1} {x1} {y1 - bend} {x1} {y1}"
        return path
    return f"{path}V{y1}"


def _stop(node: Node, position: tuple[int, int], broken: Sequence[str]) -> DrawnNode:
    x, y = position
    counts = ", ".join(describe_count(unit, value) for unit, value in node.counts.items())
    when = (node.at or "")[:19].replace("T", " ")
    made = " · ".join(filter(None, [when and f"{when} UTC", node.code and f"code {node.code}"]))
    lines = [(counts, "counts"), (made, "made")] if counts else [(made, "made")]
    shown = [*((message, "bad") for message in broken), *((note, "made") for note in node.notes)]
    texts = [
        TextLine(y + 5 + LINE * n, words, style) for n, (words, style) in enumerate([*lines, *shown[:NOTES]], start=1)
    ]
    style = "broken" if broken else "former" if not node.is_current else STYLES.get(node.kind, "made")
    title = node.title + ("" if node.is_current else ", earlier version")
    hint = "; ".join([node.key, node.digest, *node.notes, *broken])
    return DrawnNode(x, y, style, title, hint, node.digest[:12], tuple(texts))


STYLES = dict.fromkeys(("inputs", "outside", "mix"), "outside") | dict.fromkeys(
    ("takedown", "rewind", "skips", "quarantine"), "event"
)
"""Style of the kinds of nodes that are not tables, plans or checkpoints."""


def describe_count(unit: str, value: int | float) -> str:
    """Return a count with its unit, such as `53 rows` or `1.2 GB`."""
    if unit == "bytes":
        return format_bytes(value)
    if isinstance(value, float):
        return f"{unit} {value:.4f}"
    return f"{number(value) if value < 10**7 else format_short(value)} {unit}"
