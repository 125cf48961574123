"""A run made ready to train: settings, plan, data and checkpoint found and checked before anything is changed.

Rank 0 checks for all, so that an error is said once and no rank waits for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from schemas.config import load_recipe
from schemas.errors import ConfigError
from schemas.ids import digest_of
from schemas.manifest import read_run
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint import Identity, Layout, Note, check_identity, local_path, remove_halves, standing_notes
from train.config import PlanConfig, TrainConfig
from train.data import Batches, open_batches
from train.metrics import MANIFEST_NAME
from train.plan import PLAN_NAME, Plan, make_plan, read_plan, write_plan
from train.ranks import Ranks, default_threads
from train.skips import read_skip_list
from train.verify import verify_dataset

NEVER_PREDICTED = ("pad", "tombstone")


@dataclass(frozen=True)
class Setup:
    """A run that is ready to train: everything checked, nothing changed."""

    run: Store
    plan: Plan
    config: TrainConfig
    dataset: Dataset
    batches: Batches
    identity: Identity
    layout: Layout
    note: Note | None
    """The checkpoint to go on from; None = begin."""

    @property
    def never(self) -> torch.Tensor:
        """Ids that are not predicted: they stand where there is no text."""
        return torch.tensor([self.dataset.tokenizer.reserved[name] for name in NEVER_PREDICTED])


def read_settings(run: Store, dataset: Dataset, overrides: Sequence[str]) -> tuple[PlanConfig, TrainConfig]:
    """The settings of the plan that stands, else of the run's recipe, with `train.key=value` overrides on top.

    Raises ConfigError with every wrong name, ContractError if the plan was made for another dataset.
    """
    sections: dict[str, Any] = {name: read_run(run).recipe.get(name, {}) for name in ("plan", "train")}
    if run.exists(PLAN_NAME):
        standing = read_plan(run, dataset)
        sections = {"plan": standing.plan_config.model_dump(), "train": standing.train_config.model_dump()}
    sizing = load_recipe({"plan": sections["plan"]}, [], {"plan": PlanConfig}, run.uri)
    training = load_recipe({"train": sections["train"]}, overrides, {"train": TrainConfig}, run.uri)
    return sizing.section("plan", PlanConfig), training.section("train", TrainConfig)


def identify(dataset: Dataset, plan: Plan, batches: Batches) -> Identity:
    """What decides the weights of this run."""
    filled = ("seq_len", "global_batch", "steps", "warmup_steps", "learning_rate")
    train = plan.train_config.content() | {name: getattr(plan, name) for name in filled}
    return Identity(
        dataset=dataset.digest,
        tokenizer=digest_of(dataset.tokenizer.model_dump(mode="json")),
        order=batches.order.digest,
        settings={f"shape.{name}": value for name, value in plan.shape.model_dump(mode="json").items()}
        | {f"train.{name}": value for name, value in train.items()},
        skip_list=batches.order.skip.digest,
        skip_length=len(batches.order.skip.indices),
    )


def check_run(run: Store, overrides: Sequence[str], ranks: Ranks) -> tuple[Plan, Note | None]:
    """The plan and the checkpoint to go on from, after every check of settings, bytes and checkpoint; for rank 0."""
    local_path(run, "train")
    dataset = open_dataset(run)
    sizing, config = read_settings(run, dataset, overrides)
    plan = make_plan(dataset, sizing, config)
    if ranks.world_size > plan.global_batch:
        raise ConfigError(
            f"train.global_batch: promised a sequence for each of {ranks.world_size} ranks, found {plan.global_batch}; "
            "raise it, or start fewer ranks"
        )
    skip = read_skip_list(run, config.skip_file)
    batches = open_batches(dataset, config, plan.global_batch, skip)
    notes = standing_notes(run)
    note = notes[-1] if notes else None
    if note is not None:
        found = identify(dataset, plan, batches)
        check_identity(note, found)
        skip.check_continues(note.identity.skip_length, note.identity.skip_list, note.step * plan.global_batch)
    verify_dataset(run, dataset)
    if note is None or note.step < plan.steps:
        run.delete(MANIFEST_NAME)
    remove_halves(run)
    write_plan(run, plan)
    return plan, note


def prepare(run: Store, overrides: Sequence[str], ranks: Ranks) -> Setup:
    """The run opened on every rank, once rank 0 has checked it for all. Raises ConfigError or ContractError."""
    plan, note = ranks.on_first(lambda: check_run(run, overrides, ranks))
    config, dataset = plan.train_config, open_dataset(run)
    batches = open_batches(dataset, config, plan.global_batch, read_skip_list(run, config.skip_file))
    layout = Layout(
        ranks=ranks.world_size,
        micro_batch=config.micro_batch,
        threads=default_threads(ranks),
        device=ranks.mesh.device_type,
    )
    # The number of threads shows in the last bits, so a run that goes on with as many ranks keeps it.
    if note is not None and note.layout.ranks == ranks.world_size:
        layout = layout.model_copy(update={"threads": note.layout.threads})
    return Setup(run, plan, config, dataset, batches, identify(dataset, plan, batches), layout, note)


def describe(setup: Setup) -> str:
    """What is about to be trained, in one line."""
    plan, layout, note = setup.plan, setup.layout, setup.note
    parts = [
        f"{plan.num_params:,} parameters on {layout.ranks} x {layout.device} ({layout.threads} threads each)",
        f"{plan.steps:,} steps of {plan.global_batch} x {plan.seq_len} tokens in {setup.config.precision}",
    ]
    if note is not None:
        exact = "exactly" if layout.device == "cpu" else "in the same layout"
        rounded = "in another layout, so equal up to rounding"
        parts.append(f"going on from step {note.step}, {exact if note.layout == layout else rounded}")
    return "; ".join(parts)
