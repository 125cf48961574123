"""Settings of the audit: the size of its samples, and the least similarity of a copy."""

from pydantic import Field, model_validator

from pipeline.dedup.config import DedupConfig
from pipeline.engine.stage import Relation
from schemas.config import Recipe, Section

MIN_DOCUMENTS, MAX_DOCUMENTS = 100, 20_000


class AuditConfig(Section):
    """The size of the audit; samples are chosen by hashes, so they are the same at any partitioning."""

    documents: int = Field(2000, ge=0, le=MAX_DOCUMENTS)
    """Documents in each of the three samples (joined, uniform, anchored); 0: no audit. There is none without
    `dedup.near` either. All pairs of a sample are compared, so time grows with the square: 2,000 take seconds."""
    group: int = Field(50, ge=2)
    """Most documents of one anchor that are compared with each other, those with the lowest hashes."""
    min_jaccard: float | None = Field(None, gt=0, le=1)
    """Least true Jaccard similarity of a pair that should be joined; None: `dedup.min_similarity`."""
    seed: int = Field(0, ge=0)
    """Seed of the hashes that choose the samples."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "AuditConfig":
        others = sorted(self.model_fields_set - {"documents"})
        if not self.documents and others:
            raise ValueError(
                f"documents: expected more than 0 with {', '.join(others)}, got 0, which means no audit. "
                f"Remove audit.{', audit.'.join(others)}."
            )
        if 0 < self.documents < MIN_DOCUMENTS:
            raise ValueError(
                f"documents: expected 0 (no audit) or at least {MIN_DOCUMENTS}, got {self.documents}. "
                f"Set audit.documents to at least {MIN_DOCUMENTS}."
            )
        if self.group > self.documents > 0:
            raise ValueError(
                f"group: expected at most documents = {self.documents}, got {self.group}. "
                f"Set audit.group to at most {self.documents}."
            )
        return self


AUDIT = Relation(name="audit", version=1, config=AuditConfig)


def is_enabled(recipe: Recipe) -> bool:
    """Return True if the recipe has an audit and joins near copies; exact copies need no audit."""
    return recipe.section("audit", AuditConfig).documents > 0 and recipe.section("dedup", DedupConfig).near
