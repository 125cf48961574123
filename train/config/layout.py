"""The section `[layout]`: how model and batch are divided among ranks; only compression changes the results."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from schemas.config import Section, execution

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The axes of the mesh, outermost first. Ranks along the innermost axes are adjacent, and communicate most."""
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]

SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights separately."""
MICRO_BATCH = 8
"""Number of rows in a micro-batch, if neither the recipe nor a layout search sets it."""
CHUNK_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Number of tokens whose logits are in memory at once, by device type."""


Offload = Literal["none", "parameters", "optimizer", "all"]


def offload_of_older_version(value: Any) -> Any:
    """Return the value of `offload` that an older version wrote as a boolean."""
    return {False: "none", True: "all"}[value] if isinstance(value, bool) else value


class LayoutConfig(Section):
    """The sizes of the mesh axes, what ranks keep in memory, and the compression of gradients.

    The product of the sizes is the world size. By default `shard` is the world size divided by the other sizes.
    """

    data: Literal["ddp", "zero1", "zero2", "zero3"] = execution("zero3")
    """Tensors that are sharded over the data-parallel ranks. ddp: none; zero1: optimizer states; zero2: gradients too;
    zero3: weights too.

    zero2 and zero3 are FSDP2 without and with weights freed after the forward pass. Sources: Rajbhandari et al. 2020
    (ZeRO), arXiv 1910.02054; Zhao et al. 2023 (FSDP), arXiv 2304.11277."""
    replicate: int = execution(1, ge=1)
    """Number of copies of the sharded model (HSDP). Gradients are reduced within each copy, then between copies."""
    shard: int | None = execution(None, ge=1)
    """Number of ranks over which each copy of the model is sharded; None = world size divided by the other axes."""
    context: int = execution(1, ge=1)
    """Number of ranks over which the positions of each sequence are split."""
    context_by: Literal["heads", "keys"] = execution("heads")
    """How attention covers a sequence that is split over ranks.

    heads: all-to-all, each rank has whole sequences of some heads (Jacobs et al. 2023, Ulysses, arXiv 2309.14509);
    keys: all-gather of the sequence's keys and values (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    tensor: int = execution(1, ge=1)
    """Number of ranks over which every matrix of a layer is split; so is the sequence outside the matrices.

    Sources: Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2."""
    pipeline: int = execution(1, ge=1)
    """Number of ranks over which the layers are split."""
    expert_parallel: bool = execution(False)
    """Divide the experts of each layer among the ranks of `shard`, and send tokens to them by all-to-all. Without it,
    every rank gathers all experts. Source: Lepikhin et al. 2020, arXiv 2006.16668, section 3.2."""
    schedule: PipelineSchedule = execution("1f1b")
    """Order of the micro-batches in a pipeline. Sources: Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021,
    arXiv 2104.04473 (1F1B, interleaved); Qi et al. 2023, arXiv 2401.10241 (zero bubble, ZBV)."""
    stages_per_rank: int | None = execution(None, ge=1)
    """Pipeline stages on each rank; None = 2 for interleaved, zero_bubble and zbv, else 1."""
    micro_batch: int | None = execution(None, ge=1)
    """Sequences per rank in a forward and backward pass; None = set by the layout search, else 8."""
    activation_checkpointing: Literal["none", "full", "selective", "budget"] = execution("none")
    """What the backward pass recomputes instead of storing it. none: nothing; full: whole layers; selective: all but
    matrix products and attention; budget: as many whole layers as `activation_budget` requires."""
    activation_budget: int | None = execution(None, ge=1)
    """With activation_checkpointing = budget: maximum size of the activations that a rank stores [bytes]."""
    offload: Annotated[Offload, BeforeValidator(offload_of_older_version)] = execution("none")
    """What the host's memory keeps. parameters: weights and gradients; optimizer: optimizer states; all: all three.

    With all, the host computes updates. Otherwise the device does, and what is on the host is brought to it and back,
    a few parameters at a time. An older plan has false for none and true for all. Source: Rajbhandari et al. 2021,
    arXiv 2104.07857 (ZeRO-Infinity)."""
    offload_dir: str | None = execution(None)
    """With offload = optimizer or all: folder on a disk in which optimizer states are kept, such as `/nvme`; None = the
    host's memory. Each machine uses its own folder of this name."""
    offload_weights_dir: str | None = execution(None)
    """With offload = parameters or all: folder on a disk in which weights are kept, such as `/nvme`; None = the host's
    memory. Gradients stay in memory. A rank reads its weights for every micro-batch, twice with data = zero3, and
    writes them in every step. A parameter whose first dimension is not a multiple of the shards stays in memory."""
    compile: bool | Literal["auto"] = execution("auto")
    """Compile layers with torch.compile. auto: on a CUDA device, unless the schedule is zero_bubble or zbv, whose
    backward pass torch.compile cannot split, and not with expert_parallel, whose sizes change with each batch."""
    chunk_tokens: int | None = execution(None, ge=1)
    """Number of tokens whose logits are in memory at once; None = 1024 on a CPU, where they fit the caches (saves 1 to
    10 % of the loss's time, measured at 4,096 to 128,000 ids), and 8192 on a GPU (on an H200 with 50,304 ids, a
    loss of 4096 takes 4 to 7 % more time, and one of 16384 at most 4 % less for twice the memory)."""
    compress: Literal["none", "fp16", "bf16", "powersgd", "topk", "randomk"] = "none"
    """Compression of the gradients that replicas exchange: with data = ddp, or along the axis `replicate`."""
    compress_rank: int = Field(default=4, ge=1)
    """With compress = powersgd: rank of the low-rank approximation. Source: Vogels et al. 2019, arXiv 1905.13727."""
    compress_share: float = Field(default=0.01, gt=0, le=1)
    """With compress = topk or randomk: share of a gradient's elements that are sent. Source: Stich et al. 2018, arXiv
    1809.07599."""

    @model_validator(mode="after")
    def _used(self) -> "LayoutConfig":
        """Reject settings that would be ignored or contradict each other."""
        sharded = self.data in ("zero2", "zero3")
        problems = [
            (self.replicate > 1 and not sharded, f"replicate = {self.replicate} requires data = zero2 or zero3"),
            (
                self.offloads_parameters and not sharded,
                f"offload = {self.offload} requires data = zero2 or zero3, got {self.data}",
            ),
            (
                self.offload_dir is not None and not self.offloads_states,
                f"offload_dir requires offload = optimizer or all, got {self.offload}",
            ),
            (
                self.offload_weights_dir is not None and not self.offloads_parameters,
                f"offload_weights_dir requires offload = parameters or all, got {self.offload}",
            ),
            (
                not sharded and max(self.context, self.tensor, self.pipeline) > 1,
                f"context, tensor and pipeline require data = zero2 or zero3, got {self.data}",
            ),
            (
                self.schedule in ("zero_bubble", "zbv") and self.data == "zero3",
                f"schedule = {self.schedule} requires data = zero2: its second backward pass still needs the weights",
            ),
            (
                self.pipeline == 1 and self._given("schedule", "stages_per_rank"),
                "schedule and stages_per_rank require pipeline > 1",
            ),
            (self.context == 1 and self._given("context_by"), "context_by requires context > 1"),
            (
                self.expert_parallel and (not sharded or self.replicate > 1 or self.offload != "none"),
                "expert_parallel requires data = zero2 or zero3, replicate = 1 and no offload",
            ),
            (
                (self.activation_checkpointing == "budget") != (self.activation_budget is not None),
                "activation_budget and activation_checkpointing = budget require each other",
            ),
            (
                self.compress != "none" and sharded and self.replicate == 1,
                "compress requires data = ddp or replicate > 1",
            ),
            (self.compress != "none" and self.data == "zero1", "compress requires data = ddp or replicate > 1"),
            (
                self.compress != "powersgd" and self._given("compress_rank"),
                "compress_rank requires compress = powersgd",
            ),
            (
                self.compress not in ("topk", "randomk") and self._given("compress_share"),
                "compress_share requires compress = topk or randomk",
            ),
        ]
        if messages := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(messages))
        return self

    def _given(self, *names: str) -> bool:
        return any(getattr(self, name) != type(self).model_fields[name].default for name in names)

    def chunk_on(self, device: str) -> int:
        """Return `chunk_tokens`, or its default for a device type ("cpu", "cuda")."""
        return self.chunk_tokens or CHUNK_TOKENS.get(device, CHUNK_TOKENS["cuda"])

    def for_device(self, kind: str) -> "LayoutConfig":
        """Return a copy for a device type ("cpu", "cuda"), with values for `compile = auto` and for `micro_batch`."""
        changes: dict[str, Any] = {}
        if self.compile == "auto":
            changes["compile"] = kind == "cuda" and self.schedule not in SPLIT_BACKWARD and not self.expert_parallel
        if self.micro_batch is None:
            changes["micro_batch"] = MICRO_BATCH
        return self.model_copy(update=changes) if changes else self

    @property
    def offloads_parameters(self) -> bool:
        """True if gradients are in the host's memory, and weights there or on a disk."""
        return self.offload in ("parameters", "all")

    @property
    def offloads_states(self) -> bool:
        """True if optimizer states are in the host's memory or on a disk."""
        return self.offload in ("optimizer", "all")

    @property
    def rows_at_once(self) -> int:
        """The number of rows in a micro-batch. Raises ValueError if it is not set yet."""
        if self.micro_batch is None:
            raise ValueError(
                "layout.micro_batch: expected a number of rows, got None. Call LayoutConfig.for_device() first."
            )
        return self.micro_batch

    @property
    def stages(self) -> int:
        """The number of pipeline stages on each rank."""
        several = self.schedule in ("interleaved", "zero_bubble", "zbv")
        return self.stages_per_rank or (2 if several and self.pipeline > 1 else 1)
