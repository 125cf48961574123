"""Devices that a layout can be searched for: what they compute, hold and send, each number with its source.

Peaks are dense, without sparsity; bandwidths of links are those of one device in one direction. Shares say how much of
a peak the best kernels reach in practice: they are judgement, not data sheet. `calibrate` measures all of it instead.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ConfigError

# A device in numbers: what it computes, holds and sends, and the peak that an MFU is a share of.

Number = Literal["fp32", "bf16", "fp16", "fp8"]


class Link(BaseModel):
    """How devices talk."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    bandwidth: float = Field(gt=0)
    """What one device sends [bytes/s], while it receives as much."""
    latency: float = Field(ge=0)
    """Seconds of each hop of a ring."""


class Device(BaseModel):
    """One device; of a CPU the share of the machine that one rank has."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """As it is asked for."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """What memory is counted for."""
    peak_flops: dict[Number, float]
    """Dense matrix products by number format [FLOP/s]; a format that is absent cannot be used."""
    product_share: float = Field(gt=0, le=1)
    """Share of the peak that a large product of matrices reaches."""
    attention_share: float = Field(gt=0, le=1)
    """Share of it that fused attention reaches, forward and backward, of the pairs that are seen."""
    memory_bytes: int = Field(gt=0)
    """Memory of a device."""
    memory_bandwidth: float = Field(gt=0)
    """Bytes/s to and from it."""
    traffic_share: float = Field(gt=0, le=1)
    """Share of that bandwidth which element-wise operations reach."""
    by_size: tuple[tuple[int, float], ...] = ()
    """Bandwidth by the bytes of a tensor, rising, where caches make it another: what element-wise operations reach."""
    page_seconds: float = Field(default=0.0, ge=0)
    """What a byte costs that the system hands out anew, as a CPU's allocator has it do for every large tensor."""
    op_seconds: float = Field(ge=0)
    """What an operation costs on the device before it computes anything."""
    host_seconds: float = Field(ge=0)
    """What it costs the host, which runs ahead of a GPU: a layer takes no less than its operations times this."""
    collective_seconds: float = Field(ge=0)
    """What a collective costs before anything is sent."""
    within: Link
    """Between the devices of a node."""
    between: Link
    """Between nodes, a device's share of its node's adapters."""
    overlap: float = Field(ge=0, le=1)
    """Share of the computation that can hide what is sent for weights and gradients."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None = 8.0 or newer, or no CUDA device."""
    gpus_per_node: int = Field(ge=1)
    """Devices that `within` joins, unless the cluster says otherwise."""
    at_once: int | None = Field(default=None, ge=1)
    """Ranks of a node that compute at this speed at once, where they share its cores; None = every one."""
    layer_seconds: dict[str, float] = Field(default_factory=dict)
    """What a layer costs forward and backward with hardly anything in it, where that was measured: by whether it is
    `plain`, wrapped by FSDP (`sharded`), or made of shared matrices (`tensor`); and a micro-batch `outside` of them."""
    source: str
    """Where peak, memory and bandwidths come from."""
    uncertain: str = ""
    """What of it should be checked before money is spent."""

    @property
    def reserved(self) -> int:
        """Bytes that no tensor can use: the CUDA context, buffers of NCCL, and what the allocator leaves unused."""
        return round(0.08 * self.memory_bytes) if self.kind == "cuda" else 0

    def utilisation_peak(self, precision: Number) -> float:
        """FLOP/s that an MFU is a share of: on a GPU the dense bf16 peak, whatever `precision` a run computes in.

        So runs in several formats compare. On a CPU, whose bf16 may be slower than its fp32, it is the format's own; so
        it is on a GPU without bf16.
        """
        if self.kind == "cuda" and "bf16" in self.peak_flops:
            return self.peak_flops["bf16"]
        return self.peak_flops.get(precision, max(self.peak_flops.values()))


PROFILE_VERSION = 1
"""Version of the file that calibration writes."""


