"""A plan as it stands: what the trainer needs besides the dataset, written and read."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer

from schemas.errors import ConfigError, ContractError
from schemas.manifest import read_run
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.config.mixed import check_kept
from train.config.plan import PlanConfig
from train.config.settings import Settings, load_settings
from train.data.stages import StagePlan
from train.model.shape import ModelShape
from train.optim.schedule import Course, StageCourse
from train.plan.rules import Figure

PLAN_NAME = "train/plan.json"


class LayoutOffer(BaseModel):
    """A layout for the devices of a plan, and what a step in it is predicted to take."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    layout: dict[str, Any]
    """What `[layout]` says for it."""
    step_seconds: float
    """Seconds of a step."""
    tokens_per_second: float
    """Tokens of all devices."""
    mfu: float
    """Share of the devices' peak."""
    memory: int
    """Bytes of the device that needs most."""


class Plan(BaseModel):
    """A sized run: everything the trainer needs besides the dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dataset: str
    """Digest of the dataset the plan was made for."""
    tokenizer: str
    """SHA-256 of the tokenizer's model file."""
    order: str
    """Digest of the order of the samples."""
    shape: ModelShape
    """Shape of the model."""
    num_params: int
    """Exact number of parameters of that shape."""
    stages: tuple[StagePlan, ...]
    """Ranges of steps, each with its sequence length, batch and mixture."""
    warmup_steps: int
    """Steps of linear warm-up."""
    learning_rate: float
    """Peak learning rate."""
    flops_per_token: int
    """FLOPs of forward and backward per token of the first stage."""
    settings: Settings
    """Settings the plan was made with."""
    advice: tuple[str, ...] = ()
    """What to do about the data, in sentences."""
    layouts: tuple[LayoutOffer, ...] = ()
    """The fastest layouts for the devices that were named; the settings have the first."""
    figures: list[Figure]
    """Every number above and those behind it, in the order they follow from each other."""

    @field_serializer("settings")
    def _given(self, settings: Settings) -> dict[str, Any]:
        """What was set and no defaults: a default that stands written would be refused where it is not used."""
        return settings.to_json()

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return self.stages[-1].end

    @property
    def seq_len(self) -> int:
        """Tokens per sequence in the first stage."""
        return self.stages[0].seq_len

    @property
    def global_batch(self) -> int:
        """Sequences per step in the first stage."""
        return self.stages[0].global_batch

    @property
    def num_tokens(self) -> int:
        """Tokens of the run."""
        return sum(stage.num_tokens for stage in self.stages)

    @property
    def course(self) -> Course:
        """What the learning rate of a step follows from, beside `[optim]`."""
        given = self.settings.train.stages
        stages = [
            StageCourse(plan.first_step + 1, plan.num_steps, own.learning_rate, own.schedule, own.final_lr_share)
            for plan, own in zip(self.stages, given, strict=False)
        ]
        return Course(self.steps, self.warmup_steps, self.learning_rate, tuple(stages))


def write_plan(run: Store, plan: Plan) -> None:
    """Replace the run's plan."""
    run.write_atomic(PLAN_NAME, plan.model_dump_json(indent=1).encode())


def read_plan(run: Store, dataset: Dataset | None = None) -> Plan:
    """The run's plan. Raises ContractError if there is none, or if it is for another dataset (None: the run's own)."""
    if not run.exists(PLAN_NAME):
        raise ContractError(f"{run.uri}: promised a plan, found no {PLAN_NAME}; make it with `penstock plan`")
    try:
        plan = Plan.model_validate(run.read_json(PLAN_NAME))
    except ValidationError as error:
        raise ContractError(f"{run.uri}/{PLAN_NAME}: does not hold together: {error}; plan again") from error
    found = (dataset or open_dataset(run)).digest
    if plan.dataset != found:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: promised dataset {plan.dataset}, the run now holds {found}; "
            "plan again, restore the dataset or, behind a takedown, `penstock train RUN --replay-from clean`"
        )
    return plan


def read_settings(run: Store, dataset: Dataset, overrides: Sequence[str]) -> Settings:
    """The settings of the plan that stands, else of the run's recipe, with `section.key=value` overrides on top.

    Raises ConfigError with every wrong name, ContractError if the plan was made for another dataset.
    """
    raw = read_plan(run, dataset).settings.to_json() if run.exists(PLAN_NAME) else read_run(run).recipe
    check_kept(raw, overrides)
    free = PlanConfig.fields_of("execution")
    names = [text.partition("=")[0].strip().partition(".") for text in overrides]
    sized = [
        text
        for text, (section, _, key) in zip(overrides, names, strict=True)
        if section == "cluster" or (section == "plan" and key not in free)
    ]
    if sized:
        raise ConfigError(
            f"--set: promised settings of how to train, found {', '.join(sized)}, which size the model or choose its "
            "layout; give them to `penstock plan`"
        )
    return load_settings(raw, overrides, run.uri)


def check_overrides(run: Store, overrides: Sequence[str]) -> None:
    """Raises ConfigError if overrides do not go on the settings of the plan that stands, whatever dataset it is for."""
    if run.exists(PLAN_NAME):
        settings = run.read_json(PLAN_NAME)["settings"]
        check_kept(settings, overrides)
        load_settings(settings, overrides, run.uri)


def standing_layouts(run: Store) -> tuple[LayoutOffer, ...]:
    """What the plan that stands, if one does, offers for its devices."""
    return read_plan(run).layouts if run.exists(PLAN_NAME) else ()


def kept_settings(run: Store) -> list[str]:
    """What the plan that stands has from earlier commands and not from the recipe, as `section.key = value`."""
    if not run.exists(PLAN_NAME):
        return []
    recipe, standing = read_run(run).recipe, read_plan(run).settings.to_json()
    return [
        f"{section}.{key} = {value}"
        for section, values in standing.items()
        for key, value in values.items()
        if recipe.get(section, {}).get(key) != value
    ]
