"""The preparation of a training run: settings, plan, data and checkpoint are checked before anything is changed.

Rank 0 checks for all ranks, so that each error is printed once and no rank waits for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import (
    CheckpointMetadata,
    Layout,
    check_identity,
    identify,
    list_checkpoints,
    local_path,
    remove_incomplete,
    with_checkpoint_formats,
)
from train.checkpoint.state import layout_of
from train.config.settings import Settings
from train.data.batches import Batches
from train.data.packing import packed_files
from train.data.stages import StagePlan
from train.data.verify import verify_dataset
from train.dataset_history import comparable_digest
from train.model.fp8 import check_fp8
from train.monitor.metrics import MANIFEST_NAME, read_train_manifest
from train.monitor.profiler import ProfileWindow, parse_window
from train.parallel.layout import axes_of
from train.parallel.pipeline import check_schedule
from train.parallel.ranks import Ranks, default_threads
from train.plan.layouts import resolve_plan
from train.plan.make_plan import make_plan
from train.plan.plan import (
    Plan,
    check_ranks,
    check_settings_used,
    open_order,
    planned_layouts,
    read_settings,
    write_plan,
)
from train.plan.search.devices import RunDevices, peak_of_devices


@dataclass(frozen=True)
class TrainingSetup:
    """A training run whose settings, data and checkpoint are checked."""

    run: Store
    plan: Plan
    dataset: Dataset
    layout: Layout
    checkpoint: CheckpointMetadata | None
    """The checkpoint to resume from; None = start from step 0."""
    done: bool
    """True if the run is complete and its manifest exists."""
    window: ProfileWindow | None
    """The steps to profile on this rank."""
    peak_flops: float | None = None
    """Peak throughput of a device, the denominator of MFU [FLOP/s]; None = unknown."""

    @property
    def settings(self) -> Settings:
        """Return the settings of the plan."""
        return self.plan.settings

    def open_batches(self) -> Batches:
        """Return the batches under the current skip list."""
        return Batches(self.dataset, self.settings.train, open_order(self.run, self.dataset, self.plan))


def check_run(run: Store, overrides: Sequence[str], ranks: Ranks) -> tuple[Plan, CheckpointMetadata | None, bool]:
    """Return the plan, the checkpoint to resume from and whether the run is complete, after every check; for rank 0."""
    local_path(run, "train")
    dataset, here = open_dataset(run), devices_of(ranks)
    settings = with_checkpoint_formats(run, read_settings(run, dataset, overrides)).with_precisions_for(
        here.kind, here.capability
    )
    check_settings_used(settings, dataset)
    plan, lines = resolve_plan(make_plan(run, dataset, settings), here)
    settings = plan.settings
    check_ranks(plan, ranks.world_size)
    if settings.train.precision == "fp8":
        check_fp8(ranks.device)
    check_schedule(settings.layout)
    parse_window(settings.train.profile, plan.steps)
    skip = open_order(run, dataset, plan).skip
    checkpoints = list_checkpoints(run)
    checkpoint = checkpoints[-1] if checkpoints else None
    identity = identify(dataset, plan, skip)
    if checkpoint is not None:
        seen = comparable_digest(run, dataset, (checkpoint.name, checkpoint.step), checkpoint.identity.dataset)
        check_identity(checkpoint, identity.model_copy(update={"dataset": seen}))
        stage, used = stage_position(plan.stages, checkpoint.step)
        skip.check_continues(checkpoint.identity.skip_length, checkpoint.identity.skip_list, used, stage)
    verify_dataset(run, dataset, packed_files(run, dataset, settings.train))
    done = checkpoint is not None and _is_done(run, checkpoint)
    if not done:
        run.delete(MANIFEST_NAME)
    remove_incomplete(run)
    # A profile belongs to this start only; the stored plan must not make the next start record other steps.
    stored = settings.model_copy(update={"train": settings.train.model_copy(update={"profile": ""})})
    write_plan(run, plan.model_copy(update={"settings": stored, "layouts": planned_layouts(run)}))
    if not done:
        print("".join(f"penstock: {line}\n" for line in lines), end="", flush=True)
    return plan, checkpoint, done


def devices_of(ranks: Ranks) -> RunDevices:
    """Return the type, compute capability, name and number of the devices of these ranks."""
    cuda = ranks.device.type == "cuda"
    capability = torch.cuda.get_device_capability(ranks.device) if cuda else None
    name = torch.cuda.get_device_name(ranks.device) if cuda else ""
    return RunDevices(ranks.device.type, capability, name, ranks.world_size, ranks.local_size)


def stage_position(stages: Sequence[StagePlan], step: int) -> tuple[int, int]:
    """Return the training stage that is active after `step` updates, from 0, and the samples it has used so far."""
    number = max(i for i, stage in enumerate(stages) if stage.first_step <= step)
    return number, (step - stages[number].first_step) * stages[number].global_batch


def _is_done(run: Store, checkpoint: CheckpointMetadata) -> bool:
    if not run.exists(MANIFEST_NAME):
        return False
    manifest = read_train_manifest(run)
    identity = checkpoint.identity
    return (manifest.steps, manifest.plan, manifest.skip_list) == (checkpoint.step, identity.plan, identity.skip_list)


def prepare(run: Store, overrides: Sequence[str], ranks: Ranks) -> TrainingSetup:
    """Open the run on every rank after rank 0 has checked it. Raises ConfigError or ContractError."""
    plan, checkpoint, done = ranks.on_first(lambda: check_run(run, overrides, ranks))
    layout = plan.settings.layout
    current = layout_of(layout, axes_of(layout, ranks.world_size), default_threads(ranks), ranks.device.type)
    # The number of threads changes the last bits of sums, so a run that resumes with as many ranks keeps it.
    if checkpoint is not None and checkpoint.layout.ranks == ranks.world_size:
        current = current.model_copy(update={"threads": checkpoint.layout.threads})
    window = parse_window(plan.settings.train.profile, plan.steps) if ranks.rank == 0 else None
    peak = peak_of_devices(plan.settings, devices_of(ranks))
    return TrainingSetup(run, plan, open_dataset(run), current, checkpoint, done, window, peak)


def describe(setup: TrainingSetup) -> str:
    """Return a one-line description of the training that is about to start."""
    plan, layout, checkpoint = setup.plan, setup.layout, setup.checkpoint
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.axes.items() if size > 1)
    parts = [
        f"{plan.num_params:,} parameters on {layout.ranks} x {layout.device} ({layout.threads} threads each)"
        + (f", {axes}, {plan.settings.layout.data}" if axes else ""),
        f"{plan.steps:,} steps of {plan.global_batch} x {plan.seq_len} tokens in {plan.settings.train.precision}",
    ]
    if len(plan.stages) > 1:
        parts.append(f"{len(plan.stages)} stages")
    if checkpoint is not None:
        changes = checkpoint.layout.differences(layout)
        exact = "exactly" if layout.device == "cpu" else "in the same layout"
        compressed = plan.settings.layout.compress != "none"
        equal = "so gradients are compressed differently" if compressed else "so equal up to rounding"
        rounded = f"in another layout, {equal} ({'; '.join(changes)})"
        parts.append(f"resuming from step {checkpoint.step}, {rounded if changes else exact}")
    return "; ".join(parts)
