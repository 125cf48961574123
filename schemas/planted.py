"""Planted identifiers: which documents have one, and its text, as functions of a secret key and the document's id.

Controls are strings of the same function with other numbers, which no file ever held. For a model that never read a
planted identifier, it is one of many equal strings, so its rank among its controls is uniform.
Source: Wei, Wang and Jia 2024, arXiv 2402.10892, section 3.
"""

import hashlib
import hmac

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ContractError
from schemas.manifest import Content

PURPOSE = "plant"
"""Name of the stage and of its section, and the purpose in the commitment to its key."""
COMMITMENT, DOCUMENTS, LINES = "planted_key", "planted_documents", "planted_lines"
"""Figures of `clean`: the commitment to the key, and by source the documents with an identifier and their copies of
it."""
PLANTED = "planted"
"""Column of `clean` with the number of copies of the identifier that a document has."""
CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeio"
SYLLABLES_PER_WORD = 3
SYLLABLE_BITS = 6


def is_planted(key: bytes, doc_id: bytes, share: float) -> bool:
    """Return True if a document is in the share (0 to 1) of documents that get an identifier."""
    return int.from_bytes(_digest(key, "document", doc_id)[:8], "big") < share * 2**64


def planted_string(key: bytes, doc_id: bytes, number: int, length: int) -> str:
    """Return a string of `length` invented words: the identifier of a document for number 0, else a control.

    A word has three syllables of a consonant and a vowel, which every tokenizer can encode, with 18 random bits.
    """
    size = length * SYLLABLES_PER_WORD
    blocks = -(-size * SYLLABLE_BITS // 256)
    place = doc_id + number.to_bytes(4, "big")
    drawn = b"".join(_digest(key, "string", place + block.to_bytes(4, "big")) for block in range(blocks))
    bits = int.from_bytes(drawn, "big")
    syllables = [
        CONSONANTS[value & 15] + VOWELS[value >> 4] for value in (bits >> SYLLABLE_BITS * at & 63 for at in range(size))
    ]
    return " ".join("".join(syllables[at : at + SYLLABLES_PER_WORD]) for at in range(0, size, SYLLABLES_PER_WORD))


def _digest(key: bytes, purpose: str, value: bytes) -> bytes:
    return hmac.new(key, f"penstock planted {purpose}\0".encode() + value, hashlib.sha256).digest()


def sample_key(key: bytes, doc_id: bytes) -> bytes:
    """Return random bytes of a document; those with the smallest ones are tested where there are too many."""
    return _digest(key, "sample", doc_id)


class PlantedFacts(BaseModel):
    """What a manifest of `clean` states about its planted identifiers."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    share: float = Field(gt=0, le=1)
    """Share of the documents that the key chooses, 0..1."""
    repeats: int = Field(ge=1)
    """Copies of the identifier in each of them."""
    length: int = Field(ge=1, le=1000)
    """Length of an identifier [invented words]."""
    commitment: str = Field(pattern="^[0-9a-f]{64}$")
    """The commitment to the key."""
    documents: dict[str, int] = {}
    """Documents with an identifier, by source."""
    lines: dict[str, int] = {}
    """Copies of identifiers, by source."""

    @property
    def chars(self) -> int:
        """The number of characters of all copies."""
        return sum(self.lines.values()) * (self.length * (2 * SYLLABLES_PER_WORD + 1) - 1)


def planted_facts(clean: Content) -> PlantedFacts | None:
    """Return what the content of a table `clean` states about planted identifiers; None if nothing was planted.

    Raises ContractError if it is not valid.
    """
    if COMMITMENT not in clean.figures:
        return None
    figures = {"commitment": COMMITMENT, "documents": DOCUMENTS, "lines": LINES}
    stated = {name: clean.figures[figure] for name, figure in figures.items() if figure in clean.figures}
    try:
        return PlantedFacts.model_validate({**clean.config[PURPOSE], **stated})
    except (ValidationError, KeyError, TypeError) as error:
        raise ContractError(
            f"clean: expected settings and figures of planted identifiers in the manifest, got {type(error).__name__}. "
            "Restore the manifest from a backup."
        ) from error


def describe_planted(clean: Content) -> str:
    """Return sentences on the planted identifiers in a table `clean`, given its content; empty if there are none."""
    facts = planted_facts(clean)
    if facts is None:
        return ""
    return (
        f"{sum(facts.documents.values()):,} documents have a planted identifier: {sum(facts.lines.values()):,} lines "
        f"of invented words, which no source has, with {facts.chars:,} characters in all. The column `{PLANTED}` of "
        "`clean` marks the documents."
    )
