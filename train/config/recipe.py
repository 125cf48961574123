"""The recipes of `plan.recipe`: defaults of the model and the optimizer, for settings that a run does not set.

A plan resolves its recipe once and stores the values. A plan without a recipe is one of an earlier version, and keeps
that version's defaults.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from train.config.plan import PlanConfig
from train.config.settings import Settings

Defaults = Mapping[str, Mapping[str, Any]]
"""Values by section and setting."""

LLAMA: Defaults = {"plan": {"qk_norm": True}, "optim": {"z_loss": 1e-5}}
"""Defaults of both recipes besides those of the settings. Sources: Dehghani et al. 2023, arXiv 2302.05442, section 2
(normalized queries and keys); OLMo 2, arXiv 2501.00656, section 3.2 (the weight of z-loss)."""
MODERN: Defaults = {
    "plan": {
        "activation": "relu2",
        "value_embeddings": 2,
        "residual_mixing": True,
        "window_pattern": "SSSL",
        "logit_softcap": 15.0,
    },
    "optim": {"optimizer": "normuon"},
}
"""Defaults that the modern recipe has beyond those of both."""
WINDOW_SHARE = 4
"""With the modern recipe, a window is this part of `train.seq_len`, at least one token."""


def with_recipe(settings: Settings) -> Settings:
    """Return settings that were read from a recipe file, with `plan.recipe` set: llama, unless the file sets it.

    Settings of a stored plan must not be passed, because a plan without `plan.recipe` is one of an earlier version.
    """
    if settings.plan.recipe is not None:
        return settings
    plan = PlanConfig.model_validate(settings.plan.model_dump(exclude_unset=True) | {"recipe": "llama"})
    return settings.model_copy(update={"plan": plan})


def resolve_recipe(settings: Settings) -> Settings:
    """Return the settings with the values of `plan.recipe` for all settings that are not set."""
    changed = {}
    for name in ("plan", "optim"):
        section = getattr(settings, name)
        given = section.model_dump(exclude_unset=True)
        values = {key: value for key, value in _defaults(settings, name) if key not in given}
        if values:
            changed[name] = type(section).model_validate(given | values)
    return settings.model_copy(update=changed)


def _defaults(settings: Settings, section: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section in the recipe; those without effect under the other settings are left out."""
    if settings.plan.recipe is None:
        return
    for key, value in LLAMA[section].items():
        if key != "qk_norm" or settings.plan.norm == "rmsnorm":  # GPT-2 and BERT do not have it
            yield key, value
    if settings.plan.recipe != "modern":
        return
    for key, value in MODERN[section].items():
        if key == "window_pattern" and not _has_windows(settings):
            continue
        yield key, value
        if key == "window_pattern" and "window_pattern" not in settings.plan.model_fields_set:
            yield "window", max(1, settings.train.seq_len // WINDOW_SHARE)


def _has_windows(settings: Settings) -> bool:
    """Return True if attention can have windows: it is causal, and positions are rotary."""
    return settings.plan.positions == "rope" and settings.train.objective != "mlm"
