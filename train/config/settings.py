"""All sections of a training run together, as they are read from the recipe and stored in a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from schemas.config import Recipe, Section
from schemas.overrides import load_recipe
from train.config.layout import LayoutConfig
from train.config.optim import OptimConfig
from train.config.plan import ClusterConfig, PlanConfig
from train.config.train import CheckpointConfig, GuardConfig, TrainConfig

SECTIONS: Mapping[str, type[Section]] = {
    "plan": PlanConfig,
    "cluster": ClusterConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "layout": LayoutConfig,
    "checkpoint": CheckpointConfig,
    "guard": GuardConfig,
}
"""The sections of a recipe that training reads, by name."""


PRECISION_FIELDS = (("train", "precision"), ("optim", "muon_precision"))
"""Content fields that may be "auto" until the device is known."""
AUTO = "auto"


class Settings(BaseModel):
    """The settings of a training run, by section."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    plan: PlanConfig = PlanConfig.model_validate({})
    """The sizing of the model."""
    cluster: ClusterConfig = ClusterConfig.model_validate({})
    """The devices of the run."""
    train: TrainConfig = TrainConfig.model_validate({})
    """The training data, its order and stages."""
    optim: OptimConfig = OptimConfig.model_validate({})
    """The update of the weights."""
    layout: LayoutConfig = LayoutConfig.model_validate({})
    """The division of model and batch among ranks."""
    checkpoint: CheckpointConfig = CheckpointConfig.model_validate({})
    """The writing and keeping of checkpoints."""
    guard: GuardConfig = GuardConfig.model_validate({})
    """The checks on loss and gradient norm after a step."""

    def content(self) -> dict[str, Any]:
        """Return the value of every setting that affects the trained weights, by `section.key`.

        The settings of `[plan]` are left out, because they affect the weights only through the model's shape.
        """
        sections = {name: getattr(self, name) for name in SECTIONS if name not in ("plan", "cluster")}
        content = {
            f"{name}.{key}": value for name, section in sections.items() for key, value in section.content().items()
        }
        if not self.optim.uses("muon_precision"):
            content["optim.muon_precision"] = "fp32"  # unused, and so the same on every device
        # Without effect, or as in versions that did not have the setting.
        if not self.optim.uses("muon_coefficients") or self.optim.muon_coefficients == "jordan":
            del content["optim.muon_coefficients"]
        if not self.optim.uses("normuon_beta2"):
            del content["optim.normuon_beta2"]
        if self.train.precision != "fp8":
            del content["train.fp8_scaling"]
        for name in ("epochs", "freeze"):
            if not getattr(self.train, name):
                del content[f"train.{name}"]
        if self.train.chunks_together == 1:
            del content["train.pack_chunks"]  # checkpoints of earlier versions do not have it
        for name in ("train.dropout", "train.attention_dropout", "train.embedding_dropout"):
            if not content[name]:  # as in a plan of a version without dropout
                del content[name]
        if self.optim.ema is None:
            del content["optim.ema"]
        return content

    def for_device(self, kind: str, capability: tuple[int, int] | None = None) -> "Settings":
        """Return the settings for a device type ("cpu", "cuda"), with values for "auto" and for `layout.micro_batch`.

        `capability`: compute capability of a CUDA device; None is treated as 8.0.
        """
        sections = {
            "train": self.train.for_device(kind, capability),
            "optim": self.optim.for_device(kind),
            "layout": self.layout.for_device(kind),
        }
        return self.model_copy(
            update={name: section for name, section in sections.items() if section != getattr(self, name)}
        )

    def with_precisions_for(self, kind: str, capability: tuple[int, int] | None = None) -> "Settings":
        """Return the settings with precisions of "auto" replaced as in `for_device`, and no other setting changed."""
        return self._set_automatic(self.for_device(kind, capability).content())

    def with_precisions_of(self, content: Mapping[str, Any]) -> "Settings":
        """Return the settings with precisions of "auto" replaced by the values in `content`.

        `content`: settings by `section.key`, such as those of a checkpoint.
        """
        return self._set_automatic(content)

    def _set_automatic(self, content: Mapping[str, Any]) -> "Settings":
        changed: dict[str, Any] = {}
        for name, key in PRECISION_FIELDS:
            section, value = changed.get(name, getattr(self, name)), content.get(f"{name}.{key}", AUTO)
            unused = name == "optim" and not self.optim.uses(key)
            if getattr(section, key) == AUTO and value != AUTO and not unused:
                changed[name] = section.model_copy(update={key: value})
        return self.model_copy(update=changed)

    def with_pack_chunks(self, number: int) -> "Settings":
        """Return the settings with this value of `train.pack_chunks` if it is needed and not set."""
        train = self.train.with_pack_chunks(number)
        return self if train is self.train else self.model_copy(update={"train": train})

    def to_json(self) -> dict[str, Any]:
        """Return the explicitly set values by section, without defaults, so that they can be loaded again."""
        return self.model_dump(mode="json", exclude_unset=True)


def settings_of(recipe: Recipe) -> Settings:
    """Return the settings in the training sections of a recipe."""
    return Settings.model_validate({name: recipe.section(name, kind) for name, kind in SECTIONS.items()})


def load_settings(raw: Mapping[str, Any], overrides: Sequence[str], where: str) -> Settings:
    """Return the training sections in `raw` with overrides applied. Raises ConfigError that lists every wrong name."""
    return settings_of(load_recipe({name: raw.get(name, {}) for name in SECTIONS}, overrides, SECTIONS, where))
