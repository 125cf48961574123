"""FLOPs of a sequence as Hoffmann et al. count them, term by term, embedding, softmax and logits included.

Source: Hoffmann et al. 2022, arXiv 2203.15556, appendix F. Their Table A4 holds to the printed digits only where the
embedding and the logits are left out of the FLOPs, though not of N; `ends` chooses.
"""

from train.model.shape import ModelShape

SOURCE = "Hoffmann et al. 2022, arXiv 2203.15556, appendix F"


def forward_flops(shape: ModelShape, seq_len: int, ends: bool = True) -> int:
    """FLOPs of one sequence forward, the whole square of attention; `ends`: with the embedding and the logits.

    Shared key heads and a gate, which the paper does not have, are counted likewise; norms, biases and positions are
    not, as there.
    """
    d, q, kv, s = shape.d_model, shape.query_width, shape.key_width, seq_len
    projections = 2 * s * d * (q + 2 * kv) + 2 * s * q * d
    square = 2 * s * s * q + 3 * shape.num_heads * s * s + 2 * s * s * q
    matrices = 3 if shape.activation == "swiglu" else 2
    layers = shape.num_layers * (projections + square + 2 * s * matrices * d * shape.d_ffw)
    return layers + (4 * s * d * shape.vocab_size if ends else 0)


def training_flops(shape: ModelShape, seq_len: int, ends: bool = True) -> int:
    """FLOPs of one sequence forward and backward, three times the forward ones."""
    return 3 * forward_flops(shape, seq_len, ends)
