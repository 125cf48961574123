"""The declaration of the audit: how large its samples are and which pairs count as copies."""

from pydantic import Field, model_validator

from pipeline.dedup.config import DedupConfig
from pipeline.engine.stage import Relation
from schemas.config import Recipe, Section

MIN_DOCUMENTS, MAX_DOCUMENTS = 100, 20_000


class AuditConfig(Section):
    """How much of a run is audited; everything is chosen by hashes, so the same documents at any partitioning."""

    documents: int = Field(2000, ge=0, le=MAX_DOCUMENTS)
    """Documents of each of the three samples (joined, uniform, anchored); 0: no audit, nor where `dedup.near` is off.
    All pairs of a sample are compared, so time grows with the square: 2,000 take seconds."""
    group: int = Field(50, ge=2)
    """Documents of one anchor that are compared with each other; of more, those with the lowest hashes."""
    min_jaccard: float | None = Field(None, gt=0, le=1)
    """Least true Jaccard similarity of a pair that should be joined; None: `dedup.min_similarity`."""
    seed: int = Field(0, ge=0)
    """Another seed draws other samples."""

    @model_validator(mode="after")
    def _is_of_use(self) -> "AuditConfig":
        others = sorted(self.model_fields_set - {"documents"})
        if not self.documents and others:
            raise ValueError(f"documents = 0 means no audit, so {', '.join(others)} would be ignored; leave them out")
        if 0 < self.documents < MIN_DOCUMENTS:
            raise ValueError(f"expected 0 (no audit) or at least {MIN_DOCUMENTS} documents, got {self.documents}")
        if self.group > self.documents > 0:
            raise ValueError(f"group must be at most documents, found {self.group} and {self.documents}")
        return self


AUDIT = Relation(name="audit", version=1, config=AuditConfig)


def is_enabled(recipe: Recipe) -> bool:
    """Whether the recipe asks for an audit and looks for near copies; exact copies need none."""
    return recipe.section("audit", AuditConfig).documents > 0 and recipe.section("dedup", DedupConfig).near
