"""The folder of a run's checkpoints: metadata, listing, retention and removal; and the identity of a run.

To remove a checkpoint, its metadata is deleted before its files, and each deletion is durable before the next. A
process killed at any point therefore leaves a complete checkpoint, or files without metadata, which the next start
removes.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.checkpoints import CHECKPOINTS, METADATA_NAME
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of
from schemas.leases import check_still_held, delete_files
from schemas.manifest import read_run
from schemas.paths import PLAN_NAME, check_deletable, check_own_folders, is_below
from schemas.s3_requests import SCHEME, S3Requests
from schemas.storage import MAX_JSON_BYTES, Store
from schemas.tokens import Dataset, open_dataset
from schemas.versions import DATASET
from train.config.layout import offload_of_older_version
from train.config.settings import Settings
from train.config.train import CheckpointConfig
from train.data.order import SampleOrder
from train.data.stages import MASKS_VERSION, SkipList, stage_position
from train.dataset_history import comparable_digest, digests_at_same_positions
from train.model.draw import BY_POSITION, BY_TENSOR
from train.model.shape import ESTIMATES, ModelShape, shape_in
from train.monitor.guard import GuardState
from train.parallel.devices import RunDevices
from train.plan.plan import (
    Plan,
    check_settings_used,
    heldout_loss_users,
    open_order,
    read_settings,
    read_skips,
    stored_plan,
)

# Checkpoint metadata: the step, the identity of the run, its layout, and the size and digest of each state file.
#
# It is written last, so a checkpoint exists when its metadata exists. No random state is needed: masks, also those of
# dropout, come from a counter-based hash, so torch's generators are neither stored nor set.

READ_AT_ONCE = 16
"""Number of metadata files that are read at a time, since each is a request to an object store."""


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")


class Identity(_FrozenModel):
    """Everything that decides the weights at a given step; a run resumes only from checkpoints that match it."""

    dataset: str
    """Digest of the dataset's content, which stays the same if shards are renamed or moved."""
    tokenizer: str
    """Digest of the tokenizer contract, which defines where separators go."""
    order: str
    """Digest of the order of the samples."""
    settings: dict[str, Any]
    """Every setting that decides the weights, such as `shape.…` and `train.…`, with the values that the plan set."""
    skip_list: str
    """Digest of the skip list."""
    skip_length: int
    """Number of entries of the skip list, to which a later run may append."""
    code_version: str
    """Version of the code that wrote the checkpoint; recorded, not compared."""

    @property
    def plan(self) -> str:
        """Return the digest of the settings that decide the weights."""
        return digest_of(self.settings)


class Layout(_FrozenModel):
    """How a run uses its devices.

    A run that is resumed on CPUs in an equal layout gives the same weights, bit for bit, as an uninterrupted run.
    """

    ranks: int
    """Number of ranks."""
    axes: dict[str, int]
    """Size of each axis of the mesh."""
    settings: dict[str, Any]
    """Every setting of `[layout]` besides the axes that does not decide the weights: data, micro_batch, schedule, …"""
    threads: int = Field(ge=1, le=1024)
    """CPU threads of a rank; the backward pass splits sums over them, which changes the last bits."""
    device: str
    """Type of the devices."""
    kernels: str
    """What selects the kernels: torch version, and the CPU's instruction set or the name of the GPU."""

    def differences(self, other: "Layout") -> list[str]:
        """Return how another layout differs from this one, such as `ranks 4, now 2`; "now" is the other layout."""
        pairs = _pairs(_flat(self), _flat(other))
        return [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]


