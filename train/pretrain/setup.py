"""The preparation of a training run: settings, plan, data and checkpoint are checked before anything is changed.

Rank 0 checks for all ranks, so that each error is printed once and no rank waits for another.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from schemas.errors import ConfigError, ContractError
from schemas.logs import log_words, show
from schemas.manifest import MANIFEST_NAME as TABLE_MANIFEST
from schemas.manifest import RUN_NAME
from schemas.overrides import override_words
from schemas.paths import PLAN_NAME, check_own_folders
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import (
    CheckpointMetadata,
    Layout,
    check_identity,
    check_skips,
    identify,
    list_checkpoints,
    remove_incomplete,
    settings_at_start,
)
from train.checkpoint.state import layout_of
from train.config.settings import Settings
from train.config.train import ProfileWindow, parse_window
from train.data.batches import Batches
from train.data.mapped import map_dataset, with_manifest, write_mapped
from train.data.packing import packed_files, write_packing
from train.data.verify import ExpectedFile, dataset_files, join_shares, verify_files, verify_share
from train.dataset_history import comparable_digest
from train.model.fp8 import check_fp8
from train.monitor.metrics import MANIFEST_NAME, read_train_manifest
from train.monitor.wandb_log import check_wandb
from train.parallel.devices import RunDevices, peak_of_devices, unknown_peak
from train.parallel.layout import axes_of
from train.parallel.pipeline import check_schedule
from train.parallel.ranks import FirstRankFailed, Ranks, default_threads
from train.plan.plan import (
    Plan,
    check_document_mask,
    check_ranks,
    open_order,
    planned_layouts,
    read_plan,
    verify_plan,
    write_plan,
)
from train.remote.ahead import ReadAhead, ShardUse, check_bound
from train.remote.cache import ShardCache, cached, uncached
from train.remote.work import WorkFolder, check_cache_given, work_folder
from train.takedown_replay import record_restart


@dataclass(frozen=True)
class TrainingSetup:
    """A training run whose settings, data and checkpoint have passed the checks of `check_run`."""

    run: Store
    plan: Plan
    dataset: Dataset
    layout: Layout
    checkpoint: CheckpointMetadata | None
    """The checkpoint to resume from; None = start from step 0."""
    done: bool
    """True if the run is complete and its manifest exists."""
    window: ProfileWindow | None
    """The steps to profile on this rank; None = no step."""
    work: WorkFolder
    """The local folder of the run's logs and new checkpoints."""
    cache: ShardCache | None = None
    """The cache of the dataset's shards; None = they are read where they are."""
    peak_flops: float | None = None
    """Peak throughput of a device, the denominator of MFU [FLOP/s]; None = unknown."""

    @property
    def settings(self) -> Settings:
        """Return the settings of the plan."""
        return self.plan.settings

    def open_batches(self) -> Batches:
        """Return the reader of the run's batches, with the current skip list applied."""
        batches = Batches(self.dataset, self.settings.train, open_order(self.run, self.dataset, self.plan))
        if self.cache is not None:  # held-out shards are read before `read_ahead` closes any
            self.cache.on_full = lambda: batches.close_shards(frozenset())
        return batches

    def open_uncached_batches(self) -> Batches:
        """Return a reader of the same batches that needs no room in the cache, which those of the run may fill."""
        dataset = uncached(self.dataset)
        return Batches(dataset, self.settings.train, open_order(self.run, dataset, self.plan))

    def read_ahead(self, batches: Batches) -> ReadAhead | None:
        """Start to download shards into the cache, in the order in which `batches` reads them; None without a cache."""
        if self.cache is None:
            return None
        use = ShardUse(self.dataset, open_order(self.run, self.dataset, self.plan))
        return ReadAhead(self.cache, use, batches, self.plan.steps, self.run.uri)


CheckedRun = tuple[Plan, CheckpointMetadata | None, list[str]]
"""The plan of a run, the checkpoint to resume from (None = there is none), and the warnings to print."""


def check_run(run: Store, overrides: Sequence[str], ranks: Ranks) -> CheckedRun:
    """Check the settings, devices and checkpoint of a run; called on rank 0 only. Nothing is changed.

    Return the plan, the checkpoint to resume from (None = there is none), and the warnings to print.
    """
    check_own_folders(run, "train")
    dataset, here = open_dataset(run), devices_of(ranks)
    plan, lines = current_plan(run, dataset, overrides, here)
    settings = plan.settings
    check_cache_given(run, settings.train)
    check_ranks(plan, ranks.world_size)
    if settings.train.precision == "fp8":
        check_fp8(ranks.device)
    check_schedule(settings.layout)
    check_wandb(settings.train)
    parse_window(settings.train.profile, plan.steps)
    order = open_order(run, dataset, plan)
    skip = order.skip
    checkpoints = list_checkpoints(run)
    checkpoint = checkpoints[-1] if checkpoints else None
    identity = identify(dataset, plan, skip)
    if checkpoint is not None:
        seen = comparable_digest(run, dataset, (checkpoint.name, checkpoint.step), checkpoint.identity.dataset)
        check_identity(checkpoint, identity.model_copy(update={"dataset": seen}))
        check_skips(checkpoint, plan, skip)
    if (cache := _open_cache(dataset, settings)) is not None:
        check_bound(dataset, order, cache.num_bytes, evaluates=settings.train.eval_every > 0)
    return plan, checkpoint, [*lines, *unknown_peak(settings, here)]


