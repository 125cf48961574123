"""A part of a document in a row of a step, and a document with every such part."""

from dataclasses import dataclass
from typing import Any

from train.data.document_index import Row


@dataclass(frozen=True)
class Appearance:
    """A part of a document in one piece of one sequence of one step."""

    step: int
    """Step, from 1."""
    row: int
    """Row of the global batch, from 0."""
    piece: int
    """Piece of the row, from 0: contiguous in the stored stream."""
    sample: int
    """Global sample index, as a skip list counts."""
    source: str
    epoch: int
    """Pass over the source, from 0."""
    doc_id: str
    """Document, hex."""
    url: str
    """URL of the document, redacted."""
    split: str
    """Input file the document came from, such as a WARC file."""
    offset: int
    """Start of its record there [bytes]."""
    length: int
    """Length of its record there [bytes]."""
    doc_start: int
    """First token of the part, counted in the document."""
    doc_stop: int
    """Token after the part, counted in the document."""
    row_start: int
    """First token of the part, counted in the row. The token behind a piece is a target only: of its last input."""
    row_stop: int
    """Token after the part, counted in the row."""
    cluster: str = ""
    """Duplicate cluster, hex; empty if it is not known."""


@dataclass(frozen=True)
class Piece:
    """A piece of a row of a step, with the token behind it if that is a target."""

    step: int
    row: int
    piece: int
    sample: int
    source: str
    epoch: int
    column: int
    start: int
    stop: int

    def appearance(self, document: Row, begin: int) -> Appearance:
        """The part of a document, which begins at token `begin` of its stream, in this piece."""
        first, stop = max(begin, self.start), min(begin + document["num_tokens"], self.stop)
        return Appearance(
            step=self.step,
            row=self.row,
            piece=self.piece,
            sample=self.sample,
            source=self.source,
            epoch=self.epoch,
            doc_id=document["doc_id"].hex(),
            url=document["url"],
            split=document["split"],
            offset=document["offset"],
            length=document["length"],
            doc_start=first - begin,
            doc_stop=stop - begin,
            row_start=self.column + first - self.start,
            row_stop=self.column + stop - self.start,
            cluster=hex_of(document.get("cluster")),
        )


@dataclass(frozen=True)
class FoundDocument:
    """A document and every time a run saw it, up to the last step of its plan."""

    stream: str
    """`<source>/train` or `<source>/heldout`; what is held out is never trained on."""
    doc_id: str
    """Document, hex."""
    url: str
    """URL, redacted."""
    split: str
    """Input file it came from, such as a WARC file."""
    offset: int
    """Start of its record there [bytes]."""
    length: int
    """Length of its record there [bytes]."""
    num_tokens: int
    """Length [tokens], separators included."""
    appearances: list[Appearance]
    """Every time it was seen, by step and row."""
    cluster: str = ""
    """Duplicate cluster, hex; empty if it is not known."""


def hex_of(identifier: Any) -> str:
    """An id as hex; empty for None."""
    return "" if identifier is None else bytes(identifier).hex()