class TrainerState(_FrozenModel):
    """The state of the trainer besides the tensors; every number is restored exactly, infinite values included."""

    heldout: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss) of every evaluation, oldest first, for plateau schedules."""
    guard: GuardState = GuardState()
    """State of the guard: skipped steps, latest losses, rewinds, the best held-out loss."""
    loss_scale: float | None = None
    """fp16: factor of the loss; None = not scaled."""
    finite_steps: int = 0
    """fp16: consecutive finite steps since the factor of the loss last changed."""


class StateFile(_FrozenModel):
    """Size and digest of a state file as it was written."""

    size: int
    """Size [bytes]."""
    sha256: str
    """SHA-256 (hex) of the bytes passed to the filesystem."""


DIGEST = "digest"
"""Key of `checkpoint.json` with the digest of the others; checkpoints of earlier versions do not have it."""


class CheckpointMetadata(_FrozenModel):
    """The content of `checkpoint.json`."""

    step: int
    """Number of optimizer steps made."""
    identity: Identity
    """Identity of the run that the checkpoint belongs to."""
    layout: Layout
    """Layout in which the checkpoint was computed."""
    progress: TrainerState = TrainerState()
    """Trainer state at that step."""
    files: dict[str, StateFile] = {}
    """Every state file, by name."""

    @property
    def name(self) -> str:
        """Return the folder of the checkpoint, relative to the run."""
        return folder_name(self.step)

    @property
    def size(self) -> int:
        """Return the size of the state [bytes]."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the content of `checkpoint.json`, which has a digest of its other fields."""
        fields = json.loads(self.model_dump_json())
        return canonical_json({DIGEST: digest_of(fields), **fields})


def folder_name(step: int) -> str:
    """Return the folder of the checkpoint of a step, relative to the run."""
    return f"{CHECKPOINTS}/step-{step:06d}"


def parse_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Parse checkpoint metadata; `where`: the path of its file.

    Raises ContractError if a field is invalid, if the content has another digest, or if the step is not the one in the
    folder's name.
    """
    try:
        checkpoint = CheckpointMetadata.model_validate_json(_without_digest(data, where))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'JSON'}: {item['msg']}" for item in error.errors()]
        raise ContractError(
            f"{where}: expected checkpoint metadata, got {'; '.join(problems[:5])}. The file is damaged or was written "
            "by another version: remove this checkpoint's folder to resume from the previous one."
        ) from error
    if wrong := [name for name in checkpoint.files if "/" in name or not is_below(name)]:
        raise ContractError(
            f"{where}: expected files in the checkpoint's folder, got {wrong[0]!r:.200}. Remove this folder "
            "to resume from the previous one."
        )
    if not where.endswith(f"{checkpoint.name}/{METADATA_NAME}"):
        raise ContractError(
            f"{where}: expected the metadata of the step in the folder's name, got that of step {checkpoint.step}. "
            f"Rename the folder to {checkpoint.name}."
        )
    return checkpoint


def _without_digest(data: bytes, where: str) -> bytes:
    """Return the content of `checkpoint.json` without its digest. Raises ContractError if it has another digest."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return data  # what is wrong is named when the fields are validated
    if not isinstance(fields, dict) or DIGEST not in fields:
        return data
    expected, actual = fields.pop(DIGEST), digest_of(fields)
    if expected != actual:
        raise ContractError(
            f"{where}: expected content with digest {expected!r:.80}, got {actual}. The file is damaged or was edited: "
            "remove this checkpoint's folder to resume from the previous one."
        )
    return json.dumps(fields).encode()


STAGE_SETTINGS = {
    "num_steps": "train.steps",
    "seq_len": "train.seq_len",
    "global_batch": "train.global_batch",
    "counts": "train.weights",
}
"""Fields of a training stage, and the settings that they come from in a run of one stage."""


def check_identity(checkpoint: CheckpointMetadata, identity: Identity) -> None:
    """Check that a checkpoint belongs to the current run. Raises ContractError that names every difference."""
    if pairs := _differences(checkpoint.identity, identity):
        wrong = "".join(f"\n  {name}: expected {old}, got {new}" for name, (old, new) in pairs.items())
        raise ContractError(
            f"{checkpoint.name}: expected the run that this checkpoint belongs to, got other values in this run{wrong}"
            "\nUndo the change, or train with it in a new run folder: `penstock plan NEW --dataset RUN`."
        )


