"""All sections of a training run together, as the recipe gives them and a plan keeps them."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from schemas.config import Recipe, Section, load_recipe
from train.config.checkpoint import CheckpointConfig, GuardConfig
from train.config.layout import LayoutConfig
from train.config.optim import OptimConfig
from train.config.plan import ClusterConfig, PlanConfig
from train.config.train import TrainConfig

SECTIONS: Mapping[str, type[Section]] = {
    "plan": PlanConfig,
    "cluster": ClusterConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "layout": LayoutConfig,
    "checkpoint": CheckpointConfig,
    "guard": GuardConfig,
}
"""The sections of a recipe that the training half reads, by name."""


FORMATS = (("train", "precision"), ("optim", "muon_precision"))
"""Content that is automatic until the device is known."""
AT_START = (("train", "fp8_scaling"),)
"""Content that is automatic until training starts: it goes by what is installed there."""
AUTO = "auto"


class Settings(BaseModel):
    """One value of each section."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    plan: PlanConfig = PlanConfig.model_validate({})
    """How the model is sized."""
    cluster: ClusterConfig = ClusterConfig.model_validate({})
    """Which devices it is planned for."""
    train: TrainConfig = TrainConfig.model_validate({})
    """What it learns from."""
    optim: OptimConfig = OptimConfig.model_validate({})
    """How it is updated."""
    layout: LayoutConfig = LayoutConfig.model_validate({})
    """How it is split over ranks."""
    checkpoint: CheckpointConfig = CheckpointConfig.model_validate({})
    """When its state is written."""
    guard: GuardConfig = GuardConfig.model_validate({})
    """What is done when a step goes wrong."""

    def content(self) -> dict[str, Any]:
        """Every setting that decides the weights, as `section.key`; `[plan]` shows in the model's shape."""
        sections = {name: getattr(self, name) for name in SECTIONS if name not in ("plan", "cluster")}
        found = {
            f"{name}.{key}": value for name, section in sections.items() for key, value in section.content().items()
        }
        if self.optim.optimizer != "muon":
            found["optim.muon_precision"] = "fp32"  # without a use, and the same on every device
        if self.train.precision != "fp8":
            del found["train.fp8_scaling"]
        return found

    def for_device(self, kind: str, capability: tuple[int, int] | None = None) -> "Settings":
        """The same with every automatic value chosen for a type of device ("cpu", "cuda"); what is set is kept.

        `capability`: of a CUDA device; None counts as a modern one. Settings without automatic values stay equal.
        """
        found = {
            "train": self.train.for_device(kind, capability),
            "optim": self.optim.for_device(kind),
            "layout": self.layout.for_device(kind),
        }
        return self.model_copy(
            update={name: section for name, section in found.items() if section != getattr(self, name)}
        )

    def formats_for(self, kind: str, capability: tuple[int, int] | None = None) -> "Settings":
        """The same with the number formats of `for_device`; what executes a run is left to choose."""
        return self._filled_in(self.for_device(kind, capability).content(), FORMATS)

    def with_formats_of(self, content: Mapping[str, Any]) -> "Settings":
        """The same with automatic number formats as `content` has them, such as that of a checkpoint."""
        return self._filled_in(content, (*FORMATS, *AT_START))

    def _filled_in(self, content: Mapping[str, Any], names: Sequence[tuple[str, str]]) -> "Settings":
        found: dict[str, Any] = {}
        for name, key in names:
            section, value = found.get(name, getattr(self, name)), content.get(f"{name}.{key}", AUTO)
            unused = name == "optim" and self.optim.optimizer != "muon"
            if getattr(section, key) == AUTO and value != AUTO and not unused:
                found[name] = section.model_copy(update={key: value})
        return self.model_copy(update=found)

    def to_json(self) -> dict[str, Any]:
        """What is set, by section, so that it can be loaded and overridden again."""
        return self.model_dump(mode="json", exclude_unset=True)


def settings_of(recipe: Recipe) -> Settings:
    """The training sections of a recipe."""
    return Settings.model_validate({name: recipe.section(name, kind) for name, kind in SECTIONS.items()})


def load_settings(raw: Mapping[str, Any], overrides: Sequence[str], where: str) -> Settings:
    """The training sections in `raw` with overrides on top. Raises ConfigError with every wrong name."""
    return settings_of(load_recipe({name: raw.get(name, {}) for name in SECTIONS}, overrides, SECTIONS, where))
