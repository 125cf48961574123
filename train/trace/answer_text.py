"""The answers of a trace as text for people: tables first, then what is known of each document."""

from collections.abc import Iterator
from typing import Any

from train.trace.answer import DocumentsAnswer, StepAnswer, Told
from train.trace.appearance import Appearance, FoundDocument
from train.trace.show import print_documents, print_steps, shown


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


def _about(told: Told, with_signals: bool) -> Iterator[str]:
    """What is known of a document beside its place, if anything."""
    place, detail = told.place, told.detail
    if with_signals and (detail.title or detail.signals):
        yield f"{place.doc_id[:12]}  {shown(detail.title or 'no title')}"
        yield from _wrapped(f"{name} {_value(value)}" for name, value in detail.signals.items())
    if told.text is not None:
        part = f" [{place.doc_start}, {place.doc_stop})" if isinstance(place, Appearance) else ""
        yield f"{place.doc_id[:12]}{part} text:"
        yield from (f"  | {shown(line)}" for line in told.text.splitlines())


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
        return shown(" ".join(f"{name} {_value(one)}" for name, one in value.items())) or "none"
    if isinstance(value, list | tuple):
        return " ".join(_value(one) for one in value) or "none"
    return shown(str(value))
