"""The origin of a model that does not begin from random weights: a checkpoint of a run, or a folder of Hugging Face.

`train/plan.json` holds it, with the origin of the origin. Both halves read it: the trainer, and lineage and takedown.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from schemas.errors import ContractError
from schemas.paths import PLAN_NAME
from schemas.storage import Store

CHECKPOINT = "checkpoint"


class ModelOrigin(BaseModel):
    """Weights from which the training of a model began."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: str
    """Local folder of the run, or of Hugging Face, when the plan was made."""
    format: str
    """checkpoint: of a run; otherwise the model type of a folder of Hugging Face."""
    digest: str
    """SHA-256 of the checkpoint's metadata, which has the digests of its files; or digest of `files`."""
    files: dict[str, str] = {}
    """SHA-256 of each file of a folder of Hugging Face that was read; empty for a checkpoint."""
    vocab_size: int
    """Number of ids that have weights there; the rows of other ids are initialized."""
    step: int | None = None
    """Number of optimizer steps of the checkpoint."""
    dataset: str = ""
    """Digest of the dataset that the checkpoint was trained on; empty = unknown."""
    plan: str = ""
    """Digest of everything that decided the checkpoint's weights; empty = unknown."""
    origin: "ModelOrigin | None" = None
    """ModelOrigin of the checkpoint's own model; None = random weights, or unknown."""

    @field_validator("path")
    @classmethod
    def _is_local(cls, path: str) -> str:
        if "://" in path:  # a plan of others would send the credentials of this process there
            raise ValueError(f"expected a local folder, got {path}")
        return path

    @property
    def name(self) -> str:
        """A short text that names the weights."""
        if self.format == CHECKPOINT:
            return f"step {self.step:,} of {self.path} ({self.digest[:12]})"
        return f"{self.format} model {self.path} ({self.digest[:12]})"

    @property
    def line(self) -> Iterator["ModelOrigin"]:
        """This origin, the origin of its model, and so on to the first."""
        own: ModelOrigin | None = self
        while own is not None:
            yield own
            own = own.origin


def origin_of(run: Store) -> ModelOrigin | None:
    """Return the origin of a run's model by its plan; None if there is no plan, or if it begins from random weights.

    Raises ContractError if the plan holds an invalid one.
    """
    plan = run.read_json(PLAN_NAME) if run.exists(PLAN_NAME) else None
    stored = plan.get("origin") if isinstance(plan, dict) else None
    if stored is None:
        return None
    try:
        return ModelOrigin.model_validate(stored)
    except (ValidationError, RecursionError) as error:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected the origin of the weights, got an invalid one: {error}. Run "
            "`penstock plan` again."
        ) from error
