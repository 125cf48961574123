"""What the check of a certificate has found: what does not hold, what is as declared, and how that is told."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.takedown import Certificate

COPY_SHARE = 0.5
"""A document that stands and holds this share of a removed one's spans is a copy of it."""


@dataclass
class Checked:
    """What a check has found."""

    problems: list[str] = field(default_factory=list)
    """What the certificate promised and the run does not hold; empty = it holds."""
    notes: list[str] = field(default_factory=list)
    """What is as declared, and worth saying."""
    absent: list[str] = field(default_factory=list)
    """Tables of the certificate that a copy of the run has no file of."""
    files: int = 0
    """Files that were read whole."""
    tokens: int = 0
    """Tokens that were scanned."""
    text_bytes: int = 0
    """Bytes of text that were scanned."""
    shared: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    """Spans of a removed document (by number) that stand in another one (by name)."""


def judge_shared(certificate: Certificate, checked: Checked) -> None:
    """A span outside of every document, or half of the spans in another one, is the removed text; less is shared."""
    few = 0
    for (owner, where), digests in sorted(checked.shared.items()):
        removed = certificate.documents[owner]
        total = len({one for _, one in (removed.text if "." in where.partition(" ")[0] else removed.tokens)})
        said = f"{where}: holds {len(digests)} of {total} spans of removed document {removed.document[:12]}"
        if where.endswith("no document"):
            checked.problems.append(f"{said}, outside of every document that stands")
        elif len(digests) < COPY_SHARE * total:
            few += 1
        elif certificate.copies_left:
            checked.notes.append(f"{said}: one of the {certificate.copies_left} copies that were not asked for")
        else:
            checked.problems.append(f"{said}: a copy of it; take it down too (--near takes copies)")
    if few:
        checked.notes.append(f"{few} document(s) that stand share a passage with a removed one")


def describe_check(certificate: Certificate, checked: Checked) -> Iterator[str]:
    """What a check has found, as lines of text."""
    removed = f"{len(certificate.documents)} document(s), {certificate.num_tokens:,} tokens"
    yield f"takedown {certificate.id} of {certificate.made}: {removed}, {certificate.mode}"
    yield f"seal {certificate.seal}"
    yield (
        f"read {checked.files:,} files; scanned {checked.tokens:,} tokens and {checked.text_bytes:,} bytes of text for "
        f"{sum(len(one.tokens) + len(one.text) for one in certificate.documents):,} spans"
    )
    yield from (f"note: {note}" for note in checked.notes)
    yield from (f"FAILED: {problem}" for problem in checked.problems)
    if checked.absent:
        yield f"not here, so not looked at: {', '.join(checked.absent)}"
    holds = "the certificate holds" + (" for what is here" if checked.absent else "")
    yield "the certificate does not hold" if checked.problems else holds