def _differences(expected: Identity, identity: Identity) -> dict[str, tuple[Any, Any]]:
    """Return name -> (value of `expected`, value of `identity`) of everything but the skip list that differs."""
    pairs = {name: (getattr(expected, name), getattr(identity, name)) for name in ("dataset", "tokenizer")}
    settings = _pairs(expected.settings, identity.settings)
    pairs |= _stage_pairs(*settings.pop("train.stages", (None, None)))
    # A setting as it was given takes precedence over the values of the stages that follow from it.
    pairs |= {name: both for name, both in sorted(settings.items()) if both[0] != both[1]}
    pairs = dict(sorted((name, both) for name, both in pairs.items() if both[0] != both[1]))
    if not pairs and expected.order != identity.order:  # otherwise it follows from another difference
        pairs = {"order": (expected.order, identity.order)}
    return pairs


def _stage_pairs(expected: Any, given: Any) -> dict[str, tuple[Any, Any]]:
    """Return setting -> (value in the checkpoint, value in this run) of training stages."""
    before, now = ([] if stages is None else stages for stages in (expected, given))
    if len(before) != len(now):
        return {"train.stages": (f"{len(before)} stage(s)", f"{len(now)}")}
    pairs = {}
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for field, setting in STAGE_SETTINGS.items():
            name = setting if len(before) == 1 else f"train.stages[{number}].{field}"
            pairs[name] = (old[field], new[field])
    return pairs


def _flat(layout: Layout) -> dict[str, Any]:
    rest = layout.model_dump(mode="json", include={"threads", "device", "kernels"})
    # A checkpoint of an older version lacks newer settings, and has `offload` as a boolean.
    settings = NEWER_SETTINGS | layout.settings
    settings["offload"] = offload_of_older_version(settings.get("offload", "none"))
    return {"ranks": layout.ranks, **layout.axes, **settings, **rest}


NEWER_SETTINGS = {"offload_dir": None, "offload_weights_dir": None}
"""Settings of `[layout]` that version 0.1.0 does not have, with the values that mean what it does."""


def _pairs(expected: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*expected, *sorted(given.keys() - expected.keys())]
    return {name: (expected.get(name), given.get(name)) for name in names}


def list_checkpoints(run: Store) -> list[CheckpointMetadata]:
    """Return the metadata of all complete checkpoints, oldest first. Raises ContractError if one cannot be read."""
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        metadata = [*pool.map(lambda name: _read_metadata(run, name), _complete(run))]
    where = run.root if run.is_local else run.uri
    checkpoints = (parse_metadata(data, f"{where}/{name}/{METADATA_NAME}") for name, data in metadata)
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _complete(run: Store) -> list[str]:
    """Return the folders of the checkpoints with metadata, relative to the run."""
    names = _folders(run)
    if run.is_local:
        return [name for name in names if Path(run.path(name), METADATA_NAME).exists()]
    infos = run.fs.get_file_info([run.path(f"{name}/{METADATA_NAME}") for name in names])
    return [name for name, info in zip(names, infos, strict=True) if info.type == pafs.FileType.File]


def _read_metadata(run: Store, name: str) -> tuple[str, bytes]:
    """Return the folder of a checkpoint, and the content of its metadata file."""
    if not run.is_local:
        return name, run.read_bytes(f"{name}/{METADATA_NAME}")
    path = Path(run.path(name), METADATA_NAME)
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:  # reading a pipe would never end
        raise ContractError(
            f"{path}: expected a file of at most {MAX_JSON_BYTES} bytes, got a larger one, a folder or a device. "
            "Remove this checkpoint's folder to resume from the previous one."
        )
    return name, path.read_bytes()


def remove_incomplete(run: Store) -> list[str]:
    """Remove what a killed process left: partial files, and checkpoint folders without metadata.

    On S3, unfinished uploads of checkpoints are aborted too. Return the names of the removed folders. Raises
    ContractError if a symbolic link leads out of the run.
    """
    check_own_folders(run, "train")
    for partial in filter(Path.is_file, Path(run.path("train")).glob("*.partial")) if run.is_local else ():
        partial.unlink()
    if run.uri.startswith(SCHEME):
        requests = S3Requests(run.child(CHECKPOINTS))
        for upload in requests.uploads():
            requests.abort(upload)
    halves = sorted({*_folders(run)} - {*_complete(run)})
    for name in halves:
        _delete_folder(run, name)
    return [name.rpartition("/")[2] for name in halves]


