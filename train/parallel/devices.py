"""The devices and clusters of the layout search: peaks, memory and links of each device, with the source.

The table is `devices.toml`. `penstock calibrate` writes a profile of a device with measured values.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, ValidationError

from schemas.errors import ConfigError
from train.config.settings import Settings

# The model of a device, and the table of known devices.

NumberFormat = Literal["fp32", "bf16", "fp16", "fp8"]


class Link(BaseModel):
    """A link between devices."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    bandwidth: float = Field(gt=0)
    """Bytes/s that a device sends while it receives the same number."""
    latency: float = Field(ge=0)
    """Seconds for each hop of a ring collective."""


class Device(BaseModel):
    """One device; for a CPU, the share of the machine that one rank uses."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name in settings and on the command line."""
    driver_names: tuple[str, ...] = Field(default=(), exclude=True)
    """Names from the CUDA driver, in lower case and without the manufacturer; a profile has none."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """Type of device, which decides how memory is counted."""
    peak_flops: dict[NumberFormat, float]
    """Peak of dense matrix products by number format [FLOP/s]; the device cannot compute in a format that is absent."""
    product_share: float = Field(gt=0, le=1)
    """Share of `peak_flops` that a large matrix product reaches."""
    attention_share: float = Field(gt=0, le=1)
    """Share of `peak_flops` that fused attention reaches, forward and backward, counting unmasked pairs only."""
    memory_bytes: int = Field(gt=0)
    """Memory of a device [bytes]."""
    memory_bandwidth: float = Field(gt=0)
    """Bandwidth of the device's memory [bytes/s]."""
    traffic_share: float = Field(gt=0, le=1)
    """Share of `memory_bandwidth` that element-wise operations reach."""
    by_size: tuple[tuple[int, float], ...] = ()
    """Bandwidth of element-wise operations by tensor size [bytes], increasing, where caches change it."""
    page_seconds: float = Field(default=0.0, ge=0)
    """Seconds per byte of page faults, which a CPU's allocator causes for every large tensor."""
    op_seconds: float = Field(ge=0)
    """Fixed time that every operation costs on the device [s]."""
    host_seconds: float = Field(ge=0)
    """Seconds to launch an operation on the host, which runs ahead of a GPU: a lower bound on a layer's time."""
    collective_seconds: float = Field(ge=0)
    """Startup time of a collective [s]."""
    within: Link
    """Link between the devices of a node."""
    between: Link
    """Link between nodes: a device's share of its node's adapters."""
    host_bandwidth: float = Field(default=2.5e10, gt=0)
    """Bandwidth that each device of a node has to the memory of the host [bytes/s]; the default is an estimate."""
    disk_bandwidth: float = Field(default=2e9, gt=0)
    """Bandwidth that each device of a node has to the local disks [bytes/s]; the default is an estimate: four NVMe
    disks of 4 GB/s for eight devices."""
    overlap: float = Field(ge=0, le=1)
    """Share of the computation that can overlap with communication of weights and gradients."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None = 8.0 or newer, or no CUDA device."""
    gpus_per_node: int = Field(ge=1)
    """Default number of devices per node, which are connected by `within`."""
    at_once: int | None = Field(default=None, ge=1)
    """Number of ranks that can compute at full rate at once, if the ranks of a node share its cores; None = all."""
    layer_seconds: dict[str, float] = Field(default_factory=dict)
    """Measured seconds of an almost empty layer, forward and backward: `plain`, wrapped by FSDP (`sharded`), or
    tensor-parallel (`tensor`); and of the rest of a micro-batch (`outside`)."""
    source: str
    """Source of the values for peak, memory and bandwidths."""
    uncertain: str = ""
    """Names of values that are uncertain and should be checked before money is spent."""

    @property
    def reserved(self) -> int:
        """Bytes that tensors cannot use: CUDA context, NCCL buffers and unused memory of the allocator; 0 on a CPU."""
        return round(0.08 * self.memory_bytes) if self.kind == "cuda" else 0

    def utilisation_peak(self, precision: NumberFormat) -> float:
        """Return the peak that MFU refers to [FLOP/s].

        On a GPU it is the dense bf16 peak, or that of fp16 without bf16, so that runs in different formats are
        comparable. On other devices it is the peak in `precision`.
        """
        halves = [self.peak_flops[number] for number in ("bf16", "fp16") if number in self.peak_flops]
        if self.kind == "cuda" and halves:
            return halves[0]
        # The bf16 of a CPU may be slower than its fp32.
        return self.peak_flops.get(precision, max(self.peak_flops.values()))