def _gpu(name: str, peaks: tuple[float, float | None], memory: tuple[float, float], **others: object) -> Device:
    """A GPU: peaks of 16 bits and fp8 [TFLOP/s]; memory [GB] and its bandwidth [TB/s].

    Products in fp32 are computed in TF32, whose dense peak the data sheets give as half that of 16 bits.
    """
    half, eighth = peaks
    flops = {"fp32": 1e12 * half / 2, "bf16": 1e12 * half, "fp16": 1e12 * half}
    if eighth is not None:
        flops["fp8"] = 1e12 * eighth
    given: dict[str, object] = {
        "name": name,
        "peak_flops": flops,
        "memory_bytes": round(1e9 * memory[0]),
        "memory_bandwidth": 1e12 * memory[1],
        "product_share": 0.58,
        "attention_share": 0.25,
        "traffic_share": 0.65,
        "op_seconds": 4e-6,
        "host_seconds": 8e-6,
        "collective_seconds": 1.5e-5,
        "overlap": 0.85,
        "gpus_per_node": 8,
    }
    return Device.model_validate(given | others)


def _link(gigabytes: float, microseconds: float) -> Link:
    return Link(bandwidth=1e9 * gigabytes, latency=1e-6 * microseconds)


SHARES = "shares and latencies are judgement"
INFINIBAND_400 = _link(45, 5)
"""400 Gb/s for each GPU (ConnectX-7), nine tenths of it."""
INFINIBAND_200 = _link(22, 5)
"""200 Gb/s for each GPU (ConnectX-6), nine tenths of it."""
ETHERNET = _link(2.8, 20)
"""25 Gb/s for each GPU, nine tenths of it: a node without InfiniBand."""
TABLE: tuple[Device, ...] = (
    _gpu(
        "a100-40gb",
        (312, None),
        (40, 1.555),
        product_share=0.7,
        attention_share=0.45,
        within=_link(240, 2),
        between=INFINIBAND_200,
        source="NVIDIA A100 data sheet (SXM4 40 GB): 312 TFLOP/s bf16, 1,555 GB/s, NVLink 600 GB/s both ways",
        uncertain=SHARES,
    ),
    _gpu(
        "a100-80gb",
        (312, None),
        (80, 2.039),
        product_share=0.7,
        attention_share=0.45,
        within=_link(240, 2),
        between=INFINIBAND_200,
        source="NVIDIA A100 data sheet (SXM4 80 GB): 312 TFLOP/s bf16, 2,039 GB/s, NVLink 600 GB/s both ways",
        uncertain=SHARES,
    ),
    _gpu(
        "l40s",
        (362, 733),
        (48, 0.864),
        within=_link(20, 5),
        between=ETHERNET,
        product_share=0.55,
        source="NVIDIA L40S data sheet: 362 TFLOP/s bf16, 864 GB/s, PCIe 4.0 x16 64 GB/s both ways",
        uncertain=f"the adapter between nodes; {SHARES}",
    ),
    _gpu(
        "h100-pcie",
        (756, 1513),
        (80, 2.0),
        product_share=0.55,
        within=_link(40, 4),
        between=INFINIBAND_200,
        source="NVIDIA H100 data sheet (PCIe): 756 TFLOP/s bf16, 2 TB/s, PCIe 5.0 x16 128 GB/s both ways",
        uncertain=f"NVLink bridges between pairs are not counted; {SHARES}",
    ),
    _gpu(
        "h100-sxm",
        (989.4, 1978.9),
        (80, 3.35),
        within=_link(360, 2),
        between=INFINIBAND_400,
        source="NVIDIA H100 data sheet (SXM5): 989.4 TFLOP/s bf16, 3.35 TB/s, NVLink 900 GB/s both ways",
        uncertain=SHARES,
    ),
    _gpu(
        "h200",
        (989.4, 1978.9),
        (141, 4.8),
        within=_link(360, 2),
        between=INFINIBAND_400,
        source="NVIDIA H200 data sheet (SXM): 989.4 TFLOP/s bf16, 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways",
        uncertain=SHARES,
    ),
    _gpu(
        "b200",
        (2250, 4500),
        (180, 7.7),
        product_share=0.55,
        attention_share=0.22,
        within=_link(720, 2),
        between=INFINIBAND_400,
        source="NVIDIA DGX B200 data sheet: 72 PFLOP/s fp8 sparse over 8 GPUs, 1,440 GB, 64 TB/s, NVLink 1.8 TB/s",
        uncertain=f"memory a GPU sees (180 to 192 GB by system); {SHARES}",
    ),
    Device(
        name="cpu",
        kind="cpu",
        peak_flops={"fp32": 1.5e11, "bf16": 1.5e11, "fp16": 1.5e11},
        product_share=0.8,
        attention_share=0.4,
        memory_bytes=4_000_000_000,
        memory_bandwidth=1.5e10,
        traffic_share=0.8,
        op_seconds=8e-6,
        host_seconds=0,
        collective_seconds=3e-4,
        within=_link(1.5, 100),
        between=_link(0.1, 200),
        overlap=0,
        gpus_per_node=1,
        source="one core with AVX-512 at about 2.4 GHz (64 FLOP a cycle) and gloo over loopback",
        uncertain="all of it: calibrate this machine instead",
    ),
)
"""What is known without a measurement; prices differ by seller and day, and are left to who pays."""


