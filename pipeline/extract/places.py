"""Where the containers of a page are: the elements around them that give their text a shape."""

from typing import NamedTuple

from pipeline.extract.blocks import Blocks
from pipeline.extract.tags import CONTAINERS

_NUMBER = {name: number for number, name in enumerate(CONTAINERS)}
_HEADINGS = {_NUMBER[f"h{level}"]: level for level in range(1, 7)}
_GROUPS = frozenset(_NUMBER[name] for name in ("ul", "ol", "menu", "dir", "dl"))
CELLS = frozenset((_NUMBER["td"], _NUMBER["th"]))
PRE, ITEM, TABLE, ROW, QUOTE, ORDERED, FIGURE = (
    _NUMBER[name] for name in ("pre", "li", "table", "tr", "blockquote", "ol", "figure")
)
ROW_GROUPS = frozenset(_NUMBER[name] for name in ("thead", "tbody", "tfoot"))
MAX_INDENT = 10
"""Maximum number of nested lists, and of nested quotes, for which lines are indented or marked."""


class Place(NamedTuple):
    """Where a container is. Containers are numbers; None = it is in no such container."""

    heading: int = 0
    """Level of the heading around it; 0 = none."""
    quotes: int = 0
    """Number of quotes around it."""
    quote: int | None = None
    """The outermost of them."""
    item: int | None = None
    """The innermost list item around it."""
    first_items: tuple[int, ...] = ()
    """The items around that item, from the outermost on, fewer than MAX_INDENT."""
    outer: "Place | None" = None
    """The place of the container around that item. Thousands of items in deep lists share it."""
    group: int | None = None
    """Outermost list, definition list or table; the lines of one group have no empty lines between them."""
    table: int | None = None
    row: int | None = None
    cell: int | None = None
    is_code: bool = False


class Places(dict[int, Place]):
    """Maps a container to its place; computed on first access."""

    def __init__(self, blocks: Blocks):
        """Start with the body, which is container 0."""
        self.blocks = blocks
        self[0] = Place()

    def __missing__(self, container: int) -> Place:
        missing = []
        while container not in self:
            missing.append(container)
            container = int(self.blocks.parents[container])
        place = self[container]
        for inner in reversed(missing):
            place = self[inner] = _inside(place, inner, self.blocks.container(inner).element)
        return place


def _inside(place: Place, container: int, element: int) -> Place:
    """Return the place of a container with this element in the place of its parent."""
    if element in _HEADINGS:
        return place._replace(heading=_HEADINGS[element])
    if element == ITEM:
        group = container if place.group is None else place.group
        first_items = place.first_items
        if place.item is not None and len(first_items) < MAX_INDENT - 1:
            first_items = (*first_items, place.item)
        return place._replace(item=container, first_items=first_items, outer=place, group=group)
    if element in _GROUPS:
        return place if place.group is not None else place._replace(group=container)
    if element == TABLE:
        return Place(quotes=place.quotes, quote=place.quote, group=container, table=container)
    if element == ROW:
        return place._replace(row=container, cell=None)
    if element in CELLS:
        return place._replace(cell=container)
    if element == QUOTE:
        return place._replace(quotes=place.quotes + 1, quote=container if place.quote is None else place.quote)
    return place._replace(is_code=True) if element == PRE else place


def children_of(blocks: Blocks, container: int, elements: frozenset[int]) -> list[int]:
    """Return the containers directly in a container that have one of the elements, in their order."""
    children = []
    inner, end = container + 1, int(blocks.ends[container])
    while inner < end:
        if blocks.container(inner).element in elements:
            children.append(inner)
        inner = int(blocks.ends[inner])
    return children
