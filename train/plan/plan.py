"""The plan as a model and as `plan.json`: everything that the trainer needs besides the dataset.

This file reads and writes the plan, opens the sample order that it determines, and checks before a rank starts that
every setting has an effect and that the layout works with the number of ranks.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.manifest import read_run
from schemas.mix import read_mix
from schemas.origin import ModelOrigin
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.config.optim import OPTIMIZERS
from train.config.plan import PlanConfig
from train.config.recipe import resolve_recipe, with_recipe
from train.config.settings import AUTO, Settings, load_settings
from train.data.order import SampleOrder, heldout_streams, make_order
from train.data.packing import open_packings
from train.data.stages import NO_SKIPS, SkipList, StagePlan, read_skip_list, row_length
from train.model.declared import check_code
from train.model.draw import BY_TENSOR
from train.model.shape import ModelShape, OwnShape, active_parameters, num_parameters
from train.optim.schedule import ScheduleInputs, StageSchedule
from train.parallel.layout import axes_of, axes_problem, data_ranks, layout_problems
from train.plan.rules import SourcedFigure

CHECKED_FIGURES = ("steps", "global_batch", "warmup_steps", "learning_rate")
"""Fields of a plan that must equal its figures of the same name."""


class LayoutOffer(BaseModel):
    """A layout for the devices of a plan, with its predicted step time and memory."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    layout: dict[str, Any]
    """Settings of `[layout]`."""
    step_seconds: float
    """Predicted seconds of an optimizer step."""
    tokens_per_second: float
    """Tokens per second over all devices."""
    mfu: float
    """Model FLOPs utilization, a share of the devices' peak."""
    memory: int
    """Peak memory of the device that needs the most [bytes]."""


class Plan(BaseModel):
    """The sizes and settings of a training run: everything that the trainer needs besides the dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dataset: str
    """Digest of the dataset that the plan was made for."""
    tokenizer: str
    """SHA-256 of the tokenizer's model file."""
    order: str
    """Digest of the order of the samples."""
    shape: OwnShape | ModelShape
    """Shape of the model."""
    num_params: int
    """Exact number of parameters of that shape."""
    stages: tuple[StagePlan, ...]
    """Training stages: ranges of steps, each with its sequence length, batch and mixture."""
    warmup_steps: int
    """Steps of linear warm-up."""
    learning_rate: float
    """Peak learning rate."""
    flops_per_token: int
    """FLOPs of forward and backward per token of the first stage."""
    settings: Settings
    """Settings that the plan was made with."""
    initial_weights: int = BY_TENSOR
    """Version of the rule that draws the initial weights, as in train/model/draw.py; 1 = a plan of an older version."""
    origin: ModelOrigin | None = None
    """Weights that training begins from; None = random weights."""
    advice: tuple[str, ...] = ()
    """Sentences of advice on data, proportions and settings."""
    layouts: tuple[LayoutOffer, ...] = ()
    """The fastest layouts for the devices of `[cluster]`, fastest first; `settings` contains the first."""
    figures: list[SourcedFigure]
    """Every number above and the figures from which it was computed, in order of computation."""
    digest: str | None = None
    """Digest of all fields above, as `plan_digest` returns it; None = an earlier version wrote the plan."""

    @field_serializer("settings")
    def _given(self, settings: Settings) -> dict[str, Any]:
        """Return only the settings that were set."""
        # A stored default would be rejected where it has no effect.
        return settings.to_json()

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.stages[-1].end

    @property
    def seq_len(self) -> int:
        """Tokens per sequence in the first stage."""
        return self.stages[0].seq_len

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step in the first stage."""
        return self.stages[0].global_batch

    @property
    def active_params(self) -> int:
        """Number of parameters that compute one token."""
        return active_parameters(self.shape)

    @property
    def num_tokens(self) -> int:
        """Training tokens of the whole run."""
        return sum(stage.num_tokens for stage in self.stages)

    @property
    def course(self) -> ScheduleInputs:
        """The inputs of the learning rate schedule, besides `[optim]`."""
        given = self.settings.train.stages
        stages = [
            StageSchedule(plan.first_step + 1, plan.num_steps, own.learning_rate, own.schedule, own.final_lr_share)
            for plan, own in zip(self.stages, given, strict=False)
        ]
        return ScheduleInputs(self.steps, self.warmup_steps, self.learning_rate, tuple(stages))


def write_plan(run: Store, plan: Plan) -> None:
    """Write the run's plan with its digest, replacing an earlier one."""
    plan = plan.model_copy(update={"digest": plan_digest(plan)})
    run.write_atomic(PLAN_NAME, plan.model_dump_json(indent=1).encode())