def remove_checkpoint(run: Store, step: int) -> None:
    """Remove the checkpoint of a step, complete or not; do nothing if there is none.

    Raises ContractError if a symbolic link leads out of the run.
    """
    name = folder_name(step)
    if not run.exists(name):
        return
    check_deletable(run, f"{name}/{METADATA_NAME}")
    check_still_held(run)
    run.delete(f"{name}/{METADATA_NAME}")
    run.sync(name)
    _delete_folder(run, name)


def steps_kept(steps: list[int], config: CheckpointConfig) -> set[int]:
    """Return the steps that retention keeps: the newest `keep`, multiples of `keep_every`, and step 0."""
    every = config.keep_every
    return {*sorted(steps)[-config.keep :], *(step for step in steps if step == 0 or (every and step % every == 0))}


def keep_newest(run: Store, config: CheckpointConfig) -> list[int]:
    """Remove the checkpoints that retention does not keep, oldest first; return their steps."""
    steps = [int(name.rpartition("-")[2]) for name in _complete(run)]
    removed = sorted({*steps} - steps_kept(steps, config))
    for step in removed:
        remove_checkpoint(run, step)
    return removed


def move_checkpoint(run: Store, name: str, new: str) -> None:
    """Move the folder of a checkpoint in its run. Killed at any time, this leaves a complete checkpoint in one place.

    An object store has no folders to rename: the files are copied, the metadata last, and then deleted, the metadata
    first.
    """
    if run.is_local:
        run.move(name, new)
        return
    files = sorted(run.child(name).walk(), key=lambda file: file == METADATA_NAME)
    for file in files:
        run.fs.copy_file(run.path(f"{name}/{file}"), run.path(f"{new}/{file}"))
    run.delete(f"{name}/{METADATA_NAME}")
    _delete_folder(run, name)


def local_path(run: Store, name: str) -> Path:
    """Return the local path of a folder in which processes of their own work.

    Raises ConfigError if the run is not on a mounted filesystem.
    """
    if not run.is_local:
        raise ConfigError(
            f"train: expected a run folder on a mounted filesystem, got {run.uri}. Mount the storage, or copy the run "
            "to a local folder."
        )
    return Path(run.path(name))


def _folders(run: Store) -> list[str]:
    """Return the folders of all checkpoints, complete or not, relative to the run."""
    if run.is_local:
        root = Path(run.path(CHECKPOINTS))
        names = [path.name for path in root.iterdir()] if root.exists() else []
    else:
        # Not every object store lists folders.
        names = sorted({name.partition("/")[0] for name in run.child(CHECKPOINTS).walk()})
    return [f"{CHECKPOINTS}/{name}" for name in names if re.fullmatch(r"step-\d{6,}", name)]


def _delete_folder(run: Store, name: str) -> None:
    """Delete a folder with all files in it. On an object store, a folder without files does not exist."""
    if run.is_local:
        if (path := Path(run.path(name))).is_symlink() or not path.is_dir():
            raise ContractError(f"{path}: expected the folder of a checkpoint, got a file or a link. Delete it.")
        shutil.rmtree(path)
        return
    folder = run.child(name)
    delete_files(folder, [*folder.walk()])
    if run.exists(name):
        run.delete_folder(name)


# The identity of a run holds the digests and settings that decide its weights. A checkpoint stores it, and a run
# resumes from the checkpoint only if its own identity agrees with it.


def identify(dataset: Dataset, plan: Plan, skip: SkipList) -> Identity:
    """Return the identity of a run: everything that decides its weights."""
    return Identity(
        dataset=dataset.digest,
        tokenizer=digest_of(dataset.tokenizer.model_dump(mode="json")),
        order=plan.order,
        settings=deciding_settings(plan),
        skip_list=skip.digest,
        skip_length=len(skip.indices),
        code_version=version("penstock"),
    )


