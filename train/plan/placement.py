"""Resolve a plan for the devices that the run starts on: automatic settings, micro-batches and the peak for MFU."""

import math
from dataclasses import dataclass

from schemas.errors import ConfigError
from train.config.layout import MICRO_BATCH, LayoutConfig
from train.config.settings import Settings
from train.plan.figures import update_memory_figures
from train.plan.plan import Plan, check_document_mask
from train.plan.search.compute import number_format_of
from train.plan.search.devices import Cluster, Device, device_named, device_of
from train.plan.search.search import axes_as_settings, search


@dataclass(frozen=True)
class RunDevices:
    """The devices that a run starts on, all of the same kind."""

    kind: str
    """Type of device: cpu or cuda."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None = modern, or no CUDA device."""
    name: str = ""
    """Name from the CUDA driver; empty for a CPU."""
    ranks: int = 1
    """World size."""
    local_ranks: int = 1
    """Ranks per machine."""

    def __str__(self) -> str:
        return self.name or "a CPU"


def resolve_plan(plan: Plan, here: RunDevices) -> tuple[Plan, list[str]]:
    """Return the plan with every automatic setting resolved, and lines to print about what is unknown.

    If no micro-batch is set, it is searched for together with recomputation on a CUDA device of the table. Raises
    ConfigError if the device cannot train with these settings.
    """
    settings = plan.settings.with_precisions_for(here.kind, here.capability)
    check_document_mask(plan.shape, settings, here.kind)
    lines = []
    if settings.layout.micro_batch is None and here.kind == "cuda":
        layout = _fastest_layout(plan, settings, here)
        if layout is None:
            lines.append(
                f"{here}: expected a device of the table with memory for a micro-batch, got none; micro-batches have "
                f"{MICRO_BATCH} rows. Measure the device with `penstock calibrate FILE.json`, and plan with that file."
            )
        settings = settings.model_copy(update={"layout": layout or settings.layout})
    settings = settings.for_device(here.kind, here.capability)
    # On a CPU, MFU is shown only if a profile of the machine is named.
    if here.kind == "cuda" and peak_of_devices(settings, here) is None:
        lines.append(
            f"MFU is not shown: the peak of {here} is not known. Set train.peak_flops, or name a profile of "
            "`penstock calibrate` as cluster.device."
        )
    return update_memory_figures(plan.model_copy(update={"settings": settings})), lines


def peak_of_devices(settings: Settings, here: RunDevices) -> float | None:
    """Return the peak of each device that MFU refers to [FLOP/s]; None = unknown. The settings must be resolved."""
    if settings.train.peak_flops is not None:
        return settings.train.peak_flops
    device = known_device(settings, here)
    return None if device is None else device.utilisation_peak(number_format_of(settings))


def known_device(settings: Settings, here: RunDevices) -> Device | None:
    """Return the device of `[cluster]` if its kind matches, else the one of the driver's name; None if unknown."""
    try:
        planned = device_of(settings.cluster.device) if settings.cluster.device else None
    except ConfigError:  # the profile file exists only where the plan was made
        planned = None
    if planned is not None and planned.kind == here.kind:
        return planned
    return device_named(here.name) if here.kind == "cuda" else None


def _fastest_layout(plan: Plan, settings: Settings, here: RunDevices) -> LayoutConfig | None:
    """Return the layout with the fastest micro-batch and recomputation that fit; None: unknown device or none fits."""
    device = known_device(settings, here)
    if device is None:
        return None
    local = math.gcd(here.local_ranks, here.ranks)
    layout = settings.layout
    given = axes_as_settings(layout) | layout.model_dump(exclude_unset=True)
    fixed = settings.model_copy(update={"layout": LayoutConfig.model_validate(given)})
    best = search(plan.shape, fixed, plan.stages, Cluster(device, local, here.ranks // local), top=1).best
    if not best:
        return None
    fastest = best[0].layout
    chosen = {"micro_batch": fastest.micro_batch, "activation_checkpointing": fastest.activation_checkpointing}
    return layout.model_copy(update=chosen)
