"""What a trace found as text for people."""

from collections.abc import Sequence

from train.trace.appearance import Appearance, FoundDocument

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
        blocks.append(shown(f"{head}  {document.url or ''}".rstrip()))
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
    return "\n".join(f"  {shown(line)}".rstrip() for line in lines)


def shown(text: str) -> str:
    """Text from the web without control characters, which a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
