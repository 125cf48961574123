"""An ablation as both halves see it: what checkpoints lost on held-out text, and what a filter is worth by that.

`<run>/ablations/<name>/result.json` is one `Ablation`. A difference is always (without the rules) - (with them): above
zero, the model that was trained with the rules is the better one.
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
"""The two sides, and the held-out texts of their datasets."""


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SourceLoss(_Block):
    """What a model lost on the held-out text of one source."""

    nats: float
    """Sum of the cross-entropy of the targets."""
    targets: int
    """Tokens that were predicted."""
    bytes: float
    """Text that they stand for [bytes]: targets times bytes per token of the source's held-out documents."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy [nats/token]."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float | None:
        """Cross-entropy by text [bits/byte]; None = no text is known."""
        return self.nats / (math.log(2) * self.bytes) if self.bytes else None


def sum_losses(parts: Iterable[SourceLoss]) -> SourceLoss:
    """Several sources as one."""
    found = list(parts)
    return SourceLoss(
        nats=math.fsum(part.nats for part in found),
        targets=sum(part.targets for part in found),
        bytes=math.fsum(part.bytes for part in found),
    )


class Measurement(_Block):
    """One checkpoint on the held-out rows of one dataset."""

    run: str
    """The run whose checkpoint it is, as it was named."""
    checkpoint: str
    """Its folder in the run."""
    trained_on: str
    """Digest of the dataset it was trained on."""
    on: str
    """Digest of the dataset whose held-out rows were read."""
    sources: dict[str, SourceLoss]
    """By source; one without a target is absent."""
    documents: int
    """Documents in these rows."""
    left_out: int
    """Those among them that do not count, because a model that is compared was trained on them or on a copy."""
    left_out_targets: int
    """Their tokens in these rows."""


class AblationSide(_Block):
    """One of the two datasets."""

    dataset: str
    """Digest."""
    documents: int
    """Documents that are kept."""
    tokens: int
    """Tokens to train on."""


class VerdictChange(_Block):
    """Documents that met one fate with the rules and another without them."""

    source: str
    with_rules: str
    """`kept`, or `stage/rule` of what dropped them."""
    without: str
    """The same, without the rules."""
    documents: int


class ProxySettings(_Block):
    """What all proxies have in common."""

    params: int
    """Parameters."""
    tokens: int
    """Tokens that each was trained on."""
    steps: int
    seq_len: int
    global_batch: int
    """Sequences of a step."""
    learning_rate: float
    seeds: tuple[int, ...]
    """`train.seed` of each pair: weights at the start, and order."""
    epochs: dict[str, float]
    """Passes over the dataset, by side."""


class DifferenceInterval(_Block):
    """A mean difference over seeds, without - with."""

    mean: float
    half_width: float | None
    """Of the Student-t interval; None = one seed has none."""

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half_width is None else self.mean + self.half_width


class Comparison(_Block):
    """The two sides on the held-out text of one source of one dataset."""

    on: str
    """`with`, `without`, or the run that `--on` named."""
    source: str
    """Empty = over all."""
    losses: tuple[tuple[float, float], ...]
    """By seed, with the rules and without them [nats/token]."""
    nats: DifferenceInterval
    """Difference [nats/token]."""
    bits: DifferenceInterval | None
    """Difference [bits/byte]; None = no text is known."""
    answer: str
    """worth it, not worth it, or why it cannot be told."""


class Ablation(_Block):
    """What leaving rules out does to the dataset, and to models trained on it."""

    version: Literal[1] = FORMAT_VERSION
    """Version of this layout."""
    name: str
    """Name of its folder."""
    left_out: tuple[str, ...]
    """Rules, `section.rule`."""
    settings: dict[str, tuple[Any, Any]]
    """Settings of the recipe that differ: with the rules, and without."""
    with_rules: AblationSide
    without: AblationSide
    documents: tuple[VerdictChange, ...]
    """Every change of fate."""
    tokens: dict[str, tuple[int, int]]
    """Tokens of each stream with the rules, and without."""
    proxies: ProxySettings
    share: float
    """Of the intervals, such as 0.95."""
    comparisons: tuple[Comparison, ...]
    """Over all first, then by source, for every held-out set."""
    measurements: tuple[Measurement, ...]
    """What every proxy lost."""
    answer: str
    """In a sentence or a few."""
    seconds: dict[str, float]
    """What took how long: `dataset`, `training`, `evaluation`; what stood already took none."""


def read_ablation(folder: Store) -> Ablation:
    """The result in an ablation's folder. Raises ContractError if it is none."""
    try:
        return Ablation.model_validate(folder.read_json(RESULT_NAME))
    except ValidationError as error:
        raise ContractError(
            f"{folder.uri}/{RESULT_NAME}: does not hold together: {error}; remove it and ablate again"
        ) from error
