"""The result of the check of a takedown certificate: problems, notes and counts, the verdict on shared spans, and text.

A remaining document may share passages with a removed one. How many spans they share decides if it is a copy.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.takedown import Certificate
from schemas.text import printable

SHOWN_LINES = 10
"""Maximum number of problems, and of copies, that the result of a check lists."""
NO_DOCUMENT = "no document"
COPY_SHARE = 0.9
"""A remaining document with at least this share of a removed document's spans counts as a copy of it. Documents below
it, such as pages with a passage in common, are noted; near-duplicates of an edited text can be among them."""


@dataclass
class CheckResult:
    """The problems, notes and counts from the check of a certificate against a run."""

    problems: list[str] = field(default_factory=list)
    """Messages about the differences between certificate and run; empty = the certificate is valid."""
    notes: list[str] = field(default_factory=list)
    """Remarks on conditions of the run that do not contradict the certificate."""
    absent: list[str] = field(default_factory=list)
    """Tables without any file in this copy of the run, which were not checked."""
    files: int = 0
    """Number of files that were read."""
    tokens: int = 0
    """Number of tokens that were scanned."""
    text_bytes: int = 0
    """Number of bytes of text that were scanned."""
    shared: dict[tuple[int, str, str], set[str]] = field(default_factory=dict)
    """Digests of the spans of a removed document that occur elsewhere.

    The key is the index of the removed document in the certificate, the place of the span (`TABLE.COLUMN` or
    `tokens/STREAM/SHARD`), and the id (hex) of the document there, or NO_DOCUMENT.
    """


def judge_shared_spans(certificate: Certificate, checked: CheckResult) -> None:
    """Add problems and notes about the spans of removed documents in `checked.shared`.

    Spans outside of all documents are a problem. A document with at least `COPY_SHARE` of the spans of a removed
    document is a copy. A copy is a problem unless the certificate states that copies were kept.
    """
    copies: dict[str, list[str]] = {}
    parts: dict[str, float] = {}
    for (owner, place, document), digests in sorted(checked.shared.items()):
        removed = certificate.documents[owner]
        total = len({digest for _, digest in (removed.text if "." in place else removed.tokens)})
        spans = f"{len(digests)} of {total} spans of removed document {removed.document[:12]}"
        if document == NO_DOCUMENT:
            checked.problems.append(
                f"{place}: expected no removed text, got {spans} outside of all documents. Run `penstock takedown` "
                "again."
            )
        elif len(digests) < COPY_SHARE * total:
            parts[document] = max(parts.get(document, 0.0), len(digests) / total)
        elif certificate.copies_left:
            copies.setdefault(document, []).append(f"{spans} in {place}")
        else:
            checked.problems.append(
                f"{place}: expected no copy of a removed document, got document {document} with {spans}. Take it "
                f"down with `penstock takedown RUN --doc {document}`."
            )
    if copies:
        checked.notes.append(
            f"{len(copies):,} document(s) of the run hold nearly all of a removed document. This is as certified: "
            f"{certificate.copies_left:,} near-duplicates were kept, because the request did not name them"
        )
        shown = [f"copy {document}: {places[0]}" for document, places in sorted(copies.items())[:SHOWN_LINES]]
        checked.notes += [
            *shown,
            *([f"{len(copies) - SHOWN_LINES:,} more copies"] if len(copies) > SHOWN_LINES else []),
        ]
    for document in copies:
        parts.pop(document, None)
    if parts:
        most = max(parts, key=lambda own: (parts[own], own))
        checked.notes.append(
            f"{len(parts):,} remaining document(s) share passages with a removed document, at most "
            f"{100 * parts[most]:.0f} % of its text (document {most})"
        )


def describe_check(certificate: Certificate, checked: CheckResult) -> Iterator[str]:
    """Yield the lines that `penstock takedown --check` prints about a certificate and the result of its check.

    A certificate of others may have any text in it, so every line is safe to print and stays one line.
    """
    return map(printable, _lines_of(certificate, checked))


def _lines_of(certificate: Certificate, checked: CheckResult) -> Iterator[str]:
    removed = f"{len(certificate.documents)} document(s), {certificate.num_tokens:,} tokens"
    yield f"takedown {certificate.id} of {certificate.made}: {removed}, {certificate.mode}"
    yield f"seal {certificate.seal}"
    if certificate.derived:
        yield f"{certificate.derived:,} of them were made from others that were removed or requested"
    yield (
        f"read {checked.files:,} files; scanned {checked.tokens:,} tokens and {checked.text_bytes:,} bytes of text for "
        f"{sum(len(traces.tokens) + len(traces.text) for traces in certificate.documents):,} spans"
    )
    yield from (f"note: {note}" for note in checked.notes)
    problems = Counter(checked.problems)
    for problem, number in [*problems.items()][:SHOWN_LINES]:
        yield f"FAILED: {problem}" + (f" ({number:,} times)" if number > 1 else "")
    if len(problems) > SHOWN_LINES:
        yield f"FAILED: {len(problems) - SHOWN_LINES:,} more problems of the {len(problems):,}"
    if checked.absent:
        yield f"absent, so not checked: {', '.join(checked.absent)}"
    valid = "the certificate is valid" + (" for the tables of this copy" if checked.absent else "")
    yield "the certificate is not valid" if checked.problems else valid