def plan_digest(plan: Plan) -> str:
    """Return the digest of a plan without its own field `digest`, by which a change of the file is found."""
    return digest_of(plan.model_dump(mode="json", exclude={"digest"}))


def read_plan(run: Store, dataset: Dataset | None = None) -> Plan:
    """Return the run's plan. Raises ContractError if there is none, or if it was not made for `dataset`.

    `dataset`: None = the dataset of the run.
    """
    plan = stored_plan(run)
    if plan is None:
        raise ContractError(f"{run.uri}: expected a plan, got no {PLAN_NAME}. Make it with `penstock plan`.")
    digest = (dataset or open_dataset(run)).digest
    if plan.dataset != digest:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected dataset {plan.dataset}, got {digest}. "
            "Run `penstock plan` again or, after a takedown, `penstock train RUN --replay-from clean`."
        )
    return plan


def stored_plan(run: Store) -> Plan | None:
    """Return the run's plan, whatever dataset it was made for; None if there is none.

    Raises ContractError if it is not valid.
    """
    if not run.exists(PLAN_NAME):
        return None
    try:
        return Plan.model_validate(run.read_json(PLAN_NAME))
    except ValidationError as error:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected a plan, got an invalid one: {error}. Run `penstock plan` again."
        ) from error


def read_settings(run: Store, dataset: Dataset, overrides: Sequence[str]) -> Settings:
    """Return the settings of the stored plan, or of the run's recipe if there is no plan.

    `overrides`: settings to change, as `section.key=value`. Raises ConfigError that lists every wrong name. Raises
    ContractError if the plan was made for a different dataset.
    """
    planned = run.exists(PLAN_NAME)
    # A plan without train.pack_chunks is of an earlier version, which packed each chunk for itself.
    raw = read_plan(run, dataset).settings.with_pack_chunks(1).to_json() if planned else read_run(run).recipe
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
            f"--set: expected settings that only affect training, got {', '.join(sized)}, which size the model or "
            "choose its layout. Give them to `penstock plan`."
        )
    settings = load_settings(raw, overrides, run.uri)
    return settings if planned else with_recipe(settings)


def check_overrides(run: Store, overrides: Sequence[str]) -> None:
    """Check that overrides can be applied to the stored plan. The dataset of the plan is not checked.

    Raises ConfigError if the overrides cannot be applied.
    """
    if run.exists(PLAN_NAME):
        stored = run.read_json(PLAN_NAME)
        settings = stored.get("settings") if isinstance(stored, dict) else None
        if not isinstance(settings, dict):
            raise ContractError(
                f"{run.uri}/{PLAN_NAME}: expected a plan, got one without settings. Run `penstock plan` again."
            )
        check_mix_overrides(settings, overrides)
        load_settings(settings, overrides, run.uri)


def verify_plan(run: Store, dataset: Dataset, plan: Plan) -> None:
    """Check that the stored plan is as it was written, that it matches the dataset, and its fields their figures.

    Raises ContractError for the first difference.
    """
    streams = make_order(
        dataset, plan.settings.train, plan.stages, NO_SKIPS, open_packings(run, dataset, plan.settings.train)
    )
    named = {figure.name: figure.value for figure in plan.figures}
    pairs = {
        "tokenizer": (dataset.tokenizer.sha256, plan.tokenizer),
        "order": (streams.digest, plan.order),
        "num_params": (num_parameters(plan.shape), plan.num_params),
        **{name: (named.get(name), getattr(plan, name)) for name in CHECKED_FIGURES},
    }
    for name, (expected, actual) in pairs.items():
        if expected != actual:
            raise ContractError(
                f"{run.uri}/{PLAN_NAME}: expected {name} = {expected}, got {actual}. Run `penstock plan` again."
            )
    # Of the file and not of `plan`, which also has the fields that were added since the file was written.
    own = digest_of({name: value for name, value in run.read_json(PLAN_NAME).items() if name != "digest"})
    if plan.digest not in (None, own):
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected the plan with digest {plan.digest}, got {own}, so it was edited. "
            "Change settings with `penstock plan RUN --set`, or restore the file."
        )


def planned_layouts(run: Store) -> tuple[LayoutOffer, ...]:
    """Return the fastest layouts for the devices of `[cluster]` from the stored plan; empty if there is no plan."""
    return read_plan(run).layouts if run.exists(PLAN_NAME) else ()


