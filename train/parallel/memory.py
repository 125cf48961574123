"""The memory that a rank needs at each moment of a step, computed from the layout before a run starts.

Every number is a count of tensors that the code, or torch on its behalf, allocates; nothing is fitted. The peak is the
largest of five moments: the loss, the start of the head's gradients, the backward pass of the last layer, the end of
the backward pass, and the update.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from schemas.errors import ConfigError
from train.config.layout import LayoutConfig
from train.config.optim import OPTIMIZERS, STREAMED_NUMBERS
from train.config.settings import Settings
from train.model.freeze import frozen_names
from train.model.shape import (
    ModelShape,
    matrix_params_of_layer,
    num_parameters,
    padded_columns,
    parameter_sizes,
    params_of_layer,
    value_parameters,
)
from train.parallel.layout import axes_of, chunks_in_flight, data_ranks, layers_of, num_micro_batches, stages_of

# The activations that a layer keeps for its backward pass are counted tensor by tensor, for the code as it is. On a
# CPU, RMSNorm is composed of operations that keep float32; on a CUDA device it is a kernel that does not. Several
# documents in a row need no mask matrix if attention computes them as blocks or in tiles. A compiled layer keeps less.
# Source of the method: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1.


@dataclass(frozen=True)
class LayerMemory:
    """The bytes of a layer's activations for one micro-batch on one rank."""

    shape: ModelShape
    settings: Settings
    seq_len: int
    """Positions of a full row."""
    rows: int
    """Rows of a micro-batch."""
    width: int
    """Bytes of one element in matrix products: 2 or 4."""
    autocast: bool
    """True if weights and residual stream are float32 although products are not (ddp and zero1)."""
    cuda: bool
    """True on a CUDA device."""

    @property
    def tokens(self) -> int:
        """Return the number of positions that this rank computes in a micro-batch."""
        return self.rows * self.seq_len // self.settings.layout.context

    @property
    def residual(self) -> int:
        """Return the bytes of one element of the residual stream."""
        return 4 if self.autocast else self.width

    def stream_bytes(self) -> int:
        """Return the bytes of the residual stream between two layers."""
        return self.residual * self.tokens * self.shape.d_model // self.settings.layout.tensor

    def saved(self) -> int:
        """Return the bytes that one layer stores for its backward pass, without activation checkpointing."""
        shape, layout, width = self.shape, self.settings.layout, self.width
        q, kv = shape.query_width, shape.key_width
        gated = shape.activation == "swiglu"
        # Autocast copies the input for each matrix; otherwise they share it, even if its parts are gathered for the
        # tensor axis.
        inputs = (3 + (2 if gated else 1)) if self.autocast else 2
        numbers = 2 * q + 2 * kv * self._repeats() + (4 if gated else 2) * shape.d_ffw
        if layout.context > 1 and layout.context_by == "heads":
            numbers += q  # the output of attention, before and after the all-to-all back to positions
        per_token = (
            2 * self.stream_norm() // layout.tensor
            + width * inputs * shape.d_model
            + width * numbers // layout.tensor
            + 4 * shape.num_heads // layout.tensor  # log Z of each query
        )
        if shape.residual_mixing:
            per_token += self.residual * shape.d_model // layout.tensor
        if shape.qk_norm:
            per_token += (shape.num_heads + shape.num_kv_heads) * self.norm(shape.head_dim) // layout.tensor
        if shape.positions == "relative":
            # Float32 and scaled copies of q for both products, and copies of keys and values shared by several heads.
            per_token += (12 - width) * q + 2 * width * (q - kv) + self._scores_per_token()
        if self.settings.train.dropout:
            per_token += 2 * shape.d_model // layout.tensor  # a boolean for each element of both additions
        if self.settings.train.attention_dropout:
            # The weights after the softmax and after dropout, the mask, and copies of keys and values for each head.
            per_token += self._scores_per_token() * (5 + width) // 4 // layout.tensor + 2 * width * (q - kv)
        weights = width * matrix_params_of_layer(shape) if self.autocast else 0
        return self.tokens * per_token + self._mask() + weights

    def kept(self, recompute: str) -> int:
        """Return the bytes of activations that one layer stores for its backward pass.

        `recompute`: none = all activations are stored; selective = the layer's input and matrix products; full = only
        the layer's input.
        """
        if recompute == "none":
            return self.saved()
        if recompute == "full":
            return self.stream_bytes()
        shape, tensor = self.shape, self.settings.layout.tensor
        inner = 2 * shape.query_width + 2 * shape.key_width
        inner += (2 if shape.activation == "swiglu" else 1) * shape.d_ffw
        products = self.width * (2 * shape.d_model + inner // tensor) + 4 * shape.num_heads // tensor
        if shape.positions == "relative":
            products += 2 * self._scores_per_token()
        if self.settings.train.attention_dropout:
            products += self._scores_per_token() // tensor
        return self.stream_bytes() + self.tokens * products

    def temporary(self) -> int:
        """Return the peak bytes of activation gradients in a layer's backward pass."""
        shape, tensor = self.shape, self.settings.layout.tensor
        d, q, kv = shape.d_model, shape.query_width, shape.key_width
        # The gradient from the last matrix replaces the activations that this matrix saved.
        # The derivative of the square of ReLU is a tensor of its own.
        feed_forward = self.width * ((1 if shape.activation.startswith("gelu") else 2) * shape.d_ffw // tensor + d)
        attention = self.width * ((3 * q + 4 * kv) // tensor + d)
        norm = (self.width if self.cuda else 16) * d // tensor
        if shape.positions == "relative":
            attention += 3 * self._scores_per_token()
        # Residual mixing: the gradient of the token embeddings over all layers, and what one layer adds to it.
        streams = 3 if shape.residual_mixing else 1
        # Measured: a backward pass holds two tensors of value embeddings, among them their gradient.
        values = 2 * self.width * kv // tensor if shape.value_embeddings else 0
        numbers = self.tokens * (max(feed_forward, attention, norm) + values)
        return numbers + streams * self.stream_bytes() + 2 * self._mask()

    def stream_norm(self) -> int:
        """Return the bytes that a norm of the residual stream stores for one position."""
        # LayerNorm is a kernel on every device, which stores its input, mean and scale.
        return self.norm(self.shape.d_model) if self.shape.norm == "rmsnorm" else self.residual * self.shape.d_model + 8

    def norm(self, width: int) -> int:
        """Return the bytes that RMSNorm stores for one position of `width` numbers."""
        # Input and scale, and on a CPU the normalized input too.
        return (self.residual if self.cuda else 8) * width + 4

    def mask(self) -> int:
        """Return the bytes of the attention mask that all layers share; 0 if attention needs no mask matrix."""
        # The elements of a mask for relative positions are booleans.
        return self._pairs() * (1 if self.shape.positions == "relative" else self.width)

    def _mask(self) -> int:
        """Return the bytes of the negated mask that a layer makes with relative positions, else 0."""
        return self._pairs() if self.shape.positions == "relative" else 0

    def _pairs(self) -> int:
        """Return the number of elements of this rank's attention mask; 0 if attention needs no mask matrix."""
        layout, train = self.settings.layout, self.settings.train
        by_keys = layout.context > 1 and layout.context_by == "keys"
        relative = self.shape.positions == "relative" or train.attention_dropout > 0
        whole = layout.context if layout.context > 1 and not by_keys else 1
        if train.document_mask and (by_keys or relative):
            return self.tokens * whole * self.seq_len
        if (by_keys or relative) and train.objective != "mlm":
            return self.tokens * self.seq_len // self.rows
        return 0

    def _scores_per_token(self) -> int:
        """Return the bytes of one query's float32 attention scores in all heads."""
        # No fused kernel exists for relative positions, so their scores are stored.
        return 4 * self.shape.num_heads * self.seq_len

    def _repeats(self) -> int:
        """Return the factor by which context parallelism multiplies this rank's keys and values."""
        shape, layout = self.shape, self.settings.layout
        if layout.context == 1:
            return 1
        if layout.context_by == "keys":
            return layout.context  # keys and values of all ranks are gathered
        # Key-value heads that are too few to split are repeated.
        shared = shape.num_kv_heads // layout.tensor % layout.context == 0
        return 1 if shared else shape.num_heads // shape.num_kv_heads


BUCKET = 64 << 20
"""Maximum bytes of weights that zero1 all-gathers at once."""


class RankMemory:
    """Estimated memory of one rank at each moment of a step."""

    def __init__(
        self,
        shape: ModelShape,
        settings: Settings,
        axes: dict[str, int],
        place: int,
        batch: tuple[int, int],
        cuda: bool,
    ):
        """`place`: coordinate on the pipeline axis. `batch`: (positions of a row, rows of a step).

        `settings` must have no automatic values left.
        """
        layout, (seq_len, global_batch) = settings.layout, batch
        self.shape, self.settings, self.axes, self.cuda = shape, settings, axes, cuda
        world_size = math.prod(axes.values())
        alone = settings.train.precision == "fp32" and not layout.offloads_parameters
        self.whole = layout.data in ("ddp", "zero1")
        self.sharded = not self.whole and not (world_size == 1 and alone)
        self.shards = axes["shard"] * axes["context"] if self.sharded else 1
        self.replicas = world_size if self.whole else axes["replicate"]
        stages = stages_of(layout, place) if layout.pipeline > 1 else [0]
        last = layout.pipeline * layout.stages - 1
        spans = [layers_of(shape.num_layers, last + 1, stage) for stage in stages]
        self.layers = sum(map(len, spans))
        self.ends = last in stages
        self.micro_batches = num_micro_batches(global_batch, layout, axes)
        self.most_rows = -(-global_batch // data_ranks(axes))
        self.in_flight = chunks_in_flight(layout, place, self.micro_batches) / len(stages) if last else 1
        self.width = 4 if settings.train.precision == "fp32" else 2
        rows = min(layout.rows_at_once, self.most_rows)
        self.stream = LayerMemory(shape, settings, seq_len, rows, self.width, self.whole and self.width < 4, cuda)
        self.matrices = matrix_params_of_layer(shape) // layout.tensor
        self.layer = params_of_layer(shape) - matrix_params_of_layer(shape) + self.matrices
        self.vocabulary = -(-shape.vocab_size // layout.tensor) * shape.d_model
        self.copies = copies = (0 in stages) + (self.ends and not (shape.tie_embeddings and last == 0))
        others = num_parameters(shape) - shape.num_layers * params_of_layer(shape) - value_parameters(shape)
        others -= (1 if shape.tie_embeddings else 2) * shape.vocab_size * shape.d_model
        # Vectors of positions and of kinds of tokens are on the first stage, the norm and the head on the last.
        first = (shape.max_positions + shape.num_token_types) * shape.d_model
        self.num_tables = sum(shape.has_values(layer) for span in spans for layer in span)
        self.tables = self.num_tables * shape.vocab_size * (shape.key_width // layout.tensor)
        self.outer = copies * self.vocabulary + (0 in stages) * first + self.ends * (others - first) + self.tables
        self.params = self.layers * self.layer + self.outer
        self.frozen = self._frozen(stages, last + 1)
        """Sizes of the parameters that this rank holds and does not train, by name."""
        self.trained = self.params - sum(self.frozen.values())

    def moments(self) -> dict[str, dict[str, int]]:
        """Return the bytes in memory at each moment of a step, by purpose.

        The moments are loss, head, backward, end and update. `SOURCES` lists the purposes.
        """
        held = {"weights": 4 * self.params // self.shards, "states": self.states(), "batch": self._batch()}
        together = self.micro_batches > 1 or (self.whole and self.replicas > 1)
        kept_whole = not self.sharded or self.axes["pipeline"] > 1 or self.settings.layout.compress != "none"
        whole = 4 * self.trained // (1 if kept_whole else self.shards) if together else 0
        activations = self._activations()
        if self.settings.layout.pipeline > 1 and self.in_flight == self.micro_batches:
            # All forward passes run first: when gradients accumulate, the activations of a micro-batch are already
            # freed.
            whole = max(0, whole - activations // self.micro_batches // self.settings.layout.stages)
        forward = held | {"gradients": whole, "activations": activations, "transfer": self._transfer()}
        head, stream = self._head(), self._head_stream()
        pending = head if self.sharded or self.shape.tie_embeddings or not together else 0
        return {
            "loss": forward | {"gathered": self._gathered(0, 1), "loss": self._logits() + 2 * stream},
            "head": forward | {"gathered": self._gathered(0, 1), "loss": 2 * (head + stream)},
            "backward": forward
            | {
                "activations": activations - self._last_norm(),
                "gathered": self._gathered(1, int(self.settings.layout.data == "zero3")),
                "unreduced": self._unreduced(),
                "temporaries": self._temporaries(),
                "loss": pending,
            },
            "end": held
            | {
                "gradients": 4 * self.trained // self.shards,
                "gathered": self._gathered(1, 0),
                "unreduced": self._unreduced_outside(),
                "transfer": self._transfer(),
            },
            "update": held
            | {
                "gradients": 4 * self.trained // self.shards,
                "update": self._update(),
                "transfer": self._errors(),
            },
        }

    def states(self) -> int:
        """Return the bytes of optimizer states on this rank."""
        shape, declared = self.shape, OPTIMIZERS[self.settings.optim.optimizer]
        inner, outer = declared.state, declared.of_others.state
        over = self.replicas if self.settings.layout.data == "zero1" else self.shards
        d, q, kv, ffw = shape.d_model, shape.query_width, shape.key_width, shape.d_ffw
        sides = 2 * (d + q) + 2 * (d + kv) + (3 if shape.activation == "swiglu" else 2) * (d + ffw)
        vocabularies, matrices = self.copies, self.layers * self.matrices
        numbers = vocabularies * self.vocabulary + self.tables
        vectors = self.params - matrices - numbers
        # States with a value per row or column are not sharded.
        rows = q + 2 * kv + 2 * d + (2 if shape.activation == "swiglu" else 1) * ffw
        whole = self.layers * (inner.side * sides + inner.row * rows)
        whole += outer.side * vocabularies * (shape.vocab_size + d)
        whole += outer.side * self.num_tables * (shape.vocab_size + kv)
        sharded = inner.matrix * matrices + outer.matrix * numbers + outer.vector * vectors
        if self.settings.optim.ema is not None:
            sharded += 4 * self.trained
        for name, size in self.frozen.items():
            own = inner if name.startswith("blocks.") else outer
            sharded -= size * (own.matrix if name.endswith("weight") and "norm" not in name else outer.vector)
        # Beside states by row and column only vectors are sharded, in whole numbers of 4 bytes.
        return whole + sharded // over // 4 * 4 if whole else sharded // over

    def _frozen(self, stages: list[int], num_stages: int) -> dict[str, int]:
        if not self.settings.train.freeze:
            return {}
        shape, tensor = self.shape, self.settings.layout.tensor
        layers = [layer for stage in stages for layer in layers_of(shape.num_layers, num_stages, stage)]
        begins = tuple(f"{kind}.{layer}." for kind in ("blocks", "value_embeddings") for layer in layers)
        begins += ("embedding.", "extra.") if 0 in stages else ()
        begins += ("norm.", "transform.", "head.") if self.ends else ()
        sizes = parameter_sizes(shape)
        return {
            name: math.prod(sizes[name]) // (tensor if len(sizes[name]) > 1 else 1)
            for name in frozen_names(sizes, self.settings.train.freeze)
            if name.startswith(begins)
        }

    def _batch(self) -> int:
        # Ids and targets of 8 bytes, document numbers of 4.
        return 20 * self.most_rows * self.stream.seq_len // self.settings.layout.context

    def _gathered(self, layers: int, prefetched: int) -> int:
        if not self.sharded:
            return 0
        # If a rank has several stages, torch frees nothing between their micro-batches.
        every = self.settings.layout.data == "zero2" or self.settings.layout.stages > 1
        layers = (self.layers if every else layers) + (prefetched if self.shards > 1 else 0)
        return self.width * (self.outer + layers * self.layer)

    def _unreduced(self) -> int:
        """Return the peak bytes of gradients that are not reduced yet, during the backward pass of a layer."""
        if not self.sharded:
            return 0
        # The gradients of the previous layer are being reduced meanwhile.
        before = 4 * self.layer * (1 + 1 / self.shards) - self.stream.kept(self._mode())
        if self.layers == 1 or self.settings.layout.pipeline > 1:  # a pipeline reduces once, after all micro-batches
            before = 0
        return self.width * self.shape.d_model * self.shape.d_ffw // self.settings.layout.tensor + max(0, round(before))

    def _unreduced_outside(self) -> int:
        """Return the bytes of unreduced gradients outside the layers at the end of the backward pass."""
        tied = 2 * self._head() if self.shape.tie_embeddings else 0
        if not self.sharded:
            return tied // 2
        return max(tied + 4 * self.layer, (self.width + 4) * self.outer)

    def _activations(self) -> int:
        kept = self.in_flight * self.layers * self.stream.kept(self._mode())
        if self.settings.layout.activation_checkpointing == "budget":
            kept = self.kept_layer_bytes(self.recomputed())
        return round(kept) + self._outside() + self.stream.mask()

    def kept_layer_bytes(self, recomputed: int) -> int:
        """Return the bytes of activations that all layers store if `recomputed` layers store only their input."""
        stream, chosen = self.stream, min(recomputed, self.layers)
        return round(self.in_flight * ((self.layers - chosen) * stream.saved() + chosen * stream.kept("full")))

    def recomputed(self) -> int:
        """Return how many layers must recompute all activations to stay within `layout.activation_budget`.

        Returns the number of all layers if no number is enough.
        """
        budget = self.settings.layout.activation_budget or 0
        return next((n for n in range(self.layers) if self.kept_layer_bytes(n) <= budget), self.layers)

    def _outside(self) -> int:
        """Return the bytes of activations that are stored outside the layers.

        All layers share the normalized token embeddings of residual mixing. Layers that recompute store their value
        embeddings. Both are freed after the last backward pass of a layer, unlike what the last norm stores.
        """
        stream, tensor = self.stream, self.settings.layout.tensor
        per_token = 0
        if self.shape.residual_mixing:
            per_token += (stream.norm(self.shape.d_model) + stream.residual * self.shape.d_model) // tensor
        if self._mode() != "none":
            per_token += self.num_tables * stream.residual * self.shape.key_width // tensor
        return self._last_norm() + per_token * stream.tokens

    def _last_norm(self) -> int:
        """Return the bytes that the norm after the layers stores."""
        return self.stream.stream_norm() // self.settings.layout.tensor * self.stream.tokens if self.ends else 0

    def _mode(self) -> str:
        mode = self.settings.layout.activation_checkpointing
        return "full" if mode == "budget" else mode

    def _temporaries(self) -> int:
        again = self.stream.saved() - self.stream.kept(self._mode())
        return self.stream.temporary() + max(0, again)

    def _head(self) -> int:
        """Return the bytes of the gradient of the output matrix."""
        return (self.width if self.sharded else 4) * self.vocabulary if self.ends else 0

    def _head_stream(self) -> int:
        """Return the bytes of the residual stream after the last norm."""
        return self.width * self.stream.tokens * self.shape.d_model if self.ends else 0

    def _logits(self) -> int:
        """Return the bytes of one chunk of logits and of the output matrix's gradient."""
        if not self.ends:
            return 0
        chunk = min(self.settings.layout.chunk_on("cuda" if self.stream.cuda else "cpu"), self.stream.tokens)
        columns = padded_columns(self.vocabulary // self.shape.d_model, self.stream.cuda)
        # Unless the loss is compiled, 16-bit logits are copied to float32.
        copy = 0 if self.width == 4 or self.settings.layout.compile else 4
        if self.shape.logit_softcap is not None and not self.settings.layout.compile:
            copy += 4  # the derivative of the bound
        logits = chunk * columns * (self.width + copy)
        # If columns are padded, a padded copy of the matrix exists too.
        padded = self.width * columns * self.shape.d_model if columns * self.shape.d_model > self.vocabulary else 0
        # With a 16-bit dtype, the gradient from one chunk exists beside the accumulated gradient.
        product = self.width * self.vocabulary if self.width < 4 else 0
        matrix = self.width * self.vocabulary if self.stream.autocast else 0
        return logits + 4 * self.vocabulary + product + matrix + padded

    def _transfer(self) -> int:
        """Return the bytes of a pipeline's receive buffers and of compression errors."""
        layout = self.settings.layout
        if layout.pipeline == 1:
            return self._errors()
        return round((2 * self.micro_batches + self.in_flight) * self.stream.stream_bytes()) + self._errors()

    def _errors(self) -> int:
        """Return the bytes of the compression errors of the previous step and of this step; 0 if there are none."""
        lossy = self.settings.layout.compress in ("powersgd", "topk", "randomk") and self.replicas > 1
        return 8 * self.params // self.shards if lossy else 0

    def _update(self) -> int:
        optim, layout = self.settings.optim, self.settings.layout
        gather = 2 * min(BUCKET, 4 * self.params) if layout.data == "zero1" and self.replicas > 1 else 0
        gradient = 4 * max(self.vocabulary, self.matrices // 3) // self.shards
        numbers = self.layers * self.matrices // self.shards
        return max(gather, OPTIMIZERS[optim.optimizer].workspace(gradient, numbers, optim))


# The estimate of a run is that of the rank that needs most memory, by purpose and by moment of a step.

ZERO = "Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 3.1"
FSDP = "Zhao et al. 2023 (FSDP), arXiv 2304.11277, section 3.3"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, section 4.1"
SOURCES = {
    "weights": ("4·N, of zero2 and zero3 / (shard · context)", ZERO),
    "states": ("4 to 8·N by optimizer, 4·N more with optim.ema, of ddp whole, else / ranks that share them", ZERO),
    "gradients": ("4·N, of zero2 and zero3 / (shard · context); whole while micro-batches add up", ZERO),
    "gathered": ("weights of the outermost part and of one layer, or of all, and what one more is gathered in", FSDP),
    "unreduced": ("gradients of one layer or of the outermost part, and what they are reduced from", FSDP),
    "activations": ("what layers keep, times the micro-batches in flight", KORTHIKANTI),
    "temporaries": ("gradients of activations in one layer, and what it computed again", "count"),
    "loss": ("logits of chunk_tokens, gradients of head and stream", "count"),
    "transfer": ("buffers of a pipeline, errors of a compression", "count"),
    "update": ("what the optimiser computes with", "count"),
    "batch": ("ids, targets, documents of a step; the mask", "count"),
}
"""Formula and source of every purpose: N parameters of the rank's layers and matrices."""


class Widths(NamedTuple):
    """Bytes per parameter of weights, gradients and optimizer states."""

    weight: int
    """Bytes of the weights used in computation."""
    gradient: int
    """Bytes of the gradients."""
    states: int
    """Bytes that only the update needs: float32 weights and two moments."""


def zero_bytes(num_params: int, ranks: int, data: str, widths: Widths) -> dict[str, int]:
    """Return the bytes of weights, gradients and states of a rank for ddp, zero1, zero2 or zero3.

    Source: ZERO, figure 1.
    """
    shared = ("ddp", "zero1", "zero2", "zero3").index(data)
    over = {name: ranks if shared >= stage else 1 for stage, name in ((3, "weight"), (2, "gradient"), (1, "states"))}
    return {name: num_params * width // over[name] for name, width in widths._asdict().items()}


@dataclass(frozen=True)
class Memory:
    """Estimated memory of one rank in bytes."""

    moments: dict[str, dict[str, int]]
    """Bytes by moment of a step, then by purpose."""
    host: int
    """Bytes of tensors that are offloaded to the memory of the host."""
    disk: int = 0
    """Bytes of weights and optimizer states that are offloaded to a disk."""

    @property
    def peak_moment(self) -> str:
        """Return the moment of a step at which the rank has the most bytes in memory."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes by purpose at `peak_moment`."""
        return self.moments[self.peak_moment]

    @property
    def peak(self) -> int:
        """Return the total bytes at `peak_moment`."""
        return sum(self.at_peak.values())


def memory_of_rank(
    shape: ModelShape, settings: Settings, world_size: int, seq_len: int, global_batch: int, device: str = "cpu"
) -> Memory:
    """Return the memory of the rank that needs the most memory.

    `device`: type of the device (cpu, cuda), on which automatic settings depend. Raises ConfigError if the product of
    the axis sizes is not `world_size`.
    """
    settings = settings.for_device(device)
    axes = axes_of(settings.layout, world_size)
    batch, cuda = (seq_len, global_batch), device == "cuda"
    ranks = [RankMemory(shape, settings, axes, place, batch, cuda) for place in range(axes["pipeline"])]
    return max((offloaded(rank, settings, cuda) for rank in ranks), key=lambda memory: memory.peak)


def offloaded(rank: RankMemory, settings: Settings, cuda: bool) -> Memory:
    """Return the memory of a rank without what is offloaded. A CPU has its weights in the host's memory anyway."""
    layout, moments = settings.layout, rank.moments()
    on_disk = {"states"} if layout.offload_dir else set()
    on_disk |= {"weights"} if layout.offload_weights_dir else set()
    names = on_disk | ({"weights", "gradients"} if layout.offloads_parameters and cuda else set())
    names |= {"states"} if layout.offloads_states and cuda else set()
    host = max(sum(need.get(name, 0) for name in names - on_disk) for need in moments.values())
    disk = max(sum(need.get(name, 0) for name in on_disk) for need in moments.values())
    kept = {name: {key: size for key, size in need.items() if key not in names} for name, need in moments.items()}
    if names and layout.offload != "all":
        # Of one group of parameters, what is elsewhere is on the device during its update.
        share = max(STREAMED_NUMBERS, rank.vocabulary) / max(rank.params, 1)
        kept["update"]["update"] += round(min(share, 1) * sum(moments["update"][name] for name in names))
    return Memory(kept, host, disk)


def layers_to_recompute(
    shape: ModelShape, settings: Settings, world_size: int, seq_len: int, global_batch: int, device: str = "cpu"
) -> int:
    """Return how many layers of each rank must recompute all activations to stay within `layout.activation_budget`.

    Raises ConfigError if recomputing all layers is not enough.
    """
    settings = settings.for_device(device)
    axes, budget = axes_of(settings.layout, world_size), settings.layout.activation_budget or 0
    batch, cuda = (seq_len, global_batch), device == "cuda"
    ranks = [RankMemory(shape, settings, axes, place, batch, cuda) for place in range(axes["pipeline"])]
    least = max(rank.kept_layer_bytes(rank.layers) for rank in ranks)
    if least > budget:
        raise ConfigError(
            f"layout.activation_budget: expected at most {budget:,} bytes of activations, got {least:,} although "
            "every layer is recomputed. Raise layout.activation_budget, or lower layout.micro_batch."
        )
    return max(rank.recomputed() for rank in ranks)


def checkpoint_bytes(shape: ModelShape, settings: Settings) -> int:
    """Return the bytes of weights and optimizer states of the whole model, in float32."""
    alone = settings.model_copy(update={"layout": LayoutConfig(data="ddp")}).for_device("cpu")
    whole = RankMemory(shape, alone, axes_of(alone.layout, 1), 0, (1, 1), False)
    return 4 * whole.params + whole.states()
