"""What training had seen of documents that are taken down: steps, checkpoints, and other runs on the same tables."""

from pydantic import BaseModel, ConfigDict


class _EffectsBlock(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Model(_EffectsBlock):
    """A checkpoint that was there when the documents were removed, those that a replay has set aside included."""

    checkpoint: str
    """Its folder, relative to the run."""
    step: int
    """Number of updates."""
    dataset: str
    """Digest of the dataset it was trained on."""
    saw: bool
    """Whether one of its steps held a removed document, or nobody can tell: its dataset had other positions."""


class OtherRun(_EffectsBlock):
    """A run below the run's folder that stands on tables of it, such as a proxy: it keeps what was removed."""

    run: str
    """Its folder, relative to the run."""
    tables: list[str]
    """The tables it stands on that a takedown replaces."""
    steps: list[int] = []
    """Every step of its plan whose batch held a part of a removed document, from 1."""
    models: list[Model] = []
    """Every checkpoint of it that stood."""


class Effects(_EffectsBlock):
    """What training had seen of the documents."""

    steps: list[int] = []
    """Every step of the plan whose batch held a part of one, from 1."""
    models: list[Model] = []
    """Every checkpoint that was there."""
    last_clean: int | None = None
    """Step of the last standing checkpoint before the first such step; None = none stands."""
    others: list[OtherRun] = []
    """What runs on the same tables had seen of them."""