def settings_beyond_recipe(run: Store) -> list[str]:
    """Return settings of the stored plan that differ from the recipe, as `section.key = value`.

    Values that a device gives to automatic settings are left out.
    """
    if not run.exists(PLAN_NAME):
        return []
    recipe, stored = read_run(run).recipe, read_plan(run).settings
    given = resolve_recipe(with_recipe(load_settings(recipe, [], run.uri)))
    automatic = [given, *(given.for_device(kind) for kind in ("cpu", "cuda"))]
    return [
        f"{section}.{key} = {json.dumps(value)}"
        for section, values in stored.to_json().items()
        for key, value in values.items()
        if all(getattr(each, section).model_dump(mode="json").get(key) != value for each in automatic)
    ]


# Files of a run that, with its plan, determine the order of its samples: the skip list and the packed rows.

SKIPS_OF_REWINDS = "skips.txt"
"""Name of the skip list that rewinds write, if no setting names another one. It counts whether or not later starts of
the run rewind, because the samples in it are skipped in its checkpoints."""


def skip_name(settings: Settings) -> str:
    """Return the path of a run's skip list relative to its train folder."""
    return settings.train.skip_file or SKIPS_OF_REWINDS


def read_skips(run: Store, settings: Settings) -> SkipList:
    """Return the current skip list of a run; empty if no setting names one and rewinds have not written one."""
    name = skip_name(settings)
    if name == SKIPS_OF_REWINDS and not run.exists(f"train/{name}"):
        return NO_SKIPS
    return read_skip_list(run, name)


def open_order(run: Store, dataset: Dataset, plan: Plan) -> SampleOrder:
    """Return the order of a plan's samples with the run's current skip list and packed rows."""
    train = plan.settings.train
    skip, packings = read_skips(run, plan.settings), open_packings(run, dataset, train)
    return make_order(dataset, train, plan.stages, skip, packings)


# The mix of a plan: its shares as settings, its copy in the run, and a check for overrides that contradict it.

WEIGHTS, MIX = "train.weights", "train.mix"


def mix_overrides(path: str, dataset: Dataset, overrides: Sequence[str] = ()) -> list[str]:
    """Return the settings of a mix file as overrides `section.key=value`.

    The settings are the share of each source of the dataset, and the digest of the file. Raises ConfigError if the file
    is not a mix or is for other sources, or if `overrides` also set shares.
    """
    if conflicts := [text for text in overrides if _key(text) in (WEIGHTS, MIX)]:
        raise ConfigError(
            f"--mix {path}: expected shares from the mix only, got --set {' and '.join(conflicts)} too. "
            "Remove --mix, or remove these --set flags."
        )
    parts = read_mix(path).of(set(dataset.num_tokens()), f"mix {path}, for dataset {dataset.digest[:12]}")
    shares = ", ".join(f"{json.dumps(name)} = {part.share!r}" for name, part in sorted(parts.items()))
    return [f"{WEIGHTS}={{{shares}}}", f'{MIX}="{_digest(path)}"']


def copy_mix(run: Store, path: str) -> str:
    """Copy a mix file into the run folder; return the path of the copy relative to that folder.

    The copy's name contains the digest of the file, so a later plan with a different mix does not overwrite it.
    """
    name = mix_path(_digest(path))
    run.write_atomic(name, Path(path).read_bytes())
    return name


def mix_path(digest: str) -> str:
    """Return the path of the run's copy of the mix with this digest, relative to the run."""
    return f"train/mix-{digest[:12]}.toml"


