"""What settings that a recipe fixes cost: the fastest layout found, beside that with each of them left free."""

import json
from collections.abc import Iterator, Sequence

from train.config.settings import Settings
from train.data.stages import StagePlan
from train.model.shape import ModelShape
from train.plan.search.devices import Cluster
from train.plan.search.search import search

SEARCHED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("train", ("precision",)),
    ("layout", ("compile",)),
    ("layout", ("micro_batch",)),
    ("layout", ("activation_checkpointing", "activation_budget")),
)
"""Sections, and settings of them that are freed together; the first names the sentence."""
WORTH_A_WORD = 0.01
"""Least share of a step that a sentence is written for."""


def costs_of_fixed(
    shape: ModelShape, settings: Settings, run: Sequence[StagePlan], cluster: Cluster, step_seconds: float
) -> Iterator[str]:
    """A sentence for each fixed setting that makes the step of `step_seconds` longer than it has to be."""
    for section, names in SEARCHED:
        freed = without(settings, section, names)
        if freed is None:
            continue
        best = search(shape, freed, run, cluster, top=1).best
        share = step_seconds / best[0].step_seconds - 1 if best else 0.0
        if share >= WORTH_A_WORD:
            value = json.dumps(getattr(getattr(settings, section), names[0]))
            yield (
                f"{section}.{names[0]} = {value} costs {100 * share:.0f} %: {step_seconds:.3g} s a step in place of "
                f"{best[0].step_seconds:.3g} s; leave it out."
            )


def without(settings: Settings, section: str, names: Sequence[str]) -> Settings | None:
    """The same with settings of a section left out; None = none of them is set, though it may equal its default."""
    found = getattr(settings, section)
    if not found.model_fields_set & set(names):
        return None
    left = type(found).model_validate(found.model_dump(exclude_unset=True, exclude=set(names)))
    return settings.model_copy(update={section: left})