PROFILE_VERSION = 1
"""Version of the profile file that `penstock calibrate` writes."""


class SheetLink(BaseModel):
    """A link in the units of data sheets (GB/s and µs)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gb_per_s: PositiveFloat
    microseconds: NonNegativeFloat

    def link(self) -> Link:
        """Return the link converted to bytes/s and seconds."""
        return Link(bandwidth=1e9 * self.gb_per_s, latency=1e-6 * self.microseconds)


class DeviceSheet(BaseModel):
    """The table of a device in `devices.toml`, in the units of data sheets (TFLOP/s, GB, TB/s).

    Keys that are not fields of this class are fields of `Device`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    peak_tflops: dict[NumberFormat, PositiveFloat]
    memory_gb: PositiveFloat
    memory_tb_per_s: PositiveFloat
    within: SheetLink
    between: SheetLink

    def device(self, name: str) -> Device:
        """Return the device converted to FLOP/s, bytes and bytes/s."""
        fields = {
            **(self.model_extra or {}),
            "name": name,
            "peak_flops": {number: 1e12 * peak for number, peak in self.peak_tflops.items()},
            "memory_bytes": round(1e9 * self.memory_gb),
            "memory_bandwidth": 1e12 * self.memory_tb_per_s,
            "within": self.within.link(),
            "between": self.between.link(),
        }
        return Device.model_validate(fields)


def read_devices(path: Path) -> tuple[Device, ...]:
    """Return the devices of a TOML file in the order of the file.

    The table of a GPU inherits missing values from the table `[gpu]`. Raises ConfigError if a table is not valid.
    """
    content, devices = tomllib.loads(path.read_text(encoding="utf-8-sig")), []
    for name, table in content["devices"].items():
        common = {} if table.get("kind") == "cpu" else content["gpu"]
        try:
            devices.append(DeviceSheet.model_validate(common | table).device(name))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
            raise ConfigError(
                f"{path}: expected valid values in [devices.{name}], got {'; '.join(wrong)}. Correct the value "
                "there or in [gpu]."
            ) from error
    return tuple(devices)


KNOWN_DEVICES = read_devices(Path(__file__).with_name("devices.toml"))
"""The devices that can be named without a measured profile."""


def device_of(name: str) -> Device:
    """Return the device in KNOWN_DEVICES with this name, or the device of the profile file if `name` ends in .json.

    Raises ConfigError with the nearest names if the name is unknown.
    """
    if name.endswith(".json"):
        return read_profile(Path(name))
    known = {device.name: device for device in KNOWN_DEVICES}
    if name.lower() in known:
        return known[name.lower()]
    near = _nearest(name.lower(), list(known))
    raise ConfigError(
        f"device: expected one of {', '.join(known)}, or a profile FILE.json, got {name}. "
        f"Did you mean {' or '.join(near)}?"
    )


def device_named(name: str) -> Device | None:
    """Return the device that the CUDA driver calls `name`, such as NVIDIA H100 80GB HBM3; None = not known."""
    short = name.lower().removeprefix("nvidia ")
    return next((device for device in KNOWN_DEVICES if short in device.driver_names), None)


def _nearest(name: str, known: list[str]) -> list[str]:
    """Return the known names to suggest for an unknown name."""
    alike = [other for other in known if other.startswith(name) or name.startswith(other.partition("-")[0])]
    return alike or difflib.get_close_matches(name, known, 3, 0.0)


