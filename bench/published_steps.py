"""Steps whose speed others have published with their layout: what a prediction for a GPU can be held against.

Sources: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (H100 of 500 W with slower memory); llm-foundry,
scripts/train/benchmarking/README.md; fms-fsdp, README.md (A100). Their code is not ours: flash attention, fused losses,
activations kept; so what is compared is the level and the order, not the digits.
"""

from dataclasses import dataclass, field
from typing import Any

from train.model.shape import ModelShape


@dataclass(frozen=True)
class Published:
    """A measured speed."""

    name: str
    device: str
    shape: ModelShape
    nodes: int
    seq_len: int
    rows: int
    """Sequences of a step."""
    speed: float
    """Tokens/s of a GPU."""
    layout: dict[str, Any] = field(default_factory=dict)


def mpt(num_layers: int, d_model: int, heads: int) -> ModelShape:
    """MPT: GELU, one matrix for both embeddings."""
    return ModelShape(
        vocab_size=50368,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=d_model // heads,
        d_ffw=4 * d_model,
        activation="gelu",
        tie_embeddings=True,
    )


def llama(vocab_size: int, num_layers: int, d_model: int, heads: tuple[int, int], d_ffw: int) -> ModelShape:
    """Llama; `heads` of queries and of keys."""
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=d_model // heads[0],
        d_ffw=d_ffw,
        tie_embeddings=False,
    )


LLAMA_8B = llama(128256, 32, 4096, (32, 8), 14336)
LLAMA_70B = llama(128256, 80, 8192, (64, 8), 28672)
LLAMA_405B = llama(128256, 126, 16384, (128, 8), 53248)
MPT_760M, MPT_1B, MPT_3B = mpt(24, 1536, 12), mpt(24, 2048, 16), mpt(32, 2560, 20)
MPT_7B, MPT_13B, MPT_30B, MPT_70B = mpt(32, 4096, 32), mpt(40, 5120, 40), mpt(48, 7168, 56), mpt(80, 8192, 64)
H100, A100 = "h100-sxm", "a100-80gb"
COMPILED, SELECTIVE = {"compile": True}, {"activation_checkpointing": "selective"}
FULL = {"activation_checkpointing": "full"}
PUBLISHED = (
    Published("torchtitan 8B", H100, LLAMA_8B, 1, 8192, 16, 5762, {"micro_batch": 2} | SELECTIVE),
    Published("torchtitan 8B compiled", H100, LLAMA_8B, 1, 8192, 16, 6667, {"micro_batch": 2} | SELECTIVE | COMPILED),
    Published("torchtitan 8B, 128", H100, LLAMA_8B, 16, 8192, 256, 5605, {"micro_batch": 2} | SELECTIVE),
    Published(
        "torchtitan 8B compiled, 128", H100, LLAMA_8B, 16, 8192, 256, 6514, {"micro_batch": 2} | SELECTIVE | COMPILED
    ),
    Published("MPT 760M", H100, MPT_760M, 1, 2048, 384, 63147, {"micro_batch": 24}),
    Published("MPT 1B", H100, MPT_1B, 1, 2048, 112, 45455, {"micro_batch": 14}),
    Published("MPT 1B, 64", H100, MPT_1B, 8, 2048, 1280, 44402, {"micro_batch": 20}),
    Published("MPT 1B x 8192", H100, MPT_1B, 1, 8192, 96, 29157, {"micro_batch": 3}),
    Published("MPT 3B x 4096", H100, MPT_3B, 1, 4096, 240, 20964, {"micro_batch": 5}),
    Published("MPT 7B", H100, MPT_7B, 1, 2048, 48, 10643, {"micro_batch": 6}),
    Published("MPT 7B x 8192", H100, MPT_7B, 1, 8192, 128, 6935, {"micro_batch": 8} | FULL),
    Published("MPT 13B", H100, MPT_13B, 1, 2048, 16, 4792, {"micro_batch": 2}),
    Published("MPT 13B x 4096", H100, MPT_13B, 1, 4096, 240, 4717, {"micro_batch": 10} | FULL),
    Published("MPT 30B, 32", H100, MPT_30B, 4, 2048, 1344, 2308, {"micro_batch": 14} | FULL),
    Published("MPT 70B, 64", H100, MPT_70B, 8, 2048, 2048, 1039, {"micro_batch": 8} | FULL),
    Published(
        "fms 7B, 128 A100",
        A100,
        llama(32000, 32, 4096, (32, 32), 11008),
        16,
        4096,
        256,
        3760,
        {"micro_batch": 2, "replicate": 16},
    ),
    Published(
        "fms 13B, 128 A100",
        A100,
        llama(32000, 40, 5120, (40, 40), 13824),
        16,
        4096,
        128,
        1700,
        {"micro_batch": 1, "replicate": 16},
    ),
    Published(
        "fms 34B, 128 A100",
        A100,
        llama(32000, 48, 8192, (64, 8), 22016),
        16,
        4096,
        1024,
        772,
        {"micro_batch": 8} | FULL,
    ),
    Published(
        "fms 70B, 128 A100",
        A100,
        llama(32000, 80, 8192, (64, 8), 28672),
        16,
        4096,
        768,
        380,
        {"micro_batch": 6} | FULL,
    ),
)
"""In bf16 with FSDP."""
BEYOND = (
    Published(
        "torchtitan 70B, tensor 8 (fp8 there)",
        H100,
        LLAMA_70B,
        32,
        8192,
        512,
        829,
        {"micro_batch": 16, "tensor": 8} | FULL | COMPILED,
    ),
    Published(
        "torchtitan 405B, 1F1B (fp8 there)",
        H100,
        LLAMA_405B,
        64,
        8192,
        256,
        100,
        {"micro_batch": 1, "tensor": 8, "pipeline": 8} | FULL | COMPILED,
    ),
    Published(
        "torchtitan 405B, interleaved (fp8 there)",
        H100,
        LLAMA_405B,
        64,
        8192,
        256,
        128,
        {"micro_batch": 1, "tensor": 8, "pipeline": 8, "schedule": "interleaved"} | FULL | COMPILED,
    ),
)
"""In fp8 with asynchronous tensor parallelism, which this trainer does not have: predicted in bf16, shown beside."""