def device_of(name: str) -> Device:
    """The device of a name in the table, or of a profile that calibration wrote, named by its path.

    Raises ConfigError with the nearest names if there is none.
    """
    if name.endswith(".json"):
        return read_profile(Path(name))
    known = {device.name: device for device in TABLE}
    if name.lower() in known:
        return known[name.lower()]
    near = _nearest(name.lower(), list(known))
    raise ConfigError(
        f"device: expected one of {', '.join(known)}, or a profile FILE.json, got {name}. "
        f"Did you mean {' or '.join(near)}?"
    )


WORDS = {
    "h200": "h200",
    "h100 80gb hbm3": "h100-sxm",
    "h100 pcie": "h100-pcie",
    "a100-sxm4-80gb": "a100-80gb",
    "a100 80gb pcie": "a100-80gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-pcie-40gb": "a100-40gb",
    "l40s": "l40s",
    "b200": "b200",
}
"""Names that the CUDA driver gives, without the maker's, and those of the table."""


def device_named(name: str) -> Device | None:
    """The device of the table that the CUDA driver calls `name`, such as NVIDIA H100 80GB HBM3; None = not in it."""
    found = WORDS.get(name.lower().removeprefix("nvidia "))
    return next((device for device in TABLE if device.name == found), None)


def _nearest(name: str, known: list[str]) -> list[str]:
    """Known names that begin alike, else those spelt most alike."""
    alike = [each for each in known if each.startswith(name) or name.startswith(each.partition("-")[0])]
    return alike or difflib.get_close_matches(name, known, 3, 0.0)


def read_profile(path: Path) -> Device:
    """The device that calibration has measured. Raises ConfigError if the file is not a profile."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("version") != PROFILE_VERSION:
            found = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
            raise ConfigError(f"{path}: expected a profile of version {PROFILE_VERSION}, got {found}. Calibrate again.")
        return Device.model_validate(raw["device"])
    except OSError as error:
        raise ConfigError(f"{path}: expected a device profile, got {error.strerror}. Calibrate first.") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, ValidationError) as error:
        raise ConfigError(f"{path}: expected a device profile, got {error}. Calibrate again.") from error


def write_profile(device: Device, path: Path) -> None:
    """Write what was measured so that `device_of` reads it by the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {"version": PROFILE_VERSION, "device": device.model_dump(mode="json")}
    path.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, in nodes of as many."""

    device: Device
    gpus_per_node: int
    nodes: int

    @classmethod
    def of(cls, device: str, gpus: int | None = None, nodes: int = 1) -> "Cluster":
        """`nodes` nodes of `gpus` devices each; None = as many as the device's usual node has.

        Raises ConfigError if the device is not known, or if there is none of them.
        """
        found = device_of(device)
        per_node = found.gpus_per_node if gpus is None else gpus
        if per_node < 1 or nodes < 1:
            raise ConfigError(f"cluster: expected a device at least, got {nodes} node(s) of {per_node}. Raise both.")
        return cls(found, per_node, nodes)

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.gpus_per_node * self.nodes

    def __str__(self) -> str:
        return f"{self.world_size} {self.device.name}, {self.nodes} node(s) of {self.gpus_per_node}"


def device_lines() -> Iterator[str]:
    """The table as text, a line for each device."""
    for device in TABLE:
        peaks = ", ".join(f"{name} {flops / 1e12:g}" for name, flops in device.peak_flops.items())
        memory = f"{device.memory_bytes / 1e9:g} GB at {device.memory_bandwidth / 1e12:.3g} TB/s"
        links = f"{device.within.bandwidth / 1e9:g} and {device.between.bandwidth / 1e9:g} GB/s"
        source = f"{device.source}. Uncertain: {device.uncertain}."
        yield f"{device.name:<10} {peaks} TFLOP/s; {memory}; links {links}. {source}"