def deciding_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings and the shape of a plan that decide the weights, by name."""
    filled = {
        "train.stages": [stage.model_dump(mode="json") for stage in plan.stages],
        "optim.warmup_steps": plan.warmup_steps,
        "optim.learning_rate": plan.learning_rate,
    }
    # Steps and global batch are part of `train.stages`, with the values that the plan set.
    given = {name: value for name, value in plan.settings.content().items() if name not in RESOLVED}
    if heldout_loss_users(plan.settings):
        train = plan.settings.train
        filled |= {"train.eval_every": train.eval_every, "train.eval_sequences": train.eval_sequences}
    if plan.settings.train.objective != "causal":
        filled["train.masks_version"] = MASKS_VERSION
    if plan.initial_weights != BY_TENSOR:  # a checkpoint of an older version does not name its rule
        filled[INITIAL_WEIGHTS] = plan.initial_weights
    if plan.origin is not None:
        filled[INIT_FROM] = plan.origin.digest
    shape = {f"shape.{name}": value for name, value in plan.shape.model_dump(mode="json", exclude={ESTIMATES}).items()}
    return shape | given | stage_rates(plan) | filled


INITIAL_WEIGHTS, INIT_FROM = "train.initial_weights", "train.init_from"
RESOLVED = ("train.steps", "train.global_batch", "train.stages")


def stage_rates(plan: Plan) -> dict[str, object]:
    """Return {"train.rates": [...]}: learning_rate, schedule and final_lr_share of each stage; {} without stages."""
    own = [stage.model_dump(mode="json") for stage in plan.settings.train.stages]
    names = ("learning_rate", "schedule", "final_lr_share")
    return {"train.rates": [{name: stage[name] for name in names} for stage in own]} if own else {}


def with_checkpoint_formats(run: Store, settings: Settings) -> Settings:
    """Return the settings with "auto" precisions, and an unset `train.pack_chunks`, as in the newest checkpoint."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        return settings
    content = checkpoints[-1].identity.settings
    return settings.with_precisions_of(content).with_pack_chunks(content.get("train.pack_chunks", 1))


def rule_of_weights(run: Store) -> int:
    """Return the version of the rule for initial weights: that of the newest checkpoint, else the current one."""
    checkpoints = list_checkpoints(run)
    return checkpoints[-1].identity.settings.get(INITIAL_WEIGHTS, BY_TENSOR) if checkpoints else BY_POSITION


def settings_at_start(run: Store, dataset: Dataset, overrides: Sequence[str], here: RunDevices) -> Settings:
    """Return a run's settings, with each "auto" precision replaced by the one that training will use.

    Training uses the precision of the newest checkpoint. Without a checkpoint, the devices `here` decide.

    Raises ConfigError or ContractError as `read_settings` does, and ConfigError for a setting without effect.
    """
    settings = with_checkpoint_formats(run, read_settings(run, dataset, overrides))
    settings = settings.with_precisions_for(here.kind, here.capability)
    check_settings_used(settings, dataset)
    return settings


def check_resumable(run: Store, dataset: Dataset, plan: Plan) -> None:
    """Raise ContractError, naming every difference, if a plan cannot be resumed from the run's newest checkpoint."""
    if checkpoints := list_checkpoints(run):
        identity = identify(dataset, plan, read_skips(run, plan.settings))
        checkpoint = checkpoints[-1]
        seen = comparable_digest(run, dataset, (checkpoint.name, checkpoint.step), checkpoint.identity.dataset)
        check_identity(checkpoint, identity.model_copy(update={"dataset": seen}))


def check_skips(checkpoint: CheckpointMetadata, plan: Plan, skip: SkipList) -> None:
    """Raise ContractError if a skip list does not continue the one that a checkpoint was trained with."""
    stage, used = stage_position(plan.stages, checkpoint.step)
    skip.check_continues(checkpoint.identity.skip_length, checkpoint.identity.skip_list, used, stage)


