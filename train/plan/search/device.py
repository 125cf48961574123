"""A device in numbers: what it computes, holds and sends, and the peak that an MFU is a share of."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
