"""The sections `[train]` (data, order, training stages; the plan replaces None), `[checkpoint]` and `[guard]`."""

import re
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from schemas.config import Section, execution, location
from schemas.errors import ConfigError


def _shares(weights: dict[str, float]) -> dict[str, float]:
    if weights and (min(weights.values()) < 0 or sum(weights.values()) <= 0):
        raise ValueError(
            f"expected weights of 0 or more, with at least one above 0, got {weights}. Set every weight in `weights` "
            "to 0 or more, and at least one above 0."
        )
    return weights


def _epochs(epochs: dict[str, float]) -> dict[str, float]:
    if epochs and (min(epochs.values()) < 0 or max(epochs.values()) <= 0):
        raise ValueError(
            f"expected epochs of 0 or more, with at least one above 0, got {epochs}. Set every entry of `epochs` to 0 "
            "or more, and at least one above 0."
        )
    return epochs


PACK_CHUNKS = 64
"""The value of `train.pack_chunks` in a new plan. A group of 64 chunks of 8,192 tokens is packed in about 1 ms."""
MIN_BF16_CAPABILITY, MIN_FP16_CAPABILITY = (8, 0), (7, 0)
"""Minimum CUDA compute capability at which precision = auto means bf16, and at which it means fp16."""
Shares = Annotated[dict[str, float], AfterValidator(_shares)]
"""Weight of each source: its share of the training tokens, relative to the sum of the weights."""
Epochs = Annotated[dict[str, float], AfterValidator(_epochs)]
"""Number of times that each source is read, also a fraction."""


class StageConfig(Section):
    """A training stage: a range of the run's tokens with its own settings, by default those of `[train]`, `[optim]`."""

    tokens: int | None = Field(None, ge=1)
    """Number of training tokens of the stage, rounded to whole steps; None = all that remain (last stage only)."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens in a sequence."""
    global_batch: int | None = Field(None, ge=1)
    """Sequences per step."""
    weights: Shares | None = None
    """Weight of each source: its share of the tokens of the stage; every source must be named."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate at the beginning of the stage, which then has its own schedule; None = the run's schedule
    continues."""
    schedule: Literal["cosine", "linear", "constant"] = "linear"
    """Schedule of the stage's own learning rate."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of the stage, as a share of the stage's `learning_rate`."""

    @model_validator(mode="after")
    def _used(self) -> "StageConfig":
        given = self.model_fields_set & {"schedule", "final_lr_share"}
        if self.learning_rate is None and given:
            raise ValueError(
                f"{' and '.join(sorted(given))}: expected a learning_rate in the same stage, got none. Set the stage's "
                "learning_rate."
            )
        return self


