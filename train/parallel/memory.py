"""What a rank holds at every moment of a step, counted from the layout.

Nothing is fitted: every number is a count of tensors that the code, or torch on its behalf, makes at that moment.
"""

import math

from train.config.settings import Settings
from train.model.shape import ModelShape, matrix_params_of_layer, padded_columns, params_of_layer
from train.parallel.activations import Stream
from train.parallel.layout import chunks_in_flight, data_ranks, layers_of, num_micro_batches, stages_of

CHUNK = 1 << 24
"""Numbers that an optimiser takes at once."""
BUCKET = 64 << 20
"""Bytes of weights that zero1 gathers at once."""


class RankNeeds:
    """What one place of a pipeline, or a rank that has all of the model, holds, and when."""

    def __init__(
        self,
        shape: ModelShape,
        settings: Settings,
        axes: dict[str, int],
        place: int,
        batch: tuple[int, int],
        cuda: bool,
    ):
        """`batch`: positions of a row, and rows of a step; `settings` without anything automatic."""
        layout, (seq_len, global_batch) = settings.layout, batch
        self.shape, self.settings, self.axes, self.cuda = shape, settings, axes, cuda
        world_size, alone = math.prod(axes.values()), settings.train.precision == "fp32" and not layout.offload
        self.whole = layout.data in ("ddp", "zero1")
        self.sharded = not self.whole and not (world_size == 1 and alone)
        self.shards = axes["shard"] * axes["context"] if self.sharded else 1
        self.replicas = world_size if self.whole else axes["replicate"]
        stages = stages_of(layout, place) if layout.pipeline > 1 else [0]
        last = layout.pipeline * layout.stages - 1
        self.layers = sum(len(layers_of(shape.num_layers, last + 1, stage)) for stage in stages)
        self.ends = last in stages
        self.micro_batches = num_micro_batches(global_batch, layout, axes)
        self.most_rows = -(-global_batch // data_ranks(axes))
        self.in_flight = chunks_in_flight(layout, place, self.micro_batches) / len(stages) if last else 1
        self.width = 4 if settings.train.precision == "fp32" else 2
        rows = min(layout.rows_at_once, self.most_rows)
        self.stream = Stream(shape, settings, seq_len, rows, self.width, self.whole and self.width < 4, cuda)
        self.matrices = matrix_params_of_layer(shape) // layout.tensor
        self.layer = params_of_layer(shape) - matrix_params_of_layer(shape) + self.matrices
        self.vocabulary = -(-shape.vocab_size // layout.tensor) * shape.d_model
        copies = (0 in stages) + (self.ends and not (shape.tie_embeddings and last == 0))
        self.outer = copies * self.vocabulary + (shape.d_model if self.ends else 0)
        self.params = self.layers * self.layer + self.outer

    def moments(self) -> dict[str, dict[str, int]]:
        """Bytes by moment of a step, then by purpose."""
        held = {"weights": 4 * self.params // self.shards, "states": self.states(), "batch": self._batch()}
        together = self.micro_batches > 1 or (self.whole and self.replicas > 1)
        kept_whole = not self.sharded or self.axes["pipeline"] > 1 or self.settings.layout.compress != "none"
        whole = 4 * self.params // (1 if kept_whole else self.shards) if together else 0
        activations = self._activations()
        if self.settings.layout.pipeline > 1 and self.in_flight == self.micro_batches:
            # All forward passes come first: when gradients add up, a micro-batch of a stage has left.
            whole = max(0, whole - activations // self.micro_batches // self.settings.layout.stages)
        forward = held | {"gradients": whole, "activations": activations, "transfer": self._transfer()}
        head, stream = self._head(), self._head_stream()
        pending = head if self.sharded or self.shape.tie_embeddings or not together else 0
        return {
            "loss": forward | {"gathered": self._gathered(0, 1), "loss": self._logits() + 2 * stream},
            "head": forward | {"gathered": self._gathered(0, 1), "loss": 2 * (head + stream)},
            "backward": forward
            | {
                "activations": activations - self._outside(),
                "gathered": self._gathered(1, int(self.settings.layout.data == "zero3")),
                "unreduced": self._unreduced(),
                "temporaries": self._temporaries(),
                "loss": pending,
            },
            "end": held
            | {
                "gradients": 4 * self.params // self.shards,
                "gathered": self._gathered(1, 0),
                "unreduced": self._unreduced_outside(),
                "transfer": self._transfer(),
            },
            "update": held
            | {
                "gradients": 4 * self.params // self.shards,
                "update": self._update(),
                "transfer": self._errors(),
            },
        }

    def states(self) -> int:
        """Optimiser states; Adafactor's means of a matrix are whole on every rank."""
        shape, name = self.shape, self.settings.optim.optimizer
        over = self.replicas if self.settings.layout.data == "zero1" else self.shards
        if name == "muon":
            return (8 * self.params - 4 * self.layers * self.matrices) // over
        if name != "adafactor":
            return 8 * self.params // over
        d, q, kv, ffw = shape.d_model, shape.query_width, shape.key_width, shape.d_ffw
        lengths = 2 * (d + q) + 2 * (d + kv) + (3 if shape.activation == "swiglu" else 2) * (d + ffw)
        vocabularies = round(self.outer / self.vocabulary)
        vectors = self.params - self.layers * self.matrices - vocabularies * self.vocabulary
        return 4 * (self.layers * lengths + vocabularies * (shape.vocab_size + d) + vectors // over)

    def _batch(self) -> int:
        """Ids and targets of 8 bytes, documents of 4."""
        return 20 * self.most_rows * self.stream.seq_len // self.settings.layout.context

    def _gathered(self, layers: int, on_the_way: int) -> int:
        if not self.sharded:
            return 0
        # Where a rank has several stages, torch frees nothing between their micro-batches.
        every = self.settings.layout.data == "zero2" or self.settings.layout.stages > 1
        layers = (self.layers if every else layers) + (on_the_way if self.shards > 1 else 0)
        return self.width * (self.outer + layers * self.layer)

    def _unreduced(self) -> int:
        """The first gradient of a layer, at its largest moment; those of the layer before are on their way by then."""
        if not self.sharded:
            return 0
        before = 4 * self.layer * (1 + 1 / self.shards) - self.stream.kept(self._mode())
        if self.layers == 1 or self.settings.layout.pipeline > 1:  # a pipeline reduces once, behind all micro-batches
            before = 0
        return self.width * self.shape.d_model * self.shape.d_ffw // self.settings.layout.tensor + max(0, round(before))

    def _unreduced_outside(self) -> int:
        """At the end: both gradients of a tied matrix, or those of the outermost part and what is sent of them."""
        tied = 2 * self._head() if self.shape.tie_embeddings else 0
        if not self.sharded:
            return tied // 2
        return max(tied + 4 * self.layer, (self.width + 4) * self.outer)

    def _activations(self) -> int:
        kept = self.in_flight * self.layers * self.stream.kept(self._mode())
        if self.settings.layout.activation_checkpointing == "budget":
            kept = self.kept_of_layers(self.recomputed())
        return round(kept) + self._outside() + self.stream.mask()

    def kept_of_layers(self, recomputed: int) -> int:
        """What the layers keep if so many of them compute everything again."""
        stream, chosen = self.stream, min(recomputed, self.layers)
        return round(self.in_flight * ((self.layers - chosen) * stream.saved() + chosen * stream.kept("full")))

    def recomputed(self) -> int:
        """How many layers compute everything again, so that the rank keeps no more than the budget; all, if need be."""
        budget = self.settings.layout.activation_budget or 0
        return next((n for n in range(self.layers) if self.kept_of_layers(n) <= budget), self.layers)

    def _outside(self) -> int:
        """What the last norm keeps."""
        a_token = self.stream.norm(self.shape.d_model) // self.settings.layout.tensor
        return a_token * self.stream.tokens if self.ends else 0

    def _mode(self) -> str:
        mode = self.settings.layout.activation_checkpointing
        return "full" if mode == "budget" else mode

    def _temporaries(self) -> int:
        again = self.stream.saved() - self.stream.kept(self._mode())
        return self.stream.temporary() + max(0, again)

    def _head(self) -> int:
        """The gradient of the output matrix."""
        return (self.width if self.sharded else 4) * self.vocabulary if self.ends else 0

    def _head_stream(self) -> int:
        """The stream behind the last norm, of all positions that its loss is computed of."""
        return self.width * self.stream.tokens * self.shape.d_model if self.ends else 0

    def _logits(self) -> int:
        """Logits of one chunk, the gradient of the output matrix, and in 16 bits what is added to it.

        Compiled, the loss needs no copy of the logits in float32.
        """
        if not self.ends:
            return 0
        chunk = min(self.settings.layout.chunk_on("cuda" if self.stream.cuda else "cpu"), self.stream.tokens)
        columns = padded_columns(self.vocabulary // self.shape.d_model, self.stream.cuda)
        copy = 0 if self.width == 4 or self.settings.layout.compile else 4
        logits = chunk * columns * (self.width + copy)
        # Where columns are filled up, so is a copy of the matrix.
        filled = self.width * columns * self.shape.d_model if columns * self.shape.d_model > self.vocabulary else 0
        product = self.width * self.vocabulary if self.width < 4 else 0
        matrix = self.width * self.vocabulary if self.stream.autocast else 0
        return logits + 4 * self.vocabulary + product + matrix + filled

    def _transfer(self) -> int:
        """What torch's pipeline receives into, for all micro-batches of a step; and the errors."""
        layout = self.settings.layout
        if layout.pipeline == 1:
            return self._errors()
        return round((2 * self.micro_batches + self.in_flight) * self.stream.stream_bytes()) + self._errors()

    def _errors(self) -> int:
        """What a lossy compression holds back, and what it will once the update is made."""
        lossy = self.settings.layout.compress in ("powersgd", "topk", "randomk") and self.replicas > 1
        return 8 * self.params // self.shards if lossy else 0

    def _update(self) -> int:
        optim, layout = self.settings.optim, self.settings.layout
        gather = 2 * min(BUCKET, 4 * self.params) if layout.data == "zero1" and self.replicas > 1 else 0
        largest = max(self.vocabulary, self.matrices // 3)
        if optim.optimizer == "adafactor":
            return max(gather, 4 * largest // self.shards)
        if optim.optimizer == "muon":
            number = min(CHUNK, self.layers * self.matrices // self.shards)
            return max(gather, 3 * (4 if optim.muon_precision == "fp32" else 2) * number)
        return gather
