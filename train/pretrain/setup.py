"""A run made ready to train: settings, plan, data and checkpoint found and checked before anything is changed.

Rank 0 checks for all, so that an error is said once and no rank waits for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import identify, list_checkpoints, local_path, remove_incomplete, with_checkpoint_formats
from train.checkpoint.metadata import CheckpointMetadata, Layout, check_identity
from train.checkpoint.state import layout_of
from train.config.settings import Settings
from train.data.batches import Batches
from train.data.packing import packed_files
from train.data.stages import StagePlan
from train.data.verify import verify_dataset
from train.dataset_history import as_before
from train.model.fp8 import check_fp8
from train.monitor.metrics import MANIFEST_NAME, read_train_manifest
from train.monitor.profiler import ProfileWindow, parse_window
from train.parallel.layout import axes_of
from train.parallel.pipeline import check_schedule
from train.parallel.ranks import Ranks, default_threads
from train.plan.make_plan import make_plan
from train.plan.placement import Here, peak_here, place
from train.plan.plan import Plan, check_ranks, check_used, read_settings, standing_layouts, standing_order, write_plan


@dataclass(frozen=True)
class TrainingSetup:
    """A run that is ready to train: everything checked, nothing changed."""

    run: Store
    plan: Plan
    dataset: Dataset
    layout: Layout
    note: CheckpointMetadata | None
    """The checkpoint to go on from; None = begin."""
    done: bool
    """Whether the run has reached its end, and its manifest stands."""
    window: ProfileWindow | None
    """The steps to profile on this rank."""
    peak_flops: float | None = None
    """What an MFU is a share of on each device [FLOP/s]; None = unknown."""

    @property
    def settings(self) -> Settings:
        """The settings of the plan."""
        return self.plan.settings

    def open_batches(self) -> Batches:
        """The batches under the skip list as it stands."""
        return Batches(self.dataset, self.settings.train, standing_order(self.run, self.dataset, self.plan))


def check_run(run: Store, overrides: Sequence[str], ranks: Ranks) -> tuple[Plan, CheckpointMetadata | None, bool]:
    """The plan, the checkpoint to go on from and whether all is done, after every check; for rank 0."""
    local_path(run, "train")
    dataset, here = open_dataset(run), devices_of(ranks)
    settings = with_checkpoint_formats(run, read_settings(run, dataset, overrides)).with_precisions_for(
        here.kind, here.capability
    )
    check_used(settings, dataset)
    plan, lines = place(make_plan(run, dataset, settings), here)
    settings = plan.settings
    check_ranks(plan, ranks.world_size)
    if settings.train.precision == "fp8":
        check_fp8(ranks.device)
    check_schedule(settings.layout)
    parse_window(settings.train.profile, plan.steps)
    skip = standing_order(run, dataset, plan).skip
    notes = list_checkpoints(run)
    note = notes[-1] if notes else None
    identity = identify(dataset, plan, skip)
    if note is not None:
        seen = as_before(run, dataset, (note.name, note.step), note.identity.dataset)
        check_identity(note, identity.model_copy(update={"dataset": seen}))
        stage, used = stage_position(plan.stages, note.step)
        skip.check_continues(note.identity.skip_length, note.identity.skip_list, used, stage)
    verify_dataset(run, dataset, packed_files(run, dataset, settings.train))
    done = note is not None and _is_done(run, note)
    if not done:
        run.delete(MANIFEST_NAME)
    remove_incomplete(run)
    # A profile is of this start alone; the next one would record other steps without being asked.
    told = settings.model_copy(update={"train": settings.train.model_copy(update={"profile": ""})})
    write_plan(run, plan.model_copy(update={"settings": told, "layouts": standing_layouts(run)}))
    if not done:
        print("".join(f"penstock: {line}\n" for line in lines), end="", flush=True)
    return plan, note, done


def devices_of(ranks: Ranks) -> Here:
    """The devices of these ranks."""
    cuda = ranks.device.type == "cuda"
    capability = torch.cuda.get_device_capability(ranks.device) if cuda else None
    name = torch.cuda.get_device_name(ranks.device) if cuda else ""
    return Here(ranks.device.type, capability, name, ranks.world_size, ranks.local_size)


def stage_position(stages: Sequence[StagePlan], step: int) -> tuple[int, int]:
    """The stage that goes on behind `step` updates, from 0, and the samples that it has used by then."""
    number = max(i for i, stage in enumerate(stages) if stage.first_step <= step)
    return number, (step - stages[number].first_step) * stages[number].global_batch


def _is_done(run: Store, note: CheckpointMetadata) -> bool:
    if not run.exists(MANIFEST_NAME):
        return False
    manifest = read_train_manifest(run)
    found = note.identity
    return (manifest.steps, manifest.plan, manifest.skip_list) == (note.step, found.plan, found.skip_list)


def prepare(run: Store, overrides: Sequence[str], ranks: Ranks) -> TrainingSetup:
    """The run opened on every rank, once rank 0 has checked it for all. Raises ConfigError or ContractError."""
    plan, note, done = ranks.on_first(lambda: check_run(run, overrides, ranks))
    layout = plan.settings.layout
    found = layout_of(layout, axes_of(layout, ranks.world_size), default_threads(ranks), ranks.device.type)
    # The number of threads shows in the last bits, so a run that goes on with as many ranks keeps it.
    if note is not None and note.layout.ranks == ranks.world_size:
        found = found.model_copy(update={"threads": note.layout.threads})
    window = parse_window(plan.settings.train.profile, plan.steps) if ranks.rank == 0 else None
    peak = peak_here(plan.settings, devices_of(ranks))
    return TrainingSetup(run, plan, open_dataset(run), found, note, done, window, peak)


def describe(setup: TrainingSetup) -> str:
    """What is about to be trained, in one line."""
    plan, layout, note = setup.plan, setup.layout, setup.note
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.axes.items() if size > 1)
    parts = [
        f"{plan.num_params:,} parameters on {layout.ranks} x {layout.device} ({layout.threads} threads each)"
        + (f", {axes}, {plan.settings.layout.data}" if axes else ""),
        f"{plan.steps:,} steps of {plan.global_batch} x {plan.seq_len} tokens in {plan.settings.train.precision}",
    ]
    if len(plan.stages) > 1:
        parts.append(f"{len(plan.stages)} stages")
    if note is not None:
        changes = note.layout.differences(layout)
        exact = "exactly" if layout.device == "cpu" else "in the same layout"
        compressed = plan.settings.layout.compress != "none"
        equal = "so gradients are compressed otherwise" if compressed else "so equal up to rounding"
        rounded = f"in another layout, {equal} ({'; '.join(changes)})"
        parts.append(f"going on from step {note.step}, {rounded if changes else exact}")
    return "; ".join(parts)