def read_profile(path: Path) -> Device:
    """Return the device of a profile that `penstock calibrate` wrote. Raises ConfigError if the file is not a
    profile."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("version") != PROFILE_VERSION:
            version = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
            raise ConfigError(
                f"{path}: expected a profile of version {PROFILE_VERSION}, got {version}. "
                f"Run `penstock calibrate {quote(str(path))}`."
            )
        return Device.model_validate(raw["device"])
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a device profile, got a file that cannot be read ({error.strerror}). "
            f"Run `penstock calibrate {quote(str(path))}`."
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, ValidationError) as error:
        raise ConfigError(
            f"{path}: expected a device profile, got invalid content ({error}). "
            f"Run `penstock calibrate {quote(str(path))}`."
        ) from error


def write_profile(device: Device, path: Path) -> None:
    """Write a device as a profile that `device_of` reads by its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {"version": PROFILE_VERSION, "device": device.model_dump(mode="json")}
    path.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind in nodes of equal size."""

    device: Device
    gpus_per_node: int
    nodes: int

    @classmethod
    def of(cls, device: str, gpus: int | None = None, nodes: int = 1) -> "Cluster":
        """Return a cluster of `nodes` nodes with `gpus` devices each.

        `gpus`: None = the default of the device. Raises ConfigError if the device is unknown, or if `gpus` or `nodes`
        is below 1.
        """
        known = device_of(device)
        per_node = known.gpus_per_node if gpus is None else gpus
        if per_node < 1 or nodes < 1:
            raise ConfigError(
                f"cluster: expected at least one device, got {nodes} node(s) of {per_node}. "
                "Set cluster.gpus and cluster.nodes to at least 1."
            )
        return cls(known, per_node, nodes)

    @property
    def world_size(self) -> int:
        """Total number of devices."""
        return self.gpus_per_node * self.nodes

    def __str__(self) -> str:
        return f"{self.world_size} {self.device.name}, {self.nodes} node(s) of {self.gpus_per_node}"


def device_lines() -> Iterator[str]:
    """Yield the table of known devices as text, one line for each device."""
    for device in KNOWN_DEVICES:
        peaks = ", ".join(f"{name} {flops / 1e12:g}" for name, flops in device.peak_flops.items())
        memory = f"{device.memory_bytes / 1e9:g} GB at {device.memory_bandwidth / 1e12:.3g} TB/s"
        links = f"{device.within.bandwidth / 1e9:g} and {device.between.bandwidth / 1e9:g} GB/s"
        source = f"{device.source}. Uncertain: {device.uncertain}."
        yield f"{device.name:<10} {peaks} TFLOP/s; {memory}; links {links}. {source}"


def number_format_of(settings: Settings) -> NumberFormat:
    """Return the number format of a run's matrix products. Raises ValueError if `train.precision` is still auto."""
    if settings.train.precision == "auto":
        raise ValueError("train.precision: expected a number format, got auto. Call Settings.for_device() first.")
    return settings.train.precision


# The devices that a plan names, and those that a run starts on.


def cluster_of(settings: Settings) -> Cluster | None:
    """Return the cluster that `[cluster]` describes; None if `cluster.device` is not set.

    Raises ConfigError with the nearest names if the device is unknown.
    """
    named = settings.cluster
    return Cluster.of(named.device, named.gpus, named.nodes) if named.device else None


def peak_of(settings: Settings) -> float | None:
    """Return the peak for MFU [FLOP/s]: that of `cluster.device`, else `train.peak_flops`. None if neither is set.

    Raises ConfigError if the device does not compute in the run's precision.
    """
    if not settings.cluster.device:
        return settings.train.peak_flops
    device = device_of(settings.cluster.device)
    precision = number_format_of(settings.with_precisions_for(device.kind, device.capability))
    if precision not in device.peak_flops:
        raise ConfigError(
            f"train.precision: expected a precision that {device.name} computes in ({', '.join(device.peak_flops)}), "
            f"got {precision}. Set train.precision to one of these."
        )
    return device.utilisation_peak(precision)


@dataclass(frozen=True)
class RunDevices:
    """The devices that a run starts on, all of the same kind."""

    kind: str
    """Type of device: cpu or cuda."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None = 8.0 or newer, or no CUDA device."""
    name: str = ""
    """Name from the CUDA driver; empty for a CPU."""
    ranks: int = 1
    """World size."""
    local_ranks: int = 1
    """Ranks per machine."""

    def __str__(self) -> str:
        return self.name or "a CPU"


def peak_of_devices(settings: Settings, here: RunDevices) -> float | None:
    """Return the peak FLOP/s of one device of the run, for MFU; None = unknown.

    `train.precision` must not be auto.
    """
    if settings.train.peak_flops is not None:
        return settings.train.peak_flops
    device = known_device(settings, here)
    return None if device is None else device.utilisation_peak(number_format_of(settings))


def unknown_peak(settings: Settings, here: RunDevices) -> list[str]:
    """Return one line to print if MFU cannot be shown because the peak of the GPU is unknown, else no line."""
    if here.kind != "cuda" or peak_of_devices(settings, here) is not None:
        return []
    return [
        f"MFU is not shown: the peak of {here} is not known. Set train.peak_flops, or name a profile of "
        "`penstock calibrate` as cluster.device."
    ]


def known_device(settings: Settings, here: RunDevices) -> Device | None:
    """Return the device of `[cluster]` if it has the type (cpu or cuda) of the run's devices.

    Otherwise return the known device with the run's driver name. None if no known device has that name.
    """
    try:
        planned = device_of(settings.cluster.device) if settings.cluster.device else None
    except ConfigError:  # the profile file exists only where the plan was made
        planned = None
    if planned is not None and planned.kind == here.kind:
        return planned
    return device_named(here.name) if here.kind == "cuda" else None