def check_mix_overrides(settings: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Check that overrides do not change the shares of a plan with a mix; `settings`: settings of the plan.

    Raises ConfigError if an override changes the shares.
    """
    mix = settings.get("train", {}).get("mix")
    if mix and (conflicts := [text for text in overrides if _key(text) in (WEIGHTS, MIX)]):
        raise ConfigError(
            f"--set {' and '.join(conflicts)}: expected the shares of mix {mix[:12]} in the plan, got other "
            "shares. Remove these --set flags, or run `penstock plan` again without --mix or with another --mix file."
        )


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


# Checks before a rank starts: settings without effect, and whether the layout works with the number of ranks.

MIN_BLOCKS_HEAD = 16
"""Smallest head width that a CUDA kernel for block-masked documents supports."""


def heldout_loss_users(settings: Settings) -> list[str]:
    """Return the settings in use that let held-out losses influence the weights."""
    settings_in_use = {
        "optim.schedule = plateau": settings.optim.schedule == "plateau",
        f"guard.patience = {settings.guard.patience}": settings.guard.patience is not None,
    }
    return [name for name, is_set in settings_in_use.items() if is_set]


def check_settings_used(settings: Settings, dataset: Dataset | None) -> None:
    """Check that no setting is without effect because of another setting.

    `dataset`: None = not made yet, so that its held-out rows are not checked. Raises ConfigError that names every
    setting without effect.
    """
    train, optim, problems = settings.train, settings.optim, []
    for name in heldout_loss_users(settings):
        if not train.eval_every:
            problems.append(f"{name}: expected held-out losses, got train.eval_every = 0. Raise train.eval_every.")
        elif dataset is not None and not heldout_streams(dataset, train.seq_len):
            problems.append(
                f"{name}: expected held-out losses, got no held-out row of {train.seq_len} tokens. Remove this setting."
            )
    for name in ("initial_loss_scale", "loss_scale_steps"):
        if train.precision not in ("fp16", AUTO) and name in optim.model_fields_set:
            problems.append(f"optim.{name}: expected train.precision = fp16, got {train.precision}. Remove {name}.")
    for name in ("offload_dir", "offload_weights_dir"):
        if getattr(settings.layout, name) and settings.checkpoint.mode == "async":
            problems.append(
                f"layout.{name}: expected checkpoint.mode = sync, got async, which copies the tensors to the host's "
                f'memory for each save. Set checkpoint.mode = "sync", or remove layout.{name}.'
            )
    if settings.layout.offload != "none" and optim.ema is not None:
        problems.append(
            f"layout.offload: expected none with optim.ema, whose averages are on the device, got "
            f"{settings.layout.offload}. Remove layout.offload or optim.ema."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    check_parametrization(settings)


def check_parametrization(settings: Settings) -> None:
    """Check that the optimizer's rates by width are known with muP. Raises ConfigError if they are not."""
    optimizer = settings.optim.optimizer
    if settings.plan.parametrization == "mup" and OPTIMIZERS[optimizer].width_power is None:
        known = " or ".join(name for name, row in OPTIMIZERS.items() if row.width_power is not None)
        raise ConfigError(
            f"plan.parametrization = mup: expected optim.optimizer = {known}, whose rates by width are known, got "
            f"{optimizer}. Change optim.optimizer, or use a model of the standard parametrization."
        )


def check_windows(settings: Settings) -> None:
    """Check that attention with windows is causal. Raises ConfigError if it is not."""
    if settings.plan.window is not None and settings.train.objective == "mlm":
        raise ConfigError(
            f"plan.window: expected an objective with causal attention, got train.objective = mlm and a window of "
            f"{settings.plan.window} earlier positions. Remove plan.window and plan.window_pattern."
        )


def check_document_mask(shape: ModelShape, settings: Settings, kind: str) -> None:
    """Check that `train.precision` is not fp32 if document masks need a CUDA kernel.

    Raises ConfigError for fp32, which the kernel does not support.
    """
    layout, train = settings.layout, settings.train
    blocks = train.document_mask and shape.positions != "relative" and shape.head_dim >= MIN_BLOCKS_HEAD
    by_keys = layout.context > 1 and layout.context_by == "keys"
    if kind == "cuda" and train.precision == "fp32" and blocks and not by_keys:
        raise ConfigError(
            "train.precision: expected a 16-bit dtype for train.document_mask on a CUDA device, got fp32. Set "
            'train.precision = "bf16", or train.document_mask = false.'
        )


def check_ranks(plan: Plan, world_size: int) -> None:
    """Check that a plan can be trained on `world_size` ranks. Raises ConfigError that names every problem."""
    check_code(plan.shape)
    if problems := rank_problems(plan, plan.settings, world_size):
        raise ConfigError(
            f"layout: {len(problems)} problem(s) with {world_size} rank(s); nothing was started\n  "
            + "\n  ".join(problems)
        )


def rank_problems(plan: Plan, settings: Settings, world_size: int) -> list[str]:
    """Return an error text for each reason why a plan cannot be trained on `world_size` ranks under `settings`."""
    # Held-out rows have the length of train.seq_len in every stage.
    measured = [row_length(settings.train)] if settings.train.eval_every else []
    problems = dict[str, None]()
    for stage in plan.stages:
        lengths = [row_length(settings.train, stage.seq_len), *measured]
        problems |= dict.fromkeys(layout_problems(plan.shape, settings, world_size, lengths, stage.global_batch))
        if axes_problem(settings.layout, world_size) is not None:
            continue
        groups = data_ranks(axes_of(settings.layout, world_size))
        if groups > stage.global_batch:
            text = (
                f"train.global_batch: expected at least {groups} sequences, one for each data-parallel group of ranks, "
                f"got {stage.global_batch}. Set train.global_batch, or global_batch of the entry in train.stages, to "
                f"at least {groups}."
            )
            problems[text] = None
    if settings.layout.compress != "none" and world_size == 1:
        text = (
            f"layout.compress = {settings.layout.compress}: expected at least 2 ranks that exchange gradients, got "
            'one rank. Start more ranks, or set layout.compress = "none".'
        )
        problems[text] = None
    return [*problems]
