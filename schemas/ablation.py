"""The result of an ablation: held-out losses of models trained with and without some filter rules.

`<run>/ablations/<name>/result.json` is one `Ablation`. A difference is always the loss without the rules minus the loss
with them. If it is above zero, the model that was trained with the rules is better.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.storage import Store

ABLATIONS = "ablations"
RESULT_NAME = "result.json"
FORMAT_VERSION: Literal[1] = 1
WITH, WITHOUT = "with", "without"
"""Names of the two sides, and of the held-out texts of their datasets."""


class _AblationBlock(BaseModel):
    """The base class of all parts of `result.json`: they are immutable and reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SourceLoss(_AblationBlock):
    """The loss of a model on the held-out text of one source."""

    nats: float
    """Sum of the cross-entropy over the targets [nats]."""
    targets: int
    """Number of predicted tokens."""
    bytes: float
    """Estimated size of the text that the targets encode [bytes].

    It is the number of targets times the bytes per token of the source's held-out documents.
    """
    right: int | None = None
    """Number of targets that have the largest logit; None = measured by a version that did not count them."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy [nats/token]."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float | None:
        """Cross-entropy per byte of text [bits/byte]; None = the size of the text is unknown."""
        return self.nats / (math.log(2) * self.bytes) if self.bytes else None

    @property
    def accuracy(self) -> float | None:
        """Share of the targets that have the largest logit, 0 to 1; None = not counted."""
        return None if self.right is None else self.right / self.targets


def sum_losses(parts: Iterable[SourceLoss]) -> SourceLoss:
    """Return the sum of the losses of several sources."""
    losses = list(parts)
    right = [loss.right for loss in losses if loss.right is not None]
    return SourceLoss(
        nats=math.fsum(loss.nats for loss in losses),
        targets=sum(loss.targets for loss in losses),
        bytes=math.fsum(loss.bytes for loss in losses),
        right=sum(right) if len(right) == len(losses) else None,
    )


class Measurement(_AblationBlock):
    """The losses of one checkpoint on the held-out samples of one dataset."""

    run: str
    """The run that the checkpoint belongs to, as the command line named it."""
    checkpoint: str
    """Folder of the checkpoint in the run."""
    trained_on: str
    """Digest of the dataset that the checkpoint was trained on."""
    on: str
    """Digest of the dataset whose held-out samples were read."""
    sources: dict[str, SourceLoss]
    """Loss by source; a source without a target is absent."""
    documents: int
    """Number of documents in these samples."""
    left_out: int
    """Number of these documents that are excluded, because a compared model was trained on them or on a copy."""
    left_out_targets: int
    """Number of tokens of the excluded documents in these samples."""


class AblationSide(_AblationBlock):
    """The dataset made with the rules, or the one made without them, and its size."""

    dataset: str
    """Digest of the dataset."""
    documents: int
    """Number of kept documents."""
    tokens: int
    """Number of training tokens."""


class VerdictChange(_AblationBlock):
    """The number of documents of one source that had one verdict with the rules and another without them."""

    source: str
    with_rules: str
    """Verdict with the rules: `kept`, or the `stage/rule` that dropped them."""
    without: str
    """Verdict without the rules, in the same form."""
    documents: int


class ProxySettings(_AblationBlock):
    """The settings that all proxy runs share."""

    params: int
    """Number of parameters."""
    tokens: int
    """Training tokens of each proxy run."""
    steps: int
    seq_len: int
    global_batch: int
    """Samples of an optimizer step."""
    learning_rate: float
    seeds: tuple[int, ...]
    """`train.seed` of each pair: it sets the initial weights and the order of samples."""
    epochs: dict[str, float]
    """Number of passes over the dataset, by side: `with` or `without` the rules."""


class DifferenceInterval(_AblationBlock):
    """The mean over seeds of (loss without the rules - loss with them), and its confidence interval."""

    mean: float
    half_width: float | None
    """Half the width of the Student-t interval; None = a single seed gives no interval."""

    @property
    def low(self) -> float | None:
        """Lower end of the interval; None = there is no interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval; None = there is no interval."""
        return None if self.half_width is None else self.mean + self.half_width


class Comparison(_AblationBlock):
    """The losses of the proxy runs with and without the rules on the held-out text of one source of one dataset."""

    on: str
    """Dataset of the held-out text: `with`, `without`, or the run of `--on`."""
    source: str
    """Name of the source; empty = all sources together."""
    losses: tuple[tuple[float, float], ...]
    """For each seed: (loss with the rules, loss without them) [nats/token]."""
    nats: DifferenceInterval
    """Difference of the losses [nats/token]."""
    bits: DifferenceInterval | None
    """Difference of the losses [bits/byte]; None = the size of the text is unknown."""
    answer: str
    """The verdict on the rules: worth it, not worth it, or the reason that neither can be concluded."""


class Ablation(_AblationBlock):
    """The effect of leaving rules out on the dataset, and on the models trained on it."""

    version: Literal[1] = FORMAT_VERSION
    """Version of the file format."""
    name: str
    """Name of the ablation's folder."""
    left_out: tuple[str, ...]
    """The rules that are left out, as `section.rule`."""
    settings: dict[str, tuple[Any, Any]]
    """Recipe settings that differ, each as (with the rules, without)."""
    with_rules: AblationSide
    without: AblationSide
    documents: tuple[VerdictChange, ...]
    """Documents whose verdict differs, by source and pair of verdicts."""
    tokens: dict[str, tuple[int, int]]
    """Number of tokens of each stream, as (with the rules, without)."""
    proxies: ProxySettings
    share: float
    """Confidence level of the intervals, such as 0.95."""
    comparisons: tuple[Comparison, ...]
    """For every held-out set: the comparison over all sources, followed by one for each source."""
    measurements: tuple[Measurement, ...]
    """The losses of every proxy run."""
    answer: str
    """The conclusion, in one to a few sentences."""
    seconds: dict[str, float]
    """Duration of `dataset`, `training` and `evaluation` [s]; 0 for a result that existed already."""


def read_ablation(folder: Store) -> Ablation:
    """Return the result in an ablation's folder. Raises ContractError if the file is not a valid result."""
    try:
        return Ablation.model_validate(folder.read_json(RESULT_NAME))
    except ValidationError as error:
        raise ContractError(
            f"{folder.uri}/{RESULT_NAME}: expected a valid result of an ablation, got an error: {error}. Delete the "
            "file, then run the same `penstock ablate` command again."
        ) from error