class TrainConfig(Section):
    """The training data and its order; content fields affect the trained weights, execution fields do not."""

    REPLACES: ClassVar = {"weights": {"epochs"}, "epochs": {"weights", "mix"}, "packing": {"pack_chunks"}}

    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the data order, of the initial weights and of the masks."""
    objective: Literal["causal", "mlm", "span"] = "causal"
    """causal: predict the next token; mlm: predict masked tokens, with attention to both sides (Devlin et al. 2018,
    arXiv 1810.04805); span: cut spans out of a sequence and predict them at its end (Raffel et al. 2019, arXiv
    1910.10683, section 3.1.4)."""
    mask_share: float = Field(0.15, gt=0, lt=1)
    """With objective = mlm or span: share of the tokens that are predicted. Source: Devlin et al. 2018, section 3.1."""
    mean_span: float = Field(3.0, ge=1)
    """With objective = span: mean length of a span [tokens]. Source: Raffel et al. 2019, section 3.3.4."""
    seq_len: int = Field(512, ge=1)
    """Number of dataset tokens in a sequence; a divisor of the dataset's chunk_tokens."""
    init_from: str = location("")
    """Weights to begin from, in place of random ones: the folder of a run (its newest checkpoint), a folder
    `train/checkpoints/step-…` of a run, or a folder of Hugging Face with config.json and safetensors (Llama, Qwen 3,
    GPT-2 or BERT). The model has the shape of the weights, and the optimizer starts from zero. Empty = random weights.
    The plan stores the digest of the weights, which decides the trained weights, not the path."""
    freeze: tuple[str, ...] = ()
    """Parameters that keep their initial values: names, beginnings of names such as `blocks.0`, or patterns such as
    `blocks.*.ffn`. They have no gradient and no optimizer state. Empty = all parameters are trained."""
    packing: Literal["stream", "best_fit"] = "stream"
    """stream: sequences are consecutive tokens of the stream; best_fit: documents are packed so that few are cut, and
    rows are padded. Source: Ding et al. 2024, arXiv 2404.10830."""
    pack_chunks: int | None = Field(None, ge=1, lt=1 << 53)
    """With packing = best_fit: number of neighbouring chunks whose documents are packed together. More chunks leave
    less padding: on lengths like those of FineWeb, 1 chunk of 8,192 tokens leaves 11 to 29 %, 64 chunks 0.2 to 1.5 %.
    None = 64, or 1 in a run that an earlier version planned."""
    document_mask: bool = True
    """Prevent attention between documents in a sequence; if false, tokens attend to the sequence's other documents
    too."""
    weights: Shares = Field(default_factory=dict)
    """Weight of each source: its share of the training tokens. The weights may have any sum: 60 and 40 mean the same as
    0.6 and 0.4. Every source must be named; 0 excludes one. A name covers the documents of the source that
    `dedup.rehydration` repeats, such as `web+x3`. Empty = in proportion to the tokens that an epoch reads."""
    epochs: Epochs = Field(default_factory=dict)
    """Number of times that each source is read, in place of `weights`; fractions are allowed. The number of training
    tokens follows: the sum of epochs x tokens of the sources, rounded down to whole steps. Every source must be named;
    0 excludes one. An epoch reads a document that `dedup.rehydration` repeats as often as it says. At most
    `plan.max_epochs` each. Empty = the plan chooses the number of tokens."""
    mix: str = execution("", pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the mix that set `weights`, written by `penstock plan --mix`; empty = none. It is not a content field,
    since `weights` already is."""
    window_shards: int = Field(8, ge=1)
    """Number of adjacent shards whose chunks are shuffled together; more shards mix better, but keep more files
    open."""
    global_batch: int | None = Field(None, ge=1)
    """Sequences per optimizer step over all ranks; None = from the plan."""
    steps: int | None = Field(None, ge=1)
    """Number of optimizer steps; None = from the plan."""
    stages: tuple[StageConfig, ...] = ()
    """Training stages in sequence; empty = a single stage with the settings of this section."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Precision of the matrix products; weights, reductions and optimizer states are fp32. auto: bf16 on a CUDA device
    of compute capability 8.0 or newer, fp16 on 7.0 to 7.5, else fp32, and fp32 on a CPU; a resumed run keeps its
    precision. fp16 scales the loss dynamically; fp8: matrices of the layers in fp8, the rest in bf16."""
    fp8_scaling: Literal["tensor", "row", "gather"] = "tensor"
    """With precision = fp8: granularity of the scales, and the implementation. tensor: per matrix, by this project;
    row: per row, by torchao; gather: per matrix, by torchao, and zero2 and zero3 all-gather weights in fp8. On an H200
    a layer of a model of 350 M parameters takes 5.2 ms with tensor, 7.8 ms with row and 5.4 ms in bf16."""
    deterministic: bool = execution(False)
    """On a CUDA device, use only algorithms that add in a fixed order, so that the same run, also when resumed,
    computes the same bits on the same hardware and versions. On a CPU it always does."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which each number that attention or feed-forward adds to the residual stream is dropped in
    training; the others are divided by the share that is kept. Source: Srivastava et al. 2014, JMLR 15. It helps where
    tokens are repeated many times; for fewer than about four epochs 0 is usual."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which each attention weight is dropped in training, after the softmax. The T × T scores of each
    head are then held in memory, since no fused kernel has counter-based masks. Source: Vaswani et al. 2017, arXiv
    1706.03762, as in their code."""
    embedding_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which each number of the input embeddings is dropped in training. Source: Vaswani et al. 2017,
    arXiv 1706.03762, section 5.4."""
    skip_file: str = execution("")
    """Path of the skip list below the run's train folder; empty = `skips.txt`, which rewinds write, if it exists. Not a
    content field: checkpoints store its digest."""
    eval_every: int = execution(100, ge=0)
    """Steps between two evaluations of the held-out loss; 0 = never."""
    eval_sequences: int = execution(64, ge=1)
    """Held-out sequences of each source per evaluation; fewer if the dataset contains fewer."""
    log_every: int = execution(10, ge=1)
    """Steps between two progress lines, and between two measurements of the token accuracy."""
    ranks_every: int = execution(100, ge=0)
    """Steps between two lines of each rank in `train/ranks.jsonl`: its times, memory and bytes sent. A line has about
    300 bytes. 0 = no such file, and no alarm about slow ranks."""
    wandb: str = execution("")
    """Project in Weights & Biases that gets the figures of TensorBoard and the settings; empty = none. It needs
    penstock[wandb]. The key is read from WANDB_API_KEY or from the file of `wandb login`, never from a setting."""
    wandb_entity: str = execution("")
    """With wandb: user or team that owns the project; empty = the default of the key."""
    wandb_name: str = execution("")
    """With wandb: name of the run there; empty = W&B chooses one."""
    wandb_mode: Literal["online", "offline"] = execution("online")
    """With wandb: offline writes `train/wandb/` and uses no network; `wandb sync` uploads it later."""
    peak_flops: float | None = execution(None, ge=1)
    """Dense bf16 peak of a device [FLOP/s], the denominator of the MFU in every precision; None = that of
    `cluster.device`, else of the device by its name; if neither is known, no MFU is shown."""
    cache_dir: str = execution("")
    """Folder on a local disk, on each machine, to which token shards are copied before they are read; all ranks of a
    machine share it, and later runs reuse it. Required for a run on an object store, whose logs and checkpoints are
    written there before they are uploaded. Empty = shards are read where they are."""
    cache_bytes: int | None = execution(None, ge=1)
    """Maximum size of the shards in `cache_dir` [bytes]; at least that of the largest windows of shards of all sources
    together, and of a held-out shard. None = 80 % of the disk space that is free at the start."""
    profile: str = execution("")
    """Steps FIRST-LAST, such as 10-12, that torch's profiler records on rank 0 in train/profile; empty = none."""

    @property
    def drops(self) -> bool:
        """True if training drops any numbers."""
        return max(self.dropout, self.attention_dropout, self.embedding_dropout) > 0

    def for_device(self, kind: str, capability: tuple[int, int] | None = None) -> "TrainConfig":
        """Return the section with a `precision` of "auto" replaced by the value for a device type.

        `capability`: compute capability of a CUDA device; None is treated as 8.0.
        """
        if self.precision != "auto":
            return self.with_pack_chunks(PACK_CHUNKS)
        precision = "fp32"
        if kind == "cuda":
            precision = next(
                (
                    name
                    for name, least in (("bf16", MIN_BF16_CAPABILITY), ("fp16", MIN_FP16_CAPABILITY))
                    if (capability or MIN_BF16_CAPABILITY) >= least
                ),
                "fp32",
            )
        return self.with_pack_chunks(PACK_CHUNKS).model_copy(update={"precision": precision})

    @property
    def chunks_together(self) -> int:
        """Number of neighbouring chunks that are packed and ordered as one."""
        # Plans of earlier versions do not have the setting.
        return self.pack_chunks or 1

    def with_pack_chunks(self, number: int) -> "TrainConfig":
        """Return the section with this value of `pack_chunks` if packing = best_fit and none is set."""
        needed = self.packing == "best_fit" and self.pack_chunks is None
        return self.model_copy(update={"pack_chunks": number}) if needed else self

    @model_validator(mode="after")
    def _used(self) -> "TrainConfig":
        """Reject a setting that the objective or the stages would ignore."""
        given = self.model_fields_set
        problems = [
            *(
                (not self.wandb and name in given, f"{name} requires wandb, the name of a project")
                for name in ("wandb_entity", "wandb_name", "wandb_mode")
            ),
            (self.precision != "fp8" and "fp8_scaling" in given, "fp8_scaling requires precision = fp8"),
            (
                self.packing != "best_fit" and self.pack_chunks is not None,
                "pack_chunks requires packing = best_fit",
            ),
            (self.cache_bytes is not None and not self.cache_dir, "cache_bytes requires cache_dir"),
            (self.objective == "causal" and "mask_share" in given, "mask_share requires objective = mlm or span"),
            (self.objective != "span" and "mean_span" in given, "mean_span requires objective = span"),
            (
                self.objective == "span" and self.document_mask,
                "objective = span cuts spans from whole sequences: it requires document_mask = false",
            ),
            (
                self.objective == "span" and self.packing == "best_fit",
                "objective = span requires packing = stream",
            ),
            (
                any(stage.tokens is None for stage in self.stages[:-1]),
                "stages: only the last stage may be without tokens",
            ),
            (
                bool(self.epochs) and bool(self.weights),
                "epochs and weights exclude each other: remove one of them",
            ),
            (
                bool(self.epochs) and self.steps is not None,
                f"epochs decide the number of training tokens, and steps = {self.steps} too: remove one of them",
            ),
            (
                bool(self.epochs) and any(stage.weights is not None for stage in self.stages),
                "epochs are those of the whole run: they require stages without their own weights",
            ),
            (
                bool(self.epochs) and bool(self.stages) and self.stages[-1].tokens is not None,
                "epochs decide the number of training tokens, and stages with tokens in the last one too: remove one",
            ),
            (
                bool(self.mix) and not self.weights,
                "mix requires weights: `penstock plan --mix` sets both",
            ),
            (
                bool(self.mix) and any(stage.weights is not None for stage in self.stages),
                "mix requires stages without their own weights, which would replace it",
            ),
            (
                self.packing == "best_fit" and any(stage.seq_len not in (None, self.seq_len) for stage in self.stages),
                "packing = best_fit requires the same seq_len in all stages",
            ),
        ]
        if messages := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(messages))
        return self