def begin_run(run: Store, checked: CheckedRun) -> bool:
    """Remove what a killed process left, write the plan, and print the warnings; return True if the run is complete.

    Called on rank 0 only.
    """
    plan, checkpoint, lines = checked
    done = checkpoint is not None and _is_done(run, checkpoint)
    if not done:
        run.delete(MANIFEST_NAME)
    remove_incomplete(run)
    if checkpoint is None:
        record_restart(run, plan)
    write_plan(run, plan.model_copy(update={"settings": _stored(plan.settings), "layouts": planned_layouts(run)}))
    for line in () if done else lines:
        show(f"penstock: {line}", logging.WARNING)
    return done


def current_plan(run: Store, dataset: Dataset, overrides: Sequence[str], here: RunDevices) -> tuple[Plan, list[str]]:
    """Return the plan for these settings and devices, and the warnings of the planner to print.

    The stored plan is used if it has these settings; otherwise a new plan is made. Raises ConfigError if a setting is
    wrong, ContractError if `plan.json` does not match the dataset.
    """
    settings = settings_at_start(run, dataset, overrides, here)
    resolved = settings.for_device(here.kind, here.capability)
    if run.exists(PLAN_NAME):
        plan = read_plan(run, dataset)
        if plan.settings.to_json() == _stored(resolved).to_json():
            write_packing(run, dataset, resolved.train)
            check_document_mask(plan.shape, resolved, here.kind)
            verify_plan(run, dataset, plan)
            return plan.model_copy(update={"settings": resolved}), []
    return call_planner(run, overrides, here)


def _stored(settings: Settings) -> Settings:
    """Return the settings as the plan stores them: without `train.profile`, which applies to one start only."""
    return settings.model_copy(update={"train": settings.train.model_copy(update={"profile": ""})})


def call_planner(run: Store, overrides: Sequence[str], here: RunDevices) -> tuple[Plan, list[str]]:
    """Run `python -m train.plan` in a process of its own; return its plan and its warnings to print.

    Raises ConfigError or ContractError with the planner's message.
    """
    words = override_words(overrides)
    devices = TypeAdapter(RunDevices).dump_json(here).decode()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        # -P: a `train.py` in the current folder does not hide ours.
        command = [sys.executable, "-P", "-m", "train.start", "--quiet", *log_words(), "train.plan", run.address]
        command += ["--devices", devices, "--out", str(out), *words]
        code = subprocess.run(command, check=False).returncode
        if code not in (0, 2) or not out.exists():
            raise RuntimeError(f"train.plan: expected exit code 0, got {code}. Its error is printed above.")
        answer = json.loads(out.read_text(encoding="utf-8"))
    if code:
        raise (ContractError if answer["error"] == ContractError.__name__ else ConfigError)(answer["message"])
    return Plan.model_validate(answer["plan"]), answer["lines"]


def devices_of(ranks: Ranks) -> RunDevices:
    """Return the type, compute capability, name and number of the devices of these ranks."""
    cuda = ranks.device.type == "cuda"
    capability = torch.cuda.get_device_capability(ranks.device) if cuda else None
    name = torch.cuda.get_device_name(ranks.device) if cuda else ""
    return RunDevices(ranks.device.type, capability, name, ranks.world_size, ranks.local_size)


def _is_done(run: Store, checkpoint: CheckpointMetadata) -> bool:
    if not run.exists(MANIFEST_NAME):
        return False
    manifest = read_train_manifest(run)
    identity = checkpoint.identity
    named = (manifest.steps, manifest.plan, manifest.skip_list, manifest.dataset)
    return named == (checkpoint.step, identity.plan, identity.skip_list, identity.dataset)


