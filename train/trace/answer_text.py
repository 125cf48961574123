"""The answers of a trace as text for people: tables first, then what is known of each document."""

from collections.abc import Iterator, Sequence
from typing import Any

from train.trace.answer import DocumentsAnswer, StepAnswer, TracedDocument
from train.trace.trace import Appearance, FoundDocument

# What a trace found as text for people.

LISTED = 40
"""Steps of a document that are listed before the rest is counted."""


def print_documents(appearances: Sequence[Appearance]) -> str:
    """A step's documents as a table of text."""
    rows = [("row", "tokens of row", "source", "document", "tokens of document", "cluster", "record", "url")]
    for seen in appearances:
        row_part, doc_part = span(seen.row_start, seen.row_stop), span(seen.doc_start, seen.doc_stop)
        place = (str(seen.row), row_part, seen.source, seen.doc_id[:12], doc_part, seen.cluster[:12])
        rows.append((*place, record_of(seen), seen.url or ""))
    return table(rows)


def print_steps(found: Sequence[FoundDocument], listed: int = LISTED) -> str:
    """Documents and the steps that saw them as text."""
    if not found:
        return "no document has this URL; URLs are stored with personal data replaced, compare with `penstock show`"
    blocks = []
    for document in found:
        head = f"{document.doc_id}  {document.stream}  {document.num_tokens} tokens  {record_of(document)}"
        blocks.append(replace_control_characters(f"{head}  {document.url or ''}".rstrip()))
        rows = [("step", "row", "sample", "epoch", "tokens of document", "tokens of row")]
        for seen in document.appearances[:listed]:
            place = (str(seen.step), str(seen.row), str(seen.sample), str(seen.epoch))
            rows.append((*place, span(seen.doc_start, seen.doc_stop), span(seen.row_start, seen.row_stop)))
        blocks.append(table(rows) if document.appearances else "  in no step of the plan")
        if rest := len(document.appearances) - listed:
            blocks += [f"  and {rest} parts more"] * (rest > 0)
    return "\n".join(blocks)


def record_of(document: Appearance | FoundDocument) -> str:
    """Where a document's record lies: file, offset and length [bytes]."""
    return f"{document.split}@{document.offset}+{document.length}"


def span(start: int, stop: int) -> str:
    """A half-open range."""
    return f"[{start}, {stop})"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Cells in columns, a line a row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(f"  {replace_control_characters(line)}".rstrip() for line in lines)


def replace_control_characters(text: str) -> str:
    """Text from the web without control characters, which a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def present_step(answer: StepAnswer) -> str:
    """A step's documents: the table of parts, then title, signals and text as far as they were asked for."""
    rows = answer.rows
    head = [f"step {answer.step}, rows {rows.start} to {rows.stop - 1} of the global batch, {len(answer.parts)} parts"]
    if not rows:
        head = [f"step {answer.step}: no row of the global batch, only padding to keep step with the other ranks"]
    if answer.layout is not None:
        head.append(f"by the layout of {answer.layout}")
    parts = [told.place for told in answer.parts if isinstance(told.place, Appearance)]
    blocks = ["; ".join(head)] + [print_documents(parts)] * bool(parts)
    known: set[str] = set()
    for told in answer.parts:
        # Several parts of a document share title and signals; each has its own text.
        blocks += _about(told, with_signals=told.place.doc_id not in known)
        known.add(told.place.doc_id)
    return "\n".join(blocks)


def present_documents(answer: DocumentsAnswer, nothing: str) -> str:
    """Documents and when they are seen; `nothing` is what to say if there are none."""
    if not answer.documents:
        return nothing
    blocks = []
    for told, seen in answer.documents:
        if isinstance(told.place, FoundDocument):
            blocks += [print_steps([told.place]), f"  {seen.describe()}"]
        blocks += _about(told, with_signals=True)
    if answer.num_documents > 1:
        rest = answer.num_documents - len(answer.documents)
        more = f", {rest} of them not listed" if rest else ""
        blocks.append(f"all {answer.num_documents} document(s){more}: {answer.seen.describe()}")
    return "\n".join(blocks)


def _about(told: TracedDocument, with_signals: bool) -> Iterator[str]:
    """What is known of a document beside its place, if anything."""
    place, detail = told.place, told.detail
    if with_signals and (detail.title or detail.signals):
        yield f"{place.doc_id[:12]}  {replace_control_characters(detail.title or 'no title')}"
        yield from _wrapped(f"{name} {_value(value)}" for name, value in detail.signals.items())
    if told.text is not None:
        part = f" [{place.doc_start}, {place.doc_stop})" if isinstance(place, Appearance) else ""
        yield f"{place.doc_id[:12]}{part} text:"
        yield from (f"  | {replace_control_characters(line)}" for line in told.text.splitlines())


def _wrapped(words: Iterator[str], width: int = 116) -> Iterator[str]:
    """Words with commas between them in lines of at most `width` characters."""
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
        return replace_control_characters(" ".join(f"{name} {_value(one)}" for name, one in value.items())) or "none"
    if isinstance(value, list | tuple):
        return " ".join(_value(one) for one in value) or "none"
    return replace_control_characters(str(value))
