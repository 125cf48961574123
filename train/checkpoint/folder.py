"""The folder of a run's checkpoints: listing, retention and removal; and the identity of a run.

A checkpoint is removed metadata first and files second, each step durable before the next. A process killed at any
point therefore leaves it complete or absent, and the remains of an absent one are removed at the next start.
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
from train.dataset_history import comparable_digest
from train.plan.plan import Plan, heldout_loss_users, read_skips


def list_checkpoints(run: Store) -> list[CheckpointMetadata]:
    """Return the metadata of all complete checkpoints, oldest first. Raises ContractError if one cannot be read."""
    paths = (folder / METADATA_NAME for folder in _folders(run))
    checkpoints = (parse_metadata(path.read_bytes(), str(path)) for path in paths if path.exists())
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def remove_incomplete(run: Store) -> list[str]:
    """Remove the remains of a killed process: partial files, and checkpoint folders without metadata.

    Return the names of these folders.
    """
    for partial in local_path(run, "train").glob("*.partial"):
        partial.unlink()
    halves = [folder for folder in _folders(run) if not (folder / METADATA_NAME).exists()]
    for folder in halves:
        shutil.rmtree(folder)
    return sorted(folder.name for folder in halves)


def remove_checkpoint(run: Store, step: int) -> None:
    """Remove the checkpoint of a step, complete or not; do nothing if there is none."""
    name = folder_name(step)
    if not run.exists(name):
        return
    run.delete(f"{name}/{METADATA_NAME}")
    run.sync(name)
    shutil.rmtree(local_path(run, name))


def steps_kept(steps: list[int], config: CheckpointConfig) -> set[int]:
    """Return the steps that retention keeps: the newest `keep`, multiples of `keep_every`, and step 0."""
    every = config.keep_every
    return {*sorted(steps)[-config.keep :], *(step for step in steps if step == 0 or (every and step % every == 0))}


def keep_newest(run: Store, config: CheckpointConfig) -> list[int]:
    """Remove the checkpoints that retention does not keep, oldest first; return their steps."""
    steps = [int(folder.name.partition("-")[2]) for folder in _folders(run) if (folder / METADATA_NAME).exists()]
    removed = sorted({*steps} - steps_kept(steps, config))
    for step in removed:
        remove_checkpoint(run, step)
    return removed


def local_path(run: Store, name: str) -> Path:
    """Return the local path of a folder that torch writes.

    Raises ConfigError if the run is not on a mounted filesystem.
    """
    if not run.is_local:
        raise ConfigError(
            f"train: expected a run folder on a mounted filesystem, where checkpoints are written, got {run.uri}. "
            "Mount the storage, or copy the run to a local folder."
        )
    return Path(run.path(name))


def _folders(run: Store) -> list[Path]:
    root = local_path(run, CHECKPOINTS)
    return [path for path in root.iterdir() if re.fullmatch(r"step-\d{6,}", path.name)] if root.exists() else []


# The identity of a run holds the digests and settings that decide its weights. A checkpoint stores it, and a plan must
# keep it to resume.


def identify(dataset: Dataset, plan: Plan, skip: SkipList) -> Identity:
    """Return the identity of a run: everything that decides its weights."""
    filled = {
        "train.stages": [stage.model_dump(mode="json") for stage in plan.stages],
        "optim.warmup_steps": plan.warmup_steps,
        "optim.learning_rate": plan.learning_rate,
    }
    # Steps and batch are part of the stages, with the values that the plan filled in.
    given = {name: value for name, value in plan.settings.content().items() if name not in RESOLVED}
    if heldout_loss_users(plan.settings):
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
    """Return the learning rates that training stages set for themselves."""
    own = [stage.model_dump(mode="json") for stage in plan.settings.train.stages]
    names = ("learning_rate", "schedule", "final_lr_share")
    return {"train.rates": [{name: stage[name] for name in names} for stage in own]} if own else {}


def with_checkpoint_formats(run: Store, settings: Settings) -> Settings:
    """Return settings whose automatic number formats are those of the newest checkpoint of a run, if there is one."""
    checkpoints = list_checkpoints(run) if run.is_local else []
    return settings.with_precisions_of(checkpoints[-1].identity.settings) if checkpoints else settings


def check_resumable(run: Store, dataset: Dataset, plan: Plan) -> None:
    """Check that the newest checkpoint can resume under a plan. Raises ContractError that names every difference."""
    if run.is_local and (checkpoints := list_checkpoints(run)):
        identity = identify(dataset, plan, read_skips(run, plan.settings))
        checkpoint = checkpoints[-1]
        seen = comparable_digest(run, dataset, (checkpoint.name, checkpoint.step), checkpoint.identity.dataset)
        check_identity(checkpoint, identity.model_copy(update={"dataset": seen}))
