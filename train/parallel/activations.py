"""What a layer of the model keeps for its backward pass, counted tensor by tensor.

Counts are of the code as it is: on a CPU RMSNorm is composed of operations that keep float32, on a CUDA device it is a
kernel that does not. Documents in a row cost no mask where attention takes them as blocks or in tiles. A compiled layer
keeps less. Source of the method: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1.
"""

from dataclasses import dataclass

from train.config.settings import Settings
from train.model.shape import ModelShape, matrix_params_of_layer


@dataclass(frozen=True)
class Stream:
    """A micro-batch as one rank sees it, and the number format that it is computed in."""

    shape: ModelShape
    settings: Settings
    seq_len: int
    """Positions of a whole row."""
    rows: int
    """Rows of a micro-batch."""
    width: int
    """Bytes of a number in products of matrices."""
    autocast: bool
    """Whether weights and residual stream are float32 although products are not (ddp and zero1)."""
    cuda: bool
    """Whether it runs on a CUDA device."""

    @property
    def tokens(self) -> int:
        """Positions of the micro-batch that this rank computes."""
        return self.rows * self.seq_len // self.settings.layout.context

    @property
    def residual(self) -> int:
        """Bytes of a number in the residual stream."""
        return 4 if self.autocast else self.width

    def stream_bytes(self) -> int:
        """The residual stream between two layers."""
        return self.residual * self.tokens * self.shape.d_model // self.settings.layout.tensor

    def saved(self) -> int:
        """What one layer saves if nothing is computed again."""
        shape, layout, width = self.shape, self.settings.layout, self.width
        q, kv = shape.query_width, shape.key_width
        gated = shape.activation == "swiglu"
        # Autocast makes a copy of the input for each matrix; elsewhere they share one, also where its parts are
        # gathered for the tensor axis.
        inputs = (3 + (2 if gated else 1)) if self.autocast else 2
        numbers = 2 * q + 2 * kv * self._repeats() + (4 if gated else 2) * shape.d_ffw
        if layout.context > 1 and layout.context_by == "heads":
            numbers += q  # what attention gives, before and behind its way back to the positions
        a_token = (
            2 * self.norm(shape.d_model) // layout.tensor
            + width * inputs * shape.d_model
            + width * numbers // layout.tensor
            + 4 * shape.num_heads // layout.tensor  # log Z of each query
        )
        if shape.qk_norm:
            a_token += (shape.num_heads + shape.num_kv_heads) * self.norm(shape.head_dim) // layout.tensor
        if shape.positions == "relative":
            # Copies of q for both products, wide and scaled, and of every key and value that several heads share.
            a_token += (12 - width) * q + 2 * width * (q - kv) + self._square_of_a_token()
        weights = width * matrix_params_of_layer(shape) if self.autocast else 0
        return self.tokens * a_token + self._mask() + weights

    def kept(self, recompute: str) -> int:
        """What one layer keeps until its backward pass: all of it, or its input, or that and the products of it."""
        if recompute == "none":
            return self.saved()
        if recompute == "full":
            return self.stream_bytes()
        shape, tensor = self.shape, self.settings.layout.tensor
        inner = 2 * shape.query_width + 2 * shape.key_width
        inner += (2 if shape.activation == "swiglu" else 1) * shape.d_ffw
        products = self.width * (2 * shape.d_model + inner // tensor) + 4 * shape.num_heads // tensor
        if shape.positions == "relative":
            products += 2 * self._square_of_a_token()
        return self.stream_bytes() + self.tokens * products

    def temporary(self) -> int:
        """Gradients of activations that exist at once in a layer's backward pass: its largest moment."""
        shape, tensor = self.shape, self.settings.layout.tensor
        d, q, kv = shape.d_model, shape.query_width, shape.key_width
        # What comes back from the last matrix takes the place of what that matrix has saved.
        feed_forward = self.width * ((2 if shape.activation == "swiglu" else 1) * shape.d_ffw // tensor + d)
        attention = self.width * ((3 * q + 4 * kv) // tensor + d)
        norm = (self.width if self.cuda else 16) * d // tensor
        if shape.positions == "relative":
            attention += 3 * self._square_of_a_token()
        return self.tokens * max(feed_forward, attention, norm) + self.stream_bytes() + 2 * self._mask()

    def norm(self, width: int) -> int:
        """Bytes that RMSNorm saves of a position: its input and what it is scaled by; composed, the normalised too."""
        return (self.residual if self.cuda else 8) * width + 4

    def mask(self) -> int:
        """The mask of the rows, once for all layers: a number for each pair, or a byte with relative positions."""
        return self._pairs() * (1 if self.shape.positions == "relative" else self.width)

    def _mask(self) -> int:
        """What a layer makes of it: with relative positions its opposite."""
        return self._pairs() if self.shape.positions == "relative" else 0

    def _pairs(self) -> int:
        """Pairs of this rank's positions and of keys where a mask must be written out."""
        layout, train = self.settings.layout, self.settings.train
        by_keys = layout.context > 1 and layout.context_by == "keys"
        relative = self.shape.positions == "relative"
        whole = layout.context if layout.context > 1 and not by_keys else 1
        if train.document_mask and (by_keys or relative):
            return self.tokens * whole * self.seq_len
        if (by_keys or relative) and train.objective != "mlm":
            return self.tokens * self.seq_len // self.rows
        return 0

    def _square_of_a_token(self) -> int:
        """Scores of relative positions, float32: no kernel computes attention with them without the square."""
        return 4 * self.shape.num_heads * self.seq_len

    def _repeats(self) -> int:
        """How often keys and values are held: gathered whole, or repeated until every rank has a head."""
        shape, layout = self.shape, self.settings.layout
        if layout.context == 1:
            return 1
        if layout.context_by == "keys":
            return layout.context
        shared = shape.num_kv_heads // layout.tensor % layout.context == 0
        return 1 if shared else shape.num_heads // shape.num_kv_heads
