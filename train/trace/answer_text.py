"""The answers of a trace as text: a table of spans or steps, then title, signals and text of each document."""

from collections.abc import Iterator, Sequence
from typing import Any

from train.trace.answer import DocumentsAnswer, StepAnswer, TracedDocument
from train.trace.trace import Appearance, FoundDocument

LISTED = 40
"""Maximum number of spans listed for a document; the rest is only counted."""


def print_documents(appearances: Sequence[Appearance]) -> str:
    """Return the documents of a step as a text table."""
    rows = [("row", "tokens of row", "source", "document", "tokens of document", "cluster", "record", "url")]
    for seen in appearances:
        row_part, doc_part = span(seen.row_start, seen.row_stop), span(seen.doc_start, seen.doc_stop)
        place = (str(seen.row), row_part, seen.source, seen.doc_id[:12], doc_part, seen.cluster[:12])
        rows.append((*place, record_of(seen), seen.url or ""))
    return table(rows)


def print_steps(documents: Sequence[FoundDocument], listed: int = LISTED) -> str:
    """Return documents and the steps that saw them as text."""
    if not documents:
        return "no document has this URL; URLs are stored with personal data replaced, compare with `penstock show`"
    blocks = []
    for document in documents:
        head = f"{document.doc_id}  {document.stream}  {document.num_tokens} tokens  {record_of(document)}"
        blocks.append(replace_control_characters(f"{head}  {document.url or ''}".rstrip()))
        rows = [("step", "row", "sample", "epoch", "tokens of document", "tokens of row")]
        for seen in document.appearances[:listed]:
            place = (str(seen.step), str(seen.row), str(seen.sample), str(seen.epoch))
            rows.append((*place, span(seen.doc_start, seen.doc_stop), span(seen.row_start, seen.row_stop)))
        blocks.append(table(rows) if document.appearances else "  in no step of the plan")
        if rest := len(document.appearances) - listed:
            blocks += [f"  and {rest} more spans"] * (rest > 0)
    return "\n".join(blocks)


def record_of(document: Appearance | FoundDocument) -> str:
    """Return the location of a document's record: file, offset and length [bytes]."""
    return f"{document.split}@{document.offset}+{document.length}"


def span(start: int, stop: int) -> str:
    """Return a half-open range as text."""
    return f"[{start}, {stop})"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return cells aligned in columns, one line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(f"  {replace_control_characters(line)}".rstrip() for line in lines)


def replace_control_characters(text: str) -> str:
    """Return text from the web without control characters, which a terminal would execute."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def present_step(answer: StepAnswer) -> str:
    """Return the documents of a step: the table of spans, then the requested title, signals and text."""
    rows = answer.rows
    head = [f"step {answer.step}, rows {rows.start} to {rows.stop - 1} of the global batch, {len(answer.parts)} spans"]
    if not rows:
        head = [f"step {answer.step}: no row of the global batch, only padding to match the other ranks"]
    if answer.layout is not None:
        head.append(f"layout of {answer.layout}")
    parts = [described.place for described in answer.parts if isinstance(described.place, Appearance)]
    blocks = ["; ".join(head)] + [print_documents(parts)] * bool(parts)
    known: set[str] = set()
    for described in answer.parts:
        # Several spans of a document share title and signals; each has its own text.
        blocks += _describe(described, with_signals=described.place.doc_id not in known)
        known.add(described.place.doc_id)
    return "\n".join(blocks)


def present_documents(answer: DocumentsAnswer, nothing: str) -> str:
    """Return documents and the steps that saw them as text; `nothing` is the text if there are none."""
    if not answer.documents:
        return nothing
    blocks = []
    for described, seen in answer.documents:
        if isinstance(described.place, FoundDocument):
            blocks += [print_steps([described.place]), f"  {seen.describe()}"]
        blocks += _describe(described, with_signals=True)
    if answer.num_documents > 1:
        rest = answer.num_documents - len(answer.documents)
        more = f", {rest} of them not listed" if rest else ""
        blocks.append(f"all {answer.num_documents} document(s){more}: {answer.seen.describe()}")
    return "\n".join(blocks)


def _describe(described: TracedDocument, with_signals: bool) -> Iterator[str]:
    """Yield title, signals and text of a document, as far as they are known."""
    place, detail = described.place, described.detail
    if with_signals and (detail.title or detail.signals):
        yield f"{place.doc_id[:12]}  {replace_control_characters(detail.title or 'no title')}"
        yield from _wrapped(f"{name} {_value(value)}" for name, value in detail.signals.items())
    if described.text is not None:
        part = f" [{place.doc_start}, {place.doc_stop})" if isinstance(place, Appearance) else ""
        yield f"{place.doc_id[:12]}{part} text:"
        yield from (f"  | {replace_control_characters(line)}" for line in described.text.splitlines())


def _wrapped(words: Iterator[str], width: int = 116) -> Iterator[str]:
    """Yield words separated by commas in lines of at most `width` characters."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 2 > width:
            yield f"    {line},"
            line = ""
        line += f", {word}" if line else word
    if line:
        yield f"    {line}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return replace_control_characters(" ".join(f"{name} {_value(item)}" for name, item in value.items())) or "none"
    if isinstance(value, list | tuple):
        return " ".join(_value(item) for item in value) or "none"
    return replace_control_characters(str(value))
