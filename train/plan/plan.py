"""A plan as it stands: what the trainer needs besides the dataset, written and read."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer

from schemas.errors import ConfigError, ContractError
from schemas.manifest import read_run
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.config.plan import PlanConfig, check_mix_overrides
from train.config.settings import AUTO, Settings, load_settings
from train.data.order import SampleOrder, heldout_streams, make_order
from train.data.packing import open_packings
from train.data.stages import NO_SKIPS, SkipList, StagePlan, read_skip_list, row_length
from train.model.shape import ModelShape
from train.optim.schedule import ScheduleInputs, StageSchedule
from train.parallel.layout import axes_of, check_layout, data_ranks
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
    def course(self) -> ScheduleInputs:
        """What the learning rate of a step follows from, beside `[optim]`."""
        given = self.settings.train.stages
        stages = [
            StageSchedule(plan.first_step + 1, plan.num_steps, own.learning_rate, own.schedule, own.final_lr_share)
            for plan, own in zip(self.stages, given, strict=False)
        ]
        return ScheduleInputs(self.steps, self.warmup_steps, self.learning_rate, tuple(stages))


def write_plan(run: Store, plan: Plan) -> None:
    """Replace the run's plan."""
    run.write_atomic(PLAN_NAME, plan.model_dump_json(indent=1).encode())


def read_plan(run: Store, dataset: Dataset | None = None) -> Plan:
    """The run's plan. Raises ContractError if there is none, or if it is for another dataset (None: the run's own)."""
    if not run.exists(PLAN_NAME):
        raise ContractError(f"{run.uri}: expected a plan, got no {PLAN_NAME}. Make it with `penstock plan`.")
    try:
        plan = Plan.model_validate(run.read_json(PLAN_NAME))
    except ValidationError as error:
        raise ContractError(f"{run.uri}/{PLAN_NAME}: does not hold together: {error}; plan again") from error
    found = (dataset or open_dataset(run)).digest
    if plan.dataset != found:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected dataset {plan.dataset}, the run now holds {found}; "
            "plan again, restore the dataset or, behind a takedown, `penstock train RUN --replay-from clean`"
        )
    return plan


def read_settings(run: Store, dataset: Dataset, overrides: Sequence[str]) -> Settings:
    """The settings of the plan that stands, else of the run's recipe, with `section.key=value` overrides on top.

    Raises ConfigError with every wrong name, ContractError if the plan was made for another dataset.
    """
    raw = read_plan(run, dataset).settings.to_json() if run.exists(PLAN_NAME) else read_run(run).recipe
    check_mix_overrides(raw, overrides)
    free = PlanConfig.fields_of("execution")
    names = [text.partition("=")[0].strip().partition(".") for text in overrides]
    sized = [
        text
        for text, (section, _, key) in zip(overrides, names, strict=True)
        if section == "cluster" or (section == "plan" and key not in free)
    ]
    if sized:
        raise ConfigError(
            f"--set: expected settings of how to train, got {', '.join(sized)}, which size the model or choose its "
            "layout. Give them to `penstock plan`."
        )
    return load_settings(raw, overrides, run.uri)


def check_overrides(run: Store, overrides: Sequence[str]) -> None:
    """Raises ConfigError if overrides do not go on the settings of the plan that stands, whatever dataset it is for."""
    if run.exists(PLAN_NAME):
        settings = run.read_json(PLAN_NAME)["settings"]
        check_mix_overrides(settings, overrides)
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


# What stands in a run beside its plan and has a say in the order of its samples: the skip list, the packed rows.

SKIPS_OF_REWINDS = "skips.txt"
"""The skip list of a run that rewinds and names no other."""


def skip_name(settings: Settings) -> str:
    """The skip list of a run, relative to its train folder; empty = none."""
    return settings.train.skip_file or (SKIPS_OF_REWINDS if settings.guard.rewinds else "")


def standing_skips(run: Store, settings: Settings) -> SkipList:
    """The skip list of a run as it stands; a run that rewinds begins without one."""
    name = skip_name(settings)
    if name == SKIPS_OF_REWINDS and not run.exists(f"train/{name}"):
        return NO_SKIPS
    return read_skip_list(run, name)


def standing_order(run: Store, dataset: Dataset, plan: Plan) -> SampleOrder:
    """The order of a plan's samples, under the skip list and over the packed rows that stand."""
    train = plan.settings.train
    skip, packings = standing_skips(run, plan.settings), open_packings(run, dataset, train)
    return make_order(dataset, train, plan.stages, skip, packings)


# What is checked of a run before a rank starts: settings that nothing would use, and a layout for so many ranks.

MIN_BLOCKS_HEAD = 16
"""Least width of a head that a CUDA device's kernel takes with documents as blocks."""


def listeners(settings: Settings) -> list[str]:
    """The settings by which held-out losses have a say in the weights."""
    asked = {
        "optim.schedule = plateau": settings.optim.schedule == "plateau",
        f"guard.patience = {settings.guard.patience}": settings.guard.patience is not None,
    }
    return [name for name, given in asked.items() if given]


def check_used(settings: Settings, dataset: Dataset) -> None:
    """Raises ConfigError that names every setting which another section would leave without effect."""
    train, optim, problems = settings.train, settings.optim, []
    for name in listeners(settings):
        if not train.eval_every:
            problems.append(f"{name}: expected held-out losses, got train.eval_every = 0. Raise it, or leave it out.")
        elif not heldout_streams(dataset, train.seq_len):
            problems.append(f"{name}: expected held-out losses, got no held-out row of {train.seq_len} tokens")
    for name in ("initial_loss_scale", "loss_scale_steps"):
        if train.precision not in ("fp16", AUTO) and name in optim.model_fields_set:
            problems.append(f"optim.{name}: expected train.precision = fp16, got {train.precision}. Leave it out.")
    if problems:
        raise ConfigError("\n".join(problems))


def check_blocks(shape: ModelShape, settings: Settings, kind: str) -> None:
    """Raises ConfigError if documents would be masked in fp32 by a kernel of a CUDA device, which is for 16 bits."""
    layout, train = settings.layout, settings.train
    blocks = train.document_mask and shape.positions == "rope" and shape.head_dim >= MIN_BLOCKS_HEAD
    by_keys = layout.context > 1 and layout.context_by == "keys"
    if kind == "cuda" and train.precision == "fp32" and blocks and not by_keys:
        raise ConfigError(
            "train.precision: expected 16 bits for train.document_mask on a CUDA device, got fp32. Set "
            'train.precision = "bf16", or train.document_mask = false.'
        )


def check_ranks(plan: Plan, world_size: int) -> None:
    """Raises ConfigError if a plan cannot be trained by so many ranks."""
    settings = plan.settings
    # Held-out rows are as long as [train] says, whatever its stages say.
    measured = [row_length(settings.train)] if settings.train.eval_every else []
    for stage in plan.stages:
        lengths = [row_length(settings.train, stage.seq_len), *measured]
        check_layout(plan.shape, settings, world_size, lengths, stage.global_batch)
        groups = data_ranks(axes_of(settings.layout, world_size))
        if groups > stage.global_batch:
            raise ConfigError(
                f"train.global_batch: expected a sequence for each of {groups} groups of ranks, got "
                f"{stage.global_batch}. Raise it, or start fewer ranks."
            )
    if settings.layout.compress != "none" and world_size == 1:
        raise ConfigError(
            f"layout.compress = {settings.layout.compress}: expected gradients that travel between replicas, got one "
            "rank. Start more ranks."
        )
