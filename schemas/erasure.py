"""The record of an erasure: the checkpoints that were deleted because they had read documents of a takedown.

It is a file of its own beside the certificate, `takedowns/<id>/erased-<digest>.json`. The certificate was sealed, and
its seal perhaps published, before the weights were replaced; another field would break the seal, so the record names
the seal.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from schemas.errors import reading
from schemas.ids import canonical_json, digest_of
from schemas.storage import Store
from schemas.takedown import TAKEDOWN_ID, TAKEDOWNS

ERASED = "erased-"
"""Beginning of the names of such records."""
SHA256 = r"^[0-9a-f]{64}$"


class _ErasureBlock(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ErasedFile(_ErasureBlock):
    """A file of weights that was deleted."""

    path: str
    """Path relative to the run."""
    size: int = Field(ge=0)
    """Size [bytes]."""
    sha256: str = Field(pattern=SHA256)
    """SHA-256 (hex)."""


class ErasedCheckpoint(_ErasureBlock):
    """A checkpoint that was deleted."""

    checkpoint: str
    """Its folder, relative to the run."""
    step: int | None
    """Number of optimizer steps; None = the files of an incomplete checkpoint."""
    dataset: str
    """Digest of the dataset that it was trained on; empty = unknown."""
    files: list[ErasedFile]
    """Its state files: weights and optimizer state."""


class Erasure(_ErasureBlock):
    """The checkpoints that an erasure has deleted, for one takedown."""

    takedown: str = Field(pattern=TAKEDOWN_ID)
    """Id of the takedown."""
    certificate: str
    """Seal of its certificate."""
    at: str
    """Time of the erasure, ISO 8601, UTC. The record is written just before the files are deleted."""
    checkpoints: list[ErasedCheckpoint]
    """Every checkpoint that was deleted."""
    seal: str = ""
    """Digest of all other fields."""

    @property
    def content_digest(self) -> str:
        """The digest of all fields except the seal."""
        return digest_of(self.model_dump(mode="json", exclude={"seal"}))


def write_erasure(run: Store, erasure: Erasure) -> str:
    """Write the record of an erasure with its seal; return its path relative to the run."""
    sealed = erasure.model_copy(update={"seal": erasure.content_digest})
    name = f"{TAKEDOWNS}/{erasure.takedown}/{ERASED}{sealed.seal[:12]}.json"
    run.write_atomic(name, canonical_json(sealed.model_dump(mode="json")))
    return name


def erasures_of(run: Store, identifier: str) -> Iterator[tuple[str, Erasure]]:
    """Yield path and content of each record of an erasure for a takedown. Raises ContractError if one is not valid."""
    folder = f"{TAKEDOWNS}/{identifier}"
    for file in sorted(run.child(folder).walk()):
        if file.startswith(ERASED) and file.endswith(".json"):
            value = run.read_json(f"{folder}/{file}")
            with reading(f"{run.uri}/{folder}/{file}", "the record of an erasure"):
                yield f"{folder}/{file}", Erasure.model_validate(value)
