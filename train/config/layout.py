"""The section `[layout]`: how the model and the batch are split over ranks; only compression enters the mathematics."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config import Section, execution

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The axes of the mesh, outermost first: neighbours in rank talk most."""
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]

SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights apart."""
MICRO_BATCH = 8
"""Rows of a micro-batch where neither a recipe nor a search chooses them."""
CHUNK_TOKENS = {"cpu": 1024, "cuda": 4096}
"""Tokens whose logits exist at once, by type of device."""


class LayoutConfig(Section):
    """Axes, memory and compression. The product of the axes is the number of ranks; `shard` takes what is left."""

    data: Literal["ddp", "zero1", "zero2", "zero3"] = execution("zero3")
    """What the data-parallel ranks share out: nothing; optimiser states; and gradients; and weights.

    zero2 and zero3 are FSDP2 without and with weights freed behind the forward pass. Sources: Rajbhandari et al. 2020
    (ZeRO), arXiv 1910.02054; Zhao et al. 2023 (FSDP), arXiv 2304.11277."""
    replicate: int = execution(1, ge=1)
    """Copies of the sharded model (HSDP): gradients are reduced within a copy first, then between copies."""
    shard: int | None = execution(None, ge=1)
    """Ranks that share one copy; None = all that the other axes leave."""
    context: int = execution(1, ge=1)
    """Ranks that share a sequence."""
    context_by: Literal["heads", "keys"] = execution("heads")
    """heads: all-to-all, each rank sees whole sequences of some heads (Jacobs et al. 2023, Ulysses, arXiv 2309.14509);
    keys: every rank gathers the keys and values of the sequence (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    tensor: int = execution(1, ge=1)
    """Ranks that share every matrix, and the sequence between them.

    Sources: Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2."""
    pipeline: int = execution(1, ge=1)
    """Ranks that share the layers."""
    schedule: PipelineSchedule = execution("1f1b")
    """Order of the micro-batches in a pipeline. Sources: Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021,
    arXiv 2104.04473 (1F1B, interleaved); Qi et al. 2023, arXiv 2401.10241 (zero bubble, ZBV)."""
    stages_per_rank: int | None = execution(None, ge=1)
    """Stages of a pipeline on each rank; None = 2 for interleaved, zero_bubble and zbv, else 1."""
    micro_batch: int | None = execution(None, ge=1)
    """Sequences per rank that go through the model at once; None = chosen by the search for a layout, else 8."""
    activation_checkpointing: Literal["none", "full", "selective", "budget"] = execution("none")
    """What is computed again in the backward pass: nothing; whole layers; all but matrix products and attention; as
    many whole layers as `activation_budget` asks for."""
    activation_budget: int | None = execution(None, ge=1)
    """budget: most bytes of activations kept on a rank."""
    offload: bool = execution(False)
    """Whether weights, gradients and optimiser states of zero2 and zero3 lie in the host's memory."""
    compile: bool | Literal["auto"] = execution("auto")
    """Whether layers are compiled by torch.compile. auto: on a CUDA device, unless the schedule is zero_bubble or zbv,
    whose backward pass torch.compile cannot split."""
    chunk_tokens: int | None = execution(None, ge=1)
    """Tokens whose logits exist at once; None = 1024 on a CPU, whose caches hold them (1 to 10 % of the loss, measured
    at 4,096 to 128,000 ids), and 4096 on a GPU."""
    compress: Literal["none", "fp16", "bf16", "powersgd", "topk", "randomk"] = "none"
    """Compression of gradients between replicas (`ddp`, or the `replicate` axis)."""
    compress_rank: int = Field(default=4, ge=1)
    """powersgd: rank of the approximation. Source: Vogels et al. 2019, arXiv 1905.13727."""
    compress_share: float = Field(default=0.01, gt=0, le=1)
    """topk, randomk: share of the numbers that are sent. Source: Stich et al. 2018, arXiv 1809.07599."""

    @model_validator(mode="after")
    def _used(self) -> "LayoutConfig":
        """Refuse what would be ignored or cannot stand together."""
        sharded = self.data in ("zero2", "zero3")
        problems = [
            (self.replicate > 1 and not sharded, f"replicate = {self.replicate} wants data = zero2 or zero3"),
            (self.offload and not sharded, "offload wants data = zero2 or zero3"),
            (
                not sharded and max(self.context, self.tensor, self.pipeline) > 1,
                f"data = {self.data} stands alone: context, tensor and pipeline want zero2 or zero3",
            ),
            (
                self.schedule in ("zero_bubble", "zbv") and self.data == "zero3",
                f"schedule = {self.schedule} wants data = zero2: its second backward pass needs the weights still",
            ),
            (
                self.pipeline == 1 and self._given("schedule", "stages_per_rank"),
                "schedule and stages_per_rank want pipeline > 1",
            ),
            (self.context == 1 and self._given("context_by"), "context_by wants context > 1"),
            (
                (self.activation_checkpointing == "budget") != (self.activation_budget is not None),
                "activation_budget and activation_checkpointing = budget want each other",
            ),
            (self.compress != "none" and sharded and self.replicate == 1, "compress wants data = ddp or replicate > 1"),
            (self.compress != "none" and self.data == "zero1", "compress wants data = ddp or replicate > 1"),
            (self.compress != "powersgd" and self._given("compress_rank"), "compress_rank wants compress = powersgd"),
            (
                self.compress not in ("topk", "randomk") and self._given("compress_share"),
                "compress_share wants compress = topk or randomk",
            ),
        ]
        if found := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(found))
        return self

    def _given(self, *names: str) -> bool:
        return any(getattr(self, name) != type(self).model_fields[name].default for name in names)

    def chunk_on(self, device: str) -> int:
        """`chunk_tokens` on a type of device."""
        return self.chunk_tokens or CHUNK_TOKENS.get(device, CHUNK_TOKENS["cuda"])

    def for_device(self, kind: str) -> "LayoutConfig":
        """The same without anything automatic, for a type of device; equal if nothing was automatic."""
        found: dict[str, Any] = {}
        if self.compile == "auto":
            found["compile"] = kind == "cuda" and self.schedule not in SPLIT_BACKWARD
        if self.micro_batch is None:
            found["micro_batch"] = MICRO_BATCH
        return self.model_copy(update=found) if found else self

    @property
    def rows_at_once(self) -> int:
        """`micro_batch`. Raises ValueError if it is not chosen yet."""
        if self.micro_batch is None:
            raise ValueError("layout.micro_batch: expected a number of rows, got None. Call for_device first.")
        return self.micro_batch

    @property
    def stages(self) -> int:
        """Stages of the pipeline on each rank."""
        several = self.schedule in ("interleaved", "zero_bubble", "zbv")
        return self.stages_per_rank or (2 if several and self.pipeline > 1 else 1)