def prepare(run: Store, overrides: Sequence[str], ranks: Ranks) -> TrainingSetup:
    """Check the run on rank 0 and its data on every machine, then open it on every rank.

    Raises ConfigError or ContractError if a check fails.
    """
    checked = ranks.on_first(lambda: check_run(run, overrides, ranks))
    (plan, checkpoint, _), dataset = checked, open_dataset_once(run, ranks)
    packed, cache = packed_files(run, dataset, plan.settings.train), _open_cache(dataset, plan.settings)
    if cache is None:
        verify_on_ranks(run, dataset, packed, ranks)
    else:  # files of the dataset are compared when they are copied or opened
        ranks.on_first(lambda: verify_files(run, dataset.folder.uri, packed))
    done = ranks.on_first(lambda: begin_run(run, checked))
    layout = plan.settings.layout
    current = layout_of(layout, axes_of(layout, ranks.world_size), default_threads(ranks), ranks.device.type)
    # The number of threads changes the last bits of sums, so a run that resumes with as many ranks keeps it.
    if checkpoint is not None and checkpoint.layout.ranks == ranks.world_size:
        current = current.model_copy(update={"threads": checkpoint.layout.threads})
    window = parse_window(plan.settings.train.profile, plan.steps) if ranks.rank == 0 else None
    peak = peak_of_devices(plan.settings, devices_of(ranks))
    work = work_folder(run, plan.settings.train)
    if ranks.leads_node and not done:
        work.clear()
    ranks.on_first(work.fetch)
    if cache is not None:
        dataset = cached(dataset, cache)
        if ranks.leads_node:
            cache.remove_older()
    return TrainingSetup(run, plan, dataset, current, checkpoint, done, window, work, cache, peak)


def _open_cache(dataset: Dataset, settings: Settings) -> ShardCache | None:
    """Return the cache of a dataset's shards on this machine; None without `train.cache_dir`."""
    train = settings.train
    return ShardCache(Path(train.cache_dir), dataset, train.cache_bytes) if train.cache_dir else None


def open_dataset_once(run: Store, ranks: Ranks) -> Dataset:
    """Return the dataset of a run; one rank of each machine reads its manifest, and the others map what it writes."""
    if ranks.world_size == 1:
        return open_dataset(run)
    # A name that no other program can know before the file exists.
    path = Path(tempfile.gettempdir()) / f"penstock-{ranks.on_first(lambda: uuid4().hex)}.arrow"
    own = open_dataset(run) if ranks.leads_node else None
    try:
        if own is not None:
            try:
                write_mapped(own, path)
            except OSError:  # without space for the file, every rank reads the manifest
                path.unlink(missing_ok=True)
        ranks.total(0)  # each leader has written its file
        mapped = map_dataset(path) if path.exists() else None
        ranks.total(0)  # each rank has mapped it
    finally:
        if own is not None:
            path.unlink(missing_ok=True)
    if mapped is None:
        return own or open_dataset(run)
    return with_manifest(mapped, own) if own is not None else mapped


# The check of the data: machines that see the same files share them. They are found by the inodes and change times of
# manifests, which all machines see alike on a mounted folder, and which a copy on another disk does not have.

View = tuple[tuple[int, int] | None, ...]
"""Inode and change time of each file by which copies of a dataset differ; None = it is not on a local path."""


def verify_on_ranks(run: Store, dataset: Dataset, others: Iterable[ExpectedFile], ranks: Ranks) -> int:
    """Compare the files of a dataset, and `others`, with their SHA-256; return how many files had to be read.

    All ranks call it together. Machines that see the same files read a share each. A machine with copies of its own
    reads its own. Raises ContractError on the first rank that sees a wrong file, and FirstRankFailed on the others.
    """
    views = _gathered(view_of(run, dataset) if ranks.leads_node else None, ranks)
    mine = [rank for rank, view in enumerate(views) if view is not None and view == views[ranks.rank]]
    number, problem = 0, ""
    if ranks.leads_node:
        try:
            files = [*dataset_files(dataset), *others]
            number = verify_share(run, dataset.folder.uri, files, mine.index(ranks.rank), len(mine))
        except ContractError as error:
            problem = str(error)
    results: list[tuple[int, str]] = _gathered((number, problem), ranks)
    if mine and ranks.rank == mine[0]:
        join_shares(run)
        if problems := [text for text in (results[rank][1] for rank in mine) if text]:
            raise ContractError("\n".join(problems))
    if failed := next((text for _, text in results if text), ""):
        raise FirstRankFailed(failed)
    return sum(number for number, _ in results)


def view_of(run: Store, dataset: Dataset) -> View:
    """Return by what this machine's copies of a run and its dataset differ from other copies."""
    folders = (dataset.folder, dataset.tokenizer_folder, *(member.folder for member in dataset.members))
    files = [(run, RUN_NAME), *((folder, TABLE_MANIFEST) for folder in folders)]
    return tuple(_mark(folder, name) for folder, name in files)


def _mark(folder: Store, name: str) -> tuple[int, int] | None:
    if not folder.is_local or not folder.exists(name):
        return None
    status = os.stat(folder.path(name))
    return status.st_ino, status.st_ctime_ns


def _gathered(value: object, ranks: Ranks) -> list[Any]:
    """Return the values of all ranks, by rank."""
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=ranks.control)
    return values


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