# The sections `[checkpoint]`, how checkpoints are written and kept, and `[guard]`, the checks after a step.


class CheckpointConfig(Section):
    """When and how checkpoints are written and kept."""

    every: int = execution(200, ge=0)
    """Steps between two checkpoints; 0 = only at the end."""
    keep: int = execution(2, ge=1)
    """Number of newest checkpoints that are kept; an incomplete one does not count."""
    keep_every: int | None = execution(None, ge=1)
    """Number of steps between two checkpoints that are kept permanently, a multiple of `every`; None = none are."""
    mode: Literal["sync", "async"] = execution("async")
    """async: training continues while the state, copied to the host's memory, is written; each rank needs host memory
    for all that it writes. sync: training waits."""
    first: bool = execution(False)
    """Write the initial state too, as step 0: a seed checkpoint, kept permanently."""

    @model_validator(mode="after")
    def _used(self) -> "CheckpointConfig":
        if self.keep_every is not None and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"keep_every: expected a multiple of every = {self.every}, got {self.keep_every}. "
                "Set keep_every to a multiple of every."
            )
        return self


class ProfileWindow(NamedTuple):
    """The first and last step to record, both included."""

    first: int
    last: int


def parse_window(text: str, steps: int | None) -> ProfileWindow | None:
    """Parse the steps of `train.profile` for a run of `steps` steps (None = unknown); return None for an empty text.

    Raises ConfigError if the text is not FIRST-LAST, or if the run has no such steps.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+)-([0-9]+)", text.strip())
    window = ProfileWindow(int(match[1]), int(match[2])) if match else ProfileWindow(0, 0)
    if not 1 <= window.first <= window.last:
        raise ConfigError(
            f"train.profile: expected steps FIRST-LAST from 1 on, such as 10-12, got {text!r}. Set train.profile=10-12."
        )
    if steps is not None and window.last > steps:
        raise ConfigError(
            f"train.profile: expected steps of the run, 1 to {steps}, got {text!r}. "
            f"Set train.profile to steps up to {steps}."
        )
    return window


# The section `[guard]`: the response to non-finite steps, spikes, and a loss that no longer falls.


class GuardConfig(Section):
    """Checks after each step: non-finite steps are skipped, spikes are reported or rewound, a run may end early."""

    max_non_finite: int = execution(3, ge=0)
    """Maximum number of consecutive steps with an infinite or NaN loss or gradient, each skipped; one more stops the
    run. On a GPU the run stops during the step after it, whose figures are discarded."""
    spike_sigmas: float | None = Field(None, gt=0)
    """Maximum distance of a loss above the mean of the last `spike_window` losses [standard deviations]; a larger one
    is a spike. None = no check. OLMo 2 (arXiv 2501.00656) allows 6."""
    grad_sigmas: float | None = Field(None, gt=0)
    """The limit of `spike_sigmas`, for the gradient norm before clipping: the trainer of OLMo 2 allows 6 here too;
    ZClip (arXiv 2504.02507) clips beyond 2.5, and reports that norms are nearly normal within a window. None = no
    check."""
    spike_window: int = Field(128, ge=8)
    """Number of losses and norms for mean and deviation; before there are so many, no step is a spike."""
    on_spike: Literal["report", "rewind"] = "report"
    """report: the documents of the step are listed. rewind: training also resumes from the checkpoint before, without
    the samples of the step, which the skip list and `events.jsonl` record."""
    max_rewinds: int = execution(3, ge=1)
    """With on_spike = rewind, or with quarantine: maximum number of rewinds in `rewind_window` steps; the next spike
    stops the run."""
    rewind_window: int = execution(1000, ge=1)
    """Number of steps in which `max_rewinds` are allowed. A rewind counts at the step of its spike. The default is a
    choice: spikes that follow each other within 1,000 steps have a cause that skipping data does not remove."""
    quarantine: bool = execution(False)
    """Rewind after a spike, for any `on_spike`, write the outlier documents of its batch to `train/quarantine.jsonl`,
    and exclude them from every later batch. The exclusions are part of the skip list's digest, so a run may be resumed
    with or without this setting."""
    patience: int | None = Field(None, ge=1)
    """Number of consecutive held-out losses without a new minimum after which the run ends; None = no early end."""
    min_improvement: float = Field(0.0, ge=0)
    """Minimum decrease of a held-out loss that counts as a new minimum [nats/token]."""
    straggler_factor: float | None = execution(1.5, gt=1)
    """Smallest time of a rank over that of the median rank, in a window of `train.ranks_every` steps, that is reported
    as a straggler. "none" = no alarm."""
    straggler_seconds: float = execution(10.0, ge=0)
    """Minimum duration of a window in which stragglers are looked for; a shorter one says little [s]."""

    @model_validator(mode="after")
    def _used(self) -> "GuardConfig":
        """Reject a setting that would be ignored."""
        rewinds, any_of = self.on_spike == "rewind", "spike_sigmas or grad_sigmas"
        problems = [
            (not self.watches and rewinds, f"on_spike = rewind requires {any_of}"),
            (not self.watches and self.quarantine, f"quarantine requires {any_of}, such as 6"),
            (not self.watches and self._given("spike_window"), f"spike_window requires {any_of}"),
            *(
                (not self.rewinds and self._given(name), f"{name} requires on_spike = rewind or quarantine")
                for name in ("max_rewinds", "rewind_window")
            ),
            (self.patience is None and self._given("min_improvement"), "min_improvement requires patience"),
            (
                self.straggler_factor is None and self._given("straggler_seconds"),
                "straggler_seconds requires straggler_factor",
            ),
        ]
        if messages := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(messages))
        return self

    @property
    def watches(self) -> bool:
        """True if any check for spikes is set."""
        return self.spike_sigmas is not None or self.grad_sigmas is not None

    @property
    def rewinds(self) -> bool:
        """True if training rewinds after a spike."""
        return self.quarantine or self.on_spike == "rewind"

    def _given(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)