def check_plan(run: Store, checkpoint: CheckpointMetadata) -> None:
    """Raise ContractError, naming every difference, if a checkpoint was trained with another plan than the run's.

    Settings that only one of the two has are not compared: another version of the code wrote it. Nothing is compared if
    the run has no plan.
    """
    plan = stored_plan(run)
    if plan is None:
        return
    expected = checkpoint.identity.settings
    own = deciding_settings(plan.model_copy(update={"settings": plan.settings.with_precisions_of(expected)}))
    pairs = {name: (expected[name], own[name]) for name in expected.keys() & own.keys()}
    if plan.dataset == checkpoint.identity.dataset:
        pairs["order"] = (checkpoint.identity.order, plan.order)
    if wrong := sorted(name for name, (old, new) in pairs.items() if old != new):
        others = "; ".join(f"{name} {pairs[name][1]} in place of {pairs[name][0]}" for name in wrong)
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected the plan that {checkpoint.name} was trained with, got one with {others}. "
            "Restore the file or the checkpoint from a backup."
        )


def setting_of(checkpoint: CheckpointMetadata, name: str) -> Any:
    """Return a setting of a checkpoint. Raises ContractError if its metadata lacks the setting."""
    if name not in checkpoint.identity.settings:
        raise damaged(checkpoint, f"a setting {name}")
    return checkpoint.identity.settings[name]


def damaged(checkpoint: CheckpointMetadata, expected: str) -> ContractError:
    """Return the error of checkpoint metadata that has other values than `expected`."""
    return ContractError(
        f"{checkpoint.name}/{METADATA_NAME}: expected {expected}, got other values. Restore the file from a backup, or "
        "remove the folder."
    )


def shape_of(checkpoint: CheckpointMetadata) -> ModelShape:
    """Return the shape of a checkpoint's model. Raises ContractError if its metadata does not have one."""
    try:
        return shape_in(checkpoint.identity.settings)
    except ValidationError as error:
        raise damaged(checkpoint, "the shape of a model") from error


# The order of the samples that the checkpoints were trained on, for everything that reads it after training.


def open_trained_order(run: Store, dataset: Dataset, plan: Plan) -> SampleOrder:
    """Return the order of a plan's samples, with the run's current skip list and packed rows.

    Raises ContractError if the run has checkpoints, and the newest was trained on other samples.
    """
    # Listed first: training adds to the skip list before it writes a checkpoint that contains the additions.
    checkpoints = list_checkpoints(run)
    order = open_order(run, dataset, plan)
    if checkpoints:
        identity = identify(dataset, plan.model_copy(update={"order": order.digest}), order.skip)
        if checkpoints[-1].identity.dataset in digests_at_same_positions(dataset):
            identity = identity.model_copy(update={"dataset": checkpoints[-1].identity.dataset})
        _check_same_samples(run, checkpoints[-1], identity)
        check_skips(checkpoints[-1], plan, order.skip)
    return order


def _check_same_samples(run: Store, checkpoint: CheckpointMetadata, identity: Identity) -> None:
    """Raise ContractError if a plan has other samples in its steps than a checkpoint; `identity`: that of the plan."""
    expected, pairs = checkpoint.identity, _differences(checkpoint.identity, identity)
    # Settings that a later version of the code has, and others that choose no samples, do not matter here.
    stages = _stage_pairs(expected.settings.get("train.stages"), identity.settings["train.stages"])
    objectives = (each.settings.get("train.objective") for each in (expected, identity))
    same = (
        (expected.dataset, expected.order) == (identity.dataset, identity.order)
        and all(old == new for old, new in stages.values())
        and len({*objectives}) == 1
    )
    if not same:
        others = "; ".join(f"{name} {new} in place of {old}" for name, (old, new) in pairs.items())
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected the plan that {checkpoint.name} was trained with, got one with {others}. "
            "Restore the file from a backup, or run `penstock plan` with the values of the checkpoint."
        )


def check_trained_order(run: Store) -> None:
    """Raise ContractError if the newest checkpoint of a run was trained on other samples than its plan has.

    Nothing is compared if there is no plan for the run's dataset, or no checkpoint.
    """
    plan = stored_plan(run) if DATASET in read_run(run).tables else None
    if plan is None or not list_checkpoints(run):
        return
    dataset = open_dataset(run)
    if plan.dataset in digests_at_same_positions(dataset):
        open_trained_order(run, dataset, plan.model_copy(update={"dataset": dataset.digest}))
