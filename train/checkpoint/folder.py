"""The folder of a run's checkpoints: which stand, which are kept, and how one stops existing.

A checkpoint goes by its note first and its files after, each step durable before the next: a process killed anywhere
leaves it complete or absent, and what is left of an absent one is removed at the next start.
"""

import re
import shutil
from importlib.metadata import version
from pathlib import Path

from schemas.errors import ConfigError
from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import Dataset
from train.checkpoint.metadata import (
    CHECKPOINTS,
    METADATA_NAME,
    CheckpointMetadata,
    Identity,
    check_identity,
    folder_name,
    parse_metadata,
)
from train.config.checkpoint import CheckpointConfig
from train.config.settings import Settings
from train.data.stages import MASKS_VERSION, SkipList
from train.dataset_history import as_before
from train.plan.plan import Plan, listeners, standing_skips


def list_checkpoints(run: Store) -> list[CheckpointMetadata]:
    """The notes of all complete checkpoints, oldest first. Raises ContractError if one cannot be read."""
    paths = (folder / METADATA_NAME for folder in _folders(run))
    notes = (parse_metadata(path.read_bytes(), str(path)) for path in paths if path.exists())
    return sorted(notes, key=lambda note: note.step)


def remove_incomplete(run: Store) -> list[str]:
    """Remove what a killed process has left: checkpoint folders without a note, whose names are returned, and files
    that it was about to rename."""
    for partial in local_path(run, "train").glob("*.partial"):
        partial.unlink()
    halves = [folder for folder in _folders(run) if not (folder / METADATA_NAME).exists()]
    for folder in halves:
        shutil.rmtree(folder)
    return sorted(folder.name for folder in halves)


def remove_checkpoint(run: Store, step: int) -> None:
    """Remove the checkpoint of a step, or what there is of it; none is not an error."""
    name = folder_name(step)
    if not run.exists(name):
        return
    run.delete(f"{name}/{METADATA_NAME}")
    run.sync(name)
    shutil.rmtree(local_path(run, name))


def steps_kept(steps: list[int], config: CheckpointConfig) -> set[int]:
    """The steps that retention keeps: the newest `keep`, those that `keep_every` divides, and the seed, step 0."""
    every = config.keep_every
    return {*sorted(steps)[-config.keep :], *(step for step in steps if step == 0 or (every and step % every == 0))}


def keep_newest(run: Store, config: CheckpointConfig) -> list[int]:
    """Remove the checkpoints that retention does not keep, oldest first; returns their steps."""
    steps = [int(folder.name.partition("-")[2]) for folder in _folders(run) if (folder / METADATA_NAME).exists()]
    removed = sorted({*steps} - steps_kept(steps, config))
    for step in removed:
        remove_checkpoint(run, step)
    return removed


def local_path(run: Store, name: str) -> Path:
    """The path of a folder that torch writes. Raises ConfigError if the run is not on a mounted filesystem."""
    if not run.is_local:
        raise ConfigError(
            f"train: expected a run folder on a mounted filesystem, where checkpoints are written, got {run.uri}. "
            "Mount or copy it."
        )
    return Path(run.path(name))


def _folders(run: Store) -> list[Path]:
    root = local_path(run, CHECKPOINTS)
    return [path for path in root.iterdir() if re.fullmatch(r"step-\d{6,}", path.name)] if root.exists() else []


# What decides the weights of a run: the digests that a checkpoint carries, and that a plan must keep to go on.


def identify(dataset: Dataset, plan: Plan, skip: SkipList) -> Identity:
    """What decides the weights of this run."""
    filled = {
        "train.stages": [stage.model_dump(mode="json") for stage in plan.stages],
        "optim.warmup_steps": plan.warmup_steps,
        "optim.learning_rate": plan.learning_rate,
    }
    # Steps and batch stand in the stages, with what the plan filled in.
    given = {name: value for name, value in plan.settings.content().items() if name not in RESOLVED}
    if listeners(plan.settings):
        train = plan.settings.train
        filled |= {"train.eval_every": train.eval_every, "train.eval_sequences": train.eval_sequences}
    if plan.settings.train.objective != "causal":
        filled["train.masks_version"] = MASKS_VERSION
    shape = {f"shape.{name}": value for name, value in plan.shape.model_dump(mode="json").items()}
    return Identity(
        dataset=dataset.digest,
        tokenizer=digest_of(dataset.tokenizer.model_dump(mode="json")),
        order=plan.order,
        settings=shape | given | stage_rates(plan) | filled,
        skip_list=skip.digest,
        skip_length=len(skip.indices),
        code_version=version("penstock"),
    )


RESOLVED = ("train.steps", "train.global_batch", "train.stages")


def stage_rates(plan: Plan) -> dict[str, object]:
    """The learning rates that stages have of their own."""
    own = [stage.model_dump(mode="json") for stage in plan.settings.train.stages]
    names = ("learning_rate", "schedule", "final_lr_share")
    return {"train.rates": [{name: stage[name] for name in names} for stage in own]} if own else {}


def with_checkpoint_formats(run: Store, settings: Settings) -> Settings:
    """Settings with automatic number formats as the newest checkpoint of a run has them, if there is one."""
    notes = list_checkpoints(run) if run.is_local else []
    return settings.with_precisions_of(notes[-1].identity.settings) if notes else settings


def check_resumable(run: Store, dataset: Dataset, plan: Plan) -> None:
    """Raises ContractError if a checkpoint stands that could not go on under a plan, naming all that differs."""
    if run.is_local and (notes := list_checkpoints(run)):
        found = identify(dataset, plan, standing_skips(run, plan.settings))
        note = notes[-1]
        seen = as_before(run, dataset, (note.name, note.step), note.identity.dataset)
        check_identity(note, found.model_copy(update={"dataset": seen}))
