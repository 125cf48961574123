"""What a training run consumed of a token dataset: tokens by source, domain, language and month.

The trainer counts it and the data half describes it in papers, so both halves know this form. A document counts with
its tokens times the number of times that the steps of the newest checkpoint read them as inputs. Tokens include
separators. All numbers are exact. Domains are many, so their sums are on disk: see `SpilledSums`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.spilled_sums import SpilledSums

Key = tuple[str, str]
"""(source as the recipe names it, value); the value is empty where the document has none."""


@dataclass(frozen=True)
class CheckpointTraining:
    """How a checkpoint was trained, as its metadata states it."""

    shape: Mapping[str, Any]
    """The shape of the model, such as `num_layers`."""
    num_params: int
    """Exact number of parameters."""
    settings: Mapping[str, Any]
    """Every setting that decides the weights, such as `optim.learning_rate`."""
    hardware: Mapping[str, Any]
    """`device`, `ranks`, and `kernels`: the version of torch, and the instruction set or the name of the GPU."""
    heldout: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss in nats per token) of every evaluation, oldest first."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every state file, by name."""
    code_version: str = ""
    """Version of penstock that wrote the checkpoint."""


@dataclass
class Consumption:
    """Tokens that were read, by source and a property of the document."""

    step: int | None
    """Step of the newest checkpoint; None: no checkpoint, so each training document counts once."""
    dataset: str
    """Digest of the dataset."""
    order: str = ""
    """Digest of the order of the samples; empty without a checkpoint."""
    checkpoint: str = ""
    """SHA-256 of the metadata of the newest checkpoint; empty without one."""
    training: CheckpointTraining | None = None
    """How the checkpoint was trained; None without one."""
    domains: SpilledSums = field(default_factory=SpilledSums)
    """Tokens by source and registrable domain."""
    languages: Counter[Key] = field(default_factory=Counter)
    """Tokens by source and most probable language."""
    months: Counter[Key] = field(default_factory=Counter)
    """Tokens by source and month of capture, `YYYY-MM`."""
    documents: Counter[str] = field(default_factory=Counter)
    """Number of documents of which at least one token was read, by source."""
    removed: int = 0
    """Tokens of documents that a takedown has removed since; they are in no other number."""

    @property
    def sources(self) -> dict[str, int]:
        """Tokens by source, sorted by name."""
        return dict(sorted(sums(self.languages, 0).items()))

    @property
    def tokens(self) -> int:
        """All tokens that were read, of removed documents too."""
        return sum(self.languages.values()) + self.removed


def sums(counts: Counter[Key], place: int, sources: Iterable[str] | None = None) -> Counter[str]:
    """Return the sums by source (`place` 0) or by value (`place` 1), of some sources (None: all)."""
    chosen = None if sources is None else set(sources)
    total: Counter[str] = Counter()
    for key, number in counts.items():
        if chosen is None or key[0] in chosen:
            total[key[place]] += number
    return total
